// orloj.cpp: Orloj as printed (000, 4.3-4.4, algorithm 4.1): a queue per batch size, scores from the batch
// duration of the equal mix of all applications, feasible sets, and a full batch of the chosen size or none.
// BatcherOptions has the choices that the text leaves open. "orloj-own" scores a request by the duration of a batch of itself and
// others of the mix (its own application's distribution beside k - 1 draws of the mix), where "orloj" takes all k from
// the mix.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>

#include <absl/container/inlined_vector.h>

#include "base/saturate.hpp"
#include "sched/slo/batcher_base.hpp"
#include "sched/slo/score_queue.hpp"

namespace gpushare::sched::slo {
namespace {

class Orloj final : public BatcherBase {
 public:
  Orloj(const BatcherOptions& options, bool own)
      : BatcherBase(own ? "orloj-own" : "orloj", options), own_(own) {}

  Decision decide(uint64_t now_ns, uint32_t in_flight) override {
    Decision decision;
    if (in_flight > 0 || !may_drop()) return decision;
    Size* candidate = nullptr;
    uint32_t candidate_model = 0;
    for (uint32_t model = 0; model < models_.size(); ++model) {
      refresh(model);
      drop_late(model, now_ns);
      Size* of_model = nullptr;
      for (Size& size : models_[model].sizes) {
        const size_t held = size.by_deadline.size();
        if (options_.more_than_size ? held <= size.requests : held < size.requests) continue;
        if (of_model == nullptr || before(size, *of_model)) of_model = &size;
      }
      if (of_model == nullptr) continue;
      if (candidate == nullptr ||
          of_model->by_deadline.begin()->first < candidate->by_deadline.begin()->first) {
        candidate = of_model;
        candidate_model = model;
      }
    }
    if (candidate == nullptr) {
      // Nothing fills a size: ask again when the first of those waiting is too late for its last one.
      for (Model& model : models_)
        for (const Size& size : model.sizes) {
          if (size.by_deadline.empty()) continue;
          const double late = static_cast<double>(size.by_deadline.begin()->first) - size.estimate_ns;
          decision.wake_ns =
              std::min(decision.wake_ns, base::add_saturated(std::max(now_ns, base::to_uint64(late)), 1024));
        }
      return decision;
    }
    std::vector<RequestId> ids;
    while (ids.size() < candidate->requests) {
      const auto best = candidate->scores.best(now_ns);
      ids.push_back(best->id);
      // Out of this queue now, out of the others when the batch is made.
      candidate->scores.erase(best->handle);
      places_[best->id][candidate->index].in = false;
    }
    decision.batch = make_batch(candidate_model, std::move(ids), candidate->estimate_ns);
    return decision;
  }

 protected:
  void model_added(uint32_t model) override {
    models_.emplace_back();
    for (uint32_t requests : knowledge_.model(model).spec.batch_sizes) {
      Size size;
      size.requests = requests;
      size.index = models_.back().sizes.size();
      models_.back().sizes.push_back(std::move(size));
    }
  }
  uint64_t expire(uint64_t now_ns) override {
    uint64_t first = kNever;
    for (Model& model : models_)
      for (Size& size : model.sizes) {
        while (!size.by_deadline.empty() && size.by_deadline.begin()->first <= now_ns && may_drop())
          drop(size.by_deadline.begin()->second, DropReason::kExpired);
        if (!size.by_deadline.empty()) first = std::min(first, size.by_deadline.begin()->first);
      }
    return first;
  }
  void enter(Held& held, uint64_t /*now_ns*/) override {
    const Request& request = held.request;
    Model& model = models_[request.model];
    std::vector<CostStep> steps{{0, request.cost}};
    steps.insert(steps.end(), request.later_steps.begin(), request.later_steps.end());
    const ScoreQueue::ClassId of = cost_class(request.model, own_ ? held.application : 0, steps);
    Model::Class& entered = model.of_class[of];
    ++entered.waiting;
    if (entered.version != model.version) set_curves(request.model, of);
    held.tag = of;
    Places& places = places_[request.id];
    for (Size& size : model.sizes) {
      size.by_deadline.insert({request.deadline_ns, request.id});
      places.push_back({size.scores.insert(of, request.deadline_ns, request.id), true, true});
    }
  }
  void leave(Held& held) override {
    Model& model = models_[held.request.model];
    const auto at = places_.find(held.request.id);
    for (Size& size : model.sizes) {
      const Place& place = at->second[size.index];
      if (place.in) size.scores.erase(place.handle);
      if (place.feasible) size.by_deadline.erase({held.request.deadline_ns, held.request.id});
    }
    places_.erase(at);
    --model.of_class[held.tag].waiting;
  }

 private:
  struct Place {
    ScoreQueue::Handle handle;
    bool in;        // the score queue
    bool feasible;  // the deadline order
  };
  using Places = absl::InlinedVector<Place, 5>;
  struct Size {
    uint32_t requests = 0;
    size_t index = 0;
    double estimate_ns = 0;
    double mean_ns = 0;
    Distribution duration;
    ScoreQueue scores;
    absl::btree_set<KeyedOrder::Key> by_deadline;
  };
  struct Model {
    uint64_t version = 0;
    std::vector<Size> sizes;
    std::map<std::vector<double>, ScoreQueue::ClassId> classes;  // by application and cost function
    struct Class {
      uint32_t application;  // orloj-own
      std::vector<CostStep> steps;
      uint64_t version;    // of the model when its curves were computed
      size_t waiting = 0;  // without any, curves are computed when the next one comes
    };
    std::vector<Class> of_class;
    struct Own {
      uint64_t version = 0;
      Distribution duration;
      double mean_ns = 0;
    };
    std::map<std::pair<uint32_t, uint32_t>, Own> own;  // by application and batch size
  };

  bool before(const Size& a, const Size& b) const {
    const auto key = [](const Size& size) {
      return std::pair(size.by_deadline.begin()->first, size.requests);
    };
    return options_.size_order == SizeOrder::kDescending ? key(a) > key(b) : key(a) < key(b);
  }
  ScoreCurve curve(uint32_t index, const Size& size, const Model::Class& of) {
    if (!own_) return ScoreCurve(size.duration, size.mean_ns, options_.delay_rate_per_ms / 1e6, of.steps);
    const Model::Own& own = own_duration(index, size, of.application);
    return ScoreCurve(own.duration, own.mean_ns, options_.delay_rate_per_ms / 1e6, of.steps);
  }
  // The duration of a batch of one request of this application and size - 1 of the mix; computed once a version.
  const Model::Own& own_duration(uint32_t index, const Size& size, uint32_t application) {
    Model& model = models_[index];
    const Knowledge::Model& known = knowledge_.model(index);
    Model::Own& of = model.own[{application, size.requests}];
    if (of.version == known.version) return of;
    of.version = known.version;
    const Distribution& alone = known.alone(application);
    const double fixed_ns = known.time.fixed_ns(size.requests);
    const double factor = std::max(known.time.per_longest(size.requests), 1e-12);
    of.duration = maximum(alone, known.equal_alone, size.requests - 1, options_.bins);
    if (!of.duration.empty()) of.duration = of.duration.affine(fixed_ns, factor);
    of.mean_ns = fixed_ns + factor * expected_maximum_ns(alone, known.equal_alone, size.requests - 1);
    return of;
  }
  ScoreQueue::ClassId cost_class(uint32_t index, uint32_t application, const std::vector<CostStep>& steps) {
    Model& model = models_[index];
    std::vector<double> key{static_cast<double>(application)};
    for (const CostStep& step : steps) {
      key.push_back(step.after_ns);
      key.push_back(step.cost);
    }
    const auto [at, fresh] =
        model.classes.try_emplace(key, static_cast<ScoreQueue::ClassId>(model.of_class.size()));
    if (fresh) {
      model.of_class.push_back({application, steps, model.version, 0});
      for (Size& size : model.sizes) size.scores.add_class(curve(index, size, model.of_class.back()));
    }
    return at->second;
  }
  void refresh(uint32_t index) {
    knowledge_.refresh(index);
    Model& model = models_[index];
    const Knowledge::Model& known = knowledge_.model(index);
    if (model.version == known.version) return;
    model.version = known.version;
    for (Size& size : model.sizes) {
      const double fixed_ns = known.time.fixed_ns(size.requests);
      const double factor = std::max(known.time.per_longest(size.requests), 1e-12);
      const Distribution most =
          maximum(known.equal_alone, known.equal_alone, size.requests - 1, options_.bins);
      size.duration = most.affine(fixed_ns, factor);
      size.mean_ns =
          fixed_ns + factor * expected_maximum_ns(known.equal_alone, known.equal_alone, size.requests - 1);
      size.estimate_ns = options_.estimate_quantile > 0
                             ? size.duration.quantile_ns(options_.estimate_quantile)
                             : size.mean_ns;
    }
    for (ScoreQueue::ClassId of = 0; of < model.of_class.size(); ++of)
      if (model.of_class[of].waiting > 0) set_curves(index, of);
  }
  void set_curves(uint32_t index, ScoreQueue::ClassId of) {
    Model& model = models_[index];
    model.of_class[of].version = model.version;
    for (Size& size : model.sizes) (void)size.scores.set_curve(of, curve(index, size, model.of_class[of]));
  }
  void drop_late(uint32_t index, uint64_t now_ns) {
    Model& model = models_[index];
    for (Size& size : model.sizes)
      while (!size.by_deadline.empty() && may_drop()) {
        const auto [deadline, id] = *size.by_deadline.begin();
        if (static_cast<double>(now_ns) + size.estimate_ns <= static_cast<double>(deadline)) break;
        Places& places = places_[id];
        Place& place = places[size.index];
        if (place.in) size.scores.erase(place.handle);
        place.in = place.feasible = false;
        size.by_deadline.erase(size.by_deadline.begin());
        bool anywhere = false;
        for (const Place& other : places) anywhere |= other.feasible;
        if (!anywhere) drop(id, deadline <= now_ns ? DropReason::kExpired : DropReason::kHopeless);
      }
  }

  const bool own_;
  std::vector<Model> models_;
  base::FlatHashMap<RequestId, Places> places_;
};

}  // namespace

std::unique_ptr<Batcher> make_orloj(const BatcherOptions& options) {
  return std::make_unique<Orloj>(options, false);
}
std::unique_ptr<Batcher> make_orloj_own(const BatcherOptions& options) {
  return std::make_unique<Orloj>(options, true);
}

}  // namespace gpushare::sched::slo
