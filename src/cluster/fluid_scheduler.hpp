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
// ticks are a group. Devices are those told before the first tick; they stay up. Use from one thread.
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

 private:
  struct Placed {
    Width width = 0;
    std::vector<int> devices;
  };
  void tell_changes(std::vector<Action>& actions);

  const std::unique_ptr<TrialPolicy> policy_;
  const TrialLimits limits_;
  const std::vector<Trial> trials_;
  std::vector<TrialDevice> devices_;
  std::optional<TrialRun> run_;
  std::vector<JobId> came_, ended_;  // since the last tick
  std::vector<Placed> placed_;       // as the driver was told
  std::vector<Width> first_widths_;
};

}  // namespace gpushare::cluster
