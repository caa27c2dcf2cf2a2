// What one user may cost the daemon and take from others: lines of the log, time, weight and rank; and names of other users.
// SPDX-License-Identifier: Apache-2.0
#include "daemon/user_limits.hpp"

#include <bit>
#include <cmath>
#include <limits>
#include <string>

#include "base/utf8.hpp"
#include "support/log_lines.hpp"
#include "unit/daemon/raw_process.hpp"

using namespace gpushare;
using namespace gpushare::test;
using client::MessageType;

TEST_CASE("a user gets some warnings in the log, and the number of the rest") {
  LogLines log;
  daemon::LogLimit limit;
  uint64_t now_ns = 1000;
  for (int i = 0; i < 1000; ++i) limit.warn(7, "about 7", now_ns += 1000);
  limit.warn(8, "about 8", now_ns);
  CHECK(log.all().size() == daemon::LogLimit::kLines + 1);
  CHECK(log.all().back() == "about 8");
  CHECK(limit.left_out() == 990);
  const uint64_t wait_ns = limit.tick(now_ns);
  CHECK(wait_ns < daemon::LogLimit::kWindowNs);
  CHECK(log.all().size() == daemon::LogLimit::kLines + 1);
  CHECK(limit.tick(now_ns + wait_ns) == UINT64_MAX);
  REQUIRE(log.all().size() == daemon::LogLimit::kLines + 2);
  CHECK(log.all().back() == "daemon: 990 more warnings about processes of user 7 were left out");
  limit.warn(7, "again", now_ns + 2 * daemon::LogLimit::kWindowNs);
  CHECK(log.all().back() == "again");
}

TEST_CASE("questions about a user whose answers cost much are put off, and about others not") {
  daemon::Patience patience;
  const uint64_t now_ns = 1'000'000'000;
  CHECK(patience.may(7, now_ns));
  for (int i = 0; i < 10; ++i) patience.spent(7, 1000, now_ns);
  CHECK(patience.may(7, now_ns));  // little
  patience.spent(7, 50'000'000, now_ns);
  CHECK_FALSE(patience.may(7, now_ns));
  CHECK_FALSE(patience.may(7, now_ns + 4'000'000'000));  // 50 ms are a hundredth of 5 s
  CHECK(patience.may(8, now_ns));
  CHECK(patience.may(7, now_ns + 5'100'000'000));
}

TEST_CASE("connections that break the protocol again and again fill no log") {
  LogLines log;
  SharedService shared;
  for (int i = 0; i < 60; ++i) {
    RawProcess raw(shared);
    REQUIRE(raw.hello() == GPUSHARE_OK);
    auto hello = client::make_message<MessageType::kHello>();  // a second one
    REQUIRE(raw.say(hello));
    while (!raw.answer().empty()) {
    }
  }
  size_t told = 0;
  for (const std::string& line : log.all()) told += line.find("is disconnected") != std::string::npos ? 1 : 0;
  CHECK(told == daemon::LogLimit::kLines);
}

TEST_CASE("weights and priorities are at most what the operator allows") {
  SharedService shared([](daemon::ServiceOptions& options) {
    options.ranks.max_weight = 8;
    options.ranks.max_priority = 5;
  });
  RawProcess raw(shared);
  REQUIRE(raw.hello() == GPUSHARE_OK);
  const auto find = [&] { return shared.status().sessions.at(0); };
  auto message = arrive(1, kMiB);
  for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity(), -1.0, 0.0}) {
    message.weight = bad;
    CHECK(raw.call(message) == GPUSHARE_INVALID_ARGUMENT);
  }
  message.weight = 1e300;
  message.priority = INT32_MAX;
  REQUIRE(raw.call(message) == GPUSHARE_OK);
  CHECK(find().weight == 8);
  CHECK(find().priority == 5);
  raw.tell(MessageType::kSetWeight, 1, std::bit_cast<uint64_t>(2.0));
  eventually([&] { return find().weight == 2; });
  raw.tell(MessageType::kSetWeight, 1, std::bit_cast<uint64_t>(1e300));
  eventually([&] { return find().weight == 8; });
  raw.tell(MessageType::kSetPriority, 1, static_cast<uint64_t>(int64_t{-3}));
  eventually([&] { return find().priority == -3; });
  raw.tell(MessageType::kSetPriority, 1, 1'000'000);
  eventually([&] { return find().priority == 5; });
  raw.tell(MessageType::kLeave, 1);
  eventually([&] { return shared.status().sessions.empty(); });

  auto grouped = arrive(2, kMiB, 7);
  grouped.flags |= client::kOwnClaim;
  grouped.group_weight = 1e300;
  REQUIRE(raw.call(grouped) == GPUSHARE_OK);
  CHECK(find().weight == 8);
}

TEST_CASE("names of other users are printable wherever they come to") {
  SharedService shared;
  RawProcess raw(shared);
  auto hello = client::make_message<MessageType::kHello>();
  client::put_text(hello.program,
                   "\x1b]0;x\x07\xc2\x9b"
                   "31m\xe2\x80\xae"
                   "prog\xff");
  REQUIRE(raw.say(hello));
  REQUIRE(client::fields_of<client::Welcome>(raw.answer()).code == GPUSHARE_OK);
  auto message = arrive(1, kMiB);
  client::put_text(message.name,
                   "\n\"},{\xc2\x9b"
                   "2J\xe2\x80\xae\xff<b>\u00fcn\xc3");
  REQUIRE(raw.say(message));
  REQUIRE(client::fields_of<client::Reply>(raw.answer()).code == GPUSHARE_OK);
  const auto status = shared.status();
  CHECK(status.sessions.at(0).name ==
        "\ufffd\"},{\ufffd"
        "2J\ufffd\ufffd<b>\u00fcn\ufffd");
  CHECK(status.processes.at(0).program ==
        "\ufffd]0;x\ufffd\ufffd"
        "31m\ufffdprog\ufffd");
  // A text that does not fit is cut between two characters.
  client::Arrive cut{};
  std::string umlauts;
  for (int i = 0; i < 60; ++i) umlauts += "\u00fc";
  client::put_text(cut.name, umlauts);
  CHECK(std::string(cut.name) == umlauts.substr(0, 62));
}
