// SPDX-License-Identifier: Apache-2.0
#include "cli/timeline.hpp"

#include <algorithm>

namespace gpushare::cli {

void Timeline::session(const sim::SessionEvent& event) {
  if (sessions_.size() < event.session) sessions_.resize(event.session);
  Session& s = sessions_[event.session - 1];
  last_ns_ = std::max(last_ns_, event.now_ns);
  if (event.step == sim::SessionStep::kArrived) s.name = event.text;
  if (event.step == sim::SessionStep::kRefused) s.reason = event.text;
  if (s.open) s.spans.back().end_ns = event.now_ns;
  s.open = event.step != sim::SessionStep::kLeft && event.step != sim::SessionStep::kRefused &&
           event.session <= kMaxSessions;
  // Sessions past the limit keep no spans: nobody scrolls through a thousand tracks.
  if (event.step == sim::SessionStep::kLeft || event.session > kMaxSessions) return;
  s.spans.push_back({event.now_ns, event.now_ns, event.step, event.bytes});
}

bool Timeline::join(Slice& last, const Slice& next) const {
  const bool touches = next.start_ns <= last.end_ns + resolution_ns_;
  const bool same = last.session == next.session && last.session != sched::kNoSession && touches &&
                    next.start_ns == last.end_ns;
  const bool small =
      touches && last.end_ns - last.start_ns < resolution_ns_ && next.end_ns - next.start_ns < resolution_ns_;
  if (!same && !small) return false;
  if (last.session != next.session) last.session = sched::kNoSession;
  last.end_ns = next.end_ns;
  last.iterations += next.iterations;
  last.turns += same ? 0 : next.turns;
  return true;
}

void Timeline::iterations(sched::LaneId lane, sched::SessionId id, uint64_t start_ns, uint64_t end_ns,
                          uint64_t count) {
  if (lanes_.size() <= lane) lanes_.resize(lane + 1);
  last_ns_ = std::max(last_ns_, end_ns);
  std::vector<Slice>& slices = lanes_[lane];
  // Times of the simulator are rounded to whole ns one by one: a slice may seem to begin before its neighbour's end.
  if (!slices.empty()) start_ns = std::max(start_ns, slices.back().end_ns);
  const Slice slice{start_ns, std::max(start_ns, end_ns), count, id, 1, lane};
  if (!slices.empty() && join(slices.back(), slice)) return;
  slices.push_back(slice);
  if (++slices_ > max_slices_) coarsen();
}

void Timeline::coarsen() {
  while (slices_ > max_slices_ / 2) {
    resolution_ns_ = resolution_ns_ == 0 ? 1'000'000 : resolution_ns_ * 2;
    slices_ = 0;
    for (std::vector<Slice>& slices : lanes_) {
      size_t kept = 0;
      for (size_t i = 0; i < slices.size(); ++i) {
        if (kept > 0 && join(slices[kept - 1], slices[i])) continue;
        slices[kept++] = slices[i];
      }
      slices.resize(kept);
      slices_ += kept;
    }
    // Longer than the run: nothing more can be merged.
    if (resolution_ns_ > last_ns_) return;
  }
}

bool Timeline::join(Memory& last, const Memory& next) const {
  if (next.now_ns >= last.now_ns + memory_resolution_ns_) return false;
  last.persistent_bytes = next.persistent_bytes;
  last.lane_bytes = next.lane_bytes;
  last.ephemeral_bytes = std::max(last.ephemeral_bytes, next.ephemeral_bytes);
  return true;
}

void Timeline::memory(uint64_t now_ns, uint64_t persistent_bytes, uint64_t lane_bytes,
                      uint64_t ephemeral_bytes) {
  last_ns_ = std::max(last_ns_, now_ns);
  const Memory next{now_ns, persistent_bytes, lane_bytes, ephemeral_bytes};
  if (!memory_.empty() && join(memory_.back(), next)) return;
  memory_.push_back(next);
  while (memory_.size() > max_slices_ / 4 && memory_resolution_ns_ <= last_ns_) {
    memory_resolution_ns_ = memory_resolution_ns_ == 0 ? 1'000'000 : memory_resolution_ns_ * 2;
    size_t kept = 0;
    for (const Memory& m : memory_)
      if (kept == 0 || !join(memory_[kept - 1], m)) memory_[kept++] = m;
    memory_.resize(kept);
  }
}

void Timeline::write(base::TraceWriter& writer, const std::string& policy) {
  const auto lanes = writer.add_group(policy + ": lanes");
  for (size_t lane = 0; lane < lanes_.size(); ++lane) {
    const auto track = writer.add_track(lanes, base::format("lane %zu", lane));
    for (const Slice& slice : lanes_[lane]) {
      const std::string name = slice.session == sched::kNoSession
                                   ? base::format("%u turns of several sessions", slice.turns)
                                   : sessions_[slice.session - 1].name;
      writer.slice(track, name, slice.start_ns, slice.end_ns - slice.start_ns,
                   {{"session", slice.session}, {"iterations", slice.iterations}, {"turns", slice.turns}});
    }
  }
  // The names of the counters of a run on a device (executor/timeline.cpp).
  for (const Memory& m : memory_) {
    writer.counter(lanes, "promised bytes", m.now_ns,
                   {{"persistent", m.persistent_bytes}, {"lanes", m.lane_bytes}});
    writer.counter(lanes, "ephemeral bytes in use", m.now_ns, {{"ephemeral", m.ephemeral_bytes}});
  }
  const auto group = writer.add_group(policy + ": sessions");
  static constexpr const char* kNames[] = {"queued",    "refused",   "resident", "paging out",
                                           "paged out", "paging in", "resident"};  // by step
  for (size_t i = 0; i < std::min(sessions_.size(), kMaxSessions); ++i) {
    const Session& s = sessions_[i];
    if (s.spans.empty()) continue;
    const auto track = writer.add_track(group, base::format("%zu %s", i + 1, s.name.c_str()));
    for (const Span& span : s.spans) {
      const char* name = kNames[static_cast<size_t>(span.since)];
      const uint64_t end_ns = s.open && &span == &s.spans.back() ? last_ns_ : span.end_ns;
      if (span.since == sim::SessionStep::kRefused)
        writer.instant(track, name, span.start_ns, {{"reason", std::string_view(s.reason)}});
      else if (end_ns > span.start_ns)
        writer.slice(track, name, span.start_ns, end_ns - span.start_ns, {{"bytes", span.bytes}});
    }
  }
}

}  // namespace gpushare::cli
