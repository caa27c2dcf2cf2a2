// The daemon's service against what breaks the protocol and processes that go without a word.
// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <thread>

#include "client/remote_authority.hpp"
#include "support/random.hpp"
#include "unit/daemon/raw_process.hpp"

using namespace gpushare;
using namespace gpushare::test;
using client::MessageType;

TEST_CASE("a message that is not in the table, of another size or from the wrong side is refused") {
  using client::Side;
  const auto code = [](const void* message, size_t bytes, Side from) {
    return client::check_message({static_cast<const std::byte*>(message), bytes}, from).status().code();
  };
  // Each type as the table has it, and what differs from it by one thing.
  std::array<std::byte, client::kMaxMessageBytes + 1> bytes{};
  for (uint16_t type = 1; type < client::kMessageTypes; ++type) {
    const client::MessageKind& kind = client::kMessages[type];
    INFO(kind.name);
    client::Header header;
    const auto refuses = [&](size_t size, Side from) {
      std::memcpy(bytes.data(), &header, sizeof(header));
      return code(bytes.data(), size, from);
    };
    header.type = type;
    header.bytes = kind.bytes;
    REQUIRE(kind.bytes <= client::kMaxMessageBytes);
    CHECK(refuses(kind.bytes, kind.from) == GPUSHARE_OK);
    CHECK(refuses(kind.bytes, kind.from == Side::kDaemon ? Side::kProcess : Side::kDaemon) ==
          GPUSHARE_MALFORMED_INPUT);
    CHECK(refuses(kind.bytes - 1, kind.from) == GPUSHARE_MALFORMED_INPUT);
    for (const int more : {-1, 1}) {
      header.bytes = kind.bytes + static_cast<uint32_t>(more);
      CHECK(refuses(header.bytes, kind.from) == GPUSHARE_MALFORMED_INPUT);
      CHECK(refuses(kind.bytes, kind.from) == GPUSHARE_MALFORMED_INPUT);
    }
    header.bytes = kind.bytes;
    header.mark = 7;
    CHECK(refuses(kind.bytes, kind.from) == GPUSHARE_MALFORMED_INPUT);
  }
  auto bad = client::make_session_message(MessageType::kReady, 1);
  CHECK(code(&bad, 3, Side::kProcess) == GPUSHARE_MALFORMED_INPUT);
  for (const uint16_t type : {uint16_t{0}, client::kMessageTypes, uint16_t{9999}}) {
    bad.header.type = type;
    CHECK(code(&bad, sizeof(bad), Side::kProcess) == GPUSHARE_MALFORMED_INPUT);
  }
  CHECK(client::reported(GPUSHARE_TIMED_OUT, "x").code() == GPUSHARE_TIMED_OUT);
  CHECK(client::reported(99999, "x").code() == GPUSHARE_UNKNOWN);
  CHECK(client::reported(99999, "x").native_code() == 99999);
}

TEST_CASE("a peer of another major version is refused with a line that names both") {
  SharedService shared;
  RawProcess raw(shared);
  auto hello = client::make_message<MessageType::kHello>();
  hello.header.major = 2;
  REQUIRE(raw.say(hello));
  const auto refused = client::fields_of<client::Reply>(raw.answer());
  CHECK(refused.code == GPUSHARE_UNSUPPORTED);
  CHECK(std::string(refused.text).find("version 2 of the protocol, this one 1; install the same release") !=
        std::string::npos);
  CHECK(raw.answer().empty());
}

TEST_CASE("the status is read by fields that are known") {
  client::ServiceStatus status;
  status.pid = 7;
  client::SessionStatus& session = status.sessions.emplace_back();
  session.name = "a\tb\nc";
  session.weight = 0.25;
  session.priority = -3;
  session.iteration_times = {1, 0, UINT64_MAX};
  session.requests.price_per_s = 0.5;
  const std::string text = client::encode_status(status);
  auto read = client::parse_service_status(text);
  REQUIRE(read.ok());
  CHECK(read->pid == 7);
  CHECK(read->sessions[0].name == "a?b?c");
  CHECK(read->sessions[0].weight == 0.25);
  CHECK(read->sessions[0].priority == -3);
  CHECK(read->sessions[0].iteration_times == session.iteration_times);
  CHECK(read->sessions[0].iteration_slowdowns.empty());
  CHECK(read->sessions[0].requests.price_per_s == 0.5);
  read = client::parse_service_status("daemon\tpid=1\tnew=x\nunheard_of\ta=b\n");
  REQUIRE(read.ok());
  CHECK(read->pid == 1);
  for (const char* bad : {"", "daemon", "daemon\tpid=x\n", "device\tdevice=a\n", "daemon\tpid\n",
                          "daemon\tpid=1\nsession\titeration_times=1,x\n"})
    CHECK(client::parse_service_status(bad).status().code() == GPUSHARE_MALFORMED_INPUT);
}

TEST_CASE("what breaks the protocol ends the connection and nothing else") {
  SharedService shared;
  {
    RawProcess raw(shared);
    REQUIRE(raw.say(client::make_session_message(MessageType::kReady, 1)));  // before Hello
    CHECK(client::fields_of<client::Reply>(raw.answer()).code == GPUSHARE_MALFORMED_INPUT);
    CHECK(raw.answer().empty());
  }
  {
    RawProcess raw(shared);
    CHECK(raw.hello() == GPUSHARE_OK);
    REQUIRE(raw.say(client::make_message<MessageType::kHello>()));
    CHECK(client::fields_of<client::Reply>(raw.answer()).code == GPUSHARE_MALFORMED_INPUT);
    CHECK(raw.answer().empty());
  }
  {
    RawProcess raw(shared);
    CHECK(raw.hello() == GPUSHARE_OK);
    CHECK(raw.call(arrive(1, 1 << 20)) == GPUSHARE_OK);
    CHECK(raw.call(arrive(1, 1 << 20)) == GPUSHARE_INVALID_ARGUMENT);
    CHECK(raw.call(arrive(0, 1 << 20)) == GPUSHARE_INVALID_ARGUMENT);
    CHECK(raw.call(arrive(2, UINT64_MAX)) == GPUSHARE_EXCEEDS_CAPACITY);
    auto message = arrive(3, UINT64_MAX / 2 + 1);
    message.ephemeral_bytes = UINT64_MAX / 2 + 1;
    CHECK(raw.call(message) == GPUSHARE_EXCEEDS_CAPACITY);
    message = arrive(4, 1);
    message.weight = -1;
    CHECK(raw.call(message) == GPUSHARE_INVALID_ARGUMENT);
    message = arrive(5, 1);
    message.cls = 9;
    CHECK(raw.call(message) == GPUSHARE_INVALID_ARGUMENT);
    // The connection of a process that lives: its bytes stay promised.
  }
  while (shared.status().processes.size() != 1 || shared.status().processes[0].state != "owing")
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(shared.status().devices[0].promised_bytes == 1 << 20);
}

TEST_CASE("a session's class changes to one that there is, and to no other") {
  SharedService shared;
  RawProcess raw(shared);
  REQUIRE(raw.hello() == GPUSHARE_OK);
  REQUIRE(raw.call(arrive(1, kMiB)) == GPUSHARE_OK);
  const auto cls = [&shared] { return shared.status().sessions.at(0).cls; };
  CHECK(cls() == "guaranteed");
  for (const uint64_t none : {uint64_t{2}, UINT64_MAX}) {
    raw.tell(MessageType::kSetClass, 1, none);
    REQUIRE(raw.call(arrive(1, kMiB)) == GPUSHARE_INVALID_ARGUMENT);  // so the daemon has heard it
    CHECK(cls() == "guaranteed");
  }
  raw.tell(MessageType::kSetClass, 1, static_cast<uint64_t>(sched::SessionClass::kOpportunistic));
  REQUIRE(raw.call(arrive(1, kMiB)) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(cls() == "opportunistic");
}

TEST_CASE("a session that leaves inside its turn has the turn no more") {
  SharedService shared;
  RawProcess raw(shared), other(shared);
  for (RawProcess* each : {&raw, &other}) {
    REQUIRE(each->hello(client::kPassesTurns) == GPUSHARE_OK);
    REQUIRE(each->call(arrive(1, kMiB)) == GPUSHARE_OK);
  }
  raw.tell(MessageType::kReady, 1);
  raw.await(client::LeaseState::kBusy);
  const uint64_t epoch = raw.lease().look().epoch;
  raw.tell(MessageType::kLeave, 1);
  while (shared.status().sessions.size() != 1) {
  }
  CHECK(raw.lease().look().state == client::LeaseState::kFree);
  CHECK(raw.lease().look().epoch > epoch);
  other.tell(MessageType::kReady, 1);
  other.await(client::LeaseState::kBusy);
}

TEST_CASE("a process that names a device by its address gets one of a daemon whose devices have none") {
  SharedService shared;  // of the host device, which is at no address
  const RawProcess raw(shared);
  auto message = client::make_message<MessageType::kHello>();
  message.pci_address = 0x500;
  REQUIRE(raw.say(message));
  CHECK(client::fields_of<client::Welcome>(raw.answer()).code == GPUSHARE_OK);
}

TEST_CASE("limits of one user") {
  SharedService shared([](auto& options) {
    options.max_processes_per_user = 3;
    options.max_sessions_per_user = 2;
  });
  {
    RawProcess a(shared), b(shared);
    CHECK(a.hello() == GPUSHARE_OK);
    CHECK(b.hello() == GPUSHARE_OK);
    CHECK(a.call(arrive(1, 1)) == GPUSHARE_OK);
    CHECK(b.call(arrive(1, 1)) == GPUSHARE_OK);
    CHECK(b.call(arrive(2, 1)) == GPUSHARE_QUEUE_FULL);
  }
  // Connections that say nothing do not stay.
  RawProcess idle(shared);
  CHECK(idle.answer().empty());
}

TEST_CASE("who is beyond the limit of processes is told so") {
  SharedService shared([](auto& options) { options.max_processes_per_user = 3; });
  RawProcess a(shared), b(shared), c(shared);
  for (RawProcess* each : {&a, &b, &c}) CHECK(each->hello() == GPUSHARE_OK);
  client::RemoteOptions options;
  options.socket = shared.options.socket;
  // The daemon has closed many of these connections before it is sent anything.
  for (int i = 0; i < 30; ++i) {
    const base::Status asked = client::query_service(shared.options.socket).status();
    const base::Status opened = client::RemoteAuthority::open(options).status();
    for (const base::Status& refused : {asked, opened}) {
      CHECK(refused.code() == GPUSHARE_QUEUE_FULL);
      CHECK(refused.message().find("as many as allowed") != std::string::npos);
    }
  }
}

TEST_CASE("connections that say nothing keep nobody out") {
  SharedService shared([](auto& options) { options.max_processes_per_user = 3; });
  std::vector<std::unique_ptr<RawConnection>> silent;
  for (int i = 0; i < 30; ++i) silent.push_back(std::make_unique<RawConnection>(shared));
  RawProcess speaks(shared);
  CHECK(speaks.hello() == GPUSHARE_OK);
  CHECK(shared.status().processes.size() == 1);
}

TEST_CASE("a session that is paged out for room comes back though who asked for the room has gone") {
  enum class Goes { kLeaves, kDisconnects, kDisconnectsWithTheRoom };
  for (const Goes goes : {Goes::kLeaves, Goes::kDisconnects, Goes::kDisconnectsWithTheRoom}) {
    SharedService shared;  // 64 MiB
    auto asks = std::make_unique<RawProcess>(shared);
    RawProcess gives(shared);
    REQUIRE(asks->hello() == GPUSHARE_OK);
    REQUIRE(gives.hello() == GPUSHARE_OK);
    REQUIRE(asks->call(arrive(1, 30 * kMiB)) == GPUSHARE_OK);
    auto low = arrive(1, 30 * kMiB);
    low.cls = static_cast<uint32_t>(sched::SessionClass::kOpportunistic);
    REQUIRE(gives.call(low) == GPUSHARE_OK);
    REQUIRE(asks->say(room_message(sched::Giver::kSessions, 20 * kMiB, 7)));
    REQUIRE(client::fields_of<client::Reply>(asks->answer()).code == GPUSHARE_OK);
    REQUIRE_FALSE(gives.next({MessageType::kPageOut}).empty());
    if (goes == Goes::kDisconnectsWithTheRoom) {
      gives.tell(MessageType::kPageDone, 1);
      REQUIRE_FALSE(asks->next({MessageType::kRoomMade}).empty());
      asks.reset();
    } else {
      if (goes == Goes::kLeaves) {
        asks->tell(MessageType::kLeave, 1);
        while (shared.status().sessions.size() != 1) {
        }
      } else {
        asks.reset();
        eventually([&] { return is_owing(shared); });
      }
      gives.tell(MessageType::kPageDone, 1);
    }
    CHECK_FALSE(gives.next({MessageType::kPageIn}).empty());
    gives.tell(MessageType::kPageDone, 1);
  }
}

TEST_CASE("a session whose connection has closed is not waited for: another goes out, or none") {
  for (const bool was_told : {false, true}) {
    SharedService shared;  // 64 MiB
    RawProcess asks(shared), gives(shared);
    auto silent = std::make_unique<RawProcess>(shared);
    for (RawProcess* raw : {&asks, &gives, silent.get()}) REQUIRE(raw->hello() == GPUSHARE_OK);
    REQUIRE(asks.call(arrive(1, 20 * kMiB)) == GPUSHARE_OK);
    auto low = arrive(1, 20 * kMiB);
    low.cls = static_cast<uint32_t>(sched::SessionClass::kOpportunistic);
    REQUIRE(silent->call(low) == GPUSHARE_OK);
    const auto ask = [&] {
      REQUIRE(asks.say(room_message(sched::Giver::kSessions, 20 * kMiB, 7)));
      return client::fields_of<client::Reply>(asks.answer()).code;
    };
    const auto close = [&] {
      silent.reset();
      eventually([&] { return is_owing(shared); });
    };
    if (!was_told) close();
    REQUIRE(ask() == GPUSHARE_OK);
    if (was_told) {
      REQUIRE_FALSE(silent->next({MessageType::kPageOut}).empty());
      close();
    }
    CHECK_FALSE(asks.next({MessageType::kRoomMade}).empty());
    asks.tell(MessageType::kRoomUsed, 1);
    CHECK(ask() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
    REQUIRE(gives.call(low) == GPUSHARE_OK);
    REQUIRE(ask() == GPUSHARE_OK);
    CHECK_FALSE(gives.next({MessageType::kPageOut}).empty());
    gives.tell(MessageType::kPageDone, 1);
    CHECK_FALSE(asks.next({MessageType::kRoomMade}).empty());
  }
}

TEST_CASE("a session that says nothing goes out for another one when its stay is over") {
  const SharedService shared([](auto& options) { options.least_stay_ns = 50'000'000; });  // 64 MiB
  RawProcess silent(shared), waits(shared);
  REQUIRE(silent.hello() == GPUSHARE_OK);
  REQUIRE(waits.hello() == GPUSHARE_OK);
  auto message = arrive(1, 40 * kMiB);
  message.flags |= client::kAlternates;
  REQUIRE(silent.call(message) == GPUSHARE_OK);
  REQUIRE(waits.call(message) == GPUSHARE_OK);
  REQUIRE_FALSE(silent.next({MessageType::kPageOut}).empty());
  silent.tell(MessageType::kPageDone, 1);
  CHECK_FALSE(waits.next({MessageType::kAdmit}).empty());
}

TEST_CASE("random and mutated messages harm nobody else") {
  const bool share_lanes = GENERATE(false, true);
  CAPTURE(share_lanes);
  SharedService shared([&](auto& options) {
    options.share_lanes = share_lanes;
    options.lease_ns = 20'000'000;  // a turn that a hostile session got is soon the bystander's
    options.max_processes_per_user = options.max_sessions_per_user = 1'000'000;
  });
  INFO("seed " << seed());
  Random random(seed());
  setenv("GPUSHARE_PRIVATE_LANES", "1", 1);  // in a lane with others of its user it may be held up
  const auto bystander = shared.open();
  unsetenv("GPUSHARE_PRIVATE_LANES");
  executor::SessionOptions wanted;
  wanted.name = "bystander";
  wanted.persistent_bytes = wanted.ephemeral_bytes = 2 << 20;
  const auto session = bystander->open_session(wanted);
  REQUIRE(session.ok());
  const uint64_t rounds = number_from("GPUSHARE_TEST_MESSAGES", 20'000);
  std::unique_ptr<RawProcess> raw;
  for (uint64_t i = 0; i < rounds; ++i) {
    if (raw == nullptr) {
      raw = std::make_unique<RawProcess>(shared);
      if (uniform(random, 0, 9) != 0 && raw->hello() != GPUSHARE_OK) raw.reset();
      if (raw == nullptr) continue;
    }
    auto type = static_cast<MessageType>(uniform(random, 1, client::kMessageTypes - 1));
    // A process is believed what its context takes, up to a quarter of the device, until it has ended; this one does not, so
    // the bystander would rightly be paged out and stay so. contexts_test.cpp has what is believed.
    if (type == MessageType::kContext) type = MessageType::kPagePart;
    std::array<std::byte, sizeof(client::Arrive)> bytes{};
    size_t count = sizeof(client::SessionMessage);
    if (type == MessageType::kArrive) {
      auto message = arrive(uniform(random, 0, 5), uniform(random, 0, 40 << 20), uniform(random, 0, 2));
      message.ephemeral_bytes = uniform(random, 0, 3) == 0 ? uniform(random, 0, 40 << 20) : 0;
      message.flags |= uniform(random, 0, 1) != 0 ? client::kMayShareLane | client::kOwnClaim : 0;
      count = sizeof(message);
      std::memcpy(bytes.data(), &message, count);
    } else if (type == MessageType::kRangeHas) {
      auto message = client::make_message<MessageType::kRangeHas>();
      message.session = uniform(random, 0, 5);
      message.bytes = uniform(random, 0, 40 << 20);
      message.answer_ns = uniform(random, 0, 20'000'000);
      message.price_ns_per_byte = static_cast<double>(uniform(random, 0, 2));
      count = sizeof(message);
      std::memcpy(bytes.data(), &message, count);
    } else if (type == MessageType::kRoom) {
      auto message = room_message(static_cast<sched::Giver>(uniform(random, 0, sched::kGivers)),
                                  uniform(random, 0, 80 << 20), static_cast<uint32_t>(uniform(random, 0, 3)));
      message.session = uniform(random, 0, 5);
      message.elsewhere_bytes = uniform(random, 0, 1) == 0 ? random() : 0;
      message.commit = static_cast<uint32_t>(uniform(random, 0, 1));
      count = sizeof(message);
      std::memcpy(bytes.data(), &message, count);
    } else if (type == MessageType::kSetWorth) {
      auto message = client::make_message<MessageType::kSetWorth>();
      message.session = uniform(random, 0, 5);
      message.worth = uniform(random, 0, 1) == 0 ? std::bit_cast<double>(random()) : 1e300;
      message.until_ns = uniform(random, 0, 1) == 0 ? random() : base::host_now_ns() + 1'000'000;
      count = sizeof(message);
      std::memcpy(bytes.data(), &message, count);
    } else {
      const uint64_t value = uniform(random, 0, 1) == 0 ? random() : uniform(random, 0, 80 << 20);
      auto message = client::make_session_message(type, uniform(random, 0, 5), value);
      message.header.sequence = static_cast<uint32_t>(uniform(random, 0, 3));
      std::memcpy(bytes.data(), &message, count);
    }
    if (uniform(random, 0, 3) == 0) bytes[uniform(random, 0, count - 1)] = static_cast<std::byte>(random());
    if (uniform(random, 0, 15) == 0) count = uniform(random, 1, count);
    bool gone = !raw->send(std::span<const std::byte>(bytes.data(), count));
    std::array<std::byte, client::kMaxMessageBytes + 64> buffer;  // events and replies are read, mostly
    for (bool reads = uniform(random, 0, 3) != 0; reads;) {
      const int32_t code = client::receive_message(raw->socket.get(), buffer).status().code();
      reads = code == GPUSHARE_OK;
      gone = gone || code == GPUSHARE_UNAVAILABLE;
    }
    if (gone || uniform(random, 0, 99) == 0) raw.reset();
    if (i % 500 == 499) {
      raw.reset();
      CHECK((*session)->info().state == executor::SessionState::kResident);
      const auto now = shared.status();
      CHECK_FALSE(now.sessions.empty());
      CHECK(now.devices[0].promised_bytes <= now.devices[0].capacity_bytes);
    }
  }
  raw.reset();
  auto iteration = (*session)->begin(60'000'000'000);
  REQUIRE(iteration.ok());
  REQUIRE_OK((*iteration)->end());
}

TEST_CASE("a holder passes its turn to the session that the daemon chose, and to that alone") {
  const SharedService shared;
  RawProcess a(shared), b(shared), other(shared);
  REQUIRE(a.hello(client::kPassesTurns) == GPUSHARE_OK);
  REQUIRE(b.hello(client::kPassesTurns) == GPUSHARE_OK);
  REQUIRE(other.hello() == GPUSHARE_OK);  // of an older version: a page of its own
  CHECK(a.page->slots() == client::kSharedLeaseSlots);
  CHECK(other.page->slots() == client::kLeaseSlots);
  REQUIRE(a.call(arrive(1, kMiB)) == GPUSHARE_OK);
  REQUIRE(b.call(arrive(1, kMiB)) == GPUSHARE_OK);
  REQUIRE(other.call(arrive(1, kMiB)) == GPUSHARE_OK);
  CHECK(a.slot != b.slot);
  const auto has = [](const RawProcess& raw) {
    const client::LeaseState state = raw.lease().look().state;
    return state == client::LeaseState::kBusy || state == client::LeaseState::kWanted;
  };
  const auto heard = [&shared] { return shared.status().devices[0].turns; };  // and all that was sent before
  // The daemon takes offers back at each event, and makes them again: one that has stood for a while is made.
  const auto offered = [](const RawProcess& from, const RawProcess& to) {
    for (int stood = 0; stood < 100; stood = from.lease().offers(to.lease()) ? stood + 1 : 0)
      std::this_thread::sleep_for(std::chrono::microseconds(500));
  };
  a.tell(MessageType::kReady, 1);
  a.await(client::LeaseState::kBusy);
  // Nobody waits at b's bell: the daemon itself gives it the turn.
  b.tell(MessageType::kReady, 1);
  a.await(client::LeaseState::kWanted);
  REQUIRE(a.lease().change(a.lease().look(), client::LeaseState::kFree));
  a.page->pass_on(a.lease());
  CHECK_FALSE(has(b));
  a.tell(MessageType::kReturned, 1);
  b.await(client::LeaseState::kBusy);
  CHECK(heard() == 2);
  // A thread waits at a's: b passes the turn, and the daemon hears of it afterwards.
  a.lease().bell().expect(true);
  a.tell(MessageType::kReady, 1);
  b.await(client::LeaseState::kWanted);
  offered(b, a);
  const uint32_t rung = a.lease().bell().look();
  REQUIRE(b.lease().change(b.lease().look(), client::LeaseState::kFree));
  b.page->pass_on(b.lease());
  REQUIRE(has(a));
  CHECK(a.lease().bell().look() == rung + 1);
  b.tell(MessageType::kReturned, 1);
  while (heard() < 3) {
  }
  CHECK(has(a));
  // b asks, and gives up: what was offered to it is passed to nobody, and the process of another version gets the turn.
  b.lease().bell().expect(true);
  b.tell(MessageType::kReady, 1);
  a.await(client::LeaseState::kWanted);
  b.tell(MessageType::kNotReady, 1);
  other.tell(MessageType::kReady, 1);
  (void)heard();
  REQUIRE(a.lease().change(a.lease().look(), client::LeaseState::kFree));
  a.page->pass_on(a.lease());
  a.tell(MessageType::kReturned, 1);
  other.await(client::LeaseState::kBusy);
  CHECK_FALSE(has(a));
  CHECK_FALSE(has(b));
  // A turn that was passed to a session which gave up at the same time is told to it.
  a.lease().bell().expect(true);
  a.tell(MessageType::kReady, 1);
  other.await(client::LeaseState::kWanted);
  other.give_back(false);
  a.await(client::LeaseState::kBusy);
  b.tell(MessageType::kReady, 1);
  a.await(client::LeaseState::kWanted);
  offered(a, b);
  REQUIRE(a.lease().change(a.lease().look(), client::LeaseState::kFree));
  a.page->pass_on(a.lease());
  REQUIRE(has(b));
  b.tell(MessageType::kNotReady, 1);
  a.tell(MessageType::kReturned, 1);
  b.lease().bell().expect(false);
  std::array<std::byte, client::kMaxMessageBytes + 64> buffer;
  for (bool granted = false; !granted;) {
    const auto message = client::receive_message(b.socket.get(), buffer);
    if (message.status().code() == GPUSHARE_NOT_READY) {
      REQUIRE_OK(client::wait_readable(b.socket.get(), base::Deadline::after(30'000'000'000)));
      continue;
    }
    REQUIRE(message.ok());
    granted = *client::check_message(*message, client::Side::kDaemon) == MessageType::kGranted;
  }
  b.give_back(false);
}
