// shared_image.hpp: an image that several processes read, and its region: the device memory that holds it while
// sessions use it. The service's thread makes, fills, shares and drops the region; layers arrive on a thread of the
// device.
//
// Each load makes a region of its own, which no other image ever uses. Therefore a process that still has an old region
// mapped sees the layers of its own image and nothing else. A region may have two parts, so that the first layers can
// stay when the rest goes (the prefix): the next load then sends the rest alone.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.hpp"
#include "base/status.hpp"
#include "client/board.hpp"
#include "client/channel.hpp"
#include "device/device.hpp"
#include "loader/image.hpp"
#include "loader/prefix.hpp"
#include "loader/transmission.hpp"

namespace gpushare::daemon {

class SharedImage {
 public:
  // kFailed: the load failed; the memory is still there until drop().
  enum class State : uint8_t { kOff, kLoading, kResident, kFailed };

  // The device and the stream must outlive it.
  SharedImage(device::Device& device, const device::Stream& stream,
              std::shared_ptr<const loader::Image> image, uint64_t id);
  ~SharedImage();  // drops
  SharedImage(const SharedImage&) = delete;
  SharedImage& operator=(const SharedImage&) = delete;

  uint64_t id() const { return id_; }
  const std::string& path() const { return source_->name(); }
  const std::shared_ptr<const loader::Image>& source() const { return source_; }
  uint64_t region_bytes() const { return region_bytes_; }
  State state() const { return state_; }
  uint32_t arrived() const;
  uint64_t loads() const { return loads_; }

  // Sets the first layers that may stay. Only in kOff; kept layers of another prefix are dropped.
  void set_prefix(loader::PrefixChoice prefix);
  const loader::PrefixChoice& prefix() const { return prefix_; }
  // The bytes that are on the device in kOff, and the layers in them.
  uint64_t kept_bytes() const { return state_ == State::kOff ? parts_[0].kept_bytes : 0; }
  uint32_t kept_layers() const { return kept_bytes() > 0 ? prefix_.layers : 0; }
  void forget_prefix();  // gives the kept layers back

  // Only in kOff. Makes the region and starts the transmission of the layers that are not kept, in groups that end at
  // `ends`. A thread of the device calls `on_progress` for every group. On failure only the kept layers are left.
  // Errors: the device's.
  base::Status load(std::vector<uint32_t> ends, std::function<void()> on_progress);
  // In kLoading: becomes kResident or kFailed if the load has ended.
  void poll();
  // Device time and bytes of the load that ended last; zeros before.
  uint64_t load_ns() const { return load_ns_; }
  uint64_t sent_bytes() const { return sent_bytes_; }
  // Why it is kFailed.
  const base::Status& failure() const { return failure_; }
  // The region for reading: its prefix and the rest, or one descriptor. Not kOff.
  base::Result<std::vector<client::Descriptor>> share() const;
  // Bytes behind the first descriptor, if there are two; else 0.
  uint64_t prefix_bytes() const { return parts_[1].memory == nullptr ? 0 : parts_[0].bytes; }
  // Gives the region's memory back; with `keep_prefix` all but the prefix. Not in kLoading.
  void drop(bool keep_prefix = false);

  // Adds a board that is told of the layers already there and of later ones.
  void watch(const std::shared_ptr<client::Board>& board);
  void unwatch(const client::Board* board);

 private:
  // State that the device's thread touches; shared with that thread.
  struct Progress {
    base::Mutex mutex;
    uint32_t arrived GPUSHARE_GUARDED_BY(mutex) = 0;
    std::vector<std::shared_ptr<client::Board>> boards GPUSHARE_GUARDED_BY(mutex);
  };
  // A piece of the region.
  struct Part {
    uint64_t offset = 0;
    uint64_t bytes = 0;
    uint64_t kept_bytes = 0;  // bytes, once its layers are there
    gpushare_backend_memory* memory = nullptr;
    bool mapped = false;
  };
  base::Status make_region();
  base::Status make(Part& part);
  void give_back(Part& part);

  device::Device& device_;
  const device::Stream& stream_;
  const std::shared_ptr<const loader::Image> source_;
  const uint64_t id_;
  uint64_t region_bytes_;
  State state_ = State::kOff;
  base::Status failure_;
  uint64_t loads_ = 0, load_ns_ = 0, sent_bytes_ = 0;
  loader::PrefixChoice prefix_;
  device::Address address_ = 0;
  Part parts_[2];  // the prefix and the rest, or all in the first
  std::unique_ptr<loader::Transmission> transmission_;
  const std::shared_ptr<Progress> progress_ = std::make_shared<Progress>();
};

// "off", "loading", "resident", "failed".
const char* state_name(SharedImage::State state);

}  // namespace gpushare::daemon
