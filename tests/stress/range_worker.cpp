// A process with an elastic range on a shared device, for range_stress.cpp: range_worker NAME SLOTS TRADES SEED
// trades (trader.hpp) from two threads until it has committed so many slots of so many. 0 trades: commits eight, cannot be asked,
// and keeps them until it is killed. Prints a line when it has bytes for the first time, and how often it was asked at
// its end. Exit 1 with the reason when anything goes wrong.
// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "stress/trader.hpp"

using namespace gpushare;

namespace {

int fail(const char* what, const base::Status& status) {
  std::fprintf(stderr, "range_worker: %s: %s\n", what, status.to_string().c_str());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  executor::RuntimeOptions options;
  options.device = "shared";
  auto runtime = executor::Runtime::open(std::move(options));
  if (!runtime.ok()) return fail("open", runtime.status());
  const auto trades = static_cast<int64_t>(std::strtoull(argv[3], nullptr, 10));
  auto trader = test::Trader::open(**runtime, argv[1], std::strtoull(argv[2], nullptr, 10),
                                   std::strtoull(argv[4], nullptr, 10), trades > 0);
  if (!trader.ok()) return fail("open_range", trader.status());
  const base::Status has = (*trader)->hoard(trades > 0 ? 1 : 8);
  if (!has.ok()) return fail("commit", has);
  std::puts("has bytes");
  std::fflush(stdout);
  if (trades == 0) std::this_thread::sleep_for(std::chrono::hours(1));
  std::atomic<int64_t> left{trades};
  std::array<std::thread, 2> threads;
  for (uint64_t i = 0; i < threads.size(); ++i) threads[i] = std::thread([&, i] { (*trader)->run(left, i); });
  for (std::thread& thread : threads) thread.join();
  if ((*trader)->failures > 0) return fail("bytes", {GPUSHARE_INTERNAL, "a commit or a stamp was wrong"});
  const executor::RangeInfo info = (*trader)->info();
  std::printf("asked %llu\n", static_cast<unsigned long long>(info.requests));
  std::fflush(stdout);
  if (info.silences > 0) return fail("asked", {GPUSHARE_INTERNAL, "it did not answer in time"});
  if (const base::Status closed = (*trader)->close(); !closed.ok()) return fail("close", closed);
  return 0;
}
