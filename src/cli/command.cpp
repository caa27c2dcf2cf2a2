// SPDX-License-Identifier: Apache-2.0
#include "cli/command.hpp"

namespace gpushare::cli {

ExitCode exit_code(const base::Status& status) {
  switch (status.code()) {
    case GPUSHARE_OK:
      return kExitOk;
    case GPUSHARE_UNAVAILABLE:
      return kExitUnavailable;
    case GPUSHARE_INVALID_ARGUMENT:
    case GPUSHARE_NOT_FOUND:
    case GPUSHARE_ALREADY_EXISTS:
    case GPUSHARE_UNSUPPORTED:
    case GPUSHARE_MALFORMED_INPUT:
      return kExitUsage;
    default:
      return kExitFailed;
  }
}

std::vector<std::unique_ptr<Command>> commands() {
  std::vector<std::unique_ptr<Command>> out;
  out.push_back(make_run_command());
  out.push_back(make_replay_command());
  out.push_back(make_serve_command());
  out.push_back(make_plan_command());
  out.push_back(make_cluster_command());
  out.push_back(make_exec_command());
  out.push_back(make_daemon_command());
  out.push_back(make_top_command());
  out.push_back(make_devices_command());
  out.push_back(make_generate_command());
  return out;
}

}  // namespace gpushare::cli
