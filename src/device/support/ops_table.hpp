// ops_table.hpp: the C functions of a backend that is written as three classes, Device, Stream and Event (host
// and sim are; cuda replaces probe and stream_native). The functions check handles and outputs, check for lost
// devices and scripted faults, and let no exception out. The classes do the work.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <type_traits>

#include "base/status.hpp"
#include "base/thread_local.hpp"
#include "device/support/address_space.hpp"
#include "device/support/fault_table.hpp"
#include "device/support/ops_guard.hpp"
#include "gpushare/backend.h"

namespace gpushare::device {

// B names the classes: B::Device, B::Stream, B::Event, and B::kName.
template <class B>
class OpsTable {
 public:
  // Optional groups are in the table except modelled work, which the backend adds if it has it.
  static gpushare_backend_ops make() {
    gpushare_backend_ops ops{};
    ops.struct_size = sizeof(ops);
    ops.abi_version = GPUSHARE_BACKEND_ABI_VERSION;
    ops.name = B::kName;
    ops.probe = probe;
    ops.device_open = device_open;
    ops.device_close = device_close;
    ops.device_info = device_info;
    ops.clock_now = clock_now;
    ops.last_error = last_error;
    ops.mem_alloc = mem_alloc;
    ops.mem_free = mem_free;
    ops.host_alloc = host_alloc;
    ops.host_free = host_free;
    ops.stream_create = stream_create;
    ops.stream_destroy = stream_destroy;
    ops.stream_query = stream_query;
    ops.stream_synchronize = stream_synchronize;
    ops.stream_wait_event = stream_wait_event;
    ops.stream_native = stream_native;
    ops.event_create = event_create;
    ops.event_destroy = event_destroy;
    ops.event_record = event_record;
    ops.event_query = event_query;
    ops.event_synchronize = event_synchronize;
    ops.event_elapsed = event_elapsed;
    ops.copy_async = copy_async;
    ops.fill_async = fill_async;
    ops.launch_host = launch_host;
    ops.va_reserve = va_reserve;
    ops.va_free = va_free;
    ops.phys_create = phys_create;
    ops.phys_create_host = phys_create_host;
    ops.phys_release = phys_release;
    ops.va_map = va_map;
    ops.va_unmap = va_unmap;
    ops.va_map_run = va_map_run;
    ops.va_unmap_run = va_unmap_run;
    ops.fault_set = fault_set;
    return ops;
  }

  static int32_t work_launch(gpushare_backend_stream* stream, const gpushare_backend_work* work) {
    return guard("work_launch", [&]() -> base::Status {
      if (stream == nullptr) return null_handle("stream");
      return to(stream)->device().enqueue_work(to(stream), work);
    });
  }

  // Group "ipc", for backends whose memory() has create_shared, export_physical and import_physical.
  static void add_ipc(gpushare_backend_ops& ops) {
    ops.phys_create_shared = [](gpushare_backend_device* device, uint64_t bytes,
                                gpushare_backend_memory** out_memory) {
      return on_live(device, "phys_create_shared", [&](Device& d) -> base::Status {
        if (out_memory == nullptr) return null_output();
        if (d.faults().fires(GPUSHARE_FAULT_DEVICE_OUT_OF_MEMORY))
          return scripted_out_of_memory("phys_create_shared", bytes);
        return store(d.memory().create_shared(bytes), out_memory);
      });
    };
    ops.phys_export = [](gpushare_backend_device* device, gpushare_backend_memory* memory, uint32_t access,
                         int32_t* out_descriptor) {
      return on_live(device, "phys_export", [&](Device& d) -> base::Status {
        if (memory == nullptr) return null_handle("memory");
        if (out_descriptor == nullptr) return null_output();
        GPUSHARE_RETURN_IF_ERROR(check_access(access));
        return store(d.memory().export_physical(memory, access), out_descriptor);
      });
    };
    ops.phys_import = [](gpushare_backend_device* device, int32_t descriptor, uint64_t bytes, uint32_t access,
                         gpushare_backend_memory** out_memory) {
      return on_live(device, "phys_import", [&](Device& d) -> base::Status {
        if (out_memory == nullptr) return null_output();
        GPUSHARE_RETURN_IF_ERROR(check_access(access));
        return store(d.memory().import_physical(descriptor, bytes, access), out_memory);
      });
    };
  }

  // The frame, for ops that a backend adds or writes itself.
  using Device = typename B::Device;
  using Stream = typename B::Stream;
  using Event = typename B::Event;

  template <class Body>
  static int32_t guard(const char* op, Body&& body) {
    return guard_op(error_slot(), op, body);
  }
  // Frames an op of a device; `body` runs unless the device is null or lost.
  template <class Body>
  static int32_t on_live(gpushare_backend_device* device, const char* op, Body&& body) {
    return guard(op, [&]() -> base::Status {
      if (device == nullptr) return null_handle("device");
      GPUSHARE_RETURN_IF_ERROR(to(device)->check_lost());
      return body(*to(device));
    });
  }
  // The same for ops that release something: they work on a lost device too.
  template <class Body>
  static int32_t on_any(gpushare_backend_device* device, const char* op, Body&& body) {
    return guard(op, [&]() -> base::Status {
      if (device == nullptr) return null_handle("device");
      return body(*to(device));
    });
  }
  template <class T, class Out>
  static base::Status store(base::Result<T> result, Out* out) {
    if (!result.ok()) return result.status();
    *out = *result;
    return {};
  }

  static Device* to(gpushare_backend_device* handle) { return reinterpret_cast<Device*>(handle); }
  static Stream* to(gpushare_backend_stream* handle) { return reinterpret_cast<Stream*>(handle); }
  static Event* to(gpushare_backend_event* handle) { return reinterpret_cast<Event*>(handle); }

 private:
  static base::ThreadStatus& error_slot() {
    static GPUSHARE_THREAD_LOCAL base::ThreadStatus status;
    return status;
  }

  static int32_t probe(uint32_t* out_device_count) {
    return guard("probe", [&]() -> base::Status {
      if (out_device_count == nullptr) return null_output();
      *out_device_count = 1;
      return {};
    });
  }
  static int32_t device_open(uint32_t index, const char* options, gpushare_backend_device** out_device) {
    return guard("device_open", [&]() -> base::Status {
      if (out_device == nullptr || options == nullptr) return null_output();
      if constexpr (requires { Device::open(index, options); }) {
        GPUSHARE_ASSIGN_OR_RETURN(std::unique_ptr<Device> device, Device::open(index, options));
        *out_device = reinterpret_cast<gpushare_backend_device*>(device.release());
      } else {
        if (index != 0) {
          return {GPUSHARE_UNAVAILABLE,
                  base::format("there is one %s device, index 0; asked for %u", B::kName, index)};
        }
        GPUSHARE_ASSIGN_OR_RETURN(std::unique_ptr<Device> device, Device::open(options));
        *out_device = reinterpret_cast<gpushare_backend_device*>(device.release());
      }
      return {};
    });
  }
  static int32_t device_close(gpushare_backend_device* device) {
    return on_any(device, "device_close", [](Device& d) -> base::Status {
      GPUSHARE_RETURN_IF_ERROR(d.finish());
      base::Status left = d.leaks();
      delete &d;
      return left;
    });
  }
  static int32_t device_info(gpushare_backend_device* device, gpushare_backend_device_info* out_info) {
    return on_any(device, "device_info", [&](Device& d) -> base::Status {
      if (out_info == nullptr || out_info->struct_size < sizeof(uint32_t)) return null_output();
      if constexpr (std::is_void_v<decltype(d.info(out_info))>) {
        d.info(out_info);
        return {};
      } else {
        return d.info(out_info);
      }
    });
  }
  static int32_t clock_now(gpushare_backend_device* device, uint64_t* out_ns) {
    return on_any(device, "clock_now", [&](Device& d) -> base::Status {
      if (out_ns == nullptr) return null_output();
      *out_ns = d.now_ns();
      return {};
    });
  }
  static int32_t last_error(gpushare_backend_error* out_error) {
    return write_backend_error(error_slot().get(), out_error);
  }

  static int32_t mem_alloc(gpushare_backend_device* device, uint64_t bytes,
                           gpushare_device_address* out_address) {
    return on_live(device, "mem_alloc", [&](Device& d) -> base::Status {
      if (out_address == nullptr) return null_output();
      if (d.faults().fires(GPUSHARE_FAULT_DEVICE_OUT_OF_MEMORY))
        return scripted_out_of_memory("mem_alloc", bytes);
      return store(d.memory().alloc(bytes), out_address);
    });
  }
  static int32_t mem_free(gpushare_backend_device* device, gpushare_device_address address) {
    return on_any(device, "mem_free", [&](Device& d) { return d.memory().free(address); });
  }
  static int32_t host_alloc(gpushare_backend_device* device, uint64_t bytes, void** out_pointer) {
    return on_live(device, "host_alloc", [&](Device& d) -> base::Status {
      if (out_pointer == nullptr) return null_output();
      if (d.faults().fires(GPUSHARE_FAULT_HOST_OUT_OF_MEMORY)) {
        return {GPUSHARE_HOST_OUT_OF_MEMORY, "host_alloc fails: scripted fault"};
      }
      return store(d.memory().host_alloc(bytes), out_pointer);
    });
  }
  static int32_t host_free(gpushare_backend_device* device, void* pointer) {
    return on_any(device, "host_free", [&](Device& d) { return d.memory().host_free(pointer); });
  }

  static int32_t stream_create(gpushare_backend_device* device, int32_t priority,
                               gpushare_backend_stream** out_stream) {
    return on_live(device, "stream_create", [&](Device& d) -> base::Status {
      if (out_stream == nullptr) return null_output();
      if (d.faults().fires(GPUSHARE_FAULT_STREAM_CREATE_FAILS)) {
        return {GPUSHARE_UNKNOWN, "stream_create fails: scripted fault"};
      }
      GPUSHARE_ASSIGN_OR_RETURN(Stream * stream, d.create_stream(priority));
      *out_stream = reinterpret_cast<gpushare_backend_stream*>(stream);
      return {};
    });
  }
  static int32_t stream_destroy(gpushare_backend_stream* stream) {
    return guard("stream_destroy", [&]() -> base::Status {
      if (stream == nullptr) return null_handle("stream");
      return to(stream)->device().destroy_stream(to(stream));
    });
  }
  static int32_t stream_query(gpushare_backend_stream* stream) {
    return guard("stream_query", [&]() -> base::Status {
      if (stream == nullptr) return null_handle("stream");
      return to(stream)->query();
    });
  }
  static int32_t stream_synchronize(gpushare_backend_stream* stream) {
    return guard("stream_synchronize", [&]() -> base::Status {
      if (stream == nullptr) return null_handle("stream");
      return to(stream)->synchronize();
    });
  }
  static int32_t stream_wait_event(gpushare_backend_stream* stream, gpushare_backend_event* event) {
    return guard("stream_wait_event", [&]() -> base::Status {
      if (stream == nullptr) return null_handle("stream");
      if (event == nullptr) return null_handle("event");
      GPUSHARE_RETURN_IF_ERROR(check_same(stream, event));
      return to(event)->make_wait(*to(stream));
    });
  }
  static int32_t stream_native(gpushare_backend_stream* stream, void** out_native) {
    return guard("stream_native", [&]() -> base::Status {
      if (stream == nullptr) return null_handle("stream");
      if (out_native == nullptr) return null_output();
      *out_native = stream;
      return {};
    });
  }

  static int32_t event_create(gpushare_backend_device* device, uint32_t flags,
                              gpushare_backend_event** out_event) {
    return on_live(device, "event_create", [&](Device& d) -> base::Status {
      if (out_event == nullptr) return null_output();
      if ((flags & ~static_cast<uint32_t>(GPUSHARE_EVENT_TIMING)) != 0) {
        return {GPUSHARE_INVALID_ARGUMENT,
                base::format("event flags 0x%x are unknown; allowed is 0 or 1", flags)};
      }
      GPUSHARE_ASSIGN_OR_RETURN(Event * event, d.create_event((flags & GPUSHARE_EVENT_TIMING) != 0));
      *out_event = reinterpret_cast<gpushare_backend_event*>(event);
      return {};
    });
  }
  static int32_t event_destroy(gpushare_backend_event* event) {
    return guard("event_destroy", [&]() -> base::Status {
      if (event == nullptr) return null_handle("event");
      return to(event)->device().destroy_event(to(event));
    });
  }
  static int32_t event_record(gpushare_backend_event* event, gpushare_backend_stream* stream) {
    return guard("event_record", [&]() -> base::Status {
      if (event == nullptr) return null_handle("event");
      if (stream == nullptr) return null_handle("stream");
      GPUSHARE_RETURN_IF_ERROR(check_same(stream, event));
      return to(event)->record(*to(stream));
    });
  }
  static int32_t event_query(gpushare_backend_event* event) {
    return guard("event_query", [&]() -> base::Status {
      if (event == nullptr) return null_handle("event");
      GPUSHARE_RETURN_IF_ERROR(to(event)->device().check_lost());
      return to(event)->query();
    });
  }
  static int32_t event_synchronize(gpushare_backend_event* event) {
    return guard("event_synchronize", [&]() -> base::Status {
      if (event == nullptr) return null_handle("event");
      GPUSHARE_RETURN_IF_ERROR(to(event)->synchronize());
      return to(event)->device().check_lost();
    });
  }
  static int32_t event_elapsed(gpushare_backend_event* start, gpushare_backend_event* end, uint64_t* out_ns) {
    return guard("event_elapsed", [&]() -> base::Status {
      if (start == nullptr || end == nullptr) return null_handle("event");
      if (out_ns == nullptr) return null_output();
      return store(Event::elapsed(*to(start), *to(end)), out_ns);
    });
  }

  static int32_t copy_async(gpushare_backend_stream* stream, uint64_t destination, uint64_t source,
                            uint64_t bytes, uint32_t kind) {
    return guard("copy_async", [&]() -> base::Status {
      if (stream == nullptr) return null_handle("stream");
      return to(stream)->device().enqueue_copy(to(stream), destination, source, bytes, kind);
    });
  }
  static int32_t fill_async(gpushare_backend_stream* stream, gpushare_device_address address, uint8_t value,
                            uint64_t bytes) {
    return guard("fill_async", [&]() -> base::Status {
      if (stream == nullptr) return null_handle("stream");
      return to(stream)->device().enqueue_fill(to(stream), address, value, bytes);
    });
  }
  static int32_t launch_host(gpushare_backend_stream* stream, gpushare_host_function function,
                             void* user_data) {
    return guard("launch_host", [&]() -> base::Status {
      if (stream == nullptr) return null_handle("stream");
      if (function == nullptr) return {GPUSHARE_INVALID_ARGUMENT, "the host function is null"};
      return to(stream)->device().enqueue_callback(to(stream), function, user_data);
    });
  }

  static int32_t va_reserve(gpushare_backend_device* device, uint64_t bytes,
                            gpushare_device_address* out_address) {
    return on_live(device, "va_reserve", [&](Device& d) -> base::Status {
      if (out_address == nullptr) return null_output();
      return store(d.memory().reserve(bytes), out_address);
    });
  }
  static int32_t va_free(gpushare_backend_device* device, gpushare_device_address address, uint64_t bytes) {
    return on_any(device, "va_free", [&](Device& d) { return d.memory().unreserve(address, bytes); });
  }
  static int32_t phys_create(gpushare_backend_device* device, uint64_t bytes,
                             gpushare_backend_memory** out_memory) {
    return on_live(device, "phys_create", [&](Device& d) -> base::Status {
      if (out_memory == nullptr) return null_output();
      if (d.faults().fires(GPUSHARE_FAULT_DEVICE_OUT_OF_MEMORY))
        return scripted_out_of_memory("phys_create", bytes);
      return store(d.memory().create_physical(bytes), out_memory);
    });
  }
  static int32_t phys_create_host(gpushare_backend_device* device, uint64_t bytes,
                                  gpushare_backend_memory** out_memory) {
    return on_live(device, "phys_create_host", [&](Device& d) -> base::Status {
      if (out_memory == nullptr) return null_output();
      if (d.faults().fires(GPUSHARE_FAULT_HOST_OUT_OF_MEMORY))
        return {GPUSHARE_HOST_OUT_OF_MEMORY, "phys_create_host fails: scripted fault"};
      return store(d.memory().create_host_physical(bytes), out_memory);
    });
  }
  static int32_t phys_release(gpushare_backend_device* device, gpushare_backend_memory* memory) {
    return on_any(device, "phys_release", [&](Device& d) { return d.memory().release_physical(memory); });
  }
  static int32_t va_map(gpushare_backend_device* device, gpushare_device_address address, uint64_t bytes,
                        gpushare_backend_memory* memory, uint64_t offset) {
    return on_live(device, "va_map", [&](Device& d) -> base::Status {
      if (d.faults().fires(GPUSHARE_FAULT_MAP_FAILS)) return scripted_out_of_memory("va_map", bytes);
      return d.memory().map(address, bytes, memory, offset);
    });
  }
  static int32_t va_unmap(gpushare_backend_device* device, gpushare_device_address address, uint64_t bytes) {
    return on_any(device, "va_unmap", [&](Device& d) { return d.memory().unmap(address, bytes); });
  }
  static int32_t va_map_run(gpushare_backend_device* device, gpushare_device_address address, uint64_t bytes,
                            gpushare_backend_memory* const* memories, uint64_t count) {
    return on_live(device, "va_map_run", [&](Device& d) -> base::Status {
      if (memories == nullptr) return null_handle("memories");
      if (d.faults().fires(GPUSHARE_FAULT_MAP_FAILS)) return scripted_out_of_memory("va_map_run", bytes);
      return d.memory().map_run(address, bytes, memories, count);
    });
  }
  static int32_t va_unmap_run(gpushare_backend_device* device, gpushare_device_address address,
                              uint64_t bytes, uint64_t count, uint64_t* out_count) {
    return on_any(device, "va_unmap_run", [&](Device& d) -> base::Status {
      if (out_count == nullptr) return null_output();
      *out_count = 0;
      return d.memory().unmap_run(address, bytes, count, out_count);
    });
  }
  static int32_t fault_set(gpushare_backend_device* device, const gpushare_backend_fault* fault) {
    return on_any(device, "fault_set", [&](Device& d) { return d.faults().set(fault); });
  }

  static base::Status check_access(uint32_t access) {
    if (access == GPUSHARE_ACCESS_READ || access == GPUSHARE_ACCESS_READ_WRITE) return {};
    return {GPUSHARE_INVALID_ARGUMENT,
            base::format("access is %u; allowed are GPUSHARE_ACCESS_READ and GPUSHARE_ACCESS_READ_WRITE",
                         access)};
  }
  static base::Status scripted_out_of_memory(const char* op, uint64_t bytes) {
    return {GPUSHARE_DEVICE_OUT_OF_MEMORY, base::format("%s of %llu bytes fails: scripted fault", op,
                                                        static_cast<unsigned long long>(bytes))};
  }
  static base::Status check_same(gpushare_backend_stream* stream, gpushare_backend_event* event) {
    if (&to(stream)->device() != &to(event)->device()) {
      return {GPUSHARE_INVALID_ARGUMENT, "the event and the stream belong to different devices"};
    }
    return to(stream)->device().check_lost();
  }
};

}  // namespace gpushare::device
