/* gpushare: the allocator without a device. A heap places blocks in the offsets [0, capacity) and touches no memory
 * behind them; the placement solver places buffers whose lifetimes are known. Part of gpushare.h, which includes it;
 * its contract holds here, except that a heap is not thread-safe: the caller must serialise calls on one heap.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GPUSHARE_HEAP_H_
#define GPUSHARE_HEAP_H_

#include "gpushare/gpushare.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gpushare_heap_s* gpushare_heap; /* a block heap over offsets */

typedef struct gpushare_heap_params {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t capacity_bytes;  /* up to 1 PiB */
  uint64_t alignment_bytes; /* granule, a power of two from 16; 0 = 256 */
} gpushare_heap_params;
#define GPUSHARE_HEAP_PARAMS_INIT \
  { sizeof(gpushare_heap_params), 0, 0, 0 }

/* The caller owns *out_heap and releases it. Errors: INVALID_ARGUMENT (the message names the number),
 * HOST_OUT_OF_MEMORY. */
GPUSHARE_API int32_t gpushare_heap_create(const gpushare_heap_params* params, gpushare_heap* out_heap);
GPUSHARE_API int32_t gpushare_heap_release(gpushare_heap heap);
/* O(1). Errors: DEVICE_OUT_OF_MEMORY (asked, free, largest hole), QUOTA_EXCEEDED (the heap holds as many blocks as it keeps
 * records of, a million at least), INVALID_ARGUMENT (0 bytes). */
GPUSHARE_API int32_t gpushare_heap_alloc(gpushare_heap heap, uint64_t bytes, uint64_t* out_offset);
/* O(1). Errors: NOT_FOUND (no live block starts there). */
GPUSHARE_API int32_t gpushare_heap_free(gpushare_heap heap, uint64_t offset);
typedef struct gpushare_heap_info {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t capacity_bytes;
  uint64_t live_bytes;
  uint64_t live_blocks;
  uint64_t largest_hole_bytes;
  uint64_t high_water_bytes; /* end of the highest block ever placed */
} gpushare_heap_info;
#define GPUSHARE_HEAP_INFO_INIT \
  { sizeof(gpushare_heap_info), 0, 0, 0, 0, 0, 0 }
/* O(1), except for largest_hole_bytes, which may search one list of holes. Errors: INVALID_ARGUMENT. */
GPUSHARE_API int32_t gpushare_heap_get_info(gpushare_heap heap, gpushare_heap_info* out_info);

/* Solves a static placement: buffer i lives in [lower[i], upper[i]) and takes size_bytes[i] bytes. Writes offsets such that
 * buffers alive at the same time do not overlap, and the arena size that they need. Granularity alignment_bytes (0 = 256).
 * time_limit_ns: of the caller's thread; what is best by then is returned. An answer needs O(n log n) time in any case, 1.4 s
 * for 10^6 buffers. 0: a bounded effort, the same result on any machine: up to some tens of seconds of one core. Of more than
 * 140,000 buffers that nearly all live at once, the placement is then that of a heap which serves them in the order of time.
 * Up to 2,048 buffers are searched exactly. Errors: INVALID_ARGUMENT (lower >= upper, size 0, overflow: the message names
 * the buffer; a time limit of GPUSHARE_NO_TIMEOUT). */
GPUSHARE_API int32_t gpushare_placement_solve(uint64_t count, const uint64_t* lower, const uint64_t* upper,
                                              const uint64_t* size_bytes, uint64_t alignment_bytes,
                                              uint64_t time_limit_ns, uint64_t* out_offsets,
                                              uint64_t* out_arena_bytes);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* GPUSHARE_HEAP_H_ */
