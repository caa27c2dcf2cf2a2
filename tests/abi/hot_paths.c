/* The calls that programs make most, for scripts/check-instructions, which counts their instructions.
 *
 *   hot_paths PATH COUNT    makes COUNT rounds of the path: 64 blocks allocated and freed in another order
 *   hot_paths range COUNT   commits 128 granules COUNT times over with one call, for which the device makes memory
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <gpushare/gpushare.h>
#include <gpushare/range.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kBlocks = 64 };

static void must(int32_t status) {
  if (status == GPUSHARE_OK) return;
  fprintf(stderr, "%s\n", gpushare_last_error_message());
  exit(1);
}

static uint64_t size_of(int block) {
  return 512 + 1536 * (uint64_t)(block % 7);
}
/* Each of the numbers below kBlocks once. */
static int nth_freed(int n) {
  return n * 27 % kBlocks;
}

static gpushare_runtime runtime;
static gpushare_session session;
static gpushare_iteration iteration;
static gpushare_allocator allocator;
static gpushare_heap heap;
static void* native;
static gpushare_device_address blocks[kBlocks];

/* A device with virtual time solves a plan in the iteration that asks for it, so that each run is the same. */
static void open_session(int plan) {
  gpushare_runtime_params params = GPUSHARE_RUNTIME_PARAMS_INIT;
  gpushare_session_params need = GPUSHARE_SESSION_PARAMS_INIT;
  params.device = plan ? "sim?total_gib=1&data=0" : "host?total_gib=1";
  must(gpushare_runtime_open(&params, &runtime));
  need.persistent_bytes = 16u << 20;
  need.ephemeral_bytes = 16u << 20;
  need.plan_iterations = plan ? 1 : 0;
  must(gpushare_session_open(runtime, &need, &session));
}

static void begin(void) {
  gpushare_stream stream = NULL;
  must(gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration));
  must(gpushare_iteration_get_stream(iteration, &stream));
  must(gpushare_stream_get_native(stream, &native));
}

static void lane_round(void) {
  for (int i = 0; i < kBlocks; ++i) must(gpushare_iteration_alloc(iteration, size_of(i), 0, &blocks[i]));
  for (int i = 0; i < kBlocks; ++i) must(gpushare_memory_free(runtime, blocks[nth_freed(i)]));
}
static void framework_round(void) {
  for (int i = 0; i < kBlocks; ++i)
    must(gpushare_allocator_alloc(allocator, size_of(i), 0, native, &blocks[i]));
  for (int i = 0; i < kBlocks; ++i) must(gpushare_allocator_free(allocator, blocks[nth_freed(i)], native));
}
static void model_round(void) {
  for (int i = 0; i < kBlocks; ++i)
    must(gpushare_session_alloc(session, GPUSHARE_KIND_MODEL, size_of(i), 0, &blocks[i]));
  for (int i = 0; i < kBlocks; ++i) must(gpushare_memory_free(runtime, blocks[nth_freed(i)]));
}
static void heap_round(void) {
  for (int i = 0; i < kBlocks; ++i) must(gpushare_heap_alloc(heap, size_of(i), &blocks[i]));
  for (int i = 0; i < kBlocks; ++i) must(gpushare_heap_free(heap, blocks[nth_freed(i)]));
}
static void bulk_round(void) {
  uint64_t bytes[kBlocks];
  for (int i = 0; i < kBlocks; ++i) bytes[i] = size_of(i);
  for (int i = 0; i < kBlocks; i += 4)
    must(gpushare_iteration_alloc_many(iteration, 4, bytes + i, 0, blocks + i));
  for (int i = 0; i < kBlocks; i += 4) must(gpushare_memory_free_many(runtime, 4, blocks + i, NULL));
}

static void commit_range(uint64_t granules) {
  gpushare_runtime_params params = GPUSHARE_RUNTIME_PARAMS_INIT;
  gpushare_session_params need = GPUSHARE_SESSION_PARAMS_INIT;
  gpushare_range_params reserved = GPUSHARE_RANGE_PARAMS_INIT;
  gpushare_range range = NULL;
  const uint64_t granule = 2u << 20;
  params.device = "sim?total_gib=64&data=0";
  must(gpushare_runtime_open(&params, &runtime));
  need.ephemeral_bytes = granule;
  must(gpushare_session_open(runtime, &need, &session));
  reserved.reserved_bytes = granules * granule;
  must(gpushare_range_open(session, &reserved, &range));
  must(gpushare_range_commit(range, 0, granules * granule, 0));
  must(gpushare_range_close(range));
  must(gpushare_session_close(session));
  must(gpushare_runtime_close(runtime));
}

int main(int argc, char** argv) {
  const char* path = argc == 3 ? argv[1] : "";
  const long count = argc == 3 ? strtol(argv[2], NULL, 10) : 0;
  void (*round)(void) = NULL;
  const int planned = strcmp(path, "planned") == 0;
  if (strcmp(path, "lane") == 0 || planned) round = lane_round;
  if (strcmp(path, "framework") == 0) round = framework_round;
  if (strcmp(path, "model") == 0) round = model_round;
  if (strcmp(path, "heap") == 0) round = heap_round;
  if (strcmp(path, "bulk") == 0) round = bulk_round;
  const int ranges = strcmp(path, "range") == 0;
  if ((round == NULL && !ranges) || count <= 0) {
    fprintf(stderr, "usage: hot_paths lane|planned|framework|model|heap|bulk|range COUNT\n");
    return 2;
  }
  if (ranges) {
    commit_range((uint64_t)count * 128);
    return 0;
  }
  if (round == heap_round) {
    gpushare_heap_params params = GPUSHARE_HEAP_PARAMS_INIT;
    params.capacity_bytes = 16u << 20;
    must(gpushare_heap_create(&params, &heap));
  } else {
    gpushare_allocator_params params = GPUSHARE_ALLOCATOR_PARAMS_INIT;
    open_session(planned);
    must(gpushare_allocator_create(runtime, &params, &allocator));
    if (!planned) begin();
  }
  /* A plan repeats whole iterations: a round each, once the plan is there. */
  for (int served = !planned; !served;) {
    gpushare_session_info info = GPUSHARE_SESSION_INFO_INIT;
    begin();
    round();
    must(gpushare_iteration_end(iteration));
    must(gpushare_session_get_info(session, &info));
    served = info.planned_iterations > 0;
  }
  for (long i = 0; i < count; ++i) {
    if (planned) begin();
    round();
    if (planned) must(gpushare_iteration_end(iteration));
  }
  if (round == heap_round) {
    must(gpushare_heap_release(heap));
    return 0;
  }
  if (!planned) must(gpushare_iteration_end(iteration));
  must(gpushare_allocator_release(allocator));
  must(gpushare_session_close(session));
  must(gpushare_runtime_close(runtime));
  return 0;
}
