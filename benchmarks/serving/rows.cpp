// Runs the rows of an experiment and sums them up.
// SPDX-License-Identifier: Apache-2.0
#include "rows.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "reference/serving_bound.hpp"

namespace gpushare::experiments {
namespace {

Stat stat(const std::vector<double>& values) {
  Stat s;
  for (double v : values) s.mean += v / static_cast<double>(values.size());
  for (double v : values) s.sd += (v - s.mean) * (v - s.mean);
  s.sd = values.size() > 1 ? std::sqrt(s.sd / static_cast<double>(values.size() - 1)) : 0;
  return s;
}

// Runs all jobs on all cores.
class Pool {
 public:
  void add(std::function<void()> job) { jobs_.push_back(std::move(job)); }
  void run() {
    std::atomic<size_t> next{0};
    std::vector<std::thread> workers;
    for (unsigned t = 0; t < (threads > 0 ? threads : std::max(1u, std::thread::hardware_concurrency())); ++t)
      workers.emplace_back([&] {
        for (size_t i = next++; i < jobs_.size(); i = next++) jobs_[i]();
      });
    for (std::thread& worker : workers) worker.join();
    jobs_.clear();
  }

 private:
  std::vector<std::function<void()>> jobs_;
};

}  // namespace

const std::vector<Family>& families() {
  static const std::vector<Family> all{
      {"Clipper",
       {{"clipper", "clipper"}, {"clipper-mean", "clipper-mean"}, {"clipper-aimd", "clipper-aimd"}}},
      {"Nexus", {{"nexus", "nexus"}, {"nexus-earliest", "nexus-earliest"}, {"nexus-cycle", "nexus-cycle"}}},
      {"Clockwork",
       {{"clockwork", "clockwork"},
        {"clockwork-single", "clockwork-single"},
        {"clockwork, a model an application", "clockwork", true, true}}},
      {"Orloj", {{"orloj", "orloj"}, {"orloj-own", "orloj-own"}}}};
  return all;
}

const std::vector<Contender>& main_contenders() {
  static const std::vector<Contender> all = [] {
    std::vector<Contender> out;
    for (const Family& family : families())
      out.insert(out.end(), family.variants.begin(), family.variants.end());
    for (const Contender& each : std::vector<Contender>{{"orloj, no labels", "orloj", false},
                                                        {"greedy", "greedy"},
                                                        {"greedy, no labels", "greedy", false},
                                                        {"gpushare", "gpushare"},
                                                        {kUnlabelled, "gpushare", false},
                                                        {"clairvoyant", "clairvoyant"},
                                                        {"clairvoyant-edf", "clairvoyant-edf"}})
      out.push_back(each);
    return out;
  }();
  return all;
}

Stat Row::rate(const std::string& contender) const {
  return stat(rates.at(contender));
}

double Row::bound() const {
  return stat(bounds).mean;
}

double Row::family(const Family& of, std::string* who) const {
  double most = -1;
  for (const Contender& each : of.variants) {
    const double here = rate(each.name).mean;
    if (here > most && who != nullptr) *who = each.name;
    most = std::max(most, here);
  }
  return most;
}

double Row::best(std::string* who) const {
  double most = -1;
  for (const Family& each : families()) {
    std::string variant;
    const double here = family(each, &variant);
    if (here > most && who != nullptr) *who = variant;
    most = std::max(most, here);
  }
  return most;
}

double Row::unlabelled_best() const {
  double most = std::max(rate("orloj, no labels").mean, rate("greedy, no labels").mean);
  // These do not look at labels.
  for (const char* each : {"clipper", "clipper-mean", "clipper-aimd", "nexus", "nexus-earliest",
                           "nexus-cycle", "clockwork", "clockwork-single"})
    most = std::max(most, rate(each).mean);
  return most;
}

void run_rows(std::vector<Row>& rows, const std::vector<Contender>& contenders) {
  Pool pool;
  for (Row& row : rows) {
    row.bounds.assign(seeds, NAN);
    for (const Contender& each : contenders) row.rates[each.name].assign(seeds, NAN);
  }
  for (Row& row : rows)
    for (uint64_t seed = 0; seed < seeds; ++seed)
      pool.add([&row, &contenders, seed] {
        const std::vector<TimedRequest> requests = row.draw(seed + 1);
        const auto most = static_cast<double>(sim::most_in_time(requests, row.options));
        row.bounds[seed] = most / static_cast<double>(requests.size());
        for (const Contender& each : contenders) {
          ServingOptions options = row.options;
          options.labels = each.labels;
          options.model_per_application = each.model_per_application;
          const auto result = sim::serve(requests, each.policy, options);
          if (!result.ok() || static_cast<double>(result->finished_in_time) > most) {
            std::fprintf(stderr, "%s, %s: %s\n", row.name.c_str(), each.name.c_str(),
                         result.ok() ? "more in time than the bound" : result.status().to_string().c_str());
            std::exit(1);
          }
          row.rates.at(each.name)[seed] = result->finish_rate;
        }
      });
  pool.run();
}

std::function<std::vector<TimedRequest>(uint64_t)> drawer(const std::string& synthetic, double load,
                                                          double burst) {
  const sim::SyntheticSpec spec = *sim::parse_synthetic(synthetic);
  const double rate = load / (sim::mean_execution_ns(spec) / 1e9);
  return [=](uint64_t seed) {
    return sim::draw(
        spec,
        {.requests = kRequests, .rate_per_s = rate, .burstiness = burst, .seed = first_seed - 1 + seed});
  };
}

ServingOptions options_of(const Calibration& at, double slo) {
  ServingOptions options;
  const double mean = sim::mean_execution_ns(*sim::parse_synthetic(at.synthetic));
  options.c0_ns = at.c0_x_mean * mean;
  options.c1 = at.c1;
  options.slo_x_p99 = slo;
  return options;
}

Summary summarise(const std::vector<Row>& rows) {
  Summary s;
  const double n = static_cast<double>(rows.size());
  for (const Row& row : rows) {
    const double best = row.best(), ours = row.rate("gpushare").mean, unlabelled = row.rate(kUnlabelled).mean;
    ++s.cells;
    s.above += ours > best ? 1 : 0;
    s.level += ours <= best && ours >= best - 0.005 ? 1 : 0;
    s.ours += ours / n;
    s.unlabelled += unlabelled / n;
    s.greedy += row.rate("greedy").mean / n;
    s.greedy_unlabelled += row.rate("greedy, no labels").mean / n;
    s.best += best / n;
    s.orloj += row.family(families().back()) / n;
    s.orloj_unlabelled += row.rate("orloj, no labels").mean / n;
    s.clairvoyant += std::max(row.rate("clairvoyant").mean, row.rate("clairvoyant-edf").mean) / n;
    s.bound += row.bound() / n;
    if (ours - best < s.worst) {
      s.worst = ours - best;
      s.worst_cell = row.name;
    }
    if (unlabelled - row.unlabelled_best() < s.worst_unlabelled) {
      s.worst_unlabelled = unlabelled - row.unlabelled_best();
      s.worst_unlabelled_cell = row.name;
    }
  }
  return s;
}

namespace {

double clairvoyant(const Row& row) {
  return std::max(row.rate("clairvoyant").mean, row.rate("clairvoyant-edf").mean);
}

// The means of rows [begin, end).
std::string means(const Row* begin, const Row* end) {
  const double n = static_cast<double>(end - begin);
  const auto mean = [&](const auto& of) {
    double sum = 0;
    for (const Row* row = begin; row != end; ++row) sum += of(*row);
    return sum / n;
  };
  std::string out;
  for (const Family& each : families())
    out += base::format("%.3f | ", mean([&](const Row& row) { return row.family(each); }));
  out += base::format("%.3f | ", mean([](const Row& row) { return row.rate("greedy").mean; }));
  out += base::format("%.3f | ", mean([](const Row& row) { return row.rate("gpushare").mean; }));
  out += base::format("%.3f | ", mean([](const Row& row) { return row.rate(kUnlabelled).mean; }));
  return out +
         base::format("%.3f | %.3f", mean(clairvoyant), mean([](const Row& row) { return row.bound(); }));
}

}  // namespace

void finish_rates(Report& report, const std::string& experiment, const std::string& keys,
                  const std::vector<Row>& rows) {
  std::string rule = "|---|---|---|---|---|---|---|---|---|---|";
  for (char c : keys)
    if (c == '|') rule += "---|";
  report.line("| " + keys +
              " | Clipper | Nexus | Clockwork | Orloj | greedy | gpushare | gpushare, no labels | "
              "clairvoyant | bound |\n" +
              rule);
  for (size_t begin = 0, end = 0; begin < rows.size(); begin = end) {
    while (end < rows.size() && rows[end].line == rows[begin].line) report.cell(experiment, rows[end++]);
    report.line("| " + rows[begin].line + " | " + means(&rows[begin], &rows[begin] + (end - begin)) + " |");
  }
}

void Report::cell(const std::string& experiment, const Row& row) {
  cells_ += experiment + ",\"" + row.name + "\"";
  for (const Family& each : families()) cells_ += base::format(",%.4f", row.family(each));
  cells_ +=
      base::format(",%.4f,%.4f,%.4f,%.4f,%.4f,%.4f\n", row.rate("greedy").mean, row.rate("gpushare").mean,
                   row.rate("gpushare").sd, row.rate(kUnlabelled).mean, clairvoyant(row), row.bound());
}

void losses(Report& report, const std::vector<Row>& rows, const std::string& at) {
  for (const Row& row : rows) {
    std::string who;
    double best = row.best(&who);
    if (const double greedy = row.rate("greedy").mean; greedy > best) {
      best = greedy;
      who = "greedy";
    }
    const double ours = row.rate("gpushare").mean;
    const double unlabelled = row.rate(kUnlabelled).mean, unlabelled_best = row.unlabelled_best();
    if (ours < best - 0.005)
      report.row("- %s%s: %.4f against %.4f (%s)", row.name.c_str(), at.c_str(), ours, best, who.c_str());
    if (unlabelled < unlabelled_best - 0.005)
      report.row("- %s%s, nobody told labels: %.4f against %.4f", row.name.c_str(), at.c_str(), unlabelled,
                 unlabelled_best);
  }
}

void Report::row(const char* format, ...) {
  char buffer[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  text_ += buffer;
  text_ += '\n';
}

}  // namespace gpushare::experiments
