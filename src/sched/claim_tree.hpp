// claim_tree.hpp: the bytes of a device as a tree of claims. Below the device are its lanes, caches and contexts, and its groups of
// sessions; below a group are its sessions. Only leaves are set. The sums of the nodes above follow, so no sum is kept beside the
// tree. Other folders do not include it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <utility>

namespace gpushare::sched {

class ClaimNode {
 public:
  ClaimNode() = default;
  explicit ClaimNode(ClaimNode& above) : above_(&above) {}
  // For leaves. A leaf that ends takes its bytes out of the sums.
  ClaimNode(ClaimNode&& other) noexcept
      : above_(other.above_),
        needed_(std::exchange(other.needed_, 0)),
        promised_(std::exchange(other.promised_, 0)) {}
  ClaimNode& operator=(ClaimNode&& other) noexcept {
    need(0);
    promise(0);
    above_ = other.above_;
    needed_ = std::exchange(other.needed_, 0);
    promised_ = std::exchange(other.promised_, 0);
    return *this;
  }
  ~ClaimNode() {
    need(0);
    promise(0);
  }

  uint64_t needed() const { return needed_; }      // whether they are promised or not
  uint64_t promised() const { return promised_; }  // of the device
  // Of a leaf.
  void need(uint64_t bytes) { set(&ClaimNode::needed_, bytes); }
  void promise(uint64_t bytes) { set(&ClaimNode::promised_, bytes); }

 private:
  void set(uint64_t ClaimNode::*which, uint64_t bytes) {
    const uint64_t more = bytes - this->*which;  // modulo 2^64
    if (more == 0) return;
    for (ClaimNode* node = this; node != nullptr; node = node->above_) node->*which += more;
  }

  ClaimNode* above_ = nullptr;
  uint64_t needed_ = 0, promised_ = 0;
};

struct ClaimTree {
  ClaimNode device;
  ClaimNode sessions{device};  // P of all sessions, groups' included
  ClaimNode lanes{device}, caches{device}, contexts{device};
};

}  // namespace gpushare::sched
