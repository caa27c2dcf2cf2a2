// checksum.hpp: CRC-32C (Castagnoli) of tensors, and the files that list them: a line a tensor, eight hex digits,
// a space, the tensor's name. CRC-32C because processors compute it at the speed of memory; it tells damage, not
// forgery.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>

#include "base/status.hpp"

namespace gpushare::loader {

// Continues `crc`, 0 at the beginning: crc32c(crc32c(0, a), b) is that of a and b together.
uint32_t crc32c(uint32_t crc, const char* data, uint64_t bytes);

using Checksums = std::unordered_map<std::string, uint32_t>;

// Errors: MALFORMED_INPUT naming `where` and the line (no checksum, no name, a name twice).
base::Result<Checksums> parse_checksums(std::string_view text, const std::string& where);
// Errors: also IO_ERROR; MALFORMED_INPUT above 100 MB.
base::Result<Checksums> read_checksums(const std::string& path);
// The list for a model: a .safetensors file or an index. Reads all of it. Errors: read_model's; IO_ERROR;
// INVALID_ARGUMENT for a tensor whose name has a line break.
base::Result<std::string> checksums_of(const std::string& model_path);

}  // namespace gpushare::loader
