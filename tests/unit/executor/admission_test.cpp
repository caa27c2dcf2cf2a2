// Sessions that wait for admission: what they submit meanwhile, and being let in.
// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "base/log.hpp"
#include "support/bytes.hpp"
#include "support/executor_fixture.hpp"
#include "support/status_checks.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT

constexpr const char* kPolicies[] = {"fifo", "srtf", "pack", "fair", "priority"};

std::shared_ptr<executor::Session> open_ranked(executor::Runtime& runtime, int32_t priority,
                                               executor::SessionOptions options) {
  options.priority = priority;
  return open_session(runtime, options);
}

// A thread of this process waits for something.
bool sleeps(pid_t thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  std::string text;
  std::getline(file, text);
  const size_t name_ends = text.rfind(')');
  return name_ends != std::string::npos && text.compare(name_ends, 3, ") S") == 0;
}

TEST_CASE("iterations pushed before the session is admitted run after it is, in order") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  const char* policy = GENERATE(from_range(std::begin(kPolicies), std::end(kPolicies)));
  CAPTURE(setup.device, static_cast<int>(setup.layout), policy);
  executor::RuntimeOptions options = options_of(setup, policy);
  options.capacity_bytes = 64 * kMiB;
  auto runtime = open_runtime(std::move(options));
  auto first = open_session(*runtime, need("first", 40 * kMiB, 4 * kMiB));
  REQUIRE(first->alloc(memory::Kind::kModel, 40 * kMiB, 0).ok());
  // Kept busy, so that no policy may page it out for the others before it has ended.
  auto held = first->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(held.ok());
  struct Waiting {
    std::shared_ptr<executor::Session> session;
    std::vector<std::shared_ptr<executor::Ticket>> tickets;
    std::vector<int> ran;
  };
  std::vector<Waiting> waiting(2);
  for (Waiting& w : waiting) {
    executor::SessionOptions of = need("waits", 30 * kMiB, 4 * kMiB);
    of.remaining_ns = 1'000'000;
    of.iterations_total = 5;
    w.session = open_session(*runtime, of);
    CHECK(w.session->info().state == executor::SessionState::kQueued);
    for (int i = 0; i < 5; ++i) {
      auto work = work_of([&w, i](const std::shared_ptr<executor::Iteration>& iteration) -> base::Status {
        w.ran.push_back(i);
        GPUSHARE_RETURN_IF_ERROR(iteration->alloc(3 * kMiB, 0).status());
        GPUSHARE_ASSIGN_OR_RETURN(const auto stream, iteration->stream());
        return enqueue(*stream, 10'000);
      });
      auto ticket = w.session->submit(work);
      REQUIRE(ticket.ok());
      w.tickets.push_back(*ticket);
    }
    CHECK(w.session->info().iterations_queued == 5);
    CHECK(w.tickets[0]->wait(0).code() == GPUSHARE_TIMED_OUT);
  }
  REQUIRE((*held)->end().ok());
  REQUIRE(first->close().ok());
  for (Waiting& w : waiting) {
    for (const auto& ticket : w.tickets) {
      const base::Status outcome = ticket->wait(GPUSHARE_NO_TIMEOUT);
      INFO(outcome.to_string());
      CHECK(outcome.ok());
    }
    CHECK(w.ran == std::vector<int>{0, 1, 2, 3, 4});
    CHECK(w.session->info().iterations_done == 5);
    CHECK(runtime->check().empty());
    CHECK(w.session->close().ok());  // some policies have one session resident at a time
  }
  CHECK(runtime->close().ok());
}

TEST_CASE("a session whose queued iterations were all it had still counts as ended when it is closed early") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  executor::RuntimeOptions options = options_of(setup);
  options.capacity_bytes = 64 * kMiB;
  auto runtime = open_runtime(std::move(options));
  auto first = open_session(*runtime, need("first", 40 * kMiB, 4 * kMiB));
  auto queued = open_session(*runtime, need("queued", 30 * kMiB, 4 * kMiB));
  std::atomic<int> ran{0};
  auto work = work_of([&ran](const std::shared_ptr<executor::Iteration>&) -> base::Status {
    ++ran;
    return {};
  });
  auto ticket = queued->submit(work);
  REQUIRE(ticket.ok());
  REQUIRE(queued->close().ok());
  CHECK((*ticket)->wait(GPUSHARE_NO_TIMEOUT).code() == GPUSHARE_CANCELLED);
  CHECK(ran == 0);
  CHECK(first->close().ok());
  CHECK(runtime->close().ok());
}

// The books have room, the device does not: others use it too. No event tells when that ends.
TEST_CASE("a session that the device had no memory for is tried again by itself") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  if (setup.layout != memory::Layout::kVirtual) return;  // contiguous has its memory from the beginning
  auto runtime = open_runtime(options_of(setup));
  auto resident = open_session(*runtime, need("resident", kMiB, kMiB));
  gpushare_backend_fault fault{};
  fault.struct_size = sizeof fault;
  fault.kind = GPUSHARE_FAULT_DEVICE_OUT_OF_MEMORY;
  fault.at_call = 1;
  REQUIRE(runtime->device().set_fault(fault).ok());
  auto late = open_session(*runtime, need("late", 8 * kMiB, 2 * kMiB));
  CHECK(late->wait_admitted(GPUSHARE_NO_TIMEOUT).ok());
  CHECK(late->alloc(memory::Kind::kModel, 8 * kMiB, 0).ok());
  CHECK(late->close().ok());
  CHECK(resident->close().ok());
  CHECK(runtime->close().ok());
}

TEST_CASE("a spare session between free pieces goes for a session that needs them joined") {
  for (const Setup& setup : kSetups) {
    if (setup.layout != memory::Layout::kContiguous) continue;
    INFO(setup.device);
    executor::RuntimeOptions options = options_of(setup);
    options.capacity_bytes = 32 * kMiB;
    auto runtime = open_runtime(std::move(options));
    auto before = open_session(*runtime, need("before", 9 * kMiB, kMiB));
    auto spare = open_session(*runtime, need("spare", 4 * kMiB, kMiB));
    auto after = open_session(*runtime, need("after", 9 * kMiB, kMiB));
    for (const auto& each : {before, spare, after})
      REQUIRE(each->alloc(memory::Kind::kModel, 3 * kMiB, 0).ok());
    REQUIRE(before->close().ok());
    REQUIRE(after->close().ok());
    auto wide = need("wide", 18 * kMiB, 2 * kMiB);
    wide.allow_queueing = false;
    // Nobody gives way while nobody is spare.
    CHECK(runtime->open_session(wide).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
    REQUIRE(spare->set_spare(1.0).ok());
    const auto opened = runtime->open_session(wide);
    INFO(opened.status().to_string());
    REQUIRE(opened.ok());
    CHECK(spare->dropped());
    CHECK((*opened)->alloc(memory::Kind::kModel, 18 * kMiB, 0).ok());
    CHECK(runtime->check().empty());
    CHECK(runtime->close().ok());
  }
}

// Its lane closed when it was paged out, but for the block that it kept there: what that pins is promised to nobody.
TEST_CASE("a session that is alone comes back beside the block that it kept") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  if (setup.layout != memory::Layout::kVirtual) return;
  auto options = options_of(setup, "priority");
  options.capacity_bytes = 62 * kMiB;
  auto runtime = open_runtime(std::move(options));
  struct Refusals {
    std::atomic<int> count{0};
  } refusals;
  base::set_log_sink(
      [](void* data, int32_t, const char* message) {
        if (std::string(message).find("session 'low'") != std::string::npos)
          ++static_cast<Refusals*>(data)->count;
      },
      &refusals, base::kInfo);
  const auto low = open_session(*runtime, need("low", 16 * kMiB, 28 * kMiB));
  auto iteration = low->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(iteration.ok());
  REQUIRE((*iteration)->alloc(26 * kMiB, 0).ok());
  const auto kept = (*iteration)->alloc(2 * kMiB, 0);
  REQUIRE(kept.ok());
  REQUIRE((*iteration)->keep(*kept).ok());
  REQUIRE((*iteration)->end().ok());
  executor::SessionOptions urgent = need("high", 28 * kMiB, 4 * kMiB);
  urgent.priority = 9;
  const auto high = open_session(*runtime, urgent);
  REQUIRE(high->wait_admitted(GPUSHARE_NO_TIMEOUT).ok());
  REQUIRE(low->info().state == executor::SessionState::kPagedOut);
  CHECK(high->close().ok());
  iteration = low->begin(GPUSHARE_NO_TIMEOUT);
  INFO(iteration.status().to_string());
  REQUIRE(iteration.ok());
  CHECK((*iteration)->alloc(26 * kMiB, 0).ok());
  CHECK(runtime->find(*kept)->promoted);
  CHECK((*iteration)->end().ok());
  CHECK(runtime->check() == "");
  CHECK(refusals.count == 0);
  CHECK(low->close().ok());
  CHECK(runtime->close().ok());
  base::set_log_sink(nullptr, nullptr, base::kWarning);
}

// The missing memory may come back although no other session is left, because other programs use the device too. A copy
// that failed has lost no bytes, so it is tried again as well, also where other sessions are.
TEST_CASE("a session that cannot be paged in is tried again, and given up in the end") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  if (setup.layout != memory::Layout::kVirtual) return;
  const bool for_ever = GENERATE(false, true), copies = GENERATE(false, true), alone = GENERATE(false, true);
  if (!copies && !alone) return;  // waits until the others leave
  CAPTURE(setup.device, for_ever, copies, alone);
  auto options = options_of(setup, "priority");
  const uint64_t capacity = options.capacity_bytes = 62 * kMiB;
  auto runtime = open_runtime(std::move(options));
  const auto low = open_ranked(*runtime, 1, need("low", 24 * kMiB, 2 * kMiB));
  const auto model = low->alloc(memory::Kind::kModel, 16 * kMiB, 0);
  REQUIRE(model.ok());
  const auto use = [&](auto&& function) {
    auto iteration = low->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(iteration.ok());
    const auto stream = (*iteration)->stream();
    REQUIRE_OK(function(**stream));
    REQUIRE_OK((*stream)->synchronize());
    REQUIRE_OK((*iteration)->end());
  };
  use([&](executor::Stream& stream) { return stream.fill(*model, 0x3C, 16 * kMiB); });
  std::shared_ptr<executor::Session> other;
  if (!alone) other = open_ranked(*runtime, 9, need("other", 2 * kMiB, 2 * kMiB));
  const auto high = open_ranked(*runtime, 9, need("high", capacity - (alone ? 4 : 10) * kMiB, 2 * kMiB));
  REQUIRE(high->wait_admitted(GPUSHARE_NO_TIMEOUT).ok());
  REQUIRE(low->info().state == executor::SessionState::kPagedOut);
  CHECK(runtime->check() == "");  // waits for the rest of the page-out
  struct Faults {
    executor::Runtime& runtime;
    bool for_ever;
    uint32_t kind;
    std::atomic<int> failures{0};
    void next_fails() {
      CHECK(runtime.device().set_fault({sizeof(gpushare_backend_fault), kind, 1, 1.0}).ok());
    }
  } faults{*runtime, for_ever,
           static_cast<uint32_t>(copies ? GPUSHARE_FAULT_LAUNCH_FAILS : GPUSHARE_FAULT_MAP_FAILS)};
  base::set_log_sink(
      [](void* data, int32_t, const char* message) {
        auto& of = *static_cast<Faults*>(data);
        if (std::string(message).find("paging in session 'low'") == std::string::npos) return;
        ++of.failures;
        if (of.for_ever) of.next_fails();
      },
      &faults, base::kWarning);
  faults.next_fails();
  CHECK(high->close().ok());
  const auto block = low->alloc(memory::Kind::kModel, kMiB, 0);
  CHECK(block.ok() == !for_ever);
  const int32_t failed = copies ? GPUSHARE_UNKNOWN : GPUSHARE_DEVICE_OUT_OF_MEMORY;
  CHECK(low->info().status.code() == (for_ever ? failed : GPUSHARE_OK));
  CHECK(low->info().state ==
        (for_ever ? executor::SessionState::kFailed : executor::SessionState::kResident));
  CHECK(faults.failures >= (for_ever ? 2 : 1));
  CHECK(runtime->check() == "");
  base::set_log_sink(nullptr, nullptr, base::kWarning);
  (void)runtime->device().set_fault(
      {sizeof(gpushare_backend_fault), GPUSHARE_FAULT_NONE, 0, 0});  // may be armed still
  if (!for_ever) {
    std::vector<uint8_t> read(16 * kMiB);
    use([&](executor::Stream& stream) {
      return stream.copy(reinterpret_cast<uintptr_t>(read.data()), *model, read.size(),
                         GPUSHARE_COPY_DEVICE_TO_HOST);
    });
    CHECK(all_are(read.data(), read.size(), 0x3C));
  }
  if (other != nullptr) {
    CHECK((*other->begin(GPUSHARE_NO_TIMEOUT))->end().ok());
    CHECK(other->close().ok());
  }
  CHECK(low->close().ok());
  CHECK(runtime->close().ok());
}

TEST_CASE(
    "an allocation that waits for a paged-out session keeps its place though it comes back and goes again") {
  auto options =
      options_of({"host?total_bytes=134217728&copy_gbps=0.2", memory::Layout::kVirtual}, "priority");
  options.capacity_bytes = 126 * kMiB;
  auto runtime = open_runtime(std::move(options));
  const auto a = open_ranked(*runtime, 1, need("a", 40 * kMiB, 8 * kMiB));
  REQUIRE(a->alloc(memory::Kind::kModel, 16 * kMiB, 0).ok());
  const auto high = open_ranked(*runtime, 9, need("high", 116 * kMiB, 8 * kMiB));
  REQUIRE(high->wait_admitted(GPUSHARE_NO_TIMEOUT).ok());
  CHECK(a->info().state == executor::SessionState::kPagedOut);
  std::atomic<bool> done{false};
  std::atomic<int32_t> code{-1};
  std::atomic<pid_t> thread_id{0};
  std::thread user([&] {
    thread_id = gettid();
    code = a->alloc(memory::Kind::kModel, kMiB, 0).status().code();
    done = true;
  });
  while (thread_id == 0 || !sleeps(thread_id))
    std::this_thread::yield();  // it waits: nobody has a lock that it takes
  // While a comes in (16 MiB at 0.2 GB/s) somebody comes who has it out again at once.
  REQUIRE(high->close().ok());
  const auto again = open_ranked(*runtime, 9, need("again", 116 * kMiB, 8 * kMiB));
  REQUIRE(again->wait_admitted(GPUSHARE_NO_TIMEOUT).ok());
  // Both rank below a, and neither fits beside it.
  const auto low = open_ranked(*runtime, 0, need("low", 100 * kMiB, 8 * kMiB));
  const auto lower = open_ranked(*runtime, 0, need("lower", 100 * kMiB, 8 * kMiB));
  REQUIRE(again->close().ok());
  const auto is_in = [](const auto& session) {
    return session->info().state == executor::SessionState::kResident;
  };
  while (!done && !is_in(low)) std::this_thread::yield();
  if (!done) {
    REQUIRE(low->close().ok());
    while (!done && !is_in(lower)) std::this_thread::yield();
  }
  CHECK(done);
  CHECK_FALSE(is_in(lower));
  CHECK(runtime->close().ok());
  user.join();
  if (done) CHECK((code == GPUSHARE_OK || code == GPUSHARE_INVALID_STATE));
}

}  // namespace
