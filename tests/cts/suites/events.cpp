// SPDX-License-Identifier: Apache-2.0
#include "cts.hpp"

namespace gpushare::cts {
namespace {

void set_flag(void* flag) {
  *static_cast<bool*>(flag) = true;
}

// The value of `inner` when the function ran.
struct Look {
  const bool* inner;
  bool seen = false;
  static void take(void* look) {
    Look& self = *static_cast<Look*>(look);
    self.seen = *self.inner;
  }
};

}  // namespace

CTS_TEST("events: one that was never recorded is done") {
  const auto event = cts.event();
  CHECK_OK(event.query());
  CHECK_OK(event.synchronize());
  const auto stream = cts.stream();
  REQUIRE_OK(stream.wait(event));
  CHECK_OK(stream.synchronize());
}

CTS_TEST("events: on an idle stream it passes") {
  const auto stream = cts.stream();
  for (const uint32_t flags : {GPUSHARE_EVENT_DEFAULT, GPUSHARE_EVENT_TIMING}) {
    const auto event = cts.event(flags);
    REQUIRE_OK(stream.record(event));
    CHECK_OK(event.synchronize());
    CHECK_OK(event.query());
  }
}

CTS_TEST("events: behind a closed gate it is not ready") {
  Gate gate;
  const auto stream = cts.stream();
  const auto event = cts.event();
  REQUIRE_OK(stream.launch_host(Gate::block, &gate));
  REQUIRE_OK(stream.record(event));
  CHECK(event.query().code() == GPUSHARE_NOT_READY);
  gate.open();
  CHECK_OK(event.synchronize());
  CHECK_OK(event.query());
}

CTS_TEST("events: it covers all work before it and none behind it") {
  Gate gate;
  bool before = false;
  bool behind = false;
  const auto stream = cts.stream();
  const auto other = cts.stream();
  const auto event = cts.event();
  const auto opened = cts.event();
  REQUIRE_OK(stream.launch_host(set_flag, &before));
  REQUIRE_OK(stream.record(event));
  REQUIRE_OK(stream.launch_host(Gate::block, &gate));
  REQUIRE_OK(stream.launch_host(set_flag, &behind));
  CHECK_OK(event.synchronize());
  CHECK(before);
  CHECK(stream.query().code() == GPUSHARE_NOT_READY);
  gate.open();
  REQUIRE_OK(stream.synchronize());
  CHECK(behind);
}

CTS_TEST("events: recording again moves it") {
  Gate gate;
  const auto stream = cts.stream();
  const auto event = cts.event();
  REQUIRE_OK(stream.record(event));
  REQUIRE_OK(event.synchronize());
  REQUIRE_OK(stream.launch_host(Gate::block, &gate));
  REQUIRE_OK(stream.record(event));
  CHECK(event.query().code() == GPUSHARE_NOT_READY);
  gate.open();
  CHECK_OK(event.synchronize());
}

CTS_TEST("events: recording again leaves earlier waiters where they were") {
  Gate gate;
  bool first_done = false;
  Look look{&first_done};
  const auto first = cts.stream();
  const auto second = cts.stream();
  const auto third = cts.stream();
  const auto event = cts.event();
  REQUIRE_OK(first.launch_host(Gate::block, &gate));
  REQUIRE_OK(first.launch_host(set_flag, &first_done));
  REQUIRE_OK(first.record(event));
  REQUIRE_OK(second.wait(event));
  REQUIRE_OK(second.launch_host(Look::take, &look));
  REQUIRE_OK(third.record(event));
  CHECK(second.query().code() == GPUSHARE_NOT_READY);
  gate.open();
  REQUIRE_OK(second.synchronize());
  CHECK(look.seen);
  CHECK_OK(event.synchronize());
  REQUIRE_OK(first.synchronize());
}

CTS_TEST("events: a waiter takes the last record before its wait") {
  Gate gate;
  bool done = false;
  Look look{&done};
  const auto first = cts.stream();
  const auto second = cts.stream();
  const auto event = cts.event();
  REQUIRE_OK(first.record(event));
  REQUIRE_OK(second.wait(event));
  REQUIRE_OK(first.launch_host(Gate::block, &gate));
  REQUIRE_OK(first.launch_host(set_flag, &done));
  REQUIRE_OK(first.record(event));
  REQUIRE_OK(second.wait(event));
  REQUIRE_OK(second.launch_host(Look::take, &look));
  gate.open();
  REQUIRE_OK(second.synchronize());
  CHECK(look.seen);
  REQUIRE_OK(first.synchronize());
}

CTS_TEST("events: one may be destroyed while it is pending") {
  Gate gate;
  bool done = false;
  const auto first = cts.stream();
  const auto second = cts.stream();
  REQUIRE_OK(first.launch_host(Gate::block, &gate));
  REQUIRE_OK(first.launch_host(set_flag, &done));
  Look look{&done};
  {
    const auto event = cts.event(GPUSHARE_EVENT_TIMING);
    REQUIRE_OK(first.record(event));
    REQUIRE_OK(second.wait(event));
  }
  REQUIRE_OK(second.launch_host(Look::take, &look));
  gate.open();
  REQUIRE_OK(second.synchronize());
  CHECK(look.seen);
  REQUIRE_OK(first.synchronize());
}

CTS_TEST("events: one outlives the stream it was recorded on") {
  const auto event = cts.event(GPUSHARE_EVENT_TIMING);
  bool done = false;
  {
    const auto stream = cts.stream();
    REQUIRE_OK(stream.launch_host(set_flag, &done));
    REQUIRE_OK(stream.record(event));
  }
  CHECK(done);
  CHECK_OK(event.query());
  CHECK_OK(event.synchronize());
  const auto other = cts.stream();
  REQUIRE_OK(other.wait(event));
  CHECK_OK(other.synchronize());
}

CTS_TEST("events: thousands of them pass in order") {
  const auto stream = cts.stream();
  std::vector<device::Event> events;
  for (int i = 0; i < 2000; ++i) {
    events.push_back(cts.event());
    REQUIRE_OK(stream.record(events.back()));
  }
  REQUIRE_OK(events.back().synchronize());
  for (const auto& event : events) CHECK(event.query().ok());
}

}  // namespace gpushare::cts
