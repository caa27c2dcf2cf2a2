// SPDX-License-Identifier: Apache-2.0
#include "base/bell.hpp"

#include <pthread.h>

#include <ctime>

#include "base/cancel.hpp"
#include "base/clock.hpp"
#include "base/waits.hpp"

namespace gpushare::base {
namespace {

// As the C library makes its own waits cancellation points: a request that comes while the kernel waits unwinds from
// there. The function has nothing to destroy, and calls through a pointer because syscall() is declared as one that
// nothing unwinds through. It is not inlined: the request may come between two calls, where a function that destroys
// something cannot be unwound.
GPUSHARE_LEFT_BY_FORCED_UNWIND void wait_cancellable(std::atomic<uint32_t>* word, int operation,
                                                     uint32_t seen, const timespec* left) {
  using Call = long (*)(long, ...);
  static Call volatile call = syscall;
  int type = 0;
  (void)pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, &type);
  call(SYS_futex, word, operation, seen, left, nullptr, 0);
  (void)pthread_setcanceltype(type, &type);
}

GPUSHARE_LEFT_BY_FORCED_UNWIND void wait_while(std::atomic<uint32_t>* word, int operation, uint32_t seen,
                                               const Deadline& deadline) {
  timespec left{};
  if (!deadline.never()) {
    const uint64_t left_ns = deadline.left_ns();
    left = {static_cast<time_t>(left_ns / 1'000'000'000), static_cast<long>(left_ns % 1'000'000'000)};
  }
  const timespec* const limit = deadline.never() ? nullptr : &left;
  if (waits_cancellable())
    wait_cancellable(word, operation, seen, limit);
  else
    syscall(SYS_futex, word, operation, seen, limit, nullptr, 0);
}

}  // namespace

void Bell::wait(uint32_t seen, const Deadline& deadline) {
  wait_while(&rings_, FUTEX_WAIT, seen, deadline);
}

void LocalBell::wait(uint32_t seen, const Deadline& deadline) {
  check_wait("another thread");
  struct Waiting {
    explicit Waiting(std::atomic<uint32_t>& of) : count(of) { count.fetch_add(1, std::memory_order_seq_cst); }
    ~Waiting() { count.fetch_sub(1, std::memory_order_relaxed); }  // also when the thread is cancelled
    std::atomic<uint32_t>& count;
  };
  const Waiting waiting(waiting_);
  wait_while(&rings_, FUTEX_WAIT_PRIVATE, seen, deadline);
}

}  // namespace gpushare::base
