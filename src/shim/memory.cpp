// memory.cpp: plain, pitched and managed memory, memory of other processes that is opened here, and what the program is
// told of a device's memory.
// SPDX-License-Identifier: Apache-2.0
#include "shim/charged.hpp"

namespace gpushare::shim {
namespace {

template <class Word>
Result pitched(int entry, P out_address, P out_pitch, Word width, Word height, I element) {
  const Current at = current();
  const auto call = [&] { return real(entry, out_address, out_pitch, width, height, element); };
  if (at.place < 0 || out_address == nullptr || out_pitch == nullptr) return call();
  uint64_t bytes = rounded(product(rounded(width), height));
  if (!admit(at.place, bytes)) return kOutOfMemory;
  const Result result = call();
  if (result != kSuccess) {
    discharge(at.place, bytes);
    return result;
  }
  Word address, pitch;
  std::memcpy(&address, out_address, sizeof address);
  std::memcpy(&pitch, out_pitch, sizeof pitch);
  const uint64_t actual = rounded(product(pitch, height));
  if (actual > bytes && !charge(at.place, actual - bytes)) {
    if (sizeof(Word) == 8)
      real(kEntry_cuMemFree_v2, static_cast<uint64_t>(address));
    else
      real(kEntry_cuMemFree, static_cast<uint32_t>(address));
    discharge(at.place, bytes);
    return kOutOfMemory;
  }
  if (actual < bytes) discharge(at.place, bytes - actual);
  insert(block_of(Kind::memory, address, actual, at));
  return result;
}

template <class Word>
Result memory_info(int entry, P out_free, P out_total) {
  const Result result = real(entry, out_free, out_total);
  if (result != kSuccess || !limited()) return result;
  int place = only_place();
  if (place < 0) place = current().place;
  if (place < 0) return result;
  auto *total = static_cast<Word*>(out_total), *free = static_cast<Word*>(out_free);
  const Told told = tell(place, total != nullptr ? *total : 0, free != nullptr ? *free : 0);
  if (total != nullptr) *total = static_cast<Word>(told.total);
  if (free != nullptr) *free = static_cast<Word>(told.free);
  return result;
}

template <class Word>
Result total_memory(int entry, P out_bytes, I ordinal) {
  const Result result = real(entry, out_bytes, ordinal);
  auto* bytes = static_cast<Word*>(out_bytes);
  if (result == kSuccess && bytes != nullptr && limited())
    *bytes = static_cast<Word>(tell(place_of(static_cast<int>(ordinal)), *bytes, 0).total);
  return result;
}

}  // namespace

Result allocate_large(const Current& at, uint64_t bytes, void* out_address, bool may_spill) {
  Result result = kSuccess;
  if (may_move(bytes) && allocate_movable(at, bytes, out_address, &result)) return result;
  const auto get = [&] {
    return charged<uint64_t>(Kind::memory, at, bytes, out_address,
                             [&] { return real(kEntry_cuMemAlloc_v2, out_address, bytes); });
  };
  result = get();
  if (__builtin_expect(result != kOutOfMemory, 1)) return result;
  if (give_back_small(at.place)) result = get();
  return result != kOutOfMemory || !may_spill ? result : spill(at, bytes, out_address);
}

Result free_large(uint64_t address) {
  return freed_memory(address, [&] { return real(kEntry_cuMemFree_v2, address); });
}

}  // namespace gpushare::shim

using namespace gpushare::shim;  // NOLINT(google-build-using-namespace): the functions below have C linkage

#define HOOK(name) Result gpushare_hook_##name
extern "C" {

HOOK(cuMemAlloc_v2)(P a, L b) {
  const Current at = current();
  if (is_small(b) && allocate_small(at, b, a)) return kSuccess;
  return allocate_large(at, b, a, true);
}
HOOK(cuMemAlloc)(P a, I b) {
  return charged<uint32_t>(Kind::memory, current(), b, a, [&] { return real(kEntry_cuMemAlloc, a, b); });
}
HOOK(cuMemAllocManaged)(P a, L b, I c) {
  return charged<uint64_t>(Kind::memory, current(), b, a,
                           [&] { return real(kEntry_cuMemAllocManaged, a, b, c); });
}
HOOK(cuMemAllocPitch_v2)(P a, P b, L c, L d, I e) {
  const uint64_t pitch = rounded(c), bytes = product(pitch, d);
  Result result = kSuccess;
  const auto pitched_so = [&](Result got) {
    if (got == kSuccess) std::memcpy(b, &pitch, sizeof pitch);
    return got;
  };
  if (b != nullptr && may_move(bytes) && allocate_movable(current(), bytes, a, &result))
    return pitched_so(result);
  result = pitched<uint64_t>(kEntry_cuMemAllocPitch_v2, a, b, c, d, e);
  if (result != kOutOfMemory || a == nullptr || b == nullptr) return result;
  return pitched_so(spill(current(), bytes, a));
}
HOOK(cuMemAllocPitch)(P a, P b, I c, I d, I e) {
  return pitched<uint32_t>(kEntry_cuMemAllocPitch, a, b, c, d, e);
}
HOOK(cuMemFree_v2)(L a) {
  return freed_memory(a, [&] { return real(kEntry_cuMemFree_v2, a); });
}
HOOK(cuMemFree)(I a) {
  return freed_memory(a, [&] { return real(kEntry_cuMemFree, a); });
}

HOOK(cuImportExternalMemory)(P a, P b) {
  const auto call = [&] { return real(kEntry_cuImportExternalMemory, a, b); };
  if (b == nullptr) return call();
  uint64_t bytes = 0;
  std::memcpy(&bytes, static_cast<const char*>(b) + 24, sizeof bytes);
  return charged<uint64_t>(Kind::external, current(), bytes, a, call);
}
HOOK(cuDestroyExternalMemory)(P a) {
  return freed(Kind::external, reinterpret_cast<uint64_t>(a),
               [&] { return real(kEntry_cuDestroyExternalMemory, a); });
}
HOOK(cuIpcOpenMemHandle)(P a, B64 b, I c) {
  return opened(real(kEntry_cuIpcOpenMemHandle, a, b, c), a,
                [](uint64_t address) { real(kEntry_cuIpcCloseMemHandle, address); });
}
HOOK(cuIpcOpenMemHandle_v2)(P a, B64 b, I c) {
  return opened(real(kEntry_cuIpcOpenMemHandle_v2, a, b, c), a,
                [](uint64_t address) { real(kEntry_cuIpcCloseMemHandle, address); });
}
HOOK(cuIpcCloseMemHandle)(L a) {
  return unreferred(Kind::opened, a, [&] { return real(kEntry_cuIpcCloseMemHandle, a); });
}

HOOK(cuMemGetInfo_v2)(P a, P b) {
  return memory_info<uint64_t>(kEntry_cuMemGetInfo_v2, a, b);
}
HOOK(cuMemGetInfo)(P a, P b) {
  return memory_info<uint32_t>(kEntry_cuMemGetInfo, a, b);
}
HOOK(cuDeviceTotalMem_v2)(P a, I b) {
  return total_memory<uint64_t>(kEntry_cuDeviceTotalMem_v2, a, b);
}
HOOK(cuDeviceTotalMem)(P a, I b) {
  return total_memory<uint32_t>(kEntry_cuDeviceTotalMem, a, b);
}
}
