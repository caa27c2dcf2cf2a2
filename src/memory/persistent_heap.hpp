// persistent_heap.hpp: the one implementation of PersistentHeap: a session's blocks in one or more extents.
//
// An extent is a range of the layout with a block heap over it. Most sessions have one; growing adds to the
// last where the layout can, else appends another. Objects are pooled by DeviceMemory and never destroyed
// before it, so that a late free by address meets an owner that says NOT_FOUND.
//
// Promoted blocks lie in lanes and count in the promise. Whole granules of them are lent to the lane, so that
// they do not hold their bytes twice: the extents are then smaller than the promise by lent_. owed_ is the part
// of lent_ that lanes have returned and the extents have not got back yet.
//
// Granules of the extents can be moved to host memory and back under their own addresses (granule_mover.hpp). Granules
// in host memory do not count in the promise, which covers the other granules and lent_. Blocks in them stay live, and
// a new block may be placed in a hole there.
//
// Locks: control_ serialises open, close, resize and paging, and is held across driver calls, and so is ranges_mutex_, for the
// list of elastic ranges; the door's lock_ guards the blocks and is held for some tens of nanoseconds. Order: control_, then
// ranges_mutex_ and a range's, or a lane's control_ and a lane's lock, then lock_, then the layout's. A lane at its boundary
// comes the other way: it only tries control_.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "memory/block_owner.hpp"
#include "memory/heap_door.hpp"
#include "memory/lane_plan.hpp"
#include "memory/short_lock.hpp"
#include "memory/spill.hpp"

namespace gpushare::memory {

class ElasticRange;
class LaneImpl;

class PersistentHeapImpl final : public PersistentHeap, public BlockOwner, private MovingBlocks {
 public:
  explicit PersistentHeapImpl(Shared& shared) : shared_(shared), door_(HeapDoor::take(*this, shared.owner)) {}
  ~PersistentHeapImpl() override { door_.give_back(); }

  // Life cycle, for DeviceMemory. close returns everything but promoted blocks, which lie in lanes, and the
  // fences that end the session's device work; the object may be opened again.
  base::Status open(SessionId session, std::string name, uint64_t promised_bytes);
  // Lanes that it lent to must end the loan.
  base::Status close(FenceList* out_fences, std::vector<LaneImpl*>* out_borrowers);
  // Position in DeviceMemory's list of open heaps.
  size_t position = 0;

  // PersistentHeap
  SessionId session() const override { return spill_owner_.session.load(std::memory_order_relaxed); }
  base::Result<Address> alloc(Kind kind, uint64_t bytes, uint64_t alignment) override;
  base::Result<Address> alloc_spilled(Kind kind, uint64_t bytes, uint64_t alignment) override;
  base::Status move_spilled(bool home, uint64_t most_bytes, uint64_t budget_ns, const device::Stream& stream,
                            uint64_t* out_bytes) override;
  uint64_t release_home() override;
  uint64_t kept_away_bytes() const override;
  // For DeviceMemory: an elastic range of the session, which goes out and comes in with the heap.
  base::Status open_range(ElasticRange& range, std::string name, uint64_t bytes);
  void close_range(ElasticRange& range);
  std::vector<ElasticRange*> ranges() const;
  uint64_t away_bytes() const override {
    return spill_owner_.away_bytes.load(std::memory_order_relaxed) +
           away_live_bytes_.load(std::memory_order_relaxed);
  }
  HeapDoor* open_door(const void* name) override;
  void close_door() override;
  base::Status await_moves() override;
  base::Status resize(uint64_t promised_bytes) override;
  base::Status give_back_free() override;
  void set_stream(const device::Stream* stream) override { spill_owner_.set_stream(stream); }
  base::Status page_out(const device::Stream& stream, uint64_t most_bytes,
                        uint64_t* out_given_bytes) override;
  base::Status page_in(const device::Stream& stream, uint64_t most_bytes) override;
  void stop_page_in() override;
  bool paged_out() const override {
    const Residency residency = residency_.load();
    return residency == Residency::kPagedOut || residency == Residency::kIn;
  }
  bool own_blocks_out() const override {
    const Residency residency = residency_.load();
    return residency == Residency::kOut || residency == Residency::kPagedOut;
  }
  bool is_resident() const override { return residency_.load() == Residency::kResident; }
  HeapStats stats() const override;
  void reset_peak() override;
  PersistentHeapImpl& impl() override { return *this; }

  // BlockOwner
  base::Status free_block(Address address) override;
  base::Status add_use(Address address, const FencePtr& use) override;
  bool find_block(Address address, BlockInfo* out_info) override;
  const device::Stream* home_stream() const override { return spill_owner_.stream.load(); }
  bool is_home(const void* native) const override { return spill_owner_.native.load() == native; }

  // Counts what Shared does not know yet.
  void tell();

  // For lanes, which hold the session's promoted blocks. DEVICE_OUT_OF_MEMORY when the promise does not cover
  // `bytes` more.
  base::Status add_promoted(uint64_t bytes, LaneImpl* in);
  // Notes a lane that is about to borrow without a promoted block. The lane returns the loan when the heap closes or goes out.
  void lends_to(LaneImpl* lane);
  void remove_promoted(uint64_t bytes);
  // A granule with kept blocks has lost both its memories, so no page-in succeeds any more.
  void lose_kept() { kept_lost_.store(true); }
  // Lends up to `bytes`, whole granules of the layout, off the ends of the extents; returns how much. Never
  // waits: less, or 0, when it would have to.
  uint64_t lend(uint64_t bytes);
  uint64_t lend_now(uint64_t bytes) GPUSHARE_REQUIRES(control_);  // for who is called with control_ held
  void take_back(uint64_t bytes);
  // Gives the bytes taken back from lanes to the extents if that needs no wait.
  void try_restore();
  // Lent to lanes now.
  uint64_t on_loan() const;
  bool is_open() const { return residency_.load() != Residency::kClosed; }
  const device::Stream* stream() const { return spill_owner_.stream.load(); }
  SpillOwner& spill_owner() { return spill_owner_; }
  // Used by the lane that runs the session's iteration, nobody else.
  LanePlan& plan() { return plan_; }
  std::string name() const;
  void snapshot(std::vector<SegmentSnapshot>* out_segments) const;
  // Appends the extents' ranges. Returns the first broken invariant; empty when all hold.
  std::string check(std::vector<Range>* out_ranges) const;

 private:
  friend class HeapDoor;
  friend struct Shared;

  // kPaging: its own blocks go out. kOut: they are out, and its kept blocks may be to follow. kIn: its own blocks are in
  // again, and its kept blocks may be to follow.
  enum class Residency : uint8_t { kClosed, kResident, kPaging, kOut, kPagedOut, kIn };
  struct Granule {
    uint64_t last_use = 0;
    uint64_t live_bytes = 0;  // while blocks move
    bool away = false;
    bool lost = false;  // away for good: a move left no memory there
  };
  struct Extent {
    Range range;
    std::unique_ptr<Heap> heap;     // tens of KiB: never moved
    std::vector<Granule> granules;  // with a host tier: as many as the range has
    size_t away = 0;                // of these
    // Granules that give_back_free() took from between blocks; empty where there are none. The extent keeps its size and gets
    // no new block.
    std::vector<bool> hollow;
    bool is_hollow(size_t granule) const { return !hollow.empty() && hollow[granule]; }
  };
  struct Run {  // live bytes of an extent, for copying
    size_t extent;
    uint64_t offset;
    uint64_t bytes;
  };

  base::Result<std::unique_ptr<Heap>> take_heap() GPUSHARE_REQUIRES(control_);
  base::Status add_extent(uint64_t bytes) GPUSHARE_REQUIRES(control_);
  // The last extent that can have so many bytes more.
  base::Status extend_any(uint64_t bytes, bool may_wait) GPUSHARE_REQUIRES(control_);
  base::Status extend(size_t extent, uint64_t bytes, bool may_wait) GPUSHARE_REQUIRES(control_);
  enum class Cut : uint8_t { kAll, kSome, kGranules };  // kGranules: some, in whole granules
  uint64_t cut(uint64_t bytes, Cut how) GPUSHARE_REQUIRES(control_);
  // Takes up to `bytes` from granules without blocks, wherever they lie; returns how much.
  uint64_t hollow_out(uint64_t bytes) GPUSHARE_REQUIRES(control_);
  bool any_hollow() const GPUSHARE_REQUIRES(control_) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
    return std::any_of(extents_.begin(), extents_.end(),
                       [](const Extent& each) { return !each.hollow.empty(); });
  }
  // Calls fn(range) for each stretch of the extent that has memory.
  template <class Fn>
  void for_each_stretch(const Extent& extent, Fn&& fn) const {
    if (extent.hollow.empty()) return fn(extent.range);
    const uint64_t granularity = shared_.layout->granularity_bytes();
    for (size_t first = 0, end = 0; first < extent.hollow.size(); first = end) {
      for (end = first + 1; end < extent.hollow.size() && extent.hollow[end] == extent.hollow[first];) ++end;
      if (!extent.hollow[first])
        fn(Range{extent.range.base + first * granularity, (end - first) * granularity, extent.range.slot});
    }
  }
  void restore(bool may_wait) GPUSHARE_REQUIRES(control_);
  std::vector<LaneImpl*> borrowers() const;
  // in_pieces: several extents will do where no hole is large enough.
  base::Status grow(uint64_t bytes, bool in_pieces) GPUSHARE_REQUIRES(control_);
  base::Status shrink(uint64_t promised_bytes) GPUSHARE_REQUIRES(control_);
  void await_fences(const FenceList& fences);
  FenceList own_fences() const;
  // For the holder of control_: nobody adds, removes or resizes any meanwhile.
  std::vector<Extent>& extents() GPUSHARE_REQUIRES(control_) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
    return extents_;
  }
  Extent* extent_of(Address address) GPUSHARE_REQUIRES(door_.lock_);
  base::Status place(Kind kind, uint64_t bytes, uint64_t alignment, Address* out_address)
      GPUSHARE_REQUIRES(door_.lock_);
  BlockHandle allocate(uint64_t bytes, uint64_t alignment, uint64_t tag, Address* out_address)
      GPUSHARE_REQUIRES(door_.lock_);
  void release(Address address) GPUSHARE_REQUIRES(door_.lock_);
  base::Status out_of_memory(uint64_t bytes, HeapStatus status) GPUSHARE_REQUIRES(door_.lock_);
  // Granules
  void begin_moves(bool home, std::vector<MovableGranule>* out_granules, FenceList* out_uses) override;
  void moved(const MovableGranule& granule, bool home, bool lost) override;
  void end_moves() override;
  void size_granules(Extent& extent) GPUSHARE_REQUIRES(door_.lock_);
  void touch(Extent& extent, uint64_t offset, uint64_t bytes) GPUSHARE_REQUIRES(door_.lock_);
  bool touched_last(Address address, uint64_t bytes) const GPUSHARE_REQUIRES(door_.lock_);
  template <class Fn>
  void for_each_granule(uint64_t offset, uint64_t bytes, Fn&& fn) const {
    memory::for_each_granule(shared_.layout->granularity_bytes(), offset, bytes, fn);
  }
  // The part of a block that lies in host memory.
  uint64_t away_part(const Extent& extent, uint64_t offset, uint64_t bytes) const;
  // Blocks as their user asks for them and frees them, where nothing stands in the way; else nothing happens. Inlined into the
  // door's calls (persistent_heap_inner.hpp).
  bool alloc_plain(uint64_t bytes, uint64_t tag, Address* out) GPUSHARE_REQUIRES(door_.lock_);
  bool free_plain(Address address) GPUSHARE_REQUIRES(door_.lock_);
  void tell_live() GPUSHARE_REQUIRES(door_.lock_);  // once it differs enough
  void leave_quiet() GPUSHARE_REQUIRES(door_.lock_);
  void tell_now() GPUSHARE_REQUIRES(door_.lock_);
  // Adds bytes of a block, or takes them away: modulo 2^64.
  void count_live(uint64_t bytes, uint64_t away_bytes) GPUSHARE_REQUIRES(door_.lock_);
  uint64_t device_live() const GPUSHARE_REQUIRES(door_.lock_) {
    return live_ - away_live_bytes_.load(std::memory_order_relaxed);
  }
  // Copies the saved runs to (`out`) or from the chunks, in order, from byte `from` of them on, and waits. It stops at
  // byte `end` and after most_bytes, whichever comes first, and returns where. The first bytes of each extent, as valid_ says,
  // need no copy.
  base::Result<uint64_t> copy_runs(uint64_t from, uint64_t end, uint64_t most_bytes,
                                   const device::Stream& stream, bool out) GPUSHARE_REQUIRES(control_);
  // The saved runs have so many.
  uint64_t saved_bytes() const GPUSHARE_REQUIRES(control_);
  base::Status may_page_out() GPUSHARE_REQUIRES(control_);
  // Host memory for all that is to go, of its ranges too.
  base::Status begin_page_out(const device::Stream& stream) GPUSHARE_REQUIRES(control_);
  // No block is placed any more. Returns the uses that must have passed.
  FenceList choose_runs() GPUSHARE_REQUIRES(control_);
  // Gives the device memory back that only saved bytes from `at` on need, and adds how much of the promise that was.
  base::Status give_saved(uint64_t at, uint64_t* out_given_bytes) GPUSHARE_REQUIRES(control_);
  void drop_saved() GPUSHARE_REQUIRES(control_);
  void forget_ranges() GPUSHARE_REQUIRES(control_);
  // Gives up a page-in: the heap and its ranges are out.
  void leave_out() GPUSHARE_REQUIRES(control_);
  // Its ranges, then its own blocks. Returns what is left of most_bytes; it is not over before residency_ says so.
  base::Result<uint64_t> bring_in(const device::Stream& stream, uint64_t most_bytes)
      GPUSHARE_REQUIRES(control_);
  // Moves kept blocks, whole granules of most_bytes together at most. False: others may be to follow.
  bool move_kept(bool home, const device::Stream& stream, uint64_t most_bytes) GPUSHARE_REQUIRES(control_);
  // After its own blocks: its ranges, then kept blocks, which nobody has the bytes of before all are out.
  base::Status send_rest_out(const device::Stream& stream, uint64_t most_bytes, uint64_t* out_given_bytes)
      GPUSHARE_REQUIRES(control_);
  base::Status kept_lost() const;

  Shared& shared_;
  SpillOwner spill_owner_;  // session, stream, spilled bytes
  LanePlan plan_;
  std::atomic<Residency> residency_{Residency::kClosed};
  std::atomic<bool> kept_lost_{false};

  mutable base::WorkMutex control_;
  std::vector<std::unique_ptr<Heap>> spare_heaps_ GPUSHARE_GUARDED_BY(control_);
  std::vector<Run> saved_runs_ GPUSHARE_GUARDED_BY(control_);
  std::vector<uint8_t*> saved_chunks_ GPUSHARE_GUARDED_BY(control_);
  // During a page-out: saved bytes from here on are in host memory, and each extent has memory behind so many bytes.
  uint64_t out_from_ GPUSHARE_GUARDED_BY(control_) = 0;
  std::vector<uint64_t> still_backed_ GPUSHARE_GUARDED_BY(control_);
  // During a page-in: saved bytes before this are back, and the extents' first bytes never were away. Empty otherwise.
  uint64_t in_until_ GPUSHARE_GUARDED_BY(control_) = 0;
  std::vector<uint64_t> valid_ GPUSHARE_GUARDED_BY(control_);
  bool coming_in_ GPUSHARE_GUARDED_BY(control_) = false;  // its extents have memory again
  // The promise before it shrank last. A caller that takes the shrinking back must get these bytes, if need be in pieces.
  uint64_t before_shrink_ GPUSHARE_GUARDED_BY(control_) = 0;

  mutable base::WorkMutex ranges_mutex_;
  std::vector<ElasticRange*> ranges_ GPUSHARE_GUARDED_BY(ranges_mutex_);

  HeapDoor& door_;
  std::string name_ GPUSHARE_GUARDED_BY(door_.lock_);
  // Changed under control_ as well.
  std::vector<Extent> extents_ GPUSHARE_GUARDED_BY(door_.lock_);
  UseTable uses_ GPUSHARE_GUARDED_BY(door_.lock_);
  uint64_t promised_ GPUSHARE_GUARDED_BY(door_.lock_) =
      0;  // = the bytes of the extents' granules that are not away + lent_
  bool moving_ GPUSHARE_GUARDED_BY(door_.lock_) = false;  // no block is placed: await_moves()
  uint64_t lent_ GPUSHARE_GUARDED_BY(door_.lock_) = 0;
  uint64_t owed_ GPUSHARE_GUARDED_BY(door_.lock_) = 0;
  void add_borrower(LaneImpl* lane) GPUSHARE_REQUIRES(door_.lock_);
  std::vector<LaneImpl*> borrowers_
      GPUSHARE_GUARDED_BY(door_.lock_);                 // with blocks that it kept since it was opened
  uint64_t live_ GPUSHARE_GUARDED_BY(door_.lock_) = 0;  // without promoted, with what is away
  std::atomic<uint64_t> away_live_bytes_{0};            // written under lock_
  uint64_t promoted_ GPUSHARE_GUARDED_BY(door_.lock_) = 0;
  uint64_t peak_ GPUSHARE_GUARDED_BY(door_.lock_) = 0;
  // The granule that touch() marked last, and when; empty if it marked several.
  Range touched_ GPUSHARE_GUARDED_BY(door_.lock_);
  uint64_t touched_tick_ GPUSHARE_GUARDED_BY(door_.lock_) = 0;
  // Its part of Shared::persistent_bytes without promoted blocks, and the most device_live() has been since it told.
  uint64_t told_ GPUSHARE_GUARDED_BY(door_.lock_) = 0, highest_ GPUSHARE_GUARDED_BY(door_.lock_) = 0;
  // It tells when device_live() leaves the stretch of this width from here on (modulo 2^64). The width is 0 while it is not in
  // Shared::untold.
  uint64_t quiet_from_ GPUSHARE_GUARDED_BY(door_.lock_) = 0, quiet_width_
                                                             GPUSHARE_GUARDED_BY(door_.lock_) = 0;
  bool untold_ GPUSHARE_GUARDED_BY(door_.lock_) = false;  // it is in Shared::untold
  PersistentHeapImpl* next_untold_ = nullptr;             // there
};

}  // namespace gpushare::memory
