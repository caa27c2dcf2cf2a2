// SPDX-License-Identifier: Apache-2.0
#include "loader/prefix.hpp"

#include <algorithm>
#include <vector>

#include "base/round_up.hpp"
#include "loader/image.hpp"

namespace gpushare::loader {
namespace {

constexpr int kSteps = 16;

using base::round_up;

}  // namespace

base::Result<PrefixChoice> choose_prefix(std::span<const LayerCost> layers, const GroupingCosts& costs,
                                         const PrefixLimits& limits) {
  std::vector<uint64_t> bytes = {0},
                        ends = {0};  // of the first i layers: held, and without the granule's rest
  uint64_t end = 0;
  double load_ms = costs.call_overhead_ms;
  for (const LayerCost& layer : layers) {
    end = round_up(end, kLayerAlignmentBytes) + layer.bytes;
    const uint64_t whole = round_up(end, limits.granule_bytes);
    if (whole <= limits.most_bytes) {
      bytes.push_back(whole);
      ends.push_back(end);
    }
    load_ms += layer.transmit_ms;
  }
  GroupingCosts with = costs;
  with.resident_layers = static_cast<uint32_t>(layers.size());
  GPUSHARE_ASSIGN_OR_RETURN(const Grouping there, plan_groups(layers, with));
  // Without the copy: it falls as layers are added. The copy's time rises.
  const auto waiting = [&](uint32_t resident) -> base::Result<double> {
    with.resident_layers = resident;
    GPUSHARE_ASSIGN_OR_RETURN(const Grouping plan, plan_groups(layers, with));
    return plan.makespan_ms - there.makespan_ms;
  };
  const auto copying = [&](uint32_t resident) {
    return limits.copied == nullptr ? 0.0 : limits.copied->device_copy_ms(ends[resident]);
  };
  const auto most = static_cast<uint32_t>(bytes.size() - 1);
  // The fewest layers, `from` or more, whose waiting is at most `ms`, which that of `most` is; and their waiting.
  const auto fewest = [&](uint32_t from, double ms, double* out_ms) -> base::Result<uint32_t> {
    uint32_t few = from == 0 ? 0 : from - 1, enough = most;
    GPUSHARE_ASSIGN_OR_RETURN(*out_ms, waiting(most));
    while (enough - few > 1) {
      const uint32_t middle = few + (enough - few) / 2;
      GPUSHARE_ASSIGN_OR_RETURN(const double left, waiting(middle));
      if (left <= ms) {
        enough = middle;
        *out_ms = left;
      } else {
        few = middle;
      }
    }
    return enough;
  };
  PrefixChoice choice;
  GPUSHARE_ASSIGN_OR_RETURN(const double without, waiting(0));
  choice.overhead_ms = without;
  const double aim_ms = kStandbyAim * load_ms;
  if (without <= aim_ms || most == 0) return choice;
  GPUSHARE_ASSIGN_OR_RETURN(const double least, waiting(most));
  const auto choose = [&](uint32_t count, double overhead_ms) {
    choice.layers = count;
    choice.bytes = bytes[count];
    choice.overhead_ms = overhead_ms;
    choice.saves_ms = without - overhead_ms;
    return choice;
  };
  // Each step raises the number of layers, and so the time of their copy, which leaves less time for waiting. The
  // search ends when a step keeps within the time that is left.
  uint32_t count = 0;
  for (int step = 0; step < kSteps; ++step) {
    const double left_ms = aim_ms - copying(count);
    if (least > left_ms) break;
    double waits_ms = 0;
    GPUSHARE_ASSIGN_OR_RETURN(count, fewest(std::max(1u, count), left_ms, &waits_ms));
    if (waits_ms + copying(count) <= aim_ms) return choose(count, waits_ms + copying(count));
  }
  // None does, or it takes long to find. Without copies the most layers do best, and so do fewer that wait as little.
  PrefixChoice none = choice;
  const int tries = limits.copied == nullptr ? 1 : kSteps;
  for (int step = 0; step < tries; ++step) {
    double waits_ms = 0;
    const double ms = least + (without - least) * step / kSteps + 1e-9 * load_ms;
    GPUSHARE_ASSIGN_OR_RETURN(count, fewest(1, ms, &waits_ms));
    if (const double overhead_ms = waits_ms + copying(count); overhead_ms < choice.overhead_ms)
      choose(count, overhead_ms);
  }
  return choice.overhead_ms > aim_ms && choice.saves_ms < aim_ms / 5 ? none : choice;
}

}  // namespace gpushare::loader
