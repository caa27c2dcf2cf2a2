// tree_best_fit.hpp: the packing reference of the device-memory benchmarks: exact best fit, ties to the
// lowest offset, with the holes in an ordered tree (the textbook scheme behind most caching allocators).
// O(log n). No part of the library; only benchmarks and tests use it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <utility>

namespace gpushare::reference {

class TreeBestFit {
 public:
  static constexpr uint64_t kNone = ~uint64_t{0};
  explicit TreeBestFit(uint64_t capacity) { add_hole(0, capacity); }

  // Returns the offset, or kNone.
  uint64_t allocate(uint64_t size) {
    const auto best = by_size_.lower_bound({size, 0});
    if (best == by_size_.end()) return kNone;
    const auto [hole_size, offset] = *best;
    by_size_.erase(best);
    by_offset_.erase(offset);
    if (hole_size != size) add_hole(offset + size, hole_size - size);
    return offset;
  }

  void free(uint64_t offset, uint64_t size) {
    auto next = by_offset_.lower_bound(offset);
    if (next != by_offset_.end() && next->first == offset + size) {
      size += next->second;
      next = drop_hole(next);
    }
    if (next != by_offset_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == offset) {
        offset = before->first;
        size += before->second;
        drop_hole(before);
      }
    }
    add_hole(offset, size);
  }

 private:
  using Holes = std::map<uint64_t, uint64_t>;
  void add_hole(uint64_t offset, uint64_t size) {
    by_size_.emplace(size, offset);
    by_offset_.emplace(offset, size);
  }
  Holes::iterator drop_hole(Holes::iterator hole) {
    by_size_.erase({hole->second, hole->first});
    return by_offset_.erase(hole);
  }

  std::set<std::pair<uint64_t, uint64_t>> by_size_;  // (size, offset)
  Holes by_offset_;                                  // offset -> size
};

}  // namespace gpushare::reference
