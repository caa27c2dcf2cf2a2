// sched: decisions only: policies, lane finder, admission; slo/ has request queues and batchers. It sees no
// device, no thread and no wall clock: time comes in as an argument, actions go out as data. May be called from
// executor, client, daemon and sim, which drive the very same objects; calls base only.
//
// types.hpp: what the decision objects are told about a session.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>

namespace gpushare::sched {

using SessionId = uint64_t;  // ascending in arrival order, never reused
using LaneId = uint32_t;     // index of an open lane; reused after it closes
inline constexpr LaneId kNoLane = std::numeric_limits<LaneId>::max();
inline constexpr SessionId kNoSession = 0;
inline constexpr uint64_t kUnknown = std::numeric_limits<uint64_t>::max();

// A limit on promised bytes that can be changed at any time. While the target is below the promised bytes,
// nothing new is promised, and the effective value equals the promised bytes: it falls to the target as
// promises fall.
struct Limit {
  uint64_t target_bytes = 0;
  uint64_t effective_bytes = 0;  // at least the target; promises are never above it
};

// The most that P and E together may be promised under a quota, each rounded up to the granule: as much as rounding can add to
// needs that are within it. kUnknown without a quota (0).
uint64_t quota_in_granules(uint64_t quota_bytes, uint64_t granule_bytes);

enum class SessionClass : uint32_t { kGuaranteed = 0, kOpportunistic = 1 };

// A session's part of the device beside sessions of its own rank (Policy::share).
struct Share {
  enum class Kind : uint32_t {
    kInLine,    // in each lane they run one after the other, in line; lanes run beside each other
    kWeighted,  // they share the device's time by weight, over all lanes; they may change lanes
    kWhole      // each has the whole device while it runs: one lane is open at a time
  };
  Kind kind = Kind::kWeighted;
  double weight = 1;  // > 0
};

// A session as a policy sees it (the C ABI's gpushare_candidate without its header, and what the scheduler keeps to share
// the device by).
struct SessionView {
  SessionId id = kNoSession;
  SessionClass cls = SessionClass::kGuaranteed;
  int32_t priority = 0;
  double weight = 1.0;
  uint64_t arrival_ns = 0;
  uint64_t ready_since_ns = 0;
  uint64_t service_ns = 0;           // device time received
  uint64_t remaining_ns = kUnknown;  // declared or estimated
  // The same without what others slow the session by: its declared work, in proportion to the iterations that are left.
  uint64_t work_left_ns = kUnknown;
  uint64_t iteration_ns = 0;  // mean of measured iterations
  uint64_t iterations_done = 0;
  uint64_t persistent_bytes = 0;  // P
  uint64_t ephemeral_bytes = 0;   // E
  // Start-time fair queueing (Goyal, Vin, Cheng 1996) over the lanes of the device: weighted service received,
  // never behind the device's virtual time when the session becomes ready, iterations in flight counted at
  // their expected length.
  double virtual_ns = 0;
  uint32_t in_flight = 0;  // iterations dispatched and not yet finished
  // The session's place in line among sessions of equal rank: its id until its stay on the device is over, then the end
  // of the line.
  uint64_t in_line = 0;
  Share share;              // the policy's last answer
  uint64_t rank = 0;        // likewise, where it gives ranks as numbers
  bool alternates = false;  // SessionSpec::alternates
  // Set by set_worth(): what the next iteration wins if it begins by then; 0: nothing is known.
  double worth = 0;
  uint64_t worth_until_ns = 0;
  double unused_ns = 0;  // virtual time that it left to others while it wanted nothing, at most kMostUnusedNs
};

inline bool ahead_in_line(const SessionView& a, const SessionView& b) {
  return a.in_line != b.in_line ? a.in_line < b.in_line : a.id < b.id;
}

}  // namespace gpushare::sched
