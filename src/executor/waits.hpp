// waits.hpp: for parts that wait for a session's work without a wait of the session's own.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "base/status.hpp"
#include "executor/runtime.hpp"

namespace gpushare::executor {

// INVALID_STATE if the session's next iteration waits for one that the calling thread has open: a wait for the session's work
// would be one for the thread itself. Does not block.
base::Status check_wait_for(const Session& session);

}  // namespace gpushare::executor
