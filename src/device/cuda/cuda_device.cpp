// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/cuda_device.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "base/units.hpp"
#include "device/cuda/nvml.hpp"
#include "device/support/device_options.hpp"
#include "device/support/ops_guard.hpp"
#include "device/support/options.hpp"

namespace gpushare::device::cuda {
namespace {

struct DeviceOptions {
  std::string driver;
  uint64_t context = 0;
  WaitMode waits = WaitMode::kBlock;
  uint64_t spin_us = 50;
  MemoryOptions memory;
};

base::Status invalid(const std::string& what) {
  return {GPUSHARE_INVALID_ARGUMENT, "cuda: option " + what};
}

base::Result<DeviceOptions> read_options(const char* text) {
  DeviceOptions read;
  MemoryOptions& memory = read.memory;
  GPUSHARE_ASSIGN_OR_RETURN(Options options, Options::parse("cuda", text));
  GPUSHARE_ASSIGN_OR_RETURN(read.driver, options.get_string("driver", ""));
  GPUSHARE_ASSIGN_OR_RETURN(read.context, options.get_uint64("context", 0, 0, UINT64_MAX));
  GPUSHARE_ASSIGN_OR_RETURN(const std::string wait, options.get_string("wait", "block"));
  GPUSHARE_ASSIGN_OR_RETURN(read.spin_us, options.get_uint64("spin_us", read.spin_us, 0, 60'000'000));
  const bool has_fraction = options.has("fraction");
  const bool has_gib = options.has("total_gib");
  const bool has_bytes = options.has("total_bytes");
  GPUSHARE_ASSIGN_OR_RETURN(memory.fraction, options.get_double("fraction", 1.0, 0.001, 1.0));
  GPUSHARE_ASSIGN_OR_RETURN(const double gib, options.get_double("total_gib", 0, 0, 1 << 20));
  GPUSHARE_ASSIGN_OR_RETURN(memory.limit_bytes, options.get_bytes("total_bytes", 0, 0, 1ull << 50));
  GPUSHARE_ASSIGN_OR_RETURN(memory.granularity_bytes, options.get_bytes("granularity", 0, 0, 1ull << 40));
  GPUSHARE_ASSIGN_OR_RETURN(memory.pool_bytes,
                            options.get_bytes("pool_bytes", memory.pool_bytes, 0, 1ull << 40));
  GPUSHARE_ASSIGN_OR_RETURN(
      memory.pinned_chunk_bytes,
      options.get_bytes("pinned_chunk_bytes", memory.pinned_chunk_bytes, 64u << 10, 1ull << 30));
  GPUSHARE_RETURN_IF_ERROR(options.finish());
  if (!read.driver.empty() && read.driver.front() != '/') return invalid("driver is an absolute path");
  if (wait == "spin") {
    read.waits = WaitMode::kSpin;
  } else if (wait == "callback") {
    read.waits = WaitMode::kCallback;
  } else if (wait != "block") {
    return invalid("wait is block, spin or callback, not '" + wait + "'");
  }
  if (static_cast<int>(has_fraction) + static_cast<int>(has_gib) + static_cast<int>(has_bytes) > 1) {
    return invalid("fraction, total_gib and total_bytes are three ways to say the same: give one");
  }
  if (has_gib) memory.limit_bytes = static_cast<uint64_t>(gib * static_cast<double>(1ull << 30));
  if ((has_gib || has_bytes) && memory.limit_bytes == 0)
    return invalid("total_gib, total_bytes: a capacity of 0");
  return read;
}

// As gpushare_backend_device_info has it; 0 if the driver does not tell. A GPU is function 0 of its place on the bus.
uint32_t pci_address(const Driver& driver, api::CUdevice gpu) {
  const auto ask = [&](int attribute, uint32_t* out) {
    int value = 0;
    const bool known = driver.cuDeviceGetAttribute(&value, attribute, gpu) == api::CUDA_SUCCESS;
    *out = static_cast<uint32_t>(value);
    return known && value >= 0;
  };
  uint32_t domain = 0, bus = 0, device = 0;
  if (!ask(api::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, &domain) ||
      !ask(api::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, &bus) ||
      !ask(api::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, &device))
    return 0;
  return domain << 16 | bus << 8 | device << 3;
}

// The queues of the device that the driver gives a context; its streams share them. The driver reads the variable when it makes
// the context.
constexpr unsigned kMostQueues = 32;
unsigned hardware_queues() {
  constexpr unsigned kUsual = 8;
  const char* const text = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  const int set = text == nullptr ? 0 : std::atoi(text);
  return set <= 0 ? kUsual : std::min(static_cast<unsigned>(set), kMostQueues);
}

// While other threads take and return memory, a context cannot be measured; 20 ms in all.
constexpr int kMostLooks = 100;
constexpr std::chrono::microseconds kBetweenLooks{200};

}  // namespace

base::Result<std::unique_ptr<Device>> Device::open(uint32_t index, const char* text) {
  GPUSHARE_ASSIGN_OR_RETURN(const DeviceOptions options, read_options(text));
  GPUSHARE_ASSIGN_OR_RETURN(const Driver* driver, Driver::get(options.driver));
  GPUSHARE_ASSIGN_OR_RETURN(std::unique_ptr<Context> context, Context::open(*driver, index, options.context));
  GPUSHARE_ASSIGN_OR_RETURN(std::unique_ptr<Memory> memory, Memory::open(*context, options.memory));
  std::unique_ptr<Device> device(
      new Device(std::move(context), std::move(memory), options.waits, options.spin_us * 1000));
  GPUSHARE_RETURN_IF_ERROR(device->read_facts());
  return device;
}

Device::Device(std::unique_ptr<Context> context, std::unique_ptr<Memory> memory, WaitMode waits,
               uint64_t spin_ns)
    : context_(std::move(context)),
      memory_(std::move(memory)),
      waits_(waits),
      spin_ns_(spin_ns),
      events_(*context_, waits == WaitMode::kBlock),
      callback_waits_(*context_),
      partitions_(*context_) {}

base::Status Device::read_facts() {
  GPUSHARE_ENTER_CONTEXT(*context_);
  const Driver& driver = context_->driver();
  int least = 0;
  int greatest = 0;
  int units = 0;
  GPUSHARE_RETURN_IF_ERROR(context_->status(
      driver.cuDeviceGetName(facts_.name, sizeof(facts_.name), context_->device()), "cuDeviceGetName"));
  facts_.name[sizeof(facts_.name) - 1] = '\0';
  GPUSHARE_RETURN_IF_ERROR(
      context_->status(driver.cuCtxGetStreamPriorityRange(&least, &greatest), "cuCtxGetStreamPriorityRange"));
  GPUSHARE_RETURN_IF_ERROR(context_->status(
      driver.cuDeviceGetAttribute(&units, api::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, context_->device()),
      "cuDeviceGetAttribute"));
  facts_.pci_address = pci_address(driver, context_->device());
  facts_.priority_lowest = least;
  facts_.priority_highest = greatest;
  facts_.compute_units = static_cast<uint32_t>(std::max(units, 0));
  facts_.total_bytes = memory_->total_bytes();
  facts_.allocation_alignment_bytes = Memory::kAlignmentBytes;
  facts_.mapping_granularity_bytes = memory_->granularity_bytes();
  if (memory_->granularity_bytes() != 0) facts_.capabilities |= GPUSHARE_DEVICE_CAP_VIRTUAL_MEMORY;
  if (least != greatest) facts_.capabilities |= GPUSHARE_DEVICE_CAP_PRIORITIES;
  if (memory_->can_place_on_host()) facts_.capabilities |= GPUSHARE_DEVICE_CAP_HOST_PHYSICAL;
  if (memory_->can_share()) facts_.capabilities |= GPUSHARE_DEVICE_CAP_IPC;
  if (partitions_.supported()) facts_.capabilities |= GPUSHARE_DEVICE_CAP_PARTITIONS;
  return {};
}

base::Status Device::info(gpushare_backend_device_info* out_info) {
  gpushare_backend_device_info info = facts_;
  if (!context_->lost()) {
    GPUSHARE_ASSIGN_OR_RETURN(info.free_bytes, memory_->free_bytes());
  }
  write_device_info(info, out_info);
  return {};
}

base::Result<uint64_t> Device::context_bytes(uint32_t index, const char* text) {
  GPUSHARE_ASSIGN_OR_RETURN(const DeviceOptions options, read_options(text));
  GPUSHARE_ASSIGN_OR_RETURN(const Driver* driver, Driver::get(options.driver));
  api::CUdevice gpu = 0;
  GPUSHARE_RETURN_IF_ERROR(to_status(driver->cuDeviceGet(&gpu, static_cast<int>(index)), "cuDeviceGet"));
  for (int looks = 0; looks < kMostLooks; ++looks) {
    if (looks > 0) std::this_thread::sleep_for(kBetweenLooks);
    const Memory::QuietLook look;
    GPUSHARE_ASSIGN_OR_RETURN(const std::optional<uint64_t> own, Memory::bytes_of_all(*driver, gpu));
    unsigned flags = 0;
    int active = 1;
    if (!own.has_value() && options.context == 0 &&
        driver->cuDevicePrimaryCtxGetState(gpu, &flags, &active) == api::CUDA_SUCCESS && active == 0)
      return uint64_t{0};
    GPUSHARE_ASSIGN_OR_RETURN(const uint64_t all, process_bytes(driver->path(), pci_address(*driver, gpu)));
    if (look.was_quiet()) return all - std::min(all, own.value_or(0));
  }
  return base::Status(GPUSHARE_NOT_READY,
                      "other threads take and return memory of the device all the time: ask again");
}

uint64_t Device::now_ns() const {
  return base::host_now_ns();
}

base::Status Device::finish() {
  std::vector<Stream*> streams;
  {
    base::MutexLock lock(mutex_);
    for (const auto& [raw, stream] : streams_) streams.push_back(stream.get());
  }
  {
    ContextScope scope(*context_);
    if (scope.status().code() == GPUSHARE_INVALID_STATE) return scope.status();  // inside a host function
  }
  for (Stream* stream : streams) {
    base::Status status = stream->synchronize();
    if (status.code() == GPUSHARE_INVALID_STATE) return status;  // it captures a graph
  }
  return {};
}

base::Status Device::leaks() const {
  std::string held = memory_->leaks();
  base::MutexLock lock(mutex_);
  if (const size_t count = live_partitions_.size(); count > 0) {
    held += (held.empty() ? "" : ", ") + std::to_string(count) + " partition" + (count == 1 ? "" : "s");
  }
  return leak_report("cuda", streams_.size(), live_events_.size(), held);
}

Device::~Device() {
  std::vector<Stream*> streams;
  std::vector<Event*> events;
  std::vector<Partition*> partitions;
  {
    base::MutexLock lock(mutex_);
    for (const auto& [raw, stream] : streams_) streams.push_back(stream.get());
    for (const auto& [raw, event] : live_events_) events.push_back(event.get());
    for (const auto& [raw, partition] : live_partitions_) partitions.push_back(partition.get());
  }
  for (Stream* stream : streams) (void)destroy_stream(stream);
  for (Event* event : events) (void)destroy_event(event);
  for (Partition* partition : partitions) (void)destroy_partition(partition);
  ContextScope scope(*context_);
  if (!scope.status().ok()) return;
  events_.clear();
  callback_waits_.clear();
}

base::Result<Stream*> Device::create_stream(int32_t priority, Partition* partition) {
  GPUSHARE_ENTER_CONTEXT(*context_);
  if (priority < facts_.priority_highest || priority > facts_.priority_lowest) {
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("stream priority %d is outside [%d, %d] (highest, lowest)", priority,
                                     facts_.priority_highest, facts_.priority_lowest));
  }
  const Driver& driver = context_->driver();
  CaptureRelaxed relaxed(driver);
  api::CUstream handle = nullptr;
  // Non-blocking: a stream that waited for the legacy default stream would let any user of that stream stop
  // all lanes.
  if (partition == nullptr) {
    GPUSHARE_RETURN_IF_ERROR(
        context_->status(driver.cuStreamCreateWithPriority(&handle, api::CU_STREAM_NON_BLOCKING, priority),
                         "cuStreamCreateWithPriority"));
  } else {
    GPUSHARE_RETURN_IF_ERROR(context_->status(
        driver.cuGreenCtxStreamCreate(&handle, partition->handle(), api::CU_STREAM_NON_BLOCKING, priority),
        "cuGreenCtxStreamCreate"));
  }
  auto stream = std::make_unique<Stream>(*this, handle, partition);
  Stream* raw = stream.get();
  size_t count = 0;
  {
    base::MutexLock lock(mutex_);
    streams_[raw] = std::move(stream);
    count = streams_.size();
  }
  // Once a device: when its streams begin to share queues.
  const unsigned queues = hardware_queues();
  if (count > queues && !told_of_queues_.exchange(true)) {
    base::log(
        base::kWarning,
        base::format("cuda: %zu streams share the device's %u hardware queues, so that a lane that waits "
                     "may hold up others; set CUDA_DEVICE_MAX_CONNECTIONS (at most %u) before the "
                     "program's first use of CUDA, or use fewer lanes",
                     count, queues, kMostQueues));
  }
  return raw;
}

base::Result<Stream*> Device::adopt_stream(api::CUstream handle) {
  auto stream = std::make_unique<Stream>(*this, handle, nullptr, true);
  base::MutexLock lock(mutex_);
  Stream* raw = stream.get();
  streams_[raw] = std::move(stream);
  return raw;
}

base::Status Device::destroy_stream(Stream* stream) {
  {
    base::MutexLock lock(mutex_);
    if (!streams_.contains(stream)) return {GPUSHARE_INVALID_HANDLE, "not a live stream of this device"};
  }
  base::Status status;
  if (!context_->lost() && !stream->adopted()) {
    GPUSHARE_ENTER_CONTEXT(*context_);
    const Driver& driver = context_->driver();
    base::Status waited = stream->synchronize();
    if (waited.code() == GPUSHARE_INVALID_STATE) return waited;  // it captures a graph
    if (!context_->lost())
      status = context_->status(driver.cuStreamDestroy(stream->handle()), "cuStreamDestroy");
  }
  std::unique_ptr<Stream> owned;
  {
    base::MutexLock lock(mutex_);
    owned = std::move(streams_[stream]);
    streams_.erase(stream);
  }
  if ((context_->lost() || owned->adopted()) && owned->functions()->pending()) {
    // The driver does not say whether it still runs functions of a lost context, and an adopted stream goes on without
    // us. Therefore the objects that such functions use are kept for good.
    static auto* kept = new std::vector<std::shared_ptr<HostFunctions>>;
    static base::Mutex kept_mutex;
    base::MutexLock lock(kept_mutex);
    kept->push_back(owned->functions());
  }
  return status.code() == GPUSHARE_DEVICE_LOST ? base::Status() : status;
}

base::Result<Event*> Device::create_event(bool timing) {
  GPUSHARE_ENTER_CONTEXT(*context_);
  GPUSHARE_ASSIGN_OR_RETURN(const api::CUevent handle, events_.take(timing));
  auto event = std::make_unique<Event>(*this, handle, timing);
  base::MutexLock lock(mutex_);
  Event* raw = event.get();
  live_events_[raw] = std::move(event);
  return raw;
}

base::Status Device::destroy_event(Event* event) {
  std::unique_ptr<Event> owned;
  {
    base::MutexLock lock(mutex_);
    const auto it = live_events_.find(event);
    if (it == live_events_.end()) return {GPUSHARE_INVALID_HANDLE, "not a live event of this device"};
    owned = std::move(it->second);
    live_events_.erase(it);
  }
  ContextScope scope(*context_);
  // From a host function the event may still go back to the pool: that needs no driver call while the pool
  // has room.
  if (!context_->lost()) events_.put(owned->handle(), owned->timing());
  return {};
}

base::Result<Partition*> Device::create_partition(uint32_t compute_units) {
  GPUSHARE_ASSIGN_OR_RETURN(PartitionTable::Share share, partitions_.create(compute_units));
  auto partition =
      std::make_unique<Partition>(*this, share.handle, std::move(share.groups), share.compute_units);
  base::MutexLock lock(mutex_);
  Partition* raw = partition.get();
  live_partitions_[raw] = std::move(partition);
  return raw;
}

base::Status Device::destroy_partition(Partition* partition) {
  std::unique_ptr<Partition> owned;
  {
    base::MutexLock lock(mutex_);
    const auto it = live_partitions_.find(partition);
    if (it == live_partitions_.end()) return {GPUSHARE_INVALID_HANDLE, "not a live partition of this device"};
    const auto uses = [partition](const auto& entry) { return entry.second->partition() == partition; };
    const auto streams = std::count_if(streams_.begin(), streams_.end(), uses);
    if (streams > 0) {
      return {GPUSHARE_INVALID_STATE, base::format("the partition has %lld streams; destroy them first",
                                                   static_cast<long long>(streams))};
    }
    owned = std::move(it->second);
    live_partitions_.erase(it);
  }
  return partitions_.destroy(*owned);
}

base::Status Device::enqueue_copy(Stream* stream, uint64_t destination, uint64_t source, uint64_t bytes,
                                  uint32_t kind) {
  GPUSHARE_RETURN_IF_ERROR(check_copy(destination, source, bytes, kind));
  GPUSHARE_ENTER_CONTEXT(*context_);
  GPUSHARE_RETURN_IF_ERROR(stream->failure());
  if (bytes == 0) return {};
  if (kind != GPUSHARE_COPY_DEVICE_TO_HOST)
    GPUSHARE_RETURN_IF_ERROR(memory_->check_access("copy to", destination, bytes, true));
  if (kind != GPUSHARE_COPY_HOST_TO_DEVICE)
    GPUSHARE_RETURN_IF_ERROR(memory_->check_access("copy from", source, bytes, false));
  const Driver& driver = context_->driver();
  const api::CUstream handle = stream->handle();
  if (kind == GPUSHARE_COPY_HOST_TO_DEVICE) {
    return context_->status(
        driver.cuMemcpyHtoDAsync(destination, reinterpret_cast<const void*>(source), bytes, handle),
        "cuMemcpyHtoDAsync");
  }
  if (kind == GPUSHARE_COPY_DEVICE_TO_HOST) {
    return context_->status(
        driver.cuMemcpyDtoHAsync(reinterpret_cast<void*>(destination), source, bytes, handle),
        "cuMemcpyDtoHAsync");
  }
  return context_->status(driver.cuMemcpyDtoDAsync(destination, source, bytes, handle), "cuMemcpyDtoDAsync");
}

base::Status Device::enqueue_fill(Stream* stream, gpushare_device_address address, uint8_t value,
                                  uint64_t bytes) {
  GPUSHARE_ENTER_CONTEXT(*context_);
  GPUSHARE_RETURN_IF_ERROR(stream->failure());
  if (bytes == 0) return {};
  GPUSHARE_RETURN_IF_ERROR(memory_->check_access("fill of", address, bytes, true));
  return context_->status(context_->driver().cuMemsetD8Async(address, value, bytes, stream->handle()),
                          "cuMemsetD8Async");
}

base::Status Device::enqueue_callback(Stream* stream, gpushare_host_function function, void* user_data) {
  GPUSHARE_ENTER_CONTEXT(*context_);
  GPUSHARE_RETURN_IF_ERROR(stream->failure());
  if (function == nullptr) return {GPUSHARE_INVALID_ARGUMENT, "launch_host: the function is null"};
  // A graph may run it any number of times, also when this stream is gone: what we keep of a call lasts for one.
  GPUSHARE_RETURN_IF_ERROR(stream->check_capturing("launch_host"));
  return stream->functions()->launch(*context_, stream->handle(), function, user_data);
}

}  // namespace gpushare::device::cuda
