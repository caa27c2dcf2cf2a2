// Allocations that need a larger promise, in the open iteration of a session that has ended or is being closed: each
// says so. A status that means "paged out, try again" must not be taken for that: the call would never return, and the
// close waits for the iteration.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <stdexcept>
#include <thread>

#include "executor/range.hpp"
#include "support/executor_fixture.hpp"
#include "support/status_checks.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT

enum class End { kClose, kCancel, kRuntimeClose, kHostFunction };

const char* name_of(End end) {
  switch (end) {
    case End::kClose:
      return "closed";
    case End::kCancel:
      return "cancelled";
    case End::kRuntimeClose:
      return "runtime closed";
    case End::kHostFunction:
      return "failed by a host function";
  }
  return "";
}

// Ends the session while its iteration is open. The thread, if any, returns once the iteration has ended.
std::thread end_session(executor::Runtime& runtime, executor::Session& session,
                        executor::Iteration& iteration, End how) {
  if (how == End::kClose) return std::thread([&] { (void)session.close(); });
  if (how == End::kRuntimeClose) return std::thread([&] { (void)runtime.close(); });
  if (how == End::kCancel) {
    CHECK_OK(session.cancel());
    return {};
  }
  const auto stream = iteration.stream();
  REQUIRE(stream.ok());
  CHECK_OK((*stream)->launch_host([](void*) { throw std::runtime_error("kernel failed"); }, nullptr));
  CHECK_OK((*stream)->synchronize());
  return {};
}

bool has_ended(executor::Session& session) {
  const executor::SessionState state = session.info().state;
  return state == executor::SessionState::kCancelled || state == executor::SessionState::kFailed;
}

// Calls that need more than the session was promised. All are refused.
void ask_for_more(executor::Runtime& runtime, executor::Session& session, executor::Iteration& iteration,
                  executor::Range* range) {
  const auto refused = [](const char* call, const base::Status& status) {
    CAPTURE(call, status.to_string());
    CHECK((status.code() == GPUSHARE_INVALID_STATE || status.code() == GPUSHARE_CANCELLED));
  };
  refused("model", session.alloc(memory::Kind::kModel, 24 * kMiB, 0).status());
  refused("framework", runtime.alloc(nullptr, memory::Kind::kFramework, 24 * kMiB, 0).status());
  refused("ephemeral", iteration.alloc(24 * kMiB, 0).status());
  refused("of the session", session.alloc_ephemeral(24 * kMiB, 0).status());
  memory::Address blocks[2] = {};
  const uint64_t sizes[2] = {24 * kMiB, 24 * kMiB};
  refused("many", iteration.alloc_many(sizes, 0, blocks, 0));
  if (range != nullptr) refused("commit", range->commit(8 * kMiB, 24 * kMiB, GPUSHARE_NO_TIMEOUT));
  // Out of what it has it may still take.
  const auto small = iteration.alloc(4096, 0);
  CHECK(small.ok());
}

TEST_CASE("an allocation that needs a larger promise says that its session has ended") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  const End how = GENERATE(End::kClose, End::kCancel, End::kRuntimeClose, End::kHostFunction);
  const bool spills = GENERATE(false, true);
  CAPTURE(setup.device, static_cast<int>(setup.layout), name_of(how), spills);
  auto runtime = open_runtime(options_of(setup));
  auto options = need("ends", 16 * kMiB, 8 * kMiB);
  options.allow_spill = spills;
  options.fail_on_error = true;
  auto session = open_session(*runtime, options);
  std::shared_ptr<executor::Range> range;
  if (setup.layout == memory::Layout::kVirtual) {
    executor::RangeOptions reserved;
    reserved.reserved_bytes = 64 * kMiB;
    auto opened = session->open_range(reserved);
    REQUIRE(opened.ok());
    range = *opened;
    CHECK_OK(range->commit(0, 2 * kMiB, 0));
  }
  auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(iteration.ok());
  std::thread closer = end_session(*runtime, *session, **iteration, how);
  while (!has_ended(*session)) std::this_thread::yield();
  ask_for_more(*runtime, *session, **iteration, range.get());
  (void)(*iteration)->end();
  if (closer.joinable()) closer.join();
  range.reset();
  (void)session->close();
  (void)runtime->close();
}

TEST_CASE("a pushed iteration that asks for more than its session has ends when the session is closed") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  CAPTURE(setup.device, static_cast<int>(setup.layout));
  auto runtime = open_runtime(options_of(setup));
  auto session = open_session(*runtime, need("pushed", 8 * kMiB, 8 * kMiB));
  std::atomic<bool> begun{false};
  base::Status asked;
  auto work = work_of([&](const std::shared_ptr<executor::Iteration>&) -> base::Status {
    begun.store(true);
    while (!has_ended(*session)) std::this_thread::yield();
    asked = session->alloc(memory::Kind::kModel, 64 * kMiB, 0).status();
    return {};
  });
  const auto ticket = session->submit(work);
  REQUIRE(ticket.ok());
  while (!begun.load()) std::this_thread::yield();
  CHECK_OK(session->close());
  INFO(asked.to_string());
  CHECK(asked.code() == GPUSHARE_INVALID_STATE);
  CHECK(runtime->close().ok());
}

}  // namespace
