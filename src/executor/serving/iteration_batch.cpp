// SPDX-License-Identifier: Apache-2.0
#include "executor/serving/iteration_batch.hpp"

#include <utility>

#include "base/clock.hpp"
#include "executor/serving/iteration_work.hpp"

namespace gpushare::executor {

RequestServer::RunBatch run_as_iterations(std::shared_ptr<Session> session, BatchFunction function) {
  return [session = std::move(session), function = std::move(function)](const sched::slo::Batch& batch,
                                                                        BatchReport& report) -> base::Status {
    const IterationFunction run = [&](const std::shared_ptr<Iteration>& iteration) {
      report.started_ns = base::host_now_ns();
      return function(batch, iteration, report);
    };
    (void)session->set_worth(batch.worth.cost, batch.worth.until_ns,
                             report.waiting);  // of a session that ended: run_as_iteration says so
    base::Status outcome;
    const base::Status ran = run_as_iteration(*session, report.server, "batch", run, outcome);
    report.model_ended = session_ended(*session, ran);
    return ran.ok() ? outcome : ran;
  };
}

}  // namespace gpushare::executor
