// score_queue.hpp: pending requests, asked for the one with the greatest score now. A request is a deadline
// and a class, the class a ScoreCurve (one for each application, model and batch size).
//
// A class keeps its requests by deadline. A score depends on the slack alone, so the best request of a class stands at
// the end of one of the curve's rising or falling runs: a few searches, no exponentials of time, so nothing degrades
// with uptime and time may go back. Orloj's own way, requests as points on lines (000, 4.4.4), is slower at every
// length; benchmarks/reference/point_scores.hpp has it for comparison.
//
// Among equal scores any may come. Threads: none of its own; the owner serialises calls. Times are nanoseconds on any
// clock; they may stand still or go back.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <absl/container/btree_set.h>

#include "base/status.hpp"
#include "sched/slo/score.hpp"

namespace gpushare::sched::slo {

class ScoreQueue {
 public:
  using ClassId = uint32_t;
  using Handle = uint32_t;
  static constexpr Handle kNoHandle = static_cast<Handle>(-1);
  struct Best {
    Handle handle;
    uint64_t id;
    double score;
  };

  // A new class; its curve may be replaced at any time.
  ClassId add_class(const ScoreCurve& curve);
  // INVALID_ARGUMENT for a class that was never added.
  base::Status set_curve(ClassId of, const ScoreCurve& curve);
  // kNoHandle if the class was never added.
  Handle insert(ClassId of, uint64_t deadline_ns, uint64_t id);
  bool erase(Handle handle);
  std::optional<Best> best(uint64_t now_ns) const;
  size_t size() const { return size_; }
  // Takes the best `count` requests out and appends them to `out`, best first. Returns how many.
  size_t pop(uint64_t now_ns, size_t count, std::vector<uint64_t>& out);

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
  Handle unused();

  std::vector<Class> classes_;
  std::vector<Item> items_;
  std::vector<Handle> free_;
  size_t size_ = 0;
};

// The slack of a deadline, and the deadline with that slack, kept inside the range of the clock.
double slack_of(uint64_t deadline_ns, uint64_t now_ns);
uint64_t deadline_at(uint64_t now_ns, double slack_ns);

}  // namespace gpushare::sched::slo
