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
// `samples` is not empty.
Figure summarise(std::vector<double> samples);

struct Row {
  std::string group;  // "1 allocation"
  std::string what;   // "alloc + free, 64 KiB"
  std::string by;     // "gpushare", "cuMemAllocAsync"
  std::string unit;
  Figure figure;
};

// Says each row on stdout as it comes. With files set, they are written anew at each row, so that whatever ends the process
// early loses none.
class Report {
 public:
  // Either may be empty. `checks`: a file of lines for the page's end; need not exist.
  void keep_in(std::string json_path, std::string markdown_path, std::string checks_path);
  // Takes the rows that the JSON file has; false if there is none. Throws std::runtime_error if it is of another device
  // or driver, unless this report has none yet.
  bool load();
  // Drops the rows of a measurement.
  void forget(int measurement);
  // Throws std::runtime_error.
  void save();

  void add(const std::string& group, const std::string& what, const std::string& by, const std::string& unit,
           std::vector<double> samples);
  // Notes a measurement that is impossible here, with the reason.
  void skip(const std::string& group, const std::string& what, const std::string& reason);

  std::string device;
  std::string driver;
  std::string date;
  std::string label;  // "GPU", or "stand-in" when the figures say nothing about a GPU

  std::string header() const;
  std::string json() const;
  std::string markdown() const;
  bool empty() const { return rows_.empty(); }

 private:
  struct Skipped {
    std::string group;
    std::string what;
    std::string reason;
  };
  void sort();
  std::vector<Row> rows_;
  std::vector<Skipped> skipped_;
  std::string json_path_, markdown_path_, checks_path_;
  std::string said_;  // the last group that a row was said of
};

// Runs `body` `repeats` times after one warm-up and returns the host time of each run, in microseconds, over `calls`.
std::vector<double> time_host_us(int repeats, double calls, const std::function<void()>& body);

}  // namespace gpushare::gpu_suite
