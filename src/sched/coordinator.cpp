// SPDX-License-Identifier: Apache-2.0
#include "sched/coordinator.hpp"

#include <algorithm>
#include <utility>

#include "base/saturate.hpp"
#include "base/status.hpp"
#include "base/units.hpp"

namespace gpushare::sched {

using Kind = CoordinatorAction::Kind;

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

std::vector<CoordinatorAction> Coordinator::take_actions() {
  return std::exchange(actions_, {});
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

// Decides anew from nothing but the jobs, in the order of arrival and with those that run first in each rank, and tells
// the differences.
void Coordinator::decide(uint64_t now_ns) {
  struct Decision {
    Entry* entry;
    SessionId id;
    bool runs = false;
    SessionClass cls = SessionClass::kOpportunistic;
    uint64_t limit_bytes = 0;
  };
  std::vector<Decision> decisions;
  for (auto& [id, entry] : jobs_) decisions.push_back({&entry, id});
  uint64_t left = options_.capacity_bytes;
  uint32_t guaranteed = 0, opportunistic = 0;
  look_again_ns_ = kUnknown;

  const auto guarantee = [&](Decision& decision) {
    decision.runs = true;
    decision.cls = SessionClass::kGuaranteed;
    decision.limit_bytes = decision.entry->job.bytes;
    left -= decision.limit_bytes;
    ++guaranteed;
  };
  const auto room_for = [&](const Decision& decision) {
    return guaranteed < options_.max_guaranteed && decision.entry->job.bytes <= left;
  };
  // Guaranteed jobs that run keep what they have. Then those that wait, in order: the first that does not fit keeps its turn.
  for (Decision& each : decisions)
    if (each.entry->job.cls == SessionClass::kGuaranteed && each.entry->running &&
        each.entry->cls == SessionClass::kGuaranteed && room_for(each))
      guarantee(each);
  bool waits = false;
  for (Decision& each : decisions) {
    if (each.runs || each.entry->job.cls != SessionClass::kGuaranteed) continue;
    if (!waits && room_for(each))
      guarantee(each);
    else if (each.entry->job.bytes <= options_.capacity_bytes)
      waits = true;
  }
  // Opportunistic jobs that may be upgraded: who was upgraded before comes first.
  for (const bool before : {true, false})
    for (Decision& each : decisions) {
      const bool was = each.entry->running && each.entry->cls == SessionClass::kGuaranteed;
      if (!each.runs && each.entry->job.may_upgrade && was == before && !waits && room_for(each))
        guarantee(each);
    }
  // Opportunistic ones: those that run, then those that wait; with their least bytes first.
  for (const bool running : {true, false})
    for (Decision& each : decisions) {
      Entry& entry = *each.entry;
      if (each.runs || entry.running != running) continue;
      if (entry.job.cls == SessionClass::kGuaranteed && !entry.waited_long) {
        const uint64_t due = base::add_saturated(entry.waiting_since_ns, options_.long_wait_ns);
        if (!running && now_ns < due) {
          look_again_ns_ = std::min(look_again_ns_, due);
          continue;
        }
        entry.waited_long = true;
      }
      if (opportunistic >= options_.max_opportunistic || entry.job.least_bytes > left) continue;
      each.runs = true;
      each.limit_bytes = entry.job.least_bytes;
      left -= each.limit_bytes;
      ++opportunistic;
    }
  // The rest is shared by weight; what one does not need goes to the others.
  for (bool more = true; more && left > 0;) {
    more = false;
    double weights = 0;
    for (const Decision& each : decisions)
      if (each.runs && each.cls == SessionClass::kOpportunistic && each.limit_bytes < each.entry->job.bytes)
        weights += each.entry->job.weight;
    const uint64_t round = left;
    for (Decision& each : decisions) {
      if (!each.runs || each.cls != SessionClass::kOpportunistic) continue;
      const uint64_t wanted = each.entry->job.bytes - each.limit_bytes;
      if (wanted == 0) continue;
      const auto part = static_cast<uint64_t>(static_cast<double>(round) * each.entry->job.weight / weights);
      const uint64_t given = std::min({wanted, part, left});
      each.limit_bytes += given;
      left -= given;
      more = more || given > 0;
    }
  }
  // Told in the order in which the room comes to be: who stops, who gets less, then who gets more and who starts.
  const auto tell = [&](const Decision& each, Kind kind) {
    actions_.push_back({kind, each.id, each.cls, each.limit_bytes});
  };
  for (const Decision& each : decisions)
    if (each.entry->running && !each.runs) tell(each, Kind::kStop);
  for (const bool less : {true, false})
    for (const Decision& each : decisions) {
      if (!each.entry->running || !each.runs || (each.limit_bytes < each.entry->limit_bytes) != less)
        continue;
      if (each.entry->cls != each.cls)
        tell(each, Kind::kReclass);
      else if (each.entry->limit_bytes != each.limit_bytes)
        tell(each, Kind::kSetLimit);
    }
  for (const Decision& each : decisions)
    if (!each.entry->running && each.runs) tell(each, Kind::kStart);
  for (const Decision& each : decisions) {
    if (each.entry->running && !each.runs) {
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
