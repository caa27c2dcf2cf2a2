// Host functions that call the library while another thread waits, inside of the library, for the very work that they
// are part of. None of the library's locks may be held over such a wait. A call in a host function that would have to
// wait says INVALID_STATE.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <functional>
#include <string>
#include <thread>

#include "executor/range.hpp"
#include "support/executor_fixture.hpp"
#include "support/first_fault.hpp"
#include "support/gate.hpp"
#include "support/status_checks.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT

constexpr Setup kVirtual[] = {{"host?total_bytes=134217728", memory::Layout::kVirtual},
                              {"sim?total_bytes=134217728", memory::Layout::kVirtual}};
// So often a host function makes its calls, so that some fall into the other thread's wait.
constexpr int kCalls = 2000;

// Device work that makes calls of the library. On the sim device it runs on the thread that waits for it, in the middle
// of that thread's call.
struct Calls {
  std::function<void()> make;
  std::atomic<bool> may_begin{false}, done{false};
  static void run(void* user_data) {
    auto& self = *static_cast<Calls*>(user_data);
    while (!self.may_begin.load()) std::this_thread::yield();
    self.make();
    self.done.store(true);
  }
};

// What came instead. For any thread.
class Unexpected {
 public:
  void expect(const char* call, const base::Status& status, std::initializer_list<int32_t> codes) {
    if (std::find(codes.begin(), codes.end(), status.code()) == codes.end())
      faults_.add(std::string(call) + ": " + status.to_string());
  }
  std::string first() const { return faults_.first(); }

 private:
  FirstFault faults_;
};

TEST_CASE("blocks move at a boundary while the session's stream runs a function that calls the library") {
  const Setup setup = GENERATE(from_range(std::begin(kVirtual), std::end(kVirtual)));
  CAPTURE(setup.device);
  Unexpected seen;
  auto runtime = open_runtime(options_of(setup));
  auto options = need("spills", 16 * kMiB, kMiB);
  options.allow_spill = true;
  auto session = open_session(*runtime, options);
  std::vector<memory::Address> blocks;
  {
    auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(iteration.ok());
    for (int i = 0; i < 6; ++i) {
      const auto block = session->alloc(memory::Kind::kModel, 2 * kMiB, 0);
      REQUIRE(block.ok());
      blocks.push_back(*block);
    }
    REQUIRE_OK((*iteration)->end());
  }
  REQUIRE_OK(session->set_quota(4 * kMiB));
  auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);  // some go out
  REQUIRE(iteration.ok());
  REQUIRE_OK(session->set_quota(2 * kMiB));
  Calls calls;
  calls.make = [&] {
    for (int i = 0; i < kCalls; ++i) {
      const auto block = session->alloc(memory::Kind::kModel, 4096, 0);
      seen.expect("allocate", block.status(), {GPUSHARE_OK, GPUSHARE_INVALID_STATE, GPUSHARE_QUOTA_EXCEEDED});
      if (block.ok()) seen.expect("free", session->free(*block), {GPUSHARE_OK});
      (void)session->info();
      (void)runtime->info();
      (void)runtime->find(blocks[1]);
      (void)session->set_quota(2 * kMiB);
      seen.expect("hold", session->hold(GPUSHARE_NO_TIMEOUT).status(), {GPUSHARE_OK, GPUSHARE_INVALID_STATE});
    }
    seen.expect("free a spilled block", runtime->free(blocks[0]), {GPUSHARE_OK});
    seen.expect(
        "grow", session->alloc(memory::Kind::kModel, 64 * kMiB, 0).status(),
        {GPUSHARE_INVALID_STATE, GPUSHARE_QUOTA_EXCEEDED, GPUSHARE_DEVICE_OUT_OF_MEMORY, GPUSHARE_OK});
  };
  const auto stream = (*iteration)->stream();
  REQUIRE(stream.ok());
  REQUIRE_OK((*stream)->launch_host(Calls::run, &calls));
  REQUIRE_OK((*iteration)->end());
  calls.may_begin.store(true);
  for (int i = 0; i < 4; ++i) {
    auto next = session->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(next.ok());
    REQUIRE_OK((*next)->end());
  }
  REQUIRE_OK(runtime->synchronize(GPUSHARE_NO_TIMEOUT));
  CHECK(calls.done.load());
  CHECK(seen.first() == "");
  CHECK(runtime->check() == "");
  CHECK(runtime->close().ok());
}

TEST_CASE("a range that waits for device work lets a function of that work use the range") {
  const Setup setup = GENERATE(from_range(std::begin(kVirtual), std::end(kVirtual)));
  CAPTURE(setup.device);
  Unexpected seen;
  auto runtime = open_runtime([&] {
    auto options = options_of(setup);
    options.capacity_bytes = 16 * kMiB;
    return options;
  }());
  auto session = open_session(*runtime, need("ranges", 2 * kMiB, 2 * kMiB));
  executor::RangeOptions reserved;
  reserved.reserved_bytes = 64 * kMiB;
  auto range = session->open_range(reserved);
  REQUIRE(range.ok());
  const uint64_t granule = (*range)->info().granule_bytes;
  uint64_t count = 0;
  while ((*range)->commit(count * granule, granule, 0).ok()) ++count;
  REQUIRE(count > 3);
  auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(iteration.ok());
  Calls calls;
  calls.make = [&] {
    for (int i = 0; i < kCalls; ++i) {
      (void)(*range)->info();
      (void)session->info();
      seen.expect("commit what is there", (*range)->commit(2 * granule, granule, 0),
                  {GPUSHARE_OK, GPUSHARE_INVALID_STATE, GPUSHARE_DEVICE_OUT_OF_MEMORY});
      seen.expect("commit beyond", (*range)->commit((count + 8) * granule, granule, GPUSHARE_NO_TIMEOUT),
                  {GPUSHARE_INVALID_STATE, GPUSHARE_DEVICE_OUT_OF_MEMORY});
      seen.expect("grow", session->alloc(memory::Kind::kModel, 8 * kMiB, 0).status(),
                  {GPUSHARE_INVALID_STATE, GPUSHARE_DEVICE_OUT_OF_MEMORY});
    }
    seen.expect("decommit", (*range)->decommit((count - 1) * granule, granule),
                {GPUSHARE_OK, GPUSHARE_INVALID_STATE});
  };
  const auto stream = (*iteration)->stream();
  REQUIRE(stream.ok());
  REQUIRE_OK((*stream)->launch_host(Calls::run, &calls));
  REQUIRE_OK((*range)->decommit(0, 2 * granule));  // in the stream's order: after the function
  calls.may_begin.store(true);
  REQUIRE_OK((*range)->commit((count + 2) * granule, 2 * granule, GPUSHARE_NO_TIMEOUT));
  REQUIRE_OK((*iteration)->end());
  REQUIRE_OK(runtime->synchronize(GPUSHARE_NO_TIMEOUT));
  CHECK(calls.done.load());
  CHECK(seen.first() == "");
  CHECK(runtime->check() == "");
  REQUIRE_OK((*range)->close());
  CHECK(runtime->close().ok());
}

TEST_CASE("a range waits for device work no longer than its caller allows") {
  auto options = options_of(kSetups[0]);
  options.capacity_bytes = 16 * kMiB;
  auto runtime = open_runtime(std::move(options));
  auto session = open_session(*runtime, need("ranges", 2 * kMiB, 2 * kMiB));
  executor::RangeOptions reserved;
  reserved.reserved_bytes = 64 * kMiB;
  auto range = session->open_range(reserved);
  REQUIRE(range.ok());
  const uint64_t granule = (*range)->info().granule_bytes;
  uint64_t count = 0;
  while ((*range)->commit(count * granule, granule, 0).ok()) ++count;
  REQUIRE(count > 3);
  auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(iteration.ok());
  const auto stream = (*iteration)->stream();
  REQUIRE(stream.ok());
  std::atomic<bool> hangs{true};
  REQUIRE_OK(
      (*stream)->launch_host([](void* flag) { static_cast<std::atomic<bool>*>(flag)->wait(true); }, &hangs));
  REQUIRE_OK((*range)->decommit(0, 2 * granule));  // in the stream's order: after the function
  const base::Status late = (*range)->commit((count + 2) * granule, 2 * granule, 10'000'000);
  CHECK(late.code() == GPUSHARE_TIMED_OUT);
  CHECK(late.message().find("work on the device") != std::string::npos);
  hangs = false;
  hangs.notify_all();
  REQUIRE_OK((*range)->commit((count + 2) * granule, 2 * granule, GPUSHARE_NO_TIMEOUT));
  REQUIRE_OK((*iteration)->end());
  CHECK(runtime->check() == "");
  REQUIRE_OK((*range)->close());
  CHECK(runtime->close().ok());
}

TEST_CASE("a range is not closed in a function that the device waits for") {
  const Setup setup = GENERATE(from_range(std::begin(kVirtual), std::end(kVirtual)));
  auto runtime = open_runtime(options_of(setup));
  auto session = open_session(*runtime, need("ranges", 2 * kMiB, 2 * kMiB));
  executor::RangeOptions reserved;
  reserved.reserved_bytes = 8 * kMiB;
  auto range = session->open_range(reserved);
  REQUIRE(range.ok());
  auto side = runtime->create_stream(0);
  REQUIRE(side.ok());
  base::Status closed;
  Calls calls;
  calls.make = [&] { closed = (*range)->close(); };
  calls.may_begin.store(true);
  REQUIRE_OK((*side)->launch_host(Calls::run, &calls));
  REQUIRE_OK((*side)->synchronize());
  CHECK(closed.code() == GPUSHARE_INVALID_STATE);
  CHECK_OK((*range)->close());
  CHECK(runtime->close().ok());
}

// Memory that a heap or a lane needs may be in use by a function that asks the same session for memory.
TEST_CASE("a session grows into bytes that are still in use by a function that allocates for the session") {
  const Setup setup = GENERATE(from_range(std::begin(kVirtual), std::end(kVirtual)));
  const bool lane = GENERATE(false, true);
  CAPTURE(setup.device, lane);
  Unexpected seen;
  auto runtime = open_runtime([&] {
    auto options = options_of(setup);
    options.capacity_bytes = 32 * kMiB;
    return options;
  }());
  auto gives = open_session(*runtime, need("gives", 2 * kMiB, 2 * kMiB));
  auto grows = open_session(*runtime, need("grows", 2 * kMiB, 2 * kMiB));
  executor::RangeOptions reserved;
  reserved.reserved_bytes = 64 * kMiB;
  auto range = gives->open_range(reserved);
  REQUIRE(range.ok());
  const uint64_t granule = (*range)->info().granule_bytes;
  uint64_t count = 0;
  while ((*range)->commit(count * granule, granule, 0).ok()) ++count;
  auto side = runtime->create_stream(0);
  REQUIRE(side.ok());
  Calls calls;
  calls.make = [&] {
    for (int i = 0; i < kCalls; ++i) {
      const auto block = grows->alloc(memory::Kind::kModel, 12 * kMiB, 0);
      seen.expect("grow", block.status(),
                  {GPUSHARE_OK, GPUSHARE_INVALID_STATE, GPUSHARE_DEVICE_OUT_OF_MEMORY});
      if (block.ok()) seen.expect("free", grows->free(*block), {GPUSHARE_OK});
      (void)grows->info();
      (void)runtime->info();
    }
  };
  REQUIRE_OK((*side)->launch_host(Calls::run, &calls));
  REQUIRE_OK(runtime->record_use((*range)->info().address, **side));
  REQUIRE_OK((*range)->decommit(0, count * granule));
  calls.may_begin.store(true);
  if (lane) {
    auto iteration = grows->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(iteration.ok());
    const auto block = (*iteration)->alloc(8 * kMiB, 0);
    INFO(block.status().to_string());
    CHECK((block.ok() || block.status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY));
    REQUIRE_OK((*iteration)->end());
  } else {
    const auto block = grows->alloc(memory::Kind::kModel, 8 * kMiB, 0);
    INFO(block.status().to_string());
    CHECK((block.ok() || block.status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY));
  }
  REQUIRE_OK((*side)->synchronize());
  CHECK(seen.first() == "");
  CHECK(runtime->check() == "");
  REQUIRE_OK((*range)->close());
  CHECK(runtime->close().ok());
}

// The sim device moves its clock, and runs host functions, when it has been asked often enough about work that has not
// been done. An allocation asks about blocks that were freed but are still in use elsewhere.
TEST_CASE("an allocation's questions to a simulated device run no function under the allocation's lock") {
  const bool ephemeral = GENERATE(false, true);
  auto runtime = open_runtime(options_of(kSetups[2]));
  auto session = open_session(*runtime, need("asks", 8 * kMiB, 8 * kMiB));
  session->set_quota(16 * kMiB).ok();
  auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(iteration.ok());
  auto side = runtime->create_stream(0);
  REQUIRE(side.ok());
  const auto take = [&] {
    return ephemeral ? (*iteration)->alloc(6 * kMiB, 0) : session->alloc(memory::Kind::kModel, 6 * kMiB, 0);
  };
  const auto block = take();
  REQUIRE(block.ok());
  Calls calls;
  calls.make = [&] { (void)take(); };
  calls.may_begin.store(true);
  REQUIRE_OK((*side)->launch_host(Calls::run, &calls));
  REQUIRE_OK(runtime->record_use(*block, **side));
  REQUIRE_OK(runtime->free(*block));
  for (int i = 0; i < 100; ++i) {
    const auto again = take();
    if (again.ok()) REQUIRE_OK(runtime->free(*again));
  }
  REQUIRE_OK((*side)->synchronize());
  CHECK(calls.done.load());
  REQUIRE_OK((*iteration)->end());
  CHECK(runtime->check() == "");
  CHECK(runtime->close().ok());
}

}  // namespace
