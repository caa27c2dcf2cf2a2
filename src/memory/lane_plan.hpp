// lane_plan.hpp: when a session's iterations are recorded, when their placement is solved, and when the plan
// is given up. Training repeats itself: the first iteration whose calls equal those of the one before is
// handed to the solver's thread (plan_solver.hpp) at its boundary. Iterations go on unplanned and unrecorded until one
// begins after the plan was done; from that one on they replay it (plan.hpp) until they deviate too often.
//
// Solving is bounded by kMaxBlocks blocks and PlanSolver::kWorkLimit comparisons; iterations with more blocks are
// not planned. A session that does not repeat itself is left alone for longer and longer.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "base/flat_hash.hpp"
#include "memory/plan_solver.hpp"

namespace gpushare::memory {

// Planning state of one session. The lane that runs the session's iteration guards it; between iterations
// nobody uses it.
class LanePlan {
 public:
  static constexpr uint32_t kMaxBlocks = 65536;

  LanePlan() = default;
  LanePlan(LanePlan&&) = default;
  LanePlan& operator=(LanePlan&&) = default;
  ~LanePlan() { abandon(); }

  void reset() {
    abandon();
    *this = LanePlan();
  }

  // The plan to replay, or null; then the iteration may be recorded: see recording().
  std::shared_ptr<const Plan> begin() {
    recording_ = false;
    if (task_ != nullptr) {
      if (!task_->done.load(std::memory_order_acquire)) return nullptr;
      plan_ = std::move(task_->plan);
      task_.reset();
      if (plan_ == nullptr) rest();
    }
    if (plan_ != nullptr) return plan_;
    if (rest_ > 0) --rest_;
    recording_ = rest_ == 0;
    recorder_.clear();
    live_.clear();
    blocks_ = 0;
    fingerprint_ = kSeed;
    return nullptr;
  }
  bool recording() const { return recording_; }
  void allocated(uint64_t bytes, uint64_t alignment_bytes, uint64_t offset_bytes) {
    if (++blocks_ > kMaxBlocks) {
      rest();
      return;
    }
    live_[offset_bytes] = recorder_.allocate(bytes, alignment_bytes, offset_bytes);
    mix(bytes * 4 + 1);
    mix(alignment_bytes);
  }
  // Ignores blocks of earlier iterations.
  void freed(uint64_t offset_bytes) {
    const auto found = live_.find(offset_bytes);
    if (found == live_.end()) return;
    recorder_.free(found->second);
    mix(uint64_t{found->second} * 4 + 2);
    live_.erase(found);
  }
  // The iteration was recorded to its end: has it solved if it repeated the one before.
  void end_recording(PlanSolver& solver) {
    recording_ = false;
    live_.clear();
    if (blocks_ > 0 && fingerprint_ == last_fingerprint_) {
      task_ = std::make_shared<PlanTask>(std::exchange(recorder_, PlanRecorder()));
      solver.solve(task_);
      last_fingerprint_ = 0;
      tries_ = 0;
      return;
    }
    last_fingerprint_ = fingerprint_;
    if (++tries_ >= kTries) rest();
  }
  // An iteration that began on the plan: did it stay on it to the end?
  void end_replay(bool stayed) {
    if (stayed) {
      misses_ = 0;
      return;
    }
    if (++misses_ < kMisses) return;
    plan_.reset();
    misses_ = 0;
    rest();
  }

 private:
  static constexpr uint64_t kSeed = 0x9E3779B97F4A7C15u;
  static constexpr uint32_t kTries = 8;       // recordings without a repetition
  static constexpr uint32_t kMisses = 4;      // deviations in a row
  static constexpr uint32_t kMaxRest = 1024;  // iterations

  void abandon() {
    if (task_ != nullptr) task_->abandoned = true;
  }
  void mix(uint64_t value) {
    fingerprint_ ^= value;
    fingerprint_ *= 0xFF51AFD7ED558CCDu;
    fingerprint_ ^= fingerprint_ >> 32;
  }
  void rest() {
    recording_ = false;
    recorder_.clear();
    live_.clear();
    tries_ = 0;
    last_fingerprint_ = 0;
    rest_ = next_rest_;
    next_rest_ = next_rest_ * 2 > kMaxRest ? kMaxRest : next_rest_ * 2;
  }

  std::shared_ptr<const Plan> plan_;
  std::shared_ptr<PlanTask> task_;  // until its plan is taken over
  PlanRecorder recorder_;
  base::FlatHashMap<uint64_t, uint32_t> live_;  // offset -> the recorder's block
  uint64_t fingerprint_ = 0;
  uint64_t last_fingerprint_ = 0;  // 0: none
  bool recording_ = false;
  uint32_t blocks_ = 0;
  uint32_t tries_ = 0;
  uint32_t misses_ = 0;
  uint32_t rest_ = 0;
  uint32_t next_rest_ = 16;
};

}  // namespace gpushare::memory
