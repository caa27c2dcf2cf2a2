// SPDX-License-Identifier: Apache-2.0
#include "sim/serving/requests.hpp"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <span>

#include "base/saturate.hpp"
#include "base/units.hpp"
#include "sched/slo/feature_model.hpp"
#include "sim/csv.hpp"
#include "sim/timestamp.hpp"

namespace gpushare::sim {
namespace {

constexpr double kLeastUnits = 0.5;
constexpr double kRangeUnits = 20;

base::Status invalid(std::string_view text) {
  return base::Status(GPUSHARE_INVALID_ARGUMENT,
                      base::format("synthetic requests '%.*s': allowed are modes:1 to modes:8, "
                                   "bimodal:SD1[/SD2] with deviations above 0 "
                                   "and up to 5, numeric:SD with a deviation of 0 to 1, and static:MS",
                                   static_cast<int>(text.size()), text.data()));
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
  if (kind == "numeric") {
    const base::Result<double> sd = base::parse_double(rest);
    if (!sd.ok() || !(*sd >= 0 && *sd <= 1)) return invalid(text);
    spec.numeric_sd = *sd;
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

// The feature is written to `request` if there is one.
double draw_numeric_units(double sd, std::mt19937_64& random, TimedRequest* request) {
  const double x = std::uniform_real_distribution<double>(kLeastUnits, kLeastUnits + kRangeUnits)(random);
  if (request != nullptr) request->features = {x};
  return sd == 0 ? x : std::max(kLeastUnits, x * std::normal_distribution<double>(1, sd)(random));
}

size_t draw_mode(const SyntheticSpec& spec, std::mt19937_64& random) {
  double total = 0;
  for (const Mode& mode : spec.modes) total += mode.share;
  double at = std::uniform_real_distribution<double>(0, total)(random);
  for (size_t i = 0; i + 1 < spec.modes.size(); ++i)
    if ((at -= spec.modes[i].share) < 0) return i;
  return spec.modes.size() - 1;
}

const std::vector<std::string> kOwnHeader = {"arrival_s", "application", "exec_ms"};
// A public trace of language models: the names of its columns.
struct TokenLayout {
  const char *time, *context, *generated;
  bool dated;              // the time is a date, else seconds
  bool zero_is_a_failure;  // without generated tokens
};
constexpr TokenLayout kTokenLayouts[] = {
    {"TIMESTAMP", "ContextTokens", "GeneratedTokens", true, false},
    {"Timestamp", "Request tokens", "Response tokens", false, true},
};
constexpr double kMostSeconds = 1e9;
constexpr double kMostMs = 1e9;
constexpr double kMostFeature = 1e15;
constexpr uint64_t kMostTokens = 10'000'000;
constexpr uint64_t kMostRequestBytes = uint64_t{1} << 30;

uint64_t at_least_one_ns(double ms) {
  return std::max<uint64_t>(1, static_cast<uint64_t>(ms * 1e6));
}

// The columns of our own layout, or 0 if the header is another's.
struct OwnLayout {
  bool matches = false;
  bool with_slo = false;
  size_t features = 0;
};
OwnLayout own_layout(const std::vector<std::string>& header) {
  OwnLayout layout;
  if (header.size() < kOwnHeader.size() || !std::equal(kOwnHeader.begin(), kOwnHeader.end(), header.begin()))
    return layout;
  size_t at = kOwnHeader.size();
  layout.with_slo = at < header.size() && header[at] == "slo_ms";
  if (layout.with_slo) ++at;
  layout.features = header.size() - at;
  layout.matches = layout.features <= sched::slo::FeatureModel::kMaxFeatures &&
                   std::all_of(header.begin() + static_cast<ptrdiff_t>(at), header.end(),
                               [](const std::string& name) { return name.starts_with("feature"); });
  return layout;
}

base::Result<TimedRequest> parse_own(const CsvFields& fields, const OwnLayout& layout,
                                     std::map<std::string, uint32_t>& applications) {
  TimedRequest request;
  GPUSHARE_ASSIGN_OR_RETURN(const double arrival_s, fields.number(0, 0, kMostSeconds, false));
  GPUSHARE_ASSIGN_OR_RETURN(const double execution_ms, fields.number(2, 0, kMostMs, true));
  if (fields.text(1).empty()) return fields.refuse(1, "must be a name");
  request.arrival_ns = static_cast<uint64_t>(arrival_s * 1e9);
  request.execution_ns = at_least_one_ns(execution_ms);
  request.application =
      applications.try_emplace(fields.text(1), static_cast<uint32_t>(applications.size())).first->second;
  if (layout.with_slo) {
    GPUSHARE_ASSIGN_OR_RETURN(const double slo_ms, fields.number(3, 0, kMostMs, true));
    request.slo_ns = at_least_one_ns(slo_ms);
  }
  for (size_t i = 0; i < layout.features; ++i) {
    GPUSHARE_ASSIGN_OR_RETURN(const double value,
                              fields.number(kOwnHeader.size() + layout.with_slo + i, 0, kMostFeature, false));
    request.features.push_back(value);
  }
  return request;
}

const TokenLayout* token_layout(const CsvFields& header) {
  for (const TokenLayout& layout : kTokenLayouts)
    if (header.has(layout.time) && header.has(layout.context) && header.has(layout.generated)) return &layout;
  return nullptr;
}

TimedRequest of_tokens(uint64_t arrival_ns, uint64_t context, uint64_t generated, const TokenRule& rule) {
  TimedRequest request;
  request.arrival_ns = arrival_ns;
  request.execution_ns = static_cast<uint64_t>((static_cast<double>(context) * rule.prefill_ms_per_token +
                                                static_cast<double>(generated) * rule.decode_ms_per_token) *
                                               1e6) +
                         1;
  while ((context >> request.application) > 1) ++request.application;
  request.features = {static_cast<double>(context)};
  return request;
}

// Shifts arrivals, which may count from any time, so that the first request comes at 0. `failed` and `cut` were left out.
base::Result<std::vector<TimedRequest>> from_first(std::vector<TimedRequest> requests, uint64_t failed,
                                                   bool cut, std::vector<std::string>* notes) {
  std::stable_sort(requests.begin(), requests.end(),
                   [](const TimedRequest& a, const TimedRequest& b) { return a.arrival_ns < b.arrival_ns; });
  const uint64_t first_ns = requests.empty() ? 0 : requests.front().arrival_ns;
  for (TimedRequest& request : requests) request.arrival_ns -= first_ns;
  if (notes != nullptr && failed > 0)
    notes->push_back(base::format("%llu requests without a response, which failed, are left out",
                                  static_cast<unsigned long long>(failed)));
  if (notes != nullptr && cut) notes->emplace_back("the last line is cut off and left out");
  return requests;
}

base::Result<std::vector<TimedRequest>> parse_token_rows(std::vector<CsvRow> rows, bool ended,
                                                         const std::string& file, const TokenRule& rule,
                                                         std::vector<std::string>* notes) {
  const CsvFields header(file, rows.front(), rows.front());
  const TokenLayout& layout = *token_layout(header);
  const size_t time = header.column(layout.time), context_at = header.column(layout.context),
               generated_at = header.column(layout.generated);
  const bool cut = rows.size() > 2 && !ended && rows.back().fields.size() < rows.front().fields.size();
  if (cut) rows.pop_back();
  std::vector<TimedRequest> requests;
  uint64_t failed = 0;
  for (const CsvRow& row : std::span(rows).subspan(1)) {
    const CsvFields fields(file, rows.front(), row);
    GPUSHARE_RETURN_IF_ERROR(fields.check());
    uint64_t arrival_ns = 0;
    if (layout.dated) {
      if (!parse_timestamp(fields.text(time), &arrival_ns))
        return fields.refuse(time, "must be 'YYYY-MM-DD hh:mm:ss.fraction', with or without a zone");
      if (!requests.empty() && arrival_ns < requests.front().arrival_ns)
        return fields.refuse(time, "must not be before the first request's");
    } else {
      GPUSHARE_ASSIGN_OR_RETURN(const double seconds, fields.number(time, 0, kMostSeconds, false));
      arrival_ns = static_cast<uint64_t>(seconds * 1e9);
    }
    GPUSHARE_ASSIGN_OR_RETURN(const uint64_t context, fields.count(context_at, 0, kMostTokens));
    GPUSHARE_ASSIGN_OR_RETURN(const uint64_t generated, fields.count(generated_at, 0, kMostTokens));
    if (layout.zero_is_a_failure && generated == 0)
      ++failed;
    else
      requests.push_back(of_tokens(arrival_ns, context, generated, rule));
  }
  return from_first(std::move(requests), failed, cut, notes);
}

// Mooncake's trace: an object with timestamp (ms), input_length and output_length a line.
base::Result<std::vector<TimedRequest>> parse_json_lines(std::string_view text, const std::string& file,
                                                         const TokenRule& rule,
                                                         std::vector<std::string>* notes) {
  std::vector<TimedRequest> requests;
  bool cut = false;
  const bool ended = text.ends_with('\n');
  for (size_t number = 1; !text.empty(); ++number) {
    const size_t end = text.find('\n');
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const auto json = nlohmann::json::parse(line.begin(), line.end(), nullptr, false);
    if (json.is_discarded() && text.empty() && !ended && !requests.empty()) {
      cut = true;
      break;
    }
    const auto value = [&](const char* key) -> double {
      const auto found = json.is_object() ? json.find(key) : json.end();
      if (!json.is_object() || found == json.end() || !found->is_number()) return -1;
      return found->get<double>();
    };
    const double ms = value("timestamp"), context = value("input_length"), generated = value("output_length");
    const auto most = static_cast<double>(kMostTokens);
    if (!(ms >= 0 && ms <= kMostSeconds * 1e3 && context >= 0 && context <= most && generated >= 0 &&
          generated <= most))
      return base::Status(GPUSHARE_MALFORMED_INPUT,
                          base::format("%s:%zu: expected an object with timestamp (ms), input_length and "
                                       "output_length, numbers from 0",
                                       file.c_str(), number));
    requests.push_back(of_tokens(static_cast<uint64_t>(ms * 1e6), static_cast<uint64_t>(context),
                                 static_cast<uint64_t>(generated), rule));
  }
  return from_first(std::move(requests), 0, cut, notes);
}

}  // namespace

double mean_execution_ns(const SyntheticSpec& spec) {
  std::mt19937_64 random(12345);
  double sum = 0;
  constexpr int kDraws = 20'000;
  for (int i = 0; i < kDraws; ++i)
    sum += spec.numeric_sd >= 0 ? draw_numeric_units(spec.numeric_sd, random, nullptr)
                                : draw_units(spec.modes[draw_mode(spec, random)], random);
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
    request.arrival_ns = base::to_uint64(now / options.rate_per_s * 1e9);
    if (spec.numeric_sd >= 0) {
      request.execution_ns =
          static_cast<uint64_t>(draw_numeric_units(spec.numeric_sd, work, &request) * spec.unit_ms * 1e6);
      continue;
    }
    const size_t mode = draw_mode(spec, work);
    request.application = static_cast<uint32_t>(mode);
    request.execution_ns = static_cast<uint64_t>(draw_units(spec.modes[mode], work) * spec.unit_ms * 1e6);
  }
  return requests;
}

base::Result<std::vector<TimedRequest>> parse_requests(std::string_view text, const std::string& file,
                                                       const TokenRule& rule,
                                                       std::vector<std::string>* notes) {
  if (const size_t start = text.find_first_not_of(" \t\r\n");
      start != std::string_view::npos && text[start] == '{')
    return parse_json_lines(text, file, rule, notes);
  const bool ended = text.ends_with('\n');
  GPUSHARE_ASSIGN_OR_RETURN(std::vector<CsvRow> rows, parse_csv(text, file));
  if (rows.empty())
    return base::Status(GPUSHARE_MALFORMED_INPUT, file + ": the file is empty; expected a header line");
  if (token_layout(CsvFields(file, rows.front(), rows.front())) != nullptr)
    return parse_token_rows(std::move(rows), ended, file, rule, notes);
  const std::vector<std::string>& header = rows.front().fields;
  const OwnLayout own = own_layout(header);
  if (!own.matches)
    return base::Status(
        GPUSHARE_MALFORMED_INPUT,
        base::format("%s:%zu: header: no known layout; there are "
                     "'arrival_s,application,exec_ms[,slo_ms][,feature...]' "
                     "(up to eight columns that begin with 'feature'), "
                     "'TIMESTAMP,ContextTokens,GeneratedTokens' (Azure), "
                     "'Timestamp,Model,Request tokens,Response tokens' (BurstGPT) and lines of JSON "
                     "with timestamp, input_length and output_length (Mooncake)",
                     file.c_str(), rows.front().line));
  std::vector<TimedRequest> requests;
  std::map<std::string, uint32_t> applications;
  for (const CsvRow& row : std::span(rows).subspan(1)) {
    const CsvFields fields(file, rows.front(), row);
    GPUSHARE_RETURN_IF_ERROR(fields.check());
    GPUSHARE_ASSIGN_OR_RETURN(const TimedRequest request, parse_own(fields, own, applications));
    requests.push_back(request);
  }
  std::stable_sort(requests.begin(), requests.end(),
                   [](const TimedRequest& a, const TimedRequest& b) { return a.arrival_ns < b.arrival_ns; });
  return requests;
}

base::Result<std::vector<TimedRequest>> read_requests(const std::string& path, const TokenRule& rule,
                                                      std::vector<std::string>* notes) {
  GPUSHARE_ASSIGN_OR_RETURN(const std::string text, read_text(path, kMostRequestBytes));
  return parse_requests(text, path, rule, notes);
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
