// pools.cpp: stream-ordered memory and pools. Pools hold on to freed memory: they are asked, and trimmed, where a
// charge comes near the limit.
// SPDX-License-Identifier: Apache-2.0
#include <sched.h>

#include "shim/charged.hpp"
#include "shim/graphs.hpp"

namespace gpushare::shim {
namespace {

constexpr uint32_t kPoolReserved = 5, kPoolUsed = 7;  // attributes
uint32_t g_trimming;  // threads that call the driver with pools; none is destroyed meanwhile

// Trims the pools of the device, and notes what they still keep. `wait`: waits for memory whose free has not happened yet
// on its stream.
__attribute__((noinline)) void trim_pools(int place, bool wait) {
  const int ordinal = ordinal_of(place);
  if (ordinal < 0) return;
  constexpr int kRoom = 64;
  uint64_t kept = 0;
  for (int attempt = 0; attempt < (wait ? 2 : 1); ++attempt) {
    if (attempt == 1 && real(kEntry_cuCtxSynchronize) != kSuccess) break;
    uint64_t pools[kRoom] = {};
    __atomic_add_fetch(&g_trimming, 1U, __ATOMIC_SEQ_CST);
    int count = pools_of(place, &pools[0], kRoom - 1);
    if (real(kEntry_cuDeviceGetDefaultMemPool, &pools[count], ordinal) == kSuccess && pools[count] != 0)
      ++count;
    kept = 0;
    for (int i = 0; i < count; ++i) {
      const auto pool = reinterpret_cast<P>(pools[i]);
      uint64_t reserved = 0, used = 0;
      real(kEntry_cuMemPoolTrimTo, pool, L{0});
      if (real(kEntry_cuMemPoolGetAttribute, pool, kPoolReserved, &reserved) == kSuccess &&
          real(kEntry_cuMemPoolGetAttribute, pool, kPoolUsed, &used) == kSuccess && reserved > used)
        kept += reserved - used;
    }
    __atomic_sub_fetch(&g_trimming, 1U, __ATOMIC_SEQ_CST);
    if (kept == 0) break;
  }
  note_kept(place, kept);
  measure_overhead(ordinal, nullptr, kept);  // may have had what was trimmed
}

// Whether the bytes that the pools keep fit as well. A pooled allocation takes kept bytes first.
bool leaves_room(int place, uint64_t bytes, bool pooled) {
  uint64_t kept = kept_by_pools(place);
  if (pooled) kept -= kept < bytes ? kept : bytes;
  if (__builtin_expect(kept == 0, 1)) return true;
  const uint64_t limit = limit_bytes(place), held = held_bytes(place);
  return held <= limit && kept <= limit - held;
}

}  // namespace

bool admit_near_limit(int place, uint64_t bytes, bool pooled, bool fits) {
  if (__builtin_expect(!fits && has_small(), 0) && give_back_small(place)) fits = charge(place, bytes);
  if (__builtin_expect(!fits, 0) && !is_capturing_any() && settle_graphs(place, true))
    fits = charge(place, bytes);
  if (__builtin_expect(!has_pools(place), 1)) return fits;
  if (fits && leaves_room(place, bytes, pooled)) return true;
  if (is_capturing_any()) return fits;
  if (fits) discharge(place, bytes);
  trim_pools(place, !pooled);
  if (!charge(place, bytes)) return false;
  if (leaves_room(place, bytes, pooled)) return true;
  discharge(place, bytes);
  return false;
}

namespace {

// While a stream is captured an allocation is a node of a graph, charged when the graph is instantiated.
bool is_capturing(int entry, P stream) {
  int status = 0;
  return real(entry, stream, &status) == kSuccess && status != 0;
}

// The device from which memory for the stream comes, where there are several. `otherwise`: the device of the thread's
// context.
int place_of_stream(P stream, int otherwise) {
  constexpr uint64_t kLastDefaultStream = 2;  // of a context or a thread
  void* context = nullptr;
  if (only_place() >= 0 || reinterpret_cast<uint64_t>(stream) <= kLastDefaultStream ||
      real(kEntry_cuStreamGetCtx, stream, &context) != kSuccess || context == nullptr)
    return otherwise;
  return place_of_context(reinterpret_cast<uint64_t>(context), false);
}
// A pool that the program has not made: a device's own.
int place_of_pool(P pool, int otherwise) {
  int count = 0;
  if (only_place() >= 0 || real(kEntry_cuDeviceGetCount, &count) != kSuccess) return otherwise;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    void* own = nullptr;
    if (real(kEntry_cuDeviceGetDefaultMemPool, &own, ordinal) == kSuccess && own == pool)
      return place_of(ordinal);
  }
  return otherwise;
}

template <class Call>
Result stream_ordered(int capturing, P out_address, uint64_t bytes, P stream, P pool, Call call) {
  if (is_capturing(capturing, stream)) return call();
  Current at = current();
  Block known;
  if (pool == nullptr) {
    at.place = place_of_stream(stream, at.place);
  } else if (!look(Kind::pool, reinterpret_cast<uint64_t>(pool), &known)) {
    at.place = place_of_pool(pool, at.place);
  } else {
    at.place = known.device;
  }
  return charged<uint64_t>(Kind::memory, at, bytes, out_address, call, at.place != kOfHost);
}

// A pool that the driver has given out for a location and a type of memory.
Result known_pool(Result result, P out_pool, P location, I type) {
  if (result != kSuccess || out_pool == nullptr || location == nullptr) return result;
  LocatedProperties properties{};
  properties.type = static_cast<int32_t>(type);
  std::memcpy(&properties.location_type, location, 8);
  const auto pool = reinterpret_cast<uint64_t>(*static_cast<void**>(out_pool));
  group();
  Block known;
  Current at;
  at.place = place_in(properties);
  if (!look(Kind::pool, pool, &known)) insert(block_of(Kind::pool, pool, 0, at));
  return result;
}

}  // namespace
}  // namespace gpushare::shim

using namespace gpushare::shim;  // NOLINT(google-build-using-namespace): the functions below have C linkage

#define HOOK(name) Result gpushare_hook_##name
extern "C" {

HOOK(cuMemAllocAsync)(P a, L b, P c) {
  return stream_ordered(kEntry_cuStreamIsCapturing, a, b, c, nullptr,
                        [&] { return real(kEntry_cuMemAllocAsync, a, b, c); });
}
HOOK(cuMemAllocAsync_ptsz)(P a, L b, P c) {
  return stream_ordered(kEntry_cuStreamIsCapturing_ptsz, a, b, c, nullptr,
                        [&] { return real(kEntry_cuMemAllocAsync_ptsz, a, b, c); });
}
HOOK(cuMemAllocFromPoolAsync)(P a, L b, P c, P d) {
  return stream_ordered(kEntry_cuStreamIsCapturing, a, b, d, c,
                        [&] { return real(kEntry_cuMemAllocFromPoolAsync, a, b, c, d); });
}
HOOK(cuMemAllocFromPoolAsync_ptsz)(P a, L b, P c, P d) {
  return stream_ordered(kEntry_cuStreamIsCapturing_ptsz, a, b, d, c,
                        [&] { return real(kEntry_cuMemAllocFromPoolAsync_ptsz, a, b, c, d); });
}
// A captured free happens when the graph runs, so the block stays charged.
HOOK(cuMemFreeAsync)(L a, P b) {
  const auto call = [&] { return real(kEntry_cuMemFreeAsync, a, b); };
  return is_capturing(kEntry_cuStreamIsCapturing, b) ? call() : freed_memory(a, call, {true, false, b});
}
HOOK(cuMemFreeAsync_ptsz)(L a, P b) {
  const auto call = [&] { return real(kEntry_cuMemFreeAsync_ptsz, a, b); };
  return is_capturing(kEntry_cuStreamIsCapturing_ptsz, b) ? call() : freed_memory(a, call, {true, true, b});
}
// The device (or the host) from which a pool takes memory.
HOOK(cuMemPoolCreate)(P a, P b) {
  const Result result = real(kEntry_cuMemPoolCreate, a, b);
  if (result != kSuccess || a == nullptr || b == nullptr) return result;
  LocatedProperties properties;
  std::memcpy(&properties, b, 16);
  group();
  Current at;
  at.place = place_in(properties);
  insert(block_of(Kind::pool, reinterpret_cast<uint64_t>(*static_cast<void**>(a)), 0, at));
  return result;
}
// The pools that a location has without the program's doing.
HOOK(cuMemGetDefaultMemPool)(P a, P b, I c) {
  return known_pool(real(kEntry_cuMemGetDefaultMemPool, a, b, c), a, b, c);
}
HOOK(cuMemGetMemPool)(P a, P b, I c) {
  return known_pool(real(kEntry_cuMemGetMemPool, a, b, c), a, b, c);
}
HOOK(cuMemPoolDestroy)(P a) {
  return freed(Kind::pool, reinterpret_cast<uint64_t>(a), [&] {
    while (__atomic_load_n(&g_trimming, __ATOMIC_SEQ_CST) != 0) sched_yield();
    return real(kEntry_cuMemPoolDestroy, a);
  });
}
HOOK(cuMemPoolImportPointer)(P a, P b, P c) {
  return opened(real(kEntry_cuMemPoolImportPointer, a, b, c), a,
                [](uint64_t address) { real(kEntry_cuMemFree_v2, address); });
}
}
