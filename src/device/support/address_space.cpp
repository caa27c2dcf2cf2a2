// SPDX-License-Identifier: Apache-2.0
#include "device/support/address_space.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "base/round_up.hpp"
#include "base/units.hpp"

namespace gpushare::device {
namespace {

constexpr uint64_t kImaginaryBase = 1ull << 62;
constexpr uint64_t kImaginaryStride = 1ull << 52;  // address space of one device
constexpr uint64_t kImaginaryDevices = 256;        // until ranges of devices repeat
constexpr uint64_t kLargestBytes = 1ull << 46;     // of one range: what an x86-64 process can map at most

constexpr uint64_t kLeastFileBytes = 64 << 10;  // below that holding the file costs more than it gains

using base::round_up;

base::Status system_error(int32_t code, const char* what, uint64_t bytes) {
  const int error = errno;
  return {code,
          base::format("%s of %s failed: %s", what, base::format_bytes(bytes).c_str(), std::strerror(error)),
          error};
}

// As on a GPU, a child of a fork does not have the device memory of its parent: a child that writes there must not change
// what the parent reads. It faults.
void keep_from_children(void* pages, uint64_t bytes) {
  (void)madvise(pages, bytes, MADV_DONTFORK);
}

// Maps other pages over those of a reservation. Not by mmap(): ThreadSanitizer would forget who has accessed these addresses, and
// writes its record of every page to do so, which was half of some tests' time. Accesses before and after must be ordered anyway.
bool map_over(char* pages, uint64_t bytes, int protection, int flags, int file, uint64_t offset) {
  return syscall(SYS_mmap, pages, bytes, protection, MAP_FIXED | MAP_NORESERVE | flags, file, offset) != -1;
}

// Nothing is mapped there any more, and an access faults.
bool clear_pages(char* pages, uint64_t bytes) {
  if (!map_over(pages, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) return false;
  keep_from_children(pages, bytes);
  return true;
}

char* new_pages(uint64_t bytes, int protection) {
  void* pages = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) return nullptr;
  keep_from_children(pages, bytes);
  return static_cast<char*>(pages);
}

char* map_aligned_pages(uint64_t bytes, uint64_t alignment, int protection) {
  if (alignment <= AddressSpace::kPageBytes) return new_pages(bytes, protection);
  char* pages = new_pages(bytes + alignment, protection);
  if (pages == nullptr) return nullptr;
  const uint64_t start = reinterpret_cast<uint64_t>(pages);
  const uint64_t head = round_up(start, alignment) - start;
  if (head > 0) munmap(pages, head);
  if (alignment > head) munmap(pages + head + bytes, alignment - head);
  return pages + head;
}

void count(std::string& text, size_t number, const char* one, const char* many) {
  if (number == 0) return;
  if (!text.empty()) text += ", ";
  text += std::to_string(number) + " " + (number == 1 ? one : many);
}

}  // namespace

base::Result<std::unique_ptr<AddressSpace>> AddressSpace::create(const AddressSpaceOptions& options) {
  int file = -1;
  if (options.keep_data) {
    file = memfd_create("gpushare-device", MFD_CLOEXEC);
    if (file < 0)
      return system_error(GPUSHARE_IO_ERROR, "memfd_create for device memory", options.total_bytes);
  }
  static std::atomic<uint64_t> next_device{0};
  const uint64_t device = options.imaginary ? next_device.fetch_add(1) % kImaginaryDevices : 0;
  return std::unique_ptr<AddressSpace>(
      new AddressSpace(options, file, kImaginaryBase + device * kImaginaryStride));
}

AddressSpace::AddressSpace(const AddressSpaceOptions& options, int memory_file, Address first_imaginary)
    : options_(options), memory_file_(memory_file), imaginary_end_(first_imaginary) {}

AddressSpace::~AddressSpace() {
  base::MutexLock lock(mutex_);
  // A reservation's storage carries its mappings with it.
  for (const auto& [address, range] : allocations_) give_back(address, range);
  for (const auto& [address, range] : reservations_) give_back(address, range);
  for (const auto& [pointer, bytes] : host_blocks_) munmap(pointer, bytes);
  for (const auto& [raw, memory] : memories_)
    if (memory->imported()) close(memory->imported_file);
  if (memory_file_ >= 0) close(memory_file_);
}

uint64_t AddressSpace::free_bytes() const {
  base::MutexLock lock(mutex_);
  return options_.total_bytes - used_bytes_;
}

base::Status AddressSpace::out_of_memory(const char* what, uint64_t bytes) const {
  const uint64_t free_now = options_.total_bytes - used_bytes_;
  return {
      GPUSHARE_DEVICE_OUT_OF_MEMORY,
      base::format(
          "%s: %s of %s asked, %s of %s free. Free device memory, or open the device with a larger total_gib",
          options_.backend.c_str(), what, base::format_bytes(bytes).c_str(),
          base::format_bytes(free_now).c_str(), base::format_bytes(options_.total_bytes).c_str())};
}

AddressSpace::Address AddressSpace::take_imaginary(uint64_t bytes, uint64_t alignment) {
  for (auto hole = imaginary_holes_.begin(); hole != imaginary_holes_.end(); ++hole) {
    const auto [start, length] = *hole;
    const Address address = round_up(start, alignment);
    if (address - start > length || length - (address - start) < bytes) continue;
    imaginary_holes_.erase(hole);
    if (address > start) imaginary_holes_[start] = address - start;
    if (start + length > address + bytes)
      imaginary_holes_[address + bytes] = start + length - address - bytes;
    return address;
  }
  const Address address = round_up(imaginary_end_, alignment);
  if (address > imaginary_end_) imaginary_holes_[imaginary_end_] = address - imaginary_end_;
  imaginary_end_ = address + bytes;
  return address;
}

void AddressSpace::return_imaginary(Address address, uint64_t bytes) {
  auto next = imaginary_holes_.lower_bound(address);
  if (next != imaginary_holes_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == address) {
      address = previous->first;
      bytes += previous->second;
      imaginary_holes_.erase(previous);
    }
  }
  if (next != imaginary_holes_.end() && address + bytes == next->first) {
    bytes += next->second;
    imaginary_holes_.erase(next);
  }
  if (address + bytes == imaginary_end_) {
    imaginary_end_ = address;
  } else {
    imaginary_holes_[address] = bytes;
  }
}

base::Result<AddressSpace::Address> AddressSpace::place(uint64_t bytes, uint64_t alignment, int protection,
                                                        Range* out_range) {
  char* storage = nullptr;
  if (options_.keep_data) {
    storage = map_aligned_pages(bytes, alignment, protection);
    if (storage == nullptr) return system_error(GPUSHARE_HOST_OUT_OF_MEMORY, "mmap for device memory", bytes);
  }
  *out_range = {bytes, storage};
  // One page between imaginary ranges, so that an overrun is never a valid address.
  return options_.imaginary ? take_imaginary(bytes + kPageBytes, alignment)
                            : reinterpret_cast<Address>(storage);
}

void AddressSpace::give_back(Address address, const Range& range) {
  if (range.storage != nullptr) munmap(range.storage, range.bytes);
  if (options_.imaginary) return_imaginary(address, range.bytes + kPageBytes);
}

base::Result<AddressSpace::Address> AddressSpace::alloc(uint64_t bytes) {
  base::MutexLock lock(mutex_);
  if (bytes == 0) return base::Status(GPUSHARE_INVALID_ARGUMENT, "an allocation of 0 bytes");
  const uint64_t free_now = options_.total_bytes - used_bytes_;
  if (bytes > free_now || round_up(bytes, kPageBytes) > free_now)
    return out_of_memory("an allocation", bytes);
  Range range{};
  GPUSHARE_ASSIGN_OR_RETURN(const Address address,
                            place(round_up(bytes, kPageBytes), kPageBytes, PROT_READ | PROT_WRITE, &range));
  allocations_[address] = range;
  used_bytes_ += range.bytes;
  return address;
}

base::Status AddressSpace::free(Address address) {
  base::MutexLock lock(mutex_);
  const auto it = allocations_.find(address);
  if (it == allocations_.end()) {
    return {GPUSHARE_NOT_FOUND, base::format("no live allocation starts at 0x%llx (freed twice?)",
                                             static_cast<unsigned long long>(address))};
  }
  used_bytes_ -= it->second.bytes;
  give_back(address, it->second);
  allocations_.erase(it);
  return {};
}

base::Result<void*> AddressSpace::host_alloc(uint64_t bytes) {
  if (bytes == 0) return base::Status(GPUSHARE_INVALID_ARGUMENT, "a host allocation of 0 bytes");
  base::MutexLock lock(mutex_);
  char* pages =
      bytes > kLargestBytes ? nullptr : new_pages(round_up(bytes, kPageBytes), PROT_READ | PROT_WRITE);
  if (pages == nullptr) {
    errno = ENOMEM;
    return system_error(GPUSHARE_HOST_OUT_OF_MEMORY, "a host allocation", bytes);
  }
  host_blocks_[pages] = round_up(bytes, kPageBytes);
  return static_cast<void*>(pages);
}

base::Status AddressSpace::host_free(void* pointer) {
  base::MutexLock lock(mutex_);
  const auto it = host_blocks_.find(pointer);
  if (it == host_blocks_.end()) {
    return {GPUSHARE_NOT_FOUND, base::format("no live host allocation starts at %p (freed twice?)", pointer)};
  }
  munmap(pointer, it->second);
  host_blocks_.erase(it);
  return {};
}

base::Status AddressSpace::check_granules(const char* what, uint64_t value) const {
  if (value % options_.granularity_bytes == 0) return {};
  return {GPUSHARE_INVALID_ARGUMENT,
          base::format("the %s 0x%llx is not a multiple of the mapping granularity, %s", what,
                       static_cast<unsigned long long>(value),
                       base::format_bytes(options_.granularity_bytes).c_str())};
}

base::Result<AddressSpace::Address> AddressSpace::reserve(uint64_t bytes) {
  GPUSHARE_RETURN_IF_ERROR(check_granules("size", bytes));
  if (bytes == 0 || bytes > kLargestBytes) {
    return base::Status(GPUSHARE_INVALID_ARGUMENT, "a reservation of " + base::format_bytes(bytes) +
                                                       "; allowed is one granule to " +
                                                       base::format_bytes(kLargestBytes));
  }
  base::MutexLock lock(mutex_);
  Range range{};
  GPUSHARE_ASSIGN_OR_RETURN(const Address address,
                            place(bytes, options_.granularity_bytes, PROT_NONE, &range));
  reservations_[address] = range;
  return address;
}

base::Status AddressSpace::unreserve(Address address, uint64_t bytes) {
  base::MutexLock lock(mutex_);
  const auto it = reservations_.find(address);
  if (it == reservations_.end() || it->second.bytes != bytes) {
    return {GPUSHARE_NOT_FOUND,
            base::format("no reservation of %s starts at 0x%llx; whole reservations are given back",
                         base::format_bytes(bytes).c_str(), static_cast<unsigned long long>(address))};
  }
  const auto mapped = mappings_.lower_bound(address);
  if (mapped != mappings_.end() && mapped->first < address + bytes) {
    return {GPUSHARE_INVALID_STATE, base::format("0x%llx in the reservation is still mapped; unmap it first",
                                                 static_cast<unsigned long long>(mapped->first))};
  }
  give_back(address, it->second);
  reservations_.erase(it);
  return {};
}

base::Result<gpushare_backend_memory*> AddressSpace::create_physical(uint64_t bytes) {
  GPUSHARE_RETURN_IF_ERROR(check_granules("size", bytes));
  if (bytes == 0) return base::Status(GPUSHARE_INVALID_ARGUMENT, "physical memory of 0 bytes");
  base::MutexLock lock(mutex_);
  if (bytes > options_.total_bytes - used_bytes_) return out_of_memory("physical memory", bytes);
  return grow_file(bytes, false);
}

base::Result<gpushare_backend_memory*> AddressSpace::create_host_physical(uint64_t bytes) {
  GPUSHARE_RETURN_IF_ERROR(check_granules("size", bytes));
  if (bytes == 0) return base::Status(GPUSHARE_INVALID_ARGUMENT, "physical memory of 0 bytes");
  base::MutexLock lock(mutex_);
  return grow_file(bytes, true);
}

base::Result<gpushare_backend_memory*> AddressSpace::grow_file(uint64_t bytes, bool on_host) {
  if (memory_file_ >= 0 && ftruncate(memory_file_, static_cast<off_t>(file_end_ + bytes)) != 0) {
    return system_error(GPUSHARE_HOST_OUT_OF_MEMORY, "growing the memory file", bytes);
  }
  auto memory = std::make_unique<Memory>();
  memory->bytes = bytes;
  memory->file_offset = file_end_;
  memory->on_host = on_host;
  Memory* raw = memory.get();
  memories_[raw] = std::move(memory);
  file_end_ += bytes;
  if (!on_host) used_bytes_ += bytes;
  return reinterpret_cast<gpushare_backend_memory*>(raw);
}

base::Result<gpushare_backend_memory*> AddressSpace::create_shared(uint64_t bytes) {
  GPUSHARE_RETURN_IF_ERROR(check_granules("size", bytes));
  if (bytes == 0) return base::Status(GPUSHARE_INVALID_ARGUMENT, "physical memory of 0 bytes");
  auto memory = std::make_unique<Memory>();
  base::MutexLock lock(mutex_);
  if (bytes > options_.total_bytes - used_bytes_) return out_of_memory("shared physical memory", bytes);
  spare_files_.limit(options_.total_bytes - used_bytes_ - bytes);
  memory->shared = spare_files_.take(bytes);
  if (memory->shared == nullptr) {
    GPUSHARE_ASSIGN_OR_RETURN(memory->shared, SharedFile::create(bytes));
  }
  memory->bytes = bytes;
  Memory* raw = memory.get();
  memories_[raw] = std::move(memory);
  used_bytes_ += bytes;
  return reinterpret_cast<gpushare_backend_memory*>(raw);
}

base::Result<int32_t> AddressSpace::export_physical(gpushare_backend_memory* handle, uint32_t access) {
  base::MutexLock lock(mutex_);
  Memory* memory = reinterpret_cast<Memory*>(handle);
  if (!memories_.contains(memory) || memory->released) {
    return base::Status(GPUSHARE_INVALID_HANDLE, "not live physical memory (released?)");
  }
  if (memory->shared == nullptr) {
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        "only memory that phys_create_shared of this device made can be exported");
  }
  const bool read_only = access == GPUSHARE_ACCESS_READ;
  if (!read_only && memory->exported == GPUSHARE_ACCESS_READ) {
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        "the memory was exported for reading, so that nobody else can write it: it cannot be "
                        "exported for writing too");
  }
  if (memory->exported == 0) {
    GPUSHARE_ASSIGN_OR_RETURN(const bool sealed, memory->shared->seal(read_only));
    if (!sealed) {  // its file had another use in its earlier life
      GPUSHARE_RETURN_IF_ERROR(replace_file(*memory));
      GPUSHARE_RETURN_IF_ERROR(memory->shared->seal(read_only).status());
    }
  }
  // A new open file, whose mode mmap checks; a duplicate would carry the right to write.
  GPUSHARE_ASSIGN_OR_RETURN(const int file, memory->shared->open_again(read_only ? O_RDONLY : O_RDWR));
  if (memory->exported == 0) memory->exported = access;
  return file;
}

base::Status AddressSpace::replace_file(Memory& memory) {
  GPUSHARE_ASSIGN_OR_RETURN(std::shared_ptr<SharedFile> file, SharedFile::create(memory.bytes));
  if (memory.used) std::memcpy(file->pages(), memory.shared->pages(), memory.bytes);
  for (const auto& [address, mapping] : mappings_) {
    if (mapping.memory != &memory) continue;
    const auto reservation = holder(reservations_, address, mapping.bytes);
    char* target = reservation->second.storage + (address - reservation->first);
    if (!file->map_at(target, mapping.bytes, mapping.offset))
      return system_error(GPUSHARE_HOST_OUT_OF_MEMORY, "mapping shared memory", mapping.bytes);
  }
  memory.shared = std::move(file);
  return {};
}

base::Result<gpushare_backend_memory*> AddressSpace::import_physical(int32_t descriptor, uint64_t bytes,
                                                                     uint32_t access) {
  GPUSHARE_RETURN_IF_ERROR(check_granules("size", bytes));
  if (bytes == 0 || !SharedFile::is_shared(descriptor)) {
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("descriptor %d is not of phys_export", descriptor));
  }
  struct stat file {};
  const int mode = fcntl(descriptor, F_GETFL);
  if (mode < 0 || fstat(descriptor, &file) != 0)
    return system_error(GPUSHARE_IO_ERROR, "asking a descriptor of shared memory", bytes);
  if (static_cast<uint64_t>(file.st_size) != bytes) {
    return base::Status(
        GPUSHARE_INVALID_ARGUMENT,
        base::format("the exported memory has %lld bytes, the import names %llu",
                     static_cast<long long>(file.st_size), static_cast<unsigned long long>(bytes)));
  }
  if (access == GPUSHARE_ACCESS_READ_WRITE && (mode & O_ACCMODE) != O_RDWR) {
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        "the memory was exported for reading; import it with GPUSHARE_ACCESS_READ");
  }
  auto memory = std::make_unique<Memory>();
  memory->bytes = bytes;
  memory->imported_file = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  if (!memory->imported())
    return system_error(GPUSHARE_IO_ERROR, "keeping a descriptor of shared memory", bytes);
  memory->writable = access == GPUSHARE_ACCESS_READ_WRITE;
  base::MutexLock lock(mutex_);
  Memory* raw = memory.get();
  memories_[raw] = std::move(memory);
  return reinterpret_cast<gpushare_backend_memory*>(raw);
}

void AddressSpace::drop_if_unused(Memory* memory) {
  if (!memory->released || memory->mappings > 0) return;
  if (memory->imported()) {
    close(memory->imported_file);
  } else if (memory->shared != nullptr) {
    spare_files_.limit(options_.total_bytes - (used_bytes_ - memory->bytes));
    spare_files_.give(std::move(memory->shared));
  } else if (memory_file_ >= 0) {
    // A failure only delays the return of the pages to the system until the device closes.
    (void)fallocate(memory_file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                    static_cast<off_t>(memory->file_offset), static_cast<off_t>(memory->bytes));
  }
  if (memory->counted()) used_bytes_ -= memory->bytes;
  memories_.erase(memory);
}

base::Status AddressSpace::release_physical(gpushare_backend_memory* handle) {
  base::MutexLock lock(mutex_);
  Memory* memory = reinterpret_cast<Memory*>(handle);
  const auto it = memories_.find(memory);
  if (it == memories_.end() || memory->released) {
    return {GPUSHARE_INVALID_HANDLE, "not live physical memory (released twice?)"};
  }
  memory->released = true;
  drop_if_unused(memory);
  return {};
}

base::Status AddressSpace::map(Address address, uint64_t bytes, gpushare_backend_memory* handle,
                               uint64_t offset) {
  base::MutexLock lock(mutex_);
  Memory* const memory = reinterpret_cast<Memory*>(handle);
  return map_parts(address, bytes, &memory, 1, offset);
}

base::Status AddressSpace::map_run(Address address, uint64_t bytes, gpushare_backend_memory* const* handles,
                                   uint64_t count) {
  base::MutexLock lock(mutex_);
  std::vector<Memory*> memories(count);
  for (uint64_t i = 0; i < count; ++i) memories[i] = reinterpret_cast<Memory*>(handles[i]);
  return map_parts(address, bytes, memories.data(), count, 0);
}

base::Status AddressSpace::map_parts(Address address, uint64_t bytes, Memory* const* memories, uint64_t count,
                                     uint64_t offset) {
  GPUSHARE_RETURN_IF_ERROR(check_granules("address", address));
  GPUSHARE_RETURN_IF_ERROR(check_granules("size", bytes));
  GPUSHARE_RETURN_IF_ERROR(check_granules("offset", offset));
  for (uint64_t i = 0; i < count; ++i) {
    if (!memories_.contains(memories[i]) || memories[i]->released)
      return {GPUSHARE_INVALID_HANDLE, "not live physical memory (released?)"};
    const uint64_t held = memories[i]->bytes;
    if (bytes == 0 || offset > held || bytes > held - offset)
      return {GPUSHARE_INVALID_ARGUMENT,
              base::format("%s at offset %s do not lie in %s of physical memory",
                           base::format_bytes(bytes).c_str(), base::format_bytes(offset).c_str(),
                           base::format_bytes(held).c_str())};
  }
  const uint64_t total = count > kLargestBytes / std::max<uint64_t>(bytes, 1) ? UINT64_MAX : count * bytes;
  const auto reservation = holder(reservations_, address, total);
  if (total == 0 || reservation == reservations_.end())
    return {GPUSHARE_INVALID_ARGUMENT,
            base::format("%s at 0x%llx are not inside one reservation", base::format_bytes(total).c_str(),
                         static_cast<unsigned long long>(address))};
  auto next = mappings_.lower_bound(address);
  const bool hits_next = next != mappings_.end() && next->first < address + total;
  const bool hits_previous =
      next != mappings_.begin() && std::prev(next)->first + std::prev(next)->second.bytes > address;
  if (hits_next || hits_previous)
    return {GPUSHARE_INVALID_STATE,
            base::format("part of the range at 0x%llx is mapped already; unmap it first",
                         static_cast<unsigned long long>(address))};
  if (options_.keep_data)
    GPUSHARE_RETURN_IF_ERROR(map_pages(reservation->second.storage + (address - reservation->first), bytes,
                                       memories, count, offset));
  for (uint64_t i = 0; i < count; ++i) {
    next = mappings_.insert_or_assign(next, address + i * bytes, Mapping{bytes, memories[i], offset});
    ++next;
    ++memories[i]->mappings;
    memories[i]->used = true;
  }
  return {};
}

base::Status AddressSpace::map_pages(char* target, uint64_t bytes, Memory* const* memories, uint64_t count,
                                     uint64_t offset) {
  for (uint64_t first = 0; first < count;) {
    const Memory& memory = *memories[first];
    const bool in_file = memory.shared == nullptr && !memory.imported();
    uint64_t end = first + 1;
    while (end < count && in_file && memories[end]->shared == nullptr && !memories[end]->imported() &&
           memories[end]->file_offset == memory.file_offset + (end - first) * bytes)
      ++end;
    char* const at = target + first * bytes;
    const int protection = PROT_READ | (memory.writable ? PROT_WRITE : 0);
    const int file = memory.imported() ? memory.imported_file : memory_file_;
    const bool mapped = memory.shared != nullptr ? memory.shared->map_at(at, bytes, offset)
                                                 : map_over(at, (end - first) * bytes, protection, MAP_SHARED,
                                                            file, memory.file_offset + offset);
    if (!mapped) {
      const base::Status failed =
          system_error(GPUSHARE_HOST_OUT_OF_MEMORY, "mmap of physical memory", (end - first) * bytes);
      if (first > 0) (void)clear_pages(target, first * bytes);
      return failed;
    }
    first = end;
  }
  keep_from_children(target, count * bytes);
  return {};
}

base::Status AddressSpace::unmap(Address address, uint64_t bytes) {
  uint64_t done = 0;
  return unmap_run(address, bytes, 1, &done);
}

base::Status AddressSpace::unmap_run(Address address, uint64_t bytes, uint64_t count, uint64_t* out_count) {
  base::MutexLock lock(mutex_);
  const auto first = mappings_.find(address);
  auto it = first;
  for (uint64_t i = 0; i < count; ++i, ++it) {
    if (it == mappings_.end() || it->first != address + i * bytes || it->second.bytes != bytes)
      return {GPUSHARE_NOT_FOUND,
              base::format("no mapping of %s starts at 0x%llx; ranges are unmapped as they were mapped",
                           base::format_bytes(bytes).c_str(),
                           static_cast<unsigned long long>(address + i * bytes))};
  }
  const auto reservation = holder(reservations_, address, count * bytes);
  if (count == 0 || reservation == reservations_.end())
    return {GPUSHARE_INVALID_ARGUMENT, "the mappings are none, or not in one reservation"};
  if (options_.keep_data &&
      !clear_pages(reservation->second.storage + (address - reservation->first), count * bytes))
    return system_error(GPUSHARE_HOST_OUT_OF_MEMORY, "unmapping", count * bytes);
  for (it = first; *out_count < count; ++*out_count) {
    Memory* const memory = it->second.memory;
    it = mappings_.erase(it);
    --memory->mappings;
    drop_if_unused(memory);
  }
  return {};
}

AddressSpace::RangeMap::const_iterator AddressSpace::holder(const RangeMap& ranges, Address address,
                                                            uint64_t bytes) {
  auto it = ranges.upper_bound(address);
  if (it == ranges.begin()) return ranges.end();
  --it;
  const uint64_t offset = address - it->first;
  return offset <= it->second.bytes && bytes <= it->second.bytes - offset ? it : ranges.end();
}

bool AddressSpace::fully_mapped(Address address, uint64_t bytes, bool write) const {
  auto it = mappings_.upper_bound(address);
  if (it == mappings_.begin()) return false;
  --it;
  for (Address covered = address; it != mappings_.end() && it->first <= covered; ++it) {
    const Address end = it->first + it->second.bytes;
    if (end <= covered || (write && !it->second.memory->writable)) return false;
    if (end - address >= bytes) return true;
    covered = end;
  }
  return false;
}

base::Result<char*> AddressSpace::storage(Address address, uint64_t bytes, bool write,
                                          std::shared_ptr<const SharedFile>* out_file,
                                          FreshPages* out_fresh) const {
  if (bytes == 0) return static_cast<char*>(nullptr);
  base::MutexLock lock(mutex_);
  auto it = holder(allocations_, address, bytes);
  bool found = it != allocations_.end();
  if (!found) {
    it = holder(reservations_, address, bytes);
    found = it != reservations_.end() && fully_mapped(address, bytes, write);
  }
  if (!found) {
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("%llu bytes at 0x%llx are not inside one allocation or%s mapped range",
                                     static_cast<unsigned long long>(bytes),
                                     static_cast<unsigned long long>(address), write ? " writable" : ""));
  }
  auto mapping = mappings_.upper_bound(address);
  if (bytes >= kLeastFileBytes && mapping != mappings_.begin()) {
    --mapping;
    const uint64_t within = address - mapping->first;
    const Memory& memory = *mapping->second.memory;
    const bool inside = within < mapping->second.bytes && bytes <= mapping->second.bytes - within;
    if (inside && out_file != nullptr && memory.shared != nullptr) {
      *out_file = memory.shared;
      return memory.shared->pages() + mapping->second.offset + within;
    }
    if (inside && out_fresh != nullptr && memory_file_ >= 0 && memory.shared == nullptr &&
        !memory.imported() && within % kPageBytes == 0 && bytes % kPageBytes == 0 &&
        !std::exchange(mapping->second.copied_to, true))
      *out_fresh = {memory_file_, memory.file_offset + mapping->second.offset + within};
  }
  return it->second.storage == nullptr ? nullptr : it->second.storage + (address - it->first);
}

std::string AddressSpace::leaks() const {
  base::MutexLock lock(mutex_);
  std::string text;
  count(text, allocations_.size(), "allocation", "allocations");
  count(text, mappings_.size(), "mapping", "mappings");
  count(text, reservations_.size(), "reservation", "reservations");
  size_t handles = 0;
  for (const auto& [raw, memory] : memories_) handles += memory->released ? 0 : 1;
  count(text, handles, "physical memory handle", "physical memory handles");
  count(text, host_blocks_.size(), "host allocation", "host allocations");
  return text;
}

}  // namespace gpushare::device
