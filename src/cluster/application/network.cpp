// SPDX-License-Identifier: Apache-2.0
#include "cluster/application/network.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>
#include <random>

namespace gpushare::cluster::application {
namespace {

// A request that begins one of its stages, or that has ended its last one.
struct Event {
  double at_s = 0;
  uint32_t request = 0;
  uint32_t stage = 0;
  bool operator>(const Event& other) const {
    return at_s != other.at_s ? at_s > other.at_s : request > other.request;
  }
};

struct Request {
  double arrival_s = 0;
  size_t kind = 0;
};

constexpr double kLeastSpread = 1e-6;  // below, the square becomes 0 at last, and a draw would be no number

// Gamma, which is exponential at a spread of 1.
double draw_work(const Service& service, std::mt19937_64& random) {
  if (service.spread < kLeastSpread) return service.work_s;
  const double shape = 1 / (service.spread * service.spread);
  return std::gamma_distribution<double>(shape, service.work_s / shape)(random);
}

std::vector<Request> draw_requests(const Application& application, double load_rps, double seconds,
                                   std::mt19937_64& random) {
  std::vector<double> parts;
  for (const RequestKind& kind : application.kinds) parts.push_back(kind.part);
  std::discrete_distribution<size_t> kind_of(parts.begin(), parts.end());
  std::exponential_distribution<double> gap(load_rps);
  std::vector<Request> requests;
  for (double at = gap(random); at < seconds; at += gap(random)) requests.push_back({at, kind_of(random)});
  return requests;
}

void add_latencies(std::vector<double>& latencies, double slo_s, Round& round) {
  if (latencies.empty()) return;
  const auto count = double(latencies.size());
  double sum = 0, in_time = 0;
  for (const double latency : latencies) {
    sum += latency;
    in_time += latency <= slo_s ? 1 : 0;
  }
  round.mean_s = sum / count;
  round.in_time = in_time / count;
  const auto rank = latencies.begin() + std::ptrdiff_t((count - 1) * 0.99);
  std::nth_element(latencies.begin(), rank, latencies.end());
  round.p99_s = *rank;
}

}  // namespace

std::vector<double> Application::visits() const {
  double all = 0;
  for (const RequestKind& kind : kinds) all += kind.part;
  std::vector<double> result(services.size(), 0);
  for (const RequestKind& kind : kinds)
    for (const auto& stage : kind.stages)
      for (const size_t service : stage) result[service] += kind.part / all;
  return result;
}

Application Application::at(uint64_t round) const {
  Application result = *this;
  for (Service& service : result.services)
    if (round >= service.change_round) service.work_s *= service.change_factor;
  return result;
}

Round play_round(const Application& application, const std::vector<int64_t>& units, double load_rps,
                 double seconds, uint64_t seed) {
  std::mt19937_64 random(seed);
  const std::vector<Request> requests = draw_requests(application, load_rps, seconds, random);
  Round round;
  round.load_rps = double(requests.size()) / seconds;
  round.usage.resize(application.services.size());
  using FreeTimes = std::priority_queue<double, std::vector<double>, std::greater<>>;
  std::vector<FreeTimes> free;  // of each service: when each of its units is free
  for (const int64_t have : units)
    free.emplace_back(std::greater<>(), std::vector<double>(size_t(std::max<int64_t>(1, have)), 0.0));
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events;
  for (uint32_t r = 0; r < requests.size(); ++r) events.push({requests[r].arrival_s, r, 0});
  const auto within = [seconds](double from, double to) {
    return std::max(0.0, std::min(to, seconds) - from) / seconds;
  };
  std::vector<double> latencies;
  while (!events.empty()) {
    const Event event = events.top();
    events.pop();
    const Request& request = requests[event.request];
    const auto& stages = application.kinds[request.kind].stages;
    if (event.stage == stages.size()) {
      latencies.push_back(event.at_s - request.arrival_s);
      if (event.at_s < seconds) round.answered_rps += 1 / seconds;
      continue;
    }
    double last_s = event.at_s;
    for (const size_t service : stages[event.stage]) {
      const double begin_s = std::max(event.at_s, free[service].top());
      const double end_s = begin_s + draw_work(application.services[service], random);
      free[service].pop();
      free[service].push(end_s);
      Usage& usage = round.usage[service];
      usage.busy += within(begin_s, end_s);
      usage.waiting += within(event.at_s, begin_s);
      if (end_s < seconds) usage.visits_rps += 1 / seconds;
      last_s = std::max(last_s, end_s);
    }
    events.push({last_s, event.request, event.stage + 1});
  }
  add_latencies(latencies, application.slo_s, round);
  return round;
}

}  // namespace gpushare::cluster::application
