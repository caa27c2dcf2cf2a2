// SPDX-License-Identifier: Apache-2.0
#include "daemon/contexts.hpp"

#include <unistd.h>

#include <algorithm>

#include "base/clock.hpp"
#include "base/saturate.hpp"
#include "base/units.hpp"
#include "daemon/service.hpp"

namespace gpushare::daemon {
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

base::Status Contexts::set(const Process& process, uint64_t bytes, bool asks, const Largest& largest) {
  const uint64_t believed = std::min(bytes, most_bytes());
  const uint64_t before = of(process.peer.pid), others = scheduler_.context_bytes() - before;
  const uint64_t target = scheduler_.capacity().target_bytes;
  if (asks && believed > before) {
    if (others > target - std::min(target, believed))
      return {GPUSHARE_DEVICE_OUT_OF_MEMORY,
              "the context of the process has " + base::format_bytes(bytes) +
                  " of the device; of the capacity, " + base::format_bytes(target) +
                  ", contexts of other processes have " + base::format_bytes(others) +
                  ". Let one of them end, or raise the capacity"};
    const auto fits = [&](uint64_t contexts) {
      return base::add_saturated(contexts, largest.bytes) <= target;
    };
    if (fits(others + before) && !fits(others + believed))
      return {GPUSHARE_DEVICE_OUT_OF_MEMORY,
              "session '" + largest.session + "' needs " + base::format_bytes(largest.bytes) +
                  ", and could never run beside this process's context: contexts would have " +
                  base::format_bytes(others + believed) + " of the capacity, " + base::format_bytes(target) +
                  ". Let the session end, or raise the capacity"};
  }
  count({process.peer.pid, process.id}, believed);
  return {};
}

base::Status SharedDevice::set_context(const Process& process, uint64_t bytes, bool asks) {
  take_back_offers();
  if (bytes > contexts_.most_bytes())
    log_limit_.warn(
        process.peer.uid,
        base::format("daemon: the context of process %d has %s of device '%s'; at most a quarter of "
                     "the capacity, %s, is counted for one process, so sessions may find no memory",
                     process.peer.pid, base::format_bytes(bytes).c_str(), name_.c_str(),
                     base::format_bytes(contexts_.most_bytes()).c_str()),
        base::host_now_ns());
  Contexts::Largest largest;
  for (const auto& [id, claim] : claims_) {
    const sched::SessionState state = scheduler_.state(id);
    if (state != sched::SessionState::kResident && state != sched::SessionState::kPagedOut) continue;
    if (const uint64_t needs = bytes_on_device(*claim); needs > largest.bytes)
      largest = {claim->members.front()->name, needs};
  }
  return contexts_.set(process, bytes, asks, largest);
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
