// The trace parsers on hostile input. A trace that parses must also keep Trace's invariants and replay.
// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "memory/trace_io.hpp"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

void check(const gpushare::memory::Trace& trace) {
  std::vector<int> state(trace.block_count, 0);
  uint32_t next = 0;
  uint64_t live = 0, peak = 0;
  for (const auto& op : trace.ops) {
    require(op.block < trace.block_count && op.size_bytes > 0);
    if (op.is_free) {
      require(state[op.block] == 1);
      state[op.block] = 2;
      live -= op.size_bytes;
    } else {
      require(op.block == next++ && state[op.block] == 0);
      state[op.block] = 1;
      live += op.size_bytes;
      require(live < uint64_t{1} << 63);
    }
    peak = peak < live ? live : peak;
  }
  require(peak == trace.peak_live_bytes && next == trace.block_count);
  require(trace.persistent.empty() || trace.persistent.size() == trace.block_count);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace gpushare;
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  for (const auto& loaded :
       {data[0] % 4 == 0   ? memory::parse_trace(text, "t")
        : data[0] % 4 == 1 ? memory::parse_lifetimes_csv(text, "t")
        : data[0] % 4 == 2 ? memory::parse_rmm_csv(text, "t")
                           : memory::parse_snapshot_json(text, "t", static_cast<int>(data[0] / 4) - 1)})
    if (loaded.ok())
      check(loaded->trace);
    else
      require(!loaded.status().message().empty());
  return 0;
}
