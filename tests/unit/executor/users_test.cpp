// Threads that are inside while something ends: another thread ends the iteration, the runtime closes under a
// function of the caller's, a stream's release or a wait; a progress function that asks the runtime.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "executor/internal.hpp"
#include "support/executor_fixture.hpp"
#include "support/sanitizers.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT

void pause() {
  std::this_thread::sleep_for(std::chrono::microseconds(100));
}
// Gives what must not happen a while to happen.
void wait_a_while_for(const std::atomic<bool>& flag) {
  for (int i = 0; i < 2000 && !flag; ++i) pause();
}
void wait_for(const std::atomic<bool>& flag) {
  while (!flag) pause();
}

TEST_CASE("iterations that another thread ends leave nothing with the thread that began them") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  auto runtime = open_runtime(options_of(setup));
  const auto session = open_session(*runtime, need("s", 0, kMiB));
  const auto bindings = [] {
    size_t count = 0;
    for (const auto* binding = executor::thread_bindings(); binding != nullptr; binding = binding->outer)
      ++count;
    return count;
  };
  const size_t before = bindings();
  for (int i = 0; i < 100; ++i) {
    auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(iteration.ok());
    base::Status ended;
    std::thread([&] { ended = (*iteration)->end(); }).join();
    REQUIRE(ended.ok());
    REQUIRE(bindings() <= before + 1);
  }
  CHECK(runtime->close().ok());
}

TEST_CASE("a session orders other streams by an event that goes with its memory") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  auto runtime = open_runtime(options_of(setup));
  const auto session = open_session(*runtime, need("s", kMiB, kMiB));
  const auto side = runtime->create_stream(0), other = runtime->create_stream(0);
  REQUIRE(side.ok());
  REQUIRE(other.ok());
  for (int i = 0; i < 3; ++i) {
    CHECK(session->order_stream(**side).ok());
    const auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(iteration.ok());
    std::thread([&] { CHECK(session->order_stream(**other).ok()); }).join();
    CHECK(session->order_stream(**side).ok());
    CHECK((*iteration)->end().ok());
  }
  // The device says what is left when it is closed; session and streams are still held here.
  CHECK(runtime->close().ok());
  CHECK_FALSE(session->order_stream(**side).ok());
}

TEST_CASE("a progress function that asks the runtime is not called inside itself, and in order") {
  auto options = options_of(kSetups[0]);
  std::atomic<bool> go{false}, second_enqueued{false};
  std::atomic<int> calls{0}, inside{0}, most_inside{0};
  std::atomic<bool> in_order{true};
  executor::Runtime* self = nullptr;
  options.on_progress = [&](const executor::Progress& progress) {
    most_inside = std::max<int>(most_inside, ++inside);
    if (progress.iterations_done == 1) {
      // The next one finishes on the device, and this asks until the runtime has seen that.
      wait_for(second_enqueued);
      while (self->info()->iterations_done < 2) pause();
    }
    if (progress.iterations_done != static_cast<uint64_t>(++calls)) in_order = false;
    --inside;
  };
  auto runtime = open_runtime(std::move(options));
  self = runtime.get();
  const auto session = open_session(*runtime, need("s", 0, kMiB));
  for (int i = 0; i < 2; ++i) {
    auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(iteration.ok());
    const auto stream = (*iteration)->stream();
    REQUIRE(stream.ok());
    const auto wait = [](void* flag) { wait_for(*static_cast<std::atomic<bool>*>(flag)); };
    REQUIRE((*stream)->launch_host(wait, &go).ok());
    REQUIRE((*iteration)->end().ok());
  }
  second_enqueued = true;
  go = true;
  while (calls < 2) pause();
  CHECK(most_inside == 1);
  CHECK(in_order);
  CHECK(runtime->close().ok());
  CHECK(calls == 2);
}

TEST_CASE("a runtime does not close under a progress function on another thread") {
  auto options = options_of(kSetups[0]);
  std::atomic<bool> inside{false}, closed{false}, closed_inside{false};
  options.on_progress = [&](const executor::Progress&) {
    inside = true;
    wait_a_while_for(closed);
    closed_inside = closed.load();
  };
  auto runtime = open_runtime(std::move(options));
  const auto session = open_session(*runtime, need("s", 0, kMiB));
  std::thread user([&] {
    // Nothing is enqueued: whoever ends it sees that it has passed.
    auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
    if (iteration.ok()) (void)(*iteration)->end();
  });
  wait_for(inside);
  CHECK(runtime->close().ok());
  closed = true;
  user.join();
  CHECK_FALSE(closed_inside);
}

TEST_CASE("a runtime does not close under an out-of-memory function on another thread") {
  auto runtime = open_runtime(options_of(kSetups[0]));
  std::atomic<bool> inside{false}, closed{false}, closed_inside{false};
  REQUIRE(runtime
              ->set_out_of_memory_function([&](uint64_t, uint64_t) {
                inside = true;
                wait_a_while_for(closed);
                closed_inside = closed.load();
                return false;
              })
              .ok());
  const auto holder = open_session(*runtime, need("holder", 160 * kMiB, kMiB));
  const auto session = open_session(*runtime, need("s", kMiB, kMiB));
  std::atomic<int32_t> code{0};
  std::thread user([&] { code = session->alloc(memory::Kind::kModel, 128 * kMiB, 0).status().code(); });
  wait_for(inside);
  CHECK(runtime->close().ok());
  closed = true;
  user.join();
  CHECK_FALSE(closed_inside);
  CHECK(code != GPUSHARE_OK);
}

TEST_CASE("a runtime that closes waits for a stream that another thread releases") {
  auto runtime = open_runtime(options_of(kSetups[0]));
  auto stream = runtime->create_stream(0);
  REQUIRE(stream.ok());
  struct {
    std::atomic<bool> running{false}, go{false};
  } data;
  REQUIRE((*stream)
              ->launch_host(
                  [](void* user_data) {
                    auto& d = *static_cast<decltype(data)*>(user_data);
                    d.running = true;
                    wait_for(d.go);
                  },
                  &data)
              .ok());
  wait_for(data.running);
  const bool by_release = GENERATE(true, false);  // else its last pointer goes
  std::atomic<bool> releasing{false}, closed{false};
  std::thread releaser([&] {
    releasing = true;
    if (by_release)
      (void)(*stream)->release();
    else
      stream = base::Result<std::shared_ptr<executor::Stream>>(base::Status());
  });
  wait_for(releasing);
  while (by_release && (*stream)->native().ok()) pause();
  if (!by_release) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  base::Status verdict;
  std::thread closer([&] {
    verdict = runtime->close();
    closed = true;
  });
  wait_a_while_for(closed);
  data.go = true;
  releaser.join();
  closer.join();
  INFO(verdict.to_string());
  CHECK(verdict.ok());
}

TEST_CASE("a runtime that closes waits for a dependent that another thread destroys") {
  struct Flags {
    std::atomic<bool> going{false}, closed{false}, closed_inside{false};
  } flags;
  struct Slow final : executor::Dependent {
    explicit Slow(Flags& of) : flags(of) {}
    ~Slow() override {
      flags.going = true;
      wait_a_while_for(flags.closed);
      flags.closed_inside = flags.closed.load();
      detach();
    }
    void runtime_closing() override {}
    Flags& flags;
  };
  auto runtime = open_runtime(options_of(kSetups[0]));
  auto dependent = std::make_shared<Slow>(flags);
  REQUIRE(runtime->attach(dependent).ok());
  std::thread destroyer([&] { dependent.reset(); });
  wait_for(flags.going);
  CHECK(runtime->close().ok());
  flags.closed = true;
  destroyer.join();
  CHECK_FALSE(flags.closed_inside);
  auto late = std::make_shared<Slow>(flags);
  CHECK(runtime->attach(late).code() == GPUSHARE_INVALID_STATE);
}

// A thread that waits in the runtime looks at its lane once more when it wakes. Sanitizers report a lane that is gone.
TEST_CASE("a runtime that lost its device closes while threads wait for what was enqueued") {
  for (int round = 0; round < 50; ++round) {
    auto runtime = open_runtime(options_of(kSetups[0]));
    const auto session = open_session(*runtime, need("s", 0, kMiB));
    const auto other = open_session(*runtime, need("other", 0, kMiB));
    std::atomic<bool> go{false};
    std::unique_ptr<executor::Work> work = work_of([&](const auto& iteration) {
      return (*iteration->stream())
          ->launch_host([](void* flag) { wait_for(*static_cast<std::atomic<bool>*>(flag)); }, &go);
    });
    auto ticket = session->submit(work);
    REQUIRE(ticket.ok());
    while (runtime->synchronize(0).code() != GPUSHARE_TIMED_OUT) pause();  // it is enqueued
    std::atomic<int32_t> waited{0}, synchronized{0};
    std::atomic<int> waiting{0};
    std::thread waiter([&] {
      ++waiting;
      waited = (*ticket)->wait(GPUSHARE_NO_TIMEOUT).code();
    });
    std::thread timed([&] {
      ++waiting;
      synchronized = runtime->synchronize(3'600'000'000'000).code();
    });
    while (waiting < 2) pause();
    for (int i = 0; i < round; ++i) pause();
    REQUIRE(runtime->device()
                .set_fault({sizeof(gpushare_backend_fault), GPUSHARE_FAULT_DEVICE_LOST, 1, 1.0})
                .ok());
    auto iteration = other->begin(GPUSHARE_NO_TIMEOUT);
    if (iteration.ok()) {
      const auto stream = (*iteration)->stream();
      if (stream.ok()) (void)enqueue(**stream, 1000);
      (void)(*iteration)->end();
    }
    std::thread opener([&] {
      pause();
      go = true;
    });
    (void)runtime->close();
    opener.join();
    waiter.join();
    timed.join();
    CHECK(waited == GPUSHARE_DEVICE_LOST);
    CHECK((synchronized == GPUSHARE_DEVICE_LOST || synchronized == GPUSHARE_INVALID_STATE));
  }
}

TEST_CASE(
    "a thread that has borrowed its session's turn and not begun yet: another that begins is refused, and "
    "does not wait") {
  auto runtime = open_runtime(options_of(kSetups[0]));
  const auto session = open_session(*runtime, need("s", 0, kMiB));
  auto& impl = static_cast<executor::SessionImpl&>(*session);
  for (int round = 0; round < 3; ++round) {
    std::optional<executor::LentTurn::Borrowed> borrowed;
    while (!borrowed) {  // the turn is lent once the device is done
      const auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
      REQUIRE(iteration.ok());
      REQUIRE_OK((*iteration)->end());
      borrowed = impl.runtime_->mutex_.turn().borrow(impl);
    }
    // Here the thread of begin() is held up.
    CHECK(session->begin(0).status().code() == GPUSHARE_INVALID_STATE);
    impl.iteration_.slot_ = borrowed->slot;
    impl.iteration_.borrowed_word_ = borrowed->word;
    impl.iteration_.can_end_.store(impl.iteration_.serial_.load() + 1);
    REQUIRE_OK(impl.runtime_->start_iteration(impl, *borrowed->lane));
    CHECK(session->begin(0).status().code() == GPUSHARE_INVALID_STATE);
    REQUIRE_OK(impl.iteration_.end());
    const auto next = session->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(next.ok());
    REQUIRE_OK((*next)->end());
  }
}

TEST_CASE(
    "a quota that is lowered while bytes above a larger one are looked for holds at the next boundary") {
  auto runtime = open_runtime(options_of(kSetups[0]));
  const auto session = open_session(*runtime, need("s", 16 * kMiB, kMiB));
  auto& impl = static_cast<executor::SessionImpl&>(*session);
  REQUIRE(session->alloc(memory::Kind::kModel, 12 * kMiB, 0).ok());
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> looked{0};
  std::thread looks([&] {
    while (!stop.load()) {
      impl.give_back_above_quota(false);
      ++looked;
    }
  });
  int lost = 0;
  for (int i = 0; i < rounds(3000); ++i) {
    for (const uint64_t quota_bytes : {uint64_t{0}, 4 * kMiB}) {
      executor::BooksLock lock(impl.runtime_->mutex_);
      impl.own_quota_bytes_ = quota_bytes;
      impl.refresh_quota();
    }
    for (const uint64_t before = looked.load(); looked.load() < before + 2;) std::this_thread::yield();
    lost += impl.above_quota_.load() ? 0 : 1;
  }
  stop.store(true);
  looks.join();
  CHECK(lost == 0);
}

}  // namespace
