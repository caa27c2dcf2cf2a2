// executor/serving: requests with deadlines on real threads. The batcher (src/sched/slo) decides, this drives
// it on the wall clock, as src/sim/serving does on a virtual one. May be called from c_api and the cli; calls
// sched/slo and base. What runs a batch is a function of the caller's: an iteration of a session, or work on
// the host.
//
// Threads of its own: one that decides (and sleeps until something happens or the batcher's wake time), one
// that runs batches.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/status.hpp"
#include "sched/slo/batcher.hpp"

namespace gpushare::executor {

// How a request ended.
struct RequestOutcome {
  sched::slo::RequestId id = 0;
  // OK: its batch ran (late or not). CALLBACK_FAILED: the batch function failed or threw. TIMED_OUT: dropped
  // for its deadline. CANCELLED: by cancel() or stop().
  int32_t status = 0;
  std::optional<sched::slo::DropReason> dropped;  // set unless its batch ran
  uint64_t finished_ns = 0;                       // base::host_now_ns
  uint64_t deadline_ns = 0;
};

struct RequestServerOptions {
  std::string policy = "gpushare";
  sched::slo::BatcherOptions batcher;
  sched::slo::ModelSpec model;
};

class RequestServer {
 public:
  // Runs a batch and returns when it has finished on the device; a status that is not OK, or an exception,
  // fails its requests alone.
  using RunBatch = std::function<base::Status(const sched::slo::Batch&)>;
  // Called once for every request that submit() accepted, from a thread of the server, without locks held;
  // may call submit and cancel, not stop.
  using Done = std::function<void(const RequestOutcome&)>;

  // Errors: those of make_batcher and add_model.
  static base::Result<std::unique_ptr<RequestServer>> start(const RequestServerOptions& options, RunBatch run,
                                                            Done done);
  // stop().
  ~RequestServer();
  RequestServer(const RequestServer&) = delete;
  RequestServer& operator=(const RequestServer&) = delete;

  // Any thread; does not block on the device. Times are base::host_now_ns. Errors, with nothing held and done
  // not called: those of Batcher::arrive (QUEUE_FULL is back-pressure, TIMED_OUT a hopeless deadline),
  // INVALID_STATE after stop.
  base::Status submit(const sched::slo::Request& request);
  // True if it was waiting; its outcome follows. False if its batch is under way or over.
  bool cancel(sched::slo::RequestId id);
  // Execution time alone of one request of an application, measured or known; see Batcher::observe.
  void observe(uint32_t model, uint32_t application, uint64_t execution_ns);
  void observe_batch(uint32_t model, uint32_t k, uint64_t longest_ns, uint64_t device_ns);
  size_t pending() const;
  uint64_t decisions() const;
  uint64_t decision_ns() const;  // wall time spent in them
  // Refuses new requests, waits for all accepted ones to be answered.
  void drain();
  // Refuses new requests, cancels what waits, waits for the running batch, ends the threads. Idempotent.
  void stop();

 private:
  class Impl;
  explicit RequestServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace gpushare::executor
