// SPDX-License-Identifier: Apache-2.0
#include "cli/serve_host.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <map>
#include <mutex>
#include <thread>

#include "base/clock.hpp"
#include "executor/serving/iteration_batch.hpp"

namespace gpushare::cli {
namespace {

using executor::RequestOutcome;
using executor::RequestServer;
using sched::slo::Batch;
using sched::slo::DropReason;

constexpr size_t kProducers = 4;

// Arithmetic until the time is over.
double work_until(uint64_t end_ns) {
  double value = 1;
  while (base::host_now_ns() < end_ns)
    for (int i = 0; i < 200; ++i) value = value * 1.0000001 + 1e-9;
  return value;
}

}  // namespace

base::Result<sim::ServingResult> serve_on_host(const std::vector<sim::TimedRequest>& requests,
                                               std::string_view policy, const sim::ServingOptions& options,
                                               double time_scale, bool arithmetic) {
  const double p99 = options.p99_ns > 0 ? options.p99_ns : sim::execution_quantile_ns(requests, 0.99);
  const auto scaled = [time_scale](double ns) {
    return static_cast<uint64_t>(std::max(0.0, ns * time_scale));
  };
  executor::RequestServerOptions server_options;
  server_options.policy = std::string(policy);
  server_options.batcher = options.batcher;
  for (double* ms : {&server_options.batcher.max_defer_ms, &server_options.batcher.max_delay_ms,
                     &server_options.batcher.clockwork_window_ms, &server_options.batcher.clockwork_slack_ms,
                     &server_options.batcher.nexus_overhead_ms})
    *ms *= time_scale;
  server_options.batcher.delay_rate_per_ms /= time_scale;
  sched::slo::ModelSpec model;
  model.c0_ns = options.c0_ns * time_scale;
  model.c1 = options.c1;
  model.batch_sizes = options.batch_sizes;

  sim::ServingResult result;
  result.requests = requests.size();
  result.batch_sizes.resize(options.batch_sizes.back() + 1);
  std::vector<std::atomic<uint32_t>> answered(requests.size());
  std::mutex mutex;  // of result and latencies
  std::vector<uint64_t> latencies;
  std::atomic<uint64_t> busy_ns{0};
  std::vector<uint64_t> arrivals(requests.size());
  const uint64_t start_ns = base::host_now_ns() + 20'000'000;
  for (size_t i = 0; i < requests.size(); ++i)
    arrivals[i] = start_ns + scaled(static_cast<double>(requests[i].arrival_ns));

  // One batch runs at a time; the device's work reads what the lane's thread wrote before.
  struct Work {
    uint64_t length_ns = 0;
    bool arithmetic = false;
    std::atomic<double> sink{0};
    void run() {
      const uint64_t until = base::host_now_ns() + length_ns;
      if (arithmetic)
        sink = work_until(until);
      else
        std::this_thread::sleep_for(std::chrono::nanoseconds(length_ns));
      end_ns = base::host_now_ns();
    }
    uint64_t end_ns = 0;
  } work;
  work.arithmetic = arithmetic;
  const auto run = [&](const Batch& batch, const std::shared_ptr<executor::Iteration>& iteration,
                       executor::BatchReport& report) -> base::Status {
    uint64_t longest = 0;
    for (uint64_t id : batch.requests) longest = std::max(longest, requests[id].execution_ns);
    const double k = static_cast<double>(batch.requests.size());
    work.length_ns = scaled(options.c0_ns + options.c1 * k * static_cast<double>(longest));
    busy_ns += work.length_ns;
    for (size_t i = 0; i < batch.requests.size(); ++i)
      report.execution_ns[i] =
          std::max<uint64_t>(1, scaled(static_cast<double>(requests[batch.requests[i]].execution_ns)));
    {
      const std::lock_guard lock(mutex);
      ++result.batches;
      ++result.batch_sizes[batch.requests.size()];
    }
    GPUSHARE_ASSIGN_OR_RETURN(const std::shared_ptr<executor::Stream> stream, iteration->stream());
    return stream->launch_host([](void* data) { static_cast<Work*>(data)->run(); }, &work);
  };
  const auto done = [&](const RequestOutcome& outcome) {
    ++answered[outcome.id];
    const std::lock_guard lock(mutex);
    if (outcome.dropped) {
      ++result.dropped[static_cast<size_t>(*outcome.dropped)];
      return;
    }
    (outcome.finished_ns <= outcome.deadline_ns ? result.finished_in_time : result.finished_late) += 1;
    latencies.push_back(outcome.finished_ns - arrivals[outcome.id]);
  };
  GPUSHARE_ASSIGN_OR_RETURN(std::unique_ptr<RequestServer> server, RequestServer::start(server_options));
  executor::RuntimeOptions runtime_options;
  runtime_options.device = "host";
  runtime_options.capacity_bytes = 16 << 20;
  GPUSHARE_ASSIGN_OR_RETURN(const std::shared_ptr<executor::Runtime> runtime,
                            executor::Runtime::open(std::move(runtime_options)));
  executor::SessionOptions session_options;
  session_options.name = "model";
  session_options.persistent_bytes = session_options.ephemeral_bytes = 1 << 20;
  GPUSHARE_ASSIGN_OR_RETURN(std::shared_ptr<executor::Session> session,
                            runtime->open_session(session_options));
  const base::Result<uint32_t> added =
      server->add_model(model, executor::run_as_iterations(std::move(session), run));
  if (!added.ok()) return added.status();
  std::map<uint32_t, std::vector<uint64_t>> by_application;
  for (const sim::TimedRequest& request : requests)
    by_application[request.application].push_back(request.execution_ns);
  for (const auto& [application, times] : by_application) {
    const size_t take = std::min(options.warm_samples, times.size());
    for (size_t i = 0; i < take; ++i)
      server->observe(0, application,
                      std::max<uint64_t>(1, scaled(static_cast<double>(times[i * times.size() / take]))));
  }
  std::vector<std::thread> producers;
  for (size_t p = 0; p < kProducers; ++p)
    producers.emplace_back([&, p] {
      for (size_t i = p; i < requests.size(); i += kProducers) {
        const uint64_t now = base::host_now_ns();
        if (arrivals[i] > now) std::this_thread::sleep_for(std::chrono::nanoseconds(arrivals[i] - now));
        sched::slo::Request request;
        request.id = i;
        request.application = requests[i].application;
        request.arrival_ns = arrivals[i];
        const double slo =
            requests[i].slo_ns != 0 ? static_cast<double>(requests[i].slo_ns) : options.slo_x_p99 * p99;
        request.deadline_ns = arrivals[i] + scaled(slo);
        request.execution_ns = scaled(static_cast<double>(requests[i].execution_ns));
        const base::Status status = server->submit(request, done);
        if (status.ok()) continue;
        ++answered[i];
        const std::lock_guard lock(mutex);
        ++result.dropped[static_cast<size_t>(status.code() == GPUSHARE_QUEUE_FULL ? DropReason::kQueueFull
                                                                                  : DropReason::kHopeless)];
      }
    });
  for (std::thread& producer : producers) producer.join();
  GPUSHARE_RETURN_IF_ERROR(server->drain());
  const executor::RequestServerStats stats = server->stats();
  result.decisions = stats.decisions;
  result.most_pending = stats.most_held;
  if (result.decisions > 0)
    result.decision_us = static_cast<double>(stats.decision_ns) / 1e3 / static_cast<double>(result.decisions);
  GPUSHARE_RETURN_IF_ERROR(server->stop());
  GPUSHARE_RETURN_IF_ERROR(runtime->close());
  for (size_t i = 0; i < answered.size(); ++i)
    if (answered[i] != 1)
      return base::Status(GPUSHARE_INTERNAL,
                          base::format("request %zu was answered %u times", i, answered[i].load()));

  if (result.requests > 0)
    result.finish_rate = static_cast<double>(result.finished_in_time) / static_cast<double>(result.requests);
  if (work.end_ns > start_ns) {
    const double span = static_cast<double>(work.end_ns - start_ns) / time_scale;
    result.goodput_per_s = static_cast<double>(result.finished_in_time) / (span / 1e9);
    result.busy_share = static_cast<double>(busy_ns) / static_cast<double>(work.end_ns - start_ns);
  }
  uint64_t ran = 0;
  for (size_t k = 0; k < result.batch_sizes.size(); ++k) ran += k * result.batch_sizes[k];
  if (result.batches > 0) result.mean_batch = static_cast<double>(ran) / static_cast<double>(result.batches);
  if (!latencies.empty()) {
    std::sort(latencies.begin(), latencies.end());
    result.p50_ms = static_cast<double>(latencies[latencies.size() / 2]) / 1e6 / time_scale;
    result.p99_ms = static_cast<double>(latencies[latencies.size() * 99 / 100]) / 1e6 / time_scale;
  }
  return result;
}

}  // namespace gpushare::cli
