// SPDX-License-Identifier: Apache-2.0
#include "shim/session.hpp"

#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "shim/books.hpp"
#include "shim/connection.hpp"
#include "shim/driver.hpp"
#include "shim/gate.hpp"
#include "shim/move.hpp"
#include "shim/settings.hpp"
#include "shim/words.hpp"

namespace gpushare::shim {
namespace {

using client::Lease;
using client::LeaseState;
using client::MessageType;

// Device time of a turn while others wait. It ends by host time at kLongestNs.
constexpr uint64_t kQuantumNs = 5'000'000, kLongestNs = 50'000'000;
// A process that has waited for its work needs a moment to come back with more. While it usually comes within kPatienceNs it is waited for, so
// that it is ready when the next turn is given; else for kImpatienceNs only.
constexpr uint64_t kPatienceNs = 2'000'000, kImpatienceNs = 200'000;
// Work that does not finish may wait for other work of the process: after that time it is let through for a while.
constexpr uint64_t kStuckNs = 1'000'000'000, kUnstickNs = 20'000'000;
constexpr uint64_t kReconnectNs = 100'000'000, kLookNs = 100'000'000;

uint32_t g_joining;  // the number of the process whose thread is joining

enum Waiter : uint32_t { kWaiterRests, kWaiterWaits, kWaiterDone };

bool start_thread(void* (*body)(void*));

// How the shim came into this process, for messages.
const char* way_in() {
  const char* preload = secure_getenv("LD_PRELOAD");
  return preload != nullptr && std::strstr(preload, "libgpushare_preload") != nullptr ? "by LD_PRELOAD"
                                                                                      : "as libcuda.so.1";
}

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
  store(turn().unmeasured, 1);
  store(turn().touched, 1);  // it asked because it has work
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
    while (load(word) != kWaiterWaits)
      syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, load(word) == kWaiterDone ? kWaiterDone : kWaiterRests,
              nullptr, nullptr, 0);
    const bool waited = synchronize_contexts();
    store(word, waited ? kWaiterDone : kWaiterRests);
  }
  return nullptr;
}

// Whether all work that the process had given the device when this was first asked (*asked is false) has finished.
bool contexts_are_done(bool* asked) {
  uint32_t& word = g_session.waiter_word;
  const uint32_t state = load(word);
  if (state == kWaiterDone && *asked) {
    store(word, kWaiterRests);
    return true;
  }
  if (state == kWaiterWaits || load(turn().capturing) != 0) return false;
  if (!g_session.waiter_runs && !start_thread(wait_for_contexts)) return synchronize_contexts();
  g_session.waiter_runs = *asked = true;
  store(word, kWaiterWaits);
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
      if (load(now.unmeasured) == 0) break;
      // What has no events behind it is billed by the host's clock.
      const bool capturing = load(now.capturing) != 0;
      if (contexts_are_done(&asked) || (capturing && at_ns - since_ns > kStuckNs)) {
        store(now.unmeasured, 0);
        if (began_ns != 0) return host_ns() - began_ns;
        break;
      }
    }
    if (at_ns - since_ns > kStuckNs && load(now.waiting) != 0) {
      now.budget_ns = UINT64_MAX;
      change_phase(Phase::quantum);
      for (const uint64_t until_ns = at_ns + kUnstickNs; host_ns() < until_ns; pause_ns(100'000))
        look_at_events(true);
      close_gate(Phase::draining);
      since_ns = host_ns();
    }
    pause_ns(20'000);
  }
  const uint64_t used_ns = load(now.used_ns);
  return used_ns - (used_ns < g_session.accounted_ns ? used_ns : g_session.accounted_ns);
}

// How long the device may have nothing of this process before the turn goes on.
uint64_t patience_ns() {
  return __atomic_load_n(&g_session.slow, __ATOMIC_RELAXED) ? kImpatienceNs : kPatienceNs;
}

void give_back(uint64_t service_ns) {
  Turn& now = turn();
  if (is_out())
    page_in();
  else if (wants_home())
    bring_home();
  account(service_ns);
  for (const uint64_t until_ns = load(now.active_ns) + patience_ns();
       load(now.waiting) == 0 && host_ns() < until_ns;)
    pause_ns(10'000);
  for (;;) {
    const Lease::Word word = g_session.lease->look();
    if (!holds_turn(word) || g_session.lease->change(word, LeaseState::kFree)) break;
  }
  g_session.epoch = 0;
  const bool again = load(now.waiting) != 0;
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
  store(turn().unmeasured, 1);
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

// The daemon asks only while the process has no turn, so nothing of it runs.
void page() {
  if (g_session.paging == Paging::nothing) {
    // A daemon that knows nothing of it has admitted a process whose blocks were out.
    if (g_session.admitted && g_session.epoch == 0 && is_out()) page_in();
    return;
  }
  const bool out = g_session.paging == Paging::out;
  g_session.paging = Paging::nothing;
  g_session.admitted = !out;
  bool done = true;
  if (!out) {
    page_in();
  } else if (g_session.epoch != 0 || !load_settings().pageable) {
    done = false;
  } else {
    done = page_out();
  }
  if (!done) g_session.admitted = true;
  tell(done ? MessageType::kPageDone : MessageType::kPageOutFailed);
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
        give_back(drain(load(now.touched) != 0 ? g_session.looked_ns : now_ns));
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
      const uint64_t used_ns = load(now.used_ns);
      if (!contended) {
        if (now_ns - g_session.looked_ns >= kLookNs && used_ns > g_session.accounted_ns) {
          g_session.looked_ns = now_ns;
          account(used_ns - g_session.accounted_ns);
        }
        return drained() ? 10'000'000 : 500'000;
      }
      const uint64_t active_ns = load(now.active_ns);
      const bool still = drained() && load(now.waiting) == 0;
      const bool idle = still && host_ns() - active_ns > patience_ns();
      // Where the program waits for its work, a turn that is half over ends: better there than amid its next step.
      const bool boundary = still && used_ns >= now.budget_ns / 2;
      const bool spent =
          used_ns + load(now.in_flight_ns) >= now.budget_ns || now_ns - g_session.turn_began_ns > kLongestNs;
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
    page();
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
    uint32_t holder = load(g_joining);
    if (holder == own ||
        !__atomic_compare_exchange_n(&g_joining, &holder, own, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
      pause_ns(1'000'000);
      continue;
    }
    const bool joined = phase_now() != Phase::none || join();
    store(g_joining, 0);
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
  __atomic_store_n(&g_session.slow, host_ns() - load(turn().active_ns) > kPatienceNs, __ATOMIC_RELAXED);
  tell(MessageType::kReady);
}

}  // namespace gpushare::shim
