// host_work.hpp: what an iteration of `gpushare run --device host` does: real arithmetic of a known length on
// real memory, and a check that nobody else wrote there.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace gpushare::cli {

// A block of device memory that the CPU can address.
struct WorkBlock {
  std::byte* data = nullptr;
  uint64_t bytes = 0;
};

// Threads: const methods may run concurrently, on different blocks.
class HostWork {
 public:
  // Measures this machine for about 100 ms.
  HostWork();
  explicit HostWork(double round_ns, double page_ns) : round_ns_(round_ns), page_ns_(page_ns) {}

  // Time of one round of arithmetic on a page in cache, and of one page written and read again; alone on a
  // core.
  double round_ns() const { return round_ns_; }
  double page_ns() const { return page_ns_; }

  // Writes a mark into every page of `blocks`; each (owner, page) has its own mark.
  static void mark(std::span<const WorkBlock> blocks, uint64_t owner);
  // Pages first, first + stride, ... still hold their marks.
  static bool marked(std::span<const WorkBlock> blocks, uint64_t owner, uint64_t first = 0,
                     uint64_t stride = 1);

  // Marks every page, does arithmetic on their contents for the rest of `target_ns` at the measured
  // speed, and checks the marks. False: somebody else wrote into the blocks. Takes longer than target_ns when
  // the pages alone do.
  bool run(std::span<const WorkBlock> blocks, uint64_t owner, double target_ns) const;
  // The time that run takes for writing pages, without arithmetic.
  double least_ns(uint64_t bytes) const {
    const uint64_t pages = bytes / kPageBytes + 1;
    return static_cast<double>(pages) * page_ns_;
  }

  static constexpr uint64_t kPageBytes = 4096;

 private:
  double round_ns_ = 0;
  double page_ns_ = 0;
};

}  // namespace gpushare::cli
