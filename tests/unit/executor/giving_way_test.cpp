// What a guaranteed session gets from opportunistic ones, for each kind of byte that they may hold.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "support/bytes.hpp"
#include "support/executor_fixture.hpp"
#include "support/status_checks.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT

constexpr Setup kDevice = {"host?total_bytes=134217728", memory::Layout::kVirtual};

executor::SessionOptions lower(uint64_t persistent_bytes, uint64_t ephemeral_bytes, bool may_spill) {
  auto options = need("lower", persistent_bytes, ephemeral_bytes);
  options.cls = sched::SessionClass::kOpportunistic;
  options.allow_spill = may_spill;
  return options;
}

std::shared_ptr<executor::Iteration> begun(executor::Session& session) {
  auto iteration = session.begin(GPUSHARE_NO_TIMEOUT);
  INFO(iteration.status().to_string());
  REQUIRE(iteration.ok());
  return *iteration;
}

memory::Address filled(const base::Result<memory::Address>& block, uint64_t bytes, int value) {
  INFO(block.status().to_string());
  REQUIRE(block.ok());
  std::memset(reinterpret_cast<void*>(*block), value, bytes);
  return *block;
}

// One block alone, or one above what its iteration gave back: the lane has to hold the bytes below it.
TEST_CASE("a guaranteed session gets the memory of blocks that an opportunistic one kept") {
  const uint64_t below = GENERATE(0, 33 * kMiB);
  auto runtime = open_runtime(options_of(kDevice));
  auto holder = open_session(*runtime, lower(50 * kMiB, 44 * kMiB, GENERATE(false, true)));
  constexpr uint64_t kKept = 40 * kMiB;
  memory::Address theirs = 0;
  {
    const auto iteration = begun(*holder);
    if (below > 0) filled(iteration->alloc(below, 0), below, 0x30);
    theirs = filled(iteration->alloc(kKept - below, 0), kKept - below, 0x31);
    REQUIRE_OK(iteration->keep(theirs));
    REQUIRE_OK(iteration->end());
  }
  auto guaranteed = open_session(*runtime, need("higher", 2 * kMiB, 2 * kMiB));
  REQUIRE_OK(begun(*guaranteed)->end());
  const memory::Address ours =
      filled(guaranteed->alloc(memory::Kind::kModel, 118 * kMiB, 0), 118 * kMiB, 0x32);
  CHECK(runtime->find(theirs)->spilled);
  CHECK(runtime->check().empty());
  CHECK(all_are(reinterpret_cast<void*>(theirs), kKept - below, 0x31));
  CHECK(all_are(reinterpret_cast<void*>(ours), 118 * kMiB, 0x32));
  REQUIRE_OK(guaranteed->close());
  REQUIRE_OK(begun(*holder)->end());
  CHECK_FALSE(runtime->find(theirs)->spilled);
  CHECK(all_are(reinterpret_cast<void*>(theirs), kKept - below, 0x31));
  CHECK(runtime->check().empty());
  REQUIRE_OK(holder->free(theirs));
  REQUIRE_OK(begun(*holder)->end());
  CHECK(runtime->check().empty());
  CHECK(runtime->close().ok());
}

// Whatever the opportunistic session holds, it gives way.
TEST_CASE("a guaranteed session gets the memory of blocks and ranges of an opportunistic one") {
  const bool may_spill = GENERATE(false, true), ranged = GENERATE(false, true);
  auto runtime = open_runtime(options_of(kDevice));
  auto holder = open_session(*runtime, lower(4 * kMiB, 2 * kMiB, may_spill));
  REQUIRE_OK(begun(*holder)->end());
  constexpr uint64_t kBytes = 100 * kMiB;
  std::shared_ptr<executor::Range> range;
  memory::Address theirs = 0;
  if (ranged) {
    executor::RangeOptions options;
    options.reserved_bytes = kBytes;
    auto opened = holder->open_range(options);
    REQUIRE(opened.ok());
    range = *opened;
    REQUIRE_OK(range->commit(0, kBytes, 0));
    theirs = range->info().address;
    std::memset(reinterpret_cast<void*>(theirs), 0x41, kBytes);
  } else {
    theirs = filled(holder->alloc(memory::Kind::kModel, kBytes, 0), kBytes, 0x41);
  }
  // Between iterations, or amid one that ends.
  const bool busy = GENERATE(false, true);
  auto guaranteed = open_session(*runtime, need("higher", 2 * kMiB, 2 * kMiB));
  std::atomic<bool> runs{false};
  base::Status ran;  // read after the thread's end
  std::thread iterates([&] {
    if (busy) {
      auto iteration = holder->begin(GPUSHARE_NO_TIMEOUT);
      runs = true;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ran = iteration.ok() ? (*iteration)->end() : iteration.status();
    }
  });
  while (busy && !runs) std::this_thread::yield();
  const auto block = guaranteed->alloc(memory::Kind::kModel, 110 * kMiB, 0);
  iterates.join();
  CHECK_OK(ran);
  const memory::Address ours = filled(block, 110 * kMiB, 0x42);
  CHECK(runtime->check().empty());
  CHECK(all_are(reinterpret_cast<void*>(ours), 110 * kMiB, 0x42));
  REQUIRE_OK(guaranteed->close());
  REQUIRE_OK(holder->wait_admitted(GPUSHARE_NO_TIMEOUT));
  CHECK(all_are(reinterpret_cast<void*>(theirs), kBytes, 0x41));
  range.reset();
  CHECK(runtime->check().empty());
  CHECK(runtime->close().ok());
}

// It has no boundaries, so its blocks go out without, in parts that the setting bounds, and no more than is asked for.
TEST_CASE("an idle opportunistic session that may spill gives what is asked for and stays") {
  auto options = options_of(kDevice, "pack");
  options.spill_move_bytes = 8 * kMiB;
  auto runtime = open_runtime(std::move(options));
  auto holder = open_session(*runtime, lower(2 * kMiB, 2 * kMiB, true));
  REQUIRE_OK(begun(*holder)->end());
  const memory::Address theirs = filled(holder->alloc(memory::Kind::kModel, 90 * kMiB, 0), 90 * kMiB, 0x51);
  auto guaranteed = open_session(*runtime, need("higher", 2 * kMiB, 2 * kMiB));
  const auto block = guaranteed->alloc(memory::Kind::kModel, 60 * kMiB, 0);
  const memory::Address ours = filled(block, 60 * kMiB, 0x52);
  CHECK(holder->info().state == executor::SessionState::kResident);
  CHECK(runtime->info()->paged_out_bytes_total == 0);
  CHECK(holder->info().spilled_bytes >= 30 * kMiB);
  CHECK(holder->info().spilled_bytes <= 44 * kMiB);
  CHECK(all_are(reinterpret_cast<void*>(theirs), 90 * kMiB, 0x51));
  CHECK(all_are(reinterpret_cast<void*>(ours), 60 * kMiB, 0x52));
  REQUIRE_OK(guaranteed->close());
  for (int i = 0; i < 60; ++i) REQUIRE_OK(begun(*holder)->end());
  CHECK(holder->info().spilled_bytes == 0);
  CHECK(all_are(reinterpret_cast<void*>(theirs), 90 * kMiB, 0x51));
  CHECK(runtime->check().empty());
  CHECK(runtime->close().ok());
}

}  // namespace
