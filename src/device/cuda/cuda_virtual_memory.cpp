// The virtual-memory half of cuda_memory.hpp: reservations, physical granules and mappings.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>
#include <utility>

#include "base/units.hpp"
#include "device/cuda/cuda_memory.hpp"

namespace gpushare::device::cuda {
namespace {

base::Status stale_memory() {
  return {GPUSHARE_INVALID_HANDLE, "not live physical memory of this device"};
}

unsigned long long hex(uint64_t value) {
  return static_cast<unsigned long long>(value);
}

base::Status no_host_memory(const char* call, uint64_t bytes, api::CUresult result) {
  return {GPUSHARE_HOST_OUT_OF_MEMORY,
          std::string(call) + " of " + base::format_bytes(bytes) + ": no host memory to pin", result};
}

}  // namespace

base::Status Memory::check_virtual() const {
  if (granularity_bytes_ != 0) return {};
  return {
      GPUSHARE_UNSUPPORTED,
      base::format("virtual memory needs CUDA 10.2 and a device that supports it; the driver is CUDA %d.%d",
                   driver().version() / 1000, driver().version() % 1000 / 10)};
}

base::Status Memory::check_granules(const char* what, uint64_t value) const {
  if (value % granularity_bytes_ == 0) return {};
  return {GPUSHARE_INVALID_ARGUMENT,
          base::format("%s 0x%llx is not a multiple of the granularity, %s", what, hex(value),
                       base::format_bytes(granularity_bytes_).c_str())};
}

api::CUmemAllocationProp Memory::granule_properties() const {
  api::CUmemAllocationProp properties{};
  properties.type = api::CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {api::CU_MEM_LOCATION_TYPE_DEVICE, context_.device()};
  return properties;
}

api::CUmemAllocationProp Memory::host_properties(int node) {
  api::CUmemAllocationProp properties{};
  properties.type = api::CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {api::CU_MEM_LOCATION_TYPE_HOST_NUMA, node};
  return properties;
}

base::Result<Memory::Address> Memory::reserve(uint64_t bytes) {
  GPUSHARE_RETURN_IF_ERROR(check_virtual());
  if (bytes == 0) return base::Status(GPUSHARE_INVALID_ARGUMENT, "va_reserve of 0 bytes");
  GPUSHARE_RETURN_IF_ERROR(check_granules("va_reserve: size", bytes));
  GPUSHARE_ENTER_CONTEXT(context_);
  CaptureRelaxed relaxed(driver());
  api::CUdeviceptr address = 0;
  const api::CUresult result = driver().cuMemAddressReserve(&address, bytes, granularity_bytes_, 0, 0);
  if (result == api::CUDA_ERROR_OUT_OF_MEMORY) {
    // No byte of device memory is asked for here: the process is out of address space.
    return base::Status(
        GPUSHARE_HOST_OUT_OF_MEMORY,
        "va_reserve of " + base::format_bytes(bytes) + ": no address range that large is left", result);
  }
  GPUSHARE_RETURN_IF_ERROR(context_.status(result, "cuMemAddressReserve"));
  base::MutexLock lock(mutex_);
  reservations_[address] = bytes;
  return address;
}

base::Status Memory::unreserve(Address address, uint64_t bytes) {
  GPUSHARE_RETURN_IF_ERROR(check_virtual());
  {
    base::MutexLock lock(mutex_);
    const auto it = reservations_.find(address);
    if (it == reservations_.end()) {
      return {GPUSHARE_NOT_FOUND, base::format("va_free: no reservation starts at 0x%llx", hex(address))};
    }
    if (it->second != bytes) {
      return {GPUSHARE_INVALID_ARGUMENT,
              base::format("va_free: the reservation has %llu bytes, not %llu", hex(it->second), hex(bytes))};
    }
    const auto mapped = mappings_.lower_bound(address);
    if (mapped != mappings_.end() && mapped->first < address + bytes) {
      return {GPUSHARE_INVALID_STATE, base::format("va_free: 0x%llx is still mapped", hex(mapped->first))};
    }
    reservations_.erase(it);
  }
  if (context_.lost()) return {};
  GPUSHARE_ENTER_CONTEXT(context_);
  CaptureRelaxed relaxed(driver());
  return context_.status(driver().cuMemAddressFree(address, bytes), "cuMemAddressFree");
}

api::CUresult Memory::make_granule(uint64_t bytes, Granule* out_granule) {
  uint64_t room_for_pool = 0;
  {
    base::MutexLock lock(mutex_);
    const auto pooled = std::find_if(pool_.rbegin(), pool_.rend(),
                                     [bytes](const Pooled& each) { return each.bytes == bytes; });
    if (pooled != pool_.rend()) {
      *out_granule = pooled->granule;
      pool_.erase(std::next(pooled).base());
      pooled_bytes_ -= bytes;
      return api::CUDA_SUCCESS;
    }
    room_for_pool = limit_bytes_ - used_bytes_;  // used_bytes_ has the new ones already
  }
  (void)trim(room_for_pool);
  const api::CUmemAllocationProp properties = granule_properties();
  api::CUresult result = driver().cuMemCreate(out_granule, bytes, &properties, 0);
  if (result == api::CUDA_ERROR_OUT_OF_MEMORY && trim(0))
    result = driver().cuMemCreate(out_granule, bytes, &properties, 0);
  return result;
}

void Memory::recycle(const Physical& memory) {
  {
    base::MutexLock lock(mutex_);
    used_bytes_ -= memory.bytes;
    if (!context_.lost()) {
      for (const Granule granule : memory.granules) {
        pool_.push_back({granule, step_of(memory)});
        pooled_bytes_ += step_of(memory);
      }
    }
  }
  (void)trim(pool_limit_);
}

bool Memory::trim(uint64_t keep_bytes) {
  const Change change;
  std::vector<Granule> surplus;
  {
    base::MutexLock lock(mutex_);
    while (pooled_bytes_ > keep_bytes) {
      surplus.push_back(pool_.back().granule);
      pooled_bytes_ -= pool_.back().bytes;
      pool_.pop_back();
    }
  }
  if (surplus.empty()) return false;
  ContextScope scope(context_);
  if (!scope.status().ok()) return false;
  CaptureRelaxed relaxed(driver());
  for (const Granule granule : surplus) (void)context_.status(driver().cuMemRelease(granule), "cuMemRelease");
  return true;
}

base::Result<gpushare_backend_memory*> Memory::create_physical(uint64_t bytes) {
  GPUSHARE_RETURN_IF_ERROR(check_virtual());
  if (bytes == 0) return base::Status(GPUSHARE_INVALID_ARGUMENT, "phys_create of 0 bytes");
  GPUSHARE_RETURN_IF_ERROR(check_granules("phys_create: size", bytes));
  GPUSHARE_ENTER_CONTEXT(context_);
  const Change change;
  GPUSHARE_RETURN_IF_ERROR(take("phys_create", bytes));
  CaptureRelaxed relaxed(driver());
  auto memory = std::make_unique<Physical>();
  memory->bytes = bytes;
  Granule granule = 0;
  if (const api::CUresult result = make_granule(bytes, &granule); result != api::CUDA_SUCCESS) {
    give_back(bytes);
    if (result == api::CUDA_ERROR_OUT_OF_MEMORY) return out_of_memory("phys_create", bytes);
    return context_.status(result, "cuMemCreate");
  }
  memory->granules = {granule};
  return keep(std::move(memory));
}

base::Status Memory::split(Physical* memory) {
  Granule whole = 0;  // none: an attempt before this one had released it, and then failed
  bool holds_data = false;
  {
    base::MutexLock lock(mutex_);
    const auto it = memories_.find(memory);
    const bool live = it != memories_.end() && !memory->released && !memory->shared;
    // While another thread splits it, that thread has a mapping of it.
    const bool lacks = live && memory->granules.empty() && memory->mappings == 0;
    if (!live || (!lacks && (!memory->is_whole() || memory->bytes == granularity_bytes_)))
      return {};  // nothing to do, or enter_mappings() says what is wrong
    if (memory->mappings > 0)
      return {GPUSHARE_UNSUPPORTED,
              base::format("va_map: the memory is mapped as a whole, %llu bytes, and a part of it cannot be "
                           "mapped beside that: CUDA maps whole handles",
                           hex(memory->bytes))};
    if (!lacks) whole = memory->granules.front();
    holds_data = !lacks && memory->was_mapped;
    memory->granules.clear();  // nobody else maps it meanwhile
    ++memory->mappings;        // and it stays
  }
  std::vector<Granule> granules;
  const char* call = "cuMemCreate";
  // Without data the memory itself can be used again.
  if (whole != 0 && !holds_data) (void)context_.status(driver().cuMemRelease(whole), "cuMemRelease");
  api::CUresult result = make_granules(memory->bytes, memory->on_host, &granules);
  if (result == api::CUDA_SUCCESS && holds_data) {
    call = "copying its bytes";
    result = copy_granules(whole, granules, memory->bytes);
  }
  const bool done = result == api::CUDA_SUCCESS;
  if (holds_data && done) (void)context_.status(driver().cuMemRelease(whole), "cuMemRelease");
  if (!done)
    for (const Granule granule : granules)
      (void)context_.status(driver().cuMemRelease(granule), "cuMemRelease");
  const uint64_t bytes = memory->bytes;
  const bool on_host = memory->on_host;
  std::unique_ptr<Physical> dead;
  {
    base::MutexLock lock(mutex_);
    if (done) memory->granules = std::move(granules);
    if (!done && holds_data) memory->granules = {whole};
    dead = drop_mapping(memory);
  }
  dispose(std::move(dead));
  if (result == api::CUDA_ERROR_OUT_OF_MEMORY && on_host)
    return no_host_memory("va_map of a part", bytes, result);
  if (result == api::CUDA_ERROR_OUT_OF_MEMORY) return out_of_memory("va_map of a part", bytes);
  return context_.status(result, call);
}

api::CUresult Memory::make_granules(uint64_t bytes, bool on_host, std::vector<Granule>* out_granules) {
  const api::CUmemAllocationProp on_node = host_properties(host_node_);
  out_granules->reserve(bytes / granularity_bytes_);
  while (out_granules->size() < bytes / granularity_bytes_) {
    Granule granule = 0;
    const api::CUresult result = on_host ? driver().cuMemCreate(&granule, granularity_bytes_, &on_node, 0)
                                         : make_granule(granularity_bytes_, &granule);
    if (result != api::CUDA_SUCCESS) return result;
    out_granules->push_back(granule);
  }
  return api::CUDA_SUCCESS;
}

// Both are mapped for the copy, side by side.
api::CUresult Memory::copy_granules(Granule from, const std::vector<Granule>& to, uint64_t bytes) {
  const Driver& cu = driver();
  api::CUdeviceptr window = 0;
  api::CUresult result = cu.cuMemAddressReserve(&window, 2 * bytes, granularity_bytes_, 0, 0);
  if (result != api::CUDA_SUCCESS) return result;
  uint64_t mapped = 0;  // from the start
  result = cu.cuMemMap(window, bytes, 0, from, 0);
  if (result == api::CUDA_SUCCESS) mapped = bytes;
  for (size_t i = 0; result == api::CUDA_SUCCESS && i < to.size(); ++i) {
    result = cu.cuMemMap(window + mapped, granularity_bytes_, 0, to[i], 0);
    if (result == api::CUDA_SUCCESS) mapped += granularity_bytes_;
  }
  if (result == api::CUDA_SUCCESS) result = give_access(window, 2 * bytes, true);
  if (result == api::CUDA_SUCCESS) result = cu.cuMemcpyDtoDAsync(window + bytes, window, bytes, nullptr);
  if (result == api::CUDA_SUCCESS) result = cu.cuStreamSynchronize(nullptr);
  std::vector<uint64_t> steps(2, granularity_bytes_);
  steps[0] = bytes;
  unmap_quietly(window, mapped, bytes, steps);
  (void)context_.status(cu.cuMemAddressFree(window, 2 * bytes), "cuMemAddressFree");
  return result;
}

base::Result<gpushare_backend_memory*> Memory::create_host_physical(uint64_t bytes) {
  GPUSHARE_RETURN_IF_ERROR(check_virtual());
  if (!can_place_on_host())
    return base::Status(GPUSHARE_UNSUPPORTED,
                        "this driver or machine maps no host memory behind device addresses (CUDA 12.2 on)");
  if (bytes == 0) return base::Status(GPUSHARE_INVALID_ARGUMENT, "phys_create_host of 0 bytes");
  GPUSHARE_RETURN_IF_ERROR(check_granules("phys_create_host: size", bytes));
  GPUSHARE_ENTER_CONTEXT(context_);
  CaptureRelaxed relaxed(driver());
  const api::CUmemAllocationProp properties = host_properties(host_node_);
  auto memory = std::make_unique<Physical>();
  memory->bytes = bytes;
  memory->on_host = true;
  Granule granule = 0;
  if (const api::CUresult result = driver().cuMemCreate(&granule, bytes, &properties, 0);
      result != api::CUDA_SUCCESS) {
    if (result == api::CUDA_ERROR_OUT_OF_MEMORY) return no_host_memory("phys_create_host", bytes, result);
    base::Status status = context_.status(result, "cuMemCreate");
    if (context_.lost()) return status;
    // It gave some at open and does no longer: callers make do with pinned memory.
    return base::Status(GPUSHARE_UNSUPPORTED,
                        "phys_create_host: the driver gives no memory of the host: " + status.message(),
                        result);
  }
  memory->granules = {granule};
  return keep(std::move(memory));
}

gpushare_backend_memory* Memory::keep(std::unique_ptr<Physical> memory) {
  base::MutexLock lock(mutex_);
  Physical* raw = memory.get();
  memories_[raw] = std::move(memory);
  return reinterpret_cast<gpushare_backend_memory*>(raw);
}

std::unique_ptr<Memory::Physical> Memory::forget(Physical* memory) {
  const auto it = memories_.find(memory);
  std::unique_ptr<Physical> dead = std::move(it->second);
  memories_.erase(it);
  return dead;
}

std::unique_ptr<Memory::Physical> Memory::drop_mapping(Physical* memory) {
  --memory->mappings;
  if (!memory->released || memory->mappings > 0) return nullptr;
  return forget(memory);
}

void Memory::dispose(std::unique_ptr<Physical> memory) {
  if (memory == nullptr) return;
  const Change change;
  if (!memory->shared && !memory->on_host) {
    recycle(*memory);
    return;
  }
  if (!memory->imported && !memory->on_host) give_back(memory->bytes);
  ContextScope scope(context_);
  if (!scope.status().ok()) return;
  CaptureRelaxed relaxed(driver());
  for (const Granule granule : memory->granules)
    (void)context_.status(driver().cuMemRelease(granule), "cuMemRelease");
}

base::Status Memory::release_physical(gpushare_backend_memory* handle) {
  GPUSHARE_RETURN_IF_ERROR(check_virtual());
  std::unique_ptr<Physical> dead;
  {
    base::MutexLock lock(mutex_);
    const auto it = memories_.find(reinterpret_cast<Physical*>(handle));
    if (it == memories_.end() || it->second->released) return stale_memory();
    it->second->released = true;
    if (it->second->mappings > 0) return {};
    dead = forget(it->first);
  }
  dispose(std::move(dead));
  return {};
}

api::CUresult Memory::unmap_range(Address address, uint64_t bytes, uint64_t each_bytes,
                                  const std::vector<uint64_t>& steps, uint64_t* out_bytes) {
  const api::CUresult result = driver().cuMemUnmap(address, bytes);
  *out_bytes = result == api::CUDA_SUCCESS ? bytes : 0;
  // NVIDIA's samples unmap several handles side by side in one call; the documentation can be read to forbid it.
  if (result != api::CUDA_ERROR_INVALID_VALUE || bytes <= steps[0]) return result;
  while (*out_bytes < bytes) {
    const uint64_t step = steps[*out_bytes / each_bytes];
    const api::CUresult one = driver().cuMemUnmap(address + *out_bytes, step);
    if (one != api::CUDA_SUCCESS) return one;
    *out_bytes += step;
  }
  return api::CUDA_SUCCESS;
}

void Memory::unmap_quietly(Address address, uint64_t bytes, uint64_t each_bytes,
                           const std::vector<uint64_t>& steps) {
  uint64_t ignored = 0;
  if (bytes > 0)
    (void)context_.status(unmap_range(address, bytes, each_bytes, steps, &ignored), "cuMemUnmap");
}

base::Status Memory::enter_mappings(Address address, uint64_t bytes, Physical* const* memories,
                                    uint64_t count, uint64_t offset) {
  const uint64_t total = bytes * count;
  base::MutexLock lock(mutex_);
  for (uint64_t i = 0; i < count; ++i) {
    const auto it = memories_.find(memories[i]);
    if (it == memories_.end() || it->second->released) return stale_memory();
    const uint64_t held = it->second->bytes;
    if (offset > held || bytes > held - offset) {
      return {GPUSHARE_INVALID_ARGUMENT,
              base::format("va_map: offset %llu and size %llu pass the memory's end, %llu", hex(offset),
                           hex(bytes), hex(held))};
    }
    if (it->second->shared && bytes != held) {
      return {GPUSHARE_UNSUPPORTED,
              base::format("va_map: shared memory is mapped as a whole, %llu bytes: CUDA maps no part of a "
                           "handle, such as %llu bytes from %llu on",
                           hex(held), hex(bytes), hex(offset))};
    }
    if (it->second->shared && count > 1)
      return {GPUSHARE_INVALID_ARGUMENT, "va_map_run: shared memory is mapped by va_map"};
    if (it->second->granules.empty() || (bytes != held && it->second->is_whole()))
      return {GPUSHARE_INVALID_STATE, "va_map: another thread maps a part of the memory for the first time"};
  }
  auto holder = reservations_.upper_bound(address);
  if (holder == reservations_.begin() || (--holder, address - holder->first > holder->second) ||
      total > holder->second - (address - holder->first)) {
    return {GPUSHARE_INVALID_ARGUMENT,
            base::format("va_map: 0x%llx of %llu bytes lies in no reservation", hex(address), hex(total))};
  }
  auto after = mappings_.upper_bound(address);
  const bool next_overlaps = after != mappings_.end() && after->first < address + total;
  bool previous_overlaps = false;
  if (after != mappings_.begin()) {
    const auto before = std::prev(after);
    previous_overlaps = before->first + before->second.bytes > address;
  }
  if (next_overlaps || previous_overlaps) {
    return {GPUSHARE_INVALID_STATE, base::format("va_map: part of 0x%llx is mapped already", hex(address))};
  }
  for (uint64_t i = 0; i < count; ++i) {
    mappings_[address + i * bytes] = {bytes, memories[i]};
    memories[i]->was_mapped = true;
    ++memories[i]->mappings;
  }
  return {};
}

void Memory::drop_mappings(Address address, uint64_t bytes, uint64_t count) {
  std::vector<std::unique_ptr<Physical>> dead;
  {
    base::MutexLock lock(mutex_);
    for (uint64_t i = 0; i < count; ++i) {
      const auto it = mappings_.find(address + i * bytes);
      Physical* const memory = it->second.memory;
      mappings_.erase(it);
      if (auto last = drop_mapping(memory); last != nullptr) dead.push_back(std::move(last));
    }
  }
  for (auto& memory : dead) dispose(std::move(memory));
}

base::Status Memory::map(Address address, uint64_t bytes, gpushare_backend_memory* handle, uint64_t offset) {
  return map_parts(address, bytes, &handle, 1, offset);
}

base::Status Memory::map_run(Address address, uint64_t bytes, gpushare_backend_memory* const* handles,
                             uint64_t count) {
  return map_parts(address, bytes, handles, count, 0);
}

base::Status Memory::map_parts(Address address, uint64_t bytes, gpushare_backend_memory* const* handles,
                               uint64_t count, uint64_t offset) {
  GPUSHARE_RETURN_IF_ERROR(check_virtual());
  if (bytes == 0 || count == 0) return {GPUSHARE_INVALID_ARGUMENT, "va_map of 0 bytes"};
  GPUSHARE_RETURN_IF_ERROR(check_granules("va_map: size", bytes));
  GPUSHARE_RETURN_IF_ERROR(check_granules("va_map: address", address));
  GPUSHARE_RETURN_IF_ERROR(check_granules("va_map: offset", offset));
  if (count > UINT64_MAX / bytes) return {GPUSHARE_INVALID_ARGUMENT, "va_map_run: too many mappings"};
  GPUSHARE_ENTER_CONTEXT(context_);
  std::vector<Physical*> memories(count);
  for (uint64_t i = 0; i < count; ++i) memories[i] = reinterpret_cast<Physical*>(handles[i]);
  for (Physical* memory : memories) {
    bool is_part = false;
    {
      base::MutexLock lock(mutex_);
      const auto it = memories_.find(memory);
      is_part = it != memories_.end() && (bytes < it->second->bytes || it->second->granules.empty());
    }
    if (is_part) GPUSHARE_RETURN_IF_ERROR(split(memory));
  }
  // The mappings are entered before the driver is asked, so that no other call can take the range meanwhile.
  GPUSHARE_RETURN_IF_ERROR(enter_mappings(address, bytes, memories.data(), count, offset));

  CaptureRelaxed relaxed(driver());
  const char* call = "cuMemMap";
  api::CUresult result = api::CUDA_SUCCESS;
  const uint64_t total = count * bytes;
  uint64_t done = 0;
  // The handles of mapped memory do not change, and the mappings just entered keep it alive.
  std::vector<uint64_t> steps;
  for (const Physical* memory : memories) steps.push_back(step_of(*memory));
  while (done < total) {
    const uint64_t step = steps[done / bytes];
    result = driver().cuMemMap(address + done, step, 0,
                               memories[done / bytes]->granules[(offset + done % bytes) / step], 0);
    if (result != api::CUDA_SUCCESS) break;
    done += step;
  }
  if (result == api::CUDA_SUCCESS) {
    call = "cuMemSetAccess";
    result = give_access(address, total, memories[0]->writable);
  }
  if (result == api::CUDA_SUCCESS) return {};

  unmap_quietly(address, done, bytes, steps);
  drop_mappings(address, bytes, count);
  if (result == api::CUDA_ERROR_OUT_OF_MEMORY) return out_of_memory(call, total);
  return context_.status(result, call);
}

base::Status Memory::unmap(Address address, uint64_t bytes) {
  uint64_t done = 0;
  return unmap_run(address, bytes, 1, &done);
}

base::Status Memory::unmap_run(Address address, uint64_t bytes, uint64_t count, uint64_t* out_count) {
  GPUSHARE_RETURN_IF_ERROR(check_virtual());
  if (count == 0) return {GPUSHARE_INVALID_ARGUMENT, "va_unmap_run of no mapping"};
  bool shared = false;
  std::vector<uint64_t> steps;
  {
    base::MutexLock lock(mutex_);
    auto it = mappings_.find(address);
    for (uint64_t i = 0; i < count; ++i, ++it) {
      const Address at = address + i * bytes;
      if (it == mappings_.end() || it->first != at)
        return {GPUSHARE_NOT_FOUND, base::format("va_unmap: no mapping starts at 0x%llx", hex(at))};
      if (it->second.bytes != bytes)
        return {GPUSHARE_INVALID_ARGUMENT, base::format("va_unmap: the mapping has %llu bytes, not %llu",
                                                        hex(it->second.bytes), hex(bytes))};
      shared |= it->second.memory->shared;
      steps.push_back(step_of(*it->second.memory));
    }
  }
  if (shared && count > 1)
    return {GPUSHARE_INVALID_ARGUMENT, "va_unmap_run: shared memory is unmapped by va_unmap"};
  uint64_t unmapped = count * bytes;
  base::Status status;
  if (!context_.lost()) {
    GPUSHARE_ENTER_CONTEXT(context_);
    CaptureRelaxed relaxed(driver());
    status = context_.status(unmap_range(address, count * bytes, bytes, steps, &unmapped), "cuMemUnmap");
  }
  // A mapping of several granules that is unmapped in part counts as mapped.
  *out_count = unmapped / bytes;
  drop_mappings(address, bytes, *out_count);
  return status;
}

}  // namespace gpushare::device::cuda
