// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "cts.hpp"

namespace gpushare::cts {
namespace {

constexpr uint64_t kGuard = 512;
constexpr uint8_t kGuardByte = 0xA5;
const uint64_t kSizes[] = {0, 1, 3, 64, 255, 256, 257, 4095, 4096, 4097, 65'537, 1'048'589};
const uint64_t kOffsets[] = {0, 1, 7, 64};

// A device block with guard bytes before and behind the part that a test writes.
struct Guarded {
  Guarded(Context& context, const device::Stream& on, uint64_t payload_bytes, uint64_t payload_offset)
      : cts(context),
        stream(on),
        bytes(payload_bytes),
        offset(payload_offset),
        block(*context.device->alloc(2 * kGuard + payload_offset + payload_bytes)) {
    REQUIRE_OK(stream.fill(block, kGuardByte, all_bytes()));
  }
  uint64_t all_bytes() const { return 2 * kGuard + offset + bytes; }
  device::Address payload() const { return block + kGuard + offset; }
  // Whether the payload is `expected` and nothing else was written. Frees the block.
  bool holds(const std::vector<uint8_t>& expected) const {
    const std::vector<uint8_t> all = cts.download(stream, block, all_bytes());
    REQUIRE_OK(cts.device->free(block));
    const auto start = all.begin() + static_cast<std::ptrdiff_t>(kGuard + offset);
    const auto end = start + static_cast<std::ptrdiff_t>(bytes);
    const auto is_guard = [](uint8_t byte) { return byte == kGuardByte; };
    return std::all_of(all.begin(), start, is_guard) &&
           std::equal(start, end, expected.begin(), expected.end()) && std::all_of(end, all.end(), is_guard);
  }

  Context& cts;
  const device::Stream& stream;
  uint64_t bytes;
  uint64_t offset;
  device::Address block;
};

}  // namespace

CTS_TEST("copies: host to device in all sizes and offsets") {
  const auto stream = cts.stream();
  for (const uint64_t bytes : kSizes) {
    for (const uint64_t offset : kOffsets) {
      INFO(bytes << " bytes at offset " << offset);
      const auto source = pattern(bytes + offset, bytes);
      const Guarded to(cts, stream, bytes, offset);
      REQUIRE_OK(
          stream.copy(to.payload(), address_of(source.data() + offset), bytes, GPUSHARE_COPY_HOST_TO_DEVICE));
      REQUIRE_OK(stream.synchronize());
      CHECK(to.holds({source.begin() + static_cast<std::ptrdiff_t>(offset), source.end()}));
    }
  }
}

CTS_TEST("copies: device to host in all sizes and offsets") {
  const auto stream = cts.stream();
  for (const uint64_t bytes : kSizes) {
    for (const uint64_t offset : kOffsets) {
      INFO(bytes << " bytes at offset " << offset);
      const auto data = pattern(bytes, bytes + 1);
      const Guarded from(cts, stream, bytes, offset);
      if (bytes > 0) cts.upload(stream, from.payload(), data);
      std::vector<uint8_t> host(2 * kGuard + bytes, kGuardByte);
      REQUIRE_OK(
          stream.copy(address_of(host.data() + kGuard), from.payload(), bytes, GPUSHARE_COPY_DEVICE_TO_HOST));
      REQUIRE_OK(stream.synchronize());
      std::vector<uint8_t> expected(host.size(), kGuardByte);
      std::copy(data.begin(), data.end(), expected.begin() + kGuard);
      CHECK(host == expected);
      CHECK(from.holds(data));
    }
  }
}

CTS_TEST("copies: inside the device in all sizes and offsets") {
  const auto stream = cts.stream();
  for (const uint64_t bytes : kSizes) {
    for (const uint64_t offset : kOffsets) {
      INFO(bytes << " bytes at offset " << offset);
      const auto data = pattern(bytes, bytes + 2);
      const Guarded from(cts, stream, bytes, 0);
      const Guarded to(cts, stream, bytes, offset);
      if (bytes > 0) cts.upload(stream, from.payload(), data);
      REQUIRE_OK(stream.copy(to.payload(), from.payload(), bytes, GPUSHARE_COPY_DEVICE_TO_DEVICE));
      CHECK(to.holds(data));
      CHECK(from.holds(data));
    }
  }
}

CTS_TEST("copies: fills in all sizes and offsets") {
  const auto stream = cts.stream();
  for (const uint64_t bytes : kSizes) {
    for (const uint64_t offset : kOffsets) {
      for (const uint8_t value : {uint8_t{0}, uint8_t{0x5A}, uint8_t{0xFF}}) {
        INFO(bytes << " bytes of " << int{value} << " at offset " << offset);
        const Guarded to(cts, stream, bytes, offset);
        REQUIRE_OK(stream.fill(to.payload(), value, bytes));
        CHECK(to.holds(std::vector<uint8_t>(bytes, value)));
      }
    }
  }
}

CTS_TEST("copies: from and to the device's host memory") {
  constexpr uint64_t kBytes = 1 << 20;
  const auto data = pattern(kBytes, 9);
  auto* host = static_cast<uint8_t*>(*cts.device->host_alloc(kBytes));
  const device::Address block = *cts.device->alloc(kBytes);
  {
    const auto stream = cts.stream();
    std::memcpy(host, data.data(), kBytes);
    REQUIRE_OK(stream.copy(block, address_of(host), kBytes, GPUSHARE_COPY_HOST_TO_DEVICE));
    REQUIRE_OK(stream.synchronize());
    std::memset(host, 0, kBytes);
    REQUIRE_OK(stream.copy(address_of(host), block, kBytes, GPUSHARE_COPY_DEVICE_TO_HOST));
    REQUIRE_OK(stream.synchronize());
    CHECK(std::memcmp(host, data.data(), kBytes) == 0);
  }
  CHECK_OK(cts.device->free(block));
  CHECK_OK(cts.device->host_free(host));
}

CTS_TEST("copies: the last of several to one place wins") {
  constexpr uint64_t kBytes = 200'000;
  const device::Address block = *cts.device->alloc(kBytes);
  {
    const auto stream = cts.stream();
    std::vector<std::vector<uint8_t>> sources;
    for (uint64_t i = 0; i < 8; ++i) sources.push_back(pattern(kBytes, i));
    for (const auto& source : sources) {
      REQUIRE_OK(stream.fill(block, 0, kBytes));
      REQUIRE_OK(stream.copy(block, address_of(source.data()), kBytes, GPUSHARE_COPY_HOST_TO_DEVICE));
    }
    CHECK(cts.download(stream, block, kBytes) == sources.back());
  }
  CHECK_OK(cts.device->free(block));
}

CTS_TEST("copies: behind a closed gate nothing moves") {
  constexpr uint64_t kBytes = 1000;
  Gate gate;
  // The memory is of host_alloc, because a copy to other host memory may wait for the stream.
  uint8_t* host = static_cast<uint8_t*>(*cts.device->host_alloc(kBytes));
  std::fill(host, host + kBytes, uint8_t{1});
  const device::Address block = *cts.device->alloc(kBytes);
  {
    const auto stream = cts.stream();
    REQUIRE_OK(stream.fill(block, 2, kBytes));
    REQUIRE_OK(stream.synchronize());
    REQUIRE_OK(stream.launch_host(Gate::block, &gate));
    REQUIRE_OK(stream.copy(address_of(host), block, kBytes, GPUSHARE_COPY_DEVICE_TO_HOST));
    CHECK(stream.query().code() == GPUSHARE_NOT_READY);
    CHECK(std::all_of(host, host + kBytes, [](uint8_t byte) { return byte == 1; }));
    gate.open();
    REQUIRE_OK(stream.synchronize());
    CHECK(std::all_of(host, host + kBytes, [](uint8_t byte) { return byte == 2; }));
  }
  CHECK_OK(cts.device->free(block));
  CHECK_OK(cts.device->host_free(host));
}

CTS_TEST("copies: large ones") {
  constexpr uint64_t kBytes = 24u << 20;
  const auto data = pattern(kBytes, 77);
  const device::Address block = *cts.device->alloc(kBytes);
  {
    const auto stream = cts.stream();
    cts.upload(stream, block, data);
    CHECK(cts.download(stream, block, kBytes) == data);
  }
  CHECK_OK(cts.device->free(block));
}

}  // namespace gpushare::cts
