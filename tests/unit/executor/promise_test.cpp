// Promises that hold: growths that fail leave P and E as they were, an iteration that needs more than E gives P back at
// its end, and a session that is over but for some blocks is promised what lives.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "support/bytes.hpp"
#include "support/executor_fixture.hpp"
#include "support/random.hpp"
#include "support/status_checks.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT

using Promise = std::pair<uint64_t, uint64_t>;

Promise promise_of(const executor::Session& session) {
  const executor::SessionInfo info = session.info();
  return {info.promised_persistent_bytes, info.promised_ephemeral_bytes};
}

std::shared_ptr<executor::Runtime> open_of(const Setup& setup, uint64_t capacity_bytes) {
  executor::RuntimeOptions options = options_of(setup);
  options.capacity_bytes = capacity_bytes;
  return open_runtime(std::move(options));
}

void close_sound(executor::Runtime& runtime) {
  CHECK(runtime.check() == "");
  CHECK_OK(runtime.close());
}

TEST_CASE(
    "an iteration that asks for more than E leaves a guaranteed session its P, whether it gets that or not") {
  for (const Setup& setup : kSetups)
    for (const uint64_t asked : {7, 9, 10, 12, 20, 24})
      for (const uint64_t live : {0, 3})
        for (const bool full : {true, false}) {
          CAPTURE(setup.device, static_cast<int>(setup.layout), asked, live, full);
          const auto runtime = open_of(setup, 64 * kMiB);
          const auto a = open_session(*runtime, need("a", 12 * kMiB, 8 * kMiB));
          if (live > 0) REQUIRE_OK(a->alloc(memory::Kind::kModel, live * kMiB, 0).status());
          const auto b = open_session(*runtime, need("b", (full ? 36 : 8) * kMiB, 8 * kMiB));
          const Promise before = promise_of(*a);
          auto iteration = a->begin(GPUSHARE_NO_TIMEOUT);
          REQUIRE_OK(iteration.status());
          const auto block = (*iteration)->alloc(asked * kMiB, 0);
          const bool virtual_layout = setup.layout == memory::Layout::kVirtual;
          // Beside E there are the free granules of P, and what the device has.
          if (asked <= 8) CHECK(block.ok());
          if (virtual_layout && asked * kMiB <= (8 + 12 - (live + 1) / 2 * 2 + (full ? 0 : 28)) * kMiB)
            CHECK_OK(block.status());
          if (!block.ok()) CHECK(promise_of(*a) == before);
          REQUIRE_OK((*iteration)->end());
          REQUIRE_OK(runtime->synchronize(GPUSHARE_NO_TIMEOUT));
          CHECK(promise_of(*a).first >= before.first);
          CHECK(promise_of(*a).second >= before.second);
          const uint64_t rest = 12 - live;
          CHECK_OK(a->alloc(memory::Kind::kModel, rest * kMiB, 0).status());
          // And E, once more.
          iteration = a->begin(GPUSHARE_NO_TIMEOUT);
          REQUIRE_OK(iteration.status());
          CHECK_OK((*iteration)->alloc(8 * kMiB, 0).status());
          REQUIRE_OK((*iteration)->end());
          close_sound(*runtime);
        }
}

// One session does at random what makes a promise grow; the others hold the rest of the device.
void grow_at_random(Random& random, const Setup& setup) {
  const auto runtime = open_of(setup, 64 * kMiB);
  const uint64_t p = uniform(random, 1, 16), e = uniform(random, 1, 12);
  executor::SessionOptions options = need("a", p * kMiB, e * kMiB);
  if (uniform(random, 0, 1) == 0) options.cls = sched::SessionClass::kOpportunistic;
  if (uniform(random, 0, 2) == 0) options.quota_bytes = (p + e + uniform(random, 0, 8)) * kMiB;
  const auto a = open_session(*runtime, options);
  const auto b = open_session(*runtime, need("b", uniform(random, 0, 30) * kMiB, 2 * kMiB));
  std::vector<memory::Address> blocks;
  std::shared_ptr<executor::Iteration> iteration;
  const auto size = [&] { return uniform(random, 1, 24 * kMiB); };
  for (int step = 0; step < 30; ++step) {
    const Promise before = promise_of(*a);
    base::Status grown;
    switch (uniform(random, 0, 4)) {
      case 0: {
        const auto block = a->alloc(memory::Kind::kModel, size(), 0);
        grown = block.status();
        if (block.ok()) blocks.push_back(*block);
        break;
      }
      case 1:
        if (blocks.empty()) break;
        std::swap(blocks[uniform(random, 0, blocks.size() - 1)], blocks.back());
        REQUIRE_OK(runtime->free(blocks.back()));
        blocks.pop_back();
        break;
      case 2:
        if (iteration != nullptr) REQUIRE_OK(std::exchange(iteration, nullptr)->end());
        break;
      default: {
        if (iteration == nullptr) {
          auto begun = a->begin(GPUSHARE_NO_TIMEOUT);
          REQUIRE_OK(begun.status());
          iteration = *begun;
        }
        const auto block = iteration->alloc(size(), 0);
        grown = block.status();
        if (block.ok() && uniform(random, 0, 3) == 0) {
          const Promise kept_before = promise_of(*a);
          if (iteration->keep(*block).ok())
            blocks.push_back(*block);
          else
            CHECK(promise_of(*a) == kept_before);
        }
        break;
      }
    }
    if (!grown.ok()) {
      INFO(grown.to_string());
      CHECK(promise_of(*a).first == before.first);
      CHECK(promise_of(*a).second == before.second);
    }
    if (options.cls == sched::SessionClass::kGuaranteed && options.quota_bytes == 0) {
      CHECK(promise_of(*a).first >= p * kMiB);
      CHECK(promise_of(*a).second >= e * kMiB);
    }
    CHECK(promise_of(*b).first + promise_of(*b).second + promise_of(*a).first + promise_of(*a).second <=
          64 * kMiB);
  }
  if (iteration != nullptr) REQUIRE_OK(iteration->end());
  REQUIRE_OK(runtime->synchronize(GPUSHARE_NO_TIMEOUT));
  close_sound(*runtime);
}

TEST_CASE("growths at random that fail leave every promise as it was") {
  Random random(seed());
  const uint64_t rounds = number_from("GPUSHARE_TEST_ROUNDS", 40);
  for (uint64_t round = 0; round < rounds; ++round) {
    INFO("seed " << seed() << " round " << round);
    grow_at_random(random, kSetups[round % std::size(kSetups)]);
  }
}

TEST_CASE("an iteration finds all of E beside kept blocks while free bytes of P can fill their granules") {
  Random random(seed());
  for (int round = 0; round < 60; ++round) {
    const uint64_t e = uniform(random, 4, 16), p = uniform(random, 8, 16);
    INFO("seed " << seed() << " round " << round << " P " << p << " E " << e);
    const auto runtime = open_of(kSetups[0], 64 * kMiB);
    const auto a = open_session(*runtime, need("a", p * kMiB, e * kMiB));
    const auto b = open_session(*runtime, need("b", (64 - 8 - (p + e + 3) / 2 * 2) * kMiB, 4 * kMiB));
    REQUIRE_OK(b->wait_admitted(GPUSHARE_NO_TIMEOUT));
    // Kept blocks of at most half of P, with holes between them.
    auto iteration = a->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE_OK(iteration.status());
    for (uint64_t kept = 0; kept < p * kMiB / 2 - 2 * kMiB;) {
      const uint64_t bytes = uniform(random, 1, 8) * kMiB / 4;
      const auto hole = (*iteration)->alloc(uniform(random, 1, 8) * kMiB / 4, 0);
      const auto block = hole.ok() ? (*iteration)->alloc(bytes, 0) : hole;
      if (!block.ok()) break;
      REQUIRE_OK((*iteration)->keep(*block));
      kept += bytes;
    }
    REQUIRE_OK((*iteration)->end());
    iteration = a->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE_OK(iteration.status());
    for (uint64_t got = 0; got < e * kMiB; got += kMiB / 4) {
      const auto piece = (*iteration)->alloc(kMiB / 4, 0);
      INFO("after " << got / 1024 << " KiB");
      REQUIRE_OK(piece.status());
    }
    REQUIRE_OK((*iteration)->end());
    CHECK(promise_of(*a).first >= p * kMiB);
    close_sound(*runtime);
  }
}

// The device has nothing beside P and E of a, and another session's.
struct FullDevice {
  FullDevice(uint64_t p, uint64_t e)
      : runtime(open_of(kSetups[0], 64 * kMiB)), a(open_session(*runtime, need("a", p, e))) {
    other = open_session(*runtime, need("other", 60 * kMiB - p - e, 4 * kMiB));
    REQUIRE_OK(a->wait_admitted(GPUSHARE_NO_TIMEOUT));
    REQUIRE_OK(other->wait_admitted(GPUSHARE_NO_TIMEOUT));
  }
  bool holds(memory::Address block, uint64_t bytes, uint8_t value) {
    REQUIRE_OK(runtime->synchronize(GPUSHARE_NO_TIMEOUT));
    return all_are(reinterpret_cast<const void*>(block), bytes,
                   value);  // the host device's addresses are the host's
  }
  std::shared_ptr<executor::Runtime> runtime;
  std::shared_ptr<executor::Session> a, other;
};

// In an iteration: a hole, and behind it a block that is kept and filled with `value`. Its address.
memory::Address keep_behind(executor::Session& session, uint64_t hole, uint64_t bytes, uint8_t value) {
  const auto iteration = session.begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE_OK(iteration.status());
  if (hole > 0) REQUIRE_OK((*iteration)->alloc(hole, 0).status());
  const auto block = (*iteration)->alloc(bytes, 0);
  REQUIRE_OK(block.status());
  REQUIRE_OK((*iteration)->keep(*block));
  REQUIRE_OK((*(*iteration)->stream())->fill(*block, value, bytes));
  REQUIRE_OK((*iteration)->end());
  return *block;
}

// All of E as one block, which is written.
void check_one_piece(executor::Session& session, uint64_t e) {
  const auto iteration = session.begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE_OK(iteration.status());
  const auto all = (*iteration)->alloc(e, 0);
  CHECK_OK(all.status());
  if (all.ok()) CHECK_OK((*(*iteration)->stream())->fill(*all, 9, e));
  REQUIRE_OK((*iteration)->end());
}

TEST_CASE("an iteration finds all of E in one piece beside a kept block") {
  for (const uint64_t e : {8, 10, 12, 16})
    for (uint64_t hole = 0; hole < 7; ++hole)
      for (const uint64_t kept : {1, 2, 3, 4, 6}) {
        if (hole + kept > e) continue;
        INFO("E " << e << " MiB, " << kept << " MiB kept behind " << hole << " MiB");
        FullDevice device(8 * kMiB, e * kMiB);
        const memory::Address block = keep_behind(*device.a, hole * kMiB, kept * kMiB, 5);
        const Promise before = promise_of(*device.a);
        check_one_piece(*device.a, e * kMiB);
        CHECK(promise_of(*device.a) == before);
        CHECK(device.holds(block, kept * kMiB, 5));
        // The same once more, and when the block is gone.
        check_one_piece(*device.a, e * kMiB);
        CHECK_OK(device.runtime->free(block));
        check_one_piece(*device.a, e * kMiB);
        close_sound(*device.runtime);
      }
}

// The device's work on the lane's memory is behind the very function that asks.
TEST_CASE("a host function that asks for all of E takes no memory from behind what its own stream does") {
  FullDevice device(8 * kMiB, 16 * kMiB);
  // Memory from before the first kept block goes behind it; the second is kept there, and the first goes.
  const memory::Address low = keep_behind(*device.a, 4 * kMiB, 2 * kMiB, 4);
  check_one_piece(*device.a, 16 * kMiB);
  const memory::Address high = keep_behind(*device.a, 14 * kMiB, 2 * kMiB, 5);
  CHECK_OK(device.runtime->free(low));
  const auto iteration = device.a->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE_OK(iteration.status());
  const auto before = (*iteration)->alloc(14 * kMiB, 0);
  REQUIRE_OK(before.status());
  REQUIRE_OK((*iteration)->alloc(2 * kMiB, 0).status());
  REQUIRE_OK((*(*iteration)->stream())->fill(*before, 1, 14 * kMiB));
  REQUIRE_OK(device.runtime->free(*before));
  struct Asked {
    executor::Iteration* iteration;
    base::Status all, most, rest;
  } asked{iteration->get(), {}, {}, {}};
  const auto ask = [](void* user_data) {
    auto* self = static_cast<Asked*>(user_data);
    self->all = self->iteration->alloc(16 * kMiB, 0).status();
    // What the lane had it has still, where it was.
    self->most = self->iteration->alloc(14 * kMiB, 0).status();
    self->rest = self->iteration->alloc(2 * kMiB, 0).status();
  };
  REQUIRE_OK((*(*iteration)->stream())->launch_host(ask, &asked));
  REQUIRE_OK((*(*iteration)->stream())->synchronize());
  CHECK(asked.all.code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK_OK(asked.most);
  CHECK_OK(asked.rest);
  REQUIRE_OK((*iteration)->end());
  check_one_piece(*device.a, 16 * kMiB);
  CHECK(device.holds(high, 2 * kMiB, 5));
  close_sound(*device.runtime);
}

TEST_CASE("kept blocks that fill their granules leave all of E in one piece though all of P is in use") {
  for (uint64_t hole = 0; hole <= 8; hole += 2)
    for (uint64_t kept = 2; kept <= 8; kept += 2) {
      INFO(kept << " MiB kept behind " << hole << " MiB");
      FullDevice device(8 * kMiB, 16 * kMiB);
      (void)keep_behind(*device.a, hole * kMiB, kept * kMiB, 5);
      if (kept < 8) REQUIRE_OK(device.a->alloc(memory::Kind::kModel, (8 - kept) * kMiB, 0).status());
      check_one_piece(*device.a, 16 * kMiB);
      close_sound(*device.runtime);
    }
}

TEST_CASE("kept blocks that come and go at random leave all of E in one piece, and keep their bytes") {
  Random random(seed());
  for (int round = 0; round < 12; ++round) {
    INFO("seed " << seed() << " round " << round);
    FullDevice device(16 * kMiB, 12 * kMiB);
    std::vector<std::pair<memory::Address, uint8_t>> kept;
    for (int step = 0; step < 30; ++step) {
      INFO("step " << step << ", " << kept.size() << " kept");
      if (kept.size() == 4 || (!kept.empty() && uniform(random, 0, 2) == 0)) {
        const size_t which = uniform(random, 0, kept.size() - 1);
        CHECK(device.holds(kept[which].first, 2 * kMiB, kept[which].second));
        REQUIRE_OK(device.runtime->free(kept[which].first));
        kept.erase(kept.begin() + static_cast<ptrdiff_t>(which));
      } else {
        const auto value = static_cast<uint8_t>(10 + step);
        kept.emplace_back(keep_behind(*device.a, uniform(random, 0, 40) * kMiB / 4, 2 * kMiB, value), value);
      }
      check_one_piece(*device.a, 12 * kMiB);
      CHECK(device.runtime->check() == "");
    }
    for (const auto& [block, value] : kept) CHECK(device.holds(block, 2 * kMiB, value));
    close_sound(*device.runtime);
  }
}

// 24 MiB and then 3 MiB, of which the first part is freed: what is left lies behind it.
memory::Address left_behind(executor::Runtime& runtime, executor::Session& session) {
  const auto model = session.alloc(memory::Kind::kModel, 24 * kMiB, 0);
  REQUIRE_OK(model.status());
  const auto workspace = session.alloc(memory::Kind::kFramework, 3 * kMiB, 0);
  REQUIRE_OK(workspace.status());
  REQUIRE_OK(runtime.free(*model));
  return *workspace;
}

TEST_CASE("a session that is over but for a block is promised the granules of that block, in both layouts") {
  for (const Setup& setup : kSetups) {
    CAPTURE(setup.device, static_cast<int>(setup.layout));
    const auto runtime = open_of(setup, 64 * kMiB);
    const bool host = std::string(setup.device).compare(0, 4, "host") == 0;
    std::vector<std::shared_ptr<executor::Session>> over;
    std::vector<memory::Address> left;
    // Each of them fits beside what the others left, and two that had kept their promise would fill the device. Where blocks
    // do not move, two leave no hole for a third.
    const int sessions = setup.layout == memory::Layout::kVirtual ? 8 : 2;
    for (int i = 0; i < sessions; ++i) {
      const auto session = open_session(*runtime, need("s" + std::to_string(i), 28 * kMiB, 4 * kMiB));
      REQUIRE(session->info().state == executor::SessionState::kResident);
      auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
      REQUIRE_OK(iteration.status());
      REQUIRE_OK((*iteration)->end());
      left.push_back(left_behind(*runtime, *session));
      if (host) std::memset(reinterpret_cast<void*>(left.back()), 1 + i, 3 * kMiB);
      session->retire();
      CHECK(promise_of(*session) == Promise{4 * kMiB, 0});
      CHECK(runtime->check() == "");
      over.push_back(session);
    }
    const auto fits = open_session(*runtime, need("fits", 20 * kMiB, 2 * kMiB));
    CHECK(fits->info().state == executor::SessionState::kResident);
    CHECK_OK(fits->alloc(memory::Kind::kModel, 20 * kMiB, 0).status());
    CHECK(runtime->check() == "");
    CHECK_OK(fits->close());
    // What is freed afterwards goes as well, and blocks may still come.
    const auto again = over[1]->alloc(memory::Kind::kFramework, 5 * kMiB, 0);
    REQUIRE_OK(again.status());
    CHECK(runtime->check() == "");
    for (size_t i = 0; i < over.size(); ++i) {
      if (host) CHECK(all_are(reinterpret_cast<void*>(left[i]), 3 * kMiB, 1 + static_cast<int>(i)));
      REQUIRE_OK(runtime->free(left[i]));
      over[i]->retire();
      CHECK(promise_of(*over[i]).second == 0);
      if (i != 1) CHECK(promise_of(*over[i]).first == 0);
    }
    REQUIRE_OK(runtime->free(*again));
    CHECK(runtime->check() == "");
    for (const auto& session : over) CHECK_OK(session->close());
    close_sound(*runtime);
  }
}

TEST_CASE(
    "a session that is over while its iteration is open gives its promise back at the iteration's end") {
  for (const Setup& setup : kSetups) {
    CAPTURE(setup.device, static_cast<int>(setup.layout));
    const auto runtime = open_of(setup, 64 * kMiB);
    const auto session = open_session(*runtime, need("s", 28 * kMiB, 12 * kMiB));
    const memory::Address left = left_behind(*runtime, *session);
    auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE_OK(iteration.status());
    const auto block = (*iteration)->alloc(3 * kMiB, 0);
    REQUIRE_OK(block.status());
    const auto other = (*iteration)->alloc(3 * kMiB, 0);
    REQUIRE_OK(other.status());
    REQUIRE_OK((*iteration)->keep(*other));
    session->retire();
    CHECK(promise_of(*session) == Promise{28 * kMiB, 12 * kMiB});
    REQUIRE_OK((*iteration)->end());
    REQUIRE_OK(runtime->synchronize(GPUSHARE_NO_TIMEOUT));
    CHECK(runtime->check() == "");
    // Live are 3 MiB and the kept block, which pins the lane up to its end less what the session lends for it.
    const Promise after = promise_of(*session);
    CHECK(after.first <= 8 * kMiB);
    CHECK(after.second <= 6 * kMiB);
    REQUIRE_OK(runtime->free(left));
    REQUIRE_OK(runtime->free(*other));
    session->retire();
    CHECK(promise_of(*session) == Promise{0, 0});
    CHECK_OK(session->close());
    close_sound(*runtime);
  }
}

TEST_CASE("a session that gave back granules between its blocks stays where others are paged out") {
  executor::RuntimeOptions options = options_of(kSetups[0], "priority");
  options.capacity_bytes = 64 * kMiB;
  const auto runtime = open_runtime(std::move(options));
  const auto over = open_session(*runtime, need("over", 28 * kMiB, 4 * kMiB));
  auto iteration = over->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE_OK(iteration.status());
  REQUIRE_OK((*iteration)->end());
  const memory::Address left = left_behind(*runtime, *over);
  over->retire();
  const auto low = open_session(*runtime, need("low", 20 * kMiB, 4 * kMiB));
  const auto high = open_session(*runtime, need("high", 40 * kMiB, 4 * kMiB, 9));
  REQUIRE_OK(high->wait_admitted(GPUSHARE_NO_TIMEOUT));
  CHECK(low->info().state == executor::SessionState::kPagedOut);
  CHECK(over->info().state == executor::SessionState::kResident);
  REQUIRE_OK(runtime->free(left));
  CHECK(runtime->check() == "");
  for (const auto& session : {over, low, high}) CHECK_OK(session->close());
  close_sound(*runtime);
}

}  // namespace
