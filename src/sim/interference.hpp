// interference.hpp: how fast iterations run when lanes run together: from a table of measured pairs, and
// where it has none, from a contention model.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.hpp"
#include "sched/interference.hpp"
#include "sim/job.hpp"

namespace gpushare::sim {

// Measured pairs. Layout (Gavel): {device: {"('config', scale)": {"null": steps/s alone, "('other', scale)":
// [steps/s of this, steps/s of the other], ...}}}. Only scale 1 (one GPU) is kept; rates of 0 mean "could not
// run" there and count as unmeasured.
class InterferenceTable {
 public:
  // Errors: MALFORMED_INPUT naming file, place and what is expected; NOT_FOUND for a device that it lacks
  // (lists those it has).
  static base::Result<InterferenceTable> parse(std::string_view text, const std::string& file,
                                               const std::string& device = "p100");
  // Errors: also IO_ERROR, NOT_FOUND (no such file). Blocks on the disk. Files above 64 MiB are refused.
  static base::Result<InterferenceTable> read(const std::string& path, const std::string& device = "p100");

  static constexpr size_t kNone = static_cast<size_t>(-1);
  size_t find(std::string_view config) const;  // kNone if it has no such configuration
  double alone_steps_per_s(size_t config) const { return alone_[config]; }
  // Speed of `config` beside `other` relative to alone; 0 when the pair was not measured.
  double pair_rate(size_t config, size_t other) const { return pairs_[config * alone_.size() + other]; }
  size_t size() const { return alone_.size(); }
  std::vector<std::string> names() const;  // of the configurations, by index
  const std::string& device() const { return device_; }

 private:
  std::string device_;
  std::map<std::string, size_t, std::less<>> index_;
  std::vector<double> alone_;
  std::vector<double> pairs_;
};

// The speed of sessions that run together. For session i beside a set S:
//   slowdown_i = max(1, d_i + sum of d_j over unmeasured j in S) + sum over measured j in S of (1 / r_ij - 1)
//   rate_i = 1 / slowdown_i
// i.e. measured slowdowns add up (k jobs that halve each other get 1/k each), and jobs without measurement
// share compute in proportion: no cost until their demands d exceed the device, then plain time slicing.
//
// Demand, when a job does not say: 0.93, from Salus (2.5.2): 300 resnet50_50 packed gave 1.07x the throughput
// of one at a time, so one keeps 1/1.07 of the device busy. superres (2.38x): 0.42.
class InterferenceModel final : public sched::Interference {
 public:
  static constexpr double kDefaultDemand = 0.93;
  static constexpr double kSuperresDemand = 0.42;

  // `table` may be null, and is not kept. Sessions have ids 1..jobs.size() in the order of `jobs`.
  InterferenceModel(std::span<const Job> jobs, const InterferenceTable* table);
  double rate(sched::SessionId session, std::span<const sched::SessionId> beside) const override;
  size_t jobs_in_table() const { return in_table_; }

 private:
  struct Entry {
    double demand = 0;
    size_t config = InterferenceTable::kNone;
  };
  std::vector<Entry> entries_;
  std::vector<double> pairs_;  // copied from the table, rate of row beside column
  size_t configs_ = 0;
  size_t in_table_ = 0;
};

}  // namespace gpushare::sim
