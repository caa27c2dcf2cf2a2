// The kind "application": units divided among the services of one application by its end-to-end latency. Reads the document, asks
// application/, writes the result.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <numeric>

#include "cluster/application/latency.hpp"
#include "cluster/application/policies.hpp"
#include "cluster/application/rounds.hpp"
#include "cluster/json.hpp"
#include "cluster/kinds.hpp"
#include "cluster/shares/policy.hpp"

namespace gpushare::cluster {
namespace {

namespace app = application;

constexpr uint64_t kMostApplicationRounds = 1'000'000;
constexpr size_t kMostApplicationServices = 2'000;
constexpr double kMostServicesTimesUnits = 5e6;
constexpr double kMostRoundsTimesServices = 1e7, kMostRoundsTimesUnits = 1e8;
constexpr double kMostVisitsOfRound = 5e6, kMostVisits = 1e9;
constexpr double kVisitsOfPlan = 1e5;  // mean, of the round that a plan is judged by

app::Service read_application_service(Fields& fields, Fields::Names& seen, size_t index) {
  app::Service service;
  service.name = fields.name(seen, index);
  fields.about("work_ms", "Mean time of a visit on one unit.");
  service.work_s = fields.number("work_ms", {0, 1e6, true}) / 1e3;
  fields.about("spread", "Standard deviation of that time over its mean (gamma).");
  service.spread = fields.number_or("spread", {0, 10, false}, 1);
  fields.about("change", "For run: from that round on, visits take another time.");
  if (fields.has("change")) {
    fields.with("change", [&](Fields& inner) {
      service.change_round = inner.whole("round", 1, kMostApplicationRounds);
      service.change_factor = inner.number("work_factor", {0, 1e6, true});
    });
  }
  return service;
}

app::RequestKind read_request_kind(Fields& fields, const Fields::Names& services) {
  app::RequestKind kind;
  fields.about("part", "This kind's part of all requests, relative to the others'.");
  kind.part = fields.number_or("part", {0, 1e6, true}, 1);
  fields.each("calls", 1, [&](Fields& call, size_t) {
    const std::string name = call.text("service");
    call.about("beside", "Begins with the call before it; the request goes on when both are answered.");
    const bool beside = call.flag_or("beside", false);
    const auto service = services.find(name);
    if (call.ok() && service == services.end()) call.refuse("service", "there is no such service");
    if (!call.ok() || service == services.end()) return;
    if (beside && kind.stages.empty()) call.refuse("beside", "there is no call before the first one");
    if (!beside || kind.stages.empty()) kind.stages.emplace_back();
    kind.stages.back().push_back(service->second);
  });
  return kind;
}

class ApplicationProblem final : public Problem {
 public:
  explicit ApplicationProblem(Fields& document) {
    document.about("capacity", "Whole units to divide, at least one for each service.");
    problem_.capacity = int64_t(document.whole("capacity", 1, 100'000));
    problem_.load_rps = document.number("load_rps", {0, 1e9, true});
    document.about("slo_ms", "The objective of a request's latency, from end to end.");
    application().slo_s = document.number("slo_ms", kPositive) / 1e3;
    Fields::Names seen;
    document.about("services", "At most 2,000.");
    document.each("services", 1, [&](Fields& fields, size_t index) {
      application().services.push_back(read_application_service(fields, seen, index));
    });
    document.about("requests", "Kinds of requests, each with the services that it calls, in order.");
    document.each("requests", 1, [&](Fields& fields, size_t) {
      application().kinds.push_back(read_request_kind(fields, seen));
    });
    document.about(
        "max_step",
        "For run: most units by which gpushare and cilantro change a share in a round, by default a "
        "sixteenth of the capacity.");
    problem_.max_step = document.has("max_step") ? int64_t(document.whole("max_step", 1, 100'000))
                                                 : std::max<int64_t>(1, problem_.capacity / 16);
    document.about("run", "For run.");
    if (document.has("run")) {
      document.with("run", [&](Fields& inner) {
        problem_.rounds = inner.whole_or("rounds", 1, kMostApplicationRounds, problem_.rounds);
        inner.about("round_s", "Each begins with no request in the application.");
        problem_.round_s = inner.number_or("round_s", {0, 1e6, true}, problem_.round_s);
        inner.about("noise", "The relative standard deviation of all that is seen.");
        problem_.noise = inner.number_or("noise", {0, 10, false}, 0);
        inner.about("loads", "The load of each round in place of load_rps, then from the beginning again.");
        if (inner.has("loads")) problem_.loads = inner.numbers("loads", 1, {0, 1e9, true});
      });
    }
    if (!document.ok()) return;
    if (application().services.size() > kMostApplicationServices)
      document.refuse_all(base::format("services: %zu are more than the %zu that an application may have",
                                       application().services.size(), kMostApplicationServices));
    if (double(application().services.size()) * double(problem_.capacity) > kMostServicesTimesUnits)
      document.refuse("capacity", base::format("%zu services x capacity are more than %g",
                                               application().services.size(), kMostServicesTimesUnits));
    if (problem_.capacity < int64_t(application().services.size()))
      document.refuse("capacity", base::format("give at least one unit for each of the %zu services",
                                               application().services.size()));
  }

  base::Status solve(std::string_view choice, OrderedJson& result) override {
    const app::Application& application = problem_.application;
    std::vector<double> offered = application.visits();
    const double visits = std::accumulate(offered.begin(), offered.end(), 0.0);  // of a request
    const double seconds = std::min(problem_.round_s, kVisitsOfPlan / (problem_.load_rps * visits));
    for (size_t s = 0; s < offered.size(); ++s)
      offered[s] *= problem_.load_rps * application.services[s].work_s;
    const std::vector<int64_t> units =
        choice == "gpushare"
            ? app::divide_known(application, problem_.capacity, problem_.load_rps, seconds, kPlanSeed)
        : choice == "proportional" ? app::proportional_division(offered, problem_.capacity)
                                   : shares::equal_shares(problem_.capacity, offered.size());
    // Judged by requests that the search has not seen.
    const app::Round played = app::play_round(application, units, problem_.load_rps, seconds, kPlanSeed + 1);
    for (size_t s = 0; s < offered.size(); ++s) offered[s] /= double(units[s]);
    result["p99_ms"] = played.p99_s * 1e3;
    result["mean_ms"] = played.mean_s * 1e3;
    result["in_time"] = played.in_time;
    result["allocation"] = by_service(units);
    result["utilization"] = by_service(offered);
    return {};
  }

  base::Status play(std::string_view choice, const PlayOptions& options, OrderedJson& result,
                    std::vector<PlaySpan>* spans) override {
    app::RoundsProblem problem = problem_;
    problem.rounds = options.rounds.value_or(problem.rounds);
    problem.noise = options.noise.value_or(problem.noise);
    problem.seed = options.seed;
    GPUSHARE_RETURN_IF_ERROR(bounded(problem));
    GPUSHARE_ASSIGN_OR_RETURN(const app::RoundsResult played, app::play_rounds(problem, choice));
    result["rounds"] = problem.rounds;
    add_means(played.rounds, 0, result);
    if (played.expected > 0) result["p99_error"] = played.p99_error;
    OrderedJson last = OrderedJson::object();
    add_means(played.rounds, played.rounds.size() - std::max<size_t>(1, played.rounds.size() / 4), last);
    result["last_quarter"] = std::move(last);
    result["allocation"] = by_service(played.rounds.back().units);
    OrderedJson series = OrderedJson::array();
    for (size_t r = 0; r < played.rounds.size(); ++r) {
      const app::PlayedRound& round = played.rounds[r];
      series.push_back(object(
          {{"p99_ms", round.p99_s * 1e3}, {"mean_ms", round.mean_s * 1e3}, {"in_time", round.in_time}}));
    }
    result["series"] = std::move(series);
    if (spans == nullptr) return {};
    for (size_t s = 0; s < problem.application.services.size(); ++s)  // stretches with the same units
      for (size_t from = 0, to = 0; from < played.rounds.size(); from = to) {
        const int64_t units = played.rounds[from].units[s];
        while (to < played.rounds.size() && played.rounds[to].units[s] == units) ++to;
        spans->push_back({problem.application.services[s].name, std::to_string(units) + " units",
                          double(from) * problem.round_s, double(to) * problem.round_s});
      }
    return {};
  }

 private:
  static constexpr uint64_t kPlanSeed = 1;

  app::Application& application() { return problem_.application; }

  static base::Status bounded(const app::RoundsProblem& problem) {
    const auto rounds = double(problem.rounds);
    const size_t services = problem.application.services.size();
    if (problem.rounds > kMostApplicationRounds || rounds * double(services) > kMostRoundsTimesServices ||
        rounds * double(problem.capacity) > kMostRoundsTimesUnits)
      return {GPUSHARE_EXCEEDS_CAPACITY,
              base::format(
                  "run.rounds: %llu with %zu services and %lld units are more than is played; at most %g "
                  "rounds, %g rounds x services and %g rounds x units are",
                  static_cast<unsigned long long>(problem.rounds), services,
                  static_cast<long long>(problem.capacity), double(kMostApplicationRounds),
                  kMostRoundsTimesServices, kMostRoundsTimesUnits)};
    const double visits = problem.most_visits();
    if (visits > kMostVisitsOfRound || visits * rounds > kMostVisits)
      return {GPUSHARE_EXCEEDS_CAPACITY,
              base::format(
                  "run: %g visits of services a round and %g in all are more than the %g and %g that are "
                  "played; give fewer rounds, a shorter round_s or less load",
                  visits, visits * rounds, kMostVisitsOfRound, kMostVisits)};
    return {};
  }

  // Means over the rounds from that one on in which requests came.
  static void add_means(const std::vector<app::PlayedRound>& rounds, size_t from, OrderedJson& result) {
    double p99_s = 0, mean_s = 0, in_time = 0, count = 0;
    for (size_t r = from; r < rounds.size(); ++r) {
      if (rounds[r].p99_s <= 0) continue;
      p99_s += rounds[r].p99_s;
      mean_s += rounds[r].mean_s;
      in_time += rounds[r].in_time;
      ++count;
    }
    result["p99_ms"] = count > 0 ? p99_s / count * 1e3 : 0;
    result["mean_ms"] = count > 0 ? mean_s / count * 1e3 : 0;
    result["in_time"] = count > 0 ? in_time / count : 1;
  }
  template <class T>
  OrderedJson by_service(const std::vector<T>& values) const {
    OrderedJson result = OrderedJson::object();
    for (size_t s = 0; s < values.size(); ++s) result[problem_.application.services[s].name] = values[s];
    return result;
  }

  app::RoundsProblem problem_;
};

}  // namespace

const Kind& application_kind() {
  static const Kind kind = {
      "application",
      "scheduler",
      {"gpushare", "proportional", "fair"},
      {"gpushare", "proportional", "fair"},
      {std::begin(app::kPolicies), std::end(app::kPolicies)},
      {"gpushare", "cilantro", "oracle", "fair", "proportional", "evolutionary", "epsilon-greedy"},
      false,
      [](Fields& document, const std::vector<Device>&) -> std::unique_ptr<Problem> {
        return std::make_unique<ApplicationProblem>(document);
      }};
  return kind;
}

}  // namespace gpushare::cluster
