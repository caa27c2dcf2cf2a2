// SPDX-License-Identifier: Apache-2.0
#include "loader/prefix.hpp"

#include <algorithm>
#include <vector>

#include "loader/image.hpp"

namespace gpushare::loader {
namespace {

uint64_t round_up(uint64_t value, uint64_t to) {
  return (value + to - 1) / to * to;
}

}  // namespace

base::Result<PrefixChoice> choose_prefix(std::span<const LayerCost> layers, const GroupingCosts& costs,
                                         const PrefixLimits& limits) {
  std::vector<uint64_t> bytes = {0};  // of the first i layers
  uint64_t end = 0;
  double load_ms = costs.call_overhead_ms;
  for (const LayerCost& layer : layers) {
    end = round_up(end, kLayerAlignmentBytes) + layer.bytes;
    const uint64_t whole = round_up(end, limits.granule_bytes);
    if (whole <= limits.most_bytes) bytes.push_back(whole);
    load_ms += layer.transmit_ms;
  }
  GroupingCosts with = costs;
  with.resident_layers = static_cast<uint32_t>(layers.size());
  GPUSHARE_ASSIGN_OR_RETURN(const Grouping there, plan_groups(layers, with));
  const auto overhead = [&](uint32_t resident) -> base::Result<double> {
    with.resident_layers = resident;
    GPUSHARE_ASSIGN_OR_RETURN(const Grouping plan, plan_groups(layers, with));
    return plan.makespan_ms - there.makespan_ms;
  };
  PrefixChoice choice;
  GPUSHARE_ASSIGN_OR_RETURN(const double without, overhead(0));
  choice.overhead_ms = without;
  const double aim_ms = kStandbyAim * load_ms;
  auto most = static_cast<uint32_t>(bytes.size() - 1);
  if (without <= aim_ms || most == 0) return choice;
  GPUSHARE_ASSIGN_OR_RETURN(const double best, overhead(most));
  if (best > aim_ms && without - best < aim_ms / 5) return choice;
  // More layers never do worse, so a search finds the fewest that do well enough.
  const double enough = std::max(aim_ms, best + 1e-9 * load_ms);
  uint32_t few = 0;
  choice.overhead_ms = best;
  while (most - few > 1) {
    const uint32_t middle = few + (most - few) / 2;
    GPUSHARE_ASSIGN_OR_RETURN(const double left, overhead(middle));
    if (left <= enough) {
      most = middle;
      choice.overhead_ms = left;
    } else {
      few = middle;
    }
  }
  choice.layers = most;
  choice.bytes = bytes[most];
  choice.saves_ms = without - choice.overhead_ms;
  return choice;
}

}  // namespace gpushare::loader
