// plan_solver.hpp: places recorded iterations on a thread of its own, so that no iteration waits for a solver that may
// take seconds (plan.hpp). The thread is memory's only one; it starts with the first task and ends with the solver.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <thread>

#include "base/mutex.hpp"
#include "memory/plan.hpp"

namespace gpushare::memory {

// A recorded iteration whose placement is to be solved. The requester keeps the task and polls `done`.
struct PlanTask {
  explicit PlanTask(PlanRecorder of) : recorder(std::move(of)) {}
  PlanRecorder recorder;               // the solver's until the task is done
  std::atomic<bool> abandoned{false};  // set by whoever asked: nobody wants the plan any more
  std::atomic<bool> done{false};
  std::shared_ptr<const Plan> plan;  // read it once `done`; null if there is none
};

// Thread-safe.
class PlanSolver {
 public:
  // Effort for one task, in comparisons of two blocks: seconds of one core at most.
  static constexpr uint64_t kWorkLimit = 1'000'000'000;

  // `in_place`: solve() solves at once on the caller's thread. For devices with virtual time, whose runs repeat exactly.
  explicit PlanSolver(bool in_place) : in_place_(in_place) {}
  // Abandons unfinished tasks, and waits for the thread: milliseconds.
  ~PlanSolver();
  PlanSolver(const PlanSolver&) = delete;
  PlanSolver& operator=(const PlanSolver&) = delete;

  // Does not wait, unless solved in place. A task that cannot be queued, because host memory or a thread is missing, is done
  // at once and has no plan.
  void solve(const std::shared_ptr<PlanTask>& task) noexcept;

 private:
  void run() noexcept;
  static void finish(PlanTask& task) noexcept;

  const bool in_place_;
  base::Mutex mutex_;
  base::ConditionVariable changed_;
  std::deque<std::shared_ptr<PlanTask>> tasks_ GPUSHARE_GUARDED_BY(mutex_);
  std::shared_ptr<PlanTask> current_ GPUSHARE_GUARDED_BY(mutex_);  // being solved
  bool stop_ GPUSHARE_GUARDED_BY(mutex_) = false;
  std::thread thread_ GPUSHARE_GUARDED_BY(mutex_);
};

}  // namespace gpushare::memory
