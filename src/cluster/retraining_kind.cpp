// The kind "retraining": streams whose models are retrained while they serve. Reads the document, asks ekya.hpp, writes the result.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <random>

#include "cluster/ekya.hpp"
#include "cluster/kinds.hpp"
#include "cluster/learn/learning_curve.hpp"

namespace gpushare::cluster {
namespace {

// Accuracies are points in the document, parts of 1 in the curve.
constexpr double kPoints = 100;

RetrainingProfile read_profile(Fields& fields) {
  RetrainingProfile profile;
  profile.epochs = fields.number("epochs", kPositive);
  fields.each("observed", 2, [&](Fields& inner, size_t) {
    const double epoch = inner.number("epoch", kPositive);
    profile.observed.emplace_back(epoch, inner.number("accuracy", {0, kPoints, false}) / kPoints);
  });
  return profile;
}

Stream read_stream(Fields& fields, Fields::Names& seen, size_t index) {
  Stream stream;
  stream.name = fields.name(seen, index);
  stream.accuracy = fields.number("accuracy", kNotNegative);
  const bool needed = fields.has("gpus_needed");
  const bool list = fields.has("inference");
  if (needed == list) fields.refuse_all("give one of gpus_needed and inference");
  if (needed) stream.inference.push_back({"", 1, fields.number("gpus_needed", kPositive)});
  if (list) {
    Fields::Names names;
    fields.each("inference", 1, [&](Fields& inner, size_t i) {
      InferenceConfiguration configuration;
      configuration.name = inner.name(names, i);
      configuration.accuracy_factor = inner.number("accuracy_factor", kNotNegative);
      configuration.gpus = inner.number("gpus", kPositive);
      stream.inference.push_back(std::move(configuration));
    });
  }
  fields.each("windows", 0, [&](Fields& window, size_t) {
    auto& configurations = stream.windows.emplace_back();
    Fields::Names names;
    window.each("configurations", 0, [&](Fields& inner, size_t i) {
      RetrainingConfiguration configuration;
      configuration.name = inner.name(names, i);
      configuration.accuracy = inner.number("accuracy", kNotNegative);
      configuration.gpu_seconds = inner.number("gpu_seconds", kPositive);
      if (inner.has("profile"))
        inner.with("profile", [&](Fields& profile) { configuration.profile = read_profile(profile); });
      configurations.push_back(std::move(configuration));
    });
  });
  return stream;
}

class RetrainingKindProblem final : public Problem {
 public:
  RetrainingKindProblem(Fields& document, const std::vector<Device>& devices) {
    problem_.devices = 0;
    for (const Device& device : devices) problem_.devices += device.speed;
    problem_.window_s = document.number("window_s", kPositive);
    problem_.quantum = document.number("quantum", kPositive);
    problem_.accuracy_floor = document.number("accuracy_floor", kNotNegative);
    Fields::Names seen;
    document.each("streams", 1, [&](Fields& fields, size_t index) {
      problem_.streams.push_back(read_stream(fields, seen, index));
    });
    if (document.has("run"))
      document.with("run", [&](Fields& inner) {
        profiler_error_ = inner.number_or("noise", {0, 10, false}, 0);
      });
  }

  base::Status solve(std::string_view choice, OrderedJson& result) override {
    GPUSHARE_ASSIGN_OR_RETURN(const RetrainingPlan plan, plan_retraining(problem_, scheduler_of(choice)));
    write(plan, result);
    return {};
  }

  base::Status play(std::string_view choice, const PlayOptions& options, OrderedJson& result,
                    std::vector<PlaySpan>* spans) override {
    const double noise = options.noise.value_or(profiler_error_);
    std::mt19937_64 random(options.seed);
    std::normal_distribution<double> normal(0, 1);
    RetrainingProblem told = problem_;
    for (Stream& stream : told.streams)
      for (auto& window : stream.windows)
        for (RetrainingConfiguration& configuration : window)
          configuration.accuracy = told_accuracy(configuration, [&] { return 1 + noise * normal(random); });
    GPUSHARE_ASSIGN_OR_RETURN(const RetrainingPlan played,
                              run_retraining(problem_, told, scheduler_of(choice)));
    write(played, result);
    if (spans == nullptr) return {};
    for (size_t w = 0; w < played.windows.size(); ++w) {
      const auto& phases = played.windows[w].phases;
      for (size_t p = 0; p < phases.size(); ++p)
        for (size_t v = 0; v < problem_.streams.size(); ++v) {
          const StreamShare& share = phases[p].shares[v];
          const double from = double(w) * problem_.window_s,
                       end = p + 1 < phases.size() ? phases[p + 1].start_s : problem_.window_s;
          spans->push_back(
              {problem_.streams[v].name,
               share.configuration < 0
                   ? base::format("inference %.3g", share.inference)
                   : base::format("inference %.3g, %s %.3g", share.inference,
                                  problem_.streams[v].windows[w][size_t(share.configuration)].name.c_str(),
                                  share.retraining),
               from + phases[p].start_s, from + end});
        }
    }
    return {};
  }

 private:
  // The accuracy that the profiler predicts. With observations of the first epochs it is their learning curve's value for the last epoch, each
  // observation with an error. Without observations it is the truth with an error.
  template <class F>
  static double told_accuracy(const RetrainingConfiguration& configuration, F&& error) {
    std::vector<std::pair<double, double>> observed = configuration.profile.observed;
    for (auto& [epoch, accuracy] : observed) accuracy = std::clamp(accuracy * error(), 0.0, 0.999);
    if (const auto curve = fit_learning_curve(observed))
      return kPoints * curve->accuracy(configuration.profile.epochs);
    return std::max(0.0, configuration.accuracy * error());
  }

  static RetrainingScheduler scheduler_of(std::string_view choice) {
    return choice == "none"      ? RetrainingScheduler::kNone
           : choice == "uniform" ? RetrainingScheduler::kUniform
           : choice == "thief"   ? RetrainingScheduler::kThief
           : choice == "ekya"    ? RetrainingScheduler::kEkya
                                 : RetrainingScheduler::kGpushare;
  }

  void write(const RetrainingPlan& plan, OrderedJson& result) const {
    OrderedJson windows = OrderedJson::array();
    for (size_t w = 0; w < plan.windows.size(); ++w) {
      const RetrainingWindow& window = plan.windows[w];
      OrderedJson shares = OrderedJson::object();
      for (size_t v = 0; v < problem_.streams.size(); ++v) {
        const Stream& stream = problem_.streams[v];
        const StreamShare& share = window.phases[0].shares[v];
        OrderedJson configuration;
        if (share.configuration >= 0) configuration = stream.windows[w][size_t(share.configuration)].name;
        shares[stream.name] = {{"inference", share.inference},
                               {"retraining", share.retraining},
                               {"configuration", std::move(configuration)}};
      }
      OrderedJson row = {{"accuracy", window.accuracy}, {"shares", std::move(shares)}};
      if (window.below_floor > 1e-9) row["below_floor"] = window.below_floor;
      windows.push_back(std::move(row));
    }
    result["windows"] = std::move(windows);
    result["mean_accuracy"] = plan.mean_accuracy;
  }

  RetrainingProblem problem_;
  double profiler_error_ = 0;
};

}  // namespace

const Kind& retraining_kind() {
  static const Kind kind = {
      "retraining",
      "scheduler",
      {"none", "uniform", "thief", "ekya", "gpushare"},
      {"gpushare"},
      {"none", "uniform", "thief", "ekya", "gpushare"},
      {"gpushare"},
      true,
      [](Fields& document, const std::vector<Device>& devices) -> std::unique_ptr<Problem> {
        return std::make_unique<RetrainingKindProblem>(document, devices);
      },
      R"({
        "properties": {
          "window_s": {"$ref": "#/$defs/positive"},
          "quantum": {"description": "Shares are multiples of it, in devices.", "$ref": "#/$defs/positive"},
          "accuracy_floor": {"description": "No stream's accuracy may fall below it at any time.", "$ref": "#/$defs/not_negative"},
          "streams": {"type": "array", "minItems": 1, "maxItems": 1000000, "items": {"$ref": "#/$defs/stream"}},
          "run": {
            "description": "For run: the profiler's error. Schedulers are told accuracies that differ from the document's by that relative standard deviation.",
            "type": "object", "properties": {"noise": {"type": "number", "minimum": 0, "maximum": 10}}, "additionalProperties": false
          }
        },
        "required": ["window_s", "quantum", "accuracy_floor", "streams"],
        "$defs": {
          "stream": {
            "description": "One of gpus_needed and inference: the devices that keep up with the stream.",
            "type": "object",
            "properties": {
              "name": {"$ref": "#/$defs/name"},
              "accuracy": {"description": "At the start of the first window.", "$ref": "#/$defs/not_negative"},
              "gpus_needed": {"$ref": "#/$defs/positive"},
              "inference": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/inference_configuration"}},
              "windows": {"type": "array", "items": {"$ref": "#/$defs/retraining_window"}}
            },
            "required": ["name", "accuracy", "windows"],
            "additionalProperties": false
          },
          "inference_configuration": {
            "type": "object",
            "properties": {
              "name": {"$ref": "#/$defs/name"},
              "accuracy_factor": {"$ref": "#/$defs/not_negative"},
              "gpus": {"$ref": "#/$defs/positive"}
            },
            "required": ["name", "accuracy_factor", "gpus"],
            "additionalProperties": false
          },
          "retraining_window": {
            "type": "object",
            "properties": {
              "configurations": {"type": "array", "items": {
                "type": "object",
                "properties": {
                  "name": {"$ref": "#/$defs/name"},
                  "accuracy": {"$ref": "#/$defs/not_negative"},
                  "gpu_seconds": {"$ref": "#/$defs/positive"},
                  "profile": {
                    "description": "For run: the accuracies that a profiler observed after the first epochs. Schedulers are told what a learning curve through them says of the last of epochs.",
                    "type": "object",
                    "properties": {
                      "epochs": {"$ref": "#/$defs/positive"},
                      "observed": {"type": "array", "minItems": 2, "items": {
                        "type": "object",
                        "properties": {"epoch": {"$ref": "#/$defs/positive"}, "accuracy": {"type": "number", "minimum": 0, "maximum": 100}},
                        "required": ["epoch", "accuracy"],
                        "additionalProperties": false
                      }}
                    },
                    "required": ["epochs", "observed"],
                    "additionalProperties": false
                  }
                },
                "required": ["name", "accuracy", "gpu_seconds"],
                "additionalProperties": false
              }}
            },
            "required": ["configurations"],
            "additionalProperties": false
          }
        }
      })"};
  return kind;
}

}  // namespace gpushare::cluster
