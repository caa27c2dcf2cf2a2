/* gpushare: many blocks of an iteration in one call. Part of the stable C ABI. gpushare.h includes this header, and its
 * contract holds here too.
 *
 * For frameworks that place the blocks of several operations together. A call takes the lane's lock once for up to 64
 * blocks, and so costs less for each block than gpushare_iteration_alloc and gpushare_memory_free.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GPUSHARE_BULK_H_
#define GPUSHARE_BULK_H_

#include "gpushare/gpushare.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Allocates `count` ephemeral blocks of the iteration, all or none. `bytes` is an array of `count` sizes;
 * `alignment_bytes` holds for every block, 0 means 256. `out_addresses`, an array of `count`, gets the addresses in the
 * order of the sizes; it is written only if the call succeeds, apart from the addresses of blocks that have been freed
 * again. The blocks end with the iteration, or are freed one by one or together. Any thread may call. Blocks only where
 * gpushare_iteration_alloc would. Errors: as gpushare_iteration_alloc; INVALID_ARGUMENT (an array is null and `count`
 * is above 0). */
GPUSHARE_API int32_t gpushare_iteration_alloc_many(gpushare_iteration iteration, uint64_t count,
                                                   const uint64_t* bytes, uint64_t alignment_bytes,
                                                   gpushare_device_address* out_addresses);

/* Frees `count` blocks in the order given, as gpushare_memory_free does. It goes on after a block that cannot be freed
 * and returns the first error. `out_freed` (may be null) gets the number of blocks freed. Any thread may call; does not
 * block. Errors: NOT_FOUND (an address is no live block; the message names it), INVALID_ARGUMENT (`addresses` is null
 * and `count` is above 0). */
GPUSHARE_API int32_t gpushare_memory_free_many(gpushare_runtime runtime, uint64_t count,
                                               const gpushare_device_address* addresses, uint64_t* out_freed);

#ifdef __cplusplus
}
#endif

#endif /* GPUSHARE_BULK_H_ */
