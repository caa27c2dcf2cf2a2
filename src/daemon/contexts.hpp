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
  // The process's contexts have `bytes` until the process has ended; its connections all report the same bytes. Errors,
  // if `asks`: DEVICE_OUT_OF_MEMORY.
  base::Status set(const Process& process, uint64_t bytes, bool asks);
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
