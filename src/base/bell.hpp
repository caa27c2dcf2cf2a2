// bell.hpp: what a thread waits on for news from another process: two words that may lie in memory shared between processes.
// The thread with news changes the data first and rings then. The waiting thread looks at the bell first, then at the
// data, and then waits until the bell has rung since. Header only but for wait(), for src/shim.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace gpushare::base {

class Deadline;

class Bell {
 public:
  uint32_t look() const { return rings_.load(std::memory_order_seq_cst); }
  // Wakes the waiting threads. Without any it is two memory accesses.
  void ring() {
    rings_.fetch_add(1, std::memory_order_seq_cst);
    if (expected()) syscall(SYS_futex, &rings_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
  // Whether a thread waits here. While it is set, threads with news ring; otherwise the news must come another way. The
  // thread that sets it must look once more for its news before it waits.
  bool expected() const { return expected_.load(std::memory_order_seq_cst) != 0; }
  void expect(bool expected) { expected_.store(expected ? 1 : 0, std::memory_order_seq_cst); }
  // Until the bell has rung since look() returned `seen`, until the deadline, or for no reason at all. A cancellation
  // point where the thread can be cancelled: nothing is half done then.
  void wait(uint32_t seen, const Deadline& deadline);

 private:
  std::atomic<uint32_t> rings_{0}, expected_{0};
};
static_assert(sizeof(Bell) == 8 && std::atomic<uint32_t>::is_always_lock_free);

// A bell for the threads of one process. Any number of them may ring and wait at once. A ring while nobody waits
// costs no system call.
class LocalBell {
 public:
  uint32_t look() const { return rings_.load(std::memory_order_seq_cst); }
  // Wakes the waiting threads.
  void ring() {
    rings_.fetch_add(1, std::memory_order_seq_cst);
    if (waiting_.load(std::memory_order_seq_cst) > 0)
      syscall(SYS_futex, &rings_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }
  // As Bell::wait().
  void wait(uint32_t seen, const Deadline& deadline);

 private:
  std::atomic<uint32_t> rings_{0}, waiting_{0};
};

}  // namespace gpushare::base
