// SPDX-License-Identifier: Apache-2.0
#include "executor/serving/iteration_work.hpp"

#include <exception>
#include <string>
#include <thread>

#include "base/cancel.hpp"
#include "executor/serving/request_server.hpp"

namespace gpushare::executor {
namespace {

// All that it refers to outlives it, because whoever submits it waits for its ticket.
class IterationWork final : public Work {
 public:
  IterationWork(const void* server, const char* what, const IterationFunction& function,
                base::Status& outcome)
      : server_(server), what_(what), function_(function), outcome_(outcome) {}
  // Returns OK whatever the function did, because a bad batch or step is no reason to end the session.
  GPUSHARE_CATCHES_FORCED_UNWIND base::Status run(const std::shared_ptr<Iteration>& iteration) override {
    const InsideServer inside(server_);
    try {
      outcome_ = function_(iteration);
    } catch (const std::exception& error) {
      outcome_ = base::Status(GPUSHARE_CALLBACK_FAILED, error.what());
    } catch (const base::ForcedUnwind&) {
      throw;
    } catch (...) {
      outcome_ =
          base::Status(GPUSHARE_CALLBACK_FAILED,
                       std::string("the ") + what_ + " function threw something that is no std::exception");
    }
    return base::ok_status();
  }

 private:
  const void* const server_;
  const char* const what_;
  const IterationFunction& function_;
  base::Status& outcome_;
};

}  // namespace

base::Status run_as_iteration(Session& session, const void* server, const char* what,
                              const IterationFunction& function, base::Status& outcome) {
  std::unique_ptr<Work> work = std::make_unique<IterationWork>(server, what, function, outcome);
  GPUSHARE_ASSIGN_OR_RETURN(const std::shared_ptr<Ticket> ticket, session.submit(work));
  while (true) {
    try {
      return ticket->wait(UINT64_MAX);
    } catch (...) {  // no memory to wait with; the work is queued or runs
      std::this_thread::yield();
    }
  }
}

bool session_ended(const Session& session, const base::Status& status) {
  if (status.code() == GPUSHARE_CANCELLED || status.code() == GPUSHARE_DEVICE_LOST) return true;
  if (status.code() != GPUSHARE_INVALID_STATE) return false;
  // An iteration that was abandoned may have this code, too.
  const SessionState state = session.info().state;
  return session.dropped() || state == SessionState::kCancelled || state == SessionState::kFailed;
}

}  // namespace gpushare::executor
