// gate.hpp: keeps an object from going away under its users without a lock between them. Users enter and leave
// (one atomic each). The thread that takes the object away closes the gate, which waits until the last user
// has left.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <utility>

#include "base/thread_local.hpp"

namespace gpushare::executor {

// Closed at first. enter and leave from any thread; open and close by one thread at a time, not from inside.
// Enter only for short stretches that do not wait for other threads of the runtime.
class Gate {
 public:
  bool enter() {
    if ((state_.fetch_add(1, std::memory_order_acquire) & kClosed) == 0) return true;
    leave();
    return false;
  }
  void leave() {
    if (state_.fetch_sub(1, std::memory_order_release) == (kClosed | 1)) state_.notify_all();
  }
  // Waits until all users inside at the call have left; others may come and go meanwhile.
  void drain() const {
    while ((state_.load(std::memory_order_acquire) & ~kClosed) != 0) std::this_thread::yield();
  }
  void open() { state_.fetch_and(~kClosed, std::memory_order_release); }
  // Closes the gate unless a user is inside. True if the gate is closed now.
  bool try_close() {
    uint32_t nobody = 0;
    return state_.compare_exchange_strong(nobody, kClosed, std::memory_order_acq_rel);
  }
  void close() {
    uint32_t seen = state_.fetch_or(kClosed, std::memory_order_acq_rel) | kClosed;
    while (seen != kClosed) {
      state_.wait(seen, std::memory_order_acquire);
      seen = state_.load(std::memory_order_acquire);
    }
  }

 private:
  static constexpr uint32_t kClosed = 1u << 31;
  std::atomic<uint32_t> state_{kClosed};
};

// A gate for many threads at once: each uses one of a few counters on cache lines of their own.
class WideGate {
 public:
  Gate& mine() {
    static constinit std::atomic<uint32_t> next{0};
    static GPUSHARE_THREAD_LOCAL uint32_t stripe = kStripes;  // not chosen yet
    if (stripe == kStripes) stripe = next.fetch_add(1, std::memory_order_relaxed) % kStripes;
    return stripes_[stripe].gate;
  }
  void open() {
    for (Stripe& stripe : stripes_) stripe.gate.open();
  }
  void close() {
    for (Stripe& stripe : stripes_) stripe.gate.close();
  }
  void drain() const {
    for (const Stripe& stripe : stripes_) stripe.gate.drain();
  }

 private:
  static constexpr size_t kStripes = 16;
  struct alignas(64) Stripe {
    Gate gate;
  };
  std::array<Stripe, kStripes> stripes_;
};

// Enters the gate when it is made, if the gate is open; leaves the gate when it is destroyed.
class GatePass {
 public:
  explicit GatePass(Gate& gate) : gate_(gate.enter() ? &gate : nullptr) {}
  GatePass(GatePass&& other) noexcept : gate_(std::exchange(other.gate_, nullptr)) {}
  ~GatePass() {
    if (gate_ != nullptr) gate_->leave();
  }
  GatePass(const GatePass&) = delete;
  GatePass& operator=(const GatePass&) = delete;
  explicit operator bool() const { return gate_ != nullptr; }

 private:
  Gate* gate_;
};

}  // namespace gpushare::executor
