// SPDX-License-Identifier: Apache-2.0
#include "shim/connection.hpp"

#include <gpushare/status.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "shim/books.hpp"
#include "shim/driver.hpp"
#include "shim/gate.hpp"
#include "shim/move.hpp"
#include "shim/settings.hpp"
#include "shim/words.hpp"

namespace gpushare::shim {

using client::Lease;
using client::MessageType;

Session g_sessions[kSeats];

namespace {

constexpr uint64_t kAnswerNs = 10'000'000'000;

bool map_page(Session& session, int file) {
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  const int seals = fcntl(file, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals ||
      lseek(file, 0, SEEK_END) != static_cast<off_t>(sizeof(client::LeaseMemory)))
    return false;
  void* memory = mmap(nullptr, sizeof(client::LeaseMemory), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) return false;
  session.page = static_cast<client::LeaseMemory*>(memory);
  return session.page->mark.load(std::memory_order_acquire) == client::kLeasePageMark;
}

}  // namespace

bool say_bytes(const Session& session, const void* message, size_t bytes, int file) {
  iovec part{const_cast<void*>(message), bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (file >= 0) {
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    cmsghdr* const item = CMSG_FIRSTHDR(&header);
    item->cmsg_level = SOL_SOCKET;
    item->cmsg_type = SCM_RIGHTS;
    item->cmsg_len = CMSG_LEN(sizeof file);
    std::memcpy(CMSG_DATA(item), &file, sizeof file);
  }
  for (;;) {
    const ssize_t sent = sendmsg(session.socket, &header, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) return true;
    if (errno == EINTR) continue;
    pollfd wait{session.socket, POLLOUT, 0};
    if ((errno != EAGAIN && errno != ENOBUFS) || poll(&wait, 1, 1000) <= 0) return false;
  }
}
bool tell(const Session& session, MessageType type, uint64_t value) {
  return say(session, client::make_session_message(type, kSession, value));
}

int receive(int socket, Incoming* out) {
  iovec part{out->bytes, sizeof out->bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 4)] = {};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  const ssize_t got = recvmsg(socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  // A peer that has gone without reading what it was sent shows as ECONNRESET once; then come its messages, and the end.
  if (got < 0 && (errno == EAGAIN || errno == EINTR || errno == ECONNRESET)) return 0;
  if (got <= 0) return -1;
  out->size = static_cast<size_t>(got);
  out->descriptor = -1;
  for (cmsghdr* item = CMSG_FIRSTHDR(&header); item != nullptr; item = CMSG_NXTHDR(&header, item)) {
    if (item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_RIGHTS) continue;
    for (size_t i = 0; i < (item->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
      int number = -1;
      std::memcpy(&number, CMSG_DATA(item) + i * sizeof(int), sizeof number);
      if (out->descriptor < 0)
        out->descriptor = number;
      else
        close(number);
    }
  }
  const bool good =
      client::fault_of(out->bytes, out->size, client::Side::kDaemon) == client::MessageFault::kNone;
  if (!good && out->descriptor >= 0) close(out->descriptor);
  return good ? 1 : -1;
}

void note_event(Session& session, const Incoming& message) {
  if (message.descriptor >= 0) close(message.descriptor);
  if (message.type() == MessageType::kAdmit) session.admitted = true;
  if (message.type() == MessageType::kPageOut) session.paging = Paging::out;
  if (message.type() == MessageType::kPageIn) {
    session.paging = Paging::in;
    session.turned_back = false;
  }
  if (message.type() == MessageType::kTurnBack) session.turned_back = true;
  if (message.type() == MessageType::kWanted) session.wanted = true;
  if (message.type() != MessageType::kReply) return;
  const auto reply = client::fields_of<client::Reply>(message.bytes, message.size);
  if (reply.header.sequence != session.sequence) return;
  if (reply.code == 0) {
    session.told_bytes = session.asked_bytes;
  } else if (limited()) {
    log_line("the daemon does not promise %llu bytes, so the limit stays %llu: %.511s",
             static_cast<unsigned long long>(session.asked_bytes),
             static_cast<unsigned long long>(session.told_bytes), reply.text);
    const uint64_t lent = is_counted(session.seat) ? load(group().lent_bytes[session.seat]) : 0;
    store(group().limits.device_bytes, session.told_bytes + lent);
  }
}

bool await(Session& session, MessageType type, Incoming* out, uint64_t timeout_ns) {
  const uint64_t ends_ns = host_ns() + timeout_ns;
  for (uint64_t now_ns = host_ns(); now_ns < ends_ns; now_ns = host_ns()) {
    pollfd wait{session.socket, POLLIN, 0};
    poll(&wait, 1, static_cast<int>((ends_ns - now_ns) / 1'000'000 + 1));
    const int got = receive(session.socket, out);
    if (got < 0) return false;
    if (got == 0) continue;
    if (out->type() == type) return true;
    note_event(session, *out);
  }
  return false;
}

// The descriptor's number stays this session's: a thread may be about to send, and must not meet another file of the
// program under it.
void disconnect(Session& session) {
  if (session.socket >= 0) shutdown(session.socket, SHUT_RDWR);
  if (session.page != nullptr) munmap(session.page, sizeof(client::LeaseMemory));
  session.page = nullptr;
  session.lease = nullptr;
  session.epoch = 0;
  session.admitted = false;
  session.paging = Paging::nothing;
  session.sent_out = false;
  session.wanted = false;
}

Outcome connect_daemon(Session& session, char* out_why, size_t size) {
  out_why[0] = 0;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, g_options.socket, sizeof address.sun_path);
  const int made = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  ucred server{};
  socklen_t bytes = sizeof server;
  if (made < 0 || connect(made, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      getsockopt(made, SOL_SOCKET, SO_PEERCRED, &server, &bytes) != 0) {
    if (g_options.named || (errno != ENOENT && errno != ECONNREFUSED))
      std::snprintf(out_why, size, "%s", std::strerror(errno));
    if (made >= 0) close(made);
    return Outcome::absent;
  }
  if (server.uid != geteuid() && server.uid != 0) {
    std::snprintf(out_why, size, "it belongs to user %u, who is neither this one nor root", server.uid);
    close(made);
    return Outcome::absent;
  }
  if (session.socket < 0) {
    session.socket = made;
  } else {
    dup3(made, session.socket, O_CLOEXEC);
    close(made);
  }
  auto hello = client::make_message<MessageType::kHello>();
  hello.instance = session.instance;
  hello.pci_address = pci_number(session.address);
  std::snprintf(hello.program, sizeof hello.program, "%s", program_invocation_short_name);
  Incoming message{};
  (void)say(session, hello);  // a daemon that refuses has perhaps said so already, and gone
  if (!await(session, MessageType::kWelcome, &message, kAnswerNs)) {
    std::snprintf(out_why, size, "it does not answer");
    return Outcome::absent;
  }
  const auto welcome = client::fields_of<client::Welcome>(message.bytes, message.size);
  const bool mapped = message.descriptor >= 0 && map_page(session, message.descriptor);
  if (message.descriptor >= 0) close(message.descriptor);
  if (welcome.code != 0 || !mapped) {
    if (welcome.code ==
        GPUSHARE_QUEUE_FULL) {  // working alone, this process would have neither turns nor a cap
      std::snprintf(out_why, size, "%.400s. End some, or raise gpushare daemon --max-processes",
                    welcome.text);
      return Outcome::refused;
    }
    const char* const no_page =
        "its page of leases is none of this build. Install the daemon and the preload library from the same "
        "release";
    std::snprintf(out_why, size, "%.400s", welcome.code != 0 ? welcome.text : no_page);
    return welcome.code != 0 ? Outcome::unserved : Outcome::absent;
  }
  session.options = g_options;
  take_share(&session.options);
  auto arrive = client::make_message<MessageType::kArrive>(++session.sequence);
  arrive.session = kSession;
  arrive.persistent_bytes = session.asked_bytes = bytes_to_promise(session);
  arrive.weight = session.options.weight;
  arrive.cap = session.options.cap;
  arrive.priority = session.options.priority;
  arrive.cls = session.options.cls;
  arrive.flags = client::kMayQueue |
                 (load_settings().pageable && can_move(session.seat) ? client::kMayPage | client::kAlternates
                                                                     : client::kNeverPages);
  arrive.group = g_options.group;
  std::snprintf(arrive.name, sizeof arrive.name, "%s", program_invocation_short_name);
  // With the group's page the daemon can give a part of the device's limit to the group's programs that use gpushare.
  if (!say_bytes(session, &arrive, sizeof arrive, page_file()) ||
      !await(session, MessageType::kReply, &message, kAnswerNs)) {
    std::snprintf(out_why, size, "it does not answer");
    return Outcome::absent;
  }
  const auto reply = client::fields_of<client::Reply>(message.bytes, message.size);
  if (reply.code != 0) {
    std::snprintf(out_why, size, "%.400s", reply.text);
    return Outcome::refused;
  }
  if (reply.value >= client::kLeaseSlots) {
    std::snprintf(out_why, size, "it names a lease that is not there");
    return Outcome::absent;
  }
  session.told_bytes = arrive.persistent_bytes;
  session.lease = &session.page->leases[reply.value];
  return Outcome::joined;
}

uint64_t bytes_to_promise(const Session& session) {
  return limited() ? limit_bytes(session.seat) : held_bytes(session.seat);
}

}  // namespace gpushare::shim
