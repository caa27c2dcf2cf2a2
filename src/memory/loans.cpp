// Loans: what sessions lend to lanes, so that a promoted block holds its bytes once. Both sides of it: a lane
// balances at its boundary what it borrows, a persistent heap cuts that off its extents and gets it back.
//
// A heap's promise is its extents plus lent_; owed_ of that has been returned by lanes and not given to the
// extents yet. A lane's range is its size plus the sum of its loans. So what is held stays what is promised.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "memory/lane.hpp"
#include "memory/persistent_heap.hpp"

namespace gpushare::memory {

// The lent bytes follow the promoted bytes, in whole granules. Bytes that must come back are returned first,
// and only as far as the range can shrink now: bytes that blocks pin must belong to somebody.
void LaneImpl::balance_loans(Balance how) {
  // Elsewhere a pinned lane has no room to grow.
  const bool lends = shared_.layout->kind() == Layout::kVirtual;
  const uint64_t granularity = shared_.layout->granularity_bytes();
  std::vector<std::pair<PersistentHeapImpl*, uint64_t>> back, more;
  {
    ShortLockGuard lock(door_.lock_);
    if (!loans_changed_) return;
    loans_changed_ = how == Balance::kReturn;
    uint64_t returnable = is_open() ? loose_bytes() : 0;
    for (auto it = loans_.begin(); it != loans_.end();) {
      Loan& loan = it->second;
      uint64_t wanted = lends ? loan.promoted_bytes / granularity * granularity : 0;
      if (how == Balance::kAllAndWait && owner_ != nullptr) wanted += loan.borrowed_bytes;
      if (wanted > loan.lent_bytes) more.emplace_back(it->first, wanted - loan.lent_bytes);
      if (wanted < loan.lent_bytes) {
        const uint64_t bytes = std::min(returnable, loan.lent_bytes - wanted);
        back.emplace_back(it->first, bytes);
        returnable -= bytes;
        lent_bytes_ -= bytes;
        loan.lent_bytes -= bytes;
        loans_changed_ |= loan.lent_bytes > wanted;
      }
      if (loan.promoted_bytes == 0 && loan.lent_bytes == 0)
        loans_.erase(it++);
      else
        ++it;
    }
  }
  if (!back.empty() && is_open()) shrink_to_target();
  for (const auto& [heap, bytes] : back) {
    heap->take_back(bytes);
    if (how != Balance::kReturn) heap->try_restore();
  }
  if (how == Balance::kReturn) return;
  for (const auto& [heap, bytes] : more) borrow(heap, bytes, how == Balance::kAllAndWait);
}

void LaneImpl::borrow(PersistentHeapImpl* heap, uint64_t bytes, bool may_wait) {
  const uint64_t lent = heap->lend(bytes);
  bool added = true;
  // A closed lane needs no room; it is enough that the bytes which it holds belong to somebody.
  if (lent > 0 && is_open()) added = range().bytes > 0 && add_to_end(lent, may_wait).ok();
  // Granules that could not be added stay cut off until the device has finished with them; the next boundary
  // tries again.
  if (!added) heap->take_back(lent);
  ShortLockGuard lock(door_.lock_);
  const uint64_t now = added ? lent : 0;
  loans_[heap].lent_bytes += now;
  lent_bytes_ += now;
  if (now < bytes) loans_changed_ = true;
}

uint64_t LaneImpl::borrow_free(PersistentHeap& owner, uint64_t bytes) {
  const base::WorkLock control(control_);
  if (!control) return 0;
  PersistentHeapImpl* const heap = &owner.impl();
  {
    ShortLockGuard lock(door_.lock_);
    if (owner_ != heap) return 0;
  }
  if (shared_.layout->kind() != Layout::kVirtual || is_shared() || range().bytes == 0) return 0;
  heap->lends_to(this);
  const uint64_t before = lent();
  borrow(heap, round_up(bytes, shared_.layout->granularity_bytes()), true);
  ShortLockGuard lock(door_.lock_);
  loans_changed_ = true;  // to be balanced at the boundary
  loans_[heap].borrowed_bytes += lent_bytes_ - before;
  return lent_bytes_ - before;
}

void LaneImpl::return_surplus() {
  const base::WorkLock control(control_);
  if (!control) return;
  balance_loans(Balance::kReturn);
}

void LaneImpl::return_loan(PersistentHeapImpl& heap, bool ends) {
  const base::WorkLock control(control_, base::kMustWait);
  uint64_t bytes = 0;
  {
    ShortLockGuard lock(door_.lock_);
    const auto found = loans_.find(&heap);
    if (found == loans_.end()) return;
    bytes = std::exchange(found->second.lent_bytes, 0);
    lent_bytes_ -= bytes;
    loans_changed_ = true;
    if (ends) loans_.erase(found);
    // Freed blocks that wait for other streams may be all that is above the target.
    if (is_open())
      uses_.take_ordered(*stream_,
                         [this](uint64_t offset) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { release(offset); });
  }
  if (is_open()) shrink_to_target();
  if (!ends) heap.take_back(bytes);
}

uint64_t LaneImpl::lent_bytes() const {
  ShortLockGuard lock(door_.lock_);
  return lent_bytes_;
}

uint64_t LaneImpl::pinned_bytes() const {
  ShortLockGuard lock(door_.lock_);
  return is_open() ? 0 : range_.bytes - std::min(range_.bytes, lent_bytes_ + away_bytes_ + hollow_bytes_);
}

std::vector<LaneImpl*> PersistentHeapImpl::borrowers() const {
  ShortLockGuard lock(door_.lock_);
  return borrowers_;
}

uint64_t PersistentHeapImpl::on_loan() const {
  ShortLockGuard lock(door_.lock_);
  return lent_ - owed_;
}

uint64_t PersistentHeapImpl::lend(uint64_t bytes) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
  const std::unique_lock<base::WorkMutex> control(control_, std::try_to_lock);
  return control && is_resident() ? lend_now(bytes) : 0;
}

uint64_t PersistentHeapImpl::lend_now(uint64_t bytes) {
  const uint64_t granularity = shared_.layout->granularity_bytes();
  uint64_t lent = 0;
  {
    ShortLockGuard lock(door_.lock_);
    lent = std::min(owed_, bytes) / granularity * granularity;
    owed_ -= lent;
  }
  if (lent == bytes) return lent;
  const uint64_t more = cut(bytes - lent, Cut::kGranules);
  ShortLockGuard lock(door_.lock_);
  lent_ += more;
  return lent + more;
}

void PersistentHeapImpl::take_back(uint64_t bytes) {
  ShortLockGuard lock(door_.lock_);
  if (is_open()) owed_ += bytes;
}

void PersistentHeapImpl::try_restore() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
  const std::unique_lock<base::WorkMutex> control(control_, std::try_to_lock);
  if (control && is_resident()) restore(false);
}

void PersistentHeapImpl::restore(bool may_wait) {
  uint64_t owed = 0;
  {
    ShortLockGuard lock(door_.lock_);
    owed = owed_;
  }
  if (owed == 0) return;
  base::Status status = extend_any(owed, may_wait);
  if (!status.ok() && may_wait) status = grow(owed, false);
  if (!status.ok()) return;
  ShortLockGuard lock(door_.lock_);
  owed_ -= owed;
  lent_ -= owed;
}

}  // namespace gpushare::memory
