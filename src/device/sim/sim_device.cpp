// SPDX-License-Identifier: Apache-2.0
#include "device/sim/sim_device.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/saturate.hpp"
#include "device/support/device_options.hpp"
#include "device/support/ops_guard.hpp"
#include "device/support/options.hpp"

namespace gpushare::device::sim {
namespace {

constexpr int32_t kPriorityLowest = 0;
constexpr int32_t kPriorityHighest = -5;
// 2^53: durations are computed with in double, and stay exact.
constexpr uint64_t kLongestWorkNs = 1ull << 53;

}  // namespace

base::Result<std::unique_ptr<Device>> Device::open(const char* text) {
  GPUSHARE_ASSIGN_OR_RETURN(Options options, Options::parse("sim", text));
  AddressSpaceOptions space;
  space.backend = "sim";
  space.imaginary = true;
  GPUSHARE_RETURN_IF_ERROR(read_memory_options(options, /*default_total_bytes=*/16ull << 30, &space));
  GPUSHARE_ASSIGN_OR_RETURN(space.keep_data, options.get_bool("data", true));
  Costs costs;
  // 10^9 bytes a second are a byte a nanosecond.
  GPUSHARE_ASSIGN_OR_RETURN(costs.copy_bytes_per_ns, options.get_double("copy_gbps", 12, 1e-3, 1e6));
  GPUSHARE_ASSIGN_OR_RETURN(costs.memory_bytes_per_ns, options.get_double("memory_gbps", 700, 1e-3, 1e6));
  GPUSHARE_ASSIGN_OR_RETURN(costs.copy_latency_ns,
                            options.get_uint64("copy_latency_ns", 10'000, 0, 1'000'000'000));
  GPUSHARE_ASSIGN_OR_RETURN(costs.jitter, options.get_double("jitter", 0, 0, 0.99));
  GPUSHARE_ASSIGN_OR_RETURN(costs.polls, options.get_uint64("polls", 16, 1, 1'000'000));
  GPUSHARE_ASSIGN_OR_RETURN(const uint64_t seed, options.get_uint64("seed", 1, 0, UINT64_MAX));
  GPUSHARE_ASSIGN_OR_RETURN(const std::string mode, options.get_string("contention", "share"));
  GPUSHARE_ASSIGN_OR_RETURN(const double overhead, options.get_double("overhead", 0, 0, 10));
  GPUSHARE_ASSIGN_OR_RETURN(const std::string pairs, options.get_string("pairs", ""));
  GPUSHARE_RETURN_IF_ERROR(options.finish());
  GPUSHARE_ASSIGN_OR_RETURN(ContentionModel contention, ContentionModel::create(mode, overhead, pairs));
  GPUSHARE_ASSIGN_OR_RETURN(std::unique_ptr<AddressSpace> memory, AddressSpace::create(space));
  return std::unique_ptr<Device>(new Device(std::move(memory), costs, std::move(contention), seed));
}

Device::Device(std::unique_ptr<AddressSpace> memory, const Costs& costs, ContentionModel contention,
               uint64_t seed)
    : SoftwareDevice("sim", std::move(memory)),
      costs_(costs),
      contention_(std::move(contention)),
      random_(seed) {}

base::Status Device::finish() {
  if (inside_callback())
    return {GPUSHARE_INVALID_STATE, "a host function may not close the device that it runs on"};
  base::RoleLock lock(mutex_, has_device);
  for (const auto& stream : all_streams()) GPUSHARE_RETURN_IF_ERROR(wait_passed(*stream, stream->enqueued_));
  return {};
}

void Device::info(gpushare_backend_device_info* out_info) const {
  gpushare_backend_device_info info = common_info();
  info.capabilities = GPUSHARE_DEVICE_CAP_VIRTUAL_MEMORY | GPUSHARE_DEVICE_CAP_PRIORITIES |
                      GPUSHARE_DEVICE_CAP_VIRTUAL_TIME | GPUSHARE_DEVICE_CAP_MODELED_WORK |
                      GPUSHARE_DEVICE_CAP_FAULTS | GPUSHARE_DEVICE_CAP_HOST_PHYSICAL;
  info.priority_lowest = kPriorityLowest;
  info.priority_highest = kPriorityHighest;
  info.compute_units = 1;
  write_device_info(info, out_info);
}

uint64_t Device::now_ns() const {
  base::RoleLock lock(mutex_, has_device);
  return now_ns_;
}

base::Status Device::unless_lost(const base::Status& status) const {
  return lost_.load(std::memory_order_relaxed) ? device_lost(backend_) : status;
}

base::Result<Stream*> Device::create_stream(int32_t priority) {
  if (priority < kPriorityHighest || priority > kPriorityLowest) {
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("stream priority %d; allowed is %d (most urgent) to %d", priority,
                                     kPriorityHighest, kPriorityLowest));
  }
  base::RoleLock lock(mutex_, has_device);
  make_room(streams_.size() + 1);
  return keep_stream(std::make_shared<Stream>(*this, next_stream_id_++, priority));
}

base::Status Device::destroy_stream(Stream* stream) {
  if (inside_callback_of(*stream)) {
    return {GPUSHARE_INVALID_STATE, "a host function may not destroy the stream that it runs on"};
  }
  base::RoleLock lock(mutex_, has_device);
  GPUSHARE_RETURN_IF_ERROR(wait_passed(*stream, stream->enqueued_));
  streams_.erase(stream);
  return {};
}

base::Status Device::enqueue(Stream& stream, Op op) {
  const FaultTable::Verdict verdict = faults_.on_enqueue();
  base::RoleLock lock(mutex_, has_device);
  if (verdict.device_lost && !lost_) lose();
  GPUSHARE_RETURN_IF_ERROR(check_lost());
  if (verdict.launch_fails) return {GPUSHARE_UNKNOWN, "the enqueue fails: scripted fault"};
  if (verdict.slow_factor > 0) stream.slow_factor_ = verdict.slow_factor;
  if (!stream.error_.ok()) return stream.error_;
  if (op.kind == Op::Kind::kFill) op.duration_ns = memory_ns(op.bytes);
  double factor = stream.slow_factor_;
  if (op.kind == Op::Kind::kWork && costs_.jitter > 0) {
    factor *= std::uniform_real_distribution<double>(1 - costs_.jitter, 1 + costs_.jitter)(random_);
  }
  if (factor != 1) op.duration_ns = base::to_uint64(std::round(static_cast<double>(op.duration_ns) * factor));
  push(stream, std::move(op));
  return {};
}

uint64_t Device::memory_ns(uint64_t bytes_moved) const {
  return static_cast<uint64_t>(std::llround(static_cast<double>(bytes_moved) / costs_.memory_bytes_per_ns));
}

base::Status Device::enqueue_copy(Stream* stream, uint64_t destination, uint64_t source, uint64_t bytes,
                                  uint32_t kind) {
  Op op;
  GPUSHARE_RETURN_IF_ERROR(locate_copy(destination, source, bytes, kind, op));
  if (op.source == nullptr) op.destination = nullptr;  // data are not kept
  if (kind == GPUSHARE_COPY_DEVICE_TO_DEVICE) {
    op.kind = Op::Kind::kCopyWithin;
    op.duration_ns = memory_ns(2 * bytes);
  } else {
    op.kind = Op::Kind::kBusCopy;
    op.bus = kind;  // 0 = to the device, 1 = to the host
    op.duration_ns =
        costs_.copy_latency_ns +
        static_cast<uint64_t>(std::llround(static_cast<double>(bytes) / costs_.copy_bytes_per_ns));
  }
  return enqueue_bytes(stream, std::move(op));
}

base::Status Device::enqueue_work(Stream* stream, const gpushare_backend_work* work) {
  if (work == nullptr || work->struct_size < sizeof(gpushare_backend_work)) {
    return {GPUSHARE_INVALID_ARGUMENT, "the work is null or its struct_size is too small"};
  }
  if (!(work->demand > 0 && work->demand <= 1)) {
    return {GPUSHARE_INVALID_ARGUMENT, base::format("the work's demand is %g; allowed is above 0, at most 1",
                                                    static_cast<double>(work->demand))};
  }
  if (work->duration_ns > kLongestWorkNs) {
    return {GPUSHARE_INVALID_ARGUMENT,
            base::format("the work's duration is %llu ns; at most 2^53 (104 days) is allowed",
                         static_cast<unsigned long long>(work->duration_ns))};
  }
  Op op;
  op.kind = Op::Kind::kWork;
  op.duration_ns = work->duration_ns;
  op.load = {work->work_class, work->demand, stream->priority_};
  return enqueue(*stream, std::move(op));
}

base::Status Stream::failure_at(uint64_t sequence) const {
  return failed_sequence_ != 0 && failed_sequence_ < sequence ? error_ : base::Status();
}

base::Status Stream::query() {
  base::RoleLock lock(device_.mutex_, has_device);
  if (!idle() && (!device_.poll() || !idle())) return not_ready();
  return device_.unless_lost(error_);
}

base::Status Stream::synchronize() {
  if (Device::inside_callback_of(*this)) {
    return {GPUSHARE_INVALID_STATE, "a host function may not wait for the stream that it runs on"};
  }
  base::RoleLock lock(device_.mutex_, has_device);
  GPUSHARE_RETURN_IF_ERROR(device_.wait_passed(*this, enqueued_));
  return device_.unless_lost(error_);
}

base::Status Event::record(Stream& stream) {
  base::RoleLock lock(device_.mutex_, has_device);
  GPUSHARE_RETURN_IF_ERROR(device_.check_lost());
  if (!stream.error_.ok()) return stream.error_;
  if (stream.idle()) {
    time_ns_ = device_.now_ns_;
  } else {
    Op op;
    op.kind = Op::Kind::kRecord;
    op.event = shared_from_this();
    op.sequence = records_ + 1;
    device_.push(stream, std::move(op));  // behind what runs: not done yet
  }
  ++records_;
  if (stream_.get() != &stream) stream_ = stream.shared_from_this();
  sequence_ = stream.enqueued_;
  return {};
}

base::Status Event::query() {
  base::RoleLock lock(device_.mutex_, has_device);
  if (stream_ == nullptr) return {};
  if (!stream_->passed(sequence_) && (!device_.poll() || !stream_->passed(sequence_))) return not_ready();
  return device_.unless_lost(stream_->failure_at(sequence_));
}

base::Status Event::synchronize() {
  base::RoleLock lock(device_.mutex_, has_device);
  GPUSHARE_RETURN_IF_ERROR(device_.check_lost());
  if (stream_ == nullptr) return {};
  const std::shared_ptr<Stream> stream = stream_;
  const uint64_t sequence = sequence_;
  GPUSHARE_RETURN_IF_ERROR(device_.wait_passed(*stream, sequence));
  return device_.unless_lost(stream->failure_at(sequence));
}

base::Status Event::make_wait(Stream& stream) {
  base::RoleLock lock(device_.mutex_, has_device);
  if (stream_ == nullptr || stream_.get() == &stream || stream_->passed(sequence_)) return {};
  if (!stream.error_.ok()) return stream.error_;
  Op op;
  op.kind = Op::Kind::kWait;
  op.stream = stream_;
  op.sequence = sequence_;
  device_.push(stream, std::move(op));
  return {};
}

base::Result<uint64_t> Event::passed_time() const {
  if (!timing_)
    return base::Status(GPUSHARE_INVALID_STATE, "the event was created without GPUSHARE_EVENT_TIMING");
  if (stream_ == nullptr) return base::Status(GPUSHARE_INVALID_STATE, "the event was never recorded");
  if (!stream_->passed(sequence_)) return not_ready();
  GPUSHARE_RETURN_IF_ERROR(stream_->failure_at(sequence_));
  return time_ns_;
}

base::Result<uint64_t> Event::elapsed(Event& start, Event& end) {
  base::RoleLock lock(start.device_.mutex_, has_device);
  if (&start.device_ != &end.device_) {
    return base::Status(GPUSHARE_INVALID_ARGUMENT, "the events belong to different devices");
  }
  GPUSHARE_RETURN_IF_ERROR(start.device_.check_lost());
  GPUSHARE_ASSIGN_OR_RETURN(const uint64_t start_ns, start.passed_time());
  GPUSHARE_ASSIGN_OR_RETURN(const uint64_t end_ns, end.passed_time());
  if (end_ns < start_ns)
    return base::Status(GPUSHARE_INVALID_STATE, "the end event passed before the start event");
  return end_ns - start_ns;
}

}  // namespace gpushare::device::sim
