// elastic_range.hpp: a large range of a session's device addresses, with memory behind any of its granules. It is for data
// that grow and shrink while a job runs (KV caches, embedding tables). Granules are committed and decommitted one by
// one; the caller has had the bytes promised before (sched::Authority::set_need) and gives the promise back afterwards.
//
// Nothing waits for the device but commit, and that only where every other granule of the layout is in use by device
// work. Decommit is ordered by fences: the bytes go to somebody else after the work that the session's stream has now,
// and after the uses on other streams that record_use has recorded for addresses in the range.
//
// A session has several ranges and a heap, which go out and come in together: the heap calls save() to forget(). save() takes
// all host memory that a page-out needs, so that nothing is refused once the first bytes have gone; drop() copies in parts
// and gives the device memory back. restore() has all device memory back before it copies in parts, and forget() ends the page-in.
//
// Locks: control_ serialises all that changes the range and is held across driver calls; lock_ is for finding out about
// an address.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "base/mutex.hpp"
#include "memory/block_owner.hpp"
#include "memory/granule_mover.hpp"
#include "memory/short_lock.hpp"
#include "memory/spill.hpp"  // Shared has one

namespace gpushare::memory {

class PersistentHeapImpl;

class ElasticRange final : public BlockOwner {
 public:
  explicit ElasticRange(Shared& shared) : shared_(shared) {}

  // Life cycle, for the heap. Objects are pooled and never destroyed before it. open: errors INVALID_ARGUMENT, UNSUPPORTED
  // (contiguous layout), the device's. close: the next user of the bytes is ordered after the session's stream and recorded uses.
  base::Status open(PersistentHeapImpl& heap, std::string name, uint64_t bytes);
  void close();
  PersistentHeapImpl& heap() const { return *heap_; }

  Address address() const { return range_.base; }
  uint64_t reserved_bytes() const { return reserved_bytes_; }
  uint64_t granule_bytes() const { return shared_.layout->small_granularity_bytes(); }
  uint64_t committed_bytes() const;
  // The bytes of [offset, offset + bytes) without memory. Errors: INVALID_ARGUMENT (not whole granules within the
  // range, or none).
  base::Result<uint64_t> missing_bytes(uint64_t offset, uint64_t bytes) const;
  // Puts memory behind the granules that have none: all or, on failure, none. Their content is undefined. Where all memory
  // that is left is in use by device work the call waits for that, or, with out_busy, fails with NOT_READY: it is to be
  // repeated once *out_busy has passed. Errors: INVALID_ARGUMENT, INVALID_STATE (closed), kAway (paged out),
  // DEVICE_OUT_OF_MEMORY, HOST_OUT_OF_MEMORY, the device's.
  base::Status commit(uint64_t offset, uint64_t bytes, FenceList* out_busy = nullptr);
  // Gives back the memory of those granules that have some, also while they are paged out. Returns the bytes given back. Errors:
  // INVALID_ARGUMENT; INVALID_STATE (closed; the session's stream captures a graph).
  base::Result<uint64_t> decommit(uint64_t offset, uint64_t bytes);

  // Takes host memory for the committed bytes. Errors: HOST_OUT_OF_MEMORY: nothing has changed.
  base::Status save();
  // After save(), or after a call that did not get to the end: copies committed bytes to host memory over `stream`,
  // `most_bytes` at most and a granule at least, waits, gives their device memory back and adds them to *out_bytes. Errors: the
  // stream's: what has not gone is on the device. Without save(), nothing.
  base::Status drop(const device::Stream& stream, uint64_t most_bytes, uint64_t* out_bytes);
  bool is_going() const;  // drop() has not got to the end
  // Puts memory behind the dropped granules, copies most_bytes of the lost bytes back, and waits. The same call follows until
  // it adds nothing to *out_bytes. Errors: DEVICE_OUT_OF_MEMORY, the stream's: the range is out.
  base::Status restore(const device::Stream& stream, uint64_t most_bytes, uint64_t* out_bytes);
  // A restore did not happen: the bytes are in host memory still, and the device memory goes.
  void leave_out();
  // Ends save() or restore(): all bytes are on the device, and the host memory goes.
  void forget();

  // BlockOwner: an address within a committed granule stands for the granule; it cannot be freed.
  base::Status free_block(Address address) override;
  base::Status add_use(Address address, const FencePtr& use) override;
  bool find_block(Address address, BlockInfo* out_info) override;
  const device::Stream* home_stream() const override;
  bool is_home(const void* native) const override;

  std::string name() const;
  void snapshot(std::vector<SegmentSnapshot>* out_segments) const;
  std::string check() const;

 private:
  base::Status put_memory(size_t first, size_t count, FenceList* out_fences, std::vector<bool>* out_intact,
                          FenceList* out_busy) GPUSHARE_REQUIRES(control_);
  struct Saved {
    size_t granule;
    uint64_t at;       // in the chunks
    bool here = true;  // on the device
  };
  // kGoing: from save() until all have gone. kComing: has memory again, and not yet all bytes.
  enum class State : uint8_t { kClosed, kResident, kGoing, kOut, kComing };

  base::Status check_part(uint64_t offset, uint64_t bytes) const;
  // [first, first + count) have memory from now on, or none. Returns for how many bytes that is new.
  uint64_t mark(size_t first, size_t count, bool committed);
  FenceList fences() const;
  void back_out() GPUSHARE_REQUIRES(control_);
  base::Status copy(const std::vector<Saved>& parts, const device::Stream& stream, bool out)
      GPUSHARE_REQUIRES(control_);

  Shared& shared_;
  mutable base::WorkMutex control_;
  State state_ GPUSHARE_GUARDED_BY(control_) = State::kClosed;
  std::vector<Saved> saved_ GPUSHARE_GUARDED_BY(control_);
  // A restore failed, so the mapped memory may be half written.
  bool spoilt_ GPUSHARE_GUARDED_BY(control_) = false;
  std::vector<uint8_t*> chunks_ GPUSHARE_GUARDED_BY(control_);
  Range range_;  // written under control_ and lock_, by open() alone; so the next two
  std::atomic<uint64_t> reserved_bytes_{0};
  std::atomic<PersistentHeapImpl*> heap_{nullptr};

  mutable ShortLock lock_;
  std::string name_ GPUSHARE_GUARDED_BY(lock_);
  std::vector<bool> committed_ GPUSHARE_GUARDED_BY(lock_);  // empty while closed
  uint64_t committed_bytes_ GPUSHARE_GUARDED_BY(lock_) = 0;
  FenceList uses_ GPUSHARE_GUARDED_BY(lock_);
};

}  // namespace gpushare::memory
