// A safetensors header from bytes: whatever is accepted covers its data exactly.
// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <string_view>

#include "loader/safetensors.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  // The first two bytes say how much data follows the header.
  const uint64_t data_bytes = data[0] | static_cast<uint64_t>(data[1]) << 8;
  const std::string_view json(reinterpret_cast<const char*>(data + 2), size - 2);
  const auto model = gpushare::loader::parse_safetensors_header(json, 8 + json.size() + data_bytes);
  if (!model.ok()) {
    if (model.status().code() != GPUSHARE_MALFORMED_INPUT || model.status().message().empty()) std::abort();
    return 0;
  }
  uint64_t covered = 8 + json.size();
  for (const gpushare::loader::Tensor& tensor : model->tensors) {
    if (tensor.file_begin != covered || tensor.file_end < covered) std::abort();
    covered = tensor.file_end;
  }
  if (covered != 8 + json.size() + data_bytes) std::abort();
  return 0;
}
