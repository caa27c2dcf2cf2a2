// `gpushare cluster`: decisions above one device. Its commands have files of their own; this one lists them, and renders results.
// SPDX-License-Identifier: Apache-2.0
#include "cli/cluster_command.hpp"

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "cli/output.hpp"

namespace gpushare::cli {
namespace {

constexpr size_t kMostRows = 40;  // of a table that a person reads; JSON has them all

std::string cell(const nlohmann::ordered_json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number_float()) return base::format("%.6g", value.get<double>());
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "no";
  if (value.is_null() || (value.is_structured() && value.empty())) return "-";
  if (value.is_array()) {
    std::string out;
    for (size_t i = 0; i < value.size() && i < 8; ++i) out += (i == 0 ? "" : ", ") + cell(value[i]);
    return value.size() > 8 ? out + ", ..." : out;
  }
  if (value.is_object()) {
    std::string out;
    for (const auto& [key, item] : value.items()) out += (out.empty() ? "" : ", ") + key + " " + cell(item);
    return out;
  }
  return value.dump();
}

// The rows of a list of objects.
std::string table_of_list(const nlohmann::ordered_json& list) {
  Table table;
  std::vector<std::string> keys;
  for (const auto& [key, item] : list[0].items()) {
    table.add_column(key, item.is_number() ? Table::Align::kRight : Table::Align::kLeft);
    keys.push_back(key);
  }
  for (size_t i = 0; i < list.size() && i < kMostRows; ++i) {
    std::vector<std::string> cells;
    for (const std::string& key : keys) cells.push_back(list[i].contains(key) ? cell(list[i][key]) : "");
    table.add_row(std::move(cells));
  }
  std::string out = table.to_string();
  if (list.size() > kMostRows) out += base::format("... %zu in all; --json has them\n", list.size());
  return out;
}

// The tables of what a result holds under `title`: one of the plain values of an object, then those of the lists and
// objects in it. A part of a mix is such an object.
std::string inner_tables(const std::string& title, const nlohmann::ordered_json& value) {
  if (value.is_array() && !value.empty() && value[0].is_object())
    return "\n" + title + "\n" + table_of_list(value);
  if (!value.is_object() || value.empty()) return "";
  Table table;
  table.add_column("name", Table::Align::kLeft);
  table.add_column("value", value.begin()->is_number() ? Table::Align::kRight : Table::Align::kLeft);
  size_t rows = 0;
  std::string inner;
  for (const auto& [key, item] : value.items()) {
    if (item.is_object() || (item.is_array() && !item.empty() && item[0].is_object()))
      inner += inner_tables(title + ", " + key, item);
    else if (++rows <= kMostRows)
      table.add_row({key, cell(item)});
  }
  std::string out;
  if (rows > 0) out = "\n" + title + "\n" + table.to_string();
  if (rows > kMostRows) out += base::format("... %zu in all; --json has them\n", rows);
  return out + inner;
}

class ClusterCommand final : public Command {
 public:
  const char* name() const override { return "cluster"; }
  const char* summary() const override {
    return "Decide for several devices: services, trials, retraining, shares, reservations, training jobs";
  }
  const char* help() const override {
    return R"(A document says what there is: {"version": 1, "kind": ..., "devices": ...} and the fields of its kind; examples/cluster
has one of each, 'gpushare cluster schema' all fields. 'gpushare cluster COMMAND --help' has a command's options, such
as --json.

Examples:
  gpushare cluster plan examples/cluster/services.json
  gpushare cluster schema

Exit codes: 0 ok; 1 an output could not be written; 2 bad usage or a bad document.
)";
  }
  void declare(CLI::App& app) override {
    app.require_subcommand(1);
    commands_.push_back(make_cluster_plan_command());
    commands_.push_back(make_cluster_run_command());
    commands_.push_back(make_cluster_schema_command());
    for (const auto& command : commands_) {
      CLI::App* sub = app.add_subcommand(command->name(), command->summary());
      sub->footer(command->help());
      command->declare(*sub);
      declared_.push_back(sub);
    }
  }
  base::Result<ExitCode> run() override {
    for (size_t i = 0; i < commands_.size(); ++i) {
      if (!declared_[i]->parsed()) continue;
      base::Result<ExitCode> result = commands_[i]->run();
      if (!result.ok()) return result.status().with_context(commands_[i]->name());
      return result;
    }
    return base::Status(GPUSHARE_INVALID_ARGUMENT, "a command must follow: plan, run, schema");
  }

 private:
  std::vector<std::unique_ptr<Command>> commands_;
  std::vector<CLI::App*> declared_;
};

}  // namespace

namespace {

// The first line, at most a terminal's width or so.
std::string one_line(std::string text) {
  constexpr size_t kMost = 200;
  const size_t end = text.find('\n');
  if (end != std::string::npos) text.resize(end);
  if (text.size() > kMost) text = text.substr(0, kMost - 3) + "...";
  return text;
}

}  // namespace

std::string render_cluster_result(const nlohmann::ordered_json& document) {
  const auto& results = document.at("results");
  std::string out = "kind " + document.at("kind").get<std::string>() + "\n\n";
  std::vector<std::string> keys;  // scalars of any result, in order of appearance
  for (const auto& result : results)
    for (const auto& [key, value] : result.items())
      if (!value.is_structured() && std::find(keys.begin(), keys.end(), key) == keys.end())
        keys.push_back(key);
  Table table;
  for (size_t i = 0; i < keys.size(); ++i)
    table.add_column(keys[i], i == 0 ? Table::Align::kLeft : Table::Align::kRight);
  for (const auto& result : results) {
    std::vector<std::string> cells;
    for (const std::string& key : keys) cells.push_back(result.contains(key) ? cell(result[key]) : "");
    table.add_row(std::move(cells));
  }
  out += table.to_string();
  if (document.contains("errors"))
    for (const auto& error : document.at("errors"))
      out += "\n" + one_line(error.at("error").get<std::string>());
  if (document.contains("errors")) out += "\n";
  for (const auto& result : results) {
    for (const auto& [key, value] : result.items())
      out += inner_tables(cell(result.front()) + ", " + key, value);
  }
  return out;
}

std::unique_ptr<Command> make_cluster_command() {
  return std::make_unique<ClusterCommand>();
}

}  // namespace gpushare::cli
