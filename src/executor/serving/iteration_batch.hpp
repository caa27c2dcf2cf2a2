// iteration_batch.hpp: a batch as an iteration of a session: what a request server's model runs on the
// executor. The session's turn in its lane comes as for any other iteration.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>

#include "executor/runtime.hpp"
#include "executor/serving/request_server.hpp"

namespace gpushare::executor {

// Called on the lane's thread; enqueues the batch's work on the iteration's stream. A status that is not OK,
// or an exception, fails the batch; the session goes on. In the report it may fill in execution_ns.
using BatchFunction =
    std::function<base::Status(const sched::slo::Batch&, const std::shared_ptr<Iteration>&, BatchReport&)>;

// Each batch is submitted to `session` and waited for until the device has finished it; it counts from the
// call of `function` on. When the session has ended (closed, cancelled, failed, its device lost), so has the
// model. Close the session, or open it resident, rather than leave it queued for memory: a batch waits with it.
RequestServer::RunBatch run_as_iterations(std::shared_ptr<Session> session, BatchFunction function);

}  // namespace gpushare::executor
