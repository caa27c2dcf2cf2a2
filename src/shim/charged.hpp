// charged.hpp: what every way of getting memory has in common: a charge before the driver is asked, where the size is
// known then, and the books behind it. Above the limit each answers with the driver's own out-of-memory code and does
// nothing.
//
// Bytes are counted as the program asks for them, rounded up to 512. Memory that the driver keeps beyond that
// (fragments) is part of the measured overhead (context.cpp). Managed memory counts in full wherever its pages are.
// Memory imported from another process counts in both.
//
// Threads: any. The driver is called with no lock held.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>

#include "shim/books.hpp"
#include "shim/device.hpp"
#include "shim/gate.hpp"
#include "shim/move.hpp"
#include "shim/ranges.hpp"
#include "shim/small_heap.hpp"
#include "shim/spill.hpp"
#include "shim/table.hpp"

namespace gpushare::shim {

// a * b, or UINT64_MAX: more than any limit, and the driver refuses it too.
inline uint64_t product(uint64_t a, uint64_t b) {
  uint64_t result = 0;
  return __builtin_mul_overflow(a, b, &result) ? UINT64_MAX : result;
}
// Bytes are counted in steps of 512.
inline uint64_t rounded(uint64_t bytes) {
  constexpr uint64_t kRounding = 512;
  return bytes > UINT64_MAX - kRounding ? bytes : (bytes + kRounding - 1) / kRounding * kRounding;
}
inline Block block_of(Kind kind, uint64_t key, uint64_t bytes, const Current& at) {
  Block block{};
  block.kind = kind;
  block.key = key;
  block.bytes = bytes;
  block.context = at.context;
  block.references = 1;
  block.device = static_cast<int8_t>(at.place);
  return block;
}

// As charge(), but memory that pools keep after a free may be taken for it (pools.cpp). Calls the driver only where
// that decides, and not while a stream is being captured.
bool admit_near_limit(int place, uint64_t bytes, bool pooled, bool fits);
inline bool admit(int place, uint64_t bytes, bool pooled = false) {
  const bool fits = charge(place, bytes);
  return __builtin_expect(fits && !has_pools(place), 1) || admit_near_limit(place, bytes, pooled, fits);
}

// Charges, asks the driver by `call`, and notes the block whose key is then in `*out_key`.
template <class Key, class Call>
Result charged(Kind kind, const Current& at, uint64_t bytes, const void* out_key, Call call,
               bool pooled = false) {
  if (at.place == -1 || out_key == nullptr) return call();
  bytes = rounded(bytes);
  if (!admit(at.place, bytes, pooled)) return kOutOfMemory;
  const Result result = call();
  if (result != kSuccess) {
    discharge(at.place, bytes);
    return result;
  }
  Key key;
  std::memcpy(&key, out_key, sizeof key);
  Block block = block_of(kind, static_cast<uint64_t>(key), bytes, at);
  block.pooled = pooled;
  if (pooled) add_pooled(at.place, bytes);
  insert(block);
  return result;
}

// Frees: the block goes from the books first, since the driver may give its address to another thread at once.
template <class Call>
Result freed(Kind kind, uint64_t key, Call call) {
  Block block;
  const bool known = take(kind, key, &block);
  const Result result = call();
  if (!known) return result;
  if (result != kSuccess) {
    insert(block);
    return result;
  }
  discharge(block);
  return result;
}

// The end of one reference to what several may refer to, likewise: the last one takes the bytes with it.
template <class Call>
Result unreferred(Kind kind, uint64_t key, Call call) {
  Block block;
  const int64_t left = refer(kind, key, -1, &block);
  const Result result = call();
  if (left < 0) return result;
  if (result == kSuccess) {
    if (left == 0) discharge(block.device, block.bytes);
  } else if (left > 0) {
    refer(kind, key, 1, &block);
  } else {
    block.references = 1;
    insert(block);
  }
  return result;
}

// Memory that is freed by its address: a block of the heap or of the device, one that lies on the host instead, or
// another process's.
template <class Call>
Result freed_memory(uint64_t address, Call call, const Ordered& ordered = {}) {
  Range range;
  Block block;
  Result result = kSuccess;
  int place = -1;
  if (free_small(address, ordered, &result)) return result;
  if (take_range(address, &range)) {
    place = range.place;
    result = free_range(range);
  } else {
    if (!take(Kind::memory, address, &block) && !take(Kind::opened, address, &block)) return call();
    place = block.device;
    result = call();
    if (result == kSuccess)
      discharge(block);
    else
      insert(block);
  }
  if (moves()) bring_home_alone(place);
  return result;
}

// Memory that is opened may be opened again under the same address, and goes with the last close.
template <class Call>
Result opened(Result result, const void* out_address, Call close) {
  if (result != kSuccess || out_address == nullptr) return result;
  uint64_t address = 0, base = 0, bytes = 0;
  std::memcpy(&address, out_address, sizeof address);
  Block block;
  if (refer(Kind::opened, address, 1, &block) > 0) return result;
  // The memory may be another device's than that of the thread.
  constexpr uint32_t kDeviceOrdinal = 9;  // attribute
  Current at = current();
  int ordinal = -1;
  if (real(kEntry_cuPointerGetAttribute, &ordinal, kDeviceOrdinal, address) == kSuccess && ordinal >= 0)
    at.place = place_of(ordinal);
  if (at.place < 0 || real(kEntry_cuMemGetAddressRange_v2, &base, &bytes, address) != kSuccess) return result;
  bytes = rounded(bytes);
  if (!admit(at.place, bytes)) {
    close(address);
    return kOutOfMemory;
  }
  insert(block_of(Kind::opened, address, bytes, at));
  return result;
}

// The place of memory in the driver's structures. They all begin with type and handle types.
struct LocatedProperties {
  int32_t type, handle_types;
  int32_t location_type, location_id;
  uint64_t rest[14];
};
// The place where such memory counts. Memory that is not known to lie on the host counts on a device: the named one, or
// else the calling thread's.
int place_elsewhere(const LocatedProperties& properties);
inline int place_in(const LocatedProperties& properties) {
  constexpr int32_t kDevice = 1;
  return __builtin_expect(properties.location_type == kDevice, 1) ? place_of(properties.location_id)
                                                                  : place_elsewhere(properties);
}

}  // namespace gpushare::shim
