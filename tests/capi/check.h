/* check.h: a C test's whole framework: CHECK counts and prints, capi_result() is main's return value.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GPUSHARE_TESTS_CAPI_CHECK_H_
#define GPUSHARE_TESTS_CAPI_CHECK_H_

#include <gpushare/gpushare.h>
#include <stdio.h>
#include <string.h>

/* Callbacks check on threads of the library. Relaxed: a count must not order what a test does, or ThreadSanitizer would
 * miss races. */
static int check_count, check_failures;
#define CHECK_ADD(counter) ((void)__atomic_add_fetch(&(counter), 1, __ATOMIC_RELAXED))

#define CHECK(condition)                                                                           \
  do {                                                                                             \
    CHECK_ADD(check_count);                                                                        \
    if (!(condition)) {                                                                            \
      CHECK_ADD(check_failures);                                                                   \
      fprintf(stderr, "%s:%d: CHECK(%s) failed; last error: %s\n", __FILE__, __LINE__, #condition, \
              gpushare_last_error_message());                                                      \
    }                                                                                              \
  } while (0)

/* Checks a status by name, so that a failure prints both. */
#define CHECK_STATUS(call, expected)                                                               \
  do {                                                                                             \
    const int32_t check_status = (call);                                                           \
    CHECK_ADD(check_count);                                                                        \
    if (check_status != (expected)) {                                                              \
      CHECK_ADD(check_failures);                                                                   \
      fprintf(stderr, "%s:%d: %s is %s, expected %s; last error: %s\n", __FILE__, __LINE__, #call, \
              gpushare_status_name(check_status), gpushare_status_name(expected),                  \
              gpushare_last_error_message());                                                      \
    }                                                                                              \
  } while (0)

static inline int capi_result(void) {
  printf("%d checks, %d failures\n", check_count, check_failures);
  return check_failures == 0 && check_count > 0 ? 0 : 1;
}

static inline gpushare_runtime open_runtime(const char* device, const char* policy, uint64_t capacity_bytes) {
  gpushare_runtime runtime = NULL;
  gpushare_runtime_params params = GPUSHARE_RUNTIME_PARAMS_INIT;
  params.device = device;
  params.policy = policy;
  params.capacity_bytes = capacity_bytes;
  CHECK_STATUS(gpushare_runtime_open(&params, &runtime), GPUSHARE_OK);
  return runtime;
}

static inline gpushare_session open_session(gpushare_runtime runtime, const char* name,
                                            uint64_t persistent_bytes, uint64_t ephemeral_bytes) {
  gpushare_session session = NULL;
  gpushare_session_params params = GPUSHARE_SESSION_PARAMS_INIT;
  params.name = name;
  params.persistent_bytes = persistent_bytes;
  params.ephemeral_bytes = ephemeral_bytes;
  CHECK_STATUS(gpushare_session_open(runtime, &params, &session), GPUSHARE_OK);
  return session;
}

#define MIB ((uint64_t)1 << 20)

#endif /* GPUSHARE_TESTS_CAPI_CHECK_H_ */
