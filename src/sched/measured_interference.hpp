// measured_interference.hpp: learns from iterations as they end how sessions slow each other.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.hpp"
#include "sched/interference.hpp"

namespace gpushare::sched {

// Sessions of one name are of one kind: the measurements of one hold for the others. For each kind the table keeps the
// device time of an iteration that had the device to itself, and for each pair of kinds the slowdown of one beside the
// other. Slowdowns add up (sim.md, cost model); an iteration beside several sessions corrects the slowdown of each pair
// by its part of the error.
//
// Confidence is a count of iterations that halves every half-life, so that old knowledge weighs less than new and is
// given up in the end. A pair that is not known any more counts as two that do not slow each other; so the two run
// together, and are measured anew.
//
// Threads: as Interference; the scheduler feeds it. Cost: an event is O(busy lanes^2).
class MeasuredInterference final : public Interference {
 public:
  static constexpr uint64_t kHalfLifeNs = 600'000'000'000;
  static constexpr double kMostConfidence = 16;  // so that a change shows within that many iterations
  static constexpr double kTrusted = 0.75;       // confidence from which a value is used
  // Two iterations alone give this confidence; then a session need not run alone any more.
  static constexpr double kAloneConfidence = 1.75;
  static constexpr size_t kMostKinds = 256;  // the kinds used longest ago are forgotten
  static constexpr size_t kMostFileBytes = size_t{16} << 20;

  // ---- what happened ----------------------------------------------------------------------------------------
  // A session without a name has a kind of its own, which is not written to a file.
  void arrived(SessionId session, std::string_view name);
  void left(SessionId session);
  // As Scheduler::dispatched() and finished(). Nothing is learned from a session's first iteration, which warms up.
  void dispatched(SessionId session, LaneId lane, uint64_t now_ns);
  void finished(SessionId session, LaneId lane, uint64_t device_ns, uint64_t iterations, uint64_t now_ns);

  // A launch gate held up launches of the session. Nothing is learned from its iteration that ends next, and from one
  // that may have been under way behind that.
  void held_up(SessionId session);

  // ---- Interference -----------------------------------------------------------------------------------------
  double rate(SessionId session, std::span<const SessionId> beside) const override;
  uint64_t kind(SessionId session) const;
  bool learns() const override { return true; }
  bool wants_alone(SessionId session) const override;

  // ---- the table --------------------------------------------------------------------------------------------
  struct Entry {
    std::string name;
    std::string beside;  // empty: alone
    double value = 0;  // with an empty `beside`: ns of an iteration alone; else its slowdown beside the other
    double confidence = 0;  // iterations, halved every half-life
    double age_s = 0;
  };
  std::vector<Entry> entries() const;  // by name; entries of sessions without a name are left out
  // Writes the table as text, and reads it from text. `unix_s`: the time now, from which ages are counted. Errors:
  // MALFORMED_INPUT naming file, line, field and what is allowed; the earlier table stays then.
  std::string text(uint64_t unix_s) const;
  base::Status read(std::string_view text, const std::string& file, uint64_t unix_s);

 private:
  // A mean that gives new samples at least 1 / kMostConfidence of the weight.
  struct Mean {
    double value = 0;
    double count = 0;
    double at_ns = 0;  // may be below the clock's 0 when read from a file
    double confidence(double now_ns) const;
    void add(double sample, double weight, double now_ns);
  };
  struct Kind {
    std::string name;
    Mean alone;
    bool learning = true;  // the confidence of `alone` fell too low, and has not come back
    uint32_t sessions = 0;
    uint64_t used = 0;  // a count of uses
  };
  struct Member {
    size_t kind = 0;
    bool warm = false;
    uint32_t held_up = 0;  // the iterations still to come from which nothing is learned
  };
  struct Lane {
    std::deque<SessionId> flights;  // the first of them runs
    uint64_t since_ns = 0;
    std::vector<std::pair<size_t, double>>
        beside;  // the kinds that ran in other lanes since then, and for how long
  };

  size_t kind_named(std::string_view name);
  void forget(size_t kind);
  void advance(uint64_t now_ns);
  void learn(Kind& kind, size_t index, const Lane& lane, double iteration_ns, double device_ns,
             double wall_ns);
  const Mean* pair(size_t kind, size_t beside) const;
  Mean& pair_of(size_t kind, size_t beside) { return pairs_[uint64_t{kind} << 32 | beside]; }

  std::vector<Kind> kinds_;
  std::unordered_map<uint64_t, Mean> pairs_;  // by the kind and the kind beside it: slowdown - 1
  std::unordered_map<SessionId, Member> members_;
  std::vector<Lane> lanes_;
  uint64_t now_ns_ = 0;
  uint64_t uses_ = 0;
};

}  // namespace gpushare::sched
