// `gpushare plan`: in which groups a model's layers are best sent to the device, and what that gains over
// the plain ways.
// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <optional>

#include "base/clock.hpp"
#include "base/saturate.hpp"
#include "base/trace_writer.hpp"
#include "base/units.hpp"
#include "cli/command.hpp"
#include "cli/model_file.hpp"
#include "cli/options.hpp"
#include "cli/output.hpp"
#include "cluster/json.hpp"
#include "loader/checksum.hpp"
#include "loader/grouping.hpp"
#include "sim/csv.hpp"

namespace gpushare::cli {
namespace {

constexpr double kMaxOverheadUs = 1e7;

// The input of the plan, and its result.
struct Plan {
  std::vector<ModelLayer> layers;
  std::vector<loader::LayerCost> layer_costs;
  loader::GroupingCosts costs;
  loader::Grouping best;
  double lower_bound_ms = 0;
  double one_shot_ms = 0;
  double per_layer_ms = 0;
  double best_uniform_ms = 0;
  size_t uniform_groups = 0;
  double solve_us = 0;
  std::string execution_rule;
};

uint64_t bytes_of(const Plan& plan, uint32_t first, uint32_t end) {
  uint64_t bytes = 0;
  for (uint32_t i = first; i < end; ++i) bytes += plan.layers[i].bytes;
  return bytes;
}

base::Result<Plan> solve(Plan plan) {
  const uint64_t begin_ns = base::host_now_ns();
  GPUSHARE_ASSIGN_OR_RETURN(plan.best, loader::plan_groups(plan.layer_costs, plan.costs));
  plan.solve_us = static_cast<double>(base::host_now_ns() - begin_ns) / 1e3;
  plan.lower_bound_ms = loader::makespan_lower_bound_ms(plan.layer_costs, plan.costs);
  const size_t layers = plan.layers.size();
  const uint32_t resident = plan.costs.resident_layers;
  GPUSHARE_ASSIGN_OR_RETURN(
      plan.one_shot_ms,
      loader::grouping_makespan_ms(plan.layer_costs, plan.costs, loader::one_shot_groups(layers, resident)));
  GPUSHARE_ASSIGN_OR_RETURN(
      plan.per_layer_ms,
      loader::grouping_makespan_ms(plan.layer_costs, plan.costs, loader::per_layer_groups(layers, resident)));
  GPUSHARE_ASSIGN_OR_RETURN(const std::vector<uint32_t> uniform,
                            loader::best_uniform_groups(plan.layer_costs, plan.costs));
  plan.uniform_groups = uniform.size();
  GPUSHARE_ASSIGN_OR_RETURN(plan.best_uniform_ms,
                            loader::grouping_makespan_ms(plan.layer_costs, plan.costs, uniform));
  return plan;
}

cluster::OrderedJson to_json(const Plan& plan) {
  cluster::OrderedJson groups = cluster::OrderedJson::array();
  uint32_t first = plan.costs.resident_layers;
  for (const uint32_t end : plan.best.ends) {
    groups.push_back(
        cluster::object({{"first", first}, {"last", end - 1}, {"bytes", bytes_of(plan, first, end)}}));
    first = end;
  }
  return cluster::object({{"layers", plan.layers.size()},
                          {"groups", std::move(groups)},
                          {"makespan_ms", plan.best.makespan_ms},
                          {"lower_bound_ms", plan.lower_bound_ms},
                          {"one_shot_ms", plan.one_shot_ms},
                          {"per_layer_ms", plan.per_layer_ms},
                          {"best_uniform_ms", plan.best_uniform_ms},
                          {"solve_us", plan.solve_us},
                          {"optimal", plan.best.is_optimal}});
}

base::Result<std::string> to_text(const Plan& plan) {
  const auto layers = static_cast<uint32_t>(plan.layers.size());
  const uint32_t resident = plan.costs.resident_layers;
  std::string out =
      base::format("%u layers, %s", layers, base::format_bytes(bytes_of(plan, 0, layers)).c_str());
  if (resident > 0)
    out += base::format(", %u of them (%s) on the device already", resident,
                        base::format_bytes(bytes_of(plan, 0, resident)).c_str());
  out += base::format("; planned in %.0f us\n%s\n\n", plan.solve_us,
                      wrap("Execution times: " + plan.execution_rule, 110, 0).c_str());

  Table groups;
  for (const char* title : {"group", "layers", "bytes", "sent ms", "arrived ms", "done ms"})
    groups.add_column(title, Table::Align::kRight);
  GPUSHARE_ASSIGN_OR_RETURN(const std::vector<loader::GroupTimes> times,
                            loader::group_times(plan.layer_costs, plan.costs, plan.best.ends));
  uint32_t first = resident;
  for (size_t g = 0; g < plan.best.ends.size(); ++g) {
    const uint32_t end = plan.best.ends[g];
    groups.add_row({std::to_string(g), base::format("%u-%u", first, end - 1),
                    base::format_bytes(bytes_of(plan, first, end)), base::format("%.3f", times[g].send_ms),
                    base::format("%.3f", times[g].arrived_ms), base::format("%.3f", times[g].done_ms)});
    first = end;
  }
  out += groups.to_string() + '\n';

  Table ways;
  ways.add_column("way", Table::Align::kLeft);
  for (const char* title : {"groups", "makespan ms", "over the bound"})
    ways.add_column(title, Table::Align::kRight);
  const auto add = [&](const char* way, const std::string& count, double ms) {
    ways.add_row({way, count, base::format("%.3f", ms),
                  plan.lower_bound_ms > 0 ? base::format("%+.1f%%", 100 * (ms / plan.lower_bound_ms - 1))
                                          : std::string("-")});
  };
  add("this plan", std::to_string(plan.best.ends.size()), plan.best.makespan_ms);
  add("best uniform", std::to_string(plan.uniform_groups), plan.best_uniform_ms);
  add("per layer", std::to_string(layers - resident), plan.per_layer_ms);
  add("one shot", resident < layers ? "1" : "0", plan.one_shot_ms);
  add("lower bound", "", plan.lower_bound_ms);
  out += ways.to_string();
  if (!plan.best.is_optimal)
    out += "\n" +
           wrap(
               "With so many layers the search was cut short: this plan is the best of at most as many "
               "groups as could "
               "be searched, not proven the optimum.",
               110, 0) +
           "\n";
  if (plan.costs.group_cap_bytes > 0)
    out +=
        "\nThe plan keeps --group-cap; the other ways ignore it, so they may look better than they can be.\n";
  return out;
}

uint64_t to_ns(double ms) {
  return base::to_uint64(std::round(ms * 1e6));
}

base::Status write_timeline(const Plan& plan, const std::string& path) {
  GPUSHARE_ASSIGN_OR_RETURN(const std::vector<loader::GroupTimes> times,
                            loader::group_times(plan.layer_costs, plan.costs, plan.best.ends));
  GPUSHARE_ASSIGN_OR_RETURN(base::TraceWriter writer, base::TraceWriter::open(path));
  const auto pipeline = writer.add_group("planned pipeline");
  const auto link = writer.add_track(pipeline, "link");
  const auto lane = writer.add_track(pipeline, "lane");
  const auto slice = [&](base::TraceWriter::Track track, const std::string& name, double from_ms,
                         double to_ms, uint32_t first, uint32_t last) {
    writer.slice(track, name, to_ns(from_ms), to_ns(to_ms) - to_ns(from_ms),
                 {{"first_layer", plan.layers[first].name},
                  {"last_layer", plan.layers[last].name},
                  {"bytes", bytes_of(plan, first, last + 1)}});
  };
  uint32_t first = plan.costs.resident_layers;
  if (first > 0) {
    const double ready = loader::makespan_lower_bound_ms(
        std::span(plan.layer_costs).first(first), plan.costs);  // all resident: when the prefix is done
    slice(lane, base::format("resident layers 0-%u", first - 1), 0, ready, 0, first - 1);
  }
  for (size_t g = 0; g < times.size(); ++g) {
    const uint32_t last = plan.best.ends[g] - 1;
    const std::string name = base::format("group %zu: layers %u-%u", g, first, last);
    slice(link, name, times[g].send_ms, times[g].arrived_ms, first, last);
    slice(lane, name, times[g].start_ms, times[g].done_ms, first, last);
    first = last + 1;
  }
  return writer.close();
}

class PlanCommand final : public Command {
 public:
  const char* name() const override { return "plan"; }
  const char* summary() const override {
    return "Plan a model's way to the device: groups of layers, sent while earlier ones execute";
  }
  const char* help() const override {
    return R"(Model files: a CSV with the header layer,type,megabytes (2^20 bytes each), layers in execution order; a
.safetensors file or .safetensors.index.json, each tensor a layer, in the order of its bytes. --order names another.

The model of time: one transmission costs --call-overhead-us and its bytes over the bandwidth; a group executes
once it and all before it have arrived, and costs --group-overhead-us and its layers' times. The plan is the
optimum of that model, not a measurement. Without --exec-ms there is nothing to know execution times from: then
each layer is taken to execute as long as its bytes take on the link, and the output says so.

Examples:
  gpushare plan --model examples/models/cnn.csv --bandwidth-gbs 12 --call-overhead-us 10 --group-overhead-us 20
With --exec-ms examples/models/cnn_exec.csv it plans for given execution times.

JSON: version, layers, groups[] {first, last, bytes}, makespan_ms, lower_bound_ms, one_shot_ms, per_layer_ms,
best_uniform_ms, solve_us, optimal (false: the search of very many layers was cut short). first and last count
layers from 0, both included; resident layers are in no group.

Exit codes: 0 ok; 1 an output could not be written; 2 bad usage or a bad file.
)";
  }
  void declare(CLI::App& app) override {
    app.add_option("--model", model_, "Model: .csv, .safetensors or .safetensors.index.json")
        ->type_name("FILE")
        ->required();
    add(app, "--bandwidth-gbs", &gbs_, number(0, false, 1e6), "B", "Of the link, 10^9 bytes a second")
        ->required();
    add(app, "--call-overhead-us", &call_us_, number(0, true, kMaxOverheadUs), "A", "Of each transmission")
        ->required();
    add(app, "--group-overhead-us", &group_us_, number(0, true, kMaxOverheadUs), "C",
        "Of executing each group")
        ->required();
    app.add_option("--exec-ms", exec_file_, "CSV of execution times: layer,exec_ms")->type_name("FILE");
    app.add_option("--order", order_file_, "Execution order: a layer's name a line [order of the model file]")
        ->type_name("FILE");
    add(app, "--order-by", &order_by_, one_of({"bytes", "names"}), "WHAT",
        "Without --order: bytes, as they lie in the file, or names, as these tell (for "
        "safetensors) [bytes]");
    app.add_option("--resident", resident_, "The first N layers are on the device already [0]")
        ->type_name("N");
    add(app, "--group-cap", &group_cap_bytes_, parse_size, "SIZE",
        "Most bytes of a group; a larger layer is alone [no cap]");
    json_.declare(app);
    app.add_option("--checksums", checksums_,
                   "Also writes the CRC-32C of each tensor of a .safetensors model, for loaders that verify")
        ->type_name("FILE");
    app.add_option("--timeline", timeline_, "Picture of the pipeline: a Chrome trace, opens in Perfetto")
        ->type_name("FILE");
  }

  base::Result<ExitCode> run() override {
    Plan plan;
    plan.costs.call_overhead_ms = call_us_ / 1e3;
    plan.costs.group_overhead_ms = group_us_ / 1e3;
    if (group_cap_bytes_) plan.costs.group_cap_bytes = *group_cap_bytes_;
    GPUSHARE_RETURN_IF_ERROR(
        check_files({{"--model", model_}, {"--exec-ms", exec_file_}, {"--order", order_file_}},
                    {json_.file(), {"--timeline", timeline_}, {"--checksums", checksums_}}));
    if (!checksums_.empty() && model_.ends_with(".csv"))
      return base::Status(GPUSHARE_INVALID_ARGUMENT,
                          "--checksums: '" + model_ + "' has no tensors; give --model a .safetensors file");
    GPUSHARE_ASSIGN_OR_RETURN(plan.layers, read_model_layers(model_));
    if (!checksums_.empty()) {
      GPUSHARE_ASSIGN_OR_RETURN(const std::string sums, loader::checksums_of(model_));
      GPUSHARE_RETURN_IF_ERROR(write_file(checksums_, sums));
    }
    if (!order_file_.empty()) {
      GPUSHARE_ASSIGN_OR_RETURN(const std::string order, sim::read_text(order_file_));
      GPUSHARE_RETURN_IF_ERROR(apply_order(order, order_file_, &plan.layers));
    } else if (order_by_ == "names") {
      sort_by_names(&plan.layers);
    }
    GPUSHARE_ASSIGN_OR_RETURN(const uint64_t resident,
                              parse_count("--resident", resident_, plan.layers.size()));
    plan.costs.resident_layers = static_cast<uint32_t>(resident);

    std::vector<double> execution_ms;
    if (!exec_file_.empty()) {
      GPUSHARE_ASSIGN_OR_RETURN(const std::string text, sim::read_text(exec_file_));
      GPUSHARE_ASSIGN_OR_RETURN(execution_ms, parse_execution_times(text, exec_file_, plan.layers));
      plan.execution_rule = "from " + exec_file_ + ".";
    } else {
      plan.execution_rule = base::format(
          "assumed, not measured: each layer executes as long as its bytes take on the link (%g * 10^9 bytes "
          "a second). Give measured ones with --exec-ms.",
          gbs_);
    }
    for (size_t i = 0; i < plan.layers.size(); ++i) {
      const double transmit_ms = static_cast<double>(plan.layers[i].bytes) / (gbs_ * 1e6);
      plan.layer_costs.push_back(
          {plan.layers[i].bytes, transmit_ms, execution_ms.empty() ? transmit_ms : execution_ms[i]});
    }
    GPUSHARE_ASSIGN_OR_RETURN(plan, solve(std::move(plan)));

    if (!timeline_.empty()) GPUSHARE_RETURN_IF_ERROR(write_timeline(plan, timeline_));
    GPUSHARE_RETURN_IF_ERROR(json_.write(to_json(plan)));
    if (json_.on_stdout()) {
      // The JSON's keys are fixed: what the figures rest on is said beside them.
      if (exec_file_.empty())
        std::fprintf(stderr, "gpushare plan: execution times are %s\n", plan.execution_rule.c_str());
      return kExitOk;
    }
    GPUSHARE_ASSIGN_OR_RETURN(const std::string text, to_text(plan));
    GPUSHARE_RETURN_IF_ERROR(write_stdout(text));
    return kExitOk;
  }

 private:
  std::string model_;
  double gbs_ = 0, call_us_ = 0, group_us_ = 0;
  std::string exec_file_;
  std::string order_file_;
  std::string order_by_ = "bytes";
  std::string checksums_;
  std::string resident_ = "0";
  std::optional<uint64_t> group_cap_bytes_;
  std::string timeline_;
  JsonOption json_;
};

}  // namespace

std::unique_ptr<Command> make_plan_command() {
  return std::make_unique<PlanCommand>();
}

}  // namespace gpushare::cli
