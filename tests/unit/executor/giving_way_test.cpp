// A guaranteed session gets bytes from opportunistic ones, of each kind that they may hold.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "executor/range.hpp"
#include "support/bytes.hpp"
#include "support/executor_fixture.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"
#include "support/status_checks.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT

constexpr Setup kDevice = {"host?total_bytes=134217728", memory::Layout::kVirtual};
// Of a commit that gets its bytes.
constexpr uint64_t kCommitNs = 600'000'000'000;

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
  CHECK(holder->info().spilled_bytes == kKept - below);
  CHECK(holder->info().persistent_bytes == 0);
  CHECK(holder->info().promoted_bytes == kKept - below);
  CHECK(runtime->check().empty());
  CHECK(all_are(reinterpret_cast<void*>(theirs), kKept - below, 0x31));
  CHECK(all_are(reinterpret_cast<void*>(ours), 118 * kMiB, 0x32));
  REQUIRE_OK(guaranteed->close());
  REQUIRE_OK(begun(*holder)->end());
  CHECK_FALSE(runtime->find(theirs)->spilled);
  CHECK(holder->info().spilled_bytes == 0);
  CHECK(holder->info().persistent_bytes == kKept - below);
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

std::shared_ptr<executor::Range> range_of(executor::Session& session, uint64_t bytes,
                                          executor::GiveBackFunction give_back, uint64_t answer_ns = 0,
                                          uint64_t timeout_ns = 0) {
  executor::RangeOptions options;
  options.reserved_bytes = bytes;
  options.give_back = std::move(give_back);
  options.answer_ns = answer_ns;
  auto opened = session.open_range(std::move(options));
  INFO(opened.status().to_string());
  REQUIRE(opened.ok());
  REQUIRE_OK((*opened)->commit(0, bytes, timeout_ns));
  return *opened;
}

// The owner knows what it needs least, so nothing is copied.
TEST_CASE("an allocation of a guaranteed session asks the ranges of opportunistic ones before it pages out") {
  auto runtime = open_runtime(options_of(kDevice));
  auto holder = open_session(*runtime, lower(4 * kMiB, 2 * kMiB, false));
  auto guaranteed = open_session(*runtime, need("higher", 2 * kMiB, 2 * kMiB));
  auto equal = open_session(*runtime, need("equal", 2 * kMiB, 2 * kMiB));
  std::shared_ptr<executor::Range> range;
  uint64_t asked_bytes = 0, has = 80 * kMiB, gives = 0;
  std::atomic<int> calls{0}, equals_calls{0};
  const auto give = [&](uint64_t bytes, uint64_t) {
    ++calls;
    asked_bytes = bytes;
    const uint64_t part = std::min(bytes, gives);
    has -= part;
    if (part > 0) CHECK_OK(range->decommit(has, part));
    return part;
  };
  range = range_of(*holder, 80 * kMiB, give);
  const auto not_asked = range_of(*equal, 10 * kMiB, [&](uint64_t, uint64_t) -> uint64_t {
    ++equals_calls;
    return 0;
  });
  const bool within = GENERATE(false, true);  // an iteration
  std::shared_ptr<executor::Iteration> iteration;
  if (within) iteration = begun(*guaranteed);
  const auto alloc = [&](uint64_t bytes) {
    return within ? iteration->alloc(bytes, 0) : guaranteed->alloc(memory::Kind::kModel, bytes, 0);
  };
  SECTION("it gives all that is missing") {
    gives = UINT64_MAX;
    (void)filled(alloc(60 * kMiB), 60 * kMiB, 0x61);
    CHECK(calls == 1);
    CHECK(asked_bytes >= 30 * kMiB);
    CHECK(asked_bytes <= 50 * kMiB);
    CHECK(range->info().committed_bytes == has);
    CHECK(runtime->info()->paged_out_bytes_total == 0);
    CHECK(holder->info().state == executor::SessionState::kResident);
  }
  SECTION("it gives a part: the session is paged out") {
    gives = 4 * kMiB;
    (void)filled(alloc(60 * kMiB), 60 * kMiB, 0x61);
    CHECK(calls == 1);
    CHECK(holder->info().state == executor::SessionState::kPagedOut);
  }
  CHECK(equals_calls == 0);
  CHECK(runtime->check().empty());
  if (iteration != nullptr) REQUIRE_OK(iteration->end());
  CHECK(runtime->close().ok());
}

// The holder has a block that may lie on the host, and a range whose owner gives what it is asked for. Beside it stands a session
// that nobody uses.
struct BesideSpare {
  explicit BesideSpare(const Setup& setup) : runtime(open_runtime(options_of(setup))) {
    holder = open_session(*runtime, lower(2 * kMiB, 2 * kMiB, true));
    REQUIRE_OK(begun(*holder)->end());
    REQUIRE(holder->alloc(memory::Kind::kModel, 20 * kMiB, 0).ok());
    range = range_of(
        *holder, 10 * kMiB,
        [this](uint64_t bytes, uint64_t) -> uint64_t {
          asked_bytes = bytes;
          const uint64_t gives = std::min<uint64_t>(bytes, range_gives);
          if (gives > 0 && !range->decommit(10 * kMiB - gives, gives).ok()) return 0;
          return gives;
        },
        kCommitNs);
    spare = open_session(*runtime, need("spare", kSpare - 2 * kMiB, 2 * kMiB));
    REQUIRE_OK(begun(*spare)->end());
    REQUIRE_OK(spare->set_spare(1.0));
  }
  uint64_t free() const {
    const auto info = runtime->info();
    return info->capacity_bytes - info->promised_bytes;
  }
  void check_untouched(const executor::Session& asker) const {
    CHECK(spare->dropped());
    CHECK(asked_bytes == 0);
    CHECK(holder->info().spilled_bytes == 0);
    CHECK(asker.info().spilled_bytes == 0);
    CHECK(runtime->info()->paged_out_bytes_total == 0);
    CHECK(runtime->check().empty());
  }
  static constexpr uint64_t kSpare = 40 * kMiB;
  std::shared_ptr<executor::Runtime> runtime;
  std::shared_ptr<executor::Session> holder, spare;
  std::shared_ptr<executor::Range> range;
  std::atomic<uint64_t> asked_bytes{0}, range_gives{0};
};

// Bytes that somebody uses are neither copied nor asked for while bytes that nobody uses are enough.
TEST_CASE("a spare session goes before a block is copied out or a range is asked") {
  constexpr Setup kSim = {"sim?total_bytes=134217728", memory::Layout::kVirtual};
  BesideSpare beside(GENERATE(false, true) ? kSim : kDevice);
  SECTION("for an allocation, whatever the asker may do") {
    auto options = need("asker", 2 * kMiB, 2 * kMiB);
    options.allow_spill = GENERATE(false, true);
    options.cls = GENERATE(sched::SessionClass::kGuaranteed, sched::SessionClass::kOpportunistic);
    auto asker = open_session(*beside.runtime, options);
    const auto iteration = GENERATE(false, true) ? begun(*asker) : nullptr;
    const uint64_t bytes = beside.free() + 20 * kMiB;
    const auto block =
        iteration != nullptr ? iteration->alloc(bytes, 0) : asker->alloc(memory::Kind::kModel, bytes, 0);
    INFO(block.status().to_string());
    REQUIRE(block.ok());
    beside.check_untouched(*asker);
    if (iteration != nullptr) REQUIRE_OK(iteration->end());
  }
  SECTION("for a commit") {
    auto asker = open_session(*beside.runtime, need("asker", 2 * kMiB, 2 * kMiB));
    const uint64_t bytes = (beside.free() + 20 * kMiB) / (2 * kMiB) * (2 * kMiB);
    (void)range_of(*asker, bytes, nullptr, 0, kCommitNs);
    beside.check_untouched(*asker);
  }
  CHECK(beside.runtime->close().ok());
}

TEST_CASE("where a spare session is not enough it goes, and ranges and blocks give the rest") {
  BesideSpare beside(kDevice);
  beside.range_gives = 10 * kMiB;
  auto asker = open_session(*beside.runtime, need("asker", 2 * kMiB, 2 * kMiB));
  const bool commits = GENERATE(false, true);
  const uint64_t free = beside.free() / (2 * kMiB) * (2 * kMiB);
  const auto takes = [&](uint64_t bytes) {
    if (commits)
      (void)range_of(*asker, bytes, nullptr, 0, kCommitNs);
    else
      REQUIRE(asker->alloc(memory::Kind::kModel, bytes, 0).ok());
  };
  SECTION("a range") {
    takes(free + BesideSpare::kSpare + 4 * kMiB);
    CHECK(beside.asked_bytes > 0);
    CHECK(beside.holder->info().spilled_bytes == 0);
  }
  SECTION("a range and a block") {
    takes(free + BesideSpare::kSpare + 18 * kMiB);
    CHECK(beside.range->info().committed_bytes == 0);
    CHECK(beside.holder->info().spilled_bytes > 0);
  }
  CHECK(beside.spare->dropped());
  CHECK(beside.holder->info().state == executor::SessionState::kResident);
  CHECK(beside.runtime->info()->paged_out_bytes_total == 0);
  CHECK(beside.runtime->check().empty());
  CHECK(beside.runtime->close().ok());
}

// It would have gone for nothing.
TEST_CASE("a spare session stays where another one has to go whole and gives enough") {
  auto runtime = open_runtime(options_of(kDevice));
  auto holder = open_session(*runtime, lower(60 * kMiB, 2 * kMiB, false));
  auto spare = open_session(*runtime, need("spare", 10 * kMiB, 2 * kMiB));
  REQUIRE_OK(spare->set_spare(1.0));
  auto asker = open_session(*runtime, need("asker", 2 * kMiB, 2 * kMiB));
  const auto info = runtime->info();
  REQUIRE(
      asker->alloc(memory::Kind::kModel, info->capacity_bytes - info->promised_bytes + 30 * kMiB, 0).ok());
  CHECK(holder->info().state == executor::SessionState::kPagedOut);
  CHECK_FALSE(spare->dropped());
  CHECK(runtime->check().empty());
  CHECK(runtime->close().ok());
}

TEST_CASE("an owner that does not answer an allocation has its session paged out at the deadline") {
  auto runtime = open_runtime(options_of(kDevice));
  auto holder = open_session(*runtime, lower(4 * kMiB, 2 * kMiB, false));
  auto guaranteed = open_session(*runtime, need("higher", 2 * kMiB, 2 * kMiB));
  std::atomic<bool> over{false};
  const auto range = range_of(
      *holder, 100 * kMiB,
      [&](uint64_t, uint64_t) -> uint64_t {
        while (!over) std::this_thread::yield();
        return 0;
      },
      1'000'000);
  (void)filled(guaranteed->alloc(memory::Kind::kModel, 60 * kMiB, 0), 60 * kMiB, 0x71);
  CHECK(range->info().silences == 1);
  CHECK(holder->info().state == executor::SessionState::kPagedOut);
  over = true;
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

// ---- how long it takes

// A byte takes 1 ns to copy, and nothing else takes time.
constexpr Setup kSlowLink = {"sim?total_bytes=134217728&copy_gbps=1&copy_latency_ns=0",
                             memory::Layout::kVirtual};

// Each byte that is copied is given back, since all blocks fill their granules. No part begins once there is enough: who waits
// in an allocation carries out the parts itself, and the scheduler admits between two parts. So the last part alone may
// copy more than is missing. Another part may be under way when a wait begins, which none is here.
uint64_t longest_ns(uint64_t missing_bytes, uint64_t part_bytes) {
  return missing_bytes + part_bytes;
}

TEST_CASE("no guaranteed session waits longer than the bound for an opportunistic one's copy") {
  const uint64_t from = seed();
  CAPTURE(from);
  Random random(from);
  for (int round = 0; round < rounds(40); ++round) {
    CAPTURE(round);
    const uint64_t part = uniform(random, 1, 4) * 2 * kMiB;
    auto options = options_of(kSlowLink, uniform(random, 0, 1) == 0 ? "fair" : "priority");
    options.spill_move_bytes = part;
    options.spill_move_ns = 1'000'000'000;
    auto runtime = open_runtime(std::move(options));
    auto guaranteed = open_session(*runtime, need("higher", 2 * kMiB, 2 * kMiB, 1));
    std::vector<std::shared_ptr<executor::Session>> holders;
    std::vector<std::shared_ptr<executor::Range>> ranges;
    uint64_t left = 116 * kMiB;
    for (uint64_t i = uniform(random, 1, 3); i > 0; --i) {
      const uint64_t bytes = i == 1 ? left : uniform(random, 1, left / 2 / (2 * kMiB)) * 2 * kMiB;
      holders.push_back(open_session(*runtime, lower(0, 2 * kMiB, uniform(random, 0, 3) == 0)));
      if (uniform(random, 0, 3) == 0)
        ranges.push_back(range_of(*holders.back(), bytes, nullptr));
      else
        REQUIRE(holders.back()->alloc(memory::Kind::kModel, bytes, 0).ok());
      left -= bytes;
    }
    const auto info = runtime->info();
    const uint64_t free = info->capacity_bytes - info->promised_bytes;
    if (uniform(random, 0, 1) == 0) {
      const uint64_t bytes = uniform(random, 1, 50) * 2 * kMiB;
      CAPTURE(bytes, free, part);
      const auto block = guaranteed->alloc(memory::Kind::kModel, bytes, 0);
      INFO(block.status().to_string());
      REQUIRE(block.ok());
      // The clock may have gone on: the page-out does, as soon as the session has its bytes.
      CHECK(guaranteed->info().room_waited_ns <= longest_ns(bytes - std::min(bytes, free), part));
    } else {
      // It is admitted. Policies that share by turns let it wait for its turn instead.
      const uint64_t bytes = uniform(random, 1, 50) * 2 * kMiB;
      CAPTURE(bytes, free, part);
      auto newcomer = open_session(*runtime, need("newcomer", bytes, 2 * kMiB, 1));
      if (newcomer->wait_admitted(runtime->info()->policy == "priority" ? GPUSHARE_NO_TIMEOUT : 0).ok()) {
        const uint64_t needs = bytes + 2 * kMiB;
        CHECK(newcomer->info().queued_ns <= longest_ns(needs - std::min(needs, free), part));
      }
      REQUIRE_OK(newcomer->close());
    }
    CHECK(runtime->check() == "");
    ranges.clear();
    REQUIRE_OK(runtime->close());
  }
}

// The newcomer arrives while the holder is on its way in, at any point, or just in.
TEST_CASE(
    "a guaranteed session that waits for admission does not wait for the page-in of an opportunistic one") {
  constexpr uint64_t kPart = 2 * kMiB, kBytes = 100 * kMiB, kNeeds = 30 * kMiB;
  auto options = options_of(kSlowLink, "priority");
  options.spill_move_bytes = kPart;
  options.spill_move_ns = 1'000'000'000;
  auto runtime = open_runtime(std::move(options));
  auto holder = open_session(*runtime, lower(0, 2 * kMiB, false));
  REQUIRE(holder->alloc(memory::Kind::kModel, kBytes, 0).ok());
  for (uint64_t round = 1; round <= 10; ++round) {
    auto first = open_session(*runtime, need("first", 50 * kMiB, 2 * kMiB, 1));
    REQUIRE_OK(first->wait_admitted(GPUSHARE_NO_TIMEOUT));
    while (runtime->info()->paged_out_bytes_total < round * kBytes) std::this_thread::yield();
    REQUIRE_OK(first->close());
    auto newcomer = open_session(*runtime, need("newcomer", kNeeds - 2 * kMiB, 2 * kMiB, 1));
    REQUIRE_OK(newcomer->wait_admitted(GPUSHARE_NO_TIMEOUT));
    // Two parts may be under way: of the page-in, and, had it just ended, of the page-out.
    CHECK(newcomer->info().queued_ns <= longest_ns(kNeeds, 2 * kPart));
    CHECK(runtime->check() == "");
    REQUIRE_OK(newcomer->close());
    REQUIRE_OK(holder->wait_admitted(GPUSHARE_NO_TIMEOUT));
  }
  CHECK(runtime->close().ok());
}

// A byte takes 1 ns to copy within the device as well, as kept blocks do.
constexpr Setup kSlow = {"sim?total_bytes=64MiB&copy_gbps=1&copy_latency_ns=0&memory_gbps=2",
                         memory::Layout::kVirtual};
constexpr uint64_t kSlowPart = 2 * kMiB, kSlowKept = 10 * kMiB, kSlowBlocks = 40 * kMiB;

struct Keeper {
  Keeper() {
    auto options = options_of(kSlow, "priority");
    options.spill_move_bytes = kSlowPart;
    options.spill_move_ns = 1'000'000'000;
    runtime = open_runtime(std::move(options));
    session = open_session(*runtime, lower(kSlowKept + kSlowBlocks, kSlowKept, false));
    const auto iteration = begun(*session);
    const auto kept = iteration->alloc(kSlowKept, 0);
    REQUIRE(kept.ok());
    REQUIRE_OK(iteration->keep(*kept));
    REQUIRE_OK(iteration->end());
    REQUIRE(session->alloc(memory::Kind::kModel, kSlowBlocks, 0).ok());
  }
  std::shared_ptr<executor::Runtime> runtime;
  std::shared_ptr<executor::Session> session;
};

// Kept blocks go last, a part at a time. Who needs no more than the session's other bytes does not wait for them; who needs
// more waits for their copies, and no longer.
TEST_CASE(
    "a guaranteed session waits for the kept blocks of an opportunistic one only if it needs their bytes") {
  Keeper keeper;
  executor::Runtime& runtime = *keeper.runtime;
  const uint64_t more = GENERATE(0, kSlowKept);
  auto guaranteed = open_session(runtime, need("higher", 2 * kMiB, 2 * kMiB, 1));
  const auto info = runtime.info();
  const uint64_t free = info->capacity_bytes - info->promised_bytes;
  const auto block = guaranteed->alloc(memory::Kind::kModel, free + kSlowBlocks + more, 0);
  INFO(block.status().to_string());
  REQUIRE(block.ok());
  CHECK(guaranteed->info().room_waited_ns <= longest_ns(kSlowBlocks + more, kSlowPart));
  CHECK(runtime.check() == "");
  REQUIRE_OK(guaranteed->close());
  REQUIRE_OK(keeper.session->wait_admitted(GPUSHARE_NO_TIMEOUT));
  CHECK(keeper.session->info().spilled_bytes == 0);
  CHECK(runtime.check() == "");
  CHECK(runtime.close().ok());
}

// The newcomer arrives at any point of the holder's way in. If only kept blocks are missing, that ends at once.
TEST_CASE("a guaranteed session does not wait for kept blocks of an opportunistic one to come home") {
  constexpr uint64_t kNeeds = 26 * kMiB;
  Keeper keeper;
  executor::Runtime& runtime = *keeper.runtime;
  for (uint64_t round = 1; round <= 16; ++round) {
    CAPTURE(round);
    auto first = open_session(runtime, need("first", 50 * kMiB, 2 * kMiB, 1));
    REQUIRE_OK(first->wait_admitted(GPUSHARE_NO_TIMEOUT));
    while (keeper.session->info().state != executor::SessionState::kPagedOut ||
           keeper.session->info().spilled_bytes < kSlowKept)
      std::this_thread::yield();
    REQUIRE_OK(first->close());
    // Half of the rounds wait until kept blocks come home.
    while (round % 2 == 0 && keeper.session->info().spilled_bytes == kSlowKept) std::this_thread::yield();
    auto newcomer = open_session(runtime, need("newcomer", kNeeds - 2 * kMiB, 2 * kMiB, 1));
    REQUIRE_OK(newcomer->wait_admitted(GPUSHARE_NO_TIMEOUT));
    CHECK(newcomer->info().queued_ns <= longest_ns(kNeeds, 2 * kSlowPart));
    CHECK(runtime.check() == "");
    REQUIRE_OK(newcomer->close());
    REQUIRE_OK(keeper.session->wait_admitted(GPUSHARE_NO_TIMEOUT));
    CHECK(keeper.session->info().spilled_bytes == 0);
    CHECK(runtime.check() == "");
  }
  CHECK(runtime.close().ok());
}

TEST_CASE("an allocation of a guaranteed session does not wait for the page-in of an opportunistic one") {
  auto options = options_of(kDevice, "priority");
  options.spill_move_bytes = 2 * kMiB;
  auto runtime = open_runtime(std::move(options));
  auto holder = open_session(*runtime, lower(2 * kMiB, 2 * kMiB, false));
  constexpr uint64_t kBytes = 100 * kMiB;
  const memory::Address theirs = filled(holder->alloc(memory::Kind::kModel, kBytes, 0), kBytes, 0x81);
  for (int round = 0; round < rounds(10); ++round) {
    auto guaranteed = open_session(*runtime, need("higher", 2 * kMiB, 2 * kMiB, 1));
    const memory::Address ours =
        filled(guaranteed->alloc(memory::Kind::kModel, 60 * kMiB, 0), 60 * kMiB, 0x82);
    CHECK(runtime->check() == "");
    REQUIRE_OK(guaranteed->free(ours));
    REQUIRE_OK(guaranteed->close());
    guaranteed = open_session(*runtime, need("higher", 2 * kMiB, 2 * kMiB, 1));
    // The holder is on its way in.
    std::this_thread::sleep_for(std::chrono::milliseconds(round));
    (void)filled(guaranteed->alloc(memory::Kind::kModel, 110 * kMiB, 0), 110 * kMiB, 0x83);
    CHECK(runtime->check() == "");
    REQUIRE_OK(guaranteed->close());
    REQUIRE_OK(holder->wait_admitted(GPUSHARE_NO_TIMEOUT));
    CHECK(all_are(reinterpret_cast<void*>(theirs), kBytes, 0x81));
  }
  CHECK(runtime->close().ok());
}

// Making it anew takes longer than the copy.
TEST_CASE("a page-out for an allocation has the host memory of the one before") {
  auto runtime = open_runtime(options_of(kDevice));
  auto holder = open_session(*runtime, lower(2 * kMiB, 2 * kMiB, false));
  const memory::Address theirs = filled(holder->alloc(memory::Kind::kModel, 90 * kMiB, 0), 90 * kMiB, 0x91);
  for (const bool again : {false, true}) {
    if (again)
      REQUIRE_OK(runtime->device().set_fault(
          {sizeof(gpushare_backend_fault), GPUSHARE_FAULT_HOST_OUT_OF_MEMORY, 1, 1.0}));
    auto guaranteed = open_session(*runtime, need("higher", 2 * kMiB, 2 * kMiB));
    const auto block = guaranteed->alloc(memory::Kind::kModel, 60 * kMiB, 0);
    INFO(block.status().to_string());
    REQUIRE(block.ok());
    REQUIRE_OK(guaranteed->close());
    REQUIRE_OK(holder->wait_admitted(GPUSHARE_NO_TIMEOUT));
    CHECK(all_are(reinterpret_cast<void*>(theirs), 90 * kMiB, 0x91));
  }
  CHECK(runtime->close().ok());
}

// ---- whatever opportunistic sessions hold

// An opportunistic session with bytes of random kinds: blocks, kept blocks, spilled blocks, a range whose owner gives
// all, some, nothing, or does not answer. It may be a spare session, which ends for others.
struct Holder {
  struct Part {
    memory::Address address;
    uint64_t bytes;
    int value;
  };
  Holder(executor::Runtime& runtime, Random& random, bool with_bytes) : with_bytes_(with_bytes) {
    const auto mib = [&](uint64_t least, uint64_t most) { return uniform(random, least, most) * kMiB; };
    auto options = lower(mib(0, 12), mib(2, 24), uniform(random, 0, 1) == 0);
    options.quota_bytes = uniform(random, 0, 3) == 0 ? mib(36, 70) : 0;
    session = open_session(runtime, options);
    const auto begins = session->begin(0);
    if (!begins.ok()) {  // no room, or not now
      REQUIRE_OK(session->close());
      session.reset();
      return;
    }
    const auto iteration = *begins;
    for (uint64_t i = uniform(random, 0, 2); i > 0; --i) {
      const uint64_t bytes = uniform(random, 1, 8 * kMiB);
      const auto block = iteration->alloc(bytes, 0);
      if (block.ok() && uniform(random, 0, 1) == 0 && iteration->keep(*block).ok()) add(*block, bytes);
      kept += block.ok() ? 1 : 0;
    }
    REQUIRE_OK(iteration->end());
    for (uint64_t i = uniform(random, 0, 3); i > 0; --i) {
      const uint64_t bytes = uniform(random, 1, 24 * kMiB);
      const auto block = session->alloc(memory::Kind::kModel, bytes, 0);
      if (!block.ok()) continue;
      if (uniform(random, 0, 3) == 0)
        CHECK_OK(session->free(*block));  // cached
      else
        add(*block, bytes);
    }
    if (uniform(random, 0, 1) == 0) open_range(random, mib(1, 12) * 2);
    if (uniform(random, 0, 5) == 0) {
      REQUIRE_OK(session->set_spare(1.0));
      spare = true;
    }
  }
  ~Holder() {
    over = true;
    if (range != nullptr) (void)range->close();  // waits for its function, which uses this
  }
  void open_range(Random& random, uint64_t bytes) {
    executor::RangeOptions options;
    options.reserved_bytes = bytes;
    options.answer_ns = 2'000'000;
    const uint64_t how = uniform(random, 0, 4);
    if (how > 0)
      options.give_back = [this, how](uint64_t wanted, uint64_t) -> uint64_t {
        while (how == 4 && !over) std::this_thread::yield();
        const uint64_t gives = how == 1 ? wanted : how == 2 ? wanted / 2 / (2 * kMiB) * (2 * kMiB) : 0;
        if (gives > 0 && range->decommit(committed - gives, gives).ok()) committed -= gives;
        return gives;
      };
    auto opened = session->open_range(std::move(options));
    INFO(opened.status().to_string());
    REQUIRE(opened.ok());
    range = *opened;
    if (!range->commit(0, bytes, 0).ok()) return;
    committed = bytes;
    if (with_bytes_) std::memset(reinterpret_cast<void*>(range->info().address), 0x5a, bytes);
  }
  void add(memory::Address address, uint64_t bytes) {
    parts.push_back({address, bytes, static_cast<int>(1 + parts.size())});
    if (with_bytes_) std::memset(reinterpret_cast<void*>(address), parts.back().value, bytes);
  }
  bool intact() const {
    if (!with_bytes_) return true;
    return std::all_of(parts.begin(), parts.end(),
                       [](const Part& part) {
                         return all_are(reinterpret_cast<void*>(part.address), part.bytes, part.value);
                       }) &&
           (committed == 0 || all_are(reinterpret_cast<void*>(range->info().address), committed, 0x5a));
  }
  const bool with_bytes_;
  bool spare = false;
  uint64_t kept = 0;  // or was
  std::vector<Part> parts;
  std::atomic<uint64_t> committed{0};
  std::atomic<bool> over{false};
  std::shared_ptr<executor::Session> session;
  std::shared_ptr<executor::Range> range;
};

// Never: its out of memory while an opportunistic session has device bytes that it could give.
TEST_CASE("a guaranteed session gets all that opportunistic sessions hold, whatever it is") {
  const bool with_bytes = GENERATE(true, false);
  const uint64_t from = seed();
  CAPTURE(from, with_bytes);
  Random random(from);
  constexpr Setup kSim = {"sim?total_bytes=134217728", memory::Layout::kVirtual};
  for (int round = 0; round < rounds(with_bytes ? 12 : 60); ++round) {
    CAPTURE(round);
    const char* const policies[] = {"fair", "pack", "priority", "fifo"};
    auto options = options_of(with_bytes ? kDevice : kSim, policies[uniform(random, 0, 3)]);
    options.spill_move_bytes = uniform(random, 0, 1) == 0 ? 0 : 4 * kMiB;
    auto runtime = open_runtime(std::move(options));
    auto guaranteed = open_session(*runtime, need("higher", 2 * kMiB, 2 * kMiB));
    {
      std::vector<std::unique_ptr<Holder>> holders;
      for (uint64_t i = uniform(random, 1, 3); i > 0; --i)
        holders.push_back(std::make_unique<Holder>(*runtime, random, with_bytes));
      std::shared_ptr<executor::Iteration> iteration;
      if (uniform(random, 0, 1) == 0) iteration = begun(*guaranteed);
      // A kept block may have parts of two granules to itself in an open lane.
      uint64_t kept = 0;
      for (const auto& each : holders) kept += each->kept;
      const auto info = guaranteed->info();
      const uint64_t most = runtime->info()->capacity_bytes - info.promised_persistent_bytes -
                            info.promised_ephemeral_bytes - kept * 4 * kMiB;
      const uint64_t bytes = uniform(random, 0, 2) == 0 ? most : uniform(random, 1, most);
      CAPTURE(bytes, most);
      const auto block = guaranteed->alloc(memory::Kind::kModel, bytes, 0);
      INFO(block.status().to_string());
      REQUIRE(block.ok());
      if (with_bytes) std::memset(reinterpret_cast<void*>(*block), 0x7f, bytes);
      CHECK(runtime->check() == "");
      if (iteration != nullptr) REQUIRE_OK(iteration->end());
      REQUIRE_OK(guaranteed->close());
      for (const auto& each : holders) {
        if (each->session == nullptr || each->spare) continue;
        REQUIRE_OK(each->session->wait_admitted(GPUSHARE_NO_TIMEOUT));
        CHECK(each->intact());
      }
      CHECK(runtime->check() == "");
    }
    REQUIRE_OK(runtime->close());
  }
}

}  // namespace
