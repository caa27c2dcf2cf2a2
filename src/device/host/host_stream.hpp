// host_stream.hpp: streams, events and the copy bus of the host device.
//
// An event records a point: (stream, sequence number). The point has passed when the stream has completed that many ops.
// So a wait needs no state of the event, and re-recording cannot disturb earlier waiters.
//
// Hot path. On an idle stream the calling thread itself does a record, a wait for a passed event and a small copy, under
// two uncontended locks. The stream's thread starts with the first op that must run asynchronously.
//
// Lock order: Event::mutex_ before Stream::mutex_. No lock is held while an op runs, except during a small inline copy.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>

#include "base/mutex.hpp"
#include "base/service_thread.hpp"
#include "base/status.hpp"
#include "device/support/address_space.hpp"
#include "device/support/software_device.hpp"

namespace gpushare::device::host {

class Device;
class Event;
class Stream;

// One direction between host and device: copies take turns in the order they come and last at least bytes /
// bandwidth. A bus does not lose time because a thread woke late: a copy counts from the time at which it could
// have begun, and a late thread sleeps less.
class Bus {
 public:
  // 0 = no cap: copies then run side by side at memcpy's speed.
  explicit Bus(double gigabytes_per_s) : bytes_per_ns_(gigabytes_per_s) {}
  bool capped() const { return bytes_per_ns_ > 0; }
  // Copies, and blocks until the copy is done. `ready_ns`: when the copy could have begun. `shared`: the destination is
  // in the owner's mapping of shared memory. Returns the time at which the copy ends by the bandwidth.
  uint64_t copy(char* destination, const char* source, uint64_t bytes, uint64_t ready_ns, bool shared);

 private:
  const double bytes_per_ns_;
  base::Mutex mutex_;
  base::ConditionVariable turn_changed_;
  uint64_t next_ticket_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  uint64_t serving_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  uint64_t free_at_ns_ GPUSHARE_GUARDED_BY(mutex_) = 0;
};

struct Op : SoftwareOp<Stream, Event> {
  enum class Kind { kCopy, kFill, kCallback, kRecord, kWait };
  Kind kind = Kind::kCallback;
  Bus* bus = nullptr;                      // null: no bus between source and destination
  std::shared_ptr<const SharedFile> file;  // kCopy: the destination is in its mapping
  AddressSpace::FreshPages fresh;          // kCopy without a bus
  uint64_t enqueued_ns = 0;                // of capped copies and records of timing events
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  Stream(Device& device, const std::atomic<bool>& device_lost) : device_(device), device_lost_(device_lost) {}
  ~Stream();
  Device& device() const { return device_; }

  // Errors: the stream's sticky one, DEVICE_LOST, HOST_OUT_OF_MEMORY (no thread), INVALID_STATE (stopped).
  base::Status enqueue(Op op);
  base::Status query();
  // Errors: also INVALID_STATE from a function that runs on this stream.
  base::Status synchronize();
  // Finishes the queue and joins the thread. Errors: INVALID_STATE from a function that runs on this stream.
  base::Status stop();
  // Every op from now on takes `factor` times as long.
  void slow_down(double factor) { slow_factor_.store(factor, std::memory_order_relaxed); }

  bool passed(uint64_t sequence) const { return completed_.load(std::memory_order_acquire) >= sequence; }
  void wait_passed(uint64_t sequence);
  // The failure that the op `sequence` lies behind; OK if none.
  base::Status failure_at(uint64_t sequence);
  // True if no op before `sequence` has failed, and the device has not.
  bool sound_at(uint64_t sequence) const {
    const uint64_t failed = failed_sequence_.load(std::memory_order_acquire);
    return !device_lost_.load(std::memory_order_acquire) && (failed == 0 || failed >= sequence);
  }

 private:
  friend class Event;
  static constexpr uint64_t kInlineBytes =
      64ull * 1024;  // copying so much costs far less than waking a thread

  bool idle() const GPUSHARE_REQUIRES(mutex_) {
    return completed_.load(std::memory_order_relaxed) == enqueued_;
  }
  base::Status push(Op op) GPUSHARE_REQUIRES(mutex_);
  bool runs_inline(const Op& op) const GPUSHARE_REQUIRES(mutex_);
  void run();
  // `end_ns`: when the op before was done; set to when this one was.
  // On the stream's thread; `failed`: an op before it did.
  base::Status run_op(const Op& op, bool failed, uint64_t& end_ns);
  base::Status execute(const Op& op, uint64_t& end_ns);
  base::Status perform(const Op& op);
  void complete(base::Status status) GPUSHARE_EXCLUDES(mutex_);  // the op that run() is at
  bool on_own_thread() const;

  Device& device_;
  const std::atomic<bool>& device_lost_;
  std::atomic<double> slow_factor_{1.0};
  std::atomic<uint64_t> completed_{0};
  std::atomic<uint64_t> failed_sequence_{0};  // of the first op that failed; 0 = none

  base::Mutex mutex_;
  base::ConditionVariable work_came_;
  base::ConditionVariable work_done_;
  std::deque<Op> queue_ GPUSHARE_GUARDED_BY(mutex_);
  uint64_t enqueued_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  uint32_t waiters_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  bool stopping_ GPUSHARE_GUARDED_BY(mutex_) = false;
  bool thread_idle_ GPUSHARE_GUARDED_BY(mutex_) = false;
  base::Status error_ GPUSHARE_GUARDED_BY(mutex_);          // sticky
  base::ServiceThread thread_ GPUSHARE_GUARDED_BY(mutex_);  // joined by stop()
};

class Event : public std::enable_shared_from_this<Event> {
 public:
  Event(Device& device, bool timing) : device_(device), timing_(timing) {}
  Device& device() const { return device_; }

  base::Status record(Stream& stream);
  base::Status query();
  base::Status synchronize();
  // Makes work enqueued later on `stream` wait for this event.
  base::Status make_wait(Stream& stream);
  static base::Result<uint64_t> elapsed(Event& start, Event& end);
  // Called by the stream's thread when record number `record` is passed, at `time_ns`.
  void pass(uint64_t record, uint64_t time_ns);

 private:
  struct Point {
    std::shared_ptr<Stream> stream;
    uint64_t sequence = 0;
  };
  Point point();
  // The status that says why there is no passed_time().
  base::Status not_timed();
  // False: the event has not passed, has failed, or keeps no time.
  bool passed_time(uint64_t* out_ns);

  Device& device_;
  const bool timing_;
  base::Mutex mutex_;
  Point point_ GPUSHARE_GUARDED_BY(mutex_);
  uint64_t records_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  uint64_t time_ns_ GPUSHARE_GUARDED_BY(mutex_) = 0;
};

}  // namespace gpushare::device::host
