// SPDX-License-Identifier: Apache-2.0
#include "shim/move.hpp"

#include <sched.h>
#include <unistd.h>

#include <cstring>

#include "base/cuda_host_node.hpp"
#include "shim/books.hpp"
#include "shim/charged.hpp"
#include "shim/driver.hpp"
#include "shim/gate.hpp"
#include "shim/spill.hpp"
#include "shim/words.hpp"

namespace gpushare::shim {
namespace {

// Attributes of a device, types of places.
constexpr uint32_t kHasVirtualMemory = 102;
constexpr int32_t kOnDevice = 1, kOnHostNode = 3;

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

// The driver's abilities with a device's memory, asked once.
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

Result create(int ordinal, bool on_host, uint64_t size, uint64_t* out_handle) {
  Properties asked = properties(ordinal, on_host);
  return real(kEntry_cuMemCreate, out_handle, size, &asked, L{0});
}

uint64_t granularity(int place, int ordinal) {
  Able& able = g_able[place];
  if (load(able.asked) != 0) return able.granularity;
  const auto attribute = [&](int number, int* value) {
    return real(kEntry_cuDeviceGetAttribute, value, static_cast<uint32_t>(number), ordinal) == kSuccess;
  };
  const auto step_of = [&](bool on_host) {
    uint64_t step = 0;
    Properties asked = properties(ordinal, on_host);
    const Result result = real(kEntry_cuMemGetAllocationGranularity, &step, &asked, 0U);
    return result != kSuccess || step == 0 ? UINT64_MAX : step;
  };
  int has = 0;
  uint64_t largest = 0;
  if (attribute(kHasVirtualMemory, &has) && has != 0) {
    const int node = base::find_host_node(attribute, [&](int asked) {
      able.node = asked;
      const uint64_t step = step_of(true);
      uint64_t handle = 0;
      return step <= kMovableBytes && create(ordinal, true, step, &handle) == kSuccess &&
             real(kEntry_cuMemRelease, handle) == kSuccess;
    });
    const uint64_t of_device = step_of(false), of_host = node < 0 ? UINT64_MAX : step_of(true);
    largest = of_device > of_host ? of_device : of_host;
  }
  able.granularity = largest > kMovableBytes ? 0 : largest;
  store(able.asked, 1);
  return able.granularity;
}

// Devices whose memory others reach: by place, the places of those as bits.
uint64_t g_reached[kDevices];

// The device, and those that reach its memory, may use what is mapped there.
Result give_access(uint64_t address, uint64_t size, int ordinal) {
  Access access[kDevices + 1] = {{{kOnDevice, ordinal}, 3}};  // reading and writing
  uint64_t count = 1;
  const int own = place_of(ordinal);
  for (int place = 0; place < kDevices; ++place)
    if (const int other = ordinal_of(place); (reached_by(own) >> place & 1) != 0 && other >= 0)
      access[count++] = {{kOnDevice, other}, 3};
  return real(kEntry_cuMemSetAccess, address, size, &access[0], count);
}
// The physical memory stands behind the address, and may be used.
Result map(uint64_t address, uint64_t size, uint64_t handle, int ordinal) {
  Result result = real(kEntry_cuMemMap, address, size, L{0}, handle, L{0});
  if (result != kSuccess) return result;
  result = give_access(address, size, ordinal);
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

// Moves the range. Its place and its memory are new afterwards, unless the move fails.
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
      log_line(
          "process %d: the driver does not map the block at %llx any more: the program fails where it uses "
          "it",
          static_cast<int>(getpid()), static_cast<unsigned long long>(range->begin));
    real(kEntry_cuMemRelease, handle);
    return false;
  }
  real(kEntry_cuMemRelease, range->handle);
  range->handle = handle;
  range->lies = to;
  return true;
}

uint32_t g_out[kSeats];  // 1: the process's blocks of the device are on the host for others

// Moves ranges that are `away` to the device, as far as the device really has room.
void come_back(int place, bool (*stops)(void* who), void* who) {
  Range range;
  for (uint64_t from = 0; (stops == nullptr || !stops(who)) && hold_range(place, from, Lies::away, &range);
       from = range.begin + range.size) {
    const bool came = move(&range, Lies::device);
    release_range(range);
    if (came) discharge_host(-1, range.size);
  }
}

uint64_t room_of(int place) {
  const uint64_t limit = limit_bytes(place), held = held_bytes(place);
  return limit > held ? limit - held : 0;
}

}  // namespace

bool can_move(int place) {
  const int ordinal = is_counted(place) ? ordinal_of(place) : -1;
  return ordinal >= 0 && granularity(place, ordinal) != 0;
}

void reach(int place, int from) {
  if (!is_counted(place) || !is_counted(from) || place == from) return;
  __atomic_fetch_or(&g_reached[place], uint64_t{1} << from, __ATOMIC_ACQ_REL);
  const int ordinal = ordinal_of(place);
  Range range;
  for (uint64_t at = 0; ordinal >= 0 && wait_range(place, at, &range); at = range.begin + range.size) {
    if (range.handle != 0) give_access(range.begin, range.size, ordinal);
    release_range(range);
  }
}

uint64_t reached_by(int place) {
  return is_counted(place) ? load(g_reached[place]) : 0;
}

Went page_out(int place, TellPart tell_part, void* who) {
  if (is_capturing_any()) return Went::nothing;
  // Small blocks and other kinds of memory stay on the device. If they are more than a quarter of all, moving the rest
  // would not help.
  const uint64_t counted = counted_here(place);
  uint64_t charged = range_bytes(place, Lies::device);
  if (counted - charged - range_bytes(place, Lies::away) > counted / 4) return Went::nothing;
  // For all blocks at once: nothing goes if the limit on pinned memory does not let all go.
  if (!charge_host(-1, charged)) return Went::nothing;
  // These blocks are on the host since a page-in ended early, or for want of room. The daemon knows of a page-out that
  // ended in part.
  const uint64_t there = is_out(place) ? 0 : range_bytes(place, Lies::away);
  // Blocks allocated from now on lie on the host too.
  __atomic_store_n(&g_out[place], 1U, __ATOMIC_SEQ_CST);
  tell_part(who, there);
  base::MovePart part({}, host_ns());
  bool went = true;
  Range range;
  for (uint64_t from = 0; went && hold_range(place, from, Lies::device, &range);
       from = range.begin + range.size) {
    const uint64_t now_ns = host_ns();
    if (part.moved_bytes() != 0 && part.next(now_ns, 1) < range.size) {
      tell_part(who, part.moved_bytes());
      part = base::MovePart({}, now_ns);
    }
    // A thread that looked earlier may have got a block on the device since.
    const uint64_t more = range.size > charged ? range.size - charged : 0;
    went = more == 0 || charge_host(-1, more);
    if (went) charged += more;
    went = went && move(&range, Lies::away);
    if (went) charged -= range.size;
    release_range(range);
    if (went) part.moved(range.size);
  }
  discharge_host(-1, charged);
  return went ? Went::all : Went::in_part;
}

bool is_out(int place) {
  return load(g_out[place]) != 0;
}

void page_in(int place, bool (*stops)(void* who), void* who) {
  __atomic_store_n(&g_out[place], 0U, __ATOMIC_SEQ_CST);
  come_back(place, stops, who);
}

bool allocate_movable(const Current& at, uint64_t bytes, void* out_address, Result* out_result) {
  if (!is_counted(at.place) || out_address == nullptr || at.context == 0) return false;
  const int ordinal = ordinal_of(at.place);
  const uint64_t step = ordinal < 0 ? 0 : granularity(at.place, ordinal);
  if (step == 0 || bytes > UINT64_MAX / 2) return false;
  Range range{0, bytes, (bytes + step - 1) / step * step, at.context, 0, at.place, Lies::device, false};
  // From now on each call that gives the device work is counted, so that a move knows when none is under way.
  if (__atomic_exchange_n(&g_moves, 1U, __ATOMIC_SEQ_CST) == 0) close_gate();
  if (real(kEntry_cuMemAddressReserve, &range.begin, range.size, L{0}, L{0}, L{0}) != kSuccess) return false;
  *out_result = kOutOfMemory;
  const bool out = is_out(at.place);
  if (admit(range.place, range.size)) {
    if (out) range.lies = Lies::away;
    if (!out || charge_host(-1, range.size)) {
      *out_result = create(ordinal, out, range.size, &range.handle);
      if (out && *out_result != kSuccess) discharge_host(-1, range.size);
    }
    if (*out_result != kSuccess) discharge(range.place, range.size);
  }
  // A block that was to lie on the host from the start was refused by the host.
  if ((*out_result == kOutOfMemory || (out && *out_result != kSuccess)) &&
      charge_host(range.place, range.size)) {
    range.lies = Lies::spilled;
    *out_result = create(ordinal, true, range.size, &range.handle);
    if (*out_result != kSuccess) discharge_host(range.place, range.size);
    // Pinned memory does too, though it cannot come home.
    if (*out_result != kSuccess && spill(at, bytes, out_address) == kSuccess) {
      real(kEntry_cuMemAddressFree, range.begin, range.size);
      *out_result = kSuccess;
      return true;
    }
    if (*out_result != kSuccess) *out_result = kOutOfMemory;
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

bool wants_home(int place) {
  if (!moves() || is_out(place)) return false;
  // Bytes that the device had no room for when the process was asked back count as the device's already.
  if (range_bytes(place, Lies::away) != 0) return true;
  return range_bytes(place, Lies::spilled) != 0 && least_range(place, Lies::spilled) <= room_of(place);
}

void bring_home(int place, const base::MoveBudget& budget) {
  if (!moves() || is_capturing_any()) return;
  come_back(place, nullptr, nullptr);
  base::MovePart part(budget, host_ns());
  uint64_t from = 0;
  Range range;
  while (part.next(host_ns(), 1) > 0 && hold_range(place, from, Lies::spilled, &range)) {
    const bool fits = charge(range.place, range.size);
    const bool came = fits && move(&range, Lies::device);
    release_range(range);
    if (came) {
      discharge_host(range.place, range.size);
      part.moved(range.size);
    } else if (fits) {
      discharge(range.place, range.size);
      break;  // the device has no room in fact
    }
    from = range.begin + range.size;
  }
}

void bring_home_alone(int place) {
  if (!is_counted(place) || !wants_home(place)) return;
  Turn& now = turn(seat_of(place));
  auto alone = static_cast<uint32_t>(Phase::alone);
  if (!__atomic_compare_exchange_n(reinterpret_cast<uint32_t*>(&now.phase), &alone,
                                   static_cast<uint32_t>(Phase::draining), false, __ATOMIC_SEQ_CST,
                                   __ATOMIC_RELAXED))
    return;
  close_gate();
  void* current = nullptr;
  real(kEntry_cuCtxGetCurrent, &current);
  // The wait has a bound, since another thread may be in a call that waits for what this thread does next. After that
  // the blocks stay where they are, and the next free of memory tries again.
  const uint64_t until_ns = host_ns() + 100'000'000;
  bool still = false;
  while (!(still = __atomic_load_n(&now.inside, __ATOMIC_SEQ_CST) == 0) && host_ns() < until_ns)
    sched_yield();
  if (still && synchronize_contexts(seat_of(place))) bring_home(place, {.ns = base::MoveBudget::kUnlimited});
  real(kEntry_cuCtxSetCurrent, current);
  change_phase(seat_of(place), Phase::alone);
}

}  // namespace gpushare::shim
