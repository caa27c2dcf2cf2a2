// contention.hpp: how fast works run that overlap on the simulated device. Pure functions of what runs; not
// thread-safe.
//
// Sharing (the default). A work asks for the share `demand` of the device. While the demands of all running
// works add up to at most 1, each runs at full speed; beyond that the device is shared in proportion to
// demand (processor sharing), so that n works of demand 1 run at 1/n each. More urgent streams are served
// first: a level of priority gets what the more urgent ones leave. With n works running, `overhead` divides
// every speed by 1 + overhead * (n - 1).
//
// Pair table. With measured speeds of co-located classes (as in
// Gavel's throughput tables) a work's speed is the product of its pair speeds with all others that run; a
// pair that was not measured counts 1 / max(1, sum of the two demands). Priorities and overhead do not enter
// then.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/flat_hash.hpp"
#include "base/status.hpp"

namespace gpushare::device::sim {

class ContentionModel {
 public:
  struct Load {
    uint32_t work_class = 0;
    double demand = 1;     // in (0, 1]
    int32_t priority = 0;  // numerically larger is less urgent
  };

  // mode: "share" or "none". `pairs`: "A:B:RA:RB,..." with classes from 1 and speeds in (0, 2]; empty for no
  // table. Errors: INVALID_ARGUMENT (the text that is wrong, and what is allowed).
  static base::Result<ContentionModel> create(std::string_view mode, double overhead, std::string_view pairs);

  // Writes the speed of each load, 1 = as when alone. At least one is above 0.
  void speeds(const std::vector<Load>& loads, std::vector<double>* out_speeds) const;

 private:
  void share(const std::vector<Load>& loads, std::vector<double>* out_speeds) const;
  double pair_speed(const Load& load, const Load& other) const;

  bool sharing_ = true;
  double overhead_ = 0;
  base::FlatHashMap<uint64_t, double> pairs_;  // (class, other class) -> speed of class
};

}  // namespace gpushare::device::sim
