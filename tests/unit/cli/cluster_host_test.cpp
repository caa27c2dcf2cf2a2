// Training jobs on runtimes of this process under a scheduler of the test's: what is placed, moved, resized, and what
// is refused. Nothing here depends on how long anything takes.
// SPDX-License-Identifier: Apache-2.0
#include <functional>

#include "cli/cluster_host_run.hpp"
#include "cli/cluster_host_shares.hpp"
#include "cluster/fluid_scheduler.hpp"
#include "support/catch.hpp"

using namespace gpushare;
using cli::ClusterHostOptions;
using cluster::Action;
using cluster::JobInfo;

namespace {

// Does what the test says at each tick.
class Scripted final : public cluster::Scheduler {
 public:
  using Step = std::function<double(Scripted&, double, std::vector<Action>&)>;
  explicit Scripted(Step step) : step_(std::move(step)) {}
  void device_changed(cluster::DeviceIndex, const cluster::DeviceInfo&, bool, double) override { ++devices; }
  void arrived(cluster::JobId, const JobInfo&, double) override { ++arrivals; }
  void observed(cluster::JobId job, double attained_s, double remaining_s, double slowdown, double) override {
    if (remaining.size() <= job) remaining.resize(job + 1, -1);
    remaining[job] = remaining_s;
    seen = seen || slowdown > 0;
    attained = std::max(attained, attained_s);
  }
  void finished(cluster::JobId, double) override { ++ended; }
  double tick(double now_s, std::vector<Action>& actions) override { return step_(*this, now_s, actions); }

  size_t devices = 0, arrivals = 0, ended = 0;
  int stage = 0;
  bool seen = false;
  double attained = 0;
  std::vector<double> remaining;

 private:
  Step step_;
};

JobInfo host_job(const char* name, uint64_t iterations, uint32_t gang = 1) {
  JobInfo info;
  info.name = name;
  info.iterations = iterations;
  info.work_s = 0.002 * static_cast<double>(iterations);
  info.memory_bytes = 6 << 20;
  info.ephemeral_bytes = 2 << 20;
  info.gang = gang;
  info.demands = {0.5};
  return info;
}

std::vector<cluster::Device> small_devices(size_t count) {
  std::vector<cluster::Device> devices(count);
  for (size_t d = 0; d < count; ++d) {
    devices[d].id = std::to_string(d);
    devices[d].memory_bytes = 64 << 20;
  }
  return devices;
}

Action place(cluster::JobId job, std::vector<uint32_t> devices, bool lent = false) {
  return {Action::Kind::kPlace, job, std::move(devices), lent, ""};
}

base::Result<sim::ClusterResult> on_host(Scripted& scheduler, const std::vector<JobInfo>& jobs,
                                         size_t devices) {
  std::vector<std::string> notes;
  ClusterHostOptions options;
  options.want_spans = true;
  return cli::run_cluster_on_host(jobs, small_devices(devices), scheduler, options, notes);
}

}  // namespace

TEST_CASE("a job is paused and goes on, on another device, with the model that it had") {
  Scripted scheduler([](Scripted& self, double, std::vector<Action>& actions) {
    if (self.stage == 0) {
      actions.push_back(place(0, {0}));
      self.stage = 1;
    } else if (self.stage == 1 && self.seen) {  // some iterations are done
      actions.push_back({Action::Kind::kPause, 0, {}, false, ""});
      self.stage = 2;
    } else if (self.stage == 2) {
      actions.push_back(place(0, {1}));
      self.stage = 3;
    }
    return self.stage == 2 ? 0.0 : cluster::kNever;
  });
  const auto result = on_host(scheduler, {host_job("moved", 40)}, 2);
  INFO((result.ok() ? "" : result.status().message()));
  REQUIRE(result.ok());
  CHECK(scheduler.devices == 2);
  CHECK(scheduler.ended == 1);
  CHECK(scheduler.stage == 3);
  CHECK(scheduler.attained > 0);
  CHECK(result->completed == 1);
  CHECK(result->jobs[0].pauses == 1);
  REQUIRE(result->spans.size() == 2);
  CHECK(result->spans[0].device == 0);
  CHECK(result->spans[1].device == 1);
  CHECK(result->spans[0].end_s <= result->spans[1].begin_s);
}

TEST_CASE("a device that goes down loses its jobs, which go on elsewhere, and may come back") {
  std::vector<cluster::Device> devices(2);
  devices[0].id = "fails";
  devices[1].id = "late";
  for (cluster::Device& device : devices) device.memory_bytes = 64 << 20;
  devices[0].down = {{0.05, cluster::kNever}};
  devices[1].down = {{0, 0.05}};
  const std::vector<JobInfo> jobs = {host_job("moved", 400)};
  for (const char* name : {"fifo", "gpushare"}) {
    INFO(name);
    const auto scheduler = cluster::make_training_scheduler(name);
    std::vector<std::string> notes;
    ClusterHostOptions options;
    options.want_spans = true;
    const auto result = cli::run_cluster_on_host(jobs, devices, *scheduler, options, notes);
    INFO((result.ok() ? "" : result.status().message()));
    REQUIRE(result.ok());
    CHECK(result->completed == 1);
    REQUIRE_FALSE(result->spans.empty());
    CHECK(result->spans.back().device == 1);  // its work takes longer than device 0 is there
    CHECK(result->jobs[0].pauses + 1 == result->spans.size());
  }
}

TEST_CASE("gangs and neighbours run on several devices, weights and batch sizes change while they run") {
  std::vector<JobInfo> jobs = {host_job("gang", 30, 2), host_job("beside", 30)};
  jobs[1].guaranteed = false;
  jobs[1].batch_sizes = {8, 16};
  jobs[1].batch = 8;
  jobs[1].noise_scale = 1e6;
  Scripted scheduler([](Scripted& self, double, std::vector<Action>& actions) {
    if (self.stage == 0) {
      actions = {place(0, {0, 1}), place(1, {1}, true)};
      self.stage = 1;
    } else if (self.stage == 1 && self.ended == 0) {
      actions.push_back({Action::Kind::kReconfigure, 1, {}, false, "", 16});
      actions.push_back({Action::Kind::kResize, 1, {}, false, ""});
      self.stage = 2;
    }
    return self.stage == 1 ? 0.005 : cluster::kNever;
  });
  const auto result = on_host(scheduler, jobs, 2);
  INFO((result.ok() ? "" : result.status().message()));
  REQUIRE(result.ok());
  CHECK(result->completed == 2);
  CHECK(result->reconfigured <= 1);
  CHECK(result->oom == 0);
  CHECK(result->spans.size() == 3);
  CHECK(scheduler.arrivals == 2);
}

TEST_CASE(
    "a job that divides its work grows to two devices, goes on there with its model, and shrinks again") {
  std::vector<JobInfo> jobs = {host_job("trial", 500)};
  jobs[0].divides = true;
  Scripted scheduler([](Scripted& self, double, std::vector<Action>& actions) {
    // Each stage waits for what was measured in the one before it.
    const bool next = self.stage == 0 || self.seen;
    if (!next || self.stage == 3) return cluster::kNever;
    if (self.stage > 0) actions.push_back({Action::Kind::kPause, 0, {}, false, ""});
    actions.push_back(self.stage == 1 ? place(0, {0, 1}) : place(0, {0}));
    actions.back().share = 0.5;
    ++self.stage;
    self.seen = false;
    return cluster::kNever;
  });
  const auto result = on_host(scheduler, jobs, 2);
  INFO((result.ok() ? "" : result.status().message()));
  REQUIRE(result.ok());
  CHECK(result->completed == 1);
  CHECK(scheduler.stage == 3);
  CHECK(result->jobs[0].pauses == 2);
  REQUIRE(result->spans.size() == 4);
  CHECK(result->spans[1].device + result->spans[2].device == 1);  // both, at the same time
  CHECK(result->spans[1].begin_s == result->spans[2].begin_s);
}

TEST_CASE("Fluid's policies run real trials: wide, packed, and too large for any device") {
  using cluster::TrialScheduler;
  const auto trial = [](const char* name, double budget_s, double alpha) {
    cluster::Trial out;
    out.name = name;
    out.budget_s = budget_s;
    out.alpha = alpha;
    return out;
  };
  std::vector<cluster::Trial> trials = {trial("large", 1, 1), trial("long", 0.2, 1), trial("short", 0.01, 1),
                                        trial("short too", 0.01, 1)};
  trials[0].memory_bytes = 65 << 20;
  std::vector<JobInfo> jobs;
  for (const cluster::Trial& one : trials) {
    JobInfo info;
    info.name = one.name;
    info.work_s = one.budget_s;
    info.iterations = static_cast<uint64_t>(one.budget_s * 1e3);
    info.memory_bytes = one.memory_bytes;
    info.divides = true;
    jobs.push_back(info);
  }
  for (const TrialScheduler rule : {TrialScheduler::kFifo, TrialScheduler::kStaticFluid,
                                    TrialScheduler::kDynamicFluid, TrialScheduler::kGpushare}) {
    cluster::FluidScheduler scheduler(rule, {2, 2, 0}, trials);
    std::vector<std::string> notes;
    const auto result = cli::run_cluster_on_host(jobs, small_devices(3), scheduler, {}, notes);
    INFO((result.ok() ? "" : result.status().message()));
    REQUIRE(result.ok());
    CHECK(result->completed == 3);
    CHECK(result->rejected == 1);
    CHECK(scheduler.first_widths()[0] == 0);
    CHECK(scheduler.first_widths()[1] == (rule == TrialScheduler::kFifo ? 1 : 2));
    if (rule == TrialScheduler::kStaticFluid) CHECK(scheduler.first_widths()[2] == -2);
  }
}

TEST_CASE("what cannot be carried out on host is refused and named; nothing is left running") {
  const auto refused = [](std::vector<Action> wrong, const std::vector<JobInfo>& jobs, const char* why) {
    Scripted scheduler([&](Scripted& self, double, std::vector<Action>& actions) {
      if (self.stage++ == 0) actions = wrong;
      return cluster::kNever;
    });
    const auto result = on_host(scheduler, jobs, 1);
    REQUIRE_FALSE(result.ok());
    INFO(result.status().message());
    CHECK(result.status().message().find(why) != std::string::npos);
  };
  const std::vector<JobInfo> one = {host_job("only", 1000)};
  refused({place(0, {0}), place(0, {0})}, one, "'only') is wrong: it runs already");
  refused({place(0, {0, 0})}, one, "not as many as its gang");
  refused({place(0, {3})}, one, "a device is none");
  refused({place(7, {0})}, one, "there is no such job");
  refused({{Action::Kind::kPause, 0, {}, false, ""}}, one, "does not run");
  refused({{Action::Kind::kResize, 0, {}, false, ""}}, one, "does not run");
  refused({place(0, {0}), {Action::Kind::kReconfigure, 0, {}, false, "", 3}}, one, "none of its own");
  refused({place(0, {0}), {Action::Kind::kReject, 0, {}, false, ""}}, one, "it runs");
  std::vector<JobInfo> large = one;
  large[0].memory_bytes = 65 << 20;
  refused({place(0, {0})}, large, "not that much memory");
  refused({}, std::vector<JobInfo>(5000), "at most 64 devices");
}

TEST_CASE("jobs that the scheduler leaves or rejects do not complete, and a run can be cancelled") {
  Scripted scheduler([](Scripted& self, double, std::vector<Action>& actions) {
    if (self.stage++ == 0) actions.push_back({Action::Kind::kReject, 0, {}, false, "no"});
    return cluster::kNever;
  });
  const auto result = on_host(scheduler, {host_job("rejected", 5), host_job("left", 5)}, 1);
  REQUIRE(result.ok());
  CHECK(result->completed == 0);
  CHECK(result->rejected == 1);
  CHECK(result->jobs[0].reason == "no");
  CHECK(result->jobs[1].reason == "the scheduler never placed it to its end");

  Scripted forever([](Scripted& self, double, std::vector<Action>& actions) {
    if (self.stage++ == 0) actions.push_back(place(0, {0}));
    return cluster::kNever;
  });
  std::vector<std::string> notes;
  ClusterHostOptions options;
  options.progress = [](double, size_t, size_t) { return false; };
  const auto cancelled =
      cli::run_cluster_on_host({host_job("long", 1'000'000)}, small_devices(1), forever, options, notes);
  REQUIRE_FALSE(cancelled.ok());
  CHECK(cancelled.status().code() == GPUSHARE_CANCELLED);
}

TEST_CASE("units of jobs that really run are weights of their sessions, set anew in each round") {
  cluster::shares::RoundsProblem problem{20, 20, 1, 0, 1, {}};
  problem.round_s = 0.02;
  for (const char* name : {"a", "b"}) {
    cluster::shares::RoundJob job;
    job.job.name = name;
    job.job.slo = 2;
    job.work = cluster::shares::Work{0.5, 0};
    problem.jobs.push_back(job);
  }
  const auto jobs = cli::make_host_shares(problem, {});
  INFO((jobs.ok() ? "" : jobs.status().message()));
  REQUIRE(jobs.ok());
  // Iterations a second over the objective; rounds are equally long.
  for (const size_t greater : {size_t{0}, size_t{1}}) {
    const std::vector<int64_t> units =
        greater == 0 ? std::vector<int64_t>{19, 1} : std::vector<int64_t>{0, 20};
    double reached[2] = {0, 0};
    while (reached[greater] < 40 / problem.round_s / 2) {
      const auto seen = (*jobs)->round(units, {1, 1});
      REQUIRE(seen.ok());
      for (size_t j = 0; j < 2; ++j) {
        CHECK((*seen)[j].units == units[j]);
        reached[j] += (*seen)[j].performance;
      }
    }
    CHECK(reached[greater] > 2 * reached[1 - greater]);
  }
}

TEST_CASE("requests of jobs that really run are answered in time, or dropped") {
  cluster::shares::RoundsProblem problem{2, 2, 1, 0, 1, {}};
  problem.round_s = 0.02;
  for (const double deadline_ms : {1e6, 1e-4}) {
    cluster::shares::RoundJob job;
    job.job.name = deadline_ms > 1 ? "patient" : "hopeless";
    job.job.load = 200;
    job.work = cluster::shares::Work{0.05, deadline_ms};
    problem.jobs.push_back(job);
  }
  bool stop = false;
  const auto jobs = cli::make_host_shares(problem, [&] { return !stop; });
  REQUIRE(jobs.ok());
  double answered = 0, late = 1;
  while (answered == 0 || late > 0) {  // until both have had a request in the same round
    const auto seen = (*jobs)->round({1, 1}, {200, 200});
    REQUIRE(seen.ok());
    answered = (*seen)[0].performance;
    late = (*seen)[1].performance;
    CHECK((answered == 0 || answered == 1));
  }
  CHECK((*jobs)->round({1, 1}, {200, 1e9}).status().code() == GPUSHARE_INVALID_ARGUMENT);
  stop = true;
  CHECK((*jobs)->round({1, 1}, {200, 200}).status().code() == GPUSHARE_CANCELLED);
}
