// Many threads on one runtime: pull, push, cancel, close, policy changes, allocations from helper threads, side
// streams, looks. Run it under ThreadSanitizer. At the end everything has been returned, each work has run or was
// dropped once, and no lane was ever shared.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/executor_fixture.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT

constexpr int kRounds = kSanitized ? 40 : 300;

struct Counts {
  std::atomic<uint64_t> submitted{0}, destroyed{0}, ran{0}, wrong{0}, progress{0};
};

class CountedWork final : public executor::Work {
 public:
  CountedWork(Counts& counts, int how) : counts_(counts), how_(how) {}
  ~CountedWork() override { ++counts_.destroyed; }
  base::Status run(const std::shared_ptr<executor::Iteration>& iteration) override {
    ++counts_.ran;
    const auto block = iteration->alloc(kMiB, 0);
    const auto stream = iteration->stream();
    if (block.ok() && stream.ok()) (void)(*stream)->fill(*block, 1, 4096);
    if (how_ == 1) throw std::runtime_error("stress");
    return {};
  }

 private:
  Counts& counts_;
  const int how_;
};

// Opens sessions and runs them in every way until its rounds are over.
void user(executor::Runtime& runtime, Counts& counts, uint64_t seed) {
  Random random(seed);
  for (int round = 0; round < kRounds; ++round) {
    executor::SessionOptions options;
    options.persistent_bytes = uniform(random, 0, 8) * kMiB;
    options.ephemeral_bytes = uniform(random, 0, 3) == 0 ? 0 : uniform(random, 4, 24) * kMiB;
    options.cls =
        uniform(random, 0, 1) == 0 ? sched::SessionClass::kGuaranteed : sched::SessionClass::kOpportunistic;
    options.priority = static_cast<int32_t>(uniform(random, 0, 3));
    auto opened = runtime.open_session(options);
    if (!opened.ok()) continue;
    executor::Session& session = **opened;
    std::shared_ptr<executor::Ticket> ticket;
    for (int step = 0; step < 6; ++step) {
      switch (uniform(random, 0, 5)) {
        case 0: {
          std::unique_ptr<executor::Work> work =
              std::make_unique<CountedWork>(counts, uniform(random, 0, 30) == 0 ? 1 : 0);
          ++counts.submitted;
          auto submitted = session.submit(work);
          if (submitted.ok()) ticket = *submitted;
          break;
        }
        case 1: {
          const uint64_t timeout = uniform(random, 0, 1) == 0 ? 2'000'000 : GPUSHARE_NO_TIMEOUT;
          auto iteration = session.begin(timeout);
          if (!iteration.ok()) break;
          const auto stream = (*iteration)->stream();
          if (!stream.ok()) {
            ++counts.wrong;
            break;
          }
          std::atomic<bool> helped{false};
          std::thread helper([&] {
            const auto block = runtime.alloc(stream->get(), memory::Kind::kEphemeral, 64 << 10, 0);
            if (block.ok()) {
              const auto info = runtime.find(*block);
              if (!info.ok() || info->session != session.id()) ++counts.wrong;
            }
            helped = true;
          });
          for (int i = 0; i < 4; ++i) {
            const auto block = (*iteration)->alloc(uniform(random, 1, kMiB), 0);
            if (block.ok() && uniform(random, 0, 1) == 0 && !runtime.free(*block).ok()) ++counts.wrong;
          }
          (void)enqueue(**stream, 5'000);
          helper.join();
          if (uniform(random, 0, 20) == 0)
            (void)(*iteration)->fail({GPUSHARE_UNKNOWN, "stress"});
          else if (!(*iteration)->end().ok())
            ++counts.wrong;
          break;
        }
        case 2:
          if (session.wait_admitted(1'000'000).ok()) {
            const auto block = session.alloc(memory::Kind::kModel, uniform(random, 1, 2 * kMiB), 0);
            if (block.ok() && uniform(random, 0, 1) == 0) (void)runtime.free(*block);
          }
          break;
        case 3:
          if (ticket != nullptr) (void)ticket->wait(uniform(random, 0, 1) == 0 ? 0 : 3'000'000);
          break;
        case 4:
          (void)session.set_priority(static_cast<int32_t>(uniform(random, 0, 5)));
          (void)session.info();
          break;
        default:
          if (uniform(random, 0, 6) == 0) (void)session.cancel();
          break;
      }
    }
    if (uniform(random, 0, 3) == 0) {
      // Closed from elsewhere while a thread may wait in begin.
      int32_t code = 0;
      std::thread waiter([&] {
        auto iteration = session.begin(GPUSHARE_NO_TIMEOUT);
        code = iteration.status().code();
        if (iteration.ok()) (void)(*iteration)->end();
      });
      if (!session.close().ok()) ++counts.wrong;
      waiter.join();
      if (code != GPUSHARE_OK && code != GPUSHARE_INVALID_STATE && code != GPUSHARE_CANCELLED) ++counts.wrong;
    } else if (!session.close().ok()) {
      ++counts.wrong;
    }
    const executor::SessionInfo info = session.info();
    if (info.persistent_bytes != 0 || info.ephemeral_bytes != 0) ++counts.wrong;
  }
}

void meddler(executor::Runtime& runtime, Counts& counts, std::atomic<bool>& stop, uint64_t seed) {
  Random random(seed);
  static const char* const kNames[] = {"fifo", "srtf", "pack", "fair", "priority"};
  while (!stop) {
    if (!runtime.set_policy(std::move(*sched::make_policy(kNames[uniform(random, 0, 4)]))).ok())
      ++counts.wrong;
    const auto info = runtime.info();
    if (!info.ok() || info->promised_bytes > info->capacity_bytes) ++counts.wrong;
    (void)runtime.synchronize(500'000);
    (void)runtime.snapshot();
    auto stream = runtime.create_stream(0);
    if (stream.ok()) {
      (void)enqueue(**stream, 1'000);
      if (!(*stream)->release().ok()) ++counts.wrong;
    }
    std::this_thread::yield();
  }
}

TEST_CASE("many threads on one runtime") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  CAPTURE(setup.device);
  Counts counts;
  executor::RuntimeOptions options = options_of(setup);
  options.capacity_bytes = 96 * kMiB;
  options.max_lanes = 3;
  options.record_timeline = true;
  options.on_progress = [&](const executor::Progress&) { ++counts.progress; };
  auto runtime = open_runtime(std::move(options));
  std::atomic<bool> stop{false};
  std::vector<std::thread> users;
  std::thread policies([&] { meddler(*runtime, counts, stop, test::seed()); });
  for (uint64_t i = 0; i < 4; ++i)
    users.emplace_back([&, i] { user(*runtime, counts, test::seed() + 1 + i); });
  for (std::thread& thread : users) thread.join();
  stop = true;
  policies.join();
  CHECK(counts.wrong == 0);
  CHECK(counts.submitted == counts.destroyed);
  CHECK(counts.progress == runtime->info()->iterations_done);
  CHECK(runtime->check().empty());
  CHECK(runtime->info()->promised_bytes == 0);
  CHECK(runtime->info()->persistent_bytes == 0);
  const base::Status closed = runtime->close();
  INFO(closed.to_string());
  CHECK(closed.ok());
}

TEST_CASE("a runtime closes under the feet of its users") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  for (int round = 0; round < kRounds / 20; ++round) {
    Counts counts;
    auto runtime = open_runtime(options_of(setup));
    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&] {
        while (!stop) {
          auto session = runtime->open_session(need("u", kMiB, 4 * kMiB));
          if (!session.ok()) return;
          std::unique_ptr<executor::Work> work = std::make_unique<CountedWork>(counts, 0);
          ++counts.submitted;
          (void)(*session)->submit(work);
          auto iteration = (*session)->begin(GPUSHARE_NO_TIMEOUT);
          if (iteration.ok()) {
            (void)(*iteration)->alloc(kMiB, 0);
            (void)runtime->alloc(nullptr, memory::Kind::kModel, 100, 0);
            (void)(*iteration)->end();
          }
          (void)runtime->info();
          (void)(*session)->close();
        }
      });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    const base::Status closed = runtime->close();
    stop = true;
    for (std::thread& thread : threads) thread.join();
    INFO(closed.to_string());
    CHECK(closed.ok());
    CHECK(counts.submitted == counts.destroyed);
  }
}

}  // namespace
