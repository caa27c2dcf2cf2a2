// SPDX-License-Identifier: Apache-2.0
#include "device/device.hpp"

#include <string_view>

#include "base/log.hpp"
#include "base/no_memory.hpp"
#include "base/units.hpp"
#include "base/waits.hpp"
#include "device/registry.hpp"
#include "device/support/ops_guard.hpp"
#include "device/unsupported.hpp"

namespace gpushare::device {
namespace {

struct Spec {
  std::string backend;
  uint32_t index = 0;
  std::string device;  // without options
  std::string options;
};

base::Result<Spec> parse_spec(const std::string& text) {
  Spec spec;
  const size_t question = text.find('?');
  spec.device = text.substr(0, question);
  if (question != std::string::npos) spec.options = text.substr(question + 1);
  const size_t colon = spec.device.find(':');
  spec.backend = spec.device.substr(0, colon);
  if (colon != std::string::npos) {
    const base::Result<uint64_t> index = base::parse_uint64(std::string_view(spec.device).substr(colon + 1));
    if (!index.ok() || *index > UINT32_MAX) {
      return base::Status(GPUSHARE_INVALID_ARGUMENT,
                          "device '" + text + "': the index after ':' is not a number");
    }
    spec.index = static_cast<uint32_t>(*index);
  }
  if (spec.backend.empty()) {
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        "device '" + text + "': want name[:index][?key=value&...]");
  }
  return spec;
}

// Every op that destroys something is called from a destructor sooner or later: its failure can only be
// logged.
void log_failure(const base::Status& status, const char* what) {
  if (!status.ok()) base::log(base::kWarning, status.with_context(what).to_string());
}

// The only output of `op`, which is its last argument.
template <class Out, class Op, class... Arguments>
base::Result<Out> made(const Device& device, Op* op, const char* name, Arguments... arguments) {
  Out out{};
  GPUSHARE_RETURN_IF_ERROR(device.status(op(device.get(), arguments..., &out), name));
  return out;
}

}  // namespace

Event::~Event() {
  // After Device::close() the backend has released what was left.
  if (event_ == nullptr || device_->get() == nullptr) return;
  log_failure(device_->status(device_->ops().event_destroy(event_), "event_destroy"), "dropping an event");
}

base::Status Event::query() const {
  if (!base::QuietQueries::active()) base::check_wait("the device, which may move a simulated clock");
  return device_->status(device_->ops().event_query(event_), "event_query");
}

base::Status Event::synchronize() const {
  base::check_wait("the device");
  return device_->status(device_->ops().event_synchronize(event_), "event_synchronize");
}

base::Result<uint64_t> Event::elapsed_since(const Event& start) const {
  uint64_t ns = 0;
  const int32_t code = device_->ops().event_elapsed(start.event_, event_, &ns);
  if (code == GPUSHARE_OK) return ns;
  return device_->status(code, "event_elapsed");
}

Stream::~Stream() {
  if (stream_ == nullptr || device_->get() == nullptr) return;
  base::check_wait("the device");
  log_failure(device_->status(device_->ops().stream_destroy(stream_), "stream_destroy"), "dropping a stream");
}

void* Stream::native() const {
  void* native = nullptr;
  return device_->ops().stream_native(stream_, &native) == GPUSHARE_OK ? native : nullptr;
}

base::Status Stream::query() const {
  if (!base::QuietQueries::active()) base::check_wait("the device, which may move a simulated clock");
  return device_->status(device_->ops().stream_query(stream_), "stream_query");
}

base::Status Stream::synchronize() const {
  base::check_wait("the device");
  return device_->status(device_->ops().stream_synchronize(stream_), "stream_synchronize");
}

base::Status Stream::wait(const Event& event) const {
  return device_->status(device_->ops().stream_wait_event(stream_, event.get()), "stream_wait_event");
}

base::Status Stream::record(const Event& event) const {
  const int32_t code = device_->ops().event_record(event.get(), stream_);
  return code == GPUSHARE_OK ? base::Status() : device_->status(code, "event_record");
}

base::Status Stream::copy(uint64_t destination, uint64_t source, uint64_t bytes, uint32_t kind) const {
  return device_->status(device_->ops().copy_async(stream_, destination, source, bytes, kind), "copy_async");
}

base::Status Stream::fill(Address address, uint8_t value, uint64_t bytes) const {
  return device_->status(device_->ops().fill_async(stream_, address, value, bytes), "fill_async");
}

base::Status Stream::launch_host(gpushare_host_function function, void* user_data) const {
  return device_->status(device_->ops().launch_host(stream_, function, user_data), "launch_host");
}

base::Status Stream::work(const gpushare_backend_work& work) const {
  return device_->status(device_->ops().work_launch(stream_, &work), "work_launch");
}

base::Result<bool> Stream::drop_capture() const {
  uint32_t dropped = 0;
  GPUSHARE_RETURN_IF_ERROR(
      device_->status(device_->ops().stream_capture_drop(stream_, &dropped), "stream_capture_drop"));
  return dropped != 0;
}

base::Result<std::unique_ptr<Device>> Device::open(const std::string& text) {
  base::prepare_no_memory();
  GPUSHARE_ASSIGN_OR_RETURN(const Spec spec, parse_spec(text));
  if (spec.backend == "auto") {
    if (spec.device != "auto" || !spec.options.empty()) {
      return base::Status(
          GPUSHARE_INVALID_ARGUMENT,
          "device '" + text + "': auto takes no index and no options; name the backend to give any");
    }
    const gpushare_backend_ops* cuda = find_backend("cuda");
    uint32_t count = 0;
    if (cuda != nullptr && cuda->probe(&count) == GPUSHARE_OK) {
      for (uint32_t index = 0; index < count; ++index) {
        base::Result<std::unique_ptr<Device>> device = open("cuda:" + std::to_string(index));
        if (device.ok()) return device;
        log_failure(device.status(), "device auto passes over a GPU");
      }
    }
    return open("host");
  }
  const gpushare_backend_ops* ops = find_backend(spec.backend);
  if (ops == nullptr) {
    std::string known;
    for (const gpushare_backend_ops* backend : backends())
      known += std::string(known.empty() ? "" : ", ") + backend->name;
    return base::Status(GPUSHARE_NOT_FOUND,
                        "there is no backend '" + spec.backend + "'; registered are " + known + ", and auto");
  }
  // What needs host memory comes first: the backend's device has an owner at once.
  std::unique_ptr<Device> device(new Device(ops, nullptr, spec.device));
  device->index_ = spec.index;
  device->options_ = spec.options;
  gpushare_backend_device* handle = nullptr;
  const int32_t code = ops->device_open(spec.index, spec.options.c_str(), &handle);
  device->device_ = handle;
  GPUSHARE_RETURN_IF_ERROR(device->status(code, "device_open"));
  GPUSHARE_ASSIGN_OR_RETURN(device->info_, device->refresh_info());
  return device;
}

Device::Device(const gpushare_backend_ops* ops, gpushare_backend_device* device, std::string spec)
    : ops_(ops), device_(device), spec_(std::move(spec)) {}

Device::~Device() {
  log_failure(close(), "closing a device");
}

base::Status Device::close() {
  if (device_ == nullptr) return {};
  gpushare_backend_device* device = std::exchange(device_, nullptr);
  return status(ops_->device_close(device), "device_close");
}

base::Result<gpushare_backend_device_info> Device::refresh_info() {
  gpushare_backend_device_info info{};
  info.struct_size = sizeof(info);
  GPUSHARE_RETURN_IF_ERROR(status(ops_->device_info(device_, &info), "device_info"));
  return info;
}

uint64_t Device::now_ns() const {
  uint64_t ns = 0;
  return ops_->clock_now(device_, &ns) == GPUSHARE_OK ? ns : 0;
}

base::Result<Address> Device::alloc(uint64_t bytes) {
  return made<Address>(*this, ops_->mem_alloc, "mem_alloc", bytes);
}

base::Status Device::free(Address address) {
  return status(ops_->mem_free(device_, address), "mem_free");
}

base::Result<void*> Device::host_alloc(uint64_t bytes) {
  return made<void*>(*this, ops_->host_alloc, "host_alloc", bytes);
}

base::Status Device::host_free(void* pointer) {
  return status(ops_->host_free(device_, pointer), "host_free");
}

base::Result<Stream> Device::create_stream(int32_t priority) {
  GPUSHARE_ASSIGN_OR_RETURN(auto* const stream, made<gpushare_backend_stream*>(*this, ops_->stream_create,
                                                                               "stream_create", priority));
  return Stream(this, stream);
}

base::Result<Stream> Device::adopt_stream(void* native) {
  GPUSHARE_ASSIGN_OR_RETURN(
      auto* const stream, made<gpushare_backend_stream*>(*this, ops_->stream_adopt, "stream_adopt", native));
  return Stream(this, stream);
}

base::Result<Event> Device::create_event(uint32_t flags) {
  GPUSHARE_ASSIGN_OR_RETURN(auto* const event,
                            made<gpushare_backend_event*>(*this, ops_->event_create, "event_create", flags));
  return Event(this, event);
}

base::Result<Address> Device::va_reserve(uint64_t bytes) {
  return made<Address>(*this, ops_->va_reserve, "va_reserve", bytes);
}

base::Status Device::va_free(Address address, uint64_t bytes) {
  return status(ops_->va_free(device_, address, bytes), "va_free");
}

base::Result<gpushare_backend_memory*> Device::phys_create(uint64_t bytes) {
  return made<gpushare_backend_memory*>(*this, ops_->phys_create, "phys_create", bytes);
}

base::Result<gpushare_backend_memory*> Device::phys_create_host(uint64_t bytes) {
  return made<gpushare_backend_memory*>(*this, ops_->phys_create_host, "phys_create_host", bytes);
}

base::Status Device::phys_release(gpushare_backend_memory* memory) {
  return status(ops_->phys_release(device_, memory), "phys_release");
}

base::Status Device::va_map(Address address, uint64_t bytes, gpushare_backend_memory* memory,
                            uint64_t offset) {
  return status(ops_->va_map(device_, address, bytes, memory, offset), "va_map");
}

base::Status Device::va_unmap(Address address, uint64_t bytes) {
  return status(ops_->va_unmap(device_, address, bytes), "va_unmap");
}

base::Status Device::va_map_run(Address address, uint64_t bytes, gpushare_backend_memory* const* memories,
                                uint64_t count) {
  const int32_t code = ops_->va_map_run(device_, address, bytes, memories, count);
  if (code != GPUSHARE_UNSUPPORTED) return status(code, "va_map_run");
  for (uint64_t i = 0; i < count; ++i) {
    base::Status failed = va_map(address + i * bytes, bytes, memories[i], 0);
    if (failed.ok()) continue;
    while (i-- > 0) {
      const base::Status ignored = va_unmap(address + i * bytes, bytes);
    }
    return failed;
  }
  return {};
}

base::Status Device::va_unmap_run(Address address, uint64_t bytes, uint64_t count, uint64_t* out_count) {
  *out_count = 0;
  const int32_t code = ops_->va_unmap_run(device_, address, bytes, count, out_count);
  if (code != GPUSHARE_UNSUPPORTED) return status(code, "va_unmap_run");
  for (; *out_count < count; ++*out_count)
    GPUSHARE_RETURN_IF_ERROR(va_unmap(address + *out_count * bytes, bytes));
  return {};
}

base::Result<uint64_t> Device::context_bytes() {
  uint64_t bytes = 0;
  const int32_t code = ops_->context_bytes(index_, options_.c_str(), &bytes);
  if (code == GPUSHARE_NOT_READY) return failure(code, "context_bytes");  // its message says why
  GPUSHARE_RETURN_IF_ERROR(status(code, "context_bytes"));
  return bytes;
}

base::Result<gpushare_backend_memory*> Device::phys_create_shared(uint64_t bytes) {
  return made<gpushare_backend_memory*>(*this, ops_->phys_create_shared, "phys_create_shared", bytes);
}

base::Result<int> Device::phys_export(gpushare_backend_memory* memory, uint32_t access) {
  int32_t descriptor = -1;
  GPUSHARE_RETURN_IF_ERROR(status(ops_->phys_export(device_, memory, access, &descriptor), "phys_export"));
  return static_cast<int>(descriptor);
}

base::Result<gpushare_backend_memory*> Device::phys_import(int descriptor, uint64_t bytes, uint32_t access) {
  return made<gpushare_backend_memory*>(*this, ops_->phys_import, "phys_import", descriptor, bytes, access);
}

base::Result<gpushare_backend_partition_info> Device::partition_info() {
  gpushare_backend_partition_info info{};
  info.struct_size = sizeof(info);
  GPUSHARE_RETURN_IF_ERROR(status(ops_->partition_info(device_, &info), "partition_info"));
  return info;
}

base::Result<Device::Partition> Device::create_partition(uint32_t compute_units) {
  Partition partition{};
  GPUSHARE_RETURN_IF_ERROR(
      status(ops_->partition_create(device_, compute_units, &partition.handle, &partition.compute_units),
             "partition_create"));
  return partition;
}

base::Status Device::destroy_partition(gpushare_backend_partition* partition) {
  return status(ops_->partition_destroy(device_, partition), "partition_destroy");
}

base::Result<Stream> Device::create_stream_in(gpushare_backend_partition* partition, int32_t priority) {
  gpushare_backend_stream* stream = nullptr;
  GPUSHARE_RETURN_IF_ERROR(
      status(ops_->partition_stream_create(partition, priority, &stream), "partition_stream_create"));
  return Stream(this, stream);
}

base::Status Device::set_fault(const gpushare_backend_fault& fault) {
  return status(ops_->fault_set(device_, &fault), "fault_set");
}

base::Status Device::status(int32_t code, const char* op) const {
  if (code == GPUSHARE_OK) return {};
  if (code == GPUSHARE_NOT_READY) return not_ready();
  if (code == GPUSHARE_UNSUPPORTED && take_unsupported()) {
    return {code, base::format("%s: backend '%s' does not have this operation", op, ops_->name), 0,
            ops_->name};
  }
  return failure(code, op);
}

base::Status Device::failure(int32_t code, const char* op) const {
  gpushare_backend_error error{};
  error.struct_size = sizeof(error);
  if (ops_->last_error(&error) == GPUSHARE_OK && error.status == code && error.message[0] != '\0') {
    error.message[sizeof(error.message) - 1] = '\0';
    return {code, base::format("%s: %s", op, error.message), error.native_code, ops_->name};
  }
  return {code, base::format("%s failed without details", op), 0, ops_->name};
}

}  // namespace gpushare::device
