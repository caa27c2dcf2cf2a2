// step_server.hpp: continuous batching on real threads: drives a step batcher (sched/slo/step_batcher.hpp) on the wall clock. Each step
// is an iteration of one session, so it takes turns with whatever else runs on the device.
//
// There are two threads: one makes steps and runs them; the other answers and drops what expires while a step runs.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/status.hpp"
#include "executor/runtime.hpp"
#include "sched/slo/step_batcher.hpp"

namespace gpushare::executor {

// A step as its function sees it. The vectors stay as they are until the device has finished the step.
struct RunningStep {
  std::vector<sched::slo::StepMember> members;
  std::vector<void*> member_tags;  // as given to submit
  std::vector<sched::slo::RequestId> left;
  std::vector<void*> left_tags;
  uint64_t expected_ns = 0;
  sched::slo::Worth worth;
  std::shared_ptr<const WaitingWork> next;  // what the step after it is worth
  // By member, to be filled in until the device has finished the step: not 0: it is done; how it failed; the bytes that it holds.
  std::vector<uint8_t> done;
  std::vector<int32_t> statuses;
  std::vector<uint64_t> bytes;
};

// Called on the lane's thread in the session's turn; enqueues the step's work on the iteration's stream. A status that is not
// OK, or an exception, fails the members of the step; the session goes on.
using StepFunction = std::function<base::Status(const std::shared_ptr<Iteration>&, RunningStep&)>;

class StepServer {
 public:
  // Takes news of a request, from a thread of the server, with no lock held. News that is not taken in time is replaced by what
  // comes after it. What it throws is logged and dropped. May be empty.
  using Answer = std::function<void(const sched::slo::StepEvent&)>;

  // Errors: those of make_step_batcher, HOST_OUT_OF_MEMORY.
  static base::Result<std::unique_ptr<StepServer>> start(std::string_view policy,
                                                         const sched::slo::StepOptions& options,
                                                         std::shared_ptr<Session> session,
                                                         StepFunction function);
  virtual ~StepServer() = default;

  // An arrival of 0 is now. Errors, with nothing held: those of StepBatcher::arrive, QUEUE_FULL (answers are not taken fast
  // enough), INVALID_STATE (draining, or the session has ended), HOST_OUT_OF_MEMORY.
  virtual base::Status submit(const sched::slo::StepRequest& request, Answer answer, void* tag) = 0;
  virtual bool cancel(sched::slo::RequestId id) = 0;
  virtual base::Status set_memory(uint64_t bytes) = 0;
  struct Stats : sched::slo::StepStats {
    uint64_t held = 0;  // accepted and not answered
    double step_ns = 0, decode_ns = 0, prefill_ns = 0, read_ns = 0;
  };
  virtual Stats stats() const = 0;
  // As RequestServer's.
  virtual base::Status drain(uint64_t timeout_ns = UINT64_MAX) = 0;
  virtual base::Status stop() = 0;
};

}  // namespace gpushare::executor
