// SPDX-License-Identifier: Apache-2.0
#include "cluster/learn/slowdown.hpp"

#include <algorithm>
#include <cmath>

namespace gpushare::cluster {
namespace {

// Observations that an effect needs to be half believed.
constexpr double kRidgeAll = 5, kRidgeModel = 1.5, kRidgeConfig = 1.5;
constexpr int kSweeps = 12;
constexpr double kSpreadUnknown = 0.1;  // of logarithms, before any prediction was judged
constexpr uint64_t kEarly = 100;
constexpr double kLeast = 1e-3;  // of a slowdown: below it something was not measured

uint64_t key_of(size_t job, size_t other) {
  return uint64_t{job} << 32 | other;
}

// "ResNet-18 (batch size 16)" -> "ResNet-18".
std::string_view model_of(std::string_view config) {
  return config.substr(0, config.find(" ("));
}

}  // namespace

double SlowdownModel::guessed(const JobInfo& job, const JobInfo& other) {
  double most = 1;
  for (size_t r = 0; r < job.demands.size() && r < other.demands.size(); ++r)
    most = std::max(most, job.demands[r] + other.demands[r]);
  return most - 1;
}

double SlowdownModel::beforehand(const JobInfo& job, const JobInfo& other) {
  return std::log((1 + guessed(job, other)) * assumed_iteration_factor(job) * iterations_factor(job));
}

size_t SlowdownModel::find(std::string_view config) const {
  if (config.empty()) return kNone;
  const auto at = index_.find(std::string(config));
  return at == index_.end() ? kNone : at->second;
}

SlowdownModel::Ref SlowdownModel::ref(std::string_view config) const {
  Ref out;
  if (config.empty()) return out;
  out.name = find(config);
  if (out.name != kNone) {
    out.model = names_[out.name].model;
  } else if (const auto at = models_.find(std::string(model_of(config))); at != models_.end()) {
    out.model = at->second;
  }
  return out;
}

size_t SlowdownModel::pair_of(size_t job, size_t other) const {
  if (job == kNone || other == kNone) return kNone;
  const auto at = pair_index_.find(key_of(job, other));
  return at == pair_index_.end() ? kNone : at->second;
}

size_t SlowdownModel::name_of(std::string_view config) {
  if (config.empty()) return kNone;
  const auto [at, added] = index_.emplace(std::string(config), names_.size());
  if (added) {
    const auto [model, new_model] = models_.emplace(std::string(model_of(config)), model_sensitive_.size());
    if (new_model) {
      model_sensitive_.emplace_back();
      model_pressing_.emplace_back();
    }
    names_.push_back({sensitive_.size(), model->second});
    sensitive_.emplace_back();
    pressing_.emplace_back();
  }
  return at->second;
}

void SlowdownModel::add(size_t job, size_t other, double residual) {
  if (job == kNone || other == kNone) {
    // Only the mean of all can learn from jobs without a name.
    all_ += (residual - all_) / (static_cast<double>(++nameless_) + kRidgeAll);
    return;
  }
  const auto [at, added] = pair_index_.emplace(key_of(job, other), pairs_.size());
  if (added) pairs_.push_back({job, other});
  Pair& pair = pairs_[at->second];
  ++pair.count;
  const double off = residual - pair.mean;
  pair.mean += off / pair.count;
  pair.squares += off * (residual - pair.mean);
  if (pairs_.size() >= fitted_ + 1 + fitted_ / 16) fit();
}

// Gauss-Seidel on the normal equations: each group of effects takes what the others leave of the pairs' means.
void SlowdownModel::fit() {
  fitted_ = pairs_.size();
  const auto group = [&](std::vector<Effect>& effects, double ridge, auto&& member) {
    for (Effect& effect : effects) effect.sum = effect.count = 0;
    for (const Pair& pair : pairs_) {
      Effect& effect = effects[member(pair)];
      effect.sum += pair.mean - this->effects(pair.job, pair.other) + effect.value;
      effect.count += 1;
    }
    for (Effect& effect : effects) effect.value = effect.sum / (effect.count + ridge);
  };
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    double sum = 0;
    for (const Pair& pair : pairs_) sum += pair.mean - effects(pair.job, pair.other) + all_;
    all_ = sum / (static_cast<double>(pairs_.size()) + kRidgeAll);
    group(model_sensitive_, kRidgeModel, [&](const Pair& pair) { return names_[pair.job].model; });
    group(model_pressing_, kRidgeModel, [&](const Pair& pair) { return names_[pair.other].model; });
    group(sensitive_, kRidgeConfig, [&](const Pair& pair) { return names_[pair.job].config; });
    group(pressing_, kRidgeConfig, [&](const Pair& pair) { return names_[pair.other].config; });
  }
}

double SlowdownModel::effects(size_t job, size_t other) const {
  double sum = all_;
  if (job != kNone) sum += sensitive_[names_[job].config].value + model_sensitive_[names_[job].model].value;
  if (other != kNone)
    sum += pressing_[names_[other].config].value + model_pressing_[names_[other].model].value;
  return sum;
}

// The spread of a predicted slowdown's logarithm.
double SlowdownModel::spread_of(size_t name, size_t other_name) const {
  const double base = errors_ < 2 ? kSpreadUnknown : std::sqrt(squared_errors_ / errors_);
  const double told = name == kNone ? 0 : sensitive_[names_[name].config].count;
  const double other_told = other_name == kNone ? 0 : pressing_[names_[other_name].config].count;
  return base * std::sqrt((1 + 1 / (1 + told) + 1 / (1 + other_told)) / 2);
}

// The logarithm of the slowdown.
double SlowdownModel::predicted(const JobInfo& job, const JobInfo& other, Ref known, Ref other_known) const {
  // A model that is known of by other configurations tells of this one.
  double sum = effects(known.name, other_known.name);
  if (known.name == kNone && known.model != kNone) sum += model_sensitive_[known.model].value;
  if (other_known.name == kNone && other_known.model != kNone)
    sum += model_pressing_[other_known.model].value;
  sum += beforehand(job, other);
  return job.batch_sizes.size() > 1 ? sum : std::max(sum, 0.0);  // nobody is faster for having company
}

void SlowdownModel::observe(const JobInfo& job, const JobInfo& other, double slowdown) {
  if (!(slowdown > kLeast)) return;
  const size_t name = name_of(job.config), other_name = name_of(other.config);
  const double value = std::log(slowdown);
  if (name != kNone && other_name != kNone && !pair_index_.contains(key_of(name, other_name))) {
    const double prediction =
        predicted(job, other, {name, names_[name].model}, {other_name, names_[other_name].model});
    // The larger the error, the less one pair may say: what follows is a mean of many.
    const double error = std::clamp(value - prediction, -1.0, 1.0);
    ++errors_;
    squared_errors_ += error * error;
    if (report_.observations > 0) {
      PredictionReport::Part& part = report_.observations <= kEarly ? report_.early : report_.late;
      ++part.pairs;
      const double mean = observed_sum_ / static_cast<double>(report_.observations);
      part.error += std::abs(std::exp(prediction) - slowdown) / slowdown;
      part.mean_error += std::abs(mean - slowdown) / slowdown;
    }
  }
  ++report_.observations;
  observed_sum_ += slowdown;
  add(name, other_name, value - beforehand(job, other));
}

void SlowdownModel::know(const JobInfo& job, const JobInfo& other, double slowdown) {
  if (slowdown > kLeast)
    add(name_of(job.config), name_of(other.config), std::log(slowdown) - beforehand(job, other));
}

bool SlowdownModel::seen(const JobInfo& job, const JobInfo& other) const {
  return pair_of(find(job.config), find(other.config)) != kNone;
}

SlowdownModel::Estimate SlowdownModel::excess(const JobInfo& job, const JobInfo& other) const {
  return excess(job, ref(job.config), other, ref(other.config));
}

SlowdownModel::Estimate SlowdownModel::excess(const JobInfo& job, Ref known, const JobInfo& other,
                                              Ref other_known) const {
  if (const size_t index = pair_of(known.name, other_known.name); index != kNone) {
    const Pair& pair = pairs_[index];
    const double slowdown = std::exp(pair.mean + beforehand(job, other));
    const double deviation = pair.count < 2 ? kSpreadUnknown : std::sqrt(pair.squares / (pair.count - 1));
    return {slowdown - 1, slowdown * deviation / std::sqrt(pair.count)};
  }
  const double slowdown = std::exp(predicted(job, other, known, other_known));
  return {slowdown - 1, slowdown * spread_of(known.name, other_known.name)};
}

double SlowdownModel::nameless_factor() const {
  return std::exp(all_) * nameless_least();
}

double SlowdownModel::nameless_least() const {
  return 1 + spread_of(kNone, kNone);
}

PredictionReport SlowdownModel::predictions() const {
  PredictionReport report = report_;
  for (PredictionReport::Part* part : {&report.early, &report.late}) {
    if (part->pairs == 0) continue;
    part->error /= static_cast<double>(part->pairs);
    part->mean_error /= static_cast<double>(part->pairs);
  }
  return report;
}

}  // namespace gpushare::cluster
