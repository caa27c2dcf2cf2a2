// policy.hpp: a policy orders the iterations of a lane and the sessions that wait for admission. It is a state
// machine: it is told what happened and asked what comes next. The executor and the simulator call the very
// same object.
//
// Threads: calls are serialised by the caller. No call blocks, allocates device memory, or reads a clock.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.hpp"
#include "gpushare/gpushare.h"
#include "sched/interference.hpp"
#include "sched/lane_finder.hpp"
#include "sched/types.hpp"

namespace gpushare::sched {

// The answers that outranks() can give. The rule tells the scheduler for which waiting sessions it must ask.
enum class PagingRule : uint32_t {
  kAny,      // any answer: asked for each session that waits
  kByOrder,  // a session outranks all sessions that a session behind it, by before(), outranks
  kNever     // always no
};

struct PolicyTraits {
  uint32_t max_lanes = 0;      // lanes open at once; 0 = no limit
  uint32_t max_residents = 0;  // sessions admitted at once; 0 = no limit
  bool head_of_line = false;   // a session that does not fit blocks those behind it
  // After this number of later sessions has been admitted past a waiting session, no further session may pass
  // it, so that large sessions do not starve behind a stream of small ones. 0 = no limit.
  uint32_t max_overtakes = 64;
  PagingRule paging = PagingRule::kAny;
  // An iteration starts only if no backlogged session of another lane is behind its session in virtual time.
  bool device_wide = false;
  // A lane without work takes a session that waits for its turn in another lane, if it is large enough for it;
  // lanes merge when that lets in a session that waits.
  bool moves = false;
  // An iteration starts only while no backlogged session of another lane outranks its session.
  bool protects = false;
  // The policy decides by how sessions slow each other: the scheduler measures that where nobody has told it.
  bool measures = false;
  std::optional<LaneFinderKind> lane_finder = std::nullopt;  // unless the scheduler's options name one
  // Sessions that alternate stay so many times as long as they must (stays.hpp); 0: they do not take turns.
  uint32_t stay_factor = 0;
  // Between two sessions of unknown remaining time, outranks() goes by the service that they have received.
  bool by_service = false;
};

class Policy {
 public:
  static constexpr size_t kIdle = static_cast<size_t>(-1);
  virtual ~Policy() = default;
  virtual std::string_view name() const = 0;
  virtual PolicyTraits traits() const { return {}; }

  // Index into `candidates` (never empty: the resident sessions of the lane with an iteration ready) of the
  // one to run next, or kIdle to leave the lane idle until something changes. The order of candidates means
  // nothing.
  virtual size_t pick(LaneId lane, std::span<const SessionView> candidates, uint64_t now_ns) = 0;

  // Device time that candidate `picked` can receive before pick would answer otherwise, when nothing but its
  // own progress happens. 0: ask again after every iteration. Lets an event loop skip over equal answers.
  virtual uint64_t pick_holds_ns(LaneId lane, std::span<const SessionView> candidates, size_t picked) const {
    (void)lane, (void)candidates, (void)picked;
    return 0;
  }

  // True if `a` is to be admitted before `b`. A strict weak order; the order of the line by default. Asked when a
  // session starts to wait or one of its parameters changes, not each time.
  virtual bool before(const SessionView& a, const SessionView& b) const { return ahead_in_line(a, b); }
  // True if waiting `a` may move resident `b`'s persistent bytes to host memory to get in.
  virtual bool outranks(const SessionView& waiting, const SessionView& resident) const {
    (void)waiting, (void)resident;
    return false;
  }
  // False keeps `waiting` at the door although memory would let it in. Not asked when the device is empty.
  virtual bool welcomes(const SessionView& waiting) const {
    (void)waiting;
    return true;
  }
  // Sessions of one kind, at the same time, get the same answer of welcomes(). kUnknown: of no kind.
  virtual uint64_t kind(const SessionView& session) const {
    (void)session;
    return kUnknown;
  }
  // After pick has answered kIdle: when to ask again although nothing has happened; kUnknown: not before something does.
  virtual uint64_t look_again_ns() const { return kUnknown; }
  // Tells the policy how sessions slow each other; null: nothing is known. Most policies ignore it.
  virtual void set_interference(const std::shared_ptr<const Interference>&) {}

  // These tell the policy what happened. `admitted`: the session is now resident in a lane, for the first time
  // or paged in again; `paged_out`: it is no longer resident.
  virtual void arrived(const SessionView&, uint64_t /*now_ns*/) {}
  virtual void admitted(const SessionView&, LaneId, uint64_t /*now_ns*/) {}
  virtual void paged_out(SessionId, LaneId, uint64_t /*now_ns*/) {}
  virtual void ready(SessionId, LaneId, uint64_t /*now_ns*/) {}
  virtual void not_ready(SessionId, LaneId, uint64_t /*now_ns*/) {}
  virtual void dispatched(const SessionView&, LaneId, uint64_t /*iterations*/, uint64_t /*now_ns*/) {}
  virtual void finished(const SessionView&, LaneId, uint64_t /*device_ns*/, uint64_t /*now_ns*/) {}
  virtual void left(SessionId, uint64_t /*now_ns*/) {}
};

// Sessions that alternate take turns in memory under each of them (stays.hpp).
// fifo      one session at a time, in arrival order; the one in front blocks the others (Salus's baseline).
// srtf      one lane; the session with the least remaining time runs, decided at every iteration boundary; a
// newcomer that could
//           run alone is let in by paging out residents with more left. Without a known remaining time: after
//           all that have one, least service first, in powers of two of a second.
// pack      fills lanes while that is safe and, told of interference, while one more lane raises the total
// speed; the oldest
//           session of a lane runs. No fairness among lanes.
// fair      admits while safe; equal weighted service over all lanes of the device (start-time fair queueing).
// priority  guaranteed before opportunistic, then larger priority; sessions of equal rank share by weight. May page
//           out what ranks strictly lower in class or priority.
// Errors: NOT_FOUND listing them.
base::Result<std::unique_ptr<Policy>> make_policy(std::string_view name);
std::span<const char* const> policy_names();

// A policy written by the embedder (gpushare.h). Copies the table (fields beyond its struct_size count as
// zero) and the name; calls ops.release once when destroyed, and not at all if this fails. An exception out
// of a callback, or an index out of range, counts as "idle" or "no" and is logged. Errors: INVALID_ARGUMENT
// (null, struct_size too small for `pick`, no pick).
base::Result<std::unique_ptr<Policy>> make_custom_policy(const gpushare_policy_ops* ops);

}  // namespace gpushare::sched
