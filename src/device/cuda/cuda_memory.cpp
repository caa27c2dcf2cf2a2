// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/cuda_memory.hpp"

#include <algorithm>
#include <atomic>
#include <vector>

#include "base/cuda_host_node.hpp"
#include "base/round_up.hpp"
#include "base/units.hpp"

namespace gpushare::device::cuda {
namespace {

using base::round_up;

std::string counted(size_t count, const char* what, const char* plural) {
  return std::to_string(count) + " " + (count == 1 ? what : plural);
}

// The memories of all devices of this process.
struct All {
  base::Mutex mutex;
  std::vector<const Memory*> memories GPUSHARE_GUARDED_BY(mutex);
  std::atomic<uint64_t> changes_under_way{0}, changes_ended{0};
};
All& all() {
  static All* all = new All;  // devices may close while static destructors run
  return *all;
}

}  // namespace

Memory::Change::Change() {
  all().changes_under_way.fetch_add(1);
}

// In this order: who sees none under way sees this one among those that have ended.
Memory::Change::~Change() {
  all().changes_ended.fetch_add(1);
  all().changes_under_way.fetch_sub(1);
}

Memory::QuietLook::QuietLook()
    : ended_(all().changes_ended.load()), quiet_(all().changes_under_way.load() == 0) {}

bool Memory::QuietLook::was_quiet() const {
  return quiet_ && all().changes_under_way.load() == 0 && all().changes_ended.load() == ended_;
}

int Memory::host_node_of(const Driver& driver, api::CUdevice device, uint64_t granularity) {
  const auto gives = [&](int node) {
    const api::CUmemAllocationProp properties = host_properties(node);
    size_t least = 0;
    // A granule of the device must be whole granules of the host.
    if (driver.cuMemGetAllocationGranularity(&least, &properties, api::CU_MEM_ALLOC_GRANULARITY_MINIMUM) !=
            api::CUDA_SUCCESS ||
        least == 0 || granularity % least != 0)
      return false;
    Granule granule = 0;
    if (driver.cuMemCreate(&granule, granularity, &properties, 0) != api::CUDA_SUCCESS) return false;
    return driver.cuMemRelease(granule) == api::CUDA_SUCCESS;
  };
  return base::find_host_node(
      [&](int attribute, int* value) {
        return driver.cuDeviceGetAttribute(value, attribute, device) == api::CUDA_SUCCESS;
      },
      gives);
}

base::Result<std::unique_ptr<Memory>> Memory::open(Context& context, const MemoryOptions& options) {
  GPUSHARE_ENTER_CONTEXT(context);
  const Driver& driver = context.driver();
  size_t free = 0;
  size_t total = 0;
  GPUSHARE_RETURN_IF_ERROR(context.status(driver.cuMemGetInfo(&free, &total), "cuMemGetInfo"));
  uint64_t limit = options.limit_bytes;
  if (limit == 0) limit = static_cast<uint64_t>(static_cast<double>(total) * options.fraction);
  limit = std::min<uint64_t>(limit, total);

  uint64_t granularity = 0;
  int supported = 0;
  int can_share = 0;
  if (driver.has_virtual_memory()) {
    (void)driver.cuDeviceGetAttribute(
        &supported, api::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, context.device());
  }
  if (supported != 0) {
    api::CUmemAllocationProp properties{};
    properties.type = api::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {api::CU_MEM_LOCATION_TYPE_DEVICE, context.device()};
    size_t recommended = 0;
    GPUSHARE_RETURN_IF_ERROR(
        context.status(driver.cuMemGetAllocationGranularity(&recommended, &properties,
                                                            api::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                       "cuMemGetAllocationGranularity"));
    granularity = options.granularity_bytes != 0 ? options.granularity_bytes : recommended;
    // Ranges are reserved so aligned, and the driver aligns to powers of two.
    if (granularity % recommended != 0 || (granularity & (granularity - 1)) != 0) {
      return base::Status(GPUSHARE_INVALID_ARGUMENT,
                          "cuda: option granularity is " + base::format_bytes(granularity) +
                              "; this device needs a power of two times " + base::format_bytes(recommended));
    }
    if (limit < granularity) {
      return base::Status(GPUSHARE_INVALID_ARGUMENT, "cuda: a capacity of " + base::format_bytes(limit) +
                                                         " is less than one granule of " +
                                                         base::format_bytes(granularity));
    }
    limit -= limit % granularity;
  }
  if (granularity != 0 && driver.has_shareable()) {
    (void)driver.cuDeviceGetAttribute(
        &can_share, api::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, context.device());
  }
  const int host_node = granularity == 0 ? -1 : host_node_of(driver, context.device(), granularity);
  return std::unique_ptr<Memory>(new Memory(context, options, limit, granularity, can_share != 0, host_node));
}

Memory::Memory(Context& context, const MemoryOptions& options, uint64_t limit_bytes,
               uint64_t granularity_bytes, bool can_share, int host_node)
    : context_(context),
      limit_bytes_(limit_bytes),
      granularity_bytes_(granularity_bytes),
      can_share_(can_share),
      host_node_(host_node),
      pool_limit_(options.pool_bytes),
      pinned_chunk_bytes_(options.pinned_chunk_bytes) {
  base::MutexLock lock(all().mutex);
  all().memories.push_back(this);
}

Memory::~Memory() {
  const Change change;
  {
    base::MutexLock lock(all().mutex);
    std::erase(all().memories, this);
  }
  ContextScope scope(context_);
  // A lost context takes its memory with it when the process resets the device or ends; each of these calls
  // would fail.
  if (!scope.status().ok()) return;
  const Driver& cu = driver();
  base::MutexLock lock(mutex_);
  for (const auto& [address, mapping] : mappings_)
    unmap_quietly(address, mapping.bytes, mapping.bytes, {step_of(*mapping.memory)});
  for (const auto& [raw, memory] : memories_) {
    for (const Granule granule : memory->granules) (void)cu.cuMemRelease(granule);
  }
  for (const Pooled& pooled : pool_) (void)cu.cuMemRelease(pooled.granule);
  for (const auto& [address, bytes] : reservations_) (void)cu.cuMemAddressFree(address, bytes);
  for (const auto& [address, bytes] : allocations_) (void)cu.cuMemFree(address);
  for (const auto& [pointer, block] : host_blocks_) {
    if (block.chunk == nullptr) (void)cu.cuMemFreeHost(pointer);
  }
  for (const auto& chunk : chunks_) (void)cu.cuMemFreeHost(chunk->base);
}

base::Result<std::optional<uint64_t>> Memory::bytes_of_all(const Driver& driver, api::CUdevice gpu) {
  std::optional<uint64_t> bytes;
  base::MutexLock lock(all().mutex);
  for (const Memory* memory : all().memories) {
    if (&memory->driver() != &driver || memory->context_.device() != gpu) continue;
    base::MutexLock own(memory->mutex_);
    for (const auto& [raw, physical] : memory->memories_)
      if (physical->imported)
        return base::Status(GPUSHARE_UNSUPPORTED,
                            "memory of other processes is mapped, which may count or not");
    bytes = bytes.value_or(0) + memory->used_bytes_ + memory->pooled_bytes_;
  }
  return bytes;
}

base::Result<uint64_t> Memory::free_bytes() {
  size_t free = 0;
  size_t total = 0;
  {
    GPUSHARE_ENTER_CONTEXT(context_);
    CaptureRelaxed relaxed(driver());
    GPUSHARE_RETURN_IF_ERROR(context_.status(driver().cuMemGetInfo(&free, &total), "cuMemGetInfo"));
  }
  base::MutexLock lock(mutex_);
  const uint64_t within_limit = limit_bytes_ > used_bytes_ ? limit_bytes_ - used_bytes_ : 0;
  return std::min<uint64_t>(free + pooled_bytes_, within_limit);
}

base::Status Memory::out_of_memory(const char* call, uint64_t bytes) {
  size_t free = 0;
  size_t total = 0;
  CaptureRelaxed relaxed(driver());
  (void)driver().cuMemGetInfo(&free, &total);
  base::MutexLock lock(mutex_);
  return {
      GPUSHARE_DEVICE_OUT_OF_MEMORY,
      base::format(
          "%s of %s: this device holds %s of its %s; the GPU has %s free of %s, the rest is held by other "
          "users of it",
          call, base::format_bytes(bytes).c_str(), base::format_bytes(used_bytes_).c_str(),
          base::format_bytes(limit_bytes_).c_str(), base::format_bytes(free).c_str(),
          base::format_bytes(total).c_str()),
      api::CUDA_ERROR_OUT_OF_MEMORY};
}

base::Status Memory::take(const char* call, uint64_t bytes) {
  {
    base::MutexLock lock(mutex_);
    if (bytes <= limit_bytes_ && used_bytes_ <= limit_bytes_ - bytes) {
      used_bytes_ += bytes;
      return {};
    }
  }
  return out_of_memory(call, bytes);
}

void Memory::give_back(uint64_t bytes) {
  base::MutexLock lock(mutex_);
  used_bytes_ -= bytes;
}

base::Result<Memory::Address> Memory::alloc(uint64_t bytes) {
  if (bytes == 0) return base::Status(GPUSHARE_INVALID_ARGUMENT, "mem_alloc of 0 bytes; the least is 1");
  GPUSHARE_ENTER_CONTEXT(context_);
  if (bytes > limit_bytes_) return out_of_memory("mem_alloc", bytes);
  const uint64_t rounded = round_up(bytes, kAlignmentBytes);
  const Change change;
  GPUSHARE_RETURN_IF_ERROR(take("mem_alloc", rounded));
  uint64_t room_for_pool = 0;
  {
    base::MutexLock lock(mutex_);
    room_for_pool = limit_bytes_ - used_bytes_;
  }
  (void)trim(room_for_pool);  // pooled granules are memory that we hold: they count against the limit too
  CaptureRelaxed relaxed(driver());
  api::CUdeviceptr address = 0;
  api::CUresult result = driver().cuMemAlloc(&address, rounded);
  if (result == api::CUDA_ERROR_OUT_OF_MEMORY && trim(0)) result = driver().cuMemAlloc(&address, rounded);
  if (result != api::CUDA_SUCCESS) {
    give_back(rounded);
    if (result == api::CUDA_ERROR_OUT_OF_MEMORY) return out_of_memory("mem_alloc", bytes);
    return context_.status(result, "cuMemAlloc");
  }
  base::MutexLock lock(mutex_);
  allocations_[address] = rounded;
  return address;
}

base::Status Memory::free(Address address) {
  const Change change;
  uint64_t bytes = 0;
  {
    base::MutexLock lock(mutex_);
    const auto it = allocations_.find(address);
    if (it == allocations_.end()) {
      return {GPUSHARE_NOT_FOUND, base::format("mem_free: no allocation starts at 0x%llx",
                                               static_cast<unsigned long long>(address))};
    }
    bytes = it->second;
    allocations_.erase(it);
    used_bytes_ -= bytes;
  }
  if (context_.lost()) return {};
  GPUSHARE_ENTER_CONTEXT(context_);
  CaptureRelaxed relaxed(driver());
  return context_.status(driver().cuMemFree(address), "cuMemFree");
}

base::Status Memory::check_access(const char* op, Address address, uint64_t bytes, bool write) {
  const auto outside = [&](const char* why) {
    return base::Status(GPUSHARE_INVALID_ARGUMENT, base::format("%s 0x%llx of %llu bytes: %s", op,
                                                                static_cast<unsigned long long>(address),
                                                                static_cast<unsigned long long>(bytes), why));
  };
  if (bytes > UINT64_MAX - address) return outside("the range passes the end of the address space");
  // The holder of `address` in a map from start to bytes; null if none.
  const auto holder = [address](const auto& map, const auto& size_of) {
    auto it = map.upper_bound(address);
    if (it == map.begin()) return map.end();
    --it;
    return address - it->first < size_of(it->second) ? it : map.end();
  };
  const auto size = [](uint64_t held) { return held; };
  {
    base::MutexLock lock(mutex_);
    if (const auto it = holder(allocations_, size); it != allocations_.end())
      return bytes <= it->first + it->second - address ? base::Status()
                                                       : outside("it passes the end of its allocation");
    if (holder(reservations_, size) != reservations_.end()) {
      const Address end = address + bytes;
      auto it = holder(mappings_, [](const Mapping& mapping) { return mapping.bytes; });
      for (Address at = address; at < end; ++it) {
        if (it == mappings_.end() || it->first > at) return outside("part of it is reserved but not mapped");
        if (write && !it->second.memory->writable) return outside("it is shared memory imported for reading");
        at = it->first + it->second.bytes;
      }
      return {};
    }
  }
  // Somebody else's: memory of the CUDA runtime or of PyTorch, host memory that the device can address.
  unsigned type = 0;
  CaptureRelaxed relaxed(driver());
  for (const Address end : {address, address + bytes - 1}) {
    const api::CUresult result =
        driver().cuPointerGetAttribute(&type, api::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, end);
    if (result == api::CUDA_ERROR_INVALID_VALUE) return outside("it is in no memory that the driver knows");
    GPUSHARE_RETURN_IF_ERROR(context_.status(result, "cuPointerGetAttribute"));
  }
  return {};
}

// ---- pinned host memory -------------------------------------------------------------------------------------------

void* Memory::carve(Chunk& chunk, uint64_t bytes) {
  for (auto it = chunk.holes.begin(); it != chunk.holes.end(); ++it) {
    const auto [offset, hole] = *it;
    if (hole < bytes) continue;
    chunk.holes.erase(it);
    if (hole > bytes) chunk.holes[offset + bytes] = hole - bytes;
    ++chunk.blocks;
    host_blocks_[chunk.base + offset] = {bytes, &chunk};
    return chunk.base + offset;
  }
  return nullptr;
}

base::Result<void*> Memory::host_alloc(uint64_t bytes) {
  if (bytes == 0) return base::Status(GPUSHARE_INVALID_ARGUMENT, "host_alloc of 0 bytes");
  // No process has that many addresses, and what the driver answers to such a number is not documented.
  if (bytes > (1ull << 52)) {
    return base::Status(GPUSHARE_HOST_OUT_OF_MEMORY, "host_alloc of " + base::format_bytes(bytes));
  }
  GPUSHARE_ENTER_CONTEXT(context_);
  const uint64_t rounded = round_up(bytes, kAlignmentBytes);
  const bool own = rounded > pinned_chunk_bytes_ / 4;
  if (!own) {
    base::MutexLock lock(mutex_);
    for (const auto& chunk : chunks_) {
      if (void* pointer = carve(*chunk, rounded); pointer != nullptr) return pointer;
    }
  }
  CaptureRelaxed relaxed(driver());
  void* pointer = nullptr;
  const uint64_t wanted = own ? rounded : pinned_chunk_bytes_;
  // Mapped and portable: with unified addressing (every supported GPU) kernels may use the very same pointer.
  const api::CUresult result = driver().cuMemHostAlloc(
      &pointer, wanted, api::CU_MEMHOSTALLOC_PORTABLE | api::CU_MEMHOSTALLOC_DEVICEMAP);
  if (result == api::CUDA_ERROR_OUT_OF_MEMORY) {
    // The one call whose memory is the host's.
    return base::Status(
        GPUSHARE_HOST_OUT_OF_MEMORY,
        "cuMemHostAlloc of " + base::format_bytes(wanted) +
            ": the system has no more memory to pin; free pinned memory or raise the locked-memory limit",
        result);
  }
  GPUSHARE_RETURN_IF_ERROR(context_.status(result, "cuMemHostAlloc"));
  base::MutexLock lock(mutex_);
  if (own) {
    host_blocks_[pointer] = {rounded, nullptr};
    return pointer;
  }
  auto chunk = std::make_unique<Chunk>();
  chunk->base = static_cast<char*>(pointer);
  chunk->bytes = wanted;
  chunk->holes[0] = wanted;
  chunks_.push_back(std::move(chunk));
  return carve(*chunks_.back(), rounded);
}

base::Status Memory::host_free(void* pointer) {
  void* unpin = nullptr;
  {
    base::MutexLock lock(mutex_);
    const auto it = host_blocks_.find(pointer);
    if (it == host_blocks_.end()) return {GPUSHARE_NOT_FOUND, "host_free: no pinned block starts there"};
    const HostBlock block = it->second;
    host_blocks_.erase(it);
    if (block.chunk == nullptr) {
      unpin = pointer;
    } else {
      Chunk& chunk = *block.chunk;
      const auto offset = static_cast<uint64_t>(static_cast<char*>(pointer) - chunk.base);
      auto hole = chunk.holes.emplace(offset, block.bytes).first;
      if (const auto next = std::next(hole);
          next != chunk.holes.end() && hole->first + hole->second == next->first) {
        hole->second += next->second;
        chunk.holes.erase(next);
      }
      if (hole != chunk.holes.begin()) {
        const auto previous = std::prev(hole);
        if (previous->first + previous->second == hole->first) {
          previous->second += hole->second;
          chunk.holes.erase(hole);
        }
      }
      --chunk.blocks;
      // The last empty chunk stays, so that one block allocated and freed in turn does not pin each time.
      const auto empty =
          std::count_if(chunks_.begin(), chunks_.end(), [](const auto& c) { return c->blocks == 0; });
      if (chunk.blocks == 0 && empty > 1) {
        unpin = chunk.base;
        chunks_.erase(
            std::find_if(chunks_.begin(), chunks_.end(), [&](const auto& c) { return c.get() == &chunk; }));
      }
    }
  }
  if (unpin == nullptr || context_.lost()) return {};
  GPUSHARE_ENTER_CONTEXT(context_);
  CaptureRelaxed relaxed(driver());
  return context_.status(driver().cuMemFreeHost(unpin), "cuMemFreeHost");
}

std::string Memory::leaks() const {
  base::MutexLock lock(mutex_);
  std::string text;
  const auto add = [&text](size_t count, const char* what, const char* plural) {
    if (count == 0) return;
    if (!text.empty()) text += ", ";
    text += counted(count, what, plural);
  };
  add(allocations_.size(), "allocation", "allocations");
  add(reservations_.size(), "reservation", "reservations");
  add(mappings_.size(), "mapping", "mappings");
  add(memories_.size(), "physical memory", "physical memories");
  add(host_blocks_.size(), "host block", "host blocks");
  return text;
}

}  // namespace gpushare::device::cuda
