// SPDX-License-Identifier: Apache-2.0
#include "report.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace gpushare::gpu_suite {
namespace {

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), value >= 1000 ? "%.0f" : value >= 10 ? "%.1f" : "%.3f", value);
  return text;
}

// The measurement that a group is of: its name's leading number.
int number_of(const std::string& group) {
  return std::atoi(group.c_str());
}

// Wholly or not at all, should the process end here.
void write(const std::string& path, const std::string& text) {
  const std::string part = path + ".part";
  std::ofstream file(part, std::ios::binary);
  file << text;
  file.close();
  if (!file || std::rename(part.c_str(), path.c_str()) != 0) throw std::runtime_error("cannot write " + path);
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

void Report::keep_in(std::string json_path, std::string markdown_path, std::string checks_path) {
  json_path_ = std::move(json_path);
  markdown_path_ = std::move(markdown_path);
  checks_path_ = std::move(checks_path);
}

bool Report::load() {
  const std::ifstream file(json_path_);
  if (!file) return false;
  std::stringstream text;
  text << file.rdbuf();
  const auto in = nlohmann::json::parse(text.str());
  if (device.empty()) {
    device = in.at("device");
    driver = in.at("driver");
    date = in.at("date");
    label = in.at("label");
  } else if (in.at("device") != device || in.at("driver") != driver) {
    throw std::runtime_error(json_path_ + " is of another device or driver: " +
                             in.at("device").get<std::string>() + ", " + in.at("driver").get<std::string>());
  }
  for (const auto& row : in.at("rows"))
    rows_.push_back({row.at("group"),
                     row.at("what"),
                     row.at("by"),
                     row.at("unit"),
                     {row.at("median"), row.at("p10"), row.at("p90"), row.at("samples")}});
  for (const auto& skipped : in.at("not_measured"))
    skipped_.push_back({skipped.at("group"), skipped.at("what"), skipped.at("reason")});
  return true;
}

void Report::forget(int measurement) {
  std::erase_if(rows_, [&](const Row& row) { return number_of(row.group) == measurement; });
  std::erase_if(skipped_, [&](const Skipped& skipped) { return number_of(skipped.group) == measurement; });
}

void Report::sort() {
  const auto before = [](const auto& a, const auto& b) { return number_of(a.group) < number_of(b.group); };
  std::stable_sort(rows_.begin(), rows_.end(), before);
  std::stable_sort(skipped_.begin(), skipped_.end(), before);
}

void Report::save() {
  sort();
  if (!json_path_.empty()) write(json_path_, json());
  if (!markdown_path_.empty()) write(markdown_path_, markdown());
}

void Report::add(const std::string& group, const std::string& what, const std::string& by,
                 const std::string& unit, std::vector<double> samples) {
  if (samples.empty()) {
    skip(group, what + " (" + by + ")", "no samples");
    return;
  }
  const Row row{group, what, by, unit, summarise(std::move(samples))};
  char line[256];
  std::snprintf(line, sizeof(line), "  %-68s %-29s %10s %-7s [%s, %s] n=%llu\n", row.what.c_str(),
                row.by.c_str(), number(row.figure.median).c_str(), row.unit.c_str(),
                number(row.figure.low).c_str(), number(row.figure.high).c_str(),
                static_cast<unsigned long long>(row.figure.samples));
  if (group != said_) std::cout << "\n" << group << "\n";
  said_ = group;
  std::cout << line << std::flush;
  rows_.push_back(row);
  save();
}

void Report::skip(const std::string& group, const std::string& what, const std::string& reason) {
  std::cout << "not measured: " << group << ", " << what << ": " << reason << std::endl;
  skipped_.push_back({group, what, reason});
  save();
}

std::string Report::header() const {
  return label + ": " + device + ", driver CUDA " + driver + ", " + date;
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
  if (const std::ifstream checks(checks_path_); checks) {
    std::stringstream lines;
    lines << checks.rdbuf();
    text += "\n## Checked in the same run\n\n" + lines.str();
  }
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
