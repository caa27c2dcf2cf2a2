// SPDX-License-Identifier: Apache-2.0
#include "memory/elastic_range.hpp"

#include <algorithm>

#include "base/units.hpp"
#include "memory/persistent_heap.hpp"

namespace gpushare::memory {
namespace {

// The index keeps 8 bytes for each 2 MiB of addresses.
constexpr uint64_t kMaxReservedBytes = uint64_t{1} << 40;

base::Status closed() {
  return {GPUSHARE_INVALID_STATE, "the elastic range is closed"};
}

}  // namespace

base::Status ElasticRange::open(PersistentHeapImpl& heap, std::string name, uint64_t bytes) {
  const base::WorkLock control(control_);
  if (!control) return base::WorkLock::refused();
  if (bytes == 0 || bytes > kMaxReservedBytes)
    return {GPUSHARE_INVALID_ARGUMENT, "an elastic range reserves more than 0 bytes and at most " +
                                           base::format_bytes(kMaxReservedBytes)};
  bytes = round_up(bytes, granule_bytes());
  Range range;
  GPUSHARE_RETURN_IF_ERROR(shared_.layout->open_sparse(bytes, true, &range));
  {
    // Before the index knows the addresses: whoever finds the range there sees all of it.
    ShortLockGuard lock(lock_);
    heap_.store(&heap);
    range_ = range;
    reserved_bytes_.store(bytes);
    name_ = std::move(name);
    committed_.assign(bytes / granule_bytes(), false);
    committed_bytes_ = 0;
  }
  if (auto status = shared_.index.set(range.base, bytes, this); !status.ok()) {
    {
      ShortLockGuard lock(lock_);
      committed_.clear();
    }
    shared_.layout->close_sparse(range);
    return status;
  }
  state_ = State::kResident;
  return {};
}

void ElasticRange::close() {
  const base::WorkLock control(control_, base::kMustWait);
  if (state_ == State::kClosed) return;
  const size_t count = reserved_bytes_ / granule_bytes();
  const FenceList last = fences();
  shared_.index.clear(range_.base, reserved_bytes_);
  (void)mark(0, count, false);
  if (state_ != State::kOut) shared_.layout->decommit(range_, 0, count, last);
  shared_.layout->close_sparse(range_);
  shared_.mover->chunks().give(chunks_);
  saved_.clear();
  state_ = State::kClosed;
  ShortLockGuard lock(lock_);
  committed_.clear();
  uses_.clear();
}

uint64_t ElasticRange::committed_bytes() const {
  ShortLockGuard lock(lock_);
  return committed_bytes_;
}

std::string ElasticRange::name() const {
  ShortLockGuard lock(lock_);
  return name_;
}

base::Status ElasticRange::check_part(uint64_t offset, uint64_t bytes) const {
  const uint64_t granule = granule_bytes();
  if (bytes > 0 && offset % granule == 0 && bytes % granule == 0 && offset <= reserved_bytes_ &&
      bytes <= reserved_bytes_ - offset)
    return {};
  return {GPUSHARE_INVALID_ARGUMENT,
          base::format(
              "[%llu, %llu + %llu) is not a part of the range of %llu bytes in whole granules of %llu",
              static_cast<unsigned long long>(offset), static_cast<unsigned long long>(offset),
              static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(reserved_bytes_.load()),
              static_cast<unsigned long long>(granule))};
}

base::Result<uint64_t> ElasticRange::missing_bytes(uint64_t offset, uint64_t bytes) const {
  GPUSHARE_RETURN_IF_ERROR(check_part(offset, bytes));
  const uint64_t granule = granule_bytes();
  ShortLockGuard lock(lock_);
  if (committed_.empty()) return closed();
  const auto begin = committed_.begin() + static_cast<ptrdiff_t>(offset / granule);
  return static_cast<uint64_t>(std::count(begin, begin + static_cast<ptrdiff_t>(bytes / granule), false)) *
         granule;
}

uint64_t ElasticRange::mark(size_t first, size_t count, bool committed) {
  uint64_t bytes = 0;
  {
    ShortLockGuard lock(lock_);
    for (size_t i = first; i < first + count; ++i) {
      if (committed_[i] == committed) continue;
      committed_[i] = committed;
      bytes += granule_bytes();
    }
    committed_bytes_ = committed ? committed_bytes_ + bytes : committed_bytes_ - bytes;
  }
  if (committed) {
    shared_.persistent_bytes.fetch_add(bytes, std::memory_order_relaxed);
    shared_.note_peak();
  } else {
    shared_.persistent_bytes.fetch_sub(bytes, std::memory_order_relaxed);
  }
  return bytes;
}

FenceList ElasticRange::fences() const {
  FenceList out;
  {
    ShortLockGuard lock(lock_);
    out = uses_;
  }
  if (const device::Stream* stream = home_stream()) out.push_back(shared_.fences.at_end_of(*stream));
  return out;
}

// The caller holds control_, so that the range stays as it is while this waits.
base::Status ElasticRange::put_memory(size_t first, size_t count, FenceList* out_fences,
                                      std::vector<bool>* out_intact, FenceList* out_busy) {
  for (;;) {
    FenceList busy;
    base::Status status = shared_.layout->commit(range_, first, count, out_fences, out_intact, &busy);
    if (status.code() != GPUSHARE_NOT_READY) return status;
    if (out_busy != nullptr) {
      *out_busy = std::move(busy);
      return status;
    }
    wait_all(busy);
  }
}

base::Status ElasticRange::commit(uint64_t offset, uint64_t bytes, FenceList* out_busy) {
  const base::WorkLock control(control_);
  if (!control) return base::WorkLock::refused();
  if (state_ == State::kClosed) return closed();
  if (state_ != State::kResident) return {base::kAway, "the elastic range is paged out"};
  GPUSHARE_RETURN_IF_ERROR(check_part(offset, bytes));
  const size_t first = offset / granule_bytes(), count = bytes / granule_bytes();
  FenceList before;
  GPUSHARE_RETURN_IF_ERROR(put_memory(first, count, &before, nullptr, out_busy));
  // Uses from before its decommit, by the session itself: on its stream the device waits for those, without one the host.
  prune(before);
  if (const device::Stream* stream = home_stream())
    order_all(before, *stream);
  else
    wait_all(before);
  (void)mark(first, count, true);
  return {};
}

base::Result<uint64_t> ElasticRange::decommit(uint64_t offset, uint64_t bytes) {
  const base::WorkLock control(control_);
  if (!control) return base::WorkLock::refused();
  if (state_ == State::kClosed) return closed();
  GPUSHARE_RETURN_IF_ERROR(check_part(offset, bytes));
  const size_t first = offset / granule_bytes(), count = bytes / granule_bytes();
  if (state_ != State::kOut) {
    FenceList last;
    if (const device::Stream* stream = home_stream()) {
      GPUSHARE_ASSIGN_OR_RETURN(FencePtr end, shared_.fences.mark(*stream));
      last.push_back(std::move(end));
    }
    {
      ShortLockGuard lock(lock_);
      prune(uses_);
      last.insert(last.end(), uses_.begin(), uses_.end());
    }
    shared_.layout->decommit(range_, first, count, last);
  }
  std::erase_if(saved_,
                [&](const Saved& part) { return part.granule >= first && part.granule < first + count; });
  return mark(first, count, false);
}

base::Status ElasticRange::copy(const std::vector<Saved>& parts, const device::Stream& stream, bool out) {
  base::Status status;
  for (const Saved& part : parts)
    if (status.ok())
      status = HostChunks::copy(chunks_, part.at, range_.base + part.granule * granule_bytes(),
                                granule_bytes(), stream, out);
  // Even after a failure: copies enqueued before it still use the chunks.
  const base::Status finished = stream.synchronize();
  return status.ok() ? finished : status;
}

base::Status ElasticRange::save() {
  const base::WorkLock control(control_, base::kMustWait);
  if (state_ != State::kResident) return closed();
  saved_.clear();
  spoilt_ = false;
  {
    ShortLockGuard lock(lock_);
    for (size_t i = 0; i < committed_.size(); ++i)
      if (committed_[i]) saved_.push_back({i, saved_.size() * granule_bytes()});
  }
  if (auto status = shared_.mover->chunks().take(saved_.size() * granule_bytes(), &chunks_); !status.ok()) {
    saved_.clear();
    return status.with_context("paging out elastic range '" + name() + "'");
  }
  state_ = State::kGoing;
  return {};
}

base::Status ElasticRange::drop(const device::Stream& stream, uint64_t most_bytes, uint64_t* out_bytes) {
  const base::WorkLock control(control_, base::kMustWait);
  if (state_ != State::kGoing) return {};
  std::vector<Saved> part;
  const uint64_t granule = granule_bytes();
  for (size_t i = saved_.size(); i-- > 0 && (part.size() + 1) * granule <= std::max(most_bytes, granule);)
    if (saved_[i].here) part.push_back(saved_[i]);
  order_all(fences(), stream);
  if (const base::Status status = copy(part, stream, true); !status.ok())
    return status.with_context("paging out elastic range '" + name() + "'");
  // The copy came after everything that used the bytes. `part` has the last granules, the last one first.
  for (size_t i = 0; i < part.size();) {
    size_t end = i + 1;
    while (end < part.size() && part[end].granule + 1 == part[end - 1].granule) ++end;
    shared_.layout->decommit(range_, part[end - 1].granule, end - i, {});
    i = end;
  }
  for (Saved& each : saved_)
    if (!part.empty() && each.granule >= part.back().granule) each.here = false;
  *out_bytes += part.size() * granule;
  if (std::any_of(saved_.begin(), saved_.end(), [](const Saved& each) { return each.here; })) return {};
  shared_.paged_out_bytes.fetch_add(saved_.size() * granule, std::memory_order_relaxed);
  state_ = State::kOut;
  return {};
}

bool ElasticRange::is_going() const {
  const base::WorkLock control(control_, base::kMustWait);
  return state_ == State::kGoing;
}

base::Status ElasticRange::restore(const device::Stream& stream, uint64_t most_bytes, uint64_t* out_bytes) {
  const base::WorkLock control(control_, base::kMustWait);
  if (state_ == State::kResident) return {};  // opened meanwhile
  if (state_ != State::kOut && state_ != State::kComing) return closed();
  base::Status status;
  FenceList before;
  for (size_t i = 0; state_ == State::kOut && i < saved_.size() && status.ok();) {
    size_t end = i + 1;  // of a run
    while (end < saved_.size() && saved_[end].granule == saved_[end - 1].granule + 1) ++end;
    std::vector<bool> intact;
    status = put_memory(saved_[i].granule, end - i, &before, &intact, nullptr);
    for (size_t k = i; k < end && status.ok(); ++k) saved_[k].here = !spoilt_ && intact[k - i];
    i = end;
  }
  std::vector<Saved> part;
  if (status.ok()) {
    state_ = State::kComing;
    for (const Saved& each : saved_)
      if (!each.here && (part.size() + 1) * granule_bytes() <= std::max(most_bytes, granule_bytes()))
        part.push_back(each);
    order_all(before, stream);
    status = copy(part, stream, false);
  }
  if (!status.ok()) {
    back_out();
    return status.with_context("paging in elastic range '" + name() + "'");
  }
  for (Saved& each : saved_)
    if (!part.empty() && each.granule <= part.back().granule) each.here = true;
  *out_bytes += part.size() * granule_bytes();
  return {};
}

void ElasticRange::back_out() {
  spoilt_ = true;
  shared_.layout->decommit(range_, 0, reserved_bytes_ / granule_bytes(), {});
  state_ = State::kOut;
}

void ElasticRange::leave_out() {
  const base::WorkLock control(control_, base::kMustWait);
  if (state_ == State::kComing) back_out();
}

void ElasticRange::forget() {
  const base::WorkLock control(control_, base::kMustWait);
  if (state_ == State::kComing)
    shared_.paged_in_bytes.fetch_add(saved_.size() * granule_bytes(), std::memory_order_relaxed);
  if (state_ != State::kComing && state_ != State::kGoing) return;
  shared_.mover->chunks().give(chunks_);
  saved_.clear();
  spoilt_ = false;
  state_ = State::kResident;
}

base::Status ElasticRange::free_block(Address address) {
  return {GPUSHARE_NOT_FOUND,
          base::format("device address %#llx lies in elastic range '%s': decommit its granule instead",
                       static_cast<unsigned long long>(address), name().c_str())};
}

bool ElasticRange::find_block(Address address, BlockInfo* out_info) {
  ShortLockGuard lock(lock_);
  const uint64_t granule = granule_bytes();
  const size_t index = (address - range_.base) / granule;
  if (address < range_.base || index >= committed_.size() || !committed_[index]) return false;
  *out_info = {range_.base + index * granule, granule, Kind::kFramework, heap_.load()->session()};
  return true;
}

base::Status ElasticRange::add_use(Address address, const FencePtr& use) {
  BlockInfo ignored;
  if (!find_block(address, &ignored)) return no_such_block(address);
  ShortLockGuard lock(lock_);
  if (std::find(uses_.begin(), uses_.end(), use) != uses_.end()) return {};
  if (uses_.size() >= 8) prune(uses_);
  uses_.push_back(use);
  return {};
}

const device::Stream* ElasticRange::home_stream() const {
  return heap_.load()->stream();
}

bool ElasticRange::is_home(const void* native) const {
  return heap_.load()->is_home(native);
}

void ElasticRange::snapshot(std::vector<SegmentSnapshot>* out_segments) const {
  SegmentSnapshot segment;
  ShortLockGuard lock(lock_);
  if (committed_.empty()) return;
  const uint64_t granule = granule_bytes();
  segment.address = range_.base;
  segment.bytes = committed_.size() * granule;
  segment.session = heap_.load()->session();
  segment.name = "elastic range " + name_;
  for (size_t i = 0; i < committed_.size(); ++i) {
    if (!committed_[i]) continue;
    const Address at = range_.base + i * granule;
    if (!segment.blocks.empty() && segment.blocks.back().address + segment.blocks.back().bytes == at)
      segment.blocks.back().bytes += granule;
    else
      segment.blocks.push_back({at, granule, Kind::kFramework, segment.session});
  }
  out_segments->push_back(std::move(segment));
}

std::string ElasticRange::check() const {
  ShortLockGuard lock(lock_);
  const auto count = static_cast<uint64_t>(std::count(committed_.begin(), committed_.end(), true));
  return count * granule_bytes() == committed_bytes_ ? "" : "elastic range: committed bytes do not add up";
}

}  // namespace gpushare::memory
