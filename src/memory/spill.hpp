// spill.hpp: spilled blocks: blocks in host memory, which the device addresses where they lie.
//
// With a host tier (RangeLayout::has_host_tier), the spilled blocks of a session lie in granules of their own. Memory
// of the host or of the device can be behind such a granule, so the blocks move home and out again at their own
// addresses (granule_mover.hpp). Without a host tier they lie in plain host memory for good.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "base/flat_hash.hpp"
#include "memory/block_owner.hpp"
#include "memory/granule_mover.hpp"
#include "memory/short_lock.hpp"

namespace gpushare::memory {

// A native handle that no stream has.
inline void* const kNoNativeStream =
    reinterpret_cast<void*>(UINTPTR_MAX);  // NOLINT(performance-no-int-to-ptr): never followed

// The owner of a spilled block. It is embedded in heaps and lanes, which are never destroyed while the store
// lives.
struct SpillOwner {
  std::atomic<const device::Stream*> stream{nullptr};  // frees are ordered on it
  std::atomic<void*> native{kNoNativeStream};          // the same as the device knows it
  void set_stream(const device::Stream* to) {
    native.store(to == nullptr ? kNoNativeStream : to->native());
    stream.store(to);
  }
  std::atomic<uint64_t> spilled_bytes{0};
  std::atomic<SessionId> session{0};
  uint32_t lane = UINT32_MAX;
  // For a heap with a host tier: the bytes in its granules, blocks of its iterations included. Written under the store's lock.
  std::atomic<uint64_t> away_bytes{0};       // live, in host memory
  std::atomic<uint64_t> home_bytes{0};       // device memory behind granules that came home
  std::atomic<uint64_t> home_live_bytes{0};  // the live part of these
  // Counts allocations and recorded uses, to tell which granule was used last.
  uint64_t tick() { return clock_.fetch_add(1, std::memory_order_relaxed) + 1; }
  uint64_t last_tick() const { return clock_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> clock_{0};
};

// A stretch of host memory that spilled blocks lie in.
struct SpillPool {
  enum class Where : uint8_t { kNowhere, kAway, kHome };
  struct Granule {
    Where where = Where::kNowhere;
    uint64_t live_bytes = 0;  // blocks that wait for fences included
    uint64_t last_use = 0;
  };
  void* memory = nullptr;  // null: granules
  Address base = 0;
  uint64_t bytes = 0;
  Heap heap;
  Range range;
  SpillOwner* tenant = nullptr;  // null: anybody's, or a closed heap's
  std::vector<Granule> granules;
  bool moving = false;  // no block is placed in it
};

// Blocks in host memory that the device can address. Slow path: one lock for all.
class SpillStore final : public BlockOwner {
 public:
  class Granules;
  explicit SpillStore(Shared& shared) : shared_(shared) {}
  ~SpillStore() override;

  // No more pinned bytes than this for spilled blocks.
  void set_limit(uint64_t bytes) { limit_bytes_.store(bytes, std::memory_order_relaxed); }
  // `tenant`: the heap of the session. Errors: HOST_OUT_OF_MEMORY (also: above the limit), UNSUPPORTED (the host's
  // addresses and the device's collide). May call the driver.
  base::Result<Address> alloc(SpillOwner& owner, SpillOwner& tenant, Kind kind, uint64_t bytes,
                              uint64_t alignment);
  // All blocks of `owner`, whose device work ends before the fences.
  void free_all(SpillOwner& owner, const FenceList& fences);
  // free_all for a heap that closes: its granules go as well.
  void close(SpillOwner& tenant, const FenceList& fences);

  // How many of `granules` may have pinned host memory. *out_status says why not all.
  size_t granules_within_limit(size_t granules, base::Status* out_status);
  // Gives device memory back that came home for blocks since freed.
  void drop_empty(SpillOwner& tenant);
  // Hands a lane's block to its session's heap. NOT_FOUND unless it is `from`'s.
  base::Status move(Address address, SpillOwner& from, SpillOwner& to);
  bool owns(Address address) const { return shared_.index.find(address) == this; }

  base::Status free_block(Address address) override;
  base::Status add_use(Address address, const FencePtr& use) override;
  bool find_block(Address address, BlockInfo* out_info) override;
  const device::Stream* home_stream() const override { return nullptr; }
  bool is_home(const void*) const override { return false; }

  uint64_t trim();
  uint64_t host_bytes() const;
  void snapshot(std::vector<SegmentSnapshot>* out_segments) const;
  std::string check() const;

 private:
  static constexpr uint64_t kPoolBytes = uint64_t{32} << 20;  // smaller blocks share pools of this size
  using Pool = SpillPool;
  using Granule = SpillPool::Granule;
  using Where = SpillPool::Where;
  struct Block {
    Pool* pool;
    SpillOwner* owner;
    uint64_t bytes;
    Kind kind;
    bool promoted;
    FenceList uses;
  };
  struct Request {
    uint64_t bytes, alignment, tag;
  };
  struct Freed {
    Pool* pool;
    uint64_t offset;
    FenceList fences;
  };
  // `tiered`: of granules that can come home, else of pinned memory.
  base::Result<Pool*> add_pool(SpillOwner& tenant, uint64_t bytes, bool tiered) GPUSHARE_REQUIRES(mutex_);
  // Finds or makes a pool with room for such a block, and places the block. Host memory may not be behind it yet.
  base::Result<Pool*> find_place(SpillOwner& tenant, const Request& request, bool tiered,
                                 BlockHandle* out_handle) GPUSHARE_REQUIRES(mutex_);
  base::Status check_limit(uint64_t bytes) GPUSHARE_REQUIRES(mutex_);
  // Puts host memory behind those granules of a block that have none, and enters it in the books.
  base::Status back(Pool& pool, uint64_t offset, uint64_t bytes, FenceList* out_busy)
      GPUSHARE_REQUIRES(mutex_);
  // NOT_READY: to be repeated once *out_busy has passed.
  base::Result<Address> try_alloc(SpillOwner& owner, SpillOwner& tenant, Kind kind, uint64_t bytes,
                                  uint64_t alignment, FenceList* out_busy);
  void count(Pool& pool, uint64_t offset, uint64_t bytes, bool lives) GPUSHARE_REQUIRES(mutex_);
  void touch(Pool& pool, uint64_t offset, uint64_t bytes) GPUSHARE_REQUIRES(mutex_);
  void release(Pool& pool, bool indexed) GPUSHARE_REQUIRES(mutex_);
  // Part of it lies in host memory.
  bool is_away(Address address, const Block& block) const GPUSHARE_REQUIRES(mutex_);
  std::string check_granules() const GPUSHARE_REQUIRES(mutex_);
  uint64_t pinned_bytes() const GPUSHARE_REQUIRES(mutex_);
  base::Status drop(Address address, const FenceList& fences) GPUSHARE_REQUIRES(mutex_);
  void sweep() GPUSHARE_REQUIRES(mutex_);
  uint64_t release_empty(bool all) GPUSHARE_REQUIRES(mutex_);

  Shared& shared_;
  std::atomic<uint64_t> limit_bytes_{UINT64_MAX};
  mutable base::Mutex mutex_;
  uint64_t plain_bytes_ GPUSHARE_GUARDED_BY(mutex_) = 0;  // of pools without granules
  std::vector<std::unique_ptr<Pool>> pools_ GPUSHARE_GUARDED_BY(mutex_);
  base::FlatHashMap<Address, Block> blocks_ GPUSHARE_GUARDED_BY(mutex_);
  base::FlatHashMap<const SpillOwner*, base::FlatHashSet<Address>> of_owner_ GPUSHARE_GUARDED_BY(mutex_);
  std::vector<Freed> freed_ GPUSHARE_GUARDED_BY(mutex_);
};

// The spilled blocks of one session, to be moved.
class SpillStore::Granules final : public MovingBlocks {
 public:
  Granules(SpillStore& store, SpillOwner& tenant) : store_(store), tenant_(tenant) {}
  void begin_moves(bool home, std::vector<MovableGranule>* out_granules, FenceList* out_uses) override;
  void moved(const MovableGranule& granule, bool home, bool lost) override;
  void end_moves() override;

 private:
  SpillStore& store_;
  SpillOwner& tenant_;
};

}  // namespace gpushare::memory
