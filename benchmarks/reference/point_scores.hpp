// point_scores.hpp: pending requests as Orloj keeps them (000, 4.4.4), to compare sched/slo/score_queue.hpp with. A
// request is the point alpha e^{b (t - base)} + beta of a PointQueue until its slack reaches the next edge of a bin (a
// milestone), then another point. The base moves before e^{b t} grows past 2^300. All classes have one delay rate, and
// scores up to 10^6 times apart.
//
// Threads: none of its own; the owner serialises calls. Times may stand still or go back.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <queue>
#include <utility>
#include <vector>

#include "base/status.hpp"
#include "reference/point_queue.hpp"
#include "sched/slo/score_queue.hpp"

namespace gpushare::reference {

using sched::slo::deadline_at;
using sched::slo::ScoreCurve;
using sched::slo::slack_of;

class PointScores {
 public:
  using ClassId = uint32_t;
  using Handle = uint32_t;
  using Best = sched::slo::ScoreQueue::Best;
  static constexpr Handle kNoHandle = static_cast<Handle>(-1);
  explicit PointScores(PointBackend backend) : points_(make_point_queue(backend)) {}

  base::Result<ClassId> add_class(const ScoreCurve& curve) {
    GPUSHARE_RETURN_IF_ERROR(accept(curve));
    curves_.push_back(curve);
    return static_cast<ClassId>(curves_.size() - 1);
  }
  base::Status set_curve(ClassId of, const ScoreCurve& curve) {
    if (of >= curves_.size())
      return base::Status(GPUSHARE_INVALID_ARGUMENT,
                          base::format("score class %u of %zu", of, curves_.size()));
    GPUSHARE_RETURN_IF_ERROR(accept(curve));
    curves_[of] = curve;
    for (Handle handle = 0; handle < items_.size(); ++handle)
      if (items_[handle].live && items_[handle].of == of) replace(handle, last_ns_);
    return base::ok_status();
  }
  Handle insert(ClassId of, uint64_t deadline_ns, uint64_t id) {
    if (of >= curves_.size()) return kNoHandle;
    const Handle handle = unused();
    Item& item = items_[handle];
    item.deadline_ns = deadline_ns;
    item.id = id;
    item.of = of;
    item.live = true;
    place(handle, last_ns_);
    ++size_;
    return handle;
  }
  bool erase(Handle handle) {
    if (handle >= items_.size() || !items_[handle].live) return false;
    items_[handle].live = false;
    ++items_[handle].placed;  // its milestone in the heap is void
    points_->erase(items_[handle].point);
    free_.push_back(handle);
    --size_;
    return true;
  }
  std::optional<Best> best(uint64_t now_ns) {
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
  size_t size() const { return size_; }

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
  Handle unused() {
    if (free_.empty()) {
      items_.emplace_back();
      return static_cast<Handle>(items_.size() - 1);
    }
    const Handle handle = free_.back();
    free_.pop_back();
    return handle;
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

}  // namespace gpushare::reference
