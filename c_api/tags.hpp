// tags.hpp: the handle types, one table each.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>

#include "c_api/handles.hpp"
#include "executor/runtime.hpp"
#include "gpushare/gpushare.h"

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

namespace gpushare::daemon {
class Worker;
}

namespace gpushare::capi {

struct BatcherObject;       // batcher.cpp
struct RequestQueueObject;  // request_queue.cpp

// Images and models as the ABI shows them: with what keeps them alive.
struct ImageObject {
  std::shared_ptr<loader::Loader> loader;
  std::shared_ptr<const loader::Image> image;
};
struct ModelObject {
  std::shared_ptr<loader::Model> model;
  bool borrowed = false;  // the switcher's
};

// An iteration as the ABI shows it: from its begin to its end. The executor uses one Iteration object a
// session again and again; this one is new each time, so that a stale handle is stale.
struct IterationObject {
  explicit IterationObject(std::shared_ptr<executor::Iteration> of) : iteration(std::move(of)) {}
  ~IterationObject();
  std::shared_ptr<executor::Iteration> iteration;
  // Handle of the lane's stream, made when first asked for; goes with the iteration.
  std::atomic<void*> stream{nullptr};
  // Handle of the switcher's model, if the iteration is a switcher's; goes with it too.
  void* model = nullptr;
};

using RuntimeHandles = HandleTable<executor::Runtime, 1>;
using SessionHandles = HandleTable<executor::Session, 2>;
using IterationHandles = HandleTable<IterationObject, 3>;
using StreamHandles = HandleTable<executor::Stream, 4>;
using TicketHandles = HandleTable<executor::Ticket, 5>;
using HeapHandles = HandleTable<memory::Heap, 6>;
using BatcherHandles = HandleTable<BatcherObject, 7>;
using RequestQueueHandles = HandleTable<RequestQueueObject, 8>;
using HistogramHandles = HandleTable<sched::slo::Histogram, 9>;
using ScoreQueueHandles = HandleTable<sched::slo::ScoreQueue, 10>;
using LoaderHandles = HandleTable<loader::Loader, 11>;
using ImageHandles = HandleTable<ImageObject, 12>;
using ModelHandles = HandleTable<ModelObject, 13>;
using SwitcherHandles = HandleTable<loader::Switcher, 14>;
using WorkerHandles = HandleTable<daemon::Worker, 15>;

inline IterationObject::~IterationObject() {
  if (void* handle = stream.load()) StreamHandles::instance().remove(handle);
  if (model != nullptr) ModelHandles::instance().remove(model);
}

// Errors: INVALID_ARGUMENT. session.cpp
base::Result<executor::SessionOptions> session_options(const gpushare_session_params& params);

inline base::Status too_many_handles(const char* what) {
  return {GPUSHARE_HOST_OUT_OF_MEMORY, base::format("too many %s are open at once (16,777,216)", what)};
}

inline base::Status stale(const char* noun) {
  return {GPUSHARE_INVALID_HANDLE,
          base::format("%s is null, closed or released, or no %s handle", noun, noun)};
}

// Puts an object into its table and its handle into *out.
template <class Table, class Handle, class T>
base::Status publish(std::shared_ptr<T> object, const char* plural, Handle* out) {
  void* handle = Table::instance().add(std::move(object));
  if (handle == nullptr) return too_many_handles(plural);
  *out = static_cast<Handle>(handle);
  return {};
}

}  // namespace gpushare::capi
