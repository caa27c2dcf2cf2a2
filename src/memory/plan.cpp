// SPDX-License-Identifier: Apache-2.0
#include "memory/plan.hpp"

#include <algorithm>
#include <utility>

namespace gpushare::memory {

uint32_t PlanRecorder::allocate(uint64_t size_bytes, uint64_t alignment_bytes, uint64_t offset_bytes) {
  calls_.push_back({size_bytes, offset_bytes, alignment_bytes, block_count_});
  return block_count_++;
}

void PlanRecorder::free(uint32_t block) {
  calls_.push_back({0, kNoOffset, 0, block});
}

void PlanRecorder::clear() {
  calls_.clear();
  block_count_ = 0;
}

base::Result<std::shared_ptr<const Plan>> PlanRecorder::finish(uint64_t work_limit, uint64_t exact_work_limit,
                                                               const std::atomic<bool>* cancelled) const {
  auto plan = std::make_shared<Plan>();
  plan->alignment_bytes = granule_bytes_;
  std::vector<Buffer> buffers(block_count_, Buffer{0, calls_.size(), 0});
  std::vector<uint64_t> alignments(block_count_), given(block_count_);
  bool all_given = true;
  uint64_t lowest = kNoOffset;
  for (size_t time = 0; time < calls_.size(); ++time) {
    const Call& call = calls_[time];
    Buffer& buffer = buffers[call.block];
    if (call.size_bytes == 0 && buffer.size_bytes != 0) {
      buffer.upper = time;
      continue;
    }
    if (call.size_bytes == 0 || call.size_bytes >= (uint64_t{1} << 62) ||
        call.alignment_bytes > (uint64_t{1} << 30) ||
        (call.alignment_bytes & (call.alignment_bytes - 1)) != 0)
      return base::Status(
          GPUSHARE_INVALID_ARGUMENT,
          base::format("plan step %zu: size must be from 1 to 2^62 and alignment a power of two up to 2^30",
                       time));
    buffer.lower = time;
    // A block with a larger alignment is placed with room to slide up to it.
    const uint64_t alignment = std::max(call.alignment_bytes, granule_bytes_);
    buffer.size_bytes = call.size_bytes + (alignment - granule_bytes_);
    alignments[call.block] = alignment;
    given[call.block] = call.online_offset_bytes;
    all_given = all_given && call.online_offset_bytes != kNoOffset && alignment == granule_bytes_;
    lowest = std::min(lowest, call.online_offset_bytes);
    plan->alignment_bytes = std::max(plan->alignment_bytes, alignment);
  }
  if (all_given)
    for (uint64_t& offset : given) offset -= lowest;
  else
    given.clear();
  PlacementOptions options;
  options.granule_bytes = granule_bytes_;
  options.work_limit = work_limit;
  options.exact_work_limit = exact_work_limit;
  options.cancelled = cancelled;
  GPUSHARE_ASSIGN_OR_RETURN(const Placement placement, solve_placement(buffers, options, given));
  GPUSHARE_RETURN_IF_ERROR(check_placement(buffers, placement.offsets_bytes, placement.arena_bytes));

  std::vector<uint64_t> offsets(block_count_);
  for (uint32_t block = 0; block < block_count_; ++block)
    offsets[block] = (placement.offsets_bytes[block] + alignments[block] - 1) & ~(alignments[block] - 1);
  plan->place_offsets = offsets;
  std::sort(plan->place_offsets.begin(), plan->place_offsets.end());
  plan->place_offsets.erase(std::unique(plan->place_offsets.begin(), plan->place_offsets.end()),
                            plan->place_offsets.end());
  plan->allocations = block_count_;
  plan->steps.reserve(calls_.size());
  for (const Call& call : calls_) {
    const uint64_t offset = offsets[call.block];
    const auto place = std::lower_bound(plan->place_offsets.begin(), plan->place_offsets.end(), offset);
    plan->steps.push_back({call.size_bytes, offset,
                           static_cast<uint32_t>(place - plan->place_offsets.begin()),
                           static_cast<uint32_t>(call.alignment_bytes)});
  }
  plan->arena_bytes = placement.arena_bytes;
  plan->lower_bound_bytes = placement.lower_bound_bytes;
  plan->method = placement.method;
  return std::shared_ptr<const Plan>(std::move(plan));
}

bool PlanReplay::begin(std::shared_ptr<const Plan> plan) {
  if (on_plan() || plan == nullptr || plan->arena_bytes == 0) return false;
  tags_.resize(plan->place_offsets.size());
  sizes_.resize(plan->place_offsets.size());
  if (early_ > 0 || freed_early_.size() != plan->steps.size()) freed_early_.assign(plan->steps.size(), false);
  early_ = 0;
  any_known_ = false;
  arena_ = heap_->allocate(plan->arena_bytes, plan->alignment_bytes);
  if (!arena_) return false;
  base_ = arena_.offset_bytes;
  next_ = plan->steps.data();
  stop_ = next_ + plan->steps.size();
  plan_ = std::move(plan);
  return true;
}

void PlanReplay::step_on() {
  ++next_;
  while (early_ > 0 && freed_early_[cursor()]) {
    freed_early_[cursor()] = false;
    --early_;
    ++next_;
  }
  stop_ = early_ > 0 ? next_ : plan_->steps.data() + plan_->steps.size();
}

// A free that was early counts as its step: no block comes to its place between the free and the step.
void PlanReplay::catch_up() const {
  if (!std::exchange(any_known_, true)) {
    std::fill(sizes_.begin(), sizes_.end(), 0);
    known_ = known_allocations_ = 0;
  }
  for (; known_ < cursor(); ++known_) {
    const PlanStep& step = plan_->steps[known_];
    sizes_[step.place] = step.size_bytes;
    known_allocations_ += step.size_bytes != 0 ? 1 : 0;
  }
}

uint64_t PlanReplay::served_here() const {
  if (!on_plan()) return 0;
  if (cursor() == plan_->steps.size()) return plan_->allocations;
  catch_up();
  return known_allocations_;
}

BlockHandle PlanReplay::allocate(uint64_t bytes, uint64_t alignment_bytes, uint64_t tag) {
  if (on_plan()) {
    if (bytes == 0) return {0, 0, HeapStatus::kBadArgument};
    if (cursor() < plan_->steps.size() && next_->size_bytes == bytes &&
        next_->alignment_bytes == alignment_bytes) {
      const PlanStep& step = *next_;
      tags_[step.place] = tag;
      step_on();
      return {base_ + step.offset_bytes, kPlannedIndex, HeapStatus::kOk};
    }
    const HeapStatus left = leave();
    if (left != HeapStatus::kOk) return {0, 0, left};
    ++deviations_;
  }
  return heap_->allocate(bytes, alignment_bytes, tag);
}

HeapStatus PlanReplay::free_at(uint64_t offset_bytes) {
  if (!on_plan() || !holds(offset_bytes)) return heap_->free_at(offset_bytes);
  const uint64_t offset = offset_bytes - base_;
  const std::vector<PlanStep>& steps = plan_->steps;
  // The recorded step, or soon after it: a block allocated before the cursor whose free is recorded a little
  // later.
  const size_t last = std::min(steps.size(), cursor() + kLookahead);
  for (size_t k = cursor(); k < last; ++k) {
    const PlanStep& step = steps[k];
    if (step.offset_bytes != offset) continue;
    if (step.size_bytes != 0 || freed_early_[k])
      break;  // the address changes hands first: the block is not live
    if (k == cursor()) {
      step_on();
      return HeapStatus::kOk;
    }
    catch_up();
    sizes_[step.place] = 0;
    freed_early_[k] = true;
    ++early_;
    stop_ = next_;
    return HeapStatus::kOk;
  }
  HeapBlock block;
  if (!find(offset_bytes, &block)) return HeapStatus::kBadArgument;
  const HeapStatus left = leave();
  if (left != HeapStatus::kOk) return left;
  ++deviations_;
  return heap_->free_at(offset_bytes);
}

HeapStatus PlanReplay::leave() {
  if (!on_plan()) return HeapStatus::kOk;
  parts_.clear();
  for_each_planned([&](const HeapBlock& block) {
    parts_.push_back({block.offset_bytes, block.size_bytes, block.tag});
  });
  carved_.resize(parts_.size());
  const HeapStatus status = heap_->carve(arena_, parts_, carved_);
  if (status == HeapStatus::kOk) forget_plan();
  return status;
}

bool PlanReplay::end() {
  if (!on_plan()) return false;
  forget_plan();
  return heap_->free(arena_) == HeapStatus::kOk;
}

void PlanReplay::forget_plan() {
  planned_allocations_ += served_here();
  plan_.reset();
  next_ = stop_ = nullptr;
}

bool PlanReplay::find(uint64_t offset_bytes, HeapBlock* out) const {
  if (!on_plan() || !holds(offset_bytes)) return false;
  const std::vector<uint64_t>& offsets = plan_->place_offsets;
  const auto at = std::lower_bound(offsets.begin(), offsets.end(), offset_bytes - base_);
  if (at == offsets.end() || *at != offset_bytes - base_) return false;
  const auto place = static_cast<size_t>(at - offsets.begin());
  catch_up();
  if (sizes_[place] == 0) return false;
  *out = block_at(place);
  return true;
}

}  // namespace gpushare::memory
