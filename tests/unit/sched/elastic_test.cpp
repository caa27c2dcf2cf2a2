// Which elastic ranges are asked to give back, and what follows from their answers; a property test on virtual time.
// SPDX-License-Identifier: Apache-2.0
#include "sched/elastic.hpp"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "sched/scheduler.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

namespace {

using namespace gpushare;  // NOLINT
using sched::RangeRequest;
using sched::SessionClass;

constexpr uint64_t kAnswer = 100;

// Sessions that rank by class alone.
struct ElasticRanges : sched::ElasticRanges {
  ElasticRanges()
      : sched::ElasticRanges([this](std::span<const sched::Part> parts) {
          std::vector<sched::Claim> claims;
          for (const sched::Part& part : parts)
            claims.push_back({part.bytes, classes[part.session] == SessionClass::kGuaranteed, 0, true});
          return claims;
        }) {}
  ElasticRanges(const ElasticRanges&) = delete;
  void open(sched::RangeId id, const sched::RangeSpec& spec) {
    classes[spec.session] = spec.cls;
    sched::ElasticRanges::open(id, spec);
  }
  std::map<sched::SessionId, SessionClass> classes;
};

void add(ElasticRanges& ranges, sched::RangeId id, SessionClass cls, uint64_t bytes, double price = 1,
         uint64_t answer_ns = kAnswer) {
  ranges.open(id, {id, cls, answer_ns, price});
  ranges.set_bytes(id, bytes);
}

std::vector<std::pair<sched::RangeId, uint64_t>> asked(const std::vector<RangeRequest>& requests) {
  std::vector<std::pair<sched::RangeId, uint64_t>> out;
  for (const RangeRequest& request : requests) out.emplace_back(request.range, request.bytes);
  return out;
}
using Asked = std::vector<std::pair<sched::RangeId, uint64_t>>;

TEST_CASE(
    "opportunistic ranges are asked before guaranteed ones, cheap ones before dear ones, for no more than is "
    "missing") {
  ElasticRanges ranges;
  add(ranges, 1, SessionClass::kGuaranteed, 100);
  add(ranges, 2, SessionClass::kGuaranteed, 100, 3);
  add(ranges, 3, SessionClass::kGuaranteed, 100, 2);
  add(ranges, 4, SessionClass::kOpportunistic, 100, 9);
  add(ranges, 5, SessionClass::kGuaranteed, 100, 1, 0);  // has no function
  CHECK(asked(ranges.ask(1, 1, 40, 0)) == Asked{{4, 40}});
  CHECK(ranges.on_the_way_bytes(1) == 40);
  CHECK(ranges.next_deadline_ns() == kAnswer);
  CHECK(ranges.ask(1, 1, 40, 10).empty());  // on its way
  CHECK(asked(ranges.ask(1, 1, 140, 10)) == Asked{{3, 100}});
  ranges.withdraw(1);
  CHECK(ranges.next_deadline_ns() == UINT64_MAX);
  CHECK(asked(ranges.ask(1, 2, 250, 20)) == Asked{{4, 100}, {3, 100}, {2, 50}});
  // An opportunistic one asks no guaranteed ones.
  ElasticRanges low;
  add(low, 1, SessionClass::kOpportunistic, 0);
  add(low, 2, SessionClass::kGuaranteed, 100);
  add(low, 3, SessionClass::kOpportunistic, 100);
  CHECK(asked(low.ask(1, 1, 150, 0)) == Asked{{3, 100}});
}

TEST_CASE("who gave all that it was asked for is asked again when others took it, who declined is not") {
  ElasticRanges ranges;
  add(ranges, 1, SessionClass::kGuaranteed, 0);
  add(ranges, 2, SessionClass::kGuaranteed, 100, 1);
  add(ranges, 3, SessionClass::kGuaranteed, 100, 2);
  add(ranges, 4, SessionClass::kGuaranteed, 100, 3);
  CHECK(asked(ranges.ask(1, 7, 250, 0)) == Asked{{2, 100}, {3, 100}, {4, 50}});
  ranges.set_bytes(2, 60);
  ranges.set_bytes(2, 0);
  ranges.answer(3, 0);
  ranges.set_bytes(4, 80);
  ranges.answer(4, 20);  // less than it was asked for
  ranges.set_bytes(2, 100);
  CHECK(ranges.on_the_way_bytes(7) == 0);
  CHECK(ranges.ask(1, 7, 250, 1).empty());
  ranges.taken(8);  // another wait
  CHECK(ranges.ask(1, 7, 250, 1).empty());
  ranges.taken(7);
  CHECK(asked(ranges.ask(1, 7, 250, 1)) == Asked{{2, 100}});
  ranges.taken(7);
  CHECK(ranges.ask(1, 7, 250, 2).empty());  // it has not given yet
}

TEST_CASE("who declines keeps its class, who keeps silent loses it until it gives something") {
  ElasticRanges ranges;
  add(ranges, 1, SessionClass::kGuaranteed, 0);
  add(ranges, 2, SessionClass::kGuaranteed, 100, 1);
  add(ranges, 3, SessionClass::kGuaranteed, 100, 2);
  add(ranges, 4, SessionClass::kGuaranteed, 100, 3);
  add(ranges, 5, SessionClass::kGuaranteed, 100, 4);
  CHECK(asked(ranges.ask(1, 7, 50, 0)) == Asked{{2, 50}});
  ranges.answer(2, 0);
  CHECK(asked(ranges.ask(1, 7, 50, 1)) == Asked{{3, 50}});  // nobody is asked twice for one wait
  CHECK(ranges.expire(kAnswer).empty());
  const auto silent = ranges.expire(1 + kAnswer);
  REQUIRE(silent.size() == 1);
  CHECK(silent[0].range == 3);
  CHECK(silent[0].asker == 1);
  CHECK(ranges.silent(3));
  CHECK(ranges.session_silent(3));
  CHECK_FALSE(ranges.session_silent(2));
  // After a silence all others at once.
  CHECK(asked(ranges.ask(1, 7, 50, 102)) == Asked{{4, 50}, {5, 50}});
  ranges.set_bytes(4, 80);
  CHECK(ranges.on_the_way_bytes(7) == 80);
  ranges.answer(4, 30);  // 10 more to come
  CHECK(ranges.on_the_way_bytes(7) == 60);
  ranges.answer(5, ElasticRanges::kNoAnswer);
  const auto refused = ranges.expire(103);
  REQUIRE(refused.size() == 1);
  CHECK(refused[0].range == 5);
  ranges.set_bytes(4, 70);
  CHECK(ranges.expire(1000).empty());  // it kept its word
  // A silent one is asked no more; giving something ends that.
  ranges.withdraw(7);
  CHECK(asked(ranges.ask(1, 8, 100, 1000)) == Asked{{2, 100}});
  ranges.withdraw(8);
  ranges.set_bytes(3, 90);
  CHECK_FALSE(ranges.silent(3));
  CHECK(asked(ranges.ask(1, 9, 150, 1001)) == Asked{{2, 100}, {3, 50}});
  ranges.close(2);
  ranges.close(2);
  CHECK(ranges.on_the_way_bytes(9) == 50);
  ranges.answer(2, 5);
  CHECK(ranges.ask(2, 10, 5, 0).empty());
}

TEST_CASE("a policy that ranks sessions ranks their ranges, then comes the price") {
  for (const char* policy : {"priority", "fair"}) {
    INFO(policy);
    sched::SchedulerOptions options;
    options.capacity_bytes = 1000;
    sched::Scheduler scheduler(options, std::move(*sched::make_policy(policy)));
    sched::ElasticRanges ranges(
        [&](std::span<const sched::Part> parts) { return scheduler.claims_on(parts, 0); });
    for (const sched::SessionId id : {1, 2, 3, 4}) {
      sched::SessionSpec spec;
      spec.id = id;
      spec.name = "job";
      spec.cls = id < 3 ? SessionClass::kGuaranteed : SessionClass::kOpportunistic;
      spec.priority = id % 2 == 0 ? 1 : 0;
      spec.persistent_bytes = 100;
      REQUIRE(scheduler.arrive(spec, 0).ok());
      ranges.open(id, {id, spec.cls, kAnswer, id % 2 == 0 ? 1.0 : 2.0});
      ranges.set_bytes(id, 100);
    }
    ranges.open(9, {1, SessionClass::kGuaranteed, 0, 0});
    const bool ranked = std::string(policy) == "priority";
    CHECK(asked(ranges.ask(9, 1, 150, 0)) == (ranked ? Asked{{3, 100}, {4, 50}} : Asked{{4, 100}, {3, 50}}));
    ranges.withdraw(1);
    CHECK(asked(ranges.ask(9, 2, 350, 0)) == (ranked ? Asked{{3, 100}, {4, 100}, {1, 100}, {2, 50}}
                                                     : Asked{{4, 100}, {3, 100}, {2, 100}, {1, 50}}));
    // Bytes that the scheduler itself prices cost what moving them takes.
    const auto claims = scheduler.claims_on(std::vector<sched::Part>{{3, 10}, {3, 20}, {77, 5}}, 0);
    CHECK(claims[1].price_ns == Approx(2 * claims[0].price_ns));
    CHECK(claims[0].in_parts);
    CHECK(claims[2].bytes == 5);  // of nobody
  }
}

// Ranges that trade on virtual time. Owners give at once, late, in part, decline, keep silent or break their word.
// Bytes are conserved, and a wait is over within two deadlines: it has its bytes, or nobody is left to ask.
TEST_CASE("a wait is over within two deadlines, whatever the owners do") {
  const uint64_t seed = test::seed();
  CAPTURE(seed);
  test::Random random(seed);
  constexpr uint64_t kCapacity = 1000;
  for (int world = 0; world < 400; ++world) {
    ElasticRanges ranges;
    struct Owner {
      SessionClass cls;
      uint64_t bytes = 0;
      int habit = 0;
    };
    std::map<sched::RangeId, Owner> owners;
    struct Promise {
      uint64_t at, bytes;
    };
    std::map<sched::RangeId, Promise> promises;
    uint64_t free = kCapacity, now = 0, want = 0;
    const uint64_t count = test::uniform(random, 2, 8);
    for (uint64_t id = 1; id <= count; ++id) {
      const auto cls =
          test::uniform(random, 0, 1) == 0 ? SessionClass::kGuaranteed : SessionClass::kOpportunistic;
      const uint64_t bytes = test::uniform(random, 0, std::min<uint64_t>(free, 400));
      free -= bytes;
      owners[id] = {cls, bytes, static_cast<int>(test::uniform(random, 0, 5))};
      add(ranges, id, cls, bytes, static_cast<double>(test::uniform(random, 1, 4)));
    }
    const auto give = [&](sched::RangeId id, uint64_t bytes) {
      bytes = std::min(bytes, owners[id].bytes);
      owners[id].bytes -= bytes;
      free += bytes;
      ranges.set_bytes(id, owners[id].bytes);
    };
    for (int wait = 0; wait < 20; ++wait) {
      const sched::RangeId asker = test::uniform(random, 1, count);
      const uint64_t wanted = test::uniform(random, 1, 500), since = now;
      ++want;
      bool got = false, over = false;
      for (; !got && !over; ++now) {
        REQUIRE(now <= since + 2 * kAnswer + 1);
        for (auto at = promises.begin(); at != promises.end();) {
          if (at->second.at > now) {
            ++at;
            continue;
          }
          give(at->first, at->second.bytes);
          at = promises.erase(at);
        }
        for (const RangeRequest& silent : ranges.expire(now)) CHECK(ranges.silent(silent.range));
        got = free >= wanted;
        if (got) break;
        for (const RangeRequest& request : ranges.ask(asker, want, wanted - free, now)) {
          CHECK(request.range != asker);
          CHECK(request.bytes <= owners[request.range].bytes);
          CHECK((owners[asker].cls == SessionClass::kGuaranteed ||
                 owners[request.range].cls == SessionClass::kOpportunistic));
          switch (owners[request.range].habit) {
            case 0:
              give(request.range, request.bytes);
              ranges.answer(request.range, request.bytes);
              break;
            case 1:  // keeps its word
              ranges.answer(request.range, request.bytes);
              promises[request.range] = {now + test::uniform(random, 1, kAnswer - 1), request.bytes};
              break;
            case 2:
              ranges.answer(request.range, request.bytes / 2);
              give(request.range, request.bytes / 2);
              break;
            case 3:
              ranges.answer(request.range, 0);
              break;
            case 4:  // breaks it
              ranges.answer(request.range, request.bytes);
              break;
            default:
              break;  // never answers
          }
        }
        over = free < wanted && ranges.on_the_way_bytes(want) == 0 &&
               ranges.ask(asker, want, wanted - free, now).empty();
      }
      ranges.withdraw(want);
      if (got) {
        free -= wanted;
        owners[asker].bytes += wanted;
        ranges.set_bytes(asker, owners[asker].bytes);
      }
      uint64_t sum = free;
      for (const auto& [id, owner] : owners) sum += owner.bytes;
      REQUIRE(sum == kCapacity);
    }
  }
}

}  // namespace
