// virtual_memory.cpp: reserved addresses, physical memory of device and host, and what is mapped where. The memory is
// real: a test reads and writes through the addresses, and one that is not mapped, or not accessible yet, is a fault.
// Copies between mapped addresses copy at once, without waiting for their stream. Addresses that nobody reserved are
// taken as they are: nothing is mapped there.
// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>

#include "recorder.hpp"

using namespace recorder;  // NOLINT(google-build-using-namespace): entry points live in the global namespace

namespace {

constexpr uint64_t kGranularity = 2 << 20;
constexpr int kDevice = 1;

struct Physical {
  uint64_t bytes;
  bool on_host, released;
  int file, mappings;
};
struct Mapping {
  uint64_t bytes, handle;
};
struct Space {
  std::mutex mutex;
  std::map<uint64_t, Physical> physical;
  std::map<uint64_t, uint64_t> reserved;
  std::map<uint64_t, Mapping> mapped;
};
Space& space() {
  static auto* all = new Space;
  return *all;
}
bool is_modern() {
  const char* value = std::getenv("RECORDER_HOST_NODES");
  return value != nullptr && *value == '1';
}
void* pointer(uint64_t address) {
  return reinterpret_cast<void*>(address);
}
// The last of a map that begins at or before the address; its end if the address is not in it.
template <class Map, class Bytes>
auto around(Map& map, uint64_t address, Bytes bytes_of) {
  auto it = map.upper_bound(address);
  if (it == map.begin() || address - std::prev(it)->first >= bytes_of(std::prev(it)->second))
    return map.end();
  return std::prev(it);
}
auto mapping_at(uint64_t address) {
  return around(space().mapped, address, [](const Mapping& mapping) { return mapping.bytes; });
}
bool is_reserved(uint64_t address) {
  Space& s = space();
  return around(s.reserved, address, [](uint64_t bytes) { return bytes; }) != s.reserved.end();
}
// Once it is released and mapped nowhere.
void end(std::map<uint64_t, Physical>::iterator it) {
  if (!it->second.released || it->second.mappings != 0) return;
  if (it->second.file >= 0) close(it->second.file);
  if (it->second.on_host) count_host(-static_cast<int64_t>(it->second.bytes));
  release(it->first);
  space().physical.erase(it);
}
std::atomic<uint64_t> g_let{UINT64_MAX}, g_copies{0}, g_host_limit{UINT64_MAX};
// Until the next copy may go on.
void await_let() {
  if (g_let != UINT64_MAX) usleep(10'000);
  while (g_copies >= g_let) usleep(500);
}
// Parts of the source that nobody wrote are skipped, so that large blocks take little time and memory.
void copy_between(std::map<uint64_t, Mapping>::iterator to, uint64_t to_offset,
                  std::map<uint64_t, Mapping>::iterator from, uint64_t from_offset, uint64_t bytes) {
  const int source = space().physical.at(from->second.handle).file,
            target = space().physical.at(to->second.handle).file;
  (void)fallocate(target, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(to_offset),
                  static_cast<off_t>(bytes));
  const auto end = static_cast<off_t>(from_offset + bytes);
  for (off_t at = static_cast<off_t>(from_offset); at < end;) {
    const off_t data = lseek(source, at, SEEK_DATA);
    if (data < 0 || data >= end) return;
    at = std::min(lseek(source, data, SEEK_HOLE), end);
    const uint64_t shift = static_cast<uint64_t>(data) - from_offset;
    std::memcpy(pointer(to->first + to_offset + shift), pointer(from->first + static_cast<uint64_t>(data)),
                static_cast<size_t>(at - data));
  }
}
// A copy in which an address of virtual memory takes part: an illegal address if nothing is mapped there.
Result copy_bytes(uint64_t to, uint64_t from, uint64_t bytes) {
  constexpr Result kIllegalAddress = 700;
  await_let();
  const std::lock_guard lock(space().mutex);
  ++g_copies;
  const auto target = mapping_at(to), source = mapping_at(from), none = space().mapped.end();
  if ((target == none && is_reserved(to)) || (source == none && is_reserved(from))) return kIllegalAddress;
  if (target != none && source != none)
    copy_between(target, to - target->first, source, from - source->first, bytes);
  return kSuccess;
}
Result copy_host(uint64_t address, void* host, uint64_t bytes, bool to_device) {
  constexpr Result kIllegalAddress = 700;
  const std::lock_guard lock(space().mutex);
  if (mapping_at(address) == space().mapped.end()) return is_reserved(address) ? kIllegalAddress : kSuccess;
  std::memcpy(to_device ? pointer(address) : host, to_device ? host : pointer(address), bytes);
  return kSuccess;
}

}  // namespace

std::set<uint64_t> recorder::physical_handles() {
  const std::lock_guard lock(space().mutex);
  std::set<uint64_t> handles;
  for (const auto& [handle, physical] : space().physical) handles.insert(handle);
  return handles;
}
bool recorder::is_on_host(uint64_t address) {
  const std::lock_guard lock(space().mutex);
  const auto it = mapping_at(address);
  return it != space().mapped.end() && space().physical.at(it->second.handle).on_host;
}

RECORDER_API void recorder_let_copies(uint64_t copies) {
  g_let = copies == UINT64_MAX ? copies : g_copies + copies;
}
RECORDER_API uint64_t recorder_copies() {
  return g_copies;
}
RECORDER_API void recorder_set_host_limit(uint64_t bytes) {
  g_host_limit = bytes;
}

RECORDER_API Result cuDeviceGetAttribute(P a, I b, I c) {
  RECORDER_NOTE(cuDeviceGetAttribute, a, b, c)
  if (b == 102 || b == 141) *static_cast<int*>(a) = is_modern();  // virtual memory; that of the host
  return kSuccess;
}
RECORDER_API Result cuMemGetAllocationGranularity(P a, P b, I c) {
  RECORDER_NOTE(cuMemGetAllocationGranularity, a, b, c)
  *static_cast<uint64_t*>(a) = kGranularity;
  return kSuccess;
}
RECORDER_API Result cuMemCreate(P a, L b, P c, L d) {
  RECORDER_NOTE(cuMemCreate, a, b, c, d)
  int location[2] = {kDevice, 0};
  if (c != nullptr) std::memcpy(location, static_cast<char*>(c) + 8, sizeof location);
  constexpr int kPartOfDevice = 6;
  const bool on_host = is_host_location(location[0]);
  if (on_host && recorder_host_bytes() + b > g_host_limit) return kOutOfMemory;
  int of_device = location[0] == kDevice         ? location[1]
                  : location[0] == kPartOfDevice ? location[1] & 0xff
                                                 : current_device();
  if (of_device >= device::count()) of_device = 0;
  const uint64_t handle = allocate(on_host ? 0 : b, of_device);
  if (handle == 0) return kOutOfMemory;
  if (on_host) count_host(static_cast<int64_t>(b));
  const std::lock_guard lock(space().mutex);
  space().physical[handle] = {b, on_host, false, -1, 0};
  std::memcpy(a, &handle, sizeof handle);
  return kSuccess;
}
// Retained handles are not counted here: the last release finds nothing.
RECORDER_API Result cuMemRelease(L a) {
  RECORDER_NOTE(cuMemRelease, a)
  const std::lock_guard lock(space().mutex);
  const auto it = space().physical.find(a);
  if (it == space().physical.end()) {
    release(a);
    return kSuccess;
  }
  it->second.released = true;
  end(it);
  return kSuccess;
}
RECORDER_API Result cuMemAddressReserve(P a, L b, L c, L d, L e) {
  RECORDER_NOTE(cuMemAddressReserve, a, b, c, d, e)
  void* memory = mmap(nullptr, b, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return kOutOfMemory;
  const std::lock_guard lock(space().mutex);
  space().reserved[reinterpret_cast<uint64_t>(memory)] = b;
  std::memcpy(a, &memory, sizeof memory);
  return kSuccess;
}
RECORDER_API Result cuMemAddressFree(L a, L b) {
  RECORDER_NOTE(cuMemAddressFree, a, b)
  const std::lock_guard lock(space().mutex);
  const auto it = space().reserved.find(a);
  if (it == space().reserved.end()) return kSuccess;
  if (it->second != b || mapping_at(a) != space().mapped.end()) return kInvalidValue;
  space().reserved.erase(it);
  munmap(pointer(a), b);
  return kSuccess;
}
RECORDER_API Result cuMemMap(L a, L b, L c, L d, L e) {
  RECORDER_NOTE(cuMemMap, a, b, c, d, e)
  const std::lock_guard lock(space().mutex);
  if (!is_reserved(a)) return kSuccess;
  const auto it = space().physical.find(d);
  if (it == space().physical.end() || b != it->second.bytes || mapping_at(a) != space().mapped.end())
    return kInvalidValue;
  if (it->second.file < 0) {
    it->second.file = memfd_create("recorder", MFD_CLOEXEC);
    if (it->second.file < 0 || ftruncate(it->second.file, static_cast<off_t>(b)) != 0) return kOutOfMemory;
  }
  if (mmap(pointer(a), b, PROT_NONE, MAP_SHARED | MAP_FIXED, it->second.file, 0) == MAP_FAILED)
    return kOutOfMemory;
  ++it->second.mappings;
  space().mapped[a] = {b, d};
  return kSuccess;
}
RECORDER_API Result cuMemSetAccess(L a, L b, P c, L d) {
  RECORDER_NOTE(cuMemSetAccess, a, b, c, d)
  const std::lock_guard lock(space().mutex);
  if (mapping_at(a) == space().mapped.end()) return is_reserved(a) ? kInvalidValue : kSuccess;
  return mprotect(pointer(a), b, PROT_READ | PROT_WRITE) == 0 ? kSuccess : kInvalidValue;
}
RECORDER_API Result cuMemUnmap(L a, L b) {
  RECORDER_NOTE(cuMemUnmap, a, b)
  const std::lock_guard lock(space().mutex);
  const auto it = space().mapped.find(a);
  if (it == space().mapped.end()) return is_reserved(a) ? kInvalidValue : kSuccess;
  if (it->second.bytes != b) return kInvalidValue;
  mmap(pointer(a), b, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  const auto physical = space().physical.find(it->second.handle);
  space().mapped.erase(it);
  --physical->second.mappings;
  end(physical);
  return kSuccess;
}

#define COPY(name, parameters, copy, ...)                                      \
  RECORDER_API Result name parameters {                                        \
    const Result result = Body<kEntry_##name, Class::gate>::call(__VA_ARGS__); \
    return result == kSuccess ? copy : result;                                 \
  }
COPY(cuMemcpyDtoD_v2, (L a, L b, L c), copy_bytes(a, b, c), a, b, c)
COPY(cuMemcpyDtoDAsync_v2, (L a, L b, L c, P d), copy_bytes(a, b, c), a, b, c, d)
COPY(cuMemcpyHtoD_v2, (L a, P b, L c), copy_host(a, b, c, true), a, b, c)
COPY(cuMemcpyDtoH_v2, (P a, L b, L c), copy_host(b, a, c, false), a, b, c)
