// SPDX-License-Identifier: Apache-2.0
#include "sched/residency.hpp"

#include <algorithm>
#include <cmath>

namespace gpushare::sched {
namespace {

base::Status unknown(ModelId model) {
  return {GPUSHARE_NOT_FOUND,
          base::format("model %llu is not known; add it first", static_cast<unsigned long long>(model))};
}

base::Status wrong_state(ModelId model, const char* what) {
  return {GPUSHARE_INVALID_STATE,
          base::format("model %llu %s", static_cast<unsigned long long>(model), what)};
}

}  // namespace

base::Status Residency::add(ModelId model, uint64_t bytes, uint64_t load_ns) {
  if (bytes > capacity_bytes_)
    return {GPUSHARE_INVALID_ARGUMENT,
            base::format("model %llu has %llu bytes, models may have %llu on the device together",
                         static_cast<unsigned long long>(model), static_cast<unsigned long long>(bytes),
                         static_cast<unsigned long long>(capacity_bytes_))};
  Model entry;
  entry.bytes = bytes;
  entry.load_ns = load_ns;
  if (!models_.emplace(model, entry).second)
    return {GPUSHARE_ALREADY_EXISTS,
            base::format("model %llu is known already", static_cast<unsigned long long>(model))};
  return {};
}

base::Status Residency::remove(ModelId model) {
  const auto entry = models_.find(model);
  if (entry == models_.end()) return unknown(model);
  if (entry->second.pins > 0) return wrong_state(model, "is pinned; unpin it first");
  if (entry->second.resident) resident_bytes_ -= entry->second.bytes;
  models_.erase(entry);
  return {};
}

base::Result<Residency::Decision> Residency::request(ModelId id, uint64_t now_ns) {
  const auto entry = models_.find(id);
  if (entry == models_.end()) return unknown(id);
  now_ns_ = std::max(now_ns_, now_ns);
  Model& model = entry->second;
  const double halvings = static_cast<double>(now_ns_ - model.last_ns) / static_cast<double>(half_life_ns_);
  model.requests = (half_life_ns_ == 0 ? 0 : model.requests * std::exp2(-halvings)) + 1;
  model.last_ns = now_ns_;
  model.turn = ++turns_;
  Decision decision;
  if (model.resident) return decision;

  decision.load = true;
  const uint64_t free_bytes = capacity_bytes_ - resident_bytes_;
  if (model.bytes > free_bytes) {
    uint64_t droppable_bytes = 0;
    std::vector<Candidate> candidates;
    for (const auto& [other_id, other] : models_) {
      if (!other.resident || other.pins > 0) continue;
      candidates.push_back({other_id, other.bytes, other.turn, worth_of(other, now_ns_)});
      droppable_bytes += other.bytes;
    }
    if (model.bytes - free_bytes > droppable_bytes)
      return base::Status(
          GPUSHARE_DEVICE_OUT_OF_MEMORY,
          base::format("model %llu has %llu bytes; %llu are free and %llu in models that are not pinned",
                       static_cast<unsigned long long>(id), static_cast<unsigned long long>(model.bytes),
                       static_cast<unsigned long long>(free_bytes),
                       static_cast<unsigned long long>(droppable_bytes)));
    decision.drops = choose(std::move(candidates), model.bytes - free_bytes);
    for (const ModelId dropped : decision.drops) {
      Model& other = models_.at(dropped);
      other.resident = false;
      resident_bytes_ -= other.bytes;
    }
  }
  model.resident = true;
  resident_bytes_ += model.bytes;
  return decision;
}

// Candidates together have `room_bytes` or more; room_bytes is above 0.
std::vector<ModelId> Residency::choose(std::vector<Candidate> candidates, uint64_t room_bytes) const {
  std::sort(candidates.begin(), candidates.end(),
            [](const Candidate& a, const Candidate& b) { return a.turn < b.turn; });
  // Least recently used is the order of ranks: a model goes only if all that were requested longer ago do not do.
  const bool by_turn = policy_ == ResidencyPolicy::kLeastRecentlyUsed;
  std::vector<Claim> claims;
  claims.reserve(candidates.size());
  for (const Candidate& candidate : candidates)
    claims.push_back({candidate.bytes, by_turn ? static_cast<uint32_t>(claims.size()) : 0, candidate.worth});
  std::vector<ModelId> drops;
  for (const size_t index : choose_claims(claims, room_bytes)) drops.push_back(candidates[index].id);
  return drops;
}

std::vector<ModelId> Residency::shed(uint64_t bytes, ModelId keep, uint64_t now_ns) {
  now_ns_ = std::max(now_ns_, now_ns);
  uint64_t droppable_bytes = 0;
  std::vector<Candidate> candidates;
  for (const auto& [id, model] : models_) {
    if (!model.resident || model.pins > 0 || id == keep || model.bytes == 0) continue;
    candidates.push_back({id, model.bytes, model.turn, worth_of(model, now_ns_)});
    droppable_bytes += model.bytes;
  }
  if (candidates.empty()) return {};
  std::vector<ModelId> drops =
      choose(std::move(candidates), std::min(std::max<uint64_t>(bytes, 1), droppable_bytes));
  for (const ModelId id : drops) (void)drop(id);
  return drops;
}

base::Status Residency::drop(ModelId id) {
  const auto entry = models_.find(id);
  if (entry == models_.end()) return unknown(id);
  if (entry->second.pins > 0) return wrong_state(id, "is pinned; unpin it first");
  if (entry->second.resident) resident_bytes_ -= entry->second.bytes;
  entry->second.resident = false;
  return {};
}

base::Status Residency::pin(ModelId model) {
  const auto entry = models_.find(model);
  if (entry == models_.end()) return unknown(model);
  if (!entry->second.resident) return wrong_state(model, "is not on the device; request it first");
  ++entry->second.pins;
  return {};
}

base::Status Residency::unpin(ModelId model) {
  const auto entry = models_.find(model);
  if (entry == models_.end()) return unknown(model);
  if (entry->second.pins == 0) return wrong_state(model, "is not pinned");
  --entry->second.pins;
  return {};
}

bool Residency::resident(ModelId model) const {
  const auto entry = models_.find(model);
  return entry != models_.end() && entry->second.resident;
}

double Residency::worth(ModelId model, uint64_t now_ns) const {
  const auto entry = models_.find(model);
  if (entry == models_.end()) return 0;
  if (policy_ == ResidencyPolicy::kWeighted) return worth_of(entry->second, std::max(now_ns, now_ns_));
  const auto since = std::count_if(models_.begin(), models_.end(),
                                   [&](const auto& other) { return other.second.turn > entry->second.turn; });
  return std::ldexp(static_cast<double>(entry->second.load_ns), -static_cast<int>(since));
}

double Residency::requests(ModelId model, uint64_t now_ns) const {
  const auto entry = models_.find(model);
  return entry == models_.end() ? 0 : requests_of(entry->second, std::max(now_ns, now_ns_));
}

double Residency::requests_of(const Model& model, uint64_t now_ns) const {
  if (half_life_ns_ == 0) return 0;
  const double halvings = static_cast<double>(now_ns - model.last_ns) / static_cast<double>(half_life_ns_);
  return model.requests * std::exp2(-halvings);
}

double Residency::worth_of(const Model& model, uint64_t now_ns) const {
  return requests_of(model, now_ns) * static_cast<double>(model.load_ns);
}

}  // namespace gpushare::sched
