// Shares of the SMs by green contexts.
// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "cuda_support.hpp"

using namespace cuda_test;     // NOLINT(google-build-using-namespace)
using namespace standin_test;  // NOLINT(google-build-using-namespace)

TEST_CASE("partitions take whole groups of SMs and give them back", "[cuda]") {
  auto device = open();
  REQUIRE(device->can(GPUSHARE_DEVICE_CAP_PARTITIONS));
  auto info = device->partition_info();
  REQUIRE_OK(info.status());
  CHECK(info->compute_units == 132);
  CHECK(info->granularity_units == 8);
  CHECK(info->partitionable_units == 128);
  CHECK(info->free_units == 128);

  const auto small = device->create_partition(1);
  const auto large = device->create_partition(100);
  REQUIRE_OK(small.status());
  REQUIRE_OK(large.status());
  CHECK(small->compute_units == 8);
  CHECK(large->compute_units == 104);
  CHECK(device->partition_info()->free_units == 16);
  const auto refused = device->create_partition(17);
  CHECK(refused.status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(mentions(refused.status(), "16 are free"));
  CHECK(device->create_partition(129).status().code() == GPUSHARE_EXCEEDS_CAPACITY);
  CHECK(device->create_partition(0).status().code() == GPUSHARE_INVALID_ARGUMENT);

  REQUIRE_OK(device->destroy_partition(large->handle));
  CHECK(device->destroy_partition(large->handle).code() == GPUSHARE_INVALID_HANDLE);
  CHECK(device->partition_info()->free_units == 120);
  REQUIRE_OK(device->destroy_partition(small->handle));
  REQUIRE_OK(device->close());
  check_clean();
}

TEST_CASE("a stream of a partition works as any other, beside those of the whole device", "[cuda]") {
  auto device = open();
  const auto partition = device->create_partition(16);
  REQUIRE_OK(partition.status());
  const auto block = device->alloc(4096);
  std::vector<unsigned char> host(4096);
  {
    const auto inside = device->create_stream_in(partition->handle, device->info().priority_highest);
    const auto outside = device->create_stream();
    REQUIRE_OK(inside.status());
    const auto event = device->create_event(GPUSHARE_EVENT_TIMING);
    REQUIRE_OK(inside->fill(*block, 7, 4096));
    REQUIRE_OK(inside->record(*event));
    REQUIRE_OK(outside->wait(*event));
    REQUIRE_OK(
        outside->copy(reinterpret_cast<uint64_t>(host.data()), *block, 4096, GPUSHARE_COPY_DEVICE_TO_HOST));
    REQUIRE_OK(outside->synchronize());
    CHECK(host == std::vector<unsigned char>(4096, 7));
    const Status busy = device->destroy_partition(partition->handle);
    CHECK(busy.code() == GPUSHARE_INVALID_STATE);
    CHECK(mentions(busy, "1 streams"));
  }
  REQUIRE_OK(device->destroy_partition(partition->handle));
  REQUIRE_OK(device->free(*block));
  REQUIRE_OK(device->close());
  check_clean();
}

TEST_CASE("a partition left open is named at close and released", "[cuda]") {
  auto device = open();
  const auto partition = device->create_partition(8);
  REQUIRE_OK(partition.status());
  const Status left = device->close();
  CHECK(left.code() == GPUSHARE_INVALID_STATE);
  CHECK(mentions(left, "1 partition"));
  check_clean();
}

TEST_CASE("without green contexts the group is UNSUPPORTED and all else works", "[cuda]") {
  REQUIRE(standin_configure("sm_granularity", 0) == 0);
  auto device = open();
  REQUIRE(standin_configure("sm_granularity", 8) == 0);
  CHECK_FALSE(device->can(GPUSHARE_DEVICE_CAP_PARTITIONS));
  const auto info = device->partition_info();
  CHECK(info.status().code() == GPUSHARE_UNSUPPORTED);
  CHECK(mentions(info.status(), "cannot be split"));
  CHECK(device->create_partition(8).status().code() == GPUSHARE_UNSUPPORTED);
  REQUIRE_OK(device->free(*device->alloc(64)));
  REQUIRE_OK(device->close());
  check_clean();
}

TEST_CASE("a driver that counts groups of SMs and then refuses to make them has no partitions", "[cuda]") {
  standin_fail_call("cuDevSmResourceSplitByCount", 2, CUDA_ERROR_OUT_OF_MEMORY);
  auto device = open();
  CHECK_FALSE(device->can(GPUSHARE_DEVICE_CAP_PARTITIONS));
  CHECK(mentions(device->partition_info().status(), "cannot be split"));
  REQUIRE_OK(device->close());
  check_clean();
}

TEST_CASE("a device that is one group of SMs has one partition", "[cuda]") {
  REQUIRE(standin_configure("sm_granularity", 128) == 0);
  auto device = open();
  REQUIRE(standin_configure("sm_granularity", 8) == 0);
  CHECK(device->can(GPUSHARE_DEVICE_CAP_PARTITIONS));
  CHECK(device->partition_info()->partitionable_units == 128);
  REQUIRE_OK(device->close());
  check_clean();
}

TEST_CASE("a green context that the driver refuses leaves its SMs free", "[cuda]") {
  auto device = open();
  for (const char* call : {"cuDevResourceGenerateDesc", "cuGreenCtxCreate"}) {
    standin_fail_call(call, 1, CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(device->create_partition(8).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
    CHECK(device->partition_info()->free_units == 128);
  }
  REQUIRE_OK(device->close());
  check_clean();
}
