// Elastic ranges: commit and decommit, who waits for room in which order, and the thread that asks a range's owner.
// SPDX-License-Identifier: Apache-2.0
#include "executor/range.hpp"

#include <algorithm>
#include <exception>
#include <system_error>
#include <thread>

#include <absl/cleanup/cleanup.h>

#include "base/cancel.hpp"
#include "base/log.hpp"
#include "base/saturate.hpp"
#include "base/units.hpp"
#include "base/without_throwing.hpp"
#include "executor/internal.hpp"
#include "memory/elastic_range.hpp"

namespace gpushare::executor {
namespace {

constexpr uint64_t kAnswerNs = 100'000'000;
constexpr double kCopyNsPerByte = 0.2;  // out and back in, as the scheduler prices paging
// How long a waiting commit sleeps unless a range gives something: room also comes from sessions, lanes and other processes.
constexpr uint64_t kLookForRoomNs = 10'000'000;
// Owners that declined are asked again after this time.
constexpr uint64_t kAskAgainNs = 50'000'000;
// The asker's number for requests of the daemon.
constexpr sched::RangeId kDaemon = UINT64_MAX;

}  // namespace

class RangeImpl final : public Range {
 public:
  RangeImpl(std::shared_ptr<SessionImpl> session, RangeOptions options)
      : session_(std::move(session)), runtime_(*session_->runtime_), options_(std::move(options)) {}
  ~RangeImpl() override {
    base::without_throwing([this] { (void)close_now(); });  // unless it was closed already
  }
  base::Status open();

  base::Status close() override;
  bool closed() const override { return given_back_.load(); }
  base::Status commit(uint64_t offset_bytes, uint64_t bytes, uint64_t timeout_ns) override;
  base::Status decommit(uint64_t offset_bytes, uint64_t bytes) override;
  RangeInfo info() const override;

  const SessionImpl* session() const { return session_.get(); }
  const std::string& name() const { return options_.name; }
  std::string describe() const {
    return "elastic range '" + name() + "' of session '" + session_->name() + "'";
  }
  void request(const sched::RangeRequest& request, uint64_t now_ns) GPUSHARE_REQUIRES(books);
  void keeps_silent() GPUSHARE_REQUIRES(books) { ++info_.silences; }
  uint64_t answer_ns() const { return options_.answer_ns; }

  base::Status close_now();
  base::Status timed_out(const RangeWait& wait, uint64_t timeout_ns, const std::string& why) const;
  // kAway: the session is paged out. NOT_READY: to be tried again once *out_busy has passed.
  base::Status try_commit(uint64_t offset_bytes, uint64_t bytes, RangeWait& wait,
                          memory::FenceList* out_busy);
  base::Status wait_for_room(RangeWait& wait, sched::Need& need, const base::Deadline& deadline,
                             MemoryLadder::Room* room);
  // The ranges of others are asked, or the wait has its place in line. False: nobody is left to ask.
  base::Result<bool> wait_for_ranges(RangeWait& wait, const base::Deadline& deadline);
  void leave(RangeWait& wait);
  void changed(uint64_t committed_bytes);
  void run();
  base::Status is_closed() const {
    return {GPUSHARE_INVALID_STATE, describe() + " is closed, or its session has ended"};
  }

  const std::shared_ptr<SessionImpl> session_;
  RuntimeImpl& runtime_;  // the session's
  RangeOptions options_;
  memory::ElasticRange* memory_ = nullptr;  // for threads inside gate_ and the session's heap_gate_
  mutable Gate gate_;
  sched::RangeId id_ = 0;

  bool closed_ GPUSHARE_GUARDED_BY(books) = true;
  RangeInfo info_ GPUSHARE_GUARDED_BY(books);

  base::WorkMutex close_mutex_;          // one close at a time: it waits for the range's function
  std::atomic<bool> given_back_{false};  // what it had; written under close_mutex_
  base::ServiceThread thread_;
  base::Mutex thread_mutex_;
  base::ConditionVariable asked_;
  std::atomic<std::thread::id> thread_id_{};
  bool stop_ GPUSHARE_GUARDED_BY(thread_mutex_) = false;
  bool has_request_ GPUSHARE_GUARDED_BY(thread_mutex_) = false;
  uint64_t request_bytes_ GPUSHARE_GUARDED_BY(thread_mutex_) = 0;
  uint64_t request_deadline_ns_ GPUSHARE_GUARDED_BY(thread_mutex_) = 0;
};

base::Result<std::shared_ptr<Range>> SessionImpl::open_range(RangeOptions options) {
  auto range = std::make_shared<RangeImpl>(shared_from_this(), std::move(options));
  GPUSHARE_RETURN_IF_ERROR(range->open());
  return std::shared_ptr<Range>(std::move(range));
}

base::Status RangeImpl::open() {
  const Stay stay(runtime_);
  if (!stay) return {GPUSHARE_INVALID_STATE, "the runtime is closed"};
  if (options_.answer_ns == 0) options_.answer_ns = kAnswerNs;
  if (options_.price_ns_per_byte == 0) options_.price_ns_per_byte = kCopyNsPerByte;
  {
    BooksLock lock(runtime_.mutex_);
    id_ = runtime_.ranges_.next_id();
  }
  if (options_.name.empty()) options_.name = "range-" + std::to_string(id_);
  for (;;) {
    if (const GatePass pass(session_->heap_gate_); pass) {
      auto opened =
          runtime_.memory_->open_range(*session_->heap_.load(), options_.name, options_.reserved_bytes);
      if (!opened.ok()) {
        runtime_.note(opened.status());
        return opened.status();
      }
      memory_ = *opened;
      break;
    }
    GPUSHARE_RETURN_IF_ERROR(session_->wait_admitted(GPUSHARE_NO_TIMEOUT));
  }
  if (options_.give_back) {
    try {
      thread_ = base::ServiceThread([this] { run(); });
    } catch (const std::system_error& error) {
      if (const GatePass pass(session_->heap_gate_); pass) runtime_.memory_->close_range(memory_);
      memory_ = nullptr;
      return {GPUSHARE_HOST_OUT_OF_MEMORY, std::string("cannot start a range's thread: ") + error.what(),
              error.code().value()};
    }
  }
  gate_.open();
  Section lock(runtime_);
  closed_ = false;
  runtime_.ranges_.open(*this);
  return {};
}

base::Status RangeImpl::close() {
  if (thread_id_.load() == std::this_thread::get_id())
    return {GPUSHARE_INVALID_STATE, describe() + " cannot be closed by its own function"};
  return NoWaitScope::active() ? base::WorkLock::refused() : close_now();
}

base::Status RangeImpl::close_now() {
  const base::WorkLock closing(close_mutex_, base::kMustWait);
  {
    Section lock(runtime_);
    if (given_back_) return is_closed();
    if (!std::exchange(closed_, true)) runtime_.ranges_.close(*this);
  }
  if (thread_.joinable()) {
    {
      base::MutexLock lock(thread_mutex_);
      stop_ = true;
    }
    asked_.notify_all();
    thread_.join();
  }
  gate_.close();
  const base::WorkLock growing(session_->grow_mutex_, base::kMustWait);
  uint64_t bytes = 0;
  {
    // The ranges of a session that has ended went with the session.
    const GatePass pass(session_->heap_gate_);
    given_back_ = true;
    if (!pass || memory_ == nullptr) return {};
    bytes = memory_->committed_bytes();
    runtime_.memory_->close_range(memory_);
    runtime_.ladder_.give_back();
  }
  session_->shrink_range(bytes);
  BooksLock lock(runtime_.mutex_);
  runtime_.ranges_.told();
  return {};
}

base::Status RangeImpl::commit(uint64_t offset_bytes, uint64_t bytes, uint64_t timeout_ns) {
  const Stay stay(runtime_);
  if (!stay) return {GPUSHARE_INVALID_STATE, "the runtime is closed"};
  const base::Deadline deadline = base::Deadline::after(timeout_ns);
  const bool may_wait = timeout_ns > 0 && !NoWaitScope::active() && !CallbackScope::active();
  RangeWait wait{};
  const absl::Cleanup leaving = [&] { leave(wait); };
  sched::Need need(session_->options_.cls, true, false);
  MemoryLadder::Room room;
  wait.session = session_.get();
  wait.range = this;
  wait.asker = id_;
  for (;;) {
    memory::FenceList busy;
    base::Status status = try_commit(offset_bytes, bytes, wait, &busy);
    if (status.ok()) return status;
    room.let_go();
    if (status.code() == GPUSHARE_NOT_READY) {
      if (NoWaitScope::active()) return {GPUSHARE_DEVICE_OUT_OF_MEMORY, describe() + ": " + status.message()};
      // Nothing is held here, because a host function before the fences may want this very range. Without a wait for
      // room the device's work is waited for all the same: it ends by itself.
      if (!may_wait)
        memory::wait_all(busy);
      else if (!memory::wait_all(busy, deadline))
        return timed_out(wait, timeout_ns, "work on the device still uses memory that is to be mapped");
      continue;
    }
    if (status.code() == base::kAway) {
      const uint64_t left_ns = deadline.never() ? GPUSHARE_NO_TIMEOUT : deadline.left_ns();
      GPUSHARE_RETURN_IF_ERROR(session_->wait_admitted(may_wait ? left_ns : 0));
      continue;
    }
    if (status.code() != GPUSHARE_DEVICE_OUT_OF_MEMORY) {
      runtime_.note(status);
      return status;
    }
    if (!may_wait) return status.with_context(describe());
    if (deadline.passed()) return timed_out(wait, timeout_ns, status.message());
    GPUSHARE_RETURN_IF_ERROR(wait_for_room(wait, need, deadline, &room));
  }
}

base::Status RangeImpl::timed_out(const RangeWait& wait, uint64_t timeout_ns, const std::string& why) const {
  return {GPUSHARE_TIMED_OUT, describe() + " waited " + base::format_duration_ns(timeout_ns) + " for " +
                                  base::format_bytes(wait.bytes) + ": " + why +
                                  (wait.silent.empty() ? "" : "; no answer from " + wait.silent)};
}

base::Status RangeImpl::try_commit(uint64_t offset_bytes, uint64_t bytes, RangeWait& wait,
                                   memory::FenceList* out_busy) {
  const base::WorkLock growing(session_->grow_mutex_);
  if (!growing) return base::WorkLock::refused();
  uint64_t missing = 0;
  {
    const GatePass pass(gate_), heap(session_->heap_gate_);
    if (!pass || !heap) return is_closed();
    GPUSHARE_ASSIGN_OR_RETURN(missing, memory_->missing_bytes(offset_bytes, bytes));
    if (missing == 0) return {};
  }
  {
    // A range that already waits goes first, unless it is of a lower class.
    BooksLock lock(runtime_.mutex_);
    wait.bytes = missing;  // other waiting threads read it
    wait.change = runtime_.ranges_.change();
    if (const RangeWait* first = runtime_.ranges_.before(wait); first != nullptr)
      return {
          GPUSHARE_DEVICE_OUT_OF_MEMORY,
          (first->range != nullptr ? first->range->describe() : "session '" + first->session->name() + "'") +
              " waits for " + base::format_bytes(first->bytes) + " before it"};
  }
  uint64_t committed = 0;
  GPUSHARE_RETURN_IF_ERROR(session_->grow_range(missing, [&]() -> base::Status {
    const GatePass pass(gate_), resident(session_->residence_gate_);
    if (!pass) return is_closed();
    if (!resident) return {base::kAway, describe() + " is paged out"};
    base::Status status = memory_->commit(offset_bytes, bytes, out_busy);
    committed = memory_->committed_bytes();
    return status;
  }));
  changed(committed);
  return {};
}

base::Result<bool> RangeImpl::wait_for_ranges(RangeWait& wait, const base::Deadline& deadline) {
  Outbox outbox(runtime_);
  Section lock(runtime_);
  GPUSHARE_RETURN_IF_ERROR(runtime_.check_live(*session_));
  if (closed_) return is_closed();
  if (wait.want == 0) ++info_.waits;
  return runtime_.ranges_.sleep(wait, deadline, outbox);
}

base::Status RangeImpl::wait_for_room(RangeWait& wait, sched::Need& need, const base::Deadline& deadline,
                                      MemoryLadder::Room* room) {
  base::Status status;
  const bool gives = need.ask(true, [&](sched::Giver giver) {
    if (giver == sched::Giver::kRanges) {
      const base::Result<bool> asked = wait_for_ranges(wait, deadline);
      status = asked.status();
      return !asked.ok() || *asked;
    }
    if (giver == sched::Giver::kBlocks)
      return session_->wait_for_others(session_->room_for(wait.bytes), deadline);
    *room = runtime_.ladder_.make_room(*session_, need, giver, session_->room_for(wait.bytes), deadline);
    wait.made_room = wait.made_room || *room;
    return static_cast<bool>(*room);
  });
  if (gives) return status;
  Outbox outbox(runtime_);
  Section lock(runtime_);
  runtime_.ranges_.sleep_a_while(wait, deadline, outbox);
  return {};
}

bool RangeWait::is_before(const RangeWait& other) const {
  const auto in_line = [](const RangeWait& wait) {
    return sched::InLine{wait.session->options_.cls,
                         wait.range != nullptr ? sched::Use::kCommit : sched::Use::kAllocation, wait.place};
  };
  return sched::served_before(in_line(*this), in_line(other));
}

void RangeImpl::leave(RangeWait& wait) {
  if (wait.want == 0 && !wait.made_room) return;
  Outbox outbox(runtime_);
  Section lock(runtime_);
  if (wait.want != 0) {
    const uint64_t waited_ns = base::host_now_ns() - wait.since_ns;
    info_.waited_ns += waited_ns;
    info_.longest_wait_ns = std::max(info_.longest_wait_ns, waited_ns);
    runtime_.ranges_.leave(wait);
  }
  if (wait.made_room && runtime_.check_open().ok()) {
    runtime_.authority_->room_used(session_->id_, runtime_.now());
    runtime_.carry_out(nullptr, outbox);
  }
}

base::Status RangeImpl::decommit(uint64_t offset_bytes, uint64_t bytes) {
  const base::WorkLock growing(session_->grow_mutex_);
  if (!growing) return base::WorkLock::refused();
  uint64_t freed = 0, committed = 0;
  {
    const GatePass pass(gate_), heap(session_->heap_gate_);
    if (!pass || !heap) return is_closed();
    GPUSHARE_ASSIGN_OR_RETURN(freed, memory_->decommit(offset_bytes, bytes));
    if (freed == 0) return {};
    committed = memory_->committed_bytes();
    runtime_.ladder_.give_back();
  }
  session_->shrink_range(freed);
  changed(committed);
  return {};
}

void RangeImpl::changed(uint64_t committed_bytes) {
  Outbox outbox(runtime_);
  Section lock(runtime_);
  if (closed_) return;
  info_.peak_bytes = std::max(info_.peak_bytes, committed_bytes);
  runtime_.ranges_.set_bytes(*this, committed_bytes);
}

RangeInfo RangeImpl::info() const {
  RangeInfo info;
  {
    BooksLock lock(runtime_.mutex_);
    info = info_;
    info.silent = runtime_.ranges_.silent(*this);
  }
  const GatePass pass(gate_), heap(session_->heap_gate_);
  if (!pass || !heap) return info;
  info.address = memory_->address();
  info.reserved_bytes = memory_->reserved_bytes();
  info.granule_bytes = memory_->granule_bytes();
  info.committed_bytes = memory_->committed_bytes();
  return info;
}

void RangeImpl::request(const sched::RangeRequest& request, uint64_t now_ns) {
  ++info_.requests;
  info_.requested_bytes += request.bytes;
  {
    base::MutexLock lock(thread_mutex_);
    has_request_ = true;
    request_bytes_ = request.bytes;
    request_deadline_ns_ = std::max(request.deadline_ns, now_ns);
  }
  asked_.notify_all();
}

GPUSHARE_CATCHES_FORCED_UNWIND
void RangeImpl::run() {
  thread_id_.store(std::this_thread::get_id());
  for (;;) {
    uint64_t bytes = 0, within_ns = 0;
    {
      base::MutexLock lock(thread_mutex_);
      while (!stop_ && !has_request_) asked_.wait(thread_mutex_);
      if (stop_) return;
      has_request_ = false;
      bytes = request_bytes_;
      within_ns = request_deadline_ns_ - std::min(request_deadline_ns_, base::host_now_ns());
    }
    const Stay stay(runtime_);
    if (!stay) continue;
    uint64_t answer = sched::ElasticRanges::kNoAnswer;
    {
      const CallbackScope scope;
      try {
        answer = options_.give_back(bytes, within_ns);
      } catch (const std::exception& error) {
        base::log(base::kWarning, "the function of " + describe() + " threw: " + error.what());
      } catch (const base::ForcedUnwind&) {
        base::thread_ends() = true;
        throw;
      } catch (...) {
        base::log(base::kWarning, "the function of " + describe() + " threw");
      }
    }
    BooksLock lock(runtime_.mutex_);
    base::MutexLock newer(thread_mutex_);
    if (has_request_) continue;  // the answer belongs to a request that is over
    newer.unlock();
    runtime_.ranges_.answer(*this, answer);
  }
}

RangeTable::RangeTable(RuntimeImpl& runtime)
    : runtime_(runtime), elastic_([this](std::span<const sched::Part> parts) GPUSHARE_REQUIRES(books) {
        return runtime_.authority_->claims_on(parts, runtime_.now());
      }) {}

void RangeTable::open(RangeImpl& range) {
  const RangeOptions& options = range.options_;
  elastic_.open(range.id_, {range.session_->id_, range.session_->options_.cls,
                            options.give_back ? options.answer_ns : 0, options.price_ns_per_byte});
  ranges_[range.id_] = &range;
  tell_daemon(*range.session_);
}

void RangeTable::close(RangeImpl& range) {
  elastic_.close(range.id_);
  ranges_.erase(range.id_);
  refresh_class(*range.session_);
  tell_daemon(*range.session_);
  told();
}

void RangeTable::forget(const SessionImpl& session) {
  for (const auto& [id, range] : ranges_)
    if (range->session() == &session) elastic_.close(id);
  asked_.erase(session.id_);
  told();
}

void RangeTable::set_bytes(RangeImpl& range, uint64_t committed_bytes) {
  elastic_.set_bytes(range.id_, committed_bytes);
  refresh_class(*range.session_);
  tell_daemon(*range.session_);
  if (waits_.empty()) return;
  waits_.front()->room_bytes = std::max(waits_.front()->room_bytes, runtime_.free_bytes());
  told();
}

void RangeTable::answer(const RangeImpl& range, uint64_t bytes) {
  elastic_.answer(range.id_, bytes);
  if (const auto asked = asked_.find(range.session_->id_); asked != asked_.end()) {
    if (bytes == sched::ElasticRanges::kNoAnswer)
      runtime_.authority_->answer_ranges(range.session_->id_, bytes);
    else
      answer_daemon(range.session_->id_, asked->second);
  }
  told();
}

void RangeTable::tell_daemon(const SessionImpl& session) {
  if (!runtime_.shared_ || session.torn_down_ || runtime_.collapsed_) return;
  uint64_t bytes = 0;
  const sched::RangeSpec all = elastic_.of_session(session.id_, &bytes);
  runtime_.authority_->set_ranges(session.id_, bytes, all.answer_ns, all.price_ns_per_byte);
}

void RangeTable::asked(sched::SessionId session, uint64_t bytes) {
  const uint64_t now_ns = base::host_now_ns();
  Asked& asked = asked_[session];
  if (asked.want != 0) elastic_.withdraw(asked.want);
  asked.want = next_want_++;
  (void)elastic_.of_session(session, &asked.had_bytes);
  elastic_.open(kDaemon, {});
  for (const sched::RangeRequest& request : elastic_.ask(kDaemon, asked.want, bytes, now_ns, session))
    ranges_.at(request.range)->request(request, now_ns);
  if (elastic_.on_the_way_bytes(asked.want) < bytes) answer_daemon(session, asked);
}

void RangeTable::answer_daemon(sched::SessionId session, const Asked& asked) {
  uint64_t has = 0;
  (void)elastic_.of_session(session, &has);
  runtime_.authority_->answer_ranges(session,
                                     base::add_saturated(asked.had_bytes - std::min(asked.had_bytes, has),
                                                         elastic_.on_the_way_bytes(asked.want)));
}

bool RangeTable::silent(const RangeImpl& range) const {
  return elastic_.silent(range.id_);
}

uint64_t RangeTable::can_give(const SessionImpl& session, bool commit) const {
  return elastic_.can_give(session.id_, commit ? session.options_.cls : sched::SessionClass::kOpportunistic);
}

const RangeWait* RangeTable::before(const RangeWait& wait) const {
  const RangeWait* first = waits_.empty() ? nullptr : waits_.front();
  return first != nullptr && first->is_before(wait) ? first : nullptr;
}

bool RangeTable::sleep(RangeWait& wait, const base::Deadline& deadline, Outbox& outbox) {
  const uint64_t now_ns = base::host_now_ns();
  if (wait.want == 0) {
    wait.want = next_want_++;
    wait.place = wait.want;
    wait.since_ns = wait.asked_ns = now_ns;
    waits_.insert(std::find_if(waits_.begin(), waits_.end(),
                               [&wait](const RangeWait* other) { return wait.is_before(*other); }),
                  &wait);
    if (wait.range == nullptr) {
      wait.asker = next_range_++;
      elastic_.open(wait.asker, {wait.session->id_, sched::SessionClass::kOpportunistic, 0, 0});
    }
  }
  uint64_t next_ns = base::add_saturated(now_ns, kLookForRoomNs);
  if (waits_.front() == &wait) {
    for (const sched::RangeRequest& silent : elastic_.expire(now_ns)) keeps_silent(silent, wait, outbox);
    // The free bytes may be too few, or the device may still use them.
    const uint64_t free = runtime_.free_bytes();
    const uint64_t missing = free < wait.bytes ? wait.bytes - free : wait.bytes;
    // Owners that declined may have bytes to spare by now.
    if (now_ns - wait.asked_ns >= kAskAgainNs && elastic_.on_the_way_bytes(wait.want) == 0) {
      wait.want = next_want_++;
      wait.asked_ns = now_ns;
      wait.room_bytes = 0;
    }
    // Allocations do not wait in the line of commits.
    if (free < wait.room_bytes) {
      elastic_.taken(wait.want);
      wait.room_bytes = free;
    }
    const auto requests = elastic_.ask(wait.asker, wait.want, missing, now_ns);
    for (const sched::RangeRequest& request : requests) ranges_.at(request.range)->request(request, now_ns);
    if (requests.empty() && elastic_.on_the_way_bytes(wait.want) == 0) {
      // No range is left to ask in this process.
      std::string silent;
      const sched::RoomAsk ask{sched::Giver::kRanges, missing, 0, wait.range != nullptr, &silent};
      wait.asks_daemon = true;
      const bool coming = runtime_.authority_->make_room(wait.session->id_, ask, runtime_.now());
      if (!silent.empty()) {
        base::log(base::kWarning, "no answer from " + silent);
        wait.silent += (wait.silent.empty() ? "" : ", ") + silent;
      }
      if (!coming) return false;
    }
    next_ns = std::min(next_ns, elastic_.next_deadline_ns());
  }
  if (wait.change != change_) return true;
  runtime_.reaper_.wait(room_, earlier(base::Deadline::at_ns(next_ns), deadline), outbox);
  return true;
}

void RangeTable::sleep_a_while(const RangeWait& wait, const base::Deadline& deadline, Outbox& outbox) {
  if (wait.change != change_) return;
  runtime_.reaper_.wait(room_, earlier(base::Deadline::after(kLookForRoomNs), deadline), outbox);
}

void RangeTable::leave(RangeWait& wait) {
  std::erase(waits_, &wait);
  elastic_.withdraw(wait.want);
  if (wait.range == nullptr) elastic_.close(wait.asker);
  if (wait.asks_daemon && runtime_.check_open().ok())
    (void)runtime_.authority_->make_room(wait.session->id_, {sched::Giver::kRanges}, runtime_.now());
  told();  // it is the next one's turn
}

// The session's class, or the lower one while a range of it is silent.
void RangeTable::refresh_class(SessionImpl& session) {
  const bool silent = elastic_.session_silent(session.id_);
  if (session.silent_ == silent || session.torn_down_ || runtime_.collapsed_) return;
  session.silent_ = silent;
  runtime_.authority_->set_class(
      session.id_, silent ? sched::SessionClass::kOpportunistic : session.options_.cls, runtime_.now());
}

void RangeTable::keeps_silent(const sched::RangeRequest& request, RangeWait& wait, Outbox& outbox) {
  const auto found = ranges_.find(request.range);
  if (found == ranges_.end()) return;
  RangeImpl& range = *found->second;
  range.keeps_silent();
  const std::string who = range.describe() + ", asked for " + base::format_bytes(request.bytes) + " within " +
                          base::format_duration_ns(range.answer_ns()) + ", which counts as opportunistic now";
  base::log(base::kWarning, "no answer from " + who);
  wait.silent += (wait.silent.empty() ? "" : ", ") + who;
  if (wait.range != nullptr) wait.range->info_.unanswered_by = range.session()->id_;
  refresh_class(*range.session_);
  runtime_.carry_out(nullptr, outbox);
}

}  // namespace gpushare::executor
