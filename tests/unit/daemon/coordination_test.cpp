// The daemon's coordinator: classes and limits of sessions of several processes.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstring>
#include <thread>

#include "support/bytes.hpp"
#include "support/catch.hpp"
#include "support/shared_service.hpp"
#include "support/status_checks.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT

constexpr uint64_t kCoordinatedMiB = 1 << 20;
constexpr uint64_t kInTimeNs = 20'000'000'000;

executor::SessionOptions shared_need(const char* name, sched::SessionClass cls, uint64_t bytes) {
  auto options = need(name, bytes, kCoordinatedMiB);
  options.cls = cls;
  return options;
}

client::SessionStatus status_of(const SharedService& shared, const std::string& name) {
  for (const client::SessionStatus& session : shared.status().sessions)
    if (session.name == name) return session;
  FAIL("no session " << name);
  return {};
}

}  // namespace

TEST_CASE("an opportunistic session of one process shrinks for a guaranteed one of another") {
  SharedService shared([](daemon::ServiceOptions& options) {
    options.coordination = sched::CoordinatorOptions{};
    // It would be paged out if it took longer to shrink, as on a busy machine.
    options.coordination->shrink_patience_ns = UINT64_MAX;
    options.max_lanes = 2;
  });
  auto theirs = SharedService::open(), ours = SharedService::open();
  CHECK(shared.status().devices[0].max_guaranteed == 1);
  auto spare = shared_need("spare", sched::SessionClass::kOpportunistic, kCoordinatedMiB);
  spare.allow_spill = spare.may_upgrade = true;
  spare.least_bytes = 8 * kCoordinatedMiB;
  auto lower = theirs->open_session(spare);
  REQUIRE(lower.ok());
  REQUIRE_OK((*lower)->wait_admitted(kInTimeNs));
  CHECK(status_of(shared, "spare").cls == "guaranteed");  // upgraded
  const auto block = (*lower)->alloc(memory::Kind::kModel, 40 * kCoordinatedMiB, 0);
  REQUIRE(block.ok());
  std::memset(reinterpret_cast<void*>(*block), 0x33, 40 * kCoordinatedMiB);
  std::atomic<bool> stop{false}, failed{false};
  std::thread iterating([&] {
    while (!stop.load()) {
      const auto iteration = (*lower)->begin(kInTimeNs);
      if (!iteration.ok() || !(*iteration)->end().ok()) failed = true;
    }
  });
  auto upper =
      ours->open_session(shared_need("upper", sched::SessionClass::kGuaranteed, 40 * kCoordinatedMiB));
  base::Status admitted = upper.status();
  if (admitted.ok()) admitted = (*upper)->wait_admitted(kInTimeNs);
  stop = true;
  iterating.join();
  REQUIRE_OK(admitted);
  CHECK_FALSE(failed);
  const client::SessionStatus status = status_of(shared, "spare");
  CHECK(status.cls == "opportunistic");
  const client::SessionStatus above = status_of(shared, "upper");
  CHECK(status.limit_bytes > 0);
  CHECK(status.limit_bytes + above.persistent_bytes + above.ephemeral_bytes <=
        shared.status().devices[0].capacity_bytes);
  CHECK(status.persistent_bytes + status.ephemeral_bytes <= status.limit_bytes);
  CHECK((*lower)->info().cls == sched::SessionClass::kOpportunistic);
  CHECK((*lower)->info().spilled_bytes > 0);
  CHECK(all_are(reinterpret_cast<void*>(*block), 40 * kCoordinatedMiB, 0x33));

  // A second guaranteed session waits, and gpushare top says why.
  auto third = ours->open_session(shared_need("third", sched::SessionClass::kGuaranteed, kCoordinatedMiB));
  REQUIRE(third.ok());
  CHECK(status_of(shared, "third").waits_for.find("coordinator") != std::string::npos);
  REQUIRE_OK((*third)->close());

  REQUIRE_OK((*upper)->close());
  for (int i = 0; i < 100'000 && (*lower)->info().spilled_bytes > 0; ++i) {
    const auto iteration = (*lower)->begin(kInTimeNs);
    REQUIRE(iteration.ok());
    REQUIRE_OK((*iteration)->end());
  }
  CHECK((*lower)->info().spilled_bytes == 0);
  CHECK((*lower)->info().cls == sched::SessionClass::kGuaranteed);
  CHECK(all_are(reinterpret_cast<void*>(*block), 40 * kCoordinatedMiB, 0x33));
  CHECK(theirs->check().empty());
  CHECK(theirs->set_coordination(std::nullopt).code() == GPUSHARE_UNSUPPORTED);
}

TEST_CASE("a process whose session does not shrink has it paged out") {
  SharedService shared(
      [](daemon::ServiceOptions& options) { options.coordination = sched::CoordinatorOptions{}; });
  auto theirs = SharedService::open(), ours = SharedService::open();
  auto spare = shared_need("spare", sched::SessionClass::kOpportunistic, kCoordinatedMiB);
  spare.allow_spill = true;
  spare.least_bytes = 8 * kCoordinatedMiB;
  auto lower = theirs->open_session(spare);
  REQUIRE(lower.ok());
  const auto block = (*lower)->alloc(memory::Kind::kModel, 40 * kCoordinatedMiB, 0);
  REQUIRE(block.ok());
  std::memset(reinterpret_cast<void*>(*block), 0x44, 40 * kCoordinatedMiB);
  auto upper =
      ours->open_session(shared_need("upper", sched::SessionClass::kGuaranteed, 40 * kCoordinatedMiB));
  REQUIRE(upper.ok());
  REQUIRE_OK((*upper)->wait_admitted(kInTimeNs));
  CHECK((*lower)->info().state == executor::SessionState::kPagedOut);
  REQUIRE_OK((*upper)->close());
  const auto iteration =
      (*lower)->begin(kInTimeNs);  // outside of iterations nothing orders the copy and the look
  REQUIRE(iteration.ok());
  CHECK(all_are(reinterpret_cast<void*>(*block), 40 * kCoordinatedMiB, 0x44));
  REQUIRE_OK((*iteration)->end());
}
