// SPDX-License-Identifier: Apache-2.0
#include "reference/hull_core.hpp"

#include <algorithm>
#include <cstring>

namespace gpushare::reference {

// > 0 when c lies above the line through a and b, a left of b.
#define GPUSHARE_SLO_ABOVE(a, b, c) \
  (((b).alpha - (a).alpha) * ((c).beta - (a).beta) - ((b).beta - (a).beta) * ((c).alpha - (a).alpha))

struct HullCore::Cursor {
  const HullCore& tree;
  uint32_t ref;
  uint32_t low = 0, high = 0;  // of a leaf: the stretch of its hull
  Point a, b;                  // the middle edge; equal ends when one point is left

  Cursor(const HullCore& of, uint32_t at) : tree(of), ref(at) { enter(at); }
  bool single() const { return is_leaf(ref) && low == high; }
  void enter(uint32_t at) {
    ref = at;
    if (is_leaf(at)) {
      low = 0;
      high = tree.leaf(at).hull_count - 1u;
    }
    look();
  }
  void look() {
    if (!is_leaf(ref)) {
      a = tree.node(ref).left_end;
      b = tree.node(ref).right_end;
      return;
    }
    const Leaf& of = tree.leaf(ref);
    const uint32_t middle = (low + high) / 2;
    a = of.entries[of.hull[middle]].point;
    b = low == high ? a : of.entries[of.hull[middle + 1]].point;
  }
  void go_left() {
    if (!is_leaf(ref)) {
      enter(tree.node(ref).left);
      return;
    }
    high = (low + high) / 2;
    look();
  }
  void go_right() {
    if (!is_leaf(ref)) {
      enter(tree.node(ref).right);
      return;
    }
    low = (low + high) / 2 + 1;
    look();
  }
};

// The common tangent of the two children's hulls. Each step drops half of what is left on one side:
// c above the line ab: the tangent's left end is at or left of a. b above the line dc: its right end is at or
// right of d. Else the lines ab and cd cross; left of the split every right point lies under ab, so ab is an
// edge of the joint hull and the end is at or right of b; right of it the mirror image holds.
void HullCore::find_bridge(uint32_t ref) {
  Node& of = node(ref);
  Cursor left(*this, of.left), right(*this, of.right);
  while (true) {
    const bool left_done = left.single(), right_done = right.single();
    if (left_done && right_done) break;
    const Point &a = left.a, &b = left.b, &c = right.a, &d = right.b;
    if (!left_done && GPUSHARE_SLO_ABOVE(a, b, c) > 0) {
      left.go_left();
    } else if (!right_done && GPUSHARE_SLO_ABOVE(b, c, d) > 0) {
      right.go_right();
    } else if (left_done) {
      right.go_left();
    } else if (right_done) {
      left.go_right();
    } else {
      const double at_c = GPUSHARE_SLO_ABOVE(a, b, c);
      const double at_d = -GPUSHARE_SLO_ABOVE(a, b, d);
      // In coordinates relative to the split: far from zero the products would lose it.
      if (at_c + at_d == 0 || at_c * (d.alpha - of.split) + at_d * (c.alpha - of.split) < 0)
        left.go_right();
      else
        right.go_left();
    }
  }
  of.left_end = left.a;
  of.right_end = right.a;
}

void HullCore::find_leaf_hull(Leaf& of) {
  uint8_t held = 0;
  for (uint8_t i = 0; i < of.count; ++i) {
    const Point& next = of.entries[i].point;
    while (held >= 2 && GPUSHARE_SLO_ABOVE(of.entries[of.hull[held - 2]].point,
                                           of.entries[of.hull[held - 1]].point, next) >= 0)
      --held;
    of.hull[held++] = i;
  }
  of.hull_count = held;
}

uint32_t HullCore::new_leaf() {
  if (!free_leaves_.empty()) {
    const uint32_t index = free_leaves_.back();
    free_leaves_.pop_back();
    leaves_[index].count = leaves_[index].hull_count = 0;
    return leaf_ref(index);
  }
  leaves_.emplace_back();
  return leaf_ref(static_cast<uint32_t>(leaves_.size() - 1));
}

uint32_t HullCore::new_node() {
  if (!free_nodes_.empty()) {
    const uint32_t index = free_nodes_.back();
    free_nodes_.pop_back();
    return node_ref(index);
  }
  nodes_.emplace_back();
  return node_ref(static_cast<uint32_t>(nodes_.size() - 1));
}

void HullCore::clear() {
  *this = HullCore();
}

size_t HullCore::depth() const {
  size_t deepest = 0;
  std::vector<std::pair<uint32_t, size_t>> open;
  if (root_ != kNone) open.emplace_back(root_, 1);
  while (!open.empty()) {
    const auto [ref, depth] = open.back();
    open.pop_back();
    deepest = std::max(deepest, depth);
    if (is_leaf(ref)) continue;
    open.emplace_back(node(ref).left, depth + 1);
    open.emplace_back(node(ref).right, depth + 1);
  }
  return deepest;
}

// path_ = refs from the root to the leaf that holds, or would hold, alpha.
void HullCore::descend(double alpha) {
  path_.clear();
  uint32_t ref = root_;
  for (; !is_leaf(ref); ref = alpha <= node(ref).split ? node(ref).left : node(ref).right)
    path_.push_back(ref);
  path_.push_back(ref);
}

HullCore::Entry* HullCore::find(double alpha) {
  if (root_ == kNone) return nullptr;
  descend(alpha);
  Leaf& of = leaf(path_.back());
  Entry* const end = of.entries + of.count;
  Entry* const at =
      std::lower_bound(of.entries, end, alpha, [](const Entry& e, double x) { return e.point.alpha < x; });
  return at != end && at->point.alpha == alpha ? at : nullptr;
}

void HullCore::replace_child(size_t path_index, uint32_t by) {
  if (path_index == 0) {
    root_ = by;
    return;
  }
  Node& parent = node(path_[path_index - 1]);
  (parent.left == path_[path_index] ? parent.left : parent.right) = by;
}

// The full leaf at the end of path_ becomes a node over two halves. Hulls above stay the same: no point
// changed.
void HullCore::split_leaf(uint32_t ref) {
  const uint32_t upper = new_leaf();
  Leaf& low = leaf(ref);
  Leaf& high = leaf(upper);
  const uint8_t keep = low.count / 2;
  high.count = static_cast<uint8_t>(low.count - keep);
  std::copy(low.entries + keep, low.entries + low.count, high.entries);
  low.count = keep;
  find_leaf_hull(low);
  find_leaf_hull(high);
  const uint32_t above = new_node();
  Node& joined = node(above);
  joined.left = ref;
  joined.right = upper;
  joined.leaves = 2;
  joined.split = low.entries[keep - 1].point.alpha;
  find_bridge(above);
  replace_child(path_.size() - 1, above);
  for (size_t i = 0; i + 1 < path_.size(); ++i) ++node(path_[i]).leaves;
  path_.back() = above;
  rebalance();
}

void HullCore::flatten(uint32_t ref) {
  if (is_leaf(ref)) {
    order_.push_back(ref);
    return;
  }
  flatten(node(ref).left);
  flatten(node(ref).right);
  free_nodes_.push_back(ref >> 1);
}

uint32_t HullCore::build(size_t first, size_t last) {
  if (last - first == 1) return order_[first];
  const size_t middle = (first + last) / 2;
  const uint32_t left = build(first, middle);
  const uint32_t right = build(middle, last);
  const uint32_t ref = new_node();
  Node& of = node(ref);
  of.left = left;
  of.right = right;
  of.leaves = static_cast<uint32_t>(last - first);
  const Leaf& before = leaf(order_[middle - 1]);
  of.split = before.entries[before.count - 1].point.alpha;
  find_bridge(ref);
  return ref;
}

// Rebuilds the highest node on path_ one of whose sides has more than 70% of its leaves.
void HullCore::rebalance() {
  for (size_t i = 0; i < path_.size(); ++i) {
    if (is_leaf(path_[i])) return;
    const Node& of = node(path_[i]);
    const uint32_t most = std::max(leaves_under(of.left), leaves_under(of.right));
    if (of.leaves < 4 || most * 10 <= of.leaves * 7 + 10) continue;
    order_.clear();
    const uint32_t ref = path_[i];
    flatten(ref);
    replace_child(i, build(0, order_.size()));
    return;
  }
}

void HullCore::insert_point(const Entry& entry) {
  if (root_ == kNone) root_ = new_leaf();
  const Point& point = entry.point;
  descend(point.alpha);
  if (leaf(path_.back()).count == kLeafPoints) {
    split_leaf(path_.back());
    descend(point.alpha);
  }
  Leaf& of = leaf(path_.back());
  uint8_t at = of.count;
  while (at > 0 && of.entries[at - 1].point.alpha > point.alpha) --at;
  std::copy_backward(of.entries + at, of.entries + of.count, of.entries + of.count + 1);
  of.entries[at] = entry;
  ++of.count;
  find_leaf_hull(of);
  if (std::find(of.hull, of.hull + of.hull_count, at) == of.hull + of.hull_count) return;
  for (size_t i = path_.size() - 1; i-- > 0;) {
    Node& up = node(path_[i]);
    if (GPUSHARE_SLO_ABOVE(up.left_end, up.right_end, point) > 0) find_bridge(path_[i]);
    if (up.left_end.alpha < point.alpha && point.alpha < up.right_end.alpha) return;
  }
}

void HullCore::remove_point(double alpha) {
  Entry* const entry = find(alpha);  // sets path_
  Leaf& of = leaf(path_.back());
  const uint8_t at = static_cast<uint8_t>(entry - of.entries);
  const bool on_hull = std::find(of.hull, of.hull + of.hull_count, at) != of.hull + of.hull_count;
  std::copy(of.entries + at + 1, of.entries + of.count, of.entries + at);
  --of.count;
  size_t up_from = path_.size() - 1;
  if (of.count == 0) {
    // The leaf goes, and its parent: the sibling takes the parent's place.
    free_leaves_.push_back(path_.back() >> 1);
    if (path_.size() == 1) {
      root_ = kNone;
      return;
    }
    const uint32_t parent = path_[path_.size() - 2];
    const uint32_t sibling = node(parent).left == path_.back() ? node(parent).right : node(parent).left;
    replace_child(path_.size() - 2, sibling);
    free_nodes_.push_back(parent >> 1);
    --up_from;
    for (size_t i = 0; i < up_from; ++i) --node(path_[i]).leaves;
  } else {
    find_leaf_hull(of);
    if (!on_hull) return;
  }
  size_t i = up_from;
  while (i-- > 0) {
    Node& up = node(path_[i]);
    if (up.left_end.alpha < alpha && alpha < up.right_end.alpha) break;
    if (up.left_end.alpha == alpha || up.right_end.alpha == alpha) find_bridge(path_[i]);
  }
  if (of.count == 0) {
    path_.resize(up_from);
    rebalance();
  }
}

void HullCore::put(uint32_t slot, double alpha, double beta) {
  alpha += 0.0;  // -0 and 0 are one alpha
  if (slot >= points_.size()) points_.resize(slot + 1);
  points_[slot] = {alpha, beta};
  Entry* const same = find(alpha);
  if (same == nullptr) {
    insert_point({{alpha, beta}, slot, false});
    return;
  }
  auto& all = shared_[alpha];
  if (!same->shared) all.emplace(same->point.beta, same->slot);
  same->shared = true;
  all.emplace(beta, slot);
  if (same->slot == all.rbegin()->second) return;
  remove_point(alpha);
  insert_point({{alpha, beta}, slot, true});
}

void HullCore::remove(uint32_t slot) {
  const Point point = points_[slot];
  Entry* const entry = find(point.alpha);
  if (!entry->shared) {
    remove_point(point.alpha);
    return;
  }
  const auto all = shared_.find(point.alpha);
  all->second.erase({point.beta, slot});
  const auto [beta, next] = *all->second.rbegin();
  const bool still_shared = all->second.size() > 1;
  if (!still_shared) shared_.erase(all);
  if (entry->slot != slot) {
    entry->shared = still_shared;
    return;
  }
  remove_point(point.alpha);
  insert_point({{point.alpha, beta}, next, still_shared});
}

uint32_t HullCore::best(double w, double* value) const {
  uint32_t ref = root_;
  while (!is_leaf(ref)) {
    const Node& of = node(ref);
    ref = w * (of.right_end.alpha - of.left_end.alpha) + (of.right_end.beta - of.left_end.beta) > 0 ? of.right
                                                                                                    : of.left;
  }
  const Leaf& of = leaf(ref);
  const Entry* winner = &of.entries[of.hull[0]];
  double most = winner->point.alpha * w + winner->point.beta;
  for (uint8_t i = 1; i < of.hull_count; ++i) {
    const Entry& next = of.entries[of.hull[i]];
    const double candidate = next.point.alpha * w + next.point.beta;
    if (candidate > most) {
      most = candidate;
      winner = &next;
    }
  }
  *value = most;
  return winner->slot;
}

#undef GPUSHARE_SLO_ABOVE

}  // namespace gpushare::reference
