// SPDX-License-Identifier: Apache-2.0
#include "framework/pools.hpp"

#include <algorithm>
#include <thread>

#include "base/round_up.hpp"
#include "base/thread_local.hpp"
#include "base/units.hpp"

namespace gpushare::framework {
namespace {

// Chunks grow with their pool, so that there are few to look through.
constexpr uint64_t kChunkBytes = uint64_t{2} << 20, kLargestChunkBytes = uint64_t{256} << 20;
constexpr uint64_t kChunkAlignment = 4096, kLargestAlignment = uint64_t{2} << 20;
// Left free at a chunk's beginning, so that no block has the chunk's address, under which the session's heap knows it.
constexpr uint64_t kFrontBytes = 256;
// Tags of blocks that another stream has used, and of those that were freed after that.
constexpr uint64_t kUsedElsewhere = 1, kFreed = 2;

// An address that differs from thread to thread.
const void* this_thread() {
  static GPUSHARE_THREAD_LOCAL char mark = 0;
  return &mark;
}

base::Status no_pool(PoolId id) {
  return {GPUSHARE_NOT_FOUND,
          base::format("no pool %llu.%llu has been begun", static_cast<unsigned long long>(id.first),
                       static_cast<unsigned long long>(id.second))};
}

}  // namespace

base::Status Pools::begin(PoolId id, PoolFilter filter) {
  Begun begun{id, filter ? std::make_shared<const PoolFilter>(std::move(filter)) : nullptr, this_thread()};
  base::MutexLock lock(mutex_);
  begun_.reserve(begun_.size() + 1);
  ++pools_[id].uses;
  begun_.push_back(std::move(begun));
  any_ = begun_any_ = true;
  return {};
}

base::Status Pools::end(PoolId id) {
  std::shared_ptr<const PoolFilter> gone;  // destroyed without the lock
  base::MutexLock lock(mutex_);
  const auto last =
      std::find_if(begun_.rbegin(), begun_.rend(), [&](const Begun& begun) { return begun.id == id; });
  if (last == begun_.rend()) return no_pool(id);
  gone = std::move(last->filter);
  begun_.erase(std::next(last).base());
  begun_any_ = !begun_.empty();
  return {};
}

base::Status Pools::release(PoolId id, const Give& give) {
  std::vector<std::pair<memory::Address, void*>> empty;
  {
    base::MutexLock lock(mutex_);
    const auto pool = pools_.find(id);
    if (pool == pools_.end()) return no_pool(id);
    if (--pool->second.uses > 0) return {};
    pools_.erase(pool);
    for (auto at = chunks_.begin(); at != chunks_.end();) {
      if (at->second.pool != id || at->second.live > 0) {
        ++at;
        continue;
      }
      empty.emplace_back(at->first, at->second.native);
      at = chunks_.erase(at);
    }
    any_ = !pools_.empty() || !chunks_.empty();
  }
  for (const auto& [chunk, native] : empty) give(chunk, native);
  return {};
}

std::optional<PoolId> Pools::choose(void* native) {
  if (!begun_any_.load(std::memory_order_relaxed)) return std::nullopt;
  std::vector<Begun> begun;
  {
    base::MutexLock lock(mutex_);
    begun = begun_;
  }
  for (auto at = begun.rbegin(); at != begun.rend(); ++at)
    if (at->filter != nullptr ? (*at->filter)(native) : at->thread == this_thread()) return at->id;
  return std::nullopt;
}

base::Result<memory::Address> Pools::alloc(PoolId id, void* native, uint64_t bytes, uint64_t alignment,
                                           const Take& take) {
  if (bytes > (uint64_t{1} << 48))
    return base::Status(GPUSHARE_DEVICE_OUT_OF_MEMORY,
                        "a block of " + base::format_bytes(bytes) + " fits no device");
  if ((alignment & (alignment - 1)) != 0 || alignment > kLargestAlignment)
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("alignment is %llu; it must be 0 or a power of two up to 2 MiB",
                                     static_cast<unsigned long long>(alignment)));
  uint64_t pool_bytes = 0;
  {
    base::MutexLock lock(mutex_);
    for (auto& [address, chunk] : chunks_) {
      if (chunk.pool != id || chunk.native != native || chunk.alignment < alignment) continue;
      if (const memory::BlockHandle block = chunk.heap.allocate(bytes, alignment)) {
        ++chunk.live;
        return address + block.offset_bytes;
      }
    }
    const auto pool = pools_.find(id);
    if (pool == pools_.end()) return no_pool(id);
    pool_bytes = pool->second.bytes;
  }
  const uint64_t chunk_alignment = std::max(alignment, kChunkAlignment);
  const uint64_t needed = base::round_up(bytes + std::max(alignment, kFrontBytes), kChunkBytes);
  uint64_t wanted =
      std::max(needed, base::round_up(std::min(pool_bytes / 8, kLargestChunkBytes), kChunkBytes));
  // All of the host's memory that a chunk needs is there before the chunk is taken, so that none is lost.
  for (;; wanted = needed) {
    auto heap = memory::Heap::create({wanted, 256, 1u << 16, true});
    if (!heap.ok()) return heap.status();
    (void)heap->allocate_at(0, kFrontBytes);
    const memory::BlockHandle block = heap->allocate(bytes, alignment);
    Chunks made;
    made.emplace(0, Chunk{wanted, chunk_alignment, native, id, std::move(*heap), 1});
    const base::Result<memory::Address> taken = take(wanted, chunk_alignment);
    if (taken.ok()) {
      Chunks::node_type node = made.extract(made.begin());
      node.key() = *taken;
      base::MutexLock lock(mutex_);
      chunks_.insert(std::move(node));
      if (const auto pool = pools_.find(id); pool != pools_.end()) pool->second.bytes += wanted;
      any_ = true;
      return *taken + block.offset_bytes;
    }
    if (wanted == needed) return taken.status();
  }
}

Pools::Chunks::iterator Pools::find(memory::Address address) {
  auto after = chunks_.upper_bound(address);
  if (after == chunks_.begin()) return chunks_.end();
  --after;
  return address - after->first < after->second.bytes ? after : chunks_.end();
}

Pools::Found Pools::find_block(memory::Address address) {
  Found found{find(address), {}};
  if (found.chunk == chunks_.end() || found.chunk->first == address) return found;
  const memory::BlockHandle block = found.chunk->second.heap.find(address - found.chunk->first);
  if (block && found.chunk->second.heap.tag(block) != kFreed) found.block = block;
  return found;
}

bool Pools::free(memory::Address address, void* native, const Give& give) {
  std::pair<memory::Address, void*> empty{0, nullptr};
  {
    base::MutexLock lock(mutex_);
    const auto [at, block] = find_block(address);
    if (!block) return false;
    Chunk& chunk = at->second;
    if (native != chunk.native || chunk.heap.tag(block) == kUsedElsewhere)
      chunk.heap.set_tag(block, kFreed);
    else
      (void)chunk.heap.free(block);
    if (--chunk.live == 0 && !pools_.contains(chunk.pool)) {
      empty = {at->first, chunk.native};
      chunks_.erase(at);
      any_ = !pools_.empty() || !chunks_.empty();
    }
  }
  if (empty.first != 0) give(empty.first, empty.second);
  return true;
}

bool Pools::record_use(memory::Address address, void* native) {
  base::MutexLock lock(mutex_);
  const auto [at, block] = find_block(address);
  if (!block) return false;
  if (native != at->second.native) at->second.heap.set_tag(block, kUsedElsewhere);
  return true;
}

std::optional<std::pair<memory::Address, uint64_t>> Pools::chunk_of(memory::Address address) {
  base::MutexLock lock(mutex_);
  const auto chunk = find(address);
  if (chunk == chunks_.end()) return std::nullopt;
  return std::make_pair(chunk->first, chunk->second.bytes);
}

}  // namespace gpushare::framework
