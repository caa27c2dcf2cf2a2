// SPDX-License-Identifier: Apache-2.0
#include "device/support/options.hpp"

#include <algorithm>

#include "base/units.hpp"

namespace gpushare::device {

base::Result<Options> Options::parse(std::string_view backend, std::string_view text) {
  Options options;
  options.backend_ = backend;
  while (!text.empty()) {
    const size_t end = std::min(text.find('&'), text.size());
    const std::string_view pair = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    const size_t equals = pair.find('=');
    if (equals == std::string_view::npos || equals == 0) {
      return base::Status(GPUSHARE_INVALID_ARGUMENT, options.backend_ + ": option '" + std::string(pair) +
                                                         "' is not key=value; options are joined with '&'");
    }
    const std::string_view key = pair.substr(0, equals);
    if (options.has(key)) return options.bad(key, "is given twice");
    options.pairs_.push_back({std::string(key), std::string(pair.substr(equals + 1))});
  }
  return options;
}

bool Options::has(std::string_view key) const {
  return std::any_of(pairs_.begin(), pairs_.end(), [&](const Pair& pair) { return pair.key == key; });
}

const Options::Pair* Options::find(std::string_view key) {
  known_.emplace_back(key);
  for (const Pair& pair : pairs_) {
    if (pair.key == key) return &pair;
  }
  return nullptr;
}

base::Status Options::bad(std::string_view key, const std::string& reason) const {
  return {GPUSHARE_INVALID_ARGUMENT, backend_ + ": option " + std::string(key) + " " + reason};
}

base::Result<double> Options::get_double(std::string_view key, double fallback, double low, double high) {
  const Pair* pair = find(key);
  if (pair == nullptr) return fallback;
  const base::Result<double> value = base::parse_double(pair->value);
  if (!value.ok()) return bad(key, "must be a number: " + value.status().message());
  if (*value < low || *value > high) {
    return bad(key, base::format("is %s; allowed is %g to %g", pair->value.c_str(), low, high));
  }
  return *value;
}

base::Result<uint64_t> Options::get_uint64(std::string_view key, uint64_t fallback, uint64_t low,
                                           uint64_t high) {
  const Pair* pair = find(key);
  if (pair == nullptr) return fallback;
  const base::Result<uint64_t> value = base::parse_uint64(pair->value);
  if (!value.ok()) return bad(key, "must be a whole number: " + value.status().message());
  if (*value < low || *value > high) {
    return bad(key,
               base::format("is %s; allowed is %llu to %llu", pair->value.c_str(),
                            static_cast<unsigned long long>(low), static_cast<unsigned long long>(high)));
  }
  return *value;
}

base::Result<uint64_t> Options::get_bytes(std::string_view key, uint64_t fallback, uint64_t low,
                                          uint64_t high) {
  const Pair* pair = find(key);
  if (pair == nullptr) return fallback;
  const base::Result<uint64_t> value = base::parse_bytes(pair->value);
  if (!value.ok()) return bad(key, "must be a size: " + value.status().message());
  if (*value < low || *value > high) {
    return bad(key, base::format("is %s; allowed is %s to %s", pair->value.c_str(),
                                 base::format_bytes(low).c_str(), base::format_bytes(high).c_str()));
  }
  return *value;
}

base::Result<bool> Options::get_bool(std::string_view key, bool fallback) {
  GPUSHARE_ASSIGN_OR_RETURN(const uint64_t value, get_uint64(key, fallback ? 1 : 0, 0, 1));
  return value == 1;
}

base::Result<std::string> Options::get_string(std::string_view key, std::string_view fallback) {
  const Pair* pair = find(key);
  return std::string(pair == nullptr ? fallback : std::string_view(pair->value));
}

base::Status Options::finish() const {
  for (const Pair& pair : pairs_) {
    if (std::find(known_.begin(), known_.end(), pair.key) != known_.end()) continue;
    std::string all;
    for (const std::string& key : known_) all += (all.empty() ? "" : ", ") + key;
    return bad("'" + pair.key + "'", "is unknown; known are " + all);
  }
  return {};
}

}  // namespace gpushare::device
