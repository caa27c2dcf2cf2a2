// The rule that no lock is held at a wait, and the mutex for work that waits.
// SPDX-License-Identifier: Apache-2.0
#include "base/waits.hpp"

#include <atomic>
#include <cstdlib>
#include <string>
#include <thread>

#include "base/log.hpp"
#include "base/work_mutex.hpp"
#include "support/catch.hpp"

namespace {

using namespace gpushare;  // NOLINT

// While one lives the thread is in a function that the device waits for.
struct Inside {
  Inside() { ++base::no_wait_depth(); }
  ~Inside() { --base::no_wait_depth(); }
};

TEST_CASE("a work mutex excludes others, and is not waited for in a function that the device waits for") {
  base::WorkMutex mutex;
  {
    const base::WorkLock first(mutex);
    CHECK(first);
    CHECK_FALSE(mutex.try_lock());
    const Inside inside;
    const base::WorkLock second(mutex);  // by the same thread, as on a simulated device
    CHECK_FALSE(second);
    CHECK(base::WorkLock::refused().code() == GPUSHARE_INVALID_STATE);
  }
  {
    const Inside inside;
    const base::WorkLock free(mutex);
    CHECK(free);
  }
  int count = 0;
  const auto work = [&] {
    for (int i = 0; i < 2000; ++i) {
      const base::WorkLock lock(mutex);
      ++count;
    }
  };
  std::thread other(work);
  work();
  other.join();
  CHECK(count == 4000);
}

#if defined(GPUSHARE_CHECK_WAITS)

std::atomic<int> lines{0};

TEST_CASE("a wait with a lock held is told, and a wait with a work mutex held is not") {
  setenv("GPUSHARE_BAD_WAIT", "log", 1);
  base::set_log_sink(
      [](void*, int32_t, const char* line) {
        lines += std::string(line).find("locks held") != std::string::npos;
      },
      nullptr, base::kError);
  lines.store(0);
  base::Mutex mutex, other;
  base::WorkMutex work;
  base::ConditionVariable changed;
  base::check_wait("nothing");
  CHECK(lines.load() == 0);
  {
    const base::WorkLock held(work);
    base::check_wait("the device");
    CHECK(lines.load() == 0);
  }
  {
    base::MutexLock lock(mutex);
    base::check_wait("the device");
    CHECK(lines.load() == 1);
    const base::WorkLock held(work);
    CHECK(lines.load() == 2);
    lock.unlock();
    base::check_wait("the device");
    CHECK(lines.load() == 2);
    lock.lock();
    changed.wait_until(mutex, std::chrono::steady_clock::now());
    CHECK(lines.load() == 2);
    base::MutexLock second(other);
    changed.wait_until(other, std::chrono::steady_clock::now());
    CHECK(lines.load() == 3);
  }
  CHECK(base::locks_held() == 0);
  if (mutex.try_lock()) {
    CHECK(base::locks_held() == 1);
    mutex.unlock();
  }
  CHECK(base::locks_held() == 0);
  base::set_log_sink(nullptr, nullptr, base::kWarning);
  setenv("GPUSHARE_BAD_WAIT", "abort", 1);
}

#endif

}  // namespace
