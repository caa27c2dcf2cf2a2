// kernel_limits.hpp: the driver's own limits of a group's memory, which the kernel enforces for all processes of a
// cgroup (nvmlDeviceSetMemoryLimits, drivers from r615 on, root alone). They back the limit that preloaded programs
// check themselves, and also hold for programs without the library, such as static and setuid ones.
//
// A limit is set only on a cgroup that is the group's own: one that `gpushare exec` made, or a container's, while no
// other group is in it. NVML may take long or hang, so a separate thread calls it. Only the end of the daemon waits for
// that thread, for at most a second.
//
// The driver keeps a limit when the daemon that set it is killed. So the cgroups are written to a file before the
// driver is asked. The next daemon at the same socket clears the limits of cgroups in which it has no group.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

namespace gpushare::daemon {

// The name of the cgroup that `gpushare exec` makes for its programs, without the number at the end.
inline constexpr char kCgroupName[] = "gpushare-exec-";

// The cgroup of a process, as a path below the file system of cgroups; empty: the process has none of version 2.
// `text`: /proc/PID/cgroup.
std::string cgroup_in(const std::string& text);

// The limits of one device. Used by the service's thread alone.
class KernelLimits {
 public:
  // Bytes for contexts, which count in the driver's limit and not in that of the group.
  static constexpr uint64_t kSlackBytes = 512ull << 20;

  struct Places {
    std::string nvml = "libnvidia-ml.so.1";
    std::string processes = "/proc";
    std::string cgroups = "/sys/fs/cgroup";
    // Lists the cgroups that have a limit, one a line; with the device's address behind it. Empty: nothing is written.
    std::string record;
    uint64_t end_ns = 1'000'000'000;  // the longest time that the end waits for NVML
  };
  // `pci_address` as gpushare_backend_device_info has it.
  KernelLimits(uint32_t pci_address, Places places);
  ~KernelLimits();  // clears all limits, if NVML answers in time
  KernelLimits(const KernelLimits&) = delete;
  KernelLimits& operator=(const KernelLimits&) = delete;

  // Limits the claim's group, to which `process` belongs, to `limit_bytes` of the device. The hard limit is kSlackBytes
  // above that. Does nothing if the limit is the same as before. If the kernel's limits cannot be set, one line of the
  // log says why.
  void set(uint64_t claim, pid_t process, uint64_t limit_bytes);
  // The claim has ended, or has no limit any more.
  void clear(uint64_t claim);
  // True if NVML has said that the claim's limit is set, and no other is being asked for.
  bool holds(uint64_t claim) const;

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace gpushare::daemon
