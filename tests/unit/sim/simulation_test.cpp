// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "sim/simulation.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

using namespace gpushare;
using namespace gpushare::sim;

namespace {

constexpr uint64_t kMs = 1'000'000;

std::unique_ptr<sched::Policy> policy(const std::string& name) {
  return std::move(*sched::make_policy(name));
}

Job job(uint64_t arrival_ms, uint64_t iterations, double iteration_ms, uint64_t persistent,
        uint64_t ephemeral) {
  Job out;
  out.name = "job";
  out.arrival_ns = arrival_ms * kMs;
  out.iterations = iterations;
  out.iteration_ns = iteration_ms * 1e6;
  out.persistent_bytes = persistent;
  out.ephemeral_bytes = ephemeral;
  return out;
}

SimulationResult run(SimulationOptions options, std::vector<Job> jobs, const std::string& name,
                     EventSink* sink = nullptr) {
  Simulation simulation(std::move(options), std::move(jobs), policy(name), sink);
  auto result = simulation.run();
  INFO(result.status().message());
  REQUIRE(result.ok());
  return std::move(*result);
}

// Asks again at every iteration boundary: what skipping over equal decisions must not change.
class EveryIteration final : public sched::Policy {
 public:
  explicit EveryIteration(const std::string& name) : inner_(policy(name)) {}
  std::string_view name() const override { return inner_->name(); }
  sched::Answers answers() const override { return inner_->answers(); }
  bool before(const sched::SessionView& a, const sched::SessionView& b) const override {
    return inner_->before(a, b);
  }
  uint64_t rank(const sched::SessionView& session) const override { return inner_->rank(session); }
  uint64_t may_run(const sched::SessionView& session, const sched::DeviceView& device,
                   uint64_t now_ns) const override {
    return inner_->may_run(session, device, now_ns);
  }
  sched::GivesWay gives_way(const sched::SessionView& a, const sched::SessionView& b) const override {
    return inner_->gives_way(a, b);
  }
  sched::Share share(const sched::SessionView& session) const override { return inner_->share(session); }
  sched::MayJoin may_join(const sched::SessionView& session, const sched::Joining& what) const override {
    return inner_->may_join(session, what);
  }

 private:
  std::unique_ptr<sched::Policy> inner_;
};

// Holds what a trace must keep to, whatever the policy.
class Auditor final : public EventSink {
 public:
  explicit Auditor(uint64_t capacity) : capacity_(capacity) {}
  void session(const SessionEvent& event) override {
    tick(event.now_ns);
    const auto step = static_cast<size_t>(event.step);
    CHECK(state_[event.session] == "\0qqrohir"[step]);
    state_[event.session] = "qxrohirx"[step];
    if (event.step == SessionStep::kRefused) CHECK_FALSE(event.text.empty());
    if (event.step == SessionStep::kAdmitted) CHECK(lanes_.contains(event.lane));
  }
  void lane_opened(uint64_t now, sched::LaneId lane, uint64_t bytes) override {
    tick(now);
    CHECK(lanes_.emplace(lane, bytes).second);
  }
  void lane_resized(uint64_t now, sched::LaneId lane, uint64_t bytes) override {
    tick(now);
    CHECK(lanes_.contains(lane));
    lanes_[lane] = bytes;
  }
  void lane_closed(uint64_t now, sched::LaneId lane) override {
    tick(now);
    CHECK(lanes_.erase(lane) == 1);
  }
  void iterations(sched::LaneId lane, sched::SessionId id, uint64_t start, uint64_t end,
                  uint64_t count) override {
    tick(end);
    CHECK(start <= end);
    CHECK(start >= lane_end_[lane]);   // iterations of a lane never overlap
    CHECK(start >= session_end_[id]);  // nor those of a session
    lane_end_[lane] = session_end_[id] = end;
    done_[id] += count;
    if (state_[id] != 'r') ++out_of_place_;
  }
  void memory(uint64_t now, uint64_t persistent, uint64_t lanes, uint64_t ephemeral) override {
    tick(now);
    CHECK(persistent + lanes <= capacity_);
    CHECK(ephemeral <= lanes);
  }
  void finish(const std::vector<Job>& jobs, const SimulationResult& result) {
    CHECK(out_of_place_ == 0);
    CHECK(lanes_.empty());
    for (size_t i = 0; i < jobs.size(); ++i) {
      CHECK(state_[i + 1] == 'x');
      CHECK(done_[i + 1] == (result.jobs[i].refused ? 0 : jobs[i].iterations));  // none lost, none twice
    }
  }

 private:
  void tick(uint64_t now) {
    CHECK(now >= now_);
    now_ = now;
  }
  uint64_t capacity_;
  uint64_t now_ = 0;
  int out_of_place_ = 0;
  // By session: q queued, r resident, o on its way out, h in host memory, i on its way in, x gone.
  std::map<sched::SessionId, char> state_;
  std::map<sched::LaneId, uint64_t> lanes_, lane_end_;
  std::map<sched::SessionId, uint64_t> done_, session_end_;
};

std::vector<Job> random_jobs(test::Random& random, size_t count, uint64_t capacity) {
  std::vector<Job> jobs;
  uint64_t arrival = 0;
  for (size_t i = 0; i < count; ++i) {
    arrival += test::uniform(random, 0, 400);
    jobs.push_back(job(arrival, test::uniform(random, 1, 60),
                       static_cast<double>(test::uniform(random, 500'000, 10'500'000)) * 1e-6,
                       test::uniform(random, 0, capacity / 4), test::uniform(random, 1, capacity * 9 / 8)));
    jobs.back().priority = static_cast<int32_t>(test::uniform(random, 0, 3));
    jobs.back().demand = static_cast<double>(test::uniform(random, 1, 10)) / 10;
  }
  return jobs;
}

// Completion times under processor sharing of jobs that may arrive at different times.
std::vector<double> processor_sharing(const std::vector<Job>& jobs) {
  std::vector<double> left, end(jobs.size(), 0);
  for (const Job& each : jobs) left.push_back(each.work_ns());
  double now = 0;
  size_t next = 0, done = 0;
  std::vector<size_t> active;
  while (done < jobs.size()) {
    if (active.empty()) now = std::max(now, static_cast<double>(jobs[next].arrival_ns));
    while (next < jobs.size() && static_cast<double>(jobs[next].arrival_ns) <= now) active.push_back(next++);
    double step = 1e300;
    for (const size_t i : active) step = std::min(step, left[i] * static_cast<double>(active.size()));
    if (next < jobs.size()) step = std::min(step, static_cast<double>(jobs[next].arrival_ns) - now);
    now += step;
    for (const size_t i : active) left[i] -= step / static_cast<double>(active.size());
    std::erase_if(active, [&](size_t i) {
      if (left[i] > 1e-3) return false;
      end[i] = now;
      ++done;
      return true;
    });
  }
  return end;
}

}  // namespace

TEST_CASE("one lane is arithmetic: fifo adds up, srtf sorts, both end together") {
  const std::vector<Job> jobs = {job(0, 100, 10, 1, 10), job(0, 10, 10, 1, 10), job(0, 50, 10, 1, 10)};
  SimulationOptions options;
  options.capacity_bytes = 1000;
  options.max_lanes = 1;
  const SimulationResult fifo = run(options, jobs, "fifo");
  CHECK(fifo.makespan_ns == 1600 * kMs);
  CHECK(fifo.completion_mean_ns == Approx((1000 + 1100 + 1600) / 3.0 * 1e6));
  CHECK(fifo.queue_mean_ns == Approx((0 + 1000 + 1100) / 3.0 * 1e6));
  CHECK(fifo.completion_p95_ns == 1600 * kMs);
  CHECK(fifo.utilization == Approx(1));
  CHECK(fifo.switches == 2);
  const SimulationResult srtf = run(options, jobs, "srtf");
  CHECK(srtf.makespan_ns == 1600 * kMs);
  CHECK(srtf.completion_mean_ns == Approx((100 + 600 + 1600) / 3.0 * 1e6));
}

TEST_CASE("srtf preempts at the boundary of the iteration under way") {
  const std::vector<Job> jobs = {job(0, 10, 100, 1, 10), job(250, 1, 20, 1, 10)};
  SimulationOptions options;
  options.capacity_bytes = 1000;
  const SimulationResult result = run(options, jobs, "srtf");
  CHECK(result.jobs[1].start_ns == 300 * kMs);
  CHECK(result.jobs[1].end_ns == 320 * kMs);
  CHECK(result.jobs[0].end_ns == 1020 * kMs);
  CHECK(result.switches == 2);
}

TEST_CASE("paging charges copies at the link's bandwidth, and only of what has run") {
  std::vector<Job> jobs = {job(0, 10, 100, 600, 10), job(250, 1, 20, 600, 10), job(5000, 1, 1, 600, 10)};
  SimulationOptions options;
  options.capacity_bytes = 1000;
  options.host_link_bytes_per_s = 6000;  // 600 bytes: 100 ms
  const SimulationResult result = run(options, jobs, "srtf");
  CHECK(result.page_outs == 1);
  CHECK(result.page_ins == 1);
  CHECK(result.paged_bytes == 1200);
  CHECK(result.jobs[1].start_ns == 400 * kMs);              // boundary at 300, then the copy
  CHECK(result.jobs[0].end_ns == (420 + 100 + 700) * kMs);  // back in, the rest
  CHECK(result.oom == 0);
  options.paging = false;
  const SimulationResult waiting = run(options, jobs, "srtf");
  CHECK(waiting.page_outs == 0);
  CHECK(waiting.jobs[1].start_ns == 1000 * kMs);
}

TEST_CASE("lanes in parallel share compute by demand") {
  std::vector<Job> jobs = {job(0, 10, 100, 1, 10), job(0, 10, 100, 1, 10)};
  SimulationOptions options;
  options.capacity_bytes = 1000;
  options.tell_policy = false;
  for (Job& each : jobs) each.demand = 0.5;
  CHECK(run(options, jobs, "pack").makespan_ns == 1000 * kMs);
  for (Job& each : jobs) each.demand = 1;
  CHECK(run(options, jobs, "pack").makespan_ns == 2000 * kMs);
  for (Job& each : jobs) each.demand = 0;  // unknown: 0.93 each
  CHECK(static_cast<double>(run(options, jobs, "pack").makespan_ns) == Approx(1860e6));
  options.interference = false;
  CHECK(run(options, jobs, "pack").makespan_ns == 1000 * kMs);
}

TEST_CASE("a job larger than the device is refused at admission, the others run") {
  const std::vector<Job> jobs = {job(0, 1, 10, 900, 200), job(0, 1, 10, 1, 10)};
  SimulationOptions options;
  options.capacity_bytes = 1000;
  Auditor auditor(1000);
  const SimulationResult result = run(options, jobs, "fair", &auditor);
  auditor.finish(jobs, result);
  CHECK(result.refused == 1);
  CHECK(result.completed == 1);
  CHECK(result.jobs[0].refused);
  CHECK(result.jobs[0].reason.find("could not run alone") != std::string::npos);
  CHECK(result.notes.back().find("refused") != std::string::npos);
}

TEST_CASE("fair in one lane is processor sharing, weights and late arrivals included") {
  test::Random random(test::seed());
  std::vector<Job> jobs;
  for (int i = 0; i < 30; ++i)
    jobs.push_back(job(test::uniform(random, 0, 20'000), test::uniform(random, 200, 3000), 1, 1, 10));
  std::sort(jobs.begin(), jobs.end(), [](const Job& a, const Job& b) { return a.arrival_ns < b.arrival_ns; });
  SimulationOptions options;
  options.max_lanes = 1;
  const SimulationResult result = run(options, jobs, "fair");
  const std::vector<double> expected = processor_sharing(jobs);
  for (size_t i = 0; i < jobs.size(); ++i) {
    INFO("job " << i);
    CHECK(static_cast<double>(result.jobs[i].end_ns) == Approx(expected[i]).epsilon(0.005).margin(60e6));
  }
  std::vector<Job> weighted = {job(0, 1000, 1, 1, 10), job(0, 3000, 1, 1, 10)};
  weighted[1].weight = 3;
  const SimulationResult shares = run(options, weighted, "fair");
  CHECK(static_cast<double>(shares.jobs[0].end_ns) == Approx(4000e6).epsilon(0.002));
  CHECK(static_cast<double>(shares.jobs[1].end_ns) == Approx(4000e6).epsilon(0.002));
}

TEST_CASE("skipping over equal decisions changes nothing") {
  const uint64_t seed = test::seed();
  INFO("GPUSHARE_TEST_SEED=" << seed);
  test::Random random(seed);
  for (int round = 0; round < 20; ++round) {
    std::vector<Job> jobs = random_jobs(random, 25, 1000);
    // No two of equal priority, which would share as under fair: there rounded nanoseconds decide who is behind.
    for (size_t i = 0; i < jobs.size(); ++i) jobs[i].priority = static_cast<int32_t>(i * 7 % 25);
    SimulationOptions options;
    options.capacity_bytes = 1000;
    options.max_lanes = 1;
    options.host_link_bytes_per_s = 20'000;
    for (const char* name : {"fifo", "srtf", "priority", "pack"}) {
      INFO("policy " << name << ", round " << round);
      const SimulationResult fast = run(options, jobs, name);
      Simulation slow_simulation(options, jobs, std::make_unique<EveryIteration>(name));
      const auto slow = slow_simulation.run();
      REQUIRE(slow.ok());
      CHECK(slow->picks > fast.picks);
      for (size_t i = 0; i < jobs.size(); ++i) {
        REQUIRE(slow->jobs[i].refused == fast.jobs[i].refused);
        // Equal but for one rounded nanosecond an iteration.
        REQUIRE(static_cast<double>(slow->jobs[i].end_ns) ==
                Approx(static_cast<double>(fast.jobs[i].end_ns)).margin(2000));
      }
    }
  }
}

TEST_CASE("every policy keeps the rules of the trace on random jobs, and repeats itself") {
  const uint64_t seed = test::seed();
  INFO("GPUSHARE_TEST_SEED=" << seed);
  test::Random random(seed + 1);
  for (int round = 0; round < 10; ++round) {
    const std::vector<Job> jobs = random_jobs(random, 40, 1000);
    for (const char* name : sched::policy_names()) {
      for (const auto finder : {sched::LaneFinderKind::kSalus, sched::LaneFinderKind::kBalanced,
                                sched::LaneFinderKind::kCompact}) {
        SimulationOptions options;
        options.capacity_bytes = 1000;
        options.host_link_bytes_per_s = 50'000;
        options.lane_finder = finder;
        options.switch_ns = 1000;
        options.jitter = round % 2 == 0 ? 0 : 0.2;
        options.seed = seed;
        INFO("policy " << name << ", round " << round);
        Auditor auditor(1000);
        const SimulationResult result = run(options, jobs, name, &auditor);
        auditor.finish(jobs, result);
        REQUIRE(result.oom == 0);
        REQUIRE(result.peak_bytes <= 1000);
        REQUIRE(result.peak_promised_bytes <= 1000);
        const SimulationResult again = run(options, jobs, name);
        REQUIRE(again.makespan_ns == result.makespan_ns);
        REQUIRE(again.completion_mean_ns == result.completion_mean_ns);
        REQUIRE(again.picks == result.picks);
      }
    }
  }
}

TEST_CASE("pack's makespan is no worse than fifo's when it knows the interference, whatever the demands") {
  const uint64_t seed = test::seed();
  INFO("GPUSHARE_TEST_SEED=" << seed);
  test::Random random(seed + 2);
  int better = 0;
  for (int round = 0; round < 30; ++round) {
    std::vector<Job> jobs = random_jobs(random, 30, 1000);
    for (Job& each : jobs) each.arrival_ns = 0;
    SimulationOptions options;
    options.capacity_bytes = 1000;
    const SimulationResult fifo = run(options, jobs, "fifo"), pack = run(options, jobs, "pack");
    REQUIRE(static_cast<double>(pack.makespan_ns) <= static_cast<double>(fifo.makespan_ns) * (1 + 1e-6));
    better += pack.makespan_ns < fifo.makespan_ns;
  }
  CHECK(better > 15);
}

TEST_CASE("traces too long to decide on every iteration run in groups, and say so") {
  std::vector<Job> jobs = {job(0, 100'000'000, 1, 1, 10), job(0, 50'000'000, 2, 1, 10)};
  SimulationOptions options;
  options.max_lanes = 1;
  options.max_picks = 10'000;
  const SimulationResult result = run(options, jobs, "fair");
  CHECK(result.picks < 25'000);
  CHECK(result.quantum_ns > 0);
  CHECK(result.iteration_group > 1);
  CHECK(result.makespan_ns == 200'000'000 * kMs);
  CHECK(static_cast<double>(result.jobs[0].end_ns) == Approx(2e14).epsilon(0.001));
  const SimulationResult fifo = run(options, jobs, "fifo");  // its decisions hold by themselves
  CHECK(fifo.quantum_ns == 0);
  CHECK(fifo.iteration_group == 1);
  CHECK(fifo.picks == 2);
}

TEST_CASE("times beyond 64 bits are refused, not taken for times gone by") {
  SimulationOptions options;
  options.capacity_bytes = 1000;
  options.host_link_bytes_per_s = 1e-9;
  Simulation copies(options, {job(0, 10, 100, 600, 10), job(250, 1, 20, 600, 10)}, policy("srtf"));
  CHECK(copies.run().status().code() == GPUSHARE_INVALID_ARGUMENT);
  // Together they do next to nothing.
  const auto table = InterferenceTable::parse(
      R"json({"p100": {"('a', 1)": {"null": 1, "('a', 1)": [1e-30, 1e-30]}}})json", "t.json");
  REQUIRE(table.ok());
  options = {};
  options.table = &*table;
  options.tell_policy = false;
  std::vector<Job> jobs = {job(0, 10, 100, 1, 1), job(0, 10, 100, 1, 1)};
  for (Job& each : jobs) each.config = "a";
  Simulation lanes(options, jobs, policy("pack"));
  CHECK(lanes.run().status().code() == GPUSHARE_INVALID_ARGUMENT);
}

TEST_CASE("options and jobs out of range are refused by name") {
  const std::vector<Job> good = {job(0, 1, 1, 1, 1)};
  const auto refusal = [&](SimulationOptions options, std::vector<Job> jobs) {
    Simulation simulation(std::move(options), std::move(jobs), policy("fifo"));
    const auto result = simulation.run();
    CHECK(result.status().code() == GPUSHARE_INVALID_ARGUMENT);
    return result.status().message();
  };
  SimulationOptions options;
  options.capacity_bytes = 0;
  CHECK(refusal(options, good).find("capacity_bytes") != std::string::npos);
  options = {};
  options.host_link_bytes_per_s = 0;
  CHECK(refusal(options, good).find("host_link") != std::string::npos);
  options = {};
  options.jitter = 2;
  CHECK(refusal(options, good).find("jitter") != std::string::npos);
  options = {};
  options.max_picks = 0;
  CHECK(refusal(options, good).find("max_picks") != std::string::npos);
  CHECK(refusal({}, {}).find("no jobs") != std::string::npos);
  std::vector<Job> bad = good;
  bad[0].iterations = 0;
  CHECK(refusal({}, bad).find("iterations") != std::string::npos);
  bad = good;
  bad[0].iteration_ns = -1;
  CHECK(refusal({}, bad).find("iteration_ns") != std::string::npos);
  bad = good;
  bad[0].weight = 0;
  CHECK(refusal({}, bad).find("weight") != std::string::npos);
  bad = good;
  bad[0].demand = 1.5;
  CHECK(refusal({}, bad).find("demand") != std::string::npos);
  bad = {job(5, 1, 1, 1, 1), job(4, 1, 1, 1, 1)};
  CHECK(refusal({}, bad).find("before") != std::string::npos);
  bad = {job(0, 1'000'000'000'000, 1e10, 1, 1)};
  CHECK(refusal({}, bad).find("can be simulated") != std::string::npos);
  Simulation simulation({}, good, policy("fifo"));
  REQUIRE(simulation.run().ok());
  CHECK(simulation.run().status().code() == GPUSHARE_INVALID_STATE);
}

TEST_CASE("a policy that never runs anybody is reported, and progress can cancel") {
  class Lazy final : public sched::Policy {
   public:
    std::string_view name() const override { return "lazy"; }
    sched::Answers answers() const override { return {.may_run = true}; }
    uint64_t may_run(const sched::SessionView&, const sched::DeviceView&, uint64_t) const override {
      return sched::kUnknown;
    }
  };
  Simulation lazy({}, {job(0, 1, 1, 1, 1), job(0, 1, 1, 1, 1)}, std::make_unique<Lazy>());
  const auto stuck = lazy.run();
  CHECK(stuck.status().code() == GPUSHARE_INVALID_STATE);
  CHECK(stuck.status().message().find("'lazy'") != std::string::npos);

  // With nothing running yet, the time that the policy names is waited for.
  class Later final : public sched::Policy {
   public:
    std::string_view name() const override { return "later"; }
    sched::Answers answers() const override { return {.may_run = true}; }
    uint64_t may_run(const sched::SessionView&, const sched::DeviceView&, uint64_t) const override {
      return 5 * kMs;
    }
  };
  Simulation later({}, {job(0, 1, 1, 1, 1)}, std::make_unique<Later>());
  const auto waited = later.run();
  REQUIRE(waited.ok());
  CHECK(waited->jobs[0].end_ns == 6 * kMs);

  SimulationOptions options;
  size_t seen = 0;
  options.progress = [&](uint64_t, size_t finished, size_t jobs) {
    CHECK(jobs == 3);
    seen = finished;
    return finished < 2;
  };
  Simulation cancelled(options, {job(0, 1, 1, 1, 1), job(0, 1, 1, 1, 1), job(0, 1, 1, 1, 1)}, policy("fifo"));
  CHECK(cancelled.run().status().code() == GPUSHARE_CANCELLED);
  CHECK(seen == 2);
}

TEST_CASE("a job that thinks waits for each iteration, and keeps its rank and its weight") {
  std::vector<Job> jobs{job(0, 100, 10, 1, 1)};
  jobs[0].think_ns = 30 * kMs;
  const SimulationResult alone = run({}, jobs, "fair");
  CHECK(alone.jobs[0].end_ns == (100 * 10 + 99 * 30) * kMs);
  CHECK(alone.jobs[0].service_ns == 1000 * kMs);

  // A moment of thought: beside a job that has always work it has its turns, by rank or by weight.
  jobs[0].think_ns = kMs / 2;
  jobs[0].priority = 1;
  jobs.push_back(job(0, 1000, 10, 1, 1));
  SimulationOptions options;
  options.max_lanes = 1;
  const SimulationResult ranked = run(options, jobs, "priority");
  CHECK(ranked.jobs[0].end_ns < 1.1 * (100 * 10 + 99 * 0.5) * kMs);
  const SimulationResult shared = run(options, jobs, "fair");
  CHECK(shared.jobs[0].end_ns > 1.9 * 1000 * kMs);
  CHECK(shared.jobs[0].end_ns < 2.2 * 1000 * kMs);
}

TEST_CASE("a session keeps its lane while its run goes on: what is reported of the run is no boundary") {
  std::vector<Job> jobs{job(1554, 9, 1180, 1, 500), job(2331, 480, 35, 1, 500), job(4662, 526, 12, 1, 300),
                        job(6216, 1722, 11, 1, 600)};
  for (Job& each : jobs) each.demand = 0.1;
  SimulationOptions options;
  options.capacity_bytes = 1004;
  Auditor auditor(options.capacity_bytes);
  const SimulationResult result = run(options, jobs, "priority", &auditor);
  auditor.finish(jobs, result);
  CHECK(result.oom == 0);
}

TEST_CASE("42 inference sessions whose E does not fit side by side all run from the start") {
  std::vector<Job> jobs(42);
  for (size_t i = 0; i < jobs.size(); ++i) {
    jobs[i].name = "model " + std::to_string(i);
    jobs[i].iterations = 50;
    jobs[i].iteration_ns = 5e6;
    jobs[i].persistent_bytes = 11'200'000'000 / 42;
    jobs[i].ephemeral_bytes = 600'000'000;
  }
  for (const char* policy : {"fair", "priority"}) {
    INFO(policy);
    SimulationOptions options;
    options.capacity_bytes = uint64_t{16} << 30;
    class Admitted final : public EventSink {
     public:
      void session(const SessionEvent& event) override {
        if (event.step != SessionStep::kAdmitted) return;
        ++count;
        last_ns = std::max(last_ns, event.now_ns);
      }
      uint64_t count = 0, last_ns = 0;
    } admitted;
    Simulation simulation(options, jobs, std::move(*sched::make_policy(policy)), &admitted);
    const auto result = simulation.run();
    REQUIRE(result.ok());
    CHECK(result->completed == 42);
    CHECK(admitted.count == 42);
    CHECK(admitted.last_ns <= 5'000'000 * 10);  // boundaries of the first iterations
    CHECK(result->peak_promised_bytes <= options.capacity_bytes);
  }
}

TEST_CASE("priority protects: beside two trainings a session of higher priority is at most a tenth slower") {
  std::vector<Job> jobs(3);
  for (size_t i = 0; i < jobs.size(); ++i) {
    const bool serving = i == 2;
    jobs[i].name = serving ? "serving" : "training";
    jobs[i].iterations = serving ? 2000 : 1000;
    jobs[i].iteration_ns = serving ? 5e6 : 100e6;
    jobs[i].persistent_bytes = 100'000'000;
    jobs[i].ephemeral_bytes = 1'000'000'000;
    jobs[i].priority = serving ? 1 : 0;
    jobs[i].arrival_ns = serving ? 1'000'000'000 : 0;
  }
  SimulationOptions options;
  options.capacity_bytes = uint64_t{16} << 30;
  const auto mean_ns = [&](const char* policy) {
    Simulation simulation(options, jobs, std::move(*sched::make_policy(policy)));
    const auto result = simulation.run();
    REQUIRE(result.ok());
    REQUIRE(result->completed == 3);
    const JobResult& serving = result->jobs[2];
    return static_cast<double>(serving.end_ns - serving.arrival_ns) / static_cast<double>(serving.iterations);
  };
  CHECK(mean_ns("priority") <= 1.1 * 5e6);
  CHECK(mean_ns("pack") > 1.1 * 5e6);  // without it
}
