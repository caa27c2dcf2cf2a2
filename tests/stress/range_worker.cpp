// A process with an elastic range on a shared device, for range_stress.cpp: range_worker NAME TRADES
// commits 40 MiB of 64, writes them, checks them and gives them back, so many times; 0: commits once and keeps them until it is killed.
// Prints a line when it has bytes for the first time. Exit 1 with the reason when anything goes wrong.
// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "executor/range.hpp"
#include "executor/runtime.hpp"

using namespace gpushare;

namespace {
int fail(const char* what, const base::Status& status) {
  std::fprintf(stderr, "range_worker: %s: %s\n", what, status.to_string().c_str());
  return 1;
}
}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  constexpr uint64_t kBytes = uint64_t{40} << 20;
  executor::RuntimeOptions options;
  options.device = "shared";
  auto runtime = executor::Runtime::open(std::move(options));
  if (!runtime.ok()) return fail("open", runtime.status());
  executor::SessionOptions wanted;
  wanted.name = argv[1];
  wanted.ephemeral_bytes = uint64_t{1} << 20;
  auto session = (*runtime)->open_session(wanted);
  if (!session.ok()) return fail("open_session", session.status());
  executor::RangeOptions ranges;
  ranges.name = argv[1];
  ranges.reserved_bytes = kBytes;
  auto range = (*session)->open_range(ranges);
  if (!range.ok()) return fail("open_range", range.status());
  auto* const bytes = reinterpret_cast<unsigned char*>((*range)->info().address);
  const uint64_t trades = std::strtoull(argv[2], nullptr, 10);
  for (uint64_t i = 0; i < trades || trades == 0; ++i) {
    if (auto status = (*range)->commit(0, kBytes, GPUSHARE_NO_TIMEOUT); !status.ok())
      return fail("commit", status);
    if (i == 0) {
      std::puts("has bytes");
      std::fflush(stdout);
    }
    if (trades == 0) std::this_thread::sleep_for(std::chrono::hours(1));
    std::memset(bytes, static_cast<int>(i), kBytes);
    for (uint64_t at = 0; at < kBytes; at += 4096)
      if (bytes[at] != static_cast<unsigned char>(i)) return 1;
    if (auto status = (*range)->decommit(0, kBytes); !status.ok()) return fail("decommit", status);
    // Across processes there is no queue: whoever looks when there is room has it.
    std::this_thread::sleep_for(std::chrono::milliseconds(12));
  }
  return 0;
}
