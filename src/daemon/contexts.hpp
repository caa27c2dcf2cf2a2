// contexts.hpp: contexts of processes on one device: bytes that no session has, and that stay until their process has ended.
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
  // The process's contexts have so many bytes until it has ended; connections of one process say the same bytes. Errors, if it
  // `asks`: DEVICE_OUT_OF_MEMORY.
  base::Status set(const Process& process, uint64_t bytes, bool asks);
  void set_own(uint64_t bytes);  // of the service itself
  void ended(const Process& process);
  uint64_t bytes(const Process& process) const;
  // That a session can have the bytes beside contexts which stay as long as it does: its process's and the service's.
  // Errors: EXCEEDS_CAPACITY.
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
