// SPDX-License-Identifier: Apache-2.0
#include "executor/timeline.hpp"

#include <algorithm>
#include <map>

#include "base/trace_writer.hpp"

namespace gpushare::executor {
namespace {

// Ephemeral bytes in use over time: each iteration has its own from its begin to its end on the device. The host frees them earlier, while
// the device still works with them, so its books are no measure.
std::map<uint64_t, uint64_t> ephemeral_bytes(const std::vector<Timeline::Record>& records) {
  std::map<uint64_t, uint64_t>
      at;  // changes first, and then their sums; an end is a negative change, modulo 2^64
  for (const Timeline::Record& record : records) {
    if (record.kind != Timeline::Kind::kIteration) continue;
    at[record.start_ns] += record.b;
    at[record.end_ns] -= record.b;
  }
  uint64_t bytes = 0;
  for (auto& [time_ns, change] : at) change = bytes += change;
  return at;
}

}  // namespace

void Timeline::add(const Record& record) {
  if (records_.size() < kMaxRecords) {
    records_.push_back(record);
    return;
  }
  records_[oldest_] = record;
  oldest_ = (oldest_ + 1) % kMaxRecords;
  ++dropped_;
}

void Timeline::name_session(uint64_t session, const std::string& name) {
  names_[session] = name;
  while (names_.size() > kMaxNames) names_.erase(oldest_name_++);
}

std::string Timeline::name_of(uint64_t session) const {
  const auto found = names_.find(session);
  return found != names_.end() ? found->second : "session-" + std::to_string(session);
}

struct Timeline::Tracks {
  base::TraceWriter::Group device;
  base::TraceWriter::Track paging;
  std::map<uint32_t, base::TraceWriter::Track> lanes;
  std::map<uint64_t, base::TraceWriter::Track> turns, residency;
};

void Timeline::write_record(base::TraceWriter& writer, Tracks& tracks, const Record& record) const {
  auto& [device, paging, lanes, turns, residency] = tracks;
  const uint64_t duration = record.end_ns > record.start_ns ? record.end_ns - record.start_ns : 0;
  const auto slice = [&](const base::TraceWriter::Track& track, const char* name) {
    writer.slice(track, name, record.start_ns, duration);
  };
  switch (record.kind) {
    case Kind::kIteration:
      writer.slice(lanes[record.lane], name_of(record.session), record.start_ns, duration,
                   {{"session", record.session}, {"iteration", record.a}});
      break;
    case Kind::kTurn:
      slice(turns[record.session], "waits for its turn");
      break;
    case Kind::kQueued:
      slice(residency[record.session], "queued");
      break;
    case Kind::kResident:
      slice(residency[record.session], "resident");
      break;
    case Kind::kPageOut:
    case Kind::kPageIn: {
      const bool out = record.kind == Kind::kPageOut;
      slice(residency[record.session], out ? "page out" : "page in");
      writer.slice(paging, (out ? "out: " : "in: ") + name_of(record.session), record.start_ns, duration,
                   {{"session", record.session}, {"bytes", record.a}});
      break;
    }
    case Kind::kAdmitted:
      writer.instant(residency[record.session], "admitted", record.start_ns, {{"lane", record.lane}});
      break;
    case Kind::kCancelled:
      writer.instant(residency[record.session], "cancelled", record.start_ns);
      break;
    case Kind::kFailed:
      writer.instant(residency[record.session], "failed", record.start_ns);
      break;
    case Kind::kLeft:
      writer.instant(residency[record.session], "left", record.start_ns);
      break;
    case Kind::kMemory:
      writer.counter(device, "persistent bytes", record.start_ns, {{"persistent", record.a}});
      writer.counter(device, "promised bytes", record.start_ns, {{"promised", record.b}});
      break;
  }
}

base::Status Timeline::write_to(const std::string& path) const {
  std::vector<Record> sorted;
  sorted.reserve(records_.size());
  for (size_t i = 0; i < records_.size(); ++i) sorted.push_back(records_[(oldest_ + i) % records_.size()]);
  // Enclosing slices first, as viewers nest them.
  std::stable_sort(sorted.begin(), sorted.end(), [](const Record& x, const Record& y) {
    return x.start_ns != y.start_ns ? x.start_ns < y.start_ns : x.end_ns > y.end_ns;
  });
  GPUSHARE_ASSIGN_OR_RETURN(base::TraceWriter writer, base::TraceWriter::open(path));
  Tracks tracks;
  auto& [device, paging, lanes, turns, residency] = tracks;
  device = writer.add_group("device");
  for (const Record& record : sorted)
    if (record.kind == Kind::kIteration) lanes.emplace(record.lane, base::TraceWriter::Track{});
  for (auto& [lane, track] : lanes) track = writer.add_track(device, "lane " + std::to_string(lane));
  paging = writer.add_track(device, "paging copies");
  const auto sessions = writer.add_group("sessions");
  for (const Record& record : sorted) {
    if (record.session == 0) continue;
    residency.emplace(record.session, base::TraceWriter::Track{});
    if (record.kind == Kind::kTurn) turns.emplace(record.session, base::TraceWriter::Track{});
  }
  for (auto& [session, track] : residency) {
    track = writer.add_track(sessions, name_of(session));
    if (const auto turn = turns.find(session); turn != turns.end())
      turn->second = writer.add_track(sessions, name_of(session) + ": turns");
  }
  if (dropped_ > 0 && !sorted.empty())
    writer.instant(paging, "older records dropped", sorted.front().start_ns, {{"count", dropped_}});
  for (const Record& record : sorted) write_record(writer, tracks, record);
  for (const auto& [time_ns, bytes] : ephemeral_bytes(sorted))
    writer.counter(device, "ephemeral bytes in use", time_ns, {{"ephemeral", bytes}});
  return writer.close();
}

}  // namespace gpushare::executor
