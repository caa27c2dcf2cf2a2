// Turns of one device that processes share: leases, offers, service, and those that are overdue.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "base/saturate.hpp"
#include "base/units.hpp"
#include "daemon/service.hpp"

namespace gpushare::daemon {

using client::Lease;
using client::LeaseState;
using client::MessageType;

namespace {

constexpr uint64_t kRenewNs = 500'000'000;   // how often leases are renewed
constexpr uint64_t kLoadLookNs = 5'000'000;  // a load that fails calls nobody back
// How often the service looks whether a session should still keep its turn, and the least often where lanes wait for
// each other and nothing ends in them.
constexpr uint64_t kKeptLookNs = 500'000, kMostLookLanesNs = 10'000'000;
constexpr uint64_t kMostIterations = 1'000'000'000;  // that one reading of a lease believes

}  // namespace

void SharedDevice::start_turn(Claim& claim, sched::LaneId lane, uint64_t granted_ns, uint64_t now_ns) {
  set_ready(claim, false);
  scheduler_.dispatched(claim.id, lane, now_ns);
  claim.lane = lane;  // pick may have moved it
  holders_[lane] = &claim;
  claim.turn = Claim::Turn::kHolds;
  claim.granted_ns = granted_ns;
  claim.believed_ns = claim.wanted_since_ns = claim.watched_ns = 0;
  ++turns_;
}

void SharedDevice::grant(Claim& claim, sched::LaneId lane, uint64_t now_ns) {
  start_turn(claim, lane, now_ns, now_ns);
  // A session that reads the lease itself gets no message, so the lease is marked wanted here, once it is clear that
  // the turn does not stay. A capped session also gives its turn back after one turn, when its debt is looked at.
  const bool contested = (contended() || capped(claim)) && !passes(claim);
  if (contested) {
    claim.wanted_since_ns = now_ns;
    time_turn(claim, now_ns);
  }
  for (const auto& member : claim.members)
    if (member->ready()) lease_to(*member, contested ? LeaseState::kWanted : LeaseState::kBusy, now_ns);
}

void SharedDevice::time_turn(Claim& claim, uint64_t now_ns) {
  uint64_t turn_ns = 0;
  if (scheduler_.outranked(claim.id, now_ns)) {
    turn_ns = 1000;  // it ends at once
  } else if (ready_ == 0 && !outrun(claim, now_ns)) {
    // No other session waits for the turn. A cap still allows no more than its balance, in all processes of the claim
    // together.
    turn_ns = kLongTurnNs;
    if (capped(claim)) {
      const auto members = static_cast<double>(claim.members.size());
      turn_ns = std::min(turn_ns, base::to_uint64(std::max(claim.cap->balance_ns(now_ns) / members, 0.0)));
      if (turn_ns < sched::kQuantumNs) turn_ns = 0;
    }
  }
  for (const auto& member : claim.members) lease(*member).set_turn_ns(turn_ns);
}

void SharedDevice::lease_to(RemoteSession& session, LeaseState state, uint64_t now_ns) {
  session.turn = RemoteSession::Turn::kLeased;
  session.epoch = ++epoch_of(session);
  Lease& lease = this->lease(session);
  session.seen_service_ns = lease.service_ns();
  session.seen_iterations = lease.iterations();
  lease.extend(now_ns + kLeaseGoodNs);
  lease.set({session.epoch, state});
  if (lease.bell().expected())
    lease.bell().ring();
  else
    tell(session, MessageType::kGranted);
}

void SharedDevice::take_back_offers() {
  const uint64_t now_ns = base::host_now_ns();
  std::vector<Claim*> passed_on;
  for (sched::LaneId lane = 0; lane < offers_.size(); ++lane) {
    const Offer offer = std::exchange(offers_[lane], {});
    if (offer.to == nullptr || lease(*offer.to).withdraw(offer.epoch)) continue;
    // The lane's holder has drained, and has passed the turn on.
    if (holders_[lane] != nullptr) passed_on.push_back(holders_[lane]);
    RemoteSession& session = *offer.to;
    start_turn(*session.claim, lane, offer.made_ns, now_ns);
    session.turn = RemoteSession::Turn::kLeased;
    session.epoch = offer.epoch + 1;
  }
  // The end of a turn may page sessions out. By then the sessions that have a turn already count as running.
  for (Claim* holder : passed_on) {
    RemoteSession& from = *holder->members.front();
    if (lease(from).look().state != LeaseState::kFree)  // the process does not keep to the rules
      lease(from).set({++epoch_of(from), LeaseState::kFree});
    member_done(from, now_ns);
  }
}

void SharedDevice::offer(sched::LaneId lane, uint64_t now_ns) {
  Claim* holder = holders_[lane];
  if (holder == nullptr || holder->wanted_since_ns == 0 || !passes(*holder)) return;
  const auto picked = scheduler_.pick(lane, now_ns);
  carry_out_all();  // what pick() decided
  const auto found = picked ? claims_.find(*picked) : claims_.end();
  if (found == claims_.end() || !passes(*found->second)) return;
  RemoteSession& from = *holder->members.front();
  RemoteSession& to = *found->second->members.front();
  Lease& lease = this->lease(to);
  // A thread must be there to take the turn.
  if (to.process->leases != from.process->leases || !to.ready() || !to.images.empty() ||
      !lease.bell().expected())
    return;
  Offer& offer = offers_[lane];
  offer = {&to, epoch_of(to) + 1, now_ns};
  epoch_of(to) += 2;  // of the lease, or of the withdrawn offer
  to.seen_service_ns = lease.service_ns();
  to.seen_iterations = lease.iterations();
  lease.extend(now_ns + kLeaseGoodNs);
  lease.set({offer.epoch, LeaseState::kFree});
  this->lease(from).set_next(to.slot, offer.epoch);
}

bool SharedDevice::keeps(Claim& claim, uint64_t now_ns) {
  if (claim.turn == Claim::Turn::kKept) claim.turn = Claim::Turn::kHolds;
  if (!passes(claim) || capped(claim) || claim.slow || retries(claim) || claim.wanted_since_ns != 0 ||
      ready_ == 0 || scheduler_.waiting() > 0 ||
      scheduler_.promised_bytes() > scheduler_.capacity().target_bytes)
    return false;
  const Lease& lease = this->lease(*claim.members.front());
  const bool idle = lease.look().state == LeaseState::kIdle;
  const uint64_t iterations = lease.iterations();
  read_service(claim, now_ns, false);
  if (!scheduler_.would_go_on(claim.id, claim.lane, now_ns)) return false;
  // A session that makes no progress, idle or inside an iteration, is asked for the turn, and the lease counts from
  // then on.
  if (claim.watched_ns == 0 || claim.watched_idle != idle || claim.watched_iterations != iterations) {
    claim.watched_ns = now_ns;
    claim.watched_idle = idle;
    claim.watched_iterations = iterations;
  } else if (now_ns - claim.watched_ns >
             (idle ? kPatienceNs : 2 * scheduler_.view(claim.id).iteration_ns + sched::kPatienceNs)) {
    claim.slow = idle;
    return false;
  }
  claim.turn = Claim::Turn::kKept;
  return true;
}

bool SharedDevice::several_lanes_run() const {
  return std::count_if(holders_.begin(), holders_.end(),
                       [](const Claim* holder) { return holder != nullptr; }) > 1;
}

bool SharedDevice::outrun(const Claim& claim, uint64_t now_ns) {
  return several_lanes_run() && scheduler_.waits_for_lanes(claim.id, now_ns);
}

void SharedDevice::read_lanes(uint64_t now_ns) {
  if (!several_lanes_run()) return;
  bool ended = false;
  for (Claim* holder : holders_)
    if (holder != nullptr && scheduler_.compares_lanes(holder->id))
      ended = read_service(*holder, now_ns, false) || ended;
  look_lanes_ns_ = ended ? kKeptLookNs : std::clamp(2 * look_lanes_ns_, kKeptLookNs, kMostLookLanesNs);
}

bool SharedDevice::want_back(Claim& claim, uint64_t now_ns) {
  bool told = false, busy = false;
  for (const auto& member : claim.members) {
    Lease& lease = this->lease(*member);
    while (member->leased()) {
      const Lease::Word word = lease.look();
      const bool mine = word.epoch == member->epoch && word.state != LeaseState::kFree;
      if (mine && word.state == LeaseState::kWanted) {
        busy = true;
        break;
      }
      if (mine) {
        const bool idle = word.state == LeaseState::kIdle;
        if (!lease.change(word, idle ? LeaseState::kFree : LeaseState::kWanted)) continue;
        if (!idle) {
          if (!lease.looks()) tell(*member, MessageType::kWanted);
          told = busy = true;
          break;
        }
      }
      collect(*member, now_ns);  // given back, or nonsense
      member->turn = RemoteSession::Turn::kNone;
    }
  }
  if (told && claim.wanted_since_ns == 0) claim.wanted_since_ns = now_ns;
  if (busy) return false;
  turn_over(claim, now_ns);
  return true;
}

void SharedDevice::collect(RemoteSession& session, uint64_t now_ns) {
  Claim& claim = *session.claim;
  const Lease& lease = this->lease(session);
  const uint64_t service_ns = lease.service_ns(), iterations = lease.iterations();
  const uint64_t spent_ns =
      std::min(service_ns - std::min(service_ns, session.seen_service_ns), grace_ns(claim, now_ns));
  const uint64_t count =
      std::min(iterations - std::min(iterations, session.seen_iterations), kMostIterations);
  session.seen_service_ns = service_ns;
  session.seen_iterations = iterations;
  session.unread_ns = base::add_saturated(session.unread_ns, spent_ns);
  session.iterations += count;
  claim.unread_ns = base::add_saturated(claim.unread_ns, spent_ns);
  claim.unread_iterations += count;
}

void SharedDevice::member_done(RemoteSession& session, uint64_t now_ns) {
  Claim& claim = *session.claim;
  collect(session, now_ns);
  session.turn = RemoteSession::Turn::kNone;
  if (std::none_of(claim.members.begin(), claim.members.end(),
                   [](const auto& member) { return member->leased(); }))
    turn_over(claim, now_ns);
}

bool SharedDevice::read_service(Claim& claim, uint64_t now_ns, bool gives_back) {
  if (!gives_back && std::none_of(claim.members.begin(), claim.members.end(), [&](const auto& member) {
        return member->leased() && lease(*member).iterations() != member->seen_iterations;
      }))
    return false;
  for (const auto& member : claim.members)
    if (member->leased()) collect(*member, now_ns);
  // Sessions of a group that ran side by side: together they had the device no longer than the turn was.
  const uint64_t said_ns = std::exchange(claim.unread_ns, 0);
  const uint64_t spent_ns = std::min(said_ns, grace_ns(claim, now_ns));
  // Each session gets its part of what is left, so that the last one gets the rest and rounding loses nothing.
  uint64_t said_left_ns = said_ns, left_ns = spent_ns;
  for (const auto& member : claim.members)
    if (const uint64_t part_ns = std::min(std::exchange(member->unread_ns, 0), said_left_ns); part_ns > 0) {
      const uint64_t own_ns = std::min(
          left_ns, base::to_uint64(static_cast<double>(left_ns) *
                                   (static_cast<double>(part_ns) / static_cast<double>(said_left_ns))));
      member->service_ns += own_ns;
      left_ns -= own_ns;
      said_left_ns -= part_ns;
    }
  const uint64_t count = std::min(std::exchange(claim.unread_iterations, 0), kMostIterations);
  claim.believed_ns += spent_ns;
  service_ns_ += spent_ns;
  if (claim.cap != nullptr) claim.cap->charge(spent_ns, now_ns);
  // A turn that a gate held up says nothing of how sessions slow each other.
  if (const auto measured = scheduler_.measured(); measured != nullptr && gates_.any())
    for (const auto& member : claim.members)
      if (gates_.was_held_up(member->at_gates)) measured->held_up(claim.id);
  // In this order a session that keeps the turn always has something in flight, so it changes no lane.
  if (!gives_back) scheduler_.dispatched(claim.id, claim.lane, now_ns);
  scheduler_.finished(claim.id, spent_ns, now_ns, count);
  return true;
}

void SharedDevice::turn_over(Claim& claim, uint64_t now_ns) {
  if (!claim.leased()) return;
  read_service(claim, now_ns, true);
  for (const auto& member : claim.members)
    if (member->leased()) member->turn = RemoteSession::Turn::kNone;
  claim.turn = Claim::Turn::kNone;
  claim.wanted_since_ns = 0;
  claim.returned_ns = now_ns;
  for (Claim*& holder : holders_)
    if (holder == &claim) holder = nullptr;
  for (const auto& member : claim.members)
    if (!member->overdue()) images_.let_go(*member);
  announce(claim, now_ns);  // members that asked meanwhile
}

void SharedDevice::make_offers() {
  const uint64_t now_ns = base::host_now_ns();
  for (sched::LaneId lane = 0; lane < holders_.size(); ++lane) offer(lane, now_ns);
}

uint64_t SharedDevice::tick(uint64_t now_ns) {
  take_back_offers();
  uint64_t next_ns = UINT64_MAX;
  const auto look_at = [&](uint64_t at_ns) { next_ns = std::min(next_ns, at_ns - std::min(at_ns, now_ns)); };
  if (const uint64_t look_ns = scheduler_.look_again_ns(); look_ns != sched::kUnknown) look_at(look_ns);
  if (images_.loading()) next_ns = std::min(next_ns, kLoadLookNs);
  next_ns = std::min(next_ns, gates_.tick(now_ns));
  bool moved = room_until_ns_ != 0 && now_ns >= room_until_ns_;
  moved = announce_repaid(now_ns) || moved;
  moved = images_.tick(now_ns, &next_ns) || moved;
  moved = (lanes_ != nullptr && lanes_->tick(now_ns, &next_ns)) || moved;
  for (const Claim* claim : in_debt_) look_at(claim->cap->may_begin_ns(now_ns));
  if (retry_ns_ != 0 && now_ns >= retry_ns_) {
    retry_ns_ = 0;
    scheduler_.room_used(sched::kNoSession, now_ns);
    moved = true;
  }
  if (retry_ns_ != 0) look_at(retry_ns_);
  if (scheduler_.coordination() && scheduler_.look_again_ns() <= now_ns) moved = true;  // pump looks
  moved = ranges_.expire(now_ns) || moved;
  if (const uint64_t deadline_ns = ranges_.next_deadline_ns(); deadline_ns != UINT64_MAX)
    look_at(deadline_ns);
  if (room_until_ns_ != 0) look_at(room_until_ns_);
  for (const Process* process : images_.overdue(now_ns, options_.lease_ns, &next_ns)) kill_overdue(*process);
  for (size_t lane = 0; lane < holders_.size(); ++lane)
    if (holders_[lane] != nullptr) moved = renew_or_end(*holders_[lane], now_ns, &next_ns) || moved;
  // The service that was read, or a turn that was passed meanwhile, may have decided something.
  if (carry_out_all() || moved) {
    pump();
    return 0;
  }
  make_offers();
  return next_ns;
}

bool SharedDevice::renew_or_end(Claim& claim, uint64_t now_ns, uint64_t* next_ns) {
  *next_ns = std::min(*next_ns, claim.turn == Claim::Turn::kKept ? kKeptLookNs : kRenewNs);
  if (several_lanes_run() && scheduler_.compares_lanes(claim.id))
    *next_ns = std::min(*next_ns, std::max(look_lanes_ns_, kKeptLookNs));
  if (claim.wanted_since_ns == 0 || !contended()) {  // asked to give it back, but nobody waits for it
    for (const auto& member : claim.members)
      if (member->leased()) lease(*member).extend(now_ns + kLeaseGoodNs);
    read_service(claim, now_ns, false);
    return false;
  }
  const uint64_t ends_ns = base::add_saturated(claim.wanted_since_ns, options_.lease_ns);
  if (now_ns < ends_ns) {
    *next_ns = std::min(*next_ns, ends_ns - now_ns);
    return false;
  }
  cut_off(claim, now_ns);
  return true;
}

void SharedDevice::cut_off(Claim& claim, uint64_t now_ns) {
  for (const auto& member : claim.members) {
    if (!member->leased()) continue;
    log_limit_.warn(
        member->process->peer.uid,
        base::format("daemon: session '%s' of process %d has had the turn for %s while others waited: "
                     "it is taken back",
                     member->name.c_str(), member->process->peer.pid,
                     base::format_duration_ns(now_ns - claim.wanted_since_ns).c_str()),
        now_ns);
    ++cut_off_;
    // The session is charged for the time now, whatever it reports when it is done.
    collect(*member, now_ns);
    const uint64_t held_ns = grace_ns(claim, now_ns);
    const uint64_t more_ns = held_ns - std::min(held_ns, claim.unread_ns);
    member->unread_ns += more_ns;
    claim.unread_ns += more_ns;
    lease(*member).set({++epoch_of(*member), LeaseState::kFree});
    set_overdue(*member, true);
    gates_.lapse(member->at_gates, now_ns);
    tell(*member, MessageType::kWanted);  // it may not have seen that it had the turn
    kill_overdue(*member->process);
  }
  turn_over(claim, now_ns);
}

}  // namespace gpushare::daemon
