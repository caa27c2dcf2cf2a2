// `gpushare run`: a job file under one policy after another, on the simulator or on a real device.
// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/clock.hpp"
#include "base/units.hpp"
#include "cli/command.hpp"
#include "cli/interrupt.hpp"
#include "cli/options.hpp"
#include "cli/output.hpp"
#include "cli/progress.hpp"
#include "cli/report.hpp"
#include "cli/run_options.hpp"
#include "sched/policy.hpp"

namespace gpushare::cli {

std::string policy_path(const std::string& path, const std::string& policy, size_t index) {
  if (index == 0) return path;
  const size_t slash = path.rfind('/');
  const size_t name = slash == std::string::npos ? 0 : slash + 1;
  const size_t dot = path.rfind('.');
  if (dot == std::string::npos || dot <= name) return path + "." + policy;
  return path.substr(0, dot) + "." + policy + path.substr(dot);
}

namespace {

class RunCommand final : public Command {
 public:
  const char* name() const override { return "run"; }
  const char* summary() const override {
    return "Run a file of jobs under several policies, simulated or for real";
  }
  const char* help() const override {
    return R"(Job files are CSV with a header, recognised by it:
  name,class,arrival_s,iterations,iteration_ms,persistent_mb,ephemeral_mb,priority[,weight][,demand][,config][,think_ms]
  name,seconds_alone,peak_mb,iterations      (published with Salus: all arrive at once, in file order)
  model,steps,arrival_s,gpus                 (published with Gavel: arrivals stretched to --load on one device)
class is guaranteed or opportunistic; MB are 10^6 bytes; "205?" is a need that the job does not declare. Published
figures fill in what the public layouts leave out, and the notes below the table say how.

Policies: fifo (one job at a time), srtf (least remaining time first), pack (fill the memory), fair (equal turns),
priority (class, then priority). Each runs the whole file. A policy of your own: /absolute/path/FILE.so that exports
gpushare_policy_entry_v1 (gpushare.h, examples/lottery_policy.c).

Devices: 'sim' runs on virtual time, days in seconds. 'host' runs the jobs for real on CPU threads: every iteration
allocates its memory, touches it, and does arithmetic for as long as the file says, times --time-scale. 'auto' takes
the first GPU, else host. 'gpushare devices' lists what is there.

Examples:
  gpushare run --jobs examples/jobs/mixed.csv
  gpushare run --jobs examples/jobs/mixed.csv --policy fifo,srtf --lanes 1 --json -
  gpushare run --jobs examples/jobs/mixed.csv --timeline run.trace.json --report run.html
  gpushare run --jobs examples/jobs/small.csv --device host --time-scale 0.05

The table has policies as rows; durations share one unit. The timeline opens in ui.perfetto.dev, the snapshot in
pytorch.org/memory_viz (JSON if FILE ends in .json, else pickle), the report in any browser.

JSON: version, device, label ('sim': virtual time; 'host': measured on CPU threads; 'device'), jobs_file,
layout (of that file), capacity_bytes, lanes, seed, time_scale, notes[], and
policies[] {policy, jobs, completed, refused, failed, makespan_s,
jct_mean_s, jct_p50_s, jct_p95_s, queue_mean_s, utilization, switches, peak_bytes, oom, paged_bytes,
most_inside, most_apart_bytes, switch_s, stay_s, simulated_makespan_s, simulated_jct_mean_s, interference[] {name,
beside, iteration_s or slowdown, confidence}, not_completed[] {name, state, reason}}, interrupted, findings[].
jct is the completion time; null: not measured.

Exit codes: 0 all jobs completed; 1 a job was refused or failed, the run was interrupted, or a file could not be
written; 2 bad usage or a bad job file; 3 no such device, or it cannot be used.
)";
  }

  void declare(CLI::App& app) override {
    app.add_option("--jobs", jobs_, "Job file (CSV)")->type_name("FILE")->required();
    app.add_option("--device", options_.device, "sim, host, auto, or a device of 'gpushare devices' [sim]")
        ->type_name("NAME");
    app.add_option(
           "--policy", policy_,
           "Policies, each run in turn: names, or libraries by absolute path [fifo,srtf,pack,fair,priority]")
        ->type_name("A,B,..");
    add(app, "--lanes", &options_.lanes, count(64), "N",
        "Most lanes at once, below the policy's own limit; 0 = that limit [0]");
    add(app, "--lane-finder", &options_.lane_finder, lane_finder, "NAME",
        "Which lane a job joins: salus, balanced or compact [as the policy says, else salus]");
    add(app, "--capacity", &options_.capacity_bytes, parse_size, "SIZE",
        "Device memory: 16GiB, 16GB, ... [sim 16GiB, host 1GiB, GPU all that is free]");
    app.add_option(
           "--interference", interference_,
           "sim: measured pairs (Gavel's JSON), or none: lanes do not slow each other [contention model]; "
           "devices: what was measured, read at the start and written at the end")
        ->type_name("FILE|none");
    add(app, "--tell", &tell_, one_of({"estimates", "measured", "nothing"}), "estimates|measured|nothing",
        "sim: what pack knows of interference: right estimates; what it has measured, as on a device; "
        "or nothing: memory alone decides [estimates]");
    app.add_option("--interference-device", table_device_, "Which device of that file [p100]")
        ->type_name("NAME");
    add(app, "--limit", &limit_, count(1'000'000'000), "N", "Only the first N jobs of the file; 0 = all [0]");
    add(app, "--time-scale", &options_.time_scale, number(0, false, 1e6), "X",
        "Multiplies all times of the job file: arrivals and iterations [1]");
    add(app, "--load", &load_, number(0, false, 10), "X",
        "Only Gavel's layout: total work over the span of arrivals [0.95]");
    add(app, "--jitter", &options_.jitter, number(0, true, 1), "X",
        "sim: relative standard deviation of iteration times, 0 to 1 [0]");
    add(app, "--seed", &options_.seed, count(UINT64_MAX), "N",
        "sim: of the jitter; the same seed gives the same result [1]");
    json_.declare(app);
    app.add_option("--timeline", options_.timeline_path, "Write a Chrome trace of lanes, sessions and memory")
        ->type_name("FILE");
    app.add_option("--snapshot", options_.snapshot_path,
                   "Write the device memory at its peak; with several policies, FILE is the first one's")
        ->type_name("FILE");
    app.add_option("--report", report_, "Write a page with tables and charts")->type_name("FILE.html");
    app.add_option("--per-job", per_job_, "Write one CSV row a policy and job")->type_name("FILE.csv");
  }

  base::Result<ExitCode> run() override {
    GPUSHARE_RETURN_IF_ERROR(check_options());
    std::optional<sim::InterferenceTable> table;
    if (!interference_.empty() && interference_ != "none" && options_.device == "sim") {
      GPUSHARE_ASSIGN_OR_RETURN(table, sim::InterferenceTable::read(interference_, table_device_));
    }
    options_.interference = interference_ != "none";
    options_.tell_policy = tell_ == "estimates";
    sim::JobFileOptions reading;
    reading.limit = limit_;
    reading.load = load_.value_or(0.95);
    reading.table = table ? &*table : nullptr;
    GPUSHARE_ASSIGN_OR_RETURN(sim::JobFile file, sim::read_jobs(jobs_, reading));
    if (load_ && file.layout != "gavel")
      return base::Status(GPUSHARE_INVALID_ARGUMENT,
                          base::format("--load: only for files of the gavel layout; '%s' has the %s layout, "
                                       "whose arrivals are kept",
                                       jobs_.c_str(), file.layout.c_str()));
    scale(file);

    ProgressLine line;
    const InterruptScope interrupts;
    const uint64_t start_ns = base::host_now_ns();
    bool estimated = options_.device == "sim";
    const Progress progress = [&](const std::string& policy, uint64_t done, uint64_t jobs, double now_s) {
      if (!std::exchange(estimated, true)) std::fputs(estimate(file).c_str(), stderr);
      if (line.due())
        line.show(base::format("%s: %llu of %llu jobs done, %s %s%s", policy.c_str(),
                               static_cast<unsigned long long>(done), static_cast<unsigned long long>(jobs),
                               base::format_duration_ns(static_cast<uint64_t>(now_s * 1e9)).c_str(),
                               options_.device == "sim" ? "simulated" : "gone",
                               time_left(policy, done, jobs, base::host_now_ns() - start_ns).c_str()));
      return !InterruptScope::interrupted();
    };
    const base::Result<RunResult> outcome = execute(file, table ? &*table : nullptr, progress);
    line.clear();
    if (!outcome.ok()) return outcome.status();
    RunResult result = *outcome;
    if (result.interrupted) {
      if (result.policies.empty())
        return base::Status(GPUSHARE_CANCELLED, "interrupted before a policy had ended");
      result.notes.insert(result.notes.begin(),
                          base::format("Interrupted: figures are of what was done until then; of %zu "
                                       "policies, %zu were begun or done.",
                                       options_.policies.size(), result.policies.size()));
    }
    result.jobs_file = jobs_;
    result.layout = file.layout;
    result.lanes = options_.lanes;
    result.seed = options_.seed;
    result.time_scale = options_.time_scale;

    if (!report_.empty()) GPUSHARE_RETURN_IF_ERROR(write_file(report_, render_report(result)));
    if (!per_job_.empty()) GPUSHARE_RETURN_IF_ERROR(write_file(per_job_, per_job_csv(result)));
    GPUSHARE_RETURN_IF_ERROR(json_.write(to_json(result)));
    if (!json_.on_stdout()) GPUSHARE_RETURN_IF_ERROR(write_stdout(render_table(result)));
    if (result.interrupted) {
      std::fputs("gpushare run: interrupted; the output is of what was done until then\n", stderr);
      return kExitFailed;
    }
    return verdict(result);
  }

 private:
  // Said before a measured run: it takes real time.
  std::string estimate(const sim::JobFile& file) const {
    double work_ns = 0;
    double last_ns = 0;
    for (const sim::Job& job : file.jobs) {
      work_ns += job.work_ns();
      last_ns = std::max(last_ns, static_cast<double>(job.arrival_ns));
    }
    const auto seconds = [](double ns) { return base::format("%.*f s", ns < 1e10 ? 1 : 0, ns * 1e-9); };
    const auto count = static_cast<double>(options_.policies.size());
    return base::format(
        "gpushare run: %zu %s in real time, about %s in all (%s each: the last job arrives after %s, all "
        "work one job at a "
        "time is %s). Ctrl-C ends it early and prints what there is.\n",
        options_.policies.size(), count > 1 ? "policies" : "policy",
        seconds(count * std::max(work_ns, last_ns)).c_str(), seconds(std::max(work_ns, last_ns)).c_str(),
        seconds(last_ns).c_str(), seconds(work_ns).c_str());
  }

  // ", about 12 s left", from how many jobs of how many policies are done; empty while too few are.
  std::string time_left(const std::string& policy, uint64_t done, uint64_t jobs, uint64_t elapsed_ns) const {
    double before = 0;
    for (const PolicyChoice& choice : options_.policies) {
      if (choice.name == policy) break;
      ++before;
    }
    const double share =
        (before + static_cast<double>(done) / static_cast<double>(std::max<uint64_t>(1, jobs))) /
        static_cast<double>(options_.policies.size());
    if (share < 0.05) return {};
    return base::format(", about %.0f s left",
                        std::ceil(static_cast<double>(elapsed_ns) * 1e-9 * (1 - share) / share));
  }

  base::Result<RunResult> execute(const sim::JobFile& file, const sim::InterferenceTable* table,
                                  const Progress& progress) const {
    if (options_.device == "sim") return run_simulated(options_, file, table, progress);
    return run_measured(options_, file, progress);
  }

  base::Status check_options() {
    GPUSHARE_ASSIGN_OR_RETURN(options_.policies, parse_policies("--policy", policy_));
    if (table_device_ != "p100" && (interference_.empty() || interference_ == "none"))
      return base::Status(GPUSHARE_INVALID_ARGUMENT, "--interference-device: only with --interference FILE");
    options_.measures = tell_ == "measured";
    if (options_.device != "sim") {
      if (tell_ != "estimates")
        return base::Status(GPUSHARE_INVALID_ARGUMENT,
                            "--tell: only for --device sim; on a real device pack measures");
      if (interference_ == "none")
        return bad_option("--interference", interference_,
                          "only for --device sim: lanes of a real device slow each other; name a file for "
                          "what was measured");
      options_.interference_file = interference_;
      if (options_.jitter > 0)
        return base::Status(GPUSHARE_INVALID_ARGUMENT,
                            "--jitter: only for --device sim; a real device has its own");
    }
    return check_files({{"--jobs", jobs_}, {"--interference", options_.device == "sim" ? interference_ : ""}},
                       {json_.file(),
                        {"--interference", options_.interference_file},
                        {"--timeline", options_.timeline_path},
                        {"--snapshot", options_.snapshot_path},
                        {"--report", report_},
                        {"--per-job", per_job_}});
  }

  static base::Result<std::string> lane_finder(const char* option, const std::string& text) {
    const auto finder = sched::lane_finder_named(text);
    return finder.ok() ? base::Result<std::string>(text)
                       : bad_option(option, text, finder.status().message());
  }

  void scale(sim::JobFile& file) const {
    if (options_.time_scale == 1.0) return;
    for (sim::Job& job : file.jobs) {
      job.iteration_ns *= options_.time_scale;
      job.arrival_ns =
          static_cast<uint64_t>(std::min(static_cast<double>(job.arrival_ns) * options_.time_scale, 9e18));
    }
    file.notes.push_back(
        base::format("--time-scale: arrivals and iterations take %g times as long as the file says; the "
                     "durations above are "
                     "not scaled back.",
                     options_.time_scale));
  }

  // Says on stderr what went badly.
  ExitCode verdict(const RunResult& result) const {
    ExitCode code = kExitOk;
    for (const PolicyRun& run : result.policies) {
      const uint64_t lost = run.refused + run.failed;
      if (lost == 0) continue;
      code = kExitFailed;
      const auto first = std::find_if(run.jobs.begin(), run.jobs.end(), [](const JobOutcome& job) {
        return job.state != JobOutcome::State::kCompleted;
      });
      std::fprintf(stderr, "gpushare run: %s: %llu of %zu jobs did not complete; the first, '%s': %s\n",
                   run.policy.c_str(), static_cast<unsigned long long>(lost), run.jobs.size(),
                   first->name.c_str(), first->reason.c_str());
    }
    return code;
  }

  RunOptions options_;
  std::string jobs_;
  std::string policy_ = "fifo,srtf,pack,fair,priority";
  std::string interference_;
  std::string table_device_ = "p100";
  std::string tell_ = "estimates";
  std::string report_;
  std::string per_job_;
  JsonOption json_;
  uint64_t limit_ = 0;
  std::optional<double> load_;
};

}  // namespace

std::unique_ptr<Command> make_run_command() {
  return std::make_unique<RunCommand>();
}

}  // namespace gpushare::cli
