// SPDX-License-Identifier: Apache-2.0
#include "shim/rings.hpp"

#include <sched.h>
#include <sys/mman.h>

#include <cerrno>

namespace gpushare::shim {
namespace {

// Before a signature was measured: two such pieces of work at a time, for they may take any time.
constexpr uint64_t kPriorNs = 100'000, kMostUnmeasuredNs = 200'000;
// The most device time that a stream gets without an event while nobody else wants the device, by estimates. Work that was
// never measured counts as much, so it gets events.
constexpr uint64_t kSparseNs = 2'500'000;

// The most work in flight, in estimated time. In a turn without an end, and in an opportunistic one, whoever comes waits for
// this work: kMostInFlightNs. In a turn with an end others wait for the end, and the device must not wait for the host
// before it: kMostOfLongNs, at most up to the end, and at most kMostAlike pieces while others want the device, because each
// piece may take much longer than it did.
constexpr uint64_t kMostInFlightNs = 200'000, kMostOfLongNs = 20'000'000;
constexpr uint32_t kMostAlike = 16;

constexpr uint32_t kPieces = 256, kRings = 32, kStreams = 64, kEstimates = 1024;
constexpr Result kNotReady = 600;

enum : uint32_t { kFree = 0, kReserved, kRecorded, kSkipped };

struct StreamRow {
  uint64_t stream;
  uint64_t last;  // number of its last piece
};

}  // namespace

// The pieces of one context, in the order in which they were given. Lossy where threads use one stream at once: then times are
// attributed to the wrong piece, while their sum stays right.
struct Ring {
  uint64_t context;
  int32_t seat;
  uint64_t head, tail;
  void* counted;       // the event up to which time is counted; the ring's own: no piece records it again
  uint32_t measuring;  // 0: a measurement begins; `counted` says nothing
  StreamRow streams[kStreams];
  Piece pieces[kPieces];
};

namespace {

// In pages of its own, which a child of fork finds empty.
struct alignas(4096) Rings {
  uint32_t looking[kSeats];
  uint32_t used;  // rings beyond were never taken
  Ring rings[kRings];
  Ring* begin() { return rings; }
  Ring* end() { return rings + load(used); }
};
Rings g_rings;

// Device time of each signature, learned for the life of the process; 0: not yet.
uint64_t g_estimates[kEstimates];
// The estimated device time that each stream got without an event. Streams of one place share it.
uint64_t g_without_event_ns[kSeats][kStreams];

// Lets this thread look at events. Without this mode such a call would end another thread's capture.
class Uncaptured {
 public:
  Uncaptured() : on_(is_capturing_any()) { exchange(); }
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

uint32_t place_of_signature(const Work& work) {
  return work.signature == 0 ? 0 : hashed(work.signature) % kEstimates;
}
uint64_t stream_of(const Work& work) {
  return work.per_thread && work.stream == 0 ? bits(&errno) : work.stream;
}
uint64_t& without_event_ns(const Work& work, int seat) {
  return g_without_event_ns[seat][hashed(stream_of(work)) % kStreams];
}
// 0: not measured yet.
uint64_t estimate_of(const Work& work) {
  return __atomic_load_n(&g_estimates[place_of_signature(work)], __ATOMIC_RELAXED);
}

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

void skip(Piece& piece) {
  store(piece.state, kSkipped);
}

// Before the driver gets the work: an event, unless the stream is busy with what is known.
bool mark_begin(Piece& piece, Ring& ring, const Work& work, uint64_t number) {
  const Uncaptured uncaptured;
  if (!have(piece.begin) || !have(piece.end)) return false;
  StreamRow& row = ring.streams[hashed(piece.stream) % kStreams];
  if (piece.sparse != 0 || load(row.stream) != piece.stream || load(row.last) < load(ring.tail)) {
    if (record(piece.begin, work) != kSuccess) return false;
    piece.has_begin = 1;
  }
  store(row.stream, piece.stream);
  store(row.last, number);
  return true;
}

double between_ns(void* from, void* to) {
  float milliseconds = 0;
  return real(kEntry_cuEventElapsedTime, &milliseconds, from, to) == kSuccess
             ? static_cast<double>(milliseconds) * 1e6
             : 0;
}

// The piece has finished: counts the time since the last end of a piece, as far as the device had this piece then. The
// event of that last end is taken out of its piece, because it may have to outlive the piece's place in the ring: pieces
// of other streams may end earlier or fail.
void count(Ring& ring, Piece& piece) {
  double took = 0;
  if (load(ring.measuring) != 0) {
    took = between_ns(ring.counted, piece.end);
    const double idle = piece.has_begin != 0 ? between_ns(ring.counted, piece.begin) : 0;
    if (idle > 0) took -= idle;
  } else if (piece.has_begin != 0) {
    took = between_ns(piece.begin, piece.end);
  }
  if (took >= 0) {
    void* const before = ring.counted;
    ring.counted = piece.end;
    piece.end = before;
    store(ring.measuring, 1U);
  }
  const uint64_t ns = took > 0 ? static_cast<uint64_t>(took) : 0;
  __atomic_add_fetch(&turn(ring.seat).used_ns, ns, __ATOMIC_ACQ_REL);
  uint64_t& estimate = g_estimates[piece.signature];
  const uint64_t before = __atomic_load_n(&estimate, __ATOMIC_RELAXED);
  const uint64_t learned = before == 0 ? ns : before - before / 4 + ns / 4;
  __atomic_store_n(&estimate, learned != 0 ? learned : 1, __ATOMIC_RELAXED);
}

bool look(Ring& ring) {
  bool any = false;
  for (uint64_t tail = load(ring.tail); tail != load(ring.head); ++tail) {
    Piece& piece = ring.pieces[tail % kPieces];
    const uint32_t state = load(piece.state);
    if (state != kRecorded && state != kSkipped) break;
    if (state == kRecorded) {
      if (real(kEntry_cuEventQuery, piece.end) == kNotReady) break;
      count(ring, piece);
    }
    __atomic_sub_fetch(&turn(ring.seat).in_flight_ns, piece.estimate_ns, __ATOMIC_ACQ_REL);
    store(piece.state, kFree);
    store(ring.tail, tail + 1);
    any = true;
  }
  return any;
}

}  // namespace

Ring* ring_of(uint64_t context, int seat) {
  for (Ring& ring : g_rings)
    if (load(ring.context) == context) return &ring;
  for (uint32_t i = 0; i < kRings; ++i) {
    Ring& ring = g_rings.rings[i];
    uint64_t there = 0;
    if (!__atomic_compare_exchange_n(&ring.context, &there, uint64_t{1}, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE)) {
      if (there == context) return &ring;
      continue;
    }
    store(ring.seat, seat);
    store(ring.context, context);
    for (uint32_t used = load(g_rings.used); used < i + 1;)
      if (__atomic_compare_exchange_n(&g_rings.used, &used, i + 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        break;
    return &ring;
  }
  return nullptr;
}

bool needs_events(const Work& work, int seat) {
  const uint64_t learned = estimate_of(work);
  uint64_t& sum = without_event_ns(work, seat);
  const uint64_t sum_ns = __atomic_load_n(&sum, __ATOMIC_RELAXED) + (learned != 0 ? learned : kSparseNs);
  if (sum_ns >= kSparseNs) return true;
  __atomic_store_n(&sum, sum_ns, __ATOMIC_RELAXED);
  return false;
}

Piece* reserve(const Work& work, Ring* ring, bool sparse, uint64_t* out_number) {
  Turn& now = turn(ring->seat);
  const uint64_t learned = estimate_of(work);
  uint64_t estimate_ns = learned != 0 ? learned : sparse ? kSparseNs : kPriorNs;
  uint64_t& sum = without_event_ns(work, ring->seat);
  if (sparse) estimate_ns += __atomic_load_n(&sum, __ATOMIC_RELAXED);
  const uint64_t in_flight_ns = load(now.in_flight_ns);
  uint64_t most_ns = learned != 0 || sparse ? load(now.most_ns) : kMostUnmeasuredNs;
  if (const uint64_t alike_ns = uint64_t{load(now.most_alike)} * learned;
      alike_ns != 0 && most_ns > kMostUnmeasuredNs)
    most_ns = alike_ns > kMostUnmeasuredNs ? (alike_ns < most_ns ? alike_ns : most_ns) : kMostUnmeasuredNs;
  uint64_t head = load(ring->head);
  // With one piece behind the one that runs the device does not wait for the host, however long they take.
  const bool next = sparse && head - load(ring->tail) <= 1;
  if (in_flight_ns != 0 && in_flight_ns + estimate_ns > most_ns && !next) return nullptr;
  if (load(now.used_ns) + in_flight_ns >= load(now.budget_ns) || load(now.over) != 0) return nullptr;
  do {
    if (head - load(ring->tail) >= kPieces) return nullptr;
  } while (
      !__atomic_compare_exchange_n(&ring->head, &head, head + 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
  __atomic_add_fetch(&now.in_flight_ns, estimate_ns, __ATOMIC_ACQ_REL);
  Piece& piece = ring->pieces[head % kPieces];
  piece.stream = stream_of(work);
  piece.signature = place_of_signature(work);
  piece.estimate_ns = estimate_ns;
  piece.has_begin = 0;
  piece.sparse = sparse ? 1 : 0;
  if (sparse) __atomic_store_n(&sum, 0, __ATOMIC_RELAXED);
  store(piece.state, kReserved);
  *out_number = head;
  return &piece;
}

void bound_flight(int seat, Others others, bool is_opportunistic) {
  Turn& now = turn(seat);
  const bool is_short = others == Others::may_come || (others == Others::wait && is_opportunistic);
  store(now.most_ns, is_short ? kMostInFlightNs : kMostOfLongNs);
  store(now.most_alike, others == Others::wait ? kMostAlike : 0U);
}

bool begin(Piece& piece, Ring& ring, const Work& work, uint64_t number) {
  if (mark_begin(piece, ring, work, number)) return true;
  skip(piece);
  store(turn(ring.seat).unmeasured, 1);
  return false;
}

void end(Piece& piece, int seat, const Work& work, Result result) {
  const Uncaptured uncaptured;
  if (result != kSuccess) {
    skip(piece);
  } else if (record(piece.end, work) == kSuccess) {
    store(piece.state, kRecorded);
  } else {
    skip(piece);
    store(turn(seat).unmeasured, 1);
  }
}

bool look_at_events(int seat, bool all) {
  // A thread that finds another one at work on this device's events goes on: nobody waits.
  if (__atomic_exchange_n(&g_rings.looking[seat], 1U, __ATOMIC_ACQUIRE) != 0) return false;
  bool any = false;
  {
    const Uncaptured uncaptured;
    void* current = nullptr;
    real(kEntry_cuCtxGetCurrent, &current);
    void* const own = current;
    for (Ring& ring : g_rings) {
      const uint64_t context = load(ring.context);
      if (context <= 1 || load(ring.seat) != seat || load(ring.tail) == load(ring.head)) continue;
      if (context != bits(current)) {
        if (!all) continue;
        current = reinterpret_cast<P>(green_of(context).primary);
        if (real(kEntry_cuCtxSetCurrent, current) != kSuccess) continue;
      }
      any = look(ring) || any;
    }
    if (current != own) real(kEntry_cuCtxSetCurrent, own);
  }
  store(g_rings.looking[seat], 0);
  if (any) store(turn(seat).active_ns, host_ns());
  return any;
}

bool drained(int seat) {
  if (__atomic_load_n(&turn(seat).inside, __ATOMIC_SEQ_CST) != 0) return false;
  for (const Ring& ring : g_rings)
    if (load(ring.seat) == seat && load(ring.tail) != load(ring.head)) return false;
  return true;
}

void wipe_rings_on_fork() {
  madvise(&g_rings, sizeof g_rings, MADV_WIPEONFORK);
}

void restart_clock(int seat) {
  for (Ring& ring : g_rings)
    if (load(ring.seat) == seat) store(ring.measuring, 0U);
  store(turn(seat).used_ns, 0);
}

void forget_ring(uint64_t context) {
  for (Ring& ring : g_rings) {
    if (context <= 1 || load(ring.context) != context) continue;
    uint32_t& looking = g_rings.looking[ring.seat];
    while (__atomic_exchange_n(&looking, 1U, __ATOMIC_ACQUIRE) != 0) sched_yield();
    for (uint64_t tail = load(ring.tail); tail != load(ring.head); ++tail)
      __atomic_sub_fetch(&turn(ring.seat).in_flight_ns, ring.pieces[tail % kPieces].estimate_ns,
                         __ATOMIC_ACQ_REL);
    store(ring.tail, load(ring.head));
    store(looking, 0);
    const auto destroy = [](void*& event) {
      if (void* made = __atomic_exchange_n(&event, nullptr, __ATOMIC_ACQ_REL))
        real(kEntry_cuEventDestroy_v2, made);
    };
    for (Piece& piece : ring.pieces) {
      destroy(piece.begin);
      destroy(piece.end);
      store(piece.state, kFree);
    }
    destroy(ring.counted);
    store(ring.measuring, 0U);
    store(ring.context, 0);
  }
}

}  // namespace gpushare::shim
