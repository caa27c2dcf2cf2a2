// batcher.hpp: makes batches for one device from pending requests with deadlines. A batcher is a state machine: it is
// told what arrived, started and finished, and is asked what to run next. The executor's front end and the serving
// simulator drive the same objects.
//
// Policies (make_batcher): gpushare (the default, ours), fifo, edf, maxdelay, greedy (application means alone), clipper,
// clipper-mean, clipper-aimd, nexus, nexus-earliest, nexus-cycle, clockwork, clockwork-single, orloj, orloj-own, and clairvoyant and
// clairvoyant-edf, which are told each request's execution time and are yardsticks, not choices.
//
// Threads: the driver serialises calls. No call blocks or reads a clock. Every request that arrived is
// answered exactly once: in a batch that finishes, or in a drop with its reason.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.hpp"
#include "sched/slo/histogram.hpp"
#include "sched/slo/score.hpp"

namespace gpushare::sched::slo {

using RequestId = uint64_t;
using BatchId = uint64_t;
inline constexpr uint64_t kNever = std::numeric_limits<uint64_t>::max();

struct Request {
  RequestId id = 0;    // unique among the requests held; chosen by the driver
  uint32_t model = 0;  // index given by add_model
  uint32_t application =
      0;  // requests of one application share a distribution of execution times; any number
  uint64_t arrival_ns = 0;
  uint64_t deadline_ns = 0;
  double cost = 1;  // the cost of missing the deadline
  std::vector<CostStep>
      later_steps;            // further costs if later deadlines are missed, too (C.2 of Orloj); usually none
  uint64_t execution_ns = 0;  // alone; read by clairvoyant only
  // Numbers on which the execution time depends and which are known at arrival (tokens, steps): at most
  // FeatureModel::kMaxFeatures finite ones, as many and in the same order for all requests of an application. Empty:
  // only the application is known.
  std::vector<double> features;
};

enum class DropReason : uint32_t {
  kExpired = 0,  // the deadline passed while it waited
  kHopeless,     // it could not have finished in time any more
  kRejected,     // its batch reached the device after its latest start (clockwork)
  kQueueFull,    // refused at arrival: the batcher holds as many as it may
  kCancelled
};
inline constexpr uint32_t kDropReasons = 5;
const char* drop_reason_name(DropReason reason);

struct Drop {
  RequestId id;
  DropReason reason;
};

// The sum of the costs of requests or tokens that something is expected to serve in time, and by when it has to begin for
// all of them.
struct Worth {
  double cost = 0;
  uint64_t until_ns = kNever;
  // One more, that has to be served by `due_ns` and takes so long; nothing if that is too late at `begins_ns`.
  void add(double its_cost, uint64_t due_ns, uint64_t takes_ns, uint64_t begins_ns);
};

// Requests that wait for the batch or step after one: what the first of them cost, and by when it has to begin for each. Only the
// constructor allocates.
class Waiting {
 public:
  static constexpr size_t kMost = 256;
  Waiting() { first_.reserve(kMost + 1); }
  void clear() { first_.clear(); }
  void add(double cost, uint64_t due_ns, uint64_t takes_ns) noexcept;
  // Takes one out that was added so, if it is among them.
  void remove(double cost, uint64_t due_ns, uint64_t takes_ns) noexcept;
  // The worth of the first `places` that are not too late.
  Worth worth(size_t places, uint64_t now_ns) const noexcept;

 private:
  std::vector<Worth> first_;  // of one request each, in the order of until_ns
};

struct Batch {
  BatchId id = 0;
  uint32_t model = 0;
  std::vector<RequestId> requests;
  uint64_t expected_ns = 0;           // the time that the policy expects it to take
  uint64_t not_before_ns = 0;         // the device waits for it
  uint64_t latest_start_ns = kNever;  // the device refuses it after this: report rejected()
  Worth worth;
};

struct Decision {
  std::optional<Batch> batch;
  uint64_t wake_ns = kNever;  // without a batch: ask again at this time, if nothing happens before
};

// A model on the device: its batch time l_B = c0 + c1 k max l_r, which finished batches refine, and the batch sizes
// that were prepared.
struct ModelSpec {
  double c0_ns = 0;
  double c1 = 1;
  bool learn = true;  // false keeps c0 and c1
  // Ascending; policies that fill batches partly use any size up to the last.
  std::vector<uint32_t> batch_sizes{1, 2, 4, 8, 16};
};

// The profile that a batcher has learned of an application of a model.
struct Profile {
  double c0_ns = 0, c1 = 0;
  // Durations in the window; where times are inferred, requests of the batches that they are estimated from.
  uint64_t samples = 0;
  uint64_t drifts = 0;  // how often the distribution was seen to shift, so that the past was forgotten
  double mean_ns = 0, p50_ns = 0, p99_ns = 0;
};

// Signals of a batcher for autoscaling.
struct Signals {
  // The share of the last decided requests (about 1,024) that were expected to miss their deadline. Dropped requests,
  // and those refused as hopeless or because the queue was full, count as 1. Requests in a batch count by their chance
  // to miss, or, under policies that know no chances, by their real outcome.
  double predicted_miss_rate = 0;
  // The price of a second of device time, in the costs of requests: gpushare runs a batch only if it wins this much for
  // its time. 0 under other policies.
  double price_per_s = 0;
};

enum class SizeOrder : uint32_t { kDescending = 0, kEarliestDeadline };

struct BatcherOptions {
  size_t max_pending = 100'000;  // arrivals beyond are refused with QUEUE_FULL
  size_t bins = 32;              // of the distributions that decisions use
  HistogramOptions histogram;
  double delay_rate_per_ms = 1e-4;  // Orloj's b
  // orloj: what the text leaves open.
  SizeOrder size_order = SizeOrder::kDescending;  // line 16 as printed, or the text's "earliest deadline"
  bool more_than_size = false;                    // |Q| > bs as printed; else |Q| >= bs
  double estimate_quantile = 0;                   // EstimateBatchLatency: 0 = the mean, else this quantile
  // gpushare.
  double feasible_quantile =
      0.7;  // a request joins a batch if its slack is at least this quantile of the batch's duration
  double opportunity = 1;   // share of the recent goodput per busy time that device time is priced at
  double max_defer_ms = 0;  // how long an unfilled batch may wait for more requests while no deadline suffers
  // maxdelay, clockwork, nexus, clipper.
  double max_delay_ms = 10;
  double clockwork_window_ms = 10;  // how late an action may start, and how far ahead it is sent
  double clockwork_slack_ms = 5;    // taken off every deadline
  double nexus_overhead_ms = 0;
};

class Batcher {
 public:
  virtual ~Batcher() = default;
  virtual std::string_view name() const = 0;
  // Errors: INVALID_ARGUMENT naming the number that is wrong.
  virtual base::Result<uint32_t> add_model(const ModelSpec& spec) = 0;

  // ---- what happened ---------------------------------------------------------------------------------------
  // A request arrived. OK: it is held and will be answered. Errors, with nothing held and no drop reported:
  // INVALID_ARGUMENT (no such model, a cost that is not positive), ALREADY_EXISTS (the id is held), QUEUE_FULL, TIMED_OUT
  // (hopeless at once: the message has the numbers).
  virtual base::Status arrive(const Request& request, uint64_t now_ns) = 0;
  // The caller gave up. True if it was waiting (a drop is reported); false if unknown or already in a batch.
  virtual bool cancel(RequestId id, uint64_t now_ns) = 0;
  // The same for all that wait, at most 1,024 of them a call. True while others wait.
  virtual bool cancel_some() = 0;
  // A batch handed out by next() has started, finished, or was refused because its latest start had passed. A device_ns of 0:
  // the time is not known, because the process stood still meanwhile; nothing is learned from it.
  virtual void started(BatchId id, uint64_t now_ns) = 0;
  virtual void finished(BatchId id, uint64_t device_ns, uint64_t now_ns) = 0;
  // observe_run for the members of the batch, whose features it knows, and finished.
  virtual void finished_run(BatchId id, std::span<const uint64_t> execution_ns, uint64_t device_ns,
                            uint64_t now_ns) = 0;
  // A batch that was started gave no result. It won nothing, and nothing is learned from its time.
  virtual void failed(BatchId id, uint64_t device_ns, uint64_t now_ns) = 0;
  virtual void rejected(BatchId id, uint64_t now_ns) = 0;
  // Execution time alone of a request of this application: from a profiler, beforehand or of finished
  // requests.
  virtual void observe(uint32_t model, uint32_t application, uint64_t execution_ns) = 0;
  // The same of a request with features; of the request only model, application and features are read. Errors: as
  // arrive's of these.
  virtual base::Status observe_request(const Request& request, uint64_t execution_ns) = 0;
  // The measured duration of a batch of k requests whose longest takes longest_ns alone.
  virtual void observe_batch(uint32_t model, uint32_t k, uint64_t longest_ns, uint64_t device_ns) = 0;
  // A finished batch as a whole: its members' applications, and what each took or would take alone where that
  // is known (0 or an empty span: it is not; then the batch's duration tells, see Knowledge::observe_run).
  virtual void observe_run(uint32_t model, std::span<const uint32_t> applications,
                           std::span<const uint64_t> execution_ns, uint64_t device_ns) = 0;
  // Returns the profile. Errors: NOT_FOUND (no such model, an application never seen).
  virtual base::Result<Profile> profile(uint32_t model, uint32_t application) = 0;

  // ---- what next -------------------------------------------------------------------------------------------
  // `in_flight`: the batches handed out and not finished or rejected, the running one included. Most policies answer only
  // at 0.
  virtual Decision next(uint64_t now_ns, uint32_t in_flight) = 0;
  // The requests that wait for the batch after the one that next() made last, of which that may have largest_batch(). Both
  // batches are expected to last as long. As of the last call of next(), of arrive() and of cancel().
  virtual const Waiting& waiting() const = 0;
  virtual uint32_t largest_batch() const = 0;  // of any model
  // Drops since the last call, appended.
  virtual void take_drops(std::vector<Drop>& out) = 0;

  virtual size_t pending() const = 0;
  virtual Signals signals() const = 0;
};

// Errors: NOT_FOUND listing the names; INVALID_ARGUMENT naming the option that is out of range.
base::Result<std::unique_ptr<Batcher>> make_batcher(std::string_view policy,
                                                    const BatcherOptions& options = {});
std::span<const char* const> batcher_names();

}  // namespace gpushare::sched::slo
