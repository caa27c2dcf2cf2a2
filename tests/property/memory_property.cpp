// Random sequences of everything DeviceMemory can do, against a model that knows what must be true after each
// step. Both layouts, on the host device (whose bytes are written and read in stream order, so that a block
// reused too early is seen) and on the sim device, with and without scripted faults.
//
// Held at each step: promises never above the capacity (1), live blocks disjoint and inside what their owner
// was promised (2), no ephemeral bytes between iterations (3), a session that ends leaves nothing (6); at the
// end everything is back (8). On the virtual layout, what is within the capacity must also be placeable:
// fragmentation is no excuse there.
//
// GPUSHARE_MEMORY_STEPS sets the number of steps of each run, GPUSHARE_TEST_SEED the seed.
//
// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "memory/device_memory.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

using namespace gpushare;
using memory::Address;
using memory::DeviceMemory;
using memory::Kind;
using memory::Lane;
using memory::Layout;
using memory::PersistentHeap;
using test::Random;

namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr size_t kLanes = 4;
constexpr size_t kSessions = 10;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kDefaultSteps = 6'000;
#else
constexpr uint64_t kDefaultSteps = 60'000;
#endif

uint64_t steps() {
  const char* text = std::getenv("GPUSHARE_MEMORY_STEPS");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : kDefaultSteps;
}

uint64_t granules(uint64_t bytes, uint64_t granule) {
  return (bytes + granule - 1) / granule * granule;
}

struct Block {
  Address address;
  uint64_t bytes;
  uint8_t value;
  bool spilled;
  bool promoted;
};

// Reads a block's first and last bytes in stream order.
struct Probe {
  Address address;
  uint64_t bytes;
  uint8_t value;
  std::atomic<uint64_t>* wrong;
};
constexpr uint64_t kEdge = 64;

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

struct Session {
  PersistentHeap* heap = nullptr;
  uint64_t id = 0;
  uint64_t promised = 0;
  const device::Stream* stream = nullptr;
  size_t running_in = SIZE_MAX;
  bool out = false;
  std::vector<Block> blocks;
};

struct LaneModel {
  Lane* lane = nullptr;
  uint64_t bytes = 0;
  size_t running = SIZE_MAX;  // session
  std::vector<Block> blocks;
};

class World {
 public:
  World(const std::string& spec, Layout layout, uint64_t seed, bool faults)
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
    auto memory = DeviceMemory::open(*device_, options);
    REQUIRE(memory.ok());
    memory_ = std::move(*memory);
    granule_ = memory_->granularity_bytes();
    for (size_t i = 0; i < kLanes + 2; ++i) {
      auto stream = device_->create_stream();
      REQUIRE(stream.ok());
      streams_.push_back(std::move(*stream));
    }
    auto event = device_->create_event();
    REQUIRE(event.ok());
    event_ = std::move(*event);
  }

  void step() {
    if (faults_ && chance(10)) arm_fault();
    switch (pick(25)) {
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

  void finish() {
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
    if (steps_ >= 5'000) REQUIRE(planned_ > 0);
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

  void check() {
    const std::string wrong = memory_->check();
    REQUIRE(wrong == "");
  }

 private:
  uint64_t pick(uint64_t n) { return test::uniform(random_, 0, n - 1); }
  bool chance(uint64_t one_in) { return pick(one_in) == 0; }
  uint64_t block_bytes(uint64_t most) {
    switch (pick(3)) {
      case 0:
        return 1 + pick(4096);
      case 1:
        return 1 + pick(256 * 1024);
      default:
        return 1 + pick(most);
    }
  }
  uint64_t alignment() { return chance(4) ? uint64_t{256} << pick(14) : 0; }
  static void must(const base::Status& status) {
    if (!status.ok()) FAIL(status.to_string());
  }
  // A refusal that memory may give at any time.
  void must_be_memory(const base::Status& status) {
    const int32_t code = status.code();
    if (code == GPUSHARE_DEVICE_OUT_OF_MEMORY || (code == GPUSHARE_HOST_OUT_OF_MEMORY && armed_)) return;
    FAIL(status.to_string());
  }

  void arm_fault() {
    static constexpr uint32_t kKinds[] = {GPUSHARE_FAULT_DEVICE_OUT_OF_MEMORY, GPUSHARE_FAULT_MAP_FAILS,
                                          GPUSHARE_FAULT_HOST_OUT_OF_MEMORY};
    gpushare_backend_fault fault{sizeof(gpushare_backend_fault), kKinds[pick(3)], 1 + pick(4), 0};
    REQUIRE(device_->set_fault(fault).ok());
    armed_ = true;
  }

  uint64_t promised() const {
    uint64_t sum = 0;
    for (const Session& session : sessions_) sum += session.out ? 0 : session.promised;
    for (const LaneModel& lane : lanes_) sum += lane.bytes;
    return sum + orphaned_;
  }
  uint64_t room() const {
    const uint64_t used = promised();
    return used >= memory_->capacity_bytes() ? 0 : memory_->capacity_bytes() - used;
  }

  // ---- live blocks
  // ------------------------------------------------------------------------------------------
  void born(const Block& block, const device::Stream* stream, bool host_memory = false) {
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
  void probe(const Block& block, const device::Stream* stream) {
    if (!probes_) return;
    auto* probe = new Probe{block.address, block.bytes, block.value, &wrong_};
    if (stream == nullptr)
      run_probe(probe);
    else
      must(stream->launch_host(run_probe, probe));
  }
  void died(const Block& block) { REQUIRE(live_.erase(block.address) == 1); }
  Block make(Address address, uint64_t bytes) {
    return {address, bytes, static_cast<uint8_t>(++born_ % 251 + 1), false, false};
  }

  // ---- sessions
  // ---------------------------------------------------------------------------------------------
  Session* any_session() {
    Session& session = sessions_[pick(kSessions)];
    return session.heap != nullptr ? &session : nullptr;
  }
  void open_session() {
    Session& session = sessions_[pick(kSessions)];
    if (session.heap != nullptr) return;
    const uint64_t bytes = pick(16 * kMiB);
    if (granules(bytes, granule_) > room()) return;
    auto heap = memory_->open_heap(++last_session_, "s", bytes);
    if (!heap.ok()) {
      must_be_memory(heap.status());
      REQUIRE((!virtual_ || armed_));
      return;
    }
    session = Session{};
    session.heap = *heap;
    session.id = last_session_;
    session.promised = granules(bytes, granule_);
    REQUIRE((*heap)->stats().promised_bytes == session.promised);
  }
  void close_session() {
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
    update_orphans();
  }
  void resize_session() {
    Session* session = any_session();
    if (session == nullptr) return;
    const uint64_t bytes = pick(24 * kMiB);
    const uint64_t wanted = granules(bytes, granule_);
    if (wanted > session->promised && wanted - session->promised > room()) return;
    const auto status = session->heap->resize(bytes);
    if (session->out) {
      REQUIRE(status.code() == GPUSHARE_INVALID_STATE);
    } else if (status.ok()) {
      session->promised = wanted;
    } else if (wanted > session->promised) {
      must_be_memory(status);
      REQUIRE((!virtual_ || armed_));
    } else {
      REQUIRE(status.code() == GPUSHARE_INVALID_STATE);
      REQUIRE(session->heap->stats().live_bytes > 0);
    }
    REQUIRE(session->heap->stats().promised_bytes == session->promised);
  }
  void alloc_persistent() {
    Session* session = any_session();
    if (session == nullptr) return;
    const uint64_t bytes = block_bytes(4 * kMiB);
    const uint64_t align = alignment();
    const auto before = session->heap->stats();
    auto address = session->heap->alloc(chance(2) ? Kind::kModel : Kind::kFramework, bytes, align);
    if (session->out) {
      REQUIRE(address.status().code() == GPUSHARE_INVALID_STATE);
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
  void free_persistent() {
    Session* session = any_session();
    if (session == nullptr || session->blocks.empty()) return;
    const size_t i = pick(session->blocks.size());
    const Block block = session->blocks[i];
    if (!session->out || block.promoted || block.spilled) probe(block, session->stream);
    must(memory_->free(block.address));
    REQUIRE(memory_->free(block.address).code() == GPUSHARE_NOT_FOUND);
    died(block);
    session->blocks.erase(session->blocks.begin() + static_cast<ptrdiff_t>(i));
    if (block.promoted) update_orphans();
  }
  void alloc_spilled() {
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
    REQUIRE(info->spilled);
    REQUIRE(info->session == session->id);
    auto& list = ephemeral ? lanes_[session->running_in].blocks : session->blocks;
    list.push_back(make(*address, bytes));
    list.back().spilled = true;
    born(list.back(), session->stream, true);
  }
  void page() {
    Session* session = any_session();
    if (session == nullptr || session->running_in != SIZE_MAX) return;
    const device::Stream& stream = streams_[kLanes + pick(2)];
    if (session->out) {
      if (session->promised > room()) return;
      const auto status = session->heap->page_in(stream);
      if (!status.ok()) {
        must_be_memory(status);
        REQUIRE(armed_);
        REQUIRE(session->heap->paged_out());
        return;
      }
      session->out = false;
      REQUIRE(!session->heap->paged_out());
      for (const Block& block : session->blocks) probe(block, session->stream);
      return;
    }
    const auto status = session->heap->page_out(stream);
    if (!memory_->can_page()) {
      REQUIRE(status.code() == GPUSHARE_UNSUPPORTED);
      return;
    }
    if (!status.ok()) {
      must_be_memory(status);
      REQUIRE(armed_);
      REQUIRE(!session->heap->paged_out());
      return;
    }
    session->out = true;
    REQUIRE(session->heap->paged_out());
  }

  // ---- lanes
  // ------------------------------------------------------------------------------------------------
  void open_lane() {
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
    REQUIRE(lane.lane->stats().size_bytes == bytes);
  }
  void close_lane() {
    LaneModel& lane = lanes_[pick(kLanes)];
    if (lane.lane == nullptr) return;
    if (lane.running != SIZE_MAX) {
      REQUIRE(memory_->close_lane(lane.lane).code() == GPUSHARE_INVALID_STATE);
      return;
    }
    must(memory_->close_lane(lane.lane));
    lane = LaneModel{};
    update_orphans();
  }
  void resize_lane() {
    LaneModel& lane = lanes_[pick(kLanes)];
    const uint64_t bytes = granules(pick(24 * kMiB), granule_);
    if (lane.lane == nullptr || (bytes > lane.bytes && bytes - lane.bytes > room())) return;
    const auto status = lane.lane->set_size(bytes);
    const uint64_t size = lane.lane->stats().size_bytes;
    if (!status.ok()) {
      must_be_memory(status);
      REQUIRE((!virtual_ || armed_));
      lane.bytes = size;
      return;
    }
    if (lane.running == SIZE_MAX && lane.lane->stats().promoted_bytes == 0) REQUIRE(size == bytes);
    // Until it takes effect, the larger of the two is promised; a growing lane may hold both ranges.
    lane.bytes = std::max(size, bytes) + (bytes > size ? size : 0);
  }
  void begin() {
    const size_t i = pick(kLanes);
    LaneModel& lane = lanes_[i];
    const size_t s = pick(kSessions);
    Session& session = sessions_[s];
    if (lane.lane == nullptr || session.heap == nullptr || session.running_in != SIZE_MAX) return;
    begin_in(i, s, chance(2));
  }
  void begin_in(size_t i, size_t s, bool use_plan) {
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
  void alloc_ephemeral() {
    const size_t i = pick(kLanes);
    LaneModel& lane = lanes_[i];
    if (lane.lane == nullptr) return;
    const uint64_t bytes = block_bytes(6 * kMiB);
    const uint64_t align = alignment();
    auto address = lane.lane->alloc(bytes, align);
    if (lane.running == SIZE_MAX) {
      REQUIRE(address.status().code() == GPUSHARE_INVALID_STATE);
      return;
    }
    if (!address.ok()) {
      REQUIRE(address.status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
      return;
    }
    if (align > 0) REQUIRE(*address % align == 0);
    lane.blocks.push_back(make(*address, bytes));
    born(lane.blocks.back(), &streams_[i]);
  }
  void free_ephemeral() {
    const size_t i = pick(kLanes);
    LaneModel& lane = lanes_[i];
    if (lane.blocks.empty()) return;
    const size_t b = pick(lane.blocks.size());
    probe(lane.blocks[b], &streams_[i]);
    must(memory_->free(lane.blocks[b].address));
    died(lane.blocks[b]);
    lane.blocks.erase(lane.blocks.begin() + static_cast<ptrdiff_t>(b));
  }
  void keep() {
    const size_t i = pick(kLanes);
    if (lanes_[i].blocks.empty() || chance(2)) return;
    keep_in(i, pick(lanes_[i].blocks.size()));
  }
  void keep_in(size_t i, size_t b) {
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
  bool end_in(size_t i) {
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
    lane.bytes = std::max(lane.lane->stats().size_bytes, pending(lane));
    const auto stats = lane.lane->stats();
    REQUIRE(stats.live_bytes == stats.promoted_bytes);
    return planned;
  }
  // A pinned lane may still hold what it took ahead.
  static uint64_t pending(const LaneModel& lane) {
    return lane.lane->stats().promoted_bytes > 0 ? lane.bytes : 0;
  }
  void end() {
    const size_t i = pick(kLanes);
    if (lanes_[i].lane != nullptr && lanes_[i].running != SIZE_MAX) end_in(i);
  }

  // A whole iteration that a session repeats again and again, now and then with a deviation: plans are
  // solved, replayed and left.
  void scripted() {
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

  // What closed lanes still hold for promoted blocks is promised to nobody, but it is not free.
  void update_orphans() {
    orphaned_ = 0;
    for (const auto& segment : memory_->snapshot().segments)
      if (segment.name.rfind("closed lane", 0) == 0) orphaned_ += segment.bytes;
  }

  void use_elsewhere() {
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
  void odds_and_ends() {
    switch (pick(4)) {
      case 0:
        memory_->trim();
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

  void invariants(bool all = false) {
    REQUIRE(wrong_.load() == 0);
    if (++steps_ % 128 != 0 && !all) return;
    check();
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
      for (const Block& block : session.blocks)
        (block.spilled ? spilled : live) += granules(block.bytes, 256);
      REQUIRE(session.heap->stats().live_bytes == live);
      REQUIRE(session.heap->stats().spilled_bytes == spilled);
      REQUIRE(live <= session.promised);
    }
  }

  Random random_;
  const bool faults_;
  const bool virtual_;
  bool probes_ = false;
  bool armed_ = false;
  std::unique_ptr<device::Device> device_;
  uint64_t first_free_bytes_ = 0;
  std::vector<device::Stream> streams_;  // kLanes of lanes, then two others
  device::Event event_;
  std::unique_ptr<DeviceMemory> memory_;
  uint64_t granule_ = 0;
  Session sessions_[kSessions];
  LaneModel lanes_[kLanes];
  std::map<Address, uint64_t> live_;
  std::atomic<uint64_t> wrong_{0};
  uint64_t orphaned_ = 0;
  uint64_t planned_ = 0;
  uint64_t last_session_ = 0;
  uint64_t born_ = 0;
  uint64_t steps_ = 0;
};

void run(const std::string& spec, Layout layout, bool faults) {
  const uint64_t seed = test::seed() + static_cast<uint64_t>(layout) * 2 + (faults ? 1 : 0);
  INFO("GPUSHARE_TEST_SEED gives " << seed);
  World world(spec, layout, seed, faults);
  const uint64_t count = steps();
  for (uint64_t i = 0; i < count; ++i) world.step();
  world.finish();
}

const char* const kHost = "host?total_bytes=256MiB";
const char* const kCuda = "cuda?total_bytes=256MiB&driver=" GPUSHARE_CUDA_STANDIN;
const char* const kSim = "sim?total_bytes=256MiB";

}  // namespace

TEST_CASE("host, contiguous") {
  run(kHost, Layout::kContiguous, false);
}
TEST_CASE("host, virtual") {
  run(kHost, Layout::kVirtual, false);
}
TEST_CASE("host, contiguous, faults") {
  run(kHost, Layout::kContiguous, true);
}
TEST_CASE("host, virtual, faults") {
  run(kHost, Layout::kVirtual, true);
}
TEST_CASE("cuda on the stand-in for its driver, contiguous") {
  run(kCuda, Layout::kContiguous, false);
}
TEST_CASE("cuda on the stand-in for its driver, virtual") {
  run(kCuda, Layout::kVirtual, false);
}
TEST_CASE("sim, contiguous") {
  run(kSim, Layout::kContiguous, false);
}
TEST_CASE("sim, virtual") {
  run(kSim, Layout::kVirtual, false);
}
TEST_CASE("sim, contiguous, faults") {
  run(kSim, Layout::kContiguous, true);
}
TEST_CASE("sim, virtual, faults") {
  run(kSim, Layout::kVirtual, true);
}
// Not run by default: the device that GPUSHARE_MEMORY_SPEC names, for scripts/gpu-suite.
TEST_CASE("named device, contiguous", "[.]") {
  const char* spec = std::getenv("GPUSHARE_MEMORY_SPEC");
  REQUIRE(spec != nullptr);
  run(spec, Layout::kContiguous, false);
}
TEST_CASE("named device, virtual", "[.]") {
  const char* spec = std::getenv("GPUSHARE_MEMORY_SPEC");
  REQUIRE(spec != nullptr);
  run(spec, Layout::kVirtual, false);
}
