// SPDX-License-Identifier: Apache-2.0
#include "loader/transmission.hpp"

#include <algorithm>

namespace gpushare::loader {

// The data that launch_host passes to the device's thread.
struct Transmission::Notice {
  GroupCallback call;
  size_t group;
  uint32_t first;
  uint32_t end;
};

Transmission::Transmission(std::shared_ptr<const Image> image, device::Address base,
                           std::vector<uint32_t> ends, Prefix prefix)
    : image_(std::move(image)),
      base_(base),
      ends_(std::move(ends)),
      resident_(prefix.copy == 0 ? prefix.layers : 0),
      copy_(prefix.copy),
      copy_bytes_(prefix.copy == 0 || prefix.layers == 0 ? 0 : image_->end_of(prefix.layers - 1)) {}

base::Result<std::unique_ptr<Transmission>> Transmission::start(
    device::Device& device, const device::Stream& stream, std::shared_ptr<const Image> image,
    device::Address base, std::vector<uint32_t> ends, Prefix prefix, const GroupCallback& on_group) {
  if (image == nullptr) return base::Status(GPUSHARE_INVALID_ARGUMENT, "image is null");
  const size_t layers = image->layers().size();
  if (prefix.layers > layers)
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("a prefix of %u layers; the image has %zu", prefix.layers, layers));
  uint32_t begin = prefix.copy == 0 ? prefix.layers : 0;
  for (const uint32_t end : ends) {
    if (end <= begin || end > layers)
      return base::Status(
          GPUSHARE_INVALID_ARGUMENT,
          base::format("group ends must ascend from %u to %zu; %u does not", begin, layers, end));
    begin = end;
  }
  if (begin != layers)
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("the last group ends at layer %u of %zu", begin, layers));
  std::unique_ptr<Transmission> out(new Transmission(std::move(image), base, std::move(ends), prefix));
  GPUSHARE_RETURN_IF_ERROR(out->enqueue(device, stream, on_group));
  return out;
}

base::Result<std::unique_ptr<Transmission>> Transmission::start_prefix(device::Device& device,
                                                                       const device::Stream& stream,
                                                                       std::shared_ptr<const Image> image,
                                                                       device::Address base,
                                                                       uint32_t layers) {
  if (image == nullptr || layers == 0 || layers > image->layers().size())
    return base::Status(GPUSHARE_INVALID_ARGUMENT, base::format("a prefix of %u layers is none", layers));
  std::unique_ptr<Transmission> out(new Transmission(std::move(image), base, {layers}, {}));
  GPUSHARE_RETURN_IF_ERROR(out->enqueue(device, stream, {}));
  return out;
}

base::Status Transmission::enqueue(device::Device& device, const device::Stream& stream,
                                   const GroupCallback& on_group) {
  GPUSHARE_ASSIGN_OR_RETURN(started_, device.create_event(GPUSHARE_EVENT_TIMING));
  for (size_t group = 0; group < ends_.size(); ++group) {
    GPUSHARE_ASSIGN_OR_RETURN(device::Event event, device.create_event(GPUSHARE_EVENT_TIMING));
    events_.push_back(std::move(event));
  }
  GPUSHARE_RETURN_IF_ERROR(stream.record(started_));
  // Copies that did go out read the image: they must be done before it may go, and no event covers them.
  struct WaitUnlessAll {
    ~WaitUnlessAll() {
      if (all) return;
      (void)stream.synchronize();
      events.clear();
    }
    const device::Stream& stream;
    std::vector<device::Event>& events;
    bool all = false;
  } waits{stream, events_};
  base::Status status = enqueue_groups(stream, on_group);
  waits.all = status.ok();
  return status;
}

base::Status Transmission::enqueue_groups(const device::Stream& stream, const GroupCallback& on_group) {
  uint32_t first = resident_;
  for (size_t group = 0; group < ends_.size(); ++group) {
    base::Status sent = enqueue_group(stream, group, first, on_group);
    if (!sent.ok())
      return sent.with_context(base::format("group %zu of image '%s'", group, image_->name().c_str()));
    first = ends_[group];
  }
  return {};
}

base::Status Transmission::enqueue_group(const device::Stream& stream, size_t group, uint32_t first,
                                         const GroupCallback& on_group) {
  GPUSHARE_RETURN_IF_ERROR(copy(stream, image_->begin_of(first), image_->end_of(ends_[group] - 1)));
  if (on_group) {
    notices_.push_back(std::make_unique<Notice>(Notice{on_group, group, first, ends_[group]}));
    GPUSHARE_RETURN_IF_ERROR(stream.launch_host(
        [](void* user_data) {
          const auto* notice = static_cast<const Notice*>(user_data);
          notice->call(notice->group, notice->first, notice->end);
        },
        notices_.back().get()));
  }
  return stream.record(events_[group]);
}

// Bytes [begin, end) of the image: what the prefix has from the device, the rest over the link.
base::Status Transmission::copy(const device::Stream& stream, uint64_t begin, uint64_t end) {
  if (begin < copy_bytes_) {
    const uint64_t until = std::min(end, copy_bytes_);
    if (until > begin)
      GPUSHARE_RETURN_IF_ERROR(
          stream.copy(base_ + begin, copy_ + begin, until - begin, GPUSHARE_COPY_DEVICE_TO_DEVICE));
    begin = until;
  }
  if (begin >= end) return {};
  for (const Image::Piece& piece : image_->pieces(begin, end - begin)) {
    GPUSHARE_RETURN_IF_ERROR(stream.copy(base_ + piece.offset_bytes, reinterpret_cast<uintptr_t>(piece.host),
                                         piece.bytes, GPUSHARE_COPY_HOST_TO_DEVICE));
    ++copies_;
    sent_bytes_ += piece.bytes;
  }
  return {};
}

Transmission::~Transmission() {
  // Copies read the image's chunks: they must be done before it may go. In order on one stream, so the last
  // covers all.
  for (const device::Event& event : events_) (void)event.synchronize();
}

base::Result<size_t> Transmission::group_of(uint32_t layer) const {
  if (layer >= image_->layers().size())
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("layer is %u, image '%s' has %zu", layer, image_->name().c_str(),
                                     image_->layers().size()));
  if (!ends_.empty() && layer >= ends_.back())
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("layer is %u; the first %u of image '%s' are sent", layer, ends_.back(),
                                     image_->name().c_str()));
  return static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), layer) - ends_.begin());
}

base::Status Transmission::make_usable(uint32_t first, uint32_t end, const device::Stream& stream) const {
  if (first >= end) return {GPUSHARE_INVALID_ARGUMENT, base::format("layers [%u, %u) are none", first, end)};
  GPUSHARE_ASSIGN_OR_RETURN(const size_t group, group_of(end - 1));
  if (end <= resident_) return {};
  return stream.wait(events_[group]);
}

base::Status Transmission::wait(uint32_t layer) const {
  GPUSHARE_ASSIGN_OR_RETURN(const size_t group, group_of(layer));
  if (layer < resident_) return {};
  return events_[group].synchronize();
}

base::Result<bool> Transmission::arrived(uint32_t layer) const {
  GPUSHARE_ASSIGN_OR_RETURN(const size_t group, group_of(layer));
  if (layer < resident_) return true;
  const base::Status status = events_[group].query();
  if (status.code() == GPUSHARE_NOT_READY) return false;
  if (!status.ok()) return status;
  return true;
}

base::Result<uint64_t> Transmission::arrived_ns(size_t group) const {
  if (group >= ends_.size())
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("group is %zu, there are %zu", group, ends_.size()));
  return events_[group].elapsed_since(started_);
}

namespace {

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

// Device memory and host memory of the calibration, given back on every path.
struct Scratch {
  explicit Scratch(device::Device& of) : device(of) {}
  ~Scratch() {
    if (address != 0) (void)device.free(address);
    if (host != nullptr) (void)device.host_free(host);
  }
  device::Device& device;
  device::Address address = 0;
  void* host = nullptr;
};

}  // namespace

base::Result<LinkCosts> calibrate(device::Device& device, uint32_t repeats) {
  constexpr uint64_t kBytes = 32ull << 20;
  Scratch scratch(device);
  GPUSHARE_ASSIGN_OR_RETURN(scratch.address, device.alloc(kBytes));
  GPUSHARE_ASSIGN_OR_RETURN(scratch.host, device.host_alloc(kBytes));
  return calibrate_on(device, scratch.address, kBytes, {static_cast<char*>(scratch.host), kBytes}, repeats);
}

base::Result<LinkCosts> calibrate_on(device::Device& device, device::Address target, uint64_t bytes,
                                     std::span<char> pinned, uint32_t repeats, const device::Stream* before) {
  constexpr uint64_t kSmall = 4096;
  constexpr int kCalls = 16;
  if (repeats == 0 || repeats > 1000)
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("repeats is %u, allowed are 1 to 1000", repeats));
  if (bytes < (1u << 20))
    return base::Status(GPUSHARE_INVALID_ARGUMENT, "a calibration needs at least 1 MiB");
  // Copied in pieces as large as the pinned memory, as images are from their chunks.
  const uint64_t large_bytes = std::min<uint64_t>(bytes, 32ull << 20);
  const uint64_t piece_bytes = std::min<uint64_t>(pinned.size(), large_bytes);
  const int pieces = static_cast<int>(large_bytes / piece_bytes);
  GPUSHARE_ASSIGN_OR_RETURN(const device::Stream copies, device.create_stream());
  GPUSHARE_ASSIGN_OR_RETURN(const device::Stream lane, device.create_stream());
  GPUSHARE_ASSIGN_OR_RETURN(const device::Event begin, device.create_event(GPUSHARE_EVENT_TIMING));
  GPUSHARE_ASSIGN_OR_RETURN(const device::Event end, device.create_event(GPUSHARE_EVENT_TIMING));
  const auto host = reinterpret_cast<uintptr_t>(pinned.data());
  const uint64_t half_bytes = large_bytes / 2;
  if (before != nullptr) {
    GPUSHARE_RETURN_IF_ERROR(before->record(begin));
    GPUSHARE_RETURN_IF_ERROR(copies.wait(begin));
    GPUSHARE_RETURN_IF_ERROR(lane.wait(begin));
  }
  // After a failure too: copies enqueued before it still use the bytes.
  const struct Finish {
    ~Finish() {
      (void)copies.synchronize();
      (void)lane.synchronize();
    }
    const device::Stream &copies, &lane;
  } finish{copies, lane};

  // Times `calls` copies of `size` bytes on the device's clock.
  const auto time_copies = [&](uint64_t size, int calls) -> base::Result<double> {
    GPUSHARE_RETURN_IF_ERROR(copies.record(begin));
    for (int i = 0; i < calls; ++i)
      GPUSHARE_RETURN_IF_ERROR(copies.copy(target, host, size, GPUSHARE_COPY_HOST_TO_DEVICE));
    GPUSHARE_RETURN_IF_ERROR(copies.record(end));
    GPUSHARE_RETURN_IF_ERROR(end.synchronize());
    GPUSHARE_ASSIGN_OR_RETURN(const uint64_t ns, end.elapsed_since(begin));
    return static_cast<double>(ns) / 1e6 / calls;
  };
  const auto time_device_copy = [&]() -> base::Result<double> {
    GPUSHARE_RETURN_IF_ERROR(copies.record(begin));
    GPUSHARE_RETURN_IF_ERROR(
        copies.copy(target + half_bytes, target, half_bytes, GPUSHARE_COPY_DEVICE_TO_DEVICE));
    GPUSHARE_RETURN_IF_ERROR(copies.record(end));
    GPUSHARE_RETURN_IF_ERROR(end.synchronize());
    GPUSHARE_ASSIGN_OR_RETURN(const uint64_t ns, end.elapsed_since(begin));
    return static_cast<double>(ns) / 1e6;
  };
  std::vector<double> small, large, within, launches;
  for (uint32_t i = 0; i <= repeats; ++i) {
    GPUSHARE_ASSIGN_OR_RETURN(const double small_ms, time_copies(kSmall, kCalls));
    GPUSHARE_ASSIGN_OR_RETURN(const double large_ms, time_copies(piece_bytes, pieces));
    GPUSHARE_ASSIGN_OR_RETURN(const double within_ms, time_device_copy());
    // A group's own cost on the lane: wait for an event, launch one thing.
    GPUSHARE_RETURN_IF_ERROR(lane.record(begin));
    for (int k = 0; k < kCalls; ++k) {
      GPUSHARE_RETURN_IF_ERROR(lane.wait(end));
      GPUSHARE_RETURN_IF_ERROR(
          lane.fill(target, 0, kSmall));  // a host function costs a GPU many times a kernel
    }
    GPUSHARE_RETURN_IF_ERROR(lane.record(end));
    GPUSHARE_RETURN_IF_ERROR(end.synchronize());
    GPUSHARE_ASSIGN_OR_RETURN(const uint64_t launch_ns, end.elapsed_since(begin));
    if (i == 0) continue;  // the first round touches the memory and starts the streams' threads
    small.push_back(small_ms);
    large.push_back(large_ms);
    within.push_back(within_ms);
    launches.push_back(static_cast<double>(launch_ns) / 1e6 / kCalls);
  }
  LinkCosts costs;
  const double large_ms = median(large), small_ms = median(small);
  const double slope = std::max(large_ms - small_ms, 1e-6) / static_cast<double>(piece_bytes - kSmall);
  costs.bytes_per_ms = 1.0 / slope;
  costs.call_overhead_ms = std::max(0.0, small_ms - slope * static_cast<double>(kSmall));
  costs.group_overhead_ms = median(launches);
  costs.device_bytes_per_ms = static_cast<double>(half_bytes) / std::max(1e-6, median(within));
  return costs;
}

std::vector<LayerCost> layer_costs(const Image& image, const LinkCosts& link,
                                   std::span<const double> execution_ms) {
  std::vector<LayerCost> out;
  for (size_t i = 0; i < image.layers().size(); ++i) {
    const uint64_t bytes = image.layers()[i].bytes;
    out.push_back({bytes, link.bytes_per_ms > 0 ? static_cast<double>(bytes) / link.bytes_per_ms : 0.0,
                   i < execution_ms.size() ? execution_ms[i] : 0.0});
  }
  return out;
}

}  // namespace gpushare::loader
