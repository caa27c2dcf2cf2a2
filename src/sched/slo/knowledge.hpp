// knowledge.hpp: what a batcher knows of its models: execution times by application, the mix of applications
// that arrives, the batch time, and from these the duration of a batch, cached per (model, application, batch
// size) and refreshed when the histograms or the mix have moved.
//
// Threads: the batcher's.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "base/flat_hash.hpp"

#include "sched/slo/batch_time.hpp"
#include "sched/slo/batcher.hpp"
#include "sched/slo/distribution.hpp"
#include "sched/slo/histogram.hpp"

namespace gpushare::sched::slo {

class Knowledge {
 public:
  struct Application {
    Application(uint32_t n, const HistogramOptions& options) : number(n), histogram(options) {}
    uint32_t number;
    Histogram histogram;
    Distribution
        alone;  // of the histogram when last refreshed; the model's mixture while there are no samples
    double mean_ns = 0;  // of `alone`
    double share = 0;    // of the arrivals, decaying
    bool known = false;  // has samples of its own
    uint64_t seen = 0;   // version of the histogram that `alone` shows
  };
  struct Model {
    ModelSpec spec;
    BatchTimeModel time;
    std::deque<Application> applications;  // stable addresses
    base::FlatHashMap<uint32_t, uint32_t> index_of;
    Distribution mix_alone;    // by observed shares
    Distribution equal_alone;  // every application alike, as Orloj
    double mean_ns = 0;        // of mix_alone
    uint64_t version = 1;      // raised by a refresh
    uint64_t records = 0;      // since the last refresh
    uint64_t arrivals = 0;
    uint64_t time_version = 0;
    bool fresh_application = false;
  };

  explicit Knowledge(const BatcherOptions& options) : options_(options) {}
  base::Result<uint32_t> add_model(const ModelSpec& spec);
  size_t models() const { return models_.size(); }
  Model& model(uint32_t index) { return models_[index]; }
  // Index of the application within the model, made if new.
  uint32_t application(uint32_t model, uint32_t number);
  // One more request of it has arrived.
  void arrived(uint32_t model, uint32_t application_index);
  void observe(uint32_t model, uint32_t number, uint64_t execution_ns);
  void observe_batch(uint32_t model, uint32_t k, uint64_t longest_ns, uint64_t device_ns);
  // A finished batch; see Batcher::observe_run. Where its members' times alone are not told they are inferred
  // from its duration T. A batch of one took (T - c0) / c1. The longest of k took (T - c0) / (c1 k); which
  // one that was is drawn in proportion to its chance, and the others from their distributions below it
  // (stochastic EM). c0 and c1 are fitted to the expected longest. Scaling all times up and c1 down by as
  // much changes nothing that can be measured, so c1 and the times then mean something together only.
  void observe_run(uint32_t model, std::span<const uint32_t> applications,
                   std::span<const uint64_t> execution_ns, uint64_t device_ns);
  // Recomputes the distributions if enough has changed; true if it did.
  bool refresh(uint32_t model);

 private:
  void infer_run(uint32_t model, std::span<const uint32_t> applications, double device_ns);
  double unit_random();  // in (0, 1)

  BatcherOptions options_;
  std::deque<Model> models_;
  uint64_t random_ = 0x9e3779b97f4a7c15u;
  std::vector<const Distribution*> members_;  // scratch of infer_run
  std::vector<double> chances_;
};

}  // namespace gpushare::sched::slo
