// contexts.hpp: contexts of processes on one device. Their bytes belong to no session, and stay until their process has
// ended. The scheduler is told their sum.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "base/status.hpp"
#include "sched/scheduler.hpp"

namespace gpushare::daemon {

struct Process;

// Tells the scheduler the sum. Used by the service's thread alone.
class Contexts {
 public:
  Contexts(sched::Scheduler& scheduler, uint64_t capacity_bytes)
      : scheduler_(scheduler), capacity_bytes_(capacity_bytes) {}
  // A session that has been on the device, and all bytes that it needs there.
  struct Largest {
    std::string session;
    uint64_t bytes = 0;
  };
  // The process's contexts have `bytes` until the process has ended; its connections all report the same bytes. Errors,
  // if `asks`: DEVICE_OUT_OF_MEMORY (they have no room, or the largest session would have none any more).
  base::Status set(const Process& process, uint64_t bytes, bool asks, const Largest& largest);
  // The most that is believed to be of one process's contexts.
  uint64_t most_bytes() const { return capacity_bytes_ / 4; }
  void set_own(uint64_t bytes);  // of the service itself
  void ended(const Process& process);
  uint64_t bytes(const Process& process) const;
  // OK if a session can have `bytes` beside the contexts of its process and of the service, which stay as long as the
  // session. Errors: EXCEEDS_CAPACITY.
  base::Status leave_room(const Process& process, const std::string& session, uint64_t bytes) const;

 private:
  using Owner = std::pair<pid_t, uint64_t>;  // a process, and its connection
  void count(Owner owner, uint64_t bytes);
  uint64_t of(pid_t process) const;

  sched::Scheduler& scheduler_;
  const uint64_t capacity_bytes_;
  std::map<Owner, uint64_t> bytes_;
};

}  // namespace gpushare::daemon
