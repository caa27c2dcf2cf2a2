// SPDX-License-Identifier: Apache-2.0
#include "executor/op_gate.hpp"

#include <algorithm>
#include <cmath>

#include "executor/runtime.hpp"

namespace gpushare::executor {
namespace {

// Work is taken for done so long after the last launch if its session neither launches nor ends its iteration: nobody could tell
// otherwise, and everybody else waits for it.
constexpr uint64_t kSilentNs = 1'000'000'000;
// How often a launch that has a deadline looks whether work in flight is done.
constexpr uint64_t kLookNs = 500'000;
constexpr uint64_t kLongestWaitNs = 3'600'000'000'000;

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
    if (gate->always_open_) continue;
    controller_.arrive(session, cls, weight);
    controller_.set_wants(session, gate->waiting_ > 0);
    gate->used_ = false;
  }
  version_ = 0;
  changed();
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
    const bool open = !gate->ended_ && (gate->always_open_ || controller_.allowance(gate->session_).open());
    if (!open && gate->closed_.load(std::memory_order_relaxed) == 0) {
      gate->unmarked_ = true;  // launches that an open gate did not see
      gate->let_in_at_ns_ = now_ns_();
      gate->tell();
    }
    gate->closed_.store(open ? 0 : 1, std::memory_order_relaxed);
  }
  changed_.notify_all();
}

// ---- LaunchGate

base::Result<std::shared_ptr<LaunchGate>> LaunchGate::make(std::shared_ptr<OpGate> of, device::Device& device,
                                                           uint64_t session, std::string name, double weight,
                                                           bool always_open, bool under_way) {
  std::array<Mark, kMarks> marks;
  for (Mark& mark : marks) {
    GPUSHARE_ASSIGN_OR_RETURN(mark.event, device.create_event());
  }
  std::shared_ptr<LaunchGate> gate(
      new LaunchGate(std::move(of), session, std::move(name), always_open, under_way));
  gate->users_.open();
  OpGate& op = *gate->of_;
  base::RoleLock lock(op.mutex_, has_gates);
  gate->marks_ = std::move(marks);
  op.gates_.push_back(gate.get());
  if (always_open) return gate;
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
  closed_.store(1, std::memory_order_relaxed);
  of_->changed_.notify_all();
}

void LaunchGate::shut() {
  end();
  users_.close();
  std::array<Mark, kMarks> gone;  // destroyed without the lock
  const base::RoleLock lock(of_->mutex_, has_gates);
  std::swap(gone, marks_);
}

LaunchGate::Answer LaunchGate::ask(const sched::OpController::Allowance& allowed, const Stream* stream,
                                   uint64_t ns, uint64_t now_ns) {
  Answer answer;
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
    answer.again_ns = of_->controller_.admits_at(session_, ns, in_flight_ns_, now_ns);
    answer.full = in_flight_ns_ > 0 && in_flight_ns_ + ns > allowed.in_flight_ns;
    answer.in = answer.again_ns <= now_ns && !answer.full;
    if (answer.in) let_in(stream, ns, now_ns);
    if (answer.full && answer.again_ns <= now_ns) answer.again_ns = sched::kUnknown;
  }
  // Work in flight is in the way, or should be over before something is measured.
  answer.drains = !answer.in && !draining_ && (marked_ > 0 || (stream != nullptr && unmarked_));
  return answer;
}

void LaunchGate::wait(uint64_t again_ns, uint64_t now_ns, const base::Deadline& deadline) {
  OpGate& op = *of_;
  if (again_ns != sched::kUnknown) {
    const auto again =
        std::chrono::steady_clock::now() +
        std::chrono::nanoseconds(std::min(again_ns - std::min(again_ns, now_ns), kLongestWaitNs));
    op.changed_.wait_until(op.mutex_, deadline.never() ? again : std::min(again, deadline.at()));
  } else if (deadline.never()) {
    op.changed_.wait(op.mutex_);
  } else {
    op.changed_.wait_until(op.mutex_, deadline.at());
  }
}

base::Status LaunchGate::enter(const Stream* stream, uint64_t ns, uint64_t timeout_ns) {
  const GatePass pass(users_);
  const base::Deadline deadline = base::Deadline::after(timeout_ns);
  OpGate& op = *of_;
  base::RoleLock lock(op.mutex_, has_gates);
  ++entries_;
  uint64_t waiting_since_ns = 0;
  struct Waiting {
    ~Waiting() {
      if (since_ns == 0) return;
      --gate.waiting_;
      gate.waited_ns_ += base::host_now_ns() - since_ns;
    }
    LaunchGate& gate;
    uint64_t& since_ns;
  };
  const Waiting waiting{*this, waiting_since_ns};  // destroyed with the lock held
  for (;;) {
    if (!pass || ended_)
      return {GPUSHARE_CANCELLED, "session '" + name_ + "' has ended, and its gate lets nothing in any more"};
    if (always_open_) return {};
    if (!used_) {
      used_ = true;
      op.controller_.set_wants(session_, true);  // an iteration that is under way now goes on alone
      op.changed();
    }
    const uint64_t now_ns = op.now_ns_();
    const sched::OpController::Allowance allowed = op.controller_.allowance(session_, now_ns);
    Answer answer = ask(allowed, stream, ns, now_ns);
    if (answer.in) return {};
    held_up_.store(true, std::memory_order_relaxed);
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
      ++waiting_;
      ++waits_;
    }
    wait(answer.again_ns, now_ns, deadline);
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
  in_flight_ns_ += ns;
  if (stream == nullptr) {
    by_call_ns_ += ns;
  } else {
    unmarked_ns_ += ns;
    unmarked_ = true;
    side_ = side_ || !stream->is_lane();
  }
  let_in_at_ns_ = now_ns;
  debt_ns_ += static_cast<double>(ns);
  of_->controller_.progressed(session_, ns);
  tell();
}

void LaunchGate::streams_done() {
  in_flight_ns_ = by_call_ns_;
  unmarked_ns_ = marked_ = 0;
  unmarked_ = side_ = false;
  tell();
}

void LaunchGate::tell() {
  of_->controller_.on_device(session_,
                             by_call_ns_ > 0 || ((unmarked_ || marked_ > 0) && (under_way_ || side_)));
}

void LaunchGate::under_way(bool any) {
  base::RoleLock lock(of_->mutex_, has_gates);
  if (under_way_ == any) return;
  under_way_ = any;
  if (any || side_)
    tell();
  else
    streams_done();
  of_->changed_.notify_all();
}

base::Status LaunchGate::drain(base::RoleLock& lock, const Stream* stream, bool poll) {
  draining_ = true;
  base::Status status;
  if (stream != nullptr && unmarked_ && marked_ < kMarks) {
    Mark& mark = marks_[(first_mark_ + marked_) % kMarks];
    mark.ns = unmarked_ns_;
    unmarked_ = false;  // launches that come while the lock is released set it again
    lock.unlock();
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
  }
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
  of_->changed_.notify_all();
  return status;
}

void LaunchGate::done(uint64_t ns) {
  base::RoleLock lock(of_->mutex_, has_gates);
  const uint64_t over_ns = std::min(by_call_ns_, ns);
  by_call_ns_ -= over_ns;
  in_flight_ns_ -= std::min(in_flight_ns_, over_ns);
  tell();
  of_->changed_.notify_all();
}

GateInfo LaunchGate::info() {
  OpGate& op = *of_;
  base::RoleLock lock(op.mutex_, has_gates);
  GateInfo info;
  const auto allowed =
      always_open_ ? sched::OpController::Allowance{} : op.controller_.allowance(session_, op.now_ns_());
  info.share = allowed.share;
  info.in_flight_limit_ns = allowed.in_flight_ns;
  info.in_flight_ns = in_flight_ns_;
  info.entries = entries_;
  info.waits = waits_;
  info.waited_ns = waited_ns_;
  info.open = closed_.load(std::memory_order_relaxed) == 0;
  for (const uint64_t id : op.guaranteed_) {
    const auto estimate = op.controller_.estimate(id);
    if (info.guaranteed_id != 0 && estimate.credit >= info.estimate.credit) continue;
    info.guaranteed_id = id;
    info.estimate = estimate;
  }
  return info;
}

}  // namespace gpushare::executor
