// Memory of one device that processes share, and the messages about it; turns.cpp has the turns, room.cpp what makes
// room, paging.cpp page-outs and page-ins.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <csignal>
#include <utility>

#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "base/round_up.hpp"
#include "base/saturate.hpp"
#include "daemon/service.hpp"

namespace gpushare::daemon {

using client::Lease;
using client::LeaseState;
using client::MessageType;

namespace {

constexpr uint64_t kPiecesOfDevice = 64;           // a piece of a lane is the capacity divided by this
constexpr uint64_t kLeastPieceBytes = 2ull << 20;  // the least that processes map

sched::SchedulerOptions scheduling(uint64_t capacity_bytes, const ServiceOptions& service) {
  sched::SchedulerOptions options;
  options.capacity_bytes = capacity_bytes;
  options.max_lanes = service.max_lanes;
  options.shared_lanes = service.share_lanes;
  options.measures = true;
  options.enqueues = false;  // offers are taken back
  options.least_stay_ns = service.least_stay_ns;
  // This also covers programs that a busy host runs late.
  options.keeps_lag_ns = sched::kKeepsLagNs;
  return options;
}

}  // namespace

SharedDevice::SharedDevice(std::string device, uint64_t capacity_bytes, uint64_t granularity_bytes,
                           const ServiceOptions& options, LogLimit& log_limit,
                           std::unique_ptr<sched::Policy> policy, std::function<void()> wake)
    : name_(std::move(device)),
      capacity_bytes_(capacity_bytes),
      options_(options),
      log_limit_(log_limit),
      scheduler_(scheduling(capacity_bytes, options), std::move(policy)),
      images_(name_, options.images_bytes, scheduler_, next_id_, std::move(wake)),
      gates_(options.lease_ns) {
  const base::Status always_ok = scheduler_.set_coordination(options.coordination, base::host_now_ns());
  if (!options.share_lanes || granularity_bytes == 0) return;
  const uint64_t piece = std::max(kLeastPieceBytes, capacity_bytes / kPiecesOfDevice);
  lanes_ =
      std::make_unique<Lanes>(name_, base::round_up(piece, std::max(kLeastPieceBytes, granularity_bytes)));
}

base::Result<std::shared_ptr<LeaseTable>> SharedDevice::leases_for(uid_t user, bool passes_turns) {
  if (passes_turns)
    if (auto known = tables_[user].lock()) return known;
  const uint32_t slots = passes_turns ? client::kSharedLeaseSlots : client::kLeaseSlots;
  auto table = std::make_shared<LeaseTable>();
  GPUSHARE_ASSIGN_OR_RETURN(table->page, client::LeasePage::create(slots));
  table->epochs.assign(slots, 0);
  table->used.assign(slots, false);
  table->page->set_promised(scheduler_.promised_bytes(), scheduler_.capacity().target_bytes);
  table->page->set_watched(gates_.any());
  all_tables_.push_back(table);
  if (passes_turns) tables_[user] = table;
  return table;
}

Claim* SharedDevice::find_group(uint64_t group, uid_t user) const {
  if (group == 0) return nullptr;
  for (const auto& [id, claim] : claims_)
    if (claim->group == group && claim->members.front()->process->peer.uid == user) return claim.get();
  return nullptr;
}

base::Status SharedDevice::check_arrival(const Process& process, const client::Arrive& message) {
  if (message.session == 0 || process.sessions.contains(message.session))
    return {GPUSHARE_INVALID_ARGUMENT, "the session's number is 0 or in use"};
  if (message.cls > static_cast<uint32_t>(sched::SessionClass::kOpportunistic))
    return {GPUSHARE_INVALID_ARGUMENT, base::format("there is no session class %u", message.cls)};
  if (message.cap != 0 && !sched::TimeCap::valid(message.cap))
    return {GPUSHARE_INVALID_ARGUMENT,
            base::format("a cap of %g of the device's time is not above 0 and at most 1", message.cap)};
  return {};
}

base::Status SharedDevice::arrive(Process& process, const client::Arrive& message,
                                  std::unique_ptr<GroupPage> page, uint32_t* out_slot) {
  GPUSHARE_RETURN_IF_ERROR(check_arrival(process, message));
  take_back_offers();
  std::vector<bool>& used = process.leases->used;
  carry_out_all();
  const auto free_slot = std::find(used.begin(), used.end(), false);
  if (free_slot == used.end())
    return {GPUSHARE_QUEUE_FULL, base::format("there are %zu sessions, as many as allowed", used.size())};
  auto owned = std::make_unique<RemoteSession>();
  RemoteSession& session = *owned;
  session.number = message.session;
  session.at_gates = next_at_gates_++;
  session.process = &process;
  session.name = client::text_of(message.name);
  session.cls = static_cast<sched::SessionClass>(message.cls);
  session.slot = static_cast<uint32_t>(free_slot - used.begin());
  const uint64_t now_ns = base::host_now_ns();
  const bool own_claim = (message.flags & client::kOwnClaim) != 0;
  Claim* claim = own_claim ? nullptr : find_group(message.group, process.peer.uid);
  const bool was_there = claim != nullptr;
  if (!was_there) {
    GPUSHARE_ASSIGN_OR_RETURN(claim, make_claim(process, message, session.name, page.get(), now_ns));
  }
  if (claim->group != 0 && claim->page == nullptr) claim->page = std::move(page);
  // Borrowers may come back later than the programs that lend.
  if (claim->lends() && now_ns - began_ns_ >= kComeBackNs) owe(*claim);
  if (claim->cap == nullptr) claim->cap = cap_of(process, message.group, message.cap, now_ns);
  session.claim = claim;
  claim->members.push_back(std::move(owned));
  *free_slot = true;
  process.sessions.emplace(session.number, &session);
  joined(*claim, session, was_there, (message.flags & client::kRunning) != 0, now_ns);
  follow_limit(*claim);
  *out_slot = session.slot | (claim->shares_lane ? client::kSharesLane : 0);
  return {};
}

base::Result<Claim*> SharedDevice::make_claim(const Process& process, const client::Arrive& message,
                                              const std::string& name, GroupPage* page, uint64_t now_ns) {
  const bool own_claim = (message.flags & client::kOwnClaim) != 0;
  std::shared_ptr<GroupLimits> limits = limits_of(message);
  uint64_t persistent_bytes = message.persistent_bytes;
  if (!own_claim && page != nullptr)
    persistent_bytes = left_for_page(limits.get(), persistent_bytes, *page, now_ns);
  GPUSHARE_RETURN_IF_ERROR(contexts_.leave_room(
      process, name, base::add_saturated(message.persistent_bytes, message.ephemeral_bytes)));
  const base::Status fits = within(limits.get(), nullptr, name,
                                   base::add_saturated(persistent_bytes, message.ephemeral_bytes), now_ns);
  if (!fits.ok() && (message.flags & client::kKnownBefore) == 0) return fits;
  auto made = std::make_unique<Claim>();
  Claim& claim = *made;
  claim.id = next_id_++;
  claim.group = own_claim ? 0 : message.group;
  claim.persistent_bytes = persistent_bytes;
  claim.ephemeral_bytes = message.ephemeral_bytes;
  claim.weight = options_.ranks.weight(message.weight);
  claim.counts_as = static_cast<sched::SessionClass>(message.cls);
  if (base::Status arrived = scheduler_.arrive(spec_of(process, message, name, claim), now_ns);
      !arrived.ok()) {
    // Page-outs that the scheduler has decided for the session are sent before the refusal. A process waits for those
    // of its own sessions, and then asks again.
    carry_out_all();
    owe_loans(limits.get());
    (void)give_back(now_ns);
    return arrived;
  }
  claims_.emplace(claim.id, std::move(made));
  if (limits != nullptr) {
    claim.limits = std::move(limits);
    claim.limits->claims.push_back(&claim);
  }
  return &claim;
}

bool SharedDevice::is_limited(const client::Arrive& message) const {
  if (message.group == 0) return false;
  const auto found = limits_.find(message.group);
  const auto limits = found == limits_.end() ? nullptr : found->second.lock();
  return (limits != nullptr ? limits->memory_bytes : message.group_memory_bytes) != 0;
}

// A session that fits only without the rounding to pieces gets an E of its own. So does a session of a group with a
// memory limit. That limit counts each E, and rounding to pieces would let the group have more than its limit.
bool SharedDevice::may_share_lane(const client::Arrive& message) const {
  const bool in_group = message.group != 0 && (message.flags & client::kOwnClaim) == 0;
  return lanes_ != nullptr && !in_group && (message.flags & client::kMayShareLane) != 0 &&
         !is_limited(message) &&
         base::add_saturated(message.persistent_bytes, lane_need(message.ephemeral_bytes)) <=
             scheduler_.capacity().target_bytes;
}

sched::SessionSpec SharedDevice::spec_of(const Process& process, const client::Arrive& message,
                                         const std::string& name, Claim& claim) const {
  sched::SessionSpec spec;
  spec.id = claim.id;
  spec.name = name;
  spec.group = message.group;
  spec.named = name.rfind("session-", 0) != 0;  // what executors call sessions without a name
  spec.cls = claim.counts_as;
  spec.priority = options_.ranks.priority(message.priority);
  spec.weight = claim.weight;
  claim.shares_lane = may_share_lane(message) && lanes_->is_open();
  spec.persistent_bytes = claim.persistent_bytes;
  if (claim.shares_lane) {
    spec.ephemeral_bytes = lane_need(message.ephemeral_bytes);
    spec.trust_group = uint64_t{process.peer.uid} + 1;
  } else {
    spec.persistent_bytes = base::add_saturated(claim.persistent_bytes, message.ephemeral_bytes);
  }
  spec.remaining_ns = message.remaining_ns;
  spec.iterations_total = message.iterations_total;
  spec.may_queue = (message.flags & client::kMayQueue) != 0;
  spec.may_page = (message.flags & client::kMayPage) != 0;
  spec.alternates = (message.flags & client::kAlternates) != 0;
  spec.never_pages = (message.flags & client::kNeverPages) != 0;
  spec.may_claim = (message.flags & client::kClaimsNothing) == 0;
  spec.may_upgrade = (message.flags & client::kMayUpgrade) != 0;
  // Members of a group do not know what the others have.
  spec.least_bytes = claim.group == 0 ? message.least_bytes : 0;
  return spec;
}

// `runs`: the session reports to a new daemon that an iteration of it is under way. It then has the turn, unless
// another session has it already.
void SharedDevice::joined(Claim& claim, RemoteSession& session, bool was_there, bool runs, uint64_t now_ns) {
  Lease& lease = this->lease(session);
  lease.reset();
  lease.set({++epoch_of(session), LeaseState::kFree});
  carry_out_all();
  if (was_there) tell_terms(session, scheduler_.class_for_bytes(claim.id), 0);
  if (was_there && scheduler_.state(claim.id) == sched::SessionState::kResident && !claim.goes_out() &&
      claim.bytes != Claim::Bytes::kOut && claim.short_bytes == 0)
    tell(session, MessageType::kAdmit);
  if (runs && claim.lane != sched::kNoLane) {
    if (claim.leased())
      lease_to(session, claim.wanted_since_ns != 0 ? LeaseState::kWanted : LeaseState::kBusy, now_ns);
    else if (holders_[claim.lane] == nullptr) {
      session.turn = RemoteSession::Turn::kReady;
      grant(claim, claim.lane, now_ns);
    }
  }
  divide_weight(claim.limits.get(), now_ns);
  refresh_class(claim, now_ns);
}

base::Status SharedDevice::need(RemoteSession& session, const client::Need& message) {
  take_back_offers();
  Claim& claim = *session.claim;
  const uint64_t now_ns = base::host_now_ns();
  const uint64_t before_bytes = base::add_saturated(claim.persistent_bytes, claim.ephemeral_bytes);
  const uint64_t wanted_bytes = base::add_saturated(message.persistent_bytes, message.ephemeral_bytes);
  if (wanted_bytes > before_bytes) {
    GPUSHARE_RETURN_IF_ERROR(contexts_.leave_room(*session.process, session.name, wanted_bytes));
    GPUSHARE_RETURN_IF_ERROR(ranges_.may_grow(session, wanted_bytes - before_bytes, now_ns));
    GPUSHARE_RETURN_IF_ERROR(
        within(claim.limits.get(), &claim, session.name, wanted_bytes - before_bytes, now_ns));
  }
  carry_out_all();  // bytes that are given back are back before they are promised to another session
  const uint64_t before_p = claim.persistent_bytes, before_e = claim.ephemeral_bytes;
  base::Status set = set_need(claim, message.persistent_bytes, message.ephemeral_bytes, now_ns);
  carry_out_all();
  if (set.ok() && wanted_bytes > before_bytes) ranges_.grew(session, wanted_bytes - before_bytes);
  if (set.ok() && claim.short_bytes > 0) come_home(claim);
  if (set.ok() && claim.shares_lane && claim.lane != sched::kNoLane && !send_lane(claim)) {
    (void)set_need(claim, before_p, before_e, now_ns);
    set = {GPUSHARE_DEVICE_OUT_OF_MEMORY,
           "session '" + session.name + "': the device has no memory for its lane to grow"};
  }
  if (!set.ok() || wanted_bytes < before_bytes) {  // before the answer, so that its process finds it done
    owe_loans(claim.limits.get());
    (void)give_back(now_ns);
  }
  follow_limit(claim);
  return set;
}

base::Status SharedDevice::set_capacity(uint64_t bytes) {
  take_back_offers();
  return scheduler_.set_capacity(bytes == 0 ? capacity_bytes_ : bytes, base::host_now_ns());
}

void SharedDevice::set_ready(Claim& claim, bool ready) {
  if ((claim.turn == Claim::Turn::kReady) == ready) return;
  claim.turn = ready ? Claim::Turn::kReady : Claim::Turn::kNone;
  ready_ += ready ? 1 : static_cast<size_t>(-1);
}

void SharedDevice::announce(Claim& claim, uint64_t now_ns) {
  const bool waits = std::any_of(claim.members.begin(), claim.members.end(),
                                 [](const auto& member) { return member->ready(); });
  if (claim.leased() || !waits) return;
  if (claim.cap != nullptr && claim.cap->may_begin_ns(now_ns) > now_ns) {
    if (std::find(in_debt_.begin(), in_debt_.end(), &claim) == in_debt_.end()) in_debt_.push_back(&claim);
    return;
  }
  set_ready(claim, true);
  divide_weight(claim.limits.get(), now_ns);
  scheduler_.ready(claim.id, now_ns);
}

void SharedDevice::now_ready(RemoteSession& session, uint64_t now_ns) {
  Claim& claim = *session.claim;
  session.turn = RemoteSession::Turn::kReady;
  if (now_ns - claim.returned_ns <= kPatienceNs) claim.slow = false;
  if (claim.leased() && claim.wanted_since_ns == 0)
    lease_to(session, LeaseState::kBusy, now_ns);  // beside others of its group
  else
    announce(claim, now_ns);
}

void SharedDevice::not_ready(RemoteSession& session, uint64_t now_ns) {
  Claim& claim = *session.claim;
  if (session.ready()) session.turn = RemoteSession::Turn::kNone;
  if (std::any_of(claim.members.begin(), claim.members.end(),
                  [](const auto& member) { return member->ready(); }))
    return;
  std::erase(in_debt_, &claim);
  set_ready(claim, false);
  scheduler_.not_ready(claim.id, now_ns);
  if (!session.leased() && !session.overdue()) images_.let_go(session);
}

void tell(const RemoteSession& session, MessageType type, uint64_t value) {
  // If the process does not read, its socket is shut down; the service then closes the connection.
  if (!send_to(*session.process, client::bytes_of(client::make_session_message(type, session.number, value))))
    client::shut(session.process->socket);
}

void tell(const Claim& claim, MessageType type) {
  for (const auto& member : claim.members) tell(*member, type);
}

void SharedDevice::tell_terms(const RemoteSession& session, sched::SessionClass cls, uint64_t limit_bytes) {
  gates_.set_class(session.at_gates, guaranteed_at_gates(session), base::host_now_ns());
  tell_gates();
  tell(session, MessageType::kCountsAs, static_cast<uint64_t>(cls));
  tell(session, MessageType::kLimit, limit_bytes);
}

// Called when a program of a group comes, goes or tells its class. All programs of the group hear as what they count now.
void SharedDevice::refresh_class(Claim& claim, uint64_t now_ns) {
  if (!ranges_.refresh_class(claim, now_ns) || claim.group == 0) return;
  for (const auto& member : claim.members) tell_terms(*member, scheduler_.class_for_bytes(claim.id), 0);
}

void SharedDevice::carry_out(const sched::Action& action) {
  using sched::ActionKind;
  switch (action.kind) {
    case ActionKind::kOpenLane:
      if (holders_.size() <= action.lane) {
        holders_.resize(action.lane + 1);
        offers_.resize(action.lane + 1);
      }
      return size_lane(action.lane, scheduler_.lane_size(action.lane));
    case ActionKind::kResizeLane:  // with the present size, because a later decision may have lowered it
      return size_lane(action.lane, scheduler_.lane_size(action.lane));
    case ActionKind::kCloseLane:
      return size_lane(action.lane, 0);
    case ActionKind::kFillCache:
      return images_.fill(action.session);
    case ActionKind::kDropCache:
      return images_.drop(action.session);
    default:
      if (const auto found = claims_.find(action.session); found != claims_.end())
        carry_out(action, *found->second);
  }
}

void SharedDevice::carry_out(const sched::Action& action, Claim& claim) {
  using sched::ActionKind;
  switch (action.kind) {
    case ActionKind::kAdmit:
      claim.lane = action.lane;
      if (send_lane(claim))
        tell(claim, MessageType::kAdmit);
      else
        unplace(claim, base::host_now_ns());
      break;
    case ActionKind::kMove:  // the process's memory stays where it is
      claim.lane = action.lane;
      break;
    case ActionKind::kDrop:  // its process knows that it is spare
    case ActionKind::kPageOut:
      page_out(claim);
      break;
    case ActionKind::kPageIn:
      claim.lane = action.lane;
      page_in(claim, base::host_now_ns());
      break;
    case ActionKind::kTurnBack:
      tell(claim, MessageType::kTurnBack);
      break;
    case ActionKind::kTerms:
      claim.limit_bytes = action.bytes;
      for (const auto& member : claim.members)
        tell_terms(*member, action.cls, claim.group == 0 ? action.bytes : 0);
      break;
    default:
      break;
  }
}

bool SharedDevice::carry_out_all() {
  bool any = false;
  for (std::vector<sched::Action> actions = scheduler_.take_actions(); !actions.empty();
       actions = scheduler_.take_actions()) {
    tell_promised();  // before a process hears of its promise, because it may then read the page
    for (const sched::Action& action : actions) carry_out(action);
    any = true;
  }
  return any;
}

void SharedDevice::remove(RemoteSession& session) {
  take_back_offers();
  const uint64_t now_ns = base::host_now_ns();
  Process& process = *session.process;
  Claim& claim = *session.claim;
  if (session.ready()) session.turn = RemoteSession::Turn::kNone;
  lease(session).set({++epoch_of(session), LeaseState::kFree});
  if (session.leased()) member_done(session, now_ns);
  if (session.overdue()) set_overdue(session, false);
  images_.left(session);
  ranges_.close(session, /*leaves=*/true);
  give_up_room(session, now_ns);
  gates_.left(session.at_gates, now_ns);
  tell_gates();
  process.leases->used[session.slot] = false;
  process.sessions.erase(session.number);
  not_ready(session, now_ns);
  if (claim.members.size() > 1) {
    const bool pages = session.pages();
    std::erase_if(claim.members, [&](const auto& member) { return member.get() == &session; });
    if (pages) paged(claim, true, now_ns);
    refresh_class(claim, now_ns);
    return;
  }
  if (kernel_limits_ != nullptr) kernel_limits_->clear(claim.id);
  scheduler_.leave(claim.id, now_ns);
  room_step(claim.id);
  const std::shared_ptr<GroupLimits> limits = std::move(claim.limits);
  if (limits != nullptr) std::erase(limits->claims, &claim);
  std::erase(owed_, &claim);
  claims_.erase(claim.id);
  owe_loans(limits.get());
  divide_weight(limits.get(), now_ns);
}

void SharedDevice::disconnected(RemoteSession& session) {
  take_back_offers();
  const uint64_t now_ns = base::host_now_ns();
  not_ready(session, now_ns);
  ranges_.close(session, /*leaves=*/false);  // no process is left to answer
  gates_.left(session.at_gates, now_ns);
  tell_gates();
  give_up_room(session, now_ns);
  if (session.pages()) silent_.push_back(session.claim->id);
  if (session.leased()) (void)want_back(*session.claim, now_ns);
}

void SharedDevice::pump() {
  take_back_offers();
  // The service has a context of its own once it makes memory for others.
  contexts_.set_own(std::max(images_.context_bytes(), lanes_ == nullptr ? 0 : lanes_->context_bytes()));
  scheduler_.look(base::host_now_ns());
  read_lanes(base::host_now_ns());
  size_t gives = owed_.size() + 1;  // bounded: a page that lends is written by others, too
  for (bool moved = true; moved;) {
    moved = carry_out_all();
    moved = answer_for_silent() || moved;
    const uint64_t now_ns = base::host_now_ns();
    if (gives > 0 && give_back(now_ns)) {
      --gives;
      moved = true;
    }
    if (!std::exchange(contended_, contended()) &&
        contended_)  // a holder that was asked before has the whole lease from now on
      for (Claim* holder : holders_)
        if (holder != nullptr && holder->wanted_since_ns != 0) holder->wanted_since_ns = now_ns;
    room_drained(now_ns);
    std::vector<RemoteSession*> have_images;
    moved = images_.step(&have_images) || moved;
    for (const RemoteSession* session : have_images) {
      scheduler_.ready(session->claim->id, now_ns);
      moved = true;
    }
    for (sched::LaneId lane = 0; lane < holders_.size(); ++lane) moved = fill_lane(lane, now_ns) || moved;
  }
  for (const uint64_t victim : std::vector<uint64_t>(room_victims_))
    if (!claims_.contains(victim) && !scheduler_.cache_going(victim)) room_step(victim);
  tell_promised();
  make_offers();
}

bool SharedDevice::fill_lane(sched::LaneId lane, uint64_t now_ns) {
  bool moved = false;
  if (Claim* holder = holders_[lane];
      holder != nullptr && (contended() || capped(*holder) || retries(*holder) || outrun(*holder, now_ns)) &&
      !keeps(*holder, now_ns) && want_back(*holder, now_ns))
    moved = true;
  room_drained(now_ns);
  if (Claim* holder = holders_[lane]; holder != nullptr && holder->wanted_since_ns != 0)
    time_turn(*holder, now_ns);
  if (holders_[lane] != nullptr || !scheduler_.lane_is_open(lane)) return moved;
  const auto picked = scheduler_.pick(lane, now_ns);
  // A stay may have ended since look(). Then pick() has decided who goes, and picks no session.
  moved = carry_out_all() || moved;
  const auto found = picked ? claims_.find(*picked) : claims_.end();
  if (found == claims_.end()) return moved;
  if (RemoteSession& session = *found->second->members.front(); Images::lacks(session)) {
    scheduler_.not_ready(*picked, now_ns);  // others may go first meanwhile
    images_.ask(session);
  } else {
    grant(*found->second, lane, now_ns);
  }
  return true;
}

void SharedDevice::tell_promised() {
  const uint64_t promised = scheduler_.promised_bytes();
  const uint64_t capacity = scheduler_.capacity().target_bytes;
  std::erase_if(all_tables_, [&](const std::weak_ptr<LeaseTable>& each) {
    const std::shared_ptr<LeaseTable> table = each.lock();
    if (table != nullptr) table->page->set_promised(promised, capacity);
    return table == nullptr;
  });
}

void SharedDevice::tell_gates() {
  if (const bool watched = gates_.any(); std::exchange(gates_watched_, watched) != watched)
    for (const std::weak_ptr<LeaseTable>& each : all_tables_)
      if (const std::shared_ptr<LeaseTable> table = each.lock()) table->page->set_watched(watched);
  const bool asks = gates_.asks();
  if (std::exchange(gates_ask_, asks) == asks) return;
  for (const auto& [id, claim] : claims_)
    for (const auto& member : claim->members)
      if (gates_.has(member->at_gates)) tell(*member, MessageType::kGateAsks, asks ? 1 : 0);
}

void SharedDevice::kill_overdue(const Process& process) const {
  if (options_.kill_overdue && process.pidfd)
    (void)syscall(SYS_pidfd_send_signal, process.pidfd.get(), SIGKILL, nullptr, 0);
}

}  // namespace gpushare::daemon
