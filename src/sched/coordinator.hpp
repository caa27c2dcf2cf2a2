// coordinator.hpp: which jobs may use one device, in which class, and with how many bytes.
//
// Guaranteed jobs get all bytes that they asked for, or wait. Opportunistic jobs share what guaranteed ones leave, by
// weight, down to a least amount each. A guaranteed job that has waited long starts as opportunistic where there is
// room, and is upgraded when its bytes are free. An opportunistic job that may be upgraded becomes guaranteed when no
// guaranteed job waits, and is demoted when a guaranteed job comes that needs its room.
//
// No thread, no clock, no device: times come in as arguments, and view() says what was decided.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "sched/types.hpp"

namespace gpushare::sched {

struct CoordinatorOptions {
  uint64_t capacity_bytes = 0;
  uint32_t max_guaranteed = 1;  // at once; several of them slow each other, and no launch gate prevents that
  uint32_t max_opportunistic = 4;  // at once
  uint64_t long_wait_ns =
      600'000'000'000;  // after which a guaranteed job that waits may start as opportunistic
  // If a job above its limit does not shrink for this time while others wait for memory, the coordinator takes it that
  // the job cannot shrink (it is idle, or its blocks do not move). The job then counts as needing all of its bytes, so
  // it may be stopped.
  uint64_t shrink_patience_ns = 100'000'000;
};

struct CoordinatedJob {
  SessionId id = kNoSession;
  SessionClass cls = SessionClass::kGuaranteed;
  uint64_t bytes = 0;        // the bytes that it wants on the device
  uint64_t least_bytes = 0;  // the bytes with which it can still run, the rest on the host; at most `bytes`
  double weight = 1;
  bool may_upgrade = false;  // an opportunistic job becomes guaranteed when there is room
};

// Threads: none; one caller at a time.
class Coordinator {
 public:
  explicit Coordinator(CoordinatorOptions options) : options_(options) {}

  // Whether the job could ever run. The caller refuses a job that does not fit (INVALID_ARGUMENT).
  bool fits(const CoordinatedJob& job) const { return job.least_bytes <= options_.capacity_bytes; }
  void arrive(const CoordinatedJob& job, uint64_t now_ns);
  void leave(SessionId id, uint64_t now_ns);
  // Changes the needs of a known job. The job keeps its place and the time that it has waited.
  void change(const CoordinatedJob& job, uint64_t now_ns);
  bool knows(SessionId id) const { return jobs_.contains(id); }
  void set_capacity(uint64_t bytes, uint64_t now_ns);
  // Looks again at jobs that have waited long; call it at the time of look_again_ns().
  void tick(uint64_t now_ns) { decide(now_ns); }
  uint64_t look_again_ns() const { return look_again_ns_; }

  struct View {
    bool running = false;  // false: the job waits, or there is no room for its least bytes any more
    SessionClass cls = SessionClass::kGuaranteed;  // as it runs
    uint64_t limit_bytes = 0;
  };
  View view(SessionId id) const;
  const CoordinatorOptions& options() const { return options_; }
  // The jobs that run, as text for people: the reason why another job waits.
  std::string describe() const;
  // Empty when the invariants hold. For tests.
  std::string check() const;

 private:
  struct Entry {
    CoordinatedJob job;
    uint64_t waiting_since_ns = 0;
    bool running = false, waited_long = false;
    SessionClass cls = SessionClass::kGuaranteed;
    uint64_t limit_bytes = 0;
  };
  struct Use {
    uint64_t bytes = 0;
    uint32_t guaranteed = 0, opportunistic = 0;  // sessions that run
  };
  Use use() const;
  void decide(uint64_t now_ns);

  CoordinatorOptions options_;
  std::map<SessionId, Entry> jobs_;  // in order of arrival
  uint64_t look_again_ns_ = kUnknown;
};

}  // namespace gpushare::sched
