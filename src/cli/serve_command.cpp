// `gpushare serve`: requests with deadlines under one serving policy after another.
// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/units.hpp"
#include "cli/charts.hpp"
#include "cli/command.hpp"
#include "cli/output.hpp"
#include "cli/progress.hpp"
#include "cli/report_style.hpp"
#include "cli/serve_host.hpp"
#include "sched/slo/batcher.hpp"
#include "sim/serving/serving.hpp"

namespace gpushare::cli {
namespace {

struct Case {
  std::string name;
  double slo_x_p99 = 0;
  double load = 0;  // 0: as recorded
  std::string policy;
  sim::ServingResult result;
};

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> out(1);
  for (const char c : text)
    if (c == ',')
      out.emplace_back();
    else
      out.back() += c;
  return out;
}

base::Result<std::vector<double>> parse_list(const char* option, const std::string& text, double high) {
  std::vector<double> out;
  for (const std::string& word : split(text)) {
    const base::Result<double> value = base::parse_double(word);
    if (!value.ok() || !(*value > 0 && *value <= high))
      return base::Status(
          GPUSHARE_INVALID_ARGUMENT,
          base::format("%s: '%s' is not a number above 0, up to %g", option, word.c_str(), high));
    out.push_back(*value);
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
    return "Requests come from a CSV file (arrival_s,application,exec_ms[,slo_ms], or the public layout\n"
           "TIMESTAMP,ContextTokens,GeneratedTokens: exec = context x --prefill-ms + generated x "
           "--decode-ms, the application is\n"
           "the octave of the context length), or are drawn: modes:N (1 to 8 normal modes, an application "
           "each), bimodal:SD1[/SD2],\n"
           "static:MS. The deadline is --slo-x-p99 times the P99 execution time after arrival, unless the "
           "file says it. A batch of k\n"
           "requests takes c0 + c1 x k x the longest execution time in it. The load is the arrival rate "
           "times the mean execution\n"
           "time alone; a file keeps its own arrivals unless --load is given.\n"
           "\n"
           "Policies: fifo, edf, clipper, clipper-aimd, nexus, clockwork, maxdelay, orloj, gpushare, and "
           "clairvoyant and\n"
           "clairvoyant-edf, which are told every execution time.\n"
           "\n"
           "Devices: 'sim' is virtual time. 'host' submits from four threads in real time to a request "
           "queue; every "
           "batch is an\n"
           "iteration on the host device, arithmetic for as long as it takes, times --time-scale.\n"
           "\n"
           "Examples:\n"
           "  gpushare serve --synthetic modes:3 --load 3 --limit 1000\n"
           "  gpushare serve --synthetic bimodal:1 --policy clockwork,gpushare --slo-x-p99 2,3 --load 1,4 "
           "--limit 500 --json -\n"
           "  gpushare serve --synthetic static:50 --limit 200 --report serving.html\n"
           "  gpushare serve --synthetic modes:2 --device host --time-scale 0.02 --limit 100 --slo-x-p99 3\n"
           "\n"
           "JSON: device, label ('sim' or 'host'), source, c0_ms, c1, and cases[] {case, slo_x_p99, load, "
           "policy, requests,\n"
           "finished_in_time, finish_rate, p50_ms, p99_ms, dropped {expired, hopeless, rejected, queue_full, "
           "cancelled},\n"
           "decision_us, finished_late, goodput_per_s, mean_batch, batches, busy, batch_sizes {size: how "
           "often}}.\n"
           "\n"
           "Exit codes: 0 ok; 1 the run failed or a file could not be written; 2 bad usage or a bad file; 3 "
           "no such device.\n";
  }

  void declare(CLI::App& app) override {
    auto* requests = app.add_option("--requests", requests_, "Request file (CSV)")->type_name("FILE");
    app.add_option("--synthetic", synthetic_, "Draw requests: modes:N, bimodal:SD1[/SD2], static:MS")
        ->type_name("SPEC")
        ->excludes(requests);
    app.add_option("--policy", policy_, "Policies, each run in turn [clipper,nexus,clockwork,orloj,gpushare]")
        ->type_name("A,B,..");
    app.add_option("--slo-x-p99", slo_, "Deadlines as multiples of the P99 execution time [1.5,2,3,4,5]")
        ->type_name("X,..");
    app.add_option("--load", load_, "Arrival rate x mean execution time [1; a file's own]")
        ->type_name("X,..");
    app.add_option("--device", device_, "sim or host [sim]")->type_name("NAME");
    app.add_option("--c0-x-mean", c0_, "c0 over the mean execution time [0.9]")->type_name("X");
    app.add_option("--c1", c1_, "c1 [0.1]")->type_name("X");
    app.add_option("--limit", limit_, "So many requests [4000 drawn; all of a file]")->type_name("N");
    app.add_option("--seed", seed_, "Of what is drawn [1]")->type_name("N");
    app.add_option("--burstiness", burst_, "Drawn arrivals: variation of the rate; 0 = Poisson [0]")
        ->type_name("X");
    app.add_option("--prefill-ms", rule_.prefill_ms_per_token, "Public layout: ms a context token [0.25]")
        ->type_name("X");
    app.add_option("--decode-ms", rule_.decode_ms_per_token, "Public layout: ms a generated token [20]")
        ->type_name("X");
    app.add_option("--time-scale", time_scale_, "host: all durations times this [1]")->type_name("X");
    app.add_option("--work", work_,
                   "host: 'arithmetic', or 'wait' for as long, as for a device elsewhere [arithmetic]")
        ->type_name("KIND");
    json_.declare(app);
    app.add_option("--report", report_, "HTML page with charts")->type_name("FILE");
  }

  base::Result<ExitCode> run() override {
    const auto bad = [](const std::string& what) { return base::Status(GPUSHARE_INVALID_ARGUMENT, what); };
    if (requests_.empty() == synthetic_.empty()) return bad("give --requests FILE or --synthetic SPEC");
    if (device_ != "sim" && device_ != "host")
      return base::Status(GPUSHARE_UNAVAILABLE,
                          "--device: '" + device_ + "'; serving runs on 'sim' and 'host'");
    if (!(c0_ >= 0 && c0_ <= 1e6)) return bad("--c0-x-mean: give a number from 0 to 1e6");
    if (!(c1_ > 0 && c1_ <= 1e6)) return bad("--c1: give a number above 0, up to 1e6");
    if (!(burst_ >= 0 && burst_ <= 10)) return bad("--burstiness: give a number from 0 to 10");
    if (work_ != "arithmetic" && work_ != "wait") return bad("--work: give 'arithmetic' or 'wait'");
    if (!(time_scale_ > 0 && time_scale_ <= 1000))
      return bad("--time-scale: give a number above 0, up to 1000");
    if (!(rule_.prefill_ms_per_token >= 0) || !(rule_.decode_ms_per_token >= 0))
      return bad("--prefill-ms, --decode-ms: from 0");
    if (limit_ > 100'000'000) return bad("--limit: at most 100,000,000");
    GPUSHARE_RETURN_IF_ERROR(json_.check());
    if (!report_.empty()) GPUSHARE_RETURN_IF_ERROR(check_writable(report_, "--report"));
    GPUSHARE_ASSIGN_OR_RETURN(const std::vector<double> slos, parse_list("--slo-x-p99", slo_, 1e6));
    std::vector<double> loads{synthetic_.empty() ? 0.0 : 1.0};
    if (!load_.empty()) {
      GPUSHARE_ASSIGN_OR_RETURN(loads, parse_list("--load", load_, 1e6));
    }
    const std::vector<std::string> policies = split(policy_);
    for (const std::string& policy : policies) {
      const auto made = sched::slo::make_batcher(policy);
      if (!made.ok()) return made.status();
    }

    std::vector<sim::TimedRequest> recorded;
    std::optional<sim::SyntheticSpec> spec;
    if (synthetic_.empty()) {
      GPUSHARE_ASSIGN_OR_RETURN(recorded, sim::read_requests(requests_, rule_));
      if (limit_ != 0 && recorded.size() > limit_) recorded.resize(limit_);
      if (recorded.empty()) return base::Status(GPUSHARE_MALFORMED_INPUT, requests_ + ": no requests");
    } else {
      GPUSHARE_ASSIGN_OR_RETURN(spec, sim::parse_synthetic(synthetic_));
    }
    double mean = spec ? sim::mean_execution_ns(*spec) : 0;
    for (const sim::TimedRequest& request : recorded)
      mean += static_cast<double>(request.execution_ns) / static_cast<double>(recorded.size());

    ProgressLine progress;
    std::vector<Case> cases;
    for (double load : loads) {
      std::vector<sim::TimedRequest> requests = recorded;
      if (spec) {
        requests = sim::draw(*spec, {.requests = limit_ == 0 ? 4000 : limit_,
                                     .rate_per_s = load / (mean / 1e9),
                                     .burstiness = burst_,
                                     .seed = seed_});
      } else if (load > 0) {
        const uint64_t start = requests.front().arrival_ns;
        const double span = static_cast<double>(requests.back().arrival_ns - start);
        const double scale = span > 0 ? mean * static_cast<double>(requests.size()) / load / span : 1;
        for (sim::TimedRequest& request : requests)
          request.arrival_ns = static_cast<uint64_t>(static_cast<double>(request.arrival_ns - start) * scale);
      }
      for (double slo : slos)
        for (const std::string& policy : policies) {
          progress.show(base::format("load %g, SLO %g, %s", load, slo, policy.c_str()));
          sim::ServingOptions options;
          options.c0_ns = c0_ * mean;
          options.c1 = c1_;
          options.slo_x_p99 = slo;
          options.time_decisions = true;
          const auto result =
              device_ == "host" ? serve_on_host(requests, policy, options, time_scale_, work_ == "arithmetic")
                                : sim::serve(requests, policy, options);
          if (!result.ok()) return result.status();
          cases.push_back({synthetic_.empty() ? requests_ : synthetic_, slo, load, policy, *result});
        }
    }
    progress.clear();
    GPUSHARE_RETURN_IF_ERROR(json_.write(document(cases, mean)));
    if (!report_.empty()) GPUSHARE_RETURN_IF_ERROR(write_file(report_, page(cases, loads, slos, policies)));
    if (!json_.on_stdout()) GPUSHARE_RETURN_IF_ERROR(write_stdout(table(cases)));
    return kExitOk;
  }

 private:
  nlohmann::ordered_json document(const std::vector<Case>& cases, double mean) const {
    nlohmann::ordered_json rows = nlohmann::ordered_json::array();
    for (const Case& each : cases) {
      const sim::ServingResult& r = each.result;
      nlohmann::ordered_json dropped;
      for (uint32_t i = 0; i < sched::slo::kDropReasons; ++i)
        dropped[sched::slo::drop_reason_name(static_cast<sched::slo::DropReason>(i))] = r.dropped[i];
      nlohmann::ordered_json row{{"case", each.name}, {"slo_x_p99", each.slo_x_p99}};
      row["load"] = each.load > 0 ? nlohmann::ordered_json(each.load) : nlohmann::ordered_json(nullptr);
      row.update({{"policy", each.policy},
                  {"requests", r.requests},
                  {"finished_in_time", r.finished_in_time},
                  {"finish_rate", r.finish_rate},
                  {"p50_ms", r.p50_ms},
                  {"p99_ms", r.p99_ms},
                  {"dropped", dropped},
                  {"decision_us", r.decision_us},
                  {"finished_late", r.finished_late},
                  {"goodput_per_s", r.goodput_per_s},
                  {"mean_batch", r.mean_batch},
                  {"batches", r.batches},
                  {"busy", r.busy_share}});
      nlohmann::ordered_json sizes = nlohmann::ordered_json::object();
      for (size_t k = 1; k < r.batch_sizes.size(); ++k)
        if (r.batch_sizes[k] != 0) sizes[std::to_string(k)] = r.batch_sizes[k];
      row["batch_sizes"] = sizes;
      rows.push_back(row);
    }
    return {{"device", device_},
            {"label", device_},
            {"source", synthetic_.empty() ? requests_ : synthetic_},
            {"c0_ms", c0_ * mean / 1e6},
            {"c1", c1_},
            {"cases", rows}};
  }

  static std::vector<std::string> row_of(const Case& each) {
    const sim::ServingResult& r = each.result;
    return {each.load > 0 ? base::format("%g", each.load) : "recorded",
            base::format("%g", each.slo_x_p99),
            each.policy,
            base::format("%.1f%%", 100 * r.finish_rate),
            base::format("%.2f", r.goodput_per_s),
            base::format("%.1f", r.p50_ms),
            base::format("%.1f", r.p99_ms),
            base::format("%.1f", r.mean_batch),
            std::to_string(r.finished_late),
            std::to_string(r.drops()),
            base::format("%.1f", r.decision_us)};
  }
  static constexpr const char* kTitles[] = {"load",   "SLO",   "policy", "in time", "goodput/s",  "P50 ms",
                                            "P99 ms", "batch", "late",   "dropped", "decision us"};
  std::string table(const std::vector<Case>& cases) const {
    Table out;
    for (size_t i = 0; i < std::size(kTitles); ++i)
      out.add_column(kTitles[i], i == 2 ? Table::Align::kLeft : Table::Align::kRight);
    for (const Case& each : cases) out.add_row(row_of(each));
    return out.to_string() +
           base::format("\n%s; SLO is a multiple of the P99 execution time.\n",
                        device_ == "sim" ? "sim: virtual time" : "host: real time on CPU threads");
  }

  std::string page(const std::vector<Case>& cases, const std::vector<double>& loads,
                   const std::vector<double>& slos, const std::vector<std::string>& policies) const {
    std::string out =
        "<!DOCTYPE html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
        "content=\"width=device-width,initial-scale=1\"><title>gpushare serve</title><style>" +
        std::string(kReportStyle) +
        "</style></head><body><main><header><h1>Requests finished in time</h1><p>" +
        escape_html(synthetic_.empty() ? requests_ : synthetic_) + ", " +
        (device_ == "sim" ? "simulated on virtual time" : "in real time on CPU threads") + "</p></header>";
    out += "<ul class=\"key\">";
    for (size_t i = 0; i < policies.size(); ++i)
      out += base::format(
                 "<li><svg viewBox=\"0 0 30 12\" aria-hidden=\"true\"><path class=\"line s%zu\" d=\"M0 "
                 "6H30\"/></svg>",
                 i % kReportStyles) +
             escape_html(policies[i]) + "</li>";
    out += "</ul>";
    for (size_t l = 0; l < loads.size(); ++l) {
      Chart chart;
      const std::string load = loads[l] > 0 ? base::format("load %g", loads[l]) : "arrivals as recorded";
      chart.title = "Share of requests finished in time over the deadline, " + load;
      chart.heading = load;
      chart.x_label = "deadline, multiples of the P99 execution time";
      chart.y_label = "in time";
      chart.x_min = std::min(1.0, *std::min_element(slos.begin(), slos.end()));
      chart.x_max = std::max(chart.x_min + 1, *std::max_element(slos.begin(), slos.end()));
      chart.y_percent = true;
      const Case* best = nullptr;
      for (size_t p = 0; p < policies.size(); ++p) {
        ChartLine line;
        line.label = policies[p];
        line.style = p % kReportStyles;
        for (const Case& each : cases) {
          if (each.policy != policies[p] || each.load != loads[l]) continue;
          line.points.push_back({each.slo_x_p99, each.result.finish_rate});
          if (best == nullptr || each.result.finish_rate > best->result.finish_rate) best = &each;
        }
        std::sort(line.points.begin(), line.points.end(),
                  [](const ChartPoint& a, const ChartPoint& b) { return a.x < b.x; });
        chart.lines.push_back(std::move(line));
      }
      if (best != nullptr)
        chart.description = base::format("The most, %.1f%%, by %s at %g.", 100 * best->result.finish_rate,
                                         best->policy.c_str(), best->slo_x_p99);
      out += "<section><p class=\"finding\">" + escape_html(chart.description) + "</p>" +
             draw(chart, base::format("load%zu", l)) + "</section>";
    }
    out += "<section><h2>In numbers</h2><div class=\"scroll\"><table><thead><tr>";
    for (const char* title : kTitles) out += "<th scope=\"col\">" + escape_html(title) + "</th>";
    out += "</tr></thead><tbody>";
    for (const Case& each : cases) {
      out += "<tr>";
      for (const std::string& cell : row_of(each)) out += "<td>" + escape_html(cell) + "</td>";
      out += "</tr>";
    }
    return out + "</tbody></table></div></section></main></body></html>\n";
  }

  std::string requests_, synthetic_, policy_ = "clipper,nexus,clockwork,orloj,gpushare", slo_ = "1.5,2,3,4,5",
                                     load_, device_ = "sim", work_ = "arithmetic", report_;
  double c0_ = 0.9, c1_ = 0.1, burst_ = 0, time_scale_ = 1;
  size_t limit_ = 0;
  uint64_t seed_ = 1;
  sim::TokenRule rule_;
  JsonOption json_;
};

}  // namespace

std::unique_ptr<Command> make_serve_command() {
  return std::make_unique<ServeCommand>();
}

}  // namespace gpushare::cli
