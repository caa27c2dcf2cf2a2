// Times of requests that nobody tells: inference from what their batches took, on its own and in what a model knows.
// SPDX-License-Identifier: Apache-2.0
#include "sched/slo/inference.hpp"

#include <algorithm>
#include <span>
#include <vector>

#include "sched/slo/batcher.hpp"
#include "sched/slo/knowledge.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

using namespace gpushare;
using namespace gpushare::sched::slo;
using test::uniform;

namespace {
constexpr uint64_t kMs = 1'000'000;
}

TEST_CASE("inferred times: odd batches of one application say nothing of the others") {
  auto batcher = std::move(*make_batcher("gpushare"));
  REQUIRE(batcher->add_model({}).ok());
  const auto ran = [&](std::vector<uint32_t> members, uint64_t ms) {
    batcher->observe_run(0, members, {}, ms * 1'000'000);
  };
  for (int i = 0; i < 40; ++i) ran({0, 1, 0, 1}, 40);
  const double before = batcher->profile(0, 0)->mean_ns;
  // Application 2 takes fifty times as long, seldom at first and then in many batches in a row.
  for (int i = 0; i < 3; ++i) {
    ran({0, 1, 0, 2}, 2000);
    ran({0, 1, 0, 1}, 40);
  }
  for (int i = 0; i < 8; ++i) ran({0, 1, 0, 2}, 2000);
  CHECK(batcher->profile(0, 0)->mean_ns < 3 * before);
  CHECK(batcher->profile(0, 1)->mean_ns < 3 * before);
  CHECK(batcher->profile(0, 2)->mean_ns > 10 * before);
  // One that is far shorter than all believe, beside normal ones.
  for (int i = 0; i < 8; ++i) {
    ran({2, 2}, 20);
    ran({0, 1, 0, 1}, 40);
  }
  CHECK(batcher->profile(0, 2)->mean_ns < 5 * before);
}

TEST_CASE("inferred times: that larger batches take hardly longer is found out") {
  Knowledge knowledge({});
  const uint32_t model = *knowledge.add_model({});
  const uint32_t application = knowledge.application(model, 0);
  for (int i = 0; i < 50; ++i)
    for (const size_t k : {1, 2, 4, 8}) {
      const std::vector<Knowledge::Member> members(k, Knowledge::Member{application, 0, {}});
      knowledge.observe_run(model, members, {}, (66 + 7 * k) * kMs / 10);
    }
  (void)knowledge.refresh(model);
  const Knowledge::Model& of = knowledge.model(model);
  for (const uint32_t k : {1u, 3u, 16u}) {
    INFO(k);
    CHECK(of.time.duration_ns(k, of.mix_alone.mean_ns()) == Approx((6.6 + 0.7 * k) * 1e6).epsilon(0.2));
  }
}

TEST_CASE("inferred times: a few batches of scattered requests tell what batches of their sizes take") {
  INFO("seed " << test::seed());
  test::Random random(test::seed());
  // All are of one application, and every seventh is long on average.
  const auto alone_ms = [&] { return uniform(random, 0, 6) == 0 ? 100.0 : 5.0; };
  const auto batch_ms = [&](size_t k) {
    double longest = 0;
    for (size_t i = 0; i < k; ++i) longest = std::max(longest, alone_ms());
    return 4 + 0.1 * static_cast<double>(k) * longest;
  };
  Knowledge knowledge({});
  const uint32_t model = *knowledge.add_model({});
  const uint32_t application = knowledge.application(model, 0);
  for (int i = 0; i < 80; ++i) {
    const auto k = static_cast<size_t>(uniform(random, 6, 14));
    const std::vector<Knowledge::Member> members(k, Knowledge::Member{application, 0, {}});
    knowledge.observe_run(model, members, {}, static_cast<uint64_t>(batch_ms(k) * 1e6));
  }
  (void)knowledge.refresh(model);
  const Knowledge::Model& of = knowledge.model(model);
  for (const uint32_t k : {6u, 10u, 14u}) {
    double mean_ms = 0;
    for (int i = 0; i < 10'000; ++i) mean_ms += batch_ms(k) / 10'000;
    INFO(k);
    CHECK(of.time.duration_ns(k, expected_maximum_ns(of.mix_alone, of.mix_alone, k - 1)) ==
          Approx(mean_ms * 1e6).epsilon(0.25));
  }
}

TEST_CASE("inferred times give way to told ones, whichever call tells them") {
  for (const bool by_request : {true, false}) {
    INFO(by_request);
    auto batcher = std::move(*make_batcher("gpushare"));
    REQUIRE(batcher->add_model({}).ok());
    const std::vector<uint32_t> members(4, 0);
    for (int i = 0; i < 40; ++i) batcher->observe_run(0, members, {}, 40 * kMs);
    for (int i = 0; i < 300; ++i) {
      if (by_request)
        CHECK(batcher->observe_request(Request{}, 7 * kMs).ok());
      else
        batcher->observe(0, 0, 7 * kMs);
    }
    CHECK(batcher->profile(0, 0)->p50_ns == Approx(7e6).epsilon(0.05));
  }
}

// The applications' batches alternate, so more than four in a row show a change before four of one application do; and
// with many applications none has four for long.
TEST_CASE("inferred times: what all batches take follows the device, however many applications there are") {
  for (const uint32_t applications : {1u, 2u, 3u, 100u}) {
    INFO(applications);
    Knowledge knowledge({});
    const uint32_t model = *knowledge.add_model({});
    uint32_t next = 0;
    const auto run = [&](int batches, uint64_t ms) {
      for (int i = 0; i < batches; ++i) {
        const uint32_t number = next++ % applications;
        const Knowledge::Member member{knowledge.application(model, number), number, {}};
        knowledge.observe_run(model, {&member, 1}, {}, ms * kMs);
      }
    };
    const auto expected_ms = [&] {
      (void)knowledge.refresh(model);
      const Knowledge::Model& of = knowledge.model(model);
      return of.time.duration_ns(1, of.mix_alone.mean_ns()) / 1e6;
    };
    run(400, 40);
    CHECK(expected_ms() == Approx(40).epsilon(0.2));
    run(20, 400);  // the device is ten times as slow
    CHECK(expected_ms() == Approx(400).epsilon(0.2));
    run(20, 40);
    CHECK(expected_ms() == Approx(40).epsilon(0.2));
    if (applications > 32) continue;  // what rare ones take is drawn
    const uint64_t drifts = knowledge.model(model).applications[0].histogram.drifts();
    run(300, 40);
    run(8, 160);
    CHECK(expected_ms() == Approx(160).epsilon(0.2));
    CHECK(knowledge.model(model).applications[0].histogram.drifts() > drifts);
    run(300, 160);
    run(8, 80);
    CHECK(expected_ms() == Approx(80).epsilon(0.2));
  }
}

TEST_CASE(
    "inferred times: batches larger than any before, or of other applications, show no change of the "
    "device") {
  Inference inference;
  const auto run = [&](std::vector<Inference::Part> parts, double ms) {
    for (int i = 0; i < 20; ++i) {
      inference.add(parts, ms * 1e6);
      CHECK(inference.follow_change() == 1);
    }
  };
  run({{0, 0, 1}}, 10);
  run({{0, 0, 8}}, 50);
  run({{0, 0, 1}}, 10);
  run({{1, 0, 1}}, 100);
  run({{0, 0, 1}, {1, 0, 1}}, 160);
  run({{0, 0, 1}}, 10);
}

TEST_CASE("a told time ends inference, and is known at once however many applications there are") {
  Knowledge knowledge({});
  const uint32_t model = *knowledge.add_model({});
  std::vector<Knowledge::Member> members;
  for (uint32_t number = 0; number < 20; ++number)
    members.push_back({knowledge.application(model, number), number, {}});
  (void)knowledge.refresh(model);
  knowledge.observe(model, 0, 7 * kMs);
  const Knowledge::Model& of = knowledge.model(model);
  CHECK(!of.infers);
  CHECK(knowledge.refresh(model));
  CHECK(of.mix_alone.mean_ns() == Approx(7e6).epsilon(0.05));
  knowledge.observe_run(model, std::span(members).first(4), {}, 40 * kMs);
  CHECK(!of.infers);
}

TEST_CASE("inferred times: told batches of sizes off the line do not count twice") {
  Knowledge knowledge({});
  const uint32_t model = *knowledge.add_model({});
  const uint32_t application = knowledge.application(model, 0);
  // A batch of eight takes twice what the line of the others says.
  const auto batch_ns = [](uint32_t k, double longest_ns) {
    return (k == 8 ? 2 : 1) * (4e6 + 0.2 * k * longest_ns);
  };
  for (int i = 0; i < 16; ++i)
    for (const uint32_t k : {1u, 2u, 4u, 8u, 16u})
      for (const uint64_t longest_ns : {5 * kMs, 20 * kMs})
        knowledge.observe_batch(model, k, longest_ns,
                                static_cast<uint64_t>(batch_ns(k, static_cast<double>(longest_ns))));
  for (int i = 0; i < 100; ++i) {
    const uint32_t k = i % 3 == 0 ? 4 : 8;
    const std::vector<Knowledge::Member> members(k, Knowledge::Member{application, 0, {}});
    knowledge.observe_run(model, members, {}, static_cast<uint64_t>(batch_ns(k, 10e6)));
  }
  (void)knowledge.refresh(model);
  const Knowledge::Model& of = knowledge.model(model);
  for (const uint32_t k : {4u, 8u}) {
    INFO(k);
    CHECK(of.time.duration_ns(k, of.mix_alone.mean_ns()) == Approx(batch_ns(k, 10e6)).epsilon(0.15));
  }
}

TEST_CASE("inferred times: a first batch that stalled leaves no trace") {
  for (const uint64_t first_ms : {150, 10'000}) {
    INFO(first_ms);
    Knowledge knowledge({});
    const uint32_t model = *knowledge.add_model({});
    const std::vector<Knowledge::Member> members{{knowledge.application(model, 0), 0, {}}};
    knowledge.observe_run(model, members, {}, first_ms * kMs);
    for (int i = 0; i < 400; ++i) knowledge.observe_run(model, members, {}, 40 * kMs);
    CHECK(knowledge.model(model).time.c0_ns() < 25e6);
  }
}

TEST_CASE("inferred times: who ran only beside long requests is not taken for as long") {
  Knowledge knowledge({});
  const uint32_t model = *knowledge.add_model({});
  const auto member = [&](uint32_t number) {
    return Knowledge::Member{knowledge.application(model, number), number, {}};
  };
  const auto run = [&](std::vector<Knowledge::Member> members, uint64_t ms) {
    knowledge.observe_run(model, members, {}, ms * kMs);
  };
  for (int i = 0; i < 60; ++i) {
    run({member(0)}, 50);
    run({member(1)}, 8);
    if (i != 30) continue;
    std::vector<Knowledge::Member> members(7, member(2));
    members.push_back(member(0));
    run(members, 4 + 8 * 46);
  }
  (void)knowledge.refresh(model);
  const Knowledge::Model& of = knowledge.model(model);
  const double long_ns = of.alone(0).quantile_ns(0.5);
  CHECK(of.alone(2).quantile_ns(0.1) < 0.5 * long_ns);
  CHECK(of.alone(2).max_ns() < 1.2 * long_ns);
}

TEST_CASE("inferred times: requests that came before theirs were told apart count as of their application") {
  Knowledge knowledge({});
  const uint32_t model = *knowledge.add_model({});
  const uint32_t whole = knowledge.application(model, 0);
  const auto run = [&](uint32_t application, uint32_t objective, uint64_t ms) {
    const Knowledge::Member member{application, 0, {}, objective};
    knowledge.observe_run(model, {&member, 1}, {}, ms * kMs);
  };
  for (int i = 0; i < 40; ++i)
    run(knowledge.classify(model, 0, {}, i % 2 == 0 ? 10 : 20), i % 2 == 0 ? 10 : 20, i % 2 == 0 ? 40 : 10);
  const Knowledge::Model& of = knowledge.model(model);
  const uint32_t apart = knowledge.classify(model, 0, {}, 10);
  REQUIRE(apart != whole);
  REQUIRE(knowledge.classify(model, 0, {}, 20) != whole);
  // They waited meanwhile.
  const double before = static_cast<double>(of.applications[apart].inferred);
  for (int i = 0; i < 32; ++i) run(whole, 10, 40);
  CHECK(static_cast<double>(of.applications[apart].inferred) > before + 20);
}

TEST_CASE(
    "inferred times of many applications: all tails are pooled, and the rare ones are not taken for long") {
  for (const uint32_t applications : {100u, 300u, 1500u}) {
    INFO(applications);
    INFO("seed " << test::seed());
    test::Random random(test::seed());
    Knowledge knowledge({});
    const uint32_t model = *knowledge.add_model({});
    for (uint32_t i = 0; i < applications; ++i) (void)knowledge.application(model, i);
    const Knowledge::Model& of = knowledge.model(model);
    const auto scaled_ms = [&](double ns) { return ns * of.time.c1() / 0.1 / 1e6; };  // c1 is a unit
    bool empty = false;
    for (int i = 0; i < 600; ++i) {
      std::vector<Knowledge::Member> members;
      double longest = 0;
      for (int k = 0; k < 16; ++k) {
        const auto number = static_cast<uint32_t>(uniform(random, 0, applications - 1));
        members.push_back({number, number, {}});
        // Every seventh request is long on average: the mean is 11.4 ms.
        longest = std::max(longest, uniform(random, 0, 6) == 0 ? 50e6 : 5e6);
      }
      knowledge.observe_run(model, members, {}, static_cast<uint64_t>(4e6 + 1.6 * longest));
      (void)knowledge.refresh(model);
      empty = empty || of.mix_alone.empty();
    }
    CHECK(!empty);
    CHECK(scaled_ms(of.mix_alone.mean_ns()) == Approx(11.4).epsilon(0.4));
    CHECK(scaled_ms(of.mix_alone.max_ns()) > 35);
    double mean = 0, known = 0;
    for (const Knowledge::Application& each : of.applications) {
      if (each.own.empty()) continue;
      mean += scaled_ms(each.own.mean_ns());
      ++known;
    }
    CHECK(mean / known == Approx(11.4).epsilon(0.4));
  }
}

TEST_CASE("inference remembers and estimates no more for many applications in large batches") {
  INFO("seed " << test::seed());
  test::Random random(test::seed());
  Inference inference;
  constexpr size_t kParts = 800;
  for (int i = 0; i < 300; ++i) {
    std::vector<Inference::Part> parts;
    for (uint32_t part = 0; part < kParts; ++part)
      parts.push_back({static_cast<uint32_t>(uniform(random, 0, 9999)), 0, 2});
    inference.add(parts, 1e9 + 1e6 * i);
    CHECK(inference.parts() <= 4096 + Inference::kMemory);
    if (inference.due()) (void)inference.estimate(1e6, 0.1, false);
  }
  CHECK(inference.runs() >= 64);
  CHECK(inference.estimates().size() <= 33);
  // Small batches are all remembered.
  for (size_t i = 0; i < Inference::kMemory; ++i) inference.add({{0, 0, 8}, {1, 0, 8}}, 1e9);
  (void)inference.estimate(1e6, 0.1, false);
  CHECK(inference.runs() == Inference::kMemory);
  CHECK(inference.parts() == 2 * Inference::kMemory);
  CHECK(inference.estimates().size() == 2);
}

// By features, and by deadlines: two applications of one name are told apart, and then all take half as long.
TEST_CASE("inferred times: the profile of an application whose requests are told apart follows them") {
  for (const bool by_features : {true, false}) {
    INFO(by_features);
    INFO("seed " << test::seed());
    test::Random random(test::seed());
    Knowledge knowledge({});
    const uint32_t model = *knowledge.add_model({});
    const auto run = [&](int batches, double factor) {
      for (int i = 0; i < batches; ++i) {
        std::vector<Knowledge::Member> members;
        double longest = 0;
        const auto size = static_cast<uint32_t>(uniform(random, 1, 8));
        // Batches of one kind and of both.
        const uint64_t kinds = uniform(random, 0, 2);
        for (uint32_t k = 0; k < size; ++k) {
          const uint64_t kind = kinds < 2 ? kinds : uniform(random, 0, 1);
          const std::vector<double> features =
              by_features ? std::vector<double>{1.0 + 3.0 * static_cast<double>(kind)}
                          : std::vector<double>{};
          const uint32_t objective = by_features ? 0 : static_cast<uint32_t>(10 + 8 * kind);
          const uint32_t application = knowledge.classify(model, 0, features, objective);
          members.push_back({application, 0, features, objective});
          longest = std::max(longest, factor * (kind == 0 ? 10e6 : 40e6));
        }
        knowledge.observe_run(model, members, {}, static_cast<uint64_t>(4e6 + 0.25 * size * longest));
        (void)knowledge.refresh(model);
      }
    };
    const auto whole_mean_ns = [&] {
      const Knowledge::Model& of = knowledge.model(model);
      return of.applications[of.index_of.find(0)->second].histogram.distribution(64).mean_ns() * of.time.c1();
    };
    run(600, 1);
    REQUIRE(knowledge.model(model).applications.size() > 2);
    const double before = whole_mean_ns();
    run(800, 0.5);
    CHECK(whole_mean_ns() < 0.7 * before);
    CHECK(whole_mean_ns() > 0.3 * before);
  }
}
