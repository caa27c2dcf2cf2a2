// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include "cts.hpp"

namespace gpushare::cts {

CTS_TEST("faults: device out of memory at call n") {
  REQUIRE(cts.device->can(GPUSHARE_DEVICE_CAP_FAULTS));
  REQUIRE_OK(cts.device->set_fault(fault(GPUSHARE_FAULT_DEVICE_OUT_OF_MEMORY, 3)));
  const auto first = cts.device->alloc(4096);
  const auto second = cts.device->alloc(4096);
  REQUIRE_OK(first.status());
  REQUIRE_OK(second.status());
  CHECK(cts.device->alloc(4096).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  const auto fourth = cts.device->alloc(4096);
  REQUIRE_OK(fourth.status());
  for (const auto* block : {&first, &second, &fourth}) CHECK_OK(cts.device->free(**block));
  REQUIRE_OK(cts.device->set_fault(fault(GPUSHARE_FAULT_DEVICE_OUT_OF_MEMORY, 1)));
  const uint64_t granule = cts.device->info().mapping_granularity_bytes;
  if (granule > 0) {
    CHECK(cts.device->phys_create(granule).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
    const auto memory = cts.device->phys_create(granule);
    REQUIRE_OK(memory.status());
    CHECK_OK(cts.device->phys_release(*memory));
  }
}

CTS_TEST("faults: host out of memory at call n") {
  REQUIRE_OK(cts.device->set_fault(fault(GPUSHARE_FAULT_HOST_OUT_OF_MEMORY, 2)));
  const auto first = cts.device->host_alloc(100);
  REQUIRE_OK(first.status());
  CHECK(cts.device->host_alloc(100).status().code() == GPUSHARE_HOST_OUT_OF_MEMORY);
  CHECK_OK(cts.device->host_free(*first));
}

CTS_TEST("faults: a mapping fails at call n") {
  const uint64_t granule = cts.device->info().mapping_granularity_bytes;
  const device::Address range = *cts.device->va_reserve(2 * granule);
  gpushare_backend_memory* memory = *cts.device->phys_create(granule);
  REQUIRE_OK(cts.device->set_fault(fault(GPUSHARE_FAULT_MAP_FAILS, 2)));
  REQUIRE_OK(cts.device->va_map(range, granule, memory, 0));
  CHECK(cts.device->va_map(range + granule, granule, memory, 0).code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  // Nothing was mapped by the failure.
  CHECK(is_call_error(cts.device->va_unmap(range + granule, granule)));
  // A run is one call.
  REQUIRE_OK(cts.device->set_fault(fault(GPUSHARE_FAULT_MAP_FAILS, 1)));
  CHECK(cts.device->va_map_run(range + granule, granule, &memory, 1).code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(is_call_error(cts.device->va_unmap(range + granule, granule)));
  CHECK_OK(cts.device->va_unmap(range, granule));
  CHECK_OK(cts.device->phys_release(memory));
  CHECK_OK(cts.device->va_free(range, 2 * granule));
}

CTS_TEST("faults: a stream cannot be created at call n") {
  REQUIRE_OK(cts.device->set_fault(fault(GPUSHARE_FAULT_STREAM_CREATE_FAILS, 2)));
  const auto first = cts.stream();
  CHECK(cts.device->create_stream().status().code() == GPUSHARE_UNKNOWN);
  const auto third = cts.stream();
}

CTS_TEST("faults: a launch fails at call n and at no other") {
  const auto stream = cts.stream();
  const auto event = cts.event();
  int runs = 0;
  REQUIRE_OK(cts.device->set_fault(fault(GPUSHARE_FAULT_LAUNCH_FAILS, 3)));
  REQUIRE_OK(stream.launch_host(count_up, &runs));
  REQUIRE_OK(stream.record(event));  // not an enqueue that counts
  REQUIRE_OK(stream.launch_host(count_up, &runs));
  CHECK(stream.launch_host(count_up, &runs).code() == GPUSHARE_UNKNOWN);
  REQUIRE_OK(stream.launch_host(count_up, &runs));
  CHECK_OK(stream.synchronize());
  CHECK(runs == 3);
}

CTS_TEST("faults: every kind of enqueue counts") {
  constexpr uint64_t kBytes = 100'000;
  std::vector<uint8_t> host(kBytes, 1);
  const device::Address block = *cts.device->alloc(2 * kBytes);
  {
    const auto stream = cts.stream();
    const auto enqueue = [&](int kind) {
      switch (kind) {
        case 0:
          return stream.copy(block, address_of(host.data()), kBytes, GPUSHARE_COPY_HOST_TO_DEVICE);
        case 1:
          return stream.copy(address_of(host.data()), block, kBytes, GPUSHARE_COPY_DEVICE_TO_HOST);
        case 2:
          return stream.copy(block, block + kBytes, kBytes, GPUSHARE_COPY_DEVICE_TO_DEVICE);
        case 3:
          return stream.fill(block, 1, kBytes);
        case 4:
          return stream.launch_host([](void*) {}, nullptr);
        default:
          return stream.work(work(1000));
      }
    };
    const int kinds = cts.device->can(GPUSHARE_DEVICE_CAP_MODELED_WORK) ? 6 : 5;
    for (int kind = 0; kind < kinds; ++kind) {
      INFO("kind " << kind);
      REQUIRE_OK(cts.device->set_fault(fault(GPUSHARE_FAULT_LAUNCH_FAILS, 1)));
      CHECK(enqueue(kind).code() == GPUSHARE_UNKNOWN);
      CHECK_OK(enqueue(kind));
    }
    CHECK_OK(stream.synchronize());
  }
  CHECK_OK(cts.device->free(block));
}

CTS_TEST("faults: a lost device fails everything but releases") {
  const uint64_t granule = cts.device->info().mapping_granularity_bytes;
  const device::Address block = *cts.device->alloc(4096);
  void* host = *cts.device->host_alloc(4096);
  const device::Address range = *cts.device->va_reserve(granule);
  gpushare_backend_memory* memory = *cts.device->phys_create(granule);
  REQUIRE_OK(cts.device->va_map(range, granule, memory, 0));
  {
    Gate gate;
    int runs = 0;
    const auto stream = cts.stream();
    const auto other = cts.stream();
    const auto passed = cts.event(GPUSHARE_EVENT_TIMING);
    const auto pending = cts.event(GPUSHARE_EVENT_TIMING);
    REQUIRE_OK(other.record(passed));
    REQUIRE_OK(other.synchronize());
    REQUIRE_OK(cts.device->set_fault(fault(GPUSHARE_FAULT_DEVICE_LOST, 3)));
    REQUIRE_OK(stream.launch_host(Gate::block, &gate));
    REQUIRE_OK(stream.launch_host(count_up, &runs));
    REQUIRE_OK(stream.record(pending));
    CHECK(other.launch_host(count_up, &runs).code() == GPUSHARE_DEVICE_LOST);
    // Work that had not started never runs.
    gate.open();
    CHECK(stream.synchronize().code() == GPUSHARE_DEVICE_LOST);
    CHECK(runs == 0);
    CHECK(stream.query().code() == GPUSHARE_DEVICE_LOST);
    CHECK(other.query().code() == GPUSHARE_DEVICE_LOST);
    CHECK(other.synchronize().code() == GPUSHARE_DEVICE_LOST);
    CHECK(passed.query().code() == GPUSHARE_DEVICE_LOST);
    CHECK(passed.synchronize().code() == GPUSHARE_DEVICE_LOST);
    CHECK(pending.query().code() == GPUSHARE_DEVICE_LOST);
    CHECK(pending.synchronize().code() == GPUSHARE_DEVICE_LOST);
    CHECK(passed.elapsed_since(passed).status().code() == GPUSHARE_DEVICE_LOST);
    CHECK(other.record(passed).code() == GPUSHARE_DEVICE_LOST);
    CHECK(other.wait(passed).code() == GPUSHARE_DEVICE_LOST);
    CHECK(other.fill(block, 0, 16).code() == GPUSHARE_DEVICE_LOST);
    CHECK(cts.device->alloc(4096).status().code() == GPUSHARE_DEVICE_LOST);
    CHECK(cts.device->host_alloc(4096).status().code() == GPUSHARE_DEVICE_LOST);
    CHECK(cts.device->phys_create(granule).status().code() == GPUSHARE_DEVICE_LOST);
    CHECK(cts.device->create_stream().status().code() == GPUSHARE_DEVICE_LOST);
    CHECK(cts.device->create_event().status().code() == GPUSHARE_DEVICE_LOST);
    // It stays lost.
    CHECK_OK(cts.device->set_fault(fault(GPUSHARE_FAULT_NONE, 0)));
    CHECK(stream.launch_host(count_up, &runs).code() == GPUSHARE_DEVICE_LOST);
    CHECK_OK(cts.device->refresh_info().status());
  }
  CHECK_OK(cts.device->va_unmap(range, granule));
  CHECK_OK(cts.device->phys_release(memory));
  CHECK_OK(cts.device->va_free(range, granule));
  CHECK_OK(cts.device->host_free(host));
  CHECK_OK(cts.device->free(block));
}

CTS_TEST("faults: a slow stream still does its work") {
  constexpr uint64_t kBytes = 1 << 20;
  const auto data = pattern(kBytes, 4);
  const device::Address block = *cts.device->alloc(kBytes);
  {
    const auto stream = cts.stream();
    REQUIRE_OK(cts.device->set_fault(fault(GPUSHARE_FAULT_SLOW_STREAM, 1, 3.0)));
    cts.upload(stream, block, data);
    CHECK(cts.download(stream, block, kBytes) == data);
  }
  CHECK_OK(cts.device->free(block));
}

CTS_TEST("faults: setting none clears what has not fired") {
  for (uint32_t kind = GPUSHARE_FAULT_DEVICE_OUT_OF_MEMORY; kind <= GPUSHARE_FAULT_HOST_OUT_OF_MEMORY;
       ++kind) {
    REQUIRE_OK(cts.device->set_fault(fault(kind, 1, 2.0)));
  }
  REQUIRE_OK(cts.device->set_fault(fault(GPUSHARE_FAULT_NONE, 0)));
  const auto block = cts.device->alloc(4096);
  const auto host = cts.device->host_alloc(4096);
  REQUIRE_OK(block.status());
  REQUIRE_OK(host.status());
  const auto stream = cts.stream();
  CHECK_OK(stream.fill(*block, 1, 4096));
  CHECK_OK(stream.synchronize());
  CHECK_OK(cts.device->free(*block));
  CHECK_OK(cts.device->host_free(*host));
}

CTS_TEST("faults: bad scripts are refused") {
  CHECK(cts.device->set_fault(fault(99, 1)).code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(cts.device->set_fault(fault(GPUSHARE_FAULT_LAUNCH_FAILS, 0)).code() == GPUSHARE_INVALID_ARGUMENT);
  for (const double factor : {0.0, 0.5, -1.0, 1e9, std::numeric_limits<double>::quiet_NaN()}) {
    CHECK(cts.device->set_fault(fault(GPUSHARE_FAULT_SLOW_STREAM, 1, factor)).code() ==
          GPUSHARE_INVALID_ARGUMENT);
  }
  gpushare_backend_fault small = fault(GPUSHARE_FAULT_LAUNCH_FAILS, 1);
  small.struct_size = 8;
  CHECK(cts.device->set_fault(small).code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(cts.device->ops().fault_set(cts.device->get(), nullptr) == GPUSHARE_INVALID_ARGUMENT);
}

}  // namespace gpushare::cts
