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
#include <chrono>
#include <cstdlib>
#include <random>
#include <string>
#include <utility>

#include "base/log.hpp"
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
constexpr uint16_t kImagesMinor = 3;   // since when daemons share images
constexpr uint16_t kLanesMinor = 6;    // since when daemons share lanes
constexpr uint16_t kLimitsMinor = 5;   // since when daemons hold the limits of groups of processes
constexpr uint16_t kContextMinor = 8;  // since when daemons count contexts

base::Status daemon_gone(const std::string& socket, const base::Status& why) {
  return {GPUSHARE_UNAVAILABLE,
          "the daemon at " + socket + " has gone (" + why.message() +
              "); sessions keep their memory, and go on when a daemon serves there again",
          why.native_code()};
}

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
  GPUSHARE_RETURN_IF_ERROR(send_first_message(connection->socket.get(), bytes_of(hello)));
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

void RemoteAuthority::poke() const {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(poke_.get(), &one, sizeof(one));
}

base::Result<bool> RemoteAuthority::drain(Connection& connection) {
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
        events_.push_back({*type, 0, 0, {}, std::make_unique<Reply>(fields_of<Reply>(*message))});
        any = true;
        continue;
      }
      if (type.ok() && images_->take(*type, *message, &descriptors)) {
        any = true;
        continue;
      }
      if (type.ok()) {
        const auto about = fields_of<SessionMessage>(*message);
        events_.push_back({*type, about.session, about.value, std::move(descriptors), nullptr});
        any = true;
        continue;
      }
    }
    if (lost_.ok()) lost_ = daemon_gone(options_.socket, failed);
    inbox_full_.store(true);
    ++news_;
    news_came_.notify_all();
    return lost_;
  }
  if (any) {
    inbox_full_.store(true);
    ++news_;
    news_came_.notify_all();
  }
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
      // Iterations under way in a shared lane end first, because a new connection makes the daemon take the lane for free.
      if (!lost_known_.load() || busy_in_shared_.load() > 0) tell_driver();
      if (!lost_known_.load() || busy_in_shared_.load() > 0) continue;
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
    const bool backlog = has_backlog_.load();
    const auto wanted = static_cast<short>(backlog ? POLLIN | POLLOUT : POLLIN);
    pollfd wait[2] = {{listening_->socket.get(), wanted, 0}, {poke_.get(), POLLIN, 0}};
    if (poll(wait, 2, backlog ? kBacklogLookMs : -1) < 0 && errno != EINTR) return;
    if (stop_.load()) return;
    bool news = backlog;
    if (wait[1].revents != 0) {
      uint64_t drained = 0;
      [[maybe_unused]] const ssize_t got = read(poke_.get(), &drained, sizeof(drained));
      news = true;
    }
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

// What the daemon is to hear about a session that it has not accepted yet waits until it has.
void RemoteAuthority::tell(MessageType type, Record& record, uint64_t value) {
  if (record.declared)
    send(bytes_of(make_session_message(type, record.spec.id, value)));
  else if (record.declaring)
    record.held_back.emplace_back(type, value);
}

base::Status RemoteAuthority::claim_context(uint64_t bytes) {
  context_bytes_ = bytes;
  if (bytes == 0 || connection_->welcome.minor < kContextMinor) return {};
  const uint32_t sequence = next_sequence_++;
  return await(ask(bytes_of(make_session_message(MessageType::kContext, 0, bytes, sequence)), sequence, {}));
}

void RemoteAuthority::tell_context() {
  if (connection_->welcome.minor >= kContextMinor)
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
  ++news_;
  news_came_.notify_all();
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
    uint64_t seen = 0;
    {
      base::MutexLock lock(inbox_mutex_);
      seen = news_;
    }
    take_events();
    if (question->over) break;
    if (deadline.passed()) {
      lose(daemon_gone(options_.socket, {GPUSHARE_TIMED_OUT, "it does not answer"}));
      poke();
      break;
    }
    const auto wait = [&] { wait_for_news(seen, deadline); };
    if (unlocked_)
      unlocked_(wait);
    else
      wait();
  }
  return question->status;
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
  while (news_ == seen_news && !deadline.passed()) news_came_.wait_until(inbox_mutex_, deadline.at());
}

// The connection is gone, or of no use: nothing is sent any more. The listening thread finds it closed and reconnects.
void RemoteAuthority::lose(base::Status why) {
  if (!gone_.ok()) return;
  gone_ = std::move(why);
  lost_known_.store(true);
  base::log(base::kWarning, gone_.message());
  shut(connection_->socket);
  backlog_.clear();
  has_backlog_.store(false);
  for (auto& [id, record] : sessions_) {
    record->asked = record->room_pending = record->declared = record->declared_anew = false;
    record->returned = record->evict = false;
    record->early.clear();
  }
  base::FlatHashMap<uint32_t, std::shared_ptr<Question>> questions;
  questions.swap(questions_);
  for (const auto& [sequence, question] : questions) answer(*question, gone_, {});
}

void RemoteAuthority::adopt(std::shared_ptr<Connection> connection) {
  connection_ = std::move(connection);
  gone_ = {};
  lost_known_.store(false);
  policy_ = text_of(connection_->welcome.policy);
  tell_context();  // before sessions are promised its bytes
  std::vector<Record*> all;
  for (auto& [id, record] : sessions_) {
    record->epoch = 0;
    set_terms(*record, record->spec.cls, 0);  // until the new daemon says otherwise
    if (!record->left) all.push_back(record.get());
  }
  std::vector<Record*> resident;  // with what they hold
  for (Record* record : all) {
    if (record->lane == kNoLane || record->closing != Closing::kNone || record->move == Move::kOut) continue;
    resident.push_back(record);
    if (record->pieces == nullptr) continue;
    give_lane_up(*record);
    record->pieces = nullptr;
  }
  std::sort(all.begin(), all.end(), [](const Record* a, const Record* b) { return a->spec.id < b->spec.id; });
  // Sessions that hold memory declare themselves first.
  for (Record* record : resident) {
    const bool ran = record->in_flight > 0;
    (void)declare(*record, false, [this, record, ran](const base::Status& declared) {
      if (record->left || !gone_.ok()) return;
      if (declared.ok()) {
        record->declared_anew = true;
        if (ran) record->epoch = lease(*record).look().epoch;
        if (ran && record->in_flight == 0) give_back(*record);  // it has ended meanwhile
      } else {
        base::log(base::kWarning, declared
                                      .with_context("session '" + record->spec.name +
                                                    "' gives its device memory back and waits")
                                      .to_string());
        page_out_when_drained(*record);
      }
      mark(*record);
    });
    if (!gone_.ok()) return;
  }
  for (Record* record : all) {
    if (record->lane == kNoLane && record->move == Move::kNone && !record->declared && !record->declaring)
      declare_queued(*record);
    if (!gone_.ok()) return;
    mark(*record);
  }
}

// For a session without memory, which may wait.
void RemoteAuthority::declare_queued(Record& record) {
  (void)declare(record, true, [this, of = &record](const base::Status& declared) {
    if (of->left || !gone_.ok()) return;
    if (!declared.ok())
      base::log(base::kError, declared.with_context("session '" + of->spec.name + "'").to_string());
    mark(*of);
  });
}

std::shared_ptr<RemoteAuthority::Question> RemoteAuthority::declare(Record& record, bool may_queue,
                                                                    Then then) {
  const SessionSpec& spec = record.spec;
  const uint32_t sequence = next_sequence_++;
  auto message = make_message<Arrive>(MessageType::kArrive, sequence);
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
  if (connection_->welcome.minor >= kLanesMinor && !options_.private_lanes && record.lane == kNoLane &&
      record.own_lane == OwnLane::kNo)
    message.flags |= kMayShareLane;
  if (options_.group != 0 && connection_->welcome.minor >= kLimitsMinor) {
    message.flags |= kOwnClaim | (record.known_before ? kKnownBefore : 0);
    message.group = options_.group;
    if (options_.group_memory_bytes > 0)
      message.group_memory_bytes = sched::quota_in_granules(options_.group_memory_bytes, granularity_bytes_);
    message.group_weight = options_.group_weight;
  }
  message.cap = options_.cap;  // a daemon before 1.7 knows of none
  put_text(message.name, spec.name);
  record.declaring = true;
  return ask_about(record, bytes_of(message), sequence,
                   [this, of = &record, said = message, then = std::move(then)](
                       base::Status status, const Reply& reply) -> base::Status {
                     of->declaring = false;
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
  record.declared = record.known_before = true;
  for (const auto& [type, value] : record.held_back) tell(type, record, value);
  if (record.left) return;
  record.told_ephemeral_bytes = std::max(record.spec.ephemeral_bytes, record.told_ephemeral_bytes);
  if (record.worth_ns) tell_worth(record);
  if (record.range_answer_ns > 0) tell_ranges(record);
  uint64_t persistent_bytes = 0, ephemeral_bytes = 0;
  put_need(record, record.spec.persistent_bytes, record.told_ephemeral_bytes, &persistent_bytes,
           &ephemeral_bytes);
  if (persistent_bytes == said.persistent_bytes && ephemeral_bytes == said.ephemeral_bytes) return;
  if (record.asking)
    record.need_changed = true;
  else
    tell_need(record);
}

}  // namespace gpushare::client
