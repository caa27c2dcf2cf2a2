// work.hpp: what an entry of class gate gives the device: on which stream, and under which signature its time is learned.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "shim/table.hpp"

namespace gpushare::shim {

struct Work {
  uint64_t stream = 0;
  uint64_t signature = 0;
  bool per_thread = false;  // stream 0 is the thread's own
  bool any_stream = false;  // the stream may be another context's than the thread's
};

inline uint64_t bits(P value) {
  return reinterpret_cast<uint64_t>(value);
}
template <class T>
uint64_t bits(T value) {
  uint64_t out = 0;
  std::memcpy(&out, &value, sizeof(T) < sizeof out ? sizeof(T) : sizeof out);
  return out;
}

// The part of CUlaunchConfig that is used.
struct LaunchConfig {
  uint32_t grid[3], block[3], shared_bytes;
  void* stream;
};

// Reads from an entry's name what kind of work the entry gives the device. The compiler does it, since a launch has no
// time for it.
struct WorkKind {
  bool per_thread, launch_with_config, launch, graph, async;
  bool sized;  // a copy or a fill whose third parameter is its size
};
consteval WorkKind work_kind(std::string_view name) {
  const auto has = [name](std::string_view part) { return name.find(part) != std::string_view::npos; };
  return {name.ends_with("_ptsz") || name.ends_with("_ptds"),
          name.starts_with("cuLaunchKernelEx"),
          name.starts_with("cuLaunchKernel") || name.starts_with("cuLaunchCooperativeKernel"),
          name.starts_with("cuGraph"),
          has("Async"),
          !has("2D") && !has("3D") && !has("Batch")};
}

template <int entry, WorkKind kind, class... A>
Work work_of(A... arguments) {
  const uint64_t given[] = {bits(arguments)...};
  constexpr size_t count = sizeof...(A);
  const auto value = [&given](size_t i) { return i < count ? given[i] : 0; };
  Work work;
  work.per_thread = kind.per_thread;
  if constexpr (kind.launch_with_config) {
    LaunchConfig config{};
    if (value(0) != 0) std::memcpy(&config, reinterpret_cast<const void*>(value(0)), sizeof config);
    work.stream = bits(config.stream);
    work.signature = value(1) ^ (uint64_t{config.grid[0]} * config.grid[1] * config.grid[2]) << 20;
  } else if constexpr (kind.launch) {
    work.stream = value(8);
    work.signature = value(0) ^ (value(1) * value(2) * value(3)) << 20;
  } else if constexpr (kind.graph) {
    work.any_stream = true;
    work.stream = value(1);
    work.signature = value(0);
  } else {
    work.any_stream = kind.async;
    if (work.any_stream) work.stream = value(count - 1);
    work.signature = static_cast<uint64_t>(entry) + 1;
    // Copies and fills: of which order of magnitude they are.
    if constexpr (kind.sized && count > 2) {
      if (const uint64_t bytes = value(2); bytes > 1)
        work.signature += static_cast<uint64_t>(63 - __builtin_clzll(bytes)) * 0x100000;
    }
  }
  return work;
}

}  // namespace gpushare::shim
