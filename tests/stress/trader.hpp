// trader.hpp: one side of a trade: a range of 1 GiB in slots, each with a stamp in every granule while it is committed.
// For range_stress.cpp and the processes that it starts.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "executor/range.hpp"
#include "executor/runtime.hpp"
#include "support/random.hpp"

namespace gpushare::test {

inline constexpr uint64_t kGiB = uint64_t{1} << 30;

inline uint64_t* word_at(memory::Address address) {
  return reinterpret_cast<uint64_t*>(address);  // NOLINT(performance-no-int-to-ptr)
}

class Trader {
 public:
  // `asked`: others may ask it for bytes.
  static base::Result<std::unique_ptr<Trader>> open(executor::Runtime& runtime, const std::string& name,
                                                    size_t slots, uint64_t seed, bool asked = true) {
    std::unique_ptr<Trader> trader(new Trader(slots, seed));
    executor::SessionOptions session;
    session.name = name;
    session.ephemeral_bytes = uint64_t{2} << 20;
    GPUSHARE_ASSIGN_OR_RETURN(trader->session_, runtime.open_session(session));
    executor::RangeOptions options;
    options.name = name;
    options.reserved_bytes = kGiB;
    options.answer_ns = 60'000'000'000;
    if (asked)
      options.give_back = [self = trader.get()](uint64_t bytes, uint64_t) { return self->give(bytes); };
    GPUSHARE_ASSIGN_OR_RETURN(trader->range_, trader->session_->open_range(std::move(options)));
    trader->base_ = trader->range_->info().address;
    trader->granule_ = trader->range_->info().granule_bytes;
    return trader;
  }

  // A request for bytes may be under way, and uses the slots.
  ~Trader() {
    if (range_ != nullptr) (void)range_->close();
  }
  Trader(const Trader&) = delete;
  Trader& operator=(const Trader&) = delete;

  // Commits slots, checks those that it has and drops some, until so many commits have been made by all who run.
  void run(std::atomic<int64_t>& left, uint64_t thread) {
    Random random(seed_ + thread);
    while (left > 0 && failures == 0) {
      Slot& slot = slots_[uniform(random, 0, slots_.size() - 1)];
      std::unique_lock lock(slot.mutex);
      while (slot.taking) slot.taken.wait(lock);
      if (slot.stamp != 0) {
        check(slot);
        if (uniform(random, 0, 3) == 0) drop(slot);
        continue;
      }
      slot.taking = true;
      lock.unlock();
      const uint64_t stamp = random() | 1;
      if (!take(slot, stamp).ok()) ++failures;
      lock.lock();
      slot.stamp = stamp;
      slot.taking = false;
      slot.taken.notify_all();
      --left;
    }
  }
  // So many slots, which it keeps.
  base::Status hoard(size_t slots) {
    for (size_t i = 0; i < slots; ++i) {
      GPUSHARE_RETURN_IF_ERROR(take(slots_[i], i + 1));
      std::unique_lock lock(slots_[i].mutex);
      slots_[i].stamp = i + 1;
    }
    return {};
  }
  base::Status close() { return range_->close(); }
  executor::RangeInfo info() const { return range_->info(); }

  std::atomic<uint64_t> commits{0}, failures{0};

 private:
  struct Slot {
    std::mutex mutex;  // not the library's, which nobody holds where the device is waited for
    std::condition_variable taken;
    bool taking = false;  // a thread commits it, without the lock
    uint64_t stamp = 0;   // 0: not committed
  };
  Trader(size_t slots, uint64_t seed) : seed_(seed), slots_(slots), slot_bytes_(kGiB / slots) {}
  base::Status take(const Slot& slot, uint64_t stamp) {
    GPUSHARE_RETURN_IF_ERROR(range_->commit(offset(slot), slot_bytes_, GPUSHARE_NO_TIMEOUT));
    for (uint64_t at = 0; at < slot_bytes_; at += granule_) *word_at(base_ + offset(slot) + at) = stamp + at;
    ++commits;
    return {};
  }
  uint64_t offset(const Slot& slot) const {
    return static_cast<uint64_t>(&slot - slots_.data()) * slot_bytes_;
  }
  void check(const Slot& slot) {
    for (uint64_t at = 0; at < slot_bytes_; at += granule_)
      if (*word_at(base_ + offset(slot) + at) != slot.stamp + at) ++failures;
  }
  void drop(Slot& slot) {
    slot.stamp = 0;
    if (!range_->decommit(offset(slot), slot_bytes_).ok()) ++failures;
  }
  // Gives slots. One whose thread waits is left out, or both sides would wait for each other.
  uint64_t give(uint64_t bytes) {
    uint64_t given = 0;
    for (Slot& slot : slots_) {
      if (given >= bytes) break;
      std::unique_lock lock(slot.mutex);
      if (slot.taking || slot.stamp == 0) continue;
      check(slot);
      drop(slot);
      given += slot_bytes_;
    }
    return given;
  }

  const uint64_t seed_;
  std::shared_ptr<executor::Session> session_;
  std::shared_ptr<executor::Range> range_;
  memory::Address base_ = 0;
  uint64_t granule_ = 0;
  std::vector<Slot> slots_;
  const uint64_t slot_bytes_;
};

}  // namespace gpushare::test
