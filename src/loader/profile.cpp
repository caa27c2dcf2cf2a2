// SPDX-License-Identifier: Apache-2.0
#include "loader/profile.hpp"

#include <algorithm>
#include <cmath>

#include "base/saturate.hpp"

namespace gpushare::loader {

uint64_t LinkCosts::send_ns(uint64_t bytes) const {
  return bytes_per_ms > 0 ? base::to_uint64(static_cast<double>(bytes) / bytes_per_ms * 1e6) : 0;
}

double LinkCosts::device_copy_ms(uint64_t bytes) const {
  if (bytes == 0) return 0;
  return call_overhead_ms + (device_bytes_per_ms > 0 ? static_cast<double>(bytes) / device_bytes_per_ms : 0);
}

GroupingCosts LinkCosts::grouping(uint32_t resident_layers, uint64_t copied_bytes) const {
  GroupingCosts costs;
  costs.call_overhead_ms = call_overhead_ms;
  costs.group_overhead_ms = group_overhead_ms;
  costs.resident_layers = resident_layers;
  costs.link_busy_ms = costs.lane_busy_ms = device_copy_ms(copied_bytes);
  return costs;
}

void Profile::observe(uint32_t first, uint32_t end, double ms) {
  if (first >= end || end > bytes_.size() || !std::isfinite(ms) || ms < 0) return;
  base::MutexLock lock(mutex_);
  if (estimates_.empty()) estimates_.assign(bytes_.size(), -1.0);
  double known = 0, bytes = 0;
  bool all_known = true;
  for (uint32_t i = first; i < end; ++i) {
    all_known = all_known && estimates_[i] >= 0;
    known += std::max(0.0, estimates_[i]);
    bytes += static_cast<double>(bytes_[i]);
  }
  const bool by_estimate = all_known && known > 0;
  for (uint32_t i = first; i < end; ++i) {
    double share = 1.0 / (end - first);
    if (by_estimate)
      share = estimates_[i] / known;
    else if (bytes > 0)
      share = static_cast<double>(bytes_[i]) / bytes;
    const double now = ms * share;
    estimates_[i] = estimates_[i] < 0 ? now : estimates_[i] + kWeight * (now - estimates_[i]);
  }
  ++observations_;
}

uint64_t Profile::observations() const {
  base::MutexLock lock(mutex_);
  return observations_;
}

std::vector<double> Profile::execute_locked() const {
  std::vector<double> out = estimates_;
  double ms = 0, bytes = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    if (out[i] < 0) continue;
    ms += out[i];
    bytes += static_cast<double>(bytes_[i]);
  }
  for (size_t i = 0; i < out.size(); ++i)
    if (out[i] < 0) out[i] = bytes > 0 ? ms * static_cast<double>(bytes_[i]) / bytes : 0.0;
  return out;
}

std::vector<double> Profile::execution_ms() const {
  base::MutexLock lock(mutex_);
  return execute_locked();
}

std::vector<LayerCost> Profile::costs_locked(const LinkCosts& link) const {
  const std::vector<double> execute = execute_locked();
  std::vector<LayerCost> layers;
  layers.reserve(bytes_.size());
  for (size_t i = 0; i < bytes_.size(); ++i) {
    const double transmit = link.bytes_per_ms > 0 ? static_cast<double>(bytes_[i]) / link.bytes_per_ms : 0.0;
    layers.push_back({bytes_[i], transmit, execute.empty() ? transmit : execute[i]});
  }
  return layers;
}

std::vector<LayerCost> Profile::costs(const LinkCosts& link) const {
  base::MutexLock lock(mutex_);
  return costs_locked(link);
}

base::Result<std::vector<uint32_t>> Profile::plan(const LinkCosts& link, uint32_t resident_layers,
                                                  uint64_t copied_bytes) {
  base::MutexLock lock(mutex_);
  const std::vector<LayerCost> layers = costs_locked(link);
  const GroupingCosts costs = link.grouping(resident_layers, copied_bytes);
  GPUSHARE_ASSIGN_OR_RETURN(Grouping best, plan_groups(layers, costs));
  if (const auto known = ends_.find(resident_layers); known != ends_.end()) {
    const auto kept = grouping_makespan_ms(layers, costs, known->second);
    if (kept.ok() && best.makespan_ms >= *kept * (1 - kWorth)) return known->second;
    ++replans_;
  }
  ends_[resident_layers] = best.ends;
  return std::move(best.ends);
}

uint64_t Profile::replans() const {
  base::MutexLock lock(mutex_);
  return replans_;
}

}  // namespace gpushare::loader
