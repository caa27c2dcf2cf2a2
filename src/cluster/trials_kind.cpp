// The kind "trials": groups of tuning trials. Reads the document, asks fluid.hpp, writes the result.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <random>

#include "cluster/fluid.hpp"
#include "cluster/json.hpp"
#include "cluster/kinds.hpp"

namespace gpushare::cluster {
namespace {

Trial read_trial(Fields& fields, Fields::Names& seen, size_t index) {
  Trial trial;
  trial.name = fields.name(seen, index);
  fields.about("budget_s", "On one device of speed 1.");
  fields.about("alpha",
               "On 1/p of a device the trial takes budget_s x alpha^(p-1); without alpha, p x budget_s.");
  fields.about("beta", "On w devices the trial takes budget_s / w x beta^(w-1).");
  trial.budget_s = fields.number("budget_s", kPositive);
  if (fields.has("alpha")) trial.alpha = fields.number("alpha", {1, 1000, false});
  trial.beta = fields.number_or("beta", {1, 1000, false}, 1);
  trial.memory_bytes = fields.whole_or("memory_bytes", 0, uint64_t{1} << 50, 0);
  return trial;
}

class TrialsProblem final : public Problem {
 public:
  TrialsProblem(Fields& document, const std::vector<Device>& devices) {
    for (const Device& device : devices) {
      devices_.push_back({device.speed, device.memory_bytes});
      ids_.push_back(device.id);
    }
    document.about("run", "For run.");
    document.about("max_packed", "Most trials on one device.");
    document.about("max_workers", "Most devices for one trial.");
    document.about("change_cost_s", "Lost whenever the devices of a started trial change.");
    if (document.has("run"))
      document.with("run", [&](Fields& inner) {
        inner.about("noise", "The relative standard deviation of what a trial really takes from its budget.");
        noise_ = inner.number_or("noise", {0, 10, false}, 0);
      });
    limits_.max_packed = int(document.whole("max_packed", 1, 64));
    limits_.max_workers = int(document.whole("max_workers", 1, 4096));
    limits_.change_cost_s = document.number_or("change_cost_s", kNotNegative, 0);
    Fields::Names seen;  // of all groups: the result names trials
    document.each("groups", 1, [&](Fields& fields, size_t) {
      TrialGroup group;
      group.arrival_s = fields.number("arrival_s", kNotNegative);
      fields.each("trials", 0, [&](Fields& inner, size_t index) {
        group.trials.push_back(read_trial(inner, seen, index));
      });
      groups_.push_back(std::move(group));
    });
  }

  base::Status solve(std::string_view choice, OrderedJson& result) override {
    write(plan_trials(devices_, limits_, groups_, scheduler_of(choice)), result);
    return {};
  }

  base::Status play(std::string_view choice, const PlayOptions& options, OrderedJson& result,
                    std::vector<PlaySpan>* spans) override {
    const double noise = options.noise.value_or(noise_);
    std::mt19937_64 random(options.seed);
    std::normal_distribution<double> normal(0, 1);
    std::vector<double> scales;
    std::vector<TrialGroup> truth = groups_;
    std::vector<const std::string*> names;
    for (TrialGroup& group : truth)
      for (Trial& trial : group.trials) {
        scales.push_back(std::max(0.1, 1 + noise * normal(random)));
        trial.budget_s *= scales.back();
        names.push_back(&trial.name);
      }
    std::vector<TrialSpan> held;
    TrialResult played = play_trials(devices_, limits_, groups_, scheduler_of(choice), scales,
                                     spans == nullptr ? nullptr : &held);
    played.bound_s = trials_bound(devices_, limits_, truth);
    write(played, result);
    if (spans == nullptr) return {};
    for (const TrialSpan& span : held)
      spans->push_back({"device " + ids_[size_t(span.device)],
                        span.width > 0 ? *names[span.trial]
                                       : base::format("%s (1/%d)", names[span.trial]->c_str(), -span.width),
                        span.begin_s, span.end_s});
    return {};
  }

 private:
  static TrialScheduler scheduler_of(std::string_view choice) {
    return choice == "fifo"            ? TrialScheduler::kFifo
           : choice == "static-fluid"  ? TrialScheduler::kStaticFluid
           : choice == "dynamic-fluid" ? TrialScheduler::kDynamicFluid
                                       : TrialScheduler::kGpushare;
  }

  void write(const TrialResult& plan, OrderedJson& result) const {
    OrderedJson::object_t shares;  // appended to, not searched: names are told apart already
    OrderedJson rejected = OrderedJson::array();
    size_t row = 0;
    for (const TrialGroup& group : groups_) {
      for (const Trial& trial : group.trials) {
        const TrialResult::Row& got = plan.trials[row++];
        if (got.rejected) {
          rejected.push_back(object(
              {{"trial", trial.name}, {"reason", "memory_bytes is beyond the memory of every device"}}));
        } else {
          shares.OrderedJson::object_t::Container::emplace_back(trial.name, size_of(got.width));
        }
      }
    }
    result["makespan_s"] = plan.makespan_s;
    result["bound_s"] = plan.bound_s;
    result["shares"] = std::move(shares);
    result["utilization"] = plan.utilization;
    if (!rejected.empty()) result["rejected"] = std::move(rejected);
  }

  std::vector<std::string> ids_;
  double noise_ = 0;
  std::vector<TrialDevice> devices_;
  TrialLimits limits_;
  std::vector<TrialGroup> groups_;
};

}  // namespace

const Kind& trials_kind() {
  static const Kind kind = {
      "trials",
      "scheduler",
      {"fifo", "static-fluid", "dynamic-fluid", "gpushare"},
      {"gpushare"},
      {"fifo", "static-fluid", "dynamic-fluid", "gpushare"},
      {"gpushare"},
      true,
      [](Fields& document, const std::vector<Device>& devices) -> std::unique_ptr<Problem> {
        return std::make_unique<TrialsProblem>(document, devices);
      }};
  return kind;
}

}  // namespace gpushare::cluster
