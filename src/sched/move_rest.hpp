// move_rest.hpp: when a session's blocks may come home from host memory, so that moves to and fro take no more than a
// part of its time.
//
// A cycle is the moves out that somebody needed, and the moves home after them. Moves out are never held up. When a
// session is sent out again, the cycle before is over, and its blocks come home once two things are so. `loss` of the
// time since the last move home amounts to what that cycle cost. And `loss` of the time since the first move amounts to
// what all cycles cost, with this one, which is taken to cost as much as the one before. So from the second cycle on
// moves take at most `loss` of the session's time at the end of each cycle, however often it is sent out. The first
// cycle waits for nothing: a burst comes home as soon as there is room.
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
      const auto rest_ns = [this](uint64_t cost_ns) {
        return base::to_uint64(static_cast<double>(cost_ns) / loss_);
      };
      total_ns_ += cost_ns_;
      paid_at_ns_ = std::max({paid_at_ns_, base::add_saturated(last_home_ns_, rest_ns(cost_ns_)),
                              base::add_saturated(first_ns_, rest_ns(total_ns_ + cost_ns_))});
      cost_ns_ = 0;
      came_home_ = false;
    }
    note_first(began_ns);
    cost_ns_ += ended_ns - std::min(began_ns, ended_ns);
  }
  void moved_home(uint64_t began_ns, uint64_t ended_ns) {
    note_first(began_ns);
    cost_ns_ += ended_ns - std::min(began_ns, ended_ns);
    came_home_ = true;
    last_home_ns_ = ended_ns;
  }
  bool may_come_home(uint64_t now_ns) const { return now_ns >= paid_at_ns_; }
  uint64_t paid_at_ns() const { return paid_at_ns_; }

 private:
  void note_first(uint64_t began_ns) {
    if (total_ns_ == 0 && cost_ns_ == 0) first_ns_ = began_ns;
  }

  double loss_;
  uint64_t cost_ns_ = 0;    // of the cycle at hand
  uint64_t total_ns_ = 0;   // of those before
  uint64_t first_ns_ = 0;   // when the first move began
  bool came_home_ = false;  // in it
  uint64_t last_home_ns_ = 0;
  uint64_t paid_at_ns_ = 0;  // when the cycles before are paid
};

}  // namespace gpushare::sched
