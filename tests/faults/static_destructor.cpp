// Uses a runtime in the destructor of a static object that is older than everything that the library has: it is destroyed last.
// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <cstdio>

#include "gpushare/gpushare.h"

namespace {

int iterate(gpushare_session session) {
  gpushare_iteration iteration = nullptr;
  gpushare_device_address block = 0;
  if (gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration) != GPUSHARE_OK) return 1;
  if (gpushare_iteration_alloc(iteration, 4096, 0, &block) != GPUSHARE_OK) return 2;
  return gpushare_iteration_end(iteration) == GPUSHARE_OK ? 0 : 3;
}

struct Uses {
  gpushare_runtime runtime = nullptr;
  gpushare_session session = nullptr;
  ~Uses() {
    int wrong = iterate(session);
    if (wrong == 0 && gpushare_iteration_begin(nullptr, 0, nullptr) != GPUSHARE_INVALID_ARGUMENT) wrong = 4;
    if (wrong == 0 && gpushare_last_error_message()[0] == '\0') wrong = 5;
    if (wrong == 0 && gpushare_session_close(session) != GPUSHARE_OK) wrong = 6;
    if (wrong == 0 && gpushare_runtime_close(runtime) != GPUSHARE_OK) wrong = 7;
    if (wrong != 0) std::fprintf(stderr, "step %d: %s\n", wrong, gpushare_last_error_message());
    _exit(wrong);
  }
} g_uses;

}  // namespace

int main() {
  gpushare_runtime_params runtime_params = GPUSHARE_RUNTIME_PARAMS_INIT;
  runtime_params.device = "host";
  if (gpushare_runtime_open(&runtime_params, &g_uses.runtime) != GPUSHARE_OK) _exit(21);
  gpushare_session_params params = GPUSHARE_SESSION_PARAMS_INIT;
  params.name = "static";
  params.ephemeral_bytes = 1u << 20;
  if (gpushare_session_open(g_uses.runtime, &params, &g_uses.session) != GPUSHARE_OK) _exit(22);
  (void)gpushare_iteration_end(nullptr);
  if (iterate(g_uses.session) != 0) _exit(23);
  return 24;  // replaced by the destructor's verdict
}
