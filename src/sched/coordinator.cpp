// SPDX-License-Identifier: Apache-2.0
#include "sched/coordinator.hpp"

#include <algorithm>
#include <map>
#include <vector>

#include "base/saturate.hpp"
#include "base/status.hpp"
#include "base/units.hpp"

namespace gpushare::sched {

namespace {

// Decides everything anew from the jobs alone: in the order of arrival, and in each rank running jobs first.
template <class Entry>  // of the coordinator
class CoordinatorPlan {
 public:
  struct Decision {
    Entry* entry;
    SessionId id;
    bool runs = false;
    SessionClass cls = SessionClass::kOpportunistic;
    uint64_t limit_bytes = 0;

    bool was_guaranteed() const { return entry->running && entry->cls == SessionClass::kGuaranteed; }
    bool stops() const { return entry->running && !runs; }
    // The bytes that the job could use beyond its limit.
    uint64_t wants() const {
      return runs && cls == SessionClass::kOpportunistic ? entry->job.bytes - limit_bytes : 0;
    }
  };

  CoordinatorPlan(const CoordinatorOptions& options, std::map<SessionId, Entry>& jobs, uint64_t now_ns)
      : options_(options), now_ns_(now_ns), left_(options.capacity_bytes) {
    for (auto& [id, entry] : jobs) decisions_.push_back({&entry, id});
    guarantee_jobs();
    upgrade();
    for (const bool running : {true, false}) run_opportunistic(running);
    while (share_rest()) {
    }
  }
  const std::vector<Decision>& decisions() const { return decisions_; }
  uint64_t look_again_ns() const { return look_again_ns_; }

 private:
  bool room_for(const Decision& each) const {
    return guaranteed_ < options_.max_guaranteed && each.entry->job.bytes <= left_;
  }
  void guarantee(Decision& each) {
    each.runs = true;
    each.cls = SessionClass::kGuaranteed;
    each.limit_bytes = each.entry->job.bytes;
    left_ -= each.limit_bytes;
    ++guaranteed_;
  }

  // Guaranteed jobs that run keep what they have. Then those that wait, in order: the first that does not fit keeps its turn.
  void guarantee_jobs() {
    for (Decision& each : decisions_)
      if (each.entry->job.cls == SessionClass::kGuaranteed && each.was_guaranteed() && room_for(each))
        guarantee(each);
    for (Decision& each : decisions_) {
      if (each.runs || each.entry->job.cls != SessionClass::kGuaranteed) continue;
      if (!waits_ && room_for(each))
        guarantee(each);
      else if (each.entry->job.bytes <= options_.capacity_bytes)
        waits_ = true;
    }
  }

  // Upgrades opportunistic jobs that may be upgraded, those that were upgraded before first.
  void upgrade() {
    for (const bool before : {true, false})
      for (Decision& each : decisions_)
        if (!each.runs && each.entry->job.may_upgrade && each.was_guaranteed() == before && !waits_ &&
            room_for(each))
          guarantee(each);
  }

  // A guaranteed job runs as an opportunistic one only once it has waited long.
  bool waits_for_guarantee(Entry& entry) {
    if (entry.job.cls != SessionClass::kGuaranteed || entry.waited_long) return false;
    const uint64_t due = base::add_saturated(entry.waiting_since_ns, options_.long_wait_ns);
    entry.waited_long = entry.running || now_ns_ >= due;
    if (!entry.waited_long) look_again_ns_ = std::min(look_again_ns_, due);
    return !entry.waited_long;
  }

  // Lets opportunistic jobs run with their least bytes.
  void run_opportunistic(bool running) {
    for (Decision& each : decisions_) {
      Entry& entry = *each.entry;
      if (each.runs || entry.running != running || waits_for_guarantee(entry)) continue;
      if (opportunistic_ >= options_.max_opportunistic || entry.job.least_bytes > left_) continue;
      each.runs = true;
      each.limit_bytes = entry.job.least_bytes;
      left_ -= each.limit_bytes;
      ++opportunistic_;
    }
  }

  // One round: shares the rest by weight. What a job does not need is for the others in the next round. True if there
  // is to be one.
  bool share_rest() {
    double weights = 0;
    for (const Decision& each : decisions_)
      if (each.wants() > 0) weights += each.entry->job.weight;
    const uint64_t round = left_;
    for (Decision& each : decisions_) {
      const uint64_t wanted = each.wants();
      if (wanted == 0) continue;
      const auto part = static_cast<uint64_t>(static_cast<double>(round) * each.entry->job.weight / weights);
      const uint64_t given = std::min({wanted, part, left_});
      each.limit_bytes += given;
      left_ -= given;
    }
    return left_ > 0 && left_ < round;
  }

  const CoordinatorOptions& options_;
  const uint64_t now_ns_;
  std::vector<Decision> decisions_;
  uint64_t left_, look_again_ns_ = kUnknown;
  uint32_t guaranteed_ = 0, opportunistic_ = 0;
  bool waits_ = false;  // a guaranteed job, for room
};

}  // namespace

void Coordinator::arrive(const CoordinatedJob& job, uint64_t now_ns) {
  Entry& entry = jobs_[job.id];
  entry.job = job;
  entry.job.least_bytes = std::min(job.least_bytes, job.bytes);
  entry.waiting_since_ns = now_ns;
  decide(now_ns);
}

void Coordinator::change(const CoordinatedJob& job, uint64_t now_ns) {
  const auto found = jobs_.find(job.id);
  if (found == jobs_.end()) return;
  Entry& entry = found->second;
  entry.job = job;
  // A guaranteed job that runs has grown: others give way for it, but no guaranteed one.
  if (job.cls == SessionClass::kGuaranteed && entry.running && entry.cls == SessionClass::kGuaranteed) {
    uint64_t others = 0;
    for (const auto& [id, other] : jobs_)
      if (id != job.id && other.running && other.cls == SessionClass::kGuaranteed &&
          other.job.cls == SessionClass::kGuaranteed)
        others += other.limit_bytes;
    entry.job.bytes =
        std::min(job.bytes, options_.capacity_bytes - std::min(options_.capacity_bytes, others));
  }
  entry.job.least_bytes = std::min(job.least_bytes, entry.job.bytes);
  decide(now_ns);
}

void Coordinator::leave(SessionId id, uint64_t now_ns) {
  if (jobs_.erase(id) > 0) decide(now_ns);
}

void Coordinator::set_capacity(uint64_t bytes, uint64_t now_ns) {
  options_.capacity_bytes = bytes;
  decide(now_ns);
}

Coordinator::View Coordinator::view(SessionId id) const {
  const auto found = jobs_.find(id);
  if (found == jobs_.end()) return {};
  return {found->second.running, found->second.cls, found->second.limit_bytes};
}

Coordinator::Use Coordinator::use() const {
  Use now;
  for (const auto& [id, entry] : jobs_) {
    if (!entry.running) continue;
    now.bytes += entry.limit_bytes;
    ++(entry.cls == SessionClass::kGuaranteed ? now.guaranteed : now.opportunistic);
  }
  return now;
}

std::string Coordinator::describe() const {
  const Use now = use();
  return base::format(
      "the coordinator: %u of %u guaranteed and %u of %u opportunistic sessions run, with %s of %s",
      now.guaranteed, options_.max_guaranteed, now.opportunistic, options_.max_opportunistic,
      base::format_bytes(now.bytes).c_str(), base::format_bytes(options_.capacity_bytes).c_str());
}

void Coordinator::decide(uint64_t now_ns) {
  const CoordinatorPlan<Entry> plan(options_, jobs_, now_ns);
  look_again_ns_ = plan.look_again_ns();
  for (const auto& each : plan.decisions()) {
    if (each.stops()) {
      each.entry->waiting_since_ns = now_ns;
      each.entry->waited_long = false;
    }
    each.entry->running = each.runs;
    each.entry->cls = each.cls;
    each.entry->limit_bytes = each.runs ? each.limit_bytes : 0;
  }
}

std::string Coordinator::check() const {
  for (const auto& [id, entry] : jobs_) {
    if (!entry.running) continue;
    if (entry.cls == SessionClass::kGuaranteed && entry.limit_bytes != entry.job.bytes)
      return base::format("job %llu is guaranteed and has not all of its bytes",
                          static_cast<unsigned long long>(id));
    if (entry.limit_bytes < entry.job.least_bytes || entry.limit_bytes > entry.job.bytes)
      return base::format("job %llu has a limit outside of what it asked for",
                          static_cast<unsigned long long>(id));
  }
  const Use now = use();
  if (now.bytes > options_.capacity_bytes) return "limits exceed the capacity";
  if (now.guaranteed > options_.max_guaranteed) return "too many guaranteed jobs";
  if (now.opportunistic > options_.max_opportunistic) return "too many opportunistic jobs";
  return {};
}

}  // namespace gpushare::sched
