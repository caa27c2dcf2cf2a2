// `gpushare cluster run`: a document, or a file of training jobs, played on several simulated devices under several schedulers.
// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>
#include <optional>

#include "base/clock.hpp"
#include "base/saturate.hpp"
#include "base/trace_writer.hpp"
#include "cli/cluster_command.hpp"
#include "cli/cluster_host_run.hpp"
#include "cli/cluster_host_shares.hpp"
#include "cli/cluster_report.hpp"
#include "cli/interrupt.hpp"
#include "cli/options.hpp"
#include "cli/output.hpp"
#include "cli/progress.hpp"
#include "cluster/json.hpp"
#include "cluster/plan.hpp"
#include "sim/cluster_training.hpp"
#include "sim/csv.hpp"

namespace gpushare::cli {
namespace {

constexpr double kMostTrainingNoise = 0.99;

class ClusterRunCommand final : public Command {
 public:
  ClusterRunCommand() {
    help_ =
        "Plays a document of any kind with noise, or with --jobs a file of training jobs: one of "
        "docs/cli-play.md, run, which may\n"
        "have a column gang, or a published trace: Philly, Helios, Alibaba PAI, Gavel, Muri. Kinds and their "
        "schedulers (the default "
        "first):\n";
    for (const cluster::Kind* kind : sim::all_cluster_kinds()) help_ += schedulers_line(*kind);
    help_ +=
        "\n"
        "Examples:\n"
        "  gpushare cluster run examples/cluster/training.json --scheduler fifo,srtf,gpushare\n"
        "  gpushare cluster run examples/cluster/shares.json --objective sw --noise 0.1 --scheduler "
        "cilantro,oracle\n"
        "  gpushare cluster run --jobs examples/jobs/mixed.csv --devices 2 --json -\n"
        "\n"
        "JSON: version, kind, seed, results[] {scheduler, solve_ms, the fields of the kind}; "
        "docs/cli-cluster.md has "
        "them.\n"
        "Of training also device, devices, layout, notes.\n"
        "\n"
        "Exit codes: 0 ok; 1 an output could not be written; 2 bad usage or a bad file.\n";
  }
  const char* name() const override { return "run"; }
  const char* summary() const override {
    return "Play a document or a file of jobs through under several schedulers";
  }
  const char* help() const override { return help_.c_str(); }
  void declare(CLI::App& app) override {
    app.add_option("FILE", file_, "Document of any kind, JSON; or --jobs")->type_name("FILE.json");
    app.add_option("--jobs", jobs_, "Job file in place of a document")->type_name("FILE.csv");
    app.add_option("--devices", devices_, "With --jobs: how many equal devices, or a JSON list of them [1]")
        ->type_name("N|FILE");
    add(app, "--memory", &memory_bytes_, parse_size, "SIZE", "With --devices N: memory of each [16GiB]");
    add(app, "--device", &device_, one_of({"sim", "host"}), "SPEC",
        "What they are: sim, on virtual time; host, real work of training jobs, trials or shares [sim]");
    app.add_option("--scheduler", schedulers_, "Who decides, separated by commas [the kind's default]")
        ->type_name("NAMES");
    app.add_option("--objective", objective_, "For kind shares: what is maximised: sw, ew or njc [njc]")
        ->type_name("NAME");
    app.add_option("--interference", interference_,
                   "Measured pairs, as published with Gavel; others as demands say")
        ->type_name("FILE");
    app.add_option("--known", known_, "Training: measured pairs that schedulers are told beforehand")
        ->type_name("FILE");
    add(app, "--limit", &limit_, count(cluster::kMaxElements), "N",
        "With --jobs: only the first jobs of the file [0: all]");
    add(app, "--load", &load_, number(0, false, 10), "X",
        "With --jobs of Gavel's layout: work offered over what the devices do [0.95]");
    add(app, "--guaranteed", &guaranteed_, number(0, true, 1), "X",
        "With --jobs of a layout without classes: part of the jobs that is guaranteed, drawn by "
        "the seed [0]");
    add(app, "--noise", &noise_, number(0, true, 10), "X",
        "Relative standard deviation of what schedulers are told or see; docs/cli-cluster.md has of what "
        "[the document's]");
    add(app, "--rounds", &rounds_, count(1'000'000, 1), "N",
        "For kinds shares and application: how many [the document's]");
    add(app, "--restart-s", &restart_s_, number(0, true, 1e9), "S",
        "For training: work that a paused job repeats, seconds [0]");
    add(app, "--tell", &tell_, one_of({"demands", "nothing"}), "WHAT",
        "On host: demands, or nothing: schedulers are not told the jobs' demands [demands]");
    add(app, "--seed", &seed_, count(UINT64_MAX), "N", "Of the noise [1]");
    json_.declare(app);
    app.add_option("--report", report_, "Write a page with tables and pictures")->type_name("FILE.html");
    app.add_option("--timeline", timeline_,
                   "What ran where under the last scheduler: a Chrome trace, opens in Perfetto")
        ->type_name("FILE");
  }

  base::Result<ExitCode> run() override {
    if (file_.empty() == jobs_.empty())
      return base::Status(GPUSHARE_INVALID_ARGUMENT, "give a document, or a job file by --jobs");
    const bool host = device_ == "host";
    if (!host && tell_ != "demands") return bad_option("--tell", tell_, "it goes with --device host");
    if (host && (noise_ || restart_s_ || !interference_.empty()))
      return base::Status(
          GPUSHARE_INVALID_ARGUMENT,
          "--noise, --restart-s and --interference are for --device sim: on host they are real");
    if (jobs_.empty() && (!devices_.empty() || memory_bytes_ || limit_ || load_ || guaranteed_))
      return base::Status(GPUSHARE_INVALID_ARGUMENT,
                          "--devices, --memory, --limit, --load and --guaranteed go with --jobs; a document "
                          "has its own devices and classes");
    if (jobs_.empty()) {
      GPUSHARE_RETURN_IF_ERROR(
          check_files({{"FILE", file_}, {"--interference", interference_}, {"--known", known_}},
                      {json_.file(), {"--report", report_}, {"--timeline", timeline_}}));
      GPUSHARE_ASSIGN_OR_RETURN(const std::string text, sim::read_text(file_, uint64_t{1} << 30));
      const std::string kind = kind_of(text);
      if (kind != "training") {
        if (host && kind != "shares" && kind != "trials")
          return bad_option("--device", device_,
                            "on host run training jobs, trials and shares; other kinds have sim");
        if (host && tell_ != "demands") return bad_option("--tell", tell_, "it is for training jobs");
        return play(text, kind);
      }
    }
    if (!objective_.empty() || rounds_)
      return base::Status(GPUSHARE_INVALID_ARGUMENT,
                          "--objective is for documents of kind shares, --rounds for shares and application");
    std::vector<std::string> schedulers = {"gpushare"};
    cluster::OrderedJson errors = cluster::OrderedJson::array();
    if (!schedulers_.empty()) {
      GPUSHARE_ASSIGN_OR_RETURN(schedulers, known_schedulers(errors));
    }
    sim::ClusterOptions options;
    options.seed = seed_;
    sim::InterferenceTable table;
    if (!interference_.empty()) {
      GPUSHARE_ASSIGN_OR_RETURN(table, sim::InterferenceTable::read(interference_));
      options.table = &table;
    }
    std::optional<sim::InterferenceTable> known;
    if (!known_.empty()) {
      GPUSHARE_ASSIGN_OR_RETURN(known, sim::InterferenceTable::read(known_));
    }
    if (!jobs_.empty())
      GPUSHARE_RETURN_IF_ERROR(
          check_files({{"--jobs", jobs_}, {"--interference", interference_}, {"--known", known_}},
                      {json_.file(), {"--report", report_}, {"--timeline", timeline_}}));
    sim::TrainingDocument input;
    GPUSHARE_RETURN_IF_ERROR(read(options.table, input));
    options.noise = noise_.value_or(input.noise);
    if (options.noise > kMostTrainingNoise)
      return bad_option("--noise", base::format("%g", options.noise),
                        base::format("training takes at most %g", kMostTrainingNoise));
    options.restart_s = restart_s_.value_or(input.restart_s);
    const std::vector<cluster::JobInfo>& jobs = input.jobs.jobs;
    cluster::OrderedJson results = cluster::OrderedJson::array();
    const bool wants_spans = !(timeline_.empty() && report_.empty());
    std::vector<cluster::PlaySpan> spans;
    ProgressLine progress;
    const InterruptScope interrupts;
    for (size_t i = 0; i < schedulers.size(); ++i) {
      options.progress = [&](double now_s, size_t finished, size_t count) {
        if (progress.due())
          progress.show(
              base::format("%s: %zu of %zu jobs, %.0f s", schedulers[i].c_str(), finished, count, now_s));
        return !InterruptScope::interrupted();
      };
      const std::unique_ptr<cluster::Scheduler> scheduler = cluster::make_training_scheduler(schedulers[i]);
      if (known) sim::tell_known_pairs(*known, *scheduler);
      const uint64_t begin_ns = base::host_now_ns();
      const bool spanned = wants_spans && i + 1 == schedulers.size();
      std::vector<std::string> measured;
      GPUSHARE_ASSIGN_OR_RETURN(
          const sim::ClusterResult result,
          host ? run_cluster_on_host(jobs, input.devices, *scheduler,
                                     {options.progress, spanned, tell_ == "demands"}, measured)
               : sim::run_cluster(jobs, input.devices, *scheduler, options, spanned,
                                  [] { return base::host_now_ns(); }));
      if (i == 0) input.jobs.notes.insert(input.jobs.notes.end(), measured.begin(), measured.end());
      cluster::OrderedJson entry =
          cluster::object({{"scheduler", schedulers[i]},
                           {"solve_ms", static_cast<double>(base::host_now_ns() - begin_ns) / 1e6}});
      sim::write_result(jobs, result, entry);
      entry["decision_p99_ms"] = result.decision_ms_p99;
      results.push_back(std::move(entry));
      for (const sim::ClusterSpan& span : result.spans)
        spans.push_back(
            {"device " + input.devices[span.device].id, jobs[span.job].name, span.begin_s, span.end_s});
    }
    progress.clear();
    if (host)
      input.jobs.notes.emplace_back(
          "real work: a runtime for each device, a session for each job on each of its devices; times are "
          "those of this machine, whose cores "
          "and caches the devices share");
    cluster::OrderedJson document = cluster::object({{"version", 1},
                                                     {"kind", "training"},
                                                     {"device", device_},
                                                     {"devices", input.devices.size()},
                                                     {"layout", input.jobs.layout},
                                                     {"seed", options.seed},
                                                     {"results", std::move(results)},
                                                     {"notes", input.jobs.notes}});
    if (!errors.empty()) document["errors"] = std::move(errors);
    if (!report_.empty())
      GPUSHARE_RETURN_IF_ERROR(write_file(report_, render_cluster_report(document, spans)));
    if (!timeline_.empty()) GPUSHARE_RETURN_IF_ERROR(write_timeline(std::move(spans), schedulers.back()));
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
    const std::string devices = devices_.empty() ? "1" : devices_;
    if (devices.find_first_not_of("0123456789") == std::string::npos) {
      GPUSHARE_ASSIGN_OR_RETURN(const uint64_t count,
                                parse_count("--devices", devices, cluster::kMaxElements, 1));
      input.devices.resize(count);
      for (size_t d = 0; d < count; ++d) {
        input.devices[d].id = std::to_string(d);
        input.devices[d].memory_bytes = memory_bytes_.value_or(cluster::kDefaultMemoryBytes);
      }
    } else {
      GPUSHARE_ASSIGN_OR_RETURN(const std::string text, sim::read_text(devices));
      GPUSHARE_ASSIGN_OR_RETURN(const cluster::Json list,
                                cluster::parse_document("{\"devices\": " + text + "}"));
      base::Status error;
      cluster::Fields fields(list, &error);
      input.devices = cluster::read_devices(fields, true);
      if (!error.ok()) return error.with_context(devices);
    }
    sim::TrainingFileOptions options;
    options.table = table;
    options.limit = limit_.value_or(options.limit);
    options.seed = seed_;
    options.guaranteed = guaranteed_.value_or(options.guaranteed);
    options.load = load_.value_or(options.load);
    GPUSHARE_ASSIGN_OR_RETURN(input.jobs, sim::read_training_jobs(jobs_, input.devices.size(), options));
    return {};
  }

  // Left to the reader of the document to refuse if it is none.
  static std::string kind_of(const std::string& text) {
    const base::Result<cluster::Json> document = cluster::parse_document(text);
    if (!document.ok() || !document->is_object()) return "";
    const cluster::Json kind = document->value("kind", cluster::Json());
    return kind.is_string() ? kind.get<std::string>() : "";
  }

  static std::string schedulers_line(const cluster::Kind& kind) {
    std::string line = base::format("  %-11s ", kind.name), names;
    const auto add = [&](const char* name) { names += (names.empty() ? "" : ", ") + std::string(name); };
    for (const char* name : kind.run_defaults) add(name);
    for (const char* name : kind.run_choices)
      if (std::find(kind.run_defaults.begin(), kind.run_defaults.end(), std::string_view(name)) ==
          kind.run_defaults.end())
        add(name);
    return line + names + "\n";
  }

  // The names of --scheduler that are schedulers. Any other name goes to `errors`, if there is a scheduler.
  base::Result<std::vector<std::string>> known_schedulers(cluster::OrderedJson& errors) const {
    std::vector<std::string> known;
    for (const std::string& name : split_list(schedulers_))
      if (std::find(std::begin(cluster::kTrainingSchedulers), std::end(cluster::kTrainingSchedulers), name) !=
          std::end(cluster::kTrainingSchedulers))
        known.push_back(name);
    if (known.empty()) return parse_names("--scheduler", schedulers_, cluster::kTrainingSchedulers);
    std::string kept;
    for (const std::string& name : split_list(schedulers_)) {
      const base::Result<std::vector<std::string>> one =
          parse_names("--scheduler", name, cluster::kTrainingSchedulers);
      if (!one.ok())
        errors.push_back(cluster::object({{"scheduler", name}, {"error", one.status().message()}}));
      else
        kept += (kept.empty() ? "" : ",") + name;
    }
    return parse_names("--scheduler", kept, cluster::kTrainingSchedulers);
  }

  static base::Result<cluster::RealRun> run_trials(const std::vector<cluster::JobInfo>& jobs,
                                                   const std::vector<cluster::Device>& devices,
                                                   cluster::Scheduler& scheduler,
                                                   std::vector<std::string>& notes) {
    ClusterHostOptions options;
    options.progress = [](double, size_t, size_t) { return !InterruptScope::interrupted(); };
    options.want_spans = true;
    notes.clear();  // each scheduler's are the same
    GPUSHARE_ASSIGN_OR_RETURN(const sim::ClusterResult ran,
                              run_cluster_on_host(jobs, devices, scheduler, options, notes));
    cluster::RealRun run;
    run.utilization = ran.utilization;
    for (const sim::ClusterJobResult& job : ran.jobs) {
      run.end_s.push_back(job.end_s);
      run.pauses += job.pauses;
    }
    for (const sim::ClusterSpan& span : ran.spans)
      run.spans.push_back(
          {"device " + devices[span.device].id, jobs[span.job].name, span.begin_s, span.end_s});
    return run;
  }

  // Documents of the kinds other than training.
  base::Result<ExitCode> play(const std::string& text, const std::string& kind) {
    if (!interference_.empty() || !known_.empty() || restart_s_)
      return base::Status(GPUSHARE_INVALID_ARGUMENT,
                          "--interference, --known and --restart-s are for training jobs");
    cluster::PlanOptions options;
    if (!schedulers_.empty()) options.schedulers = split_list(schedulers_);
    options.now_ns = [] { return base::host_now_ns(); };
    ProgressLine progress;
    options.progress = [&](const std::string& choice, size_t index, size_t count) {
      if (progress.due()) progress.show(base::format("%s (%zu of %zu)", choice.c_str(), index + 1, count));
    };
    cluster::PlayOptions play;
    play.objective = objective_;
    play.seed = seed_;
    play.noise = noise_;
    play.rounds = rounds_;
    const bool host = device_ == "host";
    std::optional<InterruptScope> interrupts;
    std::vector<std::string> notes;
    if (host) {
      interrupts.emplace();
      if (options.schedulers.empty() && kind == "shares")
        options.schedulers = {"gpushare", "cilantro", "fair"};
      play.real_trials = [&notes](const auto& jobs, const auto& devices, cluster::Scheduler& scheduler) {
        return run_trials(jobs, devices, scheduler, notes);
      };
      play.real_jobs = [](const cluster::shares::RoundsProblem& problem) {
        return make_host_shares(problem, [] { return !InterruptScope::interrupted(); });
      };
    }
    std::vector<cluster::PlaySpan> spans;
    base::Result<cluster::OrderedJson> result =
        cluster::run(text, options, play, sim::all_cluster_kinds(),
                     timeline_.empty() && report_.empty() ? nullptr : &spans);
    progress.clear();
    if (host && InterruptScope::interrupted())
      return base::Status(GPUSHARE_CANCELLED, "the run was cancelled");
    if (!result.ok()) {
      const bool malformed = result.status().code() == GPUSHARE_MALFORMED_INPUT;
      return malformed ? result.status().with_context(file_) : result.status();
    }
    if (host) (*result)["device"] = device_;
    if (!notes.empty()) (*result)["notes"] = notes;
    if (!report_.empty())
      GPUSHARE_RETURN_IF_ERROR(write_file(report_, render_cluster_report(*result, spans)));
    if (!timeline_.empty())
      GPUSHARE_RETURN_IF_ERROR(write_timeline(std::move(spans), (*result)["results"].back()["scheduler"]));
    GPUSHARE_RETURN_IF_ERROR(json_.write(*result));
    if (!json_.on_stdout()) {
      for (auto& entry : (*result)["results"]) entry.erase("series");  // for pictures; JSON has it
      GPUSHARE_RETURN_IF_ERROR(write_stdout(render_cluster_result(*result)));
    }
    return kExitOk;
  }

  base::Status write_timeline(std::vector<cluster::PlaySpan> spans, const std::string& scheduler) const {
    GPUSHARE_ASSIGN_OR_RETURN(base::TraceWriter writer, base::TraceWriter::open(timeline_));
    const auto group = writer.add_group(scheduler + (device_ == "host" ? ", measured" : ", simulated"));
    // Spans that overlap on a row get a track each.
    struct Track {
      base::TraceWriter::Track track;
      double free_from_s;
    };
    std::map<std::string, std::vector<Track>> rows;
    std::stable_sort(spans.begin(), spans.end(),
                     [](const auto& a, const auto& b) { return a.begin_s < b.begin_s; });
    for (const cluster::PlaySpan& span : spans) {
      std::vector<Track>& here = rows[span.row];
      auto track = std::find_if(here.begin(), here.end(),
                                [&](const Track& t) { return t.free_from_s <= span.begin_s; });
      if (track == here.end()) {
        const std::string name = span.row + (here.empty() ? "" : base::format(", %zu", here.size() + 1));
        track = here.insert(here.end(), {writer.add_track(group, name), 0});
      }
      track->free_from_s = span.end_s;
      writer.slice(track->track, span.name, base::to_uint64(span.begin_s * 1e9),
                   base::to_uint64((span.end_s - span.begin_s) * 1e9), {});
    }
    return writer.close();
  }

  std::string tell_ = "demands", help_, objective_, report_, timeline_;
  std::string file_, jobs_, devices_, device_ = "sim", schedulers_, interference_, known_;
  std::optional<uint64_t> memory_bytes_, limit_, rounds_;
  std::optional<double> load_, guaranteed_, noise_, restart_s_;
  uint64_t seed_ = 1;
  JsonOption json_;
};

}  // namespace

std::unique_ptr<Command> make_cluster_run_command() {
  return std::make_unique<ClusterRunCommand>();
}

}  // namespace gpushare::cli
