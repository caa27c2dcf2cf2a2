// exec_watch.hpp: whether the shim is in the programs that `gpushare exec` has started.
//
// A program is held when its own library says so: the preload library reports on the group's page when the loader has
// put it into a program, before the program's own code runs. A program that has not reported and will not (the loader
// has passed the library over, or the deadline has come, or the program has ended) runs without limits. Descendants of
// the program are looked at as well: a process that has the CUDA driver and not the library is not held.
//
// Threads: one.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "shim/group.hpp"

namespace gpushare::cli {

class ExecWatch {
 public:
  // `page`: on which programs report; it outlives this object. `driver`: file of the CUDA driver, or empty.
  // `fail_closed`: programs that are not held are ended; otherwise one line on stderr names each.
  ExecWatch(const shim::GroupPage& page, std::string driver, pid_t program, std::string name,
            bool fail_closed);

  // Looks at the programs once. Returns for how many milliseconds nothing needs another look.
  int look();
  // The program has ended. True: it was not held, and `fail_closed` makes that an error.
  bool end();

 private:
  int look_at_program();
  void look_at_descendants();
  void look_at(pid_t process);
  void not_held(pid_t process, const std::string& name, const std::string& why);
  bool has_reported() const { return __atomic_load_n(&page_.reports, __ATOMIC_ACQUIRE) != 0; }

  const shim::GroupPage& page_;
  const std::string driver_;
  const pid_t program_;
  const std::string name_;
  const bool fail_closed_;
  const uint64_t began_ns_;
  bool decided_ = false;  // whether the program is held
  bool held_ = false;
  int pause_ms_ = 100;
  std::unordered_map<pid_t, uint64_t>
      done_;  // processes that need no other look, and which program each runs
};

}  // namespace gpushare::cli
