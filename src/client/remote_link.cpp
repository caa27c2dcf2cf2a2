// The connection to the daemon: made, listened to, lost, and made again, when every session is declared anew.
// SPDX-License-Identifier: Apache-2.0
#include "client/remote_authority.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <random>
#include <string>
#include <utility>

#include "base/log.hpp"
#include "base/saturate.hpp"
#include "base/units.hpp"
#include "base/waits.hpp"

namespace gpushare::client {

using sched::kNoLane;
using sched::SessionSpec;

namespace {

constexpr uint64_t kAnswerNs = 10'000'000'000;  // a daemon that does not answer for so long is taken for gone
constexpr size_t kMostBacklog = 65'536;         // messages
constexpr int kBacklogLookMs = 1000;
constexpr uint64_t kReconnectNs = 100'000'000;

base::Status daemon_gone(const std::string& socket, const base::Status& why) {
  return {GPUSHARE_UNAVAILABLE,
          "the daemon at " + socket + " has gone (" + why.message() +
              "); sessions keep their memory, and go on when a daemon serves there again",
          why.native_code()};
}

Descriptor duplicate(const Descriptor& descriptor) {
  return Descriptor(fcntl(descriptor.get(), F_DUPFD_CLOEXEC, 0));
}

base::Result<uint64_t> wait_of(const RemoteOptions& options) {
  if (options.wait_ns) return *options.wait_ns;
  const char* const said = std::getenv("GPUSHARE_DAEMON_WAIT");
  if (said == nullptr || *said == '\0') return kDaemonWaitNs;
  const auto seconds = base::parse_double(said);
  if (!seconds.ok()) return seconds.status().with_context("GPUSHARE_DAEMON_WAIT");
  if (!(*seconds >= 0 && *seconds <= 1e9))
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        std::string("GPUSHARE_DAEMON_WAIT is ") + said +
                            "; it must be a number of seconds from 0 (do not wait) to 1000000000");
  return base::to_uint64(*seconds * 1e9);
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

base::Result<std::shared_ptr<RemoteAuthority::Connection>> RemoteAuthority::connect(
    const RemoteOptions& options, uint64_t instance) {
  auto connection = std::make_shared<Connection>();
  GPUSHARE_ASSIGN_OR_RETURN(connection->socket, connect_to(options.socket));
  auto hello = make_message<MessageType::kHello>();
  hello.instance = instance;
  hello.flags = kPassesTurns;
  if (options.device.size() >= sizeof(hello.device))
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("the device's name has %zu bytes, at most %zu are allowed",
                                     options.device.size(), sizeof(hello.device) - 1));
  put_text(hello.device, options.device);
  put_text(hello.program, program_name());
  GPUSHARE_RETURN_IF_ERROR(send_first_message(connection->socket.get(), bytes_of(hello)));
  const base::Deadline deadline = base::Deadline::after(kAnswerNs);
  std::vector<std::byte> buffer(4096);
  std::vector<Descriptor> descriptors;
  for (;;) {
    const base::Status there = wait_readable(connection->socket.get(), deadline);
    if (there.code() == GPUSHARE_TIMED_OUT)
      return base::Status(GPUSHARE_UNAVAILABLE,
                          "the daemon at " + options.socket + " has not answered within " +
                              base::format_duration_ns(kAnswerNs) + ": it is stopped, or very busy");
    GPUSHARE_RETURN_IF_ERROR(there);
    const auto message = receive_message(connection->socket.get(), buffer, &descriptors);
    if (message.status().code() == GPUSHARE_NOT_READY) continue;
    if (!message.ok()) return message.status();
    GPUSHARE_ASSIGN_OR_RETURN(const MessageType type, check_message(*message, Side::kDaemon));
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
  GPUSHARE_ASSIGN_OR_RETURN(authority->wait_ns_, wait_of(authority->options_));
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
  authority->images_->connected(duplicate(authority->connection_->socket));
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

void RemoteAuthority::poke() const {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(poke_.get(), &one, sizeof(one));
}

base::Status RemoteAuthority::take_message(std::span<const std::byte> message,
                                           std::vector<Descriptor> descriptors) {
  GPUSHARE_ASSIGN_OR_RETURN(const MessageType type, check_message(message, Side::kDaemon));
  if (type == MessageType::kReply) {
    events_.push_back({type, 0, 0, {}, std::make_unique<Reply>(fields_of<Reply>(message))});
  } else if (!images_->take(type, message, &descriptors)) {
    const auto about = fields_of<SessionMessage>(message);
    events_.push_back({type, about.session, about.value, std::move(descriptors), nullptr});
  }
  return {};
}

base::Result<bool> RemoteAuthority::drain(Connection& connection) {
  base::MutexLock lock(inbox_mutex_);
  std::byte buffer[kMaxMessageBytes + 64];
  for (bool any = false;; any = true) {
    std::vector<Descriptor> descriptors;
    const auto message = receive_message(connection.socket.get(), buffer, &descriptors);
    base::Status failed = message.status();
    const bool over = failed.code() == GPUSHARE_NOT_READY;
    if (failed.ok()) failed = take_message(*message, std::move(descriptors));
    if (failed.ok()) continue;
    if (!over && lost_.ok()) lost_ = daemon_gone(options_.socket, failed);
    if (any || !over) fill_inbox();
    if (over) return any;
    return lost_;
  }
}

void RemoteAuthority::fill_inbox() {
  inbox_full_.store(true);
  tell_news();
}

void RemoteAuthority::tell_news() {
  ++news_;
  news_came_.notify_all();
}

void RemoteAuthority::tell_driver() {
  try {
    changed_();
  } catch (const std::exception& error) {
    base::log(base::kError, std::string("the daemon's news could not be taken up: ") + error.what());
  }
}

void RemoteAuthority::empty_poke() const {
  uint64_t drained = 0;
  [[maybe_unused]] const ssize_t got = read(poke_.get(), &drained, sizeof(drained));
}

// One try, after a while. Iterations under way in a shared lane end first, because a new connection makes the daemon take the
// lane for free.
void RemoteAuthority::reconnect() {
  pollfd wait{poke_.get(), POLLIN, 0};
  (void)poll(&wait, 1, static_cast<int>(kReconnectNs / 1'000'000));
  empty_poke();
  if (stop_.load()) return;
  const auto in_the_way = [this] { return !lost_known_.load() || busy_in_shared_.load() > 0; };
  const bool overdue = lost_known_.load() && gone_until_ns_.load() <= base::host_now_ns();
  if (in_the_way() || (overdue && !overdue_told_.exchange(true))) tell_driver();
  if (in_the_way()) return;
  auto connected = connect(options_, instance_);
  if (!connected.ok()) return;
  const Welcome& welcome = (*connected)->welcome;
  if (text_of(welcome.device) != device_ || welcome.capacity_bytes != capacity_bytes_)
    base::log(base::kWarning,
              "the new daemon at " + options_.socket + " serves device " +
                  std::string(text_of(welcome.device)) + " with " +
                  base::format_bytes(welcome.capacity_bytes) + ", the one before it served " + device_ +
                  " with " + base::format_bytes(capacity_bytes_) +
                  ": sessions that do not fit there wait; start it with the same --device and --capacity");
  listening_ = std::move(*connected);
  images_->connected(duplicate(listening_->socket));
  {
    base::MutexLock lock(inbox_mutex_);
    fresh_ = listening_;
    fill_inbox();
  }
  tell_driver();
}

void RemoteAuthority::listen() {
  while (!stop_.load()) {
    if (listening_ == nullptr) {
      reconnect();
      continue;
    }
    const bool backlog = has_backlog_.load();
    const auto wanted = static_cast<short>(backlog ? POLLIN | POLLOUT : POLLIN);
    pollfd wait[2] = {{listening_->socket.get(), wanted, 0}, {poke_.get(), POLLIN, 0}};
    if (poll(wait, 2, backlog ? kBacklogLookMs : -1) < 0 && errno != EINTR) return;
    if (stop_.load()) return;
    bool news = backlog || wait[1].revents != 0;
    if (wait[1].revents != 0) empty_poke();
    if ((wait[0].revents & ~POLLOUT) != 0) {
      const auto any = drain(*listening_);
      news = news || !any.ok() || *any;
      if (!any.ok()) {
        images_->lost(any.status());
        listening_.reset();
      }
    }
    images_->deliver();
    if (news) tell_driver();
    if (backlog && has_backlog_.load() && (wait[0].revents & POLLOUT) != 0) (void)poll(nullptr, 0, 1);
  }
}

void RemoteAuthority::send(std::span<const std::byte> message) {
  if (!gone_.ok()) return;
  if (backlog_.empty()) {
    const base::Status sent = send_message(connection_->socket.get(), message);
    if (sent.ok()) return;
    if (sent.code() != GPUSHARE_QUEUE_FULL) return lose(daemon_gone(options_.socket, sent));
    backlog_until_ = base::Deadline::after(kAnswerNs);
  }
  if (backlog_.size() >= kMostBacklog)
    return lose(daemon_gone(options_.socket, {GPUSHARE_QUEUE_FULL, "it does not read its messages"}));
  backlog_.emplace_back(message.begin(), message.end());
  has_backlog_.store(true);
  poke();  // the listening thread waits until the socket takes more
}

void RemoteAuthority::send_backlog() {
  while (!backlog_.empty()) {
    const base::Status sent = send_message(connection_->socket.get(), backlog_.front());
    if (sent.code() == GPUSHARE_QUEUE_FULL && !backlog_until_.passed()) return;
    if (!sent.ok()) return lose(daemon_gone(options_.socket, sent));
    backlog_.pop_front();
    backlog_until_ = base::Deadline::after(kAnswerNs);
  }
  has_backlog_.store(false);
}

// News about a session that the daemon has not accepted yet wait until it has.
void RemoteAuthority::tell(MessageType type, Record& record, uint64_t value) {
  if (record.is_known())
    send(bytes_of(make_session_message(type, record.spec.id, value)));
  else if (record.known == Known::kAsked)
    record.held_back.emplace_back(type, value);
}

base::Status RemoteAuthority::claim_context(uint64_t bytes) {
  context_bytes_ = bytes;
  if (bytes == 0) return {};
  const uint32_t sequence = next_sequence_++;
  return await(ask(bytes_of(make_session_message(MessageType::kContext, 0, bytes, sequence)), sequence, {}));
}

void RemoteAuthority::tell_context() {
  send(bytes_of(make_session_message(MessageType::kContext, 0, context_bytes_)));
}

std::shared_ptr<RemoteAuthority::Question> RemoteAuthority::ask(std::span<const std::byte> request,
                                                                uint32_t sequence, Answered answered) {
  auto question = std::make_shared<Question>();
  question->answered = std::move(answered);
  questions_[sequence] = question;
  if (gone_.ok()) send(request);
  if (!gone_.ok() && !question->over) {
    questions_.erase(sequence);
    answer(*question, gone_, {});
  }
  return question;
}

std::shared_ptr<RemoteAuthority::Question> RemoteAuthority::ask_about(Record& record,
                                                                      std::span<const std::byte> request,
                                                                      uint32_t sequence, Answered answered) {
  ++record.questions;
  return ask(request, sequence,
             [this, of = record.shared_from_this(), answered = std::move(answered)](
                 const base::Status& status, const Reply& reply) -> base::Status {
               base::Status outcome = answered(status, reply);
               if (--of->questions > 0) return outcome;
               std::deque<Event> early = std::exchange(of->early, {});
               for (Event& event : early) handle(std::move(event));
               return outcome;
             });
}

void RemoteAuthority::answer(Question& question, base::Status status, const Reply& reply) {
  const Answered answered = std::exchange(question.answered, nullptr);
  question.status = answered ? answered(status, reply) : std::move(status);
  question.over = true;
  base::MutexLock lock(inbox_mutex_);
  tell_news();
}

void RemoteAuthority::take_answer(const Reply& reply) {
  const auto found = questions_.find(reply.header.sequence);
  if (found == questions_.end()) return;
  const std::shared_ptr<Question> question = found->second;
  questions_.erase(found);
  std::string text = text_of(reply.text);
  // The daemon's figure of the group's limit is in granules: who reads this gave another.
  if (reply.code == GPUSHARE_QUOTA_EXCEEDED && options_.group_memory_bytes > 0)
    text += "; GPUSHARE_MEMORY is " + base::format_bytes(options_.group_memory_bytes) +
            ", rounded up for granules";
  answer(*question, reported(reply.code, std::move(text)), reply);
}

base::Status RemoteAuthority::await(const std::shared_ptr<Question>& question) {
  const base::Deadline deadline = base::Deadline::after(kAnswerNs);
  while (!question->over) {
    await_news(deadline);
    if (question->over || !deadline.passed()) continue;
    lose(daemon_gone(options_.socket, {GPUSHARE_TIMED_OUT, "it does not answer"}));
    poke();
  }
  return question->status;
}

void RemoteAuthority::await_news(const base::Deadline& deadline) {
  uint64_t seen = 0;
  {
    base::MutexLock lock(inbox_mutex_);
    seen = news_;
  }
  if (inbox_full_.load() || deadline.passed()) return take_events();
  const auto wait = [&] { wait_for_news(seen, deadline); };
  if (unlocked_)
    unlocked_(wait);
  else
    wait();
  take_events();
}

base::Status RemoteAuthority::await_daemon(const Record* record) {
  take_events();
  // The new connection waits for the iteration that would wait for it.
  const bool in_the_way = record != nullptr && record->pieces != nullptr && record->in_flight > 0;
  if (gone_.ok() || in_the_way || !thread_.joinable()) return gone_;
  const base::Deadline deadline = base::Deadline::at_ns(gone_until_ns_.load());
  while (!gone_.ok() && !deadline.passed() && !stop_.load()) await_news(deadline);
  return gone_;
}

base::Status RemoteAuthority::standing() const {
  return gone_.ok() || base::host_now_ns() < gone_until_ns_.load() ? base::Status() : gone_;
}

// The listening thread reads the messages. Before there is one the thread that waits reads them itself.
void RemoteAuthority::wait_for_news(uint64_t seen_news, const base::Deadline& deadline) {
  base::check_wait("the daemon's answer");
  if (!thread_.joinable()) {
    (void)wait_readable(connection_->socket.get(), deadline);
    (void)drain(*connection_);
    return;
  }
  base::MutexLock lock(inbox_mutex_);
  while (news_ == seen_news && news_came_.wait(inbox_mutex_, deadline)) {
  }
}

// The connection is gone, or of no use: nothing is sent any more. The listening thread finds it closed and reconnects.
void RemoteAuthority::lose(base::Status why) {
  if (!gone_.ok()) return;
  gone_ = std::move(why);
  gone_until_ns_.store(base::add_saturated(base::host_now_ns(), wait_ns_));
  overdue_told_.store(false);
  lost_known_.store(true);
  base::log(base::kWarning, gone_.message());
  shut(connection_->socket);
  backlog_.clear();
  has_backlog_.store(false);
  for (Record* record : by_id()) {
    // Whoever waits at the bell of the old lease looks again.
    if (record->is_known()) lease(*record).bell().ring();
    if (record->gate != nullptr) {
      record->gate->set(nullptr);
      record->gate->set_asks(false);
    }
    record->untold_work += std::exchange(record->told_work, 0) + std::exchange(record->later_untold_work, 0);
    record->known = Known::kNo;
    if (record->wants_turn()) record->turn = Turn::kWanted;
    if (record->bytes == Bytes::kDraining) record->bytes = Bytes::kResident;
    record->room_pending = record->returned = false;
    record->rooms_coming = 0;
    record->room_users.clear();
    record->early.clear();
  }
  std::map<uint32_t, std::shared_ptr<Question>> questions;
  questions.swap(questions_);
  for (const auto& [sequence, question] : questions) answer(*question, gone_, {});
}

void RemoteAuthority::adopt(std::shared_ptr<Connection> connection) {
  connection_ = std::move(connection);
  gone_ = {};
  lost_known_.store(false);
  policy_ = text_of(connection_->welcome.policy);
  tell_context();  // before sessions are promised its bytes
  const std::vector<Record*> all = by_id();
  std::vector<Record*> resident;  // with what they hold
  for (Record* record : all) {
    record->epoch = 0;
    if (record->bytes == Bytes::kEnding) continue;
    set_terms(*record, record->spec.cls, 0);  // until the new daemon says otherwise
    const bool holds = record->bytes == Bytes::kResident || record->bytes == Bytes::kComing;
    if (!holds || record->lane == kNoLane) continue;
    resident.push_back(record);
    if (record->pieces == nullptr) continue;
    give_lane_up(*record);
    record->pieces = nullptr;
  }
  // Sessions that hold memory declare themselves first.
  for (Record* record : resident) {
    declare_resident(*record);
    if (!gone_.ok()) return;
  }
  for (Record* record : all) {
    const bool waits =
        record->bytes == Bytes::kWaiting || record->bytes == Bytes::kResident || record->bytes == Bytes::kOut;
    if (waits && record->lane == kNoLane && record->known == Known::kNo) declare_queued(*record);
    if (!gone_.ok()) return;
    mark(*record);
  }
}

std::vector<RemoteAuthority::Record*> RemoteAuthority::by_id() const {
  std::vector<Record*> all;
  for (const auto& [id, record] : sessions_) all.push_back(record.get());
  std::sort(all.begin(), all.end(), [](const Record* a, const Record* b) { return a->spec.id < b->spec.id; });
  return all;
}

void RemoteAuthority::declare_resident(Record& record) {
  const bool ran = record.in_flight > 0;
  (void)declare(record, false, [this, of = &record, ran](const base::Status& declared) {
    if (of->bytes == Bytes::kEnding || !gone_.ok()) return;
    if (declared.ok()) {
      if (ran) of->epoch = lease(*of).look().epoch;
      if (ran && of->in_flight == 0) give_back(*of);  // it has ended meanwhile
    } else {
      base::log(
          base::kWarning,
          declared.with_context("session '" + of->spec.name + "' gives its device memory back and waits")
              .to_string());
      give_way(*of);
    }
    mark(*of);
  });
}

// The new daemon has refused the claim of a session that holds memory.
void RemoteAuthority::give_way(Record& record) {
  if (record.bytes == Bytes::kComing)
    actions_.push_back({sched::ActionKind::kTurnBack, record.lane, record.spec.id,
                        record.spec.persistent_bytes});  // if it is in already, page_done() pages it out
  else
    page_out_when_drained(record);
}

// For a session without memory, which may wait.
void RemoteAuthority::declare_queued(Record& record) {
  (void)declare(record, true, [this, of = &record](const base::Status& declared) {
    if (of->bytes == Bytes::kEnding || !gone_.ok()) return;
    if (!declared.ok())
      base::log(base::kError, declared.with_context("session '" + of->spec.name + "'").to_string());
    mark(*of);
  });
}

std::shared_ptr<RemoteAuthority::Question> RemoteAuthority::declare(Record& record, bool may_queue,
                                                                    Then then) {
  const SessionSpec& spec = record.spec;
  const uint32_t sequence = next_sequence_++;
  auto message = make_message<MessageType::kArrive>(sequence);
  message.session = spec.id;
  const uint64_t ephemeral_bytes = std::max(spec.ephemeral_bytes, record.told_ephemeral_bytes);
  put_need(record, spec.persistent_bytes, ephemeral_bytes, &message.persistent_bytes,
           &message.ephemeral_bytes);
  message.remaining_ns = spec.remaining_ns;
  message.iterations_total = spec.iterations_total;
  message.weight = spec.weight;
  message.priority = spec.priority;
  message.cls = static_cast<uint32_t>(spec.cls);
  message.flags = (may_queue ? kMayQueue : 0) | (spec.may_page ? kMayPage : 0) |
                  (record.in_flight > 0 ? kRunning : 0) | (spec.may_claim ? 0 : kClaimsNothing) |
                  (spec.may_upgrade ? kMayUpgrade : 0);
  message.least_bytes = spec.least_bytes;
  if (!options_.private_lanes && record.lane == kNoLane && record.own_lane == OwnLane::kNo)
    message.flags |= kMayShareLane;
  if (options_.group != 0) {
    message.flags |= kOwnClaim | (record.known_before ? kKnownBefore : 0);
    message.group = options_.group;
    if (options_.group_memory_bytes > 0)
      message.group_memory_bytes = sched::quota_in_granules(options_.group_memory_bytes, steps_.large);
    message.group_weight = options_.group_weight;
  }
  message.cap = options_.cap;
  put_text(message.name, spec.name);
  record.known = Known::kAsked;
  return ask_about(record, bytes_of(message), sequence,
                   [this, of = &record, said = message, then = std::move(then)](
                       base::Status status, const Reply& reply) -> base::Status {
                     of->known = Known::kNo;
                     if (status.ok() && (reply.value & ~kSharesLane) >= connection_->welcome.slots) {
                       lose(daemon_gone(options_.socket,
                                        {GPUSHARE_MALFORMED_INPUT, "it names a lease that is not there"}));
                       status = gone_;
                     }
                     if (status.ok()) is_declared(*of, reply, said);
                     of->held_back.clear();
                     then(status);
                     return status;
                   });
}

// The daemon knows the session as `said`; what has changed since is told now.
void RemoteAuthority::is_declared(Record& record, const Reply& reply, const Arrive& said) {
  record.slot = reply.value & ~kSharesLane;
  record.pieces = (reply.value & kSharesLane) != 0 ? std::make_shared<base::Pieces>() : nullptr;
  record.known = Known::kYes;
  record.known_before = true;
  for (const auto& [type, value] : record.held_back) tell(type, record, value);
  if (record.bytes == Bytes::kEnding) return;
  record.told_ephemeral_bytes = std::max(record.spec.ephemeral_bytes, record.told_ephemeral_bytes);
  if (record.worth_ns) tell_worth(record);
  tell_gate(record);
  if (record.range_answer_ns > 0) tell_ranges(record);
  uint64_t persistent_bytes = 0, ephemeral_bytes = 0;
  put_need(record, record.spec.persistent_bytes, record.told_ephemeral_bytes, &persistent_bytes,
           &ephemeral_bytes);
  if (persistent_bytes == said.persistent_bytes && ephemeral_bytes == said.ephemeral_bytes) return;
  if (record.growth != Growth::kNone)
    record.growth = Growth::kAskedAndFell;
  else
    tell_need(record);
}

}  // namespace gpushare::client
