// Groups of the daemon's sessions, message by message: memory and turns together, limits alone, caps, and what
// preloaded programs lend.
// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>

#include "daemon/group_page.hpp"
#include "shim/group.hpp"
#include "unit/daemon/raw_process.hpp"

using namespace gpushare;
using namespace gpushare::test;
using client::MessageType;

TEST_CASE("a group counts as the best class of its members, whoever told last") {
  constexpr auto kOpportunistic = static_cast<uint32_t>(sched::SessionClass::kOpportunistic);
  SharedService shared;
  RawProcess a(shared), b(shared);
  for (RawProcess* raw : {&a, &b}) REQUIRE(raw->hello() == GPUSHARE_OK);
  const auto all_are = [&](const std::string& cls) {
    eventually([&] {
      const auto sessions = shared.status().sessions;
      return std::all_of(sessions.begin(), sessions.end(), [&](const auto& each) { return each.cls == cls; });
    });
  };
  auto lower = arrive(1, 8 * kMiB, 7);
  lower.cls = kOpportunistic;
  REQUIRE(b.call(lower) == GPUSHARE_OK);
  all_are("opportunistic");
  REQUIRE(a.call(arrive(1, 8 * kMiB, 7)) == GPUSHARE_OK);  // a guaranteed one joins
  all_are("guaranteed");
  b.tell(MessageType::kSetClass, 1, kOpportunistic);
  REQUIRE(b.call(lower) == GPUSHARE_INVALID_ARGUMENT);  // so the daemon has heard it
  all_are("guaranteed");
  a.tell(MessageType::kLeave, 1);
  all_are("opportunistic");
}

TEST_CASE("sessions of a group have memory and turns together") {
  using client::LeaseState;
  SharedService shared;  // 64 MiB
  RawProcess a(shared), b(shared), other(shared);
  for (RawProcess* raw : {&a, &b, &other}) REQUIRE(raw->hello() == GPUSHARE_OK);
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

TEST_CASE("a turn of a group is billed once, whatever its members measured") {
  using client::LeaseState;
  SharedService shared;
  RawProcess a(shared), b(shared), c(shared);
  for (RawProcess* raw : {&a, &b, &c}) {
    REQUIRE(raw->hello() == GPUSHARE_OK);
    REQUIRE(raw->call(arrive(1, 10 * kMiB, 7)) == GPUSHARE_OK);
  }
  for (RawProcess* raw : {&a, &b, &c}) {
    raw->tell(MessageType::kReady, 1);
    raw->await(LeaseState::kBusy);
  }
  for (RawProcess* raw : {&a, &b, &c}) {  // each measures more than the turn was long
    raw->lease().account(1'000'000'000'000, 1);
    raw->give_back(false);
  }
  const auto share = [&shared] {
    double sum = 0;
    for (const auto& session : shared.status().sessions) sum += session.share;
    return sum;
  };
  eventually([&] { return share() > 0; });
  CHECK(share() == Approx(1).epsilon(1e-12));  // to the nanosecond
}

TEST_CASE("sessions that share a group's limits alone have memory and turns of their own") {
  using client::LeaseState;
  SharedService shared;  // 64 MiB
  RawProcess preloaded(shared), a(shared), b(shared);
  for (RawProcess* raw : {&preloaded, &a, &b}) REQUIRE(raw->hello() == GPUSHARE_OK);
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
  auto need = client::make_message<MessageType::kNeed>(1);
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
  RawProcess low(shared), high(shared), waits(shared);
  for (RawProcess* each : {&low, &high, &waits}) REQUIRE(each->hello() == GPUSHARE_OK);
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
  RawProcess raw(shared);
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
  RawProcess raw(shared);
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
  // What the programs may have on a device.
  uint64_t left(int place = 0) const { return shim::device_limit(*page, place); }
  ~Page() {
    if (program > 0) kill();
    munmap(page, sizeof(shim::GroupPage));
  }
  // A process that holds so much of a device, and the lock of its slot.
  void hold(uint64_t bytes, int place = 0) {
    int ready[2];
    REQUIRE(pipe(ready) == 0);
    program = fork();
    if (program == 0) {
      struct flock lock {};
      lock.l_type = F_WRLCK;
      lock.l_whence = SEEK_SET;
      lock.l_len = 1;
      page->slots[0].identity = 1;
      page->slots[0].counted[place] = bytes;
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

TEST_CASE("a class that a group was given counts once one program tells it, though another cannot") {
  constexpr auto kOpportunistic = static_cast<uint32_t>(sched::SessionClass::kOpportunistic);
  SharedService shared;
  RawProcess runs(shared), stopped(shared), late(shared);
  Page page(40 * kMiB);
  for (RawProcess* raw : {&stopped, &runs}) {
    REQUIRE(raw->hello() == GPUSHARE_OK);
    REQUIRE(raw->call(arrive(1, 40 * kMiB, 7), page.file.get()) == GPUSHARE_OK);
  }
  const auto all_are = [&](const std::string& cls) {
    const auto sessions = shared.status().sessions;
    return std::all_of(sessions.begin(), sessions.end(), [&](const auto& each) { return each.cls == cls; });
  };
  const auto tell = [&](uint32_t cls) {
    runs.tell(MessageType::kSetClass, 1, cls);
    REQUIRE(runs.call(arrive(1, 40 * kMiB, 7)) == GPUSHARE_INVALID_ARGUMENT);  // so the daemon has heard it
  };
  tell(kOpportunistic);
  CHECK(all_are("guaranteed"));  // a word of the program alone
  page.page->share.cls = kOpportunistic;
  page.page->share.said = shim::Share::kClass;
  tell(kOpportunistic);
  CHECK(all_are("opportunistic"));
  REQUIRE(late.hello() == GPUSHARE_OK);
  REQUIRE(late.call(arrive(1, 40 * kMiB, 7), page.file.get()) == GPUSHARE_OK);
  CHECK(all_are("opportunistic"));  // it has the class on the page, too
  runs.tell(MessageType::kLeave, 1);
  eventually([&] { return shared.status().sessions.size() == 2; });
  CHECK(all_are("opportunistic"));
}

TEST_CASE("the programs of a group hear as what they count once the better of them has gone") {
  constexpr auto kOpportunistic = static_cast<uint64_t>(sched::SessionClass::kOpportunistic);
  SharedService shared;
  RawProcess better(shared), other(shared);
  Page page(40 * kMiB);
  for (RawProcess* raw : {&better, &other}) {
    REQUIRE(raw->hello() == GPUSHARE_OK);
    REQUIRE(raw->call(arrive(1, 40 * kMiB, 7), page.file.get()) == GPUSHARE_OK);
  }
  other.tell(MessageType::kSetClass, 1, kOpportunistic);
  REQUIRE(other.call(arrive(1, 40 * kMiB, 7)) == GPUSHARE_INVALID_ARGUMENT);  // what came before is skipped
  better.tell(MessageType::kLeave, 1);
  const auto heard = client::fields_of<client::SessionMessage>(other.next({MessageType::kCountsAs}));
  CHECK(heard.value == kOpportunistic);
}

TEST_CASE("a group's page is read in memory and on local disks, and refused on any other file system") {
  constexpr long kXfs = 0x58465342;
  daemon::Patience patience;
  const auto page = std::make_unique<shim::GroupPage>();
  page->magic = shim::kPageMagic;
  page->version = shim::kPageVersion;
  // Whatever these folders lie on here.
  for (const char* folder : {"/dev/shm", "/tmp", "/var/tmp", "."}) {
    std::string path = std::string(folder) + "/gpushare-page-XXXXXX";
    client::Descriptor file(mkostemp(path.data(), O_CLOEXEC));
    if (file.get() < 0) continue;
    REQUIRE(unlink(path.c_str()) == 0);
    REQUIRE(write(file.get(), page.get(), sizeof *page) == static_cast<ssize_t>(sizeof *page));
    struct statfs system {};
    REQUIRE(fstatfs(file.get(), &system) == 0);
    const auto type = static_cast<long>(system.f_type);
    INFO(folder << " lies on " << type);
    const bool local =
        type == TMPFS_MAGIC || type == EXT4_SUPER_MAGIC || type == kXfs || type == BTRFS_SUPER_MAGIC;
    CHECK((daemon::GroupPage::open(std::move(file), 0, getuid(), patience) != nullptr) == local);
  }
}

TEST_CASE("preloaded programs lend what they do not hold to the other sessions of their group") {
  SharedService shared;  // 64 MiB
  RawProcess preloaded(shared), late(shared), linked(shared);
  for (RawProcess* raw : {&preloaded, &late, &linked}) REQUIRE(raw->hello() == GPUSHARE_OK);
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
  CHECK(page.left() == 40 * kMiB);
  CHECK(page.page->lent_bytes[0] == 0);
  REQUIRE(linked.call(limited(1, 16 * kMiB, 7)) == GPUSHARE_OK);
  CHECK(page.left() == 24 * kMiB);
  CHECK(page.page->lent_bytes[0] == 16 * kMiB);
  CHECK(promised() == 40 * kMiB);
  auto need = client::make_message<MessageType::kNeed>(1);
  need.session = 1;
  const auto need_of = [&](const RawProcess& raw, uint64_t bytes) {
    need.persistent_bytes = bytes;
    REQUIRE(raw.say(need));
    return client::fields_of<client::Reply>(raw.answer()).code;
  };
  CHECK(need_of(linked, 28 * kMiB) == GPUSHARE_OK);
  CHECK(page.left() == 12 * kMiB);
  CHECK(need_of(linked, 29 * kMiB) == GPUSHARE_QUOTA_EXCEEDED);
  CHECK(need_of(preloaded, 12 * kMiB) == GPUSHARE_OK);  // it tells the limit that it sees
  CHECK(need_of(preloaded, 13 * kMiB) == GPUSHARE_QUOTA_EXCEEDED);
  CHECK(need_of(linked, 20 * kMiB) == GPUSHARE_OK);  // gives back
  CHECK(page.left() == 20 * kMiB);
  CHECK(page.page->lent_bytes[0] == 20 * kMiB);
  for (const client::SessionStatus& each : shared.status().sessions)
    CHECK(each.owed_bytes == (each.persistent_bytes == 20 * kMiB && each.held_bytes > 0 ? 20 * kMiB : 0));
  CHECK(promised() == 40 * kMiB);

  // A program that was killed holds nothing.
  page.kill();
  CHECK(need_of(linked, 36 * kMiB) == GPUSHARE_OK);
  CHECK(page.left() == 4 * kMiB);
  linked.tell(MessageType::kLeave, 1);
  while (shared.status().sessions.size() != 1) {
  }
  CHECK(page.left() == 40 * kMiB);
  CHECK(page.page->lent_bytes[0] == 0);
  CHECK(promised() == 40 * kMiB);

  // Preloaded programs that come later have what the others leave, or are refused.
  preloaded.tell(MessageType::kLeave, 1);
  REQUIRE(linked.call(limited(1, 30 * kMiB, 8)) == GPUSHARE_OK);
  REQUIRE(late.call(arrive(1, 40 * kMiB, 8), page.file.get()) == GPUSHARE_OK);
  CHECK(page.left() == 10 * kMiB);
  CHECK(promised() == 40 * kMiB);
  CHECK(linked.call(limited(2, 11 * kMiB, 8)) == GPUSHARE_QUOTA_EXCEEDED);
  late.tell(MessageType::kLeave, 1);
  REQUIRE(linked.call(limited(3, 10 * kMiB, 8)) == GPUSHARE_OK);
  CHECK(late.call(arrive(1, 40 * kMiB, 8), page.file.get()) == GPUSHARE_QUOTA_EXCEEDED);

  for (const uint64_t session : {1, 3}) linked.tell(MessageType::kLeave, session);
  while (!shared.status().sessions.empty()) {
  }
  REQUIRE(linked.call(limited(1, 4 * kMiB, 8)) == GPUSHARE_OK);
  REQUIRE(late.call(arrive(1, page.left(), 8), page.file.get()) == GPUSHARE_OK);
  CHECK(page.left() == 36 * kMiB);
  CHECK(page.page->lent_bytes[0] == 4 * kMiB);
}

TEST_CASE("each device's daemon lends of the group's limit on its own device") {
  SharedService first, second;
  RawProcess on_first(first), on_second(second), linked(second), unknown(second);
  Page page(40 * kMiB);
  page.page->devices[0] = shim::device_word(0x3b00);
  page.page->devices[1] = shim::device_word(0x3c00);
  page.hold(30 * kMiB);  // of the first
  REQUIRE(on_first.hello(0, 0x3b00) == GPUSHARE_OK);
  REQUIRE(on_second.hello(0, 0x3c00) == GPUSHARE_OK);
  REQUIRE(unknown.hello(0, 0x3d00) == GPUSHARE_OK);
  REQUIRE(linked.hello() == GPUSHARE_OK);
  RawProcess linked_on_first(first);
  REQUIRE(linked_on_first.hello() == GPUSHARE_OK);
  REQUIRE(on_first.call(arrive(1, 40 * kMiB, 7), page.file.get()) == GPUSHARE_OK);
  REQUIRE(on_second.call(arrive(1, 40 * kMiB, 7), page.file.get()) == GPUSHARE_OK);
  const auto borrows = [](RawProcess& raw, uint64_t session, uint64_t bytes) {
    auto message = arrive(session, bytes, 7);
    message.flags |= client::kOwnClaim;
    message.group_memory_bytes = 40 * kMiB;
    return raw.call(message);
  };
  // What is held of the first device does not matter on the second.
  CHECK(borrows(linked, 1, 16 * kMiB) == GPUSHARE_OK);
  CHECK(page.left(0) == 40 * kMiB);
  CHECK(page.left(1) == 24 * kMiB);
  CHECK(borrows(linked_on_first, 1, 16 * kMiB) == GPUSHARE_QUOTA_EXCEEDED);
  CHECK(borrows(linked_on_first, 1, 10 * kMiB) == GPUSHARE_OK);
  CHECK(page.left(0) == 30 * kMiB);
  CHECK(page.left(1) == 24 * kMiB);
  // A lower limit leaves the loans, and less than them leaves nothing.
  page.page->limits.device_bytes = 12 * kMiB;
  CHECK(page.left(0) == 2 * kMiB);
  CHECK(page.left(1) == 0);
  page.page->limits.device_bytes = 40 * kMiB;
  linked.tell(MessageType::kLeave, 1);
  while (second.status().sessions.size() != 1) {
  }
  CHECK(page.left(0) == 30 * kMiB);
  CHECK(page.left(1) == 40 * kMiB);
  // A device that the page does not name: the programs there lend nothing.
  on_second.tell(MessageType::kLeave, 1);
  while (!second.status().sessions.empty()) {
  }
  REQUIRE(unknown.call(arrive(1, 40 * kMiB, 8), page.file.get()) == GPUSHARE_OK);
  auto message = arrive(1, 8 * kMiB, 8);
  message.flags |= client::kOwnClaim;
  message.group_memory_bytes = 40 * kMiB;
  CHECK(linked.call(message) == GPUSHARE_QUOTA_EXCEEDED);
}

TEST_CASE("a file that is no page of preloaded programs, or is one no more, lends nothing and harms nobody") {
  SharedService shared;
  RawProcess preloaded(shared), linked(shared);
  for (RawProcess* raw : {&preloaded, &linked}) REQUIRE(raw->hello() == GPUSHARE_OK);
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
    for (const RawProcess* raw : {&preloaded, &linked}) raw->tell(MessageType::kLeave, 1);
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
