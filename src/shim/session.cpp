// SPDX-License-Identifier: Apache-2.0
#include "shim/session.hpp"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "client/lease.hpp"
#include "client/wire.hpp"
#include "shim/books.hpp"
#include "shim/driver.hpp"
#include "shim/gate.hpp"
#include "shim/move.hpp"
#include "shim/settings.hpp"

namespace gpushare::shim {
namespace {

using client::Lease;
using client::LeaseState;
using client::MessageType;

constexpr uint64_t kSession = 1;  // the process's number of its only session
// Device time of a turn while others wait. It ends by host time at kLongestNs.
constexpr uint64_t kQuantumNs = 5'000'000, kLongestNs = 50'000'000;
// A process that has waited for its work needs a moment to come back with more. While it usually comes within kPatienceNs it is waited for, so
// that it is ready when the next turn is given; else for kImpatienceNs only.
constexpr uint64_t kPatienceNs = 2'000'000, kImpatienceNs = 200'000;
// Work that does not finish may wait for other work of the process: after that time it is let through for a while.
constexpr uint64_t kStuckNs = 1'000'000'000, kUnstickNs = 20'000'000;
constexpr uint64_t kAnswerNs = 10'000'000'000, kReconnectNs = 100'000'000, kLookNs = 100'000'000;

struct Options {
  char socket[108];
  bool named;  // by the environment
  double weight;
  int32_t priority;
  uint32_t cls;
  uint64_t group;
  bool read;
};
Options g_options;

// The connection. Emptied in a child of fork like the gate (Turn), by `process`.
struct Session {
  int process;
  int socket;
  client::LeaseMemory* page;
  Lease* lease;
  uint64_t instance;
  uint64_t epoch;  // of the turn that this side has; 0: none
  uint64_t told_bytes, asked_bytes;
  uint32_t sequence;
  bool admitted;
  bool lost;
  bool slow;             // after its last work it did not come back within kPatienceNs
  bool waiter_runs;      // the thread of wait_for_contexts
  uint32_t waiter_word;  // a futex: Waiter
  uint64_t turn_began_ns, accounted_ns, looked_ns, told_ns;
};
Session g_session;
uint32_t g_joining;  // the number of the process whose thread is joining

enum Waiter : uint32_t { kWaiterRests, kWaiterWaits, kWaiterDone };

bool start_thread(void* (*body)(void*));

uint64_t bytes_to_promise() {
  if (limited()) return limit_bytes();
  uint64_t most = 0;
  for (int device = 0; device < kDevices; ++device)
    if (const uint64_t held = held_bytes(device); held > most) most = held;
  return most;
}

// ---- settings ---------------------------------------------------------------------------------------------------------------------------

// By hand: strtod reads the decimal point of the program's language.
bool parse_number(const char* text, double* out) {
  double value = 0, scale = 1;
  bool digits = false, point = false;
  const bool negative = *text == '-';
  for (text += negative ? 1 : 0; (*text >= '0' && *text <= '9') || (*text == '.' && !point); ++text) {
    if (*text == '.') {
      point = true;
      continue;
    }
    digits = true;
    value = value * 10 + (*text - '0');
    if (point) scale *= 10;
  }
  *out = (negative ? -value : value) / scale;
  return digits && *text == 0;
}

void read_options() {
  if (g_options.read) return;
  g_options.read = true;
  g_options.weight = 1;
  double number = 0;
  const auto given = [](const char* name) {
    const char* value = secure_getenv(name);
    return value != nullptr && *value != 0 ? value : nullptr;
  };
  if (const char* value = given("GPUSHARE_WEIGHT")) {
    if (parse_number(value, &number) && number > 0)
      g_options.weight = number;
    else
      log_line("GPUSHARE_WEIGHT=%s is not a number above 0: the weight is 1", value);
  }
  if (const char* value = given("GPUSHARE_PRIORITY")) {
    if (parse_number(value, &number) && number > -2e9 && number < 2e9)
      g_options.priority = static_cast<int32_t>(number);
    else
      log_line("GPUSHARE_PRIORITY=%s is not a whole number: the priority is 0", value);
  }
  if (const char* value = given("GPUSHARE_CLASS")) {
    g_options.cls = std::strcmp(value, "opportunistic") == 0 ? 1 : 0;
    if (g_options.cls == 0 && std::strcmp(value, "guaranteed") != 0)
      log_line("GPUSHARE_CLASS=%s is neither guaranteed nor opportunistic: it is guaranteed", value);
  }
  if (const char* value = given("GPUSHARE_GROUP")) g_options.group = std::strtoull(value, nullptr, 16);
  if (const char* value = given("GPUSHARE_SOCKET")) {
    g_options.named = true;
    if (std::strlen(value) < sizeof g_options.socket)
      std::snprintf(g_options.socket, sizeof g_options.socket, "%s", value);
    else
      log_line("GPUSHARE_SOCKET=%s is longer than %zu bytes", value, sizeof g_options.socket - 1);
    return;
  }
  const char* folder = given("XDG_RUNTIME_DIR");
  if (folder != nullptr && std::strlen(folder) < 80) {
    std::snprintf(g_options.socket, sizeof g_options.socket, "%s/gpushare/daemon.sock", folder);
    if (access(g_options.socket, F_OK) == 0) return;
  }
  std::snprintf(g_options.socket, sizeof g_options.socket, "/run/gpushare/daemon.sock");
}

// What `gpushare exec --change` said since: the options from now on. Returns what has changed, of Share.
uint32_t take_share() {
  const Share& share = group().share;
  const uint32_t said = __atomic_load_n(&share.said, __ATOMIC_ACQUIRE);
  uint32_t changed = 0;
  const auto take = [&](uint32_t which, auto& option, const auto& word) {
    const uint64_t bits = static_cast<uint64_t>(__atomic_load_n(&word, __ATOMIC_ACQUIRE));
    auto now = option;
    std::memcpy(&now, &bits, sizeof now);
    if ((said & which) == 0 || now == option) return;
    option = now;
    changed |= which;
  };
  take(Share::kWeight, g_options.weight, share.weight);
  take(Share::kClass, g_options.cls, share.cls);
  take(Share::kPriority, g_options.priority, share.priority);
  return changed;
}

// How the shim came into this process, for messages.
const char* way_in() {
  const char* preload = secure_getenv("LD_PRELOAD");
  return preload != nullptr && std::strstr(preload, "libgpushare_preload") != nullptr ? "by LD_PRELOAD"
                                                                                      : "as libcuda.so.1";
}

// ---- the socket -------------------------------------------------------------------------------------------------------------------------

template <class T>
bool say(const T& message) {
  for (;;) {
    const ssize_t sent = send(g_session.socket, &message, sizeof message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) return true;
    if (errno == EINTR) continue;
    pollfd wait{g_session.socket, POLLOUT, 0};
    if ((errno != EAGAIN && errno != ENOBUFS) || poll(&wait, 1, 1000) <= 0) return false;
  }
}
bool tell(MessageType type, uint64_t value = 0) {
  auto message = client::make_message<client::SessionMessage>(type);
  message.session = kSession;
  message.value = value;
  return say(message);
}

struct Incoming {
  alignas(8) char bytes[client::kMaxMessageBytes + 64];
  size_t size;
  int descriptor;
  MessageType type() const {
    return static_cast<MessageType>(client::fields_of<client::Header>(bytes, size).type);
  }
};

// 1: a message; 0: none has come; -1: the daemon is gone, or sends nonsense.
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

// Waits for a message of that type; events are noted. False: it did not come.
bool await(MessageType type, Incoming* out, uint64_t timeout_ns);

void note_event(const Incoming& message) {
  if (message.descriptor >= 0) close(message.descriptor);
  if (message.type() == MessageType::kAdmit) g_session.admitted = true;
  if (message.type() == MessageType::kPageOut)
    tell(MessageType::kPageOutFailed);  // what the program holds stays
  if (message.type() != MessageType::kReply) return;
  const auto reply = client::fields_of<client::Reply>(message.bytes, message.size);
  if (reply.header.sequence != g_session.sequence) return;
  if (reply.code == 0) {
    g_session.told_bytes = g_session.asked_bytes;
  } else if (limited()) {
    log_line("the daemon does not promise %llu bytes, so the limit stays %llu: %.511s",
             static_cast<unsigned long long>(g_session.asked_bytes),
             static_cast<unsigned long long>(g_session.told_bytes), reply.text);
    __atomic_store_n(&group().limits.device_bytes, g_session.told_bytes, __ATOMIC_RELEASE);
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
}

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

enum class Outcome { joined, absent, refused };

// Connects and declares the process. `out_why` says what was wrong, and is empty where simply nobody is there.
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
  arrive.flags = client::kMayQueue;
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

// ---- the thread -------------------------------------------------------------------------------------------------------------------------

void close_gate(Phase to) {
  change_phase(to);
  __atomic_store_n(&turn().gate, 0U, __ATOMIC_SEQ_CST);
}

// A process whose blocks may move has its calls counted.
void open_gate() {
  if (!moves()) __atomic_store_n(&turn().gate, 1U, __ATOMIC_SEQ_CST);
}

// What the device has done for this process since the last time goes to the lease.
void account(uint64_t service_ns) {
  if (g_session.lease != nullptr) g_session.lease->account(service_ns, 1);
  g_session.accounted_ns = turn().used_ns;
}

bool holds_turn(const Lease::Word& word) {
  return word.epoch == g_session.epoch && word.state != LeaseState::kFree;
}

// The quantum begins: from now on work is measured. Without others that wait it has no end.
void begin_quantum(bool contended) {
  Turn& now = turn();
  restart_clock();
  g_session.accounted_ns = 0;
  now.budget_ns = contended ? kQuantumNs : UINT64_MAX;
  now.active_ns = g_session.turn_began_ns = host_ns();
  close_gate(Phase::quantum);
}

void take_turn(const Lease::Word& word) {
  g_session.epoch = word.epoch;
  g_session.turn_began_ns = g_session.looked_ns = host_ns();
  const bool contended = word.state == LeaseState::kWanted;
  // Work of an opportunistic process is always bounded: others are not to wait for what it had given the device before they came.
  if (contended || g_options.cls == 1) {
    begin_quantum(contended);
    return;
  }
  __atomic_store_n(&turn().unmeasured, 1U, __ATOMIC_RELEASE);
  __atomic_store_n(&turn().touched, 1U, __ATOMIC_RELEASE);  // it asked because it has work
  change_phase(Phase::open);
  open_gate();
}

void pause_ns(long ns) {
  const timespec time{0, ns};
  nanosleep(&time, nullptr);
}

// Waits for all work of the process whenever it is asked to. On a thread of its own, because that work may depend on work which the program gives
// the device later, through the gate that the session's thread works.
void* wait_for_contexts(void*) {
  uint32_t& word = g_session.waiter_word;
  for (;;) {
    while (__atomic_load_n(&word, __ATOMIC_ACQUIRE) != kWaiterWaits)
      syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE,
              __atomic_load_n(&word, __ATOMIC_ACQUIRE) == kWaiterDone ? kWaiterDone : kWaiterRests, nullptr,
              nullptr, 0);
    const bool waited = synchronize_contexts();
    __atomic_store_n(&word, waited ? kWaiterDone : kWaiterRests, __ATOMIC_RELEASE);
  }
  return nullptr;
}

// Whether all work that the process had given the device when this was first asked (*asked is false) has finished.
bool contexts_are_done(bool* asked) {
  uint32_t& word = g_session.waiter_word;
  const uint32_t state = __atomic_load_n(&word, __ATOMIC_ACQUIRE);
  if (state == kWaiterDone && *asked) {
    __atomic_store_n(&word, kWaiterRests, __ATOMIC_RELEASE);
    return true;
  }
  if (state == kWaiterWaits || __atomic_load_n(&turn().capturing, __ATOMIC_ACQUIRE) != 0) return false;
  if (!g_session.waiter_runs && !start_thread(wait_for_contexts)) return synchronize_contexts();
  g_session.waiter_runs = *asked = true;
  __atomic_store_n(&word, kWaiterWaits, __ATOMIC_RELEASE);
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
  return false;
}

// Nothing more goes to the device; returns when it has finished, with the device time that was not accounted.
uint64_t drain(uint64_t began_ns) {
  Turn& now = turn();
  close_gate(Phase::draining);
  uint64_t since_ns = host_ns();
  bool asked = false;
  for (;;) {
    look_at_events(true);
    const uint64_t at_ns = host_ns();
    if (drained()) {
      if (__atomic_load_n(&now.unmeasured, __ATOMIC_ACQUIRE) == 0) break;
      // What has no events behind it is billed by the host's clock.
      const bool capturing = __atomic_load_n(&now.capturing, __ATOMIC_ACQUIRE) != 0;
      if (contexts_are_done(&asked) || (capturing && at_ns - since_ns > kStuckNs)) {
        __atomic_store_n(&now.unmeasured, 0U, __ATOMIC_RELEASE);
        if (began_ns != 0) return host_ns() - began_ns;
        break;
      }
    }
    if (at_ns - since_ns > kStuckNs && __atomic_load_n(&now.waiting, __ATOMIC_ACQUIRE) != 0) {
      now.budget_ns = UINT64_MAX;
      change_phase(Phase::quantum);
      for (const uint64_t until_ns = at_ns + kUnstickNs; host_ns() < until_ns; pause_ns(100'000))
        look_at_events(true);
      close_gate(Phase::draining);
      since_ns = host_ns();
    }
    pause_ns(20'000);
  }
  const uint64_t used_ns = __atomic_load_n(&now.used_ns, __ATOMIC_ACQUIRE);
  return used_ns - (used_ns < g_session.accounted_ns ? used_ns : g_session.accounted_ns);
}

// How long the device may have nothing of this process before the turn goes on.
uint64_t patience_ns() {
  return __atomic_load_n(&g_session.slow, __ATOMIC_RELAXED) ? kImpatienceNs : kPatienceNs;
}

void give_back(uint64_t service_ns) {
  Turn& now = turn();
  if (wants_home()) bring_home();
  account(service_ns);
  for (const uint64_t until_ns = __atomic_load_n(&now.active_ns, __ATOMIC_ACQUIRE) + patience_ns();
       __atomic_load_n(&now.waiting, __ATOMIC_ACQUIRE) == 0 && host_ns() < until_ns;)
    pause_ns(10'000);
  for (;;) {
    const Lease::Word word = g_session.lease->look();
    if (!holds_turn(word) || g_session.lease->change(word, LeaseState::kFree)) break;
  }
  g_session.epoch = 0;
  const bool again = __atomic_load_n(&now.waiting, __ATOMIC_ACQUIRE) != 0;
  // In this order: a thread that finds the phase resting asks for a turn, and the daemon must hear of the return first.
  tell(MessageType::kReturned, again ? 1 : 0);
  change_phase(again ? Phase::asked : Phase::resting);
}

// The daemon has gone: the process goes on alone until there is another, unless it must not.
void lose_daemon() {
  if (!g_session.lost)
    log_line("process %d: the daemon at %s has gone: %s", static_cast<int>(getpid()), g_options.socket,
             load_settings().fails_closed ? "work for the device waits for another"
                                          : "it goes on without turns until there is another");
  g_session.lost = true;
  disconnect();
  if (load_settings().fails_closed) {
    close_gate(Phase::asked);
    return;
  }
  __atomic_store_n(&turn().unmeasured, 1U, __ATOMIC_RELEASE);
  change_phase(Phase::open);
  open_gate();
}

void find_daemon_again() {
  char why[512];
  if (connect_daemon(why, sizeof why) != Outcome::joined) {
    disconnect();
    return;
  }
  g_session.lost = false;
  drain(0);
  change_phase(Phase::resting);
}

void tell_share() {
  const uint32_t changed = take_share();
  uint64_t weight = 0;
  std::memcpy(&weight, &g_options.weight, sizeof weight);
  if ((changed & Share::kWeight) != 0) tell(MessageType::kSetWeight, weight);
  if ((changed & Share::kPriority) != 0)
    tell(MessageType::kSetPriority, static_cast<uint64_t>(int64_t{g_options.priority}));
  if ((changed & Share::kClass) != 0) tell(MessageType::kSetClass, g_options.cls);
}

// What the process holds, or may hold, as the daemon should know it; what its share is to be.
void tell_changes(uint64_t now_ns) {
  if (now_ns - g_session.told_ns < 4 * kLookNs) return;
  g_session.told_ns = now_ns;
  tell_share();
  const uint64_t bytes = bytes_to_promise();
  if (bytes == g_session.told_bytes || bytes == g_session.asked_bytes) return;
  auto message = client::make_message<client::Need>(MessageType::kNeed, ++g_session.sequence);
  message.session = kSession;
  message.persistent_bytes = g_session.asked_bytes = bytes;
  say(message);
}

// One look at the turn. Returns how long nothing needs another.
uint64_t step() {
  Turn& now = turn();
  const uint64_t now_ns = host_ns();
  const Lease::Word word = g_session.lease->look();
  switch (phase_now()) {
    case Phase::resting:
    case Phase::asked:
      if (word.epoch == g_session.epoch ||
          (word.state != LeaseState::kBusy && word.state != LeaseState::kWanted))
        return kLookNs;
      take_turn(word);
      return 0;
    case Phase::open:
      // A process that has become opportunistic is measured from its next turn on.
      // Blocks on the host for which there is room on the device come there when nothing runs.
      if (!holds_turn(word) || word.state == LeaseState::kWanted || g_options.cls == 1 ||
          (now_ns - g_session.looked_ns >= kLookNs && wants_home())) {
        give_back(drain(__atomic_load_n(&now.touched, __ATOMIC_ACQUIRE) != 0 ? g_session.looked_ns : now_ns));
        return 0;
      }
      if (now_ns - g_session.looked_ns < kLookNs) return kLookNs;
      // Without others the time is not measured: a period in which it gave the device something counts.
      if (__atomic_exchange_n(&now.touched, 0U, __ATOMIC_ACQ_REL) != 0) account(now_ns - g_session.looked_ns);
      g_session.looked_ns = now_ns;
      __atomic_store_n(&now.gate, 0U, __ATOMIC_SEQ_CST);  // the next work says that it came
      return kLookNs;
    case Phase::quantum: {
      look_at_events(true);
      const bool contended = word.state == LeaseState::kWanted;
      if (!holds_turn(word)) {
        give_back(drain(0));
        return 0;
      }
      // An opportunistic process: at once. One that is so no longer: its next turn is open.
      if (now.budget_ns == UINT64_MAX && (contended || g_options.cls == 0)) {
        give_back(drain(0));
        return 0;
      }
      const uint64_t used_ns = __atomic_load_n(&now.used_ns, __ATOMIC_ACQUIRE);
      if (!contended) {
        if (now_ns - g_session.looked_ns >= kLookNs && used_ns > g_session.accounted_ns) {
          g_session.looked_ns = now_ns;
          account(used_ns - g_session.accounted_ns);
        }
        return drained() ? 10'000'000 : 500'000;
      }
      const uint64_t active_ns = __atomic_load_n(&now.active_ns, __ATOMIC_ACQUIRE);
      const bool still = drained() && __atomic_load_n(&now.waiting, __ATOMIC_ACQUIRE) == 0;
      const bool idle = still && host_ns() - active_ns > patience_ns();
      // Where the program waits for its work, a turn that is half over ends: better there than amid its next step.
      const bool boundary = still && used_ns >= now.budget_ns / 2;
      const bool spent = used_ns + __atomic_load_n(&now.in_flight_ns, __ATOMIC_ACQUIRE) >= now.budget_ns ||
                         now_ns - g_session.turn_began_ns > kLongestNs;
      if (!idle && !boundary && !spent) return 100'000;
      give_back(drain(0));
      return 0;
    }
    default:
      return kLookNs;
  }
}

void* serve(void*) {
  prctl(PR_SET_TIMERSLACK, 1000UL);
  Incoming message{};
  for (uint64_t wait_ns = 0;;) {
    if (g_session.lost) {
      pause_ns(kReconnectNs);
      find_daemon_again();
      continue;
    }
    pollfd wait{g_session.socket, POLLIN, 0};
    const timespec time{static_cast<time_t>(wait_ns / 1'000'000'000),
                        static_cast<long>(wait_ns % 1'000'000'000)};
    if (wait_ns != 0) ppoll(&wait, 1, &time, nullptr);
    int got = 0;
    while ((got = receive(g_session.socket, &message)) > 0) note_event(message);
    if (got < 0) {
      lose_daemon();
      continue;
    }
    wait_ns = step();
    tell_changes(host_ns());
  }
  return nullptr;
}

bool start_thread(void* (*body)(void*)) {
  // By name it would be a symbol of glibc 2.34, where it moved from libpthread to libc.
  auto* create = reinterpret_cast<int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*)>(
      libc_symbol("pthread_create"));
  if (create == nullptr) return false;
  // The program's signals are for its own threads.
  sigset_t all, before;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, &before);
  pthread_t thread;
  const bool started = create(&thread, nullptr, body, nullptr) == 0;
  sigprocmask(SIG_SETMASK, &before, nullptr);
  return started;
}

// In the process's first thread that comes here.
bool join() {
  group();  // reads the settings
  const Settings& settings = load_settings();
  read_options();
  if (g_session.process != 0 &&
      g_session.process != getpid()) {  // a child of fork: what it has is its parent's
    close(g_session.socket);
    if (g_session.page != nullptr) munmap(g_session.page, sizeof(client::LeaseMemory));
  }
  std::memset(&g_session, 0, sizeof g_session);
  g_session.socket = -1;
  g_session.process = getpid();
  g_session.instance = host_ns() ^ static_cast<uint64_t>(g_session.process) << 32;
  prepare_fork();
  char why[512];
  Outcome outcome = connect_daemon(why, sizeof why);
  if (outcome == Outcome::joined && !g_session.admitted) {
    Incoming message{};
    for (bool told = false; !g_session.admitted;) {
      if (await(MessageType::kAdmit, &message, 1'000'000'000)) {
        g_session.admitted = true;
        break;
      }
      pollfd wait{g_session.socket, POLLRDHUP, 0};
      if (poll(&wait, 1, 0) != 0 && (wait.revents & (POLLHUP | POLLRDHUP)) != 0) {
        outcome = Outcome::absent;
        std::snprintf(why, sizeof why, "it has gone");
        break;
      }
      if (!told)
        log_line("process %d waits: the daemon at %s has no %llu bytes to promise now", g_session.process,
                 g_options.socket, static_cast<unsigned long long>(g_session.told_bytes));
      told = true;
    }
  }
  if (outcome == Outcome::joined) {
    change_phase(Phase::resting);
    if (start_thread(serve)) return true;
    outcome = Outcome::absent;
    std::snprintf(why, sizeof why, "no thread can be started");
  }
  disconnect();
  if (g_session.socket >= 0) close(g_session.socket);
  g_session.socket = -1;
  change_phase(Phase::none);
  const bool closed = settings.fails_closed && (g_options.named || outcome == Outcome::refused);
  if (outcome == Outcome::refused || closed) {
    log_line("process %d is refused a context (preloaded %s): the daemon at %s: %s", g_session.process,
             way_in(), g_options.socket, why);
    return false;
  }
  if (why[0] != 0)
    log_line("process %d works alone (preloaded %s): the daemon at %s: %s", g_session.process, way_in(),
             g_options.socket, why);
  change_phase(Phase::alone);
  open_gate();
  return true;
}

}  // namespace

bool join_daemon() {
  while (phase_now() == Phase::none) {
    // As in the books: the lock is the number of the process that holds it, so a child of fork does not wait for a thread that it has not got.
    const auto own = static_cast<uint32_t>(getpid());
    uint32_t holder = __atomic_load_n(&g_joining, __ATOMIC_ACQUIRE);
    if (holder == own ||
        !__atomic_compare_exchange_n(&g_joining, &holder, own, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
      pause_ns(1'000'000);
      continue;
    }
    const bool joined = phase_now() != Phase::none || join();
    __atomic_store_n(&g_joining, 0U, __ATOMIC_RELEASE);
    return joined;
  }
  return true;
}

void ask_for_turn() {
  auto resting = static_cast<uint32_t>(Phase::resting);
  if (!__atomic_compare_exchange_n(reinterpret_cast<uint32_t*>(&turn().phase), &resting,
                                   static_cast<uint32_t>(Phase::asked), false, __ATOMIC_SEQ_CST,
                                   __ATOMIC_RELAXED))
    return;
  __atomic_store_n(&g_session.slow,
                   host_ns() - __atomic_load_n(&turn().active_ns, __ATOMIC_ACQUIRE) > kPatienceNs,
                   __ATOMIC_RELAXED);
  tell(MessageType::kReady);
}

}  // namespace gpushare::shim
