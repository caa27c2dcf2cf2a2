// gpushare_batcher.cpp: our policy.
//
// A batch is worth the requests that it wins, and it costs the requests that the device could have won otherwise in
// its time. The policy runs the batch with the greatest
//     sum over its requests of value * P(duration <= slack)  -  goodput * E[duration]
// Goodput is the requests that the device has lately won per busy time (the rule of average reward in semi-Markov
// decisions). Idle time does not count, because in a burst a batch takes the time of the other requests in the burst.
// The value of a request that cannot wait is the cost of missing it; that of one that can wait is the device time that
// serving it now saves later, at the same price. So while all can be served the policy runs batches that waste no time
// and keeps deadlines, and under overload it wins the most per time (see appraise). When no batch pays for its time,
// the one that wins the most per time runs: an idle device wins nothing. The batches considered: for each length class of
// applications present, taken as the longest
// allowed, and each size k, the k earliest deadlines among requests of no longer classes that can bear a batch of that
// length with a chance of `feasible_quantile`, the same with a chance of kSafeQuantile, and the k latest; so short requests are not padded to long ones unless
// that pays, and under overload the device does not gamble on requests that are almost lost. Durations are those of the
// very composition: the CDF of the maximum is the product of the members' CDFs.
//
// The cost of a decision is bounded: it weighs at most kModels models with at most kCaps length classes, whatever the number of applications, and looks at
// most at kLook waiting requests, or as many as the largest batch has. The values that it needs of an application are computed at the first use after a change.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cmath>

#include "base/saturate.hpp"
#include "sched/slo/batcher_base.hpp"
#include "sched/slo/kernels.hpp"

namespace gpushare::sched::slo {
namespace {

// CDFs of the applications of a model on one logarithmic grid (32 points an octave, straight lines between), so that
// the CDF of the maximum of any composition is a product of rows. A row is computed when it is asked for.
class Grid {
 public:
  static constexpr int kShift = 52 - 5;
  // The CDF of an application's time alone.
  struct Row {
    uint64_t revision = 0, version = 0;
    size_t first = 0, end = 0;  // it is 0 before `first` and 1 from `end` on
    std::vector<double> cdf;
  };
  // The CDF of the maximum of one draw of each of some rows.
  struct Maximum {
    double mean = 0;
    double low = 0, high = 0;  // it is 0 up to `low` and 1 from `high` on
    std::vector<double> cdf;   // from a place before `low` to one after `high`
  };
  // Takes the range that the rows need, and has a place for each row. With few applications the range is exactly theirs;
  // with many it is that of the mixture, widened by each row that does not fit.
  void fit(const Knowledge::Model& known) {
    rows_.resize(known.applications.size() + 1);
    double low = INFINITY, high = 0;
    const auto cover = [&](const Distribution& of) {
      if (of.empty()) return;
      low = std::min(low, std::max(of.min_ns(), 1.0));
      high = std::max(high, of.max_ns());
    };
    if (known.applications.size() <= Knowledge::kExactMixture) {
      for (uint32_t i = 0; i < known.applications.size(); ++i) cover(known.alone(i));
      if (high > 0 && (index_of(low) != base_ || index_of(high) + 2 - base_ != used_)) span(low, high);
    } else {
      cover(known.mix_alone);
      if (high > 0) widen(low, high);
    }
  }
  // Raised when the range changes: rows taken before are stale then.
  uint64_t version() const { return version_; }
  // May widen the grid. The row stays in its place until the next fit().
  const Row& row(const Knowledge::Model& known, uint32_t application) {
    // Row 0 is the mixture's, for all applications without samples.
    const size_t index = known.briefs[application].known() ? application + size_t{1} : 0;
    Row& row = rows_[index];
    const uint64_t revision = known.brief(application).revision;
    if (row.revision == revision && row.version == version_) return row;
    const Distribution& of = known.alone(application);
    if (!of.empty()) widen(std::max(of.min_ns(), 1.0), of.max_ns());
    row.cdf.assign(points_.size(), 1.0);
    const std::span<const double> edges = of.edges_ns(), values = of.cdf_at_edges();
    size_t next = 0;
    for (size_t i = 0; i < points_.size() && !of.empty(); ++i) {
      while (next < edges.size() && edges[next] <= points_[i]) ++next;
      if (next == edges.size()) break;
      row.cdf[i] = next == 0
                       ? 0
                       : values[next - 1] + (points_[i] - edges[next - 1]) / (edges[next] - edges[next - 1]) *
                                                (values[next] - values[next - 1]);
    }
    const auto first = std::find_if(row.cdf.begin(), row.cdf.end(), [](double f) { return f > 0; });
    const auto end = std::find_if(first, row.cdf.end(), [](double f) { return f >= 1; });
    row.first = static_cast<size_t>(first - row.cdf.begin());
    row.end = static_cast<size_t>(end - row.cdf.begin());
    row.revision = revision;
    row.version = version_;
    return row;
  }
  // The rows are multiplied only where the product is neither 0 nor 1.
  void maximum(std::span<const Row* const> rows, Maximum& into) {
    if (points_.empty()) {  // nothing is known: no time at all
      into.mean = 0;
      into.low = into.high = -INFINITY;
      return;
    }
    size_t first = 0, end = 0;
    for (const Row* each : rows) {
      first = std::max(first, each->first);
      end = std::max(end, each->end);
    }
    first = first / 8 * 8;  // as the kernel wants it
    end = std::max(first, std::min((end + 7) / 8 * 8, points_.size()));
    factors_.clear();
    for (const Row* each : rows) factors_.push_back(each->cdf.data() + first);
    into.cdf.resize(points_.size() + 1);
    const double sum = kernels().product(factors_.data(), factors_.size(), weights_.data() + first,
                                         into.cdf.data() + first, end - first);
    if (first > 0) into.cdf[first - 1] = 0;
    into.cdf[end] = 1;
    into.low = points_[first > 0 ? first - 1 : 0];
    into.high = points_[std::min(end, points_.size() - 1)];
    // E[max] = x_end - integral of F up to there, by trapezia; the weights are those of the whole grid.
    into.mean = (end > 0 && end < points_.size() ? (points_[end - 1] + points_[end]) / 2 : into.high) - sum;
  }
  double at(const Maximum& of, double x) const {
    if (!(x > of.low)) return 0;
    if (x >= of.high) return 1;
    const size_t i = index_of(x) - base_;
    const double share = static_cast<double>(std::bit_cast<uint64_t>(x) & ((1ull << kShift) - 1)) * 0x1p-47;
    return of.cdf[i] + share * (of.cdf[i + 1] - of.cdf[i]);
  }

 private:
  static uint64_t index_of(double x) { return std::bit_cast<uint64_t>(x) >> kShift; }
  void widen(double low, double high) {
    if (points_.empty()) return span(low, high);
    const double first = points_.front(), last = points_[used_ - 1];
    if (low < first || high > last) span(std::min(low, first), std::max(high, last));
  }
  void span(double low, double high) {
    ++version_;
    points_.clear();
    weights_.clear();
    base_ = index_of(low);
    used_ = index_of(high) + 2 - base_;
    const size_t count = (used_ + 7) / 8 * 8;  // as the kernel wants it
    for (size_t i = 0; i < count; ++i) points_.push_back(std::bit_cast<double>((base_ + i) << kShift));
    // E[max] = x_0 + integral of 1 - F, by trapezia: x_last - sum of weight_i F_i.
    for (size_t i = 0; i < count; ++i)
      weights_.push_back(0.5 * ((i > 0 ? points_[i] - points_[i - 1] : 0) +
                                (i + 1 < count ? points_[i + 1] - points_[i] : 0)));
  }

  uint64_t base_ = 0, used_ = 0, version_ = 1;
  std::vector<double> points_, weights_;
  std::vector<Row> rows_;
  std::vector<const double*> factors_;
};

// The greatest of some numbers with their places, greatest first and equal ones by place.
class Greatest {
 public:
  struct Item {
    double number;
    uint32_t at;
  };
  // Holds nothing, and from now on the `most` greatest.
  void reset(size_t most) {
    items_.clear();
    most_ = most;
  }
  // Adds number(place) of each place.
  template <typename Number>
  void add(std::span<const uint32_t> places, const Number& number) {
    fresh_.clear();
    const bool full = items_.size() == most_;
    for (const uint32_t at : places)
      if (const Item each{number(at), at}; !full || before(each, items_.back())) fresh_.push_back(each);
    std::sort(fresh_.begin(), fresh_.end(), before);
    if (fresh_.empty()) return;
    merged_.resize(std::min(items_.size() + fresh_.size(), most_));
    auto old = items_.begin();
    auto fresh = fresh_.begin();
    for (Item& each : merged_) {
      const bool takes_fresh = old == items_.end() || (fresh != fresh_.end() && before(*fresh, *old));
      each = takes_fresh ? *fresh++ : *old++;
    }
    items_.swap(merged_);
  }
  const std::vector<Item>& items() const { return items_; }

 private:
  static bool before(const Item& a, const Item& b) {
    return a.number != b.number ? a.number > b.number : a.at < b.at;
  }
  size_t most_ = 0;
  std::vector<Item> items_, fresh_, merged_;
};

class Gpushare final : public BatcherBase {
 public:
  explicit Gpushare(const BatcherOptions& options) : BatcherBase("gpushare", options) {}

  Decision decide(uint64_t now_ns, uint32_t in_flight) override {
    Decision decision;
    if (in_flight > 0 || !may_drop()) return decision;
    best_ = Choice();
    choose_models();
    for (uint32_t model : considered_) consider(model, now_ns);
    if (best_.ids.empty()) return decision;
    if (const uint64_t until = deferred_until(now_ns); until > now_ns) {
      decision.wake_ns = until;
      return decision;
    }
    predict_misses(best_.ids.size(), 1 - std::min(best_.wins / best_.cost, 1.0));
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
    for (uint32_t k : models_.back().sizes) {
      models_.back().feasible.push_back(std::pow(options_.feasible_quantile, 1.0 / k));
      models_.back().safe.push_back(std::pow(kSafeQuantile, 1.0 / k));
      models_.back().middle.push_back(std::pow(0.5, 1.0 / k));
    }
  }
  void enter(Held& held, uint64_t /*now_ns*/) override {
    models_[held.request.model].order.insert(key(held));
  }
  void leave(Held& held) override { models_[held.request.model].order.erase(key(held)); }
  // A request with later deadlines is not lost with its first.
  uint64_t expire(uint64_t now_ns) override {
    uint64_t first = kNever;
    for (Model& model : models_) {
      size_t stepped = 0;
      for (auto at = model.order.begin(); at != model.order.end() && stepped < kLook;) {
        if (at->deadline_ns > now_ns) {
          first = std::min(first, at->deadline_ns);
          break;
        }
        if (!may_drop()) break;
        const Key each = *at;
        if (each.stepped) {
          ++stepped;
          ++at;
          continue;
        }
        drop(each.id, DropReason::kExpired);
        at = model.order.lower_bound(each);
      }
    }
    return first;
  }
  // Refuses at the door what is almost sure to miss even if it ran at once and alone.
  base::Status admit(const Held& held, uint64_t now_ns) override {
    GPUSHARE_RETURN_IF_ERROR(BatcherBase::admit(held, now_ns));
    refresh(held.request.model);
    const double slack = static_cast<double>(held.request.deadline_ns - now_ns);
    const Knowledge::Model& known = knowledge_.model(held.request.model);
    if (!hopeless(known, held.application, slack) || !held.request.later_steps.empty())
      return base::ok_status();
    const BatchTimeModel& time = known.time;
    return base::Status(
        GPUSHARE_TIMED_OUT,
        base::format(
            "request %llu of application %u has %.3f ms to its deadline; alone and at once it would take "
            "%.3f ms "
            "at the least",
            static_cast<unsigned long long>(held.request.id), held.request.application, slack / 1e6,
            time.duration_ns(1, known.alone(held.application).min_ns()) / 1e6));
  }
  void batch_finished(const Flight& flight, uint64_t device_ns, uint64_t /*now_ns*/) override {
    constexpr double kKeep = 1 - 1.0 / 64;  // about the last 64 batches
    if (device_ns == 0) return;
    won_ = won_ * kKeep + flight.won;
    busy_ns_ = busy_ns_ * kKeep + static_cast<double>(device_ns);
  }
  double price_per_ns() const override { return scarcity_ * options_.opportunity * goodput(); }

 private:
  // Recent gain of the device per nanosecond of work.
  double goodput() const { return busy_ns_ > 0 ? won_ / busy_ns_ : 0; }

  static constexpr double kMargin = 1.2;  // a request cannot wait with less slack than this times its mean
  static constexpr double kSafeQuantile = 0.95;
  // Requests that a decision looks at. In a longer queue these are the kEarliest first deadlines and kSegments stretches
  // of kStretch at slacks in geometric progression: under overload the earliest deadlines can bear small batches only,
  // and a decision that saw no others would serve less the more it was allowed to hold.
  static constexpr size_t kEarliest = 128, kSegments = 24, kStretch = 16;
  static constexpr size_t kLook = kEarliest + kSegments * kStretch;
  // Stretches are longer where the largest batch is, so that it can be filled.
  static size_t stretch_for(size_t most) {
    return std::max(kStretch, (most - std::min(most, kEarliest) + kSegments - 1) / kSegments);
  }
  static constexpr size_t kModels = 16;
  static constexpr size_t kCaps = 16;    // length classes weighed as the longest of a batch
  static constexpr uint32_t kDepth = 2;  // so many times the largest batch are kept by cost

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
  // Quantiles of an application by which a batch size asks slack of its members. A request that bears the largest size asks
  // for no more than lies in its first cache line.
  struct alignas(64) Quantiles {
    struct OfSize {
      double bears_ns;  // the duration of a batch with feasible_ns
      double feasible_ns, safe_ns;
      double share_ns;  // least time a request in batches of sizes up to this one
    };
    uint64_t revision = 0, time_version = 0;
    double largest_bears_ns = 0, largest_share_ns = 0;  // of the last of sizes
    std::vector<OfSize> sizes;                          // by index into Model::sizes
    // The least device time of the request in batches that it bears.
    double share_ns(double slack_ns) const {
      if (slack_ns >= largest_bears_ns) return largest_share_ns;
      size_t s = sizes.size() - 1;
      while (s > 0 && sizes[s].bears_ns > slack_ns) --s;
      return sizes[s].share_ns;
    }
  };
  struct Model {
    uint64_t version = 0;
    absl::btree_set<Key> order;
    Grid grid;
    std::vector<uint32_t> sizes;
    double backlog_ns = 0;  // device time that the pending take, when last looked at
    std::vector<double> feasible, safe,
        middle;  // by index into sizes: the quantile of one whose k-th power is asked for
    std::vector<Quantiles> quantiles;  // by application
  };
  struct Pending {
    double slack_ns;
    double cost;
    RequestId id;
    float mean_ns;
    uint32_t application;
    uint32_t length_class;
    bool stepped;
    double share_ns = 0;             // device time that it takes as a member of a good batch
    double value = 0;                // of serving it now, see appraise
    const Grid::Row* row = nullptr;  // of the grid, at this version of it
    uint64_t grid = 0;
  };
  // A batch begins at this place of the allowed; its members are asked for so much slack.
  struct Start {
    size_t first;
    double bears_ns;
  };
  // A length class present: means within 3% of each other.
  struct LengthClass {
    uint32_t number = 0;
    uint32_t count = 0;        // of the pending
    uint32_t application = 0;  // the longest of it
    uint32_t cap = 0;          // its place among the classes weighed, or that of the class that stands for it
    float mean_ns = -1;
    float least_ns = INFINITY;  // the least mean of it, and of the classes that it stands for
  };
  struct Choice {
    double worth = -INFINITY;
    double wins = 0;  // cost of the members that are expected to finish in time
    double cost = 0;  // of all its members
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
  // The chances of a batch of k.
  struct Chances {
    Chances(const Grid& of, const BatchTimeModel& time, uint32_t k)
        : grid(of),
          fixed_ns(time.fixed_ns(k)),
          scale(1 / std::max(time.per_longest(k), 1e-12)),
          deviations(time.deviations()) {}
    // That it ends within the slack, over the deviations of batches.
    double within(const Grid::Maximum& longest, double slack_ns) const {
      if (deviations.empty()) return grid.at(longest, (slack_ns - fixed_ns) * scale);
      double sum = 0;
      for (double ratio : deviations) sum += grid.at(longest, (slack_ns / ratio - fixed_ns) * scale);
      return sum / static_cast<double>(deviations.size());
    }
    const Grid& grid;
    double fixed_ns, scale;
    std::span<const double> deviations;
  };
  // The time of a batch of one, if batches end as early as they ever do.
  struct Earliest {
    explicit Earliest(const BatchTimeModel& time) {
      const std::span<const double> deviations = time.deviations();
      const double ratio = deviations.empty() ? 1 : std::min(deviations.front(), 1.0);
      fixed_ns = ratio * time.fixed_ns(1);
      per_longest = ratio * time.per_longest(1);
    }
    double fixed_ns, per_longest;
  };
  // Whether it would almost surely miss if it ran alone now.
  static bool hopeless(const Earliest& alone, const Knowledge::Brief& brief, double slack_ns) {
    return brief.known() &&
           slack_ns < alone.fixed_ns + alone.per_longest * static_cast<double>(brief.least_ns);
  }
  static bool hopeless(const Knowledge::Model& known, uint32_t application, double slack_ns) {
    return hopeless(Earliest(known.time), known.brief(application), slack_ns);
  }
  // Means are not negative, so the bits of two floats order as the means do.
  static uint32_t bits(float mean_ns) { return std::bit_cast<uint32_t>(mean_ns); }
  // 32 classes an octave.
  static uint32_t length_class(uint32_t mean_bits) { return std::max(mean_bits, bits(1.0F)) >> (23 - 5); }
  // There are so many of durations from 1 ns on, the first of which is kFirstClass.
  static constexpr uint32_t kClasses = 4096, kFirstClass = std::bit_cast<uint32_t>(1.0F) >> (23 - 5);
  static uint32_t slot_of(uint32_t length_class) { return (length_class - kFirstClass) % kClasses; }

  void refresh(uint32_t index) {
    knowledge_.refresh(index);
    Model& model = models_[index];
    const Knowledge::Model& known = knowledge_.model(index);
    model.quantiles.resize(known.applications.size());
    if (model.version == known.version) return;
    model.version = known.version;
    model.grid.fit(known);
  }
  static const Quantiles& quantiles(Model& model, const Knowledge::Model& known, uint32_t application) {
    Quantiles& of = model.quantiles[application];
    const uint64_t revision = known.brief(application).revision;
    if (of.revision == revision && of.time_version == known.time.version() && !of.sizes.empty()) return of;
    const Distribution& alone = known.alone(application);
    of.sizes.clear();
    double least_share = INFINITY;
    for (size_t s = 0; s < model.sizes.size(); ++s) {
      const uint32_t k = model.sizes[s];
      const double feasible_ns = alone.quantile_ns(model.feasible[s]);
      least_share = std::min(least_share, known.time.duration_ns(k, alone.quantile_ns(model.middle[s])) / k);
      of.sizes.push_back({known.time.duration_ns(k, feasible_ns), feasible_ns,
                          alone.quantile_ns(model.safe[s]), least_share});
    }
    of.largest_bears_ns = of.sizes.back().bears_ns;
    of.largest_share_ns = of.sizes.back().share_ns;
    of.revision = revision;
    of.time_version = known.time.version();
    return of;
  }

  // The models that a decision weighs: all that have requests, up to kModels. Of more, half are those with the earliest deadlines, and
  // half those with the most requests.
  void choose_models() {
    considered_.clear();
    for (uint32_t model = 0; model < models_.size(); ++model)
      if (!models_[model].order.empty()) considered_.push_back(model);
    if (considered_.size() <= kModels) return;
    constexpr auto kHalf = static_cast<ptrdiff_t>(kModels / 2);
    const auto first = [this](uint32_t model) {
      return std::pair(models_[model].order.begin()->deadline_ns, model);
    };
    std::nth_element(considered_.begin(), considered_.begin() + kHalf, considered_.end(),
                     [&](uint32_t a, uint32_t b) { return first(a) < first(b); });
    const auto fewer = [this](uint32_t model) {
      return std::pair(UINT64_MAX - models_[model].order.size(), model);
    };
    std::nth_element(considered_.begin() + kHalf, considered_.begin() + 2 * kHalf, considered_.end(),
                     [&](uint32_t a, uint32_t b) { return fewer(a) < fewer(b); });
    considered_.resize(kModels);
    std::sort(considered_.begin(), considered_.end());
  }

  // The pending by slack, as far as a decision looks, without those whose chance is gone: they are dropped.
  void gather(uint32_t index, uint64_t now_ns) {
    Model& model = models_[index];
    const Knowledge::Model& known = knowledge_.model(index);
    pending_.clear();
    hopeless_.clear();
    const auto slack_of = [now_ns](const Key& key) {
      return static_cast<double>(key.deadline_ns) - static_cast<double>(now_ns);
    };
    const size_t longest = stretch_for(model.sizes.back()), look = kEarliest + kSegments * longest;
    // Slacks that are much alike are no reason to pass any over.
    const bool deep =
        model.order.size() > look && slack_of(*model.order.rbegin()) > 1.05 * slack_of(*model.order.begin());
    const Earliest alone(known.time);
    const size_t most_hopeless = drops_left();
    pending_.reserve(look);
    double jump_ns = 0, ratio = 1;
    size_t stretch = 0, count = 0;  // of this stretch, of all
    const auto end = model.order.end();
    for (auto at = model.order.begin(); at != end && hopeless_.size() < most_hopeless;) {
      if (deep && count >= kEarliest) {
        if (jump_ns == 0) {
          jump_ns = std::max(slack_of(*at), 1.0);
          ratio = std::max(1.001, std::pow(slack_of(*model.order.rbegin()) / jump_ns, 1.0 / kSegments));
        } else if (stretch >= longest) {
          stretch = 0;
          jump_ns *= ratio;
          if (jump_ns > slack_of(*at)) {
            Key to{};
            to.deadline_ns = base::add_saturated(now_ns, base::to_uint64(jump_ns));
            at = model.order.lower_bound(to);
            continue;
          }
        }
        ++stretch;
      }
      const Key& each = *at;
      ++at;
      const double slack = slack_of(each);
      const Knowledge::Brief& brief = known.brief(each.application);
      if (!each.stepped && (slack <= 0 || hopeless(alone, brief, slack))) {
        hopeless_.emplace_back(each.id, slack <= 0 ? DropReason::kExpired : DropReason::kHopeless);
        continue;
      }
      if (each.stepped && is_lost(each, known, slack)) {
        hopeless_.emplace_back(each.id, DropReason::kExpired);
        continue;
      }
      if (count == look) break;
      ++count;
      Pending& looked = pending_.emplace_back();
      looked.slack_ns = slack;
      looked.cost = static_cast<double>(each.cost);
      looked.id = each.id;
      looked.mean_ns = brief.mean_ns;
      looked.application = each.application;
      looked.length_class = length_class(bits(brief.mean_ns));
      looked.stepped = each.stepped;
    }
    for (const auto& [id, reason] : hopeless_) drop(id, reason);
    if (!may_drop()) pending_.clear();  // not all were looked at: next() is called again
  }
  // A request with later deadlines is lost when the last of them is.
  bool is_lost(const Key& each, const Knowledge::Model& known, double slack_ns) {
    double last = 0;
    for (const CostStep& step : find(each.id)->request.later_steps) last = std::max(last, step.after_ns);
    return slack_ns + last <= 0 || hopeless(known, each.application, slack_ns + last);
  }

  // Calls visit(i) for each bit i that is set, in order.
  template <typename Words, typename Visit>
  static void for_each_bit(const Words& words, const Visit& visit) {
    for (uint32_t word = 0; word < words.size(); ++word)
      for (uint64_t left = words[word]; left != 0; left &= left - 1)
        visit(word * 64 + static_cast<uint32_t>(std::countr_zero(left)));
  }
  // The length classes of the pending, shortest first; of more than kCaps as many, at equal steps of the pending.
  void find_classes() {
    classes_.clear();
    size_t present = 0;
    for (const Pending& each : pending_) {
      const uint32_t slot = slot_of(each.length_class);
      LengthClass& of = class_of_[slot];
      if (of.count == 0) {
        of = {};
        of.number = each.length_class;
        present_[slot / 64] |= uint64_t{1} << (slot % 64);
        ++present;
      }
      ++of.count;
      of.least_ns = std::min(of.least_ns, each.mean_ns);
      if (each.mean_ns > of.mean_ns) {
        of.mean_ns = each.mean_ns;
        of.application = each.application;
      }
    }
    size_t seen = 0;
    float least_ns = INFINITY;
    for_each_bit(present_, [&](uint32_t slot) {
      LengthClass& each = class_of_[slot];
      each.cap = static_cast<uint32_t>(classes_.size());
      seen += std::exchange(each.count, 0);
      least_ns = std::min(least_ns, each.least_ns);
      if (present > kCaps && seen * kCaps < (classes_.size() + 1) * pending_.size()) return;
      classes_.push_back(each);
      classes_.back().least_ns = least_ns;
      least_ns = INFINITY;
    });
    present_.fill(0);
    group_by_class();
  }
  // Puts the places of the pending into grouped_, by the class of classes_ that they belong to, and the ends of the groups
  // into ends_.
  void group_by_class() {
    ends_.assign(classes_.size() + 2, 0);
    const auto cap_of = [this](const Pending& each) { return class_of_[slot_of(each.length_class)].cap; };
    for (const Pending& each : pending_) ++ends_[cap_of(each) + 1];
    for (size_t i = 1; i < ends_.size(); ++i) ends_[i] += ends_[i - 1];
    grouped_.resize(pending_.size());
    for (uint32_t i = 0; i < pending_.size(); ++i) grouped_[ends_[cap_of(pending_[i])]++] = i;
  }

  // Adds the values of grouped_[first, end) to those by which batches are bounded.
  void bound_by_values(size_t first, size_t end) {
    const auto value = [this](uint32_t i) { return pending_[i].value; };
    by_value_.add(std::span(grouped_).subspan(first, end - first), value);
    most_of_.assign(1, 0);
    for (const Greatest::Item& each : by_value_.items()) most_of_.push_back(most_of_.back() + each.number);
  }
  // Allows the first `count` of grouped_: fills allowed_ with them, by slack, and by_cost_ with the costliest of them.
  void allow(size_t count) {
    const auto more = std::span(grouped_).subspan(allowed_.size(), count - allowed_.size());
    for (const uint32_t i : more) allows_[i / 64] |= uint64_t{1} << (i % 64);
    if (!uniform_) by_cost_.add(more, [this](uint32_t i) { return pending_[i].cost; });
    costliest_ = &by_cost_;
    allowed_.clear();
    for_each_bit(allows_, [this](uint32_t i) { allowed_.push_back(i); });
  }
  // The largest of the first `end` sizes whose best imaginable batch of `count` requests, with one whose mean is at least
  // least_ns, could be better than the best so far: its place + 1, or 0. A batch that was not weighed under a shorter cap
  // has such a request.
  size_t promising(const Model& model, const BatchTimeModel& time, size_t end, size_t count, float least_ns,
                   double price) const {
    for (size_t s = end; s-- > 0;) {
      const uint32_t k = model.sizes[s];
      if (k > count) continue;
      const double most = uniform_ ? k * most_value_ : most_of_[k];
      if (!bounded_ ||
          worth_of(most, time.duration_ns(k, static_cast<double>(least_ns)), price) > best_.worth)
        return s + 1;
    }
    return 0;
  }

  // What it is worth to serve each of the pending now rather than later. A request that cannot wait is worth its cost. One that
  // can is worth the device time that it would take later, at the price of time: a batch gains nothing by requests that
  // would be served anyway. Whether it can wait depends on the work that waits with it: the chance that it is lost later is
  // taken to fall exponentially with its slack beyond what it needs itself, over the time of the whole backlog.
  void appraise(uint32_t index, double price) {
    Model& model = models_[index];
    const Knowledge::Model& known = knowledge_.model(index);
    backlog_ns_ -= model.backlog_ns;
    model.backlog_ns = 0;
    for (Pending& each : pending_) {
      each.share_ns = quantiles(model, known, each.application).share_ns(each.slack_ns);
      model.backlog_ns += std::min(each.share_ns, std::max(each.slack_ns, 0.0));
    }
    model.backlog_ns *= static_cast<double>(model.order.size()) / static_cast<double>(pending_.size());
    backlog_ns_ = std::max(0.0, backlog_ns_) + model.backlog_ns;
    double urgent = 0;
    most_value_ = 0;
    for (Pending& each : pending_) {
      const double needs = kMargin * known.time.duration_ns(1, static_cast<double>(each.mean_ns));
      const double spare = each.slack_ns - needs;
      const double urgency = spare > 0 ? std::exp(-spare / std::max(backlog_ns_, 1.0)) : 1;
      each.value = urgency * each.cost + (1 - urgency) * std::min(price * each.share_ns, each.cost);
      urgent += urgency;
      most_value_ = std::max(most_value_, each.value);
    }
    constexpr double kKeep = 1 - 1.0 / 64;  // about the last 64 decisions
    scarcity_ = scarcity_ * kKeep + urgent / static_cast<double>(pending_.size()) * (1 - kKeep);
  }

  // A batch that pays for its time is worth what is left. One that does not is worth less than nothing, and of such the best
  // is the one that wins the most for its time: the largest remainder would be that of the least batch.
  static double worth_of(double gain, double mean_ns, double price) {
    const double left = gain - price * mean_ns;
    return left >= 0 ? left : -price * mean_ns / std::max(gain, 1e-300);
  }

  void consider(uint32_t index, uint64_t now_ns) {
    refresh(index);
    gather(index, now_ns);
    if (pending_.empty()) return;
    Model& model = models_[index];
    const Knowledge::Model& known = knowledge_.model(index);
    const double price = options_.opportunity * goodput(), cost = pending_.front().cost;
    appraise(index, price);
    bool uniform = true, stepped = false;
    for (const Pending& each : pending_) {
      uniform = uniform && each.cost == cost;
      stepped = stepped || each.stepped;
    }
    bounded_ = !stepped;
    uniform_ = uniform;
    find_classes();
    allows_.assign(pending_.size() / 64 + 1, 0);
    by_cost_.reset(size_t{kDepth} * model.sizes.back());
    by_value_.reset(model.sizes.back());
    allowed_.clear();
    uint32_t shorter = 0;  // the length class weighed before
    size_t count = 0;      // of the pending up to the class
    for (size_t i = 0; i < classes_.size(); ++i) {
      if (!uniform_) bound_by_values(count, ends_[i]);
      count = ends_[i];
      const float least_ns = classes_[i].least_ns;
      const size_t end = promising(model, known.time, model.sizes.size(), count, least_ns, price);
      if (end > 0) {
        allow(count);
        weigh_class(index, classes_[i], end, shorter, price);
      }
      shorter = classes_[i].number;
    }
  }
  // Weighs the batches of the requests up to the length class `cap`, of the first `end` sizes.
  void weigh_class(uint32_t index, const LengthClass& cap, size_t end, uint32_t shorter, double price) {
    Model& model = models_[index];
    const BatchTimeModel& time = knowledge_.model(index).time;
    const Quantiles& asked = quantiles(model, knowledge_.model(index), cap.application);
    bearing_[0] = bearing_[1] = 0;
    // Large sizes first: under load they are mostly the better, and then bound the rest.
    while ((end = promising(model, time, end, allowed_.size(), cap.least_ns, price)) > 0) {
      const uint32_t k = model.sizes[--end];
      find_starts(time, k, asked.sizes[end].feasible_ns, asked.sizes[end].safe_ns);
      uint32_t earliest = 0;  // of the costliest weighed last
      for (const Start& start : starts_) {
        const std::span<const uint32_t> members = std::span(allowed_).subspan(start.first, k);
        weigh(index, members, start.bears_ns, shorter, price);
        if (uniform_ || start.first + k == allowed_.size()) continue;
        // Costs differ: also the k costliest of those who can bear it, if they are not the same batch again.
        if (&start != &starts_.front() && members.front() <= earliest) continue;
        find_costliest(k, members.front());
        const auto [first, last] = std::minmax_element(costly_.begin(), costly_.end());
        earliest = *first;
        if (*last > members.back()) weigh(index, costly_, start.bears_ns, shorter, price);
      }
    }
  }

  // Where the batches of k begin that are weighed: at the first of the allowed that can bear one with a chance of
  // feasible_quantile, at the first that can with kSafeQuantile, and, where the two are not the
  // same, at the last place that leaves k. The last ones have the best chances: where requests are tight and their times
  // differ much, nobody can bear a batch that is worth while.
  void find_starts(const BatchTimeModel& time, uint32_t k, double feasible_ns, double safe_ns) {
    starts_.clear();
    const size_t last = allowed_.size() - k;
    const std::span<const double> deviations = time.deviations();
    const double bears_ns[] = {
        time.duration_ns(k, feasible_ns),
        time.duration_ns(k, safe_ns) * (deviations.empty() ? 1 : std::max(deviations.back(), 1.0))};
    const auto slack_of = [this](size_t place) { return pending_[allowed_[place]].slack_ns; };
    for (size_t chance = 0; chance < 2; ++chance) {
      size_t& at = bearing_[chance];
      while (at > 0 && slack_of(at - 1) >= bears_ns[chance]) --at;
      while (at < allowed_.size() && slack_of(at) < bears_ns[chance]) ++at;
      const size_t first = std::min(at, last);
      if (starts_.empty() || starts_.back().first < first) starts_.push_back({first, bears_ns[chance]});
    }
    if (bearing_[0] != bearing_[1] && starts_.back().first < last) starts_.push_back({last, bears_ns[1]});
  }

  // Puts the k costliest of the allowed from place `first` of the pending on into costly_. There are as many.
  void find_costliest(uint32_t k, uint32_t first) {
    costly_.clear();
    for (size_t i = 0; costly_.size() < k; ++i) {
      if (i == costliest_->items().size()) {  // those that are kept come too early
        all_by_cost_.reset(allowed_.size());
        all_by_cost_.add(allowed_, [this](uint32_t each) { return pending_[each].cost; });
        costliest_ = &all_by_cost_;
      }
      const uint32_t each = costliest_->items()[i].at;
      if (each >= first) costly_.push_back(each);
    }
  }

  // Compares one batch with the best so far.
  void weigh(uint32_t index, std::span<const uint32_t> members, double bears, uint32_t shorter,
             double price) {
    uint32_t longest = 0;  // the bits of its members' greatest mean
    double most = 0;       // what later deadlines may add is not bounded
    for (const uint32_t i : members) {
      const Pending& each = pending_[i];
      longest = std::max(longest, bits(each.mean_ns));
      most += each.stepped ? INFINITY : each.value;
    }
    if (length_class(longest) <= shorter) return;  // the same batch was weighed under a shorter cap
    Model& model = models_[index];
    const Knowledge::Model& known = knowledge_.model(index);
    const BatchTimeModel& time = known.time;
    const uint32_t k = static_cast<uint32_t>(members.size());
    const double least_ns = time.duration_ns(k, static_cast<double>(std::bit_cast<float>(longest)));
    if (worth_of(most, least_ns, price) <= best_.worth) return;
    take_rows(model.grid, known, members);
    model.grid.maximum(rows_, maximum_);
    const double mean = time.duration_ns(k, maximum_.mean);
    if (worth_of(most, mean, price) <= best_.worth) return;
    const Chances chances(model.grid, time, k);
    double cost = 0, gain = 0, wins = 0;
    for (uint32_t i : members) {
      const Pending& each = pending_[i];
      cost += each.cost;
      const double chance = chances.within(maximum_, each.slack_ns);
      gain += each.value * chance;
      wins += each.cost * chance;
      if (!each.stepped) continue;
      for (const CostStep& step : find(each.id)->request.later_steps)
        gain += step.cost * chances.within(maximum_, each.slack_ns + step.after_ns);
    }
    const double worth = worth_of(gain, mean, price);
    if (worth <= best_.worth) return;
    best_.worth = worth;
    best_.wins = wins;
    best_.cost = cost;
    best_.model = index;
    best_.mean_ns = mean;
    keep_members(members, bears);
    best_.full = k == model.sizes.back();
  }

  // The CDFs of the members, into rows_.
  void take_rows(Grid& of, const Knowledge::Model& known, std::span<const uint32_t> members) {
    for (uint64_t grid = 0; grid != of.version();) {  // again if a row widened it
      grid = of.version();
      rows_.clear();
      for (uint32_t i : members) {
        Pending& each = pending_[i];
        if (each.row == nullptr || each.grid != grid) {
          each.row = &of.row(known, each.application);
          each.grid = of.version();
        }
        rows_.push_back(each.row);
      }
    }
  }

  void keep_members(std::span<const uint32_t> members, double bears) {
    double least_slack = INFINITY;
    for (uint32_t i : members) least_slack = std::min(least_slack, pending_[i].slack_ns);
    best_.spare_ns = least_slack - bears;
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
  double won_ = 0, busy_ns_ = 0;
  double backlog_ns_ = 0;  // of all models
  double scarcity_ = 0;    // how urgent the pending lately were on average, 0 to 1
  bool deferring_ = false;
  uint64_t defer_end_ns_ = 0;
  // Scratch of a decision.
  Choice best_;
  std::vector<Pending> pending_;
  std::vector<std::pair<RequestId, DropReason>> hopeless_;
  std::vector<LengthClass> class_of_ = std::vector<LengthClass>(kClasses);
  std::vector<LengthClass> classes_;
  std::array<uint64_t, kClasses / 64> present_{};  // a bit for each place of class_of_
  std::vector<uint32_t> grouped_, ends_;           // see group_by_class
  std::vector<uint64_t> allows_;                   // a bit for each of the pending
  double most_value_ = 0;                          // of the pending
  bool uniform_ = false;                           // all pending cost the same
  bool bounded_ = false;  // no pending has later deadlines, so values are all that a batch can win
  // Where costs differ, of the allowed: the costliest, those worth the most, and what the first k of these are worth.
  Greatest by_cost_, by_value_;
  std::vector<double> most_of_;
  Greatest all_by_cost_;
  const Greatest* costliest_ = nullptr;  // by_cost_, or all_by_cost_ once a size asked for more
  std::vector<uint32_t> considered_;
  std::vector<uint32_t> allowed_, costly_;
  std::vector<Start> starts_;
  // The first of the allowed that can bear a batch of the size looked at last, with either chance. Smaller batches are
  // shorter, so these places move forward through all sizes.
  size_t bearing_[2] = {};
  std::vector<const Grid::Row*> rows_;
  Grid::Maximum maximum_;
};

}  // namespace

std::unique_ptr<Batcher> make_gpushare(const BatcherOptions& options) {
  return std::make_unique<Gpushare>(options);
}

}  // namespace gpushare::sched::slo
