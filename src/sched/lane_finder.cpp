// SPDX-License-Identifier: Apache-2.0
#include "sched/lane_finder.hpp"

#include <array>
#include <string>
#include <tuple>

namespace gpushare::sched {
namespace {

// The smallest lane of at least `ephemeral` bytes; null if there is none.
const LaneView* best_fit(std::span<const LaneView> lanes, uint64_t ephemeral) {
  const LaneView* best = nullptr;
  for (const LaneView& lane : lanes)
    if (lane.bytes >= ephemeral && (best == nullptr || lane.bytes < best->bytes)) best = &lane;
  return best;
}

// The smallest lane that can grow to `ephemeral` with `room` more bytes; null if there is none.
const LaneView* smallest_enlargeable(std::span<const LaneView> lanes, uint64_t ephemeral, uint64_t room) {
  const LaneView* best = nullptr;
  for (const LaneView& lane : lanes)
    if (lane.bytes < ephemeral && ephemeral - lane.bytes <= room &&
        (best == nullptr || lane.bytes < best->bytes))
      best = &lane;
  return best;
}

const LaneView* least_loaded(std::span<const LaneView> lanes, uint64_t ephemeral, uint64_t room) {
  const auto growth = [ephemeral](const LaneView& lane) {
    return lane.bytes < ephemeral ? ephemeral - lane.bytes : 0;
  };
  const LaneView* best = nullptr;
  for (const LaneView& lane : lanes) {
    if (growth(lane) > room) continue;
    if (best == nullptr || std::tuple(lane.backlog_ns, lane.sessions, growth(lane)) <
                               std::tuple(best->backlog_ns, best->sessions, growth(*best)))
      best = &lane;
  }
  return best;
}

Placement join(const LaneView& lane, uint64_t ephemeral) {
  if (lane.bytes >= ephemeral) return {Placement::Kind::kJoin, lane.lane, lane.bytes};
  return {Placement::Kind::kEnlarge, lane.lane, ephemeral};
}

constexpr std::array<const char*, 3> kFinderNames = {"salus", "balanced", "compact"};  // by kind

}  // namespace

base::Result<LaneFinderKind> lane_finder_named(std::string_view name) {
  std::string known;
  for (size_t i = 0; i < kFinderNames.size(); ++i) {
    if (name == kFinderNames[i]) return static_cast<LaneFinderKind>(i);
    known += (i > 0 ? ", " : "") + std::string(kFinderNames[i]);
  }
  return base::Status(GPUSHARE_NOT_FOUND, "there is no lane finder '" + std::string(name.substr(0, 64)) +
                                              "'; there are: " + known);
}

Placement find_lane(LaneFinderKind kind, uint64_t persistent_bytes, uint64_t ephemeral_bytes,
                    uint64_t free_bytes, std::span<const LaneView> lanes, bool may_open) {
  if (persistent_bytes > free_bytes) return {};
  const uint64_t room = free_bytes - persistent_bytes;  // for lanes
  if (kind == LaneFinderKind::kCompact) {
    const LaneView* lane = best_fit(lanes, ephemeral_bytes);
    if (lane != nullptr && lane->bytes / 2 <= ephemeral_bytes) return join(*lane, ephemeral_bytes);
  }
  if (may_open && ephemeral_bytes <= room) return {Placement::Kind::kOpen, kNoLane, ephemeral_bytes};
  if (kind == LaneFinderKind::kBalanced) {
    const LaneView* lane = least_loaded(lanes, ephemeral_bytes, room);
    return lane == nullptr ? Placement{} : join(*lane, ephemeral_bytes);
  }
  if (const LaneView* lane = best_fit(lanes, ephemeral_bytes)) return join(*lane, ephemeral_bytes);
  if (const LaneView* lane = smallest_enlargeable(lanes, ephemeral_bytes, room))
    return join(*lane, ephemeral_bytes);
  return {};
}

}  // namespace gpushare::sched
