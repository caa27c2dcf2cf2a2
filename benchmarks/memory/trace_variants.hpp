// trace_variants.hpp: random variants of a recorded trace, so that packing is judged on what a trace is like and not on
// the one recording. Each is a function of the trace and the generator's seed.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <span>
#include <vector>

#include "memory/trace.hpp"

namespace gpushare::bench {

using Buffers = std::vector<memory::Buffer>;
using Generator = std::mt19937_64;

inline uint64_t end_of(std::span<const memory::Buffer> buffers) {
  uint64_t end = 0;
  for (const memory::Buffer& buffer : buffers) end = std::max(end, buffer.upper);
  return end;
}

// Every distinct size times exp(N(0, 0.25)): the same program with other layers.
inline Buffers with_scaled_sizes(Buffers buffers, Generator& random) {
  std::normal_distribution<double> normal(0, 0.25);
  std::map<uint64_t, uint64_t> scaled;
  for (memory::Buffer& buffer : buffers) {
    const auto [entry, is_new] = scaled.try_emplace(buffer.size_bytes, 0);
    if (is_new)
      entry->second = std::max<uint64_t>(
          1, static_cast<uint64_t>(static_cast<double>(buffer.size_bytes) * std::exp(normal(random))));
    buffer.size_bytes = entry->second;
  }
  return buffers;
}

// Each buffer with the same probability, which is drawn from [0.3, 0.9].
inline Buffers with_some_left_out(const Buffers& buffers, Generator& random) {
  std::uniform_real_distribution<double> uniform(0, 1);
  const double kept = 0.3 + 0.6 * uniform(random);
  Buffers some;
  for (const memory::Buffer& buffer : buffers)
    if (uniform(random) < kept) some.push_back(buffer);
  if (some.empty()) some.push_back(buffers.front());
  return some;
}

// Each lifetime is moved by N(0, 2% of the trace) and its length multiplied by exp(N(0, 0.25)); buffers of the whole trace stay.
inline Buffers with_shifted_lifetimes(Buffers buffers, Generator& random) {
  std::normal_distribution<double> normal(0, 1);
  const auto end = static_cast<double>(end_of(buffers));
  for (memory::Buffer& buffer : buffers) {
    const double length = static_cast<double>(buffer.upper - buffer.lower);
    const double shift = 0.02 * end * normal(random);
    const double new_length = std::max(1.0, std::round(length * std::exp(0.25 * normal(random))));
    if (length > 0.98 * end) continue;
    const double lower = std::clamp(std::round(static_cast<double>(buffer.lower) + shift), 0.0, end - 1);
    buffer.lower = static_cast<uint64_t>(lower);
    buffer.upper = static_cast<uint64_t>(std::min(end, lower + new_length));
  }
  return buffers;
}

// Two programs in one arena: the second begins within the first half of the first. Its sizes are multiplied so that the
// two peaks are to each other as exp(U(-1, 1)).
inline Buffers interleaved(const Buffers& first, const Buffers& second, Generator& random) {
  std::uniform_real_distribution<double> uniform(0, 1);
  constexpr double kSpan = 1 << 24;
  const auto peak = [](const Buffers& buffers) {
    return static_cast<double>(memory::trace_of(buffers).peak_live_bytes);
  };
  const double delay = 0.5 * uniform(random);
  const double factor = peak(first) / peak(second) * std::exp(2 * uniform(random) - 1);
  Buffers both;
  const auto add = [&](const Buffers& buffers, double begin, double size_factor) {
    const auto end = static_cast<double>(end_of(buffers));
    for (const memory::Buffer& buffer : buffers) {
      const auto lower = static_cast<uint64_t>((static_cast<double>(buffer.lower) / end + begin) * kSpan);
      const auto upper = static_cast<uint64_t>((static_cast<double>(buffer.upper) / end + begin) * kSpan);
      const double size = static_cast<double>(buffer.size_bytes) * size_factor;
      both.push_back({lower, std::max(upper, lower + 1), std::max<uint64_t>(1, static_cast<uint64_t>(size))});
    }
  };
  add(first, 0, 1);
  add(second, delay, factor);
  return both;
}

}  // namespace gpushare::bench
