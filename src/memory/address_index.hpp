// address_index.hpp: from a device address to the owner of the 2 MiB granule it lies in. A radix tree over
// all the upper bits (imaginary devices use the highest), four loads a lookup, no lock. Owners are pooled and
// never destroyed while the index lives, so a reader that comes late finds an owner that no longer holds the
// address and says so, never freed memory.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>

#include "base/mutex.hpp"
#include "base/status.hpp"
#include "device/device.hpp"

namespace gpushare::memory {

class BlockOwner;

class AddressIndex {
 public:
  static constexpr uint64_t kGranuleBytes = uint64_t{2} << 20;

  AddressIndex() = default;
  ~AddressIndex();
  AddressIndex(const AddressIndex&) = delete;
  AddressIndex& operator=(const AddressIndex&) = delete;

  // null if nobody owns the granule. Lock-free.
  BlockOwner* find(device::Address address) const;
  // Names the owner of [address, address + bytes), whole granules. Errors: ALREADY_EXISTS (a granule has an
  // owner: nothing has changed), HOST_OUT_OF_MEMORY. Writers are serialised by a lock.
  base::Status set(device::Address address, uint64_t bytes, BlockOwner* owner);
  // Makes room for later set() calls in [address, address + bytes), so that none of them needs host memory.
  base::Status prepare(device::Address address, uint64_t bytes);
  void clear(device::Address address, uint64_t bytes);

 private:
  // 64 bits of address = 21 inside a granule + 4 levels of 11 (the first uses 10 of its bits).
  static constexpr unsigned kLevelBits = 11;
  static constexpr unsigned kLevels = 4;
  static constexpr size_t kFanout = size_t{1} << kLevelBits;
  // Entries point to nodes of the next level, on the last level to owners.
  struct Node {
    std::array<std::atomic<void*>, kFanout> entries{};
  };
  // The entry of a granule; makes the way to it when `make`. null if there is none.
  std::atomic<void*>* entry(uint64_t granule, bool make);
  static void destroy(Node* node, unsigned level);

  base::Mutex mutex_;  // of writers
  Node root_;
};

}  // namespace gpushare::memory
