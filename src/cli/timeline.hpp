// timeline.hpp: the events of a simulated run, kept in bounded memory and written as a Chrome trace that
// opens in Perfetto.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.hpp"
#include "base/trace_writer.hpp"
#include "sim/events.hpp"

namespace gpushare::cli {

// Records one policy's run. A run of days holds far more iterations than a viewer can open: when there are
// too many slices, the resolution halves, and neighbours in a lane that are shorter than it become one slice
// that says how many it stands for. Nothing is cut off at the end, and lane time stays exact.
class Timeline final : public sim::EventSink {
 public:
  static constexpr size_t kMaxSlices = 50'000;
  static constexpr size_t kMaxSessions =
      1'000;  // tracks with queueing and residency; lanes show all sessions
  explicit Timeline(size_t max_slices = kMaxSlices) : max_slices_(max_slices) {}

  void session(const sim::SessionEvent& event) override;
  void iterations(sched::LaneId, sched::SessionId, uint64_t start_ns, uint64_t end_ns,
                  uint64_t count) override;
  void memory(uint64_t now_ns, uint64_t persistent_bytes, uint64_t lane_bytes,
              uint64_t ephemeral_bytes) override;

  // Writes the groups "<policy>: lanes", "<policy>: sessions" and the counters. Errors come out of
  // writer.close().
  void write(base::TraceWriter& writer, const std::string& policy);
  // Slices shorter than this were merged; 0 when everything is there.
  uint64_t resolution_ns() const { return resolution_ns_; }
  size_t sessions_left_out() const {
    return sessions_.size() > kMaxSessions ? sessions_.size() - kMaxSessions : 0;
  }

 private:
  struct Slice {
    uint64_t start_ns;
    uint64_t end_ns;
    uint64_t iterations;
    sched::SessionId session;  // kNoSession: of several
    uint32_t turns;            // how many slices it stands for
    sched::LaneId lane;
  };
  struct Span {
    uint64_t start_ns;
    uint64_t end_ns;
    sim::SessionStep since;
    uint64_t bytes;
  };
  struct Session {
    std::string name;
    std::vector<Span> spans;
    std::string reason;
    bool open = false;
  };
  struct Memory {
    uint64_t now_ns;
    uint64_t persistent_bytes;
    uint64_t lane_bytes;
    uint64_t ephemeral_bytes;
  };

  bool join(Slice& last, const Slice& next) const;
  bool join(Memory& last, const Memory& next) const;
  void coarsen();

  size_t max_slices_;
  uint64_t resolution_ns_ = 0;
  std::vector<std::vector<Slice>> lanes_;
  size_t slices_ = 0;
  std::vector<Session> sessions_;
  std::vector<Memory> memory_;
  uint64_t memory_resolution_ns_ = 0;
  uint64_t last_ns_ = 0;
};

}  // namespace gpushare::cli
