// Device, pinned, managed and virtual memory, and the check of every access to it.
//
// A block is an anonymous mapping with a guard page behind it. Physical memory is a range of one memory file;
// mapping it is mmap(MAP_FIXED | MAP_SHARED), so that data move with the physical memory. A range is readable
// only after cuMemSetAccess, and PROT_NONE again after cuMemUnmap.
// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "world.hpp"

using namespace standin;  // NOLINT(google-build-using-namespace): entry points live in the global namespace

namespace standin {
namespace {

constexpr uint64_t kPage = 4096;
constexpr const char* kSharedName = "cuda-standin-shared";
constexpr size_t kGraves = 8192;
constexpr size_t kAccesses = 64;  // above this, those that cannot race any more are dropped

uint64_t round_up(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

std::string hex(uint64_t value) {
  char text[32];
  std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

// Address space with `protection`, a guard page behind it; 0 if the system has none.
uint64_t place(uint64_t bytes, uint64_t alignment, int protection) {
  const uint64_t size = round_up(bytes, kPage) + kPage + (alignment > kPage ? alignment : 0);
  if (size < bytes) return 0;
  void* at = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return 0;
  const uint64_t begin = reinterpret_cast<uint64_t>(at);
  const uint64_t aligned = round_up(begin, std::max(alignment, kPage));
  if (aligned > begin) munmap(at, aligned - begin);
  const uint64_t end = aligned + round_up(bytes, kPage) + kPage;
  if (begin + size > end) munmap(reinterpret_cast<void*>(end), begin + size - end);
  if (protection != PROT_NONE) mprotect(reinterpret_cast<void*>(aligned), round_up(bytes, kPage), protection);
  return aligned;
}

void unplace(uint64_t address, uint64_t bytes) {
  munmap(reinterpret_cast<void*>(address), round_up(bytes, kPage) + kPage);
}

void bury(uint64_t address, uint64_t bytes, const std::string& how) {
  World& w = world();
  if (w.graves.size() >= kGraves) w.graves.erase(w.graves.begin());
  w.graves[address] = {address + bytes, how};
}

// The system hands the same addresses out again.
void unbury(uint64_t address, uint64_t bytes) {
  auto& graves = world().graves;
  auto it = graves.lower_bound(address);
  if (it != graves.begin()) {
    const auto previous = std::prev(it);
    if (previous->second.first > address) it = previous;
  }
  while (it != graves.end() && it->first < address + bytes) it = graves.erase(it);
}

// "freed by cuMemFree#3", or how a range that is nobody's should be called.
std::string why_gone(uint64_t address) {
  const auto& graves = world().graves;
  auto it = graves.upper_bound(address);
  if (it != graves.begin() && (--it)->second.first > address) return it->second.second;
  const auto& reservations = world().reservations;
  auto reserved = reservations.upper_bound(address);
  if (reserved != reservations.begin() && (--reserved, address - reserved->first < reserved->second.bytes))
    return "reserved by " + reserved->second.born + " but not mapped";
  return "of no allocation";
}

Block* block_at(uint64_t address) {
  auto& blocks = world().blocks;
  auto it = blocks.upper_bound(address);
  if (it == blocks.begin()) return nullptr;
  --it;
  return address - it->first < it->second.bytes ? &it->second : nullptr;
}
uint64_t base_of(uint64_t address) {
  return std::prev(world().blocks.upper_bound(address))->first;
}

bool covered(const Clock& clock, const Access& access) {
  const auto it = clock.find(access.stream);
  return it != clock.end() && it->second >= access.number;
}

// An access to the block that the host has not seen finish.
const Access* unfinished(const Block& block) {
  for (const Access& access : block.accesses) {
    if (!covered(world().observed, access)) return &access;
  }
  return nullptr;
}

Block* find_block(Call& call, uint64_t address, std::initializer_list<BlockKind> kinds, const char* what) {
  auto& blocks = world().blocks;
  const auto it = blocks.find(address);
  if (it != blocks.end() && std::find(kinds.begin(), kinds.end(), it->second.kind) != kinds.end())
    return &it->second;
  const auto& graves = world().graves;
  const auto grave = graves.find(address);
  if (grave != graves.end()) {
    record_misuse(call.text(), "double free: " + hex(address) + " was " + grave->second.second);
  } else {
    record_misuse(call.text(), hex(address) + " is not the start of " + what);
  }
  return nullptr;
}

// What cuMemFree and cuMemFreeHost do first: wait for the context's work. The driver may keep other threads' calls waiting
// meanwhile, so that a caller's lock that a host function takes must not be held across any call.
void wait_for_context(Call& call, Context* context) {
  const bool holds = world().setting("frees_hold_lock") != 0;
  if (holds) {
    // Another thread's free may have begun when this one waited for it the last time.
    world().progress.wait(call.lock(), [] { return !world().held_by_free; });
    world().held_by_free = true;
  }
  std::vector<Stream*> streams;
  for (const auto& [raw, stream] : world().streams) {
    if (root(stream->context) == root(context) && stream->alive() && stream->capture == nullptr)
      streams.push_back(stream.get());
  }
  for (Stream* stream : streams) {
    const Clock finished = finished_by(stream);
    wait_completed(call.lock(), stream, stream->enqueued);
    join(world().observed, finished);
  }
  if (!holds) return;
  world().held_by_free = false;
  world().progress.notify_all();
}

void wait_for_all(Call& call) {
  std::vector<Stream*> streams;
  for (const auto& [raw, stream] : world().streams) streams.push_back(stream.get());
  for (Stream* stream : streams) wait_completed(call.lock(), stream, stream->enqueued);
}

uint64_t add_block(BlockKind kind, Context* context, const std::string& born, uint64_t bytes,
                   uint64_t accounted) {
  const uint64_t address = place(bytes, 512, PROT_READ | PROT_WRITE);
  if (address == 0) return 0;
  unbury(address, round_up(bytes, kPage));
  Block block;
  block.born = born;
  block.kind = kind;
  block.context = context;
  block.device = context->device;
  block.bytes = bytes;
  block.accounted = accounted;
  world().blocks[address] = std::move(block);
  return address;
}

uint64_t free_on(int device) {
  World& w = world();
  const uint64_t used = w.devices[static_cast<size_t>(device)].used_bytes + w.setting("other_user_bytes");
  return w.setting("memory_bytes") > used ? w.setting("memory_bytes") - used : 0;
}

CUresult alloc_device(Call& call, Context* context, BlockKind kind, CUdeviceptr* out_address, size_t bytes) {
  if (out_address == nullptr || bytes == 0)
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "an allocation of 0 bytes, or no output");
  const uint64_t accounted = round_up(bytes, 512);
  if (accounted < bytes || accounted > free_on(context->device)) return CUDA_ERROR_OUT_OF_MEMORY;
  const uint64_t address = add_block(kind, context, call.text(), bytes, accounted);
  if (address == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  world().devices[static_cast<size_t>(context->device)].used_bytes += accounted;
  *out_address = address;
  return CUDA_SUCCESS;
}

void remove_block(const std::string& call, uint64_t address) {
  World& w = world();
  const Block block = std::move(w.blocks[address]);
  w.blocks.erase(address);
  if (block.kind == BlockKind::kPinned) {
    w.pinned_bytes -= block.accounted;
  } else {
    w.devices[static_cast<size_t>(block.device)].used_bytes -= block.accounted;
  }
  bury(address, block.bytes, "freed by " + call);
  unplace(address, block.bytes);
}

CUresult bad_granules(Call& call, const char* what, uint64_t value) {
  return call.misuse(CUDA_ERROR_INVALID_VALUE,
                     std::string(what) + " " + hex(value) + " is no multiple of the granularity");
}
bool granular(uint64_t value) {
  return value % world().setting("granularity_bytes") == 0;
}

void drop_physical_if_unused(uint64_t handle) {
  World& w = world();
  Physical& physical = w.physicals[handle];
  if (!physical.released || physical.mappings > 0) return;
  if (!physical.imported) w.devices[static_cast<size_t>(physical.device)].used_bytes -= physical.bytes;
  if (physical.own_file >= 0) {
    (void)close(physical.own_file);
    physical.died = "released";
    return;
  }
  (void)fallocate(w.memory_file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  static_cast<off_t>(physical.file_offset), static_cast<off_t>(physical.bytes));
  physical.died = "released";
}

}  // namespace

CUresult check_access(const Call& call, const Stream* stream, uint64_t number, const Range& range,
                      bool* out_unordered) {
  World& w = world();
  const uint64_t end = range.address + range.bytes;
  // The whole range first: an op that is refused touches nothing.
  for (uint64_t at = range.address; at < end;) {
    const Block* block = block_at(at);
    if (block == nullptr) {
      return call.misuse(CUDA_ERROR_INVALID_VALUE, std::string(range.writes ? "write" : "read") + " of " +
                                                       hex(at) + ", " + why_gone(at));
    }
    const uint64_t stop = std::min(end, base_of(at) + block->bytes);
    if (stop < end && block->kind != BlockKind::kMapping) {
      return call.misuse(CUDA_ERROR_INVALID_VALUE, "past the end: " + hex(range.address) + " + " +
                                                       std::to_string(range.bytes) +
                                                       " passes the end of the block of " + block->born +
                                                       ", " + std::to_string(block->bytes) + " bytes");
    }
    if (!block->accessible) {
      return call.misuse(CUDA_ERROR_INVALID_VALUE,
                         "the mapping of " + block->born + " has no access yet (cuMemSetAccess)");
    }
    if (range.writes && !block->writable) {
      return call.misuse(CUDA_ERROR_INVALID_VALUE,
                         "the mapping of " + block->born + " was given access for reading only");
    }
    at = stop;
  }
  for (uint64_t at = range.address; at < end;) {
    Block* block = block_at(at);
    const uint64_t stop = std::min(end, base_of(at) + block->bytes);
    for (const Access& earlier : block->accesses) {
      if (earlier.stream == stream->id || (!earlier.writes && !range.writes)) continue;
      if (earlier.end <= at || earlier.begin >= stop) continue;
      if (covered(stream->known, earlier) || covered(w.observed, earlier)) continue;
      record_misuse(call.text(), "unordered access: it " + std::string(range.writes ? "writes" : "reads") +
                                     " " + hex(at) + " of the block of " + block->born + ", which " +
                                     earlier.call + (earlier.writes ? " writes" : " reads") +
                                     " on another stream; nothing orders the two");
      if (out_unordered != nullptr) *out_unordered = true;
      break;
    }
    if (block->accesses.size() >= kAccesses) {
      std::erase_if(block->accesses, [&](const Access& access) { return covered(w.observed, access); });
    }
    // A later access of the same stream to the same range stands for the earlier one.
    std::erase_if(block->accesses, [&](const Access& access) {
      return access.stream == stream->id && access.begin >= at && access.end <= stop &&
             (range.writes || !access.writes);
    });
    block->accesses.push_back({stream->id, number, at, stop, range.writes, call.text()});
    at = stop;
  }
  return CUDA_SUCCESS;
}

bool is_pinned(uint64_t address, uint64_t bytes) {
  const Block* block = block_at(address);
  return block != nullptr && base_of(address) + block->bytes - address >= bytes;
}

size_t list_leaks(std::string* out_text) {
  World& w = world();
  size_t count = 0;
  const auto add = [&](const char* what, const std::string& born) {
    ++count;
    *out_text += "  leaked: " + (what + born) + "\n";
  };
  const auto counts = [](const Context* context) {
    return root(const_cast<Context*>(context))->error == CUDA_SUCCESS;
  };
  bool poisoned = false;
  for (const auto& [raw, context] : w.contexts)
    poisoned = poisoned || root(context.get())->error != CUDA_SUCCESS;
  for (const auto& [raw, context] : w.contexts) {
    if (context->alive() && counts(context.get()))
      add(context->primary ? "retained primary context of " : "context of ", context->born);
  }
  for (const auto& [raw, stream] : w.streams) {
    if (stream->alive() && stream.get() != stream->context->legacy && counts(stream->context))
      add("stream of ", stream->born);
  }
  for (const auto& [raw, event] : w.events) {
    if (event->alive() && counts(event->context)) add("event of ", event->born);
  }
  for (const auto& [address, block] : w.blocks) {
    if (block.context != nullptr ? counts(block.context) : !poisoned) add("memory of ", block.born);
  }
  // Virtual memory belongs to the process, not to a context; after a poisoned one it cannot be released any
  // more.
  for (const auto& [address, reservation] : w.reservations) {
    if (!poisoned) add("address range of ", reservation.born);
  }
  for (const auto& [handle, physical] : w.physicals) {
    if (!poisoned && physical.alive()) add("physical memory of ", physical.born);
  }
  return count;
}

}  // namespace standin

STANDIN_API CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  STANDIN_ENTRY(cuMemGetInfo);
  STANDIN_CONTEXT();
  *free = free_on(context->device);
  *total = world().setting("memory_bytes");
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuMemAlloc_v2(CUdeviceptr* out_address, size_t bytes) {
  STANDIN_ENTRY(cuMemAlloc);
  STANDIN_CONTEXT();
  if (call.unsafe_during_capture()) return call.verdict();
  return alloc_device(call, context, BlockKind::kDevice, out_address, bytes);
}

STANDIN_API CUresult cuMemAllocManaged(CUdeviceptr* out_address, size_t bytes, unsigned flags) {
  STANDIN_ENTRY(cuMemAllocManaged);
  STANDIN_CONTEXT();
  if (flags != 1 && flags != 2)
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "flags are neither global nor host");
  if (call.unsafe_during_capture()) return call.verdict();
  return alloc_device(call, context, BlockKind::kManaged, out_address, bytes);
}

STANDIN_API CUresult cuMemFree_v2(CUdeviceptr address) {
  STANDIN_ENTRY(cuMemFree);
  STANDIN_CONTEXT();
  if (address == 0) return CUDA_SUCCESS;
  if (call.unsafe_during_capture()) return call.verdict();
  if (find_block(call, address, {BlockKind::kDevice, BlockKind::kManaged}, "an allocation") == nullptr)
    return CUDA_ERROR_INVALID_VALUE;
  wait_for_context(call, context);
  // The lock was open while waiting: another thread may have freed it meanwhile.
  if (find_block(call, address, {BlockKind::kDevice, BlockKind::kManaged}, "an allocation") == nullptr)
    return CUDA_ERROR_INVALID_VALUE;
  remove_block(call.text(), address);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuMemAllocAsync(CUdeviceptr* out_address, size_t bytes, CUstream handle) {
  STANDIN_ENTRY(cuMemAllocAsync);
  Stream* stream = call.stream(handle);
  if (stream == nullptr) return call.verdict();
  if (stream->capture != nullptr) return CUDA_ERROR_NOT_SUPPORTED;  // memory nodes of graphs are not modelled
  const CUresult result = alloc_device(call, stream->context, BlockKind::kDevice, out_address, bytes);
  if (result != CUDA_SUCCESS) return result;
  // Other streams must come after the allocation, as after a write.
  Work work;
  work.ranges = {{*out_address, bytes, true}};
  return enqueue(call, stream, std::move(work));
}

STANDIN_API CUresult cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
  STANDIN_ENTRY(cuMemFreeAsync);
  Stream* stream = call.stream(handle);
  if (stream == nullptr) return call.verdict();
  Block* block = find_block(call, address, {BlockKind::kDevice}, "an allocation");
  if (block == nullptr) return CUDA_ERROR_INVALID_VALUE;
  // Whatever is enqueued later uses freed memory; what is enqueued already must be ordered before.
  const CUresult ordered = check_access(call, stream, stream->enqueued + 1, {address, block->bytes, true});
  if (ordered != CUDA_SUCCESS) return ordered;
  World& w = world();
  const uint64_t bytes = block->bytes;
  const uint64_t accounted = block->accounted;
  const auto device = static_cast<size_t>(block->device);
  bury(address, bytes, "freed by " + call.text());
  w.blocks.erase(address);
  Work work;
  work.run = [address, bytes, accounted, device] {
    std::lock_guard<std::mutex> lock(world().mutex);
    world().devices[device].used_bytes -= accounted;
    unplace(address, bytes);
  };
  return enqueue(call, stream, std::move(work));
}

STANDIN_API CUresult cuMemHostAlloc(void** out_pointer, size_t bytes, unsigned flags) {
  STANDIN_ENTRY(cuMemHostAlloc);
  STANDIN_CONTEXT();
  if (out_pointer == nullptr || bytes == 0 || flags > 7)
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "0 bytes, unknown flags or no output");
  if (call.unsafe_during_capture()) return call.verdict();
  World& w = world();
  const uint64_t accounted = round_up(bytes, kPage);
  const uint64_t limit = w.setting("pinned_limit_bytes");
  if (accounted < bytes || (limit != 0 && w.pinned_bytes + accounted > limit))
    return CUDA_ERROR_OUT_OF_MEMORY;
  const uint64_t address = add_block(BlockKind::kPinned, context, call.text(), bytes, accounted);
  if (address == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  w.pinned_bytes += accounted;
  *out_pointer = reinterpret_cast<void*>(address);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuMemFreeHost(void* pointer) {
  STANDIN_ENTRY(cuMemFreeHost);
  STANDIN_CONTEXT();
  if (call.unsafe_during_capture()) return call.verdict();
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  if (find_block(call, address, {BlockKind::kPinned}, "pinned memory") == nullptr)
    return CUDA_ERROR_INVALID_VALUE;
  wait_for_context(call, context);
  if (find_block(call, address, {BlockKind::kPinned}, "pinned memory") == nullptr)
    return CUDA_ERROR_INVALID_VALUE;
  remove_block(call.text(), address);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* out_address, void* pointer, unsigned flags) {
  STANDIN_ENTRY(cuMemHostGetDevicePointer);
  STANDIN_CONTEXT();
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  if (flags != 0 || block_at(address) == nullptr)
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "not pinned memory");
  *out_address = address;
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuPointerGetAttribute(void* data, int attribute, CUdeviceptr address) {
  STANDIN_ENTRY(cuPointerGetAttribute);
  STANDIN_CONTEXT();
  if (data == nullptr || attribute != CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
    return call.misuse(CUDA_ERROR_INVALID_VALUE,
                       "no output, or an attribute that the stand-in does not know");
  const Block* block = block_at(address);
  if (block == nullptr) return CUDA_ERROR_INVALID_VALUE;  // how one asks: no misuse
  constexpr unsigned kHost = 1;
  constexpr unsigned kDevice = 2;
  *static_cast<unsigned*>(data) = block->kind == BlockKind::kPinned ? kHost : kDevice;
  return CUDA_SUCCESS;
}

// ---- virtual memory
// ------------------------------------------------------------------------------------------------

STANDIN_API CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp* prop,
                                                   int option) {
  STANDIN_ENTRY(cuMemGetAllocationGranularity);
  if (prop == nullptr || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED || option < 0 || option > 1)
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "bad properties or option");
  *bytes = world().setting("granularity_bytes");
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuMemAddressReserve(CUdeviceptr* out_address, size_t bytes, size_t alignment,
                                         CUdeviceptr hint, unsigned long long flags) {
  STANDIN_ENTRY(cuMemAddressReserve);
  if (bytes == 0 || !granular(bytes)) return bad_granules(call, "the size", bytes);
  if ((alignment & (alignment - 1)) != 0)
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "the alignment is no power of two");
  if (flags != 0) return call.misuse(CUDA_ERROR_INVALID_VALUE, "flags are not 0");
  (void)hint;
  const uint64_t address =
      place(bytes, std::max<uint64_t>(alignment, world().setting("granularity_bytes")), PROT_NONE);
  if (address == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  unbury(address, bytes);
  Reservation reservation;
  reservation.born = call.text();
  reservation.bytes = bytes;
  world().reservations[address] = reservation;
  *out_address = address;
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  STANDIN_ENTRY(cuMemAddressFree);
  World& w = world();
  const auto it = w.reservations.find(address);
  if (it == w.reservations.end() || it->second.bytes != bytes) {
    const auto grave = w.graves.find(address);
    return call.misuse(CUDA_ERROR_INVALID_VALUE,
                       grave != w.graves.end() ? "double free: the range was " + grave->second.second
                                               : hex(address) + " is no whole reserved range of that size");
  }
  const auto mapped = w.blocks.lower_bound(address);
  if (mapped != w.blocks.end() && mapped->first < address + bytes)
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "the range still has the mapping of " + mapped->second.born);
  w.reservations.erase(it);
  bury(address, bytes, "freed by " + call.text());
  unplace(address, bytes);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuMemCreate(CUmemGenericAllocationHandle* out_handle, size_t bytes,
                                 const CUmemAllocationProp* prop, unsigned long long flags) {
  STANDIN_ENTRY(cuMemCreate);
  if (call.unsafe_during_capture()) return call.verdict();
  World& w = world();
  if (prop == nullptr || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED || flags != 0 ||
      prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE || prop->location.id < 0 ||
      static_cast<uint64_t>(prop->location.id) >= w.setting("devices") ||
      prop->win32HandleMetaData != nullptr || prop->requestedHandleTypes < 0 ||
      prop->requestedHandleTypes > CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "bad properties or flags");
  if (bytes == 0 || !granular(bytes)) return bad_granules(call, "the size", bytes);
  if (bytes > free_on(prop->location.id)) return CUDA_ERROR_OUT_OF_MEMORY;
  Physical physical;
  physical.born = call.text();
  physical.device = prop->location.id;
  physical.bytes = bytes;
  if (prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    physical.own_file = memfd_create(kSharedName, MFD_CLOEXEC);
    if (physical.own_file < 0) return CUDA_ERROR_OUT_OF_MEMORY;
    if (ftruncate(physical.own_file, static_cast<off_t>(bytes)) != 0) {
      (void)close(physical.own_file);
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
  } else {
    physical.file_offset = w.memory_file_end;
    if (ftruncate(w.memory_file, static_cast<off_t>(w.memory_file_end + bytes)) != 0)
      return CUDA_ERROR_OUT_OF_MEMORY;
    w.memory_file_end += bytes;
  }
  w.devices[static_cast<size_t>(physical.device)].used_bytes += bytes;
  *out_handle = w.next_physical++;
  w.physicals[*out_handle] = std::move(physical);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  STANDIN_ENTRY(cuMemRelease);
  World& w = world();
  const auto it = w.physicals.find(handle);
  if (it == w.physicals.end()) return call.misuse(CUDA_ERROR_INVALID_VALUE, "not physical memory");
  if (it->second.released)
    return call.misuse(CUDA_ERROR_INVALID_VALUE,
                       "double free: the memory of " + it->second.born + " was released");
  it->second.released = true;
  drop_physical_if_unused(handle);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset,
                              CUmemGenericAllocationHandle handle, unsigned long long flags) {
  STANDIN_ENTRY(cuMemMap);
  if (call.unsafe_during_capture()) return call.verdict();
  World& w = world();
  if (flags != 0 || offset != 0) return call.misuse(CUDA_ERROR_INVALID_VALUE, "offset and flags must be 0");
  if (!granular(address) || bytes == 0 || !granular(bytes))
    return bad_granules(call, "the address or size", address);
  const auto physical = w.physicals.find(handle);
  if (physical == w.physicals.end() || physical->second.released)
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "use after release: not live physical memory");
  if (bytes > physical->second.bytes)
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "past the end of the physical memory");
  auto reservation = w.reservations.upper_bound(address);
  if (reservation == w.reservations.begin() ||
      (--reservation, address + bytes > reservation->first + reservation->second.bytes))
    return call.misuse(CUDA_ERROR_INVALID_VALUE, hex(address) + " lies in no reserved range");
  const auto next = w.blocks.lower_bound(address);
  if (block_at(address) != nullptr || (next != w.blocks.end() && next->first < address + bytes))
    return call.misuse(CUDA_ERROR_INVALID_VALUE, hex(address) + " is mapped already");
  void* mapped = mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
                      physical->second.own_file >= 0 ? physical->second.own_file : w.memory_file,
                      static_cast<off_t>(physical->second.file_offset));
  if (mapped == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  ++physical->second.mappings;
  unbury(address, bytes);
  Block block;
  block.born = call.text();
  block.kind = BlockKind::kMapping;
  block.device = physical->second.device;
  block.bytes = bytes;
  block.physical = handle;
  block.accessible = false;
  w.blocks[address] = std::move(block);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access,
                                    size_t count) {
  STANDIN_ENTRY(cuMemSetAccess);
  World& w = world();
  if (access == nullptr || count != 1 ||
      (access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE &&
       access->flags != CU_MEM_ACCESS_FLAGS_PROT_READ) ||
      access->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
    return call.misuse(CUDA_ERROR_INVALID_VALUE,
                       "only access of one device is modelled, to read or to read and write");
  for (uint64_t at = address; at < address + bytes;) {
    const auto it = w.blocks.find(at);
    if (it == w.blocks.end() || it->second.kind != BlockKind::kMapping ||
        at + it->second.bytes > address + bytes)
      return call.misuse(CUDA_ERROR_INVALID_VALUE, hex(at) + " is not made of whole mappings");
    if (it->second.device != access->location.id)
      return call.misuse(CUDA_ERROR_INVALID_VALUE, "access for another device is not modelled");
    at += it->second.bytes;
  }
  for (uint64_t at = address; at < address + bytes;) {
    Block& block = w.blocks[at];
    block.accessible = true;
    block.writable = access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    mprotect(reinterpret_cast<void*>(at), block.bytes, block.writable ? PROT_READ | PROT_WRITE : PROT_READ);
    at += block.bytes;
  }
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  STANDIN_ENTRY(cuMemUnmap);
  if (call.unsafe_during_capture()) return call.verdict();
  World& w = world();
  bool under_work = false;
  for (uint64_t at = address; at < address + bytes;) {
    const auto it = w.blocks.find(at);
    if (it == w.blocks.end() || it->second.kind != BlockKind::kMapping ||
        at + it->second.bytes > address + bytes) {
      const auto grave = w.graves.find(at);
      return call.misuse(CUDA_ERROR_INVALID_VALUE,
                         grave != w.graves.end() ? "double unmap: " + hex(at) + " was " + grave->second.second
                                                 : hex(at) + " is not made of whole mappings");
    }
    if (const Access* access = unfinished(it->second); access != nullptr) {
      record_misuse(call.text(), "unmap under work: the host has not seen " + access->call +
                                     " finish, which uses the mapping of " + it->second.born);
      under_work = true;
    }
    at += it->second.bytes;
  }
  // Told already; the work may end in peace, where the GPU would fault.
  if (under_work) wait_for_all(call);
  for (uint64_t at = address; at < address + bytes;) {
    const Block block = std::move(w.blocks[at]);
    w.blocks.erase(at);
    mmap(reinterpret_cast<void*>(at), block.bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    bury(at, block.bytes, "unmapped by " + call.text());
    --w.physicals[block.physical].mappings;
    drop_physical_if_unused(block.physical);
    at += block.bytes;
  }
  return CUDA_SUCCESS;
}

// ---- memory shared between processes: a memory file of its own, and descriptors of it

STANDIN_API CUresult cuMemExportToShareableHandle(void* shareable, CUmemGenericAllocationHandle handle,
                                                  int type, unsigned long long flags) {
  STANDIN_ENTRY(cuMemExportToShareableHandle);
  World& w = world();
  if (shareable == nullptr || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags != 0)
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "no output, or a type or flags that are not modelled");
  const auto physical = w.physicals.find(handle);
  if (physical == w.physicals.end() || physical->second.released)
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "use after release: not live physical memory");
  if (physical->second.own_file < 0 || physical->second.imported)
    return call.misuse(CUDA_ERROR_INVALID_VALUE,
                       "the memory of " + physical->second.born + " was not created to be exported");
  const int descriptor = dup(physical->second.own_file);
  if (descriptor < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  *static_cast<int*>(shareable) = descriptor;
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* out_handle, void* shareable,
                                                    int type) {
  STANDIN_ENTRY(cuMemImportFromShareableHandle);
  STANDIN_CONTEXT();
  World& w = world();
  if (out_handle == nullptr || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "no output, or a type that is not modelled");
  const auto descriptor = static_cast<int>(reinterpret_cast<uintptr_t>(shareable));
  char name[128] = "";
  const ssize_t length =
      readlink(("/proc/self/fd/" + std::to_string(descriptor)).c_str(), name, sizeof(name) - 1);
  struct stat file {};
  // What another process sent may be anything: no misuse.
  if (length < 0 || std::string(name).rfind(std::string("/memfd:") + kSharedName, 0) != 0 ||
      fstat(descriptor, &file) != 0)
    return CUDA_ERROR_INVALID_VALUE;
  Physical physical;
  physical.born = call.text();
  physical.device = context->device;
  physical.bytes = static_cast<uint64_t>(file.st_size);
  physical.own_file = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  physical.imported = true;
  if (physical.own_file < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  *out_handle = w.next_physical++;
  w.physicals[*out_handle] = std::move(physical);
  return CUDA_SUCCESS;
}
