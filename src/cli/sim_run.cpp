// `gpushare run --device sim`: the simulator of src/sim, with what it tells recorded for charts, timeline and
// snapshot.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>

#include "base/units.hpp"
#include "cli/run_options.hpp"
#include "cli/timeline.hpp"
#include "memory/snapshot.hpp"
#include "sched/policy.hpp"
#include "sim/simulation.hpp"

namespace gpushare::cli {
namespace {

// Fills the series of a run, keeps who held what when the most was promised, and passes everything on to the
// timeline.
class Recorder final : public sim::EventSink {
 public:
  Recorder(PolicyRun& run, const std::vector<sim::Job>& jobs, Timeline* timeline)
      : run_(run), jobs_(jobs), timeline_(timeline) {}

  void session(const sim::SessionEvent& event) override {
    switch (event.step) {
      case sim::SessionStep::kArrived:
        waiting(event.now_ns, +1);
        break;
      case sim::SessionStep::kRefused:
        waiting(event.now_ns, -1);
        break;
      case sim::SessionStep::kAdmitted:
      case sim::SessionStep::kPagingIn:
        waiting(event.now_ns, -1);
        entered(event.session);
        break;
      case sim::SessionStep::kPagedOut:
        waiting(event.now_ns, +1);
        [[fallthrough]];
      case sim::SessionStep::kLeft:
        left(event.session);
        break;
      case sim::SessionStep::kPagingOut:
      case sim::SessionStep::kPagedIn:
        break;
    }
    if (timeline_ != nullptr) timeline_->session(event);
  }
  void lane_opened(uint64_t now_ns, sched::LaneId lane, uint64_t bytes) override {
    lanes_[lane] = bytes;
    run_.lanes_open.set(now_ns, static_cast<double>(lanes_.size()));
  }
  void lane_resized(uint64_t, sched::LaneId lane, uint64_t bytes) override { lanes_[lane] = bytes; }
  void lane_closed(uint64_t now_ns, sched::LaneId lane) override {
    lanes_.erase(lane);
    run_.lanes_open.set(now_ns, static_cast<double>(lanes_.size()));
  }
  void iterations(sched::LaneId lane, sched::SessionId id, uint64_t start_ns, uint64_t end_ns,
                  uint64_t count) override {
    run_.lanes_busy.add(start_ns, end_ns);
    if (timeline_ != nullptr) timeline_->iterations(lane, id, start_ns, end_ns, count);
  }
  void memory(uint64_t now_ns, uint64_t persistent_bytes, uint64_t lane_bytes,
              uint64_t ephemeral_bytes) override {
    run_.persistent_bytes.set(now_ns, static_cast<double>(persistent_bytes));
    run_.lane_bytes.set(now_ns, static_cast<double>(lane_bytes));
    run_.live_bytes.set(now_ns, static_cast<double>(persistent_bytes + ephemeral_bytes));
    if (persistent_bytes + lane_bytes > peak_promised_) {
      peak_promised_ = persistent_bytes + lane_bytes;
      peak_residents_ = resident_;
      peak_lanes_ = lanes_;
    }
    if (timeline_ != nullptr) timeline_->memory(now_ns, persistent_bytes, lane_bytes, ephemeral_bytes);
  }

  void finish(uint64_t end_ns) {
    for (Series* series :
         {&run_.lanes_open, &run_.waiting, &run_.persistent_bytes, &run_.lane_bytes, &run_.live_bytes})
      series->finish(end_ns);
  }

  // The promises at their peak, laid out as the contiguous layout would: persistent bytes from the low end,
  // lanes from the high end.
  memory::MemorySnapshot peak(uint64_t capacity_bytes) const {
    memory::MemorySnapshot out;
    out.capacity_bytes = capacity_bytes;
    uint64_t low = 0;
    for (const auto& [id, promised] : peak_residents_) {
      const uint64_t bytes = whole_granules(promised);
      if (bytes == 0) continue;
      out.segments.push_back(segment(low, bytes, memory::Kind::kModel, id, "session " + jobs_[id - 1].name));
      low += bytes;
    }
    uint64_t high = low;
    for (const auto& [lane, promised] : peak_lanes_) high += whole_granules(promised);
    high = std::max(high, capacity_bytes);
    for (const auto& [lane, promised] : peak_lanes_) {
      const uint64_t bytes = whole_granules(promised);
      if (bytes == 0) continue;
      high -= bytes;
      out.segments.push_back(
          segment(high, bytes, memory::Kind::kEphemeral, 0, base::format("lane %u", lane)));
    }
    return out;
  }

 private:
  static uint64_t whole_granules(uint64_t bytes) { return (bytes + 255) / 256 * 256; }
  static memory::SegmentSnapshot segment(uint64_t address, uint64_t bytes, memory::Kind kind,
                                         sched::SessionId id, std::string name) {
    memory::BlockInfo block;
    block.address = address;
    block.bytes = bytes;
    block.kind = kind;
    block.session = id;
    memory::SegmentSnapshot out;
    out.address = address;
    out.bytes = bytes;
    out.session = id;
    out.name = std::move(name);
    out.blocks.push_back(block);
    return out;
  }
  void entered(sched::SessionId id) {
    const sim::Job& job = jobs_[id - 1];
    if (!resident_.insert_or_assign(id, job.persistent_bytes).second) return;
    apart_bytes_ += job.persistent_bytes + job.ephemeral_bytes;
    run_.most_inside = std::max<uint64_t>(run_.most_inside, resident_.size());
    run_.most_apart_bytes = std::max(run_.most_apart_bytes, apart_bytes_);
  }
  void left(sched::SessionId id) {
    if (resident_.erase(id) == 0) return;
    apart_bytes_ -= jobs_[id - 1].persistent_bytes + jobs_[id - 1].ephemeral_bytes;
  }
  void waiting(uint64_t now_ns, int change) {
    waiting_ += change;
    run_.waiting.set(now_ns, static_cast<double>(waiting_));
  }

  PolicyRun& run_;
  uint64_t apart_bytes_ = 0;
  const std::vector<sim::Job>& jobs_;
  Timeline* timeline_;
  int64_t waiting_ = 0;
  std::map<sched::SessionId, uint64_t> resident_;
  std::map<sched::LaneId, uint64_t> lanes_;
  uint64_t peak_promised_ = 0;
  std::map<sched::SessionId, uint64_t> peak_residents_;
  std::map<sched::LaneId, uint64_t> peak_lanes_;
};

double seconds(uint64_t ns) {
  return static_cast<double>(ns) * 1e-9;
}

void copy_result(const sim::SimulationResult& from, PolicyRun& to) {
  to.makespan_s = seconds(from.makespan_ns);
  to.utilization = from.utilization;
  to.switches = from.switches;
  to.peak_bytes = from.peak_bytes;
  to.oom = from.oom;
  to.paged_bytes = from.paged_bytes;
  for (const sim::JobResult& job : from.jobs) {
    JobOutcome outcome;
    outcome.name = job.name;
    outcome.state = job.refused ? JobOutcome::State::kRefused : JobOutcome::State::kCompleted;
    outcome.arrival_s = seconds(job.arrival_ns);
    outcome.start_s = seconds(job.start_ns);
    outcome.end_s = seconds(job.end_ns);
    outcome.iterations = job.iterations;
    outcome.service_s = seconds(job.service_ns);
    outcome.reason = job.reason;
    to.jobs.push_back(std::move(outcome));
  }
  summarize(to);
}

// Notes that every policy gives are said once; others name who gives them.
void gather_notes(const std::vector<std::pair<std::string, std::vector<std::string>>>& by_policy,
                  std::vector<std::string>& out) {
  std::vector<std::pair<std::string, std::vector<std::string>>> notes;
  for (const auto& [policy, lines] : by_policy) {
    for (const std::string& line : lines) {
      auto at =
          std::find_if(notes.begin(), notes.end(), [&](const auto& entry) { return entry.first == line; });
      if (at == notes.end()) at = notes.insert(notes.end(), {line, {}});
      at->second.push_back(policy);
    }
  }
  for (const auto& [line, policies] : notes) {
    std::string who;
    if (policies.size() < by_policy.size())
      for (const std::string& policy : policies) who.append(who.empty() ? "" : ", ").append(policy);
    out.push_back(who.empty() ? line : who + ": " + line);
  }
}

}  // namespace

base::Result<RunResult> run_simulated(const RunOptions& options, const sim::JobFile& file,
                                      const sim::InterferenceTable* table, const Progress& progress) {
  RunResult result;
  result.device = "sim";
  result.label = "sim";
  sim::SimulationOptions simulation;
  if (options.capacity_bytes != 0) simulation.capacity_bytes = options.capacity_bytes;
  simulation.max_lanes = options.lanes;
  simulation.interference = options.interference;
  simulation.tell_policy = options.tell_policy;
  simulation.measures = options.measures;
  if (!options.lane_finder.empty()) {
    GPUSHARE_ASSIGN_OR_RETURN(simulation.lane_finder, sched::lane_finder_named(options.lane_finder));
  }
  simulation.table = table;
  simulation.seed = options.seed;
  simulation.jitter = options.jitter;
  result.capacity_bytes = simulation.capacity_bytes;
  result.notes = file.notes;

  std::vector<std::pair<std::string, std::vector<std::string>>> notes;
  std::string snapshots;  // their files, for one note
  std::vector<Timeline> timelines;
  for (size_t index = 0; index < options.policies.size(); ++index) {
    const std::string& name = options.policies[index].name;
    GPUSHARE_ASSIGN_OR_RETURN(std::unique_ptr<sched::Policy> policy, options.policies[index].make());
    result.policies.emplace_back();
    PolicyRun& run = result.policies.back();
    run.policy = name;
    if (!options.timeline_path.empty()) timelines.emplace_back();
    Recorder recorder(run, file.jobs, options.timeline_path.empty() ? nullptr : &timelines.back());
    simulation.progress = [&](uint64_t now_ns, size_t finished, size_t jobs) {
      return progress(name, finished, jobs, seconds(now_ns));
    };
    base::Result<sim::SimulationResult> simulated =
        sim::Simulation(simulation, file.jobs, std::move(policy), &recorder).run();
    if (simulated.status().code() == GPUSHARE_CANCELLED) {
      result.interrupted = true;
      result.policies.pop_back();
      if (!timelines.empty()) timelines.pop_back();
      break;
    }
    if (!simulated.ok()) return simulated.status();
    const sim::SimulationResult& outcome = *simulated;
    copy_result(outcome, run);
    uint64_t end_ns = 0;
    for (const sim::JobResult& job : outcome.jobs) end_ns = std::max(end_ns, job.end_ns);
    recorder.finish(end_ns);
    notes.emplace_back(name, outcome.notes);
    if (!options.snapshot_path.empty()) {
      const std::string path = policy_path(options.snapshot_path, name, index);
      GPUSHARE_RETURN_IF_ERROR(memory::write_snapshot(
          recorder.peak(simulation.capacity_bytes),
          path.ends_with(".json") ? memory::SnapshotFormat::kJson : memory::SnapshotFormat::kPickle, path));
      snapshots += (snapshots.empty() ? "" : ", ") + path;
    }
  }
  gather_notes(notes, result.notes);
  if (!snapshots.empty())
    result.notes.push_back(
        "--snapshot: the promised segments at their peak, laid out as one buffer (the simulator "
        "places no single blocks): " +
        snapshots);
  if (!options.timeline_path.empty()) {
    GPUSHARE_ASSIGN_OR_RETURN(base::TraceWriter writer, base::TraceWriter::open(options.timeline_path));
    for (size_t i = 0; i < timelines.size(); ++i) {
      timelines[i].write(writer, options.policies[i].name);
      if (timelines[i].resolution_ns() > 0)
        result.notes.push_back(
            base::format("--timeline, %s: turns shorter than %s are merged with their neighbours.",
                         options.policies[i].name.c_str(),
                         base::format_duration_ns(timelines[i].resolution_ns()).c_str()));
    }
    if (!timelines.empty() && timelines.front().sessions_left_out() > 0)
      result.notes.push_back(
          base::format("--timeline: queueing and residency of the first %zu sessions; the lanes show all.",
                       Timeline::kMaxSessions));
    GPUSHARE_RETURN_IF_ERROR(writer.close());
  }
  return result;
}

}  // namespace gpushare::cli
