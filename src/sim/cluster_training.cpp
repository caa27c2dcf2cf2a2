// SPDX-License-Identifier: Apache-2.0
#include "sim/cluster_training.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <random>

#include "cluster/json.hpp"
#include "cluster/mix_kind.hpp"
#include "cluster/plan.hpp"
#include "sim/csv.hpp"
#include "sim/job_file.hpp"
#include "sim/published_jobs.hpp"

namespace gpushare::sim {
namespace {

using cluster::Fields;
using cluster::JobInfo;
using cluster::kNotNegative;
using cluster::kPositive;
using cluster::OrderedJson;

constexpr double kMegabyte = 1e6;
constexpr uint64_t kMuriMemoryBytes = uint64_t{4} << 30;
constexpr uint64_t kMostJobFileBytes = uint64_t{1} << 30;
constexpr size_t kMostNamed = 20;  // jobs that did not complete, in a result

double demand_of(double stated) {
  return stated > 0 ? stated : InterferenceModel::kDefaultDemand;
}

JobInfo info_of(const Job& job) {
  JobInfo info;
  info.name = job.name;
  info.config = job.config;
  info.guaranteed = job.cls == sched::SessionClass::kGuaranteed;
  info.arrival_s = static_cast<double>(job.arrival_ns) / 1e9;
  info.work_s = job.work_ns() / 1e9;
  info.memory_bytes = job.persistent_bytes + job.ephemeral_bytes;
  info.ephemeral_bytes = job.ephemeral_bytes;
  info.iterations = std::max<uint64_t>(1, job.iterations);
  info.gang = job.gang;
  info.demands = {demand_of(job.demand)};
  info.priority = job.priority;
  info.weight = job.weight;
  return info;
}

void sort_by_arrival(std::vector<JobInfo>& jobs) {
  std::stable_sort(jobs.begin(), jobs.end(),
                   [](const JobInfo& a, const JobInfo& b) { return a.arrival_s < b.arrival_s; });
}

constexpr const char* kMuriColumns[] = {
    "job_id",     "num_gpu",        "submit_time",     "iterations",      "model_name",
    "batch_size", "iteration_time", "resource_time_0", "resource_time_1", "resource_time_2"};

// Whether the header has most of the columns of the muri layout. A single name may be a column of another file, too.
bool is_muri(const std::string& text, const std::string& file) {
  const size_t start = std::min(text.find_first_not_of(" \t\r\n"), text.size());
  const auto rows = parse_csv(text.substr(start, text.find('\n', start) - start), file);
  if (!rows.ok() || rows->empty()) return false;
  const CsvFields header(file, rows->front(), rows->front());
  const auto found = std::count_if(std::begin(kMuriColumns), std::end(kMuriColumns),
                                   [&](const char* name) { return header.has(name); });
  return static_cast<size_t>(found) > std::size(kMuriColumns) / 2;
}

base::Result<TrainingJobs> read_muri(const std::vector<CsvRow>& rows, const std::string& file,
                                     const TrainingFileOptions& options) {
  TrainingJobs out;
  out.layout = "muri";
  const auto& names = kMuriColumns;
  for (const char* name : names)
    if (!CsvFields(file, rows[0], rows[0]).has(name))
      return base::Status(GPUSHARE_MALFORMED_INPUT, file + ": header: the muri layout lacks '" + name + "'");
  for (size_t r = 1; r < rows.size() && (options.limit == 0 || out.jobs.size() < options.limit); ++r) {
    const CsvFields row(file, rows[0], rows[r]);
    GPUSHARE_RETURN_IF_ERROR(row.check());
    JobInfo info;
    GPUSHARE_ASSIGN_OR_RETURN(const double gang, row.number(names[1], 1, 1e6));
    GPUSHARE_ASSIGN_OR_RETURN(const double submitted, row.number(names[2], 0, 1e15));
    GPUSHARE_ASSIGN_OR_RETURN(const double iterations, row.number(names[3], 1, 1e15));
    GPUSHARE_ASSIGN_OR_RETURN(const double iteration_ms, row.number(names[6], 1e-6, 1e12));
    info.name = row.text(names[0]);
    info.config = row.text(names[4]) + " (batch size " + row.text(names[5]) + ")";
    info.gang = static_cast<uint32_t>(gang);
    info.arrival_s = submitted / 1e3 * options.time_scale;
    info.work_s = iterations * iteration_ms / 1e3;
    info.memory_bytes = kMuriMemoryBytes;
    info.iterations = static_cast<uint64_t>(iterations);
    for (size_t k = 7; k < 10; ++k) {
      GPUSHARE_ASSIGN_OR_RETURN(const double busy, row.number(names[k], 0, 1e12));
      info.demands.push_back(std::min(1.0, busy / iteration_ms));
    }
    out.jobs.push_back(std::move(info));
  }
  out.notes.emplace_back(
      "muri: work is iterations x iteration_time; demands on three resources are resource_time over "
      "iteration_time; the trace has no memory: "
      "4 GiB a job and device are assumed");
  return out;
}

// Gives classes to the jobs of a layout without classes. No job there was promised to run as if alone, so all are
// opportunistic unless a part is drawn as guaranteed.
void draw_classes(TrainingJobs& out, const TrainingFileOptions& options) {
  std::mt19937_64 random(options.seed);
  size_t guaranteed = 0;
  for (JobInfo& job : out.jobs) {
    job.guaranteed = static_cast<double>(random() >> 11) * 0x1p-53 < options.guaranteed;
    if (job.guaranteed) ++guaranteed;
  }
  out.notes.push_back(base::format(
      "the layout has no class: %zu of %zu jobs are guaranteed, the others opportunistic (--guaranteed)",
      guaranteed, out.jobs.size()));
}

}  // namespace

base::Result<TrainingJobs> read_training_jobs(const std::string& path, size_t devices,
                                              const TrainingFileOptions& options) {
  GPUSHARE_ASSIGN_OR_RETURN(const std::string text, read_text(path, kMostJobFileBytes));
  if (published_layout(text) != nullptr) {
    GPUSHARE_ASSIGN_OR_RETURN(TrainingJobs published, parse_published(text, path, options));
    draw_classes(published, options);
    return published;
  }
  TrainingJobs out;
  if (is_muri(text, path)) {
    GPUSHARE_ASSIGN_OR_RETURN(const std::vector<CsvRow> rows, parse_csv(text, path));
    GPUSHARE_ASSIGN_OR_RETURN(out, read_muri(rows, path, options));
    sort_by_arrival(out.jobs);
    draw_classes(out, options);
    return out;
  }
  JobFileOptions plain;
  plain.table = options.table;
  plain.limit = options.limit;
  plain.gangs = true;
  GPUSHARE_ASSIGN_OR_RETURN(const JobFile file, parse_jobs(text, path, plain));
  out.layout = file.layout;
  for (const Job& job : file.jobs) out.jobs.push_back(info_of(job));
  if (file.layout == "gavel") {  // parse_jobs stretched the arrivals to a load of one device
    double work = 0;
    for (const JobInfo& job : out.jobs) work += job.work_s * job.gang;
    const double span = out.jobs.back().arrival_s - out.jobs.front().arrival_s,
                 first = out.jobs.front().arrival_s;
    const double factor =
        span > 0 ? work / (options.load * static_cast<double>(devices) * span) * options.time_scale : 1;
    for (JobInfo& job : out.jobs) job.arrival_s = (job.arrival_s - first) * factor;
    out.notes.push_back(base::format(
        "arrivals were stretched so that %.4g device hours of work arrive at a load of %.2f on %zu devices",
        work / 3600, options.load, devices));
  } else {
    for (JobInfo& job : out.jobs) job.arrival_s *= options.time_scale;
    out.notes = file.notes;
  }
  if (file.layout != "gpushare") draw_classes(out, options);
  return out;
}

void write_result(const std::vector<JobInfo>& jobs, const ClusterResult& result, OrderedJson& out) {
  out["jobs"] = jobs.size();
  out["completed"] = result.completed;
  out["rejected"] = result.rejected;
  out["makespan_s"] = result.makespan_s;
  out["jct_mean_s"] = result.jct_mean_s;
  out["jct_p95_s"] = result.jct_p95_s;
  out["queue_mean_s"] = result.queue_mean_s;
  out["utilization"] = result.utilization;
  out["slowdown_p99"] = result.slowdown_p99;
  out["company_p99"] = result.company_p99;
  out["oom"] = result.oom;
  if (result.reconfigured > 0) out["reconfigured"] = result.reconfigured;
  if (const cluster::PredictionReport& told = result.predictions; told.observations > 0) {
    const auto part = [](const cluster::PredictionReport::Part& values) {
      return cluster::object(
          {{"pairs", values.pairs}, {"error", values.error}, {"error_of_mean", values.mean_error}});
    };
    out["predictions"] = cluster::object(
        {{"observations", told.observations}, {"early", part(told.early)}, {"late", part(told.late)}});
  }
  OrderedJson not_completed = OrderedJson::array();
  for (size_t j = 0; j < jobs.size() && not_completed.size() < kMostNamed; ++j)
    if (result.jobs[j].end_s < 0)
      not_completed.push_back(cluster::object({{"name", jobs[j].name}, {"reason", result.jobs[j].reason}}));
  out["not_completed"] = std::move(not_completed);
}

namespace {

void describe_job(Fields& job) {
  job.about(nullptr, "The columns of a job file. MB are 10^6 bytes, on each device of the gang.");
  job.about("guaranteed", "In place of class.");
  job.about("ephemeral_mb", "In proportion to the batch size.");
  job.about("demand", "Part of a device's compute that the job keeps busy alone.");
  job.about("gang", "Devices that the job runs on at once.");
  job.about("priority",
            "gpushare takes jobs of greater priority first, also from devices where others run. The "
            "published schedulers do not "
            "know it.");
  job.about("weight",
            "gpushare takes those that need least for their weight first. On host devices it is the "
            "session's. The published "
            "schedulers do not know it.");
  job.about("config", "The configuration's name in a table of measured pairs.");
  job.about("batch_sizes", "iadeep and gpushare choose from these. The other fields are of the first.");
  job.about("noise_scale", "Noise of the gradient, in the unit of batch sizes.");
}

std::vector<JobInfo> read_document_jobs(Fields& document) {
  std::vector<JobInfo> jobs;
  Fields::Names seen;
  document.each("jobs", 1, [&](Fields& fields, size_t index) {
    JobInfo info;
    describe_job(fields);
    info.name = fields.name(seen, index);
    const bool opportunistic = fields.one_of_or("class", {"guaranteed", "opportunistic"}, 0) == 1;
    info.guaranteed = fields.has("guaranteed") ? fields.flag("guaranteed") : !opportunistic;
    info.arrival_s = fields.number_or("arrival_s", {0, 1e10, false}, 0);
    info.iterations = fields.whole("iterations", 1, uint64_t{1} << 50);
    info.work_s = static_cast<double>(info.iterations) * fields.number("iteration_ms", {0, 1e10, true}) / 1e3;
    const auto bytes = [&](const char* name) {
      return static_cast<uint64_t>(std::llround(fields.number(name, {0, 1e9, false}) * kMegabyte));
    };
    info.memory_bytes = bytes("persistent_mb");
    info.ephemeral_bytes = bytes("ephemeral_mb");
    info.memory_bytes += info.ephemeral_bytes;
    info.gang = static_cast<uint32_t>(fields.whole_or("gang", 1, cluster::kMaxElements, 1));
    info.demands = {fields.number_or("demand", {0, 1, true}, InterferenceModel::kDefaultDemand)};
    info.priority = static_cast<int32_t>(fields.number_or("priority", {-1e6, 1e6, false}, 0));
    info.config = fields.text_or("config", "");
    info.weight = fields.number_or("weight", {0, 1e6, true}, 1);
    if (fields.has("batch_sizes")) {
      info.batch_sizes = fields.numbers("batch_sizes", 1, kPositive);
      info.batch = info.batch_sizes.front();
    }
    info.noise_scale = fields.number_or("noise_scale", kNotNegative, 0);
    jobs.push_back(std::move(info));
  });
  sort_by_arrival(jobs);
  return jobs;
}

void read_run(Fields& document, double& noise, double& restart_s) {
  document.about("run", "For run.");
  if (!document.has("run")) return;
  document.with("run", [&](Fields& inner) {
    inner.about("noise", "The relative standard deviation of a job's speed, drawn once a job.");
    inner.about("restart_s", "Work that a paused job repeats.");
    noise = inner.number_or("noise", {0, 0.99, false}, 0);
    restart_s = inner.number_or("restart_s", {0, 1e9, false}, 0);
  });
}

class TrainingProblem final : public cluster::Problem {
 public:
  TrainingProblem(Fields& document, const std::vector<cluster::Device>& devices)
      : devices_(devices), jobs_(read_document_jobs(document)) {
    read_run(document, noise_, restart_s_);
  }
  base::Status solve(std::string_view choice, OrderedJson& result) override {
    const std::unique_ptr<cluster::Scheduler> scheduler = cluster::make_training_scheduler(choice);
    GPUSHARE_ASSIGN_OR_RETURN(const ClusterResult played, run_cluster(jobs_, devices_, *scheduler, {}));
    write_result(jobs_, played, result);
    return {};
  }
  base::Status play(std::string_view choice, const cluster::PlayOptions& options, OrderedJson& result,
                    std::vector<cluster::PlaySpan>* spans) override {
    std::unique_ptr<cluster::Scheduler> scheduler = cluster::make_training_scheduler(choice);
    const bool own = scheduler == nullptr;
    for (const cluster::PlayOptions::Own& candidate : options.own)
      if (candidate.name == choice) scheduler = candidate.make();
    ClusterOptions cluster;
    cluster.noise = options.noise.value_or(noise_);
    cluster.restart_s = restart_s_;
    cluster.seed = options.seed;
    base::Result<ClusterResult> run =
        run_cluster(jobs_, devices_, *scheduler, cluster, spans != nullptr, options.now_ns);
    if (!run.ok() && own) return {GPUSHARE_INVALID_ARGUMENT, run.status().message()};  // the caller's mistake
    GPUSHARE_RETURN_IF_ERROR(run.status());
    const ClusterResult& played = *run;
    write_result(jobs_, played, result);
    if (options.now_ns) result["decision_p99_ms"] = played.decision_ms_p99;
    if (spans == nullptr) return {};
    for (const ClusterSpan& span : played.spans)
      spans->push_back(
          {"device " + devices_[span.device].id, jobs_[span.job].name, span.begin_s, span.end_s});
    return {};
  }

 private:
  double noise_ = 0, restart_s_ = 0;
  const std::vector<cluster::Device>& devices_;
  std::vector<JobInfo> jobs_;
};

}  // namespace

const cluster::Kind& training_kind() {
  static const cluster::Kind kind = {
      "training",
      "scheduler",
      {std::begin(cluster::kTrainingSchedulers), std::end(cluster::kTrainingSchedulers)},
      {"gpushare"},
      {std::begin(cluster::kTrainingSchedulers), std::end(cluster::kTrainingSchedulers)},
      {"gpushare"},
      true,
      [](Fields& document, const std::vector<cluster::Device>& devices) -> std::unique_ptr<cluster::Problem> {
        return std::make_unique<TrainingProblem>(document, devices);
      },
      true};
  return kind;
}

const std::vector<const cluster::Kind*>& all_cluster_kinds() {
  static const std::vector<const cluster::Kind*> all = [] {
    std::vector<const cluster::Kind*> kinds = cluster::kinds();
    kinds.push_back(&training_kind());
    kinds.push_back(&cluster::mix_kind(training_kind()));
    return kinds;
  }();
  return all;
}

base::Result<TrainingDocument> parse_training_document(std::string_view text) {
  GPUSHARE_ASSIGN_OR_RETURN(const cluster::Json json, cluster::parse_document(text));
  base::Status error;
  Fields fields(json, &error);
  TrainingDocument out;
  out.devices = cluster::read_frame(fields, training_kind());
  if (fields.ok()) out.jobs.jobs = read_document_jobs(fields);
  out.jobs.layout = "document";
  read_run(fields, out.noise, out.restart_s);
  fields.done();
  GPUSHARE_RETURN_IF_ERROR(error);
  return out;
}

}  // namespace gpushare::sim
