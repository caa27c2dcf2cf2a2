// SPDX-License-Identifier: Apache-2.0
#include "cluster/services/kernels.hpp"

#include <algorithm>
#include <limits>

namespace gpushare::cluster::services {
namespace {

constexpr uint64_t kWarp = 32;  // threads

uint64_t warps(uint64_t threads) {
  return (threads + kWarp - 1) / kWarp;
}

}  // namespace

uint64_t blocks_per_sm(const Multiprocessors& sms, const KernelLaunch& kernel) {
  if (kernel.blocks_per_sm > 0) return kernel.blocks_per_sm;
  const auto bound = [](uint64_t all, uint64_t each) {
    return each == 0 ? std::numeric_limits<uint64_t>::max() : all / each;
  };
  return std::min({bound(sms.threads, kernel.threads), bound(sms.shared_bytes, kernel.shared_bytes),
                   bound(sms.registers, uint64_t{kernel.threads} * kernel.registers), uint64_t{sms.blocks}});
}

KernelLoad load_of(const Multiprocessors& sms, const KernelLaunch& kernel) {
  const uint64_t each = blocks_per_sm(sms, kernel);
  const uint64_t needed = kernel.blocks / each + (kernel.blocks % each != 0);
  KernelLoad load{std::min(1.0, double(needed) / sms.count), kernel.occupancy};
  if (load.occupancy < 0) {
    const uint64_t at_once = std::min(kernel.blocks, each * sms.count);
    load.occupancy = std::min(
        1.0, double(at_once * warps(kernel.threads)) / (double(sms.count) * double(warps(sms.threads))));
  }
  return load;
}

void KernelMeter::add(const KernelLaunch& kernel, double begin_s, double end_s) {
  const KernelLoad load = load_of(sms_, kernel);
  edges_.push_back({begin_s, load});
  edges_.push_back({end_s, {-load.sms, -load.occupancy}});
}

void KernelMeter::end_batch() {
  if (edges_.empty()) return;
  // What ends at a moment ends before what begins there.
  std::sort(edges_.begin(), edges_.end(), [](const Edge& a, const Edge& b) {
    return a.at_s != b.at_s ? a.at_s < b.at_s : a.change.sms < b.change.sms;
  });
  KernelLoad running;
  double from_s = edges_.front().at_s;
  for (const Edge& edge : edges_) {
    const double length_s = edge.at_s - from_s;
    if (length_s > 0) {
      time_s_ += length_s;
      weighted_.sms += length_s * std::clamp(running.sms, 0.0, 1.0);
      weighted_.occupancy += length_s * std::clamp(running.occupancy, 0.0, 1.0);
      most_occupancy_ = std::max(most_occupancy_, std::min(1.0, running.occupancy));
    }
    running.sms += edge.change.sms;
    running.occupancy += edge.change.occupancy;
    from_s = edge.at_s;
  }
  edges_.clear();
}

std::array<double, kMetrics> KernelMeter::percent() const {
  if (time_s_ == 0) return {-1, -1, -1};
  return {100 * most_occupancy_, 100 * weighted_.occupancy / time_s_, 100 * weighted_.sms / time_s_};
}

}  // namespace gpushare::cluster::services
