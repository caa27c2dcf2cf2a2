// SPDX-License-Identifier: Apache-2.0
#include "memory/heap.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>

namespace gpushare::memory {
namespace {

constexpr uint64_t kMaxGranules = uint64_t{1} << 42;
constexpr uint32_t kMaxIndexedBlocks = 1u << 21;  // the link of a bucket's chain has 21 bits
constexpr uint32_t kCommitStep = 1u << 15;        // records: 1 MiB
constexpr uint32_t kNone = 0;
constexpr uint64_t kBucketsPerBlock = 2;

bool is_power_of_two(uint64_t value) {
  return std::has_single_bit(value);
}

}  // namespace

base::Result<Heap> Heap::create(const HeapOptions& options) {
  if (!is_power_of_two(options.granule_bytes) || options.granule_bytes > (uint64_t{1} << 30))
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("heap granule of %llu bytes: must be a power of two from 1 to 2^30",
                                     static_cast<unsigned long long>(options.granule_bytes)));
  const uint32_t most_blocks = options.index_offsets ? kMaxIndexedBlocks : 1u << 31;
  if (options.max_blocks < 4 || options.max_blocks > most_blocks)
    return base::Status(GPUSHARE_INVALID_ARGUMENT, base::format("heap max_blocks of %u: must be from 4 to %u",
                                                                options.max_blocks, most_blocks));
  const unsigned shift = static_cast<unsigned>(std::countr_zero(options.granule_bytes));
  if ((options.capacity_bytes >> shift) > kMaxGranules)
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("heap capacity of %llu bytes: at most 2^42 granules of %llu bytes",
                                     static_cast<unsigned long long>(options.capacity_bytes),
                                     static_cast<unsigned long long>(options.granule_bytes)));
  Heap heap;
  heap.max_blocks_ = options.max_blocks;
  heap.granule_shift_ = shift;
  heap.index_offsets_ = options.index_offsets;
  // Reserved without access, opened step by step: costs no commit charge even where overcommit is off.
  void* range = mmap(nullptr, sizeof(Record) * options.max_blocks, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED)
    return base::Status(GPUSHARE_HOST_OUT_OF_MEMORY,
                        base::format("cannot reserve %llu bytes of address space for a heap of %u blocks",
                                     static_cast<unsigned long long>(sizeof(Record)) * options.max_blocks,
                                     options.max_blocks));
  heap.blocks_ = static_cast<Record*>(range);
  if (!heap.commit_more())
    return base::Status(GPUSHARE_HOST_OUT_OF_MEMORY, "cannot commit the first records of a heap");
  heap.capacity_ = options.capacity_bytes >> shift;
  heap.reset();
  return heap;
}

Heap::Heap(Heap&& other) noexcept {
  take_from(other);
}

Heap& Heap::operator=(Heap&& other) noexcept {
  if (this != &other) {
    release();
    take_from(other);
  }
  return *this;
}

Heap::~Heap() {
  release();
}

void Heap::take_from(Heap& other) noexcept {
  static_assert(std::is_trivially_copyable_v<Record>);
  blocks_ = std::exchange(other.blocks_, nullptr);
  buckets_ = std::exchange(other.buckets_, nullptr);
  bucket_count_ = std::exchange(other.bucket_count_, 0);
  bucket_shift_ = other.bucket_shift_;
  committed_ = other.committed_;
  used_ = other.used_;
  max_blocks_ = other.max_blocks_;
  spare_ = other.spare_;
  spare_count_ = other.spare_count_;
  live_count_ = other.live_count_;
  granule_shift_ = other.granule_shift_;
  index_offsets_ = other.index_offsets_;
  capacity_ = other.capacity_;
  live_ = other.live_;
  high_water_ = other.high_water_;
  row_bits_ = other.row_bits_;
  std::copy(std::begin(other.cell_bits_), std::end(other.cell_bits_), std::begin(cell_bits_));
  std::copy(std::begin(other.heads_), std::end(other.heads_), std::begin(heads_));
}

void Heap::release() noexcept {
  if (blocks_ != nullptr) munmap(blocks_, sizeof(Record) * max_blocks_);
  delete[] buckets_;
  blocks_ = nullptr;
  buckets_ = nullptr;
}

bool Heap::commit_more() {
  if (committed_ == max_blocks_) return false;
  const uint32_t target = std::min(max_blocks_, committed_ + kCommitStep);
  // Page boundaries: kCommitStep records are whole pages, so `committed_` always begins one.
  if (mprotect(blocks_ + committed_, sizeof(Record) * (target - committed_), PROT_READ | PROT_WRITE) != 0)
    return false;
  committed_ = target;
  return true;
}

void Heap::reset() {
  while (row_bits_ != 0) {
    const unsigned row = static_cast<unsigned>(std::countr_zero(row_bits_));
    row_bits_ &= row_bits_ - 1;
    while (cell_bits_[row] != 0) {
      heads_[row * kBinsPerDoubling + static_cast<unsigned>(std::countr_zero(cell_bits_[row]))] = kNone;
      cell_bits_[row] &= cell_bits_[row] - 1;
    }
  }
  if (live_count_ != 0 && buckets_ != nullptr) std::fill_n(buckets_, bucket_count_, kNone);
  used_ = 1;
  spare_ = kNone;
  spare_count_ = 0;
  live_ = 0;
  live_count_ = 0;
  high_water_ = 0;
  blocks_[0] = Record{};
  blocks_[0].size = UINT64_MAX;  // see bin_insert()
  if (capacity_ != 0) {
    const uint32_t hole = new_record();
    blocks_[hole].where = 0;
    blocks_[hole].size = capacity_;
    blocks_[hole].prev = blocks_[hole].next = kNone;
    make_hole(hole);
  }
}

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

// ---- offset index: at least two buckets a live block, each a chain through the records of its blocks, the
// latest first ----
//
// Taking a block in is one store to its bucket and no search; a block is found at the head of its chain in
// four cases of five, and then nothing but its bucket and its own record is touched.

inline bool Heap::index_reserve(uint32_t extra) {
  const uint64_t needed = kBucketsPerBlock * (uint64_t{live_count_} + extra);
  return needed <= bucket_count_ || index_grow(needed);
}

bool Heap::index_grow(uint64_t needed) {
  const uint64_t count = std::max<uint64_t>(64, std::bit_ceil(needed));
  uint32_t* fresh = new (std::nothrow) uint32_t[count]();
  if (fresh == nullptr) return false;
  delete[] std::exchange(buckets_, fresh);
  bucket_count_ = static_cast<uint32_t>(count);
  bucket_shift_ = 64u - static_cast<unsigned>(std::countr_zero(count));
  if (live_count_ != 0)  // in the order of the records: only the buckets are touched at random
    for (uint32_t i = 1; i < used_; ++i)
      if (!blocks_[i].is_hole()) set_live(i, blocks_[i].offset());
  return true;
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

BlockHandle Heap::find(uint64_t offset_bytes) const {
  if (!index_offsets_ || live_count_ == 0 || (offset_bytes & (granule_bytes() - 1)) != 0)
    return {0, 0, HeapStatus::kBadArgument};
  const uint32_t block = index_find(offset_bytes >> granule_shift_);
  if (block == kNone) return {0, 0, HeapStatus::kBadArgument};
  return {offset_bytes, block, HeapStatus::kOk};
}

// ---- allocate, free ----

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

// Of a live block that is in the index no more.
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

HeapStatus Heap::carve(BlockHandle block, std::span<const HeapExtent> parts, std::span<BlockHandle> handles) {
  if (!is_live(block) || handles.size() < parts.size()) return HeapStatus::kBadArgument;
  const uint64_t mask = granule_bytes() - 1;
  const uint64_t block_size = size_bytes(block);
  uint64_t end = 0;  // relative to the block
  for (const HeapExtent& part : parts) {
    if ((part.offset_bytes & mask) != 0 || part.size_bytes == 0 || part.offset_bytes < block.offset_bytes)
      return HeapStatus::kBadArgument;
    const uint64_t begin = part.offset_bytes - block.offset_bytes;
    if (begin < end || begin >= block_size || part.size_bytes > block_size - begin)
      return HeapStatus::kBadArgument;
    end = begin + ((part.size_bytes + mask) & ~mask);
  }
  const auto count = static_cast<uint32_t>(parts.size());
  if (!records_available(2 * count + 2) || (index_offsets_ && !index_reserve(count)))
    return HeapStatus::kNoRecords;
  // Free it, then take the parts out of the hole that results, left to right: each is at the front of what
  // remains.
  const uint64_t high_water = high_water_;
  uint32_t before = blocks_[block.index].prev;
  if ((before & kHoleLink) != 0) before = blocks_[at(before)].prev;
  free(block);
  uint32_t hole = at(blocks_[before].next);
  for (size_t k = 0; k < parts.size(); ++k) {
    const uint64_t offset = parts[k].offset_bytes >> granule_shift_;
    handles[k] = place(hole, offset - blocks_[hole].offset(),
                       ((parts[k].size_bytes - 1) >> granule_shift_) + 1, parts[k].tag);
    hole = at(blocks_[handles[k].index].next);
  }
  high_water_ = high_water;
  return HeapStatus::kOk;
}

uint64_t Heap::floor_bytes() const {
  const uint32_t last = blocks_[0].prev;
  const uint64_t end = (last & kHoleLink) != 0 ? blocks_[at(last)].offset() : capacity_;
  return end << granule_shift_;
}

HeapStatus Heap::resize(uint64_t capacity_bytes) {
  const uint64_t capacity = capacity_bytes >> granule_shift_;
  if (capacity > kMaxGranules) return HeapStatus::kBadArgument;
  if (capacity == capacity_) return HeapStatus::kOk;
  const uint64_t floor = floor_bytes() >> granule_shift_;
  if (capacity < floor) return HeapStatus::kNoSpace;
  const uint32_t last = at(blocks_[0].prev);
  if ((blocks_[0].prev & kHoleLink) != 0) {
    Record& hole = blocks_[last];
    bin_remove(last, bin_of(hole.size));
    if (capacity == floor) {
      blocks_[hole.prev].next = kNone;
      blocks_[0].prev = hole.prev;
      recycle(last);
    } else {
      hole.size = capacity - floor;
      bin_insert(last, bin_of(hole.size));
    }
  } else {
    if (!records_available(1)) return HeapStatus::kNoRecords;
    const uint32_t hole = new_record();
    blocks_[hole].where = capacity_;
    blocks_[hole].size = capacity - capacity_;
    blocks_[hole].prev = last;
    blocks_[hole].next = kNone;
    make_hole(hole);
  }
  capacity_ = capacity;
  return HeapStatus::kOk;
}

uint64_t Heap::largest_hole_bytes() const {
  if (row_bits_ == 0) return 0;
  const unsigned row = 63u - static_cast<unsigned>(std::countl_zero(row_bits_));
  const unsigned cell = 63u - static_cast<unsigned>(std::countl_zero(cell_bits_[row]));
  uint64_t largest = 0;
  for (uint32_t i = heads_[row * kBinsPerDoubling + cell]; i != kNone; i = blocks_[i].links.next)
    largest = std::max(largest, blocks_[i].size);
  return largest << granule_shift_;
}

uint64_t Heap::metadata_bytes() const {
  return sizeof(Heap) + sizeof(Record) * used_ + sizeof(uint32_t) * uint64_t{bucket_count_};
}

// ---- invariants ----

base::Status Heap::check() const {
  const auto broken = [](const char* what, uint64_t where) {
    return base::Status(GPUSHARE_INTERNAL,
                        base::format("heap: %s at %llu", what, static_cast<unsigned long long>(where)));
  };
  uint64_t end = 0, live = 0;
  uint32_t prev = 0, holes = 0, live_count = 0;
  bool prev_free = false;
  uint32_t link = blocks_[0].next;
  for (uint32_t i = at(link); i != kNone; i = at(link)) {
    const Record& r = blocks_[i];
    const bool is_free = r.is_hole();
    if (i >= used_) return broken("record beyond those in use", i);
    if (r.offset() != end) return broken("block does not begin where the one before ends", end);
    if (r.size == 0) return broken("empty block", end);
    if (r.prev != (prev_free ? prev | kHoleLink : prev)) return broken("back link does not match", end);
    if (is_free != ((link & kHoleLink) != 0)) return broken("link does not say what it leads to", end);
    if (is_free && prev_free) return broken("two holes touch", end);
    if (is_free) {
      ++holes;
    } else {
      live += r.size;
      ++live_count;
      if (index_offsets_ && index_find(r.offset()) != i) return broken("block missing from the index", end);
    }
    end += r.size;
    prev = i;
    prev_free = is_free;
    link = r.next;
  }
  if (link != kNone || blocks_[0].prev != (prev_free ? prev | kHoleLink : prev))
    return broken("last block is not the list's end", prev);
  if (end != capacity_) return broken("blocks end before the capacity", end);
  if (live != live_ || live_count != live_count_) return broken("live counters disagree, walked", live);
  if (uint64_t{holes} + live_count + spare_count_ + 1 != used_)
    return broken("records leaked, in use", used_);
  uint32_t binned = 0;
  for (unsigned bin = 0; bin < kBins; ++bin) {
    const bool bit = ((cell_bits_[bin >> kBinLog] >> (bin & (kBinsPerDoubling - 1))) & 1) != 0;
    if (bit != (heads_[bin] != kNone)) return broken("bitmap disagrees with bin", bin);
    if (bit && ((row_bits_ >> (bin >> kBinLog)) & 1) == 0) return broken("row bitmap misses bin", bin);
    uint32_t before = kNone;
    for (uint32_t i = heads_[bin]; i != kNone; i = blocks_[i].links.next) {
      if (!blocks_[i].is_hole()) return broken("live block in bin", bin);
      if (bin_of(blocks_[i].size) != bin) return broken("hole of another size in bin", bin);
      if (blocks_[i].links.prev != before) return broken("bin's back link does not match", bin);
      before = i;
      if (++binned > holes) return broken("more holes in bins than in the heap, at bin", bin);
    }
  }
  if (binned != holes) return broken("holes missing from bins, found", binned);
  for (unsigned row = 0; row < kRows; ++row)
    if (((row_bits_ >> row) & 1) != 0 && cell_bits_[row] == 0)
      return broken("row bitmap set for empty row", row);
  uint32_t indexed = 0;
  for (uint32_t bucket = 0; bucket < bucket_count_; ++bucket)
    for (uint32_t i = buckets_[bucket]; i != kNone && indexed <= live_count_; i = blocks_[i].next_in_bucket())
      ++indexed;
  if (index_offsets_ && indexed != live_count_)
    return broken("index holds another number of blocks", indexed);
  return {};
}

}  // namespace gpushare::memory
