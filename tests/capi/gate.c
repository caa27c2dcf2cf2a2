/* Gates: what they refuse, when they are open, and that a guaranteed session's iterations close them. On host; virtual
 * time has none.
 * SPDX-License-Identifier: Apache-2.0 */
#include <gpushare/gate.h>
#include <math.h>
#include <pthread.h>
#include <time.h>

#include "check.h"

static gpushare_session open_class(gpushare_runtime runtime, const char* name, uint32_t session_class) {
  gpushare_session session = NULL;
  gpushare_session_params params = GPUSHARE_SESSION_PARAMS_INIT;
  params.name = name;
  params.session_class = session_class;
  params.persistent_bytes = params.ephemeral_bytes = MIB;
  CHECK_STATUS(gpushare_session_open(runtime, &params, &session), GPUSHARE_OK);
  return session;
}

static gpushare_gate_info info_of(gpushare_gate gate) {
  gpushare_gate_info info = GPUSHARE_GATE_INFO_INIT;
  CHECK_STATUS(gpushare_gate_get_info(gate, &info), GPUSHARE_OK);
  return info;
}

static void spin(void* user_data) {
  volatile uint64_t sum = 0;
  uint64_t i;
  for (i = 0; i < *(const uint64_t*)user_data; ++i) sum += i;
}

/* One iteration of so much work. */
static void iterate(gpushare_session session, uint64_t loops) {
  gpushare_iteration iteration = NULL;
  gpushare_stream stream = NULL;
  CHECK_STATUS(gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_get_stream(iteration, &stream), GPUSHARE_OK);
  CHECK_STATUS(gpushare_stream_launch_host(stream, spin, &loops), GPUSHARE_OK);
  CHECK_STATUS(gpushare_stream_synchronize(stream), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_end(iteration), GPUSHARE_OK);
}

static void refusals(gpushare_runtime runtime, gpushare_session sure, gpushare_session spare) {
  gpushare_gate gate = NULL;
  gpushare_gate_info info = GPUSHARE_GATE_INFO_INIT;
  const uint32_t* flag = NULL;
  CHECK_STATUS(gpushare_gate_open(NULL, &gate), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_gate_open(spare, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_gate_enter(NULL, NULL, 1, 0), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_gate_done(NULL, 1), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_gate_release(NULL), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_gate_open(spare, &gate), GPUSHARE_OK);
  CHECK_STATUS(gpushare_gate_get_flag(gate, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_gate_get_flag(NULL, &flag), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_gate_get_info(gate, NULL), GPUSHARE_INVALID_ARGUMENT);
  info.struct_size = 4;
  CHECK_STATUS(gpushare_gate_get_info(gate, &info), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_gate_enter(gate, (gpushare_stream)(uintptr_t)12345, 1, 0), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_gate_release(gate), GPUSHARE_OK);
  CHECK_STATUS(gpushare_gate_release(gate), GPUSHARE_INVALID_HANDLE);

  CHECK_STATUS(gpushare_session_set_target_slowdown(spare, 0.01), GPUSHARE_INVALID_ARGUMENT);
  CHECK(strstr(gpushare_last_error_message(), "opportunistic") != NULL);
  CHECK_STATUS(gpushare_session_set_target_slowdown(sure, -1), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_session_set_target_slowdown(sure, NAN), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_session_set_target_slowdown(sure, 11), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_session_set_target_slowdown(sure, 0.02), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_set_target_slowdown(runtime, 1e-9), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_runtime_set_target_slowdown(runtime, 0.03), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_set_target_slowdown(NULL, 0.03), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_session_set_target_slowdown(NULL, 0.03), GPUSHARE_INVALID_HANDLE);
}

static void guaranteed_closes(gpushare_session sure, gpushare_session spare) {
  gpushare_gate gate = NULL, own = NULL;
  gpushare_gate_info info;
  gpushare_iteration iteration = NULL;
  gpushare_stream stream = NULL;
  const uint32_t *flag = NULL, *own_flag = NULL;
  int i;
  CHECK_STATUS(gpushare_gate_open(spare, &gate), GPUSHARE_OK);
  CHECK_STATUS(gpushare_gate_get_flag(gate, &flag), GPUSHARE_OK);
  CHECK_STATUS(gpushare_gate_open(sure, &own), GPUSHARE_OK);
  CHECK_STATUS(gpushare_gate_get_flag(own, &own_flag), GPUSHARE_OK);
  /* Nobody guaranteed has run: open. */
  CHECK(*flag == 0);
  CHECK_STATUS(GPUSHARE_GATE_ENTER(gate, flag, NULL, 1000000), GPUSHARE_OK);
  info = info_of(gate);
  CHECK(info.open == 1 && info.share == 1 && info.in_flight_limit_ns == UINT64_MAX &&
        info.guaranteed_id == 0);
  CHECK(info.entries == 0);
  CHECK_STATUS(gpushare_gate_enter(gate, NULL, 1000000, 0), GPUSHARE_OK);
  CHECK(info_of(gate).entries == 1);

  /* Its iteration is under way: it learns, and nothing is let in; its own gate stays open. */
  CHECK_STATUS(gpushare_iteration_begin(sure, GPUSHARE_NO_TIMEOUT, &iteration), GPUSHARE_OK);
  CHECK(*flag != 0 && *own_flag == 0);
  info = info_of(gate);
  CHECK(info.open == 0 && info.share == 0 && info.learning == 1 && info.guaranteed_id != 0);
  CHECK(info.target_slowdown == 0.02);
  CHECK_STATUS(gpushare_gate_enter(gate, NULL, 1000, 0), GPUSHARE_TIMED_OUT);
  CHECK(strstr(gpushare_last_error_message(), "spare") != NULL);
  CHECK_STATUS(gpushare_gate_enter(gate, NULL, 1000, 1000000), GPUSHARE_TIMED_OUT);
  CHECK(info_of(gate).waits == 1 && info_of(gate).waited_ns > 0);
  CHECK_STATUS(gpushare_gate_enter(own, NULL, 1000, 0), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_end(iteration), GPUSHARE_OK);

  for (i = 0; i < 12; ++i) iterate(sure, 200000);
  info = info_of(gate);
  CHECK(info.alone_ns > 0);

  /* Between iterations, once the session is not expected back: one launch however long it is, then only what fits, until it is done. */
  CHECK_STATUS(gpushare_gate_enter(gate, NULL, 1000000000, 60000000000), GPUSHARE_OK);
  CHECK(info_of(gate).in_flight_ns == 1000000000);
  CHECK_STATUS(gpushare_gate_enter(gate, NULL, 1000000000, 0), GPUSHARE_TIMED_OUT);
  CHECK_STATUS(gpushare_gate_done(gate, 1000000000), GPUSHARE_OK);
  CHECK(info_of(gate).in_flight_ns == 0);
  CHECK_STATUS(gpushare_gate_done(gate, 5), GPUSHARE_OK); /* more than was let in: ignored */

  /* With a stream the gate itself sees when work is done. */
  CHECK_STATUS(gpushare_iteration_begin(spare, GPUSHARE_NO_TIMEOUT, &iteration), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_get_stream(iteration, &stream), GPUSHARE_OK);
  for (i = 0; i < 20; ++i) {
    static uint64_t loops = 10000;
    CHECK_STATUS(gpushare_gate_enter(gate, stream, 1000000000, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
    CHECK_STATUS(gpushare_stream_launch_host(stream, spin, &loops), GPUSHARE_OK);
  }
  CHECK(info_of(gate).in_flight_ns == 1000000000);
  CHECK_STATUS(gpushare_iteration_end(iteration), GPUSHARE_OK);
  CHECK_STATUS(gpushare_gate_release(own), GPUSHARE_OK);
  CHECK_STATUS(gpushare_gate_release(gate), GPUSHARE_OK);
}

typedef struct waiter {
  gpushare_gate gate;
  int32_t status;
} waiter;

static void* wait_at(void* of) {
  waiter* w = of;
  w->status = gpushare_gate_enter(w->gate, NULL, 1000, GPUSHARE_NO_TIMEOUT);
  return NULL;
}

/* A thread that waits at the gate is let go when the guaranteed iteration ends, or when its own session does. */
static void waits_end(gpushare_runtime runtime, int by_cancel) {
  gpushare_session sure = open_class(runtime, "sure", GPUSHARE_CLASS_GUARANTEED);
  gpushare_session spare = open_class(runtime, "spare", GPUSHARE_CLASS_OPPORTUNISTIC);
  gpushare_iteration iteration = NULL;
  waiter w = {NULL, -1};
  pthread_t thread;
  CHECK_STATUS(gpushare_gate_open(spare, &w.gate), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_begin(sure, GPUSHARE_NO_TIMEOUT, &iteration), GPUSHARE_OK);
  CHECK(pthread_create(&thread, NULL, wait_at, &w) == 0);
  while (info_of(w.gate).waits == 0) {
    const struct timespec little = {0, 100000};
    nanosleep(&little, NULL);
  }
  if (by_cancel)
    CHECK_STATUS(gpushare_session_cancel(spare), GPUSHARE_OK);
  else
    CHECK_STATUS(gpushare_iteration_end(iteration), GPUSHARE_OK);
  CHECK(pthread_join(thread, NULL) == 0);
  CHECK(w.status == (by_cancel ? GPUSHARE_CANCELLED : GPUSHARE_OK));
  if (by_cancel) CHECK_STATUS(gpushare_iteration_end(iteration), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(spare), GPUSHARE_OK);
  CHECK_STATUS(gpushare_gate_enter(w.gate, NULL, 1000, 0), GPUSHARE_CANCELLED);
  CHECK_STATUS(gpushare_session_close(sure), GPUSHARE_OK);
  CHECK_STATUS(gpushare_gate_release(w.gate), GPUSHARE_OK);
}

int main(void) {
  gpushare_runtime runtime = open_runtime("host", "pack", 64 * MIB);
  gpushare_session sure = open_class(runtime, "sure", GPUSHARE_CLASS_GUARANTEED);
  gpushare_session spare = open_class(runtime, "spare", GPUSHARE_CLASS_OPPORTUNISTIC);
  gpushare_gate gate = NULL;
  refusals(runtime, sure, spare);
  guaranteed_closes(sure, spare);
  CHECK_STATUS(gpushare_session_close(sure), GPUSHARE_OK);
  CHECK_STATUS(gpushare_gate_open(spare, &gate), GPUSHARE_OK);
  CHECK(info_of(gate).open == 1);
  CHECK_STATUS(gpushare_session_close(spare), GPUSHARE_OK);
  waits_end(runtime, 0);
  waits_end(runtime, 1);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
  CHECK_STATUS(gpushare_gate_enter(gate, NULL, 1, 0), GPUSHARE_CANCELLED);
  CHECK_STATUS(gpushare_gate_release(gate), GPUSHARE_OK);

  runtime = open_runtime("sim", "pack", 64 * MIB);
  spare = open_class(runtime, "spare", GPUSHARE_CLASS_OPPORTUNISTIC);
  CHECK_STATUS(gpushare_gate_open(spare, &gate), GPUSHARE_UNSUPPORTED);
  CHECK(strstr(gpushare_last_error_message(), "virtual") != NULL);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
  return capi_result();
}
