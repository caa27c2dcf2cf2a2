// framework: the device allocator that a tensor framework plugs in: it finds the session of an allocation by the
// framework's own stream, then by the thread; learns which blocks outlive their iteration; keeps private pools; counts.
// Built on the executor's public interface; called by c_api alone (gpushare/allocator.h says what users see,
// docs/design/framework.md how it works).
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

 private:
  struct Place {  // an allocation of an iteration, in the order of the calls
    uint64_t bytes = 0;
    memory::Address address = 0;
    bool alive = false;  // at the iteration's end
  };
  struct Member {  // a session, as the allocator knows it
    explicit Member(std::shared_ptr<executor::Session> of) : session(std::move(of)) {}
    const std::shared_ptr<executor::Session> session;
    std::atomic<uint64_t> allocations{0}, failures{0}, predicted{0};
    std::atomic<bool> closing{false};
    base::Mutex mutex;
    uint64_t iteration GPUSHARE_GUARDED_BY(mutex) = 0;  // whose places these are
    uint64_t iterations GPUSHARE_GUARDED_BY(mutex) = 0;
    uint64_t prunes GPUSHARE_GUARDED_BY(mutex) = 0;
    size_t prune_at GPUSHARE_GUARDED_BY(mutex) = 0;
    std::vector<Place> places GPUSHARE_GUARDED_BY(mutex), before GPUSHARE_GUARDED_BY(mutex);
  };
  struct NativeStream {
    std::shared_ptr<executor::Stream> stream;
    std::shared_ptr<Member> member;  // null: by thread
  };

  // Null for kNoStream and, on devices without native streams, null. Errors: UNSUPPORTED (unknown there).
  base::Result<std::shared_ptr<NativeStream>> find_stream(void* native);
  std::shared_ptr<Member> member_of(const std::shared_ptr<executor::Session>& session);
  std::shared_ptr<Member> owner_of(const NativeStream* stream);
  // Allocates a block of the kind that the session's state asks for.
  base::Result<memory::Address> place(Member& member, uint64_t bytes, uint64_t alignment);
  base::Result<memory::Address> alloc_for(Member& member, const NativeStream* stream, uint64_t bytes,
                                          uint64_t alignment, void* native);
  // Bounds the memory of an iteration that allocates without end: forgets the places of freed blocks. Live blocks are
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
