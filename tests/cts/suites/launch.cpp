// SPDX-License-Identifier: Apache-2.0
#include <stdexcept>

#include "cts.hpp"

namespace gpushare::cts {
namespace {

void do_throw(void*) {
  throw std::runtime_error("planted");
}
void do_throw_number(void*) {
  throw 42;
}

}  // namespace

CTS_TEST("launch: a function runs once with its data") {
  int runs = 0;
  const auto stream = cts.stream();
  REQUIRE_OK(stream.launch_host(count_up, &runs));
  REQUIRE_OK(stream.synchronize());
  CHECK(runs == 1);
}

CTS_TEST("launch: a function sees the copies before it and copies see it") {
  constexpr uint64_t kBytes = 100'000;
  // The memory is of host_alloc, because a copy from other host memory may read it before the function has written it.
  struct Data {
    uint8_t* in;
    uint8_t* out;
  } data{static_cast<uint8_t*>(*cts.device->host_alloc(kBytes)),
         static_cast<uint8_t*>(*cts.device->host_alloc(kBytes))};
  const device::Address block = *cts.device->alloc(kBytes);
  {
    const auto stream = cts.stream();
    REQUIRE_OK(stream.fill(block, 3, kBytes));
    REQUIRE_OK(stream.copy(address_of(data.in), block, kBytes, GPUSHARE_COPY_DEVICE_TO_HOST));
    REQUIRE_OK(stream.launch_host(
        [](void* d) {
          Data& both = *static_cast<Data*>(d);
          for (size_t i = 0; i < kBytes; ++i) both.out[i] = static_cast<uint8_t>(both.in[i] + 1);
        },
        &data));
    REQUIRE_OK(stream.copy(block, address_of(data.out), kBytes, GPUSHARE_COPY_HOST_TO_DEVICE));
    CHECK(cts.download(stream, block, kBytes) == std::vector<uint8_t>(kBytes, 4));
  }
  CHECK_OK(cts.device->free(block));
  CHECK_OK(cts.device->host_free(data.in));
  CHECK_OK(cts.device->host_free(data.out));
}

CTS_TEST("launch: no function is a call error") {
  const auto stream = cts.stream();
  CHECK(is_call_error(stream.launch_host(nullptr, nullptr)));
}

CTS_TEST("launch: a function may enqueue on another stream") {
  struct Data {
    device::Stream other;
    int runs = 0;
    int32_t code = -1;
  } data{cts.stream()};
  const auto stream = cts.stream();
  REQUIRE_OK(stream.launch_host(
      [](void* d) {
        Data& self = *static_cast<Data*>(d);
        self.code = self.other.launch_host(count_up, &self.runs).code();
      },
      &data));
  REQUIRE_OK(stream.synchronize());
  CHECK(data.code == GPUSHARE_OK);
  REQUIRE_OK(data.other.synchronize());
  CHECK(data.runs == 1);
}

CTS_TEST("launch: a function that waits for its own stream is refused") {
  struct Data {
    device::Stream stream;
    int32_t code = -1;
  } data{cts.stream()};
  REQUIRE_OK(data.stream.launch_host(
      [](void* d) {
        Data& self = *static_cast<Data*>(d);
        self.code = self.stream.synchronize().code();
      },
      &data));
  REQUIRE_OK(data.stream.synchronize());
  CHECK(data.code == GPUSHARE_INVALID_STATE);
}

CTS_TEST("launch: a function that throws fails its stream for good") {
  for (const gpushare_host_function thrower : {do_throw, do_throw_number}) {
    int before = 0;
    int behind = 0;
    Gate gate;
    const auto stream = cts.stream();
    const auto early = cts.event();
    const auto late = cts.event(GPUSHARE_EVENT_TIMING);
    REQUIRE_OK(stream.launch_host(Gate::block, &gate));
    REQUIRE_OK(stream.launch_host(count_up, &before));
    REQUIRE_OK(stream.record(early));
    REQUIRE_OK(stream.launch_host(thrower, nullptr));
    REQUIRE_OK(stream.launch_host(count_up, &behind));
    REQUIRE_OK(stream.record(late));
    gate.open();
    CHECK(stream.synchronize().code() == GPUSHARE_CALLBACK_FAILED);
    CHECK(stream.synchronize().code() == GPUSHARE_CALLBACK_FAILED);
    CHECK(stream.query().code() == GPUSHARE_CALLBACK_FAILED);
    CHECK(before == 1);
    CHECK(behind == 0);
    CHECK_OK(early.query());
    CHECK_OK(early.synchronize());
    CHECK(late.query().code() == GPUSHARE_CALLBACK_FAILED);
    CHECK(late.synchronize().code() == GPUSHARE_CALLBACK_FAILED);
    CHECK(late.elapsed_since(late).status().code() == GPUSHARE_CALLBACK_FAILED);
    CHECK(stream.launch_host(count_up, &behind).code() == GPUSHARE_CALLBACK_FAILED);
    CHECK(stream.record(early).code() == GPUSHARE_CALLBACK_FAILED);
    CHECK(behind == 0);
  }
}

CTS_TEST("launch: a failed stream harms no other") {
  int runs = 0;
  Gate gate;
  const auto failing = cts.stream();
  const auto waiting = cts.stream();
  const auto event = cts.event();
  REQUIRE_OK(failing.launch_host(Gate::block, &gate));
  REQUIRE_OK(failing.launch_host(do_throw, nullptr));
  REQUIRE_OK(failing.record(event));
  REQUIRE_OK(waiting.wait(event));
  REQUIRE_OK(waiting.launch_host(count_up, &runs));
  gate.open();
  CHECK_OK(waiting.synchronize());
  CHECK(runs == 1);
  CHECK(failing.synchronize().code() == GPUSHARE_CALLBACK_FAILED);
  // The event serves again once it is recorded elsewhere.
  REQUIRE_OK(waiting.record(event));
  CHECK_OK(event.synchronize());
}

}  // namespace gpushare::cts
