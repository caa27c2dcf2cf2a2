// lease.hpp: the memory that the daemon shares with a process: a lease on the turn for each of its sessions, and
// the process's measurements. While nobody else wants the device, an iteration begins and ends by loads and stores
// here. The header uses none of the project's libraries and no C++ runtime, for src/shim. lease_page.hpp makes and maps
// the memory.
//
// A lease is one word, epoch and state. The daemon alone makes epochs. A state changes so:
//
//   free  -> busy    daemon: the turn is this session's, for the iteration that it waits with
//   busy  -> idle    process: nothing in flight; it keeps the turn for its next iteration
//   idle  -> busy    process: the next iteration, without a message
//   idle  -> free    daemon: somebody else wants the turn
//   busy  -> wanted  daemon: the same, but work is in flight: the process gives back when it has drained
//   wanted -> free   process: given back; a Returned message follows
//   any   -> free    daemon, with a new epoch: the process kept the turn too long
//
// Processes of one user share one memory of leases (Hello::kPassesTurns), and pass turns to each other without the
// daemon between them. While a holder is wanted, the daemon offers the turn to the session that comes next: the offered
// lease is free under a new epoch e, and the holder's next() names it. Then:
//
//   e, free -> e + 1, busy   process of the holder, once its own lease is free: passed; it rings the bell of the lease
//   e, free -> e + 2, free   daemon: withdrawn
//
// Each change is one compare-and-swap of the whole word, so a process that was slow cannot touch a later lease, and an
// offer is either passed or withdrawn. Nothing that a process writes is trusted: service is bounded by the time for
// which the daemon granted the turn, and a memory of leases is of one user.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/bell.hpp"
#include "base/figures.hpp"
#include "base/gate_slot.hpp"

namespace gpushare::client {

inline constexpr uint32_t kLeaseSlots = 256;         // of the memory of one process
inline constexpr uint32_t kSharedLeaseSlots = 1024;  // of that of all processes of a user

enum class LeaseState : uint64_t { kFree = 0, kIdle = 1, kBusy = 2, kWanted = 3 };

// The lease of one session.
class alignas(64) Lease {
 public:
  struct Word {
    uint64_t epoch = 0;
    LeaseState state = LeaseState::kFree;
  };
  Word look() const {
    const uint64_t bits = word_.load(std::memory_order_seq_cst);
    return {bits >> 2, static_cast<LeaseState>(bits & 3)};
  }
  // False if the word has changed since it was `seen`.
  bool change(Word seen, LeaseState to) {
    uint64_t bits = pack(seen);
    return word_.compare_exchange_strong(bits, pack({seen.epoch, to}), std::memory_order_seq_cst);
  }
  // Rings when the turn comes while a thread of the process expects it. Else the daemon sends Granted.
  base::Bell& bell() { return bell_; }

  // ---- the daemon
  void set(Word word) { word_.store(pack(word), std::memory_order_seq_cst); }
  // Takes back the offer with this epoch; false if the turn has been passed.
  bool withdraw(uint64_t offer) {
    uint64_t bits = pack({offer, LeaseState::kFree});
    return word_.compare_exchange_strong(bits, pack({offer + 2, LeaseState::kFree}),
                                         std::memory_order_seq_cst);
  }
  // To whom the holder passes the turn when it gives it back: the offer's slot and epoch. Epoch 0: to nobody.
  void set_next(uint32_t slot, uint64_t offer) { next_.store(offer << 12 | slot, std::memory_order_seq_cst); }
  // Whether the process hears by itself that its turn is wanted, at the end of its iteration; else it is sent Wanted.
  bool looks() const { return looks_.load(std::memory_order_seq_cst) != 0; }
  // Device time for which the turn may go on although it is wanted, for processes that end turns by measured time; 0:
  // what they think right. It may change during the turn.
  void set_turn_ns(uint64_t turn_ns) {
    turn_us_.store(static_cast<uint32_t>(turn_ns / 1000), std::memory_order_relaxed);
  }
  // Host time (CLOCK_MONOTONIC) up to which the process may begin iterations without asking.
  void extend(uint64_t until_ns) { until_ns_.store(until_ns, std::memory_order_relaxed); }
  uint64_t service_ns() const { return service_ns_.load(std::memory_order_relaxed); }
  uint64_t iterations() const { return iterations_.load(std::memory_order_relaxed); }
  void reset() {
    service_ns_.store(0, std::memory_order_relaxed);
    iterations_.store(0, std::memory_order_relaxed);
    looks_.store(0, std::memory_order_relaxed);
    turn_us_.store(0, std::memory_order_relaxed);
    bell_.expect(false);
    histogram_.reset();
    requests_.set({});
    gate_.reset();
  }

  // ---- the process
  uint64_t until_ns() const { return until_ns_.load(std::memory_order_relaxed); }
  uint64_t turn_ns() const { return uint64_t{turn_us_.load(std::memory_order_relaxed)} * 1000; }
  void set_looks(bool looks) { looks_.store(looks ? 1 : 0, std::memory_order_seq_cst); }
  // Whether the turn of this lease is offered to `to`.
  bool offers(const Lease& to) const {
    const uint64_t offer = next_.load(std::memory_order_seq_cst) >> 12;
    return offer != 0 && to.word_.load(std::memory_order_seq_cst) == pack({offer, LeaseState::kFree});
  }
  // The holder, whose lease is free now: passes the turn to the session that it was offered to.
  static void pass(Lease& from, Lease* leases, uint32_t slots) {
    const uint64_t next = from.next_.load(std::memory_order_seq_cst), offer = next >> 12;
    if (offer == 0 || (next & 0xfff) >= slots) return;
    Lease& to = leases[next & 0xfff];
    uint64_t bits = pack({offer, LeaseState::kFree});
    if (to.word_.compare_exchange_strong(bits, pack({offer + 1, LeaseState::kBusy}),
                                         std::memory_order_seq_cst))
      to.bell_.ring();
  }
  void account(uint64_t service_ns, uint64_t iterations) {
    service_ns_.fetch_add(service_ns, std::memory_order_relaxed);
    iterations_.fetch_add(iterations, std::memory_order_relaxed);
  }

  // ---- both: what the process writes and the daemon shows to readers
  base::IterationHistogram& histogram() { return histogram_; }
  const base::IterationHistogram& histogram() const { return histogram_; }
  base::RequestFigures& requests() { return requests_; }
  const base::RequestFigures& requests() const { return requests_; }
  // The slot of the session's gate, once the process has said GateOpen.
  base::GateSlot& gate() { return gate_; }

 private:
  static uint64_t pack(Word word) { return word.epoch << 2 | static_cast<uint64_t>(word.state); }

  std::atomic<uint64_t> word_;
  std::atomic<uint64_t> until_ns_;
  std::atomic<uint64_t> service_ns_;  // of all iterations since the session arrived
  std::atomic<uint64_t> iterations_;
  std::atomic<uint64_t> next_;
  base::Bell bell_;
  std::atomic<uint32_t> looks_;
  std::atomic<uint32_t> turn_us_;  // 0 also where the daemon is older
  // In lines of their own: whoever waits for the word does not read them.
  alignas(64) base::IterationHistogram histogram_;
  base::RequestFigures requests_;  // of the queue whose first model the session serves
  base::GateSlot gate_;
};
static_assert(kSharedLeaseSlots <= 0x1000);
static_assert(sizeof(Lease) % 64 == 0 && std::atomic<uint64_t>::is_always_lock_free);

// "GPSL", the number of the layout, and the size of a lease. Builds that lay out a lease otherwise have another mark: raise the
// number where fields change their places.
inline constexpr uint64_t kLeaseLayout = 3;
inline constexpr uint64_t kLeasePageMark = uint64_t{0x4750534c} << 32 | kLeaseLayout << 24 | sizeof(Lease);
static_assert(sizeof(Lease) < 1 << 24);
// The whole memory. Its size is sealed: neither side can make the other's next look a bus error.
struct LeaseMemory {
  std::atomic<uint64_t> mark;
  std::atomic<uint64_t> promised_bytes;
  std::atomic<uint64_t> capacity_bytes;  // that may be promised; 0 = not said
  std::atomic<uint64_t> watched;         // 1: the device has gates, and processes say WorkBegan and WorkEnded
  Lease leases[kLeaseSlots];             // or kSharedLeaseSlots of them
};

constexpr size_t lease_memory_bytes(uint32_t slots) {
  return offsetof(LeaseMemory, leases) + slots * sizeof(Lease);
}
static_assert(lease_memory_bytes(kLeaseSlots) == sizeof(LeaseMemory));

}  // namespace gpushare::client
