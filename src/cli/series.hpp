// series.hpp: values over time in bounded memory, for charts of runs of any length.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gpushare::cli {

// A value over time, averaged over equal buckets of time. When time outgrows the buckets, neighbours merge
// and buckets get twice as long: always between kBuckets / 2 and kBuckets of them, whatever the run's length,
// and their integral is exact.
class Series {
 public:
  static constexpr size_t kBuckets = 480;
  struct Bucket {
    double mean = 0;
    double max = 0;
  };

  // The value is `value` from now on. Times must not go back; earlier ones count as the latest.
  void set(uint64_t now_ns, double value);
  // Adds `value` over [start, end), on top of what is there, in any order of time: for "how many at once". Do
  // not mix with set.
  void add(uint64_t start_ns, uint64_t end_ns, double value = 1.0);
  // The last value held until `now_ns`.
  void finish(uint64_t now_ns) { set(now_ns, value_); }

  uint64_t bucket_ns() const { return bucket_ns_; }
  // From time 0; the last one may be partly covered, its mean is over the covered part when filled by set.
  std::vector<Bucket> buckets() const;
  double max() const { return max_; }

 private:
  struct Cell {
    double integral = 0;  // value times ns
    double max = 0;
    double covered_ns = 0;
  };
  void spread(uint64_t start_ns, uint64_t end_ns, double value, bool covers);
  void fold();

  std::vector<Cell> cells_;
  uint64_t bucket_ns_ = 1'000'000;
  uint64_t now_ns_ = 0;
  double value_ = 0;
  double max_ = 0;
};

}  // namespace gpushare::cli
