// Elastic ranges: commit and decommit within limits, who waits and who is asked, silence, paging, and what goes wrong
// in the middle.
// SPDX-License-Identifier: Apache-2.0
#include "executor/range.hpp"

#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <stdexcept>
#include <string>
#include <thread>

#include "base/mutex.hpp"
#include "support/executor_fixture.hpp"
#include "support/status_checks.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT
using executor::Range;
using executor::RangeOptions;
using executor::SessionState;

#define CHECK_CODE(expr, expected) CHECK(code_of(expr) == (expected))

int32_t code_of(const base::Status& status) {
  UNSCOPED_INFO(status.to_string());
  return status.code();
}
template <class T>
int32_t code_of(const base::Result<T>& result) {
  return code_of(result.status());
}

constexpr uint64_t kForEver = GPUSHARE_NO_TIMEOUT;
const Setup kVirtual[] = {kSetups[0], kSetups[2]};

struct Fixture {
  explicit Fixture(const Setup& setup = kSetups[0], uint64_t capacity = 64 * kMiB,
                   const char* policy = "fair") {
    auto options = options_of(setup, policy);
    options.capacity_bytes = capacity;
    runtime = open_runtime(std::move(options));
  }
  std::shared_ptr<executor::Session> session(const char* name, bool guaranteed = true,
                                             uint64_t quota = 0) const {
    auto wanted = need(name, 0, 2 * kMiB);
    wanted.quota_bytes = quota;
    if (!guaranteed) wanted.cls = sched::SessionClass::kOpportunistic;
    return open_session(*runtime, wanted);
  }
  void check() const {
    CHECK(runtime->check() == "");
    const auto info = runtime->info();
    REQUIRE(info.ok());
    CHECK(info->promised_bytes <= info->effective_capacity_bytes);
  }
  std::shared_ptr<executor::Runtime> runtime;
};

std::shared_ptr<Range> open_range(executor::Session& session, const char* name, uint64_t bytes = 256 * kMiB,
                                  executor::GiveBackFunction give_back = {}, uint64_t answer_ns = 0) {
  RangeOptions options;
  options.name = name;
  options.reserved_bytes = bytes;
  options.give_back = std::move(give_back);
  options.answer_ns = answer_ns;
  auto range = session.open_range(std::move(options));
  INFO(range.status().to_string());
  REQUIRE(range.ok());
  return *range;
}

uint64_t committed(const std::shared_ptr<Range>& range) {
  return range->info().committed_bytes;
}

// Real bytes on the host device alone.
bool has_bytes(const Setup& setup) {
  return setup.device[0] == 'h';
}
void paint(memory::Address address, int value, uint64_t bytes) {
  std::memset(reinterpret_cast<void*>(address), value, bytes);  // NOLINT(performance-no-int-to-ptr)
}
bool painted(memory::Address address, int value, uint64_t bytes) {
  const auto* at = reinterpret_cast<const unsigned char*>(address);  // NOLINT(performance-no-int-to-ptr)
  for (uint64_t i = 0; i < bytes; i += 4096)
    if (at[i] != value) return false;
  return true;
}

TEST_CASE("a range grows and shrinks anywhere within its addresses, and counts in its session's promise") {
  const Setup setup = GENERATE(from_range(std::begin(kVirtual), std::end(kVirtual)));
  CAPTURE(setup.device);
  const Fixture f(setup);
  auto session = f.session("engine");
  auto range = open_range(*session, "kv");
  const executor::RangeInfo info = range->info();
  CHECK(info.reserved_bytes == 256 * kMiB);  // four times the device
  CHECK(info.granule_bytes == 2 * kMiB);
  const uint64_t before = f.runtime->info()->promised_bytes;
  CHECK_OK(range->commit(100 * kMiB, 4 * kMiB, 0));
  CHECK_OK(range->commit(98 * kMiB, 8 * kMiB, 0));  // two of four are there
  CHECK_OK(range->commit(0, 2 * kMiB, 0));
  CHECK(committed(range) == 10 * kMiB);
  CHECK(session->info().promised_persistent_bytes == 10 * kMiB);
  CHECK(f.runtime->info()->promised_bytes == before + 10 * kMiB);
  if (has_bytes(setup)) {
    paint(info.address + 98 * kMiB, 7, 8 * kMiB);
    CHECK_OK(range->decommit(100 * kMiB, 2 * kMiB));
    CHECK(painted(info.address + 98 * kMiB, 7, 2 * kMiB));
    CHECK(painted(info.address + 102 * kMiB, 7, 4 * kMiB));
  } else {
    CHECK_OK(range->decommit(100 * kMiB, 2 * kMiB));
  }
  CHECK_OK(range->decommit(0, 256 * kMiB));
  CHECK_OK(range->decommit(0, 256 * kMiB));
  CHECK(committed(range) == 0);
  CHECK(range->info().peak_bytes == 10 * kMiB);
  CHECK(f.runtime->info()->promised_bytes == before);
  f.check();
  // The addresses are found, and nothing can be freed there.
  CHECK_OK(range->commit(2 * kMiB, 2 * kMiB, 0));
  const auto block = f.runtime->find(info.address + 3 * kMiB);
  REQUIRE(block.ok());
  CHECK(block->address == info.address + 2 * kMiB);
  CHECK(block->session == session->id());
  CHECK_CODE(f.runtime->find(info.address), GPUSHARE_NOT_FOUND);
  CHECK_CODE(f.runtime->free(info.address + 2 * kMiB), GPUSHARE_NOT_FOUND);
  CHECK_OK(range->close());
  CHECK_CODE(range->close(), GPUSHARE_INVALID_STATE);
  CHECK_CODE(range->commit(0, 2 * kMiB, kForEver), GPUSHARE_INVALID_STATE);
  CHECK_CODE(range->decommit(0, 2 * kMiB), GPUSHARE_INVALID_STATE);
  CHECK(f.runtime->info()->promised_bytes == before);
  f.check();
}

TEST_CASE("what a range refuses") {
  const Fixture f;
  auto session = f.session("engine");
  RangeOptions none;
  CHECK_CODE(session->open_range(none), GPUSHARE_INVALID_ARGUMENT);
  none.reserved_bytes = (uint64_t{1} << 40) + 1;
  CHECK_CODE(session->open_range(none), GPUSHARE_INVALID_ARGUMENT);
  auto range = open_range(*session, "kv", 7 * kMiB);
  CHECK(range->info().reserved_bytes == 8 * kMiB);
  CHECK_CODE(range->commit(0, 0, 0), GPUSHARE_INVALID_ARGUMENT);
  CHECK_CODE(range->commit(1, 2 * kMiB, 0), GPUSHARE_INVALID_ARGUMENT);
  CHECK_CODE(range->commit(0, 3 * kMiB, 0), GPUSHARE_INVALID_ARGUMENT);
  CHECK_CODE(range->commit(2 * kMiB, 8 * kMiB, 0), GPUSHARE_INVALID_ARGUMENT);
  CHECK_CODE(range->commit(UINT64_MAX - kMiB, 8 * kMiB, 0), GPUSHARE_INVALID_ARGUMENT);
  CHECK_CODE(range->decommit(8 * kMiB, 2 * kMiB), GPUSHARE_INVALID_ARGUMENT);
  auto large = open_range(*session, "large");
  CHECK_CODE(large->commit(0, 66 * kMiB, kForEver), GPUSHARE_EXCEEDS_CAPACITY);
  CHECK(committed(large) == 0);
  f.check();
  const Fixture contiguous(kSetups[1]);
  auto other = contiguous.session("engine");
  none.reserved_bytes = 8 * kMiB;
  const auto refused = other->open_range(none);
  CHECK_CODE(refused, GPUSHARE_UNSUPPORTED);
  CHECK(refused.status().message().find("virtual layout") != std::string::npos);
}

TEST_CASE("a range stays within its session's quota, and takes free bytes of the heap for that") {
  const Fixture f;
  auto session = f.session("engine", true, 16 * kMiB);
  auto range = open_range(*session, "kv");
  const auto model = session->alloc(memory::Kind::kModel, 4 * kMiB, 0);
  REQUIRE(model.ok());
  CHECK_OK(range->commit(0, 8 * kMiB, 0));
  CHECK_CODE(range->commit(8 * kMiB, 8 * kMiB, kForEver), GPUSHARE_QUOTA_EXCEEDED);
  CHECK_CODE(session->alloc(memory::Kind::kModel, 6 * kMiB, 0), GPUSHARE_QUOTA_EXCEEDED);
  CHECK_OK(session->free(*model));
  CHECK_OK(range->commit(8 * kMiB, 4 * kMiB, 0));  // its free bytes go to the range
  CHECK(committed(range) == 12 * kMiB);
  CHECK_OK(session->set_quota(8 * kMiB));
  CHECK(session->info().promised_persistent_bytes == 12 * kMiB);  // a target: the owner gives it back
  CHECK_CODE(range->commit(12 * kMiB, 2 * kMiB, kForEver), GPUSHARE_QUOTA_EXCEEDED);
  CHECK_OK(range->decommit(0, 8 * kMiB));
  CHECK(session->info().effective_quota_bytes == 8 * kMiB);
  CHECK_OK(range->commit(0, 2 * kMiB, 0));
  f.check();
}

TEST_CASE("two ranges trade: who waits asks, the other gives in its function or later") {
  const Fixture f;
  auto a = f.session("a"), b = f.session("b");
  std::shared_ptr<Range> first;
  std::atomic<uint64_t> asked{0};
  first = open_range(
      *a, "first", 128 * kMiB,
      [&](uint64_t bytes, uint64_t within_ns) {
        asked += bytes;
        const uint64_t has = committed(first);
        const uint64_t gives = std::min(bytes, has);
        const bool gave = within_ns <= 10'000'000'000 && first->decommit(has - gives, gives).ok();
        return gave ? gives : 0;
      },
      10'000'000'000);
  auto second = open_range(*b, "second", 128 * kMiB);
  CHECK_OK(first->commit(0, 48 * kMiB, 0));
  CHECK_CODE(second->commit(0, 20 * kMiB, 0), GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(asked == 0);  // who does not wait asks nobody
  CHECK_OK(second->commit(0, 20 * kMiB, kForEver));
  CHECK(asked > 0);
  CHECK(committed(first) <= 40 * kMiB);
  CHECK(committed(second) == 20 * kMiB);
  CHECK(first->info().requests == 1);
  CHECK(first->info().requested_bytes == asked);
  CHECK(first->info().silences == 0);
  CHECK(second->info().waits == 1);
  f.check();
  // Bytes that come from somewhere else.
  auto later = std::async(std::launch::async, [&] {
    while (second->info().waits < 2) std::this_thread::yield();
    return first->close();
  });
  CHECK_OK(second->commit(0, 60 * kMiB, kForEver));
  CHECK_OK(later.get());
  f.check();
}

TEST_CASE("who does not answer keeps its bytes and loses its class, and the one who asked is told its name") {
  const Fixture f;
  const int how = GENERATE(0, 1, 2);
  CAPTURE(how);
  auto a = f.session("deaf"), b = f.session("asks");
  std::promise<void> release;
  auto released = release.get_future().share();
  auto first = open_range(
      *a, "hoard", 128 * kMiB,
      [&](uint64_t bytes, uint64_t) -> uint64_t {
        if (how == 0) released.wait();                             // never answers in time
        if (how == 1) throw std::runtime_error("out of my mind");  // does not answer
        return bytes;                                              // breaks its word
      },
      1'000'000);
  auto second = open_range(*b, "wants", 128 * kMiB);
  CHECK_OK(first->commit(0, 58 * kMiB, 0));
  auto iteration = a->begin(kForEver);  // so that it cannot be paged out
  REQUIRE(iteration.ok());
  const base::Status refused = second->commit(0, 8 * kMiB, 100'000'000);
  CHECK_CODE(refused, GPUSHARE_TIMED_OUT);
  CHECK(refused.message().find("no answer from elastic range 'hoard' of session 'deaf'") !=
        std::string::npos);
  CHECK(committed(first) == 58 * kMiB);
  CHECK(first->info().silent);
  CHECK(first->info().silences == 1);
  CHECK(second->info().unanswered_by == a->id());
  // Now of a lower class: between its iterations its bytes go to host memory, and come back as they were.
  paint(first->info().address, 42, 58 * kMiB);
  CHECK_OK((*iteration)->end());
  CHECK_OK(second->commit(0, 8 * kMiB, kForEver));
  CHECK(a->info().state == SessionState::kPagedOut);
  f.check();
  CHECK_OK(second->close());
  REQUIRE(a->wait_admitted(kForEver).ok());
  CHECK(painted(first->info().address, 42, 58 * kMiB));
  // Giving something brings its class back.
  CHECK_OK(first->decommit(0, 2 * kMiB));
  CHECK_FALSE(first->info().silent);
  release.set_value();
  CHECK_OK(first->close());
  f.check();
}

TEST_CASE("a range is paged out and in with its session, and may shrink meanwhile") {
  const Setup setup = GENERATE(from_range(std::begin(kVirtual), std::end(kVirtual)));
  CAPTURE(setup.device);
  const Fixture f(setup);
  auto low = f.session("low", false), high = f.session("high");
  auto range = open_range(*low, "kv");
  CHECK_OK(range->commit(8 * kMiB, 8 * kMiB, 0));
  CHECK_OK(range->commit(32 * kMiB, 4 * kMiB, 0));
  const memory::Address base = range->info().address;
  if (has_bytes(setup)) {
    paint(base + 8 * kMiB, 1, 8 * kMiB);
    paint(base + 32 * kMiB, 2, 4 * kMiB);
  }
  auto wants = open_range(*high, "wants");
  CHECK_OK(wants->commit(
      0, 58 * kMiB, kForEver));  // the guaranteed one never goes without what an opportunistic one could give
  CHECK(low->info().state == SessionState::kPagedOut);
  if (has_bytes(setup)) paint(wants->info().address, 99, 58 * kMiB);
  f.check();
  CHECK_CODE(range->commit(0, 2 * kMiB, 0), GPUSHARE_TIMED_OUT);  // what the session waits for
  CHECK_OK(range->decommit(10 * kMiB, 2 * kMiB));
  CHECK(committed(range) == 10 * kMiB);
  auto another = open_range(*low, "another");  // opened while it is out
  CHECK_OK(wants->decommit(0, 58 * kMiB));
  REQUIRE(low->wait_admitted(kForEver).ok());
  if (has_bytes(setup)) {
    CHECK(painted(base + 8 * kMiB, 1, 2 * kMiB));
    CHECK(painted(base + 12 * kMiB, 1, 4 * kMiB));
    CHECK(painted(base + 32 * kMiB, 2, 4 * kMiB));
  }
  CHECK_OK(another->commit(0, 2 * kMiB, 0));
  CHECK(low->info().promised_persistent_bytes == 12 * kMiB);
  f.check();
}

TEST_CASE("a failure in the middle leaves a range as it was") {
  const Setup setup = GENERATE(from_range(std::begin(kVirtual), std::end(kVirtual)));
  const uint32_t kind =
      GENERATE(uint32_t{GPUSHARE_FAULT_MAP_FAILS}, uint32_t{GPUSHARE_FAULT_DEVICE_OUT_OF_MEMORY});
  const uint64_t at = GENERATE(uint64_t{1}, uint64_t{2}, uint64_t{4});
  CAPTURE(setup.device, kind, at);
  const Fixture f(setup);
  auto session = f.session("engine");
  auto range = open_range(*session, "kv");
  // Every second granule, so that each of the others is mapped by a call of its own.
  for (const uint64_t i : {1, 3, 5}) CHECK_OK(range->commit(i * 2 * kMiB, 2 * kMiB, 0));
  const uint64_t before = f.runtime->info()->promised_bytes;
  REQUIRE(f.runtime->device().set_fault({sizeof(gpushare_backend_fault), kind, at, 1.0}).ok());
  CHECK_CODE(range->commit(0, 14 * kMiB, 0), GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(committed(range) == 6 * kMiB);
  CHECK(f.runtime->info()->promised_bytes == before);
  f.check();
  CHECK_OK(range->commit(0, 14 * kMiB, 0));
  CHECK_OK(range->decommit(12 * kMiB, 2 * kMiB));
  f.check();
  // The host has no memory to page it out to: it stays, and the one who waits is refused. Then the copy fails.
  auto high = f.session("high");
  auto low = f.session("low", false);
  auto victim = open_range(*low, "victim");
  CHECK_OK(victim->commit(0, 20 * kMiB, 0));
  if (has_bytes(setup)) paint(victim->info().address, 3, 20 * kMiB);
  auto wants = open_range(*high, "wants");
  for (const uint32_t fault :
       {uint32_t{GPUSHARE_FAULT_HOST_OUT_OF_MEMORY}, uint32_t{GPUSHARE_FAULT_LAUNCH_FAILS}}) {
    REQUIRE(
        f.runtime->device().set_fault({sizeof(gpushare_backend_fault), fault, at == 4 ? 2 : at, 1.0}).ok());
    const base::Status status = wants->commit(0, 40 * kMiB, 20'000'000);
    CHECK((status.ok() || status.code() == GPUSHARE_TIMED_OUT));
    CHECK_OK(wants->decommit(0, 40 * kMiB));
    CHECK_OK(f.runtime->device().set_fault({sizeof(gpushare_backend_fault), GPUSHARE_FAULT_NONE, 1, 1.0}));
    REQUIRE(low->wait_admitted(kForEver).ok());
    if (has_bytes(setup)) CHECK(painted(victim->info().address, 3, 20 * kMiB));
    f.check();
  }
}

TEST_CASE("a copy of a range that fails is made again, and the heap goes out and comes back with the range") {
  const Setup setup = GENERATE(from_range(std::begin(kVirtual), std::end(kVirtual)));
  const uint64_t at = GENERATE(uint64_t{1}, uint64_t{2}, uint64_t{9});
  CAPTURE(setup.device, at);
  const Fixture f(setup);
  auto low = f.session("low", false), high = f.session("high");
  auto victim = open_range(*low, "victim"), wants = open_range(*high, "wants");
  CHECK_OK(victim->commit(0, 40 * kMiB, 0));
  if (has_bytes(setup)) paint(victim->info().address, 3, 40 * kMiB);
  // The session has no other bytes: its heap is out before the first copy.
  REQUIRE(f.runtime->device()
              .set_fault({sizeof(gpushare_backend_fault), GPUSHARE_FAULT_LAUNCH_FAILS, at, 1.0})
              .ok());
  CHECK_OK(wants->commit(0, 40 * kMiB, kForEver));
  CHECK(low->info().state == SessionState::kPagedOut);
  CHECK_OK(wants->decommit(0, 40 * kMiB));
  REQUIRE(low->wait_admitted(kForEver).ok());
  if (has_bytes(setup)) CHECK(painted(victim->info().address, 3, 40 * kMiB));
  CHECK_OK(low->alloc(memory::Kind::kModel, 2 * kMiB, 0).status());
  f.check();
}

TEST_CASE("the end of a session or runtime ends its ranges, and those that wait") {
  auto f = std::make_unique<Fixture>();
  auto a = f->session("a"), b = f->session("b");
  auto first = open_range(*a, "first", 128 * kMiB, [](uint64_t, uint64_t) -> uint64_t { return 0; });
  auto second = open_range(*b, "second", 128 * kMiB);
  CHECK_OK(first->commit(0, 58 * kMiB, 0));
  // Room comes with the end of the other session.
  auto waits = std::async(std::launch::async, [&] { return second->commit(0, 30 * kMiB, kForEver); });
  while (first->info().requests == 0) std::this_thread::yield();
  CHECK_OK(a->close());
  CHECK_OK(waits.get());
  CHECK_CODE(first->commit(0, 2 * kMiB, kForEver), GPUSHARE_INVALID_STATE);
  CHECK(first->info().committed_bytes == 0);
  CHECK(first->info().peak_bytes == 58 * kMiB);
  CHECK_OK(first->close());
  f->check();
  // A wait ends with its own session, and with the runtime.
  auto c = f->session("c");
  auto third = open_range(*c, "third", 128 * kMiB);
  waits = std::async(std::launch::async, [&] { return third->commit(0, 40 * kMiB, kForEver); });
  while (third->info().waits == 0) std::this_thread::yield();
  CHECK_OK(c->close());
  CHECK_FALSE(waits.get().ok());
  auto d = f->session("d");
  auto fourth = open_range(*d, "fourth", 128 * kMiB);
  waits = std::async(std::launch::async, [&] { return fourth->commit(0, 40 * kMiB, kForEver); });
  while (fourth->info().waits == 0) std::this_thread::yield();
  CHECK_OK(f->runtime->close());
  CHECK_FALSE(waits.get().ok());
  CHECK(fourth->info().committed_bytes == 0);
  CHECK_CODE(second->decommit(0, 2 * kMiB), GPUSHARE_INVALID_STATE);
}

TEST_CASE("waiting ranges are served by class, then arrival, and nobody passes them") {
  const Fixture f;
  auto holder = f.session("holder"), low = f.session("low", false), high = f.session("high");
  auto held = open_range(*holder, "held");
  CHECK_OK(held->commit(0, 54 * kMiB, 0));
  auto slow = open_range(*low, "slow"), fast = open_range(*high, "fast"), late = open_range(*high, "late");
  auto second = std::async(std::launch::async, [&] { return slow->commit(0, 10 * kMiB, kForEver); });
  while (slow->info().waits == 0) std::this_thread::yield();
  auto first = std::async(std::launch::async, [&] { return fast->commit(0, 10 * kMiB, kForEver); });
  while (fast->info().waits == 0) std::this_thread::yield();
  CHECK_CODE(late->commit(0, 2 * kMiB, 0), GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK_OK(held->commit(0, 54 * kMiB, 0));  // what is there waits for nobody
  CHECK_OK(held->decommit(0, 8 * kMiB));
  CHECK_OK(first.get());
  CHECK(slow->info().committed_bytes == 0);
  CHECK_OK(held->decommit(8 * kMiB, 10 * kMiB));
  CHECK_OK(second.get());
  f.check();
}

TEST_CASE("bytes go to another range after the work that uses them") {
  const Fixture f(kSetups[0], 16 * kMiB);
  auto a = f.session("a"), b = f.session("b");
  auto first = open_range(*a, "first"), second = open_range(*b, "second");
  CHECK_OK(first->commit(0, 10 * kMiB, 0));
  auto side = f.runtime->create_stream(0);
  REQUIRE(side.ok());
  std::promise<void> go;
  auto gone = go.get_future().share();
  static std::shared_future<void>* gate = nullptr;
  gate = &gone;
  CHECK_OK((*side)->launch_host([](void*) { gate->wait(); }, nullptr));
  CHECK_OK((*side)->fill(first->info().address, 5, 10 * kMiB));
  CHECK_OK(f.runtime->record_use(first->info().address + kMiB, **side));
  CHECK_OK(first->decommit(0, 10 * kMiB));  // does not wait
  auto taken = std::async(std::launch::async, [&] { return second->commit(0, 10 * kMiB, kForEver); });
  CHECK(taken.wait_for(std::chrono::milliseconds(20)) == std::future_status::timeout);
  go.set_value();
  CHECK_OK(taken.get());
  paint(second->info().address, 9, 10 * kMiB);
  CHECK_OK((*side)->synchronize());
  CHECK(painted(second->info().address, 9, 10 * kMiB));
  CHECK_OK((*side)->release());
  f.check();
}

TEST_CASE("a function that closes its own range is refused") {
  const Fixture f;
  auto a = f.session("a"), b = f.session("b");
  std::shared_ptr<Range> first;
  std::atomic<int32_t> closed{-1}, waited{-1};
  first = open_range(*a, "first", 128 * kMiB, [&](uint64_t bytes, uint64_t) {
    closed = first->close().code();
    waited = first->commit(64 * kMiB, 32 * kMiB, kForEver).code();  // does not wait here
    return first->decommit(0, 58 * kMiB).ok() ? bytes : 0;
  });
  auto second = open_range(*b, "second", 128 * kMiB);
  CHECK_OK(first->commit(0, 58 * kMiB, 0));
  CHECK_OK(second->commit(0, 30 * kMiB, kForEver));
  CHECK_OK(first->close());
  CHECK(closed == GPUSHARE_INVALID_STATE);
  CHECK(waited == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  f.check();
}

}  // namespace
