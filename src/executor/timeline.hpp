// timeline.hpp: what happened, kept for a trace that opens in Perfetto: iterations by lane, waiting,
// residency and paging by session, counters of memory. Bounded: the last kMaxRecords are kept and the number
// dropped is shown in the trace.
//
// Threads: the caller serialises add calls (the runtime's lock); write_to is given a copy.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/flat_hash.hpp"
#include "base/status.hpp"

namespace gpushare::base {
class TraceWriter;
}

namespace gpushare::executor {

class Timeline {
 public:
  static constexpr size_t kMaxRecords = size_t{1} << 18;
  static constexpr size_t kMaxNames = size_t{1} << 16;

  enum class Kind : uint8_t {
    kIteration,  // in `lane`, device time; a = number within the session, b = most ephemeral bytes
    kQueued,     // waited for admission
    kTurn,       // an iteration waited for its turn
    kResident,   // from admission (or page-in) until it left (or page-out)
    kPageOut,    // copies; a = bytes
    kPageIn,
    kAdmitted,  // instants; start_ns only
    kCancelled,
    kFailed,
    kLeft,
    kMemory  // counters: a = persistent, b = promised bytes, both of the device
  };
  struct Record {
    Kind kind = Kind::kMemory;
    uint32_t lane = UINT32_MAX;
    uint64_t session = 0;
    uint64_t start_ns = 0;
    uint64_t end_ns = 0;
    uint64_t a = 0, b = 0;
  };

  void add(const Record& record);
  void name_session(uint64_t session, const std::string& name);
  uint64_t dropped() const { return dropped_; }
  size_t size() const { return records_.size(); }
  // Errors: IO_ERROR.
  base::Status write_to(const std::string& path) const;

 private:
  struct Tracks;
  std::string name_of(uint64_t session) const;
  void write_record(base::TraceWriter& writer, Tracks& tracks, const Record& record) const;

  std::vector<Record> records_;  // a ring once full
  size_t oldest_ = 0;
  uint64_t dropped_ = 0;
  base::FlatHashMap<uint64_t, std::string> names_;
  uint64_t oldest_name_ = 1;  // session ids ascend
};

}  // namespace gpushare::executor
