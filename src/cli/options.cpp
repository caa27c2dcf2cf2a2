// SPDX-License-Identifier: Apache-2.0
#include "cli/options.hpp"

#include <algorithm>

#include "base/units.hpp"

namespace gpushare::cli {

base::Status bad_option(const char* option, const std::string& value, const std::string& allowed) {
  return {GPUSHARE_INVALID_ARGUMENT,
          base::format("%s: '%s' is not allowed; %s", option, value.c_str(), allowed.c_str())};
}

std::vector<std::string> split_list(const std::string& text) {
  std::vector<std::string> out(1);
  for (const char c : text)
    if (c == ',')
      out.emplace_back();
    else
      out.back() += c;
  return out;
}

base::Result<std::vector<std::string>> parse_names(const char* option, const std::string& text,
                                                   std::span<const char* const> known) {
  std::string all;
  for (const char* name : known) all += (all.empty() ? "" : ", ") + std::string(name);
  std::vector<std::string> names;
  for (std::string& name : split_list(text)) {
    if (std::find(known.begin(), known.end(), name) == known.end())
      return bad_option(option, name, "there are " + all + ", separated by commas");
    if (std::find(names.begin(), names.end(), name) != names.end())
      return bad_option(option, name, "name each once");
    names.push_back(std::move(name));
  }
  return names;
}

base::Result<double> parse_number(const char* option, const std::string& text, double low, bool low_allowed,
                                  double high) {
  const base::Result<double> value = base::parse_double(text);
  if (value.ok() && (*value > low || (low_allowed && *value == low)) && *value <= high) return *value;
  return bad_option(
      option, text,
      base::format("give a number %s %g, at most %g", low_allowed ? "from" : "above", low, high));
}

base::Result<uint64_t> parse_count(const char* option, const std::string& text, uint64_t high, uint64_t low) {
  const base::Result<uint64_t> value = base::parse_uint64(text);
  if (value.ok() && *value >= low && *value <= high) return *value;
  return bad_option(
      option, text,
      base::format("give a whole number from %llu to %llu", static_cast<unsigned long long>(low),
                   static_cast<unsigned long long>(high)));
}

base::Result<uint64_t> parse_size(const char* option, const std::string& text) {
  const base::Result<uint64_t> bytes = base::parse_size(text);
  if (bytes.ok() && *bytes > 0) return *bytes;
  if (!bytes.ok() && base::parse_bytes(text).ok())  // all that it lacks is a unit
    return bytes.status().with_context(option);
  return bad_option(option, text, "give a size such as 512MiB, 16GiB or 16GB, above 0");
}

}  // namespace gpushare::cli
