// SPDX-License-Identifier: Apache-2.0
#include <fstream>
#include <string>
#include <vector>

#include "sim/csv.hpp"
#include "sim/job_file.hpp"
#include "support/catch.hpp"

using namespace gpushare;
using namespace gpushare::sim;

namespace {

const std::string kHeader =
    "name,class,arrival_s,iterations,iteration_ms,persistent_mb,ephemeral_mb,priority\n";

std::string refusal(const std::string& text, const JobFileOptions& options = {}) {
  const auto file = parse_jobs(text, "jobs.csv", options);
  CHECK(file.status().code() == GPUSHARE_MALFORMED_INPUT);
  return file.status().message();
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("our layout: units, order of columns, optional columns, sorted by arrival") {
  const auto file = parse_jobs(
      "\xEF\xBB\xBFpriority, "
      "name,class,arrival_s,iterations,iteration_ms,persistent_mb,ephemeral_mb,weight,demand,config\r\n"
      "\r\n"
      "-3,\"b, \"\"late\"\"\",opportunistic,2.5,10,0.5,100,1500.5,2,0.5,\"LM (batch size 5)\"\r\n"
      " 4 ,a , guaranteed,0,1,1e3,0,1,1,1,none",
      "jobs.csv");
  REQUIRE(file.ok());
  CHECK(file->layout == "gpushare");
  REQUIRE(file->jobs.size() == 2);
  const Job& a = file->jobs[0];
  CHECK(a.name == "a");
  CHECK(a.priority == 4);
  CHECK(a.persistent_bytes == 0);
  CHECK(a.iteration_ns == 1e9);
  const Job& b = file->jobs[1];
  CHECK(b.name == "b, \"late\"");
  CHECK(b.cls == sched::SessionClass::kOpportunistic);
  CHECK(b.arrival_ns == 2'500'000'000);
  CHECK(b.iterations == 10);
  CHECK(b.iteration_ns == 0.5e6);
  CHECK(b.persistent_bytes == 100'000'000);
  CHECK(b.ephemeral_bytes == 1'500'500'000);
  CHECK(b.priority == -3);
  CHECK(b.weight == 2);
  CHECK(b.demand == 0.5);
  CHECK(b.config == "LM (batch size 5)");
}

TEST_CASE("salus layout: persistent from published parameters, kept to the measured range") {
  const auto file = parse_jobs(
      "name,seconds_alone,peak_mb,iterations\n"
      "vgg16_25_1min,68.348,4316.8,311\n"
      "googlenet_25_1min,73.123,756.1,1015\n"
      "vae_64_1min,60,40,1000\n"
      "mystery_1,1,1000,10\n",
      "salus.csv");
  REQUIRE(file.ok());
  REQUIRE(file->jobs.size() == 4);
  CHECK(file->jobs[0].persistent_bytes == 553'600'000);  // 138.4 M parameters of 4 bytes
  CHECK(file->jobs[0].persistent_bytes + file->jobs[0].ephemeral_bytes == 4'316'800'000);
  CHECK(file->jobs[0].work_ns() == Approx(68.348e9));
  CHECK(file->jobs[1].persistent_bytes == 110'900'000);  // the least that was measured
  CHECK(file->jobs[2].persistent_bytes == 20'000'000);   // at most half the peak
  CHECK(file->jobs[3].persistent_bytes == 110'900'000);
  REQUIRE(file->notes.size() == 3);
  CHECK(has(file->notes[0], "published parameter"));
  CHECK(has(file->notes[2], "mystery"));
}

TEST_CASE("gavel layout: iteration times from the table or built in, arrivals stretched to the load") {
  const std::string text =
      "model,steps,arrival_s,gpus\n\"LM (batch size 5)\",90776,0,1\n\"CycleGAN\",2403,100,8\n";
  const auto file = parse_jobs(text, "gavel.csv");
  REQUIRE(file.ok());
  REQUIRE(file->jobs.size() == 2);
  CHECK(file->jobs[0].work_ns() == Approx(1000e9).epsilon(0.001));
  CHECK(file->jobs[1].work_ns() == Approx(1000e9).epsilon(0.001));  // 8 GPUs: all its steps on the one
  CHECK(static_cast<double>(file->jobs[1].arrival_ns) == Approx(2000e9 / 0.95).epsilon(0.001));
  CHECK(file->jobs[1].persistent_bytes == 452'640'000);
  JobFileOptions options;
  options.load = 1e-300;
  CHECK(parse_jobs(text, "gavel.csv", options)->jobs[1].arrival_ns == UINT64_MAX);
  options.load = 2;
  options.time_scale = 0.5;
  options.limit = 2;
  const auto table =
      InterferenceTable::parse("{\"p100\": {\"('CycleGAN', 1)\": {\"null\": 24.03}}}", "t.json");
  REQUIRE(table.ok());
  options.table = &*table;
  const auto other = parse_jobs(text, "gavel.csv", options);
  REQUIRE(other.ok());
  CHECK(other->jobs[1].work_ns() == Approx(100e9));
  CHECK(static_cast<double>(other->jobs[1].arrival_ns) == Approx(1100e9 / 2 * 0.5).epsilon(0.001));
  CHECK(has(other->notes.back(), "time scale"));
  options.limit = 1;
  CHECK(parse_jobs(text, "gavel.csv", options)->jobs.size() == 1);  // nothing to stretch
}

TEST_CASE("bad files are refused with file, line, field and what is allowed") {
  CHECK(has(refusal(""), "jobs.csv: the file is empty"));
  CHECK(has(refusal("\n\n"), "empty"));
  CHECK(has(refusal(kHeader), "no jobs"));
  CHECK(has(refusal("a,b,c\n1,2,3\n"), "salus: name,seconds_alone"));
  CHECK(has(refusal("name,class,arrival_s,iterations,iteration_ms,persistent_mb,priority\n"),
            "lacks 'ephemeral_mb'"));
  CHECK(has(refusal("name,seconds_alone,peak_mb,iterations,colour\n"), "'colour' is no column"));
  CHECK(has(refusal("name,name,class\n"), "twice"));
  const std::string good = "a,guaranteed,0,1,1,1,1,0\n";
  CHECK(has(refusal(kHeader + good + "b,guaranteed,0,1,1,1,1\n"),
            "jobs.csv:3: 7 fields, but the header has 8"));
  CHECK(has(refusal(kHeader + "b,guaranteed,0,1,1,1,1,0,9\n"), "9 fields"));
  CHECK(has(refusal(kHeader + ",guaranteed,0,1,1,1,1,0\n"), "jobs.csv:2: name: is empty"));
  CHECK(has(refusal(kHeader + std::string(300, 'x') + ",guaranteed,0,1,1,1,1,0\n"), "300 characters"));
  CHECK(has(refusal(kHeader + "b,vip,0,1,1,1,1,0\n"), "class: 'vip' must be guaranteed or opportunistic"));
  CHECK(has(refusal(kHeader + "b,guaranteed,-1,1,1,1,1,0\n"),
            "arrival_s: '-1' must be a number of at least 0"));
  CHECK(has(refusal(kHeader + "b,guaranteed,x,1,1,1,1,0\n"), "arrival_s: 'x'"));
  CHECK(has(refusal(kHeader + "b,guaranteed,nan,1,1,1,1,0\n"), "arrival_s"));
  CHECK(has(refusal(kHeader + "b,guaranteed,1e300,1,1,1,1,0\n"), "at most 1e+09"));
  CHECK(
      has(refusal(kHeader + "b,guaranteed,0,0,1,1,1,0\n"), "iterations: '0' must be a whole number from 1"));
  CHECK(has(refusal(kHeader + "b,guaranteed,0,1.5,1,1,1,0\n"), "iterations"));
  CHECK(has(refusal(kHeader + "b,guaranteed,0,99999999999999999999,1,1,1,0\n"), "iterations"));
  CHECK(has(refusal(kHeader + "b,guaranteed,0,1,0,1,1,0\n"), "iteration_ms: '0' must be a number above 0"));
  CHECK(has(refusal(kHeader + "b,guaranteed,0,1000000000000,1000000,1,1,0\n"), "of work"));
  CHECK(has(refusal(kHeader + "b,guaranteed,0,1,1,-5,1,0\n"), "persistent_mb"));
  CHECK(has(refusal(kHeader + "b,guaranteed,0,1,1,1e30,1,0\n"), "persistent_mb"));
  CHECK(has(refusal(kHeader + "b,guaranteed,0,1,1,1,0,0\n"), "ephemeral_mb"));
  CHECK(has(refusal(kHeader + "b,guaranteed,0,1,1,1,1,1.5\n"), "priority"));
  CHECK(has(refusal(kHeader + "b,guaranteed,0,1,1,1,1,1e10\n"), "priority"));
  CHECK(has(refusal("weight," + kHeader + "0,b,guaranteed,0,1,1,1,1,0\n"), "weight"));
  CHECK(has(refusal("demand," + kHeader + "1.5,b,guaranteed,0,1,1,1,1,0\n"), "demand"));
  CHECK(has(refusal(kHeader + "\"b,guaranteed,0,1,1,1,1,0\n"), "jobs.csv:2: a quoted field is not closed"));
  CHECK(has(refusal(kHeader + "\"b\"c,guaranteed,0,1,1,1,1,0\n"), "after a closing quote"));
  CHECK(has(refusal(kHeader + std::string("b\0,guaranteed", 13)), "NUL"));
  CHECK(has(refusal("name,seconds_alone,peak_mb,iterations\na,0,1,1\n"), "seconds_alone"));
  CHECK(has(refusal("name,seconds_alone,peak_mb,iterations\na,1,0,1\n"), "peak_mb"));
  CHECK(has(refusal("model,steps,arrival_s,gpus\nGPT-9,1,0,1\n"), "model: 'GPT-9'"));
  CHECK(has(refusal("model,steps,arrival_s,gpus\nA3C,1,0,0\n"), "gpus"));
  CHECK(has(refusal("model,steps,arrival_s,gpus\nCycleGAN,900000000000000,0,1\n"), "steps"));
  JobFileOptions options;
  options.load = 0;
  CHECK(parse_jobs(kHeader + good, "jobs.csv", options).status().code() == GPUSHARE_INVALID_ARGUMENT);
  options = {};
  options.time_scale = -1;
  CHECK(parse_jobs(kHeader + good, "jobs.csv", options).status().code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(read_jobs("/nowhere/jobs.csv").status().code() == GPUSHARE_NOT_FOUND);
}

TEST_CASE("the public traces are read, every field of every row") {
  const std::string folder = std::string(GPUSHARE_SHARED_DATA) + "/jobs/";
  if (!std::ifstream(folder + "salus_workloads.csv")) {
    WARN("no shared data at " << folder << ": only the rows made by this program were read");
    return;
  }
  const auto salus = read_jobs(folder + "salus_workloads.csv");
  REQUIRE(salus.ok());
  CHECK(salus->layout == "salus");
  CHECK(salus->jobs.size() == 99);
  CHECK(salus->notes.size() == 2);  // every model is known
  for (const Job& job : salus->jobs) {
    CHECK(job.persistent_bytes >= 110'900'000);
    CHECK(job.persistent_bytes <= 822'200'000);
  }
  const auto gavel = read_jobs(folder + "philly_gavel_seed0.csv");
  REQUIRE(gavel.ok());
  CHECK(gavel->layout == "gavel");
  CHECK(gavel->jobs.size() == 2000);
  double work = 0;
  for (const Job& job : gavel->jobs) work += job.work_ns();
  CHECK(work / static_cast<double>(gavel->jobs.back().arrival_ns) == Approx(0.95).epsilon(0.001));
}
