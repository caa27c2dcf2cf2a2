// report.hpp: a run as one HTML page that needs nothing else: no script, no font, no network. Follows the
// reader's light or dark setting, prints, and repeats its charts in words and tables.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "cli/run_result.hpp"

namespace gpushare::cli {

std::string render_report(const RunResult& result);

}  // namespace gpushare::cli
