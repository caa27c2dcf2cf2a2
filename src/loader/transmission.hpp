// transmission.hpp: sends an image to the device group by group, so that the first layers compute while later
// ones are on their way (PipeSwitch, section 4.2). Nothing waits on the host: each group has an event, which
// streams wait for.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/status.hpp"
#include "device/device.hpp"
#include "loader/grouping.hpp"
#include "loader/image.hpp"
#include "loader/profile.hpp"

namespace gpushare::loader {

// Called when the last byte of group `group` has arrived, with its layers [first, end), in stream order, from
// a thread of the device.
using GroupCallback = std::function<void(size_t group, uint32_t first, uint32_t end)>;

// The first layers of an image, on the device already.
struct Prefix {
  uint32_t layers = 0;
  // The place of a copy, laid out like the image; 0: the prefix lies in the block itself.
  device::Address copy = 0;
};

// One image, or the first layers of one, on its way to one device block. Owns the events; holds the image until the last copy has
// finished. The stream and the device block must live until then (destruction waits for it). make_usable and
// the waits may be called from any thread.
class Transmission {
 public:
  // Enqueues all copies on `stream` (best a stream of its own) and returns. The block at `base` has room for
  // image->bytes() and is laid out like the image; `ends` are group ends (loader::plan_groups). A prefix that is in
  // the block already has no groups. A prefix elsewhere on the device is copied from there, as parts of the groups,
  // and must stay until they have arrived. Group events are created with timing, so that arrived_ns
  // can tell when. Errors: INVALID_ARGUMENT (ends that are no grouping), the device's.
  static base::Result<std::unique_ptr<Transmission>> start(device::Device& device,
                                                           const device::Stream& stream,
                                                           std::shared_ptr<const Image> image,
                                                           device::Address base, std::vector<uint32_t> ends,
                                                           Prefix prefix = {},
                                                           const GroupCallback& on_group = {});
  // Sends only the first `layers`, as one group, to a block with room for them.
  static base::Result<std::unique_ptr<Transmission>> start_prefix(device::Device& device,
                                                                  const device::Stream& stream,
                                                                  std::shared_ptr<const Image> image,
                                                                  device::Address base, uint32_t layers);
  ~Transmission();
  Transmission(const Transmission&) = delete;
  Transmission& operator=(const Transmission&) = delete;

  // Work enqueued on `stream` from now on finds layers [first, end) on the device. One event wait at most:
  // groups arrive in order. No host wait. Errors: INVALID_ARGUMENT (no such layers).
  base::Status make_usable(uint32_t first, uint32_t end, const device::Stream& stream) const;
  // Blocks until layer `layer` has arrived; all of them with the last one.
  base::Status wait(uint32_t layer) const;
  // True when layer `layer` has arrived. Does not block.
  base::Result<bool> arrived(uint32_t layer) const;

  device::Address address(uint32_t layer) const { return base_ + image_->layers()[layer].offset_bytes; }
  const Image& image() const { return *image_; }
  const std::shared_ptr<const Image>& shared_image() const { return image_; }
  size_t groups() const { return ends_.size(); }
  uint32_t last_layer() const { return ends_.empty() ? resident_ - 1 : ends_.back() - 1; }
  uint64_t copies() const { return copies_; }            // calls that it took
  uint64_t sent_bytes() const { return sent_bytes_; }    // over the link
  uint64_t copied_bytes() const { return copy_bytes_; }  // from elsewhere on the device
  // Device time from the start of the first copy to the arrival of group `group`. NOT_READY before.
  base::Result<uint64_t> arrived_ns(size_t group) const;
  std::span<const uint32_t> group_ends() const { return ends_; }
  // Keeps `event` until the last copy has finished.
  void hold(device::Event event) { held_ = std::move(event); }
  // The group that brings `layer`; groups() for a resident one. Errors: INVALID_ARGUMENT (no such layer).
  base::Result<size_t> group_of(uint32_t layer) const;

 private:
  struct Notice;
  Transmission(std::shared_ptr<const Image> image, device::Address base, std::vector<uint32_t> ends,
               Prefix prefix);
  base::Status enqueue(device::Device& device, const device::Stream& stream, const GroupCallback& on_group);
  base::Status enqueue_groups(const device::Stream& stream, const GroupCallback& on_group);
  base::Status enqueue_group(const device::Stream& stream, size_t group, uint32_t first,
                             const GroupCallback& on_group);
  base::Status copy(const device::Stream& stream, uint64_t begin, uint64_t end);

  std::shared_ptr<const Image> image_;
  device::Address base_;
  std::vector<uint32_t> ends_;
  uint32_t resident_;        // layers without a group
  device::Address copy_;     // of the prefix, elsewhere on the device
  uint64_t copy_bytes_ = 0;  // of it
  uint64_t copies_ = 0;
  uint64_t sent_bytes_ = 0;
  device::Event held_;
  device::Event started_;
  std::vector<device::Event> events_;
  std::vector<std::unique_ptr<Notice>> notices_;
};

// Measures what copies and launches cost with `repeats` copies of small and large blocks (32 MiB of device
// memory, freed again), medians. Takes tens of milliseconds. Errors: the device's.
inline constexpr uint32_t kCalibrationRounds = 9;
base::Result<LinkCosts> calibrate(device::Device& device, uint32_t repeats = kCalibrationRounds);
// The same on the `bytes` bytes at `scratch`, which it overwrites; 1 MiB or more. Work already on `before` (may be null)
// comes first, because it may still use the bytes. All copies are done when it returns, whatever it returns. `host`: pinned
// memory to copy from.
base::Result<LinkCosts> calibrate_on(device::Device& device, device::Address scratch, uint64_t bytes,
                                     std::span<char> host, uint32_t repeats = kCalibrationRounds,
                                     const device::Stream* before = nullptr);

// Fills transmit_ms of `layers` from the costs.
std::vector<LayerCost> layer_costs(const Image& image, const LinkCosts& link,
                                   std::span<const double> execution_ms);

}  // namespace gpushare::loader
