// SPDX-License-Identifier: Apache-2.0
#include "executor/memory_ladder.hpp"

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include "base/cancel.hpp"
#include "base/log.hpp"
#include "base/round_up.hpp"
#include "executor/internal.hpp"
#include "sched/turn_rules.hpp"

namespace gpushare::executor {
namespace {

// How often one allocation may go through all steps: others may take the memory that was freed for it.
constexpr int kMaxRounds = 8;
// A guaranteed session that waits for the ends of iterations of opportunistic sessions looks so often. It waits for
// sched::kBoundaryWaitNs, in all rounds of an allocation together.
constexpr uint64_t kBoundaryLookNs = 1'000'000;

// The calling thread has an iteration of another session open.
bool binds_another(const SessionImpl& session) {
  for (const Binding* binding = thread_bindings(); binding != nullptr; binding = binding->outer)
    if (binding->session.get() != &session && IterationImpl::is_open(*binding)) return true;
  return false;
}

}  // namespace

MemoryLadder::Room& MemoryLadder::Room::operator=(Room&& other) noexcept {
  let_go();
  ladder_ = std::exchange(other.ladder_, nullptr);
  made_ = std::exchange(other.made_, false);
  return *this;
}

void MemoryLadder::Room::begin(MemoryLadder& ladder) {
  ladder_ = &ladder;
  ++ladder.room_waiters_;
}

// The runner's thread goes on with the page-outs that were under way.
void MemoryLadder::Room::let_go() {
  made_ = false;
  if (ladder_ == nullptr) return;
  BooksLock lock(ladder_->runtime_.mutex_);
  if (--ladder_->room_waiters_ == 0) ladder_->runtime_.actions_.hand_over();
  ladder_ = nullptr;
}

// One allocation on its way up. It lives as long as the room that it made.
class MemoryLadder::Climb {
 public:
  Climb(MemoryLadder& ladder, SessionImpl& session, const Attempt& wanted)
      : ladder_(ladder),
        runtime_(ladder.runtime_),
        session_(session),
        wanted_(wanted),
        need_(session.guaranteed() ? sched::SessionClass::kGuaranteed : sched::SessionClass::kOpportunistic,
              false, session.options_.allow_spill) {}
  Climb(const Climb&) = delete;
  Climb& operator=(const Climb&) = delete;
  base::Result<memory::Address> run(base::Status why) {
    auto result = climb(std::move(why));
    stop_asking();
    return result;
  }
  bool made_room() const { return made_room_; }
  ~Climb() { stop_asking(); }

 private:
  void stop_asking() {
    if (std::exchange(asks_, false)) --runtime_.askers_;
    if (ranges_.want == 0) return;
    Section lock(runtime_);
    runtime_.ranges_.leave(ranges_);
    ranges_.want = 0;
  }

  uint64_t whole() const {
    const uint64_t bytes = wanted_.bytes + wanted_.alignment;
    return wanted_.lane != nullptr ? base::round_up(bytes, runtime_.granularity_bytes_)
                                   : session_.room_for(bytes);
  }

  // What memory keeps for speed. While promises are short it does not help, and a page-out would make the host memory anew
  // that it gives up.
  bool trimmed() {
    if (!may_trim_) return false;
    {
      BooksLock lock(runtime_.mutex_);
      if (runtime_.free_bytes() < wanted_.bytes) return false;
    }
    may_trim_ = false;
    return runtime_.memory_->trim() > 0;
  }

  bool lies_on_host() {
    auto spilled = session_.attempt_spilled(wanted_);
    if (spilled.ok() || spilled.status().code() == base::kAway) {
      on_host_ = std::move(spilled);
      return true;
    }
    not_grown_ = spilled.status().with_context(not_grown_.message() + "; spilling");
    return false;
  }

  bool gives(sched::Giver giver) {
    using sched::Giver;
    if (giver == Giver::kHost) return lies_on_host();
    if (wanted_.bytes > runtime_.memory_->capacity_bytes()) return false;
    switch (giver) {
      case Giver::kRanges:
        return ladder_.ask_ranges(session_, whole(), boundaries_, ranges_);
      case Giver::kBlocks:
        if (not_grown_.code() != GPUSHARE_DEVICE_OUT_OF_MEMORY) return false;  // the host has no memory
        if (binds_another(session_)) return false;  // a boundary may wait for what this thread has open
        asks_ = true;
        ++runtime_.askers_;
        return session_.wait_for_others(whole(), base::Deadline::after(GPUSHARE_NO_TIMEOUT));
      case Giver::kOwner:
        return functions_++ < kMaxCallbackTries && ladder_.ask_owner(session_, wanted_.bytes);
      default:
        room_ = ladder_.make_room(session_, need_, giver, whole(), boundaries_);
        made_room_ = made_room_ || room_;
        return static_cast<bool>(room_);
    }
  }

  base::Result<memory::Address> climb(base::Status why) {
    for (int round = 0; round < kMaxRounds; ++round) {
      not_grown_ = wanted_.lane != nullptr
                       ? session_.grow_ephemeral(wanted_, &seen_bytes_)
                       : session_.grow_persistent(wanted_.bytes, wanted_.alignment, &seen_bytes_);
      if (!not_grown_.ok()) {
        room_.let_go();
        const int32_t code = not_grown_.code();
        if (code != GPUSHARE_DEVICE_OUT_OF_MEMORY && code != GPUSHARE_EXCEEDS_CAPACITY &&
            code != GPUSHARE_QUOTA_EXCEEDED) {
          runtime_.note(not_grown_);
          return not_grown_;
        }
        if (!trimmed() && !need_.ask(code == GPUSHARE_DEVICE_OUT_OF_MEMORY,
                                     [this](sched::Giver giver) { return gives(giver); }))
          break;
        if (on_host_) return *std::move(on_host_);
      }
      auto result = session_.attempt(wanted_);
      if (result.ok() || result.status().code() != GPUSHARE_DEVICE_OUT_OF_MEMORY) return result;
      why = result.status();
    }
    return refused(why);
  }

  base::Status refused(const base::Status& why) const {
    std::string message = why.message();
    if (!not_grown_.ok()) message += "; " + not_grown_.message();
    message += "; " + runtime_.memory_->report();
    return {not_grown_.code() == GPUSHARE_QUOTA_EXCEEDED ? GPUSHARE_QUOTA_EXCEEDED
                                                         : GPUSHARE_DEVICE_OUT_OF_MEMORY,
            std::move(message), why.native_code(), why.backend()};
  }

  MemoryLadder& ladder_;
  RuntimeImpl& runtime_;
  SessionImpl& session_;
  const Attempt& wanted_;
  sched::Need need_;
  bool may_trim_ = true, asks_ = false, made_room_ = false;
  int functions_ = 0;
  uint64_t seen_bytes_ = 0;
  const base::Deadline boundaries_ = base::Deadline::after(sched::kBoundaryWaitNs);
  base::Status not_grown_;
  std::optional<base::Result<memory::Address>> on_host_;
  RangeWait ranges_{};
  Room room_;
};

base::Result<memory::Address> MemoryLadder::climb(SessionImpl& session, const Attempt& wanted,
                                                  base::Status why) {
  const Stay stay(runtime_);
  if (!stay) return base::Status(GPUSHARE_INVALID_STATE, "the runtime is closed");
  uint64_t promised_bytes = 0, ephemeral_bytes = 0, began_ns = 0;
  {
    BooksLock lock(runtime_.mutex_);
    began_ns = runtime_.now();
    promised_bytes = session.persistent_promise_ - session.range_promise_;
    ephemeral_bytes = session.ephemeral_promise_;
  }
  Climb steps(*this, session, wanted);
  auto result = steps.run(std::move(why));
  // A growth that did not help is given back.
  if (!result.ok() && wanted.lane == nullptr) session.shrink_persistent(promised_bytes, ephemeral_bytes);
  if (!result.ok() && wanted.lane != nullptr) session.shrink_ephemeral(ephemeral_bytes);
  if (session.retired_) session.give_back_unused();
  Outbox outbox(runtime_);
  Section lock(runtime_);
  const uint64_t time = runtime_.now();
  session.room_waited_ns_ += time - std::min(time, began_ns);
  if (steps.made_room() && runtime_.check_open().ok()) runtime_.authority_->room_used(session.id_, time);
  if (steps.made_room()) runtime_.carry_out(nullptr, outbox);
  return result;
}

bool MemoryLadder::ask_ranges(SessionImpl& session, uint64_t bytes, const base::Deadline& until,
                              RangeWait& wait) {
  if (NoWaitScope::active() || CallbackScope::active()) return false;
  Outbox outbox(runtime_);
  Section lock(runtime_);
  wait.session = &session;
  wait.bytes = bytes;
  bool asked = false;
  while (!until.passed() && runtime_.free_bytes() < wait.bytes && runtime_.check_live(session).ok()) {
    wait.change = runtime_.ranges_.change();
    if (!runtime_.ranges_.sleep(wait, until, outbox)) break;
    asked = true;
  }
  return asked;
}

MemoryLadder::Room MemoryLadder::make_room(SessionImpl& session, const sched::Need& need, sched::Giver from,
                                           uint64_t bytes, const base::Deadline& until) {
  Room room;  // outlives the lock
  const bool at_boundaries = from == sched::Giver::kBoundaries;
  // A boundary may wait for what this thread has open, and for what called it.
  if (at_boundaries &&
      (until.passed() || NoWaitScope::active() || CallbackScope::active() || binds_another(session)))
    return room;
  Outbox outbox(runtime_);
  Section lock(runtime_);
  if (!runtime_.check_live(session).ok()) return room;
  room.begin(*this);
  // Page-outs that were decided before may be enough.
  if (session.guaranteed() && runtime_.free_bytes() < bytes) runtime_.actions_.run(true, outbox);
  // The room that is there counts. If it would do, it is in pieces, or promised to caches, and the whole is asked for.
  const uint64_t free = runtime_.free_bytes();
  sched::RoomAsk ask{from, bytes > free && !at_boundaries ? bytes - free : bytes};
  ask.commit = need.commit();
  if (from == sched::Giver::kSpare && need.parts_are_next())
    ask.elsewhere_bytes = runtime_.parts_of_others(session, need);
  if (!runtime_.authority_->make_room(session.id_, ask, runtime_.now())) return Room();
  // On a shared device the daemon says when there is enough. Here a page-out may go on after that, for others.
  const bool shared = runtime_.shared_;
  const base::Deadline at_most =
      base::Deadline::after(at_boundaries ? sched::kBoundaryWaitNs : GPUSHARE_NO_TIMEOUT);
  runtime_.actions_.run(true, outbox);
  while (runtime_.authority_->making_room(session.id_)) {
    if (!runtime_.check_live(session).ok() || (!shared && runtime_.free_bytes() >= bytes) ||
        at_most.passed() || (at_boundaries && until.passed())) {
      runtime_.authority_->stop_making_room(session.id_);
      break;
    }
    if (runtime_.actions_.run_part(outbox)) continue;
    if (NoWaitScope::active()) break;
    runtime_.reaper_.wait(session.state_changed_,
                          base::Deadline::after(shared ? GPUSHARE_NO_TIMEOUT : kBoundaryLookNs), outbox);
  }
  room.set_made(true);
  return room;
}

void MemoryLadder::set_function(OutOfMemoryFunction function) {
  base::MutexLock lock(mutex_);
  function_.swap(function);
}

GPUSHARE_CATCHES_FORCED_UNWIND
bool MemoryLadder::ask_owner(SessionImpl& session, uint64_t bytes) {
  OutOfMemoryFunction function;
  {
    base::MutexLock lock(mutex_);
    function = function_;
  }
  // The function is not called inside itself, because that could go on without end.
  if (!function || CallbackScope::active()) return false;
  const CallbackScope scope;
  try {
    return function(session.id_, bytes);
  } catch (const std::exception& error) {
    base::log(base::kWarning, std::string("the out-of-memory function threw: ") + error.what());
  } catch (const base::ForcedUnwind&) {
    base::thread_ends() = true;
    throw;
  } catch (...) {
    base::log(base::kWarning, "the out-of-memory function threw");
  }
  return false;
}

bool MemoryLadder::compact() {
  return runtime_.memory_->compact() > 0;
}

void MemoryLadder::give_back() {
  if (gives_back_) (void)runtime_.memory_->trim();
}

}  // namespace gpushare::executor
