// fluid_scheduler.hpp: a policy for tuning trials (fluid.hpp) behind the interface of schedulers over time, for a driver that really
// runs the trials: the policy acts on a model of the execution, which gets what was measured before each decision.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "cluster/fluid.hpp"
#include "cluster/scheduler.hpp"

namespace gpushare::cluster {

// The driver's job i is trials[i], in the order of arrival. Its jobs divide their work among their devices
// (JobInfo::divides), and a place says which part of a device is meant (Action::share). Trials that arrive between two
// ticks are a group. All devices are told before the first tick; those that fail later have let their jobs go. Use from
// one thread.
class FluidScheduler final : public Scheduler {
 public:
  FluidScheduler(TrialScheduler rule, TrialLimits limits, std::vector<Trial> trials);

  void device_changed(DeviceIndex device, const DeviceInfo& info, bool up, double now_s) override;
  void arrived(JobId job, const JobInfo& info, double now_s) override;
  void observed(JobId job, double attained_s, double remaining_s, double slowdown, double now_s) override;
  void finished(JobId job, double now_s) override;
  double tick(double now_s, std::vector<Action>& actions) override;

  // The width of each trial at its first start; 0: it has not started.
  const std::vector<Width>& first_widths() const { return first_widths_; }
  bool rejected(JobId job) const {
    return run_ && job < run_->trials().size() && run_->trials()[job].rejected;
  }

 private:
  struct Placed {
    Width width = 0;
    std::vector<int> devices;
  };
  void begin();
  void tell_changes(std::vector<Action>& actions);

  const std::unique_ptr<TrialPolicy> policy_;
  const TrialLimits limits_;
  const std::vector<Trial> trials_;
  std::vector<TrialDevice> devices_;
  std::vector<bool> up_;
  std::optional<TrialRun> run_;
  // Since the last tick:
  std::vector<JobId> came_, ended_;
  bool devices_changed_ = false, device_failed_ = false;
  std::vector<Placed> placed_;  // as the driver was told
  std::vector<Width> first_widths_;
};

}  // namespace gpushare::cluster
