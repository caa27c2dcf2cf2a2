/* A CUDA program as the shim meets it: finds the driver in one of several ways, asks for memory, prints the driver's answers.
 *
 *   probe WAY ACTION...      WAY: soname, path, default, next, deepbind, table, linked
 *   ACTION: a number of MiB to allocate (prints the result), pin:MiB (the same of the host's memory), wait (for a line of input), info (prints total and free MiB), threads (16 threads that all begin with the
 *   driver at once, each allocating 100 MiB; prints how many got it), hold (waits for ever), churn (allocates and frees for ever), launch
 *   (threads launch kernels while the process exits)
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void* (*finder)(const char* name);

int cuMemAlloc_v2(uint64_t* address, uint64_t bytes); /* linked: the recording driver, or what is before it */
int cuMemGetInfo_v2(uint64_t* free_bytes, uint64_t* total_bytes);
int cuMemFree_v2(uint64_t address);
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void* stream, void** parameters, void** extra);

static void* g_handle;
static void* by_handle(const char* name) {
  return dlsym(g_handle, name);
}
static void* by_next(const char* name) {
  return dlsym(RTLD_NEXT, name);
}
static void* by_default(const char* name) {
  return dlsym(RTLD_DEFAULT, name);
}
static void* by_table(const char* name) {
  int (*find)(const char*, void**, int, uint64_t, int*);
  char base[64];
  void* function = NULL;
  int status = 0;
  *(void**)&find = dlsym(g_handle, "cuGetProcAddress_v2");
  snprintf(base, sizeof base, "%s", name);
  if (strstr(base, "_v2") != NULL) *strstr(base, "_v2") = 0;
  return find(base, &function, 13000, 0, &status) == 0 ? function : NULL;
}
static void* by_link(const char* name) {
  if (strcmp(name, "cuMemAlloc_v2") == 0) return (void*)&cuMemAlloc_v2;
  if (strcmp(name, "cuMemFree_v2") == 0) return (void*)&cuMemFree_v2;
  if (strcmp(name, "cuLaunchKernel") == 0) return (void*)&cuLaunchKernel;
  return (void*)&cuMemGetInfo_v2;
}

static finder choose(const char* way) {
  const char* driver = getenv("PROBE_DRIVER");
  if (strcmp(way, "default") == 0) return by_default;
  if (strcmp(way, "next") == 0) return by_next;
  if (strcmp(way, "linked") == 0) return by_link;
  if (strcmp(way, "deepbind") == 0) {
    /* A library with scope of its own, which finds the driver for this program. */
    void* helper = dlopen(getenv("PROBE_DEEPBIND"), RTLD_NOW | RTLD_DEEPBIND);
    finder found = NULL;
    if (helper != NULL) *(void**)&found = dlsym(helper, "probe_find");
    if (found == NULL) fprintf(stderr, "probe: %s\n", dlerror());
    return found;
  }
  g_handle = dlopen(strcmp(way, "soname") == 0 ? "libcuda.so.1" : driver, RTLD_NOW);
  if (g_handle == NULL) fprintf(stderr, "probe: %s\n", dlerror());
  return g_handle == NULL ? NULL : strcmp(way, "table") == 0 ? by_table : by_handle;
}

static finder g_find;
static int allocate(uint64_t bytes, uint64_t* address) {
  int (*function)(uint64_t*, uint64_t);
  *(void**)&function = g_find("cuMemAlloc_v2");
  return function == NULL ? -1 : function(address, bytes);
}
static pthread_barrier_t g_barrier;
static void* one_thread(void* out) {
  uint64_t address;
  pthread_barrier_wait(&g_barrier);
  *(int*)out = allocate(100u << 20, &address);
  return NULL;
}
static void* launcher(void* unused) {
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                void**);
  *(void**)&launch = g_find("cuLaunchKernel");
  for (;;) launch(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
  return unused;
}

int main(int argc, char** argv) {
  uint64_t address = 0, free_bytes = 0, total = 0;
  if (argc < 3) return 2;
  g_find = choose(argv[1]);
  if (g_find == NULL) return 3;
  for (int i = 2; i < argc; ++i) {
    if (strcmp(argv[i], "hold") == 0) {
      for (;;) pause();
    } else if (strcmp(argv[i], "churn") == 0) {
      int (*release)(uint64_t);
      *(void**)&release = g_find("cuMemFree_v2");
      for (;;)
        if (allocate(64u << 20, &address) == 0) release(address);
    } else if (strcmp(argv[i], "threads") == 0) {
      pthread_t threads[16];
      int results[16], got = 0;
      pthread_barrier_init(&g_barrier, NULL, 16);
      for (int t = 0; t < 16; ++t) pthread_create(&threads[t], NULL, one_thread, &results[t]);
      for (int t = 0; t < 16; ++t) {
        pthread_join(threads[t], NULL);
        got += results[t] == 0;
      }
      printf("%d\n", got);
    } else if (strcmp(argv[i], "launch") == 0) {
      pthread_t thread;
      for (int t = 0; t < 4; ++t) pthread_create(&thread, NULL, launcher, NULL);
      usleep(20000);
      return 7; /* with the threads inside the driver */
    } else if (strncmp(argv[i], "pin:", 4) == 0) {
      int (*pin)(void**, uint64_t, unsigned);
      void* pinned;
      *(void**)&pin = g_find("cuMemHostAlloc");
      printf("%d\n", pin(&pinned, strtoull(argv[i] + 4, NULL, 10) << 20, 0));
    } else if (strcmp(argv[i], "wait") == 0) {
      if (getchar() == EOF) return 4;
    } else if (strcmp(argv[i], "info") == 0) {
      int (*info)(uint64_t*, uint64_t*);
      *(void**)&info = g_find("cuMemGetInfo_v2");
      info(&free_bytes, &total);
      printf("%llu %llu\n", (unsigned long long)(total >> 20), (unsigned long long)(free_bytes >> 20));
    } else {
      printf("%d\n", allocate(strtoull(argv[i], NULL, 10) << 20, &address));
    }
    fflush(stdout);
  }
  return 0;
}
