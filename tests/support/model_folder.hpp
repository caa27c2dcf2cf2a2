// model_folder.hpp: a temporary folder, for files as a test wants them and for small safetensors files of known bytes.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "support/random.hpp"

namespace gpushare::test {

class ModelFolder {
 public:
  ModelFolder() {
    static std::atomic<int> next{0};
    path_ = std::filesystem::temp_directory_path() /
            ("gpushare-" + std::to_string(::getpid()) + "-" + std::to_string(next.fetch_add(1)));
    std::filesystem::create_directories(path_);
  }
  ~ModelFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ModelFolder(const ModelFolder&) = delete;
  ModelFolder& operator=(const ModelFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::string file(const std::string& name) const { return (path_ / name).string(); }
  // Returns its path.
  std::string write(const std::string& name, const std::string& content) const {
    std::ofstream(file(name), std::ios::binary) << content;
    return file(name);
  }

  // A model of random bytes, a tensor "t<i>" for each size; returns its path. `out_contents` (may be null): what each holds.
  std::string make(const std::string& name, const std::vector<size_t>& sizes, Random& random,
                   std::vector<std::string>* out_contents = nullptr) const {
    std::string json = "{", data;
    for (size_t i = 0; i < sizes.size(); ++i) {
      std::string bytes(sizes[i], '\0');
      for (char& byte : bytes) byte = static_cast<char>(random());
      json += (i > 0 ? "," : "") + ("\"t" + std::to_string(i)) + R"(":{"dtype":"U8","shape":[)" +
              std::to_string(sizes[i]) + R"(],"data_offsets":[)" + std::to_string(data.size()) + "," +
              std::to_string(data.size() + sizes[i]) + "]}";
      data += bytes;
      if (out_contents != nullptr) out_contents->push_back(std::move(bytes));
    }
    json += "}";
    std::string header(8, '\0');
    for (size_t i = 0; i < 8; ++i) header[i] = static_cast<char>(json.size() >> (8 * i));
    std::ofstream(file(name), std::ios::binary) << header << json << data;
    return file(name);
  }

 private:
  std::filesystem::path path_;
};

// FNV-1a, for comparing contents between processes.
inline uint64_t checksum(const void* data, size_t bytes, uint64_t from = 14695981039346656037ull) {
  const auto* at = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i) from = (from ^ at[i]) * 1099511628211ull;
  return from;
}

}  // namespace gpushare::test
