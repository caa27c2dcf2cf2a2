// residency.hpp: which of the loaded models stay on the device. A decision object: it is told of requests and times,
// and answers which models to drop. It moves nothing itself.
//
// Both policies ask the decision that all claims share (claims.hpp). Under least_recently_used a model's rank is how
// recently it was requested: the model requested longest ago goes first, and a drop that proves unnecessary is spared.
// weighted keeps models that are expensive to bring back: a model's price is its request rate times the time to load
// it. Size counts because one large model of higher worth may have to go in place of several small models of lower
// worth. The rate is a count of requests that halves every `half_life_ns`, so a model that was once popular does not
// stay for ever.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "sched/claims.hpp"

namespace gpushare::sched {

using ModelId = uint64_t;

enum class ResidencyPolicy : uint8_t { kLeastRecentlyUsed, kWeighted };

// Not thread-safe. The caller's times come from one clock; a time before an earlier one counts as the latest. Calls for a model
// that is not known do nothing.
class Residency {
 public:
  explicit Residency(ResidencyPolicy policy, uint64_t half_life_ns = kRequestHalfLifeNs)
      : policy_(policy), half_life_ns_(half_life_ns) {}

  // Makes a model known; it is not on the device. `load_ns`: time to bring it there.
  void add(ModelId model, uint64_t bytes, uint64_t load_ns);
  void remove(ModelId model) {
    drop(model);
    models_.erase(model);
  }
  // Reports a request for `model`, which is on the device from now on.
  void request(ModelId model, uint64_t now_ns);
  // Makes at least `bytes` of room, or as much as possible, by dropping models other than `keep`. Returns the dropped
  // models. O(n log n) for n models on the device.
  std::vector<ModelId> shed(uint64_t bytes, ModelId keep, uint64_t now_ns);
  // Reports that the model is not on the device any more, or was not brought there.
  void drop(ModelId model);

  bool resident(ModelId model) const;
  uint64_t resident_bytes() const { return resident_bytes_; }
  // Requests so far, halved every half-life, as of `now_ns`. 0 for an unknown model.
  double requests(ModelId model, uint64_t now_ns) const;
  // The worth of keeping the model, in ns, for comparison with other claims. weighted: requests times load time, as of
  // `now_ns`. least_recently_used: the load time, halved for each model that was requested since. 0 for an unknown model.
  double worth(ModelId model, uint64_t now_ns) const;

 private:
  struct Model {
    uint64_t bytes = 0;
    uint64_t load_ns = 0;
    double requests = 0;  // decayed to last_ns
    uint64_t last_ns = 0;
    uint64_t turn = 0;  // a count at the last request, which breaks ties of time
    bool resident = false;
  };
  double requests_of(const Model& model, uint64_t now_ns) const;
  double worth_of(const Model& model, uint64_t now_ns) const;

  const ResidencyPolicy policy_;
  const uint64_t half_life_ns_;
  std::unordered_map<ModelId, Model> models_;
  uint64_t resident_bytes_ = 0;
  uint64_t now_ns_ = 0;
  uint64_t turns_ = 0;
};

}  // namespace gpushare::sched
