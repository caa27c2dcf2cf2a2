/* The recording driver: a shared library with every entry point of the CUDA driver, for tests and benchmarks of the shim (src/shim). Most bodies
 * record their arguments and return a scripted result; those that get, free or measure memory keep simple books. Nothing is checked: for
 * that there is the strict stand-in (../README.md). The same library answers as NVML under the name libnvidia-ml.so.1.
 *
 * Threads: the memory functions may be called from any thread; recording is of one thread.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GPUSHARE_TESTS_DOUBLES_RECORDER_H_
#define GPUSHARE_TESTS_DOUBLES_RECORDER_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct recorder_call {
  int entry;     /* number of the row in driver_table.inc */
  int arguments; /* how many */
  unsigned char values[16][64];
} recorder_call;

/* Records the next calls of entry `entry` (-1: of none), which then return `result`. */
void recorder_arm(int entry, int result);
/* What was recorded last; entry -1: nothing since recorder_arm(). */
const recorder_call* recorder_last(void);
/* The function of that entry itself, past anything that is preloaded. */
void* recorder_function(int entry);

/* Bytes of device 0 that are in use: blocks, and the overhead of contexts and modules. */
uint64_t recorder_used_bytes(void);
/* What each context and each module takes beyond blocks; 0 at first, or RECORDER_CONTEXT_BYTES of the environment. */
void recorder_set_overhead(uint64_t context_bytes, uint64_t module_bytes);
/* Whether streams are being captured; whether NVML answers. */
void recorder_set_capturing(int capturing);
void recorder_set_nvml(int answers);
/* Bytes of the allocation node that every graph has from now on; 0: graphs without nodes. */
void recorder_set_graph_bytes(uint64_t bytes);
/* How often work was given to the device: launches, copies, fills, graphs. */
uint64_t recorder_work(void);

#ifdef __cplusplus
}
#endif
#endif
