// With unified addressing the device reaches pinned host memory under the host's own address, so a block that lies on
// the host is to the program a device pointer as any other, only slower.
// SPDX-License-Identifier: Apache-2.0
#include "shim/spill.hpp"

#include <cstring>

#include "shim/charged.hpp"

namespace gpushare::shim {
namespace {

constexpr uint32_t kPortable = 1, kDeviceMap = 2;  // of cuMemHostAlloc

// Pins `bytes` by `call`, which writes the address to `*out_address`, or pins what is there already.
template <class Call>
Result pinned(uint64_t bytes, const void* out_address, Call call) {
  if (out_address == nullptr) return call();
  Current at = current();
  at.place = -1;
  bytes = rounded(bytes);
  if (!charge_host(-1, bytes)) return kOutOfMemory;
  const Result result = call();
  if (result != kSuccess) {
    discharge_host(-1, bytes);
    return result;
  }
  uint64_t address = 0;
  std::memcpy(&address, out_address, sizeof address);
  insert(block_of(Kind::host, address, bytes, at));
  return result;
}
template <class Call>
Result unpinned(P address, Call call) {
  Block block;
  const bool known = take(Kind::host, reinterpret_cast<uint64_t>(address), &block);
  const Result result = call();
  if (!known) return result;
  if (result == kSuccess)
    discharge(block);
  else
    insert(block);
  return result;
}

}  // namespace

Result spill(const Current& at, uint64_t bytes, void* out_address) {
  const uint64_t size = rounded(bytes);
  if (!is_counted(at.place) || out_address == nullptr || bytes == 0 || !charge_host(at.place, size))
    return kOutOfMemory;
  void* host = nullptr;
  uint64_t address = 0;
  Result result = real(kEntry_cuMemHostAlloc, &host, bytes, kPortable | kDeviceMap);
  if (result == kSuccess) {
    // Only where the device sees it under the same address does the free find it again.
    if (real(kEntry_cuMemHostGetDevicePointer_v2, &address, host, 0U) != kSuccess ||
        address != reinterpret_cast<uint64_t>(host) ||
        !add_range({address, bytes, size, at.context, 0, at.place, Lies::pinned, false})) {
      real(kEntry_cuMemFreeHost, host);
      result = kOutOfMemory;
    }
  }
  if (result != kSuccess) {
    discharge_host(at.place, size);
    return result;
  }
  std::memcpy(out_address, &address, sizeof address);
  return kSuccess;
}

Result free_range(const Range& range) {
  if (range.handle != 0) return free_movable(range);
  const Result result = real(kEntry_cuMemFreeHost, reinterpret_cast<void*>(range.begin));
  if (result == kSuccess)
    discharge_range(range);
  else
    add_range(range);
  return result;
}

void discharge_range(const Range& range) {
  if (range.lies == Lies::device || range.lies == Lies::away) discharge(range.place, range.size);
  if (range.lies == Lies::away) discharge_host(-1, range.size);
  if (range.lies == Lies::pinned || range.lies == Lies::spilled) discharge_host(range.place, range.size);
}

void forget_ranges(uint64_t context) {
  Range range;
  while (context != 0 && take_range_of(context, &range)) {
    if (range.handle != 0) unmap_movable(range);  // as far as the driver knows, it is not the context's
    discharge_range(range);
  }
}

}  // namespace gpushare::shim

using namespace gpushare::shim;  // NOLINT(google-build-using-namespace): the functions below have C linkage

#define HOOK(name) Result gpushare_hook_##name
extern "C" {

HOOK(cuMemHostAlloc)(P a, L b, I c) {
  return pinned(b, a, [&] { return real(kEntry_cuMemHostAlloc, a, b, c); });
}
HOOK(cuMemAllocHost_v2)(P a, L b) {
  return pinned(b, a, [&] { return real(kEntry_cuMemAllocHost_v2, a, b); });
}
HOOK(cuMemAllocHost)(P a, I b) {
  return pinned(b, a, [&] { return real(kEntry_cuMemAllocHost, a, b); });
}
HOOK(cuMemHostRegister_v2)(P a, L b, I c) {
  return pinned(b, &a, [&] { return real(kEntry_cuMemHostRegister_v2, a, b, c); });
}
HOOK(cuMemHostRegister)(P a, L b, I c) {
  return pinned(b, &a, [&] { return real(kEntry_cuMemHostRegister, a, b, c); });
}
HOOK(cuMemFreeHost)(P a) {
  return unpinned(a, [&] { return real(kEntry_cuMemFreeHost, a); });
}
HOOK(cuMemHostUnregister)(P a) {
  return unpinned(a, [&] { return real(kEntry_cuMemHostUnregister, a); });
}
}
