// heap_inner.hpp: what every operation of a heap is made of: records, bins and the offset index. Only heap.cpp and
// heap_whole.cpp include it.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstdint>

#include "memory/heap.hpp"

namespace gpushare::memory {

constexpr uint32_t kNone = 0;
constexpr uint64_t kBucketsPerBlock = 2;

// ---- records ----

inline bool Heap::records_available(uint32_t count) {
  while (uint64_t{spare_count_} + (committed_ - used_) < count) [[unlikely]] if (!commit_more()) return false;
  return true;
}

inline uint32_t Heap::new_record() {
  if (spare_ != kNone) {
    const uint32_t index = spare_;
    spare_ = blocks_[index].next;
    --spare_count_;
    return index;
  }
  return used_++;
}

inline void Heap::recycle(uint32_t index) {
  blocks_[index].where = kFreeBit;  // no handle matches it any more
  blocks_[index].next = spare_;
  spare_ = index;
  ++spare_count_;
}

// ---- bins ----

inline unsigned Heap::bin_of(uint64_t size) {
  // Below kBinsPerDoubling the shift is 0 and the bin is the size: no branch, as small and large alternate.
  const unsigned shift = 63u - kBinLog - static_cast<unsigned>(std::countl_zero(size | kBinsPerDoubling));
  return (shift << kBinLog) + static_cast<unsigned>(size >> shift);
}

// Whether a list ends here is not asked but written to: the sentinel takes the back link of a hole that is not
// there, and as the head of an empty bin it is larger than every hole. Branches here are hard to predict.

// Behind the head if that is smaller, or as large and lower; else as the new head.
inline void Heap::bin_insert(uint32_t index, unsigned bin) {
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

inline void Heap::bin_remove(uint32_t index, unsigned bin) {
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
inline void Heap::make_hole(uint32_t index) {
  Record& r = blocks_[index];
  r.where = r.offset() | kFreeBit;
  blocks_[r.prev].next = index | kHoleLink;
  blocks_[r.next].prev = index | kHoleLink;
  bin_insert(index, bin_of(r.size));
}

inline unsigned Heap::next_bin(unsigned bin) const {
  const unsigned row = bin >> kBinLog;
  const unsigned cell = bin & (kBinsPerDoubling - 1);
  const uint64_t cells = cell_bits_[row] & (~uint64_t{1} << cell);
  if (cells != 0) return (row << kBinLog) + static_cast<unsigned>(std::countr_zero(cells));
  const uint64_t rows = row_bits_ & (~uint64_t{1} << row);
  if (rows == 0) return kBins;
  const unsigned found = static_cast<unsigned>(std::countr_zero(rows));
  return (found << kBinLog) + static_cast<unsigned>(std::countr_zero(cell_bits_[found]));
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
inline void Heap::set_live(uint32_t index, uint64_t offset) {
  uint64_t where = offset;
  if (index_offsets_) {
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

}  // namespace gpushare::memory
