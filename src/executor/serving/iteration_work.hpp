// iteration_work.hpp: a function of the caller's as an iteration of a session, which is waited for. Batches and steps run so.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>

#include "base/status.hpp"
#include "executor/runtime.hpp"

namespace gpushare::executor {

// Called on the lane's thread in the session's turn; enqueues work on the iteration's stream.
using IterationFunction = std::function<base::Status(const std::shared_ptr<Iteration>&)>;

// Submits `function` to the session, and blocks until the device has finished its work. The function runs inside `server`
// (InsideServer). `outcome` is what it returned, CALLBACK_FAILED if it threw; a bad outcome does not end the session. `what`
// names the function in messages ("batch", "step"). Errors: those of Session::submit and Ticket::wait; `outcome` is then
// unchanged unless the function was called. Throws only before the function is submitted: when this has returned, nothing
// refers to the arguments.
base::Status run_as_iteration(Session& session, const void* server, const char* what,
                              const IterationFunction& function, base::Status& outcome);

// The session runs nothing more, after run_as_iteration said `status`. An iteration that is abandoned alone, because its stream still
// captured, has a status that sessions end with, too.
bool session_ended(Session& session, const base::Status& status);

}  // namespace gpushare::executor
