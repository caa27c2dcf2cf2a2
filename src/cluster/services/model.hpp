// model.hpp: services with deadlines, the ways to run them, and where their replicas are placed.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cluster/model/device.hpp"

namespace gpushare::cluster::services {

// How much of a device's compute a kernel takes, as the profile measures it: achieved occupancy, weighted achieved
// occupancy, weighted SM utilisation (seed: thesis on interference-aware serving, chapter 4).
enum class Metric { kAo, kWao, kWsm };
inline constexpr size_t kMetrics = 3;
inline constexpr const char* kMetricFields[kMetrics] = {"ao_percent", "wao_percent", "wsm_percent"};

// Profiled on a device of speed 1.
struct Configuration {
  uint32_t batch = 1;
  double latency_ms = 0;
  double throughput_rps = 0;
  double memory_percent = -1;                                   // of the profiled device; or
  double memory_bytes = -1;                                     // one of the two is given
  std::array<double, kMetrics> compute_percent = {-1, -1, -1};  // below 0: not measured
  bool of_kernels = false;                                      // the document lists its kernels

  // Of the device's memory; a percentage is of the same there, until profiled_on() has said what it is of.
  void profiled_on(const Device& device) {
    if (memory_percent < 0) return;
    memory_bytes = memory_percent / 100 * static_cast<double>(device.memory_bytes);
    memory_percent = -1;
  }
  double memory_fraction(const Device& device) const {
    return memory_bytes >= 0 ? memory_bytes / static_cast<double>(device.memory_bytes) : memory_percent / 100;
  }
};

struct Service {
  std::string name;
  std::string model;  // of the measurements; the name unless said
  double rate_rps = 0;
  double slo_ms = 0;
  std::vector<Configuration> configurations;
};

struct Replica {
  size_t service = 0;
  size_t device = 0;
  uint32_t batch = 1;
  double share_percent = 0;
  double throughput_rps = 0;  // there
  double latency_ms = 0;      // predicted there
};

// The result of a solver.
struct Placement {
  std::vector<Replica> replicas;
  double goodput_rps = 0;
  double bound_rps = 0;  // no placement serves more under the same rules
  bool optimal = false;
  // For each service that got nothing: the reason.
  std::vector<std::pair<size_t, std::string>> unserved;
};

}  // namespace gpushare::cluster::services
