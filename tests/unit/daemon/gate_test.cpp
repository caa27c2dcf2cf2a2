// Gates on a shared device, whose daemon decides for the sessions of all processes.
// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <atomic>
#include <bit>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "support/child_process.hpp"
#include "support/gated_session.hpp"
#include "support/random.hpp"
#include "support/shared_service.hpp"
#include "unit/daemon/raw_daemon.hpp"
#include "unit/daemon/raw_process.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT
using client::LeaseState;
using client::MessageType;

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
    eventually([&] { return gate->closed() == 0; });  // launches need not ask
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
    eventually([&] { return gate->closed() == 1; });
    REQUIRE_OK(scout->close());
    eventually([&] { return gate->info().guaranteed_id == 0 && gate->closed() == 0; });
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
  eventually([&] { return other.gate->info().open && other.gate->closed() == 0; });
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
  eventually([&] { return other.gate->closed() == 0; });
  REQUIRE_OK((*iteration)->end());
  REQUIRE_OK(other.iteration->end());
  other.shared.start();
  eventually([&] {
    (void)iterate(*sure, 1, 1);
    return other.gate->info().guaranteed_id != 0 && other.gate->closed() == 1;
  });
}

TEST_CASE(
    "a gate's flag follows what the daemon says, and the daemon knows of launches that it did not see") {
  RawDaemon daemon;
  const auto runtime = SharedService::open();
  auto options = need("spare", 2 * kMiB, 2 * kMiB);
  options.cls = sched::SessionClass::kOpportunistic;
  const auto session = open_session(*runtime, options);
  const auto gate = session->gate();
  REQUIRE(gate.ok());
  base::GateSlot& slot = daemon.page->lease(0).gate();
  CHECK((*gate)->closed() == 1);  // until the daemon has answered
  eventually([&] { return daemon.gate_opens == 1; });
  daemon.tell(MessageType::kGateAsks, 0);
  eventually([&] { return (*gate)->closed() == 0; });
  CHECK(slot.unseen());
  const auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(iteration.ok());
  daemon.tell(MessageType::kGateAsks, 1);
  eventually([&] { return !slot.unseen(); });
  CHECK((*gate)->closed() == 1);
  CHECK(slot.busy_until_ns() == base::GateSlot::kBusy);
  REQUIRE_OK((*iteration)->end());
  eventually([&] { return slot.busy_until_ns() != base::GateSlot::kBusy; });
  daemon.tell(MessageType::kCountsAs, static_cast<uint64_t>(sched::SessionClass::kGuaranteed));
  eventually([&] { return (*gate)->closed() == 0; });
  daemon.tell(MessageType::kCountsAs, static_cast<uint64_t>(sched::SessionClass::kOpportunistic));
  eventually([&] { return daemon.gate_opens == 2 && (*gate)->closed() == 1; });
  REQUIRE_OK(session->close());
  CHECK((*gate)->enter(nullptr, 1, 0).code() == GPUSHARE_CANCELLED);
  CHECK(daemon.sent_well);
}

TEST_CASE("a process tells of iterations while the device has gates, also if some are always in flight") {
  RawDaemon daemon;
  daemon.page->set_watched(true);
  const auto runtime = SharedService::open();
  const auto session = open_session(*runtime, need("sure", 2 * kMiB, 2 * kMiB));
  static std::atomic<int> over;
  over = 0;
  const auto run = [&](int number) {
    const auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(iteration.ok());
    const auto stream = (*iteration)->stream();
    REQUIRE(stream.ok());
    REQUIRE_OK((*stream)->launch_host(
        [](void* last) {
          while (over < static_cast<int>(reinterpret_cast<uintptr_t>(last))) std::this_thread::yield();
        },
        takes(number)));
    REQUIRE_OK((*iteration)->end());
  };
  run(1);
  run(2);
  eventually([&] { return daemon.work_begins == 2; });
  daemon.page->set_watched(false);
  over = 1;
  eventually([&] { return daemon.work_ends == 1; });
  run(3);
  over = 2;
  eventually([&] { return daemon.work_ends == 2; });
  daemon.page->set_watched(true);
  run(4);
  over = 4;
  eventually([&] { return daemon.work_ends == 3; });
  CHECK(daemon.work_begins == 3);
  REQUIRE_OK(session->close());
}

TEST_CASE("nothing that a process says of its work and its gates stops the daemon") {
  SharedService shared([](daemon::ServiceOptions& options) {
    options.policy = "pack";
    options.max_lanes = 2;
  });
  {
    RawProcess process(shared);
    REQUIRE(process.hello() == GPUSHARE_OK);
    for (const uint64_t session : {1, 2, 3}) REQUIRE(process.call(arrive(session, kMiB)) == GPUSHARE_OK);
    process.tell(MessageType::kReady, 3);
    process.await(LeaseState::kBusy);
    INFO("seed " << seed());
    Random random(seed());
    const std::array<uint64_t, 8> numbers{
        0, 1, 1'000'000, base::host_now_ns(), 1ull << 62, UINT64_MAX - 1, UINT64_MAX, 0x7ff8000000000000};
    const auto any = [&] { return numbers[uniform(random, 0, numbers.size() - 1)]; };
    for (int i = 0; i < 3000; ++i) {
      auto message = client::make_message<MessageType::kWorkBegan>();
      message.session = uniform(random, 0, 4);
      message.at_ns = any();
      message.device_ns = any();
      message.target = std::bit_cast<double>(any());
      base::GateSlot& slot = process.page->lease(static_cast<uint32_t>(uniform(random, 0, 3))).gate();
      switch (uniform(random, 0, 7)) {
        case 0:
          process.tell(MessageType::kGateOpen, message.session, any());
          break;
        case 1:
          process.tell(MessageType::kSetClass, message.session, uniform(random, 0, 2));
          break;
        case 2:
          process.tell(MessageType::kSetWeight, message.session, any());
          break;
        case 3:
          slot.let_in(any());
          slot.set_asked(any());
          slot.count_entry();
          break;
        case 4:
          slot.set_busy(uniform(random, 0, 1) == 1, any());
          slot.set_unseen(uniform(random, 0, 1) == 1);
          slot.bell().expect(uniform(random, 0, 1) == 1);
          break;
        case 5:
          message.header.type = static_cast<uint16_t>(MessageType::kWorkEnded);
          REQUIRE(process.say(message));
          break;
        default:
          REQUIRE(process.say(message));
      }
      if (i % 100 == 0) CHECK(shared.status().sessions.size() == 3);
    }
    REQUIRE(process.lease().change(process.lease().look(), LeaseState::kFree));
    process.tell(MessageType::kReturned, 3);
    for (const uint64_t session : {1, 2, 3}) process.tell(MessageType::kLeave, session);
    eventually([&] { return shared.status().sessions.empty(); });
  }
  const auto runtime = SharedService::open();
  gates_close_and_open(*runtime, false);
}

}  // namespace
