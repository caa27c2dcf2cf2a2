// The event loop of the sim device: what starts when, and how the clock moves. Rules: sim_device.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>

#include "base/cancel.hpp"
#include "base/no_memory.hpp"
#include "base/thread_local.hpp"
#include "device/sim/sim_device.hpp"
#include "device/support/ops_guard.hpp"

namespace gpushare::device::sim {
namespace {

// Sub-nanosecond remainders are rounding: the clock counts whole nanoseconds.
constexpr double kDoneNs = 1e-3;
constexpr double kLongestStepNs = 1e18;

// The host functions that this thread is inside of, over all sim devices: a list through the frames that call them,
// innermost first.
struct Running;
GPUSHARE_THREAD_LOCAL const Running* t_running = nullptr;
struct Running {
  Running(const Device* on, const Stream* in) : device(on), stream(in) { t_running = this; }
  ~Running() { t_running = outer; }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
  const Device* device;
  const Stream* stream;
  const Running* outer = t_running;
};

// There is room for it.
void insert_by_id(std::vector<Stream*>& streams, Stream* stream, uint64_t id,
                  uint64_t (*id_of)(const Stream*)) noexcept {
  const auto at =
      std::upper_bound(streams.begin(), streams.end(), id,
                       [id_of](uint64_t value, const Stream* other) { return value < id_of(other); });
  streams.insert(at, stream);
}

}  // namespace

bool Device::inside_callback_of(const Stream& stream) {
  for (const Running* running = t_running; running != nullptr; running = running->outer)
    if (running->stream == &stream) return true;
  return false;
}

bool Device::inside_callback() const {
  for (const Running* running = t_running; running != nullptr; running = running->outer)
    if (running->device == this) return true;
  return false;
}

void Device::push(Stream& stream, Op op) {
  const bool was_idle = stream.idle();
  stream.queue_.push_back(std::move(op));
  ++stream.enqueued_;
  polls_ = 0;
  if (was_idle) advance(stream);
  if (waiting_threads_ > 0) progress_.notify_all();
}

void Device::make_room(size_t streams) {
  const auto fit = [streams](auto& list) {
    if (list.capacity() < streams) list.reserve(2 * streams);
  };
  fit(working_);
  fit(in_memory_);
  fit(buses_[0]);
  fit(buses_[1]);
  fit(due_callbacks_);
  fit(loads_);
  fit(speeds_);
  fit(done_);
}

void Device::advance(Stream& first) noexcept {
  // A stream that must go on waiting blocks itself again.
  const auto wake_blocked = [this](Stream& stream) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
    runnable_.splice_after(runnable_.empty() ? runnable_.before_begin() : runnable_.last(), stream.blocked_);
  };
  runnable_.push_back(first);
  wake_blocked(first);
  while (!runnable_.empty()) {
    Stream& stream = runnable_.front();
    runnable_.pop_front();
    while (!stream.idle() && !stream.started_ && start_front(stream)) {
      stream.queue_.pop_front();
      ++stream.completed_;
      wake_blocked(stream);
    }
  }
}

bool Device::start_front(Stream& stream) noexcept {
  Op& op = stream.queue_.front();
  const auto id_of = [](const Stream* other) { return other->id_; };
  switch (op.kind) {
    case Op::Kind::kRecord:
      if (op.event->records_ == op.sequence) op.event->time_ns_ = now_ns_;
      return true;
    case Op::Kind::kWait:
      if (op.stream->passed(op.sequence)) return true;
      op.stream->blocked_.push_back(stream);
      return false;
    case Op::Kind::kWork:
      if (op.duration_ns == 0) return true;
      stream.remaining_ns_ = static_cast<double>(op.duration_ns);
      insert_by_id(working_, &stream, stream.id_, id_of);
      break;
    case Op::Kind::kCopyWithin:
    case Op::Kind::kFill:
      stream.end_ns_ = now_ns_ + op.duration_ns;
      insert_by_id(in_memory_, &stream, stream.id_, id_of);
      break;
    case Op::Kind::kBusCopy:
      buses_[op.bus].push_back(&stream);
      if (buses_[op.bus].size() == 1) stream.end_ns_ = now_ns_ + op.duration_ns;
      break;
    case Op::Kind::kCallback:
      due_callbacks_.push_back(&stream);
      break;
  }
  stream.started_ = true;
  return false;
}

void Device::finish_front(Stream& stream) noexcept {
  const Op& op = stream.queue_.front();
  if (op.destination != nullptr) {
    if (op.source != nullptr) {
      std::memmove(op.destination, op.source, op.bytes);
    } else {
      std::memset(op.destination, op.fill_value, op.bytes);
    }
  }
  stream.queue_.pop_front();
  stream.started_ = false;
  ++stream.completed_;
  advance(stream);
}

void Device::fail(Stream& stream, base::Status status) noexcept {
  stream.error_ = std::move(status);
  stream.failed_sequence_ = stream.completed_ + 1;
  // The work behind it is dropped; its events pass, with the error.
  stream.completed_ += stream.queue_.size();
  stream.queue_.clear();
  stream.started_ = false;
  advance(stream);
}

void Device::lose() noexcept {
  lost_ = true;
  working_.clear();
  in_memory_.clear();
  buses_[0].clear();
  buses_[1].clear();
  due_callbacks_.clear();
  for (const auto& [raw, stream] : streams_) {
    stream->blocked_.clear();
    // A host function that runs now ends by itself.
    const size_t kept = stream->in_callback_ ? 1 : 0;
    stream->completed_ += stream->queue_.size() - kept;
    stream->queue_.erase(stream->queue_.begin() + static_cast<std::ptrdiff_t>(kept), stream->queue_.end());
    stream->started_ = stream->in_callback_;
  }
  progress_.notify_all();
}

GPUSHARE_CATCHES_FORCED_UNWIND
void Device::run_callback() {
  const std::shared_ptr<Stream> stream = due_callbacks_.front()->shared_from_this();
  due_callbacks_.erase(due_callbacks_.begin());
  const gpushare_host_function function = stream->queue_.front().function;
  void* user_data = stream->queue_.front().user_data;
  stream->in_callback_ = true;
  ++running_callbacks_;
  mutex_.unlock();
  base::Status status;
  try {
    const Running running(this, stream.get());
    status = call_host_function(function, user_data);
  } catch (const std::bad_alloc&) {
    status = base::no_memory();  // for the message
  } catch (const base::ForcedUnwind&) {
    mutex_.lock();  // the host function ended the thread: it counts as done
    --running_callbacks_;
    stream->in_callback_ = false;
    finish_front(*stream);
    throw;
  }
  mutex_.lock();
  --running_callbacks_;
  stream->in_callback_ = false;
  if (status.ok() || lost_) {
    finish_front(*stream);
  } else {
    fail(*stream, std::move(status));
  }
}

bool Device::move_clock() {
  loads_.clear();
  for (const Stream* stream : working_) loads_.push_back(stream->queue_.front().load);
  contention_.speeds(loads_, &speeds_);
  uint64_t next = std::numeric_limits<uint64_t>::max();
  for (size_t i = 0; i < working_.size(); ++i) {
    if (speeds_[i] <= 0) continue;  // more urgent work has the whole device
    const double left = std::min(std::ceil(working_[i]->remaining_ns_ / speeds_[i]), kLongestStepNs);
    next = std::min(next, now_ns_ + static_cast<uint64_t>(left));
  }
  for (const Stream* stream : in_memory_) next = std::min(next, stream->end_ns_);
  for (const auto& bus : buses_) {
    if (!bus.empty()) next = std::min(next, bus.front()->end_ns_);
  }
  if (next == std::numeric_limits<uint64_t>::max()) return false;

  const double passed = static_cast<double>(next - now_ns_);
  for (size_t i = 0; i < working_.size(); ++i) working_[i]->remaining_ns_ -= passed * speeds_[i];
  now_ns_ = next;

  done_.clear();
  const auto take_done = [&](std::vector<Stream*>& running,
                             auto&& is_done) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
    for (Stream* stream : running) {
      if (is_done(*stream)) done_.push_back(stream);
    }
    running.erase(std::remove_if(running.begin(), running.end(), [&](Stream* s) { return is_done(*s); }),
                  running.end());
  };
  take_done(working_, [](const Stream& stream)
                          GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { return stream.remaining_ns_ < kDoneNs; });
  for (auto& bus : buses_) {
    if (bus.empty() || bus.front()->end_ns_ > now_ns_) continue;
    done_.push_back(bus.front());
    bus.erase(bus.begin());
    if (!bus.empty()) bus.front()->end_ns_ = now_ns_ + bus.front()->queue_.front().duration_ns;
  }
  take_done(in_memory_, [this](const Stream& stream)
                            GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { return stream.end_ns_ <= now_ns_; });
  for (Stream* stream : done_) finish_front(*stream);
  return true;
}

bool Device::step() {
  bool moved = true;
  if (!due_callbacks_.empty()) {
    run_callback();
  } else {
    moved = move_clock();
  }
  if (moved && waiting_threads_ > 0) progress_.notify_all();
  return moved;
}

base::Status Device::wait_passed(Stream& stream, uint64_t sequence) {
  const std::shared_ptr<Stream> keep = stream.shared_from_this();
  polls_ = 0;
  while (!stream.passed(sequence)) {
    if (step()) continue;
    uint32_t own = 0;
    for (const Running* running = t_running; running != nullptr; running = running->outer)
      if (running->device == this) ++own;
    if (running_callbacks_ <= own) {
      return {GPUSHARE_INVALID_STATE, "a host function waits for work that cannot start before it returns"};
    }
    ++waiting_threads_;
    progress_.wait(mutex_);
    --waiting_threads_;
  }
  return {};
}

bool Device::poll() {
  if (base::QuietQueries::active() || ++polls_ < costs_.polls) return false;
  polls_ = 0;
  return step();
}

}  // namespace gpushare::device::sim
