// options.hpp: "key=value&key=value" as device_open takes it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.hpp"

namespace gpushare::device {

// Read every known key with a get call, which also makes the key known; then finish() refuses all other keys. Errors of
// the get calls are INVALID_ARGUMENT, name the key and say what is allowed. Not thread-safe.
class Options {
 public:
  // `backend` names the device in messages. Errors: INVALID_ARGUMENT (a pair without '=', an empty key, a key
  // given twice).
  static base::Result<Options> parse(std::string_view backend, std::string_view text);

  bool has(std::string_view key) const;
  base::Result<double> get_double(std::string_view key, double fallback, double low, double high);
  base::Result<uint64_t> get_uint64(std::string_view key, uint64_t fallback, uint64_t low, uint64_t high);
  // Accepts units: "64KiB".
  base::Result<uint64_t> get_bytes(std::string_view key, uint64_t fallback, uint64_t low, uint64_t high);
  base::Result<bool> get_bool(std::string_view key, bool fallback);
  base::Result<std::string> get_string(std::string_view key, std::string_view fallback);

  // Errors: INVALID_ARGUMENT naming the first unknown key and all known ones.
  base::Status finish() const;

 private:
  struct Pair {
    std::string key;
    std::string value;
  };
  const Pair* find(std::string_view key);
  base::Status bad(std::string_view key, const std::string& reason) const;

  std::string backend_;
  std::vector<Pair> pairs_;
  std::vector<std::string> known_;
};

}  // namespace gpushare::device
