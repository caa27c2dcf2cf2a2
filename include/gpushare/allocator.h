/* gpushare: the device allocator of a tensor framework. Part of gpushare.h, which includes it; its contract holds here.
 *
 * A framework allocates from many threads, names its own streams, and does not say which block outlives a step. An
 * allocator serves it on one runtime. It finds the session that an allocation belongs to in this order:
 *   1. by the native stream (a CUstream or cudaStream_t): the session that has the lane of the stream, or has adopted it;
 *   2. by the thread: its innermost open iteration; else the session that the thread is bound to;
 *   3. the default session.
 * Inside an iteration of that session the block is ephemeral, outside it is persistent.
 * gpushare_allocator_end_iteration keeps the blocks that are still allocated, so that nothing which the framework still
 * holds vanishes; from the third iteration on the n-th allocation is expected to live as long as the n-th of the
 * iteration before.
 *
 * Native streams. `native_stream` is what gpushare_stream_get_native gives, or on cuda any stream of the device's
 * primary context: null is cuda's legacy default stream. GPUSHARE_NO_NATIVE_STREAM stands for none, and so does null on
 * devices without native streams. A stream that is not a lane's waits, on the device, for the session's own stream
 * before it gets memory of the session, and the session's stream for it before the memory is used again. A stream of
 * the framework must live as long as calls name it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GPUSHARE_ALLOCATOR_H_
#define GPUSHARE_ALLOCATOR_H_

#include "gpushare/gpushare.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gpushare_allocator_s* gpushare_allocator; /* what a framework allocates from, on one runtime */

#ifdef __cplusplus
#define GPUSHARE_NO_NATIVE_STREAM (reinterpret_cast<void*>(UINTPTR_MAX))
#else
#define GPUSHARE_NO_NATIVE_STREAM ((void*)UINTPTR_MAX)
#endif

typedef struct gpushare_allocator_params {
  uint32_t struct_size;
  uint32_t persistent_kind; /* of blocks outside iterations: GPUSHARE_KIND_MODEL or GPUSHARE_KIND_FRAMEWORK */
} gpushare_allocator_params;
#define GPUSHARE_ALLOCATOR_PARAMS_INIT \
  { sizeof(gpushare_allocator_params), 0 }

/* Makes an allocator. The caller owns *out_allocator and releases it. Errors: INVALID_ARGUMENT. */
GPUSHARE_API int32_t gpushare_allocator_create(gpushare_runtime runtime,
                                               const gpushare_allocator_params* params,
                                               gpushare_allocator* out_allocator);
/* Gives the allocator back. Its blocks stay with their sessions; sessions that gpushare_allocator_close_session left
 * open are closed. Blocks for those. */
GPUSHARE_API int32_t gpushare_allocator_release(gpushare_allocator allocator);

/* The session of allocations without another owner, in place of the one before; null: none. Errors: INVALID_ARGUMENT (a
 * session of another runtime). */
GPUSHARE_API int32_t gpushare_allocator_set_default_session(gpushare_allocator allocator,
                                                            gpushare_session session);

/* From now on work of `native_stream` is the session's: allocations that name the stream are its own. In place of a
 * session that had adopted it. Errors: INVALID_ARGUMENT (a lane's stream, none, a session of another runtime),
 * UNSUPPORTED (not a stream of the runtime, on a device without native streams). */
GPUSHARE_API int32_t gpushare_allocator_adopt_stream(gpushare_allocator allocator, gpushare_session session,
                                                     void* native_stream);
/* Forgets a native stream, before the framework destroys it or to end its adoption. Errors: NOT_FOUND (never named). */
GPUSHARE_API int32_t gpushare_allocator_forget_stream(gpushare_allocator allocator, void* native_stream);

/* Allocations of the calling thread that have no owner by stream or iteration are `session`'s; null: no longer. Errors:
 * INVALID_ARGUMENT (a session of another runtime), INVALID_STATE (bound to sessions of 6 allocators). */
GPUSHARE_API int32_t gpushare_allocator_bind_thread(gpushare_allocator allocator, gpushare_session session);

/* Allocates a block for the work of `native_stream`. 0 bytes give address 0. `alignment_bytes` as in
 * gpushare_session_alloc. Within the session's promise no driver call on a lane's stream. Waits where the session's
 * allocations wait. Errors: as gpushare_session_alloc; NOT_FOUND (no session owns it), QUOTA_EXCEEDED (the memory
 * fraction too), UNSUPPORTED (native_stream). */
GPUSHARE_API int32_t gpushare_allocator_alloc(gpushare_allocator allocator, uint64_t bytes,
                                              uint64_t alignment_bytes, void* native_stream,
                                              gpushare_device_address* out_address);
/* Frees a block, from any thread. `native_stream` is the stream that the block was allocated for: the bytes are used
 * again after that stream's work up to now. Address 0 is OK. A block freed on a stream that captures a CUDA graph is
 * freed when the capture is over. Errors: NOT_FOUND (not a live block: its session was closed, or its iteration ended
 * without gpushare_allocator_end_iteration). */
GPUSHARE_API int32_t gpushare_allocator_free(gpushare_allocator allocator, gpushare_device_address address,
                                             void* native_stream);
/* Work of `native_stream` up to now uses the block: once freed it is used again after that work. A block of a pool,
 * recorded on another stream than its own, is not used again before the pool is released. Errors: NOT_FOUND,
 * INVALID_STATE (the stream captures a graph), INVALID_ARGUMENT (no stream). */
GPUSHARE_API int32_t gpushare_allocator_record_use(gpushare_allocator allocator,
                                                   gpushare_device_address address, void* native_stream);
/* Where the memory that holds the block at `address` begins, and its size: the block itself, or the chunk of its pool. Errors:
 * NOT_FOUND. */
GPUSHARE_API int32_t gpushare_allocator_get_base(gpushare_allocator allocator,
                                                 gpushare_device_address address,
                                                 gpushare_device_address* out_base, uint64_t* out_bytes);

/* Ends the iteration as gpushare_iteration_end does, after its blocks that are still allocated were kept: they are
 * persistent then. If that is refused (DEVICE_OUT_OF_MEMORY) the iteration stays open: free something and end it again.
 * No other thread may allocate for the iteration meanwhile. */
GPUSHARE_API int32_t gpushare_allocator_end_iteration(gpushare_allocator allocator,
                                                      gpushare_iteration iteration);
/* Keeps the blocks of an open iteration that are still allocated, as gpushare_allocator_end_iteration does, but leaves
 * the iteration open: for functions of gpushare_session_submit and of request queues, whose iterations end when they
 * return. Errors: as above. */
GPUSHARE_API int32_t gpushare_allocator_keep_blocks(gpushare_allocator allocator,
                                                    gpushare_iteration iteration);
/* Gives the session's handle back and closes the session when its last block has been freed, at once if it has none.
 * Until then the session is promised the memory in which its blocks lie, and no more: others get the rest at once.
 * Blocks then as gpushare_session_close, and so may the free of that block. Work of the session must have an end: an
 * open iteration is ended first. Errors: INVALID_ARGUMENT (a session of another runtime; the handle stays good). */
GPUSHARE_API int32_t gpushare_allocator_close_session(gpushare_allocator allocator, gpushare_session session);

/* ---- private pools: memory that one CUDA graph, or one purpose, has for itself ---- */

/* Nonzero: an allocation for `native_stream` goes to the pool. May be called from any thread that allocates, with no
 * lock held. */
typedef int32_t (*gpushare_stream_filter_fn)(void* user_data, void* native_stream);

/* From now on allocations go to the pool that (id_high, id_low) names: those for which `filter` says so, or, where it
 * is null, all of the calling thread. Call it before the capture begins. Blocks of the pool are persistent memory of
 * their owner, and freed ones are used again by the pool alone. Each begin is undone by one end and one release.
 * `release`, if given, is called once with user_data when no filter call is to come. */
GPUSHARE_API int32_t gpushare_allocator_begin_pool(gpushare_allocator allocator, uint64_t id_high,
                                                   uint64_t id_low, gpushare_stream_filter_fn filter,
                                                   void* user_data, void (*release)(void* user_data));
/* Allocations go to the pool no longer. Errors: NOT_FOUND (not begun). */
GPUSHARE_API int32_t gpushare_allocator_end_pool(gpushare_allocator allocator, uint64_t id_high,
                                                 uint64_t id_low);
/* Says that the graph, or whatever the pool was for, is gone. With the last release the pool's memory returns to its
 * sessions, once the device has done the work that the pool's and the session's streams have now. Memory in which live
 * blocks lie returns when these blocks are freed. Errors: NOT_FOUND (not begun, or released already). */
GPUSHARE_API int32_t gpushare_allocator_release_pool(gpushare_allocator allocator, uint64_t id_high,
                                                     uint64_t id_low);

/* ---- statistics and limits ---- */

typedef struct gpushare_allocator_info {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t current_bytes; /* live now */
  uint64_t
      peak_bytes; /* most since the runtime was opened or gpushare_allocator_reset_peaks was called; of a session: most of its
                              persistent bytes, plus its largest iteration */
  uint64_t reserved_bytes; /* promised: what others cannot have */
  uint64_t limit_bytes;    /* by the memory fraction; UINT64_MAX: none */
  uint64_t allocations;    /* through this allocator, by sessions that are open */
  uint64_t failures;       /* allocations that failed */
  uint64_t
      predicted; /* allocations in iterations that were expected to outlive them, and are persistent from the start */
} gpushare_allocator_info;
#define GPUSHARE_ALLOCATOR_INFO_INIT \
  { sizeof(gpushare_allocator_info), 0, 0, 0, 0, 0, 0, 0, 0 }

/* Figures of one session, or, with null, of the whole runtime. Takes the runtime's lock. Errors: INVALID_ARGUMENT. A
 * snapshot of all blocks is gpushare_runtime_write_snapshot. */
GPUSHARE_API int32_t gpushare_allocator_get_info(gpushare_allocator allocator, gpushare_session session,
                                                 gpushare_allocator_info* out_info);
/* peak_bytes counts from now on, of one session or, with null, of the whole runtime; also in gpushare_session_info and
 * gpushare_runtime_info. Errors: INVALID_ARGUMENT. */
GPUSHARE_API int32_t gpushare_allocator_reset_peaks(gpushare_allocator allocator, gpushare_session session);
/* Gives device memory that is kept for speed alone back to the driver (a framework's empty_cache). Calls the driver. */
GPUSHARE_API int32_t gpushare_allocator_trim(gpushare_allocator allocator, uint64_t* out_bytes);
/* Allocations fail with QUOTA_EXCEEDED rather than let the runtime's live bytes exceed this fraction of its capacity;
 * 1: no limit. While there is one, each allocation takes the runtime's lock. Errors: INVALID_ARGUMENT (not above 0 and
 * at most 1). */
GPUSHARE_API int32_t gpushare_allocator_set_memory_fraction(gpushare_allocator allocator, double fraction);

/* Told of each allocation that fails for want of memory or by a limit, on the thread that allocates, with no lock held. May call
 * gpushare. `message` is valid during the call. To free something instead: gpushare_runtime_set_out_of_memory_callback. */
typedef void (*gpushare_out_of_memory_observer_fn)(void* user_data, uint64_t session_id, uint64_t bytes,
                                                   const char* message);
/* Adds one. `user_data` must stay valid until the allocator is released and no call is under way. */
GPUSHARE_API int32_t gpushare_allocator_add_observer(gpushare_allocator allocator,
                                                     gpushare_out_of_memory_observer_fn fn, void* user_data);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* GPUSHARE_ALLOCATOR_H_ */
