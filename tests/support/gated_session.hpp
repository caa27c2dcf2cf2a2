// gated_session.hpp: opportunistic sessions that launch through their gates, beside a guaranteed one: what must hold of them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "executor/op_gate.hpp"
#include "support/executor_fixture.hpp"
#include "support/status_checks.hpp"

namespace gpushare::test {

inline constexpr uint64_t kPatientNs = 60'000'000'000, kBrieflyNs = 20'000'000;

template <class Condition>
void comes_true(Condition&& condition) {
  for (int i = 0; i < 60'000 && !condition(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  REQUIRE(condition());
}

// A kernel that takes so long and uses no processor. The number is the argument itself: the kernel may outlive who launches it.
inline void sleep_us(void* us) {
  std::this_thread::sleep_for(std::chrono::microseconds(reinterpret_cast<uintptr_t>(us)));
}
inline void* takes(int us) {
  return reinterpret_cast<void*>(static_cast<uintptr_t>(us));  // NOLINT(performance-no-int-to-ptr)
}

// An opportunistic session whose thread runs iterations, and asks the gate before each launch, until it is told to stop.
struct GatedSession {
  GatedSession(executor::Runtime& runtime, const std::string& name, int launches, int takes_us)
      : us(takes_us) {
    auto options = need(name, 2 * kMiB, 2 * kMiB);
    options.cls = sched::SessionClass::kOpportunistic;
    session = open_session(runtime, options);
    auto made = session->gate();
    REQUIRE(made.ok());
    gate = *made;
    thread = std::thread([this, launches] {
      while (!stop) iterate(launches);
    });
  }
  ~GatedSession() { end(); }
  void end() {
    stop = true;
    if (thread.joinable()) thread.join();
  }
  void iterate(int launches) {
    auto iteration = session->begin(kBrieflyNs);
    if (!iteration.ok()) {
      failed = failed || iteration.status().code() != GPUSHARE_TIMED_OUT;
      return;
    }
    const auto stream = (*iteration)->stream();
    for (int i = 0; i < launches && !stop && stream.ok();) {
      const base::Status entered = gate->enter(stream->get(), static_cast<uint64_t>(us) * 1000, kBrieflyNs);
      if (entered.code() == GPUSHARE_TIMED_OUT) continue;
      failed = failed || !entered.ok();
      ++let_in;
      ++i;
      failed = failed || !(*stream)->launch_host(sleep_us, takes(us)).ok();
    }
    failed = failed || !stream.ok() || !(*iteration)->end().ok();
    ++iterations;
  }
  int us;
  std::shared_ptr<executor::Session> session;
  std::shared_ptr<executor::LaunchGate> gate;
  std::atomic<uint64_t> let_in{0}, iterations{0};
  std::atomic<bool> stop{false}, failed{false};
  std::thread thread;
};

// So many iterations, each with a kernel that takes so long.
inline base::Status iterate(executor::Session& session, int iterations, int takes_us) {
  for (int i = 0; i < iterations; ++i) {
    GPUSHARE_ASSIGN_OR_RETURN(const auto iteration, session.begin(kPatientNs));
    GPUSHARE_ASSIGN_OR_RETURN(const auto stream, iteration->stream());
    GPUSHARE_RETURN_IF_ERROR(stream->launch_host(sleep_us, takes(takes_us)));
    GPUSHARE_RETURN_IF_ERROR(stream->synchronize());
    GPUSHARE_RETURN_IF_ERROR(iteration->end());
  }
  return {};
}

// Nothing of two opportunistic sessions is launched while a guaranteed one is learned; they go on when it pauses, and
// when it leaves. `at_once`: the gates close before an iteration begins; else when the daemon has heard of it.
inline void gates_close_and_open(executor::Runtime& runtime, bool at_once = true) {
  auto sure = open_session(runtime, need("sure", 2 * kMiB, 2 * kMiB));
  GatedSession one(runtime, "one", 4, 200), two(runtime, "two", 4, 200);
  const auto launched = [&] { return one.let_in + two.let_in; };
  const auto goes_on = [&] {
    const uint64_t had = launched();  // of both: pack is not fair among lanes
    comes_true([&] { return launched() > had + 10; });
  };
  goes_on();
  CHECK(one.gate->info().open);
  for (int i = 0; i < 3; ++i) {
    const auto iteration = sure->begin(kPatientNs);
    REQUIRE(iteration.ok());
    const auto shut = [&] { return one.gate->info().share == 0 && two.gate->info().share == 0; };
    if (at_once)
      CHECK(shut());
    else
      comes_true(shut);
    CHECK(one.gate->info().estimate.learning);
    // Each may have been let in just before, and not have counted it yet.
    const uint64_t before = launched();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    CHECK(launched() <= before + 2);
    CHECK(one.gate->enter(nullptr, 1, 0).code() == GPUSHARE_TIMED_OUT);
    REQUIRE_OK((*iteration)->end());
    goes_on();
  }
  REQUIRE_OK(sure->close());
  comes_true([&] { return one.gate->info().open && two.gate->info().open; });
  CHECK(one.gate->info().guaranteed_id == 0);
  goes_on();
  one.end();
  two.end();
  CHECK_FALSE(one.failed);
  CHECK_FALSE(two.failed);
}

// Guaranteed sessions go on while opportunistic ones wait at their gates inside their iterations, and these end.
inline void guaranteed_go_on(executor::Runtime& runtime) {
  auto sure = open_session(runtime, need("sure", 2 * kMiB, 2 * kMiB));
  auto also = open_session(runtime, need("also", 2 * kMiB, 2 * kMiB));
  GatedSession one(runtime, "one", 20, 100), two(runtime, "two", 20, 100);
  comes_true([&] { return one.let_in + two.let_in > 0; });
  base::Status others;
  std::thread beside([&] { others = iterate(*also, 20, 300); });
  const base::Status own = iterate(*sure, 20, 300);
  beside.join();
  REQUIRE_OK(own);
  REQUIRE_OK(others);
  const uint64_t had = one.iterations + two.iterations;
  comes_true([&] { return one.iterations + two.iterations > had; });
  one.end();
  two.end();
  CHECK_FALSE(one.failed);
  CHECK_FALSE(two.failed);
}

}  // namespace gpushare::test
