// cuda_stream.hpp: streams and events of the cuda device, over CUstream and CUevent.
//
// Events. CUevents come from two pools (with and without timing), because creating one costs a driver lock, and
// iterations need many. A pooled CUevent may have been recorded for its last owner. Therefore each Event knows itself
// whether it was recorded.
//
// Host functions. A function that throws fails its stream alone: later host functions of the stream are skipped, and ops
// on it return CALLBACK_FAILED. Copies and kernels that are enqueued already cannot be called back.
//
// Waits. A waiting thread queries for the first spin_us, because much of the work that is waited for takes no longer than
// a wake-up. Then, with wait=block (the default), it sleeps in the driver; with wait=callback it sleeps on a lock of ours
// until a host function of the driver wakes it. With wait=spin it polls in the driver from the start, which burns a core.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/clock.hpp"
#include "base/mutex.hpp"
#include "base/status.hpp"
#include "device/cuda/cuda_context.hpp"
#include "gpushare/backend.h"

namespace gpushare::device::cuda {

class Device;
class Partition;

// The CUevents not in use. Thread-safe; its methods need the context to be current.
class EventPool {
 public:
  EventPool(Context& context, bool blocking) : context_(context), blocking_(blocking) {}
  base::Result<api::CUevent> take(bool timing);
  // Keeps the event or, when kKept are there, destroys it.
  void put(api::CUevent event, bool timing);
  // Destroys all that are kept.
  void clear();

 private:
  static constexpr size_t kKept = 256;
  Context& context_;
  const bool blocking_;
  base::Mutex mutex_;
  std::vector<api::CUevent> free_[2] GPUSHARE_GUARDED_BY(mutex_);
};

enum class WaitMode { kBlock, kSpin, kCallback };

// Asks until the driver answers otherwise than NOT_READY, or spin_ns are over. Returns the last answer. Rests between two
// questions, because each takes a lock of the driver that the launches of other threads want as well.
template <class Query>
api::CUresult ask_for(uint64_t spin_ns, Query query) {
  constexpr uint64_t kRestNs = 1'000;
  api::CUresult now = query();
  if (now != api::CUDA_ERROR_NOT_READY || spin_ns == 0) return now;
  const base::Deadline until = base::Deadline::after(spin_ns);
  while (now == api::CUDA_ERROR_NOT_READY && !until.passed()) {
    for (const uint64_t rested_ns = base::host_now_ns() + kRestNs; base::host_now_ns() < rested_ns;) {
    }
    now = query();
  }
  return now;
}

// Waits by host function: a stream of our own waits for the event on the device, and the host function behind that wait
// wakes the thread. On the event's own stream the function would come after everything enqueued there meanwhile. The
// driver may run the host functions of all streams one at a time, so ours may stand behind a slow one. Therefore the
// event is queried now and then as well. A waiter that ends before its function has come is set aside.
// Thread-safe; needs the context to be current.
class CallbackWaits {
 public:
  explicit CallbackWaits(Context& context) : context_(context) {}
  // Waits until the event's last record has passed. Errors: the driver's.
  base::Status wait(api::CUevent event);
  // Destroys the streams once all functions still to come have run. No thread may be waiting.
  void clear();

 private:
  struct Waiter {
    api::CUstream stream = nullptr;
    base::Mutex mutex;
    base::ConditionVariable woken;
    bool passed GPUSHARE_GUARDED_BY(mutex) = false;
  };
  static void wake(void* waiter);
  base::Result<std::unique_ptr<Waiter>> take();

  Context& context_;
  base::Mutex mutex_;
  std::vector<std::unique_ptr<Waiter>> free_ GPUSHARE_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Waiter>> late_ GPUSHARE_GUARDED_BY(mutex_);  // their function is still to come
};

// State that a stream shares with its host functions. It outlives the stream as long as a function is pending.
class HostFunctions {
 public:
  // Enqueues `function`. Errors: the driver's.
  base::Status launch(Context& context, api::CUstream stream, gpushare_host_function function,
                      void* user_data);
  // CALLBACK_FAILED once a function among the first `count` has thrown.
  base::Status failure(uint64_t count) const;
  uint64_t launched() const { return launched_.load(std::memory_order_relaxed); }
  bool pending() const { return finished_.load(std::memory_order_acquire) != launched(); }

 private:
  struct Call {
    HostFunctions* owner;
    gpushare_host_function function;
    void* user_data;
    uint64_t number;  // 1, 2, ...
  };
  static void run(void* call);

  std::atomic<uint64_t> launched_{0};
  std::atomic<uint64_t> finished_{0};
  std::atomic<uint64_t> failed_{0};  // number of the first call that threw; 0 = none
  mutable base::Mutex mutex_;
  base::Status error_ GPUSHARE_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Call>> calls_ GPUSHARE_GUARDED_BY(mutex_);  // all of them
  std::vector<Call*> free_calls_ GPUSHARE_GUARDED_BY(mutex_);
};

class Stream {
 public:
  // `adopted`: the handle belongs to somebody else, who destroys it.
  Stream(Device& device, api::CUstream handle, Partition* partition, bool adopted = false)
      : device_(device),
        handle_(handle),
        partition_(partition),
        adopted_(adopted),
        functions_(std::make_shared<HostFunctions>()) {}
  Device& device() const { return device_; }
  api::CUstream handle() const { return handle_; }
  Partition* partition() const { return partition_; }  // null: the whole device
  bool adopted() const { return adopted_; }
  const std::shared_ptr<HostFunctions>& functions() const { return functions_; }

  // Errors: also INVALID_STATE while the stream captures a graph, where a query or wait would end the
  // capture.
  base::Status query();
  // Other errors come only after the work has finished, or with a lost context.
  base::Status synchronize();
  base::Status failure() const { return functions_->failure(functions_->launched()); }

  // True if the stream captures a CUDA graph, also one that has become invalid. The context must be current.
  base::Result<bool> capturing();
  // INVALID_STATE if the stream captures a graph. The context must be current.
  base::Status check_capturing(const char* what);
  // Ends a capture and destroys what it made; true if there was one. Errors: INVALID_STATE (begun by another
  // thread, which alone can end it).
  base::Result<bool> drop_capture();

 private:
  // Waits without spinning. Fails without waiting if the driver refuses a call that sleeping needs.
  base::Status sleep();
  Device& device_;
  const api::CUstream handle_;
  Partition* const partition_;
  const bool adopted_;
  const std::shared_ptr<HostFunctions> functions_;
};

class Event {
 public:
  Event(Device& device, api::CUevent handle, bool timing)
      : device_(device), handle_(handle), timing_(timing) {}
  Device& device() const { return device_; }
  api::CUevent handle() const { return handle_; }
  bool timing() const { return timing_; }

  base::Status record(Stream& stream);
  base::Status query();
  base::Status synchronize();
  // Makes work enqueued later on `stream` wait for this event.
  base::Status make_wait(Stream& stream);
  static base::Result<uint64_t> elapsed(Event& start, Event& end);

 private:
  struct Point {
    std::shared_ptr<HostFunctions> functions;  // of the stream recorded on; null: never recorded
    uint64_t launched = 0;                     // host functions before the record
  };
  Point point() const;
  Device& device_;
  const api::CUevent handle_;
  const bool timing_;
  mutable base::Mutex mutex_;
  Point point_ GPUSHARE_GUARDED_BY(mutex_);
};

}  // namespace gpushare::device::cuda
