// The `gpushare` tool. This file is the only place that decides how the process ends.
// SPDX-License-Identifier: Apache-2.0
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>

#include "cli/command.hpp"

namespace {

// The last resort where an exception cannot be caught: out of a destructor, as of a JSON document that has no memory to
// be freed with, or out of a thread. Files are replaced whole or not at all, so nothing half-written stays.
[[noreturn]] void give_up() {
  const char* why = "internal error, please report it";
  try {
    if (const std::exception_ptr error = std::current_exception()) std::rethrow_exception(error);
  } catch (const std::bad_alloc&) {
    why = "out of host memory";
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpushare: %s\n", error.what());
  } catch (...) {
  }
  std::fprintf(stderr, "gpushare: %s\n", why);
  std::_Exit(gpushare::cli::kExitFailed);
}

}  // namespace

int main(int argc, char** argv) {
  // A reader that leaves early (gpushare ... | head) is an error of write(), not the end of the process.
  std::set_terminate(give_up);
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // so is a file that would grow past the limit of ulimit -f
  try {
    return gpushare::cli::run_command_line(argc, argv);
  } catch (const std::bad_alloc&) {
    std::fputs("gpushare: out of host memory\n", stderr);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpushare: internal error, please report it: %s\n", error.what());
  }
  return gpushare::cli::kExitFailed;
}
