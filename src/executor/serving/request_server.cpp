// SPDX-License-Identifier: Apache-2.0
#include "executor/serving/request_server.hpp"

#include "base/flat_hash.hpp"

#include <algorithm>
#include <chrono>
#include <deque>
#include <exception>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "base/mutex.hpp"

namespace gpushare::executor {

using sched::slo::Batch;
using sched::slo::Batcher;
using sched::slo::Decision;
using sched::slo::Drop;
using sched::slo::DropReason;
using sched::slo::kNever;
using sched::slo::Request;
using sched::slo::RequestId;

class RequestServer::Impl {
 public:
  Impl(std::unique_ptr<Batcher> batcher, RunBatch run, Done done)
      : run_(std::move(run)), done_(std::move(done)), batcher_(std::move(batcher)) {
    decider_ = std::thread([this] { decide(); });
    runner_ = std::thread([this] { run_batches(); });
  }
  ~Impl() { stop(); }

  base::Status submit(const Request& request) {
    base::MutexLock lock(mutex_);
    if (draining_)
      return base::Status(GPUSHARE_INVALID_STATE,
                          "the request server takes no more requests: it is draining or stopped");
    if (deadlines_.contains(request.id))
      return base::Status(GPUSHARE_ALREADY_EXISTS, base::format("request %llu is not answered yet",
                                                                static_cast<unsigned long long>(request.id)));
    GPUSHARE_RETURN_IF_ERROR(batcher_->arrive(request, base::host_now_ns()));
    deadlines_.emplace(request.id, request.deadline_ns);
    poke();
    return base::ok_status();
  }

  bool cancel(RequestId id) {
    base::MutexLock lock(mutex_);
    const bool waited = batcher_->cancel(id, base::host_now_ns());
    if (waited) poke();
    return waited;
  }

  void observe(uint32_t model, uint32_t application, uint64_t execution_ns) {
    base::MutexLock lock(mutex_);
    batcher_->observe(model, application, execution_ns);
  }
  void observe_batch(uint32_t model, uint32_t k, uint64_t longest_ns, uint64_t device_ns) {
    base::MutexLock lock(mutex_);
    batcher_->observe_batch(model, k, longest_ns, device_ns);
  }

  size_t pending() const {
    base::MutexLock lock(mutex_);
    return batcher_->pending();
  }
  uint64_t decisions() const {
    base::MutexLock lock(mutex_);
    return decisions_;
  }
  uint64_t decision_ns() const {
    base::MutexLock lock(mutex_);
    return decision_ns_;
  }

  void drain() {
    base::MutexLock lock(mutex_);
    draining_ = true;
    poke();
    while (!deadlines_.empty()) answered_.wait(mutex_);
  }

  void stop() {
    {
      base::MutexLock lock(mutex_);
      draining_ = true;
      if (!stopping_) {
        stopping_ = true;
        // What waits is cancelled; what the device holds already runs to its end.
        std::vector<RequestId> ids;
        ids.reserve(deadlines_.size());
        for (const auto& [id, deadline] : deadlines_) ids.push_back(id);
        for (RequestId id : ids) batcher_->cancel(id, base::host_now_ns());
      }
      poke();
      while (!deadlines_.empty()) answered_.wait(mutex_);
      ended_ = true;
      poke();
      work_.notify_all();
    }
    if (decider_.joinable()) decider_.join();
    if (runner_.joinable()) runner_.join();
  }

 private:
  void poke() GPUSHARE_REQUIRES(mutex_) {
    poked_ = true;
    changed_.notify_all();
  }

  // Moves the batcher's drops into outcomes, to be reported without the lock.
  void take_drops(std::vector<RequestOutcome>& out) GPUSHARE_REQUIRES(mutex_) {
    drops_.clear();
    batcher_->take_drops(drops_);
    for (const Drop& drop : drops_) {
      RequestOutcome outcome;
      outcome.id = drop.id;
      outcome.status = drop.reason == DropReason::kCancelled ? GPUSHARE_CANCELLED : GPUSHARE_TIMED_OUT;
      outcome.dropped = drop.reason;
      out.push_back(outcome);
    }
  }

  // Calls done_ for each and forgets them. The lock is given up meanwhile.
  void report(std::vector<RequestOutcome>& outcomes) GPUSHARE_REQUIRES(mutex_) {
    if (outcomes.empty()) return;
    for (RequestOutcome& outcome : outcomes) {
      outcome.finished_ns = base::host_now_ns();
      outcome.deadline_ns = deadlines_.find(outcome.id)->second;
    }
    mutex_.unlock();
    for (const RequestOutcome& outcome : outcomes) done_(outcome);
    mutex_.lock();
    for (const RequestOutcome& outcome : outcomes) deadlines_.erase(outcome.id);
    outcomes.clear();
    if (deadlines_.empty()) answered_.notify_all();
  }

  void decide() {
    std::vector<RequestOutcome> outcomes;
    base::MutexLock lock(mutex_);
    while (true) {
      poked_ = false;
      const uint64_t now = base::host_now_ns();
      Decision decision = batcher_->next(now, in_flight_);
      ++decisions_;
      decision_ns_ += base::host_now_ns() - now;
      take_drops(outcomes);
      if (decision.batch) {
        ++in_flight_;
        waiting_.push_back(std::move(*decision.batch));
        work_.notify_one();
        poked_ = true;  // policies that plan ahead may have more
      }
      report(outcomes);
      if (ended_) return;
      if (poked_) continue;
      if (decision.wake_ns == kNever) {
        while (!poked_) changed_.wait(mutex_);
      } else {
        const uint64_t later = base::host_now_ns();
        const uint64_t sleep = decision.wake_ns > later ? decision.wake_ns - later : 0;
        const auto until = std::chrono::steady_clock::now() +
                           std::chrono::nanoseconds(std::min<uint64_t>(sleep, 3'600'000'000'000ull));
        while (!poked_ && changed_.wait_until(mutex_, until)) {
        }
      }
    }
  }

  void run_batches() {
    std::vector<RequestOutcome> outcomes;
    base::MutexLock lock(mutex_);
    while (true) {
      while (waiting_.empty() && !ended_) work_.wait(mutex_);
      if (waiting_.empty()) return;
      Batch batch = std::move(waiting_.front());
      waiting_.pop_front();
      uint64_t now = base::host_now_ns();
      if (batch.not_before_ns > now) {
        lock.unlock();
        std::this_thread::sleep_for(std::chrono::nanoseconds(batch.not_before_ns - now));
        lock.lock();
        now = base::host_now_ns();
      }
      if (now > batch.latest_start_ns) {
        batcher_->rejected(batch.id, now);
        --in_flight_;
        poke();  // the decider reports the drops
        continue;
      }
      batcher_->started(batch.id, now);
      lock.unlock();
      base::Status status;
      try {
        status = run_(batch);
      } catch (const std::exception& error) {
        status = base::Status(GPUSHARE_CALLBACK_FAILED, error.what());
      } catch (...) {
        status = base::Status(GPUSHARE_CALLBACK_FAILED,
                              "the batch function threw something that is no std::exception");
      }
      lock.lock();
      const uint64_t end = base::host_now_ns();
      batcher_->finished(batch.id, end - now, end);
      --in_flight_;
      poke();
      for (RequestId id : batch.requests) {
        RequestOutcome outcome;
        outcome.id = id;
        outcome.status = status.ok() ? GPUSHARE_OK : GPUSHARE_CALLBACK_FAILED;
        outcomes.push_back(outcome);
      }
      report(outcomes);
    }
  }

  const RunBatch run_;
  const Done done_;
  mutable base::Mutex mutex_;
  base::ConditionVariable changed_;   // for the decider
  base::ConditionVariable work_;      // for the runner
  base::ConditionVariable answered_;  // for drain and stop
  std::unique_ptr<Batcher> batcher_ GPUSHARE_PT_GUARDED_BY(mutex_);
  base::FlatHashMap<RequestId, uint64_t> deadlines_
      GPUSHARE_GUARDED_BY(mutex_);  // accepted, not yet answered
  std::deque<Batch> waiting_ GPUSHARE_GUARDED_BY(mutex_);
  std::vector<Drop> drops_ GPUSHARE_GUARDED_BY(mutex_);
  uint32_t in_flight_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  bool poked_ GPUSHARE_GUARDED_BY(mutex_) = false;
  bool draining_ GPUSHARE_GUARDED_BY(mutex_) = false;
  bool stopping_ GPUSHARE_GUARDED_BY(mutex_) = false;
  bool ended_ GPUSHARE_GUARDED_BY(mutex_) = false;
  uint64_t decisions_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  uint64_t decision_ns_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  std::thread decider_, runner_;
};

base::Result<std::unique_ptr<RequestServer>> RequestServer::start(const RequestServerOptions& options,
                                                                  RunBatch run, Done done) {
  GPUSHARE_ASSIGN_OR_RETURN(std::unique_ptr<Batcher> batcher,
                            sched::slo::make_batcher(options.policy, options.batcher));
  const base::Result<uint32_t> model = batcher->add_model(options.model);
  if (!model.ok()) return model.status();
  return std::unique_ptr<RequestServer>(
      new RequestServer(std::make_unique<Impl>(std::move(batcher), std::move(run), std::move(done))));
}

RequestServer::RequestServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
RequestServer::~RequestServer() = default;
base::Status RequestServer::submit(const Request& request) {
  return impl_->submit(request);
}
bool RequestServer::cancel(RequestId id) {
  return impl_->cancel(id);
}
void RequestServer::observe(uint32_t model, uint32_t application, uint64_t execution_ns) {
  impl_->observe(model, application, execution_ns);
}
void RequestServer::observe_batch(uint32_t model, uint32_t k, uint64_t longest_ns, uint64_t device_ns) {
  impl_->observe_batch(model, k, longest_ns, device_ns);
}
size_t RequestServer::pending() const {
  return impl_->pending();
}
uint64_t RequestServer::decisions() const {
  return impl_->decisions();
}
uint64_t RequestServer::decision_ns() const {
  return impl_->decision_ns();
}
void RequestServer::drain() {
  impl_->drain();
}
void RequestServer::stop() {
  impl_->stop();
}

}  // namespace gpushare::executor
