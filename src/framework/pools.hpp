// pools.hpp: private pools of a framework: memory that blocks of one pool alone use until the pool is released, since a
// captured CUDA graph writes to the addresses of blocks that were freed during its capture.
//
// A pool takes chunks of persistent memory from a session and places blocks in them, each chunk for one native stream,
// so that reuse is in stream order. One lock for all pools: they are for captures and for tensors that stay, not for a
// hot path.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/mutex.hpp"
#include "base/status.hpp"
#include "memory/device_memory.hpp"
#include "memory/heap.hpp"

namespace gpushare::framework {

using PoolId = std::pair<uint64_t, uint64_t>;
// True: an allocation with this native stream goes to the pool. Empty: all of the thread that began the pool.
using PoolFilter = std::function<bool(void* native)>;

class Pools {
 public:
  using Take = std::function<base::Result<memory::Address>(uint64_t bytes, uint64_t alignment)>;  // a chunk
  using Give = std::function<void(memory::Address chunk, void* native)>;

  // Each begin() is undone by one end() and one release(). Errors of end() and release(): NOT_FOUND.
  base::Status begin(PoolId id, PoolFilter filter);
  base::Status end(PoolId id);
  // Hands out the chunks in which no block lives. Every other chunk goes with its last block.
  base::Status release(PoolId id, const Give& give);

  // The pool for an allocation of the calling thread with this stream; among several the one that began last. Calls
  // filters without a lock.
  std::optional<PoolId> choose(void* native);
  base::Result<memory::Address> alloc(PoolId id, void* native, uint64_t bytes, uint64_t alignment,
                                      const Take& take);
  // False: not a live block of a pool. The bytes of a block that another stream than its own has used, or frees, are
  // not used again before the pool goes.
  bool free(memory::Address address, void* native, const Give& give);
  // Another stream uses the block. False as above.
  bool record_use(memory::Address address, void* native);
  // The chunk that holds `address`.
  std::optional<std::pair<memory::Address, uint64_t>> chunk_of(memory::Address address);
  // A pool has been begun and not ended: choose() may find it.
  bool begun() const { return begun_any_.load(std::memory_order_relaxed); }
  // There are blocks or pools: the calls above may find something.
  bool any() const { return any_.load(std::memory_order_relaxed); }

 private:
  struct Chunk {
    uint64_t bytes;
    uint64_t alignment;
    void* native;
    PoolId pool;
    memory::Heap heap;
    uint32_t live;  // blocks that were not freed
  };
  struct Pool {
    uint64_t uses = 0;  // begun and not released
    uint64_t bytes = 0;
  };
  struct Begun {
    PoolId id;
    std::shared_ptr<const PoolFilter> filter;  // null: the thread's
    const void* thread = nullptr;
  };
  using Chunks = std::map<memory::Address, Chunk>;  // by first byte
  struct Found {
    Chunks::iterator chunk;
    memory::BlockHandle block;
  };
  // The live block at `address`; an empty handle if there is none.
  Found find_block(memory::Address address) GPUSHARE_REQUIRES(mutex_);
  Chunks::iterator find(memory::Address address) GPUSHARE_REQUIRES(mutex_);

  std::atomic<bool> any_{false}, begun_any_{false};
  base::Mutex mutex_;
  std::map<PoolId, Pool> pools_ GPUSHARE_GUARDED_BY(mutex_);
  std::vector<Begun> begun_ GPUSHARE_GUARDED_BY(mutex_);
  Chunks chunks_ GPUSHARE_GUARDED_BY(mutex_);
};

}  // namespace gpushare::framework
