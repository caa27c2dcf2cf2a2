// Tuning algorithms without barriers under the schedulers of trials, on virtual time: which trial comes next depends on
// which has ended, so a document cannot say it. Prints one line of JSON for each algorithm, number of devices, seed and
// scheduler; scripts/experiments/fluid makes the page of it.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "cluster/fluid.hpp"

using namespace gpushare::cluster;

namespace {

constexpr double kAlpha = 1.2, kBeta = 1.05, kChangeCost = 1, kResumeCost = 1;
constexpr int kEta = 3;
constexpr double kRungs[] = {4, 12, 36, 108};  // budget in all after each rung, in units
constexpr int kTopRung = 3;

struct Candidate {
  double speed = 1;  // seconds a unit of budget
  double score = 0;  // lower is better
  int bracket = 0;
  int rung = 0;
};

Trial trial_of(const Candidate& candidate, double units, double overhead_s) {
  Trial trial;
  trial.budget_s = units * candidate.speed + overhead_s;
  trial.alpha = kAlpha;
  trial.beta = kBeta;
  return trial;
}

// Decides what comes next. `first` trials are under way at the same time.
class Algorithm {
 public:
  virtual ~Algorithm() = default;
  // The next trial, and who it is of; false if there is none now.
  virtual bool next(Trial& trial, size_t& who) = 0;
  virtual void ended(size_t who) = 0;
};

// ASHA (Li et al. 2020); with several brackets, BOHB as it is run asynchronously: each bracket starts at another rung,
// and new candidates go to the brackets in the proportion of Hyperband's sizes.
class Asha final : public Algorithm {
 public:
  Asha(uint64_t seed, size_t candidates, bool brackets)
      : random_(seed), left_(candidates), brackets_(brackets) {}

  bool next(Trial& trial, size_t& who) override {
    for (int bracket = 0; bracket <= (brackets_ ? kTopRung : 0); ++bracket)
      for (int rung = kTopRung - 1; rung >= bracket; --rung) {
        auto& done = done_[{bracket, rung}];
        auto& promoted = promoted_[{bracket, rung}];
        if (promoted >= done.size() / kEta) continue;
        // The best of those that have ended there and were not promoted, if it is among the best third.
        std::sort(done.begin(), done.end(),
                  [&](size_t a, size_t b) { return all_[a].score < all_[b].score; });
        for (size_t i = 0; i < done.size() / kEta; ++i) {
          Candidate& candidate = all_[done[i]];
          if (candidate.rung != rung) continue;
          ++promoted;
          candidate.rung = rung + 1;
          who = done[i];
          trial = trial_of(candidate, kRungs[rung + 1] - kRungs[rung], kResumeCost);
          return true;
        }
      }
    if (left_ == 0) return false;
    --left_;
    Candidate candidate;
    candidate.speed = std::exp(0.4 * normal_(random_));
    candidate.score = normal_(random_);
    if (brackets_) {
      // 27, 12, 6 and 4 of 49.
      const double part = std::uniform_real_distribution<double>(0, 49)(random_);
      candidate.bracket = part < 27 ? 0 : part < 39 ? 1 : part < 45 ? 2 : 3;
      candidate.score -= 0.01 * static_cast<double>(all_.size());  // the model gets better
    }
    candidate.rung = candidate.bracket;
    who = all_.size();
    all_.push_back(candidate);
    trial = trial_of(candidate, kRungs[candidate.rung], 0);
    return true;
  }
  void ended(size_t who) override { done_[{all_[who].bracket, all_[who].rung}].push_back(who); }

 private:
  std::mt19937_64 random_;
  std::normal_distribution<double> normal_;
  size_t left_;
  bool brackets_;
  std::vector<Candidate> all_;
  std::map<std::pair<int, int>, std::vector<size_t>> done_;
  std::map<std::pair<int, int>, size_t> promoted_;
};

// Population based training without barriers: a member goes on as soon as its step has ended; in one step of four it
// copies another member's model and speed, which costs `overhead_s`.
class Population final : public Algorithm {
 public:
  Population(uint64_t seed, double overhead_s) : random_(seed), overhead_s_(overhead_s) {
    for (auto& member : members_) {
      member.speed = std::exp(0.4 * normal_(random_));
      waiting_.push_back(static_cast<size_t>(&member - members_));
    }
    // Drawn for each member and step, so that every scheduler gets the same.
    for (auto& row : copies_)
      for (auto& copy : row) copy = random_() % 4 == 0 ? static_cast<int>(random_() % kMembers) : -1;
  }
  bool next(Trial& trial, size_t& who) override {
    if (waiting_.empty()) return false;
    who = waiting_.front();
    waiting_.erase(waiting_.begin());
    const int copy = steps_[who] == 0 ? -1 : copies_[who][steps_[who]];
    if (copy >= 0) members_[who].speed = members_[copy].speed;
    trial = trial_of(members_[who], 12, copy >= 0 ? overhead_s_ : 0);
    return true;
  }
  void ended(size_t who) override {
    if (++steps_[who] < kSteps) waiting_.push_back(who);
  }

 private:
  static constexpr size_t kMembers = 8, kSteps = 10;
  std::mt19937_64 random_;
  std::normal_distribution<double> normal_;
  double overhead_s_;
  Candidate members_[kMembers];
  size_t steps_[kMembers] = {};
  int copies_[kMembers][kSteps] = {};
  std::vector<size_t> waiting_;
};

void play(const char* name, Algorithm& algorithm, int devices, size_t together, TrialScheduler scheduler,
          const char* scheduler_name, uint64_t seed) {
  TrialRun run(std::vector<TrialDevice>(static_cast<size_t>(devices)),
               {4, std::min(devices, 8), kChangeCost});
  const auto policy = make_trial_policy(scheduler);
  std::vector<size_t> owner;
  size_t under_way = 0;
  double work = 0;
  const auto more = [&](TrialRun& at) {
    std::vector<size_t> added;
    Trial trial;
    size_t who = 0;
    while (under_way < together && algorithm.next(trial, who)) {
      trial.name = "t" + std::to_string(owner.size());
      added.push_back(at.add(trial));
      owner.resize(added.back() + 1);
      owner[added.back()] = who;
      work += trial.budget_s;
      ++under_way;
    }
    return added;
  };
  policy->arrived(run, more(run));
  run_trials(run, *policy, [&](TrialRun& at, const std::vector<size_t>& done) {
    for (const size_t trial : done) {
      algorithm.ended(owner[trial]);
      --under_way;
    }
    return more(at);
  });
  double makespan = 0;
  for (const TrialRun::State& state : run.trials()) makespan = std::max(makespan, state.finish_s);
  std::printf(
      "{\"algorithm\": \"%s\", \"devices\": %d, \"seed\": %llu, \"scheduler\": \"%s\", \"together\": %zu, "
      "\"trials\": %zu, \"work_s\": %.3f, \"makespan_s\": %.3f, \"busy\": %.4f, \"unfinished\": %zu}\n",
      name, devices, static_cast<unsigned long long>(seed), scheduler_name, together, run.trials().size(),
      work, makespan, run.area() / (makespan * devices), run.unfinished_count());
}

}  // namespace

int main() {
  const std::pair<TrialScheduler, const char*> schedulers[] = {
      {TrialScheduler::kFifo, "fifo"},
      {TrialScheduler::kStaticFluid, "static-fluid"},
      {TrialScheduler::kDynamicFluid, "dynamic-fluid"},
      {TrialScheduler::kGpushare, "gpushare"}};
  for (const int devices : {2, 4, 8, 16, 32})
    for (uint64_t seed = 1; seed <= 5; ++seed)
      for (const auto& [scheduler, name] : schedulers) {
        // The default execution has as many trials under way as devices; the others a number that does not depend on them.
        const size_t together = scheduler == TrialScheduler::kFifo ? static_cast<size_t>(devices) : 16;
        Asha asha(seed, 64, false), bohb(seed, 64, true);
        play("ASHA", asha, devices, together, scheduler, name, seed);
        play("BOHB", bohb, devices, together, scheduler, name, seed);
        for (const double overhead : {0.0, 5.0, 20.0}) {
          Population population(seed, overhead);
          char title[32];
          std::snprintf(title, sizeof title, "PBT, copies cost %.0f s", overhead);
          play(title, population, devices, scheduler == TrialScheduler::kFifo ? together : 8, scheduler, name,
               seed);
        }
      }
  return 0;
}
