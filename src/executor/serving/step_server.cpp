// SPDX-License-Identifier: Apache-2.0
#include "executor/serving/step_server.hpp"

#include <algorithm>
#include <mutex>
#include <system_error>
#include <utility>

#include <absl/cleanup/cleanup.h>

#include "base/cancel.hpp"
#include "base/clock.hpp"
#include "base/flat_hash.hpp"
#include "base/log.hpp"
#include "base/mutex.hpp"
#include "base/service_thread.hpp"
#include "executor/serving/iteration_work.hpp"
#include "executor/serving/pulse.hpp"
#include "executor/serving/request_server.hpp"
#include "executor/waits.hpp"
#include "gpushare/gpushare.h"

namespace gpushare::executor {

using sched::slo::kNever;
using sched::slo::RequestId;
using sched::slo::Step;
using sched::slo::StepBatcher;
using sched::slo::StepEvent;
using sched::slo::StepRequest;

namespace {

// The step after the running one, for whoever ends that: then its function has said who is done, and the step batcher has not been
// told yet.
class StepAfter final : public WaitingWork {
 public:
  void foresee(const sched::slo::NextStep& next) {
    base::MutexLock lock(mutex_);
    next_ = next;
  }
  void set_waiting(const sched::slo::Waiting& waiting) noexcept {
    base::MutexLock lock(mutex_);
    next_.waiting = waiting;
  }
  void nothing() noexcept {
    base::MutexLock lock(mutex_);
    next_.others = {};
    next_.members.clear();
    next_.waiting.clear();
  }
  // `step` is read until end().
  void begin(const RunningStep& step) noexcept {
    base::MutexLock lock(mutex_);
    running_ = &step;
    status_ = GPUSHARE_OK;
  }
  void returned(int32_t status) noexcept {
    base::MutexLock lock(mutex_);
    status_ = status;
  }
  // Until the next foresee() only those that wait are known.
  void end() noexcept {
    base::MutexLock lock(mutex_);
    next_.members.clear();
    running_ = nullptr;
  }
  Worth worth() const noexcept override {
    base::MutexLock lock(mutex_);
    sched::slo::StepResult first;
    if (running_ != nullptr) first = {status_, running_->done, running_->statuses, {}};
    const sched::slo::Worth worth = next_.worth(base::host_now_ns(), first);
    return {worth.cost, worth.until_ns};
  }

 private:
  mutable base::Mutex mutex_;  // nothing is called and no other lock taken under it
  sched::slo::NextStep next_ GPUSHARE_GUARDED_BY(mutex_);
  const RunningStep* running_ GPUSHARE_GUARDED_BY(mutex_) = nullptr;
  int32_t status_ GPUSHARE_GUARDED_BY(mutex_) = GPUSHARE_OK;
};

class StepServerImpl final : public StepServer {
 public:
  StepServerImpl(std::unique_ptr<StepBatcher> batcher, size_t max_pending, uint32_t max_members,
                 std::shared_ptr<Session> session, StepFunction function)
      : most_held_(2 * std::min(max_pending, size_t{1} << 40) + max_members + 4096),
        session_(std::move(session)),
        function_(std::move(function)),
        batcher_(std::move(batcher)) {
    teller_ = base::ServiceThread([this] { tell_all(); });
    try {
      runner_ = base::ServiceThread([this] { run_steps(); });
    } catch (...) {
      finish();
      throw;
    }
  }
  ~StepServerImpl() override { finish(); }

  base::Status submit(const StepRequest& request, Answer answer, void* tag) override {
    base::MutexLock lock(mutex_);
    if (ended_status_.code() == GPUSHARE_HOST_OUT_OF_MEMORY) return ended_status_;
    if (!ended_status_.ok())
      return {GPUSHARE_INVALID_STATE, "the step queue runs no more steps: " + ended_status_.message()};
    if (draining_)
      return {GPUSHARE_INVALID_STATE, "the step queue takes no more requests: it is draining or closed"};
    if (entries_.contains(request.id))
      return {GPUSHARE_ALREADY_EXISTS,
              base::format("request %llu is not answered yet", static_cast<unsigned long long>(request.id))};
    if (entries_.size() >= most_held_)
      return {GPUSHARE_QUEUE_FULL,
              base::format(
                  "request %llu: %zu requests are held, the limit; their answers are not taken fast enough",
                  static_cast<unsigned long long>(request.id), entries_.size())};
    const auto entry = entries_.try_emplace(request.id, std::make_unique<Entry>()).first;
    entry->second->news.id = request.id;
    entry->second->tag = tag;
    entry->second->answer = std::move(answer);
    const uint64_t now = base::host_now_ns();
    StepRequest arrived = request;
    if (arrived.arrival_ns == 0) arrived.arrival_ns = now;
    const uint64_t expires_ns = batcher_->expires_ns();
    base::Status status;
    try {
      status = batcher_->arrive(arrived, now);
    } catch (...) {
      entries_.erase(entry);
      end_all(no_memory_);
      throw;
    }
    if (!status.ok()) {
      entries_.erase(entry);
      return status;
    }
    next_->set_waiting(batcher_->next_step().waiting);
    changed();
    if (batcher_->expires_ns() < expires_ns) news_.notify_all();
    return {};
  }

  bool cancel(RequestId id) override {
    base::MutexLock lock(mutex_);
    if (!ended_status_.ok()) return false;
    try {
      const bool held = batcher_->cancel(id, base::host_now_ns());
      next_->set_waiting(batcher_->next_step().waiting);
      post();
      changed();
      return held;
    } catch (...) {
      end_all(no_memory_);
      throw;
    }
  }

  base::Status set_memory(uint64_t bytes) override {
    base::MutexLock lock(mutex_);
    GPUSHARE_RETURN_IF_ERROR(batcher_->set_memory(bytes));
    changed();
    return {};
  }

  Stats stats() const override {
    base::MutexLock lock(mutex_);
    Stats out;
    static_cast<sched::slo::StepStats&>(out) = batcher_->stats();
    if (!ended_status_.ok()) {
      out.pending = out.members = out.bytes = 0;
      out.failed += ended_count_;
    }
    out.held = entries_.size();
    out.step_ns = batcher_->time().step_ns();
    out.decode_ns = batcher_->time().decode_ns();
    out.prefill_ns = batcher_->time().prefill_ns();
    out.read_ns = batcher_->time().read_ns();
    return out;
  }

  base::Status drain(uint64_t timeout_ns) override {
    GPUSHARE_RETURN_IF_ERROR(may_wait("drained"));
    const base::Deadline deadline = base::Deadline::after(timeout_ns);
    base::MutexLock lock(mutex_);
    draining_ = true;
    while (!entries_.empty())
      if (!answered_.wait(mutex_, deadline) && !entries_.empty())
        return {GPUSHARE_TIMED_OUT, base::format("%zu requests are not answered yet", entries_.size())};
    return {};
  }

  base::Status stop() override {
    GPUSHARE_RETURN_IF_ERROR(may_wait("closed"));
    finish();
    return {};
  }

 private:
  // A request that is not answered yet. Its news waits here until it is told, and newer news replaces it. So answering
  // allocates nothing, and slow takers of answers cost no memory.
  struct Entry {
    void* tag = nullptr;
    Answer answer;
    StepEvent news;
    bool due = false;       // its news is to be told
    bool in_step = false;   // the step function may use its tag
    Entry* next = nullptr;  // of those with news
  };

  base::Status may_wait(const char* what) const GPUSHARE_EXCLUDES(mutex_) {
    if (InsideServer::is(this))
      return {GPUSHARE_INVALID_STATE,
              base::format("the step queue cannot be %s from a function that it called", what)};
    if (NoWaitScope::active())
      return {
          GPUSHARE_INVALID_STATE,
          base::format(
              "the step queue cannot be %s inside a function that the device or the runtime waits for (host "
              "function, progress function): its steps may need that",
              what)};
    bool idle = false;
    {
      base::MutexLock lock(mutex_);
      idle = entries_.empty();
    }
    return idle ? base::Status() : check_wait_for(*session_);
  }

  void finish() {
    {
      base::MutexLock lock(mutex_);
      draining_ = true;
      cancelling_ = true;
      if (ended_status_.ok())
        drop_some(base::host_now_ns());  // nobody joins from now on; tell_all() drops the rest
      while (!entries_.empty()) answered_.wait(mutex_);
      over_ = true;
      changed();
      news_.notify_all();
    }
    const std::lock_guard joining(join_mutex_);
    if (runner_.joinable()) runner_.join();
    if (teller_.joinable()) teller_.join();
  }

  void changed() GPUSHARE_REQUIRES(mutex_) {
    changed_ = true;
    work_.notify_all();
  }

  // News goes to the requests, in the order of its first appearance.
  void post() GPUSHARE_REQUIRES(mutex_) {
    events_.clear();
    batcher_->take_events(events_);
    for (const StepEvent& event : events_) post(*entries_.find(event.id)->second, event);
  }
  void post(Entry& entry, const StepEvent& event) noexcept GPUSHARE_REQUIRES(mutex_) {
    entry.news = event;
    news_.notify_all();
    if (std::exchange(entry.due, true)) return;
    entry.next = nullptr;
    (last_ == nullptr ? first_ : last_->next) = &entry;
    last_ = &entry;
  }

  // Called when the session has ended, or when the host had no memory for a step of the batcher, which may be half
  // done. Answers every request with `status`, and accepts no more. Allocates nothing.
  void end_all(const base::Status& status) noexcept GPUSHARE_REQUIRES(mutex_) {
    if (ended_status_.ok()) ended_status_ = status;
    ending_ = true;
    next_->nothing();
    news_.notify_all();
  }

  // Answers some requests, as drop_some() does. True while others are left.
  bool end_some() noexcept GPUSHARE_REQUIRES(mutex_) {
    constexpr size_t kMost = 1024;
    size_t count = 0;
    for (auto& [id, entry] : entries_) {
      if (entry->news.ended || entry->in_step) continue;  // run() calls end_all() again for the latter
      if (count++ == kMost) return true;
      StepEvent event = entry->news;
      event.ended = true;
      event.status = ended_status_.code();
      event.at_ns = base::host_now_ns();
      ++ended_count_;
      post(*entry, event);
    }
    return false;
  }

  // The thread that runs steps.
  void run_steps() {
    base::MutexLock lock(mutex_);
    RunningStep seen;
    while (!over_) {
      changed_ = false;
      uint64_t wake_ns = kNever;
      bool any = false;
      try {
        if (ended_status_.ok()) {
          const Step& step = batcher_->begin_step(base::host_now_ns());
          post();
          next_->foresee(batcher_->next_step());
          wake_ns = step.wake_ns;
          any = !step.empty();
          if (any) look(step, seen);
        }
      } catch (...) {
        end_all(no_memory_);
        continue;
      }
      if (any)
        run(seen);
      else
        sleep_until(wake_ns);
    }
  }

  void look(const Step& step, RunningStep& seen) GPUSHARE_REQUIRES(mutex_) {
    const auto tag = [this](RequestId id)
                         GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { return entries_.find(id)->second->tag; };
    seen.members = step.members;
    seen.left = step.left;
    seen.expected_ns = step.expected_ns;
    seen.worth = step.worth;
    seen.next = next_;
    seen.member_tags.clear();
    seen.left_tags.clear();
    for (const auto& member : seen.members) seen.member_tags.push_back(tag(member.id));
    for (RequestId id : seen.left) seen.left_tags.push_back(tag(id));
    seen.done.assign(seen.members.size(), 0);
    seen.statuses.assign(seen.members.size(), GPUSHARE_OK);
    seen.bytes.assign(seen.members.size(), UINT64_MAX);
    mark(seen, true);  // last: whoever is marked is answered by run() alone
  }

  void mark(const RunningStep& seen, bool in_step) GPUSHARE_REQUIRES(mutex_) {
    for (const auto& member : seen.members) entries_.find(member.id)->second->in_step = in_step;
    for (RequestId id : seen.left) entries_.find(id)->second->in_step = in_step;
  }

  void run(RunningStep& seen) GPUSHARE_REQUIRES(mutex_) {
    if (pulse_.begins(base::host_now_ns())) news_.notify_all();
    mutex_.unlock();
    base::Status outcome;
    uint64_t started_ns = 0;
    next_->begin(seen);
    const base::Status ran = submit_and_wait(seen, outcome, started_ns);
    next_->end();
    const bool over = session_ended(*session_, ran);
    mutex_.lock();
    const uint64_t end = base::host_now_ns();
    const bool known = !pulse_.ends(end) && started_ns != 0;
    mark(seen, false);
    if (over || !ended_status_.ok() || (started_ns == 0 && ran.code() == GPUSHARE_HOST_OUT_OF_MEMORY)) {
      end_all(ran.ok() ? no_memory_ : ran);
      return;
    }
    if (started_ns == 0 && ran.code() == GPUSHARE_QUEUE_FULL) {
      try {
        batcher_->undo_step();
      } catch (...) {
        end_all(no_memory_);
        return;
      }
      // The session has as much work queued as it may have, and sends no notice when there is less. So this thread
      // looks again.
      work_.wait(mutex_, base::Deadline::after(1'000'000));
      return;
    }
    sched::slo::StepResult result;
    result.status = ran.ok() ? outcome.code() : ran.code();
    result.done = seen.done;
    result.statuses = seen.statuses;
    result.bytes = seen.bytes;
    try {
      batcher_->end_step(result, known ? end - started_ns : 0, end);
      post();
    } catch (...) {
      end_all(no_memory_);
    }
  }

  base::Status submit_and_wait(RunningStep& seen, base::Status& outcome, uint64_t& started_ns) {
    try {
      const IterationFunction step = [&](const std::shared_ptr<Iteration>& iteration) {
        started_ns = base::host_now_ns();
        next_->returned(GPUSHARE_CALLBACK_FAILED);  // if it throws
        const base::Status status = function_(iteration, seen);
        next_->returned(status.code());
        return status;
      };
      (void)session_->set_worth(seen.worth.cost, seen.worth.until_ns,
                                seen.next);  // of a session that ended: run_as_iteration says so
      return run_as_iteration(*session_, this, "step", step, outcome);
    } catch (...) {
      return no_memory_;
    }
  }

  // If the time has passed already, more requests have expired than begin_step() drops at once. tell_all() drops the
  // rest between the answers, so that threads that submit do not wait for all of it.
  void sleep_until(uint64_t wake_ns) GPUSHARE_REQUIRES(mutex_) {
    const bool passed = wake_ns < base::host_now_ns();
    const base::Deadline wake = base::Deadline::at_ns(passed || wake_ns == kNever ? kNever : wake_ns + 1);
    while (!changed_ && work_.wait(mutex_, wake)) {
    }
  }

  // The thread that answers. While a step runs, which may last for ever, this thread also drops the requests whose time
  // is over. On close it drops all that wait.
  void tell_all() {
    base::MutexLock lock(mutex_);
    while (true) {
      if (first_ != nullptr) {
        tell_one();
        continue;
      }
      if (ending_) {
        ending_ = end_some();
        continue;
      }
      if (over_) return;
      const uint64_t now = base::host_now_ns();
      const uint64_t expires_ns = ended_status_.ok() ? batcher_->expires_ns() : kNever;
      if (ended_status_.ok() && (cancelling_ || expires_ns < now)) {
        drop_some(now);
      } else {
        sleep(now, expires_ns == kNever ? kNever : expires_ns + 1);
      }
    }
  }

  // The sleep of the thread that answers: until news, or at most until then; see Pulse.
  void sleep(uint64_t now_ns, uint64_t until_ns) GPUSHARE_REQUIRES(mutex_) {
    news_.wait(mutex_, base::Deadline::at_ns(pulse_.asleep(now_ns, until_ns)));
    pulse_.awake(base::host_now_ns());
  }

  // Threads that submit wait meanwhile. So only some requests are dropped at a time, and they are answered before the
  // next.
  void drop_some(uint64_t now_ns) GPUSHARE_REQUIRES(mutex_) {
    try {
      if (cancelling_) {
        next_->nothing();
        cancelling_ = batcher_->cancel_some(now_ns);
      } else {
        batcher_->expire(now_ns);
      }
      post();
      changed();
    } catch (...) {
      end_all(no_memory_);
    }
  }

  void tell_one() GPUSHARE_REQUIRES(mutex_) {
    Entry& entry = *first_;
    first_ = entry.next;
    if (first_ == nullptr) last_ = nullptr;
    const StepEvent news = entry.news;
    entry.due = false;
    // Forgets the answered request, also if the answer function ends this thread: another thread goes on, and close
    // waits for the last entry to go.
    const absl::Cleanup answered = [&]() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
      if (!news.ended) return;
      entries_.erase(news.id);
      if (entries_.empty()) answered_.notify_all();
    };
    const base::Unlocked unlocked(mutex_);
    const InsideServer inside(this);
    call(entry.answer, news);
  }

  GPUSHARE_CATCHES_FORCED_UNWIND static void call(const Answer& answer, const StepEvent& news) {
    try {
      if (answer) answer(news);
    } catch (const base::ForcedUnwind&) {
      throw;
    } catch (...) {
      try {
        base::log(GPUSHARE_LOG_ERROR, base::format("request %llu: the function that takes its answers threw",
                                                   static_cast<unsigned long long>(news.id)));
      } catch (...) {  // NOLINT(bugprone-empty-catch): no memory for the line
      }
    }
  }

  const base::Status no_memory_{
      GPUSHARE_HOST_OUT_OF_MEMORY,
      "the host had no memory for the step queue's work: it takes no more requests; close it"};
  const size_t most_held_;
  const std::shared_ptr<Session> session_;
  const StepFunction function_;
  const std::shared_ptr<StepAfter> next_ = std::make_shared<StepAfter>();
  mutable base::Mutex mutex_;
  base::ConditionVariable work_;      // for the runner
  base::ConditionVariable news_;      // for the teller
  base::ConditionVariable answered_;  // for drain and stop
  std::unique_ptr<StepBatcher> batcher_ GPUSHARE_PT_GUARDED_BY(mutex_);
  base::FlatHashMap<RequestId, std::unique_ptr<Entry>> entries_ GPUSHARE_GUARDED_BY(mutex_);
  Entry* first_ GPUSHARE_GUARDED_BY(mutex_) = nullptr;  // of those with news, in order
  Entry* last_ GPUSHARE_GUARDED_BY(mutex_) = nullptr;
  std::vector<StepEvent> events_ GPUSHARE_GUARDED_BY(mutex_);
  Pulse pulse_ GPUSHARE_GUARDED_BY(mutex_);
  base::Status ended_status_ GPUSHARE_GUARDED_BY(mutex_);  // not OK: no more steps run
  uint64_t ended_count_ GPUSHARE_GUARDED_BY(mutex_) = 0;   // requests that end_all answered
  bool changed_ GPUSHARE_GUARDED_BY(mutex_) = false;
  bool draining_ GPUSHARE_GUARDED_BY(mutex_) = false;
  bool cancelling_ GPUSHARE_GUARDED_BY(mutex_) = false;  // drop_some() cancels what waits
  bool ending_ GPUSHARE_GUARDED_BY(mutex_) = false;      // end_some() has some to answer
  bool over_ GPUSHARE_GUARDED_BY(mutex_) = false;
  std::mutex join_mutex_;
  base::ServiceThread teller_, runner_;
};

}  // namespace

base::Result<std::unique_ptr<StepServer>> StepServer::start(std::string_view policy,
                                                            const sched::slo::StepOptions& options,
                                                            std::shared_ptr<Session> session,
                                                            StepFunction function) {
  GPUSHARE_ASSIGN_OR_RETURN(std::unique_ptr<StepBatcher> batcher,
                            sched::slo::make_step_batcher(policy, options));
  try {
    return std::unique_ptr<StepServer>(
        std::make_unique<StepServerImpl>(std::move(batcher), options.max_pending, options.max_members,
                                         std::move(session), std::move(function)));
  } catch (const std::system_error& error) {
    return base::Status(GPUSHARE_HOST_OUT_OF_MEMORY,
                        std::string("cannot start a step queue's threads: ") + error.what(),
                        error.code().value());
  }
}

}  // namespace gpushare::executor
