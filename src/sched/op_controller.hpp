// op_controller.hpp: how much of a device opportunistic sessions may use while guaranteed sessions run. Each guaranteed
// session stays within a target slowdown; opportunistic sessions get all that this leaves.
//
// Nothing is known of the sessions in advance. The controller compares iterations of a guaranteed session that ran
// alone with iterations during which opportunistic sessions had a share of the device, and alternates the two for as
// long as the session lives. So a drift of the session's own time shows in both kinds and is not taken for
// interference.
//
// For each choice (which opportunistic sessions, what share) it learns two means: the cost, which is the excess of the guaranteed
// iteration time over the time alone, and the work that the opportunistic sessions did. The best mixture of choices
// whose mean cost is the target is a knapsack with a divisible last item: it uses at most two choices, neighbours on
// the upper hull of the points (cost, work). This finds the best use of any interference curve: where harm begins only
// above some share (the guaranteed session has gaps), the controller stays at that share; where any use harms as much
// as full use, it gives full use in few iterations.
//
// A credit keeps the session within its target whatever the estimates say. Each iteration adds the target to the
// credit. Each shared iteration takes its measured excess and the standard error of the time alone from it. A choice is
// made only when the credit pays for it. Shares that were never tried are reached by doubling, so that a trial costs
// little.
//
// The time alone is learned only from iterations during which no work of other sessions was on the device. The driver
// says when work of an opportunistic session may be on the device (on_device) and what was let in (progressed). Work
// left over from an earlier choice is charged, and counts as that choice's cost. One launch may be as long as many
// iterations, so each launch is let in only when the credit pays for it (admits_at), also in the pause before the next
// iteration of a session that is expected back.
//
// No thread, no clock, no device: the executor, the daemon and the simulator drive the same object.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "base/gate_slot.hpp"
#include "sched/types.hpp"

namespace gpushare::sched {

struct OpControllerOptions {
  double target_slowdown = 0.01;  // of guaranteed sessions without a target of their own; > 0
  uint32_t learn_iterations =
      5;                // the first iterations of a guaranteed session, and those after a change, run alone
  double change = 0.2;  // of the iteration time alone: a new phase, learned anew
  uint32_t check_every = 16;  // at least one iteration of so many runs alone
  double confidence = 1.5;    // standard errors of the time alone that are added to each charge
  double floor =
      0.1;  // the part of its share by weight that an opportunistic session gets even if others gain more
};

// Threads: none; one caller at a time.
class OpController {
 public:
  explicit OpController(OpControllerOptions options = {}) : options_(options) {}

  void set_options(const OpControllerOptions& options) { options_ = options; }
  const OpControllerOptions& options() const { return options_; }
  // `id` is new. `weight` and `wants` matter for opportunistic sessions only. `target_slowdown`: 0 = the default.
  void arrive(SessionId id, SessionClass cls, double weight = 1, double target_slowdown = 0,
              bool wants = true);
  // Unknown ids are ignored here and below: a session may have left before its last iteration is reported.
  void leave(SessionId id);
  void set_weight(SessionId id, double weight);
  void set_target(SessionId id, double target_slowdown);
  // Whether an opportunistic session has work now.
  void set_wants(SessionId id, bool wants);
  // Whether work of an opportunistic session may be on the device. Drivers whose work never outlasts an iteration need not say so.
  void on_device(SessionId id, bool may_be);

  // Reports that an iteration of a guaranteed session begins on the device.
  void began(SessionId id, uint64_t now_ns);
  // Reports the end of an iteration. Iterations of a session end in the order in which they began. device_ns 0: not
  // measured, or failed; nothing is learned from it.
  void finished(SessionId id, uint64_t device_ns, uint64_t now_ns);
  // Reports work of an opportunistic session, which takes `work_ns` alone.
  void progressed(SessionId id, uint64_t work_ns);

  struct Allowance {
    double share = 1;  // the part of the time that its work may take; in [0, 1]
    uint64_t in_flight_ns =
        kUnknown;  // the most of its work that may be on the device at once; kUnknown: no limit
    bool open() const { return share >= 1 && in_flight_ns == kUnknown; }
  };
  // The allowance of an opportunistic session. Guaranteed and unknown sessions are never limited. `now_ns`: more work may be in flight
  // the longer the guaranteed sessions have been away; 0: as if they had just ended an iteration. `work_ns`: of the launch that asks.
  Allowance allowance(SessionId id, uint64_t now_ns = 0, uint64_t work_ns = 0) const;
  // The time at which a launch that takes `work_ns` may come, if `in_flight_ns` of the session's own work is on the
  // device. A time up to `now_ns`: now. A later time: ask again at that time. kUnknown: ask again after the next change
  // of version(). The driver obeys allowance() as well.
  uint64_t admits_at(SessionId id, uint64_t work_ns, uint64_t in_flight_ns, uint64_t now_ns);
  // The same for gates that read it in other processes: what each opportunistic session may do until the controller is told something
  // more. What the credit pays for is divided among the sessions that want it, since none of them sees what the others let in. Never
  // more than allowance() and admits_at() say. `until_ns` and `used_ns` are the caller's. Takes as long as there are sessions.
  void each_terms(const std::function<void(SessionId, const base::GateTerms&)>& visit) const;
  // Changes whenever an allowance may have changed.
  uint64_t version() const { return version_; }

  struct Estimate {
    uint64_t alone_ns = 0;  // of an iteration
    double slowdown = 0;    // mean excess over the time alone since it was learned, all iterations
    double error = 1;       // one standard error of `slowdown`; 1 until something is known
    double credit = 0;      // in iterations alone: how much the session may still be slowed at once
    double target = 0;
    uint64_t iterations = 0;  // measured since it was learned
    bool learning = true;     // opportunistic sessions are paused so that it can be measured
  };
  Estimate estimate(SessionId id) const;

  // Empty when the invariants hold. For tests.
  std::string check() const;

  // Shares tried: 1/64, 1/32, then sixteenths.
  static constexpr size_t kShares = 18;
  static double share_at(size_t index);

 private:
  // An exponentially weighted mean: of all samples until there are 1 / gain.
  struct Mean {
    double count = 0, value = 0, square = 0;
    void add(double sample, double least_gain);
    void also(double more, double least_gain);  // adds `more` to a sample that was added before
    double deviation() const;
  };
  struct Choice {
    Mean cost;  // excess over the time alone, in times alone
    Mean work;  // weighted work done for each ns that passed
  };
  using Curve = std::array<Choice, kShares>;

  static constexpr size_t kAlone = static_cast<size_t>(-1);
  struct Pick {
    SessionId who = kNoSession;  // kNoSession: all opportunistic sessions
    size_t share = kAlone;       // index; kAlone: nobody
    bool operator==(const Pick&) const = default;
  };

  struct Guaranteed {
    double target = 0;  // 0: the default
    Mean alone;         // ns
    uint32_t learn_left = 0;
    uint32_t pause_left = 0;  // iterations that run alone after one that looked like a change
    uint32_t since_alone = 0;
    uint32_t in_flight = 0;
    uint64_t since_ns = 0;             // when the present iteration began, or the one before it ended
    double share_ns = 0;               // share_ns_ then
    bool shared = false;               // others were allowed to run since `since_ns`
    bool beside = false;               // work of others may have been on the device since `since_ns`
    uint64_t seen_on_device = 0;       // on_device_ then
    bool mixed = false;                // others were allowed to run, and not under one choice
    bool single = false;               // under choices of single sessions
    Pick during;                       // the choice that was in force since `since_ns`
    Pick last;                         // the last choice that was measured
    bool alone_due = false;            // the iteration at hand, or the next, is to be alone
    double harm_ns = 0, work_ns = 0;   // excess, and the work of others that it came with; decaying
    double asked = 0;                  // credit that a refused launch waits for; 0: none
    uint64_t last_ns = 0;              // of the last iteration
    std::array<uint64_t, 8> pauses{};  // the last ones between iterations that the host waited for, as a ring
    size_t pauses_seen = 0;
    double credit = 0;   // by the means of the choices made
    double balance = 0;  // by what was measured
    double cap = 0.64;
    double excess = 0, excess_square = 0;  // sums over iterations since learned
    uint64_t iterations = 0;
    Pick wanted;
    std::map<SessionId, Curve> curves;
    uint32_t odd = 0;  // iterations alone, in a row, whose time was off by `change`
    double odd_sum = 0;
  };
  struct Opportunistic {
    double weight = 1;
    bool wants = true;
    bool on_device = false;
    double work = 0;   // since the guaranteed iteration at hand began
    double total = 0;  // weighted, decaying: for the floor
  };
  struct Point {
    double cost = 0, work = 0, need = 0;
    Pick pick;
  };

  double target_of(const Guaranteed& g) const { return g.target > 0 ? g.target : options_.target_slowdown; }
  double aim_of(const Guaranteed& g) const;
  double error_of(const Guaranteed& g) const;
  void learn(Guaranteed& g) const;
  void points_of(const Guaranteed& g, SessionId who, double weight, std::vector<Point>& out) const;
  std::vector<Point> points_of_all(const Guaranteed& g) const;
  static std::vector<const Point*> hull_of(std::vector<Point>& points);
  Pick decide(Guaranteed& g);
  void measure(Guaranteed& g, double device_ns, uint64_t now_ns);
  bool measure_alone(Guaranteed& g, double device_ns);
  void measure_beside(Guaranteed& g, double cost, double elapsed_ns, double work_ns);
  uint64_t admits_at(Guaranteed& g, double work_ns, uint64_t in_flight_ns, uint64_t now_ns) const;
  static bool measures(const Guaranteed& g);
  static double harm_of(const Guaranteed& g);
  base::GateTerms terms_of(const Guaranteed& g) const;
  base::GateTerms terms_of_all() const;
  bool was_beside(const Guaranteed& g) const { return g.beside || g.seen_on_device != on_device_; }
  double share_of(SessionId id) const;
  double let_in_ns() const;
  bool anyone_on_device() const;
  bool anyone_wants() const;
  SessionId left_behind() const;
  double known_cost(const Guaranteed& g) const;
  void apply();
  void start(Guaranteed& g);
  void opportunistic_changed();
  double share_until(uint64_t now_ns);

  OpControllerOptions options_;
  std::map<SessionId, Guaranteed> guaranteed_;
  std::map<SessionId, Opportunistic> opportunistic_;
  Pick force_{kNoSession, kShares - 1};  // while a guaranteed session runs
  bool busy_ = false;                    // a guaranteed session has an iteration on the device
  double share_ns_ = 0;                  // the share in force, summed over time
  uint64_t now_ns_ = 0;
  uint64_t on_device_ = 0;  // how often work of an opportunistic session was said to be on the device
  uint64_t version_ = 1;
};

}  // namespace gpushare::sched
