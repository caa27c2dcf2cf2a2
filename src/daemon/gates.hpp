// gates.hpp: opportunistic work beside guaranteed sessions, between processes. Processes tell when iterations of guaranteed sessions
// begin and end; sched::OpController decides what the others may do, and each gate reads that in its slot (base/gate_slot.hpp),
// where its process also says what it has let in.
//
// Nothing that a process says is trusted. Device time and work are believed for twice the time that has passed at most, and a second.
// An iteration that takes much longer than usual holds nobody up any more, so a process that stops in one does not either. Each call
// costs as much as there are gates on the device.
//
// No thread, no clock. Used by the service's thread alone.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "base/gate_slot.hpp"
#include "sched/op_controller.hpp"

namespace gpushare::daemon {

class Gates {
 public:
  // `longest_ns`: of an iteration whose usual time is not known; and so long the gates go by what they read although the
  // daemon does not move. 4 ms at least, since the terms are renewed four times in that time.
  explicit Gates(uint64_t longest_ns);

  // A session, by a number of the caller's, launches through a gate. `slot` stays until left().
  void open(uint64_t session, base::GateSlot& slot, double weight, uint64_t now_ns);
  void set_weight(uint64_t session, double weight) { controller_.set_weight(session, weight); }
  bool any() const { return !gates_.empty(); }
  bool has(uint64_t session) const { return gates_.contains(session); }
  // Whether launches must ask: a guaranteed session is known. Each process that has a gate is to be told when this changes; until it
  // says that its launches ask they count as being there.
  bool asks() const { return !guaranteed_.empty(); }
  // An iteration of a guaranteed session. `at_ns`: when, as its process says.
  void began(uint64_t session, double target, uint64_t at_ns, uint64_t now_ns);
  void ended(uint64_t session, uint64_t device_ns, uint64_t at_ns, uint64_t now_ns);
  // The session has lost its turn: its iterations in flight hold nobody up any more.
  void lapse(uint64_t session, uint64_t now_ns);
  // What it was in the other class is over. Of an opportunistic session whose launches go through a gate open() comes anew.
  void set_class(uint64_t session, bool guaranteed, uint64_t now_ns);
  void left(uint64_t session, uint64_t now_ns);
  // Iterations that take too long, and terms that must be renewed. Returns when to call again, in nanoseconds from now; UINT64_MAX:
  // not before the next event.
  uint64_t tick(uint64_t now_ns);
  // Launches of the session were held up since this was last asked.
  bool was_held_up(uint64_t session);
  std::string check() const { return controller_.check(); }

 private:
  // Time that a process claims, and that is believed as far as it can have passed.
  struct Claimed {
    uint64_t since_ns = 0, believed_ns = 0;
    uint64_t believe(uint64_t ns, uint64_t now_ns);
  };
  struct Gate {
    base::GateSlot* slot = nullptr;
    Claimed work;
    uint64_t seen_used_ns = 0, seen_entries = 0, seen_held_up = 0;
    bool busy = false;         // when it was looked at last: work of the session may be on the device
    bool shut = false;         // it may let in nothing
    uint64_t looked_ns = 0;    // when it was looked at last
    uint64_t moved_ns = 0;     // when its process last let in work, or said that all was done
    uint64_t intruded_ns = 0;  // time with work of its that it had no right to let in; decaying
  };
  struct Guaranteed {
    Claimed work;
    uint32_t in_flight = 0;
    uint32_t lapsed = 0;    // the oldest in flight, which count no more; those behind do when these are over
    uint64_t at_ns = 0;     // when the iteration that the device is at began, as its process says
    uint64_t begun_ns = 0;  // likewise, by the daemon's clock
  };
  uint64_t longest_ns_of(uint64_t session) const;
  void lapse(uint64_t session, Guaranteed& guaranteed, uint64_t now_ns);
  // Tells the controller what the gates let in, and whose work was on the device after `from_ns`.
  void look(uint64_t from_ns, uint64_t now_ns);
  void publish(uint64_t now_ns);

  const uint64_t longest_ns_;
  sched::OpController controller_;
  std::map<uint64_t, Gate> gates_;
  std::map<uint64_t, Guaranteed> guaranteed_;
  uint64_t published_ns_ = 0;
};

}  // namespace gpushare::daemon
