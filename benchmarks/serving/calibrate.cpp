// SPDX-License-Identifier: Apache-2.0
#include "calibrate.hpp"

#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <random>

#include "printed.hpp"

namespace gpushare::experiments {

std::vector<double> finish_rates(const Calibration& at, const char* policy, uint64_t seed, size_t requests) {
  const sim::SyntheticSpec spec = *sim::parse_synthetic(at.synthetic);
  const double mean = sim::mean_execution_ns(spec);
  sim::ArrivalOptions arrivals;
  arrivals.requests = requests;
  arrivals.rate_per_s = at.load / (mean / 1e9);
  arrivals.seed = seed;
  const std::vector<sim::TimedRequest> drawn = sim::draw(spec, arrivals);
  std::vector<double> rates;
  for (double slo : kSlos) {
    sim::ServingOptions options;
    options.c0_ns = at.c0_x_mean * mean;
    options.c1 = at.c1;
    options.slo_x_p99 = slo;
    const auto result = sim::serve(drawn, policy, options);
    rates.push_back(result.ok() ? result->finish_rate : NAN);
  }
  return rates;
}

Calibration calibrate(const std::string& name, Target target, size_t points) {
  Calibration best;
  best.name = name;
  best.target = target;
  std::vector<double> clockwork, nexus;
  double printed_orloj = 0;
  for (const PrintedCell& cell : kPrinted) {
    if (cell.name != name) continue;
    best.synthetic = cell.synthetic;
    clockwork.push_back(cell.clockwork);
    nexus.push_back(cell.nexus);
    printed_orloj += cell.orloj / std::size(kSlos);
  }
  const auto mean_rates = [](const Calibration& at, const char* policy) {
    std::vector<double> mean(std::size(kSlos));
    for (uint64_t seed : {11, 12}) {  // not the seeds of the experiments
      const std::vector<double> rates = finish_rates(at, policy, seed, 1200);
      for (size_t i = 0; i < mean.size(); ++i) mean[i] += rates[i] / 2;
    }
    return mean;
  };
  const auto rms = [](const std::vector<double>& a, const std::vector<double>& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
    return std::sqrt(sum / static_cast<double>(a.size()));
  };
  const auto cost = [&](Calibration& at) {
    if (target == Target::kAchievable) {
      at.orloj_mean = 0;
      for (double rate : mean_rates(at, "orloj")) at.orloj_mean += rate / std::size(kSlos);
      const double off = std::abs(at.orloj_mean - printed_orloj);
      if (off > 0.03) return 10 + off;
    }
    at.clockwork_rms = rms(mean_rates(at, "clockwork"), clockwork);
    at.nexus_rms = rms(mean_rates(at, "nexus"), nexus);
    return at.clockwork_rms * at.clockwork_rms + at.nexus_rms * at.nexus_rms;
  };
  std::mt19937_64 random(7);
  std::uniform_real_distribution<double> unit(0, 1);
  double least = INFINITY;
  for (size_t i = 0; i < points; ++i) {
    Calibration at = best;
    if (i < points / 2) {
      at.load = 0.5 * std::pow(24, unit(random));
      at.c1 = 0.02 * std::pow(50, unit(random));
      at.c0_x_mean = 1.5 * unit(random);
    } else {
      at.load *= std::exp(0.4 * (unit(random) - 0.5));
      at.c1 *= std::exp(0.6 * (unit(random) - 0.5));
      at.c0_x_mean *= std::exp(0.4 * (unit(random) - 0.5));
    }
    const double here = cost(at);
    if (here < least) {
      least = here;
      best = at;
    }
  }
  if (target == Target::kColumns)
    for (double rate : mean_rates(best, "orloj")) best.orloj_mean += rate / std::size(kSlos);
  return best;
}

std::string to_csv(const std::vector<Calibration>& all) {
  std::string text = "case,synthetic,target,load,c0_x_mean,c1,clockwork_rms,nexus_rms,orloj_mean\n";
  for (const Calibration& each : all)
    text +=
        base::format("%s,%s,%s,%.4f,%.4f,%.5f,%.4f,%.4f,%.4f\n", each.name.c_str(), each.synthetic.c_str(),
                     each.target == Target::kColumns ? "columns" : "achievable", each.load, each.c0_x_mean,
                     each.c1, each.clockwork_rms, each.nexus_rms, each.orloj_mean);
  return text;
}

base::Result<std::vector<Calibration>> read_csv(const std::string& path) {
  std::ifstream file(path);
  if (!file) return base::Status(GPUSHARE_IO_ERROR, "cannot open '" + path + "'");
  std::vector<Calibration> all;
  std::string line;
  std::getline(file, line);
  while (std::getline(file, line)) {
    char name[64], synthetic[64], target[64];
    Calibration each;
    if (std::sscanf(line.c_str(), "%63[^,],%63[^,],%63[^,],%lf,%lf,%lf,%lf,%lf,%lf", name, synthetic, target,
                    &each.load, &each.c0_x_mean, &each.c1, &each.clockwork_rms, &each.nexus_rms,
                    &each.orloj_mean) != 9)
      return base::Status(GPUSHARE_MALFORMED_INPUT, path + ": '" + line + "'");
    each.name = name;
    each.synthetic = synthetic;
    each.target = std::string(target) == "columns" ? Target::kColumns : Target::kAchievable;
    all.push_back(each);
  }
  return all;
}

}  // namespace gpushare::experiments
