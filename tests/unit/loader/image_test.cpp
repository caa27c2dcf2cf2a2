// Images read from files and sent to a device: every path of reading, the cache, the pipeline, and what goes
// wrong.
// SPDX-License-Identifier: Apache-2.0
#include "loader/image.hpp"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <thread>

#include "loader/file.hpp"
#include "loader/transmission.hpp"
#include "support/catch.hpp"
#include "support/model_folder.hpp"
#include "support/random.hpp"

using namespace gpushare;
using loader::ReadOptions;

namespace {

std::string bytes_of(const loader::Image& image, size_t layer) {
  std::string out;
  for (const auto& piece : image.pieces(image.begin_of(layer), image.layers()[layer].bytes))
    out.append(piece.host, piece.bytes);
  return out;
}

const std::vector<size_t> kSizes = {100, 5000, 0, 70'000, 1, 300'000, 4096, 33};

}  // namespace

TEST_CASE("every way of reading gives the file's bytes") {
  test::Random random(test::seed());
  const test::ModelFolder folder;
  std::vector<std::string> contents;
  const std::string path = folder.make("m.safetensors", kSizes, random, &contents);
  auto device = *device::Device::open("host");
  loader::ChunkPool pool(*device, 64 << 10);
  for (const auto how :
       {ReadOptions::Path::kBuffered, ReadOptions::Path::kDirect, ReadOptions::Path::kMapped}) {
    for (const uint32_t in_flight : {1u, 3u}) {
      ReadOptions options;
      options.path = how;
      options.reads_in_flight = in_flight;
      options.read_bytes = 8192;
      options.drop_page_cache = in_flight == 3;
      const auto image = loader::load_image(pool, path, options);
      REQUIRE(image.ok());
      REQUIRE((*image)->layers().size() == kSizes.size());
      for (size_t i = 0; i < kSizes.size(); ++i) {
        CHECK((*image)->layers()[i].offset_bytes % loader::kLayerAlignmentBytes == 0);
        REQUIRE(bytes_of(**image, i) == contents[i]);
      }
    }
  }
}

TEST_CASE("the caller's order is kept and must name every tensor once") {
  test::Random random(test::seed());
  const test::ModelFolder folder;
  std::vector<std::string> contents;
  const std::string path = folder.make("m.safetensors", {10, 20, 30}, random, &contents);
  auto device = *device::Device::open("host");
  loader::ChunkPool pool(*device, 64 << 10);
  ReadOptions options;
  options.order = {"t2", "t0", "t1"};
  const auto image = loader::load_image(pool, path, options);
  REQUIRE(image.ok());
  CHECK(bytes_of(**image, 0) == contents[2]);
  for (const auto& order : {std::vector<std::string>{"t0", "t1"},
                            {"t0", "t1", "t2", "t3"},
                            {"t0", "t1", "t1"},
                            {"t0", "t1", "x"}}) {
    options.order = order;
    CHECK(loader::load_image(pool, path, options).status().code() == GPUSHARE_INVALID_ARGUMENT);
  }
  options.order.clear();
  options.reads_in_flight = 0;
  CHECK(loader::load_image(pool, path, options).status().code() == GPUSHARE_INVALID_ARGUMENT);
  options.reads_in_flight = 1;
  options.read_bytes = 1;
  CHECK(loader::load_image(pool, path, options).status().code() == GPUSHARE_INVALID_ARGUMENT);
}

TEST_CASE("host memory that runs out leaves nothing behind") {
  test::Random random(test::seed());
  const test::ModelFolder folder;
  std::vector<std::string> contents;
  const std::string path = folder.make("m.safetensors", kSizes, random, &contents);
  auto device = *device::Device::open("host");
  for (uint64_t call = 1; call <= 6; ++call) {
    loader::ChunkPool pool(*device, 64 << 10);
    gpushare_backend_fault fault{sizeof fault, GPUSHARE_FAULT_HOST_OUT_OF_MEMORY, call, 1.0};
    REQUIRE(device->set_fault(fault).ok());
    const auto image = loader::load_image(pool, path, {});
    CHECK(image.status().code() == GPUSHARE_HOST_OUT_OF_MEMORY);
    fault.kind = GPUSHARE_FAULT_NONE;
    REQUIRE(device->set_fault(fault).ok());
    REQUIRE(loader::load_image(pool, path, {}).ok());
  }
  CHECK(device->close().ok());
}

TEST_CASE("the cache keeps to its limit, shares reads, and notices a replaced file") {
  test::Random random(test::seed());
  const test::ModelFolder folder;
  std::vector<std::string> contents;
  std::vector<std::string> paths;
  for (int i = 0; i < 4; ++i)
    paths.push_back(folder.make("m" + std::to_string(i) + ".safetensors", {40'000}, random, &contents));
  auto device = *device::Device::open("host");
  loader::ChunkPool pool(*device, 16 << 10);
  loader::ImageCache cache(pool, 100'000, {});
  {
    const auto a = cache.get(paths[0]);
    REQUIRE(a.ok());
    const auto again = cache.get(paths[0]);
    CHECK(a->get() == again->get());
    CHECK(cache.hits() == 1);
    REQUIRE(cache.get(paths[1]).ok());
    REQUIRE(cache.get(paths[2]).ok());  // m1 goes, m0 is in use
    CHECK(cache.bytes() <= 100'000);
    CHECK(cache.get(paths[0])->get() == a->get());
    const auto b = cache.get(paths[1]);
    REQUIRE(b.ok());
    // Two in use: the third does not fit.
    CHECK(cache.get(paths[3]).status().code() == GPUSHARE_HOST_OUT_OF_MEMORY);
    CHECK(bytes_of(**b, 0) == contents[1]);
  }
  // Replaced under the same name.
  std::vector<std::string> fresh;
  const std::string other = folder.make("other.safetensors", {40'000}, random, &fresh);
  std::filesystem::rename(other, paths[0]);
  const auto renewed = cache.get(paths[0]);
  REQUIRE(renewed.ok());
  CHECK(bytes_of(**renewed, 0) == fresh[0]);
  CHECK(cache.get("/nonexistent.safetensors").status().code() == GPUSHARE_IO_ERROR);

  std::vector<std::thread> threads;
  std::atomic<int> good{0};
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i)
        if (const auto image = cache.get(paths[static_cast<size_t>(i % 2)]); image.ok()) ++good;
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(good == 200);
}

namespace {

double all_available() {
  return 1;
}

double none_available() {
  return 0;
}

// Whatever else this machine does.
constexpr loader::KeepOptions kKeepAll = {.ns = UINT64_MAX, .available_share = all_available};

// Loads the model and releases it; returns what the pool keeps then.
uint64_t kept_after_load(loader::ChunkPool& pool, const std::string& path) {
  {
    const auto image = loader::load_image(pool, path, {});
    REQUIRE(image.ok());
  }
  return pool.kept_bytes();
}

void wait_until_kept(const loader::ChunkPool& pool, uint64_t bytes) {
  while (pool.kept_bytes() != bytes) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace

TEST_CASE(
    "chunks of a released image are kept for the next, until they are old, too many, or memory is short") {
  test::Random random(test::seed());
  const test::ModelFolder folder;
  const std::string path = folder.make("m.safetensors", {200'000}, random);
  auto device = *device::Device::open("host");
  {
    loader::ChunkPool pool(*device, 64 << 10, kKeepAll);
    const auto image = *loader::load_image(pool, path, {});
    CHECK(pool.kept_bytes() == 0);
    CHECK(kept_after_load(pool, path) == 4 * (64 << 10));
    // A third image takes all that the second one left.
    const auto third = *loader::load_image(pool, path, {});
    CHECK(pool.kept_bytes() == 0);
    CHECK(kept_after_load(pool, path) == 4 * (64 << 10));
    pool.trim();
    CHECK(pool.kept_bytes() == 0);
  }
  {
    loader::ChunkPool pool(*device, 64 << 10, {.ns = 1, .available_share = all_available});
    for (int i = 0; i < 3; ++i) {
      kept_after_load(pool, path);
      wait_until_kept(pool, 0);
    }
  }
  {
    loader::ChunkPool pool(*device, 64 << 10,
                           {.bytes = 130'000, .ns = UINT64_MAX, .available_share = all_available});
    for (int i = 0; i < 3; ++i) {
      kept_after_load(pool, path);
      wait_until_kept(pool, 64 << 10);
    }
  }
  {
    const double share = loader::KeepOptions().available_share();  // the system has some, and never all
    CHECK(share > 0);
    CHECK(share < 1);
    loader::ChunkPool pool(*device, 64 << 10, {.ns = UINT64_MAX, .available_share = none_available});
    kept_after_load(pool, path);
    wait_until_kept(pool, 0);
  }
  // All was given back, or the device would not close.
  CHECK(device->close().ok());
}

TEST_CASE("an image that is opened once leaves the cache with its last user, and its chunks serve the next") {
  test::Random random(test::seed());
  const test::ModelFolder folder;
  std::vector<std::string> contents;
  const std::string path = folder.make("m.safetensors", {40'000}, random, &contents);
  const std::string other = folder.make("n.safetensors", {40'000}, random, &contents);
  auto device = *device::Device::open("host");
  loader::ChunkPool pool(*device, 16 << 10, kKeepAll);
  loader::ImageCache cache(pool, 100'000, {});
  loader::ReadOptions once;
  once.once = true;
  {
    auto first = cache.get(path, once);
    REQUIRE(first.ok());
    auto shared = cache.get(path, once);  // while it is there others have it too
    REQUIRE(shared.ok());
    CHECK(shared->get() == first->get());
    CHECK(cache.hits() == 1);
    first = base::Status(GPUSHARE_NOT_FOUND, "");
    CHECK(cache.images() == 1);
    CHECK(bytes_of(**shared, 0) == contents[0]);
  }
  CHECK(cache.images() == 0);
  CHECK(cache.bytes() == 0);
  const uint64_t kept = pool.kept_bytes();
  CHECK(kept >= 40'000);
  const auto next = cache.get(other, once);
  REQUIRE(next.ok());
  CHECK(bytes_of(**next, 0) == contents[1]);
  CHECK(pool.kept_bytes() + (*next)->held_bytes() == kept);
  // One that somebody opens to keep stays, in whatever order the users come and go.
  REQUIRE(cache.get(other).ok());
  REQUIRE(cache.get(other, once).ok());
  CHECK(cache.images() == 1);
  // A kept one is no image of its once-users'.
  CHECK(cache.get(other, once)->get() == next->get());
  cache.clear();
}

TEST_CASE("images and kept chunks together stay within the cache's limit") {
  test::Random random(test::seed());
  const test::ModelFolder folder;
  std::vector<std::string> paths;
  for (size_t i = 0; i < 5; ++i)
    paths.push_back(folder.make("m" + std::to_string(i) + ".safetensors", {20'000 * (i + 1)}, random));
  auto device = *device::Device::open("host");
  loader::ChunkPool pool(*device, 16 << 10, kKeepAll);
  loader::ImageCache cache(pool, 200'000, {});
  std::vector<std::shared_ptr<const loader::Image>> held;
  for (int i = 0; i < 300; ++i) {
    if (const auto image = cache.get(paths[random() % paths.size()]); image.ok()) held.push_back(*image);
    CHECK(cache.bytes() + pool.kept_bytes() <= 200'000);
    if (held.size() > random() % 3) held.erase(held.begin());
  }
}

TEST_CASE("chunks that are used again never show an earlier image's bytes") {
  test::Random random(test::seed());
  const test::ModelFolder folder;
  std::vector<std::string> secret, contents;
  const std::string before = folder.make("before.safetensors", {300'000}, random, &secret);
  const std::string path = folder.make("m.safetensors", {100, 5000, 70'001, 100'000}, random, &contents);
  auto device = *device::Device::open("host");
  loader::ChunkPool pool(*device, 64 << 10, kKeepAll);
  CHECK(kept_after_load(pool, before) > 0);
  static std::atomic<int> reads_left;
  for (int good = 0; good < 3; ++good) {
    // A read that fails leaves no image.
    reads_left = good + 2;  // the header takes two
    loader::set_read_function([](int descriptor, void* out, size_t bytes, off_t offset) -> ssize_t {
      if (--reads_left >= 0) return ::pread(descriptor, out, bytes, offset);
      errno = EIO;
      return -1;
    });
    ReadOptions options;
    options.read_bytes = 4096;
    const auto failed = loader::load_image(pool, path, options);
    loader::set_read_function(nullptr);
    CHECK(failed.status().code() == GPUSHARE_IO_ERROR);
  }
  const auto image = *loader::load_image(pool, path, {});
  std::string all;
  for (const auto& piece : image->pieces(0, image->bytes())) all.append(piece.host, piece.bytes);
  std::string expected;
  for (size_t i = 0; i < contents.size(); ++i) {
    expected.resize(image->begin_of(i), '\0');  // what lies between layers is sent with them
    expected += contents[i];
  }
  CHECK(all == expected);
}

TEST_CASE("direct reads go straight to the image's chunks where its bytes lie as in the file") {
  test::Random random(test::seed());
  const test::ModelFolder folder;
  const std::vector<size_t> sizes = {256, 300'032, 4096, 70'144, 1'000'192};
  std::vector<std::string> contents;
  const std::string path = folder.make("m.safetensors", sizes, random, &contents);
  auto device = *device::Device::open("host");
  loader::ChunkPool pool(*device, 64 << 10);
  static std::mutex mutex;
  static std::vector<std::pair<uintptr_t, size_t>> reads;
  reads.clear();
  loader::set_read_function([](int descriptor, void* out, size_t bytes, off_t offset) -> ssize_t {
    const std::lock_guard<std::mutex> lock(mutex);
    reads.emplace_back(reinterpret_cast<uintptr_t>(out), bytes);
    return ::pread(descriptor, out, bytes, offset);
  });
  ReadOptions options;
  options.path = ReadOptions::Path::kDirect;
  options.read_bytes = 100'000;
  const auto image = *loader::load_image(pool, path, options);
  loader::set_read_function(nullptr);
  for (size_t i = 0; i < sizes.size(); ++i) CHECK(bytes_of(*image, i) == contents[i]);
  const auto pieces = image->pieces(0, image->bytes());
  uint64_t straight = 0, all = 0;
  for (const auto& [out, bytes] : reads) {
    all += bytes;
    for (const auto& piece : pieces) {
      const auto begin = reinterpret_cast<uintptr_t>(piece.host);
      if (out >= begin && out < begin + piece.bytes) straight += bytes;
    }
  }
  // The two ends of the file's data lie in blocks of which the image has only a part.
  CHECK(straight + 3 * 4096 >= image->bytes());
  CHECK(straight <= image->bytes());
  // No byte is read twice but for those ends and the header.
  CHECK(all <= image->bytes() + 4 * 4096);
}

TEST_CASE("direct reads give the file's bytes wherever tensors and chunks begin and end") {
  test::Random random(test::seed());
  auto device = *device::Device::open("host");
  loader::ChunkPool pool(*device, 64 << 10);
  for (int round = 0; round < 30; ++round) {
    const test::ModelFolder folder;
    std::vector<size_t> sizes;
    // Every other time sizes that keep the file's alignment; at times exactly whole chunks, which leave no room for a lead.
    for (size_t i = 0; i < 1 + random() % 6; ++i)
      sizes.push_back(round % 2 == 0 ? random() % 600 * 256 : random() % 100'000);
    if (round % 5 == 0) sizes = {128 << 10};
    std::vector<std::string> contents;
    const std::string path = folder.make("m.safetensors", sizes, random, &contents);
    ReadOptions options;
    options.path = ReadOptions::Path::kDirect;
    options.read_bytes = 4096 + random() % 60'000;
    const auto image = *loader::load_image(pool, path, options);
    CHECK(image->held_bytes() == (image->bytes() + (64 << 10) - 1) / (64 << 10) * (64 << 10));
    for (size_t i = 0; i < sizes.size(); ++i) REQUIRE(bytes_of(*image, i) == contents[i]);
  }
}

TEST_CASE("a transmission delivers every byte, in groups, each usable before the next is there") {
  test::Random random(test::seed());
  const test::ModelFolder folder;
  std::vector<std::string> contents;
  const std::string path = folder.make("m.safetensors", kSizes, random, &contents);
  for (const std::string spec : {"host", "host?copy_gbps=0.5", "sim"}) {
    INFO(spec);
    auto device = *device::Device::open(spec);
    loader::ChunkPool pool(*device, 64 << 10);
    const auto image = *loader::load_image(pool, path, {});
    const device::Address base = *device->alloc(image->bytes());
    std::vector<uint32_t> arrived;
    {
      const device::Stream copies = *device->create_stream();
      const device::Stream lane = *device->create_stream();
      auto transmission =
          loader::Transmission::start(*device, copies, image, base, {2, 5, 8}, {},
                                      [&](size_t, uint32_t, uint32_t end) { arrived.push_back(end); });
      REQUIRE(transmission.ok());
      for (uint32_t i = 0; i < kSizes.size(); ++i) {
        REQUIRE((*transmission)->make_usable(i, i + 1, lane).ok());
        std::string back(contents[i].size(), '\0');
        REQUIRE(lane.copy(reinterpret_cast<uintptr_t>(back.data()), (*transmission)->address(i), back.size(),
                          GPUSHARE_COPY_DEVICE_TO_HOST)
                    .ok());
        REQUIRE(lane.synchronize().ok());
        CHECK(*(*transmission)->arrived(i));
        if (device->can(GPUSHARE_DEVICE_CAP_HOST_ADDRESSABLE)) CHECK(back == contents[i]);
      }
      REQUIRE((*transmission)->wait(7).ok());
      CHECK(*(*transmission)->arrived_ns(0) <= *(*transmission)->arrived_ns(2));
      CHECK(arrived == std::vector<uint32_t>{2, 5, 8});
      CHECK((*transmission)->make_usable(3, 3, lane).code() == GPUSHARE_INVALID_ARGUMENT);
      CHECK((*transmission)->make_usable(7, 9, lane).code() == GPUSHARE_INVALID_ARGUMENT);
      CHECK((*transmission)->wait(8).code() == GPUSHARE_INVALID_ARGUMENT);
      for (const auto& ends : {std::vector<uint32_t>{2, 2, 8}, {2, 5}, {2, 9}, {}})
        CHECK(loader::Transmission::start(*device, copies, image, base, ends).status().code() ==
              GPUSHARE_INVALID_ARGUMENT);
    }
    REQUIRE(device->free(base).ok());
  }
}

TEST_CASE("a copy that fails ends the transmission with its group named") {
  test::Random random(test::seed());
  const test::ModelFolder folder;
  std::vector<std::string> contents;
  const std::string path = folder.make("m.safetensors", kSizes, random, &contents);
  auto device = *device::Device::open("host");
  loader::ChunkPool pool(*device, 64 << 10);
  const auto image = *loader::load_image(pool, path, {});
  const device::Address base = *device->alloc(image->bytes());
  for (uint64_t call = 1; call <= 5; ++call) {
    const device::Stream copies = *device->create_stream();
    gpushare_backend_fault fault{sizeof fault, GPUSHARE_FAULT_LAUNCH_FAILS, call, 1.0};
    REQUIRE(device->set_fault(fault).ok());
    const auto transmission = loader::Transmission::start(*device, copies, image, base, {2, 5, 8});
    CHECK_FALSE(transmission.ok());
    fault.kind = GPUSHARE_FAULT_NONE;
    REQUIRE(device->set_fault(fault).ok());
  }
  CHECK(device->free(base).ok());
}

TEST_CASE("calibration finds the cap of a capped link") {
  // The sim device's clock makes this exact: no wall time involved.
  auto device = *device::Device::open("sim?copy_gbps=10");
  const auto costs = loader::calibrate(*device);
  REQUIRE(costs.ok());
  CHECK(costs->bytes_per_ms == Approx(10e6).epsilon(0.01));
  CHECK(costs->call_overhead_ms >= 0);
  CHECK(loader::calibrate(*device, 0).status().code() == GPUSHARE_INVALID_ARGUMENT);
}
