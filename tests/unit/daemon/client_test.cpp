// A process's end of the daemon's socket: what it says to the daemon of its sessions, what it believes of them, and the
// socket itself.
// SPDX-License-Identifier: Apache-2.0
#include <sys/socket.h>

#include <numeric>
#include <string>
#include <thread>

#include "client/remote_authority.hpp"
#include "client/status.hpp"
#include "daemon/metrics.hpp"
#include "unit/daemon/raw_daemon.hpp"
#include "unit/daemon/raw_process.hpp"
#include "unit/daemon/service_sessions.hpp"

using namespace gpushare;
using namespace gpushare::test;

TEST_CASE("a wait for a message ends at its deadline") {
  int ends[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) == 0);
  const client::Descriptor here(ends[0]), there(ends[1]);
  CHECK(client::wait_readable(here.get(), base::Deadline::after(1'000'000)).code() == GPUSHARE_TIMED_OUT);
  REQUIRE(write(there.get(), "x", 1) == 1);
  CHECK_OK(client::wait_readable(here.get(), base::Deadline::after(kLong)));
}

TEST_CASE("a message to a peer that has gone is not taken for one that waits to be read") {
  int ends[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) == 0);
  const client::Descriptor here(ends[0]);
  close(ends[1]);
  const std::byte message[1] = {};
  CHECK(client::send_message(here.get(), message).code() == GPUSHARE_UNAVAILABLE);
  CHECK(client::send_message(-1, message).code() == GPUSHARE_IO_ERROR);
  std::byte buffer[16];
  CHECK(client::receive_message(-1, buffer, nullptr).status().code() == GPUSHARE_IO_ERROR);
}

TEST_CASE("a path that is too long for a socket is refused with its length and the most that is allowed") {
  const base::Status refused = client::connect_to(std::string(108, 'x')).status();
  CHECK(refused.code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(refused.message().find("has 108 bytes; the system allows 1 to 107") != std::string::npos);
}

TEST_CASE("a process tells of its context, and that its session may share a lane") {
  RawDaemon daemon;
  client::RemoteOptions options;
  options.socket = client::default_socket();
  auto authority = client::RemoteAuthority::open(options);
  REQUIRE(authority.ok());
  CHECK_OK((*authority)->claim_context(5 * kMiB));
  CHECK(daemon.context_bytes == 5 * kMiB);
  (*authority)->set_context_bytes(7 * kMiB, 0);
  eventually([&] { return daemon.context_bytes == 7 * kMiB; });
  sched::SessionSpec spec;
  spec.id = 1;
  spec.cls = sched::SessionClass::kOpportunistic;
  spec.priority = -3;
  spec.weight = 2.5;
  spec.remaining_ns = 7;
  spec.persistent_bytes = kMiB;
  spec.ephemeral_bytes = 2 * kMiB;
  CHECK_OK((*authority)->arrive(spec, 0));
  CHECK((daemon.arrive_flags & client::kMayShareLane) != 0);
  const sched::SessionView view = (*authority)->view(1);
  CHECK(view.id == 1);
  CHECK(view.cls == sched::SessionClass::kOpportunistic);
  CHECK(view.priority == -3);
  CHECK(view.weight == 2.5);
  CHECK(view.remaining_ns == 7);
  CHECK(view.persistent_bytes == kMiB);
  CHECK(view.ephemeral_bytes == 2 * kMiB);
  CHECK((*authority)->view(2).id == 0);  // there is no such session
  authority->reset();
  CHECK(daemon.sent_well);
}

TEST_CASE("a turn that comes for an iteration that is not there any more goes back") {
  RawDaemon daemon;
  client::RemoteOptions options;
  options.socket = client::default_socket();
  auto opened = client::RemoteAuthority::open(options);
  REQUIRE(opened.ok());
  client::RemoteAuthority& authority = **opened;
  sched::SessionSpec spec;
  spec.id = 1;
  spec.persistent_bytes = kMiB;
  REQUIRE_OK(authority.arrive(spec, 0));
  // The daemon has said and heard all that was said before.
  uint64_t bytes = kMiB;
  const auto settled = [&] {
    REQUIRE_OK(authority.set_need(1, bytes += kMiB, 0, 0));
    (void)authority.take_actions();
  };
  settled();
  REQUIRE(authority.state(1) == sched::SessionState::kResident);
  authority.ready(1, 0);
  (void)authority.take_actions();  // asks
  client::Lease& lease = daemon.page->lease(0);
  eventually([&] { return lease.look().state == client::LeaseState::kBusy; });
  SECTION("it stays for the next iteration while nobody else wants it") {
    authority.not_ready(1, 0);
    CHECK(lease.look().state == client::LeaseState::kIdle);
  }
  SECTION("it is free where others want it") {
    lease.set({lease.look().epoch, client::LeaseState::kWanted});
    authority.not_ready(1, 0);
    CHECK(lease.look().state == client::LeaseState::kFree);
  }
  SECTION("also if the news of it come later") {
    authority.not_ready(1, 0);
    lease.set({lease.look().epoch + 1, client::LeaseState::kBusy});
    daemon.tell(client::MessageType::kGranted);
    settled();
    CHECK(lease.look().state == client::LeaseState::kIdle);
  }
  opened->reset();
  CHECK(daemon.sent_well);
}

TEST_CASE("room that comes after its session has given up is given back, unless the session asks again") {
  RawDaemon daemon;
  client::RemoteOptions options;
  options.socket = client::default_socket();
  auto opened = client::RemoteAuthority::open(options);
  REQUIRE(opened.ok());
  client::RemoteAuthority& authority = **opened;
  sched::SessionSpec spec;
  spec.id = 1;
  spec.persistent_bytes = kMiB;
  REQUIRE_OK(authority.arrive(spec, 0));
  // The daemon has said and heard all that was said before.
  uint64_t bytes = kMiB;
  const auto settled = [&] { REQUIRE_OK(authority.set_need(1, bytes += kMiB, 0, 0)); };
  const auto asks = [&] {
    REQUIRE(authority.make_room(1, {sched::Giver::kSessions, kMiB}, 0));
    CHECK(authority.making_room(1));
  };
  const auto room_made = [&] {
    daemon.tell(client::MessageType::kRoomMade);
    settled();
    CHECK_FALSE(authority.making_room(1));
    settled();
  };
  SECTION("a thread that has asked and has not used its room yet keeps it") {
    asks();
    std::thread other([&] {
      if (authority.make_room(1, {sched::Giver::kSessions, kMiB}, 0)) authority.room_used(1, 0);
    });
    other.join();
    for (int i = 0; i < 2; ++i) room_made();
    CHECK(daemon.rooms_used == 1);
    authority.room_used(1, 0);
    settled();
    CHECK(daemon.rooms_used == 2);
  }
  const auto gives_up_two = [&] {
    asks();
    asks();
    authority.room_used(1, 0);
    settled();
    CHECK(daemon.rooms_used == 1);
  };
  SECTION("once all that it asked for is made") {
    gives_up_two();
    room_made();
    CHECK(daemon.rooms_used == 1);
    room_made();
    CHECK(daemon.rooms_used == 2);
    asks();
    room_made();  // this time it is waited for
    CHECK(daemon.rooms_used == 2);
    authority.room_used(1, 0);
    settled();
    CHECK(daemon.rooms_used == 3);
  }
  SECTION("it says so itself when it has used what it asked for since") {
    gives_up_two();
    asks();
    for (int i = 0; i < 3; ++i) room_made();
    CHECK(daemon.rooms_used == 1);
    authority.room_used(1, 0);
    settled();
    CHECK(daemon.rooms_used == 2);
  }
  opened->reset();
  CHECK(daemon.sent_well);
}

TEST_CASE("a session that found no place on the device waits, and may then need less") {
  RawDaemon daemon;
  const auto runtime = SharedService::open();
  const auto first = open_session(*runtime, "first", kMiB, kMiB);
  REQUIRE_OK(first->wait_admitted(kLong));
  // The daemon admits it, and the device has too little memory.
  const auto second = open_session(*runtime, "second", kMiB, 1ull << 30);
  eventually([&] { return daemon.unplaced == 1; });
  CHECK(second->info().state == executor::SessionState::kQueued);
  REQUIRE_OK(second->set_quota(8 * kMiB));
  CHECK(second->info().promised_ephemeral_bytes <= 8 * kMiB);
  daemon.tell(client::MessageType::kAdmit);
  REQUIRE_OK(second->wait_admitted(kLong));
  REQUIRE_OK(second->close());
  REQUIRE_OK(first->close());
  REQUIRE_OK(runtime->close());
  CHECK(daemon.sent_well);
}

TEST_CASE("the daemon shows the histogram of a session's iterations and the counts of its request queue") {
  const SharedService shared;
  const auto runtime = shared.open();
  const auto session = open_session(*runtime, "served", kMiB, kMiB);
  for (int i = 0; i < 5; ++i) REQUIRE_OK(begin(*session)->end());
  REQUIRE_OK(runtime->synchronize(kLong));
  session->note_requests({10, 4, 3, 0, 2, 1, 0, 6, 0.25, 1.5});
  const auto status = client::query_service(client::default_socket());
  REQUIRE(status.ok());
  const client::SessionStatus& shown = status->sessions.at(0);
  CHECK(std::accumulate(shown.iteration_times.begin(), shown.iteration_times.end(), uint64_t{0}) == 5);
  CHECK(std::accumulate(shown.iteration_slowdowns.begin(), shown.iteration_slowdowns.end(), uint64_t{0}) ==
        5);
  CHECK(shown.iteration_time_ns == session->info().service_ns);
  CHECK(shown.slowdown_sum >= 5);
  CHECK(shown.requests.offered == 10);
  CHECK(shown.requests.pending == 6);
  CHECK(shown.requests.predicted_miss_rate == 0.25);
  const std::string text = daemon::metrics_text(*status);
  CHECK(text.find("gpushare_session_iteration_seconds_bucket{device=") != std::string::npos);
  CHECK(text.find("outcome=\"late\"} 3\n") != std::string::npos);
  REQUIRE_OK(session->close());
  // The next session in the same place begins anew.
  const auto next = open_session(*runtime, "next", kMiB, kMiB);
  const auto later = client::query_service(client::default_socket());
  REQUIRE(later.ok());
  CHECK(later->sessions.at(0).iteration_times.empty());
  CHECK(later->sessions.at(0).requests.offered == 0);
}

TEST_CASE("the time that a session of a shared runtime has left is in its info") {
  const SharedService shared;
  const auto runtime = shared.open();
  auto needs = need("known", kMiB, kMiB);
  needs.remaining_ns = 5'000'000'000;
  const auto session = open_session(*runtime, needs);
  CHECK(session->info().remaining_ns == 5'000'000'000);
  REQUIRE_OK(session->set_remaining(3'000'000'000));
  CHECK(session->info().remaining_ns == 3'000'000'000);
}

TEST_CASE("a session that may not be paged out is, once its process allows it") {
  const SharedService shared([](auto& options) { options.policy = "priority"; });
  const auto a = shared.open(), b = shared.open();
  auto stays = need("low", 40 * kMiB, 4 * kMiB);
  stays.may_page = false;
  const auto low = open_session(*a, stays);
  void* kept = alloc(*low, 40 * kMiB);
  fill(*low, kept, 40 * kMiB, 9);
  const auto high = open_session(*b, "high", 40 * kMiB, 4 * kMiB, 10);
  CHECK(high->begin(0).status().code() == GPUSHARE_TIMED_OUT);
  CHECK(low->info().state == executor::SessionState::kResident);
  REQUIRE_OK(low->allow_paging());
  REQUIRE_OK(begin(*high)->end());
  CHECK(low->info().state == executor::SessionState::kPagedOut);
  REQUIRE_OK(high->close());
  REQUIRE_OK(begin(*low)->end());
  CHECK(all_are(kept, 40 * kMiB, 9));
}

TEST_CASE(
    "a process tells what its next iteration is worth with the question for its turn, and at no other time") {
  RawDaemon daemon;
  const auto runtime = SharedService::open();
  const auto session = open_session(*runtime, "served", kMiB, kMiB);
  REQUIRE_OK(session->wait_admitted(kLong));
  const uint64_t until_ns = base::host_now_ns() + kLong;
  REQUIRE_OK(session->set_worth(3, until_ns));
  CHECK(daemon.worths == 0);
  REQUIRE_OK(begin(*session)->end());
  CHECK(daemon.worth_before_ready == 3);
  CHECK(daemon.worth_until_ns >= until_ns);
  // The turn is still in hand.
  REQUIRE_OK(session->set_worth(4, until_ns));
  REQUIRE_OK(begin(*session)->end());
  CHECK(daemon.worths == 1);
  REQUIRE_OK(session->close());
  CHECK(session->set_worth(1, until_ns).code() == GPUSHARE_INVALID_STATE);
  REQUIRE_OK(runtime->close());
  CHECK(daemon.sent_well);
}

// Both came when the holder had the device, so they have equal parts, and the first would go first.
TEST_CASE("of sessions of several processes the one whose deadline would be lost has the next turn") {
  const uint64_t held_ns = 500'000'000;
  bool says = false;
  uint64_t until_ns = 0;
  const auto the_next_is_right = [&] {
    const SharedService shared;
    RawProcess holder(shared), first(shared), second(shared);
    for (RawProcess* each : {&holder, &first, &second}) REQUIRE(each->hello() == GPUSHARE_OK);
    REQUIRE(holder.call(arrive(1, kMiB)) == GPUSHARE_OK);
    holder.tell(client::MessageType::kReady, 1);
    holder.await(client::LeaseState::kBusy);
    // An iteration takes so long that others would lose what they have to do within that time.
    std::this_thread::sleep_for(std::chrono::nanoseconds(held_ns));
    holder.lease().account(held_ns, 1);
    holder.give_back(true);
    holder.await(client::LeaseState::kBusy);
    REQUIRE(first.call(arrive(1, kMiB)) == GPUSHARE_OK);
    REQUIRE(second.call(arrive(1, kMiB)) == GPUSHARE_OK);
    first.tell(client::MessageType::kReady, 1);
    if (says) {
      auto worth = client::make_message<client::MessageType::kSetWorth>();
      worth.session = 1;
      worth.worth = 1;
      worth.until_ns = until_ns = base::host_now_ns() + 2 * held_ns;
      REQUIRE(second.say(worth));
    }
    second.tell(client::MessageType::kReady, 1);
    (void)shared.status();  // all that was sent before is heard
    holder.give_back(false);
    const auto has = [](const RawProcess& raw) {
      return raw.lease().look().state != client::LeaseState::kFree;
    };
    while (!has(first) && !has(second)) std::this_thread::sleep_for(std::chrono::microseconds(200));
    return has(says ? second : first);
  };
  CHECK(the_next_is_right());
  says = true;
  // A machine so busy that the deadline has passed by then tells nothing.
  bool right = the_next_is_right();
  while (base::host_now_ns() > until_ns) right = the_next_is_right();
  CHECK(right);
}
