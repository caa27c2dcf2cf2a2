// sim_device.hpp: one opened sim device: streams on a virtual clock.
//
// The clock. Virtual time stands still while the host enqueues: whatever is enqueued on an idle stream starts
// at the present time. Records, waits for passed events, and work of no duration take no virtual time and are
// done inside the enqueue. The clock moves only
//   - inside stream_synchronize, event_synchronize, stream_destroy and device_close: the caller takes steps
//     until the awaited point has passed, and not one further;
//   - inside a query that would answer NOT_READY for the `polls`-th time in a row, with no enqueue, step or
//     wait in between: it takes one step. So a polling loop ends, and a single query changes nothing.
// A step runs the oldest host function that is due, or else moves the clock to the next end of a work, copy
// or fill and completes all that end then, works first, each kind in the order of stream creation. Host
// functions thus run on the thread that waits or polls, without the lock, at their virtual time, and take
// none of it.
//
// Without host memory an enqueue or a wait fails and changes nothing, and works later: a step allocates nothing once it
// has begun. Room for every stream is made when the stream is.
//
// Threads. One lock guards everything and is not held while a host function runs. Several threads may wait:
// each takes steps while there are any, and while one runs a host function the others go on with what does
// not depend on it, so that a host function may itself wait for other threads. With one thread a run is a
// function of its calls and the seed; with several, of their order under the lock.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <boost/intrusive/slist.hpp>
#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <vector>

#include "base/role.hpp"
#include "device/sim/contention.hpp"
#include "device/support/software_device.hpp"

namespace gpushare::device::sim {

class Device;
class Event;
class Stream;

struct Op : SoftwareOp<Stream, Event> {
  enum class Kind { kWork, kBusCopy, kCopyWithin, kFill, kCallback, kRecord, kWait };
  Kind kind = Kind::kWork;
  uint32_t bus = 0;  // kBusCopy: the direction
  uint64_t duration_ns = 0;
  ContentionModel::Load load;  // kWork
};

// The role of the thread that holds a simulated device's mutex. Streams and events belong to one device, and no thread
// holds the mutexes of two, so their members name this role as their guard.
inline constexpr base::Role
    has_device;  // who holds the device's mutex: it guards the members of its streams and events

// A stream stands in one line at most: of those that wait for another stream, or of those that may go on.
using LineHook =
    boost::intrusive::slist_base_hook<boost::intrusive::link_mode<boost::intrusive::normal_link>>;

// Handles of backend.h are pointers to Device, Stream and Event.
class Stream : public std::enable_shared_from_this<Stream>, public LineHook {
 public:
  Stream(Device& device, uint64_t id, int32_t priority) : device_(device), id_(id), priority_(priority) {}
  Device& device() const { return device_; }
  base::Status query();
  base::Status synchronize();

 private:
  friend class Device;
  friend class Event;
  using Line = boost::intrusive::slist<Stream, boost::intrusive::constant_time_size<false>,
                                       boost::intrusive::cache_last<true>>;
  bool idle() const GPUSHARE_REQUIRES(has_device) { return queue_.empty(); }
  bool passed(uint64_t sequence) const GPUSHARE_REQUIRES(has_device) { return completed_ >= sequence; }
  base::Status failure_at(uint64_t sequence) const GPUSHARE_REQUIRES(has_device);

  Device& device_;
  const uint64_t id_;  // order of creation
  const int32_t priority_;
  double slow_factor_ GPUSHARE_GUARDED_BY(has_device) = 1;
  std::deque<Op> queue_ GPUSHARE_GUARDED_BY(has_device);  // the front is the op in progress
  bool started_ GPUSHARE_GUARDED_BY(has_device) = false;  // the front has been started
  bool in_callback_ GPUSHARE_GUARDED_BY(has_device) =
      false;  // the front is a host function that is running now
  double remaining_ns_ GPUSHARE_GUARDED_BY(has_device) = 0;  // kWork in progress: at full speed
  uint64_t end_ns_ GPUSHARE_GUARDED_BY(has_device) = 0;      // kBusCopy, kCopyWithin, kFill in progress
  uint64_t enqueued_ GPUSHARE_GUARDED_BY(has_device) = 0;
  uint64_t completed_ GPUSHARE_GUARDED_BY(has_device) = 0;
  uint64_t failed_sequence_ GPUSHARE_GUARDED_BY(has_device) = 0;
  base::Status error_ GPUSHARE_GUARDED_BY(has_device);  // sticky
  Line blocked_ GPUSHARE_GUARDED_BY(
      has_device);  // streams whose front waits for this one: they are not idle, and so not destroyed
};

class Event : public std::enable_shared_from_this<Event> {
 public:
  Event(Device& device, bool timing) : device_(device), timing_(timing) {}
  Device& device() const { return device_; }
  base::Status record(Stream& stream);
  base::Status query();
  base::Status synchronize();
  base::Status make_wait(Stream& stream);
  static base::Result<uint64_t> elapsed(Event& start, Event& end);

 private:
  friend class Device;
  base::Result<uint64_t> passed_time() const GPUSHARE_REQUIRES(has_device);

  Device& device_;
  const bool timing_;
  std::shared_ptr<Stream> stream_
      GPUSHARE_GUARDED_BY(has_device);  // of the last record; null before the first
  uint64_t sequence_ GPUSHARE_GUARDED_BY(has_device) = 0;
  uint64_t records_ GPUSHARE_GUARDED_BY(has_device) = 0;
  uint64_t time_ns_ GPUSHARE_GUARDED_BY(has_device) = 0;
};

class Device final : public SoftwareDevice<Device, Stream, Event, Op> {
 public:
  static base::Result<std::unique_ptr<Device>> open(const char* options);

  // Waits for all streams, before the device is deleted. Errors: INVALID_STATE from a host function.
  base::Status finish();
  void info(gpushare_backend_device_info* out_info) const;
  uint64_t now_ns() const;

  base::Result<Stream*> create_stream(int32_t priority);
  base::Status destroy_stream(Stream* stream);
  base::Status enqueue_copy(Stream* stream, uint64_t destination, uint64_t source, uint64_t bytes,
                            uint32_t kind);
  base::Status enqueue_work(Stream* stream, const gpushare_backend_work* work);

 private:
  friend SoftwareDevice;
  friend class Event;
  friend class Stream;

  struct Costs {
    double copy_bytes_per_ns = 0;
    double memory_bytes_per_ns = 0;
    uint64_t copy_latency_ns = 0;
    double jitter = 0;
    uint64_t polls = 0;
  };
  Device(std::unique_ptr<AddressSpace> memory, const Costs& costs, ContentionModel contention, uint64_t seed);

  // Whether the calling thread runs a host function of this stream, or of any stream of this device.
  static bool inside_callback_of(const Stream& stream);
  bool inside_callback() const;
  // DEVICE_LOST if it is lost, else `status`.
  base::Status unless_lost(const base::Status& status) const;
  base::Status enqueue(Stream& stream, Op op);
  void push(Stream& stream, Op op) GPUSHARE_REQUIRES(mutex_, has_device);
  // Starts what can start on `stream`, and on streams that were blocked on it.
  void advance(Stream& stream) noexcept GPUSHARE_REQUIRES(mutex_, has_device);
  // True when the front took no time and is done.
  bool start_front(Stream& stream) noexcept GPUSHARE_REQUIRES(mutex_, has_device);
  void finish_front(Stream& stream) noexcept GPUSHARE_REQUIRES(mutex_, has_device);
  void fail(Stream& stream, base::Status status) noexcept GPUSHARE_REQUIRES(mutex_, has_device);
  void lose() noexcept GPUSHARE_REQUIRES(mutex_, has_device);
  // False when there is nothing to do. May release the lock while a host function runs.
  bool step() GPUSHARE_REQUIRES(mutex_, has_device);
  void run_callback() GPUSHARE_REQUIRES(mutex_, has_device);
  bool move_clock() GPUSHARE_REQUIRES(mutex_, has_device);
  // Takes steps until `stream` has completed `sequence` ops. Errors: INVALID_STATE if that needs the end of a
  // host function that the caller runs in.
  base::Status wait_passed(Stream& stream, uint64_t sequence) GPUSHARE_REQUIRES(mutex_, has_device);
  // Counts a NOT_READY answer; true if a step was taken, so that the answer may have changed.
  bool poll() GPUSHARE_REQUIRES(mutex_, has_device);
  uint64_t memory_ns(uint64_t bytes_moved) const;
  void make_room(size_t streams) GPUSHARE_REQUIRES(mutex_, has_device);

  const Costs costs_;
  const ContentionModel contention_;

  base::ConditionVariable progress_;
  uint64_t now_ns_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  uint64_t next_stream_id_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  uint64_t polls_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  uint32_t running_callbacks_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  uint32_t waiting_threads_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  std::mt19937_64 random_ GPUSHARE_GUARDED_BY(mutex_);
  // In progress, by kind; each with room for all streams. Works and memory ops are kept in order of stream creation.
  std::vector<Stream*> working_ GPUSHARE_GUARDED_BY(mutex_);
  std::vector<Stream*> in_memory_ GPUSHARE_GUARDED_BY(mutex_);
  std::array<std::vector<Stream*>, 2> buses_ GPUSHARE_GUARDED_BY(mutex_);  // the front has the bus
  std::vector<Stream*> due_callbacks_ GPUSHARE_GUARDED_BY(mutex_);
  // Scratch of move_clock(), with room for all streams too.
  std::vector<ContentionModel::Load> loads_ GPUSHARE_GUARDED_BY(mutex_);
  std::vector<double> speeds_ GPUSHARE_GUARDED_BY(mutex_);
  std::vector<Stream*> done_ GPUSHARE_GUARDED_BY(mutex_);
  Stream::Line runnable_
      GPUSHARE_GUARDED_BY(mutex_);  // that advance() has still to look at; empty between its calls
};

}  // namespace gpushare::device::sim
