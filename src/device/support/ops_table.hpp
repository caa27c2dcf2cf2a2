// ops_table.hpp: the C functions of a backend that is written as three classes, Device, Stream and Event (host
// and sim are; cuda replaces probe). The functions check handles and outputs, check for lost
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
  using Device = typename B::Device;
  using Stream = typename B::Stream;
  using Event = typename B::Event;

  // Optional groups are in the table except modelled work and ipc, which the backend adds if it has them.
  static gpushare_backend_ops make() {
    gpushare_backend_ops ops{};
    ops.struct_size = sizeof(ops);
    ops.abi_version = GPUSHARE_BACKEND_ABI_VERSION;
    ops.name = B::kName;
    ops.last_error = [](gpushare_backend_error* out_error) {
      return write_backend_error(error_slot().get(), out_error);
    };
    add_device(ops);
    add_memory(ops);
    add_streams(ops);
    add_events(ops);
    add_work(ops);
    add_virtual_memory(ops);
    return ops;
  }

  static int32_t work_launch(gpushare_backend_stream* stream, const gpushare_backend_work* work) {
    return on_stream(stream, "work_launch", [&](Stream& s) { return s.device().enqueue_work(&s, work); });
  }

  // Group "ipc", for backends whose memory() has create_shared, export_physical and import_physical.
  static void add_ipc(gpushare_backend_ops& ops) {
    ops.phys_create_shared = [](gpushare_backend_device* device, uint64_t bytes,
                                gpushare_backend_memory** out_memory) {
      return output(device, "phys_create_shared", out_memory, [&](Device& d) -> base::Result<Memory> {
        GPUSHARE_RETURN_IF_ERROR(out_of_memory(d, "phys_create_shared", bytes));
        return d.memory().create_shared(bytes);
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
      return output(device, "phys_import", out_memory, [&](Device& d) -> base::Result<Memory> {
        GPUSHARE_RETURN_IF_ERROR(check_access(access));
        return d.memory().import_physical(descriptor, bytes, access);
      });
    };
  }

  // The frames, for ops that a backend adds or writes itself. `body` returns a status and runs unless the handle is null.
  template <class Body>
  static int32_t guard(const char* op, Body&& body) {
    return guard_op(error_slot(), op, body);
  }
  // For ops that release something: they work on a lost device too.
  template <class Body>
  static int32_t on_any(gpushare_backend_device* device, const char* op, Body&& body) {
    return guard(
        op, [&]() -> base::Status { return device == nullptr ? null_handle("device") : body(*to(device)); });
  }
  // For all others.
  template <class Body>
  static int32_t on_live(gpushare_backend_device* device, const char* op, Body&& body) {
    return on_any(device, op, [&](Device& d) -> base::Status {
      GPUSHARE_RETURN_IF_ERROR(d.check_lost());
      return body(d);
    });
  }
  // The same for an op with one output, whose value or handle `body` returns.
  template <class Out, class Body>
  static int32_t output(gpushare_backend_device* device, const char* op, Out* out, Body&& body) {
    return on_live(device, op, [&](Device& d) -> base::Status {
      return out == nullptr ? null_output() : store(body(d), out);
    });
  }
  template <class Body>
  static int32_t on_stream(gpushare_backend_stream* stream, const char* op, Body&& body) {
    return guard(
        op, [&]() -> base::Status { return stream == nullptr ? null_handle("stream") : body(*to(stream)); });
  }
  template <class Body>
  static int32_t on_event(gpushare_backend_event* event, const char* op, Body&& body) {
    return guard(
        op, [&]() -> base::Status { return event == nullptr ? null_handle("event") : body(*to(event)); });
  }
  template <class T, class Out>
  static base::Status store(base::Result<T> result, Out* out) {
    if (!result.ok()) return result.status();
    if constexpr (std::is_convertible_v<T, Out>)
      *out = *result;
    else
      *out = reinterpret_cast<Out>(*result);
    return {};
  }

  static Device* to(gpushare_backend_device* handle) { return reinterpret_cast<Device*>(handle); }
  static Stream* to(gpushare_backend_stream* handle) { return reinterpret_cast<Stream*>(handle); }
  static Event* to(gpushare_backend_event* handle) { return reinterpret_cast<Event*>(handle); }

 private:
  using Address = gpushare_device_address;
  using Memory = gpushare_backend_memory*;

  static base::ThreadStatus& error_slot() {
    static GPUSHARE_THREAD_LOCAL base::ThreadStatus status;
    return status;
  }

  static void add_device(gpushare_backend_ops& ops) {
    ops.probe = [](uint32_t* out_device_count) {
      return guard("probe", [&]() -> base::Status {
        if (out_device_count == nullptr) return null_output();
        *out_device_count = 1;
        return {};
      });
    };
    ops.device_open = [](uint32_t index, const char* options, gpushare_backend_device** out_device) {
      return guard("device_open", [&]() -> base::Status {
        if (out_device == nullptr || options == nullptr) return null_output();
        std::unique_ptr<Device> device;
        if constexpr (requires { Device::open(index, options); }) {
          GPUSHARE_ASSIGN_OR_RETURN(device, Device::open(index, options));
        } else {
          if (index != 0)
            return {GPUSHARE_UNAVAILABLE,
                    base::format("there is one %s device, index 0; asked for %u", B::kName, index)};
          GPUSHARE_ASSIGN_OR_RETURN(device, Device::open(options));
        }
        *out_device = reinterpret_cast<gpushare_backend_device*>(device.release());
        return {};
      });
    };
    ops.device_close = [](gpushare_backend_device* device) {
      return on_any(device, "device_close", [](Device& d) -> base::Status {
        GPUSHARE_RETURN_IF_ERROR(d.finish());
        const std::unique_ptr<Device> owned(&d);  // also if the report finds no memory
        return d.leaks();
      });
    };
    ops.device_info = [](gpushare_backend_device* device, gpushare_backend_device_info* out_info) {
      return on_any(device, "device_info", [&](Device& d) -> base::Status {
        if (out_info == nullptr || out_info->struct_size < sizeof(uint32_t)) return null_output();
        if constexpr (std::is_void_v<decltype(d.info(out_info))>) {
          d.info(out_info);
          return {};
        } else {
          return d.info(out_info);
        }
      });
    };
    ops.clock_now = [](gpushare_backend_device* device, uint64_t* out_ns) {
      return on_any(device, "clock_now", [&](Device& d) -> base::Status {
        if (out_ns == nullptr) return null_output();
        *out_ns = d.now_ns();
        return {};
      });
    };
    ops.fault_set = [](gpushare_backend_device* device, const gpushare_backend_fault* fault) {
      return on_any(device, "fault_set", [&](Device& d) { return d.faults().set(fault); });
    };
  }

  static void add_memory(gpushare_backend_ops& ops) {
    ops.mem_alloc = [](gpushare_backend_device* device, uint64_t bytes, Address* out_address) {
      return output(device, "mem_alloc", out_address, [&](Device& d) -> base::Result<Address> {
        GPUSHARE_RETURN_IF_ERROR(out_of_memory(d, "mem_alloc", bytes));
        return d.memory().alloc(bytes);
      });
    };
    ops.mem_free = [](gpushare_backend_device* device, Address address) {
      return on_any(device, "mem_free", [&](Device& d) { return d.memory().free(address); });
    };
    ops.host_alloc = [](gpushare_backend_device* device, uint64_t bytes, void** out_pointer) {
      return output(device, "host_alloc", out_pointer, [&](Device& d) -> base::Result<void*> {
        GPUSHARE_RETURN_IF_ERROR(out_of_host_memory(d, "host_alloc"));
        return d.memory().host_alloc(bytes);
      });
    };
    ops.host_free = [](gpushare_backend_device* device, void* pointer) {
      return on_any(device, "host_free", [&](Device& d) { return d.memory().host_free(pointer); });
    };
  }

  static void add_streams(gpushare_backend_ops& ops) {
    ops.stream_create = [](gpushare_backend_device* device, int32_t priority,
                           gpushare_backend_stream** out_stream) {
      return output(device, "stream_create", out_stream, [&](Device& d) -> base::Result<Stream*> {
        if (d.faults().fires(GPUSHARE_FAULT_STREAM_CREATE_FAILS))
          return base::Status(GPUSHARE_UNKNOWN, "stream_create fails: scripted fault");
        return d.create_stream(priority);
      });
    };
    ops.stream_destroy = [](gpushare_backend_stream* stream) {
      return on_stream(stream, "stream_destroy", [](Stream& s) { return s.device().destroy_stream(&s); });
    };
    ops.stream_query = [](gpushare_backend_stream* stream) {
      return on_stream(stream, "stream_query", [](Stream& s) { return s.query(); });
    };
    ops.stream_synchronize = [](gpushare_backend_stream* stream) {
      return on_stream(stream, "stream_synchronize", [](Stream& s) { return s.synchronize(); });
    };
    ops.stream_wait_event = [](gpushare_backend_stream* stream, gpushare_backend_event* event) {
      return on_stream(stream, "stream_wait_event", [&](Stream& s) -> base::Status {
        if (event == nullptr) return null_handle("event");
        GPUSHARE_RETURN_IF_ERROR(check_same(s, *to(event)));
        return to(event)->make_wait(s);
      });
    };
    ops.stream_native = [](gpushare_backend_stream* stream, void** out_native) {
      return on_stream(stream, "stream_native", [&](Stream& s) -> base::Status {
        if (out_native == nullptr) return null_output();
        if constexpr (requires { s.handle(); })
          *out_native = s.handle();
        else
          *out_native = &s;
        return {};
      });
    };
  }

  static void add_events(gpushare_backend_ops& ops) {
    ops.event_create = [](gpushare_backend_device* device, uint32_t flags,
                          gpushare_backend_event** out_event) {
      return output(device, "event_create", out_event, [&](Device& d) -> base::Result<Event*> {
        if ((flags & ~static_cast<uint32_t>(GPUSHARE_EVENT_TIMING)) != 0)
          return base::Status(GPUSHARE_INVALID_ARGUMENT,
                              base::format("event flags 0x%x are unknown; allowed is 0 or 1", flags));
        return d.create_event((flags & GPUSHARE_EVENT_TIMING) != 0);
      });
    };
    ops.event_destroy = [](gpushare_backend_event* event) {
      return on_event(event, "event_destroy", [](Event& e) { return e.device().destroy_event(&e); });
    };
    ops.event_record = [](gpushare_backend_event* event, gpushare_backend_stream* stream) {
      return on_event(event, "event_record", [&](Event& e) -> base::Status {
        if (stream == nullptr) return null_handle("stream");
        GPUSHARE_RETURN_IF_ERROR(check_same(*to(stream), e));
        return e.record(*to(stream));
      });
    };
    ops.event_query = [](gpushare_backend_event* event) {
      return on_event(event, "event_query", [](Event& e) -> base::Status {
        GPUSHARE_RETURN_IF_ERROR(e.device().check_lost());
        return e.query();
      });
    };
    ops.event_synchronize = [](gpushare_backend_event* event) {
      return on_event(event, "event_synchronize", [](Event& e) -> base::Status {
        GPUSHARE_RETURN_IF_ERROR(e.synchronize());
        return e.device().check_lost();
      });
    };
    ops.event_elapsed = [](gpushare_backend_event* start, gpushare_backend_event* end, uint64_t* out_ns) {
      return on_event(start, "event_elapsed", [&](Event& e) -> base::Status {
        if (end == nullptr) return null_handle("event");
        if (out_ns == nullptr) return null_output();
        return store(Event::elapsed(e, *to(end)), out_ns);
      });
    };
  }

  static void add_work(gpushare_backend_ops& ops) {
    ops.copy_async = [](gpushare_backend_stream* stream, uint64_t destination, uint64_t source,
                        uint64_t bytes, uint32_t kind) {
      return on_stream(stream, "copy_async", [&](Stream& s) {
        return s.device().enqueue_copy(&s, destination, source, bytes, kind);
      });
    };
    ops.fill_async = [](gpushare_backend_stream* stream, Address address, uint8_t value, uint64_t bytes) {
      return on_stream(stream, "fill_async",
                       [&](Stream& s) { return s.device().enqueue_fill(&s, address, value, bytes); });
    };
    ops.launch_host = [](gpushare_backend_stream* stream, gpushare_host_function function, void* user_data) {
      return on_stream(stream, "launch_host", [&](Stream& s) -> base::Status {
        if (function == nullptr) return {GPUSHARE_INVALID_ARGUMENT, "the host function is null"};
        return s.device().enqueue_callback(&s, function, user_data);
      });
    };
  }

  static void add_virtual_memory(gpushare_backend_ops& ops) {
    ops.va_reserve = [](gpushare_backend_device* device, uint64_t bytes, Address* out_address) {
      return output(device, "va_reserve", out_address, [&](Device& d) { return d.memory().reserve(bytes); });
    };
    ops.va_free = [](gpushare_backend_device* device, Address address, uint64_t bytes) {
      return on_any(device, "va_free", [&](Device& d) { return d.memory().unreserve(address, bytes); });
    };
    ops.phys_create = [](gpushare_backend_device* device, uint64_t bytes, Memory* out_memory) {
      return output(device, "phys_create", out_memory, [&](Device& d) -> base::Result<Memory> {
        GPUSHARE_RETURN_IF_ERROR(out_of_memory(d, "phys_create", bytes));
        return d.memory().create_physical(bytes);
      });
    };
    ops.phys_create_host = [](gpushare_backend_device* device, uint64_t bytes, Memory* out_memory) {
      return output(device, "phys_create_host", out_memory, [&](Device& d) -> base::Result<Memory> {
        GPUSHARE_RETURN_IF_ERROR(out_of_host_memory(d, "phys_create_host"));
        return d.memory().create_host_physical(bytes);
      });
    };
    ops.phys_release = [](gpushare_backend_device* device, Memory memory) {
      return on_any(device, "phys_release", [&](Device& d) { return d.memory().release_physical(memory); });
    };
    ops.va_map = [](gpushare_backend_device* device, Address address, uint64_t bytes, Memory memory,
                    uint64_t offset) {
      return on_live(device, "va_map", [&](Device& d) -> base::Status {
        GPUSHARE_RETURN_IF_ERROR(out_of_memory(d, "va_map", bytes, GPUSHARE_FAULT_MAP_FAILS));
        return d.memory().map(address, bytes, memory, offset);
      });
    };
    ops.va_unmap = [](gpushare_backend_device* device, Address address, uint64_t bytes) {
      return on_any(device, "va_unmap", [&](Device& d) { return d.memory().unmap(address, bytes); });
    };
    ops.va_map_run = [](gpushare_backend_device* device, Address address, uint64_t bytes,
                        const Memory* memories, uint64_t count) {
      return on_live(device, "va_map_run", [&](Device& d) -> base::Status {
        if (memories == nullptr) return null_handle("memories");
        GPUSHARE_RETURN_IF_ERROR(out_of_memory(d, "va_map_run", bytes, GPUSHARE_FAULT_MAP_FAILS));
        return d.memory().map_run(address, bytes, memories, count);
      });
    };
    ops.va_unmap_run = [](gpushare_backend_device* device, Address address, uint64_t bytes, uint64_t count,
                          uint64_t* out_count) {
      return on_any(device, "va_unmap_run", [&](Device& d) -> base::Status {
        if (out_count == nullptr) return null_output();
        *out_count = 0;
        return d.memory().unmap_run(address, bytes, count, out_count);
      });
    };
  }

  // The scripted faults, if they are due.
  static base::Status out_of_memory(Device& d, const char* op, uint64_t bytes,
                                    uint32_t fault = GPUSHARE_FAULT_DEVICE_OUT_OF_MEMORY) {
    if (!d.faults().fires(fault)) return {};
    return {GPUSHARE_DEVICE_OUT_OF_MEMORY, base::format("%s of %llu bytes fails: scripted fault", op,
                                                        static_cast<unsigned long long>(bytes))};
  }
  static base::Status out_of_host_memory(Device& d, const char* op) {
    if (!d.faults().fires(GPUSHARE_FAULT_HOST_OUT_OF_MEMORY)) return {};
    return {GPUSHARE_HOST_OUT_OF_MEMORY, std::string(op) + " fails: scripted fault"};
  }
  static base::Status check_access(uint32_t access) {
    if (access == GPUSHARE_ACCESS_READ || access == GPUSHARE_ACCESS_READ_WRITE) return {};
    return {GPUSHARE_INVALID_ARGUMENT,
            base::format("access is %u; allowed are GPUSHARE_ACCESS_READ and GPUSHARE_ACCESS_READ_WRITE",
                         access)};
  }
  static base::Status check_same(const Stream& stream, const Event& event) {
    if (&stream.device() == &event.device()) return stream.device().check_lost();
    return {GPUSHARE_INVALID_ARGUMENT, "the event and the stream belong to different devices"};
  }
};

}  // namespace gpushare::device
