// igniter.hpp: iGniter (Xu et al., TPDS 2023), as section 5.1 of the thesis on interference-aware serving and the published V100
// measurements give it: an analytical model of a service's latency beside others, and a greedy placement that keeps
// half of each SLO.
//
//   solo       t_act(b, r) = (k1 b^2 + k2 b + k3) / (r + k4) + k5            b batch, r share of the SMs
//   cache      t_act times 1 + k_l2 x sum of the neighbours' L2 utilisation
//   scheduling t_sch = idle + kernels x (a_s p + b_s) for p >= 2 services on the device
//   clock      f = F + a_f (P - cap) where the sum of the power exceeds the cap
//   latency    t = (t_sch + t_act) / (f / F) + transfers
//
// The measurements become coefficients by least squares: relative errors of t_act, with k4 by a grid; L2 utilisation
// and power are linear in batch / t_act. The measurements of a pair are divided by its clock, so that the cache's part
// is counted once.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "cluster/fields.hpp"
#include "cluster/services/model.hpp"

namespace gpushare::cluster::services {

struct IgniterModel {
  double k1 = 0, k2 = 0, k3 = 0, k4 = 0, k5 = 0;
  double cache_slope = 0, cache_base = 0;  // L2 utilisation over b / t_act
  double power_slope = 0, power_base = 0;
  double cache_cost = 0;  // k_l2
  double idle_ms = 0;
  double kernels = 0;
  double input_bytes = 0, output_bytes = 0;  // a request

  double active_ms(double batch, double share) const {
    return (k1 * batch * batch + k2 * batch + k3) / (share + k4) + k5;
  }
};

struct IgniterProfile {
  double max_clock = 0, power_cap = 0, idle_power = 0, share_step = 0, bytes_per_ms = 0;
  double delay_slope = 0, delay_base = 0;  // a_s, b_s
  double clock_slope = 0;                  // a_f, at most 0
  std::unordered_map<std::string, IgniterModel> models;
};

// One service on a device.
struct IgniterTask {
  const IgniterModel* model = nullptr;
  double batch = 1;
  double share = 0;
};

// Reads the fields hardware, batches, shares and models, laid out as in the published measurements, and fits. Errors go
// to `fields`.
IgniterProfile read_igniter(Fields& fields);

// Latency of each task beside the others on a device of `speed`.
std::vector<double> igniter_latency_ms(const IgniterProfile& profile, const std::vector<IgniterTask>& tasks,
                                       double speed);

// Services that the devices cannot take, or whose model was not measured, are unserved.
Placement place_by_igniter(const IgniterProfile& profile, const std::vector<Service>& services,
                           const std::vector<Device>& devices);

}  // namespace gpushare::cluster::services
