// sim: jobs of a file run on virtual time. The event loop drives the very objects of src/sched that the
// executor drives; only the device is a cost model (iteration times, copies at a link bandwidth, interference
// between lanes). May be called from cli and tests; calls sched and base. No threads, no wall clock, no
// device: deterministic by its inputs and seed.
//
// events.hpp: reports what happened, in order of time, to objects that draw or check it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

#include "sched/types.hpp"

namespace gpushare::sim {

// The steps of a session. Its life: kArrived, [queued until] kAdmitted, iterations..., { kPagingOut, kPagedOut,
// kPagingIn, kPagedIn, iterations... }, kLeft; or kArrived, kRefused: it is larger than the device.
enum class SessionStep : uint8_t {
  kArrived,
  kRefused,
  kAdmitted,
  kPagingOut,
  kPagedOut,
  kPagingIn,
  kPagedIn,
  kLeft
};
struct SessionEvent {
  uint64_t now_ns = 0;
  sched::SessionId session = sched::kNoSession;
  SessionStep step = SessionStep::kArrived;
  sched::LaneId lane = sched::kNoLane;  // kAdmitted, kPagingIn, kPagedIn
  uint64_t bytes = 0;                   // that are copied from now on: kPagingOut, kPagingIn
  std::string_view text = {};           // kArrived: the name; kRefused: why. Valid during the call
};

// All methods do nothing by default; override what you draw. Times are virtual nanoseconds, and calls come in
// ascending order of `now_ns`, except that `iterations` comes at the end of its interval. Called from the thread that
// runs the simulation; must not call it back.
class EventSink {
 public:
  virtual ~EventSink() = default;

  virtual void session(const SessionEvent& /*event*/) {}

  virtual void lane_opened(uint64_t /*now_ns*/, sched::LaneId, uint64_t /*bytes*/) {}
  virtual void lane_resized(uint64_t /*now_ns*/, sched::LaneId, uint64_t /*bytes*/) {}
  virtual void lane_closed(uint64_t /*now_ns*/, sched::LaneId) {}

  // `count` iterations of one session ran back to back in the lane. Intervals of a lane never overlap.
  virtual void iterations(sched::LaneId, sched::SessionId, uint64_t /*start_ns*/, uint64_t /*end_ns*/,
                          uint64_t /*count*/) {}
  // After something changed: bytes promised to persistent memory and to lanes, and the ephemeral bytes of
  // running iterations.
  virtual void memory(uint64_t /*now_ns*/, uint64_t /*persistent_bytes*/, uint64_t /*lane_bytes*/,
                      uint64_t /*ephemeral_bytes*/) {}
};

}  // namespace gpushare::sim
