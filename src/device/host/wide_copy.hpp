// wide_copy.hpp: copies of many bytes past the processor's cache. The C library does so only above three quarters of the
// last cache's size, which virtual machines report as hundreds of MiB; the tensors of a model are smaller, and through the
// cache each line that is written is read first.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>

namespace gpushare::device::host {

// Copies below this size go through the cache, because the reader is likely to find them there.
inline constexpr uint64_t kWideCopyBytes = uint64_t{1} << 20;

// As memmove. Bytes that do not overlap are written past the cache where the processor can. Two pages at a time: one stream
// of loads leaves the memory idle between its rows.
void wide_copy(char* destination, const char* source, uint64_t bytes);

inline void copy_bytes(char* destination, const char* source, uint64_t bytes) {
  if (bytes >= kWideCopyBytes)
    wide_copy(destination, source, bytes);
  else
    std::memmove(destination, source, bytes);
}

}  // namespace gpushare::device::host
