// `gpushare serve`: requests with deadlines under one serving policy after another.
// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/saturate.hpp"
#include "base/units.hpp"
#include "cli/command.hpp"
#include "cli/options.hpp"
#include "cli/output.hpp"
#include "cli/progress.hpp"
#include "cli/serve_host.hpp"
#include "cli/serve_result.hpp"
#include "sched/slo/batcher.hpp"
#include "sim/serving/serving.hpp"

namespace gpushare::cli {
namespace {

class ServeCommand final : public Command {
 public:
  const char* name() const override { return "serve"; }
  const char* summary() const override {
    return "Serve requests with deadlines under several policies, simulated or for real";
  }
  const char* help() const override {
    return R"(Requests come from a CSV file (arrival_s,application,exec_ms[,slo_ms], or the public layout
TIMESTAMP,ContextTokens,GeneratedTokens: exec = context x --prefill-ms + generated x --decode-ms, the application is
the octave of the context length), or are drawn: modes:N (1 to 8 normal modes, an application each), bimodal:SD1[/SD2],
static:MS. The deadline is --slo-x-p99 times the P99 execution time after arrival, unless the file says it. A batch of k
requests takes c0 + c1 x k x the longest execution time in it. The load is the arrival rate times the mean execution
time alone; a file keeps its own arrivals unless --load is given.

Policies: gpushare, fifo, edf, maxdelay, greedy (application means alone), clipper, clipper-mean, clipper-aimd, nexus,
nexus-earliest, nexus-cycle, clockwork, clockwork-single, orloj, orloj-own, and clairvoyant and clairvoyant-edf,
which are told every execution time. Before it starts a policy is told up to --warm-samples execution times of each
application, spread over all requests or over the first --warm-from of them; 0 samples: it starts from nothing.

Devices: 'sim' is virtual time. 'host' submits from four threads in real time to a request queue; every batch is an
iteration on the host device, arithmetic for as long as it takes, times --time-scale.

Examples:
  gpushare serve --synthetic modes:3 --load 3 --limit 1000
  gpushare serve --synthetic bimodal:1 --policy clockwork,gpushare --slo-x-p99 2,3 --load 1,4 --limit 500 --json -
  gpushare serve --synthetic static:50 --limit 200 --report serving.html
  gpushare serve --synthetic modes:2 --device host --time-scale 0.02 --limit 100 --slo-x-p99 3

JSON: version, device, label ('sim' or 'host'), source, c0_ms, c1, and cases[] {case, slo_x_p99, load, policy,
requests, finished_in_time, finish_rate, p50_ms, p99_ms, dropped {expired, hopeless, rejected, queue_full, cancelled},
decision_us, finished_late, goodput_per_s, mean_batch, batches, busy, predicted_miss_rate, price_per_s, batch_sizes
{size: how often}}.

Exit codes: 0 ok; 1 the run failed or a file could not be written; 2 bad usage or a bad file; 3 no such device.
)";
  }

  void declare(CLI::App& app) override {
    auto* requests = app.add_option("--requests", requests_, "Request file (CSV)")->type_name("FILE");
    app.add_option("--synthetic", synthetic_,
                   "Draw requests: modes:N, bimodal:SD1[/SD2], numeric:SD, static:MS")
        ->type_name("SPEC")
        ->excludes(requests);
    add(app, "--policy", &result_.policies, names(sched::slo::batcher_names()), "A,B,..",
        "Policies, each run in turn [clipper,nexus,clockwork,orloj,gpushare]");
    add(app, "--slo-x-p99", &result_.slos_x_p99, numbers(1e6), "X,..",
        "Deadlines as multiples of the P99 execution time [1.5,2,3,4,5]");
    add(app, "--load", &result_.loads, numbers(1e6), "X,..",
        "Arrival rate x mean execution time [1; a file's own]");
    app.add_option("--device", result_.device, "sim or host [sim]")->type_name("NAME");
    add(app, "--c0-x-mean", &c0_x_mean_, number(0, true, 1e6), "X", "c0 over the mean execution time [0.9]");
    add(app, "--c1", &result_.c1, number(0, false, 1e6), "X", "c1 [0.1]");
    add(app, "--limit", &limit_, count(100'000'000), "N",
        "Only so many requests; 0 = 4000 if drawn, else all of the file [0]");
    add(app, "--seed", &draw_.seed, count(UINT64_MAX), "N",
        "Of what is drawn; the same seed draws the same [1]");
    add(app, "--burstiness", &draw_.burstiness, number(0, true, 10), "X",
        "Drawn arrivals: variation of the rate; 0 = Poisson [0]");
    add(app, "--prefill-ms", &rule_.prefill_ms_per_token, number(0, true, 1e4), "X",
        "Public layout: ms a context token [0.25]");
    add(app, "--decode-ms", &rule_.decode_ms_per_token, number(0, true, 1e4), "X",
        "Public layout: ms a generated token [20]");
    add(app, "--opportunity", &options_.batcher.opportunity, number(0, true, 1e3), "X",
        "gpushare: price of device time as a share of recent goodput [1]");
    add(app, "--labels", &labels_, one_of({"on", "off"}), "on|off",
        "on: policies see each request's application; off: all are of one [on]");
    add(app, "--features", &features_, one_of({"on", "off"}), "on|off",
        "on: policies see the numbers that come with each request [off]");
    add(app, "--warm-samples", &options_.warm_samples, count(1 << 20), "N",
        "Execution times told beforehand for each application [256]");
    add(app, "--warm-from", &options_.warm_from, count(UINT64_MAX), "N",
        "They come from the first so many requests; 0 = from all [0]");
    add(app, "--max-pending", &options_.batcher.max_pending, count(100'000'000), "N",
        "Requests that may wait; further ones are refused [100000]");
    add(app, "--time-scale", &time_scale_, number(0, false, 1000), "X", "host: all durations times this [1]");
    add(app, "--work", &work_, one_of({"arithmetic", "wait"}), "KIND",
        "host: 'arithmetic', or 'wait' for as long, as for a device elsewhere [arithmetic]");
    json_.declare(app);
    app.add_option("--report", report_, "Write a page with charts")->type_name("FILE.html");
  }

  base::Result<ExitCode> run() override {
    GPUSHARE_RETURN_IF_ERROR(check_options());
    std::vector<sim::TimedRequest> recorded;
    std::optional<sim::SyntheticSpec> spec;
    double mean_ns = 0;
    std::vector<std::string> notes;
    if (!synthetic_.empty()) {
      GPUSHARE_ASSIGN_OR_RETURN(spec, sim::parse_synthetic(synthetic_));
      mean_ns = sim::mean_execution_ns(*spec);
    } else {
      GPUSHARE_ASSIGN_OR_RETURN(recorded, sim::read_requests(requests_, rule_, &notes));
      if (limit_ != 0 && recorded.size() > limit_) recorded.resize(limit_);
      if (recorded.empty())
        return base::Status(GPUSHARE_MALFORMED_INPUT, requests_ + ": no requests after the header line");
      if (result_.loads.front() > 0 && recorded.front().arrival_ns == recorded.back().arrival_ns)
        return base::Status(GPUSHARE_INVALID_ARGUMENT, "--load: all requests of '" + requests_ +
                                                           "' arrive at once: no load can be made of them");
      for (const sim::TimedRequest& request : recorded)
        mean_ns += static_cast<double>(request.execution_ns) / static_cast<double>(recorded.size());
    }
    sim::ServingOptions& options = options_;
    options.c0_ns = c0_x_mean_ * mean_ns;
    options.c1 = result_.c1;
    options.time_decisions = true;
    options.labels = labels_ == "on";
    options.features = features_ == "on";
    result_.c0_ms = options.c0_ns / 1e6;
    result_.source = synthetic_.empty() ? requests_ : synthetic_;
    for (const std::string& note : notes) result_.source += "; " + note;

    ProgressLine progress;
    for (const double load : result_.loads) {
      std::vector<sim::TimedRequest> requests = recorded;
      if (spec) {
        draw_.rate_per_s = load / (mean_ns / 1e9);
        requests = sim::draw(*spec, draw_);
      } else if (load > 0) {
        stretch(requests, mean_ns, load);
      }
      if (!options.labels)
        for (sim::TimedRequest& request : requests) request.application = 0;
      for (const double slo : result_.slos_x_p99)
        for (const std::string& policy : result_.policies) {
          progress.show(base::format("load %g, SLO %g, %s", load, slo, policy.c_str()));
          options.slo_x_p99 = slo;
          const auto served = result_.device == "host" ? serve_on_host(requests, policy, options, time_scale_,
                                                                       work_ == "arithmetic")
                                                       : sim::serve(requests, policy, options);
          if (!served.ok()) return served.status();
          result_.cases.push_back({slo, load, policy, *served});
        }
    }
    progress.clear();
    if (!report_.empty()) GPUSHARE_RETURN_IF_ERROR(write_file(report_, render_report(result_)));
    GPUSHARE_RETURN_IF_ERROR(json_.write(to_json(result_)));
    if (!json_.on_stdout()) GPUSHARE_RETURN_IF_ERROR(write_stdout(render_table(result_)));
    return kExitOk;
  }

 private:
  base::Status check_options() {
    if (requests_.empty() == synthetic_.empty())
      return {GPUSHARE_INVALID_ARGUMENT, "give --requests FILE or --synthetic SPEC"};
    if (result_.device != "sim" && result_.device != "host")
      return {GPUSHARE_UNAVAILABLE,
              "--device: '" + result_.device + "' cannot serve; there are sim and host"};
    if (result_.device == "sim" && (work_ != "arithmetic" || time_scale_ != 1))
      return {GPUSHARE_INVALID_ARGUMENT, "--work, --time-scale: only for --device host"};
    draw_.requests = limit_ == 0 ? 4000 : limit_;
    const sim::ArrivalOptions arrivals;
    const sim::TokenRule rule;
    if (synthetic_.empty() && (draw_.burstiness != arrivals.burstiness || draw_.seed != arrivals.seed))
      return {GPUSHARE_INVALID_ARGUMENT, "--seed, --burstiness: only for --synthetic"};
    if (requests_.empty() && (rule_.prefill_ms_per_token != rule.prefill_ms_per_token ||
                              rule_.decode_ms_per_token != rule.decode_ms_per_token))
      return {GPUSHARE_INVALID_ARGUMENT, "--prefill-ms, --decode-ms: only for --requests"};
    if (result_.loads.empty()) result_.loads = {synthetic_.empty() ? 0.0 : 1.0};
    return check_files({{"--requests", requests_}}, {json_.file(), {"--report", report_}});
  }

  // Moves recorded arrivals, of two moments at least, so that work comes in at `load` times what one device does.
  static void stretch(std::vector<sim::TimedRequest>& requests, double mean_ns, double load) {
    const uint64_t start = requests.front().arrival_ns;
    const double span = static_cast<double>(requests.back().arrival_ns - start);
    const double scale = mean_ns * static_cast<double>(requests.size()) / load / span;
    for (sim::TimedRequest& request : requests)
      request.arrival_ns = base::to_uint64(static_cast<double>(request.arrival_ns - start) * scale);
  }

  std::string requests_, synthetic_, report_;
  std::string work_ = "arithmetic", labels_ = "on", features_ = "off";
  JsonOption json_;
  ServeResult result_;
  sim::ArrivalOptions draw_;
  sim::TokenRule rule_;
  double c0_x_mean_ = 0.9;
  double time_scale_ = 1;
  uint64_t limit_ = 0;
  sim::ServingOptions options_;
};

}  // namespace

std::unique_ptr<Command> make_serve_command() {
  return std::make_unique<ServeCommand>();
}

}  // namespace gpushare::cli
