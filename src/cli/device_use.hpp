// device_use.hpp: what a measured run has on the device at every instant, told by the device itself: functions that run
// in stream order at the begin and the end of each iteration's work. They give the bytes in use, their peak and its
// holders, and how long lanes stand idle between iterations.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "memory/device_memory.hpp"

namespace gpushare::cli {

// A block is in use from the begin of the first device work that may touch it to the end of the last: a job's model
// while the job is on the device, an iteration's blocks while the iteration runs. Not thread-safe: the caller locks.
class DeviceUse {
 public:
  struct Block {
    uint64_t address = 0;
    uint64_t bytes = 0;
  };
  static constexpr uint32_t kNoLane = UINT32_MAX;

  // `job` counts from 1. `apart_bytes` is what the job would hold were nothing shared: its P + E.
  void model_arrived(uint64_t job, const std::vector<Block>& blocks, uint64_t apart_bytes);
  // The job's persistent blocks have left the device: freed or paged out. Does nothing if they were not there.
  void model_left(uint64_t job);
  std::vector<uint64_t> jobs() const;

  // The work of an iteration begins; `enqueued_ns` is when its turn was granted. `lane` is any value that names the lane.
  void work_began(uint64_t job, uint64_t lane, const std::vector<Block>& blocks, uint64_t enqueued_ns,
                  uint64_t now_ns);
  void work_ended(uint64_t lane, uint64_t now_ns);

  uint64_t bytes() const { return bytes_; }
  // True if more is in use than ever before: the caller then removes paged-out sessions and calls keep_peak().
  bool is_above_peak() const { return bytes_ > peak_bytes_; }
  void keep_peak();

  uint64_t peak_bytes() const { return peak_bytes_; }
  uint64_t most_inside() const { return most_inside_; }
  uint64_t most_apart_bytes() const { return most_apart_bytes_; }
  // Median time in ns that a lane stood idle before the first work of another job, or before more work of the same,
  // counting only work that was enqueued before the lane became idle: what the hand-over costs, not the wait for work.
  // -1: none was seen.
  double switch_ns() const { return median(switch_gaps_); }
  double stay_ns() const { return median(stay_gaps_); }
  uint64_t switches_seen() const { return switch_gaps_.size(); }

  // The owners of memory at the peak; `names[job - 1]` is a job's name. A segment is a run of neighbouring
  // blocks of one job's model or of one lane.
  memory::MemorySnapshot peak(uint64_t capacity_bytes, const std::vector<std::string>& names) const;

 private:
  struct Held {
    uint64_t bytes = 0;
    uint64_t job = 0;
    uint32_t lane = kNoLane;
  };
  struct Model {
    std::vector<Block> blocks;
    uint64_t apart_bytes = 0;
  };
  struct Lane {
    uint32_t number = 0;  // in order of appearance
    std::vector<Block> blocks;
    uint64_t last_job = 0;
    uint64_t last_end_ns = 0;
  };
  void hold(const std::vector<Block>& blocks, uint64_t job, uint32_t lane);
  void drop(const std::vector<Block>& blocks);
  static double median(std::vector<uint64_t> values);

  std::map<uint64_t, Held> held_;  // by address
  std::map<uint64_t, Model> models_;
  std::map<uint64_t, Lane> lanes_;
  uint64_t bytes_ = 0;
  uint64_t apart_bytes_ = 0;
  uint64_t peak_bytes_ = 0;
  uint64_t most_inside_ = 0;
  uint64_t most_apart_bytes_ = 0;
  std::map<uint64_t, Held> peak_;
  std::vector<uint64_t> switch_gaps_, stay_gaps_;
};

}  // namespace gpushare::cli
