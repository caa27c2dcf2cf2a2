// SPDX-License-Identifier: Apache-2.0
#include "memory/fence.hpp"

#include <algorithm>
#include <chrono>
#include <new>
#include <thread>

#include "base/waits.hpp"

namespace gpushare::memory {

Fence::~Fence() {
  if (event_) fences_->give_event(std::move(event_));
}

bool Fence::passed() {
  if (passed_.load(std::memory_order_acquire)) return true;
  if (!event_) return false;
  closed_.store(true);
  const base::QuietQueries quiet;  // owners ask with their locks held
  if (event_.query().code() == GPUSHARE_NOT_READY) return false;
  passed_.store(true, std::memory_order_release);
  return true;
}

void Fence::order(const device::Stream& stream) {
  if (passed_.load(std::memory_order_acquire)) return;
  if (!event_ || !stream.wait(event_).ok()) wait();
}

bool Fence::try_order(const device::Stream& stream) {
  return passed_.load(std::memory_order_acquire) || (event_ && stream.wait(event_).ok()) || passed();
}

void Fence::wait() {
  if (passed_.load(std::memory_order_acquire)) return;
  if (!event_) {
    base::check_wait("a block that the host uses");
    return passed_.wait(false, std::memory_order_acquire);
  }
  closed_.store(true);
  // A failure is the stream's own: nothing behind it runs any more, so nobody touches the bytes.
  const base::Status ignored = event_.synchronize();
  passed_.store(true, std::memory_order_release);
}

// No call of a device waits for an event with a deadline, so it is asked again and again.
bool Fence::wait_until(const base::Deadline& deadline) {
  using std::chrono::microseconds;
  constexpr microseconds kFirst{20}, kMost{1000};
  if (deadline.never()) {
    wait();
    return true;
  }
  for (microseconds pause = kFirst;; pause = std::min(2 * pause, kMost)) {
    if (passed_.load(std::memory_order_acquire)) return true;
    if (event_) {
      closed_.store(true);
      if (event_.query().code() != GPUSHARE_NOT_READY) {
        passed_.store(true, std::memory_order_release);
        return true;
      }
    } else {
      base::check_wait("a block that the host uses");
    }
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(pause);
  }
}

void Fence::release() {
  passed_.store(true, std::memory_order_release);
  passed_.notify_all();
}

void order_all(const FenceList& fences, const device::Stream& stream) {
  for (const FencePtr& fence : fences)
    if (fence) fence->order(stream);
}

void wait_all(const FenceList& fences) {
  for (const FencePtr& fence : fences)
    if (fence) fence->wait();
}

bool wait_all(const FenceList& fences, const base::Deadline& deadline) {
  return std::all_of(fences.begin(), fences.end(),
                     [&](const FencePtr& fence) { return !fence || fence->wait_until(deadline); });
}

bool all_passed(const FenceList& fences) {
  return std::all_of(fences.begin(), fences.end(),
                     [](const FencePtr& fence) { return !fence || fence->passed(); });
}

void prune(FenceList& fences) {
  fences.erase(
      std::remove_if(fences.begin(), fences.end(), [](const FencePtr& f) { return !f || f->passed(); }),
      fences.end());
}

base::Result<device::Event> Fences::take_event() {
  {
    base::MutexLock lock(mutex_);
    if (!pool_.empty()) {
      device::Event event = std::move(pool_.back());
      pool_.pop_back();
      return event;
    }
  }
  return device_.create_event();
}

void Fences::give_event(device::Event event) {
  base::MutexLock lock(mutex_);
  try {
    pool_.push_back(std::move(event));
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): it is destroyed instead
  }
}

size_t Fences::pooled() const {
  base::MutexLock lock(mutex_);
  return pool_.size();
}

void Fences::trim() {
  {
    base::MutexLock lock(uses_mutex_);
    for (auto it = open_uses_.begin(); it != open_uses_.end();) {
      const bool unneeded = it->second.use_count() == 1;
      if (unneeded)
        open_uses_.erase(it++);
      else
        ++it;
    }
  }
  std::vector<device::Event> dropped;
  base::MutexLock lock(mutex_);
  dropped.swap(pool_);
}

FencePtr Fences::at_end_of(const device::Stream& stream) {
  auto fence = mark(stream);
  return fence.ok() ? std::move(fence).value() : nullptr;
}

base::Result<FencePtr> Fences::mark(const device::Stream& stream) {
  auto event = take_event();
  if (event.ok()) {
    FencePtr fence(new Fence(this, std::move(event).value()));
    if (stream.record(fence->event_).ok()) return fence;
  }
  const base::Status waited = stream.synchronize();
  // A failed stream runs nothing any more. A stream that captures a graph still has its earlier work to do.
  if (waited.code() == GPUSHARE_INVALID_STATE) return waited;
  return FencePtr();
}

base::Result<FencePtr> Fences::use_of(const device::Stream& stream) {
  base::MutexLock lock(uses_mutex_);
  // Streams come and go: forget those whose fences nobody holds.
  if (open_uses_.size() >= 64 && !open_uses_.contains(stream.get())) {
    for (auto it = open_uses_.begin(); it != open_uses_.end();) {
      if (it->second.use_count() == 1)
        open_uses_.erase(it++);
      else
        ++it;
    }
  }
  FencePtr& fence = open_uses_[stream.get()];
  for (int attempt = 0; attempt < 2; ++attempt) {
    if (!fence || fence->closed_.load()) {
      auto event = take_event();
      if (!event.ok()) {
        open_uses_.erase(stream.get());
        return event.status();
      }
      fence.reset(new Fence(this, std::move(event).value()));
    }
    if (auto status = stream.record(fence->event_); !status.ok()) {
      open_uses_.erase(stream.get());
      return status;
    }
    // Somebody who asked meanwhile may have seen the event before it moved: this use then needs an event of
    // its own, which nobody else holds yet.
    if (!fence->closed_.load()) break;
  }
  return fence;
}

}  // namespace gpushare::memory
