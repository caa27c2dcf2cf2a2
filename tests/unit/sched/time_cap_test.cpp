// Caps of a device's time, on virtual time.
// SPDX-License-Identifier: Apache-2.0
#include "sched/time_cap.hpp"

#include <cmath>

#include "support/catch.hpp"
#include "support/random.hpp"

namespace {

using gpushare::sched::TimeCap;
constexpr auto kMostNs = static_cast<uint64_t>(TimeCap::kMostBalanceNs);

}  // namespace

TEST_CASE("a cap lets turns begin until a debt is made, and again when it is repaid") {
  TimeCap cap(0.25, 1000);
  CHECK(cap.may_begin_ns(1000) == 1000);
  cap.charge(kMostNs, 1000);
  CHECK(cap.may_begin_ns(1000) == 1001);  // nothing is left
  CHECK(cap.may_begin_ns(1001) == 1001);
  cap.charge(4'000'000, 1001);
  const uint64_t at_ns = cap.may_begin_ns(1001);
  CHECK(at_ns >= 1001 + 15'999'990);
  CHECK(at_ns <= 1001 + 16'000'001);
  CHECK(cap.may_begin_ns(at_ns - 100) > at_ns - 100);
  CHECK(cap.may_begin_ns(at_ns) == at_ns);
  // Time without work is saved up to a bound.
  const uint64_t later_ns = at_ns + 1'000'000'000'000;
  cap.charge(kMostNs + 100, later_ns);
  CHECK(cap.may_begin_ns(later_ns) > later_ns);
}

TEST_CASE("another share holds for the debt that there is; a whole one forgets it") {
  TimeCap cap(0.5, 0);
  cap.charge(kMostNs + 10'000'000, 0);
  CHECK(cap.may_begin_ns(0) == 20'000'001);
  cap.set_share(0.1, 10'000'000);  // 5 ms are repaid
  CHECK(cap.may_begin_ns(10'000'000) == 60'000'001);
  cap.set_share(1, 10'000'000);
  CHECK_FALSE(cap.binds());
  CHECK(cap.may_begin_ns(10'000'000) == 10'000'000);
  cap.charge(kMostNs * 10, 20'000'000);
  cap.set_share(0.5, 20'000'000);
  CHECK(cap.binds());
  CHECK(cap.may_begin_ns(20'000'000) == 20'000'000);
  CHECK(TimeCap::valid(1));
  for (const double bad : {0.0, -0.5, 1.01, std::nan("")}) CHECK_FALSE(TimeCap::valid(bad));
}

TEST_CASE("sessions that always have work get their cap of any time, and no more than one turn above it") {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    gpushare::test::Random random(seed);
    CAPTURE(seed);
    const double share = static_cast<double>(gpushare::test::uniform(random, 1, 99)) / 100;
    TimeCap cap(share, 0);
    uint64_t now_ns = 0, used_ns = 0, longest_ns = 0;
    while (now_ns < 10'000'000'000) {
      now_ns = cap.may_begin_ns(now_ns);
      const uint64_t turn_ns = gpushare::test::uniform(random, 1, 20'000'000);
      longest_ns = std::max(longest_ns, turn_ns);
      now_ns += turn_ns;
      used_ns += turn_ns;
      cap.charge(turn_ns, now_ns);
      CHECK(static_cast<double>(used_ns) <=
            share * static_cast<double>(now_ns) + TimeCap::kMostBalanceNs + static_cast<double>(longest_ns));
    }
    CHECK(static_cast<double>(used_ns) >= share * static_cast<double>(now_ns));
  }
}
