// move_rest.hpp: when a session's blocks may come home from host memory, so that moves to and fro take no more than a part of its time.
//
// A cycle is the moves out that somebody needed, and the moves home after them. Moves out are never held up. When a session is sent out again,
// the cycle before is over, and what it cost has to be paid: blocks come home once `loss` of the time since that cycle's last move amounts
// to its cost. So all cycles but the last two take at most `loss` of the session's time, however often it is sent out and whatever a move
// costs. The first cycle waits for nothing: a burst comes home as soon as there is room.
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
  // `loss`: of the time, that moves may take; above 0.
  explicit MoveRest(double loss) : loss_(loss) {}

  void moved_out(uint64_t began_ns, uint64_t ended_ns) {
    if (came_home_) {
      const double rest_ns = static_cast<double>(cost_ns_) / loss_;
      paid_at_ns_ = std::max(paid_at_ns_, base::add_saturated(last_home_ns_, base::to_uint64(rest_ns)));
      cost_ns_ = 0;
      came_home_ = false;
    }
    cost_ns_ += ended_ns - std::min(began_ns, ended_ns);
  }
  void moved_home(uint64_t began_ns, uint64_t ended_ns) {
    cost_ns_ += ended_ns - std::min(began_ns, ended_ns);
    came_home_ = true;
    last_home_ns_ = ended_ns;
  }
  bool may_come_home(uint64_t now_ns) const { return now_ns >= paid_at_ns_; }
  uint64_t paid_at_ns() const { return paid_at_ns_; }

 private:
  double loss_;
  uint64_t cost_ns_ = 0;    // of the cycle at hand
  bool came_home_ = false;  // in it
  uint64_t last_home_ns_ = 0;
  uint64_t paid_at_ns_ = 0;  // when the cycles before are paid
};

}  // namespace gpushare::sched
