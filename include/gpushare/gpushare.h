/* gpushare: many deep-learning jobs share one GPU. This header is the stable C ABI, the only binary boundary.
 *
 * The contract
 * ------------
 * Versioning.  GPUSHARE_VERSION_* is the version of the header, gpushare_version() that of the library. Within a
 *   major version functions, status codes and struct fields are only added, at the end. SOVERSION is the major.
 * Structs.  Option and info structs begin with `struct_size`. Initialise options with their _INIT macro. The
 *   library accepts any size from the first published one up, reads a field only if struct_size covers it,
 *   refuses a larger struct whose unknown tail is not zero, and writes at most struct_size bytes back.
 * Handles.  Handles are opaque. An `open`, `create`, `begin` or `submit` call creates a handle, and the matching
 *   `close`, `release` or `end` call gives it back. A stale or foreign handle is refused with
 *   GPUSHARE_INVALID_HANDLE and never followed. Closing an object ends the objects that depend on it. Their
 *   handles then report GPUSHARE_INVALID_STATE until they are given back themselves; get_info still tells how
 *   the objects ended.
 * Threads.  Every function may be called from any thread, concurrently, unless its comment says otherwise.
 *   Different sessions never share a lock on the allocation path. A thread that calls has 128 KiB of stack or more.
 * Blocking.  A function blocks only if its comment says so. The library holds no lock while a callback of the
 *   caller runs, so a callback may call the library, except where its comment says otherwise.
 * Strings.  Strings are UTF-8 and NUL-terminated. The library copies strings passed in. Strings that it returns
 *   belong to it and live as long as the comment says.
 * Errors.  Functions return a status of status.h and write outputs only on success.
 *   gpushare_last_error_message() tells the calling thread what failed, which limit was met and what to do.
 *   Success never clears that message. The iteration, ticket or session that asynchronous work belongs to
 *   reports its failure.
 * Process.  The library never aborts, exits, or installs signal handlers. Its threads belong to a runtime, a
 *   request queue or an elastic range and end with it; threads that read an image end with the call. They block
 *   all signals but SIGPROF and those that a thread's own fault raises.
 * Threads that exit.  When a thread exits with an iteration open, the iteration ends and its session has FAILED
 *   with CALLBACK_FAILED and a message that says so.
 * pthread_cancel.  Cancellation is acted upon while gpushare_iteration_begin, gpushare_ticket_wait,
 *   gpushare_session_wait_admitted, gpushare_session_close or gpushare_runtime_synchronize waits for other
 *   sessions: the call is undone and no turn is lost. Every other call postpones it until the call has returned.
 *   Asynchronous cancellation of a thread that is in a call is not supported.
 * pthread_exit.  A callback may call it. A session whose iteration or host function does so has FAILED with
 *   CALLBACK_FAILED, and the library replaces its own thread by another one. Functions of a custom policy, log
 *   functions, `release` functions and host functions on cuda must not call it.
 * Signals and log functions.  Every function that takes a handle returns INVALID_STATE in a signal handler that
 *   interrupted a call, in a log function and in the functions of a custom policy. A signal handler may call
 *   gpushare_version and gpushare_status_name.
 * Forks.  A child of fork() cannot use its parent's handles: every call with them, close included, returns
 *   INVALID_STATE and does not touch the objects. Device memory of host and sim devices is not inherited: an
 *   access faults. A child may open a runtime of its own, whatever other threads of the parent did at the time
 *   of the fork. On cuda the driver refuses that (UNAVAILABLE) in every forked child of a process that has used
 *   it. A child that was forked inside a callback must not return from the callback.
 * Units.  Sizes are bytes, times nanoseconds; the name says so.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GPUSHARE_GPUSHARE_H_
#define GPUSHARE_GPUSHARE_H_

#include <stddef.h>
#include <stdint.h>

#include "gpushare/backend.h"
#include "gpushare/status.h"
#include "gpushare/version.h"

#if defined(_WIN32)
#define GPUSHARE_API
#elif defined(__GNUC__)
#define GPUSHARE_API __attribute__((visibility("default")))
#else
#define GPUSHARE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gpushare_runtime_s* gpushare_runtime;     /* one device's worth of gpushare */
typedef struct gpushare_session_s* gpushare_session;     /* one job */
typedef struct gpushare_iteration_s* gpushare_iteration; /* one mini-batch, between begin and end */
typedef struct gpushare_stream_s* gpushare_stream;       /* an in-order queue of device work */
typedef struct gpushare_ticket_s* gpushare_ticket;       /* the outcome of a submitted iteration */
struct gpushare_policy_ops;                              /* a policy of the caller's: policy.h */

#define GPUSHARE_NO_TIMEOUT UINT64_MAX /* wait for ever */

/* ---- version and errors ---- */

/* The library's version as (major << 22) | (minor << 12) | patch, comparable with GPUSHARE_VERSION. */
GPUSHARE_API uint32_t gpushare_version(void);

/* "1.0.0". Static storage. */
GPUSHARE_API const char* gpushare_version_string(void);

/* "DEVICE_OUT_OF_MEMORY" for a status code; "UNRECOGNIZED" for a number that is not a status code. Static
 * storage. */
GPUSHARE_API const char* gpushare_status_name(int32_t status);

/* Message of the calling thread's last failing call; "" before the first. Valid until the thread's next
 * failing call. */
GPUSHARE_API const char* gpushare_last_error_message(void);

typedef struct gpushare_error_info {
  uint32_t struct_size;
  int32_t status;
  int64_t native_code; /* errno, CUresult, ...; 0 if none */
  const char* message; /* as gpushare_last_error_message */
  const char* backend; /* name of the backend the error came from; "" if none */
} gpushare_error_info;
#define GPUSHARE_ERROR_INFO_INIT \
  { sizeof(gpushare_error_info), 0, 0, 0, 0 }

/* Details of the calling thread's last failing call. Errors: INVALID_ARGUMENT (bad struct_size). */
GPUSHARE_API int32_t gpushare_last_error(gpushare_error_info* out_info);

enum { GPUSHARE_LOG_ERROR = 0, GPUSHARE_LOG_WARNING = 1, GPUSHARE_LOG_INFO = 2, GPUSHARE_LOG_DEBUG = 3 };
typedef void (*gpushare_log_fn)(void* user_data, int32_t level, const char* message);

/* Sends log lines of `level` and of more severe levels to `fn` (null: to stderr; that is the default, at level WARNING).
 * Process-wide. `fn` may be called from any thread and must not call gpushare; `message` is valid during the call. Errors:
 * INVALID_ARGUMENT (no such level). */
GPUSHARE_API int32_t gpushare_log_set(gpushare_log_fn fn, void* user_data, int32_t level);

/* ---- devices, backends ---- */

/* Adds a backend to the process (see backend.h for the rules that `ops` must keep). The library copies the part of the
 * table that it knows. Errors: INVALID_ARGUMENT (missing op, half-filled group, wrong ABI major), ALREADY_EXISTS. */
GPUSHARE_API int32_t gpushare_backend_register(const gpushare_backend_ops* ops);

/* Loads a backend plug-in from an absolute path and registers it. The library is never unloaded. May block on the disk.
 * Errors: INVALID_ARGUMENT (relative path), NOT_FOUND, MALFORMED_INPUT (no entry point), and register's. */
GPUSHARE_API int32_t gpushare_backend_load(const char* absolute_path);

typedef struct gpushare_device_info {
  uint32_t struct_size;
  uint32_t capabilities; /* GPUSHARE_DEVICE_CAP_* of backend.h */
  char spec[64];         /* what gpushare_runtime_params.device takes: "host", "sim", "cuda:0" */
  char name[64];         /* "NVIDIA H200" */
  int32_t status;        /* OK, or why the device cannot be used (UNAVAILABLE: no driver) */
  uint32_t compute_units;
  uint64_t total_bytes;
  uint64_t free_bytes;
  char reason[480]; /* when status is not OK */
} gpushare_device_info;
#define GPUSHARE_DEVICE_INFO_INIT                            \
  {                                                          \
    sizeof(gpushare_device_info), 0, {0}, {0}, 0, 0, 0, 0, { \
      0                                                      \
    }                                                        \
  }

/* Number of devices that the registered backends know of, including unusable ones. Asks the drivers and
 * opens no device. Errors: INVALID_ARGUMENT. */
GPUSHARE_API int32_t gpushare_device_count(uint32_t* out_count);

/* Describes device `index` (0 <= index < count). Opens and closes it, so it may block for long on a real
 * driver. Errors: INVALID_ARGUMENT. */
GPUSHARE_API int32_t gpushare_device_get_info(uint32_t index, gpushare_device_info* out_info);

/* Job classes. Guaranteed sessions get what they were admitted with; opportunistic sessions use spare
 * capacity. */
enum { GPUSHARE_CLASS_GUARANTEED = 0, GPUSHARE_CLASS_OPPORTUNISTIC = 1 };

/* ---- runtime ---- */

enum {
  GPUSHARE_LAYOUT_AUTO = 0, /* virtual where the device can, else contiguous */
  GPUSHARE_LAYOUT_CONTIGUOUS =
      1, /* one device buffer: persistent bytes from the low end, lanes from the high end */
  GPUSHARE_LAYOUT_VIRTUAL = 2 /* each lane and each session has its own address range; physical granules move
                                 between the ranges */
};

enum {
  GPUSHARE_RECORD_TIMELINE = 1 << 0, /* keep what gpushare_runtime_write_timeline needs */
  GPUSHARE_RECORD_ALLOCATIONS =
      1 << 1 /* keep what gpushare_runtime_write_allocation_log and snapshot traces need */
};

typedef struct gpushare_progress {
  uint32_t struct_size;
  uint32_t lane;
  uint64_t session_id;
  const char* session_name; /* valid during the call */
  uint64_t iterations_done; /* of this session */
  uint64_t service_ns;      /* of this session */
  uint64_t device_ns;       /* device time of the iteration that has just finished */
} gpushare_progress;
/* Called after each finished iteration, on a thread of the runtime or on the thread that ends the iteration. It may call
 * gpushare but must not wait: calls that would block there return INVALID_STATE. It may be called after
 * gpushare_ticket_wait for the iteration has returned. It is never called after gpushare_session_close has returned; that
 * function waits for calls about its session on other threads. Several threads may be in the function at once, also for one
 * session. The iterations of that session may then be reported in any order; iterations_done tells which is which. The
 * function is never called inside itself: iterations that a call made in it finds finished are reported after it has
 * returned. */
typedef void (*gpushare_progress_fn)(void* user_data, const gpushare_progress* progress);

typedef struct gpushare_runtime_params {
  uint32_t struct_size;
  uint32_t layout;         /* GPUSHARE_LAYOUT_* */
  const char* device;      /* "auto" (first GPU, else host), or a spec with options: "sim?total_gib=16",
                              "host?copy_gbps=12", "cuda:0". null = "auto". For "auto" the environment
                              variable GPUSHARE_DEVICE, if set, names the device. "shared" is the first
                              device of the daemon (gpushare daemon) at the socket that the environment
                              variable GPUSHARE_SOCKET names, else at the default path; "shared:cuda:0" is
                              that device of the daemon. On a shared device the daemon chooses memory and
                              policy: capacity_bytes, policy and max_lanes are ignored, and GPUSHARE_MEMORY
                              and GPUSHARE_WEIGHT, if set, limit the sums of the sessions' quotas and weights
                              (docs/operators.md) */
  uint64_t capacity_bytes; /* device memory to use; 0 = nearly all that is free (1 GiB on host) */
  const char* policy;      /* a built-in policy; null = "fair" */
  const struct gpushare_policy_ops*
      policy_ops;         /* a policy of the caller's; overrides `policy` when not null */
  uint32_t max_lanes;     /* 0 = as the policy says, at most 64 */
  uint32_t enqueue_depth; /* iterations of a lane in flight on the device, 1 to 64; 0 = 2 */
  uint32_t record;        /* GPUSHARE_RECORD_* */
  uint32_t reserved;
  gpushare_progress_fn on_progress; /* may be null */
  void* on_progress_user_data;
  /* The next four fields concern sessions with GPUSHARE_SESSION_ALLOW_SPILL. Before an iteration of such a session begins, its
   * blocks move and keep their addresses: to the device while it has room, to host memory when the session is above its quota or
   * a guaranteed session needs the room (virtual layout, devices with GPUSHARE_DEVICE_CAP_HOST_PHYSICAL). */
  uint64_t spill_limit_bytes; /* host memory for such blocks; 0 = a quarter of the host's memory */
  uint64_t spill_move_bytes;  /* most bytes moved at a boundary or by a part of a page-out; 0 = 256 MiB */
  uint64_t spill_move_ns;     /* longest time that these moves take; at least one granule moves. 0 = 10 ms */
  /* Largest part of a session's time that repeated moves out and home may take: after each such cycle but the first, its blocks
   * stay in host memory until that holds. 0 = 0.004 */
  double spill_move_loss;
  /* Which lane a session joins. "salus": a lane of its own while there is room, else the lane that fits best. "balanced": the
   * same, else the lane with the least work ahead: shorter makespans. "compact": a lane that fits closely before a
   * new one: more sessions at a time. null = as the policy says, else "salus". Ignored on a shared device */
  const char* lane_finder;
  /* Under the policy "pack" the runtime measures how sessions slow each other. The table of measurements is read from this file,
   * if it exists, when the runtime is opened, and written to it when the runtime is closed. With a file the runtime
   * measures under every policy. Sessions of one name count as the same work; sessions without a name are not written.
   * null = the table ends with the runtime. On a shared device the daemon measures: UNSUPPORTED */
  const char* interference_file;
} gpushare_runtime_params;
#define GPUSHARE_RUNTIME_PARAMS_INIT \
  { sizeof(gpushare_runtime_params), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0, 0 }

/* Opens the device and starts the runtime. The caller owns *out_runtime and closes it. May block on the driver. Errors:
 * UNAVAILABLE (no such device, no daemon; the message says why), NOT_FOUND (unknown policy, lane finder or backend),
 * INVALID_ARGUMENT, UNSUPPORTED (layout, interference_file), MALFORMED_INPUT or IO_ERROR (interference_file; the
 * message names it), DEVICE_OUT_OF_MEMORY, HOST_OUT_OF_MEMORY. */
GPUSHARE_API int32_t gpushare_runtime_open(const gpushare_runtime_params* params,
                                           gpushare_runtime* out_runtime);

/* Cancels and closes every session, waits for work already on the device, returns all memory, and invalidates the handles
 * of the runtime's dependents. Blocks until all of that is done and until progress and out-of-memory functions on other
 * threads have returned; none of them runs afterwards. Must not be called from a callback of this runtime (INVALID_STATE).
 * IO_ERROR: the runtime is closed, but interference_file could not be written. */
GPUSHARE_API int32_t gpushare_runtime_close(gpushare_runtime runtime);

typedef struct gpushare_runtime_info {
  uint32_t struct_size;
  uint32_t layout;             /* the one in use */
  uint32_t capabilities;       /* of the device */
  uint32_t lanes;              /* open now */
  uint32_t sessions_resident;  /* admitted */
  uint32_t sessions_queued;    /* waiting for admission */
  uint32_t sessions_paged_out; /* admitted, persistent bytes in host memory */
  uint32_t reserved;
  uint64_t capacity_bytes;   /* upper limit of promised bytes: from gpushare_runtime_set_capacity, or as
                                opened */
  uint64_t promised_bytes;   /* sum of P plus sum of lane sizes; never above effective_capacity_bytes */
  uint64_t persistent_bytes; /* live blocks of sessions */
  uint64_t ephemeral_bytes;  /* live blocks of iterations */
  uint64_t peak_bytes;       /* most ever live at once */
  uint64_t switches;         /* how often a lane ran an iteration of another session than its last one, also
                                if the lane was closed and opened again between the two */
  uint64_t iterations_done;
  uint64_t paged_out_bytes_total; /* moved to host so far */
  uint64_t paged_in_bytes_total;  /* moved back */
  uint64_t paging_ns;             /* device time of those copies */
  uint64_t device_busy_ns;        /* sum of device time over lanes */
  uint64_t now_ns;                /* the device's clock */
  char device[64];                /* spec */
  char policy[32];
  uint32_t compute_units;               /* of the device: SMs on cuda */
  uint32_t partitionable_compute_units; /* how many of them lanes can have for themselves in all; 0 = none */
  uint32_t granularity_compute_units;   /* a lane's share is a multiple of it */
  uint32_t promised_compute_units;      /* units that lanes have for themselves now */
  uint64_t
      effective_capacity_bytes; /* the limit in force. It is capacity_bytes, unless that was lowered below
                                   the promised bytes: then it falls to capacity_bytes as promises fall */
  uint64_t link_bytes_per_s;    /* host to device, as loaders were told or measured; 0 = not known yet */
} gpushare_runtime_info;
#define GPUSHARE_RUNTIME_INFO_INIT                                                                          \
  {                                                                                                         \
    sizeof(gpushare_runtime_info), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, {0}, {0}, 0, 0, \
        0, 0, 0, 0                                                                                          \
  }

/* Returns the state, and statistics since the runtime was opened. Does not wait for the device. Errors:
 * INVALID_ARGUMENT (bad struct_size), INVALID_STATE (closed). */
GPUSHARE_API int32_t gpushare_runtime_get_info(gpushare_runtime runtime, gpushare_runtime_info* out_info);

/* Changes the policy. Takes effect at the next iteration boundary of each lane, within enqueue_depth
 * iterations. Sessions already admitted stay admitted. Errors: NOT_FOUND, INVALID_ARGUMENT. */
GPUSHARE_API int32_t gpushare_runtime_set_policy(gpushare_runtime runtime, const char* policy,
                                                 const struct gpushare_policy_ops* policy_ops);

/* How long iterations of a session take, alone or beside another one, as the runtime measured it. */
typedef struct gpushare_interference {
  uint32_t struct_size;
  uint32_t reserved;
  char name[64];   /* of sessions; longer ones are cut */
  char beside[64]; /* of the other sessions; empty: alone */
  double
      value; /* alone: ns of device time of an iteration; else how many times as long it takes beside the other */
  double
      confidence; /* number of iterations, 16 at most, halved every 10 minutes; below 0.75 the value is not used */
  double age_s; /* since the last of them */
} gpushare_interference;
#define GPUSHARE_INTERFERENCE_INIT \
  { sizeof(gpushare_interference), 0, {0}, {0}, 0, 0, 0 }

/* Reads entry `index` of the table of measurements under the policy "pack" or with an interference_file, ordered by name. The
 * table changes while sessions run. Does not block. Errors: NOT_FOUND (past the end: also where nothing is measured),
 * INVALID_STATE. */
GPUSHARE_API int32_t gpushare_runtime_get_interference(gpushare_runtime runtime, uint32_t index,
                                                       gpushare_interference* out_entry);

/* Changes how much device memory may be promised. 0 restores the capacity that the runtime was opened with, which is the
 * upper limit. Does not block. A raised capacity admits waiting sessions at once. A capacity below the promised bytes is a
 * target: nothing new is promised above it, and promises fall at iteration boundaries, as lanes merge, shrink and close and
 * as sessions are paged out. Under every policy opportunistic sessions are paged out before guaranteed ones, and sessions that
 * need the least copying first. gpushare_runtime_info has the target and the value in force. Where sessions cannot be paged
 * out (contiguous layout) promises fall only as sessions end or need less. A session that does not fit any more waits, with
 * its persistent bytes in host memory, until the capacity is raised or others leave. On the virtual layout memory that is
 * not promised is given back to the device. On a shared device this is the capacity that the daemon shares out, of all
 * processes: only the daemon's user and root may change it, 0 is what the daemon began with, and the call waits for the
 * daemon's answer. Errors: EXCEEDS_CAPACITY (more than it was opened with; the message has both), UNAVAILABLE (a shared
 * device, and the caller is somebody else, or the daemon is gone), INVALID_STATE. */
GPUSHARE_API int32_t gpushare_runtime_set_capacity(gpushare_runtime runtime, uint64_t capacity_bytes);

typedef struct gpushare_coordination_params {
  uint32_t struct_size;
  uint32_t max_guaranteed;    /* guaranteed sessions that run at once, upgraded ones included; 0 = 1 */
  uint32_t max_opportunistic; /* opportunistic ones; 0 = 4 */
  uint32_t reserved;
  uint64_t
      long_wait_ns; /* a guaranteed session that has waited so long may start as opportunistic; 0 = 10 minutes */
} gpushare_coordination_params;
#define GPUSHARE_COORDINATION_PARAMS_INIT \
  { sizeof(gpushare_coordination_params), 0, 0, 0, 0 }

/* From now on a coordinator decides which sessions run, in which class and with how many bytes; null: none does, as at
 * first. Policies go on to order iterations. Guaranteed sessions have all bytes of their need, or wait. Opportunistic
 * ones share what these leave, by weight, each at least its least_bytes; a session's bytes above its limit go to host
 * memory at its next boundaries (ALLOW_SPILL). A session that cannot shrink to its limit within 100 ms while others
 * wait, or for whose least_bytes there is no room, is paged out and waits. Sessions with MAY_UPGRADE are upgraded while
 * no guaranteed one waits, and demoted when one needs the room. gpushare_session_info has class and limit. P and E of
 * every session count, also where sessions share a lane. Where sessions cannot be paged out (contiguous layout) running
 * sessions go on. Does not block. Errors: UNSUPPORTED (a shared device: its operator decides), INVALID_ARGUMENT,
 * INVALID_STATE. */
GPUSHARE_API int32_t gpushare_runtime_set_coordination(gpushare_runtime runtime,
                                                       const gpushare_coordination_params* params);

/* Blocks until the work enqueued on every lane has finished. Does not wait for submitted iterations that
 * have not had their turn yet; gpushare_runtime_drain does. Errors: TIMED_OUT, DEVICE_LOST. */
GPUSHARE_API int32_t gpushare_runtime_synchronize(gpushare_runtime runtime, uint64_t timeout_ns);

/* Blocks until every iteration submitted before this call, to any session, has run or was given up (its session ended).
 * Then waits like gpushare_runtime_synchronize. Does not wait for iterations submitted meanwhile. Returns OK also if
 * iterations failed: their tickets tell. Errors: TIMED_OUT (the message says what the call waits for), DEVICE_LOST,
 * INVALID_STATE (the calling thread has an iteration open that one of them waits for, or is in a function that the
 * runtime waits for). */
GPUSHARE_API int32_t gpushare_runtime_drain(gpushare_runtime runtime, uint64_t timeout_ns);

/* ---- session ---- */

enum {
  GPUSHARE_SESSION_ALLOW_QUEUEING = 1 << 0, /* the session may wait for admission instead of being refused */
  /* Allocations above the promise or the quota may go to host memory instead of failing, on devices that can address it.
   * They come home when there is room, and all blocks of the session may move (spill_limit_bytes of
   * gpushare_runtime_params): while it begins an iteration, other threads leave its blocks alone, and work on other
   * streams is known by gpushare_memory_record_use. */
  GPUSHARE_SESSION_ALLOW_SPILL = 1 << 1,
  /* An opportunistic session counts as guaranteed while there is room, where there is a coordinator
   * (gpushare_runtime_set_coordination, gpushare daemon --coordinate). */
  GPUSHARE_SESSION_MAY_UPGRADE = 1 << 2,
  /* An iteration that fails ends the session as FAILED. Without this flag such an iteration is abandoned: its ephemeral
   * blocks return, persistent memory stays, and the session goes on. An iteration fails when its submitted function throws or
   * returns a status other than OK, when a host function of its stream throws, and when it ends while its stream captures. */
  GPUSHARE_SESSION_FAIL_ON_ERROR = 1 << 3
};

enum {
  GPUSHARE_SESSION_QUEUED = 0,    /* waiting for admission */
  GPUSHARE_SESSION_RESIDENT = 1,  /* admitted */
  GPUSHARE_SESSION_PAGED_OUT = 2, /* admitted once, now with its persistent bytes in host memory */
  GPUSHARE_SESSION_CANCELLED = 3, /* by gpushare_session_cancel */
  GPUSHARE_SESSION_FAILED = 4     /* by its own error; see gpushare_session_get_info */
};

typedef struct gpushare_session_params {
  uint32_t struct_size;
  uint32_t session_class;    /* GPUSHARE_CLASS_* */
  const char* name;          /* shown in messages, timelines, reports; null = "session-N" */
  uint64_t persistent_bytes; /* need P: model and framework blocks; 0 = unknown, profiled */
  uint64_t ephemeral_bytes;  /* need E: the peak inside one iteration; 0 = unknown, profiled */
  uint64_t remaining_ns; /* device time it will need in all; 0 = unknown, estimated from iterations_total */
  uint64_t iterations_total; /* iterations it will run; 0 = unknown */
  uint64_t quota_bytes;      /* hard limit on its persistent + ephemeral bytes; 0 = none. See
                                gpushare_session_set_quota */
  int32_t priority;          /* larger runs first under "priority" */
  uint32_t flags;            /* GPUSHARE_SESSION_* */
  double weight;             /* share of the device's time under "fair", over all lanes; 0 = 1.0 */
  uint32_t plan_iterations;  /* nonzero: place ephemeral blocks by a placement plan, which is solved once an
                                iteration repeats */
  uint32_t compute_units;    /* SMs that its lane has for itself: a partition of at least this size, shared
                                only with sessions that ask for the same number. Work of other partitions
                                never runs on it; work of lanes without a partition may. 0 = no partition:
                                the lane shares the device with all such lanes. See gpushare_runtime_info */
  uint64_t least_bytes; /* for a coordinator: bytes on the device with which an opportunistic session that may
                                spill still runs, the rest in host memory. Leave room for an iteration and for
                                blocks that are kept. 0 = all of its need */
} gpushare_session_params;
#define GPUSHARE_SESSION_PARAMS_INIT \
  { sizeof(gpushare_session_params), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0, 0, 0 }

/* Opens a session. Does not wait. With ALLOW_QUEUEING a session that cannot be admitted now is QUEUED and its first
 * iteration waits; without the flag the call fails with DEVICE_OUT_OF_MEMORY and the numbers in the message. A session of
 * undeclared need first runs a profiling iteration alone and then has its measured need. Compute units are promised like
 * memory: with ALLOW_QUEUEING the session waits until enough of them are free. The caller owns *out_session. Errors:
 * EXCEEDS_CAPACITY (could not run alone), DEVICE_OUT_OF_MEMORY, INVALID_ARGUMENT, QUOTA_EXCEEDED (above GPUSHARE_MEMORY),
 * UNSUPPORTED (compute_units without partitions), DEVICE_LOST. */
GPUSHARE_API int32_t gpushare_session_open(gpushare_runtime runtime, const gpushare_session_params* params,
                                           gpushare_session* out_session);

/* Ends the session: cancels queued work, waits for the running iteration, and gives all blocks back; pointers into them
 * become invalid. Blocks until that iteration has ended and, outside of callbacks, until the `release` functions of
 * submitted iterations have returned. Errors: INVALID_STATE (called inside an iteration of this session on this thread). */
GPUSHARE_API int32_t gpushare_session_close(gpushare_session session);

/* Stops the session at its next iteration boundary: calls that wait in gpushare_iteration_begin and queued submissions fail
 * with CANCELLED, and the running iteration finishes. The handle stays valid until closed. Does not block. */
GPUSHARE_API int32_t gpushare_session_cancel(gpushare_session session);

/* Blocks until the session is resident. Errors: TIMED_OUT (still queued; the message says what for), INVALID_STATE
 * (iterations that this thread has open hold everything that the session could wait for), CANCELLED, DEVICE_LOST. */
GPUSHARE_API int32_t gpushare_session_wait_admitted(gpushare_session session, uint64_t timeout_ns);

typedef struct gpushare_session_info {
  uint32_t struct_size;
  uint32_t state; /* GPUSHARE_SESSION_* state */
  uint64_t session_id;
  int32_t status;                     /* why it FAILED; OK otherwise */
  uint32_t lane;                      /* UINT32_MAX without one */
  uint64_t persistent_bytes;          /* live, promoted blocks included */
  uint64_t ephemeral_bytes;           /* live now */
  uint64_t peak_bytes;                /* most of its persistent bytes, plus its largest iteration */
  uint64_t promised_persistent_bytes; /* P */
  uint64_t promised_ephemeral_bytes;  /* E */
  uint64_t promoted_bytes;            /* ephemeral blocks that outlived their iteration */
  uint64_t spilled_bytes;             /* live blocks in host memory, not counted in persistent_bytes */
  uint64_t iterations_done;
  uint64_t iterations_queued;
  uint64_t service_ns;         /* device time received */
  uint64_t queued_ns;          /* time waited for admission */
  uint64_t waited_ns;          /* time its iterations waited for their turn */
  uint64_t remaining_ns;       /* estimate; UINT64_MAX when unknown */
  uint64_t planned_iterations; /* iterations placed wholly by the placement plan */
  uint32_t compute_units;      /* that its lane has for itself, rounded up to the granularity; 0 = shares */
  uint32_t reserved;
  uint64_t quota_bytes; /* 0 = none */
  uint64_t
      effective_quota_bytes; /* the limit in force. It is quota_bytes, unless that was lowered below P + E:
                                then it falls to quota_bytes as the promise falls */
  uint64_t home_bytes;       /* device memory behind spilled blocks that came home; a part of P */
  uint64_t limit_bytes;      /* of P + E, that a coordinator allows it; 0 = no such limit */
  uint32_t session_class;    /* GPUSHARE_CLASS_*, as it counts now: a coordinator may have changed it */
  uint32_t reserved_2;
} gpushare_session_info;
#define GPUSHARE_SESSION_INFO_INIT                                                                         \
  {                                                                                                        \
    sizeof(gpushare_session_info), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, \
        0, 0                                                                                               \
  }

/* Returns the state, and statistics since the session was opened, also of a session that has ended. iterations_done and
 * service_ns count what the device has finished. That may be up to enqueue_depth iterations fewer than have ended on the
 * host: call gpushare_runtime_synchronize first for complete figures. Does not block. Errors: INVALID_ARGUMENT (bad
 * struct_size). */
GPUSHARE_API int32_t gpushare_session_get_info(gpushare_session session, gpushare_session_info* out_info);

/* Writes one sentence into out_text that says what the session's next iteration waits for: admission (its need, the free
 * bytes, the sessions that hold most), its turn (the session that has the lane), the device, or nothing. Writes at most
 * text_bytes including the NUL and truncates a longer text. The message of a wait that returns TIMED_OUT contains the same
 * text. The text is for people; its wording may change. Does not block. Errors: INVALID_ARGUMENT (no room). */
GPUSHARE_API int32_t gpushare_session_explain_wait(gpushare_session session, char* out_text,
                                                   uint64_t text_bytes);

/* The next two change the priority and the weight that gpushare_session_params gave. They take effect at the next
 * scheduling decision. Errors: INVALID_ARGUMENT (a weight that is not finite and above 0), INVALID_STATE (the session has
 * ended). */
GPUSHARE_API int32_t gpushare_session_set_priority(gpushare_session session, int32_t priority);
GPUSHARE_API int32_t gpushare_session_set_weight(gpushare_session session, double weight);
/* Changes the quota_bytes of gpushare_session_params; 0 = none. If the quota is lowered below what the session has, live
 * blocks stay, and allocations above the quota fail with QUOTA_EXCEEDED, or go to host memory with ALLOW_SPILL. The session's
 * promise then falls at its boundaries, as far as it has freed blocks, by blocks that move to host memory (ALLOW_SPILL), and by
 * the bytes that its iterations cannot use any more. gpushare_session_info has the quota and the value in force. P and E are each
 * rounded up to the granularity of the memory, so together they may be up to two granules above the quota. The quota also
 * holds on shared devices, where the process enforces it. Does not wait for other work of the device. Errors: as above. */
GPUSHARE_API int32_t gpushare_session_set_quota(gpushare_session session, uint64_t quota_bytes);
/* Declares the device time that the session still needs. srtf orders sessions by it. Errors: INVALID_STATE. */
GPUSHARE_API int32_t gpushare_session_set_remaining(gpushare_session session, uint64_t remaining_ns);

/* ---- memory ---- */

enum {
  GPUSHARE_KIND_MODEL = 0,     /* persistent: parameters, optimizer state; few, large */
  GPUSHARE_KIND_FRAMEWORK = 1, /* persistent: what a framework keeps between iterations; small */
  GPUSHARE_KIND_EPHEMERAL = 2  /* gone when its iteration ends, at no cost */
};

/* Allocates a persistent block (MODEL or FRAMEWORK), freed with gpushare_memory_free or with the session. Aligned to
 * `alignment_bytes` (a power of two up to 2 MiB; 0 = 256). Within the session's promise no driver call is made; above it
 * the promise grows if that is safe. Blocks on a QUEUED or PAGED_OUT session until the session is resident. The contents
 * are undefined at first. Read and write them, also the first values, only between begin and end of an iteration of the
 * session: between iterations a policy that pages sessions out (srtf, priority) may have moved them to host memory, and an
 * access then faults. Errors: DEVICE_OUT_OF_MEMORY (message: asked, largest hole, who holds what), QUOTA_EXCEEDED,
 * INVALID_ARGUMENT (0 bytes, EPHEMERAL: use gpushare_iteration_alloc), CANCELLED. */
GPUSHARE_API int32_t gpushare_session_alloc(gpushare_session session, uint32_t kind, uint64_t bytes,
                                            uint64_t alignment_bytes, gpushare_device_address* out_address);

/* Allocates a block of any kind for the iteration that has the lane of `stream`. If no iteration has it, or `stream` is
 * null, the block is for the innermost open iteration that the calling thread began. Pass the stream when helper threads of
 * a framework allocate. Errors: as gpushare_session_alloc, and NOT_FOUND when there is no such iteration. */
GPUSHARE_API int32_t gpushare_memory_alloc(gpushare_runtime runtime, gpushare_stream stream, uint32_t kind,
                                           uint64_t bytes, uint64_t alignment_bytes,
                                           gpushare_device_address* out_address);

/* Frees a block in the order of its owner's stream: work enqueued on that stream later may reuse its memory. A block whose
 * use on another stream was recorded is reused only after that use. Errors: NOT_FOUND (not a live block of this runtime;
 * nothing changes). */
GPUSHARE_API int32_t gpushare_memory_free(gpushare_runtime runtime, gpushare_device_address address);

/* Records that work enqueued on `stream` so far uses the block at `address`. Once freed, the block is reused only after
 * that work. Not needed for the stream of the block's owner. Does not block. Errors: NOT_FOUND (not a live block),
 * INVALID_STATE (the stream captures a CUDA graph). */
GPUSHARE_API int32_t gpushare_memory_record_use(gpushare_runtime runtime, gpushare_device_address address,
                                                gpushare_stream stream);

typedef struct gpushare_block_info {
  uint32_t struct_size;
  uint32_t kind;
  gpushare_device_address address; /* as asked: the block's first byte */
  uint64_t bytes;                  /* as asked */
  uint64_t session_id;
  uint32_t lane;     /* UINT32_MAX for persistent blocks */
  uint32_t promoted; /* 1: outlived its iteration */
  uint32_t spilled;  /* 1: lives in host memory */
  uint32_t reserved;
} gpushare_block_info;
#define GPUSHARE_BLOCK_INFO_INIT \
  { sizeof(gpushare_block_info), 0, 0, 0, 0, 0, 0, 0, 0 }

/* Describes the live block that starts at `address`. Errors: NOT_FOUND. */
GPUSHARE_API int32_t gpushare_memory_get_info(gpushare_runtime runtime, gpushare_device_address address,
                                              gpushare_block_info* out_info);

/* Called when an allocation of `bytes` is about to fail because the device has no memory (not when the session has reached
 * its quota). It runs on the allocating thread with no lock held. Free something and return nonzero to have the allocation
 * tried again, up to four times for each allocation. It may call gpushare; it is not called again for an allocation that
 * fails inside it. */
typedef int32_t (*gpushare_out_of_memory_fn)(void* user_data, uint64_t session_id, uint64_t bytes);
/* Sets the function; null removes it. Calls of the previous function may still be under way. `user_data`
 * must stay valid until the runtime is closed. Errors: INVALID_STATE (closed). */
GPUSHARE_API int32_t gpushare_runtime_set_out_of_memory_callback(gpushare_runtime runtime,
                                                                 gpushare_out_of_memory_fn fn,
                                                                 void* user_data);

/* ---- iteration ---- */

/* Waits for the session's turn in its lane. At most one iteration of a session is open at a time. The thread that begins it
 * is bound to it until it ends; if the thread exits before, the iteration ends as failed. Blocks up to timeout_ns. Errors:
 * TIMED_OUT (no turn was lost; the message says what the call waited for), CANCELLED, INVALID_STATE (an iteration is open
 * already; the session has failed; or the wait would never end, because other open iterations of this thread hold the lane or
 * memory that it waits for), CALLBACK_FAILED (a host function of an earlier iteration without a ticket threw; told once, and
 * the next call goes on), DEVICE_LOST. */
GPUSHARE_API int32_t gpushare_iteration_begin(gpushare_session session, uint64_t timeout_ns,
                                              gpushare_iteration* out_iteration);

/* Ends the iteration. Its ephemeral blocks return in stream order, except those kept by gpushare_iteration_keep, which are
 * persistent. The lane goes on. Does not wait for the device unless enqueue_depth iterations are in flight. The handle is
 * invalid afterwards, whatever the status. Errors: INVALID_STATE (its stream still captured a CUDA graph: the capture is
 * dropped and the iteration abandoned, or its session FAILED under FAIL_ON_ERROR, and then the status is OK), DEVICE_LOST. */
GPUSHARE_API int32_t gpushare_iteration_end(gpushare_iteration iteration);

/* Ends the iteration and its session as FAILED with `status` (a 2xx to 4xx code; others count as
 * CALLBACK_FAILED) and `message` (may be null). No other session is touched. */
GPUSHARE_API int32_t gpushare_iteration_fail(gpushare_iteration iteration, int32_t status,
                                             const char* message);

/* Allocates an ephemeral block. O(1), no driver call, no lock shared with other lanes.
 * Errors: as gpushare_session_alloc. */
GPUSHARE_API int32_t gpushare_iteration_alloc(gpushare_iteration iteration, uint64_t bytes,
                                              uint64_t alignment_bytes, gpushare_device_address* out_address);

/* Promotes an ephemeral block: it outlives the iteration, counts as persistent, and is freed like a persistent block.
 * Errors: NOT_FOUND, DEVICE_OUT_OF_MEMORY (the promotion is not safe, or the session shares its lane with other
 * processes and there is no room for E of its own, which it has from the first kept block on; the block stays
 * ephemeral). */
GPUSHARE_API int32_t gpushare_iteration_keep(gpushare_iteration iteration, gpushare_device_address address);

/* The lane's stream. Owned by the lane; valid until the iteration ends. */
GPUSHARE_API int32_t gpushare_iteration_get_stream(gpushare_iteration iteration, gpushare_stream* out_stream);

/* The function of a submitted iteration. It runs on the lane's thread when it is the session's turn. `iteration` is valid
 * during the call. It returns a status; a status other than OK is the iteration's failure, which the ticket tells; the session
 * goes on, unless it was opened with GPUSHARE_SESSION_FAIL_ON_ERROR. It may call gpushare but must not close its session or
 * runtime. A C++ exception that leaves it, or a status of 100 to 199, is CALLBACK_FAILED. */
typedef int32_t (*gpushare_iteration_fn)(void* user_data, gpushare_iteration iteration);

/* Queues an iteration. Iterations of a session run in the order of submission. If the call succeeds, `release`, if given,
 * is called exactly once with user_data, after the iteration has run or when it is certain that it never will. It may call
 * gpushare, except gpushare_runtime_close (INVALID_STATE). out_ticket may be null; otherwise the caller releases the
 * ticket. Does not block. Errors: CANCELLED, INVALID_STATE (session failed), QUEUE_FULL (65,536 queued). */
GPUSHARE_API int32_t gpushare_session_submit(gpushare_session session, gpushare_iteration_fn fn,
                                             void* user_data, void (*release)(void* user_data),
                                             gpushare_ticket* out_ticket);

/* Blocks until the iteration's device work has finished. Returns its outcome: OK, what the function returned, CANCELLED,
 * DEVICE_LOST; or TIMED_OUT. Must not be called from an iteration of the same lane with a timeout above 0. */
GPUSHARE_API int32_t gpushare_ticket_wait(gpushare_ticket ticket, uint64_t timeout_ns);
/* Gives the ticket back. The iteration still runs. */
GPUSHARE_API int32_t gpushare_ticket_release(gpushare_ticket ticket);

/* ---- streams ---- */

/* CUDA graphs. An iteration may capture a graph on its stream (by the native handle) and launch it, or launch a graph
 * captured before. Begin and end the capture inside the iteration, on one thread: an iteration that ends while its stream
 * captures drops the capture and fails with INVALID_STATE. Allocations and frees during a capture happen at
 * once and are not part of the graph. The graph's memory must stay allocated until its last launch has finished; therefore
 * a graph kept across iterations may use persistent blocks only. On a stream that captures, gpushare_stream_synchronize,
 * gpushare_stream_launch_host, gpushare_memory_record_use and gpushare_session_load are INVALID_STATE and leave the capture
 * alone; copies and fills become part of the graph. */

/* Creates a side stream of the runtime, outside all lanes. The caller releases it. `priority` is a stream priority of the
 * device (capability PRIORITIES), 0 on other devices. Errors: INVALID_STATE (closed), errors of the device. */
GPUSHARE_API int32_t gpushare_stream_create(gpushare_runtime runtime, int32_t priority,
                                            gpushare_stream* out_stream);
/* Waits for the stream's work and releases the stream. Blocks. Errors: INVALID_ARGUMENT (a lane's stream); INVALID_STATE
 * (the call is made where calls may not block; the stream stays). */
GPUSHARE_API int32_t gpushare_stream_release(gpushare_stream stream);
/* The device's own handle: CUstream on cuda. */
GPUSHARE_API int32_t gpushare_stream_get_native(gpushare_stream stream, void** out_native);
/* Blocks until the work enqueued so far has finished. Errors: those of the work; INVALID_STATE (the work has
 * not finished, and the call is made where calls may not block). */
GPUSHARE_API int32_t gpushare_stream_synchronize(gpushare_stream stream);
/* Enqueues a host function. On the host device kernels run this way. The function is called once, on a thread of the
 * device, in stream order. It may call gpushare, but calls that would block there return INVALID_STATE. If a C++ exception
 * leaves it, the iteration that enqueued it fails with CALLBACK_FAILED: its ticket says so, or, of an iteration without one,
 * the session's next gpushare_iteration_begin (FAIL_ON_ERROR: the session ends). Does not block. Errors: INVALID_ARGUMENT,
 * INVALID_STATE (the stream captures), DEVICE_LOST. */
GPUSHARE_API int32_t gpushare_stream_launch_host(gpushare_stream stream, gpushare_host_function fn,
                                                 void* user_data);
/* Enqueues a copy; `kind` is GPUSHARE_COPY_*. Host memory must stay valid until the copy has finished. With pageable host
 * memory the driver may wait. Errors: INVALID_ARGUMENT (kind; an address that the device knows to be wrong), DEVICE_LOST. */
GPUSHARE_API int32_t gpushare_stream_copy(gpushare_stream stream, uint64_t destination, uint64_t source,
                                          uint64_t bytes, uint32_t kind);
/* Enqueues setting `bytes` bytes to `value`. Does not block. Errors: as gpushare_stream_copy. */
GPUSHARE_API int32_t gpushare_stream_fill(gpushare_stream stream, gpushare_device_address address,
                                          uint8_t value, uint64_t bytes);
/* Enqueues work of a known cost on a simulating device. Errors: UNSUPPORTED elsewhere. */
GPUSHARE_API int32_t gpushare_stream_work(gpushare_stream stream, const gpushare_backend_work* work);

/* ---- exports ---- */

/* Each function below replaces the file at `path` as a whole. If it fails, the old file is unchanged. */

/* Writes what happened so far as Chrome trace JSON (opens in Perfetto): a track for each lane with its iterations, a track
 * for each session with queueing and residency, and counters of memory. Needs RECORD_TIMELINE (INVALID_STATE). Errors:
 * IO_ERROR. Blocks. */
GPUSHARE_API int32_t gpushare_runtime_write_timeline(gpushare_runtime runtime, const char* path);

enum {
  GPUSHARE_SNAPSHOT_PICKLE = 0, /* PyTorch memory_viz: a pickle of segments, blocks, device_traces */
  GPUSHARE_SNAPSHOT_JSON = 1    /* the same content as JSON */
};
/* Writes the memory as it is now: a segment for each lane and persistent heap; with RECORD_ALLOCATIONS also
 * the allocations and frees that led to it. Errors: INVALID_ARGUMENT (format), IO_ERROR. Blocks on the disk. */
GPUSHARE_API int32_t gpushare_runtime_write_snapshot(gpushare_runtime runtime, const char* path,
                                                     uint32_t format);

/* Writes the allocation log as RMM's CSV (Thread,Time,Action,Pointer,Size,Stream), which `gpushare replay` reads.
 * Needs RECORD_ALLOCATIONS (INVALID_STATE). Errors: IO_ERROR. Blocks on the disk. */
GPUSHARE_API int32_t gpushare_runtime_write_allocation_log(gpushare_runtime runtime, const char* path);

/* Writes the figures of the runtime, and of the sessions that are open, as NUL-terminated text in Prometheus' format (0.0.4), for
 * a server that adds it to its own. The names are those of `gpushare daemon --metrics` (docs/metrics.md). out_size receives
 * the size of the text, including the NUL. Call it with capacity 0 and a null text first to learn the size, and allow for
 * sessions that come meanwhile. Any thread; does not wait for the device. Errors: INVALID_ARGUMENT (`capacity` is too small;
 * out_size is set in this case too), INVALID_STATE (closed). */
GPUSHARE_API int32_t gpushare_runtime_write_metrics(gpushare_runtime runtime, char* text, uint64_t capacity,
                                                    uint64_t* out_size);

#ifdef __cplusplus
} /* extern "C" */
#endif

#include "gpushare/allocator.h"
#include "gpushare/bulk.h"
#include "gpushare/gate.h"
#include "gpushare/heap.h"
#include "gpushare/loader.h"
#include "gpushare/policy.h"
#include "gpushare/range.h"
#include "gpushare/serving.h"
#include "gpushare/shared_image.h"
#include "gpushare/steps.h"

#endif /* GPUSHARE_GPUSHARE_H_ */
