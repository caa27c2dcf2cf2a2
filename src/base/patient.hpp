// patient.hpp: questions to a library that may hang, as a driver's may. A thread of its own asks, and is waited for only
// so long.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "base/mutex.hpp"
#include "base/no_signals.hpp"
#include "base/status.hpp"

namespace gpushare::base {

// How many threads of this process hang in a library. A child of fork has none of them. Thread-safe.
class Hangs {
 public:
  bool any() const { return count(word_.load()) > 0; }
  void add() { change(1); }
  void drop() { change(-1); }

 private:
  // The process is in the upper half of the word and its count in the lower one, so that both change at once.
  static int32_t count(uint64_t word) {
    return static_cast<pid_t>(word >> 32) == getpid() ? static_cast<int32_t>(word) : 0;
  }
  void change(int32_t by) {
    uint64_t seen = word_.load();
    while (!word_.compare_exchange_weak(
        seen, uint64_t{static_cast<uint32_t>(getpid())} << 32 | static_cast<uint32_t>(count(seen) + by))) {
    }
  }

  std::atomic<uint64_t> word_{0};
};

// A question under way on a thread of its own. The thread may outlive this object, so the question owns what it uses; an
// answer that nobody takes is destroyed. One thread at a time uses the object. It must not be destroyed on the thread that
// asks.
template <class T>
class Asked {
 public:
  // `library`: its name for messages. Errors: NOT_READY (there is no thread to ask with).
  static Result<std::unique_ptr<Asked>> start(const char* library, std::function<Result<T>()> ask) {
    const auto failed = [library](const char* why) {
      return Status(GPUSHARE_NOT_READY, std::string(library) + why);
    };
    std::unique_ptr<Asked> asked(new Asked);
    try {
      const NoSignals no_signals;
      asked->thread_ = std::thread(
          [state = asked->state_, ask = std::move(ask), no_memory = failed(": no host memory")]() mutable {
            std::optional<Result<T>> found;
            try {
              found.emplace(ask());
            } catch (const std::bad_alloc&) {
              found.emplace(no_memory);
            }
            ask = {};
            state->answer(std::move(found));
          });
    } catch (const std::system_error&) {
      return failed(": no thread can be started that asks it");
    }
    return asked;
  }
  ~Asked() {
    if (!thread_.joinable()) return;
    if (state_->has_answer())
      thread_.join();
    else
      thread_.detach();
  }
  Asked(const Asked&) = delete;
  Asked& operator=(const Asked&) = delete;

  // Blocks until `until` at most. Empty: there is no answer by then. The answer is given once. Errors: those of `ask`;
  // NOT_READY (it had no host memory).
  std::optional<Result<T>> wait_until(std::chrono::steady_clock::time_point until) {
    std::optional<Result<T>> found = state_->wait_until(until);
    if (found) thread_.join();
    return found;
  }
  // Nobody waits any more. `hangs`, of static storage, counts the thread until it has an answer.
  void give_up(Hangs& hangs) { state_->give_up(hangs); }

 private:
  class State {
   public:
    void answer(std::optional<Result<T>> found) {
      MutexLock lock(mutex_);
      answer_ = std::move(found);
      answered_ = true;
      if (hangs_ != nullptr) hangs_->drop();
      changed_.notify_all();
    }
    bool has_answer() {
      MutexLock lock(mutex_);
      return answered_;
    }
    std::optional<Result<T>> wait_until(std::chrono::steady_clock::time_point until) {
      MutexLock lock(mutex_);
      while (!answered_ && changed_.wait_until(mutex_, until)) {
      }
      return std::exchange(answer_, std::nullopt);
    }
    void give_up(Hangs& hangs) {
      MutexLock lock(mutex_);
      if (answered_) return;
      hangs_ = &hangs;
      hangs.add();
    }

   private:
    Mutex mutex_;
    ConditionVariable changed_;
    std::optional<Result<T>> answer_ GPUSHARE_GUARDED_BY(mutex_);
    bool answered_ GPUSHARE_GUARDED_BY(mutex_) = false;
    Hangs* hangs_ GPUSHARE_GUARDED_BY(mutex_) = nullptr;
  };
  Asked() = default;

  const std::shared_ptr<State> state_ = std::make_shared<State>();
  std::thread thread_;
};

// The answer of `ask`, called on a thread of its own, which may outlive the call: `ask` owns what it uses. `hangs` has
// static storage. While a thread of `hangs` has not come back nothing is asked. Blocks for `patience` at most. Errors: those
// of `ask`; NOT_READY (the library hangs, or there is no thread to ask with: ask again later).
template <class T>
Result<T> ask_patiently(Hangs& hangs, const char* library, std::chrono::seconds patience,
                        std::function<Result<T>()> ask) {
  if (hangs.any()) return Status(GPUSHARE_NOT_READY, std::string(library) + " hangs in another call");
  GPUSHARE_ASSIGN_OR_RETURN(const auto asked, Asked<T>::start(library, std::move(ask)));
  std::optional<Result<T>> answer = asked->wait_until(std::chrono::steady_clock::now() + patience);
  if (answer) return *std::move(answer);
  asked->give_up(hangs);
  return Status(GPUSHARE_NOT_READY,
                format("%s has not answered for %lld s", library, static_cast<long long>(patience.count())));
}

}  // namespace gpushare::base
