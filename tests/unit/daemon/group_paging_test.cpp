// Groups of the daemon that go out to host memory and come in, message by message: in parts, in part only, and those that
// come meanwhile.
// SPDX-License-Identifier: Apache-2.0
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "unit/daemon/raw_process.hpp"

using namespace gpushare;
using namespace gpushare::test;

namespace {

using client::MessageType;

// A process with one session, number 1. It keeps what the daemon tells it until the test asks for that.
struct Program : RawProcess {
  Program(const SharedService& shared, uint64_t bytes, sched::SessionClass cls, uint64_t group = 0)
      : RawProcess(shared) {
    REQUIRE(hello() == GPUSHARE_OK);
    auto message = arrive(1, bytes, group);
    message.cls = static_cast<uint32_t>(cls);
    REQUIRE(say(message));
    const client::Reply answered = reply();
    REQUIRE(answered.code == GPUSHARE_OK);
    slot = answered.value;
    admitted = !events.empty();
    events.clear();
  }
  client::Reply reply() const {
    for (;;) {
      const std::vector<std::byte> message =
          next({MessageType::kReply, MessageType::kAdmit, MessageType::kPageOut, MessageType::kPageIn,
                MessageType::kRoomMade, MessageType::kTurnBack});
      const auto type = client::check_message(message, client::Side::kDaemon);
      REQUIRE(type.ok());
      if (*type == MessageType::kReply) return client::fields_of<client::Reply>(message);
      events.push_back(*type);
    }
  }
  int32_t need(uint64_t bytes) const {
    auto message = client::make_message<MessageType::kNeed>(1);
    message.session = 1;
    message.persistent_bytes = bytes;
    REQUIRE(say(message));
    return reply().code;
  }
  int32_t asks_for_room(uint64_t bytes) const {
    REQUIRE(say(room_message(sched::Giver::kSessions, bytes)));
    return reply().code;
  }
  void says(MessageType type, uint64_t value = 0) const {
    tell(type, 1, value);
    heard();
  }
  // Waits until the daemon has heard all that was told.
  void heard() const {
    REQUIRE(say(client::make_session_message(MessageType::kContext, 0, 0, 1)));
    CHECK(reply().code == GPUSHARE_OK);
  }
  // The next thing that the daemon tells it, or has told it, is this.
  void hears(MessageType type) const {
    while (events.empty()) heard();
    const MessageType first = events.front();
    events.pop_front();
    REQUIRE(first == type);
  }
  bool admitted = false;  // at once
  mutable std::deque<MessageType> events;
};

// 64 MiB: a group of two opportunistic programs has 50, a guaranteed session 2.
struct Group {
  explicit Group(const SharedService& service)
      : shared(service),
        a(service, 50 * kMiB, sched::SessionClass::kOpportunistic, 7),
        b(service, 50 * kMiB, sched::SessionClass::kOpportunistic, 7),
        wants(service, 2 * kMiB, sched::SessionClass::kGuaranteed) {
    for (const Program* each : {&a, &b, &wants}) REQUIRE(each->admitted);
  }
  uint64_t promised_mib() const { return shared.status().devices[0].promised_bytes / kMiB; }
  // The guaranteed session has room made, so the group goes out.
  void begin_page_out() const {
    REQUIRE(wants.asks_for_room(20 * kMiB) == GPUSHARE_OK);
    for (const Program* each : {&a, &b}) each->hears(MessageType::kPageOut);
  }
  void both_begin() const {
    for (const Program* each : {&a, &b}) each->says(MessageType::kPagePart);
  }
  void both_say(MessageType type) const {
    for (const Program* each : {&a, &b}) each->says(type);
  }
  // The group goes out for so many MiB, and the rest cannot follow.
  void go_out_in_part(uint64_t mib) const {
    begin_page_out();
    both_begin();
    a.says(MessageType::kPagePart, mib * kMiB);
    b.says(MessageType::kPageOutFailed);
    a.says(MessageType::kPageDone);
    for (const Program* each : {&a, &b}) each->hears(MessageType::kAdmit);
    wants.hears(MessageType::kRoomMade);
  }
  const SharedService& shared;
  Program a, b, wants;
};

}  // namespace

TEST_CASE("parts of a group are promised to others once all of its sessions have begun to go out") {
  SharedService shared;
  const Group group(shared);
  group.begin_page_out();
  group.a.says(MessageType::kPagePart);
  group.a.says(MessageType::kPagePart, 30 * kMiB);
  CHECK(group.promised_mib() == 52);  // the other one may still get blocks on the device
  CHECK(group.wants.need(22 * kMiB) == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  if (GENERATE(true, false))
    group.b.says(MessageType::kPagePart);
  else
    group.b.says(MessageType::kPageDone);  // it had nothing to move
  group.wants.hears(MessageType::kRoomMade);
  CHECK(group.promised_mib() == 22);
  CHECK(group.wants.need(22 * kMiB) == GPUSHARE_OK);
  group.a.says(MessageType::kPagePart, UINT64_MAX);
  CHECK(group.promised_mib() == 22);
  group.both_say(MessageType::kPageDone);
  group.wants.says(MessageType::kRoomUsed);
  CHECK(group.wants.need(2 * kMiB) == GPUSHARE_OK);
  for (const Program* each : {&group.a, &group.b}) each->hears(MessageType::kPageIn);
  CHECK(group.promised_mib() == 52);
  group.both_say(MessageType::kPageDone);
  for (const Program* each : {&group.a, &group.b}) each->hears(MessageType::kAdmit);
}

TEST_CASE("one program alone is a group, and its parts are promised at once") {
  SharedService shared;
  const Program alone(shared, 50 * kMiB, sched::SessionClass::kOpportunistic, 7),
      wants(shared, 2 * kMiB, sched::SessionClass::kGuaranteed);
  REQUIRE(wants.asks_for_room(20 * kMiB) == GPUSHARE_OK);
  alone.hears(MessageType::kPageOut);
  alone.says(MessageType::kPagePart);
  CHECK(wants.need(22 * kMiB) == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  alone.says(MessageType::kPagePart, 10 * kMiB);
  CHECK(wants.need(22 * kMiB) == GPUSHARE_OK);
}

TEST_CASE("a group of which one session cannot go comes in again whole, and nobody was promised a part") {
  SharedService shared;
  const Group group(shared);
  group.begin_page_out();
  group.a.says(MessageType::kPagePart);
  group.a.says(MessageType::kPagePart, 30 * kMiB);
  group.b.says(MessageType::kPageOutFailed);
  group.a.says(MessageType::kPagePart, 10 * kMiB);
  CHECK(group.promised_mib() == 52);
  group.a.says(MessageType::kPageDone);
  for (const Program* each : {&group.a, &group.b}) each->hears(MessageType::kPageIn);
  group.both_say(MessageType::kPageDone);
  group.wants.hears(MessageType::kRoomMade);
  CHECK(group.wants.need(22 * kMiB) == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(group.promised_mib() == 52);
}

TEST_CASE("a session alone that has begun and cannot go on comes in again") {
  SharedService shared;
  const Program alone(shared, 50 * kMiB, sched::SessionClass::kOpportunistic, 7),
      wants(shared, 2 * kMiB, sched::SessionClass::kGuaranteed);
  REQUIRE(wants.asks_for_room(20 * kMiB) == GPUSHARE_OK);
  alone.hears(MessageType::kPageOut);
  alone.says(MessageType::kPagePart);
  alone.says(MessageType::kPageOutFailed);
  alone.hears(MessageType::kPageIn);
  alone.says(MessageType::kPageDone);
  wants.hears(MessageType::kRoomMade);
  CHECK(shared.status().devices[0].promised_bytes == 52 * kMiB);
}

TEST_CASE("a group that went out in part goes on as it is, and comes in whole when there is room again") {
  SharedService shared;
  Group group(shared);
  const auto owed = [&] {  // on the lines of all sessions
    uint64_t bytes = 0;
    for (const client::SessionStatus& each : shared.status().sessions) bytes += each.owed_bytes;
    return bytes;
  };
  CHECK(owed() == 0);
  group.go_out_in_part(12);
  CHECK(group.promised_mib() == 40);
  CHECK(owed() == 12 * kMiB);
  CHECK(group.wants.need(26 * kMiB) == GPUSHARE_OK);
  group.wants.says(MessageType::kRoomUsed);
  CHECK(group.promised_mib() == 64);
  // It has turns.
  group.a.says(MessageType::kReady);
  group.a.await(client::LeaseState::kBusy);
  group.a.give_back(false);
  // A process that comes meanwhile waits, since it would get its blocks on the device.
  const Program late(shared, 50 * kMiB, sched::SessionClass::kOpportunistic, 7);
  CHECK_FALSE(late.admitted);
  CHECK(group.wants.need(15 * kMiB) == GPUSHARE_OK);  // too little room still
  CHECK(group.promised_mib() == 53);
  CHECK(group.wants.need(14 * kMiB) == GPUSHARE_OK);
  for (const Program* each : std::vector<const Program*>{&group.a, &group.b, &late})
    each->hears(MessageType::kPageIn);
  CHECK(group.promised_mib() == 64);
  CHECK(owed() == 0);
  group.both_say(MessageType::kPageDone);
  late.says(MessageType::kPageDone);
  for (const Program* each : std::vector<const Program*>{&group.a, &group.b, &late})
    each->hears(MessageType::kAdmit);
  // It goes out and comes in as ever, once somebody has left: before that it is not asked again.
  CHECK(group.wants.need(2 * kMiB) == GPUSHARE_OK);
  CHECK(group.wants.asks_for_room(20 * kMiB) == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  {
    const Program other(shared, kMiB, sched::SessionClass::kGuaranteed);
    other.says(MessageType::kLeave);
  }
  group.begin_page_out();
  group.both_begin();
  group.a.says(MessageType::kPagePart, 12 * kMiB);
  CHECK(group.promised_mib() == 52);  // until the third has begun
  late.says(MessageType::kPageDone);
  CHECK(group.promised_mib() == 40);
}

TEST_CASE("room is for the session of a group that asked, and goes with it") {
  SharedService shared;
  const Program low(shared, 50 * kMiB, sched::SessionClass::kOpportunistic);
  const Program a(shared, 2 * kMiB, sched::SessionClass::kGuaranteed, 7);
  const Program b(shared, 2 * kMiB, sched::SessionClass::kGuaranteed, 7);
  REQUIRE(a.asks_for_room(20 * kMiB) == GPUSHARE_OK);
  low.hears(MessageType::kPageOut);
  SECTION("before it is made") {
    a.says(MessageType::kLeave);
    low.says(MessageType::kPageDone);
  }
  SECTION("when it is made") {
    low.says(MessageType::kPageDone);
    a.hears(MessageType::kRoomMade);
    a.says(MessageType::kLeave);
  }
  low.hears(MessageType::kPageIn);
  b.heard();
  CHECK(b.events.empty());
}

TEST_CASE("a group that comes in whole is asked to go out when that is done") {
  SharedService shared;
  const Group group(shared);
  const Program other(shared, kMiB, sched::SessionClass::kGuaranteed);
  group.go_out_in_part(12);
  CHECK(group.wants.need(26 * kMiB) == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  group.wants.says(MessageType::kRoomUsed);
  for (const Program* each : {&group.a, &group.b}) each->hears(MessageType::kPageIn);
  other.says(MessageType::kLeave);  // now it may be asked again
  REQUIRE(group.wants.asks_for_room(20 * kMiB) == GPUSHARE_OK);
  group.a.says(MessageType::kPagePart, 50 * kMiB);  // of no page-out
  CHECK(group.promised_mib() == 52);
  group.both_say(MessageType::kPageDone);
  for (const Program* each : {&group.a, &group.b}) each->hears(MessageType::kPageOut);
  group.both_begin();
  group.both_say(MessageType::kPageDone);
  group.wants.hears(MessageType::kRoomMade);
  CHECK(group.promised_mib() == 2);
}

TEST_CASE("a group that lacks bytes comes in without them where they do not fit") {
  SharedService shared;
  const Group group(shared);
  const Program other(shared, kMiB, sched::SessionClass::kGuaranteed);
  group.go_out_in_part(12);
  CHECK(group.wants.need(22 * kMiB) == GPUSHARE_OK);
  group.wants.says(MessageType::kRoomUsed);
  other.says(MessageType::kLeave);
  CHECK(group.promised_mib() == 60);
  group.begin_page_out();
  group.both_begin();
  group.both_say(MessageType::kPageDone);
  group.wants.hears(MessageType::kRoomMade);
  CHECK(group.promised_mib() == 22);
  group.wants.says(MessageType::kRoomUsed);
  for (const Program* each : {&group.a, &group.b}) each->hears(MessageType::kAdmit);
  CHECK(group.promised_mib() == 60);
  // A need that is granted is all that it has.
  CHECK(group.a.need(42 * kMiB) == GPUSHARE_OK);
  for (const Program* each : {&group.a, &group.b}) each->hears(MessageType::kPageIn);
  group.both_say(MessageType::kPageDone);
  CHECK(group.promised_mib() == 64);
}

TEST_CASE("sessions of a group end their page-in when a guaranteed session needs the room") {
  SharedService shared;
  const Group group(shared);
  group.begin_page_out();
  group.both_say(MessageType::kPageDone);
  group.wants.hears(MessageType::kRoomMade);
  group.wants.says(MessageType::kRoomUsed);
  for (const Program* each : {&group.a, &group.b}) each->hears(MessageType::kPageIn);
  REQUIRE(group.wants.asks_for_room(20 * kMiB) == GPUSHARE_OK);
  for (const Program* each : {&group.a, &group.b}) each->hears(MessageType::kTurnBack);
  group.both_say(MessageType::kPageDone);
  for (const Program* each : {&group.a, &group.b}) each->hears(MessageType::kAdmit);
  group.wants.hears(MessageType::kRoomMade);
  group.begin_page_out();
  group.a.says(MessageType::kPagePart, 30 * kMiB);  // on the host still
  group.b.says(MessageType::kPagePart);
  group.wants.hears(MessageType::kRoomMade);
  CHECK(group.wants.need(22 * kMiB) == GPUSHARE_OK);
}

TEST_CASE("sessions of a group that leave or die while it goes out leave the rest to the others") {
  SharedService shared;
  const bool leaves = GENERATE(true, false);
  auto group = std::make_unique<Group>(shared);
  group->begin_page_out();
  group->a.says(MessageType::kPagePart, 12 * kMiB);
  CHECK(group->promised_mib() == 52);
  if (leaves) {
    group->b.says(MessageType::kLeave);
    CHECK(group->promised_mib() == 40);
    group->a.says(MessageType::kPageDone);
    group->wants.hears(MessageType::kRoomMade);
    CHECK(group->promised_mib() == 2);
  } else {
    group->b.socket = {};  // its process lives: it answers nothing, and does not go
    group->a.says(MessageType::kPageDone);
    group->a.hears(MessageType::kPageIn);
    group->a.says(MessageType::kPageDone);
    group->wants.hears(MessageType::kRoomMade);
    CHECK(group->promised_mib() == 52);
  }
}
