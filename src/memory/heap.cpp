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

inline uint32_t Heap::find_hole(uint64_t size, unsigned* out_bin) const {
  const unsigned bin = bin_of(size);
  *out_bin = bin;
  const uint32_t head = heads_[bin];
  if (head != kNone && blocks_[head].size >= size) return head;
  const unsigned larger = next_bin(bin);
  if (larger != kBins) {
    *out_bin = larger;
    return heads_[larger];
  }
  // Only the rest of the request's own bin can still hold it; failing is worse than looking.
  return best_in_bin(bin, size);
}

uint32_t Heap::find_hole_aligned(uint64_t size, uint64_t alignment) const {
  const auto fits = [&](uint32_t i) {
    const uint64_t offset = blocks_[i].offset();
    const uint64_t front = (0 - offset) & (alignment - 1);
    return front < blocks_[i].size && blocks_[i].size - front >= size;
  };
  const unsigned bin = bin_of(size);
  if (heads_[bin] != kNone && fits(heads_[bin])) return heads_[bin];
  if (size + alignment - 1 <= capacity_) {
    unsigned hole_bin = 0;
    const uint32_t hole = find_hole(size + alignment - 1, &hole_bin);
    if (hole != kNone) return hole;
  }
  for (unsigned b = bin; b != kBins; b = next_bin(b))
    for (uint32_t i = heads_[b]; i != kNone; i = blocks_[i].links.next)
      if (fits(i)) return i;
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
  set_live(live, offset);
  l.size = size;
  l.tag = tag;
  live_ += size;
  ++live_count_;
  if (offset + size > high_water_) high_water_ = offset + size;
  return {offset << granule_shift_, live, HeapStatus::kOk};
}

// The front of a hole that hangs in `bin`: place() without its other cases, for the path nearly every request
// takes.
inline BlockHandle Heap::place_front(uint32_t hole, unsigned bin, uint64_t size, uint64_t tag) {
  Record& h = blocks_[hole];
  const uint64_t offset = h.offset();
  const uint64_t rest = h.size - size;
  uint32_t live = hole;
  if (rest == 0) {
    bin_remove(hole, bin);
    set_live(hole, offset);
    h.tag = tag;
    blocks_[h.prev].next = hole;  // a hole no more
    blocks_[h.next].prev = hole;
  } else {
    live = new_record();
    const uint32_t before = h.prev;
    Record& l = blocks_[live];
    set_live(live, offset);
    l.size = size;
    l.tag = tag;
    l.prev = before;
    l.next = hole | kHoleLink;
    blocks_[before].next = live;
    h.prev = live;
    h.where += size;
    h.size = rest;
    const unsigned rest_bin = bin_of(rest);
    if (rest_bin != bin) {
      bin_remove(hole, bin);
      bin_insert(hole, rest_bin);
    }
  }
  live_ += size;
  ++live_count_;
  high_water_ = std::max(high_water_, offset + size);
  return {offset << granule_shift_, live, HeapStatus::kOk};
}

BlockHandle Heap::allocate(uint64_t bytes, uint64_t alignment_bytes, uint64_t tag, HeapSide side) {
  if (bytes == 0 || (alignment_bytes & (alignment_bytes - 1)) != 0) return {0, 0, HeapStatus::kBadArgument};
  const uint64_t size = ((bytes - 1) >> granule_shift_) + 1;
  if (size > capacity_ - live_) return {0, 0, HeapStatus::kNoSpace};
  if (!records_available(2) || (index_offsets_ && !index_reserve(1))) return {0, 0, HeapStatus::kNoRecords};
  const uint64_t alignment = alignment_bytes >> granule_shift_;
  if (alignment <= 1) {
    unsigned bin = 0;
    const uint32_t hole = find_hole(size, &bin);
    if (hole == kNone) return {0, 0, HeapStatus::kNoSpace};
    if (side == HeapSide::kLow) return place_front(hole, bin, size, tag);
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

bool Heap::free_unless(uint64_t offset_bytes, uint64_t kept) {
  if (!index_offsets_ || live_count_ == 0 || (offset_bytes & (granule_bytes() - 1)) != 0) return false;
  const uint64_t offset = offset_bytes >> granule_shift_;
  uint32_t& head = bucket_of(offset);
  const uint32_t block = head;
  if (block == kNone) return false;
  if (blocks_[block].offset() == offset) [[likely]] {
    if ((blocks_[block].tag & kept) != 0) return false;
    head = blocks_[block].next_in_bucket();
    release_block(block);
    return true;
  }
  const uint32_t found = index_find(offset);
  if (found == kNone || (blocks_[found].tag & kept) != 0) return false;
  release_block(index_take(offset));
  return true;
}

// For a live block that has been removed from the index.
[[gnu::always_inline]] inline void Heap::release_block(uint32_t i) {
  Record& r = blocks_[i];
  live_ -= r.size;
  --live_count_;
  const bool prev_free = (r.prev & kHoleLink) != 0;
  const bool next_free = (r.next & kHoleLink) != 0;
  if (!prev_free && !next_free) {
    make_hole(i);
    return;
  }
  const uint32_t prev = at(r.prev);
  const uint32_t next = at(r.next);
  if (prev_free) {  // grow `prev` over this one, and over `next` if that is free too
    Record& p = blocks_[prev];
    const unsigned bin = bin_of(p.size);
    uint32_t after = next;
    p.size += r.size;
    recycle(i);
    if (next_free) {
      const Record& n = blocks_[next];
      bin_remove(next, bin_of(n.size));
      p.size += n.size;
      after = n.next;
      recycle(next);
    }
    p.next = after;
    blocks_[after].prev = prev | kHoleLink;
    if (bin_of(p.size) != bin) {
      bin_remove(prev, bin);
      bin_insert(prev, bin_of(p.size));
    }
    return;
  }
  Record& n = blocks_[next];
  const unsigned bin = bin_of(n.size);
  n.where = r.offset() | kFreeBit;
  n.size += r.size;
  n.prev = prev;
  blocks_[prev].next = next | kHoleLink;
  recycle(i);
  if (bin_of(n.size) != bin) {
    bin_remove(next, bin);
    bin_insert(next, bin_of(n.size));
  }
}

}  // namespace gpushare::memory
