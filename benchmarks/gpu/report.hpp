// report.hpp: samples, their medians and spread, and the three forms of the result.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace gpushare::gpu_suite {

// Median with the 10th and 90th percentile of repeated samples.
struct Figure {
  double median = 0;
  double low = 0;
  double high = 0;
  uint64_t samples = 0;
};
// Not empty.
Figure summarise(std::vector<double> samples);

struct Row {
  std::string group;  // "1 allocation"
  std::string what;   // "alloc + free, 64 KiB"
  std::string by;     // "gpushare", "cuMemAllocAsync"
  std::string unit;
  Figure figure;
};

class Report {
 public:
  void add(const std::string& group, const std::string& what, const std::string& by, const std::string& unit,
           std::vector<double> samples);
  // What could not be measured here, with the reason.
  void skip(const std::string& group, const std::string& what, const std::string& reason);

  std::string device;
  std::string driver;
  std::string date;
  std::string label;  // "GPU", or "stand-in" when the figures say nothing about a GPU

  std::string table() const;
  std::string json() const;
  std::string markdown() const;
  bool empty() const { return rows_.empty(); }

 private:
  struct Skipped {
    std::string group;
    std::string what;
    std::string reason;
  };
  std::vector<Row> rows_;
  std::vector<Skipped> skipped_;
};

// Runs `body` `repeats` times after one warm-up and returns the host time of each run, in microseconds, over `calls`.
std::vector<double> time_host_us(int repeats, double calls, const std::function<void()>& body);

}  // namespace gpushare::gpu_suite
