// SPDX-License-Identifier: Apache-2.0
#include "sim/interference.hpp"

#include <algorithm>

namespace gpushare::sim {

size_t InterferenceTable::find(std::string_view config) const {
  const auto found = index_.find(config);
  return found == index_.end() ? kNone : found->second;
}

std::vector<std::string> InterferenceTable::names() const {
  std::vector<std::string> out(alone_.size());
  for (const auto& [name, index] : index_) out[index] = name;
  return out;
}

InterferenceModel::InterferenceModel(std::span<const Job> jobs, const InterferenceTable* table) {
  entries_.reserve(jobs.size());
  for (const Job& job : jobs) {
    Entry entry;
    entry.demand = job.demand > 0 ? std::min(job.demand, 1.0) : kDefaultDemand;
    if (table != nullptr && !job.config.empty()) entry.config = table->find(job.config);
    if (entry.config != InterferenceTable::kNone) ++in_table_;
    entries_.push_back(entry);
  }
  if (table == nullptr) return;
  configs_ = table->size();
  pairs_.resize(configs_ * configs_);
  for (size_t i = 0; i < configs_; ++i)
    for (size_t j = 0; j < configs_; ++j) pairs_[i * configs_ + j] = table->pair_rate(i, j);
}

double InterferenceModel::rate(sched::SessionId session, std::span<const sched::SessionId> beside) const {
  if (session == 0 || session > entries_.size()) return 1;
  const Entry& entry = entries_[session - 1];
  double demand = entry.demand, measured = 0;
  for (const sched::SessionId id : beside) {
    if (id == 0 || id > entries_.size()) continue;
    const Entry& other = entries_[id - 1];
    double pair = 0;
    if (entry.config != InterferenceTable::kNone && other.config != InterferenceTable::kNone)
      pair = pairs_[entry.config * configs_ + other.config];
    if (pair > 0)
      measured += 1 / pair - 1;
    else
      demand += other.demand;
  }
  return 1 / (std::max(1.0, demand) + measured);
}

}  // namespace gpushare::sim
