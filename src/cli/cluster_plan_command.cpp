// `gpushare cluster plan` and `gpushare cluster schema`: one document, decided once by each of several schedulers.
// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "base/clock.hpp"
#include "cli/cluster_command.hpp"
#include "cli/options.hpp"
#include "cli/output.hpp"
#include "cli/progress.hpp"
#include "cluster/plan.hpp"
#include "sim/cluster_training.hpp"
#include "sim/csv.hpp"

namespace gpushare::cli {
namespace {

constexpr uint64_t kMostDocumentBytes = uint64_t{1} << 30;

class ClusterPlanCommand final : public Command {
 public:
  ClusterPlanCommand() {
    help_ = "Kinds, and what --scheduler or --objective may name (the default first):\n";
    for (const cluster::Kind* kind : sim::all_cluster_kinds()) {
      std::string line = base::format("  %-11s --%s ", kind->name, kind->chooses);
      bool first = true;
      const auto add = [&](const char* choice) {
        line += (first ? "" : ", ") + std::string(choice);
        first = false;
      };
      for (const char* choice : kind->defaults) add(choice);
      for (const char* choice : kind->choices)
        if (std::find(kind->defaults.begin(), kind->defaults.end(), choice) == kind->defaults.end())
          add(choice);
      help_ += line + "\n";
    }
    help_ +=
        "Each is asked for one decision, or to play the document out without noise. The result also names "
        "what cannot\n"
        "be served, with the reason.\n"
        "\n"
        "Examples:\n"
        "  gpushare cluster plan examples/cluster/services.json\n"
        "  gpushare cluster plan examples/cluster/services.json --scheduler milp-ao,milp-wao --json -\n"
        "\n"
        "JSON: version, kind, results[] {scheduler or objective, solve_ms, the fields of the kind}; "
        "docs/cli-cluster.md "
        "has them.\n"
        "\n"
        "Exit codes: 0 ok; 1 an output could not be written; 2 bad usage or a bad document.\n";
  }
  const char* name() const override { return "plan"; }
  const char* summary() const override { return "Decide one document by one or several schedulers"; }
  const char* help() const override { return help_.c_str(); }
  void declare(CLI::App& app) override {
    app.add_option("FILE", file_, "Document, JSON")->type_name("FILE.json")->required();
    app.add_option("--scheduler", schedulers_, "Who decides, separated by commas [the kind's default]")
        ->type_name("NAMES");
    app.add_option("--objective", objectives_,
                   "For kinds that have them: what is maximised [the kind's default]")
        ->type_name("NAMES");
    json_.declare(app);
  }

  base::Result<ExitCode> run() override {
    GPUSHARE_RETURN_IF_ERROR(check_files({{"FILE", file_}}, {json_.file()}));
    GPUSHARE_ASSIGN_OR_RETURN(const std::string text, sim::read_text(file_, kMostDocumentBytes));
    cluster::PlanOptions options;
    if (!schedulers_.empty()) options.schedulers = split_list(schedulers_);
    if (!objectives_.empty()) options.objectives = split_list(objectives_);
    options.now_ns = [] { return base::host_now_ns(); };
    ProgressLine progress;
    options.progress = [&](const std::string& choice, size_t index, size_t count) {
      if (progress.due()) progress.show(base::format("%s (%zu of %zu)", choice.c_str(), index + 1, count));
    };
    base::Result<cluster::OrderedJson> result = cluster::plan(text, options, sim::all_cluster_kinds());
    progress.clear();
    if (!result.ok()) {
      const bool malformed = result.status().code() == GPUSHARE_MALFORMED_INPUT;
      return malformed ? result.status().with_context(file_) : result.status();
    }
    GPUSHARE_RETURN_IF_ERROR(json_.write(*result));
    if (!json_.on_stdout()) GPUSHARE_RETURN_IF_ERROR(write_stdout(render_cluster_result(*result)));
    return kExitOk;
  }

 private:
  std::string help_;
  std::string file_;
  std::string schedulers_;
  std::string objectives_;
  JsonOption json_;
};

class ClusterSchemaCommand final : public Command {
 public:
  const char* name() const override { return "schema"; }
  const char* summary() const override { return "Print the JSON Schema of all documents"; }
  const char* help() const override {
    return R"(Draft 2020-12; every kind is one of its $defs.

Examples:
  gpushare cluster schema

JSON: the schema.

Exit codes: 0 ok; 1 the output could not be written.
)";
  }
  void declare(CLI::App&) override {}
  base::Result<ExitCode> run() override {
    GPUSHARE_RETURN_IF_ERROR(write_stdout(cluster::schema(sim::all_cluster_kinds())));
    return kExitOk;
  }
};

}  // namespace

std::unique_ptr<Command> make_cluster_plan_command() {
  return std::make_unique<ClusterPlanCommand>();
}

std::unique_ptr<Command> make_cluster_schema_command() {
  return std::make_unique<ClusterSchemaCommand>();
}

}  // namespace gpushare::cli
