// How much latency 42 models of one device add to each other, all resident, at a low rate of requests, beside each
// alone. Computed on virtual time, not timed: the scheduler decides, and lanes with work share the device equally (the
// worst case for two kernels that fill it). Requests come as a Poisson process, to each model alike; a request's
// execution is an iteration.
//
//   measure_many_models [LOAD,..] [SEEDS]      load: the share of the device's time that the requests need; 0.05,0.1,0.2,0.4 and 5
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "sched/scheduler.hpp"

namespace {

using namespace gpushare;  // NOLINT

constexpr uint64_t kModels = 42;
constexpr double kSeconds = 400;
constexpr double kNever = 1e300;

struct Request {
  double arrival_s = 0;
  uint64_t model = 0;
};

struct Running {
  uint64_t model = 0;  // 0: the lane is idle
  double left_s = 0, started_s = 0;
};

// 5 to 50 ms, as the models of Salus' inference experiment spread.
double execution_s(uint64_t model) {
  return 0.005 * std::pow(10.0, static_cast<double>(model - 1) / static_cast<double>(kModels - 1));
}

std::vector<Request> requests_at(double load, uint32_t seed) {
  double mean_s = 0;
  for (uint64_t model = 1; model <= kModels; ++model) mean_s += execution_s(model) / kModels;
  std::mt19937_64 random(seed);
  std::exponential_distribution<double> gap(load / mean_s);
  std::uniform_int_distribution<uint64_t> any(1, kModels);
  std::vector<Request> out;
  for (double at = gap(random); at < kSeconds; at += gap(random)) out.push_back({at, any(random)});
  return out;
}

struct Latency {
  double mean_s = 0, p99_s = 0;
  size_t resident = 0;
};

// `only`: the requests of one model on a device of its own; 0: of all.
Latency play(const std::string& policy, const std::vector<Request>& requests, uint64_t only) {
  sched::SchedulerOptions options;
  options.capacity_bytes = 16ull << 30;
  options.granularity_bytes = 2ull << 20;
  sched::Scheduler scheduler(options, std::move(*sched::make_policy(policy)));
  Latency out;
  for (uint64_t model = 1; model <= kModels; ++model) {
    if (only != 0 && model != only) continue;
    sched::SessionSpec spec;
    spec.id = model;
    spec.persistent_bytes = 11'200'000'000 / kModels;
    spec.ephemeral_bytes = 600'000'000;
    if (!scheduler.arrive(spec, 0).ok()) std::exit(1);
  }
  out.resident = scheduler.residents();
  std::vector<std::deque<double>> queues(kModels + 1);
  std::vector<Running> lanes;
  std::vector<double> latencies;
  double now_s = 0;
  size_t next = 0;
  const auto now_ns = [&] { return static_cast<uint64_t>(now_s * 1e9); };
  for (;;) {
    for (bool picked = true; picked;) {
      picked = false;
      (void)scheduler.take_actions();
      for (sched::LaneId lane = 0; lane < scheduler.lane_limit(); ++lane) {
        if (lanes.size() <= lane) lanes.resize(lane + 1);
        if (!scheduler.lane_is_open(lane) || lanes[lane].model != 0) continue;
        const auto model = scheduler.pick(lane, now_ns());
        if (!model) continue;
        scheduler.dispatched(*model, lane, now_ns());
        lanes[lane] = {*model, execution_s(*model), now_s};
        picked = true;
      }
    }
    // Lanes with work share the device equally.
    double least_s = kNever;
    size_t busy = 0;
    for (const Running& lane : lanes) {
      if (lane.model == 0) continue;
      ++busy;
      least_s = std::min(least_s, lane.left_s);
    }
    const auto share = static_cast<double>(busy);
    const double ends_s = busy == 0 ? kNever : now_s + least_s * share;
    const double arrives_s = next < requests.size() ? requests[next].arrival_s : kNever;
    const uint64_t look_ns = scheduler.look_again_ns();
    const double looks_s = look_ns == sched::kUnknown ? kNever : static_cast<double>(look_ns) / 1e9 + 1e-9;
    const double until_s = std::min({ends_s, arrives_s, std::max(looks_s, now_s)});
    if (until_s == kNever) break;
    for (Running& lane : lanes)
      if (lane.model != 0) lane.left_s -= (until_s - now_s) / share;
    now_s = until_s;
    if (now_s == arrives_s) {
      const Request& request = requests[next++];
      if (only == 0 || request.model == only) {
        queues[request.model].push_back(now_s);
        scheduler.ready(request.model, now_ns());
      }
      continue;
    }
    for (Running& lane : lanes) {
      if (lane.model == 0 || lane.left_s > 1e-12) continue;
      const uint64_t model = std::exchange(lane.model, 0);
      scheduler.finished(model, static_cast<uint64_t>((now_s - lane.started_s) * 1e9), now_ns());
      latencies.push_back(now_s - queues[model].front());
      queues[model].pop_front();
      if (!queues[model].empty()) scheduler.ready(model, now_ns());
    }
  }
  if (latencies.empty()) return out;
  for (const double latency : latencies) out.mean_s += latency / static_cast<double>(latencies.size());
  const size_t rank = latencies.size() * 99 / 100;
  std::nth_element(latencies.begin(), latencies.begin() + static_cast<std::ptrdiff_t>(rank), latencies.end());
  out.p99_s = latencies[rank];
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<double> loads;
  for (const char* at = argc > 1 ? argv[1] : "0.05,0.1,0.2,0.4"; *at != '\0';) {
    char* end = nullptr;
    loads.push_back(std::strtod(at, &end));
    if (end == at || !(loads.back() > 0) || loads.back() >= 1) {
      std::fprintf(stderr, "usage: %s [LOAD,..] [SEEDS]   loads above 0 and below 1\n", argv[0]);
      return 2;
    }
    at = *end == ',' ? end + 1 : end;
  }
  const auto seeds = static_cast<uint32_t>(argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 5);
  std::printf("load   policy     resident  mean ms (min..max of %u seeds)   p99 ms  alone ms  added\n",
              seeds);
  for (const double load : loads) {
    for (const char* policy : {"fair", "priority"}) {
      double mean = 0, least = kNever, most = 0, p99 = 0, alone = 0;
      size_t resident = 0;
      for (uint32_t seed = 1; seed <= seeds; ++seed) {
        const std::vector<Request> requests = requests_at(load, seed);
        const Latency all = play(policy, requests, 0);
        double alone_sum = 0;
        for (uint64_t model = 1; model <= kModels; ++model) {
          const auto count = std::count_if(requests.begin(), requests.end(),
                                           [&](const Request& request) { return request.model == model; });
          alone_sum += play(policy, requests, model).mean_s * static_cast<double>(count);
        }
        mean += all.mean_s / seeds;
        least = std::min(least, all.mean_s);
        most = std::max(most, all.mean_s);
        p99 += all.p99_s / seeds;
        alone += alone_sum / static_cast<double>(requests.size()) / seeds;
        resident = all.resident;
      }
      std::printf("%-6g %-10s %8zu  %8.2f (%.2f..%.2f)  %8.2f  %8.2f  %5.1f%%\n", load, policy, resident,
                  mean * 1e3, least * 1e3, most * 1e3, p99 * 1e3, alone * 1e3, (mean / alone - 1) * 100);
    }
  }
  return 0;
}
