// mix_parts.hpp: plays the parts of a mix, each alone on what it has of the devices. Who has what is a course of
// divisions; a part sees it as devices that come up when it gets them and go down when others do.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <string>
#include <vector>

#include "cluster/json.hpp"
#include "cluster/kinds.hpp"

namespace gpushare::cluster {

inline constexpr size_t kMixParts = 4;
enum MixPart : size_t { kServices, kRetraining, kTrials, kTraining };
inline constexpr const char* kMixPartNames[kMixParts] = {"services", "retraining", "trials", "training"};
// The figure of a part's result.
inline constexpr const char* kMixFigures[kMixParts] = {"goodput_rps", "mean_accuracy", "makespan_s",
                                                       "jct_mean_s"};
inline constexpr double kWorst = -1e9;       // worth of a part that cannot run
inline constexpr double kPerUnended = -100;  // worth of a job or trial that does not end

using PartKinds = std::array<const Kind*, kMixParts>;

// A part of the devices: of which device how much.
struct Slice {
  size_t device = 0;
  double part = 1;
  bool operator==(const Slice&) const = default;
};
using Slices = std::vector<std::vector<Slice>>;  // [MixPart]

// Who has what, from a time until the next division.
struct Division {
  double from_s = 0;
  Slices slices;
};
using Course = std::vector<Division>;  // in order of time, the first from 0 on

// The knowledge by which a division is made or judged.
struct Knowledge {
  bool everything = false;   // what really happens, played with `options`; else what the document tells
  double now_s = 0;          // failures that come later are not known, and no device is known to come back
  bool no_failures = false;  // for plans, which are made before anything happens
  PlayOptions options;
  bool until_now = false;  // with `everything`: as if devices neither failed nor came back after now_s
};

// The outcome of a part.
struct Outcome {
  double worth = kWorst;  // logarithm of its figure, greater is better
  OrderedJson result;
  std::string error;
};

class MixParts {
 public:
  // Reads the parts that the document has. Errors go to `document`.
  MixParts(Fields& document, const std::vector<Device>& devices, const PartKinds& kinds);

  const std::vector<Device>& devices() const { return devices_; }
  // The parts of this document, in order.
  const std::vector<size_t>& there() const { return there_; }

  // Plays a part by one of its schedulers. Where the trials' devices are handed over, training jobs have the whole ones
  // from `trials_end_s` on. `spans` may be null.
  Outcome play(size_t part, const Course& course, double trials_end_s, const std::string& scheduler,
               const Knowledge& known, std::vector<PlaySpan>* spans) const;
  // When the trials, the retraining or the training jobs have done all of their work; kNever if they have not. Work
  // that would fit no device of the document does not count.
  double end_of(size_t part, const Outcome& outcome) const;
  // The end of the last trial or training job that ends at all; 0 if there is no device.
  double last_end_of(size_t part, const Outcome& outcome) const;
  // The first moment at which services do not need their devices any more: the one after their last requests arrive,
  // since a device that fails with that request loses what it has not answered.
  double services_end_s() const;

 private:
  std::vector<Device> devices_of(size_t part, const Course& course, double trials_end_s,
                                 const Knowledge& known) const;
  double begin_of(size_t part) const;
  // The trials or jobs that would be rejected on all devices of the document.
  double impossible(size_t part) const;

  const PartKinds& kinds_;
  const std::vector<Device> devices_;
  Json parts_[kMixParts];
  std::vector<size_t> there_;
  mutable double impossible_[kMixParts] = {-1, -1, -1, -1};  // negative: not counted yet
};

}  // namespace gpushare::cluster
