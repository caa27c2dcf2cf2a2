// executor/serving: requests with deadlines on real threads. The batcher (src/sched/slo) decides. This folder
// drives it on the wall clock, as src/sim/serving does on a virtual clock. May be called from c_api and the
// cli; calls sched/slo, executor and base. A model brings the function that runs its batches: as an iteration
// of a session (iteration_batch.hpp), or as work on the host.
//
// There are two threads: one decides, and sleeps until something happens or the batcher's wake time; the other
// runs batches. The durations of finished batches go back to the batcher, which profiles online.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/figures.hpp"
#include "base/status.hpp"
#include "sched/slo/batcher.hpp"

namespace gpushare::executor {

// How a request ended.
struct RequestOutcome {
  sched::slo::RequestId id = 0;
  // OK: the batch of the request ran, in time or late. TIMED_OUT: the request was dropped for its deadline, and `dropped`
  // says how; the answer comes soon after the deadline, also while a batch function runs on and on. CANCELLED: by cancel()
  // or stop(). HOST_OUT_OF_MEMORY: the server gave up (see submit). Any other status is that with which the batch failed;
  // CALLBACK_FAILED if the batch function threw.
  int32_t status = 0;
  std::optional<sched::slo::DropReason> dropped;  // set unless it was in a batch that started
  uint32_t batch_size = 0;                        // 0 if dropped
  uint64_t finished_ns = 0;                       // base::host_now_ns
  uint64_t deadline_ns = 0;
};

class WaitingWork;

// Facts that the function that runs a batch may report.
struct BatchReport {
  uint64_t started_ns = 0;  // base::host_now_ns when its work began; 0: when the function was called
  // By member: the time that it took or would take alone; 0: unknown. All zeros at first.
  std::vector<uint64_t> execution_ns;
  // By member: OK, or how it failed in a batch that did not. All OK at first.
  std::vector<int32_t> statuses;
  bool model_ended = false;      // this model can run nothing any more: further requests are refused
  std::vector<void*> tags;       // of the members, as given to submit; not to be changed
  const void* server = nullptr;  // whose batch it is, for InsideServer
  std::shared_ptr<const WaitingWork> waiting;  // the requests that no batch has yet
};

// While it lives, this thread runs a function of the caller's on behalf of `server`, so that calls which wait
// for that function are refused instead of waiting for ever. The server makes one around every function it
// calls; a batch function that hands its work to another thread makes one there.
class InsideServer {
 public:
  explicit InsideServer(const void* server);
  static bool is(const void* server);  // whether this thread runs a function of the caller's for this server
  ~InsideServer();
  InsideServer(const InsideServer&) = delete;
  InsideServer& operator=(const InsideServer&) = delete;

 private:
  const void* before_;
};

struct RequestServerStats {
  uint64_t accepted = 0;
  uint64_t refused_full = 0;      // QUEUE_FULL
  uint64_t refused_hopeless = 0;  // TIMED_OUT at submit
  uint64_t in_time = 0;
  uint64_t late = 0;
  uint64_t failed = 0;  // in a batch that failed
  std::array<uint64_t, sched::slo::kDropReasons> dropped{};
  uint64_t pending = 0;    // not yet in a batch
  uint64_t held = 0;       // accepted and not answered: pending and in batches
  uint64_t most_held = 0;  // ever
  uint64_t batches = 0;
  uint64_t batched_requests = 0;
  uint64_t busy_ns = 0;  // sum of what batches took
  uint64_t decisions = 0;
  uint64_t decision_ns = 0;  // wall time spent in them
  sched::slo::Signals signals;

  base::RequestCounts counts() const;
};

struct RequestServerOptions {
  std::string policy = "gpushare";
  sched::slo::BatcherOptions batcher;
  // Called from a thread of the server, without its lock, when the statistics have changed: 10 times a second at most. May be empty.
  std::function<void(const RequestServerStats&)> changed;
};

class RequestServer {
 public:
  // Runs a batch and returns when it has finished on the device; a status that is not OK, or an exception,
  // fails its requests alone.
  using RunBatch = std::function<base::Status(const sched::slo::Batch&, BatchReport&)>;
  // Called once for a request that submit() accepted, from a thread of the server, without locks held; what
  // it throws is logged and dropped. May be empty.
  using Answer = std::function<void(const RequestOutcome&)>;

  // Errors: those of make_batcher.
  static base::Result<std::unique_ptr<RequestServer>> start(const RequestServerOptions& options);
  // stop(). Not from a function that the server called.
  virtual ~RequestServer() = default;

  // Models are numbered from 0. Errors: those of Batcher::add_model, INVALID_STATE after drain or stop.
  virtual base::Result<uint32_t> add_model(const sched::slo::ModelSpec& spec, RunBatch run) = 0;
  // Any thread; does not block on the device. Times are base::host_now_ns; an arrival of 0 is now. The tag comes
  // back in the batch's report. Errors, with nothing held and `answer` not called: those of Batcher::arrive
  // (QUEUE_FULL is back-pressure, also when twice max_pending and 4,096 wait for their answers to be taken;
  // TIMED_OUT a hopeless deadline), ALREADY_EXISTS (the id is not answered yet), INVALID_STATE after drain or
  // stop and for a model that ended (the message says of what), HOST_OUT_OF_MEMORY. When the host has no memory
  // for a step of the batcher's, in any call or thread, the server gives up: requests that are not running are answered
  // with HOST_OUT_OF_MEMORY, and so is every later submit.
  virtual base::Status submit(const sched::slo::Request& request, Answer answer, void* tag = nullptr) = 0;
  // True if it was waiting; its outcome follows. False if its batch is under way or over.
  virtual bool cancel(sched::slo::RequestId id) = 0;
  // Execution times that are known beforehand; see Batcher.
  virtual base::Status observe(const sched::slo::Request& request, uint64_t execution_ns) = 0;
  virtual void observe_batch(uint32_t model, uint32_t k, uint64_t longest_ns, uint64_t device_ns) = 0;
  virtual base::Result<sched::slo::Profile> profile(uint32_t model, uint32_t application) = 0;
  virtual RequestServerStats stats() const = 0;
  virtual std::string_view policy() const = 0;

  // Refuses new requests and waits until all accepted ones are answered. Errors: TIMED_OUT (they still
  // will be), INVALID_STATE from a function that the server called, or that the device or a runtime waits for.
  virtual base::Status drain(uint64_t timeout_ns = UINT64_MAX) = 0;
  // Refuses new requests, cancels what waits, waits for the running batch, ends the threads. Idempotent.
  // Errors: INVALID_STATE from a function that the server called, or that the device or a runtime waits for; nothing
  // changed.
  virtual base::Status stop() = 0;
};

}  // namespace gpushare::executor
