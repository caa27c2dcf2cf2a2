// SPDX-License-Identifier: Apache-2.0
#include "memory/plan_solver.hpp"

#include <exception>
#include <utility>

#include "base/no_signals.hpp"

namespace gpushare::memory {

PlanSolver::~PlanSolver() {
  {
    base::MutexLock lock(mutex_);
    stop_ = true;
    tasks_.clear();
    if (current_ != nullptr) current_->abandoned = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void PlanSolver::solve(const std::shared_ptr<PlanTask>& task) noexcept {
  if (in_place_) {
    finish(*task);
    return;
  }
  try {
    base::MutexLock lock(mutex_);
    if (!thread_.joinable()) {
      const base::NoSignals no_signals;
      thread_ = std::thread([this] { run(); });
    }
    tasks_.push_back(task);
    changed_.notify_all();
  } catch (const std::exception&) {
    task->done.store(true, std::memory_order_release);
  }
}

void PlanSolver::run() noexcept {
  base::MutexLock lock(mutex_);
  for (;;) {
    while (tasks_.empty() && !stop_) changed_.wait(mutex_);
    if (stop_) return;
    current_ = std::move(tasks_.front());
    tasks_.pop_front();
    const std::shared_ptr<PlanTask> task = current_;
    lock.unlock();
    finish(*task);
    lock.lock();
    current_.reset();
  }
}

void PlanSolver::finish(PlanTask& task) noexcept {
  try {
    auto solved = task.recorder.finish(kWorkLimit, {}, &task.abandoned);
    if (solved.ok()) task.plan = std::move(*solved);
    task.recorder.clear();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): no host memory for it: no plan
  }
  task.done.store(true, std::memory_order_release);
}

}  // namespace gpushare::memory
