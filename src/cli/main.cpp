// The `gpushare` tool: parses the command line, runs one command, and is the only place that decides how the
// process ends.
// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <exception>
#include <new>
#include <string>

#include "cli/command.hpp"
#include "cli/help.hpp"
#include "cli/output.hpp"
#include "gpushare/version.h"

namespace {

using gpushare::cli::Command;
using gpushare::cli::ExitCode;

constexpr const char* kFooter =
    "Examples:\n"
    "  gpushare devices\n"
    "  gpushare run --help\n"
    "\n"
    "Exit codes, of every command: 0 ok; 1 the run failed; 2 bad usage or input; 3 no such device, or it "
    "cannot be used.\n"
    "Results go to stdout, progress and errors to stderr. With '--json -' stdout carries the JSON alone.\n";

// Edits (insert, delete, replace) between two words.
size_t distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

// CLI11's own message for a mistyped command names no command: ours does.
int unknown_command(const std::string& word, const std::vector<std::unique_ptr<Command>>& all) {
  const Command* nearest = nullptr;
  std::string names;
  for (const auto& command : all) {
    names += (names.empty() ? "" : ", ") + std::string(command->name());
    if (nearest == nullptr || distance(word, command->name()) < distance(word, nearest->name()))
      nearest = command.get();
  }
  const bool close = nearest != nullptr && distance(word, nearest->name()) <= 2;
  std::fprintf(stderr, "gpushare: no command '%s'%s%s%s; there are: %s\n", word.c_str(),
               close ? "; did you mean '" : "", close ? nearest->name() : "", close ? "'?" : "",
               names.c_str());
  return gpushare::cli::kExitUsage;
}

// CLI11's messages for these two read "--lanes: 1 required N missing" and "--lanes: At Most 1 required but received 2".
std::string message_of(const CLI::ParseError& error) {
  const std::string what = error.what(), option = what.substr(0, what.find(':'));
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) == nullptr) return what;
  if (what.find("missing") != std::string::npos) return option + ": a value must follow";
  if (what.find("At Most 1") != std::string::npos) return option + ": give it once";
  return what;
}

// An option given with nothing, as of an unset shell variable, is a mistake and not the default.
const CLI::Option* empty_option(const CLI::App& app) {
  for (const CLI::Option* option : app.get_options()) {
    const std::vector<std::string>& values = option->results();
    if (std::any_of(values.begin(), values.end(), [](const std::string& value) { return value.empty(); }))
      return option;
  }
  return nullptr;
}

// The command that was named last: `gpushare cluster plan`.
const CLI::App& innermost(const CLI::App& app) {
  for (const CLI::App* sub : app.get_subcommands()) return innermost(*sub);
  return app;
}

std::string full_name(const CLI::App& app) {
  return app.get_parent() == nullptr ? app.get_name() : full_name(*app.get_parent()) + " " + app.get_name();
}

// Help and version: results like any other.
int print(const std::string& text) {
  const gpushare::base::Status written = gpushare::cli::write_stdout(text);
  if (written.ok()) return gpushare::cli::kExitOk;
  std::fprintf(stderr, "gpushare: %s\n", written.message().c_str());
  return gpushare::cli::kExitFailed;
}

int tool(int argc, char** argv) {
  std::vector<std::unique_ptr<Command>> all = gpushare::cli::commands();
  if (argc > 1 && argv[1][0] != '-' &&
      std::none_of(all.begin(), all.end(), [&](const auto& c) { return std::string(argv[1]) == c->name(); }))
    return unknown_command(argv[1], all);

  CLI::App app("Many deep-learning jobs sharing one GPU.", "gpushare");
  app.set_version_flag("--version", std::string("gpushare ") + GPUSHARE_VERSION_STRING);
  app.footer(kFooter);
  app.require_subcommand(0, 1);
  std::vector<std::pair<CLI::App*, Command*>> declared;
  for (const auto& command : all) {
    CLI::App* sub = app.add_subcommand(command->name(), command->summary());
    sub->footer(command->help());
    command->declare(*sub);
    declared.emplace_back(sub, command.get());
  }
  const auto used = [&]() -> std::pair<CLI::App*, Command*> {
    for (const auto& [sub, command] : declared)
      if (sub->parsed()) return {sub, command};
    return {&app, nullptr};
  };
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    return print(gpushare::cli::render_help(innermost(app)));
  } catch (const CLI::CallForVersion& version) {
    return print(std::string(version.what()) + "\n");
  } catch (const CLI::ParseError& error) {
    const std::string where = full_name(innermost(app));
    std::fprintf(stderr, "%s: %s\nTry '%s --help'.\n", where.c_str(), message_of(error).c_str(),
                 where.c_str());
    return gpushare::cli::kExitUsage;
  }
  Command* command = used().second;
  if (command == nullptr) {
    std::fputs(gpushare::cli::render_help(app).c_str(), stderr);
    return gpushare::cli::kExitUsage;
  }
  if (const CLI::Option* empty = empty_option(innermost(app)); empty != nullptr) {
    std::fprintf(stderr, "%s: %s: '' is not allowed; give %s, or leave the option out\n",
                 full_name(innermost(app)).c_str(), empty->get_name().c_str(),
                 empty->get_type_name().c_str());
    return gpushare::cli::kExitUsage;
  }
  const gpushare::base::Result<ExitCode> result = command->run();
  if (result.ok()) return *result;
  std::fprintf(stderr, "gpushare %s: %s\n", command->name(), result.status().message().c_str());
  return gpushare::cli::exit_code(result.status());
}

}  // namespace

int main(int argc, char** argv) {
  // A reader that leaves early (gpushare ... | head) is an error of write(), not the end of the process.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // so is a file that would grow past the limit of ulimit -f
  try {
    return tool(argc, argv);
  } catch (const std::bad_alloc&) {
    std::fputs("gpushare: out of host memory\n", stderr);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpushare: internal error, please report it: %s\n", error.what());
  }
  return gpushare::cli::kExitFailed;
}
