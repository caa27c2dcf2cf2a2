// SPDX-License-Identifier: Apache-2.0
#include "sim/serving/requests.hpp"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <map>
#include <random>
#include <sstream>

#include "base/units.hpp"

namespace gpushare::sim {
namespace {

constexpr double kLeastUnits = 0.5;
constexpr double kRangeUnits = 20;

base::Status invalid(std::string_view text) {
  return base::Status(GPUSHARE_INVALID_ARGUMENT,
                      base::format("synthetic requests '%.*s': allowed are modes:1 to modes:8, "
                                   "bimodal:SD1[/SD2] with deviations above 0 "
                                   "and up to 5, and static:MS",
                                   static_cast<int>(text.size()), text.data()));
}

base::Status malformed(size_t line, const std::string& what) {
  return base::Status(GPUSHARE_MALFORMED_INPUT, base::format("requests, line %zu: %s", line, what.c_str()));
}

std::vector<std::string_view> split(std::string_view line, char by) {
  std::vector<std::string_view> fields;
  while (true) {
    const size_t end = line.find(by);
    fields.push_back(line.substr(0, end));
    if (end == std::string_view::npos) return fields;
    line.remove_prefix(end + 1);
  }
}

// "2023-11-16 18:15:46.6805900" to nanoseconds since the epoch (proleptic Gregorian, no time zone).
bool parse_timestamp(std::string_view text, uint64_t* ns) {
  int year = 0, month = 0, day = 0, hour = 0, minute = 0;
  double second = 0;
  int used = 0;
  const std::string copy(text);
  if (std::sscanf(copy.c_str(), "%4d-%2d-%2d %2d:%2d:%lf%n", &year, &month, &day, &hour, &minute, &second,
                  &used) != 6 ||
      static_cast<size_t>(used) != copy.size())
    return false;
  if (year < 1970 || year > 2200 || month < 1 || month > 12 || day < 1 || day > 31 || hour < 0 || hour > 23 ||
      minute < 0 || minute > 59 || !(second >= 0 && second < 61))
    return false;
  const int shifted = year - (month <= 2 ? 1 : 0);
  const int era = shifted / 400, of_era = shifted % 400;
  const int64_t of_year = (int64_t{153} * (month + (month > 2 ? -3 : 9)) + 2) / 5 + day - 1;
  const int64_t days = static_cast<int64_t>(era) * 146097 + int64_t{of_era} * 365 + of_era / 4 -
                       of_era / 100 + of_year - 719468;
  *ns = static_cast<uint64_t>((days * 24 + hour) * 3600 + int64_t{minute} * 60) * 1'000'000'000ull +
        static_cast<uint64_t>(second * 1e9);
  return true;
}

}  // namespace

base::Result<SyntheticSpec> parse_synthetic(std::string_view text) {
  SyntheticSpec spec;
  spec.name = std::string(text);
  const size_t colon = text.find(':');
  if (colon == std::string_view::npos) return invalid(text);
  const std::string_view kind = text.substr(0, colon), rest = text.substr(colon + 1);
  if (kind == "modes") {
    const base::Result<uint64_t> n = base::parse_uint64(rest);
    if (!n.ok() || *n < 1 || *n > 8) return invalid(text);
    for (uint64_t i = 0; i < *n; ++i)
      spec.modes.push_back({kRangeUnits * (static_cast<double>(i) + 0.5) / static_cast<double>(*n), 1});
    return spec;
  }
  if (kind == "bimodal") {
    const std::vector<std::string_view> parts = split(rest, '/');
    if (parts.size() > 2) return invalid(text);
    const base::Result<double> first = base::parse_double(parts.front()),
                               second = base::parse_double(parts.back());
    if (!first.ok() || !second.ok() || !(*first > 0 && *first <= 5) || !(*second > 0 && *second <= 5))
      return invalid(text);
    spec.modes = {{kRangeUnits / 4, *first}, {kRangeUnits * 3 / 4, *second}};
    return spec;
  }
  if (kind == "static") {
    const base::Result<double> ms = base::parse_double(rest);
    if (!ms.ok() || !(*ms > 0 && *ms <= 1e6)) return invalid(text);
    spec.unit_ms = *ms;
    spec.modes = {{1, 0}};
    return spec;
  }
  return invalid(text);
}

namespace {

double draw_units(const Mode& mode, std::mt19937_64& random) {
  if (mode.sd_units == 0) return mode.mean_units;
  std::normal_distribution<double> normal(mode.mean_units, mode.sd_units);
  double units = normal(random);
  while (units < kLeastUnits) units = normal(random);
  return units;
}

size_t draw_mode(const SyntheticSpec& spec, std::mt19937_64& random) {
  double total = 0;
  for (const Mode& mode : spec.modes) total += mode.share;
  double at = std::uniform_real_distribution<double>(0, total)(random);
  for (size_t i = 0; i + 1 < spec.modes.size(); ++i)
    if ((at -= spec.modes[i].share) < 0) return i;
  return spec.modes.size() - 1;
}

}  // namespace

double mean_execution_ns(const SyntheticSpec& spec) {
  std::mt19937_64 random(12345);
  double sum = 0;
  constexpr int kDraws = 20'000;
  for (int i = 0; i < kDraws; ++i) sum += draw_units(spec.modes[draw_mode(spec, random)], random);
  return sum / kDraws * spec.unit_ms * 1e6;
}

std::vector<TimedRequest> draw(const SyntheticSpec& spec, const ArrivalOptions& options) {
  // Arrivals and execution times from generators of their own: another load replays the same work.
  std::mt19937_64 work(options.seed * 2 + 1), gaps(options.seed * 2 + 2);
  std::exponential_distribution<double> gap(1);
  const double variance = options.burstiness * options.burstiness;
  std::gamma_distribution<double> level(variance > 0 ? 1 / variance : 1, variance > 0 ? variance : 1);
  std::vector<TimedRequest> requests(options.requests);
  double now = 0, rate = 1, period_end = 0;
  for (TimedRequest& request : requests) {
    if (variance > 0 && now >= period_end) {
      rate = std::max(level(gaps), 0.02);
      period_end = now + 20;
    }
    now += gap(gaps) / rate;
    request.arrival_ns = static_cast<uint64_t>(now / options.rate_per_s * 1e9);
    const size_t mode = draw_mode(spec, work);
    request.application = static_cast<uint32_t>(mode);
    request.execution_ns = static_cast<uint64_t>(draw_units(spec.modes[mode], work) * spec.unit_ms * 1e6);
  }
  return requests;
}

base::Result<std::vector<TimedRequest>> parse_requests(std::string_view text, const TokenRule& rule) {
  std::vector<TimedRequest> requests;
  std::map<std::string, uint32_t, std::less<>> names;
  size_t line_number = 0;
  bool tokens = false, with_slo = false;
  uint64_t first_ns = 0;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    ++line_number;
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    if (line_number == 1) {
      tokens = line == "TIMESTAMP,ContextTokens,GeneratedTokens";
      with_slo = line == "arrival_s,application,exec_ms,slo_ms";
      if (!tokens && !with_slo && line != "arrival_s,application,exec_ms")
        return malformed(1,
                         "the header is neither 'arrival_s,application,exec_ms[,slo_ms]' nor "
                         "'TIMESTAMP,ContextTokens,GeneratedTokens'");
      continue;
    }
    if (line.empty()) continue;
    const std::vector<std::string_view> fields = split(line, ',');
    if (fields.size() != (with_slo ? 4u : 3u))
      return malformed(line_number, base::format("%zu fields", fields.size()));
    TimedRequest request;
    if (tokens) {
      uint64_t at = 0;
      if (!parse_timestamp(fields[0], &at))
        return malformed(line_number, "the timestamp is not 'YYYY-MM-DD hh:mm:ss.fraction'");
      const base::Result<uint64_t> context = base::parse_uint64(fields[1]),
                                   generated = base::parse_uint64(fields[2]);
      if (!context.ok() || !generated.ok() || *context > 10'000'000 || *generated > 10'000'000)
        return malformed(line_number, "a token count is not a whole number up to 10,000,000");
      if (requests.empty()) first_ns = at;
      if (at < first_ns) return malformed(line_number, "arrives before the first");
      request.arrival_ns = at - first_ns;
      request.execution_ns =
          static_cast<uint64_t>((static_cast<double>(*context) * rule.prefill_ms_per_token +
                                 static_cast<double>(*generated) * rule.decode_ms_per_token) *
                                1e6) +
          1;
      uint32_t octave = 0;
      while ((*context >> octave) > 1) ++octave;
      request.application = octave;
    } else {
      const base::Result<double> arrival = base::parse_double(fields[0]),
                                 execution = base::parse_double(fields[2]);
      if (!arrival.ok() || !(*arrival >= 0 && *arrival <= 1e9))
        return malformed(line_number, "arrival_s is not a number from 0 to 1e9");
      if (!execution.ok() || !(*execution > 0 && *execution <= 1e9))
        return malformed(line_number, "exec_ms is not a number above 0, up to 1e9");
      if (fields[1].empty()) return malformed(line_number, "no application");
      request.arrival_ns = static_cast<uint64_t>(*arrival * 1e9);
      request.execution_ns = std::max<uint64_t>(1, static_cast<uint64_t>(*execution * 1e6));
      request.application =
          names.try_emplace(std::string(fields[1]), static_cast<uint32_t>(names.size())).first->second;
      if (with_slo) {
        const base::Result<double> slo = base::parse_double(fields[3]);
        if (!slo.ok() || !(*slo > 0 && *slo <= 1e9))
          return malformed(line_number, "slo_ms is not a number above 0, up to 1e9");
        request.slo_ns = std::max<uint64_t>(1, static_cast<uint64_t>(*slo * 1e6));
      }
    }
    requests.push_back(request);
  }
  if (line_number == 0) return malformed(1, "empty");
  std::stable_sort(requests.begin(), requests.end(),
                   [](const TimedRequest& a, const TimedRequest& b) { return a.arrival_ns < b.arrival_ns; });
  return requests;
}

base::Result<std::vector<TimedRequest>> read_requests(const std::string& path, const TokenRule& rule) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file)
    return base::Status(GPUSHARE_IO_ERROR,
                        base::format("cannot open '%s': %s", path.c_str(), std::strerror(errno)), errno);
  std::ostringstream text;
  text << file.rdbuf();
  if (file.bad())
    return base::Status(GPUSHARE_IO_ERROR, base::format("cannot read '%s'", path.c_str()), errno);
  base::Result<std::vector<TimedRequest>> requests = parse_requests(text.str(), rule);
  if (!requests.ok()) return requests.status().with_context(path);
  return requests;
}

double execution_quantile_ns(const std::vector<TimedRequest>& requests, double q) {
  if (requests.empty()) return 0;
  std::vector<uint64_t> times;
  times.reserve(requests.size());
  for (const TimedRequest& request : requests) times.push_back(request.execution_ns);
  const size_t at = std::min(times.size() - 1, static_cast<size_t>(q * static_cast<double>(times.size())));
  std::nth_element(times.begin(), times.begin() + static_cast<ptrdiff_t>(at), times.end());
  return static_cast<double>(times[at]);
}

}  // namespace gpushare::sim
