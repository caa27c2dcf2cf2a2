// SPDX-License-Identifier: Apache-2.0
#include "memory/exact_placement.hpp"

#include <algorithm>
#include <numeric>

namespace gpushare::memory {
namespace {

class Search {
 public:
  Search(std::span<const PlacementItem> items, uint32_t capacity, const std::function<bool()>& stopped);
  // An attempt from scratch, which takes equal items in the order of `rank`.
  ExactOutcome run(const std::vector<uint32_t>& rank, uint64_t work_limit, uint64_t* work);
  const std::vector<uint32_t>& offsets() const { return offsets_; }
  // Static orders of the items: which of their length, area and neighbourhood counts first.
  std::vector<uint32_t> ranks(int order) const;
  static constexpr int kOrders = 6;

 private:
  // Consecutive instants at which as much as possible lives: the largest sets of items that share an instant.
  struct Clique {
    std::vector<uint32_t> items;
  };
  struct Undo {
    uint32_t item;
    uint32_t floor;  // kPlaced: the item was placed; else its floor before
  };
  static constexpr uint32_t kPlaced = UINT32_MAX;
  static constexpr uint64_t kAskEvery = uint64_t{1} << 16;

  bool solve(const std::vector<uint32_t>& open, uint32_t last_offset, uint32_t last_rank);
  bool solve_parts(const std::vector<uint32_t>& open, uint32_t last_offset, uint32_t last_rank,
                   bool* out_split);
  bool hopeless(const std::vector<uint32_t>& open, uint32_t last_offset);
  bool put(uint32_t item);
  bool gives_up();
  void undo_to(size_t mark);

  std::span<const PlacementItem> items_;
  const uint32_t capacity_;
  std::vector<std::vector<uint32_t>> neighbours_;  // alive together
  std::vector<Clique> cliques_;
  std::vector<uint32_t> first_clique_, last_clique_;  // of each item; last exclusive
  std::vector<uint32_t> by_start_;
  std::vector<uint32_t> rank_;
  std::vector<uint32_t> floor_;  // the top of what is placed under the item
  std::vector<uint32_t> offsets_;
  std::vector<bool> placed_;
  std::vector<Undo> undo_;
  const std::function<bool()>& stopped_;
  uint64_t work_ = 0;
  uint64_t work_limit_ = 0;
  uint64_t ask_at_ = 0;  // work from which on stopped_ is asked again
};

Search::Search(std::span<const PlacementItem> items, uint32_t capacity, const std::function<bool()>& stopped)
    : items_(items), capacity_(capacity), stopped_(stopped) {
  const auto count = static_cast<uint32_t>(items.size());
  neighbours_.resize(count);
  for (uint32_t i = 0; i < count; ++i)
    for (uint32_t j = 0; j < count; ++j)
      if (i != j && items[i].lower < items[j].upper && items[j].lower < items[i].upper)
        neighbours_[i].push_back(j);
  by_start_.resize(count);
  std::iota(by_start_.begin(), by_start_.end(), 0u);
  std::sort(by_start_.begin(), by_start_.end(),
            [&](uint32_t a, uint32_t b) { return items[a].lower < items[b].lower; });
  // A start after which something ends before the next start.
  first_clique_.assign(count, UINT32_MAX);
  last_clique_.assign(count, 0);
  for (uint32_t k = 0; k < count; ++k) {
    const uint32_t start = items[by_start_[k]].lower;
    if (k + 1 < count && items[by_start_[k + 1]].lower == start) continue;
    const uint32_t next = k + 1 < count ? items[by_start_[k + 1]].lower : UINT32_MAX;
    Clique clique;
    bool ends = false;
    for (uint32_t i = 0; i < count; ++i) {
      if (items[i].lower > start || items[i].upper <= start) continue;
      clique.items.push_back(i);
      ends = ends || items[i].upper <= next;
    }
    if (!ends) continue;
    const auto number = static_cast<uint32_t>(cliques_.size());
    for (const uint32_t i : clique.items) {
      first_clique_[i] = std::min(first_clique_[i], number);
      last_clique_[i] = number + 1;
    }
    cliques_.push_back(std::move(clique));
  }
}

std::vector<uint32_t> Search::ranks(int order) const {
  struct Key {
    uint64_t length, area, crowd;
  };
  std::vector<Key> keys(items_.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    // Lengths are counted in cliques: the number of frees and allocations in between says less.
    keys[i].length = last_clique_[i] - first_clique_[i];
    keys[i].area = keys[i].length * items_[i].size;
    keys[i].crowd = 0;
  }
  for (const Clique& clique : cliques_) {
    uint64_t sum = 0;
    for (const uint32_t i : clique.items) sum += items_[i].size;
    for (const uint32_t i : clique.items) keys[i].crowd = std::max(keys[i].crowd, sum);
  }
  using Member = uint64_t Key::*;
  static constexpr Member kLength = &Key::length, kArea = &Key::area, kCrowd = &Key::crowd;
  static constexpr Member kBy[kOrders][3] = {{kLength, kArea, kCrowd}, {kCrowd, kArea, kLength},
                                             {kCrowd, kLength, kArea}, {kArea, kLength, kCrowd},
                                             {kArea, kCrowd, kLength}, {kLength, kCrowd, kArea}};
  std::vector<uint32_t> sorted(items_.size()), rank(items_.size());
  std::iota(sorted.begin(), sorted.end(), 0u);
  std::sort(sorted.begin(), sorted.end(), [&](uint32_t a, uint32_t b) {
    for (const Member by : kBy[order])
      if (keys[a].*by != keys[b].*by) return keys[a].*by > keys[b].*by;
    return a < b;
  });
  for (size_t k = 0; k < sorted.size(); ++k) rank[sorted[k]] = static_cast<uint32_t>(k);
  return rank;
}

ExactOutcome Search::run(const std::vector<uint32_t>& rank, uint64_t work_limit, uint64_t* work) {
  rank_ = rank;
  floor_.assign(items_.size(), 0);
  offsets_.assign(items_.size(), 0);
  placed_.assign(items_.size(), false);
  undo_.clear();
  work_ = 0;
  work_limit_ = work_limit;
  ask_at_ = kAskEvery;
  const bool found = solve(by_start_, 0, 0);
  *work += work_;
  if (found) return ExactOutcome::kFound;
  return work_ > work_limit_ ? ExactOutcome::kGaveUp : ExactOutcome::kImpossible;
}

// Places `item` on its floor; false if something then no longer fits.
bool Search::put(uint32_t item) {
  const uint32_t top = floor_[item] + items_[item].size;
  offsets_[item] = floor_[item];
  placed_[item] = true;
  undo_.push_back({item, kPlaced});
  work_ += neighbours_[item].size();
  for (const uint32_t other : neighbours_[item]) {
    if (placed_[other] || floor_[other] >= top) continue;
    undo_.push_back({other, floor_[other]});
    floor_[other] = top;
    if (top + items_[other].size > capacity_) return false;
  }
  return true;
}

bool Search::gives_up() {
  if (stopped_ && work_ >= ask_at_) {
    ask_at_ = work_ + kAskEvery;
    if (stopped_()) work_limit_ = 0;
  }
  return work_ > work_limit_;
}

void Search::undo_to(size_t mark) {
  for (; undo_.size() > mark; undo_.pop_back()) {
    if (undo_.back().floor == kPlaced)
      placed_[undo_.back().item] = false;
    else
      floor_[undo_.back().item] = undo_.back().floor;
  }
}

// At some instant, the lowest place left plus what is still to be placed exceeds the capacity.
bool Search::hopeless(const std::vector<uint32_t>& open, uint32_t last_offset) {
  uint32_t first = UINT32_MAX, last = 0;
  for (const uint32_t i : open) {
    first = std::min(first, first_clique_[i]);
    last = std::max(last, last_clique_[i]);
  }
  for (uint32_t k = first; k < last; ++k) {
    uint32_t lowest = UINT32_MAX;
    uint64_t sum = 0;
    work_ += cliques_[k].items.size();
    for (const uint32_t i : cliques_[k].items) {
      if (placed_[i]) continue;
      lowest = std::min(lowest, std::max(floor_[i], last_offset));
      sum += items_[i].size;
    }
    if (sum > 0 && lowest + sum > capacity_) return true;
  }
  return false;
}

// If the open items fall apart in time, solves each part, small ones first.
bool Search::solve_parts(const std::vector<uint32_t>& open, uint32_t last_offset, uint32_t last_rank,
                         bool* out_split) {
  std::vector<std::vector<uint32_t>> parts;
  uint32_t end = 0;
  for (const uint32_t i : open) {
    if (parts.empty() || items_[i].lower >= end) parts.emplace_back();
    parts.back().push_back(i);
    end = std::max(end, items_[i].upper);
  }
  *out_split = parts.size() > 1;
  if (!*out_split) return false;
  std::stable_sort(parts.begin(), parts.end(),
                   [](const auto& a, const auto& b) { return a.size() < b.size(); });
  return std::all_of(parts.begin(), parts.end(),
                     [&](const auto& part) { return solve(part, last_offset, last_rank); });
}

// `open`: what is left of a part, by start. Everything else of it is placed, the last item at last_offset. On
// failure the caller undoes.
bool Search::solve(const std::vector<uint32_t>& open, uint32_t last_offset, uint32_t last_rank) {
  if (open.empty()) return true;
  bool split = false;
  const bool solved = solve_parts(open, last_offset, last_rank, &split);
  if (split) return solved;
  work_ += open.size();
  if (gives_up() || hopeless(open, last_offset)) return false;
  // An item that begins at or above this offset leaves room below for a whole item, which could be placed there
  // instead.
  uint32_t bound = UINT32_MAX;
  for (const uint32_t i : open) bound = std::min(bound, floor_[i] + items_[i].size);
  std::vector<uint32_t> candidates;
  for (const uint32_t i : open) {
    // At the same offset the order is that of the ranks: others were tried already.
    const bool in_order = floor_[i] > last_offset || (floor_[i] == last_offset && rank_[i] >= last_rank);
    if (in_order && floor_[i] < bound) candidates.push_back(i);
  }
  std::sort(candidates.begin(), candidates.end(), [&](uint32_t a, uint32_t b) {
    return floor_[a] != floor_[b] ? floor_[a] < floor_[b] : rank_[a] < rank_[b];
  });
  const size_t mark = undo_.size();
  std::vector<uint32_t> rest;
  rest.reserve(open.size());
  for (const uint32_t item : candidates) {
    if (put(item)) {
      rest.clear();
      std::copy_if(open.begin(), open.end(), std::back_inserter(rest),
                   [item](uint32_t i) { return i != item; });
      if (solve(rest, offsets_[item], rank_[item])) return true;
    }
    undo_to(mark);
    if (gives_up()) return false;
  }
  return false;
}

}  // namespace

ExactOutcome place_exactly(std::span<const PlacementItem> items, uint32_t capacity, uint64_t work_limit,
                           uint64_t* work, std::vector<uint32_t>* out_offsets,
                           const std::function<bool()>& stopped) {
  Search search(items, capacity, stopped);
  const uint64_t end = *work + work_limit;
  // Rounds of growing effort: an order that suits an instance solves it soon, another may never.
  for (uint64_t effort = uint64_t{1} << 24;; effort *= 4) {
    for (int order = 0; order < Search::kOrders; ++order) {
      if (*work >= end || (stopped && stopped())) return ExactOutcome::kGaveUp;
      const ExactOutcome outcome = search.run(search.ranks(order), std::min(effort, end - *work), work);
      if (outcome == ExactOutcome::kGaveUp) continue;
      if (outcome == ExactOutcome::kFound) *out_offsets = search.offsets();
      return outcome;
    }
  }
}

}  // namespace gpushare::memory
