// lane.hpp: the one implementation of Lane: a range of the layout with a block heap over it, emptied at each
// boundary.
//
// Reuse inside a lane is ordered by its stream, so a freed block is free at once; only blocks used on other
// streams wait for an event, and at the boundary the lane's stream waits for all of these together, never the
// host.
//
// Promoted blocks stay where they are and pin the range: a lane with promoted blocks is neither moved nor
// shrunk below them, and closing it leaves the object behind, holding the range, until the last of them is
// freed. Objects are pooled like persistent heaps. A lane in memory that processes share gets memory of its own for its
// promoted blocks: keep() takes that, and the iteration's end copies the blocks and maps it behind the same addresses.
// On the virtual layout the range is the lane's size plus the bytes that sessions lend for their promoted blocks in it
// (loans). Loans are balanced at boundaries, so that an iteration finds the whole size beside the pinned blocks. An
// iteration on a plan has its blocks in one block of the heap, the plan's arena (tag 0); keeping or sharing one of them
// leaves the plan.
//
// A kept block in the middle cuts the range in two. gather() takes the memory from behind granules in which no block lies and
// puts it behind other addresses of the range, so that an iteration finds the whole size in one piece (lane_gather.cpp).
//
// Kept blocks of sessions that are paged out go to host memory, a granule at a time, where the device can map that
// (kept_moves.cpp). The range of an open lane is longer by what is away, so that its iterations find the whole size.
//
// Locks: control_ serialises begin, end, resize and close, and may be held across driver calls; the door's lock_ guards
// the blocks. Order: a persistent heap's control_, control_, lock_, then a persistent heap's lock, then the
// layout's.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "memory/block_owner.hpp"
#include "memory/lane_door.hpp"
#include "memory/persistent_heap.hpp"
#include "memory/short_lock.hpp"
#include "memory/spill.hpp"

namespace gpushare::memory {

class LaneImpl final : public Lane, public BlockOwner, private MovingBlocks {
 public:
  // `drained` is called, without the lane's locks, when the last promoted block of a closed lane was freed.
  LaneImpl(Shared& shared, std::function<void(LaneImpl*)> drained)
      : shared_(shared), drained_(std::move(drained)), door_(LaneDoor::take(*this, shared.owner)) {}
  ~LaneImpl() override { door_.give_back(); }

  // Life cycle, for DeviceMemory.
  base::Status open(uint32_t id, uint64_t bytes, const device::Stream& stream,
                    std::shared_ptr<base::Pieces> pieces);
  // Returns the range, or as much of it as no promoted block pins.
  base::Status close();
  // *out_gone once it is closed and holds nothing: it may be opened again. Returns what a closed lane still held. False where
  // nothing may be waited for, and the lane is in work.
  bool reclaim_closed(bool* out_gone);
  // Frees the promoted blocks of a session that closes; `fences` end its device work.
  void free_promoted_of(PersistentHeapImpl& heap, const FenceList& fences);

  // For persistent heaps, which hold their control_ then. Gives back bytes that were lent for blocks that are gone.
  void return_surplus();
  // Gives back the bytes that `heap` lent, for as long as it is not resident; with `ends`, forgets the heap.
  void return_loan(PersistentHeapImpl& heap, bool ends = false);
  uint64_t lent_bytes() const;
  uint64_t away_of(const PersistentHeapImpl& heap) const;  // of its kept blocks, in host memory
  // Kept blocks of heaps that are out go to host memory, and those of `heap`, whose own blocks are in, come home: whole
  // granules of most_bytes together at most. A block that cannot move stays where it is. Returns how many bytes have
  // moved; if they are fewer, no others can now.
  uint64_t send_kept_out(const FenceList& before, const device::Stream& stream, uint64_t most_bytes);
  uint64_t bring_kept_home(PersistentHeapImpl& heap, const device::Stream& stream, uint64_t most_bytes);
  void await_moves() { const base::WorkLock until_moved(control_, base::kMustWait); }
  // The same for a lane that has been closed, whose range nothing but kept blocks pins: after close(), with no lock of the
  // caller, because it copies. Nothing if the lane is open again.
  void send_closed_out(const device::Stream& stream);
  // Whether the closed lane may be opened with `bytes` without memory behind more addresses than it needs.
  bool fits(uint64_t bytes) const;
  // The last promoted block was freed between iterations: a size that it kept from taking effect need not wait for the
  // next one. Does nothing while there are such blocks, an iteration is under way or another thread has control_.
  void resize_unpinned() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS;
  // Moves to the highest place that its range fits, unless an iteration is open, a block is kept or another thread has control_.
  void move_up_if_idle() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS;
  Address base() const;
  // Bytes held for promoted blocks that are neither promised nor lent.
  uint64_t pinned_bytes() const;
  size_t position = 0;      // in DeviceMemory's list
  bool reclaiming = false;  // of DeviceMemory, under its lock: a thread is in reclaim_closed()
  bool is_drained() const {
    ShortLockGuard lock(door_.lock_);
    return !is_open() && promoted_.empty();
  }

  // Lane
  uint32_t id() const override { return id_.load(std::memory_order_relaxed); }
  base::Status begin_iteration(PersistentHeap& owner, bool use_plan) override;
  LanePass pass() const override {
    const uint64_t key = door_.key_.load(std::memory_order_relaxed);
    return key == 0 ? LanePass() : LanePass{&door_, key};
  }
  void close_door() override;
  base::Result<Address> alloc(uint64_t bytes, uint64_t alignment) override;
  base::Result<Address> alloc_spilled(uint64_t bytes, uint64_t alignment) override;
  base::Status keep(Address address) override;
  bool is_shared() const override { return shared_memory_.load(std::memory_order_relaxed); }
  base::Status end_iteration(bool* out_planned, uint64_t* out_peak_bytes) override;
  base::Status set_size(uint64_t bytes) override;
  uint64_t borrow_free(PersistentHeap& owner, uint64_t bytes) override;
  bool gather(PersistentHeap& owner, uint64_t bytes, uint64_t* out_missing) override;
  LaneStats stats() const override;
  LaneImpl& impl() override { return *this; }

  // BlockOwner
  base::Status free_block(Address address) override;
  base::Status add_use(Address address, const FencePtr& use) override;
  bool find_block(Address address, BlockInfo* out_info) override;
  const device::Stream* home_stream() const override { return spill_owner_.stream.load(); }
  bool is_home(const void* native) const override { return spill_owner_.native.load() == native; }

  // Adds the lane's live bytes, and their peak, to Shared.
  void tell();

  bool is_open() const { return open_.load(); }
  void snapshot(std::vector<SegmentSnapshot>* out_segments) const;
  // Appends the lane's ranges. Returns the first broken invariant; empty when all hold.
  std::string check(std::vector<Range>* out_ranges) const;

 private:
  friend class LaneDoor;

  // Blocks as their user asks for them and frees them, where nothing stands in the way; else nothing happens. `plain`:
  // neither planned nor recorded, and inlined into the door's calls (lane_inner.hpp).
  BlockHandle alloc_here(uint64_t bytes, uint64_t alignment) GPUSHARE_REQUIRES(door_.lock_);
  bool free_here(Address address) GPUSHARE_REQUIRES(door_.lock_);  // where the lane is not plain
  // The parts of these calls that the next step of a plan does not need. They are out of line, so that a step costs
  // nothing for them.
  [[gnu::noinline]] BlockHandle alloc_and_tell(uint64_t bytes, uint64_t alignment, uint64_t tag)
      GPUSHARE_REQUIRES(door_.lock_);
  [[gnu::noinline]] bool free_of_plan(uint64_t offset) GPUSHARE_REQUIRES(door_.lock_);
  bool is_plain() const GPUSHARE_REQUIRES(door_.lock_) { return plain_; }
  BlockHandle alloc_plain(uint64_t bytes) GPUSHARE_REQUIRES(door_.lock_);
  bool free_plain(Address address) GPUSHARE_REQUIRES(door_.lock_);
  base::Status grow(uint64_t bytes) GPUSHARE_REQUIRES(control_);
  bool shrink(uint64_t bytes) GPUSHARE_REQUIRES(control_);
  void boundary() GPUSHARE_REQUIRES(control_);
  void move_up() GPUSHARE_REQUIRES(control_);
  bool adopt_ahead() GPUSHARE_REQUIRES(control_);
  enum class Balance { kReturn, kAll, kAllAndWait };
  void balance_loans(Balance how) GPUSHARE_REQUIRES(control_);
  void borrow(PersistentHeapImpl* heap, uint64_t bytes, bool may_wait) GPUSHARE_REQUIRES(control_);
  void shrink_to_target() GPUSHARE_REQUIRES(control_);
  // For the holder of control_: nobody changes them meanwhile.
  Range& range() GPUSHARE_REQUIRES(control_) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { return range_; }
  uint64_t lent() const GPUSHARE_REQUIRES(control_) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { return lent_bytes_; }
  // Moves kept blocks. MovingBlocks:
  void begin_moves(bool home, std::vector<MovableGranule>* out_granules, FenceList* out_uses) override;
  // *out_streams: whose work until now uses the granules too.
  void begin_moves_of(bool home, std::vector<MovableGranule>* out_granules, FenceList* out_uses,
                      std::vector<const device::Stream*>* out_streams);
  void moved(const MovableGranule& granule, bool home, bool lost) override;
  void end_moves() override;
  // Returns how many bytes have moved.
  uint64_t move_kept(bool home, const PersistentHeapImpl* heap, uint64_t most_bytes, const FenceList& before,
                     const device::Stream& stream) GPUSHARE_REQUIRES(control_);
  uint64_t send_kept_out_here(const FenceList& before, const device::Stream& stream, uint64_t most_bytes)
      GPUSHARE_REQUIRES(control_);
  // The blocks that lie in each granule.
  struct Held {
    uint64_t live_bytes = 0;
    bool of_heap = false, of_others = false;  // of_others: of whoever may use it now
  };
  std::vector<Held> held(const PersistentHeapImpl* heap) const GPUSHARE_REQUIRES(door_.lock_);
  bool comes_home(const Held& granule) const GPUSHARE_REQUIRES(door_.lock_);
  size_t coming_home() const GPUSHARE_REQUIRES(door_.lock_);
  // Granules without blocks give their memory back while the lane is closed, and have some again when it opens.
  void hollow_out() GPUSHARE_REQUIRES(control_);
  base::Status fill_hollows() GPUSHARE_REQUIRES(control_);
  // At a boundary: granules that are away and have room for blocks of iterations come home.
  void renew_away() GPUSHARE_REQUIRES(control_);
  void extend_to_target() GPUSHARE_REQUIRES(control_);
  base::Status add_to_end(uint64_t bytes, bool may_wait) GPUSHARE_REQUIRES(control_);
  // The granules of the range that get memory, and the donors, which lose theirs for it.
  struct Gathering {
    size_t first = 0, end = 0;   // all of them get memory, those beyond the range too
    std::vector<size_t> donors;  // no block lies in them; those at the range's end are cut off instead
    uint64_t cut_bytes = 0;
  };
  std::vector<bool> free_granules() const GPUSHARE_REQUIRES(door_.lock_);
  bool plan_gathering(uint64_t bytes, Gathering* out, uint64_t* out_missing) const
      GPUSHARE_REQUIRES(door_.lock_);
  bool is_hollow(size_t granule) const GPUSHARE_REQUIRES(door_.lock_) {
    return granule < hollow_.size() && hollow_[granule];
  }
  bool make_hollow(const std::vector<size_t>& granules) GPUSHARE_REQUIRES(door_.lock_);
  void end_hollow(size_t granule) GPUSHARE_REQUIRES(door_.lock_);
  void end_hollows() GPUSHARE_REQUIRES(door_.lock_);
  // The end of the range after so many bytes of memory have been cut off.
  uint64_t end_without(uint64_t memory_bytes) const GPUSHARE_REQUIRES(door_.lock_);
  uint64_t floor_bytes() const GPUSHARE_REQUIRES(door_.lock_);  // the end of the last block
  uint64_t loose_bytes() const GPUSHARE_REQUIRES(door_.lock_);  // of memory behind it
  bool carry_out(const Gathering& plan, bool may_wait) GPUSHARE_REQUIRES(control_);
  base::Status put_memory(size_t granule, bool may_wait) GPUSHARE_REQUIRES(control_);
  void fill_gathered() GPUSHARE_REQUIRES(control_);
  // The reason why a block cannot be freed now: granules move, or the stream of its last use has not been marked.
  struct Hindrance {
    bool moves = false;
    const device::Stream* unmarked = nullptr;
  };
  struct Mark {
    const device::Stream* stream = nullptr;
    FencePtr fence;
  };
  base::Status try_free(Address address, const Mark& mark, Hindrance* out_hindrance);
  bool runs_iteration() const;
  bool is_idle() const;  // open, no iteration under way and nothing kept
  // In the range beside its size.
  uint64_t beyond() const GPUSHARE_REQUIRES(control_) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
    return lent_bytes_ + away_bytes_ + hollow_bytes_;
  }
  // The range's size when nothing is pinned beyond it.
  uint64_t target() const GPUSHARE_REQUIRES(control_) { return size_bytes_ + beyond(); }
  void drop_ahead() GPUSHARE_REQUIRES(control_);
  base::Status take_own();
  base::Status leave_shared() GPUSHARE_REQUIRES(control_);
  FenceList own_fence() const;
  base::Status free_planned(uint64_t offset) GPUSHARE_REQUIRES(door_.lock_);
  void reclaim_all() GPUSHARE_REQUIRES(door_.lock_);
  BlockHandle allocate(uint64_t bytes, uint64_t alignment, uint64_t tag) GPUSHARE_REQUIRES(door_.lock_);
  // The live block at `address` as an ordinary block of the heap: leaves the plan if it is a planned one.
  // Empty if there is none.
  BlockHandle ordinary_block(Address address) GPUSHARE_REQUIRES(door_.lock_);
  bool on_plan() const GPUSHARE_REQUIRES(door_.lock_) { return replaying_ && replay_->on_plan(); }
  uint64_t live_bytes() const GPUSHARE_REQUIRES(door_.lock_);
  uint64_t arena_needed() const GPUSHARE_REQUIRES(door_.lock_) {
    return heap_->high_water_bytes() - std::min(heap_->high_water_bytes(), lent_bytes_ + hollow_bytes_);
  }
  void tell_live() GPUSHARE_REQUIRES(door_.lock_);   // once it differs enough
  void tell_freed() GPUSHARE_REQUIRES(door_.lock_);  // the same where it has only fallen
  void tell_now() GPUSHARE_REQUIRES(door_.lock_);
  void set_told(uint64_t bytes) GPUSHARE_REQUIRES(door_.lock_);
  uint64_t told_bytes() const GPUSHARE_REQUIRES(door_.lock_) { return quiet_from_ + quiet_width_ / 2; }
  // Before promoted_bytes_ changes.
  void note_peak() GPUSHARE_REQUIRES(door_.lock_) {
    peak_ = std::max(peak_, highest_bytes_ + promoted_bytes_);
  }
  uint64_t ephemeral_live() const GPUSHARE_REQUIRES(door_.lock_) {
    return heap_->live_granules() * kBlockGranuleBytes - deferred_bytes_ - promoted_bytes_;
  }
  void release(uint64_t offset) GPUSHARE_REQUIRES(door_.lock_);
  base::Status out_of_memory(uint64_t bytes, HeapStatus status) GPUSHARE_REQUIRES(door_.lock_);
  SessionId session_of(uint64_t offset, uint64_t tag) const GPUSHARE_REQUIRES(door_.lock_);

  Shared& shared_;
  const std::function<void(LaneImpl*)> drained_;
  std::atomic<bool> open_{false};
  std::atomic<uint32_t> id_{0};
  std::atomic<bool> shared_memory_{false};  // with other processes
  const device::Stream* stream_ = nullptr;  // set by open, of the caller

  mutable base::WorkMutex control_;
  std::shared_ptr<base::Pieces> pieces_ GPUSHARE_GUARDED_BY(control_);  // null: its memory is its own
  Range own_ GPUSHARE_GUARDED_BY(control_);  // taken by keep() in a shared lane, for the end of the iteration
  Range ahead_ GPUSHARE_GUARDED_BY(control_);  // taken for growing at the next boundary
  FenceList ahead_fences_ GPUSHARE_GUARDED_BY(control_);
  FenceList closing_fences_
      GPUSHARE_GUARDED_BY(control_);  // end what the lane's stream still did when it was closed
  // Size wanted of the present range, without loans. A size that the range cannot grow to where it lies comes
  // with ahead_.
  uint64_t size_bytes_ GPUSHARE_GUARDED_BY(control_) = 0;
  uint64_t seen_epoch_ GPUSHARE_GUARDED_BY(control_) = 0;

  LaneDoor& door_;
  struct Loan {
    uint64_t promoted_bytes = 0;
    uint64_t lent_bytes = 0;
    uint64_t borrowed_bytes = 0;  // of these, beyond what the promoted blocks need, until the iteration's end
  };
  Range range_ GPUSHARE_GUARDED_BY(door_.lock_);              // changed under control_ as well
  uint64_t lent_bytes_ GPUSHARE_GUARDED_BY(door_.lock_) = 0;  // of all loans; changed under control_ as well
  base::FlatHashMap<PersistentHeapImpl*, Loan> loans_ GPUSHARE_GUARDED_BY(door_.lock_);
  bool loans_changed_ GPUSHARE_GUARDED_BY(door_.lock_) = false;  // or some could not be balanced yet
  std::vector<bool> away_ GPUSHARE_GUARDED_BY(door_.lock_);      // by granule of the range: in host memory
  uint64_t away_bytes_ GPUSHARE_GUARDED_BY(door_.lock_) =
      0;  // changed under control_ as well; so the next three
  // Without memory: of a closed lane (hollow_out), or since gather(). Each of the latter is a block of the heap, tagged kHollow.
  uint64_t hollow_bytes_ GPUSHARE_GUARDED_BY(door_.lock_) = 0;
  std::vector<bool> hollow_ GPUSHARE_GUARDED_BY(door_.lock_);  // by granule, of an open lane
  bool moving_ GPUSHARE_GUARDED_BY(door_.lock_) = false;  // who would free a kept block waits for control_
  const PersistentHeapImpl* moves_for_ GPUSHARE_GUARDED_BY(door_.lock_) =
      nullptr;  // null: everybody paged out
  std::optional<Heap> heap_
      GPUSHARE_GUARDED_BY(door_.lock_);  // offsets in range_; capacity = range_.bytes; made by the first open
  PersistentHeapImpl* owner_ GPUSHARE_GUARDED_BY(door_.lock_) = nullptr;  // of the iteration under way
  std::optional<PlanReplay> replay_ GPUSHARE_GUARDED_BY(door_.lock_);     // over heap_
  bool replaying_ GPUSHARE_GUARDED_BY(door_.lock_) = false;               // this iteration began on a plan
  bool recording_ GPUSHARE_GUARDED_BY(door_.lock_) = false;  // this iteration is recorded for one
  bool plain_ GPUSHARE_GUARDED_BY(door_.lock_) = false;      // neither of the two
  UseTable uses_ GPUSHARE_GUARDED_BY(door_.lock_);           // by offset
  base::FlatHashMap<uint64_t, PersistentHeapImpl*> promoted_ GPUSHARE_GUARDED_BY(door_.lock_);  // by offset
  uint64_t promoted_bytes_ GPUSHARE_GUARDED_BY(door_.lock_) = 0;
  uint64_t deferred_bytes_ GPUSHARE_GUARDED_BY(door_.lock_) = 0;
  uint64_t peak_ GPUSHARE_GUARDED_BY(door_.lock_) = 0;  // without what note_peak() would add
  uint64_t iteration_peak_ GPUSHARE_GUARDED_BY(door_.lock_) = 0;
  uint64_t highest_bytes_ GPUSHARE_GUARDED_BY(door_.lock_) = 0;  // that it held since it told last
  // It tells when its live bytes leave the stretch of this width from here on (modulo 2^64). In the middle is what it
  // told last, its part of Shared::ephemeral_bytes.
  uint64_t quiet_from_ GPUSHARE_GUARDED_BY(door_.lock_) = 0;
  uint64_t quiet_width_ GPUSHARE_GUARDED_BY(door_.lock_) = 0;
  SpillOwner spill_owner_;  // its stream is null unless the lane is open
};

}  // namespace gpushare::memory
