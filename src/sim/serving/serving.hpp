// serving.hpp: runs a batcher over a list of requests on virtual time: one device that takes a batch after
// another, as the batcher decides, and c0 + c1 k max l for each. Deterministic.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "base/status.hpp"
#include "sched/slo/batcher.hpp"
#include "sim/serving/requests.hpp"

namespace gpushare::sim {

struct ServingOptions {
  double c0_ns = 0;
  double c1 = 1;
  double slo_x_p99 = 2;  // deadline = arrival + this x the P99 execution time, where the request brings none
  double p99_ns = 0;     // 0: of the requests
  size_t warm_samples =
      256;  // execution times told to the batcher beforehand for each application: its offline profile
  size_t warm_from = 0;  // the offline profile sees only the first so many requests; 0 = all
  bool profile = true;   // tell the execution time of each finished request (the online profiler)
  bool infer = false;    // instead tell the duration of each batch alone: what its members took is inferred
  bool told_batch_time = true;  // the batcher starts from c0 and c1; otherwise from 0 and 1
  bool labels = true;           // tell the batcher each request's application; otherwise all are of one
  bool features = false;        // tell the batcher each request's features
  bool model_per_application = false;  // each application is a model of its own on the device
  // Batches deviate from c0 + c1 k max l: a lognormal factor of this deviation, and so many of them stall for so long.
  double noise = 0;
  double stall_share = 0;
  double stall_ns = 0;
  double profile_scale = 1;  // execution times told beforehand are this many times the true ones
  uint64_t noise_seed = 1;
  bool time_decisions = false;
  std::vector<uint32_t> batch_sizes{1, 2, 4, 8, 16};
  sched::slo::BatcherOptions batcher;
  uint64_t decision_cost_ns = 0;  // virtual time from a decision to the start of its batch
};

struct ServingResult {
  uint64_t requests = 0;
  uint64_t finished_in_time = 0;
  uint64_t finished_late = 0;
  std::array<uint64_t, sched::slo::kDropReasons> dropped{};
  double finish_rate = 0;    // in time / all
  double goodput_per_s = 0;  // in time / from the first arrival to the last end
  double p50_ms = 0;         // latency of what finished, late or not
  double p99_ms = 0;
  uint64_t batches = 0;
  double mean_batch = 0;
  double busy_share = 0;              // of the device's time, rejected batches take none
  std::vector<uint64_t> batch_sizes;  // how often each size ran; index 0 unused
  double decision_us = 0;             // wall time of one next(); only with time_decisions
  uint64_t decisions = 0;
  uint64_t most_pending = 0;
  sched::slo::Signals signals;  // at the end of the last batch
  uint64_t drops() const {
    uint64_t sum = 0;
    for (uint64_t each : dropped) sum += each;
    return sum;
  }
};

// Errors: those of make_batcher and add_model; INTERNAL if a request was lost or answered twice.
base::Result<ServingResult> serve(const std::vector<TimedRequest>& requests, std::string_view policy,
                                  const ServingOptions& options);

}  // namespace gpushare::sim
