/* Many blocks in one call, and the lane's door: who may pass it, and who may not. SPDX-License-Identifier: Apache-2.0 */
#include <gpushare/bulk.h>
#include <pthread.h>

#include "check.h"

enum { kBlocks = 200 };

static uint64_t ephemeral_bytes(gpushare_session session) {
  gpushare_session_info info = GPUSHARE_SESSION_INFO_INIT;
  CHECK_STATUS(gpushare_session_get_info(session, &info), GPUSHARE_OK);
  return info.ephemeral_bytes;
}

static gpushare_iteration begin(gpushare_session session) {
  gpushare_iteration iteration = NULL;
  CHECK_STATUS(gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration), GPUSHARE_OK);
  return iteration;
}

static void many_at_once(gpushare_runtime runtime, gpushare_session session) {
  gpushare_device_address blocks[kBlocks] = {0};
  uint64_t bytes[kBlocks], freed = 7;
  gpushare_iteration iteration = begin(session);
  for (int i = 0; i < kBlocks; ++i) bytes[i] = 256 * (uint64_t)(i + 1);
  CHECK_STATUS(gpushare_iteration_alloc_many(iteration, kBlocks, bytes, 0, blocks), GPUSHARE_OK);
  for (int i = 1; i < kBlocks; ++i)
    CHECK(blocks[i] != 0 && blocks[i] % 256 == 0 && blocks[i] != blocks[i - 1]);
  CHECK(ephemeral_bytes(session) == 256 * kBlocks * (kBlocks + 1) / 2);
  CHECK_STATUS(gpushare_memory_free_many(runtime, kBlocks, blocks, &freed), GPUSHARE_OK);
  CHECK(freed == kBlocks && ephemeral_bytes(session) == 0);

  /* all or none */
  bytes[kBlocks / 2] = 1024 * MIB;
  CHECK_STATUS(gpushare_iteration_alloc_many(iteration, kBlocks, bytes, 0, blocks),
               GPUSHARE_DEVICE_OUT_OF_MEMORY);
  bytes[kBlocks / 2] = 0;
  CHECK_STATUS(gpushare_iteration_alloc_many(iteration, kBlocks, bytes, 0, blocks),
               GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_iteration_alloc_many(iteration, 2, bytes, 3, blocks), GPUSHARE_INVALID_ARGUMENT);
  CHECK(ephemeral_bytes(session) == 0);

  /* a large alignment takes the ordinary way */
  CHECK_STATUS(gpushare_iteration_alloc_many(iteration, 2, bytes, 65536, blocks), GPUSHARE_OK);
  CHECK(blocks[0] % 65536 == 0 && blocks[1] % 65536 == 0);

  /* it goes on after one that is no block, and tells the first */
  blocks[2] = blocks[1], blocks[1] = 1;
  CHECK_STATUS(gpushare_memory_free_many(runtime, 3, blocks, &freed), GPUSHARE_NOT_FOUND);
  CHECK(freed == 2 && ephemeral_bytes(session) == 0);
  CHECK_STATUS(gpushare_memory_free_many(runtime, 1, blocks, NULL), GPUSHARE_NOT_FOUND);

  CHECK_STATUS(gpushare_iteration_alloc_many(iteration, 0, NULL, 0, NULL), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_alloc_many(iteration, 1, NULL, 0, blocks), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_iteration_alloc_many(iteration, 1, bytes, 0, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_memory_free_many(runtime, 0, NULL, &freed), GPUSHARE_OK);
  CHECK(freed == 0);
  CHECK_STATUS(gpushare_memory_free_many(runtime, 1, NULL, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_memory_free_many(NULL, 1, blocks, NULL), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_memory_free_many(NULL, 0, NULL, NULL), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_iteration_alloc_many(NULL, 1, bytes, 0, blocks), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_iteration_end(iteration), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_alloc_many(iteration, 1, bytes, 0, blocks), GPUSHARE_INVALID_HANDLE);
}

struct Helper {
  gpushare_runtime runtime;
  gpushare_iteration iteration;
  gpushare_device_address foreign; /* allocated by the main thread */
  int failures;
};

static void* help(void* data) {
  struct Helper* helper = data;
  gpushare_device_address own = 0;
  helper->failures += gpushare_memory_free(helper->runtime, helper->foreign) != GPUSHARE_OK;
  for (int i = 0; i < 1000; ++i) {
    helper->failures += gpushare_iteration_alloc(helper->iteration, 4096, 0, &own) != GPUSHARE_OK;
    helper->failures += gpushare_memory_free(helper->runtime, own) != GPUSHARE_OK;
  }
  return NULL;
}

/* Handles of iterations that are over, other runtimes, other threads. */
static void the_door(gpushare_runtime runtime, gpushare_session session) {
  gpushare_runtime other = open_runtime("host?total_bytes=268435456", "fair", 0);
  gpushare_session neighbour = open_session(other, "neighbour", MIB, 4 * MIB);
  gpushare_device_address block = 0, again = 0;
  gpushare_stream stream = NULL;
  struct Helper helpers[2];
  pthread_t threads[2];
  gpushare_iteration old = begin(session), now, beside;
  CHECK_STATUS(gpushare_iteration_get_stream(old, &stream), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_alloc(old, 4096, 0, &block), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_end(old), GPUSHARE_OK);
  CHECK_STATUS(gpushare_stream_synchronize(stream), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_memory_free(runtime, block), GPUSHARE_NOT_FOUND); /* it went with the iteration */
  now = begin(session);
  CHECK(now != old);
  CHECK_STATUS(gpushare_iteration_alloc(old, 4096, 0, &again), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_iteration_end(old), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_iteration_alloc(now, 4096, 0, &block), GPUSHARE_OK);
  CHECK_STATUS(gpushare_memory_free(other, block), GPUSHARE_NOT_FOUND);
  beside = begin(neighbour);
  CHECK_STATUS(gpushare_iteration_alloc(beside, 4096, 0, &again), GPUSHARE_OK);
  CHECK_STATUS(gpushare_memory_free(runtime, block),
               GPUSHARE_OK); /* not of the iteration it allocated in last */
  CHECK_STATUS(gpushare_memory_free(runtime, block), GPUSHARE_NOT_FOUND);
  /* two iterations in turn, and a runtime's handle that was good until the runtime was closed */
  for (int i = 0; i < 3; ++i) {
    CHECK_STATUS(gpushare_iteration_alloc(now, 4096, 0, &block), GPUSHARE_OK);
    CHECK_STATUS(gpushare_memory_free(runtime, block), GPUSHARE_OK);
    CHECK_STATUS(gpushare_memory_free(other, again), GPUSHARE_OK);
    CHECK_STATUS(gpushare_iteration_alloc(beside, 4096, 0, &again), GPUSHARE_OK);
  }
  CHECK_STATUS(gpushare_memory_free(other, again), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_alloc(beside, 4096, 0, &again), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_alloc(NULL, 4096, 0, &block), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_memory_free(NULL, again), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_iteration_end(beside), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(neighbour), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(other), GPUSHARE_OK);
  CHECK_STATUS(gpushare_memory_free(other, again), GPUSHARE_INVALID_HANDLE);

  for (int i = 0; i < 2; ++i) {
    helpers[i].runtime = runtime, helpers[i].iteration = now, helpers[i].failures = 0;
    CHECK_STATUS(gpushare_iteration_alloc(now, 4096, 0, &helpers[i].foreign), GPUSHARE_OK);
    CHECK(pthread_create(&threads[i], NULL, help, &helpers[i]) == 0);
  }
  for (int i = 0; i < 2; ++i) {
    CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(helpers[i].failures == 0);
  }
  CHECK(ephemeral_bytes(session) == 0);

  /* a quota that is set while the iteration is open holds in it */
  CHECK_STATUS(gpushare_iteration_alloc(now, MIB, 0, &block), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_set_quota(session, MIB), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_alloc(now, MIB, 0, &again), GPUSHARE_QUOTA_EXCEEDED);
  CHECK_STATUS(gpushare_session_set_quota(session, 0), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_alloc(now, MIB, 0, &again), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_end(now), GPUSHARE_OK);
}

int main(void) {
  gpushare_runtime runtime = open_runtime("host?total_bytes=268435456", "fair", 128 * MIB);
  gpushare_session session = open_session(runtime, "bulk", MIB, 16 * MIB);
  many_at_once(runtime, session);
  the_door(runtime, session);
  CHECK_STATUS(gpushare_session_close(session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
  return capi_result();
}
