// memory.cpp: every way of getting device memory, charged before the driver is asked where the size is known then, and given back when the
// driver has freed it. Above the limit each answers with the driver's own out-of-memory code and does nothing.
//
// Bytes are counted as the program asks for them, rounded up to 512. What the driver keeps beyond that (fragments) is part of the measured
// overhead (context.cpp). Pools that hold on to freed memory are asked, and trimmed, where a charge comes near the limit. Managed memory counts
// in full wherever its pages are. Memory imported from another process counts in both.
// SPDX-License-Identifier: Apache-2.0
#include <sched.h>

#include <cstdlib>
#include <cstring>

#include "shim/books.hpp"
#include "shim/device.hpp"
#include "shim/gate.hpp"
#include "shim/move.hpp"
#include "shim/spill.hpp"
#include "shim/table.hpp"

namespace gpushare::shim {
namespace {

// a * b, or UINT64_MAX: more than any limit, and the driver refuses it too.
uint64_t product(uint64_t a, uint64_t b) {
  uint64_t result = 0;
  return __builtin_mul_overflow(a, b, &result) ? UINT64_MAX : result;
}

// ---- pools --------------------------------------------------------------------------------------------------------------------------

constexpr uint32_t kPoolReserved = 5, kPoolUsed = 7;  // attributes
uint32_t g_trimming;  // threads that call the driver with pools; none is destroyed meanwhile

// Trims the pools of the device, and notes what they still keep. `wait`: memory whose free has not happened yet on its stream is waited for.
__attribute__((noinline)) void trim_pools(int place, bool wait) {
  const int ordinal = ordinal_of(place);
  if (ordinal < 0) return;
  constexpr int kRoom = 64;
  uint64_t kept = 0;
  for (int attempt = 0; attempt < (wait ? 2 : 1); ++attempt) {
    if (attempt == 1 && real(kEntry_cuCtxSynchronize) != kSuccess) break;
    uint64_t pools[kRoom] = {};
    __atomic_add_fetch(&g_trimming, 1U, __ATOMIC_SEQ_CST);
    int count = pools_of(place, &pools[0], kRoom - 1);
    if (real(kEntry_cuDeviceGetDefaultMemPool, &pools[count], ordinal) == kSuccess && pools[count] != 0)
      ++count;
    kept = 0;
    for (int i = 0; i < count; ++i) {
      const auto pool = reinterpret_cast<P>(pools[i]);
      uint64_t reserved = 0, used = 0;
      real(kEntry_cuMemPoolTrimTo, pool, L{0});
      if (real(kEntry_cuMemPoolGetAttribute, pool, kPoolReserved, &reserved) == kSuccess &&
          real(kEntry_cuMemPoolGetAttribute, pool, kPoolUsed, &used) == kSuccess && reserved > used)
        kept += reserved - used;
    }
    __atomic_sub_fetch(&g_trimming, 1U, __ATOMIC_SEQ_CST);
    if (kept == 0) break;
  }
  note_kept(place, kept);
  uint64_t overhead = 0;
  measure_overhead(ordinal, &overhead, kept);  // may have had what was trimmed
}

// What the pools keep fits too. Memory of a pool comes out of that first.
bool leaves_room(int place, uint64_t bytes, bool pooled) {
  uint64_t kept = kept_by_pools(place);
  if (pooled) kept -= kept < bytes ? kept : bytes;
  if (__builtin_expect(kept == 0, 1)) return true;
  const uint64_t limit = limit_bytes(), held = held_bytes(place);
  return held <= limit && kept <= limit - held;
}

}  // namespace

// charge(), with regard to what pools keep of freed memory. Calls the driver only where that decides, and not while a stream is being captured.
bool admit(int place, uint64_t bytes, bool pooled) {
  const bool fits = charge(place, bytes);
  if (__builtin_expect(!has_pools(place), 1)) return fits;
  if (fits && leaves_room(place, bytes, pooled)) return true;
  if (__atomic_load_n(&turn().capturing, __ATOMIC_ACQUIRE) != 0) return fits;
  if (fits) discharge(place, bytes);
  trim_pools(place, !pooled);
  if (!charge(place, bytes)) return false;
  if (leaves_room(place, bytes, pooled)) return true;
  discharge(place, bytes);
  return false;
}

namespace {

// ---- blocks -------------------------------------------------------------------------------------------------------------------------

// Charges, asks the driver by `call`, and notes the block whose key is then in `*out_key`.
template <class Key, class Call>
Result charged(Kind kind, const Current& at, uint64_t bytes, const void* out_key, Call call,
               bool pooled = false) {
  if (at.place < 0 || out_key == nullptr) return call();
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

// Memory that is freed by its address: a block of the device, one that lies on the host instead, or another process's.
template <class Call>
Result freed_memory(uint64_t address, Call call) {
  Range range;
  Block block;
  Result result = kSuccess;
  if (take_range(address, &range)) {
    result = free_range(range);
  } else {
    if (!take(Kind::memory, address, &block) && !take(Kind::opened, address, &block)) return call();
    result = call();
    if (result == kSuccess)
      discharge(block);
    else
      insert(block);
  }
  if (moves()) bring_home_alone();
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
  const Current at = current();
  if (at.place < 0 || real(kEntry_cuMemGetAddressRange_v2, &base, &bytes, address) != kSuccess) return result;
  bytes = rounded(bytes);
  if (!admit(at.place, bytes)) {
    close(address);
    return kOutOfMemory;
  }
  insert(block_of(Kind::opened, address, bytes, at));
  return result;
}

// ---- pitched memory -----------------------------------------------------------------------------------------------------------------

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

// ---- arrays -------------------------------------------------------------------------------------------------------------------------

// Bits of an element, all channels; formats above 0x20 name their channels themselves.
uint64_t element_bits(uint32_t format, uint32_t channels) {
  switch (format) {
    case 0x01:
    case 0x08:
      return 8 * channels;  // 8-bit integers
    case 0x02:
    case 0x09:
    case 0x10:
      return 16 * channels;  // 16-bit integers, half
    case 0x03:
    case 0x0a:
    case 0x20:
      return 32 * channels;  // 32-bit integers, float
    case 0xc0:
    case 0xc6:
      return 8;  // normalised 8-bit, 1 channel
    case 0xc1:
    case 0xc7:
    case 0xc3:
    case 0xc9:
      return 16;  // 8-bit 2, 16-bit 1
    case 0xc2:
    case 0xc8:
    case 0xc4:
    case 0xca:
      return 32;  // 8-bit 4, 16-bit 2
    case 0xc5:
    case 0xcb:
      return 64;  // 16-bit 4
    case 0x91:
    case 0x92:
    case 0x97:
    case 0x98:
      return 4;  // BC1, BC4: 8 bytes for 16 texels
    case 0x93:
    case 0x94:
    case 0x95:
    case 0x96:
    case 0x99:
    case 0x9a:  // BC2, BC3, BC5 to BC7: 16 bytes
    case 0x9b:
    case 0x9c:
    case 0x9d:
    case 0x9e:
      return 8;
    case 0xb0:
    case 0xb2:
      return 24;  // planar 8-bit video
    default:
      return 32 * (channels == 0 ? 1 : channels);
  }
}

template <class Word>
struct ArrayShape {
  Word width, height;
  uint32_t format, channels;
};
template <class Word>
struct ArrayShape3 {
  Word width, height, depth;
  uint32_t format, channels, flags;
};
constexpr uint32_t kSparse = 0x40, kDeferredMapping = 0x80;

uint64_t array_bytes(uint64_t width, uint64_t height, uint64_t depth, uint64_t bits) {
  const uint64_t texels = product(product(width, height == 0 ? 1 : height), depth == 0 ? 1 : depth);
  const uint64_t all = product(texels, bits);
  return all == UINT64_MAX ? all : (all + 7) / 8;
}
template <class Word>
uint64_t array_bytes(const ArrayShape<Word>* shape) {
  return array_bytes(shape->width, shape->height, 1, element_bits(shape->format, shape->channels));
}
// Memory of sparse arrays and those mapped later is mapped by other calls, and counted there.
template <class Word>
uint64_t array_bytes(const ArrayShape3<Word>* shape) {
  if ((shape->flags & (kSparse | kDeferredMapping)) != 0) return 0;
  return array_bytes(shape->width, shape->height, shape->depth, element_bits(shape->format, shape->channels));
}
template <class Shape>
Result array(int entry, P out_array, P shape) {
  const auto call = [&] { return real(entry, out_array, shape); };
  if (shape == nullptr) return call();
  return charged<uint64_t>(Kind::array, current(), array_bytes(static_cast<const Shape*>(shape)), out_array,
                           call);
}

// ---- stream-ordered memory ----------------------------------------------------------------------------------------------------------

// While a stream is captured an allocation is a node of a graph, charged when the graph is instantiated.
bool is_capturing(int entry, P stream) {
  int status = 0;
  return real(entry, stream, &status) == kSuccess && status != 0;
}

template <class Call>
Result stream_ordered(int capturing, P out_address, uint64_t bytes, P stream, P pool, Call call) {
  if (is_capturing(capturing, stream)) return call();
  Current at = current();
  Block known;
  if (pool != nullptr && look(Kind::pool, reinterpret_cast<uint64_t>(pool), &known)) {
    if (known.device < 0) return call();  // of the host
    at.place = known.device;
  }
  return charged<uint64_t>(Kind::memory, at, bytes, out_address, call, true);
}

// ---- virtual memory -----------------------------------------------------------------------------------------------------------------

// The driver's structures begin alike: type, handle types, then where the memory is.
struct LocatedProperties {
  int32_t type, handle_types;
  int32_t location_type, location_id;
  uint64_t rest[14];
};
constexpr int32_t kOnDevice = 1;
int place_in(const LocatedProperties& properties) {
  return properties.location_type == kOnDevice ? place_of(properties.location_id) : -1;
}

// A reference to physical memory has gone; with the last, its bytes.
void unrefer(uint64_t handle) {
  Block block;
  if (refer(Kind::handle, handle, -1, &block) == 0 && block.bytes != 0) discharge(block.device, block.bytes);
}

// ---- graphs -------------------------------------------------------------------------------------------------------------------------

constexpr int32_t kNodeGraph = 4, kNodeAllocation = 10;

// Bytes of the allocation nodes of a graph, and of the graphs in it; a device of theirs.
uint64_t graph_bytes(P graph, int depth, int* out_place) {
  uint64_t count = 0;
  if (graph == nullptr || depth > 16 ||
      real(kEntry_cuGraphGetNodes, graph, static_cast<void**>(nullptr), &count) != kSuccess || count == 0)
    return 0;
  auto** nodes = static_cast<void**>(std::malloc(count * sizeof(void*)));
  if (nodes == nullptr || real(kEntry_cuGraphGetNodes, graph, nodes, &count) != kSuccess) {
    std::free(nodes);
    return 0;
  }
  uint64_t bytes = 0;
  for (uint64_t i = 0; i < count; ++i) {
    int32_t type = -1;
    if (real(kEntry_cuGraphNodeGetType, nodes[i], &type) != kSuccess) continue;
    if (type == kNodeAllocation) {
      // 120 bytes: properties of the pool (88), access (16), size, address.
      uint64_t words[16] = {};
      if (real(kEntry_cuGraphMemAllocNodeGetParams, nodes[i], &words[0]) != kSuccess) continue;
      LocatedProperties properties;
      std::memcpy(&properties, words, 16);
      const int place = place_in(properties);
      if (place < 0) continue;
      *out_place = place;
      bytes += rounded(words[13]);
    } else if (type == kNodeGraph) {
      void* child = nullptr;
      if (real(kEntry_cuGraphChildGraphNodeGetGraph, nodes[i], &child) == kSuccess)
        bytes += graph_bytes(child, depth + 1, out_place);
    }
  }
  std::free(nodes);
  return bytes;
}

template <class Call>
Result instantiated(P out_exec, P graph, Call call) {
  Current at = current();
  const uint64_t bytes = graph_bytes(graph, 0, &at.place);
  return bytes == 0 ? call() : charged<uint64_t>(Kind::graph, at, bytes, out_exec, call);
}

// ---- what the program is told -------------------------------------------------------------------------------------------------------

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
}  // namespace gpushare::shim

using namespace gpushare::shim;  // NOLINT(google-build-using-namespace): the functions below have C linkage

#define HOOK(name) Result gpushare_hook_##name
extern "C" {

HOOK(cuMemAlloc_v2)(P a, L b) {
  const Current at = current();
  Result result = kSuccess;
  if (may_move(b) && allocate_movable(at, b, a, &result)) return result;
  result = charged<uint64_t>(Kind::memory, at, b, a, [&] { return real(kEntry_cuMemAlloc_v2, a, b); });
  return __builtin_expect(result != kOutOfMemory, 1) ? result : spill(at, b, a);
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

HOOK(cuMemAllocAsync)(P a, L b, P c) {
  return stream_ordered(kEntry_cuStreamIsCapturing, a, b, c, nullptr,
                        [&] { return real(kEntry_cuMemAllocAsync, a, b, c); });
}
HOOK(cuMemAllocAsync_ptsz)(P a, L b, P c) {
  return stream_ordered(kEntry_cuStreamIsCapturing_ptsz, a, b, c, nullptr,
                        [&] { return real(kEntry_cuMemAllocAsync_ptsz, a, b, c); });
}
HOOK(cuMemAllocFromPoolAsync)(P a, L b, P c, P d) {
  return stream_ordered(kEntry_cuStreamIsCapturing, a, b, d, c,
                        [&] { return real(kEntry_cuMemAllocFromPoolAsync, a, b, c, d); });
}
HOOK(cuMemAllocFromPoolAsync_ptsz)(P a, L b, P c, P d) {
  return stream_ordered(kEntry_cuStreamIsCapturing_ptsz, a, b, d, c,
                        [&] { return real(kEntry_cuMemAllocFromPoolAsync_ptsz, a, b, c, d); });
}
// Captured, the free happens when the graph runs: the block stays charged.
HOOK(cuMemFreeAsync)(L a, P b) {
  const auto call = [&] { return real(kEntry_cuMemFreeAsync, a, b); };
  return is_capturing(kEntry_cuStreamIsCapturing, b) ? call() : freed_memory(a, call);
}
HOOK(cuMemFreeAsync_ptsz)(L a, P b) {
  const auto call = [&] { return real(kEntry_cuMemFreeAsync_ptsz, a, b); };
  return is_capturing(kEntry_cuStreamIsCapturing_ptsz, b) ? call() : freed_memory(a, call);
}
// Which device (or the host) a pool takes memory from.
HOOK(cuMemPoolCreate)(P a, P b) {
  const Result result = real(kEntry_cuMemPoolCreate, a, b);
  if (result != kSuccess || a == nullptr || b == nullptr) return result;
  LocatedProperties properties;
  std::memcpy(&properties, b, 16);
  group();
  Current at;
  at.place = place_in(properties);
  insert(block_of(Kind::pool, reinterpret_cast<uint64_t>(*static_cast<void**>(a)), 0, at));
  return result;
}
HOOK(cuMemPoolDestroy)(P a) {
  return freed(Kind::pool, reinterpret_cast<uint64_t>(a), [&] {
    while (__atomic_load_n(&g_trimming, __ATOMIC_SEQ_CST) != 0) sched_yield();
    return real(kEntry_cuMemPoolDestroy, a);
  });
}
HOOK(cuMemPoolImportPointer)(P a, P b, P c) {
  return opened(real(kEntry_cuMemPoolImportPointer, a, b, c), a,
                [](uint64_t address) { real(kEntry_cuMemFree_v2, address); });
}

HOOK(cuArrayCreate)(P a, P b) {
  return array<ArrayShape<uint32_t>>(kEntry_cuArrayCreate, a, b);
}
HOOK(cuArrayCreate_v2)(P a, P b) {
  return array<ArrayShape<uint64_t>>(kEntry_cuArrayCreate_v2, a, b);
}
HOOK(cuArray3DCreate)(P a, P b) {
  return array<ArrayShape3<uint32_t>>(kEntry_cuArray3DCreate, a, b);
}
HOOK(cuArray3DCreate_v2)(P a, P b) {
  return array<ArrayShape3<uint64_t>>(kEntry_cuArray3DCreate_v2, a, b);
}
HOOK(cuArrayDestroy)(P a) {
  return freed(Kind::array, reinterpret_cast<uint64_t>(a), [&] { return real(kEntry_cuArrayDestroy, a); });
}
HOOK(cuMipmappedArrayCreate)(P a, P b, I c) {
  const auto call = [&] { return real(kEntry_cuMipmappedArrayCreate, a, b, c); };
  if (b == nullptr) return call();
  ArrayShape3<uint64_t> shape = *static_cast<const ArrayShape3<uint64_t>*>(b);
  uint64_t bytes = 0;
  for (uint32_t level = 0; level < c && level < 64; ++level) {
    const uint64_t more = array_bytes(&shape);
    bytes = more > UINT64_MAX - bytes ? UINT64_MAX : bytes + more;
    if (shape.width > 1) shape.width /= 2;
    if (shape.height > 1) shape.height /= 2;
    if (shape.depth > 1 && (shape.flags & 1U) == 0) shape.depth /= 2;  // layers (flag 1) do not shrink
  }
  return charged<uint64_t>(Kind::array, current(), bytes, a, call);
}
HOOK(cuMipmappedArrayDestroy)(P a) {
  return freed(Kind::array, reinterpret_cast<uint64_t>(a),
               [&] { return real(kEntry_cuMipmappedArrayDestroy, a); });
}

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
  // Not known any more before the driver may give the handle to another thread; put back if it refuses.
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
  Block block;
  const int64_t left = refer(Kind::opened, a, -1, &block);
  const Result result = real(kEntry_cuIpcCloseMemHandle, a);
  if (left == 0 && result == kSuccess) discharge(block.device, block.bytes);
  if (left == 0 && result != kSuccess) {
    block.references = 1;
    insert(block);
  } else if (left > 0 && result != kSuccess) {
    refer(Kind::opened, a, 1, &block);
  }
  return result;
}

HOOK(cuGraphInstantiate)(P a, P b, P c, P d, L e) {
  return instantiated(a, b, [&] { return real(kEntry_cuGraphInstantiate, a, b, c, d, e); });
}
HOOK(cuGraphInstantiate_v2)(P a, P b, P c, P d, L e) {
  return instantiated(a, b, [&] { return real(kEntry_cuGraphInstantiate_v2, a, b, c, d, e); });
}
HOOK(cuGraphInstantiateWithFlags)(P a, P b, L c) {
  return instantiated(a, b, [&] { return real(kEntry_cuGraphInstantiateWithFlags, a, b, c); });
}
HOOK(cuGraphInstantiateWithParams)(P a, P b, P c) {
  return instantiated(a, b, [&] { return real(kEntry_cuGraphInstantiateWithParams, a, b, c); });
}
HOOK(cuGraphInstantiateWithParams_ptsz)(P a, P b, P c) {
  return instantiated(a, b, [&] { return real(kEntry_cuGraphInstantiateWithParams_ptsz, a, b, c); });
}
HOOK(cuGraphExecDestroy)(P a) {
  return freed(Kind::graph, reinterpret_cast<uint64_t>(a),
               [&] { return real(kEntry_cuGraphExecDestroy, a); });
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
