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
    : SoftwareDevice("host", std::move(memory)), to_device_(copy_gbps), to_host_(copy_gbps) {}

base::Status Device::finish() {
  std::vector<std::shared_ptr<Stream>> streams;
  {
    base::MutexLock lock(mutex_);
    streams = all_streams();
  }
  // All of them, before anything is torn down: their queues may wait for each other.
  for (const auto& stream : streams) GPUSHARE_RETURN_IF_ERROR(stream->stop());
  return {};
}

void Device::info(gpushare_backend_device_info* out_info) const {
  gpushare_backend_device_info info = common_info();
  info.capabilities = GPUSHARE_DEVICE_CAP_HOST_ADDRESSABLE | GPUSHARE_DEVICE_CAP_VIRTUAL_MEMORY |
                      GPUSHARE_DEVICE_CAP_FAULTS | GPUSHARE_DEVICE_CAP_IPC |
                      GPUSHARE_DEVICE_CAP_HOST_PHYSICAL;
  info.compute_units = std::max(1u, std::thread::hardware_concurrency());
  write_device_info(info, out_info);
}

uint64_t Device::now_ns() const {
  return base::host_now_ns();
}

base::Result<Stream*> Device::create_stream(int32_t /*priority: threads have none that we may raise*/) {
  auto stream = std::make_shared<Stream>(*this, lost_);
  base::MutexLock lock(mutex_);
  return keep_stream(std::move(stream));
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

base::Status Device::enqueue(Stream& stream, Op op) {
  const FaultTable::Verdict verdict = faults_.on_enqueue();
  if (verdict.device_lost) lost_.store(true, std::memory_order_release);
  GPUSHARE_RETURN_IF_ERROR(check_lost());
  if (verdict.launch_fails) return {GPUSHARE_UNKNOWN, "the enqueue fails: scripted fault"};
  if (verdict.slow_factor > 0) stream.slow_down(verdict.slow_factor);
  return stream.enqueue(std::move(op));
}

base::Status Device::enqueue_copy(Stream* stream, uint64_t destination, uint64_t source, uint64_t bytes,
                                  uint32_t kind) {
  Op op;
  op.kind = Op::Kind::kCopy;
  GPUSHARE_RETURN_IF_ERROR(locate_copy(destination, source, bytes, kind, op, &op.file,
                                       kind == GPUSHARE_COPY_DEVICE_TO_DEVICE ? &op.fresh : nullptr));
  if (kind == GPUSHARE_COPY_HOST_TO_DEVICE) op.bus = &to_device_;
  if (kind == GPUSHARE_COPY_DEVICE_TO_HOST) op.bus = &to_host_;
  return enqueue_bytes(stream, std::move(op));
}

}  // namespace gpushare::device::host
