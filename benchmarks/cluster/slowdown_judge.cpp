// The predictor of slowdowns on pairs that it has not seen. Reads observations, one a line: kind, the kind beside it,
// slowdown (tab-separated). Each pair of kinds is left out in turn, both directions; the others' observations are told
// in a random order. Prints a line of JSON for each pair left out, direction and number of observations told: the error
// of the prediction, and that of the mean of what was told, against the geometric mean of what was observed of the
// pair. scripts/experiments/learning makes its page of it.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "cluster/learn/slowdown.hpp"

using namespace gpushare::cluster;

namespace {

constexpr uint64_t kOrders = 20;
constexpr size_t kTold[] = {25, 100, 400};

struct Observation {
  std::string kind, other;
  double slowdown = 1;
};
using Pair = std::pair<std::string, std::string>;

JobInfo job_of(const std::string& kind) {
  JobInfo info;
  info.config = kind;
  return info;
}

}  // namespace

int main() {
  std::vector<Observation> all;
  for (std::string line; std::getline(std::cin, line);) {
    const size_t first = line.find('\t'), second = line.find('\t', first + 1);
    if (second == std::string::npos) {
      std::fprintf(stderr, "error: a line needs kind, kind and slowdown: %s\n", line.c_str());
      return 1;
    }
    all.push_back({line.substr(0, first), line.substr(first + 1, second - first - 1),
                   std::strtod(line.c_str() + second, nullptr)});
  }
  std::map<Pair, std::pair<double, double>> logs;  // sum, count
  std::set<Pair> unordered;
  for (const Observation& seen : all) {
    auto& [sum, count] = logs[{seen.kind, seen.other}];
    sum += std::log(seen.slowdown);
    ++count;
    unordered.insert(std::minmax(seen.kind, seen.other));
  }
  for (const Pair& left_out : unordered) {
    std::vector<Observation> others;
    for (const Observation& seen : all)
      if (Pair(std::minmax(seen.kind, seen.other)) != left_out) others.push_back(seen);
    std::set<Pair> directions{left_out, {left_out.second, left_out.first}};
    for (const size_t told : kTold) {
      if (told > others.size()) continue;
      std::map<Pair, std::pair<double, double>> errors;  // of the prediction, of the mean
      for (uint64_t seed = 0; seed < kOrders; ++seed) {
        std::mt19937_64 random(seed);
        std::shuffle(others.begin(), others.end(), random);
        SlowdownModel model;
        double sum = 0;
        for (size_t i = 0; i < told; ++i) {
          model.observe(job_of(others[i].kind), job_of(others[i].other), others[i].slowdown);
          sum += others[i].slowdown;
        }
        for (const Pair& pair : directions) {
          const auto& [log_sum, count] = logs.at(pair);
          const double truth = std::exp(log_sum / count);
          const double predicted = 1 + model.excess(job_of(pair.first), job_of(pair.second)).mean;
          errors[pair].first += std::abs(predicted - truth) / truth / double(kOrders);
          errors[pair].second += std::abs(sum / double(told) - truth) / truth / double(kOrders);
        }
      }
      for (const auto& [pair, error] : errors)
        std::printf(
            "{\"kind\": \"%s\", \"beside\": \"%s\", \"told\": %zu, \"error\": %.6f, \"error_of_mean\": "
            "%.6f}\n",
            pair.first.c_str(), pair.second.c_str(), told, error.first, error.second);
    }
  }
  return 0;
}
