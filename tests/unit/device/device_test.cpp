// Device specifications and the C++ wrappers; what devices do is tests/cts.
// SPDX-License-Identifier: Apache-2.0
#include "device/device.hpp"

#include "device/registry.hpp"
#include "support/catch.hpp"
#include "support/status_checks.hpp"

using gpushare::base::Status;
using gpushare::device::Device;
using gpushare::device::Event;
using gpushare::device::find_backend;
using gpushare::device::Stream;
using gpushare::test::mentions;

namespace {

Status open_status(const char* spec) {
  return Device::open(spec).status();
}

}  // namespace

TEST_CASE("a device is opened by name, index and options", "[device]") {
  auto device = Device::open("host:0?total_bytes=64MiB&granularity=64KiB");
  REQUIRE(device.ok());
  CHECK((*device)->spec() == "host:0");
  CHECK((*device)->info().total_bytes == 64u << 20);
  CHECK((*device)->info().free_bytes == 64u << 20);
  CHECK((*device)->info().mapping_granularity_bytes == 64u << 10);
  CHECK((*device)->can(GPUSHARE_DEVICE_CAP_HOST_ADDRESSABLE));
  CHECK((*device)->close().ok());
}

TEST_CASE("a bad specification is refused with the reason", "[device]") {
  CHECK(open_status("").code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(open_status("?total_gib=1").code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(open_status("host:").code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(open_status("host:x").code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(open_status("host:-1").code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(open_status("host:4294967296").code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(open_status("host:1").code() == GPUSHARE_UNAVAILABLE);
  const Status nobody = open_status("nobody:0");
  CHECK(nobody.code() == GPUSHARE_NOT_FOUND);
  CHECK(mentions(nobody, "host"));
}

TEST_CASE("bad options are refused and name what is allowed", "[device]") {
  for (const char* spec :
       {"host?total_gib", "host?=1", "host?total_gib=x", "host?total_gib=-1", "host?total_gib=0",
        "host?total_gib=1&total_gib=1", "host?total_gib=1&total_bytes=1GiB", "host?granularity=3000",
        "host?granularity=12KiB", "host?copy_gbps=nan", "host?copy_gbps=1e-9", "host?total_bytes=1e30",
        "host?&"}) {
    INFO(spec);
    CHECK(open_status(spec).code() == GPUSHARE_INVALID_ARGUMENT);
  }
  const Status unknown = open_status("host?colour=red");
  CHECK(unknown.code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(mentions(unknown, "colour"));
  CHECK(mentions(unknown, "copy_gbps"));
}

TEST_CASE("auto opens a GPU where there is one, else the host device", "[device]") {
  auto device = Device::open("auto");
  REQUIRE(device.ok());
  uint32_t gpus = 0;
  const gpushare_backend_ops* cuda = find_backend("cuda");
  const bool has_gpu = cuda != nullptr && cuda->probe(&gpus) == GPUSHARE_OK && gpus > 0;
  if (!has_gpu) CHECK((*device)->spec() == "host");
  CHECK(open_status("auto:0").code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(open_status("auto?total_gib=1").code() == GPUSHARE_INVALID_ARGUMENT);
}

TEST_CASE("statuses carry the backend's name and message", "[device]") {
  auto device = Device::open("host?total_bytes=1MiB");
  REQUIRE(device.ok());
  const auto block = (*device)->alloc(2u << 20);
  CHECK(block.status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(block.status().backend() == "host");
  CHECK(mentions(block.status(), "mem_alloc"));
  CHECK(mentions(block.status(), "2.00 MiB"));
  auto stream = (*device)->create_stream();
  REQUIRE(stream.ok());
  gpushare_backend_work work{};
  const Status unsupported = stream->work(work);
  CHECK(unsupported.code() == GPUSHARE_UNSUPPORTED);
  CHECK(mentions(unsupported, "work_launch"));
}

TEST_CASE("wrappers move, and drop what they own", "[device]") {
  auto device = Device::open("host");
  REQUIRE(device.ok());
  {
    auto stream = (*device)->create_stream();
    auto event = (*device)->create_event();
    REQUIRE(stream.ok());
    REQUIRE(event.ok());
    Stream moved = std::move(*stream);
    Event moved_event = std::move(*event);
    CHECK(moved);
    CHECK(moved.native() != nullptr);
    Stream other;
    CHECK_FALSE(other);
    other = std::move(moved);
    CHECK(other.record(moved_event).ok());
    CHECK(moved_event.query().ok());
  }
  CHECK((*device)->close().ok());
  CHECK((*device)->close().ok());
}

TEST_CASE("wrappers left when the device closes are dropped quietly", "[device]") {
  auto device = Device::open("host");
  REQUIRE(device.ok());
  auto stream = (*device)->create_stream();
  auto event = (*device)->create_event();
  const Status closed = (*device)->close();
  CHECK(closed.code() == GPUSHARE_INVALID_STATE);
  CHECK(mentions(closed, "1 stream"));
  CHECK(mentions(closed, "1 event"));
}
