// memory: the owners of a device's bytes. heap, placement, plan: pure bookkeeping over offsets.
// device_memory, lane, persistent_heap: address ranges of a real device under one of two layouts. spill,
// snapshot, allocation_log: host memory and exports. Bookkeeping never touches device bytes; only paging copies
// them. Calls base and device; may be called from executor, loader and c_api.
//
// device_memory.hpp: the memory of one device: a persistent heap for each session, a range for each lane, and
// the lookup from an address to its owner.
//
// Layout contiguous: one device buffer; persistent heaps take ranges from the low end, lanes stack from the
// high end, empty lanes move for free at their boundary. Layout virtual: every heap and lane reserves its own
// address range once and physical granules are mapped behind it as promises grow and unmapped (late, in
// batches, off the hot path) as they shrink.
//
// Division of labour: the scheduler decides the promises (sched/scheduler.hpp) and keeps their sum within
// capacity. This class gives the promised bytes an address, serves blocks from them, and says when
// fragmentation of the contiguous layout makes that impossible (DEVICE_OUT_OF_MEMORY from open_heap,
// open_lane, resize: nothing has changed then).
//
// Threads: all methods may be called from any thread. alloc and free take only the lock of the heap or lane
// concerned; finding the owner of an address takes no lock. Opening, closing and resizing take the layout's
// lock.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/pieces.hpp"
#include "base/status.hpp"
#include "base/steps.hpp"
#include "device/device.hpp"

namespace gpushare::memory {

using Address = device::Address;
using SessionId = uint64_t;

enum class Kind : uint32_t { kModel = 0, kFramework = 1, kEphemeral = 2 };
enum class Layout : uint32_t { kAuto = 0, kContiguous = 1, kVirtual = 2 };

struct DeviceMemoryOptions {
  uint64_t capacity_bytes = 0;  // 0 = the device's free bytes, less a small reserve
  Layout layout = Layout::kAuto;
  // Of the virtual layout: a power of two, and at least what the device maps; 0 = what suits the capacity. Tests have large ones
  // on a small device.
  uint64_t granularity_bytes = 0;
  bool record_allocations = false;
  uint64_t max_recorded_events = uint64_t{1} << 20;  // the last so many are kept
  uint64_t spill_limit_bytes = UINT64_MAX;           // host memory for spilled blocks
  const void* owner = nullptr;  // whose memory it is, for LaneDoor::free(); never followed
};

struct BlockInfo {
  Address address = 0;
  uint64_t bytes = 0;  // as asked
  Kind kind = Kind::kModel;
  SessionId session = 0;
  uint32_t lane = UINT32_MAX;  // UINT32_MAX for blocks of a persistent heap
  bool promoted = false;
  bool spilled = false;  // lives in host memory
};

struct HeapStats {
  uint64_t promised_bytes = 0;
  uint64_t live_bytes = 0;  // on the device, rounded to the granule; promoted blocks included
  uint64_t peak_bytes = 0;
  uint64_t promoted_bytes = 0;
  uint64_t lent_bytes = 0;     // the part of the promise that is lent to lanes for promoted blocks
  uint64_t spilled_bytes = 0;  // its live blocks in host memory: spilled and not come home, or moved out
  uint64_t home_bytes = 0;     // device memory behind spilled blocks that came home: beside the promise
  uint64_t largest_hole_bytes = 0;
};

class HeapDoor;
class LaneImpl;
class PersistentHeapImpl;

// A session's persistent blocks. Created and destroyed by DeviceMemory.
class PersistentHeap {
 public:
  virtual ~PersistentHeap() = default;
  virtual SessionId session() const = 0;
  // alignment: a power of two up to 2 MiB, 0 = 256. Never blocks. Makes no driver call unless it is about to
  // fail and freed blocks wait for other streams: then it queries their events, and lets the session's stream
  // wait for events that have not passed. Errors: DEVICE_OUT_OF_MEMORY (promise used up or fragmented: asked,
  // largest hole, promise, live), kAway (paged out), kMoving
  // (move_spilled() is at work: await_moves() first), INVALID_ARGUMENT (0 bytes, alignment, kind).
  virtual base::Result<Address> alloc(Kind kind, uint64_t bytes, uint64_t alignment) = 0;
  // The quick way to its blocks (heap_door.hpp), for callers who know `name`, which is not null. Null while it is paged out,
  // and where all calls are recorded.
  virtual HeapDoor* open_door(const void* name) = 0;
  // From now on each allocation and free takes the ordinary way.
  virtual void close_door() = 0;
  // Waits until move_spilled() is not at work. INVALID_STATE where nothing may be waited for, and the heap is in work.
  virtual base::Status await_moves() = 0;
  // The same from host memory the device can address, outside the promise (spill). Kernels may use it. On the virtual layout of a
  // device with GPUSHARE_DEVICE_CAP_HOST_PHYSICAL it is device memory for copies and fills as well, and can come home;
  // elsewhere it depends on the backend whether copies and fills accept such addresses (those of the host device do
  // not), and it stays. Errors: UNSUPPORTED, HOST_OUT_OF_MEMORY.
  virtual base::Result<Address> alloc_spilled(Kind kind, uint64_t bytes, uint64_t alignment) = 0;
  // At a boundary of the session, when nothing touches its blocks and no allocation of it is under way in lanes: moves
  // granules home, for which the caller has had `most_bytes` promised beside stats().promised_bytes and home_bytes, or
  // out to host memory. Granules of spilled blocks count in home_bytes; those of the heap in its promise, which moves
  // change. See GranuleMover::move. UNSUPPORTED without a host tier.
  virtual base::Status move_spilled(bool home, uint64_t most_bytes, uint64_t budget_ns,
                                    const device::Stream& stream, uint64_t* out_bytes) = 0;
  // Gives back device memory that came home for blocks since freed, and returns the bytes that are left. Cheap when
  // there is none.
  virtual uint64_t release_home() = 0;
  virtual uint64_t away_bytes() const = 0;  // live in host memory, and able to come home
  // The part of stats().promoted_bytes in host memory, since the session is or was paged out.
  virtual uint64_t kept_away_bytes() const = 0;
  // Changes the promise; rounded up to persistent_steps(), see stats(). To make room for a block, grow by at
  // least the block's size (and alignment), because the added bytes may lie in a separate extent. Also fetches
  // back bytes that were lent to lanes for promoted blocks that are gone, so a call with the present size has
  // an effect too. May call the driver; waits on the host only for device work of others that still uses the
  // bytes while no stream is set, or that must be unmapped. Errors: DEVICE_OUT_OF_MEMORY; kAway (paged
  // out); INVALID_STATE (shrinking below the live bytes, the end of the last live block, or what lanes still hold of loans: the
  // message says which). Nothing has changed then.
  virtual base::Status resize(uint64_t promised_bytes) = 0;
  // For a session that will hardly place blocks again: every granule in which no block lies goes back, also from between
  // blocks, and the promise falls to the granules that are left. New blocks get another extent once the promise has
  // grown. After it gave back granules from between blocks, the heap cannot be paged out (UNSUPPORTED). Waits as resize()
  // does. Errors: INVALID_STATE (paged out, closed).
  virtual base::Status give_back_free() = 0;
  // Frees of blocks are ordered on `stream` (the lane's) from now on. The caller has ordered the old stream
  // before the new one. Set it before every iteration, and to null before the stream is destroyed, when no work
  // uses the blocks any more.
  virtual void set_stream(const device::Stream* stream) = 0;
  // Copies live blocks and the session's elastic ranges to host memory over `stream`, waits, and gives the device bytes back;
  // the addresses stay reserved for it where the layout can (virtual) and are retaken by page_in. UNSUPPORTED on the
  // contiguous layout. Promoted blocks lie in lanes. Where the device can map host memory they go and come last, and those
  // that cannot move stay where they are. Spilled blocks that came home go out first, and lower stats().home_bytes. From the
  // first part of a page-out to the last part of a page-in blocks may be freed but not allocated.
  //
  // A call copies most_bytes at most, or a granule. Until paged_out() tells the end, the same call is to follow. page_out
  // adds to *out_given_bytes (may be null) what it has given back of the promise, and the rest of the promise but
  // ranges is not held either once own_blocks_out(). After a failure no byte is lost: the heap is resident if it was before the call; it is paged
  // out if page_in failed; and if a later part of page_out failed, the call may be repeated. Errors:
  // HOST_OUT_OF_MEMORY (the first part of page_out), DEVICE_OUT_OF_MEMORY (the first part of page_in), INVALID_STATE,
  // the stream's own.
  virtual base::Status page_out(const device::Stream& stream, uint64_t most_bytes = UINT64_MAX,
                                uint64_t* out_given_bytes = nullptr) = 0;
  virtual base::Status page_in(const device::Stream& stream, uint64_t most_bytes = UINT64_MAX) = 0;
  // A page-in that has begun and not ended did not begin. If only promoted blocks are missing, it has ended instead, and
  // those that are in host memory stay there until the next page-in. Copies nothing.
  virtual void stop_page_in() = 0;
  virtual bool paged_out() const = 0;  // from the end of a page-out to the end of the page-in
  // Its own blocks are out: a page-out may have to go on for ranges and promoted blocks.
  virtual bool own_blocks_out() const = 0;
  virtual bool is_resident() const = 0;  // neither out nor on the way
  virtual HeapStats stats() const = 0;
  // stats().peak_bytes counts from now on.
  virtual void reset_peak() = 0;
  virtual PersistentHeapImpl& impl() = 0;  // for this folder
};

struct LaneStats {
  uint64_t size_bytes = 0;  // without what is lent
  uint64_t lent_bytes = 0;  // lent by sessions, for their promoted blocks that lie in the lane
  uint64_t tail_bytes = 0;  // free above the last live block; growth at the end adds to these
  uint64_t live_bytes = 0;
  uint64_t peak_bytes = 0;            // since the lane was opened
  uint64_t iteration_peak_bytes = 0;  // of the iteration under way, or of the last one; profiling reads it.
                                      // It is the arena needed (high water) less the lent bytes, not only
                                      // the sum of live bytes
  uint64_t promoted_bytes = 0;        // of blocks that still lie in it
  uint64_t planned_allocs = 0;        // served by a plan
};

class LaneDoor;
// The pass that an allocation or free at a lane's door needs (lane_door.hpp). Good for one iteration.
struct LanePass {
  LaneDoor* door = nullptr;  // null: none
  uint64_t key = 0;
};

// A lane's ephemeral range. There is one iteration at a time on the host side. The previous one may still run
// on the device; the lane's stream orders reuse. Created and destroyed by DeviceMemory.
class Lane {
 public:
  virtual ~Lane() = default;
  virtual uint32_t id() const = 0;
  // Starts an iteration of `owner`. INVALID_STATE if one is under way. `use_plan`: record until an iteration
  // repeats, then place by the solved plan, falling back to the heap at the first deviation. Plans are kept
  // per owner. Solving happens once, on a thread of memory's own (on devices with virtual time in the end_iteration that
  // saw the repetition); 65,536 blocks at most, larger iterations are not planned. `owner` must be of this DeviceMemory.
  virtual base::Status begin_iteration(PersistentHeap& owner, bool use_plan) = 0;
  // The pass of the iteration under way. Called by the thread that began the iteration, before the iteration ends.
  virtual LanePass pass() const = 0;
  // Passes of the iteration under way no longer serve: each allocation and free takes the ordinary way.
  virtual void close_door() = 0;
  // O(1); helper threads of a framework may call it concurrently. Errors: DEVICE_OUT_OF_MEMORY (as
  // PersistentHeap::alloc), INVALID_STATE outside an iteration.
  virtual base::Result<Address> alloc(uint64_t bytes, uint64_t alignment) = 0;
  virtual base::Result<Address> alloc_spilled(uint64_t bytes, uint64_t alignment) = 0;
  // Promotes a block to its session: it stays where it is, outlives the iteration, counts in its heap's live
  // bytes. On the virtual layout the block does not count twice: from a boundary on, the session lends whole
  // granules of it to the lane. The session's ranges shrink by as much as the lane's range grows, so the lane
  // keeps its size beside the pinned blocks. Errors: NOT_FOUND; DEVICE_OUT_OF_MEMORY when the session's promise
  // does not cover it (grow it by the block's size and try again): the block stays ephemeral.
  // In a lane whose memory processes share, the session needs memory of its own for the block: DEVICE_OUT_OF_MEMORY
  // also when there is none for as many bytes as the lane has. The iteration's end then waits for the stream, and the
  // lane is not shared any more.
  virtual base::Status keep(Address address) = 0;
  virtual bool is_shared() const = 0;
  // The boundary: every ephemeral block returns at once in stream order, a pending size takes effect, the
  // range may move (free: it is empty; with promoted blocks it stays). The host does not wait; the lane's
  // stream waits for recorded uses on other streams. `out_planned` (may be null) tells whether a plan served
  // all of it, `out_peak_bytes` (the same) is stats().iteration_peak_bytes.
  virtual base::Status end_iteration(bool* out_planned, uint64_t* out_peak_bytes = nullptr) = 0;
  // New size, taking effect at once where it can: growing in place at any time, elsewhere while no block is
  // live in the range; shrinking when no live block lies above; anything when no iteration is under way and no
  // promoted block pins the range. Else at the next boundary that allows it, for which growing takes its bytes
  // now, so that the boundary cannot fail: until then a contiguous lane may hold the old and the new range.
  // Errors: DEVICE_OUT_OF_MEMORY (the size stays). Also balances the loans of sessions for their kept blocks,
  // and waits on the host for the device if necessary. A boundary never waits, so it may have to leave this for
  // later.
  virtual base::Status set_size(uint64_t bytes) = 0;
  // For the iteration under way, which is `owner`'s: granules that are free in the owner's heap are lent to the lane, at its
  // end. They go back at the next boundary, or when the heap needs them and no block lies there (PersistentHeap::resize). The
  // promises stay as they are. Returns how many bytes were added, up to `bytes` in whole granules; 0 on the contiguous
  // layout and in a shared lane. May wait on the host for the device.
  virtual uint64_t borrow_free(PersistentHeap& owner, uint64_t bytes) = 0;
  // For the iteration under way, which is `owner`'s, in a lane that kept blocks cut: memory from behind granules without blocks
  // moves behind other addresses of the lane, so that a hole of `bytes` is there. Promises stay as they are. True if memory has
  // moved: try the allocation again. Else *out_missing falls to the bytes that the lane would have to grow by for that. Nothing
  // happens on the contiguous layout, in a shared lane, and where nothing is in the way. May wait on the host for the device.
  virtual bool gather(PersistentHeap& owner, uint64_t bytes, uint64_t* out_missing) = 0;
  virtual LaneStats stats() const = 0;
  virtual LaneImpl& impl() = 0;  // for this folder
};

// Content of a snapshot: a segment for each heap and lane. See snapshot.hpp for the writers.
struct SegmentSnapshot {
  Address address = 0;
  uint64_t bytes = 0;
  SessionId session = 0;  // 0 for lanes
  uint64_t stream = 0;    // the device's own handle of a lane's stream; 0 = none
  std::string name;       // "session bert", "lane 0"
  std::vector<BlockInfo> blocks;
};
struct AllocationEvent {
  enum class Action : uint8_t { kAlloc, kFree, kOutOfMemory } action = Action::kAlloc;
  Kind kind = Kind::kModel;
  Address address = 0;
  uint64_t bytes = 0;
  uint64_t time_ns = 0;  // device clock
  uint64_t thread = 0;
  uint64_t stream = 0;  // 0 = none
  SessionId session = 0;
};
struct MemorySnapshot {
  uint64_t capacity_bytes = 0;
  Layout layout = Layout::kContiguous;
  std::vector<SegmentSnapshot> segments;
  std::vector<AllocationEvent> events;  // empty unless recorded
};

struct DeviceMemoryStats {
  uint64_t capacity_bytes = 0;
  uint64_t persistent_bytes = 0;
  uint64_t ephemeral_bytes = 0;
  // Most ever live at one time, rounded to the granule, as heaps and lanes report it in steps (1 MiB, or a 64th of the heap's
  // promise or the lane): what several have at once within their steps may be missed. A planned iteration counts its whole
  // arena. Never above the capacity.
  uint64_t peak_bytes = 0;
  uint64_t free_bytes = 0;    // neither promised to a session nor part of a lane
  uint64_t pinned_bytes = 0;  // held by closed lanes for promoted blocks, beyond what is lent
  uint64_t paged_out_bytes_total = 0;
  uint64_t paged_in_bytes_total = 0;
  uint64_t mapped_bytes = 0;  // physical granules held, cached ones too (virtual), or the buffer (contiguous)
};

class ElasticRange;  // elastic_range.hpp

class DeviceMemory {
 public:
  // `device` must outlive it. Errors: UNSUPPORTED (virtual layout on a device without it),
  // DEVICE_OUT_OF_MEMORY, INVALID_ARGUMENT.
  static base::Result<std::unique_ptr<DeviceMemory>> open(device::Device& device,
                                                          const DeviceMemoryOptions& options);
  virtual ~DeviceMemory() = default;

  virtual Layout layout() const = 0;
  // Blocks can move between the device and host memory at their own addresses.
  virtual bool has_host_tier() const = 0;
  virtual uint64_t capacity_bytes() const = 0;
  // Lane sizes are rounded up to this.
  virtual uint64_t granularity_bytes() const = 0;
  // P is rounded up to these; .large is the granularity.
  virtual base::Steps persistent_steps() const = 0;
  // True if page_out keeps addresses.
  virtual bool can_page() const = 0;

  // Owned by DeviceMemory until closed. promised_bytes may be 0 (grows by resize).
  virtual base::Result<PersistentHeap*> open_heap(SessionId session, std::string name,
                                                  uint64_t promised_bytes) = 0;
  // Returns every block, promoted and spilled ones too. The next user of the bytes is ordered after the work
  // now on the stream set last and after recorded uses; other work must have finished. No host wait.
  virtual base::Status close_heap(PersistentHeap* heap) = 0;
  // `stream` must outlive the lane. With `pieces` the lane lies in memory that other processes use between its
  // iterations, until a block of it is kept; its end_iteration() waits on the host for uses on other streams. Virtual
  // layout alone.
  virtual base::Result<Lane*> open_lane(uint32_t id, uint64_t bytes, const device::Stream& stream,
                                        std::shared_ptr<base::Pieces> pieces = nullptr) = 0;
  // INVALID_STATE during an iteration. Promoted blocks still in it keep their bytes until they are freed; what
  // their sessions have not lent of those is promised to nobody: see pinned_bytes. The next user is ordered
  // after the work now on its stream.
  virtual base::Status close_lane(Lane* lane) = 0;

  // Reserves addresses for a range of the session; it has no memory yet. close_heap() closes it too. Errors: UNSUPPORTED
  // (contiguous layout), INVALID_ARGUMENT, INVALID_STATE (a page-out is under way, and the caller may not wait), the device's.
  virtual base::Result<ElasticRange*> open_range(PersistentHeap& heap, std::string name,
                                                 uint64_t reserved_bytes) = 0;
  virtual void close_range(ElasticRange* range) = 0;

  // Frees a live block wherever it lies, in its owner's stream order. Errors: NOT_FOUND (nothing changes).
  virtual base::Status free(Address address) = 0;
  // Frees a block whose owner has the stream of this native handle: its last use needs no mark. False: not such a
  // block, nothing done.
  virtual bool free_at_home(Address address, const void* native, base::Status* out_status) = 0;
  // The block may be reused only after the work now on `stream` has passed. One event record, unless it is
  // the owner's stream (then nothing). `stream` may go at any time afterwards.
  virtual base::Status record_use(Address address, const device::Stream& stream) = 0;
  // The block's bytes stay where they are while the result lives: a free meanwhile takes effect afterwards. For the host's own work on a
  // block that anybody may free. Errors: NOT_FOUND.
  virtual base::Result<std::shared_ptr<const void>> pin(Address address) = 0;
  virtual base::Result<BlockInfo> find(Address address) const = 0;
  // The same for callers who expect that there may be no block: it then returns false without making a message.
  virtual bool look_up(Address address, BlockInfo* out_info) const = 0;

  // Gives cached physical granules and host buffers back to the system. Part of the out-of-memory ladder.
  // Returns the bytes. Calls the driver; does not wait for device work.
  virtual uint64_t trim() = 0;
  // Contiguous layout: lanes in which no iteration is open and no block is kept move up over the holes above them
  // without waiting for a boundary of their own, so that free bytes lie together. Called when something did not fit. Does
  // not wait: the lanes' streams order the move. Returns by how many bytes the largest free piece has grown.
  virtual uint64_t compact() = 0;
  // "free 1.12 GiB of 16.00 GiB, largest hole ...; sessions: resnet50 2.10 GiB, ...": for out-of-memory
  // messages.
  virtual std::string report(size_t top_holders = 5) const = 0;
  virtual MemorySnapshot snapshot() const = 0;
  virtual DeviceMemoryStats stats() const = 0;
  // stats().peak_bytes counts from now on.
  virtual void reset_peak() = 0;
  // Checks the invariants (live blocks never overlap and lie inside their owner, ranges never overlap,
  // physical bytes within capacity); empty when they hold. For tests.
  virtual std::string check() const = 0;
};

}  // namespace gpushare::memory
