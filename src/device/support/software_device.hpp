// software_device.hpp: what host and sim, the devices made of this machine's own memory, have in common: the address space,
// scripted faults, the live streams and events, and the checks of an op before it is enqueued. Time and order are each
// device's own.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "base/flat_hash.hpp"
#include "base/mutex.hpp"
#include "device/support/device_options.hpp"
#include "device/support/fault_table.hpp"

namespace gpushare::device {

// The part of an op that both devices have. Ops are queued by value.
template <class Stream, class Event>
struct SoftwareOp {
  uint8_t fill_value = 0;
  char* destination = nullptr;   // of a copy or fill; null if data are not kept
  const char* source = nullptr;  // of a copy
  uint64_t bytes = 0;
  gpushare_host_function function = nullptr;
  void* user_data = nullptr;
  std::shared_ptr<Event> event;    // of a record
  std::shared_ptr<Stream> stream;  // of a wait: until `stream` has completed `sequence` ops
  uint64_t sequence = 0;           // of a wait; of a record: which record of the event this is
};

// `Self` derives from it. Handles of backend.h are pointers to Self, Stream and Event; the device keeps each alive
// until its destroy op, and a queued op beyond that where it needs one.
template <class Self, class Stream, class Event, class Op>
class SoftwareDevice {
 public:
  // OK, or INVALID_STATE naming what is still open.
  base::Status leaks() const {
    base::MutexLock lock(mutex_);
    return leak_report(backend_, streams_.size(), events_.size(), memory_->leaks());
  }
  AddressSpace& memory() { return *memory_; }
  FaultTable& faults() { return faults_; }
  base::Status check_lost() const {
    return lost_.load(std::memory_order_acquire) ? device_lost(backend_) : base::Status();
  }

  base::Result<Event*> create_event(bool timing) {
    auto event = std::make_shared<Event>(static_cast<Self&>(*this), timing);
    base::MutexLock lock(mutex_);
    return keep(events_, std::move(event));
  }
  // A queued record keeps the event alive.
  base::Status destroy_event(Event* event) {
    std::shared_ptr<Event> owned;
    base::MutexLock lock(mutex_);
    const auto it = events_.find(event);
    if (it == events_.end()) return {GPUSHARE_INVALID_HANDLE, "not a live event of this device"};
    owned = std::move(it->second);
    events_.erase(it);
    return {};
  }

  base::Status enqueue_fill(Stream* stream, gpushare_device_address address, uint8_t value, uint64_t bytes) {
    Op op;
    op.kind = Op::Kind::kFill;
    op.bytes = bytes;
    op.fill_value = value;
    GPUSHARE_ASSIGN_OR_RETURN(op.destination, memory_->storage(address, bytes, /*write=*/true));
    return enqueue_bytes(stream, std::move(op));
  }
  base::Status enqueue_callback(Stream* stream, gpushare_host_function function, void* user_data) {
    Op op;
    op.kind = Op::Kind::kCallback;
    op.function = function;
    op.user_data = user_data;
    return static_cast<Self*>(this)->enqueue(*stream, std::move(op));
  }

 protected:
  SoftwareDevice(const char* backend, std::unique_ptr<AddressSpace> memory)
      : backend_(backend), memory_(std::move(memory)) {}

  gpushare_backend_device_info common_info() const {
    gpushare_backend_device_info info{};
    std::strncpy(info.name, backend_, sizeof(info.name) - 1);
    info.total_bytes = memory_->total_bytes();
    info.free_bytes = memory_->free_bytes();
    info.allocation_alignment_bytes = AddressSpace::kPageBytes;
    info.mapping_granularity_bytes = memory_->granularity_bytes();
    return info;
  }

  // Fills in where the bytes of a copy lie. `file`, `fresh`: as AddressSpace::storage.
  base::Status locate_copy(uint64_t destination, uint64_t source, uint64_t bytes, uint32_t kind, Op& op,
                           std::shared_ptr<const SharedFile>* file = nullptr,
                           AddressSpace::FreshPages* fresh = nullptr) const {
    GPUSHARE_RETURN_IF_ERROR(check_copy(destination, source, bytes, kind));
    op.bytes = bytes;
    op.destination = reinterpret_cast<char*>(destination);
    op.source = reinterpret_cast<const char*>(source);
    if (kind != GPUSHARE_COPY_DEVICE_TO_HOST) {
      GPUSHARE_ASSIGN_OR_RETURN(op.destination,
                                memory_->storage(destination, bytes, /*write=*/true, file, fresh));
    }
    if (kind != GPUSHARE_COPY_HOST_TO_DEVICE) {
      GPUSHARE_ASSIGN_OR_RETURN(op.source, memory_->storage(source, bytes, /*write=*/false));
    }
    return {};
  }
  // A copy or fill of no bytes is checked and not enqueued.
  base::Status enqueue_bytes(Stream* stream, Op op) {
    if (op.bytes == 0) return check_lost();
    return static_cast<Self*>(this)->enqueue(*stream, std::move(op));
  }

  template <class Object>
  static Object* keep(base::FlatHashMap<Object*, std::shared_ptr<Object>>& objects,
                      std::shared_ptr<Object> object) {
    Object* const raw = object.get();
    objects[raw] = std::move(object);
    return raw;
  }
  base::Result<Stream*> keep_stream(std::shared_ptr<Stream> stream) GPUSHARE_REQUIRES(mutex_) {
    room_.reserve(streams_.size() + 1);
    return keep(streams_, std::move(stream));
  }
  // For the device's end, which needs no memory: keep_stream() has made the room.
  std::vector<std::shared_ptr<Stream>> all_streams() GPUSHARE_REQUIRES(mutex_) {
    std::vector<std::shared_ptr<Stream>> streams = std::move(room_);
    for (const auto& [raw, stream] : streams_) streams.push_back(stream);
    return streams;
  }

  const char* const backend_;
  const std::unique_ptr<AddressSpace> memory_;
  FaultTable faults_;
  std::atomic<bool> lost_{false};
  mutable base::Mutex mutex_;
  base::FlatHashMap<Stream*, std::shared_ptr<Stream>> streams_ GPUSHARE_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Stream>> room_ GPUSHARE_GUARDED_BY(mutex_);  // empty, for all_streams()
  base::FlatHashMap<Event*, std::shared_ptr<Event>> events_ GPUSHARE_GUARDED_BY(mutex_);
};

}  // namespace gpushare::device
