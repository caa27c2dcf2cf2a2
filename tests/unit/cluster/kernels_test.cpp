// The part of a device that kernels take (thesis on interference-aware serving, 5.3): its formulas, its example, and
// brute force.
// SPDX-License-Identifier: Apache-2.0
#include "cluster/services/kernels.hpp"

#include <algorithm>

#include "cluster/json.hpp"
#include "cluster/plan.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

using namespace gpushare;
using namespace gpushare::cluster;
using namespace gpushare::cluster::services;

namespace {

// A V100: 80 SMs, each 2,048 threads, 32 blocks, 65,536 registers, 96 KiB of shared memory.
constexpr Multiprocessors kV100{80, 2048, 32, 65'536, 98'304};

// Puts blocks on one SM, one after the other, until something runs out.
uint64_t filled(const Multiprocessors& sms, const KernelLaunch& kernel) {
  uint64_t blocks = 0, threads = 0, registers = 0, shared = 0;
  for (;;) {
    threads += kernel.threads;
    registers += uint64_t{kernel.threads} * kernel.registers;
    shared += kernel.shared_bytes;
    if (blocks == sms.blocks || threads > sms.threads || registers > sms.registers ||
        shared > sms.shared_bytes)
      return blocks;
    ++blocks;
  }
}

}  // namespace

TEST_CASE("blocks of an SM: the least of threads, registers, shared memory and blocks") {
  // By hand. 2048/256 = 8 by threads; 65536/(256 x 32) = 8 by registers.
  CHECK(blocks_per_sm(kV100, {1, 256, 32, 0}) == 8);
  CHECK(blocks_per_sm(kV100, {1, 256, 64, 0}) == 4);      // registers
  CHECK(blocks_per_sm(kV100, {1, 256, 0, 49'152}) == 2);  // shared memory
  CHECK(blocks_per_sm(kV100, {1, 32, 0, 0}) == 32);       // blocks, not 2048/32 = 64
  CHECK(blocks_per_sm(kV100, {1, 256, 32, 0, 6}) == 6);   // the driver knows better
  CHECK(blocks_per_sm(kV100, {1, 1024, 128, 0}) == 0);    // 131,072 registers
  CHECK(blocks_per_sm(kV100, {1, 4096, 0, 0}) == 0);
}

TEST_CASE("SM utilisation and occupancy of one kernel") {
  // 400 blocks, 8 an SM: 50 of 80 SMs. All 400 x 8 warps run at once, of 80 x 64.
  const KernelLoad load = load_of(kV100, {400, 256, 32, 0});
  CHECK(load.sms == Approx(50.0 / 80));
  CHECK(load.occupancy == Approx(3200.0 / 5120));
  CHECK(load_of(kV100, {401, 256, 32, 0}).sms == Approx(51.0 / 80));  // the last block needs an SM too
  CHECK(load_of(kV100, {100'000, 256, 32, 0}).sms == 1);
  // Registers allow half the threads: whole waves of it have an occupancy of a half.
  CHECK(load_of(kV100, {100'000, 256, 64, 0}).occupancy == Approx(0.5));
  KernelLaunch measured{100'000, 256, 32, 0};
  measured.occupancy = 0.7;
  CHECK(load_of(kV100, measured).occupancy == Approx(0.7));
}

TEST_CASE("kernels side by side: the thesis's example of 50 and 20, and of 50 and 40 SMs of 80") {
  for (const auto& [other, together] : {std::pair{20.0, 70.0 / 80}, std::pair{40.0, 1.0}}) {
    KernelMeter meter(kV100);
    CHECK(meter.percent()[size_t(Metric::kWsm)] < 0);
    meter.add({400, 256, 32, 0}, 0, 1);
    meter.add({uint64_t(other) * 8, 256, 32, 0}, 0, 1);
    meter.end_batch();
    CHECK(meter.percent()[size_t(Metric::kWsm)] == Approx(100 * together));
  }
}

TEST_CASE("time weighs, gaps are idle, and batches add up") {
  KernelMeter meter(kV100);
  meter.add({400, 256, 32, 0}, 0, 3);  // 62.5% for 3 s
  meter.add({80, 256, 32, 0}, 4, 5);   // 12.5% for 1 s, after a second of nothing
  meter.end_batch();
  CHECK(meter.percent()[size_t(Metric::kWsm)] == Approx((3 * 62.5 + 12.5) / 5));
  CHECK(meter.percent()[size_t(Metric::kWao)] == Approx((3 * 62.5 + 12.5) / 5));
  CHECK(meter.percent()[size_t(Metric::kAo)] == Approx(62.5));
  meter.add({100'000, 256, 64, 0}, 10,
            15);  // 5 s of all SMs at half the occupancy; the time between batches is none
  meter.end_batch();
  CHECK(meter.percent()[size_t(Metric::kWsm)] == Approx((200 + 500.0) / 10));
  CHECK(meter.percent()[size_t(Metric::kWao)] == Approx((200 + 250.0) / 10));
  meter.end_batch();  // without a kernel: nothing
  CHECK(meter.percent()[size_t(Metric::kWsm)] == Approx(70));
}

TEST_CASE("random kernels agree with blocks put on SMs one by one, and with time cut into pieces") {
  test::Random random(test::seed());
  INFO("seed " << test::seed());
  for (int round = 0; round < 2000; ++round) {
    const Multiprocessors sms{uint32_t(test::uniform(random, 1, 20)), 2048, 32, 65'536, 65'536};
    KernelMeter meter(sms);
    const int64_t length = 24;
    std::vector<double> used(size_t(length), 0);
    int64_t first = length, last = 0;
    for (size_t k = test::uniform(random, 1, 6); k-- > 0;) {
      KernelLaunch kernel{test::uniform(random, 1, 300), uint32_t(32 * test::uniform(random, 1, 16)),
                          uint32_t(test::uniform(random, 0, 64)), 1024 * test::uniform(random, 0, 48)};
      const uint64_t each = filled(sms, kernel);
      CHECK(blocks_per_sm(sms, kernel) == each);
      uint64_t needed = 0;
      for (uint64_t placed = 0; placed < kernel.blocks; placed += each) ++needed;
      const auto begin = int64_t(test::uniform(random, 0, uint64_t(length) - 1));
      const int64_t end = begin + 1 + int64_t(test::uniform(random, 0, uint64_t(length - begin) - 1));
      for (int64_t t = begin; t < end; ++t) used[size_t(t)] += std::min(1.0, double(needed) / sms.count);
      first = std::min(first, begin);
      last = std::max(last, end);
      meter.add(kernel, double(begin), double(end));
    }
    meter.end_batch();
    double sum = 0;
    for (const double part : used) sum += std::min(1.0, part);
    CHECK(meter.percent()[size_t(Metric::kWsm)] == Approx(100 * sum / double(last - first)));
  }
}
