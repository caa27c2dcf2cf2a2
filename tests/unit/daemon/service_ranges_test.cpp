// Elastic ranges of different processes that ask each other through the daemon.
// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "executor/range.hpp"
#include "unit/daemon/raw_process.hpp"
#include "unit/daemon/service_sessions.hpp"

using namespace gpushare;
using namespace gpushare::test;

namespace {

using client::MessageType;

std::shared_ptr<executor::Range> open_range(executor::Session& session, uint64_t answer_ns = 0,
                                            std::function<uint64_t(uint64_t, uint64_t)> give_back = {}) {
  executor::RangeOptions options;
  options.name = "kv";
  options.reserved_bytes = 64 * kMiB;
  options.answer_ns = answer_ns;
  options.give_back = std::move(give_back);
  auto range = session.open_range(std::move(options));
  INFO(range.status().to_string());
  REQUIRE(range.ok());
  return *range;
}

std::string class_of(const SharedService& shared, const std::string& name) {
  for (const auto& session : shared.status().sessions)
    if (session.name == name) return session.cls;
  return {};
}

// A process with one session, number 1, that says each message when the test wants it said.
struct RangeOwner : RawProcess {
  RangeOwner(const SharedService& shared, uint64_t p_bytes,
             sched::SessionClass cls = sched::SessionClass::kGuaranteed)
      : RawProcess(shared) {
    REQUIRE(hello() == GPUSHARE_OK);
    auto message = arrive(1, p_bytes);
    message.flags = 0;
    message.cls = static_cast<uint32_t>(cls);
    REQUIRE(call(message) == GPUSHARE_OK);
  }
  int32_t need(uint64_t p_bytes) const {
    auto message = client::make_message<MessageType::kNeed>(1);
    message.session = 1;
    message.persistent_bytes = p_bytes;
    REQUIRE(say(message));
    return reply().code;
  }
  // Waits until the daemon has heard all that was told: it takes messages of different connections in any order.
  void heard() const {
    REQUIRE(say(client::make_session_message(MessageType::kContext, 0, 0, 1)));
    CHECK(reply().code == GPUSHARE_OK);
  }
  void has(uint64_t bytes, uint64_t answer_ns = kLong) const {
    auto message = client::make_message<MessageType::kRangeHas>();
    message.session = 1;
    message.bytes = bytes;
    message.answer_ns = answer_ns;
    REQUIRE(say(message));
    heard();
  }
  // True: bytes are on the way.
  bool ask(uint64_t bytes) const {
    REQUIRE(say(room_message(sched::Giver::kRanges, bytes)));
    return reply().value == 1;
  }
  int32_t asks_for_room(uint64_t bytes, sched::Giver from = sched::Giver::kSessions) const {
    REQUIRE(say(room_message(from, bytes)));
    return reply().code;
  }
  void ends_wait() const {
    REQUIRE(say(room_message(sched::Giver::kRanges, 0, 0)));
    CHECK(need(2 * kMiB) == GPUSHARE_OK);  // the daemon has heard it
  }
  uint64_t asked_for() const {
    return client::fields_of<client::SessionMessage>(next({MessageType::kRangeGive})).value;
  }
  // Has been asked for 20 MiB by `other`, which has 2 MiB of 64 and wants 32 more, and gives them.
  void gives_to(const RangeOwner& other) const {
    has(48 * kMiB);
    CHECK(need(50 * kMiB) == GPUSHARE_OK);
    REQUIRE(other.ask(20 * kMiB));
    CHECK(asked_for() == 20 * kMiB);
    CHECK(need(30 * kMiB) == GPUSHARE_OK);
    has(28 * kMiB);
  }

 private:
  client::Reply reply() const { return client::fields_of<client::Reply>(answer()); }
};

}  // namespace

TEST_CASE("bytes that a process gives are kept for the one that waits for them") {
  SharedService shared;
  const RangeOwner a(shared, 50 * kMiB), b(shared, 2 * kMiB);
  SECTION("the giver does not get them back first, and nobody is paged out for it") {
    a.gives_to(b);
    CHECK(a.need(50 * kMiB) == GPUSHARE_DEVICE_OUT_OF_MEMORY);
    CHECK(a.ask(20 * kMiB));  // it waits for its turn
    CHECK(b.need(34 * kMiB) == GPUSHARE_OK);
    b.has(32 * kMiB);
    CHECK(a.ask(20 * kMiB));
    CHECK(b.asked_for() == 20 * kMiB);
  }
  SECTION("until its wait is over") {
    a.gives_to(b);
    b.ends_wait();
    CHECK(a.need(50 * kMiB) == GPUSHARE_OK);
  }
  SECTION("not from sessions without ranges; the giver is then asked again at once") {
    const RangeOwner c(shared, 0);
    a.gives_to(b);
    CHECK(c.need(30 * kMiB) == GPUSHARE_OK);
    CHECK(b.ask(30 * kMiB));
    CHECK(a.asked_for() == 28 * kMiB);
  }
}

TEST_CASE("bytes that are kept for an opportunistic session are not kept from a guaranteed one") {
  SharedService shared;
  const auto low = sched::SessionClass::kOpportunistic;
  const RangeOwner a(shared, 50 * kMiB, low), b(shared, 2 * kMiB, low), c(shared, 0);
  c.has(0);
  a.gives_to(b);
  CHECK(a.need(50 * kMiB) == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(c.need(30 * kMiB) == GPUSHARE_OK);
}

TEST_CASE("a range is asked by a range of another process, and gives back what is missing") {
  SharedService shared;
  const auto first = SharedService::open(), second = SharedService::open();
  const auto a = open_session(*first, "a", 0, 2 * kMiB), b = open_session(*second, "b", 0, 2 * kMiB);
  std::mutex giving;  // a wait that lasts asks again, so a request may come when the other one has its bytes
  std::vector<uint64_t> asked;
  uint64_t has = 48 * kMiB;
  std::shared_ptr<executor::Range> theirs;
  theirs = open_range(*a, kLong, [&](uint64_t bytes, uint64_t) {
    const std::lock_guard lock(giving);
    asked.push_back(bytes);
    if (bytes > has) return uint64_t{0};
    const uint64_t rest = (has - bytes) / (2 * kMiB) * (2 * kMiB);
    const uint64_t given = has - rest;
    if (!theirs->decommit(rest, given).ok()) return uint64_t{0};
    has = rest;
    return given;
  });
  const auto ours = open_range(*b);
  REQUIRE_OK(theirs->commit(0, 48 * kMiB, 0));
  std::memset(reinterpret_cast<void*>(theirs->info().address), 0x66, 48 * kMiB);
  const auto refused = ours->commit(0, 32 * kMiB, 0);
  CHECK(refused.code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  const base::Status granted = ours->commit(0, 32 * kMiB, kLong);
  INFO(granted.to_string());
  CHECK(granted.ok());
  CHECK(theirs->info().requests >= 1);
  {
    // The room is the other one's as soon as it is given back, which is before the owner has noted it.
    const std::lock_guard lock(giving);
    CHECK(asked.front() >= 16 * kMiB);
    CHECK(asked.front() <= 32 * kMiB);
    CHECK(theirs->info().committed_bytes == has);
    CHECK(all_are(reinterpret_cast<void*>(theirs->info().address), has, 0x66));
  }
  CHECK(class_of(shared, "a") == "guaranteed");
  // Its session ends while it waits: nobody is asked for it any more.
  REQUIRE_OK(ours->close());
  REQUIRE_OK(b->close());
  REQUIRE_OK(theirs->commit(0, 48 * kMiB, kLong));
}

// The owner knows what it needs least, so nothing is copied.
TEST_CASE("an allocation of a guaranteed session asks ranges of opportunistic sessions of other processes") {
  SharedService shared;
  const auto first = SharedService::open(), second = SharedService::open();
  const bool lower = GENERATE(true, false), answers = GENERATE(true, false);
  auto options = need("a", 0, 2 * kMiB);
  if (lower) options.cls = sched::SessionClass::kOpportunistic;
  const auto a = open_session(*first, options);
  const auto b = open_session(*second, "b", 0, 2 * kMiB);
  std::shared_ptr<executor::Range> theirs;
  std::atomic<uint64_t> asked{0};
  theirs = open_range(*a, answers ? kLong : 50'000'000, [&](uint64_t bytes, uint64_t within_ns) -> uint64_t {
    asked += bytes;
    if (!answers) std::this_thread::sleep_for(std::chrono::nanoseconds(2 * within_ns));
    return answers && theirs->decommit(0, 48 * kMiB).ok() ? 48 * kMiB : 0;
  });
  REQUIRE_OK(theirs->commit(0, 48 * kMiB, 0));
  const auto block = b->alloc(memory::Kind::kModel, 40 * kMiB, 0);
  INFO(block.status().to_string());
  CHECK(block.ok() == lower);
  CHECK((asked > 0) == lower);
  // Who does not give has his session paged out.
  CHECK((a->info().state == executor::SessionState::kPagedOut) == (lower && !answers));
  if (lower && !answers) eventually([&] { return first->info()->paged_out_bytes_total == 48 * kMiB; });
  CHECK(first->info()->paged_out_bytes_total == (lower && !answers ? 48 * kMiB : 0));
}

// Bytes that somebody uses are neither copied nor asked for while bytes that nobody uses are enough.
TEST_CASE("a spare session of another process goes before a block is copied out or a range is asked") {
  SharedService shared;  // 64 MiB
  const auto first = SharedService::open(), second = SharedService::open();
  const auto spare = open_session(*second, "spare", 20 * kMiB, 2 * kMiB);
  REQUIRE_OK(spare->wait_admitted(kLong));
  REQUIRE_OK(spare->set_spare(1.0));
  auto lower = need("owner", 0, 2 * kMiB);
  lower.cls = sched::SessionClass::kOpportunistic;
  const auto owner = open_session(*second, lower);  // the daemon has heard of the spare one
  std::atomic<uint64_t> asked{0};
  const auto theirs = open_range(*owner, kLong, [&](uint64_t bytes, uint64_t) -> uint64_t {
    asked += bytes;
    return 0;
  });
  REQUIRE_OK(theirs->commit(0, 6 * kMiB, 0));
  lower.name = "holder";
  lower.allow_spill = true;
  const auto holder = open_session(*first, lower);
  (void)alloc(*holder, 12 * kMiB);
  const auto asker = open_session(*first, "asker", 0, 2 * kMiB);
  const auto info = first->info();
  const uint64_t bytes = info->capacity_bytes - info->promised_bytes + 10 * kMiB;
  if (GENERATE(false, true)) {
    const auto range = open_range(*asker);
    REQUIRE_OK(range->commit(0, bytes, kLong));
  } else {
    (void)alloc(*asker, bytes);
  }
  CHECK(spare->dropped());
  CHECK(asked == 0);
  CHECK(holder->info().spilled_bytes == 0);
  CHECK(first->info()->paged_out_bytes_total + second->info()->paged_out_bytes_total == 0);
}

TEST_CASE("the daemon is asked for what is spare, for ranges and for sessions, and for nothing else") {
  SharedService shared;
  const RangeOwner a(shared, 20 * kMiB), b(shared, 20 * kMiB, sched::SessionClass::kOpportunistic);
  for (const auto from : {sched::Giver::kHost, sched::Giver::kBlocks, sched::Giver::kBoundaries,
                          sched::Giver::kOwner, static_cast<sched::Giver>(200)})
    CHECK(a.asks_for_room(4 * kMiB, from) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(a.asks_for_room(4 * kMiB, sched::Giver::kSpare) == GPUSHARE_DEVICE_OUT_OF_MEMORY);
}

TEST_CASE("who asks for room of 0 bytes is refused, and holds up nobody else's") {
  SharedService shared;
  const RangeOwner a(shared, 50 * kMiB, sched::SessionClass::kOpportunistic), b(shared, 2 * kMiB),
      c(shared, 2 * kMiB);
  a.tell(MessageType::kAllowPaging, 1);
  a.heard();
  CHECK(c.asks_for_room(0) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(c.asks_for_room(0, sched::Giver::kSpare) == GPUSHARE_INVALID_ARGUMENT);
  REQUIRE(b.asks_for_room(20 * kMiB) == GPUSHARE_OK);
  (void)a.next({MessageType::kPageOut});
  a.tell(MessageType::kPageDone, 1);
  (void)b.next({MessageType::kRoomMade});
  CHECK(b.need(30 * kMiB) == GPUSHARE_OK);
}

TEST_CASE("a session waits for room with many threads, and not without limit") {
  SharedService shared;
  const RangeOwner a(shared, 50 * kMiB, sched::SessionClass::kOpportunistic), b(shared, 2 * kMiB),
      c(shared, 2 * kMiB);
  a.tell(MessageType::kAllowPaging, 1);
  a.heard();
  REQUIRE(b.asks_for_room(20 * kMiB) == GPUSHARE_OK);
  size_t waits = 0;
  while (waits < 1000 && c.asks_for_room(20 * kMiB) == GPUSHARE_OK) ++waits;
  CHECK(waits == 256);
  CHECK(b.asks_for_room(20 * kMiB) == GPUSHARE_OK);
}

TEST_CASE("a session that waits for room hears as soon as a page-out in parts has made enough") {
  SharedService shared;
  const RangeOwner a(shared, 50 * kMiB, sched::SessionClass::kOpportunistic), b(shared, 2 * kMiB);
  a.tell(MessageType::kAllowPaging, 1);
  a.tell(MessageType::kPagePart, 1, 10 * kMiB);  // it is not being paged out
  a.heard();
  REQUIRE(b.asks_for_room(20 * kMiB) == GPUSHARE_OK);
  (void)a.next({MessageType::kPageOut});
  a.tell(MessageType::kPagePart, 1, 10 * kMiB);
  a.heard();
  CHECK(b.need(30 * kMiB) == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  a.tell(MessageType::kPagePart, 1, 12 * kMiB);
  (void)b.next({MessageType::kRoomMade});
  CHECK(b.need(34 * kMiB) == GPUSHARE_OK);
  a.tell(MessageType::kPagePart, 1, UINT64_MAX);
  a.heard();
  b.tell(MessageType::kRoomUsed, 1);
  CHECK(b.need(60 * kMiB) == GPUSHARE_OK);
  a.tell(MessageType::kPageOutFailed, 1);  // too late
  a.heard();
  CHECK(b.need(62 * kMiB) == GPUSHARE_OK);
  CHECK(b.need(2 * kMiB) == GPUSHARE_OK);
}

namespace {

// a goes out for an allocation of b, which does not use the bytes, so a is on its way in again.
void begin_page_in(const RangeOwner& a, const RangeOwner& b) {
  a.tell(MessageType::kAllowPaging, 1);
  a.heard();
  REQUIRE(b.asks_for_room(20 * kMiB) == GPUSHARE_OK);
  (void)a.next({MessageType::kPageOut});
  a.tell(MessageType::kPageDone, 1);
  (void)b.next({MessageType::kRoomMade});
  b.tell(MessageType::kRoomUsed, 1);
  (void)a.next({MessageType::kPageIn});
}

}  // namespace

TEST_CASE("a page-in of an opportunistic session turns back for a guaranteed one of another process") {
  SharedService shared;  // 64 MiB
  const RangeOwner a(shared, 50 * kMiB, sched::SessionClass::kOpportunistic), b(shared, 2 * kMiB);
  begin_page_in(a, b);
  REQUIRE(b.asks_for_room(20 * kMiB) == GPUSHARE_OK);
  (void)a.next({MessageType::kTurnBack});
  CHECK(b.need(30 * kMiB) == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  if (GENERATE(true, false)) {
    a.tell(MessageType::kUnplaced, 1);
  } else {  // it was in already
    a.tell(MessageType::kPageDone, 1);
    (void)b.next({MessageType::kRoomMade});
    REQUIRE(b.asks_for_room(20 * kMiB) == GPUSHARE_OK);
    (void)a.next({MessageType::kPageOut});
    a.tell(MessageType::kPageDone, 1);
  }
  (void)b.next({MessageType::kRoomMade});
  CHECK(b.need(30 * kMiB) == GPUSHARE_OK);
  b.tell(MessageType::kRoomUsed, 1);
  CHECK(b.need(2 * kMiB) == GPUSHARE_OK);
  (void)a.next({MessageType::kPageIn});
  a.tell(MessageType::kPageDone, 1);
  a.heard();
}

TEST_CASE("a page-in turns back for a guaranteed session of another process that waits for admission") {
  SharedService shared([](daemon::ServiceOptions& options) { options.policy = "priority"; });  // 64 MiB
  const RangeOwner a(shared, 50 * kMiB, sched::SessionClass::kOpportunistic), b(shared, 2 * kMiB);
  begin_page_in(a, b);
  RawProcess c(shared);
  REQUIRE(c.hello() == GPUSHARE_OK);
  auto message = arrive(1, 30 * kMiB);
  message.priority = 1;  // it runs next: sessions are paged out for no other one
  REQUIRE(c.call(message) == GPUSHARE_OK);
  (void)a.next({MessageType::kTurnBack});
  const bool in_time = GENERATE(true, false), asks = GENERATE(true, false);
  if (asks) REQUIRE(b.asks_for_room(20 * kMiB) == GPUSHARE_OK);  // it comes first
  if (in_time) {
    a.tell(MessageType::kUnplaced, 1);
  } else {  // it was in already
    a.tell(MessageType::kPageDone, 1);
    (void)a.next({MessageType::kPageOut});
    a.tell(MessageType::kPageDone, 1);
  }
  if (asks) {
    (void)b.next({MessageType::kRoomMade});
    if (in_time) CHECK(b.need(30 * kMiB) == GPUSHARE_OK);
    b.tell(MessageType::kRoomUsed, 1);
  }
  (void)c.next({MessageType::kAdmit});
}

TEST_CASE("an allocation does not wait for the page-in of an opportunistic session of another process") {
  SharedService shared;  // 64 MiB
  executor::RuntimeOptions in_parts;
  in_parts.device = "shared";
  in_parts.spill_move_bytes = 2 * kMiB;
  auto opened = executor::Runtime::open(std::move(in_parts));
  REQUIRE(opened.ok());
  const auto first = *opened, second = SharedService::open();
  auto options = need("a", 2 * kMiB, 2 * kMiB);
  options.cls = sched::SessionClass::kOpportunistic;
  const auto a = open_session(*first, options);
  constexpr uint64_t kBytes = 48 * kMiB;
  const auto theirs = a->alloc(memory::Kind::kModel, kBytes, 0);
  REQUIRE(theirs.ok());
  std::memset(reinterpret_cast<void*>(*theirs), 0x91, kBytes);
  for (int round = 0; round < 10; ++round) {
    auto b = open_session(*second, "b", 2 * kMiB, 2 * kMiB);
    auto ours = b->alloc(memory::Kind::kModel, 40 * kMiB, 0);
    INFO(ours.status().to_string());
    REQUIRE(ours.ok());
    REQUIRE_OK(b->close());
    b = open_session(*second, "b", 2 * kMiB, 2 * kMiB);
    // The other one is on its way in.
    std::this_thread::sleep_for(std::chrono::milliseconds(round));
    ours = b->alloc(memory::Kind::kModel, 44 * kMiB, 0);
    INFO(ours.status().to_string());
    REQUIRE(ours.ok());
    std::memset(reinterpret_cast<void*>(*ours), 0x92, 44 * kMiB);
    REQUIRE_OK(b->close());
    REQUIRE_OK(a->wait_admitted(GPUSHARE_NO_TIMEOUT));
    CHECK(all_are(reinterpret_cast<void*>(*theirs), kBytes, 0x91));
    CHECK(first->check() == "");
  }
}

TEST_CASE("a process that does not answer for its range loses its class, and the other one learns its name") {
  SharedService shared;
  const auto first = SharedService::open(), second = SharedService::open();
  const auto a = open_session(*first, "a", 0, 2 * kMiB), b = open_session(*second, "b", 0, 2 * kMiB);
  std::atomic<bool> stop{false};
  const auto theirs = open_range(*a, 50'000'000, [&](uint64_t, uint64_t) {
    while (!stop) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return uint64_t{0};
  });
  REQUIRE_OK(theirs->commit(0, 48 * kMiB, 0));
  const auto ours = open_range(*b);
  const auto iteration = begin(*a);  // it cannot be paged out
  const base::Status late = ours->commit(0, 32 * kMiB, 1'000'000'000);
  CHECK(late.code() == GPUSHARE_TIMED_OUT);
  INFO(late.message());
  CHECK(late.message().find("session 'a' of process") != std::string::npos);
  CHECK(class_of(shared, "a") == "opportunistic");
  CHECK(theirs->info().committed_bytes == 48 * kMiB);
  // Once it gives bytes it is as before.
  REQUIRE_OK(theirs->decommit(0, 32 * kMiB));
  eventually([&] { return class_of(shared, "a") == "guaranteed"; });
  REQUIRE_OK(ours->commit(0, 32 * kMiB, kLong));
  stop = true;
  REQUIRE_OK(iteration->end());
}

TEST_CASE("a session whose silent range is closed has its class again") {
  SharedService shared;
  auto a = std::make_unique<RangeOwner>(shared, 50 * kMiB);
  const RangeOwner b(shared, 2 * kMiB);
  a->has(48 * kMiB, 1);
  CHECK(b.ask(20 * kMiB));
  const auto opportunistic = [&] {
    (void)b.ask(20 * kMiB);  // the daemon looks for who is late
    const auto sessions = shared.status().sessions;
    CHECK(sessions.size() == 2);
    return std::count_if(sessions.begin(), sessions.end(),
                         [](const auto& each) { return each.cls == "opportunistic"; });
  };
  eventually([&] { return opportunistic() == 1; });
  a->socket = {};  // its process lives, and has a range no more
  eventually([&] { return opportunistic() == 0; });
}

TEST_CASE("a process that gives nothing back says so, and keeps its class") {
  SharedService shared;
  const auto runtime = SharedService::open();
  const auto a = open_session(*runtime, "a", 0, 2 * kMiB);
  std::atomic<int> asked{0};
  const auto theirs = open_range(*a, kLong, [&](uint64_t, uint64_t) {
    ++asked;
    return uint64_t{0};
  });
  REQUIRE_OK(theirs->commit(0, 48 * kMiB, 0));
  const RangeOwner b(shared, 2 * kMiB);
  CHECK(b.ask(20 * kMiB));
  eventually([&] { return !b.ask(20 * kMiB); });  // no bytes are on the way any more
  CHECK(asked > 0);
  CHECK(class_of(shared, "a") == "guaranteed");
}

TEST_CASE("what a process that went was asked for is asked of others") {
  SharedService shared;
  auto first = SharedService::open();
  const auto second = SharedService::open();
  auto a = open_session(*first, "a", 0, 2 * kMiB);
  const auto b = open_session(*second, "b", 0, 2 * kMiB);
  std::atomic<bool> asked{false}, stop{false};
  auto theirs = open_range(*a, kLong, [&](uint64_t, uint64_t) {
    asked = true;
    while (!stop) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return uint64_t{0};
  });
  REQUIRE_OK(theirs->commit(0, 48 * kMiB, 0));
  const auto ours = open_range(*b);
  base::Status granted;
  std::thread waits([&] { granted = ours->commit(0, 40 * kMiB, kLong); });
  eventually([&] { return asked.load(); });
  stop = true;
  REQUIRE_OK(theirs->close());
  REQUIRE_OK(a->close());
  waits.join();
  INFO(granted.to_string());
  CHECK(granted.ok());
  CHECK(ours->info().committed_bytes == 40 * kMiB);
}
