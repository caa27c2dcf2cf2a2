// batcher_base.hpp: what all batchers share: the requests held, the batches in flight, drops, refusals,
// knowledge. A policy adds its order and its choice. Private to sched/slo.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <absl/container/btree_map.h>
#include <absl/container/btree_set.h>
#include "base/flat_hash.hpp"

#include "sched/slo/batcher.hpp"
#include "sched/slo/knowledge.hpp"

namespace gpushare::sched::slo {

// Requests of each model by a 64-bit key (deadline or arrival), ties by id.
class KeyedOrder {
 public:
  using Key = std::pair<uint64_t, RequestId>;
  void resize(size_t models) { of_.resize(models); }
  void add(uint32_t model, uint64_t key, RequestId id) { of_[model].insert({key, id}); }
  void remove(uint32_t model, uint64_t key, RequestId id) { of_[model].erase({key, id}); }
  const absl::btree_set<Key>& of(uint32_t model) const { return of_[model]; }
  size_t models() const { return of_.size(); }

 private:
  std::vector<absl::btree_set<Key>> of_;
};

class BatcherBase : public Batcher {
 public:
  BatcherBase(std::string name, const BatcherOptions& options)
      : options_(options), knowledge_(options), name_(std::move(name)) {}
  std::string_view name() const override { return name_; }
  base::Result<uint32_t> add_model(const ModelSpec& spec) override;
  base::Status arrive(const Request& request, uint64_t now_ns) override;
  bool cancel(RequestId id, uint64_t now_ns) override;
  bool cancel_some() override;
  void started(BatchId id, uint64_t now_ns) override;
  void finished(BatchId id, uint64_t device_ns, uint64_t now_ns) override;
  void finished_run(BatchId id, std::span<const uint64_t> execution_ns, uint64_t device_ns,
                    uint64_t now_ns) override;
  void failed(BatchId id, uint64_t device_ns, uint64_t now_ns) override;
  void rejected(BatchId id, uint64_t now_ns) override;
  void observe(uint32_t model, uint32_t application, uint64_t execution_ns) override;
  base::Status observe_request(const Request& request, uint64_t execution_ns) override;
  void observe_batch(uint32_t model, uint32_t k, uint64_t longest_ns, uint64_t device_ns) override;
  void observe_run(uint32_t model, std::span<const uint32_t> applications,
                   std::span<const uint64_t> execution_ns, uint64_t device_ns) override;
  base::Result<Profile> profile(uint32_t model, uint32_t application) override;
  Decision next(uint64_t now_ns, uint32_t in_flight) final;
  const Waiting& waiting() const override { return waiting_; }
  uint32_t largest_batch() const override { return largest_batch_; }
  void take_drops(std::vector<Drop>& out) override;
  size_t pending() const override { return held_.size(); }
  Signals signals() const override;

 protected:
  struct Held {
    Request request;
    uint32_t application = 0;  // index within the model
    uint64_t tag = 0;          // the policy's own (a queue handle)
    bool ordered = false;      // the policy has it
    // The number of the next batch when the request arrived at an idle device; 0 if the device was busy. While the
    // number of the next batch is still the same, the device has done nothing since.
    BatchId idle_since = 0;
  };
  struct Flight {
    uint32_t model = 0;
    uint32_t size = 0;
    uint64_t slo_ns = 0;  // shortest deadline - arrival of its requests
    uint64_t expected_ns = 0;
    std::vector<std::pair<uint64_t, double>> deadlines;  // and costs
    std::vector<Knowledge::Member> members;
    enum class Probe : uint8_t { kNone, kIdle, kBusy, kTrial };
    // Of an estimate that refuses requests: of an idle device, or while others waited. Or of what requests with an objective take.
    Probe probe = Probe::kNone;
    // The first batch of its model, which includes work that is done once (compilation, handles, page faults), or one that
    // failed or whose time is not known. Nothing is learned from its time.
    bool cold = false;
    // It took many times what was expected, and such batches are rare.
    bool stalled = false;
    // The last of some in a row that took many times what was expected, or again far less: the device is slower, or no more so.
    bool changed = false;
    bool sample() const { return !cold && !stalled; }  // its time says what others will take
    double won = 0;  // cost of the requests that finished in time; 0 if the batch failed
  };

  // ---- a policy's part -------------------------------------------------------------------------------------
  // The decision. Dropping ends when may_drop() says so; next() is called again then.
  virtual Decision decide(uint64_t now_ns, uint32_t in_flight) = 0;
  // Drops what has expired, at most as many as may_drop() allows, and returns the first deadline left (kNever: none).
  virtual uint64_t expire(uint64_t now_ns) = 0;
  virtual void model_added(uint32_t /*model*/) {}
  // The least time that the policy expects the request to take alone.
  virtual double least_alone_ns(const Held& held);
  // TIMED_OUT to refuse it as hopeless at once. By default only what has expired is.
  virtual base::Status admit(const Held& held, uint64_t now_ns);
  virtual void enter(Held& held, uint64_t now_ns) = 0;
  // Takes the request out of the policy's order (it was dropped, cancelled or batched).
  virtual void leave(Held& held) = 0;
  virtual void batch_started(const Flight&, uint64_t /*now_ns*/) {}
  virtual void batch_finished(const Flight&, uint64_t /*device_ns*/, uint64_t /*now_ns*/) {}
  // The request was lost: refused at the door or dropped, for its deadline.
  virtual void lost(const Held& /*held*/) {}
  virtual double price_per_ns() const { return 0; }
  // True if no batch of those that wait would begin at this time, were the device idle then.
  virtual bool holds_back(uint64_t /*begins_ns*/) { return false; }

  // ---- services --------------------------------------------------------------------------------------------
  Held* find(RequestId id);
  void drop(RequestId id, DropReason reason);
  // True if this call of next() may drop another request. Answers take time, and threads that submit wait meanwhile.
  bool may_drop() const { return drops_left_ > 0; }
  size_t drops_left() const { return drops_left_; }
  // Reports that `requests` were decided, each with this chance to miss. Policies that know the chance call it before
  // make_batch; for the others the base counts at the end of the batch.
  void predict_misses(size_t requests, double chance);
  // expire() over an order by deadline.
  uint64_t expire_from(const KeyedOrder& by_deadline, uint64_t now_ns);
  // Drops the first requests of the order, once after each batch that took many times what was expected, that a batch of all
  // that wait would make late. For policies that size a batch by the first request: the little time that a stall leaves it would
  // make this batch small, and all that follow while requests keep coming, because small batches serve fewer than come.
  void pass_over_late(const KeyedOrder& by_deadline, uint32_t model, uint64_t now_ns);
  // Takes the requests out and makes the batch.
  Batch make_batch(uint32_t model, std::vector<RequestId> ids, double expected_ns);
  uint32_t max_batch(uint32_t model) { return knowledge_.model(model).spec.batch_sizes.back(); }
  // c0 + c1 k l with l the mean over the mix. Policies that plan with a single number use it.
  double mean_duration_ns(uint32_t model, uint32_t k);

  BatcherOptions options_;
  Knowledge knowledge_;

 private:
  static constexpr size_t kMostDrops = 1024;  // in one call: whoever submits waits meanwhile
  // Checks the request's own fields: model, number of features, their values.
  base::Status check_kind(const Request& request);
  void count_decided(size_t requests, double misses);
  bool may_probe(const Held& held, uint64_t now_ns);
  bool may_be_probe(const Held& held, uint64_t now_ns);
  bool to_be_tried(const Held& held, uint32_t objective, uint64_t now_ns);
  void displace_trial(uint64_t now_ns);
  bool keep_as_probe(RequestId id, const Held& held);
  void forget(RequestId id, DropReason reason);
  Decision run_probe(std::optional<RequestId>& of, Decision decision, Flight::Probe kind);
  Decision choose(uint64_t now_ns, uint32_t in_flight);
  uint64_t expire_all(uint64_t now_ns);
  Held& hold(const Request& request, Held held);
  void foresee_next(uint64_t now_ns);
  using Flights = base::FlatHashMap<BatchId, Flight>;
  void finish(Flights::iterator at, uint64_t device_ns, uint64_t now_ns);
  void ended(Flight flight, double missed, uint64_t device_ns, uint64_t now_ns);
  void probe_ended(const Flight& flight, uint64_t device_ns, uint64_t now_ns);
  void compare_with_expected(Flight& flight, uint64_t device_ns);

  std::string name_;
  uint64_t overruns_ = 0;              // batches that took many times what was expected
  std::vector<uint64_t> passed_over_;  // by model: overruns_ when pass_over_late() was last done
  base::FlatHashMap<RequestId, Held> held_;
  absl::btree_map<KeyedOrder::Key, double> by_deadline_;  // all of held_, with their costs
  Flights flights_;
  base::FlatHashMap<BatchId, std::vector<RequestId>> in_flight_;
  std::vector<Drop> drops_;
  double decided_ = 0, expected_misses_ = 0;  // see Signals
  bool predicts_ = false;                     // the policy calls predict_misses
  BatchId next_batch_ = 1;
  Waiting waiting_;
  bool holds_back_ =
      false;  // the policy, as of the last call of next(): then nothing waits for the next batch
  uint32_t largest_batch_ = 0;
  uint64_t last_expected_ns_ = 0;    // of the last batch
  uint64_t last_batch_ends_ns_ = 0;  // as expected

  // Probes. A policy refuses and drops requests by estimates that only finished work can correct. So that a wrong
  // estimate does not refuse for ever, from time to time a request that the estimate calls hopeless runs all the same,
  // alone: when the device would otherwise do nothing, and rarely when it is busy. A probe that finishes in time shows
  // that the estimate is wrong, and the next one may follow at once. A late probe makes the next ones of its kind rarer.
  struct Probes {
    uint64_t next_ns = 0;
    uint32_t late = 0;  // in a row
  };
  std::optional<RequestId> probe_;  // kept for that; the policy does not have it any more
  Probes idle_probes_, busy_probes_;
  bool won_since_probe_ = false;
  // A policy that passes over the requests with an objective, because those of other objectives under their name take long,
  // never learns that they are short. So where many come and none runs, one runs alone: the trial, which the policy does not have.
  std::optional<RequestId> trial_;
  uint64_t next_trial_ns_ = 0;
  uint64_t tries_ = 0;        // probes so far
  uint64_t deciding_ns_ = 0;  // of the call of next() under way
  bool deciding_idle_ = false;
  size_t drops_left_ = 0;
};

std::unique_ptr<Batcher> make_fifo(const BatcherOptions& options);
std::unique_ptr<Batcher> make_edf(const BatcherOptions& options);
std::unique_ptr<Batcher> make_maxdelay(const BatcherOptions& options);
std::unique_ptr<Batcher> make_clipper(const BatcherOptions& options);
std::unique_ptr<Batcher> make_clipper_mean(const BatcherOptions& options);
std::unique_ptr<Batcher> make_clipper_aimd(const BatcherOptions& options);
std::unique_ptr<Batcher> make_nexus(const BatcherOptions& options);
std::unique_ptr<Batcher> make_nexus_earliest(const BatcherOptions& options);
std::unique_ptr<Batcher> make_nexus_cycle(const BatcherOptions& options);
std::unique_ptr<Batcher> make_clockwork_single(const BatcherOptions& options);
std::unique_ptr<Batcher> make_orloj_own(const BatcherOptions& options);
std::unique_ptr<Batcher> make_greedy(const BatcherOptions& options);
std::unique_ptr<Batcher> make_clockwork(const BatcherOptions& options);
std::unique_ptr<Batcher> make_orloj(const BatcherOptions& options);
std::unique_ptr<Batcher> make_clairvoyant(const BatcherOptions& options);
std::unique_ptr<Batcher> make_clairvoyant_edf(const BatcherOptions& options);
std::unique_ptr<Batcher> make_gpushare(const BatcherOptions& options);

}  // namespace gpushare::sched::slo
