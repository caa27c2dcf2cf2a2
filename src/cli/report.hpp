// report.hpp: a run as one HTML page that needs nothing else: no script, no font, no network. Follows the
// reader's light or dark setting, prints, and says in words and tables what its charts show.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "cli/run_result.hpp"

namespace gpushare::cli {

std::string render_report(const RunResult& result);

}  // namespace gpushare::cli
