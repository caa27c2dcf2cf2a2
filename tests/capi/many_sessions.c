/* 10^6 sessions opened and closed, up to 64 at a time: nothing grows, no handle of the dead is taken for one of the living, the
 * device comes back to its first state. SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "check.h"

enum { kAtOnce = 64, kKept = 4096 };
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

/* Resident pages of this process; 0 where that cannot be told. */
static uint64_t resident_kib(void) {
  unsigned long total = 0, resident = 0;
  FILE* file = fopen("/proc/self/statm", "r");
  if (file == NULL) return 0;
  if (fscanf(file, "%lu %lu", &total, &resident) != 2) resident = 0;
  fclose(file);
  return (uint64_t)resident * 4;
}

static uint64_t sessions_wanted(void) {
  const char* text = getenv("GPUSHARE_SESSIONS");
  return text != NULL ? strtoull(text, NULL, 10) : SANITIZED ? 50000 : 1000000;
}

static void churn(const char* device, uint64_t total) {
  static gpushare_session dead[kKept];
  gpushare_session open[kAtOnce] = {NULL};
  gpushare_runtime runtime = open_runtime(device, "fair", 256 * MIB);
  gpushare_runtime_info facts = GPUSHARE_RUNTIME_INFO_INIT;
  gpushare_session_info info = GPUSHARE_SESSION_INFO_INIT;
  gpushare_session_params params = GPUSHARE_SESSION_PARAMS_INIT;
  uint64_t first_kib = 0, random = 88172645463325252u, refused = 0, worked = 0, dead_count = 0, last_id = 0;
  params.ephemeral_bytes = 2 * MIB;
  for (uint64_t i = 0; i < total; ++i) {
    random ^= random << 13, random ^= random >> 7, random ^= random << 17;
    gpushare_session* slot = &open[random % kAtOnce];
    if (*slot != NULL) {
      if (gpushare_session_close(*slot) != GPUSHARE_OK) break;
      dead[dead_count++ % kKept] = *slot;
    }
    params.persistent_bytes = (random >> 8) % 3 * MIB;
    *slot = NULL;
    if (gpushare_session_open(runtime, &params, slot) != GPUSHARE_OK) break;
    if (i % 16 == 0) { /* some do something */
      gpushare_iteration iteration = NULL;
      gpushare_device_address block = 0;
      worked += gpushare_iteration_begin(*slot, GPUSHARE_NO_TIMEOUT, &iteration) == GPUSHARE_OK &&
                gpushare_iteration_alloc(iteration, MIB, 0, &block) == GPUSHARE_OK &&
                gpushare_iteration_end(iteration) == GPUSHARE_OK;
    }
    if (i % 64 == 0 && dead_count > 0) /* one of those closed long ago, or just now */
      refused += gpushare_session_get_info(dead[(random >> 16) % (dead_count < kKept ? dead_count : kKept)],
                                           &info) == GPUSHARE_INVALID_HANDLE;
    if (i % 1024 == 0) {
      CHECK_STATUS(gpushare_session_get_info(*slot, &info), GPUSHARE_OK);
      CHECK(info.session_id > last_id); /* ids are not used again */
      last_id = info.session_id;
    }
    if (i == total / 10) first_kib = resident_kib();
  }
  CHECK(last_id + 1024 >= total);
  CHECK(worked == (total + 15) / 16);
  CHECK(refused + 1 >= total / 64);
  for (int i = 0; i < kAtOnce; ++i)
    if (open[i] != NULL) CHECK_STATUS(gpushare_session_close(open[i]), GPUSHARE_OK);
  CHECK(SANITIZED || resident_kib() <= first_kib + 8 * 1024); /* sanitizers keep freed memory */
  open[0] = open_session(runtime, "the last one", 100 * MIB, 100 * MIB);
  CHECK_STATUS(gpushare_session_wait_admitted(open[0], GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(open[0]), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_get_info(runtime, &facts), GPUSHARE_OK);
  CHECK(facts.sessions_resident == 0 && facts.sessions_queued == 0 && facts.lanes == 0);
  CHECK(facts.promised_bytes == 0 && facts.persistent_bytes == 0 && facts.ephemeral_bytes == 0);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
}

int main(void) {
  churn("sim", sessions_wanted());
  churn("host", sessions_wanted() / 50);
  return capi_result();
}
