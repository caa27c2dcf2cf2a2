/* The recording driver: a shared library with every entry point of the CUDA driver, for tests and benchmarks of the
 * shim (src/shim). Most bodies record their arguments and return a scripted result; those that get, free or measure
 * memory keep simple books. Nothing is checked: for that there is the strict stand-in (../README.md). The same library
 * answers as NVML under the name libnvidia-ml.so.1.
 *
 * With RECORDER_DEVICE=FILE all processes that name the same file share one device: its memory, and a clock on which
 * their work takes time.
 *
 * With RECORDER_HOST_NODES=1 the driver has virtual memory with physical memory of the host, as from 12.2 on.
 *
 * With RECORDER_DEVICES=3b,3c the machine has two devices, with these buses; without it one, with bus 3b. The shared
 * device of each is then a file of its own: RECORDER_DEVICE with ".3b" behind it.
 *
 * With RECORDER_VERSION=14000 (or another number) cuGetProcAddress has a newer version of every function for whoever asks for
 * that version of CUDA. The library also exports two names that driver_table.inc has not got: cuOfTomorrow, and
 * cuMemAlloc_v9, a version of a function that it has; and nvmlDeviceGetMemoryInfo_v9, a version that the shim does not know.
 *
 * With RECORDER_NO_ADDRESS in the environment no device has a PCI address: cuDeviceGetPCIBusId fails.
 *
 * Threads: the memory functions and those of the shared device may be called from any thread; recording is of one thread.
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
/* The last recorded call; entry -1: nothing since recorder_arm(). */
const recorder_call* recorder_last(void);
/* The function of that entry itself, past anything that is preloaded. */
void* recorder_function(int entry);

/* Bytes of device 0 that are in use: blocks, and the overhead of contexts and modules. */
uint64_t recorder_used_bytes(void);
uint64_t recorder_used_bytes_of(int device);
/* Bytes of pinned host memory; how far a device sees such memory from where the host does (0: unified addresses). */
uint64_t recorder_host_bytes(void);
void recorder_set_host_offset(uint64_t bytes);
/* Sets the bytes that each context and each module takes beyond blocks; 0 at first, or RECORDER_CONTEXT_BYTES of the
 * environment. */
void recorder_set_overhead(uint64_t context_bytes, uint64_t module_bytes);
/* So many more copies between blocks of virtual memory go on from now on, each for 10 ms or longer, and the next one waits.
 * UINT64_MAX: all do, as at first, and take no longer than they need. How many there were. */
void recorder_let_copies(uint64_t copies);
uint64_t recorder_copies(void);
/* Physical memory of the host is refused from so many bytes on, those that there are included; at first no bound. */
void recorder_set_host_limit(uint64_t bytes);
/* Whether streams are being captured; whether NVML answers (2: it hangs until this is called again; 3: it
 * does not list this process, as in a container with process numbers of its own). */
void recorder_set_capturing(int capturing);
void recorder_set_nvml(int answers);
/* So many processes of others (of number 1) are before this one in NVML's lists; 0 at first. */
void recorder_set_nvml_others(int processes);
/* How often NVML was asked for the processes that have memory. */
uint64_t recorder_nvml_looks(void);
/* What nvmlDeviceSetMemoryLimits_v1 answers from now on: 0, or an error (3: not supported, 4: no permission). */
void recorder_set_limits(int answer);
/* The limits that NVML has set last, and how often it was asked to. */
uint64_t recorder_limits(char* cgroup, uint64_t size, uint64_t* soft, uint64_t* hard);
/* Sets how pools treat memory that is freed on a stream: 0 (at first) give it back; 1 keep it until they are trimmed or
 * give it out again; 2 the same, and a trim frees nothing before the context is synchronised; 3 a trim frees nothing.
 * recorder_trims() counts the trims. */
void recorder_set_pools(int mode);
uint64_t recorder_trims(void);
/* Bytes of the allocation node that every graph has from now on; 0: graphs without nodes. */
void recorder_set_graph_bytes(uint64_t bytes);
/* How many such nodes a graph has, the first of the first device and so on; 1 at first. */
void recorder_set_graph_devices(int devices);
/* The nodes have memory from the first launch of their executable graph on, also when that has been destroyed. This frees all
 * of it; the device has it back after cuDeviceGraphMemTrim. */
void recorder_free_graph_memory(void);
/* How often work was given to the device: launches, copies, fills, graphs. */
uint64_t recorder_work(void);

/* ---- one device for all processes of a test ----
 *
 * RECORDER_DEVICE names a file (in /dev/shm, best), which the first process makes with the settings of
 * RECORDER_DEVICE_SETTINGS, or a test with recorder_device_create(). Delete it when the test ends. RECORDER_LABEL names
 * a process in what recorder_device_read() returns.
 *
 * Settings, "key=value,...":
 *   capacity_bytes    80 GiB
 *   side_by_side      0         0: processes get the compute engine by time slices. 1: all run at once, each at its part of the speed
 *   slice_ns          2000000   a time slice; one that has no more work gives it up at once
 *   switch_ns         0         between the slices of two processes: the compute engine runs nothing
 *   kernel_ns         10000     cost of a kernel that does not say
 *   copy_ns           1000      cost of a copy, and beyond it its bytes by:
 *   copy_bytes_per_s  25e9      between host and device, on an engine of its own that all processes share
 *   fill_bytes_per_s  1e12      within the device, on the compute engine
 *   dilation          1         host nanoseconds in a nanosecond of the device: 10 = a device that is slower by 10
 *
 * Kernels: the name that cuModuleGetFunction or cuLibraryGetKernel is asked for holds the cost: "spin_200us",
 * "spin_3ms", "spin_500ns"; with "_w25" it fills a quarter of the device, so that four of one process (or of several,
 * side by side) take no longer than one; with "_per_block" the cost is that of each block of the grid. "spin_arg" has
 * one parameter, a uint64_t of nanoseconds.
 *
 * Modelled: streams (legacy, per thread, blocking and not, priorities), events on the device's clock, waits, host
 * functions, copies and fills (their time, no data), captured graphs and those made of kernel nodes (their nodes run
 * one after another). A process may have 1,024 ops pending; the next call waits. cuMemFree waits for the process's
 * work. */

typedef struct recorder_device {
  uint64_t now_ns;   /* the device's clock */
  uint64_t busy_ns;  /* of the compute engine */
  uint64_t switches; /* from one process's time slice to another's */
  uint64_t capacity_bytes;
  uint64_t used_bytes;
} recorder_device;

typedef struct recorder_process {
  int32_t pid;
  int32_t alive; /* 0: ended; its memory is free, its work is gone, its times stay */
  char label[24];
  uint64_t memory_bytes;
  uint64_t compute_ns; /* of the device's time: side by side, its part of it */
  uint64_t copy_ns;
  uint64_t kernels; /* that ended, fills and copies within the device included */
  uint64_t copies;
  uint64_t attached_ns; /* when it came and went, on the device's clock */
  uint64_t ended_ns;
} recorder_process;

/* Makes the file. 0, or -1: it cannot be made, or the settings cannot be read (said on stderr). */
int recorder_device_create(const char* path, const char* settings);
/* The device and its processes as they are at one moment, now. The number of processes (at most `room`); -1: there is
 * no such device. */
int recorder_device_read(const char* path, recorder_device* out_device, recorder_process* out_processes,
                         int room);

#ifdef __cplusplus
}
#endif
#endif
