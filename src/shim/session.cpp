// SPDX-License-Identifier: Apache-2.0
#include "shim/session.hpp"

#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <bit>
#include <cstdio>
#include <cstring>

#include "shim/books.hpp"
#include "shim/connection.hpp"
#include "shim/device.hpp"
#include "shim/driver.hpp"
#include "shim/gate.hpp"
#include "shim/move.hpp"
#include "shim/process.hpp"
#include "shim/rings.hpp"
#include "shim/settings.hpp"
#include "shim/words.hpp"

namespace gpushare::shim {
namespace {

using client::Lease;
using client::LeaseState;
using client::MessageType;

// Device time of a turn while others wait, unless the daemon says otherwise. It ends by host time at kLongestNs.
constexpr uint64_t kQuantumNs = 5'000'000, kLongestNs = 50'000'000;
// A process that has waited for its work needs a moment to come back with more. While it usually comes within
// kPatienceNs its turn goes on so long; else for kImpatienceNs only.
constexpr uint64_t kPatienceNs = 2'000'000, kImpatienceNs = 200'000;
// Work that does not finish may wait for other work of the process: after that time it is let through for a while.
constexpr uint64_t kStuckNs = 1'000'000'000, kUnstickNs = 20'000'000;
// A session that wanted the device so recently is expected back: its program synchronises, or its host is late. The work
// that it would find in flight stays bounded.
constexpr uint64_t kRecentNs = 100'000'000;
constexpr uint64_t kReconnectNs = 100'000'000, kLookNs = 100'000'000;

uint32_t g_joining[kSeats];  // the number of the process whose thread is joining
uint32_t g_beginning;        // the same, of its first thread that joins at all

enum Waiter : uint32_t { kWaiterRests, kWaiterWaits, kWaiterDone };

// How the shim came into this process, for messages.
const char* text_of_way() {
  switch (way_in()) {
    case Way::environment:
      return "by LD_PRELOAD";
    case Way::file:
      return "by /etc/ld.so.preload";
    default:
      return "as libcuda.so.1";
  }
}

// Work waits from here on.
void hold_work(Session& session, Phase phase) {
  change_phase(session.seat, phase);
  close_gate();
}

// Adds device time of this process, as far as that was not done, to the lease.
void account(Session& session, uint64_t service_ns) {
  if (session.lease != nullptr) session.lease->account(service_ns, 1);
  session.accounted_ns += service_ns;
}

bool holds_turn(const Session& session, const Lease::Word& word) {
  return word.epoch == session.epoch && word.state != LeaseState::kFree;
}

// The daemon may change its mind during the turn.
void set_budget(Session& session) {
  Turn& now = turn(session.seat);
  const uint64_t said_ns = session.lease->turn_ns();
  store(now.budget_ns, session.free_ns + (said_ns != 0 ? said_ns : kQuantumNs));
  bound_flight(session.seat, said_ns > kQuantumNs ? Others::none : Others::wait, session.options.cls == 1);
}

// Work of an opportunistic process is always bounded: others are not to wait for what it had given the device before they came.
bool is_bounded(const Session& session, uint64_t now_ns) {
  return session.options.cls == 1 || now_ns - session.contested_ns < kRecentNs;
}

// The quantum begins: from now on work is measured. Without others that wait it has no end.
void begin_quantum(Session& session, bool contended) {
  Turn& now = turn(session.seat);
  restart_clock(session.seat);
  session.accounted_ns = session.free_ns = 0;
  store(now.boundary_ns, 0);
  store(now.over, 0);
  store(now.polled, 0);
  store(now.budget_ns, UINT64_MAX);
  bound_flight(session.seat, Others::may_come, session.options.cls == 1);
  if (contended) set_budget(session);
  session.turn_began_ns = host_ns();
  store(now.active_ns, session.turn_began_ns);
  hold_work(session, Phase::quantum);
}

// Work goes to the device in the turn, or without turns. Nobody else wants the device: a part of the work has events.
void open_turn(Session& session) {
  Turn& now = turn(session.seat);
  store(now.unmeasured, 1);
  store(now.over, 0);
  store(now.budget_ns, UINT64_MAX);
  bound_flight(session.seat, Others::none, session.options.cls == 1);
  change_phase(session.seat, Phase::open);
}

void take_turn(Session& session, const Lease::Word& word) {
  session.epoch = word.epoch;
  session.wanted = false;
  session.turn_began_ns = session.looked_ns = host_ns();
  const bool contended = word.state == LeaseState::kWanted;
  if (contended) session.contested_ns = session.turn_began_ns;
  if (contended || is_bounded(session, session.turn_began_ns)) {
    begin_quantum(session, contended);
    return;
  }
  store(turn(session.seat).touched, 1);  // it asked because it has work
  open_turn(session);
}

void pause_ns(long ns) {
  const timespec time{0, ns};
  nanosleep(&time, nullptr);
}

// Waits for all work of the process whenever it is asked to. On a thread of its own, because that work may depend on
// work which the program gives the device later, through the gate that the session's thread works.
void* wait_for_contexts(void* argument) {
  Session& session = *static_cast<Session*>(argument);
  uint32_t& word = session.waiter_word;
  for (;;) {
    while (load(word) != kWaiterWaits)
      syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, load(word) == kWaiterDone ? kWaiterDone : kWaiterRests,
              nullptr, nullptr, 0);
    const bool waited = synchronize_contexts(session.seat);
    store(word, waited ? kWaiterDone : kWaiterRests);
  }
  return nullptr;
}

// Whether the device has finished all work that the process had given it at the first call, for which *asked is false.
bool contexts_are_done(Session& session, bool* asked) {
  uint32_t& word = session.waiter_word;
  const uint32_t state = load(word);
  if (state == kWaiterDone && *asked) {
    store(word, kWaiterRests);
    return true;
  }
  if (state == kWaiterWaits || is_capturing_any()) return false;
  if (!session.waiter_runs && !start_thread(wait_for_contexts, &session))
    return synchronize_contexts(session.seat);
  session.waiter_runs = *asked = true;
  store(word, kWaiterWaits);
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
  return false;
}

// Nothing more goes to the device; returns when it has finished, with the device time that was not accounted.
uint64_t drain(Session& session, uint64_t began_ns) {
  Turn& now = turn(session.seat);
  hold_work(session, Phase::draining);
  uint64_t since_ns = host_ns();
  bool asked = false;
  for (;;) {
    look_at_events(session.seat, true);
    const uint64_t at_ns = host_ns();
    if (drained(session.seat)) {
      if (load(now.unmeasured) == 0) break;
      // Work without events is billed by the host's clock.
      const bool capturing = is_capturing_any();
      if (contexts_are_done(session, &asked) || (capturing && at_ns - since_ns > kStuckNs)) {
        store(now.unmeasured, 0);
        if (began_ns != 0) return host_ns() - began_ns;
        break;
      }
    }
    if (at_ns - since_ns > kStuckNs && load(now.waiting) != 0) {
      store(now.budget_ns, UINT64_MAX);
      store(now.over, 0);
      change_phase(session.seat, Phase::quantum);
      for (const uint64_t until_ns = at_ns + kUnstickNs; host_ns() < until_ns; pause_ns(100'000))
        look_at_events(session.seat, true);
      hold_work(session, Phase::draining);
      since_ns = host_ns();
    }
    pause_ns(20'000);
  }
  const uint64_t used_ns = load(now.used_ns);
  return used_ns - (used_ns < session.accounted_ns ? used_ns : session.accounted_ns);
}

// How long the device may have no work of this process before the turn goes to others.
uint64_t patience_ns(const Session& session) {
  return __atomic_load_n(&session.slow, __ATOMIC_RELAXED) ? kImpatienceNs : kPatienceNs;
}

void give_back(Session& session, uint64_t service_ns) {
  Turn& now = turn(session.seat);
  if (is_out(session.seat) && session.admitted && !session.sent_out)
    page_in(session.seat, nullptr, nullptr);
  else if (wants_home(session.seat))
    bring_home(session.seat);
  account(session, service_ns);
  for (;;) {
    const Lease::Word word = session.lease->look();
    if (!holds_turn(session, word) || session.lease->change(word, LeaseState::kFree)) break;
  }
  session.epoch = 0;
  session.wanted = false;  // this is the answer
  const bool again = load(now.waiting) != 0;
  // In this order: a thread that finds the phase resting asks for a turn, and the daemon must hear of the return first.
  tell(session, MessageType::kReturned, again ? 1 : 0);
  change_phase(session.seat, again ? Phase::asked : Phase::resting);
}

// The daemon has gone: the process goes on alone until there is another, unless it must not. The log says so once it is so.
void lose_daemon(Session& session) {
  disconnect(session);
  const bool waits = load_settings().fails_closed;
  if (waits) {
    hold_work(session, Phase::asked);
  } else {
    open_turn(session);
    open_gate();
  }
  if (!session.lost)
    log_line(
        "process %d: the daemon at %s has gone: %s", static_cast<int>(getpid()), g_options.socket,
        waits ? "work for the device waits for another" : "it goes on without turns until there is another");
  session.lost = true;
}

void find_daemon_again(Session& session) {
  char why[512];
  if (connect_daemon(session, why, sizeof why) != Outcome::joined) {
    disconnect(session);
    return;
  }
  session.lost = false;
  drain(session, 0);
  change_phase(session.seat, Phase::resting);
}

void tell_share(Session& session) {
  const uint32_t changed = take_share(&session.options);
  if ((changed & Share::kWeight) != 0)
    tell(session, MessageType::kSetWeight, std::bit_cast<uint64_t>(session.options.weight));
  if ((changed & Share::kPriority) != 0)
    tell(session, MessageType::kSetPriority, static_cast<uint64_t>(int64_t{session.options.priority}));
  if ((changed & Share::kCap) != 0)
    tell(session, MessageType::kSetCap, std::bit_cast<uint64_t>(session.options.cap));
  if ((changed & Share::kClass) != 0) tell(session, MessageType::kSetClass, session.options.cls);
}

// Tells the daemon changes of the process's need for memory and of its share.
void tell_changes(Session& session, uint64_t now_ns) {
  if (now_ns - session.told_ns < 4 * kLookNs) return;
  session.told_ns = now_ns;
  tell_share(session);
  const uint64_t bytes = bytes_to_promise(session);
  if (bytes == session.told_bytes || bytes == session.asked_bytes) return;
  auto message = client::make_message<MessageType::kNeed>(++session.sequence);
  message.session = kSession;
  message.persistent_bytes = session.asked_bytes = bytes;
  say(session, message);
}

void tell_part(void* session, uint64_t bytes) {
  tell(*static_cast<Session*>(session), MessageType::kPagePart, bytes);
}

// Whether the daemon has taken the page-in back.
bool is_turned_back(void* argument) {
  Session& session = *static_cast<Session*>(argument);
  Incoming message{};
  while (receive(session.socket, &message) > 0) note_event(session, message);
  return session.turned_back;
}

// The daemon asks the process to go out only while it has no turn, so nothing of it runs. A process that is out in part has
// turns, and comes in between two.
void page(Session& session) {
  if (session.paging == Paging::nothing) {
    // A daemon that knows nothing of it has admitted a process whose blocks were out.
    if (session.admitted && session.epoch == 0 && is_out(session.seat) && !session.sent_out)
      page_in(session.seat, nullptr, nullptr);
    return;
  }
  if (session.paging == Paging::in) {
    if (session.epoch != 0) return;
    session.paging = Paging::nothing;
    page_in(session.seat, is_turned_back, &session);
    session.sent_out = false;
    session.admitted = true;
    tell(session, MessageType::kPageDone);
    return;
  }
  session.paging = Paging::nothing;
  Went went = Went::nothing;
  if (session.epoch == 0 && load_settings().pageable) went = page_out(session.seat, tell_part, &session);
  session.sent_out = session.sent_out || went != Went::nothing;
  session.admitted = went == Went::nothing;
  tell(session, went == Went::all ? MessageType::kPageDone : MessageType::kPageOutFailed);
}

// Looks at the turn once. Returns how long the next look can wait.
uint64_t step(Session& session) {
  Turn& now = turn(session.seat);
  const uint64_t now_ns = host_ns();
  const Lease::Word word = session.lease->look();
  switch (const Phase phase = phase_now(session.seat)) {
    case Phase::resting:
    case Phase::asked:
      if (word.epoch == session.epoch ||
          (word.state != LeaseState::kBusy && word.state != LeaseState::kWanted)) {
        // A turn that the daemon took back before this side had seen it is over, and only this side can say so.
        if (session.wanted) tell(session, MessageType::kReturned, phase == Phase::asked ? 1 : 0);
        session.wanted = false;
        return kLookNs;
      }
      take_turn(session, word);
      return 0;
    case Phase::open:
      if (word.state == LeaseState::kWanted) session.contested_ns = now_ns;
      // A process that has become opportunistic is measured from its next turn on.
      // Blocks on the host for which there is room on the device come there when nothing runs.
      if (!holds_turn(session, word) || word.state == LeaseState::kWanted || session.options.cls == 1 ||
          session.paging == Paging::in ||
          (now_ns - session.looked_ns >= kLookNs && wants_home(session.seat))) {
        give_back(session, drain(session, load(now.touched) != 0 ? session.looked_ns : now_ns));
        return 0;
      }
      if (now_ns - session.looked_ns < kLookNs) return kLookNs;
      // Without others the time is not measured: a period in which it gave the device something counts.
      if (__atomic_exchange_n(&now.touched, 0U, __ATOMIC_ACQ_REL) != 0)
        account(session, now_ns - session.looked_ns);
      session.looked_ns = now_ns;
      return kLookNs;
    case Phase::quantum: {
      look_at_events(session.seat, true);
      const bool contended = word.state == LeaseState::kWanted;
      if (!holds_turn(session, word) || session.paging == Paging::in) {
        give_back(session, drain(session, 0));
        return 0;
      }
      if (contended) session.contested_ns = now_ns;
      // An opportunistic process is bounded at once. A process that need not be bounded any more has an open next turn.
      if (now.budget_ns == UINT64_MAX &&
          (contended ? session.options.cls == 1 : !is_bounded(session, now_ns))) {
        give_back(session, drain(session, 0));
        return 0;
      }
      const uint64_t used_ns = load(now.used_ns);
      if (contended && now.budget_ns == UINT64_MAX) {  // a turn as others have begins now
        session.free_ns = used_ns;
        session.turn_began_ns = now_ns;
      }
      if (!contended) {
        if (now_ns - session.looked_ns >= kLookNs && used_ns > session.accounted_ns) {
          session.looked_ns = now_ns;
          account(session, used_ns - session.accounted_ns);
        }
        return drained(session.seat) ? 10'000'000 : 500'000;
      }
      set_budget(session);
      const uint64_t active_ns = load(now.active_ns);
      const bool still = drained(session.seat) && load(now.waiting) == 0;
      const bool idle = still && host_ns() - active_ns > patience_ns(session);
      // A turn that is half over ends when the program waits for its work. The end is better there than amid its next step.
      const bool boundary = still && used_ns >= now.budget_ns / 2;
      const bool spent = load(now.over) != 0 || used_ns + load(now.in_flight_ns) >= now.budget_ns ||
                         now_ns - session.turn_began_ns > kLongestNs;
      if (!idle && !boundary && !spent) return 100'000;
      give_back(session, drain(session, 0));
      return 0;
    }
    default:
      return kLookNs;
  }
}

void* serve(void* argument) {
  Session& session = *static_cast<Session*>(argument);
  prctl(PR_SET_TIMERSLACK, 1000UL);
  Incoming message{};
  for (uint64_t wait_ns = 0;;) {
    if (session.lost) {
      pause_ns(kReconnectNs);
      find_daemon_again(session);
      continue;
    }
    pollfd wait{session.socket, POLLIN, 0};
    const timespec time = timespec_of(wait_ns);
    if (wait_ns != 0) ppoll(&wait, 1, &time, nullptr);
    int got = 0;
    while ((got = receive(session.socket, &message)) > 0) note_event(session, message);
    if (got < 0) {
      lose_daemon(session);
      continue;
    }
    page(session);
    wait_ns = step(session);
    tell_changes(session, host_ns());
  }
  return nullptr;
}

// Runs in the first thread of the process that joins at any device.
void begin_process() {
  group();  // reads the settings
  read_options();
  for (Session& session : g_sessions) {
    if (session.process == 0 || session.process == getpid()) continue;
    // A child of fork: what it has is its parent's.
    if (session.socket >= 0) close(session.socket);
    if (session.page != nullptr) munmap(session.page, sizeof(client::LeaseMemory));
    std::memset(static_cast<void*>(&session), 0, sizeof session);
  }
  prepare_fork();
  if (load_settings().aside) stand_aside();
}

// Waits until the daemon has memory for the process.
Outcome await_admission(Session& session, char* out_why, size_t size) {
  Incoming message{};
  for (int looks = 0; !session.admitted; ++looks) {
    if (await(session, MessageType::kAdmit, &message, kLookNs)) {
      session.admitted = true;
      break;
    }
    page(session);  // a group that was out comes in, with this process
    pollfd wait{session.socket, POLLRDHUP, 0};
    if (poll(&wait, 1, 0) != 0 && (wait.revents & (POLLHUP | POLLRDHUP)) != 0) {
      std::snprintf(out_why, size, "it has gone");
      return Outcome::absent;
    }
    if (looks == 9)
      log_line(
          "process %d waits: the daemon at %s has no %llu bytes to promise now; 'gpushare top' says who has "
          "them",
          session.process, g_options.socket, static_cast<unsigned long long>(session.told_bytes));
  }
  return Outcome::joined;
}

// Runs in the first thread that joins at this device.
bool join(Session& session) {
  std::memset(static_cast<void*>(&session), 0, sizeof session);
  session.socket = -1;
  session.process = getpid();
  session.seat = static_cast<int>(&session - g_sessions);
  session.instance = host_ns() ^ static_cast<uint64_t>(session.process) << 32;
  const int ordinal = ordinal_of(session.seat);
  if (ordinal < 0 || real(kEntry_cuDeviceGetPCIBusId, &session.address[0], 32, ordinal) != kSuccess)
    session.address[0] = 0;
  // From the second device on no work passes without a look at it.
  const auto first = static_cast<uint32_t>(session.seat) + 1;
  uint32_t none = 0;
  __atomic_compare_exchange_n(&gate().first, &none, first, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  __atomic_add_fetch(&gate().sessions, 1U, __ATOMIC_SEQ_CST);
  __atomic_add_fetch(&gate().seats, 1U, __ATOMIC_SEQ_CST);
  close_gate();
  char why[512];
  Outcome outcome = connect_daemon(session, why, sizeof why);
  if (outcome == Outcome::joined) outcome = await_admission(session, why, sizeof why);
  if (outcome == Outcome::joined) {
    change_phase(session.seat, Phase::resting);
    if (start_thread(serve, &session)) return true;
    outcome = Outcome::absent;
    std::snprintf(why, sizeof why, "no thread can be started");
  }
  disconnect(session);
  if (session.socket >= 0) close(session.socket);
  session.socket = -1;
  change_phase(session.seat, Phase::none);
  __atomic_sub_fetch(&gate().sessions, 1U, __ATOMIC_SEQ_CST);
  const char* const device = session.address[0] != 0 ? session.address : "without an address";
  const bool capped = g_options.cap > 0 && g_options.cap < 1;
  if (outcome == Outcome::absent && capped && why[0] == 0)
    std::snprintf(why, sizeof why, "nobody is there, so no cap of the device's time holds");
  const bool closed =
      load_settings().fails_closed && (g_options.named || capped || outcome != Outcome::absent);
  if (outcome == Outcome::refused || closed) {
    __atomic_sub_fetch(&gate().seats, 1U, __ATOMIC_SEQ_CST);
    uint32_t mine = first;
    __atomic_compare_exchange_n(&gate().first, &mine, 0U, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    log_line("process %d is refused a context on device %s (preloaded %s): the daemon at %s: %s",
             session.process, device, text_of_way(), g_options.socket, why);
    return false;
  }
  // That there is no daemon is said once, whatever the number of devices.
  static int told = 0;
  if (why[0] != 0 && (outcome == Outcome::unserved ||
                      __atomic_exchange_n(&told, session.process, __ATOMIC_RELAXED) != session.process))
    log_line("process %d works alone on device %s (preloaded %s): the daemon at %s: %s", session.process,
             device, text_of_way(), g_options.socket, why);
  change_phase(session.seat, Phase::alone);
  open_gate();
  return true;
}

}  // namespace

bool stand_aside() {
  if (load(gate().seats) != 0 || !leave_group())
    return load(gate().seats) != 0 && load(gate().sessions) == 0 && !limited();
  prepare_fork();
  for (int seat = 0; seat < kSeats; ++seat) change_phase(seat, Phase::alone);
  store(gate().seats, kSeats);
  open_gate();
  return true;
}

bool join_daemon(int seat) {
  static int begun = 0;  // the process that has begun
  while (phase_now(seat) == Phase::none) {
    if (!try_lock_by_process(g_joining[seat])) {
      pause_ns(1'000'000);
      continue;
    }
    while (!try_lock_by_process(g_beginning)) pause_ns(1'000'000);
    if (begun != getpid()) begin_process();
    begun = getpid();
    store(g_beginning, 0);
    const bool joined = phase_now(seat) != Phase::none || join(g_sessions[seat]);
    store(g_joining[seat], 0);
    return joined;
  }
  return true;
}

void ask_for_turn(int seat) {
  auto resting = static_cast<uint32_t>(Phase::resting);
  if (!__atomic_compare_exchange_n(reinterpret_cast<uint32_t*>(&turn(seat).phase), &resting,
                                   static_cast<uint32_t>(Phase::asked), false, __ATOMIC_SEQ_CST,
                                   __ATOMIC_RELAXED))
    return;
  Session& session = g_sessions[seat];
  __atomic_store_n(&session.slow, host_ns() - load(turn(seat).active_ns) > kPatienceNs, __ATOMIC_RELAXED);
  tell(session, MessageType::kReady);
}

}  // namespace gpushare::shim

extern "C" {
// Called by libgpushare, which finds it by name (executor/runtime.cpp).
__attribute__((visibility("default"))) int gpushare_shim_stand_aside();
int gpushare_shim_stand_aside() {
  return gpushare::shim::stand_aside() ? 1 : 0;
}
}
