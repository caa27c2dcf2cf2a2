// yardsticks.cpp: policies that are no published system and no choice for users: what is known of execution times, taken to
// the extreme (clairvoyant, clairvoyant-edf), and application means with nothing else (greedy).
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "sched/slo/batcher_base.hpp"

namespace gpushare::sched::slo {
namespace {

// Every execution time known: two heuristics, no bound. Drops what cannot finish alone. "clairvoyant-edf" then grows the
// batch from the earliest deadline by whoever lets all in it finish in time; under overload EDF gives its time to the
// request about to be lost. "clairvoyant" weighs batches as gpushare
// does, with the true durations: of all caps on the length (up to 24 of the lengths pending) and sizes, the
// batch that wins most after paying for its time.
class Clairvoyant final : public BatcherBase {
 public:
  Clairvoyant(const BatcherOptions& options, bool edf)
      : BatcherBase(edf ? "clairvoyant-edf" : "clairvoyant", options), edf_(edf) {}

  Decision decide(uint64_t now_ns, uint32_t in_flight) override {
    Decision decision;
    if (in_flight > 0 || !may_drop()) return decision;
    best_ = {};
    for (uint32_t model = 0; model < order_.models(); ++model) {
      gather(model, now_ns);
      if (pending_.empty()) continue;
      if (edf_)
        offer_earliest(model);
      else
        offer_all(model);
    }
    if (!best_.ids.empty()) decision.batch = make_batch(best_.model, std::move(best_.ids), best_.takes_ns);
    return decision;
  }

 protected:
  void model_added(uint32_t /*model*/) override { order_.resize(order_.models() + 1); }
  uint64_t expire(uint64_t now_ns) override { return expire_from(order_, now_ns); }
  void enter(Held& held, uint64_t /*now_ns*/) override {
    order_.add(held.request.model, held.request.deadline_ns, held.request.id);
  }
  void leave(Held& held) override {
    order_.remove(held.request.model, held.request.deadline_ns, held.request.id);
  }
  void batch_finished(const Flight& flight, uint64_t device_ns, uint64_t /*now_ns*/) override {
    if (device_ns == 0) return;  // a time that nobody knows
    constexpr double kKeep = 1 - 1.0 / 64;
    won_ = won_ * kKeep + flight.won;
    spent_ns_ = spent_ns_ * kKeep + static_cast<double>(device_ns);
    if (spent_ns_ > 0) goodput_per_ns_ = won_ / spent_ns_;
  }

 private:
  struct Pending {
    double slack_ns;
    double length_ns;
    RequestId id;
  };
  struct Choice {
    double worth = -INFINITY;
    uint32_t model = 0;
    double takes_ns = 0;
    std::vector<RequestId> ids;
  };

  // Keeps the batch if it is the best so far.
  void offer(uint32_t model, const std::vector<const Pending*>& members, double worth) {
    if (worth <= best_.worth) return;
    best_.worth = worth;
    best_.model = model;
    best_.ids.clear();
    double longest = 0;
    for (const Pending* each : members) {
      best_.ids.push_back(each->id);
      longest = std::max(longest, each->length_ns);
    }
    best_.takes_ns = knowledge_.model(model).time.duration_ns(static_cast<unsigned>(members.size()), longest);
  }

  // clairvoyant-edf: the batch that grows from the earliest deadline.
  void offer_earliest(uint32_t model) {
    const BatchTimeModel& time = knowledge_.model(model).time;
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
    offer(model, members, -pending_.front().slack_ns);
  }

  // clairvoyant: the batches of all caps and sizes.
  void offer_all(uint32_t model) {
    const BatchTimeModel& time = knowledge_.model(model).time;
    const double price = options_.opportunity * goodput_per_ns_;
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
        offer(model, members, k - price * time.duration_ns(k, longest));
      }
    }
  }

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
  Choice best_;
  double won_ = 0, spent_ns_ = 0, goodput_per_ns_ = 0;
};

// Application means alone, no distribution and no price. For each waiting application, taken as the longest allowed, and
// each size, it considers the batch of the earliest deadlines that can bear its mean duration. The batch that serves the
// most per time runs. This shows the worth of an application's label without the rest of our policy.
class Greedy final : public BatcherBase {
 public:
  explicit Greedy(const BatcherOptions& options) : BatcherBase("greedy", options) {}

  Decision decide(uint64_t now_ns, uint32_t in_flight) override {
    Decision decision;
    if (in_flight > 0 || !may_drop()) return decision;
    double best_rate = 0, best_takes = 0;
    uint32_t best_model = 0;
    std::vector<RequestId> best_ids, ids;
    for (uint32_t model = 0; model < order_.models(); ++model) {
      gather(model, now_ns);
      std::vector<double> caps;
      for (const Pending& each : pending_) caps.push_back(each.mean_ns);
      std::sort(caps.begin(), caps.end());
      caps.erase(std::unique(caps.begin(), caps.end()), caps.end());
      for (const double cap : caps)
        for (uint32_t k = max_batch(model); k > 0; --k) {
          const double takes = knowledge_.model(model).time.duration_ns(k, cap);
          if (k / takes <= best_rate) continue;
          ids.clear();
          for (const Pending& each : pending_) {
            if (each.mean_ns > cap || each.slack_ns < takes) continue;
            ids.push_back(each.id);
            if (ids.size() == k) break;
          }
          if (ids.size() < k) continue;
          best_rate = k / takes;
          best_takes = takes;
          best_model = model;
          best_ids = ids;
        }
    }
    if (!best_ids.empty()) decision.batch = make_batch(best_model, std::move(best_ids), best_takes);
    return decision;
  }

 protected:
  void model_added(uint32_t /*model*/) override { order_.resize(order_.models() + 1); }
  uint64_t expire(uint64_t now_ns) override { return expire_from(order_, now_ns); }
  void enter(Held& held, uint64_t /*now_ns*/) override {
    order_.add(held.request.model, held.request.deadline_ns, held.request.id);
  }
  void leave(Held& held) override {
    order_.remove(held.request.model, held.request.deadline_ns, held.request.id);
  }

 private:
  struct Pending {
    double slack_ns;
    double mean_ns;
    RequestId id;
  };
  // Gathers the requests that can finish if they run now, alone, for their mean time; the others are dropped.
  void gather(uint32_t model, uint64_t now_ns) {
    pending_.clear();
    hopeless_.clear();
    knowledge_.refresh(model);
    const Knowledge::Model& known = knowledge_.model(model);
    for (const auto& [deadline, id] : order_.of(model)) {
      const double slack = static_cast<double>(deadline) - static_cast<double>(now_ns);
      const auto mean = static_cast<double>(known.brief(find(id)->application).mean_ns);
      if (known.time.duration_ns(1, mean) > slack)
        hopeless_.push_back(id);
      else
        pending_.push_back({slack, mean, id});
    }
    for (RequestId id : hopeless_) drop(id, DropReason::kHopeless);
  }
  KeyedOrder order_;
  std::vector<Pending> pending_;
  std::vector<RequestId> hopeless_;
};

}  // namespace

std::unique_ptr<Batcher> make_greedy(const BatcherOptions& options) {
  return std::make_unique<Greedy>(options);
}
std::unique_ptr<Batcher> make_clairvoyant(const BatcherOptions& options) {
  return std::make_unique<Clairvoyant>(options, false);
}
std::unique_ptr<Batcher> make_clairvoyant_edf(const BatcherOptions& options) {
  return std::make_unique<Clairvoyant>(options, true);
}

}  // namespace gpushare::sched::slo
