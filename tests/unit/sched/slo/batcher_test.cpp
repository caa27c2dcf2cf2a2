// The batchers on their own: order, refusals, cancels, several models, cost steps, deferral.
// SPDX-License-Identifier: Apache-2.0
#include "sched/slo/batcher.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"

using namespace gpushare;
using namespace gpushare::sched::slo;
using test::uniform;

namespace {

constexpr uint64_t kMs = 1'000'000;

std::unique_ptr<Batcher> make(const char* policy, const BatcherOptions& options = {},
                              ModelSpec model = {.c0_ns = 10e6, .c1 = 0.5}) {
  auto batcher = std::move(*make_batcher(policy, options));
  REQUIRE(batcher->add_model(model).ok());
  for (int i = 0; i < 64; ++i) {
    batcher->observe(0, 0, 10 * kMs);
    batcher->observe(0, 1, 100 * kMs);
  }
  return batcher;
}

Request request(RequestId id, uint64_t arrival_ms, uint64_t deadline_ms, uint32_t application = 0,
                double cost = 1) {
  Request r;
  r.id = id;
  r.application = application;
  r.arrival_ns = arrival_ms * kMs;
  r.deadline_ns = deadline_ms * kMs;
  r.cost = cost;
  r.execution_ns = (application == 0 ? 10 : 100) * kMs;
  return r;
}

}  // namespace

TEST_CASE("names, models and requests that are refused") {
  for (const char* policy : batcher_names()) {
    INFO(policy);
    auto batcher = make(policy);
    CHECK(batcher->name() == policy);
    CHECK(batcher->add_model({.batch_sizes = {}}).status().code() == GPUSHARE_INVALID_ARGUMENT);
    CHECK(batcher->add_model({.batch_sizes = {0}}).status().code() == GPUSHARE_INVALID_ARGUMENT);
    CHECK(batcher->add_model({.c0_ns = -1}).status().code() == GPUSHARE_INVALID_ARGUMENT);
    CHECK(batcher->add_model({.c1 = INFINITY}).status().code() == GPUSHARE_INVALID_ARGUMENT);
    Request r = request(1, 0, 1000);
    r.model = 7;
    CHECK(batcher->arrive(r, 0).code() == GPUSHARE_INVALID_ARGUMENT);
    r = request(1, 0, 1000, 0, 0);
    CHECK(batcher->arrive(r, 0).code() == GPUSHARE_INVALID_ARGUMENT);
    r = request(1, 0, 1000);
    r.features.assign(9, 1);
    CHECK(batcher->arrive(r, 0).code() == GPUSHARE_INVALID_ARGUMENT);
    r.features = {1, NAN};
    CHECK(batcher->arrive(r, 0).message().find("feature 1 is nan") != std::string::npos);
    CHECK(batcher->observe_request(r, 1).code() == GPUSHARE_INVALID_ARGUMENT);
    r.features = {1, 2};
    CHECK(batcher->observe_request(r, 10 * kMs).ok());
    r.features = {1};
    CHECK(batcher->arrive(r, 0).message().find("has 1 features, but application 0 of model 0 has 2") !=
          std::string::npos);
    r = request(1, 0, 1000);
    r.later_steps = {{-1, 1}};
    CHECK(batcher->arrive(r, 0).code() == GPUSHARE_INVALID_ARGUMENT);
    CHECK(batcher->arrive(request(1, 0, 1000), 0).ok());
    CHECK(batcher->arrive(request(1, 0, 1000), 0).code() == GPUSHARE_ALREADY_EXISTS);
    CHECK(batcher->arrive(request(2, 0, 5), 6 * kMs).code() == GPUSHARE_TIMED_OUT);
    CHECK(batcher->pending() == 1);
    CHECK(batcher->cancel(1, 0));
    CHECK_FALSE(batcher->cancel(1, 0));
    CHECK_FALSE(batcher->cancel(99, 0));
    std::vector<Drop> drops;
    batcher->take_drops(drops);
    REQUIRE(drops.size() == 1);
    CHECK(drops[0].reason == DropReason::kCancelled);
    CHECK(batcher->pending() == 0);
    CHECK_FALSE(batcher->next(0, 0).batch.has_value());
    batcher->finished(12345, 1, 1);  // unknown batches are ignored
    batcher->finished_run(12345, {}, 1, 1);
    batcher->rejected(12345, 1);
    batcher->started(12345, 1);
    batcher->observe(9, 0, 1);
    batcher->observe_batch(9, 1, 1, 1);
  }
}

TEST_CASE("gpushare refuses the hopeless at the door and says by how much") {
  auto batcher = make("gpushare");
  (void)batcher->next(0, 0);
  const base::Status status = batcher->arrive(request(1, 0, 30, 1), 0);  // 100 ms alone: 10 + 50 = 60
  CHECK(status.code() == GPUSHARE_TIMED_OUT);
  CHECK(status.message().find("30.000 ms") != std::string::npos);
  CHECK(batcher->arrive(request(2, 0, 70, 1), 0).ok());
}

TEST_CASE("features tell the short from the long where the application does not") {
  for (const bool told : {false, true}) {
    auto batcher = std::move(*make_batcher("gpushare"));
    REQUIRE(batcher->add_model({.c0_ns = 10e6, .c1 = 0.5}).ok());
    Request r = request(0, 0, 0);
    for (uint64_t i = 0; i < 256; ++i) {
      const uint64_t tokens = 1 + i * 37 % 100;
      if (told) r.features = {static_cast<double>(tokens), 1};  // a feature that never changes does no harm
      CHECK(batcher->observe_request(r, tokens * kMs).ok());
    }
    (void)batcher->next(0, 0);
    r.deadline_ns = 30 * kMs;
    const auto arrives = [&](RequestId id, double tokens) {
      r.id = id;
      if (told) r.features = {tokens, 1};
      return batcher->arrive(r, 0).code();
    };
    // 10 ms + half the time alone: 90 tokens are hopeless, 5 are not.
    CHECK(arrives(1, 90) == (told ? GPUSHARE_TIMED_OUT : GPUSHARE_OK));
    CHECK(arrives(2, 5) == GPUSHARE_OK);
    // A number of tokens that was never seen has its prediction's distribution.
    CHECK(arrives(3, 250) == (told ? GPUSHARE_TIMED_OUT : GPUSHARE_OK));
    CHECK(batcher->profile(0, 0)->samples == 256);  // of all its requests
  }
}

TEST_CASE("features are learned from what batches took, told by member or not") {
  for (const bool by_member : {true, false}) {
    INFO(by_member);
    auto batcher = std::move(*make_batcher("gpushare"));
    REQUIRE(batcher->add_model({.c0_ns = 5e6, .c1 = 1, .batch_sizes = {1}}).ok());
    uint64_t now = 0;
    const auto run = [&](RequestId id, double tokens, uint64_t deadline) {
      Request r;
      r.id = id;
      r.arrival_ns = now;
      r.deadline_ns = deadline;
      r.features = {tokens};
      const base::Status status = batcher->arrive(r, now);
      if (!status.ok()) return status.code();
      const Decision decision = batcher->next(now, 0);
      if (!decision.batch.has_value())
        return int32_t{GPUSHARE_TIMED_OUT};  // more likely to miss than not: it is held back
      const auto alone = static_cast<uint64_t>(tokens * 1e6);
      const uint64_t took = 5 * kMs + alone;
      batcher->started(decision.batch->id, now);
      now += took;
      const std::vector<uint64_t> execution_ns(by_member ? 1 : 0, alone);
      batcher->finished_run(decision.batch->id, execution_ns, took, now);
      return status.code();
    };
    for (RequestId id = 0; id < 200; ++id)
      REQUIRE(run(id, static_cast<double>(1 + id * 37 % 100), now + 10'000 * kMs) == GPUSHARE_OK);
    CHECK(run(200, 90, now + 50 * kMs) == GPUSHARE_TIMED_OUT);
    CHECK(run(201, 20, now + 50 * kMs) == GPUSHARE_OK);
  }
}

TEST_CASE("gpushare does not pad short requests to a long one that is not worth it") {
  auto batcher = make("gpushare");
  for (RequestId id = 1; id <= 8; ++id) CHECK(batcher->arrive(request(id, 0, 100), 0).ok());
  CHECK(batcher->arrive(request(9, 0, 90, 1), 0).ok());  // the earliest deadline, ten times as long
  const Decision decision = batcher->next(0, 0);
  REQUIRE(decision.batch.has_value());
  CHECK(decision.batch->requests.size() == 8);
  CHECK(std::count(decision.batch->requests.begin(), decision.batch->requests.end(), 9u) == 0);
}

TEST_CASE("gpushare prefers the costlier of two that cannot both be served, and counts later deadlines") {
  auto batcher = make("gpushare", {}, {.c0_ns = 10e6, .c1 = 0.5, .batch_sizes = {1}});
  CHECK(batcher->arrive(request(1, 0, 70, 1, 1), 0).ok());
  CHECK(batcher->arrive(request(2, 0, 71, 1, 5), 0).ok());
  CHECK(batcher->next(0, 0).batch->requests == std::vector<RequestId>{2});

  auto stepped = make("gpushare", {}, {.c0_ns = 10e6, .c1 = 0.5, .batch_sizes = {1}});
  Request late = request(3, 0, 20, 1, 1);
  late.later_steps = {{200e6, 2}};  // the first deadline is lost already, the second is not
  CHECK(stepped->arrive(late, 0).ok());
  const Decision decision = stepped->next(1 * kMs, 0);
  REQUIRE(decision.batch.has_value());
  CHECK(decision.batch->requests == std::vector<RequestId>{3});
}

TEST_CASE("a partly filled batch waits for company only as long as nobody suffers") {
  BatcherOptions options;
  options.max_defer_ms = 20;
  auto batcher = make("gpushare", options);
  CHECK(batcher->arrive(request(1, 0, 1000), 0).ok());
  const Decision wait = batcher->next(0, 0);
  CHECK_FALSE(wait.batch.has_value());
  CHECK(wait.wake_ns == 20 * kMs);
  CHECK(batcher->arrive(request(2, 10, 1000), 10 * kMs).ok());
  CHECK_FALSE(batcher->next(10 * kMs, 0).batch.has_value());
  CHECK(batcher->next(20 * kMs, 0).batch->requests.size() == 2);
  // 15 ms alone; a deadline in 20 leaves 5 to wait.
  CHECK(batcher->arrive(request(3, 30, 50), 30 * kMs).ok());
  const Decision brief = batcher->next(30 * kMs, 0);
  CHECK_FALSE(brief.batch.has_value());
  CHECK(brief.wake_ns > 34 * kMs);
  CHECK(brief.wake_ns <= 36 * kMs);
}

TEST_CASE("edf takes the earliest deadlines, fifo the earliest arrivals, maxdelay waits") {
  for (const char* policy : {"edf", "fifo", "maxdelay"}) {
    INFO(policy);
    BatcherOptions options;
    options.max_delay_ms = 7;
    auto batcher = make(policy, options, {.c0_ns = 10e6, .c1 = 0.5, .batch_sizes = {1, 2}});
    CHECK(batcher->arrive(request(1, 0, 300), 0).ok());
    if (std::string(policy) == "maxdelay") {
      const Decision wait = batcher->next(0, 0);
      CHECK_FALSE(wait.batch.has_value());
      CHECK(wait.wake_ns == 7 * kMs);
    }
    CHECK(batcher->arrive(request(2, 1, 200), 1 * kMs).ok());
    CHECK(batcher->arrive(request(3, 2, 100), 2 * kMs).ok());
    auto ids = batcher->next(2 * kMs, 0).batch->requests;
    std::sort(ids.begin(), ids.end());
    CHECK(ids ==
          (std::string(policy) == "edf" ? std::vector<RequestId>{2, 3} : std::vector<RequestId>{1, 2}));
    CHECK_FALSE(batcher->next(2 * kMs, 1).batch.has_value());  // busy
  }
}

TEST_CASE("clipper takes the size that its line of latencies gives for the time left") {
  auto batcher = make("clipper");
  RequestId id = 1;
  uint64_t now = 0;
  const auto batch_of = [&](uint64_t deadline_ms) {
    for (int i = 0; i < 16; ++i) {
      Request r = request(id++, 0, 0);
      r.arrival_ns = now;
      r.deadline_ns = now + deadline_ms * kMs;
      CHECK(batcher->arrive(r, now).ok());
    }
    const Decision decision = batcher->next(now, 0);
    REQUIRE(decision.batch.has_value());
    const size_t size = decision.batch->requests.size();
    batcher->started(decision.batch->id, now);
    now += size * 10 * kMs;
    batcher->finished(decision.batch->id, size * 10 * kMs, now);
    for (RequestId left = 1; left < id; ++left) (void)batcher->cancel(left, now);
    return size;
  };
  for (int i = 0; i < 40; ++i) batch_of(10'000);  // explores, a size more each time that it knows the largest
  CHECK(batch_of(50) == 4);                       // 0.92 of the time, at 10 ms a request
}

TEST_CASE("clockwork drops what cannot finish alone, and nothing that can") {
  for (const char* policy : {"clockwork", "clockwork-single"}) {
    INFO(policy);
    BatcherOptions options;
    options.clockwork_slack_ms = 0;
    auto batcher = std::move(*make_batcher(policy, options));
    REQUIRE(batcher->add_model({.c0_ns = 10e6, .c1 = 0.5, .batch_sizes = {1, 2}}).ok());
    for (int i = 0; i < 64; ++i) batcher->observe(0, 0, 10 * kMs);
    CHECK(batcher->arrive(request(1, 0, 13), 0).ok());
    CHECK(batcher->arrive(request(2, 0, 18), 0).ok());  // 15 ms alone, 20 ms with another
    const Decision decision = batcher->next(0, 0);
    REQUIRE(decision.batch.has_value());
    CHECK(decision.batch->requests == std::vector<RequestId>{2});
    std::vector<Drop> drops;
    batcher->take_drops(drops);
    REQUIRE(drops.size() == 1);
    CHECK(drops[0].id == 1);
    CHECK(drops[0].reason == DropReason::kHopeless);
  }
}

TEST_CASE(
    "the yardsticks: greedy's batch has a size of the model, and clairvoyant looks at the shortest too") {
  auto greedy = make("greedy", {}, {.c0_ns = 10e6, .c1 = 0.5, .batch_sizes = {1, 4}});
  for (RequestId id = 1; id <= 6; ++id) CHECK(greedy->arrive(request(id, 0, 1000), 0).ok());
  CHECK(greedy->next(0, 0).batch->requests == std::vector<RequestId>{1, 2, 3, 4});

  // More lengths than it has caps: the least of them is one.
  auto clairvoyant = make("clairvoyant", {}, {.c0_ns = 10e6, .c1 = 0.5, .batch_sizes = {1}});
  for (RequestId id = 1; id <= 24; ++id) CHECK(clairvoyant->arrive(request(id, 0, 1000, 1), 0).ok());
  CHECK(clairvoyant->arrive(request(25, 0, 2000), 0).ok());
  CHECK(clairvoyant->next(0, 0).batch->requests == std::vector<RequestId>{25});
}

TEST_CASE("orloj: the settings for what the text leaves open") {
  BatcherOptions options;
  options.more_than_size = true;
  auto strict = make("orloj", options, {.c0_ns = 10e6, .c1 = 0.5, .batch_sizes = {1, 4}});
  CHECK(strict->arrive(request(1, 0, 1000), 0).ok());
  CHECK_FALSE(strict->next(0, 0).batch.has_value());  // one is not more than one
  CHECK(strict->arrive(request(2, 0, 1000), 0).ok());
  CHECK(strict->next(0, 0).batch->requests.size() == 1);

  for (SizeOrder order : {SizeOrder::kDescending, SizeOrder::kEarliestDeadline}) {
    options = {};
    options.size_order = order;
    auto batcher = make("orloj", options, {.c0_ns = 10e6, .c1 = 0.5, .batch_sizes = {1, 4}});
    for (RequestId id = 1; id <= 4; ++id) CHECK(batcher->arrive(request(id, 0, 1000), 0).ok());
    CHECK(batcher->next(0, 0).batch->requests.size() == (order == SizeOrder::kDescending ? 4u : 1u));
  }
  // A quantile is more careful than the mean: half the requests are long, so four together nearly always are.
  options = {};
  options.estimate_quantile = 0.99;
  auto careful = make("orloj", options, {.c0_ns = 10e6, .c1 = 0.5, .batch_sizes = {1}});
  (void)careful->next(0, 0);
  CHECK(careful->arrive(request(1, 0, 50), 0).ok());
  CHECK_FALSE(careful->next(0, 0).batch.has_value());
  std::vector<Drop> drops;
  careful->take_drops(drops);
  REQUIRE(drops.size() == 1);
  CHECK(drops[0].reason == DropReason::kHopeless);
}

TEST_CASE("random calls: nothing lost, nothing answered twice, batches within their model") {
  constexpr int kCalls = test::kSanitized ? 800 : 4000;
  test::Random random(test::seed());
  for (const char* policy : batcher_names())
    for (int round = 0; round < 6; ++round) {
      INFO(policy << " round " << round << " seed " << test::seed());
      BatcherOptions options;
      options.max_pending = 200;
      options.max_defer_ms = round % 2 == 0 ? 0 : 15;
      options.delay_rate_per_ms = round % 3 == 0 ? 1e-1 : 1e-4;
      auto batcher = std::move(*make_batcher(policy, options));
      REQUIRE(batcher->add_model({.c0_ns = 5e6, .c1 = 0.4, .batch_sizes = {1, 2, 4, 8}}).ok());
      REQUIRE(batcher->add_model({.c0_ns = 20e6, .c1 = 0.2, .batch_sizes = {1, 3}}).ok());
      std::map<RequestId, uint32_t> waiting;  // id to model
      std::vector<Batch> out;
      size_t wrong = 0;
      RequestId next_id = 1;
      uint64_t now = 1'000'000'000'000;
      const auto drops = [&] {
        std::vector<Drop> dropped;
        batcher->take_drops(dropped);
        for (const Drop& drop : dropped) wrong += waiting.erase(drop.id) != 1 ? 1 : 0;
      };
      for (int step = 0; step < kCalls; ++step) {
        now += uniform(random, 0, 3 * kMs);
        const uint64_t what = uniform(random, 0, 9);
        if (what < 5) {
          Request r;
          r.id = next_id++;
          r.model = static_cast<uint32_t>(uniform(random, 0, 1));
          r.application = static_cast<uint32_t>(uniform(random, 0, 70));
          r.arrival_ns = now;
          r.deadline_ns = now + uniform(random, 0, 400) * kMs;
          r.execution_ns = uniform(random, 1, 60) * kMs;
          r.cost = static_cast<double>(uniform(random, 1, 3));
          if (r.application % 3 == 0) r.features = {static_cast<double>(r.execution_ns / kMs), 1e9};
          if (uniform(random, 0, 5) == 0)
            r.later_steps = {{static_cast<double>(uniform(random, 0, 300)) * 1e6, 2}};
          if (batcher->arrive(r, now).ok()) waiting[r.id] = r.model;
        } else if (what == 5 && !waiting.empty()) {
          auto victim = waiting.lower_bound(uniform(random, 0, next_id));
          if (victim == waiting.end()) victim = waiting.begin();
          if (!batcher->cancel(victim->first, now)) ++wrong;
        } else if (what == 6 && !out.empty()) {
          const Batch batch = out.front();
          out.erase(out.begin());
          if (now > batch.latest_start_ns || uniform(random, 0, 9) == 0) {
            for (RequestId id : batch.requests) waiting[id] = batch.model;  // comes back as drops
            batcher->rejected(batch.id, now);
          } else {
            batcher->started(batch.id, now);
            const uint64_t took = uniform(random, 1, 80) * kMs;
            now += took;
            if (uniform(random, 0, 1) == 0) {
              const std::vector<uint64_t> execution_ns(uniform(random, 0, batch.requests.size()),
                                                       took / 2 + 1);
              batcher->finished_run(batch.id, execution_ns, took, now);
            } else {
              batcher->observe(batch.model, static_cast<uint32_t>(uniform(random, 0, 70)),
                               uniform(random, 1, 60) * kMs);
              batcher->observe_batch(batch.model, static_cast<uint32_t>(batch.requests.size()), took / 2 + 1,
                                     took);
              batcher->finished(batch.id, took, now);
            }
          }
        }
        drops();
        Decision decision = batcher->next(now, static_cast<uint32_t>(out.size()));
        if (decision.batch) {
          const Batch& batch = *decision.batch;
          if (batch.requests.empty() || batch.requests.size() > (batch.model == 0 ? 8u : 3u)) ++wrong;
          for (RequestId id : batch.requests) {
            const auto held = waiting.find(id);
            if (held == waiting.end() || held->second != batch.model)
              ++wrong;
            else
              waiting.erase(held);
          }
          out.push_back(batch);
        }
        drops();
        if (batcher->pending() != waiting.size() || batcher->pending() > 200) ++wrong;
      }
      CHECK(wrong == 0);
    }
}
