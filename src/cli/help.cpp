// SPDX-License-Identifier: Apache-2.0
#include "cli/help.hpp"

#include <CLI/CLI.hpp>

#include "cli/output.hpp"

namespace gpushare::cli {
namespace {

constexpr size_t kColumn = 30;

std::string entry(const std::string& left, const std::string& right, size_t width) {
  std::string out = "  " + left;
  if (out.size() + 2 > kColumn) {
    out += '\n' + std::string(kColumn, ' ');
  } else {
    out.resize(kColumn, ' ');
  }
  // wrap counts columns from its own start: the text begins at kColumn.
  std::string text = wrap(right, width - kColumn, 0);
  for (size_t at = 0; (at = text.find('\n', at)) != std::string::npos; at += kColumn + 1)
    text.insert(at + 1, std::string(kColumn, ' '));
  return out + text + '\n';
}

std::string left_of(const CLI::Option& option) {
  if (option.get_positional()) return option.get_type_name();
  std::string out;
  for (const std::string& name : option.get_snames()) out += (out.empty() ? "-" : ", -") + name;
  for (const std::string& name : option.get_lnames()) out += (out.empty() ? "--" : ", --") + name;
  if (option.get_type_size() != 0) out += " " + option.get_type_name();
  return out;
}

}  // namespace

std::string render_help(const CLI::App& app, size_t width) {
  std::string path = app.get_name();
  for (const CLI::App* up = app.get_parent(); up != nullptr; up = up->get_parent())
    path = up->get_name() + " " + path;
  std::string out = app.get_description() + "\n\nUsage: " + path;
  const std::vector<const CLI::App*> commands = app.get_subcommands([](const CLI::App*) { return true; });
  if (!commands.empty()) out += " COMMAND";
  for (const CLI::Option* option : app.get_options())
    if (option->get_required()) out += " " + left_of(*option);
  out += " [OPTIONS]\n";
  if (!commands.empty()) {
    out += "\nCommands:\n";
    for (const CLI::App* command : commands)
      out += entry(command->get_name(), command->get_description(), width);
  }
  out += "\nOptions:\n";
  for (const CLI::Option* option : app.get_options())
    out += entry(left_of(*option), option->get_description(), width);
  return out + "\n" + app.get_footer();
}

}  // namespace gpushare::cli
