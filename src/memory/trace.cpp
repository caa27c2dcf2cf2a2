// SPDX-License-Identifier: Apache-2.0
#include "memory/trace.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace gpushare::memory {

uint32_t TraceBuilder::allocate(uint64_t size_bytes) {
  const uint32_t block = trace_.block_count++;
  trace_.ops.push_back({size_bytes, block, false});
  sizes_.push_back(size_bytes);
  live_bytes_ += size_bytes;
  trace_.peak_live_bytes = std::max(trace_.peak_live_bytes, live_bytes_);
  return block;
}

void TraceBuilder::free(uint32_t block) {
  trace_.ops.push_back({sizes_[block], block, true});
  live_bytes_ -= sizes_[block];
}

Trace TraceBuilder::take() {
  sizes_.clear();
  live_bytes_ = 0;
  return std::exchange(trace_, {});
}

std::vector<Buffer> lifetimes(const Trace& trace) {
  std::vector<Buffer> buffers(trace.block_count, Buffer{0, trace.ops.size(), 0});
  for (size_t time = 0; time < trace.ops.size(); ++time) {
    const TraceOp& op = trace.ops[time];
    Buffer& buffer = buffers[op.block];
    if (op.is_free) {
      buffer.upper = time;
    } else {
      buffer.lower = time;
      buffer.size_bytes = op.size_bytes;
    }
  }
  return buffers;
}

Trace trace_of(std::span<const Buffer> buffers, std::vector<uint32_t>* order) {
  const auto count = static_cast<uint32_t>(buffers.size());
  std::vector<uint32_t> starts(count), ends(count);
  std::iota(starts.begin(), starts.end(), 0u);
  std::iota(ends.begin(), ends.end(), 0u);
  std::stable_sort(starts.begin(), starts.end(),
                   [&](uint32_t a, uint32_t b) { return buffers[a].lower < buffers[b].lower; });
  std::stable_sort(ends.begin(), ends.end(),
                   [&](uint32_t a, uint32_t b) { return buffers[a].upper < buffers[b].upper; });
  uint64_t first = ~uint64_t{0}, last = 0;
  for (const Buffer& buffer : buffers) {
    first = std::min(first, buffer.lower);
    last = std::max(last, buffer.upper);
  }
  TraceBuilder builder;
  std::vector<uint32_t> block_of(count);
  std::vector<bool> persistent;
  persistent.reserve(count);
  size_t end = 0;
  for (uint32_t start : starts) {
    for (; buffers[ends[end]].upper <= buffers[start].lower; ++end) builder.free(block_of[ends[end]]);
    block_of[start] = builder.allocate(buffers[start].size_bytes);
    persistent.push_back(buffers[start].lower == first && buffers[start].upper == last);
  }
  for (; end < count; ++end) builder.free(block_of[ends[end]]);
  Trace trace = builder.take();
  trace.persistent = std::move(persistent);
  if (order != nullptr) *order = std::move(starts);
  return trace;
}

}  // namespace gpushare::memory
