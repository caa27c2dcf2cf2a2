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
#include "sched/slo/feature_model.hpp"
#include "sched/slo/histogram.hpp"
#include "sched/slo/inference.hpp"

namespace gpushare::sched::slo {

class Knowledge {
 public:
  static constexpr size_t kExactMixture = 32;
  // The most applications that a model tells apart. Requests of further applications share the last one, so that a user
  // who gives each request another application does not fill the memory.
  static constexpr size_t kMaxApplications = 1u << 16;
  static constexpr double kLeastQuantile = 0.01;
  struct Application {
    explicit Application(const HistogramOptions& options) : histogram(options) {}
    Histogram histogram;
    // Requests in the batches that the histogram's durations are estimated from, see Inference. 0: they were told or drawn.
    uint64_t inferred = 0;
    // Its requests have features and are of classes: they are not estimated for all of it.
    bool divided = false;
    Distribution own;      // of the histogram when last refreshed; empty while there are no samples
    double share = 0;      // of the arrivals, in units of Model::share_unit
    uint64_t records = 0;  // since `own` was computed
    uint64_t drifts = 0;   // of the histogram when `own` was computed
    bool due = false;      // `own` is to be computed anew
    // Durations in a row that lie far below, or far above, all that was known before them.
    uint8_t far_below = 0, far_above = 0;
    double far_logarithms = 0;  // their sum
    uint32_t ran = 0;           // members of finished batches, up to four
    bool told = false;          // its durations were told beforehand, and none measured has contradicted them
    uint8_t judged = 0;         // the first measured durations of a told application, up to 32
    double judged_logarithms = 0,
           judged_squares = 0;  // the sums of their logarithms, and of the squares of these
    uint8_t odd_runs = 0;  // batches with it in a row that took far from what they should have, see odd()
    uint64_t tried = 0;    // the number of its last probe, see BatcherBase
  };
  // The values that a decision needs for every request that it looks at. They are kept together so that those of 10,000
  // applications fit into a cache.
  struct Brief {
    float mean_ns = 0;
    float least_ns = 0;  // the kLeastQuantile quantile: a request with less time left is as good as lost
    // Model::version when these numbers were computed. 0: the application has no samples, the mixture's numbers hold.
    uint64_t revision = 0;
    bool known() const { return revision != 0; }
  };
  // A request as the learning code sees it.
  struct Member {
    uint32_t application = 0;  // index: of the caller's application, or of a class of it
    uint32_t number = 0;       // the caller's
    std::vector<double> features;
    uint32_t objective = 0;  // objective_of the request
  };
  // Requests of one application whose time to their deadlines is about the same. Where they take other times than the rest
  // of it, as those of other programs under one name do, they are told apart: they are an application of their own.
  struct Objective {
    static constexpr uint32_t kNotApart = UINT32_MAX;
    uint32_t number = 0;            // objective_of
    uint32_t index = kNotApart;     // its application
    double count = 0;               // of durations, older ones counting for less
    double mean = 0, variance = 0;  // of their logarithms
    std::vector<uint64_t> last;     // what the application begins with
    size_t next = 0;                // place in `last`
    uint32_t unseen = 0;            // arrivals since the last duration, up to 16
    uint64_t runs = 0;              // Model::runs at the first of these arrivals
  };
  struct Model {
    ModelSpec spec;
    BatchTimeModel time;
    std::deque<Application> applications;  // stable addresses
    base::FlatHashMap<uint64_t, uint32_t>
        index_of;  // by the caller's number, and in the upper half the class by features
    base::FlatHashMap<uint32_t, FeatureModel> by_features;  // of applications whose requests have features
    base::FlatHashMap<uint32_t, std::vector<Objective>> by_objective;  // of the others
    std::vector<Brief> briefs;                                         // by application index
    std::vector<uint32_t> due;  // applications to compute anew at the next refresh
    // The distribution of any request, also used for an application without samples. Up to kExactMixture
    // applications it is their mixture by observed shares, beyond that the distribution of the last durations
    // of all.
    Distribution mix_alone;
    Distribution
        equal_alone;       // every application alike, as Orloj; the same as mix_alone beyond kExactMixture
    Brief mix;             // of mix_alone
    double mean_ns = 0;    // of mix_alone
    Histogram pooled;      // the last durations of all applications
    uint64_t version = 1;  // raised by a refresh
    uint64_t records = 0;  // since the last refresh
    uint64_t arrivals = 0;
    uint64_t time_version = 0;
    double share_unit = 1;  // of one arrival now; grows, so that older ones count for less
    bool fresh_application = false;
    uint64_t runs = 0;  // batches that finished
    bool warm = false;  // a batch of the model has finished
    // Nobody has told any request's time, so only batches say what requests take.
    bool infers = true;
    Inference inference;
    std::vector<uint32_t> estimated;  // applications whose durations are estimated, ascending
    // Batches in a row that took many times what their policy expected, and, after such, those that took a small part of it;
    // see BatcherBase.
    uint32_t stalls = 0, shorts = 0;
    bool slowed = false;
    // Odd batches in a row: each took many times the time that was expected, or a small part of it.
    uint32_t odd_runs = 0;
    double odd_logarithm = 0;  // sum over the odd batches: logarithm of the time taken over the time expected

    const Distribution& alone(uint32_t application) const {
      return briefs[application].known() ? applications[application].own : mix_alone;
    }
    // The brief's revision changes whenever alone() does.
    const Brief& brief(uint32_t application) const {
      return briefs[application].known() ? briefs[application] : mix;
    }
  };

  explicit Knowledge(const BatcherOptions& options) : options_(options) {}
  base::Result<uint32_t> add_model(const ModelSpec& spec);
  size_t models() const { return models_.size(); }
  Model& model(uint32_t index) { return models_[index]; }
  const Model& model(uint32_t index) const { return models_[index]; }
  // Index of the application within the model, made if new.
  uint32_t application(uint32_t model, uint64_t key);
  // The index of the class of a request with these features, made if new. Without features: the class of the requests
  // with its objective, where these are told apart. Until enough is known, the index of the application itself.
  uint32_t classify(uint32_t model, uint32_t number, std::span<const double> features,
                    uint32_t objective = 0);
  // A number for requests that have about as long to their deadlines; 0: no deadline.
  static uint32_t objective_of(uint64_t arrival_ns, uint64_t deadline_ns);
  // The number of features of the application's requests; 0: no request with features was seen.
  size_t features(uint32_t model, uint32_t number) const;
  // Counts one more request of the application `number`. True if many with its objective came, and batches ran, while none of
  // them did, and too few ever ran to tell whether they take other times than the rest of it, of which more is known.
  bool passed_over(uint32_t model, uint32_t number, uint32_t objective);
  // The request with the objective of `member` that passed_over() asked for has run, whatever was learned of it.
  void tried(uint32_t model, const Member& member);
  // Counts one more request of the application.
  void arrived(uint32_t model, uint32_t application_index);
  void observe(uint32_t model, uint32_t number, uint64_t execution_ns);
  void observe_told(uint32_t model, const Member& member, uint64_t execution_ns);
  void observe_batch(uint32_t model, uint32_t k, uint64_t longest_ns, uint64_t device_ns);
  // The members have run in a finished batch, whose times may be told by observe() after it. observe_run() counts its own.
  void count_ran(uint32_t model, std::span<const Member> members);
  // A finished batch; see Batcher::observe_run. If its members' times alone are not told, they are inferred from its
  // duration: by Inference where no times were ever told. Elsewhere the longest of k took (T - c0) / (c1 k), the longest
  // member is drawn in proportion to its chance, the others from their distributions below it (stochastic EM), and c0 and
  // c1 are fitted to the expected longest. Scaling all times up and c1 down by as much changes no measurement, so c1 and
  // inferred times have a meaning only together.
  // `trial`: the request that passed_over() asked for. Its time counts however far it is from what is expected of its name.
  void observe_run(uint32_t model, std::span<const Member> members, std::span<const uint64_t> execution_ns,
                   uint64_t device_ns, bool trial = false);
  // Recomputes the distributions if enough has changed; true if it did. The cost depends on the number of new records,
  // not on the number of applications.
  bool refresh(uint32_t model);

 private:
  // Made if new; null if no more are told apart.
  static Objective* entry_of(Model& of, uint32_t number, uint32_t objective);
  void observe_objective(uint32_t model, const Member& member, uint64_t execution_ns);
  void update_mixture(Model& of);
  void contradict(Model& of, uint32_t index, uint64_t execution_ns);
  static bool contradicts_profile(Application& application, uint64_t execution_ns);
  void replace(Model& of, uint32_t index, double logarithms, uint8_t count);
  void scale(Model& of, uint32_t index, double factor);
  bool odd(Model& of, std::span<const Member> members, double ratio);
  void record(Model& of, uint32_t index, uint64_t execution_ns);
  void infer_run(uint32_t model, std::span<const Member> members, double device_ns, bool trial);
  double ratio_of_range(const Model& of, uint32_t k, double expected_ns, double device_ns) const;
  void observe_member(uint32_t model, const Member& member, uint64_t execution_ns);
  void follow_change(Model& of, double factor);
  void estimate_from_runs(Model& of);
  void draw_again(Model& of, uint32_t index);
  static void pool_estimates(Model& of);
  void draw_members(const Model& of, std::span<const Member> members, double longest);
  double unit_random();  // in (0, 1)

  BatcherOptions options_;
  std::deque<Model> models_;
  uint64_t random_ = 0x9e3779b97f4a7c15u;
  std::vector<const Distribution*> drawn_from_;  // scratch of infer_run
  std::vector<double> chances_;
  std::vector<uint32_t> present_;
  std::vector<uint64_t> first_ns_;  // scratch of classify
};

}  // namespace gpushare::sched::slo
