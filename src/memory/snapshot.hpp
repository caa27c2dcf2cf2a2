// snapshot.hpp: writes a MemorySnapshot in the form that PyTorch's memory viewer (pytorch.org/memory_viz) and
// its Python tools read: a dict of segments with their blocks, device_traces and allocator_settings, field
// names as in torch/csrc/cuda/memory_snapshot.cpp. As a pickle (protocol 2, plain containers only, nothing to
// import) or as JSON.
//
// Each heap, lane and pool of host memory is a segment; its name, and the session and kind of each block,
// stand where the viewer shows the stack of an allocation. Bytes that no block holds appear as inactive
// blocks, as the viewer expects.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "base/status.hpp"
#include "memory/device_memory.hpp"

namespace gpushare::memory {

enum class SnapshotFormat { kPickle, kJson };

// Blocks on the disk. Errors: IO_ERROR with errno.
base::Status write_snapshot(const MemorySnapshot& snapshot, SnapshotFormat format, const std::string& path);

}  // namespace gpushare::memory
