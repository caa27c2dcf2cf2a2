// SPDX-License-Identifier: Apache-2.0
#include "memory/event_recorder.hpp"
#include "base/thread_local.hpp"

#include <sys/syscall.h>
#include <unistd.h>

namespace gpushare::memory {

void EventRecorder::record(AllocationEvent::Action action, Kind kind, Address address, uint64_t bytes,
                           const device::Stream* stream, SessionId session) {
  if (!enabled()) return;
  static GPUSHARE_THREAD_LOCAL uint64_t thread = 0;
  if (thread == 0) thread = static_cast<uint64_t>(syscall(SYS_gettid));
  AllocationEvent event;
  event.action = action;
  event.kind = kind;
  event.address = address;
  event.bytes = bytes;
  event.thread = thread;
  event.stream = stream == nullptr ? 0 : reinterpret_cast<uintptr_t>(stream->native());
  event.session = session;
  base::MutexLock lock(mutex_);
  event.time_ns = device_->now_ns();  // under the lock: times ascend
  if (events_.size() >= max_events_) events_.pop_front();
  events_.push_back(event);
}

std::vector<AllocationEvent> EventRecorder::events() const {
  base::MutexLock lock(mutex_);
  return {events_.begin(), events_.end()};
}

}  // namespace gpushare::memory
