// The host device's own promises: the capped bus, and work on the calling thread. tests/cts tests the promises of
// every device.
// SPDX-License-Identifier: Apache-2.0
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "device/device.hpp"
#include "device/host/wide_copy.hpp"
#include "support/catch.hpp"

using gpushare::device::Address;
using gpushare::device::Device;
using gpushare::device::Event;
using gpushare::device::Stream;

namespace {

std::set<std::string> threads_now() {
  std::set<std::string> out;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task"))
    out.insert(task.path().filename().string());
  return out;
}

uint64_t address_of(const void* pointer) {
  return reinterpret_cast<uint64_t>(pointer);
}

// How the next writes to files end: interrupted, then in part. Else as the kernel says.
std::atomic<int> g_writes{0}, g_interrupted{0};

}  // namespace

// In place of the C library's function, for this whole program.
extern "C" ssize_t pwrite(int file, const void* bytes, size_t count, off_t offset) {
  ++g_writes;
  if (g_interrupted > 0) {
    if (--g_interrupted % 2 != 0) {
      errno = EINTR;
      return -1;
    }
    count = std::min<size_t>(count, 4096);
  }
  return syscall(SYS_pwrite64, file, bytes, count, offset);
}

TEST_CASE("a copy to fresh pages goes on where a signal interrupts it, and where a part of it was written",
          "[host]") {
  constexpr uint64_t kBytes = 8 << 20;
  auto device = Device::open("host?total_bytes=67108864");
  REQUIRE(device.ok());
  const auto address = (*device)->va_reserve(kBytes);
  REQUIRE(address.ok());
  const auto memory = (*device)->phys_create(kBytes);
  REQUIRE(memory.ok());
  const auto block = (*device)->alloc(kBytes);
  REQUIRE(block.ok());
  REQUIRE((*device)->va_map(*address, kBytes, *memory, 0).ok());
  std::vector<char> source(kBytes), back(kBytes);
  for (size_t i = 0; i < kBytes; ++i) source[i] = static_cast<char>(i >> 12 ^ i);
  {
    const auto stream = (*device)->create_stream();
    REQUIRE(stream.ok());
    REQUIRE(stream->copy(*block, address_of(source.data()), kBytes, GPUSHARE_COPY_HOST_TO_DEVICE).ok());
    REQUIRE(stream->synchronize().ok());
    g_writes = 0;
    g_interrupted = 6;
    REQUIRE(stream->copy(*address, *block, kBytes, GPUSHARE_COPY_DEVICE_TO_DEVICE).ok());
    REQUIRE(stream->synchronize().ok());
    CHECK(g_interrupted == 0);
    CHECK(g_writes == 7);
    REQUIRE(stream->copy(address_of(back.data()), *address, kBytes, GPUSHARE_COPY_DEVICE_TO_HOST).ok());
    REQUIRE(stream->synchronize().ok());
  }
  CHECK(back == source);
  REQUIRE((*device)->free(*block).ok());
  REQUIRE((*device)->va_unmap(*address, kBytes).ok());
  REQUIRE((*device)->phys_release(*memory).ok());
  REQUIRE((*device)->va_free(*address, kBytes).ok());
  REQUIRE((*device)->close().ok());
}

TEST_CASE("no thread starts for what an idle stream can do at once", "[host]") {
  std::thread([] {}).join();  // a sanitizer's own thread starts with the first one of the process
  const std::set<std::string> before = threads_now();  // the one that was joined may take a moment to be gone
  const auto started = [&] {
    const std::set<std::string> now = threads_now();
    return std::count_if(now.begin(), now.end(),
                         [&](const auto& thread) { return !before.contains(thread); });
  };
  auto device = std::move(*Device::open("host"));
  const Stream stream = *device->create_stream();
  const Stream other = *device->create_stream();
  const Event start = *device->create_event(GPUSHARE_EVENT_TIMING);
  const Event end = *device->create_event(GPUSHARE_EVENT_TIMING);
  const Address block = *device->alloc(1 << 20);
  std::vector<char> host(4096, 7);
  REQUIRE(stream.record(start).ok());
  REQUIRE(stream.copy(block, address_of(host.data()), host.size(), GPUSHARE_COPY_HOST_TO_DEVICE).ok());
  REQUIRE(stream.fill(block + 4096, 1, 4096).ok());
  REQUIRE(stream.record(end).ok());
  REQUIRE(other.wait(end).ok());
  CHECK(end.query().ok());
  CHECK(other.query().ok());
  CHECK(end.elapsed_since(start).ok());
  REQUIRE(stream.synchronize().ok());
  CHECK(started() == 0);
  // The first op that runs behind the caller's back starts one, and it goes with the stream.
  REQUIRE(stream.launch_host([](void*) {}, nullptr).ok());
  CHECK(started() == 1);
  REQUIRE(stream.synchronize().ok());
  REQUIRE(device->free(block).ok());
}

TEST_CASE("device addresses are the process's own", "[host]") {
  auto device = std::move(*Device::open("host"));
  const Stream stream = *device->create_stream();
  const Address block = *device->alloc(100'000);
  REQUIRE(stream.fill(block, 9, 100'000).ok());
  REQUIRE(stream.synchronize().ok());
  CHECK(reinterpret_cast<const char*>(block)[99'999] == 9);
  REQUIRE(device->free(block).ok());
}

TEST_CASE("copies over a capped bus take turns and no less than their time", "[host]") {
  // 0.1 GB/s: 200 kB take 2 ms. The bus makes up for at most 0.2 ms of its threads' lateness.
  constexpr uint64_t kBytes = 200'000;
  constexpr uint64_t kCopyNs = 2'000'000;
  constexpr uint64_t kCreditNs = 200'000;
  auto device = std::move(*Device::open("host?copy_gbps=0.1"));
  const Address block = *device->alloc(4 * kBytes);
  std::vector<char> host(kBytes, 3);
  std::vector<Stream> streams;
  const uint64_t start = gpushare::base::host_now_ns();
  for (uint64_t i = 0; i < 4; ++i) {
    streams.push_back(*device->create_stream());
    REQUIRE(streams.back()
                .copy(block + i * kBytes, address_of(host.data()), kBytes, GPUSHARE_COPY_HOST_TO_DEVICE)
                .ok());
  }
  for (const Stream& stream : streams) REQUIRE(stream.synchronize().ok());
  // A lower bound holds on the slowest machine too.
  CHECK(gpushare::base::host_now_ns() - start >= 4 * kCopyNs - kCreditNs);
  CHECK(reinterpret_cast<const char*>(block)[4 * kBytes - 1] == 3);
  REQUIRE(device->free(block).ok());
}

TEST_CASE("a small copy over a capped bus waits its time too", "[host]") {
  auto device = std::move(*Device::open("host?copy_gbps=0.001"));
  const Stream stream = *device->create_stream();
  const Event start = *device->create_event(GPUSHARE_EVENT_TIMING);
  const Event end = *device->create_event(GPUSHARE_EVENT_TIMING);
  const Address block = *device->alloc(4096);
  std::vector<char> host(4096, 3);
  REQUIRE(stream.record(start).ok());
  REQUIRE(stream.copy(block, address_of(host.data()), host.size(), GPUSHARE_COPY_HOST_TO_DEVICE).ok());
  REQUIRE(stream.record(end).ok());
  REQUIRE(end.synchronize().ok());
  CHECK(*end.elapsed_since(start) >= 4'096'000 - 200'000);
  REQUIRE(device->free(block).ok());
}

TEST_CASE("a copy past the cache moves all bytes and no others", "[host]") {
  std::mt19937 random(5);
  std::vector<char> source(3 << 20), destination(source.size());
  for (char& byte : source) byte = static_cast<char>(random());
  const auto below = [&](size_t bound) { return random() % bound; };
  for (int i = 0; i < 60; ++i) {
    const size_t from = below(9000), to = below(9000), bytes = below(i % 3 == 0 ? 20000 : 2 << 20);
    INFO(from << " to " << to << ", " << bytes << " bytes");
    std::fill(destination.begin(), destination.end(), 'x');
    gpushare::device::host::wide_copy(destination.data() + to, source.data() + from, bytes);
    CHECK(std::equal(destination.begin() + to, destination.begin() + to + bytes, source.begin() + from));
    CHECK(std::count(destination.begin(), destination.begin() + to, 'x') == static_cast<ptrdiff_t>(to));
    CHECK(std::all_of(destination.begin() + to + bytes, destination.end(),
                      [](char byte) { return byte == 'x'; }));
  }
  // Ranges that overlap, in both directions.
  for (const size_t shift : {size_t{1}, size_t{5000}}) {
    const std::vector<char> before = source;
    gpushare::device::host::wide_copy(source.data() + shift, source.data(), 2 << 20);
    CHECK(std::equal(before.begin(), before.begin() + (2 << 20), source.begin() + shift));
    gpushare::device::host::wide_copy(source.data(), source.data() + shift, 2 << 20);
    CHECK(std::equal(before.begin(), before.begin() + (2 << 20), source.begin()));
  }
}
