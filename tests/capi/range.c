/* Elastic ranges: commit and decommit, two that trade through the function that gives back, silence, bad input. On host
 * and sim, and, given the path of the stand-in for the CUDA driver, on that.
 * SPDX-License-Identifier: Apache-2.0 */
#include "check.h"

typedef struct engine {
  gpushare_range range;
  uint64_t committed, granule;
  int calls, deaf;
} engine;

static uint64_t give_back(void* user_data, uint64_t bytes, uint64_t within_ns) {
  engine* e = user_data;
  const uint64_t gives = bytes < e->committed ? bytes : e->committed;
  ++e->calls;
  if (e->deaf || within_ns == 0) return GPUSHARE_RANGE_NO_ANSWER;
  if (gpushare_range_decommit(e->range, e->committed - gives, gives) != GPUSHARE_OK) return 0;
  e->committed -= gives;
  return gives;
}

static gpushare_range open_range(gpushare_session session, const char* name, engine* owner) {
  gpushare_range_params params = GPUSHARE_RANGE_PARAMS_INIT;
  gpushare_range range = NULL;
  params.name = name;
  params.reserved_bytes = 256 * MIB;
  if (owner != NULL) {
    params.give_back = give_back;
    params.user_data = owner;
    params.answer_ns = 30000000000u;
  }
  CHECK_STATUS(gpushare_range_open(session, &params, &range), GPUSHARE_OK);
  return range;
}

static gpushare_range_info info_of(gpushare_range range) {
  gpushare_range_info info = GPUSHARE_RANGE_INFO_INIT;
  CHECK_STATUS(gpushare_range_get_info(range, &info), GPUSHARE_OK);
  return info;
}

static void trade(const char* device) {
  gpushare_runtime runtime = open_runtime(device, "fair", 64 * MIB);
  gpushare_session one = open_session(runtime, "one", 0, 2 * MIB),
                   two = open_session(runtime, "two", 0, 2 * MIB);
  engine first = {NULL, 0, 0, 0, 0};
  gpushare_range second = open_range(two, NULL, NULL);
  gpushare_range_info info;
  gpushare_stream stream = NULL;
  gpushare_block_info block = GPUSHARE_BLOCK_INFO_INIT;
  first.range = open_range(one, "first", &first);
  info = info_of(first.range);
  first.granule = info.granule_bytes;
  CHECK(info.address != 0 && info.reserved_bytes == 256 * MIB && info.committed_bytes == 0);
  CHECK(info.granule_bytes > 0 && (16 * MIB) % info.granule_bytes == 0);
  CHECK_STATUS(gpushare_range_commit(first.range, 0, 48 * MIB, 0), GPUSHARE_OK);
  first.committed = 48 * MIB;
  /* The bytes are there: for copies, fills, and recorded uses. */
  CHECK_STATUS(gpushare_stream_create(runtime, 0, &stream), GPUSHARE_OK);
  CHECK_STATUS(gpushare_stream_fill(stream, info.address, 7, 48 * MIB), GPUSHARE_OK);
  CHECK_STATUS(gpushare_memory_record_use(runtime, info.address + 5 * MIB, stream), GPUSHARE_OK);
  CHECK_STATUS(gpushare_memory_record_use(runtime, info.address + 48 * MIB, stream), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_memory_get_info(runtime, info.address + 5 * MIB, &block), GPUSHARE_OK);
  CHECK(block.bytes == first.granule);
  CHECK_STATUS(gpushare_memory_free(runtime, info.address), GPUSHARE_NOT_FOUND);
  /* No room at once; then the other one gives. */
  CHECK_STATUS(gpushare_range_commit(second, 0, 32 * MIB, 0), GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(first.calls == 0);
  CHECK_STATUS(gpushare_range_commit(second, 0, 32 * MIB, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  CHECK(first.calls == 1 && first.committed <= 32 * MIB);
  info = info_of(first.range);
  CHECK(info.requests == 1 && info.requested_bytes > 0 && info.silences == 0 && info.silent == 0);
  CHECK(info.committed_bytes == first.committed && info.peak_bytes == 48 * MIB);
  info = info_of(second);
  CHECK(info.waits == 1 && info.longest_wait_ns > 0 && info.waited_ns == info.longest_wait_ns);
  /* It does not answer: who asked is told its name. */
  first.deaf = 1;
  CHECK_STATUS(gpushare_range_commit(second, 32 * MIB, 26 * MIB, GPUSHARE_NO_TIMEOUT),
               GPUSHARE_OK); /* by paging it out */
  CHECK(info_of(first.range).silences == 1 && info_of(second).unanswered_by == 1);
  CHECK_STATUS(gpushare_range_decommit(second, 0, 256 * MIB), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_wait_admitted(one, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  CHECK_STATUS(gpushare_range_decommit(first.range, 0, first.granule), GPUSHARE_OK);
  CHECK(info_of(first.range).silent == 0);
  CHECK_STATUS(gpushare_stream_release(stream), GPUSHARE_OK);
  CHECK_STATUS(gpushare_range_close(first.range), GPUSHARE_OK);
  CHECK_STATUS(gpushare_range_close(first.range), GPUSHARE_INVALID_HANDLE);
  /* A range outlives its session as a handle. */
  CHECK_STATUS(gpushare_session_close(two), GPUSHARE_OK);
  CHECK_STATUS(gpushare_range_commit(second, 0, 2 * MIB, 0), GPUSHARE_INVALID_STATE);
  CHECK(info_of(second).committed_bytes == 0);
  CHECK_STATUS(gpushare_range_close(second), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(one), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
}

static void bad_input(void) {
  gpushare_runtime runtime = open_runtime("host", "fair", 64 * MIB), contiguous = NULL;
  gpushare_session session = open_session(runtime, "one", 0, 2 * MIB), other = NULL;
  gpushare_range_params params = GPUSHARE_RANGE_PARAMS_INIT;
  gpushare_runtime_params layout = GPUSHARE_RUNTIME_PARAMS_INIT;
  gpushare_range_info info = GPUSHARE_RANGE_INFO_INIT;
  gpushare_range range = NULL;
  CHECK_STATUS(gpushare_range_open(session, NULL, &range), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_range_open(session, &params, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_range_open(session, &params, &range), GPUSHARE_INVALID_ARGUMENT); /* 0 bytes */
  params.reserved_bytes = 8 * MIB;
  params.price_ns_per_byte = -1;
  CHECK_STATUS(gpushare_range_open(session, &params, &range), GPUSHARE_INVALID_ARGUMENT);
  params.price_ns_per_byte = 0;
  params.struct_size = 8;
  CHECK_STATUS(gpushare_range_open(session, &params, &range), GPUSHARE_INVALID_ARGUMENT);
  params.struct_size = sizeof params;
  CHECK_STATUS(gpushare_range_open(NULL, &params, &range), GPUSHARE_INVALID_HANDLE);
  CHECK(range == NULL);
  CHECK_STATUS(gpushare_range_open(session, &params, &range), GPUSHARE_OK);
  CHECK_STATUS(gpushare_range_commit(range, 1, 2 * MIB, 0), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_range_commit(range, 8 * MIB, 2 * MIB, 0), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_range_commit(range, 0, 0, 0), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_range_decommit(range, 0, 1), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_range_commit(NULL, 0, 2 * MIB, 0), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_range_decommit(NULL, 0, 2 * MIB), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_range_get_info(range, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_range_get_info(NULL, &info), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_range_close(NULL), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_range_close(range), GPUSHARE_OK);
  layout.device = "host";
  layout.capacity_bytes = 64 * MIB;
  layout.layout = GPUSHARE_LAYOUT_CONTIGUOUS;
  CHECK_STATUS(gpushare_runtime_open(&layout, &contiguous), GPUSHARE_OK);
  other = open_session(contiguous, "other", 0, 2 * MIB);
  CHECK_STATUS(gpushare_range_open(other, &params, &range), GPUSHARE_UNSUPPORTED);
  CHECK_STATUS(gpushare_session_close(other), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(contiguous), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
}

int main(int argc, char** argv) {
  char cuda_device[1024];
  trade("host");
  trade("sim");
  bad_input();
  if (argc > 1) {
    snprintf(cuda_device, sizeof cuda_device, "cuda?driver=%s", argv[1]);
    trade(cuda_device);
  }
  return capi_result();
}
