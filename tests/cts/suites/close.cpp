// SPDX-License-Identifier: Apache-2.0
#include "cts.hpp"

namespace gpushare::cts {
namespace {

std::unique_ptr<device::Device> open_another() {
  auto device = device::Device::open(device_spec());
  REQUIRE_OK(device.status());
  return std::move(*device);
}

}  // namespace

CTS_TEST("close: what was left open is named") {
  auto device = open_another();
  const auto stream = *device->create_stream();
  const auto event = *device->create_event();
  const auto another = *device->create_event();
  REQUIRE_OK(device->alloc(4096).status());
  REQUIRE_OK(device->host_alloc(4096).status());
  const base::Status status = device->close();
  CHECK(status.code() == GPUSHARE_INVALID_STATE);
  INFO(status.message());
  CHECK(status.message().find("1 stream") != std::string::npos);
  CHECK(status.message().find("2 event") != std::string::npos);
  CHECK(status.message().find("allocation") != std::string::npos);
}

CTS_TEST("close: mappings and reservations left open are named") {
  auto device = open_another();
  const uint64_t granule = device->info().mapping_granularity_bytes;
  const device::Address range = *device->va_reserve(2 * granule);
  gpushare_backend_memory* memory = *device->phys_create(granule);
  REQUIRE_OK(device->va_map(range, granule, memory, 0));
  const base::Status status = device->close();
  CHECK(status.code() == GPUSHARE_INVALID_STATE);
  INFO(status.message());
  CHECK(status.message().find("mapping") != std::string::npos);
  CHECK(status.message().find("reservation") != std::string::npos);
}

CTS_TEST("close: it waits for work") {
  auto device = open_another();
  int runs = 0;
  const auto first = *device->create_stream();
  const auto second = *device->create_stream();
  const auto event = *device->create_event();
  for (int i = 0; i < 20; ++i) {
    REQUIRE_OK(first.launch_host(count_up, &runs));
    REQUIRE_OK(first.record(event));
    REQUIRE_OK(second.wait(event));
    REQUIRE_OK(second.launch_host(count_up, &runs));
    REQUIRE_OK(second.record(event));
    REQUIRE_OK(first.wait(event));
  }
  CHECK(device->close().code() == GPUSHARE_INVALID_STATE);
  CHECK(runs == 40);
}

CTS_TEST("close: open and close a hundred times") {
  for (int i = 0; i < 100; ++i) {
    auto device = open_another();
    REQUIRE_OK(device->close());
  }
}

CTS_TEST("close: two devices of a backend do not know each other") {
  auto other = open_another();
  const device::Address here = *cts.device->alloc(4096);
  {
    const auto stream = cts.stream();
    REQUIRE_OK(stream.fill(here, 1, 4096));
    CHECK_OK(other->close());
    CHECK(cts.download(stream, here, 4096) == std::vector<uint8_t>(4096, 1));
  }
  CHECK_OK(cts.device->free(here));
}

}  // namespace gpushare::cts
