// kernel_limits.hpp: the driver's own limits of a group's memory, which the kernel enforces for all processes of a cgroup
// (nvmlDeviceSetMemoryLimits, drivers from r615 on, root alone). They stand behind the limit that the preloaded programs check
// themselves: programs without the library, static and setuid ones, meet them too.
//
// A limit is set only on a cgroup that is the group's own: one that `gpushare exec` made, or a container's, while no other group is
// in it. NVML may take long or
// hang, so a thread of its own asks it. Nothing waits for that thread but the end, for a second.
//
// The driver keeps a limit when the daemon that set it is killed. So the cgroups are written to a file before the driver is asked,
// and the next daemon at the same socket clears those that no group of its own is in.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

namespace gpushare::daemon {

// What `gpushare exec` calls the cgroup of its programs, with its number behind it.
inline constexpr char kCgroupName[] = "gpushare-exec-";

// The cgroup of a process, as a path below the file system of cgroups; empty: there is none of version 2. `text`: /proc/PID/cgroup.
std::string cgroup_in(const std::string& text);

// Of one device. For the service's thread alone.
class KernelLimits {
 public:
  // What a context takes beside the blocks, which programs without the library have as well.
  static constexpr uint64_t kSlackBytes = 512ull << 20;

  struct Places {
    std::string nvml = "libnvidia-ml.so.1";
    std::string processes = "/proc";
    std::string cgroups = "/sys/fs/cgroup";
    // Lists the cgroups that have a limit, one a line; with the device's address behind it. Empty: nothing is written.
    std::string record;
    uint64_t end_ns = 1'000'000'000;  // so long the end waits for NVML at most
  };
  // `pci_address` as gpushare_backend_device_info has it.
  KernelLimits(uint32_t pci_address, Places places);
  ~KernelLimits();  // clears all limits, if NVML answers in time
  KernelLimits(const KernelLimits&) = delete;
  KernelLimits& operator=(const KernelLimits&) = delete;

  // The claim's group, of which `process` is one, may have so many bytes of the device. The hard limit is kSlackBytes above it.
  // Nothing happens where the limit is the same as before. One line of the log says why limits of the kernel cannot be set.
  void set(uint64_t claim, pid_t process, uint64_t limit_bytes);
  // The claim has ended, or has no limit any more.
  void clear(uint64_t claim);
  // NVML has said that the claim's limit is set, and is asked for no other.
  bool holds(uint64_t claim) const;

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace gpushare::daemon
