// safetensors.hpp: where each tensor of a safetensors file lies. The header is treated as hostile: nothing outside it
// is read, its numbers alone cause no allocation, and every wrong offset is refused with an error that names it.
//
// Format (huggingface/safetensors, format description): 8 bytes little-endian N, N bytes of JSON, then the
// data. The JSON maps tensor names to {dtype, shape, data_offsets [begin, end)} relative to the data, and
// optionally "__metadata__" to a map of strings. The tensors must cover the data without holes or overlap. A dtype that this
// reader does not know is taken by its size: its elements must have the same whole number of bits each.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.hpp"

namespace gpushare::loader {

// The reference implementation's limit on the header.
inline constexpr uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;

struct Tensor {
  std::string name;
  std::string dtype;            // "F32", "BF16", ...
  std::vector<uint64_t> shape;  // empty for a scalar
  uint64_t file_begin = 0;      // byte range in its file
  uint64_t file_end = 0;
  uint32_t file = 0;  // index into ModelFiles::paths
  uint64_t bytes() const { return file_end - file_begin; }
};

// A file from which a model was read, and the version of its content when it was opened (File::version).
struct Source {
  std::string path;
  std::string version;
  bool operator==(const Source&) const = default;
};

// Errors: IO_ERROR naming the first file that was replaced or has gone.
base::Status check_unchanged(std::span<const Source> sources);

// Tensors in the order of their bytes in the files. Writers sort them by type and name, so that this is seldom the
// order in which they are used (order.hpp).
struct ModelFiles {
  std::vector<std::string> paths;  // of the data
  std::vector<Source> sources;     // all that were read: those of the data, and the index
  std::vector<Tensor> tensors;
  std::vector<std::pair<std::string, std::string>> metadata;
  uint64_t bytes = 0;  // of all tensors
};

// The header's JSON of a file of `file_bytes` bytes. Errors: MALFORMED_INPUT naming the tensor and what is
// wrong.
base::Result<ModelFiles> parse_safetensors_header(std::string_view json, uint64_t file_bytes);

// One file's header. Reads the header only. Errors: IO_ERROR (errno), MALFORMED_INPUT (too short, absurd
// header size, ...).
base::Result<ModelFiles> read_safetensors(const std::string& path);

// A model: a .safetensors file, or an index (*.safetensors.index.json) whose weight_map names the shard of
// each tensor. Shards are plain file names beside the index. Every tensor of the map must be in its shard and
// no shard may have others.
base::Result<ModelFiles> read_model(const std::string& path);

}  // namespace gpushare::loader
