// cluster_command.hpp: the commands under `gpushare cluster`, a file each.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "cli/command.hpp"

namespace gpushare::cli {

// One of them; run as a Command is.
std::unique_ptr<Command> make_cluster_plan_command();
std::unique_ptr<Command> make_cluster_run_command();
std::unique_ptr<Command> make_cluster_schema_command();

// A result document as tables: a row a result, then a table for each list or object inside one.
std::string render_cluster_result(const nlohmann::ordered_json& document);

}  // namespace gpushare::cli
