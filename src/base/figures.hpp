// figures.hpp: figures of a session for readers: histograms of its iterations, and counts of its request queue. Any thread writes them, and
// any thread or process that maps them reads them, without locks. Nothing is decided by them. The header needs none of the
// project's libraries and no C++ runtime, since client/lease.hpp puts the figures into memory that a process shares with the daemon.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>

namespace gpushare::base {

// Upper bounds of the buckets. Longer iterations, and greater slowdowns, are in one more bucket.
inline constexpr uint64_t kIterationBoundsNs[] = {100'000,       500'000,       1'000'000,     2'500'000,
                                                  5'000'000,     10'000'000,    25'000'000,    50'000'000,
                                                  100'000'000,   250'000'000,   500'000'000,   1'000'000'000,
                                                  2'500'000'000, 5'000'000'000, 10'000'000'000};
inline constexpr uint64_t kSlowdownBoundsMilli[] = {1050, 1250,   1500,   2000,   3000,
                                                    5000, 10'000, 30'000, 100'000};
inline constexpr uint32_t kIterationBuckets = sizeof(kIterationBoundsNs) / sizeof(uint64_t) + 1;
inline constexpr uint32_t kSlowdownBuckets = sizeof(kSlowdownBoundsMilli) / sizeof(uint64_t) + 1;

// Iterations that were done, by their device time, and by their slowdown: the time from when the iteration was ready, over its
// device time. An iteration that waited for nothing has slowdown 1.
struct IterationCounts {
  uint64_t times[kIterationBuckets] = {};  // of each bucket alone
  uint64_t time_ns = 0;                    // sum
  uint64_t slowdowns[kSlowdownBuckets] = {};
  uint64_t slowdown_milli = 0;  // sum, in thousandths
};

class IterationHistogram {
 public:
  // `iterations` equal ones.
  void add(uint64_t device_ns, uint64_t waited_ns, uint64_t iterations = 1) {
    add_time(device_ns);
    if (iterations > 1) bump(times_[bucket_of(device_ns, kIterationBoundsNs)], iterations - 1);
    add_sums(device_ns * iterations, slowdown_of(device_ns, waited_ns), iterations);
  }
  // In parts: each iteration by add_time(), and later the sums of all that had the same slowdown.
  void add_time(uint64_t device_ns) { bump(times_[bucket_of(device_ns, kIterationBoundsNs)], 1); }
  void add_sums(uint64_t device_ns, uint64_t slowdown_milli, uint64_t iterations) {
    bump(time_ns_, device_ns);
    bump(slowdown_milli_, slowdown_milli * iterations);
    // Last, and read first: no slowdown is below 1, so that a reader never finds more of them than their sum.
    slowdowns_[bucket_of(slowdown_milli, kSlowdownBoundsMilli)].fetch_add(iterations,
                                                                          std::memory_order_release);
  }
  IterationCounts read() const {
    IterationCounts out;
    for (uint32_t i = 0; i < kIterationBuckets; ++i) out.times[i] = times_[i].load(std::memory_order_relaxed);
    for (uint32_t i = 0; i < kSlowdownBuckets; ++i)
      out.slowdowns[i] = slowdowns_[i].load(std::memory_order_acquire);
    out.time_ns = time_ns_.load(std::memory_order_relaxed);
    out.slowdown_milli = slowdown_milli_.load(std::memory_order_relaxed);
    return out;
  }
  void reset() {
    for (auto& each : times_) each.store(0, std::memory_order_relaxed);
    for (auto& each : slowdowns_) each.store(0, std::memory_order_relaxed);
    time_ns_.store(0, std::memory_order_relaxed);
    slowdown_milli_.store(0, std::memory_order_relaxed);
  }
  // In thousandths. Without device time: 1, as nothing can be said; and a million at most, so that sums stay sound.
  static uint64_t slowdown_of(uint64_t device_ns, uint64_t waited_ns) {
    constexpr double kMost = 1e9;
    if (device_ns == 0) return 1000;
    const double milli = 1000 + 1000 * (static_cast<double>(waited_ns) / static_cast<double>(device_ns));
    return static_cast<uint64_t>(milli < kMost ? milli : kMost);
  }

 private:
  using Count = std::atomic<uint64_t>;
  template <uint32_t kBounds>
  static uint32_t bucket_of(uint64_t value, const uint64_t (&bounds)[kBounds]) {
    uint32_t bucket = 0;
    while (bucket < kBounds && value > bounds[bucket]) ++bucket;
    return bucket;
  }
  static void bump(Count& count, uint64_t by) { count.fetch_add(by, std::memory_order_relaxed); }

  Count times_[kIterationBuckets] = {};
  Count time_ns_{0};
  Count slowdowns_[kSlowdownBuckets] = {};
  Count slowdown_milli_{0};
};

// The requests of a queue since it was created.
struct RequestCounts {
  uint64_t offered = 0;  // to the queue: accepted and refused
  uint64_t in_time = 0;
  uint64_t late = 0;
  uint64_t failed = 0;   // with their batch
  uint64_t refused = 0;  // at submit: queue full, or hopeless
  uint64_t dropped = 0;  // expired, hopeless, or rejected by the device
  uint64_t cancelled = 0;
  uint64_t pending = 0;  // now, not yet in a batch
  double predicted_miss_rate = 0;
  double price_per_s = 0;
};

class RequestFigures {
 public:
  void set(const RequestCounts& counts) {
    for (uint32_t i = 0; i < kWhole; ++i) whole_[i].store(counts.*kFields[i], std::memory_order_relaxed);
    miss_rate_.store(counts.predicted_miss_rate, std::memory_order_relaxed);
    price_.store(counts.price_per_s, std::memory_order_relaxed);
  }
  RequestCounts read() const {
    RequestCounts out;
    for (uint32_t i = 0; i < kWhole; ++i) out.*kFields[i] = whole_[i].load(std::memory_order_relaxed);
    out.predicted_miss_rate = miss_rate_.load(std::memory_order_relaxed);
    out.price_per_s = price_.load(std::memory_order_relaxed);
    return out;
  }

 private:
  static constexpr uint64_t RequestCounts::*kFields[] = {
      &RequestCounts::offered, &RequestCounts::in_time, &RequestCounts::late,      &RequestCounts::failed,
      &RequestCounts::refused, &RequestCounts::dropped, &RequestCounts::cancelled, &RequestCounts::pending};
  static constexpr uint32_t kWhole = sizeof(kFields) / sizeof(kFields[0]);
  std::atomic<uint64_t> whole_[kWhole] = {};
  std::atomic<double> miss_rate_{0}, price_{0};
};
static_assert(std::atomic<double>::is_always_lock_free);

}  // namespace gpushare::base
