// baselines.cpp: the policies gpushare is measured against, each as its own code or paper has it
// (benchmarks/results/serving-decisions.md lists what was taken from where).
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <deque>
#include <map>

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

  Decision decide(uint64_t now_ns, uint32_t in_flight) override {
    Decision decision;
    if (in_flight > 0) return decision;
    if (!may_drop()) return decision;
    const auto [model, at] = first_ready(now_ns);
    if (at > now_ns || at == kNever) {  // kNever: nothing waits, whenever it is asked
      decision.wake_ns = at;
      return decision;
    }
    std::vector<RequestId> ids;
    if (sized_by_first()) pass_over_late(order_, model, now_ns);
    if (!order_.of(model).empty()) {
      const uint32_t size = std::clamp(size_limit(model, now_ns), 1u, max_batch(model));
      take(model, size, now_ns, ids);
    }
    if (ids.empty()) {
      if (first_ready(now_ns).second != kNever)
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
  // The policy takes the size that the first request's time allows.
  virtual bool sized_by_first() const { return false; }
  // When the requests of this model that wait may run.
  virtual uint64_t ready_at(uint32_t /*model*/, uint64_t now_ns) { return now_ns; }
  // The model with the least first key of those that may run, and now; else the one that may run first, and when; kNever if
  // nothing waits. So a model that waits for more keeps no other from an idle device.
  std::pair<uint32_t, uint64_t> first_ready(uint64_t now_ns) {
    std::pair<uint32_t, uint64_t> first{0, kNever};
    const KeyedOrder::Key* first_key = nullptr;
    for (uint32_t model = 0; model < order_.models(); ++model) {
      if (order_.of(model).empty()) continue;
      const KeyedOrder::Key& its_key = *order_.of(model).begin();
      const uint64_t at = std::max(now_ns, ready_at(model, now_ns));
      if (first_key != nullptr && std::pair(at, its_key) >= std::pair(first.second, *first_key)) continue;
      first = {model, at};
      first_key = &its_key;
    }
    return first;
  }
  bool holds_back(uint64_t begins_ns) override {
    const uint64_t at = first_ready(begins_ns).second;
    return at > begins_ns && at != kNever;  // of those that come when nothing waits nothing is known yet
  }
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
  uint64_t expire(uint64_t now_ns) override {
    return expire_from(by_deadline_ ? order_ : deadlines_, now_ns);
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

// Clipper's code (ucbrise/clipper, libclipper/src/containers.cpp, ModelContainer::get_batch_size): 0.92 of the head's time
// is the budget. Above the longest latency seen it explores: one size more (from 10 on a tenth more) once the largest
// size was seen five times. Else it takes the batch size from a line fitted to the sizes over their P99 latencies,
// estimated as the mean + 3 pooled standard deviations. Left out: Clipper fills a batch that explores with copies of
// its last request, which costs it time.
class Clipper final : public Ordered {
 public:
  explicit Clipper(const BatcherOptions& options) : Ordered("clipper", options, true) {}

 protected:
  void model_added(uint32_t model) override {
    Ordered::model_added(model);
    fits_.emplace_back();
  }
  uint32_t size_limit(uint32_t model, uint64_t now_ns) override {
    Fit& fit = fits_[model];
    const double budget = kBudgetDecay * static_cast<double>(order_.of(model).begin()->first - now_ns);
    const uint32_t size = budget > fit.longest_ns ? explore(fit) : estimate(fit, budget);
    const uint32_t limited = std::clamp(size, 1u, max_batch(model));
    fit.largest = std::max(fit.largest, limited);
    return limited;
  }
  bool sized_by_first() const override { return true; }
  void batch_finished(const Flight& flight, uint64_t device_ns, uint64_t /*now_ns*/) override {
    if (!flight.sample()) return;
    Fit& fit = fits_[flight.model];
    if (flight.changed) fit = {};
    const auto took = static_cast<double>(device_ns);
    Latency& seen = fit.of_size[flight.size];
    seen.count += 1;
    const double before = took - seen.mean;
    seen.mean += before / seen.count;
    seen.squares += before * (took - seen.mean);
    fit.longest_ns = std::max(fit.longest_ns, took);
  }

 private:
  static constexpr double kBudgetDecay = 0.92, kLatencyZ = 3;
  static constexpr double kLeastSamples = 5;
  static constexpr uint32_t kAdditiveBelow = 10;
  struct Latency {
    double count = 0, mean = 0, squares = 0;  // squares: sum of squared differences from the mean
  };
  struct Fit {
    std::map<uint32_t, Latency> of_size;
    uint32_t largest = 1;
    double longest_ns = 0;
  };
  static uint32_t explore(const Fit& fit) {
    const auto at = fit.of_size.find(fit.largest);
    if (at != fit.of_size.end() && at->second.count < kLeastSamples) return fit.largest;
    return fit.largest < kAdditiveBelow ? fit.largest + 1 : fit.largest + fit.largest / 10;
  }
  static uint32_t estimate(const Fit& fit, double budget) {
    double squares = 0, freedom = 0;
    for (const auto& [size, seen] : fit.of_size) {
      if (seen.count < kLeastSamples) continue;
      squares += seen.squares;
      freedom += seen.count - 1;
    }
    const double spread = kLatencyZ * std::sqrt(squares / std::max(freedom, 1.0));
    double n = 0, x = 0, xx = 0, y = 0, xy = 0;
    for (const auto& [size, seen] : fit.of_size) {
      const double latency = seen.mean + spread;
      n += 1;
      x += latency;
      xx += latency * latency;
      y += size;
      xy += latency * size;
    }
    if (n == 0) return 1;
    const double variance = n * xx - x * x;
    const double slope = variance > 0 ? (n * xy - x * y) / variance : 0;
    return static_cast<uint32_t>(std::clamp(y / n + slope * (budget - x / n), 1.0, 4096.0));
  }
  std::vector<Fit> fits_;
};

// As Clipper, but plainer: sizes in turn until each was seen twice, then a line through the mean latencies of the last
// 300 batches and the largest size that meets the head's deadline.
class ClipperMean final : public Ordered {
 public:
  explicit ClipperMean(const BatcherOptions& options) : Ordered("clipper-mean", options, true) {}

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
  bool sized_by_first() const override { return true; }
  void batch_finished(const Flight& flight, uint64_t device_ns, uint64_t /*now_ns*/) override {
    if (!flight.sample()) return;
    std::deque<std::pair<double, double>>& seen = fits_[flight.model].seen;
    if (flight.changed) seen.clear();
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
    if (!flight.sample()) return;
    double& limit = limit_[flight.model];
    if (device_ns > flight.slo_ns)
      limit = std::max(1.0, limit * 0.9);
    else if (flight.size >= static_cast<uint32_t>(limit))
      limit = std::min(limit + 1, static_cast<double>(max_batch(flight.model)));
  }

 private:
  std::vector<double> limit_;
};

// Nexus (uwsampl/nexus, backend/gpu_executor.cpp and model_exec.cpp): the batch size is planned from the mean latency, the
// largest with latency <= (SLO - overhead) / 2, at least 1; a request that the planned latency makes late is dropped as
// the batch is formed. Its executor begins the next cycle at once; "nexus-cycle" waits out the duty cycle of the plan,
// longer when fewer arrive, as the paper has it.
class Nexus final : public Ordered {
 public:
  Nexus(const BatcherOptions& options, bool waits)
      : Ordered(waits ? "nexus-cycle" : "nexus", options, true), waits_(waits) {}

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
    if (!waits_) return;
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
  const bool waits_;
  std::vector<Plan> plans_;
};

// Nexus's other batch policy (model_exec.cpp, earliest): what could not finish alone is dropped from the front, and the size is the
// largest whose latency the first request bears.
class NexusEarliest final : public Ordered {
 public:
  explicit NexusEarliest(const BatcherOptions& options) : Ordered("nexus-earliest", options, true) {}

 protected:
  uint32_t size_limit(uint32_t model, uint64_t now_ns) override {
    const auto& queue = order_.of(model);
    const auto left = [&] { return static_cast<double>(queue.begin()->first) - static_cast<double>(now_ns); };
    while (!queue.empty() && may_drop() && left() < mean_duration_ns(model, 1))
      drop(queue.begin()->second, DropReason::kHopeless);
    uint32_t size = 1;
    const size_t most = std::min<size_t>(max_batch(model), queue.size());
    while (size < most && mean_duration_ns(model, size + 1) < left()) ++size;
    return size;
  }
  bool sized_by_first() const override { return true; }
};

// Clockwork (controller/infer5): plans on a single number, the 0.99 percentile of the last ten durations of each batch
// size; sends the next action ahead of the expected end of the one that runs, with a latest start; an action that comes
// later is rejected and its requests fail. Each batch size has a queue of its own, from which requests fall that could
// not finish in a batch of that size. The strategy whose head must start first names a least size; the largest size in a
// row from there on whose queue is long enough runs, and requests before the batch's last are passed over for good.
// "clockwork-single" has one queue and takes the largest size that all its oldest requests allow.
class Clockwork final : public BatcherBase {
 public:
  Clockwork(const BatcherOptions& options, bool single)
      : BatcherBase(single ? "clockwork-single" : "clockwork", options), single_(single) {}

  Decision decide(uint64_t now_ns, uint32_t in_flight) override {
    Decision decision;
    const uint64_t ahead = ns(options_.clockwork_window_ms);
    if (!may_drop()) return decision;
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
    const Choice chosen = single_ ? choose_single(start) : choose_by_size(start);
    if (chosen.ids.empty()) return decision;
    Batch batch = make_batch(chosen.model, chosen.ids, chosen.estimate_ns);
    for (RequestId id : chosen.passed) drop(id, DropReason::kHopeless);
    batch.not_before_ns = start;
    batch.latest_start_ns = base::add_saturated(start, ahead);
    free_at_ns_ = base::add_saturated(start, base::to_uint64(chosen.estimate_ns));
    decision.batch = std::move(batch);
    return decision;
  }

 protected:
  void model_added(uint32_t /*model*/) override {
    order_.resize(order_.models() + 1);
    recent_.emplace_back();
  }
  uint64_t expire(uint64_t now_ns) override { return expire_from(order_, now_ns); }
  double least_alone_ns(const Held& held) override {
    return estimate(held.request.model, 1) + options_.clockwork_slack_ms * 1e6;
  }
  // A queue by deadline is a queue by arrival where a model has one SLO, as in Clockwork.
  void enter(Held& held, uint64_t /*now_ns*/) override {
    order_.add(held.request.model, held.request.deadline_ns, held.request.id);
  }
  void leave(Held& held) override {
    order_.remove(held.request.model, held.request.deadline_ns, held.request.id);
  }
  void batch_finished(const Flight& flight, uint64_t device_ns, uint64_t now_ns) override {
    if (flight.changed) recent_[flight.model].clear();
    if (flight.sample()) {
      std::deque<double>& recent = recent_[flight.model][flight.size];
      recent.push_back(static_cast<double>(device_ns));
      if (recent.size() > 10) recent.pop_front();
    }
    // Later or earlier than thought; what was sent meanwhile moves free_at_ns_ again when it starts.
    free_at_ns_ = now_ns;
  }
  void batch_started(const Flight& flight, uint64_t now_ns) override {
    free_at_ns_ = now_ns + flight.expected_ns;
  }

 private:
  struct Choice {
    uint32_t model = 0;
    std::vector<RequestId> ids, passed;
    double estimate_ns = 0;
  };
  // For each model, the largest prepared size that all its oldest requests still allow; among models, the one
  // whose first request must start first.
  Choice choose_single(uint64_t start) {
    Choice chosen;
    uint32_t size_chosen = 0;
    double latest = 0;
    for (uint32_t model = 0; model < order_.models(); ++model) {
      pass_over_late(order_, model, start);
      drop_hopeless(model, start);
      const auto& queue = order_.of(model);
      if (queue.empty()) continue;
      const double head = internal_deadline(*queue.begin());
      for (uint32_t size : knowledge_.model(model).spec.batch_sizes) {
        if (size > queue.size()) break;
        const double takes = estimate(model, size);
        if (static_cast<double>(start) + takes > head) continue;
        if (size_chosen == 0 || chosen.model == model || head - takes < latest) {
          chosen.model = model;
          size_chosen = size;
          latest = head - takes;
          chosen.estimate_ns = takes;
        }
      }
    }
    if (size_chosen != 0)
      for (const auto& [deadline, id] : order_.of(chosen.model)) {
        if (chosen.ids.size() == size_chosen) break;
        chosen.ids.push_back(id);
      }
    return chosen;
  }
  // The first request of the size's queue and whether the queue is long enough; a queue is what is left of the model's
  // order once those are gone that could not finish in a batch of this size.
  struct SizeQueue {
    absl::btree_set<KeyedOrder::Key>::const_iterator first;
    bool empty = true, full = false;
  };
  SizeQueue queue_of(uint32_t model, uint32_t size, uint64_t start) {
    const auto& order = order_.of(model);
    const double needs =
        static_cast<double>(start) + estimate(model, size) + options_.clockwork_slack_ms * 1e6;
    SizeQueue queue{order.lower_bound({base::to_uint64(std::ceil(needs)), 0})};
    auto at = queue.first;
    queue.empty = at == order.end();
    uint32_t count = 0;
    for (; at != order.end() && count < size; ++at) ++count;
    queue.full = count == size;
    return queue;
  }
  Choice choose_by_size(uint64_t start) {
    Choice chosen;
    double latest = INFINITY;
    for (uint32_t model = 0; model < order_.models(); ++model) {
      drop_hopeless(model, start);
      const std::vector<uint32_t>& sizes = knowledge_.model(model).spec.batch_sizes;
      for (size_t least = 0; least < sizes.size(); ++least) {
        const SizeQueue head = queue_of(model, sizes[least], start);
        if (head.empty || !head.full) continue;
        const double must_start = internal_deadline(*head.first) - estimate(model, sizes[least]);
        if (must_start >= latest) continue;
        latest = must_start;
        size_t size = least;
        SizeQueue queue = head;
        for (SizeQueue next = head; size + 1 < sizes.size(); ++size, queue = next) {
          next = queue_of(model, sizes[size + 1], start);
          if (!next.full) break;
        }
        chosen = {};
        chosen.model = model;
        chosen.estimate_ns = estimate(model, sizes[size]);
        const auto& order = order_.of(model);
        for (auto at = order.begin(); at != queue.first; ++at) chosen.passed.push_back(at->second);
        for (auto at = queue.first; chosen.ids.size() < sizes[size]; ++at) chosen.ids.push_back(at->second);
      }
    }
    return chosen;
  }
  void drop_hopeless(uint32_t model, uint64_t start) {
    const auto& queue = order_.of(model);
    while (!queue.empty() && may_drop() &&
           static_cast<double>(start) + estimate(model, 1) > internal_deadline(*queue.begin()))
      drop(queue.begin()->second, DropReason::kHopeless);
  }
  double internal_deadline(const KeyedOrder::Key& key) const {
    return static_cast<double>(key.first) - options_.clockwork_slack_ms * 1e6;
  }
  double estimate(uint32_t model, uint32_t size) {
    const auto at = recent_[model].find(size);
    if (at == recent_[model].end() || at->second.empty())
      return mean_duration_ns(model, size);                          // profiled beforehand
    return *std::max_element(at->second.begin(), at->second.end());  // 0.99 of ten is the greatest
  }
  const bool single_;
  KeyedOrder order_;
  std::vector<base::FlatHashMap<uint32_t, std::deque<double>>> recent_;
  uint64_t free_at_ns_ = 0;  // when the device is expected to have done all it was sent
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
std::unique_ptr<Batcher> make_clipper_mean(const BatcherOptions& options) {
  return std::make_unique<ClipperMean>(options);
}
std::unique_ptr<Batcher> make_clipper_aimd(const BatcherOptions& options) {
  return std::make_unique<ClipperAimd>(options);
}
std::unique_ptr<Batcher> make_nexus(const BatcherOptions& options) {
  return std::make_unique<Nexus>(options, false);
}
std::unique_ptr<Batcher> make_nexus_earliest(const BatcherOptions& options) {
  return std::make_unique<NexusEarliest>(options);
}
std::unique_ptr<Batcher> make_nexus_cycle(const BatcherOptions& options) {
  return std::make_unique<Nexus>(options, true);
}
std::unique_ptr<Batcher> make_clockwork(const BatcherOptions& options) {
  return std::make_unique<Clockwork>(options, false);
}
std::unique_ptr<Batcher> make_clockwork_single(const BatcherOptions& options) {
  return std::make_unique<Clockwork>(options, true);
}

}  // namespace gpushare::sched::slo
