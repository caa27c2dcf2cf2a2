// sharing.hpp: what schedulers that put several jobs on a device have in common.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cluster/learn/slowdown.hpp"
#include "cluster/training/batch_tuner.hpp"
#include "cluster/training/book.hpp"

namespace gpushare::cluster::training {

inline constexpr size_t kMostOnDevice = 48;  // clients of one MPS server

// What schedulers learn. It outlives them: one that follows another goes on from it.
struct Knowledge {
  SlowdownModel slowdowns;
  BatchTuner tuner;
  std::set<std::tuple<JobId, JobId, double, double>>
      told;                                        // pairs of jobs with their batch sizes: a pair tells once
  std::unordered_map<uint64_t, double> companies;  // measured slowdowns of a job beside certain others
  uint32_t cleared = 0;                            // how often `companies` was
  double restart_s = 0;                            // work that a job repeats after a pause
};

// Jobs in the order of arrival, with what is learned of pairs.
class Sharing : public Book {
 public:
  explicit Sharing(std::shared_ptr<Knowledge> known) : known_(std::move(known)) {}
  void device_changed(DeviceIndex device, const DeviceInfo& info, bool up, double now_s) override {
    nodes_ = std::max<size_t>(nodes_, info.node + size_t{1});
    Book::device_changed(device, info, up, now_s);
  }
  void arrived(JobId job, const JobInfo& info, double now_s) override {
    has_sizes_ = has_sizes_ || info.batch_sizes.size() > 1;
    Book::arrived(job, info, now_s);
  }
  void known_pair(const JobInfo& job, const JobInfo& other, double slowdown) override {
    known_->slowdowns.know(job, other, slowdown);
  }
  PredictionReport predictions() const override { return known_->slowdowns.predictions(); }
  void observed(JobId job, double attained_s, double remaining_s, double slowdown, double now_s) override {
    Book::observed(job, attained_s, remaining_s, slowdown, now_s);
    if (!(slowdown > 0)) return;
    BookJob& entry = jobs_[job];
    entry.measured = true;
    if (std::exchange(entry.same_company, true)) return;  // which has told
    // Only a job beside exactly one other tells of a pair.
    const JobId* other = nullptr;
    for (const DeviceIndex d : entry.devices) {
      const std::vector<JobId>& here = devices_[d].jobs;
      if (here.size() > 2) return;
      if (here.size() == 2) {
        const JobId* beside = here[0] == job ? &here[1] : &here[0];
        if (other != nullptr && *beside != *other) return;
        other = beside;
      }
    }
    if (other == nullptr || entry.opportunistic || jobs_[*other].opportunistic) return;
    if (known_->told.emplace(job, *other, entry.info.batch, jobs_[*other].info.batch).second)
      known_->slowdowns.observe(entry.info, jobs_[*other].info, slowdown);
  }

 protected:
  void took_over() override {
    for (const BookDevice& device : devices_) nodes_ = std::max<size_t>(nodes_, device.info.node + size_t{1});
    for (const BookJob& job : jobs_)
      has_sizes_ = has_sizes_ || (!job.gone && job.info.batch_sizes.size() > 1);
  }
  void waiting_again(JobId job, double) override { queue_.insert(job); }

  // The `gang` devices of the least cost among those that fit, empty if there are too few. `cost` may refuse by
  // returning kNever. A gang is as slow as its slowest device, so of all that cost no more than the dearest that it
  // needs, those of few nodes are taken.
  template <class F>
  std::vector<DeviceIndex> cheapest(const JobInfo& info, F&& cost) const {
    std::vector<std::pair<double, DeviceIndex>> all;
    for (DeviceIndex d = 0; d < devices_.size(); ++d) {
      if (!fits(d, info) || devices_[d].jobs.size() >= kMostOnDevice) continue;
      const double value = cost(d);
      if (value < kNever) all.emplace_back(value, d);
    }
    return cheapest_of(info, std::move(all));
  }
  std::vector<DeviceIndex> cheapest_of(const JobInfo& info,
                                       std::vector<std::pair<double, DeviceIndex>> all) const {
    if (all.size() < info.gang) return {};
    std::partial_sort(all.begin(), all.begin() + info.gang, all.end());
    if (info.gang > 1 && nodes_ > 1) {
      const double dearest = all[info.gang - 1].first;
      all.erase(std::partition(all.begin() + info.gang, all.end(),
                               [&](const auto& entry) { return entry.first <= dearest; }),
                all.end());
      return of_few_nodes(info.gang, std::move(all));
    }
    std::vector<DeviceIndex> out;
    for (uint32_t i = 0; i < info.gang; ++i) out.push_back(all[i].second);
    return out;
  }

  // `gang` of the candidates: from the node that has the fewest of those that have enough, else from the one with the
  // most, and so on.
  std::vector<DeviceIndex> of_few_nodes(size_t gang,
                                        std::vector<std::pair<double, DeviceIndex>> candidates) const {
    std::sort(candidates.begin(), candidates.end());
    std::map<uint32_t, std::vector<DeviceIndex>> nodes;
    for (const auto& [unused, d] : candidates) nodes[devices_[d].info.node].push_back(d);
    std::vector<DeviceIndex> out;
    while (out.size() < gang) {
      const size_t needed = gang - out.size();
      auto best = nodes.begin();
      for (auto at = nodes.begin(); at != nodes.end(); ++at) {
        const size_t there = at->second.size(), before = best->second.size();
        const bool enough = there >= needed, had = before >= needed;
        if (enough != had ? enough : (enough ? there < before : there > before)) best = at;
      }
      for (const DeviceIndex d : best->second)
        if (out.size() < gang) out.push_back(d);
      nodes.erase(best);
    }
    return out;
  }

  // Batch sizes: what was measured is learned from, and devices whose jobs have changed, or are being tuned, get the
  // next sizes. Only jobs of one device are tuned. Returns when it wants to be asked again.
  double tune(double now_s, std::vector<Action>& actions) {
    double again = kNever;
    if (forward_ || !has_sizes_) return again;  // sizes stay as they are in what is only thought
    if (tuned_.size() < devices_.size()) tuned_.resize(devices_.size());
    for (DeviceIndex d = 0; d < devices_.size(); ++d) {
      const std::vector<JobId>& here = devices_[d].jobs;
      Tuned& state = tuned_[d];
      if (here != state.jobs) state = {here, now_s, false, false};
      const bool can = !here.empty() && std::all_of(here.begin(), here.end(), [&](JobId job) {
        return jobs_[job].info.gang == 1 && !jobs_[job].opportunistic;
      }) && std::any_of(here.begin(), here.end(), [&](JobId job) {
        return jobs_[job].info.batch_sizes.size() > 1;
      });
      if (!can || state.ended) continue;
      if (state.running && now_s < state.until_s) {
        again = std::min(again, state.until_s);
        continue;
      }
      std::vector<JobInfo> infos;
      std::vector<double> slowdowns;
      bool all = true;
      for (const JobId job : here) {
        infos.push_back(jobs_[job].info);
        slowdowns.push_back(jobs_[job].slowdown);
        all = all && jobs_[job].measured;
      }
      if (state.running && !all) {  // nothing was measured yet
        state.until_s = now_s + kRoundS;
        again = std::min(again, state.until_s);
        continue;
      }
      if (state.running) known_->tuner.measured(infos, slowdowns);
      const std::vector<double> sizes = known_->tuner.next(
          infos, devices_[d].info.memory_bytes,
          [&](const std::vector<JobInfo>& jobs) {
            std::vector<double> out;
            for (size_t i = 0; i < jobs.size(); ++i) {
              double slowdown = assumed_iteration_factor(jobs[i]) * iterations_factor(jobs[i]);
              if (jobs.size() > 1) {
                double sum = 0, alone = slowdown;
                for (size_t k = 0; k < jobs.size(); ++k)
                  if (k != i) sum += (1 + known_->slowdowns.excess(jobs[i], jobs[k]).mean) / alone - 1;
                slowdown *= std::max(1.0, 1 + sum);
              }
              out.push_back(slowdown);
            }
            return out;
          },
          &state.ended);
      for (const bool growing : {false, true})  // what shrinks makes room
        for (size_t i = 0; i < here.size(); ++i)
          if (sizes[i] != infos[i].batch && (sizes[i] > infos[i].batch) == growing)
            reconfigure(here[i], sizes[i], actions);
      for (const JobId job : here) jobs_[job].measured = false;
      state.running = true;
      state.until_s = now_s + kRoundS;
      if (!state.ended) again = std::min(again, state.until_s);
    }
    return again;
  }

  // How much slower than alone at the same batch size, less 1.
  SlowdownModel::Estimate interference(const JobInfo& job, const JobInfo& other) const {
    return beyond_alone(job, known_->slowdowns.excess(job, other));
  }
  static SlowdownModel::Estimate beyond_alone(const JobInfo& job, const SlowdownModel::Estimate& told) {
    const double alone = assumed_iteration_factor(job) * iterations_factor(job);
    return {std::max(0.0, (1 + told.mean) / alone - 1), told.spread / alone};
  }

  std::set<JobId> queue_;
  size_t nodes_ = 0;
  bool has_sizes_ = false;  // some job has batch sizes to choose from
  const std::shared_ptr<Knowledge> known_;

 private:
  static constexpr double kRoundS = 10;  // in which sizes are measured
  struct Tuned {
    std::vector<JobId> jobs;
    double until_s = 0;
    bool running = false;  // sizes are being measured
    bool ended = false;
  };
  std::vector<Tuned> tuned_;
};

// Classes on shared devices: beside a guaranteed job an opportunistic one gets what that leaves, by the device's
// coordinator, so that the guaranteed one runs as if alone.
class Lending : public Sharing {
 public:
  using Sharing::Sharing;

 protected:
  void goes_on(JobId job) override {
    if (jobs_[job].opportunistic) lend(job);
  }
  // Jobs that had what guaranteed ones left, and are beside none now. Only those of devices that have changed are asked.
  void give_back(std::vector<Action>& actions) {
    asked_.clear();
    given_back_.resize(devices_.size(), UINT32_MAX);
    lent_.resize(jobs_.size());
    for (DeviceIndex d = 0; d < devices_.size(); ++d) {
      if (std::exchange(given_back_[d], devices_[d].changes) == devices_[d].changes) continue;
      for (const JobId job : devices_[d].jobs)
        if (lent_[job]) asked_.push_back(job);
    }
    std::sort(asked_.begin(), asked_.end());
    asked_.erase(std::unique(asked_.begin(), asked_.end()), asked_.end());
    for (const JobId job : asked_) {
      const BookJob& entry = jobs_[job];
      const bool beside = std::any_of(entry.devices.begin(), entry.devices.end(), [&](DeviceIndex d) {
        return std::any_of(devices_[d].jobs.begin(), devices_[d].jobs.end(), [&](JobId other) {
          return other != job && jobs_[other].info.guaranteed && !entry.info.guaranteed;
        });
      });
      if (beside) continue;
      set_opportunistic(job, false);
      actions.push_back({Action::Kind::kResize, job, {}, false, ""});
      lent_[job] = false;
    }
  }
  // Places a job; who gets what others leave is said with it.
  void enter_classes(JobId job, std::vector<DeviceIndex> devices, std::vector<Action>& actions) {
    const JobInfo& info = jobs_[job].info;
    bool lent = false;
    for (const DeviceIndex d : devices)
      for (const JobId other : devices_[d].jobs) {
        if (jobs_[other].info.guaranteed == info.guaranteed) continue;
        if (!info.guaranteed) {
          lent = true;
        } else if (!jobs_[other].opportunistic) {
          set_opportunistic(other, true);
          lend(other);
          actions.push_back({Action::Kind::kResize, other, {}, true, ""});
        }
      }
    lend(job, lent);
    enter(job, std::move(devices), lent, actions);
  }
  // A job may have been resized and then paused for another.
  void drop_void_resizes(std::vector<Action>& actions) const {
    actions.erase(std::remove_if(actions.begin(), actions.end(),
                                 [&](const Action& action) {
                                   return action.kind == Action::Kind::kResize && !jobs_[action.job].running;
                                 }),
                  actions.end());
  }

 private:
  void lend(JobId job, bool lent = true) {
    if (lent_.size() <= job) lent_.resize(jobs_.size());
    lent_[job] = lent;
  }

  std::vector<bool> lent_;            // by job, of running ones
  std::vector<uint32_t> given_back_;  // by device: its changes when give_back() looked
  std::vector<JobId> asked_;
};

}  // namespace gpushare::cluster::training
