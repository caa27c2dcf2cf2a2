// SPDX-License-Identifier: Apache-2.0
#include "shim/books.hpp"

#include <algorithm>
#include <cstring>
#include <ctime>

#include "shim/words.hpp"

namespace gpushare::shim {

Pooled g_pooled[kDevices];

namespace {

// A number of the slots summed up over the group.
template <class Number>
uint64_t sum(const GroupPage& page, Number number) {
  const uint32_t used = load(page.slots_used);
  uint64_t bytes = number(page.slots[0]);
  for (uint32_t i = 1; i < used && i < kSlots; ++i) bytes += number(page.slots[i]);
  return bytes;
}
// The bytes that a group has: of a device, of host memory in place of device memory, and of pinned host memory.
struct OnDevice {
  int device;
  uint64_t operator()(const Slot& slot) const {
    return load(slot.counted[device]) + load(slot.overhead[device]);
  }
};
struct Spilled {
  int device;
  uint64_t operator()(const Slot& slot) const { return load(slot.spilled[device]); }
};
struct Pinned {
  uint64_t operator()(const Slot& slot) const { return load(slot.pinned); }
};

// Adds to a number of this process's slot if the group's sum stays within the limit. Two processes may both be refused
// where one of them would have fitted; never are both let through.
template <class Number, class Limit>
__attribute__((always_inline)) inline bool try_to_add(GroupPage& page, uint64_t& number, const Number& summed,
                                                      const Limit& limit_of, uint64_t bytes) {
  uint64_t before = load(number);
  for (;;) {
    const uint64_t limit = limit_of(page), held = sum(page, summed);
    if (bytes > limit || held > limit - bytes) return false;
    if (__builtin_expect(!__atomic_compare_exchange_n(&number, &before, before + bytes, false,
                                                      __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE),
                         0))
      continue;
    // The daemon may have lowered the limit meanwhile.
    const uint64_t limit_now = limit_of(page);
    if ((load(page.slots_used) == 1 && limit_now >= limit) || sum(page, summed) <= limit_now) return true;
    __atomic_sub_fetch(&number, bytes, __ATOMIC_ACQ_REL);
    return false;
  }
}
// Before it is refused: who of the others is still alive.
template <class Number, class Limit>
__attribute__((noinline)) bool add_without_the_dead(GroupPage& page, uint64_t& number, const Number& summed,
                                                    const Limit& limit_of, uint64_t bytes) {
  if (load(page.slots_used) > 1) reap(page);
  const bool added = try_to_add(page, number, summed, limit_of, bytes);
  if (!added && load(page.slots_used) > 1) reap(page);
  return added;
}
template <class Number, class Limit>
__attribute__((always_inline)) inline bool add(GroupPage& page, uint64_t& number, const Number& summed,
                                               const Limit& limit_of, uint64_t bytes) {
  return __builtin_expect(try_to_add(page, number, summed, limit_of, bytes), 1) ||
         add_without_the_dead(page, number, summed, limit_of, bytes);
}

uint64_t spill_limit(const GroupPage& page) {
  return load(page.limits.spill_bytes);
}
uint64_t pinned_limit(const GroupPage& page) {
  return load(page.limits.pinned_bytes);
}
// The limit of a device, with all that is charged against it.
__attribute__((always_inline)) inline bool add_on_device(GroupPage& page, uint64_t& number, int device,
                                                         uint64_t bytes) {
  return add(
      page, number, OnDevice{device}, [device](const GroupPage& at) { return device_limit(at, device); },
      bytes);
}

__attribute__((noinline, cold)) bool charge_elsewhere(int place, uint64_t bytes, bool limited) {
  return place == kOfHost ? charge_host(-1, bytes) : place != kUncounted || !limited;
}

}  // namespace

__attribute__((cold)) void discharge_elsewhere(int place, uint64_t bytes) {
  if (place == kOfHost) discharge_host(-1, bytes);
}

bool charge(int device, uint64_t bytes) {
  GroupPage& page = group();
  const bool limited = load(page.limits.device_bytes) != kNoLimit;
  if (__builtin_expect(!is_counted(device), 0)) return charge_elsewhere(device, bytes, limited);
  if (!limited) {
    __atomic_add_fetch(&g_slot->counted[device], bytes, __ATOMIC_RELAXED);
    return true;
  }
  return add_on_device(page, g_slot->counted[device], device, bytes);
}

bool note_overhead(int device, uint64_t bytes) {
  GroupPage& page = group();
  if (!is_counted(device)) return true;
  uint64_t& number = g_slot->overhead[device];
  const uint64_t before = load(number);
  if (bytes <= before) {
    store(number, bytes);
    return true;
  }
  return add_on_device(page, number, device, bytes - before);
}

void set_overhead(int device, uint64_t bytes) {
  group();
  if (is_counted(device)) store(g_slot->overhead[device], bytes);
}

bool charge_host(int device, uint64_t bytes) {
  GroupPage& page = group();
  if (!add(page, g_slot->pinned, Pinned{}, pinned_limit, bytes)) return false;
  if (!is_counted(device) || add(page, g_slot->spilled[device], Spilled{device}, spill_limit, bytes))
    return true;
  __atomic_sub_fetch(&g_slot->pinned, bytes, __ATOMIC_ACQ_REL);
  return false;
}

void discharge_host(int device, uint64_t bytes) {
  group();
  if (is_counted(device)) __atomic_sub_fetch(&g_slot->spilled[device], bytes, __ATOMIC_ACQ_REL);
  __atomic_sub_fetch(&g_slot->pinned, bytes, __ATOMIC_ACQ_REL);
}

void add_pooled(int device, uint64_t bytes) {
  if (!is_counted(device)) return;
  Pooled& pooled = g_pooled[device];
  store(pooled.any, true);
  const uint64_t live = __atomic_add_fetch(&pooled.live, bytes, __ATOMIC_ACQ_REL);
  for (uint64_t most = load(pooled.most); most < live;)
    if (__atomic_compare_exchange_n(&pooled.most, &most, live, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
      break;
}

uint64_t kept_by_pools(int device) {
  if (!has_pools(device)) return 0;
  const uint64_t live = load(g_pooled[device].live), most = load(g_pooled[device].most);
  return most > live ? most - live : 0;
}

void note_kept(int device, uint64_t bytes) {
  if (has_pools(device)) store(g_pooled[device].most, load(g_pooled[device].live) + bytes);
}

namespace {

// Others of the group may have been killed. Their slots are looked at now and then, for that reads files.
__attribute__((noinline)) void look_around(GroupPage& page) {
  static uint64_t looked_ns = 0;
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  const uint64_t now_ns =
      static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
  if (now_ns - __atomic_load_n(&looked_ns, __ATOMIC_RELAXED) <= 50'000'000) return;
  __atomic_store_n(&looked_ns, now_ns, __ATOMIC_RELAXED);
  reap(page);
}

uint64_t held(GroupPage& page, int device) {
  if (__builtin_expect(load(page.slots_used) > 1, 0)) look_around(page);
  return is_counted(device) ? sum(page, OnDevice{device}) : 0;
}

}  // namespace

uint64_t held_bytes(int device) {
  return held(group(), device);
}

Told tell(int device, uint64_t total, uint64_t free) {
  GroupPage& page = group();
  const uint64_t limit = device_limit(page, device), used = held(page, device);
  Told told{std::min(total, limit), limit > used ? std::min(free, limit - used) : 0, used};
  const uint64_t spill = spill_limit(page);
  if (__builtin_expect(spill == 0 || !is_counted(device), 1)) return told;
  // Beyond the device there is what may lie on the host, as far as the group may still pin so much.
  const uint64_t pinned = sum(page, Pinned{}), pinnable = pinned_limit(page);
  const uint64_t spilled = sum(page, Spilled{device});
  told.total += spill;
  told.used += spilled;
  if (spilled < spill && pinned < pinnable) told.free += std::min(spill - spilled, pinnable - pinned);
  return told;
}

uint64_t counted_here(int device) {
  group();
  return is_counted(device) ? load(g_slot->counted[device]) : 0;
}

void forget_pools_in_child() {
  std::memset(g_pooled, 0, sizeof g_pooled);
}

}  // namespace gpushare::shim
