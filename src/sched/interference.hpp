// interference.hpp: how much sessions slow each other when their lanes run at the same time. Optional
// knowledge: a policy that is not given any decides by memory alone.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "sched/types.hpp"

namespace gpushare::sched {

// Threads: const calls from the thread that drives the scheduler. Must outlive the policy (shared ownership).
class Interference {
 public:
  virtual ~Interference() = default;
  // Speed of `session` relative to running alone, in (0, 1], while every session of `beside` runs in a lane
  // of its own. `beside` does not contain `session`. Unknown sessions: 1.
  virtual double rate(SessionId session, std::span<const SessionId> beside) const = 0;
  // True: rates are learned from iterations as they end, and change with them.
  virtual bool learns() const { return false; }
  // True if the time of an iteration of the session alone is not known. Without that time nothing can be learned about
  // the session beside others.
  virtual bool wants_alone(SessionId session) const {
    (void)session;
    return false;
  }
};

}  // namespace gpushare::sched
