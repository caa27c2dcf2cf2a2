// SPDX-License-Identifier: Apache-2.0
#include "cli/host_work.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <vector>

namespace gpushare::cli {
namespace {

constexpr uint64_t kMarkBytes = 64;  // of each page; the rest is data
constexpr size_t kPassesPerRound = 16;

uint64_t mark_of(uint64_t owner, uint64_t page) {
  uint64_t x = owner * 0x9E3779B97F4A7C15ull ^ (page + 1) * 0xD6E8FEB86659FD93ull;
  x ^= x >> 32;
  x *= 0xD6E8FEB86659FD93ull;
  return x ^ (x >> 32);
}

// y = 0.5 y + x over the page's data, again and again: multiply and add as a layer does, values settle at 2x.
void round_of(std::byte* page, uint64_t bytes) {
  if (bytes <= kMarkBytes + sizeof(float)) return;
  const size_t count = (bytes - kMarkBytes) / sizeof(float);
  // Blocks start at multiples of 256 bytes.
  auto* values = static_cast<float*>(static_cast<void*>(page + kMarkBytes));
  for (size_t pass = 0; pass < kPassesPerRound; ++pass) {
    for (size_t i = 0; i < count; ++i) values[i] = values[i] * 0.5f + 0.25f;
    // Each pass is to be done, not folded into the next.
    __asm__ volatile("" : : "r"(values) : "memory");
  }
}

template <class Visit>
void each_page(std::span<const WorkBlock> blocks, Visit&& visit) {
  uint64_t page = 0;
  for (const WorkBlock& block : blocks)
    for (uint64_t at = 0; at + sizeof(uint64_t) <= block.bytes; at += HostWork::kPageBytes)
      visit(block.data + at, std::min(HostWork::kPageBytes, block.bytes - at), page++);
}

double now_ns() {
  return static_cast<double>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                 std::chrono::steady_clock::now().time_since_epoch())
                                 .count());
}

}  // namespace

HostWork::HostWork() {
  // Larger than caches for the pages, within them for the arithmetic.
  std::vector<uint64_t> memory((64 << 20) / sizeof(uint64_t));
  const WorkBlock block{static_cast<std::byte*>(static_cast<void*>(memory.data())),
                        memory.size() * sizeof(uint64_t)};
  const uint64_t pages = block.bytes / kPageBytes;
  constexpr uint64_t kRounds = 1024;
  // The least of several: others on the machine only ever add.
  round_ns_ = page_ns_ = std::numeric_limits<double>::max();
  for (int repeat = 0; repeat < 8; ++repeat) {
    double start = now_ns();
    mark({&block, 1}, 7);
    if (!marked({&block, 1}, 7)) return;
    page_ns_ = std::min(page_ns_, (now_ns() - start) / static_cast<double>(pages));
    start = now_ns();
    for (uint64_t page = 0; page < kRounds; ++page) round_of(block.data + page * kPageBytes, kPageBytes);
    round_ns_ = std::min(round_ns_, (now_ns() - start) / static_cast<double>(kRounds));
  }
}

void HostWork::mark(std::span<const WorkBlock> blocks, uint64_t owner) {
  each_page(blocks, [&](std::byte* data, uint64_t, uint64_t page) {
    const uint64_t value = mark_of(owner, page);
    std::memcpy(data, &value, sizeof value);
  });
}

bool HostWork::marked(std::span<const WorkBlock> blocks, uint64_t owner, uint64_t first, uint64_t stride) {
  bool ok = true;
  each_page(blocks, [&](std::byte* data, uint64_t, uint64_t page) {
    if (page < first || (page - first) % stride != 0) return;
    uint64_t value = 0;
    std::memcpy(&value, data, sizeof value);
    ok = ok && value == mark_of(owner, page);
  });
  return ok;
}

bool HostWork::run(std::span<const WorkBlock> blocks, uint64_t owner, double target_ns) const {
  uint64_t bytes = 0;
  for (const WorkBlock& block : blocks) bytes += block.bytes;
  mark(blocks, owner);
  double left_ns = target_ns - least_ns(bytes);
  while (left_ns > 0) {
    const double before = left_ns;
    each_page(blocks, [&](std::byte* data, uint64_t size, uint64_t) {
      if (left_ns <= 0 || size < kPageBytes) return;
      round_of(data, size);
      left_ns -= round_ns_;
    });
    if (left_ns == before) break;  // not one whole page
  }
  return marked(blocks, owner);
}

}  // namespace gpushare::cli
