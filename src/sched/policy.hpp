// policy.hpp: a policy orders iterations inside a lane and sessions at the door. It is a state machine: told what
// happened, asked what next; the executor and the simulator call the very same object.
//
// Threads: calls are serialised by the caller. No call blocks, allocates device memory, or reads a clock.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.hpp"
#include "sched/types.hpp"

namespace gpushare::sched {

struct PolicyTraits {
  uint32_t max_lanes = 0;      // lanes open at once; 0 = no limit
  uint32_t max_residents = 0;  // sessions admitted at once; 0 = no limit
  bool head_of_line = false;   // a session that does not fit blocks those behind it
};

class Policy {
 public:
  static constexpr size_t kIdle = static_cast<size_t>(-1);
  virtual ~Policy() = default;
  virtual std::string_view name() const = 0;
  virtual PolicyTraits traits() const { return {}; }

  // Index into `candidates` (never empty: the resident sessions of the lane with an iteration ready) of the one to run next,
  // or kIdle to leave the lane idle until something changes.
  virtual size_t pick(LaneId lane, std::span<const SessionView> candidates, uint64_t now_ns) = 0;

  // True if `a` is to be admitted before `b`. A strict weak order; arrival order by default.
  virtual bool before(const SessionView& a, const SessionView& b) const { return a.id < b.id; }
  // True if waiting `a` may move resident `b`'s persistent bytes to host memory to get in.
  virtual bool outranks(const SessionView& waiting, const SessionView& resident) const {
    (void)waiting;
    (void)resident;
    return false;
  }

  // What happened.
  virtual void arrived(const SessionView&, uint64_t /*now_ns*/) {}
  virtual void admitted(const SessionView&, LaneId, uint64_t /*now_ns*/) {}
  virtual void ready(SessionId, LaneId, uint64_t /*now_ns*/) {}
  virtual void finished(SessionId, LaneId, uint64_t /*device_ns*/, uint64_t /*now_ns*/) {}
  virtual void left(SessionId, uint64_t /*now_ns*/) {}
};

// "fifo", "srtf", "pack", "fair", "priority". Errors: NOT_FOUND listing them.
base::Result<std::unique_ptr<Policy>> make_policy(std::string_view name);
std::span<const char* const> policy_names();

}  // namespace gpushare::sched
