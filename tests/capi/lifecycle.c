/* The life of a runtime, a session, an iteration, a ticket, on host and sim.      SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>

#include "check.h"

static int32_t submitted(void* user_data, gpushare_iteration iteration) {
  gpushare_device_address scratch = 0;
  gpushare_stream stream = NULL;
  int* runs = user_data;
  ++*runs;
  if (gpushare_iteration_alloc(iteration, 4096, 0, &scratch) != GPUSHARE_OK) return GPUSHARE_INTERNAL;
  if (gpushare_iteration_get_stream(iteration, &stream) != GPUSHARE_OK) return GPUSHARE_INTERNAL;
  return gpushare_stream_fill(stream, scratch, 7, 4096);
}

static int32_t failing(void* user_data, gpushare_iteration iteration) {
  (void)user_data;
  (void)iteration;
  return GPUSHARE_QUOTA_EXCEEDED;
}

static int32_t too_late(void* user_data, gpushare_iteration iteration) {
  (void)user_data;
  (void)iteration;
  return GPUSHARE_TIMED_OUT;
}

static int released;
static void count_release(void* user_data) {
  (void)user_data;
  ++released;
}

static void pull(const char* device) {
  gpushare_runtime runtime = open_runtime(device, "fair", 64 * MIB);
  gpushare_session session = open_session(runtime, "pull", 8 * MIB, 16 * MIB);
  gpushare_device_address weights = 0, scratch = 0, second = 0;
  gpushare_session_info info = GPUSHARE_SESSION_INFO_INIT;
  gpushare_runtime_info facts = GPUSHARE_RUNTIME_INFO_INIT;
  gpushare_block_info block = GPUSHARE_BLOCK_INFO_INIT;

  CHECK_STATUS(gpushare_session_wait_admitted(session, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_alloc(session, GPUSHARE_KIND_MODEL, 4 * MIB, 0, &weights), GPUSHARE_OK);
  CHECK(weights % 256 == 0);
  CHECK_STATUS(gpushare_session_alloc(session, GPUSHARE_KIND_FRAMEWORK, 100, 4096, &second), GPUSHARE_OK);
  CHECK(second % 4096 == 0);
  CHECK_STATUS(gpushare_memory_get_info(runtime, second, &block), GPUSHARE_OK);
  CHECK(block.bytes == 100 && block.kind == GPUSHARE_KIND_FRAMEWORK && block.lane == UINT32_MAX);

  for (int step = 0; step < 5; ++step) {
    gpushare_iteration iteration = NULL, nested = NULL;
    CHECK_STATUS(gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration), GPUSHARE_OK);
    CHECK_STATUS(gpushare_iteration_begin(session, 0, &nested), GPUSHARE_INVALID_STATE);
    CHECK_STATUS(gpushare_iteration_alloc(iteration, 10 * MIB, 0, &scratch), GPUSHARE_OK);
    CHECK_STATUS(gpushare_memory_alloc(runtime, NULL, GPUSHARE_KIND_EPHEMERAL, 1 * MIB, 0, &second),
                 GPUSHARE_OK);
    CHECK_STATUS(gpushare_memory_free(runtime, second), GPUSHARE_OK);
    CHECK_STATUS(gpushare_iteration_end(iteration), GPUSHARE_OK);
    CHECK_STATUS(gpushare_iteration_end(iteration), GPUSHARE_INVALID_HANDLE);
    CHECK_STATUS(gpushare_memory_get_info(runtime, scratch, &block), GPUSHARE_NOT_FOUND);
  }
  CHECK_STATUS(gpushare_runtime_synchronize(runtime, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_get_info(session, &info), GPUSHARE_OK);
  CHECK(info.iterations_done == 5 && info.ephemeral_bytes == 0 && info.persistent_bytes >= 4 * MIB);
  CHECK(info.peak_bytes >= 14 * MIB);

  CHECK_STATUS(gpushare_memory_free(runtime, weights), GPUSHARE_OK);
  CHECK_STATUS(gpushare_memory_free(runtime, weights), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_session_close(session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(session), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_runtime_get_info(runtime, &facts), GPUSHARE_OK);
  CHECK(facts.persistent_bytes == 0 && facts.ephemeral_bytes == 0 && facts.promised_bytes == 0);
  CHECK(facts.iterations_done == 5);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_INVALID_HANDLE);
}

static void push(const char* device) {
  gpushare_runtime runtime = open_runtime(device, "fifo", 64 * MIB);
  gpushare_session session = open_session(runtime, "push", 8 * MIB, 16 * MIB);
  gpushare_session other = NULL;
  uintptr_t place = 0;
  gpushare_ticket tickets[20], bad = NULL;
  gpushare_session_info info = GPUSHARE_SESSION_INFO_INIT;
  gpushare_session_params strict = GPUSHARE_SESSION_PARAMS_INIT;
  int runs = 0;
  released = 0;
  for (int i = 0; i < 20; ++i)
    CHECK_STATUS(gpushare_session_submit(session, submitted, &runs, count_release, &tickets[i]), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_drain(runtime, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  for (int i = 0; i < 20; ++i) CHECK_STATUS(gpushare_ticket_wait(tickets[i], 0), GPUSHARE_OK);
  CHECK(runs == 20);
  for (int i = 0; i < 20; ++i) CHECK_STATUS(gpushare_ticket_release(tickets[i]), GPUSHARE_OK);
  CHECK_STATUS(gpushare_ticket_release(tickets[0]), GPUSHARE_INVALID_HANDLE);

  /* A failing iteration is abandoned: its ticket tells why, and the session goes on. */
  CHECK_STATUS(gpushare_session_submit(session, failing, NULL, count_release, &bad), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_submit(session, submitted, &runs, NULL, &tickets[0]), GPUSHARE_OK);
  CHECK_STATUS(gpushare_ticket_wait(bad, GPUSHARE_NO_TIMEOUT), GPUSHARE_QUOTA_EXCEEDED);
  CHECK_STATUS(gpushare_ticket_wait(tickets[0], GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  CHECK_STATUS(gpushare_ticket_release(bad), GPUSHARE_OK);
  CHECK_STATUS(gpushare_ticket_release(tickets[0]), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_get_info(session, &info), GPUSHARE_OK);
  CHECK(info.state == GPUSHARE_SESSION_RESIDENT && info.status == GPUSHARE_OK && info.ephemeral_bytes == 0);
  CHECK(info.iterations_done == 21);
  CHECK_STATUS(gpushare_session_close(session), GPUSHARE_OK);

  /* Of an owner who says so it ends its session alone. */
  strict.name = "strict";
  strict.flags = GPUSHARE_SESSION_ALLOW_QUEUEING | GPUSHARE_SESSION_FAIL_ON_ERROR;
  CHECK_STATUS(gpushare_session_open(runtime, &strict, &session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_submit(session, failing, NULL, count_release, &bad), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_drain(runtime, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  CHECK_STATUS(gpushare_ticket_wait(bad, GPUSHARE_NO_TIMEOUT), GPUSHARE_QUOTA_EXCEEDED);
  CHECK_STATUS(gpushare_ticket_release(bad), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_get_info(session, &info), GPUSHARE_OK);
  CHECK(info.state == GPUSHARE_SESSION_FAILED && info.status == GPUSHARE_QUOTA_EXCEEDED);
  CHECK_STATUS(gpushare_session_submit(session, submitted, &runs, NULL, NULL), GPUSHARE_INVALID_STATE);
  /* Work that is refused leaves no ticket behind: the next one has the place of the last (the low 24 bits of a handle). */
  for (int i = 0; i < 30; ++i)
    CHECK_STATUS(gpushare_session_submit(session, submitted, &runs, NULL, &tickets[0]),
                 GPUSHARE_INVALID_STATE);
  place = (uintptr_t)bad & 0xffffff;
  CHECK_STATUS(gpushare_session_close(session), GPUSHARE_OK);
  /* The function's return value is never taken for a timeout of the wait. */
  session = open_session(runtime, "late", 8 * MIB, 16 * MIB);
  CHECK_STATUS(gpushare_session_submit(session, too_late, NULL, count_release, &bad), GPUSHARE_OK);
  CHECK(((uintptr_t)bad & 0xffffff) == place);
  CHECK_STATUS(gpushare_ticket_wait(bad, GPUSHARE_NO_TIMEOUT), GPUSHARE_CALLBACK_FAILED);
  CHECK(strstr(gpushare_last_error_message(), "TIMED_OUT") != NULL);
  CHECK_STATUS(gpushare_ticket_release(bad), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(session), GPUSHARE_OK);
  other = open_session(runtime, "other", 8 * MIB, 16 * MIB);
  CHECK_STATUS(gpushare_session_submit(other, submitted, &runs, NULL, &bad), GPUSHARE_OK);
  CHECK_STATUS(gpushare_ticket_wait(bad, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  CHECK_STATUS(gpushare_ticket_release(bad), GPUSHARE_OK);
  /* Closing the runtime closes the session. */
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_get_info(other, &info), GPUSHARE_OK);
  CHECK(info.state == GPUSHARE_SESSION_CANCELLED && info.persistent_bytes == 0);
  CHECK(gpushare_session_submit(other, submitted, &runs, NULL, NULL) != GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(other), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(other), GPUSHARE_INVALID_HANDLE);
  CHECK(released == 23);
}

static void many(void) {
  enum { kRounds = 2000 };
  gpushare_runtime runtime = open_runtime("sim", "pack", 64 * MIB);
  gpushare_runtime_info facts = GPUSHARE_RUNTIME_INFO_INIT;
  for (int i = 0; i < kRounds; ++i) {
    gpushare_session session = open_session(runtime, NULL, 1 * MIB, 1 * MIB);
    CHECK_STATUS(gpushare_session_close(session), GPUSHARE_OK);
  }
  CHECK_STATUS(gpushare_runtime_get_info(runtime, &facts), GPUSHARE_OK);
  CHECK(facts.promised_bytes == 0 && facts.sessions_resident == 0 && facts.sessions_queued == 0);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
}

static void* all(void* unused) {
  pull("host");
  pull("sim");
  push("host");
  push("sim");
  many();
  return unused;
}

int main(void) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) /* their code needs more */
  const size_t stack = 4 << 20;
#else
  const size_t stack = 128 << 10; /* what gpushare.h asks for */
#endif
  pthread_attr_t small;
  pthread_t thread;
  CHECK(pthread_attr_init(&small) == 0);
  CHECK(pthread_attr_setstacksize(&small, stack) == 0);
  CHECK(pthread_create(&thread, &small, all, NULL) == 0);
  CHECK(pthread_join(thread, NULL) == 0);
  CHECK(pthread_attr_destroy(&small) == 0);
  return capi_result();
}
