// Steps, faults, live blocks and the invariants. See memory_world.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "property/memory_world.hpp"

namespace gpushare::test {

void run_probe(void* user_data) {
  auto* probe = static_cast<Probe*>(user_data);
  const auto* begin = reinterpret_cast<const uint8_t*>(probe->address);
  const uint64_t edge = std::min(probe->bytes, kEdge);
  for (uint64_t i = 0; i < edge; ++i)
    if (begin[i] != probe->value || begin[probe->bytes - 1 - i] != probe->value) {
      probe->wrong->fetch_add(1);
      break;
    }
  delete probe;
}

void paint(const Probe& probe) {
  auto* begin = reinterpret_cast<uint8_t*>(probe.address);
  const uint64_t edge = std::min(probe.bytes, kEdge);
  std::memset(begin, probe.value, edge);
  std::memset(begin + probe.bytes - edge, probe.value, edge);
}

void run_paint(void* user_data) {
  paint(*static_cast<Probe*>(user_data));
  delete static_cast<Probe*>(user_data);
}

void nap(void*) {
  usleep(100);
}

World::World(const std::string& spec, Layout layout, uint64_t seed, bool faults, uint64_t granularity)
    : random_(seed), faults_(faults), virtual_(layout == Layout::kVirtual) {
  auto device = device::Device::open(spec);
  REQUIRE(device.ok());
  device_ = std::move(*device);
  probes_ = device_->can(GPUSHARE_DEVICE_CAP_HOST_ADDRESSABLE);
  auto info = device_->refresh_info();
  REQUIRE(info.ok());
  first_free_bytes_ = info->free_bytes;
  memory::DeviceMemoryOptions options;
  options.capacity_bytes = 96 * kMiB;
  options.layout = layout;
  options.granularity_bytes = granularity;
  auto memory = DeviceMemory::open(*device_, options);
  REQUIRE(memory.ok());
  memory_ = std::move(*memory);
  granule_ = memory_->granularity_bytes();
  steps_of_heaps_ = memory_->persistent_steps();
  for (size_t i = 0; i < kLanes + 2; ++i) {
    auto stream = device_->create_stream();
    REQUIRE(stream.ok());
    streams_.push_back(std::move(*stream));
  }
  auto event = device_->create_event();
  REQUIRE(event.ok());
  event_ = std::move(*event);
}

void World::step() {
  if (faults_ && chance(10)) arm_fault();
  switch (pick(26)) {
    case 0:
      open_session();
      break;
    case 1:
      if (chance(3)) close_session();
      break;
    case 2:
      resize_session();
      break;
    case 3:
    case 4:
    case 5:
      alloc_persistent();
      break;
    case 6:
    case 7:
      free_persistent();
      break;
    case 8:
      alloc_spilled();
      break;
    case 9:
      open_lane();
      break;
    case 10:
      if (chance(3)) close_lane();
      break;
    case 11:
      resize_lane();
      break;
    case 12:
    case 13:
      begin();
      break;
    case 14:
    case 15:
    case 16:
    case 17:
      alloc_ephemeral();
      break;
    case 18:
      free_ephemeral();
      break;
    case 19:
      keep();
      break;
    case 20:
      end();
      break;
    case 21:
      use_elsewhere();
      break;
    case 22:
      page();
      break;
    case 24:
      scripted();
      break;
    case 25:
      move();
      break;
    case 23:
      odds_and_ends();
      break;
  }
  if (armed_) {
    gpushare_backend_fault none{sizeof(gpushare_backend_fault), GPUSHARE_FAULT_NONE, 0, 0};
    REQUIRE(device_->set_fault(none).ok());
    armed_ = false;
  }
  invariants();
}

void World::finish() {
  for (size_t i = 0; i < kLanes; ++i)
    if (lanes_[i].lane != nullptr) {
      if (lanes_[i].running != SIZE_MAX) end_in(i);
      must(memory_->close_lane(lanes_[i].lane));
    }
  for (Session& session : sessions_)
    if (session.heap != nullptr) must(memory_->close_heap(session.heap));
  check();
  const auto stats = memory_->stats();
  REQUIRE(stats.persistent_bytes == 0);
  REQUIRE(stats.ephemeral_bytes == 0);
  // Short runs may miss them by chance.
  if (steps_ >= 50'000) REQUIRE(planned_ > 0);
  if (steps_ >= 50'000 && virtual_) REQUIRE(lent_ > 0);
  if (steps_ >= 50'000 && virtual_) REQUIRE(gathered_ > 0);
  for (device::Stream& stream : streams_) must(stream.synchronize());
  memory_->trim();
  for (const auto& segment : memory_->snapshot().segments) REQUIRE(segment.blocks.empty());
  if (virtual_) REQUIRE(memory_->stats().mapped_bytes == 0);
  REQUIRE(wrong_.load() == 0);
  memory_.reset();
  streams_.clear();
  event_ = {};
  auto info = device_->refresh_info();
  REQUIRE(info.ok());
  REQUIRE(info->free_bytes == first_free_bytes_);
  must(device_->close());
}

void World::check() {
  const std::string wrong = memory_->check();
  REQUIRE(wrong == "");
}

uint64_t World::block_bytes(uint64_t most) {
  switch (pick(3)) {
    case 0:
      return 1 + pick(4096);
    case 1:
      return 1 + pick(256 * 1024);
    default:
      return 1 + pick(most);
  }
}

void World::must(const base::Status& status) {
  if (!status.ok()) FAIL(status.to_string());
}

void World::must_be_memory(const base::Status& status) {
  const int32_t code = status.code();
  if (code == GPUSHARE_DEVICE_OUT_OF_MEMORY || (code == GPUSHARE_HOST_OUT_OF_MEMORY && armed_)) return;
  FAIL(status.to_string());
}

void World::arm_fault() {
  static constexpr uint32_t kKinds[] = {GPUSHARE_FAULT_DEVICE_OUT_OF_MEMORY, GPUSHARE_FAULT_MAP_FAILS,
                                        GPUSHARE_FAULT_HOST_OUT_OF_MEMORY};
  gpushare_backend_fault fault{sizeof(gpushare_backend_fault), kKinds[pick(3)], 1 + pick(4), 0};
  REQUIRE(device_->set_fault(fault).ok());
  armed_ = true;
}

uint64_t Session::held() const {
  if (!out || coming) return promised;
  return heap->own_blocks_out() ? 0 : promised - given;
}

uint64_t World::promised() const {
  uint64_t sum = 0;
  for (const Session& session : sessions_) sum += session.home + session.held();
  for (const LaneModel& lane : lanes_)
    if (lane.lane != nullptr) sum += lane.promised();
  return sum + memory_->stats().pinned_bytes;
}

std::string World::account() const {
  std::string text;
  for (size_t i = 0; i < kSessions; ++i) {
    if (sessions_[i].heap == nullptr) continue;
    const auto stats = sessions_[i].heap->stats();
    text += "\nsession " + std::to_string(i) + (sessions_[i].out ? " out" : "") + ": promised " +
            std::to_string(sessions_[i].promised) + " lent " + std::to_string(stats.lent_bytes) +
            " promoted " + std::to_string(stats.promoted_bytes) + " live " + std::to_string(stats.live_bytes);
  }
  for (size_t i = 0; i < kLanes; ++i) {
    if (lanes_[i].lane == nullptr) continue;
    const auto stats = lanes_[i].lane->stats();
    text += "\nlane " + std::to_string(i) + (lanes_[i].running != SIZE_MAX ? " running" : "") +
            ": promised " + std::to_string(lanes_[i].promised()) + " size " +
            std::to_string(stats.size_bytes) + " lent " + std::to_string(stats.lent_bytes) + " promoted " +
            std::to_string(stats.promoted_bytes) + " live " + std::to_string(stats.live_bytes);
  }
  return text + "\npinned " + std::to_string(memory_->stats().pinned_bytes);
}

uint64_t World::room() const {
  const uint64_t used = promised();
  return used >= memory_->capacity_bytes() ? 0 : memory_->capacity_bytes() - used;
}

void World::born(const Block& block, const device::Stream* stream, bool host_memory) {
  REQUIRE(block.address % 256 == 0);
  const uint64_t size = granules(block.bytes, 256);
  auto next = live_.lower_bound(block.address);
  REQUIRE((next == live_.end() || block.address + size <= next->first));
  if (next != live_.begin()) {
    auto previous = std::prev(next);
    REQUIRE(previous->first + previous->second <= block.address);
  }
  live_[block.address] = size;
  // Devices whose memory the host cannot read are written all the same: a strict driver sees what is out of
  // order.
  if (!probes_ && (stream == nullptr || host_memory)) return;
  const uint64_t edge = std::min(block.bytes, kEdge);
  if (stream != nullptr && host_memory) {  // kernels may write there, fills may not
    must(stream->launch_host(run_paint, new Probe{block.address, block.bytes, block.value, nullptr}));
  } else if (stream == nullptr) {
    paint(Probe{block.address, block.bytes, block.value, nullptr});
  } else {
    must(stream->fill(block.address, block.value, edge));
    must(stream->fill(block.address + block.bytes - edge, block.value, edge));
  }
}

void World::probe(const Block& block, const device::Stream* stream) {
  if (!probes_) return;
  auto* probe = new Probe{block.address, block.bytes, block.value, &wrong_};
  if (stream == nullptr)
    run_probe(probe);
  else
    must(stream->launch_host(run_probe, probe));
}

Block World::make(Address address, uint64_t bytes) {
  return {address, bytes, static_cast<uint8_t>(++born_ % 251 + 1), false, false};
}

void World::use_elsewhere() {
  Session* session = any_session();
  if (session == nullptr) return;
  const bool ephemeral = session->running_in != SIZE_MAX && chance(2);
  auto& list = ephemeral ? lanes_[session->running_in].blocks : session->blocks;
  if (list.empty()) return;
  const Block& block = list[pick(list.size())];
  if (session->out && !block.promoted && !block.spilled) return;
  const device::Stream& side = streams_[kLanes + pick(2)];
  if (session->stream != nullptr) {
    must(session->stream->record(event_));
    must(side.wait(event_));
  }
  if (probes_) must(side.launch_host(nap, nullptr));
  probe(block, &side);
  must(memory_->record_use(block.address, side));
}

void World::odds_and_ends() {
  switch (pick(4)) {
    case 0:
      memory_->trim();
      memory_->compact();
      break;
    case 1:
      REQUIRE(memory_->free(pick(UINT64_MAX) | 1).code() == GPUSHARE_NOT_FOUND);
      break;
    case 2:
      REQUIRE(!memory_->report().empty());
      break;
    default: {
      if (live_.empty()) break;
      auto it = live_.lower_bound(pick(UINT64_MAX));
      if (it == live_.end()) it = live_.begin();
      REQUIRE(memory_->find(it->first).ok());
    }
  }
}

void World::invariants(bool all) {
  REQUIRE(wrong_.load() == 0);
  if (++steps_ % 128 != 0 && !all) return;
  check();
  // Bytes held never exceed bytes promised: a kept block does not count both in a lane and in a promise.
  const uint64_t held = memory_->capacity_bytes() - memory_->stats().free_bytes;
  if (held > promised()) FAIL(held << " bytes are held, " << promised() << " promised: " << account());
  size_t blocks = 0;
  for (const auto& segment : memory_->snapshot().segments) {
    blocks += segment.blocks.size();
    for (const auto& block : segment.blocks) {
      REQUIRE(block.address >= segment.address);
      REQUIRE(block.address + block.bytes <= segment.address + segment.bytes);
      REQUIRE(live_.count(block.address) == 1);
    }
  }
  REQUIRE(blocks == live_.size());
  for (const Session& session : sessions_) {
    if (session.heap == nullptr) continue;
    uint64_t live = 0, spilled = 0;
    for (const Block& block : session.blocks) (block.spilled ? spilled : live) += granules(block.bytes, 256);
    const auto stats = session.heap->stats();
    // Granules of the heap that are away, and spilled blocks that came home.
    REQUIRE(stats.live_bytes <= live);
    REQUIRE(stats.live_bytes + stats.spilled_bytes <= live + spilled);
    REQUIRE(stats.live_bytes + stats.spilled_bytes + stats.home_bytes >= live + spilled);
    REQUIRE(stats.live_bytes <= session.promised);
  }
}

}  // namespace gpushare::test
