// A heap's blocks: found room for, placed, found again, freed. Records, bins and index are in heap_inner.hpp, what
// concerns the heap as a whole in heap_whole.cpp.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "memory/heap_inner.hpp"

namespace gpushare::memory {

// The smallest hole of a bin that holds `size`, lowest first among equals. O(holes in the bin).
uint32_t Heap::best_in_bin(unsigned bin, uint64_t size) const {
  uint32_t best = kNone;
  for (uint32_t i = heads_[bin]; i != kNone; i = blocks_[i].links.next) {
    const Record& r = blocks_[i];
    if (r.size < size) continue;
    if (best == kNone || r.size < blocks_[best].size ||
        (r.size == blocks_[best].size && r.where < blocks_[best].where))
      best = i;
  }
  return best;
}

uint32_t Heap::find_hole_aligned(uint64_t size, uint64_t alignment) const {
  const auto fits = [&](uint32_t i) {
    const uint64_t offset = blocks_[i].offset();
    const uint64_t front = (0 - offset) & (alignment - 1);
    return front < blocks_[i].size && blocks_[i].size - front >= size;
  };
  unsigned bin = bin_of(size);
  if (heads_[bin] != kNone && fits(heads_[bin])) return heads_[bin];
  if (size + alignment - 1 <= capacity_) {
    unsigned hole_bin = 0;
    const uint32_t hole = find_hole(size + alignment - 1, &hole_bin);
    if (hole != kNone) return hole;
  }
  do
    for (uint32_t i = heads_[bin]; i != kNone; i = blocks_[i].links.next)
      if (fits(i)) return i;
  while (next_bin(bin, &bin));
  return kNone;
}

BlockHandle Heap::find(uint64_t offset_bytes) const {
  if (!index_offsets_ || live_count_ == 0 || (offset_bytes & (granule_bytes() - 1)) != 0)
    return {0, 0, HeapStatus::kBadArgument};
  const uint32_t block = index_find(offset_bytes >> granule_shift_);
  if (block == kNone) return {0, 0, HeapStatus::kBadArgument};
  return {offset_bytes, block, HeapStatus::kOk};
}

BlockHandle Heap::place(uint32_t hole, uint64_t front, uint64_t size, uint64_t tag) {
  const uint64_t hole_size = blocks_[hole].size;
  const uint64_t offset = blocks_[hole].offset() + front;
  const uint64_t back = hole_size - front - size;
  const unsigned bin = bin_of(hole_size);
  uint32_t live = hole;
  if (front == 0 && back == 0) {
    bin_remove(hole, bin);
    blocks_[blocks_[hole].prev].next = hole;  // a hole no more
    blocks_[blocks_[hole].next].prev = hole;
  } else {
    live = new_record();
    Record& l = blocks_[live];
    Record& h = blocks_[hole];
    if (front == 0) {  // the hole's record keeps the back
      l.prev = h.prev;
      l.next = hole | kHoleLink;
      blocks_[h.prev].next = live;
      h.prev = live;
      h.where += size;
      h.size = back;
    } else {  // it keeps the front; what lies behind the block gets a record of its own
      l.prev = hole | kHoleLink;
      l.next = h.next;
      blocks_[h.next].prev = live;
      h.next = live;
      h.size = front;
      if (back != 0) {
        const uint32_t rest = new_record();
        Record& r = blocks_[rest];
        r.where = offset + size;
        r.size = back;
        r.prev = live;
        r.next = l.next;
        make_hole(rest);
      }
    }
    if (bin_of(h.size) != bin) {  // usually it shrinks within its bin and stays where it hangs
      bin_remove(hole, bin);
      bin_insert(hole, bin_of(h.size));
    }
  }
  Record& l = blocks_[live];
  set_live(live, offset, index_offsets_);
  l.size = size;
  l.tag = tag;
  live_ += size;
  ++live_count_;
  if (offset + size > high_water_) high_water_ = offset + size;
  return {offset << granule_shift_, live, HeapStatus::kOk};
}

BlockHandle Heap::allocate(uint64_t bytes, uint64_t alignment_bytes, uint64_t tag, HeapSide side) {
  if (bytes == 0 || (alignment_bytes & (alignment_bytes - 1)) != 0) return {0, 0, HeapStatus::kBadArgument};
  const uint64_t alignment = alignment_bytes >> granule_shift_;
  const uint64_t size = ((bytes - 1) >> granule_shift_) + 1;
  if (size > capacity_ - live_) return {0, 0, HeapStatus::kNoSpace};
  if (alignment <= 1 && side == HeapSide::kLow)
    return allocate_front(bytes, tag, {granule_shift_, index_offsets_});
  if (!records_available(2) || (index_offsets_ && !index_reserve(1))) return {0, 0, HeapStatus::kNoRecords};
  if (alignment <= 1) {
    unsigned bin = 0;
    const uint32_t hole = find_hole(size, &bin);
    if (hole == kNone) return {0, 0, HeapStatus::kNoSpace};
    return place(hole, blocks_[hole].size - size, size, tag);
  }
  const uint32_t hole = find_hole_aligned(size, alignment);
  if (hole == kNone) return {0, 0, HeapStatus::kNoSpace};
  const uint64_t offset = blocks_[hole].offset();
  uint64_t front = (0 - offset) & (alignment - 1);
  if (side == HeapSide::kHigh) front = ((offset + blocks_[hole].size - size) & ~(alignment - 1)) - offset;
  return place(hole, front, size, tag);
}

BlockHandle Heap::allocate_at(uint64_t offset_bytes, uint64_t bytes, uint64_t tag) {
  if (bytes == 0 || (offset_bytes & (granule_bytes() - 1)) != 0) return {0, 0, HeapStatus::kBadArgument};
  const uint64_t offset = offset_bytes >> granule_shift_;
  const uint64_t size = ((bytes - 1) >> granule_shift_) + 1;
  if (offset > capacity_ || size > capacity_ - offset) return {0, 0, HeapStatus::kBadArgument};
  if (!records_available(2) || (index_offsets_ && !index_reserve(1))) return {0, 0, HeapStatus::kNoRecords};
  uint32_t i = at(blocks_[0].next);
  while (i != kNone && blocks_[i].offset() + blocks_[i].size <= offset) i = at(blocks_[i].next);
  if (i == kNone || !blocks_[i].is_hole()) return {0, 0, HeapStatus::kNoSpace};
  const uint64_t front = offset - blocks_[i].offset();
  if (blocks_[i].size - front < size) return {0, 0, HeapStatus::kNoSpace};
  return place(i, front, size, tag);
}

bool Heap::is_live(BlockHandle block) const {
  const uint64_t offset = block.offset_bytes >> granule_shift_;  // never carries kFreeBit below the capacity
  return block.index != kNone && block.index < used_ && offset < capacity_ &&
         (blocks_[block.index].where & (kFreeBit | kOffsetMask)) == offset;
}

HeapStatus Heap::free(BlockHandle block) {
  if (!is_live(block)) return HeapStatus::kBadArgument;
  if (index_offsets_) index_take(blocks_[block.index].offset());
  release_block(block.index);
  return HeapStatus::kOk;
}

HeapStatus Heap::free_at(uint64_t offset_bytes) {
  if (!index_offsets_ || live_count_ == 0 || (offset_bytes & (granule_bytes() - 1)) != 0)
    return HeapStatus::kBadArgument;
  const uint32_t block = index_take(offset_bytes >> granule_shift_);
  if (block == kNone) return HeapStatus::kBadArgument;
  release_block(block);
  return HeapStatus::kOk;
}

}  // namespace gpushare::memory
