// cli: the `gpushare` tool: one file a subcommand, plus what they share (tables, JSON, series, the HTML
// report). Sits on top of everything: on the public C++ API for real devices, on src/sim and the tools of
// src/memory for the rest. Nothing includes it.
//
// command.hpp: what a subcommand is, and how one joins: derive from Command in a file of its own, declare its
// make_ function here, and add it to commands() in command.cpp. Only main.cpp ends the process.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/status.hpp"

namespace CLI {
class App;
}

namespace gpushare::cli {

// Exit codes of the tool. Every --help and docs/cli.md document them, and scripts rely on them.
enum ExitCode : int {
  kExitOk = 0,
  kExitFailed = 1,       // the run failed: a job did not finish, an output could not be written
  kExitUsage = 2,        // bad usage or bad input: fix the command line or the file
  kExitUnavailable = 3,  // no such device on this machine, or it cannot be used
};

// The whole tool but for how its process ends: main() calls it once. Returns the exit code. Throws std::bad_alloc, and what
// CLI11 throws for options that are declared wrongly.
int run_command_line(int argc, char** argv);

// The exit code for a failing status: by whom it has to be mended.
ExitCode exit_code(const base::Status& status);

// A subcommand. run_command_line() makes all of them, parses, and runs the one that was named.
class Command {
 public:
  virtual ~Command() = default;
  virtual const char* name() const = 0;
  // One line for the list of commands.
  virtual const char* summary() const = 0;
  // Paragraphs, a worked example and exit codes: the footer of --help. Examples stand on lines starting with
  // "  gpushare "; tests run them.
  virtual const char* help() const = 0;
  // Adds options to `app`, bound to members of this object.
  virtual void declare(CLI::App& app) = 0;
  // Runs after a successful parse. Results go to stdout, everything else to stderr. A status that is not OK
  // is printed by the caller as "gpushare <name>: message" and becomes exit_code(status); a command whose run
  // finished but went badly (a job failed) prints why itself and returns kExitFailed.
  virtual base::Result<ExitCode> run() = 0;
};

std::unique_ptr<Command> make_run_command();
std::unique_ptr<Command> make_replay_command();
std::unique_ptr<Command> make_serve_command();
std::unique_ptr<Command> make_plan_command();
std::unique_ptr<Command> make_exec_command();
std::unique_ptr<Command> make_daemon_command();
std::unique_ptr<Command> make_top_command();
std::unique_ptr<Command> make_devices_command();
std::unique_ptr<Command> make_cluster_command();
std::unique_ptr<Command> make_generate_command();

// All commands, in the order in which --help lists them.
std::vector<std::unique_ptr<Command>> commands();

}  // namespace gpushare::cli
