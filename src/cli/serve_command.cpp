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

base::Result<std::vector<double>> parse_numbers(const char* option, const std::string& text, double high) {
  std::vector<double> out;
  for (const std::string& word : split_list(text)) {
    GPUSHARE_ASSIGN_OR_RETURN(const double value, parse_number(option, word, 0, false, high));
    out.push_back(value);
  }
  return out;
}

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
nexus-cycle, clockwork, clockwork-single, orloj, orloj-own, and clairvoyant and clairvoyant-edf, which are told every
execution time. Before it starts a policy is told up to --warm-samples execution times of each application, spread over
all requests or over the first --warm-from of them; 0 samples: it starts from nothing.

Devices: 'sim' is virtual time. 'host' submits from four threads in real time to a request queue; every batch is an
iteration on the host device, arithmetic for as long as it takes, times --time-scale.

Examples:
  gpushare serve --synthetic modes:3 --load 3 --limit 1000
  gpushare serve --synthetic bimodal:1 --policy clockwork,gpushare --slo-x-p99 2,3 --load 1,4 --limit 500 --json -
  gpushare serve --synthetic static:50 --limit 200 --report serving.html
  gpushare serve --synthetic modes:2 --device host --time-scale 0.02 --limit 100 --slo-x-p99 3

JSON: device, label ('sim' or 'host'), source, c0_ms, c1, and cases[] {case, slo_x_p99, load, policy, requests,
finished_in_time, finish_rate, p50_ms, p99_ms, dropped {expired, hopeless, rejected, queue_full, cancelled},
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
    app.add_option("--policy", policy_, "Policies, each run in turn [clipper,nexus,clockwork,orloj,gpushare]")
        ->type_name("A,B,..");
    app.add_option("--slo-x-p99", slo_, "Deadlines as multiples of the P99 execution time [1.5,2,3,4,5]")
        ->type_name("X,..");
    app.add_option("--load", load_, "Arrival rate x mean execution time [1; a file's own]")
        ->type_name("X,..");
    app.add_option("--device", result_.device, "sim or host [sim]")->type_name("NAME");
    app.add_option("--c0-x-mean", c0_, "c0 over the mean execution time [0.9]")->type_name("X");
    app.add_option("--c1", c1_, "c1 [0.1]")->type_name("X");
    app.add_option("--limit", limit_, "Only so many requests; 0 = 4000 if drawn, else all of the file [0]")
        ->type_name("N");
    app.add_option("--seed", seed_, "Of what is drawn; the same seed draws the same [1]")->type_name("N");
    app.add_option("--burstiness", burstiness_, "Drawn arrivals: variation of the rate; 0 = Poisson [0]")
        ->type_name("X");
    app.add_option("--prefill-ms", prefill_ms_, "Public layout: ms a context token [0.25]")->type_name("X");
    app.add_option("--decode-ms", decode_ms_, "Public layout: ms a generated token [20]")->type_name("X");
    app.add_option(
           "--opportunity", opportunity_,
           "gpushare: price of device time as a share of recent goodput, with several applications [0.7]")
        ->type_name("X");
    app.add_option("--hold", hold_,
                   "gpushare: least share of its time's worth that a doubtful batch must win [0.4]")
        ->type_name("X");
    app.add_option("--labels", labels_,
                   "on: policies see each request's application; off: all are of one [on]")
        ->type_name("on|off");
    app.add_option("--features", features_, "on: policies see the numbers that come with each request [off]")
        ->type_name("on|off");
    app.add_option("--warm-samples", warm_samples_,
                   "Execution times told beforehand for each application [256]")
        ->type_name("N");
    app.add_option("--warm-from", warm_from_, "They come from the first so many requests; 0 = from all [0]")
        ->type_name("N");
    app.add_option("--max-pending", max_pending_, "Requests that may wait; further ones are refused [100000]")
        ->type_name("N");
    app.add_option("--time-scale", time_scale_, "host: all durations times this [1]")->type_name("X");
    app.add_option("--work", work_,
                   "host: 'arithmetic', or 'wait' for as long, as for a device elsewhere [arithmetic]")
        ->type_name("KIND");
    json_.declare(app);
    app.add_option("--report", report_, "Write a page with charts")->type_name("FILE.html");
  }

  base::Result<ExitCode> run() override {
    GPUSHARE_RETURN_IF_ERROR(check_options());
    std::vector<sim::TimedRequest> recorded;
    std::optional<sim::SyntheticSpec> spec;
    double mean_ns = 0;
    if (!synthetic_.empty()) {
      GPUSHARE_ASSIGN_OR_RETURN(spec, sim::parse_synthetic(synthetic_));
      mean_ns = sim::mean_execution_ns(*spec);
    } else {
      GPUSHARE_ASSIGN_OR_RETURN(recorded, sim::read_requests(requests_, rule_));
      if (limit_count_ != 0 && recorded.size() > limit_count_) recorded.resize(limit_count_);
      if (recorded.empty())
        return base::Status(GPUSHARE_MALFORMED_INPUT, requests_ + ": no requests after the header line");
      if (!load_.empty() && recorded.front().arrival_ns == recorded.back().arrival_ns)
        return base::Status(GPUSHARE_INVALID_ARGUMENT, "--load: all requests of '" + requests_ +
                                                           "' arrive at once: no load can be made of them");
      for (const sim::TimedRequest& request : recorded)
        mean_ns += static_cast<double>(request.execution_ns) / static_cast<double>(recorded.size());
    }
    sim::ServingOptions options;
    options.c0_ns = c0_x_mean_ * mean_ns;
    options.c1 = result_.c1;
    options.time_decisions = true;
    options.labels = labels_ == "on";
    options.features = features_ == "on";
    options.warm_samples = warm_sample_count_;
    options.warm_from = warm_from_count_;
    options.batcher = batcher_;
    result_.c0_ms = options.c0_ns / 1e6;
    result_.source = synthetic_.empty() ? requests_ : synthetic_;

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
          const auto served = result_.device == "host" ? serve_on_host(requests, policy, options,
                                                                       time_factor_, work_ == "arithmetic")
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
    if (work_ != "arithmetic" && work_ != "wait")
      return bad_option("--work", work_, "there are arithmetic and wait");
    if (result_.device == "sim" && (work_ != "arithmetic" || time_scale_ != "1"))
      return {GPUSHARE_INVALID_ARGUMENT, "--work, --time-scale: only for --device host"};
    GPUSHARE_ASSIGN_OR_RETURN(c0_x_mean_, parse_number("--c0-x-mean", c0_, 0, true, 1e6));
    GPUSHARE_ASSIGN_OR_RETURN(result_.c1, parse_number("--c1", c1_, 0, false, 1e6));
    GPUSHARE_ASSIGN_OR_RETURN(draw_.burstiness, parse_number("--burstiness", burstiness_, 0, true, 10));
    GPUSHARE_ASSIGN_OR_RETURN(draw_.seed, parse_count("--seed", seed_, UINT64_MAX));
    GPUSHARE_ASSIGN_OR_RETURN(limit_count_, parse_count("--limit", limit_, 100'000'000));
    if (labels_ != "on" && labels_ != "off") return bad_option("--labels", labels_, "there are on and off");
    if (features_ != "on" && features_ != "off")
      return bad_option("--features", features_, "there are on and off");
    GPUSHARE_ASSIGN_OR_RETURN(batcher_.opportunity,
                              parse_number("--opportunity", opportunity_, 0, true, 1e3));
    GPUSHARE_ASSIGN_OR_RETURN(batcher_.hold, parse_number("--hold", hold_, 0, true, 1e3));
    GPUSHARE_ASSIGN_OR_RETURN(warm_sample_count_, parse_count("--warm-samples", warm_samples_, 1 << 20));
    GPUSHARE_ASSIGN_OR_RETURN(warm_from_count_, parse_count("--warm-from", warm_from_, UINT64_MAX));
    GPUSHARE_ASSIGN_OR_RETURN(batcher_.max_pending, parse_count("--max-pending", max_pending_, 100'000'000));
    draw_.requests = limit_count_ == 0 ? 4000 : limit_count_;
    GPUSHARE_ASSIGN_OR_RETURN(time_factor_, parse_number("--time-scale", time_scale_, 0, false, 1000));
    GPUSHARE_ASSIGN_OR_RETURN(rule_.prefill_ms_per_token,
                              parse_number("--prefill-ms", prefill_ms_, 0, true, 1e4));
    GPUSHARE_ASSIGN_OR_RETURN(rule_.decode_ms_per_token,
                              parse_number("--decode-ms", decode_ms_, 0, true, 1e4));
    GPUSHARE_ASSIGN_OR_RETURN(result_.slos_x_p99, parse_numbers("--slo-x-p99", slo_, 1e6));
    if (synthetic_.empty() && (burstiness_ != "0" || seed_ != "1"))
      return {GPUSHARE_INVALID_ARGUMENT, "--seed, --burstiness: only for --synthetic"};
    if (requests_.empty() && (prefill_ms_ != "0.25" || decode_ms_ != "20"))
      return {GPUSHARE_INVALID_ARGUMENT, "--prefill-ms, --decode-ms: only for --requests"};
    result_.loads = {synthetic_.empty() ? 0.0 : 1.0};
    if (!load_.empty()) {
      GPUSHARE_ASSIGN_OR_RETURN(result_.loads, parse_numbers("--load", load_, 1e6));
    }
    GPUSHARE_ASSIGN_OR_RETURN(result_.policies,
                              parse_names("--policy", policy_, sched::slo::batcher_names()));
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

  // As typed.
  std::string requests_;
  std::string synthetic_;
  std::string policy_ = "clipper,nexus,clockwork,orloj,gpushare";
  std::string slo_ = "1.5,2,3,4,5";
  std::string load_;
  std::string c0_ = "0.9";
  std::string c1_ = "0.1";
  std::string limit_ = "0";
  std::string seed_ = "1";
  std::string burstiness_ = "0";
  std::string prefill_ms_ = "0.25";
  std::string decode_ms_ = "20";
  std::string time_scale_ = "1";
  std::string work_ = "arithmetic";
  std::string opportunity_ = "0.7";
  std::string hold_ = "0.4";
  std::string labels_ = "on";
  std::string features_ = "off";
  std::string warm_samples_ = "256";
  std::string warm_from_ = "0";
  std::string max_pending_ = "100000";
  std::string report_;
  JsonOption json_;
  // As understood.
  ServeResult result_;
  sim::ArrivalOptions draw_;
  sim::TokenRule rule_;
  double c0_x_mean_ = 0;
  double time_factor_ = 1;
  uint64_t limit_count_ = 0;
  uint64_t warm_sample_count_ = 0;
  uint64_t warm_from_count_ = 0;
  sched::slo::BatcherOptions batcher_;
};

}  // namespace

std::unique_ptr<Command> make_serve_command() {
  return std::make_unique<ServeCommand>();
}

}  // namespace gpushare::cli
