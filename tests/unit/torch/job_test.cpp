// A session as a framework's allocator sees it: what is ephemeral is learned, nothing that is still held vanishes.
// SPDX-License-Identifier: Apache-2.0
#include "job.hpp"

#include <cstring>
#include <thread>
#include <vector>

#include "support/catch.hpp"

namespace gs = gpushare;
using gs::torch::allocate;
using gs::torch::Job;
using gs::torch::release;

namespace {

std::shared_ptr<gs::Runtime> runtime_of(uint64_t capacity_bytes = 64 << 20) {
  gs::RuntimeOptions options;
  options.device = "host";
  options.policy = "fair";
  options.capacity_bytes = capacity_bytes;
  return std::make_shared<gs::Runtime>(gs::Runtime::open(options));
}

gs::SessionOptions needs(const char* name, uint64_t persistent_bytes = 8 << 20,
                         uint64_t ephemeral_bytes = 8 << 20) {
  gs::SessionOptions options;
  options.name = name;
  options.persistent_bytes = persistent_bytes;
  options.ephemeral_bytes = ephemeral_bytes;
  return options;
}

void* filled(size_t bytes, int value) {
  void* block = allocate(bytes);
  REQUIRE(block != nullptr);
  std::memset(block, value, bytes);
  return block;
}

bool holds(const void* block, size_t bytes, int value) {
  const std::vector<unsigned char> wanted(bytes, static_cast<unsigned char>(value));
  return std::memcmp(block, wanted.data(), bytes) == 0;
}

}  // namespace

TEST_CASE("a thread that is bound to no job gets nothing, and foreign pointers are refused") {
  REQUIRE(allocate(64) == nullptr);
  int local = 0;
  REQUIRE_FALSE(release(&local));
  REQUIRE_FALSE(release(nullptr));
  Job job(runtime_of(), needs("a"));
  const Job::Scope scope(job);
  REQUIRE(allocate(0) == nullptr);
}

TEST_CASE("blocks made in a scope are persistent; scopes nest") {
  const auto runtime = runtime_of();
  Job outer(runtime, needs("outer"));
  Job inner(runtime, needs("inner"));
  void* first = nullptr;
  void* second = nullptr;
  {
    const Job::Scope scope(outer);
    {
      const Job::Scope nested(inner);
      first = filled(1000, 1);
    }
    second = filled(1000, 2);
  }
  REQUIRE(allocate(8) == nullptr);
  REQUIRE(inner.live_blocks() == 1);
  REQUIRE(outer.live_blocks() == 1);
  REQUIRE(inner.info().persistent_bytes >= 1000);
  REQUIRE(release(first));
  REQUIRE_FALSE(release(first));
  REQUIRE(inner.info().persistent_bytes == 0);
  REQUIRE(holds(second, 1000, 2));
  REQUIRE(release(second));
}

TEST_CASE("what outlives its iteration is promoted, and from the third on predicted") {
  Job job(runtime_of(), needs("a"));
  std::vector<void*> kept;
  for (int step = 0; step < 5; ++step) {
    job.begin();
    void* temporary = filled(4096, 7);
    kept.push_back(filled(1 << 20, step));  // the same place of every iteration
    void* last = filled(512, 9);
    REQUIRE(release(temporary));
    REQUIRE(release(last));
    REQUIRE(job.predicted_blocks() == (step < 2 ? 0 : 1));
    job.end();
    REQUIRE(job.info().ephemeral_bytes == 0);
    for (size_t i = 0; i < kept.size(); ++i) REQUIRE(holds(kept[i], 1 << 20, static_cast<int>(i)));
  }
  REQUIRE(job.info().promoted_bytes == 2 << 20);  // of the first two iterations
  REQUIRE(job.info().persistent_bytes == 5 << 20);
  for (void* block : kept) REQUIRE(release(block));
  REQUIRE(job.info().persistent_bytes == 0);
}

TEST_CASE("an iteration of another shape is not mispredicted into persistent memory") {
  Job job(runtime_of(), needs("a"));
  for (int step = 0; step < 4; ++step) {
    job.begin();
    void* block = filled(step < 3 ? 4096 : 8192, 1);
    if (step < 3) {
      job.end();
      REQUIRE(release(block));
    } else {
      REQUIRE(job.predicted_blocks() == 0);
      REQUIRE(job.info().ephemeral_bytes >= 8192);
      REQUIRE(release(block));
      job.end();
    }
  }
}

TEST_CASE("blocks outlive their job and keep its session and runtime open") {
  void* persistent = nullptr;
  void* promoted = nullptr;
  std::weak_ptr<gs::Runtime> weak;
  {
    auto runtime = runtime_of();
    weak = runtime;
    Job job(std::move(runtime), needs("a"));
    {
      const Job::Scope scope(job);
      persistent = filled(4096, 3);
    }
    job.begin();
    promoted = filled(4096, 4);
  }  // in the middle of an iteration
  REQUIRE(allocate(8) == nullptr);
  REQUIRE(holds(persistent, 4096, 3));
  REQUIRE(holds(promoted, 4096, 4));
  REQUIRE_FALSE(weak.expired());
  REQUIRE(release(promoted));
  REQUIRE_FALSE(weak.expired());
  REQUIRE(release(persistent));
  REQUIRE(weak.expired());
}

TEST_CASE("a promotion that is not safe leaves the iteration open and every byte in place") {
  Job job(runtime_of(16 << 20), needs("a", 2 << 20, 12 << 20));
  job.begin();
  void* large = filled(11 << 20, 5);
  try {
    job.end();
    FAIL("11 MiB were promoted beside a lane of 12 in 16 MiB");
  } catch (const gs::Error& error) {
    REQUIRE(error.status() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  }
  REQUIRE(holds(large, 11 << 20, 5));
  REQUIRE(release(large));
  job.end();
  REQUIRE_THROWS_AS(job.end(), gs::Error);
}

TEST_CASE("more than there is throws, and what was there stays") {
  Job job(runtime_of(16 << 20), needs("a", 4 << 20, 4 << 20));
  const Job::Scope scope(job);
  void* block = filled(1 << 20, 6);
  try {
    (void)allocate(64 << 20);
    FAIL("64 of 16 MiB");
  } catch (const gs::Error& error) {
    REQUIRE(error.status() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
    REQUIRE(std::string(error.what()).find("'a'") != std::string::npos);
  }
  REQUIRE(job.live_blocks() == 1);
  REQUIRE(holds(block, 1 << 20, 6));
  REQUIRE(release(block));
}

TEST_CASE("jobs on threads of their own, blocks freed by others") {
  const auto runtime = runtime_of();
  std::vector<std::vector<void*>> left(4);
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number)
    threads.emplace_back([&, number] {
      Job job(runtime, needs("job", 2 << 20, 2 << 20));
      for (int step = 0; step < 50; ++step) {
        job.begin();
        std::vector<void*> blocks;
        for (int i = 0; i < 8; ++i) {
          blocks.push_back(allocate(size_t{64} << i));
          std::memset(blocks.back(), number, size_t{64} << i);
        }
        for (int i = 0; i < 7; ++i) release(blocks[static_cast<size_t>(i)]);
        job.end();
        left[static_cast<size_t>(number)].push_back(blocks.back());
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (size_t number = 0; number < left.size(); ++number)
    for (void* block : left[number]) {
      REQUIRE(holds(block, size_t{64} << 7, static_cast<int>(number)));
      REQUIRE(release(block));
    }
  REQUIRE(runtime->info().sessions_resident == 0);
}
