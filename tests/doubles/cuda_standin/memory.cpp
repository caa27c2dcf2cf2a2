// Device, pinned and managed memory, and the check of every access to memory of any kind.
//
// A block is an anonymous mapping with a guard page behind it. The host sees managed and pinned memory at its address; that of
// the device it does not: at the device's addresses nothing can be touched, and the bytes are elsewhere (Storage).
// SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "memory.hpp"

using namespace standin;  // NOLINT(google-build-using-namespace): entry points live in the global namespace

namespace standin {
namespace {

constexpr uint64_t kPage = 4096;
constexpr size_t kGraves = 8192;
constexpr size_t kAccesses = 64;  // above this, those that cannot race any more are dropped

uint64_t round_up(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

std::string hex(uint64_t value) {
  char text[32];
  std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

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

uint64_t place_on_device(uint64_t bytes, uint64_t alignment, int protection) {
  if (world().setting("hidden") == 0) return place(bytes, alignment, protection);
  const uint64_t address = place(bytes, alignment, PROT_NONE);
  if (address == 0) return 0;
  const uint64_t storage = place(bytes, kPage, protection);
  if (storage == 0) {
    unplace(address, bytes);
    return 0;
  }
  world().storage[address] = {bytes, storage};
  return address;
}

void unplace_on_device(uint64_t address, uint64_t bytes) {
  auto& storage = world().storage;
  if (const auto it = storage.find(address); it != storage.end()) {
    unplace(it->second.address, bytes);
    storage.erase(it);
  }
  unplace(address, bytes);
}

uint64_t storage_of(uint64_t address) {
  const auto& storage = world().storage;
  auto it = storage.upper_bound(address);
  if (it == storage.begin()) return address;
  --it;
  const uint64_t offset = address - it->first;
  return offset < it->second.bytes ? it->second.address + offset : address;
}

namespace {
constexpr uint64_t kFilledStep = 2u << 20;

// The parts of new memory that are filled: all of it would take too long, and pages of the machine.
template <class Fill>
void fill_parts(uint64_t bytes, Fill fill) {
  if (world().setting("fill") == 0) return;
  static const std::vector<char> pattern(kPage, static_cast<char>(0xA5));
  for (uint64_t at = 0; at < bytes; at += kFilledStep) fill(at, pattern.data(), std::min(kPage, bytes - at));
  if (bytes > kPage) fill(bytes - kPage, pattern.data(), kPage);
}
}  // namespace

void fill_new(int file, uint64_t offset, uint64_t bytes) {
  fill_parts(bytes, [&](uint64_t at, const char* pattern, uint64_t count) {
    // A part that cannot be filled is as good: it holds zeros.
    const ssize_t ignored = pwrite(file, pattern, count, static_cast<off_t>(offset + at));
    (void)ignored;
  });
}

void fill_new(uint64_t address, uint64_t bytes) {
  fill_parts(bytes, [&](uint64_t at, const char* pattern, uint64_t count) {
    std::memcpy(reinterpret_cast<void*>(address + at), pattern, count);
  });
}

bool take_memory(int device, uint64_t bytes) {
  World& w = world();
  Device& d = w.devices[static_cast<size_t>(device)];
  const uint64_t page = w.setting("page_bytes");
  if (bytes >= page / 2) {
    const uint64_t pages = round_up(bytes, page);
    if (pages < bytes || pages > free_on(device)) return false;
    d.used_bytes += pages;
    return true;
  }
  if (round_up(d.small_bytes + bytes, page) - round_up(d.small_bytes, page) > free_on(device)) return false;
  d.small_bytes += bytes;
  return true;
}

void give_memory(int device, uint64_t bytes) {
  World& w = world();
  Device& d = w.devices[static_cast<size_t>(device)];
  const uint64_t page = w.setting("page_bytes");
  if (bytes >= page / 2)
    d.used_bytes -= round_up(bytes, page);
  else
    d.small_bytes -= bytes;
}

void bury(uint64_t address, uint64_t bytes, const std::string& how) {
  World& w = world();
  if (w.graves.size() >= kGraves) w.graves.erase(w.graves.begin());
  w.graves[address] = {address + bytes, how};
}

void unbury(uint64_t address, uint64_t bytes) {
  auto& graves = world().graves;
  auto it = graves.lower_bound(address);
  if (it != graves.begin()) {
    const auto previous = std::prev(it);
    if (previous->second.first > address) it = previous;
  }
  while (it != graves.end() && it->first < address + bytes) it = graves.erase(it);
}

Block* block_at(uint64_t address) {
  auto& blocks = world().blocks;
  auto it = blocks.upper_bound(address);
  if (it == blocks.begin()) return nullptr;
  --it;
  return address - it->first < it->second.bytes ? &it->second : nullptr;
}

bool covered(const Clock& clock, const Access& access) {
  const auto it = clock.find(access.stream);
  return it != clock.end() && it->second >= access.number;
}

uint64_t used_here(int device) {
  World& w = world();
  const auto contexts = std::count_if(w.contexts.begin(), w.contexts.end(), [device](const auto& entry) {
    return entry.second->device == device && entry.second->parent == nullptr && entry.second->alive();
  });
  const Device& d = w.devices[static_cast<size_t>(device)];
  return d.used_bytes + round_up(d.small_bytes, w.setting("page_bytes")) +
         static_cast<uint64_t>(contexts) * w.setting("context_bytes");
}

uint64_t free_on(int device) {
  World& w = world();
  const uint64_t used = used_here(device) + w.setting("other_user_bytes");
  return w.device_bytes() > used ? w.device_bytes() - used : 0;
}

namespace {

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

uint64_t base_of(uint64_t address) {
  return std::prev(world().blocks.upper_bound(address))->first;
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

// cuMemFree and cuMemFreeHost first wait for the context's work. The driver may keep other threads' calls waiting meanwhile,
// so a caller's lock that a host function takes must not be held across any call.
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

uint64_t add_block(BlockKind kind, Context* context, const std::string& born, uint64_t bytes,
                   uint64_t accounted) {
  const uint64_t address = kind == BlockKind::kDevice ? place_on_device(bytes, 512, PROT_READ | PROT_WRITE)
                                                      : place(bytes, 512, PROT_READ | PROT_WRITE);
  if (address == 0) return 0;
  fill_new(storage_of(address), bytes);
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

CUresult alloc_device(Call& call, Context* context, BlockKind kind, CUdeviceptr* out_address, size_t bytes) {
  if (out_address == nullptr || bytes == 0)
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "an allocation of 0 bytes, or no output");
  const uint64_t accounted = round_up(bytes, 512);
  if (accounted < bytes || !take_memory(context->device, accounted)) return CUDA_ERROR_OUT_OF_MEMORY;
  const uint64_t address = add_block(kind, context, call.text(), bytes, accounted);
  if (address == 0) {
    give_memory(context->device, accounted);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
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
    give_memory(block.device, block.accounted);
  }
  bury(address, block.bytes, "freed by " + call);
  unplace_on_device(address, block.bytes);
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
  *total = world().device_bytes();
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
  const int device = block->device;
  bury(address, bytes, "freed by " + call.text());
  w.blocks.erase(address);
  Work work;
  work.run = [address, bytes, accounted, device] {
    std::lock_guard<std::mutex> lock(world().mutex);
    give_memory(device, accounted);
    unplace_on_device(address, bytes);
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
  cost_of_pinning(accounted);
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
