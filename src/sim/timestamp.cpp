// SPDX-License-Identifier: Apache-2.0
#include "sim/timestamp.hpp"

#include <chrono>
#include <cstdio>
#include <string>

namespace gpushare::sim {
namespace {

// Seconds east of UTC that end the text, which then ends before them; false if there is something else after the time.
bool take_zone(std::string_view& text, int64_t* seconds) {
  *seconds = 0;
  if (text.ends_with('Z')) {
    text.remove_suffix(1);
    return true;
  }
  const size_t sign = text.find_last_of("+-");
  if (sign == std::string_view::npos || sign < 11) return true;  // the date's own
  int hours = 0, minutes = 0, used = 0;
  const std::string zone(text.substr(sign + 1));
  if (std::sscanf(zone.c_str(), "%2d:%2d%n", &hours, &minutes, &used) != 2 ||
      static_cast<size_t>(used) != zone.size() || hours > 14 || minutes > 59 || hours < 0 || minutes < 0)
    return false;
  *seconds = (hours * 60 + minutes) * 60 * (text[sign] == '-' ? -1 : 1);
  text = text.substr(0, sign);
  return true;
}

}  // namespace

bool parse_timestamp(std::string_view text, uint64_t* ns) {
  int year = 0, month = 0, day = 0, hour = 0, minute = 0;
  double second = 0;
  int used = 0;
  int64_t zone_s = 0;
  if (text.size() > 64 || !take_zone(text, &zone_s)) return false;
  std::string copy(text);
  if (copy.size() > 10 && copy[10] == 'T') copy[10] = ' ';
  if (std::sscanf(copy.c_str(), "%4d-%2d-%2d %2d:%2d:%lf%n", &year, &month, &day, &hour, &minute, &second,
                  &used) != 6 ||
      static_cast<size_t>(used) != copy.size())
    return false;
  const std::chrono::year_month_day date{std::chrono::year(year),
                                         std::chrono::month(static_cast<unsigned>(month)),
                                         std::chrono::day(static_cast<unsigned>(day))};
  if (year < 1970 || year > 2200 || !date.ok() || hour < 0 || hour > 23 || minute < 0 || minute > 59 ||
      !(second >= 0 && second < 61))
    return false;
  const int64_t days = std::chrono::sys_days(date).time_since_epoch().count();
  const int64_t whole_s = (days * 24 + hour) * 3600 + int64_t{minute} * 60 - zone_s;
  if (whole_s < 0) return false;
  *ns = static_cast<uint64_t>(whole_s) * 1'000'000'000ull + static_cast<uint64_t>(second * 1e9);
  return true;
}

}  // namespace gpushare::sim
