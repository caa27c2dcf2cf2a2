// SPDX-License-Identifier: Apache-2.0
#include "shim/gate.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "shim/session.hpp"
#include "shim/table.hpp"

namespace gpushare::shim {
namespace {

// What may be in flight while others want the device: whoever comes next waits so long for it. A single piece that takes longer goes alone.
constexpr uint64_t kMostInFlightNs = 200'000;
// Before a signature was measured.
constexpr uint64_t kPriorNs = 10'000;

constexpr uint32_t kSlots = 256, kRings = 4, kStreams = 64, kEstimates = 1024, kContexts = 16;
constexpr Result kNotReady = 600;

enum : uint32_t { kFree = 0, kReserved, kRecorded, kSkipped };

// A piece of work that was given to the device.
struct Piece {
  void* begin;  // events; made when first needed
  void* end;
  uint64_t stream;
  uint32_t signature;
  uint32_t state;
  uint32_t has_begin;  // the stream had nothing in flight: an event stands before it too
  uint64_t estimate_ns;
};
struct StreamRow {
  uint64_t stream;
  uint64_t last;  // number of its last piece
};
// The pieces of one context, in the order in which they were given. Lossy where threads use one stream at once: then times are
// attributed to the wrong piece, while their sum stays right.
struct Ring {
  uint64_t context;
  uint64_t head, tail;
  void* counted;  // the event up to which time is counted: the end of a piece; null: a measurement begins
  StreamRow streams[kStreams];
  Piece pieces[kSlots];
};
// With Turn at its beginning, all in pages of its own.
struct alignas(4096) State {
  Turn turn;
  uint32_t looking;
  uint64_t contexts[kContexts];
  Green greens[kContexts];  // context 0: free; 1: being written
  Ring rings[kRings];
};

template <class T>
T load(const T& value) {
  return __atomic_load_n(&value, __ATOMIC_ACQUIRE);
}
template <class T>
void store(T& value, T to) {
  __atomic_store_n(&value, to, __ATOMIC_RELEASE);
}

// Device time of each signature, learned for the life of the process; 0: not yet.
uint64_t g_estimates[kEstimates];

}  // namespace
}  // namespace gpushare::shim

extern "C" {
// entries.S compares its first word.
__attribute__((visibility("hidden"))) gpushare::shim::State gpushare_shim_turn;
}

namespace gpushare::shim {
namespace {

State& state() {
  return gpushare_shim_turn;
}

// Calls that look at events would end another thread's capture, unless this thread says that it knows what it does.
class Uncaptured {
 public:
  Uncaptured() : on_(load(turn().capturing) != 0) { exchange(); }
  ~Uncaptured() { exchange(); }
  Uncaptured(const Uncaptured&) = delete;
  Uncaptured& operator=(const Uncaptured&) = delete;

 private:
  void exchange() {
    if (on_) real(kEntry_cuThreadExchangeStreamCaptureMode, &mode_);
  }
  bool on_;
  int mode_ = 2;  // relaxed
};

uint32_t hashed(uint64_t value) {
  value ^= value >> 33;
  value *= 0xff51afd7ed558ccdULL;
  return static_cast<uint32_t>(value >> 32);
}

Ring* ring_of(uint64_t context) {
  for (Ring& ring : state().rings) {
    uint64_t there = load(ring.context);
    if (there == context) return &ring;
    if (there == 0 && (__atomic_compare_exchange_n(&ring.context, &there, context, false, __ATOMIC_ACQ_REL,
                                                   __ATOMIC_ACQUIRE) ||
                       there == context))
      return &ring;
  }
  return nullptr;
}

// ---- what an entry gives the device ---------------------------------------------------------------------------------------------------

constexpr bool ends_with(const char* name, const char* end) {
  size_t length = 0, tail = 0;
  while (name[length] != 0) ++length;
  while (end[tail] != 0) ++tail;
  if (tail > length) return false;
  for (size_t i = 0; i < tail; ++i)
    if (name[length - tail + i] != end[i]) return false;
  return true;
}
constexpr bool begins_with(const char* name, const char* start) {
  for (; *start != 0; ++name, ++start)
    if (*name != *start) return false;
  return true;
}
constexpr bool contains(const char* name, const char* part) {
  for (; *name != 0; ++name)
    if (begins_with(name, part)) return true;
  return false;
}

struct Work {
  uint64_t stream = 0;
  uint64_t signature = 0;
  bool per_thread = false;  // stream 0 is the thread's own
};

uint64_t bits(P value) {
  return reinterpret_cast<uint64_t>(value);
}
template <class T>
uint64_t bits(T value) {
  uint64_t out = 0;
  std::memcpy(&out, &value, sizeof(T) < sizeof out ? sizeof(T) : sizeof out);
  return out;
}

// The part of CUlaunchConfig that is used.
struct LaunchConfig {
  uint32_t grid[3], block[3], shared_bytes;
  void* stream;
};

template <int entry, class... A>
Work work_of(const char* name, A... arguments) {
  const uint64_t given[] = {bits(arguments)...};
  constexpr size_t count = sizeof...(A);
  const auto value = [&given](size_t i) { return i < count ? given[i] : 0; };
  Work work;
  work.per_thread = ends_with(name, "_ptsz") || ends_with(name, "_ptds");
  if (begins_with(name, "cuLaunchKernelEx")) {
    LaunchConfig config{};
    if (value(0) != 0) std::memcpy(&config, reinterpret_cast<const void*>(value(0)), sizeof config);
    work.stream = bits(config.stream);
    work.signature = value(1) ^ (uint64_t{config.grid[0]} * config.grid[1] * config.grid[2]) << 20;
  } else if (begins_with(name, "cuLaunchKernel") || begins_with(name, "cuLaunchCooperativeKernel")) {
    work.stream = value(8);
    work.signature = value(0) ^ (value(1) * value(2) * value(3)) << 20;
  } else if (begins_with(name, "cuGraph")) {
    work.stream = value(1);
    work.signature = value(0);
  } else {
    if (contains(name, "Async")) work.stream = value(count - 1);
    work.signature = static_cast<uint64_t>(entry) + 1;
    // Copies and fills: of which order of magnitude they are.
    if (!contains(name, "2D") && !contains(name, "3D") && !contains(name, "Batch") && count > 2)
      for (uint64_t bytes = value(2); bytes > 1; bytes >>= 1) work.signature += 0x100000;
  }
  return work;
}

// ---- submitting -----------------------------------------------------------------------------------------------------------------------

Result record(void* event, const Work& work) {
  return real(work.per_thread ? kEntry_cuEventRecord_ptsz : kEntry_cuEventRecord, event,
              reinterpret_cast<P>(work.stream));
}
bool have(void*& event) {
  if (event != nullptr) return true;
  void* made = nullptr;
  if (real(kEntry_cuEventCreate, &made, I{0}) != kSuccess) return false;
  event = made;
  return true;
}

// A place for the work; null: there is no room in the quantum or in flight now. `unmeasured`: it goes without events.
Piece* reserve(const Work& work, Ring* ring, uint64_t* out_number) {
  Turn& now = turn();
  uint64_t& known = g_estimates[work.signature == 0 ? 0 : hashed(work.signature) % kEstimates];
  const uint64_t learned = __atomic_load_n(&known, __ATOMIC_RELAXED);
  const uint64_t estimate_ns = learned != 0 ? learned : kPriorNs;
  const uint64_t in_flight_ns = load(now.in_flight_ns);
  if (in_flight_ns != 0 && in_flight_ns + estimate_ns > kMostInFlightNs) return nullptr;
  if (load(now.used_ns) + in_flight_ns >= load(now.budget_ns)) return nullptr;
  uint64_t head = load(ring->head);
  do {
    if (head - load(ring->tail) >= kSlots) return nullptr;
  } while (
      !__atomic_compare_exchange_n(&ring->head, &head, head + 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
  __atomic_add_fetch(&now.in_flight_ns, estimate_ns, __ATOMIC_ACQ_REL);
  Piece& piece = ring->pieces[head % kSlots];
  piece.stream = work.per_thread && work.stream == 0 ? bits(&errno) : work.stream;
  piece.signature = hashed(work.signature) % kEstimates;
  piece.estimate_ns = estimate_ns;
  piece.has_begin = 0;
  store(piece.state, uint32_t{kReserved});
  *out_number = head;
  return &piece;
}

void skip(Piece& piece) {
  store(piece.state, uint32_t{kSkipped});
}

// Before the driver gets the work: an event, unless the stream is busy with what is known.
bool mark_begin(Piece& piece, Ring& ring, const Work& work, uint64_t number) {
  const Uncaptured uncaptured;
  if (!have(piece.begin) || !have(piece.end)) return false;
  StreamRow& row = ring.streams[hashed(piece.stream) % kStreams];
  if (row.stream != piece.stream || row.last < load(ring.tail)) {
    if (record(piece.begin, work) != kSuccess) return false;
    piece.has_begin = 1;
  }
  row.stream = piece.stream;
  row.last = number;
  return true;
}

bool being_captured(const Work& work) {
  if (__builtin_expect(load(turn().capturing) == 0, 1)) return false;
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
  const timespec time{0, 20'000};
  nanosleep(&time, nullptr);
}

// Blocks of the process may move: its calls are counted, so that a move knows when none is under way. False: the phase has changed.
bool counted_in(Phase phase, bool* out_inside) {
  __atomic_add_fetch(&turn().inside, 1U, __ATOMIC_SEQ_CST);
  *out_inside = phase_now() == phase;
  if (!*out_inside) __atomic_sub_fetch(&turn().inside, 1U, __ATOMIC_SEQ_CST);
  return *out_inside;
}

// Waits until the work may go to the device. The piece is null if it goes without events.
Piece* enter(const Work& work, Ring** out_ring, uint64_t* out_number, bool* out_inside) {
  Turn& now = turn();
  *out_inside = false;
  if (being_captured(work)) return nullptr;
  for (int turns = 0;;) {
    const Phase phase = phase_now();
    switch (phase) {
      case Phase::none:
        if (!join_daemon()) return nullptr;  // it has a context that it was refused
        break;
      case Phase::alone:
        if (moves()) {
          if (counted_in(phase, out_inside)) return nullptr;
          break;
        }
        store(now.gate, 1U);
        return nullptr;
      case Phase::open:
        if (moves()) {
          if (!counted_in(phase, out_inside)) break;
          store(now.touched, 1U);
          return nullptr;
        }
        store(now.touched, 1U);
        store(now.gate, 1U);
        if (phase_now() == Phase::open) return nullptr;
        store(now.gate, 0U);
        break;
      case Phase::resting:
        ask_for_turn();
        break;
      case Phase::asked:
      case Phase::draining:
        __atomic_add_fetch(&now.waiting, 1U, __ATOMIC_SEQ_CST);
        wait_phase(phase, 100'000'000);
        __atomic_sub_fetch(&now.waiting, 1U, __ATOMIC_SEQ_CST);
        turns = 0;
        break;
      case Phase::quantum: {
        __atomic_add_fetch(&now.inside, 1U, __ATOMIC_SEQ_CST);
        if (phase_now() == Phase::quantum) {
          void* context = nullptr;
          real(kEntry_cuCtxGetCurrent, &context);
          Ring* ring = context != nullptr ? ring_of(bits(context)) : nullptr;
          *out_inside = true;
          store(now.touched, 1U);
          if (ring == nullptr) {
            store(now.unmeasured, 1U);
            return nullptr;
          }
          if (Piece* piece = reserve(work, ring, out_number)) {
            if (mark_begin(*piece, *ring, work, *out_number)) {
              *out_ring = ring;
              return piece;
            }
            skip(*piece);
            store(now.unmeasured, 1U);
            return nullptr;
          }
          *out_inside = false;
        }
        __atomic_sub_fetch(&now.inside, 1U, __ATOMIC_SEQ_CST);
        __atomic_add_fetch(&now.waiting, 1U, __ATOMIC_SEQ_CST);
        if (!look_at_events(false)) pause_briefly(turns++);
        __atomic_sub_fetch(&now.waiting, 1U, __ATOMIC_SEQ_CST);
        break;
      }
    }
  }
}

template <int entry, class... A>
Result gated(const char* name, A... arguments) {
  const Work work = work_of<entry>(name, arguments...);
  Ring* ring = nullptr;
  uint64_t number = 0;
  bool inside = false;
  Piece* const piece = enter(work, &ring, &number, &inside);
  const Result result = real(entry, arguments...);
  if (piece != nullptr) {
    const Uncaptured uncaptured;
    if (result != kSuccess) {
      skip(*piece);
    } else if (record(piece->end, work) == kSuccess) {
      store(piece->state, uint32_t{kRecorded});
    } else {
      skip(*piece);
      store(turn().unmeasured, 1U);
    }
  }
  if (inside) {
    store(turn().active_ns, host_ns());
    __atomic_sub_fetch(&turn().inside, 1U, __ATOMIC_SEQ_CST);
  }
  return result;
}

// ---- measuring ------------------------------------------------------------------------------------------------------------------------

double between_ns(void* from, void* to) {
  float milliseconds = 0;
  return real(kEntry_cuEventElapsedTime, &milliseconds, from, to) == kSuccess
             ? static_cast<double>(milliseconds) * 1e6
             : 0;
}

// The piece has finished: the time since the piece that ended last, as far as the device had this one.
void count(Ring& ring, const Piece& piece) {
  double took = 0;
  if (ring.counted != nullptr) {
    took = between_ns(ring.counted, piece.end);
    const double idle = piece.has_begin != 0 ? between_ns(ring.counted, piece.begin) : 0;
    if (idle > 0) took -= idle;
  } else if (piece.has_begin != 0) {
    took = between_ns(piece.begin, piece.end);
  }
  if (took >= 0) ring.counted = piece.end;
  const uint64_t ns = took > 0 ? static_cast<uint64_t>(took) : 0;
  __atomic_add_fetch(&turn().used_ns, ns, __ATOMIC_ACQ_REL);
  uint64_t& estimate = g_estimates[piece.signature];
  const uint64_t before = __atomic_load_n(&estimate, __ATOMIC_RELAXED);
  const uint64_t learned = before == 0 ? ns : before - before / 4 + ns / 4;
  __atomic_store_n(&estimate, learned != 0 ? learned : 1, __ATOMIC_RELAXED);
}

bool look(Ring& ring) {
  bool any = false;
  for (uint64_t tail = load(ring.tail); tail != load(ring.head); ++tail) {
    Piece& piece = ring.pieces[tail % kSlots];
    const uint32_t state = load(piece.state);
    if (state != kRecorded && state != kSkipped) break;
    if (state == kRecorded) {
      if (real(kEntry_cuEventQuery, piece.end) == kNotReady) break;
      count(ring, piece);
    }
    __atomic_sub_fetch(&turn().in_flight_ns, piece.estimate_ns, __ATOMIC_ACQ_REL);
    store(piece.state, uint32_t{kFree});
    store(ring.tail, tail + 1);
    any = true;
  }
  return any;
}

}  // namespace

uint32_t g_moves;

// ---- for the others -------------------------------------------------------------------------------------------------------------------

Turn& turn() {
  return gpushare_shim_turn.turn;
}

uint64_t host_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

void change_phase(Phase to) {
  auto* word = reinterpret_cast<uint32_t*>(&turn().phase);
  __atomic_store_n(word, static_cast<uint32_t>(to), __ATOMIC_SEQ_CST);
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

void wait_phase(Phase seen, uint64_t timeout_ns) {
  const timespec time{static_cast<time_t>(timeout_ns / 1'000'000'000),
                      static_cast<long>(timeout_ns % 1'000'000'000)};
  syscall(SYS_futex, &turn().phase, FUTEX_WAIT_PRIVATE, static_cast<uint32_t>(seen), &time, nullptr, 0);
}

bool look_at_events(bool all) {
  // One thread looks at a time; nobody waits for it.
  if (__atomic_exchange_n(&state().looking, 1U, __ATOMIC_ACQUIRE) != 0) return false;
  bool any = false;
  {
    const Uncaptured uncaptured;
    void* current = nullptr;
    if (!all) real(kEntry_cuCtxGetCurrent, &current);
    for (Ring& ring : state().rings) {
      const uint64_t context = load(ring.context);
      if (context == 0 || load(ring.tail) == load(ring.head)) continue;
      if (all ? real(kEntry_cuCtxSetCurrent, reinterpret_cast<P>(green_of(context).primary)) != kSuccess
              : context != bits(current))
        continue;
      any = look(ring) || any;
    }
  }
  __atomic_store_n(&state().looking, 0U, __ATOMIC_RELEASE);
  if (any) store(turn().active_ns, host_ns());
  return any;
}

bool drained() {
  if (__atomic_load_n(&turn().inside, __ATOMIC_SEQ_CST) != 0) return false;
  for (const Ring& ring : state().rings)
    if (load(ring.tail) != load(ring.head)) return false;
  return true;
}

bool synchronize_contexts() {
  for (uint64_t& slot : state().contexts) {
    const uint64_t context = load(slot);
    if (context == 0) continue;
    if (load(turn().capturing) != 0) return false;
    if (real(kEntry_cuCtxSetCurrent, reinterpret_cast<P>(context)) == kSuccess) real(kEntry_cuCtxSynchronize);
  }
  return true;
}

void prepare_fork() {
  madvise(&state(), sizeof(State), MADV_WIPEONFORK);
}

void restart_clock() {
  for (Ring& ring : state().rings) ring.counted = nullptr;
  store(turn().used_ns, uint64_t{0});
}

void know_context(uint64_t context) {
  for (uint64_t& slot : state().contexts)
    if (load(slot) == context) return;
  for (uint64_t& slot : state().contexts) {
    uint64_t free = 0;
    if (__atomic_compare_exchange_n(&slot, &free, context, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) return;
  }
}

void know_green(const Green& green) {
  for (Green& row : state().greens) {
    uint64_t free = 0;
    if (!__atomic_compare_exchange_n(&row.context, &free, uint64_t{1}, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_RELAXED))
      continue;
    row.primary = green.primary;
    row.ordinal = green.ordinal;
    store(row.context, green.context);
    return;
  }
}

Green green_of(uint64_t context) {
  for (const Green& row : state().greens)
    if (load(row.context) == context && context > 1) return row;
  return {context, context, -1};
}

void forget_gate(uint64_t context) {
  for (Green& row : state().greens)
    if (load(row.context) == context) store(row.context, uint64_t{0});
  for (uint64_t& slot : state().contexts) {
    uint64_t there = context;
    __atomic_compare_exchange_n(&slot, &there, uint64_t{0}, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
  }
  for (Ring& ring : state().rings) {
    if (context == 0 || load(ring.context) != context) continue;
    while (__atomic_exchange_n(&state().looking, 1U, __ATOMIC_ACQUIRE) != 0) sched_yield();
    for (uint64_t tail = ring.tail; tail != load(ring.head); ++tail)
      __atomic_sub_fetch(&turn().in_flight_ns, ring.pieces[tail % kSlots].estimate_ns, __ATOMIC_ACQ_REL);
    ring.tail = ring.head;
    __atomic_store_n(&state().looking, 0U, __ATOMIC_RELEASE);
    for (Piece& piece : ring.pieces) {
      void** const events[] = {&piece.begin, &piece.end};
      for (void** event : events)
        if (void* made = __atomic_exchange_n(event, nullptr, __ATOMIC_ACQ_REL))
          real(kEntry_cuEventDestroy_v2, made);
      store(piece.state, uint32_t{kFree});
    }
    ring.counted = nullptr;
    store(ring.context, uint64_t{0});
  }
}

}  // namespace gpushare::shim

using namespace gpushare::shim;  // NOLINT(google-build-using-namespace): the functions below have C linkage

// What entries.S goes to while the gate is not open: a function for each row of class gate, with the driver's parameters.
#define GPUSHARE_GATE_pass(name, parameters, arguments)
#define GPUSHARE_GATE_count(name, parameters, arguments)
#define GPUSHARE_GATE_charge(name, parameters, arguments)
#define GPUSHARE_CALL(...) __VA_ARGS__
#define GPUSHARE_GATE_gate(name, parameters, arguments)                                      \
  extern "C" Result gpushare_gate_##name parameters;                                         \
  extern "C" Result gpushare_gate_##name parameters {                                        \
    const auto call = [](auto... values) { return gated<kEntry_##name>(#name, values...); }; \
    return call arguments;                                                                   \
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
  if (result == kSuccess) __atomic_add_fetch(&turn().capturing, 1U, __ATOMIC_SEQ_CST);
  return result;
}
// The end of a capture that had failed counts too: the driver then has ended it.
Result ended_capture(Result result) {
  uint32_t before = __atomic_load_n(&turn().capturing, __ATOMIC_RELAXED);
  while (result != kInvalidValue && before != 0 &&
         !__atomic_compare_exchange_n(&turn().capturing, &before, before - 1, false, __ATOMIC_SEQ_CST,
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
GPUSHARE_CAPTURE(cuStreamEndCapture, (P a, P b), (kEntry_cuStreamEndCapture, a, b), ended_capture)
GPUSHARE_CAPTURE(cuStreamEndCapture_ptsz, (P a, P b), (kEntry_cuStreamEndCapture_ptsz, a, b), ended_capture)
}
