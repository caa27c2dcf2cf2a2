// prefix.hpp: how many of a model's first layers should stay on the device while it is on standby. Nothing executes
// before the first layer is there, and no grouping hides that layer's transmission. A prefix that stays on the device
// hides it. The transmission plan tells how much a prefix saves. The choice is the smallest prefix with which a load
// takes longer than a fully resident model by at most the aimed time.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "base/status.hpp"
#include "loader/grouping.hpp"
#include "loader/profile.hpp"

namespace gpushare::loader {

// The aim: the first output comes later than with all layers on the device by at most this part of the load
// time.
inline constexpr double kStandbyAim = 0.05;

struct PrefixLimits {
  uint64_t most_bytes = UINT64_MAX;
  uint64_t granule_bytes = 256;  // its bytes are rounded up to
  // The costs of copies on the device, if a load copies the prefix there first; null: the prefix is used where it lies.
  const LinkCosts* copied = nullptr;
};

struct PrefixChoice {
  uint32_t layers = 0;  // 0: no prefix is wanted, or no allowed one saves anything
  uint64_t bytes =
      0;  // from the first layer's first byte, with the padding between layers, of whole granules
  // Predicted: the optimal plan with the prefix, less the execution with all layers on the device.
  double overhead_ms = 0;
  double saves_ms = 0;  // the part of the overhead without a prefix that it saves
};

// The smallest prefix whose predicted overhead, the copy on the device included, is at most kStandbyAim of the load
// time. If no allowed prefix reaches that: the smallest of the best ones (with copies: within a sixteenth of the
// possible saving), if it saves at least a fifth of kStandbyAim. O(log n) transmission plans, with copies some times as
// many. Errors: plan_groups's.
base::Result<PrefixChoice> choose_prefix(std::span<const LayerCost> layers, const GroupingCosts& costs,
                                         const PrefixLimits& limits);

}  // namespace gpushare::loader
