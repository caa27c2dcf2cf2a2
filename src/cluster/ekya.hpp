// ekya.hpp: retraining beside inference (Ekya; thesis 002, chapter 2): per window and stream a retraining configuration
// or none, an inference configuration, and two shares in quanta of the devices, for the greatest accuracy averaged over
// the window and never below a floor.
//
// Rules: during a retraining, inference runs at the old accuracy x the best of factor x min(1, share / gpus); when the
// retraining ends, its share goes to its own stream's inference and the new accuracy holds. A later window starts from
// the accuracy reached.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/status.hpp"

namespace gpushare::cluster {

struct InferenceConfiguration {
  std::string name;
  double accuracy_factor = 1;  // of the model's accuracy, with all the devices that it needs
  double gpus = 1;             // > 0, devices to keep up with the stream
};

// A configuration's first epochs on a part of its data, as a profiler sees them.
struct RetrainingProfile {
  double epochs = 0;  // of the whole retraining
  std::vector<std::pair<double, double>>
      observed;             // epoch, accuracy as a part of 1; empty: there is no profile
  double data_share = 0.1;  // of the configuration's data, that the epochs were run on
};

struct RetrainingConfiguration {
  std::string name;
  double accuracy = 0;     // reached at the end
  double gpu_seconds = 0;  // > 0, on a whole device of speed 1
  RetrainingProfile profile = {};
  bool offered = true;  // false: no scheduler may choose it

  // GPU time to profile the configuration. It grows with epochs and data: the epochs that are observed, on a part of the data.
  double profiling_gpu_seconds() const;
};

struct Stream {
  std::string name;
  double accuracy = 0;                            // at the start of the first window
  std::vector<InferenceConfiguration> inference;  // at least one
  std::vector<std::vector<RetrainingConfiguration>> windows;
};

struct RetrainingProblem {
  double devices = 1;  // their speeds together
  double window_s = 120;
  double quantum = 0.1;  // of a device
  double accuracy_floor = 0;
  std::vector<Stream> streams;

  size_t windows() const;
  int64_t quanta() const;  // whole quanta in the devices
  int64_t quanta_in(double of_devices) const;
};

// kThief is Algorithm 1 as printed, kEkya the best fixed shares; both are asked again whenever a retraining ends, as the source
// does. kFixed is kEkya asked once a window.
enum class RetrainingScheduler { kNone, kUniform, kFixed, kThief, kEkya, kGpushare };

struct StreamShare {
  double inference = 0;  // devices
  double retraining = 0;
  int configuration = -1;  // index into the window's configurations; -1: no retraining under way
};

// The shares that hold from `start_s` of a window until the next phase's start.
struct RetrainingPhase {
  double start_s = 0;
  std::vector<StreamShare> shares;  // as in streams
};

struct RetrainingWindow {
  double profiling_s = 0;  // at its start; if there is a phase after it, that is what was decided
  double accuracy = 0;     // mean over streams and time
  std::vector<double> stream_accuracy;  // mean over time
  std::vector<double> end_accuracy;
  std::vector<int> completed;  // the configuration whose retraining ended, by stream; -1: none
  std::vector<RetrainingPhase> phases;
  double below_floor =
      0;  // the sum over streams of how far the accuracy was ever below what the floor asks, 0 if it held
};

struct RetrainingPlan {
  std::vector<RetrainingWindow> windows;
  double mean_accuracy = 0;
};

// The greatest accuracy factor of a share, with the best inference configuration for it.
double inference_factor(const Stream& stream, double share);

// The floor is kept by thief where its start does, and by ekya and gpushare wherever some division keeps it: else they
// come as close as possible, which below_floor tells. A stream whose accuracy cannot reach the floor at any share is
// asked for its own best instead. INVALID_ARGUMENT if there are fewer quanta than streams, EXCEEDS_CAPACITY for more
// than kMaxQuanta.
constexpr int64_t kMaxQuanta = 4096;
base::Result<RetrainingPlan> plan_retraining(const RetrainingProblem& problem, RetrainingScheduler scheduler);

// The time that profiling takes of each window. Profiling comes first, on `devices`: meanwhile nothing is retrained, and
// inference has the rest of the devices, divided by the best fixed shares. A window that is too short for it ends before anything is retrained.
struct Profiling {
  std::vector<double> gpu_seconds;  // by window; those beyond take none
  double devices = 0;               // > 0 if anything takes time; rounded to quanta, at least one
};

// From a time on, so many devices (their speeds together) are up. Before the first such time, all are.
struct DevicesUp {
  double from_s = 0;
  double devices = 0;
};

// Plays `truth` by a scheduler that decides from `told`: the same document, with the accuracies that a profiler
// expected. At the start of a window the accuracies reached are known, those of configurations are what was told, and
// nothing is known of later windows. kGpushare divides anew at each completion, with what was reached. The result is
// what truly happened. kNone and kUniform do not profile.
//
// `up` is in order of time. No scheduler knows of a change before it comes; then each divides what is up anew, kFixed
// too. A retraining keeps the work that it has had, and goes on with its next share. The floor that is asked stays that
// of all devices.
base::Result<RetrainingPlan> run_retraining(const RetrainingProblem& truth, const RetrainingProblem& told,
                                            RetrainingScheduler scheduler, const Profiling& profiling = {},
                                            const std::vector<DevicesUp>& up = {});

}  // namespace gpushare::cluster
