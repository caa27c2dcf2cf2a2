// kinetic_core.hpp: the kinetic tournament behind PointQueue. Points lie in blocks of 16; the winner of a
// block, and the least w until which it wins, are an entry of the block above, and so on to the root. Fifteen
// of sixteen puts and removes concern no winner: they write the point, and a put may bring forward the w at
// which its block is looked at again. The others mark the path to the root, up to the first marked node, so a
// delete and an insert into the freed place share one repair. best(w) repairs the entries that are marked or
// whose time has come.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "reference/point_kernels.hpp"

namespace gpushare::reference {

class KineticCore {
 public:
  explicit KineticCore(const PointKernels& kernels = point_kernels()) : kernels_(&kernels) {}
  void put(uint32_t slot, double alpha, double beta);
  void remove(uint32_t slot);
  // Slot of a greatest alpha * w + beta; at least one point must be held. `value` receives it.
  uint32_t best(double w, double* value);
  void clear();
  // Calls f(slot, alpha, beta) for each point held.
  template <class Function>
  void for_each(Function f) const {
    for (size_t i = 0; i < leaves_.size() * kNodeWidth; ++i) {
      const Leaf& leaf = leaves_[i / kNodeWidth];
      if (leaf.beta[i % kNodeWidth] != kAbsent)
        f(static_cast<uint32_t>(i), leaf.alpha[i % kNodeWidth], leaf.beta[i % kNodeWidth]);
    }
  }

 private:
  static constexpr double kAbsent = -std::numeric_limits<double>::infinity();
  static constexpr double kMarked = -std::numeric_limits<double>::infinity();
  struct alignas(64) Leaf {
    double alpha[kNodeWidth];
    double beta[kNodeWidth];
  };
  struct alignas(64) Inner {
    double alpha[kNodeWidth];
    double beta[kNodeWidth];
    double until[kNodeWidth];
    uint32_t slot[kNodeWidth];
  };
  struct Winner {
    double alpha = 0;
    double beta = kAbsent;
    double until = kMarked;
    uint32_t slot = 0;
  };
  static Leaf empty_leaf();
  static Inner empty_inner();
  void grow(uint32_t slot);
  void mark(size_t leaf);
  void shorten(size_t leaf, double until);
  Winner repair(size_t level, size_t index, double w);

  const PointKernels* kernels_;
  std::vector<Leaf> leaves_;
  std::vector<std::vector<Inner>> levels_;  // levels_[0] stands on the leaves; the last has one block
  Winner root_;
  double last_w_ = 0;
};

}  // namespace gpushare::reference
