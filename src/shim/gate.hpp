// gate.hpp: work for the device (class gate in driver_table.inc) waits here for the process's turn, and is measured.
//
// The gate is one word. Without a daemon it is open, and an entry costs a load and a compare (entries.S). Otherwise the
// entry goes to a function with the driver's signature (gate.cpp), which waits for the turn, gives the work to the
// driver, and records an event behind it. While nobody else wants the device, only a part of the work has events. The
// events tell how much is in flight, when the device has drained, and how long it worked.
//
// A process has a turn for each device on which it has contexts. With several the function asks which device the work
// is for.
//
// session.hpp decides when a turn begins and ends: a thread of the shim's own for each device changes the phase.
//
// Threads: any, unless a function says otherwise. No lock is held while the driver is called. Only forget_gate() waits
// for another thread's driver call, and only for queries, which return at once.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <ctime>

#include "shim/group.hpp"
#include "shim/words.hpp"

namespace gpushare::shim {

enum class Phase : uint32_t {
  none,      // this process has not asked for a daemon yet; also a child of fork
  alone,     // there is none: the gate is open for good
  resting,   // no turn, and none asked for
  asked,     // waits for a turn
  open,      // has the turn, and nobody else wants it: what is in flight is bounded by estimates
  quantum,   // has the turn: work is measured and bounded
  draining,  // nothing more is given to the device until it has finished what it has
};

// The state of this process on one device. Zeros are a process that has done nothing there.
struct alignas(64) Turn {
  Phase phase;          // a futex
  uint32_t waiting;     // threads that wait for the turn or for room in it
  uint32_t inside;      // threads in a driver call that was let through in this quantum
  uint32_t unmeasured;  // 1: the device may have work of this process without an event behind it
  uint32_t touched;     // 1: work was given to the device since the word was cleared
  uint64_t budget_ns;   // device time of this quantum
  uint64_t
      most_ns;  // that may be in flight, by estimates; a single piece of work that takes longer goes alone
  uint64_t used_ns;       // of it, as measured: the time in which the device had work
  uint64_t in_flight_ns;  // estimated, of what the device has not finished
  uint64_t active_ns;     // host time at which a call ended or an event was seen last
  uint64_t boundary_ns;   // what was used at the last guessed end of an iteration (boundaries.hpp)
  uint32_t over;          // 1: the quantum ends at such a place: no more work in it
  uint32_t polled;        // 1: the program has asked for the end of work that had not ended
  uint32_t most_alike;  // a second bound on work in flight: so many pieces like the new one; 0: no such bound
};
// The seat of a process at a device is the device's place on the group's page (books.hpp), or the one behind the last
// place if the device has none.
inline constexpr int kSeats = kDevices + 1;
inline int seat_of(int place) {
  return is_counted(place) ? place : kDevices;
}
// In pages that the kernel empties in a child of fork.
struct alignas(4096) Gate {
  uint32_t open;  // 1: open. entries.S compares it, so it is the first
  char padding[60];
  uint32_t seats;      // devices on which the process is a session or works alone
  uint32_t sessions;   // those on which it is, or asks to be, a session
  uint32_t first;      // the seat of the first of them, and one more; 0: not known
  uint32_t capturing;  // streams that are being captured
  Turn turns[kSeats];
};
static_assert(sizeof(Gate) == 4096);
}  // namespace gpushare::shim
// entries.S compares its first word.
extern "C" __attribute__((visibility("hidden"))) gpushare::shim::Gate gpushare_shim_gate;
namespace gpushare::shim {
inline Gate& gate() {
  return gpushare_shim_gate;
}
inline Turn& turn(int seat) {
  return gpushare_shim_gate.turns[seat];
}
inline bool is_capturing_any() {
  return load(gpushare_shim_gate.capturing) != 0;
}
// Without a daemon: opens the gate unless work must be looked at: blocks may move, or the process is a session on another device.
void open_gate();
void close_gate();

// ---- for the session's thread
// Finds out which work has finished. `all`: in every context of the device, each of which is made current for it; else
// only in the calling thread's. True: something had finished.
bool look_at_events(int seat, bool all);
// Nothing is in flight, as far as events tell, and no thread is in a driver call.
bool drained(int seat);
// Waits until the device has finished everything of this process; false if that could not be asked (a stream is being captured).
bool synchronize_contexts(int seat);
// Does the same for all contexts on the devices whose seats are bits of `seats`, but not for `context`. The calling
// thread's context stays current.
void synchronize_others(uint64_t context, uint64_t seats);
// Before the first use: from now on a child of fork finds the state empty.
void prepare_fork();
// The next work begins a new measurement.
void restart_clock(int seat);

// ---- for contexts
inline constexpr int kContexts = 64;  // of a process at one time
// False: the process has kContexts contexts already, so work in this one would go unwatched.
bool know_context(uint64_t context, int seat);
// A green context is a part of its device's primary context, as whose work and memory its own count. It can be current
// to one thread at a time, so the session's thread reaches it by the primary context.
struct Green {
  uint64_t context;
  uint64_t primary;
  int32_t ordinal;  // of the device; -1: not a green context, `primary` is the context itself
};
bool know_green(const Green& green);
Green green_of(uint64_t context);
// A context is about to go: destroys its events, and does not wait for its work.
void forget_gate(uint64_t context);

// ---- for both
void change_phase(int seat, Phase to);  // wakes whoever waits
inline Phase phase_now(int seat) {
  return static_cast<Phase>(
      __atomic_load_n(reinterpret_cast<uint32_t*>(&turn(seat).phase), __ATOMIC_SEQ_CST));
}
// Whether blocks of the process may change places (move.hpp). From the first such block on, work does not go past the
// gate uncounted (Turn::inside).
extern uint32_t g_moves;
inline bool moves() {
  return __builtin_expect(load(g_moves) != 0, 0);
}
uint64_t host_ns();
inline timespec timespec_of(uint64_t ns) {
  return {static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
}
void wait_phase(int seat, Phase seen, uint64_t timeout_ns);

}  // namespace gpushare::shim
