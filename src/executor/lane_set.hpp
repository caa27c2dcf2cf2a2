// lane_set.hpp: the lanes of a runtime: their slots, what memory each has, and the sizes that are promised for them.
// Not for other folders.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/mutex.hpp"
#include "base/service_thread.hpp"
#include "base/work_mutex.hpp"
#include "executor/lent_turn.hpp"
#include "executor/runtime.hpp"

namespace gpushare::executor {

class Outbox;
class RuntimeImpl;
class SessionImpl;
class StreamImpl;
class TicketImpl;

// One iteration between its grant and the passing of its end event.
struct InFlight {
  // Recorded by the session that has the lane. Then any thread may query them and wait for them, until the slot is granted again.
  device::Event start, end;
  // The events belong to this iteration. False: the iteration is over as soon as those before it are.
  bool marked GPUSHARE_GUARDED_BY(books) = false;
  uint64_t peak_bytes GPUSHARE_GUARDED_BY(books) = 0;  // ephemeral, for the timeline
  uint64_t waited_ns GPUSHARE_GUARDED_BY(books) = 0;   // for its turn
  SessionImpl* session GPUSHARE_GUARDED_BY(books) = nullptr;
  std::shared_ptr<TicketImpl> ticket GPUSHARE_GUARDED_BY(books);
  base::Status outcome GPUSHARE_GUARDED_BY(books);
};

// A lane's place. Kept, with its stream and threads, when the scheduler closes the lane; used again for the
// next of that number.
struct LaneSlot {
  LaneSlot(uint32_t id_of_lane, std::vector<InFlight> events) : id(id_of_lane), ring(std::move(events)) {}

  const uint32_t id;
  // Made when the lane opens and kept when it closes, except where it belongs to a partition, which goes then.
  std::shared_ptr<StreamImpl> stream;
  gpushare_backend_partition* partition = nullptr;
  std::atomic<memory::Lane*> memory{nullptr};            // null while closed
  base::WorkMutex size_mutex;                            // serialises applying want_bytes
  std::atomic<uint64_t> applied_bytes{0};                // size that memory has been given
  std::atomic<uint64_t> want_bytes{0};                   // size that the scheduler promises
  base::Status place_status GPUSHARE_GUARDED_BY(books);  // why memory is null

  // The session that has the lane, or had it last, and so owns the stream. Allocations that name a stream use
  // it.
  mutable base::Mutex owner_mutex;
  std::shared_ptr<SessionImpl> owner GPUSHARE_GUARDED_BY(owner_mutex);
  std::atomic<const SessionImpl*> owner_address{nullptr};  // for comparison only
  std::shared_ptr<SessionImpl> current_owner() const {
    base::MutexLock lock(owner_mutex);
    return owner;
  }
  // Returns the previous owner. The caller lets that pointer go where a session may end.
  std::shared_ptr<SessionImpl> set_owner(std::shared_ptr<SessionImpl> session) {
    base::MutexLock lock(owner_mutex);
    owner.swap(session);
    owner_address.store(owner.get(), std::memory_order_relaxed);
    return session;
  }

  SessionImpl* holder GPUSHARE_GUARDED_BY(books) = nullptr;  // has an iteration open here
  // The number of decided actions that close the lane. A decision made now for a lane of this number holds after these
  // actions.
  uint32_t closes GPUSHARE_GUARDED_BY(books) = 0;
  // Counts switches, also when the lane was closed in between.
  uint64_t last_session_id GPUSHARE_GUARDED_BY(books) = 0;
  // depth + 1: the one before the head keeps its end event for the timeline.
  std::vector<InFlight> ring GPUSHARE_GUARDED_BY(books);
  uint64_t head GPUSHARE_GUARDED_BY(books) = 0;  // sequence number of the oldest in flight
  uint64_t next GPUSHARE_GUARDED_BY(books) = 0;  // of the next to be granted
  uint32_t in_flight GPUSHARE_GUARDED_BY(books) =
      0;  // iterations ended on the host and not by the device; LaneSet::count_flight() changes it
  size_t flying_at GPUSHARE_GUARDED_BY(books) = 0;    // in LaneSet::flying(), while anything is in flight
  uint64_t opened_at GPUSHARE_GUARDED_BY(books) = 0;  // its place in LaneSet::opened(): larger is later
  bool reaping GPUSHARE_GUARDED_BY(books) = false;    // somebody waits for the head's end event
  std::atomic<bool> profiling{false};                 // its holder is being profiled
  // For the timeline. The place of an event on the device's clock is found from the event before it, because elapsed
  // times are exact only if they are short.
  device::Event anchor;                               // recorded when the lane opened, by who acts
  uint64_t anchor_ns GPUSHARE_GUARDED_BY(books) = 0;  // device clock there
  // The iteration before `head` has an end event; else the anchor takes its place.
  bool chained GPUSHARE_GUARDED_BY(books) = false;
  uint64_t last_end_ns GPUSHARE_GUARDED_BY(books) = 0;      // device clock at that event
  std::unique_ptr<Work> pushed GPUSHARE_GUARDED_BY(books);  // granted, for the lane worker
  base::ConditionVariable worker_wakes, reaper_wakes;
  bool reaper_sleeps GPUSHARE_GUARDED_BY(books) = false;
  base::ServiceThread worker, reaper;

  InFlight& at(uint64_t sequence) GPUSHARE_REQUIRES(books) { return ring[sequence % ring.size()]; }
};

// Opens, resizes and closes lanes. One thread at a time, the one that acts (action_runner.hpp), opens and closes them.
class LaneSet {
 public:
  explicit LaneSet(RuntimeImpl& runtime) : runtime_(runtime) {}
  // The lane of that number, also when it is closed; null if it was never opened.
  LaneSlot* find(uint32_t id) const GPUSHARE_REQUIRES(books) {
    return id < slots_.size() ? slots_[id].get() : nullptr;
  }
  // The open lanes; and all lanes by number, null where none was ever opened.
  const std::vector<LaneSlot*>& opened() const GPUSHARE_REQUIRES(books) { return open_; }
  const std::vector<std::unique_ptr<LaneSlot>>& all() const GPUSHARE_REQUIRES(books) { return slots_; }
  // The lanes that have something in flight, in no order.
  const std::vector<LaneSlot*>& flying() const GPUSHARE_REQUIRES(books) { return flying_; }
  // Counts one iteration more, or one less, in flight in the lane.
  void count_flight(LaneSlot& lane, bool begins) GPUSHARE_REQUIRES(books);
  // The runtime closes.
  std::vector<std::unique_ptr<LaneSlot>> take_all() GPUSHARE_REQUIRES(books) {
    open_.clear();
    flying_.clear();
    return std::move(slots_);
  }
  // Why the last lane could not be made.
  const base::Status& failure() const GPUSHARE_REQUIRES(books) { return failure_; }

  // Notes the size promised last. An allocation that grows the lane goes by this size, also while the action that
  // applies the size is still queued.
  void want(uint32_t id, uint64_t bytes) GPUSHARE_REQUIRES(books);
  // Called by the thread that acts. They release the lock meanwhile.
  base::Status open(uint32_t id, uint64_t bytes, uint32_t compute_units) GPUSHARE_REQUIRES(books);
  void close(LaneSlot& lane, Outbox& outbox) GPUSHARE_REQUIRES(books);
  // Gives each lane, now and when it opens later, the thread that runs its submitted iterations. The first submit calls it:
  // a runtime whose iterations are all pulled has no such threads, which halves what a lane costs in threads. Errors:
  // HOST_OUT_OF_MEMORY (a thread could not be started; the next call tries again).
  base::Status start_workers() GPUSHARE_REQUIRES(books);

  // Gives the lane the size that the scheduler promises.
  base::Status apply_size(LaneSlot& lane, bool grow_on_demand);
  // Gives the lane at least `bytes`, within the promise.
  base::Status ensure_size(LaneSlot& lane, uint64_t bytes);
  // Gives the lane the size that it has once more: makes room beside kept blocks, and waits for it if need be.
  base::Status reapply_size(LaneSlot& lane);
  // Called before an iteration by the thread that begins it. Reports no errors.
  void fit(LaneSlot& lane);

 private:
  base::Result<LaneSlot*> make_slot(uint32_t id);
  base::Status start_threads(LaneSlot& slot) GPUSHARE_REQUIRES(books);
  bool has_threads(const LaneSlot& slot) const GPUSHARE_REQUIRES(books) {
    return slot.reaper.joinable() && (slot.worker.joinable() || !have_workers_);
  }
  base::Status make_stream(LaneSlot& slot, uint32_t compute_units) GPUSHARE_EXCLUDES(books);
  void set_stream(LaneSlot& slot, std::shared_ptr<StreamImpl> stream) GPUSHARE_EXCLUDES(books);
  // Destroys the stream of a lane that has closed, and gives its partition back.
  void drop_stream(LaneSlot& slot) GPUSHARE_EXCLUDES(books);
  base::Status set_size(LaneSlot& lane, memory::Lane& lane_memory, uint64_t bytes);

  RuntimeImpl& runtime_;
  std::vector<std::unique_ptr<LaneSlot>> slots_ GPUSHARE_GUARDED_BY(books);  // by lane id
  std::vector<LaneSlot*> open_ GPUSHARE_GUARDED_BY(books);
  std::vector<LaneSlot*> flying_ GPUSHARE_GUARDED_BY(books);
  uint64_t openings_ GPUSHARE_GUARDED_BY(books) = 0;
  std::vector<uint64_t> wants_ GPUSHARE_GUARDED_BY(books);  // sizes promised last, by lane id
  base::Status failure_ GPUSHARE_GUARDED_BY(books);
  bool have_workers_ GPUSHARE_GUARDED_BY(books) = false;  // a session has submitted an iteration
};

}  // namespace gpushare::executor
