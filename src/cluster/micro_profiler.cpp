// SPDX-License-Identifier: Apache-2.0
#include "cluster/micro_profiler.hpp"

#include <algorithm>
#include <cmath>
#include <map>

#include "cluster/learn/learning_curve.hpp"

namespace gpushare::cluster {
namespace {

constexpr double kPoints = 100;          // accuracies are points in a problem, parts of 1 in a curve
constexpr double kMostAccurate = 0.999;  // a curve passes below 1

// How a stream's configuration did in the windows so far.
struct History {
  double distance = 0;  // sum over windows
  size_t windows = 0;
  bool on_front = false;  // in any window
  bool dropped = false;
};
using Histories = std::map<std::string, History>;

double told_accuracy(const RetrainingConfiguration& configuration, const std::function<double()>& error) {
  auto observed = configuration.profile.observed;
  for (auto& [epoch, accuracy] : observed) accuracy = std::clamp(accuracy * error(), 0.0, kMostAccurate);
  if (const auto curve = fit_learning_curve(observed))
    return kPoints * curve->accuracy(configuration.profile.epochs);
  return std::max(0.0, configuration.accuracy * error());
}

void remember(const std::vector<RetrainingConfiguration>& told, Histories& histories) {
  for (const RetrainingConfiguration& own : told) {
    if (!own.offered) continue;
    double distance = 0;
    for (const RetrainingConfiguration& other : told)
      if (other.offered && other.gpu_seconds <= own.gpu_seconds)
        distance = std::max(distance, other.accuracy - own.accuracy);
    History& history = histories[own.name];
    history.distance += distance;
    ++history.windows;
    history.on_front |= distance == 0;
  }
}

void drop(double fraction, Histories& histories) {
  size_t left = 0;
  std::vector<std::pair<double, History*>> never;  // on the front: minus the mean distance
  for (auto& [name, history] : histories) {
    if (history.dropped) continue;
    ++left;
    if (!history.on_front) never.emplace_back(-history.distance / double(history.windows), &history);
  }
  std::stable_sort(never.begin(), never.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  const auto count = std::min(never.size(), size_t(std::ceil(fraction * double(left) - 1e-9)));
  for (size_t i = 0; i < count; ++i) never[i].second->dropped = true;
}

}  // namespace

RetrainingProblem profile_retraining(const RetrainingProblem& truth, const ProfilerOptions& options,
                                     const std::function<double()>& error, ProfilerReport& report) {
  report = {};
  report.gpu_seconds.assign(truth.windows(), 0.0);
  std::vector<double> errors;
  RetrainingProblem told = truth;
  for (Stream& stream : told.streams) {
    Histories histories;
    for (size_t w = 0; w < stream.windows.size(); ++w) {
      for (RetrainingConfiguration& configuration : stream.windows[w]) {
        const auto history = histories.find(configuration.name);
        configuration.offered = history == histories.end() || !history->second.dropped;
        if (!configuration.offered) continue;
        const double accuracy = told_accuracy(configuration, error);
        if (!configuration.profile.observed.empty()) {
          report.gpu_seconds[w] += configuration.profiling_gpu_seconds();
          errors.push_back(std::abs(accuracy - configuration.accuracy));
        }
        configuration.accuracy = accuracy;
      }
      remember(stream.windows[w], histories);
      if ((w + 1) % options.drop_every == 0) drop(options.drop_fraction, histories);
    }
  }
  report.profiled = errors.size();
  if (!errors.empty()) {
    std::nth_element(errors.begin(), errors.begin() + std::ptrdiff_t(errors.size() / 2), errors.end());
    report.median_error = errors[errors.size() / 2];
  }
  return told;
}

}  // namespace gpushare::cluster
