// Real processes on a shared device whose blocks move between device and host memory: under the daemon's coordinator,
// which admits, limits, upgrades and demotes their sessions, and killed in the middle of moves. GPUSHARE_TEST_KILLS
// sets how many are killed (12).
// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "support/child_process.hpp"
#include "support/random.hpp"
#include "support/shared_service.hpp"

using namespace gpushare;
using namespace gpushare::test;

namespace {

// Told in the words of told_worker.
struct Process : ChildProcess {
  Process() : ChildProcess(GPUSHARE_TOLD_WORKER, {}) {}
  std::string ask(const std::string& words) {
    tell(words + "\n");
    std::string answer = line();
    if (!answer.empty()) answer.pop_back();
    return answer;
  }
  void must(const std::string& words) {
    INFO(words);
    REQUIRE(ask(words) == "ok");
  }
  struct Info {
    std::string cls, state;
    uint64_t limit_mib = 0, spilled_mib = 0, promised_mib = 0;
  };
  Info info() {
    std::istringstream words(ask("info"));
    Info info;
    words >> info.cls >> info.state >> info.limit_mib >> info.spilled_mib >> info.promised_mib;
    return info;
  }
};

void coordinate(daemon::ServiceOptions& options) {
  options.coordination = sched::CoordinatorOptions{};
  options.coordination->shrink_patience_ns = 20'000'000'000;  // a sanitizer makes a worker slow to shrink
  options.max_lanes = 3;
}

client::SessionStatus status_of_process(const SharedService& shared, const std::string& name) {
  for (const client::SessionStatus& session : shared.status().sessions)
    if (session.name == name) return session;
  FAIL("no session " << name);
  return {};
}

void check_promises(const SharedService& shared) {
  const auto now = shared.status();
  CHECK(now.devices[0].promised_bytes <= now.devices[0].capacity_bytes);
}

}  // namespace

TEST_CASE("processes are upgraded, demoted, limited and upgraded again by the daemon's coordinator") {
  const bool killed = GENERATE(false, true);  // how the guaranteed ones end
  CAPTURE(killed);
  SharedService shared(coordinate);
  Process lower, upper, third;
  lower.must("open lower o 1 1 8 su");
  lower.must("admitted 20000");
  CHECK(lower.info().cls == "g");  // there is room
  lower.must("alloc 40 51");
  lower.must("run");
  CHECK(lower.info().limit_mib == 0);

  upper.must("open upper g 40 1 0 -");
  upper.must("admitted 20000");
  upper.must("alloc 39 77");
  upper.must("iterate 3");
  // The bytes were free because the other one has come down to its limit.
  const Process::Info limited = lower.info();
  CHECK(limited.cls == "o");
  CHECK(limited.limit_mib > 0);
  CHECK(limited.limit_mib + 41 <= 64);
  CHECK(limited.promised_mib <= limited.limit_mib);
  CHECK(limited.spilled_mib > 0);
  CHECK(limited.state == "resident");
  CHECK(status_of_process(shared, "lower").cls == "opportunistic");
  check_promises(shared);

  // One guaranteed session at a time, and the one that waits says why.
  third.must("open third g 4 1 0 -");
  CHECK(third.info().state == "queued");
  CHECK(status_of_process(shared, "third").waits_for.find("coordinator") != std::string::npos);
  if (killed) {
    upper.kill();
  } else {
    upper.must("close");
  }
  third.must("admitted 20000");
  CHECK(third.info().cls == "g");
  CHECK(lower.info().cls == "o");
  third.must("alloc 4 88");
  third.must("iterate 3");
  if (killed) {
    third.kill();
  } else {
    third.must("close");
  }
  eventually([&] { return lower.info().cls == "g"; });
  eventually([&] { return lower.info().spilled_mib == 0; });
  CHECK(lower.info().limit_mib == 0);
  lower.must("halt");  // every iteration found every byte
  lower.must("close");
}

TEST_CASE("no more opportunistic processes run at once than the coordinator allows, and the next follows") {
  SharedService shared([](daemon::ServiceOptions& options) {
    coordinate(options);
    options.coordination->max_opportunistic = 2;
  });
  Process first, second, third;
  first.must("open first o 4 1 0 -");
  second.must("open second o 4 1 0 -");
  third.must("open third o 4 1 0 -");
  first.must("admitted 20000");
  second.must("admitted 20000");
  CHECK(third.info().state == "queued");
  first.kill();
  third.must("admitted 20000");
  third.must("iterate 2");
  second.must("iterate 2");
  CHECK(third.info().cls == "o");
}

TEST_CASE(
    "a guaranteed process that has waited long starts as opportunistic, and is guaranteed when it can be") {
  SharedService shared([](daemon::ServiceOptions& options) {
    coordinate(options);
    options.coordination->long_wait_ns = 50'000'000;
  });
  Process first, second;
  first.must("open first g 8 1 0 -");
  first.must("admitted 20000");
  second.must("open second g 8 1 0 -");
  second.must("admitted 20000");
  CHECK(second.info().cls == "o");
  CHECK(first.info().cls == "g");
  second.must("alloc 8 33");
  second.must("iterate 2");
  first.kill();
  eventually([&] { return second.info().cls == "g"; });
  second.must("iterate 2");
}

TEST_CASE("a process that shrinks for a guaranteed one and dies leaves it all of the bytes") {
  SharedService shared([](daemon::ServiceOptions& options) {
    coordinate(options);
    options.devices = {"host?total_bytes=268435456&granularity=65536&copy_gbps=0.2"};
  });
  for (int round = 0; round < 4; ++round) {
    Process lower, upper;
    lower.must("open lower o 1 1 8 su");
    lower.must("admitted 20000");
    lower.must("alloc 50 51");
    lower.must("run");
    upper.must("open upper g 50 1 0 -");
    upper.tell("admitted 20000\n");
    std::this_thread::sleep_for(std::chrono::milliseconds(20 * round));  // 42 MiB take 0.2 s
    lower.kill();
    CHECK(upper.line() == "ok\n");
    upper.must("alloc 49 77");
    upper.must("iterate 2");
    upper.must("close");
    eventually([&] { return shared.status().devices[0].promised_bytes == 0; });
  }
}

TEST_CASE(
    "processes that are killed while their blocks move, out or home, give everything back and harm nobody") {
  // A move of 8 MiB takes 16 ms, so most kills fall into moves.
  SharedService shared([](daemon::ServiceOptions& options) {
    options.devices = {"host?total_bytes=268435456&granularity=65536&copy_gbps=0.5"};
    options.max_lanes = 3;
  });
  INFO("seed " << seed());
  Random random(seed());
  Process bystander;
  bystander.must("open bystander g 16 1 0 -");
  bystander.must("admitted 20000");
  bystander.must("alloc 16 90");
  bystander.must("run");
  const uint64_t mine = shared.status().devices[0].promised_bytes;
  for (uint64_t i = 0; i < number_from("GPUSHARE_TEST_KILLS", 12); ++i) {
    Process victim;
    victim.must("open victim o 1 1 0 s");
    victim.must("alloc 20 51");
    victim.must("cycle 4");
    std::this_thread::sleep_for(std::chrono::microseconds(uniform(random, 0, 100'000)));
    check_promises(shared);
    victim.kill();
    eventually([&] { return shared.status().devices[0].promised_bytes == mine; });
    if (i % 4 != 0) continue;
    // All that it had is there for the next.
    Process next;
    next.must("open next g 40 1 0 -");
    next.must("admitted 20000");
    next.must("alloc 40 17");
    next.must("iterate 2");
    next.must("close");
  }
  bystander.must("halt");
  bystander.must("close");
  eventually([&] { return shared.status().devices[0].promised_bytes == 0; });
}
