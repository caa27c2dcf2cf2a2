// Many threads at once. Assertions are made after the join: Catch2's are not thread-safe.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "cts.hpp"

namespace gpushare::cts {
namespace {

constexpr size_t kThreads = 6;

// Runs `body(thread)` on kThreads threads; the number of them that returned false.
int failures_of(const std::function<bool(size_t)>& body) {
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      if (!body(t)) ++failures;
    });
  }
  for (std::thread& thread : threads) thread.join();
  return failures;
}

void count_up_atomic(void* counter) {
  ++*static_cast<std::atomic<int>*>(counter);
}

}  // namespace

CTS_TEST("threads: each with its own stream and memory") {
  device::Device& device = *cts.device;
  CHECK(failures_of([&](size_t t) {
          auto stream = device.create_stream();
          if (!stream.ok()) return false;
          for (uint64_t round = 0; round < 40; ++round) {
            const uint64_t bytes = 1000 + 997 * round + t;
            const auto data = pattern(bytes, t * 1000 + round);
            std::vector<uint8_t> back(bytes);
            auto block = device.alloc(bytes);
            const bool ok =
                block.ok() &&
                stream->copy(*block, address_of(data.data()), bytes, GPUSHARE_COPY_HOST_TO_DEVICE).ok() &&
                stream->copy(address_of(back.data()), *block, bytes, GPUSHARE_COPY_DEVICE_TO_HOST).ok() &&
                stream->synchronize().ok() && back == data && device.free(*block).ok();
            if (!ok) return false;
          }
          return true;
        }) == 0);
}

CTS_TEST("threads: all enqueue on one stream") {
  const auto stream = cts.stream();
  std::atomic<int> runs{0};
  CHECK(failures_of([&](size_t) {
          for (int i = 0; i < 200; ++i) {
            if (!stream.launch_host(count_up_atomic, &runs).ok()) return false;
            const int32_t code = stream.query().code();
            if (code != GPUSHARE_OK && code != GPUSHARE_NOT_READY) return false;
          }
          return stream.synchronize().ok();
        }) == 0);
  CHECK(runs == 200 * static_cast<int>(kThreads));
}

CTS_TEST("threads: events carry order between threads") {
  // Each thread adds to a plain counter on its own stream, between a wait for the event before and a record
  // of its own.
  std::vector<device::Event> events;
  int counter = 0;
  constexpr size_t kRounds = 10;
  for (size_t i = 0; i < kThreads * kRounds; ++i) events.push_back(cts.event());
  std::atomic<size_t> turn{0};
  device::Device& device = *cts.device;
  CHECK(failures_of([&](size_t t) {
          auto stream = device.create_stream();
          if (!stream.ok()) return false;
          for (size_t round = 0; round < kRounds; ++round) {
            const size_t mine = round * kThreads + t;
            // An event must be recorded before another stream can wait for that record.
            while (turn.load() != mine) std::this_thread::sleep_for(std::chrono::microseconds(20));
            bool ok = mine == 0 || stream->wait(events[mine - 1]).ok();
            ok = ok && stream->launch_host([](void* n) { ++*static_cast<int*>(n); }, &counter).ok() &&
                 stream->record(events[mine]).ok();
            turn.store(mine + 1);
            if (!ok) return false;
          }
          return stream->synchronize().ok();
        }) == 0);
  REQUIRE_OK(events.back().synchronize());
  CHECK(counter == static_cast<int>(kThreads * kRounds));
}

CTS_TEST("threads: several wait for one event") {
  Gate gate;
  const auto stream = cts.stream();
  const auto event = cts.event();
  std::atomic<int> runs{0};
  REQUIRE_OK(stream.launch_host(Gate::block, &gate));
  REQUIRE_OK(stream.launch_host(count_up_atomic, &runs));
  REQUIRE_OK(stream.record(event));
  CHECK(failures_of([&](size_t t) {
          if (t == 0) {
            gate.open();
            return true;
          }
          return event.synchronize().ok() && runs == 1;
        }) == 0);
  REQUIRE_OK(stream.synchronize());
}

CTS_TEST("threads: streams and events come and go") {
  device::Device& device = *cts.device;
  std::atomic<int> runs{0};
  CHECK(failures_of([&](size_t) {
          for (int i = 0; i < 50; ++i) {
            auto first = device.create_stream();
            auto second = device.create_stream();
            auto event = device.create_event(GPUSHARE_EVENT_TIMING);
            if (!first.ok() || !second.ok() || !event.ok()) return false;
            const bool ok = first->launch_host(count_up_atomic, &runs).ok() && first->record(*event).ok() &&
                            second->wait(*event).ok() && second->launch_host(count_up_atomic, &runs).ok();
            if (!ok) return false;
          }
          return true;
        }) == 0);
  CHECK(runs == 100 * static_cast<int>(kThreads));
}

CTS_TEST("threads: mappings in one reservation") {
  device::Device& device = *cts.device;
  const uint64_t granule = device.info().mapping_granularity_bytes;
  const device::Address range = *device.va_reserve(kThreads * granule);
  CHECK(failures_of([&](size_t t) {
          auto stream = device.create_stream();
          if (!stream.ok()) return false;
          const device::Address at = range + t * granule;
          for (int i = 0; i < 20; ++i) {
            auto memory = device.phys_create(granule);
            uint8_t byte = 0;
            const bool ok =
                memory.ok() && device.va_map(at, granule, *memory, 0).ok() &&
                stream->fill(at + granule - 1, static_cast<uint8_t>(t), 1).ok() &&
                stream->copy(address_of(&byte), at + granule - 1, 1, GPUSHARE_COPY_DEVICE_TO_HOST).ok() &&
                stream->synchronize().ok() && byte == t && device.va_unmap(at, granule).ok() &&
                device.phys_release(*memory).ok();
            if (!ok) return false;
          }
          return true;
        }) == 0);
  CHECK_OK(device.va_free(range, kThreads * granule));
}

CTS_TEST("threads: polling and waiting at once") {
  device::Device& device = *cts.device;
  std::atomic<int> runs{0};
  CHECK(failures_of([&](size_t t) {
          auto stream = device.create_stream();
          auto event = device.create_event();
          if (!stream.ok() || !event.ok()) return false;
          for (int i = 0; i < 25; ++i) {
            if (!stream->launch_host(count_up_atomic, &runs).ok() || !stream->record(*event).ok())
              return false;
            int32_t code = t % 2 == 0 ? event->synchronize().code() : GPUSHARE_NOT_READY;
            while (code == GPUSHARE_NOT_READY) {
              code = event->query().code();
              if (code == GPUSHARE_NOT_READY) std::this_thread::sleep_for(std::chrono::microseconds(20));
            }
            if (code != GPUSHARE_OK) return false;
          }
          return true;
        }) == 0);
  CHECK(runs == 25 * static_cast<int>(kThreads));
}

}  // namespace gpushare::cts
