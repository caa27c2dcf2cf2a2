// SPDX-License-Identifier: Apache-2.0
#include "cli/run_result.hpp"

#include <algorithm>
#include <cmath>

#include "base/status.hpp"
#include "base/units.hpp"
#include "cli/output.hpp"
#include "cluster/json.hpp"

namespace gpushare::cli {
namespace {

std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  std::string out = "\"";
  for (const char c : text) out += c == '"' ? std::string("\"\"") : std::string(1, c);
  return out + '"';
}

// To the nanosecond: nothing finer was measured, and 0.1 stays 0.1 in the text.
double rounded(double seconds) {
  return std::round(seconds * 1e9) / 1e9;
}

cluster::OrderedJson or_null(double seconds) {
  return seconds < 0 ? cluster::OrderedJson(nullptr) : cluster::OrderedJson(rounded(seconds));
}

}  // namespace

const char* name_of(JobOutcome::State state) {
  switch (state) {
    case JobOutcome::State::kCompleted:
      return "completed";
    case JobOutcome::State::kRefused:
      return "refused";
    case JobOutcome::State::kFailed:
      return "failed";
    case JobOutcome::State::kInterrupted:
      return "interrupted";
  }
  return "";
}

double percentile(const std::vector<double>& sorted, double p) {
  if (sorted.empty()) return 0;
  const double rank = std::ceil(p * static_cast<double>(sorted.size()));
  return sorted[std::min(sorted.size(), static_cast<size_t>(std::max(rank, 1.0))) - 1];
}

void summarize(PolicyRun& run) {
  run.completed = run.refused = run.failed = 0;
  double completion = 0;
  double queue = 0;
  std::vector<double> completions;
  for (const JobOutcome& job : run.jobs) {
    run.refused += job.state == JobOutcome::State::kRefused ? 1 : 0;
    run.failed += job.state == JobOutcome::State::kFailed ? 1 : 0;
    if (job.state != JobOutcome::State::kCompleted) continue;
    completions.push_back(job.completion_s());
    completion += job.completion_s();
    queue += job.queue_s();
  }
  run.completed = completions.size();
  std::sort(completions.begin(), completions.end());
  const double count = std::max<double>(1, static_cast<double>(completions.size()));
  run.jct_mean_s = completion / count;
  run.queue_mean_s = queue / count;
  run.jct_p50_s = percentile(completions, 0.50);
  run.jct_p95_s = percentile(completions, 0.95);
}

TimeUnit time_unit(double largest_s) {
  TimeUnit unit{"days", 86400, 0};
  if (largest_s < 600)
    unit = {"s", 1, 0};
  else if (largest_s < 48 * 3600)
    unit = {"min", 60, 0};
  else if (largest_s < 60 * 86400.0)
    unit = {"h", 3600, 0};
  const double largest = largest_s / unit.seconds;
  unit.decimals = largest >= 100 ? 1 : largest >= 10 ? 2 : largest >= 1 ? 3 : 6;
  return unit;
}

std::string TimeUnit::number(double seconds_of_it) const {
  return base::format("%.*f", decimals, seconds_of_it / seconds);
}

std::vector<const PolicyRun*> compared(const RunResult& result) {
  uint64_t most = 0;
  for (const PolicyRun& run : result.policies) most = std::max(most, run.completed);
  std::vector<const PolicyRun*> out;
  for (const PolicyRun& run : result.policies)
    if (most > 0 && run.completed == most) out.push_back(&run);
  return out;
}

std::vector<std::string> findings(const RunResult& result) {
  std::vector<std::string> out;
  const std::vector<const PolicyRun*> runs = compared(result);
  if (runs.size() < 2) return out;
  double largest = 0;
  for (const PolicyRun& run : result.policies) largest = std::max(largest, run.makespan_s);
  const TimeUnit unit = time_unit(largest);
  const auto least = [&](auto&& value) {
    return *std::min_element(runs.begin(), runs.end(),
                             [&](const auto* a, const auto* b) { return value(*a) < value(*b); });
  };
  const auto alone =
      std::find_if(runs.begin(), runs.end(), [](const auto* run) { return run->policy == "fifo"; });
  const PolicyRun* quick = least([](const PolicyRun& run) { return run.jct_mean_s; });
  const PolicyRun* early = least([](const PolicyRun& run) { return run.makespan_s; });
  if (alone != runs.end() && (*alone)->jct_mean_s > 0 && quick->jct_mean_s > 0) {
    const PolicyRun& fifo = **alone;
    out.push_back(
        base::format("Time: one job at a time (fifo), a job completes %s %s after its arrival on average; "
                     "under %s, %s %s: %.2f times sooner. The last job ends after %s %s under fifo, ",
                     unit.number(fifo.jct_mean_s).c_str(), unit.name, quick->policy.c_str(),
                     unit.number(quick->jct_mean_s).c_str(), unit.name, fifo.jct_mean_s / quick->jct_mean_s,
                     unit.number(fifo.makespan_s).c_str(), unit.name) +
        (early == &fifo ? std::string("sooner than under the others.")
                        : base::format("%s %s under %s.", unit.number(early->makespan_s).c_str(), unit.name,
                                       early->policy.c_str())));
  }
  const auto switched = std::max_element(
      runs.begin(), runs.end(), [](const auto* a, const auto* b) { return a->switches < b->switches; });
  if ((*switched)->switch_s >= 0) {
    const PolicyRun& run = **switched;
    const auto ns = [](double seconds) {
      return base::format_duration_ns(static_cast<uint64_t>(seconds * 1e9));
    };
    std::string text = base::format(
        "Switches: %s made most, %llu; between the work of two jobs its lane stood idle for %s (median)",
        run.policy.c_str(), static_cast<unsigned long long>(run.switches), ns(run.switch_s).c_str());
    if (run.stay_s >= 0)
      text += base::format(", between two iterations of one job for %s", ns(run.stay_s).c_str());
    out.push_back(text + ".");
  }
  const auto full = std::max_element(runs.begin(), runs.end(), [](const auto* a, const auto* b) {
    return a->most_apart_bytes < b->most_apart_bytes;
  });
  if ((*full)->most_apart_bytes > 0)
    out.push_back(base::format(
        "Memory: under %s up to %llu jobs were on the device at once. Each with memory for its own peak they "
        "would have needed up to %s; "
        "sharing lanes they fit in %s, of which at most %s were in use at one time.",
        (*full)->policy.c_str(), static_cast<unsigned long long>((*full)->most_inside),
        base::format_bytes((*full)->most_apart_bytes).c_str(),
        base::format_bytes(result.capacity_bytes).c_str(), base::format_bytes((*full)->peak_bytes).c_str()));
  double worst = 0;
  const PolicyRun* off = nullptr;
  for (const PolicyRun* run : runs) {
    if (!(run->simulated_jct_mean_s > 0)) return out;
    const double ratio = run->jct_mean_s / run->simulated_jct_mean_s - 1;
    if (std::abs(ratio) < std::abs(worst)) continue;
    worst = ratio;
    off = run;
  }
  std::string text = base::format(
      "Simulator: for the same jobs its mean completion times are within %.0f%% of the measured ones",
      std::ceil(100 * std::abs(worst)));
  if (std::abs(worst) > 0.1)
    text = base::format(
        "Simulator: for the same jobs the measured mean completion under %s is %.0f%% %s than simulated",
        off->policy.c_str(), 100 * std::abs(worst), worst > 0 ? "longer" : "shorter");
  out.push_back(
      text +
      ". The simulator knows neither the cost of switches nor what lanes that run at once take from each "
      "other in caches and memory bandwidth, nor what else the machine runs.");
  return out;
}

std::string render_table(const RunResult& result) {
  double largest = 0;
  bool paged = false;
  bool refused = false;
  bool failed = false;
  bool simulated = false;
  bool measured = false;
  for (const PolicyRun& run : result.policies) {
    simulated = simulated || run.simulated_jct_mean_s >= 0;
    measured = measured || run.switch_s >= 0;
    largest = std::max(largest, run.makespan_s);
    paged = paged || run.paged_bytes > 0;
    refused = refused || run.refused > 0;
    failed = failed || run.failed > 0;
  }
  const TimeUnit unit = time_unit(largest);
  const auto timed = [&](const char* title) { return base::format("%s\n(%s)", title, unit.name); };
  Table table;
  table.add_column("policy", Table::Align::kLeft);
  table.add_column("jobs", Table::Align::kRight);
  if (refused) table.add_column("refused", Table::Align::kRight);
  if (failed) table.add_column("failed", Table::Align::kRight);
  table.add_column(timed("makespan"), Table::Align::kRight);
  table.add_column(timed("mean\ncompletion"), Table::Align::kRight);
  if (simulated) table.add_column(timed("the same\nsimulated"), Table::Align::kRight);
  table.add_column(timed("P95\ncompletion"), Table::Align::kRight);
  table.add_column(timed("mean\nqueueing"), Table::Align::kRight);
  table.add_column("utili-\nsation", Table::Align::kRight);
  table.add_column("switches", Table::Align::kRight);
  if (measured) table.add_column("idle at\na switch", Table::Align::kRight);
  if (paged) table.add_column("paged\n(to, fro)", Table::Align::kRight);
  table.add_column("peak\nmemory", Table::Align::kRight);
  table.add_column("oom", Table::Align::kRight);
  for (const PolicyRun& run : result.policies) {
    std::vector<std::string> row{run.policy, std::to_string(run.completed)};
    if (refused) row.push_back(std::to_string(run.refused));
    if (failed) row.push_back(std::to_string(run.failed));
    for (const double seconds : {run.makespan_s, run.jct_mean_s}) row.push_back(unit.number(seconds));
    if (simulated) row.push_back(run.simulated_jct_mean_s >= 0 ? unit.number(run.simulated_jct_mean_s) : "-");
    for (const double seconds : {run.jct_p95_s, run.queue_mean_s}) row.push_back(unit.number(seconds));
    row.push_back(base::format("%.1f%%", 100 * run.utilization));
    row.push_back(std::to_string(run.switches));
    if (measured)
      row.push_back(run.switch_s >= 0 ? base::format_duration_ns(static_cast<uint64_t>(run.switch_s * 1e9))
                                      : "-");
    if (paged) row.push_back(base::format_bytes(run.paged_bytes));
    row.push_back(base::format_bytes(run.peak_bytes));
    row.push_back(std::to_string(run.oom));
    table.add_row(std::move(row));
  }
  const char* from = result.label == "sim"    ? "simulated, virtual time"
                     : result.label == "host" ? "measured on CPU threads"
                                              : "measured";
  std::string out = base::format("device %s (%s), %s, jobs from %s\n\n", result.device.c_str(), from,
                                 base::format_bytes(result.capacity_bytes).c_str(), result.jobs_file.c_str());
  out += table.to_string();
  const std::vector<std::string> found = findings(result);
  if (!found.empty()) out += "\nWhat sharing gains\n";
  for (const std::string& line : found) out += "- " + wrap(line, 108, 2) + '\n';
  if (!result.notes.empty()) out += "\nNotes\n";
  for (const std::string& note : result.notes) out += "- " + wrap(note, 108, 2) + '\n';
  return out;
}

cluster::OrderedJson to_json(const RunResult& result) {
  cluster::OrderedJson policies = cluster::OrderedJson::array();
  for (const PolicyRun& run : result.policies) {
    cluster::OrderedJson refusals = cluster::OrderedJson::array();
    for (const JobOutcome& job : run.jobs)
      if (job.state != JobOutcome::State::kCompleted)
        refusals.push_back(
            cluster::object({{"name", job.name}, {"state", name_of(job.state)}, {"reason", job.reason}}));
    cluster::OrderedJson measured = cluster::OrderedJson::array();
    for (const MeasuredBeside& entry : run.interference) {
      const bool alone = entry.beside.empty();
      measured.push_back(cluster::object(
          {{"name", entry.name},
           {"beside", alone ? cluster::OrderedJson(nullptr) : cluster::OrderedJson(entry.beside)},
           {alone ? "iteration_s" : "slowdown", alone ? entry.value * 1e-9 : rounded(entry.value)},
           {"confidence", rounded(entry.confidence)}}));
    }
    policies.push_back(cluster::object({{"policy", run.policy},
                                        {"jobs", run.jobs.size()},
                                        {"completed", run.completed},
                                        {"refused", run.refused},
                                        {"failed", run.failed},
                                        {"makespan_s", rounded(run.makespan_s)},
                                        {"jct_mean_s", rounded(run.jct_mean_s)},
                                        {"jct_p50_s", rounded(run.jct_p50_s)},
                                        {"jct_p95_s", rounded(run.jct_p95_s)},
                                        {"queue_mean_s", rounded(run.queue_mean_s)},
                                        {"utilization", rounded(run.utilization)},
                                        {"switches", run.switches},
                                        {"peak_bytes", run.peak_bytes},
                                        {"oom", run.oom},
                                        {"paged_bytes", run.paged_bytes},
                                        {"most_inside", run.most_inside},
                                        {"most_apart_bytes", run.most_apart_bytes},
                                        {"switch_s", or_null(run.switch_s)},
                                        {"stay_s", or_null(run.stay_s)},
                                        {"simulated_makespan_s", or_null(run.simulated_makespan_s)},
                                        {"simulated_jct_mean_s", or_null(run.simulated_jct_mean_s)},
                                        {"interference", std::move(measured)},
                                        {"not_completed", std::move(refusals)}}));
  }
  return cluster::object({{"device", result.device},
                          {"label", result.label},
                          {"jobs_file", result.jobs_file},
                          {"layout", result.layout},
                          {"capacity_bytes", result.capacity_bytes},
                          {"lanes", result.lanes},
                          {"seed", result.seed},
                          {"time_scale", result.time_scale},
                          {"interrupted", result.interrupted},
                          {"policies", std::move(policies)},
                          {"findings", findings(result)},
                          {"notes", result.notes}});
}

std::string per_job_csv(const RunResult& result) {
  std::string out =
      "policy,job,state,arrival_s,start_s,end_s,completion_s,queue_s,iterations,service_s,reason\n";
  for (const PolicyRun& run : result.policies) {
    for (const JobOutcome& job : run.jobs) {
      const bool done = job.state == JobOutcome::State::kCompleted;
      out += csv_field(run.policy) + ',' + csv_field(job.name) + ',' + name_of(job.state);
      out += base::format(",%.9g", job.arrival_s);
      out += done ? base::format(",%.9g,%.9g,%.9g,%.9g", job.start_s, job.end_s, job.completion_s(),
                                 job.queue_s())
                  : ",,,,";
      out += base::format(",%llu,%.9g,", static_cast<unsigned long long>(job.iterations), job.service_s);
      out += csv_field(job.reason) + '\n';
    }
  }
  return out;
}

}  // namespace gpushare::cli
