// SPDX-License-Identifier: Apache-2.0
#include "sched/pack_policy.hpp"

#include <algorithm>

namespace gpushare::sched {

size_t PackPolicy::pick(LaneId, std::span<const SessionView> candidates, uint64_t) {
  size_t oldest = 0;
  for (size_t i = 1; i < candidates.size(); ++i)
    if (candidates[i].id < candidates[oldest].id) oldest = i;
  if (interference_ == nullptr) return oldest;
  const auto& running = together();
  // A session that is not its lane's head may stand in for it (the head has nothing ready).
  for (const auto& [lane, sessions] : lanes_) {
    if (!sessions.contains(candidates[oldest].id)) continue;
    return std::find(running.begin(), running.end(), *sessions.begin()) != running.end() ? oldest : kIdle;
  }
  return oldest;
}

bool PackPolicy::welcomes(const SessionView& waiting) const {
  if (interference_ == nullptr) return true;
  std::vector<SessionId> with = together();
  with.push_back(waiting.id);
  return total_rate(with) >= together_rate_ * (1 + kLeastGain);
}

void PackPolicy::set_interference(const std::shared_ptr<const Interference>& interference) {
  interference_ = interference;
  stale_ = true;
}

void PackPolicy::admitted(const SessionView& view, LaneId lane, uint64_t) {
  lanes_[lane].insert(view.id);
  stale_ = true;
}

void PackPolicy::paged_out(SessionId session, LaneId, uint64_t now_ns) {
  left(session, now_ns);
}

void PackPolicy::left(SessionId session, uint64_t) {
  for (auto lane = lanes_.begin(); lane != lanes_.end(); ++lane) {
    if (lane->second.erase(session) == 0) continue;
    if (lane->second.empty()) lanes_.erase(lane);
    break;
  }
  stale_ = true;
}

const std::vector<SessionId>& PackPolicy::together() const {
  if (!stale_) return together_;
  std::vector<SessionId> heads;
  heads.reserve(lanes_.size());
  for (const auto& [lane, sessions] : lanes_) heads.push_back(*sessions.begin());
  std::sort(heads.begin(), heads.end());
  together_.clear();
  together_rate_ = 0;
  for (const SessionId head : heads) {
    together_.push_back(head);
    const double rate = total_rate(together_);
    if (together_.size() == 1 || rate >= together_rate_ * (1 + kLeastGain))
      together_rate_ = rate;
    else
      together_.pop_back();
  }
  stale_ = false;
  return together_;
}

double PackPolicy::total_rate(const std::vector<SessionId>& sessions) const {
  double total = 0;
  std::vector<SessionId> beside;
  for (size_t i = 0; i < sessions.size(); ++i) {
    beside = sessions;
    beside.erase(beside.begin() + static_cast<std::ptrdiff_t>(i));
    total += interference_->rate(sessions[i], beside);
  }
  return total;
}

}  // namespace gpushare::sched
