/* One session: a persistent block, then ten iterations with scratch memory that costs nothing to free, and every error told.
 * SPDX-License-Identifier: Apache-2.0 */
#include <gpushare/gpushare.h>
#include <stdio.h>
#define TRY(call) \
  if ((call) != GPUSHARE_OK) return fprintf(stderr, "%s\n", gpushare_last_error_message()), 1

int main(void) {
  gpushare_runtime runtime;
  gpushare_runtime_params params = GPUSHARE_RUNTIME_PARAMS_INIT; /* device "auto": first GPU, else the host */
  TRY(gpushare_runtime_open(&params, &runtime));

  gpushare_session session;
  gpushare_session_params job = GPUSHARE_SESSION_PARAMS_INIT;
  job.name = "resnet50", job.persistent_bytes = 100u << 20, job.ephemeral_bytes = 200u << 20;
  TRY(gpushare_session_open(runtime, &job, &session));

  gpushare_device_address weights, scratch;
  TRY(gpushare_session_alloc(session, GPUSHARE_KIND_MODEL, 97u << 20, 0, &weights)); /* stays until freed */
  for (int step = 0; step < 10; ++step) {
    gpushare_iteration iteration;
    gpushare_stream stream;
    TRY(gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration)); /* waits for its turn */
    TRY(gpushare_iteration_alloc(iteration, 150u << 20, 0, &scratch));       /* gone at the end, at no cost */
    TRY(gpushare_iteration_get_stream(iteration, &stream));
    TRY(gpushare_stream_fill(stream, scratch, 0, 150u << 20)); /* your kernels go here, on this stream */
    TRY(gpushare_iteration_end(iteration));                    /* the next session may run */
  }
  TRY(gpushare_session_close(session));
  TRY(gpushare_runtime_close(runtime));
  return printf("%s: 10 iterations\n", job.name) < 0;
}
