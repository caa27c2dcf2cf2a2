// SPDX-License-Identifier: Apache-2.0
#include "sim/published_jobs.hpp"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/units.hpp"
#include "sim/csv.hpp"
#include "sim/known_models.hpp"
#include "sim/timestamp.hpp"

namespace gpushare::sim {
namespace {

using cluster::JobInfo;

constexpr double kMostTraceSeconds = 1e9;
constexpr uint64_t kAssumedBytes = uint64_t{4} << 30;
constexpr double kMostGpus = 1e6;
const std::vector<std::string> kHelios = {"job_id",      "gpu_num",    "node_num", "state",
                                          "submit_time", "start_time", "end_time", "duration"};
const std::vector<std::string> kPai = {"job_name", "task_name", "inst_num", "status",   "start_time",
                                       "end_time", "plan_cpu",  "plan_mem", "plan_gpu", "gpu_type"};
const char* const kPaiStates[] = {"Terminated", "Failed", "Waiting", "Running"};

std::string_view first_line(std::string_view text) {
  text = text.substr(0, text.find('\n'));
  if (text.ends_with('\r')) text.remove_suffix(1);
  return text;
}

bool is_pai_row(const std::vector<std::string_view>& fields) {
  return fields.size() == kPai.size() &&
         std::find(std::begin(kPaiStates), std::end(kPaiStates), fields[3]) != std::end(kPaiStates);
}

// The jobs that were read, and counts of the entries that were left out.
class Reader {
 public:
  Reader(const std::string& file, const TrainingFileOptions& options) : file_(file), options_(options) {}

  base::Status fail(size_t line, const std::string& what) const {
    return {GPUSHARE_MALFORMED_INPUT, base::format("%s:%zu: %s", file_.c_str(), line, what.c_str())};
  }
  bool enough() const { return options_.limit > 0 && out_.jobs.size() >= options_.limit; }

  void add(std::string name, double arrival_s, double work_s, double gpus, bool failed) {
    JobInfo job;
    job.name = std::move(name);
    job.arrival_s = arrival_s;
    job.work_s = std::max(work_s, 1e-3);
    job.gang = static_cast<uint32_t>(std::max(1.0, std::ceil(gpus - 1e-9)));
    job.memory_bytes = kAssumedBytes;
    job.demands = {gpus < 1 ? gpus : InterferenceModel::kDefaultDemand};
    failed_ += failed ? 1 : 0;
    out_.jobs.push_back(std::move(job));
  }
  void without_gpus() { ++without_gpus_; }
  void without_times() { ++without_times_; }
  void cut() { cut_ = true; }
  TrainingJobs& jobs() { return out_; }

  base::Result<TrainingJobs> finish(const char* layout) {
    if (out_.jobs.empty())
      return base::Status(
          GPUSHARE_MALFORMED_INPUT,
          base::format("%s: the %s layout, but no job that had GPUs and times", file_.c_str(), layout));
    out_.layout = layout;
    std::stable_sort(out_.jobs.begin(), out_.jobs.end(),
                     [](const JobInfo& a, const JobInfo& b) { return a.arrival_s < b.arrival_s; });
    const double first = out_.jobs.front().arrival_s;
    for (JobInfo& job : out_.jobs) job.arrival_s = (job.arrival_s - first) * options_.time_scale;
    const auto count = [&](size_t number, const char* what) {
      if (number > 0) out_.notes.push_back(base::format("%s: %zu %s", layout, number, what));
    };
    count(failed_, "jobs failed or were killed; they are played for as long as they had their GPUs");
    count(without_gpus_, "entries without GPUs are left out");
    count(without_times_, "entries without a start or an end are left out: they never ran, or still did");
    if (cut_) out_.notes.push_back(std::string(layout) + ": the last line is cut off and left out");
    return std::move(out_);
  }

 private:
  const std::string& file_;
  const TrainingFileOptions& options_;
  TrainingJobs out_;
  size_t failed_ = 0, without_gpus_ = 0, without_times_ = 0;
  bool cut_ = false;
};

// A number of a row, or nothing for an empty field; `wrong` is set for other text.
std::optional<double> number_of(std::string_view text, double most, bool* wrong) {
  if (text.empty()) return std::nullopt;
  const base::Result<double> value = base::parse_double(text);
  if (value.ok() && *value >= 0 && *value <= most) return *value;
  *wrong = true;
  return std::nullopt;
}

// Seconds since 1970, or nothing for no time.
std::optional<double> time_of(std::string_view text, bool* wrong) {
  if (text.empty() || text == "None" || text == "NULL" || text == "nan") return std::nullopt;
  uint64_t ns = 0;
  if (parse_timestamp(text, &ns)) return static_cast<double>(ns) / 1e9;
  *wrong = true;
  return std::nullopt;
}

base::Result<TrainingJobs> parse_philly(std::string_view text, const std::string& file,
                                        const TrainingFileOptions& options) {
  const auto json = nlohmann::json::parse(text.begin(), text.end(), nullptr, false);
  if (json.is_discarded() || !json.is_array())
    return base::Status(
        GPUSHARE_MALFORMED_INPUT,
        file + ": the philly layout: not whole JSON; expected the list of jobs of cluster_job_log");
  Reader reader(file, options);
  for (size_t j = 0; j < json.size() && !reader.enough(); ++j) {
    const auto wrong_entry = [&](const char* what) {
      return base::Status(GPUSHARE_MALFORMED_INPUT, base::format("%s: [%zu].%s", file.c_str(), j, what));
    };
    bool wrong = false;
    const auto time = [&](const nlohmann::json& of, const char* key) -> std::optional<double> {
      if (!of.is_object() || !of.contains(key) || of[key].is_null()) return std::nullopt;
      if (of[key].is_string()) return time_of(of[key].get_ref<const std::string&>(), &wrong);
      wrong = true;
      return std::nullopt;
    };
    const auto& entry = json[j];
    if (!entry.is_object() || !entry.contains("jobid") || !entry["jobid"].is_string())
      return wrong_entry("jobid: it must be a text");
    const std::optional<double> submitted = time(entry, "submitted_time");
    double work = 0, gpus = 0;
    if (entry.contains("attempts") && entry["attempts"].is_array())
      for (const auto& attempt : entry["attempts"]) {
        const std::optional<double> start = time(attempt, "start_time"), end = time(attempt, "end_time");
        double here = 0;
        if (attempt.is_object() && attempt.contains("detail") && attempt["detail"].is_array())
          for (const auto& server : attempt["detail"])
            if (server.is_object() && server.contains("gpus") && server["gpus"].is_array())
              here += static_cast<double>(server["gpus"].size());
        if (start && end && *end >= *start) work += *end - *start;
        gpus = std::max(gpus, here);
      }
    if (wrong)
      return wrong_entry("submitted_time, start_time or end_time: it must be 'YYYY-MM-DD hh:mm:ss' or null");
    if (work > kMostTraceSeconds)
      return wrong_entry(
          base::format("attempts: they took %g s in all, the most allowed is %g", work, kMostTraceSeconds)
              .c_str());
    if (gpus <= 0)
      reader.without_gpus();
    else if (!submitted || work <= 0)
      reader.without_times();
    else
      reader.add(entry["jobid"].get<std::string>(), *submitted, work, gpus,
                 entry.value("status", nlohmann::json()) != "Pass");
  }
  reader.jobs().notes.emplace_back(
      "philly: work is the time of all attempts; the log has no memory: 4 GiB a job and GPU are assumed");
  return reader.finish("philly");
}

// CSV rows; the last one is left out if the file does not end with its line and it has too few fields.
base::Result<std::vector<CsvRow>> whole_rows(std::string_view text, const std::string& file, size_t columns,
                                             Reader& reader) {
  GPUSHARE_ASSIGN_OR_RETURN(std::vector<CsvRow> rows, parse_csv(text, file));
  if (!rows.empty() && !text.ends_with('\n') && rows.back().fields.size() < columns) {
    rows.pop_back();
    reader.cut();
  }
  for (const CsvRow& row : rows)
    if (row.fields.size() != columns)
      return reader.fail(row.line, base::format("%zu fields; expected %zu", row.fields.size(), columns));
  return rows;
}

base::Result<TrainingJobs> parse_helios(std::string_view text, const std::string& file,
                                        const TrainingFileOptions& options) {
  Reader reader(file, options);
  // The first line that is not blank, as published_layout() and parse_csv() count.
  const std::vector<std::string_view> header =
      split(first_line(text.substr(std::min(text.find_first_not_of(" \t\r\n"), text.size()))), ',');
  std::vector<size_t> at;
  for (const std::string& name : kHelios)
    at.push_back(static_cast<size_t>(std::find(header.begin(), header.end(), name) - header.begin()));
  GPUSHARE_ASSIGN_OR_RETURN(const std::vector<CsvRow> rows, whole_rows(text, file, header.size(), reader));
  for (size_t r = 1; r < rows.size() && !reader.enough(); ++r) {
    const auto field = [&](size_t i) -> const std::string& { return rows[r].fields[at[i]]; };
    bool wrong = false;
    const std::optional<double> gpus = number_of(field(1), kMostGpus, &wrong);
    if (wrong) return reader.fail(rows[r].line, "gpu_num: '" + field(1).substr(0, 40) + "' must be a number");
    const std::optional<double> submitted = time_of(field(4), &wrong);
    if (wrong)
      return reader.fail(rows[r].line,
                         "submit_time: '" + field(4).substr(0, 40) + "' must be 'YYYY-MM-DD hh:mm:ss'");
    const std::optional<double> duration = number_of(field(7), kMostTraceSeconds, &wrong);
    if (wrong) return reader.fail(rows[r].line, "duration: '" + field(7).substr(0, 40) + "' must be seconds");
    if (!gpus || *gpus <= 0)
      reader.without_gpus();
    else if (!submitted || !duration || *duration <= 0)
      reader.without_times();
    else
      reader.add(field(0), *submitted, *duration, *gpus, field(3) != "COMPLETED");
  }
  reader.jobs().notes.emplace_back(
      "helios: work is duration; the log has no memory: 4 GiB a job and GPU are assumed");
  return reader.finish("helios");
}

base::Result<TrainingJobs> parse_pai(std::string_view text, const std::string& file,
                                     const TrainingFileOptions& options) {
  Reader reader(file, options);
  GPUSHARE_ASSIGN_OR_RETURN(const std::vector<CsvRow> rows, whole_rows(text, file, kPai.size(), reader));
  const bool header = !rows.empty() && rows[0].fields[0] == kPai[0];
  for (size_t r = header ? 1 : 0; r < rows.size() && !reader.enough(); ++r) {
    const auto& fields = rows[r].fields;
    double values[4];
    bool has[4];
    const size_t columns[] = {2, 4, 5, 8};
    for (size_t i = 0; i < 4; ++i) {
      bool wrong = false;
      const std::optional<double> value = number_of(fields[columns[i]], 1e15, &wrong);
      if (wrong)
        return reader.fail(rows[r].line, kPai[columns[i]] + ": '" + fields[columns[i]].substr(0, 40) +
                                             "' must be a number, or empty");
      has[i] = value.has_value();
      values[i] = value.value_or(0);
    }
    const double each = values[3] / 100, instances = has[0] ? std::max(1.0, values[0]) : 1;
    const double gpus = instances > 1 ? instances * std::max(1.0, std::ceil(each - 1e-9)) : each;
    if (!has[3] || each <= 0 || gpus > kMostGpus)
      reader.without_gpus();
    else if (!has[1] || !has[2] || values[2] <= values[1] || values[2] - values[1] > kMostTraceSeconds)
      reader.without_times();
    else
      reader.add(fields[0] + "/" + fields[1], values[1], values[2] - values[1], gpus,
                 fields[3] != "Terminated");
  }
  reader.jobs().notes.emplace_back(
      "pai: a task is a job of inst_num x plan_gpu GPUs; part of a GPU is a demand; work is end_time less "
      "start_time, which is also when it arrives; 4 GiB a job and GPU are assumed");
  return reader.finish("pai");
}

// Where the fields of a Gavel line are: newer traces have a folder, a mode and a duration more.
struct GavelFields {
  size_t steps, gpus, weight, arrival;
};
std::optional<GavelFields> gavel_fields(size_t count) {
  switch (count) {
    case 9:
      return GavelFields{4, 5, 6, 8};
    case 10:
      return GavelFields{5, 6, 7, 9};
    case 11:
      return GavelFields{5, 6, 8, 10};
    case 12:
      return GavelFields{5, 6, 8, 11};
    default:
      return std::nullopt;
  }
}

base::Result<TrainingJobs> parse_gavel_trace(std::string_view text, const std::string& file,
                                             const TrainingFileOptions& options) {
  Reader reader(file, options);
  const bool ended = text.ends_with('\n');
  size_t line = 0;
  while (!text.empty() && !reader.enough()) {
    ++line;
    const std::string_view row = first_line(text);
    const size_t end = text.find('\n');
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    if (row.empty()) continue;
    const std::vector<std::string_view> fields = split(row, '\t');
    const std::optional<GavelFields> at = gavel_fields(fields.size());
    if (!at) {
      if (text.empty() && !ended) {
        reader.cut();
        break;
      }
      return reader.fail(line, base::format("%zu fields between tabs; expected 9 to 12", fields.size()));
    }
    double steps_per_s = 0;
    const std::string model(fields[0]);
    if (options.table != nullptr) {
      const size_t config = options.table->find(model);
      if (config != InterferenceTable::kNone) steps_per_s = options.table->alone_steps_per_s(config);
    }
    const GavelConfig* known = find_gavel_config(model);
    if (steps_per_s == 0 && known != nullptr) steps_per_s = known->steps_per_s;
    if (steps_per_s == 0)
      return reader.fail(line, "'" + model.substr(0, 60) + "' is no known configuration of Gavel's table");
    bool wrong = false;
    const auto number = [&](size_t i, double most) {
      return number_of(fields[i], most, &wrong).value_or(-1);
    };
    const double steps = number(at->steps, 1e15), gpus = number(at->gpus, kMostGpus),
                 weight = number(at->weight, 1e6), arrival = number(at->arrival, kMostTraceSeconds);
    if (wrong || steps < 1 || gpus < 1 || arrival < 0 || steps / steps_per_s > kMostTraceSeconds)
      return reader.fail(line,
                         base::format("total_steps '%.*s', scale_factor '%.*s' or arrival_time '%.*s' is no "
                                      "number in its range (at most 1e9 s of work)",
                                      static_cast<int>(std::min<size_t>(40, fields[at->steps].size())),
                                      fields[at->steps].data(),
                                      static_cast<int>(std::min<size_t>(40, fields[at->gpus].size())),
                                      fields[at->gpus].data(),
                                      static_cast<int>(std::min<size_t>(40, fields[at->arrival].size())),
                                      fields[at->arrival].data()));
    reader.add(model, arrival, steps / steps_per_s, gpus, false);
    JobInfo& job = reader.jobs().jobs.back();
    job.config = model;
    job.iterations = static_cast<uint64_t>(steps);
    if (weight > 0) job.weight = weight;
    if (known != nullptr) {
      job.ephemeral_bytes = static_cast<uint64_t>(std::llround(known->ephemeral_mb * 1e6));
      job.memory_bytes =
          job.ephemeral_bytes +
          static_cast<uint64_t>(std::llround(known->parameters_millions * kGavelBytesPerParameter * 1e6));
    }
  }
  reader.jobs().notes.emplace_back(
      "trace: work is total_steps over the steps a second alone; arrivals are as in the file");
  return reader.finish("trace");
}

}  // namespace

const char* published_layout(std::string_view text) {
  const size_t start = text.find_first_not_of(" \t\r\n");
  if (start == std::string_view::npos) return nullptr;
  const std::string_view line = first_line(text.substr(start));
  if (text[start] == '[' && text.substr(start, 4096).find("\"jobid\"") != std::string_view::npos)
    return "philly";
  const std::vector<std::string_view> tabs = split(line, '\t');
  if (gavel_fields(tabs.size()) && tabs[0].find("batch size") != std::string_view::npos) return "trace";
  const std::vector<std::string_view> commas = split(line, ',');
  if (is_pai_row(commas) || std::equal(commas.begin(), commas.end(), kPai.begin(), kPai.end())) return "pai";
  const bool helios = std::all_of(kHelios.begin(), kHelios.end(), [&](const std::string& name) {
    return std::find(commas.begin(), commas.end(), name) != commas.end();
  });
  return helios ? "helios" : nullptr;
}

base::Result<TrainingJobs> parse_published(std::string_view text, const std::string& file,
                                           const TrainingFileOptions& options) {
  const char* layout = published_layout(text);
  if (layout == nullptr)
    return base::Status(GPUSHARE_MALFORMED_INPUT,
                        file + ": no known layout; there are philly, helios, pai and Gavel's .trace");
  const std::string_view name = layout;
  if (name == "philly") return parse_philly(text, file, options);
  if (name == "helios") return parse_helios(text, file, options);
  if (name == "pai") return parse_pai(text, file, options);
  return parse_gavel_trace(text, file, options);
}

}  // namespace gpushare::sim
