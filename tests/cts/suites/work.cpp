// Modelled work: what its cost means, whatever the device's model of contention is.
// SPDX-License-Identifier: Apache-2.0
#include "cts.hpp"

namespace gpushare::cts {
namespace {

constexpr uint64_t kMs = 1'000'000;

}  // namespace

CTS_TEST("work: alone it takes the time it was given") {
  REQUIRE(cts.device->can(GPUSHARE_DEVICE_CAP_MODELED_WORK));
  const auto stream = cts.stream();
  const auto start = cts.event(GPUSHARE_EVENT_TIMING);
  const auto end = cts.event(GPUSHARE_EVENT_TIMING);
  for (const uint64_t duration : {uint64_t{0}, uint64_t{1}, uint64_t{1000}, 250 * kMs, 3'600'000 * kMs}) {
    REQUIRE_OK(stream.record(start));
    REQUIRE_OK(stream.work(work(duration)));
    REQUIRE_OK(stream.record(end));
    REQUIRE_OK(end.synchronize());
    CHECK(*end.elapsed_since(start) == duration);
  }
}

CTS_TEST("work: in one stream it adds up") {
  const auto stream = cts.stream();
  const uint64_t start = cts.device->now_ns();
  for (uint64_t i = 1; i <= 100; ++i) REQUIRE_OK(stream.work(work(i * kMs)));
  REQUIRE_OK(stream.synchronize());
  CHECK(cts.device->now_ns() - start == 5050 * kMs);
}

CTS_TEST("work: side by side it fits or slows") {
  const auto a = cts.stream();
  const auto b = cts.stream();
  uint64_t start = cts.device->now_ns();
  REQUIRE_OK(a.work(work(10 * kMs, 0.25f)));
  REQUIRE_OK(b.work(work(10 * kMs, 0.5f)));
  REQUIRE_OK(a.synchronize());
  REQUIRE_OK(b.synchronize());
  CHECK(cts.device->now_ns() - start == 10 * kMs);
  start = cts.device->now_ns();
  REQUIRE_OK(a.work(work(10 * kMs, 0.75f)));
  REQUIRE_OK(b.work(work(10 * kMs, 0.75f)));
  REQUIRE_OK(a.synchronize());
  REQUIRE_OK(b.synchronize());
  CHECK(cts.device->now_ns() - start > 10 * kMs);
  CHECK(cts.device->now_ns() - start <= 20 * kMs);
}

CTS_TEST("work: a wait for another stream delays it") {
  const auto a = cts.stream();
  const auto b = cts.stream();
  const auto event = cts.event();
  const uint64_t start = cts.device->now_ns();
  REQUIRE_OK(a.work(work(4 * kMs)));
  REQUIRE_OK(a.record(event));
  REQUIRE_OK(b.wait(event));
  REQUIRE_OK(b.work(work(3 * kMs)));
  REQUIRE_OK(b.synchronize());
  CHECK(cts.device->now_ns() - start == 7 * kMs);
}

CTS_TEST("work: costs out of range are refused") {
  const auto stream = cts.stream();
  for (const float demand : {0.0f, -0.5f, 1.5f, std::numeric_limits<float>::quiet_NaN()}) {
    CHECK(stream.work(work(kMs, demand)).code() == GPUSHARE_INVALID_ARGUMENT);
  }
  CHECK(stream.work(work(UINT64_MAX)).code() == GPUSHARE_INVALID_ARGUMENT);
  gpushare_backend_work small = work(kMs);
  small.struct_size = 4;
  CHECK(stream.work(small).code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(cts.device->ops().work_launch(stream.get(), nullptr) == GPUSHARE_INVALID_ARGUMENT);
}

}  // namespace gpushare::cts
