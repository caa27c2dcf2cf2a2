// The kind "shares": one resource divided among jobs by their performance. Reads the document, asks cilantro.hpp, writes the result.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <string_view>
#include <unordered_map>

#include "cluster/cilantro.hpp"
#include "cluster/json.hpp"
#include "cluster/kinds.hpp"
#include "cluster/shares/rounds.hpp"

namespace gpushare::cluster {
namespace {

constexpr uint64_t kMostRounds = 1'000'000;
constexpr uint64_t kMostRoundsTimesJobs = 10'000'000;

// The caller says how many of curve and logistic there may be.
PerformanceCurve read_curve(Fields& fields) {
  PerformanceCurve result;
  fields.about("curve",
               "[units per unit of load, performance], linear between points, constant beyond the last, 0 "
               "below the first.");
  fields.about("logistic", "1 / (1 + exp(-(units / load - offset))).");
  const bool curve = fields.has("curve");
  const bool logistic = fields.has("logistic");
  if (curve) result.points = fields.points("curve", kNotNegative, kNotNegative);
  if (curve && fields.ok() && result.points.empty()) fields.refuse("curve", "give at least one point");
  if (logistic) {
    result.logistic = true;
    fields.with("logistic", [&](Fields& inner) {
      result.offset = inner.number("offset", {-1e6, 1e6, false});
    });
  }
  return result;
}

shares::RoundJob read_job(Fields& fields, Fields::Names& seen, size_t index) {
  shares::RoundJob round;
  UtilityJob& job = round.job;
  job.name = fields.name(seen, index);
  job.load = fields.number("load", kPositive);
  job.slo = fields.number("slo", kPositive);
  job.utility = UtilityShape(fields.one_of("utility", {"linear", "sqrt", "quadratic"}));
  fields.about("utility", "min(performance, slo) / slo to the power 1, 0.5 or 2.");
  fields.about("loads", "For run: the load of each round in place of load, then from the beginning again.");
  fields.about("change", "For run: from that round on, another curve or load.");
  fields.about("declared", "For run: the job reports no performance. This declaration is taken instead.");
  fields.about("work", "For run on host devices: what the job really does. Its performance is measured.");
  fields.exactly_one({"curve", "logistic", "work"});
  job.curve = read_curve(fields);
  if (fields.has("work")) {
    fields.with("work", [&](Fields& inner) {
      inner.about("iteration_ms", "Time of an iteration or a request on the device alone.");
      inner.about("deadline_ms",
                  "Load is then requests a second, and the performance the part of them that is answered in "
                  "this time after its arrival. Without it: iterations a second, one after the other.");
      round.work = shares::Work{inner.number("iteration_ms", {0, 1e5, true}), 0};
      if (inner.has("deadline_ms")) round.work->deadline_ms = inner.number("deadline_ms", {0, 1e6, true});
    });
  }
  if (fields.has("loads")) round.loads = fields.numbers("loads", 1, kPositive);
  if (fields.has("change")) {
    fields.with("change", [&](Fields& inner) {
      shares::Change change;
      change.round = inner.whole("round", 1, kMostRounds);
      change.load_factor = inner.number_or("load_factor", {0, 1e6, true}, 1);
      inner.at_most_one({"curve", "logistic"});
      PerformanceCurve curve = read_curve(inner);
      if (curve.logistic || !curve.points.empty()) {
        if (round.work)
          inner.refuse_all("a job that really works has no curve; load_factor changes its load");
        change.curve = std::move(curve);
      }
      round.change = std::move(change);
    });
  }
  if (fields.has("declared")) {
    fields.with("declared", [&](Fields& inner) {
      inner.about("demand", "Units per unit of load that meet the objective.");
      inner.exactly_one({"demand", "curve", "logistic"});
      PerformanceCurve curve = read_curve(inner);
      if (inner.has("demand"))  // as much as it says, with utility in proportion up to there
        curve.points = {{0, 0}, {inner.number("demand", kPositive), job.slo}};
      round.declared = std::move(curve);
    });
  }
  return round;
}

class SharesProblem final : public Problem {
 public:
  explicit SharesProblem(Fields& document) {
    document.about("capacity", "Whole units to divide.");
    document.about("previous", "Units that each job held; one that is not listed held none.");
    document.about("max_step",
                   "With previous: most units by which a share may change. For run: in a round, by default a "
                   "hundredth of the "
                   "capacity.");
    document.about("run", "For run.");
    problem_.capacity = int64_t(document.whole("capacity", 1, 1'000'000'000));
    Fields::Names seen;
    document.each("jobs", 1, [&](Fields& fields, size_t index) {
      rounds_.jobs.push_back(read_job(fields, seen, index));
      problem_.jobs.push_back(rounds_.jobs.back().job);
    });
    rounds_.capacity = problem_.capacity;
    if (document.has("run")) {
      document.with("run", [&](Fields& inner) {
        inner.about("noise", "The standard deviation of an observed performance, as part of the objective.");
        rounds_.rounds = inner.whole_or("rounds", 1, kMostRounds, rounds_.rounds);
        rounds_.noise = inner.number_or("noise", {0, 10, false}, 0);
        inner.about("round_s", "On host devices: the length of a round.");
        rounds_.round_s = inner.number_or("round_s", {0, 3600, true}, rounds_.round_s);
      });
    }
    if (document.has("max_step")) problem_.max_step = int64_t(document.whole("max_step", 0, 1'000'000'000));
    if (!document.has("previous")) return;
    problem_.previous.assign(problem_.jobs.size(), 0);  // a job that is not listed held nothing
    std::unordered_map<std::string_view, size_t> index;
    for (size_t j = 0; j < problem_.jobs.size(); ++j) index.emplace(problem_.jobs[j].name, j);
    for (const auto& [name, units] : document.named_wholes("previous", 0, 1'000'000'000)) {
      const auto job = index.find(name);
      if (job == index.end()) {
        document.refuse("previous", "there is no job '" + name + "'");
      } else {
        problem_.previous[job->second] = int64_t(units);
      }
    }
  }

  base::Status solve(std::string_view choice, OrderedJson& result) override {
    GPUSHARE_RETURN_IF_ERROR(all_work(false));
    GPUSHARE_ASSIGN_OR_RETURN(const ShareResult shares, divide_shares(problem_, objective_of(choice)));
    result["allocation"] = by_name(shares.units);
    result["welfare"] = shares.welfare;
    result["egalitarian"] = shares.egalitarian;
    result["fairness"] = shares.fairness;
    result["useful"] = shares.useful;
    return {};
  }

  base::Status play(std::string_view choice, const PlayOptions& options, OrderedJson& result,
                    std::vector<PlaySpan>* spans) override {
    const bool real = options.real_jobs != nullptr;
    GPUSHARE_RETURN_IF_ERROR(all_work(real));
    shares::RoundsProblem problem = rounds_;
    problem.rounds = options.rounds.value_or(rounds_.rounds);
    problem.noise = options.noise.value_or(rounds_.noise);
    problem.seed = options.seed;
    problem.max_step = problem_.max_step.value_or(std::max<int64_t>(1, problem_.capacity / 100));
    if (problem.rounds > kMostRoundsTimesJobs / problem.jobs.size())
      return {GPUSHARE_EXCEEDS_CAPACITY,
              base::format("run.rounds: %zu jobs x %llu rounds are more than the %llu that are played",
                           problem.jobs.size(), static_cast<unsigned long long>(problem.rounds),
                           static_cast<unsigned long long>(kMostRoundsTimesJobs))};
    const std::string objective = options.objective.empty() ? "njc" : options.objective;
    GPUSHARE_ASSIGN_OR_RETURN(const shares::RoundsResult played,
                              play_one(problem, choice, objective_of(objective), options));
    result["objective"] = objective;
    result["rounds"] = problem.rounds;
    result["welfare"] = played.welfare;
    result["egalitarian"] = played.egalitarian;
    result["fairness"] = played.fairness;
    if (!real) result["useful"] = played.useful;
    result["last_quarter"] = object({{"welfare", played.last_welfare},
                                     {"egalitarian", played.last_egalitarian},
                                     {"fairness", played.last_fairness}});
    OrderedJson coverage = OrderedJson::object();
    const auto cover = [&](const char* name, const shares::Coverage& seen, bool width) {
      if (seen.all == 0) return;
      coverage[name] = double(seen.inside) / double(seen.all);
      if (width) coverage[std::string(name) + "_width"] = seen.width / double(seen.all);
    };
    cover("before_change", played.before, true);
    cover("after_change", played.after, true);
    cover("load", played.load, false);
    if (!coverage.empty()) result["coverage"] = std::move(coverage);
    result["allocation"] = by_name(played.rounds.back().units);
    if (real) {
      result["utilities"] = by_name(played.utilities);
      result["equal_utilities"] = by_name(played.equal_utilities);
    }
    OrderedJson series = OrderedJson::array();
    for (const ShareResult& round : played.rounds)
      series.push_back(object(
          {{"welfare", round.welfare}, {"egalitarian", round.egalitarian}, {"fairness", round.fairness}}));
    result["series"] = std::move(series);
    if (spans == nullptr) return {};
    const double round_s = real ? problem.round_s : kRoundS;
    for (size_t j = 0; j < problem.jobs.size(); ++j)  // stretches of rounds with the same units
      for (size_t from = 0, to = 0; from < played.rounds.size(); from = to) {
        while (to < played.rounds.size() && played.rounds[to].units[j] == played.rounds[from].units[j]) ++to;
        spans->push_back({problem.jobs[j].job.name, std::to_string(played.rounds[from].units[j]) + " units",
                          double(from) * round_s, double(to) * round_s});
      }
    return {};
  }

 private:
  static constexpr double kRoundS = 120;  // of the source; for timelines

  static ShareObjective objective_of(std::string_view name) {
    return name == "sw"   ? ShareObjective::kSocialWelfare
           : name == "ew" ? ShareObjective::kEgalitarianWelfare
                          : ShareObjective::kNoJustifiedComplaints;
  }
  static base::Result<shares::RoundsResult> play_one(const shares::RoundsProblem& problem,
                                                     std::string_view choice, ShareObjective objective,
                                                     const PlayOptions& options) {
    if (!options.real_jobs) return shares::play_rounds(problem, choice, objective);
    if (choice == "oracle")
      return base::Status(GPUSHARE_INVALID_ARGUMENT, "nobody knows the curves of jobs that really work");
    GPUSHARE_ASSIGN_OR_RETURN(const std::unique_ptr<shares::RealJobs> jobs, options.real_jobs(problem));
    return shares::play_real_rounds(problem, choice, objective, *jobs);
  }
  // Jobs that really work have no curve to plan or play with, and the others nothing to run.
  base::Status all_work(bool real) const {
    for (size_t j = 0; j < rounds_.jobs.size(); ++j)
      if (rounds_.jobs[j].work.has_value() != real)
        return {GPUSHARE_INVALID_ARGUMENT,
                base::format(real ? "jobs[%zu] ('%s'): on host devices a job has 'work' in place of a curve"
                                  : "jobs[%zu] ('%s'): 'work' is for cluster run --device host; give a curve",
                             j, rounds_.jobs[j].job.name.c_str())};
    return {};
  }
  template <class T>
  OrderedJson by_name(const std::vector<T>& values) const {
    OrderedJson::object_t result;  // appended to, not searched: names are told apart already
    for (size_t j = 0; j < problem_.jobs.size(); ++j)
      result.OrderedJson::object_t::Container::emplace_back(problem_.jobs[j].name, values[j]);
    return result;
  }

  ShareProblem problem_;
  shares::RoundsProblem rounds_;
};

}  // namespace

const Kind& shares_kind() {
  static const Kind kind = {"shares",
                            "objective",
                            {"sw", "ew", "njc"},
                            {"sw", "ew", "njc"},
                            {std::begin(shares::kPolicies), std::end(shares::kPolicies)},
                            {"gpushare", "cilantro", "oracle", "fair"},
                            false,
                            [](Fields& document, const std::vector<Device>&) -> std::unique_ptr<Problem> {
                              return std::make_unique<SharesProblem>(document);
                            }};
  return kind;
}

}  // namespace gpushare::cluster
