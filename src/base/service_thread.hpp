// service_thread.hpp: a thread that the library starts. It is never cancelled, and takes none of the process's signals.
// If a callback ends it (pthread_exit), another thread goes on in its place: the body is called again, from its start.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/calls.hpp"
#include "base/cancel.hpp"
#include "base/mutex.hpp"
#include "base/no_signals.hpp"

namespace gpushare::base {

class ServiceThread {
 public:
  ServiceThread() = default;
  // The body returns to end the thread. Where it calls the caller's functions it must be ready to be unwound, and to be
  // called again on another thread. Throws std::system_error, std::bad_alloc.
  explicit ServiceThread(std::function<void()> body) : state_(std::make_shared<State>()) {
    state_->body = std::move(body);
    start(state_);
  }
  bool joinable() const { return state_ != nullptr; }
  // Waits until the body has returned.
  void join() {
    for (;;) {
      std::thread thread;
      {
        const MutexLock lock(state_->mutex);
        if (state_->threads.empty()) break;
        thread = std::move(state_->threads.back());
        state_->threads.pop_back();
      }
      thread.join();
    }
    state_.reset();
  }

 private:
  struct State {
    std::function<void()> body;
    Mutex mutex;
    std::vector<std::thread> threads GPUSHARE_GUARDED_BY(mutex);
  };

  static void start(const std::shared_ptr<State>& state) {
    const MutexLock lock(state->mutex);
    state->threads.reserve(state->threads.size() + 1);
    const NoSignals no_signals;
    state->threads.emplace_back([state] { run(*state); });
  }
  GPUSHARE_CATCHES_FORCED_UNWIND static void run(State& state) {
    const CancelOff cancel_off;
    const CallScope inside(kInsideCall);
    try {
      state.body();
    } catch (const ForcedUnwind&) {
      go_on(state);
      throw;
    }
  }
  static void go_on(State& state) {
    try {
      const MutexLock lock(state.mutex);
      state.threads.reserve(state.threads.size() + 1);
      const NoSignals no_signals;
      state.threads.emplace_back([&state] { run(state); });
    } catch (const std::exception&) {
      state.body();  // no thread to be had: this one goes on while it ends
    }
  }

  std::shared_ptr<State> state_;
};

}  // namespace gpushare::base
