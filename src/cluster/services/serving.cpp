// SPDX-License-Identifier: Apache-2.0
#include "cluster/services/serving.hpp"

#include <algorithm>
#include <cmath>
#include <deque>
#include <queue>
#include <random>

namespace gpushare::cluster::services {
namespace {

constexpr size_t kMostSpans = 100'000;

struct Server {
  const Replica* replica = nullptr;
  double compute = 0;                                // part of the device
  std::vector<std::pair<uint32_t, double>> seconds;  // (batch, time on this device), ascending
  std::deque<double> queue;                          // arrivals
  std::vector<double> batch;                         // under way
  double began_s = 0;
  uint32_t version = 0;  // of its timer
};

struct Event {
  double at_s;
  uint32_t server;
  uint32_t version;  // of the timer; kCompletion for the end of a batch
  bool operator>(const Event& other) const {
    return at_s != other.at_s ? at_s > other.at_s : server > other.server;
  }
};
constexpr uint32_t kCompletion = UINT32_MAX;

}  // namespace

double percentile(std::vector<float>& values, double part) {
  if (values.empty()) return 0;
  const auto rank =
      static_cast<size_t>(std::max(1.0, std::ceil(part * static_cast<double>(values.size())))) - 1;
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(rank), values.end());
  return values[rank];
}

namespace {

class Serving {
 public:
  Serving(const std::vector<Service>& services, const std::vector<Device>& devices,
          const Placement& placement, const ServingOptions& options, std::vector<PlaySpan>* spans)
      : services_(services), devices_(devices), options_(options), spans_(spans), random_(options.seed) {
    servers_of_.resize(services.size());
    compute_.assign(devices.size(), 0);
    for (const Replica& replica : placement.replicas) {
      Server server;
      server.replica = &replica;
      const Service& service = services[replica.service];
      server.compute = replica.share_percent / 100;
      for (const Configuration& configuration : service.configurations) {
        if (configuration.batch > replica.batch) continue;
        server.seconds.emplace_back(configuration.batch,
                                    configuration.latency_ms / devices[replica.device].speed / 1e3);
        if (configuration.batch != replica.batch) continue;
        for (const Metric metric : {Metric::kAo, Metric::kWao, Metric::kWsm}) {
          const double percent = configuration.compute_percent[static_cast<size_t>(metric)];
          if (percent >= 0) server.compute = percent / 100;
        }
      }
      std::sort(server.seconds.begin(), server.seconds.end());
      if (server.seconds.empty() || server.seconds.back().first != replica.batch)
        server.seconds.emplace_back(replica.batch, replica.latency_ms / 1e3);
      servers_of_[replica.service].push_back(static_cast<uint32_t>(servers_.size()));
      servers_.push_back(std::move(server));
    }
  }

  ServingResult run() {
    ServingResult result;
    result.services.resize(services_.size());
    latencies_.resize(services_.size());
    batches_.assign(services_.size(), 0);
    result_ = &result;
    using Arrival = std::pair<double, size_t>;
    std::priority_queue<Arrival, std::vector<Arrival>, std::greater<>> arrivals;
    for (size_t s = 0; s < services_.size(); ++s) arrivals.emplace(gap(s), s);
    while (!arrivals.empty() || !events_.empty()) {
      const double arrival = arrivals.empty() ? 1e300 : arrivals.top().first;
      if (events_.empty() || arrival <= events_.top().at_s) {
        const size_t service = arrivals.top().second;
        arrivals.pop();
        if (arrival > options_.duration_s) continue;  // that service has had its requests
        arrivals.emplace(arrival + gap(service), service);
        arrive(service, arrival);
        continue;
      }
      const Event event = events_.top();
      events_.pop();
      Server& server = servers_[event.server];
      if (event.version == kCompletion) {
        complete(event.server, event.at_s);
      } else if (event.version != server.version || !server.batch.empty()) {
        continue;
      }
      begin_if_due(event.server, event.at_s);
    }
    for (size_t s = 0; s < services_.size(); ++s) {
      ServedService& served = result.services[s];
      if (batches_[s] > 0)
        served.batch_mean = static_cast<double>(served.in_time + served.late) / batches_[s];
      result.offered_rps += static_cast<double>(served.requests) / options_.duration_s;
      result.goodput_rps += static_cast<double>(served.in_time) / options_.duration_s;
      result.throughput_rps += static_cast<double>(served.in_time + served.late) / options_.duration_s;
      served.latencies_ms = std::move(latencies_[s]);
      served.latency_p50_ms = percentile(served.latencies_ms, 0.5);
      served.latency_p99_ms = percentile(served.latencies_ms, 0.99);
    }
    return result;
  }

 private:
  double gap(size_t service) {
    return std::exponential_distribution<double>(services_[service].rate_rps)(random_);
  }

  void arrive(size_t service, double now_s) {
    ServedService& served = result_->services[service];
    ++served.requests;
    uint32_t best = UINT32_MAX;
    double least = 1e300;
    for (const uint32_t at : servers_of_[service]) {
      const Server& server = servers_[at];
      // A batch that is being collected is filled before another is begun elsewhere.
      const size_t queued = server.queue.size() + (server.batch.empty() ? 0 : server.replica->batch);
      const double work = std::floor(static_cast<double>(queued) / server.replica->batch) *
                          server.replica->batch / server.replica->throughput_rps;
      if (work >= least) continue;
      least = work;
      best = at;
    }
    if (best == UINT32_MAX) {
      ++served.unplaced;
      return;
    }
    servers_[best].queue.push_back(now_s);
    if (servers_[best].batch.empty()) begin_if_due(best, now_s);
  }

  double time_of(const Server& server, size_t requests) const {
    for (const auto& [batch, seconds] : server.seconds)
      if (batch >= requests) return seconds;
    return server.seconds.back().second;
  }

  // Starts a batch if one is full or due, else sets the timer for when it is.
  void begin_if_due(uint32_t at, double now_s) {
    Server& server = servers_[at];
    if (!server.batch.empty()) return;
    const size_t service = server.replica->service;
    const double last_s = services_[service].slo_ms / 1e3 - server.seconds.front().second;
    while (!server.queue.empty() && now_s - server.queue.front() > last_s + 1e-9) {
      server.queue.pop_front();  // late already: the others would wait for nothing
      ++result_->services[service].dropped;
    }
    if (server.queue.empty()) return;
    const uint32_t full = server.replica->batch;
    if (server.queue.size() < full) {
      const double slo_s = services_[server.replica->service].slo_ms / 1e3;
      const double due_s = server.queue.front() + std::max(0.0, slo_s - time_of(server, full));
      if (due_s > now_s) {
        events_.push({due_s, at, ++server.version});
        return;
      }
    }
    const size_t count = std::min<size_t>(full, server.queue.size());
    server.batch.assign(server.queue.begin(), server.queue.begin() + static_cast<std::ptrdiff_t>(count));
    server.queue.erase(server.queue.begin(), server.queue.begin() + static_cast<std::ptrdiff_t>(count));
    ++batches_[server.replica->service];
    compute_[server.replica->device] += server.compute;
    double seconds = time_of(server, count) * std::max(1.0, compute_[server.replica->device]);
    if (options_.noise > 0) seconds *= std::max(0.1, 1 + options_.noise * normal_(random_));
    server.began_s = now_s;
    ++server.version;
    events_.push({now_s + seconds, at, kCompletion});
  }

  void complete(uint32_t at, double now_s) {
    Server& server = servers_[at];
    const size_t service = server.replica->service;
    ServedService& served = result_->services[service];
    const size_t device = server.replica->device;
    const bool lost = device < options_.fails.size() && options_.fails[device] && now_s > options_.duration_s;
    if (lost) {
      served.dropped += server.batch.size();
      server.batch.clear();
    }
    for (const double arrived : server.batch) {
      const double latency_ms = (now_s - arrived) * 1e3;
      ++(latency_ms <= services_[service].slo_ms * (1 + 1e-9) ? served.in_time : served.late);
      latencies_[service].push_back(static_cast<float>(latency_ms));
    }
    if (spans_ != nullptr && spans_->size() < kMostSpans && !lost)
      spans_->push_back({"device " + devices_[server.replica->device].id,
                         base::format("%s x %zu", services_[service].name.c_str(), server.batch.size()),
                         server.began_s, now_s});
    server.batch.clear();
    compute_[server.replica->device] -= server.compute;
  }

  const std::vector<Service>& services_;
  const std::vector<Device>& devices_;
  const ServingOptions options_;
  std::vector<PlaySpan>* spans_;
  std::mt19937_64 random_;
  std::normal_distribution<double> normal_{0, 1};
  std::vector<Server> servers_;
  std::vector<std::vector<uint32_t>> servers_of_;
  std::vector<double> compute_;
  std::vector<std::vector<float>> latencies_;
  std::vector<double> batches_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  ServingResult* result_ = nullptr;
};

}  // namespace

base::Result<ServingResult> serve(const std::vector<Service>& services, const std::vector<Device>& devices,
                                  const Placement& placement, const ServingOptions& options,
                                  std::vector<PlaySpan>* spans) {
  double requests = 0;
  for (const Service& service : services) requests += service.rate_rps * options.duration_s;
  if (requests > kMostRequests)
    return base::Status(
        GPUSHARE_EXCEEDS_CAPACITY,
        base::format("run.duration_s: %.3g requests in %g s are more than the %.0e that are played; "
                     "shorten it or lower the rates",
                     requests, options.duration_s, kMostRequests));
  return Serving(services, devices, placement, options, spans).run();
}

}  // namespace gpushare::cluster::services
