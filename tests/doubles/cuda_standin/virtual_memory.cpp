// Virtual memory: reserved ranges, physical memory, mappings, and physical memory shared between processes.
//
// Physical memory is a range of one memory file; mapping it is mmap(MAP_FIXED | MAP_SHARED) over the storage of the addresses, so that
// data move with the physical memory. A range is readable only after cuMemSetAccess, and PROT_NONE again after cuMemUnmap. Shared
// memory has a memory file of its own.
// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "memory.hpp"

using namespace standin;  // NOLINT(google-build-using-namespace): entry points live in the global namespace

namespace {

constexpr const char* kSharedName = "cuda-standin-shared";

// Whether physical memory of a node of the host can be had, and how many nodes there are.
bool has_host_nodes() {
  const World& w = world();
  return w.setting("driver_version") >= 12020 && w.setting("host_numa_memory") != 0;
}
uint64_t host_nodes() {
  return std::max<int64_t>(static_cast<int64_t>(world().setting("host_numa_id")), 0) + 1;
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
  if (!physical.imported && !physical.on_host) give_memory(physical.device, physical.bytes);
  if (physical.own_file >= 0) {
    (void)close(physical.own_file);
    physical.died = "released";
    return;
  }
  (void)fallocate(w.memory_file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  static_cast<off_t>(physical.file_offset), static_cast<off_t>(physical.bytes));
  physical.died = "released";
}

// Nobody may touch these pages until access is given. By the system call, like the host device: ThreadSanitizer is to keep its
// record of a range that is mapped again.
bool map_over(uint64_t address, uint64_t bytes, int flags, int file, uint64_t offset) {
  return syscall(SYS_mmap, storage_of(address), bytes, PROT_NONE, MAP_FIXED | flags, file, offset) != -1;
}

// An access to the block that the host has not seen finish.
const Access* unfinished(const Block& block) {
  for (const Access& access : block.accesses) {
    if (!covered(world().observed, access)) return &access;
  }
  return nullptr;
}

void wait_for_all(Call& call) {
  std::vector<Stream*> streams;
  for (const auto& [raw, stream] : world().streams) streams.push_back(stream.get());
  for (Stream* stream : streams) wait_completed(call.lock(), stream, stream->enqueued);
}

}  // namespace

STANDIN_API CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp* prop,
                                                   int option) {
  STANDIN_ENTRY(cuMemGetAllocationGranularity);
  if (prop == nullptr || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED || option < 0 || option > 1)
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "bad properties or option");
  // Before 12.2 the driver knows no such place.
  if (prop->location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA && !has_host_nodes())
    return world().setting("driver_version") < 12020 ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_NOT_SUPPORTED;
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
      place_on_device(bytes, std::max<uint64_t>(alignment, world().setting("granularity_bytes")), PROT_NONE);
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
  unplace_on_device(address, bytes);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuMemCreate(CUmemGenericAllocationHandle* out_handle, size_t bytes,
                                 const CUmemAllocationProp* prop, unsigned long long flags) {
  STANDIN_ENTRY(cuMemCreate);
  if (call.unsafe_during_capture()) return call.verdict();
  World& w = world();
  const bool on_host = prop != nullptr && prop->location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA;
  if (on_host && w.setting("host_create_fails") != 0)
    return static_cast<CUresult>(w.setting("host_create_fails"));
  if (on_host && !has_host_nodes()) return CUDA_ERROR_NOT_SUPPORTED;
  if (prop == nullptr || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED || flags != 0 ||
      (prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE && !on_host) || prop->location.id < 0 ||
      static_cast<uint64_t>(prop->location.id) >= (on_host ? host_nodes() : w.setting("devices")) ||
      prop->win32HandleMetaData != nullptr || prop->requestedHandleTypes < 0 ||
      prop->requestedHandleTypes > CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "bad properties or flags");
  if (bytes == 0 || !granular(bytes)) return bad_granules(call, "the size", bytes);
  if (!on_host && !take_memory(prop->location.id, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  const auto no_memory = [&] {
    if (!on_host) give_memory(prop->location.id, bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
  };
  Physical physical;
  physical.born = call.text();
  physical.on_host = on_host;
  physical.device = prop->location.id;
  physical.bytes = bytes;
  if (prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    physical.own_file = memfd_create(kSharedName, MFD_CLOEXEC);
    if (physical.own_file < 0) return no_memory();
    if (ftruncate(physical.own_file, static_cast<off_t>(bytes)) != 0) {
      (void)close(physical.own_file);
      return no_memory();
    }
  } else {
    physical.file_offset = w.memory_file_end;
    if (ftruncate(w.memory_file, static_cast<off_t>(w.memory_file_end + bytes)) != 0) return no_memory();
    w.memory_file_end += bytes;
  }
  fill_new(physical.own_file >= 0 ? physical.own_file : w.memory_file, physical.file_offset, bytes);
  cost(Cost::kCreate);
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
  cost(Cost::kRelease);
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
  if (bytes < physical->second.bytes)
    return call.misuse(CUDA_ERROR_INVALID_VALUE,
                       "a part of the physical memory: a handle is mapped as a whole");
  auto reservation = w.reservations.upper_bound(address);
  if (reservation == w.reservations.begin() ||
      (--reservation, address + bytes > reservation->first + reservation->second.bytes))
    return call.misuse(CUDA_ERROR_INVALID_VALUE, hex(address) + " lies in no reserved range");
  const auto next = w.blocks.lower_bound(address);
  if (block_at(address) != nullptr || (next != w.blocks.end() && next->first < address + bytes))
    return call.misuse(CUDA_ERROR_INVALID_VALUE, hex(address) + " is mapped already");
  if (!map_over(address, bytes, MAP_SHARED,
                physical->second.own_file >= 0 ? physical->second.own_file : w.memory_file,
                physical->second.file_offset))
    return CUDA_ERROR_OUT_OF_MEMORY;
  ++physical->second.mappings;
  cost(Cost::kMap);
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
    if (it->second.device != access->location.id && !w.physicals.at(it->second.physical).on_host)
      return call.misuse(CUDA_ERROR_INVALID_VALUE, "access for another device is not modelled");
    at += it->second.bytes;
  }
  for (uint64_t at = address; at < address + bytes;) {
    Block& block = w.blocks[at];
    block.accessible = true;
    block.device = access->location.id;
    block.writable = access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    cost(Cost::kSetAccess);
    mprotect(reinterpret_cast<void*>(storage_of(at)), block.bytes,
             block.writable ? PROT_READ | PROT_WRITE : PROT_READ);
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
    (void)map_over(at, block.bytes, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    cost(Cost::kUnmap);
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
  // A descriptor from another process may be anything, so a wrong one is no misuse.
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
