// physical.cpp: physical memory that the program maps by itself. It counts from its creation, on the device alone,
// until nothing refers to it any more: no handle and no mapping.
// SPDX-License-Identifier: Apache-2.0
#include "shim/charged.hpp"

namespace gpushare::shim {
namespace {

// A reference to physical memory has gone; with the last, its bytes.
void unrefer(uint64_t handle) {
  Block block;
  if (refer(Kind::handle, handle, -1, &block) == 0 && block.bytes != 0) discharge(block.device, block.bytes);
}

}  // namespace
}  // namespace gpushare::shim

using namespace gpushare::shim;  // NOLINT(google-build-using-namespace): the functions below have C linkage

#define HOOK(name) Result gpushare_hook_##name
extern "C" {

HOOK(cuMemCreate)(P a, L b, P c, L d) {
  const auto call = [&] { return real(kEntry_cuMemCreate, a, b, c, d); };
  if (c == nullptr) return call();
  Current at;
  LocatedProperties properties;
  std::memcpy(&properties, c, 16);
  at.place = place_in(properties);
  return charged<uint64_t>(Kind::handle, at, b, a, call);
}
// How large imported memory is comes out when it is mapped.
HOOK(cuMemImportFromShareableHandle)(P a, P b, I c) {
  const Result result = real(kEntry_cuMemImportFromShareableHandle, a, b, c);
  if (result != kSuccess || a == nullptr) return result;
  uint64_t handle = 0;
  std::memcpy(&handle, a, sizeof handle);
  LocatedProperties properties{};
  Current at;
  if (real(kEntry_cuMemGetAllocationPropertiesFromHandle, &properties, handle) == kSuccess)
    at.place = place_in(properties);
  group();
  Block block;
  if (refer(Kind::handle, handle, 1, &block) < 0) insert(block_of(Kind::handle, handle, 0, at));
  return result;
}
HOOK(cuMemRetainAllocationHandle)(P a, P b) {
  Range range;  // to the program it is plain memory
  if (find_range(reinterpret_cast<uint64_t>(b), &range) && range.handle != 0) return kInvalidValue;
  const Result result = real(kEntry_cuMemRetainAllocationHandle, a, b);
  uint64_t handle = 0;
  Block block;
  if (result == kSuccess && a != nullptr) {
    std::memcpy(&handle, a, sizeof handle);
    refer(Kind::handle, handle, 1, &block);
  }
  return result;
}
HOOK(cuMemRelease)(L a) {
  // The handle is forgotten before the driver may give it to another thread. It is put back if the driver refuses the call.
  Block block;
  const int64_t left = refer(Kind::handle, a, -1, &block);
  const Result result = real(kEntry_cuMemRelease, a);
  if (left < 0) return result;
  if (result == kSuccess) {
    if (left == 0) discharge(block.device, block.bytes);
  } else if (left > 0) {
    refer(Kind::handle, a, 1, &block);
  } else {
    block.references = 1;
    insert(block);
  }
  return result;
}
HOOK(cuMemMap)(L a, L b, L c, L d, L e) {
  Block block;
  // The mapping is a reference to the memory, taken first: another thread may release the handle meanwhile.
  const bool known = refer(Kind::handle, d, 1, &block) > 0;
  const uint64_t size = rounded(b);
  const bool imported = known && block.bytes == 0 && block.device >= 0;
  if (imported && !admit(block.device, size)) {
    unrefer(d);
    return kOutOfMemory;
  }
  const Result result = real(kEntry_cuMemMap, a, b, c, d, e);
  if (imported && (result != kSuccess || !set_bytes(Kind::handle, d, size))) discharge(block.device, size);
  if (known && result != kSuccess) unrefer(d);
  if (known && result == kSuccess) {
    Block mapping = block_of(Kind::mapping, a, b, {});
    mapping.other = d;
    insert(mapping);
  }
  return result;
}
// One call may take several mappings that lie side by side.
HOOK(cuMemUnmap)(L a, L b) {
  const Result result = real(kEntry_cuMemUnmap, a, b);
  if (result != kSuccess) return result;
  for (uint64_t at = a; at - a < b;) {
    Block mapping;
    if (!take(Kind::mapping, at, &mapping) || mapping.bytes == 0) break;
    unrefer(mapping.other);
    at += mapping.bytes;
  }
  return result;
}
}
