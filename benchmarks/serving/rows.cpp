// Runs the rows of an experiment and sums them up.
// SPDX-License-Identifier: Apache-2.0
#include "rows.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <thread>

namespace gpushare::experiments {
namespace {

Stat stat(const std::vector<double>& values) {
  Stat s;
  for (double v : values) s.mean += v / static_cast<double>(values.size());
  for (double v : values) s.sd += (v - s.mean) * (v - s.mean);
  s.sd = values.size() > 1 ? std::sqrt(s.sd / static_cast<double>(values.size() - 1)) : 0;
  return s;
}

// Runs all jobs on all cores.
class Pool {
 public:
  void add(std::function<void()> job) { jobs_.push_back(std::move(job)); }
  void run() {
    std::atomic<size_t> next{0};
    std::vector<std::thread> workers;
    for (unsigned t = 0; t < std::max(1u, std::thread::hardware_concurrency()); ++t)
      workers.emplace_back([&] {
        for (size_t i = next++; i < jobs_.size(); i = next++) jobs_[i]();
      });
    for (std::thread& worker : workers) worker.join();
    jobs_.clear();
  }

 private:
  std::vector<std::function<void()>> jobs_;
};

}  // namespace

Stat Row::rate(const std::string& policy) const {
  return stat(rates.at(policy));
}

double Row::ceiling() const {
  return std::max(rate("clairvoyant").mean, rate("clairvoyant-edf").mean);
}

void run_rows(std::vector<Row>& rows, const std::vector<const char*>& policies, uint64_t seeds) {
  Pool pool;
  for (Row& row : rows)
    for (const char* policy : policies) row.rates[policy].assign(seeds, NAN);
  for (Row& row : rows)
    for (uint64_t seed = 0; seed < seeds; ++seed)
      pool.add([&row, &policies, seed] {
        const std::vector<TimedRequest> requests = row.draw(seed + 1);
        for (const char* policy : policies) {
          const auto result = sim::serve(requests, policy, row.options);
          if (!result.ok()) {
            std::fprintf(stderr, "%s, %s: %s\n", row.name.c_str(), policy,
                         result.status().to_string().c_str());
            std::exit(1);
          }
          row.rates[policy][seed] = result->finish_rate;
        }
      });
  pool.run();
}

std::function<std::vector<TimedRequest>(uint64_t)> drawer(const std::string& synthetic, double load,
                                                          double burst) {
  const sim::SyntheticSpec spec = *sim::parse_synthetic(synthetic);
  const double rate = load / (sim::mean_execution_ns(spec) / 1e9);
  return [=](uint64_t seed) {
    return sim::draw(
        spec,
        {.requests = kRequests, .rate_per_s = rate, .burstiness = burst, .seed = kFirstSeed - 1 + seed});
  };
}

ServingOptions options_of(const Calibration& at, double slo) {
  ServingOptions options;
  const double mean = sim::mean_execution_ns(*sim::parse_synthetic(at.synthetic));
  options.c0_ns = at.c0_x_mean * mean;
  options.c1 = at.c1;
  options.slo_x_p99 = slo;
  return options;
}

Summary summarise(const std::vector<Row>& rows) {
  Summary s;
  for (const Row& row : rows) {
    double best = 0;
    for (const char* policy : kFour) best = std::max(best, row.rate(policy).mean);
    const double ours = row.rate("gpushare").mean;
    const double ceiling = row.ceiling();
    ++s.cells;
    s.above += ours > best ? 1 : 0;
    s.level += ours <= best && ours >= best - 0.005 ? 1 : 0;
    s.near_ceiling += ours >= ceiling - 0.03 ? 1 : 0;
    s.ours += ours;
    s.best += best;
    s.ceiling += ceiling;
    s.orloj += row.rate("orloj").mean;
    if (ours - best < s.worst) {
      s.worst = ours - best;
      s.worst_cell = row.name;
    }
  }
  const double n = static_cast<double>(s.cells);
  s.ours /= n;
  s.best /= n;
  s.ceiling /= n;
  s.orloj /= n;
  return s;
}

void Report::row(const char* format, ...) {
  char buffer[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  text_ += buffer;
  text_ += '\n';
}

}  // namespace gpushare::experiments
