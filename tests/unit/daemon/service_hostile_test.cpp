// The daemon's service against what breaks the protocol, and its messages in neighbouring versions.
// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cmath>
#include <cstring>
#include <thread>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>

#include "shim/group.hpp"
#include "support/random.hpp"
#include "support/shared_service.hpp"
#include "unit/daemon/raw_connection.hpp"

using namespace gpushare;
using namespace gpushare::test;
using client::MessageType;

namespace {

struct Raw : RawConnection {
  using RawConnection::RawConnection;
  // The next message that is no event; empty once the daemon has closed the connection.
  std::vector<std::byte> answer(std::vector<client::Descriptor>* descriptors = nullptr) const {
    return next({MessageType::kReply, MessageType::kWelcome}, descriptors);
  }
  int32_t hello(uint16_t flags = 0) {
    auto message = client::make_message<client::Hello>(MessageType::kHello);
    message.flags = flags;
    REQUIRE(say(message));
    std::vector<client::Descriptor> descriptors;
    const auto welcome = client::fields_of<client::Welcome>(answer(&descriptors));
    if (descriptors.size() == 1)
      page = *client::LeasePage::open(std::move(descriptors.front()), welcome.slots);
    return welcome.code;
  }
  client::Lease& lease() const { return page->lease(slot); }
  void await(client::LeaseState state) const {
    while (lease().look().state != state) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  void give_back(bool ready_again) {
    REQUIRE(lease().change(lease().look(), client::LeaseState::kFree));
    tell(MessageType::kReturned, 1, ready_again ? 1 : 0);
  }
  int32_t call(const client::Arrive& message, int file = -1) {
    REQUIRE(client::send_message(socket.get(), client::bytes_of(message), std::span(&file, file >= 0 ? 1 : 0))
                .ok());
    const auto reply = client::fields_of<client::Reply>(answer());
    slot = reply.value;
    return reply.code;
  }
  std::shared_ptr<client::LeasePage> page;
  uint32_t slot = 0;  // of the last session
};

client::Arrive arrive(uint64_t session, uint64_t persistent_bytes, uint64_t group = 0) {
  auto message = client::make_message<client::Arrive>(MessageType::kArrive, 1);
  message.session = session;
  message.persistent_bytes = persistent_bytes;
  message.flags = client::kMayQueue | client::kMayPage;
  message.group = group;
  client::put_text(message.name, "raw");
  return message;
}

}  // namespace

TEST_CASE("a message is checked before anything is believed") {
  const auto good = client::make_session_message(MessageType::kReady, 1);
  const auto code = [](const client::SessionMessage& message, size_t bytes) {
    return client::check_message(client::bytes_of(message).first(bytes)).status().code();
  };
  CHECK(code(good, sizeof(good)) == GPUSHARE_OK);
  CHECK(code(good, sizeof(good) - 1) == GPUSHARE_MALFORMED_INPUT);
  CHECK(code(good, 3) == GPUSHARE_MALFORMED_INPUT);
  auto bad = good;
  bad.header.mark = 7;
  CHECK(code(bad, sizeof(bad)) == GPUSHARE_MALFORMED_INPUT);
  bad = good;
  bad.header.major = 2;
  CHECK(code(bad, sizeof(bad)) == GPUSHARE_UNSUPPORTED);
  for (const uint16_t type : {uint16_t{0}, uint16_t{37}, uint16_t{9999}}) {
    bad = good;
    bad.header.type = type;
    CHECK(code(bad, sizeof(bad)) == GPUSHARE_MALFORMED_INPUT);
  }
  CHECK(client::reported(GPUSHARE_TIMED_OUT, "x").code() == GPUSHARE_TIMED_OUT);
  CHECK(client::reported(99999, "x").code() == GPUSHARE_UNKNOWN);
  CHECK(client::reported(99999, "x").native_code() == 99999);
}

TEST_CASE("neighbouring minor versions understand each other") {
  SharedService shared;
  Raw raw(shared);
  // A newer peer: a later minor version, more fields at the end.
  struct NewerHello {
    client::Hello hello;
    uint64_t more = 42;
  } newer;
  newer.hello = client::make_message<client::Hello>(MessageType::kHello);
  newer.hello.header.bytes = sizeof(newer);
  newer.hello.minor = client::kProtocolMinor + 1;
  REQUIRE(raw.say(newer));
  const auto welcome = client::fields_of<client::Welcome>(raw.answer());
  CHECK(welcome.code == GPUSHARE_OK);
  CHECK(welcome.minor == client::kProtocolMinor);
  // Fields that did not come are zero.
  auto reply = client::make_message<client::Reply>(MessageType::kReply);
  reply.code = 5;
  CHECK(client::fields_of<client::Reply>(client::bytes_of(reply).first(20)).code == 5);
  CHECK(client::fields_of<client::Reply>(client::bytes_of(reply).first(16)).code == 0);
}

TEST_CASE("the status is read by fields that are known") {
  client::ServiceStatus status;
  status.pid = 7;
  client::SessionStatus& session = status.sessions.emplace_back();
  session.name = "a\tb\nc";
  session.weight = 0.25;
  session.priority = -3;
  const std::string text = client::encode_status(status);
  auto read = client::parse_service_status(text);
  REQUIRE(read.ok());
  CHECK(read->pid == 7);
  CHECK(read->sessions[0].name == "a?b?c");
  CHECK(read->sessions[0].weight == 0.25);
  CHECK(read->sessions[0].priority == -3);
  read = client::parse_service_status("daemon\tpid=1\tnew=x\nunheard_of\ta=b\n");
  REQUIRE(read.ok());
  CHECK(read->pid == 1);
  for (const char* bad : {"", "daemon", "daemon\tpid=x\n", "device\tdevice=a\n", "daemon\tpid\n"})
    CHECK(client::parse_service_status(bad).status().code() == GPUSHARE_MALFORMED_INPUT);
}

TEST_CASE("what breaks the protocol ends the connection and nothing else") {
  SharedService shared;
  {
    Raw raw(shared);
    REQUIRE(raw.say(client::make_session_message(MessageType::kReady, 1)));  // before Hello
    CHECK(client::fields_of<client::Reply>(raw.answer()).code == GPUSHARE_MALFORMED_INPUT);
    CHECK(raw.answer().empty());
  }
  {
    Raw raw(shared);
    CHECK(raw.hello() == GPUSHARE_OK);
    REQUIRE(raw.say(client::make_message<client::Hello>(MessageType::kHello)));
    CHECK(client::fields_of<client::Reply>(raw.answer()).code == GPUSHARE_MALFORMED_INPUT);
    CHECK(raw.answer().empty());
  }
  {
    Raw raw(shared);
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

TEST_CASE("limits of one user") {
  SharedService shared([](auto& options) {
    options.max_processes_per_user = 3;
    options.max_sessions_per_user = 2;
  });
  {
    Raw a(shared), b(shared);
    CHECK(a.hello() == GPUSHARE_OK);
    CHECK(b.hello() == GPUSHARE_OK);
    CHECK(a.call(arrive(1, 1)) == GPUSHARE_OK);
    CHECK(b.call(arrive(1, 1)) == GPUSHARE_OK);
    CHECK(b.call(arrive(2, 1)) == GPUSHARE_QUEUE_FULL);
  }
  // Connections that say nothing do not stay.
  Raw idle(shared);
  CHECK(idle.answer().empty());
}

TEST_CASE("a session that is paged out for room comes back though who asked for the room has gone") {
  enum class Goes { kLeaves, kDisconnects, kDisconnectsWithTheRoom };
  for (const Goes goes : {Goes::kLeaves, Goes::kDisconnects, Goes::kDisconnectsWithTheRoom}) {
    SharedService shared;  // 64 MiB
    auto asks = std::make_unique<Raw>(shared);
    Raw gives(shared);
    REQUIRE(asks->hello() == GPUSHARE_OK);
    REQUIRE(gives.hello() == GPUSHARE_OK);
    REQUIRE(asks->call(arrive(1, 30 * kMiB)) == GPUSHARE_OK);
    auto low = arrive(1, 30 * kMiB);
    low.cls = static_cast<uint32_t>(sched::SessionClass::kOpportunistic);
    REQUIRE(gives.call(low) == GPUSHARE_OK);
    REQUIRE(asks->say(client::make_session_message(MessageType::kRoom, 1, 20 * kMiB, 7)));
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
        const auto owes = [&] {
          const auto processes = shared.status().processes;
          return std::any_of(processes.begin(), processes.end(),
                             [](const auto& each) { return each.state == "owing"; });
        };
        while (!owes()) {
        }
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
    Raw asks(shared), gives(shared);
    auto silent = std::make_unique<Raw>(shared);
    for (Raw* raw : {&asks, &gives, silent.get()}) REQUIRE(raw->hello() == GPUSHARE_OK);
    REQUIRE(asks.call(arrive(1, 20 * kMiB)) == GPUSHARE_OK);
    auto low = arrive(1, 20 * kMiB);
    low.cls = static_cast<uint32_t>(sched::SessionClass::kOpportunistic);
    REQUIRE(silent->call(low) == GPUSHARE_OK);
    const auto ask = [&] {
      REQUIRE(asks.say(client::make_session_message(MessageType::kRoom, 1, 20 * kMiB, 7)));
      return client::fields_of<client::Reply>(asks.answer()).code;
    };
    const auto close = [&] {
      silent.reset();
      const auto owes = [&] {
        const auto processes = shared.status().processes;
        return std::any_of(processes.begin(), processes.end(),
                           [](const auto& each) { return each.state == "owing"; });
      };
      while (!owes()) {
      }
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

TEST_CASE("sessions of a group have memory and turns together") {
  using client::LeaseState;
  SharedService shared;  // 64 MiB
  Raw a(shared), b(shared), other(shared);
  for (Raw* raw : {&a, &b, &other}) REQUIRE(raw->hello() == GPUSHARE_OK);
  const auto promised = [&] { return shared.status().devices[0].promised_bytes; };
  REQUIRE(a.call(arrive(1, 40 * kMiB, 7)) == GPUSHARE_OK);
  REQUIRE(b.call(arrive(1, 40 * kMiB, 7)) == GPUSHARE_OK);
  CHECK(promised() == 40 * kMiB);
  REQUIRE(other.call(arrive(1, 20 * kMiB)) == GPUSHARE_OK);
  auto more = arrive(2, 40 * kMiB, 8);
  more.flags = 0;
  CHECK(other.call(more) == GPUSHARE_DEVICE_OUT_OF_MEMORY);

  // Side by side, until somebody else wants the device; then it is free when both are done.
  a.tell(MessageType::kReady, 1);
  a.await(LeaseState::kBusy);
  b.tell(MessageType::kReady, 1);
  b.await(LeaseState::kBusy);
  CHECK(a.lease().look().state == LeaseState::kBusy);
  other.tell(MessageType::kReady, 1);
  a.await(LeaseState::kWanted);
  b.await(LeaseState::kWanted);
  a.lease().account(1, 1);
  a.give_back(true);
  for (int look = 0; look < 20; ++look) {
    REQUIRE(shared.status().devices[0].turns == 1);
    REQUIRE(other.lease().look().state == LeaseState::kFree);
  }
  b.give_back(true);
  other.await(LeaseState::kWanted);
  CHECK(a.lease().look().state == LeaseState::kFree);
  other.give_back(false);
  a.await(LeaseState::kBusy);
  b.await(LeaseState::kBusy);
  CHECK(shared.service->devices()[0]->sessions() == 2);

  // The claim is the last member's too.
  a.tell(MessageType::kLeave, 1);
  while (shared.status().sessions.size() != 2) {
  }
  CHECK(promised() == 60 * kMiB);
  CHECK(b.lease().look().state == LeaseState::kBusy);
  b.tell(MessageType::kLeave, 1);
  while (shared.status().sessions.size() != 1) {
  }
  CHECK(promised() == 20 * kMiB);
}

TEST_CASE("sessions that share a group's limits alone have memory and turns of their own") {
  using client::LeaseState;
  SharedService shared;  // 64 MiB
  Raw preloaded(shared), a(shared), b(shared);
  for (Raw* raw : {&preloaded, &a, &b}) REQUIRE(raw->hello() == GPUSHARE_OK);
  const auto limited = [](uint64_t session, uint64_t bytes, uint32_t flags = 0) {
    auto message = arrive(session, bytes, 7);
    message.flags |= client::kOwnClaim | flags;
    message.group_memory_bytes = 30 * kMiB;
    message.group_weight = 0.5;
    return message;
  };
  // A preloaded program of the group counts too, and was there before.
  REQUIRE(preloaded.call(arrive(1, 10 * kMiB, 7)) == GPUSHARE_OK);
  REQUIRE(a.call(limited(1, 8 * kMiB)) == GPUSHARE_OK);
  REQUIRE(b.call(limited(1, 8 * kMiB)) == GPUSHARE_OK);
  CHECK(shared.status().devices[0].promised_bytes == 26 * kMiB);
  CHECK(shared.service->devices()[0]->sessions() == 3);
  CHECK(a.call(limited(2, 5 * kMiB)) == GPUSHARE_QUOTA_EXCEEDED);
  auto larger = limited(2, 5 * kMiB);
  larger.group_memory_bytes = 0;  // as the first declared them
  CHECK(a.call(larger) == GPUSHARE_QUOTA_EXCEEDED);
  CHECK(a.call(limited(2, 4 * kMiB)) == GPUSHARE_OK);
  auto need = client::make_message<client::Need>(MessageType::kNeed, 1);
  need.session = 1;
  need.persistent_bytes = 11 * kMiB;
  REQUIRE(preloaded.say(need));
  CHECK(client::fields_of<client::Reply>(preloaded.answer()).code == GPUSHARE_QUOTA_EXCEEDED);
  need.persistent_bytes = 2 * kMiB;  // less is never refused
  REQUIRE(preloaded.say(need));
  CHECK(client::fields_of<client::Reply>(preloaded.answer()).code == GPUSHARE_OK);
  // Known to a daemon before: it has what it has.
  CHECK(b.call(limited(2, 20 * kMiB, client::kKnownBefore)) == GPUSHARE_OK);
  CHECK(b.call(limited(3, 1)) == GPUSHARE_QUOTA_EXCEEDED);

  // One has the turn at a time, unlike sessions with one claim.
  a.slot = b.slot = 0;
  a.tell(MessageType::kReady, 1);
  while (shared.status().devices[0].turns != 1) {
  }
  b.tell(MessageType::kReady, 1);
  while (shared.status().devices[0].turns != 1) {
  }
  for (const auto& session : shared.status().sessions) CHECK(session.group == 7);
  // Numbers that are none.
  auto odd = limited(9, 0);
  odd.group = 8;
  odd.group_weight = -1;
  CHECK(a.call(odd) == GPUSHARE_OK);
}

TEST_CASE(
    "how long a turn that is asked back may go on: at once for who ranks higher, long where others wait for "
    "memory alone") {
  SharedService shared([](auto& options) { options.policy = "priority"; });
  Raw low(shared), high(shared), waits(shared);
  for (Raw* each : {&low, &high, &waits}) REQUIRE(each->hello() == GPUSHARE_OK);
  auto message = arrive(1, 40 * kMiB);
  message.flags |= client::kNeverPages;
  REQUIRE(low.call(message) == GPUSHARE_OK);
  low.tell(MessageType::kReady, 1);
  low.await(client::LeaseState::kBusy);
  CHECK(low.lease().turn_ns() == 0);
  REQUIRE(waits.call(arrive(1, 40 * kMiB)) == GPUSHARE_OK);
  low.await(client::LeaseState::kWanted);
  eventually([&] { return low.lease().turn_ns() == 50'000'000; });
  // A session of its rank wants the turn; one that ranks higher does.
  REQUIRE(high.call(arrive(1, kMiB)) == GPUSHARE_OK);
  high.tell(MessageType::kReady, 1);
  eventually([&] { return low.lease().turn_ns() == 0; });
  high.tell(MessageType::kSetPriority, 1, 1);
  eventually([&] { return low.lease().turn_ns() == 1000; });
  low.give_back(true);
  high.await(client::LeaseState::kWanted);
  CHECK(high.lease().turn_ns() == 0);
  // It would have the turn again. It does not come, and the other has it.
  high.give_back(false);
  low.await(client::LeaseState::kWanted);
}

TEST_CASE("a cap lets a turn be as long as what is saved up, if nobody else waits") {
  SharedService shared;
  Raw raw(shared);
  REQUIRE(raw.hello() == GPUSHARE_OK);
  auto message = arrive(1, kMiB);
  message.cap = 0.5;
  REQUIRE(raw.call(message) == GPUSHARE_OK);
  raw.tell(MessageType::kReady, 1);
  raw.await(client::LeaseState::kWanted);
  CHECK(raw.lease().turn_ns() == 50'000'000);
}

TEST_CASE("a cap is a number above 0 and at most 1") {
  SharedService shared;
  Raw raw(shared);
  REQUIRE(raw.hello() == GPUSHARE_OK);
  auto message = arrive(1, kMiB);
  for (const double bad : {-0.1, 1.5, std::nan(""), static_cast<double>(INFINITY)}) {
    message.cap = bad;
    CHECK(raw.call(message) == GPUSHARE_INVALID_ARGUMENT);
  }
  message.cap = 0.25;
  REQUIRE(raw.call(message) == GPUSHARE_OK);
  REQUIRE(raw.call(arrive(2, kMiB)) == GPUSHARE_OK);  // of the same connection
  const auto caps = [&] {
    std::vector<double> all;
    for (const auto& session : shared.status().sessions) all.push_back(session.cap);
    return all;
  };
  CHECK(caps() == std::vector{0.25, 0.25});
  const auto set = [&](double share) {
    uint64_t bits = 0;
    std::memcpy(&bits, &share, sizeof bits);
    raw.tell(MessageType::kSetCap, 2, bits);
  };
  for (const double bad : {0.0, -0.1, 1.5, std::nan("")}) set(bad);
  set(0.5);
  while (caps() != std::vector{0.5, 0.5}) {
  }
  set(1);
  while (caps() != std::vector{0.0, 0.0}) {
  }
}

namespace {

// The page of a group of preloaded programs, and what one of them holds.
struct Page {
  explicit Page(uint64_t limit_bytes) : file(memfd_create("page", MFD_CLOEXEC)) {
    REQUIRE(ftruncate(file.get(), sizeof(shim::GroupPage)) == 0);
    void* memory = mmap(nullptr, sizeof(shim::GroupPage), PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
    REQUIRE(memory != MAP_FAILED);
    page = static_cast<shim::GroupPage*>(memory);
    page->magic = shim::kPageMagic;
    page->version = shim::kPageVersion;
    page->limits.device_bytes = limit_bytes;
    page->slots_used = 1;
  }
  ~Page() {
    if (program > 0) kill();
    munmap(page, sizeof(shim::GroupPage));
  }
  // A process that holds so much, and the lock of its slot.
  void hold(uint64_t bytes) {
    int ready[2];
    REQUIRE(pipe(ready) == 0);
    program = fork();
    if (program == 0) {
      struct flock lock {};
      lock.l_type = F_WRLCK;
      lock.l_whence = SEEK_SET;
      lock.l_len = 1;
      page->slots[0].identity = 1;
      page->slots[0].counted[3] = bytes;
      if (fcntl(file.get(), F_SETLK, &lock) != 0 || write(ready[1], "x", 1) != 1) _exit(1);
      for (;;) pause();
    }
    char word = 0;
    REQUIRE(read(ready[0], &word, 1) == 1);
    for (const int end : ready) close(end);
  }
  void kill() {
    ::kill(program, SIGKILL);
    waitpid(program, nullptr, 0);
    program = 0;
  }
  client::Descriptor file;
  shim::GroupPage* page = nullptr;
  pid_t program = 0;
};

}  // namespace

TEST_CASE("preloaded programs lend what they do not hold to the other sessions of their group") {
  SharedService shared;  // 64 MiB
  Raw preloaded(shared), late(shared), linked(shared);
  for (Raw* raw : {&preloaded, &late, &linked}) REQUIRE(raw->hello() == GPUSHARE_OK);
  const auto limited = [](uint64_t session, uint64_t bytes, uint64_t group) {
    auto message = arrive(session, bytes, group);
    message.flags |= client::kOwnClaim;
    message.group_memory_bytes = 40 * kMiB;
    message.group_weight = 0.5;
    return message;
  };
  const auto promised = [&] { return shared.status().devices[0].promised_bytes; };
  Page page(40 * kMiB);
  page.hold(12 * kMiB);
  REQUIRE(preloaded.call(arrive(1, 40 * kMiB, 7), page.file.get()) == GPUSHARE_OK);
  CHECK(promised() == 40 * kMiB);

  // The preloaded programs keep the bytes that they hold. The rest of their limit goes to the first session that asks.
  CHECK(linked.call(limited(1, 30 * kMiB, 7)) == GPUSHARE_QUOTA_EXCEEDED);
  CHECK(page.page->limits.device_bytes == 40 * kMiB);
  CHECK(page.page->lent_bytes == 0);
  REQUIRE(linked.call(limited(1, 16 * kMiB, 7)) == GPUSHARE_OK);
  CHECK(page.page->limits.device_bytes == 24 * kMiB);
  CHECK(page.page->lent_bytes == 16 * kMiB);
  CHECK(promised() == 40 * kMiB);
  auto need = client::make_message<client::Need>(MessageType::kNeed, 1);
  need.session = 1;
  const auto need_of = [&](const Raw& raw, uint64_t bytes) {
    need.persistent_bytes = bytes;
    REQUIRE(raw.say(need));
    return client::fields_of<client::Reply>(raw.answer()).code;
  };
  CHECK(need_of(linked, 28 * kMiB) == GPUSHARE_OK);
  CHECK(page.page->limits.device_bytes == 12 * kMiB);
  CHECK(need_of(linked, 29 * kMiB) == GPUSHARE_QUOTA_EXCEEDED);
  CHECK(need_of(preloaded, 12 * kMiB) == GPUSHARE_OK);  // it tells the limit that it sees
  CHECK(need_of(preloaded, 13 * kMiB) == GPUSHARE_QUOTA_EXCEEDED);
  CHECK(need_of(linked, 20 * kMiB) == GPUSHARE_OK);  // gives back
  CHECK(page.page->limits.device_bytes == 20 * kMiB);
  CHECK(page.page->lent_bytes == 20 * kMiB);
  CHECK(promised() == 40 * kMiB);

  // A program that was killed holds nothing.
  page.kill();
  CHECK(need_of(linked, 36 * kMiB) == GPUSHARE_OK);
  CHECK(page.page->limits.device_bytes == 4 * kMiB);
  linked.tell(MessageType::kLeave, 1);
  while (shared.status().sessions.size() != 1) {
  }
  CHECK(page.page->limits.device_bytes == 40 * kMiB);
  CHECK(page.page->lent_bytes == 0);
  CHECK(promised() == 40 * kMiB);

  // Preloaded programs that come later have what the others leave, or are refused.
  preloaded.tell(MessageType::kLeave, 1);
  REQUIRE(linked.call(limited(1, 30 * kMiB, 8)) == GPUSHARE_OK);
  REQUIRE(late.call(arrive(1, 40 * kMiB, 8), page.file.get()) == GPUSHARE_OK);
  CHECK(page.page->limits.device_bytes == 10 * kMiB);
  CHECK(promised() == 40 * kMiB);
  CHECK(linked.call(limited(2, 11 * kMiB, 8)) == GPUSHARE_QUOTA_EXCEEDED);
  late.tell(MessageType::kLeave, 1);
  REQUIRE(linked.call(limited(3, 10 * kMiB, 8)) == GPUSHARE_OK);
  CHECK(late.call(arrive(1, 40 * kMiB, 8), page.file.get()) == GPUSHARE_QUOTA_EXCEEDED);

  for (const uint64_t session : {1, 3}) linked.tell(MessageType::kLeave, session);
  while (!shared.status().sessions.empty()) {
  }
  REQUIRE(linked.call(limited(1, 4 * kMiB, 8)) == GPUSHARE_OK);
  REQUIRE(late.call(arrive(1, page.page->limits.device_bytes, 8), page.file.get()) == GPUSHARE_OK);
  CHECK(page.page->limits.device_bytes == 36 * kMiB);
  CHECK(page.page->lent_bytes == 4 * kMiB);
}

TEST_CASE("a file that is no page of preloaded programs, or is one no more, lends nothing and harms nobody") {
  SharedService shared;
  Raw preloaded(shared), linked(shared);
  for (Raw* raw : {&preloaded, &linked}) REQUIRE(raw->hello() == GPUSHARE_OK);
  uint64_t group = 1;
  const auto borrows = [&](
                           int file, const std::function<void()>& meanwhile = [] {}) {
    ++group;
    REQUIRE(preloaded.call(arrive(1, 32 * kMiB, group), file) == GPUSHARE_OK);
    meanwhile();
    auto message = arrive(1, 8 * kMiB, group);
    message.flags |= client::kOwnClaim;
    message.group_memory_bytes = 32 * kMiB;
    const int32_t code = linked.call(message);
    for (const Raw* raw : {&preloaded, &linked}) raw->tell(MessageType::kLeave, 1);
    while (!shared.status().sessions.empty()) {
    }
    return code;
  };
  CHECK(borrows(-1) == GPUSHARE_QUOTA_EXCEEDED);
  CHECK(borrows(STDIN_FILENO) == GPUSHARE_QUOTA_EXCEEDED);
  Page page(32 * kMiB);
  CHECK(borrows(page.file.get()) == GPUSHARE_OK);
  page.page->limits.device_bytes = shim::kNoLimit;
  CHECK(borrows(page.file.get()) == GPUSHARE_QUOTA_EXCEEDED);
  page.page->limits.device_bytes = 32 * kMiB;
  page.page->version = shim::kPageVersion - 1;
  CHECK(borrows(page.file.get()) == GPUSHARE_QUOTA_EXCEEDED);
  page.page->version = shim::kPageVersion;
  CHECK(borrows(page.file.get(), [&] { REQUIRE(ftruncate(page.file.get(), 100) == 0); }) ==
        GPUSHARE_QUOTA_EXCEEDED);
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
  std::unique_ptr<Raw> raw;
  for (uint64_t i = 0; i < rounds; ++i) {
    if (raw == nullptr) {
      raw = std::make_unique<Raw>(shared);
      if (uniform(random, 0, 9) != 0 && raw->hello() != GPUSHARE_OK) raw.reset();
      if (raw == nullptr) continue;
    }
    const auto type =
        static_cast<MessageType>(uniform(random, 1, static_cast<uint64_t>(MessageType::kLimit)));
    std::array<std::byte, sizeof(client::Arrive)> bytes{};
    size_t count = sizeof(client::SessionMessage);
    if (type == MessageType::kArrive) {
      auto message = arrive(uniform(random, 0, 5), uniform(random, 0, 40 << 20), uniform(random, 0, 2));
      message.ephemeral_bytes = uniform(random, 0, 3) == 0 ? uniform(random, 0, 40 << 20) : 0;
      message.flags |= uniform(random, 0, 1) != 0 ? client::kMayShareLane | client::kOwnClaim : 0;
      count = sizeof(message);
      std::memcpy(bytes.data(), &message, count);
    } else {
      auto message = client::make_session_message(type, uniform(random, 0, 5), random());
      message.header.sequence = static_cast<uint32_t>(uniform(random, 0, 3));
      std::memcpy(bytes.data(), &message, count);
    }
    if (uniform(random, 0, 3) == 0) bytes[uniform(random, 0, count - 1)] = static_cast<std::byte>(random());
    if (uniform(random, 0, 15) == 0) count = uniform(random, 1, count);
    const bool sent = raw->send(std::span<const std::byte>(bytes.data(), count));
    std::array<std::byte, client::kMaxMessageBytes + 64> buffer;  // events and replies are read, mostly
    if (uniform(random, 0, 3) != 0)
      while (client::receive_message(raw->socket.get(), buffer).ok()) {
      }
    if (!sent || client::hung_up(raw->socket.get()) || uniform(random, 0, 99) == 0) raw.reset();
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
  Raw a(shared), b(shared), other(shared);
  REQUIRE(a.hello(client::kPassesTurns) == GPUSHARE_OK);
  REQUIRE(b.hello(client::kPassesTurns) == GPUSHARE_OK);
  REQUIRE(other.hello() == GPUSHARE_OK);  // of an older version: a page of its own
  CHECK(a.page->slots() == client::kSharedLeaseSlots);
  CHECK(other.page->slots() == client::kLeaseSlots);
  REQUIRE(a.call(arrive(1, kMiB)) == GPUSHARE_OK);
  REQUIRE(b.call(arrive(1, kMiB)) == GPUSHARE_OK);
  REQUIRE(other.call(arrive(1, kMiB)) == GPUSHARE_OK);
  CHECK(a.slot != b.slot);
  const auto has = [](const Raw& raw) {
    const client::LeaseState state = raw.lease().look().state;
    return state == client::LeaseState::kBusy || state == client::LeaseState::kWanted;
  };
  const auto heard = [&shared] { return shared.status().devices[0].turns; };  // and all that was sent before
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
  (void)heard();
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
  (void)heard();
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
    granted = *client::check_message(*message) == MessageType::kGranted;
  }
  b.give_back(false);
}
