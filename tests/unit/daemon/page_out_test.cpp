// A page-out that is decided while a turn is passed from process to process: neither the daemon nor the process moves a
// session's memory under its running iteration.
// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstring>
#include <thread>

#include "unit/daemon/raw_daemon.hpp"
#include "unit/daemon/raw_process.hpp"
#include "unit/daemon/service_sessions.hpp"

using namespace gpushare;
using namespace gpushare::test;
using client::LeaseState;
using client::MessageType;

TEST_CASE("a session that has been passed a turn is not paged out by what the holder's end decides") {
  // The holder takes longer than it said, which puts it behind the waiting session; that one needs the bytes of both others.
  SharedService shared([](daemon::ServiceOptions& options) {
    options.policy = "srtf";
    options.lease_ns = 600'000'000'000;
  });
  RawProcess holder(shared), next(shared), waiting(shared);
  for (RawProcess* each : {&holder, &next, &waiting})
    REQUIRE(each->hello(client::kPassesTurns) == GPUSHARE_OK);
  const auto arrives = [](RawProcess& who, uint64_t bytes, uint64_t remaining_ns) {
    client::Arrive message = arrive(1, bytes);
    message.remaining_ns = remaining_ns;
    return who.call(message);
  };
  REQUIRE(arrives(holder, 30 * kMiB, 500'000'000) == GPUSHARE_OK);
  REQUIRE(arrives(next, 30 * kMiB, UINT64_MAX) == GPUSHARE_OK);
  holder.tell(MessageType::kReady, 1);
  holder.await(LeaseState::kBusy);
  REQUIRE(arrives(waiting, 60 * kMiB, 10'000'000'000) == GPUSHARE_OK);
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));  // service that the daemon believes
  next.lease().bell().expect(true);
  next.tell(MessageType::kReady, 1);
  holder.await(LeaseState::kWanted);
  (void)shared.status();  // the daemon has made its offer, and sleeps
  holder.lease().account(1'050'000'000, 1);
  REQUIRE(holder.lease().change(holder.lease().look(), LeaseState::kFree));
  holder.page->pass_on(holder.lease());
  REQUIRE(next.lease().look().state == LeaseState::kBusy);
  holder.tell(MessageType::kReturned, 1);
  (void)holder.next({MessageType::kPageOut});  // the daemon has booked all that and has decided
  next.await(LeaseState::kWanted);
  (void)shared.status();
  std::array<std::byte, client::kMaxMessageBytes + 64> buffer;
  for (auto message = client::receive_message(next.socket.get(), buffer);
       message.status().code() != GPUSHARE_NOT_READY;
       message = client::receive_message(next.socket.get(), buffer)) {
    REQUIRE(message.ok());
    CHECK(*client::check_message(*message, client::Side::kDaemon) != MessageType::kPageOut);
  }
  next.give_back(false);
  (void)next.next({MessageType::kPageOut});
  next.tell(MessageType::kPageDone, 1);
  holder.tell(MessageType::kPageDone, 1);
  (void)waiting.next({MessageType::kAdmit});
}

TEST_CASE("a process that is told to page a session out inside its iteration does so after it") {
  RawDaemon daemon;
  const auto runtime = SharedService::open();
  const auto session = open_session(*runtime, "trains", kMiB, kMiB);
  void* weights = alloc(*session, kMiB);
  {
    const auto iteration = begin(*session);
    std::memset(weights, 1, kMiB);
    daemon.tell(MessageType::kPageOut);
    // Events are carried out in order, and this one shows.
    daemon.tell(MessageType::kCountsAs, static_cast<uint64_t>(sched::SessionClass::kOpportunistic));
    eventually([&] { return session->info().cls == sched::SessionClass::kOpportunistic; });
    CHECK(daemon.page_done == 0);
    std::memset(weights, 2, kMiB);
    REQUIRE_OK(iteration->end());
  }
  eventually([&] { return daemon.page_done == 1; });
  CHECK(session->begin(1'000'000).status().code() == GPUSHARE_TIMED_OUT);  // it has no memory
  daemon.tell(MessageType::kPageIn);
  const auto iteration = begin(*session);
  CHECK(all_are(weights, kMiB, 2));
  REQUIRE_OK(iteration->end());
  eventually([&] { return daemon.page_done == 2; });
  CHECK(daemon.sent_well);
  REQUIRE_OK(session->close());
  REQUIRE_OK(runtime->close());
}

TEST_CASE("a process that is told to turn a page-in back gives it up, or has carried it out") {
  RawDaemon daemon;
  executor::RuntimeOptions in_parts;
  in_parts.device = "shared";
  in_parts.spill_move_bytes = 1;  // a granule
  auto opened = executor::Runtime::open(std::move(in_parts));
  REQUIRE(opened.ok());
  const auto runtime = *opened;
  constexpr uint64_t kBytes = 32 * kMiB;
  const auto session = open_session(*runtime, "trains", kBytes, kMiB);
  void* weights = alloc(*session, kBytes);
  std::memset(weights, 3, kBytes);
  for (int done = 0, rounds = 0; daemon.unplaced == 0 && rounds < 20; ++rounds) {
    daemon.tell(MessageType::kPageOut);
    eventually([&] { return daemon.page_done == done + 1; });
    daemon.tell(MessageType::kPageIn);
    daemon.tell(MessageType::kTurnBack);
    eventually([&] { return daemon.page_done + daemon.unplaced == done + 2; });
    done += 2;
  }
  CHECK(daemon.unplaced == 1);
  CHECK(session->begin(1'000'000).status().code() == GPUSHARE_TIMED_OUT);
  daemon.tell(MessageType::kPageIn);
  const auto iteration = begin(*session);
  CHECK(all_are(weights, kBytes, 3));
  daemon.tell(MessageType::kTurnBack);  // too late
  REQUIRE_OK(iteration->end());
  CHECK(daemon.sent_well);
  REQUIRE_OK(session->close());
  REQUIRE_OK(runtime->close());
}
