// The batchers on their own: order, refusals, cancels, several models, cost steps, deferral.
// SPDX-License-Identifier: Apache-2.0
#include "sched/slo/batcher.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <string>

#include "sched/slo/knowledge.hpp"
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
  // 100 ms alone: 10 + 50 = 60. The first ones run all the same, to see whether the estimate holds, and are late; a model's
  // first batch is late for other reasons.
  for (uint64_t at : {0, 60}) {
    CHECK(batcher->arrive(request(9, at, at + 30, 1), at * kMs).ok());
    const Decision probe = batcher->next(at * kMs, 0);
    REQUIRE(probe.batch.has_value());
    batcher->finished_run(probe.batch->id, std::vector<uint64_t>{100 * kMs}, 60 * kMs, (at + 60) * kMs);
  }
  const base::Status status = batcher->arrive(request(1, 120, 150, 1), 120 * kMs);
  CHECK(status.code() == GPUSHARE_TIMED_OUT);
  CHECK(status.message().find("30.000 ms") != std::string::npos);
  CHECK(batcher->arrive(request(2, 120, 190, 1), 120 * kMs).ok());
}

namespace {

// A device and a batcher that learns from durations alone. Each `every_ms` a request comes, whose deadline is `within_ms`
// away; duration(k) is what a batch takes.
class Line {
 public:
  explicit Line(Batcher& of) : batcher(of) {}

  Batcher& batcher;
  uint64_t now = 0, end = 0;
  std::optional<Batch> running;
  RequestId next_id = 1;
  uint32_t first_application = 0;
  std::map<RequestId, uint64_t> deadlines;
  size_t in_time = 0, batches = 0;

  template <class Duration>
  size_t serve(size_t requests, uint64_t every_ms, uint64_t within_ms, Duration duration,
               uint32_t applications = 1) {
    in_time = 0;
    uint64_t arrival = now;
    std::vector<Drop> drops;
    for (size_t sent = 0; sent < requests || running || batcher.pending() > 0;) {
      if (running && (sent == requests || end <= arrival)) {
        now = end;
        for (RequestId id : running->requests) in_time += now <= deadlines[id] ? 1 : 0;
        const Batch done = *std::exchange(running, std::nullopt);
        batcher.finished_run(done.id, {}, last_, now);
      } else if (sent < requests) {
        now = arrival;
        Request r;
        r.id = next_id++;
        r.application = first_application + static_cast<uint32_t>(sent % applications);
        r.arrival_ns = now;
        r.deadline_ns = deadlines[r.id] = now + within_ms * kMs;
        (void)batcher.arrive(r, now);
        arrival += every_ms * kMs;
        ++sent;
      } else {
        now += kMs;
      }
      if (Decision d = batcher.next(now, running ? 1 : 0); d.batch) {
        now = std::max(now, d.batch->not_before_ns);
        batcher.started(d.batch->id, now);
        ++batches;
        last_ = duration(d.batch->requests.size());
        end = now + last_;
        running = std::move(d.batch);
      }
      batcher.take_drops(drops);
    }
    return in_time;
  }

 private:
  uint64_t last_ = 0;
};

std::unique_ptr<Batcher> untold(const char* policy) {
  auto batcher = std::move(*make_batcher(policy));
  REQUIRE(batcher->add_model({.c0_ns = 0, .c1 = 1}).ok());
  return batcher;
}

// The policies of the product; the yardsticks are told each execution time.
bool of_product(const std::string& policy) {
  return policy.find("clairvoyant") == std::string::npos;
}

}  // namespace

TEST_CASE("a slow first batch is no sample: every policy serves the requests after it") {
  for (const char* policy : batcher_names()) {
    if (!of_product(policy)) continue;
    INFO(policy);
    for (const uint64_t first_ms : {150, 500}) {
      for (const uint32_t applications : {1u, 4u}) {
        auto batcher = untold(policy);
        Line line(*batcher);
        size_t calls = 0;
        const size_t in_time = line.serve(
            400, 20, 100, [&](size_t) { return (calls++ == 0 ? first_ms : 5) * kMs; }, applications);
        CHECK(in_time >= 350);
      }
    }
  }
}

// 64 requests at once take four batches of 42 ms.
TEST_CASE("the first burst of a new user is served") {
  const auto takes = [](size_t k) { return (10 + 2 * k) * kMs; };
  for (const char* policy : {"gpushare", "edf", "greedy", "orloj"}) {
    INFO(policy);
    auto unknown = untold(policy);
    Line nothing_known(*unknown);
    CHECK(nothing_known.serve(64, 0, 400, takes) == 64);
    // Beside a user whose requests are known.
    auto batcher = untold(policy);
    Line line(*batcher);
    line.serve(400, 20, 100, takes);
    line.first_application = 7;
    CHECK(line.serve(64, 0, 400, takes) == 64);
  }
}

TEST_CASE("after a slow phase that made every request hopeless, every policy serves again") {
  for (const char* policy : batcher_names()) {
    if (!of_product(policy)) continue;
    INFO(policy);
    auto batcher = untold(policy);
    Line line(*batcher);
    const auto takes = [](uint64_t ms) { return [ms](size_t) { return ms * kMs; }; };
    CHECK(line.serve(600, 5, 30, takes(2)) >= 500);
    line.serve(2000, 5, 30, takes(40));  // ten seconds
    CHECK(line.serve(800, 5, 30, takes(2)) >= 600);
  }
}

TEST_CASE("a profile or a batch time told ten times too high is found out") {
  for (const char* policy : batcher_names()) {
    if (!of_product(policy)) continue;
    for (const bool profile : {true, false}) {
      INFO(policy << (profile ? ", profile" : ", batch time"));
      auto batcher = std::move(*make_batcher(policy));
      REQUIRE(batcher->add_model({.c0_ns = profile ? 1e6 : 150e6, .c1 = 1}).ok());
      for (int i = 0; i < 256; ++i) batcher->observe(0, 0, (profile ? 150 : 5) * kMs);
      Line line(*batcher);
      CHECK(line.serve(600, 20, 100, [](size_t) { return 15 * kMs; }) >= 500);
    }
  }
}

TEST_CASE("an application that is refused beside one that keeps the device busy is tried now and then") {
  auto batcher = std::move(*make_batcher("gpushare"));
  REQUIRE(batcher->add_model({.c0_ns = 0, .c1 = 1, .batch_sizes = {1}}).ok());
  for (int i = 0; i < 256; ++i) {
    batcher->observe(0, 0, 5 * kMs);
    batcher->observe(0, 1, 500 * kMs);  // in truth 5 ms
  }
  size_t second = 0;
  uint64_t now = 0;
  std::vector<Drop> drops;
  CHECK(batcher->arrive(request(1, 0, 100, 0), 0).ok());
  for (uint64_t step = 1; step <= 1000; ++step) {  // requests come while a batch runs
    const Decision d = batcher->next(now, 0);
    uint64_t at = now + 2 * kMs;
    if (step % 8 != 0) CHECK(batcher->arrive(request(2 * step + 1, at / kMs, at / kMs + 100, 0), at).ok());
    if (step % 10 == 0) (void)batcher->arrive(request(2 * step, at / kMs, at / kMs + 100, 1), at);
    now += 5 * kMs;
    if (d.batch) {
      second += d.batch->requests[0] % 2 == 0 ? 1 : 0;
      batcher->finished_run(d.batch->id, std::vector<uint64_t>{5 * kMs}, 5 * kMs, now);
    }
    batcher->take_drops(drops);
  }
  CHECK(second > 50);  // of a hundred
}

namespace {

// Until `until_ns` requests of application 1 are refused, which take 500 ms and have 100. Application 0, whose requests take 5 ms,
// keeps the device busy or asks each 100 ms. Returns how many probes ran, all of them late.
int late_probes(Batcher& batcher, bool busy, uint64_t& now, uint64_t until_ns) {
  static RequestId last_id = 0;  // odd: of application 1
  int ran = 0;
  std::vector<Drop> drops;
  for (uint64_t next_ns = now; now < until_ns;) {
    while (busy ? batcher.pending() < 10 : next_ns <= now) {
      last_id += 2;
      REQUIRE(batcher.arrive(request(last_id, now / kMs, now / kMs + 10'000, 0), now).ok());
      next_ns = now + 100 * kMs;
    }
    (void)batcher.arrive(request(++last_id, now / kMs, now / kMs + 100, 1), now);
    ++last_id;
    const Decision d = batcher.next(now, 0);
    const bool probe = d.batch && d.batch->requests[0] % 2 == 1;
    ran += probe ? 1 : 0;
    now += (probe ? 500 : 5) * kMs;
    if (d.batch)
      batcher.finished_run(d.batch->id, std::vector<uint64_t>{(probe ? 500 : 5) * kMs},
                           (probe ? 500 : 5) * kMs, now);
    batcher.take_drops(drops);
  }
  return ran;
}

}  // namespace

TEST_CASE("late probes of a busy device make those of an idle one no rarer, nor the other way round") {
  constexpr uint64_t kSecond = 1000 * kMs;
  for (const bool busy : {true, false}) {
    INFO((busy ? "busy first" : "idle first"));
    auto batcher = std::move(*make_batcher("gpushare"));
    REQUIRE(batcher->add_model({.c0_ns = 0, .c1 = 1, .learn = false, .batch_sizes = {1}}).ok());
    for (int i = 0; i < 256; ++i) {
      batcher->observe(0, 0, 5 * kMs);
      batcher->observe(0, 1, 500 * kMs);  // which is right
    }
    uint64_t now = 0;
    if (busy) {
      CHECK(late_probes(*batcher, true, now, 800 * kSecond) >= 5);
      CHECK(late_probes(*batcher, false, now, now + 20 * kSecond) >= 4);
    } else {
      CHECK(late_probes(*batcher, false, now, 200 * kSecond) >= 10);
      CHECK(late_probes(*batcher, true, now, now + 60 * kSecond) >= 1);
    }
  }
}

namespace {

enum class End { kLate, kUnknownTime, kFailed };
// When the next probe of application 1 begins, which ends as told, beside application 0 that keeps the device busy with batches of 5 ms.
uint64_t next_probe(Batcher& batcher, uint64_t& now, RequestId& id, End end) {
  while (true) {
    (void)batcher.arrive(request(id++, now / kMs, now / kMs + 100, 1), now);
    (void)batcher.arrive(request(id++, now / kMs, now / kMs + 100, 0), now);
    const Decision next = batcher.next(now, 0);
    REQUIRE(next.batch.has_value());
    const uint64_t began = now;
    const bool probe = next.batch->requests.front() % 2 == 1;
    const uint64_t took = (probe ? 500 : 5) * kMs;
    now += took;
    if (probe && end == End::kFailed)
      batcher.failed(next.batch->id, took, now);
    else
      batcher.finished(next.batch->id, probe && end == End::kUnknownTime ? 0 : took, now);
    std::vector<Drop> drops;
    batcher.take_drops(drops);
    if (probe) return began;
  }
}

}  // namespace

TEST_CASE("a probe that fails is a late one, and one of unknown time says nothing") {
  for (const End third : {End::kFailed, End::kUnknownTime}) {
    INFO((third == End::kFailed ? "failed" : "unknown time"));
    auto batcher = std::move(*make_batcher("gpushare"));
    REQUIRE(batcher->add_model({.c0_ns = 0, .c1 = 1, .learn = false, .batch_sizes = {1}}).ok());
    for (int i = 0; i < 256; ++i) {
      batcher->observe(0, 0, 5 * kMs);
      batcher->observe(0, 1, 500 * kMs);
    }
    uint64_t now = 0;
    RequestId id = 1;  // odd ones are of application 1
    constexpr uint64_t kProbe = 500 * kMs, kShare = 49;
    next_probe(*batcher, now, id, End::kLate);  // the first batch of the model
    next_probe(*batcher, now, id, End::kLate);
    const uint64_t second = now;
    CHECK(next_probe(*batcher, now, id, third) >= second + kShare * kProbe);
    uint64_t ended = now;
    if (third == End::kUnknownTime) {
      CHECK(next_probe(*batcher, now, id, End::kLate) < ended + 10 * kProbe);
      ended = now;
    }
    // The second late one: twice as long.
    CHECK(next_probe(*batcher, now, id, End::kLate) >= ended + 2 * kShare * kProbe);
  }
}

TEST_CASE("an idle device runs what is more likely to miss than not") {
  for (const char* policy : {"gpushare", "greedy", "edf"}) {
    INFO(policy);
    auto batcher = std::move(*make_batcher(policy));
    REQUIRE(batcher->add_model({.c0_ns = 0, .c1 = 1}).ok());
    for (uint64_t i = 0; i < 100; ++i) batcher->observe(0, 0, (i % 10 < 4 ? 60 : 110) * kMs);
    for (int i = 0; i < 3; ++i) {  // after batches that won much for their time, too
      CHECK(batcher->arrive(request(1, 0, 1000), 0).ok());
      const Decision d = batcher->next(0, 0);
      REQUIRE(d.batch.has_value());
      batcher->finished_run(d.batch->id, std::vector<uint64_t>{60 * kMs}, 1 * kMs, 1 * kMs);
    }
    CHECK(batcher->arrive(request(2, 0, 100), 0).ok());
    CHECK(batcher->next(0, 0).batch.has_value());
  }
}

namespace {

// A device that a policy may plan ahead for. Each `every_ms` until 4 s a request comes that has 100 ms; duration_ms(n, k) is
// what the n-th batch takes, of k requests. Returns how many that came at `from_ms` or later were in time.
template <class Duration>
int served_ahead(Batcher& batcher, uint64_t every_ms, Duration duration_ms, uint64_t from_ms = 0) {
  std::vector<Batch> sent;  // the first one runs if `ends_ms` is not 0
  std::vector<Drop> drops;
  uint64_t ends_ms = 0, took_ms = 0, batches = 0;
  int in_time = 0;
  for (uint64_t now_ms = 0; now_ms < 4000; ++now_ms) {
    const uint64_t now = now_ms * kMs;
    if (ends_ms != 0 && ends_ms <= now_ms) {
      for (const RequestId id : sent.front().requests)  // the ids are the times of arrival
        if (id >= from_ms && now_ms <= id + 100) ++in_time;
      batcher.finished_run(sent.front().id, {}, took_ms * kMs, now);
      sent.erase(sent.begin());
      ends_ms = 0;
    }
    if (now_ms % every_ms == 0) {
      Request one = request(now_ms, now_ms, now_ms + 100);
      one.execution_ns = 4 * kMs;
      (void)batcher.arrive(one, now);
    }
    for (Decision next; (next = batcher.next(now, static_cast<uint32_t>(sent.size()))).batch;)
      sent.push_back(*next.batch);
    while (!sent.empty() && ends_ms == 0 && now > sent.front().latest_start_ns) {
      batcher.rejected(sent.front().id, now);
      sent.erase(sent.begin());
    }
    if (!sent.empty() && ends_ms == 0 && now >= sent.front().not_before_ns) {
      batcher.started(sent.front().id, now);
      took_ms = duration_ms(++batches, sent.front().requests.size());
      ends_ms = now_ms + took_ms;
    }
    batcher.take_drops(drops);
  }
  return in_time;
}

}  // namespace

TEST_CASE("after three batches in a row that stalled every policy soon serves again") {
  for (const char* policy : batcher_names()) {
    INFO(policy);
    auto batcher = untold(policy);
    const auto takes = [](uint64_t n, size_t) { return uint64_t{n >= 5 && n <= 7 ? 300u : 4u}; };
    CHECK(served_ahead(*batcher, 10, takes, 3000) >= 80);  // of 100 that came in the last second
  }
}

// A request each 2 ms is more than batches of one serve: a policy that stays with small ones after a stall never catches up.
TEST_CASE("after a stall no policy stays with batches too small for what comes") {
  const auto now_and_then = [](uint64_t n, size_t k) { return 3 + k + (n % 10 == 0 ? 200 : 0); };
  const auto once = [](uint64_t n, size_t k) { return 3 + k + (n >= 20 && n < 24 ? 300 : 0); };
  for (const uint64_t every_ms : {2, 3, 4}) {
    for (const bool often : {true, false}) {
      const auto serve = [&](const char* policy) {
        auto batcher = untold(policy);
        return often ? served_ahead(*batcher, every_ms, now_and_then)
                     : served_ahead(*batcher, every_ms, once);
      };
      const int of_edf = serve("edf");
      for (const char* policy : batcher_names()) {
        if (!of_product(policy)) continue;
        INFO(policy << ", a request each " << every_ms << " ms, "
                    << (often ? "one batch in ten stalls" : "four in a row stall"));
        CHECK(serve(policy) >= 0.6 * of_edf);
      }
    }
  }
}

TEST_CASE("batches that stall now and then are no samples to any policy") {
  for (const auto& [every_ms, one_in, stall_ms] :
       {std::array<uint64_t, 3>{20, 10, 300}, {10, 10, 200}, {20, 7, 200}}) {
    const auto takes = [one_in = one_in, stall_ms = stall_ms](uint64_t n, size_t k) {
      return 3 + k + (n % one_in == 0 ? stall_ms : 0);
    };
    auto edf = untold("edf");
    const int of_edf = served_ahead(*edf, every_ms, takes);
    for (const char* policy : batcher_names()) {
      INFO(policy << ", a request each " << every_ms << " ms, one batch in " << one_in << " stalls for "
                  << stall_ms << " ms");
      auto batcher = untold(policy);
      CHECK(served_ahead(*batcher, every_ms, takes) >= 0.75 * of_edf);
    }
  }
}

TEST_CASE("stalled batches and noise leave what is learned sane") {
  for (const bool stalls : {true, false}) {
    INFO((stalls ? "one batch in ten stalls" : "noise of 0.1") << ", seed " << test::seed());
    test::Random random(test::seed());
    std::normal_distribution<double> noise(0, 0.1);
    auto batcher = untold("gpushare");
    Line line(*batcher);
    line.serve(8000, 4, 100, [&](size_t k) {
      double ms = 4 + 1.0 * static_cast<double>(k);
      if (stalls && uniform(random, 0, 9) == 0) ms += 200;
      if (!stalls) ms *= std::exp(noise(random));
      return static_cast<uint64_t>(ms * 1e6);
    });
    const auto profile = batcher->profile(0, 0);
    REQUIRE(profile.ok());
    // A batch of one takes 5 ms, one of sixteen 20.
    CHECK(profile->c0_ns + profile->c1 * profile->mean_ns < 10e6);
    CHECK(profile->c0_ns + profile->c1 * profile->mean_ns > 3e6);
    CHECK(profile->c1 > 0.05);
    CHECK(profile->mean_ns < 50e6);
    CHECK(profile->samples >= 256);  // requests, not the durations that stand for them
  }
}

TEST_CASE("durations that contradict a profile replace it, and keep its shape") {
  auto batcher = std::move(*make_batcher("gpushare"));
  REQUIRE(batcher->add_model({}).ok());
  // Told: 100 to 300 ms. The truth is a tenth.
  for (uint64_t i = 0; i < 200; ++i) batcher->observe(0, 0, (100 + i * 37 % 200) * 1'000'000);
  Request request;
  request.deadline_ns = 10'000'000'000;
  REQUIRE(batcher->arrive(request, 0).ok());  // looks at the profile
  REQUIRE(batcher->cancel(request.id, 0));
  for (uint64_t i = 0; i < 4; ++i) batcher->observe(0, 0, 20'000'000);
  const Profile profile = *batcher->profile(0, 0);
  CHECK(profile.drifts == 1);
  CHECK(profile.mean_ns == Approx(20e6).epsilon(0.1));
  CHECK(profile.p99_ns > 26e6);  // four alike samples would tell that all are alike
}

TEST_CASE(
    "a profile told wrong of one application is so of those that no batch has tried, and of no others") {
  auto batcher = std::move(*make_batcher("gpushare"));
  REQUIRE(batcher->add_model({}).ok());
  for (const uint32_t application : {0u, 1u, 2u})
    for (uint64_t i = 0; i < 256; ++i) batcher->observe(0, application, (100 + (i * 37) % 200) * kMs);
  uint64_t now = 0;
  RequestId id = 1;
  const auto ran = [&](uint32_t application, uint64_t ms) {
    REQUIRE(batcher->arrive(request(id++, now / kMs, now / kMs + 10'000, application), now).ok());
    const Decision next = batcher->next(now, 0);
    REQUIRE(next.batch.has_value());
    now += ms * kMs;
    batcher->finished_run(next.batch->id, std::vector<uint64_t>{ms * kMs}, ms * kMs, now);
  };
  for (uint64_t i = 0; i < 12; ++i) ran(2, 100 + (i * 50) % 200);  // as told
  for (int i = 0; i < 2; ++i)                                      // a fifth
    for (const uint64_t ms : {25, 55}) ran(0, ms);
  const auto mean_ms = [&](uint32_t application) { return batcher->profile(0, application)->mean_ns / 1e6; };
  CHECK(mean_ms(0) == Approx(40).epsilon(0.35));
  CHECK(mean_ms(1) == Approx(40).epsilon(0.35));
  CHECK(mean_ms(2) == Approx(200).epsilon(0.1));
}

TEST_CASE("a first run that is slow leaves a right profile as it is") {
  auto batcher = std::move(*make_batcher("gpushare"));
  REQUIRE(batcher->add_model({}).ok());
  for (const uint32_t application : {0u, 1u})
    for (int i = 0; i < 256; ++i) batcher->observe(0, application, 10 * kMs);
  uint64_t now = 0;
  RequestId id = 1;
  for (const uint64_t ms : {35, 10, 10, 10}) {
    REQUIRE(batcher->arrive(request(id++, now / kMs, now / kMs + 10'000, 0), now).ok());
    const Decision next = batcher->next(now, 0);
    REQUIRE(next.batch.has_value());
    now += ms * kMs;
    batcher->finished_run(next.batch->id, std::vector<uint64_t>{ms * kMs}, ms * kMs, now);
  }
  CHECK(batcher->profile(0, 0)->mean_ns == Approx(10e6).epsilon(0.03));
  CHECK(batcher->profile(0, 1)->mean_ns == Approx(10e6).epsilon(0.001));
}

TEST_CASE(
    "a wrong profile of widely scattered times is found out by the mean of the first that are measured") {
  auto batcher = std::move(*make_batcher("gpushare"));
  REQUIRE(batcher->add_model({}).ok());
  // Told: 20 to 1,000 ms, evenly by their logarithms. The truth is a fifth: 4 to 200 ms, so that most lie within the profile.
  const auto ms = [](uint64_t i) { return 20 * std::pow(50, static_cast<double>(i * 37 % 64) / 63); };
  for (const uint32_t application : {0u, 1u})
    for (uint64_t i = 0; i < 256; ++i)
      batcher->observe(0, application, static_cast<uint64_t>(ms(i) * double{kMs}));
  uint64_t now = 0;
  const auto ran = [&](uint32_t application, uint64_t i, double factor) {
    REQUIRE(
        batcher->arrive(request(10 * i + application + 1, now / kMs, now / kMs + 10'000, application), now)
            .ok());
    const Decision next = batcher->next(now, 0);
    REQUIRE(next.batch.has_value());
    const auto took = static_cast<uint64_t>(factor * ms(i) * double{kMs});
    now += took;
    batcher->finished_run(next.batch->id, std::vector<uint64_t>{took}, took, now);
  };
  const double told = batcher->profile(0, 0)->mean_ns;
  for (uint64_t i = 0; i < 12; ++i)
    for (const uint32_t application : {0u, 1u}) ran(application, i, application == 0 ? 0.2 : 1);
  CHECK(batcher->profile(0, 0)->mean_ns == Approx(0.2 * told).epsilon(0.4));
  CHECK(batcher->profile(0, 1)->mean_ns == Approx(told).epsilon(0.1));  // as told
}

TEST_CASE("times of finished batches are measured, whichever call tells them") {
  auto batcher = std::move(*make_batcher("gpushare"));
  REQUIRE(batcher->add_model({}).ok());
  uint64_t now = 0;
  RequestId id = 1;
  const auto ran = [&](uint32_t application, uint64_t ms) {
    REQUIRE(batcher->arrive(request(id++, now / kMs, now / kMs + 100'000, application), now).ok());
    const Decision next = batcher->next(now, 0);
    REQUIRE(next.batch.has_value());
    now += ms * kMs;
    batcher->finished(next.batch->id, ms * kMs, now);
    batcher->observe(0, application, ms * kMs);
  };
  for (uint64_t i = 0; i < 100; ++i)
    for (const uint32_t application : {0u, 1u}) ran(application, 100 + (i * 37) % 200);
  for (int i = 0; i < 4; ++i) ran(0, 1000);
  CHECK(batcher->profile(0, 1)->mean_ns == Approx(200e6).epsilon(0.05));
}

TEST_CASE("a failed batch wins nothing") {
  auto batcher = make("gpushare");
  uint64_t now = 0;
  for (RequestId id = 1; id <= 100; ++id) {
    CHECK(batcher->arrive(request(id, now / kMs, now / kMs + 1000), now).ok());
    const Decision d = batcher->next(now, 0);
    REQUIRE(d.batch.has_value());
    now += 10'000;  // fails at once
    batcher->failed(d.batch->id, 10'000, now);
    batcher->failed(d.batch->id, 10'000, now);  // unknown by now
  }
  CHECK(batcher->signals().price_per_s == 0);
  CHECK(batcher->profile(0, 0)->mean_ns == Approx(10e6).epsilon(0.01));
}

TEST_CASE("expired requests are dropped while a batch runs, many of them in pieces") {
  for (const char* policy : batcher_names()) {
    INFO(policy);
    BatcherOptions options;
    options.max_pending = 5000;
    auto batcher = std::move(*make_batcher(policy, options));
    REQUIRE(batcher->add_model({.c0_ns = 10e6, .c1 = 0.5}).ok());
    for (RequestId id = 1; id <= 5000; ++id) CHECK(batcher->arrive(request(id, 0, 100 + id % 3), 0).ok());
    CHECK(batcher->next(1 * kMs, 2).wake_ns <= 100 * kMs);
    std::vector<Drop> drops;
    size_t calls = 0, most = 0;
    for (uint64_t now = 200 * kMs; batcher->pending() > 0 && calls < 50; ++calls) {
      const Decision d = batcher->next(now, 2);
      CHECK_FALSE(d.batch.has_value());
      const size_t before = drops.size();
      batcher->take_drops(drops);
      most = std::max(most, drops.size() - before);
      if (batcher->pending() > 0) CHECK(d.wake_ns == now + 1);
    }
    CHECK(drops.size() == 5000);
    CHECK(most <= 2048);
  }
}

TEST_CASE("prepared sizes above 512 are used") {
  auto batcher = std::move(*make_batcher("gpushare"));
  REQUIRE(batcher->add_model({.c0_ns = 100e6, .c1 = 1e-5, .batch_sizes = {1, 64, 512, 4096}}).ok());
  for (int i = 0; i < 64; ++i) batcher->observe(0, 0, 10 * kMs);
  for (RequestId id = 1; id <= 6000; ++id) CHECK(batcher->arrive(request(id, 0, 500), 0).ok());
  CHECK(batcher->next(0, 0).batch->requests.size() == 4096);
}

TEST_CASE("while all can be served, long requests are, and device time has almost no price") {
  // Ten short requests (10 ms) for each long one (100 ms), 360 ms for all.
  auto batcher = std::move(*make_batcher("gpushare"));
  REQUIRE(batcher->add_model({.c0_ns = 16e6, .c1 = 0.1}).ok());
  for (int i = 0; i < 64; ++i) {
    batcher->observe(0, 0, 10 * kMs);
    batcher->observe(0, 1, 100 * kMs);
  }
  test::Random random(test::seed());
  INFO("seed " << test::seed());
  std::exponential_distribution<double> gap(1 / 6e6);
  std::map<RequestId, Request> held;
  size_t in_time[2] = {}, sent[2] = {};
  uint64_t now = 0, arrival = 0, end = 0, took = 0;
  std::optional<Batch> running;
  for (RequestId id = 1; id <= 4000 || running;) {
    if (running && (end <= arrival || id > 4000)) {
      now = end;
      std::vector<uint64_t> alone;
      for (RequestId member : running->requests) {
        alone.push_back(held[member].execution_ns);
        in_time[held[member].application] += now <= held[member].deadline_ns ? 1 : 0;
      }
      batcher->finished_run(running->id, alone, took, now);
      running.reset();
    } else {
      now = arrival;
      Request r = request(id++, 0, 0, uniform(random, 0, 10) == 0 ? 1 : 0);
      r.arrival_ns = now;
      r.deadline_ns = now + 360 * kMs;
      held[r.id] = r;
      ++sent[r.application];
      (void)batcher->arrive(r, now);
      arrival += static_cast<uint64_t>(gap(random));
    }
    Decision d = batcher->next(now, running ? 1 : 0);
    if (!d.batch) continue;
    uint64_t longest = 0;
    for (RequestId member : d.batch->requests) longest = std::max(longest, held[member].execution_ns);
    took = 16 * kMs + d.batch->requests.size() * longest / 10;
    end = now + took;
    running = std::move(d.batch);
  }
  CHECK(in_time[0] * 100 >= sent[0] * 98);
  CHECK(in_time[1] * 100 >= sent[1] * 95);
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
    uint64_t now = 0;
    const auto arrives = [&](RequestId id, double tokens) {
      r.id = id;
      if (told) r.features = {tokens, 1};
      return batcher->arrive(r, now).code();
    };
    if (told) {  // one that is hopeless runs, to see whether it is
      for (const uint64_t ends : {50, 100}) {
        CHECK(arrives(9, 80) == GPUSHARE_OK);
        const Decision probe = batcher->next(now, 0);
        REQUIRE(probe.batch.has_value());
        now = r.arrival_ns = ends * kMs;
        r.deadline_ns = now + 30 * kMs;
        batcher->finished(probe.batch->id, 50 * kMs, now);
      }
    }
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
    CHECK(run(200, 90, now + 50 * kMs) == GPUSHARE_OK);  // to see whether it is hopeless
    CHECK(run(202, 90, now + 50 * kMs) == GPUSHARE_TIMED_OUT);
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

TEST_CASE(
    "a batcher says what its next batch is worth: the costs of the first that are in time, and nothing of "
    "the others") {
  for (const char* policy : batcher_names()) {
    INFO(policy);
    auto batcher = make(policy, {}, {.c0_ns = 10e6, .c1 = 0.5, .batch_sizes = {1, 2}});
    const auto worth = [&](uint64_t now_ns) {
      return batcher->waiting().worth(batcher->largest_batch(), now_ns);
    };
    CHECK(worth(0).cost == 0);
    CHECK(worth(0).until_ns == kNever);
    REQUIRE(batcher->arrive(request(1, 0, 3000, 0, 7), 0).ok());
    REQUIRE(batcher->arrive(request(2, 0, 2000, 0, 1e-12), 0).ok());
    REQUIRE(batcher->arrive(request(3, 0, 1000, 0, 1e12), 0).ok());
    CHECK(worth(0).cost == 1e12 + 1e-12);  // there is no place for the last
    CHECK(worth(0).until_ns <= 1000 * kMs);
    REQUIRE(batcher->cancel(3, 0));
    CHECK(worth(0).cost == 7 + 1e-12);
    CHECK(worth(2500 * kMs).cost == 7);
    CHECK(worth(3500 * kMs).cost == 0);
    Request none = request(4, 0, 0, 0, 5);
    none.deadline_ns = kNever;
    REQUIRE(batcher->arrive(none, 0).ok());
    CHECK(worth(3500 * kMs).cost == 5);
    // What is in a batch does not wait.
    uint64_t now_ns = 0;
    Decision decision = batcher->next(now_ns, 0);
    while (!decision.batch) decision = batcher->next(now_ns = decision.wake_ns, 0);
    const std::map<RequestId, double> costs{{1, 7}, {2, 1e-12}, {4, 5}};
    double left = 0;
    for (const auto& [id, cost] : costs)
      if (std::count(decision.batch->requests.begin(), decision.batch->requests.end(), id) == 0) left += cost;
    CHECK(worth(now_ns).cost == left);
    batcher->cancel_some();
    CHECK(worth(now_ns).cost == 0);
  }
}

TEST_CASE("requests of one name whose deadlines tell what they take are told apart, others are not") {
  const BatcherOptions options;
  for (const double factor : {1.0, 10.0}) {
    INFO("the ones with more time take so many times as long: " << factor);
    Knowledge knowledge(options);
    const uint32_t model = *knowledge.add_model({.c0_ns = 1e6, .c1 = 0.5});
    const uint32_t tight = Knowledge::objective_of(5 * kMs, 55 * kMs),
                   loose = Knowledge::objective_of(0, 500 * kMs);
    REQUIRE(tight != loose);
    CHECK(Knowledge::objective_of(0, kNever) == 0);
    CHECK(Knowledge::objective_of(7, 7) == 0);
    const uint32_t whole = knowledge.application(model, 3);
    // Each takes 5 to 15 ms, or as many times that.
    for (uint64_t i = 0; i < 400; ++i)
      for (const uint32_t objective : {tight, loose}) {
        const uint32_t index = knowledge.classify(model, 3, {}, objective);
        const double takes_ns =
            (5e6 + 1e6 * static_cast<double>(7 * i % 11)) * (objective == loose ? factor : 1);
        knowledge.observe_told(model, {index, 3, {}, objective}, static_cast<uint64_t>(takes_ns));
      }
    knowledge.refresh(model);
    const uint32_t first = knowledge.classify(model, 3, {}, tight),
                   other = knowledge.classify(model, 3, {}, loose);
    CHECK(knowledge.classify(model, 3, {}, 0) == whole);
    CHECK(knowledge.classify(model, 3, {}, tight + 100) == whole);
    CHECK((first != whole) == (factor > 1));
    CHECK((other != whole) == (factor > 1));
    if (factor > 1) {
      CHECK(knowledge.model(model).alone(first).mean_ns() == Approx(10e6).epsilon(0.02));
      CHECK(knowledge.model(model).alone(other).mean_ns() == Approx(100e6).epsilon(0.02));
    }
  }
}

TEST_CASE("a few durations tell requests of one name apart where they differ by far more than they scatter") {
  const BatcherOptions options;
  for (const double factor : {1.0, 10.0}) {
    INFO("the ones with more time take so many times as long: " << factor);
    Knowledge knowledge(options);
    const uint32_t model = *knowledge.add_model({.c0_ns = 1e6, .c1 = 0.5});
    const uint32_t tight = Knowledge::objective_of(0, 50 * kMs),
                   loose = Knowledge::objective_of(0, 500 * kMs);
    const uint32_t whole = knowledge.application(model, 3);
    const auto runs = [&](uint32_t objective, uint64_t times, double many) {
      for (uint64_t i = 0; i < times; ++i) {
        const uint32_t index = knowledge.classify(model, 3, {}, objective);
        const double takes_ns = (5e6 + 1e6 * static_cast<double>(7 * i % 11)) * many;
        knowledge.observe_told(model, {index, 3, {}, objective}, static_cast<uint64_t>(takes_ns));
      }
    };
    runs(loose, 100, factor);
    runs(tight, 7, 1);
    CHECK(knowledge.classify(model, 3, {}, tight) == whole);
    runs(tight, 1, 1);
    CHECK((knowledge.classify(model, 3, {}, tight) != whole) == (factor > 1));
  }
}

namespace {

// Long requests (100 ms, 500 to their deadline) keep the device busy, and as many of the same name come that have 70 ms
// and take `short_ms`. Returns how many of 2,500 of these finish in time.
size_t short_ones_in_time(Batcher& batcher, uint64_t short_ms, bool told) {
  uint64_t now = 0, arrival = 0;
  RequestId id = 0;
  size_t in_time = 0;
  std::vector<Drop> drops;
  std::map<RequestId, uint64_t> deadlines;
  const auto is_long = [](RequestId of) { return of % 2 == 0; };
  const auto come = [&](uint64_t until_ns) {
    for (; arrival <= until_ns && id < 5000; arrival += 10 * kMs) {
      ++id;
      deadlines[id] = arrival + (is_long(id) ? 500 : 70) * kMs;
      (void)batcher.arrive(request(id, arrival / kMs, deadlines[id] / kMs), arrival);
    }
  };
  while (id < 5000 || batcher.pending() > 0) {
    come(now);
    const Decision d = batcher.next(now, 0);
    batcher.take_drops(drops);
    if (!d.batch) {
      now += kMs;
      continue;
    }
    std::vector<uint64_t> took;
    for (const RequestId of : d.batch->requests) took.push_back((is_long(of) ? 100 : short_ms) * kMs);
    const uint64_t batch_ns = 10 * kMs + took.size() * *std::max_element(took.begin(), took.end()) / 2;
    now += batch_ns;
    come(now);
    for (const RequestId of : d.batch->requests) in_time += !is_long(of) && now <= deadlines[of] ? 1 : 0;
    if (!told) took.assign(took.size(), 0);
    batcher.finished_run(d.batch->id, took, batch_ns, now);
  }
  return in_time;
}

}  // namespace

TEST_CASE("requests that others of their name keep from running are tried, and found to be short") {
  const bool told = GENERATE(true, false);  // what each request took
  const uint64_t short_ms = GENERATE(1, 5);
  CAPTURE(told, short_ms);
  auto batcher = std::move(*make_batcher("gpushare"));
  REQUIRE(batcher->add_model({.c0_ns = 10e6, .c1 = 0.5}).ok());
  for (int i = 0; i < 256; ++i) batcher->observe(0, 0, 100 * kMs);
  // What a trial took is inferred from less than a fifth of what its name takes, and is no stall.
  CHECK(short_ones_in_time(*batcher, short_ms, told) > (told ? 200 : 500));
}

TEST_CASE("a trial that a newer one takes the place of is refused where the policy would refuse it") {
  auto batcher = std::move(*make_batcher("gpushare"));
  REQUIRE(batcher->add_model({.c0_ns = 10e6, .c1 = 0.5}).ok());
  for (int i = 0; i < 256; ++i) batcher->observe(0, 0, 100 * kMs);
  uint64_t now = 0;
  RequestId id = 0;
  const auto arrive = [&](uint64_t within_ms) {
    return batcher->arrive(request(++id, now / kMs, now / kMs + within_ms), now);
  };
  const auto begin = [&] {
    Decision decision = batcher->next(now, 0);
    REQUIRE(decision.batch.has_value());
    return *std::move(decision.batch);
  };
  (void)arrive(40);  // too little time for what its name takes: the probe
  for (int i = 0; i < 40; ++i) {
    REQUIRE(arrive(500).ok());
    const Batch batch = begin();
    now += 110 * kMs * batch.requests.size();
    batcher->finished_run(batch.id, std::vector<uint64_t>(batch.requests.size(), 100 * kMs), 110 * kMs, now);
  }
  REQUIRE(batcher->pending() == 0);
  REQUIRE(arrive(500).ok());
  const Batch runs = begin();
  std::vector<Drop> drops;
  batcher->take_drops(drops);
  drops.clear();
  const RequestId last = id;
  size_t kept = 0;
  for (int i = 0; i < 40; ++i) kept += arrive(40).ok() ? 1 : 0;
  REQUIRE(kept > 10);  // the probe, and trials
  batcher->take_drops(drops);
  CHECK(batcher->pending() == 2);
  CHECK(drops.size() == kept - 2);
  for (const Drop& drop : drops) {
    CHECK(drop.id > last);
    CHECK(drop.reason == DropReason::kHopeless);
  }
  now += 110 * kMs;
  batcher->finished_run(runs.id, std::vector<uint64_t>{100 * kMs}, 110 * kMs, now);
}

TEST_CASE("names and deadlines without end do not fill the memory") {
  const BatcherOptions options;
  Knowledge knowledge(options);
  const uint32_t model = *knowledge.add_model({.c0_ns = 1e6, .c1 = 0.5});
  for (uint32_t i = 0; i < 10'000; ++i) {
    const uint32_t number = i % 100, objective = 1 + i / 100 % 50;
    const uint32_t index = knowledge.classify(model, number, {}, objective);
    knowledge.observe_told(model, {index, number, {}, objective}, (1 + objective) * kMs);
  }
  CHECK(knowledge.model(model).by_objective.size() <= Knowledge::kExactMixture);
  for (const auto& [number, objectives] : knowledge.model(model).by_objective) CHECK(objectives.size() <= 16);
  CHECK(knowledge.model(model).applications.size() <= 132);
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

TEST_CASE("a model whose requests wait for more keeps no other model from an idle device") {
  BatcherOptions options;
  options.max_delay_ms = 50;
  const ModelSpec spec{.c0_ns = 10e6, .c1 = 0.5, .batch_sizes = {1, 2}};
  const auto run = [](Batcher& batcher, uint64_t now_ns) {
    const Decision decision = batcher.next(now_ns, 0);
    REQUIRE(decision.batch.has_value());
    batcher.started(decision.batch->id, now_ns);
    batcher.finished(decision.batch->id, 10 * kMs, now_ns + 10 * kMs);
    return decision.batch->requests;
  };
  const auto of_second = [](RequestId id, uint64_t arrival_ms, uint64_t deadline_ms) {
    Request out = request(id, arrival_ms, deadline_ms);
    out.model = 1;
    return out;
  };
  SECTION("maxdelay: a full batch goes before one request that has come earlier") {
    auto batcher = make("maxdelay", options, spec);
    REQUIRE(batcher->add_model(spec).ok());
    REQUIRE(batcher->arrive(request(1, 0, 300), 0).ok());
    REQUIRE(batcher->arrive(of_second(2, 1, 300), 1 * kMs).ok());
    CHECK(batcher->next(1 * kMs, 0).wake_ns == 50 * kMs);
    REQUIRE(batcher->arrive(of_second(3, 2, 300), 2 * kMs).ok());
    CHECK(run(*batcher, 2 * kMs) == std::vector<RequestId>{2, 3});
    CHECK(batcher->next(12 * kMs, 0).wake_ns == 50 * kMs);
    CHECK(run(*batcher, 50 * kMs) == std::vector<RequestId>{1});
  }
  SECTION("nexus-cycle: a model waits for the end of its cycle alone") {
    auto batcher = make("nexus-cycle", options, spec);
    REQUIRE(batcher->add_model(spec).ok());
    REQUIRE(batcher->arrive(request(1, 0, 300), 0).ok());
    CHECK(run(*batcher, 0) == std::vector<RequestId>{1});
    REQUIRE(batcher->arrive(request(2, 100, 400), 100 * kMs).ok());
    CHECK(run(*batcher, 100 * kMs) ==
          std::vector<RequestId>{2});  // two of them come in 200 ms: that is the cycle
    REQUIRE(batcher->arrive(request(3, 111, 411), 111 * kMs).ok());
    CHECK(batcher->next(111 * kMs, 0).wake_ns == 300 * kMs);
    REQUIRE(batcher->arrive(of_second(4, 112, 500), 112 * kMs).ok());
    CHECK(run(*batcher, 112 * kMs) == std::vector<RequestId>{4});
    CHECK(batcher->next(123 * kMs, 0).wake_ns == 300 * kMs);
  }
}

TEST_CASE("requests that their policy holds back are not said to wait for the next batch") {
  BatcherOptions options;
  options.max_delay_ms = 50;
  auto batcher = make("maxdelay", options, {.c0_ns = 10e6, .c1 = 0.5, .batch_sizes = {1, 2}});
  const auto worth = [&](uint64_t now_ns) {
    return batcher->waiting().worth(batcher->largest_batch(), now_ns).cost;
  };
  for (RequestId id = 1; id <= 3; ++id) REQUIRE(batcher->arrive(request(id, 0, 900, 0, 7), 0).ok());
  const Decision first = batcher->next(0, 0);
  REQUIRE(first.batch.has_value());
  CHECK(worth(0) == 0);  // the third has no companion, and 50 ms are far from over when the batch ends
  REQUIRE(batcher->arrive(request(4, 1, 900, 0, 5), 1 * kMs).ok());
  CHECK_FALSE(batcher->next(1 * kMs, 1).batch.has_value());
  CHECK(worth(1 * kMs) == 12);  // the next batch is full
  REQUIRE(batcher->cancel(4, 2 * kMs));
  CHECK_FALSE(batcher->next(2 * kMs, 1).batch.has_value());
  CHECK(worth(2 * kMs) == 0);
  CHECK_FALSE(batcher->next(45 * kMs, 1).batch.has_value());  // the batch takes longer than expected
  CHECK(worth(45 * kMs) == 0);
  CHECK_FALSE(batcher->next(51 * kMs, 1).batch.has_value());
  CHECK(worth(51 * kMs) == 7);
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
    // The other is kept for a probe, which its deadline comes before.
    batcher->started(decision.batch->id, 0);
    batcher->finished(decision.batch->id, 15 * kMs, 15 * kMs);
    CHECK_FALSE(batcher->next(15 * kMs, 0).batch.has_value());
    std::vector<Drop> drops;
    batcher->take_drops(drops);
    REQUIRE(drops.size() == 1);
    CHECK(drops[0].id == 1);
    CHECK(drops[0].reason == DropReason::kExpired);
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
  CHECK(careful->arrive(request(2, 0, 50), 0).ok());
  const Decision probe = careful->next(0, 0);  // hopeless, and run to see whether it is
  REQUIRE(probe.batch.has_value());
  careful->finished(probe.batch->id, 60 * kMs, 60 * kMs);  // cold
  CHECK(careful->arrive(request(3, 60, 110), 60 * kMs).ok());
  const Decision again = careful->next(60 * kMs, 0);
  REQUIRE(again.batch.has_value());
  careful->finished(again.batch->id, 60 * kMs, 120 * kMs);
  CHECK(careful->arrive(request(1, 120, 170), 120 * kMs).ok());
  CHECK_FALSE(careful->next(120 * kMs, 0).batch.has_value());
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
            if (uniform(random, 0, 7) == 0) {
              batcher->failed(batch.id, took, now);
            } else if (uniform(random, 0, 1) == 0) {
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

TEST_CASE("a batch of unknown time teaches no policy anything") {
  for (const char* policy : batcher_names()) {
    INFO(policy);
    auto batcher = make(policy);
    uint64_t now = 0;
    // Returns what the policy expected of the batch.
    const auto batch = [&](RequestId id, uint64_t took_ms, bool known) {
      Request r = request(id, 0, 0);
      r.arrival_ns = now;
      r.deadline_ns = now + 1000 * kMs;
      REQUIRE(batcher->arrive(r, now).ok());
      Decision decision = batcher->next(now, 0);
      while (!decision.batch) decision = batcher->next(now = decision.wake_ns, 0);
      batcher->started(decision.batch->id, now);
      now += took_ms * kMs;
      batcher->finished(decision.batch->id, known ? took_ms * kMs : 0, now);
      return decision.batch->expected_ns;
    };
    for (RequestId id = 1; id <= 40; ++id) batch(id, 10, true);
    const uint64_t expected_ns = batch(41, 30, false);
    CHECK(batch(42, 10, true) == expected_ns);
  }
}

TEST_CASE("with more models than a decision weighs every model's requests are served") {
  auto batcher = make("gpushare");
  constexpr uint32_t kModels = 60;
  for (uint32_t model = 1; model < kModels; ++model) {
    REQUIRE(batcher->add_model({.c0_ns = 10e6, .c1 = 0.5}).ok());
    for (int i = 0; i < 64; ++i) batcher->observe(model, 0, 10 * kMs);
  }
  for (RequestId id = 0; id < 10 * kModels; ++id) {
    Request r = request(id, 0, 100'000 + id % 7);
    r.model = static_cast<uint32_t>(id < kModels ? id : id % 3);  // most are of three models
    r.cost = 1 + static_cast<double>(id % 5);
    REQUIRE(batcher->arrive(r, 0).ok());
  }
  uint64_t now = 0;
  size_t served = 0;
  while (batcher->pending() > 0) {
    const Decision decision = batcher->next(now, 0);
    REQUIRE(decision.batch);
    served += decision.batch->requests.size();
    batcher->started(decision.batch->id, now);
    now += decision.batch->expected_ns;
    batcher->finished(decision.batch->id, decision.batch->expected_ns, now);
  }
  CHECK(served == 10 * kModels);
  CHECK(now < 100'000 * kMs);
}

// The times of all applications are on one grid, which the times of one may widen while a batch is weighed. The grid's
// older rows are shorter then. Only a build with AddressSanitizer sees that one of them is used.
TEST_CASE("times of an application that widen the grid have the rows of the others taken again") {
  test::Random random(3);
  auto batcher = std::move(*make_batcher("gpushare", {}));
  ModelSpec model{.c0_ns = 1e6, .c1 = 0.3};
  model.batch_sizes.resize(16);
  std::iota(model.batch_sizes.begin(), model.batch_sizes.end(), 1);
  REQUIRE(batcher->add_model(model).ok());
  constexpr uint32_t kApplications =
      60;  // more than are looked at one by one, and more than the mixture remembers
  for (uint32_t a = 0; a < kApplications; ++a) {
    const double usual_ns = 1e6 * std::pow(1.08, a * 37 % kApplications);
    for (int i = 0; i < 256; ++i)
      batcher->observe(
          0, a, static_cast<uint64_t>(usual_ns * static_cast<double>(uniform(random, 900, 1100)) / 1000));
  }
  uint64_t now_ns = kMs;
  for (RequestId id = 1; id <= 200; ++id) {
    Request r;
    r.id = id;
    r.application = static_cast<uint32_t>(uniform(random, 0, kApplications - 1));
    r.arrival_ns = now_ns;
    r.deadline_ns = now_ns + uniform(random, 200, 4'200) * kMs;
    REQUIRE(batcher->arrive(r, now_ns).ok());
  }
  int batches = 0;
  for (auto decision = batcher->next(now_ns, 0); decision.batch && batches < 10;
       decision = batcher->next(now_ns, 0), ++batches) {
    now_ns += 5 * kMs;
    batcher->finished(decision.batch->id, 5 * kMs, now_ns);
  }
  CHECK(batches == 10);
}
