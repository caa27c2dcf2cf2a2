// address_space.hpp: the memory of one host or sim device: allocations, reservations, physical memory, mappings, and
// the capacity that they share. It reports every misuse that it can detect. Thread-safe; system calls are made under
// its lock.
//
// Storage. An allocation is an anonymous mapping that the kernel fills on first touch. Physical memory is a
// range of one sparse memory file that only ever grows at its end (file offsets are plentiful, file
// descriptors are not); a released range is punched out. Memory that other processes may map has a file of its
// own, so that a process that gets its descriptor sees nothing else (shared_file.hpp). Mapping it somewhere is mmap(MAP_FIXED |
// MAP_SHARED), so data moves with the physical memory; unmapping restores PROT_NONE. Imaginary addresses
// (sim) lie above 2^62, where no pointer is valid, and are the same in every run; each range still has
// storage behind it, unless the data are left out.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "base/flat_hash.hpp"
#include "base/mutex.hpp"
#include "base/status.hpp"
#include "device/support/shared_file.hpp"
#include "device/support/spare_files.hpp"
#include "gpushare/backend.h"

namespace gpushare::device {

struct AddressSpaceOptions {
  std::string backend;  // for messages
  uint64_t total_bytes = 0;
  uint64_t granularity_bytes = 0;  // of mappings: a power of two, a multiple of the page size
  bool imaginary = false;
  bool keep_data = true;  // false: copies have nothing to move; needs imaginary
};

class AddressSpace {
 public:
  using Address = gpushare_device_address;
  static constexpr uint64_t kPageBytes = 4096;  // alignment and granule of allocations

  // Errors: IO_ERROR (no memory file).
  static base::Result<std::unique_ptr<AddressSpace>> create(const AddressSpaceOptions& options);
  // Releases everything that is left.
  ~AddressSpace();
  AddressSpace(const AddressSpace&) = delete;
  AddressSpace& operator=(const AddressSpace&) = delete;

  uint64_t total_bytes() const { return options_.total_bytes; }
  uint64_t granularity_bytes() const { return options_.granularity_bytes; }
  uint64_t free_bytes() const;

  // One op of backend.h each. Sizes of allocations are rounded up to pages. Errors: INVALID_ARGUMENT (zero,
  // not a multiple, not reserved), NOT_FOUND (nothing starts there), INVALID_STATE (already mapped; still
  // mapped), INVALID_HANDLE (stale physical memory), DEVICE_OUT_OF_MEMORY (asked, free, total),
  // HOST_OUT_OF_MEMORY.
  base::Result<Address> alloc(uint64_t bytes);
  base::Status free(Address address);
  base::Result<void*> host_alloc(uint64_t bytes);
  base::Status host_free(void* pointer);
  base::Result<Address> reserve(uint64_t bytes);
  base::Status unreserve(Address address, uint64_t bytes);
  base::Result<gpushare_backend_memory*> create_physical(uint64_t bytes);
  // Physical memory on the host, which used_bytes_ does not count.
  base::Result<gpushare_backend_memory*> create_host_physical(uint64_t bytes);
  base::Status release_physical(gpushare_backend_memory* memory);
  base::Status map(Address address, uint64_t bytes, gpushare_backend_memory* memory, uint64_t offset);
  base::Status unmap(Address address, uint64_t bytes);
  // Each takes one system call if the memories also lie side by side in the file.
  base::Status map_run(Address address, uint64_t bytes, gpushare_backend_memory* const* memories,
                       uint64_t count);
  base::Status unmap_run(Address address, uint64_t bytes, uint64_t count, uint64_t* out_count);

  // Group "ipc"; needs data. Memory that was exported for reading can no longer be exported for writing, and nobody else
  // can write it. Errors: INVALID_ARGUMENT (not shared; exported for reading before; a descriptor that is not of
  // export_physical, of other bytes, or of less access), IO_ERROR.
  base::Result<gpushare_backend_memory*> create_shared(uint64_t bytes);
  base::Result<int32_t> export_physical(gpushare_backend_memory* memory, uint32_t access);
  base::Result<gpushare_backend_memory*> import_physical(int32_t descriptor, uint64_t bytes, uint32_t access);

  // Where the bytes of [address, address + bytes) are stored; null if data are not kept or bytes is 0.
  // Errors: INVALID_ARGUMENT unless the whole range lies in one allocation or in mapped ranges of one
  // reservation, none of them read-only if it is to be written.
  // `out_file` receives the file of the memory if the bytes are many and lie in one shared memory of this device. The
  // result then points into the file's own mapping, where pages of an earlier use need not be faulted in again. Hold the
  // file while the result is used.
  // `out_fresh` receives the place in the memory's file if the bytes are whole pages of one mapping to which nothing was
  // copied yet. A write to the file costs no page faults, which take several times as long as the copy.
  struct FreshPages {
    int file = -1;
    uint64_t offset = 0;
  };
  base::Result<char*> storage(Address address, uint64_t bytes, bool write,
                              std::shared_ptr<const SharedFile>* out_file = nullptr,
                              FreshPages* out_fresh = nullptr) const;

  // Describes in text what is still held ("2 allocations, 1 mapping"); empty if nothing is.
  std::string leaks() const;

 private:
  struct Range {
    uint64_t bytes;
    char* storage;
  };
  struct Memory {
    uint64_t bytes = 0;
    uint64_t file_offset = 0;
    std::shared_ptr<SharedFile> shared;  // shared memory of this device: not in memory_file_
    uint32_t exported = 0;               // the access with which it was exported; 0: it was not
    bool used = false;                   // it was mapped at some time, so it may hold data
    int imported_file = -1;              // shared memory of another device, which counts it
    bool imported() const { return imported_file >= 0; }
    bool on_host = false;
    bool counted() const { return !imported() && !on_host; }
    bool writable = true;
    uint64_t mappings = 0;
    bool released = false;
  };
  struct Mapping {
    uint64_t bytes;
    Memory* memory;
    uint64_t offset;  // of the memory
    mutable bool copied_to = false;
  };
  using RangeMap = std::map<Address, Range>;

  AddressSpace(const AddressSpaceOptions& options, int memory_file, Address first_imaginary);
  base::Status out_of_memory(const char* what, uint64_t bytes) const GPUSHARE_REQUIRES(mutex_);
  // Address space of `bytes`, aligned; storage with `protection` behind it.
  base::Result<Address> place(uint64_t bytes, uint64_t alignment, int protection, Range* out_range)
      GPUSHARE_REQUIRES(mutex_);
  void give_back(Address address, const Range& range) GPUSHARE_REQUIRES(mutex_);
  Address take_imaginary(uint64_t bytes, uint64_t alignment) GPUSHARE_REQUIRES(mutex_);
  void return_imaginary(Address address, uint64_t bytes) GPUSHARE_REQUIRES(mutex_);
  base::Result<gpushare_backend_memory*> grow_file(uint64_t bytes, bool on_host) GPUSHARE_REQUIRES(mutex_);
  // Gives unexported memory a new file, which can be sealed as needed.
  base::Status replace_file(Memory& memory) GPUSHARE_REQUIRES(mutex_);
  void drop_if_unused(Memory* memory) GPUSHARE_REQUIRES(mutex_);
  base::Status check_granules(const char* what, uint64_t value) const;
  // Maps `bytes` from `offset` on of each memory, side by side.
  base::Status map_parts(Address address, uint64_t bytes, Memory* const* memories, uint64_t count,
                         uint64_t offset) GPUSHARE_REQUIRES(mutex_);
  base::Status map_pages(char* target, uint64_t bytes, Memory* const* memories, uint64_t count,
                         uint64_t offset);
  // The range of `ranges` that holds all of [address, address + bytes), or end().
  static RangeMap::const_iterator holder(const RangeMap& ranges, Address address, uint64_t bytes);
  bool fully_mapped(Address address, uint64_t bytes, bool write) const GPUSHARE_REQUIRES(mutex_);

  const AddressSpaceOptions options_;
  const int memory_file_;  // -1 without data
  mutable base::Mutex mutex_;
  uint64_t used_bytes_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  uint64_t file_end_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  RangeMap allocations_ GPUSHARE_GUARDED_BY(mutex_);
  RangeMap reservations_ GPUSHARE_GUARDED_BY(mutex_);
  std::map<Address, Mapping> mappings_ GPUSHARE_GUARDED_BY(mutex_);
  base::FlatHashMap<void*, uint64_t> host_blocks_ GPUSHARE_GUARDED_BY(mutex_);
  base::FlatHashMap<Memory*, std::unique_ptr<Memory>> memories_ GPUSHARE_GUARDED_BY(mutex_);
  SpareFiles spare_files_ GPUSHARE_GUARDED_BY(mutex_);  // used_bytes_ and these together: at most total_bytes
  Address imaginary_end_ GPUSHARE_GUARDED_BY(mutex_);
  std::map<Address, uint64_t> imaginary_holes_
      GPUSHARE_GUARDED_BY(mutex_);  // below imaginary_end_, coalesced
};

}  // namespace gpushare::device
