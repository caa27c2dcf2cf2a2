// SPDX-License-Identifier: Apache-2.0
#include "client/remote_authority.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <system_error>
#include <utility>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "base/saturate.hpp"
#include "base/units.hpp"

namespace gpushare::client {

using sched::Action;
using sched::ActionKind;
using sched::kNoLane;
using sched::LaneId;
using sched::SessionId;
using sched::SessionSpec;
using sched::SessionState;
using sched::SessionView;

namespace {

constexpr uint64_t kAnswerNs = 10'000'000'000;  // a daemon that does not answer for so long is taken for gone
constexpr int kSendMs = 1000;
constexpr uint64_t kReconnectNs = 100'000'000;

base::Status not_known() {
  return {GPUSHARE_NOT_FOUND, "no such session"};
}

base::Status daemon_gone(const std::string& socket, const base::Status& why) {
  return {GPUSHARE_UNAVAILABLE,
          "the daemon at " + socket + " has gone (" + why.message() +
              "); sessions keep their memory, and go on when a daemon serves there again",
          why.native_code()};
}

constexpr uint16_t kImagesMinor = 3;  // since when daemons share images
constexpr uint16_t kRangesMinor = 5;  // since when they ask ranges of other processes
constexpr uint16_t kLimitsMinor = 5;  // since when daemons hold the limits of groups of processes

Descriptor duplicate(const Descriptor& descriptor) {
  return Descriptor(fcntl(descriptor.get(), F_DUPFD_CLOEXEC, 0));
}

std::string program_name() {
  return program_invocation_short_name;
}

}  // namespace

std::string default_socket() {
  if (const char* named = std::getenv("GPUSHARE_SOCKET"); named != nullptr && *named != '\0') return named;
  if (const char* folder = std::getenv("XDG_RUNTIME_DIR"); folder != nullptr && *folder != '\0') {
    std::string path = std::string(folder) + "/gpushare/daemon.sock";
    struct stat there {};
    if (stat(path.c_str(), &there) == 0) return path;
  }
  return "/run/gpushare/daemon.sock";
}

// ---- the connection -------------------------------------------------------------------------------------------

base::Result<std::shared_ptr<RemoteAuthority::Connection>> RemoteAuthority::connect(
    const RemoteOptions& options, uint64_t instance) {
  auto connection = std::make_shared<Connection>();
  GPUSHARE_ASSIGN_OR_RETURN(connection->socket, connect_to(options.socket));
  auto hello = make_message<Hello>(MessageType::kHello);
  hello.instance = instance;
  hello.flags = kPassesTurns;
  if (options.device.size() >= sizeof(hello.device))
    return base::Status(GPUSHARE_INVALID_ARGUMENT, "the name of the device is too long");
  put_text(hello.device, options.device);
  put_text(hello.program, program_name());
  GPUSHARE_RETURN_IF_ERROR(send_message(connection->socket.get(), bytes_of(hello)));
  const base::Deadline deadline = base::Deadline::after(kAnswerNs);
  std::vector<std::byte> buffer(4096);
  std::vector<Descriptor> descriptors;
  for (;;) {
    const base::Status there = wait_readable(connection->socket.get(), deadline);
    if (there.code() == GPUSHARE_TIMED_OUT)
      return base::Status(GPUSHARE_UNAVAILABLE, "the daemon at " + options.socket + " does not answer");
    GPUSHARE_RETURN_IF_ERROR(there);
    const auto message = receive_message(connection->socket.get(), buffer, &descriptors);
    if (message.status().code() == GPUSHARE_NOT_READY) continue;
    if (!message.ok()) return message.status();
    GPUSHARE_ASSIGN_OR_RETURN(const MessageType type, check_message(*message));
    if (type != MessageType::kWelcome)
      return base::Status(GPUSHARE_MALFORMED_INPUT, "the daemon answers with something else than a Welcome");
    connection->welcome = fields_of<Welcome>(*message);
    break;
  }
  const Welcome& welcome = connection->welcome;
  GPUSHARE_RETURN_IF_ERROR(reported(welcome.code, text_of(welcome.text)));
  if (descriptors.size() != 1 || welcome.slots == 0 || welcome.slots > kSharedLeaseSlots)
    return base::Status(GPUSHARE_MALFORMED_INPUT, "the daemon sent no page of leases");
  GPUSHARE_ASSIGN_OR_RETURN(connection->page, LeasePage::open(std::move(descriptors.front()), welcome.slots));
  return connection;
}

base::Result<std::unique_ptr<RemoteAuthority>> RemoteAuthority::open(RemoteOptions options) {
  std::unique_ptr<RemoteAuthority> authority(new RemoteAuthority(std::move(options)));
  std::random_device random;
  authority->instance_ = static_cast<uint64_t>(random()) << 32 | random();
  GPUSHARE_ASSIGN_OR_RETURN(authority->connection_, connect(authority->options_, authority->instance_));
  const Welcome& welcome = authority->connection_->welcome;
  authority->device_ = text_of(welcome.device);
  authority->policy_ = text_of(welcome.policy);
  authority->capacity_bytes_ = welcome.capacity_bytes;
  authority->poke_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!authority->poke_) return base::Status(GPUSHARE_IO_ERROR, "eventfd", errno);
  authority->listening_ = authority->connection_;
  if (welcome.minor >= kImagesMinor) authority->images_->connected(duplicate(authority->connection_->socket));
  return authority;
}

void RemoteAuthority::set_on_change(std::function<void()> changed) {
  changed_ = std::move(changed);
  thread_ = base::ServiceThread([this] { listen(); });
}

void RemoteAuthority::stop() {
  stop_.store(true);
  poke();
  if (thread_.joinable()) thread_.join();
}

RemoteAuthority::~RemoteAuthority() {
  stop();
  images_->connected({});  // which holds the connection open as long as it lives
}

void RemoteAuthority::poke() const {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(poke_.get(), &one, sizeof(one));
}

base::Result<bool> RemoteAuthority::drain(Connection& connection) {
  // One reader at a time: the listening thread, or a call that waits for its reply.
  base::MutexLock lock(inbox_mutex_);
  std::byte buffer[kMaxMessageBytes + 64];
  bool any = false;
  for (;;) {
    std::vector<Descriptor> descriptors;
    const auto message = receive_message(connection.socket.get(), buffer, &descriptors);
    if (message.status().code() == GPUSHARE_NOT_READY) break;
    base::Status failed = message.status();
    if (failed.ok()) {
      const auto type = check_message(*message);
      failed = type.status();
      if (type.ok() && *type == MessageType::kReply) {
        reply_ = fields_of<Reply>(*message);
        reply_came_.notify_all();
        continue;
      }
      if (type.ok() && images_->take(*type, *message, &descriptors)) {
        any = true;
        continue;
      }
      if (type.ok()) {
        const auto about = fields_of<SessionMessage>(*message);
        events_.push_back({*type, about.session, about.value});
        any = true;
        continue;
      }
    }
    if (lost_.ok()) lost_ = daemon_gone(options_.socket, failed);
    inbox_full_.store(true);
    return lost_;
  }
  if (any) inbox_full_.store(true);
  return any;
}

void RemoteAuthority::listen() {
  const auto tell_driver = [this] {
    try {
      changed_();
    } catch (const std::exception& error) {
      base::log(base::kError, std::string("the daemon's news could not be taken up: ") + error.what());
    }
  };
  while (!stop_.load()) {
    if (listening_ == nullptr) {
      pollfd wait{poke_.get(), POLLIN, 0};
      (void)poll(&wait, 1, static_cast<int>(kReconnectNs / 1'000'000));
      uint64_t drained = 0;
      [[maybe_unused]] const ssize_t got = read(poke_.get(), &drained, sizeof(drained));
      if (stop_.load()) return;
      auto connected = connect(options_, instance_);
      if (!connected.ok()) continue;
      if (text_of((*connected)->welcome.device) != device_ ||
          (*connected)->welcome.capacity_bytes != capacity_bytes_)
        base::log(base::kWarning, "the new daemon at " + options_.socket + " serves the device otherwise");
      listening_ = std::move(*connected);
      if (listening_->welcome.minor >= kImagesMinor) images_->connected(duplicate(listening_->socket));
      {
        base::MutexLock lock(inbox_mutex_);
        fresh_ = listening_;
        inbox_full_.store(true);
      }
      tell_driver();
    }
    pollfd wait[2] = {{listening_->socket.get(), POLLIN, 0}, {poke_.get(), POLLIN, 0}};
    if (poll(wait, 2, -1) < 0 && errno != EINTR) return;
    if (stop_.load()) return;
    bool news = false;
    if (wait[1].revents != 0) {
      uint64_t drained = 0;
      [[maybe_unused]] const ssize_t got = read(poke_.get(), &drained, sizeof(drained));
      news = true;
    }
    if (wait[0].revents != 0) {
      const auto any = drain(*listening_);
      news = news || !any.ok() || *any;
      if (!any.ok()) {
        images_->lost(any.status());
        listening_.reset();
      }
    }
    images_->deliver();
    if (news) tell_driver();
  }
}

void RemoteAuthority::send(std::span<const std::byte> message) {
  if (!gone_.ok()) return;
  for (;;) {
    const base::Status sent = send_message(connection_->socket.get(), message);
    if (sent.ok()) return;
    if (sent.code() == GPUSHARE_QUEUE_FULL) {
      pollfd wait{connection_->socket.get(), POLLOUT, 0};
      if (poll(&wait, 1, kSendMs) > 0) continue;
    }
    lose(daemon_gone(options_.socket, sent));
    return;
  }
}

void RemoteAuthority::tell(MessageType type, const Record& record, uint64_t value) {
  if (record.declared) send(bytes_of(make_session_message(type, record.spec.id, value)));
}

base::Result<Reply> RemoteAuthority::call(std::span<const std::byte> request, uint32_t sequence) {
  if (!gone_.ok()) return gone_;
  {
    base::MutexLock lock(inbox_mutex_);
    reply_.reset();
  }
  send(request);
  if (!gone_.ok()) return gone_;
  const base::Deadline deadline = base::Deadline::after(kAnswerNs);
  bool events = false;
  for (;;) {
    const auto any = drain(*connection_);
    if (!any.ok()) {
      lose(any.status());
      break;
    }
    events = events || *any;
    {
      base::MutexLock lock(inbox_mutex_);
      // The listening thread brings the reply, unless it waits for the driver itself: then this one reads again.
      if (!reply_ || reply_->header.sequence != sequence)
        (void)reply_came_.wait_until(inbox_mutex_,
                                     std::chrono::steady_clock::now() + std::chrono::microseconds(100));
      if (reply_ && reply_->header.sequence == sequence) {
        const Reply reply = *reply_;
        reply_.reset();
        lock.unlock();
        if (events) poke();
        return reply;
      }
    }
    if (deadline.passed()) {
      lose(daemon_gone(options_.socket, {GPUSHARE_TIMED_OUT, "it does not answer"}));
      break;
    }
  }
  poke();
  return gone_;
}

// The connection is gone, or of no use: nothing is sent any more. The listening thread finds it closed and reconnects.
void RemoteAuthority::lose(base::Status why) {
  if (!gone_.ok()) return;
  gone_ = std::move(why);
  base::log(base::kWarning, gone_.message());
  shut(connection_->socket);
  for (auto& [id, record] : sessions_) {
    record->asked = record->room_pending = record->declared = record->declared_anew = false;
    record->returned = false;
  }
}

void RemoteAuthority::adopt(std::shared_ptr<Connection> connection) {
  connection_ = std::move(connection);
  gone_ = {};
  policy_ = text_of(connection_->welcome.policy);
  std::vector<Record*> all;
  for (auto& [id, record] : sessions_) {
    record->epoch = 0;
    if (!record->left) all.push_back(record.get());
  }
  std::sort(all.begin(), all.end(), [](const Record* a, const Record* b) { return a->spec.id < b->spec.id; });
  // Those that hold memory first.
  for (Record* record : all) {
    if (record->lane == kNoLane || record->closing != Closing::kNone || record->move == Move::kOut) continue;
    const base::Status declared = declare(*record, false);
    if (!gone_.ok()) return;
    if (declared.ok()) {
      record->declared_anew = true;
      if (record->in_flight > 0) record->epoch = lease(*record).look().epoch;
      continue;
    }
    base::log(
        base::kWarning,
        declared.with_context("session '" + record->spec.name + "' gives its device memory back and waits")
            .to_string());
    if (record->in_flight == 0)
      start_page_out(*record);
    else
      record->evict = true;
  }
  for (Record* record : all) {
    if (record->lane == kNoLane && record->move == Move::kNone)
      if (const base::Status declared = declare(*record, true); !declared.ok())
        base::log(base::kError, declared.with_context("session '" + record->spec.name + "'").to_string());
    if (!gone_.ok()) return;
    mark(*record);
  }
}

base::Status RemoteAuthority::declare(Record& record, bool may_queue) {
  const SessionSpec& spec = record.spec;
  const uint32_t sequence = next_sequence_++;
  auto message = make_message<Arrive>(MessageType::kArrive, sequence);
  message.session = spec.id;
  message.persistent_bytes = spec.persistent_bytes;
  message.ephemeral_bytes = std::max(spec.ephemeral_bytes, record.told_ephemeral_bytes);
  message.remaining_ns = spec.remaining_ns;
  message.iterations_total = spec.iterations_total;
  message.weight = spec.weight;
  message.priority = spec.priority;
  message.cls = static_cast<uint32_t>(spec.cls);
  message.flags = (may_queue ? kMayQueue : 0) | (spec.may_page ? kMayPage : 0) |
                  (record.in_flight > 0 ? kRunning : 0) | (spec.may_claim ? 0 : kClaimsNothing);
  if (options_.group != 0 && connection_->welcome.minor >= kLimitsMinor) {
    message.flags |= kOwnClaim | (record.known_before ? kKnownBefore : 0);
    message.group = options_.group;
    if (options_.group_memory_bytes > 0)
      message.group_memory_bytes = sched::quota_in_granules(options_.group_memory_bytes, granularity_bytes_);
    message.group_weight = options_.group_weight;
  }
  put_text(message.name, spec.name);
  GPUSHARE_ASSIGN_OR_RETURN(const Reply reply, call(bytes_of(message), sequence));
  GPUSHARE_RETURN_IF_ERROR(reported(reply.code, text_of(reply.text)));
  if (reply.value >= connection_->welcome.slots) {
    lose(daemon_gone(options_.socket, {GPUSHARE_MALFORMED_INPUT, "it names a lease that is not there"}));
    return gone_;
  }
  record.slot = reply.value;
  record.told_ephemeral_bytes = message.ephemeral_bytes;
  record.declared = record.known_before = true;
  if (record.worth_ns) tell_worth(record);
  if (record.range_answer_ns > 0) tell_ranges(record);
  return {};
}

// ---- what the driver tells ------------------------------------------------------------------------------------

RemoteAuthority::Record* RemoteAuthority::find(SessionId session) {
  const auto found = sessions_.find(session);
  return found == sessions_.end() || found->second->left ? nullptr : found->second.get();
}

const RemoteAuthority::Record* RemoteAuthority::find(SessionId session) const {
  const auto found = sessions_.find(session);
  return found == sessions_.end() || found->second->left ? nullptr : found->second.get();
}

uint64_t RemoteAuthority::rounded(uint64_t bytes) const {
  const uint64_t rest = bytes % granularity_bytes_;
  return rest == 0 ? bytes : base::add_saturated(bytes, granularity_bytes_ - rest);
}

base::Status RemoteAuthority::arrive(const SessionSpec& spec, uint64_t) {
  GPUSHARE_RETURN_IF_ERROR(gone_);
  if (spec.compute_units > 0)
    return {GPUSHARE_UNSUPPORTED,
            "session '" + spec.name +
                "': sessions of a shared device have no compute units of their own: leave "
                "compute_units 0"};
  auto record = std::make_unique<Record>();
  record->spec = spec;
  record->spec.persistent_bytes = rounded(spec.persistent_bytes);
  record->spec.ephemeral_bytes = rounded(spec.ephemeral_bytes);
  GPUSHARE_RETURN_IF_ERROR(declare(*record, spec.may_queue));
  sessions_.emplace(spec.id, std::move(record));
  return {};
}

void RemoteAuthority::mark(Record& record) {
  if (record.dirty) return;
  record.dirty = true;
  dirty_.push_back(&record);
}

void RemoteAuthority::ready(SessionId session, uint64_t) {
  Record* record = find(session);
  if (record == nullptr || record->ready) return;
  record->ready = true;
  if (!record->dropping) record->worth_ns.reset();  // as the daemon's scheduler does
  // With the turn in hand there is nothing to ask for: pick() looks again.
  if (record->epoch == 0 || record->state != SessionState::kResident) mark(*record);
}

void RemoteAuthority::not_ready(SessionId session, uint64_t) {
  Record* record = find(session);
  if (record == nullptr || !record->ready) return;
  record->ready = false;
  if (record->asked) tell(MessageType::kNotReady, *record);
  record->asked = false;
  accept_unwanted(*record);
}

// A turn came for an iteration that is not there any more.
void RemoteAuthority::accept_unwanted(Record& record) {
  if (record.ready || record.in_flight > 0 || !record.declared || !gone_.ok()) return;
  const Lease::Word now = lease(record).look();
  if (now.epoch == record.epoch || now.state == LeaseState::kFree || now.state == LeaseState::kIdle) return;
  record.epoch = now.epoch;
  record.asked = false;
  give_back(record);
}

void RemoteAuthority::wake(SessionId session, uint64_t) {
  if (const Record* record = find(session)) tell(MessageType::kWake, *record);
}

void RemoteAuthority::allow_paging(SessionId session, uint64_t) {
  Record* record = find(session);
  if (record == nullptr) return;
  record->spec.may_page = true;
  tell(MessageType::kAllowPaging, *record);
}

void RemoteAuthority::dispatched(SessionId session, LaneId, uint64_t, uint64_t) {
  Record* record = find(session);
  if (record == nullptr) return;
  record->ready = false;
  ++record->in_flight;
  if (record->declared) lease(*record).set_looks(true);
}

void RemoteAuthority::finished(SessionId session, uint64_t device_ns, uint64_t, uint64_t iterations) {
  Record* record = find(session);
  if (record == nullptr || record->in_flight == 0) return;
  --record->in_flight;
  if (record->declared) lease(*record).account(device_ns, iterations);
  if (record->in_flight > 0) return;
  if (record->evict) {
    record->evict = false;
    start_page_out(*record);
  }
  if (record->declared) give_back(*record);
}

// Nothing is in flight. Without others that want it the turn stays for the next iteration.
void RemoteAuthority::give_back(Record& record) {
  Lease& mine = lease(record);
  for (;;) {
    const Lease::Word now = mine.look();
    if (now.epoch != record.epoch || now.state == LeaseState::kFree) break;  // it was taken away
    if (now.state == LeaseState::kIdle) return;
    const bool wanted = now.state == LeaseState::kWanted;
    if (!mine.change(now, wanted ? LeaseState::kFree : LeaseState::kIdle)) continue;
    if (!wanted) return;
    connection_->page->pass_on(mine);
    break;
  }
  record.epoch = 0;
  record.returned = true;
  mark(record);
}

void RemoteAuthority::leave(SessionId session, uint64_t) {
  Record* record = find(session);
  if (record == nullptr) return;
  record->left = true;
  record->ready = false;
  std::erase_if(actions_, [session](const Action& action) { return action.session == session; });
  if (record->lane != kNoLane) {
    close_lane(*record, Closing::kLeave);
    return;
  }
  tell(MessageType::kLeave, *record);
  std::erase(dirty_, record);
  sessions_.erase(session);
}

base::Status RemoteAuthority::set_need(SessionId session, uint64_t persistent_bytes, uint64_t ephemeral_bytes,
                                       uint64_t) {
  Record* record = find(session);
  if (record == nullptr) return not_known();
  GPUSHARE_RETURN_IF_ERROR(gone_);
  persistent_bytes = rounded(persistent_bytes);
  ephemeral_bytes = rounded(ephemeral_bytes);
  const uint64_t need = base::add_saturated(persistent_bytes, ephemeral_bytes);
  if (need > base::add_saturated(record->spec.persistent_bytes, record->spec.ephemeral_bytes) &&
      need > sched::quota_in_granules(record->spec.quota_bytes, granularity_bytes_))
    return {GPUSHARE_QUOTA_EXCEEDED, "session '" + record->spec.name + "' would need " +
                                         base::format_bytes(need) + "; its quota is " +
                                         base::format_bytes(record->spec.quota_bytes)};
  // A lane that shrinks is counted as it was until its memory is back.
  const uint64_t told =
      record->lane == kNoLane ? ephemeral_bytes : std::max(ephemeral_bytes, record->told_ephemeral_bytes);
  if (persistent_bytes != record->spec.persistent_bytes || told != record->told_ephemeral_bytes) {
    const uint32_t sequence = next_sequence_++;
    auto message = make_message<Need>(MessageType::kNeed, sequence);
    message.session = session;
    message.persistent_bytes = persistent_bytes;
    message.ephemeral_bytes = told;
    GPUSHARE_ASSIGN_OR_RETURN(const Reply reply, call(bytes_of(message), sequence));
    GPUSHARE_RETURN_IF_ERROR(reported(reply.code, text_of(reply.text)));
  }
  record->told_ephemeral_bytes = told;
  record->spec.persistent_bytes = persistent_bytes;
  const bool resize = record->spec.ephemeral_bytes != ephemeral_bytes;
  record->spec.ephemeral_bytes = ephemeral_bytes;
  if (resize && record->lane != kNoLane && record->closing == Closing::kNone)
    actions_.push_back({ActionKind::kResizeLane, record->lane, sched::kNoSession, ephemeral_bytes});
  return {};
}

base::Status RemoteAuthority::set_capacity(uint64_t, uint64_t) {
  return {GPUSHARE_UNSUPPORTED,
          "the capacity of a shared device is its operator's choice (gpushare daemon --set-capacity SIZE)"};
}

// The process's own affair: the daemon is not asked for more.
void RemoteAuthority::set_quota(SessionId session, uint64_t bytes) {
  if (Record* record = find(session)) record->spec.quota_bytes = bytes;
}

void RemoteAuthority::set_priority(SessionId session, int32_t priority, uint64_t) {
  Record* record = find(session);
  if (record == nullptr) return;
  record->spec.priority = priority;
  tell(MessageType::kSetPriority, *record, static_cast<uint64_t>(static_cast<int64_t>(priority)));
}

void RemoteAuthority::set_class(SessionId session, sched::SessionClass cls, uint64_t) {
  Record* record = find(session);
  if (record == nullptr || record->spec.cls == cls) return;
  record->spec.cls = cls;
  if (connection_->welcome.minor >= 2)  // else once it is declared anew
    tell(MessageType::kSetClass, *record, static_cast<uint64_t>(cls));
}

void RemoteAuthority::set_weight(SessionId session, double weight) {
  Record* record = find(session);
  if (record == nullptr) return;
  record->spec.weight = weight;
  uint64_t bits = 0;
  std::memcpy(&bits, &weight, sizeof(bits));
  tell(MessageType::kSetWeight, *record, bits);
}

void RemoteAuthority::set_remaining(SessionId session, uint64_t remaining_ns, uint64_t) {
  Record* record = find(session);
  if (record == nullptr) return;
  record->spec.remaining_ns = remaining_ns;
  tell(MessageType::kSetRemaining, *record, remaining_ns);
}

bool RemoteAuthority::set_spare(SessionId session, std::optional<double> worth_ns, uint64_t) {
  Record* record = find(session);
  if (record == nullptr || record->dropping) return false;
  if (!worth_ns && !record->worth_ns) return true;
  record->worth_ns = worth_ns;
  if (record->declared) tell_worth(*record);
  return true;
}

void RemoteAuthority::tell_worth(const Record& record) {
  if (connection_->welcome.minor < 4) return;  // such a daemon pages it out
  const double worth_ns = record.worth_ns.value_or(-1);
  uint64_t bits = 0;
  std::memcpy(&bits, &worth_ns, sizeof(bits));
  tell(MessageType::kSetSpare, record, bits);
}

std::vector<SessionId> RemoteAuthority::dropping() const {
  std::vector<SessionId> out;
  for (const auto& [id, record] : sessions_)
    if (record->dropping) out.push_back(id);
  return out;
}

void RemoteAuthority::set_link(double ns_per_byte) {
  if (!std::isfinite(ns_per_byte) || ns_per_byte <= 0) return;
  link_ns_per_byte_ = ns_per_byte;
  const auto declared = std::find_if(sessions_.begin(), sessions_.end(),
                                     [](const auto& each) { return each.second->declared; });
  if (declared == sessions_.end() || connection_->welcome.minor < 4) return;
  uint64_t bits = 0;
  std::memcpy(&bits, &ns_per_byte, sizeof(bits));
  tell(MessageType::kSetLink, *declared->second, bits);
}

void RemoteAuthority::unplaced(SessionId session, uint64_t) {
  Record* record = find(session);
  if (record == nullptr || record->lane == kNoLane || record->closing != Closing::kNone) return;
  record->state = record->move == Move::kIn ? SessionState::kPagedOut : SessionState::kQueued;
  record->move = Move::kNone;
  close_lane(*record, Closing::kUnplaced);
}

void RemoteAuthority::page_done(SessionId session, uint64_t) {
  Record* record = find(session);
  if (record == nullptr) return;
  const Move move = std::exchange(record->move, Move::kNone);
  if (move == Move::kIn) {
    record->state = SessionState::kResident;
    tell(MessageType::kPageDone, *record);
    if (record->ready) mark(*record);
  } else if (move == Move::kOut) {
    close_lane(*record, Closing::kPagedOut);
  }
}

void RemoteAuthority::page_out_failed(SessionId session, uint64_t) {
  Record* record = find(session);
  if (record == nullptr || record->move != Move::kOut) return;
  record->move = Move::kNone;
  record->state = SessionState::kResident;
  tell(MessageType::kPageOutFailed, *record);
  if (record->ready) mark(*record);
}

bool RemoteAuthority::make_room(SessionId session, uint64_t bytes, uint64_t) {
  Record* record = find(session);
  if (record == nullptr || !record->declared) return false;
  const uint32_t sequence = next_sequence_++;
  const auto reply =
      call(bytes_of(make_session_message(MessageType::kRoom, session, bytes, sequence)), sequence);
  if (!reply.ok() || reply->code != GPUSHARE_OK) return false;
  record->room_pending = true;
  last_room_session_ = session;
  return true;
}

bool RemoteAuthority::making_room(SessionId session) const {
  const Record* record = find(session);
  return record != nullptr && record->room_pending;
}

void RemoteAuthority::set_ranges(SessionId session, uint64_t bytes, uint64_t answer_ns,
                                 double price_ns_per_byte) {
  Record* record = find(session);
  if (record == nullptr || (record->range_bytes == bytes && record->range_answer_ns == answer_ns)) return;
  record->range_bytes = bytes;
  record->range_answer_ns = answer_ns;
  record->range_price = price_ns_per_byte;
  if (record->declared) tell_ranges(*record);
}

void RemoteAuthority::tell_ranges(const Record& record) {
  if (connection_->welcome.minor < kRangesMinor) return;  // such a daemon asks nobody
  auto message = make_message<RangeHas>(MessageType::kRangeHas);
  message.session = record.spec.id;
  message.bytes = record.range_bytes;
  message.answer_ns = record.range_answer_ns;
  message.price_ns_per_byte = record.range_price;
  send(bytes_of(message));
}

bool RemoteAuthority::ask_ranges(SessionId session, uint64_t bytes, std::string* out_silent) {
  Record* record = find(session);
  if (record == nullptr || !record->declared || connection_->welcome.minor < kRangesMinor) return false;
  if (bytes == 0) {
    tell(MessageType::kRangeAsk, *record);
    return false;
  }
  const uint32_t sequence = next_sequence_++;
  const auto reply =
      call(bytes_of(make_session_message(MessageType::kRangeAsk, session, bytes, sequence)), sequence);
  if (!reply.ok() || reply->code != GPUSHARE_OK) return false;
  *out_silent = text_of(reply->text);
  return reply->value != 0;
}

void RemoteAuthority::answer_ranges(SessionId session, uint64_t bytes) {
  if (const Record* record = find(session); record != nullptr && connection_->welcome.minor >= kRangesMinor)
    tell(MessageType::kRangeAnswer, *record, bytes);
}

void RemoteAuthority::room_used(uint64_t) {
  if (const Record* record = find(last_room_session_)) tell(MessageType::kRoomUsed, *record);
}

void RemoteAuthority::open_lane(Record& record) {
  LaneId lane = 0;
  while (lane < lanes_.size() && lanes_[lane] != nullptr) ++lane;
  if (lane == lanes_.size()) lanes_.emplace_back();
  lanes_[lane] = &record;
  record.lane = lane;
  actions_.push_back({ActionKind::kOpenLane, lane, sched::kNoSession, record.spec.ephemeral_bytes});
}

void RemoteAuthority::close_lane(Record& record, Closing why) {
  const bool under_way = std::exchange(record.closing, why) != Closing::kNone;
  if (under_way) return;
  if (record.lane == kNoLane) return;
  actions_.push_back({ActionKind::kCloseLane, record.lane, sched::kNoSession, 0});
}

void RemoteAuthority::start_page_out(Record& record) {
  record.state = SessionState::kPagedOut;
  record.move = Move::kOut;
  record.dropping = record.worth_ns.has_value();
  const ActionKind kind = record.dropping ? ActionKind::kDrop : ActionKind::kPageOut;
  actions_.push_back({kind, record.lane, record.spec.id, record.spec.persistent_bytes});
}

void RemoteAuthority::lane_applied(LaneId lane, uint64_t bytes, uint64_t) {
  Record* record = lane < lanes_.size() ? lanes_[lane] : nullptr;
  if (record == nullptr) return;
  if (record->closing == Closing::kNone) {
    const uint64_t held = std::max(record->spec.ephemeral_bytes, bytes);
    if (held >= record->told_ephemeral_bytes || !record->declared) return;
    record->told_ephemeral_bytes = held;
    auto message = make_message<Need>(MessageType::kNeed);  // sequence 0: no reply
    message.session = record->spec.id;
    message.persistent_bytes = record->spec.persistent_bytes;
    message.ephemeral_bytes = held;
    send(bytes_of(message));
    return;
  }
  if (bytes > 0) return;
  lanes_[lane] = nullptr;
  record->lane = kNoLane;
  record->told_ephemeral_bytes = 0;
  switch (std::exchange(record->closing, Closing::kNone)) {
    case Closing::kLeave: {
      tell(MessageType::kLeave, *record);
      std::erase(dirty_, record);
      sessions_.erase(record->spec.id);
      return;
    }
    case Closing::kPagedOut:
      if (record->declared) tell(MessageType::kPageDone, *record);
      break;
    case Closing::kUnplaced:
      if (record->declared) tell(MessageType::kUnplaced, *record);
      break;
    case Closing::kNone:
      break;
  }
  if (!record->declared && gone_.ok())
    if (const base::Status declared = declare(*record, true); !declared.ok())
      base::log(base::kError, declared.with_context("session '" + record->spec.name + "'").to_string());
  if (record->ready) mark(*record);
}

// ---- what next ------------------------------------------------------------------------------------------------

std::optional<SessionId> RemoteAuthority::pick(LaneId lane, uint64_t) {
  Record* record = lane < lanes_.size() ? lanes_[lane] : nullptr;
  if (record == nullptr || !record->ready || record->left || record->state != SessionState::kResident ||
      !record->declared || !gone_.ok())
    return std::nullopt;
  Lease& mine = lease(*record);
  const Lease::Word now = mine.look();
  if (now.epoch != record->epoch) {
    if (now.state == LeaseState::kBusy || now.state == LeaseState::kWanted) {
      record->epoch = now.epoch;
      record->asked = false;
      return record->spec.id;
    }
  } else if (now.state == LeaseState::kBusy) {
    return record->spec.id;  // beside what is in flight
  } else if (now.state == LeaseState::kWanted) {
    return std::nullopt;  // when that has drained, the turn goes back, and this session waits for the next
  } else if (now.state == LeaseState::kIdle && base::host_now_ns() < mine.until_ns() &&
             mine.change(now, LeaseState::kBusy)) {
    record->asked = false;
    return record->spec.id;
  }
  if (!record->asked) mark(*record);
  return std::nullopt;
}

bool RemoteAuthority::wants_drained(LaneId lane) const {
  const Record* record = lane < lanes_.size() ? lanes_[lane] : nullptr;
  if (record == nullptr || record->in_flight == 0 || !record->declared) return false;
  Lease& mine = lease(*record);
  mine.set_looks(
      false);  // the host's part of the iteration is over, so nobody looks at the lease until the device's is, too
  return mine.look().state == LeaseState::kWanted;
}

std::shared_ptr<base::Bell> RemoteAuthority::bell(SessionId session) const {
  const Record* record = find(session);
  if (record == nullptr || !record->declared || !gone_.ok()) return nullptr;
  return {connection_->page, &lease(*record).bell()};
}

void RemoteAuthority::flush() {
  for (size_t i = 0; i < dirty_.size(); ++i) {
    Record& record = *dirty_[i];
    record.dirty = false;
    if (!record.declared) continue;
    const bool ask = record.ready && !record.asked && record.in_flight == 0;
    if (std::exchange(record.returned, false)) {
      tell(MessageType::kReturned, record, ask ? 1 : 0);
      record.asked = record.asked || ask;
    } else if (ask) {
      record.asked = true;
      tell(MessageType::kReady, record);
    }
  }
  dirty_.clear();
}

void RemoteAuthority::take_events() {
  if (!inbox_full_.load(std::memory_order_acquire)) return;
  std::deque<Event> events;
  base::Status lost;
  std::shared_ptr<Connection> fresh;
  {
    base::MutexLock lock(inbox_mutex_);
    inbox_full_.store(false);
    events.swap(events_);
    lost = std::exchange(lost_, {});
    fresh = std::exchange(fresh_, nullptr);
  }
  if (fresh != nullptr) {
    events.clear();  // of the daemon before
    lose(lost.ok() ? base::Status(GPUSHARE_UNAVAILABLE, "the daemon was replaced") : lost);
    adopt(std::move(fresh));
  } else if (!lost.ok()) {
    lose(std::move(lost));
    return;
  }
  for (const Event& event : events) handle(event);
}

void RemoteAuthority::handle(const Event& event) {
  Record* record = find(event.session);
  if (record == nullptr) return;
  switch (event.type) {
    case MessageType::kAdmit:
      if (std::exchange(record->declared_anew, false) || record->lane != kNoLane) return;
      open_lane(*record);
      if (record->state == SessionState::kPagedOut) {
        record->move = Move::kIn;
        actions_.push_back(
            {ActionKind::kPageIn, record->lane, record->spec.id, record->spec.persistent_bytes});
        return;
      }
      record->state = SessionState::kResident;
      actions_.push_back({ActionKind::kAdmit, record->lane, record->spec.id, record->spec.persistent_bytes});
      return;
    case MessageType::kPageOut:
      if (record->state != SessionState::kResident || record->closing != Closing::kNone) return;
      start_page_out(*record);
      return;
    case MessageType::kPageIn:
      if (record->lane != kNoLane || record->state != SessionState::kPagedOut) return;
      record->move = Move::kIn;
      open_lane(*record);
      actions_.push_back({ActionKind::kPageIn, record->lane, record->spec.id, record->spec.persistent_bytes});
      return;
    case MessageType::kGranted:
      accept_unwanted(*record);
      return;
    case MessageType::kRoomMade:
      record->room_pending = false;
      return;
    case MessageType::kRangeGive:
      ranges_asked_.push_back({record->spec.id, event.value});
      return;
    default:
      return;  // Wanted: wants_drained() sees it in the lease
  }
}

std::vector<Action> RemoteAuthority::take_actions() {
  take_events();
  if (!dirty_.empty()) flush();
  return std::exchange(actions_, {});
}

// ---- what is --------------------------------------------------------------------------------------------------

SessionState RemoteAuthority::state(SessionId session) const {
  const Record* record = find(session);
  return record == nullptr ? SessionState::kQueued : record->state;
}

LaneId RemoteAuthority::lane_of(SessionId session) const {
  const Record* record = find(session);
  return record == nullptr || record->closing != Closing::kNone ? kNoLane : record->lane;
}

SessionView RemoteAuthority::view(SessionId session) const {
  SessionView view;
  const Record* record = find(session);
  if (record == nullptr) return view;
  view.id = session;
  view.cls = record->spec.cls;
  view.priority = record->spec.priority;
  view.weight = record->spec.weight;
  view.remaining_ns = record->spec.remaining_ns;
  view.persistent_bytes = record->spec.persistent_bytes;
  view.ephemeral_bytes = record->spec.ephemeral_bytes;
  view.in_flight = record->in_flight;
  return view;
}

sched::Limit RemoteAuthority::capacity() const {
  const uint64_t said = connection_->page->capacity();
  const uint64_t target = said == 0 ? capacity_bytes_ : std::min(said, capacity_bytes_);
  return {target, std::max(target, promised_bytes())};
}

uint64_t RemoteAuthority::promised_bytes() const {
  return std::min(connection_->page->promised(), capacity_bytes_);
}

uint64_t RemoteAuthority::lane_bytes(LaneId lane) const {
  return lane < lanes_.size() && lanes_[lane] != nullptr
             ? std::max(lanes_[lane]->spec.ephemeral_bytes, lanes_[lane]->told_ephemeral_bytes)
             : 0;
}

std::string RemoteAuthority::check() const {
  for (LaneId lane = 0; lane < lanes_.size(); ++lane)
    if (lanes_[lane] != nullptr && lanes_[lane]->lane != lane) return "a lane and its session disagree";
  return {};
}

}  // namespace gpushare::client
