// profile.hpp: what was learned about an image's layers from executions, and the transmission plan that follows.
//
// Execution times come in for runs of layers, because a stream is not marked at each layer. A run's time is divided
// among its layers in proportion to their estimates, or to their bytes where there are no estimates yet. Each estimate
// then moves a quarter of the way. A plan is kept until the optimum under the present estimates is better by kWorth of
// the makespan, so that runs stay comparable.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "base/mutex.hpp"
#include "base/status.hpp"
#include "loader/grouping.hpp"

namespace gpushare::loader {

// Costs of a device's copies and launches, for plan_groups.
struct LinkCosts {
  double call_overhead_ms = 0;  // of one copy, whatever its size
  double bytes_per_ms = 0;
  double group_overhead_ms = 0;  // of making a stream wait for an event and launching on it
  // Bandwidth of copies within the device. 0: unknown; such a copy is then assumed to cost one call and nothing
  // more.
  double device_bytes_per_ms = 0;

  // Time to send this number of bytes, without the cost of calls, limited to 64 bits; 0 where the link is
  // unknown.
  uint64_t send_ns(uint64_t bytes) const;
  // Time to copy a prefix on the device; 0 without a prefix.
  double device_copy_ms(uint64_t bytes) const;
  // The costs for a plan. The stream first copies `copied_bytes` on the device and then sends the rest; until the copy
  // is done, neither the link nor the lane has anything to do.
  GroupingCosts grouping(uint32_t resident_layers = 0, uint64_t copied_bytes = 0) const;
};

// Thread-safe.
class Profile {
 public:
  static constexpr double kWeight = 0.25;  // of a new observation
  static constexpr double kWorth = 0.02;   // the part of the makespan that a new plan must gain

  explicit Profile(std::vector<uint64_t> layer_bytes) : bytes_(std::move(layer_bytes)) {}

  // Layers [first, end) took `ms` together. Ignored if there are no such layers, or it is no time.
  void observe(uint32_t first, uint32_t end, double ms);
  uint64_t observations() const;
  // Execution time of each layer. Empty before the first observation. Layers never observed are assumed to
  // execute as fast, per byte, as the observed ones.
  std::vector<double> execution_ms() const;

  // Costs of each layer. A layer that was not observed is assumed to execute as long as its transmission takes.
  std::vector<LayerCost> costs(const LinkCosts& link) const;
  // Group ends for these costs, with the first `resident_layers` on the device, `copied_bytes` of them to be copied there.
  // Errors: plan_groups's.
  base::Result<std::vector<uint32_t>> plan(const LinkCosts& link, uint32_t resident_layers = 0,
                                           uint64_t copied_bytes = 0);
  // Times that a plan was replaced by a better one.
  uint64_t replans() const;

 private:
  std::vector<double> execute_locked() const GPUSHARE_REQUIRES(mutex_);
  std::vector<LayerCost> costs_locked(const LinkCosts& link) const GPUSHARE_REQUIRES(mutex_);

  const std::vector<uint64_t> bytes_;
  mutable base::Mutex mutex_;
  std::vector<double> estimates_ GPUSHARE_GUARDED_BY(mutex_);  // negative: never observed; empty: none
  uint64_t observations_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  uint64_t replans_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  std::map<uint32_t, std::vector<uint32_t>> ends_ GPUSHARE_GUARDED_BY(mutex_);  // by resident layers
};

}  // namespace gpushare::loader
