/* libgpushare_cluster from C: documents in and out, errors, null pointers. SPDX-License-Identifier: Apache-2.0 */
#include "gpushare/cluster.h"

#include <stdio.h>
#include <string.h>

static int failures;
#define CHECK(condition)                                                  \
  do {                                                                    \
    if (!(condition)) {                                                   \
      ++failures;                                                         \
      fprintf(stderr, "%d: CHECK(%s) failed: %s\n", __LINE__, #condition, \
              gpushare_cluster_last_error_message());                     \
    }                                                                     \
  } while (0)

static const char* const kDocument =
    "{\"version\": 1, \"kind\": \"services\", \"devices\": 1, \"services\": [{\"name\": \"a\", \"rate_rps\": "
    "100,"
    "\"slo_ms\": 50, \"configurations\": [{\"batch\": 4, \"latency_ms\": 10, \"throughput_rps\": 80,"
    "\"memory_percent\": 10, \"ao_percent\": 60}]}]}";

/* A document that says how many rounds are played, and options that say it in its place. */
static void rounds(void) {
  static const char document[] =
      "{\"version\": 1, \"kind\": \"shares\", \"capacity\": 10, \"run\": {\"rounds\": 3}, \"jobs\": "
      "[{\"name\": "
      "\"a\", \"load\": 100, \"slo\": 0.9, \"utility\": \"linear\", \"curve\": [[0, 0], [1, 1]]}]}";
  gpushare_cluster_run_options options = GPUSHARE_CLUSTER_RUN_OPTIONS_INIT;
  char* out = NULL;
  CHECK(gpushare_cluster_run(document, strlen(document), "fair", &options, &out) == GPUSHARE_OK);
  CHECK(out != NULL && strstr(out, "\"rounds\":3,") != NULL);
  gpushare_cluster_text_free(out);
  options.rounds = 5;
  CHECK(gpushare_cluster_run(document, strlen(document), "fair", &options, &out) == GPUSHARE_OK);
  CHECK(out != NULL && strstr(out, "\"rounds\":5,") != NULL);
  gpushare_cluster_text_free(out);
}

int main(void) {
  char* out = NULL;
  rounds();
  CHECK(gpushare_cluster_plan(kDocument, strlen(kDocument), "milp-ao", &out) == GPUSHARE_OK);
  CHECK(out != NULL && strstr(out, "\"goodput_rps\":80.0") != NULL);
  gpushare_cluster_text_free(out);

  CHECK(gpushare_cluster_plan(kDocument, strlen(kDocument), NULL, &out) == GPUSHARE_OK);
  gpushare_cluster_text_free(out);

  CHECK(gpushare_cluster_plan(kDocument, strlen(kDocument) - 1, NULL, &out) == GPUSHARE_MALFORMED_INPUT);
  CHECK(out == NULL);
  CHECK(strstr(gpushare_cluster_last_error_message(), "not JSON") != NULL);
  CHECK(gpushare_cluster_plan(kDocument, strlen(kDocument), "milp-ao,", &out) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(strstr(gpushare_cluster_last_error_message(), "'' is not allowed") != NULL);
  CHECK(gpushare_cluster_plan(NULL, 0, NULL, &out) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(gpushare_cluster_plan(kDocument, 1, NULL, NULL) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(gpushare_cluster_schema(NULL) == GPUSHARE_INVALID_ARGUMENT);

  CHECK(gpushare_cluster_schema(&out) == GPUSHARE_OK);
  CHECK(out != NULL && strstr(out, "\"services\"") != NULL);
  gpushare_cluster_text_free(out);
  gpushare_cluster_text_free(NULL);
  return failures == 0 ? 0 : 1;
}
