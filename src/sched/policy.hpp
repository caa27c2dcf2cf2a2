// policy.hpp: a policy answers five questions about sessions. The scheduler does the rest with the answers: it keeps
// virtual time, waits for sessions that are about to come back, merges lanes, and chooses who gives bytes up. The
// executor, the daemon and the simulator ask the same objects.
//
// Threads: calls are serialised by the caller. No call blocks, allocates device memory, or reads a clock.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "base/status.hpp"
#include "gpushare/gpushare.h"
#include "sched/interference.hpp"
#include "sched/lane_finder.hpp"
#include "sched/types.hpp"

namespace gpushare::sched {

// A session that is on the device.
struct ResidentView {
  const SessionView* session = nullptr;
  LaneId lane = kNoLane;
  bool ready = false;       // it has an iteration to run
  uint64_t since_ns = 0;    // when it became resident, ready, in flight or idle
  double in_flight_ns = 0;  // device time expected of what it has in flight
};

// The device, for policies that look at more than the sessions in a question.
class DeviceView {
 public:
  virtual ~DeviceView() = default;
  virtual std::span<const ResidentView> residents() const = 0;  // valid until the next call; in no order
  virtual uint64_t changes()
      const = 0;  // a number that grows whenever an answer of residents() or interference() may differ
  virtual const Interference* interference() const = 0;  // null: nothing is known
};

// The device that a waiting session would join.
struct Joining {
  size_t residents = 0;  // sessions on the device
  bool passes = false;   // other sessions wait ahead of this one
  const DeviceView* device = nullptr;
};

enum class GivesWay : uint32_t {
  kNever = 0,
  kAtOnce = 1,        // at its next boundary
  kAfterStay = 2,     // if it alternates, when its stay is over (stays.hpp)
  kAfterLongStay = 3  // if it alternates, after kLongStays of them
};

enum class MayJoin : uint32_t {
  kNo = 0,   // not now, but sessions behind it may. Counts as kYes while no session is on the device
  kYes = 1,  // as soon as there is room
  kNobody =
      2  // not now, nor may sessions behind it. Counts as kYes for the first in line while no session is on the device
};

// The questions that a policy answers. A question that it leaves out is not asked. Then, in turn: no session goes
// before another, every session may run, every session may join, and none gives way.
struct Answers {
  bool before = false, may_run = false, gives_way = false, may_join = false;
  bool ranks = false;  // before() goes by rank() alone. Turns cost less, because rank() is asked less often
  // Its answers use DeviceView::interference(), so interference is to be measured.
  bool by_interference = false;
  std::optional<LaneFinderKind> lane_finder = std::nullopt;  // unless the scheduler's options name one
};

class Policy {
 public:
  virtual ~Policy() = default;
  virtual std::string_view name() const = 0;
  virtual Answers answers() const = 0;  // asked once, when the policy is set

  // Who goes first? True if `a` ranks above `b`: a strict weak order. While a session has work, no session of lower rank
  // begins an iteration. Sessions of equal rank run as share() says, and wait in line.
  virtual bool before(const SessionView& /*a*/, const SessionView& /*b*/) const { return false; }
  // The rank as a number, for policies with Answers::ranks: a session of a lower number ranks above. Asked at the same
  // times as share().
  virtual uint64_t rank(const SessionView& /*session*/) const { return 0; }

  // May this session run now? Returns the time from which it may run: at most `now_ns` is yes, kUnknown is "not before
  // something happens".
  virtual uint64_t may_run(const SessionView& /*session*/, const DeviceView& /*device*/,
                           uint64_t now_ns) const {
    return now_ns;
  }

  // Which sessions does a session page out? Returns whether `victim` gives up its place on the device for `other`. A
  // session that gives way to `other` also gives way to those before `other`.
  virtual GivesWay gives_way(const SessionView& /*victim*/, const SessionView& /*other*/) const {
    return GivesWay::kNever;
  }

  // How is the device shared? Asked when a session arrives, when it has run, and when one of its parameters changes.
  virtual Share share(const SessionView& session) const { return {Share::Kind::kWeighted, session.weight}; }

  // May another session join? Asked about a session that waits and would have room.
  virtual MayJoin may_join(const SessionView& /*waiting*/, const Joining& /*what*/) const {
    return MayJoin::kYes;
  }

  // The device time that a session can receive before the answers about it may change, if nothing else happens. 0: the
  // questions are asked after each iteration. This answer saves questions and decides nothing.
  virtual uint64_t holds_ns(const SessionView& /*session*/, const DeviceView& /*device*/) const { return 0; }
};

// By rank, else by the place in line.
inline bool goes_before(const Policy& policy, const SessionView& a, const SessionView& b) {
  if (policy.before(a, b)) return true;
  return !policy.before(b, a) && ahead_in_line(a, b);
}

// The built-in policies, one file each.
// fifo      one session at a time, in arrival order; the one in front keeps the others out.
// srtf      one lane; the session with the least time left runs, and newcomers with less left have others paged out.
// pack      fills lanes while that is safe and, told of interference, while one more lane raises the total speed.
// fair      admits while that is safe; the device's time is shared by weight over all lanes.
// priority  guaranteed before opportunistic, then larger priority; equal ranks share by weight, lower ranks give way.
std::unique_ptr<Policy> make_fifo();
std::unique_ptr<Policy> make_srtf();
std::unique_ptr<Policy> make_pack();
std::unique_ptr<Policy> make_fair();
std::unique_ptr<Policy> make_priority();
// By name. Errors: NOT_FOUND listing the names.
base::Result<std::unique_ptr<Policy>> make_policy(std::string_view name);
std::span<const char* const> policy_names();

// A policy written by the embedder (gpushare.h). Copies the table (fields beyond its struct_size count as
// zero) and the name; calls ops.release once when destroyed, and not at all if this fails. An exception out
// of a function counts as "no", and is logged once. Errors: INVALID_ARGUMENT (null, struct_size too small for
// the questions, none of them answered).
base::Result<std::unique_ptr<Policy>> make_custom_policy(const gpushare_policy_ops* ops);

}  // namespace gpushare::sched
