// `gpushare generate`: the manual page, and completion for shells, from the declarations that --help prints.
// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <functional>
#include <string>

#include "cli/command.hpp"
#include "cli/options.hpp"
#include "cli/output.hpp"
#include "gpushare/version.h"

namespace gpushare::cli {
namespace {

std::vector<const CLI::App*> commands_of(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App*) { return true; });
}

std::string path_of(const CLI::App& app) {
  return app.get_parent() == nullptr ? app.get_name() : path_of(*app.get_parent()) + ' ' + app.get_name();
}

// The app and all of its commands, each before its own.
void each_app(const CLI::App& app, const std::function<void(const CLI::App&)>& visit) {
  visit(app);
  for (const CLI::App* command : commands_of(app)) each_app(*command, visit);
}

// Text for troff: no line of it is a request, and a hyphen is what one types.
std::string troff(const std::string& text) {
  std::string out;
  for (const char each : text) {
    if ((out.empty() || out.back() == '\n') && (each == '.' || each == '\'')) out += "\\&";
    if (each == '\\')
      out += "\\e";
    else if (each == '-')
      out += "\\-";
    else
      out += each;
  }
  return out;
}

std::string names_of(const CLI::Option& option) {
  std::string out;
  for (const std::string& name : option.get_snames()) out += (out.empty() ? "-" : ", -") + name;
  for (const std::string& name : option.get_lnames()) out += (out.empty() ? "--" : ", --") + name;
  return out;
}

std::string manual(const CLI::App& root) {
  std::string out = std::string(".TH GPUSHARE 1 \"\" \"gpushare ") + GPUSHARE_VERSION_STRING +
                    "\" \"User Commands\"\n.SH NAME\ngpushare \\- many deep-learning jobs sharing one GPU\n"
                    ".SH SYNOPSIS\n.B gpushare\n.I COMMAND\n[\\fIOPTIONS\\fR]\n";
  each_app(root, [&](const CLI::App& app) {
    out += app.get_parent() == nullptr
               ? ".SH OPTIONS\n"
               : ".SH \"" + troff(path_of(app)) + "\"\n" + troff(app.get_description()) + ".\n";
    for (const CLI::Option* option : app.get_options()) {
      out += ".TP\n\\fB" + troff(option->get_positional() ? option->get_type_name() : names_of(*option)) +
             "\\fR";
      if (!option->get_positional() && option->get_type_size() != 0)
        out += " \\fI" + troff(option->get_type_name()) + "\\fR";
      out += '\n' + troff(option->get_description()) + '\n';
    }
    out += ".PP\n.nf\n" + troff(app.get_footer()) + "\n.fi\n";
  });
  return out;
}

std::string words_of(const CLI::App& app) {
  std::string out;
  for (const CLI::App* command : commands_of(app)) out += command->get_name() + ' ';
  for (const CLI::Option* option : app.get_options())
    for (const std::string& name : option->get_lnames()) out += "--" + name + ' ';
  if (!out.empty()) out.pop_back();
  return out;
}

// Completes commands and options; the value of an option, and a program's arguments, as files.
std::string bash(const CLI::App& root) {
  std::string out =
      "# bash completion for gpushare, from `gpushare generate bash`.\n_gpushare() {\n"
      "  local word=${COMP_WORDS[COMP_CWORD]} path=gpushare i\n"
      "  for ((i = 1; i < COMP_CWORD; ++i)); do\n"
      "    [[ ${COMP_WORDS[i]} == -- ]] && return\n    case \"$path ${COMP_WORDS[i]}\" in\n";
  std::string cases, words;
  each_app(root, [&](const CLI::App& app) {
    if (app.get_parent() != nullptr) cases += (cases.empty() ? "      '" : "|'") + path_of(app) + "'";
    words +=
        "    '" + path_of(app) + "') COMPREPLY=($(compgen -W '" + words_of(app) + "' -- \"$word\")) ;;\n";
  });
  out += cases + ") path+=\" ${COMP_WORDS[i]}\" ;;\n    esac\n  done\n";
  out += "  [[ $path != gpushare && $word != -* && ${COMP_WORDS[COMP_CWORD-1]} == -* ]] && return\n";
  out +=
      "  case $path in\n" + words + "  esac\n}\ncomplete -o bashdefault -o default -F _gpushare gpushare\n";
  return out;
}

// A description inside of _arguments' '--option[description]'.
std::string zsh_text(const std::string& text) {
  std::string out;
  for (const char each : text) {
    if (each == '[' || each == ']' || each == ':' || each == '\\') out += '\\';
    if (each == '\'')
      out += "'\\''";
    else
      out += each;
  }
  return out;
}

std::string zsh_arguments(const CLI::App& app) {
  std::string out;
  for (const CLI::Option* option : app.get_options())
    for (const std::string& name : option->get_lnames()) {
      out += " \\\n        '--" + name + "[" + zsh_text(option->get_description()) + "]";
      if (option->get_type_size() != 0) out += ":" + zsh_text(option->get_type_name()) + ":_files";
      out += "'";
    }
  return out;
}

std::string zsh(const CLI::App& root) {
  std::string out =
      "#compdef gpushare\n# zsh completion for gpushare, from `gpushare generate zsh`.\n_gpushare() {\n  "
      "local path=gpushare i\n"
      "  for ((i = 2; i < CURRENT; ++i)); do\n    case \"$path ${words[i]}\" in\n      ";
  std::string cases, arguments;
  each_app(root, [&](const CLI::App& app) {
    if (app.get_parent() != nullptr) cases += (cases.empty() ? "'" : "|'") + path_of(app) + "'";
    arguments += "    '" + path_of(app) + "')\n";
    if (const auto commands = commands_of(app); !commands.empty()) {
      arguments += "      local -a commands=(";
      for (const CLI::App* command : commands)
        arguments += "\n        '" + command->get_name() + ":" + zsh_text(command->get_description()) + "'";
      arguments += ")\n      [[ $words[CURRENT] == -* ]] || { _describe command commands; return }\n";
    }
    arguments += "      _arguments" + zsh_arguments(app) + " \\\n        '*:file:_files' ;;\n";
  });
  return out + cases + ") path+=\" ${words[i]}\" ;;\n    esac\n  done\n  case $path in\n" + arguments +
         "  esac\n}\n_gpushare \"$@\"\n";
}

class GenerateCommand final : public Command {
 public:
  const char* name() const override { return "generate"; }
  const char* summary() const override { return "Write the manual page, or completion for a shell"; }
  const char* help() const override {
    return R"(Writes to stdout what packages install: the manual page, or what completes commands and options in bash or zsh. All of it
is made of what --help prints.

Examples:
  gpushare generate man
  gpushare generate bash
  gpushare generate zsh

JSON: none; there is no --json.

Exit codes: 0 written; 1 stdout cannot be written; 2 bad usage.
)";
  }
  void declare(CLI::App& app) override {
    app_ = &app;
    app.add_option("KIND", kind_, "man, bash or zsh")->type_name("man|bash|zsh")->required();
  }
  base::Result<ExitCode> run() override {
    const CLI::App& root = *app_->get_parent();
    std::string text;
    if (kind_ == "man")
      text = manual(root);
    else if (kind_ == "bash")
      text = bash(root);
    else if (kind_ == "zsh")
      text = zsh(root);
    else
      return bad_option("KIND", kind_, "there are man, bash and zsh");
    GPUSHARE_RETURN_IF_ERROR(write_stdout_bytes(text));
    return kExitOk;
  }

 private:
  CLI::App* app_ = nullptr;
  std::string kind_;
};

}  // namespace

std::unique_ptr<Command> make_generate_command() {
  return std::make_unique<GenerateCommand>();
}

}  // namespace gpushare::cli
