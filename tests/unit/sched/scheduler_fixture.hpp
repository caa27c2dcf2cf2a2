// A scheduler under test: sessions in short, its actions as text, one iteration in a lane.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "sched/scheduler.hpp"
#include "support/catch.hpp"
#include "support/sanitizers.hpp"

namespace gpushare::test::scheduling {

using namespace gpushare::sched;  // NOLINT(google-build-using-namespace)

inline SchedulerOptions capacity(uint64_t bytes) {
  SchedulerOptions options;
  options.capacity_bytes = bytes;
  return options;
}

inline SessionSpec spec(SessionId id, uint64_t persistent, uint64_t ephemeral,
                        uint64_t remaining_ns = kUnknown) {
  SessionSpec spec;
  spec.id = id;
  spec.name = "job " + std::string(1, static_cast<char>('0' + id % 10));
  spec.persistent_bytes = persistent;
  spec.ephemeral_bytes = ephemeral;
  spec.remaining_ns = remaining_ns;
  return spec;
}

inline Scheduler make(const char* policy, SchedulerOptions options) {
  return {options, std::move(*make_policy(policy))};
}

// The books of a simulated device after each of its events, which are millions in some tests: what holds costs no assertion, and under
// sanitizers only every sixteenth event is looked at.
class SoundBooks {
 public:
  void after_event(const Scheduler& scheduler) {
    if (kSanitized && events_++ % 16 != 0) return;
    if (const std::string wrong = scheduler.check(); !wrong.empty()) FAIL(wrong);
  }

 private:
  uint64_t events_ = 0;
};

// "open 0:40" "admit 1@0" ... of the actions since the last call.
inline std::vector<std::string> actions(Scheduler& scheduler) {
  std::vector<std::string> out;
  for (const Action& a : scheduler.take_actions()) {
    const std::string lane = std::to_string(a.lane), session = std::to_string(a.session);
    switch (a.kind) {
      case ActionKind::kOpenLane:
        out.push_back("open " + lane + ":" + std::to_string(a.bytes));
        break;
      case ActionKind::kResizeLane:
        out.push_back("resize " + lane + ":" + std::to_string(a.bytes));
        break;
      case ActionKind::kCloseLane:
        out.push_back("close " + lane);
        break;
      case ActionKind::kAdmit:
        out.push_back("admit " + session + "@" + lane);
        break;
      case ActionKind::kPageOut:
        out.push_back("out " + session);
        break;
      case ActionKind::kPageIn:
        out.push_back("in " + session + "@" + lane);
        break;
      case ActionKind::kTurnBack:
        out.push_back("back " + session);
        break;
      case ActionKind::kDrop:
        out.push_back("drop " + session);
        break;
      case ActionKind::kFillCache:
        out.push_back("fill " + session);
        break;
      case ActionKind::kDropCache:
        out.push_back("drop " + session);
        break;
      case ActionKind::kMove:
        out.push_back("move " + session + "@" + lane);
        break;
      case ActionKind::kTerms:
        out.push_back("terms " + session + ":" + std::to_string(a.bytes));
        break;
    }
  }
  CHECK(scheduler.check() == "");
  return out;
}

using Strings = std::vector<std::string>;

// Runs one iteration of whoever is picked; its id, or 0.
inline SessionId run(Scheduler& scheduler, LaneId lane, uint64_t device_ns, uint64_t& now) {
  const auto picked = scheduler.pick(lane, now);
  if (!picked) return 0;
  scheduler.dispatched(*picked, lane, now);
  now += device_ns;
  scheduler.finished(*picked, device_ns, now);
  scheduler.ready(*picked, now);
  return *picked;
}

}  // namespace gpushare::test::scheduling
