// A copy of the test's process that stands still when it asks for that: it is stopped for half a second and goes on.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "support/catch.hpp"

namespace gpushare::test {

// What the copy is given. stand_still() returns after the process was stopped; any thread may call it.
class StandsStill {
 public:
  StandsStill(int asks, int told) : asks_(asks), told_(told) {}
  void stand_still() const {
    char byte = 1;
    if (write(asks_, &byte, 1) != 1 || read(told_, &byte, 1) != 1) _exit(99);
  }

 private:
  int asks_, told_;
};

// Runs `child` in a copy of this process, which must have no other threads, and returns its exit status.
template <class Child>
int run_stopped(Child child) {
  int asks[2], told[2];
  REQUIRE(pipe(asks) == 0);
  REQUIRE(pipe(told) == 0);
  const pid_t pid = fork();
  REQUIRE(pid >= 0);
  if (pid == 0) {
    close(asks[0]);
    close(told[1]);
    int status = 97;
    try {
      status = child(StandsStill(asks[1], told[0]));
    } catch (...) {  // as a failed requirement does: the copy is no second run of the tests
    }
    _exit(status);
  }
  close(asks[1]);
  close(told[0]);
  int status = 0;
  for (char byte = 0; read(asks[0], &byte, 1) == 1;) {
    ::kill(pid, SIGSTOP);
    if (waitpid(pid, &status, WUNTRACED) != pid || !WIFSTOPPED(status)) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    ::kill(pid, SIGCONT);
    if (write(told[1], &byte, 1) != 1) break;
  }
  waitpid(pid, &status, 0);
  close(asks[0]);
  close(told[1]);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 98;
}

}  // namespace gpushare::test
