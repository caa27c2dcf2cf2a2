// SPDX-License-Identifier: Apache-2.0
#include "sim/serving/serving.hpp"

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <random>

#include "base/clock.hpp"
#include "base/saturate.hpp"

namespace gpushare::sim {
namespace {

using sched::slo::Batch;
using sched::slo::Batcher;
using sched::slo::Decision;
using sched::slo::Drop;
using sched::slo::DropReason;
using sched::slo::kNever;
using sched::slo::Request;

constexpr double kMostTotalNs = 4e18;  // sums of times stay inside 64 bits

base::Status check_total(const std::vector<TimedRequest>& requests, const ServingOptions& options) {
  uint64_t last_ns = 0, longest_ns = 0;
  for (const TimedRequest& request : requests) {
    last_ns = std::max(last_ns, request.arrival_ns);
    longest_ns = std::max(longest_ns, request.execution_ns);
  }
  const double total_ns =
      static_cast<double>(last_ns) +
      static_cast<double>(requests.size()) * (options.c0_ns + options.c1 * static_cast<double>(longest_ns));
  if (total_ns <= kMostTotalNs) return {};
  return {GPUSHARE_INVALID_ARGUMENT,
          base::format("arrivals and work come to %g s; at most %g s can be simulated", total_ns * 1e-9,
                       kMostTotalNs * 1e-9)};
}

class Run {
 public:
  Run(const std::vector<TimedRequest>& requests, const ServingOptions& options, Batcher& batcher)
      : requests_(requests), options_(options), batcher_(batcher), answered_(requests.size()) {
    p99_ns_ = options.p99_ns > 0 ? options.p99_ns : execution_quantile_ns(requests, 0.99);
    result_.requests = requests.size();
    result_.batch_sizes.resize(options.batch_sizes.back() + 1);
  }

  base::Result<ServingResult> run() {
    GPUSHARE_RETURN_IF_ERROR(warm_up());
    size_t next_arrival = 0;
    while (true) {
      uint64_t at = wake_ns_;
      if (next_arrival < requests_.size()) at = std::min(at, requests_[next_arrival].arrival_ns);
      if (running_)
        at = std::min(at, end_ns_);
      else if (!waiting_.empty())
        at = std::min(at, std::max(now_ns_, waiting_.front().not_before_ns));
      if (at == kNever) {
        if (batcher_.pending() == 0 && !running_) break;
        return base::Status(GPUSHARE_INTERNAL, base::format("%.*s leaves %zu requests waiting for ever",
                                                            static_cast<int>(batcher_.name().size()),
                                                            batcher_.name().data(), batcher_.pending()));
      }
      now_ns_ = std::max(now_ns_, at);
      if (running_ && end_ns_ <= now_ns_) finish();
      while (next_arrival < requests_.size() && requests_[next_arrival].arrival_ns <= now_ns_)
        arrive(next_arrival++);
      start_waiting();
      ask();
    }
    for (size_t i = 0; i < answered_.size(); ++i)
      if (answered_[i] != 1)
        return base::Status(GPUSHARE_INTERNAL,
                            base::format("request %zu was answered %u times", i, answered_[i]));
    summarise();
    return result_;
  }

 private:
  base::Status warm_up() {
    // The offline profile: samples spread over the whole list, of each application, not those about to be
    // served in order.
    std::map<uint32_t, std::vector<size_t>> by_application;
    const size_t seen =
        options_.warm_from == 0 ? requests_.size() : std::min(options_.warm_from, requests_.size());
    for (size_t i = 0; i < seen; ++i) by_application[application_of(i)].push_back(i);
    for (const auto& [application, members] : by_application) {
      const size_t take = std::min(options_.warm_samples, members.size());
      for (size_t i = 0; i < take; ++i) {
        const size_t which = members[i * members.size() / take];
        const double told = static_cast<double>(requests_[which].execution_ns) * options_.profile_scale;
        GPUSHARE_RETURN_IF_ERROR(batcher_.observe_request(request_of(which), base::to_uint64(told)));
      }
    }
    return {};
  }
  uint32_t application_of(size_t i) const { return options_.labels ? requests_[i].application : 0; }
  uint32_t model_of(uint32_t application) const { return options_.model_per_application ? application : 0; }
  uint64_t duration_ns(const Batch& batch, uint64_t* longest) {
    *longest = 0;
    for (uint64_t id : batch.requests) *longest = std::max(*longest, requests_[id].execution_ns);
    double took = options_.c0_ns +
                  options_.c1 * static_cast<double>(batch.requests.size()) * static_cast<double>(*longest);
    if (options_.noise > 0)
      took *= std::exp(options_.noise * std::normal_distribution<double>()(noise_) -
                       options_.noise * options_.noise / 2);
    if (options_.stall_share > 0 && std::uniform_real_distribution<double>()(noise_) < options_.stall_share)
      took += options_.stall_ns;
    return std::max<uint64_t>(base::to_uint64(took), options_.noise > 0 ? 1 : 0);
  }
  uint64_t deadline_ns(size_t i) const {
    const TimedRequest& request = requests_[i];
    return request.arrival_ns + (request.slo_ns != 0
                                     ? request.slo_ns
                                     : base::to_uint64(std::min(options_.slo_x_p99 * p99_ns_, kMostTotalNs)));
  }
  Request request_of(size_t i) const {
    Request request;
    request.id = i;
    request.application = application_of(i);
    request.model = model_of(request.application);
    if (options_.features) request.features = requests_[i].features;
    return request;
  }
  void arrive(size_t i) {
    Request request = request_of(i);
    request.arrival_ns = requests_[i].arrival_ns;
    request.deadline_ns = deadline_ns(i);
    request.execution_ns = requests_[i].execution_ns;
    const base::Status status = batcher_.arrive(request, now_ns_);
    if (!status.ok()) {
      ++answered_[i];
      ++result_.dropped[static_cast<size_t>(status.code() == GPUSHARE_QUEUE_FULL ? DropReason::kQueueFull
                                                                                 : DropReason::kHopeless)];
    }
    result_.most_pending = std::max<uint64_t>(result_.most_pending, batcher_.pending());
  }
  void start_waiting() {
    while (!running_ && !waiting_.empty() && waiting_.front().not_before_ns <= now_ns_) {
      Batch batch = std::move(waiting_.front());
      waiting_.pop_front();
      if (now_ns_ > batch.latest_start_ns) {
        batcher_.rejected(batch.id, now_ns_);
        continue;
      }
      batcher_.started(batch.id, now_ns_);
      started_ns_ = now_ns_;
      end_ns_ = now_ns_ + duration_ns(batch, &longest_ns_);
      current_ = std::move(batch);
      running_ = true;
    }
  }
  void finish() {
    running_ = false;
    const uint64_t took = end_ns_ - started_ns_;
    busy_ns_ += took;
    last_end_ns_ = end_ns_;
    ++result_.batches;
    ++result_.batch_sizes[current_.requests.size()];
    execution_ns_.clear();
    for (uint64_t id : current_.requests) {
      ++answered_[id];
      (end_ns_ <= deadline_ns(id) ? result_.finished_in_time : result_.finished_late) += 1;
      latencies_.push_back(end_ns_ - requests_[id].arrival_ns);
      if (!options_.infer) execution_ns_.push_back(requests_[id].execution_ns);
    }
    if (options_.infer || options_.profile) {
      batcher_.finished_run(current_.id, execution_ns_, took, now_ns_);
    } else {
      batcher_.observe_batch(current_.model, static_cast<uint32_t>(current_.requests.size()), longest_ns_,
                             took);
      batcher_.finished(current_.id, took, now_ns_);
    }
    result_.signals = batcher_.signals();
  }
  void ask() {
    wake_ns_ = kNever;
    while (true) {
      const uint32_t in_flight = static_cast<uint32_t>(waiting_.size()) + (running_ ? 1 : 0);
      const uint64_t before = options_.time_decisions ? base::host_now_ns() : 0;
      Decision decision = batcher_.next(now_ns_, in_flight);
      if (options_.time_decisions && (decision.batch || in_flight == 0)) {
        decision_ns_ += base::host_now_ns() - before;
        ++result_.decisions;
      }
      drops_.clear();
      batcher_.take_drops(drops_);
      for (const Drop& drop : drops_) {
        ++answered_[drop.id];
        ++result_.dropped[static_cast<size_t>(drop.reason)];
      }
      if (!decision.batch) {
        wake_ns_ = decision.wake_ns;
        return;
      }
      decision.batch->not_before_ns =
          std::max(decision.batch->not_before_ns, now_ns_ + options_.decision_cost_ns);
      waiting_.push_back(std::move(*decision.batch));
      start_waiting();
    }
  }
  void summarise() {
    ServingResult& r = result_;
    if (r.requests > 0)
      r.finish_rate = static_cast<double>(r.finished_in_time) / static_cast<double>(r.requests);
    const uint64_t first = requests_.empty() ? 0 : requests_.front().arrival_ns;
    if (last_end_ns_ > first) {
      r.goodput_per_s =
          static_cast<double>(r.finished_in_time) / (static_cast<double>(last_end_ns_ - first) / 1e9);
      r.busy_share = static_cast<double>(busy_ns_) / static_cast<double>(last_end_ns_ - first);
    }
    uint64_t ran = 0;
    for (size_t k = 0; k < r.batch_sizes.size(); ++k) ran += k * r.batch_sizes[k];
    if (r.batches > 0) r.mean_batch = static_cast<double>(ran) / static_cast<double>(r.batches);
    if (!latencies_.empty()) {
      std::sort(latencies_.begin(), latencies_.end());
      r.p50_ms = static_cast<double>(latencies_[latencies_.size() / 2]) / 1e6;
      r.p99_ms = static_cast<double>(latencies_[latencies_.size() * 99 / 100]) / 1e6;
    }
    if (r.decisions > 0)
      r.decision_us = static_cast<double>(decision_ns_) / 1e3 / static_cast<double>(r.decisions);
  }

  const std::vector<TimedRequest>& requests_;
  const ServingOptions& options_;
  Batcher& batcher_;
  std::mt19937_64 noise_{options_.noise_seed};
  std::vector<uint32_t> answered_;
  std::vector<uint64_t> latencies_;
  std::vector<Drop> drops_;
  std::vector<uint64_t> execution_ns_;  // of the members of the batch that finished
  std::deque<Batch> waiting_;
  Batch current_;
  bool running_ = false;
  double p99_ns_ = 0;
  uint64_t now_ns_ = 0, wake_ns_ = kNever, started_ns_ = 0, end_ns_ = 0, longest_ns_ = 0;
  uint64_t busy_ns_ = 0, last_end_ns_ = 0, decision_ns_ = 0;
  ServingResult result_;
};

}  // namespace

base::Result<ServingResult> serve(const std::vector<TimedRequest>& requests, std::string_view policy,
                                  const ServingOptions& options) {
  GPUSHARE_ASSIGN_OR_RETURN(std::unique_ptr<Batcher> batcher,
                            sched::slo::make_batcher(policy, options.batcher));
  sched::slo::ModelSpec model;
  if (options.told_batch_time) {
    model.c0_ns = options.c0_ns;
    model.c1 = options.c1;
  }
  model.batch_sizes = options.batch_sizes;
  uint32_t models = 1;
  if (options.model_per_application && options.labels)
    for (const TimedRequest& request : requests) models = std::max(models, request.application + 1);
  for (uint32_t i = 0; i < models; ++i) {
    const base::Result<uint32_t> added = batcher->add_model(model);
    if (!added.ok()) return added.status();
  }
  GPUSHARE_RETURN_IF_ERROR(check_total(requests, options));
  return Run(requests, options, *batcher).run();
}

}  // namespace gpushare::sim
