// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "support/bytes.hpp"
#include "support/executor_fixture.hpp"
#include "support/status_checks.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT

TEST_CASE("promises grow while that is safe, and the error has the numbers when it is not") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  CAPTURE(setup.device);
  auto options = options_of(setup);
  options.capacity_bytes = 128 * kMiB;
  auto runtime = open_runtime(std::move(options));
  auto a = open_session(*runtime, need("grower", 8 * kMiB, 8 * kMiB));
  auto b = open_session(*runtime, need("neighbour", 16 * kMiB, 8 * kMiB));
  const auto block = a->alloc(memory::Kind::kModel, 40 * kMiB, 0);
  INFO(block.status().to_string());
  REQUIRE(block.ok());
  CHECK(a->info().promised_persistent_bytes >= 40 * kMiB);
  const auto too_much = a->alloc(memory::Kind::kModel, 100 * kMiB, 0);
  CHECK(too_much.status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(too_much.status().message().find("grower") != std::string::npos);
  CHECK(too_much.status().message().find("100.00 MiB") != std::string::npos);
  CHECK(too_much.status().message().find("neighbour") != std::string::npos);
  const auto never = a->alloc(memory::Kind::kModel, uint64_t{1} << 50, 0);
  CHECK_FALSE(never.ok());
  CHECK(a->alloc(memory::Kind::kModel, 0, 0).status().code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(a->alloc(memory::Kind::kModel, 1, 3).status().code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(a->alloc(memory::Kind::kEphemeral, 1, 0).status().code() == GPUSHARE_INVALID_ARGUMENT);
  // The neighbour has lost nothing of what it was promised.
  CHECK(b->alloc(memory::Kind::kModel, 16 * kMiB, 0).ok());
  CHECK(runtime->check().empty());
  CHECK(runtime->close().ok());
}

TEST_CASE("a lane grows in the middle of an iteration, at the latest at the next boundary") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  CAPTURE(setup.device);
  auto runtime = open_runtime(options_of(setup));
  auto session = open_session(*runtime, need("a", 0, 8 * kMiB));
  bool grown = false;
  for (int attempt = 0; attempt < 2 && !grown; ++attempt) {
    auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(iteration.ok());
    REQUIRE((*iteration)->alloc(4 * kMiB, 0).ok());
    const auto block = (*iteration)->alloc(48 * kMiB, 0);
    grown = block.ok();
    if (!grown) {
      CHECK(setup.layout == memory::Layout::kContiguous);
      CHECK(block.status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
    }
    REQUIRE((*iteration)->end().ok());
    CHECK(runtime->check().empty());
  }
  if (setup.layout == memory::Layout::kVirtual) CHECK(grown);
}

TEST_CASE("a lane grows to what its blocks need: free bytes at its end are part of a block's place") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  CAPTURE(setup.device, static_cast<int>(setup.layout));
  auto runtime = open_runtime(options_of(setup));
  auto session = open_session(*runtime, need("a", 0, 16 * kMiB));
  {
    auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(iteration.ok());
    CHECK((*iteration)->alloc(20 * kMiB, 0).ok());
    CHECK(session->info().promised_ephemeral_bytes == 20 * kMiB);
    REQUIRE((*iteration)->end().ok());
  }
  if (setup.layout == memory::Layout::kVirtual) {  // elsewhere a lane does not grow above live blocks
    auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(iteration.ok());
    CHECK((*iteration)->alloc(4 * kMiB, 0).ok());
    CHECK((*iteration)->alloc(24 * kMiB, 0).ok());
    CHECK(session->info().promised_ephemeral_bytes == 28 * kMiB);
    REQUIRE((*iteration)->end().ok());
  }
  CHECK(runtime->check().empty());
  CHECK(runtime->close().ok());
}

TEST_CASE("quota is a hard limit on all kinds together") {
  auto runtime = open_runtime(options_of(kSetups[0]));
  auto options = need("q", 4 * kMiB, 4 * kMiB);
  options.quota_bytes = 10 * kMiB;
  auto session = open_session(*runtime, options);
  REQUIRE(session->alloc(memory::Kind::kModel, 6 * kMiB, 0).ok());
  auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(iteration.ok());
  REQUIRE((*iteration)->alloc(3 * kMiB, 0).ok());
  const auto above = (*iteration)->alloc(2 * kMiB, 0);
  CHECK(above.status().code() == GPUSHARE_QUOTA_EXCEEDED);
  CHECK(session->alloc(memory::Kind::kFramework, 2 * kMiB, 0).status().code() == GPUSHARE_QUOTA_EXCEEDED);
  CHECK(session->alloc(memory::Kind::kFramework, UINT64_MAX, 0).status().code() == GPUSHARE_QUOTA_EXCEEDED);
  REQUIRE((*iteration)->end().ok());
  CHECK(session->alloc(memory::Kind::kFramework, 2 * kMiB, 0).ok());
}

TEST_CASE("what is kept outlives its iteration and is freed like any block") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  CAPTURE(setup.device);
  auto runtime = open_runtime(options_of(setup));
  auto session = open_session(*runtime, need("k", 0, 16 * kMiB));  // P grows for it
  auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(iteration.ok());
  const auto block = (*iteration)->alloc(3 * kMiB, 0);
  REQUIRE(block.ok());
  REQUIRE((*iteration)->keep(*block).ok());
  CHECK((*iteration)->keep(12345).code() == GPUSHARE_NOT_FOUND);
  REQUIRE((*iteration)->end().ok());
  CHECK(session->info().promoted_bytes == 3 * kMiB);
  CHECK(session->info().ephemeral_bytes == 0);
  const auto info = runtime->find(*block);
  REQUIRE(info.ok());
  CHECK(info->promoted);
  CHECK(info->session == session->id());
  auto again = session->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(again.ok());
  const auto next = (*again)->alloc(8 * kMiB, 0);
  REQUIRE(next.ok());
  CHECK((*next >= *block + 3 * kMiB || *next + 8 * kMiB <= *block));
  REQUIRE((*again)->end().ok());
  CHECK(runtime->check().empty());
  REQUIRE(runtime->free(*block).ok());
  CHECK(runtime->free(*block).code() == GPUSHARE_NOT_FOUND);
  CHECK(session->info().promoted_bytes == 0);
  CHECK(runtime->close().ok());
}

TEST_CASE("what is kept counts once: the next iterations find all that was declared") {
  const char* device = GENERATE("host?total_bytes=268435456", "sim?total_bytes=268435456");
  CAPTURE(device);
  auto options = options_of({device, memory::Layout::kVirtual});
  options.capacity_bytes = 64 * kMiB;
  auto runtime = open_runtime(std::move(options));
  // All of the device is promised, so nothing can grow.
  auto session = open_session(*runtime, need("keeper", 16 * kMiB, 16 * kMiB));
  auto neighbour = open_session(*runtime, need("neighbour", 32 * kMiB, 16 * kMiB));
  REQUIRE(neighbour->alloc(memory::Kind::kModel, 32 * kMiB, 0).ok());
  memory::Address kept = 0;
  for (int step = 0; step < 6; ++step) {
    CAPTURE(step);
    auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(iteration.ok());
    const auto block = (*iteration)->alloc(15 * kMiB, 0);
    INFO(block.status().to_string());
    REQUIRE(block.ok());
    if (step == 1) {
      REQUIRE((*iteration)->keep(*block).ok());
      kept = *block;
    }
    if (step == 4) {
      REQUIRE(session->free(kept).ok());
      REQUIRE((*iteration)->end().ok());
      REQUIRE(session->alloc(memory::Kind::kModel, 16 * kMiB, 0).ok());
      continue;
    }
    REQUIRE((*iteration)->end().ok());
    CHECK(runtime->check().empty());
  }
  CHECK(session->info().promised_persistent_bytes == 16 * kMiB);
  CHECK(session->info().promised_ephemeral_bytes == 16 * kMiB);
  CHECK(runtime->close().ok());
}

TEST_CASE("the owner is found by stream, then by thread") {
  auto runtime = open_runtime(options_of(kSetups[0]));
  auto a = open_session(*runtime, need("a", kMiB, 8 * kMiB));
  auto b = open_session(*runtime, need("b", kMiB, 8 * kMiB));
  CHECK(runtime->alloc(nullptr, memory::Kind::kEphemeral, 10, 0).status().code() == GPUSHARE_NOT_FOUND);
  auto of_a = a->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(of_a.ok());
  auto of_b = b->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(of_b.ok());
  const auto owner = [&](const base::Result<memory::Address>& address) {
    REQUIRE(address.ok());
    return runtime->find(*address)->session;
  };
  CHECK(owner(runtime->alloc(nullptr, memory::Kind::kEphemeral, 10, 0)) == b->id());
  const auto stream_of_a = *(*of_a)->stream();
  CHECK(owner(runtime->alloc(stream_of_a.get(), memory::Kind::kEphemeral, 10, 0)) == a->id());
  base::Result<memory::Address> without = base::Status(), with = base::Status();
  std::thread([&] {
    without = runtime->alloc(nullptr, memory::Kind::kModel, 10, 0);
    with = runtime->alloc(stream_of_a.get(), memory::Kind::kModel, 10, 0);
  }).join();
  CHECK(without.status().code() == GPUSHARE_NOT_FOUND);
  CHECK(owner(with) == a->id());
  REQUIRE((*of_a)->end().ok());  // not the innermost: b stays bound
  CHECK(owner(runtime->alloc(nullptr, memory::Kind::kEphemeral, 10, 0)) == b->id());
  const auto between = runtime->alloc(stream_of_a.get(), memory::Kind::kEphemeral, 10, 0);
  REQUIRE(between.ok());
  CHECK(runtime->find(*between)->kind == memory::Kind::kFramework);
  bool ended = false;
  std::thread([&] { ended = (*of_b)->end().ok(); }).join();
  CHECK(ended);
  CHECK(runtime->alloc(nullptr, memory::Kind::kEphemeral, 10, 0).status().code() == GPUSHARE_NOT_FOUND);
  auto side = runtime->create_stream(0);
  REQUIRE(side.ok());
  CHECK(runtime->alloc(side->get(), memory::Kind::kModel, 10, 0).status().code() == GPUSHARE_NOT_FOUND);
  CHECK(runtime->record_use(*between, **side).ok());
  CHECK(runtime->record_use(1, **side).code() == GPUSHARE_NOT_FOUND);
  REQUIRE(runtime->free(*between).ok());
}

TEST_CASE("the out-of-memory function is asked without a lock, may call in, throw, and is bounded") {
  auto options = options_of(kSetups[0]);
  options.capacity_bytes = 64 * kMiB;
  auto runtime = open_runtime(std::move(options));
  auto hoarder = open_session(*runtime, need("hoarder", 30 * kMiB, 2 * kMiB));
  auto session = open_session(*runtime, need("s", 2 * kMiB, 2 * kMiB));
  int calls = 0;
  REQUIRE(runtime
              ->set_out_of_memory_function([&](uint64_t id, uint64_t bytes) {
                ++calls;
                CHECK(id == session->id());
                CHECK(bytes == 40 * kMiB);
                CHECK(session->alloc(memory::Kind::kModel, 500 * kMiB, 0).status().code() ==
                      GPUSHARE_DEVICE_OUT_OF_MEMORY);
                CHECK(runtime->close().code() == GPUSHARE_INVALID_STATE);
                return hoarder->close().ok();
              })
              .ok());
  CHECK(session->alloc(memory::Kind::kModel, 40 * kMiB, 0).ok());
  CHECK(calls == 1);
  REQUIRE(runtime
              ->set_out_of_memory_function([&](uint64_t, uint64_t) {
                ++calls;
                return true;
              })
              .ok());
  calls = 0;
  CHECK(session->alloc(memory::Kind::kModel, 40 * kMiB, 0).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(calls >= 1);
  CHECK(calls <= 8);
  REQUIRE(
      runtime->set_out_of_memory_function([&](uint64_t, uint64_t) -> bool { throw std::runtime_error("no"); })
          .ok());
  CHECK(session->alloc(memory::Kind::kModel, 40 * kMiB, 0).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(runtime->close().ok());
}

TEST_CASE(
    "a guaranteed session's allocation waits for the boundary of an opportunistic one that is never idle") {
  const bool sim = GENERATE(false, true);
  const bool inside = GENERATE(false, true);  // its own iteration
  CAPTURE(sim, inside);
  auto runtime = open_runtime(options_of(
      {sim ? "sim?total_bytes=134217728" : "host?total_bytes=134217728", memory::Layout::kVirtual}));
  auto lower = need("lower", 60 * kMiB, 4 * kMiB);
  lower.cls = sched::SessionClass::kOpportunistic;
  auto busy = open_session(*runtime, lower);
  const auto theirs = busy->alloc(memory::Kind::kModel, 50 * kMiB, 0);
  REQUIRE(theirs.ok());
  if (!sim) std::memset(reinterpret_cast<void*>(*theirs), 0x5C, 50 * kMiB);
  auto session = open_session(*runtime, need("s", 8 * kMiB, 4 * kMiB));
  REQUIRE_OK(session->wait_admitted(GPUSHARE_NO_TIMEOUT));
  std::atomic<bool> stop{false}, failed{false};
  std::atomic<int> done{0};
  std::thread iterating([&] {
    while (!stop) {
      auto iteration = busy->begin(GPUSHARE_NO_TIMEOUT);
      if (!iteration.ok() || !(*iteration)->end().ok()) failed = true;
      ++done;
    }
  });
  while (done < 3) std::this_thread::yield();
  std::shared_ptr<executor::Iteration> own;
  if (inside) own = *session->begin(GPUSHARE_NO_TIMEOUT);
  const auto block = session->alloc(memory::Kind::kModel, 100 * kMiB, 0);
  const int then = done;
  const bool ended = own == nullptr || own->end().ok();
  const bool freed = block.ok() && runtime->free(*block).ok();
  REQUIRE_OK(session->close());
  stop = true;
  iterating.join();
  INFO(block.status().to_string());
  CHECK(block.ok());
  CHECK(freed);
  CHECK(ended);
  CHECK(then >= 3);
  CHECK_FALSE(failed);
  if (!sim) CHECK(all_are(reinterpret_cast<void*>(*theirs), 50 * kMiB, 0x5C));
  CHECK(runtime->check().empty());
  CHECK(runtime->close().ok());
}

TEST_CASE(
    "an iteration that does not end keeps its session's bytes, and the allocation is refused by the thread "
    "that has it open") {
  auto runtime = open_runtime(options_of({"host?total_bytes=134217728", memory::Layout::kVirtual}));
  auto lower = need("lower", 60 * kMiB, 4 * kMiB);
  lower.cls = sched::SessionClass::kOpportunistic;
  auto busy = open_session(*runtime, lower);
  auto session = open_session(*runtime, need("s", 8 * kMiB, 4 * kMiB));
  REQUIRE_OK(session->wait_admitted(GPUSHARE_NO_TIMEOUT));
  const auto open = busy->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(open.ok());
  const auto refused = session->alloc(memory::Kind::kModel, 100 * kMiB, 0);
  CHECK(refused.status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  REQUIRE_OK((*open)->end());
  CHECK(session->alloc(memory::Kind::kModel, 100 * kMiB, 0).ok());
  CHECK(runtime->check().empty());
  CHECK(runtime->close().ok());
}

TEST_CASE("guaranteed sessions push idle opportunistic ones out; spill takes what is allowed to") {
  const bool sim = GENERATE(false, true);
  executor::RuntimeOptions options = options_of(
      {sim ? "sim?total_bytes=134217728" : "host?total_bytes=134217728", memory::Layout::kVirtual});
  auto runtime = open_runtime(std::move(options));
  auto lower = need("lower", 60 * kMiB, 4 * kMiB);
  lower.cls = sched::SessionClass::kOpportunistic;
  auto idle = open_session(*runtime, lower);
  REQUIRE(idle->alloc(memory::Kind::kModel, 30 * kMiB, 0).ok());
  auto session = open_session(*runtime, need("s", 8 * kMiB, 4 * kMiB));
  const auto block = session->alloc(memory::Kind::kModel, 90 * kMiB, 0);
  INFO(block.status().to_string());
  REQUIRE(block.ok());
  CHECK(idle->info().state == executor::SessionState::kPagedOut);
  REQUIRE(runtime->free(*block).ok());
  CHECK(runtime->check().empty());
  auto spilling = need("spills", 2 * kMiB, 2 * kMiB);
  spilling.allow_spill = true;
  auto spiller = open_session(*runtime, spilling);
  const auto spilled = spiller->alloc(memory::Kind::kModel, 100 * kMiB, 0);
  if (sim) {
    INFO(spilled.status().to_string());
  } else {
    INFO(spilled.status().to_string());
    REQUIRE(spilled.ok());
    CHECK(spiller->info().spilled_bytes >= 100 * kMiB);
    CHECK(runtime->find(*spilled)->spilled);
  }
  CHECK(runtime->check().empty());
  CHECK(runtime->close().ok());
}

TEST_CASE("no more is paged out for an allocation than it misses") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  if (setup.layout != memory::Layout::kVirtual) return;  // pieces of the contiguous layout need not join
  executor::RuntimeOptions options = options_of(setup, "priority");
  options.capacity_bytes = 64 * kMiB;
  auto runtime = open_runtime(std::move(options));
  std::vector<std::shared_ptr<executor::Session>> idle;
  for (int i = 0; i < 3; ++i) {
    auto lower = need("lower", 10 * kMiB, 2 * kMiB);
    lower.priority = -1;
    idle.push_back(open_session(*runtime, lower));
    REQUIRE(idle.back()->alloc(memory::Kind::kModel, 9 * kMiB, 0).ok());
  }
  auto session = open_session(*runtime, need("s", 4 * kMiB, 2 * kMiB));
  const uint64_t free = runtime->info()->capacity_bytes - runtime->info()->promised_bytes;
  REQUIRE(free > 10 * kMiB);
  REQUIRE(session->alloc(memory::Kind::kModel, free + 8 * kMiB, 0).ok());
  CHECK(runtime->info()->sessions_paged_out == 1);
  CHECK(runtime->info()->paged_out_bytes_total <= 10 * kMiB);  // nobody went to come straight back
  CHECK(runtime->check().empty());
  CHECK(runtime->close().ok());
}

}  // namespace
