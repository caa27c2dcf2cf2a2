// SPDX-License-Identifier: Apache-2.0
#include "sched/slo/batcher_base.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

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

void Worth::add(double its_cost, uint64_t due_ns, uint64_t takes_ns, uint64_t begins_ns) {
  const uint64_t last_ns = due_ns - std::min(due_ns, takes_ns);
  if (last_ns < begins_ns) return;
  cost += its_cost;
  until_ns = std::min(until_ns, last_ns);
}

void Waiting::add(double cost, uint64_t due_ns, uint64_t takes_ns) noexcept {
  const Worth own{cost, due_ns - std::min(due_ns, takes_ns)};
  const auto later = [](uint64_t until_ns, const Worth& each) { return until_ns < each.until_ns; };
  first_.insert(std::upper_bound(first_.begin(), first_.end(), own.until_ns, later), own);
  if (first_.size() > kMost) first_.pop_back();
}

void Waiting::remove(double cost, uint64_t due_ns, uint64_t takes_ns) noexcept {
  const uint64_t until_ns = due_ns - std::min(due_ns, takes_ns);
  const auto is = [&](const Worth& each) { return each.until_ns == until_ns && each.cost == cost; };
  const auto found = std::find_if(first_.begin(), first_.end(), is);
  if (found != first_.end()) first_.erase(found);
}

Worth Waiting::worth(size_t places, uint64_t now_ns) const noexcept {
  Worth worth;
  for (const Worth& each : first_) {
    if (places == 0) break;
    if (each.until_ns < now_ns) continue;
    worth.until_ns = std::min(worth.until_ns, each.until_ns);
    worth.cost += each.cost;
    --places;
  }
  return worth;
}

base::Result<uint32_t> BatcherBase::add_model(const ModelSpec& spec) {
  base::Result<uint32_t> model = knowledge_.add_model(spec);
  if (model.ok()) {
    largest_batch_ = std::max(largest_batch_, max_batch(*model));
    model_added(*model);
  }
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
    return base::Status(
        GPUSHARE_QUEUE_FULL,
        base::format("request %llu: %zu requests wait already, as many as max_pending allows; "
                     "offer it again when some have ended",
                     id, held_.size()));
  }
  if (held_.contains(request.id))
    return base::Status(GPUSHARE_ALREADY_EXISTS, base::format("request %llu is held already", id));
  Held held;
  held.request = request;
  const uint32_t objective = Knowledge::objective_of(request.arrival_ns, request.deadline_ns);
  held.application = knowledge_.classify(request.model, request.application, request.features, objective);
  knowledge_.arrived(request.model, held.application);
  held.idle_since = flights_.empty() ? next_batch_ : 0;
  if (to_be_tried(held, objective, now_ns)) {
    if (trial_) displace_trial(now_ns);  // the newest has the most time
    hold(request, std::move(held));
    trial_ = request.id;
    return base::ok_status();
  }
  if (base::Status admitted = admit(held, now_ns); !admitted.ok()) {
    if (may_be_probe(held, now_ns)) {
      hold(request, std::move(held));
      probe_ = request.id;
      return base::ok_status();
    }
    count_decided(1, 1);
    lost(held);
    return admitted;
  }
  Held& kept = hold(request, std::move(held));
  kept.ordered = true;
  enter(kept, now_ns);
  return base::ok_status();
}

// The policy gets the trial, as if it arrived now.
void BatcherBase::displace_trial(uint64_t now_ns) {
  const RequestId id = std::exchange(trial_, std::nullopt).value();
  Held& held = *find(id);
  if (admit(held, now_ns).ok()) {
    held.ordered = true;
    enter(held, now_ns);
  } else if (may_be_probe(held, now_ns)) {
    probe_ = id;
  } else {
    forget(id, held.request.deadline_ns > now_ns ? DropReason::kHopeless : DropReason::kExpired);
  }
}

BatcherBase::Held& BatcherBase::hold(const Request& request, Held held) {
  by_deadline_.emplace(KeyedOrder::Key(request.deadline_ns, request.id), request.cost);
  if (!holds_back_) waiting_.add(request.cost, request.deadline_ns, last_expected_ns_);
  return held_.emplace(request.id, std::move(held)).first->second;
}

void BatcherBase::foresee_next(uint64_t now_ns) {
  waiting_.clear();
  const uint64_t begins_ns = std::max(now_ns, last_batch_ends_ns_);
  holds_back_ = holds_back(begins_ns);
  if (holds_back_) return;
  auto at = by_deadline_.lower_bound({base::add_saturated(begins_ns, last_expected_ns_), 0});
  size_t left = std::min<size_t>(Waiting::kMost,
                                 size_t{2} * largest_batch_);  // the first may be too late when it is asked
  for (; at != by_deadline_.end() && left > 0; ++at, --left)
    waiting_.add(at->second, at->first.first, last_expected_ns_);
}

double BatcherBase::least_alone_ns(const Held& held) {
  const Knowledge::Model& known = knowledge_.model(held.request.model);
  return known.time.duration_ns(1, static_cast<double>(known.brief(held.application).least_ns));
}

// A request that became hopeless while it waited for others says nothing about the estimate.
bool BatcherBase::may_probe(const Held& held, uint64_t now_ns) {
  if (held.idle_since == next_batch_ && now_ns >= idle_probes_.next_ns) return true;
  if (now_ns < busy_probes_.next_ns) return false;
  const uint64_t arrived = std::min(held.request.arrival_ns, held.request.deadline_ns);
  return static_cast<double>(held.request.deadline_ns - arrived) < least_alone_ns(held);
}

// True if the request, which the policy refuses, is to be the probe.
bool BatcherBase::may_be_probe(const Held& held, uint64_t now_ns) {
  return !probe_ && held.request.deadline_ns > now_ns && may_probe(held, now_ns);
}

// Counts the request. True if it is to run alone, because requests with its objective hardly ever do.
bool BatcherBase::to_be_tried(const Held& held, uint32_t objective, uint64_t now_ns) {
  const Request& request = held.request;
  if (!request.features.empty() || !knowledge_.passed_over(request.model, request.application, objective))
    return false;
  return now_ns >= next_trial_ns_ && request.deadline_ns > now_ns && request.later_steps.empty();
}

// Called when the policy drops a request as hopeless: true if it stays, as the probe.
bool BatcherBase::keep_as_probe(RequestId id, const Held& held) {
  if (!deciding_idle_ || held.request.deadline_ns <= deciding_ns_ || !may_probe(held, deciding_ns_))
    return false;
  const auto tried = [this](const Held& of) {
    return knowledge_.model(of.request.model).applications[of.application].tried;
  };
  if (probe_) {
    if (tried(held) >= tried(*find(*probe_))) return false;
    forget(std::exchange(probe_, std::nullopt).value(), DropReason::kHopeless);
  }
  probe_ = id;
  return true;
}

Decision BatcherBase::run_probe(std::optional<RequestId>& of, Decision decision, Flight::Probe kind) {
  const RequestId id = std::exchange(of, std::nullopt).value();
  Held& held = *find(id);
  const uint32_t model = held.request.model;
  knowledge_.model(model).applications[held.application].tried = ++tries_;
  if (predicts_) predict_misses(1, 1);
  decision.batch = make_batch(model, {id}, least_alone_ns(held));
  flights_.at(decision.batch->id).probe = kind;
  return decision;
}

void BatcherBase::probe_ended(const Flight& flight, uint64_t device_ns, uint64_t now_ns) {
  // Share of the device that late probes get: half of a device that wins nothing, less and less down to a twentieth of one
  // that does but is idle now and then, and of a busy one a fiftieth and less and less.
  constexpr uint64_t kWinning = 19, kBusy = 49, kMost = 2000;
  if (flight.probe == Flight::Probe::kTrial) knowledge_.tried(flight.model, flight.members.front());
  if (device_ns == 0 && !(flight.won > 0)) return;  // of unknown time: it says nothing of the estimate
  if (flight.probe == Flight::Probe::kTrial) {
    next_trial_ns_ = base::add_saturated(now_ns, flight.won > 0 ? 0 : device_ns * kWinning);
    return;
  }
  if (flight.won > 0 || flight.cold) {
    idle_probes_ = busy_probes_ = {now_ns, 0};
  } else {
    uint32_t& late = (flight.probe == Flight::Probe::kIdle ? idle_probes_ : busy_probes_).late;
    late = std::min(late + 1, 16u);
    const auto doubled = [](uint64_t times, const Probes& of) {
      return times << (std::max(of.late, 1u) - 1);
    };
    const uint64_t winning = won_since_probe_ ? std::min(doubled(1, idle_probes_), kWinning) : 1;
    idle_probes_.next_ns = base::add_saturated(now_ns, device_ns * winning);
    busy_probes_.next_ns =
        base::add_saturated(now_ns, device_ns * std::min(doubled(kBusy, busy_probes_), kMost));
  }
  won_since_probe_ = false;
}

// The policy's expire(), and the probe and the trial, which the policy does not have.
uint64_t BatcherBase::expire_all(uint64_t now_ns) {
  uint64_t first_ns = expire(now_ns);
  for (const std::optional<RequestId>& each : {probe_, trial_}) {
    if (!each) continue;
    const uint64_t last_ns = find(*each)->request.deadline_ns;
    if (last_ns > now_ns)
      first_ns = std::min(first_ns, last_ns);
    else
      drop(*each, DropReason::kExpired);
  }
  return first_ns;
}

Decision BatcherBase::next(uint64_t now_ns, uint32_t in_flight) {
  drops_left_ = kMostDrops;
  deciding_ns_ = now_ns;
  deciding_idle_ = in_flight == 0;
  const uint64_t deadline_ns = expire_all(now_ns);
  Decision decision = choose(now_ns, in_flight);
  deciding_idle_ = false;
  foresee_next(now_ns);
  if (!decision.batch) decision.wake_ns = std::min(decision.wake_ns, deadline_ns);
  if (!decision.batch && !may_drop()) decision.wake_ns = now_ns + 1;
  return decision;
}

// The trial, the policy's choice, or the probe.
Decision BatcherBase::choose(uint64_t now_ns, uint32_t in_flight) {
  if (trial_ && deciding_idle_) return run_probe(trial_, {}, Flight::Probe::kTrial);
  if (probe_ && deciding_idle_ && now_ns >= busy_probes_.next_ns)
    return run_probe(probe_, {}, held_.size() > 1 ? Flight::Probe::kBusy : Flight::Probe::kIdle);
  Decision decision = decide(now_ns, in_flight);
  if (probe_ && deciding_idle_ && !decision.batch && now_ns >= idle_probes_.next_ns)
    return run_probe(probe_, std::move(decision), Flight::Probe::kIdle);
  if (probe_ && deciding_idle_ && now_ns < busy_probes_.next_ns)
    forget(std::exchange(probe_, std::nullopt).value(), DropReason::kHopeless);
  return decision;
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
  const Request& request = find(id)->request;
  waiting_.remove(request.cost, request.deadline_ns, last_expected_ns_);
  drop(id, DropReason::kCancelled);
  return true;
}

bool BatcherBase::cancel_some() {
  waiting_.clear();
  size_t dropped = 0;
  for (auto at = held_.begin(); at != held_.end() && dropped < kMostDrops; ++dropped)
    drop((at++)->first, DropReason::kCancelled);  // which moves no other
  return !held_.empty();
}

void BatcherBase::started(BatchId id, uint64_t now_ns) {
  const auto at = flights_.find(id);
  if (at != flights_.end()) batch_started(at->second, now_ns);
}

void BatcherBase::finished(BatchId id, uint64_t device_ns, uint64_t now_ns) {
  const auto at = flights_.find(id);
  if (at == flights_.end()) return;
  knowledge_.count_ran(at->second.model, at->second.members);
  finish(at, device_ns, now_ns);
}

void BatcherBase::finish(Flights::iterator at, uint64_t device_ns, uint64_t now_ns) {
  const BatchId id = at->first;
  Flight flight = std::move(at->second);
  flights_.erase(at);
  in_flight_.erase(id);
  double missed = 0;
  for (const auto& [deadline, cost] : flight.deadlines) {
    missed += now_ns > deadline ? 1 : 0;
    flight.won += now_ns > deadline ? 0 : cost;
  }
  ended(std::move(flight), missed, device_ns, now_ns);
}

void BatcherBase::failed(BatchId id, uint64_t device_ns, uint64_t now_ns) {
  const auto at = flights_.find(id);
  if (at == flights_.end()) return;
  Flight flight = std::move(at->second);
  flights_.erase(at);
  in_flight_.erase(id);
  const auto missed = static_cast<double>(flight.deadlines.size());
  if (flight.probe != Flight::Probe::kNone) probe_ended(flight, device_ns, now_ns);
  flight.cold = true;  // what it took is no sample
  count_decided(flight.deadlines.size(), predicts_ ? 0 : missed);
  batch_finished(flight, device_ns, now_ns);
}

void BatcherBase::ended(Flight flight, double missed, uint64_t device_ns, uint64_t now_ns) {
  bool& warm = knowledge_.model(flight.model).warm;
  flight.cold = !std::exchange(warm, true) || device_ns == 0;
  if (!flight.cold) compare_with_expected(flight, device_ns);
  if (!predicts_) count_decided(flight.deadlines.size(), missed);
  won_since_probe_ = won_since_probe_ || flight.won > 0;
  if (flight.probe != Flight::Probe::kNone) probe_ended(flight, device_ns, now_ns);
  batch_finished(flight, device_ns, now_ns);
}

// Policies whose own estimates are of a few batches, or weigh the longest, would plan with a stall for long after it. Four
// such batches in a row are no accident: what was measured before them says nothing any more, until as many are as short again.
void BatcherBase::compare_with_expected(Flight& flight, uint64_t device_ns) {
  constexpr uint64_t kFactor = 5;
  constexpr uint32_t kInARow = 4;
  Knowledge::Model& of = knowledge_.model(flight.model);
  const bool longer = flight.expected_ns > 0 && device_ns / kFactor >= flight.expected_ns;
  const bool shorter = of.slowed && device_ns <= flight.expected_ns / kFactor;
  of.stalls = longer ? of.stalls + 1 : 0;
  of.shorts = shorter ? of.shorts + 1 : 0;
  flight.stalled = longer && of.stalls < kInARow;
  flight.changed = std::max(of.stalls, of.shorts) == kInARow;
  if (flight.changed) of.slowed = longer;
  overruns_ +=
      longer && flight.probe == Flight::Probe::kNone ? 1 : 0;  // a probe's expected time is a low quantile
}

void BatcherBase::pass_over_late(const KeyedOrder& by_deadline, uint32_t model, uint64_t now_ns) {
  passed_over_.resize(knowledge_.models());
  if (passed_over_[model] == overruns_) return;
  const auto& order = by_deadline.of(model);
  const auto late = [&] {
    const auto size = static_cast<uint32_t>(std::min<size_t>(order.size(), max_batch(model)));
    return static_cast<double>(order.begin()->first) <
           static_cast<double>(now_ns) + mean_duration_ns(model, size);
  };
  while (!order.empty() && may_drop() && late()) drop(order.begin()->second, DropReason::kHopeless);
  if (may_drop()) passed_over_[model] = overruns_;
}

void BatcherBase::finished_run(BatchId id, std::span<const uint64_t> execution_ns, uint64_t device_ns,
                               uint64_t now_ns) {
  const auto at = flights_.find(id);
  if (at == flights_.end()) return;
  if (knowledge_.model(at->second.model).warm)
    knowledge_.observe_run(at->second.model, at->second.members, execution_ns, device_ns,
                           at->second.probe == Flight::Probe::kTrial);
  finish(at, device_ns, now_ns);
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
  knowledge_.observe_told(request.model, {index, request.application, request.features}, execution_ns);
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
  for (uint32_t each : applications) members.push_back({knowledge_.application(model, each), each, {}, 0});
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
  const Knowledge::Application& known = of.applications[at->second];
  const Histogram& histogram = known.histogram;
  const Distribution durations = histogram.distribution(options_.bins);
  Profile profile;
  profile.c0_ns = of.time.c0_ns();
  profile.c1 = of.time.c1();
  profile.samples = of.infers && known.inferred > 0 ? known.inferred : histogram.count();
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
  Held& held = *find(id);
  if (std::exchange(held.ordered, false)) leave(held);
  if (reason == DropReason::kHopeless && keep_as_probe(id, held)) return;
  if (probe_ == id) probe_.reset();
  if (trial_ == id) trial_.reset();
  forget(id, reason);
}

void BatcherBase::forget(RequestId id, DropReason reason) {
  if (reason != DropReason::kCancelled) lost(*find(id));
  const auto at = held_.find(id);
  by_deadline_.erase({at->second.request.deadline_ns, id});
  held_.erase(at);
  drops_.push_back({id, reason});
  if (drops_left_ > 0) --drops_left_;
  if (reason != DropReason::kCancelled) count_decided(1, 1);
}

uint64_t BatcherBase::expire_from(const KeyedOrder& by_deadline, uint64_t now_ns) {
  uint64_t first = kNever;
  for (uint32_t model = 0; model < by_deadline.models(); ++model) {
    const auto& order = by_deadline.of(model);
    while (!order.empty() && order.begin()->first <= now_ns && may_drop())
      drop(order.begin()->second, DropReason::kExpired);
    if (!order.empty()) first = std::min(first, order.begin()->first);
  }
  return first;
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
    batch.worth.add(request.cost, request.deadline_ns, batch.expected_ns, deciding_ns_);
    if (std::exchange(at->second.ordered, false)) leave(at->second);
    flight.members.push_back({at->second.application, request.application,
                              std::move(at->second.request.features),
                              Knowledge::objective_of(request.arrival_ns, request.deadline_ns)});
    by_deadline_.erase({request.deadline_ns, id});
    held_.erase(at);
  }
  last_expected_ns_ = batch.expected_ns;
  last_batch_ends_ns_ = base::add_saturated(deciding_ns_, batch.expected_ns);
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
