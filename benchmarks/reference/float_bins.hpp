// float_bins.hpp: the speed reference of the device-memory benchmarks: an offset allocator with plain
// two-level bins.
//
// Written anew from the published idea (sizes binned by a small float with a 3-bit mantissa, one bitmap over
// 32 exponents and one byte of bitmap each; S. Aaltonen's OffsetAllocator is the well-known instance): a
// request is rounded up to a bin, the first block of the first non-empty bin from there on is taken, whatever
// its exact size, and cut at the front. Nothing is searched and nothing can be nearer to constant time, which
// is why speed is measured against it. No part of the library; only benchmarks and tests use it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

namespace gpushare::reference {

class FloatBins {
 public:
  static constexpr uint32_t kNone = ~0u;
  // In granules of the caller's choice, below 2^32. At most `max_nodes` blocks and holes.
  FloatBins(uint32_t capacity, uint32_t max_nodes) : nodes_(max_nodes), spare_(max_nodes) {
    for (uint32_t k = 0; k < max_nodes; ++k) spare_[k] = max_nodes - 1 - k;
    spare_count_ = max_nodes;
    for (uint32_t& head : heads_) head = kNone;
    insert(0, capacity);
  }

  // Returns a node, or kNone.
  uint32_t allocate(uint32_t size) {
    if (spare_count_ == 0) return kNone;
    const uint32_t least = bin_up(size);
    uint32_t exponent = least >> 3;
    uint32_t cells = exponent < 32 ? cells_[exponent] & (0xFFu << (least & 7)) & 0xFF : 0;
    if (cells == 0) {
      const uint32_t above = exponent >= 31 ? 0 : exponents_ & (~0u << (exponent + 1));
      if (above == 0) return kNone;
      exponent = static_cast<uint32_t>(std::countr_zero(above));
      cells = cells_[exponent];
    }
    const uint32_t bin = (exponent << 3) + static_cast<uint32_t>(std::countr_zero(cells));
    const uint32_t index = heads_[bin];
    Node& node = nodes_[index];
    const uint32_t rest = node.size - size;
    node.size = size;
    node.used = true;
    heads_[bin] = node.bin_next;
    if (node.bin_next != kNone)
      nodes_[node.bin_next].bin_prev = kNone;
    else
      clear(bin);
    if (rest != 0) {
      const uint32_t tail = insert(node.offset + size, rest);
      if (node.next != kNone) nodes_[node.next].prev = tail;
      nodes_[tail].prev = index;
      nodes_[tail].next = node.next;
      node.next = tail;
    }
    return index;
  }

  void free(uint32_t index) {
    Node& node = nodes_[index];
    uint32_t offset = node.offset, size = node.size;
    const uint32_t prev = node.prev, next = node.next;
    uint32_t left = prev, right = next;
    if (prev != kNone && !nodes_[prev].used) {
      offset = nodes_[prev].offset;
      size += nodes_[prev].size;
      left = nodes_[prev].prev;
      remove(prev);
    }
    if (next != kNone && !nodes_[next].used) {
      size += nodes_[next].size;
      right = nodes_[next].next;
      remove(next);
    }
    spare_[spare_count_++] = index;
    const uint32_t merged = insert(offset, size);
    nodes_[merged].prev = left;
    nodes_[merged].next = right;
    if (left != kNone) nodes_[left].next = merged;
    if (right != kNone) nodes_[right].prev = merged;
  }

  uint32_t offset(uint32_t index) const { return nodes_[index].offset; }

 private:
  struct Node {
    uint32_t offset = 0, size = 0;
    uint32_t bin_prev = kNone, bin_next = kNone;
    uint32_t prev = kNone, next = kNone;
    bool used = false;
  };
  static uint32_t bin_down(uint32_t size) {
    if (size < 8) return size;
    const uint32_t top = 31 - static_cast<uint32_t>(std::countl_zero(size));
    return ((top - 2) << 3) | ((size >> (top - 3)) & 7);
  }
  static uint32_t bin_up(uint32_t size) {
    if (size < 8) return size;
    const uint32_t top = 31 - static_cast<uint32_t>(std::countl_zero(size));
    const uint32_t low = size & ((1u << (top - 3)) - 1);
    return (((top - 2) << 3) | ((size >> (top - 3)) & 7)) + (low != 0 ? 1 : 0);
  }
  void clear(uint32_t bin) {
    cells_[bin >> 3] = static_cast<uint8_t>(cells_[bin >> 3] & ~(1u << (bin & 7)));
    if (cells_[bin >> 3] == 0) exponents_ &= ~(1u << (bin >> 3));
  }
  uint32_t insert(uint32_t offset, uint32_t size) {
    const uint32_t bin = bin_down(size);
    const uint32_t index = spare_[--spare_count_];
    const uint32_t head = heads_[bin];
    if (head == kNone) {
      cells_[bin >> 3] = static_cast<uint8_t>(cells_[bin >> 3] | (1u << (bin & 7)));
      exponents_ |= 1u << (bin >> 3);
    } else {
      nodes_[head].bin_prev = index;
    }
    nodes_[index] = {offset, size, kNone, head, kNone, kNone, false};
    heads_[bin] = index;
    return index;
  }
  void remove(uint32_t index) {
    const Node& node = nodes_[index];
    if (node.bin_prev != kNone) {
      nodes_[node.bin_prev].bin_next = node.bin_next;
      if (node.bin_next != kNone) nodes_[node.bin_next].bin_prev = node.bin_prev;
    } else {
      const uint32_t bin = bin_down(node.size);
      heads_[bin] = node.bin_next;
      if (node.bin_next != kNone)
        nodes_[node.bin_next].bin_prev = kNone;
      else
        clear(bin);
    }
    spare_[spare_count_++] = index;
  }

  uint32_t exponents_ = 0;
  uint8_t cells_[32] = {};
  uint32_t heads_[256];
  std::vector<Node> nodes_;
  std::vector<uint32_t> spare_;
  uint32_t spare_count_ = 0;
};

}  // namespace gpushare::reference
