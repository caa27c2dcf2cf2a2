// baselines.cpp: the policies gpushare is measured against, each as its own code or paper has it
// (docs/design/slo.md lists what was taken from where).
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <deque>

#include "base/saturate.hpp"
#include "sched/slo/batcher_base.hpp"

namespace gpushare::sched::slo {
namespace {

uint64_t ns(double ms) {
  return base::to_uint64(ms * 1e6);
}

// Requests in one order, taken from its front, dropped when expired. How many, and when, is the policy's.
class Ordered : public BatcherBase {
 public:
  Ordered(std::string name, const BatcherOptions& options, bool by_deadline)
      : BatcherBase(std::move(name), options), by_deadline_(by_deadline) {}

  Decision next(uint64_t now_ns, uint32_t in_flight) override {
    Decision decision;
    if (in_flight > 0) return decision;
    drop_expired(now_ns);
    const uint32_t model = order_.first_model();
    if (model == order_.models()) return decision;
    const uint64_t at = ready_at(model, now_ns);
    if (at > now_ns) {
      decision.wake_ns = at;
      return decision;
    }
    const uint32_t size = std::clamp(size_limit(model, now_ns), 1u, max_batch(model));
    std::vector<RequestId> ids;
    take(model, size, now_ns, ids);
    if (ids.empty()) {
      if (order_.first_model() != order_.models())
        decision.wake_ns = now_ns + 1;  // others may be left, of another model
      return decision;
    }
    const uint32_t k = static_cast<uint32_t>(ids.size());
    dispatched(model, now_ns);
    decision.batch = make_batch(model, std::move(ids), mean_duration_ns(model, k));
    return decision;
  }

 protected:
  virtual uint32_t size_limit(uint32_t model, uint64_t /*now_ns*/) { return max_batch(model); }
  virtual uint64_t ready_at(uint32_t /*model*/, uint64_t now_ns) { return now_ns; }
  virtual void dispatched(uint32_t /*model*/, uint64_t /*now_ns*/) {}
  virtual void take(uint32_t model, uint32_t size, uint64_t /*now_ns*/, std::vector<RequestId>& ids) {
    for (const auto& [key, id] : order_.of(model)) {
      if (ids.size() == size) break;
      ids.push_back(id);
    }
  }
  void model_added(uint32_t /*model*/) override {
    order_.resize(order_.models() + 1);
    deadlines_.resize(deadlines_.models() + 1);
  }
  void enter(Held& held, uint64_t /*now_ns*/) override {
    order_.add(held.request.model, key(held), held.request.id);
    if (!by_deadline_) deadlines_.add(held.request.model, held.request.deadline_ns, held.request.id);
  }
  void leave(Held& held) override {
    order_.remove(held.request.model, key(held), held.request.id);
    if (!by_deadline_) deadlines_.remove(held.request.model, held.request.deadline_ns, held.request.id);
  }
  void drop_expired(uint64_t now_ns) {
    const KeyedOrder& by = by_deadline_ ? order_ : deadlines_;
    for (uint32_t model = 0; model < by.models(); ++model)
      while (!by.of(model).empty() && by.of(model).begin()->first <= now_ns)
        drop(by.of(model).begin()->second, DropReason::kExpired);
  }
  uint64_t key(const Held& held) const {
    return by_deadline_ ? held.request.deadline_ns : held.request.arrival_ns;
  }

  const bool by_deadline_;
  KeyedOrder order_;
  KeyedOrder deadlines_;  // only when the order is another
};

// Triton-like: a full batch at once, else when the oldest has waited long enough.
class MaxDelay final : public Ordered {
 public:
  explicit MaxDelay(const BatcherOptions& options) : Ordered("maxdelay", options, false) {}

 protected:
  uint64_t ready_at(uint32_t model, uint64_t now_ns) override {
    if (order_.of(model).size() >= max_batch(model)) return now_ns;
    return order_.of(model).begin()->first + ns(options_.max_delay_ms);
  }
};

// Clipper's code: explores batch sizes one by one, then fits latency over size and takes the largest that
// meets the head's deadline.
class Clipper final : public Ordered {
 public:
  explicit Clipper(const BatcherOptions& options) : Ordered("clipper", options, true) {}

 protected:
  void model_added(uint32_t model) override {
    Ordered::model_added(model);
    fits_.emplace_back();
  }
  uint32_t size_limit(uint32_t model, uint64_t now_ns) override {
    const Fit& fit = fits_[model];
    const uint32_t most = max_batch(model);
    if (fit.seen.size() < size_t{2} * most) return 1 + static_cast<uint32_t>(fit.seen.size()) % most;
    double n = 0, x = 0, xx = 0, y = 0, xy = 0;
    for (const auto& [size, duration] : fit.seen) {
      n += 1;
      x += size;
      xx += size * size;
      y += duration;
      xy += size * duration;
    }
    const double spread = n * xx - x * x;
    const double slope = spread > 0 ? (n * xy - x * y) / spread : 0;
    const double offset = (y - slope * x) / n;
    const double budget = static_cast<double>(order_.of(model).begin()->first - now_ns);
    if (!(slope > 0)) return offset <= budget ? most : 1;
    return static_cast<uint32_t>(std::clamp((budget - offset) / slope, 1.0, static_cast<double>(most)));
  }
  void batch_finished(const Flight& flight, uint64_t device_ns, uint64_t /*now_ns*/) override {
    std::deque<std::pair<double, double>>& seen = fits_[flight.model].seen;
    seen.emplace_back(flight.size, static_cast<double>(device_ns));
    if (seen.size() > 300) seen.pop_front();
  }

 private:
  struct Fit {
    std::deque<std::pair<double, double>> seen;
  };
  std::vector<Fit> fits_;
};

// Clipper's paper: one more while the latency objective is met, a tenth less when it is not.
class ClipperAimd final : public Ordered {
 public:
  explicit ClipperAimd(const BatcherOptions& options) : Ordered("clipper-aimd", options, true) {}

 protected:
  void model_added(uint32_t model) override {
    Ordered::model_added(model);
    limit_.push_back(1);
  }
  uint32_t size_limit(uint32_t model, uint64_t /*now_ns*/) override {
    return static_cast<uint32_t>(limit_[model]);
  }
  void batch_finished(const Flight& flight, uint64_t device_ns, uint64_t /*now_ns*/) override {
    double& limit = limit_[flight.model];
    if (device_ns > flight.slo_ns)
      limit = std::max(1.0, limit * 0.9);
    else if (flight.size >= static_cast<uint32_t>(limit))
      limit = std::min(limit + 1, static_cast<double>(max_batch(flight.model)));
  }

 private:
  std::vector<double> limit_;
};

// Nexus: the batch size is planned from the mean latency, the largest with latency <= (SLO - overhead) / 2,
// at least 1; a duty cycle of that latency, longer when fewer arrive; a request that the planned latency
// makes late is dropped as the batch is formed.
class Nexus final : public Ordered {
 public:
  explicit Nexus(const BatcherOptions& options) : Ordered("nexus", options, true) {}

 protected:
  struct Plan {
    uint32_t size = 1;
    double latency_ns = 0;
    uint64_t slo_ns = 0;
    uint64_t next_cycle_ns = 0;
    uint64_t first_arrival_ns = 0;
    uint64_t arrivals = 0;
  };
  void model_added(uint32_t model) override {
    Ordered::model_added(model);
    plans_.emplace_back();
  }
  void enter(Held& held, uint64_t now_ns) override {
    Ordered::enter(held, now_ns);
    Plan& plan = plans_[held.request.model];
    plan.slo_ns = held.request.deadline_ns - held.request.arrival_ns;
    if (plan.arrivals++ == 0) plan.first_arrival_ns = now_ns;
  }
  uint64_t ready_at(uint32_t model, uint64_t now_ns) override {
    return std::max(now_ns, plans_[model].next_cycle_ns);
  }
  uint32_t size_limit(uint32_t model, uint64_t /*now_ns*/) override {
    Plan& plan = plans_[model];
    const double budget = (static_cast<double>(plan.slo_ns) - options_.nexus_overhead_ms * 1e6) / 2;
    plan.size = 1;
    while (plan.size < max_batch(model) && mean_duration_ns(model, plan.size + 1) <= budget) ++plan.size;
    plan.latency_ns = mean_duration_ns(model, plan.size);
    return plan.size;
  }
  void take(uint32_t model, uint32_t size, uint64_t now_ns, std::vector<RequestId>& ids) override {
    // As GetBatchTask: the size shrinks with what is left, and the latency with the size.
    size = std::min<uint32_t>(size, static_cast<uint32_t>(order_.of(model).size()));
    std::vector<RequestId> late;
    double finish = static_cast<double>(now_ns) + mean_duration_ns(model, size);
    size_t left = order_.of(model).size();
    for (const auto& [deadline, id] : order_.of(model)) {
      if (ids.size() >= size) break;
      --left;
      (static_cast<double>(deadline) < finish ? late : ids).push_back(id);
      if (ids.size() + left < size) {
        size = static_cast<uint32_t>(ids.size() + left);
        if (size > 0) finish = static_cast<double>(now_ns) + mean_duration_ns(model, size);
      }
    }
    for (RequestId id : late) drop(id, DropReason::kHopeless);
  }
  void dispatched(uint32_t model, uint64_t now_ns) override {
    Plan& plan = plans_[model];
    double cycle = plan.latency_ns;
    if (plan.arrivals > 1 && now_ns > plan.first_arrival_ns) {
      const double gap =
          static_cast<double>(now_ns - plan.first_arrival_ns) / static_cast<double>(plan.arrivals - 1);
      const double longest = static_cast<double>(plan.slo_ns) - plan.latency_ns;
      cycle = std::max(cycle, std::min(gap * plan.size, longest));
    }
    plan.next_cycle_ns = base::add_saturated(now_ns, base::to_uint64(cycle));
  }

 private:
  std::vector<Plan> plans_;
};

// Clockwork: plans on a single number, the 0.99 percentile of the last ten durations of each batch size;
// sends the next action ahead of the expected end of the one that runs, with a latest start; an action that
// comes later is rejected and its requests fail.
class Clockwork final : public BatcherBase {
 public:
  explicit Clockwork(const BatcherOptions& options) : BatcherBase("clockwork", options) {}

  Decision next(uint64_t now_ns, uint32_t in_flight) override {
    Decision decision;
    const uint64_t ahead = ns(options_.clockwork_window_ms);
    if (in_flight == 0) free_at_ns_ = std::min(free_at_ns_, now_ns);
    if (in_flight > 1) return decision;
    // One runs: send the next only when it is about to end, and not while it is later than an action may be.
    if (in_flight == 1) {
      if (now_ns > free_at_ns_ + ahead) return decision;
      if (now_ns + ahead < free_at_ns_) {
        decision.wake_ns = free_at_ns_ - ahead;
        return decision;
      }
    }
    const uint64_t start = std::max(now_ns, free_at_ns_);
    // Strategies: of each model the largest prepared size that all its oldest requests still allow; among
    // models the one whose head must start first.
    uint32_t chosen = static_cast<uint32_t>(order_.models());
    uint32_t chosen_size = 0;
    double chosen_latest = 0, chosen_estimate = 0;
    for (uint32_t model = 0; model < order_.models(); ++model) {
      const auto& queue = order_.of(model);
      while (!queue.empty() &&
             static_cast<double>(start) + estimate(model, 1) > internal_deadline(*queue.begin()))
        drop(queue.begin()->second, DropReason::kHopeless);
      if (queue.empty()) continue;
      const double head = internal_deadline(*queue.begin());
      for (uint32_t size : knowledge_.model(model).spec.batch_sizes) {
        if (size > queue.size()) break;
        const double takes = estimate(model, size);
        if (static_cast<double>(start) + takes > head) continue;
        if (chosen == order_.models() || chosen == model || head - takes < chosen_latest) {
          chosen = model;
          chosen_size = size;
          chosen_latest = head - takes;
          chosen_estimate = takes;
        }
      }
    }
    if (chosen == order_.models()) return decision;
    std::vector<RequestId> ids;
    for (const auto& [deadline, id] : order_.of(chosen)) {
      if (ids.size() == chosen_size) break;
      ids.push_back(id);
    }
    Batch batch = make_batch(chosen, std::move(ids), chosen_estimate);
    batch.not_before_ns = start;
    batch.latest_start_ns = base::add_saturated(start, ahead);
    free_at_ns_ = base::add_saturated(start, base::to_uint64(chosen_estimate));
    decision.batch = std::move(batch);
    return decision;
  }

 protected:
  void model_added(uint32_t /*model*/) override {
    order_.resize(order_.models() + 1);
    recent_.emplace_back();
  }
  // A queue by deadline is a queue by arrival where a model has one SLO, as in Clockwork.
  void enter(Held& held, uint64_t /*now_ns*/) override {
    order_.add(held.request.model, held.request.deadline_ns, held.request.id);
  }
  void leave(Held& held) override {
    order_.remove(held.request.model, held.request.deadline_ns, held.request.id);
  }
  void batch_finished(const Flight& flight, uint64_t device_ns, uint64_t now_ns) override {
    std::deque<double>& recent = recent_[flight.model][flight.size];
    recent.push_back(static_cast<double>(device_ns));
    if (recent.size() > 10) recent.pop_front();
    // Later or earlier than thought; what was sent meanwhile moves free_at_ns_ again when it starts.
    free_at_ns_ = now_ns;
  }
  void batch_started(const Flight& flight, uint64_t now_ns) override {
    free_at_ns_ = now_ns + flight.expected_ns;
  }

 private:
  double internal_deadline(const KeyedOrder::Key& key) const {
    return static_cast<double>(key.first) - options_.clockwork_slack_ms * 1e6;
  }
  double estimate(uint32_t model, uint32_t size) {
    const auto at = recent_[model].find(size);
    if (at == recent_[model].end() || at->second.empty())
      return mean_duration_ns(model, size);                          // profiled beforehand
    return *std::max_element(at->second.begin(), at->second.end());  // 0.99 of ten is the greatest
  }
  KeyedOrder order_;
  std::vector<base::FlatHashMap<uint32_t, std::deque<double>>> recent_;
  uint64_t free_at_ns_ = 0;  // when the device is expected to have done all it was sent
};

// Every execution time known: the ceiling. Drops what cannot finish alone. "clairvoyant-edf" then grows the
// batch from the earliest deadline by whoever lets all in it finish in time; under overload that is no
// ceiling, for EDF gives its time to the request about to be lost. "clairvoyant" weighs batches as gpushare
// does, with the true durations: of all caps on the length (up to 24 of the lengths pending) and sizes, the
// batch that wins most after paying for its time.
class Clairvoyant final : public BatcherBase {
 public:
  Clairvoyant(const BatcherOptions& options, bool edf)
      : BatcherBase(edf ? "clairvoyant-edf" : "clairvoyant", options), edf_(edf) {}

  Decision next(uint64_t now_ns, uint32_t in_flight) override {
    Decision decision;
    if (in_flight > 0) return decision;
    std::vector<RequestId> best_ids;
    double best_worth = -INFINITY, best_takes = 0;
    uint32_t best_model = 0;
    for (uint32_t model = 0; model < order_.models(); ++model) {
      gather(model, now_ns);
      if (pending_.empty()) continue;
      const BatchTimeModel& time = knowledge_.model(model).time;
      const double price = options_.opportunity * goodput_per_ns_;
      const auto offer = [&](const std::vector<const Pending*>& members, double worth) {
        if (worth <= best_worth) return;
        best_worth = worth;
        best_model = model;
        best_ids.clear();
        double longest = 0;
        for (const Pending* each : members) {
          best_ids.push_back(each->id);
          longest = std::max(longest, each->length_ns);
        }
        best_takes = time.duration_ns(static_cast<unsigned>(members.size()), longest);
      };
      if (edf_) {
        std::vector<const Pending*> members;
        double longest = 0;
        for (const Pending& each : pending_) {
          if (members.size() == max_batch(model)) break;
          const double with = std::max(longest, each.length_ns);
          if (!members.empty() &&
              time.duration_ns(static_cast<unsigned>(members.size() + 1), with) > pending_.front().slack_ns)
            continue;
          longest = with;
          members.push_back(&each);
        }
        offer(members, -pending_.front().slack_ns);
        continue;
      }
      std::vector<double> caps;
      for (const Pending& each : pending_) caps.push_back(each.length_ns);
      std::sort(caps.begin(), caps.end());
      constexpr size_t kCaps = 24;
      for (size_t c = 0; c < std::min(kCaps, caps.size()); ++c) {
        const double cap = caps[caps.size() <= kCaps ? c : (c + 1) * caps.size() / kCaps - 1];
        for (uint32_t k = 1; k <= max_batch(model); k += std::max(1u, k / 4)) {
          std::vector<const Pending*> members;
          const double bears = time.duration_ns(k, cap);
          double longest = 0;
          for (const Pending& each : pending_) {
            if (each.length_ns > cap || each.slack_ns < bears) continue;
            longest = std::max(longest, each.length_ns);
            members.push_back(&each);
            if (members.size() == k) break;
          }
          if (members.size() < k) break;
          offer(members, k - price * time.duration_ns(k, longest));
        }
      }
    }
    if (!best_ids.empty()) decision.batch = make_batch(best_model, std::move(best_ids), best_takes);
    return decision;
  }

 protected:
  void model_added(uint32_t /*model*/) override { order_.resize(order_.models() + 1); }
  void enter(Held& held, uint64_t /*now_ns*/) override {
    order_.add(held.request.model, held.request.deadline_ns, held.request.id);
  }
  void leave(Held& held) override {
    order_.remove(held.request.model, held.request.deadline_ns, held.request.id);
  }
  bool keeps_deadlines() const override { return true; }
  void batch_finished(const Flight& flight, uint64_t /*device_ns*/, uint64_t now_ns) override {
    double won = 0;
    for (const auto& [deadline, cost] : flight.deadlines) won += now_ns <= deadline ? cost : 0;
    constexpr double kKeep = 1 - 1.0 / 64;
    won_ = won_ * kKeep + won;
    spent_ns_ = spent_ns_ * kKeep + static_cast<double>(now_ns - std::min(now_ns, last_end_ns_));
    last_end_ns_ = now_ns;
    if (spent_ns_ > 0) goodput_per_ns_ = won_ / spent_ns_;
  }

 private:
  struct Pending {
    double slack_ns;
    double length_ns;
    RequestId id;
  };
  void gather(uint32_t model, uint64_t now_ns) {
    pending_.clear();
    hopeless_.clear();
    const BatchTimeModel& time = knowledge_.model(model).time;
    for (const auto& [deadline, id] : order_.of(model)) {
      const double slack = static_cast<double>(deadline) - static_cast<double>(now_ns);
      const double length = static_cast<double>(find(id)->request.execution_ns);
      if (time.duration_ns(1, length) > slack)
        hopeless_.push_back(id);
      else
        pending_.push_back({slack, length, id});
    }
    for (RequestId id : hopeless_) drop(id, DropReason::kHopeless);
  }
  const bool edf_;
  KeyedOrder order_;
  std::vector<Pending> pending_;
  std::vector<RequestId> hopeless_;
  double won_ = 0, spent_ns_ = 0, goodput_per_ns_ = 0;
  uint64_t last_end_ns_ = 0;
};

}  // namespace

std::unique_ptr<Batcher> make_fifo(const BatcherOptions& options) {
  return std::make_unique<Ordered>("fifo", options, false);
}
std::unique_ptr<Batcher> make_edf(const BatcherOptions& options) {
  return std::make_unique<Ordered>("edf", options, true);
}
std::unique_ptr<Batcher> make_maxdelay(const BatcherOptions& options) {
  return std::make_unique<MaxDelay>(options);
}
std::unique_ptr<Batcher> make_clipper(const BatcherOptions& options) {
  return std::make_unique<Clipper>(options);
}
std::unique_ptr<Batcher> make_clipper_aimd(const BatcherOptions& options) {
  return std::make_unique<ClipperAimd>(options);
}
std::unique_ptr<Batcher> make_nexus(const BatcherOptions& options) {
  return std::make_unique<Nexus>(options);
}
std::unique_ptr<Batcher> make_clockwork(const BatcherOptions& options) {
  return std::make_unique<Clockwork>(options);
}
std::unique_ptr<Batcher> make_clairvoyant(const BatcherOptions& options) {
  return std::make_unique<Clairvoyant>(options, false);
}
std::unique_ptr<Batcher> make_clairvoyant_edf(const BatcherOptions& options) {
  return std::make_unique<Clairvoyant>(options, true);
}

}  // namespace gpushare::sched::slo
