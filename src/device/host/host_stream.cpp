// SPDX-License-Identifier: Apache-2.0
#include "device/host/host_stream.hpp"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <thread>

#include "base/clock.hpp"
#include "base/no_memory.hpp"
#include "base/thread_local.hpp"
#include "device/host/wide_copy.hpp"
#include "device/support/ops_guard.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace gpushare::device::host {
namespace {

// The stream whose op this thread is running.
GPUSHARE_THREAD_LOCAL const Stream* t_running = nullptr;

void sleep_until_ns(uint64_t at_ns) {
  const uint64_t now = base::host_now_ns();
  if (at_ns > now) std::this_thread::sleep_for(std::chrono::nanoseconds(at_ns - now));
}

base::Status lost() {
  return device_lost("host");
}

}  // namespace

namespace {

// Into the file behind the pages: the kernel neither clears them first nor faults them in one by one.
bool write_pages(const AddressSpace::FreshPages& to, const char* source, uint64_t bytes) {
  for (uint64_t done = 0; done < bytes;) {
    const ssize_t wrote = pwrite(to.file, source + done, bytes - done, static_cast<off_t>(to.offset + done));
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return false;
    done += static_cast<uint64_t>(wrote);
  }
  return true;
}

// Fresh pages of a shared file are asked for at once: a fault for each of them takes longer than the copy. Pages of an earlier
// use are there, and asking for those costs little.
void move_bytes(char* destination, const char* source, uint64_t bytes, bool shared) {
  if (shared) {
    constexpr uintptr_t kPage = 4096;
    const uintptr_t begin = reinterpret_cast<uintptr_t>(destination) & ~(kPage - 1);
    (void)madvise(reinterpret_cast<void*>(begin), reinterpret_cast<uintptr_t>(destination) + bytes - begin,
                  MADV_POPULATE_WRITE);  // a kernel before Linux 5.14 faults as it goes
  }
  copy_bytes(destination, source, bytes);
}

}  // namespace

uint64_t Bus::copy(char* destination, const char* source, uint64_t bytes, uint64_t ready_ns, bool shared) {
  if (!capped()) {
    move_bytes(destination, source, bytes, shared);
    return base::host_now_ns();
  }
  uint64_t start = 0;
  {
    base::MutexLock lock(mutex_);
    const uint64_t ticket = next_ticket_++;
    while (serving_ != ticket) turn_changed_.wait(mutex_);
    start = std::max(ready_ns, free_at_ns_);
  }
  // About a millisecond of bus at a time, so that the bytes arrive evenly.
  const uint64_t chunk = std::clamp<uint64_t>(static_cast<uint64_t>(bytes_per_ns_ * 1e6), 64 << 10, 16 << 20);
  uint64_t due = start;
  for (uint64_t done = 0; done < bytes;) {
    const uint64_t step = std::min(chunk, bytes - done);
    move_bytes(destination + done, source + done, step, shared);
    done += step;
    due = start + static_cast<uint64_t>(static_cast<double>(done) / bytes_per_ns_);
    sleep_until_ns(due);
  }
  base::MutexLock lock(mutex_);
  free_at_ns_ = due;
  ++serving_;
  turn_changed_.notify_all();
  return due;
}

Stream::~Stream() {
  (void)stop();
}

bool Stream::on_own_thread() const {
  return t_running == this;
}

bool Stream::runs_inline(const Op& op) const {
  if (!idle() || op.bytes > kInlineBytes) return false;
  if (op.kind != Op::Kind::kCopy && op.kind != Op::Kind::kFill) return false;
  return (op.bus == nullptr || !op.bus->capped()) && slow_factor_.load(std::memory_order_relaxed) == 1.0;
}

base::Status Stream::enqueue(Op op) {
  base::MutexLock lock(mutex_);
  if (!error_.ok()) return error_;
  if (runs_inline(op)) {
    uint64_t end_ns = 0;
    return execute(op, end_ns);
  }
  if (op.bus != nullptr && op.bus->capped()) op.enqueued_ns = base::host_now_ns();
  return push(std::move(op));
}

base::Status Stream::push(Op op) {
  if (stopping_) return {GPUSHARE_INVALID_STATE, "the stream is being destroyed"};
  if (!thread_.joinable()) {
    try {
      thread_ = base::ServiceThread([this] { run(); });
    } catch (const std::system_error& error) {
      return {GPUSHARE_HOST_OUT_OF_MEMORY, std::string("cannot start the stream's thread: ") + error.what(),
              error.code().value()};
    }
  }
  queue_.push_back(std::move(op));
  ++enqueued_;
  if (thread_idle_) work_came_.notify_one();
  return {};
}

GPUSHARE_CATCHES_FORCED_UNWIND
void Stream::run() {
  // Capped copies and slow streams sleep: the default slack of 50 us would be added to each of them.
  prctl(PR_SET_TIMERSLACK, 1'000ul, 0, 0, 0);
  prctl(PR_SET_NAME, "gpushare-stream", 0, 0, 0);
  t_running = this;
  uint64_t end_ns = 0;  // when the op before was done; before this thread noticed, if it was a capped copy
  base::MutexLock lock(mutex_);
  for (;;) {
    while (queue_.empty() && !stopping_) {
      thread_idle_ = true;
      work_came_.wait(mutex_);
      thread_idle_ = false;
    }
    if (queue_.empty()) return;
    base::Status status;
    {
      const Op op = std::move(queue_.front());
      queue_.pop_front();
      const bool failed = !error_.ok();
      lock.unlock();
      try {
        status = run_op(op, failed, end_ns);
      } catch (const std::bad_alloc&) {
        status = base::no_memory();  // for the message of what failed
      } catch (const base::ForcedUnwind&) {
        complete({});  // the host function ended the thread: it counts as done, and another thread goes on
        throw;
      }
      // The op goes before the lock comes back: it may hold the last reference to another stream or event.
    }
    complete(std::move(status));
    lock.lock();
  }
}

void Stream::complete(base::Status status) {
  base::MutexLock lock(mutex_);
  const uint64_t sequence = completed_.load(std::memory_order_relaxed) + 1;
  if (!status.ok() && error_.ok()) {
    error_ = std::move(status);
    failed_sequence_.store(sequence, std::memory_order_relaxed);
  }
  completed_.store(sequence, std::memory_order_release);
  if (waiters_ > 0) work_done_.notify_all();
}

base::Status Stream::run_op(const Op& op, bool failed, uint64_t& end_ns) {
  if (op.kind == Op::Kind::kRecord) {
    if (op.event != nullptr) op.event->pass(op.sequence, std::max(end_ns, op.enqueued_ns));
    return {};
  }
  if (device_lost_.load(std::memory_order_acquire)) return lost();
  if (failed) return {};
  const uint64_t start = base::host_now_ns();
  base::Status status = execute(op, end_ns);
  const double factor = slow_factor_.load(std::memory_order_relaxed);
  if (factor > 1.0 && op.kind != Op::Kind::kWait) {
    const double spent = static_cast<double>(base::host_now_ns() - start);
    sleep_until_ns(start + static_cast<uint64_t>(spent * factor));
    end_ns = base::host_now_ns();
  }
  return status;
}

base::Status Stream::execute(const Op& op, uint64_t& end_ns) {
  if (op.kind == Op::Kind::kCopy && op.bus != nullptr) {
    end_ns = op.bus->copy(op.destination, op.source, op.bytes, std::max(op.enqueued_ns, end_ns),
                          op.file != nullptr);
    return {};
  }
  base::Status status = perform(op);
  end_ns = base::host_now_ns();
  return status;
}

base::Status Stream::perform(const Op& op) {
  switch (op.kind) {
    case Op::Kind::kCopy:
      if (op.fresh.file < 0 || !write_pages(op.fresh, op.source, op.bytes))
        copy_bytes(op.destination, op.source, op.bytes);
      return {};
    case Op::Kind::kFill:
      std::memset(op.destination, op.fill_value, op.bytes);
      return {};
    case Op::Kind::kCallback:
      return call_host_function(op.function, op.user_data);
    case Op::Kind::kWait:
      op.stream->wait_passed(op.sequence);
      return {};
    case Op::Kind::kRecord:
      return {};
  }
  return {};
}

base::Status Stream::query() {
  if (device_lost_.load(std::memory_order_acquire)) return lost();
  base::MutexLock lock(mutex_);
  if (!idle()) return error_.ok() ? not_ready() : error_;
  return error_;
}

base::Status Stream::synchronize() {
  if (on_own_thread()) {
    return {GPUSHARE_INVALID_STATE, "a host function may not wait for the stream that it runs on"};
  }
  base::MutexLock lock(mutex_);
  const uint64_t sequence = enqueued_;
  ++waiters_;
  while (completed_.load(std::memory_order_relaxed) < sequence) work_done_.wait(mutex_);
  --waiters_;
  if (device_lost_.load(std::memory_order_acquire)) return lost();
  return error_;
}

base::Status Stream::stop() {
  if (on_own_thread()) {
    return {GPUSHARE_INVALID_STATE, "a host function may not destroy the stream that it runs on"};
  }
  base::ServiceThread thread;
  {
    base::MutexLock lock(mutex_);
    stopping_ = true;
    work_came_.notify_one();
    thread = std::move(thread_);
  }
  if (thread.joinable()) thread.join();
  return {};
}

void Stream::wait_passed(uint64_t sequence) {
  if (passed(sequence)) return;
  base::MutexLock lock(mutex_);
  ++waiters_;
  while (completed_.load(std::memory_order_relaxed) < sequence) work_done_.wait(mutex_);
  --waiters_;
}

base::Status Stream::failure_at(uint64_t sequence) {
  if (sound_at(sequence)) return {};
  if (device_lost_.load(std::memory_order_acquire)) return lost();
  base::MutexLock lock(mutex_);
  return error_;
}

base::Status Event::record(Stream& stream) {
  base::MutexLock event_lock(mutex_);
  base::MutexLock stream_lock(stream.mutex_);
  if (!stream.error_.ok()) return stream.error_;
  if (!stream.idle()) {
    Op op;
    op.kind = Op::Kind::kRecord;
    op.sequence = records_ + 1;
    if (timing_) {
      op.event = shared_from_this();
      op.enqueued_ns = base::host_now_ns();
    }
    GPUSHARE_RETURN_IF_ERROR(stream.push(std::move(op)));
    time_ns_ = 0;
  } else if (timing_) {
    time_ns_ = base::host_now_ns();
  }
  ++records_;
  point_.sequence = stream.enqueued_;
  if (point_.stream.get() != &stream) point_.stream = stream.shared_from_this();
  return {};
}

void Event::pass(uint64_t record, uint64_t time_ns) {
  base::MutexLock lock(mutex_);
  if (record == records_) time_ns_ = time_ns;
}

Event::Point Event::point() {
  base::MutexLock lock(mutex_);
  return point_;
}

base::Status Event::query() {
  base::MutexLock lock(mutex_);
  if (point_.stream == nullptr) return {};
  if (!point_.stream->passed(point_.sequence)) return not_ready();
  return point_.stream->failure_at(point_.sequence);
}

base::Status Event::synchronize() {
  const Point wanted = point();
  if (wanted.stream == nullptr) return {};
  if (!wanted.stream->passed(wanted.sequence)) {
    if (wanted.stream->on_own_thread()) {
      return {GPUSHARE_INVALID_STATE,
              "a host function may not wait for an event of the stream that it runs on"};
    }
    wanted.stream->wait_passed(wanted.sequence);
  }
  return wanted.stream->failure_at(wanted.sequence);
}

base::Status Event::make_wait(Stream& stream) {
  {
    base::MutexLock lock(mutex_);
    if (point_.stream == nullptr || point_.stream.get() == &stream || point_.stream->passed(point_.sequence))
      return {};
  }
  Point wanted = point();
  Op op;
  op.kind = Op::Kind::kWait;
  op.sequence = wanted.sequence;
  op.stream = std::move(wanted.stream);
  return stream.enqueue(std::move(op));
}

bool Event::passed_time(uint64_t* out_ns) {
  base::MutexLock lock(mutex_);
  *out_ns = time_ns_;
  return timing_ && point_.stream != nullptr && point_.stream->passed(point_.sequence) &&
         point_.stream->sound_at(point_.sequence);
}

base::Status Event::not_timed() {
  base::MutexLock lock(mutex_);
  if (!timing_) return {GPUSHARE_INVALID_STATE, "the event was created without GPUSHARE_EVENT_TIMING"};
  if (point_.stream == nullptr) return {GPUSHARE_INVALID_STATE, "the event was never recorded"};
  if (!point_.stream->passed(point_.sequence)) return not_ready();
  return point_.stream->failure_at(point_.sequence);
}

base::Result<uint64_t> Event::elapsed(Event& start, Event& end) {
  for (;;) {
    uint64_t start_ns = 0, end_ns = 0;
    const bool started = start.passed_time(&start_ns), ended = started && end.passed_time(&end_ns);
    if (ended && end_ns >= start_ns) return end_ns - start_ns;
    if (ended) return base::Status(GPUSHARE_INVALID_STATE, "the end event passed before the start event");
    GPUSHARE_RETURN_IF_ERROR((started ? end : start).not_timed());
    // The event that had not passed before has passed meanwhile, so the loop looks again.
  }
}

}  // namespace gpushare::device::host
