/* gpushare backend ABI: the table of operations that makes a device usable by gpushare.
 *
 * A backend is one `gpushare_backend_ops` table, registered in the process with
 * gpushare_backend_register() (gpushare.h) or exported by a plug-in library. The built-in backends host,
 * sim and cuda use the very same table.
 *
 * Versioning. `abi_version` is GPUSHARE_BACKEND_ABI_VERSION of the header the backend was built with; its
 * major half (upper 16 bits) must equal the runtime's. Ops are only ever appended. Registration copies the
 * part of the table that `struct_size` covers, fills absent optional ops with "return GPUSHARE_UNSUPPORTED",
 * and refuses a table that lacks a mandatory op or fills only part of an optional group.
 *
 * Ownership. Objects that an op hands out (device, stream, event, mapping) belong to the caller until the
 *   matching close/destroy/release op. The table and its strings must live until the process ends.
 *
 * Threads. Every op may be called from any thread, concurrently, except that an object's destroy op must not
 *   overlap another op on the same object. No op may call back into gpushare while holding a lock that
 *   another op takes.
 *
 * Blocking. Only ops whose comment says so block on device work. `probe` is cheap and has no side effects;
 *   `device_open` does the work.
 *
 * Errors. An op returns a status of status.h. On failure it first stores the details for the calling thread,
 *   which `last_error` returns until the next failing op on that thread. NOT_READY is an answer, not a
 *   failure: it need not be stored. Outputs are written only on success. A null object is INVALID_HANDLE.
 *   Asynchronous failures are sticky on the stream: they come out of stream_query, stream_synchronize,
 *   event_query and event_synchronize of work behind them; work behind them is dropped and new work refused
 *   with the same status. Another stream that waits for such an event goes on: a wait orders, it does not
 *   carry failures. A lost device fails every op except releasing ops, device_info, clock_now and last_error.
 *
 * Units. Sizes are bytes, times nanoseconds, and the name says so.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GPUSHARE_BACKEND_H_
#define GPUSHARE_BACKEND_H_

#include <stddef.h>
#include <stdint.h>

#include "gpushare/status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GPUSHARE_BACKEND_ABI_MAJOR 1u
#define GPUSHARE_BACKEND_ABI_MINOR \
  0u /* a later minor version appends ops: a table of an earlier one is smaller, and registration fills the rest \
        in as it fills in absent optional ops */
#define GPUSHARE_BACKEND_ABI_VERSION ((GPUSHARE_BACKEND_ABI_MAJOR << 16) | GPUSHARE_BACKEND_ABI_MINOR)

typedef struct gpushare_backend_device gpushare_backend_device; /* one opened device */
typedef struct gpushare_backend_stream gpushare_backend_stream; /* an in-order queue of device work */
typedef struct gpushare_backend_event gpushare_backend_event;   /* a point in a stream */
typedef struct gpushare_backend_memory gpushare_backend_memory; /* physical memory not tied to an address */
typedef struct gpushare_backend_partition gpushare_backend_partition; /* a share of the compute units */

/* An address the device understands. On host it is the pointer itself; on cuda a CUdeviceptr; on sim an
 * address of an imaginary device that must not be dereferenced (GPUSHARE_DEVICE_CAP_HOST_ADDRESSABLE says
 * which). */
typedef uint64_t gpushare_device_address;

/* Capabilities of a device: bits of gpushare_backend_device_info.capabilities. Query these; never infer a
 * capability from a null op or from a call that does nothing. */
enum {
  GPUSHARE_DEVICE_CAP_HOST_ADDRESSABLE = 1 << 0, /* device addresses can be read and written by the CPU */
  GPUSHARE_DEVICE_CAP_VIRTUAL_MEMORY = 1 << 1,   /* group "virtual memory" works */
  GPUSHARE_DEVICE_CAP_PRIORITIES = 1 << 2,       /* stream priorities have an effect */
  GPUSHARE_DEVICE_CAP_VIRTUAL_TIME = 1 << 3, /* clock_now is simulated time, advanced by waiting on work */
  GPUSHARE_DEVICE_CAP_MODELED_WORK = 1 << 4, /* group "modelled work" works */
  GPUSHARE_DEVICE_CAP_FAULTS = 1 << 5,       /* group "faults" works (test backends) */
  GPUSHARE_DEVICE_CAP_PARTITIONS = 1 << 6,   /* group "partitions" works */
  GPUSHARE_DEVICE_CAP_IPC = 1 << 7,          /* group "ipc" works */
  GPUSHARE_DEVICE_CAP_HOST_PHYSICAL = 1 << 8 /* phys_create_host works; needs VIRTUAL_MEMORY */
};

/* Details of the last failing op of the calling thread. */
typedef struct gpushare_backend_error {
  uint32_t struct_size; /* set by the caller; the backend writes at most this many bytes */
  int32_t status;       /* the status the op returned */
  int64_t native_code;  /* errno, CUresult, ...; 0 if there is none */
  char message[488];    /* what failed, the limit, what to do; NUL-terminated */
} gpushare_backend_error;

typedef struct gpushare_backend_device_info {
  uint32_t struct_size;                /* set by the caller; the backend writes at most this many bytes */
  uint32_t capabilities;               /* GPUSHARE_DEVICE_CAP_* */
  char name[64];                       /* "host", "sim", "NVIDIA H200" */
  uint64_t total_bytes;                /* device memory in all */
  uint64_t free_bytes;                 /* the part of it that nobody uses now */
  uint64_t allocation_alignment_bytes; /* alignment of the addresses that mem_alloc returns */
  uint64_t mapping_granularity_bytes;  /* sizes of mappings are multiples of this; 0 without virtual memory */
  int32_t priority_lowest;             /* stream priorities: numerically larger is less urgent, as in CUDA */
  int32_t priority_highest;
  uint32_t compute_units; /* SMs on cuda, CPU threads on host */
  uint32_t
      pci_address; /* domain << 16 | bus << 8 | device << 3 | function; 0: it has none, or does not say */
} gpushare_backend_device_info;

enum {
  GPUSHARE_EVENT_DEFAULT = 0,
  GPUSHARE_EVENT_TIMING = 1 << 0 /* the event records a device time that event_elapsed can read */
};

/* A host function that runs in stream order. It must not call ops that block on the same stream; host and
 * sim refuse them with INVALID_STATE. On cuda it must call no op that enqueues work or queries the device,
 * because the driver forbids that (INVALID_STATE). If an exception leaves it, its stream fails with
 * CALLBACK_FAILED. */
typedef void (*gpushare_host_function)(void* user_data);

/* Work of a known cost, for devices that simulate (group "modelled work"). */
typedef struct gpushare_backend_work {
  uint32_t struct_size;
  uint32_t work_class;  /* key into the device's interference table; 0 = none */
  uint64_t duration_ns; /* time it takes when nothing else runs */
  float demand; /* share of the device it uses alone, (0, 1]; the contention model slows overlapping work when
                   demands add up to more than 1 */
  uint32_t reserved;
} gpushare_backend_work;

/* Kinds of scripted fault (group "faults"). `at_call` counts matching calls, from 1. */
enum {
  GPUSHARE_FAULT_NONE = 0, /* clears all faults that have not fired; a lost device stays lost */
  GPUSHARE_FAULT_DEVICE_OUT_OF_MEMORY =
      1,                        /* the at_call-th mem_alloc, phys_create or phys_create_shared fails */
  GPUSHARE_FAULT_MAP_FAILS = 2, /* the at_call-th va_map or va_map_run fails with DEVICE_OUT_OF_MEMORY */
  GPUSHARE_FAULT_STREAM_CREATE_FAILS = 3, /* the at_call-th stream_create fails */
  GPUSHARE_FAULT_LAUNCH_FAILS = 4, /* the at_call-th launch, copy, fill or work fails with UNKNOWN at once */
  GPUSHARE_FAULT_DEVICE_LOST = 5,  /* from the at_call-th enqueue on, everything fails with DEVICE_LOST */
  GPUSHARE_FAULT_SLOW_STREAM = 6,  /* the stream of the at_call-th enqueue is slow from that work on: all of
                                      its work takes `factor` times as long */
  GPUSHARE_FAULT_HOST_OUT_OF_MEMORY = 7 /* the at_call-th host_alloc or phys_create_host fails */
};

typedef struct gpushare_backend_fault {
  uint32_t struct_size;
  uint32_t kind;    /* GPUSHARE_FAULT_* */
  uint64_t at_call; /* 1 = the next one */
  double factor;    /* SLOW_STREAM only: 1 to 1000 */
} gpushare_backend_fault;

/* Access rights of an importer of shared memory (group "ipc"). */
enum { GPUSHARE_ACCESS_READ = 1, GPUSHARE_ACCESS_READ_WRITE = 3 };

/* How the compute units of a device can be shared out (group "partitions"). */
typedef struct gpushare_backend_partition_info {
  uint32_t struct_size;   /* set by the caller; the backend writes at most this many bytes */
  uint32_t compute_units; /* of the whole device */
  uint32_t
      partitionable_units; /* how many of them partitions can have in all (the others serve streams without a
                              partition) */
  uint32_t granularity_units; /* a partition has a multiple of this many */
  uint32_t free_units;        /* units in no partition now */
  uint32_t reserved;
} gpushare_backend_partition_info;

typedef struct gpushare_backend_ops {
  uint32_t struct_size; /* sizeof(gpushare_backend_ops) of the backend's header */
  uint32_t abi_version; /* GPUSHARE_BACKEND_ABI_VERSION of the backend's header */
  const char* name;     /* "host"; lower case, unique, no '?' or ':' */

  /* ---- mandatory ---- */

  /* Counts the devices without touching them. UNAVAILABLE with the reason when there is no driver. */
  int32_t (*probe)(uint32_t* out_device_count);
  /* Opens device `index`. `options` is "key=value&key=value", never null, may be empty; an unknown key or a
   * value out of range is INVALID_ARGUMENT, and the message names the allowed ones. */
  int32_t (*device_open)(uint32_t index, const char* options, gpushare_backend_device** out_device);
  /* Waits for all work and closes the device. Streams, events and memory of the device must have been
   * released before. If some are left, the op releases them and returns INVALID_STATE with their counts in
   * the message. */
  int32_t (*device_close)(gpushare_backend_device* device);
  int32_t (*device_info)(gpushare_backend_device* device, gpushare_backend_device_info* out_info);
  /* The device's clock: monotonic host time, or simulated time on devices with VIRTUAL_TIME. */
  int32_t (*clock_now)(gpushare_backend_device* device, uint64_t* out_ns);
  /* Copies the calling thread's last error into *out_error. */
  int32_t (*last_error)(gpushare_backend_error* out_error);

  /* Device memory, aligned to allocation_alignment_bytes. bytes > 0. May block. */
  int32_t (*mem_alloc)(gpushare_backend_device* device, uint64_t bytes, gpushare_device_address* out_address);
  /* Frees memory of mem_alloc. All work that uses it must have finished. */
  int32_t (*mem_free)(gpushare_backend_device* device, gpushare_device_address address);
  /* Allocates host memory that copies access at full speed (pinned on cuda). */
  int32_t (*host_alloc)(gpushare_backend_device* device, uint64_t bytes, void** out_pointer);
  int32_t (*host_free)(gpushare_backend_device* device, void* pointer);

  /* priority: within [priority_highest, priority_lowest]; ignored without PRIORITIES. */
  int32_t (*stream_create)(gpushare_backend_device* device, int32_t priority,
                           gpushare_backend_stream** out_stream);
  /* Waits for the stream's work and destroys the stream, also when the work has failed. */
  int32_t (*stream_destroy)(gpushare_backend_stream* stream);
  /* OK when all work has finished, else NOT_READY, or the stream's sticky error. */
  int32_t (*stream_query)(gpushare_backend_stream* stream);
  /* Blocks until all work enqueued before the call has finished. It must not return an error earlier,
   * because the caller then reuses the memory of that work. Exceptions: the device is lost, or the stream
   * captures a graph. */
  int32_t (*stream_synchronize)(gpushare_backend_stream* stream);
  /* Work enqueued later on `stream` waits for `event`; the host does not. An event never recorded is done. */
  int32_t (*stream_wait_event)(gpushare_backend_stream* stream, gpushare_backend_event* event);
  /* The native handle (CUstream on cuda; the stream object itself elsewhere). */
  int32_t (*stream_native)(gpushare_backend_stream* stream, void** out_native);

  int32_t (*event_create)(gpushare_backend_device* device, uint32_t flags,
                          gpushare_backend_event** out_event);
  int32_t (*event_destroy)(gpushare_backend_event* event);
  /* Re-recording moves the event. */
  int32_t (*event_record)(gpushare_backend_event* event, gpushare_backend_stream* stream);
  /* OK if the event has passed or was never recorded, else NOT_READY, or the stream's error. */
  int32_t (*event_query)(gpushare_backend_event* event);
  /* Blocks until the event's last record has been passed. */
  int32_t (*event_synchronize)(gpushare_backend_event* event);
  /* Device time between two passed TIMING events. NOT_READY before both have passed; INVALID_STATE if one was
   * never recorded or has no timing, or if `end` passed before `start`. */
  int32_t (*event_elapsed)(gpushare_backend_event* start, gpushare_backend_event* end, uint64_t* out_ns);

  /* Copies in stream order; each side is a device address or a host pointer cast to uint64_t (`kind` tells).
   * Asynchronous; host memory must stay valid until the copy has finished. With host memory that does not
   * come from host_alloc, the call itself may wait for the stream, and may read the memory before earlier
   * work of the stream has written it. */
  int32_t (*copy_async)(gpushare_backend_stream* stream, uint64_t destination, uint64_t source,
                        uint64_t bytes, uint32_t kind);
  /* Sets bytes in stream order. */
  int32_t (*fill_async)(gpushare_backend_stream* stream, gpushare_device_address address, uint8_t value,
                        uint64_t bytes);
  /* Runs `function` in stream order, on a host thread while the stream waits. On the host device kernels are
   * such functions. */
  int32_t (*launch_host)(gpushare_backend_stream* stream, gpushare_host_function function, void* user_data);

  /* ---- group "virtual memory": all or none ---- */

  /* Reserves an address range without memory behind it; bytes is a multiple of the granularity. */
  int32_t (*va_reserve)(gpushare_backend_device* device, uint64_t bytes,
                        gpushare_device_address* out_address);
  /* Gives a whole reservation back. Nothing may be mapped in it. */
  int32_t (*va_free)(gpushare_backend_device* device, gpushare_device_address address, uint64_t bytes);
  /* Physical memory, a multiple of the granularity. */
  int32_t (*phys_create)(gpushare_backend_device* device, uint64_t bytes,
                         gpushare_backend_memory** out_memory);
  /* Releases the handle. The memory is freed with its last mapping. */
  int32_t (*phys_release)(gpushare_backend_device* device, gpushare_backend_memory* memory);
  /* Maps [offset, offset+bytes) of `memory` at `address`, readable and writable. The range must be reserved
   * and not mapped. May block. */
  int32_t (*va_map)(gpushare_backend_device* device, gpushare_device_address address, uint64_t bytes,
                    gpushare_backend_memory* memory, uint64_t offset);
  /* Unmaps exactly a range that one va_map call mapped. Work that uses it must have finished. */
  int32_t (*va_unmap)(gpushare_backend_device* device, gpushare_device_address address, uint64_t bytes);

  /* ---- group "modelled work" ---- */

  /* Enqueues work of a known cost (simulating devices only). */
  int32_t (*work_launch)(gpushare_backend_stream* stream, const gpushare_backend_work* work);

  /* ---- group "faults" (test backends) ---- */

  int32_t (*fault_set)(gpushare_backend_device* device, const gpushare_backend_fault* fault);

  /* ---- group "partitions": all or none ------------------------------------------------------------------ */

  int32_t (*partition_info)(gpushare_backend_device* device, gpushare_backend_partition_info* out_info);
  /* Sets aside at least `compute_units` (> 0), rounded up to the granularity; *out_compute_units receives
   * the number. Work of the partition's streams runs only on these units, and work of other partitions never
   * does. Streams without a partition may still use them. Errors: EXCEEDS_CAPACITY, DEVICE_OUT_OF_MEMORY
   * (other partitions have the units). May block. */
  int32_t (*partition_create)(gpushare_backend_device* device, uint32_t compute_units,
                              gpushare_backend_partition** out_partition, uint32_t* out_compute_units);
  /* Destroys a partition. Errors: INVALID_STATE (it still has streams). */
  int32_t (*partition_destroy)(gpushare_backend_device* device, gpushare_backend_partition* partition);
  /* Like stream_create, on the units of the partition. */
  int32_t (*partition_stream_create)(gpushare_backend_partition* partition, int32_t priority,
                                     gpushare_backend_stream** out_stream);

  /* ---- group "ipc": all or none; needs "virtual memory" ------------------------------------------------- */

  /* Like phys_create, for memory that can be exported. Until it is exported nobody else has access to it. */
  int32_t (*phys_create_shared)(gpushare_backend_device* device, uint64_t bytes,
                                gpushare_backend_memory** out_memory);
  /* A file descriptor through which a process that is sent it, or inherits it, can import `memory`. The caller closes it; it is
   * close-on-exec. The memory lives until the last handle, mapping and descriptor in any process has gone; processes that die
   * let go. `access` (GPUSHARE_ACCESS_*) limits every importer where the system can hold it to that (host: memory that
   * was exported for reading is its creator's alone to write from then on); where it cannot (cuda) it is the import's
   * `access` that counts. Errors: INVALID_ARGUMENT (not of phys_create_shared; access; for writing after it was
   * exported for reading), IO_ERROR (no descriptors left). */
  int32_t (*phys_export)(gpushare_backend_device* device, gpushare_backend_memory* memory, uint32_t access,
                         int32_t* out_descriptor);
  /* The memory of `bytes` (as it was created) behind a descriptor that phys_export of the same kind of device gave. The
   * descriptor stays the caller's and may be closed at once; importing it again gives another handle of the same memory. The
   * result is mapped with va_map and dropped with phys_release as any other, is not counted in this device's total, and cannot
   * be exported. With READ its mappings are read-only: copies and fills into them are INVALID_ARGUMENT or a fault of the
   * stream. Errors: INVALID_ARGUMENT (not such a descriptor; other bytes; more access than was exported). */
  int32_t (*phys_import)(gpushare_backend_device* device, int32_t descriptor, uint64_t bytes, uint32_t access,
                         gpushare_backend_memory** out_memory);

  /* ---- devices whose native API records work of a stream into graphs (cuda) ------------------------------ */

  /* While such a stream captures, work enqueued on it does not run but becomes part of the graph. event_record, launch_host,
   * stream_query, stream_synchronize and stream_destroy on it are INVALID_STATE then and leave the capture alone, and so is
   * stream_wait_event for an event that has not passed. This op ends the capture and drops what it recorded, so that the stream
   * serves again; *out_dropped is 0 if there was none. Errors: INVALID_STATE (only the thread that began the capture can end it),
   * UNSUPPORTED (no such graphs). */
  int32_t (*stream_capture_drop)(gpushare_backend_stream* stream, uint32_t* out_dropped);

  /* ---- devices whose native API lets others make streams (cuda) ------------------------------------------ */

  /* A stream object for a native stream that somebody else made, and destroys: `native` is what stream_native gives (a CUstream;
   * null is the legacy default stream). It must be of the device's context and must live while ops are called on the object.
   * stream_destroy drops the object, neither waits for the native stream's work nor touches it. Errors: UNSUPPORTED. */
  int32_t (*stream_adopt)(gpushare_backend_device* device, void* native,
                          gpushare_backend_stream** out_stream);

  /* ---- host memory behind device addresses; needs "virtual memory" --------------------------------------- */

  /* Like phys_create, but the memory is pinned host memory, near the device where the machine has several nodes. Mapped with
   * va_map it serves as device memory at its addresses: work reads and writes it over the bus, and copies and fills take it as
   * device memory. It is not counted in the device's total or free bytes. Errors: HOST_OUT_OF_MEMORY, UNSUPPORTED. May block. */
  int32_t (*phys_create_host)(gpushare_backend_device* device, uint64_t bytes,
                              gpushare_backend_memory** out_memory);

  /* ---- group "runs": both or none; needs "virtual memory" ------------------------------------------------ */

  /* The same as one va_map for each of `count` (> 0) memories of phys_create or phys_create_host: the first `bytes` of each, side
   * by side from `address` on. All or none. For backends that do this faster than mapping by mapping. May block. */
  int32_t (*va_map_run)(gpushare_backend_device* device, gpushare_device_address address, uint64_t bytes,
                        gpushare_backend_memory* const* memories, uint64_t count);
  /* The same as one va_unmap for each of `count` (> 0) mappings of `bytes` that lie side by side in one reservation.
   * *out_count, written on failure too: the first so many are unmapped, the others are not. */
  int32_t (*va_unmap_run)(gpushare_backend_device* device, gpushare_device_address address, uint64_t bytes,
                          uint64_t count, uint64_t* out_count);

  /* ---- devices whose native API takes memory of its own (cuda) -------------------------------------------- */

  /* The bytes of the device that device_open() opens for `index` and `options`, which the calling process has in use beyond what
   * the ops gave it on all opened devices: contexts, code, memory of other libraries. The device itself need not be open: 0 once
   * the context has gone with the last device_close(), and more where another library keeps it. Errors: those of device_open() for its
   * arguments; UNSUPPORTED (the system does not say, or it cannot tell them from memory of phys_import, of which there is some);
   * NOT_READY (nothing can be said now, because other threads take and return memory all the while, or because the system does
   * not answer: ask again later). May block for some seconds. */
  int32_t (*context_bytes)(uint32_t index, const char* options, uint64_t* out_bytes);
} gpushare_backend_ops;

/* `kind` of copy_async. */
enum {
  GPUSHARE_COPY_HOST_TO_DEVICE = 0,
  GPUSHARE_COPY_DEVICE_TO_HOST = 1,
  GPUSHARE_COPY_DEVICE_TO_DEVICE = 2
};

/* The first published size of the table: every later runtime accepts tables of at least this size. */
#define GPUSHARE_BACKEND_OPS_V1_SIZE (offsetof(gpushare_backend_ops, context_bytes) + sizeof(void (*)(void)))

/* Name of the symbol a plug-in library exports: returns its table, never null. */
typedef const gpushare_backend_ops* (*gpushare_backend_entry)(void);
#define GPUSHARE_BACKEND_ENTRY_NAME "gpushare_backend_entry_v1"

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* GPUSHARE_BACKEND_H_ */
