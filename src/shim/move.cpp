// SPDX-License-Identifier: Apache-2.0
#include "shim/move.hpp"

#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <cstring>

#include "shim/books.hpp"
#include "shim/charged.hpp"
#include "shim/driver.hpp"
#include "shim/gate.hpp"
#include "shim/words.hpp"

namespace gpushare::shim {
namespace {

// Attributes of a device, types of places.
constexpr uint32_t kHasVirtualMemory = 102, kHostNode = 134, kHasHostMemory = 141;
constexpr int32_t kOnDevice = 1, kOnHostNode = 3;
// At most so much comes home at a time: some 10 ms at 25 GB/s.
constexpr uint64_t kMostHome = 256 << 20;

struct Location {
  int32_t type, id;
};
struct Properties {  // CUmemAllocationProp
  int32_t type, handle_types;
  Location location;
  void* security;
  uint64_t flags;
};
static_assert(sizeof(Properties) == 32);
struct Access {  // CUmemAccessDesc
  Location location;
  int32_t flags;
};

// What the driver can do with a device's memory, asked once.
struct Able {
  uint32_t asked;
  int32_t node;
  uint64_t granularity;  // 0: such blocks are not to be had
};
Able g_able[kDevices];

Properties properties(int ordinal, bool on_host) {
  Properties all{};
  all.type = 1;  // pinned
  all.location =
      on_host ? Location{kOnHostNode, g_able[place_of(ordinal)].node} : Location{kOnDevice, ordinal};
  return all;
}

uint64_t granularity(int place, int ordinal) {
  Able& able = g_able[place];
  if (load(able.asked) != 0) return able.granularity;
  int value = 0;
  const auto has = [&](uint32_t attribute) {
    value = 0;
    return real(kEntry_cuDeviceGetAttribute, &value, attribute, ordinal) == kSuccess && value != 0;
  };
  uint64_t step = 0, largest = 0;
  if (has(kHasVirtualMemory) && has(kHasHostMemory)) {
    has(kHostNode);
    able.node = value > 0 ? value : 0;
    for (int on_host = 0; on_host < 2; ++on_host) {
      Properties asked = properties(ordinal, on_host != 0);
      if (real(kEntry_cuMemGetAllocationGranularity, &step, &asked, 0U) != kSuccess || step == 0)
        step = UINT64_MAX;
      largest = step > largest ? step : largest;
    }
  }
  able.granularity = largest > kMovableBytes ? 0 : largest;
  store(able.asked, 1);
  return able.granularity;
}

Result create(int ordinal, bool on_host, uint64_t size, uint64_t* out_handle) {
  Properties asked = properties(ordinal, on_host);
  return real(kEntry_cuMemCreate, out_handle, size, &asked, L{0});
}
// The physical memory stands behind the address, and the device may use it.
Result map(uint64_t address, uint64_t size, uint64_t handle, int ordinal) {
  Result result = real(kEntry_cuMemMap, address, size, L{0}, handle, L{0});
  if (result != kSuccess) return result;
  Access access{{kOnDevice, ordinal}, 3};  // reading and writing
  result = real(kEntry_cuMemSetAccess, address, size, &access, L{1});
  if (result != kSuccess) real(kEntry_cuMemUnmap, address, size);
  return result;
}

// A copy of the range's bytes in new physical memory. 0: it could not be had.
uint64_t copied(const Range& range, int ordinal, bool to_host) {
  uint64_t handle = 0, beside = 0;
  if (create(ordinal, to_host, range.size, &handle) != kSuccess) return 0;
  bool good = real(kEntry_cuMemAddressReserve, &beside, range.size, L{0}, L{0}, L{0}) == kSuccess;
  if (good) {
    good = map(beside, range.size, handle, ordinal) == kSuccess;
    if (good) {
      good = real(kEntry_cuMemcpyDtoD_v2, beside, range.begin, range.bytes) == kSuccess;
      good = real(kEntry_cuCtxSynchronize) == kSuccess && good;
      real(kEntry_cuMemUnmap, beside, range.size);
    }
    real(kEntry_cuMemAddressFree, beside, range.size);
  }
  if (good) return handle;
  real(kEntry_cuMemRelease, handle);
  return 0;
}

// Where it lies and in which memory is new afterwards, unless it fails.
bool move(Range* range, Lies to) {
  const InContext context(range->context);
  const int ordinal = ordinal_of(range->place);
  if (!context.is() || ordinal < 0) return false;
  const uint64_t handle = copied(*range, ordinal, to != Lies::device);
  if (handle == 0) return false;
  if (real(kEntry_cuMemUnmap, range->begin, range->size) != kSuccess) {
    real(kEntry_cuMemRelease, handle);
    return false;
  }
  if (map(range->begin, range->size, handle, ordinal) != kSuccess) {
    if (map(range->begin, range->size, range->handle, ordinal) != kSuccess)
      log_line("process %d: the driver does not map the block at %llx any more", static_cast<int>(getpid()),
               static_cast<unsigned long long>(range->begin));
    real(kEntry_cuMemRelease, handle);
    return false;
  }
  real(kEntry_cuMemRelease, range->handle);
  range->handle = handle;
  range->lies = to;
  return true;
}

uint32_t g_out;  // 1: the process's blocks are on the host for others

// What is `away` comes to the device, as far as there is room in fact.
void come_back() {
  Range range;
  for (uint64_t from = 0; hold_range(from, Lies::away, &range); from = range.begin + range.size) {
    const bool came = move(&range, Lies::device);
    release_range(range);
    if (came) discharge_host(-1, range.size);
  }
}

uint64_t room_of(int place) {
  const uint64_t limit = limit_bytes(), held = held_bytes(place);
  return limit > held ? limit - held : 0;
}

}  // namespace

bool can_move() {
  int count = 0;
  if (real(kEntry_cuDeviceGetCount, &count) != kSuccess) return false;
  for (int ordinal = 0; ordinal < count; ++ordinal)
    if (const int place = place_of(ordinal); is_counted(place) && granularity(place, ordinal) != 0)
      return true;
  return false;
}

bool page_out() {
  if (load(turn().capturing) != 0) return false;
  // Small blocks and other kinds of memory stay. Where they are much of it, going would not help.
  for (int place = 0; place < kDevices; ++place) {
    const uint64_t counted = counted_here(place);
    if (counted - range_bytes(place, Lies::device) - range_bytes(place, Lies::away) > counted / 4)
      return false;
  }
  // What is got from now on lies on the host too.
  __atomic_store_n(&g_out, 1U, __ATOMIC_SEQ_CST);
  Range range;
  for (uint64_t from = 0; hold_range(from, Lies::device, &range); from = range.begin + range.size) {
    const bool charged = charge_host(-1, range.size), went = charged && move(&range, Lies::away);
    release_range(range);
    if (went) continue;
    if (charged) discharge_host(-1, range.size);
    page_in();
    return false;
  }
  return true;
}

bool is_out() {
  return load(g_out) != 0;
}

void page_in() {
  __atomic_store_n(&g_out, 0U, __ATOMIC_SEQ_CST);
  come_back();
}

bool allocate_movable(const Current& at, uint64_t bytes, void* out_address, Result* out_result) {
  if (!is_counted(at.place) || out_address == nullptr || at.context == 0) return false;
  const int ordinal = ordinal_of(at.place);
  const uint64_t step = ordinal < 0 ? 0 : granularity(at.place, ordinal);
  if (step == 0 || bytes > UINT64_MAX / 2) return false;
  Range range{0, bytes, (bytes + step - 1) / step * step, at.context, 0, at.place, Lies::device, false};
  // From now on each call that gives the device work is counted, so that a move knows when none is under way.
  if (__atomic_exchange_n(&g_moves, 1U, __ATOMIC_SEQ_CST) == 0)
    __atomic_store_n(&turn().gate, 0U, __ATOMIC_SEQ_CST);
  if (real(kEntry_cuMemAddressReserve, &range.begin, range.size, L{0}, L{0}, L{0}) != kSuccess) return false;
  *out_result = kOutOfMemory;
  const bool out = is_out();
  if (admit(range.place, range.size)) {
    if (out) range.lies = Lies::away;
    if (!out || charge_host(-1, range.size)) {
      *out_result = create(ordinal, out, range.size, &range.handle);
      if (out && *out_result != kSuccess) discharge_host(-1, range.size);
    }
    if (*out_result != kSuccess) discharge(range.place, range.size);
  }
  if (*out_result == kOutOfMemory && charge_host(range.place, range.size)) {
    range.lies = Lies::spilled;
    *out_result = create(ordinal, true, range.size, &range.handle);
    if (*out_result != kSuccess) discharge_host(range.place, range.size);
  }
  if (*out_result == kSuccess) {
    *out_result = map(range.begin, range.size, range.handle, ordinal);
    if (*out_result == kSuccess && !add_range(range)) {
      real(kEntry_cuMemUnmap, range.begin, range.size);
      *out_result = kOutOfMemory;
    }
    if (*out_result == kSuccess) {
      std::memcpy(out_address, &range.begin, sizeof range.begin);
      return true;
    }
    real(kEntry_cuMemRelease, range.handle);
    discharge_range(range);
  }
  real(kEntry_cuMemAddressFree, range.begin, range.size);
  return true;
}

Result unmap_movable(const Range& range) {
  const Result result = real(kEntry_cuMemUnmap, range.begin, range.size);
  if (result != kSuccess) return result;
  real(kEntry_cuMemRelease, range.handle);
  real(kEntry_cuMemAddressFree, range.begin, range.size);
  return kSuccess;
}

Result free_movable(const Range& range) {
  {
    // As cuMemFree does: what was given to the device may still use the block.
    const InContext context(range.context);
    if (context.is()) real(kEntry_cuCtxSynchronize);
  }
  const Result result = unmap_movable(range);
  if (result == kSuccess)
    discharge_range(range);
  else
    add_range(range);
  return result;
}

bool wants_home() {
  if (!moves()) return false;
  if (is_out()) return false;
  for (int place = 0; place < kDevices; ++place)
    if (range_bytes(place, Lies::spilled) != 0 && least_range(place, Lies::spilled) <= room_of(place))
      return true;
  return false;
}

void bring_home() {
  if (!moves() || load(turn().capturing) != 0) return;
  come_back();
  uint64_t moved = 0, from = 0;
  Range range;
  while (moved < kMostHome && hold_range(from, Lies::spilled, &range)) {
    const bool fits = charge(range.place, range.size);
    const bool came = fits && move(&range, Lies::device);
    release_range(range);
    if (came) {
      discharge_host(range.place, range.size);
      moved += range.size;
    } else if (fits) {
      discharge(range.place, range.size);
      break;  // the device has no room in fact
    }
    from = range.begin + range.size;
  }
}

void bring_home_alone() {
  if (!wants_home()) return;
  Turn& now = turn();
  auto alone = static_cast<uint32_t>(Phase::alone);
  if (!__atomic_compare_exchange_n(reinterpret_cast<uint32_t*>(&now.phase), &alone,
                                   static_cast<uint32_t>(Phase::draining), false, __ATOMIC_SEQ_CST,
                                   __ATOMIC_RELAXED))
    return;
  __atomic_store_n(&now.gate, 0U, __ATOMIC_SEQ_CST);
  void* current = nullptr;
  real(kEntry_cuCtxGetCurrent, &current);
  // The wait has a bound, since another thread may be in a call that waits for what this thread does next. After that the blocks stay
  // where they are, and the next free of memory tries again.
  const uint64_t until_ns = host_ns() + 100'000'000;
  bool still = false;
  while (!(still = __atomic_load_n(&now.inside, __ATOMIC_SEQ_CST) == 0) && host_ns() < until_ns)
    sched_yield();
  if (still && synchronize_contexts()) bring_home();
  real(kEntry_cuCtxSetCurrent, current);
  change_phase(Phase::alone);
}

}  // namespace gpushare::shim
