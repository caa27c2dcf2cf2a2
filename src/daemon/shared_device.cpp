// Turns and memory of one device that processes share.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstring>

#include <sys/syscall.h>
#include <unistd.h>

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

// How long a lease is good without a sign of the daemon, and how often it is renewed.
constexpr uint64_t kLeaseGoodNs = 2'000'000'000, kRenewNs = 500'000'000;
constexpr uint64_t kMostIterations = 1'000'000'000;  // that one reading of a lease believes

sched::SchedulerOptions scheduling(uint64_t capacity_bytes, uint32_t max_lanes) {
  sched::SchedulerOptions options;
  options.capacity_bytes = capacity_bytes;
  options.max_lanes = max_lanes;
  return options;
}

}  // namespace

SharedDevice::SharedDevice(std::string device, uint64_t capacity_bytes, const ServiceOptions& options,
                           std::unique_ptr<sched::Policy> policy)
    : name_(std::move(device)),
      capacity_bytes_(capacity_bytes),
      options_(options),
      scheduler_(scheduling(capacity_bytes, options.max_lanes), std::move(policy)) {}

base::Status SharedDevice::arrive(Process& process, const client::Arrive& message, uint32_t* out_slot) {
  if (message.session == 0 || process.sessions.contains(message.session))
    return {GPUSHARE_INVALID_ARGUMENT, "the session's number is 0 or in use"};
  if (message.cls > static_cast<uint32_t>(sched::SessionClass::kOpportunistic))
    return {GPUSHARE_INVALID_ARGUMENT, base::format("there is no session class %u", message.cls)};
  const auto free_slot = std::find(process.slots.begin(), process.slots.end(), false);
  if (free_slot == process.slots.end())
    return {GPUSHARE_QUEUE_FULL,
            base::format("this process has %zu sessions, as many as allowed", process.slots.size())};
  auto owned = std::make_unique<RemoteSession>();
  RemoteSession& session = *owned;
  session.id = next_id_++;
  session.number = message.session;
  session.process = &process;
  session.name = client::text_of(message.name);
  session.slot = static_cast<uint32_t>(free_slot - process.slots.begin());
  session.persistent_bytes = message.persistent_bytes;
  session.ephemeral_bytes = message.ephemeral_bytes;
  session.weight = message.weight;
  sched::SessionSpec spec;
  spec.id = session.id;
  spec.name = session.name;
  spec.cls = static_cast<sched::SessionClass>(message.cls);
  spec.priority = message.priority;
  spec.weight = message.weight;
  spec.persistent_bytes = base::add_saturated(message.persistent_bytes, message.ephemeral_bytes);
  spec.remaining_ns = message.remaining_ns;
  spec.iterations_total = message.iterations_total;
  spec.may_queue = (message.flags & client::kMayQueue) != 0;
  spec.may_page = (message.flags & client::kMayPage) != 0;
  const uint64_t now_ns = base::host_now_ns();
  GPUSHARE_RETURN_IF_ERROR(scheduler_.arrive(spec, now_ns));
  *free_slot = true;
  Lease& lease = process.page->lease(session.slot);
  lease.reset();
  lease.set({process.epochs[session.slot], LeaseState::kFree});
  process.sessions.emplace(session.number, &session);
  sessions_.emplace(session.id, std::move(owned));
  for (const sched::Action& action : scheduler_.take_actions()) carry_out(action);
  // A restarted daemon hears of an iteration under way: it has the turn, where nobody else has it already.
  if ((message.flags & client::kRunning) != 0 && session.lane != sched::kNoLane &&
      holders_[session.lane] == nullptr)
    grant(session, session.lane, now_ns);
  *out_slot = session.slot;
  return {};
}

base::Status SharedDevice::need(RemoteSession& session, const client::Need& message) {
  GPUSHARE_RETURN_IF_ERROR(
      scheduler_.set_need(session.id, base::add_saturated(message.persistent_bytes, message.ephemeral_bytes),
                          0, base::host_now_ns()));
  session.persistent_bytes = message.persistent_bytes;
  session.ephemeral_bytes = message.ephemeral_bytes;
  return {};
}

base::Status SharedDevice::make_room(RemoteSession& session, uint64_t bytes) {
  if (room_for_ != 0)
    return {GPUSHARE_DEVICE_OUT_OF_MEMORY, "room is being made for another session already"};
  const uint64_t now_ns = base::host_now_ns();
  // A session that keeps an idle lease counts as running for the scheduler, and would not be paged out.
  for (RemoteSession* holder : std::vector<RemoteSession*>(holders_))
    if (holder != nullptr && holder != &session && lease(*holder).look().state == LeaseState::kIdle)
      (void)want_back(*holder, now_ns);
  if (!scheduler_.make_room(session.id, bytes, now_ns))
    return {GPUSHARE_DEVICE_OUT_OF_MEMORY, "no session may be paged out for this one"};
  room_for_ = session.id;
  for (const sched::Action& action : scheduler_.take_actions()) {
    if (action.kind == sched::ActionKind::kPageOut) room_victims_.push_back(action.session);
    carry_out(action);
  }
  return {};
}

void SharedDevice::room_step(const RemoteSession& victim) {
  std::erase(room_victims_, victim.id);
  if (room_for_ == 0 || !room_victims_.empty()) return;
  const auto found = sessions_.find(room_for_);
  if (found != sessions_.end()) tell(*found->second, MessageType::kRoomMade);
  room_for_ = 0;
}

void SharedDevice::set_ready(RemoteSession& session, bool ready) {
  if (session.ready == ready) return;
  session.ready = ready;
  ready_ += ready ? 1 : static_cast<size_t>(-1);
}

void SharedDevice::handle(RemoteSession& session, MessageType type, uint64_t value) {
  const uint64_t now_ns = base::host_now_ns();
  switch (type) {
    case MessageType::kReady:
      if (session.leased) {  // it let the lease run out: it still has it
        lease(session).extend(now_ns + kLeaseGoodNs);
        tell(session, MessageType::kGranted);
      } else if (!session.overdue) {
        set_ready(session, true);
        scheduler_.ready(session.id, now_ns);
      }
      break;
    case MessageType::kNotReady:
      set_ready(session, false);
      scheduler_.not_ready(session.id, now_ns);
      break;
    case MessageType::kReturned: {
      const Lease::Word word = lease(session).look();
      if (session.leased && (word.epoch != session.epoch || word.state == LeaseState::kFree))
        turn_over(session, now_ns);
      session.overdue = false;
      if (value != 0 && !session.leased) {
        set_ready(session, true);
        scheduler_.ready(session.id, now_ns);
      }
      break;
    }
    case MessageType::kWake:
      scheduler_.wake(session.id, now_ns);
      break;
    case MessageType::kAllowPaging:
      scheduler_.allow_paging(session.id, now_ns);
      break;
    case MessageType::kLeave:
      remove(session);
      break;
    case MessageType::kUnplaced:
      session.lane = sched::kNoLane;
      session.paging = false;
      scheduler_.unplaced(session.id, now_ns);
      break;
    case MessageType::kPageDone:
      session.paging = false;
      scheduler_.page_done(session.id, now_ns);
      session.lane = scheduler_.lane_of(session.id);
      room_step(session);
      break;
    case MessageType::kPageOutFailed:
      session.paging = false;
      scheduler_.page_out_failed(session.id, now_ns);
      room_step(session);
      break;
    case MessageType::kRoomUsed:
      scheduler_.room_used(now_ns);
      break;
    case MessageType::kSetPriority:
      scheduler_.set_priority(session.id, static_cast<int32_t>(static_cast<int64_t>(value)), now_ns);
      break;
    case MessageType::kSetWeight: {
      double weight = 0;
      std::memcpy(&weight, &value, sizeof(weight));
      if (!std::isfinite(weight) || weight <= 0) break;
      session.weight = weight;
      scheduler_.set_weight(session.id, weight);
      break;
    }
    case MessageType::kSetRemaining:
      scheduler_.set_remaining(session.id, value, now_ns);
      break;
    default:
      break;
  }
}

void SharedDevice::tell(const RemoteSession& session, MessageType type) {
  // If the process does not read, its socket is shut down; the service then closes the connection.
  if (!send_to(*session.process, client::bytes_of(client::make_session_message(type, session.number))))
    client::shut(session.process->socket);
}

void SharedDevice::carry_out(const sched::Action& action) {
  if (action.kind == sched::ActionKind::kOpenLane) {
    if (holders_.size() <= action.lane) holders_.resize(action.lane + 1);
    return;
  }
  const auto found = sessions_.find(action.session);
  if (found == sessions_.end()) return;
  RemoteSession& session = *found->second;
  switch (action.kind) {
    case sched::ActionKind::kAdmit:
      session.lane = action.lane;
      tell(session, MessageType::kAdmit);
      break;
    case sched::ActionKind::kMove:  // the process's memory stays where it is
      session.lane = action.lane;
      break;
    case sched::ActionKind::kPageOut:
      session.paging = true;
      tell(session, MessageType::kPageOut);
      break;
    case sched::ActionKind::kPageIn:
      session.paging = true;
      session.lane = action.lane;
      tell(session, MessageType::kPageIn);
      break;
    default:
      break;  // lanes of turns hold no memory
  }
}

void SharedDevice::grant(RemoteSession& session, sched::LaneId lane, uint64_t now_ns) {
  set_ready(session, false);
  scheduler_.dispatched(session.id, lane, now_ns);
  session.lane = lane;  // pick may have moved it
  holders_[lane] = &session;
  session.leased = true;
  session.epoch = ++session.process->epochs[session.slot];
  session.granted_ns = now_ns;
  const bool contested = contended();
  session.wanted_since_ns = contested ? now_ns : 0;
  Lease& lease = this->lease(session);
  session.seen_service_ns = lease.service_ns();
  session.seen_iterations = lease.iterations();
  lease.extend(now_ns + kLeaseGoodNs);
  lease.set({session.epoch, contested ? LeaseState::kWanted : LeaseState::kBusy});
  ++turns_;
  tell(session, MessageType::kGranted);
}

bool SharedDevice::want_back(RemoteSession& session, uint64_t now_ns) {
  Lease& lease = this->lease(session);
  for (;;) {
    const Lease::Word word = lease.look();
    if (word.epoch != session.epoch || word.state == LeaseState::kFree) break;  // given back, or nonsense
    if (word.state == LeaseState::kWanted) return false;
    const bool idle = word.state == LeaseState::kIdle;
    if (!lease.change(word, idle ? LeaseState::kFree : LeaseState::kWanted)) continue;
    if (idle) break;
    session.wanted_since_ns = now_ns;
    tell(session, MessageType::kWanted);
    return false;
  }
  turn_over(session, now_ns);
  return true;
}

void SharedDevice::read_service(RemoteSession& session, uint64_t now_ns, bool gives_back) {
  const Lease& lease = this->lease(session);
  const uint64_t service_ns = lease.service_ns(), iterations = lease.iterations();
  const uint64_t held_ns = now_ns - std::min(now_ns, session.granted_ns);
  uint64_t spent_ns = service_ns - std::min(service_ns, session.seen_service_ns);
  const uint64_t count =
      std::min(iterations - std::min(iterations, session.seen_iterations), kMostIterations);
  spent_ns = std::min(spent_ns, held_ns);
  if (count == 0 && !gives_back) return;
  session.seen_service_ns = service_ns;
  session.seen_iterations = iterations;
  session.granted_ns = now_ns;
  service_ns_ += spent_ns;
  // In this order a session that keeps the turn has something in flight throughout: it changes no lane.
  if (!gives_back) scheduler_.dispatched(session.id, session.lane, now_ns);
  scheduler_.finished(session.id, spent_ns, now_ns, count);
}

void SharedDevice::turn_over(RemoteSession& session, uint64_t now_ns) {
  if (!session.leased) return;
  read_service(session, now_ns, true);
  session.leased = false;
  session.wanted_since_ns = 0;
  for (RemoteSession*& holder : holders_)
    if (holder == &session) holder = nullptr;
}

void SharedDevice::remove(RemoteSession& session) {
  const uint64_t now_ns = base::host_now_ns();
  Process& process = *session.process;
  lease(session).set({++process.epochs[session.slot], LeaseState::kFree});
  turn_over(session, now_ns);
  set_ready(session, false);
  process.slots[session.slot] = false;
  process.sessions.erase(session.number);
  scheduler_.leave(session.id, now_ns);
  if (room_for_ == session.id) {
    room_for_ = 0;
    room_victims_.clear();
    scheduler_.room_used(now_ns);
  } else {
    room_step(session);
  }
  sessions_.erase(session.id);
}

void SharedDevice::disconnected(RemoteSession& session) {
  const uint64_t now_ns = base::host_now_ns();
  set_ready(session, false);
  scheduler_.not_ready(session.id, now_ns);
  if (session.leased) (void)want_back(session, now_ns);
}

void SharedDevice::pump() {
  for (bool moved = true; moved;) {
    moved = false;
    for (const sched::Action& action : scheduler_.take_actions()) {
      carry_out(action);
      moved = true;
    }
    const uint64_t now_ns = base::host_now_ns();
    for (sched::LaneId lane = 0; lane < holders_.size(); ++lane) {
      if (holders_[lane] != nullptr && contended() && want_back(*holders_[lane], now_ns)) moved = true;
      if (holders_[lane] != nullptr || !scheduler_.lane_is_open(lane)) continue;
      const auto picked = scheduler_.pick(lane, now_ns);
      if (!picked) continue;
      const auto found = sessions_.find(*picked);
      if (found == sessions_.end()) continue;
      grant(*found->second, lane, now_ns);
      moved = true;
    }
  }
  const uint64_t promised = scheduler_.promised_bytes();
  const Process* last = nullptr;
  for (const auto& [id, session] : sessions_) {
    if (session->process != last) session->process->page->set_promised(promised);
    last = session->process;
  }
}

uint64_t SharedDevice::tick(uint64_t now_ns) {
  uint64_t next_ns = UINT64_MAX;
  if (const uint64_t look_ns = scheduler_.look_again_ns(); look_ns != sched::kUnknown)
    next_ns = look_ns - std::min(look_ns, now_ns);
  bool moved = false;
  for (RemoteSession* holder : holders_) {
    if (holder == nullptr) continue;
    RemoteSession& session = *holder;
    next_ns = std::min(next_ns, kRenewNs);
    if (session.wanted_since_ns == 0) {
      lease(session).extend(now_ns + kLeaseGoodNs);
      read_service(session, now_ns, false);
      continue;
    }
    const uint64_t ends_ns = base::add_saturated(session.wanted_since_ns, options_.lease_ns);
    if (now_ns < ends_ns) {
      next_ns = std::min(next_ns, ends_ns - now_ns);
      continue;
    }
    base::log(
        base::kWarning,
        base::format("daemon: session '%s' of process %d has had the turn for %s while others waited: it is "
                     "taken back",
                     session.name.c_str(), session.process->peer.pid,
                     base::format_duration_ns(now_ns - session.wanted_since_ns).c_str()));
    ++cut_off_;
    lease(session).set({++session.process->epochs[session.slot], LeaseState::kFree});
    turn_over(session, now_ns);
    session.overdue = true;
    if (options_.kill_overdue && session.process->pidfd)
      (void)syscall(SYS_pidfd_send_signal, session.process->pidfd.get(), SIGKILL, nullptr, 0);
    moved = true;
  }
  if (moved) {
    pump();
    return 0;
  }
  return next_ns;
}

client::DeviceStatus SharedDevice::status() const {
  client::DeviceStatus out;
  out.device = name_;
  out.policy = scheduler_.policy_name();
  const sched::Limit capacity = scheduler_.capacity();
  out.capacity_bytes = capacity.target_bytes;
  out.effective_capacity_bytes = capacity.effective_bytes;
  out.promised_bytes = scheduler_.promised_bytes();
  out.lanes = scheduler_.lanes_open();
  out.resident = scheduler_.residents();
  out.waiting = scheduler_.waiting();
  out.turns = turns_;
  out.cut_off = cut_off_;
  return out;
}

client::SessionStatus SharedDevice::status_of(const RemoteSession& session) const {
  client::SessionStatus out;
  const sched::SessionView view = scheduler_.view(session.id);
  out.pid = static_cast<uint64_t>(session.process->peer.pid);
  out.session = session.number;
  out.name = session.name;
  out.device = name_;
  out.lane = session.lane == sched::kNoLane ? UINT64_MAX : session.lane;
  out.persistent_bytes = session.persistent_bytes;
  out.ephemeral_bytes = session.ephemeral_bytes;
  out.service_ns = view.service_ns;
  out.iterations = view.iterations_done;
  out.weight = view.weight;
  out.priority = view.priority;
  out.share = service_ns_ == 0 ? 0 : static_cast<double>(view.service_ns) / static_cast<double>(service_ns_);
  const RemoteSession* holder =
      session.lane < holders_.size() && holders_[session.lane] != &session ? holders_[session.lane] : nullptr;
  if (session.overdue) {
    out.state = "overdue";
    out.waits_for = "its own iteration, which exceeded the lease";
  } else if (session.paging) {
    out.state = "paging";
  } else if (session.leased) {
    out.state = lease(session).look().state == LeaseState::kIdle ? "idle" : "turn";
  } else if (scheduler_.state(session.id) == sched::SessionState::kQueued) {
    out.state = "queued";
    out.waits_for = base::format(
        "memory: needs %s, %s can be promised",
        base::format_bytes(base::add_saturated(session.persistent_bytes, session.ephemeral_bytes)).c_str(),
        base::format_bytes(capacity_bytes_ - std::min(capacity_bytes_, scheduler_.promised_bytes())).c_str());
  } else if (scheduler_.state(session.id) == sched::SessionState::kPagedOut) {
    out.state = "paged_out";
    if (session.ready) out.waits_for = "memory, to be paged in";
  } else if (session.ready) {
    out.state = "ready";
    if (holder != nullptr)
      out.waits_for = base::format("the turn, which '%s' of process %d has", holder->name.c_str(),
                                   holder->process->peer.pid);
  } else {
    out.state = "resting";
  }
  return out;
}

std::string SharedDevice::check() const {
  if (std::string wrong = scheduler_.check(); !wrong.empty()) return wrong;
  size_t ready = 0;
  for (const auto& [id, session] : sessions_) {
    ready += session->ready ? 1 : 0;
    const bool holds = std::find(holders_.begin(), holders_.end(), session.get()) != holders_.end();
    if (holds != session->leased) return "session '" + session->name + "' and its lane disagree on the turn";
  }
  return ready == ready_ ? std::string() : "sessions that are ready are miscounted";
}

}  // namespace gpushare::daemon
