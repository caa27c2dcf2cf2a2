// scan_core.hpp: points in two dense arrays, all looked at for every query.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "reference/point_kernels.hpp"

namespace gpushare::reference {

class ScanCore {
 public:
  explicit ScanCore(const PointKernels& kernels = point_kernels()) : kernels_(&kernels) {}
  void put(uint32_t slot, double alpha, double beta) {
    if (slot >= place_.size()) place_.resize(slot + 1);
    place_[slot] = static_cast<uint32_t>(slots_.size());
    slots_.push_back(slot);
    alpha_.push_back(alpha);
    beta_.push_back(beta);
  }
  void remove(uint32_t slot) {
    const uint32_t hole = place_[slot];
    slots_[hole] = slots_.back();
    alpha_[hole] = alpha_.back();
    beta_[hole] = beta_.back();
    place_[slots_[hole]] = hole;
    slots_.pop_back();
    alpha_.pop_back();
    beta_.pop_back();
  }
  uint32_t best(double w, double* value) {
    const size_t at = kernels_->best_of(alpha_.data(), beta_.data(), alpha_.size(), w);
    *value = alpha_[at] * w + beta_[at];
    return slots_[at];
  }
  void clear() {
    slots_.clear();
    alpha_.clear();
    beta_.clear();
  }
  size_t size() const { return slots_.size(); }
  uint32_t slot(size_t i) const { return slots_[i]; }
  double alpha(size_t i) const { return alpha_[i]; }
  double beta(size_t i) const { return beta_[i]; }

 private:
  const PointKernels* kernels_;
  std::vector<uint32_t> place_;  // by slot
  std::vector<uint32_t> slots_;
  std::vector<double> alpha_, beta_;
};

}  // namespace gpushare::reference
