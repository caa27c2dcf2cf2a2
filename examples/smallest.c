/* The smallest whole program: a session, ten iterations. The README shows it.
 * SPDX-License-Identifier: Apache-2.0 */
#include <gpushare/gpushare.h>
#include <stdio.h>

int main(void) {
  gpushare_runtime_params device = GPUSHARE_RUNTIME_PARAMS_INIT; /* "auto": the first GPU, else the host */
  gpushare_session_params job = GPUSHARE_SESSION_PARAMS_INIT;
  gpushare_session_info done = GPUSHARE_SESSION_INFO_INIT;
  gpushare_runtime runtime;
  gpushare_session session;
  job.ephemeral_bytes = 200u << 20; /* what an iteration needs */
  if (gpushare_runtime_open(&device, &runtime) || gpushare_session_open(runtime, &job, &session)) return 1;
  for (int i = 0; i < 10; ++i) {
    gpushare_iteration step;
    gpushare_device_address scratch;
    if (gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &step)) return 1; /* waits for its turn */
    if (gpushare_iteration_alloc(step, 150u << 20, 0, &scratch)) return 1; /* gone at the end, at no cost */
    if (gpushare_iteration_end(step)) return 1;                            /* the next session may run */
  }
  if (gpushare_runtime_synchronize(runtime, GPUSHARE_NO_TIMEOUT)) return 1;
  if (gpushare_session_get_info(session, &done)) return 1;
  printf("%d iterations, each with 150 MiB of its own, in %d MiB\n", (int)done.iterations_done,
         (int)(done.promised_ephemeral_bytes >> 20));
  return gpushare_session_close(session) || gpushare_runtime_close(runtime);
}
