// Published traces with numbers that fit no job.
// SPDX-License-Identifier: Apache-2.0
#include "sim/published_jobs.hpp"

#include <string>

#include "support/catch.hpp"

using namespace gpushare;
using namespace gpushare::sim;

namespace {

base::Result<TrainingJobs> read_jobs(const std::string& text) {
  return parse_published(text, "f", {});
}

}  // namespace

TEST_CASE("a task of more GPUs than a job may have is left out, however the number is made") {
  const std::string good = "good,worker,2.0,Terminated,10,20,600,29,50,V100\n";
  // 1e12 instances of a little of a GPU each; a fraction that rounds to nothing; the most that is allowed.
  for (const char* row : {"j,worker,1e12,Terminated,10,20,600,29,0.0001,V100\n",
                          "j,worker,1e15,Terminated,10,20,600,29,1e-9,V100\n",
                          "j,worker,1e6,Terminated,10,20,600,29,100.5,V100\n"}) {
    INFO(row);
    const auto jobs = read_jobs(good + row);
    REQUIRE(jobs.ok());
    REQUIRE(jobs->jobs.size() == 1);
    CHECK(jobs->jobs[0].gang == 2);
  }
  const auto tiny = read_jobs("j,worker,3,Terminated,10,20,600,29,1e-9,V100\n");
  REQUIRE(tiny.ok());
  CHECK(tiny->jobs[0].gang == 3);
  CHECK(tiny->jobs[0].demands[0] > 0);
}

TEST_CASE("a Philly job whose attempts took longer than a trace may last is refused") {
  std::string attempts;
  for (int i = 0; i < 4; ++i)
    attempts += std::string(i == 0 ? "" : ",") +
                R"({"start_time": "1970-01-01 00:00:00", "end_time": "2200-01-01 00:00:00", )" +
                R"("detail": [{"ip": "a", "gpus": ["g"]}]})";
  const auto jobs = read_jobs(
      R"([{"jobid": "j", "status": "Pass", "submitted_time": "1970-01-01 00:00:00", "attempts": [)" +
      attempts + "]}]");
  REQUIRE_FALSE(jobs.ok());
  CHECK(jobs.status().code() == GPUSHARE_MALFORMED_INPUT);
  CHECK(jobs.status().message().find("attempts") != std::string::npos);
}

TEST_CASE("a Helios log may begin with blank lines") {
  const auto jobs = read_jobs(
      "\r\n\r\njob_id,gpu_num,node_num,state,submit_time,start_time,end_time,duration\r\n"
      "7,2,1,COMPLETED,2020-01-01 00:00:00,2020-01-01 00:00:10,2020-01-01 00:01:10,60\r\n");
  REQUIRE(jobs.ok());
  CHECK(jobs->jobs[0].gang == 2);
}
