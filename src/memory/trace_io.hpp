// trace_io.hpp: reads allocation traces from the files people already have. For tools and tests, not part of
// the library (target gpushare_memory_tools).
//
//   lifetimes CSV   header naming id, lower, upper, size (any order): one buffer a row, live over [lower, upper)
//   RMM log         header Thread,Time,Action,Pointer,Size,Stream; actions allocate, free, allocate failure. Or the
//                   older Event Type,Device ID,Address,Stream,Size (bytes),... with the events Alloc and Free
//   PyTorch         memory snapshot as JSON: device_traces with actions alloc, free_requested, free_completed
//
// Real logs are taken as they come: failed allocations, null pointers, frees from before the log, headers of logs that
// were appended to, a last line that was cut off, and addresses that are handed out again before their free is
// written (threads write after they have acted). What else the parsers do not understand is MALFORMED_INPUT with file,
// line, field and the allowed values.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.hpp"
#include "memory/trace.hpp"

namespace gpushare::memory {

enum class TraceFormat { kLifetimes, kRmm, kSnapshot };

struct LoadedTrace {
  TraceFormat format = TraceFormat::kLifetimes;
  Trace trace;
  int device = -1;  // of a snapshot
  // Frees of blocks whose allocation the recording does not hold (PyTorch keeps the last N events only): left
  // out.
  uint64_t skipped_frees = 0;
  // Blocks whose address was handed out again before their free was written: they end there.
  uint64_t early_frees = 0;
  bool cut = false;  // the last line was cut off, and is left out
};

// `name` is what error messages call the input. The traces of more than one device in a snapshot: `device`
// picks one; -1 takes the only one that is not empty. No trace may hold more than 2^25 operations,
// no snapshot more than 30 million values.
base::Result<LoadedTrace> parse_lifetimes_csv(std::string_view text, const std::string& name);
base::Result<LoadedTrace> parse_rmm_csv(std::string_view text, const std::string& name);
base::Result<LoadedTrace> parse_snapshot_json(std::string_view text, const std::string& name,
                                              int device = -1);
// The trace of each device that has events.
base::Result<std::vector<LoadedTrace>> parse_snapshot_devices(std::string_view text, const std::string& name);
// Recognises the format by its first line.
base::Result<LoadedTrace> parse_trace(std::string_view text, const std::string& name, int device = -1);
// Errors: NOT_FOUND, IO_ERROR (native_code is errno), MALFORMED_INPUT (larger than 1 GiB, too).
base::Result<LoadedTrace> read_trace(const std::string& path, int device = -1);

// Lifetimes alone, for the placement solver: buffers in file order.
base::Result<std::vector<Buffer>> parse_lifetimes(std::string_view text, const std::string& name);

}  // namespace gpushare::memory
