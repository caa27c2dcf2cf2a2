// The kind application: the queueing network against known formulas, the division, the policies, and what is refused.
// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <numeric>
#include <string>

#include "cluster/application/latency.hpp"
#include "cluster/application/policies.hpp"
#include "cluster/application/rounds.hpp"
#include "cluster/json.hpp"
#include "cluster/plan.hpp"
#include "support/catch.hpp"

namespace gpushare::cluster {
namespace {

using namespace application;

int64_t sum_of(const std::vector<int64_t>& units) {
  return std::accumulate(units.begin(), units.end(), int64_t{0});
}

// Three services in a row; the second needs most.
RoundsProblem three_in_a_row() {
  RoundsProblem problem;
  problem.application.slo_s = 0.5;
  problem.application.services = {{"a", 0.02}, {"b", 0.1}, {"c", 0.03}};
  problem.application.kinds = {{1, {{0}, {1}, {2}}}};
  problem.capacity = 24;
  problem.max_step = 4;
  problem.load_rps = 100;
  problem.rounds = 24;
  problem.round_s = 30;
  return problem;
}

double mean_p99(const RoundsResult& result, size_t from) {
  double sum = 0;
  for (size_t r = from; r < result.rounds.size(); ++r) sum += result.rounds[r].p99_s;
  return sum / double(result.rounds.size() - from);
}

std::string document(const std::string& capacity, const std::string& services, const std::string& calls,
                     const std::string& more = "") {
  return R"({"version": 1, "kind": "application", "load_rps": 50, "slo_ms": 200, "capacity": )" + capacity +
         R"(, "services": [)" + services + R"(], "requests": [{"calls": [)" + calls + "]}]" + more + "}";
}
const std::string kTwo = R"({"name": "a", "work_ms": 20}, {"name": "b", "work_ms": 60})";
const std::string kCalls = R"({"service": "a"}, {"service": "b"})";

std::string refused(const std::string& text) {
  const auto result = plan(text, {});
  return result.ok() ? "" : result.status().message();
}

}  // namespace

TEST_CASE("application: waits are those of queues with several servers") {
  // M/M/1 at half load: as long again as the work; the time is exponential.
  const Moments one = time_by_units({1, 0.1, 1}, 5, 1, 30).back();
  CHECK(one.mean == Approx(0.2));
  CHECK(one.variance == Approx(0.04));
  // M/M/2 at half load: a third of the work.
  CHECK(time_by_units({1, 0.1, 1}, 10, 2, 30).back().mean == Approx(0.1 + 0.1 / 3));
  // Work that does not vary waits half as long.
  CHECK(time_by_units({1, 0.1, 0.5}, 5, 1, 30).back().mean == Approx(0.15));
  // A service that every second request visits.
  CHECK(time_by_units({0.5, 0.1, 1}, 10, 1, 30).back().mean == Approx(0.1));
  // More units are never worse, overloaded or not.
  const std::vector<Moments> times = time_by_units({2, 0.1, 1}, 100, 60, 30);
  for (size_t n = 1; n < times.size(); ++n) {
    CHECK(times[n].mean <= times[n - 1].mean);
    CHECK(times[n].variance <= times[n - 1].variance);
  }
}

TEST_CASE("application: a played queue takes as long as its formula says") {
  Application application;
  application.slo_s = 0.2;
  application.services = {{"a", 0.1}};
  application.kinds = {{1, {{0}}}};
  const Round round = play_round(application, {2}, 10, 20'000, 7);
  CHECK(round.load_rps == Approx(10).epsilon(0.02));
  CHECK(round.mean_s == Approx(0.1 + 0.1 / 3).epsilon(0.03));
  CHECK(round.usage[0].busy == Approx(1).epsilon(0.03));
  CHECK(round.usage[0].waiting == Approx(1.0 / 3).epsilon(0.1));
  CHECK(round.answered_rps == Approx(round.load_rps).epsilon(0.001));
  CHECK(round.usage[0].visits_rps == Approx(round.load_rps).epsilon(0.001));
  const Round again = play_round(application, {2}, 10, 20'000, 7);
  CHECK(again.p99_s == round.p99_s);
}

TEST_CASE("application: calls beside each other take as long as the longest") {
  Application application;
  application.slo_s = 1;
  application.services = {{"a", 0.1, 0}, {"b", 0.3, 0}, {"c", 0.05, 0}};
  application.kinds = {{1, {{0, 1}, {2}}}};
  const Round round = play_round(application, {50, 50, 50}, 1, 100, 1);
  CHECK(round.mean_s == Approx(0.35));
  CHECK(round.p99_s == Approx(0.35));
  CHECK(round.in_time == 1);
  application.kinds = {{3, {{0}}}, {1, {{1}, {1}}}};
  CHECK(application.visits() == std::vector<double>{0.75, 0.5, 0});
}

TEST_CASE("application: no other division of few units is expected to be faster") {
  const std::vector<Belief> beliefs = {{1, 0.02, 1}, {1.5, 0.08, 1.5}, {0.3, 0.05, 1}};
  const Division division{14, 40, 30, 3, {}, 0};
  const auto p99 = [&](const std::vector<int64_t>& units) {
    const Moments time = end_to_end(beliefs, division.load_rps, units, division.round_s);
    return time.mean + division.tail * std::sqrt(time.variance);
  };
  const std::vector<int64_t> units = divide(beliefs, division);
  CHECK(sum_of(units) == division.capacity);
  double least = 1e300;
  for (int64_t a = 1; a <= 12; ++a)
    for (int64_t b = 1; a + b <= 13; ++b) least = std::min(least, p99({a, b, 14 - a - b}));
  CHECK(p99(units) == Approx(least));
  // A step is kept, and all units stay given.
  const std::vector<int64_t> near = divide(beliefs, {14, 40, 30, 3, {5, 5, 4}, 1});
  CHECK(sum_of(near) == 14);
  CHECK(near[1] == 6);
}

TEST_CASE("application: units in proportion, at least one each") {
  CHECK(proportional_division({3, 1, 0}, 9) == std::vector<int64_t>{6, 2, 1});
  CHECK(proportional_division({0, 0, 0}, 9) == std::vector<int64_t>{3, 3, 3});
}

TEST_CASE("application: every policy gives all units, and the same seed gives the same") {
  RoundsProblem problem = three_in_a_row();
  problem.noise = 0.1;
  problem.rounds = 14;
  for (const char* name : kPolicies) {
    INFO(name);
    const auto result = play_rounds(problem, name);
    REQUIRE(result.ok());
    REQUIRE(result->rounds.size() == problem.rounds);
    for (const PlayedRound& round : result->rounds) {
      CHECK(sum_of(round.units) == problem.capacity);
      CHECK(*std::min_element(round.units.begin(), round.units.end()) >= 1);
    }
    const auto again = play_rounds(problem, name);
    CHECK(again->rounds.back().units == result->rounds.back().units);
    CHECK(again->rounds.back().p99_s == result->rounds.back().p99_s);
  }
  CHECK_FALSE(play_rounds(problem, "x").ok());
}

TEST_CASE("application: proxy metrics leave equal shares at once, without a worse round") {
  const RoundsProblem problem = three_in_a_row();  // equal shares overload b
  const auto ours = play_rounds(problem, "gpushare"), fair = play_rounds(problem, "fair"),
             oracle = play_rounds(problem, "oracle");
  CHECK(ours->rounds[0].units == std::vector<int64_t>{8, 8, 8});
  CHECK(ours->rounds[1].units[1] == 12);  // max_step
  CHECK(ours->rounds[0].p99_s == fair->rounds[0].p99_s);
  for (size_t r = 1; r < problem.rounds; ++r) CHECK(ours->rounds[r].p99_s < fair->rounds[r].p99_s);
  CHECK(mean_p99(*ours, 4) < 1.1 * mean_p99(*oracle, 4));
  CHECK(ours->expected > 0);
}

TEST_CASE("application: work that changes is learned anew") {
  RoundsProblem problem = three_in_a_row();
  problem.application.services[0].change_round = 8;
  problem.application.services[0].change_factor = 4;  // as much as b almost
  const auto ours = play_rounds(problem, "gpushare"), oracle = play_rounds(problem, "oracle");
  CHECK(ours->rounds[7].units[0] < 6);
  CHECK(ours->rounds.back().units[0] > 8);
  CHECK(mean_p99(*ours, 16) < 1.2 * mean_p99(*oracle, 16));
}

TEST_CASE("application: work that hardly spreads takes its mean") {
  Application application;
  application.slo_s = 1;
  application.services = {{"a", 0.1, 1e-200}};
  application.kinds = {{1, {{0}}}};
  CHECK(play_round(application, {50}, 1, 100, 1).p99_s == Approx(0.1));
}

TEST_CASE("application: where no request is answered within a round, busy services have more") {
  RoundsProblem problem;
  problem.application.slo_s = 100;
  problem.application.services = {{"a", 0.001, 0}, {"b", 20, 0}, {"c", 20, 0}};
  problem.application.kinds = {{1, {{0}, {1}, {2}}}};
  problem.capacity = 60;
  problem.max_step = 4;
  problem.load_rps = 1;
  problem.rounds = 10;
  const auto result = play_rounds(problem, "gpushare");
  REQUIRE(result.ok());
  CHECK(result->rounds.back().units[0] < 10);
  CHECK(result->expected == 0);
}

TEST_CASE("application: a round in which no request came tells nothing") {
  const std::unique_ptr<Policy> policy = make_policy("epsilon-greedy", {10, 1, 2, 1, 30, 1});
  Round seen;
  seen.p99_s = 1;
  policy->observe({9, 1}, seen);
  seen.p99_s = 0;
  policy->observe({1, 9}, seen);
  int best = 0;
  for (int round = 0; round < 100; ++round) best += policy->decide() == std::vector<int64_t>{9, 1} ? 1 : 0;
  CHECK(best > 50);

  PlayOptions play;
  play.rounds = 24;
  const auto played = run(document("12", kTwo, kCalls, R"(, "run": {"loads": [40, 1e-9]})"), {}, play);
  REQUIRE(played.ok());
  for (const OrderedJson& row : (*played)["results"]) {
    double sum = 0;
    for (size_t r = 0; r < 24; r += 2) sum += row["series"][r]["p99_ms"].get<double>();
    CHECK(row["p99_ms"].get<double>() == Approx(sum / 12));
  }
  CHECK(run(document("12", kTwo, kCalls, R"(, "run": {"loads": [1e-9]})"), {}, play).ok());
}

TEST_CASE("a document of an application: planned and played") {
  const auto planned = plan(document("12", kTwo, kCalls), {});
  INFO((planned.ok() ? "" : planned.status().message()));
  REQUIRE(planned.ok());
  const OrderedJson& rows = (*planned)["results"];
  REQUIRE(rows.size() == 3);
  CHECK(rows[0]["scheduler"] == "gpushare");
  CHECK(rows[0]["allocation"]["a"].get<int>() + rows[0]["allocation"]["b"].get<int>() == 12);
  CHECK(rows[0]["p99_ms"].get<double>() <= rows[2]["p99_ms"].get<double>());
  CHECK(rows[2]["allocation"]["a"] == 6);
  CHECK(rows[2]["utilization"]["b"].get<double>() == Approx(0.5));
  // A plan is for load_rps.
  const auto with_loads = plan(document("12", kTwo, kCalls, R"(, "run": {"loads": [1e5]})"), {});
  REQUIRE(with_loads.ok());
  CHECK((*with_loads)["results"][1]["p99_ms"] == rows[1]["p99_ms"]);
  std::vector<PlaySpan> spans;
  PlayOptions play;
  play.rounds = 6;
  const auto played = run(document("12", kTwo, kCalls, R"(, "run": {"round_s": 5, "loads": [40, 60]})"), {},
                          play, kinds(), &spans);
  REQUIRE(played.ok());
  for (const OrderedJson& row : (*played)["results"]) {
    CHECK(row["rounds"] == 6);
    CHECK(row["series"].size() == 6);
    CHECK(row["last_quarter"]["p99_ms"].get<double>() > 0);
  }
  CHECK((*played)["results"][0].contains("p99_error"));
  CHECK_FALSE(spans.empty());
}

TEST_CASE("what a document of an application refuses is told with path and value") {
  CHECK(refused(document("1", kTwo, kCalls))
            .find("capacity: 1 is not allowed; give at least one unit for each") == 0);
  CHECK(refused(document("9", kTwo, R"({"service": "x"})")).find("requests[0].calls[0].service: \"x\"") == 0);
  CHECK(refused(document("9", kTwo, R"({"service": "a", "beside": true})"))
            .find("requests[0].calls[0].beside") == 0);
  CHECK(refused(document("9", kTwo, "")).find("requests[0].calls") == 0);
  CHECK(refused(document("9", kTwo + R"(, {"name": "a", "work_ms": 1})", kCalls))
            .find("services[2].name: \"a\"") == 0);
  CHECK(refused(document("9", R"({"name": "a", "work_ms": 0})", R"({"service": "a"})"))
            .find("services[0].work_ms: 0") == 0);
  CHECK(refused(document("9", kTwo, kCalls, R"(, "run": {"loads": [0]})")).find("run.loads[0]: 0") == 0);
  const auto large = run(document("9", kTwo, kCalls, R"(, "run": {"round_s": 1e6})"), {}, {});
  REQUIRE_FALSE(large.ok());
  CHECK(large.status().message().find("visits of services a round") != std::string::npos);
  const auto rounds = [](const char* capacity, uint64_t count) {
    PlanOptions fair;
    fair.schedulers = {"fair"};
    PlayOptions play;
    play.rounds = count;
    const auto result =
        run(document(capacity, kTwo, kCalls, R"(, "run": {"round_s": 1e-6})"), fair, play, kinds());
    return result.ok() ? "" : result.status().message();
  };
  CHECK(rounds("2", 1'000'001).find("run.rounds: 1000001 with 2 services") != std::string::npos);
  CHECK(rounds("200", 600'000).find("1e+08 rounds x units") != std::string::npos);
  std::string many;
  for (int s = 0; s <= 2000; ++s)
    many += base::format(R"(%s{"name": "%d", "work_ms": 1})", s == 0 ? "" : ", ", s);
  CHECK(
      refused(document("2001", many, R"({"service": "0"})")).find("services: 2001 are more than the 2000") !=
      std::string::npos);
}

}  // namespace gpushare::cluster
