// Capacity and quotas that change at run time, carried out at boundaries.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "sched/types.hpp"
#include "support/executor_fixture.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT
using executor::SessionState;

// All decisions have been carried out once check() returns.
executor::RuntimeInfo settled(executor::Runtime& runtime) {
  CHECK(runtime.check() == "");
  const auto info = runtime.info();
  REQUIRE(info.ok());
  CHECK(info->promised_bytes <= info->effective_capacity_bytes);
  return *info;
}

TEST_CASE("a lowered capacity pages out at boundaries, opportunistic first, and a raised one lets back in") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  CAPTURE(setup.device, static_cast<int>(setup.layout));
  const bool pages = setup.layout == memory::Layout::kVirtual;
  auto options = options_of(setup);
  options.capacity_bytes = 128 * kMiB;
  auto runtime = open_runtime(std::move(options));
  auto keeps = open_session(*runtime, need("keeps", 32 * kMiB, 8 * kMiB));
  auto wanted = need("spare", 32 * kMiB, 8 * kMiB);
  wanted.cls = sched::SessionClass::kOpportunistic;
  auto spare = open_session(*runtime, wanted);
  REQUIRE(keeps->alloc(memory::Kind::kModel, 32 * kMiB, 0).ok());
  REQUIRE(spare->alloc(memory::Kind::kModel, 32 * kMiB, 0).ok());
  auto iteration = spare->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(iteration.ok());
  CHECK(runtime->info()->effective_capacity_bytes == 128 * kMiB);

  REQUIRE(runtime->set_capacity(64 * kMiB).ok());
  executor::RuntimeInfo info = settled(*runtime);
  CHECK(info.capacity_bytes == 64 * kMiB);
  CHECK(info.effective_capacity_bytes > 64 * kMiB);  // the iteration keeps what it has
  CHECK(spare->info().state == SessionState::kResident);
  CHECK((*iteration)->alloc(4 * kMiB, 0).ok());
  CHECK(keeps->alloc(memory::Kind::kModel, 40 * kMiB, 0).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  auto late = open_session(*runtime, need("late", 16 * kMiB, 0));
  CHECK(late->info().state == SessionState::kQueued);
  CHECK(runtime->open_session(need("large", 65 * kMiB, 0)).status().code() == GPUSHARE_EXCEEDS_CAPACITY);
  REQUIRE((*iteration)->end().ok());
  REQUIRE(runtime->synchronize(GPUSHARE_NO_TIMEOUT).ok());
  info = settled(*runtime);
  if (pages) {
    CHECK(spare->info().state == SessionState::kPagedOut);
    CHECK(keeps->info().state == SessionState::kResident);
    CHECK(info.effective_capacity_bytes == 64 * kMiB);
    CHECK(late->info().state == SessionState::kResident);
    CHECK(spare->begin(0).status().code() == GPUSHARE_TIMED_OUT);
  } else {
    CHECK(info.effective_capacity_bytes > 64 * kMiB);
    REQUIRE(spare->close().ok());
    CHECK(settled(*runtime).effective_capacity_bytes == 64 * kMiB);
    CHECK(late->info().state == SessionState::kResident);
  }

  // A call that waits is woken when room appears.
  std::atomic<bool> began{false};
  std::thread waits;
  if (pages)
    waits = std::thread([&] {
      const auto late_begin = spare->begin(GPUSHARE_NO_TIMEOUT);
      began = late_begin.ok() && (*late_begin)->end().ok();
    });
  CHECK(runtime->set_capacity(129 * kMiB).code() == GPUSHARE_EXCEEDS_CAPACITY);
  REQUIRE(runtime->set_capacity(0).ok());
  CHECK(runtime->info()->capacity_bytes == 128 * kMiB);
  if (pages) {
    waits.join();
    CHECK(began);
  }
  CHECK(keeps->alloc(memory::Kind::kModel, 40 * kMiB, 0).ok());
  REQUIRE(runtime->close().ok());
  CHECK(runtime->set_capacity(0).code() == GPUSHARE_INVALID_STATE);
}

TEST_CASE("what is not promised goes back to the device") {
  auto options = options_of(kSetups[0]);
  options.capacity_bytes = 192 * kMiB;
  auto runtime = open_runtime(std::move(options));
  auto session = open_session(*runtime, need("s", 100 * kMiB, 0));
  REQUIRE(session->alloc(memory::Kind::kModel, 100 * kMiB, 0).ok());
  REQUIRE(runtime->set_capacity(64 * kMiB).ok());
  settled(*runtime);
  CHECK(session->info().state == SessionState::kPagedOut);
  const auto taken = runtime->device().alloc((256 - 66) * kMiB);  // by others, as it were
  INFO(taken.status().to_string());
  REQUIRE(taken.ok());
  CHECK(runtime->device().free(*taken).ok());
}

TEST_CASE("a lowered quota is a target: live blocks stay, and promises fall at boundaries") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  CAPTURE(setup.device, static_cast<int>(setup.layout));
  auto runtime = open_runtime(options_of(setup));
  auto session = open_session(*runtime, need("q", 32 * kMiB, 32 * kMiB));
  CHECK(session->info().quota_bytes == 0);
  const auto first = session->alloc(memory::Kind::kModel, 8 * kMiB, 0);
  const auto second = session->alloc(memory::Kind::kModel, 8 * kMiB, 0);
  REQUIRE(first.ok());
  REQUIRE(second.ok());
  auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(iteration.ok());
  REQUIRE((*iteration)->alloc(24 * kMiB, 0).ok());
  REQUIRE(session->set_quota(16 * kMiB).ok());
  executor::SessionInfo info = session->info();
  CHECK(info.quota_bytes == 16 * kMiB);
  CHECK(info.effective_quota_bytes == 64 * kMiB);  // in the middle of an iteration nothing is taken
  CHECK((*iteration)->alloc(kMiB, 0).status().code() == GPUSHARE_QUOTA_EXCEEDED);
  CHECK(session->alloc(memory::Kind::kModel, kMiB, 0).status().code() == GPUSHARE_QUOTA_EXCEEDED);
  REQUIRE((*iteration)->end().ok());
  info = session->info();
  const uint64_t most = sched::quota_in_granules(16 * kMiB, 2 * kMiB);
  CHECK(info.promised_persistent_bytes == 16 * kMiB);
  CHECK(info.promised_ephemeral_bytes <= most - 16 * kMiB);
  CHECK(info.effective_quota_bytes == 16 * kMiB);
  CHECK(settled(*runtime).promised_bytes <= most);
  // Blocks that it frees make room for iterations within the quota.
  REQUIRE(session->free(*second).ok());
  for (int i = 0; i < 2; ++i) {
    iteration = session->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(iteration.ok());
    if (i == 1) CHECK((*iteration)->alloc(6 * kMiB, 0).ok());
    REQUIRE((*iteration)->end().ok());
  }
  CHECK(settled(*runtime).promised_bytes <= most);
  REQUIRE(session->set_quota(0).ok());
  CHECK(session->alloc(memory::Kind::kModel, 64 * kMiB, 0).ok());
  CHECK(session->info().effective_quota_bytes == 0);
  REQUIRE(session->close().ok());
  CHECK(session->set_quota(1).code() == GPUSHARE_INVALID_STATE);
}

TEST_CASE("a quota holds while a session's need is measured, and for one that waits") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  CAPTURE(setup.device, static_cast<int>(setup.layout));
  auto options = options_of(setup);
  options.capacity_bytes = 128 * kMiB;
  auto runtime = open_runtime(std::move(options));
  auto wanted = need("measured", 0, 0);
  wanted.quota_bytes = 20 * kMiB;
  auto session = open_session(*runtime, wanted);
  for (int i = 0; i < 3; ++i) {
    auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(iteration.ok());
    CHECK((*iteration)->alloc(16 * kMiB, 0).ok());
    const executor::SessionInfo info = session->info();
    CHECK(info.promised_persistent_bytes + info.promised_ephemeral_bytes <=
          sched::quota_in_granules(20 * kMiB, 2 * kMiB));
    CHECK((*iteration)->alloc(8 * kMiB, 0).status().code() == GPUSHARE_QUOTA_EXCEEDED);
    REQUIRE((*iteration)->end().ok());
  }
  auto holds = open_session(*runtime, need("holds", 90 * kMiB, 0));
  auto waits = open_session(*runtime, need("waits", 40 * kMiB, 8 * kMiB));
  CHECK(waits->info().state == SessionState::kQueued);
  REQUIRE(waits->set_quota(24 * kMiB).ok());
  CHECK(waits->info().promised_persistent_bytes <= sched::quota_in_granules(24 * kMiB, 2 * kMiB));
  REQUIRE(holds->close().ok());
  REQUIRE(waits->wait_admitted(GPUSHARE_NO_TIMEOUT).ok());
  CHECK(waits->alloc(memory::Kind::kModel, 24 * kMiB, 0).ok());
  CHECK(waits->alloc(memory::Kind::kModel, kMiB, 0).status().code() == GPUSHARE_QUOTA_EXCEEDED);
  settled(*runtime);
}

TEST_CASE("a small session of a large device is promised steps of 2 MiB") {
  auto runtime = open_runtime(options_of({"host?total_gib=141", memory::Layout::kVirtual}));
  auto session = open_session(*runtime, need("small", kMiB, kMiB));
  CHECK(settled(*runtime).promised_bytes == 2 * kMiB + 64 * kMiB);  // its lane has a whole granule
  for (uint64_t i = 1; i <= 4; ++i) {
    REQUIRE(session->alloc(memory::Kind::kModel, 2 * kMiB, 0).ok());
    CHECK(session->info().promised_persistent_bytes <= 2 * i * kMiB);
    CHECK(settled(*runtime).promised_bytes == 2 * i * kMiB + 64 * kMiB);
  }
  REQUIRE(session->close().ok());
  CHECK(settled(*runtime).promised_bytes == 0);
}

TEST_CASE("a quota holds where P has smaller steps than lanes have") {
  constexpr uint64_t kGranule = 64 * kMiB, kQuota = 10 * kMiB;
  auto runtime = open_runtime(options_of({"host?total_bytes=536870912", memory::Layout::kVirtual, kGranule}));
  const uint64_t most = sched::quota_in_granules(kQuota, kGranule);
  // The model grows inside the iteration that is measured, and before it.
  for (const bool before : {false, true}) {
    CAPTURE(before);
    auto wanted = need("measured", 0, 0);
    wanted.quota_bytes = kQuota;
    auto session = open_session(*runtime, wanted);
    if (before) REQUIRE(session->alloc(memory::Kind::kModel, 2 * kMiB, 0).ok());
    for (int i = 0; i < 3; ++i) {
      auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
      REQUIRE(iteration.ok());
      REQUIRE((*iteration)->alloc(4 * kMiB, 0).ok());
      if (!before && i == 0) REQUIRE(session->alloc(memory::Kind::kModel, 2 * kMiB, 0).ok());
      REQUIRE((*iteration)->end().ok());
    }
    REQUIRE(session->alloc(memory::Kind::kModel, 3 * kMiB, 0).ok());
    const auto info = session->info();
    CHECK(info.promised_ephemeral_bytes > 0);
    CHECK(settled(*runtime).promised_bytes <= most);
    // A lower quota is kept to, in the scheduler's books too.
    REQUIRE(session->set_quota(6 * kMiB).ok());
    auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(iteration.ok());
    REQUIRE((*iteration)->end().ok());
    CHECK(settled(*runtime).promised_bytes <= sched::quota_in_granules(6 * kMiB, kGranule));
    REQUIRE(session->close().ok());
  }
}

TEST_CASE("small sessions fill a device that has few granules, and grow by what another gives back") {
  constexpr uint64_t kGranule = 64 * kMiB;
  auto options = options_of({"host?total_bytes=268435456", memory::Layout::kVirtual, kGranule});
  options.capacity_bytes = 2 * kGranule;
  auto runtime = open_runtime(std::move(options));
  std::vector<std::shared_ptr<executor::Session>> sessions;
  for (int i = 0; i < 64; ++i) {
    auto small = need("small", kMiB, 0);
    if (i > 0) small.cls = sched::SessionClass::kOpportunistic;
    sessions.push_back(open_session(*runtime, small));
  }
  for (const auto& session : sessions) CHECK(session->info().state == SessionState::kResident);
  CHECK(settled(*runtime).promised_bytes == 2 * kGranule);
  const auto block = sessions[0]->alloc(memory::Kind::kModel, 2 * kMiB, 0);
  REQUIRE(block.ok());
  // Of the idle sessions one goes out, not as many as a whole granule holds.
  REQUIRE(sessions[0]->alloc(memory::Kind::kModel, 2 * kMiB, 0).ok());
  size_t out = 0;
  for (const auto& session : sessions) out += session->info().state == SessionState::kResident ? 0 : 1;
  CHECK(out == 1);
  settled(*runtime);
}

}  // namespace
