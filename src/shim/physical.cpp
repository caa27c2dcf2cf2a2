// physical.cpp: physical memory that the program maps by itself. It counts from its creation until nothing refers to it
// any more: no handle and no mapping. That of the host counts as pinned memory.
// SPDX-License-Identifier: Apache-2.0
#include "shim/charged.hpp"

namespace gpushare::shim {
namespace {

// A reference to physical memory has gone; with the last, its bytes.
void unrefer(uint64_t handle) {
  Block block;
  if (refer(Kind::handle, handle, -1, &block) == 0 && block.bytes != 0) discharge(block.device, block.bytes);
}

// Imported memory says nothing of its size. What its mappings reach is what is known of it, and counts. False: that is
// above the limit.
bool count_extent(uint64_t handle, const Block& block, uint64_t extent) {
  if (extent <= block.bytes) return true;
  if (!admit(block.device, extent - block.bytes)) return false;
  const int64_t before = raise_bytes(Kind::handle, handle, extent);
  // Another thread has counted a part of it meanwhile, or all.
  const uint64_t had = before < 0 ? extent : static_cast<uint64_t>(before);
  const uint64_t owed = had < extent ? extent - had : 0;
  if (owed < extent - block.bytes) discharge(block.device, extent - block.bytes - owed);
  return true;
}

}  // namespace

int place_elsewhere(const LocatedProperties& properties) {
  // Types of a location. 0 is none and 5 is one that nobody sees; a part of a device is 6.
  constexpr int32_t kHost = 2, kHostNode = 3, kHostNodeOfThread = 4, kPartOfDevice = 6;
  constexpr int32_t kDeviceOfPart = 0xff;  // the ordinal's bits beside the number of the part
  constexpr int32_t kManaged = 2;
  const int32_t type = properties.location_type;
  if (type == kPartOfDevice) return place_of(properties.location_id & kDeviceOfPart);
  // Managed memory that prefers the host may come to the device at any time.
  if (properties.type != kManaged && (type == kHost || type == kHostNode || type == kHostNodeOfThread))
    return kOfHost;
  const int here = current().place;
  return here != -1 ? here : place_of(0);
}

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
// Imported memory counts when it is mapped: count_extent().
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
  return unreferred(Kind::handle, a, [&] { return real(kEntry_cuMemRelease, a); });
}
HOOK(cuMemMap)(L a, L b, L c, L d, L e) {
  Block block;
  // The mapping is a reference to the memory, taken first: another thread may release the handle meanwhile.
  const bool known = refer(Kind::handle, d, 1, &block) > 0;
  if (known && !count_extent(d, block, b > UINT64_MAX - c ? UINT64_MAX : rounded(b + c))) {
    unrefer(d);
    return kOutOfMemory;
  }
  const Result result = real(kEntry_cuMemMap, a, b, c, d, e);
  if (known && result != kSuccess) unrefer(d);
  if (known && result == kSuccess) {
    Block mapping = block_of(Kind::mapping, a, b, {});
    mapping.other = d;
    insert(mapping);
  }
  return result;
}
// A single call may take several mappings that lie side by side.
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
