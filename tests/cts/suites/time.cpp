// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <thread>

#include "cts.hpp"

namespace gpushare::cts {

CTS_TEST("time: the clock does not go back") {
  uint64_t last = 0;
  const auto stream = cts.stream();
  for (int i = 0; i < 100; ++i) {
    uint64_t now = 0;
    REQUIRE(cts.device->ops().clock_now(cts.device->get(), &now) == GPUSHARE_OK);
    CHECK(now >= last);
    last = now;
    REQUIRE_OK(stream.synchronize());
  }
}

CTS_TEST("time: intervals between events add up") {
  const auto stream = cts.stream();
  std::vector<device::Event> events;
  constexpr uint64_t kBytes = 1 << 20;
  const device::Address block = *cts.device->alloc(kBytes);
  for (int i = 0; i < 4; ++i) {
    events.push_back(cts.event(GPUSHARE_EVENT_TIMING));
    REQUIRE_OK(stream.record(events.back()));
    REQUIRE_OK(stream.fill(block, 1, kBytes));
  }
  REQUIRE_OK(stream.synchronize());
  uint64_t sum = 0;
  for (size_t i = 1; i < events.size(); ++i) {
    const auto step = events[i].elapsed_since(events[i - 1]);
    REQUIRE_OK(step.status());
    sum += *step;
  }
  const uint64_t whole = *events.back().elapsed_since(events.front());
  // Drivers that measure in floating-point milliseconds round each interval.
  const uint64_t difference = whole > sum ? whole - sum : sum - whole;
  CHECK(difference <= 4'000);
  CHECK(*events.front().elapsed_since(events.front()) == 0);
  CHECK_OK(cts.device->free(block));
}

CTS_TEST("time: an interval covers the work between its events") {
  if (cts.device->can(GPUSHARE_DEVICE_CAP_VIRTUAL_TIME)) return;  // host functions take no virtual time
  const auto stream = cts.stream();
  const auto start = cts.event(GPUSHARE_EVENT_TIMING);
  const auto end = cts.event(GPUSHARE_EVENT_TIMING);
  REQUIRE_OK(stream.record(start));
  REQUIRE_OK(
      stream.launch_host([](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(2)); }, nullptr));
  REQUIRE_OK(stream.record(end));
  REQUIRE_OK(end.synchronize());
  CHECK(*end.elapsed_since(start) >= 1'900'000);
}

CTS_TEST("time: there is no interval before both events have passed") {
  Gate gate;
  const auto stream = cts.stream();
  const auto start = cts.event(GPUSHARE_EVENT_TIMING);
  const auto end = cts.event(GPUSHARE_EVENT_TIMING);
  REQUIRE_OK(stream.record(start));
  REQUIRE_OK(stream.launch_host(Gate::block, &gate));
  REQUIRE_OK(stream.record(end));
  CHECK(end.elapsed_since(start).status().code() == GPUSHARE_NOT_READY);
  gate.open();
  REQUIRE_OK(end.synchronize());
  CHECK_OK(end.elapsed_since(start).status());
}

CTS_TEST("time: only recorded timing events have one") {
  const auto stream = cts.stream();
  const auto timing = cts.event(GPUSHARE_EVENT_TIMING);
  const auto plain = cts.event(GPUSHARE_EVENT_DEFAULT);
  const auto never = cts.event(GPUSHARE_EVENT_TIMING);
  REQUIRE_OK(stream.record(timing));
  REQUIRE_OK(stream.record(plain));
  REQUIRE_OK(stream.synchronize());
  CHECK(plain.elapsed_since(timing).status().code() == GPUSHARE_INVALID_STATE);
  CHECK(timing.elapsed_since(plain).status().code() == GPUSHARE_INVALID_STATE);
  CHECK(never.elapsed_since(timing).status().code() == GPUSHARE_INVALID_STATE);
  CHECK(timing.elapsed_since(never).status().code() == GPUSHARE_INVALID_STATE);
}

CTS_TEST("time: recording again moves the time") {
  const auto stream = cts.stream();
  const auto start = cts.event(GPUSHARE_EVENT_TIMING);
  const auto end = cts.event(GPUSHARE_EVENT_TIMING);
  constexpr uint64_t kBytes = 4 << 20;
  const device::Address block = *cts.device->alloc(kBytes);
  REQUIRE_OK(stream.record(end));
  REQUIRE_OK(stream.fill(block, 1, kBytes));
  REQUIRE_OK(stream.record(start));
  REQUIRE_OK(stream.synchronize());
  CHECK(end.elapsed_since(start).status().code() == GPUSHARE_INVALID_STATE);
  REQUIRE_OK(stream.fill(block, 2, kBytes));
  REQUIRE_OK(stream.record(end));
  REQUIRE_OK(stream.synchronize());
  const auto elapsed = end.elapsed_since(start);
  REQUIRE_OK(elapsed.status());
  CHECK(*elapsed > 0);
  CHECK_OK(cts.device->free(block));
}

}  // namespace gpushare::cts
