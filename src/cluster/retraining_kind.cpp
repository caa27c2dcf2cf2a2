// The kind "retraining": streams whose models are retrained while they serve. Reads the document, asks ekya.hpp, writes the result.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <random>

#include "cluster/ekya.hpp"
#include "cluster/json.hpp"
#include "cluster/kinds.hpp"
#include "cluster/micro_profiler.hpp"

namespace gpushare::cluster {
namespace {

// Accuracies are points in the document, parts of 1 in the curve.
constexpr double kAllPoints = 100;

RetrainingProfile read_profile(Fields& fields) {
  RetrainingProfile profile;
  fields.about(nullptr,
               "The accuracies that a profiler observed after the first epochs. Schedulers are told what a "
               "learning curve through "
               "them says of the last epoch. fixed, thief, ekya and gpushare wait for that: profiling takes "
               "gpu_seconds x data_share x "
               "the part of the epochs that is observed.");
  fields.about("data_share", "The part of the configuration's data that the epochs were run on.");
  profile.epochs = fields.number("epochs", kPositive);
  profile.data_share = fields.number_or("data_share", {0, 1, true}, profile.data_share);
  fields.each("observed", 2, [&](Fields& inner, size_t) {
    const double epoch = inner.number("epoch", kPositive);
    profile.observed.emplace_back(epoch, inner.number("accuracy", {0, kAllPoints, false}) / kAllPoints);
  });
  return profile;
}

Stream read_stream(Fields& fields, Fields::Names& seen, size_t index) {
  Stream stream;
  stream.name = fields.name(seen, index);
  fields.about("accuracy", "At the start of the first window, in points.");
  fields.about("gpus_needed", "Devices that keep up with the stream.");
  fields.about("inference", "Configurations, in place of gpus_needed.");
  stream.accuracy = fields.number("accuracy", kNotNegative);
  fields.exactly_one({"gpus_needed", "inference"});
  if (fields.has("gpus_needed")) stream.inference.push_back({"", 1, fields.number("gpus_needed", kPositive)});
  if (fields.has("inference")) {
    Fields::Names names;
    fields.each("inference", 1, [&](Fields& inner, size_t i) {
      InferenceConfiguration configuration;
      configuration.name = inner.name(names, i);
      inner.about("gpus", "Devices that keep up with the stream.");
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
      inner.about("accuracy", "At the end of the retraining, in points.");
      inner.about("profile", "For run.");
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
    for (const Device& device : devices)
      if (!device.joins_later) problem_.devices += device.speed;
    read_changes(devices);
    document.about("quantum", "In devices: shares are multiples of it.");
    document.about("accuracy_floor", "In points: no stream's accuracy may fall below it at any time.");
    document.about("run", "For run.");
    problem_.window_s = document.number("window_s", kPositive);
    problem_.quantum = document.number("quantum", kPositive);
    problem_.accuracy_floor = document.number("accuracy_floor", kNotNegative);
    Fields::Names seen;
    document.each("streams", 1, [&](Fields& fields, size_t index) {
      problem_.streams.push_back(read_stream(fields, seen, index));
    });
    profiling_devices_ = problem_.devices / 2;
    if (document.has("run"))
      document.with("run", [&](Fields& inner) {
        inner.about("noise",
                    "The profiler's error: schedulers are told accuracies that differ from the document's by "
                    "that relative "
                    "standard deviation.");
        profiler_error_ = inner.number_or("noise", {0, 10, false}, 0);
        if (inner.has("profiler"))
          inner.with("profiler", [&](Fields& fields) {
            fields.about("devices",
                         "Profiling runs on so many at the start of each window; half of all unless given. "
                         "Inference has the rest.");
            fields.about("drop_fraction",
                         "The part of a stream's configurations, told apart by name, that is dropped after "
                         "every drop_every "
                         "windows: those that are furthest from the Pareto front of time and accuracy and "
                         "were never on it.");
            if (fields.has("devices")) profiling_devices_ = fields.number("devices", kPositive);
            profiler_.drop_fraction = fields.number_or("drop_fraction", kFraction, 0);
            profiler_.drop_every = fields.whole_or("drop_every", 1, kMaxElements, profiler_.drop_every);
          });
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
    ProfilerReport report;
    RetrainingProblem truth = problem_;
    truth.devices = most_up_;
    const RetrainingProblem told = profile_retraining(
        truth, profiler_, [&] { return 1 + noise * normal(random); }, report);
    GPUSHARE_ASSIGN_OR_RETURN(
        const RetrainingPlan played,
        run_retraining(truth, told, scheduler_of(choice), {report.gpu_seconds, profiling_devices_}, up_));
    write(played, result);
    if (report.profiled > 0) {
      double seconds = 0;
      for (const RetrainingWindow& window : played.windows) seconds += window.profiling_s;
      result["profiler"] = object({{"profiled", report.profiled},
                                   {"median_error", report.median_error},
                                   {"mean_s", seconds / double(played.windows.size())}});
    }
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
  void read_changes(const std::vector<Device>& devices) {
    for (const DeviceChange& change : device_changes(devices)) {
      if (up_.empty() || up_.back().from_s < change.at_s) up_.push_back({change.at_s, 0});
      up_.back().devices = 0;
      for (const Device& device : devices)
        if (is_up(device, change.at_s)) up_.back().devices += device.speed;
    }
    most_up_ = problem_.devices;
    for (const DevicesUp& up : up_) most_up_ = std::max(most_up_, up.devices);
  }

  static RetrainingScheduler scheduler_of(std::string_view choice) {
    return choice == "none"      ? RetrainingScheduler::kNone
           : choice == "uniform" ? RetrainingScheduler::kUniform
           : choice == "fixed"   ? RetrainingScheduler::kFixed
           : choice == "thief"   ? RetrainingScheduler::kThief
           : choice == "ekya"    ? RetrainingScheduler::kEkya
                                 : RetrainingScheduler::kGpushare;
  }

  void write(const RetrainingPlan& plan, OrderedJson& result) const {
    OrderedJson windows = OrderedJson::array();
    std::vector<double> accuracy;  // at the window's start
    for (const Stream& stream : problem_.streams) accuracy.push_back(stream.accuracy);
    for (size_t w = 0; w < plan.windows.size(); ++w) {
      const RetrainingWindow& window = plan.windows[w];
      OrderedJson beyond = OrderedJson::array();  // whose floor no share keeps
      for (size_t v = 0; v < problem_.streams.size(); ++v) {
        const double most = accuracy[v] * inference_factor(problem_.streams[v], problem_.devices);
        if (most < problem_.accuracy_floor * (1 - 1e-9)) beyond.push_back(problem_.streams[v].name);
        accuracy[v] = window.end_accuracy[v];
      }
      OrderedJson shares = OrderedJson::object();
      for (size_t v = 0; v < problem_.streams.size(); ++v) {
        const Stream& stream = problem_.streams[v];
        // The phase that was decided first, after profiling where the window has time left.
        const auto decided =
            std::find_if(window.phases.begin(), window.phases.end(),
                         [&](const RetrainingPhase& phase) { return phase.start_s >= window.profiling_s; });
        const StreamShare& share =
            (decided == window.phases.end() ? window.phases.front() : *decided).shares[v];
        OrderedJson configuration;
        if (share.configuration >= 0) configuration = stream.windows[w][size_t(share.configuration)].name;
        shares[stream.name] = object({{"inference", share.inference},
                                      {"retraining", share.retraining},
                                      {"configuration", std::move(configuration)}});
      }
      OrderedJson row = object({{"accuracy", window.accuracy}, {"shares", std::move(shares)}});
      if (window.below_floor > 1e-9) row["below_floor"] = window.below_floor;
      if (!beyond.empty()) row["floor_out_of_reach"] = std::move(beyond);
      windows.push_back(std::move(row));
    }
    result["windows"] = std::move(windows);
    result["mean_accuracy"] = plan.mean_accuracy;
  }

  RetrainingProblem problem_;
  std::vector<DevicesUp> up_;
  double most_up_ = 0;  // problem_.devices, or more where devices join later
  double profiler_error_ = 0, profiling_devices_ = 0;
  ProfilerOptions profiler_;
};

}  // namespace

const Kind& retraining_kind() {
  static const Kind kind = {
      "retraining",
      "scheduler",
      {"none", "uniform", "fixed", "thief", "ekya", "gpushare"},
      {"gpushare"},
      {"none", "uniform", "fixed", "thief", "ekya", "gpushare"},
      {"gpushare"},
      true,
      [](Fields& document, const std::vector<Device>& devices) -> std::unique_ptr<Problem> {
        return std::make_unique<RetrainingKindProblem>(document, devices);
      },
      true};
  return kind;
}

}  // namespace gpushare::cluster
