// SPDX-License-Identifier: Apache-2.0
#include "sim/job_file.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "base/saturate.hpp"
#include "base/units.hpp"
#include "sim/csv.hpp"
#include "sim/known_models.hpp"

namespace gpushare::sim {
namespace {

constexpr double kMb = 1e6;
constexpr double kMostSeconds = 1e9;  // 31 years, for arrivals and for the work of a job
constexpr double kMostMb = 1e9;       // 1 PB
constexpr double kMostIterations = 1e15;
constexpr double kMostGang = 1e6;
constexpr size_t kLongestName = 256;

base::Result<std::string> name_in(const CsvFields& row, std::string_view column) {
  const std::string& value = row.text(column);
  if (value.empty()) return row.fail(column, "is empty");
  if (value.size() > kLongestName)
    return row.fail(column,
                    base::format("has %zu characters; at most %zu are allowed", value.size(), kLongestName));
  return value;
}

// Megabytes; "205?": the job uses 205 MB and does not say so beforehand.
base::Result<double> need_in(const CsvFields& row, std::string_view column, bool above, bool* declared) {
  std::string value = row.text(column);
  *declared = !value.ends_with('?');
  if (!*declared) value.pop_back();
  return row.number_in(value, row.column(column), 0, kMostMb, above);
}

uint64_t to_ns(double seconds) {
  return static_cast<uint64_t>(std::llround(seconds * 1e9));
}
uint64_t to_bytes(double mb) {
  return static_cast<uint64_t>(std::llround(mb * kMb));
}

base::Result<Job> parse_own(const CsvFields& row) {
  Job job;
  GPUSHARE_ASSIGN_OR_RETURN(job.name, name_in(row, "name"));
  GPUSHARE_ASSIGN_OR_RETURN(const std::string cls, name_in(row, "class"));
  if (cls == "opportunistic")
    job.cls = sched::SessionClass::kOpportunistic;
  else if (cls != "guaranteed")
    return row.fail("class", "'" + cls.substr(0, 40) + "' must be guaranteed or opportunistic");
  GPUSHARE_ASSIGN_OR_RETURN(const double arrival, row.number("arrival_s", 0, kMostSeconds));
  job.arrival_ns = to_ns(arrival);
  GPUSHARE_ASSIGN_OR_RETURN(job.iterations, row.count("iterations", 1, kMostIterations));
  GPUSHARE_ASSIGN_OR_RETURN(const double iteration_ms,
                            row.number("iteration_ms", 0, kMostSeconds * 1e3, true));
  job.iteration_ns = iteration_ms * 1e6;
  if (job.work_ns() > kMostSeconds * 1e9)
    return row.fail("iterations", base::format("times iteration_ms is %g s of work; at most %g s are allowed",
                                               job.work_ns() * 1e-9, kMostSeconds));
  GPUSHARE_ASSIGN_OR_RETURN(const double persistent,
                            need_in(row, "persistent_mb", false, &job.declares_persistent));
  job.persistent_bytes = to_bytes(persistent);
  GPUSHARE_ASSIGN_OR_RETURN(const double ephemeral,
                            need_in(row, "ephemeral_mb", true, &job.declares_ephemeral));
  job.ephemeral_bytes = std::max<uint64_t>(to_bytes(ephemeral), 1);
  GPUSHARE_ASSIGN_OR_RETURN(const double priority, row.number("priority", -1e9, 1e9));
  if (priority != std::floor(priority)) return row.fail("priority", "must be a whole number");
  job.priority = static_cast<int32_t>(priority);
  if (row.has("weight")) {
    GPUSHARE_ASSIGN_OR_RETURN(job.weight, row.number("weight", 0, 1e6, true));
  }
  if (row.has("demand")) {
    GPUSHARE_ASSIGN_OR_RETURN(job.demand, row.number("demand", 0, 1, true));
  }
  if (row.has("config")) {
    GPUSHARE_ASSIGN_OR_RETURN(job.config, name_in(row, "config"));
  }
  if (row.has("think_ms")) {
    GPUSHARE_ASSIGN_OR_RETURN(const double think_ms, row.number("think_ms", 0, kMostSeconds * 1e3));
    job.think_ns = to_ns(think_ms * 1e-3);
    if (think_ms * 1e-3 * static_cast<double>(job.iterations) > kMostSeconds)
      return row.fail("think_ms", base::format("times iterations is above %g s", kMostSeconds));
  }
  return job;
}

// "vgg16_25_1min" -> "vgg16".
std::string salus_model(const std::string& name) {
  return name.substr(0, name.find('_'));
}

base::Result<Job> parse_salus(const CsvFields& row, std::set<std::string>& unknown) {
  Job job;
  GPUSHARE_ASSIGN_OR_RETURN(job.name, name_in(row, "name"));
  GPUSHARE_ASSIGN_OR_RETURN(const double seconds, row.number("seconds_alone", 0, kMostSeconds, true));
  GPUSHARE_ASSIGN_OR_RETURN(const double peak, row.number("peak_mb", 0, kMostMb, true));
  GPUSHARE_ASSIGN_OR_RETURN(job.iterations, row.count("iterations", 1, kMostIterations));
  job.iteration_ns = seconds * 1e9 / static_cast<double>(job.iterations);
  const std::string model = salus_model(job.name);
  const SalusModel* known = find_salus_model(model);
  if (known == nullptr) unknown.insert(model);
  double persistent = known == nullptr ? 0 : known->parameters_millions * 4;
  persistent = std::clamp(persistent, kSalusLeastPersistentMb, kSalusMostPersistentMb);
  job.persistent_bytes = to_bytes(std::min(persistent, peak / 2));
  job.ephemeral_bytes = std::max<uint64_t>(to_bytes(peak) - job.persistent_bytes, 1);
  if (model == "superres") job.demand = InterferenceModel::kSuperresDemand;
  return job;
}

base::Result<Job> parse_gavel(const CsvFields& row, const InterferenceTable* table) {
  Job job;
  GPUSHARE_ASSIGN_OR_RETURN(job.config, name_in(row, "model"));
  job.name = job.config;
  GPUSHARE_ASSIGN_OR_RETURN(job.iterations, row.count("steps", 1, kMostIterations));
  GPUSHARE_ASSIGN_OR_RETURN(const double arrival, row.number("arrival_s", 0, kMostSeconds));
  GPUSHARE_ASSIGN_OR_RETURN(const uint64_t gpus, row.count("gpus", 1, kMostGang));
  job.gang = static_cast<uint32_t>(gpus);
  job.arrival_ns = to_ns(arrival);
  const GavelConfig* known = find_gavel_config(job.config);
  if (known == nullptr)
    return row.fail("model", "'" + job.config.substr(0, 60) + "' is no known configuration of Gavel's table");
  double steps_per_s = known->steps_per_s;
  if (table != nullptr) {
    const size_t config = table->find(job.config);
    if (config != InterferenceTable::kNone) steps_per_s = table->alone_steps_per_s(config);
  }
  job.iteration_ns = 1e9 / steps_per_s;
  if (job.work_ns() > kMostSeconds * 1e9)
    return row.fail("steps", base::format("is %g s of work; at most %g s are allowed", job.work_ns() * 1e-9,
                                          kMostSeconds));
  job.persistent_bytes = to_bytes(known->parameters_millions * kGavelBytesPerParameter);
  job.ephemeral_bytes = to_bytes(known->ephemeral_mb);
  return job;
}

struct Layout {
  const char* name;
  std::vector<std::string> required, optional;
};

const std::vector<Layout>& layouts() {
  static const std::vector<Layout> all = {
      {"gpushare",
       {"name", "class", "arrival_s", "iterations", "iteration_ms", "persistent_mb", "ephemeral_mb",
        "priority"},
       {"weight", "demand", "config", "think_ms"}},
      {"salus", {"name", "seconds_alone", "peak_mb", "iterations"}, {}},
      {"gavel", {"model", "steps", "arrival_s", "gpus"}, {}},
  };
  return all;
}

bool holds(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

base::Result<const Layout*> recognise(const std::string& file, const CsvRow& header, bool gangs) {
  const auto fail = [&](const std::string& what) {
    return base::Status(GPUSHARE_MALFORMED_INPUT,
                        base::format("%s:%zu: header: ", file.c_str(), header.line) + what);
  };
  std::set<std::string> seen;
  for (const std::string& column : header.fields)
    if (!seen.insert(column).second) return fail("column '" + column.substr(0, 40) + "' is there twice");
  const Layout* best = nullptr;
  size_t best_found = 0;
  for (const Layout& layout : layouts()) {
    const auto found =
        static_cast<size_t>(std::count_if(layout.required.begin(), layout.required.end(),
                                          [&](const std::string& name) { return seen.contains(name); }));
    if (best == nullptr || found * best->required.size() > best_found * layout.required.size()) {
      best = &layout;
      best_found = found;
    }
  }
  if (best_found < 2) {
    std::string known;
    for (const Layout& layout : layouts())
      known += "\n  " + std::string(layout.name) + ": " + joined(layout.required);
    return fail("no known layout; there are:" + known);
  }
  std::string missing;
  for (const std::string& name : best->required)
    if (!seen.contains(name)) missing += (missing.empty() ? "'" : "', '") + name;
  if (!missing.empty())
    return fail(std::string("the ") + best->name + " layout lacks " + missing + "'; it has " +
                joined(best->required));
  for (const std::string& column : header.fields)
    if (!holds(best->required, column) && !holds(best->optional, column) && !(gangs && column == "gang"))
      return fail("'" + column.substr(0, 40) + "' is no column of the " + best->name + " layout; allowed: " +
                  joined(best->required) + (best->optional.empty() ? "" : ", and " + joined(best->optional)) +
                  (gangs ? ", and 'gang'" : ""));
  return best;
}

// Stretches arrivals so that work arrives at `load` of what one GPU does.
void scale_to_load(JobFile& file, double load) {
  double work = 0;
  uint64_t first = std::numeric_limits<uint64_t>::max(), last = 0;
  for (const Job& job : file.jobs) {
    work += job.work_ns();
    first = std::min(first, job.arrival_ns);
    last = std::max(last, job.arrival_ns);
  }
  if (last == first) {
    file.notes.emplace_back("all jobs arrive at once: arrivals were not stretched to a load");
    return;
  }
  const double factor = work / load / static_cast<double>(last - first);
  for (Job& job : file.jobs)
    job.arrival_ns = base::to_uint64(std::round(static_cast<double>(job.arrival_ns - first) * factor));
  file.notes.push_back(
      base::format("arrivals were multiplied by %.4g so that %.4g h of work arrive over %.4g h: an offered "
                   "load of %.2f on one GPU",
                   factor, work / 3.6e12, static_cast<double>(last - first) * factor / 3.6e12, load));
}

}  // namespace

base::Result<JobFile> parse_jobs(std::string_view text, const std::string& file,
                                 const JobFileOptions& options) {
  if (!std::isfinite(options.time_scale) || options.time_scale < 0 || options.time_scale > 1e6)
    return base::Status(GPUSHARE_INVALID_ARGUMENT, "time scale must be a number from 0 to 1e6");
  if (!std::isfinite(options.load) || options.load <= 0 || options.load > 10)
    return base::Status(GPUSHARE_INVALID_ARGUMENT, "load must be a number above 0 and at most 10");
  GPUSHARE_ASSIGN_OR_RETURN(const std::vector<CsvRow> rows, parse_csv(text, file));
  if (rows.empty())
    return base::Status(GPUSHARE_MALFORMED_INPUT, file + ": the file is empty; expected a header line");
  GPUSHARE_ASSIGN_OR_RETURN(const Layout* layout, recognise(file, rows[0], options.gangs));

  JobFile out;
  out.layout = layout->name;
  std::set<std::string> unknown;
  for (size_t i = 1; i < rows.size(); ++i) {
    if (options.limit != 0 && out.jobs.size() >= options.limit) break;
    const CsvFields row(file, rows[0], rows[i]);
    GPUSHARE_RETURN_IF_ERROR(row.check());
    auto job = out.layout == "gpushare" ? parse_own(row)
               : out.layout == "salus"  ? parse_salus(row, unknown)
                                        : parse_gavel(row, options.table);
    if (!job.ok()) return job.status();
    if (row.has("gang")) {
      GPUSHARE_ASSIGN_OR_RETURN(const double gang, row.number("gang", 1, kMostGang));
      job->gang = static_cast<uint32_t>(gang);
    }
    out.jobs.push_back(std::move(*job));
  }
  if (out.jobs.empty())
    return base::Status(GPUSHARE_MALFORMED_INPUT, file + ": no jobs after the header line");

  if (out.layout == "salus") {
    out.notes.push_back(
        base::format("persistent sizes are not in the file: 4 bytes a published parameter (plain SGD), "
                     "within Salus's measured %.1f to %.1f MB "
                     "and at most half the peak; ephemeral is peak less persistent",
                     kSalusLeastPersistentMb, kSalusMostPersistentMb));
    out.notes.emplace_back("all jobs arrive at time 0, in file order");
    if (!unknown.empty())
      out.notes.push_back(base::format("no published parameter count for: %s",
                                       joined({unknown.begin(), unknown.end()}).substr(0, 200).c_str()));
  } else if (out.layout == "gavel") {
    out.notes.push_back(
        base::format("iteration times are steps per second alone on %s",
                     options.table != nullptr ? options.table->device().c_str() : "a P100 (built-in table)"));
    out.notes.emplace_back(
        "jobs of several GPUs run all their steps on the one GPU at its speed for one: their work is neither "
        "divided nor "
        "multiplied by their GPUs");
    out.notes.push_back(
        base::format("sizes are not in the file: persistent %g bytes a published parameter (weights, "
                     "gradients, Adam); ephemeral estimated "
                     "from the layers and batch size",
                     kGavelBytesPerParameter));
    scale_to_load(out, options.load);
  }
  if (options.time_scale != 1.0) {
    for (Job& job : out.jobs)
      job.arrival_ns = static_cast<uint64_t>(
          std::min(static_cast<double>(job.arrival_ns) * options.time_scale, kMostSeconds * 1e9 * 10));
    out.notes.push_back(
        base::format("arrivals were then multiplied by the time scale %g", options.time_scale));
  }
  std::stable_sort(out.jobs.begin(), out.jobs.end(),
                   [](const Job& a, const Job& b) { return a.arrival_ns < b.arrival_ns; });
  return out;
}

base::Result<JobFile> read_jobs(const std::string& path, const JobFileOptions& options) {
  GPUSHARE_ASSIGN_OR_RETURN(const std::string text, read_text(path));
  return parse_jobs(text, path, options);
}

}  // namespace gpushare::sim
