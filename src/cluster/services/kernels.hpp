// kernels.hpp: the part of a device that the kernels of a batch take, from their launch configurations and times: SM
// utilisation and occupancy, weighted by time, and the greatest occupancy (seed: thesis on interference-aware serving,
// 5.3). Told of each kernel while a service runs, or of the kernels that a document lists.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "cluster/services/model.hpp"

namespace gpushare::cluster::services {

// The multiprocessors (SMs) of the profiled device, and the most of everything that one of them holds at once.
struct Multiprocessors {
  uint32_t count = 1;
  uint32_t threads = 2048;
  uint32_t blocks = 32;
  uint64_t registers = 65'536;
  uint64_t shared_bytes = 65'536;
};

struct KernelLaunch {
  uint64_t blocks = 1;         // of the grid
  uint32_t threads = 1;        // of a block
  uint32_t registers = 0;      // of a thread
  uint64_t shared_bytes = 0;   // of a block, static and dynamic
  uint32_t blocks_per_sm = 0;  // by the driver's occupancy calculator; 0: not known
  double occupancy = -1;       // measured, as part of the device's; below 0: not measured
};

// The blocks of the kernel that one SM runs at once: the least of what its threads, shared memory, registers and blocks
// allow, unless the driver has said it. 0: it cannot run.
uint64_t blocks_per_sm(const Multiprocessors& sms, const KernelLaunch& kernel);

// Parts of the device while the kernel runs, in [0, 1].
struct KernelLoad {
  double sms = 0;        // the SMs that all its blocks at once would need
  double occupancy = 0;  // warps: as measured, else those of the blocks that run at once
};
// The kernel can run: blocks_per_sm is not 0.
KernelLoad load_of(const Multiprocessors& sms, const KernelLaunch& kernel);

// Sums over the kernels of any number of batches. Kernels that overlap count together, up to the whole device; the time
// between a batch's kernels counts as idle. Keeps the kernels of one batch only.
class KernelMeter {
 public:
  explicit KernelMeter(const Multiprocessors& sms) : sms_(sms) {}
  // A kernel of this batch, in any order. end_s >= begin_s.
  void add(const KernelLaunch& kernel, double begin_s, double end_s);
  void end_batch();
  // The percentages of the batches that have ended, in the order of kMetricFields; below 0 before the first.
  std::array<double, kMetrics> percent() const;

 private:
  struct Edge {
    double at_s;
    KernelLoad change;  // of what runs, from then on
  };
  const Multiprocessors sms_;
  std::vector<Edge> edges_;
  double time_s_ = 0;    // of all batches
  KernelLoad weighted_;  // times seconds
  double most_occupancy_ = 0;
};

}  // namespace gpushare::cluster::services
