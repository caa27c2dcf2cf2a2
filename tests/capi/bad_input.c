/* Every kind of bad input gets a clear status and changes nothing.      SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "check.h"

static void structs(void) {
  gpushare_runtime runtime = NULL;
  gpushare_runtime_params params = GPUSHARE_RUNTIME_PARAMS_INIT;
  struct {
    gpushare_runtime_params params;
    uint64_t future;
  } larger;
  params.device = "sim";
  CHECK_STATUS(gpushare_runtime_open(NULL, &runtime), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_runtime_open(&params, NULL), GPUSHARE_INVALID_ARGUMENT);
  params.struct_size = 0;
  CHECK_STATUS(gpushare_runtime_open(&params, &runtime), GPUSHARE_INVALID_ARGUMENT);
  CHECK(strstr(gpushare_last_error_message(), "struct_size") != NULL);
  params.struct_size = UINT32_MAX;
  CHECK_STATUS(gpushare_runtime_open(&params, &runtime), GPUSHARE_INVALID_ARGUMENT);
  params.struct_size = sizeof params;
  memset(&larger, 0, sizeof larger);
  larger.params = params;
  larger.params.struct_size = sizeof larger;
  CHECK_STATUS(gpushare_runtime_open(&larger.params, &runtime), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
  larger.future = 1;
  CHECK_STATUS(gpushare_runtime_open(&larger.params, &runtime), GPUSHARE_INVALID_ARGUMENT);
}

static double own_weight(void* user_data, const gpushare_candidate* session) {
  (void)user_data;
  return session->weight;
}

/* A pointer of which struct_size covers a part is not looked at. Backends are tables of pointers too. */
static void partial_structs(void) {
  const char* const nowhere = (const char*)(uintptr_t)0x7fff12345678;
  gpushare_runtime runtime = NULL;
  gpushare_runtime_params params = GPUSHARE_RUNTIME_PARAMS_INIT;
  gpushare_policy_ops ops;
  gpushare_batcher_params batcher_params = GPUSHARE_BATCHER_PARAMS_INIT;
  gpushare_batcher_model model = GPUSHARE_BATCHER_MODEL_INIT;
  gpushare_request request = GPUSHARE_REQUEST_INIT;
  gpushare_batcher batcher = NULL;
  uint32_t index = 0, more;
  params.device = "sim";
  for (more = 0; more < sizeof(void*); ++more) {
    params.lane_finder = nowhere;
    params.interference_file = NULL;
    params.struct_size = (uint32_t)offsetof(gpushare_runtime_params, lane_finder) + more;
    CHECK_STATUS(gpushare_runtime_open(&params, &runtime), GPUSHARE_OK);
    CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
    params.lane_finder = NULL;
    params.interference_file = nowhere;
    params.struct_size = (uint32_t)offsetof(gpushare_runtime_params, interference_file) + more;
    CHECK_STATUS(gpushare_runtime_open(&params, &runtime), GPUSHARE_OK);
    CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
    params.struct_size = sizeof params;
    params.interference_file = NULL;
    memset(&ops, 0, sizeof ops);
    ops.name = "own";
    ops.share = own_weight;
    ops.lane_finder = nowhere;
    ops.struct_size = (uint32_t)offsetof(gpushare_policy_ops, lane_finder) + more;
    params.policy_ops = &ops;
    CHECK_STATUS(gpushare_runtime_open(&params, &runtime), GPUSHARE_OK);
    CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
    ops.lane_finder = NULL;
    memcpy(&ops.release, &nowhere, sizeof nowhere); /* a table that is refused is not released either */
    ops.struct_size = (uint32_t)offsetof(gpushare_policy_ops, release) + more;
    CHECK_STATUS(gpushare_runtime_open(&params, &runtime), GPUSHARE_INVALID_ARGUMENT);
    params.policy_ops = NULL;
  }
  CHECK_STATUS(gpushare_batcher_create(&batcher_params, &batcher), GPUSHARE_OK);
  CHECK_STATUS(gpushare_batcher_add_model(batcher, &model, &index), GPUSHARE_OK);
  for (more = 0; more < sizeof(void*); ++more) {
    request.id = more;
    request.deadline_ns = UINT64_C(1000000000);
    request.feature_count = 2;
    request.features = (const double*)(const void*)nowhere;
    request.struct_size = (uint32_t)offsetof(gpushare_request, features) + more;
    CHECK_STATUS(gpushare_batcher_arrive(batcher, &request, 0), GPUSHARE_INVALID_ARGUMENT);
  }
  CHECK_STATUS(gpushare_batcher_release(batcher), GPUSHARE_OK);
}

static void runtimes(void) {
  gpushare_runtime runtime = NULL;
  gpushare_runtime_params params = GPUSHARE_RUNTIME_PARAMS_INIT;
  gpushare_runtime_info info = GPUSHARE_RUNTIME_INFO_INIT;
  params.device = "tpu";
  CHECK_STATUS(gpushare_runtime_open(&params, &runtime), GPUSHARE_NOT_FOUND);
  CHECK(strstr(gpushare_last_error_message(), "host") != NULL); /* says what there is */
  params.device = "sim?no_such_option=1";
  CHECK_STATUS(gpushare_runtime_open(&params, &runtime), GPUSHARE_INVALID_ARGUMENT);
  params.device = "sim";
  params.policy = "lottery";
  CHECK_STATUS(gpushare_runtime_open(&params, &runtime), GPUSHARE_NOT_FOUND);
  CHECK(strstr(gpushare_last_error_message(), "srtf") != NULL);
  params.policy = "fair";
  params.lane_finder = "first";
  CHECK_STATUS(gpushare_runtime_open(&params, &runtime), GPUSHARE_NOT_FOUND);
  CHECK(strstr(gpushare_last_error_message(), "salus, balanced, compact") != NULL);
  params.lane_finder = NULL;
  params.interference_file = "/";
  CHECK_STATUS(gpushare_runtime_open(&params, &runtime), GPUSHARE_IO_ERROR);
  params.interference_file = NULL;
  params.layout = 99;
  CHECK_STATUS(gpushare_runtime_open(&params, &runtime), GPUSHARE_INVALID_ARGUMENT);
  params.layout = 0;
  params.enqueue_depth = 65;
  CHECK_STATUS(gpushare_runtime_open(&params, &runtime), GPUSHARE_INVALID_ARGUMENT);
  params.enqueue_depth = 0;
  params.capacity_bytes = UINT64_MAX;
  CHECK(gpushare_runtime_open(&params, &runtime) != GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(NULL), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_runtime_close((gpushare_runtime)(uintptr_t)0x1234), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_runtime_get_info(NULL, &info), GPUSHARE_INVALID_HANDLE);
}

static void sessions(void) {
  gpushare_interference entry = GPUSHARE_INTERFERENCE_INIT;
  gpushare_runtime runtime = open_runtime("sim", "fair", 64 * MIB);
  gpushare_session session = NULL, keep = NULL;
  gpushare_session_params params = GPUSHARE_SESSION_PARAMS_INIT;
  gpushare_device_address address = 0;
  gpushare_iteration iteration = NULL;
  gpushare_runtime_info before = GPUSHARE_RUNTIME_INFO_INIT, after = GPUSHARE_RUNTIME_INFO_INIT;

  /* Larger than the device. */
  params.persistent_bytes = 65 * MIB;
  params.ephemeral_bytes = 1 * MIB;
  CHECK_STATUS(gpushare_session_open(runtime, &params, &session), GPUSHARE_EXCEEDS_CAPACITY);
  params.persistent_bytes = UINT64_MAX;
  params.ephemeral_bytes = UINT64_MAX;
  CHECK_STATUS(gpushare_session_open(runtime, &params, &session), GPUSHARE_EXCEEDS_CAPACITY);
  params.persistent_bytes = 1 * MIB;
  params.ephemeral_bytes = 1 * MIB;
  params.weight = -1.0;
  CHECK_STATUS(gpushare_session_open(runtime, &params, &session), GPUSHARE_INVALID_ARGUMENT);
  params.weight = 0.0 / 1.0;
  params.session_class = 7;
  CHECK_STATUS(gpushare_session_open(runtime, &params, &session), GPUSHARE_INVALID_ARGUMENT);
  params.session_class = 0;
  params.flags = 0xff00;
  CHECK_STATUS(gpushare_session_open(runtime, &params, &session), GPUSHARE_INVALID_ARGUMENT);
  params.flags = 0;
  /* The sim device has no partitions. */
  params.compute_units = 1;
  CHECK_STATUS(gpushare_session_open(runtime, &params, &session), GPUSHARE_UNSUPPORTED);
  params.compute_units = 0;

  /* Refused without queueing, with the numbers. */
  keep = open_session(runtime, "keep", 30 * MIB, 30 * MIB);
  params.name = "bert-serving";
  params.persistent_bytes = 20 * MIB;
  CHECK_STATUS(gpushare_session_open(runtime, &params, &session), GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(strstr(gpushare_last_error_message(), "bert-serving") != NULL);

  CHECK_STATUS(gpushare_session_set_weight(keep, 0.0), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_runtime_get_interference(runtime, 0, &entry), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_runtime_get_interference(runtime, 0, NULL), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_runtime_set_capacity(runtime, UINT64_MAX), GPUSHARE_EXCEEDS_CAPACITY);
  CHECK(strstr(gpushare_last_error_message(), "64.00 MiB") != NULL);
  CHECK_STATUS(gpushare_session_alloc(keep, GPUSHARE_KIND_MODEL, 0, 0, &address), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_session_alloc(keep, GPUSHARE_KIND_EPHEMERAL, 1, 0, &address),
               GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_session_alloc(keep, 9, 1, 0, &address), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_session_alloc(keep, GPUSHARE_KIND_MODEL, 1, 3, &address), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_session_alloc(keep, GPUSHARE_KIND_MODEL, 1, 4 * MIB, &address),
               GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_session_alloc(keep, GPUSHARE_KIND_MODEL, UINT64_MAX, 0, &address),
               GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_session_alloc(keep, GPUSHARE_KIND_MODEL, 60 * MIB, 0, &address),
               GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(strstr(gpushare_last_error_message(), "keep") != NULL);
  CHECK_STATUS(gpushare_memory_free(runtime, 0), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_memory_free(runtime, UINT64_MAX), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_memory_alloc(runtime, NULL, GPUSHARE_KIND_MODEL, 1, 0, &address), GPUSHARE_NOT_FOUND);

  /* Ephemeral allocation above everything fails; the iteration and the session go on. */
  CHECK_STATUS(gpushare_iteration_begin(keep, GPUSHARE_NO_TIMEOUT, &iteration), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_alloc(iteration, 0, 0, &address), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_iteration_alloc(iteration, 1000 * MIB, 0, &address), GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK_STATUS(gpushare_iteration_keep(iteration, 12345), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_iteration_alloc(iteration, 20 * MIB, 0, &address), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_end(iteration), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_alloc(iteration, 1, 0, &address), GPUSHARE_INVALID_HANDLE);

  /* Use after close and double close. */
  CHECK_STATUS(gpushare_runtime_get_info(runtime, &before), GPUSHARE_OK);
  session = keep;
  CHECK_STATUS(gpushare_session_close(keep), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(keep), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_session_alloc(session, GPUSHARE_KIND_MODEL, 1, 0, &address), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_iteration_begin(session, 0, &iteration), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_runtime_get_info(runtime, &after), GPUSHARE_OK);
  CHECK(before.promised_bytes > 0 && after.promised_bytes == 0);
  /* A session's handle is not a runtime's. */
  CHECK_STATUS(gpushare_runtime_close((gpushare_runtime)(void*)session), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_open(runtime, &params, &session), GPUSHARE_INVALID_HANDLE);
}

static void heaps(void) {
  gpushare_heap heap = NULL;
  gpushare_heap_params params = GPUSHARE_HEAP_PARAMS_INIT;
  uint64_t a = 0, b = 0, arena = 0;
  const uint64_t lower[] = {0, 5}, upper[] = {5, 5}, size[] = {1, 1};
  uint64_t offsets[2];
  CHECK_STATUS(gpushare_heap_create(&params, &heap), GPUSHARE_INVALID_ARGUMENT);
  params.capacity_bytes = UINT64_MAX;
  CHECK_STATUS(gpushare_heap_create(&params, &heap), GPUSHARE_INVALID_ARGUMENT);
  params.capacity_bytes = 4096;
  params.alignment_bytes = 100;
  CHECK_STATUS(gpushare_heap_create(&params, &heap), GPUSHARE_INVALID_ARGUMENT);
  params.alignment_bytes = 0;
  CHECK_STATUS(gpushare_heap_create(&params, &heap), GPUSHARE_OK);
  CHECK_STATUS(gpushare_heap_alloc(heap, 0, &a), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_heap_alloc(heap, UINT64_MAX, &a), GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK_STATUS(gpushare_heap_alloc(heap, 4096, &a), GPUSHARE_OK);
  CHECK_STATUS(gpushare_heap_alloc(heap, 1, &b), GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK_STATUS(gpushare_heap_free(heap, a + 256), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_heap_free(heap, a), GPUSHARE_OK);
  CHECK_STATUS(gpushare_heap_free(heap, a), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_heap_release(heap), GPUSHARE_OK);
  CHECK_STATUS(gpushare_heap_release(heap), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_heap_alloc(heap, 1, &a), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_placement_solve(2, lower, upper, size, 0, 0, offsets, &arena),
               GPUSHARE_INVALID_ARGUMENT);
  CHECK(strstr(gpushare_last_error_message(), "buffer 1") != NULL);
  CHECK_STATUS(gpushare_placement_solve(1, lower, upper, size, 0, GPUSHARE_NO_TIMEOUT, offsets, &arena),
               GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_placement_solve(1, lower, upper, size, 0, 0, NULL, &arena),
               GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_placement_solve(0, NULL, NULL, NULL, 0, 0, NULL, &arena), GPUSHARE_OK);
  CHECK(arena == 0);
}

static void others(void) {
  gpushare_error_info error = GPUSHARE_ERROR_INFO_INIT;
  gpushare_device_info device = GPUSHARE_DEVICE_INFO_INIT;
  uint32_t count = 0;
  CHECK_STATUS(gpushare_device_count(&count), GPUSHARE_OK);
  CHECK(count >= 2);
  CHECK_STATUS(gpushare_device_get_info(count, &device), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_last_error(&error), GPUSHARE_OK);
  CHECK(error.status == GPUSHARE_INVALID_ARGUMENT &&
        strcmp(error.message, gpushare_last_error_message()) == 0);
  CHECK_STATUS(gpushare_backend_register(NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_backend_load("relative.so"), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_log_set(NULL, NULL, 9), GPUSHARE_INVALID_ARGUMENT);
  CHECK(gpushare_policy_count() == 5 && gpushare_policy_name(5) == NULL);
  CHECK(strcmp(gpushare_status_name(12345), "UNRECOGNIZED") == 0);
}

int main(void) {
  structs();
  partial_structs();
  runtimes();
  sessions();
  heaps();
  others();
  return capi_result();
}
