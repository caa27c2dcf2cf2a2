// batcher_base.hpp: what all batchers share: the requests held, the batches in flight, drops, refusals,
// knowledge. A policy adds its order and its choice. Private to sched/slo.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <absl/container/btree_set.h>
#include "base/flat_hash.hpp"

#include "sched/slo/batcher.hpp"
#include "sched/slo/knowledge.hpp"

namespace gpushare::sched::slo {

class BatcherBase : public Batcher {
 public:
  BatcherBase(std::string name, const BatcherOptions& options)
      : options_(options), knowledge_(options), name_(std::move(name)) {}
  std::string_view name() const override { return name_; }
  base::Result<uint32_t> add_model(const ModelSpec& spec) override;
  base::Status arrive(const Request& request, uint64_t now_ns) override;
  bool cancel(RequestId id, uint64_t now_ns) override;
  void started(BatchId id, uint64_t now_ns) override;
  void finished(BatchId id, uint64_t device_ns, uint64_t now_ns) override;
  void finished_run(BatchId id, std::span<const uint64_t> execution_ns, uint64_t device_ns,
                    uint64_t now_ns) override;
  void rejected(BatchId id, uint64_t now_ns) override;
  void observe(uint32_t model, uint32_t application, uint64_t execution_ns) override;
  base::Status observe_request(const Request& request, uint64_t execution_ns) override;
  void observe_batch(uint32_t model, uint32_t k, uint64_t longest_ns, uint64_t device_ns) override;
  void observe_run(uint32_t model, std::span<const uint32_t> applications,
                   std::span<const uint64_t> execution_ns, uint64_t device_ns) override;
  base::Result<Profile> profile(uint32_t model, uint32_t application) override;
  void take_drops(std::vector<Drop>& out) override;
  size_t pending() const override { return held_.size(); }
  Signals signals() const override;

 protected:
  struct Held {
    Request request;
    uint32_t application = 0;  // index within the model
    uint64_t tag = 0;          // the policy's own (a queue handle)
  };
  struct Flight {
    uint32_t model = 0;
    uint32_t size = 0;
    uint64_t slo_ns = 0;  // shortest deadline - arrival of its requests
    uint64_t expected_ns = 0;
    std::vector<std::pair<uint64_t, double>> deadlines;  // and costs
    std::vector<Knowledge::Member> members;
  };

  // ---- a policy's part
  // -------------------------------------------------------------------------------------
  virtual void model_added(uint32_t /*model*/) {}
  // TIMED_OUT to refuse it as hopeless at once. By default only what has expired is.
  virtual base::Status admit(const Held& held, uint64_t now_ns);
  virtual void enter(Held& held, uint64_t now_ns) = 0;
  // Takes it out of the policy's order (it was dropped, cancelled or batched).
  virtual void leave(Held& held) = 0;
  virtual void batch_started(const Flight&, uint64_t /*now_ns*/) {}
  virtual void batch_finished(const Flight&, uint64_t /*device_ns*/, uint64_t /*now_ns*/) {}
  virtual double price_per_ns() const { return 0; }

  // ---- services
  // ----------------------------------------------------------------------------------------------
  Held* find(RequestId id);
  void drop(RequestId id, DropReason reason);
  // So many requests were decided, each with this chance to miss. Policies that know it call it before make_batch;
  // for the others the base counts at the end of the batch.
  void predict_misses(size_t requests, double chance);
  // Takes the requests out and makes the batch.
  Batch make_batch(uint32_t model, std::vector<RequestId> ids, double expected_ns);
  uint32_t max_batch(uint32_t model) { return knowledge_.model(model).spec.batch_sizes.back(); }
  // c0 + c1 k l with l the mean over the mix; what policies of a single number plan with.
  double mean_duration_ns(uint32_t model, uint32_t k);

  BatcherOptions options_;
  Knowledge knowledge_;

 private:
  // Checks the request's own fields: model, number of features, their values.
  base::Status check_kind(const Request& request);
  void count_decided(size_t requests, double misses);

  std::string name_;
  base::FlatHashMap<RequestId, Held> held_;
  base::FlatHashMap<BatchId, Flight> flights_;
  base::FlatHashMap<BatchId, std::vector<RequestId>> in_flight_;
  std::vector<Drop> drops_;
  double decided_ = 0, expected_misses_ = 0;  // see Signals
  bool predicts_ = false;                     // the policy calls predict_misses
  BatchId next_batch_ = 1;
};

// Requests of each model by a 64-bit key (deadline or arrival), ties by id.
class KeyedOrder {
 public:
  using Key = std::pair<uint64_t, RequestId>;
  void resize(size_t models) { of_.resize(models); }
  void add(uint32_t model, uint64_t key, RequestId id) { of_[model].insert({key, id}); }
  void remove(uint32_t model, uint64_t key, RequestId id) { of_[model].erase({key, id}); }
  const absl::btree_set<Key>& of(uint32_t model) const { return of_[model]; }
  size_t models() const { return of_.size(); }
  // The model whose first key is least, or models() when all are empty.
  uint32_t first_model() const {
    uint32_t first = static_cast<uint32_t>(of_.size());
    for (uint32_t i = 0; i < of_.size(); ++i)
      if (!of_[i].empty() && (first == of_.size() || *of_[i].begin() < *of_[first].begin())) first = i;
    return first;
  }

 private:
  std::vector<absl::btree_set<Key>> of_;
};

std::unique_ptr<Batcher> make_fifo(const BatcherOptions& options);
std::unique_ptr<Batcher> make_edf(const BatcherOptions& options);
std::unique_ptr<Batcher> make_maxdelay(const BatcherOptions& options);
std::unique_ptr<Batcher> make_clipper(const BatcherOptions& options);
std::unique_ptr<Batcher> make_clipper_mean(const BatcherOptions& options);
std::unique_ptr<Batcher> make_clipper_aimd(const BatcherOptions& options);
std::unique_ptr<Batcher> make_nexus(const BatcherOptions& options);
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
