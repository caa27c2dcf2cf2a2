// The kind "trials": groups of tuning trials. Reads the document, asks fluid.hpp, writes the result.
// SPDX-License-Identifier: Apache-2.0
#include "cluster/fluid.hpp"
#include "cluster/kinds.hpp"

namespace gpushare::cluster {
namespace {

Trial read_trial(Fields& fields, Fields::Names& seen, size_t index) {
  Trial trial;
  trial.name = fields.name(seen, index);
  trial.budget_s = fields.number("budget_s", kPositive);
  if (fields.has("alpha")) trial.alpha = fields.number("alpha", {1, 1000, false});
  trial.beta = fields.number_or("beta", {1, 1000, false}, 1);
  trial.memory_bytes = fields.whole_or("memory_bytes", 0, uint64_t{1} << 50, 0);
  return trial;
}

class TrialsProblem final : public Problem {
 public:
  TrialsProblem(Fields& document, const std::vector<Device>& devices) {
    for (const Device& device : devices) devices_.push_back({device.speed, device.memory_bytes});
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
    const auto scheduler = choice == "fifo"            ? TrialScheduler::kFifo
                           : choice == "static-fluid"  ? TrialScheduler::kStaticFluid
                           : choice == "dynamic-fluid" ? TrialScheduler::kDynamicFluid
                                                       : TrialScheduler::kGpushare;
    const TrialResult plan = plan_trials(devices_, limits_, groups_, scheduler);
    OrderedJson shares = OrderedJson::object();
    OrderedJson rejected = OrderedJson::array();
    size_t row = 0;
    for (const TrialGroup& group : groups_) {
      for (const Trial& trial : group.trials) {
        const TrialResult::Row& got = plan.trials[row++];
        if (got.rejected) {
          rejected.push_back(
              {{"trial", trial.name}, {"reason", "memory_bytes is beyond the memory of every device"}});
        } else {
          shares[trial.name] = size_of(got.width);
        }
      }
    }
    result["makespan_s"] = plan.makespan_s;
    result["bound_s"] = plan.bound_s;
    result["shares"] = std::move(shares);
    result["utilization"] = plan.utilization;
    if (!rejected.empty()) result["rejected"] = std::move(rejected);
    return {};
  }

 private:
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
      true,
      [](Fields& document, const std::vector<Device>& devices) -> std::unique_ptr<Problem> {
        return std::make_unique<TrialsProblem>(document, devices);
      },
      R"({
        "properties": {
          "groups": {"type": "array", "minItems": 1, "maxItems": 1000000, "items": {"$ref": "#/$defs/trial_group"}},
          "max_packed": {"description": "Most trials on one device.", "type": "integer", "minimum": 1, "maximum": 64},
          "max_workers": {"description": "Most devices for one trial.", "type": "integer", "minimum": 1, "maximum": 4096},
          "change_cost_s": {"description": "Lost whenever the devices of a started trial change.", "$ref": "#/$defs/not_negative"}
        },
        "required": ["groups", "max_packed", "max_workers"],
        "$defs": {
          "trial_group": {
            "type": "object",
            "properties": {
              "arrival_s": {"$ref": "#/$defs/not_negative"},
              "trials": {"type": "array", "maxItems": 1000000, "items": {"$ref": "#/$defs/trial"}}
            },
            "required": ["arrival_s", "trials"],
            "additionalProperties": false
          },
          "trial": {
            "description": "budget_s is the time on one device of speed 1. With alpha, the time on 1/p of a device is budget_s x alpha^(p-1); without, p x budget_s. On w devices it is budget_s / w x beta^(w-1).",
            "type": "object",
            "properties": {
              "name": {"$ref": "#/$defs/name"},
              "budget_s": {"$ref": "#/$defs/positive"},
              "alpha": {"type": "number", "minimum": 1, "maximum": 1000},
              "beta": {"type": "number", "minimum": 1, "maximum": 1000},
              "memory_bytes": {"type": "integer", "minimum": 0}
            },
            "required": ["name", "budget_s"],
            "additionalProperties": false
          }
        }
      })"};
  return kind;
}

}  // namespace gpushare::cluster
