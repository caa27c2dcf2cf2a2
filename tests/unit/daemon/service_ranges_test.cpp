// Elastic ranges of different processes that ask each other through the daemon.
// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "executor/range.hpp"
#include "unit/daemon/service_sessions.hpp"

using namespace gpushare;
using namespace gpushare::test;

namespace {

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

}  // namespace

TEST_CASE("a range is asked by a range of another process, and gives back what is missing") {
  SharedService shared;
  const auto first = SharedService::open(), second = SharedService::open();
  const auto a = open_session(*first, "a", 0, 2 * kMiB), b = open_session(*second, "b", 0, 2 * kMiB);
  std::shared_ptr<executor::Range> theirs;
  std::atomic<uint64_t> asked{0}, has{48 * kMiB};
  theirs = open_range(*a, kLong, [&](uint64_t bytes, uint64_t) {
    asked += bytes;
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
  CHECK(asked >= 16 * kMiB);
  CHECK(asked <= 32 * kMiB);
  CHECK(theirs->info().requests >= 1);
  // The room is the other one's as soon as it is given back, which is before the owner has noted it.
  eventually([&] { return theirs->info().committed_bytes == has; });
  CHECK(all_are(reinterpret_cast<void*>(theirs->info().address), has, 0x66));
  CHECK(class_of(shared, "a") == "guaranteed");
  // Its session ends while it waits: nobody is asked for it any more.
  REQUIRE_OK(ours->close());
  REQUIRE_OK(b->close());
  REQUIRE_OK(theirs->commit(0, 48 * kMiB, kLong));
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
