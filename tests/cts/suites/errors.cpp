// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "cts.hpp"
#include "device/registry.hpp"

namespace gpushare::cts {
namespace {

std::string with_option(const std::string& option) {
  const std::string spec = device_spec();
  return spec + (spec.find('?') == std::string::npos ? "?" : "&") + option;
}

}  // namespace

CTS_TEST("errors: null devices are refused by every op") {
  const gpushare_backend_ops& ops = cts.device->ops();
  gpushare_backend_device_info info{};
  info.struct_size = sizeof(info);
  gpushare_device_address address = 0;
  void* pointer = nullptr;
  gpushare_backend_stream* stream = nullptr;
  gpushare_backend_event* event = nullptr;
  uint64_t ns = 0;
  CHECK(ops.device_close(nullptr) == GPUSHARE_INVALID_HANDLE);
  CHECK(ops.device_info(nullptr, &info) == GPUSHARE_INVALID_HANDLE);
  CHECK(ops.clock_now(nullptr, &ns) == GPUSHARE_INVALID_HANDLE);
  CHECK(ops.mem_alloc(nullptr, 1, &address) == GPUSHARE_INVALID_HANDLE);
  CHECK(ops.mem_free(nullptr, 1) == GPUSHARE_INVALID_HANDLE);
  CHECK(ops.host_alloc(nullptr, 1, &pointer) == GPUSHARE_INVALID_HANDLE);
  CHECK(ops.host_free(nullptr, &pointer) == GPUSHARE_INVALID_HANDLE);
  CHECK(ops.stream_create(nullptr, 0, &stream) == GPUSHARE_INVALID_HANDLE);
  CHECK(ops.event_create(nullptr, 0, &event) == GPUSHARE_INVALID_HANDLE);
}

CTS_TEST("errors: null streams and events are refused by every op") {
  const gpushare_backend_ops& ops = cts.device->ops();
  const auto stream = cts.stream();
  const auto event = cts.event(GPUSHARE_EVENT_TIMING);
  uint64_t ns = 0;
  void* native = nullptr;
  CHECK(ops.stream_destroy(nullptr) == GPUSHARE_INVALID_HANDLE);
  CHECK(ops.stream_query(nullptr) == GPUSHARE_INVALID_HANDLE);
  CHECK(ops.stream_synchronize(nullptr) == GPUSHARE_INVALID_HANDLE);
  CHECK(ops.stream_wait_event(nullptr, event.get()) == GPUSHARE_INVALID_HANDLE);
  CHECK(ops.stream_wait_event(stream.get(), nullptr) == GPUSHARE_INVALID_HANDLE);
  CHECK(ops.stream_native(nullptr, &native) == GPUSHARE_INVALID_HANDLE);
  CHECK(ops.event_destroy(nullptr) == GPUSHARE_INVALID_HANDLE);
  CHECK(ops.event_record(nullptr, stream.get()) == GPUSHARE_INVALID_HANDLE);
  CHECK(ops.event_record(event.get(), nullptr) == GPUSHARE_INVALID_HANDLE);
  CHECK(ops.event_query(nullptr) == GPUSHARE_INVALID_HANDLE);
  CHECK(ops.event_synchronize(nullptr) == GPUSHARE_INVALID_HANDLE);
  CHECK(ops.event_elapsed(nullptr, event.get(), &ns) == GPUSHARE_INVALID_HANDLE);
  CHECK(ops.event_elapsed(event.get(), nullptr, &ns) == GPUSHARE_INVALID_HANDLE);
  CHECK(ops.copy_async(nullptr, 1, 1, 1, 0) == GPUSHARE_INVALID_HANDLE);
  CHECK(ops.fill_async(nullptr, 1, 1, 1) == GPUSHARE_INVALID_HANDLE);
  CHECK(ops.launch_host(
            nullptr, [](void*) {}, nullptr) == GPUSHARE_INVALID_HANDLE);
}

CTS_TEST("errors: null outputs are refused") {
  const gpushare_backend_ops& ops = cts.device->ops();
  gpushare_backend_device* device = cts.device->get();
  const auto stream = cts.stream();
  const auto event = cts.event(GPUSHARE_EVENT_TIMING);
  CHECK(is_call_error(ops.probe(nullptr)));
  CHECK(is_call_error(ops.device_open(0, "", nullptr)));
  CHECK(is_call_error(ops.device_info(device, nullptr)));
  CHECK(is_call_error(ops.clock_now(device, nullptr)));
  CHECK(is_call_error(ops.last_error(nullptr)));
  CHECK(is_call_error(ops.mem_alloc(device, 4096, nullptr)));
  CHECK(is_call_error(ops.host_alloc(device, 4096, nullptr)));
  CHECK(is_call_error(ops.stream_create(device, 0, nullptr)));
  CHECK(is_call_error(ops.stream_native(stream.get(), nullptr)));
  CHECK(is_call_error(ops.event_create(device, 0, nullptr)));
  CHECK(is_call_error(ops.event_elapsed(event.get(), event.get(), nullptr)));
}

CTS_TEST("errors: a failing op says why and only the failing thread sees it") {
  CHECK(is_call_error(cts.device->alloc(0).status()));
  gpushare_backend_error error{};
  error.struct_size = sizeof(error);
  REQUIRE(cts.device->ops().last_error(&error) == GPUSHARE_OK);
  CHECK(is_call_error(error.status));
  CHECK(std::strlen(error.message) > 0);
  // Success does not clear it.
  const auto block = cts.device->alloc(4096);
  REQUIRE_OK(block.status());
  gpushare_backend_error again{};
  again.struct_size = sizeof(again);
  REQUIRE(cts.device->ops().last_error(&again) == GPUSHARE_OK);
  CHECK(std::strcmp(error.message, again.message) == 0);
  CHECK_OK(cts.device->free(*block));
}

CTS_TEST("errors: structs of an older caller are filled as far as they go") {
  struct {
    gpushare_backend_device_info info;
    uint8_t canary[64];
  } wide{};
  std::memset(&wide, 0xCD, sizeof(wide));
  const uint32_t old_size = offsetof(gpushare_backend_device_info, free_bytes);
  wide.info.struct_size = old_size;
  REQUIRE(cts.device->ops().device_info(cts.device->get(), &wide.info) == GPUSHARE_OK);
  CHECK(wide.info.total_bytes == cts.device->info().total_bytes);
  CHECK(wide.info.free_bytes == 0xCDCDCDCDCDCDCDCDull);
  CHECK(wide.info.struct_size == old_size);
  for (const uint8_t byte : wide.canary) CHECK(byte == 0xCD);

  gpushare_backend_error error{};
  std::memset(&error, 0xCD, sizeof(error));
  error.struct_size = offsetof(gpushare_backend_error, native_code);
  REQUIRE(cts.device->ops().last_error(&error) == GPUSHARE_OK);
  CHECK(static_cast<uint8_t>(error.message[0]) == 0xCD);
}

CTS_TEST("errors: unknown flags and kinds are refused") {
  CHECK(is_call_error(cts.device->create_event(0x80).status()));
  std::vector<uint8_t> host(64);
  const device::Address block = *cts.device->alloc(4096);
  const auto stream = cts.stream();
  CHECK(is_call_error(stream.copy(block, address_of(host.data()), 64, 3)));
  CHECK(is_call_error(stream.copy(block, address_of(host.data()), 64, UINT32_MAX)));
  CHECK(is_call_error(stream.copy(block, 0, 64, GPUSHARE_COPY_HOST_TO_DEVICE)));
  CHECK(is_call_error(stream.copy(0, block, 64, GPUSHARE_COPY_DEVICE_TO_HOST)));
  CHECK_OK(stream.synchronize());
  CHECK_OK(cts.device->free(block));
}

CTS_TEST("errors: copies and fills outside live memory are refused") {
  std::vector<uint8_t> host(2 << 20);
  const device::Address block = *cts.device->alloc(1 << 20);
  const auto stream = cts.stream();
  const uint64_t pointer = address_of(host.data());
  CHECK(is_call_error(stream.copy(block + 4096, pointer, 1 << 20, GPUSHARE_COPY_HOST_TO_DEVICE)));
  CHECK(is_call_error(stream.copy(pointer, block - 1, 16, GPUSHARE_COPY_DEVICE_TO_HOST)));
  CHECK(is_call_error(stream.copy(block, block + (1 << 20), 16, GPUSHARE_COPY_DEVICE_TO_DEVICE)));
  CHECK(is_call_error(stream.fill(block, 0, UINT64_MAX)));
  CHECK(is_call_error(stream.fill(block, 0, (1 << 20) + 4096)));
  CHECK_OK(stream.synchronize());
  CHECK_OK(cts.device->free(block));
  CHECK(is_call_error(stream.fill(block, 0, 16)));
  CHECK_OK(stream.synchronize());
}

CTS_TEST("errors: reserved but unmapped addresses are refused") {
  const uint64_t granule = cts.device->info().mapping_granularity_bytes;
  const device::Address range = *cts.device->va_reserve(3 * granule);
  gpushare_backend_memory* memory = *cts.device->phys_create(granule);
  REQUIRE_OK(cts.device->va_map(range + granule, granule, memory, 0));
  const auto stream = cts.stream();
  CHECK(is_call_error(stream.fill(range, 0, 16)));
  CHECK(is_call_error(stream.fill(range + granule - 8, 0, 16)));
  CHECK(is_call_error(stream.fill(range + 2 * granule - 8, 0, 16)));
  CHECK_OK(stream.fill(range + granule, 0, granule));
  CHECK_OK(stream.synchronize());
  CHECK_OK(cts.device->va_unmap(range + granule, granule));
  CHECK_OK(cts.device->phys_release(memory));
  CHECK_OK(cts.device->va_free(range, 3 * granule));
}

CTS_TEST("errors: unknown options and devices are refused") {
  const auto bad = device::Device::open(with_option("no_such_option=1"));
  CHECK(bad.status().code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(bad.status().message().find("no_such_option") != std::string::npos);
  const std::string name = cts.device->ops().name;
  CHECK(device::Device::open(name + ":9999").status().code() == GPUSHARE_UNAVAILABLE);
}

CTS_TEST("errors: capabilities and ops agree") {
  const gpushare_backend_ops& ops = cts.device->ops();
  const auto stream = cts.stream();
  const gpushare_backend_fault none = fault(GPUSHARE_FAULT_NONE, 0);
  CHECK((ops.fault_set(cts.device->get(), &none) == GPUSHARE_UNSUPPORTED) !=
        cts.device->can(GPUSHARE_DEVICE_CAP_FAULTS));
  const gpushare_backend_work nothing = work(0);
  CHECK((ops.work_launch(stream.get(), &nothing) == GPUSHARE_UNSUPPORTED) !=
        cts.device->can(GPUSHARE_DEVICE_CAP_MODELED_WORK));
  gpushare_device_address address = 0;
  const uint64_t granule = cts.device->info().mapping_granularity_bytes;
  CHECK((granule > 0) == cts.device->can(GPUSHARE_DEVICE_CAP_VIRTUAL_MEMORY));
  const int32_t reserved = ops.va_reserve(cts.device->get(), granule > 0 ? granule : 4096, &address);
  CHECK((reserved == GPUSHARE_UNSUPPORTED) != cts.device->can(GPUSHARE_DEVICE_CAP_VIRTUAL_MEMORY));
  if (reserved == GPUSHARE_OK) CHECK_OK(cts.device->va_free(address, granule));
  CHECK_OK(stream.synchronize());
}

CTS_TEST("errors: events and streams of two devices do not mix") {
  auto other = device::Device::open(device_spec());
  REQUIRE_OK(other.status());
  {
    const auto stream = cts.stream();
    auto event = (*other)->create_event();
    REQUIRE_OK(event.status());
    CHECK(is_call_error(cts.device->ops().event_record(event->get(), stream.get())));
    CHECK(is_call_error(cts.device->ops().stream_wait_event(stream.get(), event->get())));
  }
  CHECK_OK((*other)->close());
}

}  // namespace gpushare::cts
