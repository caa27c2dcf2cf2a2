// SPDX-License-Identifier: Apache-2.0
#include "cluster/services/igniter.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

namespace gpushare::cluster::services {
namespace {

struct Line {
  double slope = 0;
  double base = 0;
};

Line fit_line(const std::vector<double>& x, const std::vector<double>& y) {
  const auto n = static_cast<double>(x.size());
  const double mean_x = std::accumulate(x.begin(), x.end(), 0.0) / n;
  const double mean_y = std::accumulate(y.begin(), y.end(), 0.0) / n;
  double xx = 0, xy = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    xx += (x[i] - mean_x) * (x[i] - mean_x);
    xy += (x[i] - mean_x) * (y[i] - mean_y);
  }
  const double slope = xx > 0 ? xy / xx : 0;
  return {slope, mean_y - slope * mean_x};
}

// Least squares of four coefficients by the normal equations, whose columns are scaled; false if they are singular.
bool solve_least_squares(const std::vector<std::array<double, 4>>& rows, const std::vector<double>& wanted,
                         std::array<double, 4>& out) {
  std::array<double, 4> scale{};
  for (size_t k = 0; k < 4; ++k) {
    for (const auto& row : rows) scale[k] += row[k] * row[k];
    scale[k] = scale[k] > 0 ? 1 / std::sqrt(scale[k]) : 0;
  }
  std::array<std::array<double, 5>, 4> m{};
  for (size_t i = 0; i < rows.size(); ++i)
    for (size_t a = 0; a < 4; ++a) {
      for (size_t b = 0; b < 4; ++b) m[a][b] += rows[i][a] * scale[a] * rows[i][b] * scale[b];
      m[a][4] += rows[i][a] * scale[a] * wanted[i];
    }
  for (size_t a = 0; a < 4; ++a) {
    size_t pivot = a;
    for (size_t b = a + 1; b < 4; ++b)
      if (std::abs(m[b][a]) > std::abs(m[pivot][a])) pivot = b;
    std::swap(m[a], m[pivot]);
    if (std::abs(m[a][a]) < 1e-13) return false;
    for (size_t b = 0; b < 4; ++b) {
      if (b == a) continue;
      const double factor = m[b][a] / m[a][a];
      for (size_t k = a; k < 5; ++k) m[b][k] -= factor * m[a][k];
    }
  }
  for (size_t a = 0; a < 4; ++a) out[a] = m[a][4] / m[a][a] * scale[a];
  return true;
}

void fit_active_time(const std::vector<double>& batches, const std::vector<double>& shares,
                     const std::vector<double>& active_ms, IgniterModel& model) {
  double best = 1e300;
  for (int step = 0; step <= 500; ++step) {
    const double k4 = step * 0.001;
    std::vector<std::array<double, 4>> rows;
    for (size_t i = 0; i < batches.size(); ++i)
      for (size_t j = 0; j < shares.size(); ++j) {
        const double weight = 1 / active_ms[i * shares.size() + j], per = weight / (shares[j] + k4);
        rows.push_back({batches[i] * batches[i] * per, batches[i] * per, per, weight});
      }
    std::array<double, 4> k{};
    if (!solve_least_squares(rows, std::vector<double>(rows.size(), 1), k)) continue;
    double error = 0;
    for (const auto& row : rows) {
      const double off = row[0] * k[0] + row[1] * k[1] + row[2] * k[2] + row[3] * k[3] - 1;
      error += off * off;
    }
    if (error >= best) continue;
    best = error;
    model.k1 = k[0], model.k2 = k[1], model.k3 = k[2], model.k5 = k[3], model.k4 = k4;
  }
}

}  // namespace

IgniterProfile read_igniter(Fields& fields) {
  IgniterProfile profile;
  fields.with("hardware", [&](Fields& hardware) {
    hardware.about("max_clock", "In MHz.");
    hardware.about("power_cap", "In W.");
    hardware.about("idle_power", "In W.");
    hardware.about("share_step", "In percent.");  // at most 1,000 steps, since each one is tried
    hardware.about("by_workloads_1_to_5", "In W, MHz and ms, for one to five workloads.");
    profile.max_clock = hardware.number("max_clock", kPositive);
    profile.power_cap = hardware.number("power_cap", kPositive);
    profile.idle_power = hardware.number("idle_power", kNotNegative);
    profile.share_step = hardware.number("share_step", {0.1, 100, false}) / 100;
    profile.bytes_per_ms = hardware.number("bytes_per_ms", kPositive);
    hardware.with("by_workloads_1_to_5", [&](Fields& by_workloads) {
      const std::vector<double> power = by_workloads.numbers("power", 5, kPositive, 5);
      const std::vector<double> clock = by_workloads.numbers("clock", 5, kPositive, 5);
      const std::vector<double> idle = by_workloads.numbers("scheduling_idle_ms", 5, kNotNegative, 5);
      if (!by_workloads.ok()) return;
      const Line delay = fit_line(
          {2, 3, 4, 5}, {idle[1] - idle[0], idle[2] - idle[0], idle[3] - idle[0], idle[4] - idle[0]});
      profile.delay_slope = delay.slope;
      profile.delay_base = delay.base;
      // Measured power stops at the cap. The demand for power goes on rising as it began.
      const double each = (power[2] - power[0]) / 2;
      double xx = 0, xy = 0;
      for (size_t p = 0; p < 5; ++p) {
        const double over = power[0] + each * static_cast<double>(p) - profile.power_cap;
        if (over <= 0) continue;
        xx += over * over;
        xy += over * (clock[p] - profile.max_clock);
      }
      profile.clock_slope = xx > 0 ? std::min(0.0, xy / xx) : 0;
    });
  });
  const std::vector<double> batches = fields.numbers("batches", 2, kPositive);
  fields.about("shares", "In percent.");
  std::vector<double> shares = fields.numbers("shares", 2, {0, 100, true});
  for (double& share : shares) share /= 100;
  if (fields.ok() && batches.size() * shares.size() < 4)
    fields.refuse("shares", "batches times shares must be at least 4 measurements");
  fields.each_named("models", [&](Fields& measured, const std::string& name) {
    measured.about("latency", "In ms, alone: a list a batch, of numbers a share.");
    measured.about("power", "In W, alone: a list a batch, of numbers a share.");
    measured.about("clock", "In MHz, alone: a list a batch, of numbers a share.");
    measured.about("l2", "Utilisation of the L2 cache in percent, in the run of pair.");
    measured.about("l2_by_batch", "Utilisation of the L2 cache in percent, alone.");
    measured.about("pair", "A run beside one other workload.");
    IgniterModel model;
    model.input_bytes = measured.number("input_bytes", kNotNegative);
    model.output_bytes = measured.number("output_bytes", kNotNegative);
    model.kernels = measured.number("kernels", kPositive);
    model.idle_ms = measured.number("idle_ms", kNotNegative);
    const std::vector<double> latency = measured.matrix("latency", batches.size(), shares.size(), kPositive);
    const std::vector<double> power = measured.matrix("power", batches.size(), shares.size(), kPositive);
    measured.matrix("clock", batches.size(), shares.size(), kPositive);
    const double cache = measured.number("l2", kPositive);
    const std::vector<double> cache_by_batch =
        measured.matrix_row("l2_by_batch", batches.size(), kNotNegative);
    double alone = 1, beside = 1, clock = profile.max_clock;
    measured.with("pair", [&](Fields& pair) {
      alone = pair.number("active_alone_ms", kPositive);
      beside = pair.number("active_beside_ms", kPositive);
      pair.number("power", kPositive);
      clock = pair.number("clock", kPositive);
    });
    if (!measured.ok()) return;
    std::vector<double> active, rates, diagonal;
    for (size_t i = 0; i < latency.size(); ++i) {
      active.push_back(std::max(latency[i] - model.idle_ms, latency[i] * 1e-3));
      rates.push_back(batches[i / shares.size()] / active.back());
    }
    fit_active_time(batches, shares, active, model);
    // L2 utilisation was measured at the first batch with the first share, the second with the second, and so on.
    for (size_t i = 0; i < batches.size(); ++i)
      diagonal.push_back(rates[i * shares.size() + std::min(i, shares.size() - 1)]);
    const Line cache_line = fit_line(diagonal, cache_by_batch);
    const Line power_line = fit_line(rates, power);
    model.cache_slope = cache_line.slope, model.cache_base = cache_line.base;
    model.power_slope = power_line.slope, model.power_base = power_line.base;
    model.cache_cost = std::max(0.0, beside * clock / profile.max_clock / alone - 1) / cache;
    profile.models.emplace(name, model);
  });
  return profile;
}

std::vector<double> igniter_latency_ms(const IgniterProfile& profile, const std::vector<IgniterTask>& tasks,
                                       double speed) {
  std::vector<double> solo, cache;
  double power = profile.idle_power, cache_sum = 0;
  for (const IgniterTask& task : tasks) {
    const IgniterModel& model = *task.model;
    solo.push_back(std::max(1e-6, model.active_ms(task.batch, task.share)));
    const double rate = task.batch / solo.back();
    cache.push_back(std::max(0.0, model.cache_slope * rate + model.cache_base));
    cache_sum += cache.back();
    power += std::max(0.0, model.power_slope * rate + model.power_base - profile.idle_power);
  }
  const double over = std::max(0.0, power - profile.power_cap);
  const double clock = std::max(0.1, 1 + profile.clock_slope * over / profile.max_clock);
  const auto count = static_cast<double>(tasks.size());
  const double delay = tasks.size() < 2 ? 0 : std::max(0.0, profile.delay_slope * count + profile.delay_base);
  std::vector<double> latency;
  for (size_t i = 0; i < tasks.size(); ++i) {
    const IgniterModel& model = *tasks[i].model;
    const double active = solo[i] * (1 + model.cache_cost * (cache_sum - cache[i]));
    const double scheduling = model.idle_ms + model.kernels * delay;
    latency.push_back((scheduling + active) / (clock * speed) +
                      tasks[i].batch * (model.input_bytes + model.output_bytes) / profile.bytes_per_ms);
  }
  return latency;
}

namespace {

// One replica of a service.
struct Wanted {
  size_t service = 0;
  double rate_rps = 0;  // its part of the service's
  IgniterTask task;
  double limit_ms = 0;  // half the SLO
  int steps = 0;        // of the lower bound, on a device of speed 1
};

struct Host {
  std::vector<size_t> wanted;  // indices
  std::vector<int> steps;
};

constexpr double kShareEps = 1e-9;

// Raises the shares of violators by one step until all keep their limits. False if the device is too small.
bool raise_shares(const IgniterProfile& profile, const std::vector<Wanted>& all, Host& host, double speed) {
  const int most = static_cast<int>(std::floor(1 / profile.share_step + kShareEps));
  for (;;) {
    if (std::accumulate(host.steps.begin(), host.steps.end(), 0) > most) return false;
    std::vector<IgniterTask> tasks;
    for (size_t i = 0; i < host.wanted.size(); ++i) {
      tasks.push_back(all[host.wanted[i]].task);
      tasks.back().share = host.steps[i] * profile.share_step;
    }
    const std::vector<double> latency = igniter_latency_ms(profile, tasks, speed);
    bool raised = false;
    for (size_t i = 0; i < latency.size(); ++i)
      if (latency[i] > all[host.wanted[i]].limit_ms) {
        ++host.steps[i];
        raised = true;
      }
    if (!raised) return true;
  }
}

// The batch that a rate needs within half the SLO.
double batch_of(const IgniterProfile& profile, const IgniterModel& model, const Service& service,
                double rate_rps) {
  const double rate = rate_rps / 1e3;  // requests a ms
  return std::max(1.0, std::ceil(service.slo_ms / 2 * rate * profile.bytes_per_ms /
                                     (profile.bytes_per_ms + model.input_bytes * rate) -
                                 kShareEps));
}

// That batch, and the least share that serves it alone. Steps beyond a whole device if there is none.
Wanted want(const IgniterProfile& profile, const IgniterModel& model, const Service& service,
            double rate_rps) {
  const int most = static_cast<int>(std::floor(1 / profile.share_step + kShareEps));
  Wanted wanted;
  wanted.rate_rps = rate_rps;
  wanted.limit_ms = service.slo_ms / 2;
  wanted.task.model = &model;
  wanted.task.batch = batch_of(profile, model, service, rate_rps);
  for (wanted.steps = 1; wanted.steps <= most; ++wanted.steps) {
    wanted.task.share = wanted.steps * profile.share_step;
    if (igniter_latency_ms(profile, {wanted.task}, 1)[0] <= wanted.limit_ms) break;
  }
  return wanted;
}

// The fewest replicas, each with an equal part of the rate, that a whole device of speed 1 serves, but no more of them than
// there are devices. Empty if even a batch of one is too slow there.
std::vector<Wanted> replicas_of(const IgniterProfile& profile, const IgniterModel& model,
                                const Service& service, size_t devices) {
  constexpr size_t kMostReplicas = 4096;
  const int most = static_cast<int>(std::floor(1 / profile.share_step + kShareEps));
  double refused = 0;  // the batch that even a whole device does not serve: it alone decides
  for (size_t count = 1; count <= kMostReplicas; ++count) {
    const double rate_rps = service.rate_rps / static_cast<double>(count);
    const double batch = batch_of(profile, model, service, rate_rps);
    if (batch != refused) {
      const Wanted wanted = want(profile, model, service, rate_rps);
      if (wanted.steps <= most) return std::vector<Wanted>(std::min(count, devices), wanted);
      refused = batch;
    }
    if (batch == 1) break;
  }
  return {};
}

// The replicas of all services, those of the largest shares first; tells `placement` which services have too few.
std::vector<Wanted> all_replicas(const IgniterProfile& profile, const std::vector<Service>& services,
                                 const std::vector<Device>& devices, Placement& placement) {
  std::vector<Wanted> all;
  const int most = static_cast<int>(std::floor(1 / profile.share_step + kShareEps));
  for (size_t s = 0; s < services.size(); ++s) {
    placement.bound_rps += services[s].rate_rps;
    const auto at = profile.models.find(services[s].model);
    if (at == profile.models.end()) {
      placement.unserved.emplace_back(s, "there are no measurements of model '" + services[s].model + "'");
      continue;
    }
    std::vector<Wanted> replicas = replicas_of(profile, at->second, services[s], devices.size());
    const bool faster =
        std::any_of(devices.begin(), devices.end(), [](const Device& d) { return d.speed > 1; });
    if (replicas.empty() && faster) {
      replicas = {want(profile, at->second, services[s], services[s].rate_rps)};
      replicas[0].steps = most;
    }
    if (replicas.empty())
      placement.unserved.emplace_back(s, "a whole device does not keep half of slo_ms even at a batch of 1");
    double rate_rps = 0;
    for (const Wanted& wanted : replicas) rate_rps += wanted.rate_rps;
    if (!replicas.empty() && rate_rps < services[s].rate_rps * (1 - 1e-9))
      placement.unserved.emplace_back(
          s, base::format("its rate needs a whole device for each %.4g requests/s, and there are %zu devices",
                          replicas[0].rate_rps, devices.size()));
    for (Wanted& wanted : replicas) {
      wanted.service = s;
      all.push_back(wanted);
    }
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const Wanted& a, const Wanted& b) { return a.steps > b.steps; });
  return all;
}

}  // namespace

Placement place_by_igniter(const IgniterProfile& profile, const std::vector<Service>& services,
                           const std::vector<Device>& devices) {
  Placement placement;
  const std::vector<Wanted> all = all_replicas(profile, services, devices, placement);
  const int most = static_cast<int>(std::floor(1 / profile.share_step + kShareEps));
  std::vector<Host> hosts(devices.size());
  std::vector<int> used(devices.size(), 0);  // steps of a device's shares
  for (size_t w = 0; w < all.size(); ++w) {
    size_t best_device = devices.size();
    int best_growth = 0;
    Host best_host;
    bool tried_empty = false;
    for (size_t d = 0; d < devices.size(); ++d) {
      // An empty device is opened only when no used one can take the service.
      if (hosts[d].wanted.empty() && (best_device < devices.size() || (tried_empty && devices[d].speed <= 1)))
        continue;
      tried_empty |= hosts[d].wanted.empty();
      if (used[d] + all[w].steps > most) continue;
      Host host = hosts[d];
      host.wanted.push_back(w);
      host.steps.push_back(all[w].steps);
      if (!raise_shares(profile, all, host, devices[d].speed)) continue;
      const int growth = std::accumulate(host.steps.begin(), host.steps.end(), 0) - used[d];
      const bool opens = hosts[d].wanted.empty(),
                 best_opens = best_device < devices.size() && hosts[best_device].wanted.empty();
      if (best_device == devices.size() || (best_opens && !opens) ||
          (best_opens == opens && growth < best_growth)) {
        best_device = d;
        best_growth = growth;
        best_host = std::move(host);
      }
    }
    if (best_device == devices.size()) {
      if (placement.unserved.empty() ||
          placement.unserved.back().first != all[w].service)  // once for all its replicas
        placement.unserved.emplace_back(
            all[w].service, "no device can take it, or a replica of it, and keep half of every slo_ms");
      // Its other replicas come next, and are the same.
      while (w + 1 < all.size() && all[w + 1].service == all[w].service) ++w;
      continue;
    }
    hosts[best_device] = std::move(best_host);
    used[best_device] += best_growth;
  }
  for (size_t d = 0; d < devices.size(); ++d) {
    std::vector<IgniterTask> tasks;
    for (size_t i = 0; i < hosts[d].wanted.size(); ++i) {
      tasks.push_back(all[hosts[d].wanted[i]].task);
      tasks.back().share = hosts[d].steps[i] * profile.share_step;
    }
    const std::vector<double> latency = igniter_latency_ms(profile, tasks, devices[d].speed);
    for (size_t i = 0; i < tasks.size(); ++i) {
      placement.replicas.push_back({all[hosts[d].wanted[i]].service, d, static_cast<uint32_t>(tasks[i].batch),
                                    tasks[i].share * 100, tasks[i].batch / latency[i] * 1e3, latency[i]});
      placement.goodput_rps += all[hosts[d].wanted[i]].rate_rps;
    }
  }
  placement.optimal = placement.unserved.empty();
  return placement;
}

}  // namespace gpushare::cluster::services
