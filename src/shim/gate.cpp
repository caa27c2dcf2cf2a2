// SPDX-License-Identifier: Apache-2.0
#include "shim/gate.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "shim/boundaries.hpp"
#include "shim/device.hpp"
#include "shim/rings.hpp"
#include "shim/session.hpp"
#include "shim/words.hpp"

namespace gpushare::shim {
namespace {

// Work that waits for room so much longer than what is in flight should take may be what the device waits for.
constexpr uint64_t kStuckNs = 1'000'000'000;

// In pages of its own, as the gate.
struct alignas(4096) Contexts {
  uint64_t known[kContexts];
  int32_t seats[kContexts];
  Green greens[kContexts];  // context 0: free; 1: being written
};
Contexts g_contexts;

bool being_captured(const Work& work) {
  if (__builtin_expect(!is_capturing_any(), 1)) return false;
  int capturing = 0;
  return real(work.per_thread ? kEntry_cuStreamIsCapturing_ptsz : kEntry_cuStreamIsCapturing,
              reinterpret_cast<P>(work.stream), &capturing) != kSuccess ||
         capturing != 0;
}

void pause_briefly(int turns) {
  if (turns < 16) {
    sched_yield();
    return;
  }
  // By the default slack the thread would sleep 50 us longer, in which the device may become idle.
  const int slack_ns = prctl(PR_GET_TIMERSLACK);
  prctl(PR_SET_TIMERSLACK, 1000UL);
  const timespec time{0, 20'000};
  nanosleep(&time, nullptr);
  if (slack_ns > 0) prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(slack_ns));
}

// The call is counted, so that it is known when none is under way. False: the phase has changed.
bool counted_in(int seat, Phase phase, bool* out_inside) {
  __atomic_add_fetch(&turn(seat).inside, 1U, __ATOMIC_SEQ_CST);
  *out_inside = phase_now(seat) == phase;
  if (!*out_inside) __atomic_sub_fetch(&turn(seat).inside, 1U, __ATOMIC_SEQ_CST);
  return *out_inside;
}

// Whether work that comes now can go to the driver without anybody looking at it.
bool may_open() {
  return !moves() && (load(gate().seats) == 1 || load(gate().sessions) == 0);
}

uint64_t current_context() {
  void* context = nullptr;
  real(kEntry_cuCtxGetCurrent, &context);
  return bits(context);
}

// The target of work: its seat, and the context of its stream. That need not be the calling thread's context, because
// copies may go to any stream.
struct Target {
  int seat = -1;  // -1: nothing is known of it
  uint64_t context = 0;
  bool foreign = false;
};
// The handles that stand for a context's or a thread's default stream.
constexpr uint64_t kLastDefaultStream = 2;
__attribute__((noinline)) Target find_target(const Work& work) {
  Target target;
  target.context = current_context();
  if (work.any_stream && work.stream > kLastDefaultStream) {
    void* of_stream = nullptr;
    target.foreign = real(kEntry_cuStreamGetCtx, reinterpret_cast<P>(work.stream), &of_stream) == kSuccess &&
                     of_stream != nullptr &&
                     green_of(bits(of_stream)).primary != green_of(target.context).primary;
    if (target.foreign) target.context = bits(of_stream);
  }
  if (target.context != 0) target.seat = seat_of(place_of_context(target.context, !target.foreign));
  return target;
}

// Waits until the work may go to the device. The piece is null if it goes without events.
Piece* enter(const Work& work, Target* target, bool* out_inside) {
  *out_inside = false;
  if (being_captured(work)) return nullptr;
  const uint32_t first = load(gate().first);
  if (__builtin_expect(load(gate().seats) == 1 && first != 0, 1))
    target->seat = static_cast<int>(first) - 1;
  else
    *target = find_target(work);
  if (target->seat < 0) return nullptr;  // without a context: the driver will say so
  const int seat = target->seat;
  Turn& now = turn(seat);
  bool noted = false;
  uint64_t since_ns = 0;  // that it waits for room in flight
  for (int turns = 0;;) {
    const Phase phase = phase_now(seat);
    switch (phase) {
      case Phase::none:
        if (!join_daemon(seat)) return nullptr;  // it has a context that it was refused
        break;
      case Phase::alone:
        if (moves()) {
          if (counted_in(seat, phase, out_inside)) return nullptr;
          break;
        }
        open_gate();
        return nullptr;
      case Phase::resting:
        ask_for_turn(seat);
        break;
      case Phase::asked:
      case Phase::draining:
        __atomic_add_fetch(&now.waiting, 1U, __ATOMIC_SEQ_CST);
        wait_phase(seat, phase, 100'000'000);
        __atomic_sub_fetch(&now.waiting, 1U, __ATOMIC_SEQ_CST);
        turns = 0;
        break;
      case Phase::open:
        if (load(now.touched) == 0) store(now.touched, 1);
        if (!needs_events(work, seat)) {
          if (!moves() || counted_in(seat, phase, out_inside)) return nullptr;
          break;
        }
        [[fallthrough]];
      case Phase::quantum: {
        const bool sparse = phase == Phase::open;
        if (!sparse && !noted) note_launch(seat, work.signature);
        noted = noted || !sparse;
        if (!counted_in(seat, phase, out_inside)) break;
        if (target->context == 0) target->context = current_context();
        Ring* ring = target->context != 0 ? ring_of(target->context, seat) : nullptr;
        if (load(now.touched) == 0) store(now.touched, 1);
        if (ring == nullptr) {
          store(now.unmeasured, 1);
          return nullptr;
        }
        uint64_t number = 0;
        if (Piece* piece = reserve(work, ring, sparse, &number)) {
          const InContext there(target->foreign ? target->context : 0);
          return begin(*piece, *ring, work, number) ? piece : nullptr;
        }
        if (sparse) {  // nobody else waits, and what runs may wait for this work
          if (since_ns == 0) since_ns = host_ns();
          if (host_ns() - since_ns > kStuckNs + load(now.in_flight_ns)) return nullptr;
        }
        *out_inside = false;
        __atomic_sub_fetch(&now.inside, 1U, __ATOMIC_SEQ_CST);
        __atomic_add_fetch(&now.waiting, 1U, __ATOMIC_SEQ_CST);
        if (!look_at_events(seat, sparse)) pause_briefly(turns++);
        __atomic_sub_fetch(&now.waiting, 1U, __ATOMIC_SEQ_CST);
        break;
      }
    }
  }
}

template <int entry, WorkKind kind, class... A>
Result gated(A... arguments) {
  const Work work = work_of<entry, kind>(arguments...);
  bool inside = false;
  Target target;
  Piece* const piece = enter(work, &target, &inside);
  const Result result = real(entry, arguments...);
  if (piece != nullptr) {
    const InContext there(target.foreign ? target.context : 0);
    end(*piece, target.seat, work, result);
  }
  if (inside) {
    store(turn(target.seat).active_ns, host_ns());
    __atomic_sub_fetch(&turn(target.seat).inside, 1U, __ATOMIC_SEQ_CST);
  }
  return result;
}

}  // namespace
}  // namespace gpushare::shim

gpushare::shim::Gate gpushare_shim_gate;

namespace gpushare::shim {

uint32_t g_moves;

// ---- for the others
// -------------------------------------------------------------------------------------------------------------------

uint64_t host_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

void open_gate() {
  if (!may_open()) return;
  __atomic_store_n(&gate().open, 1U, __ATOMIC_SEQ_CST);
  if (!may_open()) close_gate();
}
void close_gate() {
  __atomic_store_n(&gate().open, 0U, __ATOMIC_SEQ_CST);
}

void change_phase(int seat, Phase to) {
  auto* word = reinterpret_cast<uint32_t*>(&turn(seat).phase);
  __atomic_store_n(word, static_cast<uint32_t>(to), __ATOMIC_SEQ_CST);
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

void wait_phase(int seat, Phase seen, uint64_t timeout_ns) {
  const timespec time = timespec_of(timeout_ns);
  syscall(SYS_futex, &turn(seat).phase, FUTEX_WAIT_PRIVATE, static_cast<uint32_t>(seen), &time, nullptr, 0);
}

bool synchronize_contexts(int seat) {
  for (int i = 0; i < kContexts; ++i) {
    const uint64_t context = load(g_contexts.known[i]);
    if (context <= 1 || load(g_contexts.seats[i]) != seat) continue;
    if (is_capturing_any()) return false;
    if (real(kEntry_cuCtxSetCurrent, reinterpret_cast<P>(context)) == kSuccess) real(kEntry_cuCtxSynchronize);
  }
  return true;
}

void synchronize_others(uint64_t context, uint64_t seats) {
  for (int i = 0; i < kContexts; ++i) {
    const uint64_t other = load(g_contexts.known[i]);
    if (other <= 1 || other == context || (seats >> load(g_contexts.seats[i]) & 1) == 0) continue;
    const InContext there(other);
    if (there.is()) real(kEntry_cuCtxSynchronize);  // what has failed there uses nothing any more
  }
}

void prepare_fork() {
  madvise(&gpushare_shim_gate, sizeof gpushare_shim_gate, MADV_WIPEONFORK);
  madvise(&g_contexts, sizeof g_contexts, MADV_WIPEONFORK);
  wipe_rings_on_fork();
}

bool know_context(uint64_t context, int seat) {
  for (uint64_t& slot : g_contexts.known)
    if (load(slot) == context) return true;
  for (int i = 0; i < kContexts; ++i) {
    uint64_t free = 0;
    if (!__atomic_compare_exchange_n(&g_contexts.known[i], &free, uint64_t{1}, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_RELAXED))
      continue;
    store(g_contexts.seats[i], seat);
    store(g_contexts.known[i], context);
    return true;
  }
  return false;
}

bool know_green(const Green& green) {
  for (Green& row : g_contexts.greens) {
    uint64_t free = 0;
    if (!__atomic_compare_exchange_n(&row.context, &free, uint64_t{1}, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_RELAXED))
      continue;
    store(row.primary, green.primary);
    store(row.ordinal, green.ordinal);
    store(row.context, green.context);
    return true;
  }
  return false;
}

Green green_of(uint64_t context) {
  for (const Green& row : g_contexts.greens) {
    if (load(row.context) != context || context <= 1) continue;
    const Green found{context, load(row.primary), load(row.ordinal)};
    // Else it was destroyed meanwhile, and the row may be another's.
    if (load(row.context) == context) return found;
  }
  return {context, context, -1};
}

void forget_gate(uint64_t context) {
  for (Green& row : g_contexts.greens)
    if (load(row.context) == context) store(row.context, 0);
  for (uint64_t& slot : g_contexts.known) {
    uint64_t there = context;
    __atomic_compare_exchange_n(&slot, &there, uint64_t{0}, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
  }
  forget_ring(context);
}

}  // namespace gpushare::shim

using namespace gpushare::shim;  // NOLINT(google-build-using-namespace): the functions below have C linkage

// entries.S calls these functions while the gate is not open: one for each row of class gate, with the driver's parameters.
#define GPUSHARE_GATE_pass(name, parameters, arguments)
#define GPUSHARE_GATE_count(name, parameters, arguments)
#define GPUSHARE_GATE_charge(name, parameters, arguments)
#define GPUSHARE_CALL(...) __VA_ARGS__
#define GPUSHARE_GATE_gate(name, parameters, arguments)                                                 \
  extern "C" Result gpushare_gate_##name parameters;                                                    \
  extern "C" Result gpushare_gate_##name parameters {                                                   \
    const auto call = [](auto... values) { return gated<kEntry_##name, work_kind(#name)>(values...); }; \
    return call arguments;                                                                              \
  }
#define GPUSHARE_ENTRY(cls, name, base, version, parameters, arguments) \
  GPUSHARE_GATE_##cls(name, parameters, arguments)
#define GPUSHARE_NAME(cls, name)
#include "shim/driver_table.inc"
#undef GPUSHARE_ENTRY
#undef GPUSHARE_NAME

// Streams that are being captured are not gated, and nobody waits for their contexts meanwhile.
namespace {
Result began_capture(Result result) {
  if (result == kSuccess) __atomic_add_fetch(&gate().capturing, 1U, __ATOMIC_SEQ_CST);
  return result;
}
// The end of a capture that had failed counts too: the driver then has ended it.
Result ended_capture(Result result) {
  uint32_t before = __atomic_load_n(&gate().capturing, __ATOMIC_RELAXED);
  while (result != kInvalidValue && before != 0 &&
         !__atomic_compare_exchange_n(&gate().capturing, &before, before - 1, false, __ATOMIC_SEQ_CST,
                                      __ATOMIC_RELAXED)) {
  }
  return result;
}
}  // namespace

extern "C" {
#define GPUSHARE_CAPTURE(name, parameters, arguments, then) \
  Result gpushare_hook_##name parameters {                  \
    return then(real arguments);                            \
  }
GPUSHARE_CAPTURE(cuStreamBeginCapture, (P a), (kEntry_cuStreamBeginCapture, a), began_capture)
GPUSHARE_CAPTURE(cuStreamBeginCapture_ptsz, (P a), (kEntry_cuStreamBeginCapture_ptsz, a), began_capture)
GPUSHARE_CAPTURE(cuStreamBeginCapture_v2, (P a, I b), (kEntry_cuStreamBeginCapture_v2, a, b), began_capture)
GPUSHARE_CAPTURE(cuStreamBeginCapture_v2_ptsz, (P a, I b), (kEntry_cuStreamBeginCapture_v2_ptsz, a, b),
                 began_capture)
GPUSHARE_CAPTURE(cuStreamBeginCaptureToGraph, (P a, P b, P c, P d, L e, I f),
                 (kEntry_cuStreamBeginCaptureToGraph, a, b, c, d, e, f), began_capture)
GPUSHARE_CAPTURE(cuStreamBeginCaptureToGraph_ptsz, (P a, P b, P c, P d, L e, I f),
                 (kEntry_cuStreamBeginCaptureToGraph_ptsz, a, b, c, d, e, f), began_capture)
GPUSHARE_CAPTURE(cuStreamBeginRecaptureToGraph, (P a, I b, P c, P d, P e),
                 (kEntry_cuStreamBeginRecaptureToGraph, a, b, c, d, e), began_capture)
GPUSHARE_CAPTURE(cuStreamBeginRecaptureToGraph_ptsz, (P a, I b, P c, P d, P e),
                 (kEntry_cuStreamBeginRecaptureToGraph_ptsz, a, b, c, d, e), began_capture)
// A capture into a graphics API's list of commands.
GPUSHARE_CAPTURE(cuStreamBeginCaptureToCig, (P a, P b), (kEntry_cuStreamBeginCaptureToCig, a, b),
                 began_capture)
GPUSHARE_CAPTURE(cuStreamBeginCaptureToCig_ptsz, (P a, P b), (kEntry_cuStreamBeginCaptureToCig_ptsz, a, b),
                 began_capture)
GPUSHARE_CAPTURE(cuStreamEndCaptureToCig, (P a), (kEntry_cuStreamEndCaptureToCig, a), ended_capture)
GPUSHARE_CAPTURE(cuStreamEndCaptureToCig_ptsz, (P a), (kEntry_cuStreamEndCaptureToCig_ptsz, a), ended_capture)
GPUSHARE_CAPTURE(cuStreamEndCapture, (P a, P b), (kEntry_cuStreamEndCapture, a, b), ended_capture)
GPUSHARE_CAPTURE(cuStreamEndCapture_ptsz, (P a, P b), (kEntry_cuStreamEndCapture_ptsz, a, b), ended_capture)
}
