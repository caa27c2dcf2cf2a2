// own_context.hpp: the device memory that the daemon's own context has on a device which it has opened.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "base/patient.hpp"
#include "base/saturate.hpp"
#include "device/device.hpp"

namespace gpushare::daemon {

// A device that was just opened, and what Device::context_bytes() has answered then.
struct OpenedDevice {
  std::unique_ptr<device::Device> device;
  base::Result<uint64_t> context_bytes;

  // May block for some seconds.
  static base::Result<OpenedDevice> open(const std::string& spec) {
    GPUSHARE_ASSIGN_OR_RETURN(std::unique_ptr<device::Device> device, device::Device::open(spec));
    base::Result<uint64_t> context_bytes = device->context_bytes();
    return OpenedDevice{std::move(device), std::move(context_bytes)};
  }
};

class OwnContext {
 public:
  uint64_t bytes() const { return bytes_.load(); }  // 0 until they are known. Any thread
  // Called with what the system has answered. Any thread, one at a time.
  void note(const base::Result<uint64_t>& measured, uint64_t now_ns) {
    if (measured.ok()) bytes_.store(*measured);
    // It is stored last, because tick() then reads the device, which another thread may have opened.
    again_ns_.store(measured.status().code() == GPUSHARE_NOT_READY ? base::add_saturated(now_ns, kAgainNs)
                                                                   : UINT64_MAX);
  }
  // Measures anew where the system could not say before, once that has some prospect. The service's thread calls it, so a
  // thread of its own asks: a driver may hang there. *next_ns: when to call again, in nanoseconds from now, if that is
  // earlier. True: the bytes are known now.
  bool tick(const std::shared_ptr<device::Device>& device, uint64_t now_ns, uint64_t* next_ns) {
    uint64_t again_ns = again_ns_.load();
    if (again_ns == UINT64_MAX) return false;
    if (asking_ == nullptr && now_ns >= again_ns) ask(device, now_ns);
    if (asking_ != nullptr) {
      const auto answer = asking_->wait_until({});
      if (!answer) {
        *next_ns = std::min(*next_ns, kAgainNs);
        return false;
      }
      asking_.reset();
      note(*answer, now_ns);
    }
    again_ns = again_ns_.load();
    if (again_ns == UINT64_MAX) return true;
    *next_ns = std::min(*next_ns, again_ns - std::min(again_ns, now_ns));
    return false;
  }

 private:
  void ask(const std::shared_ptr<device::Device>& device, uint64_t now_ns) {
    auto started =
        base::Asked<uint64_t>::start("the device's driver", [device] { return device->context_bytes(); });
    if (started.ok())
      asking_ = *std::move(started);
    else
      note(started.status(), now_ns);
  }

  static constexpr uint64_t kAgainNs = 1'000'000'000;

  std::atomic<uint64_t> bytes_{0};
  std::atomic<uint64_t> again_ns_{UINT64_MAX};
  std::unique_ptr<base::Asked<uint64_t>> asking_;  // null: nothing is being asked
};

}  // namespace gpushare::daemon
