// SPDX-License-Identifier: Apache-2.0
#include "sched/slo/score_queue.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

namespace gpushare::sched::slo {

double slack_of(uint64_t deadline_ns, uint64_t now_ns) {
  return deadline_ns >= now_ns ? static_cast<double>(deadline_ns - now_ns)
                               : -static_cast<double>(now_ns - deadline_ns);
}

uint64_t deadline_at(uint64_t now_ns, double slack_ns) {
  const double limit = 9.2e18;
  if (slack_ns <= -limit) return 0;
  if (slack_ns >= limit) return std::numeric_limits<uint64_t>::max();
  const double whole = std::ceil(slack_ns);
  if (whole >= 0) {
    const uint64_t ahead = static_cast<uint64_t>(whole);
    return now_ns > std::numeric_limits<uint64_t>::max() - ahead ? std::numeric_limits<uint64_t>::max()
                                                                 : now_ns + ahead;
  }
  const uint64_t behind = static_cast<uint64_t>(-whole);
  return now_ns < behind ? 0 : now_ns - behind;
}

// The handle of an item that nobody has: the one freed last, or a new one.
ScoreQueue::Handle ScoreQueue::unused() {
  if (free_.empty()) {
    items_.emplace_back();
    return static_cast<Handle>(items_.size() - 1);
  }
  const Handle handle = free_.back();
  free_.pop_back();
  return handle;
}

ScoreQueue::ClassId ScoreQueue::add_class(const ScoreCurve& curve) {
  classes_.push_back({curve, {}});
  return static_cast<ClassId>(classes_.size() - 1);
}

base::Status ScoreQueue::set_curve(ClassId of, const ScoreCurve& curve) {
  if (of >= classes_.size())
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("no score class %u, there are %zu", of, classes_.size()));
  classes_[of].curve = curve;
  return base::ok_status();
}

ScoreQueue::Handle ScoreQueue::insert(ClassId of, uint64_t deadline_ns, uint64_t id) {
  if (of >= classes_.size()) return kNoHandle;
  const Handle handle = unused();
  items_[handle] = {deadline_ns, id, of};
  classes_[of].by_deadline.emplace(deadline_ns, handle);
  ++size_;
  return handle;
}

bool ScoreQueue::erase(Handle handle) {
  if (handle >= items_.size() || items_[handle].of == kFree) return false;
  Item& item = items_[handle];
  classes_[item.of].by_deadline.erase({item.deadline_ns, handle});
  item.of = kFree;
  free_.push_back(handle);
  --size_;
  return true;
}

std::optional<ScoreQueue::Best> ScoreQueue::best(uint64_t now_ns) const {
  std::optional<Best> best;
  for (const Class& of : classes_) {
    if (of.by_deadline.empty()) continue;
    const auto offer = [&](const std::pair<uint64_t, Handle>& candidate, size_t near) {
      const double score = of.curve.at_near(near, slack_of(candidate.first, now_ns));
      if (!best || score > best->score) best = Best{candidate.second, items_[candidate.second].id, score};
    };
    const auto first = of.by_deadline.begin();
    const std::span<const ScoreCurve::Run> runs = of.curve.runs();
    for (size_t i = 0; i < runs.size(); ++i) {
      // The far end of a rising run is where the next, falling, one starts: one search serves both.
      const bool rising = runs[i].rising;
      const double peak = rising ? runs[i].end_ns : runs[i].start_ns;
      const size_t near = rising && i + 1 < runs.size() ? runs[i + 1].first_piece : runs[i].first_piece;
      const auto after = of.by_deadline.lower_bound({deadline_at(now_ns, peak), 0});
      if (after != of.by_deadline.end()) offer(*after, near);
      if (!rising) continue;
      if (after != first) offer(*std::prev(after), near);
      if (i + 1 < runs.size()) ++i;
    }
    // A class that nobody can serve in time any more scores 0 throughout: its first stands for all.
    if (!best)
      best = Best{first->second, items_[first->second].id,
                  of.curve.empty() ? 0 : of.curve.at(slack_of(first->first, now_ns))};
  }
  return best;
}

size_t ScoreQueue::pop(uint64_t now_ns, size_t count, std::vector<uint64_t>& out) {
  size_t taken = 0;
  for (; taken < count; ++taken) {
    const std::optional<Best> top = best(now_ns);
    if (!top) break;
    out.push_back(top->id);
    erase(top->handle);
  }
  return taken;
}

}  // namespace gpushare::sched::slo
