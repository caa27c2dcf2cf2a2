// The command line: parses it, says what is wrong with it, and runs the command that it names.
// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "base/utf8.hpp"
#include "cli/command.hpp"
#include "cli/help.hpp"
#include "cli/output.hpp"
#include "gpushare/version.h"

namespace gpushare::cli {
namespace {

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
  std::fprintf(stderr, "gpushare: no command '%s'%s%s%s; there are: %s\n", base::to_printable(word).c_str(),
               close ? "; did you mean '" : "", close ? nearest->name() : "", close ? "'?" : "",
               names.c_str());
  return kExitUsage;
}

// CLI11's messages for these two read "--lanes: 1 required N missing" and "--lanes: At Most 1 required but received 2".
std::string message_of(const CLI::ParseError& error) {
  const std::string what = error.what(), option = what.substr(0, what.find(':'));
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) == nullptr) return what;
  if (what.find("missing") != std::string::npos) return option + ": a value must follow";
  if (what.find("At Most 1") != std::string::npos) return option + ": give it once";
  return what;
}

// The first word that looks like an option and is none of the command that it follows, and that command; null if there
// is none. CLI11 looks at what is missing first and at what is too much after it: "run --job x" would only be told that
// --jobs is required.
std::pair<std::string, const CLI::App*> unknown_option(int argc, char** argv, const CLI::App& app) {
  const CLI::App* at = &app;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--") break;
    for (const CLI::App* command : at->get_subcommands([](const CLI::App*) { return true; }))
      if (command->get_name() == word) {
        at = command;
        break;
      }
    const bool negative = word.size() > 1 && (word[1] == '.' || (word[1] >= '0' && word[1] <= '9'));
    if (word.size() < 2 || word[0] != '-' || negative) continue;
    const std::string name = word.substr(0, word.find('='));
    if (at->get_option_no_throw(name) == nullptr) return {name, at};
  }
  return {"", nullptr};
}

std::string refuse_option(const std::string& name, const CLI::App& at) {
  std::string nearest;
  for (const CLI::Option* option : at.get_options())
    for (const std::string& known : option->get_lnames())
      if (nearest.empty() || distance(name, "--" + known) < distance(name, nearest)) nearest = "--" + known;
  const bool close = !nearest.empty() && distance(name, nearest) <= 2;
  return "no option '" + name + "'" + (close ? "; did you mean '" + nearest + "'?" : "");
}

// An option given with nothing, as of an unset shell variable, is a mistake and not the default.
const CLI::Option* empty_option(const CLI::App& app) {
  for (const CLI::Option* option : app.get_options()) {
    // Arguments of another program may be empty.
    if (option->get_positional() && option->get_type_name() == "PROGRAM") continue;
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

// CLI11 checks values before it looks for --help: "run --policy nonsense --help" would only be told of the value.
bool asks_for_help(const CLI::App& at) {
  for (const CLI::App* app = &at; app != nullptr; app = app->get_parent())
    if (app->get_help_ptr()->count() > 0) return true;
  return false;
}

// Help and version: results like any other.
int print(const std::string& text) {
  const base::Status written = write_stdout(text);
  if (written.ok()) return kExitOk;
  std::fprintf(stderr, "gpushare: %s\n", written.message().c_str());
  return kExitFailed;
}

}  // namespace

int run_command_line(int argc, char** argv) {
  std::vector<std::unique_ptr<Command>> all = commands();
  // "gpushare help run" and "gpushare version" are what many try first.
  std::vector<char*> arguments(argv, argv + argc);
  static char help_option[] = "--help", version_option[] = "--version";
  if (argc > 1 && std::strcmp(argv[1], "version") == 0)
    arguments[1] = argc > 2 && std::strcmp(argv[2], help_option) == 0 ? help_option : version_option;
  if (argc > 1 && std::strcmp(argv[1], "help") == 0) {
    arguments.erase(arguments.begin() + 1);
    arguments.insert(arguments.begin() + (argc > 2 ? 2 : 1), help_option);
  }
  argc = static_cast<int>(arguments.size());
  argv = arguments.data();
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
    return print(render_help(innermost(app)));
  } catch (const CLI::CallForVersion& version) {
    if (argc > 2) {  // CLI11 answers without a look at the rest
      std::fprintf(stderr,
                   "gpushare version: The following argument was not expected: %s\nTry 'gpushare --help'.\n",
                   argv[2]);
      return kExitUsage;
    }
    return print(std::string(version.what()) + "\n");
  } catch (const CLI::ParseError& error) {
    if (asks_for_help(innermost(app))) return print(render_help(innermost(app)));
    const std::string where = full_name(innermost(app));
    const auto [unknown, at] = unknown_option(argc, argv, app);
    const std::string what = at == nullptr ? message_of(error) : refuse_option(unknown, *at);
    std::fprintf(stderr, "%s: %s\nTry '%s --help'.\n", where.c_str(), base::to_printable_lines(what).c_str(),
                 where.c_str());
    return kExitUsage;
  }
  Command* command = used().second;
  if (command == nullptr) {
    std::fputs(render_help(app).c_str(), stderr);
    return kExitUsage;
  }
  if (const CLI::Option* empty = empty_option(innermost(app)); empty != nullptr) {
    std::fprintf(stderr, "%s: %s: '' is not allowed; give %s, or leave the option out\n",
                 full_name(innermost(app)).c_str(), empty->get_name().c_str(),
                 empty->get_type_name().c_str());
    return kExitUsage;
  }
  const base::Result<ExitCode> result = command->run();
  if (result.ok()) return *result;
  std::fprintf(stderr, "gpushare %s: %s\n", command->name(),
               base::to_printable_lines(result.status().message()).c_str());
  return exit_code(result.status());
}

}  // namespace gpushare::cli
