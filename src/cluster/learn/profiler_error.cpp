// SPDX-License-Identifier: Apache-2.0
#include "cluster/learn/profiler_error.hpp"

#include <algorithm>

namespace gpushare::cluster {
namespace {

constexpr double kPriorErrors = 1;  // observations without an error, before there are any
constexpr double kLeastSpread =
    0.05;  // of the accuracies themselves, as a part of that of what is told or of the errors

}  // namespace

double ProfilerError::spread_told() const {
  double squares = 0, freedom = 0;
  for (const auto& [key, history] : histories_) {
    if (history.count < 2) continue;
    squares += std::max(0.0, history.squares - history.sum * history.sum / history.count);
    freedom += history.count - 1;
  }
  return freedom > 0 ? squares / freedom : -1;
}

double ProfilerError::believed(size_t stream, const std::string& configuration, double told) const {
  const auto found = histories_.find({stream, configuration});
  const double spread = spread_told();
  if (found == histories_.end() || spread < 0 || errors_ == 0) return told;
  const History& history = found->second;
  const double error = errors_ / (error_count_ + kPriorErrors);
  const double own = std::max(spread - error, kLeastSpread * std::max(spread, error));
  // The configuration's mean: what was reached counts by its own spread, what was only told by both.
  const double reached_weight = history.reached_count / own,
               told_weight = (history.count - history.reached_count) / (own + error);
  const double mean = (history.reached_sum / own + (history.sum - history.reached_told) / (own + error)) /
                      (reached_weight + told_weight);
  const double before = own + 1 / (reached_weight + told_weight);
  return mean + (told - mean) * before / (before + error);
}

void ProfilerError::told(size_t stream, const std::string& configuration, double told) {
  History& history = histories_[{stream, configuration}];
  ++history.count;
  history.sum += told;
  history.squares += told * told;
}

void ProfilerError::reached(size_t stream, const std::string& configuration, double told, double accuracy) {
  this->told(stream, configuration, told);
  History& history = histories_[{stream, configuration}];
  ++history.reached_count;
  history.reached_sum += accuracy;
  history.reached_told += told;
  errors_ += (told - accuracy) * (told - accuracy);
  ++error_count_;
}

}  // namespace gpushare::cluster
