// spill.hpp: host memory that stands in for device memory: chunks for the bytes of sessions that are paged
// out, and blocks that the device addresses where they lie (spilled blocks).
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "base/flat_hash.hpp"
#include "memory/block_owner.hpp"
#include "memory/short_lock.hpp"

namespace gpushare::memory {

// Chunks of one size, kept for the next time. Thread-safe. Taking one may call the driver.
class HostChunks {
 public:
  static constexpr uint64_t kBytes = uint64_t{16} << 20;
  explicit HostChunks(device::Device& device) : device_(device) {}
  ~HostChunks() { trim(); }

  // Enough chunks for `bytes`, or none. Errors: HOST_OUT_OF_MEMORY.
  base::Status take(uint64_t bytes, std::vector<uint8_t*>* out_chunks);
  // No device work may touch them any more.
  void give(std::vector<uint8_t*>& chunks);
  uint64_t trim();

 private:
  device::Device& device_;
  base::Mutex mutex_;
  std::vector<uint8_t*> free_ GPUSHARE_GUARDED_BY(mutex_);
};

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
};

// Blocks in host memory that the device can address. Slow path: one lock for all.
class SpillStore final : public BlockOwner {
 public:
  explicit SpillStore(Shared& shared) : shared_(shared) {}
  ~SpillStore() override;

  // Errors: HOST_OUT_OF_MEMORY, UNSUPPORTED (the host's addresses and the device's collide). May call the
  // driver.
  base::Result<Address> alloc(SpillOwner& owner, Kind kind, uint64_t bytes, uint64_t alignment);
  // All blocks of `owner`, whose device work ends before the fences.
  void free_all(SpillOwner& owner, const FenceList& fences);
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

  HostChunks& chunks() { return chunks_; }

 private:
  static constexpr uint64_t kPoolBytes = uint64_t{32} << 20;  // smaller blocks share pools of this size
  struct Pool {
    void* memory = nullptr;
    Address base = 0;
    uint64_t bytes = 0;
    Heap heap;
  };
  struct Block {
    Pool* pool;
    SpillOwner* owner;
    uint64_t bytes;
    Kind kind;
    bool promoted;
    FenceList uses;
  };
  struct Freed {
    Pool* pool;
    uint64_t offset;
    FenceList fences;
  };
  base::Result<Pool*> add_pool(uint64_t bytes) GPUSHARE_REQUIRES(mutex_);
  base::Status drop(Address address, const FenceList& fences) GPUSHARE_REQUIRES(mutex_);
  void sweep() GPUSHARE_REQUIRES(mutex_);
  uint64_t release_empty(bool all) GPUSHARE_REQUIRES(mutex_);

  Shared& shared_;
  HostChunks chunks_{shared_.device};
  mutable base::Mutex mutex_;
  std::vector<std::unique_ptr<Pool>> pools_ GPUSHARE_GUARDED_BY(mutex_);
  base::FlatHashMap<Address, Block> blocks_ GPUSHARE_GUARDED_BY(mutex_);
  base::FlatHashMap<const SpillOwner*, base::FlatHashSet<Address>> of_owner_ GPUSHARE_GUARDED_BY(mutex_);
  std::vector<Freed> freed_ GPUSHARE_GUARDED_BY(mutex_);
};

}  // namespace gpushare::memory
