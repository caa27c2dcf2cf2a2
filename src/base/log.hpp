// log.hpp: the process-wide log sink behind gpushare_log_set. Lines below the level cost one atomic load.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace gpushare::base {

enum LogLevel : int32_t { kError = 0, kWarning = 1, kInfo = 2, kDebug = 3 };
using LogFunction = void (*)(void* user_data, int32_t level, const char* message);

// null restores the default sink, stderr.
void set_log_sink(LogFunction function, void* user_data, int32_t level);
bool log_enabled(int32_t level);
void log(int32_t level, const std::string& message);

}  // namespace gpushare::base
