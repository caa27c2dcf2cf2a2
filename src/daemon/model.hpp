// model.hpp: one image and its region: the device memory that holds it while workers of it run. The server's
// thread makes, fills, shares and drops it; layers arrive on a thread of the device.
//
// A region is memory of its own for every load: it is never used for another model, so a worker that kept an old
// one mapped still sees its own model and nothing else.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.hpp"
#include "base/status.hpp"
#include "daemon/board.hpp"
#include "daemon/channel.hpp"
#include "device/device.hpp"
#include "loader/image.hpp"
#include "loader/transmission.hpp"

namespace gpushare::daemon {

class Model {
 public:
  // kFailed: the load failed; the memory is still there until drop().
  enum class State : uint8_t { kOff, kLoading, kResident, kFailed };

  // `ends`: the plan's groups. The device and the stream must outlive it.
  Model(device::Device& device, const device::Stream& stream, std::shared_ptr<const loader::Image> image,
        std::vector<uint32_t> ends, uint64_t id);
  ~Model();  // drops
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  uint64_t id() const { return id_; }
  const std::string& path() const { return image_->name(); }
  const std::shared_ptr<const loader::Image>& image() const { return image_; }
  uint64_t region_bytes() const { return region_bytes_; }
  State state() const { return state_; }
  uint32_t arrived() const;
  uint64_t loads() const { return loads_; }
  void set_ends(std::vector<uint32_t> ends) { ends_ = std::move(ends); }

  // kOff only: makes the region and starts the transmission; `on_progress` is called from a thread of the device
  // for every group. Nothing is left on failure. Errors: the device's.
  base::Status load(std::function<void()> on_progress);
  // While kLoading: looks whether the load has ended, and becomes kResident or kFailed if so.
  void poll();
  // Why it is kFailed.
  const base::Status& failure() const { return failure_; }
  // A descriptor of the region, for reading. Not kOff.
  base::Result<Descriptor> share() const;
  // Gives the region's memory back. Not kLoading.
  void drop();

  // Boards that hear of layers, from now on and what is there already.
  void watch(const std::shared_ptr<Board>& board);
  void unwatch(const Board* board);

 private:
  // What the device's thread touches; shared with it.
  struct Progress {
    base::Mutex mutex;
    uint32_t arrived GPUSHARE_GUARDED_BY(mutex) = 0;
    std::vector<std::shared_ptr<Board>> boards GPUSHARE_GUARDED_BY(mutex);
  };
  base::Status make_region();

  device::Device& device_;
  const device::Stream& stream_;
  const std::shared_ptr<const loader::Image> image_;
  std::vector<uint32_t> ends_;
  const uint64_t id_;
  uint64_t region_bytes_;
  State state_ = State::kOff;
  base::Status failure_;
  uint64_t loads_ = 0;
  gpushare_backend_memory* memory_ = nullptr;
  device::Address address_ = 0;
  bool mapped_ = false;
  std::unique_ptr<loader::Transmission> transmission_;
  const std::shared_ptr<Progress> progress_ = std::make_shared<Progress>();
};

// "off", "loading", "resident", "failed".
const char* state_name(Model::State state);

}  // namespace gpushare::daemon
