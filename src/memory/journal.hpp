// journal.hpp: the allocations of an iteration in the order of their calls, for a framework's allocator that learns from
// them which blocks outlive an iteration (framework/allocator.hpp).
//
// A journal is worked on by one side at a time. While LaneDoor::lend() has it, the lane's door lists in it each block that
// LaneDoor::alloc_listed() gives out, under the lane's lock. LaneDoor::take_back() ends that: from then on the journal is
// its owner's alone.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "memory/device_memory.hpp"

namespace gpushare::memory {

struct Journal {
  struct Entry {
    static constexpr uint64_t kLived = uint64_t{1} << 63;  // at the iteration's end
    uint64_t bytes_and_lived = 0;
    Address address = 0;  // 0: not known yet
    uint64_t bytes() const { return bytes_and_lived & ~kLived; }
    bool lived() const { return (bytes_and_lived & kLived) != 0; }
  };

  explicit Journal(uint64_t the_owner) : owner(the_owner) {}
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;

  // Whether the next allocation, of so many bytes, is expected to outlive the iteration: the one at its place in the
  // iteration before was as large and lived.
  bool expects(uint64_t bytes) const {
    return count < expected && before[count].bytes_and_lived == (bytes | Entry::kLived);
  }
  // Adds an entry. Throws bad_alloc.
  void add(uint64_t bytes, Address address) {
    if (count == entries.size()) entries.resize(std::max<size_t>(64, 2 * count));
    entries[count++] = {bytes, address};
  }
  // Another iteration begins.
  void turn_page() {
    entries.swap(before);
    before_count = std::exchange(count, 0);
  }

  const uint64_t owner;  // of no other allocator in the process
  std::vector<Entry> entries, before;
  size_t count = 0, before_count = 0;  // the rest of the vectors is room
  size_t expected = 0;                 // so many entries of `before` tell what to expect
  size_t most = 0;  // more entries are not added at the door, nor more than lend() finds room for
  std::atomic<uint64_t> served{0};  // blocks that the door has listed; written under its lock
};

}  // namespace gpushare::memory
