// lent_turn.hpp: the turn of a device that nobody else wants, and the lock of a runtime's books. Other folders do not include it.
//
// A session whose iteration has ended while no other session waits, runs or moves keeps its turn: the turn is lent to
// it. Its next iterations begin and end by one compare-and-swap each, without the lock and without the scheduler. A
// thread that takes the lock takes the turn back first and enters the iterations run meanwhile into the books, so code
// that holds the lock never sees a lent turn.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "base/mutex.hpp"

namespace gpushare::executor {

class RuntimeImpl;
class SessionImpl;
struct InFlight;
struct LaneSlot;

// One word has the state and the number of iterations of all loans. The lender holds the runtime's lock; the borrower
// is the thread that begins or ends an iteration of the session.
//
//   none -> idle    lender
//   idle -> busy    borrower: an iteration begins
//   busy -> idle    borrower: it has ended, and its device work is done; the count rises by one
//   idle -> none    lender: takes the turn back
//   busy -> none    lender: the same; the iteration under way is from now on an ordinary one
//
// The count never falls, so no word comes twice.
class LentTurn {
 public:
  // What the iterations of one loan have used.
  struct Totals {
    uint64_t service_ns = 0, planned = 0, peak_bytes = 0;
  };
  struct Borrowed {
    LaneSlot* lane = nullptr;
    InFlight* slot = nullptr;
    uint64_t word = 0;  // for give_back()
  };
  struct Ended {
    SessionImpl* session = nullptr;
    LaneSlot* lane = nullptr;
    uint64_t iterations = 0;
    bool busy = false;  // one more iteration is under way
    Totals totals;
  };

  // ---- the lender, under the runtime's lock
  void lend(SessionImpl& session, LaneSlot& lane, InFlight& slot) {
    const uint64_t count = word_.load(std::memory_order_relaxed) / kStates;
    session_.store(&session, std::memory_order_relaxed);
    lane_.store(&lane, std::memory_order_relaxed);
    slot_.store(&slot, std::memory_order_relaxed);
    first_ = count;
    store(count, {});
    word_.store(count * kStates + kIdle, std::memory_order_release);
    lent_ = true;
  }
  bool lent() const { return lent_; }
  Ended take_back() {
    lent_ = false;
    uint64_t word = word_.load(std::memory_order_acquire);
    while (!word_.compare_exchange_weak(word, word / kStates * kStates + kNone, std::memory_order_acq_rel)) {
    }
    const uint64_t count = word / kStates;
    const Cell& cell = cells_[count % 2];
    return {session_.load(std::memory_order_relaxed),
            lane_.load(std::memory_order_relaxed),
            count - first_,
            word % kStates == kBusy,
            {cell.service_ns.load(std::memory_order_relaxed), cell.planned.load(std::memory_order_relaxed),
             cell.peak_bytes.load(std::memory_order_relaxed)}};
  }

  // ---- the borrower, without the lock
  std::optional<Borrowed> borrow(const SessionImpl& session) {
    uint64_t word = word_.load(std::memory_order_acquire);
    if (word % kStates != kIdle || session_.load(std::memory_order_relaxed) != &session) return std::nullopt;
    const Borrowed borrowed{lane_.load(std::memory_order_relaxed), slot_.load(std::memory_order_relaxed),
                            word - kIdle + kBusy};
    if (!word_.compare_exchange_strong(word, borrowed.word, std::memory_order_acq_rel)) return std::nullopt;
    return borrowed;
  }
  // False if the turn has been taken back: the iteration then ends as an ordinary one.
  bool give_back(uint64_t borrowed, const Totals& iteration) {
    if (word_.load(std::memory_order_relaxed) != borrowed) return false;
    const uint64_t count = borrowed / kStates;
    const Cell& before = cells_[count % 2];
    store(count + 1, {before.service_ns.load(std::memory_order_relaxed) + iteration.service_ns,
                      before.planned.load(std::memory_order_relaxed) + iteration.planned,
                      std::max(before.peak_bytes.load(std::memory_order_relaxed), iteration.peak_bytes)});
    return word_.compare_exchange_strong(borrowed, (count + 1) * kStates + kIdle, std::memory_order_acq_rel);
  }

 private:
  static constexpr uint64_t kNone = 0, kIdle = 1, kBusy = 2, kStates = 4;
  // The totals up to a count. Even and odd counts have a cell each: the borrower writes the next cell while the lender
  // may read this one.
  struct Cell {
    std::atomic<uint64_t> service_ns{0}, planned{0}, peak_bytes{0};
  };
  void store(uint64_t count, const Totals& totals) {
    Cell& cell = cells_[count % 2];
    cell.service_ns.store(totals.service_ns, std::memory_order_relaxed);
    cell.planned.store(totals.planned, std::memory_order_relaxed);
    cell.peak_bytes.store(totals.peak_bytes, std::memory_order_relaxed);
  }

  alignas(64) std::atomic<uint64_t> word_{kNone};
  std::atomic<SessionImpl*> session_{nullptr};
  std::atomic<LaneSlot*> lane_{nullptr};
  std::atomic<InFlight*> slot_{nullptr};
  std::array<Cell, 2> cells_;
  // Used by the lender alone.
  alignas(64) uint64_t first_ = 0;
  bool lent_ = false;
};

// The role of the thread that holds the lock of a runtime's books. Sessions, lanes and tickets belong to one runtime,
// and no thread holds the locks of two, so their members name this role as their guard.
class GPUSHARE_CAPABILITY("role") BooksRole {};
inline constexpr BooksRole books;

// The lock of a runtime's books. Taking it, and coming back from a wait, takes a lent turn back.
class Books : private base::Mutex {
 public:
  explicit Books(RuntimeImpl& runtime) : runtime_(runtime) {}
  void lock() GPUSHARE_ACQUIRE(books) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
    base::Mutex::lock();
    if (turn_.lent()) account_turn();
  }
  void unlock() GPUSHARE_RELEASE(books) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
    if (granted_ == nullptr) {
      base::Mutex::unlock();
      return;
    }
    const std::shared_ptr<SessionImpl> granted = std::move(granted_);
    base::Mutex::unlock();
    wake(*granted);
  }
  // Wakes the thread that waits for the session's turn once the lock is let go: woken earlier, it would sleep again on the lock.
  void wake_later(std::shared_ptr<SessionImpl> granted) GPUSHARE_REQUIRES(books) {
    if (granted_ != nullptr) wake(*granted_);
    granted_ = std::move(granted);
  }
  void wait(base::ConditionVariable& changed) GPUSHARE_REQUIRES(books) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
    wake_granted();
    changed.wait(*this);
    if (turn_.lent()) account_turn();
  }
  // False when the deadline passed first.
  bool wait(base::ConditionVariable& changed, const base::Deadline& deadline)
      GPUSHARE_REQUIRES(books) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
    wake_granted();
    const bool in_time = changed.wait(*this, deadline);
    if (turn_.lent()) account_turn();
    return in_time;
  }
  LentTurn& turn() { return turn_; }

 private:
  void account_turn();                              // dispatch.cpp; with the lock held
  static void wake(SessionImpl& session) noexcept;  // dispatch.cpp
  void wake_granted() {
    if (granted_ != nullptr) wake(*std::exchange(granted_, nullptr));
  }

  RuntimeImpl& runtime_;
  LentTurn turn_;
  std::shared_ptr<SessionImpl> granted_;  // set by wake_later(); belongs to the holder of the lock
};

class GPUSHARE_SCOPED_CAPABILITY BooksLock {
 public:
  explicit BooksLock(Books& of) GPUSHARE_ACQUIRE(books) : books_(of) { books_.lock(); }
  ~BooksLock() GPUSHARE_RELEASE() {
    if (held_) books_.unlock();
  }
  BooksLock(const BooksLock&) = delete;
  BooksLock& operator=(const BooksLock&) = delete;
  void unlock() GPUSHARE_RELEASE() {
    held_ = false;
    books_.unlock();
  }
  void lock() GPUSHARE_ACQUIRE() {
    books_.lock();
    held_ = true;
  }

 private:
  Books& books_;
  bool held_ = true;
};

}  // namespace gpushare::executor
