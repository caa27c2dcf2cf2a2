// A stretch under the runtime's lock, and what is done once it is let go: progress told, dropped work destroyed, a
// point for the timeline.
// SPDX-License-Identifier: Apache-2.0
#include <exception>
#include <new>
#include <utility>
#include <vector>

#include <absl/cleanup/cleanup.h>

#include "base/cancel.hpp"
#include "base/log.hpp"
#include "base/thread_local.hpp"
#include "executor/internal.hpp"

namespace gpushare::executor {
namespace {

GPUSHARE_THREAD_LOCAL int t_callbacks = 0;
// The progress calls that the thread's innermost flush has still to make.
GPUSHARE_THREAD_LOCAL std::vector<Outbox::Finished>* t_telling = nullptr;

}  // namespace

NoWaitScope::NoWaitScope() {
  base::check_wait("a function of the caller's");
  ++base::no_wait_depth();
}
NoWaitScope::~NoWaitScope() {
  --base::no_wait_depth();
}
bool NoWaitScope::active() {
  return base::may_not_wait();
}

CallbackScope::CallbackScope() {
  base::check_wait("a function of the caller's");
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

void Outbox::flush() {
  const absl::Cleanup rest = [this] { flush_rest(); };  // also if a progress function ends the thread
  if (!finished.empty()) tell_progress();
}

void Outbox::flush_rest() noexcept {
  while (!dropped.empty()) {
    Dropped last = std::move(dropped.back());
    dropped.pop_back();
    RuntimeImpl::destroy(*last.session, std::move(last.work), true);
  }
  sessions.clear();
  tickets.clear();
  try {
    if (std::exchange(memory_changed, false)) runtime_.record_memory();
  } catch (...) {  // NOLINT(bugprone-empty-catch): a gap in the timeline
  }
}

// A progress function that calls the runtime may make it find more finished iterations. They are reported after the function has
// returned. Otherwise the function would be called inside itself without end, and out of order.
void Outbox::tell_progress() {
  std::vector<Finished> calls;
  calls.swap(finished);
  if (t_telling != nullptr) {
    try {
      t_telling->insert(t_telling->end(), calls.begin(), calls.end());
      return;
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): no memory to wait in: now, then
    }
  }
  std::vector<Finished>* const outer = std::exchange(t_telling, &calls);
  size_t next = 0;
  const absl::Cleanup ends = [&] {
    t_telling = outer;
    for (; next < calls.size(); ++next) RuntimeImpl::told(calls[next]);  // the thread ends before their turn
  };
  while (next < calls.size()) {
    const Finished call = std::move(calls[next++]);  // more may come behind it
    RuntimeImpl::tell(call);
  }
}

Section::~Section() {
  if (std::uncaught_exceptions() > exceptions_ && !base::thread_ends()) {
    if (!held_) lock();
    runtime_.collapse();
  }
  if (held_) runtime_.mutex_.unlock();
}

GPUSHARE_CATCHES_FORCED_UNWIND
void RuntimeImpl::tell(const Outbox::Finished& call) {
  const absl::Cleanup after = [&call] { told(call); };
  const NoWaitScope scope;
  try {
    call.session->runtime_->on_progress_(call.progress);
  } catch (const std::exception& error) {
    complain(error.what());
  } catch (const base::ForcedUnwind&) {
    base::thread_ends() = true;
    throw;
  } catch (...) {
    complain("something that is no std::exception");
  }
}

void RuntimeImpl::told(const Outbox::Finished& call) noexcept {
  RuntimeImpl& runtime = *call.session->runtime_;
  BooksLock lock(runtime.mutex_);
  if (--call.session->progress_calls_ == 0 && call.session->closed_)
    call.session->state_changed_.notify_all();
  runtime.left();
}

void RuntimeImpl::destroy(SessionImpl& session, std::unique_ptr<Work> work, bool stays) noexcept {
  {
    const CallbackScope scope;  // what goes with the work may not close the runtime that this thread is of
    work.reset();
  }
  RuntimeImpl& runtime = *session.runtime_;
  BooksLock lock(runtime.mutex_);
  if (--session.works_ == 0 && session.closed_) session.state_changed_.notify_all();
  if (stays) runtime.left();
}

Stay::Stay(RuntimeImpl& runtime) : runtime_(runtime) {
  BooksLock lock(runtime_.mutex_);
  entered_ = !runtime_.closing_;
  if (entered_) ++runtime_.staying_;
}

Stay::~Stay() {
  if (!entered_) return;
  BooksLock lock(runtime_.mutex_);
  runtime_.left();
}

void RuntimeImpl::left() {
  --staying_;
  if (closing_) actions_.changed().notify_all();
}

void RuntimeImpl::record(const Timeline::Record& what) {
  if (!record_timeline_) return;
  try {
    timeline_.add(what);
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): a gap in the timeline
  }
}

// Memory has locks of its own, which it may hold while it waits for the device.
void RuntimeImpl::record_memory() {
  const GatePass pass(memory_gate_.mine());
  if (!record_timeline_ || !pass) return;
  const memory::DeviceMemoryStats stats = memory_->stats();
  BooksLock lock(mutex_);
  const uint64_t time = now();
  timeline_.add({Timeline::Kind::kMemory, UINT32_MAX, 0, time, time, stats.persistent_bytes,
                 authority_->promised_bytes()});
}

}  // namespace gpushare::executor
