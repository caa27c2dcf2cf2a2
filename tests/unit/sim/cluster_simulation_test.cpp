// Several devices under cluster schedulers: arithmetic by hand, and what must hold of every scheduler.
// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <fstream>
#include <functional>
#include <memory>
#include <set>
#include <utility>

#include "cluster/json.hpp"
#include "cluster/plan.hpp"
#include "cluster/training/forward.hpp"
#include "cluster/training/schedulers.hpp"
#include "sim/cluster_simulation.hpp"
#include "sim/cluster_training.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/temporary_file.hpp"

using namespace gpushare;
using cluster::Action;
using cluster::JobInfo;

namespace {

struct FileOf : test::TemporaryFile {
  explicit FileOf(const std::string& text) { std::ofstream(path()) << text; }
};

constexpr uint64_t kGiB = uint64_t{1} << 30;

JobInfo training_job(double arrival_s, double work_s, uint32_t gang = 1, uint64_t memory = 4 * kGiB,
                     double demand = 0.9) {
  JobInfo info;
  info.arrival_s = arrival_s;
  info.work_s = work_s;
  info.gang = gang;
  info.memory_bytes = memory;
  info.demands = {demand};
  return info;
}

std::vector<cluster::Device> sixteen_gib(size_t count) {
  std::vector<cluster::Device> devices(count);
  for (size_t d = 0; d < count; ++d) devices[d].id = std::to_string(d);
  return devices;
}

sim::ClusterResult played(const char* scheduler, const std::vector<JobInfo>& jobs, size_t devices,
                          const sim::ClusterOptions& options = {}) {
  const auto made = cluster::make_training_scheduler(scheduler);
  REQUIRE(made != nullptr);
  const auto result = sim::run_cluster(jobs, sixteen_gib(devices), *made, options);
  INFO(scheduler << ": " << (result.ok() ? "" : result.status().message()));
  REQUIRE(result.ok());
  return *result;
}

}  // namespace

TEST_CASE("fifo gives whole devices in order, gangs at once") {
  const auto result = played("fifo", {training_job(0, 100), training_job(0, 50, 2), training_job(1, 10)}, 2);
  CHECK(result.jobs[0].end_s == Approx(100));
  CHECK(result.jobs[1].start_s == Approx(100));  // the gang waits for both
  CHECK(result.jobs[2].start_s == Approx(150));  // and nobody overtakes it
  CHECK(result.makespan_s == Approx(160));
  CHECK(result.utilization == Approx((100 + 2 * 50 + 10) / (2 * 160.0)));
}

TEST_CASE("srtf pauses what needs longer, and tiresias what has had much") {
  const auto srtf = played("srtf", {training_job(0, 100), training_job(10, 20)}, 1);
  CHECK(srtf.jobs[1].end_s == Approx(30));
  CHECK(srtf.jobs[0].end_s == Approx(120));
  CHECK(srtf.jobs[0].pauses == 1);
  const auto tiresias = played("tiresias", {training_job(0, 10000), training_job(10, 100)}, 1);
  CHECK(tiresias.jobs[1].start_s == Approx(3200));
  CHECK(tiresias.jobs[0].end_s == Approx(10100));
}

TEST_CASE("a job that runs in tiresias's last queue goes on although an earlier one could take its device") {
  // The gang falls to the second queue at 1600 s. The second job does so at 4800 s, behind it, and takes a device at 5000 s, since the third
  // leaves the gang only one.
  const auto result =
      played("tiresias", {training_job(0, 10000, 2), training_job(10, 10000), training_job(5000, 100)}, 2);
  CHECK(result.jobs[2].end_s == Approx(5100));
  CHECK(result.jobs[1].end_s == Approx(11800));
  CHECK(result.jobs[0].end_s == Approx(20000));
}

TEST_CASE("a paused job repeats what its restart costs") {
  sim::ClusterOptions options;
  options.restart_s = 5;
  const auto result = played("srtf", {training_job(0, 100), training_job(10, 20)}, 1, options);
  CHECK(result.jobs[0].end_s == Approx(125));
}

TEST_CASE("packed jobs share a device in proportion to demand") {
  const auto result =
      played("pack", {training_job(0, 90, 1, 4 * kGiB, 0.8), training_job(0, 90, 1, 4 * kGiB, 0.7)}, 1);
  CHECK(result.jobs[0].end_s == Approx(135));  // slowdown 1.5
  CHECK(result.jobs[1].end_s == Approx(135));
  CHECK(result.slowdown_p99 == Approx(1.5));
}

TEST_CASE("antman keeps guaranteed jobs as if alone, opportunistic ones get what is left") {
  std::vector<JobInfo> jobs = {training_job(0, 100, 1, 4 * kGiB, 0.8), training_job(0, 10, 1, 4 * kGiB, 0.4)};
  jobs[1].guaranteed = false;
  const auto result = played("antman", jobs, 1);
  CHECK(result.jobs[0].end_s == Approx(100));
  CHECK(result.jobs[1].end_s == Approx(20));  // 0.2 of 0.4
}

TEST_CASE("antman puts opportunistic jobs on a device that is not busy, in pairs on any") {
  for (const auto& [demand, third_starts] : {std::pair(0.25, true), std::pair(0.35, false)}) {
    std::vector<JobInfo> jobs(3, training_job(0, 100, 1, kGiB, demand));
    for (JobInfo& job : jobs) job.guaranteed = false;
    const auto result = played("antman", jobs, 1);
    CHECK(result.jobs[1].start_s == 0);
    CHECK((result.jobs[2].start_s == 0) == third_starts);
  }
}

TEST_CASE("iadeep asks what the newcomer changes, not what the others do to each other") {
  // The first two slow each other by 0.49, which is just allowed. The third adds 0.02 to each.
  const auto result = played("iadeep",
                             {training_job(0, 100, 1, kGiB, 0.745), training_job(0, 100, 1, kGiB, 0.745),
                              training_job(0, 100, 1, kGiB, 0.275)},
                             1);
  CHECK(result.jobs[1].start_s == 0);
  CHECK(result.jobs[2].start_s == 0);
}

TEST_CASE("iadeep takes the less used of devices on which a job degrades nothing") {
  const std::vector<JobInfo> jobs = {training_job(0, 100, 1, 8 * kGiB, 0.3),
                                     training_job(0, 100, 1, kGiB, 0.3), training_job(1, 10, 1, kGiB, 0.3)};
  const auto made = cluster::make_training_scheduler("iadeep");
  const auto result = sim::run_cluster(jobs, sixteen_gib(2), *made, {}, true);
  REQUIRE(result.ok());
  size_t devices[3] = {};
  for (const sim::ClusterSpan& span : result->spans) devices[span.job] = span.device;
  CHECK(devices[0] != devices[1]);
  CHECK(devices[2] == devices[1]);
}

TEST_CASE("iadeep on many devices looks at a job behind hundreds of others that find no place") {
  constexpr size_t kDevices = 200;
  std::vector<JobInfo> jobs(kDevices + 300, training_job(0, 100, 1, kGiB, 1));
  jobs.push_back(training_job(1, 10, 1, kGiB, 0.05));
  CHECK(played("iadeep", jobs, kDevices).jobs.back().start_s == Approx(1));
}

TEST_CASE("iadeep packs what hardly slows and waits where it would") {
  const auto light =
      played("iadeep", {training_job(0, 100, 1, kGiB, 0.5), training_job(0, 100, 1, kGiB, 0.5)}, 1);
  CHECK(light.makespan_s == Approx(100));
  const auto heavy =
      played("iadeep", {training_job(0, 100, 1, kGiB, 1), training_job(0, 100, 1, kGiB, 1)}, 1);
  CHECK(heavy.jobs[1].start_s == Approx(100));
}

// The rule of the slides (seed 004): E = (1 + e) x sum of e/(1 + e) - 1 > 0: wait. For two equal jobs that is 2e - 1, so that they share a
// device up to a slowdown of 1.5.
TEST_CASE("iadeep waits from E = 0 on: two equal jobs share up to a slowdown of 1.5") {
  for (const auto& [demand, together] : {std::pair(0.745, true), std::pair(0.755, false)}) {
    const std::vector<JobInfo> jobs(2, training_job(0, 100, 1, kGiB, demand));
    CHECK((played("iadeep", jobs, 1).jobs[1].start_s == 0) == together);
  }
}

TEST_CASE("what no device can hold is rejected with the numbers, by every scheduler") {
  for (const char* scheduler : cluster::kTrainingSchedulers) {
    const auto result = played(
        scheduler, {training_job(0, 10, 1, 17 * kGiB), training_job(0, 10, 3), training_job(0, 10)}, 2);
    CHECK(result.completed == 1);
    CHECK(result.rejected == 2);
    CHECK(result.jobs[0].reason == "it needs 1 devices of 17.00 GiB at once, and there are 0");
    CHECK(result.jobs[1].reason == "it needs 3 devices of 4.00 GiB at once, and there are 2");
  }
}

TEST_CASE("no scheduler loses, starves or overfills; all are deterministic") {
  test::Random random(test::seed());
  for (int round = 0; round < 20; ++round) {
    std::vector<JobInfo> jobs;
    double now = 0, work = 0;
    const size_t devices = test::uniform(random, 1, 8);
    for (int j = 0; j < 60; ++j) {
      now += static_cast<double>(test::uniform(random, 0, 30));
      JobInfo job = training_job(
          now, static_cast<double>(test::uniform(random, 1, 400)),
          static_cast<uint32_t>(test::uniform(random, 1, std::min<size_t>(devices, 4))),
          test::uniform(random, 1, 16) * kGiB, static_cast<double>(test::uniform(random, 10, 100)) / 100);
      job.guaranteed = test::uniform(random, 0, 1) == 0;
      job.config = std::to_string(test::uniform(random, 0, 5));
      work += job.work_s * job.gang;
      jobs.push_back(job);
    }
    for (const char* scheduler : cluster::kTrainingSchedulers) {
      INFO(scheduler << ", round " << round << ", seed " << test::seed());
      const auto result = played(scheduler, jobs, devices), again = played(scheduler, jobs, devices);
      CHECK(result.completed == jobs.size());
      CHECK(result.oom == 0);
      bool same = true, whole = true;
      for (size_t j = 0; j < jobs.size(); ++j) {
        same &= result.jobs[j].end_s == again.jobs[j].end_s;
        whole &= result.jobs[j].end_s >= jobs[j].arrival_s + jobs[j].work_s - 1e-6;
      }
      CHECK(same);
      CHECK(whole);
      CHECK(result.utilization <= 1 + 1e-9);
    }
  }
}

namespace {

// A rule beside one that takes over its books at every event: what a rule keeps from event to event changes nothing.
class BesideFresh final : public cluster::training::Book {
 public:
  using Rule = std::function<std::unique_ptr<Book>(const std::shared_ptr<cluster::training::Knowledge>&)>;
  explicit BesideFresh(Rule make) : make_(std::move(make)), rule_(make_(known_)) {}
  void device_changed(cluster::DeviceIndex device, const cluster::DeviceInfo& info, bool up,
                      double now_s) override {
    Book::device_changed(device, info, up, now_s);
    rule_->device_changed(device, info, up, now_s);
  }
  void arrived(cluster::JobId job, const JobInfo& info, double now_s) override {
    Book::arrived(job, info, now_s);
    rule_->arrived(job, info, now_s);
    if (!jobs_[job].gone) unfinished_.insert(job);
  }
  void observed(cluster::JobId job, double attained_s, double remaining_s, double slowdown,
                double now_s) override {
    if (known_->companies.size() >= 40) {
      known_->companies.clear();
      ++known_->cleared;
    }
    if (!jobs_[job].opportunistic && slowdown > 0)
      for (const cluster::DeviceIndex d : jobs_[job].devices)
        known_->companies[cluster::training::company_of(job, devices_[d].jobs)] = slowdown;
    Book::observed(job, attained_s, remaining_s, slowdown, now_s);
    rule_->observed(job, attained_s, remaining_s, slowdown, now_s);
  }
  void finished(cluster::JobId job, double now_s) override {
    Book::finished(job, now_s);
    rule_->finished(job, now_s);
    unfinished_.erase(job);
  }
  double tick(double now_s, std::vector<Action>& actions) override {
    take_rejected(actions);
    const auto fresh = make_(known_);
    fresh->take_over(jobs_, devices_);
    if (++ticks_ % 7 == 0) {
      const auto replaced = std::exchange(rule_, make_(known_));
      rule_->take_over(*replaced, jobs_, devices_, unfinished_);
    }
    std::vector<Action> told, anew;
    const double again = rule_->tick(now_s, told);
    same = same && fresh->tick(now_s, anew) == again && told.size() == anew.size();
    for (size_t i = 0; same && i < told.size(); ++i)
      same = told[i].kind == anew[i].kind && told[i].job == anew[i].job &&
             told[i].devices == anew[i].devices && told[i].opportunistic == anew[i].opportunistic;
    follow(told, now_s, actions);
    return again;
  }
  bool same = true;

 private:
  void waiting_again(cluster::JobId, double) override {}
  const std::shared_ptr<cluster::training::Knowledge> known_ =
      std::make_shared<cluster::training::Knowledge>();
  const Rule make_;
  std::unique_ptr<Book> rule_;
  std::set<cluster::JobId> unfinished_;
  size_t ticks_ = 0;
};

}  // namespace

TEST_CASE("a rule that places each job where it costs least decides as one that has just taken over") {
  test::Random random(test::seed());
  for (int round = 0; round < 20; ++round) {
    INFO("round " << round << ", seed " << test::seed());
    std::vector<cluster::Device> devices = sixteen_gib(test::uniform(random, 4, 12));
    for (cluster::Device& device : devices) {
      if (round % 2 == 1) device.speed = static_cast<double>(test::uniform(random, 1, 2));
      if (round % 4 > 1) device.memory_bytes = test::uniform(random, 8, 10) * 2 * kGiB;
      if (test::uniform(random, 0, 3) == 0) device.down.push_back({200, 500});
    }
    std::vector<JobInfo> jobs;
    for (int j = 0; j < 80; ++j) {
      JobInfo job =
          training_job(5.0 * j, static_cast<double>(test::uniform(random, 10, 400)),
                       test::uniform(random, 0, 3) == 0 ? 2 : 1, test::uniform(random, 1, 12) * kGiB,
                       static_cast<double>(test::uniform(random, 5, 100)) / 100);
      job.guaranteed = test::uniform(random, 0, 1) == 0;
      if (round % 3 == 0) job.config = std::to_string(test::uniform(random, 0, 5));
      jobs.push_back(job);
    }
    BesideFresh scheduler([&](const std::shared_ptr<cluster::training::Knowledge>& known) {
      return cluster::training::make_greedy(known, round % 5 == 0);
    });
    const auto result = sim::run_cluster(jobs, devices, scheduler, {});
    INFO((result.ok() ? "" : result.status().message()));
    REQUIRE(result.ok());
    CHECK(scheduler.same);
    CHECK(result->completed == jobs.size());
  }
}

TEST_CASE("a scheduler that places too much is told") {
  struct Greedy final : cluster::Scheduler {
    void device_changed(uint32_t, const cluster::DeviceInfo&, bool, double) override {}
    void arrived(uint32_t job, const JobInfo&, double) override { jobs.push_back(job); }
    void observed(uint32_t, double, double, double, double) override {}
    void finished(uint32_t, double) override {}
    double tick(double, std::vector<Action>& actions) override {
      for (const uint32_t job : jobs) actions.push_back({Action::Kind::kPlace, job, {0}, false, ""});
      jobs.clear();
      return cluster::kNever;
    }
    std::vector<uint32_t> jobs;
  } greedy;
  const auto result = sim::run_cluster({training_job(0, 1, 1, 10 * kGiB), training_job(0, 1, 1, 10 * kGiB)},
                                       sixteen_gib(1), greedy, {});
  REQUIRE_FALSE(result.ok());
  CHECK(result.status().message().find("a device has not that much memory left") != std::string::npos);
}

TEST_CASE("job files: gangs of the first layout, Muri's and Gavel's traces") {
  const FileOf own(
      "name,class,arrival_s,iterations,iteration_ms,persistent_mb,ephemeral_mb,priority,gang\n"
      "\"b, 2\",guaranteed,5,10,100,1,2,0,4\na,opportunistic,0,10,100,1,2,0,1\n");
  const auto jobs = sim::read_training_jobs(own.path(), 1, {});
  REQUIRE(jobs.ok());
  REQUIRE(jobs->jobs.size() == 2);
  CHECK(jobs->jobs[0].name == "a");
  CHECK(jobs->jobs[1].gang == 4);
  CHECK(jobs->jobs[1].work_s == Approx(1));
  CHECK(jobs->jobs[1].memory_bytes == 3000000);
  const FileOf salus("name,seconds_alone,peak_mb,iterations,gang\nvgg16_25_1min,60,5000,311,2\n");
  const auto profiles = sim::read_training_jobs(salus.path(), 4, {});
  REQUIRE(profiles.ok());
  CHECK(profiles->layout == "salus");
  CHECK(profiles->jobs[0].gang == 2);
  const FileOf muri(
      "job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,interval,iteration_time,resource_"
      "time_0,resource_time_1,"
      "resource_time_2,priority\n0,8,1000,10,gpt2,4,5,9,437,0.6,419,49,0\n");
  const auto trace = sim::read_training_jobs(muri.path(), 64, {});
  REQUIRE(trace.ok());
  CHECK(trace->layout == "muri");
  CHECK(trace->jobs[0].gang == 8);
  CHECK(trace->jobs[0].arrival_s == Approx(1));
  CHECK(trace->jobs[0].work_s == Approx(4.37));
  CHECK(trace->jobs[0].demands[1] == Approx(419.0 / 437));
  const FileOf cut(  // the name stands behind the numbers
      "num_gpu,submit_time,iterations,model_name,batch_size,iteration_time,resource_time_0,resource_time_1,"
      "resource_time_2,job_id\n8,1000,10,gpt2,4,437,0.6,419,49\n");
  CHECK(sim::read_training_jobs(cut.path(), 64, {})
            .status()
            .message()
            .find(":2: 9 fields, but the header has 10") != std::string::npos);
  const FileOf lacks(
      "job_id,num_gpu,submit_time,iterations,model_name,batch_size,resource_time_0,resource_time_1,resource_"
      "time_2\n"
      "0,8,1000,10,gpt2,4,1,1,1\n");
  CHECK(sim::read_training_jobs(lacks.path(), 64, {})
            .status()
            .message()
            .find("the muri layout lacks 'iteration_time'") != std::string::npos);
  // A column of one name with a column of that layout makes no file of that layout.
  for (const char* column : {"num_gpu", "num_gpus"}) {
    const FileOf with_column(
        std::string("name,class,arrival_s,iterations,iteration_ms,persistent_mb,ephemeral_mb,priority,") +
        column + "\na,guaranteed,5,10,100,1,2,0,1\n");
    const std::string told = sim::read_training_jobs(with_column.path(), 1, {}).status().message();
    CHECK(told.find(std::string("'") + column + "' is no column of the gpushare layout") !=
          std::string::npos);
  }
  const FileOf bad(
      "name,class,arrival_s,iterations,iteration_ms,persistent_mb,ephemeral_mb,priority,gang\na,guaranteed,5,"
      "10,100,1,2,0,none\n");
  CHECK(sim::read_training_jobs(bad.path(), 1, {})
            .status()
            .message()
            .find(":2: gang: 'none' must be a number") != std::string::npos);
}

TEST_CASE("logs of clusters as they are published: Philly, Helios, Alibaba's PAI, Gavel's .trace") {
  const struct {
    const char *layout, *text;
    double arrival_s, work_s;
    uint32_t gang;
    const char* note;
  } files[] = {
      {"philly",
       R"([{"status": "Pass", "vc": "ee9e8c", "jobid": "application_1_2", "attempts": [], "submitted_time": "2017-10-07 01:11:00", "user": "u"},
{"status": "Failed", "vc": "ee9e8c", "jobid": "application_1_1", "attempts": [{"start_time": "2017-10-07 01:12:09", "end_time": "2017-10-07 01:12:19",
"detail": [{"ip": "m47", "gpus": ["gpu0", "gpu1"]}]}, {"start_time": "2017-10-07 01:13:00", "end_time": "2017-10-07 01:13:30", "detail": [{"ip": "m1", "gpus": ["gpu0"]},
{"ip": "m2", "gpus": ["gpu3"]}]}], "submitted_time": "2017-10-07 01:11:39", "user": "ce2f4c"},
{"status": "Killed", "vc": "v", "jobid": "application_1_3", "attempts": [{"start_time": "2017-10-07 02:11:39", "end_time": null, "detail": [{"ip": "m1", "gpus": ["gpu0"]}]}],
"submitted_time": "None", "user": "u"},
{"status": "Pass", "vc": "v", "jobid": "application_1_4", "attempts": [{"start_time": "2017-10-07 02:11:39", "end_time": "2017-10-07 02:12:19", "detail": [{"ip": "m1",
"gpus": ["gpu0", "gpu1"]}]}], "submitted_time": "2017-10-07 01:12:09", "user": "u"}])",
       30, 40, 2, "philly: 1 jobs failed or were killed"},
      {"helios",
       "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"
       "1,u,v,0,4,1,COMPLETED,2020-06-09 18:41:00,2020-06-09 18:41:00,2020-06-09 18:42:00,60,0\n"
       "2,u,v,8,16,2,FAILED,2020-06-09 18:41:27,2020-06-09 18:41:27,2020-06-09 18:45:36,249,0\n"
       "3,u,v,2,16,1,COMPLETED,2020-06-09 18:41:57,2020-06-09 18:41:57,2020-06-09 18:42:37,40,0\n"
       "4,u,v,8,16,2,FAI",
       30, 40, 2, "helios: 1 jobs failed or were killed"},
      {"pai",
       "j1,worker,1,Failed,1000,1100,600,29,50,T4\nj2,ps,1,Terminated,1001,1200,600,29,,CPU\n"
       "j3,tensorflow,2,Terminated,1030,1070,600,29,100,P100\nj4,worker,1,Waiting,,,600,29,100,T4\nj5,wor",
       30, 40, 2, "pai: 1 jobs failed or were killed"},
      {"trace",
       "ResNet-18 (batch size 32)\tpython3 main.py\tcifar10\t--num_steps\t0\t100\t1\t1.0\t-1.0\t5.0\n"
       "ResNet-18 (batch size 32)\tpython3 main.py\tcifar10\t--num_steps\t0\t400\t2\t1.0\t-1.0\t35.0\nResN",
       30, 0, 2, "trace: the last line is cut off"},
  };
  for (const auto& file : files) {
    INFO(file.layout);
    const FileOf written(file.text);
    sim::TrainingFileOptions options;
    const auto read = sim::read_training_jobs(written.path(), 4, options);
    INFO(read.status().message());
    REQUIRE(read.ok());
    CHECK(read->layout == file.layout);
    REQUIRE(read->jobs.size() == 2);
    CHECK(read->jobs[0].arrival_s == 0);
    CHECK(read->jobs[1].arrival_s == Approx(file.arrival_s));
    if (file.work_s > 0) CHECK(read->jobs[1].work_s == Approx(file.work_s));
    CHECK(read->jobs[1].work_s >= (file.work_s > 0 ? 0 : 3.9 * read->jobs[0].work_s));
    CHECK(read->jobs[1].gang == file.gang);
    CHECK(std::any_of(read->notes.begin(), read->notes.end(),
                      [&](const std::string& note) { return note.find(file.note) == 0; }));
    CHECK(played("gpushare", read->jobs, 8).completed == 2);
  }
  const auto refused = [](const char* text) {
    const FileOf written(text);
    return sim::read_training_jobs(written.path(), 4, {}).status().message();
  };
  CHECK(
      refused("j1,worker,1,Failed,1000,soon,600,29,50,T4\n").find(":1: end_time: 'soon' must be a number") !=
      std::string::npos);
  CHECK(refused("job_id,gpu_num,node_num,state,submit_time,start_time,end_time,duration\n1,1,1,FAILED,"
                "yesterday,,,5\n")
            .find(":2: submit_time: 'yesterday' must be") != std::string::npos);
  CHECK(refused("[{\"jobid\": \"a\", \"submitted_time\": 7}]").find("[0].submitted_time") !=
        std::string::npos);
}

TEST_CASE("iadeep and gpushare choose batch sizes, within memory and by what the table measured alone") {
  // Twice the batch takes no longer here, so that it pays; four times needs more memory than there is.
  const auto table = sim::InterferenceTable::parse(
      R"x({"p100": {"('M (batch size 8)', 1)": {"null": 10}, "('M (batch size 16)', 1)": {"null": 10}, "('M (batch size 32)', 1)": {"null": 10}}})x",
      "table");
  REQUIRE(table.ok());
  sim::ClusterOptions options;
  options.table = &*table;
  JobInfo job = training_job(0, 1000, 1, 6 * kGiB);
  job.guaranteed = false;
  job.config = "M (batch size 8)";
  job.batch = 8;
  job.batch_sizes = {8, 16, 32};
  job.noise_scale = 1e6;  // a larger batch is worth all of its samples
  job.ephemeral_bytes = 5 * kGiB;
  const double alone = played("fifo", {job}, 1, options).makespan_s;
  CHECK(alone == Approx(1000));
  for (const char* scheduler : {"iadeep", "gpushare"}) {
    INFO(scheduler);
    const auto result = played(scheduler, {job}, 1, options);
    CHECK(result.oom == 0);
    CHECK(result.reconfigured >= 1);
    CHECK(result.makespan_s < 600);
    CHECK(result.makespan_s >= 499);
  }
}

TEST_CASE("gpushare: the batch size of a job that moves changes once the job runs again") {
  const auto document =
      sim::parse_training_document(R"({"version": 1, "kind": "training", "devices": 2, "jobs": [
    {"name": "a", "arrival_s": 102, "iterations": 2500, "iteration_ms": 100, "persistent_mb": 1000, "ephemeral_mb": 2000,
     "demand": 0.58, "class": "opportunistic"},
    {"name": "b", "arrival_s": 111, "iterations": 300, "iteration_ms": 100, "persistent_mb": 1000, "ephemeral_mb": 6000,
     "demand": 0.27, "class": "guaranteed"},
    {"name": "c", "arrival_s": 105, "iterations": 3400, "iteration_ms": 100, "persistent_mb": 1000, "ephemeral_mb": 6000,
     "demand": 0.59, "class": "guaranteed"},
    {"name": "d", "arrival_s": 131, "iterations": 200, "iteration_ms": 100, "persistent_mb": 1000, "ephemeral_mb": 4000,
     "demand": 0.99, "class": "guaranteed", "batch_sizes": [16, 32], "noise_scale": 1000}]})");
  REQUIRE(document.ok());
  const auto result = played("gpushare", document->jobs.jobs, document->devices.size());
  CHECK(result.completed == 4);
  CHECK(result.reconfigured > 0);
}

TEST_CASE("what was measured before is told to schedulers, and predictions are judged") {
  const auto table = sim::InterferenceTable::parse(
      R"x({"p100": {"('A', 1)": {"null": 10, "('B', 1)": [9, 8]}, "('B', 1)": {"null": 10, "('A', 1)": [8, 9]}}})x",
      "table");
  REQUIRE(table.ok());
  CHECK(table->names() == std::vector<std::string>{"A", "B"});
  std::vector<JobInfo> jobs = {training_job(0, 100), training_job(0, 100)};
  for (size_t j = 0; j < 2; ++j) {
    jobs[j].guaranteed = false;
    jobs[j].config = j == 0 ? "A" : "B";
  }
  sim::ClusterOptions options;
  options.table = &*table;
  const auto told = cluster::make_training_scheduler("iadeep");
  sim::tell_known_pairs(*table, *told);
  const auto together = sim::run_cluster(jobs, sixteen_gib(1), *told, options);
  REQUIRE(together.ok());
  CHECK(together->makespan_s < 150);  // it knows that they hardly slow each other
  CHECK(played("iadeep", jobs, 1, options).makespan_s == Approx(200));  // by demands alone it waits
  CHECK(together->predictions.observations == 2);
  CHECK(together->predictions.early.pairs == 0);
}

TEST_CASE(
    "gpushare puts light jobs together on a device, guaranteed ones too, and heavy ones one after the "
    "other") {
  for (const bool guaranteed : {false, true}) {
    INFO("guaranteed " << guaranteed);
    std::vector<JobInfo> jobs(10, training_job(0, 100, 1, kGiB, 0.08));
    for (JobInfo& job : jobs) job.guaranteed = guaranteed;
    const auto light = played("gpushare", jobs, 1);
    CHECK(light.makespan_s == Approx(100));
    CHECK(light.slowdown_p99 <= 1.05);
    for (JobInfo& job : jobs) job.gang = 2;
    CHECK(played("gpushare", jobs, 2).makespan_s == Approx(100));
    for (JobInfo& job : jobs) {
      job.gang = 1;
      job.demands = {1.0};
    }
    const auto heavy = played("gpushare", jobs, 1);
    CHECK(heavy.makespan_s == Approx(1000));
    CHECK(heavy.jobs[0].end_s == Approx(100));
  }
}

TEST_CASE("gpushare: a job moves to a device that becomes free, where that pays for the restart") {
  std::vector<JobInfo> jobs = {training_job(0, 20), training_job(0, 100)};
  for (JobInfo& job : jobs) job.demands = {1.0};
  std::vector<cluster::Device> devices = sixteen_gib(2);
  devices[1].speed = 0.25;
  for (const auto& [restart_s, end_s] : {std::pair(0.0, 115.0), std::pair(2.0, 117.0)}) {
    const auto made = cluster::make_training_scheduler("gpushare");
    sim::ClusterOptions options;
    options.restart_s = restart_s;
    const auto result = sim::run_cluster(jobs, devices, *made, options);
    REQUIRE(result.ok());
    CHECK(result->jobs[1].end_s == Approx(end_s));  // 20 s at a quarter of the speed, the rest at the whole
  }
}

TEST_CASE("gpushare: a device stays free where sharing costs nobody anything") {
  // .68 beside the gang's .23 slows nobody, so that the third device is there for the last job.
  std::vector<JobInfo> jobs = {training_job(0, 130, 2), training_job(90, 37), training_job(96, 13)};
  const double demands[] = {0.23, 0.68, 0.86};
  for (size_t j = 0; j < jobs.size(); ++j) jobs[j].demands = {demands[j]};
  sim::ClusterOptions options;
  options.restart_s = 30;
  const auto result = played("gpushare", jobs, 3, options);
  CHECK(result.jobs[1].end_s == Approx(127));
  CHECK(result.jobs[2].end_s == Approx(109));
}

TEST_CASE("gpushare: company on the faster device of a guaranteed gang costs it nothing") {
  std::vector<cluster::Device> devices = sixteen_gib(2);
  devices[1].speed = 0.25;
  std::vector<JobInfo> jobs = {training_job(0, 200, 2), training_job(100, 300)};
  jobs[0].demands = {0.74};
  jobs[1].demands = {0.62};
  jobs[1].guaranteed = false;
  sim::ClusterOptions options;
  options.restart_s = 30;
  const auto made = cluster::make_training_scheduler("gpushare");
  const auto result = sim::run_cluster(jobs, devices, *made, options);
  REQUIRE(result.ok());
  CHECK(result->jobs[0].end_s == Approx(800));
  CHECK(result->jobs[1].end_s < 100 + 300 * 1.37);
  CHECK(result->company_p99 <= 1.0 + 1e-9);
}

TEST_CASE("gpushare: a gang on unequal devices is not taken for faster than it is") {
  // The gang waits for its slow device, while company slows it on the fast one only: its pace alone is as declared.
  std::vector<cluster::Device> devices = sixteen_gib(2);
  devices[1].speed = 0.25;
  const struct {
    double arrival_s, work_s, demand;
    uint32_t gang;
  } drawn[] = {{0.5, 354.6, 0.67, 1},   {44.7, 800, 0.08, 1},    {90.5, 115, 0.6, 1},
               {99.1, 315.3, 0.2, 1},   {137, 100.2, 0.54, 1},   {157.7, 50.4, 0.87, 2},
               {157.8, 73.7, 0.2, 1},   {159.5, 192.9, 0.94, 1}, {173.7, 39.5, 0.5, 1},
               {187.2, 62.9, 0.55, 1},  {219.9, 229.6, 0.26, 1}, {257.4, 84.3, 0.87, 2},
               {294.8, 207.7, 0.31, 1}, {326.2, 203.1, 0.1, 1}};
  std::vector<JobInfo> jobs;
  for (const auto& job : drawn) {
    jobs.push_back(training_job(job.arrival_s, job.work_s, job.gang, kGiB, job.demand));
    jobs.back().guaranteed = false;
  }
  sim::ClusterOptions options;
  options.restart_s = 5;
  const auto play = [&](const char* name) {
    const auto made = cluster::make_training_scheduler(name);
    const auto result = sim::run_cluster(jobs, devices, *made, options);
    REQUIRE(result.ok());
    return result->jct_mean_s;
  };
  CHECK(play("gpushare") <= 1.1 * play("iadeep"));
}

TEST_CASE("gpushare: what runs beside others parts when it is slower than was believed") {
  // Their demands say that they fit; a table says otherwise.
  const auto table = sim::InterferenceTable::parse(
      R"x({"p100": {"('A', 1)": {"null": 10, "('B', 1)": [5, 5]}, "('B', 1)": {"null": 10, "('A', 1)": [5, 5]}}})x",
      "table");
  REQUIRE(table.ok());
  std::vector<JobInfo> jobs = {training_job(0, 1000, 1, kGiB, 0.3), training_job(0, 1000, 1, kGiB, 0.3)};
  jobs[0].config = "A";
  jobs[1].config = "B";
  sim::ClusterOptions options;
  options.table = &*table;
  const auto result = played("gpushare", jobs, 1, options);
  CHECK(result.completed == 2);
  CHECK(result.company_p99 <= 1.05);  // they were together for seconds, until that was seen
  CHECK(result.company_p99 > 1);
}

TEST_CASE("gpushare: a guaranteed job shares for a while, within what it may lose over its whole run") {
  // At every moment of the company it is slower than it may be over its whole run.
  std::vector<JobInfo> jobs = {training_job(0, 280.8, 1, kGiB, 0.48), training_job(1.8, 5.5, 1, kGiB, 0.38),
                               training_job(135.6, 261.7, 2, kGiB, 0.61)};
  for (JobInfo& job : jobs) job.guaranteed = true;
  sim::ClusterOptions options;
  options.restart_s = 5;
  const auto ours = played("gpushare", jobs, 2, options);
  CHECK(ours.completed == 3);
  CHECK(ours.company_p99 > 1.01);
  CHECK(ours.company_p99 <= 1.05);
  CHECK(ours.jct_mean_s <= 1.02 * played("pack", jobs, 2, options).jct_mean_s);
}

TEST_CASE(
    "gpushare: a look at what was measured moves nothing, and jobs that fit beside each other stay there") {
  // Six guaranteed jobs that fit on four unequal devices together. Looked at every 5 s, they were placed anew each time.
  const auto job = [](double arrival_s, double work_s, uint32_t gang, double demand) {
    JobInfo info = training_job(arrival_s, work_s, gang, kGiB, demand);
    info.guaranteed = true;
    return info;
  };
  const std::vector<JobInfo> jobs = {job(107.6, 291.3, 2, 0.24), job(111.4, 133.2, 2, 0.43),
                                     job(114.2, 256.2, 1, 0.81), job(135, 270, 1, 0.61),
                                     job(228.4, 46.6, 2, 0.24),  job(265.9, 235.9, 1, 0.39)};
  std::vector<cluster::Device> devices = sixteen_gib(4);
  const double speeds[] = {2, 1, 0.5, 0.5};
  for (size_t d = 0; d < devices.size(); ++d) devices[d].speed = speeds[d];
  sim::ClusterOptions options;
  options.restart_s = 30;
  const auto play = [&](const char* name) {
    const auto made = cluster::make_training_scheduler(name);
    const auto result = sim::run_cluster(jobs, devices, *made, options);
    REQUIRE(result.ok());
    return *result;
  };
  const auto ours = play("gpushare");
  uint32_t pauses = 0;
  for (const auto& one : ours.jobs) pauses += one.pauses;
  CHECK(pauses <= jobs.size());
  CHECK(ours.company_p99 <= 1.05 + 1e-8);
  // iadeep asks what a newcomer changes, and so places these jobs as pack does.
  CHECK(ours.jct_mean_s <= 1.06 * play("pack").jct_mean_s);
  CHECK(play("iadeep").jct_mean_s == Approx(play("pack").jct_mean_s));
}

TEST_CASE("gpushare: a gang that needs a slow device is as long as it takes there") {
  // The gang's 55 s of work take 220 s on both devices, at the pace of the slower one. By its work it came before the
  // others, which fit beside each other on the faster device and waited for it.
  const auto job = [](double arrival_s, double work_s, uint32_t gang, double demand) {
    JobInfo info = training_job(arrival_s, work_s, gang, kGiB, demand);
    info.guaranteed = true;
    return info;
  };
  const std::vector<JobInfo> jobs = {job(25.3, 157.8, 1, 0.42), job(30, 65.8, 1, 0.99),
                                     job(98.9, 348.5, 1, 0.54), job(104.7, 55, 2, 0.92),
                                     job(159, 221.7, 1, 0.2),   job(180.1, 343.1, 1, 0.12)};
  std::vector<cluster::Device> devices = sixteen_gib(2);
  devices[1].speed = 0.25;
  sim::ClusterOptions options;
  options.restart_s = 30;
  const auto made = cluster::make_training_scheduler("gpushare");
  const auto ours = sim::run_cluster(jobs, devices, *made, options);
  REQUIRE(ours.ok());
  CHECK(ours->jobs[3].start_s >= ours->jobs[2].end_s);
  CHECK(ours->jct_mean_s < 350);  // 458 with the gang from 180 s on
}

TEST_CASE("gpushare: guaranteed jobs whose demands sum to just what they may be slowed by share") {
  std::vector<JobInfo> jobs = {training_job(0, 217.6, 1, kGiB, 0.43),
                               training_job(83.3, 188.5, 1, kGiB, 0.22),
                               training_job(106.4, 103.6, 1, kGiB, 0.4)};
  for (JobInfo& job : jobs) job.guaranteed = true;
  const auto ours = played("gpushare", jobs, 1);
  CHECK(ours.completed == 3);
  CHECK(ours.jct_mean_s <= played("pack", jobs, 1).jct_mean_s * (1 + 1e-9));
}

TEST_CASE("jobs that end at the same time but for rounding end together") {
  // 0.1 + 0.2 and 0.3 differ in their last bit. The job behind the gang would take the device that is free between them,
  // and be paused for the gang at once.
  REQUIRE(0.1 + 0.2 != 0.3);
  const std::vector<JobInfo> jobs = {training_job(0, 0.3), training_job(0.1, 0.2), training_job(0.2, 5, 2),
                                     training_job(0.25, 12)};
  const auto result = played("srtf", jobs, 2);
  CHECK(result.jobs[2].end_s == Approx(5.3));
  CHECK(result.jobs[3].pauses == 0);
}

TEST_CASE("gpushare: a wide gang is not passed for ever by a stream of small jobs") {
  std::vector<JobInfo> jobs = {training_job(1, 300, 2)};
  for (int i = 0; i < 400; ++i) jobs.push_back(training_job(i * 50.0, 100));
  for (JobInfo& job : jobs) job.demands = {1.0};
  std::stable_sort(jobs.begin(), jobs.end(),
                   [](const JobInfo& a, const JobInfo& b) { return a.arrival_s < b.arrival_s; });
  const auto result = played("gpushare", jobs, 2);
  CHECK(result.completed == jobs.size());
  for (size_t j = 0; j < jobs.size(); ++j)
    if (jobs[j].gang == 2) CHECK(result.jobs[j].end_s < 6000);  // of 20000 s of arrivals at full load
}

TEST_CASE("devices that fail and come back: every scheduler goes on with their jobs elsewhere") {
  std::vector<JobInfo> jobs = {training_job(0, 100), training_job(0, 100), training_job(5, 50, 2)};
  std::vector<cluster::Device> devices = sixteen_gib(2);
  devices[1].down = {{30, 90}, {200, 210}};
  for (const char* scheduler : cluster::kTrainingSchedulers) {
    INFO(scheduler);
    const auto made = cluster::make_training_scheduler(scheduler);
    sim::ClusterOptions options;
    options.restart_s = 3;
    const auto result = sim::run_cluster(jobs, devices, *made, options, true);
    REQUIRE(result.ok());
    CHECK(result->completed == 3);
    for (const sim::ClusterSpan& span : result->spans)
      for (const cluster::Device::Down& down : devices[span.device].down)
        CHECK((span.end_s <= down.from_s + 1e-9 || span.begin_s >= down.until_s - 1e-9));
  }
  // One that never comes back takes the gang's only place; the others end.
  devices[1].down = {{30, cluster::kNever}};
  const auto made = cluster::make_training_scheduler("gpushare");
  const auto result = sim::run_cluster(jobs, devices, *made, {});
  REQUIRE(result.ok());
  CHECK(result->completed == 2);
}

TEST_CASE("gpushare: a job whose devices have failed keeps no other job from those that are up") {
  const auto completed = [](const std::vector<JobInfo>& jobs, const std::vector<cluster::Device>& devices) {
    const auto made = cluster::make_training_scheduler("gpushare");
    const auto result = sim::run_cluster(jobs, devices, *made, {});
    REQUIRE(result.ok());
    return result->completed;
  };
  std::vector<JobInfo> jobs = {training_job(0, 100, 3), training_job(0, 100, 2), training_job(20, 100)};
  for (JobInfo& job : jobs) job.demands = {0.93};
  jobs[0].guaranteed = jobs[1].guaranteed = false;
  std::vector<cluster::Device> devices = sixteen_gib(3);
  devices[1].down = {{78.9, 94.5}};
  devices[2].down = {{27.8, cluster::kNever}};
  CHECK(completed(jobs, devices) == 2);
  devices[2].down = {{27.8, 500}};
  CHECK(completed(jobs, devices) == 3);

  test::Random random(test::seed());
  for (int round = 0; round < 200; ++round) {
    INFO("round " << round << ", seed " << test::seed());
    devices = sixteen_gib(test::uniform(random, 2, 4));
    uint32_t last = 0;  // devices that are up in the end
    for (cluster::Device& device : devices) {
      const double from_s = static_cast<double>(test::uniform(random, 0, 200));
      const uint64_t kind = test::uniform(random, 0, 2);
      if (kind > 0)
        device.down = {{from_s, from_s + 50}, {from_s + 70, kind == 1 ? from_s + 90 : cluster::kNever}};
      last += kind < 2 ? 1 : 0;
    }
    jobs.clear();
    for (uint64_t n = test::uniform(random, 3, 12), j = 0; j < n; ++j) {
      const auto gang = static_cast<uint32_t>(test::uniform(random, 1, devices.size()));
      jobs.push_back(training_job(20.0 * double(j), double(test::uniform(random, 50, 200)), gang,
                                  test::uniform(random, 1, 14) * kGiB));
      jobs.back().guaranteed = test::uniform(random, 0, 1) == 0;
    }
    const auto made = cluster::make_training_scheduler("gpushare");
    const auto result = sim::run_cluster(jobs, devices, *made, {});
    REQUIRE(result.ok());
    for (size_t j = 0; j < jobs.size(); ++j)
      if (jobs[j].gang <= last) CHECK(result->jobs[j].end_s > 0);
  }
}

TEST_CASE(
    "slow devices with as little work in proportion: every scheduler decides the same at the same times") {
  test::Random random(test::seed());
  INFO("seed " << test::seed());
  for (int round = 0; round < 12; ++round) {
    std::vector<JobInfo> jobs;
    double at = 0;
    for (size_t n = test::uniform(random, 3, 8); n > 0; --n) {
      at += double(test::uniform(random, 0, 100));
      jobs.push_back(training_job(at, double(test::uniform(random, 10, 1500)), 1, 2 * kGiB,
                                  double(test::uniform(random, 2, 20)) / 20));
      jobs.back().guaranteed = round % 3 == 0;
    }
    std::vector<cluster::Device> devices = sixteen_gib(test::uniform(random, 1, 2));
    std::vector<JobInfo> less = jobs;
    for (JobInfo& job : less) job.work_s /= 8;
    std::vector<cluster::Device> slower = devices;
    for (cluster::Device& device : slower) device.speed = 1. / 8;
    for (const char* scheduler : cluster::kTrainingSchedulers) {
      INFO("round " << round << " " << scheduler);
      const auto one = cluster::make_training_scheduler(scheduler);
      const auto other = cluster::make_training_scheduler(scheduler);
      const auto full = sim::run_cluster(jobs, devices, *one, {});
      const auto slow = sim::run_cluster(less, slower, *other, {});
      REQUIRE((full.ok() && slow.ok()));
      for (size_t job = 0; job < jobs.size(); ++job)
        CHECK(slow->jobs[job].end_s == Approx(full->jobs[job].end_s).epsilon(1e-4));
    }
  }
}

TEST_CASE("gpushare: greater priority goes first, also from a device; then length over weight") {
  std::vector<JobInfo> jobs = {training_job(0, 100), training_job(10, 200), training_job(20, 10)};
  jobs[1].priority = 1;
  const auto urgent = played("gpushare", jobs, 1);
  CHECK(urgent.jobs[1].start_s == Approx(10));
  CHECK(urgent.jobs[1].end_s == Approx(210));  // the short one of priority 0 does not take it back
  CHECK(urgent.jobs[2].end_s == Approx(220));
  CHECK(urgent.jobs[0].end_s == Approx(310));
  jobs = {training_job(0, 100), training_job(0, 150)};
  CHECK(played("gpushare", jobs, 1).jobs[0].end_s == Approx(100));
  jobs[1].weight = 2;
  const auto weighed = played("gpushare", jobs, 1);
  CHECK(weighed.jobs[1].end_s == Approx(150));
  CHECK(weighed.jobs[0].end_s == Approx(250));
  jobs[1].priority = 1;
  for (const char* scheduler : {"fifo", "srtf", "tiresias", "antman", "pack", "iadeep"})
    CHECK(played(scheduler, jobs, 1).jobs[0].start_s == 0);  // the published ones know neither
}

TEST_CASE("a gang is placed on as few nodes as possible where that costs nothing") {
  std::vector<cluster::Device> devices = sixteen_gib(5);
  for (size_t d = 0; d < 5; ++d) devices[d].node = d % 2 == 0 ? "a" : "b";  // a: 0, 2, 4; b: 1, 3
  CHECK(cluster::number_nodes(devices) == std::vector<uint32_t>{0, 1, 0, 1, 0});
  const auto devices_of = [&](const char* scheduler, const std::vector<JobInfo>& jobs, uint32_t job) {
    const auto made = cluster::make_training_scheduler(scheduler);
    const auto result = sim::run_cluster(jobs, devices, *made, {}, true);
    REQUIRE(result.ok());
    std::vector<uint32_t> on;
    for (const sim::ClusterSpan& span : result->spans)
      if (span.job == job) on.push_back(span.device);
    std::sort(on.begin(), on.end());
    return on;
  };
  for (const char* scheduler : {"pack", "antman", "iadeep", "gpushare"}) {
    INFO(scheduler);
    // The node with the fewest that are enough; all of a where three are needed; with one of a taken, a gang of three needs both nodes.
    CHECK(devices_of(scheduler, {training_job(0, 10, 2)}, 0) == std::vector<uint32_t>{1, 3});
    CHECK(devices_of(scheduler, {training_job(0, 10, 3)}, 0) == std::vector<uint32_t>{0, 2, 4});
    CHECK(devices_of(scheduler, {training_job(0, 10), training_job(1, 10, 2)}, 1) ==
          std::vector<uint32_t>{2, 4});
    CHECK(devices_of(scheduler, {training_job(0, 10), training_job(1, 10, 4)}, 1) ==
          std::vector<uint32_t>{1, 2, 3, 4});
  }
}
