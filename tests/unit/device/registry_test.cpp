// The rules of backend.h for registering and loading a backend.
// SPDX-License-Identifier: Apache-2.0
#include "device/registry.hpp"

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "device/device.hpp"
#include "fake_backend.hpp"
#include "support/catch.hpp"
#include "support/status_checks.hpp"

using gpushare::base::Status;
using gpushare::device::backends;
using gpushare::device::Device;
using gpushare::device::find_backend;
using gpushare::device::load_backend;
using gpushare::device::register_backend;
using gpushare::test::add_virtual_memory;
using gpushare::test::fake_backend;
using gpushare::test::mentions;
using gpushare::test::set_ok;

TEST_CASE("built-in backends are there on first use and come first", "[registry]") {
  REQUIRE(find_backend("host") != nullptr);
  REQUIRE(find_backend("sim") != nullptr);
  CHECK(std::strcmp(backends()[0]->name, "host") == 0);
  CHECK(std::strcmp(backends()[1]->name, "sim") == 0);
  CHECK(find_backend("nobody") == nullptr);
}

TEST_CASE("registration copies the table", "[registry]") {
  gpushare_backend_ops ops = fake_backend("copied");
  REQUIRE(register_backend(&ops).ok());
  ops.probe = nullptr;
  const gpushare_backend_ops* found = find_backend("copied");
  REQUIRE(found != nullptr);
  REQUIRE(found != &ops);
  uint32_t count = 0;
  CHECK(found->probe(&count) == GPUSHARE_OK);
  CHECK(register_backend(found).code() == GPUSHARE_ALREADY_EXISTS);
}

TEST_CASE("absent optional ops answer UNSUPPORTED", "[registry]") {
  const gpushare_backend_ops ops = fake_backend("bare");
  REQUIRE(register_backend(&ops).ok());
  const gpushare_backend_ops* found = find_backend("bare");
  REQUIRE(found != nullptr);
  gpushare_device_address address = 0;
  CHECK(found->va_reserve(nullptr, 1, &address) == GPUSHARE_UNSUPPORTED);
  CHECK(found->va_free(nullptr, 0, 1) == GPUSHARE_UNSUPPORTED);
  CHECK(found->phys_create(nullptr, 1, nullptr) == GPUSHARE_UNSUPPORTED);
  CHECK(found->phys_release(nullptr, nullptr) == GPUSHARE_UNSUPPORTED);
  CHECK(found->va_map(nullptr, 0, 1, nullptr, 0) == GPUSHARE_UNSUPPORTED);
  CHECK(found->va_unmap(nullptr, 0, 1) == GPUSHARE_UNSUPPORTED);
  CHECK(found->work_launch(nullptr, nullptr) == GPUSHARE_UNSUPPORTED);
  CHECK(found->fault_set(nullptr, nullptr) == GPUSHARE_UNSUPPORTED);
}

TEST_CASE("a whole optional group is kept", "[registry]") {
  gpushare_backend_ops ops = fake_backend("with-virtual-memory");
  add_virtual_memory(ops);
  REQUIRE(register_backend(&ops).ok());
  CHECK(find_backend("with-virtual-memory")->va_unmap(nullptr, 0, 1) == GPUSHARE_OK);
}

TEST_CASE("a half-filled group is refused and named", "[registry]") {
  gpushare_backend_ops ops = fake_backend("half");
  add_virtual_memory(ops);
  ops.va_unmap = nullptr;
  const Status status = register_backend(&ops);
  CHECK(status.code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(mentions(status, "va_unmap"));
  CHECK_FALSE(mentions(status, "va_map "));
  CHECK(find_backend("half") == nullptr);
}

TEST_CASE("group ipc is all or none and needs virtual memory", "[registry]") {
  gpushare_backend_ops ops = fake_backend("ipc");
  set_ok(ops.phys_create_shared);
  set_ok(ops.phys_export);
  Status status = register_backend(&ops);
  CHECK(status.code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(mentions(status, "phys_import"));
  set_ok(ops.phys_import);
  status = register_backend(&ops);
  CHECK(status.code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(mentions(status, "virtual memory"));
  add_virtual_memory(ops);
  CHECK(register_backend(&ops).ok());
  CHECK(find_backend("ipc")->phys_import == ops.phys_import);
  int32_t descriptor = 0;
  CHECK(find_backend("bare")->phys_export(nullptr, nullptr, GPUSHARE_ACCESS_READ, &descriptor) ==
        GPUSHARE_UNSUPPORTED);
}

TEST_CASE("an op of a later minor version is filled in for a table without it", "[registry]") {
  gpushare_backend_ops ops = fake_backend("captures");
  set_ok(ops.stream_capture_drop);
  set_ok(ops.stream_adopt);
  REQUIRE(register_backend(&ops).ok());
  CHECK(find_backend("captures")->stream_adopt == ops.stream_adopt);
  CHECK(find_backend("bare")->stream_adopt(nullptr, nullptr, nullptr) == GPUSHARE_UNSUPPORTED);
  uint32_t dropped = 0;
  CHECK(find_backend("captures")->stream_capture_drop(nullptr, &dropped) == GPUSHARE_OK);
  CHECK(find_backend("bare")->stream_capture_drop(nullptr, &dropped) == GPUSHARE_UNSUPPORTED);
}

TEST_CASE("a call of an op that the backend lacks says so", "[registry]") {
  gpushare_backend_ops ops = *find_backend("host");
  ops.name = "without-faults";
  ops.fault_set = nullptr;
  REQUIRE(register_backend(&ops).ok());
  const auto device = Device::open("without-faults?total_bytes=67108864");
  REQUIRE(device.ok());
  const Status status = (*device)->set_fault({});
  CHECK(status.code() == GPUSHARE_UNSUPPORTED);
  CHECK(mentions(status, "backend 'without-faults' does not have this operation"));
  CHECK((*device)->close().ok());
}

TEST_CASE("phys_create_host needs virtual memory", "[registry]") {
  gpushare_backend_ops ops = fake_backend("tiers");
  set_ok(ops.phys_create_host);
  const Status status = register_backend(&ops);
  CHECK(status.code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(mentions(status, "virtual memory"));
  add_virtual_memory(ops);
  CHECK(register_backend(&ops).ok());
  CHECK(find_backend("bare")->phys_create_host(nullptr, 1, nullptr) == GPUSHARE_UNSUPPORTED);
}

TEST_CASE(
    "ops for runs are both or none and need virtual memory; without them each mapping is made by itself",
    "[registry]") {
  gpushare_backend_ops ops = fake_backend("half-a-run");
  add_virtual_memory(ops);
  set_ok(ops.va_map_run);
  CHECK(mentions(register_backend(&ops), "va_unmap_run"));
  ops = fake_backend("runs-alone");
  set_ok(ops.va_map_run);
  set_ok(ops.va_unmap_run);
  CHECK(mentions(register_backend(&ops), "virtual memory"));

  ops = *find_backend("host");
  ops.name = "without-runs";
  ops.va_map_run = nullptr;
  ops.va_unmap_run = nullptr;
  REQUIRE(register_backend(&ops).ok());
  auto device = Device::open("without-runs?total_bytes=67108864");
  REQUIRE(device.ok());
  const uint64_t granule = (*device)->info().mapping_granularity_bytes;
  const gpushare_device_address range = *(*device)->va_reserve(3 * granule);
  gpushare_backend_memory* memories[] = {*(*device)->phys_create(granule), *(*device)->phys_create(granule),
                                         *(*device)->phys_create(granule)};
  uint64_t done = 9;
  REQUIRE((*device)->va_map(range + 2 * granule, granule, memories[2], 0).ok());
  CHECK((*device)->va_map_run(range, granule, memories, 3).code() == GPUSHARE_INVALID_STATE);
  REQUIRE((*device)->va_map_run(range, granule, memories, 2).ok());  // nothing is left of the attempt
  *reinterpret_cast<char*>(range + granule) = 1;
  CHECK((*device)->va_unmap_run(range, granule, 3, &done).ok());
  CHECK(done == 3);
  REQUIRE((*device)->va_map_run(range, granule, memories, 2).ok());
  CHECK((*device)->va_unmap_run(range, granule, 3, &done).code() == GPUSHARE_NOT_FOUND);
  CHECK(done == 2);
  for (gpushare_backend_memory* memory : memories) CHECK((*device)->phys_release(memory).ok());
  CHECK((*device)->va_free(range, 3 * granule).ok());
  CHECK((*device)->close().ok());
}

TEST_CASE("missing mandatory ops are refused and named", "[registry]") {
  gpushare_backend_ops ops = fake_backend("incomplete");
  ops.event_query = nullptr;
  ops.probe = nullptr;
  const Status status = register_backend(&ops);
  CHECK(status.code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(mentions(status, "event_query"));
  CHECK(mentions(status, "probe"));
}

TEST_CASE("the ABI's major version and the table's size are checked", "[registry]") {
  CHECK(register_backend(nullptr).code() == GPUSHARE_INVALID_ARGUMENT);

  gpushare_backend_ops ops = fake_backend("other-major");
  ops.abi_version = (GPUSHARE_BACKEND_ABI_MAJOR + 1) << 16;
  CHECK(register_backend(&ops).code() == GPUSHARE_INVALID_ARGUMENT);
  ops.abi_version = 0;
  CHECK(register_backend(&ops).code() == GPUSHARE_INVALID_ARGUMENT);

  ops = fake_backend("newer-minor");
  ops.abi_version = GPUSHARE_BACKEND_ABI_VERSION + 7;
  CHECK(register_backend(&ops).ok());

  ops = fake_backend("short");
  ops.struct_size = GPUSHARE_BACKEND_OPS_V1_SIZE - 1;
  CHECK(register_backend(&ops).code() == GPUSHARE_INVALID_ARGUMENT);
}

TEST_CASE("a longer table of a later version is accepted, its known prefix copied", "[registry]") {
  struct Later {
    gpushare_backend_ops ops;
    void* more[4];
  };
  Later later{fake_backend("later"), {&later, &later, &later, &later}};
  later.ops.struct_size = sizeof(later);
  REQUIRE(register_backend(&later.ops).ok());
  CHECK(find_backend("later")->struct_size == sizeof(gpushare_backend_ops));
}

TEST_CASE("names are checked", "[registry]") {
  for (const char* name :
       {"", "auto", "Upper", "a:b", "a?b", "with space", "a-name-that-is-longer-than-31-characters"}) {
    INFO(name);
    const gpushare_backend_ops ops = fake_backend(name);
    CHECK(register_backend(&ops).code() == GPUSHARE_INVALID_ARGUMENT);
  }
  for (const char* name : {"a-0", "z_9"}) {
    INFO(name);
    const gpushare_backend_ops ops = fake_backend(name);
    CHECK(register_backend(&ops).ok());
  }
  const gpushare_backend_ops ops = fake_backend(nullptr);
  CHECK(register_backend(&ops).code() == GPUSHARE_INVALID_ARGUMENT);
  const gpushare_backend_ops again = fake_backend("host");
  CHECK(register_backend(&again).code() == GPUSHARE_ALREADY_EXISTS);
}

TEST_CASE("of many threads that register one name, one wins", "[registry]") {
  const gpushare_backend_ops ops = fake_backend("contended");
  std::vector<std::thread> threads;
  std::vector<int32_t> codes(8, -1);
  for (size_t i = 0; i < codes.size(); ++i) {
    threads.emplace_back([&, i] { codes[i] = register_backend(&ops).code(); });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(std::count(codes.begin(), codes.end(), GPUSHARE_OK) == 1);
  CHECK(std::count(codes.begin(), codes.end(), GPUSHARE_ALREADY_EXISTS) == 7);
}

TEST_CASE("plug-ins load from absolute paths only", "[registry][plugin]") {
  CHECK(load_backend("").code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(load_backend("libplugin.so").code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(load_backend("/nowhere/libplugin.so").code() == GPUSHARE_NOT_FOUND);
  CHECK(load_backend(GPUSHARE_TEST_NOT_A_PLUGIN).code() == GPUSHARE_MALFORMED_INPUT);
  REQUIRE(load_backend(GPUSHARE_TEST_PLUGIN).ok());
  CHECK(find_backend("from-plugin") != nullptr);
  CHECK(load_backend(GPUSHARE_TEST_PLUGIN).code() == GPUSHARE_ALREADY_EXISTS);
}

TEST_CASE("a failing op of a backend without details still says what failed", "[registry]") {
  gpushare_backend_ops ops = fake_backend("silent");
  ops.device_open = [](uint32_t, const char*, gpushare_backend_device**) -> int32_t {
    return GPUSHARE_UNAVAILABLE;
  };
  REQUIRE(register_backend(&ops).ok());
  const auto device = Device::open("silent");
  CHECK(device.status().code() == GPUSHARE_UNAVAILABLE);
  CHECK(mentions(device.status(), "device_open"));
  CHECK(device.status().backend() == "silent");
}
