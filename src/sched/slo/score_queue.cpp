// SPDX-License-Identifier: Apache-2.0
#include "sched/slo/score_queue.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>
#include <utility>

#include <absl/container/btree_set.h>

namespace gpushare::sched::slo {
namespace {

double slack_of(uint64_t deadline_ns, uint64_t now_ns) {
  return deadline_ns >= now_ns ? static_cast<double>(deadline_ns - now_ns)
                               : -static_cast<double>(now_ns - deadline_ns);
}

// now + slack, kept inside the range of the clock.
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
template <class Item>
ScoreQueue::Handle unused(std::vector<Item>& items, std::vector<ScoreQueue::Handle>& free) {
  if (free.empty()) {
    items.emplace_back();
    return static_cast<ScoreQueue::Handle>(items.size() - 1);
  }
  const ScoreQueue::Handle handle = free.back();
  free.pop_back();
  return handle;
}

class SlackIndex final : public ScoreQueue {
 public:
  base::Result<ClassId> add_class(const ScoreCurve& curve) override {
    classes_.push_back({curve, {}});
    return static_cast<ClassId>(classes_.size() - 1);
  }
  base::Status set_curve(ClassId of, const ScoreCurve& curve) override {
    if (of >= classes_.size())
      return base::Status(GPUSHARE_INVALID_ARGUMENT,
                          base::format("score class %u of %zu", of, classes_.size()));
    classes_[of].curve = curve;
    return base::ok_status();
  }
  Handle insert(ClassId of, uint64_t deadline_ns, uint64_t id) override {
    if (of >= classes_.size()) return kNoHandle;
    const Handle handle = unused(items_, free_);
    items_[handle] = {deadline_ns, id, of};
    classes_[of].by_deadline.emplace(deadline_ns, handle);
    ++size_;
    return handle;
  }
  bool erase(Handle handle) override {
    if (handle >= items_.size() || items_[handle].of == kFree) return false;
    Item& item = items_[handle];
    classes_[item.of].by_deadline.erase({item.deadline_ns, handle});
    item.of = kFree;
    free_.push_back(handle);
    --size_;
    return true;
  }
  std::optional<Best> best(uint64_t now_ns) override {
    std::optional<Best> best;
    for (Class& of : classes_) {
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
  size_t size() const override { return size_; }

 private:
  static constexpr ClassId kFree = static_cast<ClassId>(-1);
  struct Item {
    uint64_t deadline_ns = 0;
    uint64_t id = 0;
    ClassId of = kFree;
  };
  struct Class {
    ScoreCurve curve;
    absl::btree_set<std::pair<uint64_t, Handle>> by_deadline;
  };
  std::vector<Class> classes_;
  std::vector<Item> items_;
  std::vector<Handle> free_;
  size_t size_ = 0;
};

class PointScores final : public ScoreQueue {
 public:
  explicit PointScores(PointBackend backend) : points_(make_point_queue(backend)) {}

  base::Result<ClassId> add_class(const ScoreCurve& curve) override {
    GPUSHARE_RETURN_IF_ERROR(accept(curve));
    curves_.push_back(curve);
    return static_cast<ClassId>(curves_.size() - 1);
  }
  base::Status set_curve(ClassId of, const ScoreCurve& curve) override {
    if (of >= curves_.size())
      return base::Status(GPUSHARE_INVALID_ARGUMENT,
                          base::format("score class %u of %zu", of, curves_.size()));
    GPUSHARE_RETURN_IF_ERROR(accept(curve));
    curves_[of] = curve;
    for (Handle handle = 0; handle < items_.size(); ++handle)
      if (items_[handle].live && items_[handle].of == of) replace(handle, last_ns_);
    return base::ok_status();
  }
  Handle insert(ClassId of, uint64_t deadline_ns, uint64_t id) override {
    if (of >= curves_.size()) return kNoHandle;
    const Handle handle = unused(items_, free_);
    Item& item = items_[handle];
    item.deadline_ns = deadline_ns;
    item.id = id;
    item.of = of;
    item.live = true;
    place(handle, last_ns_);
    ++size_;
    return handle;
  }
  bool erase(Handle handle) override {
    if (handle >= items_.size() || !items_[handle].live) return false;
    items_[handle].live = false;
    ++items_[handle].placed;  // its milestone in the heap is void
    points_->erase(items_[handle].point);
    free_.push_back(handle);
    --size_;
    return true;
  }
  std::optional<Best> best(uint64_t now_ns) override {
    if (size_ == 0) {
      milestones_ = {};
      base_ns_ = last_ns_ = now_ns;
      return std::nullopt;
    }
    const double grown = delay_rate_ * slack_of(now_ns, base_ns_);
    if (now_ns < last_ns_ || grown > kMostGrowth || grown < 0) {
      // Time went back, or the base is too far behind: place all anew.
      base_ns_ = last_ns_ = now_ns;
      milestones_ = {};
      points_->clear();
      for (Handle handle = 0; handle < items_.size(); ++handle)
        if (items_[handle].live) place(handle, now_ns);
    }
    last_ns_ = now_ns;
    while (!milestones_.empty() && milestones_.top().at_ns < now_ns) {
      const Milestone due = milestones_.top();
      milestones_.pop();
      if (items_[due.handle].placed == due.placed) replace(due.handle, now_ns);
    }
    // Milestones of requests long gone must not pile up.
    if (milestones_.size() > 4 * size_ + 1024) {
      std::vector<Milestone> valid;
      for (; !milestones_.empty(); milestones_.pop())
        if (items_[milestones_.top().handle].placed == milestones_.top().placed)
          valid.push_back(milestones_.top());
      milestones_ = decltype(milestones_)(std::greater<>(), std::move(valid));
    }
    const auto top = points_->best(std::exp(delay_rate_ * slack_of(now_ns, base_ns_)));
    if (!top) return std::nullopt;
    const Handle handle = static_cast<Handle>(top->id);
    return Best{handle, items_[handle].id, top->value};
  }
  size_t size() const override { return size_; }

 private:
  static constexpr double kMostGrowth = 200;  // e^200 = 2^288
  struct Item {
    uint64_t deadline_ns = 0;
    uint64_t id = 0;
    ClassId of = 0;
    PointQueue::Handle point = PointQueue::kNoHandle;
    uint32_t placed = 0;
    bool live = false;
  };
  struct Milestone {
    uint64_t at_ns;
    Handle handle;
    uint32_t placed;
    bool operator>(const Milestone& other) const { return at_ns > other.at_ns; }
  };
  base::Status accept(const ScoreCurve& curve) {
    if (curve.empty()) return base::ok_status();
    if (delay_rate_ == 0) delay_rate_ = curve.delay_rate();
    if (curve.delay_rate() == delay_rate_) return accept_scale(curve);
    return base::Status(
        GPUSHARE_UNSUPPORTED,
        base::format(
            "a point back end has one delay rate, %g/ns; the new curve has %g/ns: use the slack index",
            delay_rate_, curve.delay_rate()));
  }
  // Points are compared by sums of their coordinates: beside a score a million million times as great, another is lost in the
  // rounding.
  base::Status accept_scale(const ScoreCurve& curve) {
    constexpr double kMostApart = 1e6;
    double peak = 0;
    for (const ScoreCurve::Piece& piece : curve.pieces()) peak = std::max(peak, piece.value);
    const double least = std::min(least_peak_, peak), most = std::max(most_peak_, peak);
    if (most > kMostApart * least)
      return base::Status(
          GPUSHARE_UNSUPPORTED,
          base::format("a point back end compares scores up to %g times apart; with the new curve "
                       "they reach from %g to %g: use the slack index",
                       kMostApart, least, most));
    least_peak_ = least;
    most_peak_ = most;
    return base::ok_status();
  }
  void replace(Handle handle, uint64_t now_ns) {
    points_->erase(items_[handle].point);
    place(handle, now_ns);
  }
  void place(Handle handle, uint64_t now_ns) {
    Item& item = items_[handle];
    ++item.placed;
    const ScoreCurve& curve = curves_[item.of];
    const double slack = slack_of(item.deadline_ns, now_ns);
    const size_t in = curve.piece_at(slack);
    if (in == SIZE_MAX) {
      item.point = points_->insert(0, 0, handle);
      return;
    }
    const ScoreCurve::Piece& piece = curve.pieces()[in];
    const double alpha = (piece.value - piece.asymptote) *
                         std::exp(-delay_rate_ * (slack - piece.start_ns + slack_of(now_ns, base_ns_)));
    item.point = points_->insert(alpha, piece.asymptote, handle);
    milestones_.push({deadline_at(item.deadline_ns, -piece.start_ns), handle, item.placed});
  }

  std::unique_ptr<PointQueue> points_;
  std::vector<ScoreCurve> curves_;
  std::vector<Item> items_;
  std::vector<Handle> free_;
  std::priority_queue<Milestone, std::vector<Milestone>, std::greater<>> milestones_;
  double delay_rate_ = 0;
  double least_peak_ = std::numeric_limits<double>::infinity(), most_peak_ = 0;  // of the curves so far
  uint64_t base_ns_ = 0;
  uint64_t last_ns_ = 0;
  size_t size_ = 0;
};

}  // namespace

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

std::unique_ptr<ScoreQueue> make_score_queue(ScoreBackend backend) {
  switch (backend) {
    case ScoreBackend::kAutomaticPoints:
      return std::make_unique<PointScores>(PointBackend::kAutomatic);
    case ScoreBackend::kScan:
      return std::make_unique<PointScores>(PointBackend::kScan);
    case ScoreBackend::kKinetic:
      return std::make_unique<PointScores>(PointBackend::kKinetic);
    case ScoreBackend::kHull:
      return std::make_unique<PointScores>(PointBackend::kHull);
    case ScoreBackend::kAutomatic:
    case ScoreBackend::kSlackIndex:
      break;
  }
  return std::make_unique<SlackIndex>();
}

}  // namespace gpushare::sched::slo
