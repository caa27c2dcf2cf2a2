// SPDX-License-Identifier: Apache-2.0
#include "job.hpp"

#include <array>
#include <atomic>
#include <boost/unordered/unordered_flat_map.hpp>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace gpushare::torch {

// An allocation of the iteration, in the order of the calls.
struct Place {
  uint64_t bytes = 0;
  Address address = 0;
  bool ephemeral = false;
  bool alive = false;
};

struct Job::State {
  State(std::shared_ptr<Runtime> of, const SessionOptions& options)
      : runtime(std::move(of)), session(runtime->open_session(options)) {}

  const std::shared_ptr<Runtime> runtime;
  Session session;
  std::atomic<uint64_t> live_blocks{0};
  mutable std::mutex
      mutex;  // guards what follows; never held during a call that may wait, or ask the out-of-memory function
  std::optional<Iteration> iteration;
  uint64_t serial = 0;        // of the iteration, from 1
  std::vector<Place> places;  // of this iteration
  std::vector<Place> before;  // of the one before
  uint64_t predicted = 0;
};

namespace {

constexpr uint64_t kOutside = 0;  // serial of blocks allocated outside iterations

struct Block {
  std::shared_ptr<void> state;  // Job::State, which Block does not name: it is private
  uint64_t serial = kOutside;
  size_t place = 0;
};

// The owners of live blocks. The table is sharded by address, so that threads of different jobs seldom meet.
struct alignas(64) Shard {
  std::mutex mutex;
  boost::unordered_flat_map<Address, Block> blocks;
};

Shard& shard_of(Address address) {
  static std::array<Shard, 64>& shards =
      *new std::array<Shard, 64>;  // tensors in static variables die after any destructor of ours
  return shards[(address * 0x9e3779b97f4a7c15u) >> 58];
}

thread_local void* bound = nullptr;  // std::shared_ptr<Job::State>* of the Job that the thread is bound to
thread_local void* bound_before = nullptr;  // what it was bound to when its iteration began

Address address_of(const void* block) {
  return static_cast<Address>(reinterpret_cast<uintptr_t>(block));
}

}  // namespace

Job::Job(std::shared_ptr<Runtime> runtime, const SessionOptions& options)
    : state_(std::make_shared<State>(std::move(runtime), options)) {}

Job::~Job() {
  try {
    end();
  } catch (const Error&) {
    // None was open; or a promotion was refused: the iteration then ends when the last block has been freed.
    if (bound == &state_) bound = bound_before;
  }
}

void Job::begin() {
  Iteration iteration = state_->session.begin_iteration();
  // A framework's kernels on the host device run at once, not in stream order: what the lane did before must be over.
  iteration.stream().synchronize();
  const std::lock_guard lock(state_->mutex);
  state_->iteration.emplace(std::move(iteration));
  ++state_->serial;
  state_->before = std::exchange(state_->places, {});
  state_->places.reserve(state_->before.size());
  state_->predicted = 0;
  bound_before = bound;
  bound = &state_;
}

void Job::end() {
  const std::lock_guard lock(state_->mutex);
  if (!state_->iteration) throw Error(GPUSHARE_INVALID_STATE, "the job has no iteration open");
  for (Place& place : state_->places) {
    if (!place.alive || !place.ephemeral) continue;
    state_->iteration->keep(place.address);
    place.ephemeral = false;
  }
  bound = bound_before;
  Iteration iteration = std::move(*state_->iteration);
  state_->iteration.reset();
  iteration.end();
}

gpushare_session_info Job::info() const {
  return state_->session.info();
}
void Job::set_weight(double weight) {
  state_->session.set_weight(weight);
}
void Job::set_priority(int32_t priority) {
  state_->session.set_priority(priority);
}
uint64_t Job::live_blocks() const {
  return state_->live_blocks;
}

uint64_t Job::predicted_blocks() const {
  const std::lock_guard lock(state_->mutex);
  return state_->predicted;
}

Job::Scope::Scope(Job& job) : before_(std::exchange(bound, &job.state_)) {}
Job::Scope::~Scope() {
  bound = before_;
}

void* allocate(size_t bytes) {
  if (bound == nullptr || bytes == 0) return nullptr;
  const std::shared_ptr<Job::State>& state = *static_cast<std::shared_ptr<Job::State>*>(bound);
  Block block{state};
  gpushare_iteration iteration = nullptr;
  bool ephemeral = false;
  {
    const std::lock_guard lock(state->mutex);
    if (state->iteration) {
      iteration = state->iteration->get();
      block.serial = state->serial;
      block.place = state->places.size();
      const bool outlives = state->serial > 2 && block.place < state->before.size() &&
                            state->before[block.place].alive && state->before[block.place].bytes == bytes;
      ephemeral = !outlives;
      state->predicted += outlives;
      state->places.push_back({bytes, 0, ephemeral, false});
    }
  }
  Address address = 0;
  if (ephemeral)
    check(gpushare_iteration_alloc(iteration, bytes, 0, &address));
  else
    address = state->session.alloc_bytes(iteration == nullptr ? Kind::model : Kind::framework, bytes);
  if (iteration != nullptr) {
    const std::lock_guard lock(state->mutex);
    if (state->serial == block.serial && block.place < state->places.size()) {
      state->places[block.place].address = address;
      state->places[block.place].alive = true;
    }
  }
  state->live_blocks.fetch_add(1, std::memory_order_relaxed);
  Shard& shard = shard_of(address);
  const std::lock_guard lock(shard.mutex);
  shard.blocks.insert_or_assign(address, std::move(block));
  return reinterpret_cast<void*>(static_cast<uintptr_t>(address));
}

bool release(void* pointer) {
  const Address address = address_of(pointer);
  Block block;
  {
    Shard& shard = shard_of(address);
    const std::lock_guard lock(shard.mutex);
    const auto found = shard.blocks.find(address);
    if (found == shard.blocks.end()) return false;
    block = std::move(found->second);
    shard.blocks.erase(found);
  }
  auto& state = *static_cast<Job::State*>(block.state.get());
  if (block.serial != kOutside) {
    const std::lock_guard lock(state.mutex);
    // A place of the iteration before is looked at by the prediction: it counts as it was at that iteration's end.
    if (block.serial == state.serial && state.iteration) state.places[block.place].alive = false;
  }
  state.live_blocks.fetch_sub(1, std::memory_order_relaxed);
  (void)gpushare_memory_free(state.runtime->get(),
                             address);  // NOT_FOUND once the session ended by itself: its blocks went with it
  return true;
}

}  // namespace gpushare::torch
