// SPDX-License-Identifier: Apache-2.0
#include "base/units.hpp"

#include <array>
#include <charconv>
#include <cmath>

#include "base/saturate.hpp"

namespace gpushare::base {
namespace {

Status bad_number(std::string_view text, const char* what) {
  return {GPUSHARE_INVALID_ARGUMENT,
          format("'%.*s' is not %s", static_cast<int>(std::min<size_t>(text.size(), 64)), text.data(), what)};
}

template <class T>
Result<T> parse_whole(std::string_view text, const char* what) {
  T value{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end) return bad_number(text, what);
  return value;
}

}  // namespace

Result<double> parse_double(std::string_view text) {
  GPUSHARE_ASSIGN_OR_RETURN(const double value, parse_whole<double>(text, "a number"));
  if (!std::isfinite(value)) return bad_number(text, "a finite number");
  return value;
}

Result<double> parse_percent(std::string_view text) {
  static constexpr const char* kWanted = "a percentage such as 30% or 12.5%, above 0 and at most 100%";
  if (text.empty() || text.back() != '%') return bad_number(text, kWanted);
  const Result<double> value = parse_double(text.substr(0, text.size() - 1));
  if (!value.ok() || *value <= 0 || *value > 100) return bad_number(text, kWanted);
  return *value / 100;
}

Result<uint64_t> parse_uint64(std::string_view text) {
  return parse_whole<uint64_t>(text, "a whole number of 0 or more");
}

Result<uint64_t> parse_bytes(std::string_view text) {
  static constexpr const char* kWanted = "a size such as 4096, 64KiB, 1.5GiB, 16G or 16GB (up to 8 EiB)";
  size_t digits = 0;
  while (digits < text.size() && (text[digits] == '.' || (text[digits] >= '0' && text[digits] <= '9')))
    ++digits;
  std::string_view suffix = text.substr(digits);
  while (!suffix.empty() && suffix.front() == ' ') suffix.remove_prefix(1);
  struct Unit {
    std::string_view name;
    double factor;
  };
  static constexpr double kKi = 1024.0;
  static constexpr std::array<Unit, 21> kUnits{{{"", 1},
                                                {"B", 1},
                                                {"K", kKi},
                                                {"KiB", kKi},
                                                {"KB", 1e3},
                                                {"kB", 1e3},
                                                {"M", kKi * kKi},
                                                {"MiB", kKi * kKi},
                                                {"MB", 1e6},
                                                {"G", kKi * kKi * kKi},
                                                {"GiB", kKi * kKi * kKi},
                                                {"GB", 1e9},
                                                {"T", kKi * kKi * kKi * kKi},
                                                {"TiB", kKi * kKi * kKi * kKi},
                                                {"TB", 1e12},
                                                {"P", kKi * kKi * kKi * kKi * kKi},
                                                {"PiB", kKi * kKi * kKi * kKi * kKi},
                                                {"PB", 1e15},
                                                {"E", kKi * kKi * kKi * kKi * kKi * kKi},
                                                {"EiB", kKi * kKi * kKi * kKi * kKi * kKi},
                                                {"EB", 1e18}}};
  for (const Unit& unit : kUnits) {
    if (unit.name != suffix) continue;
    const std::string_view number = text.substr(0, digits);
    if (number.empty()) return bad_number(text, kWanted);
    if (unit.factor == 1) {
      if (Result<uint64_t> whole = parse_uint64(number); whole.ok() && *whole <= (1ull << 63)) return whole;
    }
    const Result<double> value = parse_double(number);
    if (!value.ok() || *value * unit.factor > 9223372036854775808.0) return bad_number(text, kWanted);
    return to_uint64(std::round(*value * unit.factor));
  }
  return bad_number(text, kWanted);
}

Result<uint64_t> parse_size(std::string_view text) {
  Result<uint64_t> bytes = parse_bytes(text);
  if (!bytes.ok() || *bytes == 0 || (text.back() != '.' && (text.back() < '0' || text.back() > '9')))
    return bytes;
  const std::string number(text.substr(0, 32));
  return Status(GPUSHARE_INVALID_ARGUMENT,
                format("'%s' has no unit: %sGiB or %sB?", number.c_str(), number.c_str(), number.c_str()));
}

std::string format_bytes(uint64_t bytes) {
  static constexpr std::array<const char*, 6> kNames{"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) return format("%llu B", static_cast<unsigned long long>(bytes));
  double value = static_cast<double>(bytes) / 1024.0;
  size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < kNames.size()) {
    value /= 1024.0;
    ++unit;
  }
  return format("%.2f %s", value, kNames[unit]);
}

std::string format_duration_ns(uint64_t ns) {
  const double value = static_cast<double>(ns);
  if (ns < 1000) return format("%llu ns", static_cast<unsigned long long>(ns));
  if (value < 1e6) return format("%.2f us", value / 1e3);
  if (value < 1e9) return format("%.2f ms", value / 1e6);
  if (value < 120e9) return format("%.2f s", value / 1e9);
  if (value < 7200e9) return format("%.1f min", value / 60e9);
  return format("%.1f h", value / 3600e9);
}

}  // namespace gpushare::base
