// SPDX-License-Identifier: Apache-2.0
#include "executor/op_gate.hpp"

#include <algorithm>

#include <absl/cleanup/cleanup.h>

#include "base/saturate.hpp"
#include "executor/runtime.hpp"

namespace gpushare::executor {
namespace {

// Work is taken for done so long after the last launch if its session neither launches nor ends its iteration: nobody could tell
// otherwise, and everybody else waits for it.
constexpr uint64_t kSilentNs = 1'000'000'000;
// How often a launch that has a deadline looks whether work in flight is done.
constexpr uint64_t kLookNs = 500'000;
constexpr uint64_t kMostWorkNs = 3'600'000'000'000;
// Work whose time nobody has estimated is there all the same.
constexpr uint64_t kLeastWorkNs = 1;

}  // namespace

// ---- OpGate

void OpGate::began(uint64_t session, double target_slowdown) {
  base::RoleLock lock(mutex_, has_gates);
  if (guaranteed_.insert(session).second)
    controller_.arrive(session, sched::SessionClass::kGuaranteed, 1, target_slowdown);
  controller_.began(session, now_ns_());
  changed();
}

void OpGate::finished(uint64_t session, uint64_t device_ns) {
  base::RoleLock lock(mutex_, has_gates);
  const uint64_t now_ns = now_ns_();
  for (LaunchGate* gate : gates_) {
    if (gate->unmarked_ && gate->waiting_ == 0 && gate->let_in_at_ns_ + kSilentNs < now_ns)
      gate->streams_done();
    if (!gate->always_open_) controller_.set_wants(gate->session_, gate->used_ || gate->waiting_ > 0);
    gate->used_ = false;
  }
  controller_.finished(session, device_ns, now_ns);
  changed();
}

void OpGate::left(uint64_t session) {
  base::RoleLock lock(mutex_, has_gates);
  guaranteed_.erase(session);
  controller_.leave(session);
  changed();
}

void OpGate::set_target(uint64_t session, double target_slowdown) {
  base::RoleLock lock(mutex_, has_gates);
  controller_.set_target(session, target_slowdown);
}

void OpGate::set_weight(uint64_t session, double weight) {
  base::RoleLock lock(mutex_, has_gates);
  controller_.set_weight(session, weight);
}

void OpGate::set_class(uint64_t session, sched::SessionClass cls, double weight) {
  base::RoleLock lock(mutex_, has_gates);
  // A guaranteed session is known from its next iteration on.
  guaranteed_.erase(session);
  controller_.leave(session);
  for (LaunchGate* gate : gates_) {
    if (gate->session_ != session) continue;
    gate->always_open_ = cls == sched::SessionClass::kGuaranteed;
    if (gate->link_ != nullptr) gate->refresh_flag();
    if (gate->always_open_ || gate->link_ != nullptr) continue;
    controller_.arrive(session, cls, weight);
    controller_.set_wants(session, gate->waiting_ > 0);
    gate->used_ = false;
  }
  version_ = 0;
  changed();
}

void OpGate::notify() {
  changed_.notify_all();
  for (LaunchGate* gate : gates_)
    if (gate->slot_ != nullptr) gate->slot_->bell().ring();
}

void OpGate::set_default_target(double target_slowdown) {
  base::RoleLock lock(mutex_, has_gates);
  sched::OpControllerOptions options = controller_.options();
  options.target_slowdown = target_slowdown;
  controller_.set_options(options);
}

void OpGate::changed() {
  if (version_ == controller_.version()) return;
  version_ = controller_.version();
  for (LaunchGate* gate : gates_) {
    if (gate->link_ != nullptr) continue;
    const bool open = !gate->ended_ && (gate->always_open_ || controller_.allowance(gate->session_).open());
    if (open)
      gate->closed_.store(0, std::memory_order_relaxed);
    else
      gate->close_flag();
  }
  notify();
}

// ---- LaunchGate

base::Result<std::shared_ptr<LaunchGate>> LaunchGate::make(std::shared_ptr<OpGate> of, device::Device& device,
                                                           uint64_t session, std::string name, double weight,
                                                           bool always_open, bool under_way,
                                                           std::shared_ptr<sched::GateLink> link) {
  std::array<Mark, kMarks> marks;
  for (Mark& mark : marks) {
    GPUSHARE_ASSIGN_OR_RETURN(mark.event, device.create_event());
  }
  std::shared_ptr<LaunchGate> gate(
      new LaunchGate(std::move(of), session, std::move(name), always_open, under_way, std::move(link)));
  gate->users_.open();
  OpGate& op = *gate->of_;
  base::RoleLock lock(op.mutex_, has_gates);
  gate->marks_ = std::move(marks);
  op.gates_.push_back(gate.get());
  if (gate->link_ != nullptr) {
    gate->closed_.store(1, std::memory_order_relaxed);
    gate->refresh_flag();
  }
  if (always_open || gate->link_ != nullptr) return gate;
  op.controller_.arrive(session, sched::SessionClass::kOpportunistic, weight);
  op.controller_.set_wants(session, false);
  op.version_ = 0;
  op.changed();
  return gate;
}

LaunchGate::~LaunchGate() {
  base::RoleLock lock(of_->mutex_, has_gates);
  std::erase(of_->gates_, this);
}

void LaunchGate::end() noexcept {
  base::RoleLock lock(of_->mutex_, has_gates);
  ended_ = true;
  if (link_ != nullptr)
    refresh_flag();
  else
    closed_.store(1, std::memory_order_relaxed);
  of_->notify();
}

void LaunchGate::shut() {
  end();
  users_.close();
  std::array<Mark, kMarks> gone;  // destroyed without the lock
  std::shared_ptr<base::GateSlot> slot;
  const base::RoleLock lock(of_->mutex_, has_gates);
  std::swap(gone, marks_);
  shut_ = true;
  slot_.swap(slot);
}

void LaunchGate::close_flag() {
  if (closed_.exchange(1, std::memory_order_relaxed) != 0) return;
  unmarked_ = true;
  let_in_at_ns_ = of_->now_ns_();
  tell();
}

void LaunchGate::refresh_flag() {
  (void)follow_link();
  const bool open = !ended_ && (always_open_ || !must_ask_);
  if (!open) close_flag();
  if (slot_ != nullptr) slot_->set_unseen(open);
  if (open) closed_.store(0, std::memory_order_relaxed);
}

void LaunchGate::set_asks(bool asks) {
  base::RoleLock lock(of_->mutex_, has_gates);
  must_ask_ = asks;
  refresh_flag();
  of_->notify();
}

uint32_t LaunchGate::follow_link() {
  while (!shut_) {
    std::shared_ptr<base::GateSlot> slot = link_->slot();
    if (slot != slot_) {
      slot_ = std::move(slot);
      terms_ = {};
      if (slot_ != nullptr) slot_->set_unseen(closed_.load(std::memory_order_relaxed) == 0);
      tell();
    }
    if (slot_ == nullptr) break;
    if (slot_->bell().expected() != (waiting_ > 0)) slot_->bell().expect(waiting_ > 0);
    const uint32_t rings = slot_->bell().look();
    // The bell of a slot rings once when the link leads away from the slot: a ring before look() wakes nobody after.
    if (link_->slot() == slot_) return rings;
  }
  return 0;
}

uint32_t LaunchGate::read_terms(uint64_t now_ns) {
  if (link_ == nullptr) return 0;
  const uint32_t rings = follow_link();
  if (slot_ != nullptr) (void)slot_->read(&terms_);
  if (terms_.until_ns <= now_ns) terms_ = {};
  return rings;
}

sched::OpController::Allowance LaunchGate::allowance(uint64_t now_ns, uint64_t work_ns) const {
  if (link_ != nullptr) return {terms_.share, terms_.in_flight_at(now_ns, work_ns)};
  return of_->controller_.allowance(session_, now_ns, work_ns);
}

uint64_t LaunchGate::admits_at(uint64_t ns, uint64_t now_ns) const {
  if (link_ == nullptr) return of_->controller_.admits_at(session_, ns, in_flight_ns_, now_ns);
  const uint64_t used_ns = slot_ == nullptr ? 0 : slot_->used_ns();
  const auto let_in_ns = static_cast<double>(used_ns - std::min(used_ns, terms_.used_ns));
  return terms_.admits_at(let_in_ns, ns, in_flight_ns_, now_ns);
}

void LaunchGate::asks() {
  if (link_ != nullptr) {
    if (slot_ != nullptr) slot_->count_entry();
  } else if (!used_) {
    used_ = true;
    of_->controller_.set_wants(session_, true);  // an iteration that is under way now goes on alone
    of_->changed();
  }
}

void LaunchGate::starts_to_wait() {
  ++waiting_;
  ++waits_;
  if (slot_ != nullptr) slot_->count_held_up();
}

void LaunchGate::waited(uint64_t since_ns) {
  waited_ns_ += base::host_now_ns() - since_ns;
  if (--waiting_ == 0 && slot_ != nullptr) slot_->bell().expect(false);
}

LaunchGate::Answer LaunchGate::ask(const sched::OpController::Allowance& allowed, const Stream* stream,
                                   uint64_t ns, uint64_t now_ns) {
  Answer answer;
  if (allowed.open() && link_ != nullptr && must_ask_) {  // the terms may change at any time
    let_in(stream, ns, now_ns);
    debt_ns_ = 0;
    answer.in = true;
    return answer;
  }
  if (allowed.open()) {
    in_flight_ns_ = unmarked_ns_ = by_call_ns_ = 0;
    marked_ = 0;
    debt_ns_ = 0;
    answer.in = true;
    return answer;
  }
  const auto paid_ns = static_cast<double>(now_ns - std::min(now_ns, paid_at_ns_));
  debt_ns_ = allowed.share >= 1 ? 0 : std::max(0.0, debt_ns_ - allowed.share * paid_ns);
  paid_at_ns_ = now_ns;
  if (allowed.share > 0 && debt_ns_ > 0) {
    answer.again_ns = now_ns + 1 + static_cast<uint64_t>(std::min(1e18, debt_ns_ / allowed.share));
    return answer;
  }
  if (allowed.share > 0) {
    answer.again_ns = admits_at(ns, now_ns);
    answer.full = in_flight_ns_ > 0 && base::add_saturated(in_flight_ns_, ns) > allowed.in_flight_ns;
    answer.in = answer.again_ns <= now_ns && !answer.full;
    if (answer.in) let_in(stream, ns, now_ns);
    if (answer.full && answer.again_ns <= now_ns) answer.again_ns = sched::kUnknown;
  }
  // Work in flight is in the way, or should be over before something is measured.
  answer.drains = !answer.in && !draining_ && (marked_ > 0 || (stream != nullptr && unmarked_));
  return answer;
}

void LaunchGate::wait(base::RoleLock& lock, uint32_t rings, uint64_t again_ns, uint64_t now_ns,
                      const base::Deadline& deadline) {
  if (slot_ != nullptr) again_ns = std::min(again_ns, terms_.until_ns);
  const base::Deadline until =
      earlier(base::Deadline::after(again_ns - std::min(again_ns, now_ns)), deadline);
  if (slot_ == nullptr) {
    of_->changed_.wait(of_->mutex_, until);
    return;
  }
  const std::shared_ptr<base::GateSlot> slot = slot_;
  lock.unlock();
  const absl::Cleanup waited = [&lock]() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { lock.lock(); };
  slot->bell().wait(rings, until);
}

base::Status LaunchGate::enter(const Stream* stream, uint64_t ns, uint64_t timeout_ns) {
  const GatePass pass(users_);
  ns = std::max(ns, kLeastWorkNs);
  const base::Deadline deadline = base::Deadline::after(timeout_ns);
  OpGate& op = *of_;
  base::RoleLock lock(op.mutex_, has_gates);
  ++entries_;
  uint64_t waiting_since_ns = 0;
  const absl::Cleanup over = [&]() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {  // with the lock held
    if (waiting_since_ns != 0) waited(waiting_since_ns);
  };
  for (bool may_mark = true;;) {
    if (!pass || ended_)
      return {GPUSHARE_CANCELLED, "session '" + name_ + "' has ended, and its gate lets nothing in any more"};
    if (always_open_) return {};
    const uint64_t now_ns = op.now_ns_();
    const uint32_t rings = read_terms(now_ns);
    asks();
    const sched::OpController::Allowance allowed = allowance(now_ns, ns);
    if (may_mark && stream != nullptr && mark_due(allowed, ns)) {
      base::Status marked = mark(lock, stream);
      op.notify();  // who came meanwhile does not wait for the device
      may_mark =
          marked.code() != GPUSHARE_INVALID_STATE;  // a capture; what needs no event may come all the same
      if (may_mark && !marked.ok()) return marked;
      continue;
    }
    Answer answer = ask(allowed, stream, ns, now_ns);
    if (answer.in) return {};
    if (stream == nullptr && unmarked_ && !draining_) {  // no event can follow that work from here
      const uint64_t over_ns = base::add_saturated(let_in_at_ns_, kSilentNs);
      if (over_ns <= now_ns) {
        streams_done();
        continue;
      }
      answer.again_ns = std::min(answer.again_ns, over_ns);
    }
    held_up_.store(true, std::memory_order_relaxed);
    if (slot_ != nullptr) slot_->set_asked(ns);
    if (answer.drains) {
      const bool waits = timeout_ns > 0 && !NoWaitScope::active() && (deadline.never() || answer.full);
      base::Status drained = drain(lock, stream, !waits);
      if (drained.ok()) continue;
      if (drained.code() != GPUSHARE_NOT_READY) return drained;
      answer.again_ns = std::min(answer.again_ns, now_ns + kLookNs);
    }
    if (timeout_ns > 0 && NoWaitScope::active())
      return {GPUSHARE_INVALID_STATE,
              "a gate cannot be waited for inside a function that the device or the runtime waits for"};
    if (timeout_ns == 0 || deadline.passed()) return timed_out(allowed);
    if (waiting_since_ns == 0) {
      waiting_since_ns = base::host_now_ns();
      starts_to_wait();
      if (slot_ != nullptr) continue;  // whoever writes the terms rings from now on
    }
    wait(lock, rings, answer.again_ns, now_ns, deadline);
  }
}

base::Status LaunchGate::timed_out(const sched::OpController::Allowance& allowed) const {
  return {
      GPUSHARE_TIMED_OUT,
      base::format(
          "session '%s' may use %.1f%% of the device's time and have %.3f ms of work on it now, beside "
          "guaranteed sessions, and its next launch must be worth the slowdown: ask again, or wait longer",
          name_.c_str(), 100 * allowed.share, static_cast<double>(allowed.in_flight_ns) * 1e-6)};
}

void LaunchGate::let_in(const Stream* stream, uint64_t ns, uint64_t now_ns) {
  in_flight_ns_ = base::add_saturated(in_flight_ns_, ns);
  if (stream == nullptr) {
    by_call_ns_ = base::add_saturated(by_call_ns_, ns);
  } else {
    unmarked_ns_ = base::add_saturated(unmarked_ns_, ns);
    unmarked_ = true;
    side_ = side_ || !stream->is_lane();
  }
  let_in_at_ns_ = now_ns;
  debt_ns_ += static_cast<double>(ns);
  tell();  // before any of it is there
  if (link_ == nullptr)
    of_->controller_.progressed(session_, ns);
  else if (slot_ != nullptr)
    slot_->let_in(std::min(ns, kMostWorkNs));
  if (slot_ != nullptr) slot_->set_asked(0);
}

void LaunchGate::streams_done() {
  in_flight_ns_ = by_call_ns_;
  unmarked_ns_ = marked_ = 0;
  unmarked_ = side_ = false;
  tell();
}

void LaunchGate::tell() {
  const bool may_be = by_call_ns_ > 0 || ((unmarked_ || marked_ > 0) && (under_way_ || side_));
  if (link_ == nullptr)
    of_->controller_.on_device(session_, may_be);
  else if (slot_ != nullptr)
    slot_->set_busy(may_be, of_->now_ns_());
}

void LaunchGate::under_way(bool any) {
  base::RoleLock lock(of_->mutex_, has_gates);
  if (under_way_ == any) return;
  under_way_ = any;
  if (any || side_)
    tell();
  else
    streams_done();
  of_->notify();
}

// Each half of what may be in flight has an event of its own. So the device has the second half to do when the first is over and
// more is let in.
bool LaunchGate::mark_due(const sched::OpController::Allowance& allowed, uint64_t ns) const {
  return allowed.share > 0 && allowed.in_flight_ns != sched::kUnknown && unmarked_ && unmarked_ns_ > 0 &&
         !draining_ && marked_ < kMarks && base::add_saturated(unmarked_ns_, ns) > allowed.in_flight_ns / 2;
}

base::Status LaunchGate::mark(base::RoleLock& lock, const Stream* stream) {
  draining_ = true;
  Mark& mark = marks_[(first_mark_ + marked_) % kMarks];
  mark.ns = unmarked_ns_;
  unmarked_ = false;  // launches that come while the lock is released set it again
  lock.unlock();
  base::Status status;
  if (const auto held = stream->hold(); held.ok())
    status = (*held)->record(mark.event);
  else
    status = held.status();
  status = stream->checked(std::move(status));
  lock.lock();
  if (status.ok()) {
    // The gate may have been open meanwhile, and have forgotten what was in flight.
    unmarked_ns_ -= std::min(unmarked_ns_, mark.ns);
    ++marked_;
  } else {
    unmarked_ = true;
  }
  draining_ = false;
  return status;
}

base::Status LaunchGate::drain(base::RoleLock& lock, const Stream* stream, bool poll) {
  base::Status status;
  if (stream != nullptr && unmarked_ && marked_ < kMarks) status = mark(lock, stream);
  draining_ = true;
  if (status.ok() && marked_ > 0) {
    Mark& mark = marks_[first_mark_];
    lock.unlock();
    status = poll ? mark.event.query() : mark.event.synchronize();
    lock.lock();
    if (marked_ > 0 && status.code() != GPUSHARE_NOT_READY) {
      in_flight_ns_ -= std::min(in_flight_ns_, mark.ns);
      first_mark_ = (first_mark_ + 1) % kMarks;
      --marked_;
      if (marked_ == 0 && !unmarked_) side_ = false;
    }
  }
  draining_ = false;
  tell();
  of_->notify();
  return status;
}

void LaunchGate::done(uint64_t ns) {
  base::RoleLock lock(of_->mutex_, has_gates);
  const uint64_t over_ns = std::min(by_call_ns_, std::max(ns, kLeastWorkNs));
  by_call_ns_ -= over_ns;
  in_flight_ns_ -= std::min(in_flight_ns_, over_ns);
  tell();
  of_->notify();
}

GateInfo LaunchGate::info() {
  OpGate& op = *of_;
  base::RoleLock lock(op.mutex_, has_gates);
  const uint64_t now_ns = op.now_ns_();
  (void)read_terms(now_ns);
  GateInfo info;
  const auto allowed = always_open_ ? sched::OpController::Allowance{} : allowance(now_ns);
  info.share = allowed.share;
  info.in_flight_limit_ns = allowed.in_flight_ns;
  info.in_flight_ns = in_flight_ns_;
  info.entries = entries_;
  info.waits = waits_;
  info.waited_ns = waited_ns_;
  info.open = link_ != nullptr ? !ended_ && allowed.open() : closed_.load(std::memory_order_relaxed) == 0;
  if (link_ != nullptr && terms_.guaranteed_id != 0) {
    info.guaranteed_id = terms_.guaranteed_id;
    info.estimate = {terms_.alone_ns, terms_.slowdown,   terms_.error,        terms_.credit,
                     terms_.target,   terms_.iterations, terms_.learning != 0};
  }
  for (const uint64_t id : op.guaranteed_) {
    const auto estimate = op.controller_.estimate(id);
    if (info.guaranteed_id != 0 && estimate.credit >= info.estimate.credit) continue;
    info.guaranteed_id = id;
    info.estimate = estimate;
  }
  return info;
}

}  // namespace gpushare::executor
