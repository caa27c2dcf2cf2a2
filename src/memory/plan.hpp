// plan.hpp: placement plans. The allocations and frees of one iteration are recorded, and their placement is solved
// offline. The plan then serves later iterations in constant time while they repeat the recording; after the first
// deviation the lane's ordinary heap serves the rest. (Profile-guided placement after Sekiyama et al. 2018; the safe
// fallback is ours.)
//
//   PlanRecorder   allocate / free during one iteration, then finish() -> Plan (solves: slow, off the hot path)
//   PlanReplay     begin(plan) / allocate / free_at / end, over a lane's heap, at every later iteration
//
// Why the fallback is safe. While a plan is in force its whole arena is one live block of the heap, so the
// heap gives out no address inside it. Within the arena, blocks alive together are disjoint because the
// placement was checked, provided the calls are those recorded: the cursor compares kind, size, alignment
// and, for frees, the address, and stops at the first difference. (A free that comes earlier than recorded,
// by at most kLookahead steps, is no difference: it only leaves room unused.) At a difference, before anything else
// happens, the arena block is carved: each planned block still live becomes an ordinary live block of the
// heap at the address it already has, and everything else in the arena becomes free. From then on every call
// goes to the heap. No block moves and no address is given out twice.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.hpp"
#include "memory/heap.hpp"
#include "memory/placement.hpp"

namespace gpushare::memory {

// A call of the recorded iteration.
struct PlanStep {
  uint64_t size_bytes;       // allocation: as requested; 0: free
  uint64_t offset_bytes;     // of the block, in the arena
  uint32_t place;            // index into Plan::place_offsets
  uint32_t alignment_bytes;  // allocation: as requested
};

// Immutable once solved, so that many lanes may share one.
struct Plan {
  std::vector<PlanStep> steps;
  std::vector<uint64_t> place_offsets;  // the distinct offsets, ascending; at most one block lives at each
  uint64_t allocations = 0;             // steps that are allocations
  uint64_t arena_bytes = 0;             // a multiple of the granule
  uint64_t alignment_bytes = 0;         // of the arena itself: the largest asked for
  uint64_t lower_bound_bytes = 0;       // peak of live bytes: no placement is smaller
  const char* method = "";              // the solver's, static
};

// Records one iteration. Blocks are named by the number allocate() returns. Not thread-safe.
class PlanRecorder {
 public:
  explicit PlanRecorder(uint64_t granule_bytes = 256) : granule_bytes_(granule_bytes) {}
  // `offset_bytes`: where the online heap put it. When all blocks have one, that placement competes with the
  // solver's.
  uint32_t allocate(uint64_t size_bytes, uint64_t alignment_bytes = 0, uint64_t offset_bytes = kNoOffset);
  // `block` was returned by allocate() in this recording and not freed since: the caller's duty.
  void free(uint32_t block);
  void clear();
  size_t steps() const { return calls_.size(); }

  // Solves and checks. Seconds for tens of thousands of blocks. Blocks never freed live to the iteration's
  // end. Errors: INVALID_ARGUMENT for a size of 0, sizes that add up to 2^62, alignments that are no power of
  // two or above 2^30; CANCELLED, once `cancelled` is true, if it is given.
  base::Result<std::shared_ptr<const Plan>> finish(uint64_t work_limit = PlacementOptions().work_limit,
                                                   uint64_t exact_work_limit = 0,
                                                   const std::atomic<bool>* cancelled = nullptr) const;

  static constexpr uint64_t kNoOffset = ~uint64_t{0};

 private:
  uint64_t granule_bytes_;
  struct Call {
    uint64_t size_bytes;  // 0: free
    uint64_t online_offset_bytes;
    uint64_t alignment_bytes;
    uint32_t block;
  };
  std::vector<Call> calls_;
  uint32_t block_count_ = 0;
};

// Serves one iteration after another from a plan while it matches, and from the heap otherwise. Not
// thread-safe; belongs to the heap's owner; the heap must outlive it and index its offsets. No call blocks;
// begin() allocates host memory.
//
// A call that is the recorded one moves the cursor and does nothing else. Which blocks live is worked out from the steps
// before the cursor, and only where somebody asks.
class PlanReplay {
 public:
  explicit PlanReplay(Heap* heap) : heap_(heap) {}

  // Takes the arena out of the heap and puts the cursor at the start. Not within an iteration. False, and the
  // iteration runs on the heap, if the heap has no room for the arena in one piece or `plan` is null.
  bool begin(std::shared_ptr<const Plan> plan);
  // As Heap::allocate(). O(1) on plan. A deviation costs O(steps of the plan) once.
  BlockHandle allocate(uint64_t bytes, uint64_t alignment_bytes = 0, uint64_t tag = 0);
  // As Heap::free_at(). O(1) on plan, O(steps since the last such call) for a free that is early.
  HeapStatus free_at(uint64_t offset_bytes);
  // The cases of the two calls above that the next step of the plan serves. False: nothing has happened.
  bool allocate_next(uint64_t bytes, uint64_t alignment_bytes, uint64_t tag, uint64_t* out_offset_bytes) {
    if (next_ == stop_ || next_->size_bytes != bytes || next_->alignment_bytes != alignment_bytes ||
        bytes == 0)
      return false;
    tags_[next_->place] = tag;
    *out_offset_bytes = base_ + next_->offset_bytes;
    ++next_;
    return true;
  }
  bool free_next(uint64_t offset_bytes) {
    if (next_ == stop_ || next_->size_bytes != 0 || next_->offset_bytes != offset_bytes - base_) return false;
    ++next_;
    return true;
  }
  // Leaves the plan: planned blocks become ordinary blocks of the heap where they are. For blocks that are to
  // outlive the iteration. kOk without effect off plan; kNoRecords, and still on plan, if the heap cannot
  // name the blocks.
  HeapStatus leave();
  // Ends the iteration. On plan: every planned block is gone, the arena is free again, and the answer is
  // true. Off plan: false; all blocks are ordinary ones.
  bool end();

  bool on_plan() const { return plan_ != nullptr; }
  // Bytes of the heap that it holds; 0 off plan.
  uint64_t arena_bytes() const { return on_plan() ? plan_->arena_bytes : 0; }
  uint64_t deviations() const { return deviations_; }
  uint64_t planned_allocations() const { return planned_allocations_ + served_here(); }

  // The live planned block at `offset_bytes`, if there is one. O(log blocks), and the steps since the last such call.
  bool find(uint64_t offset_bytes, HeapBlock* out) const;
  // Calls fn(const HeapBlock&) for each live planned block in ascending offset.
  template <class Fn>
  void for_each_planned(Fn&& fn) const {
    if (!on_plan()) return;
    catch_up();
    for (size_t place = 0; place < sizes_.size(); ++place)
      if (sizes_[place] != 0) fn(block_at(place));
  }

  // BlockHandle::index of a block served by the plan: the heap does not know it.
  static constexpr uint32_t kPlannedIndex = ~0u;
  // How many steps ahead of the cursor a free is looked for.
  static constexpr size_t kLookahead = 32;

 private:
  // sizes_ are up to date.
  HeapBlock block_at(size_t place) const {
    return {base_ + plan_->place_offsets[place], sizes_[place], tags_[place], kPlannedIndex, true};
  }
  size_t cursor() const { return static_cast<size_t>(next_ - plan_->steps.data()); }
  void forget_plan();
  void
  step_on();  // the step at the cursor has been served, and so have those behind it that were freed early
  void catch_up() const;
  uint64_t served_here() const;  // allocations of this iteration
  bool holds(uint64_t offset_bytes) const { return offset_bytes - base_ < plan_->arena_bytes; }

  Heap* heap_;
  std::shared_ptr<const Plan> plan_;  // while on plan
  BlockHandle arena_;
  uint64_t base_ = 0;  // the arena's offset
  // The step at the cursor. stop_: the end of the steps; the same as next_ where the next step may not be served without
  // a look at those that were freed early, and off plan.
  const PlanStep* next_ = nullptr;
  const PlanStep* stop_ = nullptr;
  std::vector<uint64_t> tags_;  // of the last block at each place
  // If any_known_: the size of the block that lives at each place after the first known_ steps (0: no block), and how many
  // of these steps allocated (known_allocations_).
  mutable std::vector<uint64_t> sizes_;
  mutable bool any_known_ = false;
  mutable size_t known_ = 0;
  mutable uint64_t known_allocations_ = 0;
  std::vector<bool> freed_early_;  // steps ahead of the cursor that have been served
  size_t early_ = 0;               // how many
  std::vector<HeapExtent> parts_;
  std::vector<BlockHandle> carved_;
  uint64_t deviations_ = 0;
  uint64_t planned_allocations_ = 0;  // of earlier iterations
};

}  // namespace gpushare::memory
