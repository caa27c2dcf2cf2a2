// framework: the device allocator that a tensor framework plugs in: it finds the session of an allocation by the
// framework's own stream, then by the thread; learns which blocks outlive their iteration; keeps private pools; counts.
// Built on the executor's public interface; called by c_api alone (gpushare/allocator.h says what users see,
// docs/design/framework.md how it works).
//
// Nearly every block of an iteration is allocated and freed at the door of the iteration's lane, without this folder: c_api
// asks LaneDoor::last_used(), which alloc() fills in. The door then lists the block in the session's journal. An allocator
// with a pool that is begun, a memory limit or frees put aside does not let its threads do so (decide_open).
//
// allocator.hpp: the whole interface of the folder. All methods may be called from any thread. Sessions share no lock
// in alloc() and free(), unless pools, a memory limit or closing sessions are in use.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/mutex.hpp"
#include "base/status.hpp"
#include "executor/runtime.hpp"
#include "framework/key_table.hpp"
#include "framework/pools.hpp"
#include "memory/journal.hpp"
#include "memory/lane_door.hpp"

namespace gpushare::framework {

// Stands for "no stream" where a native stream is asked for; null is one of cuda's streams.
inline void* const kNoStream =
    reinterpret_cast<void*>(UINTPTR_MAX);  // NOLINT(performance-no-int-to-ptr): never followed

struct AllocatorInfo {
  uint64_t current_bytes = 0;   // live now
  uint64_t peak_bytes = 0;      // since the last reset_peaks()
  uint64_t reserved_bytes = 0;  // promised
  uint64_t limit_bytes = 0;     // what may be live in all; UINT64_MAX without a limit
  uint64_t allocations = 0;     // that succeeded
  uint64_t failures = 0;        // that did not
  uint64_t predicted = 0;       // allocations inside iterations that went to the persistent heap at once
};

// Told of an allocation that fails for want of memory: session, bytes asked for, why. No lock is held.
using OutOfMemoryObserver = std::function<void(uint64_t session_id, uint64_t bytes, const base::Status& why)>;

class Allocator {
 public:
  explicit Allocator(std::shared_ptr<executor::Runtime> runtime, memory::Kind kind);
  // Closes the sessions that were to be closed with their last block.
  ~Allocator();
  Allocator(const Allocator&) = delete;
  Allocator& operator=(const Allocator&) = delete;

  // Null: none.
  base::Status set_default_session(std::shared_ptr<executor::Session> session);
  // Allocations with this native stream are `session`'s, until forget_stream().
  base::Status adopt_stream(std::shared_ptr<executor::Session> session, void* native);
  base::Status forget_stream(void* native);
  // Allocations of the calling thread that have no owner by stream or iteration are the session's; null: no longer.
  base::Status bind_thread(const std::shared_ptr<executor::Session>& session);

  // 0 for 0 bytes. Inside an iteration of the owner the block is ephemeral, or, predicted, persistent; outside persistent.
  base::Result<memory::Address> alloc(uint64_t bytes, uint64_t alignment, void* native);
  // `native`: as given to alloc. OK for address 0.
  base::Status free(memory::Address address, void* native);
  base::Status record_use(memory::Address address, void* native);
  // Begin and length of the allocation that holds `address`: the block itself, or in a pool the pool's chunk.
  base::Result<std::pair<memory::Address, uint64_t>> base(memory::Address address);

  // Before the iteration ends: keeps its blocks that are still allocated. After a promotion that was refused it may be
  // called again.
  base::Status keep_all(executor::Iteration& iteration);
  // Closes the session now, or with its last block.
  base::Status close_session(const std::shared_ptr<executor::Session>& session);

  base::Status begin_pool(PoolId id, PoolFilter filter);
  base::Status end_pool(PoolId id);
  base::Status release_pool(PoolId id);

  // Null: of the whole runtime.
  base::Result<AllocatorInfo> info(executor::Session* session);
  base::Status reset_peaks(executor::Session* session);
  base::Result<uint64_t> trim();
  // `fraction` is a part of the runtime's capacity, above 0 and at most 1.
  base::Status set_fraction(double fraction);
  void add_observer(OutOfMemoryObserver observer);

  executor::Runtime& runtime() const { return *runtime_; }

  // The allocator's handle has been given back: no thread uses a door for it any more, whatever the thread remembers.
  void close_doors();
  // The handle by which c_api knows the allocator. It never comes twice.
  void set_name(const void* name);

 private:
  // A session, as the allocator knows it.
  struct Member {
    Member(std::shared_ptr<executor::Session> of, uint64_t allocator)
        : session(std::move(of)), journal(allocator) {}
    ~Member() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { take_back(); }
    // The allocations of its iterations. A door works on the journal between lend() and take_back(), else `mutex` guards it.
    void lend(memory::LanePass pass) GPUSHARE_REQUIRES(mutex);
    void take_back() GPUSHARE_REQUIRES(mutex);
    const std::shared_ptr<executor::Session> session;
    std::atomic<uint64_t> allocations{0}, failures{0}, predicted{0};
    std::atomic<bool> closing{false};
    base::Mutex mutex;
    uint64_t iteration GPUSHARE_GUARDED_BY(mutex) = 0;  // that the journal is of
    uint64_t iterations GPUSHARE_GUARDED_BY(mutex) = 0;
    uint64_t moves GPUSHARE_GUARDED_BY(mutex) =
        0;  // how often entries of the journal may have got other places
    size_t prune_at GPUSHARE_GUARDED_BY(mutex) = 0;
    memory::LaneDoor* door GPUSHARE_GUARDED_BY(mutex) = nullptr;  // that has the journal, or had it last
    memory::Journal journal;
  };
  struct NativeStream {
    std::shared_ptr<executor::Stream> stream;
    std::shared_ptr<Member> member;  // null: by thread
    void* native = nullptr;
  };

  // Null for kNoStream and, on devices without native streams, null. Errors: UNSUPPORTED (unknown there).
  base::Result<std::shared_ptr<NativeStream>> find_stream(void* native);
  std::shared_ptr<Member> member_of(const std::shared_ptr<executor::Session>& session);
  std::shared_ptr<Member> owner_of(const NativeStream* stream);
  // Allocates a block of the kind that the session's state asks for.
  base::Result<memory::Address> place(Member& member, const NativeStream* stream, uint64_t bytes,
                                      uint64_t alignment);
  // Adds an allocation to the member's journal. Returns its place there.
  struct Listed {
    size_t index = 0;
    uint64_t moves = 0;     // of the member, then
    bool outlives = false;  // is expected to outlive the iteration
  };
  Listed list(Member& member, uint64_t iteration, memory::LanePass pass, uint64_t bytes);
  // Adds the address to what list() added.
  base::Status complete(Member& member, uint64_t iteration, memory::LanePass pass, const Listed& listed,
                        uint64_t bytes, memory::Address address);
  // Decides whether threads may use doors: not while a pool, a memory limit or frees put aside are in use.
  void decide_open();
  base::Result<memory::Address> alloc_for(Member& member, const NativeStream* stream, uint64_t bytes,
                                          uint64_t alignment, void* native);
  // Bounds the memory of an iteration that allocates without end: forgets the entries of freed blocks. Live blocks are
  // still kept at the iteration's end, but no longer predicted.
  void prune(Member& member) GPUSHARE_REQUIRES(member.mutex);
  base::Status check_limit(uint64_t bytes);
  void tell(const Member& member, uint64_t bytes, const base::Status& why);
  base::Status free_block(memory::Address address, const NativeStream* stream);
  void give_chunk(memory::Address chunk, void* native);  // of a pool, back to its session
  void retry_deferred();
  void close_drained(uint64_t session_id);

  const std::shared_ptr<executor::Runtime> runtime_;
  const memory::Kind kind_;  // of blocks outside iterations
  const uint64_t id_;        // of no other allocator of the process
  struct Word;
  Word& word_;
  base::Mutex open_mutex_;  // of who decides
  bool closed_ GPUSHARE_GUARDED_BY(open_mutex_) = false;
  KeyTable<NativeStream> streams_;
  KeyTable<Member> members_;
  Pools pools_;
  std::atomic<uint64_t> limit_bytes_{UINT64_MAX},
      limited_bytes_{0};  // the latter: of allocations under way, with a limit
  std::atomic<uint32_t> closing_{0}, deferred_count_{0};
  std::atomic<bool> has_default_{false};
  base::Mutex mutex_;  // of what follows; taken before the locks of the tables
  std::shared_ptr<Member> default_ GPUSHARE_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<const OutOfMemoryObserver>> observers_ GPUSHARE_GUARDED_BY(mutex_);
  // Freed on a stream that captured a graph, where their last use could not be marked.
  std::vector<std::pair<memory::Address, void*>> deferred_ GPUSHARE_GUARDED_BY(mutex_);
  size_t members_at_prune_ GPUSHARE_GUARDED_BY(mutex_) = 64, members_made_ GPUSHARE_GUARDED_BY(mutex_) = 0;
};

}  // namespace gpushare::framework
