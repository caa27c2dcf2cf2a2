// fluid_policies.hpp: how the trials of fluid.hpp are scheduled: one device each in order (the default execution of
// tuning libraries), StaticFluid and DynamicFluid as in the source, and the planner behind "gpushare". Included by the
// files fluid*.cpp alone.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "cluster/fluid.hpp"

namespace gpushare::cluster {

// Trials with a fixed width each, placed in the order of the queue as soon as they fit.
class QueuePolicy : public TrialPolicy {
 public:
  void finished(TrialRun& run) override { fill(run); }
  // Behind the trials that take longer.
  bool insert(TrialRun& run, size_t trial, Width width) override;

 protected:
  explicit QueuePolicy(bool in_order) : in_order_(in_order) {}
  void enqueue(size_t trial, Width width);
  void fill(TrialRun& run);
  bool empty() const;
  // Trials that wait arrive anew: their widths may be more than the devices that are up.
  void restart(TrialRun& run);

 private:
  struct Entry {
    double order;
    size_t trial;
  };
  std::map<Width, std::deque<Entry>> queues_;
  double next_ = 0;
  bool in_order_;  // a trial whose memory does not fit keeps those behind it waiting
};

class FifoPolicy final : public QueuePolicy {
 public:
  FifoPolicy() : QueuePolicy(true) {}
  void arrived(TrialRun& run, const std::vector<size_t>& trials) override;
  void devices_changed(TrialRun& run, bool /*failed*/) override { restart(run); }
  std::unique_ptr<TrialPolicy> clone() const override { return std::make_unique<FifoPolicy>(*this); }
};

// Algorithm 3.1.
class StaticFluidPolicy : public QueuePolicy {
 public:
  StaticFluidPolicy() : QueuePolicy(false) {}
  void arrived(TrialRun& run, const std::vector<size_t>& trials) override;
  void devices_changed(TrialRun& run, bool /*failed*/) override { restart(run); }
  std::unique_ptr<TrialPolicy> clone() const override { return std::make_unique<StaticFluidPolicy>(*this); }

 protected:
  // The limits with the source's c, which is measured once, with the first trials.
  const TrialLimits& limits_of(const TrialRun& run, const std::vector<size_t>& trials);

 private:
  std::optional<TrialLimits> limits_;
};

// Algorithm 3.2: when something is released and no trial waits, the same formula on what remains.
class DynamicFluidPolicy final : public StaticFluidPolicy {
 public:
  void finished(TrialRun& run) override;
  void devices_changed(TrialRun& run, bool /*failed*/) override {
    restart(run);
    finished(run);
  }
  std::unique_ptr<TrialPolicy> clone() const override { return std::make_unique<DynamicFluidPolicy>(*this); }
};

// Each trial at the width given for it, longest first.
class ListPolicy final : public QueuePolicy {
 public:
  ListPolicy() : QueuePolicy(false) {}
  void add(size_t trial, Width width) { enqueue(trial, width); }
  void start(TrialRun& run) { fill(run); }
  void arrived(TrialRun&, const std::vector<size_t>&) override {}
  std::unique_ptr<TrialPolicy> clone() const override { return std::make_unique<ListPolicy>(*this); }
};

// fluid_lists.cpp: what is unfinished, placed for an end within T from now; `move`: also what runs already.
std::unique_ptr<TrialPolicy> make_places(TrialRun& run, double T, bool move);

std::unique_ptr<TrialPolicy> make_trial_planner();

}  // namespace gpushare::cluster
