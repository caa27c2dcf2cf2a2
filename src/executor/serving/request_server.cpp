// SPDX-License-Identifier: Apache-2.0
#include "executor/serving/request_server.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <deque>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>

#include "base/cancel.hpp"
#include "base/clock.hpp"
#include "base/flat_hash.hpp"
#include "base/log.hpp"
#include "base/mutex.hpp"
#include "base/service_thread.hpp"
#include "base/thread_local.hpp"
#include "executor/runtime.hpp"
#include "executor/serving/pulse.hpp"
#include "gpushare/gpushare.h"

namespace gpushare::executor {

using sched::slo::Batch;
using sched::slo::Batcher;
using sched::slo::Decision;
using sched::slo::Drop;
using sched::slo::DropReason;
using sched::slo::kNever;
using sched::slo::ModelSpec;
using sched::slo::Profile;
using sched::slo::Request;
using sched::slo::RequestId;

namespace {

GPUSHARE_THREAD_LOCAL const void* inside_server = nullptr;

// Outcomes in the order of their arrival, in a ring, so that taking one moves no other. Only reserve() allocates.
class OutcomeQueue {
 public:
  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }
  const RequestOutcome& front() const { return ring_[first_]; }
  // Makes room for `count` in all; what is held keeps its order.
  void reserve(size_t count) {
    if (count <= ring_.size()) return;
    std::vector<RequestOutcome> larger(std::max<size_t>(2 * count, 64));
    for (size_t i = 0; i < size_; ++i) larger[i] = ring_[(first_ + i) % ring_.size()];
    ring_ = std::move(larger);
    first_ = 0;
  }
  // There must be room.
  void push_back(const RequestOutcome& outcome) noexcept {
    ring_[(first_ + size_++) % ring_.size()] = outcome;
  }
  void pop_front() noexcept {
    first_ = (first_ + 1) % ring_.size();
    --size_;
  }

 private:
  std::vector<RequestOutcome> ring_;
  size_t first_ = 0;
  size_t size_ = 0;
};

// The worth of the next batch.
class WaitingRequests final : public WaitingWork {
 public:
  void set(const sched::slo::Waiting& waiting, uint32_t largest_batch) noexcept {
    base::MutexLock lock(mutex_);
    waiting_ = waiting;
    largest_batch_ = largest_batch;
  }
  void nothing() noexcept {
    base::MutexLock lock(mutex_);
    waiting_.clear();
  }
  Worth worth() const noexcept override {
    base::MutexLock lock(mutex_);
    const sched::slo::Worth worth = waiting_.worth(largest_batch_, base::host_now_ns());
    return {worth.cost, worth.until_ns};
  }

 private:
  mutable base::Mutex mutex_;  // nothing is called and no other lock taken under it
  sched::slo::Waiting waiting_ GPUSHARE_GUARDED_BY(mutex_);
  uint32_t largest_batch_ GPUSHARE_GUARDED_BY(mutex_) = 0;
};

class RequestServerImpl final : public RequestServer {
 public:
  using Changed = std::function<void(const RequestServerStats&)>;
  RequestServerImpl(std::unique_ptr<Batcher> batcher, size_t max_pending, Changed changed)
      : most_held_(2 * std::min(max_pending, size_t{1} << 40) + 4096),
        stats_changed_(std::move(changed)),
        batcher_(std::move(batcher)) {
    decider_ = base::ServiceThread([this] { decide(); });
    try {
      runner_ = base::ServiceThread([this] { run_batches(); });
    } catch (...) {
      finish();
      throw;
    }
  }
  ~RequestServerImpl() override { finish(); }

  base::Result<uint32_t> add_model(const ModelSpec& spec, RunBatch run) override {
    auto shared = std::make_shared<const RunBatch>(std::move(run));
    base::MutexLock lock(mutex_);
    if (draining_) return closed();
    if (given_up_) return no_memory_;
    models_.reserve(models_.size() + 1);  // once the batcher knows it, nothing may fail
    try {
      GPUSHARE_ASSIGN_OR_RETURN(const uint32_t model, batcher_->add_model(spec));
      models_.push_back({std::move(shared), {}});
      return model;
    } catch (...) {
      give_up();
      throw;
    }
  }

  base::Status submit(const Request& request, Answer answer, void* tag) override {
    base::MutexLock lock(mutex_);
    if (draining_) return closed();
    if (given_up_) return no_memory_;
    if (request.model < models_.size() && !models_[request.model].ended.ok())
      return base::Status(GPUSHARE_INVALID_STATE,
                          base::format("model %u runs no more batches: %s", request.model,
                                       models_[request.model].ended.message().c_str()));
    if (entries_.contains(request.id))
      return base::Status(GPUSHARE_ALREADY_EXISTS, base::format("request %llu is not answered yet",
                                                                static_cast<unsigned long long>(request.id)));
    if (entries_.size() >= most_held_) {
      ++stats_.refused_full;
      refused();
      return base::Status(
          GPUSHARE_QUEUE_FULL,
          base::format(
              "request %llu: %zu requests are held, the limit; their answers are not taken fast enough",
              static_cast<unsigned long long>(request.id), entries_.size()));
    }
    // Room for its outcome, before the batcher holds it: nothing may fail in between, nor when it is answered.
    answers_.reserve(entries_.size() + 1);
    const auto entry =
        entries_.try_emplace(request.id, Entry{request.deadline_ns, tag, std::move(answer), Stage::kWaiting})
            .first;
    const uint64_t now = base::host_now_ns();
    base::Status status;
    try {
      if (request.arrival_ns != 0) {
        status = batcher_->arrive(request, now);
      } else {
        Request arrived = request;
        arrived.arrival_ns = now;
        status = batcher_->arrive(arrived, now);
      }
    } catch (...) {
      entries_.erase(entry);
      give_up();
      throw;
    }
    if (!status.ok()) {
      entries_.erase(entry);
      if (status.code() == GPUSHARE_QUEUE_FULL) ++stats_.refused_full;
      if (status.code() == GPUSHARE_TIMED_OUT) ++stats_.refused_hopeless;
      refused();
      return status;
    }
    note_waiting();
    ++stats_.accepted;
    stats_.most_held = std::max<uint64_t>(stats_.most_held, entries_.size());
    poke();
    return base::ok_status();
  }

  bool cancel(RequestId id) override {
    base::MutexLock lock(mutex_);
    if (given_up_) return false;
    try {
      const bool waited = batcher_->cancel(id, base::host_now_ns());
      note_waiting();
      if (waited) poke();
      return waited;
    } catch (...) {
      give_up();
      throw;
    }
  }

  base::Status observe(const Request& request, uint64_t execution_ns) override {
    base::MutexLock lock(mutex_);
    if (given_up_) return no_memory_;
    try {
      return batcher_->observe_request(request, execution_ns);
    } catch (...) {
      give_up();
      throw;
    }
  }
  void observe_batch(uint32_t model, uint32_t k, uint64_t longest_ns, uint64_t device_ns) override {
    base::MutexLock lock(mutex_);
    if (given_up_) return;
    try {
      batcher_->observe_batch(model, k, longest_ns, device_ns);
    } catch (...) {
      give_up();
      throw;
    }
  }
  base::Result<Profile> profile(uint32_t model, uint32_t application) override {
    base::MutexLock lock(mutex_);
    if (given_up_) return no_memory_;
    try {
      return batcher_->profile(model, application);
    } catch (...) {
      give_up();
      throw;
    }
  }
  RequestServerStats stats() const override {
    base::MutexLock lock(mutex_);
    return stats_now();
  }
  std::string_view policy() const override GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
    return batcher_->name();  // constant
  }

  base::Status drain(uint64_t timeout_ns) override {
    if (inside_server == this) return from_inside("drained");
    const base::Deadline deadline = base::Deadline::after(timeout_ns);
    base::MutexLock lock(mutex_);
    if (!entries_.empty() && NoWaitScope::active()) return would_wait("drained");
    draining_ = true;
    poke();
    while (!entries_.empty())
      if (!answered_.wait(mutex_, deadline) && !entries_.empty())
        return base::Status(GPUSHARE_TIMED_OUT,
                            base::format("%zu requests are not answered yet", entries_.size()));
    return base::ok_status();
  }

  base::Status stop() override {
    if (inside_server == this) return from_inside("closed");
    if (NoWaitScope::active()) return would_wait("closed");
    finish();
    return base::ok_status();
  }

 private:
  RequestServerStats stats_now() const GPUSHARE_REQUIRES(mutex_) {
    RequestServerStats stats = stats_;
    stats.pending = given_up_ ? 0 : batcher_->pending();
    stats.held = entries_.size();
    if (!given_up_) stats.signals = batcher_->signals();
    return stats;
  }

  void finish() {
    {
      base::MutexLock lock(mutex_);
      draining_ = true;
      stopping_ = true;  // ask() cancels what waits; batches on the device run to their end
      poke();
      while (!entries_.empty()) answered_.wait(mutex_);
      ended_ = true;
      poke();
      work_.notify_all();
    }
    const std::lock_guard joining(join_mutex_);
    if (decider_.joinable()) decider_.join();
    if (runner_.joinable()) runner_.join();
  }

  enum class Stage : uint8_t { kWaiting, kRunning, kDue };  // due: its outcome is in answers_
  struct Entry {
    uint64_t deadline_ns;
    void* tag;
    Answer answer;
    Stage stage;
  };
  struct Model {
    std::shared_ptr<const RunBatch> run;
    base::Status ended;  // not OK: runs nothing any more
  };
  struct Told {
    RequestOutcome outcome;
    Answer answer;
  };
  static constexpr uint64_t kTellNs = 100'000'000;
  static constexpr uint64_t kAgain = 0;

  static base::Status closed() {
    return {GPUSHARE_INVALID_STATE, "the request queue takes no more requests: it is draining or closed"};
  }
  static base::Status from_inside(const char* what) {
    return {GPUSHARE_INVALID_STATE,
            base::format("the request queue cannot be %s from a function that it called", what)};
  }
  static base::Status would_wait(const char* what) {
    return {GPUSHARE_INVALID_STATE,
            base::format("the request queue cannot be %s inside a function that the device or the runtime "
                         "waits for (host function, progress function): its batches may need that",
                         what)};
  }
  void poke() GPUSHARE_REQUIRES(mutex_) {
    poked_ = true;
    changed_.notify_all();
  }

  // Wakes the decider to tell the statistics; for one of many refusals, since the batcher has nothing to decide.
  void refused() GPUSHARE_REQUIRES(mutex_) {
    if (!stats_changed_ || tell_at_ns_ != kNever) return;
    tell_at_ns_ = 0;
    poke();
  }
  // The decider has been awake, so something has changed.
  void tell_stats() GPUSHARE_REQUIRES(mutex_) {
    if (!stats_changed_) return;
    const uint64_t now = base::host_now_ns();
    if (told_ns_ != 0 && now - told_ns_ < kTellNs) {
      tell_at_ns_ = told_ns_ + kTellNs;
      return;
    }
    told_ns_ = now;
    tell_at_ns_ = kNever;
    const RequestServerStats stats = stats_now();
    const base::Unlocked unlocked(mutex_);
    stats_changed_(stats);
  }

  // The request's answer is due. Allocates nothing: submit() reserved the room.
  void make_due(RequestOutcome outcome, Entry& entry) GPUSHARE_REQUIRES(mutex_) {
    entry.stage = Stage::kDue;
    outcome.deadline_ns = entry.deadline_ns;
    answers_.push_back(outcome);
  }

  // Called when the host had no memory for a step of the batcher. The step may be incomplete, so the batcher is
  // not asked again. Requests that are not running are answered with HOST_OUT_OF_MEMORY, by the thread that decides, and no more
  // are accepted. Allocates nothing.
  void give_up() noexcept GPUSHARE_REQUIRES(mutex_) {
    if (given_up_) return;
    given_up_ = giving_up_ = true;
    waiting_.clear();
    waiting_requests_->nothing();
    poke();
  }

  // The answers of some of them are due. True while there are others.
  bool fail_some() noexcept GPUSHARE_REQUIRES(mutex_) {
    constexpr size_t kMost = 1024;  // whoever submits waits meanwhile
    RequestOutcome outcome;
    outcome.status = no_memory_.code();
    outcome.finished_ns = base::host_now_ns();
    size_t count = 0;
    for (auto& [id, entry] : entries_) {
      if (entry.stage != Stage::kWaiting) continue;
      if (count++ == kMost) return true;
      outcome.id = id;
      make_due(outcome, entry);
      ++stats_.failed;
    }
    return false;
  }

  // Asks the batcher what to run: a batch goes to waiting_, drops go to answers_. A server that stops cancels waiting
  // requests instead, some at a time, because the lock is held. Returns when to ask again. That is kAgain if there was
  // a batch, because policies that plan ahead may have more, and while requests are left to cancel.
  uint64_t ask() GPUSHARE_REQUIRES(mutex_) {
    Decision decision;
    bool others_wait = false;
    if (stopping_) {
      others_wait = batcher_->cancel_some();
    } else {
      const uint64_t now = base::host_now_ns();
      decision = batcher_->next(now, static_cast<uint32_t>(waiting_.size()) + (running_ ? 1 : 0));
      ++stats_.decisions;
      stats_.decision_ns += base::host_now_ns() - now;
    }
    take_drops();
    note_waiting();
    if (decision.batch) waiting_.push_back(std::move(*decision.batch));
    return decision.batch || others_wait ? kAgain : decision.wake_ns;
  }

  void take_drops() GPUSHARE_REQUIRES(mutex_) {
    const uint64_t now = base::host_now_ns();
    drops_.clear();
    batcher_->take_drops(drops_);
    for (const Drop& drop : drops_) {
      RequestOutcome outcome;
      outcome.id = drop.id;
      Entry& entry = entries_.find(drop.id)->second;
      outcome.status = drop.reason == DropReason::kCancelled ? GPUSHARE_CANCELLED : GPUSHARE_TIMED_OUT;
      outcome.dropped = drop.reason;
      outcome.finished_ns = now;
      ++stats_.dropped[static_cast<size_t>(drop.reason)];
      make_due(outcome, entry);
    }
  }

  // Says what waits for a batch, to whoever ends the running one.
  void note_waiting() GPUSHARE_REQUIRES(mutex_) {
    waiting_requests_->set(batcher_->waiting(), batcher_->largest_batch());
  }

  // Takes out the batches that wait for the device although they should have begun; ask() answers their requests.
  // Requests that expire while they wait are dropped by the batcher itself whenever it is asked, in bounded pieces.
  void reject_late_batches(uint64_t now) GPUSHARE_REQUIRES(mutex_) {
    for (auto batch = waiting_.begin(); batch != waiting_.end();) {
      if (now <= batch->latest_start_ns) {
        ++batch;
        continue;
      }
      batcher_->rejected(batch->id, now);
      batch = waiting_.erase(batch);
    }
  }
  // When the first of them is too late.
  uint64_t late_ns() const GPUSHARE_REQUIRES(mutex_) {
    uint64_t first_ns = kNever;
    for (const Batch& batch : waiting_) first_ns = std::min(first_ns, batch.latest_start_ns);
    return first_ns == kNever || given_up_ ? kNever : first_ns + 1;
  }

  // Takes some of the outcomes due to their callers and forgets the requests. The lock is given up meanwhile; ids
  // count as held until they are answered.
  void report() GPUSHARE_REQUIRES(mutex_) {
    if (told_count_ ==
        0) {  // not 0: an answer function ended the previous thread, and this one goes on with the rest
      if (answers_.empty()) return;
      told_count_ = std::min(answers_.size(), told_.size());
      told_next_ = 0;
      for (size_t i = 0; i < told_count_; ++i) {
        told_[i].outcome = answers_.front();
        answers_.pop_front();
        told_[i].answer = std::move(entries_.find(told_[i].outcome.id)->second.answer);
      }
    }
    {
      const base::Unlocked unlocked(mutex_);
      const InsideServer inside(this);
      while (told_next_ < told_count_) {
        Told& told = told_[told_next_++];
        tell(told.answer, told.outcome);
        told.answer = nullptr;
      }
    }
    for (size_t i = 0; i < told_count_; ++i) entries_.erase(told_[i].outcome.id);
    told_count_ = 0;
    if (!answers_.empty()) poked_ = true;
    if (entries_.empty()) answered_.notify_all();
  }
  GPUSHARE_CATCHES_FORCED_UNWIND static void tell(const Answer& answer, const RequestOutcome& outcome) {
    const auto complain = [&outcome](const char* what) {
      try {
        base::log(GPUSHARE_LOG_ERROR,
                  base::format("request %llu: the function that takes its outcome threw %s",
                               static_cast<unsigned long long>(outcome.id), what));
      } catch (...) {  // NOLINT(bugprone-empty-catch): no memory for the line
      }
    };
    try {
      if (answer) answer(outcome);
    } catch (const std::exception& error) {
      complain(error.what());
    } catch (const base::ForcedUnwind&) {
      throw;
    } catch (...) {
      complain("something that is no std::exception");
    }
  }

  // The thread that decides when requests arrive, are cancelled or run out of time, and that answers.
  void decide() {
    base::MutexLock lock(mutex_);
    while (true) {
      poked_ = false;
      uint64_t wake_ns = kNever;
      try {
        if (const uint64_t now = base::host_now_ns(); now >= late_ns()) reject_late_batches(now);
        if (!given_up_) wake_ns = ask();
      } catch (...) {
        give_up();
      }
      if (giving_up_ && answers_.empty()) giving_up_ = fail_some();
      if (wake_ns == kAgain) work_.notify_one();
      if (wake_ns == kAgain || giving_up_) poked_ = true;
      report();
      if (ended_) return;
      tell_stats();
      if (!poked_) sleep_until(std::min({wake_ns, late_ns(), tell_at_ns_}));
    }
  }

  // Until something happens or the time has come; see Pulse.
  void sleep_until(uint64_t wake_ns) GPUSHARE_REQUIRES(mutex_) {
    for (uint64_t now = base::host_now_ns(); !poked_ && now < wake_ns; now = base::host_now_ns()) {
      changed_.wait(mutex_, base::Deadline::at_ns(pulse_.asleep(now, wake_ns)));
      pulse_.awake(base::host_now_ns());
    }
  }

  // The thread that runs batches. It asks for the next one itself, so that the device does not wait until
  // another thread has woken.
  void run_batches() {
    BatchReport told;
    base::MutexLock lock(mutex_);
    while (true) {
      while (waiting_.empty() && !ended_) work_.wait(mutex_);
      if (waiting_.empty()) return;
      const Batch batch = std::move(waiting_.front());
      waiting_.pop_front();
      running_ = true;
      if (begin_batch(batch, told)) run_batch(batch, told);
      running_ = false;
    }
  }

  // False if the batch does not run, because its latest start has passed or the server has given up.
  bool begin_batch(const Batch& batch, BatchReport& told) GPUSHARE_REQUIRES(mutex_) {
    const bool in_time = wait_for_start(batch);
    if (given_up_) return false;
    const uint64_t begin = base::host_now_ns();
    try {
      if (in_time)
        batcher_->started(batch.id, begin);
      else
        batcher_->rejected(batch.id, begin);
    } catch (...) {
      give_up();
      return false;
    }
    if (!in_time) {
      poke();  // the decider answers the drops
      return false;
    }
    for (RequestId id : batch.requests) entries_.find(id)->second.stage = Stage::kRunning;
    if (pulse_.begins(begin)) changed_.notify_all();
    told.started_ns = begin;
    told.model_ended = false;
    told.server = this;
    told.waiting = waiting_requests_;
    return true;
  }

  void run_batch(const Batch& batch, BatchReport& told) GPUSHARE_REQUIRES(mutex_) {
    const uint64_t begin = told.started_ns;
    base::Status status;
    try {
      told.tags.clear();
      for (RequestId id : batch.requests) told.tags.push_back(entries_.find(id)->second.tag);
      told.execution_ns.assign(batch.requests.size(), 0);
      told.statuses.assign(batch.requests.size(), GPUSHARE_OK);
    } catch (...) {
      status = no_memory_;
    }
    const std::shared_ptr<const RunBatch> run = models_[batch.model].run;
    mutex_.unlock();
    if (status.ok()) status = call(*run, batch, told);
    mutex_.lock();
    const uint64_t end = base::host_now_ns();
    const uint64_t took = end - std::clamp(told.started_ns, begin, end);
    const bool known = !pulse_.ends(end);
    try {
      if (!given_up_) learn(batch, told, status, known ? took : 0, end);
    } catch (...) {
      give_up();
    }
    if (told.model_ended) models_[batch.model].ended = status;
    running_ = false;
    ++stats_.batches;
    stats_.batched_requests += batch.requests.size();
    stats_.busy_ns += took;
    answer_batch(batch, told, status, end);
    poke();
    try {
      if (waiting_.empty() && !given_up_) (void)ask();
    } catch (...) {
      give_up();
    }
  }

  void answer_batch(const Batch& batch, const BatchReport& told, const base::Status& status, uint64_t end)
      GPUSHARE_REQUIRES(mutex_) {
    for (size_t i = 0; i < batch.requests.size(); ++i) {
      const RequestId id = batch.requests[i];
      Entry& entry = entries_.find(id)->second;
      RequestOutcome outcome;
      outcome.id = id;
      outcome.status = status.ok() ? told.statuses[i] : status.code();
      outcome.batch_size = static_cast<uint32_t>(batch.requests.size());
      outcome.finished_ns = end;
      make_due(outcome, entry);
      if (outcome.status != GPUSHARE_OK)
        ++stats_.failed;
      else
        ++(end <= entry.deadline_ns ? stats_.in_time : stats_.late);
    }
  }

  // Tells the batcher how the batch ended. `took` is 0 if that is not known.
  void learn(const Batch& batch, BatchReport& told, const base::Status& status, uint64_t took, uint64_t end)
      GPUSHARE_REQUIRES(mutex_) {
    const auto fails = [](int32_t each) { return each != GPUSHARE_OK; };
    if (!status.ok() || std::all_of(told.statuses.begin(), told.statuses.end(), fails)) {
      batcher_->failed(batch.id, took, end);
    } else {
      told.execution_ns.resize(batch.requests.size());
      batcher_->finished_run(batch.id, told.execution_ns, took, end);
    }
  }

  // False when its latest start has passed.
  bool wait_for_start(const Batch& batch) GPUSHARE_REQUIRES(mutex_) {
    uint64_t now = base::host_now_ns();
    if (batch.not_before_ns > now) {
      mutex_.unlock();
      std::this_thread::sleep_for(std::chrono::nanoseconds(batch.not_before_ns - now));
      mutex_.lock();
      now = base::host_now_ns();
    }
    return now <= batch.latest_start_ns;
  }

  base::Status call(const RunBatch& run, const Batch& batch, BatchReport& told) const noexcept {
    const InsideServer inside(this);
    const auto threw = [this](const char* what) {
      try {
        return base::Status(GPUSHARE_CALLBACK_FAILED, what);
      } catch (...) {
        return no_memory_;
      }
    };
    try {
      return run(batch, told);
    } catch (const std::bad_alloc&) {
      return no_memory_;
    } catch (const std::exception& error) {
      return threw(error.what());
    } catch (...) {
      return threw("the batch function threw something that is no std::exception");
    }
  }

  // Made beforehand, for when there is no memory to make it.
  const base::Status no_memory_{
      GPUSHARE_HOST_OUT_OF_MEMORY,
      "the host had no memory for the request queue's work: it takes no more requests; close it"};
  const size_t most_held_;
  const Changed stats_changed_;
  mutable base::Mutex mutex_;
  base::ConditionVariable changed_;   // for the decider
  base::ConditionVariable work_;      // for the runner
  base::ConditionVariable answered_;  // for drain and stop
  std::unique_ptr<Batcher> batcher_ GPUSHARE_PT_GUARDED_BY(mutex_);
  std::vector<Model> models_ GPUSHARE_GUARDED_BY(mutex_);
  base::FlatHashMap<RequestId, Entry> entries_ GPUSHARE_GUARDED_BY(mutex_);  // accepted, not yet answered
  std::deque<Batch> waiting_ GPUSHARE_GUARDED_BY(mutex_);
  // Due to their callers. It has room for all of entries_ at any time.
  OutcomeQueue answers_ GPUSHARE_GUARDED_BY(mutex_);
  std::array<Told, 64> told_;  // of the decider: being told
  size_t told_count_ = 0, told_next_ = 0;
  std::vector<Drop> drops_ GPUSHARE_GUARDED_BY(mutex_);
  Pulse pulse_ GPUSHARE_GUARDED_BY(mutex_);
  RequestServerStats stats_ GPUSHARE_GUARDED_BY(mutex_);
  const std::shared_ptr<WaitingRequests> waiting_requests_ = std::make_shared<WaitingRequests>();
  uint64_t told_ns_ GPUSHARE_GUARDED_BY(mutex_) = 0;          // when tell_stats() told last
  uint64_t tell_at_ns_ GPUSHARE_GUARDED_BY(mutex_) = kNever;  // when it is to tell what has changed since
  bool running_ GPUSHARE_GUARDED_BY(mutex_) = false;  // a batch that is not in waiting_ any more is in flight
  bool poked_ GPUSHARE_GUARDED_BY(mutex_) = false;
  bool draining_ GPUSHARE_GUARDED_BY(mutex_) = false;
  bool stopping_ GPUSHARE_GUARDED_BY(mutex_) = false;
  bool ended_ GPUSHARE_GUARDED_BY(mutex_) = false;
  bool given_up_ GPUSHARE_GUARDED_BY(mutex_) = false;   // see give_up
  bool giving_up_ GPUSHARE_GUARDED_BY(mutex_) = false;  // fail_some() has some to answer
  std::mutex join_mutex_;
  base::ServiceThread decider_, runner_;
};

}  // namespace

InsideServer::InsideServer(const void* server) : before_(std::exchange(inside_server, server)) {}
bool InsideServer::is(const void* server) {
  return inside_server == server;
}
InsideServer::~InsideServer() {
  inside_server = before_;
}

base::RequestCounts RequestServerStats::counts() const {
  base::RequestCounts out;
  out.refused = refused_full + refused_hopeless;
  out.offered = accepted + out.refused;
  out.in_time = in_time;
  out.late = late;
  out.failed = failed;
  out.cancelled = dropped[static_cast<size_t>(DropReason::kCancelled)];
  for (const uint64_t each : dropped) out.dropped += each;
  out.dropped -= out.cancelled;
  out.pending = pending;
  out.predicted_miss_rate = signals.predicted_miss_rate;
  out.price_per_s = signals.price_per_s;
  return out;
}

base::Result<std::unique_ptr<RequestServer>> RequestServer::start(const RequestServerOptions& options) {
  GPUSHARE_ASSIGN_OR_RETURN(std::unique_ptr<Batcher> batcher,
                            sched::slo::make_batcher(options.policy, options.batcher));
  try {
    return std::unique_ptr<RequestServer>(std::make_unique<RequestServerImpl>(
        std::move(batcher), options.batcher.max_pending, options.changed));
  } catch (const std::system_error& error) {
    return base::Status(GPUSHARE_HOST_OUT_OF_MEMORY,
                        std::string("cannot start a request queue's threads: ") + error.what(),
                        error.code().value());
  }
}

}  // namespace gpushare::executor
