// move_budget.hpp: how many bytes move between the device and host memory at a time, and for how long. Others wait meanwhile: for a
// lane, for the turn, or for the bytes. The mover of granules, the executor and the preload library ask here. Needs no C++ runtime.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace gpushare::base {

// What moves at a boundary, or as one part of a page-out or page-in, where nothing else is set.
struct MoveBudget {
  static constexpr uint64_t kUnlimited = UINT64_MAX;
  uint64_t bytes = uint64_t{256} << 20;
  uint64_t ns = 10'000'000;  // kUnlimited: others do not wait
};

// Bytes that move one after the other within a budget.
class MovePart {
 public:
  MovePart(const MoveBudget& budget, uint64_t now_ns) : budget_(budget), since_ns_(now_ns) {}

  // How many more bytes may move now, in whole steps; 0: the part is over. The first step always moves. Later ones have what
  // the rest of the time is enough for, judged by those that have moved.
  uint64_t next(uint64_t now_ns, uint64_t step) const {
    if (moved_ == 0 && (budget_.ns != MoveBudget::kUnlimited || budget_.bytes < step)) return step;
    uint64_t bytes = budget_.bytes > moved_ ? budget_.bytes - moved_ : 0;
    if (budget_.ns != MoveBudget::kUnlimited) {
      const uint64_t spent_ns = now_ns - since_ns_;
      const uint64_t left_ns = budget_.ns > spent_ns ? budget_.ns - spent_ns : 0;
      const double fits = static_cast<double>(moved_) * static_cast<double>(left_ns) /
                          static_cast<double>(spent_ns > 0 ? spent_ns : 1);
      if (fits < static_cast<double>(bytes)) bytes = static_cast<uint64_t>(fits);
    }
    return bytes / step * step;
  }
  void moved(uint64_t bytes) { moved_ += bytes; }
  uint64_t moved_bytes() const { return moved_; }

 private:
  MoveBudget budget_;
  uint64_t since_ns_, moved_ = 0;
};

}  // namespace gpushare::base
