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

// All methods do nothing by default; override what you draw. Times are virtual nanoseconds, and calls come in
// ascending order of `now_ns`, except that `iterations` comes at the end of its interval. A session's life:
//   session_arrived, [queued until] session_admitted, iterations..., { session_page_out_began,
//   session_paged_out, session_page_in_began, session_paged_in, iterations... }, session_left
// or session_arrived, session_refused. Called from the thread that runs the simulation; must not call it
// back.
class EventSink {
 public:
  virtual ~EventSink() = default;

  virtual void session_arrived(uint64_t /*now_ns*/, sched::SessionId, std::string_view /*name*/) {}
  // Could never run: larger than the device. `reason` is valid during the call.
  virtual void session_refused(uint64_t /*now_ns*/, sched::SessionId, std::string_view /*reason*/) {}
  virtual void session_admitted(uint64_t /*now_ns*/, sched::SessionId, sched::LaneId) {}
  virtual void session_page_out_began(uint64_t /*now_ns*/, sched::SessionId, uint64_t /*bytes*/) {}
  virtual void session_paged_out(uint64_t /*now_ns*/, sched::SessionId) {}
  virtual void session_page_in_began(uint64_t /*now_ns*/, sched::SessionId, sched::LaneId,
                                     uint64_t /*bytes*/) {}
  virtual void session_paged_in(uint64_t /*now_ns*/, sched::SessionId, sched::LaneId) {}
  virtual void session_left(uint64_t /*now_ns*/, sched::SessionId) {}

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
