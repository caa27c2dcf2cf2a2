// Questions of frameworks' allocators: the owner of an allocation, streams of others, and peaks that count anew.
// SPDX-License-Identifier: Apache-2.0
#include "executor/internal.hpp"

namespace gpushare::executor {

base::Result<std::shared_ptr<Session>> RuntimeImpl::find_owner(const Stream* stream) const {
  if (stream != nullptr) {
    auto owner = stream->owner();
    if (!owner.ok() || *owner != nullptr) return owner;
  }
  for (const Binding* binding = thread_bindings(); binding != nullptr; binding = binding->outer)
    if (binding->session->runtime_.get() == this && IterationImpl::is_open(*binding))
      return std::shared_ptr<Session>(binding->session);
  return std::shared_ptr<Session>();
}

std::shared_ptr<Session> RuntimeImpl::owner(const Stream* stream) {
  auto found = find_owner(stream);
  return found.ok() ? std::move(*found) : nullptr;
}

base::Result<std::shared_ptr<Stream>> RuntimeImpl::adopt_stream(void* native) {
  const GatePass pass(memory_gate_.mine());  // keeps the device open
  if (!pass) return base::Status(GPUSHARE_INVALID_STATE, "the runtime is closed");
  const auto is_it = [native](const std::shared_ptr<StreamImpl>& stream) {
    if (stream == nullptr) return false;
    const GatePass open(stream->gate());
    return open && stream->device_stream().native() == native;
  };
  {
    BooksLock lock(mutex_);
    GPUSHARE_RETURN_IF_ERROR(check_open());
    for (const auto& slot : lanes_.all())
      if (slot != nullptr && is_it(slot->stream)) return std::shared_ptr<Stream>(slot->stream);
  }
  for (auto& stream : side_streams_.all())
    if (is_it(stream)) return std::shared_ptr<Stream>(std::move(stream));
  GPUSHARE_ASSIGN_OR_RETURN(device::Stream made, device_->adopt_stream(native));
  auto stream = std::make_shared<StreamImpl>(shared_from_this(), std::move(made), nullptr);
  side_streams_.add(stream);
  return std::shared_ptr<Stream>(std::move(stream));
}

base::Result<uint64_t> RuntimeImpl::trim() {
  const GatePass pass(memory_gate_.mine());
  if (!pass) return base::Status(GPUSHARE_INVALID_STATE, "the runtime is closed");
  return memory_->trim();
}

void RuntimeImpl::reset_peak() {
  if (const GatePass pass(memory_gate_.mine()); pass) memory_->reset_peak();
}

uint64_t SessionImpl::open_iteration(memory::LanePass* out_pass) const {
  const GatePass open(iteration_.gate_);
  if (!open) return 0;
  if (out_pass != nullptr) *out_pass = iteration_.pass();
  return iteration_.serial_.load(std::memory_order_relaxed);
}

memory::HeapDoor* SessionImpl::open_door(const void* name) {
  const GatePass inside(heap_gate_);
  if (!inside || quota_bytes_.load() > 0) return nullptr;
  memory::PersistentHeap& heap = *heap_.load(std::memory_order_relaxed);
  memory::HeapDoor* const door = heap.open_door(name);
  // A quota that is set meanwhile either is seen here, or closes the open door itself.
  if (quota_bytes_.load() == 0) return door;
  heap.close_door();
  return nullptr;
}

base::Status SessionImpl::order_after(const device::Stream& home, const device::Stream& later) {
  if (&home == &later) return {};
  base::MutexLock lock(order_mutex_);
  if (!order_event_) {
    GPUSHARE_ASSIGN_OR_RETURN(order_event_, runtime_->device_->create_event());
  }
  // A stream waits for the mark that the event has at the call, so one event serves all streams.
  const device::Event* const event = &order_event_;
  GPUSHARE_RETURN_IF_ERROR(home.record(*event));
  base::Status status = later.wait(*event);
  if (status.code() != GPUSHARE_INVALID_STATE) return status;
  // `later` captures a graph, and an event outside of the graph cannot be part of it. The host waits instead, without
  // the lock, because a host function on the way may want it. The event stays while the session has its memory.
  lock.unlock();
  return event->synchronize();
}

base::Result<HeldStream> SessionImpl::hold_home() {
  if (GatePass pass(iteration_.gate_); pass)
    return HeldStream(std::move(pass),
                      iteration_.lane_.load(std::memory_order_relaxed)->stream->device_stream());
  return hold(GPUSHARE_NO_TIMEOUT);
}

base::Status SessionImpl::order_stream(const Stream& stream) {
  base::Status status;
  {
    GPUSHARE_ASSIGN_OR_RETURN(const HeldStream home, hold_home());
    GPUSHARE_ASSIGN_OR_RETURN(const HeldStream later, stream.hold());
    status = order_after(*home, *later);
  }
  runtime_->note(status);
  return status;
}

void SessionImpl::reset_peak() {
  if (const GatePass pass(heap_gate_); pass) heap_.load(std::memory_order_relaxed)->reset_peak();
  BooksLock lock(runtime_->mutex_);
  peak_bytes_ = iteration_peak_bytes_ = 0;
}

}  // namespace gpushare::executor
