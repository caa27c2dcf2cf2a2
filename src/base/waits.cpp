// SPDX-License-Identifier: Apache-2.0
#include "base/waits.hpp"

#if defined(GPUSHARE_CHECK_WAITS)

#include <execinfo.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <exception>

#include "base/log.hpp"
#include "base/status.hpp"

void gpushare::base::report_bad_wait(const char* what, int locks) noexcept {
  const char* const reaction = std::getenv("GPUSHARE_BAD_WAIT");
  try {
    log(kError,
        format("a thread waits for %s with %d of the library's locks held: please report it", what, locks));
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): no memory for the line
  }
  if (reaction == nullptr || std::strcmp(reaction, "abort") != 0) return;
  void* frames[64];
  backtrace_symbols_fd(frames, backtrace(frames, 64), STDERR_FILENO);
  std::abort();
}

#endif
