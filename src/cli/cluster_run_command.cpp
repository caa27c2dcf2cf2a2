// `gpushare cluster run`: training jobs on several simulated devices, under several schedulers.
// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/clock.hpp"
#include "base/saturate.hpp"
#include "base/trace_writer.hpp"
#include "cli/cluster_command.hpp"
#include "cli/options.hpp"
#include "cli/output.hpp"
#include "cli/progress.hpp"
#include "sim/cluster_training.hpp"
#include "sim/csv.hpp"

namespace gpushare::cli {
namespace {

class ClusterRunCommand final : public Command {
 public:
  const char* name() const override { return "run"; }
  const char* summary() const override {
    return "Play training jobs on several simulated devices under several schedulers";
  }
  const char* help() const override {
    return "Jobs: a document of kind training, or with --jobs a job file (docs/cli.md, run), which may have "
           "a column gang, or a\n"
           "trace of Muri's or Gavel's layout. Schedulers: gpushare (the default), fifo, srtf, tiresias, "
           "antman, iadeep, pack.\n"
           "\n"
           "Examples:\n"
           "  gpushare cluster run examples/cluster/training.json --scheduler fifo,srtf,gpushare\n"
           "  gpushare cluster run --jobs examples/jobs/mixed.csv --devices 2 --json -\n"
           "\n"
           "JSON: version, kind, devices, layout, seed, results[] {scheduler, solve_ms, jobs, completed, "
           "rejected, makespan_s,\n"
           "jct_mean_s, jct_p95_s, queue_mean_s, utilization, slowdown_p99, oom, not_completed, "
           "decision_p99_ms}, notes.\n"
           "\n"
           "Exit codes: 0 ok; 1 an output could not be written; 2 bad usage or a bad file.\n";
  }
  void declare(CLI::App& app) override {
    app.add_option("FILE", file_, "Document of kind training, JSON; or --jobs")->type_name("FILE.json");
    app.add_option("--jobs", jobs_, "Job file in place of a document")->type_name("FILE.csv");
    app.add_option("--devices", devices_, "With --jobs: how many equal devices, or a JSON list of them [1]")
        ->type_name("N|FILE");
    app.add_option("--memory", memory_, "With --devices N: memory of each [16GiB]")->type_name("SIZE");
    app.add_option("--device", device_, "What they are: sim, on virtual time [sim]")->type_name("SPEC");
    app.add_option("--scheduler", schedulers_, "Who decides, separated by commas [gpushare]")
        ->type_name("NAMES");
    app.add_option("--interference", interference_,
                   "Measured pairs, as published with Gavel; others as demands say")
        ->type_name("FILE");
    app.add_option("--limit", limit_, "With --jobs: only the first jobs of the file [0: all]")
        ->type_name("N");
    app.add_option("--load", load_,
                   "With --jobs of Gavel's layout: work offered over what the devices do [0.95]")
        ->type_name("X");
    app.add_option("--noise", noise_,
                   "Relative standard deviation of a job's speed, unknown to schedulers [0]")
        ->type_name("X");
    app.add_option("--restart-s", restart_, "Work that a paused job repeats, seconds [0]")->type_name("S");
    app.add_option("--seed", seed_, "Of the noise [1]")->type_name("N");
    json_.declare(app);
    app.add_option("--timeline", timeline_,
                   "Jobs on devices under the last scheduler: a Chrome trace, opens in Perfetto")
        ->type_name("FILE");
  }

  base::Result<ExitCode> run() override {
    if (file_.empty() == jobs_.empty())
      return base::Status(GPUSHARE_INVALID_ARGUMENT, "give a document, or a job file by --jobs");
    if (device_ != "sim") return bad_option("--device", device_, "there is sim");
    if (jobs_.empty() && !(devices_.empty() && memory_.empty() && limit_.empty() && load_.empty()))
      return base::Status(
          GPUSHARE_INVALID_ARGUMENT,
          "--devices, --memory, --limit and --load go with --jobs; a document has its own devices");
    std::vector<std::string> schedulers = {"gpushare"};
    if (!schedulers_.empty()) {
      GPUSHARE_ASSIGN_OR_RETURN(schedulers,
                                parse_names("--scheduler", schedulers_, cluster::kTrainingSchedulers));
    }
    sim::ClusterOptions options;
    if (!noise_.empty()) {
      GPUSHARE_ASSIGN_OR_RETURN(options.noise, parse_number("--noise", noise_, 0, true, 0.99));
    }
    if (!restart_.empty()) {
      GPUSHARE_ASSIGN_OR_RETURN(options.restart_s, parse_number("--restart-s", restart_, 0, true, 1e9));
    }
    GPUSHARE_ASSIGN_OR_RETURN(options.seed, parse_count("--seed", seed_, ~uint64_t{0}));
    GPUSHARE_RETURN_IF_ERROR(
        check_files({{"FILE", file_}, {"--jobs", jobs_}, {"--interference", interference_}},
                    {json_.file(), {"--timeline", timeline_}}));
    sim::InterferenceTable table;
    if (!interference_.empty()) {
      GPUSHARE_ASSIGN_OR_RETURN(table, sim::InterferenceTable::read(interference_));
      options.table = &table;
    }
    sim::TrainingDocument input;
    GPUSHARE_RETURN_IF_ERROR(read(options.table, input));

    const std::vector<cluster::JobInfo>& jobs = input.jobs.jobs;
    nlohmann::ordered_json results = nlohmann::ordered_json::array();
    ProgressLine progress;
    for (size_t i = 0; i < schedulers.size(); ++i) {
      options.progress = [&](double now_s, size_t finished, size_t count) {
        if (progress.due())
          progress.show(
              base::format("%s: %zu of %zu jobs, %.0f s", schedulers[i].c_str(), finished, count, now_s));
        return true;
      };
      const std::unique_ptr<cluster::Scheduler> scheduler = cluster::make_training_scheduler(schedulers[i]);
      const uint64_t begin_ns = base::host_now_ns();
      GPUSHARE_ASSIGN_OR_RETURN(const sim::ClusterResult result,
                                sim::run_cluster(jobs, input.devices, *scheduler, options,
                                                 !timeline_.empty() && i + 1 == schedulers.size(),
                                                 [] { return base::host_now_ns(); }));
      nlohmann::ordered_json entry = {
          {"scheduler", schedulers[i]},
          {"solve_ms", static_cast<double>(base::host_now_ns() - begin_ns) / 1e6}};
      sim::write_result(jobs, result, entry);
      entry["decision_p99_ms"] = result.decision_ms_p99;
      results.push_back(std::move(entry));
      if (!result.spans.empty()) GPUSHARE_RETURN_IF_ERROR(write_timeline(input, result, schedulers[i]));
    }
    progress.clear();
    const nlohmann::ordered_json document = {{"version", 1},
                                             {"kind", "training"},
                                             {"devices", input.devices.size()},
                                             {"layout", input.jobs.layout},
                                             {"seed", options.seed},
                                             {"results", std::move(results)},
                                             {"notes", input.jobs.notes}};
    GPUSHARE_RETURN_IF_ERROR(json_.write(document));
    if (!json_.on_stdout()) {
      std::string text = render_cluster_result(document);
      for (const std::string& note : input.jobs.notes) text += "\n- " + note + "\n";
      GPUSHARE_RETURN_IF_ERROR(write_stdout(text));
    }
    return kExitOk;
  }

 private:
  base::Status read(const sim::InterferenceTable* table, sim::TrainingDocument& input) {
    if (jobs_.empty()) {
      GPUSHARE_ASSIGN_OR_RETURN(const std::string text, sim::read_text(file_, uint64_t{1} << 30));
      base::Result<sim::TrainingDocument> parsed = sim::parse_training_document(text);
      if (!parsed.ok()) return parsed.status().with_context(file_);
      input = std::move(*parsed);
      return {};
    }
    uint64_t memory = cluster::kDefaultMemoryBytes;
    if (!memory_.empty()) {
      GPUSHARE_ASSIGN_OR_RETURN(memory, parse_size("--memory", memory_));
    }
    const std::string devices = devices_.empty() ? "1" : devices_;
    if (devices.find_first_not_of("0123456789") == std::string::npos) {
      GPUSHARE_ASSIGN_OR_RETURN(const uint64_t count,
                                parse_count("--devices", devices, cluster::kMaxElements, 1));
      input.devices.resize(count);
      for (size_t d = 0; d < count; ++d) {
        input.devices[d].id = std::to_string(d);
        input.devices[d].memory_bytes = memory;
      }
    } else {
      GPUSHARE_ASSIGN_OR_RETURN(const std::string text, sim::read_text(devices));
      GPUSHARE_ASSIGN_OR_RETURN(const cluster::Json list,
                                cluster::parse_document("{\"devices\": " + text + "}"));
      base::Status error;
      cluster::Fields fields(list, &error);
      input.devices = cluster::read_devices(fields);
      if (!error.ok()) return error.with_context(devices);
    }
    sim::TrainingFileOptions options;
    options.table = table;
    if (!limit_.empty()) {
      GPUSHARE_ASSIGN_OR_RETURN(options.limit, parse_count("--limit", limit_, cluster::kMaxElements));
    }
    if (!load_.empty()) {
      GPUSHARE_ASSIGN_OR_RETURN(options.load, parse_number("--load", load_, 0, false, 10));
    }
    GPUSHARE_ASSIGN_OR_RETURN(input.jobs, sim::read_training_jobs(jobs_, input.devices.size(), options));
    return {};
  }

  base::Status write_timeline(const sim::TrainingDocument& input, const sim::ClusterResult& result,
                              const std::string& scheduler) const {
    GPUSHARE_ASSIGN_OR_RETURN(base::TraceWriter writer, base::TraceWriter::open(timeline_));
    const auto group = writer.add_group(scheduler + ", simulated devices");
    // Jobs beside each other on a device get a row each.
    struct Row {
      base::TraceWriter::Track track;
      double free_from_s;
    };
    std::vector<std::vector<Row>> rows(input.devices.size());
    std::vector<sim::ClusterSpan> spans = result.spans;
    std::stable_sort(spans.begin(), spans.end(),
                     [](const auto& a, const auto& b) { return a.begin_s < b.begin_s; });
    for (const sim::ClusterSpan& span : spans) {
      std::vector<Row>& here = rows[span.device];
      auto row =
          std::find_if(here.begin(), here.end(), [&](const Row& r) { return r.free_from_s <= span.begin_s; });
      if (row == here.end()) {
        const std::string name = "device " + input.devices[span.device].id +
                                 (here.empty() ? "" : base::format(", job %zu", here.size() + 1));
        row = here.insert(here.end(), {writer.add_track(group, name), 0});
      }
      row->free_from_s = span.end_s;
      writer.slice(row->track, input.jobs.jobs[span.job].name, base::to_uint64(span.begin_s * 1e9),
                   base::to_uint64((span.end_s - span.begin_s) * 1e9), {});
    }
    return writer.close();
  }

  std::string file_, jobs_, devices_, memory_, device_ = "sim", schedulers_, interference_, limit_, load_,
                                               noise_, restart_, seed_ = "1";
  std::string timeline_;
  JsonOption json_;
};

}  // namespace

std::unique_ptr<Command> make_cluster_run_command() {
  return std::make_unique<ClusterRunCommand>();
}

}  // namespace gpushare::cli
