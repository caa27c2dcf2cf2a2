// The steps that change a lane or run in an iteration. See memory_world.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "property/memory_world.hpp"

namespace gpushare::test {

void World::open_lane() {
  const size_t i = pick(kLanes);
  LaneModel& lane = lanes_[i];
  const uint64_t bytes = granules(pick(24 * kMiB), granule_);
  if (lane.lane != nullptr || bytes > room()) return;
  auto opened = memory_->open_lane(static_cast<uint32_t>(i), bytes, streams_[i]);
  if (!opened.ok()) {
    must_be_memory(opened.status());
    REQUIRE((!virtual_ || armed_));
    return;
  }
  lane = LaneModel{};
  lane.lane = *opened;
  lane.bytes = bytes;
  const auto stats = lane.lane->stats();
  REQUIRE(stats.size_bytes >= bytes);  // kept blocks may pin more, from a lane that has closed
  if (stats.promoted_bytes == 0) REQUIRE(stats.size_bytes == bytes);
}

void World::close_lane() {
  LaneModel& lane = lanes_[pick(kLanes)];
  if (lane.lane == nullptr) return;
  if (lane.running != SIZE_MAX) {
    REQUIRE(memory_->close_lane(lane.lane).code() == GPUSHARE_INVALID_STATE);
    return;
  }
  must(memory_->close_lane(lane.lane));
  lane = LaneModel{};
}

void World::resize_lane() {
  LaneModel& lane = lanes_[pick(kLanes)];
  const uint64_t bytes = granules(pick(24 * kMiB), granule_);
  if (lane.lane == nullptr || (bytes > lane.promised() && bytes - lane.promised() > room())) return;
  const auto status = lane.lane->set_size(bytes);
  const uint64_t size = lane.lane->stats().size_bytes;
  if (!status.ok()) {
    must_be_memory(status);
    REQUIRE((!virtual_ || armed_));
    lane.bytes = size;
    lane.ahead = 0;
    return;
  }
  if (lane.running == SIZE_MAX && lane.lane->stats().promoted_bytes == 0) REQUIRE(size == bytes);
  // Until it takes effect, the larger of the two is promised; a lane that grows into another range holds both.
  lane.bytes = std::max(size, bytes);
  lane.ahead = bytes > size ? bytes : 0;
}

void World::begin() {
  const size_t i = pick(kLanes);
  LaneModel& lane = lanes_[i];
  const size_t s = pick(kSessions);
  Session& session = sessions_[s];
  if (lane.lane == nullptr || session.heap == nullptr || session.running_in != SIZE_MAX) return;
  begin_in(i, s, chance(2));
}

void World::begin_in(size_t i, size_t s, bool use_plan) {
  LaneModel& lane = lanes_[i];
  Session& session = sessions_[s];
  const auto status = lane.lane->begin_iteration(*session.heap, use_plan);
  if (lane.running != SIZE_MAX || session.out) {
    REQUIRE(status.code() == GPUSHARE_INVALID_STATE);
    return;
  }
  must(status);
  if (session.stream != nullptr && session.stream != &streams_[i]) {
    must(session.stream->record(event_));
    must(streams_[i].wait(event_));
  }
  session.stream = &streams_[i];
  session.heap->set_stream(session.stream);
  session.running_in = i;
  lane.running = s;
  if (probes_ && chance(4)) must(streams_[i].launch_host(nap, nullptr));
}

void World::alloc_ephemeral() {
  const size_t i = pick(kLanes);
  LaneModel& lane = lanes_[i];
  if (lane.lane == nullptr) return;
  // Sometimes most of the size, which a lane with kept blocks has to gather.
  const uint64_t size = lane.lane->stats().size_bytes;
  const bool most = size > 0 && lane.blocks.empty() && chance(2);
  const uint64_t bytes = most ? size / 4 * 3 : block_bytes(6 * kMiB);
  const uint64_t align = alignment();
  auto address = lane.lane->alloc(bytes, align);
  if (lane.running == SIZE_MAX) {
    REQUIRE(address.status().code() == GPUSHARE_INVALID_STATE);
    return;
  }
  if (!address.ok()) {
    REQUIRE(address.status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
    // Beside kept blocks there may be memory enough, but in no single piece.
    uint64_t missing = UINT64_MAX;
    if (!lane.lane->gather(*sessions_[lane.running].heap, granules(bytes, 256) + align, &missing)) return;
    ++gathered_;
    address = lane.lane->alloc(bytes, align);
    must(address.status());
  }
  if (align > 0) REQUIRE(*address % align == 0);
  lane.blocks.push_back(make(*address, bytes));
  born(lane.blocks.back(), &streams_[i]);
}

void World::free_ephemeral() {
  const size_t i = pick(kLanes);
  LaneModel& lane = lanes_[i];
  if (lane.blocks.empty()) return;
  const size_t b = pick(lane.blocks.size());
  probe(lane.blocks[b], &streams_[i]);
  must(memory_->free(lane.blocks[b].address));
  died(lane.blocks[b]);
  lane.blocks.erase(lane.blocks.begin() + static_cast<ptrdiff_t>(b));
}

void World::keep() {
  const size_t i = pick(kLanes);
  if (lanes_[i].blocks.empty() || chance(2)) return;
  keep_in(i, pick(lanes_[i].blocks.size()));
}

void World::keep_in(size_t i, size_t b) {
  LaneModel& lane = lanes_[i];
  Session& session = sessions_[lane.running];
  Block block = lane.blocks[b];
  const auto before = session.heap->stats();
  const auto status = lane.lane->keep(block.address);
  if (!block.spilled && before.live_bytes + granules(block.bytes, 256) > before.promised_bytes) {
    REQUIRE(status.code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
    return;
  }
  must(status);
  auto info = memory_->find(block.address);
  REQUIRE(info.ok());
  REQUIRE(info->promoted);
  REQUIRE(info->session == session.id);
  block.promoted = true;
  session.blocks.push_back(block);
  lane.blocks.erase(lane.blocks.begin() + static_cast<ptrdiff_t>(b));
}

bool World::end_in(size_t i) {
  bool planned = false;
  LaneModel& lane = lanes_[i];
  for (const Block& block : lane.blocks) {
    probe(block, &streams_[i]);
    died(block);
  }
  must(lane.lane->end_iteration(&planned));
  lane.blocks.clear();
  sessions_[lane.running].running_in = SIZE_MAX;
  lane.running = SIZE_MAX;
  const auto stats = lane.lane->stats();
  if (stats.promoted_bytes == 0) {  // nothing was in the way of the size that was set last
    lane.bytes = stats.size_bytes;
    lane.ahead = 0;
  }
  REQUIRE(stats.live_bytes == stats.promoted_bytes);
  lent_ = std::max(lent_, stats.lent_bytes);
  return planned;
}

void World::end() {
  const size_t i = pick(kLanes);
  if (lanes_[i].lane != nullptr && lanes_[i].running != SIZE_MAX) end_in(i);
}

void World::scripted() {
  const size_t i = pick(kLanes), s = pick(kSessions);
  LaneModel& lane = lanes_[i];
  Session& session = sessions_[s];
  if (lane.lane == nullptr || lane.running != SIZE_MAX || session.heap == nullptr || session.out ||
      session.running_in != SIZE_MAX)
    return;
  begin_in(i, s, true);
  Random script(session.id);
  const uint64_t deviate_at = chance(6) ? pick(24) : UINT64_MAX;
  for (uint64_t step = 0; step < 24; ++step) {
    const uint64_t bytes = 256 + test::uniform(script, 0, 64 * 1024),
                   which = test::uniform(script, 0, 1 << 20);
    if (which % 5 < 2 && !lane.blocks.empty()) {
      const size_t b = which % lane.blocks.size();
      probe(lane.blocks[b], &streams_[i]);
      must(memory_->free(lane.blocks[b].address));
      REQUIRE(memory_->free(lane.blocks[b].address).code() == GPUSHARE_NOT_FOUND);
      died(lane.blocks[b]);
      lane.blocks.erase(lane.blocks.begin() + static_cast<ptrdiff_t>(b));
      continue;
    }
    auto address = lane.lane->alloc(step == deviate_at ? bytes + 4096 : bytes, which % 3 == 0 ? 512 : 0);
    if (!address.ok()) {
      REQUIRE(address.status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
      break;
    }
    lane.blocks.push_back(make(*address, step == deviate_at ? bytes + 4096 : bytes));
    born(lane.blocks.back(), &streams_[i]);
    if (step == deviate_at && chance(2)) keep_in(i, lane.blocks.size() - 1);
    if (step == deviate_at && chance(2)) invariants(true);
  }
  uint64_t live = lane.lane->stats().promoted_bytes;
  for (const Block& block : lane.blocks)
    if (!block.spilled) live += granules(block.bytes, 256);
  REQUIRE(lane.lane->stats().live_bytes == live);
  planned_ += end_in(i) ? 1 : 0;
}

}  // namespace gpushare::test
