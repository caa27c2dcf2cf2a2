// SPDX-License-Identifier: Apache-2.0
#include "sched/residency.hpp"

#include <algorithm>
#include <cmath>

namespace gpushare::sched {

void Residency::add(ModelId model, uint64_t bytes, uint64_t load_ns) {
  Model entry;
  entry.bytes = bytes;
  entry.load_ns = load_ns;
  models_.emplace(model, entry);
}

void Residency::request(ModelId id, uint64_t now_ns) {
  const auto entry = models_.find(id);
  if (entry == models_.end()) return;
  now_ns_ = std::max(now_ns_, now_ns);
  Model& model = entry->second;
  model.requests = requests_of(model, now_ns_) + 1;
  model.last_ns = now_ns_;
  model.turn = ++turns_;
  if (model.resident) return;
  model.resident = true;
  resident_bytes_ += model.bytes;
}

std::vector<ModelId> Residency::shed(uint64_t bytes, ModelId keep, uint64_t now_ns) {
  now_ns_ = std::max(now_ns_, now_ns);
  std::vector<std::pair<ModelId, const Model*>> candidates;
  for (const auto& [id, model] : models_)
    if (model.resident && id != keep && model.bytes > 0) candidates.emplace_back(id, &model);
  std::sort(candidates.begin(), candidates.end(),
            [](const auto& a, const auto& b) { return a.second->turn < b.second->turn; });
  // Least recently used is the order of ranks: a model goes only if all that were requested longer ago do not do.
  const bool by_turn = policy_ == ResidencyPolicy::kLeastRecentlyUsed;
  std::vector<Claim> claims;
  for (const auto& [id, model] : candidates)
    claims.push_back(
        {model->bytes, by_turn ? static_cast<uint32_t>(claims.size()) : 0, worth_of(*model, now_ns_)});
  const std::vector<uint64_t> given = give_up(claims, std::max<uint64_t>(bytes, 1));
  std::vector<ModelId> drops;
  for (size_t i = 0; i < given.size(); ++i)
    if (given[i] > 0) drops.push_back(candidates[i].first);
  for (const ModelId id : drops) drop(id);
  return drops;
}

void Residency::drop(ModelId id) {
  const auto entry = models_.find(id);
  if (entry == models_.end() || !entry->second.resident) return;
  entry->second.resident = false;
  resident_bytes_ -= entry->second.bytes;
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
