// residency.hpp: with more models than device memory, which ones stay on it. A decision object: it is told
// of requests and of time, and answers what to load and what to drop; it moves nothing itself.
//
// Both policies ask the decision that all claims share (claims.hpp). Under least_recently_used a model's rank is how
// recently it was requested: the model requested longest ago goes first, and a drop that proves unnecessary is spared.
// weighted keeps models that are dear to bring back: a model's price is its request rate times the time to load it.
// Size counts because a large model of some worth may have to go in place of several small ones of less. The rate is a
// count of requests that halves every
// `half_life_ns`, so a model that was once popular does not stay for ever.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "base/status.hpp"
#include "sched/claims.hpp"

namespace gpushare::sched {

using ModelId = uint64_t;

enum class ResidencyPolicy : uint8_t { kLeastRecentlyUsed, kWeighted };

// Not thread-safe. The caller's times come from one clock; a time before an earlier one counts as the latest.
class Residency {
 public:
  struct Decision {
    bool load = false;           // false: the model is on the device already
    std::vector<ModelId> drops;  // first these go, in this order
  };

  Residency(uint64_t capacity_bytes, ResidencyPolicy policy, uint64_t half_life_ns = kRequestHalfLifeNs)
      : capacity_bytes_(capacity_bytes), policy_(policy), half_life_ns_(half_life_ns) {}

  // Makes a model known; it is not on the device. `load_ns`: time to bring it there. Errors: ALREADY_EXISTS;
  // INVALID_ARGUMENT if it is larger than the capacity.
  base::Status add(ModelId model, uint64_t bytes, uint64_t load_ns);
  // Forgets it, on the device or not. Errors: NOT_FOUND; INVALID_STATE while it is pinned.
  base::Status remove(ModelId model);

  // A request for `model`: counts it, decides, and takes the decision for done. Pinned models stay. A miss
  // costs O(n log n) for n models on the device. Errors: NOT_FOUND; DEVICE_OUT_OF_MEMORY if it does not fit
  // beside the pinned ones (the request still counts, nothing else changes).
  base::Result<Decision> request(ModelId model, uint64_t now_ns);

  // There is less room than expected, because others use the device too. Makes at least `bytes` more by dropping models
  // that are neither pinned nor `keep`, and counts them as dropped. Empty if there is none to drop.
  std::vector<ModelId> shed(uint64_t bytes, ModelId keep, uint64_t now_ns);
  // The model is not on the device any more, or did not get there. Errors: NOT_FOUND; INVALID_STATE while it is pinned.
  base::Status drop(ModelId model);

  // A pinned model is not dropped: it executes, or is on its way. Pins nest. Errors: NOT_FOUND; INVALID_STATE
  // (not on the device; not pinned).
  base::Status pin(ModelId model);
  base::Status unpin(ModelId model);

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
    uint64_t turn = 0;  // of the last request: breaks ties of time
    uint32_t pins = 0;
    bool resident = false;
  };
  struct Candidate {
    ModelId id;
    uint64_t bytes;
    uint64_t turn;
    double worth;
  };
  double requests_of(const Model& model, uint64_t now_ns) const;
  double worth_of(const Model& model, uint64_t now_ns) const;
  std::vector<ModelId> choose(std::vector<Candidate> candidates, uint64_t room_bytes) const;

  const uint64_t capacity_bytes_;
  const ResidencyPolicy policy_;
  const uint64_t half_life_ns_;
  std::unordered_map<ModelId, Model> models_;
  uint64_t resident_bytes_ = 0;
  uint64_t now_ns_ = 0;
  uint64_t turns_ = 0;
};

}  // namespace gpushare::sched
