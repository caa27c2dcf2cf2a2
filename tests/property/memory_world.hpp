// memory_world.hpp: what memory_property.cpp drives: a DeviceMemory beside a model that knows what must be true
// after each step. Sessions, lanes and the rest of the world have a .cpp file each.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "memory/device_memory.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/sizes.hpp"

namespace gpushare::test {

using memory::Address;
using memory::DeviceMemory;
using memory::Kind;
using memory::Lane;
using memory::Layout;
using memory::PersistentHeap;

inline constexpr size_t kLanes = 4;
inline constexpr size_t kSessions = 10;
inline constexpr uint64_t kEdge = 64;  // bytes written and read at both ends of a block

inline uint64_t granules(uint64_t bytes, uint64_t granule) {
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
void run_probe(void* user_data);  // deletes the Probe
void run_paint(void* user_data);  // deletes the Probe
void paint(const Probe& probe);
void nap(void*);

struct Session {
  PersistentHeap* heap = nullptr;
  uint64_t id = 0;
  uint64_t promised = 0;
  uint64_t home = 0;  // device memory behind spilled blocks
  const device::Stream* stream = nullptr;
  size_t running_in = SIZE_MAX;
  bool out = false;     // from the first part of its page-out to the last of its page-in
  bool coming = false;  // its page-in has begun
  uint64_t given = 0;   // of its promise, by the parts of its page-out
  std::vector<Block> blocks;

  uint64_t held() const;  // of its promise
};

struct LaneModel {
  Lane* lane = nullptr;
  uint64_t bytes = 0;         // wanted, or what it still has of more
  uint64_t ahead = 0;         // of a second range that it goes over to at a boundary
  size_t running = SIZE_MAX;  // session

  uint64_t promised() const {
    const uint64_t size = lane->stats().size_bytes;
    return ahead > 0 ? ahead + size : std::max(bytes, size);
  }
  std::vector<Block> blocks;
};

class World {
 public:
  // `granularity`: of the virtual layout; 0 = what suits the capacity.
  World(const std::string& spec, Layout layout, uint64_t seed, bool faults, uint64_t granularity = 0);
  void step();
  void finish();
  void check();

 private:
  uint64_t pick(uint64_t n) { return test::uniform(random_, 0, n - 1); }
  bool chance(uint64_t one_in) { return pick(one_in) == 0; }
  uint64_t block_bytes(uint64_t most);
  uint64_t alignment() { return chance(4) ? uint64_t{256} << pick(14) : 0; }
  static void must(const base::Status& status);
  // A refusal that memory may give at any time.
  void must_be_memory(const base::Status& status);
  void arm_fault();
  uint64_t promised() const;
  std::string account() const;  // who is promised what, for a message
  uint64_t room() const;
  void born(const Block& block, const device::Stream* stream, bool host_memory = false);
  void probe(const Block& block, const device::Stream* stream);
  void died(const Block& block) { REQUIRE(live_.erase(block.address) == 1); }
  Block make(Address address, uint64_t bytes);
  Session* any_session();
  void open_session();
  void close_session();
  void resize_session();
  void alloc_persistent();
  void free_persistent();
  void alloc_spilled();
  // Addresses that the session's heap has blocks at.
  uint64_t extents_of(const Session& session) const;
  void page();
  void move();
  uint64_t moved_ = 0;
  // The least size that lane's blocks leave it.
  uint64_t pinned_in(size_t lane) const;
  void open_lane();
  void close_lane();
  void resize_lane();
  void begin();
  void begin_in(size_t i, size_t s, bool use_plan);
  void alloc_ephemeral();
  void free_ephemeral();
  void keep();
  void keep_in(size_t i, size_t b);
  bool end_in(size_t i);
  void end();
  // A whole iteration that a session repeats again and again, now and then with a deviation: plans are
  // solved, replayed and left.
  void scripted();
  void use_elsewhere();
  void odds_and_ends();
  void invariants(bool all = false);
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
  base::Steps steps_of_heaps_;
  Session sessions_[kSessions];
  LaneModel lanes_[kLanes];
  std::map<Address, uint64_t> live_;
  std::atomic<uint64_t> wrong_{0};
  uint64_t planned_ = 0;
  uint64_t lent_ = 0;      // most seen
  uint64_t gathered_ = 0;  // allocations that a lane's own memory served once it had moved
  uint64_t last_session_ = 0;
  uint64_t born_ = 0;
  uint64_t steps_ = 0;
};

}  // namespace gpushare::test
