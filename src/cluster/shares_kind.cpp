// The kind "shares": one resource divided among jobs by their performance. Reads the document, asks cilantro.hpp, writes the result.
// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <string_view>
#include <unordered_map>

#include "cluster/cilantro.hpp"
#include "cluster/kinds.hpp"

namespace gpushare::cluster {
namespace {

UtilityJob read_job(Fields& fields, Fields::Names& seen, size_t index) {
  UtilityJob job;
  job.name = fields.name(seen, index);
  job.load = fields.number("load", kPositive);
  job.slo = fields.number("slo", kPositive);
  job.utility = UtilityShape(fields.one_of("utility", {"linear", "sqrt", "quadratic"}));
  const bool curve = fields.has("curve");
  const bool logistic = fields.has("logistic");
  if (curve == logistic) fields.refuse_all("give one of curve and logistic");
  if (curve) job.curve.points = fields.points("curve", kNotNegative, kNotNegative);
  if (curve && fields.ok() && job.curve.points.empty()) fields.refuse("curve", "give at least one point");
  if (logistic) {
    job.curve.logistic = true;
    fields.with("logistic", [&](Fields& inner) {
      job.curve.offset = inner.number("offset", {-1e6, 1e6, false});
    });
  }
  return job;
}

class SharesProblem final : public Problem {
 public:
  explicit SharesProblem(Fields& document) {
    problem_.capacity = int64_t(document.whole("capacity", 1, 1'000'000'000));
    Fields::Names seen;
    document.each("jobs", 1, [&](Fields& fields, size_t index) {
      problem_.jobs.push_back(read_job(fields, seen, index));
    });
    if (document.has("max_step")) problem_.max_step = int64_t(document.whole("max_step", 0, 1'000'000'000));
    if (!document.has("previous")) return;
    problem_.previous.assign(problem_.jobs.size(), 0);  // a job that is not listed held nothing
    std::unordered_map<std::string_view, size_t> index;
    for (size_t j = 0; j < problem_.jobs.size(); ++j) index.emplace(problem_.jobs[j].name, j);
    for (const auto& [name, units] : document.named_numbers("previous", {0, 1e9, false})) {
      const auto job = index.find(name);
      if (job == index.end()) {
        document.refuse("previous", "there is no job '" + name + "'");
      } else if (units != std::floor(units)) {
        document.refuse("previous", "job '" + name + "' holds a whole number of units");
      } else {
        problem_.previous[job->second] = int64_t(units);
      }
    }
  }

  base::Status solve(std::string_view choice, OrderedJson& result) override {
    const auto objective = choice == "sw"   ? ShareObjective::kSocialWelfare
                           : choice == "ew" ? ShareObjective::kEgalitarianWelfare
                                            : ShareObjective::kNoJustifiedComplaints;
    GPUSHARE_ASSIGN_OR_RETURN(const ShareResult shares, divide_shares(problem_, objective));
    OrderedJson allocation = OrderedJson::object();
    for (size_t j = 0; j < problem_.jobs.size(); ++j) allocation[problem_.jobs[j].name] = shares.units[j];
    result["allocation"] = std::move(allocation);
    result["welfare"] = shares.welfare;
    result["egalitarian"] = shares.egalitarian;
    result["fairness"] = shares.fairness;
    result["useful"] = shares.useful;
    return {};
  }

 private:
  ShareProblem problem_;
};

}  // namespace

const Kind& shares_kind() {
  static const Kind kind = {"shares",
                            "objective",
                            {"sw", "ew", "njc"},
                            {"sw", "ew", "njc"},
                            false,
                            [](Fields& document, const std::vector<Device>&) -> std::unique_ptr<Problem> {
                              return std::make_unique<SharesProblem>(document);
                            },
                            R"({
        "properties": {
          "capacity": {"description": "Whole units to divide.", "type": "integer", "minimum": 1, "maximum": 1000000000},
          "jobs": {"type": "array", "minItems": 1, "maxItems": 1000000, "items": {"$ref": "#/$defs/utility_job"}},
          "previous": {"description": "Units that each job held; one that is not listed held none.", "type": "object",
                       "additionalProperties": {"type": "integer", "minimum": 0}},
          "max_step": {"description": "With previous: most units by which a share may change.", "type": "integer", "minimum": 0}
        },
        "required": ["capacity", "jobs"],
        "$defs": {
          "utility_job": {
            "description": "One of curve and logistic. curve: [units per unit of load, performance], linear between points, constant beyond the last, 0 below the first. logistic: 1 / (1 + exp(-(units / load - offset))). The utility is min(performance, slo) / slo to the power 1, 0.5 or 2.",
            "type": "object",
            "properties": {
              "name": {"$ref": "#/$defs/name"},
              "load": {"$ref": "#/$defs/positive"},
              "slo": {"$ref": "#/$defs/positive"},
              "utility": {"enum": ["linear", "sqrt", "quadratic"]},
              "curve": {"type": "array", "minItems": 1, "items": {
                "type": "array", "prefixItems": [{"$ref": "#/$defs/not_negative"}, {"$ref": "#/$defs/not_negative"}],
                "minItems": 2, "maxItems": 2}},
              "logistic": {"type": "object", "properties": {"offset": {"type": "number"}}, "required": ["offset"],
                           "additionalProperties": false}
            },
            "required": ["name", "load", "slo", "utility"],
            "additionalProperties": false
          }
        }
      })"};
  return kind;
}

}  // namespace gpushare::cluster
