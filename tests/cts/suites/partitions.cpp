// Shares of the compute units, where the device has them (GPUSHARE_DEVICE_CAP_PARTITIONS).
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cts.hpp"

namespace gpushare::cts {
namespace {

bool has_partitions(const Context& cts) {
  return cts.device->can(GPUSHARE_DEVICE_CAP_PARTITIONS);
}

}  // namespace

CTS_TEST("partitions: they take whole groups of units and give them back") {
  if (!has_partitions(cts)) return;
  const auto before = cts.device->partition_info();
  REQUIRE_OK(before.status());
  CHECK(before->granularity_units > 0);
  CHECK(before->partitionable_units <= before->compute_units);
  CHECK(before->free_units == before->partitionable_units);
  const auto one = cts.device->create_partition(1);
  REQUIRE_OK(one.status());
  CHECK(one->compute_units >= 1);
  CHECK(cts.device->partition_info()->free_units == before->free_units - one->compute_units);
  const auto rest = cts.device->create_partition(before->free_units - one->compute_units);
  REQUIRE_OK(rest.status());
  CHECK(cts.device->partition_info()->free_units == 0);
  CHECK(cts.device->create_partition(1).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(cts.device->create_partition(before->compute_units + 1).status().code() == GPUSHARE_EXCEEDS_CAPACITY);
  CHECK(is_call_error(cts.device->create_partition(0).status()));
  CHECK_OK(cts.device->destroy_partition(one->handle));
  CHECK_OK(cts.device->destroy_partition(rest->handle));
  CHECK(cts.device->partition_info()->free_units == before->free_units);
}

// Each step by itself, so that a driver that refuses one of them says which.
CTS_TEST("partitions: their streams work beside those of the whole device") {
  if (!has_partitions(cts)) return;
  constexpr uint64_t kBytes = 1 << 20;
  const auto& info = cts.device->info();
  const auto half = cts.device->partition_info()->partitionable_units / 2;
  const auto first = cts.device->create_partition(half);
  const auto second = cts.device->create_partition(1);
  REQUIRE_OK(first.status());
  REQUIRE_OK(second.status());
  const device::Address block = *cts.device->alloc(kBytes);
  {
    const auto inside = cts.device->create_stream_in(first->handle, info.priority_highest);
    REQUIRE_OK(inside.status());
    const auto other = cts.device->create_stream_in(second->handle, info.priority_lowest);
    REQUIRE_OK(other.status());
    const auto outside = cts.stream();
    const auto start = cts.event(GPUSHARE_EVENT_TIMING);
    const auto end = cts.event(GPUSHARE_EVENT_TIMING);
    REQUIRE_OK(inside->record(start));
    REQUIRE_OK(inside->fill(block, 1, kBytes));
    REQUIRE_OK(inside->record(end));
    REQUIRE_OK(outside.wait(end));
    REQUIRE_OK(outside.fill(block, 2, kBytes / 2));
    const auto after = cts.event();
    REQUIRE_OK(outside.record(after));
    REQUIRE_OK(other->wait(after));
    int runs = 0;
    REQUIRE_OK(other->launch_host([](void* n) { ++*static_cast<int*>(n); }, &runs));
    const std::vector<uint8_t> got = cts.download(*other, block, kBytes);
    CHECK(runs == 1);
    CHECK(std::all_of(got.begin(), got.begin() + kBytes / 2, [](uint8_t byte) { return byte == 2; }));
    CHECK(std::all_of(got.begin() + kBytes / 2, got.end(), [](uint8_t byte) { return byte == 1; }));
    CHECK_OK(inside->synchronize());
    CHECK_OK(end.query());
    CHECK_OK(end.elapsed_since(start).status());
    CHECK(cts.device->destroy_partition(first->handle).code() == GPUSHARE_INVALID_STATE);
  }
  CHECK_OK(cts.device->free(block));
  CHECK_OK(cts.device->destroy_partition(first->handle));
  CHECK_OK(cts.device->destroy_partition(second->handle));
}

}  // namespace gpushare::cts
