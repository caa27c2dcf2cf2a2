// range.hpp: elastic ranges of sessions: addresses behind which memory is committed and decommitted while a job runs,
// within what the session may have. A range that waits for memory asks ranges of other sessions to give some back
// (sched/elastic.hpp decides which).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "base/status.hpp"
#include "memory/device_memory.hpp"

namespace gpushare::executor {

// A request to give `bytes` back within `within_ns`. Returns the bytes that the range gives by then, with those that it
// has decommitted already; 0: none. Called on a thread of the range, one call at a time, with no lock held. The
// function may call the runtime, and may decommit in the call or on another thread. An exception counts as no answer.
using GiveBackFunction = std::function<uint64_t(uint64_t bytes, uint64_t within_ns)>;

struct RangeOptions {
  std::string name;  // empty = "range-N"
  uint64_t reserved_bytes = 0;
  uint64_t answer_ns = 0;  // 0 = 100 ms
  // The price of giving bytes back and restoring them; 0 = a copy to the host and back, 0.2.
  double price_ns_per_byte = 0;
  GiveBackFunction give_back;  // empty: the range is never asked
};

struct RangeInfo {
  memory::Address address = 0;
  uint64_t reserved_bytes = 0;
  uint64_t granule_bytes = 0;
  uint64_t committed_bytes = 0;
  uint64_t peak_bytes = 0;
  uint64_t requests = 0;         // times that the range was asked to give back
  uint64_t requested_bytes = 0;  // asked for in these requests
  uint64_t silences = 0;         // requests that it did not answer
  bool silent = false;           // its session counts as opportunistic because the range did not answer
  uint64_t waits = 0;            // commits that did not find room at once
  uint64_t waited_ns = 0;
  uint64_t longest_wait_ns = 0;
  uint64_t unanswered_by =
      0;  // id of the session whose range was the last to keep silent when this one asked; 0: none
};

class Range {
 public:
  virtual ~Range() = default;
  // Gives everything back, in the order of the session's stream and of recorded uses. Waits for calls on the range and
  // for its function. INVALID_STATE from that function, and when closed already.
  virtual base::Status close() = 0;
  // True once close() has given the memory back; another close() is then refused.
  virtual bool closed() const = 0;
  // Puts memory behind the granules of [offset, offset + bytes) that have none; all or none. Blocks at most timeout_ns
  // for room; a copy that makes room is finished first. Blocks also while the session is queued or paged out. Inside a
  // callback it does not block for room. With timeout 0 and in a callback, device work that still uses the memory is waited for. Errors: DEVICE_OUT_OF_MEMORY (no room, timeout 0 or inside a callback), TIMED_OUT
  // (names who kept silent), QUOTA_EXCEEDED, EXCEEDS_CAPACITY, INVALID_ARGUMENT, INVALID_STATE (closed), CANCELLED,
  // DEVICE_LOST.
  virtual base::Status commit(uint64_t offset_bytes, uint64_t bytes, uint64_t timeout_ns) = 0;
  // Gives the memory behind [offset, offset + bytes) back, as far as there is any. Does not wait for the device. Errors:
  // INVALID_ARGUMENT, INVALID_STATE (closed; the session's stream captures a graph).
  virtual base::Status decommit(uint64_t offset_bytes, uint64_t bytes) = 0;
  virtual RangeInfo info() const = 0;
};

}  // namespace gpushare::executor
