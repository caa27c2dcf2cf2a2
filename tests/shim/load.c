/* A CUDA program that keeps a device busy with kernels of known cost (tests/doubles/cuda_recorder/recorder.h), for tests of shares and turns.
 *
 *   shim_load KERNEL KERNELS SYNC_EVERY [WAY]
 *     KERNEL      spin_200us, ...
 *     KERNELS     how many; 0: until it is killed
 *     SYNC_EVERY  waits for the stream after so many; 0: only at the end
 *     WAY         launch (default), ex, cooperative, ptsz (per-thread default stream), streams (4, in turn), graph (SYNC_EVERY kernels a launch),
 *                 node (the same, made of nodes), copy (copies of 1 MiB to the device instead of kernels), moves (a block of 6 MiB of whose
 *                 bytes some are written before each kernel and compared after it), threads (8, each with a stream of its own)
 *
 * Opens libcuda.so.1 as programs do, or GPUSHARE_CUDA_DRIVER. Prints "ready" when it begins, and at the end the milliseconds between its first
 * and its last work on the device's clock. Exit code 1: a call failed, or a byte was lost, said on stderr.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Arguments beyond those that a function has do no harm here: all are pointers or words. */
typedef int (*function)();
static void* g_driver;
static function find(const char* name) {
  function found;
  *(void**)&found = dlsym(g_driver, name);
  if (found == NULL) {
    fprintf(stderr, "load: no %s\n", name);
    exit(1);
  }
  return found;
}
static void check(int result, const char* call) {
  if (result == 0) return;
  fprintf(stderr, "load: %s returned %d\n", call, result);
  exit(1);
}
#define CALL(name, ...) check(find(#name)(__VA_ARGS__), #name)

struct config {
  unsigned words[7], padding;
  void* stream;
  void* attributes;
  unsigned count;
};
struct node {
  void* function;
  unsigned words[7], padding;
  void** parameters;
  void* extra;
  void* more[2];
};

static void *g_context, *g_kernel;
static uint64_t g_kernels, g_sync_every;
static void launch(void* stream) {
  CALL(cuLaunchKernel, g_kernel, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
}
static void* one_thread(void* unused) {
  void* stream;
  CALL(cuCtxSetCurrent, g_context);
  CALL(cuStreamCreate, &stream, 1u);
  for (uint64_t done = 1; g_kernels == 0 || done <= g_kernels; ++done) {
    launch(stream);
    if (g_sync_every != 0 && done % g_sync_every == 0) CALL(cuStreamSynchronize, stream);
  }
  CALL(cuStreamSynchronize, stream);
  return unused;
}
/* Writes to one of 16 places of the block, and gives the device a kernel; the bytes that were written there last must be those. */
static void touch(uint64_t block, uint64_t bytes, uint64_t step, void* stream) {
  const uint64_t place = block + step % 16 * (bytes / 16);
  uint64_t word = 0;
  if (step >= 16) CALL(cuMemcpyDtoH_v2, &word, place, (uint64_t)8);
  if (step >= 16 && word != step - 16) {
    fprintf(stderr, "load: step %llu reads %llu\n", (unsigned long long)step, (unsigned long long)word);
    exit(1);
  }
  CALL(cuMemcpyHtoD_v2, place, &step, (uint64_t)8);
  launch(stream);
}

int main(int argc, char** argv) {
  const char* way = argc > 4 ? argv[4] : "launch";
  void *module = NULL, *kernel, *streams[4], *first, *last, *graph = NULL, *exec = NULL;
  const uint64_t block_bytes = (uint64_t)(strcmp(way, "moves") == 0 ? 6 : 1) << 20;
  uint64_t block = 0, done = 0, kernels, sync_every;
  float milliseconds = 0;
  if (argc < 4) return 2;
  g_kernels = kernels = strtoull(argv[2], NULL, 10);
  g_sync_every = sync_every = strtoull(argv[3], NULL, 10);
  g_driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (g_driver == NULL && getenv("GPUSHARE_CUDA_DRIVER") != NULL)
    g_driver = dlopen(getenv("GPUSHARE_CUDA_DRIVER"), RTLD_NOW);
  if (g_driver == NULL) {
    fprintf(stderr, "load: %s\n", dlerror());
    return 1;
  }
  const int graphs = strcmp(way, "graph") == 0 || strcmp(way, "node") == 0;
  const int per_thread = strcmp(way, "ptsz") == 0;
  struct config config = {{1, 1, 1, 1, 1, 1, 0}, 0, NULL, NULL, 0};
  CALL(cuInit, 0u);
  CALL(cuDevicePrimaryCtxRetain, &g_context, 0);
  CALL(cuCtxSetCurrent, g_context);
  CALL(cuModuleLoadData, &module, "image");
  CALL(cuModuleGetFunction, &kernel, module, argv[1]);
  g_kernel = kernel;
  for (int i = 0; i < 4; ++i) CALL(cuStreamCreate, &streams[i], 1u);
  CALL(cuEventCreate, &first, 0u);
  CALL(cuEventCreate, &last, 0u);
  const int moves = strcmp(way, "moves") == 0;
  if (moves || strcmp(way, "copy") == 0) CALL(cuMemAlloc_v2, &block, block_bytes);
  if (graphs && sync_every == 0) sync_every = 1;
  if (strcmp(way, "graph") == 0) {
    CALL(cuStreamBeginCapture_v2, streams[0], 0);
    for (uint64_t i = 0; i < sync_every; ++i)
      CALL(cuLaunchKernel, kernel, 1, 1, 1, 1, 1, 1, 0, streams[0], NULL, NULL);
    CALL(cuStreamEndCapture, streams[0], &graph);
  } else if (graphs) {
    struct node node = {kernel, {1, 1, 1, 1, 1, 1, 0}, 0, NULL, NULL, {NULL, NULL}};
    void* made;
    CALL(cuGraphCreate, &graph, 0);
    for (uint64_t i = 0; i < sync_every; ++i)
      CALL(cuGraphAddKernelNode_v2, &made, graph, NULL, (uint64_t)0, &node);
  }
  if (graphs) CALL(cuGraphInstantiateWithFlags, &exec, graph, (uint64_t)0);
  void* const main_stream = per_thread ? NULL : streams[0];
  printf("ready\n");
  fflush(stdout);
  if (per_thread)
    CALL(cuEventRecord_ptsz, first, NULL);
  else
    CALL(cuEventRecord, first, main_stream);
  if (strcmp(way, "threads") == 0) {
    pthread_t threads[8];
    for (int i = 0; i < 8; ++i) pthread_create(&threads[i], NULL, one_thread, NULL);
    for (int i = 0; i < 8; ++i) pthread_join(threads[i], NULL);
    kernels = done = 1;
  }
  while (kernels == 0 || done < kernels) {
    void* stream = strcmp(way, "streams") == 0 ? streams[done % 4] : streams[0];
    uint64_t more = 1;
    if (graphs) {
      CALL(cuGraphLaunch, exec, stream);
      more = sync_every;
    } else if (strcmp(way, "ex") == 0) {
      config.stream = stream;
      CALL(cuLaunchKernelEx, &config, kernel, NULL, NULL);
    } else if (strcmp(way, "cooperative") == 0) {
      CALL(cuLaunchCooperativeKernel, kernel, 1, 1, 1, 1, 1, 1, 0, stream, NULL);
    } else if (per_thread) {
      CALL(cuLaunchKernel_ptsz, kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    } else if (strcmp(way, "copy") == 0) {
      CALL(cuMemcpyHtoDAsync_v2, block, &block, block_bytes, stream);
    } else if (moves) {
      touch(block, block_bytes, done, stream);
    } else {
      launch(stream);
    }
    done += more;
    if (sync_every == 0 || done % sync_every != 0) continue;
    if (per_thread)
      CALL(cuStreamSynchronize_ptsz, NULL);
    else if (stream != streams[0] || strcmp(way, "streams") == 0)
      check(find("cuCtxSynchronize")(), "cuCtxSynchronize");
    else
      CALL(cuStreamSynchronize, stream);
  }
  if (per_thread)
    CALL(cuEventRecord_ptsz, last, NULL);
  else
    CALL(cuEventRecord, last, main_stream);
  check(find("cuCtxSynchronize")(), "cuCtxSynchronize");
  CALL(cuEventElapsedTime, &milliseconds, first, last);
  printf("%.3f\n", (double)milliseconds);
  return 0;
}
