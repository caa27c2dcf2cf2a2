// Continuous batching on its own: the model of time, memory, deadlines, and random calls under each policy.
// SPDX-License-Identifier: Apache-2.0
#include "sched/slo/step_batcher.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "support/catch.hpp"
#include "support/random.hpp"

using namespace gpushare;
using namespace gpushare::sched::slo;
using test::uniform;

namespace {

constexpr uint64_t kMs = 1'000'000;

std::unique_ptr<StepBatcher> make_steps(const StepOptions& options = {}, const char* policy = "gpushare") {
  return std::move(*make_step_batcher(policy, options));
}

StepRequest generation(RequestId id, uint64_t prompt, uint64_t arrival_ms = 0) {
  StepRequest out;
  out.id = id;
  out.prompt_tokens = prompt;
  out.arrival_ns = arrival_ms * kMs;
  return out;
}

// Runs steps of the given cost until nothing is left; `wants` tokens each. Returns the last event of each request.
std::map<RequestId, StepEvent> run_to_end(StepBatcher& batcher, uint64_t* now, uint64_t wants) {
  std::map<RequestId, StepEvent> last;
  std::vector<StepEvent> events;
  while (true) {
    const Step& step = batcher.begin_step(*now);
    if (!step.empty()) {
      uint64_t took = 10 * kMs;
      std::vector<uint8_t> done;
      for (const StepMember& each : step.members) {
        took += each.prefill == 0 ? kMs : each.prefill * kMs / 10;
        done.push_back((each.prefill == 0 || each.before + each.prefill == each.total) &&
                       each.tokens + 1 == wants);
      }
      StepResult result;
      result.done = done;
      *now += took;
      batcher.end_step(result, took, *now);
    }
    events.clear();
    batcher.take_events(events);
    for (const StepEvent& each : events) last[each.id] = each;
    if (step.empty()) return last;
  }
}

const StepOptions kKnown{.step_ns = 10e6, .decode_ns = 1e6, .prefill_ns = 0.1e6};

}  // namespace

TEST_CASE("a step's time is learned from steps, with stalls and from wrong beginnings") {
  test::Random random(test::seed());
  INFO("seed " << test::seed());
  for (const double told : {0.0, 0.2, 8.0, 1e3, 1e6}) {
    INFO("told " << told << " of what is true");
    StepOptions options;
    options.step_ns = told * 10e6;
    options.decode_ns = told * 0.5e6;
    options.prefill_ns = told * 0.1e6;
    options.read_ns = told * 100;
    StepTime time(options);
    for (int i = 0; i < 400; ++i) {
      const StepWork work{static_cast<double>(uniform(random, 0, 60)),
                          static_cast<double>(uniform(random, 0, 500)),
                          static_cast<double>(uniform(random, 0, 60000))};
      const double took = 10e6 + 0.5e6 * work.decoding + 0.1e6 * work.prefill + 100 * work.read;
      time.observe(work, i % 10 == 3 ? 20 * took : took);
    }
    CHECK(time.ns({30, 250, 30000}) == Approx(53e6).epsilon(0.05));
    CHECK(time.ns({1, 0, 500}) == Approx(10.55e6).epsilon(0.1));
  }
}

TEST_CASE("prompts are processed in chunks that leave the tokens of members in time") {
  auto batcher = make_steps(kKnown);
  StepRequest first = generation(1, 10);
  first.token_ns = 30 * kMs;
  REQUIRE(batcher->arrive(first, 0).ok());
  uint64_t now = 0;
  REQUIRE(batcher->begin_step(now).members.size() == 1);
  now += 11 * kMs;
  batcher->end_step({}, 11 * kMs, now);
  REQUIRE(batcher->arrive(generation(2, 10000), now).ok());
  for (int i = 0; i < 20; ++i) {
    const Step& step = batcher->begin_step(now);
    REQUIRE(step.members.size() == 2);
    CHECK(step.members[0].id == 1);
    CHECK(step.members[0].prefill == 0);
    CHECK(step.members[1].prefill > 0);
    CHECK(step.expected_ns <= 30 * kMs);
    now += step.expected_ns;
    batcher->end_step({}, step.expected_ns, now);
  }
  std::vector<StepEvent> events;
  batcher->take_events(events);
  CHECK(std::none_of(events.begin(), events.end(), [](const StepEvent& each) { return each.late; }));
}

TEST_CASE("of prompts that cannot all be in time the longest is put off") {
  auto batcher = make_steps(kKnown);
  for (RequestId id = 0; id < 3; ++id) {
    StepRequest one = generation(id, id == 0 ? 900 : 300);
    one.first_deadline_ns = 120 * kMs;
    REQUIRE(batcher->arrive(one, 0).ok());
  }
  uint64_t now = 0;
  const auto last = run_to_end(*batcher, &now, 1);
  CHECK(last.at(1).status == GPUSHARE_OK);
  CHECK(!last.at(1).late);
  CHECK(last.at(2).status == GPUSHARE_OK);
  CHECK(!last.at(2).late);
  CHECK((last.at(0).late || last.at(0).dropped == DropReason::kExpired));
}

TEST_CASE("a model of time that is far too slow does not stop the queue") {
  for (const double factor : {1e6, 1e3, 100.0, 0.01}) {
    INFO(factor);
    StepOptions wrong = kKnown;
    wrong.step_ns *= factor;
    wrong.decode_ns *= factor;
    wrong.prefill_ns *= factor;
    auto batcher = make_steps(wrong);
    uint64_t now = 0, in_time = 0;
    for (RequestId id = 0; id < 200; ++id) {
      StepRequest one = generation(id, 100);
      one.arrival_ns = now;
      one.first_deadline_ns = now + 100 * kMs;
      one.token_ns = 50 * kMs;
      REQUIRE(batcher->arrive(one, now).ok());
      const auto last = run_to_end(*batcher, &now, 5);
      if (last.at(id).status == GPUSHARE_OK && !last.at(id).late) ++in_time;
      now += 5 * kMs;
    }
    CHECK(in_time >= 190);
  }
}

TEST_CASE("requests join only where the members' later growth fits") {
  for (const char* policy : {"gpushare", "fifo"}) {
    INFO(policy);
    StepOptions options = kKnown;
    options.memory_bytes = 1000;
    auto batcher = make_steps(options, policy);
    for (RequestId id = 0; id < 10; ++id) {
      StepRequest one = generation(id, 10, id);
      one.start_bytes = 100;
      one.step_bytes = 10;
      one.expected_tokens = 40;
      REQUIRE(batcher->arrive(one, 10 * kMs).ok());
    }
    uint64_t now = 10 * kMs;
    const auto last = run_to_end(*batcher, &now, 40);
    for (RequestId id = 0; id < 10; ++id) CHECK(last.at(id).status == GPUSHARE_OK);
    const StepStats stats = batcher->stats();
    CHECK(stats.most_bytes <= 1000);
    CHECK(stats.bytes == 0);
    // Ours knows that 500 bytes each come; in order of arrival ten join, and some are returned.
    if (std::string(policy) == "gpushare")
      CHECK(stats.returned == 0);
    else
      CHECK(stats.returned > 0);
  }
}

TEST_CASE("random calls: every request is answered once, and no plan is above the limit") {
  for (const char* policy : {"gpushare", "fifo"}) {
    for (int round = 0; round < 60; ++round) {
      test::Random random(test::seed() + static_cast<uint64_t>(round));
      INFO(policy << ", seed " << test::seed() + static_cast<uint64_t>(round));
      StepOptions options;
      options.max_members = static_cast<uint32_t>(uniform(random, 1, 8));
      options.max_pending = uniform(random, 1, 40);
      options.max_prefill_tokens = uniform(random, 0, 1) * uniform(random, 1, 50);
      options.memory_bytes = uniform(random, 0, 1) * uniform(random, 100, 3000);
      if (uniform(random, 0, 1) == 1)
        options.step_ns = 1e6, options.decode_ns = 1e5, options.prefill_ns = 1e4;
      auto batcher = make_steps(options, policy);
      uint64_t now = 1, limit = options.memory_bytes == 0 ? UINT64_MAX : options.memory_bytes, empty = 0;
      std::set<RequestId> held;
      std::map<RequestId, uint64_t> tokens, processed;
      RequestId next = 0;
      const auto take = [&] {
        std::vector<StepEvent> events;
        batcher->take_events(events);
        for (const StepEvent& each : events) {
          REQUIRE(held.contains(each.id));
          REQUIRE(each.tokens >= tokens[each.id]);
          tokens[each.id] = each.tokens;
          if (each.ended) held.erase(each.id);
        }
      };
      for (int call = 0; call < 400 || !held.empty(); ++call) {
        REQUIRE(call < 100000);
        if (call < 400 && uniform(random, 0, 1) == 0) {
          StepRequest one = generation(next, uniform(random, 1, 100));
          one.arrival_ns = now;
          one.start_bytes = uniform(random, 0, 400);
          one.step_bytes = uniform(random, 0, 30);
          one.expected_tokens = uniform(random, 0, 10);
          if (uniform(random, 0, 1) == 0) one.first_deadline_ns = now + uniform(random, 0, 200) * kMs;
          if (uniform(random, 0, 1) == 0) one.token_ns = uniform(random, 1, 10) * kMs;
          if (batcher->arrive(one, now).ok()) held.insert(next);
          ++next;
        }
        if (uniform(random, 0, 9) == 0 && next > 0) batcher->cancel(uniform(random, 0, next - 1), now);
        if (uniform(random, 0, 19) == 0 && options.memory_bytes != 0)
          REQUIRE(batcher->set_memory(limit = uniform(random, 0, options.memory_bytes)).ok());
        if (call >= 400 && options.memory_bytes != 0)
          REQUIRE(batcher->set_memory(limit = options.memory_bytes).ok());
        take();
        const Step& step = batcher->begin_step(now);
        take();
        if (step.empty()) {
          now = step.wake_ns == kNever ? now + kMs : std::max(now + 1, step.wake_ns + 1);
          // Whoever waits without a deadline must not wait for ever.
          REQUIRE((limit < options.memory_bytes || held.empty() || step.wake_ns != kNever || ++empty < 5));
          continue;
        }
        empty = 0;
        if (uniform(random, 0, 29) == 0) {
          if (next > 0) batcher->cancel(uniform(random, 0, next - 1), now);
          batcher->undo_step();
          take();
          continue;
        }
        for (RequestId id : step.left) {
          REQUIRE(held.contains(id));
          processed[id] = 0;
        }
        uint64_t prefill = 0;
        std::vector<uint8_t> done;
        std::vector<int32_t> statuses;
        std::vector<uint64_t> bytes;
        REQUIRE(step.members.size() <= options.max_members);
        for (const StepMember& each : step.members) {
          REQUIRE(held.contains(each.id));
          REQUIRE(each.before == processed[each.id]);
          processed[each.id] += each.prefill;
          REQUIRE(processed[each.id] <= each.total);
          prefill += each.prefill;
          done.push_back(uniform(random, 0, 9) == 0);
          statuses.push_back(uniform(random, 0, 29) == 0 ? GPUSHARE_IO_ERROR : GPUSHARE_OK);
          bytes.push_back(uniform(random, 0, 9) == 0 ? uniform(random, 0, 800) : UINT64_MAX);
          if (done.back() || statuses.back() != GPUSHARE_OK) processed[each.id] = 0;
        }
        if (options.max_prefill_tokens != 0) REQUIRE(prefill <= options.max_prefill_tokens);
        if (uniform(random, 0, 9) == 0 && next > 0) batcher->cancel(uniform(random, 0, next - 1), now);
        if (uniform(random, 0, 9) == 0) batcher->expire(now);
        StepResult result;
        if (uniform(random, 0, 29) == 0) result.status = GPUSHARE_CALLBACK_FAILED;
        result.done = done;
        result.statuses = statuses;
        result.bytes = bytes;
        const uint64_t took = kMs + prefill * 10'000 + uniform(random, 0, kMs);
        now += took;
        batcher->end_step(result, took, now);
        take();
      }
      const StepStats stats = batcher->stats();
      CHECK(stats.members == 0);
      CHECK(stats.pending == 0);
      CHECK(stats.bytes == 0);
      CHECK(stats.accepted == stats.in_time + stats.late + stats.failed + stats.expired + stats.cancelled);
      CHECK((options.memory_bytes == 0 || stats.most_bytes <= options.memory_bytes));
    }
  }
}

TEST_CASE("requests without deadlines are looked at in the order of their arrival, whatever their ids") {
  auto batcher = make_steps({.max_members = 1});
  // The first to arrive has the last id. More wait than the policy looks at, and for each that ends another comes.
  REQUIRE(batcher->arrive(generation(UINT64_MAX, 5), 0).ok());
  RequestId next = 0;
  for (; next < 2000; ++next) REQUIRE(batcher->arrive(generation(next, 5, 1), kMs).ok());
  uint64_t now = kMs;
  bool served = false;
  for (int i = 0; i < 100 && !served; ++i) {
    const Step& step = batcher->begin_step(now);
    REQUIRE(step.members.size() == 1);
    served = step.members[0].id == UINT64_MAX;
    StepResult result;
    const std::vector<uint8_t> done(1, 1);
    result.done = done;
    now += kMs;
    batcher->end_step(result, kMs, now);
    REQUIRE(batcher->arrive(generation(next++, 5, 1), now).ok());
  }
  CHECK(served);
}

TEST_CASE("a request whose first token cannot be in time makes nobody's steps short") {
  // The deadline lies before the arrival that the caller states; the prompt takes longer than until the deadline.
  for (const bool hopeless : {false, true}) {
    INFO(hopeless);
    auto batcher = make_steps(kKnown);
    StepRequest hostile = generation(1, hopeless ? 100'000 : 1);
    hostile.arrival_ns = hopeless ? 0 : UINT64_MAX;
    hostile.first_deadline_ns = 2 * kMs;
    REQUIRE(batcher->arrive(hostile, 1 * kMs).ok());
    REQUIRE(batcher->begin_step(1 * kMs).members.size() == 1);
    StepResult result;
    const std::vector<uint8_t> done(1, 1);
    result.done = done;
    batcher->end_step(result, 20 * kMs, 21 * kMs);
    StepRequest one = generation(2, 10'000, 21);
    one.first_deadline_ns = 60'000 * kMs;
    REQUIRE(batcher->arrive(one, 21 * kMs).ok());
    const Step& step = batcher->begin_step(21 * kMs);
    REQUIRE(step.members.size() == 1);
    CHECK(step.members[0].prefill == 10'000);
  }
}

TEST_CASE("bytes that members report never wrap around the limit") {
  StepOptions options;
  options.memory_bytes = uint64_t{1} << 40;
  auto batcher = make_steps(options, "fifo");
  for (RequestId id = 0; id < 16; ++id) REQUIRE(batcher->arrive(generation(id, 5), 0).ok());
  REQUIRE(batcher->begin_step(0).members.size() == 16);
  StepResult result;
  const std::vector<uint64_t> bytes(16, uint64_t{1} << 60);
  result.bytes = bytes;
  batcher->end_step(result, kMs, kMs);
  CHECK(batcher->stats().bytes > options.memory_bytes);
  // All are above the limit: none stays a member.
  const Step& step = batcher->begin_step(kMs);
  CHECK(step.left.size() == 16);
  CHECK(batcher->stats().bytes == 0);
}

TEST_CASE("a step that could not be run is made again, and tells of the same members that left") {
  for (const char* policy : {"gpushare", "fifo"}) {
    INFO(policy);
    auto batcher = make_steps(kKnown, policy);
    for (RequestId id = 1; id <= 3; ++id) REQUIRE(batcher->arrive(generation(id, 5), 0).ok());
    REQUIRE(batcher->begin_step(0).members.size() == 3);
    batcher->undo_step();
    REQUIRE(batcher->begin_step(0).members.size() == 3);
    batcher->end_step({}, 10 * kMs, 10 * kMs);
    REQUIRE(batcher->cancel(1, 10 * kMs));
    REQUIRE(batcher->begin_step(10 * kMs).left == std::vector<RequestId>{1});
    REQUIRE(batcher->cancel(2, 10 * kMs));  // a member of the step
    batcher->undo_step();
    const Step& step = batcher->begin_step(10 * kMs);
    CHECK(step.left == std::vector<RequestId>{1, 2});
    REQUIRE(step.members.size() == 1);
    CHECK(step.members[0].prefill == 0);
    CHECK(step.members[0].tokens == 1);
    batcher->end_step({}, 10 * kMs, 20 * kMs);
    std::vector<StepEvent> events;
    batcher->take_events(events);
    CHECK(std::count_if(events.begin(), events.end(), [](const StepEvent& each) {
            return each.ended && each.status == GPUSHARE_CANCELLED;
          }) == 2);
    CHECK(batcher->stats().members == 1);
  }
}

TEST_CASE("very many requests that expire together are dropped in pieces, and none of them joins a step") {
  for (const char* policy : {"gpushare", "fifo"}) {
    INFO(policy);
    auto batcher = make_steps(kKnown, policy);
    constexpr uint64_t kMany = 5000;
    for (RequestId id = 0; id < kMany; ++id) {
      StepRequest one = generation(id, 10);
      one.first_deadline_ns = 100 * kMs;
      REQUIRE(batcher->arrive(one, 0).ok());
    }
    std::vector<StepEvent> events;
    size_t answered = 0;
    for (int pieces = 0; batcher->expires_ns() != kNever; ++pieces) {
      REQUIRE(pieces < 100);
      CHECK(batcher->begin_step(200 * kMs).empty());
      batcher->take_events(events);
      CHECK(events.size() <= 1024);
      answered += events.size();
      events.clear();
    }
    CHECK(answered == kMany);
    CHECK(batcher->stats().expired == kMany);
  }
}

TEST_CASE("a step says what its tokens are worth, and by when it has to begin for them") {
  auto batcher = make_steps(kKnown);
  StepRequest one = generation(1, 100);  // 10 ms for its prompt, and 10 ms for the step
  one.first_deadline_ns = 100 * kMs;
  one.token_ns = 50 * kMs;
  one.cost = 3;
  REQUIRE(batcher->arrive(one, 0).ok());
  uint64_t now = 0;
  const Step& step = batcher->begin_step(now);
  REQUIRE(step.members.size() == 1);
  CHECK(step.worth.cost == 3);
  CHECK(step.worth.until_ns == 100 * kMs - step.expected_ns);
  now += 20 * kMs;
  batcher->end_step({}, 20 * kMs, now);
  CHECK(batcher->begin_step(now).worth.cost == 3);  // the second token is due 50 ms after the first
  CHECK(step.worth.until_ns == 70 * kMs - step.expected_ns);
  now += 200 * kMs;
  batcher->end_step({}, 200 * kMs, now);
  CHECK(batcher->begin_step(now).worth.cost == 0);  // it is late
}

TEST_CASE("a step batcher foresees what the step after the running one is worth") {
  StepOptions options = kKnown;
  options.max_members = 2;
  auto batcher = make_steps(options, "fifo");
  StepRequest one = generation(1, 100);
  one.first_deadline_ns = 100 * kMs;
  one.token_ns = 50 * kMs;
  one.cost = 3;
  REQUIRE(batcher->arrive(one, 0).ok());
  CHECK(batcher->next_step().worth(0).cost == 3);  // no step runs
  const Step& step = batcher->begin_step(0);
  const uint64_t ends_ns = step.expected_ns;
  CHECK(batcher->next_step().worth(0).cost ==
        3);  // it goes on; its second token is due 50 ms after the first
  CHECK(batcher->next_step().worth(0).until_ns == ends_ns + 50 * kMs - step.expected_ns);
  StepRequest other = generation(2, 100);
  other.cost = 2;
  other.first_deadline_ns = ends_ns + 40 * kMs;
  REQUIRE(batcher->arrive(other, 0).ok());
  CHECK(batcher->next_step().worth(0).cost == 5);
  CHECK(batcher->next_step().worth(0).until_ns == ends_ns + 40 * kMs - step.expected_ns);
  other = generation(3, 100);
  other.first_deadline_ns = step.expected_ns + 1;  // too late for a step after this one
  REQUIRE(batcher->arrive(other, 0).ok());
  CHECK(batcher->next_step().worth(ends_ns).cost == 5);
  CHECK(batcher->next_step().worth(ends_ns).until_ns == ends_ns + 40 * kMs - step.expected_ns);
  CHECK_FALSE(batcher->cancel_some(0));
  CHECK(batcher->next_step().worth(0).cost == 0);
}

// Nothing is said of how many tokens they will have: the step that is their last one says so when it has been done.
TEST_CASE("a step batcher does not expect those back that ended in the running step") {
  for (const char* policy : {"gpushare", "fifo"}) {
    INFO(policy);
    StepOptions options = kKnown;
    options.max_members = 2;
    auto batcher = make_steps(options, policy);
    for (RequestId id : {1, 2}) {
      StepRequest each = generation(id, 100);
      each.first_deadline_ns = 100 * kMs;
      each.token_ns = 80 * kMs;
      each.cost = id == 1 ? 3 : 0.25;
      REQUIRE(batcher->arrive(each, 0).ok());
    }
    const Step& step = batcher->begin_step(0);
    REQUIRE(step.members.size() == 2);
    REQUIRE(step.members[0].id == 1);
    const auto worth = [&](std::vector<uint8_t> done, std::vector<int32_t> statuses = {},
                           int32_t status = 0) {
      return batcher->next_step().worth(0, {status, done, statuses, {}});
    };
    CHECK(worth({}).cost == 3.25);
    CHECK(worth({0, 0}, {0, 0}).cost == 3.25);
    CHECK(worth({1, 0}).cost == 0.25);
    CHECK(worth({0, 1}, {0, 0}).cost == 3);
    CHECK(worth({1, 0}, {0, GPUSHARE_CALLBACK_FAILED}).cost == 0);
    CHECK(worth({1, 1}).cost == 0);
    CHECK(worth({1, 1}).until_ns == kNever);
    CHECK(worth({}, {}, GPUSHARE_CALLBACK_FAILED).cost == 0);
    StepRequest other = generation(3, 100);
    other.cost = 7;
    REQUIRE(batcher->arrive(other, 0).ok());
    CHECK(worth({0, 0}).cost == 3.25);  // there is no place for it
    CHECK(worth({1, 0}).cost == 7.25);
    CHECK(worth({1, 1}).cost == 7);
    REQUIRE(batcher->cancel(3, 0));
    CHECK(worth({1, 1}).cost == 0);
  }
}

TEST_CASE("a step batcher cancels all that it holds, some at a time, and lets nobody join meanwhile") {
  for (const char* policy : {"gpushare", "fifo"}) {
    INFO(policy);
    StepOptions options = kKnown;
    options.max_members = 8;
    auto batcher = make_steps(options, policy);
    constexpr size_t kMany = 3000;
    for (RequestId id = 0; id < kMany; ++id) REQUIRE(batcher->arrive(generation(id, 10), 0).ok());
    REQUIRE_FALSE(batcher->begin_step(0).members.empty());
    const uint64_t members = batcher->stats().members;
    std::vector<StepEvent> events;
    size_t answered = 0, pieces = 0;
    for (bool more = true; more; ++pieces) {
      more = batcher->cancel_some(kMs);
      batcher->take_events(events);
      CHECK(events.size() <= 1024);
      answered += events.size();
      events.clear();
    }
    CHECK(pieces == 3);
    CHECK(answered == kMany - members);
    batcher->end_step({}, kMs, kMs);
    const Step& last = batcher->begin_step(kMs);
    CHECK(last.members.empty());
    CHECK(last.left.size() == members);
    batcher->end_step({}, kMs, kMs);
    batcher->take_events(events);
    CHECK(std::count_if(events.begin(), events.end(), [](const StepEvent& each) {
            return each.ended && each.status == GPUSHARE_CANCELLED;
          }) == static_cast<ptrdiff_t>(members));
    CHECK(batcher->stats().cancelled == kMany);
    CHECK(batcher->begin_step(kMs).empty());
  }
}
