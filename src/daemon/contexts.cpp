// SPDX-License-Identifier: Apache-2.0
#include "daemon/contexts.hpp"

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
uint64_t Contexts::of(pid_t process) const {
  uint64_t most = 0;
  for (auto at = bytes_.lower_bound({process, 0}); at != bytes_.end() && at->first.first == process; ++at)
    most = std::max(most, at->second);
  return most;
}

uint64_t Contexts::bytes(const Process& process) const {
  const auto found = bytes_.find({process.peer.pid, process.id});
  return found == bytes_.end() ? 0 : found->second;
}

void Contexts::count(Owner owner, uint64_t bytes) {
  const auto found = bytes_.find(owner);
  if ((found == bytes_.end() ? 0 : found->second) == bytes) return;
  const uint64_t before = of(owner.first);
  if (bytes == 0)
    bytes_.erase(found);
  else
    bytes_[owner] = bytes;
  scheduler_.set_context_bytes(scheduler_.context_bytes() - before + of(owner.first), base::host_now_ns());
}

base::Status Contexts::set(const Process& process, uint64_t bytes, bool asks) {
  const uint64_t believed = std::min(bytes, capacity_bytes_ / kMostOfDevice);
  const uint64_t before = of(process.peer.pid);
  const uint64_t target = scheduler_.capacity().target_bytes;
  if (asks && believed > before && scheduler_.context_bytes() - before > target - std::min(target, believed))
    return {GPUSHARE_DEVICE_OUT_OF_MEMORY, "the context of the process has " + base::format_bytes(bytes) +
                                               " of the device; of the capacity, " +
                                               base::format_bytes(target) +
                                               ", contexts of other processes have " +
                                               base::format_bytes(scheduler_.context_bytes() - before) +
                                               ". Let one of them end, or raise the capacity"};
  count({process.peer.pid, process.id}, believed);
  return {};
}

base::Status Contexts::leave_room(const Process& process, const std::string& session, uint64_t bytes) const {
  const pid_t service = getpid();
  const uint64_t beside = of(process.peer.pid) + (process.peer.pid == service ? 0 : of(service));
  if (beside == 0 || base::add_saturated(bytes, beside) <= capacity_bytes_) return {};
  return {GPUSHARE_EXCEEDS_CAPACITY, "session '" + session + "' needs " + base::format_bytes(bytes) +
                                         "; of the capacity, " + base::format_bytes(capacity_bytes_) +
                                         ", the contexts of its process and of the daemon have " +
                                         base::format_bytes(beside)};
}

void Contexts::set_own(uint64_t bytes) {
  count({getpid(), 0}, bytes);
}

void Contexts::ended(const Process& process) {
  count({process.peer.pid, process.id}, 0);
}

}  // namespace gpushare::daemon
