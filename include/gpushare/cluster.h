/* gpushare: decisions above one device. A library of its own, libgpushare_cluster: it needs no runtime and no device, and nothing of it is
 * in libgpushare.
 *
 * What is decided, and the decision, are JSON documents with a version; their JSON Schema is gpushare_cluster_schema(), and docs/cli.md
 * says what the fields mean. The tool's `gpushare cluster` reads and writes the same documents.
 *
 * Functions return a status of gpushare/status.h; zero is success. Texts that a function gives belong to the caller, who frees them by
 * gpushare_cluster_text_free. All functions may be called from any thread, and never block on anything but their own work.
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

#ifdef __cplusplus
}
#endif

#endif /* GPUSHARE_CLUSTER_H_ */
