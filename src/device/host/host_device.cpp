// SPDX-License-Identifier: Apache-2.0
#include "device/host/host_device.hpp"

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "device/support/device_options.hpp"
#include "device/support/ops_guard.hpp"
#include "device/support/options.hpp"

namespace gpushare::device::host {

base::Result<std::unique_ptr<Device>> Device::open(const char* text) {
  GPUSHARE_ASSIGN_OR_RETURN(Options options, Options::parse("host", text));
  AddressSpaceOptions space;
  space.backend = "host";
  GPUSHARE_RETURN_IF_ERROR(read_memory_options(options, /*default_total_bytes=*/1ull << 30, &space));
  GPUSHARE_ASSIGN_OR_RETURN(const double copy_gbps, options.get_double("copy_gbps", 0, 0, 1e5));
  GPUSHARE_RETURN_IF_ERROR(options.finish());
  if (copy_gbps > 0 && copy_gbps < 1e-3) {
    return base::Status(GPUSHARE_INVALID_ARGUMENT, "host: option copy_gbps is 0 (no cap) or at least 0.001");
  }
  GPUSHARE_ASSIGN_OR_RETURN(std::unique_ptr<AddressSpace> memory, AddressSpace::create(space));
  return std::unique_ptr<Device>(new Device(std::move(memory), copy_gbps));
}

Device::Device(std::unique_ptr<AddressSpace> memory, double copy_gbps)
    : memory_(std::move(memory)), to_device_(copy_gbps), to_host_(copy_gbps) {}

base::Status Device::finish() {
  std::vector<std::shared_ptr<Stream>> streams;
  {
    base::MutexLock lock(mutex_);
    for (const auto& [raw, stream] : streams_) streams.push_back(stream);
  }
  // All of them, before anything is torn down: their queues may wait for each other.
  for (const auto& stream : streams) GPUSHARE_RETURN_IF_ERROR(stream->stop());
  return {};
}

base::Status Device::leaks() const {
  base::MutexLock lock(mutex_);
  return leak_report("host", streams_.size(), events_.size(), memory_->leaks());
}

void Device::info(gpushare_backend_device_info* out_info) const {
  gpushare_backend_device_info info{};
  info.capabilities = GPUSHARE_DEVICE_CAP_HOST_ADDRESSABLE | GPUSHARE_DEVICE_CAP_VIRTUAL_MEMORY |
                      GPUSHARE_DEVICE_CAP_FAULTS | GPUSHARE_DEVICE_CAP_IPC |
                      GPUSHARE_DEVICE_CAP_HOST_PHYSICAL;
  std::strncpy(info.name, "host", sizeof(info.name) - 1);
  info.total_bytes = memory_->total_bytes();
  info.free_bytes = memory_->free_bytes();
  info.allocation_alignment_bytes = AddressSpace::kPageBytes;
  info.mapping_granularity_bytes = memory_->granularity_bytes();
  info.compute_units = std::max(1u, std::thread::hardware_concurrency());
  write_device_info(info, out_info);
}

uint64_t Device::now_ns() const {
  return base::host_now_ns();
}

base::Status Device::check_lost() const {
  if (!lost_.load(std::memory_order_acquire)) return {};
  return {GPUSHARE_DEVICE_LOST, "the host device was lost (scripted fault); close it and open another"};
}

base::Result<Stream*> Device::create_stream(int32_t /*priority: threads have none that we may raise*/) {
  auto stream = std::make_shared<Stream>(*this, lost_);
  base::MutexLock lock(mutex_);
  Stream* raw = stream.get();
  streams_[raw] = std::move(stream);
  return raw;
}

base::Status Device::destroy_stream(Stream* stream) {
  std::shared_ptr<Stream> owned;
  {
    base::MutexLock lock(mutex_);
    const auto it = streams_.find(stream);
    if (it == streams_.end()) return {GPUSHARE_INVALID_HANDLE, "not a live stream of this device"};
    owned = it->second;
  }
  GPUSHARE_RETURN_IF_ERROR(owned->stop());
  base::MutexLock lock(mutex_);
  streams_.erase(stream);
  return {};
}

base::Result<Event*> Device::create_event(bool timing) {
  auto event = std::make_shared<Event>(*this, timing);
  base::MutexLock lock(mutex_);
  Event* raw = event.get();
  events_[raw] = std::move(event);
  return raw;
}

base::Status Device::destroy_event(Event* event) {
  std::shared_ptr<Event> owned;
  base::MutexLock lock(mutex_);
  const auto it = events_.find(event);
  if (it == events_.end()) return {GPUSHARE_INVALID_HANDLE, "not a live event of this device"};
  owned = std::move(it->second);
  events_.erase(it);
  return {};
}

base::Status Device::enqueue(Stream* stream, Op op) {
  const FaultTable::Verdict verdict = faults_.on_enqueue();
  if (verdict.device_lost) lost_.store(true, std::memory_order_release);
  GPUSHARE_RETURN_IF_ERROR(check_lost());
  if (verdict.launch_fails) return {GPUSHARE_UNKNOWN, "the enqueue fails: scripted fault"};
  if (verdict.slow_factor > 0) stream->slow_down(verdict.slow_factor);
  return stream->enqueue(std::move(op));
}

base::Status Device::enqueue_copy(Stream* stream, uint64_t destination, uint64_t source, uint64_t bytes,
                                  uint32_t kind) {
  GPUSHARE_RETURN_IF_ERROR(check_copy(destination, source, bytes, kind));
  Op op;
  op.kind = Op::Kind::kCopy;
  op.bytes = bytes;
  op.destination = reinterpret_cast<char*>(destination);
  op.source = reinterpret_cast<const char*>(source);
  if (kind != GPUSHARE_COPY_DEVICE_TO_HOST) {
    GPUSHARE_ASSIGN_OR_RETURN(op.destination, memory_->storage(destination, bytes, /*write=*/true, &op.file));
  }
  if (kind != GPUSHARE_COPY_HOST_TO_DEVICE) {
    GPUSHARE_ASSIGN_OR_RETURN(op.source, memory_->storage(source, bytes, /*write=*/false));
  }
  if (kind == GPUSHARE_COPY_HOST_TO_DEVICE) op.bus = &to_device_;
  if (kind == GPUSHARE_COPY_DEVICE_TO_HOST) op.bus = &to_host_;
  if (bytes == 0) return check_lost();
  return enqueue(stream, std::move(op));
}

base::Status Device::enqueue_fill(Stream* stream, gpushare_device_address address, uint8_t value,
                                  uint64_t bytes) {
  Op op;
  op.kind = Op::Kind::kFill;
  op.bytes = bytes;
  op.value = value;
  GPUSHARE_ASSIGN_OR_RETURN(op.destination, memory_->storage(address, bytes, /*write=*/true));
  if (bytes == 0) return check_lost();
  return enqueue(stream, std::move(op));
}

base::Status Device::enqueue_callback(Stream* stream, gpushare_host_function function, void* user_data) {
  Op op;
  op.kind = Op::Kind::kCallback;
  op.function = function;
  op.user_data = user_data;
  return enqueue(stream, std::move(op));
}

}  // namespace gpushare::device::host
