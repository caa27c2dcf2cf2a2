// fence.hpp: points in streams that later users of some bytes must wait for. An owner that gives bytes away
// leaves fences with them. The next owner lets its stream wait for those fences (no host wait), or waits on the
// host when it has no stream.
//
// Uses on other streams (record_use) share one event a stream and epoch: every use records that event anew, so
// it moves forward. When somebody asks whether the event has passed, it is not moved any more, and the next use
// begins a new epoch. Events are pooled: in steady state none is created.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "base/clock.hpp"
#include "base/flat_hash.hpp"
#include "base/mutex.hpp"
#include "base/status.hpp"
#include "device/device.hpp"

namespace gpushare::memory {

class Fences;

// Thread-safe.
class Fence {
 public:
  ~Fence();
  Fence(const Fence&) = delete;
  Fence& operator=(const Fence&) = delete;

  // Asks the device unless the answer is known already; that moves no simulated clock. A failed stream counts as passed:
  // nothing behind the fence will run.
  bool passed();
  // Work enqueued on `stream` from now on comes after the fence. Waits on the host only if the device refuses
  // to order it.
  void order(const device::Stream& stream);
  // The same without a wait. False: the device refuses to order it, as it does while `stream` captures a graph.
  bool try_order(const device::Stream& stream);
  // Blocks until passed.
  void wait();
  // Blocks until `deadline` at most; false: it has not passed. A simulated device may move its clock.
  bool wait_until(const base::Deadline& deadline);
  // Ends a pin, which no stream passes.
  void release();

 private:
  friend class Fences;
  Fence(Fences* fences, device::Event event) : fences_(fences), event_(std::move(event)) {}

  Fences* fences_;
  device::Event event_;
  std::atomic<bool> passed_{false};
  std::atomic<bool> closed_{false};  // asked about: its event moves no more
};

using FencePtr = std::shared_ptr<Fence>;  // null counts as passed
using FenceList = std::vector<FencePtr>;

void order_all(const FenceList& fences, const device::Stream& stream);
void wait_all(const FenceList& fences);
bool wait_all(const FenceList& fences, const base::Deadline& deadline);  // as Fence::wait_until
bool all_passed(const FenceList& fences);
// Drops the fences that have passed.
void prune(FenceList& fences);

// Makes fences and keeps their events for reuse. Thread-safe; outlives its fences.
class Fences {
 public:
  explicit Fences(device::Device& device) : device_(device) {}

  // The work on `stream` up to now. If the device has no event left, waits for the stream and returns null.
  FencePtr at_end_of(const device::Stream& stream);
  // The same for callers that can refuse the operation. Errors: INVALID_STATE (the stream captures a graph of
  // the native API, so that no point of it can be marked).
  base::Result<FencePtr> mark(const device::Stream& stream);
  // As at_end_of, shared with the other uses of this stream in the same epoch; may come to mean a later point.
  // The stream may be destroyed while the fence lives. Errors: the device's.
  base::Result<FencePtr> use_of(const device::Stream& stream);
  // Makes a fence that passes when release() is called, for the host's own use of some bytes. A stream cannot be ordered
  // behind such a pin: whoever needs that order waits on the host.
  FencePtr pin() { return FencePtr(new Fence(this, device::Event())); }
  // Events held for reuse; trim gives them back.
  size_t pooled() const;
  void trim();

 private:
  friend class Fence;
  base::Result<device::Event> take_event();
  void give_event(device::Event event);

  device::Device& device_;
  mutable base::Mutex mutex_;
  std::vector<device::Event> pool_ GPUSHARE_GUARDED_BY(mutex_);
  base::Mutex uses_mutex_;  // taken before mutex_
  base::FlatHashMap<gpushare_backend_stream*, FencePtr> open_uses_ GPUSHARE_GUARDED_BY(uses_mutex_);
};

}  // namespace gpushare::memory
