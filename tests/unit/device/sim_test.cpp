// The sim device's own promises: its clock, its costs, its contention model, determinism. tests/cts tests the
// promises of every device.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "device/device.hpp"
#include "device/sim/contention.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

using gpushare::device::Device;
using gpushare::device::Event;
using gpushare::device::Stream;
using gpushare::device::sim::ContentionModel;

namespace {

constexpr uint64_t kMs = 1'000'000;

gpushare_backend_work work_of(uint64_t duration_ns, float demand = 1, uint32_t work_class = 0) {
  gpushare_backend_work work{};
  work.struct_size = sizeof(work);
  work.duration_ns = duration_ns;
  work.demand = demand;
  work.work_class = work_class;
  return work;
}

std::unique_ptr<Device> open_sim(const std::string& options = "") {
  auto device = Device::open("sim?" + options);
  INFO(device.status().to_string());
  REQUIRE(device.ok());
  return std::move(*device);
}

// When a stream's last work ends.
uint64_t end_of(Device& device, const Stream& stream) {
  REQUIRE(stream.synchronize().ok());
  return device.now_ns();
}

std::vector<double> speeds_of(const ContentionModel& model, const std::vector<ContentionModel::Load>& loads) {
  std::vector<double> speeds;
  model.speeds(loads, &speeds);
  return speeds;
}

}  // namespace

TEST_CASE("the clock stands still while the host enqueues", "[sim]") {
  auto device = open_sim();
  const Stream stream = *device->create_stream();
  CHECK(device->now_ns() == 0);
  REQUIRE(stream.work(work_of(5 * kMs)).ok());
  CHECK(device->now_ns() == 0);
  CHECK(stream.query().code() == GPUSHARE_NOT_READY);
  CHECK(device->now_ns() == 0);
  REQUIRE(stream.synchronize().ok());
  CHECK(device->now_ns() == 5 * kMs);
}

TEST_CASE("a wait moves the clock to what it waits for and no further", "[sim]") {
  auto device = open_sim("contention=none");
  const Stream fast = *device->create_stream();
  const Stream slow = *device->create_stream();
  REQUIRE(slow.work(work_of(9 * kMs)).ok());
  REQUIRE(fast.work(work_of(2 * kMs)).ok());
  CHECK(end_of(*device, fast) == 2 * kMs);
  REQUIRE(fast.work(work_of(3 * kMs)).ok());
  CHECK(end_of(*device, fast) == 5 * kMs);
  CHECK(end_of(*device, slow) == 9 * kMs);
}

TEST_CASE("polling moves the clock after the set number of answers", "[sim]") {
  auto device = open_sim("polls=4");
  const Stream stream = *device->create_stream();
  REQUIRE(stream.work(work_of(kMs)).ok());
  for (int i = 0; i < 3; ++i) CHECK(stream.query().code() == GPUSHARE_NOT_READY);
  CHECK(device->now_ns() == 0);
  CHECK(stream.query().ok());
  CHECK(device->now_ns() == kMs);
  // An enqueue starts the count again.
  const Stream other = *device->create_stream();
  REQUIRE(stream.work(work_of(kMs)).ok());
  for (int i = 0; i < 3; ++i) CHECK(stream.query().code() == GPUSHARE_NOT_READY);
  REQUIRE(other.work(work_of(kMs)).ok());
  for (int i = 0; i < 3; ++i) CHECK(stream.query().code() == GPUSHARE_NOT_READY);
  CHECK(device->now_ns() == kMs);
}

TEST_CASE("overlapping work shares the device in proportion to demand", "[sim]") {
  auto device = open_sim();
  const Stream a = *device->create_stream();
  const Stream b = *device->create_stream();
  SECTION("two works that want all of it take turns") {
    REQUIRE(a.work(work_of(10 * kMs)).ok());
    REQUIRE(b.work(work_of(10 * kMs)).ok());
    CHECK(end_of(*device, a) == 20 * kMs);
    CHECK(end_of(*device, b) == 20 * kMs);
  }
  SECTION("works that fit side by side do not slow each other") {
    REQUIRE(a.work(work_of(10 * kMs, 0.5f)).ok());
    REQUIRE(b.work(work_of(4 * kMs, 0.5f)).ok());
    CHECK(end_of(*device, a) == 10 * kMs);
    CHECK(end_of(*device, b) == 10 * kMs);
  }
  SECTION("a short work beside a long one: processor sharing") {
    // Both at half speed until the short one ends at 8; the long one has 6 of 10 left.
    REQUIRE(a.work(work_of(10 * kMs)).ok());
    REQUIRE(b.work(work_of(4 * kMs)).ok());
    CHECK(end_of(*device, b) == 8 * kMs);
    CHECK(end_of(*device, a) == 14 * kMs);
  }
}

TEST_CASE("many equal works end together at the sum of their lengths", "[sim]") {
  auto device = open_sim();
  std::vector<Stream> streams;
  for (int i = 0; i < 7; ++i) {
    streams.push_back(*device->create_stream());
    REQUIRE(streams.back().work(work_of(3 * kMs)).ok());
  }
  for (const Stream& stream : streams) CHECK(end_of(*device, stream) == 21 * kMs);
}

TEST_CASE("urgent streams are served first", "[sim]") {
  auto device = open_sim();
  const Stream background = *device->create_stream(0);
  const Stream urgent = *device->create_stream(-5);
  REQUIRE(background.work(work_of(10 * kMs)).ok());
  REQUIRE(urgent.work(work_of(4 * kMs, 0.5f)).ok());
  // The background work has half the device for 4 ms, then all of it.
  CHECK(end_of(*device, urgent) == 4 * kMs);
  CHECK(end_of(*device, background) == 12 * kMs);
}

TEST_CASE("a pair table sets the speeds of co-located classes", "[sim]") {
  auto device = open_sim("pairs=1:2:0.5:0.8");
  const Stream a = *device->create_stream();
  const Stream b = *device->create_stream();
  REQUIRE(a.work(work_of(10 * kMs, 1, 1)).ok());
  REQUIRE(b.work(work_of(8 * kMs, 1, 2)).ok());
  CHECK(end_of(*device, b) == 10 * kMs);
  CHECK(end_of(*device, a) == 15 * kMs);
}

TEST_CASE("the contention model's arithmetic", "[sim][contention]") {
  const ContentionModel plain = *ContentionModel::create("share", 0, "");
  CHECK(speeds_of(plain, {}).empty());
  CHECK(speeds_of(plain, {{0, 0.3, 0}}) == std::vector<double>{1});
  CHECK(speeds_of(plain, {{0, 1, 0}, {0, 0.25, 0}}) == std::vector<double>{0.8, 0.8});
  CHECK(speeds_of(plain, {{0, 1, 0}, {0, 0.25, -1}}) == std::vector<double>{0.75, 1});
  CHECK(speeds_of(plain, {{0, 1, 0}, {0, 1, -1}}) == std::vector<double>{0, 1});
  const ContentionModel costly = *ContentionModel::create("share", 0.25, "");
  CHECK(speeds_of(costly, {{0, 0.5, 0}, {0, 0.5, 0}}) == std::vector<double>{0.8, 0.8});
  const ContentionModel free = *ContentionModel::create("none", 0, "");
  CHECK(speeds_of(free, {{0, 1, 0}, {0, 1, 0}}) == std::vector<double>{1, 1});
  const ContentionModel pairs = *ContentionModel::create("share", 0, "1:1:0.5:0.5,1:2:0.25:0.75");
  CHECK(speeds_of(pairs, {{1, 1, 0}, {1, 1, 0}}) == std::vector<double>{0.5, 0.5});
  CHECK(speeds_of(pairs, {{1, 1, 0}, {2, 1, 0}, {1, 1, 0}}) == std::vector<double>{0.125, 0.5625, 0.125});
  // Work that was not measured together shares the device.
  CHECK(speeds_of(pairs, {{1, 1, 0}, {3, 1, 0}}) == std::vector<double>{0.5, 0.5});

  for (const char* bad : {"1", "1:2:0.5", "1:2:0.5:0.5:0.5", "0:1:0.5:0.5", "1:2:0:0.5", "1:2:3:0.5",
                          "a:2:1:1", ",", "1:2:0.5:0.5,,"}) {
    INFO(bad);
    CHECK(ContentionModel::create("share", 0, bad).status().code() == GPUSHARE_INVALID_ARGUMENT);
  }
  CHECK(ContentionModel::create("fair", 0, "").status().code() == GPUSHARE_INVALID_ARGUMENT);
}

TEST_CASE("at any time some work runs, none above full speed", "[sim][contention][property]") {
  INFO("seed " << gpushare::test::seed());
  gpushare::test::Random random(gpushare::test::seed());
  const ContentionModel model = *ContentionModel::create("share", 0, "");
  for (int round = 0; round < 2000; ++round) {
    std::vector<ContentionModel::Load> loads(gpushare::test::uniform(random, 1, 12));
    for (auto& load : loads) {
      load.demand = static_cast<double>(gpushare::test::uniform(random, 1, 100)) / 100;
      load.priority = -static_cast<int32_t>(gpushare::test::uniform(random, 0, 3));
    }
    const std::vector<double> speeds = speeds_of(model, loads);
    double served = 0;
    double wanted = 0;
    for (size_t i = 0; i < loads.size(); ++i) {
      REQUIRE(speeds[i] >= 0);
      REQUIRE(speeds[i] <= 1);
      served += speeds[i] * loads[i].demand;
      wanted += loads[i].demand;
    }
    // The device is never idle while work wants it, and never overbooked.
    REQUIRE(served == Approx(std::min(1.0, wanted)));
  }
}

TEST_CASE("copies of one direction share one bus", "[sim]") {
  auto device = open_sim("copy_gbps=1&copy_latency_ns=1000&memory_gbps=2&total_bytes=16MiB");
  const Stream a = *device->create_stream();
  const Stream b = *device->create_stream();
  std::vector<char> host(1'000'000);
  const uint64_t pointer = reinterpret_cast<uint64_t>(host.data());
  const auto block = *device->alloc(2'000'000);
  const uint64_t one_copy_ns = 1'000'000 + 1'000;
  SECTION("one after the other in the same direction") {
    REQUIRE(a.copy(block, pointer, 1'000'000, GPUSHARE_COPY_HOST_TO_DEVICE).ok());
    REQUIRE(b.copy(block + 1'000'000, pointer, 1'000'000, GPUSHARE_COPY_HOST_TO_DEVICE).ok());
    CHECK(end_of(*device, a) == one_copy_ns);
    CHECK(end_of(*device, b) == 2 * one_copy_ns);
  }
  SECTION("side by side in opposite directions") {
    REQUIRE(a.copy(block, pointer, 1'000'000, GPUSHARE_COPY_HOST_TO_DEVICE).ok());
    REQUIRE(b.copy(pointer, block + 1'000'000, 1'000'000, GPUSHARE_COPY_DEVICE_TO_HOST).ok());
    CHECK(end_of(*device, a) == one_copy_ns);
    CHECK(end_of(*device, b) == one_copy_ns);
  }
  SECTION("inside the device every byte is read and written") {
    REQUIRE(a.copy(block, block + 1'000'000, 1'000'000, GPUSHARE_COPY_DEVICE_TO_DEVICE).ok());
    CHECK(end_of(*device, a) == 1'000'000);
    REQUIRE(a.fill(block, 1, 1'000'000).ok());
    CHECK(end_of(*device, a) == 1'500'000);
  }
  SECTION("work and copies overlap") {
    REQUIRE(a.work(work_of(one_copy_ns)).ok());
    REQUIRE(b.copy(block, pointer, 1'000'000, GPUSHARE_COPY_HOST_TO_DEVICE).ok());
    CHECK(end_of(*device, a) == one_copy_ns);
    CHECK(b.query().ok());
  }
  REQUIRE(device->free(block).ok());
}

TEST_CASE("host functions run at their virtual time on the waiting thread", "[sim]") {
  auto device = open_sim();
  struct Seen {
    Device* device;
    std::vector<uint64_t> times;
    std::thread::id thread;
  } seen{device.get(), {}, {}};
  const auto note = [](void* data) {
    Seen& s = *static_cast<Seen*>(data);
    s.times.push_back(s.device->now_ns());
    s.thread = std::this_thread::get_id();
  };
  const Stream a = *device->create_stream();
  const Stream b = *device->create_stream();
  REQUIRE(a.work(work_of(2 * kMs, 0.5f)).ok());
  REQUIRE(a.launch_host(note, &seen).ok());
  REQUIRE(b.work(work_of(1 * kMs, 0.5f)).ok());
  REQUIRE(b.launch_host(note, &seen).ok());
  REQUIRE(a.synchronize().ok());
  CHECK(seen.times == std::vector<uint64_t>{1 * kMs, 2 * kMs});
  CHECK(seen.thread == std::this_thread::get_id());
}

TEST_CASE("a host function may wait for another stream", "[sim]") {
  auto device = open_sim();
  struct Inner {
    Stream stream;
    Device* device;
    uint64_t saw_ns;
  } inner{*device->create_stream(), device.get(), 0};
  const Stream outer = *device->create_stream();
  REQUIRE(inner.stream.work(work_of(7 * kMs)).ok());
  REQUIRE(outer
              .launch_host(
                  [](void* data) {
                    Inner& i = *static_cast<Inner*>(data);
                    if (i.stream.synchronize().ok()) i.saw_ns = i.device->now_ns();
                  },
                  &inner)
              .ok());
  REQUIRE(outer.synchronize().ok());
  CHECK(inner.saw_ns == 7 * kMs);
}

TEST_CASE("a wait that the waiting host function itself blocks is refused", "[sim]") {
  auto device = open_sim();
  struct Inner {
    Stream stream;
    int32_t code;
  } inner{*device->create_stream(), -1};
  const Stream outer = *device->create_stream();
  const Event event = *device->create_event();
  REQUIRE(outer
              .launch_host(
                  [](void* data) {
                    Inner& i = *static_cast<Inner*>(data);
                    i.code = i.stream.synchronize().code();
                  },
                  &inner)
              .ok());
  REQUIRE(outer.record(event).ok());
  REQUIRE(inner.stream.wait(event).ok());
  REQUIRE(outer.synchronize().ok());
  CHECK(inner.code == GPUSHARE_INVALID_STATE);
}

TEST_CASE("a slow stream takes the factor of its time", "[sim][faults]") {
  auto device = open_sim("contention=none");
  const Stream slow = *device->create_stream();
  const Stream other = *device->create_stream();
  gpushare_backend_fault fault{sizeof(fault), GPUSHARE_FAULT_SLOW_STREAM, 2, 4.0};
  REQUIRE(device->set_fault(fault).ok());
  REQUIRE(other.work(work_of(kMs)).ok());
  REQUIRE(slow.work(work_of(kMs)).ok());
  CHECK(end_of(*device, other) == kMs);
  CHECK(end_of(*device, slow) == 4 * kMs);
  REQUIRE(slow.work(work_of(kMs)).ok());
  REQUIRE(other.work(work_of(kMs)).ok());
  CHECK(end_of(*device, slow) == 8 * kMs);
}

TEST_CASE("a run is a function of its calls and the seed", "[sim]") {
  const auto run = [](const std::string& options) {
    auto device = open_sim(options);
    std::vector<Stream> streams;
    for (int i = 0; i < 4; ++i) streams.push_back(*device->create_stream());
    std::vector<uint64_t> times;
    gpushare::test::Random random(7);
    for (int round = 0; round < 200; ++round) {
      const Stream& stream = streams[gpushare::test::uniform(random, 0, 3)];
      REQUIRE(stream.work(work_of(gpushare::test::uniform(random, 1, 5 * kMs), 0.6f)).ok());
      if (round % 7 == 0) {
        REQUIRE(streams[gpushare::test::uniform(random, 0, 3)].synchronize().ok());
        times.push_back(device->now_ns());
      }
    }
    return times;
  };
  CHECK(run("") == run(""));
  CHECK(run("jitter=0.2&seed=3") == run("jitter=0.2&seed=3"));
  CHECK(run("jitter=0.2&seed=3") != run("jitter=0.2&seed=4"));
}

TEST_CASE("jitter stays within its bound", "[sim]") {
  auto device = open_sim("jitter=0.1");
  const Stream stream = *device->create_stream();
  uint64_t last = 0;
  for (int i = 0; i < 100; ++i) {
    REQUIRE(stream.work(work_of(kMs)).ok());
    const uint64_t end = end_of(*device, stream);
    CHECK(end - last >= 900'000);
    CHECK(end - last <= 1'100'000);
    last = end;
  }
}

TEST_CASE("without data, copies cost time and touch nothing", "[sim]") {
  auto device = open_sim("data=0&total_gib=1000&copy_gbps=10&copy_latency_ns=0");
  const Stream stream = *device->create_stream();
  const auto block = *device->alloc(500ull << 30);
  char guard = 42;
  REQUIRE(stream.copy(reinterpret_cast<uint64_t>(&guard), block, 100ull << 30, GPUSHARE_COPY_DEVICE_TO_HOST)
              .ok());
  REQUIRE(stream.fill(block, 1, 1ull << 30).ok());
  REQUIRE(stream.synchronize().ok());
  CHECK(guard == 42);
  CHECK(device->now_ns() > 10'000'000'000ull);
  REQUIRE(device->free(block).ok());
}

TEST_CASE("imaginary addresses are the same in every run of a device, and reused", "[sim]") {
  auto device = open_sim("granularity=64KiB");
  const uint64_t granule = device->info().mapping_granularity_bytes;
  const auto first = *device->va_reserve(granule);
  for (int i = 0; i < 10'000; ++i) {
    const auto a = *device->va_reserve(4 * granule);
    const auto b = *device->va_reserve(granule);
    CHECK(a > first);
    REQUIRE(device->va_free(a, 4 * granule).ok());
    REQUIRE(device->va_free(b, granule).ok());
  }
  // Everything above `first` was given back, so the next range lies right behind it.
  const auto again = *device->va_reserve(granule);
  CHECK(again - first <= 2 * granule);
  REQUIRE(device->va_free(again, granule).ok());
  REQUIRE(device->va_free(first, granule).ok());
}

TEST_CASE("threads that wait at once all get what they wait for", "[sim][threads]") {
  auto device = open_sim();
  constexpr int kThreads = 6;
  constexpr int kRounds = 200;
  std::atomic<int> callbacks{0};
  std::vector<std::thread> threads;
  std::vector<int> failures(kThreads, 0);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const Stream stream = *device->create_stream();
      for (int i = 0; i < kRounds; ++i) {
        const bool ok =
            stream.work(work_of(1000, 0.4f)).ok() &&
            stream.launch_host([](void* n) { ++*static_cast<std::atomic<int>*>(n); }, &callbacks).ok() &&
            stream.work(work_of(500)).ok() && stream.synchronize().ok();
        failures[static_cast<size_t>(t)] += ok ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(failures == std::vector<int>(kThreads, 0));
  CHECK(callbacks == kThreads * kRounds);
  // The device did 0.9 demand-microseconds a round and thread, and cannot have done them faster than at full
  // use.
  CHECK(device->now_ns() >= kThreads * kRounds * 900ull);
}

TEST_CASE("bad sim options are refused", "[sim]") {
  for (const char* spec :
       {"sim?contention=maybe", "sim?overhead=-1", "sim?pairs=1:2", "sim?jitter=1", "sim?seed=-1",
        "sim?polls=0", "sim?data=2", "sim?copy_gbps=0", "sim?threads=4", "sim?copy_latency_ns=1.5"}) {
    INFO(spec);
    CHECK(Device::open(spec).status().code() == GPUSHARE_INVALID_ARGUMENT);
  }
}
