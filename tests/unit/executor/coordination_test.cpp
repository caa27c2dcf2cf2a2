// A runtime with a coordinator: real sessions are admitted, limited, upgraded, demoted and stopped, and lose no byte.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstring>
#include <thread>

#include "executor/op_gate.hpp"
#include "memory/lane_door.hpp"
#include "support/bytes.hpp"
#include "support/executor_fixture.hpp"
#include "support/status_checks.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT

constexpr Setup kCoordinatedDevice = {"host?total_bytes=134217728", memory::Layout::kVirtual};
constexpr uint64_t kSoonNs = 20'000'000'000;

executor::SessionOptions lent(std::string name, uint64_t least_bytes, bool may_upgrade = false) {
  auto options = need(std::move(name), 2 * kMiB, 2 * kMiB);
  options.cls = sched::SessionClass::kOpportunistic;
  options.allow_spill = true;
  options.least_bytes = least_bytes;
  options.may_upgrade = may_upgrade;
  return options;
}

base::Status coordinated_iteration(executor::Session& session) {
  GPUSHARE_ASSIGN_OR_RETURN(const auto iteration, session.begin(kSoonNs));
  return iteration->end();
}

// A session that is to shrink has as long for it as its iterations take on a busy machine.
sched::CoordinatorOptions patient() {
  sched::CoordinatorOptions out;
  out.shrink_patience_ns = UINT64_MAX;
  return out;
}

// A thread that runs iterations of a session until it is told to stop.
struct Iterating {
  explicit Iterating(executor::Session& session)
      : thread([this, &session] {
          while (!stop.load()) {
            if (!coordinated_iteration(session).ok()) failed = true;
            ++done;
          }
        }) {}
  ~Iterating() {
    stop = true;
    thread.join();
  }
  std::atomic<bool> stop{false}, failed{false};
  std::atomic<int> done{0};
  std::thread thread;
};

TEST_CASE("a guaranteed session gets what an upgraded one shrinks by, and gives it back when it leaves") {
  for (const char* policy : {"fair", "pack", "priority"}) {
    CAPTURE(policy);
    auto runtime = open_runtime(options_of(kCoordinatedDevice, policy));
    REQUIRE_OK(runtime->set_coordination(patient()));
    auto lower = open_session(*runtime, lent("lower", 12 * kMiB, true));
    REQUIRE_OK(coordinated_iteration(*lower));
    CHECK(lower->info().cls == sched::SessionClass::kGuaranteed);
    const auto theirs = lower->alloc(memory::Kind::kModel, 90 * kMiB, 0);
    REQUIRE(theirs.ok());
    std::memset(reinterpret_cast<void*>(*theirs), 0x11, 90 * kMiB);
    CHECK(lower->info().limit_bytes == 0);

    std::shared_ptr<executor::Session> upper;
    {
      Iterating iterating(*lower);
      upper = open_session(*runtime, need("upper", 64 * kMiB, 8 * kMiB));
      REQUIRE_OK(upper->wait_admitted(kSoonNs));
      const auto ours = upper->alloc(memory::Kind::kModel, 60 * kMiB, 0);
      REQUIRE(ours.ok());
      CHECK(iterating.failed == false);
    }
    // The two may share a lane, so there was room before it had reached its limit.
    const auto above = [&] {
      const auto now = lower->info();
      return now.promised_persistent_bytes + now.promised_ephemeral_bytes > now.limit_bytes;
    };
    for (int i = 0; i < 1000 && above(); ++i) REQUIRE_OK(coordinated_iteration(*lower));
    const auto info = lower->info();
    CHECK(info.cls == sched::SessionClass::kOpportunistic);
    CHECK(info.limit_bytes == runtime->info()->capacity_bytes - 72 * kMiB);
    CHECK(info.promised_persistent_bytes + info.promised_ephemeral_bytes <= info.limit_bytes);
    CHECK(info.spilled_bytes > 0);
    CHECK(info.state == executor::SessionState::kResident);  // it shrank, and was not paged out
    CHECK(runtime->info()->paged_out_bytes_total == 0);
    CHECK(all_are(reinterpret_cast<void*>(*theirs), 90 * kMiB, 0x11));
    CHECK(runtime->check().empty());

    REQUIRE_OK(upper->close());
    CHECK(lower->info().cls == sched::SessionClass::kGuaranteed);
    CHECK(lower->info().limit_bytes == 0);
    for (int i = 0; i < 100'000 && lower->info().spilled_bytes > 0; ++i)
      REQUIRE_OK(coordinated_iteration(*lower));
    CHECK(lower->info().spilled_bytes == 0);
    CHECK(all_are(reinterpret_cast<void*>(*theirs), 90 * kMiB, 0x11));
    CHECK(runtime->check().empty());
    CHECK(runtime->close().ok());
  }
}

TEST_CASE("an opportunistic session without iterations is stopped for a guaranteed one, and comes back") {
  auto runtime = open_runtime(options_of(kCoordinatedDevice));
  REQUIRE_OK(runtime->set_coordination(sched::CoordinatorOptions{}));
  auto lower = open_session(*runtime, lent("lower", 12 * kMiB));
  REQUIRE_OK(coordinated_iteration(*lower));
  const auto theirs = lower->alloc(memory::Kind::kModel, 100 * kMiB, 0);
  REQUIRE(theirs.ok());
  std::memset(reinterpret_cast<void*>(*theirs), 0x22, 100 * kMiB);
  auto upper = open_session(*runtime, need("upper", 64 * kMiB, 8 * kMiB));
  REQUIRE_OK(upper->wait_admitted(kSoonNs));
  CHECK(lower->info().state == executor::SessionState::kPagedOut);
  CHECK(lower->begin(0).status().code() == GPUSHARE_TIMED_OUT);
  CHECK(lower->explain_wait().find("coordinator") != std::string::npos);
  REQUIRE_OK(upper->close());
  REQUIRE_OK(coordinated_iteration(*lower));
  CHECK(all_are(reinterpret_cast<void*>(*theirs), 100 * kMiB, 0x22));
  CHECK(runtime->check().empty());
  CHECK(runtime->close().ok());
}

TEST_CASE("allocations of an open iteration are checked from the coordinator's limit on") {
  auto runtime = open_runtime(options_of(kCoordinatedDevice));
  REQUIRE_OK(runtime->set_coordination(patient()));
  auto lower = open_session(*runtime, lent("lower", 12 * kMiB, true));
  REQUIRE_OK(coordinated_iteration(*lower));
  REQUIRE(lower->alloc(memory::Kind::kModel, 90 * kMiB, 0).ok());
  const auto iteration = lower->begin(kSoonNs);
  REQUIRE(iteration.ok());
  const memory::LanePass pass = (*iteration)->pass();
  REQUIRE(pass.door != nullptr);
  CHECK(pass.door->belongs_to(pass.key, runtime.get()));
  CHECK(lower->info().limit_bytes == 0);
  auto upper = open_session(*runtime, need("upper", 64 * kMiB, 8 * kMiB));
  CHECK(lower->info().limit_bytes > 0);
  CHECK((*iteration)->pass().door == nullptr);
  CHECK_FALSE(pass.door->belongs_to(pass.key, runtime.get()));
  REQUIRE_OK((*iteration)->end());
  REQUIRE_OK(upper->close());
  CHECK(runtime->close().ok());
}

TEST_CASE("guaranteed sessions run one at a time, and one that waits long starts as opportunistic") {
  auto runtime = open_runtime(options_of(kCoordinatedDevice));
  sched::CoordinatorOptions coordination;
  coordination.long_wait_ns = 30'000'000;
  REQUIRE_OK(runtime->set_coordination(coordination));
  auto first = open_session(*runtime, need("first", 8 * kMiB, 8 * kMiB));
  auto second = open_session(*runtime, need("second", 8 * kMiB, 8 * kMiB));
  CHECK(first->info().cls == sched::SessionClass::kGuaranteed);
  REQUIRE_OK(second->wait_admitted(kSoonNs));
  CHECK(second->info().cls == sched::SessionClass::kOpportunistic);
  REQUIRE_OK(coordinated_iteration(*second));
  REQUIRE_OK(first->close());
  CHECK(second->info().cls == sched::SessionClass::kGuaranteed);
  auto refused = need("refused", 8 * kMiB, 8 * kMiB);
  refused.allow_queueing = false;
  const auto third = runtime->open_session(refused);
  CHECK(third.status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(third.status().message().find("coordinator") != std::string::npos);
  REQUIRE_OK(runtime->set_coordination(std::nullopt));
  CHECK(runtime->open_session(refused).ok());
  CHECK(runtime->close().ok());
  CHECK(runtime->set_coordination(coordination).code() == GPUSHARE_INVALID_STATE);
}

TEST_CASE("the gate of a session follows the class that it counts as") {
  auto runtime = open_runtime(options_of(kCoordinatedDevice, "pack"));
  REQUIRE_OK(runtime->set_coordination(sched::CoordinatorOptions{}));
  auto lower = open_session(*runtime, lent("lower", 0, true));
  const auto gate = lower->gate();
  REQUIRE(gate.ok());
  CHECK((*gate)->closed() == 0);
  auto upper = open_session(*runtime, need("upper", 64 * kMiB, 8 * kMiB));
  REQUIRE_OK(upper->wait_admitted(kSoonNs));
  CHECK(lower->info().cls == sched::SessionClass::kOpportunistic);
  REQUIRE_OK(coordinated_iteration(*upper));
  CHECK((*gate)->closed() != 0);  // the guaranteed session is being learned
  REQUIRE_OK(upper->close());
  CHECK(lower->info().cls == sched::SessionClass::kGuaranteed);
  CHECK((*gate)->closed() == 0);
  REQUIRE_OK((*gate)->enter(nullptr, 1'000'000'000, 0));
  CHECK(runtime->close().ok());
}

}  // namespace
