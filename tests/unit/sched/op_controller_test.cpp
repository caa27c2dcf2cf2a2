// The controller of opportunistic work: what it learns, when it pauses, and what it never does.
// SPDX-License-Identifier: Apache-2.0
#include "sched/op_controller.hpp"

#include <algorithm>
#include <cmath>
#include <map>

#include "support/catch.hpp"
#include "support/random.hpp"

namespace {

using namespace gpushare;  // NOLINT
using sched::OpController;
using sched::SessionClass;

constexpr sched::SessionId kFirst = 1, kOther = 10, kAnother = 11;

// One guaranteed session whose iteration takes `alone_ns`, and `cost` times that more at full share.
struct Device {
  OpController controller;
  double alone_ns = 1e8, cost = 0.5;
  uint64_t now_ns = 0;
  double shares = 0;  // of the last iteration, all sessions together

  void iterate(int count = 1) {
    for (int i = 0; i < count; ++i) {
      controller.began(kFirst, now_ns);
      shares = 0;
      for (const auto id : {kOther, kAnother})
        if (present.contains(id)) shares = std::max(shares, controller.allowance(id).share);
      const double took = alone_ns * (1 + cost * shares);
      now_ns += static_cast<uint64_t>(took);
      for (const auto& id : present)
        controller.progressed(id.first, static_cast<uint64_t>(took * controller.allowance(id.first).share));
      controller.finished(kFirst, static_cast<uint64_t>(took), now_ns);
      REQUIRE(controller.check().empty());
    }
  }
  void come(sched::SessionId id) {
    controller.arrive(id, SessionClass::kOpportunistic);
    present[id] = true;
  }
  std::map<sched::SessionId, bool> present;
};

}  // namespace

TEST_CASE("without a guaranteed session nothing is limited") {
  OpController controller;
  controller.arrive(kOther, SessionClass::kOpportunistic);
  CHECK(controller.allowance(kOther).open());
  controller.arrive(kFirst, SessionClass::kGuaranteed);
  CHECK_FALSE(controller.allowance(kOther).open());
  CHECK(controller.allowance(kFirst).open());
  CHECK(controller.allowance(99).open());
  controller.leave(kFirst);
  CHECK(controller.allowance(kOther).open());
}

TEST_CASE("the first five iterations of a guaranteed session run alone") {
  Device device;
  device.controller.arrive(kFirst, SessionClass::kGuaranteed);
  device.come(kOther);
  for (int i = 0; i < 5; ++i) {
    CHECK(device.controller.estimate(kFirst).learning);
    device.iterate();
    CHECK(device.shares == 0);
  }
  CHECK_FALSE(device.controller.estimate(kFirst).learning);
  CHECK(device.controller.estimate(kFirst).alone_ns == 100'000'000);
  int shared = 0;
  for (int i = 0; i < 20; ++i) {
    device.iterate();
    shared += device.shares > 0 ? 1 : 0;
  }
  CHECK(shared > 0);
}

TEST_CASE("the slowdown stays within the target, and the target is used") {
  for (const double cost : {0.1, 0.5, 2.0}) {
    for (const double target : {0.01, 0.05}) {
      Device device;
      device.cost = cost;
      device.controller.arrive(kFirst, SessionClass::kGuaranteed, 1, target);
      device.come(kOther);
      device.iterate(2000);
      const auto estimate = device.controller.estimate(kFirst);
      CAPTURE(cost, target);
      CHECK(estimate.slowdown < target);
      CHECK(estimate.slowdown > std::min(cost, target) * 0.8);
      CHECK(estimate.error < 0.01);
      CHECK(estimate.target == target);
    }
  }
}

TEST_CASE("work that costs nothing gets the whole device but for iterations of comparison") {
  Device device;
  device.cost = 0;
  device.controller.arrive(kFirst, SessionClass::kGuaranteed);
  device.come(kOther);
  device.iterate(500);
  double got = 0;
  for (int i = 0; i < 1000; ++i) {
    device.iterate();
    got += device.shares;
  }
  CHECK(got > 950);
}

// Launches take a fifth of an iteration, so a small share lets one in at times only. Its work then looks like nothing, or like more than
// that of larger shares.
TEST_CASE("shares that let a launch in at times only are left for larger ones") {
  bool least_tried = false;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    test::Random random(seed);
    OpController controller;
    controller.arrive(kFirst, SessionClass::kGuaranteed, 1, 0.05);
    controller.arrive(kOther, SessionClass::kOpportunistic);
    constexpr double kAloneNs = 1e8, kLaunchNs = 2e7;
    uint64_t now_ns = 0;
    double paid_ns = 0, done_ns = 0;
    for (int i = 0; i < 4000; ++i) {
      controller.began(kFirst, now_ns);
      const double share = controller.allowance(kOther).share;
      least_tried = least_tried || share == OpController::share_at(0);
      double work_ns = 0;
      for (paid_ns += kAloneNs * share; paid_ns > 0; paid_ns -= kLaunchNs) work_ns += kLaunchNs;
      double took_ns =
          kAloneNs * (0.9 + static_cast<double>(test::uniform(random, 0, 200)) / 1000) + work_ns * 0.02;
      if (work_ns > 0 && test::uniform(random, 0, 99) == 0) took_ns *= 2;  // held up
      now_ns += static_cast<uint64_t>(took_ns);
      controller.progressed(kOther, static_cast<uint64_t>(work_ns));
      controller.finished(kFirst, static_cast<uint64_t>(took_ns), now_ns);
      if (i >= 3000) done_ns += work_ns;
    }
    CAPTURE(seed);
    CHECK(done_ns > 500 * kAloneNs);
  }
  CHECK(least_tried);
}

TEST_CASE("as much may be in flight as costs a quarter of the target") {
  for (const double cost : {0.0, 0.02, 0.04}) {
    Device device;
    device.cost = cost;
    device.controller.arrive(kFirst, SessionClass::kGuaranteed, 1, 0.05);
    device.come(kOther);
    device.iterate(5);
    const auto most = [&] { return static_cast<double>(device.controller.allowance(kOther).in_flight_ns); };
    CHECK(most() == Approx(0.05 / 4 * 1e8));  // nothing is known of the cost
    device.iterate(500);
    do device.iterate();
    while (device.shares < 1);
    device.controller.began(kFirst, device.now_ns);
    REQUIRE(device.controller.allowance(kOther).share == 1);
    CAPTURE(cost);
    CHECK(most() == Approx(1e8 * (cost == 0 ? 1 : 0.05 / 4 / cost)).epsilon(0.01));
    device.controller.finished(kFirst, static_cast<uint64_t>(1e8 * (1 + cost)), device.now_ns);
  }
}

TEST_CASE("a change of the iteration time by a fifth pauses the others and is learned") {
  Device device;
  device.controller.arrive(kFirst, SessionClass::kGuaranteed);
  device.come(kOther);
  device.cost = 0.001;
  device.iterate(1000);
  for (const double to : {1.5e8, 0.8e8}) {
    device.alone_ns = to;
    device.iterate(20);
    CHECK(std::abs(static_cast<double>(device.controller.estimate(kFirst).alone_ns) - to) < to * 0.02);
    device.iterate(500);
  }
  // One iteration that was disturbed is no phase.
  const auto before = device.controller.estimate(kFirst);
  device.alone_ns *= 3;
  device.iterate(1);
  device.alone_ns /= 3;
  device.iterate(30);
  CHECK(device.controller.estimate(kFirst).iterations > before.iterations);
  CHECK(device.controller.estimate(kFirst).alone_ns == before.alone_ns);
}

TEST_CASE("what held the session up for a while does not stay in its time alone") {
  for (const int every : {2, 3, 4}) {
    CAPTURE(every);
    Device device;
    device.controller.arrive(kFirst, SessionClass::kGuaranteed);
    device.iterate(500);
    for (int i = 0; i < 80; ++i) {  // not by a session, and not always
      device.alone_ns = i % every != 0 ? 2e8 : 1e8;
      device.iterate();
    }
    device.alone_ns = 1e8;
    device.iterate(20);
    device.come(kOther);
    device.iterate(200);
    CHECK(static_cast<double>(device.controller.estimate(kFirst).alone_ns) < 1.02e8);
    const uint64_t from_ns = device.now_ns;
    device.iterate(2000);
    CHECK(static_cast<double>(device.now_ns - from_ns) / (2000 * 1e8) - 1 < 0.015);
  }
}

TEST_CASE("who comes during an iteration waits for its end; who goes takes his estimates along") {
  Device device;
  device.controller.arrive(kFirst, SessionClass::kGuaranteed);
  device.iterate(10);
  device.controller.began(kFirst, device.now_ns);
  device.come(kOther);
  CHECK(device.controller.allowance(kOther).share == 0);
  device.now_ns += 100'000'000;
  device.controller.finished(kFirst, 100'000'000, device.now_ns);
  CHECK(device.controller.allowance(kOther).share == 1);                // between iterations
  CHECK(device.controller.allowance(kOther).in_flight_ns < 1'000'000);  // but little at a time
  device.controller.set_wants(kOther, false);
  device.controller.began(kFirst, device.now_ns);
  device.controller.set_wants(kOther, true);
  CHECK(device.controller.allowance(kOther).share == 0);
  device.controller.leave(kOther);
  CHECK(device.controller.allowance(kOther).open());
  device.controller.finished(kFirst, 0, device.now_ns);
  device.controller.finished(kFirst, 5, device.now_ns);  // nothing in flight: ignored
  CHECK(device.controller.check().empty());
}

TEST_CASE("an iteration beside work left on the device is charged, and says nothing of the time alone") {
  Device device;
  device.controller.arrive(kFirst, SessionClass::kGuaranteed);
  device.come(kOther);
  device.controller.on_device(kOther, true);
  device.iterate(20);
  CHECK(device.controller.estimate(kFirst).learning);  // the device is drained first, however long that takes
  device.controller.on_device(kOther, false);
  device.iterate(200);
  const auto before = device.controller.estimate(kFirst);
  do device.iterate();
  while (device.shares > 0);  // the next may be alone too
  device.controller.on_device(kOther, true);
  device.controller.began(kFirst, device.now_ns);
  device.now_ns += 150'000'000;
  device.controller.on_device(kOther, false);
  device.controller.finished(kFirst, 150'000'000, device.now_ns);
  CHECK(device.controller.estimate(kFirst).alone_ns == before.alone_ns);
  CHECK(device.controller.estimate(kFirst).credit < before.credit - 0.4);
}

TEST_CASE("the session that hurts less gets more, the other its floor") {
  OpController controller;
  controller.arrive(kFirst, SessionClass::kGuaranteed);
  controller.arrive(kOther, SessionClass::kOpportunistic);
  controller.arrive(kAnother, SessionClass::kOpportunistic);
  uint64_t now = 0;
  double got[2] = {0, 0}, time = 0, alone = 0;
  for (int i = 0; i < 6000; ++i) {
    controller.began(kFirst, now);
    const double cheap = controller.allowance(kOther).share, dear = controller.allowance(kAnother).share;
    const double took = 1e8 * (1 + 0.1 * cheap + 1.0 * dear);
    now += static_cast<uint64_t>(took);
    controller.progressed(kOther, static_cast<uint64_t>(took * cheap));
    controller.progressed(kAnother, static_cast<uint64_t>(took * dear));
    controller.finished(kFirst, static_cast<uint64_t>(took), now);
    got[0] += cheap * took;
    got[1] += dear * took;
    time += took;
    alone += 1e8;
  }
  CHECK(time / alone < 1.0101);
  CHECK(got[0] > 5 * got[1]);
  CHECK(got[1] > 0.03 * got[0]);
  // All of it to the first would be a tenth of the time.
  CHECK(got[0] / time > 0.05);
}

TEST_CASE("random sessions, iterations and orders keep the invariants") {
  test::Random random(test::seed());
  INFO("GPUSHARE_TEST_SEED=" << test::seed());
  const auto below = [&](uint64_t n) { return random() % n; };
  for (int round = 0; round < 20; ++round) {
    OpController controller;
    std::map<sched::SessionId, uint32_t> guaranteed;
    std::vector<sched::SessionId> others;
    sched::SessionId next = 1;
    uint64_t now = 0;
    for (int step = 0; step < 2000; ++step) {
      now += below(1'000'000);
      const uint64_t what = below(100);
      if (what < 2 && guaranteed.size() < 4) {
        guaranteed[next] = 0;
        controller.arrive(next++, SessionClass::kGuaranteed);
      } else if (what < 4 && others.size() < 6) {
        controller.arrive(next, SessionClass::kOpportunistic, 1 + static_cast<double>(below(4)));
        others.push_back(next++);
      } else if (what < 5 && !guaranteed.empty()) {
        controller.leave(guaranteed.begin()->first);
        guaranteed.erase(guaranteed.begin());
      } else if (what < 6 && !others.empty()) {
        controller.leave(others.back());
        others.pop_back();
      } else if (what < 9 && !others.empty()) {
        controller.set_wants(others[below(others.size())], below(2) == 0);
      } else if (what < 15 && !others.empty()) {
        controller.progressed(others[below(others.size())], below(1'000'000));
        controller.on_device(others[below(others.size())], below(2) == 0);
        REQUIRE((controller.admits_at(others.back(), below(1'000'000), below(1'000), now) >= now ||
                 controller.check().empty()));
      } else if (!guaranteed.empty()) {
        auto at = guaranteed.begin();
        std::advance(at, static_cast<long>(below(guaranteed.size())));
        if (at->second < 2 && below(2) == 0) {
          ++at->second;
          controller.began(at->first, now);
        } else if (at->second > 0) {
          --at->second;
          controller.finished(at->first, below(20) == 0 ? 0 : 500'000 + below(1'000'000), now);
        }
      }
      const std::string wrong = controller.check();
      CAPTURE(round, step);
      REQUIRE(wrong.empty());
      for (const auto id : others) {
        const auto allowed = controller.allowance(id);
        REQUIRE((allowed.share >= 0 && allowed.share <= 1));
        if (guaranteed.empty()) REQUIRE(allowed.open());
      }
    }
  }
}
