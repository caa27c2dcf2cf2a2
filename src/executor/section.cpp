// A stretch under the runtime's lock, and what is done once it is let go: progress told, dropped work destroyed, a point for the timeline.
// SPDX-License-Identifier: Apache-2.0
#include <exception>
#include <utility>

#include "base/log.hpp"
#include "executor/internal.hpp"

namespace gpushare::executor {
namespace {

thread_local int t_no_wait = 0;
thread_local int t_callbacks = 0;

}  // namespace

NoWaitScope::NoWaitScope() {
  ++t_no_wait;
}
NoWaitScope::~NoWaitScope() {
  --t_no_wait;
}
bool NoWaitScope::active() {
  return t_no_wait > 0;
}

CallbackScope::CallbackScope() {
  ++t_callbacks;
}
CallbackScope::~CallbackScope() {
  --t_callbacks;
}
bool CallbackScope::active() {
  return t_callbacks > 0;
}

namespace {

void complain(const char* what) noexcept {
  try {
    base::log(base::kWarning, std::string("the progress function threw: ") + what);
  } catch (...) {  // NOLINT(bugprone-empty-catch): no memory for the line
  }
}

}  // namespace

void Outbox::flush() noexcept {
  std::vector<Finished> calls;
  calls.swap(finished);
  for (const Finished& call : calls) {
    const NoWaitScope scope;
    try {
      runtime_.on_progress_(call.progress);
    } catch (const std::exception& error) {
      complain(error.what());
    } catch (...) {
      complain("something that is no std::exception");
    }
  }
  if (!calls.empty()) runtime_.progress_told(calls);
  while (!dropped.empty()) {
    const std::unique_ptr<Work> work = std::move(dropped.back());
    dropped.pop_back();
  }
  sessions.clear();
  tickets.clear();
  try {
    if (std::exchange(memory_changed, false)) runtime_.record_memory();
  } catch (...) {  // NOLINT(bugprone-empty-catch): a gap in the timeline
  }
}

Section::~Section() {
  if (std::uncaught_exceptions() > exceptions_) {
    if (!held_) lock();
    runtime_.collapse();
  }
  if (held_) runtime_.mutex_.unlock();
}

void RuntimeImpl::progress_told(const std::vector<Outbox::Finished>& calls) {
  base::MutexLock lock(mutex_);
  for (const Outbox::Finished& call : calls)
    if (--call.session->progress_calls_ == 0 && call.session->closed_)
      call.session->state_changed_.notify_all();
}

// Memory has locks of its own, which it may hold while it waits for the device.
void RuntimeImpl::record_memory() {
  const GatePass pass(memory_gate_.mine());
  if (!record_timeline_ || !pass) return;
  const memory::DeviceMemoryStats stats = memory_->stats();
  base::MutexLock lock(mutex_);
  const uint64_t time = now();
  timeline_.add({Timeline::Kind::kMemory, UINT32_MAX, 0, time, time, stats.persistent_bytes,
                 stats.ephemeral_bytes, scheduler_->promised_bytes()});
}

}  // namespace gpushare::executor
