// SPDX-License-Identifier: Apache-2.0
#include "report.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

namespace gpushare::gpu_suite {
namespace {

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), value >= 1000 ? "%.0f" : value >= 10 ? "%.1f" : "%.3f", value);
  return text;
}

}  // namespace

Figure summarise(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  const auto at = [&](double share) {
    const double place = share * static_cast<double>(samples.size() - 1);
    const auto below = static_cast<size_t>(place);
    const size_t above = std::min(below + 1, samples.size() - 1);
    return samples[below] + (samples[above] - samples[below]) * (place - std::floor(place));
  };
  return {at(0.5), at(0.1), at(0.9), samples.size()};
}

void Report::add(const std::string& group, const std::string& what, const std::string& by,
                 const std::string& unit, std::vector<double> samples) {
  if (samples.empty()) {
    skip(group, what + " (" + by + ")", "no samples");
    return;
  }
  rows_.push_back({group, what, by, unit, summarise(std::move(samples))});
}

void Report::skip(const std::string& group, const std::string& what, const std::string& reason) {
  skipped_.push_back({group, what, reason});
}

std::string Report::table() const {
  std::string text = label + ": " + device + ", driver CUDA " + driver + ", " + date + "\n";
  std::string group;
  char line[256];
  for (const Row& row : rows_) {
    if (row.group != group) text += "\n" + (group = row.group) + "\n";
    std::snprintf(line, sizeof(line), "  %-68s %-29s %10s %-7s [%s, %s] n=%llu\n", row.what.c_str(),
                  row.by.c_str(), number(row.figure.median).c_str(), row.unit.c_str(),
                  number(row.figure.low).c_str(), number(row.figure.high).c_str(),
                  static_cast<unsigned long long>(row.figure.samples));
    text += line;
  }
  for (const Skipped& skipped : skipped_)
    text += "\nnot measured: " + skipped.group + ", " + skipped.what + ": " + skipped.reason;
  return text + "\n";
}

std::string Report::json() const {
  nlohmann::ordered_json out;
  out["label"] = label;
  out["device"] = device;
  out["driver"] = driver;
  out["date"] = date;
  out["rows"] = nlohmann::ordered_json::array();
  for (const Row& row : rows_) {
    out["rows"].push_back({{"group", row.group},
                           {"what", row.what},
                           {"by", row.by},
                           {"unit", row.unit},
                           {"median", row.figure.median},
                           {"p10", row.figure.low},
                           {"p90", row.figure.high},
                           {"samples", row.figure.samples}});
  }
  out["not_measured"] = nlohmann::ordered_json::array();
  for (const Skipped& skipped : skipped_)
    out["not_measured"].push_back(
        {{"group", skipped.group}, {"what", skipped.what}, {"reason", skipped.reason}});
  return out.dump(2) + "\n";
}

std::string Report::markdown() const {
  std::string text =
      "# GPU suite: " + device + "\n\n" + label + ", driver CUDA " + driver + ", " + date +
      ". Medians over repeats, in brackets the 10th and 90th percentile. Made by `scripts/gpu-suite`.\n";
  std::string group;
  for (const Row& row : rows_) {
    if (row.group != group) {
      group = row.group;
      text +=
          "\n## " + group + "\n\n| what | by | median | unit | [p10, p90] | n |\n|---|---|---|---|---|---|\n";
    }
    text += "| " + row.what + " | " + row.by + " | " + number(row.figure.median) + " | " + row.unit + " | [" +
            number(row.figure.low) + ", " + number(row.figure.high) + "] | " +
            std::to_string(row.figure.samples) + " |\n";
  }
  if (!skipped_.empty()) text += "\n## Not measured\n\n";
  for (const Skipped& skipped : skipped_)
    text += "- " + skipped.group + ", " + skipped.what + ": " + skipped.reason + "\n";
  return text;
}

std::vector<double> time_host_us(int repeats, double calls, const std::function<void()>& body) {
  body();
  std::vector<double> samples;
  for (int i = 0; i < repeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    body();
    const auto end = std::chrono::steady_clock::now();
    samples.push_back(std::chrono::duration<double, std::micro>(end - start).count() / calls);
  }
  return samples;
}

}  // namespace gpushare::gpu_suite
