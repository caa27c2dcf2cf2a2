// host_memory.hpp: how much host memory this process may use: the machine's, or less where it runs in a container (a control group
// with a memory limit). The header uses none of the project's libraries and no C++ runtime, for src/shim.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace gpushare::base {

// UINT64_MAX: the system does not tell.
struct HostMemory {
  uint64_t total_bytes = UINT64_MAX;
  uint64_t available_bytes = UINT64_MAX;  // without paging: what is free, and caches that can be dropped
};

namespace host_memory_detail {

inline constexpr size_t kPath = 4096, kText = 16384;

// Up to kText - 1 bytes of the file `root`/`folder`/`name`, with a zero behind them. False: it cannot be read.
inline bool read_text(const char* root, const char* folder, const char* name, char (&text)[kText]) {
  char path[kPath];
  const size_t lengths[3] = {std::strlen(root), std::strlen(folder), std::strlen(name)};
  if (lengths[0] + lengths[1] + lengths[2] + 2 > sizeof path) return false;
  char* at = path;
  std::memcpy(at, root, lengths[0]), at += lengths[0];
  std::memcpy(at, folder, lengths[1]), at += lengths[1];
  *at++ = '/';
  std::memcpy(at, name, lengths[2] + 1);
  const int file = ::open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  size_t size = 0;
  for (ssize_t got = 1; size < kText - 1 && got > 0; size += got > 0 ? static_cast<size_t>(got) : 0)
    got = ::read(file, text + size, kText - 1 - size);
  ::close(file);
  text[size] = '\0';
  return size > 0;
}

// The number that begins there; false: there is none ("max").
inline bool number_at(const char* text, uint64_t* out) {
  while (*text == ' ' || *text == '\t') ++text;
  if (*text < '0' || *text > '9') return false;
  uint64_t value = 0;
  for (; *text >= '0' && *text <= '9'; ++text) {
    if (value > (UINT64_MAX - 9) / 10) return false;
    value = value * 10 + static_cast<uint64_t>(*text - '0');
  }
  *out = value;
  return true;
}

// The number behind `key` at the beginning of a line; 0: there is none.
inline uint64_t number_of(const char* text, const char* key) {
  const size_t length = std::strlen(key);
  for (const char* line = text; line != nullptr && *line != '\0';) {
    uint64_t value = 0;
    if (std::strncmp(line, key, length) == 0 && number_at(line + length, &value)) return value;
    line = std::strchr(line, '\n');
    if (line != nullptr) ++line;
  }
  return 0;
}

// How a version of control groups names things. Limits of the first version that are none are numbers near 2^63.
struct Version {
  const char* limit;
  const char* usage;
  const char* cache;  // of memory.stat: pages of files that can be dropped
};
inline constexpr Version kFirst{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};
inline constexpr Version kSecond{"memory.max", "memory.current", "inactive_file"};
inline constexpr uint64_t kNoLimitFrom = uint64_t{1} << 60;

// Lowers `memory` to what the group in that folder allows.
inline void apply_group(const char* root, const char* folder, const Version& version, HostMemory& memory) {
  char text[kText];
  uint64_t limit = 0, used = 0;
  if (!read_text(root, folder, version.limit, text) || !number_at(text, &limit) || limit >= kNoLimitFrom)
    return;
  if (limit < memory.total_bytes) memory.total_bytes = limit;
  if (read_text(root, folder, version.usage, text)) (void)number_at(text, &used);
  uint64_t cache = read_text(root, folder, "memory.stat", text) ? number_of(text, version.cache) : 0;
  if (cache > used) cache = used;
  const uint64_t held = used - cache, left = limit > held ? limit - held : 0;
  if (left < memory.available_bytes) memory.available_bytes = left;
}

// The group at `path` below `mount`, and all above it. A container may see its own group as the root, under a path of
// the host: then the folders of the path are not there, and the root is left.
inline void apply_groups(const char* root, const char* mount, const char* path, size_t length,
                         const Version& version, HostMemory& memory) {
  char folder[kPath];
  const size_t begin = std::strlen(mount);
  if (begin + length + 1 > sizeof folder) length = 0;
  std::memcpy(folder, mount, begin);
  std::memcpy(folder + begin, path, length);
  for (size_t end = begin + length;;) {
    while (end > begin && folder[end - 1] == '/') --end;
    folder[end] = '\0';
    apply_group(root, folder, version, memory);
    if (end == begin) return;
    while (end > begin && folder[end - 1] != '/') --end;
  }
}

}  // namespace host_memory_detail

// `root`: in front of /proc and /sys, for tests. Reads files. The tightest limit of the process's control group and of those above
// it counts, of either version of control groups.
inline HostMemory host_memory(const char* root = "") {
  using namespace host_memory_detail;
  HostMemory memory;
  char text[kText];
  if (read_text(root, "/proc", "meminfo", text)) {
    if (const uint64_t kb = number_of(text, "MemTotal:"); kb > 0) memory.total_bytes = kb * 1024;
    if (const uint64_t kb = number_of(text, "MemAvailable:"); kb > 0) memory.available_bytes = kb * 1024;
  }
  if (!read_text(root, "/proc/self", "cgroup", text)) return memory;
  // Lines "NUMBER:CONTROLLERS:PATH"; the second version has number 0 and no controllers.
  for (const char* line = text; line != nullptr && *line != '\0';) {
    const char* const end = line + std::strcspn(line, "\n");
    const char* const first = std::strchr(line, ':');
    const char* const second = first != nullptr && first < end ? std::strchr(first + 1, ':') : nullptr;
    if (second != nullptr && second < end) {
      const char* const path = second + 1;
      const auto length = static_cast<size_t>(end - path);
      if (second == first + 1) {
        apply_groups(root, "/sys/fs/cgroup", path, length, kSecond, memory);
        apply_groups(root, "/sys/fs/cgroup/unified", path, length, kSecond, memory);
      } else {
        for (const char* name = first + 1; name < second;) {
          const size_t size = std::strcspn(name, ",:");
          if (size == 6 && std::strncmp(name, "memory", 6) == 0)
            apply_groups(root, "/sys/fs/cgroup/memory", path, length, kFirst, memory);
          name += size + 1;
        }
      }
    }
    line = *end == '\n' ? end + 1 : nullptr;
  }
  return memory;
}

}  // namespace gpushare::base
