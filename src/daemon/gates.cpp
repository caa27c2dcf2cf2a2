// SPDX-License-Identifier: Apache-2.0
#include "daemon/gates.hpp"

#include <algorithm>
#include <utility>

#include "base/saturate.hpp"

namespace gpushare::daemon {
namespace {

// So long a process may be silent before its work is taken for done, and an iteration last that usually takes less.
constexpr uint64_t kSilentNs = 1'000'000'000;
constexpr uint64_t kLeastLongestNs = 4'000'000;
// An iteration may take so many times its time alone.
constexpr double kMostTimes = 16;
// A target out of what the library accepts is none.
constexpr double kLeastTarget = 1e-4, kMostTarget = 10;
constexpr uint32_t kMostInFlight = 1024;  // that one session may say
// A process whose work is there although it may let in nothing keeps what is measured from being alone. It is believed so for this
// part of the time, and for one longest iteration more.
constexpr uint64_t kForgiven = 10;

}  // namespace

Gates::Gates(uint64_t longest_ns) : longest_ns_(std::max(longest_ns, kLeastLongestNs)) {}

uint64_t Gates::Claimed::believe(uint64_t ns, uint64_t now_ns) {
  const uint64_t passed_ns = now_ns - std::min(now_ns, since_ns);
  const uint64_t most_ns = base::add_saturated(base::add_saturated(passed_ns, passed_ns), kSilentNs);
  const uint64_t out = std::min(ns, most_ns - std::min(most_ns, believed_ns));
  believed_ns += out;
  return out;
}

void Gates::open(uint64_t session, base::GateSlot& slot, double weight, uint64_t now_ns) {
  if (gates_.contains(session)) return;
  if (guaranteed_.contains(session)) left(session, now_ns);  // of another class now
  Gate& gate = gates_[session];
  gate.slot = &slot;
  gate.work.since_ns = gate.moved_ns = gate.looked_ns = now_ns;
  gate.seen_used_ns = slot.used_ns();
  gate.seen_entries = slot.entries();
  gate.seen_held_up = slot.held_up();
  controller_.arrive(session, sched::SessionClass::kOpportunistic, weight, 0, false);
  if (guaranteed_
          .empty()) {  // nothing is measured and nothing held up, so the other gates need not be looked at
    slot.publish({});
    if (slot.bell().expected()) slot.bell().ring();
    return;
  }
  look(now_ns, now_ns);
  publish(now_ns);
}

void Gates::began(uint64_t session, double target, uint64_t at_ns, uint64_t now_ns) {
  if (!(target >= kLeastTarget && target <= kMostTarget)) target = 0;
  if (gates_.contains(session)) left(session, now_ns);
  const auto [found, is_new] = guaranteed_.try_emplace(session);
  Guaranteed& guaranteed = found->second;
  if (is_new) {
    guaranteed.work.since_ns = now_ns;
    controller_.arrive(session, sched::SessionClass::kGuaranteed, 1, target);
    if (guaranteed_.size() == 1)
      for (auto& [id, gate] : gates_) gate.moved_ns = now_ns;  // launches were not seen up to now
  } else {
    controller_.set_target(session, target);
  }
  if (guaranteed.in_flight >= kMostInFlight) return;
  if (guaranteed.in_flight++ == 0) {
    guaranteed.at_ns = std::clamp(at_ns, guaranteed.at_ns, std::max(now_ns, guaranteed.at_ns));
    guaranteed.begun_ns = now_ns;
  }
  if (guaranteed.lapsed > 0) return;
  look(now_ns, now_ns);
  controller_.began(session, now_ns);
  publish(now_ns);
}

void Gates::ended(uint64_t session, uint64_t device_ns, uint64_t at_ns, uint64_t now_ns) {
  const auto found = guaranteed_.find(session);
  if (found == guaranteed_.end() || found->second.in_flight == 0) return;
  Guaranteed& guaranteed = found->second;
  --guaranteed.in_flight;
  if (guaranteed.lapsed > 0) {
    if (--guaranteed.lapsed > 0 || guaranteed.in_flight == 0) return;
    // The device goes on with those that began meanwhile.
    guaranteed.at_ns = std::clamp(at_ns, guaranteed.at_ns, std::max(now_ns, guaranteed.at_ns));
    guaranteed.begun_ns = now_ns;
    look(now_ns, now_ns);
    for (uint32_t i = 0; i < guaranteed.in_flight; ++i) controller_.began(session, now_ns);
    publish(now_ns);
    return;
  }
  look(guaranteed.at_ns, now_ns);
  for (auto& [id, gate] : gates_) {
    const uint64_t entries = gate.slot->entries();
    controller_.set_wants(id, entries != gate.seen_entries || gate.slot->bell().expected());
    gate.seen_entries = entries;
  }
  // Time that cannot have passed teaches nothing.
  const uint64_t believed_ns = guaranteed.work.believe(device_ns, now_ns);
  controller_.finished(session, believed_ns == device_ns ? device_ns : 0, now_ns);
  guaranteed.at_ns = std::clamp(at_ns, guaranteed.at_ns, std::max(now_ns, guaranteed.at_ns));
  guaranteed.begun_ns = now_ns;
  publish(now_ns);
}

void Gates::lapse(uint64_t session, Guaranteed& guaranteed, uint64_t now_ns) {
  if (guaranteed.lapsed > 0 || guaranteed.in_flight == 0) return;
  look(guaranteed.at_ns, now_ns);
  for (uint32_t i = 0; i < guaranteed.in_flight; ++i) controller_.finished(session, 0, now_ns);
  guaranteed.lapsed = guaranteed.in_flight;
}

void Gates::lapse(uint64_t session, uint64_t now_ns) {
  const auto found = guaranteed_.find(session);
  if (found == guaranteed_.end()) return;
  lapse(session, found->second, now_ns);
  publish(now_ns);
}

void Gates::set_class(uint64_t session, bool guaranteed, uint64_t now_ns) {
  if (guaranteed ? gates_.contains(session) : guaranteed_.contains(session)) left(session, now_ns);
}

void Gates::left(uint64_t session, uint64_t now_ns) {
  if (const auto gate = gates_.find(session); gate != gates_.end()) {
    gate->second.slot->publish({});
    gate->second.slot->bell().ring();
    gates_.erase(gate);
    controller_.leave(session);
    if (guaranteed_.empty()) return;  // the others have no terms
  } else if (guaranteed_.erase(session) > 0) {
    controller_.leave(session);
  } else {
    return;
  }
  publish(now_ns);
}

uint64_t Gates::longest_ns_of(uint64_t session) const {
  const auto known = controller_.estimate(session);
  if (known.learning) return longest_ns_;
  return std::max(kSilentNs, base::to_uint64(kMostTimes * static_cast<double>(known.alone_ns)));
}

uint64_t Gates::tick(uint64_t now_ns) {
  if (gates_.empty() || guaranteed_.empty()) return UINT64_MAX;
  uint64_t next_ns = UINT64_MAX;
  bool due = false;
  for (auto& [id, guaranteed] : guaranteed_) {
    if (guaranteed.in_flight == 0 || guaranteed.lapsed > 0) continue;
    const uint64_t until_ns = base::add_saturated(guaranteed.begun_ns, longest_ns_of(id));
    if (until_ns > now_ns) {
      next_ns = std::min(next_ns, until_ns - now_ns);
    } else {
      lapse(id, guaranteed, now_ns);
      due = true;
    }
  }
  const uint64_t renew_ns = base::add_saturated(published_ns_, longest_ns_ / 4);
  if (due || renew_ns <= now_ns) {
    look(now_ns, now_ns);
    publish(now_ns);
  }
  return std::min(next_ns, base::add_saturated(published_ns_, longest_ns_ / 4) - now_ns);
}

void Gates::look(uint64_t from_ns, uint64_t now_ns) {
  uint64_t asked_ns = 0, who = 0;
  for (auto& [id, gate] : gates_) {
    const bool unseen = gate.slot->unseen();  // read first: the process says last that it tells of its work
    const uint64_t used_ns = gate.slot->used_ns();
    const uint64_t said_ns = gate.slot->busy_until_ns();
    const bool waits = gate.slot->bell().expected(), busy = unseen || said_ns == base::GateSlot::kBusy;
    const uint64_t more_ns = used_ns - std::min(used_ns, gate.seen_used_ns);
    if (more_ns > 0 || busy != gate.busy) gate.moved_ns = now_ns;
    const bool silent = busy && now_ns - std::min(now_ns, gate.moved_ns) >= (waits ? longest_ns_ : kSilentNs);
    // Work that came and went meanwhile was beside whatever was there.
    const bool was_there = more_ns > 0 || (busy ? !silent : std::min(said_ns, now_ns) > from_ns);
    const uint64_t passed_ns = now_ns - std::min(now_ns, gate.looked_ns);
    gate.intruded_ns -= std::min(gate.intruded_ns, passed_ns / kForgiven);
    if (gate.shut && !gate.busy && was_there) gate.intruded_ns += passed_ns;
    // Else nothing of it counts as there: it grew to that by work since a look that found nothing there.
    if (gate.intruded_ns <= longest_ns_) {
      if (more_ns > 0) controller_.progressed(id, gate.work.believe(more_ns, now_ns));
      if (was_there) controller_.on_device(id, true);
      controller_.on_device(id, busy && !silent);
    }
    gate.seen_used_ns = used_ns;
    gate.busy = busy;
    gate.looked_ns = now_ns;
    if (const uint64_t one_ns = gate.slot->asked_ns(); one_ns > asked_ns) {
      asked_ns = one_ns;
      who = id;
    }
  }
  if (asked_ns > 0) (void)controller_.admits_at(who, asked_ns, 0, now_ns);  // credit is saved for the longest
}

void Gates::publish(uint64_t now_ns) {
  published_ns_ = now_ns;
  controller_.each_terms([&](uint64_t session, base::GateTerms terms) {
    Gate& gate = gates_.at(session);
    if (!guaranteed_.empty()) {
      terms.until_ns = base::add_saturated(now_ns, longest_ns_);
      terms.used_ns = gate.seen_used_ns;
    }
    gate.slot->publish(terms);
    gate.shut = terms.busy != 0 && terms.share == 0;
    if (!gate.shut && gate.slot->bell().expected()) gate.slot->bell().ring();
  });
}

bool Gates::was_held_up(uint64_t session) {
  const auto found = gates_.find(session);
  if (found == gates_.end()) return false;
  const uint64_t now = found->second.slot->held_up();
  return std::exchange(found->second.seen_held_up, now) != now;
}

}  // namespace gpushare::daemon
