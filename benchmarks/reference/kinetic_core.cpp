// SPDX-License-Identifier: Apache-2.0
#include "reference/kinetic_core.hpp"

#include <algorithm>

namespace gpushare::reference {
namespace {

// A crossing is computed from rounded numbers; asking a little early costs one needless repair, asking late a
// wrong winner.
constexpr double kEarly = 1 - 8 * std::numeric_limits<double>::epsilon();

}  // namespace

KineticCore::Leaf KineticCore::empty_leaf() {
  Leaf leaf;
  std::fill_n(leaf.alpha, kNodeWidth, 0.0);
  std::fill_n(leaf.beta, kNodeWidth, kAbsent);
  return leaf;
}

KineticCore::Inner KineticCore::empty_inner() {
  Inner inner;
  std::fill_n(inner.alpha, kNodeWidth, 0.0);
  std::fill_n(inner.beta, kNodeWidth, kAbsent);
  std::fill_n(inner.until, kNodeWidth, std::numeric_limits<double>::infinity());
  std::fill_n(inner.slot, kNodeWidth, 0u);
  return inner;
}

void KineticCore::clear() {
  leaves_.clear();
  levels_.clear();
  root_ = Winner();
}

// One more leaf, and the blocks above it that do not exist yet.
void KineticCore::grow(uint32_t slot) {
  while (leaves_.size() <= slot / kNodeWidth) {
    leaves_.push_back(empty_leaf());
    size_t below = leaves_.size();
    for (size_t level = 0; below > 1; ++level) {
      const size_t needed = (below + kNodeWidth - 1) / kNodeWidth;
      if (level == levels_.size()) {
        // A new root: what was the root is its first entry, not yet computed.
        levels_.emplace_back();
        levels_[level].push_back(empty_inner());
        levels_[level][0].until[0] = kMarked;
      }
      if (levels_[level].size() < needed) levels_[level].push_back(empty_inner());
      below = needed;
    }
  }
}

// The path from the leaf to the root is to be computed anew, as far as it is not marked already.
void KineticCore::mark(size_t leaf) {
  size_t index = leaf;
  for (std::vector<Inner>& level : levels_) {
    double& until = level[index / kNodeWidth].until[index % kNodeWidth];
    if (until == kMarked) return;
    until = kMarked;
    index /= kNodeWidth;
  }
  root_.until = kMarked;
}

// The leaf's winner holds until `until` at most; so do those above it.
void KineticCore::shorten(size_t leaf, double until) {
  size_t index = leaf;
  for (std::vector<Inner>& level : levels_) {
    double& promised = level[index / kNodeWidth].until[index % kNodeWidth];
    if (promised <= until) return;
    promised = until;
    index /= kNodeWidth;
  }
  root_.until = std::min(root_.until, until);
}

void KineticCore::put(uint32_t slot, double alpha, double beta) {
  const size_t leaf = slot / kNodeWidth;
  if (leaf >= leaves_.size()) {
    grow(slot);
    root_.until = kMarked;
  }
  leaves_[leaf].alpha[slot % kNodeWidth] = alpha;
  leaves_[leaf].beta[slot % kNodeWidth] = beta;
  if (levels_.empty()) {  // one leaf: its winner is the root
    root_.until = kMarked;
    return;
  }
  const Inner& above = levels_[0][leaf / kNodeWidth];
  const size_t at = leaf % kNodeWidth;
  if (above.until[at] == kMarked) return;
  // Behind the leaf's winner now, it changes nothing but when that must be looked at again.
  const double mine = alpha * last_w_ + beta, winning = above.alpha[at] * last_w_ + above.beta[at];
  if (!(mine < winning || (mine == winning && alpha <= above.alpha[at]))) {
    mark(leaf);
  } else if (alpha > above.alpha[at]) {
    shorten(leaf, (above.beta[at] - beta) / (alpha - above.alpha[at]) * kEarly);
  }
}

void KineticCore::remove(uint32_t slot) {
  const size_t leaf = slot / kNodeWidth;
  leaves_[leaf].alpha[slot % kNodeWidth] = 0;
  leaves_[leaf].beta[slot % kNodeWidth] = kAbsent;
  if (levels_.empty()) {
    root_.until = kMarked;
    return;
  }
  const Inner& above = levels_[0][leaf / kNodeWidth];
  const size_t at = leaf % kNodeWidth;
  // Bounds that were computed with this point are now only too careful.
  if (above.slot[at] == slot) mark(leaf);
#if defined(__GNUC__)
  // An insert often follows, into the same place.
  __builtin_prefetch(&above.alpha[at]);
  __builtin_prefetch(&above.beta[at]);
  __builtin_prefetch(&above.until[at]);
#endif
}

KineticCore::Winner KineticCore::repair(size_t level, size_t index, double w) {
  Winner winner;
  if (level == 0) {
    const Leaf& leaf = leaves_[index];
    const size_t at = kernels_->node(leaf.alpha, leaf.beta, w, &winner.until);
    winner.alpha = leaf.alpha[at];
    winner.beta = leaf.beta[at];
    winner.slot = static_cast<uint32_t>(index * kNodeWidth + at);
  } else {
    Inner& inner = levels_[level - 1][index];
    for (unsigned due = kernels_->at_most(inner.until, w); due != 0; due &= due - 1) {
      const size_t child = static_cast<size_t>(__builtin_ctz(due));
      const Winner below = repair(level - 1, index * kNodeWidth + child, w);
      inner.alpha[child] = below.alpha;
      inner.beta[child] = below.beta;
      inner.until[child] = below.until;
      inner.slot[child] = below.slot;
    }
    const size_t at = kernels_->node(inner.alpha, inner.beta, w, &winner.until);
    winner.alpha = inner.alpha[at];
    winner.beta = inner.beta[at];
    winner.slot = inner.slot[at];
    winner.until = std::min(winner.until * kEarly, kernels_->least(inner.until));
    return winner;
  }
  winner.until *= kEarly;
  return winner;
}

uint32_t KineticCore::best(double w, double* value) {
  if (w < last_w_) {
    // Time went back: no promise made later holds earlier.
    for (size_t level = 0, below = leaves_.size(); level < levels_.size(); ++level) {
      for (size_t i = 0; i < below; ++i) levels_[level][i / kNodeWidth].until[i % kNodeWidth] = kMarked;
      below = levels_[level].size();
    }
    root_.until = kMarked;
  }
  last_w_ = w;
  if (root_.until <= w) root_ = repair(levels_.size(), 0, w);
  *value = root_.alpha * w + root_.beta;
  return root_.slot;
}

}  // namespace gpushare::reference
