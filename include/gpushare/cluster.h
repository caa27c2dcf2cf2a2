/* gpushare: decisions above one device. A library of its own, libgpushare_cluster: it needs no runtime and no device, and nothing of it is
 * in libgpushare.
 *
 * What is decided, and the decision, are JSON documents with a version; their JSON Schema is gpushare_cluster_schema(), and docs/cli.md
 * says what the fields mean. The tool's `gpushare cluster` reads and writes the same documents.
 *
 * Functions return a status of gpushare/status.h; zero is success. Texts that a function gives belong to the caller, who frees them by
 * gpushare_cluster_text_free. All functions may be called from any thread, and never block on anything but their own work, gpushare_cluster_reservation_wait aside.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GPUSHARE_CLUSTER_H_
#define GPUSHARE_CLUSTER_H_

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

/* The message of the calling thread's last failed call: which field of the document, its value, what is allowed. Never null; valid until
 * the thread's next call. */
GPUSHARE_CLUSTER_API const char* gpushare_cluster_last_error_message(void);

/* Frees a text that a function of this library gave. Null is allowed. */
GPUSHARE_CLUSTER_API void gpushare_cluster_text_free(char* text);

/* The JSON Schema (draft 2020-12) of all documents. The caller frees it.
 * Errors: INVALID_ARGUMENT (out_schema is null), HOST_OUT_OF_MEMORY. */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_schema(char** out_schema);

/* Decides one document. `document` has `document_bytes` bytes of JSON and need not end with a zero. `choices` names schedulers, or for
 * kinds that choose one, objectives, separated by commas; null takes the kind's default. The result is a zero-terminated JSON document,
 * which the caller frees: {"version", "kind", "results": [one entry a choice]}. Takes as long as the schedulers need: for exact ones on
 * large documents seconds.
 * Errors: MALFORMED_INPUT (the document: path, value, what is allowed), INVALID_ARGUMENT (a null pointer; a choice that there is not),
 * HOST_OUT_OF_MEMORY. On an error *out_result is null. */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_plan(const char* document, uint64_t document_bytes,
                                                   const char* choices, char** out_result);

/* ---- Reservations: named, counted resources on nodes, taken several at once or not at all ----
 *
 * A table knows nodes, each with resources of its own ("gpu": 8), and resources that owners set on them. A request asks for parts; all
 * parts of one alternative are granted together, or nothing is. Requests wait in the order of arrival; one that fits may pass one that does
 * not, 64 times at most, so that whatever the nodes can satisfy is granted eventually. A wait that could never end, because owners wait for
 * each other, is refused. An owner is one line of control: work that releases independently has an owner name of its own.
 *
 * A request is JSON: {"owner", "parts": [...], "deadline_ms"?, "lease_ms"?}, or with "alternatives": [{"parts": [...]}, ...] in order of
 * preference. A part is {"needs": {"gpu": 4, ...}, "count"? (1), "apart"? (false), "node"?}: `count` placements, each on one node that has
 * all needs free, on different nodes if apart, or all on `node`. A grant is {"alternative", "nodes": [[a node for each placement] for each
 * part]}.
 *
 * All functions may be called from any thread. Only gpushare_cluster_reservation_wait blocks for longer than a microsecond's work. */
typedef struct gpushare_cluster_table gpushare_cluster_table;

/* An empty table. The caller releases it. Errors: INVALID_ARGUMENT (out_table is null), HOST_OUT_OF_MEMORY. */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_table_create(gpushare_cluster_table** out_table);
/* Frees a table. No other call on it may be under way. Null is allowed. */
GPUSHARE_CLUSTER_API void gpushare_cluster_table_release(gpushare_cluster_table* table);
/* Adds a node, or changes the capacities of its own resources: {"gpu": 8, ...}. What was set on it before it was lost is set again.
 * Errors: INVALID_ARGUMENT, MALFORMED_INPUT (resources, with the path). */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_table_add_node(gpushare_cluster_table* table, const char* node,
                                                             const char* resources);
/* Takes a node away: grants that have a part on it end whole (DEVICE_LOST for who waits on them), and what was set there by needs is set on
 * another node that satisfies them, at once or when one is added. Errors: NOT_FOUND. */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_table_lose_node(gpushare_cluster_table* table,
                                                              const char* node);
/* Sets the capacity of an owner's resource; 0 removes it. `where` is {"node": name}, or {"any_of": [{"needs": {...}}, ...], "count"? (1)}:
 * on so many nodes whose capacities satisfy the first of any_of that they can. Errors: ALREADY_EXISTS (the name belongs to another owner or
 * to a node), NOT_FOUND (no such node), EXCEEDS_CAPACITY (too few nodes satisfy it), MALFORMED_INPUT. */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_table_set(gpushare_cluster_table* table, const char* owner,
                                                        const char* name, double capacity, const char* where);
/* The owner is gone: its grants are released, its waits cancelled, what it set is removed. */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_table_end_owner(gpushare_cluster_table* table,
                                                              const char* owner);
/* {"waiting", "resources": [{"node", "name", "capacity", "used"}]}. The caller frees it. */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_table_status(gpushare_cluster_table* table, char** out_status);
/* Why a request would not be granted now: what no node has, what is held and by whom. The caller frees it. Errors: MALFORMED_INPUT. */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_table_explain(gpushare_cluster_table* table,
                                                            const char* request, char** out_text);

/* Hands a request in; it is granted at once or waits. Errors: MALFORMED_INPUT (path and value), INVALID_STATE (the wait would never end;
 * the message names the owners). */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_reservation_submit(gpushare_cluster_table* table,
                                                                 const char* request, uint64_t* out_id);
/* Waits until a request is granted, timeout_ns at most (UINT64_MAX: as long as it takes), and gives its grant, which the caller frees.
 * Errors: TIMED_OUT (it still waits, or its own deadline passed: then it is gone), CANCELLED, DEVICE_LOST (a node of the grant was lost),
 * INVALID_STATE (its lease ended), NOT_FOUND (no such request). */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_reservation_wait(gpushare_cluster_table* table, uint64_t id,
                                                               uint64_t timeout_ns, char** out_grant);
/* Withdraws a request that waits; who waits on it gets CANCELLED. Errors: INVALID_STATE (it does not wait). */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_reservation_cancel(gpushare_cluster_table* table, uint64_t id);
/* Gives a grant back. Errors: INVALID_STATE (it is not granted, or no longer). */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_reservation_release(gpushare_cluster_table* table, uint64_t id);
/* Starts the lease of a grant anew. Errors: INVALID_STATE (it is not granted, or no longer). */
GPUSHARE_CLUSTER_API int32_t gpushare_cluster_reservation_renew(gpushare_cluster_table* table, uint64_t id);

#ifdef __cplusplus
}
#endif

#endif /* GPUSHARE_CLUSTER_H_ */
