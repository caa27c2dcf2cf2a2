// lease_page.hpp: makes and maps the memory of lease.hpp.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "base/status.hpp"
#include "client/channel.hpp"
#include "client/lease.hpp"

namespace gpushare::client {

class LeasePage {
 public:
  // The daemon's: makes the memory, whose size cannot change. The process's: maps what came; MALFORMED_INPUT if it is no
  // such page.
  static base::Result<std::shared_ptr<LeasePage>> create(uint32_t slots);
  static base::Result<std::shared_ptr<LeasePage>> open(Descriptor file, uint32_t slots);
  ~LeasePage();
  LeasePage(const LeasePage&) = delete;
  LeasePage& operator=(const LeasePage&) = delete;
  int file() const { return file_.get(); }
  uint32_t slots() const { return slots_; }
  Lease& lease(uint32_t slot) { return leases()[slot]; }
  // The lease is free now: passes the turn to the session that it was offered to.
  void pass_on(Lease& from) { Lease::pass(from, leases(), slots_); }
  // Bytes of the device that the scheduler has promised, for information.
  void set_promised(uint64_t bytes, uint64_t capacity_bytes) {
    memory_->promised_bytes.store(bytes, std::memory_order_relaxed);
    memory_->capacity_bytes.store(capacity_bytes, std::memory_order_relaxed);
  }
  // Whether the processes tell of the iterations of guaranteed sessions.
  void set_watched(bool watched) { memory_->watched.store(watched ? 1 : 0, std::memory_order_relaxed); }
  bool watched() const { return memory_->watched.load(std::memory_order_relaxed) != 0; }
  uint64_t capacity() const {
    return memory_->capacity_bytes.load(std::memory_order_relaxed);
  }  // 0 = not said
  uint64_t promised() const { return memory_->promised_bytes.load(std::memory_order_relaxed); }

 private:
  LeasePage(Descriptor file, uint32_t slots, LeaseMemory* memory)
      : file_(std::move(file)), slots_(slots), memory_(memory) {}
  static base::Result<std::shared_ptr<LeasePage>> map(Descriptor file, uint32_t slots);
  Lease* leases() { return memory_->leases; }

  Descriptor file_;
  const uint32_t slots_;
  LeaseMemory* memory_;
};

}  // namespace gpushare::client
