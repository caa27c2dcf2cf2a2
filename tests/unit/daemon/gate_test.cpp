// Gates on a shared device, whose daemon decides for the sessions of all processes.
// SPDX-License-Identifier: Apache-2.0
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "support/child_process.hpp"
#include "support/gated_session.hpp"
#include "support/shared_service.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT

TEST_CASE("gates close and open on a shared device, under each policy, and hold up no guaranteed session") {
  for (const char* policy : {"pack", "fair", "priority"})
    for (const uint32_t lanes : {1U, 3U}) {
      CAPTURE(policy, lanes);
      SharedService shared([&](daemon::ServiceOptions& options) {
        options.policy = policy;
        options.max_lanes = lanes;
      });
      const auto runtime = SharedService::open();
      gates_close_and_open(*runtime, false);
      guaranteed_go_on(*runtime);
      CHECK(runtime->check().empty());
    }
}

// An opportunistic session with an iteration open, in a runtime of its own, on a device where two have turns at a time. No time passes
// that ends a wait.
struct OtherProcess {
  OtherProcess() {
    auto options = need("spare", 2 * kMiB, 2 * kMiB);
    options.cls = sched::SessionClass::kOpportunistic;
    session = open_session(*runtime, options);
    auto made = session->gate();
    REQUIRE(made.ok());
    gate = *made;
    auto began = session->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(began.ok());
    iteration = *began;
  }
  ~OtherProcess() {
    if (waiting.joinable()) waiting.join();
  }
  // Returns when the daemon knows of the gate and has told the processes so, which a guaranteed session's iteration shows.
  void is_watched() const {
    const auto scouts = SharedService::open();
    auto scout = open_session(*scouts, need("scout", 2 * kMiB, 2 * kMiB));
    eventually([&] {
      REQUIRE_OK(iterate(*scout, 1, 1));
      return gate->info().guaranteed_id != 0;
    });
    REQUIRE_OK(scout->close());
    eventually([&] { return gate->info().guaranteed_id == 0; });
  }
  // A launch that waits at the gate; what happens is written down in order.
  void launch() {
    const uint64_t before = gate->info().waits;
    waiting = std::thread([this] {
      const base::Status entered = gate->enter(nullptr, 1000, GPUSHARE_NO_TIMEOUT);
      note(entered.ok() ? "let in" : entered.to_string());
    });
    eventually([&] { return gate->info().waits > before; });
  }
  void note(std::string what) {
    const std::lock_guard<std::mutex> lock(mutex);
    events.push_back(std::move(what));
  }
  std::vector<std::string> finish() {
    waiting.join();
    gate->done(1000);
    return std::exchange(events, {});
  }
  bool shut() const {
    const auto now = gate->info();
    return now.guaranteed_id != 0 && now.share == 0;
  }
  SharedService shared{[](daemon::ServiceOptions& options) {
    options.policy = "pack";
    options.max_lanes = 2;
    options.lease_ns = 3'600'000'000'000;
  }};
  std::shared_ptr<executor::Runtime> runtime = SharedService::open();
  std::shared_ptr<executor::Session> session;
  std::shared_ptr<executor::LaunchGate> gate;
  std::shared_ptr<executor::Iteration> iteration;
  std::thread waiting;
  std::mutex mutex;
  std::vector<std::string> events;
};

TEST_CASE("launches of one process wait while an iteration of a guaranteed session of another runs") {
  OtherProcess other;
  REQUIRE_OK(other.gate->enter(nullptr, 1000, 0));
  other.gate->done(1000);
  other.is_watched();
  const auto runtime = SharedService::open();
  auto sure = open_session(*runtime, need("sure", 2 * kMiB, 2 * kMiB));
  for (int i = 0; i < 3; ++i) {  // the first five run alone
    const auto iteration = sure->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(iteration.ok());
    eventually([&] { return other.shut(); });
    CHECK(other.gate->enter(nullptr, 1000, 0).code() == GPUSHARE_TIMED_OUT);
    other.launch();
    CHECK(other.shared.status().devices.size() == 1);  // the daemon has said what it has to say
    CHECK(other.shut());
    other.note("ends");
    REQUIRE_OK((*iteration)->end());
    CHECK(other.finish() == std::vector<std::string>{"ends", "let in"});
  }
  REQUIRE_OK(sure->close());
  eventually([&] { return other.gate->info().open; });
  REQUIRE_OK(other.gate->enter(nullptr, 1000, 0));
  REQUIRE_OK(other.iteration->end());
}

TEST_CASE("launches go on when the process whose iteration they wait for is killed") {
  OtherProcess other;
  other.is_watched();
  ChildProcess worker(GPUSHARE_SESSION_WORKER, {"killed", "1", "0", "1", "1", "1000000000", "0"});
  REQUIRE(worker.line() == "ready\n");
  eventually([&] { return other.shut(); });
  other.launch();
  CHECK(other.shut());
  other.note("is killed");
  worker.kill();
  CHECK(other.finish() == std::vector<std::string>{"is killed", "let in"});
  CHECK(other.gate->info().open);
  REQUIRE_OK(other.iteration->end());
}

TEST_CASE("launches go on when the daemon has gone, and hear of the next one") {
  OtherProcess other;
  other.is_watched();
  const auto runtime = SharedService::open();
  auto sure = open_session(*runtime, need("sure", 2 * kMiB, 2 * kMiB));
  const auto iteration = sure->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(iteration.ok());
  eventually([&] { return other.shut(); });
  other.launch();
  other.note("is gone");
  other.shared.service.reset();
  CHECK(other.finish() == std::vector<std::string>{"is gone", "let in"});
  REQUIRE_OK((*iteration)->end());
  REQUIRE_OK(other.iteration->end());
  other.shared.start();
  eventually([&] {
    (void)iterate(*sure, 1, 1);
    return other.gate->info().guaranteed_id != 0;
  });
}

}  // namespace
