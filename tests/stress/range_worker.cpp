// A process with an elastic range on a shared device, for range_stress.cpp: range_worker NAME TRADES
// commits 40 MiB of 64 so many times, stamps them and checks the stamps before it gives them back: when another process asks for them, and
// of its own now and then. 0 trades: commits once, cannot be asked, and keeps them until it is killed.
// Prints a line when it has bytes for the first time, and how often it was asked at its end. Exit 1 with the reason when anything goes wrong.
// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "executor/range.hpp"
#include "executor/runtime.hpp"

using namespace gpushare;

namespace {

constexpr uint64_t kBytes = uint64_t{40} << 20, kStep = 64 << 10;

int fail(const char* what, const base::Status& status) {
  std::fprintf(stderr, "range_worker: %s: %s\n", what, status.to_string().c_str());
  return 1;
}

struct Worker {
  std::mutex mutex;
  std::shared_ptr<executor::Range> range;
  uint64_t stamp = 0;  // 0: it has nothing
  bool lost = false;

  uint64_t* at(uint64_t offset) const {
    return reinterpret_cast<uint64_t*>(range->info().address + offset);  // NOLINT(performance-no-int-to-ptr)
  }
  void write(uint64_t value) {
    stamp = value;
    uint64_t* const words = at(0);
    for (uint64_t offset = 0; offset < kBytes; offset += kStep) words[offset / 8] = stamp + offset;
  }
  // The bytes that it gave back.
  uint64_t drop() {
    if (stamp == 0) return 0;
    const uint64_t* const words = at(0);
    for (uint64_t offset = 0; offset < kBytes; offset += kStep)
      lost = lost || words[offset / 8] != stamp + offset;
    stamp = 0;
    lost = lost || !range->decommit(0, kBytes).ok();
    return kBytes;
  }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  executor::RuntimeOptions options;
  options.device = "shared";
  auto runtime = executor::Runtime::open(std::move(options));
  if (!runtime.ok()) return fail("open", runtime.status());
  executor::SessionOptions wanted;
  wanted.name = argv[1];
  wanted.ephemeral_bytes = uint64_t{1} << 20;
  auto session = (*runtime)->open_session(wanted);
  if (!session.ok()) return fail("open_session", session.status());
  const uint64_t trades = std::strtoull(argv[2], nullptr, 10);
  Worker worker;
  executor::RangeOptions ranges;
  ranges.name = argv[1];
  ranges.reserved_bytes = kBytes;
  ranges.answer_ns = 60'000'000'000;
  if (trades > 0)
    ranges.give_back = [&](uint64_t, uint64_t) {
      const std::lock_guard lock(worker.mutex);
      return worker.drop();
    };
  auto range = (*session)->open_range(ranges);
  if (!range.ok()) return fail("open_range", range.status());
  worker.range = *range;
  for (uint64_t i = 1, passes = 0; i <= trades || trades == 0;) {
    {
      const std::lock_guard lock(worker.mutex);
      if (worker.stamp == 0) {
        // The range does not have the bytes that it waits for, so nobody asks it for them.
        if (auto status = (*range)->commit(0, kBytes, GPUSHARE_NO_TIMEOUT); !status.ok())
          return fail("commit", status);
        if (i == 1) {
          std::puts("has bytes");
          std::fflush(stdout);
        }
        worker.write(i++ << 32);
      } else if (++passes % 8 == 0) {
        (void)worker.drop();
      }
      if (worker.lost) return fail("bytes", {GPUSHARE_INTERNAL, "a stamp is not what was written"});
    }
    if (trades == 0) std::this_thread::sleep_for(std::chrono::hours(1));
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  std::printf("asked %llu\n", static_cast<unsigned long long>((*range)->info().requests));
  std::fflush(stdout);
  if (auto status = (*range)->close(); !status.ok()) return fail("close", status);
  return 0;
}
