// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/cuda_stream.hpp"

#include <cmath>
#include <exception>
#include <string>
#include <utility>

#include "base/clock.hpp"
#include "device/cuda/cuda_device.hpp"
#include "device/support/ops_guard.hpp"

namespace gpushare::device::cuda {

base::Result<api::CUevent> EventPool::take(bool timing) {
  {
    base::MutexLock lock(mutex_);
    std::vector<api::CUevent>& free = free_[timing ? 1 : 0];
    if (!free.empty()) {
      const api::CUevent event = free.back();
      free.pop_back();
      return event;
    }
  }
  unsigned flags = timing ? 0u : api::CU_EVENT_DISABLE_TIMING;
  if (blocking_) flags |= api::CU_EVENT_BLOCKING_SYNC;
  api::CUevent event = nullptr;
  GPUSHARE_RETURN_IF_ERROR(context_.status(context_.driver().cuEventCreate(&event, flags), "cuEventCreate"));
  return event;
}

void EventPool::put(api::CUevent event, bool timing) {
  {
    base::MutexLock lock(mutex_);
    std::vector<api::CUevent>& free = free_[timing ? 1 : 0];
    if (free.size() < kKept) {
      free.push_back(event);
      return;
    }
  }
  (void)context_.status(context_.driver().cuEventDestroy(event), "cuEventDestroy");
}

void EventPool::clear() {
  base::MutexLock lock(mutex_);
  for (std::vector<api::CUevent>& free : free_) {
    for (const api::CUevent event : free) (void)context_.driver().cuEventDestroy(event);
    free.clear();
  }
}

void CallbackWaits::wake(void* data) {
  auto* waiter = static_cast<Waiter*>(data);
  base::MutexLock lock(waiter->mutex);
  waiter->passed = true;
  waiter->woken.notify_one();
}

base::Result<std::unique_ptr<CallbackWaits::Waiter>> CallbackWaits::take() {
  {
    base::MutexLock lock(mutex_);
    for (size_t i = late_.size(); i-- > 0;) {
      base::MutexLock look(late_[i]->mutex);
      if (!std::exchange(late_[i]->passed, false)) continue;
      free_.push_back(std::move(late_[i]));
      late_.erase(late_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (!free_.empty()) {
      std::unique_ptr<Waiter> waiter = std::move(free_.back());
      free_.pop_back();
      return waiter;
    }
  }
  auto waiter = std::make_unique<Waiter>();
  GPUSHARE_RETURN_IF_ERROR(context_.status(
      context_.driver().cuStreamCreateWithPriority(&waiter->stream, api::CU_STREAM_NON_BLOCKING, 0),
      "cuStreamCreateWithPriority"));
  return waiter;
}

base::Status CallbackWaits::wait(api::CUevent event) {
  const Driver& driver = context_.driver();
  if (const api::CUresult now = driver.cuEventQuery(event); now != api::CUDA_ERROR_NOT_READY)
    return context_.status(now, "cuEventQuery");
  GPUSHARE_ASSIGN_OR_RETURN(std::unique_ptr<Waiter> waiter, take());
  const char* call = "cuStreamWaitEvent";
  bool late = false;
  api::CUresult result = driver.cuStreamWaitEvent(waiter->stream, event, 0);
  if (result == api::CUDA_SUCCESS) {
    call = "cuLaunchHostFunc";
    result = driver.cuLaunchHostFunc(waiter->stream, &CallbackWaits::wake, waiter.get());
  }
  if (result == api::CUDA_SUCCESS) {
    // A lost context may never run the function, and a host function of another stream may hold it up.
    constexpr uint64_t kLookNs = 10'000'000;
    call = "cuEventQuery";
    bool passed = false;
    do {
      {
        base::MutexLock lock(waiter->mutex);
        if (!waiter->passed)
          (void)waiter->woken.wait_until(waiter->mutex, base::Deadline::after(kLookNs).at());
        passed = waiter->passed;
      }
      // Never with the lock, which the function takes: the driver may keep us until another thread's cuMemFree is
      // through, and that waits for the function.
      result = driver.cuEventQuery(event);
    } while (result == api::CUDA_ERROR_NOT_READY && !passed);
    // Recorded anew meanwhile: the record that was waited for has passed.
    if (result == api::CUDA_ERROR_NOT_READY) result = api::CUDA_SUCCESS;
    base::MutexLock lock(waiter->mutex);
    late = !std::exchange(waiter->passed, false);
  }
  base::Status status = context_.status(result, call);
  if (context_.lost()) {
    // The function may still run, so the object that it uses is kept for good.
    static auto* kept = new std::vector<std::unique_ptr<Waiter>>;
    static base::Mutex kept_mutex;
    base::MutexLock lock(kept_mutex);
    kept->push_back(std::move(waiter));
    return status;
  }
  base::MutexLock lock(mutex_);
  (late ? late_ : free_).push_back(std::move(waiter));
  return status;
}

void CallbackWaits::clear() {
  base::MutexLock lock(mutex_);
  for (auto& waiter : late_) {
    (void)context_.driver().cuStreamSynchronize(waiter->stream);
    free_.push_back(std::move(waiter));
  }
  late_.clear();
  for (const auto& waiter : free_) (void)context_.driver().cuStreamDestroy(waiter->stream);
  free_.clear();
}

base::Status HostFunctions::launch(Context& context, api::CUstream stream, gpushare_host_function function,
                                   void* user_data) {
  Call* call = nullptr;
  {
    base::MutexLock lock(mutex_);
    if (free_calls_.empty()) {
      free_calls_.reserve(calls_.size() + 1);  // so that run() never allocates
      calls_.push_back(std::make_unique<Call>());
      free_calls_.push_back(calls_.back().get());
    }
    call = free_calls_.back();
    free_calls_.pop_back();
  }
  *call = {this, function, user_data, launched_.fetch_add(1, std::memory_order_relaxed) + 1};
  const api::CUresult result = context.driver().cuLaunchHostFunc(stream, &HostFunctions::run, call);
  if (result == api::CUDA_SUCCESS) return {};
  finished_.fetch_add(1, std::memory_order_release);
  {
    base::MutexLock lock(mutex_);
    free_calls_.push_back(call);
  }
  return context.status(result, "cuLaunchHostFunc");
}

void HostFunctions::run(void* data) {
  Call* call = static_cast<Call*>(data);
  HostFunctions& owner = *call->owner;
  base::Status error;
  if (owner.failed_.load(std::memory_order_acquire) == 0) {
    HostFunctionScope scope;
    try {
      call->function(call->user_data);
    } catch (const std::exception& thrown) {
      error = base::Status(GPUSHARE_CALLBACK_FAILED, std::string("a host function threw: ") + thrown.what());
    } catch (...) {
      error = base::Status(GPUSHARE_CALLBACK_FAILED, "a host function threw");
    }
  }
  {
    base::MutexLock lock(owner.mutex_);
    if (!error.ok()) {
      owner.error_ = std::move(error);
      owner.failed_.store(call->number, std::memory_order_release);
    }
    owner.free_calls_.push_back(call);
  }
  owner.finished_.fetch_add(1, std::memory_order_release);
}

base::Status HostFunctions::failure(uint64_t count) const {
  const uint64_t failed = failed_.load(std::memory_order_acquire);
  if (failed == 0 || failed > count) return {};
  base::MutexLock lock(mutex_);
  return error_;
}

base::Result<bool> Stream::capturing() {
  const Driver& driver = device_.context().driver();
  if (!driver.has_capture()) return false;
  int status = api::CU_STREAM_CAPTURE_STATUS_NONE;
  GPUSHARE_RETURN_IF_ERROR(
      device_.context().status(driver.cuStreamIsCapturing(handle_, &status), "cuStreamIsCapturing"));
  return status != api::CU_STREAM_CAPTURE_STATUS_NONE;
}

base::Status Stream::check_capturing(const char* what) {
  GPUSHARE_ASSIGN_OR_RETURN(const bool is_capturing, capturing());
  if (!is_capturing) return {};
  return {GPUSHARE_INVALID_STATE,
          std::string(what) +
              ": the stream captures a CUDA graph; end the capture first, nothing of it runs before"};
}

base::Result<bool> Stream::drop_capture() {
  Context& context = device_.context();
  GPUSHARE_ENTER_CONTEXT(context);
  GPUSHARE_ASSIGN_OR_RETURN(const bool is_capturing, capturing());
  if (!is_capturing) return false;
  api::CUgraph graph = nullptr;
  const api::CUresult result = context.driver().cuStreamEndCapture(handle_, &graph);
  if (graph != nullptr) (void)context.driver().cuGraphDestroy(graph);
  // It does not matter why the capture is invalid or unjoined. It matters only if the capture goes on.
  if (result == api::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD) {
    return base::Status(
        GPUSHARE_INVALID_STATE,
        "stream_capture_drop: another thread began the capture of a CUDA graph on the stream, and "
        "only that thread can end it",
        result);
  }
  GPUSHARE_ASSIGN_OR_RETURN(const bool goes_on, capturing());
  if (goes_on) return context.status(result, "cuStreamEndCapture");
  return true;
}

base::Status Stream::query() {
  Context& context = device_.context();
  GPUSHARE_ENTER_CONTEXT(context);
  GPUSHARE_RETURN_IF_ERROR(check_capturing("stream_query"));
  CaptureRelaxed relaxed(context.driver());
  const api::CUresult result = context.driver().cuStreamQuery(handle_);
  if (result == api::CUDA_ERROR_NOT_READY) {
    base::Status failed = failure();
    return failed.ok() ? not_ready() : failed;
  }
  GPUSHARE_RETURN_IF_ERROR(context.status(result, "cuStreamQuery"));
  return failure();
}

base::Status Stream::synchronize() {
  Context& context = device_.context();
  GPUSHARE_ENTER_CONTEXT(context);
  GPUSHARE_RETURN_IF_ERROR(check_capturing("stream_synchronize"));
  CaptureRelaxed relaxed(context.driver());
  if (device_.waits() == WaitMode::kSpin) {
    GPUSHARE_RETURN_IF_ERROR(
        context.status(context.driver().cuStreamSynchronize(handle_), "cuStreamSynchronize"));
    return failure();
  }
  // The caller takes back what the work uses after this: a wait that cannot sleep must not end early.
  if (const base::Status slept = sleep(); !slept.ok()) {
    GPUSHARE_RETURN_IF_ERROR(context.check_lost());
    GPUSHARE_RETURN_IF_ERROR(
        context.status(context.driver().cuStreamSynchronize(handle_), "cuStreamSynchronize"));
  }
  return failure();
}

base::Status Stream::sleep() {
  Context& context = device_.context();
  // cuStreamSynchronize waits as the context's owner chose, which may be spinning; only an event can be told
  // to sleep.
  if (const api::CUresult now =
          ask_for(device_.spin_ns(), [&] { return context.driver().cuStreamQuery(handle_); });
      now != api::CUDA_ERROR_NOT_READY)
    return context.status(now, "cuStreamQuery");
  GPUSHARE_ASSIGN_OR_RETURN(const api::CUevent event, device_.events().take(/*timing=*/false));
  const char* call = "cuEventRecord";
  api::CUresult result = context.driver().cuEventRecord(event, handle_);
  base::Status waited;
  if (result == api::CUDA_SUCCESS && device_.waits() == WaitMode::kCallback) {
    waited = device_.callback_waits().wait(event);
  } else if (result == api::CUDA_SUCCESS) {
    call = "cuEventSynchronize";
    result = context.driver().cuEventSynchronize(event);
  }
  device_.events().put(event, /*timing=*/false);
  GPUSHARE_RETURN_IF_ERROR(context.status(result, call));
  return waited;
}

Event::Point Event::point() const {
  base::MutexLock lock(mutex_);
  return point_;
}

base::Status Event::record(Stream& stream) {
  Context& context = device_.context();
  GPUSHARE_ENTER_CONTEXT(context);
  GPUSHARE_RETURN_IF_ERROR(stream.failure());
  // Recording during a capture is refused: the event would become part of the graph, and nobody could query it any more.
  GPUSHARE_RETURN_IF_ERROR(stream.check_capturing("event_record"));
  base::MutexLock lock(mutex_);
  const uint64_t launched = stream.functions()->launched();
  GPUSHARE_RETURN_IF_ERROR(
      context.status(context.driver().cuEventRecord(handle_, stream.handle()), "cuEventRecord"));
  point_.launched = launched;
  if (point_.functions != stream.functions()) point_.functions = stream.functions();
  return {};
}

base::Status Event::query() {
  const Point recorded = point();
  if (recorded.functions == nullptr) return {};
  Context& context = device_.context();
  GPUSHARE_ENTER_CONTEXT(context);
  CaptureRelaxed relaxed(context.driver());
  const api::CUresult result = context.driver().cuEventQuery(handle_);
  if (result == api::CUDA_ERROR_NOT_READY) return not_ready();
  GPUSHARE_RETURN_IF_ERROR(context.status(result, "cuEventQuery"));
  return recorded.functions->failure(recorded.launched);
}

base::Status Event::synchronize() {
  const Point recorded = point();
  if (recorded.functions == nullptr) return device_.context().check_lost();
  Context& context = device_.context();
  GPUSHARE_ENTER_CONTEXT(context);
  CaptureRelaxed relaxed(context.driver());
  const Driver& driver = context.driver();
  if (device_.waits() != WaitMode::kSpin) {
    // A question that fails says nothing of the event, which is waited for all the same.
    const api::CUresult now = ask_for(device_.spin_ns(), [&] { return driver.cuEventQuery(handle_); });
    if (now == api::CUDA_SUCCESS) return recorded.functions->failure(recorded.launched);
    if (now != api::CUDA_ERROR_NOT_READY) (void)context.status(now, "cuEventQuery");  // it may be lost
  }
  if (device_.waits() != WaitMode::kCallback || !device_.callback_waits().wait(handle_).ok()) {
    GPUSHARE_RETURN_IF_ERROR(context.check_lost());
    GPUSHARE_RETURN_IF_ERROR(context.status(driver.cuEventSynchronize(handle_), "cuEventSynchronize"));
  }
  return recorded.functions->failure(recorded.launched);
}

base::Status Event::make_wait(Stream& stream) {
  if (point().functions == nullptr) return {};
  Context& context = device_.context();
  GPUSHARE_ENTER_CONTEXT(context);
  GPUSHARE_RETURN_IF_ERROR(stream.failure());
  GPUSHARE_ASSIGN_OR_RETURN(const bool capturing, stream.capturing());
  if (capturing) {
    // The driver would end the capture. Work that has finished orders itself before every launch of the graph.
    base::Status passed = query();
    if (passed.code() != GPUSHARE_NOT_READY) return passed;
    return {GPUSHARE_INVALID_STATE,
            "stream_wait_event: the stream captures a CUDA graph, which cannot wait for work outside of it; "
            "wait for "
            "the event on the host, or before the capture begins"};
  }
  return context.status(context.driver().cuStreamWaitEvent(stream.handle(), handle_, 0), "cuStreamWaitEvent");
}

base::Result<uint64_t> Event::elapsed(Event& start, Event& end) {
  for (Event* event : {&start, &end}) {
    if (!event->timing_)
      return base::Status(GPUSHARE_INVALID_STATE, "the event was created without GPUSHARE_EVENT_TIMING");
    if (event->point().functions == nullptr)
      return base::Status(GPUSHARE_INVALID_STATE, "the event was never recorded");
  }
  if (&start.device_ != &end.device_) {
    return base::Status(GPUSHARE_INVALID_ARGUMENT, "the two events belong to different devices");
  }
  // The driver reports a pending event here too, but not in the same call the stream error behind it.
  GPUSHARE_RETURN_IF_ERROR(start.query());
  GPUSHARE_RETURN_IF_ERROR(end.query());
  Context& context = start.device_.context();
  GPUSHARE_ENTER_CONTEXT(context);
  float milliseconds = 0;
  CaptureRelaxed relaxed(context.driver());
  const api::CUresult result = context.driver().cuEventElapsedTime(&milliseconds, start.handle_, end.handle_);
  if (result == api::CUDA_ERROR_NOT_READY) return not_ready();
  GPUSHARE_RETURN_IF_ERROR(context.status(result, "cuEventElapsedTime"));
  if (!(milliseconds >= 0)) {
    return base::Status(GPUSHARE_INVALID_STATE, "the end event passed before the start event");
  }
  return static_cast<uint64_t>(std::llround(static_cast<double>(milliseconds) * 1e6));
}

}  // namespace gpushare::device::cuda
