// two_jobs.hpp: the two jobs of AntMan's tables 1 and 2 (Xiao et al., "AntMan: Dynamic Scaling on GPU Clusters for Deep
// Learning", OSDI 2020) under five ways to share one device of 32 GB.
//
// The text gives arrivals, bytes, quotas, and the minutes of each way. It follows that A takes 43.0 min alone (FIFO)
// and B 91.1 min alone (preempt). The rest is assumed and stated in TwoJobsModel.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gpushare::sim {

struct TwoJobsModel {
  double a_work_min = 43.0, b_work_min = 91.1, b_arrival_min = 26;
  double a_gb = 3.5, b_gb = 30, device_gb = 32;
  // Assumed: lengths of B's iterations and their jitter.
  double b_iteration_s = 1, jitter = 0.01;
  // B beside A running all the time. AntMan's B loses 0.7 min while A does its last 17.0 min of work.
  double b_rate = 17.0 / 17.7;
  // A beside B. AntMan's A takes 17.9 min for them: all of it by contention is 17.0 / 17.9; all by AntMan's own throttling is 1.
  double a_rate = 1;
  // Unified memory: the bytes that B touches in an iteration and does not find on the device come over the link, and as
  // many go back.
  double link_gb_per_s = 12;
  double target_slowdown = 0.05;  // of B, for ours
};

struct TwoJobsResult {
  std::string way;
  double a_min = 0, b_min = 0;  // completion, from arrival; 0: failed
  double printed_a_min = 0, printed_b_min = 0;
  std::string note;
};

// preempt, FIFO, pack, unified memory, AntMan's row as ours is to be compared with it.
std::vector<TwoJobsResult> run_two_jobs(const TwoJobsModel& model);

}  // namespace gpushare::sim
