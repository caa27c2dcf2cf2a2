// SPDX-License-Identifier: Apache-2.0
#include "sched/slo/batcher_base.hpp"

#include <algorithm>
#include <cmath>

#include "base/saturate.hpp"

namespace gpushare::sched::slo {

const char* drop_reason_name(DropReason reason) {
  switch (reason) {
    case DropReason::kExpired:
      return "expired";
    case DropReason::kHopeless:
      return "hopeless";
    case DropReason::kRejected:
      return "rejected";
    case DropReason::kQueueFull:
      return "queue_full";
    case DropReason::kCancelled:
      return "cancelled";
  }
  return "unknown";
}

base::Result<uint32_t> BatcherBase::add_model(const ModelSpec& spec) {
  base::Result<uint32_t> model = knowledge_.add_model(spec);
  if (model.ok()) model_added(*model);
  return model;
}

base::Status BatcherBase::admit(const Held& held, uint64_t now_ns) {
  if (held.request.deadline_ns > now_ns) return base::ok_status();
  return base::Status(GPUSHARE_TIMED_OUT,
                      base::format("request %llu: its deadline passed %.3f ms ago",
                                   static_cast<unsigned long long>(held.request.id),
                                   static_cast<double>(now_ns - held.request.deadline_ns) / 1e6));
}

base::Status BatcherBase::arrive(const Request& request, uint64_t now_ns) {
  const auto id = static_cast<unsigned long long>(request.id);
  GPUSHARE_RETURN_IF_ERROR(check_kind(request));
  if (!(request.cost > 0) || !std::isfinite(request.cost))
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("request %llu has cost %g, not a finite number > 0", id, request.cost));
  for (const CostStep& step : request.later_steps)
    if (!(step.after_ns >= 0) || !(step.cost > 0) || !std::isfinite(step.after_ns) ||
        !std::isfinite(step.cost))
      return base::Status(
          GPUSHARE_INVALID_ARGUMENT,
          base::format("request %llu has a cost step of %g after %g ns: both must be finite and not negative",
                       id, step.cost, step.after_ns));
  if (held_.size() >= options_.max_pending) {
    count_decided(1, 1);
    return base::Status(GPUSHARE_QUEUE_FULL,
                        base::format("request %llu: %zu requests wait already, the limit", id, held_.size()));
  }
  if (held_.contains(request.id))
    return base::Status(GPUSHARE_ALREADY_EXISTS, base::format("request %llu is held already", id));
  Held held;
  held.request = request;
  held.application = knowledge_.classify(request.model, request.application, request.features);
  knowledge_.arrived(request.model, held.application);
  if (base::Status admitted = admit(held, now_ns); !admitted.ok()) {
    count_decided(1, 1);
    return admitted;
  }
  Held& kept = held_.emplace(request.id, std::move(held)).first->second;
  enter(kept, now_ns);
  return base::ok_status();
}

base::Status BatcherBase::check_kind(const Request& request) {
  const auto id = static_cast<unsigned long long>(request.id);
  if (request.model >= knowledge_.models())
    return base::Status(GPUSHARE_INVALID_ARGUMENT, base::format("request %llu names model %u of %zu", id,
                                                                request.model, knowledge_.models()));
  if (request.features.empty()) return base::ok_status();
  if (request.features.size() > FeatureModel::kMaxFeatures)
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("request %llu has %zu features, allowed are up to %zu", id,
                                     request.features.size(), FeatureModel::kMaxFeatures));
  for (size_t i = 0; i < request.features.size(); ++i)
    if (!std::isfinite(request.features[i]))
      return base::Status(
          GPUSHARE_INVALID_ARGUMENT,
          base::format("request %llu: feature %zu is %g, not a finite number", id, i, request.features[i]));
  const size_t known = knowledge_.features(request.model, request.application);
  if (known != 0 && known != request.features.size())
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("request %llu has %zu features, but application %u of model %u has %zu",
                                     id, request.features.size(), request.application, request.model, known));
  return base::ok_status();
}

bool BatcherBase::cancel(RequestId id, uint64_t /*now_ns*/) {
  if (!held_.contains(id)) return false;
  drop(id, DropReason::kCancelled);
  return true;
}

void BatcherBase::started(BatchId id, uint64_t now_ns) {
  const auto at = flights_.find(id);
  if (at != flights_.end()) batch_started(at->second, now_ns);
}

void BatcherBase::finished(BatchId id, uint64_t device_ns, uint64_t now_ns) {
  const auto at = flights_.find(id);
  if (at == flights_.end()) return;
  const Flight flight = std::move(at->second);
  flights_.erase(at);
  in_flight_.erase(id);
  if (!predicts_) {
    double missed = 0;
    for (const auto& [deadline, cost] : flight.deadlines) missed += now_ns > deadline ? 1 : 0;
    count_decided(flight.deadlines.size(), missed);
  }
  batch_finished(flight, device_ns, now_ns);
}

void BatcherBase::finished_run(BatchId id, std::span<const uint64_t> execution_ns, uint64_t device_ns,
                               uint64_t now_ns) {
  const auto at = flights_.find(id);
  if (at == flights_.end()) return;
  knowledge_.observe_run(at->second.model, at->second.members, execution_ns, device_ns);
  finished(id, device_ns, now_ns);
}

void BatcherBase::rejected(BatchId id, uint64_t /*now_ns*/) {
  const auto at = in_flight_.find(id);
  if (at == in_flight_.end()) return;
  for (RequestId request : at->second) drops_.push_back({request, DropReason::kRejected});
  count_decided(at->second.size(), static_cast<double>(at->second.size()));
  in_flight_.erase(at);
  flights_.erase(id);
}

void BatcherBase::observe(uint32_t model, uint32_t application, uint64_t execution_ns) {
  if (model < knowledge_.models()) knowledge_.observe(model, application, execution_ns);
}

base::Status BatcherBase::observe_request(const Request& request, uint64_t execution_ns) {
  GPUSHARE_RETURN_IF_ERROR(check_kind(request));
  const uint32_t index = knowledge_.classify(request.model, request.application, request.features);
  knowledge_.observe_member(request.model, {index, request.application, request.features}, execution_ns);
  return base::ok_status();
}

void BatcherBase::observe_batch(uint32_t model, uint32_t k, uint64_t longest_ns, uint64_t device_ns) {
  if (model < knowledge_.models()) knowledge_.observe_batch(model, k, longest_ns, device_ns);
}

void BatcherBase::observe_run(uint32_t model, std::span<const uint32_t> applications,
                              std::span<const uint64_t> execution_ns, uint64_t device_ns) {
  if (model >= knowledge_.models()) return;
  std::vector<Knowledge::Member> members;
  members.reserve(applications.size());
  for (uint32_t each : applications) members.push_back({knowledge_.application(model, each), each, {}});
  knowledge_.observe_run(model, members, execution_ns, device_ns);
}

base::Result<Profile> BatcherBase::profile(uint32_t model, uint32_t application) {
  if (model >= knowledge_.models())
    return base::Status(GPUSHARE_NOT_FOUND,
                        base::format("no model %u, there are %zu", model, knowledge_.models()));
  Knowledge::Model& of = knowledge_.model(model);
  const auto at = of.index_of.find(application);
  if (at == of.index_of.end())
    return base::Status(GPUSHARE_NOT_FOUND,
                        base::format("model %u has seen no request of application %u", model, application));
  const Histogram& histogram = of.applications[at->second].histogram;
  const Distribution durations = histogram.distribution(options_.bins);
  Profile profile;
  profile.c0_ns = of.time.c0_ns();
  profile.c1 = of.time.c1();
  profile.samples = histogram.count();
  profile.drifts = histogram.drifts();
  profile.mean_ns = durations.mean_ns();
  profile.p50_ns = durations.quantile_ns(0.5);
  profile.p99_ns = durations.quantile_ns(0.99);
  return profile;
}

void BatcherBase::take_drops(std::vector<Drop>& out) {
  out.insert(out.end(), drops_.begin(), drops_.end());
  drops_.clear();
}

BatcherBase::Held* BatcherBase::find(RequestId id) {
  const auto at = held_.find(id);
  return at == held_.end() ? nullptr : &at->second;
}

void BatcherBase::drop(RequestId id, DropReason reason) {
  const auto at = held_.find(id);
  leave(at->second);
  held_.erase(at);
  drops_.push_back({id, reason});
  if (reason != DropReason::kCancelled) count_decided(1, 1);
}

void BatcherBase::predict_misses(size_t requests, double chance) {
  predicts_ = true;
  count_decided(requests, static_cast<double>(requests) * chance);
}

void BatcherBase::count_decided(size_t requests, double misses) {
  constexpr double kKept = 1024;
  const double keep = std::max(0.0, 1 - static_cast<double>(requests) / kKept);
  decided_ = decided_ * keep + static_cast<double>(requests);
  expected_misses_ = expected_misses_ * keep + misses;
}

Signals BatcherBase::signals() const {
  return {decided_ > 0 ? expected_misses_ / decided_ : 0, price_per_ns() * 1e9};
}

Batch BatcherBase::make_batch(uint32_t model, std::vector<RequestId> ids, double expected_ns) {
  Batch batch;
  batch.id = next_batch_++;
  batch.model = model;
  batch.expected_ns = base::to_uint64(expected_ns);
  Flight flight;
  flight.model = model;
  flight.size = static_cast<uint32_t>(ids.size());
  flight.slo_ns = kNever;
  flight.expected_ns = batch.expected_ns;
  for (RequestId id : ids) {
    const auto at = held_.find(id);
    const Request& request = at->second.request;
    flight.slo_ns =
        std::min(flight.slo_ns, request.deadline_ns - std::min(request.deadline_ns, request.arrival_ns));
    flight.deadlines.emplace_back(request.deadline_ns, request.cost);
    leave(at->second);
    flight.members.push_back(
        {at->second.application, request.application, std::move(at->second.request.features)});
    held_.erase(at);
  }
  batch.requests = std::move(ids);
  flights_.emplace(batch.id, std::move(flight));
  in_flight_.emplace(batch.id, batch.requests);
  return batch;
}

double BatcherBase::mean_duration_ns(uint32_t model, uint32_t k) {
  knowledge_.refresh(model);
  const Knowledge::Model& of = knowledge_.model(model);
  return of.time.duration_ns(k, of.mean_ns);
}

}  // namespace gpushare::sched::slo
