// SPDX-License-Identifier: Apache-2.0
#include "cluster/mix_parts.hpp"

#include <algorithm>
#include <cmath>
#include <map>

#include "cluster/never.hpp"
#include "cluster/services/serving.hpp"

namespace gpushare::cluster {
namespace {

constexpr bool kLessIsBetter[kMixParts] = {false, false, true, true};  // of a part's figure
constexpr size_t kMostDevices = 64;     // an exact division beyond would take minutes
constexpr size_t kMostChanges = 1'000;  // every part is played some times at each of them
constexpr uint64_t kPlanSeed = 0x6770;

// Trials or jobs without an end.
double without_end(size_t part, const OrderedJson& result) {
  const auto count = [&](const char* list) {
    return result.contains(list) ? double(result.at(list).size()) : 0;
  };
  return part == kTraining ? result.at("jobs").get<double>() - result.at("completed").get<double>()
         : part == kTrials ? count("rejected") + count("not_completed")
                           : 0;
}

double rejected(size_t part, const OrderedJson& result) {
  return part == kTraining             ? result.at("rejected").get<double>()
         : result.contains("rejected") ? double(result.at("rejected").size())
                                       : 0;
}

}  // namespace

MixParts::MixParts(Fields& document, const std::vector<Device>& devices, const PartKinds& kinds)
    : kinds_(kinds), devices_(devices) {
  if (devices.size() > kMostDevices)
    document.refuse_all(base::format("devices: %zu are more than the %zu that a mix is divided over",
                                     devices.size(), kMostDevices));
  if (const size_t changes = device_changes(devices).size(); changes > kMostChanges)
    document.refuse_all(base::format(
        "devices: they fail and come back %zu times, more than the %zu for which a mix is divided anew",
        changes, kMostChanges));
  for (size_t part = 0; part < kMixParts && document.ok(); ++part) {
    document.about(kMixPartNames[part], "The fields of a document of that kind.");
    if (!document.has(kMixPartNames[part])) continue;
    document.with(kMixPartNames[part], [&](Fields& fields) { kinds_[part]->read(fields, devices); });
    if (!document.ok()) return;
    if (const Json* there = document.find(kMixPartNames[part])) parts_[part] = *there;
    there_.push_back(part);
  }
  document.at_least_one({"services", "retraining", "trials", "training"});
  if (document.ok() && there_.size() > devices.size())
    document.refuse_all(
        base::format("devices: %zu are fewer than the %zu parts", devices.size(), there_.size()));
}

std::vector<Device> MixParts::devices_of(size_t part, const Course& course, double trials_end_s,
                                         const Knowledge& known) const {
  std::map<std::pair<size_t, double>, std::vector<Device::Down>>
      held;  // by device and size: from when until when
  const auto hold = [&](const Slice& slice, double from_s, double until_s) {
    if (from_s >= until_s) return;
    auto& times = held[{slice.device, slice.part}];
    if (!times.empty() && times.back().until_s >= from_s)
      times.back().until_s = until_s;
    else
      times.push_back({from_s, until_s});
  };
  for (size_t i = 0; i < course.size(); ++i) {
    const double from_s = course[i].from_s, until_s = i + 1 < course.size() ? course[i + 1].from_s : kNever;
    for (const Slice& slice : course[i].slices[part]) hold(slice, from_s, until_s);
    if (part != kTraining) continue;
    for (const Slice& slice : course[i].slices[kTrials])
      if (slice.part == 1) hold(slice, std::max(from_s, trials_end_s), until_s);
  }
  std::vector<Device> devices;
  for (const auto& [slice, times] : held) {
    Device device = devices_[slice.first];
    device.joins_later = times.front().from_s > 0;
    device.speed *= slice.second;
    device.memory_bytes = static_cast<uint64_t>(static_cast<double>(device.memory_bytes) * slice.second);
    std::vector<Device::Down> down;
    for (const Device::Down& failed : device.down) {
      const bool all = known.everything && !known.until_now;
      if (known.no_failures || (!all && failed.from_s > known.now_s)) continue;
      const bool back = all || failed.until_s <= known.now_s;
      down.push_back({failed.from_s, back ? failed.until_s : kNever});
    }
    double from_s = 0;
    for (const Device::Down& own : times) {
      if (own.from_s > from_s) down.push_back({from_s, own.from_s});
      from_s = own.until_s;
    }
    if (from_s < kNever) down.push_back({from_s, kNever});
    device.down = std::move(down);
    devices.push_back(std::move(device));
  }
  return devices;
}

Outcome MixParts::play(size_t part, const Course& course, double trials_end_s, const std::string& scheduler,
                       const Knowledge& known, std::vector<PlaySpan>* spans) const {
  Outcome outcome;
  const std::vector<Device> devices = devices_of(part, course, trials_end_s, known);
  if (devices.empty()) {
    outcome.error = "there is no device for it";
    return outcome;
  }
  base::Status error;
  Fields fields(parts_[part], &error);
  const std::unique_ptr<Problem> problem = kinds_[part]->read(fields, devices);
  base::Status status = error;
  if (status.ok()) {
    PlayOptions options = known.options;
    if (!known.everything) {  // as told, and with other requests than those that come
      options.noise = 0;
      options.seed = kPlanSeed;
    }
    status = problem->play(scheduler, options, outcome.result, spans);
  }
  if (!status.ok()) {
    outcome.error = status.message();
    return outcome;
  }
  const double log = std::log(std::max(outcome.result.at(kMixFigures[part]).get<double>(), 1e-9));
  // Running all of the part's work comes before any speed.
  outcome.worth = (kLessIsBetter[part] ? -log : log) + kPerUnended * without_end(part, outcome.result);
  return outcome;
}

double MixParts::services_end_s() const {
  return std::nextafter(parts_[kServices]
                            .value("run", Json::object())
                            .value("duration_s", services::ServingOptions{}.duration_s),
                        kNever);
}

double MixParts::begin_of(size_t part) const {
  double begin_s = kNever;
  for (const Json& each : parts_[part].at(part == kTrials ? "groups" : "jobs"))
    begin_s = std::min(begin_s, each.value("arrival_s", 0.0));
  return begin_s == kNever ? 0 : begin_s;
}

double MixParts::impossible(size_t part) const {
  if (impossible_[part] < 0) {
    Slices all(kMixParts);
    for (size_t d = 0; d < devices_.size(); ++d) all[part].push_back({d, 1});
    Knowledge known;
    known.no_failures = true;
    const Outcome outcome = play(part, {{0, std::move(all)}}, kNever, "gpushare", known, nullptr);
    impossible_[part] = outcome.error.empty() ? rejected(part, outcome.result) : 0;
  }
  return impossible_[part];
}

double MixParts::end_of(size_t part, const Outcome& outcome) const {
  if (part == kServices || !outcome.error.empty()) return kNever;
  if (part == kRetraining)
    return double(outcome.result.at("windows").size()) * parts_[part].at("window_s").get<double>();
  const double left = without_end(part, outcome.result);
  if (left > 0 && left > impossible(part)) return kNever;
  return last_end_of(part, outcome);
}

double MixParts::last_end_of(size_t part, const Outcome& outcome) const {
  return outcome.error.empty() ? begin_of(part) + outcome.result.at("makespan_s").get<double>() : 0;
}

}  // namespace gpushare::cluster
