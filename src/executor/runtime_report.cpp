// The answers of a runtime about all of its sessions and lanes: figures, measured interference, timeline, memory
// snapshot, and the check of the books.
// SPDX-License-Identifier: Apache-2.0
#include "base/round_up.hpp"
#include "base/units.hpp"
#include "executor/internal.hpp"
#include "executor/runtime.hpp"
#include "sched/scheduler.hpp"

namespace gpushare::executor {

base::Result<RuntimeInfo> RuntimeImpl::info() {
  {
    Outbox outbox(*this);
    reaper_.poll(outbox);
  }
  const GatePass pass(memory_gate_.mine());
  if (!pass) return base::Status(GPUSHARE_INVALID_STATE, "the runtime is closed");
  RuntimeInfo info;
  const memory::DeviceMemoryStats stats = memory_->stats();
  info.layout = memory_->layout();
  info.capabilities = device_->info().capabilities;
  info.persistent_bytes = stats.persistent_bytes;
  info.ephemeral_bytes = stats.ephemeral_bytes;
  info.peak_bytes = stats.peak_bytes;
  info.paged_out_bytes_total = stats.paged_out_bytes_total;
  info.paged_in_bytes_total = stats.paged_in_bytes_total;
  info.device = device_->spec();
  BooksLock lock(mutex_);
  info.lanes = static_cast<uint32_t>(lanes_.opened().size());
  const SessionTable::Counts counts = sessions_.counts();
  info.sessions_queued = counts.queued;
  info.sessions_resident = counts.resident;
  info.sessions_paged_out = counts.paged_out;
  const sched::Limit capacity = authority_->capacity();
  info.capacity_bytes = capacity.target_bytes;
  info.effective_capacity_bytes = capacity.effective_bytes;
  info.promised_bytes = authority_->promised_bytes();
  info.compute_units = device_->info().compute_units;
  info.partitionable_compute_units = partitionable_units_;
  info.granularity_compute_units = granularity_units_;
  info.promised_compute_units = authority_->promised_compute_units();
  info.switches = switches_;
  info.iterations_done = reaper_.iterations_done();
  info.paging_ns = actions_.paging_ns();
  info.device_busy_ns = reaper_.busy_ns();
  info.now_ns = now();
  if (const double ns_per_byte = authority_->link_ns_per_byte(); ns_per_byte > 0)
    info.link_bytes_per_s = static_cast<uint64_t>(1e9 / ns_per_byte);
  info.policy = authority_->policy_name();
  return info;
}

base::Result<std::vector<sched::MeasuredInterference::Entry>> RuntimeImpl::interference() {
  BooksLock lock(mutex_);
  GPUSHARE_RETURN_IF_ERROR(check_open());
  const auto measured = authority_->measured();
  if (measured == nullptr) return std::vector<sched::MeasuredInterference::Entry>();
  return measured->entries();
}

base::Status RuntimeImpl::write_timeline(const std::string& path) {
  if (!record_timeline_)
    return {GPUSHARE_INVALID_STATE,
            "the runtime keeps no timeline: open it with record_timeline (GPUSHARE_RECORD_TIMELINE)"};
  Timeline copy;
  {
    Outbox outbox(*this);
    reaper_.poll(outbox);
  }
  {
    BooksLock lock(mutex_);
    if (closing_) return {GPUSHARE_INVALID_STATE, "the runtime is closed"};
    copy = timeline_;
    const uint64_t time = now();
    for (const auto& [id, session] : sessions_) {  // what is still going on
      const bool resident = session->placed_ && authority_->state(id) == sched::SessionState::kResident;
      if (resident)
        copy.add({Timeline::Kind::kResident, UINT32_MAX, id, session->resident_since_ns_, time});
      else if (!session->placed_)
        copy.add({Timeline::Kind::kQueued, UINT32_MAX, id, session->arrived_ns_, time});
    }
  }
  return copy.write_to(path);
}

base::Result<memory::MemorySnapshot> RuntimeImpl::snapshot() {
  const GatePass pass(memory_gate_.mine());
  if (!pass) return base::Status(GPUSHARE_INVALID_STATE, "the runtime is closed");
  return memory_->snapshot();
}

// Checks that all memory held is promised. No action and no submitted iteration changes memory's books meanwhile.
std::string RuntimeImpl::check_memory() {
  const ActionRunner::Pause pause(actions_);
  for (const LaneSlot* lane : lanes_.opened())
    if (lane->holder != nullptr && lane->holder->iteration_.can_end_.load() == 0) return {};
  // The promise is read now: an iteration that finishes meanwhile makes it smaller, and an action gives the bytes back later.
  uint64_t promised_bytes = authority_->promised_bytes();
  struct Promise {
    const memory::Lane* lane;
    uint64_t bytes;
    bool open;  // an iteration is
  };
  std::vector<Promise> lanes;
  for (const LaneSlot* lane : lanes_.opened())
    lanes.push_back({lane->memory.load(), authority_->lane_bytes(lane->id), lane->holder != nullptr});
  const Unlocked unlocked(mutex_);
  if (std::string wrong = memory_->check(); !wrong.empty()) return "memory: " + wrong;
  const memory::DeviceMemoryStats stats = memory_->stats();
  promised_bytes += stats.pinned_bytes;
  // Until its boundary a lane keeps bytes that it no longer needs, and a growing contiguous lane has two ranges. Kept
  // blocks pin both.
  for (const Promise& promise : lanes) {
    const memory::LaneStats now = promise.lane->stats();
    if (!promise.open && now.promoted_bytes == 0) continue;
    if (now.size_bytes > promise.bytes)
      promised_bytes += now.size_bytes - promise.bytes;
    else if (now.size_bytes < promise.bytes && memory_->layout() == memory::Layout::kContiguous)
      promised_bytes += now.size_bytes;
  }
  const uint64_t held_bytes = stats.capacity_bytes - stats.free_bytes;
  if (held_bytes <= promised_bytes) return {};
  return "memory holds " + base::format_bytes(held_bytes) + ", of which " +
         base::format_bytes(promised_bytes) + " are promised or pinned by kept blocks";
}

std::string RuntimeImpl::check() {
  Outbox outbox(*this);
  Section lock(*this);
  // The caller is responsible for its own pulled iterations. All decided actions must have been carried out; otherwise
  // memory holds bytes that are no longer promised.
  carry_out(nullptr, outbox);
  while (actions_.busy() && !closed_ && !collapsed_) mutex_.wait(actions_.changed());
  const GatePass pass(memory_gate_.mine());  // not while waiting: whoever acts may wait for all to leave
  if (!pass) return {};
  const std::string failure = check_memory();
  carry_out(nullptr, outbox);
  if (!failure.empty()) return failure;
  if (std::string wrong = authority_->check(); !wrong.empty()) return "scheduler: " + wrong;
  if (std::string wrong = sessions_.check(); !wrong.empty()) return wrong;
  if (std::string wrong = check_sessions(); !wrong.empty()) return wrong;
  return check_lanes();
}

std::string RuntimeImpl::check_sessions() const {
  uint64_t demand = 0;
  for (const auto& [id, session] : sessions_) {
    demand += session->pushes_.size() + (session->pull_waits_ ? 1 : 0) + (session->ended_ ? 1 : 0);
    if (session->open_ && (session->lane_ == nullptr || session->lane_->holder != session.get()))
      return "session " + session->name() + " has an iteration open that no lane knows";
    const sched::SessionView view = authority_->view(id);
    if (session->in_flight_ + (session->open_ ? 1 : 0) != view.in_flight && lost_.ok())
      return "session " + session->name() + ": the scheduler counts other iterations in flight";
    if (view.id != id || session->torn_down_) continue;
    if (session->home_promise_ > session->range_promise_ ||
        session->range_promise_ > session->persistent_promise_ ||
        // A need that another process is asked for may be told in part.
        (!shared_ && session->persistent_promise_ > persistent_steps_.round_up(view.persistent_bytes)))
      return base::format(
          "session %s: of %s promised its runtime reckons with %s, ranges with %s, blocks that came home "
          "with %s",
          session->name().c_str(), base::format_bytes(view.persistent_bytes).c_str(),
          base::format_bytes(session->persistent_promise_).c_str(),
          base::format_bytes(session->range_promise_).c_str(),
          base::format_bytes(session->home_promise_).c_str());
  }
  return reaper_.demand_of_sessions() == demand ? "" : "those that wait are miscounted";
}

std::string RuntimeImpl::check_lanes() const {
  for (const LaneSlot* lane : lanes_.opened()) {
    if (lane->head + lane->in_flight + (lane->holder != nullptr ? 1 : 0) != lane->next)
      return "a lane lost an iteration";
    if (lane->in_flight > depth_) return "a lane has more in flight than its depth";
  }
  return {};
}

}  // namespace gpushare::executor
