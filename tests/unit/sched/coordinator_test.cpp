// The sessions that may use a device, in which class and with how many bytes.
// SPDX-License-Identifier: Apache-2.0
#include "sched/coordinator.hpp"

#include <algorithm>
#include <set>
#include <vector>

#include "support/catch.hpp"
#include "support/random.hpp"

namespace {

using namespace gpushare;  // NOLINT
using sched::CoordinatedJob;
using sched::Coordinator;
using sched::CoordinatorOptions;
using sched::SessionClass;

constexpr auto kSure = SessionClass::kGuaranteed;
constexpr auto kSpare = SessionClass::kOpportunistic;

CoordinatorOptions options_of(uint64_t bytes) {
  CoordinatorOptions options;
  options.capacity_bytes = bytes;
  options.long_wait_ns = 100;
  return options;
}

}  // namespace

TEST_CASE("a guaranteed job takes back what an opportunistic one was lent") {
  Coordinator coordinator(options_of(32));
  coordinator.arrive({1, kSpare, 4, 1, 1, true}, 0);
  CHECK(coordinator.view(1).cls == kSure);  // upgraded: nobody else is there
  coordinator.arrive({2, kSure, 30, 30}, 1);
  CHECK(coordinator.view(1).running);  // demoted, with less
  CHECK(coordinator.view(1).cls == kSpare);
  CHECK(coordinator.view(1).limit_bytes == 2);
  CHECK(coordinator.view(2).running);
  CHECK(coordinator.view(2).cls == kSure);
  CHECK(coordinator.view(2).limit_bytes == 30);
  coordinator.leave(2, 2);
  CHECK(coordinator.view(1).cls == kSure);
  CHECK(coordinator.view(1).limit_bytes == 4);
}

TEST_CASE("a guaranteed job that waits long starts as opportunistic and is upgraded") {
  Coordinator coordinator(options_of(32));
  coordinator.arrive({1, kSure, 20, 20}, 0);
  coordinator.arrive({2, kSure, 20, 5}, 10);
  CHECK_FALSE(coordinator.view(2).running);
  CHECK(coordinator.look_again_ns() == 110);
  coordinator.tick(109);
  CHECK_FALSE(coordinator.view(2).running);
  coordinator.tick(110);
  CHECK(coordinator.view(2).running);
  CHECK(coordinator.view(2).cls == kSpare);
  CHECK(coordinator.view(2).limit_bytes == 12);
  CHECK(coordinator.look_again_ns() == sched::kUnknown);
  coordinator.leave(1, 200);
  CHECK(coordinator.view(2).cls == kSure);
  CHECK(coordinator.view(2).limit_bytes == 20);
}

TEST_CASE("a guaranteed job that wants the whole capacity keeps its turn against those who come later") {
  CoordinatorOptions options = options_of(32);
  options.max_guaranteed = 3;
  Coordinator coordinator(options);
  coordinator.arrive({1, kSure, 10, 10}, 0);
  coordinator.arrive({2, kSure, 32, 32}, 1);
  coordinator.arrive({3, kSpare, 4, 1, 1, true}, 2);
  coordinator.arrive({4, kSure, 4, 4}, 3);
  CHECK_FALSE(coordinator.view(2).running);
  CHECK(coordinator.view(3).cls == kSpare);  // not upgraded
  CHECK_FALSE(coordinator.view(4).running);
  coordinator.leave(1, 4);
  CHECK(coordinator.view(2).running);
  CHECK(coordinator.view(2).cls == kSure);
}

TEST_CASE("opportunistic jobs share what is left by weight, down to their least") {
  Coordinator coordinator(options_of(40));
  coordinator.arrive({1, kSure, 10, 10}, 0);
  coordinator.arrive({2, kSpare, 30, 2, 2}, 0);
  coordinator.arrive({3, kSpare, 30, 2, 1}, 0);
  CHECK(coordinator.view(2).limit_bytes >= 18);
  CHECK(coordinator.view(2).limit_bytes + coordinator.view(3).limit_bytes >= 29);  // parts are rounded down
  coordinator.set_capacity(13, 1);
  CHECK(coordinator.view(1).limit_bytes == 10);
  CHECK(coordinator.view(2).limit_bytes == 3);
  CHECK_FALSE(coordinator.view(3).running);
  CHECK(coordinator.check().empty());
  coordinator.arrive({4, kSure, 50, 50}, 2);  // never fits: holds nobody up
  CHECK_FALSE(coordinator.fits({4, kSure, 50, 50}));
  coordinator.leave(1, 3);
  CHECK(coordinator.view(2).running);
  CHECK(coordinator.view(3).running);
}

TEST_CASE("random jobs keep the invariants") {
  test::Random random(test::seed());
  INFO("GPUSHARE_TEST_SEED=" << test::seed());
  const auto below = [&](uint64_t n) { return random() % n; };
  for (int round = 0; round < 50; ++round) {
    CoordinatorOptions options = options_of(100);
    options.max_guaranteed = 1 + static_cast<uint32_t>(below(3));
    Coordinator coordinator(options);
    std::vector<CoordinatedJob> jobs;
    sched::SessionId next = 1;
    for (uint64_t now = 0; now < 400; ++now) {
      const uint64_t what = below(10);
      if (what < 4) {
        CoordinatedJob job;
        job.id = next++;
        job.cls = below(2) == 0 ? kSure : kSpare;
        job.bytes = 1 + below(70);
        job.least_bytes = below(job.bytes + 1);
        job.weight = 1 + static_cast<double>(below(3));
        job.may_upgrade = job.cls == kSpare && below(2) == 0;
        jobs.push_back(job);
        coordinator.arrive(job, now);
      } else if (what < 8 && !jobs.empty()) {
        const size_t at = below(jobs.size());
        coordinator.leave(jobs[at].id, now);
        jobs.erase(jobs.begin() + static_cast<long>(at));
      } else if (what == 8) {
        coordinator.set_capacity(30 + below(100), now);
      } else {
        coordinator.tick(now);
      }
      REQUIRE(coordinator.check().empty());
      for (const auto& job : jobs) {
        const auto view = coordinator.view(job.id);
        if (!view.running) REQUIRE(view.limit_bytes == 0);
        // Nobody holds a guarantee that was not asked for.
        if (view.running && view.cls == kSure) REQUIRE((job.cls == kSure || job.may_upgrade));
      }
    }
  }
}
