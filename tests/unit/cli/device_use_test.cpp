// A measured run's use of the device, as the device's events tell it.
// SPDX-License-Identifier: Apache-2.0
#include "cli/device_use.hpp"

#include "cli/run_result.hpp"
#include "support/catch.hpp"

using namespace gpushare;
using namespace gpushare::cli;

TEST_CASE("bytes are in use from the begin of their first work to the end of their last", "[cli]") {
  DeviceUse use;
  use.model_arrived(1, {{1000, 100}, {1100, 50}}, 450);
  use.work_began(1, 77, {{5000, 200}}, 0, 10);
  CHECK(use.bytes() == 350);
  CHECK(use.is_above_peak());
  use.keep_peak();
  // The same addresses in the next turn of the lane, of another job: 300 bytes of model, 150 of scratch memory.
  use.work_ended(77, 20);
  CHECK(use.bytes() == 150);
  use.model_arrived(2, {{2000, 300}}, 450);
  use.model_arrived(2, {{2000, 300}}, 450);  // told by each of its iterations
  use.work_began(2, 77, {{5000, 150}}, 15, 23);
  CHECK(use.bytes() == 600);
  use.keep_peak();
  use.work_ended(77, 40);
  use.work_began(2, 77, {{5000, 150}}, 30, 41);
  use.work_ended(77, 50);
  use.work_began(1, 77, {{5000, 200}}, 60,
                 61);  // enqueued when the lane was idle already: a wait for work, no hand-over
  use.work_ended(77, 70);
  use.model_left(1);
  use.model_left(1);
  CHECK(use.bytes() == 300);
  CHECK(use.jobs() == std::vector<uint64_t>{2});
  CHECK(use.peak_bytes() == 600);
  CHECK(use.most_inside() == 2);
  CHECK(use.most_apart_bytes() == 900);
  CHECK(use.switches_seen() == 1);
  CHECK(use.switch_ns() == 3);
  CHECK(use.stay_ns() == 1);

  const memory::MemorySnapshot peak = use.peak(4096, {"first", "second"});
  REQUIRE(peak.segments.size() == 3);
  CHECK(peak.segments[0].name == "session first");
  CHECK(peak.segments[0].blocks.size() == 2);
  CHECK(peak.segments[0].bytes == 150);
  CHECK(peak.segments[1].name == "session second");
  CHECK(peak.segments[2].name == "lane 0");
  CHECK(peak.segments[2].blocks.at(0).bytes == 150);
  CHECK(peak.segments[2].blocks.at(0).session == 2);
  CHECK(DeviceUse().switch_ns() < 0);
}

TEST_CASE("what sharing gains is said of policies that did the same work", "[cli]") {
  RunResult result;
  result.capacity_bytes = uint64_t{1} << 30;
  for (const auto& [policy, mean, makespan] :
       {std::tuple{"fifo", 20.0, 30.0}, {"srtf", 10.0, 30.5}, {"lame", 1.0, 2.0}}) {
    PolicyRun run;
    run.policy = policy;
    run.completed = run.policy == "lame" ? 1 : 4;
    run.jct_mean_s = mean;
    run.makespan_s = makespan;
    run.switches = run.policy == "srtf" ? 9 : 3;
    result.policies.push_back(run);
  }
  CHECK(findings(result).size() == 1);  // nothing measured beside the times
  result.policies[1].switch_s = 12e-6;
  result.policies[1].most_inside = 3;
  result.policies[1].most_apart_bytes = uint64_t{3} << 30;
  for (PolicyRun& run : result.policies) run.simulated_jct_mean_s = run.jct_mean_s * 1.02;
  std::vector<std::string> lines = findings(result);
  REQUIRE(lines.size() == 4);
  CHECK(lines[0].find("2.00 times sooner") != std::string::npos);
  CHECK(lines[0].find("under fifo, sooner than under the others.") != std::string::npos);
  CHECK(lines[1].find("srtf made most, 9; between the work of two jobs its lane stood idle for 12") !=
        std::string::npos);
  CHECK(lines[2].find("up to 3 jobs") != std::string::npos);
  CHECK(lines[2].find("3.00 GiB") != std::string::npos);
  CHECK(lines[3].find("within 2%") != std::string::npos);
  result.policies[1].makespan_s = 29;
  CHECK(findings(result)[0].find("30.00 s under fifo, 29.00 s under srtf.") != std::string::npos);
  result.policies[1].simulated_jct_mean_s = 5;
  lines = findings(result);
  CHECK(lines[3].find("under srtf is 100% longer than simulated") != std::string::npos);
  result.policies.resize(1);
  CHECK(findings(result).empty());
}
