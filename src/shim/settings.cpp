// SPDX-License-Identifier: Apache-2.0
#include "shim/settings.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "shim/books.hpp"
#include "shim/driver.hpp"

namespace gpushare::shim {
namespace {

Settings g_settings;
bool g_read = false;

}  // namespace

bool parse_bytes(const char* text, uint64_t* out_bytes) {
  // By hand: strtod reads the decimal point of the program's language.
  double value = 0, scale = 1;
  bool digits = false, point = false;
  const char* at = text;
  for (; (*at >= '0' && *at <= '9') || (*at == '.' && !point); ++at) {
    if (*at == '.') {
      point = true;
      continue;
    }
    digits = true;
    value = value * 10 + (*at - '0');
    if (point) scale *= 10;
  }
  if (!digits) return false;
  double unit = 1;
  if (const char* letter = *at != 0 ? std::strchr("KMGT", *at) : nullptr; letter != nullptr && *letter != 0) {
    const bool decimal = at[1] == 'B';
    for (const char* step = "KMGT"; step <= letter && *step != 0; ++step) {
      unit *= decimal ? 1000 : 1024;
      if (*step == *letter) break;
    }
    ++at;
    if (std::strcmp(at, "iB") == 0)
      at += 2;
    else if (decimal)
      ++at;
  } else if (*at == 'B') {
    ++at;
  }
  if (*at != 0) return false;
  const double bytes = value / scale * unit;
  if (bytes >= 9.2e18) return false;
  *out_bytes = static_cast<uint64_t>(bytes);
  return true;
}

// Called with the set-up lock of the books held.
const Settings& load_settings() {
  if (g_read) return g_settings;
  g_read = true;
  if (const char* fail = secure_getenv("GPUSHARE_SHIM_FAIL"); fail != nullptr)
    g_settings.fails_closed = std::strcmp(fail, "closed") == 0;
  if (const char* group = secure_getenv("GPUSHARE_SHIM_GROUP"); group != nullptr)
    std::snprintf(g_settings.group, sizeof g_settings.group, "%s", group);
  const char* const consequence = g_settings.fails_closed ? "no memory is given (GPUSHARE_SHIM_FAIL=closed)"
                                                          : "this process has no such limit";
  const auto size = [consequence](const char* name, uint64_t otherwise) {
    const char* text = secure_getenv(name);
    uint64_t bytes = 0;
    if (text == nullptr || *text == 0) return otherwise;
    if (parse_bytes(text, &bytes)) return bytes;
    g_settings.broken = true;
    log_line("%s=%s is not a number of bytes, as 8G is: %s", name, text, consequence);
    return otherwise;
  };
  const uint64_t memory = size("GPUSHARE_MEMORY", kNoLimit);
  uint64_t soft = size("GPUSHARE_SOFT", kNoLimit);
  if (memory == kNoLimit && soft != kNoLimit) {
    g_settings.broken = true;
    log_line("GPUSHARE_SOFT is set and GPUSHARE_MEMORY is not: %s", consequence);
    soft = kNoLimit;
  }
  g_settings.limits = make_limits(
      memory, soft, size("GPUSHARE_PINNED", memory == kNoLimit ? kNoLimit : default_pinned_bytes()));
  return g_settings;
}

}  // namespace gpushare::shim
