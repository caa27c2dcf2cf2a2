// SPDX-License-Identifier: Apache-2.0
#include "base/service_thread.hpp"

#include <exception>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/calls.hpp"
#include "base/cancel.hpp"
#include "base/mutex.hpp"
#include "base/no_signals.hpp"

namespace gpushare::base {

struct ServiceThread::State : std::enable_shared_from_this<State> {
  std::function<void()> body;
  Mutex mutex;
  std::vector<std::thread> threads GPUSHARE_GUARDED_BY(mutex);

  void start() {
    const MutexLock lock(mutex);
    threads.reserve(threads.size() + 1);
    const NoSignals no_signals;
    threads.emplace_back([state = shared_from_this()] { state->run(); });
  }
  GPUSHARE_CATCHES_FORCED_UNWIND void run() {
    const CancelOff cancel_off;
    const CallScope inside(kInsideCall);
    try {
      body();
    } catch (const ForcedUnwind&) {
      go_on();
      throw;
    }
  }
  void go_on() {
    try {
      start();
    } catch (const std::exception&) {
      body();  // no thread to be had: this one goes on while it ends
    }
  }
};

ServiceThread::ServiceThread(std::function<void()> body) : state_(std::make_shared<State>()) {
  state_->body = std::move(body);
  state_->start();
}

void ServiceThread::join() {
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

}  // namespace gpushare::base
