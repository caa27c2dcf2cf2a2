// Sessions above their limits: blocks that spill, come home at boundaries, and go out again.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstring>
#include <thread>

#include "support/bytes.hpp"
#include "support/executor_fixture.hpp"
#include "support/status_checks.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT

constexpr Setup kHostDevice = {"host?total_bytes=134217728", memory::Layout::kVirtual};

constexpr auto kOpportunistic = sched::SessionClass::kOpportunistic;

executor::SessionOptions spiller(std::string name, uint64_t quota_bytes,
                                 sched::SessionClass cls = sched::SessionClass::kGuaranteed) {
  auto options = need(std::move(name), 2 * kMiB, 2 * kMiB);
  options.allow_spill = true;
  options.quota_bytes = quota_bytes;
  options.cls = cls;
  return options;
}

// For any thread; Catch's macros are for the main thread alone.
base::Status iterate_once(executor::Session& session) {
  GPUSHARE_ASSIGN_OR_RETURN(const auto iteration, session.begin(GPUSHARE_NO_TIMEOUT));
  return iteration->end();
}

void iterate(executor::Session& session, int times = 1) {
  for (int i = 0; i < times; ++i) REQUIRE_OK(iterate_once(session));
}

// A session that has run an iteration.
std::shared_ptr<executor::Session> started(executor::Runtime& runtime,
                                           const executor::SessionOptions& options) {
  auto session = open_session(runtime, options);
  iterate(*session);
  return session;
}

memory::Address filled_block(executor::Session& session, uint64_t bytes, int value) {
  const auto block = session.alloc(memory::Kind::kModel, bytes, 0);
  INFO(block.status().to_string());
  REQUIRE(block.ok());
  std::memset(reinterpret_cast<void*>(*block), value, bytes);
  return *block;
}

bool is_filled(memory::Address block, uint64_t bytes, int value) {
  return all_are(reinterpret_cast<void*>(block), bytes, value);
}

void close_sound(executor::Runtime& runtime) {
  CHECK(runtime.check().empty());
  CHECK(runtime.close().ok());
}

TEST_CASE("a burst above the quota spills, and comes home when the quota is raised") {
  auto runtime = open_runtime(options_of(kHostDevice));
  auto session = started(*runtime, spiller("s", 8 * kMiB));
  const memory::Address block = filled_block(*session, 40 * kMiB, 0x5A);
  CHECK(session->info().spilled_bytes == 40 * kMiB);
  iterate(*session, 20);
  CHECK(session->info().promised_persistent_bytes + session->info().promised_ephemeral_bytes <= 12 * kMiB);
  REQUIRE(session->set_quota(64 * kMiB).ok());
  // The bound of a boundary is a matter of time: so many of them are enough at one granule each.
  iterate(*session, 40);
  CHECK(session->info().spilled_bytes == 0);
  CHECK(session->info().home_bytes == 40 * kMiB);
  CHECK_FALSE(runtime->find(block)->spilled);
  CHECK(is_filled(block, 40 * kMiB, 0x5A));
  CHECK(runtime->check().empty());
  // Lowered, it goes out at its next boundaries, at the same address.
  REQUIRE(session->set_quota(16 * kMiB).ok());
  iterate(*session, 40);
  const auto info = session->info();
  CHECK(info.promised_persistent_bytes + info.promised_ephemeral_bytes <= 20 * kMiB);
  CHECK(info.spilled_bytes >= 24 * kMiB);
  CHECK(is_filled(block, 40 * kMiB, 0x5A));
  CHECK(runtime->check().empty());
  REQUIRE(session->free(block).ok());
  iterate(*session, 8);  // more than may be in flight, so the device has passed the free
  CHECK(session->info().home_bytes == 0);
  close_sound(*runtime);
}

TEST_CASE("a boundary moves no more than the setting says") {
  auto options = options_of(kHostDevice);
  options.spill_move_bytes = 4 * kMiB;
  auto runtime = open_runtime(std::move(options));
  auto session = started(*runtime, spiller("s", 8 * kMiB));
  REQUIRE(session->alloc(memory::Kind::kModel, 20 * kMiB, 0).ok());
  REQUIRE(session->set_quota(0).ok());
  uint64_t before = 0;
  while (session->info().spilled_bytes > 0) {
    iterate(*session);
    const uint64_t home = session->info().home_bytes;
    CHECK(home - before <= 4 * kMiB);
    before = home;
  }
  CHECK(before == 20 * kMiB);
  // And out, where the quota falls.
  REQUIRE(session->set_quota(4 * kMiB).ok());
  for (uint64_t spilled = 0; spilled < 16 * kMiB; spilled = session->info().spilled_bytes) {
    iterate(*session);
    CHECK(session->info().spilled_bytes - spilled <= 4 * kMiB);
  }
  CHECK(runtime->close().ok());
}

TEST_CASE("what an iteration spilled is room in its lane at the next") {
  auto runtime = open_runtime(options_of(kHostDevice));
  auto session = started(*runtime, spiller("s", 8 * kMiB));
  for (int round = 0; round < 3; ++round) {
    auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(iteration.ok());
    const auto block = (*iteration)->alloc(20 * kMiB, 0);
    REQUIRE(block.ok());
    CHECK(runtime->find(*block)->spilled == (round < 2));
    REQUIRE((*iteration)->end().ok());
    if (round == 1) {
      REQUIRE(session->set_quota(0).ok());
    }
  }
  close_sound(*runtime);
}

TEST_CASE("the limit of host memory is an ordinary refusal") {
  auto options = options_of(kHostDevice);
  options.spill_limit_bytes = 16 * kMiB;
  auto runtime = open_runtime(std::move(options));
  auto session = started(*runtime, spiller("s", 8 * kMiB));
  REQUIRE(session->alloc(memory::Kind::kModel, 12 * kMiB, 0).ok());
  const auto refused = session->alloc(memory::Kind::kModel, 12 * kMiB, 0);
  CHECK(refused.status().code() == GPUSHARE_QUOTA_EXCEEDED);
  iterate(*session);
  CHECK(runtime->close().ok());
}

TEST_CASE("an opportunistic session gives up what came home when a guaranteed one has blocks away") {
  auto options = options_of(kHostDevice, "pack");
  auto runtime = open_runtime(std::move(options));
  auto opportunistic = started(*runtime, spiller("lower", 8 * kMiB, kOpportunistic));
  const memory::Address theirs = filled_block(*opportunistic, 90 * kMiB, 0x11);
  REQUIRE(opportunistic->set_quota(0).ok());
  iterate(*opportunistic, 60);
  CHECK(opportunistic->info().home_bytes == 90 * kMiB);
  auto guaranteed = started(*runtime, spiller("higher", 8 * kMiB));
  const memory::Address ours = filled_block(*guaranteed, 60 * kMiB, 0x22);
  CHECK(guaranteed->info().spilled_bytes == 60 * kMiB);
  REQUIRE(guaranteed->set_quota(0).ok());
  for (int round = 0; round < 400 && guaranteed->info().spilled_bytes > 0; ++round) {
    iterate(*guaranteed);
    iterate(*opportunistic);
  }
  CHECK(guaranteed->info().spilled_bytes == 0);
  CHECK(is_filled(theirs, 90 * kMiB, 0x11));
  CHECK(is_filled(ours, 60 * kMiB, 0x22));
  close_sound(*runtime);
}

TEST_CASE("blocks come home in place of a spare session") {
  auto runtime = open_runtime(options_of(kHostDevice));
  const auto cls = GENERATE(sched::SessionClass::kGuaranteed, kOpportunistic);
  auto session = started(*runtime, spiller("s", 8 * kMiB, cls));
  const memory::Address block = filled_block(*session, 60 * kMiB, 0x33);
  CHECK(session->info().spilled_bytes == 60 * kMiB);
  auto spare = started(*runtime, need("spare", 90 * kMiB, 2 * kMiB));
  REQUIRE_OK(spare->set_spare(1.0));
  REQUIRE(session->set_quota(0).ok());
  while (session->info().spilled_bytes > 0) iterate(*session);
  CHECK(spare->dropped());
  CHECK(is_filled(block, 60 * kMiB, 0x33));
  close_sound(*runtime);
}

TEST_CASE("a session that came home is paged out and in with all its bytes") {
  auto runtime = open_runtime(options_of(kHostDevice));
  auto session = started(*runtime, spiller("lower", 8 * kMiB, kOpportunistic));
  const memory::Address block = filled_block(*session, 30 * kMiB, 0x77);
  REQUIRE(session->set_quota(0).ok());
  iterate(*session, 40);
  CHECK(session->info().home_bytes == 30 * kMiB);
  // Less than the session needs without the spilled blocks: with room for that it would be back as soon as it is out.
  REQUIRE(runtime->set_capacity(2 * kMiB).ok());
  // The state tells the decision; nobody may read until the bytes have moved too.
  while (session->info().state != executor::SessionState::kPagedOut || session->info().home_bytes > 0)
    std::this_thread::yield();
  CHECK(runtime->find(block)->spilled);
  CHECK(is_filled(block, 30 * kMiB, 0x77));
  REQUIRE(runtime->set_capacity(0).ok());
  iterate(*session, 40);
  CHECK(is_filled(block, 30 * kMiB, 0x77));
  CHECK(session->info().home_bytes == 30 * kMiB);
  close_sound(*runtime);
}

TEST_CASE("a session shrinks to a lowered quota and grows back, with all its bytes at their addresses") {
  const auto policy = GENERATE(as<std::string>{}, "fair", "priority", "pack");
  auto options = options_of(kHostDevice, policy.c_str());
  options.spill_move_loss = 1e9;  // empty iterations, and many cycles: rests would last longer than the test
  auto runtime = open_runtime(std::move(options));
  auto session = started(*runtime, spiller("s", 0));
  const auto block = session->alloc(memory::Kind::kModel, 70 * kMiB, 0);
  REQUIRE(block.ok());
  CHECK_FALSE(runtime->find(*block)->spilled);
  const auto bytes = [&] { return session->info().promised_persistent_bytes; };
  const uint64_t full = bytes();
  CHECK(full >= 70 * kMiB);
  for (int round = 0; round < 3; ++round) {
    std::memset(reinterpret_cast<void*>(*block), 0x31 + round, 70 * kMiB);
    REQUIRE(session->set_quota(8 * kMiB).ok());
    iterate(*session, 60);
    CHECK(bytes() + session->info().promised_ephemeral_bytes <= 12 * kMiB);
    CHECK(session->info().spilled_bytes >= 58 * kMiB);
    CHECK(all_are(reinterpret_cast<void*>(*block), 70 * kMiB, 0x31 + round));
    CHECK(runtime->check().empty());
    // Others have the bytes.
    auto other = open_session(*runtime, need("other", 100 * kMiB, 2 * kMiB));
    iterate(*other);
    REQUIRE(other->close().ok());
    REQUIRE(session->set_quota(0).ok());
    iterate(*session, 400);
    CHECK(session->info().spilled_bytes == 0);
    CHECK_FALSE(runtime->find(*block)->spilled);
    CHECK(all_are(reinterpret_cast<void*>(*block), 70 * kMiB, 0x31 + round));
    CHECK(bytes() <= full);
    CHECK(runtime->check().empty());
  }
  REQUIRE(session->free(*block).ok());
  CHECK(runtime->close().ok());
}

TEST_CASE(
    "a session that is sent out again and again stays away until its moves are a small part of its time") {
  auto options = options_of(kHostDevice);
  options.spill_move_loss = 1e-9;  // for ever, as far as a test can see
  auto runtime = open_runtime(std::move(options));
  auto session = open_session(*runtime, spiller("s", 0));
  iterate(*session);
  const auto block = session->alloc(memory::Kind::kModel, 40 * kMiB, 0);
  REQUIRE(block.ok());
  std::memset(reinterpret_cast<void*>(*block), 0x66, 40 * kMiB);
  for (int round = 0; round < 2; ++round) {
    REQUIRE(session->set_quota(8 * kMiB).ok());
    iterate(*session, 60);
    CHECK(session->info().spilled_bytes >= 28 * kMiB);  // out it goes whenever it has to
    REQUIRE(session->set_quota(0).ok());
    iterate(*session, 400);
    CHECK((session->info().spilled_bytes == 0) == (round == 0));
  }
  CHECK(all_are(reinterpret_cast<void*>(*block), 40 * kMiB, 0x66));
  CHECK(runtime->check().empty());
  CHECK(runtime->close().ok());
}

TEST_CASE("a quota that host memory cannot make true is a target, and iterations go on") {
  auto options = options_of(kHostDevice);
  options.spill_limit_bytes = 16 * kMiB;
  auto runtime = open_runtime(std::move(options));
  auto session = started(*runtime, spiller("s", 0));
  const memory::Address block = filled_block(*session, 40 * kMiB, 0x44);
  REQUIRE(session->set_quota(8 * kMiB).ok());
  iterate(*session, 60);
  CHECK(session->info().spilled_bytes <= 16 * kMiB);
  CHECK(session->info().promised_persistent_bytes >= 24 * kMiB);
  CHECK(is_filled(block, 40 * kMiB, 0x44));
  close_sound(*runtime);
}

TEST_CASE("a guaranteed session's memory comes from what an opportunistic one sends out at its boundaries") {
  auto options = options_of(kHostDevice, "pack");
  options.spill_move_bytes = 8 * kMiB;
  auto runtime = open_runtime(std::move(options));
  auto opportunistic = started(*runtime, spiller("lower", 0, kOpportunistic));
  const memory::Address theirs = filled_block(*opportunistic, 90 * kMiB, 0x11);
  std::atomic<bool> stop{false};
  base::Status ran;  // read after the thread's end
  std::thread runs([&] {
    while (!stop && ran.ok()) ran = iterate_once(*opportunistic);
  });
  auto guaranteed = open_session(*runtime, need("higher", 2 * kMiB, 2 * kMiB));
  const auto ours = guaranteed->alloc(memory::Kind::kModel, 60 * kMiB, 0);
  INFO(ours.status().to_string());
  CHECK(ours.ok());
  CHECK(opportunistic->info().state != executor::SessionState::kPagedOut);
  stop = true;
  runs.join();
  INFO(ran.to_string());
  CHECK(ran.ok());
  CHECK(opportunistic->info().spilled_bytes > 0);
  CHECK(is_filled(theirs, 90 * kMiB, 0x11));
  close_sound(*runtime);
}

TEST_CASE("an allocation does not wait for blocks of a session whose iteration its own thread has open") {
  auto runtime = open_runtime(options_of(kHostDevice, "pack"));
  auto opportunistic = started(*runtime, spiller("lower", 0, kOpportunistic));
  const memory::Address theirs = filled_block(*opportunistic, 90 * kMiB, 0x12);
  auto guaranteed = started(*runtime, need("higher", 2 * kMiB, 2 * kMiB));
  const auto iteration = opportunistic->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(iteration.ok());
  CHECK(guaranteed->alloc(memory::Kind::kModel, 60 * kMiB, 0).status().code() ==
        GPUSHARE_DEVICE_OUT_OF_MEMORY);
  REQUIRE_OK((*iteration)->end());
  CHECK(guaranteed->alloc(memory::Kind::kModel, 60 * kMiB, 0).ok());
  CHECK(is_filled(theirs, 90 * kMiB, 0x12));
  close_sound(*runtime);
}

TEST_CASE("sessions that spill, move and end at any time leave nothing") {
  auto options = options_of(kHostDevice, "pack");
  options.spill_move_bytes = 4 * kMiB;
  auto runtime = open_runtime(std::move(options));
  constexpr int kThreads = 3;
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int life = 0; life < 4; ++life) {
        auto wanted = spiller("s", 8 * kMiB);
        if (t > 0) wanted.cls = sched::SessionClass::kOpportunistic;
        auto session = runtime->open_session(wanted);
        if (!session.ok()) continue;
        // Half of them have a block within P when the quota falls.
        if (life % 2 == 1) (void)(*session)->set_quota(0);
        const auto block = (*session)->alloc(memory::Kind::kModel, 10 * kMiB, 0);
        const int value = 1 + t * 40 + life;
        for (int i = 0; i < 12; ++i) {
          if (i == 2) (void)(*session)->set_quota(0);
          if (i == 5) (void)(*session)->set_quota(6 * kMiB);
          auto iteration = (*session)->begin(GPUSHARE_NO_TIMEOUT);
          if (!iteration.ok()) break;
          if (block.ok() && i == 0) std::memset(reinterpret_cast<void*>(*block), value, 10 * kMiB);
          if (block.ok() && !all_are(reinterpret_cast<void*>(*block), 10 * kMiB, value)) ++wrong;
          (void)(*iteration)->end();
        }
        if (life % 2 == 0) (void)(*session)->cancel();
        (void)(*session)->close();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
  close_sound(*runtime);
}

}  // namespace
