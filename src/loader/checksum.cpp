// SPDX-License-Identifier: Apache-2.0
#include "loader/checksum.hpp"

#include <algorithm>
#include <boost/crc.hpp>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

#include "loader/file.hpp"
#include "loader/safetensors.hpp"

namespace gpushare::loader {
namespace {

constexpr uint64_t kMaxFileBytes = 100'000'000;

uint32_t in_software(uint32_t crc, const char* data, uint64_t bytes) {
  // The register starts with `crc` and is inverted before and after, as the processor's own loop does.
  boost::crc_optimal<32, 0x1EDC6F41, 0, 0, true, true> sum;
  // crc_optimal takes its start value unreflected.
  uint32_t reflected = 0;
  const uint32_t start = ~crc;
  for (int bit = 0; bit < 32; ++bit)
    if ((start >> bit) & 1) reflected |= 1u << (31 - bit);
  sum.reset(reflected);
  sum.process_bytes(data, bytes);
  return ~sum.checksum();
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t in_hardware(uint32_t crc, const char* data, uint64_t bytes) {
  uint64_t sum = ~crc;
  for (; bytes >= 8; data += 8, bytes -= 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    sum = _mm_crc32_u64(sum, word);
  }
  auto last = static_cast<uint32_t>(sum);
  for (; bytes > 0; ++data, --bytes) last = _mm_crc32_u8(last, static_cast<unsigned char>(*data));
  return ~last;
}
#endif

}  // namespace

uint32_t crc32c(uint32_t crc, const char* data, uint64_t bytes) {
#if defined(__x86_64__)
  static const bool hardware = __builtin_cpu_supports("sse4.2") != 0;
  if (hardware) return in_hardware(crc, data, bytes);
#endif
  return in_software(crc, data, bytes);
}

base::Result<Checksums> parse_checksums(std::string_view text, const std::string& where) {
  Checksums out;
  for (size_t line = 1; !text.empty(); ++line) {
    const size_t end = text.find('\n');
    std::string_view row = text.substr(0, end);
    text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
    if (!row.empty() && row.back() == '\r') row.remove_suffix(1);
    if (row.empty()) continue;
    const auto wrong = [&](const char* what) {
      return base::Status(GPUSHARE_MALFORMED_INPUT, base::format("%s:%zu: %s", where.c_str(), line, what));
    };
    if (row.size() < 10 || row[8] != ' ')
      return wrong("expected eight hex digits, a space, and a tensor's name");
    uint32_t sum = 0;
    for (const char digit : row.substr(0, 8)) {
      const int value = digit >= '0' && digit <= '9'   ? digit - '0'
                        : digit >= 'a' && digit <= 'f' ? digit - 'a' + 10
                        : digit >= 'A' && digit <= 'F' ? digit - 'A' + 10
                                                       : -1;
      if (value < 0) return wrong("expected eight hex digits, a space, and a tensor's name");
      sum = sum << 4 | static_cast<uint32_t>(value);
    }
    if (!out.emplace(std::string(row.substr(9)), sum).second) return wrong("a tensor is named a second time");
  }
  return out;
}

base::Result<Checksums> read_checksums(const std::string& path) {
  GPUSHARE_ASSIGN_OR_RETURN(const File file, File::open(path));
  if (file.size() > kMaxFileBytes)
    return base::Status(GPUSHARE_MALFORMED_INPUT,
                        base::format("%s has %llu bytes, more than any list of checksums", path.c_str(),
                                     static_cast<unsigned long long>(file.size())));
  std::string text(file.size(), '\0');
  GPUSHARE_RETURN_IF_ERROR(file.read_at(0, text.data(), text.size()));
  return parse_checksums(text, path);
}

base::Result<std::string> checksums_of(const std::string& model_path) {
  GPUSHARE_ASSIGN_OR_RETURN(const ModelFiles model, read_model(model_path));
  std::vector<File> files;
  for (const std::string& path : model.paths) {
    GPUSHARE_ASSIGN_OR_RETURN(File file, File::open(path));
    files.push_back(std::move(file));
  }
  std::vector<char> buffer(8u << 20);
  std::string out;
  for (const Tensor& tensor : model.tensors) {
    if (tensor.name.find('\n') != std::string::npos || tensor.name.find('\r') != std::string::npos)
      return base::Status(
          GPUSHARE_INVALID_ARGUMENT,
          model_path + ": a tensor's name has a line break, which a list of checksums cannot hold");
    uint32_t sum = 0;
    for (uint64_t at = tensor.file_begin; at < tensor.file_end;) {
      const uint64_t step = std::min<uint64_t>(buffer.size(), tensor.file_end - at);
      GPUSHARE_RETURN_IF_ERROR(files[tensor.file].read_at(at, buffer.data(), step));
      sum = crc32c(sum, buffer.data(), step);
      at += step;
    }
    out += base::format("%08x ", sum) + tensor.name + '\n';
  }
  return out;
}

}  // namespace gpushare::loader
