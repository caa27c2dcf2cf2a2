// device: the backend registry and the C++ wrappers of backend.h; host/, sim/ and cuda/ hold one backend each.
// Nothing here knows of sessions or lanes. May be called from memory, executor, loader and c_api.
//
// device.hpp: owning wrappers over the ops table. Each method is one op; a failing op becomes a base::Status that carries
// the backend's name, message and native code. Threads and blocking: as backend.h says of the op.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "base/status.hpp"
#include "gpushare/backend.h"

namespace gpushare::device {

using Address = gpushare_device_address;
class Device;

class Event {
 public:
  Event() = default;
  Event(Event&& other) noexcept { *this = std::move(other); }
  Event& operator=(Event&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(event_, other.event_);
    return *this;
  }
  ~Event();
  explicit operator bool() const { return event_ != nullptr; }
  gpushare_backend_event* get() const { return event_; }
  base::Status query() const;
  base::Status synchronize() const;
  // Device time from `start` to this event.
  base::Result<uint64_t> elapsed_since(const Event& start) const;

 private:
  friend class Device;
  Event(Device* device, gpushare_backend_event* event) : device_(device), event_(event) {}
  Device* device_ = nullptr;
  gpushare_backend_event* event_ = nullptr;
};

class Stream {
 public:
  Stream() = default;
  Stream(Stream&& other) noexcept { *this = std::move(other); }
  Stream& operator=(Stream&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(stream_, other.stream_);
    return *this;
  }
  ~Stream();
  explicit operator bool() const { return stream_ != nullptr; }
  gpushare_backend_stream* get() const { return stream_; }
  void* native() const;
  base::Status query() const;
  base::Status synchronize() const;
  base::Status wait(const Event& event) const;
  base::Status record(const Event& event) const;
  base::Status copy(uint64_t destination, uint64_t source, uint64_t bytes, uint32_t kind) const;
  base::Status fill(Address address, uint8_t value, uint64_t bytes) const;
  base::Status launch_host(gpushare_host_function function, void* user_data) const;
  base::Status work(const gpushare_backend_work& work) const;
  // True if a capture of a native graph was dropped. Errors: also UNSUPPORTED (the device has none).
  base::Result<bool> drop_capture() const;

 private:
  friend class Device;
  Stream(Device* device, gpushare_backend_stream* stream) : device_(device), stream_(stream) {}
  Device* device_ = nullptr;
  gpushare_backend_stream* stream_ = nullptr;
};

// One opened device. Streams and events must go before it.
class Device {
 public:
  // `spec`: "host", "sim?total_gib=16", "cuda:1", "auto". Errors: NOT_FOUND (no such backend; lists those registered),
  // UNAVAILABLE, INVALID_ARGUMENT (options).
  static base::Result<std::unique_ptr<Device>> open(const std::string& spec);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // Closes with the backend's verdict (INVALID_STATE names leaked objects). The destructor closes and drops it.
  base::Status close();

  const std::string& spec() const { return spec_; }  // without options
  const gpushare_backend_ops& ops() const { return *ops_; }
  gpushare_backend_device* get() const { return device_; }
  // Fixed facts, read at open; free_bytes as of then.
  const gpushare_backend_device_info& info() const { return info_; }
  bool can(uint32_t capability) const { return (info_.capabilities & capability) != 0; }
  base::Result<gpushare_backend_device_info> refresh_info();
  uint64_t now_ns() const;
  // The bytes of the device that the process's contexts and other libraries have, also after close(). Errors:
  // UNSUPPORTED, NOT_READY.
  base::Result<uint64_t> context_bytes();

  base::Result<Address> alloc(uint64_t bytes);
  base::Status free(Address address);
  base::Result<void*> host_alloc(uint64_t bytes);
  base::Status host_free(void* pointer);
  base::Result<Stream> create_stream(int32_t priority = 0);
  // Wraps a native stream that belongs to somebody else; see backend.h. Errors: UNSUPPORTED.
  base::Result<Stream> adopt_stream(void* native);
  base::Result<Event> create_event(uint32_t flags = GPUSHARE_EVENT_DEFAULT);

  base::Result<Address> va_reserve(uint64_t bytes);
  base::Status va_free(Address address, uint64_t bytes);
  base::Result<gpushare_backend_memory*> phys_create(uint64_t bytes);
  // Physical memory on the host. Errors: UNSUPPORTED unless can(GPUSHARE_DEVICE_CAP_HOST_PHYSICAL), HOST_OUT_OF_MEMORY.
  base::Result<gpushare_backend_memory*> phys_create_host(uint64_t bytes);
  base::Status phys_release(gpushare_backend_memory* memory);
  base::Status va_map(Address address, uint64_t bytes, gpushare_backend_memory* memory, uint64_t offset);
  base::Status va_unmap(Address address, uint64_t bytes);
  // Group "runs"; where the backend lacks the group, va_map and va_unmap for each memory. *out_count: how many, from
  // the first on, are unmapped, also on failure.
  base::Status va_map_run(Address address, uint64_t bytes, gpushare_backend_memory* const* memories,
                          uint64_t count);
  base::Status va_unmap_run(Address address, uint64_t bytes, uint64_t count, uint64_t* out_count);

  // Group "ipc". The descriptor of phys_export is the caller's to close; phys_import leaves it with the caller.
  base::Result<gpushare_backend_memory*> phys_create_shared(uint64_t bytes);
  base::Result<int> phys_export(gpushare_backend_memory* memory, uint32_t access);
  base::Result<gpushare_backend_memory*> phys_import(int descriptor, uint64_t bytes, uint32_t access);

  base::Status set_fault(const gpushare_backend_fault& fault);

  // Group "partitions". The partition belongs to the caller; its streams must go before it.
  base::Result<gpushare_backend_partition_info> partition_info();
  struct Partition {
    gpushare_backend_partition* handle;
    uint32_t compute_units;  // granted, at least what was asked for
  };
  base::Result<Partition> create_partition(uint32_t compute_units);
  base::Status destroy_partition(gpushare_backend_partition* partition);
  base::Result<Stream> create_stream_in(gpushare_backend_partition* partition, int32_t priority = 0);

  // The status of an op that returned `code`, with the backend's details.
  base::Status status(int32_t code, const char* op) const;

 private:
  base::Status failure(int32_t code, const char* op) const;  // the last one of the calling thread
  Device(const gpushare_backend_ops* ops, gpushare_backend_device* device, std::string spec);
  const gpushare_backend_ops* ops_;
  gpushare_backend_device* device_;
  std::string spec_;
  gpushare_backend_device_info info_{};
  uint32_t index_ = 0;  // with options_, as given to device_open
  std::string options_;
};

}  // namespace gpushare::device
