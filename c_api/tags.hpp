// tags.hpp: the handle types, one table each, and what every body does with a handle first.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "c_api/guard.hpp"
#include "c_api/handles.hpp"
#include "executor/op_gate.hpp"
#include "executor/runtime.hpp"
#include "gpushare/gate.h"
#include "gpushare/gpushare.h"

namespace gpushare::framework {
class Allocator;
}
namespace gpushare::memory {
class Heap;
}
namespace gpushare::sched::slo {
class Histogram;
class ScoreQueue;
}  // namespace gpushare::sched::slo
namespace gpushare::loader {
class Image;
class Loader;
class Model;
class Switcher;
}  // namespace gpushare::loader

namespace gpushare::capi {

struct BatcherObject;       // batcher.cpp
struct RequestQueueObject;  // request_queue.hpp
struct StepQueueObject;     // step_queue.cpp

// Images and models as the ABI shows them: with what keeps them alive.
struct ImageObject {
  std::shared_ptr<loader::Loader> loader;
  std::shared_ptr<const loader::Image> image;
};
struct ModelObject {
  std::shared_ptr<loader::Model> model;
  bool borrowed = false;  // the switcher's
};

// A ticket as the ABI shows it. It is made before its iteration is submitted, so that nothing can fail afterwards.
struct TicketObject {
  std::shared_ptr<executor::Ticket> ticket;
};

// An iteration as the ABI shows it: from its begin to its end. The executor uses one Iteration object a
// session again and again; this one is new each time, so that a stale handle is stale.
struct IterationObject {
  explicit IterationObject(std::shared_ptr<executor::Iteration> of) : iteration(std::move(of)) {}
  ~IterationObject();
  // Gives up the resources that it holds only while it has a handle (HandleTable::keep): the iteration, and the handles
  // of its stream and model.
  std::shared_ptr<void> park();
  std::shared_ptr<executor::Iteration> iteration;
  // Handle of the lane's stream, made when first asked for; goes with the iteration.
  std::atomic<void*> stream{nullptr};
  // Handle of the switcher's model, if the iteration is a switcher's; goes with it too.
  void* model = nullptr;
};

// The C++ type behind a handle type of the ABI, and its name in messages.
template <class Handle>
struct HandleType;
#define GPUSHARE_HANDLE_TYPE(handle, object, tag, name) \
  template <>                                           \
  struct HandleType<handle> {                           \
    using Table = HandleTable<object, tag>;             \
    static constexpr const char* kNoun = name;          \
  }
GPUSHARE_HANDLE_TYPE(gpushare_runtime, executor::Runtime, 1, "runtime");
GPUSHARE_HANDLE_TYPE(gpushare_session, executor::Session, 2, "session");
GPUSHARE_HANDLE_TYPE(gpushare_iteration, IterationObject, 3, "iteration");
GPUSHARE_HANDLE_TYPE(gpushare_stream, executor::Stream, 4, "stream");
GPUSHARE_HANDLE_TYPE(gpushare_ticket, TicketObject, 5, "ticket");
GPUSHARE_HANDLE_TYPE(gpushare_heap, memory::Heap, 6, "heap");
GPUSHARE_HANDLE_TYPE(gpushare_batcher, BatcherObject, 7, "batcher");
GPUSHARE_HANDLE_TYPE(gpushare_request_queue, RequestQueueObject, 8, "request queue");
GPUSHARE_HANDLE_TYPE(gpushare_histogram, sched::slo::Histogram, 9, "histogram");
GPUSHARE_HANDLE_TYPE(gpushare_score_queue, sched::slo::ScoreQueue, 10, "score queue");
GPUSHARE_HANDLE_TYPE(gpushare_loader, loader::Loader, 11, "loader");
GPUSHARE_HANDLE_TYPE(gpushare_image, ImageObject, 12, "image");
GPUSHARE_HANDLE_TYPE(gpushare_model, ModelObject, 13, "model");
GPUSHARE_HANDLE_TYPE(gpushare_switcher, loader::Switcher, 14, "switcher");
GPUSHARE_HANDLE_TYPE(gpushare_shared_image, executor::SharedImage, 15, "shared image");
GPUSHARE_HANDLE_TYPE(gpushare_allocator, framework::Allocator, 16, "allocator");
GPUSHARE_HANDLE_TYPE(gpushare_range, executor::Range, 17, "elastic range");
GPUSHARE_HANDLE_TYPE(gpushare_gate, executor::LaunchGate, 18, "gate");
GPUSHARE_HANDLE_TYPE(gpushare_step_queue, StepQueueObject, 19, "step queue");
#undef GPUSHARE_HANDLE_TYPE

template <class Handle>
auto& table_of() {
  return HandleType<Handle>::Table::instance();
}

// A pin of the object behind the handle; empty if the handle is not live.
template <class Handle>
auto find(Handle handle) {
  return table_of<Handle>().find(handle);
}

// For a handle that is not live, or is of the process that forked this one. error.cpp
base::Status stale(bool inherited, const char* noun);
base::Status too_many_handles(const char* noun);

template <class Handle>
base::Status stale(Handle handle) {
  return stale(table_of<Handle>().inherited(handle), HandleType<Handle>::kNoun);
}

// Puts an object into its table and its handle into *out.
template <class Handle, class T>
base::Status publish(std::shared_ptr<T> object, Handle* out) {
  void* handle = table_of<Handle>().add(std::move(object));
  if (handle == nullptr) return too_many_handles(HandleType<Handle>::kNoun);
  *out = static_cast<Handle>(handle);
  return {};
}

// The whole of a call: `body` with the object behind the handle.
template <class Handle, class Body>
int32_t with(Handle handle, Body&& body) {
  return guard([&]() -> base::Status {
    const auto pin = find(handle);
    return pin ? body(*pin) : stale(handle);
  });
}

// The same for a call that may be cancelled where it waits for other sessions.
template <class Handle, class Body>
int32_t with_cancellable(Handle handle, Body&& body) {
  return guard<true>([&]() -> base::Status {
    const auto pin = find(handle);
    return pin ? body(*pin) : stale(handle);
  });
}

// The whole of a call that does nothing but give the handle back.
template <class Handle>
int32_t release(Handle handle) {
  return guard([&] { return table_of<Handle>().remove(handle) ? base::Status() : stale(handle); });
}

inline std::shared_ptr<void> IterationObject::park() {
  if (stream.load(std::memory_order_relaxed) != nullptr)
    table_of<gpushare_stream>().remove(stream.exchange(nullptr));
  if (model != nullptr) table_of<gpushare_model>().remove(std::exchange(model, nullptr));
  return std::move(iteration);
}

inline IterationObject::~IterationObject() {
  (void)park();
}

// Gives the iteration a handle. Sessions keep one slot for their iterations, so that neither memory nor the table's
// lock is needed for each. Throws bad_alloc.
inline base::Status publish_iteration(std::shared_ptr<executor::Iteration> iteration,
                                      gpushare_iteration* out) {
  using Table = HandleType<gpushare_iteration>::Table;
  executor::Iteration& of = *iteration;
  if (of.wrapper == nullptr) {
    of.wrapper = table_of<gpushare_iteration>().keep(std::make_shared<IterationObject>(nullptr));
    if (of.wrapper == nullptr) return too_many_handles(HandleType<gpushare_iteration>::kNoun);
  }
  auto& kept = *static_cast<Table::Kept*>(of.wrapper.get());
  // Another thread may still be inside of a call with the handle of the iteration before.
  if (!kept.parked()) return publish(std::make_shared<IterationObject>(std::move(iteration)), out);
  const memory::LanePass pass = of.pass();
  kept.object().iteration = std::move(iteration);
  *out = static_cast<gpushare_iteration>(kept.reopen(reinterpret_cast<uint64_t>(pass.door), pass.key));
  return {};
}

// Errors: INVALID_ARGUMENT. session.cpp
base::Result<executor::SessionOptions> session_options(const gpushare_session_params& params);

}  // namespace gpushare::capi
