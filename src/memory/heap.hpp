// memory: the bookkeeping of device memory and the lanes and persistent heaps built on it. This half of the
// folder (heap, placement, plan, trace_io, replay) never touches a device byte: offsets in, offsets out. May
// be called from executor, loader, sim's tools and the command line; includes base (and, in its device-facing
// half, device) only.
//
// heap.hpp: a block heap over offsets [0, capacity): constant-time allocate and free, all metadata on the
// host.
//
// The algorithm is segregated fit with bounded best fit, after TLSF (Masmano et al. 2004) and the two-level
// bins in common use for GPU heaps: free blocks hang in bins, kBinsPerDoubling to each power of two of their
// size; a bitmap finds the next non-empty bin in a few instructions. Plain two-level bins lose 7 to 29 points
// of packing against an exact best fit because they take the first block of a coarse bin. Here bins are fine
// (1.6% wide) and the head of a bin is kept small and low: a hole enters a bin as its head unless the head is
// smaller, or as large and lower. The head of the request's own bin is taken if it fits, else the head of the
// next non-empty bin. On our traces this packs like exact best fit, at the speed of plain bins.
// docs/design/memory-heap.md has the figures and the alternatives that were tried.
//
// Records are 32 bytes each, named by 32-bit index, in a reserved address range committed as it fills, so
// that creating a heap costs the same for 1 MiB and for 1 PiB. A live block costs one record and 8 to 16
// bytes of offset index; a hole costs one record.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <type_traits>

#include "base/status.hpp"

namespace gpushare::memory {

struct HeapOptions {
  uint64_t capacity_bytes = 0;  // rounded down to whole granules; may be 0 and grow later
  uint64_t granule_bytes =
      256;  // power of two, 1 to 2^30; sizes are rounded up to it, offsets are multiples of it
  uint32_t max_blocks =
      1u << 21;  // live blocks and holes together; 32 bytes of address space each, committed as used
  bool index_offsets = true;  // keep the table that find(offset) needs; max_blocks at most 2^21 then
};

// Why an allocation or free did not happen. A heap makes no messages: its callers know the names.
enum class HeapStatus : uint32_t {
  kOk = 0,
  kNoSpace,      // no hole is large enough; see largest_hole_bytes()
  kNoRecords,    // max_blocks reached, or the host refused memory for metadata
  kBadArgument,  // zero bytes, alignment not a power of two, range outside the heap, or not a live block
};

// A live block, or (index 0) none with the reason in `status`. Two registers wide.
struct BlockHandle {
  uint64_t offset_bytes = 0;
  uint32_t index = 0;
  HeapStatus status = HeapStatus::kBadArgument;
  explicit operator bool() const { return index != 0; }
};

// Which end of its hole a block takes. Blocks that live long belong at the other end than blocks that come
// and go.
enum class HeapSide : uint8_t { kLow, kHigh };

// A block or hole, as for_each_block() reports them in ascending offset.
struct HeapBlock {
  uint64_t offset_bytes;
  uint64_t size_bytes;  // rounded up to granules
  uint64_t tag;         // 0 for holes
  uint32_t index;
  bool live;
};

// A range inside a block, for carve().
struct HeapExtent {
  uint64_t offset_bytes;
  uint64_t size_bytes;
  uint64_t tag;
};

// A heap is not thread-safe: it has one owner, or the owner's lock guards it. No call blocks (metadata growth is one mprotect a
// MiB of records) and none throws. Movable, not copyable.
class Heap {
 public:
  // Errors: INVALID_ARGUMENT (granule, capacity above 2^42 granules, max_blocks below 4 or above its limit);
  // HOST_OUT_OF_MEMORY when the address range for the records cannot be reserved.
  static base::Result<Heap> create(const HeapOptions& options);
  Heap(Heap&& other) noexcept;
  Heap& operator=(Heap&& other) noexcept;
  ~Heap();

  // O(1). `bytes` > 0; `alignment_bytes` a power of two (below a granule it is a granule); alignment is of
  // the offset, so the arena's base must be at least as aligned. `tag` is the caller's, kept until free. On
  // failure the handle is empty and says why; the heap is unchanged. A failing call may look at every hole of
  // the request's own bin.
  BlockHandle allocate(uint64_t bytes, uint64_t alignment_bytes = 0, uint64_t tag = 0,
                       HeapSide side = HeapSide::kLow);
  // Two of the options. A caller whose heaps always have the same values gives constants to the inlined calls, which then
  // read neither option.
  struct Shape {
    unsigned granule_shift;
    bool index_offsets;
  };
  // Why an allocation got kNoRecords: there are records for max_blocks, and no more. Else the host has no memory for them.
  bool at_record_limit() const { return committed_ == max_blocks_; }
  Shape shape() const { return {granule_shift_, index_offsets_}; }
  // allocate(bytes, 0, tag, HeapSide::kLow) for 1 to 2^42 granules. Inlined: defined in heap_inner.hpp.
  BlockHandle allocate_front(uint64_t bytes, uint64_t tag, Shape shape);
  // Exactly [offset, offset + bytes), both multiples of the granule (bytes is rounded up). O(blocks): for
  // restoring a layout, not for a hot path. kNoSpace if any part is taken.
  BlockHandle allocate_at(uint64_t offset_bytes, uint64_t bytes, uint64_t tag = 0);

  // O(1): merges with free neighbours. kBadArgument, and no change, if the handle is not live.
  HeapStatus free(BlockHandle block);
  // The same by offset alone; needs index_offsets.
  HeapStatus free_at(uint64_t offset_bytes);
  // The same, unless the block's tag has one of the bits of `kept`. False: nothing has changed. Inlined: defined in
  // heap_inner.hpp.
  bool free_unless(uint64_t offset_bytes, uint64_t kept, Shape shape);
  // The live block that begins at `offset_bytes`, or an empty handle. O(1); needs index_offsets.
  BlockHandle find(uint64_t offset_bytes) const;

  // Replaces one live block by the live parts given (ascending, disjoint, inside it, sizes rounded up to
  // granules; ends rounded up must not meet the next part); the rest becomes free. handles[i] receives
  // part i. O(parts). This is how a planned arena turns into ordinary blocks when its sequence deviates. All
  // or nothing.
  HeapStatus carve(BlockHandle block, std::span<const HeapExtent> parts, std::span<BlockHandle> handles);

  // For live blocks only. With any other handle the behaviour is undefined (use find()).
  uint64_t size_bytes(BlockHandle block) const { return blocks_[block.index].size << granule_shift_; }
  uint64_t tag(BlockHandle block) const { return blocks_[block.index].tag; }
  void set_tag(BlockHandle block, uint64_t tag) { blocks_[block.index].tag = tag; }
  bool is_live(BlockHandle block) const;

  // Moves the end. Growing always succeeds up to 2^42 granules; shrinking only over free space: kNoSpace
  // otherwise, see floor_bytes(). Rounded down to granules. O(1).
  HeapStatus resize(uint64_t capacity_bytes);
  // The smallest capacity that resize() would accept now: the end of the last live block. O(1).
  uint64_t floor_bytes() const;
  // Forgets every block: one hole again. O(holes' bins), independent of the number of blocks, except that the
  // offset index is cleared if there is one (O(its size)).
  void reset();

  uint64_t capacity_bytes() const { return capacity_ << granule_shift_; }
  uint64_t granule_bytes() const { return uint64_t{1} << granule_shift_; }
  uint64_t live_bytes() const { return live_ << granule_shift_; }
  uint64_t live_granules() const { return live_; }
  uint64_t free_bytes() const { return (capacity_ - live_) << granule_shift_; }
  uint32_t live_blocks() const { return live_count_; }
  // The largest end of a live block since creation or reset_high_water().
  uint64_t high_water_bytes() const { return high_water_ << granule_shift_; }
  void reset_high_water() { high_water_ = floor_bytes() >> granule_shift_; }
  // Looks at the holes of one bin: for reports and out-of-memory messages.
  uint64_t largest_hole_bytes() const;
  // Host bytes committed for metadata now.
  uint64_t metadata_bytes() const;

  // Calls fn(const HeapBlock&) for every block and hole in ascending offset. fn must not change the heap.
  template <class Fn>
  void for_each_block(Fn&& fn) const {
    for (uint32_t i = at(blocks_[0].next); i != 0; i = at(blocks_[i].next)) {
      const Record& r = blocks_[i];
      const bool is_free = r.is_hole();
      fn(HeapBlock{r.offset() << granule_shift_, r.size << granule_shift_, is_free ? 0 : r.tag, i, !is_free});
    }
  }

  // Walks everything and compares: blocks tile [0, capacity), no two holes touch, bins and bitmaps hold
  // exactly the holes, counters and index agree. INTERNAL naming the first violation. O(blocks); for tests.
  base::Status check() const;

 private:
  static constexpr unsigned kBinLog = 6;  // bins per doubling, as a power of two
  static constexpr unsigned kBinsPerDoubling = 1u << kBinLog;
  static constexpr unsigned kMaxBits = 42;                   // granules
  static constexpr unsigned kRows = kMaxBits - kBinLog + 2;  // a size may be 2^kMaxBits itself
  static constexpr unsigned kBins = kRows * kBinsPerDoubling;
  static constexpr uint64_t kFreeBit = uint64_t{1} << 63;
  static constexpr uint64_t kOffsetMask = (uint64_t{1} << kMaxBits) - 1;
  static constexpr uint32_t kHoleLink = 1u << 31;
  // Fibonacci hashing: the high bits of the product spread evenly spaced offsets evenly over the buckets.
  static constexpr uint64_t kHashFactor = 0x9E3779B97F4A7C15ull;

  struct FreeLinks {
    uint32_t prev, next;
  };
  struct Record {
    uint64_t
        where;      // bits 0 to 41 the offset in granules, 42 to 62 of a live block the next in its bucket of
                    // the offset index (0: none), 63 marks a hole
    uint64_t size;  // granules
    union {
      uint64_t tag;     // live
      FreeLinks links;  // hole: its bin's list
    };
    uint32_t prev,
        next;  // neighbours by offset, with kHoleLink where that is a hole, so that freeing between live
               // blocks reads neither; 0 (the sentinel, which counts as live) ends both ways

    uint64_t offset() const { return where & kOffsetMask; }
    bool is_hole() const { return (where & kFreeBit) != 0; }
    uint32_t next_in_bucket() const { return static_cast<uint32_t>(where >> kMaxBits); }
  };
  static_assert(sizeof(Record) == 32);

  static uint32_t at(uint32_t link) { return link & ~kHoleLink; }

  Heap() = default;
  void take_from(Heap& other) noexcept;
  void release() noexcept;
  bool commit_more();
  uint32_t new_record();
  void recycle(uint32_t index);
  bool records_available(uint32_t count);
  uint64_t spare_records(uint32_t most) const;
  bool room_for_one();
  static unsigned bin_of(uint64_t size);
  void bin_insert(uint32_t index, unsigned bin);
  void bin_remove(uint32_t index, unsigned bin);
  // The next non-empty bin after `bin`; false if there is none.
  bool next_bin(unsigned bin, unsigned* out_bin) const;
  uint32_t best_in_bin(unsigned bin, uint64_t size) const;
  uint32_t find_hole(uint64_t size, unsigned* out_bin) const;
  uint32_t find_hole_aligned(uint64_t size, uint64_t alignment) const;
  BlockHandle place_front(uint32_t hole, unsigned bin, uint64_t size, uint64_t tag, Shape shape);
  BlockHandle place(uint32_t hole, uint64_t front, uint64_t size, uint64_t tag);
  void make_hole(uint32_t index);
  void release_block(uint32_t index);
  bool index_reserve(uint32_t extra);
  bool index_grow(uint64_t needed);
  uint32_t& bucket_of(uint64_t offset) const { return buckets_[(offset * kHashFactor) >> bucket_shift_]; }
  void set_live(uint32_t index, uint64_t offset, bool indexed);
  uint32_t index_find(uint64_t offset) const;
  uint32_t index_take(uint64_t offset);

  Record* blocks_ = nullptr;
  uint32_t* buckets_ = nullptr;  // offset index: the first live block of each bucket, or 0
  uint32_t bucket_count_ = 0;    // power of two, or 0
  uint32_t committed_ = 0;       // records readable and writable
  uint32_t used_ = 0;            // records ever handed out since reset
  uint32_t max_blocks_ = 0;
  uint32_t spare_ = 0;  // recycled records, chained by `next`
  uint32_t live_count_ = 0;
  uint32_t live_limit_ =
      0;  // with fewer live blocks there is a record and a bucket for one more; see room_for_one()
  unsigned granule_shift_ = 0;
  unsigned bucket_shift_ = 0;
  bool index_offsets_ = false;
  uint64_t capacity_ = 0;  // granules, as are the next two
  uint64_t live_ = 0;
  uint64_t high_water_ = 0;
  uint64_t row_bits_ = 0;
  uint64_t cell_bits_[kRows] = {};
  uint32_t heads_[kBins] = {};
};

// The status for callers of a heap that cannot name another block (HeapStatus::kNoRecords).
inline base::Status too_many_blocks(const std::string& who, const Heap& heap) {
  if (!heap.at_record_limit())
    return {GPUSHARE_HOST_OUT_OF_MEMORY, who + ": no host memory for the metadata of another block"};
  return {GPUSHARE_QUOTA_EXCEEDED,
          who + base::format(
                    " holds %u blocks, the most that one heap keeps records of. Free some, or allocate fewer "
                    "and larger blocks",
                    heap.live_blocks())};
}

}  // namespace gpushare::memory
