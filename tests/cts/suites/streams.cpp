// SPDX-License-Identifier: Apache-2.0
#include "cts.hpp"

namespace gpushare::cts {

CTS_TEST("streams: a new stream is idle") {
  const auto stream = cts.stream();
  CHECK_OK(stream.query());
  CHECK_OK(stream.synchronize());
  CHECK(stream.native() != nullptr);
}

CTS_TEST("streams: work behind a closed gate is not ready") {
  Gate gate;
  const auto stream = cts.stream();
  int runs = 0;
  REQUIRE_OK(stream.launch_host(Gate::block, &gate));
  REQUIRE_OK(stream.launch_host(count_up, &runs));
  CHECK(stream.query().code() == GPUSHARE_NOT_READY);
  gate.open();
  REQUIRE_OK(stream.synchronize());
  CHECK(runs == 1);
  CHECK_OK(stream.query());
}

CTS_TEST("streams: work keeps its order") {
  struct Log {
    std::vector<int> order;
    int next = 0;
  } log;
  const auto stream = cts.stream();
  constexpr int kCalls = 1000;
  for (int i = 0; i < kCalls; ++i) {
    REQUIRE_OK(stream.launch_host(
        [](void* data) {
          Log& l = *static_cast<Log*>(data);
          l.order.push_back(l.next++);
        },
        &log));
  }
  REQUIRE_OK(stream.synchronize());
  REQUIRE(log.order.size() == kCalls);
  for (int i = 0; i < kCalls; ++i) CHECK(log.order[static_cast<size_t>(i)] == i);
}

CTS_TEST("streams: polling ends") {
  const auto stream = cts.stream();
  int runs = 0;
  for (int i = 0; i < 20; ++i) REQUIRE_OK(stream.launch_host(count_up, &runs));
  int32_t code = GPUSHARE_NOT_READY;
  while (code == GPUSHARE_NOT_READY) code = stream.query().code();
  CHECK(code == GPUSHARE_OK);
  CHECK(runs == 20);
}

CTS_TEST("streams: destroying one waits for its work") {
  int runs = 0;
  {
    const auto stream = cts.stream();
    for (int i = 0; i < 50; ++i) REQUIRE_OK(stream.launch_host(count_up, &runs));
  }
  CHECK(runs == 50);
}

CTS_TEST("streams: many at once hold their own work") {
  constexpr uint64_t kBytes = 4096;
  const device::Address block = *cts.device->alloc(64 * kBytes);
  {
    std::vector<device::Stream> streams;
    for (uint64_t i = 0; i < 64; ++i) {
      streams.push_back(cts.stream());
      REQUIRE_OK(streams.back().fill(block + i * kBytes, static_cast<uint8_t>(i), kBytes));
    }
    for (uint64_t i = 0; i < 64; ++i) {
      CHECK(cts.download(streams[i], block + i * kBytes, kBytes) ==
            std::vector<uint8_t>(kBytes, static_cast<uint8_t>(i)));
    }
  }
  CHECK_OK(cts.device->free(block));
}

CTS_TEST("streams: created and destroyed a thousand times") {
  for (int i = 0; i < 1000; ++i) {
    const auto stream = cts.stream();
    CHECK(stream);
  }
}

CTS_TEST("streams: every priority of the range works") {
  const auto& info = cts.device->info();
  REQUIRE(info.priority_highest <= info.priority_lowest);
  for (int32_t priority = info.priority_highest; priority <= info.priority_lowest; ++priority) {
    const auto stream = cts.stream(priority);
    int runs = 0;
    REQUIRE_OK(stream.launch_host(count_up, &runs));
    REQUIRE_OK(stream.synchronize());
    CHECK(runs == 1);
  }
}

}  // namespace gpushare::cts
