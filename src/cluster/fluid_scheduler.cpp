// SPDX-License-Identifier: Apache-2.0
#include "cluster/fluid_scheduler.hpp"

#include <algorithm>
#include <cmath>

namespace gpushare::cluster {

FluidScheduler::FluidScheduler(TrialScheduler rule, TrialLimits limits, std::vector<Trial> trials)
    : policy_(make_trial_policy(rule)),
      limits_(limits),
      trials_(std::move(trials)),
      placed_(trials_.size()),
      first_widths_(trials_.size(), 0) {}

void FluidScheduler::device_changed(DeviceIndex device, const DeviceInfo& info, bool up, double now_s) {
  if (!run_) {
    const size_t count = std::max<size_t>(devices_.size(), device + 1);
    devices_.resize(count);
    up_.resize(count, true);
    devices_[device] = {info.speed, info.memory_bytes};
    up_[device] = up;
    return;
  }
  run_->advance(now_s);
  run_->set_up(int(device), up);
  for (Placed& told : placed_)
    if (!up && std::count(told.devices.begin(), told.devices.end(), int(device)) > 0) told = {};
  devices_changed_ = true;
  device_failed_ = device_failed_ || !up;
}

void FluidScheduler::begin() {
  run_.emplace(devices_, limits_);
  for (size_t d = 0; d < devices_.size(); ++d) run_->set_up(int(d), up_[d]);
}

void FluidScheduler::arrived(JobId job, const JobInfo& /*info*/, double /*now_s*/) {
  came_.push_back(job);
}

void FluidScheduler::observed(JobId job, double /*attained_s*/, double remaining_s, double /*slowdown*/,
                              double now_s) {
  run_->advance(now_s);
  run_->measured(job, remaining_s / trials_[job].budget_s);
}

void FluidScheduler::finished(JobId job, double now_s) {
  run_->advance(now_s);
  run_->stop(job);
  placed_[job] = {};
  ended_.push_back(job);
}

double FluidScheduler::tick(double now_s, std::vector<Action>& actions) {
  if (!run_) begin();
  run_->advance(now_s);
  if (!ended_.empty()) {
    policy_->finished(*run_);
    // A group that comes now is no answer to what has ended: an answer comes at the very time of an end.
    run_->advance(std::nextafter(now_s, kNever));
  }
  ended_.clear();
  if (devices_changed_) policy_->devices_changed(*run_, device_failed_);
  devices_changed_ = device_failed_ = false;
  if (policy_->wake_s() <= now_s) policy_->woken(*run_);
  std::vector<size_t> group;
  for (const JobId job : came_) {
    const size_t trial = run_->add(trials_[job]);  // the same number: both count arrivals
    if (run_->trials()[trial].rejected) {
      Action reject{Action::Kind::kReject, job, {}, false, ""};
      reject.reason = "memory_bytes is beyond the memory of every device";
      actions.push_back(std::move(reject));
    } else if (!run_->stranded(trial)) {
      group.push_back(trial);
    }
  }
  came_.clear();
  if (!group.empty()) policy_->arrived(*run_, group);
  tell_changes(actions);
  return policy_->wake_s();
}

// Pauses before places, so that the devices are free.
void FluidScheduler::tell_changes(std::vector<Action>& actions) {
  std::vector<Action> places;
  for (JobId job = 0; job < run_->trials().size(); ++job) {
    const TrialRun::State& state = run_->trials()[job];
    Placed& told = placed_[job];
    if (state.finished || (state.width == told.width && state.devices == told.devices)) continue;
    if (told.width != 0) actions.push_back({Action::Kind::kPause, job, {}, false, ""});
    told = {state.width, state.devices};
    if (state.width == 0) continue;
    if (first_widths_[job] == 0) first_widths_[job] = state.width;
    Action place{Action::Kind::kPlace, job, {}, false, "", 0, std::min(1.0, size_of(state.width))};
    place.devices.assign(state.devices.begin(), state.devices.end());
    places.push_back(std::move(place));
  }
  actions.insert(actions.end(), places.begin(), places.end());
}

}  // namespace gpushare::cluster
