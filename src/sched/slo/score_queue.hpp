// score_queue.hpp: pending requests, asked for the one with the greatest score now. A request is a deadline
// and a class, the class a ScoreCurve (one for each application, model and batch size). Back ends behind one
// interface:
//   slack index  a class keeps its requests by deadline. A score depends on the slack alone, so the best request of
//                a class stands at the end of one of the curve's rising or falling runs: a few searches, no
//                milestones, no exponentials of time, so nothing degrades with uptime and time may go back. The
//                default.
//   points       a PointQueue (scan, kinetic, hull or automatic): the request is alpha e^{b (t - base)} + beta until
//                its slack reaches the next bin edge (a milestone), then another point (Orloj, 000, 4.4.4). The base
//                moves before e^{b t} grows past 2^300.
// All give the same answer up to rounding. Among equal scores any may come.
//
// Threads: none of its own; the owner serialises calls. Times are nanoseconds on any clock; they may stand
// still or go back.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/status.hpp"
#include "sched/slo/point_queue.hpp"
#include "sched/slo/score.hpp"

namespace gpushare::sched::slo {

enum class ScoreBackend : uint32_t { kAutomatic = 0, kSlackIndex, kScan, kKinetic, kHull, kAutomaticPoints };

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

  virtual ~ScoreQueue() = default;
  // A new class; its curve may be replaced at any time (O(its requests) for the point back ends). Errors:
  // INVALID_ARGUMENT for a class that was never added; UNSUPPORTED when a point back end is given a delay
  // rate other than the first curve's.
  virtual base::Result<ClassId> add_class(const ScoreCurve& curve) = 0;
  virtual base::Status set_curve(ClassId of, const ScoreCurve& curve) = 0;
  // kNoHandle if the class was never added.
  virtual Handle insert(ClassId of, uint64_t deadline_ns, uint64_t id) = 0;
  virtual bool erase(Handle handle) = 0;
  virtual std::optional<Best> best(uint64_t now_ns) = 0;
  virtual size_t size() const = 0;
  size_t pop(uint64_t now_ns, size_t count, std::vector<uint64_t>& out);
};

std::unique_ptr<ScoreQueue> make_score_queue(ScoreBackend backend = ScoreBackend::kAutomatic);

}  // namespace gpushare::sched::slo
