/* The stand-in for the CUDA driver: a shared library with libcuda's entry points, on host memory. This header
 * is its control interface, for tests that set the stage, plant faults and read what was done wrong. See
 * ../README.md.
 *
 * Threads: every function may be called from any thread.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GPUSHARE_TESTS_DOUBLES_STANDIN_H_
#define GPUSHARE_TESTS_DOUBLES_STANDIN_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Sets one property of the imaginary machine; 0, or -1 for an unknown key. Also from the environment, when
 * the library is loaded: CUDA_STANDIN="devices=2,memory_bytes=4294967296". Set before the first context is
 * made, except those of NVML and those after copy_bytes_per_s. "-1" is a value; costs takes "h100" as well.
 *   devices             1
 *   memory_bytes        1 GiB    of each device
 *   multiprocessors     132
 *   sm_granularity      8        smallest share of them; 0 = devices without green contexts
 *   granularity_bytes   2 MiB    of virtual memory; 0 = devices without it
 *   driver_version      13000    symbols that are newer are absent from cuGetProcAddress
 *   other_user_bytes    0        memory of each device that somebody else holds
 *   context_bytes       500 MiB  memory that each context takes beside its blocks
 *   module_bytes        64 KiB   memory that each loaded module takes
 *   page_bytes          2 MiB    blocks take whole pages; those below half a page share pages
 *   fill                1        new memory holds 0xA5, in the first and last 4 KiB of it and of each 2 MiB; 0 = zeros
 *   hidden              1        the host cannot touch device addresses, only copies and kernels can (standin_storage);
 *                                0 = it can
 *   host_numa_id        0        attribute 134: the node nearest to a device; -1 = the machine has none
 *   host_numa_memory    1        attribute 141: whether physical memory of a node can be had
 *   host_numa_pools     1        attribute 142
 *   host_memory         1        attribute 145: whether physical memory of the host without a node can be had
 *   host_create_fails   0        the result of cuMemCreate for memory of the host; 0 = it succeeds
 *   hardware_queues     8        queues that all streams of a context share in turn. Ops of one queue begin in the order in which
 *                                they were enqueued; 0 = each stream has one of its own
 *   event_step_ns       500      resolution of events' times
 *   late_wake_ns        0        a thread that waits is woken so much later than what it waits for
 *   doorbell_spin_ns    0        a stream's thread looks for new work so long before it sleeps: a GPU does not sleep
 *   nvml_lists_process  1        0: NVML does not list this process, as in a namespace of process ids of its own
 *   nvml_others         0        so many processes of others are before this one in NVML's list
 *   nvml_hangs          0        1: NVML does not answer for processes until this is 0 again
 *   hanging_device      0        above 0: the device with that number less 1 gets no primary context until this is 0 again
 *   mig_instances       0        above 0: each GPU is divided by MIG into so many instances of equal memory, and a process sees one device, as
 *                                with a real driver
 *   costs               0        1 or "h100": standin_cost_ns() counts what calls would cost there
 *   copy_bytes_per_s    0        bandwidth of copies between host and device; 0 = as fast as memory
 *   pinned_limit_bytes  0        how much host memory can be pinned; 0 = no limit
 *   serial_host_functions 1      host functions of all streams of a context run one at a time, as the driver may;
 *                                0 = a thread a stream
 *   leaks               1        objects alive at exit end the process with status 99; 0 = they may: PyTorch never
 *                                releases its context and streams */
int standin_configure(const char* key, uint64_t value);

/* ---- faults on demand
 * ---------------------------------------------------------------------------------------- */

/* The at_call-th call from now (1 = the next) of the entry point `name` ("cuMemAlloc", without suffix; "" =
 * any) returns `result` and does nothing. Several may be armed. */
void standin_fail_call(const char* name, uint64_t at_call, int result);
/* The same, but the call succeeds and the work that it enqueues fails with `result` when it runs, which
 * poisons its context: a sticky error. */
void standin_fail_work(const char* name, uint64_t at_call, int result);
/* Poisons the primary context of `device` at once. */
void standin_poison(int device, int result);
void standin_clear_faults(void);

/* ---- misuse
 * ---------------------------------------------------------------------------------------------------- */

/* How many misuses are recorded and not yet taken. */
size_t standin_misuse_count(void);
/* Takes the oldest: writes at most `size` bytes of "cuMemFree#45: ..." with its NUL. 1, or 0 if there is
 * none. Misuse that was not taken is printed when the process ends, and the process ends with status 99.
 * CUDA_STANDIN_ABORT=1 aborts at the misuse itself, for a debugger. */
int standin_take_misuse(char* text, size_t size);
/* Everything alive now: writes one line an object ("stream of cuStreamCreate#7") and returns their number.
 * Objects of a poisoned context do not count. The same list ends the process with status 99 when it exits. */
size_t standin_leaks(char* text, size_t size);

/* With costs=h100: what the calls so far would have taken on an H100, in ns: for each handle cuMemCreate 29 us, cuMemMap 8,
 * cuMemSetAccess 38, cuMemUnmap 34, cuMemRelease 23; pinning 0.4 s a GB; a context 0.3 s. The calls themselves take no longer. */
uint64_t standin_cost_ns(void);

/* Where the host, and so the function of a kernel, finds the bytes of a device address. The address itself if the host may
 * touch it, or if nothing is there. */
void* standin_storage(uint64_t address);

/* How often the entry point was called, failures included. */
uint64_t standin_calls(const char* name);

/* ---- kernels
 * --------------------------------------------------------------------------------------------------- */

typedef struct standin_launch {
  unsigned grid[3];
  unsigned block[3];
  void** params; /* copies of the launch's parameters */
} standin_launch;
/* Called on the stream's thread, once a launch. */
typedef void (*standin_kernel)(const standin_launch* launch);
/* Reports every range that the launch will touch, so that they are checked like those of a copy. */
typedef void (*standin_touch)(void* sink, uint64_t address, uint64_t bytes, int writes);
typedef void (*standin_accesses)(const standin_launch* launch, standin_touch touch, void* sink);

/* Makes cuModuleGetFunction find `name` in any module. `param_bytes` has `param_count` sizes. `accesses` may
 * be null: nothing is checked then. Replaces an earlier one of that name. */
void standin_register_kernel(const char* name, standin_kernel kernel, const size_t* param_bytes,
                             size_t param_count, standin_accesses accesses);

#ifdef __cplusplus
}
#endif
#endif
