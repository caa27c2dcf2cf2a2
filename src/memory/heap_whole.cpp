// A heap as a whole: made, moved, given another size, emptied, carved, measured and checked.
//
// SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <new>

#include "memory/heap_inner.hpp"

namespace gpushare::memory {
namespace {

constexpr uint64_t kMaxGranules = uint64_t{1} << 42;
constexpr uint32_t kMaxIndexedBlocks = 1u << 21;  // the link of a bucket's chain has 21 bits
constexpr uint32_t kCommitStep = 1u << 15;        // records: 1 MiB

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
  live_count_ = other.live_count_;
  live_limit_ = std::exchange(other.live_limit_, 0);
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

// The sentinel, n live blocks and at most n + 1 holes between them take 2n + 2 records.
bool Heap::room_for_one() {
  if (!records_available(2) || (index_offsets_ && !index_reserve(1))) return false;
  const uint64_t with_records = (committed_ - 2) / 2;
  const uint64_t with_buckets = index_offsets_ ? bucket_count_ / kBucketsPerBlock : with_records;
  live_limit_ = static_cast<uint32_t>(std::min(with_records, with_buckets));
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

bool Heap::index_grow(uint64_t needed) {
  const uint64_t count = std::max<uint64_t>(64, std::bit_ceil(needed));
  uint32_t* fresh = new (std::nothrow) uint32_t[count]();
  if (fresh == nullptr) return false;
  delete[] std::exchange(buckets_, fresh);
  bucket_count_ = static_cast<uint32_t>(count);
  bucket_shift_ = 64u - static_cast<unsigned>(std::countr_zero(count));
  if (live_count_ != 0)  // in the order of the records: only the buckets are touched at random
    for (uint32_t i = 1; i < used_; ++i)
      if (!blocks_[i].is_hole()) set_live(i, blocks_[i].offset(), true);
  return true;
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
  if (live_limit_ > (committed_ - 2) / 2 ||
      (index_offsets_ && live_limit_ > bucket_count_ / kBucketsPerBlock))
    return broken("blocks without records or buckets, up to", live_limit_);
  if (live != live_ || live_count != live_count_) return broken("live counters disagree, walked", live);
  if (uint64_t{holes} + live_count + spare_records(UINT32_MAX) + 1 != used_)
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
