// Rests between moves of a session's blocks, on virtual time.
// SPDX-License-Identifier: Apache-2.0
#include "sched/move_rest.hpp"

#include "support/catch.hpp"
#include "support/random.hpp"

namespace {

using gpushare::sched::MoveRest;

}  // namespace

TEST_CASE("the first cycle of moves waits for nothing, the next until the one before is paid") {
  MoveRest rest(0.01);
  CHECK(rest.may_come_home(0));
  rest.moved_out(100, 150);
  CHECK(rest.may_come_home(150));
  rest.moved_home(200, 230);
  rest.moved_home(240, 260);       // in two parts: 100 ns in all
  CHECK(rest.may_come_home(261));  // more of the same cycle
  rest.moved_out(300, 340);
  // 140 ns since the first move, and what comes next: home as before, 50 ns, and out as before, 50 ns.
  CHECK(rest.paid_at_ns() == 100 + (140 + 50 + 50) * 100);
  CHECK_FALSE(rest.may_come_home(rest.paid_at_ns() - 1));
  rest.moved_out(400, 450);  // sent out again while it is out: the same cycle, whose moves out cost 90 ns now
  CHECK(rest.paid_at_ns() == 100 + (190 + 50 + 90) * 100);
  CHECK(rest.may_come_home(rest.paid_at_ns()));
  // After a long time without moves only the cycle before counts.
  rest.moved_home(1'000'000, 1'000'010);
  rest.moved_out(1'000'020, 1'000'030);
  CHECK(rest.paid_at_ns() == 1'000'010 + 100 * 100);
  // A move that took no time is one.
  MoveRest quick(0.5);
  quick.moved_out(5, 5);
  quick.moved_home(6, 6);
  quick.moved_out(7, 7);
  CHECK(quick.paid_at_ns() == 5 + (3 + 1 + 1) * 2);
}

TEST_CASE(
    "moves that cost the same take no more than their part of the time at any moment from the second move "
    "home on") {
  MoveRest rest(0.004);
  uint64_t now_ns = 5'000'000, moving_ns = 0;
  const uint64_t start_ns = now_ns;
  for (int cycle = 1; cycle <= 50; ++cycle) {
    CAPTURE(cycle);
    rest.moved_out(now_ns, now_ns + 20'000'000);
    now_ns += 20'000'000;
    moving_ns += 20'000'000;
    const auto within = [&] {
      return static_cast<double>(moving_ns) <= 0.004 * static_cast<double>(now_ns - start_ns);
    };
    if (cycle > 2) CHECK(within());
    now_ns = std::max(now_ns, rest.paid_at_ns());
    rest.moved_home(now_ns, now_ns + 30'000'000);
    now_ns += 30'000'000;
    moving_ns += 30'000'000;
    if (cycle > 1) CHECK(within());
  }
}

TEST_CASE("a session that is sent out as often as can be loses no more than its part of the time to moves") {
  for (const double loss : {0.004, 0.02, 0.3}) {
    for (uint64_t seed = 1; seed <= 50; ++seed) {
      gpushare::test::Random random(seed);
      CAPTURE(loss, seed);
      MoveRest rest(loss);
      uint64_t now_ns = 0, moving_ns = 0, largest_ns = 0;
      for (int cycle = 0; cycle < 200; ++cycle) {
        uint64_t cycle_ns = 0;
        const auto move = [&](bool home) {
          const uint64_t cost_ns = gpushare::test::uniform(random, 1, 50'000'000);
          home ? rest.moved_home(now_ns, now_ns + cost_ns) : rest.moved_out(now_ns, now_ns + cost_ns);
          now_ns += cost_ns;
          cycle_ns += cost_ns;
        };
        for (uint64_t i = gpushare::test::uniform(random, 1, 4); i > 0; --i) move(false);
        // Iterations of 5 ms until it may come home.
        while (!rest.may_come_home(now_ns)) now_ns += 5'000'000;
        for (uint64_t i = gpushare::test::uniform(random, 1, 4); i > 0; --i) move(true);
        moving_ns += cycle_ns;
        largest_ns = std::max(largest_ns, cycle_ns);
        // The cycle at hand and the one before have not been paid yet.
        CHECK(static_cast<double>(moving_ns) <=
              loss * static_cast<double>(now_ns) + 2 * static_cast<double>(largest_ns));
      }
      CHECK(static_cast<double>(moving_ns) <= 1.05 * loss * static_cast<double>(now_ns));
    }
  }
}
