// A shared lane that cannot be used: its holder hangs, or its holder's process dies, or the device has no memory for it. Built
// twice, as shared_lanes_test.cpp. The processes are runtimes of this one, and session_worker; tests/faults has more of those.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <string>

#include "device/registry.hpp"
#include "support/child_process.hpp"
#include "support/log_lines.hpp"
#include "unit/daemon/lane_jobs.hpp"

using namespace gpushare;
using namespace gpushare::test;

namespace {

// What a session says that comes into a lane without the memory of the lane.
constexpr char kWithoutMemory[] = "of the shared lane are here";

}  // namespace

TEST_CASE("nobody has a turn in a lane whose holder hangs; sessions with lanes of their own go on") {
  const Shared shared([](auto& options) {
    options.lease_ns = 20'000'000;
    options.capacity_bytes = 10 * kMiB;  // no room for a second lane, whoever goes out
  });
  Job hangs("hangs", 2 * kMiB, 2 * kMiB), waits("waits", 2 * kMiB, 2 * kMiB);
  setenv("GPUSHARE_PRIVATE_LANES", "1", 1);
  Job apart("apart", 2 * kMiB, 2 * kMiB);
  unsetenv("GPUSHARE_PRIVATE_LANES");
  const auto held = hangs.begin();
  CHECK_OK(apart.run(1));
  CHECK(shared.status().devices[0].cut_off == 1);
  CHECK(waits.session->begin(50'000'000).status().code() == GPUSHARE_TIMED_OUT);
  CHECK_OK(apart.run(2));
  REQUIRE_OK(held->end());
  CHECK_OK(waits.run(3));
  CHECK_OK(hangs.run(4));
  setenv("GPUSHARE_PRIVATE_LANES", "perhaps", 1);
  CHECK(SharedService::try_open().status().code() == GPUSHARE_INVALID_ARGUMENT);
  unsetenv("GPUSHARE_PRIVATE_LANES");
}

TEST_CASE("sessions whose lane is held up go on in another one, and keep their state") {
  LogLines log(base::kInfo);
  const Shared shared([](auto& options) { options.lease_ns = 200'000'000; });
  Job hangs("hangs", 4 * kMiB, 8 * kMiB), a("a", 4 * kMiB, 8 * kMiB), b("b", 4 * kMiB, 6 * kMiB);
  const auto state = a.session->alloc(memory::Kind::kModel, 4 * kMiB, 0);
  REQUIRE(state.ok());
  {
    const auto iteration = a.begin();
    REQUIRE_OK((*iteration->stream())->fill(*state, 7, 4 * kMiB));
    REQUIRE_OK(iteration->end());
  }
  CHECK(shared.promised() == 20 * kMiB);
  const auto holds = [&] {
    const auto iteration = a.begin();
    CHECK_OK(Job::is_all(**iteration->stream(), *state, 4 * kMiB, 7));
    REQUIRE_OK(iteration->end());
  };
  {
    const auto held = hangs.begin();
    const auto scratch = held->alloc(8 * kMiB, 0);
    REQUIRE(scratch.ok());
    REQUIRE_OK((*held->stream())->fill(*scratch, 9, 8 * kMiB));
    CHECK_OK(a.run(1, 8 * kMiB));
    CHECK_OK(b.run(2, 6 * kMiB));
    holds();
    if (shared.status().devices[0].cut_off ==
        1) {  // on a busy machine others may have exceeded the lease, too
      CHECK(shared.status().devices[0].lanes == 2);
      CHECK(shared.promised() == 28 * kMiB);  // the bytes of the one that hangs are owed
    }
    // Nobody else wrote where it may still run.
    CHECK_OK(Job::is_all(**held->stream(), *scratch, 8 * kMiB, 9));
    REQUIRE_OK(held->end());
  }
  CHECK_OK(hangs.run(3, 8 * kMiB));
  CHECK_OK(b.run(4, 6 * kMiB));
  holds();
  for (const Job* job : {&hangs, &a, &b}) CHECK(job->runtime->check() == "");
  CHECK(log.with(kWithoutMemory) == "");
}

TEST_CASE("without room for a second lane a session goes out so that the others go on, and comes back") {
  LogLines log(base::kInfo);
  const Shared shared([](auto& options) {
    options.lease_ns = 200'000'000;
    options.capacity_bytes = 24 * kMiB;
  });
  Job hangs("hangs", 4 * kMiB, 8 * kMiB), a("a", 4 * kMiB, 8 * kMiB), b("b", 4 * kMiB, 8 * kMiB);
  const auto state = b.session->alloc(memory::Kind::kModel, 4 * kMiB, 0);
  REQUIRE(state.ok());
  {
    const auto iteration = b.begin();
    REQUIRE_OK((*iteration->stream())->fill(*state, 7, 4 * kMiB));
    REQUIRE_OK(iteration->end());
  }
  CHECK(shared.promised() == 20 * kMiB);
  {
    const auto held = hangs.begin();
    const auto scratch = held->alloc(8 * kMiB, 0);
    REQUIRE(scratch.ok());
    REQUIRE_OK((*held->stream())->fill(*scratch, 9, 8 * kMiB));
    CHECK_OK(a.run(1, 8 * kMiB));
    CHECK(b.session->info().state == executor::SessionState::kPagedOut);
    CHECK(shared.promised() == 24 * kMiB);
    CHECK(b.session->begin(50'000'000).status().code() == GPUSHARE_TIMED_OUT);
    CHECK_OK(a.run(2, 8 * kMiB));
    CHECK_OK(Job::is_all(**held->stream(), *scratch, 8 * kMiB, 9));
    REQUIRE_OK(held->end());
  }
  {
    const auto iteration = b.begin();
    CHECK_OK(Job::is_all(**iteration->stream(), *state, 4 * kMiB, 7));
    REQUIRE_OK(iteration->end());
  }
  CHECK_OK(b.run(3, 8 * kMiB));
  CHECK_OK(hangs.run(4, 8 * kMiB));
  CHECK_OK(a.run(5, 8 * kMiB));
  eventually([&] { return shared.promised() == 20 * kMiB; });
  CHECK(shared.status().devices[0].lanes == 1);
  for (const Job* job : {&hangs, &a, &b}) CHECK(job->runtime->check() == "");
  CHECK(log.with(kWithoutMemory) == "");
}

TEST_CASE("nobody has a turn in a lane before its holder is dead") {
  const Shared shared([](auto& options) { options.capacity_bytes = 12 * kMiB; });
  Job waits("waits", 2 * kMiB, 4 * kMiB);
  CHECK_OK(waits.run(1));
  // Its iteration takes a minute.
  ChildProcess holder(GPUSHARE_SESSION_WORKER, {"holder", "1", "0", "2", "4", "60000000", "1"});
  REQUIRE(holder.line() == "ready\n");
  eventually([&] {
    for (const auto& session : shared.status().sessions)
      if (session.name == "holder" && session.state == "turn") return true;
    return false;
  });
  CHECK(shared.promised() == 8 * kMiB);
  CHECK(waits.session->begin(50'000'000).status().code() == GPUSHARE_TIMED_OUT);
  holder.kill();
  CHECK_OK(waits.run(2));
  eventually([&] { return shared.promised() == 6 * kMiB; });
}

namespace {

#ifdef GPUSHARE_CUDA_STANDIN
const char kFailing[] = "failing_cuda_lanes";
#else
const char kFailing[] = "failing_host_lanes";
#endif

std::atomic<int> g_piece_fails{0}, g_import_fails{0}, g_own_fails{0};
const gpushare_backend_ops* g_real = nullptr;

bool fails_now(std::atomic<int>& count) {
  int left = count.load();
  while (left > 0 && !count.compare_exchange_weak(left, left - 1)) {
  }
  return left > 0;
}

void register_failing() {
  static const bool registered = [] {
    g_real = device::find_backend(kBackend);
    static gpushare_backend_ops ops = *g_real;
    ops.name = kFailing;
    ops.phys_create_shared = [](gpushare_backend_device* device, uint64_t bytes,
                                gpushare_backend_memory** out) {
      return fails_now(g_piece_fails) ? GPUSHARE_DEVICE_OUT_OF_MEMORY
                                      : g_real->phys_create_shared(device, bytes, out);
    };
    ops.phys_create = [](gpushare_backend_device* device, uint64_t bytes, gpushare_backend_memory** out) {
      return fails_now(g_own_fails) ? GPUSHARE_DEVICE_OUT_OF_MEMORY : g_real->phys_create(device, bytes, out);
    };
    ops.phys_import = [](gpushare_backend_device* device, int32_t descriptor, uint64_t bytes, uint32_t access,
                         gpushare_backend_memory** out) {
      return fails_now(g_import_fails) ? GPUSHARE_DEVICE_OUT_OF_MEMORY
                                       : g_real->phys_import(device, descriptor, bytes, access, out);
    };
    return device::register_backend(&ops).ok();
  }();
  REQUIRE(registered);
}

}  // namespace

TEST_CASE("a device that has no memory for a lane is tried again; one that does not map it is reported") {
  register_failing();
  const Shared shared([](auto& options) { options.devices = {std::string(kFailing) + kDeviceOptions}; });
  Job first("first", 2 * kMiB, 4 * kMiB);
  CHECK_OK(first.run(1));
  {
    g_piece_fails = 1;
    Job second("second", 2 * kMiB, 16 * kMiB);
    CHECK_OK(second.run(2));
    CHECK(g_piece_fails == 0);
    // Growth is refused, and nothing of it stays.
    const uint64_t before = shared.promised();
    const auto iteration = second.begin();
    REQUIRE(iteration->alloc(16 * kMiB, 0).ok());
    g_piece_fails = 1000;
    CHECK(iteration->alloc(4 * kMiB, 0).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
    g_piece_fails = 0;
    REQUIRE_OK(iteration->end());
    eventually([&] {
      CHECK_OK(second.run(3));
      return shared.promised() <= before;
    });
  }
  // A process that cannot map the lane has no session, and holds nothing.
  const uint64_t before = shared.promised();
  const auto runtime = SharedService::open();
  executor::SessionOptions wanted;
  wanted.name = "third";
  wanted.ephemeral_bytes = 4 * kMiB;
  g_import_fails = 1;
  CHECK(runtime->open_session(wanted).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(g_import_fails == 0);
  eventually([&] { return shared.promised() == before; });
  auto third = runtime->open_session(wanted);
  REQUIRE(third.ok());
  REQUIRE_OK((*third)->close());
  CHECK_OK(first.run(4));
  REQUIRE_OK(runtime->close());
}

TEST_CASE("a session goes on sharing its lane when the device has no memory for one of its own") {
  register_failing();
  const Shared shared([](auto& options) { options.devices = {std::string(kFailing) + kDeviceOptions}; });
  Job a("a", 4 * kMiB, 8 * kMiB), b("b", 4 * kMiB, 8 * kMiB);
  REQUIRE(a.session->alloc(memory::Kind::kModel, 4 * kMiB, 0).ok());
  CHECK_OK(a.run(1));
  {
    const auto iteration = a.begin();
    const auto block = iteration->alloc(2 * kMiB, 0);
    REQUIRE(block.ok());
    g_own_fails = 1000;
    CHECK(iteration->keep(*block).code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
    g_own_fails = 0;
    REQUIRE_OK(iteration->end());
  }
  eventually([&] { return shared.promised() == 16 * kMiB; });
  CHECK_OK(a.run(2, 8 * kMiB));
  CHECK_OK(b.run(3, 8 * kMiB));
  CHECK(a.runtime->check() == "");
}
