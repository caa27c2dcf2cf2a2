// SPDX-License-Identifier: Apache-2.0
#include "shim/ranges.hpp"

#include <sys/mman.h>
#include <time.h>

#include <cstring>

#include "shim/books.hpp"
#include "shim/words.hpp"

namespace gpushare::shim {

uint64_t g_ranges_now = 0;

namespace {

// Sorted by address.
Range* g_ranges = nullptr;
uint64_t g_capacity = 0;
uint64_t g_bytes[kDevices][4];
uint32_t g_lock;

// The number of ranges that begin at or before the address.
uint64_t position(uint64_t address) {
  uint64_t low = 0, high = g_ranges_now;
  while (low < high) {
    const uint64_t middle = low + (high - low) / 2;
    if (g_ranges[middle].begin <= address)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

void count(const Range& range, bool more) {
  if (!is_counted(range.place)) return;
  uint64_t& bytes = g_bytes[range.place][static_cast<int>(range.lies)];
  store(bytes, more ? bytes + range.size : bytes - range.size);
}

Range remove(uint64_t at) {
  const Range range = g_ranges[at];
  count(range, false);
  std::memmove(g_ranges + at, g_ranges + at + 1, (g_ranges_now - at - 1) * sizeof(Range));
  store(g_ranges_now, g_ranges_now - 1);
  return range;
}

void pause_for_mover() {
  const timespec time{0, 100'000};
  nanosleep(&time, nullptr);
}

}  // namespace

bool add_range(const Range& range) {
  const Locked lock(g_lock);
  if (g_ranges_now == g_capacity) {
    const uint64_t capacity = g_capacity == 0 ? 128 : g_capacity * 2;
    void* memory =
        mmap(nullptr, capacity * sizeof(Range), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return false;
    if (g_ranges != nullptr) {
      std::memcpy(memory, g_ranges, g_ranges_now * sizeof(Range));
      munmap(g_ranges, g_capacity * sizeof(Range));
    }
    g_ranges = static_cast<Range*>(memory);
    g_capacity = capacity;
  }
  const uint64_t at = position(range.begin);
  std::memmove(g_ranges + at + 1, g_ranges + at, (g_ranges_now - at) * sizeof(Range));
  g_ranges[at] = range;
  count(range, true);
  store(g_ranges_now, g_ranges_now + 1);
  return true;
}

bool find_range(uint64_t address, Range* out_range) {
  if (!has_ranges()) return false;
  const Locked lock(g_lock);
  const uint64_t at = position(address);
  if (at == 0 || address - g_ranges[at - 1].begin >= g_ranges[at - 1].bytes) return false;
  *out_range = g_ranges[at - 1];
  return true;
}

bool take_known_range(uint64_t begin, Range* out_range) {
  for (;; pause_for_mover()) {
    const Locked lock(g_lock);
    const uint64_t at = position(begin) - 1;  // UINT64_MAX: before the first
    if (at >= g_ranges_now || g_ranges[at].begin != begin) return false;
    if (g_ranges[at].held) continue;
    *out_range = remove(at);
    return true;
  }
}

bool take_range_of(uint64_t context, Range* out_range) {
  if (!has_ranges()) return false;
  for (;; pause_for_mover()) {
    const Locked lock(g_lock);
    bool held = false;
    for (uint64_t at = 0; at < g_ranges_now; ++at) {
      if (g_ranges[at].context != context) continue;
      held = g_ranges[at].held;
      if (held) continue;
      *out_range = remove(at);
      return true;
    }
    if (!held) return false;
  }
}

namespace {
uint64_t g_holds, g_ended_holds;  // under the lock

void hold(Range& range) {
  range.held = true;
  store(g_holds, g_holds + 1);
}
}  // namespace

uint64_t ended_holds() {
  const Locked lock(g_lock);
  return g_holds == g_ended_holds ? g_ended_holds : kHeld;
}

bool hold_range(int place, uint64_t from, Lies lies, Range* out_range) {
  if (!has_ranges()) return false;
  const Locked lock(g_lock);
  for (uint64_t at = from == 0 ? 0 : position(from - 1); at < g_ranges_now; ++at) {
    Range& range = g_ranges[at];
    if (range.place != place || range.lies != lies || range.held) continue;
    hold(range);
    *out_range = range;
    return true;
  }
  return false;
}

bool wait_range(int place, uint64_t from, Range* out_range) {
  if (!has_ranges()) return false;
  for (;; pause_for_mover()) {
    const Locked lock(g_lock);
    uint64_t at = from == 0 ? 0 : position(from - 1);
    while (at < g_ranges_now && g_ranges[at].place != place) ++at;
    if (at == g_ranges_now) return false;
    if (g_ranges[at].held) continue;
    hold(g_ranges[at]);
    *out_range = g_ranges[at];
    return true;
  }
}

void release_range(const Range& range) {
  const Locked lock(g_lock);
  Range& there = g_ranges[position(range.begin) - 1];
  count(there, false);
  there = range;
  there.held = false;
  store(g_ended_holds, g_ended_holds + 1);
  count(there, true);
}

uint64_t range_bytes(int place, Lies lies) {
  return is_counted(place) ? load(g_bytes[place][static_cast<int>(lies)]) : 0;
}

uint64_t least_range(int place, Lies lies) {
  uint64_t least = UINT64_MAX;
  const Locked lock(g_lock);
  for (uint64_t at = 0; at < g_ranges_now; ++at) {
    const Range& range = g_ranges[at];
    if (range.place == place && range.lies == lies && range.size < least) least = range.size;
  }
  return least;
}

void forget_ranges_in_child() {
  store(g_lock, 0);
  store(g_ranges_now, 0);
  store(g_holds, 0);
  store(g_ended_holds, 0);
  std::memset(g_bytes, 0, sizeof g_bytes);
}

}  // namespace gpushare::shim
