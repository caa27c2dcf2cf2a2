// own_context.hpp: the device memory that the daemon's own context has on a device which it has opened.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "base/saturate.hpp"
#include "device/device.hpp"

namespace gpushare::daemon {

// One thread measures at a time; any thread reads.
class OwnContext {
 public:
  uint64_t bytes() const { return bytes_.load(); }  // 0 until they are known
  // Called once the device is open. May block for some seconds.
  void measure(device::Device& device, uint64_t now_ns) { note(device.context_bytes(), now_ns); }
  // Called with what Device::context_bytes() has answered.
  void note(const base::Result<uint64_t>& measured, uint64_t now_ns) {
    if (measured.ok()) bytes_.store(*measured);
    // It is stored last, because the device may be used by the thread that reads it.
    again_ns_.store(measured.status().code() == GPUSHARE_NOT_READY ? base::add_saturated(now_ns, kAgainNs)
                                                                   : UINT64_MAX);
  }
  // Measures anew where the system could not say before, once that has some prospect. `device()` gives the device, and is
  // called only then. *next_ns: when to call again, in nanoseconds from now, if that is earlier. True: the bytes are known now.
  template <class Device>
  bool tick(Device&& device, uint64_t now_ns, uint64_t* next_ns) {
    uint64_t again_ns = again_ns_.load();
    if (again_ns == UINT64_MAX) return false;
    if (now_ns >= again_ns) measure(device(), now_ns);
    again_ns = again_ns_.load();
    if (again_ns == UINT64_MAX) return true;
    *next_ns = std::min(*next_ns, again_ns - std::min(again_ns, now_ns));
    return false;
  }

 private:
  static constexpr uint64_t kAgainNs = 1'000'000'000;

  std::atomic<uint64_t> bytes_{0};
  std::atomic<uint64_t> again_ns_{UINT64_MAX};
};

}  // namespace gpushare::daemon
