// The contiguous layout: one device buffer. Heaps take the best-fitting hole, lowest first, from its low end;
// lanes from its high end. Nothing ever moves under live blocks; an empty lane slides up over the hole that a
// closed one left.
//
// Holes are kept in a map by offset; there are as many as sessions and lanes at most, and only opening,
// closing and resizing look at them. Fences lie beside the holes, by interval, and are dropped once passed.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>

#include "base/mutex.hpp"
#include "base/units.hpp"
#include "memory/address_index.hpp"
#include "memory/range_layout.hpp"

namespace gpushare::memory {
namespace {

constexpr uint64_t kGranule = AddressIndex::kGranuleBytes;

class ContiguousLayout final : public RangeLayout {
 public:
  ContiguousLayout(device::Device& device, Address buffer, Address base, uint64_t capacity)
      : device_(device), buffer_(buffer), base_(base), capacity_(capacity) {
    holes_[0] = capacity;
  }
  ~ContiguousLayout() override {
    // The device may still be using what was given back.
    for (Left& left : left_) wait_all(left.fences);
    const base::Status ignored = device_.free(buffer_);
  }

  Layout kind() const override { return Layout::kContiguous; }
  uint64_t granularity_bytes() const override { return kGranule; }
  uint64_t capacity_bytes() const override { return capacity_; }
  Range span() const override { return {base_, capacity_, 0}; }

  base::Status take(RangeUse use, uint64_t bytes, Range* out_range, FenceList* out_fences) override {
    base::MutexLock lock(mutex_);
    uint64_t offset = 0;
    if (!find_place(use, bytes, &offset)) return no_room(bytes);
    occupy(offset, bytes, out_fences);
    *out_range = {base_ + offset, bytes, 0};
    return {};
  }

  base::Status extend(Range& range, uint64_t bytes, bool, FenceList* out_fences) override {
    base::MutexLock lock(mutex_);
    const uint64_t end = range.base - base_ + range.bytes;
    const auto hole = holes_.find(end);
    if (hole == holes_.end() || hole->second < bytes) return no_room(bytes);
    occupy(end, bytes, out_fences);
    range.bytes += bytes;
    return {};
  }

  void shrink(Range& range, uint64_t bytes, const FenceList& fences) override {
    base::MutexLock lock(mutex_);
    vacate(range.base - base_ + bytes, range.bytes - bytes, fences);
    range.bytes = bytes;
  }

  void give(Range& range, const FenceList& fences) override {
    base::MutexLock lock(mutex_);
    vacate(range.base - base_, range.bytes, fences);
    range = {};
  }

  base::Status take_ahead(const Range& range, uint64_t bytes, Range* out_ahead,
                          FenceList* out_fences) override {
    base::MutexLock lock(mutex_);
    const uint64_t offset = range.base - base_;
    const uint64_t missing = bytes - range.bytes;
    auto below = holes_.lower_bound(offset);
    if (below != holes_.begin()) {
      --below;
      if (below->first + below->second == offset && below->second >= missing) {
        occupy(offset - missing, missing, out_fences);
        *out_ahead = {base_ + offset - missing, missing, 0};
        return {};
      }
    }
    uint64_t place = 0;
    if (!find_place(RangeUse::kLane, bytes, &place)) return no_room(bytes);
    occupy(place, bytes, out_fences);
    *out_ahead = {base_ + place, bytes, 0};
    return {};
  }

  bool would_move_up(const Range& range) const override {
    base::MutexLock lock(mutex_);
    return best_place(range) != range.base - base_;
  }

  bool move_up(Range& range, const FenceList& fences, FenceList* out_fences) override {
    base::MutexLock lock(mutex_);
    const uint64_t to = best_place(range);
    if (to == range.base - base_) return false;
    vacate(range.base - base_, range.bytes, fences);
    occupy(to, range.bytes, out_fences);
    range.base = base_ + to;
    return true;
  }

  bool can_page() const override { return false; }
  base::Status unback(Range&, uint64_t, uint64_t) override { return cannot_page(); }
  base::Status back(Range&, uint64_t*) override { return cannot_page(); }

  void hollow(const Range& range, const std::vector<size_t>& granules, const FenceList& fences) override {
    base::MutexLock lock(mutex_);
    for (const size_t granule : granules) vacate(range.base - base_ + granule * kGranule, kGranule, fences);
  }

  uint64_t trim() override { return 0; }
  uint64_t free_bytes() const override {
    base::MutexLock lock(mutex_);
    return free_;
  }
  uint64_t largest_hole_bytes() const override {
    base::MutexLock lock(mutex_);
    return largest_hole();
  }
  uint64_t mapped_bytes() const override { return capacity_; }

  std::string check() const override {
    base::MutexLock lock(mutex_);
    uint64_t sum = 0, end = 0;
    for (auto [offset, bytes] : holes_) {
      if (bytes == 0) return "an empty hole";
      if (sum != 0 && offset <= end) return "holes overlap or touch";
      end = offset + bytes;
      sum += bytes;
    }
    if (end > capacity_) return "a hole beyond the buffer";
    if (sum != free_) return "free bytes do not add up";
    return {};
  }

 private:
  // Fences that former owners left behind: the device may still use their bytes.
  struct Left {
    uint64_t begin, end;
    FenceList fences;
  };

  static base::Status cannot_page() {
    return {GPUSHARE_UNSUPPORTED,
            "the contiguous layout cannot page a session out and keep its addresses; use the virtual layout "
            "where the device has it"};
  }

  base::Status no_room(uint64_t bytes) const GPUSHARE_REQUIRES(mutex_) {
    return {GPUSHARE_DEVICE_OUT_OF_MEMORY, "no room for a range of " + base::format_bytes(bytes) + ": " +
                                               base::format_bytes(free_) + " of " +
                                               base::format_bytes(capacity_) + " free, largest hole " +
                                               base::format_bytes(largest_hole())};
  }

  uint64_t largest_hole() const GPUSHARE_REQUIRES(mutex_) {
    uint64_t largest = 0;
    for (auto [offset, bytes] : holes_) largest = std::max(largest, bytes);
    return largest;
  }

  // The highest offset for a lane's range among the holes above it and itself with the hole at its end.
  uint64_t best_place(const Range& range) const GPUSHARE_REQUIRES(mutex_) {
    const uint64_t from = range.base - base_;
    for (auto hole = holes_.rbegin(); hole != holes_.rend() && hole->first > from; ++hole)
      if (hole->second >= range.bytes || hole->first == from + range.bytes)
        return hole->first + hole->second - range.bytes;
    return from;
  }

  bool awaited(uint64_t begin, uint64_t end) const GPUSHARE_REQUIRES(mutex_) {
    return std::any_of(left_.begin(), left_.end(),
                       [=](const Left& l) { return l.begin < end && begin < l.end; });
  }

  // Best fit; heaps prefer the lowest, lanes the highest among equals, and a place where nobody's work is
  // outstanding before any other.
  bool find_place(RangeUse use, uint64_t bytes, uint64_t* out_offset) GPUSHARE_REQUIRES(mutex_) {
    drop_passed();
    bool found = false, found_awaited = false;
    uint64_t found_bytes = 0;
    for (auto [offset, hole] : holes_) {
      if (hole < bytes) continue;
      const uint64_t place = use == RangeUse::kHeap ? offset : offset + hole - bytes;
      const bool is_awaited = awaited(place, place + bytes);
      if (found && is_awaited && !found_awaited) continue;
      const bool better = !found || (found_awaited && !is_awaited) ||
                          (use == RangeUse::kHeap ? hole < found_bytes : hole <= found_bytes);
      if (!better) continue;
      found = true;
      found_awaited = is_awaited;
      found_bytes = hole;
      *out_offset = place;
    }
    return found;
  }

  void drop_passed() GPUSHARE_REQUIRES(mutex_) {
    for (Left& left : left_) prune(left.fences);
    left_.erase(std::remove_if(left_.begin(), left_.end(), [](const Left& l) { return l.fences.empty(); }),
                left_.end());
  }

  void occupy(uint64_t offset, uint64_t bytes, FenceList* out_fences) GPUSHARE_REQUIRES(mutex_) {
    auto hole = std::prev(holes_.upper_bound(offset));
    const uint64_t hole_offset = hole->first, hole_end = hole_offset + hole->second;
    holes_.erase(hole);
    if (hole_offset < offset) holes_[hole_offset] = offset - hole_offset;
    if (offset + bytes < hole_end) holes_[offset + bytes] = hole_end - offset - bytes;
    free_ -= bytes;
    for (const Left& left : left_)
      if (left.begin < offset + bytes && offset < left.end)
        out_fences->insert(out_fences->end(), left.fences.begin(), left.fences.end());
    // The interval stays in left_ until its fences have passed: the new owner's own fence comes after them in
    // any case.
  }

  void vacate(uint64_t offset, uint64_t bytes, const FenceList& fences) GPUSHARE_REQUIRES(mutex_) {
    if (bytes == 0) return;
    FenceList outstanding = fences;
    prune(outstanding);
    if (left_.size() > 256) drop_passed();
    if (!outstanding.empty()) left_.push_back({offset, offset + bytes, std::move(outstanding)});
    free_ += bytes;
    auto next = holes_.lower_bound(offset);
    if (next != holes_.end() && next->first == offset + bytes) {
      bytes += next->second;
      next = holes_.erase(next);
    }
    if (next != holes_.begin()) {
      auto previous = std::prev(next);
      if (previous->first + previous->second == offset) {
        previous->second += bytes;
        epoch_.fetch_add(1, std::memory_order_release);
        return;
      }
    }
    holes_[offset] = bytes;
    epoch_.fetch_add(1, std::memory_order_release);
  }

  device::Device& device_;
  const Address buffer_;  // as allocated
  const Address base_;    // aligned
  const uint64_t capacity_;
  mutable base::Mutex mutex_;
  std::map<uint64_t, uint64_t> holes_ GPUSHARE_GUARDED_BY(mutex_);  // offset -> bytes; none touch
  std::vector<Left> left_ GPUSHARE_GUARDED_BY(mutex_);
  uint64_t free_ GPUSHARE_GUARDED_BY(mutex_) = capacity_;
};

}  // namespace

base::Result<std::unique_ptr<RangeLayout>> make_contiguous_layout(device::Device& device,
                                                                  uint64_t capacity_bytes) {
  const uint64_t alignment = std::max<uint64_t>(device.info().allocation_alignment_bytes, 1);
  const uint64_t slack = alignment % kGranule == 0 ? 0 : kGranule;
  auto buffer = device.alloc(capacity_bytes + slack);
  if (!buffer.ok())
    return buffer.status().with_context("the device buffer of the contiguous layout, " +
                                        base::format_bytes(capacity_bytes + slack));
  const Address base = (*buffer + kGranule - 1) / kGranule * kGranule;
  return std::unique_ptr<RangeLayout>(new ContiguousLayout(device, *buffer, base, capacity_bytes));
}

}  // namespace gpushare::memory
