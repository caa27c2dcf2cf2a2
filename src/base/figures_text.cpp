// SPDX-License-Identifier: Apache-2.0
#include "base/figures_text.hpp"

#include <algorithm>
#include <iterator>

namespace gpushare::base {
namespace {

std::vector<double> scaled(std::span<const uint64_t> bounds, double unit) {
  std::vector<double> out;
  for (const uint64_t bound : bounds) out.push_back(static_cast<double>(bound) / unit);
  return out;
}

bool any(std::span<const uint64_t> counts) {
  return std::any_of(counts.begin(), counts.end(), [](uint64_t count) { return count > 0; });
}

struct Outcome {
  const char* name;
  uint64_t RequestCounts::*count;
};
constexpr Outcome kOutcomes[] = {
    {"in_time", &RequestCounts::in_time}, {"late", &RequestCounts::late},
    {"failed", &RequestCounts::failed},   {"refused", &RequestCounts::refused},
    {"dropped", &RequestCounts::dropped}, {"cancelled", &RequestCounts::cancelled}};

}  // namespace

void write_iterations(MetricsText& out,
                      const std::vector<std::pair<MetricsText::Labels, IterationCounts>>& of) {
  const std::vector<double> seconds = scaled(kIterationBoundsNs, 1e9),
                            ratios = scaled(kSlowdownBoundsMilli, 1e3);
  out.histogram("gpushare_session_iteration_seconds", "Device time of the session's iterations.");
  for (const auto& [labels, counts] : of)
    if (any(counts.times))
      out.buckets(labels, seconds, counts.times, static_cast<double>(counts.time_ns) / 1e9);
  out.histogram("gpushare_session_slowdown_ratio",
                "Time of iterations with their wait for a turn, over their device time: 1 is no wait.");
  for (const auto& [labels, counts] : of)
    if (any(counts.slowdowns))
      out.buckets(labels, ratios, counts.slowdowns, static_cast<double>(counts.slowdown_milli) / 1e3);
}

void write_requests(MetricsText& out, const std::vector<std::pair<MetricsText::Labels, RequestCounts>>& of) {
  out.counter("gpushare_requests_offered_total", "Requests that came to the queue, refused ones included.");
  for (const auto& [labels, counts] : of) out.sample(labels, static_cast<double>(counts.offered));
  out.counter("gpushare_requests_total", "Requests by how they ended.");
  for (const auto& [labels, counts] : of) {
    MetricsText::Labels with_outcome = labels;
    with_outcome.emplace_back("outcome", "");
    for (const Outcome& outcome : kOutcomes) {
      with_outcome.back().second = outcome.name;
      out.sample(with_outcome, static_cast<double>(counts.*outcome.count));
    }
  }
  out.gauge("gpushare_requests_pending", "Requests that are not in a batch yet.");
  for (const auto& [labels, counts] : of) out.sample(labels, static_cast<double>(counts.pending));
  out.gauge("gpushare_requests_predicted_miss_ratio",
            "Part of the last requests that were expected to miss their deadlines when they were decided.");
  for (const auto& [labels, counts] : of) out.sample(labels, counts.predicted_miss_rate);
  out.gauge("gpushare_requests_price_per_second",
            "Worth of a second of device time in the cost of requests, under policy gpushare.");
  for (const auto& [labels, counts] : of) out.sample(labels, counts.price_per_s);
}

}  // namespace gpushare::base
