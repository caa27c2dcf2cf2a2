/* Sessions that spill: limits and budgets of the runtime, and that bytes come home under their addresses.
 * SPDX-License-Identifier: Apache-2.0 */
#include "check.h"

static int all_are(const unsigned char* bytes, uint64_t count, unsigned char value) {
  for (uint64_t i = 0; i < count; ++i)
    if (bytes[i] != value) return 0;
  return 1;
}

static void iterate(gpushare_session session) {
  gpushare_iteration iteration = NULL;
  CHECK_STATUS(gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_end(iteration), GPUSHARE_OK);
}

int main(void) {
  gpushare_runtime runtime = NULL;
  gpushare_session session = NULL;
  gpushare_runtime_params params = GPUSHARE_RUNTIME_PARAMS_INIT;
  gpushare_session_params need = GPUSHARE_SESSION_PARAMS_INIT;
  gpushare_session_info info = GPUSHARE_SESSION_INFO_INIT;
  gpushare_block_info spilled = GPUSHARE_BLOCK_INFO_INIT;
  gpushare_device_address block = 0, refused = 0;
  uint64_t home = 0;
  params.device = "host?total_bytes=134217728";
  params.layout = GPUSHARE_LAYOUT_VIRTUAL;
  params.spill_limit_bytes = 24 * MIB;
  params.spill_move_bytes = 4 * MIB;
  params.spill_move_ns = 1000000000;
  params.spill_move_loss = 1e9; /* moves may take all of the session's time */
  CHECK_STATUS(gpushare_runtime_open(&params, &runtime), GPUSHARE_OK);
  need.name = "spills";
  need.flags = GPUSHARE_SESSION_ALLOW_QUEUEING | GPUSHARE_SESSION_ALLOW_SPILL;
  need.persistent_bytes = 2 * MIB;
  need.ephemeral_bytes = 2 * MIB;
  need.quota_bytes = 8 * MIB;
  CHECK_STATUS(gpushare_session_open(runtime, &need, &session), GPUSHARE_OK);
  iterate(session);

  /* Above the quota: host memory, up to its limit. */
  CHECK_STATUS(gpushare_session_alloc(session, GPUSHARE_KIND_MODEL, 20 * MIB, 0, &block), GPUSHARE_OK);
  memset((void*)(uintptr_t)block, 0x5A, 20 * MIB);
  CHECK_STATUS(gpushare_session_alloc(session, GPUSHARE_KIND_MODEL, 12 * MIB, 0, &refused),
               GPUSHARE_QUOTA_EXCEEDED);
  CHECK_STATUS(gpushare_session_get_info(session, &info), GPUSHARE_OK);
  CHECK(info.spilled_bytes == 20 * MIB && info.home_bytes == 0);
  CHECK_STATUS(gpushare_memory_get_info(runtime, block, &spilled), GPUSHARE_OK);
  CHECK(spilled.spilled == 1 && spilled.kind == GPUSHARE_KIND_MODEL && spilled.bytes == 20 * MIB);
  CHECK(spilled.session_id == info.session_id);

  /* Without the quota it comes home, a little before each iteration. */
  CHECK_STATUS(gpushare_session_set_quota(session, 0), GPUSHARE_OK);
  for (int i = 0; i < 100 && info.spilled_bytes > 0; ++i) {
    iterate(session);
    CHECK_STATUS(gpushare_session_get_info(session, &info), GPUSHARE_OK);
    CHECK(info.home_bytes <= home + 4 * MIB);
    home = info.home_bytes;
  }
  CHECK(info.spilled_bytes == 0 && home == 20 * MIB);
  /* The same again: however often it goes, it comes back without a rest. */
  CHECK_STATUS(gpushare_session_set_quota(session, 8 * MIB), GPUSHARE_OK);
  while (info.spilled_bytes < 12 * MIB) {
    iterate(session);
    CHECK_STATUS(gpushare_session_get_info(session, &info), GPUSHARE_OK);
  }
  CHECK_STATUS(gpushare_session_set_quota(session, 0), GPUSHARE_OK);
  for (int i = 0; i < 1000 && info.spilled_bytes > 0; ++i) {
    iterate(session);
    CHECK_STATUS(gpushare_session_get_info(session, &info), GPUSHARE_OK);
  }
  CHECK(info.spilled_bytes == 0);
  CHECK(all_are((const unsigned char*)(uintptr_t)block, 20 * MIB, 0x5A));

  CHECK_STATUS(gpushare_memory_free(runtime, block), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
  return capi_result();
}
