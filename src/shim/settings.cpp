// SPDX-License-Identifier: Apache-2.0
#include "shim/settings.hpp"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "shim/books.hpp"
#include "shim/driver.hpp"
#include "shim/process.hpp"
#include "shim/small_heap.hpp"
#include "shim/words.hpp"

namespace gpushare::shim {
namespace {

Settings g_settings;
bool g_read = false;

// The number that `text` begins with; returns where it ends, or null if there is none. By hand, because strtod reads
// the decimal point of the program's language.
const char* read_number(const char* text, double* out) {
  double value = 0, scale = 1;
  bool digits = false, point = false;
  for (; (*text >= '0' && *text <= '9') || (*text == '.' && !point); ++text) {
    if (*text == '.') {
      point = true;
      continue;
    }
    digits = true;
    value = value * 10 + (*text - '0');
    if (point) scale *= 10;
  }
  *out = value / scale;
  return digits ? text : nullptr;
}

// `end`: what must follow the number.
bool parse_number(const char* text, double* out, char end = 0) {
  const bool negative = *text == '-';
  const char* at = read_number(text + (negative ? 1 : 0), out);
  if (negative) *out = -*out;
  return at != nullptr && *at == end && (end == 0 || at[1] == 0);
}

// "30%", as a part of 1.
bool parse_cap(const char* text, double* out) {
  double percent = 0;
  if (!parse_number(text, &percent, '%') || percent <= 0 || percent > 100) return false;
  *out = percent / 100;
  return true;
}

// `text` is one that parse_bytes() takes. "8" may mean 8 GiB, so it is refused.
bool has_unit(const char* text) {
  const char last = text[std::strlen(text) - 1];
  return last != '.' && (last < '0' || last > '9');
}

}  // namespace

Options g_options;

bool parse_bytes(const char* text, uint64_t* out_bytes) {
  constexpr const char* kUnits = "KMGT";
  double number = 0;
  const char* at = read_number(text, &number);
  if (at == nullptr) return false;
  double unit = 1;
  if (const char* letter = *at != 0 ? std::strchr(kUnits, *at) : nullptr; letter != nullptr) {
    const bool decimal = at[1] == 'B';
    for (const char* step = kUnits; step <= letter; ++step) unit *= decimal ? 1000 : 1024;
    ++at;
    if (std::strcmp(at, "iB") == 0)
      at += 2;
    else if (decimal)
      ++at;
  } else if (*at == 'B') {
    ++at;
  }
  if (*at != 0) return false;
  const double bytes = number * unit;
  if (bytes >= 9.2e18) return false;
  *out_bytes = static_cast<uint64_t>(bytes);
  return true;
}

// Called with the set-up lock of the books held.
const Settings& load_settings() {
  if (g_read) return g_settings;
  g_read = true;
  if (const char* fail = setting("GPUSHARE_SHIM_FAIL"); fail != nullptr && *fail != 0) {
    g_settings.fails_closed = std::strcmp(fail, "open") != 0;
    if (g_settings.fails_closed && std::strcmp(fail, "closed") != 0)
      log_line("GPUSHARE_SHIM_FAIL=%s is neither open nor closed: it is closed", fail);
  }
  if (const char* pageable = setting("GPUSHARE_PAGEABLE"); pageable != nullptr)
    g_settings.pageable = std::strcmp(pageable, "1") == 0;
  double look_ms = 0;
  const char* look = setting("GPUSHARE_SHIM_LOOK_MS");
  g_settings.look_ms = look != nullptr && parse_number(look, &look_ms) && look_ms >= 0 && look_ms < 1e6
                           ? static_cast<uint32_t>(look_ms)
                           : 500;
  if (const char* small = setting("GPUSHARE_SMALL_HEAP"); small != nullptr)
    g_wants_small = std::strcmp(small, "1") == 0 ? 1 : 0;
  if (const char* group = setting("GPUSHARE_SHIM_GROUP"); group != nullptr)
    std::snprintf(g_settings.group, sizeof g_settings.group, "%s", group);
  g_settings.aside =
      way_in() == Way::file && g_settings.group[0] == 0 && setting("GPUSHARE_MEMORY") == nullptr;
  const char* const consequence = g_settings.fails_closed ? "no memory is given (GPUSHARE_SHIM_FAIL=closed)"
                                                          : "this process has no such limit";
  const auto size = [consequence](const char* name, uint64_t otherwise) {
    const char* text = setting(name);
    uint64_t bytes = 0;
    if (text == nullptr || *text == 0) return otherwise;
    const bool number = parse_bytes(text, &bytes);
    if (number && (bytes == 0 || has_unit(text))) return bytes;
    g_settings.broken = true;
    if (number)
      log_line("%s=%s has no unit (%sGiB or %sB?): %s", name, text, text, text, consequence);
    else
      log_line("%s=%s is not a number of bytes, as 8G is: %s", name, text, consequence);
    return otherwise;
  };
  double cap = 0;
  if (const char* text = setting("GPUSHARE_CAP"); text != nullptr && *text != 0 && !parse_cap(text, &cap)) {
    g_settings.broken = true;
    log_line("GPUSHARE_CAP=%s is not a percentage above 0%% and at most 100%%: %s", text,
             g_settings.fails_closed ? consequence : "there is no cap");
  }
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

void read_options() {
  if (g_options.read) return;
  g_options.read = true;
  g_options.weight = 1;
  double number = 0;
  const auto given = [](const char* name) {
    const char* value = setting(name);
    return value != nullptr && *value != 0 ? value : nullptr;
  };
  if (const char* value = given("GPUSHARE_WEIGHT")) {
    if (parse_number(value, &number) && number > 0)
      g_options.weight = number;
    else
      log_line("GPUSHARE_WEIGHT=%s is not a number above 0: the weight is 1", value);
  }
  if (const char* value = given("GPUSHARE_CAP"))
    parse_cap(value, &g_options.cap);  // load_settings() says more
  if (const char* value = given("GPUSHARE_PRIORITY")) {
    if (parse_number(value, &number) && number > -2e9 && number < 2e9)
      g_options.priority = static_cast<int32_t>(number);
    else
      log_line("GPUSHARE_PRIORITY=%s is not a whole number: the priority is 0", value);
  }
  if (const char* value = given("GPUSHARE_CLASS")) {
    g_options.cls = std::strcmp(value, "opportunistic") == 0 ? 1 : 0;
    if (g_options.cls == 0 && std::strcmp(value, "guaranteed") != 0)
      log_line("GPUSHARE_CLASS=%s is neither guaranteed nor opportunistic: it is guaranteed", value);
  }
  if (const char* value = given("GPUSHARE_GROUP")) g_options.group = std::strtoull(value, nullptr, 16);
  if (const char* value = given("GPUSHARE_SOCKET")) {
    g_options.named = true;
    if (std::strlen(value) < sizeof g_options.socket)
      std::snprintf(g_options.socket, sizeof g_options.socket, "%s", value);
    else
      log_line("GPUSHARE_SOCKET=%s is longer than %zu bytes", value, sizeof g_options.socket - 1);
    return;
  }
  const char* folder = given("XDG_RUNTIME_DIR");
  if (folder != nullptr && std::strlen(folder) < 80) {
    std::snprintf(g_options.socket, sizeof g_options.socket, "%s/gpushare/daemon.sock", folder);
    if (access(g_options.socket, F_OK) == 0) return;
  }
  std::snprintf(g_options.socket, sizeof g_options.socket, "/run/gpushare/daemon.sock");
}

uint32_t take_share(Options* options) {
  const Share& share = group().share;
  const uint32_t said = load(share.said);
  uint32_t changed = 0;
  const auto take = [&](uint32_t which, auto& option, const auto& word) {
    const uint64_t bits = static_cast<uint64_t>(load(word));
    auto now = option;
    std::memcpy(&now, &bits, sizeof now);
    if ((said & which) == 0 || now == option) return;
    option = now;
    changed |= which;
  };
  take(Share::kWeight, options->weight, share.weight);
  take(Share::kClass, options->cls, share.cls);
  take(Share::kPriority, options->priority, share.priority);
  take(Share::kCap, options->cap, share.cap);
  return changed;
}

}  // namespace gpushare::shim
