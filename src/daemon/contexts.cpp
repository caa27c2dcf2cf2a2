// Contexts of processes: bytes of the device that no session has, and that stay until their process has ended.
// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <algorithm>

#include "base/clock.hpp"
#include "base/saturate.hpp"
#include "base/units.hpp"
#include "daemon/service.hpp"

namespace gpushare::daemon {
namespace {

constexpr uint64_t kMostOfDevice = 4;  // a quarter of it is believed to be of one process's contexts

}  // namespace

// Several connections of a process are to one context of the driver.
uint64_t SharedDevice::contexts_of(pid_t process) const {
  uint64_t most = 0;
  for (auto at = contexts_.lower_bound({process, 0}); at != contexts_.end() && at->first.first == process;
       ++at)
    most = std::max(most, at->second);
  return most;
}

uint64_t SharedDevice::context_bytes(const Process& process) const {
  const auto found = contexts_.find({process.peer.pid, process.id});
  return found == contexts_.end() ? 0 : found->second;
}

void SharedDevice::count_context(ContextOwner owner, uint64_t bytes) {
  const auto found = contexts_.find(owner);
  if ((found == contexts_.end() ? 0 : found->second) == bytes) return;
  const uint64_t before = contexts_of(owner.first);
  if (bytes == 0)
    contexts_.erase(found);
  else
    contexts_[owner] = bytes;
  scheduler_.set_context_bytes(scheduler_.context_bytes() - before + contexts_of(owner.first),
                               base::host_now_ns());
}

base::Status SharedDevice::set_context(const Process& process, uint64_t bytes, bool asks) {
  take_back_offers();
  const uint64_t believed = std::min(bytes, capacity_bytes_ / kMostOfDevice);
  const uint64_t before = contexts_of(process.peer.pid);
  const uint64_t target = scheduler_.capacity().target_bytes;
  if (asks && believed > before && scheduler_.context_bytes() - before > target - std::min(target, believed))
    return {GPUSHARE_DEVICE_OUT_OF_MEMORY, "the context of the process has " + base::format_bytes(bytes) +
                                               " of the device; of the capacity, " +
                                               base::format_bytes(target) +
                                               ", contexts of other processes have " +
                                               base::format_bytes(scheduler_.context_bytes() - before) +
                                               ". Let one of them end, or raise the capacity"};
  count_context({process.peer.pid, process.id}, believed);
  return {};
}

base::Status SharedDevice::fits_beside_contexts(const Process& process, const std::string& session,
                                                uint64_t bytes) const {
  const pid_t service = getpid();
  const uint64_t beside =
      contexts_of(process.peer.pid) + (process.peer.pid == service ? 0 : contexts_of(service));
  if (beside == 0 || base::add_saturated(bytes, beside) <= capacity_bytes_) return {};
  return {GPUSHARE_EXCEEDS_CAPACITY, "session '" + session + "' needs " + base::format_bytes(bytes) +
                                         "; of the capacity, " + base::format_bytes(capacity_bytes_) +
                                         ", the contexts of its process and of the daemon have " +
                                         base::format_bytes(beside)};
}

void SharedDevice::died(Process& process) {
  images_.died(process);
  count_context({process.peer.pid, process.id}, 0);
}

}  // namespace gpushare::daemon
