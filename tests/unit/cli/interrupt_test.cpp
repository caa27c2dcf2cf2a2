// What the first and the next SIGINT do to a command.
// SPDX-License-Identifier: Apache-2.0
#include "cli/interrupt.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "base/clock.hpp"
#include "support/catch.hpp"

using namespace gpushare;
using cli::InterruptScope;

namespace {

constexpr int kSlow = 3;  // the machine took too long between two signals

// Waits for the end of a process that runs `body` and exits with what it returns.
template <class F>
int wait_status_of(F body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  return status;
}

}  // namespace

TEST_CASE("an interrupt is remembered, and its double is no second one", "[cli]") {
  int status = 0;
  do {
    status = wait_status_of([] {
      const InterruptScope scope;
      if (InterruptScope::interrupted()) return 1;
      const uint64_t began_ns = base::host_now_ns();
      for (int i = 0; i < 2; ++i) (void)raise(SIGINT);
      if (base::host_now_ns() - began_ns >= uint64_t{cli::kOneInterruptNs}) return kSlow;
      return InterruptScope::interrupted() ? 0 : 2;
    });
  } while (WIFEXITED(status) ? WEXITSTATUS(status) == kSlow : false);
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("a later interrupt ends the process, and each scope begins anew", "[cli]") {
  const int status = wait_status_of([] {
    {
      const InterruptScope scope;
      (void)raise(SIGINT);
    }
    const InterruptScope scope;
    if (InterruptScope::interrupted()) return 1;
    (void)raise(SIGINT);
    const uint64_t until_ns = base::host_now_ns() + uint64_t{cli::kOneInterruptNs};
    while (base::host_now_ns() <= until_ns) usleep(10'000);
    (void)raise(SIGINT);
    return 2;
  });
  REQUIRE(WIFSIGNALED(status));
  CHECK(WTERMSIG(status) == SIGINT);
}
