// pointers.cpp: what a program is told about a pointer. Blocks that lie on the host or in a chunk of the heap
// (small_heap.hpp) are to it plain memory of the device.
// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "shim/driver.hpp"
#include "shim/ranges.hpp"
#include "shim/small_heap.hpp"
#include "shim/table.hpp"

namespace gpushare::shim {
namespace {

// Attributes of pointers.
constexpr uint32_t kMemoryType = 2, kHostPointer = 4, kCanIpc = 10, kRangeBegin = 11, kRangeBytes = 12;
constexpr uint32_t kTypeDevice = 2;

// The program's block at an address, where it differs from the driver's.
struct Seen {
  bool is, small;
  uint64_t begin, bytes;  // begin 0: in a chunk, but in no block of the program
};
Seen see(uint64_t address) {
  Seen seen{};
  seen.is = seen.small = find_small(address, &seen.begin, &seen.bytes);
  Range range;
  if (seen.is || !find_range(address, &range)) return seen;
  return {true, false, range.begin, range.bytes};
}

template <class Word>
Result address_range(int entry, P out_base, P out_bytes, Word address) {
  const Seen seen = see(address);
  if (!seen.is) return real(entry, out_base, out_bytes, address);
  if (seen.begin == 0) return kNotFound;
  const auto base = static_cast<Word>(seen.begin), bytes = static_cast<Word>(seen.bytes);
  if (out_base != nullptr) std::memcpy(out_base, &base, sizeof base);
  if (out_bytes != nullptr) std::memcpy(out_bytes, &bytes, sizeof bytes);
  return kSuccess;
}

// Puts right what the driver has answered.
void correct(const Seen& seen, uint32_t attribute, void* value) {
  if (attribute == kMemoryType) std::memcpy(value, &kTypeDevice, sizeof kTypeDevice);
  if (attribute == kRangeBegin) std::memcpy(value, &seen.begin, sizeof seen.begin);
  if (attribute == kRangeBytes) std::memcpy(value, &seen.bytes, sizeof seen.bytes);
  if (attribute == kCanIpc) std::memset(value, 0, 1);
}

}  // namespace
}  // namespace gpushare::shim

using namespace gpushare::shim;  // NOLINT(google-build-using-namespace): the functions below have C linkage

#define HOOK(name) Result gpushare_hook_##name
extern "C" {

HOOK(cuMemGetAddressRange_v2)(P a, P b, L c) {
  return address_range<uint64_t>(kEntry_cuMemGetAddressRange_v2, a, b, c);
}
HOOK(cuMemGetAddressRange)(P a, P b, I c) {
  return address_range<uint32_t>(kEntry_cuMemGetAddressRange, a, b, c);
}
HOOK(cuPointerGetAttribute)(P out_value, I attribute, L address) {
  const Result result = real(kEntry_cuPointerGetAttribute, out_value, attribute, address);
  const Seen seen = see(address);
  if (__builtin_expect(out_value == nullptr || !seen.is, 1)) return result;
  if (seen.begin == 0 || attribute == kHostPointer) return kInvalidValue;  // as for memory of the device
  if (result == kSuccess) correct(seen, attribute, out_value);
  return result;
}
HOOK(cuPointerGetAttributes)(I count, P attributes, P out_values, L address) {
  const Result result = real(kEntry_cuPointerGetAttributes, count, attributes, out_values, address);
  const Seen seen = see(address);
  if (__builtin_expect(result != kSuccess || !seen.is, 1)) return result;
  for (I i = 0; i < count; ++i) {
    uint32_t attribute = 0;
    void* value = nullptr;
    std::memcpy(&attribute, static_cast<uint32_t*>(attributes) + i, sizeof attribute);
    std::memcpy(&value, static_cast<void**>(out_values) + i, sizeof value);
    if (value == nullptr) continue;
    if (seen.begin != 0) correct(seen, attribute, value);
    // An address in no block of the program has no memory type.
    if (seen.begin == 0 && attribute == kMemoryType) std::memset(value, 0, sizeof kTypeDevice);
    if (attribute == kHostPointer) std::memset(value, 0, sizeof(void*));
  }
  return result;
}
// The handle would be that of the whole chunk: the other process would get another address and see blocks that are not
// meant for it.
HOOK(cuIpcGetMemHandle)(P a, L b) {
  if (const Seen seen = see(b); !seen.small) return real(kEntry_cuIpcGetMemHandle, a, b);
  static bool told = false;
  if (!__atomic_exchange_n(&told, true, __ATOMIC_RELAXED))
    log_line(
        "a block of the small heap cannot be shared with other processes: run the program without "
        "--small-heap (GPUSHARE_SMALL_HEAP)");
  return kNotSupported;
}
}
