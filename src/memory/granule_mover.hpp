// granule_mover.hpp: moves bytes of sessions between the device and host memory, whomever they belong to: heaps, blocks that
// sessions keep in lanes, spilled blocks, elastic ranges.
//
// It moves in one of two ways. With a host tier (RangeLayout::has_host_tier) a granule moves with all its blocks, and the
// addresses stay good: memory of the other kind takes the place of the old one, after a copy through a window. A failure at any
// point leaves the bytes where they were. Heaps and ranges of a session that is paged out are copied to chunks of host memory
// instead, because they are to lose their device memory and nobody reads them there.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <initializer_list>
#include <vector>

#include "base/move_budget.hpp"
#include "memory/block_owner.hpp"

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
  // Enqueues the copy of device bytes to the chunks (`out`) or from them; `at` is the first byte of the chunks. After an error the caller waits for the
  // stream all the same: copies before it use the chunks.
  static base::Status copy(const std::vector<uint8_t*>& chunks, uint64_t at, Address device, uint64_t bytes,
                           const device::Stream& stream, bool out);

 private:
  device::Device& device_;
  base::Mutex mutex_;
  std::vector<uint8_t*> free_ GPUSHARE_GUARDED_BY(mutex_);
};

class MovingBlocks;
struct SpillPool;

// A granule that may move.
struct MovableGranule {
  Range range;
  size_t granule = 0;  // of the range
  uint64_t last_use = 0;
  uint64_t live_bytes = 0;
  MovingBlocks* of = nullptr;
  SpillPool* pool = nullptr;  // of a spilled block
};

// An owner of blocks in granules that move. Only the mover calls it.
class MovingBlocks {
 public:
  virtual ~MovingBlocks() = default;
  // No block is placed in its granules until end_moves(). Appends the granules that may move that way, and the uses that
  // must have passed before.
  virtual void begin_moves(bool home, std::vector<MovableGranule>* out_granules, FenceList* out_uses) = 0;
  // The granule lies on the other side now. `lost`: it lies nowhere.
  virtual void moved(const MovableGranule& granule, bool home, bool lost) = 0;
  virtual void end_moves() = 0;
};

class GranuleMover {
 public:
  explicit GranuleMover(Shared& shared) : shared_(shared) {}

  // Moves granules of `owners`, which are one session's or one lane's: home those with live blocks, used last and most
  // first; out those used longest ago and least first. Only the session's thread at a boundary calls it, or who has the
  // session paged out or in: no work uses the blocks after `before`, and nobody touches them meanwhile. The caller has had the
  // bytes that come home promised, which budget.bytes does not pass. With a limit of time it leaves at once if another
  // session moves. *out_bytes is what has moved, also with a failure. Errors: DEVICE_OUT_OF_MEMORY, HOST_OUT_OF_MEMORY, the
  // stream's: what has not moved lies where it lay. INTERNAL: the device unmapped a granule and mapped nothing in its place; its
  // bytes are lost.
  base::Status move(std::initializer_list<MovingBlocks*> owners, bool home, const base::MoveBudget& budget,
                    const FenceList& before, const device::Stream& stream, uint64_t* out_bytes);
  HostChunks& chunks() { return chunks_; }

 private:
  base::Status move_batch(const MovableGranule* batch, size_t count, bool home, const device::Stream& stream,
                          uint64_t* out_bytes);
  base::Status begin_batch(const MovableGranule* batch, size_t count, bool home, const device::Stream& stream,
                           size_t* out_begun, base::Status* out_copied);

  Shared& shared_;
  HostChunks chunks_{shared_.device};
  base::WorkMutex mutex_;  // one session moves at a time
};

}  // namespace gpushare::memory
