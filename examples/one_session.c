/* One session on the host device: a persistent block, then ten iterations with scratch memory that costs nothing to free.
 * Build: cc one_session.c $(pkg-config --cflags --libs gpushare)          SPDX-License-Identifier: Apache-2.0 */
#include <gpushare/gpushare.h>
#include <stdio.h>

#define TRY(call) \
  if ((call) != GPUSHARE_OK) return fprintf(stderr, "%s: %s\n", #call, gpushare_last_error_message()), 1

int main(void) {
  gpushare_runtime runtime;
  gpushare_runtime_params params = GPUSHARE_RUNTIME_PARAMS_INIT;
  params.device = "host"; /* "auto" takes the first GPU */
  TRY(gpushare_runtime_open(&params, &runtime));

  gpushare_session session;
  gpushare_session_params job = GPUSHARE_SESSION_PARAMS_INIT;
  job.name = "resnet50";
  job.persistent_bytes = 100u << 20;
  job.ephemeral_bytes = 200u << 20;
  TRY(gpushare_session_open(runtime, &job, &session));

  gpushare_device_address weights;
  TRY(gpushare_session_alloc(session, GPUSHARE_KIND_MODEL, 97u << 20, 0, &weights));
  for (int step = 0; step < 10; ++step) {
    gpushare_iteration iteration;
    gpushare_stream stream;
    gpushare_device_address scratch;
    TRY(gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration)); /* waits for its turn */
    TRY(gpushare_iteration_alloc(iteration, 150u << 20, 0, &scratch));
    TRY(gpushare_iteration_get_stream(iteration, &stream));
    TRY(gpushare_stream_fill(stream, scratch, 0, 1u << 20)); /* your kernels go here, on this stream */
    TRY(gpushare_iteration_end(iteration));                  /* scratch is gone; the next session may run */
  }

  gpushare_session_info info = GPUSHARE_SESSION_INFO_INIT;
  TRY(gpushare_runtime_synchronize(runtime, GPUSHARE_NO_TIMEOUT));
  TRY(gpushare_session_get_info(session, &info));
  printf("%llu iterations, %.3f ms of device time, peak %.0f MiB\n", (unsigned long long)info.iterations_done,
         (double)info.service_ns / 1e6, (double)info.peak_bytes / (1 << 20));
  TRY(gpushare_session_close(session));
  TRY(gpushare_runtime_close(runtime));
  return 0;
}
