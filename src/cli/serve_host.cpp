// SPDX-License-Identifier: Apache-2.0
#include "cli/serve_host.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "base/clock.hpp"
#include "base/no_signals.hpp"
#include "base/saturate.hpp"
#include "executor/serving/iteration_batch.hpp"

namespace gpushare::cli {
namespace {

using executor::RequestOutcome;
using sched::slo::Batch;
using sched::slo::DropReason;

constexpr size_t kProducers = 4;
constexpr uint64_t kLeadNs = 20'000'000;  // from the start until the first request may arrive

// Arithmetic until the time is over.
double work_until(uint64_t end_ns) {
  double value = 1;
  while (base::host_now_ns() < end_ns)
    for (int i = 0; i < 200; ++i) value = value * 1.0000001 + 1e-9;
  return value;
}

// This function stands for the kernels of a batch and runs on the stream's thread. One batch runs at a time,
// and the device reads what the lane's thread wrote before.
struct Work {
  bool arithmetic = false;
  uint64_t length_ns = 0;
  uint64_t end_ns = 0;  // of the last one
  std::atomic<double> sink{0};

  static void run(void* data) {
    auto& work = *static_cast<Work*>(data);
    if (work.arithmetic)
      work.sink = work_until(base::host_now_ns() + work.length_ns);
    else
      std::this_thread::sleep_for(std::chrono::nanoseconds(work.length_ns));
    work.end_ns = base::host_now_ns();
  }
};

// One policy over one list of requests.
class HostServing {
 public:
  HostServing(const std::vector<sim::TimedRequest>& requests, const sim::ServingOptions& options,
              double time_scale, bool arithmetic)
      : requests_(requests),
        options_(options),
        time_scale_(time_scale),
        p99_ns_(options.p99_ns > 0 ? options.p99_ns : sim::execution_quantile_ns(requests, 0.99)),
        arrivals_(requests.size()),
        answered_(requests.size()) {
    work_.arithmetic = arithmetic;
    result_.requests = requests.size();
    result_.batch_sizes.resize(options.batch_sizes.back() + 1);
  }

  base::Result<sim::ServingResult> serve(std::string_view policy) {
    start_ns_ = base::host_now_ns() + kLeadNs;
    for (size_t i = 0; i < requests_.size(); ++i)
      arrivals_[i] = start_ns_ + scaled(static_cast<double>(requests_[i].arrival_ns));
    GPUSHARE_RETURN_IF_ERROR(start(policy));
    GPUSHARE_RETURN_IF_ERROR(tell_samples());
    std::vector<std::thread> producers;
    {
      const base::NoSignals no_signals;
      for (size_t p = 0; p < kProducers; ++p) producers.emplace_back([this, p] { submit_from(p); });
    }
    for (std::thread& producer : producers) producer.join();
    GPUSHARE_RETURN_IF_ERROR(server_->drain());
    const executor::RequestServerStats stats = server_->stats();
    GPUSHARE_RETURN_IF_ERROR(server_->stop());
    GPUSHARE_RETURN_IF_ERROR(runtime_->close());
    for (size_t i = 0; i < answered_.size(); ++i)
      if (answered_[i] != 1)
        return base::Status(GPUSHARE_INTERNAL,
                            base::format("request %zu was answered %u times", i, answered_[i].load()));
    conclude(stats);
    return result_;
  }

 private:
  // At most a century: times stay inside 64 bits.
  uint64_t scaled(double ns) const {
    return std::min<uint64_t>(base::to_uint64(ns * time_scale_), 3'000'000'000'000'000'000);
  }
  uint64_t scaled_execution_ns(size_t request) const {
    return std::max<uint64_t>(1, scaled(static_cast<double>(requests_[request].execution_ns)));
  }

  base::Status start(std::string_view policy) {
    executor::RequestServerOptions server;
    server.policy = std::string(policy);
    server.batcher = options_.batcher;
    for (double* ms :
         {&server.batcher.max_defer_ms, &server.batcher.max_delay_ms, &server.batcher.clockwork_window_ms,
          &server.batcher.clockwork_slack_ms, &server.batcher.nexus_overhead_ms})
      *ms *= time_scale_;
    server.batcher.delay_rate_per_ms /= time_scale_;
    GPUSHARE_ASSIGN_OR_RETURN(server_, executor::RequestServer::start(server));

    executor::RuntimeOptions runtime;
    runtime.device = "host";
    runtime.capacity_bytes = 16 << 20;
    GPUSHARE_ASSIGN_OR_RETURN(runtime_, executor::Runtime::open(std::move(runtime)));
    executor::SessionOptions session;
    session.name = "model";
    session.persistent_bytes = session.ephemeral_bytes = 1 << 20;
    GPUSHARE_ASSIGN_OR_RETURN(std::shared_ptr<executor::Session> opened, runtime_->open_session(session));

    sched::slo::ModelSpec model;
    model.c0_ns = options_.c0_ns * time_scale_;
    model.c1 = options_.c1;
    model.batch_sizes = options_.batch_sizes;
    const auto run = [this](const Batch& batch, const std::shared_ptr<executor::Iteration>& iteration,
                            executor::BatchReport& report) { return run_batch(batch, iteration, report); };
    return server_->add_model(model, executor::run_as_iterations(std::move(opened), run)).status();
  }

  // Execution times of each application that are told beforehand, drawn evenly from its requests.
  base::Status tell_samples() {
    std::map<uint32_t, std::vector<size_t>> by_application;
    const size_t seen =
        options_.warm_from == 0 ? requests_.size() : std::min(options_.warm_from, requests_.size());
    for (size_t i = 0; i < seen; ++i) by_application[requests_[i].application].push_back(i);
    for (const auto& [application, members] : by_application) {
      const size_t take = std::min(options_.warm_samples, members.size());
      for (size_t i = 0; i < take; ++i) {
        const size_t which = members[i * members.size() / take];
        GPUSHARE_RETURN_IF_ERROR(server_->observe(request_of(which), scaled_execution_ns(which)));
      }
    }
    return {};
  }

  // On the lane's thread, in the session's turn.
  base::Status run_batch(const Batch& batch, const std::shared_ptr<executor::Iteration>& iteration,
                         executor::BatchReport& report) {
    uint64_t longest = 0;
    for (size_t i = 0; i < batch.requests.size(); ++i) {
      longest = std::max(longest, requests_[batch.requests[i]].execution_ns);
      report.execution_ns[i] = scaled_execution_ns(batch.requests[i]);
    }
    const double count = static_cast<double>(batch.requests.size());
    work_.length_ns = scaled(options_.c0_ns + options_.c1 * count * static_cast<double>(longest));
    busy_ns_ += work_.length_ns;
    {
      const std::lock_guard lock(mutex_);
      ++result_.batches;
      ++result_.batch_sizes[batch.requests.size()];
    }
    GPUSHARE_ASSIGN_OR_RETURN(const std::shared_ptr<executor::Stream> stream, iteration->stream());
    return stream->launch_host(Work::run, &work_);
  }

  sched::slo::Request request_of(size_t i) const {
    sched::slo::Request request;
    request.id = i;
    request.application = requests_[i].application;
    if (options_.features) request.features = requests_[i].features;
    return request;
  }

  // Every kProducers-th request, each at its time.
  void submit_from(size_t first) {
    for (size_t i = first; i < requests_.size(); i += kProducers) {
      const uint64_t now = base::host_now_ns();
      if (arrivals_[i] > now) std::this_thread::sleep_for(std::chrono::nanoseconds(arrivals_[i] - now));
      sched::slo::Request request = request_of(i);
      request.arrival_ns = arrivals_[i];
      const double slo_ns =
          requests_[i].slo_ns != 0 ? static_cast<double>(requests_[i].slo_ns) : options_.slo_x_p99 * p99_ns_;
      request.deadline_ns = arrivals_[i] + scaled(slo_ns);
      request.execution_ns = scaled(static_cast<double>(requests_[i].execution_ns));
      const base::Status status =
          server_->submit(request, [this](const RequestOutcome& outcome) { take(outcome); });
      if (status.ok()) continue;
      ++answered_[i];
      const std::lock_guard lock(mutex_);
      ++result_.dropped[static_cast<size_t>(status.code() == GPUSHARE_QUEUE_FULL ? DropReason::kQueueFull
                                                                                 : DropReason::kHopeless)];
    }
  }

  void take(const RequestOutcome& outcome) {
    ++answered_[outcome.id];
    const std::lock_guard lock(mutex_);
    if (outcome.dropped) {
      ++result_.dropped[static_cast<size_t>(*outcome.dropped)];
      return;
    }
    ++(outcome.finished_ns <= outcome.deadline_ns ? result_.finished_in_time : result_.finished_late);
    latencies_.push_back(outcome.finished_ns - arrivals_[outcome.id]);
  }

  // The result's figures, once everything has stopped.
  void conclude(const executor::RequestServerStats& stats) {
    const auto in_time = static_cast<double>(result_.finished_in_time);
    result_.most_pending = stats.most_held;
    result_.decisions = stats.decisions;
    result_.signals = stats.signals;
    result_.signals.price_per_s *=
        time_scale_;  // in the time of the requests' own durations, as all the rest
    if (stats.decisions > 0)
      result_.decision_us =
          static_cast<double>(stats.decision_ns) / 1e3 / static_cast<double>(stats.decisions);
    if (result_.requests > 0) result_.finish_rate = in_time / static_cast<double>(result_.requests);
    if (work_.end_ns > start_ns_) {
      const auto span_ns = static_cast<double>(work_.end_ns - start_ns_);
      result_.goodput_per_s = in_time * time_scale_ / (span_ns / 1e9);
      result_.busy_share = static_cast<double>(busy_ns_) / span_ns;
    }
    uint64_t ran = 0;
    for (size_t k = 0; k < result_.batch_sizes.size(); ++k) ran += k * result_.batch_sizes[k];
    if (result_.batches > 0)
      result_.mean_batch = static_cast<double>(ran) / static_cast<double>(result_.batches);
    if (!latencies_.empty()) {
      std::sort(latencies_.begin(), latencies_.end());
      result_.p50_ms = static_cast<double>(latencies_[latencies_.size() / 2]) / 1e6 / time_scale_;
      result_.p99_ms = static_cast<double>(latencies_[latencies_.size() * 99 / 100]) / 1e6 / time_scale_;
    }
  }

  const std::vector<sim::TimedRequest>& requests_;
  const sim::ServingOptions& options_;
  const double time_scale_;
  const double p99_ns_;
  uint64_t start_ns_ = 0;
  std::vector<uint64_t> arrivals_;  // on the host's clock
  std::vector<std::atomic<uint32_t>> answered_;
  std::atomic<uint64_t> busy_ns_{0};
  Work work_;
  std::mutex mutex_;  // of the next two, until everything has stopped
  sim::ServingResult result_;
  std::vector<uint64_t> latencies_;
  // Last: they call into the rest until they are gone.
  std::unique_ptr<executor::RequestServer> server_;
  std::shared_ptr<executor::Runtime> runtime_;
};

}  // namespace

base::Result<sim::ServingResult> serve_on_host(const std::vector<sim::TimedRequest>& requests,
                                               std::string_view policy, const sim::ServingOptions& options,
                                               double time_scale, bool arithmetic) {
  return HostServing(requests, options, time_scale, arithmetic).serve(policy);
}

}  // namespace gpushare::cli
