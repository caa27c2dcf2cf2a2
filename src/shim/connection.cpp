// SPDX-License-Identifier: Apache-2.0
#include "shim/connection.hpp"

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

Session g_session;

namespace {

constexpr uint64_t kAnswerNs = 10'000'000'000;

bool map_page(int file) {
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  const int seals = fcntl(file, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals ||
      lseek(file, 0, SEEK_END) != static_cast<off_t>(sizeof(client::LeaseMemory)))
    return false;
  void* memory = mmap(nullptr, sizeof(client::LeaseMemory), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) return false;
  g_session.page = static_cast<client::LeaseMemory*>(memory);
  return g_session.page->mark.load(std::memory_order_acquire) == client::kLeasePageMark;
}

}  // namespace

bool say_bytes(const void* message, size_t bytes) {
  for (;;) {
    const ssize_t sent = send(g_session.socket, message, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) return true;
    if (errno == EINTR) continue;
    pollfd wait{g_session.socket, POLLOUT, 0};
    if ((errno != EAGAIN && errno != ENOBUFS) || poll(&wait, 1, 1000) <= 0) return false;
  }
}
bool tell(MessageType type, uint64_t value) {
  auto message = client::make_message<client::SessionMessage>(type);
  message.session = kSession;
  message.value = value;
  return say(message);
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
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
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
  const auto said = client::fields_of<client::Header>(out->bytes, out->size);
  const bool good = out->size >= sizeof said && said.mark == client::kProtocolMark &&
                    said.major == client::kProtocolMajor && said.bytes == out->size;
  if (!good && out->descriptor >= 0) close(out->descriptor);
  return good ? 1 : -1;
}

void note_event(const Incoming& message) {
  if (message.descriptor >= 0) close(message.descriptor);
  if (message.type() == MessageType::kAdmit) g_session.admitted = true;
  if (message.type() == MessageType::kPageOut) g_session.paging = Paging::out;
  if (message.type() == MessageType::kPageIn) g_session.paging = Paging::in;
  if (message.type() != MessageType::kReply) return;
  const auto reply = client::fields_of<client::Reply>(message.bytes, message.size);
  if (reply.header.sequence != g_session.sequence) return;
  if (reply.code == 0) {
    g_session.told_bytes = g_session.asked_bytes;
  } else if (limited()) {
    log_line("the daemon does not promise %llu bytes, so the limit stays %llu: %.511s",
             static_cast<unsigned long long>(g_session.asked_bytes),
             static_cast<unsigned long long>(g_session.told_bytes), reply.text);
    store(group().limits.device_bytes, g_session.told_bytes);
  }
}

bool await(MessageType type, Incoming* out, uint64_t timeout_ns) {
  const uint64_t ends_ns = host_ns() + timeout_ns;
  for (uint64_t now_ns = host_ns(); now_ns < ends_ns; now_ns = host_ns()) {
    pollfd wait{g_session.socket, POLLIN, 0};
    poll(&wait, 1, static_cast<int>((ends_ns - now_ns) / 1'000'000 + 1));
    const int got = receive(g_session.socket, out);
    if (got < 0) return false;
    if (got == 0) continue;
    if (out->type() == type) return true;
    note_event(*out);
  }
  return false;
}

// The descriptor's number stays this session's: a thread may be about to send, and must not meet another file of the program under it.
void disconnect() {
  if (g_session.socket >= 0) shutdown(g_session.socket, SHUT_RDWR);
  if (g_session.page != nullptr) munmap(g_session.page, sizeof(client::LeaseMemory));
  g_session.page = nullptr;
  g_session.lease = nullptr;
  g_session.epoch = 0;
  g_session.admitted = false;
  g_session.paging = Paging::nothing;
}

Outcome connect_daemon(char* out_why, size_t size) {
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
  if (g_session.socket < 0) {
    g_session.socket = made;
  } else {
    dup3(made, g_session.socket, O_CLOEXEC);
    close(made);
  }
  auto hello = client::make_message<client::Hello>(MessageType::kHello);
  hello.instance = g_session.instance;
  std::snprintf(hello.program, sizeof hello.program, "%s", program_invocation_short_name);
  Incoming message{};
  if (!say(hello) || !await(MessageType::kWelcome, &message, kAnswerNs)) {
    std::snprintf(out_why, size, "it does not answer");
    return Outcome::absent;
  }
  const auto welcome = client::fields_of<client::Welcome>(message.bytes, message.size);
  const bool mapped = message.descriptor >= 0 && map_page(message.descriptor);
  if (message.descriptor >= 0) close(message.descriptor);
  if (welcome.code != 0 || !mapped) {
    std::snprintf(out_why, size, "%.400s", welcome.code != 0 ? welcome.text : "it sends no page of leases");
    return Outcome::absent;
  }
  take_share();
  auto arrive = client::make_message<client::Arrive>(MessageType::kArrive, ++g_session.sequence);
  arrive.session = kSession;
  arrive.persistent_bytes = g_session.asked_bytes = bytes_to_promise();
  arrive.weight = g_options.weight;
  arrive.priority = g_options.priority;
  arrive.cls = g_options.cls;
  arrive.flags = client::kMayQueue | (load_settings().pageable && can_move() ? client::kMayPage : 0);
  arrive.group = g_options.group;
  std::snprintf(arrive.name, sizeof arrive.name, "%s", program_invocation_short_name);
  if (!say(arrive) || !await(MessageType::kReply, &message, kAnswerNs)) {
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
  g_session.told_bytes = arrive.persistent_bytes;
  g_session.lease = &g_session.page->leases[reply.value];
  return Outcome::joined;
}

uint64_t bytes_to_promise() {
  if (limited()) return limit_bytes();
  uint64_t most = 0;
  for (int device = 0; device < kDevices; ++device)
    if (const uint64_t held = held_bytes(device); held > most) most = held;
  return most;
}

}  // namespace gpushare::shim
