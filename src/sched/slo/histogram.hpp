// histogram.hpp: the known execution times of an application: the last `window` of them, counted in
// logarithmic buckets (32 an octave, so within 1.6%, and exact where a bucket holds one value). Recording is
// logarithmic in the buckets in use, and memory is proportional to them. Two histograms merge; a text form survives
// restarts; a shift of the distribution is noticed and the old part forgotten (000, 4.3.2 "resets its profiling
// memory").
//
// Threads: none of its own; the owner serialises calls.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.hpp"
#include "sched/slo/distribution.hpp"

namespace gpushare::sched::slo {

struct HistogramOptions {
  size_t window = 2048;  // durations remembered, 1 to 2^20
  size_t drift_samples =
      64;  // how many of the newest are compared with the rest; 0 turns drift detection off
  double drift_alpha = 1e-5;  // false-alarm probability of one comparison (Kolmogorov-Smirnov)
};

class Histogram {
 public:
  // Options outside their range are brought into it.
  explicit Histogram(HistogramOptions options = {});

  // Records a measured duration. Zero counts as one nanosecond, and more than 2^40 ns (18 minutes) as 2^40 ns.
  void record(uint64_t duration_ns);
  // Adds the other's durations, in its order, after these.
  void merge(const Histogram& other);
  void reset();
  // Forgets all but the newest `n`; counts as a drift.
  void keep_newest(size_t n);

  size_t count() const { return held_; }
  // Raised by every record, merge and reset.
  uint64_t version() const { return version_; }
  // How often drift was noticed.
  uint64_t drifts() const { return drifts_; }
  const HistogramOptions& options() const { return options_; }
  // The durations in the window; empty when none.
  Distribution distribution(size_t bins) const;

  // "gpushare-histogram 1 <window> <count> <bucket>..." oldest first: buckets, not exact durations.
  std::string serialize() const;
  // Errors: MALFORMED_INPUT naming the word that is wrong.
  static base::Result<Histogram> parse(std::string_view text, HistogramOptions options = {});

  static constexpr size_t kBucketsPerOctave = 32;
  static constexpr size_t kBuckets = 36 * kBucketsPerOctave;
  static size_t bucket_of(uint64_t duration_ns);
  static double bucket_low_ns(size_t bucket);

 private:
  struct Bucket {
    uint16_t index = 0;
    uint32_t count = 0;
    uint64_t low_ns = 0;   // the smallest since the bucket was last empty
    uint64_t high_ns = 0;  // the largest since then
  };
  // The bucket, made if new.
  Bucket& bucket_at(uint16_t index);
  const Bucket& bucket_in_use(uint16_t index) const;
  void push(uint16_t bucket, uint64_t low_ns, uint64_t high_ns);
  void drop_oldest(size_t n);
  void look_for_drift();
  size_t position(size_t age_from_oldest) const { return (oldest_ + age_from_oldest) % ring_.size(); }

  HistogramOptions options_;
  std::vector<uint16_t> ring_;   // grows up to the window
  std::vector<Bucket> buckets_;  // that were ever in use, ascending
  size_t oldest_ = 0;
  size_t held_ = 0;
  size_t since_look_ = 0;
  uint64_t version_ = 0;
  uint64_t drifts_ = 0;
};

}  // namespace gpushare::sched::slo
