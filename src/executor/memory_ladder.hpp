// memory_ladder.hpp: the steps of a runtime for an allocation that found no memory. Other folders do not include it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

#include "base/clock.hpp"
#include "base/mutex.hpp"
#include "executor/lent_turn.hpp"
#include "executor/runtime.hpp"
#include "sched/room.hpp"

namespace gpushare::executor {

class RuntimeImpl;
class SessionImpl;
struct LaneSlot;
struct RangeWait;

// An allocation, to be tried as often as a step has made room for it.
struct Attempt {
  memory::Kind kind;
  LaneSlot* lane;   // null: persistent
  uint64_t serial;  // of the iteration
  uint64_t bytes, alignment;
};

// The steps: a larger promise if that is safe (SessionImpl::grow_*), what memory keeps for speed, the givers in their order
// (sched::Giver), and then the error with all numbers. Threads: any.
class MemoryLadder {
 public:
  // Result of make_room(): whether there may be more room now. While one of them lives, the runtime's own thread begins
  // no part of a page-out. So who has waited for bytes takes them before more is copied; growing waits for a part under
  // way. Let it go before any other wait, and without the lock.
  class Room {
   public:
    Room() = default;
    Room(Room&& other) noexcept
        : ladder_(std::exchange(other.ladder_, nullptr)), made_(std::exchange(other.made_, false)) {}
    Room& operator=(Room&& other) noexcept;
    ~Room() { let_go(); }
    explicit operator bool() const { return made_; }
    void let_go();

    // For make_room().
    void begin(MemoryLadder& ladder) GPUSHARE_REQUIRES(books);
    void set_made(bool made) { made_ = made; }

   private:
    MemoryLadder* ladder_ = nullptr;
    bool made_ = false;
  };

  explicit MemoryLadder(RuntimeImpl& runtime) : runtime_(runtime) {}

  // Climbs until the allocation succeeds, or returns the error.
  base::Result<memory::Address> climb(SessionImpl& session, const Attempt& wanted, base::Status why);
  // Has others give back what the session misses of `bytes`: kSpare, kSessions or kBoundaries, for which alone it waits until
  // `until`. False: they do not.
  Room make_room(SessionImpl& session, const sched::Need& need, sched::Giver from, uint64_t bytes,
                 const base::Deadline& until);
  // Some thread waits in make_room(), or has its Room.
  bool anybody_waits() const GPUSHARE_REQUIRES(books) { return room_waiters_ > 0; }
  void set_function(OutOfMemoryFunction function);

  // Returns the result of `attempt`; calls it a second time when moving idle lanes could join free memory.
  template <class Try>
  base::Status place(Try&& attempt) {
    base::Status placed = attempt();
    if (placed.code() == GPUSHARE_DEVICE_OUT_OF_MEMORY && compact()) placed = attempt();
    return placed;
  }
  // Memory that is not promised goes back to the device at once: others may use it.
  void set_gives_back(bool gives_back) { gives_back_ = gives_back; }
  void give_back();

 private:
  class Climb;
  // Has elastic ranges of opportunistic sessions give back what is missing, and waits until `until` at most. False:
  // nobody was asked. `wait` stands before all commits from then on.
  bool ask_ranges(SessionImpl& session, uint64_t bytes, const base::Deadline& until, RangeWait& wait);
  bool ask_owner(SessionImpl& session, uint64_t bytes);
  bool compact();

  RuntimeImpl& runtime_;
  std::atomic<bool> gives_back_{false};
  uint32_t room_waiters_ GPUSHARE_GUARDED_BY(books) = 0;
  base::Mutex mutex_;  // a leaf: the function is called without it
  OutOfMemoryFunction function_ GPUSHARE_GUARDED_BY(mutex_);
};

}  // namespace gpushare::executor
