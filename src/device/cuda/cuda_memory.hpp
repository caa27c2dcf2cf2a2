// cuda_memory.hpp: the memory of one CUDA device: allocations, pinned host memory, virtual memory, and the
// limit that all device memory stays under. Thread-safe; the driver is called outside the locks, bookkeeping
// aside.
//
// Capacity. The limit is what the options give this device of the GPU. The driver's free memory is read anew
// with every question, because other processes come and go.
//
// Physical memory is one handle each, because the driver's calls cost by handle: 64 MiB in granules of 2 MiB would cost
// 32 times as much. va_map may map a part of a memory, and cuMemMap maps whole handles only. Therefore a memory is split
// into granules when a part of it is to be mapped. Released handles are kept for reuse up to pool_bytes, because
// cuMemCreate clears its memory, which costs far more than a map. Pooled handles count as free, and the pool gives way
// before an allocation fails.
//
// Pinned memory. cuMemHostAlloc takes milliseconds and pins whole pages. Therefore small blocks are cut from chunks.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/flat_hash.hpp"
#include "base/mutex.hpp"
#include "base/status.hpp"
#include "device/cuda/cuda_context.hpp"
#include "gpushare/backend.h"

namespace gpushare::device::cuda {

struct MemoryOptions {
  uint64_t limit_bytes = 0;         // 0: all of the device
  double fraction = 1.0;            // of the device, when limit_bytes is 0
  uint64_t granularity_bytes = 0;   // 0: what the driver recommends
  uint64_t pool_bytes = 64u << 20;  // released granules kept
  uint64_t pinned_chunk_bytes = 8u << 20;
};

class Memory {
 public:
  using Address = gpushare_device_address;
  static constexpr uint64_t kAlignmentBytes = 256;  // of cuMemAlloc, as the driver documents

  // Errors: INVALID_ARGUMENT (granularity is no multiple of the driver's, limit below one granule).
  static base::Result<std::unique_ptr<Memory>> open(Context& context, const MemoryOptions& options);
  // Releases everything that is left, unless the context is lost.
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  uint64_t total_bytes() const { return limit_bytes_; }
  // The memory of the GPU that this process's devices have in use or pooled; nullopt if no device is open on that GPU.
  // Errors: UNSUPPORTED (memory of other processes is imported, and the system may count it or not).
  static base::Result<std::optional<uint64_t>> bytes_of_all(const Driver& driver, api::CUdevice gpu);
  // The driver's count of the process's memory agrees with bytes_of_all() only while no device of the process takes or
  // returns memory. Make a QuietLook before asking both; was_quiet() then says whether the two can be compared.
  // Thread-safe.
  class QuietLook {
   public:
    QuietLook();
    bool was_quiet() const;

   private:
    const uint64_t ended_;
    const bool quiet_;
  };
  // The free bytes within the limit. Asks the driver.
  base::Result<uint64_t> free_bytes();
  uint64_t granularity_bytes() const { return granularity_bytes_; }  // 0: no virtual memory

  // One op of backend.h each. Errors: INVALID_ARGUMENT, NOT_FOUND (nothing starts there), INVALID_STATE
  // (mapped, not mapped), INVALID_HANDLE (stale physical memory), DEVICE_OUT_OF_MEMORY (asked, free, limit),
  // HOST_OUT_OF_MEMORY (pinned memory), UNSUPPORTED (no virtual memory), DEVICE_LOST.
  base::Result<Address> alloc(uint64_t bytes);
  base::Status free(Address address);
  base::Result<void*> host_alloc(uint64_t bytes);
  base::Status host_free(void* pointer);
  base::Result<Address> reserve(uint64_t bytes);
  base::Status unreserve(Address address, uint64_t bytes);
  base::Result<gpushare_backend_memory*> create_physical(uint64_t bytes);
  // Host memory comes from the NUMA node that is nearest to the device. Errors: UNSUPPORTED, HOST_OUT_OF_MEMORY.
  bool can_place_on_host() const { return host_node_ >= 0; }
  base::Result<gpushare_backend_memory*> create_host_physical(uint64_t bytes);
  base::Status release_physical(gpushare_backend_memory* memory);
  base::Status map(Address address, uint64_t bytes, gpushare_backend_memory* memory, uint64_t offset);
  base::Status unmap(Address address, uint64_t bytes);
  // One cuMemSetAccess and one cuMemUnmap for all, which are the calls that cost most.
  base::Status map_run(Address address, uint64_t bytes, gpushare_backend_memory* const* handles,
                       uint64_t count);
  base::Status unmap_run(Address address, uint64_t bytes, uint64_t count, uint64_t* out_count);

  // Memory for other processes (cuda_shared_memory.cpp): one handle for all of it, because a descriptor stands
  // for one handle. Errors: also INVALID_ARGUMENT (not shared, no such descriptor), IO_ERROR.
  bool can_share() const { return can_share_; }
  base::Result<gpushare_backend_memory*> create_shared(uint64_t bytes);
  base::Result<int32_t> export_physical(gpushare_backend_memory* memory, uint32_t access);
  base::Result<gpushare_backend_memory*> import_physical(int32_t descriptor, uint64_t bytes, uint32_t access);

  // Checks, before the driver is asked to touch it, that [address, address + bytes) is memory, and writable if it is to be
  // written. Our own allocations and mappings are looked up here, without a driver call. For other addresses the driver
  // says whether both ends are memory that it knows. Errors: INVALID_ARGUMENT.
  base::Status check_access(const char* op, Address address, uint64_t bytes, bool write);

  // Describes in text what is still held ("2 allocations, 1 mapping"); empty if nothing is.
  std::string leaks() const;

 private:
  using Granule = api::CUmemGenericAllocationHandle;
  struct Physical {
    // One handle for all of its bytes, or one for each granularity_bytes(); none while it is being split, or after a split has
    // failed without content to keep: the next mapping tries again.
    std::vector<Granule> granules;
    uint64_t bytes = 0;
    bool is_whole() const { return granules.size() == 1; }
    bool was_mapped = false;
    bool shared = false;
    bool imported = false;  // another process counts it
    bool on_host = false;   // not counted
    bool writable = true;
    uint64_t mappings = 0;
    bool released = false;
  };
  struct Mapping {
    uint64_t bytes;
    Physical* memory;
  };
  struct Chunk {
    char* base;
    uint64_t bytes;
    std::map<uint64_t, uint64_t> holes;  // offset -> bytes, coalesced
    uint64_t blocks = 0;
  };
  struct HostBlock {
    uint64_t bytes;
    Chunk* chunk;  // null: the block is an allocation of its own
  };

  Memory(Context& context, const MemoryOptions& options, uint64_t limit_bytes, uint64_t granularity_bytes,
         bool can_share, int host_node);
  const Driver& driver() const { return context_.driver(); }
  base::Status out_of_memory(const char* call, uint64_t bytes);
  base::Status check_granules(const char* what, uint64_t value) const;
  base::Status check_virtual() const;
  base::Status check_shareable() const;
  gpushare_backend_memory* keep(std::unique_ptr<Physical> memory);
  // Drops a memory that nothing refers to any more.
  void dispose(std::unique_ptr<Physical> memory);
  // Read and write, or what the memory allows.
  api::CUresult give_access(Address address, uint64_t bytes, bool writable);
  api::CUmemAllocationProp granule_properties() const;
  static api::CUmemAllocationProp host_properties(int node);
  // As base/cuda_host_node.hpp.
  static int host_node_of(const Driver& driver, api::CUdevice device, uint64_t granularity);

  // While one lives, the books and the driver may differ. It is made before an entry of the books, and goes after the
  // driver call of that entry.
  class Change {
   public:
    Change();
    ~Change();
    Change(const Change&) = delete;
    Change& operator=(const Change&) = delete;
  };

  // Takes `bytes` of the limit, so that the check and the driver's call need no common lock.
  base::Status take(const char* call, uint64_t bytes);
  void give_back(uint64_t bytes);
  // Creates or reuses a handle of so many bytes. Pooled ones of other sizes give way.
  api::CUresult make_granule(uint64_t bytes, Granule* out_granule);
  void recycle(const Physical& memory);
  // Splits memory into handles of one granule each, with its content, because a part of it is to be mapped. Errors:
  // UNSUPPORTED (the memory is mapped as a whole), DEVICE_OUT_OF_MEMORY or HOST_OUT_OF_MEMORY (memory with content is there
  // twice during the split).
  base::Status split(Physical* memory);
  api::CUresult make_granules(uint64_t bytes, bool on_host, std::vector<Granule>* out_granules);
  api::CUresult copy_granules(Granule from, const std::vector<Granule>& to, uint64_t bytes);
  // Gives pooled granules back to the driver until at most `keep_bytes` are left. True if any went.
  bool trim(uint64_t keep_bytes);
  // Unmaps mappings of `each_bytes` side by side, made of handles of steps[i] bytes: in one call, or handle by handle
  // where the driver wants that. *out_bytes: the bytes that are unmapped, from the start.
  api::CUresult unmap_range(Address address, uint64_t bytes, uint64_t each_bytes,
                            const std::vector<uint64_t>& steps, uint64_t* out_bytes);
  base::Status map_parts(Address address, uint64_t bytes, gpushare_backend_memory* const* handles,
                         uint64_t count, uint64_t offset);
  // Enters mappings side by side, all or none, and takes them out again.
  base::Status enter_mappings(Address address, uint64_t bytes, Physical* const* memories, uint64_t count,
                              uint64_t offset);
  void drop_mappings(Address address, uint64_t bytes, uint64_t count);
  // Unmaps what a failed map() had done; errors of unmapping are dropped, so that the first error is reported.
  void unmap_quietly(Address address, uint64_t bytes, uint64_t each_bytes,
                     const std::vector<uint64_t>& steps);
  // The bytes of the handles behind a mapping of `bytes` of that memory.
  uint64_t step_of(const Physical& memory) const {
    return memory.is_whole() ? memory.bytes : granularity_bytes_;
  }
  void* carve(Chunk& chunk, uint64_t bytes) GPUSHARE_REQUIRES(mutex_);
  // Forgets a mapping. If it was the last one of a memory that is released already, returns that memory, for dispose().
  std::unique_ptr<Physical> drop_mapping(Physical* memory) GPUSHARE_REQUIRES(mutex_);
  std::unique_ptr<Physical> forget(Physical* memory) GPUSHARE_REQUIRES(mutex_);

  Context& context_;
  const uint64_t limit_bytes_;
  const uint64_t granularity_bytes_;
  const bool can_share_;
  const int host_node_;  // -1: the driver places no physical memory on the host
  const uint64_t pool_limit_;
  const uint64_t pinned_chunk_bytes_;

  mutable base::Mutex mutex_;
  uint64_t used_bytes_ GPUSHARE_GUARDED_BY(mutex_) =
      0;  // allocations and live physical memory, pool not counted
  std::map<Address, uint64_t> allocations_ GPUSHARE_GUARDED_BY(mutex_);
  std::map<Address, uint64_t> reservations_ GPUSHARE_GUARDED_BY(mutex_);
  std::map<Address, Mapping> mappings_ GPUSHARE_GUARDED_BY(mutex_);
  base::FlatHashMap<Physical*, std::unique_ptr<Physical>> memories_ GPUSHARE_GUARDED_BY(mutex_);
  struct Pooled {
    Granule granule;
    uint64_t bytes;
  };
  std::vector<Pooled> pool_ GPUSHARE_GUARDED_BY(mutex_);
  uint64_t pooled_bytes_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  base::FlatHashMap<void*, HostBlock> host_blocks_ GPUSHARE_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Chunk>> chunks_ GPUSHARE_GUARDED_BY(mutex_);
};

}  // namespace gpushare::device::cuda
