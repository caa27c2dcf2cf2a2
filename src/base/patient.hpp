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

// The answer of `ask`, called on a thread of its own, which may outlive the call: `ask` owns what it uses. `hangs` has
// static storage. While a thread of `hangs` has not come back nothing is asked. `library`: its name for messages. Blocks
// for `patience` at most. Errors: those of `ask`; NOT_READY (the library hangs, or there is no thread or no memory to ask
// with: ask again later).
template <class T>
Result<T> ask_patiently(Hangs& hangs, const char* library, std::chrono::seconds patience,
                        std::function<Result<T>()> ask) {
  struct Question {
    Mutex mutex;
    ConditionVariable answered;
    std::optional<Result<T>> answer GPUSHARE_GUARDED_BY(mutex);
    bool given_up GPUSHARE_GUARDED_BY(mutex) = false;
  };
  const auto not_ready = [library](const char* why) {
    return Status(GPUSHARE_NOT_READY, std::string(library) + why);
  };
  if (hangs.any()) return not_ready(" hangs in another call");
  const auto question = std::make_shared<Question>();
  std::thread thread;
  try {
    const NoSignals no_signals;
    thread = std::thread([question, &hangs, ask = std::move(ask), no_memory = not_ready(": no host memory")] {
      std::optional<Result<T>> found;
      try {
        found.emplace(ask());
      } catch (const std::bad_alloc&) {
        found.emplace(no_memory);
      }
      MutexLock lock(question->mutex);
      question->answer = std::move(found);
      if (question->given_up) hangs.drop();
      question->answered.notify_all();
    });
  } catch (const std::system_error&) {
    return not_ready(": no thread can be started that asks it");
  }
  const auto until = std::chrono::steady_clock::now() + patience;
  MutexLock lock(question->mutex);
  while (!question->answer && question->answered.wait_until(question->mutex, until)) {
  }
  if (!question->answer) {
    question->given_up = true;
    hangs.add();
    thread.detach();
    return Status(GPUSHARE_NOT_READY, format("%s has not answered for %lld s", library,
                                             static_cast<long long>(patience.count())));
  }
  Result<T> found = std::move(*question->answer);
  lock.unlock();
  thread.join();
  return found;
}

}  // namespace gpushare::base
