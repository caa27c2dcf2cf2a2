// Streams, events, and the thread that runs a stream's work.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <thread>

#include "world.hpp"

using namespace standin;  // NOLINT(google-build-using-namespace): entry points live in the global namespace

namespace standin {
namespace {

uint64_t stepped(uint64_t ns) {
  const uint64_t step = world().setting("event_step_ns");
  return step == 0 ? ns : ns / step * step;
}

// A GPU sees new work at once. A thread that sleeps is woken some 50 us later, which would be taken for the caller's delay.
void look_for_work(Stream* stream, std::unique_lock<std::mutex>& lock) {
  const uint64_t spin_ns = world().setting("doorbell_spin_ns");
  if (spin_ns == 0) return;
  const uint64_t seen = stream->rung.load();
  lock.unlock();
  for (const uint64_t end = now_ns() + spin_ns; stream->rung.load() == seen && now_ns() < end;)
    std::this_thread::yield();
  lock.lock();
}

void run_stream(Stream* stream) {
  World& w = world();
  std::unique_lock<std::mutex> lock(w.mutex);
  for (;;) {
    if (stream->queue.empty() && !stream->stopping) look_for_work(stream, lock);
    while (stream->queue.empty() && !stream->stopping) stream->work_came.wait(lock);
    if (stream->queue.empty()) return;
    QueuedOp op = std::move(stream->queue.front());
    stream->queue.pop_front();
    if (op.waits_for != nullptr) wait_completed(lock, op.waits_for, op.waits_until);
    if (op.ticket != 0) {
      HardwareQueue& hardware = *stream->hardware;
      w.progress.wait(lock, [&] { return hardware.begun + 1 == op.ticket; });
      ++hardware.begun;
      w.progress.notify_all();
    }
    // The driver may run the host functions of independent streams one after the other: one that waits for another
    // stream's function waits for ever.
    Context* const owner = root(stream->context);
    const bool takes_turns = op.work.host_function && w.setting("serial_host_functions") != 0;
    if (takes_turns) {
      const uint64_t turn = owner->host_functions_come++;
      w.progress.wait(lock, [&] { return owner->host_functions_gone == turn; });
    }
    const bool poisoned = root(stream->context)->error != CUDA_SUCCESS;
    if (!poisoned && op.work.fails_with != CUDA_SUCCESS) {
      poison(root(stream->context), op.work.fails_with);
    } else if (!poisoned && op.work.run) {
      if (op.work.host_function) join(w.observed, op.before);
      const uint64_t rate = w.setting("copy_bytes_per_s");
      lock.unlock();
      if (op.work.host_function) ++host_function_depth();
      op.work.run();
      if (op.work.host_function) --host_function_depth();
      if (op.work.copied_bytes > 0 && rate > 0) {
        std::this_thread::sleep_for(std::chrono::nanoseconds(static_cast<uint64_t>(
            static_cast<double>(op.work.copied_bytes) * 1e9 / static_cast<double>(rate))));
      }
      op.work.run = nullptr;  // what it captured goes outside the lock
      lock.lock();
    }
    if (takes_turns) ++owner->host_functions_gone;
    if (op.work.records != nullptr && op.work.records->stamp == op.record_stamp)
      op.work.records->time_ns = stepped(now_ns());
    ++stream->completed;
    w.progress.notify_all();
  }
}

void push(Stream* stream, QueuedOp op) {
  op.number = ++stream->enqueued;
  if (stream->hardware != nullptr) op.ticket = ++stream->hardware->enqueued;
  if (op.work.host_function) op.before = finished_by(stream), op.before[stream->id] = op.number - 1;
  stream->queue.push_back(std::move(op));
  stream->rung.fetch_add(1);
  if (!stream->thread.joinable()) stream->thread = std::thread(run_stream, stream);
  stream->work_came.notify_one();
}

// Makes `stream`'s next op come after all of `other`.
void come_after(Stream* stream, Stream* other) {
  if (other->completed < other->enqueued) {
    QueuedOp op;
    op.waits_for = other;
    op.waits_until = other->enqueued;
    push(stream, std::move(op));
  }
  join(stream->known, finished_by(other));
}

// The legacy default stream waits for every blocking stream of its context, and they for it.
void order_with_legacy(Stream* stream) {
  Stream* legacy = stream->context->legacy;
  if (stream == legacy) {
    for (const auto& [raw, other] : world().streams) {
      if (other.get() != legacy && other->blocking && other->alive() && other->context == stream->context)
        come_after(stream, other.get());
    }
  } else if (stream->blocking) {
    come_after(stream, legacy);
  }
}

CUresult capture_work(Call& call, Stream* stream, Work work) {
  Capture* capture = stream->capture;
  if (capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  capture->graph->nodes.push_back(std::move(work));
  if (stream != capture->origin) capture->unjoined.insert(stream);
  return CUDA_SUCCESS;
}

// A thread that has waited for the device is woken some time after that.
void wake_late(std::unique_lock<std::mutex>& lock) {
  const uint64_t late = world().setting("late_wake_ns");
  if (late == 0) return;
  lock.unlock();
  std::this_thread::sleep_for(std::chrono::nanoseconds(late));
  lock.lock();
}

CUresult refuse_capturing(Call& call, Stream* stream) {
  stream->capture->invalid = true;
  return call.misuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "the stream captures a graph");
}

}  // namespace

void join(Clock& into, const Clock& from) {
  for (const auto& [stream, number] : from) {
    uint64_t& known = into[stream];
    known = std::max(known, number);
  }
}

Clock finished_by(const Stream* stream) {
  Clock clock = stream->known;
  clock[stream->id] = stream->enqueued;
  return clock;
}

void poison(Context* context, CUresult result) {
  if (context->error == CUDA_SUCCESS) context->error = result;
  world().progress.notify_all();
}

void wait_completed(std::unique_lock<std::mutex>& lock, Stream* stream, uint64_t number) {
  world().progress.wait(lock, [&] { return stream->completed >= number; });
}

Stream* make_stream(const std::string& call, Context* context, int priority, bool blocking) {
  World& w = world();
  auto owned = std::make_unique<Stream>();
  Stream* stream = owned.get();
  stream->born = call;
  stream->id = w.next_stream_id++;
  stream->context = context;
  stream->priority = priority;
  stream->blocking = blocking;
  Context* const owner = root(context);
  if (!owner->hardware.empty())
    stream->hardware = &owner->hardware[owner->next_hardware++ % owner->hardware.size()];
  w.streams[stream] = std::move(owned);
  return stream;
}

void stop_stream(Call& call, Stream* stream) {
  stream->stopping = true;
  stream->work_came.notify_one();
  std::thread thread = std::move(stream->thread);
  if (!thread.joinable()) return;
  call.lock().unlock();
  thread.join();
  call.lock().lock();
}

CUresult enqueue(Call& call, Stream* stream, Work work) {
  work.call = call.text();
  work.fails_with = call.work_fails_with();
  if (stream->capture != nullptr) return capture_work(call, stream, std::move(work));
  order_with_legacy(stream);
  bool unordered = false;
  for (const Range& range : work.ranges) {
    const CUresult checked = check_access(call, stream, stream->enqueued + 1, range, &unordered);
    if (checked != CUDA_SUCCESS) return checked;
  }
  if (unordered) work.run = nullptr;  // told already; done, it would be a race of this process too
  QueuedOp op;
  op.work = std::move(work);
  push(stream, std::move(op));
  return CUDA_SUCCESS;
}

}  // namespace standin

STANDIN_API CUresult cuStreamCreateWithPriority(CUstream* out_stream, unsigned flags, int priority) {
  STANDIN_ENTRY(cuStreamCreateWithPriority);
  STANDIN_CONTEXT();
  if (flags > CU_STREAM_NON_BLOCKING) return call.misuse(CUDA_ERROR_INVALID_VALUE, "unknown flags");
  // The driver clamps priorities; a caller that relies on it did not ask for the range.
  if (priority > 0 || priority < -5)
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "the priority is outside [-5, 0]");
  *out_stream = reinterpret_cast<CUstream>(
      make_stream(call.text(), context, priority, flags != CU_STREAM_NON_BLOCKING));
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuStreamCreate(CUstream* out_stream, unsigned flags) {
  STANDIN_ENTRY(cuStreamCreate);
  STANDIN_CONTEXT();
  if (flags > CU_STREAM_NON_BLOCKING) return call.misuse(CUDA_ERROR_INVALID_VALUE, "unknown flags");
  *out_stream =
      reinterpret_cast<CUstream>(make_stream(call.text(), context, 0, flags != CU_STREAM_NON_BLOCKING));
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuStreamGetPriority(CUstream handle, int* priority) {
  STANDIN_ENTRY(cuStreamGetPriority);
  Stream* stream = call.stream(handle);
  if (stream == nullptr) return call.verdict();
  *priority = stream->priority;
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuStreamDestroy_v2(CUstream handle) {
  STANDIN_ENTRY(cuStreamDestroy);
  if (handle == nullptr)
    return call.misuse(CUDA_ERROR_INVALID_HANDLE, "the default stream cannot be destroyed");
  Stream* stream = call.stream(handle);
  if (stream == nullptr) return call.verdict();
  if (stream->capture != nullptr) return refuse_capturing(call, stream);
  stream->died = call.text();
  stop_stream(call, stream);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuStreamQuery(CUstream handle) {
  STANDIN_ENTRY(cuStreamQuery);
  Stream* stream = call.stream(handle);
  if (stream == nullptr) return call.verdict();
  if (stream->capture != nullptr) return refuse_capturing(call, stream);
  if (call.unsafe_during_capture()) return call.verdict();
  if (stream->completed < stream->enqueued) return CUDA_ERROR_NOT_READY;
  join(world().observed, finished_by(stream));
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuStreamSynchronize(CUstream handle) {
  STANDIN_ENTRY(cuStreamSynchronize);
  Stream* stream = call.stream(handle);
  if (stream == nullptr) return call.verdict();
  if (stream->capture != nullptr) return refuse_capturing(call, stream);
  if (call.unsafe_during_capture()) return call.verdict();
  const Clock finished = finished_by(stream);
  wait_completed(call.lock(), stream, stream->enqueued);
  wake_late(call.lock());
  join(world().observed, finished);
  return root(stream->context)->error;
}

STANDIN_API CUresult cuCtxSynchronize(void) {
  STANDIN_ENTRY(cuCtxSynchronize);
  STANDIN_CONTEXT();
  if (call.unsafe_during_capture()) return call.verdict();
  std::vector<Stream*> streams;
  for (const auto& [raw, stream] : world().streams) {
    if (root(stream->context) == root(context) && stream->alive()) streams.push_back(stream.get());
  }
  for (Stream* stream : streams) {
    const Clock finished = finished_by(stream);
    wait_completed(call.lock(), stream, stream->enqueued);
    join(world().observed, finished);
  }
  wake_late(call.lock());
  return root(context)->error;
}

STANDIN_API CUresult cuStreamWaitEvent(CUstream stream_handle, CUevent event_handle, unsigned flags) {
  STANDIN_ENTRY(cuStreamWaitEvent);
  Stream* stream = call.stream(stream_handle);
  Event* event = stream != nullptr ? call.event(event_handle) : nullptr;
  if (event == nullptr) return call.verdict();
  if (flags > 1) return call.misuse(CUDA_ERROR_INVALID_VALUE, "unknown flags");
  if (event->captured_in != nullptr) {
    Capture* capture = event->captured_in;
    if (stream->capture != nullptr && stream->capture != capture)
      return call.misuse(CUDA_ERROR_STREAM_CAPTURE_MERGE,
                         "the stream and the event are in different captures");
    stream->capture = capture;
    capture->streams.insert(stream);
    if (stream != capture->origin) capture->unjoined.insert(stream);
    capture->unjoined.erase(event->captured_on);
    return CUDA_SUCCESS;
  }
  if (stream->capture != nullptr) {
    stream->capture->invalid = true;
    return call.misuse(CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
                       "a capture cannot wait for an event from outside of it");
  }
  if (event->stream == nullptr) return CUDA_SUCCESS;
  order_with_legacy(stream);
  QueuedOp op;
  op.waits_for = event->stream == stream ? nullptr : event->stream;
  op.waits_until = event->number;
  push(stream, std::move(op));
  join(stream->known, event->after);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuEventCreate(CUevent* out_event, unsigned flags) {
  STANDIN_ENTRY(cuEventCreate);
  STANDIN_CONTEXT();
  if (flags > 7) return call.misuse(CUDA_ERROR_INVALID_VALUE, "unknown flags");
  auto owned = std::make_unique<Event>();
  Event* event = owned.get();
  event->born = call.text();
  event->context = context;
  event->timing = (flags & CU_EVENT_DISABLE_TIMING) == 0;
  world().events[event] = std::move(owned);
  *out_event = reinterpret_cast<CUevent>(event);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuEventDestroy_v2(CUevent handle) {
  STANDIN_ENTRY(cuEventDestroy);
  Event* event = call.event(handle);
  if (event == nullptr) return call.verdict();
  event->died = call.text();
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuEventRecord(CUevent event_handle, CUstream stream_handle) {
  STANDIN_ENTRY(cuEventRecord);
  Stream* stream = call.stream(stream_handle);
  Event* event = stream != nullptr ? call.event(event_handle) : nullptr;
  if (event == nullptr) return call.verdict();
  if (root(event->context) != root(stream->context))
    return call.misuse(CUDA_ERROR_INVALID_HANDLE,
                       "wrong context: the event and the stream belong to different contexts");
  if (stream->capture != nullptr) {
    if (stream->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    event->captured_in = stream->capture;
    event->captured_on = stream;
    return CUDA_SUCCESS;
  }
  order_with_legacy(stream);
  event->captured_in = nullptr;
  QueuedOp op;
  op.work.call = call.text();
  op.work.records = event;
  op.record_stamp = ++event->stamp;
  push(stream, std::move(op));
  event->stream = stream;
  event->number = stream->enqueued;
  event->after = finished_by(stream);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuEventQuery(CUevent handle) {
  STANDIN_ENTRY(cuEventQuery);
  Event* event = call.event(handle);
  if (event == nullptr) return call.verdict();
  if (event->captured_in != nullptr)
    return call.misuse(CUDA_ERROR_CAPTURED_EVENT, "the event's last record is part of a graph");
  if (call.unsafe_during_capture()) return call.verdict();
  if (event->stream == nullptr) return CUDA_SUCCESS;
  if (event->stream->completed < event->number) return CUDA_ERROR_NOT_READY;
  join(world().observed, event->after);
  return root(event->context)->error;
}

STANDIN_API CUresult cuEventSynchronize(CUevent handle) {
  STANDIN_ENTRY(cuEventSynchronize);
  Event* event = call.event(handle);
  if (event == nullptr) return call.verdict();
  if (event->captured_in != nullptr)
    return call.misuse(CUDA_ERROR_CAPTURED_EVENT, "the event's last record is part of a graph");
  if (call.unsafe_during_capture()) return call.verdict();
  if (event->stream == nullptr) return CUDA_SUCCESS;
  const Clock finished = event->after;
  wait_completed(call.lock(), event->stream, event->number);
  wake_late(call.lock());
  join(world().observed, finished);
  return root(event->context)->error;
}

STANDIN_API CUresult cuEventElapsedTime(float* milliseconds, CUevent start_handle, CUevent end_handle) {
  STANDIN_ENTRY(cuEventElapsedTime);
  Event* start = call.event(start_handle);
  Event* end = start != nullptr ? call.event(end_handle) : nullptr;
  if (end == nullptr) return call.verdict();
  for (Event* event : {start, end}) {
    if (!event->timing)
      return call.misuse(CUDA_ERROR_INVALID_HANDLE, "the event of " + event->born + " has no timing");
    if (event->stream == nullptr)
      return call.misuse(CUDA_ERROR_INVALID_HANDLE, "the event of " + event->born + " was never recorded");
    if (event->stream->completed < event->number) return CUDA_ERROR_NOT_READY;
  }
  *milliseconds =
      static_cast<float>((static_cast<double>(end->time_ns) - static_cast<double>(start->time_ns)) / 1e6);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void* user_data) {
  STANDIN_ENTRY(cuLaunchHostFunc);
  Stream* stream = call.stream(handle);
  if (stream == nullptr) return call.verdict();
  if (function == nullptr) return call.misuse(CUDA_ERROR_INVALID_VALUE, "the function is null");
  Work work;
  work.host_function = true;
  work.run = [function, user_data] { function(user_data); };
  return enqueue(call, stream, std::move(work));
}
