// move_rest.hpp: when a session's blocks may come home from host memory, so that moves to and fro take no more than a
// part of its time.
//
// A cycle is the moves out that other sessions needed, and the moves home after them. Moves out are never held up. When
// a session is sent out again, the previous cycle is over. The session's blocks then come home once two conditions
// hold. First, `loss` of the time since the last move home is at least the cost of that cycle. Second, `loss` of the
// time since the first move is at least the cost of all moves so far and of the next moves home and out, which are
// taken to cost as much as the last ones. So from the second move home on, moves take at most `loss` of the session's
// time at every moment, however often it is sent out. The first cycle does not wait: after one burst the blocks come
// home as soon as there is room.
//
// No thread, no clock: times come in as arguments. Used by one thread at a time.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/saturate.hpp"

namespace gpushare::sched {

class MoveRest {
 public:
  // `loss`: the part of the time that moves may take; above 0.
  explicit MoveRest(double loss) : loss_(loss) {}

  void moved_out(uint64_t began_ns, uint64_t ended_ns) {
    if (home_ns_ > 0) {
      before_ = {out_ns_, home_ns_};
      out_ns_ = home_ns_ = 0;
    }
    const uint64_t cost_ns = add(began_ns, ended_ns);
    out_ns_ += cost_ns;
    if (before_.home_ns == 0) return;
    const auto rest_ns = [this](uint64_t moves_ns) {
      return base::to_uint64(static_cast<double>(moves_ns) / loss_);
    };
    const uint64_t next_ns = before_.home_ns + std::max(out_ns_, before_.out_ns);
    paid_at_ns_ =
        std::max({paid_at_ns_, base::add_saturated(last_home_ns_, rest_ns(before_.out_ns + before_.home_ns)),
                  base::add_saturated(first_ns_, rest_ns(total_ns_ + next_ns))});
  }
  void moved_home(uint64_t began_ns, uint64_t ended_ns) {
    home_ns_ += add(began_ns, ended_ns);
    last_home_ns_ = ended_ns;
  }
  bool may_come_home(uint64_t now_ns) const { return now_ns >= paid_at_ns_; }
  uint64_t paid_at_ns() const { return paid_at_ns_; }

 private:
  struct Cycle {
    uint64_t out_ns, home_ns;
  };
  // At least 1 ns, so that a cycle with moves home is known as one.
  uint64_t add(uint64_t began_ns, uint64_t ended_ns) {
    if (total_ns_ == 0) first_ns_ = began_ns;
    const uint64_t cost_ns = std::max<uint64_t>(1, ended_ns - std::min(began_ns, ended_ns));
    total_ns_ += cost_ns;
    return cost_ns;
  }

  double loss_;
  uint64_t total_ns_ = 0;              // of all moves
  uint64_t first_ns_ = 0;              // when the first one began
  uint64_t out_ns_ = 0, home_ns_ = 0;  // of the cycle at hand
  Cycle before_{0, 0};
  uint64_t last_home_ns_ = 0;
  uint64_t paid_at_ns_ = 0;  // when the blocks may come home
};

}  // namespace gpushare::sched
