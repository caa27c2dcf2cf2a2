// The steps that change a session. See memory_world.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "property/memory_world.hpp"

namespace gpushare::test {

Session* World::any_session() {
  Session& session = sessions_[pick(kSessions)];
  return session.heap != nullptr ? &session : nullptr;
}

void World::open_session() {
  Session& session = sessions_[pick(kSessions)];
  if (session.heap != nullptr) return;
  const uint64_t bytes = pick(16 * kMiB);
  if (steps_of_heaps_.round_up(bytes) > room()) return;
  auto heap = memory_->open_heap(++last_session_, "s", bytes);
  if (!heap.ok()) {
    must_be_memory(heap.status());
    REQUIRE((!virtual_ || armed_));
    return;
  }
  session = Session{};
  session.heap = *heap;
  session.id = last_session_;
  session.promised = steps_of_heaps_.round_up(bytes);
  REQUIRE((*heap)->stats().promised_bytes == session.promised);
}

void World::close_session() {
  Session* session = any_session();
  if (session == nullptr || session->running_in != SIZE_MAX) return;
  for (const Block& block : session->blocks) {
    if (!session->out || block.promoted || block.spilled) probe(block, session->stream);
    died(block);
  }
  must(memory_->close_heap(session->heap));
  for (const Block& block : session->blocks)
    REQUIRE(memory_->free(block.address).code() == GPUSHARE_NOT_FOUND);
  *session = Session{};
}

void World::resize_session() {
  Session* session = any_session();
  if (session == nullptr) return;
  const uint64_t bytes = pick(24 * kMiB);
  uint64_t wanted = steps_of_heaps_.round_up(bytes);
  // Granules that came home may have made it a size between two steps.
  if (bytes <= session->promised) wanted = std::min(wanted, session->promised);
  if (wanted > session->promised && wanted - session->promised > room()) return;
  const auto status = session->heap->resize(bytes);
  if (session->out) {
    REQUIRE(status.code() == base::kAway);
  } else if (status.ok()) {
    session->promised = wanted;
  } else if (wanted > session->promised) {
    must_be_memory(status);
    REQUIRE((!virtual_ || armed_));
  } else {
    REQUIRE(status.code() == GPUSHARE_INVALID_STATE);
    const auto stats = session->heap->stats();
    INFO(status.to_string());
    // Blocks that are away have no bytes here, and hold their addresses. Granules of a heap that are away, though no block lies
    // in them, are in the way of those behind them only where the wanted size is a small one.
    REQUIRE((stats.live_bytes > 0 || stats.lent_bytes > 0 || stats.spilled_bytes > 0 ||
             (wanted % granule_ != 0 && extents_of(*session) > stats.promised_bytes)));
  }
  REQUIRE(session->heap->stats().promised_bytes == session->promised);
}

void World::alloc_persistent() {
  Session* session = any_session();
  if (session == nullptr) return;
  const uint64_t bytes = block_bytes(4 * kMiB);
  const uint64_t align = alignment();
  const auto before = session->heap->stats();
  auto address = session->heap->alloc(chance(2) ? Kind::kModel : Kind::kFramework, bytes, align);
  if (session->out) {
    REQUIRE(address.status().code() == base::kAway);
    return;
  }
  if (!address.ok()) {
    REQUIRE(address.status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
    const uint64_t size = granules(bytes, 256);
    REQUIRE((align > 256 || size > before.largest_hole_bytes ||
             before.live_bytes + size > before.promised_bytes));
    return;
  }
  if (align > 0) REQUIRE(*address % align == 0);
  session->blocks.push_back(make(*address, bytes));
  born(session->blocks.back(), session->stream);
}

void World::free_persistent() {
  Session* session = any_session();
  if (session == nullptr || session->blocks.empty()) return;
  const size_t i = pick(session->blocks.size());
  const Block block = session->blocks[i];
  if (!session->out || block.promoted || block.spilled) probe(block, session->stream);
  must(memory_->free(block.address));
  REQUIRE(memory_->free(block.address).code() == GPUSHARE_NOT_FOUND);
  died(block);
  session->blocks.erase(session->blocks.begin() + static_cast<ptrdiff_t>(i));
}

void World::alloc_spilled() {
  Session* session = any_session();
  if (session == nullptr) return;
  const bool ephemeral = session->running_in != SIZE_MAX && chance(2);
  const uint64_t bytes = block_bytes(2 * kMiB);
  auto address = ephemeral ? lanes_[session->running_in].lane->alloc_spilled(bytes, alignment())
                           : session->heap->alloc_spilled(Kind::kModel, bytes, alignment());
  if (!address.ok()) {
    must_be_memory(address.status());
    return;
  }
  auto info = memory_->find(*address);
  REQUIRE(info.ok());
  REQUIRE((info->spilled || session->home > 0));
  REQUIRE(info->session == session->id);
  auto& list = ephemeral ? lanes_[session->running_in].blocks : session->blocks;
  list.push_back(make(*address, bytes));
  list.back().spilled = true;
  born(list.back(), session->stream, true);
}

uint64_t World::extents_of(const Session& session) const {
  uint64_t bytes = 0;
  for (const auto& segment : memory_->snapshot().segments)
    if (segment.session == session.id) bytes += segment.bytes;
  return bytes;
}

// A part of a page-out or page-in, which may be all of it.
void World::page() {
  Session* session = any_session();
  if (session == nullptr || session->running_in != SIZE_MAX) return;
  const device::Stream& stream = streams_[kLanes + pick(2)];
  const uint64_t part = chance(2) ? UINT64_MAX : (1 + pick(4)) * granule_;
  if (session->heap->paged_out()) {
    base::Status status;
    if (session->coming && chance(6)) {
      session->heap->stop_page_in();
      session->coming = false;
    } else {
      if (!session->coming && session->promised > room()) return;
      status = session->heap->page_in(stream, part);
      session->coming = status.ok();
    }
    if (!status.ok()) {
      must_be_memory(status);
      REQUIRE(armed_);
      REQUIRE(session->heap->own_blocks_out());
    }
    if (session->heap->paged_out()) return;
    session->out = session->coming = false;
    for (const Block& block : session->blocks) probe(block, session->stream);
    return;
  }
  uint64_t before[kLanes] = {};
  for (size_t i = 0; i < kLanes; ++i)
    if (lanes_[i].lane != nullptr) before[i] = lanes_[i].lane->stats().size_bytes;
  if (!session->out) session->given = 0;
  const auto status = session->heap->page_out(stream, part, &session->given);
  session->home = session->heap->stats().home_bytes;  // spilled blocks that came home go first
  if (!memory_->can_page()) {
    REQUIRE(status.code() == GPUSHARE_UNSUPPORTED);
    return;
  }
  if (!status.ok()) {
    must_be_memory(status);
    REQUIRE(armed_);
    REQUIRE(!session->out);
    return;
  }
  session->out = !session->heap->is_resident();
  REQUIRE(session->given <= session->promised);
  if (part == UINT64_MAX) REQUIRE(session->heap->paged_out());
  // Lanes give back what it lent, as far as no block pins it. A lane that was short of its size, because the device still
  // used what could have been added, may have it again.
  for (size_t i = 0; i < kLanes; ++i)
    if (lanes_[i].lane != nullptr && lanes_[i].running == SIZE_MAX)
      REQUIRE(lanes_[i].lane->stats().size_bytes <= std::max({before[i], lanes_[i].bytes, pinned_in(i)}));
}

// Granules go out to host memory, or come home.
void World::move() {
  Session* session = any_session();
  if (session == nullptr || session->running_in != SIZE_MAX || !memory_->has_host_tier()) return;
  const bool home = chance(2);
  const uint64_t most = std::min(pick(12) * granule_, home ? room() / granule_ * granule_ : UINT64_MAX);
  const device::Stream& stream = session->stream != nullptr ? *session->stream : streams_[kLanes];
  const uint64_t free_bytes = memory_->stats().free_bytes;
  uint64_t moved = 0;
  const auto status = session->heap->move_spilled(home, most, chance(2) ? UINT64_MAX : 1, stream, &moved);
  if (!status.ok()) {
    must_be_memory(status);
    REQUIRE((armed_ || home));  // the device may still use every granule that could be taken
  }
  REQUIRE(moved <= most);
  // Device memory of spilled blocks since freed may have gone back as well.
  REQUIRE(memory_->stats().free_bytes >= (home ? free_bytes - moved : free_bytes + moved));
  const auto stats = session->heap->stats();
  const uint64_t before = session->promised + session->home;
  if (!session->out) session->promised = stats.promised_bytes;
  session->home = stats.home_bytes;
  REQUIRE(session->promised + session->home <= (home ? before + moved : before - moved));
  moved_ += moved;
  for (const Block& block : session->blocks)
    if (!session->out || block.promoted || block.spilled) probe(block, session->stream);
}

uint64_t World::pinned_in(size_t lane) const {
  const std::string name = "lane " + std::to_string(lanes_[lane].lane->id());
  uint64_t end = 0;
  for (const auto& segment : memory_->snapshot().segments)
    if (segment.name == name)
      for (const auto& block : segment.blocks)
        end = std::max(end, block.address + block.bytes - segment.address);
  return granules(end, granule_);
}

}  // namespace gpushare::test
