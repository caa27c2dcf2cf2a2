// point_queue.hpp: a set of points (alpha, beta), asked for the one with the greatest alpha * w + beta. A
// request's score between two milestones is such a point with w = e^{bt} (Orloj, 000, 4.4.4). Back ends
// behind one interface:
//   scan       every value, vectorised (AVX-512, AVX2 or portable, chosen at run time). Best for a few hundred
//              points.
//   kinetic    a tournament of 16-wide nodes. Each node knows its winner and until which w it stays so. An update
//              only marks its path; the next query repairs marked and outdated nodes. Best when w mostly grows;
//              a w that falls costs one repair of all.
//   hull       the upper hull as a balanced tree of bridges (after Overmars and van Leeuwen, without their
//              concatenable queues: hulls are implied by the bridges below). Any order of w at no cost,
//              O(log^2 n) worst case, mostly O(log n), see hull_core.hpp.
//   automatic  scan while small, kinetic above (benchmarks/results/serving-decisions.md has the figures).
// Answers agree up to the rounding of alpha * w + beta. Equal points and equal alphas are fine.
//
// Threads: none of its own; the owner serialises calls. Memory grows with the most points ever held, and is
// kept.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace gpushare::reference {

enum class PointBackend : uint32_t { kAutomatic = 0, kScan, kKinetic, kHull };

class PointQueue {
 public:
  using Handle = uint32_t;
  static constexpr Handle kNoHandle = static_cast<Handle>(-1);
  struct Best {
    Handle handle;
    uint64_t id;
    double value;
  };

  virtual ~PointQueue() = default;
  // kNoHandle if a coordinate is not finite. Handles are reused after erase.
  virtual Handle insert(double alpha, double beta, uint64_t id) = 0;
  // False if the handle holds no point.
  virtual bool erase(Handle handle) = 0;
  // The greatest alpha * w + beta; nullopt when empty or w is not a finite number >= 0.
  virtual std::optional<Best> best(double w) = 0;
  virtual size_t size() const = 0;
  virtual void clear() = 0;
  // Takes the best `count` out, best first, into `out` (appended). Returns how many.
  size_t pop(double w, size_t count, std::vector<uint64_t>& out);
};

std::unique_ptr<PointQueue> make_point_queue(PointBackend backend = PointBackend::kAutomatic);

}  // namespace gpushare::reference
