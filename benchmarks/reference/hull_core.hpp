// hull_core.hpp: a fully dynamic upper hull behind PointQueue.
//
// A leaf-oriented balanced tree over alpha; a leaf holds up to 32 distinct alphas and its own hull, an inner
// node only the bridge, the edge of its hull that joins its two sides. The hull of a node is then implied:
// the left hull up to the bridge, the right hull from it. Overmars and van Leeuwen (000, reference 127) move
// pieces of hulls in concatenable queues; that is not needed, for the search that finds a bridge may as well
// run on the children's own bridges: the tangent of two whole hulls is the tangent of the pieces.
//
// Two facts make it fast. A bridge stays the same unless an inserted point lies above its line, or a removed
// point is one of its two ends; both are tested in O(1). Once the point lies strictly under a bridge, nothing
// above changes. An update mostly costs one descent, one leaf and few searches. Worst case O(log^2 n)
// amortised (subtrees that lean too far are rebuilt), query O(log n).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace gpushare::reference {

class HullCore {
 public:
  HullCore() = default;
  void put(uint32_t slot, double alpha, double beta);
  void remove(uint32_t slot);
  // Slot of a greatest alpha * w + beta; at least one point must be held.
  uint32_t best(double w, double* value) const;
  void clear();
  // Leaves from the root down at most (tests, statistics).
  size_t depth() const;

 private:
  static constexpr size_t kLeafPoints = 32;
  static constexpr uint32_t kNone = static_cast<uint32_t>(-1);
  struct Point {
    double alpha, beta;
  };
  struct Entry {
    Point point;
    uint32_t slot;
    bool shared;  // more points of this alpha wait in shared_
  };
  struct Leaf {
    uint8_t count = 0;
    uint8_t hull_count = 0;
    uint8_t hull[kLeafPoints];
    Entry entries[kLeafPoints];
  };
  struct Node {
    Point left_end, right_end;  // the bridge
    double split;               // left alphas <= split < right alphas
    uint32_t left, right;       // see Ref below
    uint32_t leaves;
  };
  // A child is a leaf or a node: the lowest bit tells.
  static bool is_leaf(uint32_t ref) { return (ref & 1u) != 0; }
  static uint32_t leaf_ref(uint32_t index) { return index << 1 | 1u; }
  static uint32_t node_ref(uint32_t index) { return index << 1; }
  Leaf& leaf(uint32_t ref) { return leaves_[ref >> 1]; }
  const Leaf& leaf(uint32_t ref) const { return leaves_[ref >> 1]; }
  Node& node(uint32_t ref) { return nodes_[ref >> 1]; }
  const Node& node(uint32_t ref) const { return nodes_[ref >> 1]; }
  uint32_t leaves_under(uint32_t ref) const { return is_leaf(ref) ? 1 : node(ref).leaves; }

  // Part of a hull: a whole node's, or a stretch of a leaf's.
  struct Cursor;
  void find_bridge(uint32_t ref);
  static void find_leaf_hull(Leaf& of);
  uint32_t new_leaf();
  uint32_t new_node();
  void insert_point(const Entry& entry);
  void remove_point(double alpha);
  Entry* find(double alpha);
  void descend(double alpha);
  void split_leaf(uint32_t ref);
  void rebalance();
  void flatten(uint32_t ref);
  uint32_t build(size_t first, size_t last);
  void replace_child(size_t path_index, uint32_t by);

  std::vector<Leaf> leaves_;
  std::vector<Node> nodes_;
  std::vector<uint32_t> free_leaves_, free_nodes_;
  uint32_t root_ = kNone;
  std::vector<Point> points_;  // by slot
  std::map<double, std::set<std::pair<double, uint32_t>>>
      shared_;                   // alphas of two and more points: (beta, slot)
  std::vector<uint32_t> path_;   // scratch: refs from the root to a leaf
  std::vector<uint32_t> order_;  // scratch: leaves in order
};

}  // namespace gpushare::reference
