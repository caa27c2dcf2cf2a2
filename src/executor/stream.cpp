// SPDX-License-Identifier: Apache-2.0
#include "executor/stream.hpp"

#include <exception>

#include "base/calls.hpp"
#include "base/cancel.hpp"
#include "executor/internal.hpp"

namespace gpushare::executor {

StreamImpl::StreamImpl(std::shared_ptr<RuntimeImpl> runtime, device::Stream stream, LaneSlot* lane)
    : runtime_(std::move(runtime)), stream_(std::move(stream)), lane_(lane) {
  gate_.open();
  if (lane_ == nullptr) runtime_->side_streams_.made();
}

StreamImpl::~StreamImpl() {
  // A side stream dropped without release(). Lanes' are shut by the runtime.
  if (stream_) shut();
}

void StreamImpl::shut() {
  gate_.close();
  const bool was_open = static_cast<bool>(stream_);
  { const device::Stream gone = std::move(stream_); }
  // Functions that a lost device never ran hold sessions, which go without the lock. (Making a std::deque to swap them into
  // would allocate.)
  for (;;) {
    std::shared_ptr<SessionImpl> session;
    base::MutexLock lock(mutex_);
    spare_calls_.clear();
    if (calls_.empty()) break;
    session = std::move(calls_.front().session);
    calls_.pop_front();
  }
  if (was_open && lane_ == nullptr) runtime_->side_streams_.gone();
}

base::Status StreamImpl::released() {
  return {GPUSHARE_INVALID_STATE, "the stream was released, or its runtime closed"};
}

// Work on a stream may reveal that the device is lost.
base::Status StreamImpl::checked(base::Status status) const {
  if (status.code() == GPUSHARE_DEVICE_LOST) runtime_->note(status);
  return status;
}

template <class F>
base::Status StreamImpl::use(F&& body) const {
  base::Status status;
  {
    const GatePass pass(gate_);
    if (!pass) return released();
    status = body();
  }
  return status.ok() ? status : checked(std::move(status));
}

base::Result<std::shared_ptr<Session>> StreamImpl::owner() const {
  if (lane_ == nullptr) return std::shared_ptr<Session>();
  const GatePass pass(gate_);
  if (!pass) return base::Status(GPUSHARE_INVALID_STATE, "the stream's runtime is closed");
  return std::shared_ptr<Session>(lane_->current_owner());
}

base::Result<void*> StreamImpl::native() const {
  void* native = nullptr;
  GPUSHARE_RETURN_IF_ERROR(use([&]() -> base::Status {
    native = stream_.native();
    return {};
  }));
  return native;
}

base::Status StreamImpl::synchronize() {
  return use([&]() -> base::Status {
    if (!NoWaitScope::active()) return stream_.synchronize();
    base::Status now = stream_.query();
    if (now.code() != GPUSHARE_NOT_READY) return now;
    return {GPUSHARE_INVALID_STATE,
            "a stream cannot be waited for inside a function that the device or the runtime waits for"};
  });
}

StreamImpl::HostCall* StreamImpl::take_call() {
  base::MutexLock lock(mutex_);
  if (spare_calls_.empty()) {
    calls_.emplace_back();
    spare_calls_.reserve(calls_.size());  // giving back must not fail
    return &calls_.back();
  }
  HostCall* call = spare_calls_.back();
  spare_calls_.pop_back();
  return call;
}

void StreamImpl::give_call(HostCall* call) {
  const std::shared_ptr<SessionImpl> session = std::move(call->session);
  base::MutexLock lock(mutex_);
  spare_calls_.push_back(call);
}

GPUSHARE_CATCHES_FORCED_UNWIND
void StreamImpl::run_host_call(void* user_data) {
  auto* call = static_cast<HostCall*>(user_data);
  const NoWaitScope scope;
  StreamImpl& stream = *call->stream;
  const gpushare_host_function function = call->function;
  void* const function_data = call->user_data;
  const std::shared_ptr<SessionImpl> session = call->session;
  const uint64_t serial = call->serial;
  stream.give_call(call);
  const base::CallbackCalls may_call;
  if (session == nullptr) {
    function(function_data);  // what it throws is the side stream's own failure
    return;
  }
  // A lane's stream is shared: what a session's function throws is a failure of its iteration, not of the stream.
  std::string what;
  try {
    function(function_data);
    return;
  } catch (const std::exception& error) {
    what = std::string(" threw: ") + error.what();
  } catch (const base::ForcedUnwind&) {
    base::thread_ends() = true;
    session->runtime_->fail_session(
        *session, {GPUSHARE_CALLBACK_FAILED,
                   "session '" + session->name() + "': a host function ended its thread (pthread_exit)"});
    throw;
  } catch (...) {
    what = " threw";
  }
  session->runtime_->fail_work(
      *session, *stream.lane_, serial,
      {GPUSHARE_CALLBACK_FAILED, "session '" + session->name() + "': a host function" + what});
}

base::Status StreamImpl::launch_host(gpushare_host_function function, void* user_data) {
  if (function == nullptr) return {GPUSHARE_INVALID_ARGUMENT, "the host function is null"};
  return use([&]() -> base::Status {
    std::shared_ptr<SessionImpl> session = lane_ != nullptr ? lane_->current_owner() : nullptr;
    const uint64_t serial =
        session != nullptr ? session->iteration_.serial_.load(std::memory_order_relaxed) : 0;
    HostCall* call = take_call();
    *call = {this, function, user_data, std::move(session), serial};
    base::Status status = stream_.launch_host(run_host_call, call);
    if (!status.ok()) give_call(call);
    return status;
  });
}

base::Status StreamImpl::copy(uint64_t destination, uint64_t source, uint64_t bytes, uint32_t kind) {
  return use([&] { return stream_.copy(destination, source, bytes, kind); });
}

base::Status StreamImpl::fill(memory::Address address, uint8_t value, uint64_t bytes) {
  return use([&] { return stream_.fill(address, value, bytes); });
}

base::Status StreamImpl::work(const gpushare_backend_work& work) {
  return use([&] { return stream_.work(work); });
}

base::Result<HeldStream> StreamImpl::hold() const {
  GatePass pass(gate_);
  if (!pass) return released();
  return HeldStream(std::move(pass), stream_);
}

const Runtime* StreamImpl::runtime() const {
  return runtime_.get();
}

void SideStreams::add(const std::shared_ptr<StreamImpl>& stream) {
  base::MutexLock lock(mutex_);
  std::erase_if(streams_, [](const auto& weak) { return weak.expired(); });
  streams_.push_back(stream);
}

std::vector<std::shared_ptr<StreamImpl>> SideStreams::all() const {
  std::vector<std::shared_ptr<StreamImpl>> all;
  base::MutexLock lock(mutex_);
  for (const auto& weak : streams_)
    if (auto stream = weak.lock(); stream != nullptr) all.push_back(std::move(stream));
  return all;
}

void SideStreams::made() {
  base::MutexLock lock(mutex_);
  ++open_;
}

void SideStreams::gone() {
  base::MutexLock lock(mutex_);
  if (--open_ == 0) none_left_.notify_all();
}

std::vector<std::weak_ptr<StreamImpl>> SideStreams::take_all() {
  base::MutexLock lock(mutex_);
  return std::move(streams_);
}

void SideStreams::wait_until_none() {
  base::MutexLock lock(mutex_);
  while (open_ > 0) none_left_.wait(mutex_);
}

base::Status StreamImpl::release() {
  if (lane_ != nullptr)
    return {GPUSHARE_INVALID_ARGUMENT, "a lane's stream belongs to the lane: only side streams are released"};
  if (NoWaitScope::active())
    return {GPUSHARE_INVALID_STATE,
            "a stream cannot be released inside a host function or progress function"};
  if (released_.exchange(true))
    return {GPUSHARE_INVALID_STATE, "the stream was released, or its runtime closed"};
  shut();
  return {};
}

}  // namespace gpushare::executor
