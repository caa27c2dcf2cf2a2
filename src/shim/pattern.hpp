// pattern.hpp: guesses where the iterations of a program begin, from the order of its launches.
//
// A program that repeats itself launches the same work between two launches of some kernel, time after time. The kernel
// for which that holds over the longest stretch marks its iterations: kernels of an inner loop come again sooner.
// Two stretches are alike if they have the same number of launches and the same sum of signatures.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace gpushare::shim {

// Zeros are a program that has launched nothing.
class LaunchPattern {
 public:
  static constexpr uint32_t kSignatures = 1024;

  // The next launch. True: an iteration begins with it.
  bool next(uint64_t signature) {
    const uint64_t mixed = mix(signature);
    const auto slot = static_cast<uint32_t>(mixed >> 32) % kSignatures;
    Seen& seen = seen_[slot];
    ++launches_;
    const uint64_t gap = launches_ - seen.at, sum = sum_ - seen.sum_before;
    const bool again = seen.at != 0 && gap == seen.gap && sum == seen.sum;
    seen = {launches_, sum_, gap, sum, again ? seen.repeats + 1 : 0};
    sum_ += mixed;
    if (seen.repeats < kRepeats || gap < kLeastGap) return false;
    if (slot != mark_ && (!holds(seen_[mark_]) || gap > seen_[mark_].gap)) mark_ = slot;
    return slot == mark_;
  }

 private:
  // A stretch counts when it has come again so often.
  static constexpr uint32_t kRepeats = 2;
  // Programs that launch one or two kernels over and over have no iterations that can be told apart.
  static constexpr uint64_t kLeastGap = 3;

  struct Seen {
    uint64_t at, sum_before;  // its last launch: number, and the sum before it
    uint64_t gap, sum;        // of the stretch that ended there
    uint32_t repeats;         // how often in a row that was as the stretch before
  };
  bool holds(const Seen& mark) const {
    return mark.repeats >= kRepeats && launches_ - mark.at <= 2 * mark.gap;
  }
  static uint64_t mix(uint64_t value) {
    value ^= value >> 33;
    value *= 0xff51afd7ed558ccdULL;
    value ^= value >> 29;
    return value * 0xc4ceb9fe1a85ec53ULL;
  }

  // Without values of their own: an object of static storage needs no constructor.
  uint64_t launches_, sum_;
  uint32_t mark_;
  Seen seen_[kSignatures];
};

}  // namespace gpushare::shim
