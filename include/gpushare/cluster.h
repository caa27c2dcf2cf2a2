/* gpushare: decisions above one device. They are in a library of their own, libgpushare_cluster, which needs
 * no runtime and no device; libgpushare contains nothing of it.
 *
 * The problem and the decision are JSON documents with a version. gpushare_cluster_schema() returns their
 * JSON Schema, and docs/cli.md says what the fields mean. The tool's `gpushare cluster` reads and writes the
 * same documents.
 *
 * Functions return a status of gpushare/status.h; zero is success. Texts that a function gives belong to the caller,
 * who frees them by gpushare_cluster_text_free. All functions may be called from any thread, and never block on
 * anything but their own work, gpushare_cluster_reservation_wait aside.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GPUSHARE_CLUSTER_H_
#define GPUSHARE_CLUSTER_H_

#include <stddef.h>
#include <stdint.h>

#include "gpushare/status.h"

#if defined(__GNUC__)
#define GPUSHARE_CLUSTER_API __attribute__((visibility("default")))
#else
#define GPUSHARE_CLUSTER_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The message of the calling thread's last failed call: the field of the document, its value, the allowed values. Never
 * null; valid until the thread's next call. */
GPUSHARE_CLUSTER_API const char* gpushare_cluster_last_error_message(void);

/* Frees a text that a function of this library gave. Null is allowed. */
GPUSHARE_CLUSTER_API void gpushare_cluster_text_free(char* text);

/* The JSON Schema (draft 2020-12) of all documents. The caller frees it.
 * Errors: INVALID_ARGUMENT (out_schema is null), HOST_OUT_OF_MEMORY. */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_schema(char** out_schema);

/* Decides one document. `document` has `document_bytes` bytes of JSON and need not end with a zero.
 * `choices` names schedulers, or for kinds that choose one, objectives, separated by commas; null takes the
 * kind's default. The result is a zero-terminated JSON document, which the caller frees: {"version", "kind",
 * "results": [one entry a choice]}. The call takes as long as the schedulers need: seconds for exact
 * schedulers on large documents. Errors: MALFORMED_INPUT (the document: path, value, allowed values),
 * INVALID_ARGUMENT (a null pointer; an unknown choice), HOST_OUT_OF_MEMORY. On an error *out_result
 * is null. */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_plan(const char* document, uint64_t document_bytes,
                                                   const char* choices, char** out_result);

/* ---- A scheduler of your own, for documents of kind training ----
 *
 * A table of functions over a context of yours. The library tells it what happened, then asks it for actions by `tick`;
 * all times are seconds of the run. It is called from the thread of gpushare_cluster_run alone and must
 * not call gpushare_cluster_run with the same context. Job numbers ascend in the order of arrival. An action that
 * cannot be taken (a job that runs already, the wrong number of devices, memory that a device does not have) ends the
 * run with INVALID_ARGUMENT and a message that names job and reason. A C++ exception that leaves a function ends the run
 * with CALLBACK_FAILED and a message that names the function. */
#define GPUSHARE_CLUSTER_SCHEDULER_ABI_VERSION 1u

/* A job as it is known when it arrives. Valid only during the call. The library sets struct_size. */
typedef struct gpushare_cluster_job_info {
  uint32_t struct_size;
  uint32_t gang; /* devices that it runs on, all at once */
  const char* name;
  const char* config; /* model and batch; may be "" */
  double arrival_s;
  double work_s;         /* alone, on each of its devices of speed 1 */
  uint64_t memory_bytes; /* on each of its devices */
  int32_t guaranteed;    /* 1, or 0: opportunistic */
  int32_t priority;
  const double* demands; /* parts of a device's resources that it keeps busy alone, each in [0, 1] */
  uint64_t demand_count;
  double weight; /* of its completion beside those of other jobs; 1 unless said */
} gpushare_cluster_job_info;

/* The decisions of a tick. Valid only during that tick. Pauses are carried out first, then the other actions in the
 * order of the calls. The functions return INVALID_ARGUMENT for null pointers, outside of the tick (on the thread that runs
 * it), and for more devices than the widest job has, else OK. */
typedef struct gpushare_cluster_actions gpushare_cluster_actions;
/* Starts a job, or goes on with it after a pause, on as many distinct devices as its gang. `opportunistic`: it gets
 * what guaranteed jobs leave there, and they do not feel it. */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_actions_place(gpushare_cluster_actions* actions, uint32_t job,
                                                            const uint32_t* devices, uint32_t device_count,
                                                            int32_t opportunistic);
/* Stops a job and takes its devices; the work done is kept. */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_actions_pause(gpushare_cluster_actions* actions, uint32_t job);
/* Changes whether a running job is opportunistic. */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_actions_resize(gpushare_cluster_actions* actions, uint32_t job,
                                                             int32_t opportunistic);
/* Rejects a job that waits: it will never run. The reason is copied. */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_actions_reject(gpushare_cluster_actions* actions, uint32_t job,
                                                             const char* reason);

typedef struct gpushare_cluster_scheduler_ops {
  uint32_t struct_size; /* sizeof(gpushare_cluster_scheduler_ops) */
  uint32_t abi_version; /* GPUSHARE_CLUSTER_SCHEDULER_ABI_VERSION */
  const char* name;     /* for `choices`; none of the library's own */
  void* context;        /* given to every function */
  /* Called first in a run: forgets what the run before has left. May be null. */
  void (*begin)(void* context);
  /* Called for every device at the beginning of a run, and later when a device comes up or goes (`up` 0: its jobs wait again). */
  void (*device_changed)(void* context, uint32_t device, uint64_t memory_bytes, double speed, int32_t up,
                         double now_s);
  void (*arrived)(void* context, uint32_t job, const gpushare_cluster_job_info* info, double now_s);
  /* Tells of a running job: the device time that it has had, the work left, how many times slower than alone it runs.
   * May be null. */
  void (*observed)(void* context, uint32_t job, double attained_s, double remaining_s, double slowdown,
                   double now_s);
  void (*finished)(void* context, uint32_t job, double now_s);
  /* Appends actions. Returns the time at which it wants to be asked again even if nothing happens; a negative number:
   * no such time. Without an event it is asked a millisecond later at the earliest, and the more often it was asked in a
   * row and appended nothing, the later (10 us more each time), so that every run ends. */
  double (*tick)(void* context, double now_s, gpushare_cluster_actions* actions);
} gpushare_cluster_scheduler_ops;
#define GPUSHARE_CLUSTER_SCHEDULER_OPS_V1_SIZE \
  (offsetof(gpushare_cluster_scheduler_ops, tick) + sizeof(void (*)(void)))

/* How a document is played. */
typedef struct gpushare_cluster_run_options {
  uint32_t struct_size;  /* sizeof(gpushare_cluster_run_options); GPUSHARE_CLUSTER_RUN_OPTIONS_INIT sets it */
  uint32_t rounds;       /* for kinds with rounds, in place of the document's; 0: the document's */
  uint64_t seed;         /* of all noise */
  double noise;          /* in place of the document's; below 0: the document's */
  const char* objective; /* for kind shares: "sw", "ew" or "njc"; null: njc */
  const gpushare_cluster_scheduler_ops* const*
      schedulers; /* of your own, which `choices` may name; null if there are none */
  uint64_t scheduler_count;
} gpushare_cluster_run_options;
#define GPUSHARE_CLUSTER_RUN_OPTIONS_V1_SIZE \
  (offsetof(gpushare_cluster_run_options, scheduler_count) + sizeof(uint64_t))
#define GPUSHARE_CLUSTER_RUN_OPTIONS_INIT \
  { sizeof(gpushare_cluster_run_options), 0, 1, -1.0, 0, 0, 0 }

/* Plays one document through on virtual time, with noise, once by each scheduler of `choices` (as of
 * gpushare_cluster_plan; objectives are in the options). `options` may be null: the defaults of
 * GPUSHARE_CLUSTER_RUN_OPTIONS_INIT. The same document, choices and options give the same result but for its times of
 * solving. Errors and ownership: as gpushare_cluster_plan's; also INVALID_ARGUMENT for options of an unknown size, and
 * EXCEEDS_CAPACITY for a document that is too long to play, CALLBACK_FAILED when a scheduler threw. */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_run(const char* document, uint64_t document_bytes,
                                                  const char* choices,
                                                  const gpushare_cluster_run_options* options,
                                                  char** out_result);

/* ---- Reservations: named, counted resources on nodes, taken several at once or not at all ----
 *
 * A table knows nodes, each with resources of its own ("gpu": 8), and resources that owners set on them. A request asks
 * for parts; all parts of one alternative are granted together, or nothing is. Requests wait in the order of arrival. A
 * request that fits may pass one that does not, 64 times at most, so every request that the nodes can satisfy is
 * granted eventually. A wait that could never end, because owners wait for each other, is refused. An owner is one line
 * of control: work that releases independently has an owner name of its own.
 *
 * A request is JSON: {"owner", "parts": [...], "deadline_ms"?, "lease_ms"?}, or with "alternatives": [{"parts": [...]},
 * ...] in order of preference. A part is {"needs": {"gpu": 4, ...}, "count"? (1), "apart"? (false), "node"?}: `count`
 * placements, each on one node that has all needs free, on different nodes if apart, or all on `node`. A grant is
 * {"alternative", "nodes": [[a node for each placement] for each part]}.
 *
 * All functions may be called from any thread. Only gpushare_cluster_reservation_wait blocks for longer than
 * some microseconds of work. */
typedef struct gpushare_cluster_table gpushare_cluster_table;

/* An empty table. The caller releases it. Errors: INVALID_ARGUMENT (out_table is null), HOST_OUT_OF_MEMORY. */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_table_create(gpushare_cluster_table** out_table);
/* Frees a table. No other call on it may be under way. Null is allowed. */
GPUSHARE_CLUSTER_API void gpushare_cluster_table_release(gpushare_cluster_table* table);
/* Adds a node, or changes the capacities of its own resources: {"gpu": 8, ...}. Settings that the node had before it
 * was lost apply again. Errors: INVALID_ARGUMENT, MALFORMED_INPUT (resources, with the path). */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_table_add_node(gpushare_cluster_table* table, const char* node,
                                                             const char* resources);
/* Takes a node away. Grants that have a part on it end whole (waiting calls get DEVICE_LOST). Resources that were set
 * there by needs are set on another node that satisfies the needs, at once or when one is added. Errors: NOT_FOUND. */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_table_lose_node(gpushare_cluster_table* table,
                                                              const char* node);
/* Sets the capacity of an owner's resource; 0 removes it. `where` is {"node": name}, or {"any_of": [{"needs": {...}},
 * ...], "count"? (1)}: on `count` nodes whose capacities satisfy an alternative of any_of, the first that they can.
 * Errors: ALREADY_EXISTS (the name belongs to another owner or to a node), NOT_FOUND (no such node), EXCEEDS_CAPACITY
 * (too few nodes satisfy it), MALFORMED_INPUT. */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_table_set(gpushare_cluster_table* table, const char* owner,
                                                        const char* name, double capacity, const char* where);
/* The owner is gone: its grants are released, its waits cancelled, its resources removed. */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_table_end_owner(gpushare_cluster_table* table,
                                                              const char* owner);
/* Returns {"waiting", "resources": [{"node", "name", "capacity", "used"}]}. The caller frees the text. */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_table_status(gpushare_cluster_table* table, char** out_status);
/* Says why a request would not be granted now: resources that no node has, and resources that are held, with
 * their holders. The caller frees the text. Errors: MALFORMED_INPUT. */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_table_explain(gpushare_cluster_table* table,
                                                            const char* request, char** out_text);

/* Hands a request in; it is granted at once or waits. Errors: MALFORMED_INPUT (path and value), INVALID_STATE (the wait
 * would never end; the message names the owners). */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_reservation_submit(gpushare_cluster_table* table,
                                                                 const char* request, uint64_t* out_id);
/* Waits until a request is granted, timeout_ns at most (UINT64_MAX: as long as it takes), and gives its grant, which
 * the caller frees. Errors: TIMED_OUT (it still waits, or its own deadline passed: then it is gone), CANCELLED,
 * DEVICE_LOST (a node of the grant was lost), INVALID_STATE (its lease ended), NOT_FOUND (no such request, or one that
 * ended before the last 1,024 that ended). */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_reservation_wait(gpushare_cluster_table* table, uint64_t id,
                                                               uint64_t timeout_ns, char** out_grant);
/* Withdraws a waiting request; a call that waits on it gets CANCELLED. Errors: INVALID_STATE (the request does not wait). */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_reservation_cancel(gpushare_cluster_table* table, uint64_t id);
/* Gives a grant back. Errors: INVALID_STATE (it is not granted, or no longer). */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_reservation_release(gpushare_cluster_table* table, uint64_t id);
/* Starts the lease of a grant anew. Errors: INVALID_STATE (it is not granted, or no longer). */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_reservation_renew(gpushare_cluster_table* table, uint64_t id);

#ifdef __cplusplus
}
#endif

#endif /* GPUSHARE_CLUSTER_H_ */
