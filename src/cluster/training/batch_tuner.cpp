// SPDX-License-Identifier: Apache-2.0
#include "cluster/training/batch_tuner.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cluster/learn/gaussian_process.hpp"

namespace gpushare::cluster::training {
namespace {

constexpr size_t kMostCandidates = 256;  // combinations of sizes; beyond, one job's size changes at a time
constexpr double kConfidence = 1.0;      // standard deviations below the mean
constexpr double kNoise = 0.02;          // of a measured logarithm
constexpr double kLength = 1.5;          // of the kernel, in doublings of a batch size
constexpr double kAmplitude = 0.2;       // by how much predictions are off, in logarithms

double total(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

}  // namespace

std::string BatchTuner::key_of(const std::vector<JobInfo>& jobs, std::vector<size_t>& order) {
  std::vector<std::string> names;
  for (const JobInfo& job : jobs) {
    names.push_back(job.batch_sizes.empty() ? job.config : with_batch(job, job.batch_sizes.front()).config);
    // Jobs of one configuration may have other sizes to choose from, or none.
    names.back() += '\0';
    for (const double size : job.batch_sizes)
      names.back().append(reinterpret_cast<const char*>(&size), sizeof(size));
  }
  order.resize(jobs.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return names[a] < names[b]; });
  std::string key;
  for (const size_t i : order) key += names[i] + '\n';
  return key;
}

std::vector<double> BatchTuner::next(
    const std::vector<JobInfo>& jobs, uint64_t memory_bytes,
    const std::function<std::vector<double>(const std::vector<JobInfo>&)>& predict, bool* ended) const {
  std::vector<double> present;
  for (const JobInfo& job : jobs) present.push_back(job.batch);
  *ended = true;
  std::vector<std::vector<double>> candidates = {present};
  size_t combinations = 1;
  for (const JobInfo& job : jobs)
    combinations = std::min(kMostCandidates + 1, combinations * std::max<size_t>(1, job.batch_sizes.size()));
  if (combinations <= kMostCandidates) candidates = {{}};
  for (size_t j = 0; j < jobs.size(); ++j) {
    if (combinations > kMostCandidates) {
      for (const double size : jobs[j].batch_sizes) {
        if (size == present[j]) continue;
        candidates.push_back(present);
        candidates.back()[j] = size;
      }
      continue;
    }
    std::vector<std::vector<double>> longer;
    for (const auto& head : candidates)
      for (const double size :
           jobs[j].batch_sizes.empty() ? std::vector<double>{present[j]} : jobs[j].batch_sizes) {
        longer.push_back(head);
        longer.back().push_back(size);
      }
    candidates = std::move(longer);
  }

  std::vector<size_t> order;
  const auto found = known_.find(key_of(jobs, order));
  static const std::vector<Point> kNothing;
  const std::vector<Point>& points = found == known_.end() ? kNothing : found->second;
  const auto with = [&](const std::vector<double>& sizes) {
    std::vector<JobInfo> out;
    for (size_t j = 0; j < jobs.size(); ++j) out.push_back(with_batch(jobs[j], sizes[j]));
    return out;
  };
  const auto logs_at = [&](const std::vector<double>& sizes) {
    std::vector<double> out = predict(with(sizes));
    for (double& value : out) value = std::log(std::max(value, 1e-3));
    return out;
  };
  const auto place_of = [&](const std::vector<double>& sizes) {  // in doublings, in the order of the key
    std::vector<double> out;
    for (const size_t j : order) out.push_back(std::log2(std::max(sizes[j], 1e-9)));
    return out;
  };
  GaussianProcess process;
  if (!points.empty()) {
    std::vector<double> rows, values, noise;
    for (const Point& point : points) {
      std::vector<double> sizes(jobs.size());
      for (size_t k = 0; k < order.size(); ++k) sizes[order[k]] = point.sizes[k];
      const std::vector<double> row = place_of(sizes);
      rows.insert(rows.end(), row.begin(), row.end());
      values.push_back(total(point.logs) - total(logs_at(sizes)));
      noise.push_back(kNoise / std::sqrt(point.count));
    }
    process.fit(jobs.size(), std::move(rows), values, noise, kLength,
                kAmplitude * std::sqrt(static_cast<double>(jobs.size())), 0);
  }
  const Point* at_best = nullptr;
  std::vector<double> best = present;
  double best_bound = 0;
  bool any = false;
  for (const auto& sizes : candidates) {
    const std::vector<JobInfo> then = with(sizes);
    uint64_t bytes = 0;
    for (const JobInfo& job : then) bytes += job.memory_bytes;
    if (bytes > memory_bytes) continue;
    const Point* known = nullptr;
    for (const Point& point : points) {
      bool same = true;
      for (size_t k = 0; k < order.size(); ++k) same = same && point.sizes[k] == sizes[order[k]];
      if (same) known = &point;
    }
    const std::vector<double> logs = logs_at(sizes);
    bool allowed = true;
    for (size_t k = 0; k < order.size(); ++k) {
      const double log = known != nullptr ? known->logs[k] : logs[order[k]];
      allowed = allowed && (!jobs[order[k]].guaranteed || log <= std::log(kGuaranteedLimit));
    }
    if (!allowed && sizes != present) continue;
    double bound = known != nullptr ? total(known->logs) : total(logs);
    if (known == nullptr && !points.empty()) {
      const GaussianProcess::Prediction told = process.at(place_of(sizes).data());
      bound += told.mean - kConfidence * told.sd;
    } else if (known == nullptr) {
      bound -= kConfidence * kAmplitude * std::sqrt(static_cast<double>(jobs.size()));
    }
    if (any && bound >= best_bound) continue;
    any = true;
    best_bound = bound;
    best = sizes;
    at_best = known;
  }
  *ended = !any || at_best != nullptr;
  if (points.size() < kMostRounds || *ended) return best;
  // Enough was tried: the best that was measured.
  *ended = true;
  const auto least = std::min_element(points.begin(), points.end(), [](const Point& a, const Point& b) {
    return total(a.logs) < total(b.logs);
  });
  std::vector<double> sizes(jobs.size());
  for (size_t k = 0; k < order.size(); ++k) sizes[order[k]] = least->sizes[k];
  uint64_t bytes = 0;
  for (const JobInfo& job : with(sizes)) bytes += job.memory_bytes;
  return bytes <= memory_bytes ? sizes : present;
}

void BatchTuner::measured(const std::vector<JobInfo>& jobs, const std::vector<double>& slowdowns) {
  std::vector<size_t> order;
  std::vector<Point>& points = known_[key_of(jobs, order)];
  std::vector<double> sizes, logs;
  for (const size_t j : order) {
    sizes.push_back(jobs[j].batch);
    logs.push_back(std::log(std::max(slowdowns[j], 1e-3)));
  }
  for (Point& point : points) {
    if (point.sizes != sizes) continue;
    point.count = std::min(point.count + 1, 20.0);
    for (size_t k = 0; k < logs.size(); ++k) point.logs[k] += (logs[k] - point.logs[k]) / point.count;
    return;
  }
  points.push_back({std::move(sizes), std::move(logs), 1});
}

double BatchTuner::best_alone(const JobInfo& job) const {
  if (job.batch_sizes.size() < 2) return 1;
  std::vector<size_t> order;
  const auto found = known_.find(key_of({job}, order));
  double best = 1;
  for (const double size : job.batch_sizes) {
    const JobInfo then = with_batch(job, size);
    double value = assumed_iteration_factor(then) * iterations_factor(then);
    if (found != known_.end())
      for (const Point& point : found->second)
        if (point.sizes[0] == size) value = std::exp(point.logs[0]);
    best = std::min(best, value);
  }
  return best;
}

}  // namespace gpushare::cluster::training
