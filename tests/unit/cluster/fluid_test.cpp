// Fluid's example (thesis 000, line 910), its formulas, the bound, and every scheduler against brute force and invariants.
// SPDX-License-Identifier: Apache-2.0
#include "cluster/fluid.hpp"

#include <algorithm>
#include <cmath>

#include "cluster/never.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

namespace gpushare::cluster {
namespace {

std::vector<TrialDevice> equal_devices(int n) {
  return std::vector<TrialDevice>(size_t(n));
}

TrialGroup group_of(std::initializer_list<double> budgets) {
  TrialGroup group;
  for (double budget : budgets)
    group.trials.push_back({"t" + std::to_string(group.trials.size()), budget, std::nullopt, 1, 0});
  return group;
}

std::vector<TrialGroup> random_groups(test::Random& random, int trials, bool overheads) {
  TrialGroup group;
  for (int i = 0; i < trials; ++i) {
    Trial trial{"t" + std::to_string(i), double(test::uniform(random, 1, 100)), std::nullopt, 1, 0};
    if (overheads) {
      trial.alpha = 1.2;
      trial.beta = 1.05;
    }
    group.trials.push_back(trial);
  }
  return {group};
}

// The best of all widths and orders without changes on the way.
double brute_force(const std::vector<Trial>& trials, int devices, const TrialLimits& limits) {
  std::vector<size_t> order(trials.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::vector<Width> widths(trials.size());
  double best = 1e300;
  const std::function<void(size_t)> choose = [&](size_t i) {
    if (i < trials.size()) {
      for (Width width = -limits.max_packed; width <= std::min(limits.max_workers, devices); ++width) {
        if (width == 0 || width == -1) continue;
        widths[i] = width;
        choose(i + 1);
      }
      return;
    }
    auto perm = order;
    do {
      // Serial list schedule: each trial starts at the earliest time, not before its predecessor, at which it fits.
      std::vector<std::pair<double, size_t>> running;  // (end, trial)
      std::vector<double> free(size_t(devices), 1.0);
      std::vector<std::vector<size_t>> held(trials.size());
      double now = 0;
      double end = 0;
      for (size_t j : perm) {
        while (true) {
          const double part = widths[j] > 0 ? 1 : size_of(widths[j]);
          std::vector<size_t> fit;
          for (size_t d = 0; d < free.size(); ++d)
            if (free[d] > part - 1e-9) fit.push_back(d);
          std::sort(fit.begin(), fit.end(), [&](size_t a, size_t b) { return free[a] < free[b]; });
          if (fit.size() >= size_t(std::max(1, widths[j]))) {
            fit.resize(size_t(std::max(1, widths[j])));
            for (size_t d : fit) free[d] -= part;
            held[j] = fit;
            running.emplace_back(now + duration(trials[j], widths[j]), j);
            end = std::max(end, running.back().first);
            break;
          }
          auto first = std::min_element(running.begin(), running.end());
          now = first->first;
          const size_t done = first->second;
          for (size_t d : held[done]) free[d] += widths[done] > 0 ? 1 : size_of(widths[done]);
          running.erase(first);
        }
        if (end >= best) break;
      }
      best = std::min(best, end);
    } while (std::next_permutation(perm.begin(), perm.end()));
  };
  choose(0);
  return best;
}

}  // namespace

TEST_CASE("Fluid's example: 5 devices, budgets of 4, 4, 12 and 30") {  // thesis 000, figure 3.5
  const std::vector<TrialGroup> groups{group_of({4, 4, 12, 30})};
  const TrialLimits limits{3, 5, 0};
  CHECK(plan_trials(equal_devices(5), limits, groups, TrialScheduler::kFifo).makespan_s == Approx(30));
  CHECK(plan_trials(equal_devices(5), limits, groups, TrialScheduler::kStaticFluid).makespan_s == Approx(12));
  std::vector<TrialGroup> free = groups;  // packing is free in the source's figure
  for (Trial& trial : free[0].trials) trial.alpha = 1;
  const auto fixed = plan_trials(equal_devices(5), limits, free, TrialScheduler::kStaticFluid);
  CHECK(fixed.makespan_s == Approx(12));
  CHECK(fixed.trials[0].width == -3);
  CHECK(fixed.trials[1].width == -3);
  CHECK(fixed.trials[2].width == 1);
  CHECK(fixed.trials[3].width == 3);
  CHECK(plan_trials(equal_devices(5), limits, groups, TrialScheduler::kStaticFluid).bound_s == Approx(10));
  CHECK(plan_trials(equal_devices(5), {2, 5, 0}, groups, TrialScheduler::kDynamicFluid).makespan_s ==
        Approx(10));
  const auto ours = plan_trials(equal_devices(5), limits, groups, TrialScheduler::kGpushare);
  CHECK(ours.makespan_s == Approx(10));
  CHECK(ours.utilization == Approx(1));
}

TEST_CASE("durations are (3.2), with work conserved where no alpha is stated") {
  const Trial stated{"t", 10, 1.2, 1.05, 0};
  CHECK(duration(stated, -3) == Approx(10 * std::pow(1.2, 2)));
  CHECK(duration(stated, 1) == 10);
  CHECK(duration(stated, 4) == Approx(10.0 / 4 * std::pow(1.05, 3)));
  CHECK(duration({"t", 10, std::nullopt, 1, 0}, -3) == Approx(30));
}

TEST_CASE("the packing limit is the last trial whose marginal benefit exceeds the threshold") {  // (3.1)
  // O^2 = 1 - 1/2 x 1.2 = 0.4, O^3 = 1 - 2/3 x 1.25 = 0.167, O^4 = 1 - 3/4 x 1.4 < 0.
  CHECK(packing_limit({1, 1.2, 1.5, 2.1}, 0.1) == 3);
  CHECK(packing_limit({1, 1.2, 1.5, 2.1}, 0.2) == 2);
  CHECK(packing_limit({1}, 0.1) == 1);
}

TEST_CASE("Fluid packs as many trials as still bring a benefit") {
  // 8 small trials beside a large one on 2 devices. O^p = 1 - (p - 1)/p x alpha.
  const auto width_at = [](std::optional<double> alpha, TrialScheduler scheduler) {
    std::vector<TrialGroup> groups{group_of({1, 1, 1, 1, 1, 1, 1, 1, 40})};
    for (Trial& trial : groups[0].trials) trial.alpha = alpha;
    return plan_trials(equal_devices(2), {4, 1, 0}, groups, scheduler).trials[0].width;
  };
  for (const TrialScheduler scheduler : {TrialScheduler::kStaticFluid, TrialScheduler::kDynamicFluid}) {
    CHECK(width_at(1.2, scheduler) == -4);  // O^4 = 0.1
    CHECK(width_at(1.4, scheduler) == -3);  // O^3 = 0.07, O^4 < 0
    CHECK(width_at(1.6, scheduler) == -2);  // O^2 = 0.2, O^3 < 0
    CHECK(width_at(2, scheduler) == 1);     // O^2 = 0
    CHECK(width_at(10, scheduler) == 1);
    CHECK(width_at(std::nullopt, scheduler) == 1);  // work is conserved: no benefit
  }
}

TEST_CASE("the bound is met where widths may be mixed, and knows the longest trial and arrivals") {
  CHECK(trials_bound(equal_devices(3), {1, 1, 0}, {group_of({10, 1})}) == Approx(10));
  CHECK(trials_bound(equal_devices(2), {1, 1, 0}, {group_of({4, 4, 4})}) == Approx(6));
  TrialGroup late = group_of({6, 6});
  late.arrival_s = 4;
  CHECK(trials_bound(equal_devices(2), {1, 1, 0}, {group_of({4, 4, 4}), late}) == Approx(12));
  CHECK(trials_bound(equal_devices(2), {1, 2, 0}, {}) == 0);
}

TEST_CASE("trials: bound <= brute force, and the schedulers' distance from both") {
  test::Random random(test::seed());
  INFO("seed " << test::seed());
  std::vector<double> ratios;
  double worst = 0;
  for (int round = 0; round < 2000; ++round) {
    const int devices = int(test::uniform(random, 1, 3));
    const TrialLimits limits{int(test::uniform(random, 1, 2)), devices, 0};
    const auto groups =
        random_groups(random, int(test::uniform(random, 1, 4)), test::uniform(random, 0, 1) == 1);
    const double best = brute_force(groups[0].trials, devices, limits);
    const auto ours = plan_trials(equal_devices(devices), limits, groups, TrialScheduler::kGpushare);
    if (ours.bound_s > best * (1 + 1e-9))
      FAIL("bound " << ours.bound_s << " above " << best << " in round " << round);
    if (ours.makespan_s < ours.bound_s * (1 - 1e-9)) FAIL("faster than the bound in round " << round);
    for (TrialScheduler scheduler : {TrialScheduler::kStaticFluid, TrialScheduler::kDynamicFluid}) {
      const auto theirs = plan_trials(equal_devices(devices), limits, groups, scheduler);
      if (ours.makespan_s > theirs.makespan_s * (1 + 1e-9)) FAIL("worse than the source in round " << round);
      if (theirs.makespan_s < theirs.bound_s * (1 - 1e-9)) FAIL("faster than the bound in round " << round);
    }
    ratios.push_back(ours.makespan_s / best);
    worst = std::max(worst, ratios.back());
  }
  std::sort(ratios.begin(), ratios.end());
  CHECK(ratios[ratios.size() / 2] <= 1.0 + 1e-9);
  CHECK(worst <= 1.05);
}

TEST_CASE("trials: a few that come while many are left join the plan, at their place by length") {
  test::Random random(test::seed());
  INFO("seed " << test::seed());
  const TrialLimits limits{4, 8, 1};
  TrialRun run(equal_devices(20), limits);
  const auto policy = make_trial_policy(TrialScheduler::kGpushare);
  const auto add = [&](double budget_s) {
    return run.add({"t" + std::to_string(run.trials().size()), budget_s, 1.2, 1.05, 0});
  };
  std::vector<size_t> first;
  for (int i = 0; i < 500; ++i) first.push_back(add(test::uniform(random, 20, 100)));
  policy->arrived(run, first);
  const size_t longest = add(101), shortest = add(1);
  policy->arrived(run, {shortest, longest});
  CHECK(run.trials()[longest].width == 0);  // the devices are full: it waits
  std::vector<double> starts(2, 0);
  size_t arrivals = 0;
  while (run.unfinished_count() > 0) {
    const double next = std::min(run.next_completion_s(), policy->wake_s());
    REQUIRE(next < 1e300);
    run.advance(next);
    if (!run.complete().empty()) policy->finished(run);
    if (policy->wake_s() <= run.now_s()) policy->woken(run);
    for (const size_t i : {0, 1})
      if (run.trials()[i == 0 ? longest : shortest].started && starts[size_t(i)] == 0)
        starts[size_t(i)] = run.now_s();
    if (++arrivals <= 100) policy->arrived(run, {add(test::uniform(random, 20, 100))});
  }
  CHECK(starts[0] < starts[1] / 4);  // among the first that start, and among the last
  for (const TrialRun::State& state : run.trials()) CHECK(state.finished);
}

TEST_CASE("trials: single arrivals among many cost little of the makespan") {
  test::Random random(test::seed());
  INFO("seed " << test::seed());
  std::vector<TrialGroup> groups = random_groups(random, 600, true);
  double work_s = 0;
  for (const Trial& trial : groups[0].trials) work_s += trial.budget_s;
  for (int i = 0; i < 60; ++i) {
    groups.push_back(random_groups(random, 1, true)[0]);
    groups.back().arrival_s = test::uniform(random, 0, 1000) / 1000.0 * work_s / 20 / 2.3;
    groups.back().trials[0].name = "late" + std::to_string(i);
  }
  const TrialLimits limits{4, 8, 1};
  const double ours = play_trials(equal_devices(20), limits, groups, TrialScheduler::kGpushare).makespan_s;
  CHECK(ours <= 1.15 * trials_bound(equal_devices(20), limits, groups));
  CHECK(ours <= play_trials(equal_devices(20), limits, groups, TrialScheduler::kDynamicFluid).makespan_s);
}

TEST_CASE("trials: the distance from the bound with overheads") {
  test::Random random(test::seed());
  INFO("seed " << test::seed());
  std::vector<double> ours;
  std::vector<double> fixed;
  std::vector<double> dynamic;
  for (int round = 0; round < 60; ++round) {
    const int n = int(test::uniform(random, 1, 16));
    const TrialLimits limits{4, std::min(n, 8), 0};
    const auto groups = random_groups(random, int(test::uniform(random, 2, 40)), true);
    const auto plan = plan_trials(equal_devices(n), limits, groups, TrialScheduler::kGpushare);
    ours.push_back(plan.makespan_s / plan.bound_s);
    fixed.push_back(plan_trials(equal_devices(n), limits, groups, TrialScheduler::kStaticFluid).makespan_s /
                    plan.bound_s);
    dynamic.push_back(
        plan_trials(equal_devices(n), limits, groups, TrialScheduler::kDynamicFluid).makespan_s /
        plan.bound_s);
    if (ours.back() > std::min(fixed.back(), dynamic.back()) * (1 + 1e-9))
      FAIL("worse than the source in round " << round);
  }
  for (auto* list : {&ours, &fixed, &dynamic}) std::sort(list->begin(), list->end());
  CHECK(ours[30] <= 1.15);
  CHECK(ours.back() <= 1.25);
  CHECK(fixed[30] > ours[30]);
  CHECK(dynamic[30] > ours[30]);
}

TEST_CASE(
    "trials: groups over time, change costs, memory and unequal devices: nothing is lost or above capacity") {
  test::Random random(test::seed());
  INFO("seed " << test::seed());
  for (int round = 0; round < 60; ++round) {
    std::vector<TrialDevice> devices(test::uniform(random, 1, 5));
    for (TrialDevice& device : devices) {
      device.memory_bytes = test::uniform(random, 2, 8);
      if (round % 2 == 0) device.speed = double(test::uniform(random, 1, 3));
    }
    const TrialLimits limits{int(test::uniform(random, 1, 4)), int(test::uniform(random, 1, 5)),
                             double(test::uniform(random, 0, 4))};
    std::vector<TrialGroup> groups;
    for (size_t g = test::uniform(random, 1, 3); g-- > 0;) {
      groups.push_back(random_groups(random, int(test::uniform(random, 1, 9)), true)[0]);
      groups.back().arrival_s = double(test::uniform(random, 0, 80));
      for (Trial& trial : groups.back().trials) trial.memory_bytes = test::uniform(random, 0, 9);
    }
    uint64_t largest = 0;
    for (const TrialDevice& device : devices) largest = std::max(largest, device.memory_bytes);
    for (TrialScheduler scheduler : {TrialScheduler::kFifo, TrialScheduler::kStaticFluid,
                                     TrialScheduler::kDynamicFluid, TrialScheduler::kGpushare}) {
      const auto plan = plan_trials(devices, limits, groups, scheduler);
      size_t row = 0;
      for (const TrialGroup& group : groups) {
        for (const Trial& trial : group.trials) {
          const auto& got = plan.trials[row++];
          if (got.rejected != (trial.memory_bytes > largest)) FAIL("rejected wrongly in round " << round);
          if (!got.rejected && got.finish_s <= group.arrival_s)
            FAIL("never ran in round " << round << " under " << int(scheduler));
        }
      }
      if (plan.utilization > 1 + 1e-9) FAIL("above capacity in round " << round);
      if (plan.makespan_s < plan.bound_s * (1 - 1e-9)) FAIL("faster than the bound in round " << round);
    }
  }
}

// A run with devices that fail: who ran where, by spans.
struct Failing {
  std::vector<Device> devices;
  TrialLimits limits;
  std::vector<TrialGroup> groups;
  std::vector<TrialSpan> spans;

  std::vector<TrialDevice> for_trials() const {
    std::vector<TrialDevice> out;
    for (const Device& device : devices) out.push_back({device.speed, device.memory_bytes});
    return out;
  }
  TrialResult play(TrialScheduler scheduler) {
    spans.clear();
    return play_trials(for_trials(), limits, groups, scheduler, {}, &spans, device_changes(devices));
  }
  // The parts of its work that a trial did, where changes cost nothing. A width has one span for each of its devices.
  double work_of(size_t row, const Trial& trial) const {
    double sum = 0;
    for (const TrialSpan& span : spans) {
      if (span.trial != row) continue;
      double slowest = 1e300;
      for (const TrialSpan& other : spans)
        if (other.trial == row && other.begin_s == span.begin_s && other.end_s == span.end_s)
          slowest = std::min(slowest, devices[size_t(other.device)].speed);
      sum += (span.end_s - span.begin_s) * slowest / duration(trial, span.width) / std::max(1, span.width);
    }
    return sum;
  }
};

constexpr TrialScheduler kAllSchedulers[] = {TrialScheduler::kFifo, TrialScheduler::kStaticFluid,
                                             TrialScheduler::kDynamicFluid, TrialScheduler::kGpushare};

TEST_CASE("trials: a device that fails gives its trial to another one, or has it back later") {
  Failing run;
  run.devices.resize(2);
  run.devices[1].down = {{4, 100}};
  run.limits = {1, 1, 2};
  run.groups = {group_of({10, 12})};
  for (const TrialScheduler scheduler : kAllSchedulers) {
    INFO("scheduler " << int(scheduler));
    const TrialResult got =
        run.play(scheduler);  // the first ends at 10 or 12, the other repeats the cost of a change
    CHECK(got.makespan_s == Approx(scheduler == TrialScheduler::kFifo ? 20 : 22).margin(2.001));
    CHECK(got.trials[0].stranded == false);
  }
  run.devices[0].down = {{4, 20}};  // nothing is up from 4 to 20
  for (const TrialScheduler scheduler : kAllSchedulers) {
    INFO("scheduler " << int(scheduler));
    CHECK(run.play(scheduler).makespan_s == Approx(20 + 2 + 6 + 2 + 8));
  }
  run.devices[0].down = {{4, cluster::kNever}};  // all that is left waits for the one that comes back at 100
  CHECK(run.play(TrialScheduler::kGpushare).makespan_s == Approx(100 + 2 + 6 + 2 + 8));
  run.devices[1].down = {{4, cluster::kNever}};
  for (const TrialScheduler scheduler : kAllSchedulers) {
    const TrialResult got = run.play(scheduler);
    CHECK((got.trials[0].stranded && got.trials[1].stranded));
    CHECK(got.makespan_s == 0);  // no trial has ended
  }
}

TEST_CASE("trials: a trial that only a failed device can hold keeps no other waiting") {
  Failing run;
  run.devices.resize(2);
  run.devices[0].memory_bytes = 10;
  run.devices[1].memory_bytes = 100;
  run.devices[1].down = {{0, 50}};
  run.limits = {2, 2, 0};
  run.groups = {group_of({10, 10, 10})};
  run.groups[0].trials[0].memory_bytes = 50;
  for (const TrialScheduler scheduler : kAllSchedulers) {
    INFO("scheduler " << int(scheduler));
    const TrialResult got = run.play(scheduler);
    CHECK(got.trials[0].start_s == Approx(50));
    CHECK(std::max(got.trials[1].finish_s, got.trials[2].finish_s) == Approx(20));
    CHECK(got.makespan_s == Approx(60));
  }
}

TEST_CASE("trials: devices that fail and come back: nothing is lost, done twice or run where nothing is up") {
  test::Random random(test::seed());
  INFO("seed " << test::seed());
  for (int round = 0; round < 150; ++round) {
    Failing run;
    run.devices.resize(test::uniform(random, 1, 5));
    for (Device& device : run.devices) {
      device.memory_bytes = test::uniform(random, 2, 8);
      if (round % 2 == 0) device.speed = 0.5 * double(test::uniform(random, 1, 4));
      double at = double(test::uniform(random, 0, 30));
      for (size_t n = test::uniform(random, 0, 3); n > 0; --n) {
        const double until = at + double(test::uniform(random, 1, 40));
        device.down.push_back({at, n == 1 && test::uniform(random, 0, 3) == 0 ? cluster::kNever : until});
        at = until + double(test::uniform(random, 0, 40));
      }
    }
    run.limits = {int(test::uniform(random, 1, 4)), int(test::uniform(random, 1, 5)), 0};
    for (size_t g = test::uniform(random, 1, 3); g-- > 0;) {
      run.groups.push_back(random_groups(random, int(test::uniform(random, 1, 9)), round % 3 == 0)[0]);
      run.groups.back().arrival_s = double(test::uniform(random, 0, 80));
      for (Trial& trial : run.groups.back().trials) trial.memory_bytes = test::uniform(random, 0, 9);
    }
    uint64_t largest = 0, stays = 0;
    for (const Device& device : run.devices) {
      largest = std::max(largest, device.memory_bytes);
      if (device.down.empty() || device.down.back().until_s < cluster::kNever)
        stays = std::max(stays, device.memory_bytes);
    }
    for (const TrialScheduler scheduler : kAllSchedulers) {
      INFO("round " << round << " scheduler " << int(scheduler));
      const TrialResult got = run.play(scheduler);
      const bool all_gone = stays == 0;
      size_t row = 0;
      for (const TrialGroup& group : run.groups)
        for (const Trial& trial : group.trials) {
          const TrialResult::Row& at = got.trials[row];
          if (at.rejected != (trial.memory_bytes > largest)) FAIL("rejected wrongly");
          const bool returns = !all_gone && trial.memory_bytes <= stays;
          if (!at.rejected && returns && at.stranded) FAIL("left waiting");
          const double done = run.work_of(row, trial);
          if (at.rejected ? done > 0 : at.stranded ? done > 1 - 1e-9 : std::abs(done - 1) > 1e-6)
            FAIL("did " << done << " of its work");
          ++row;
        }
      for (const TrialSpan& span : run.spans) {
        double held = 0;
        uint64_t memory = 0;
        for (const TrialSpan& other : run.spans)
          if (other.device == span.device && other.begin_s <= span.begin_s && span.begin_s < other.end_s) {
            held += std::min(1.0, size_of(other.width));
            size_t of = other.trial;
            for (const TrialGroup& group : run.groups) {
              if (of < group.trials.size()) {
                memory += group.trials[of].memory_bytes;
                break;
              }
              of -= group.trials.size();
            }
          }
        if (held > 1 + 1e-9 || memory > run.devices[size_t(span.device)].memory_bytes) FAIL("above capacity");
        for (const Device::Down& down : run.devices[size_t(span.device)].down)
          if (span.end_s > down.from_s + 1e-9 && span.begin_s < down.until_s - 1e-9)
            FAIL("ran on a failed device");
      }
    }
  }
}

// Devices of two speeds: a trial on a fast and a slow device goes at the pace of the slow one.
TEST_CASE("trials: a slow device beside a fast one is no worse than the fast one alone") {
  std::vector<TrialDevice> devices(2);
  devices[0].speed = 0.1;
  const auto ours = plan_trials(devices, {1, 2, 0}, {group_of({10, 10})}, TrialScheduler::kGpushare);
  CHECK(ours.makespan_s == Approx(20));  // both on the fast one; wide on both they would take 50 each
  // A width of two is as fast as the slow device: 30 on it take 30 / 2 / 0.1.
  CHECK(play_trials(devices, {1, 2, 0}, {group_of({30})}, TrialScheduler::kStaticFluid).makespan_s ==
        Approx(150));
  CHECK(play_trials(devices, {1, 2, 0}, {group_of({30})}, TrialScheduler::kGpushare).makespan_s ==
        Approx(30));
  // One moves to the fast device when that becomes free, where that pays for the change.
  devices[0].speed = 0.5;
  CHECK(play_trials(devices, {1, 1, 1}, {group_of({10, 30})}, TrialScheduler::kGpushare).makespan_s <= 35);
}

TEST_CASE("trials: no rule that gpushare knows ends sooner, on equal and on mixed devices") {
  test::Random random(test::seed());
  INFO("seed " << test::seed());
  for (int round = 0; round < 300; ++round) {
    std::vector<TrialDevice> devices(test::uniform(random, 1, 5));
    for (TrialDevice& device : devices)
      if (round % 2 == 0) device.speed = 0.25 * double(test::uniform(random, 1, 8));
    const TrialLimits limits{int(test::uniform(random, 1, 4)), int(test::uniform(random, 1, 4)),
                             double(test::uniform(random, 0, 5))};
    std::vector<TrialGroup> groups = random_groups(random, int(test::uniform(random, 1, 10)), round % 3 == 0);
    if (round % 4 == 0) {
      groups.push_back(random_groups(random, int(test::uniform(random, 1, 5)), round % 3 == 0)[0]);
      groups[1].arrival_s = double(test::uniform(random, 0, 60));
    }
    const double planned = plan_trials(devices, limits, groups, TrialScheduler::kGpushare).makespan_s;
    const double played = play_trials(devices, limits, groups, TrialScheduler::kGpushare).makespan_s;
    for (TrialScheduler rule :
         {TrialScheduler::kFifo, TrialScheduler::kStaticFluid, TrialScheduler::kDynamicFluid}) {
      const double theirs = play_trials(devices, limits, groups, rule).makespan_s;
      if (planned > theirs * (1 + 1e-9))
        FAIL("planned worse than rule " << int(rule) << " in round " << round);
      // What arrives later is not known in a run, so that a rule may be lucky there.
      if (groups.size() == 1 && played > theirs * (1 + 1e-6))
        FAIL("played worse than rule " << int(rule) << " in round " << round);
    }
  }
}

// Population based training without barriers: each of 8 members goes on as soon as its own step has ended. A
// plan for the last end of the trials that are there changes all of them at every completion.
TEST_CASE(
    "trials: where each completion brings another, gpushare ends no later than the source in the mean") {
  test::Random random(test::seed());
  INFO("seed " << test::seed());
  double sums[3] = {};
  for (int round = 0; round < 6; ++round) {
    std::vector<double> steps;
    for (int member = 0; member < 8; ++member) steps.push_back(double(test::uniform(random, 60, 240)) / 10);
    int at = 0;
    for (TrialScheduler scheduler :
         {TrialScheduler::kStaticFluid, TrialScheduler::kDynamicFluid, TrialScheduler::kGpushare}) {
      TrialRun run(std::vector<TrialDevice>(16), {4, 8, 1});
      const auto policy = make_trial_policy(scheduler);
      std::vector<size_t> owner;
      std::vector<int> done(8, 0);
      const auto step = [&](TrialRun& on, size_t member) {
        Trial trial{"t" + std::to_string(owner.size()), steps[member], 1.2, 1.05, 0};
        owner.push_back(member);
        return on.add(trial);
      };
      std::vector<size_t> first;
      for (size_t member = 0; member < 8; ++member) first.push_back(step(run, member));
      policy->arrived(run, first);
      run_trials(run, *policy, [&](TrialRun& on, const std::vector<size_t>& finished) {
        std::vector<size_t> added;
        for (const size_t trial : finished)
          if (++done[owner[trial]] < 8) added.push_back(step(on, owner[trial]));
        return added;
      });
      CHECK(run.unfinished_count() == 0);
      CHECK(owner.size() == 64);
      CHECK(run.area() <= 16 * run.now_s() * (1 + 1e-9));
      sums[at++] += run.now_s();
    }
  }
  CHECK(sums[2] <= std::min(sums[0], sums[1]));
}

}  // namespace gpushare::cluster
