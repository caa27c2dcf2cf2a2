// The host's cost of an iteration beyond calling the function, on the host device: pull alone, with an
// allocation, with work on the stream, push, and a switch between two sessions at a boundary. Read the ratios
// of one run; seconds differ between machines.
// SPDX-License-Identifier: Apache-2.0
#include <benchmark/benchmark.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "executor/runtime.hpp"

namespace {

using namespace gpushare;  // NOLINT

constexpr uint64_t kMiB = uint64_t{1} << 20;

// The function of which the overhead is measured: some 20 ns.
__attribute__((noinline)) uint64_t body(uint64_t seed) {
  for (int i = 0; i < 16; ++i) seed = seed * 6364136223846793005ull + 1442695040888963407ull;
  return seed;
}

std::shared_ptr<executor::Runtime> open_runtime(uint32_t max_lanes = 0) {
  executor::RuntimeOptions options;
  options.device = "host?total_bytes=268435456";
  options.max_lanes = max_lanes;
  return *executor::Runtime::open(std::move(options));
}

std::shared_ptr<executor::Session> open_session(executor::Runtime& runtime, const char* name) {
  executor::SessionOptions options;
  options.name = name;
  options.persistent_bytes = 4 * kMiB;
  options.ephemeral_bytes = 16 * kMiB;
  return *runtime.open_session(options);
}

void direct_call(benchmark::State& state) {
  uint64_t seed = 1;
  for (auto _ : state) benchmark::DoNotOptimize(seed = body(seed));
}
BENCHMARK(direct_call);

void pull(executor::Session& session, benchmark::State& state) {
  uint64_t seed = 1;
  for (auto _ : state) {
    auto iteration = session.begin(GPUSHARE_NO_TIMEOUT);
    benchmark::DoNotOptimize(seed = body(seed));
    if (!(*iteration)->end().ok()) state.SkipWithError("end failed");
  }
}

void pull_iteration(benchmark::State& state) {
  auto runtime = open_runtime();
  auto session = open_session(*runtime, "a");
  pull(*session, state);
}
BENCHMARK(pull_iteration);

void pull_iteration_beside_idle_lanes(benchmark::State& state) {
  auto runtime = open_runtime();
  auto session = open_session(*runtime, "a");
  std::vector<std::shared_ptr<executor::Session>> others;
  for (int i = 0; i < 7; ++i) others.push_back(open_session(*runtime, "idle"));
  pull(*session, state);
}
BENCHMARK(pull_iteration_beside_idle_lanes);

void pull_iteration_with_allocations(benchmark::State& state) {
  auto runtime = open_runtime();
  auto session = open_session(*runtime, "a");
  for (auto _ : state) {
    auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
    for (int64_t i = 0; i < state.range(0); ++i) benchmark::DoNotOptimize((*iteration)->alloc(64 << 10, 0));
    if (!(*iteration)->end().ok()) state.SkipWithError("end failed");
  }
}
BENCHMARK(pull_iteration_with_allocations)->Arg(1)->Arg(10)->Arg(100);

// Two sessions of one lane from one thread: each begin is a switch.
void pull_switching_sessions(benchmark::State& state) {
  auto runtime = open_runtime(1);
  auto a = open_session(*runtime, "a"), b = open_session(*runtime, "b");
  for (auto _ : state) {
    for (executor::Session* session : {a.get(), b.get()}) {
      auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
      if (!(*iteration)->end().ok()) state.SkipWithError("end failed");
    }
  }
  state.SetItemsProcessed(2 * state.iterations());
}
BENCHMARK(pull_switching_sessions);

// Two threads, one lane: each ends its iteration only when the other is about to wait, so nearly every
// boundary hands the lane to the other session and wakes its thread.
void switch_between_threads(benchmark::State& state) {
  auto runtime = open_runtime(1);
  auto a = open_session(*runtime, "a"), b = open_session(*runtime, "b");
  std::atomic<bool> stop{false};
  // Set until begin has returned, which it cannot while the other has the lane: so nobody misses it.
  std::atomic<bool> comes[2] = {false, false};
  const auto turn = [&](executor::Session& session, size_t self) {
    comes[self].store(true);
    auto iteration = session.begin(GPUSHARE_NO_TIMEOUT);
    comes[self].store(false);
    if (!iteration.ok()) return false;
    while (!comes[1 - self].load() && !stop.load()) std::this_thread::yield();
    return (*iteration)->end().ok();
  };
  std::thread other([&] {
    while (!stop.load() && turn(*b, 1)) {
    }
  });
  const uint64_t before = runtime->info()->switches;
  for (auto _ : state) {
    if (!turn(*a, 0)) state.SkipWithError("a turn failed");
  }
  const uint64_t switches = runtime->info()->switches - before;
  stop = true;
  other.join();
  state.SetItemsProcessed(static_cast<int64_t>(switches));
  state.counters["switches"] = static_cast<double>(switches) / static_cast<double>(state.iterations());
}
BENCHMARK(switch_between_threads)->UseRealTime();

// The same hand-over by nothing but a mutex and condition variables: what the operating system takes of it.
void switch_between_threads_bare(benchmark::State& state) {
  std::mutex mutex;
  std::condition_variable changed[2];
  int turn = 0;
  bool stop = false;
  std::thread other([&] {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      changed[1].wait(lock, [&] { return turn == 1 || stop; });
      if (stop) return;
      turn = 0;
      changed[0].notify_one();
    }
  });
  {
    std::unique_lock<std::mutex> lock(mutex);
    for (auto _ : state) {
      turn = 1;
      changed[1].notify_one();
      changed[0].wait(lock, [&] { return turn == 0; });
    }
    stop = true;
    changed[1].notify_one();
  }
  other.join();
}
BENCHMARK(switch_between_threads_bare)->UseRealTime();

class CountingWork final : public executor::Work {
 public:
  base::Status run(const std::shared_ptr<executor::Iteration>&) override {
    benchmark::DoNotOptimize(body(1));
    return {};
  }
};

void push_iterations(benchmark::State& state) {
  auto runtime = open_runtime();
  auto session = open_session(*runtime, "a");
  for (auto _ : state) {
    std::shared_ptr<executor::Ticket> last;
    for (int64_t i = 0; i < state.range(0); ++i) {
      std::unique_ptr<executor::Work> work = std::make_unique<CountingWork>();
      last = *session->submit(work);
    }
    if (!last->wait(GPUSHARE_NO_TIMEOUT).ok()) state.SkipWithError("an iteration failed");
  }
  state.SetItemsProcessed(state.range(0) * state.iterations());
}
BENCHMARK(push_iterations)->Arg(1)->Arg(64)->Arg(1024)->UseRealTime();

void session_open_close(benchmark::State& state) {
  auto runtime = open_runtime();
  auto resident = open_session(*runtime, "resident");
  executor::SessionOptions options;
  options.ephemeral_bytes = 16 * kMiB;
  for (auto _ : state) {
    auto session = runtime->open_session(options);
    if (!(*session)->close().ok()) state.SkipWithError("close failed");
  }
}
BENCHMARK(session_open_close);

}  // namespace
