// SPDX-License-Identifier: Apache-2.0
#include "executor/serving/iteration_batch.hpp"

#include <exception>
#include <utility>

#include "base/cancel.hpp"
#include "base/clock.hpp"

namespace gpushare::executor {
namespace {

using sched::slo::Batch;

// One batch. Everything outlives it: whoever submits it waits for its ticket.
class BatchWork final : public Work {
 public:
  BatchWork(const BatchFunction& function, const Batch& batch, BatchReport& report, base::Status& outcome)
      : function_(function), batch_(batch), report_(report), outcome_(outcome) {}
  // OK whatever the batch did: a bad batch is no reason to end the session.
  GPUSHARE_CATCHES_FORCED_UNWIND base::Status run(const std::shared_ptr<Iteration>& iteration) override {
    const InsideServer inside(report_.server);
    report_.started_ns = base::host_now_ns();
    try {
      outcome_ = function_(batch_, iteration, report_);
    } catch (const std::exception& error) {
      outcome_ = base::Status(GPUSHARE_CALLBACK_FAILED, error.what());
    } catch (const base::ForcedUnwind&) {
      throw;
    } catch (...) {
      outcome_ = base::Status(GPUSHARE_CALLBACK_FAILED,
                              "the batch function threw something that is no std::exception");
    }
    return base::ok_status();
  }

 private:
  const BatchFunction& function_;
  const Batch& batch_;
  BatchReport& report_;
  base::Status& outcome_;
};

bool session_ended(const base::Status& status) {
  return status.code() == GPUSHARE_INVALID_STATE || status.code() == GPUSHARE_CANCELLED ||
         status.code() == GPUSHARE_DEVICE_LOST;
}

}  // namespace

RequestServer::RunBatch run_as_iterations(std::shared_ptr<Session> session, BatchFunction function) {
  return [session = std::move(session), function = std::move(function)](const Batch& batch,
                                                                        BatchReport& report) -> base::Status {
    base::Status outcome;
    std::unique_ptr<Work> work = std::make_unique<BatchWork>(function, batch, report, outcome);
    base::Result<std::shared_ptr<Ticket>> ticket = session->submit(work);
    const base::Status ran = ticket.ok() ? (*ticket)->wait(UINT64_MAX) : ticket.status();
    report.model_ended = session_ended(ran);
    return ran.ok() ? outcome : ran;
  };
}

}  // namespace gpushare::executor
