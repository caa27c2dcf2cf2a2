// SPDX-License-Identifier: Apache-2.0
#include "cluster/services/queueing.hpp"

#include <algorithm>
#include <cmath>

namespace gpushare::cluster::services {
namespace {

// Batches take their profiled time, but for noise; a plan whose requests are in time only to the millisecond would lose
// half of them.
constexpr double kMargin = 1.05;

// Seconds of the smallest profiled batch that holds `requests`, at most those of `configuration`.
double batch_s(const Service& service, const Configuration& configuration, double requests, double speed) {
  double least = configuration.latency_ms;
  for (const Configuration& other : service.configurations)
    if (other.batch < configuration.batch && other.batch >= requests)
      least = std::min(least, other.latency_ms);
  return least / speed / 1e3 * kMargin;
}

}  // namespace

double part_in_time(const Service& service, const Configuration& configuration, double throughput_rps,
                    double speed) {
  const double slo_s = service.slo_ms / 1e3, batch = configuration.batch;
  const double full_s = batch_s(service, configuration, batch, speed);
  if (full_s > slo_s || throughput_rps <= 0) return 0;
  const double replicas = throughput_rps / (configuration.throughput_rps * speed);
  const double rate = service.rate_rps / std::max(1.0, replicas);  // of one replica
  const double able = std::min(configuration.throughput_rps * speed, batch / full_s * kMargin);
  const double load = rate / able;
  // Overloaded, batches begin with requests that could just be in time in the smallest batch.
  const double late_s = full_s - batch_s(service, configuration, 1, speed);
  const double overloaded = std::clamp(1 - late_s * rate / batch, 0.0, 1.0);
  if (load >= 1) return overloaded / load;
  // Batches one after the other: what comes during one is the next. Chance must not let them grow: a larger batch takes
  // longer, so that the next one is larger too.
  double between_s = full_s;
  for (const Configuration& other : service.configurations) {
    const double seconds = other.latency_ms / speed / 1e3 * kMargin, came = rate * seconds;
    if (other.batch <= configuration.batch && came + 3 * std::sqrt(came) <= other.batch)
      between_s = std::min(between_s, seconds);
  }
  const double fill_s = std::min((batch - 1) / rate, slo_s - full_s);
  if (fill_s >= between_s) return 1;
  // The oldest request of a batch has waited for the batch before, and behind a queue, of exponential length, that
  // chance has built up.
  const double serve_s = batch_s(service, configuration, std::min(batch, std::ceil(rate * between_s)), speed);
  const double queue_s = load / (2 * (1 - load)) / rate;
  const double left_s = slo_s - serve_s, waited_s = std::clamp(left_s, 0.0, between_s);
  const double queued =
      load * queue_s * (std::exp((waited_s - left_s) / queue_s) - std::exp(-left_s / queue_s));
  const double busy = std::min(1.0, rate * between_s / batch);
  return std::max(overloaded, 1 - busy + busy * std::max(0.0, waited_s - queued) / between_s);
}

}  // namespace gpushare::cluster::services
