// Device time is billed in full, also for work that is so short that the ring of its events is full all the time. The shim's
// objects are part of the test; the driver is the recording one, with a device whose work takes time.
// SPDX-License-Identifier: Apache-2.0
#include "shim/rings.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "shim/gate.hpp"
#include "shim/table.hpp"
#include "shim/words.hpp"
#include "support/catch.hpp"
#include "through_recorder.hpp"

using namespace gpushare::shim;  // NOLINT(google-build-using-namespace): as in gate.cpp

namespace {

// Before the driver is opened, which then finds its device there.
struct DeviceFile {
  DeviceFile() {
    const int file = mkstemp(path);
    if (file >= 0) close(file);
    setenv("RECORDER_DEVICE", path, 1);
  }
  ~DeviceFile() { unlink(path); }
  char path[40] = "/dev/shm/gpushare-rings-XXXXXX";
} g_device;

// The first device's context and a stream of it, and the ring of its work in a turn without bounds.
constexpr int kSeat = 0;
struct Working {
  Working() {
    REQUIRE(real(kEntry_cuInit, I{0}) == kSuccess);
    REQUIRE(real(kEntry_cuDevicePrimaryCtxRetain, &context, I{0}) == kSuccess);
    REQUIRE(real(kEntry_cuCtxSetCurrent, context) == kSuccess);
    REQUIRE(real(kEntry_cuStreamCreate, &stream, I{1}) == kSuccess);
    store(now.budget_ns, UINT64_MAX);
    store(now.most_ns, UINT64_MAX);
    restart_clock(kSeat);
    ring = ring_of(reinterpret_cast<uint64_t>(context), kSeat);
    REQUIRE(ring != nullptr);
    work.stream = reinterpret_cast<uint64_t>(stream);
  }
  Piece* reserved(uint64_t* number) {
    Piece* piece = nullptr;
    while ((piece = reserve(work, ring, false, number)) == nullptr) look_at_events(kSeat, true);
    return piece;
  }
  // As the gate does: events before and behind what `give` gives to the driver.
  template <class Give>
  void run(const Give& give) {
    uint64_t number = 0;
    Piece* const piece = reserved(&number);
    REQUIRE(begin(*piece, *ring, work, number));
    const Result result = give();
    end(*piece, kSeat, work, result);
    REQUIRE(result == kSuccess);
  }
  void drain() {
    REQUIRE(real(kEntry_cuCtxSynchronize) == kSuccess);
    while (!drained(kSeat)) look_at_events(kSeat, true);
  }
  void *context = nullptr, *stream = nullptr;
  Turn& now = turn(kSeat);
  Ring* ring = nullptr;
  Work work{};
};

}  // namespace

TEST_CASE("the device time that a program alone queues is bounded, and short work goes without events") {
  void *context = nullptr, *stream = nullptr, *module = nullptr, *longs = nullptr, *shorts = nullptr;
  REQUIRE(real(kEntry_cuInit, I{0}) == kSuccess);
  REQUIRE(real(kEntry_cuDevicePrimaryCtxRetain, &context, I{0}) == kSuccess);
  REQUIRE(real(kEntry_cuCtxSetCurrent, context) == kSuccess);
  REQUIRE(real(kEntry_cuStreamCreate, &stream, I{1}) == kSuccess);
  char image[] = "image", long_name[] = "spin_10ms", short_name[] = "spin_20us";
  REQUIRE(real(kEntry_cuModuleLoadData, &module, static_cast<P>(image)) == kSuccess);
  REQUIRE(real(kEntry_cuModuleGetFunction, &longs, module, static_cast<P>(long_name)) == kSuccess);
  REQUIRE(real(kEntry_cuModuleGetFunction, &shorts, module, static_cast<P>(short_name)) == kSuccess);
  store(gate().seats, 1);
  store(gate().sessions, 1);
  store(gate().first, kSeat + 1);
  Turn& now = turn(kSeat);
  store(now.budget_ns, UINT64_MAX);
  store(now.most_ns, 20'000'000);
  change_phase(kSeat, Phase::open);

  using Launch = Result (*)(P, I, I, I, I, I, I, I, P, P, P);
  const auto entry = reinterpret_cast<Launch>(gpushare_shim_entries[kEntry_cuLaunchKernel]);
  const auto launch = [&](void* kernel) {
    REQUIRE(entry(kernel, 1, 1, 1, 1, 1, 1, 0, stream, nullptr, nullptr) == kSuccess);
  };
  // How many kernels the device has when the next has gone there. Some may end before they are counted.
  const auto in_flight = [&](uint64_t launched) {
    recorder_device device;
    recorder_process processes[32];
    REQUIRE(control<decltype(&recorder_device_read)>("recorder_device_read")(g_device.path, &device,
                                                                             processes, 32) == 1);
    return launched - processes[0].kernels;
  };
  for (uint64_t launched = 1; launched <= 40; ++launched) {
    launch(longs);
    INFO(launched);
    CHECK(in_flight(launched) <= (launched <= 16 ? 9 : 3));  // eight that were not measured yet, then 20 ms
  }

  Ring* const ring = ring_of(reinterpret_cast<uint64_t>(context), kSeat);
  const auto pieces = [&] {  // so far, this one included
    Work work{};
    work.stream = reinterpret_cast<uint64_t>(stream);
    work.signature = reinterpret_cast<uint64_t>(shorts) ^ uint64_t { 1 } << 20;
    uint64_t number = 0;
    Piece* piece = nullptr;
    while ((piece = reserve(work, ring, true, &number)) == nullptr) look_at_events(kSeat, true);
    end(*piece, kSeat, work, 1);
    return number;
  };
  for (int i = 0; i < 100; ++i) launch(shorts);
  REQUIRE(real(kEntry_cuCtxSynchronize) == kSuccess);
  while (!drained(kSeat)) look_at_events(kSeat, true);
  const uint64_t before = pieces();
  for (int i = 0; i < 2500; ++i) launch(shorts);  // 50 ms: some 20 events
  const uint64_t events = pieces() - before;
  CHECK(events >= 10);
  CHECK(events <= 60);
  REQUIRE(real(kEntry_cuCtxSynchronize) == kSuccess);
  while (!drained(kSeat)) look_at_events(kSeat, true);

  // In a turn that others wait for: up to its end, and sixteen pieces of one kind.
  store(now.most_alike, 16U);
  store(now.most_ns, 40'000'000);
  const auto goes = [&](void* kernel, uint64_t turn_ns) {
    store(now.budget_ns, load(now.used_ns) + turn_ns);
    Work work{};
    work.stream = reinterpret_cast<uint64_t>(stream);
    work.signature = reinterpret_cast<uint64_t>(kernel) ^ uint64_t { 1 } << 20;
    uint64_t number = 0;
    std::vector<Piece*> went;
    while (Piece* piece = reserve(work, ring, false, &number)) went.push_back(piece);
    for (Piece* piece : went) end(*piece, kSeat, work, 1);
    while (!drained(kSeat)) look_at_events(kSeat, true);
    return went.size();
  };
  const size_t in_long_turn = goes(longs, 25'000'000), in_short_turn = goes(longs, 5'000'000);
  CHECK(in_long_turn == 3);  // the last begins before the end
  CHECK(in_short_turn == 1);
  const size_t many_short = goes(shorts, 25'000'000);
  CHECK(many_short >= 15);
  CHECK(many_short <= 17);
  const size_t until_end = goes(shorts, 100'000);
  CHECK(until_end >= 4);
  CHECK(until_end <= 7);
  store(now.most_alike, 0U);
}

TEST_CASE("work that keeps the ring of events full is billed in full") {
  constexpr int kPieces = 3000;
  Working program;
  uint64_t block = 0;
  static char bytes[1 << 20];
  REQUIRE(real(kEntry_cuMemAlloc_v2, &block, uint64_t{sizeof bytes}) == kSuccess);
  program.work.signature = 7;
  for (int i = 0; i < kPieces; ++i)
    program.run([&] {
      return real(kEntry_cuMemcpyHtoDAsync_v2, block, static_cast<P>(bytes), uint64_t{sizeof bytes},
                  program.stream);
    });
  program.drain();

  recorder_device device;
  recorder_process processes[32];
  REQUIRE(control<decltype(&recorder_device_read)>("recorder_device_read")(g_device.path, &device, processes,
                                                                           32) == 1);
  REQUIRE(processes[0].copies == kPieces);
  // Each interval is a float of milliseconds. A stream that idles between two looks at its events is billed for that.
  const auto used_ns = static_cast<double>(load(program.now.used_ns));
  CHECK(used_ns > 0.99 * static_cast<double>(processes[0].copy_ns));
  CHECK(used_ns < 1.01 * static_cast<double>(device.now_ns));
}

TEST_CASE("what a kind of work takes is learned as a mean in which the last time counts a quarter") {
  Working program;
  void *module = nullptr, *longs = nullptr, *shorts = nullptr;
  char image[] = "image", long_name[] = "spin_10ms", short_name[] = "spin_1ms";
  REQUIRE(real(kEntry_cuModuleLoadData, &module, static_cast<P>(image)) == kSuccess);
  REQUIRE(real(kEntry_cuModuleGetFunction, &longs, module, static_cast<P>(long_name)) == kSuccess);
  REQUIRE(real(kEntry_cuModuleGetFunction, &shorts, module, static_cast<P>(short_name)) == kSuccess);
  program.work.signature = 13;
  // What the shim has counted for the kernel, whatever the machine made of it.
  const auto took_ns = [&](void* kernel) {
    const uint64_t before_ns = load(program.now.used_ns);
    program.run([&] {
      return real(kEntry_cuLaunchKernel, kernel, I{1}, I{1}, I{1}, I{1}, I{1}, I{1}, I{0}, program.stream,
                  static_cast<P>(nullptr), static_cast<P>(nullptr));
    });
    program.drain();
    return load(program.now.used_ns) - before_ns;
  };
  const auto learned_ns = [&] {
    uint64_t number = 0;
    Piece* const piece = program.reserved(&number);
    end(*piece, kSeat, program.work, 1);
    program.drain();
    return piece->estimate_ns;
  };
  uint64_t mean_ns = took_ns(longs);
  CHECK(learned_ns() == mean_ns);
  for (int i = 0; i < 3; ++i) {
    const uint64_t last_ns = took_ns(shorts);
    mean_ns = mean_ns - mean_ns / 4 + last_ns / 4;
    CHECK(learned_ns() == mean_ns);
  }
}

TEST_CASE("an opportunistic process has little in flight in a turn that others wait for, another one much") {
  Working program;
  void *module = nullptr, *kernel = nullptr;
  char image[] = "image", name[] = "spin_1ms";
  REQUIRE(real(kEntry_cuModuleLoadData, &module, static_cast<P>(image)) == kSuccess);
  REQUIRE(real(kEntry_cuModuleGetFunction, &kernel, module, static_cast<P>(name)) == kSuccess);
  program.work.signature = 17;
  program.run([&] {
    return real(kEntry_cuLaunchKernel, kernel, I{1}, I{1}, I{1}, I{1}, I{1}, I{1}, I{0}, program.stream,
                static_cast<P>(nullptr), static_cast<P>(nullptr));
  });
  program.drain();
  uint64_t learned_ns = 0;
  const auto goes = [&](Others others, bool is_opportunistic) {
    bound_flight(kSeat, others, is_opportunistic);
    uint64_t number = 0;
    std::vector<Piece*> went;
    while (Piece* const piece = reserve(program.work, program.ring, false, &number)) went.push_back(piece);
    if (!went.empty()) learned_ns = went.front()->estimate_ns;
    for (Piece* const piece : went) end(*piece, kSeat, program.work, 1);
    program.drain();
    return went.size();
  };
  // A piece takes a millisecond, or more where the machine was late. One piece goes whatever it takes.
  const size_t when_they_may_come = goes(Others::may_come, false);
  const auto up_to = [&](uint64_t ns) { return std::max<size_t>(1, ns / learned_ns); };
  CHECK(when_they_may_come == up_to(200'000));
  CHECK(goes(Others::may_come, true) == up_to(200'000));
  CHECK(goes(Others::wait, true) == up_to(200'000));
  CHECK(goes(Others::wait, false) == std::min<size_t>(16, up_to(20'000'000)));
  CHECK(goes(Others::none, false) == up_to(20'000'000));
  CHECK(goes(Others::none, true) == up_to(20'000'000));
}

TEST_CASE(
    "the mode of captures is exchanged around calls about events while a stream is captured, and never "
    "else") {
  REQUIRE(driver() != nullptr);
  const auto exchanges = [](uint32_t capturing) {
    store(gate().capturing, capturing);
    control<decltype(&recorder_arm)>("recorder_arm")(find_entry("cuThreadExchangeStreamCaptureMode"), 0);
    look_at_events(kSeat, true);
    const bool any = control<decltype(&recorder_last)>("recorder_last")()->entry >= 0;
    control<decltype(&recorder_arm)>("recorder_arm")(-1, 0);
    store(gate().capturing, 0U);
    return any;
  };
  CHECK_FALSE(exchanges(0));
  CHECK(exchanges(1));
}

TEST_CASE("the time that was counted last is kept beyond the piece that ended it") {
  constexpr int kPlaces = 256;  // pieces of a ring
  Working program;
  void *module = nullptr, *longs = nullptr;
  char image[] = "image", long_name[] = "spin_10ms";
  REQUIRE(real(kEntry_cuModuleLoadData, &module, static_cast<P>(image)) == kSuccess);
  REQUIRE(real(kEntry_cuModuleGetFunction, &longs, module, static_cast<P>(long_name)) == kSuccess);
  program.work.signature = 11;
  const auto spin = [&] {
    return real(kEntry_cuLaunchKernel, longs, I{1}, I{1}, I{1}, I{1}, I{1}, I{1}, I{0}, program.stream,
                static_cast<P>(nullptr), static_cast<P>(nullptr));
  };
  program.run(spin);
  program.drain();
  // All other places but one are given to work that the driver refuses.
  for (int i = 0; i < kPlaces - 2; ++i) {
    uint64_t number = 0;
    end(*program.reserved(&number), kSeat, program.work, 1);
  }
  program.drain();
  const uint64_t before_ns = load(program.now.used_ns);
  program.run(spin);
  program.run(spin);  // in the place of the first
  program.drain();
  CHECK(load(program.now.used_ns) - before_ns >= 19'900'000);  // steps of events are 0.5 us
}
