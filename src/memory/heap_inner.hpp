// heap_inner.hpp: what every operation of a heap is made of: records, bins and the offset index. heap.cpp and
// heap_whole.cpp include it, and lane.cpp for the calls that it inlines.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "memory/heap.hpp"

namespace gpushare::memory {

constexpr uint32_t kNone = 0;
constexpr uint64_t kBucketsPerBlock = 2;

// ---- records ----

inline bool Heap::records_available(uint32_t count) {
  while (spare_records(count) + (committed_ - used_) < count) [[unlikely]] if (!commit_more()) return false;
  return true;
}

// How many there are, at most `most`.
inline uint64_t Heap::spare_records(uint32_t most) const {
  uint32_t found = 0;
  for (uint32_t i = spare_; i != kNone && found < most; i = blocks_[i].next) ++found;
  return found;
}

inline uint32_t Heap::new_record() {
  if (spare_ != kNone) {
    const uint32_t index = spare_;
    spare_ = blocks_[index].next;
    return index;
  }
  return used_++;
}

inline void Heap::recycle(uint32_t index) {
  blocks_[index].where = kFreeBit;  // no handle matches it any more
  blocks_[index].next = spare_;
  spare_ = index;
}

// ---- bins ----

[[gnu::always_inline]] inline unsigned Heap::bin_of(uint64_t size) {
  // Below kBinsPerDoubling the shift is 0 and the bin is the size: no branch, as small and large alternate.
  const unsigned shift = 63u - kBinLog - static_cast<unsigned>(std::countl_zero(size | kBinsPerDoubling));
  return (shift << kBinLog) + static_cast<unsigned>(size >> shift);
}

// No branch asks whether a list ends here, because such branches are hard to predict. Instead the sentinel takes the back
// link of a hole that is not there; as the head of an empty bin it is larger than every hole.

// Behind the head if that is smaller, or as large and lower; else as the new head.
[[gnu::always_inline]] inline void Heap::bin_insert(uint32_t index, unsigned bin) {
  Record& r = blocks_[index];
  const uint32_t head = heads_[bin];
  Record& h = blocks_[head];
  if (h.size < r.size || (h.size == r.size && h.where < r.where)) {
    const uint32_t second = h.links.next;
    r.links = {head, second};
    blocks_[second].links.prev = index;
    h.links.next = index;
    return;
  }
  h.links.prev = index;
  r.links = {kNone, head};
  heads_[bin] = index;
  row_bits_ |= uint64_t{1} << (bin >> kBinLog);
  cell_bits_[bin >> kBinLog] |= uint64_t{1} << (bin & (kBinsPerDoubling - 1));
}

[[gnu::always_inline]] inline void Heap::bin_remove(uint32_t index, unsigned bin) {
  const FreeLinks links = blocks_[index].links;
  blocks_[links.next].links.prev = links.prev;
  if (links.prev != kNone) {
    blocks_[links.prev].links.next = links.next;
    return;
  }
  heads_[bin] = links.next;
  if (links.next == kNone) {
    const unsigned row = bin >> kBinLog;
    cell_bits_[row] &= ~(uint64_t{1} << (bin & (kBinsPerDoubling - 1)));
    if (cell_bits_[row] == 0) row_bits_ &= ~(uint64_t{1} << row);
  }
}

// `index` has its offset, size and neighbours, both live.
[[gnu::always_inline]] inline void Heap::make_hole(uint32_t index) {
  Record& r = blocks_[index];
  r.where = r.offset() | kFreeBit;
  blocks_[r.prev].next = index | kHoleLink;
  blocks_[r.next].prev = index | kHoleLink;
  bin_insert(index, bin_of(r.size));
}

// __builtin_ctzll and not std::countr_zero, which tests for 0: none of these words is 0.
[[gnu::always_inline]] inline bool Heap::next_bin(unsigned bin, unsigned* out_bin) const {
  const unsigned row = bin >> kBinLog;
  const unsigned cell = bin & (kBinsPerDoubling - 1);
  const uint64_t cells = cell_bits_[row] & (~uint64_t{1} << cell);
  if (cells != 0) {
    *out_bin = (row << kBinLog) + static_cast<unsigned>(__builtin_ctzll(cells));
    return true;
  }
  const uint64_t rows = row_bits_ & (~uint64_t{1} << row);
  if (rows == 0) return false;
  const auto found = static_cast<unsigned>(__builtin_ctzll(rows));
  *out_bin = (found << kBinLog) + static_cast<unsigned>(__builtin_ctzll(cell_bits_[found]));
  return true;
}

// ---- offset index: at least two buckets a live block, each a chain through the records of its blocks, the
// latest first ----
//
// Taking a block in is one store to its bucket and no search; a block is found at the head of its chain in
// four cases of five, and then nothing but its bucket and its own record is touched.

inline bool Heap::index_reserve(uint32_t extra) {
  const uint64_t needed = kBucketsPerBlock * (uint64_t{live_count_} + extra);
  return needed <= bucket_count_ || index_grow(needed);
}

// Makes `index` the record of a live block at `offset`, and puts it into the index.
inline void Heap::set_live(uint32_t index, uint64_t offset, bool indexed) {
  uint64_t where = offset;
  if (indexed) {
    uint32_t& head = bucket_of(offset);
    where |= uint64_t{head} << kMaxBits;
    head = index;
  }
  blocks_[index].where = where;
}

inline uint32_t Heap::index_find(uint64_t offset) const {
  uint32_t i = bucket_of(offset);
  while (i != kNone && blocks_[i].offset() != offset) i = blocks_[i].next_in_bucket();
  return i;
}

// Takes the live block at `offset` out; kNone if there is none.
inline uint32_t Heap::index_take(uint64_t offset) {
  uint32_t& head = bucket_of(offset);
  uint32_t i = head;
  if (i == kNone) return kNone;
  if (blocks_[i].offset() == offset) [[likely]] {
    head = blocks_[i].next_in_bucket();
    return i;
  }
  uint32_t before = i;
  while ((i = blocks_[before].next_in_bucket()) != kNone && blocks_[i].offset() != offset) before = i;
  if (i != kNone)
    blocks_[before].where = blocks_[before].offset() | uint64_t{blocks_[i].next_in_bucket()} << kMaxBits;
  return i;
}

// ---- the calls that nearly every block makes, inlined into their callers ----

[[gnu::always_inline]] inline uint32_t Heap::find_hole(uint64_t size, unsigned* out_bin) const {
  const unsigned bin = bin_of(size);
  *out_bin = bin;
  const uint32_t head = heads_[bin];
  if (head != kNone && blocks_[head].size >= size) return head;
  if (next_bin(bin, out_bin)) return heads_[*out_bin];
  // Only the rest of the request's own bin can still hold it; failing is worse than looking.
  return best_in_bin(bin, size);
}

// The front of a hole that hangs in `bin`: place() without its other cases, for the path nearly every request
// takes.
[[gnu::always_inline]] inline BlockHandle Heap::place_front(uint32_t hole, unsigned bin, uint64_t size,
                                                            uint64_t tag, Shape shape) {
  Record& h = blocks_[hole];
  const uint64_t offset = h.offset();
  const uint64_t rest = h.size - size;
  uint32_t live = hole;
  if (rest == 0) {
    bin_remove(hole, bin);
    set_live(hole, offset, shape.index_offsets);
    h.tag = tag;
    blocks_[h.prev].next = hole;  // a hole no more
    blocks_[h.next].prev = hole;
  } else {
    live = new_record();
    const uint32_t before = h.prev;
    Record& l = blocks_[live];
    set_live(live, offset, shape.index_offsets);
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
  return {offset << shape.granule_shift, live, HeapStatus::kOk};
}

[[gnu::always_inline]] inline BlockHandle Heap::allocate_front(uint64_t bytes, uint64_t tag, Shape shape) {
  const uint64_t size = ((bytes - 1) >> shape.granule_shift) + 1;
  if (live_count_ >= live_limit_ && !room_for_one()) [[unlikely]]
    return {0, 0, HeapStatus::kNoRecords};
  unsigned bin = 0;
  const uint32_t hole = find_hole(size, &bin);
  if (hole == kNone) return {0, 0, HeapStatus::kNoSpace};
  return place_front(hole, bin, size, tag, shape);
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

[[gnu::always_inline]] inline bool Heap::free_unless(uint64_t offset_bytes, uint64_t kept, Shape shape) {
  const uint64_t within = (uint64_t{1} << shape.granule_shift) - 1;
  if (!shape.index_offsets || live_count_ == 0 || (offset_bytes & within) != 0) return false;
  const uint64_t offset = offset_bytes >> shape.granule_shift;
  uint32_t& head = bucket_of(offset);
  uint32_t block = head;
  if (block == kNone) return false;
  if (blocks_[block].offset() == offset) [[likely]] {
    if ((blocks_[block].tag & kept) != 0) return false;
    head = blocks_[block].next_in_bucket();
  } else {
    block = index_find(offset);
    if (block == kNone || (blocks_[block].tag & kept) != 0) return false;
    index_take(offset);
  }
  release_block(block);
  return true;
}

}  // namespace gpushare::memory
