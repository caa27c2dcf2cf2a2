// SPDX-License-Identifier: Apache-2.0
#include "base/bell.hpp"

#include <pthread.h>

#include <ctime>

#include "base/cancel.hpp"
#include "base/clock.hpp"

namespace gpushare::base {
namespace {

// As the C library makes its own waits cancellation points: a request that comes while the kernel waits unwinds from
// there. The function has nothing to destroy, and calls through a pointer because syscall() is declared as one that
// nothing unwinds through.
void wait_cancellable(std::atomic<uint32_t>* word, uint32_t seen, const timespec* left) {
  using Call = long (*)(long, ...);
  static Call volatile call = syscall;
  int type = 0;
  (void)pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, &type);
  call(SYS_futex, word, FUTEX_WAIT, seen, left, nullptr, 0);
  (void)pthread_setcanceltype(type, &type);
}

}  // namespace

void Bell::wait(uint32_t seen, const Deadline& deadline) {
  timespec left{};
  if (!deadline.never()) {
    const uint64_t left_ns = deadline.left_ns();
    left = {static_cast<time_t>(left_ns / 1'000'000'000), static_cast<long>(left_ns % 1'000'000'000)};
  }
  const timespec* const limit = deadline.never() ? nullptr : &left;
  if (waits_cancellable())
    wait_cancellable(&rings_, seen, limit);
  else
    syscall(SYS_futex, &rings_, FUTEX_WAIT, seen, limit, nullptr, 0);
}

}  // namespace gpushare::base
