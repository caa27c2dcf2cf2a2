/* Reservations from C: gangs of 8 by 16 threads without livelock, waiting, cancelling, leases, lost nodes, errors.
 * SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "gpushare/cluster.h"

static int failures;
#define CHECK(condition)                                                  \
  do {                                                                    \
    if (!(condition)) {                                                   \
      ++failures;                                                         \
      fprintf(stderr, "%d: CHECK(%s) failed: %s\n", __LINE__, #condition, \
              gpushare_cluster_last_error_message());                     \
    }                                                                     \
  } while (0)

enum { kThreads = 16, kRounds = 20 };
static gpushare_cluster_table* shared_table;

/* Each thread takes its gang of 8 of the 20 devices, 20 times. */
static void* take_gangs(void* argument) {
  char request[128];
  snprintf(request, sizeof request,
           "{\"owner\": \"t%d\", \"parts\": [{\"needs\": {\"gpu\": 1}, \"count\": 8}]}",
           (int)(size_t)argument);
  size_t granted = 0;
  for (int round = 0; round < kRounds; ++round) {
    uint64_t id = 0;
    char* grant = NULL;
    if (gpushare_cluster_reservation_submit(shared_table, request, &id) != GPUSHARE_OK) continue;
    if (gpushare_cluster_reservation_wait(shared_table, id, UINT64_MAX, &grant) != GPUSHARE_OK) continue;
    gpushare_cluster_text_free(grant);
    if (gpushare_cluster_reservation_release(shared_table, id) == GPUSHARE_OK) ++granted;
  }
  return (void*)granted;
}

static uint64_t waiting_id;
static void* wait_forever(void* argument) {
  (void)argument;
  char* grant = NULL;
  const int32_t status = gpushare_cluster_reservation_wait(shared_table, waiting_id, UINT64_MAX, &grant);
  return (void*)(size_t)status;
}

int main(void) {
  char* text = NULL;
  uint64_t id = 0, other = 0;
  CHECK(gpushare_cluster_table_create(NULL) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(gpushare_cluster_table_create(&shared_table) == GPUSHARE_OK);
  CHECK(gpushare_cluster_table_add_node(shared_table, "a", "{\"gpu\": 12}") == GPUSHARE_OK);
  CHECK(gpushare_cluster_table_add_node(shared_table, "b", "{\"gpu\": 8}") == GPUSHARE_OK);

  pthread_t threads[kThreads];
  for (size_t i = 0; i < kThreads; ++i) CHECK(pthread_create(&threads[i], NULL, take_gangs, (void*)i) == 0);
  for (size_t i = 0; i < kThreads; ++i) {
    void* granted = NULL;
    pthread_join(threads[i], &granted);
    CHECK((size_t)granted == kRounds);
  }
  CHECK(gpushare_cluster_table_status(shared_table, &text) == GPUSHARE_OK);
  CHECK(text != NULL && strstr(text, "\"waiting\":0") != NULL && strstr(text, "\"used\":0.0") != NULL);
  gpushare_cluster_text_free(text);

  /* Granted, explained, waited for in vain, cancelled from another thread. */
  const char* all =
      "{\"owner\": \"x\", \"parts\": [{\"needs\": {\"gpu\": 8}, \"count\": 2, \"apart\": true}]}";
  CHECK(gpushare_cluster_reservation_submit(shared_table, all, &id) == GPUSHARE_OK);
  CHECK(gpushare_cluster_reservation_wait(shared_table, id, 0, &text) == GPUSHARE_OK);
  CHECK(text != NULL && strcmp(text, "{\"alternative\":0,\"nodes\":[[\"a\",\"b\"]]}") == 0);
  gpushare_cluster_text_free(text);
  const char* one = "{\"owner\": \"y\", \"parts\": [{\"needs\": {\"gpu\": 5}}]}";
  CHECK(gpushare_cluster_table_explain(shared_table, one, &text) == GPUSHARE_OK);
  CHECK(text != NULL && strstr(text, "'x'") != NULL);
  gpushare_cluster_text_free(text);
  CHECK(gpushare_cluster_reservation_submit(shared_table, one, &other) == GPUSHARE_OK);
  CHECK(gpushare_cluster_reservation_wait(shared_table, other, 1000, &text) == GPUSHARE_TIMED_OUT);
  waiting_id = other;
  CHECK(pthread_create(&threads[0], NULL, wait_forever, NULL) == 0);
  CHECK(gpushare_cluster_reservation_cancel(shared_table, other) == GPUSHARE_OK);
  void* status = NULL;
  pthread_join(threads[0], &status);
  /* Cancelled before the thread waited: the request is gone already. */
  CHECK((size_t)status == GPUSHARE_CANCELLED || (size_t)status == GPUSHARE_NOT_FOUND);

  /* A lost node ends the grant; what was set by needs moves. */
  CHECK(gpushare_cluster_table_set(shared_table, "x", "home", 1,
                                   "{\"any_of\": [{\"needs\": {\"gpu\": 8}}]}") == GPUSHARE_OK);
  CHECK(gpushare_cluster_table_lose_node(shared_table, "a") == GPUSHARE_OK);
  CHECK(gpushare_cluster_reservation_wait(shared_table, id, 0, &text) == GPUSHARE_DEVICE_LOST);
  /* The last to hear of its end: nothing is kept of it. */
  CHECK(gpushare_cluster_reservation_wait(shared_table, id, 0, &text) == GPUSHARE_NOT_FOUND);
  const char* home = "{\"owner\": \"x\", \"parts\": [{\"needs\": {\"home\": 1}}], \"lease_ms\": 0.001}";
  CHECK(gpushare_cluster_reservation_submit(shared_table, home, &id) == GPUSHARE_OK);
  const char* again = "{\"owner\": \"z\", \"parts\": [{\"needs\": {\"home\": 1}}]}"; /* when the lease ends */
  CHECK(gpushare_cluster_reservation_submit(shared_table, again, &other) == GPUSHARE_OK);
  CHECK(gpushare_cluster_reservation_wait(shared_table, other, UINT64_MAX, &text) == GPUSHARE_OK);
  CHECK(text != NULL && strstr(text, "\"b\"") != NULL);
  gpushare_cluster_text_free(text);
  CHECK(gpushare_cluster_reservation_renew(shared_table, id) == GPUSHARE_INVALID_STATE);
  CHECK(gpushare_cluster_reservation_renew(shared_table, other) == GPUSHARE_OK);
  CHECK(gpushare_cluster_table_end_owner(shared_table, "z") == GPUSHARE_OK);

  /* Errors. */
  CHECK(gpushare_cluster_reservation_submit(shared_table, "{\"owner\": \"x\"}", &id) ==
        GPUSHARE_MALFORMED_INPUT);
  CHECK(gpushare_cluster_reservation_submit(shared_table,
                                            "{\"owner\": \"x\", \"parts\": [{\"needs\": {\"gpu\": -1}}]}",
                                            &id) == GPUSHARE_MALFORMED_INPUT);
  CHECK(strstr(gpushare_cluster_last_error_message(), "parts[0].needs.gpu") != NULL);
  CHECK(gpushare_cluster_reservation_submit(NULL, one, &id) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(gpushare_cluster_reservation_submit(shared_table, NULL, &id) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(gpushare_cluster_reservation_submit(shared_table, one, NULL) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(gpushare_cluster_reservation_wait(shared_table, 999999, 0, &text) == GPUSHARE_NOT_FOUND);
  CHECK(gpushare_cluster_reservation_wait(shared_table, 1, 0, NULL) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(gpushare_cluster_reservation_cancel(shared_table, 999999) == GPUSHARE_INVALID_STATE);
  CHECK(gpushare_cluster_reservation_release(shared_table, 999999) == GPUSHARE_INVALID_STATE);
  CHECK(gpushare_cluster_table_add_node(shared_table, "c", "{\"gpu\": -1}") == GPUSHARE_MALFORMED_INPUT);
  CHECK(gpushare_cluster_table_add_node(shared_table, NULL, "{}") == GPUSHARE_INVALID_ARGUMENT);
  CHECK(gpushare_cluster_table_lose_node(shared_table, "nowhere") == GPUSHARE_NOT_FOUND);
  CHECK(gpushare_cluster_table_set(shared_table, "x", "gpu", 1, "{\"node\": \"b\"}") ==
        GPUSHARE_ALREADY_EXISTS);
  CHECK(gpushare_cluster_table_set(shared_table, "x", "n", 1, "{\"node\": \"nowhere\"}") ==
        GPUSHARE_NOT_FOUND);
  CHECK(gpushare_cluster_table_set(shared_table, "x", "n", 1, "{\"any_of\": [{\"needs\": {\"gpu\": 99}}]}") ==
        GPUSHARE_EXCEEDS_CAPACITY);
  CHECK(gpushare_cluster_table_status(shared_table, NULL) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(gpushare_cluster_table_explain(shared_table, NULL, &text) == GPUSHARE_INVALID_ARGUMENT);
  gpushare_cluster_table_release(shared_table);
  gpushare_cluster_table_release(NULL);
  printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
