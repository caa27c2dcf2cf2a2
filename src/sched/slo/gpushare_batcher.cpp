// gpushare_batcher.cpp: our policy.
//
// A device turn is worth what the requests in it win and costs what else the device could have won in that
// time. So of all batches considered, the one with the greatest
//     sum over its requests of cost * P(duration <= slack)  -  opportunity * goodput * E[duration]
// runs next, where goodput is what the device has lately won per time (the rule of average reward in
// semi-Markov decisions). Busy, this prefers batches that win much per time; idle, time is cheap and the
// batch grows. The batches considered: for each application present, taken as the longest allowed, and each
// size k, the k earliest deadlines among requests of applications no longer than it that can bear a batch of
// that length; so short requests are not padded to long ones unless that pays. Durations are those of the
// very composition: the CDF of the maximum is the product of the members' CDFs.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cmath>

#include "base/saturate.hpp"
#include "sched/slo/batcher_base.hpp"
#include "sched/slo/kernels.hpp"

namespace gpushare::sched::slo {
namespace {

// CDFs of all applications of a model on one logarithmic grid (32 points an octave, straight lines between),
// so that the CDF of the maximum of any composition is a product of rows.
class Grid {
 public:
  static constexpr int kShift = 52 - 5;
  void build(const std::deque<Knowledge::Application>& applications) {
    double low = INFINITY, high = 0;
    for (const auto& each : applications) {
      if (each.alone.empty()) continue;
      low = std::min(low, std::max(each.alone.min_ns(), 1.0));
      high = std::max(high, each.alone.max_ns());
    }
    points_.clear();
    weights_.clear();
    rows_.assign(applications.size(), {});
    if (!(high > 0)) return;
    base_ = std::bit_cast<uint64_t>(low) >> kShift;
    const size_t used = (std::bit_cast<uint64_t>(high) >> kShift) - base_ + 2;
    const size_t count = (used + 7) / 8 * 8;  // as the kernel wants it
    for (size_t i = 0; i < count; ++i) points_.push_back(std::bit_cast<double>((base_ + i) << kShift));
    // E[max] = x_0 + integral of 1 - F, by trapezia: x_last - sum of weight_i F_i.
    for (size_t i = 0; i < count; ++i)
      weights_.push_back(0.5 * ((i > 0 ? points_[i] - points_[i - 1] : 0) +
                                (i + 1 < count ? points_[i + 1] - points_[i] : 0)));
    for (size_t a = 0; a < applications.size(); ++a) {
      rows_[a].resize(count, 1.0);
      if (applications[a].alone.empty()) continue;
      for (size_t i = 0; i < count; ++i) rows_[a][i] = applications[a].alone.cdf(points_[i]);
    }
  }
  const std::vector<double>& row(size_t application) const { return rows_[application]; }
  // The CDF of the maximum of one draw of each row, into `into`; returns its mean.
  double maximum(std::span<const double* const> rows, std::vector<double>& into) const {
    into.resize(points_.size());
    if (points_.empty()) return 0;
    return points_.back() -
           kernels().product(rows.data(), rows.size(), weights_.data(), into.data(), into.size());
  }
  double at(const std::vector<double>& row, double x) const {
    if (points_.empty()) return 1;
    if (!(x > points_.front())) return x == points_.front() ? row[0] : 0;
    if (x >= points_.back()) return 1;
    const uint64_t bits = std::bit_cast<uint64_t>(x);
    const size_t i = (bits >> kShift) - base_;
    const double share = static_cast<double>(bits & ((1ull << kShift) - 1)) * 0x1p-47;
    return row[i] + share * (row[i + 1] - row[i]);
  }

 private:
  uint64_t base_ = 0;
  std::vector<double> points_, weights_;
  std::vector<std::vector<double>> rows_;
};

class Gpushare final : public BatcherBase {
 public:
  explicit Gpushare(const BatcherOptions& options) : BatcherBase("gpushare", options) {}

  Decision next(uint64_t now_ns, uint32_t in_flight) override {
    Decision decision;
    if (in_flight > 0) return decision;
    best_ = Choice();
    for (uint32_t model = 0; model < models_.size(); ++model) consider(model, now_ns);
    if (best_.ids.empty()) return decision;
    if (best_.gain < options_.hold * goodput(now_ns) * best_.mean_ns && best_.gain < 0.5 * best_.cost) {
      // Likely to miss, and not worth its time if it did not: whoever comes next would find the device busy.
      decision.wake_ns = base::add_saturated(now_ns, base::to_uint64(best_.mean_ns / 8 + 1));
      return decision;
    }
    if (const uint64_t until = deferred_until(now_ns); until > now_ns) {
      decision.wake_ns = until;
      return decision;
    }
    decision.batch = make_batch(best_.model, std::move(best_.ids), best_.mean_ns);
    return decision;
  }

 protected:
  void model_added(uint32_t model) override {
    models_.emplace_back();
    // Sizes looked at: every one up to 8, then in steps of about an eighth.
    const uint32_t most = max_batch(model);
    for (uint32_t k = 1; k < most; k += std::max(1u, k / 8)) models_.back().sizes.push_back(k);
    models_.back().sizes.push_back(most);
  }
  void enter(Held& held, uint64_t /*now_ns*/) override {
    models_[held.request.model].order.insert(key(held));
  }
  void leave(Held& held) override { models_[held.request.model].order.erase(key(held)); }
  // Refuses at the door what is almost sure to miss even if it ran at once and alone.
  base::Status admit(const Held& held, uint64_t now_ns) override {
    GPUSHARE_RETURN_IF_ERROR(BatcherBase::admit(held, now_ns));
    refresh(held.request.model);
    const double slack = static_cast<double>(held.request.deadline_ns - now_ns);
    if (alone(held.request.model, held.application, slack) >= kHopeless || !held.request.later_steps.empty())
      return base::ok_status();
    const BatchTimeModel& time = knowledge_.model(held.request.model).time;
    return base::Status(
        GPUSHARE_TIMED_OUT,
        base::format(
            "request %llu of application %u has %.3f ms to its deadline; alone and at once it would take "
            "%.3f ms "
            "at the least",
            static_cast<unsigned long long>(held.request.id), held.request.application, slack / 1e6,
            time.duration_ns(
                1, knowledge_.model(held.request.model).applications[held.application].alone.min_ns()) /
                1e6));
  }
  bool keeps_deadlines() const override { return true; }
  void batch_finished(const Flight& flight, uint64_t /*device_ns*/, uint64_t now_ns) override {
    double won = 0;
    for (const auto& [deadline, cost] : flight.deadlines) won += now_ns <= deadline ? cost : 0;
    constexpr double kKeep = 1 - 1.0 / 64;  // about the last 64 batches
    won_ = won_ * kKeep + won;
    spent_ns_ = spent_ns_ * kKeep + static_cast<double>(now_ns - std::min(now_ns, last_end_ns_));
    last_end_ns_ = now_ns;
  }

 private:
  // What the device won lately per nanosecond; idle time counts, so that a price too high for all that waits
  // falls.
  double goodput(uint64_t now_ns) const {
    const double spent = spent_ns_ + static_cast<double>(now_ns - std::min(now_ns, last_end_ns_));
    return spent > 0 ? won_ / spent : 0;
  }

  static constexpr double kHopeless = 0.01;  // a chance below this is none
  static constexpr size_t kLook =
      512;  // earliest deadlines a decision looks at: bounds its time whatever waits

  struct Key {
    uint64_t deadline_ns;
    RequestId id;
    uint32_t application;
    float cost;
    bool stepped;
    bool operator<(const Key& other) const {
      return std::pair(deadline_ns, id) < std::pair(other.deadline_ns, other.id);
    }
  };
  struct Model {
    uint64_t version = 0;
    absl::btree_set<Key> order;
    Grid grid;
    std::vector<uint32_t> sizes;
    std::vector<uint32_t> rank;  // of an application by mean, the shortest 0
    std::vector<uint32_t> by_rank;
    std::vector<double> bears_ns;  // by rank and index into sizes: the slack that a batch asks of its members
  };
  struct Pending {
    double slack_ns;
    double cost;
    RequestId id;
    uint32_t application;
    uint32_t rank;
    bool stepped;
  };
  struct Choice {
    double worth = -INFINITY;
    double gain = 0;
    double cost = 0;  // of all its members: the gain if all finish in time
    uint32_t model = 0;
    std::vector<RequestId> ids;
    double mean_ns = 0;
    double spare_ns = 0;  // how long all of it could wait and still bear the batch
    bool full = false;
  };

  static Key key(const Held& held) {
    const Request& r = held.request;
    return {r.deadline_ns, r.id, held.application, static_cast<float>(r.cost), !r.later_steps.empty()};
  }
  // P(it finishes within `slack` if it runs alone now).
  double alone(uint32_t model, uint32_t application, double slack_ns) {
    const BatchTimeModel& time = knowledge_.model(model).time;
    if (application >= models_[model].rank.size()) return 1;
    const Grid& grid = models_[model].grid;
    return grid.at(grid.row(application), (slack_ns - time.c0_ns()) / std::max(time.c1(), 1e-12));
  }

  void refresh(uint32_t index) {
    knowledge_.refresh(index);
    Model& model = models_[index];
    const Knowledge::Model& known = knowledge_.model(index);
    if (model.version == known.version && model.rank.size() == known.applications.size()) return;
    model.version = known.version;
    model.grid.build(known.applications);
    const size_t count = known.applications.size();
    model.by_rank.resize(count);
    for (uint32_t i = 0; i < count; ++i) model.by_rank[i] = i;
    std::sort(model.by_rank.begin(), model.by_rank.end(), [&](uint32_t a, uint32_t b) {
      return known.applications[a].mean_ns < known.applications[b].mean_ns;
    });
    model.rank.resize(count);
    for (uint32_t i = 0; i < count; ++i) model.rank[model.by_rank[i]] = i;
    model.bears_ns.clear();
    for (uint32_t application : model.by_rank)
      for (uint32_t k : model.sizes)
        model.bears_ns.push_back(
            known.time.duration_ns(k, known.applications[application].alone.quantile_ns(
                                          std::pow(options_.feasible_quantile, 1.0 / k))));
  }

  // The pending by slack, as far as a decision looks, without those whose chance is gone: they are dropped.
  void gather(uint32_t index, uint64_t now_ns) {
    Model& model = models_[index];
    pending_.clear();
    hopeless_.clear();
    for (const Key& each : model.order) {
      const double slack = static_cast<double>(each.deadline_ns) - static_cast<double>(now_ns);
      if (!each.stepped && (slack <= 0 || alone(index, each.application, slack) < kHopeless)) {
        hopeless_.emplace_back(each.id, slack <= 0 ? DropReason::kExpired : DropReason::kHopeless);
        continue;
      }
      if (each.stepped && lost(each, index, now_ns)) {
        hopeless_.emplace_back(each.id, DropReason::kExpired);
        continue;
      }
      if (pending_.size() == kLook) break;
      pending_.push_back(
          {slack, each.cost, each.id, each.application, model.rank[each.application], each.stepped});
    }
    for (const auto& [id, reason] : hopeless_) drop(id, reason);
  }
  // A request with later deadlines is lost when the last of them is.
  bool lost(const Key& each, uint32_t index, uint64_t now_ns) {
    double last = 0;
    for (const CostStep& step : find(each.id)->request.later_steps) last = std::max(last, step.after_ns);
    return alone(index, each.application,
                 static_cast<double>(each.deadline_ns) - static_cast<double>(now_ns) + last) < kHopeless;
  }

  void consider(uint32_t index, uint64_t now_ns) {
    refresh(index);
    gather(index, now_ns);
    if (pending_.empty()) return;
    Model& model = models_[index];
    const Knowledge::Model& known = knowledge_.model(index);
    const double price = options_.opportunity * goodput(now_ns);
    present_.assign(model.by_rank.size(), 0);
    bool uniform = true;
    for (const Pending& each : pending_) {
      ++present_[each.rank];
      uniform = uniform && each.cost == pending_.front().cost;
    }
    for (uint32_t cap = 0; cap < model.by_rank.size(); ++cap) {
      if (present_[cap] == 0) continue;
      allowed_.clear();
      for (uint32_t i = 0; i < pending_.size(); ++i)
        if (pending_[i].rank <= cap) allowed_.push_back(i);
      const double cap_mean = known.applications[model.by_rank[cap]].mean_ns;
      // Large ones first: under load they are mostly the better, and then bound the rest.
      for (size_t s = model.sizes.size(); s-- > 0;) {
        const uint32_t k = model.sizes[s];
        if (k > allowed_.size()) continue;
        const double bears = model.bears_ns[cap * model.sizes.size() + s];
        size_t first = static_cast<size_t>(
            std::lower_bound(allowed_.begin(), allowed_.end(), bears,
                             [&](uint32_t i, double x) { return pending_[i].slack_ns < x; }) -
            allowed_.begin());
        if (first + k > allowed_.size()) {
          if (k > 1) continue;
          first = allowed_.size() - 1;  // nobody can bear it: the one with the most slack may still be lucky
        }
        weigh(index, std::span(allowed_).subspan(first, k), bears, cap_mean, price);
        if (uniform || first + k == allowed_.size()) continue;
        // Costs differ: also the k costliest of those who can bear it.
        costly_.assign(allowed_.begin() + static_cast<ptrdiff_t>(first), allowed_.end());
        std::partial_sort(costly_.begin(), costly_.begin() + k, costly_.end(),
                          [this](uint32_t a, uint32_t b) {
                            return std::pair(-pending_[a].cost, a) < std::pair(-pending_[b].cost, b);
                          });
        weigh(index, std::span(costly_).first(k), bears, cap_mean, price);
      }
    }
  }

  // Compares one batch with the best so far.
  void weigh(uint32_t index, std::span<const uint32_t> members, double bears, double cap_mean, double price) {
    Model& model = models_[index];
    const BatchTimeModel& time = knowledge_.model(index).time;
    const uint32_t k = static_cast<uint32_t>(members.size());
    double most = 0, cost = 0, least_slack = INFINITY;
    bool has_cap = false;
    const Knowledge::Model& known = knowledge_.model(index);
    for (uint32_t i : members) {
      cost += pending_[i].cost;
      least_slack = std::min(least_slack, pending_[i].slack_ns);
      has_cap = has_cap || known.applications[pending_[i].application].mean_ns >= cap_mean;
      if (pending_[i].stepped) most = INFINITY;  // what its later deadlines may add is not bounded here
    }
    most += cost;
    if (!has_cap) return;  // the same batch was weighed under a shorter cap
    // The longest of k lasts at least as long on average as the longest application alone.
    if (most - price * time.duration_ns(k, cap_mean) <= best_.worth) return;
    rows_.clear();
    for (uint32_t i : members) rows_.push_back(model.grid.row(pending_[i].application).data());
    const double mean = time.duration_ns(k, model.grid.maximum(rows_, row_));
    const double scale = 1 / std::max(time.c1() * k, 1e-12);
    double gain = 0;
    for (uint32_t i : members) {
      const Pending& each = pending_[i];
      gain += each.cost * model.grid.at(row_, (each.slack_ns - time.c0_ns()) * scale);
      if (!each.stepped) continue;
      for (const CostStep& step : find(each.id)->request.later_steps)
        gain += step.cost * model.grid.at(row_, (each.slack_ns + step.after_ns - time.c0_ns()) * scale);
    }
    const double worth = gain - price * mean;
    if (worth <= best_.worth) return;
    best_.worth = worth;
    best_.gain = gain;
    best_.cost = cost;
    best_.model = index;
    best_.mean_ns = mean;
    best_.spare_ns = least_slack - bears;
    best_.full = k == model.sizes.back();
    best_.ids.clear();
    for (uint32_t i : members) best_.ids.push_back(pending_[i].id);
  }

  // An unfilled batch may wait for company, at most max_defer after its first came to be the choice, and
  // never past what it can bear.
  uint64_t deferred_until(uint64_t now_ns) {
    if (options_.max_defer_ms <= 0 || best_.full || best_.spare_ns <= 0) {
      deferring_ = false;
      return now_ns;
    }
    if (!deferring_) {
      deferring_ = true;
      defer_end_ns_ = base::add_saturated(now_ns, base::to_uint64(options_.max_defer_ms * 1e6));
    }
    const uint64_t until =
        std::min(defer_end_ns_, base::add_saturated(now_ns, base::to_uint64(best_.spare_ns)));
    if (until <= now_ns) deferring_ = false;
    return until;
  }

  std::vector<Model> models_;
  double won_ = 0, spent_ns_ = 0;
  uint64_t last_end_ns_ = 0;
  bool deferring_ = false;
  uint64_t defer_end_ns_ = 0;
  // Scratch of a decision.
  Choice best_;
  std::vector<Pending> pending_;
  std::vector<std::pair<RequestId, DropReason>> hopeless_;
  std::vector<uint32_t> present_, allowed_, costly_;
  std::vector<const double*> rows_;
  std::vector<double> row_;
};

}  // namespace

std::unique_ptr<Batcher> make_gpushare(const BatcherOptions& options) {
  return std::make_unique<Gpushare>(options);
}

}  // namespace gpushare::sched::slo
