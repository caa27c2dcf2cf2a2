/* gpushare: elastic ranges, for what grows and shrinks while a job runs: KV caches, embedding tables. Part of
 * gpushare.h, which includes it; its contract holds here.
 *
 * A range is a large stretch of device addresses of one session. It has no memory at first; memory is committed and
 * decommitted in granules, from any thread, and the addresses stay. Committed bytes are persistent bytes of the
 * session: they count in its promise and in its quota, and are paged out with it. So several engines on one device, in
 * this process or in others of the daemon, each with a range, share what there is, and no split has to be fixed
 * beforehand.
 *
 * A commit that finds no room may wait. Waiting commits are served in the order of class, then arrival. A commit
 * without a timeout is refused while one of its class or a higher one waits. The range whose commit is first in that
 * order asks ranges of its own class and of lower ones to give bytes back (gpushare_give_back_fn): first ranges of this
 * runtime, then, on a shared device, ranges of other processes, through the daemon. If no range is left to ask,
 * sessions of lower rank are paged out. An allocation of a guaranteed session that finds no room asks ranges of
 * opportunistic sessions in the same way, before sessions are paged out for it. The daemon keeps the bytes that other processes gave for a commit or an allocation for it, for a
 * while; otherwise there is no order among waiting processes.
 *
 * Needs the virtual layout. Nothing here synchronises the device or waits for its work, with one exception: a commit
 * waits for the work that still uses the granules it gets, if there are no others.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GPUSHARE_RANGE_H_
#define GPUSHARE_RANGE_H_

#include "gpushare/gpushare.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gpushare_range_s* gpushare_range; /* an elastic range of a session */

/* Answer of a gpushare_give_back_fn that gives none: it counts as no answer. */
#define GPUSHARE_RANGE_NO_ANSWER UINT64_MAX

/* Asks the owner of a range to give `bytes` back within `within_ns`, because another range or an allocation waits for memory. Returns
 * how many bytes it gives by then, including those that it decommitted during the call. 0 declines, which has no
 * consequence. A range is silent if its function does not return in time, gives less than it said, or returns
 * GPUSHARE_RANGE_NO_ANSWER. A silent range keeps its bytes; its session counts as opportunistic until the range
 * decommits something, and the range that asked is told its name. Called on a thread of the range, one call at a time,
 * with no lock held. May call gpushare, decommit here or have another thread do it; a commit does not wait here. Must
 * not close its range, its session or its runtime. */
typedef uint64_t (*gpushare_give_back_fn)(void* user_data, uint64_t bytes, uint64_t within_ns);

typedef struct gpushare_range_params {
  uint32_t struct_size;
  uint32_t reserved;
  const char* name; /* for messages; null = "range-N". Copied */
  uint64_t
      reserved_bytes; /* addresses; rounded up to granules, at most 1 TiB. May exceed the device's memory */
  gpushare_give_back_fn give_back; /* null: the range is never asked */
  void* user_data;                 /* for give_back; must stay valid until the range is closed */
  uint64_t answer_ns;              /* time that give_back has; 0 = 100 ms */
  double
      price_ns_per_byte; /* the owner's cost to give a byte back and to restore it later. The cheapest ranges of a class
                                      are asked first; 0 = as a copy to the host and back, 0.2 */
} gpushare_range_params;
#define GPUSHARE_RANGE_PARAMS_INIT \
  { sizeof(gpushare_range_params), 0, NULL, 0, NULL, NULL, 0, 0 }

typedef struct gpushare_range_info {
  uint32_t struct_size;
  uint32_t silent; /* 1: the range did not answer, and its session counts as opportunistic */
  gpushare_device_address address;
  uint64_t reserved_bytes;
  uint64_t granule_bytes; /* offsets and sizes are multiples of this */
  uint64_t committed_bytes;
  uint64_t peak_bytes;      /* most ever committed */
  uint64_t requests;        /* times that the range was asked to give back */
  uint64_t requested_bytes; /* sum of the bytes asked for */
  uint64_t silences;        /* requests that the range did not answer */
  uint64_t waits;           /* commits that did not find room at once */
  uint64_t waited_ns;
  uint64_t longest_wait_ns;
  uint64_t unanswered_by; /* session_id of the range that last kept silent when this one asked; 0: none */
} gpushare_range_info;
#define GPUSHARE_RANGE_INFO_INIT \
  { sizeof(gpushare_range_info), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/* Reserves addresses for a range of `session`. The caller owns *out_range and closes it, also after its session has
 * ended. Blocks while the session is queued. Thread-safe. Errors: INVALID_ARGUMENT, UNSUPPORTED (contiguous layout),
 * HOST_OUT_OF_MEMORY, INVALID_STATE and CANCELLED (the session has ended), DEVICE_OUT_OF_MEMORY (no addresses). */
GPUSHARE_API int32_t gpushare_range_open(gpushare_session session, const gpushare_range_params* params,
                                         gpushare_range* out_range);
/* Decommits everything and gives the addresses back. Waits for calls on the range by other threads, and for its
 * give_back. Errors: INVALID_STATE (from its give_back, or from a host function or progress function: the handle stays
 * good). */
GPUSHARE_API int32_t gpushare_range_close(gpushare_range range);
/* Puts memory behind the granules of [offset_bytes, offset_bytes + bytes) that have none, all or none of them. Their content is
 * undefined. `timeout_ns` limits the wait for room and for the session to be admitted or paged in; 0 does not wait. A
 * copy that makes room is always finished, so the call may last longer by the time of the copy. Work on the session's
 * own stream may use the bytes at once. Thread-safe; cancellable. Errors: DEVICE_OUT_OF_MEMORY (no room, and timeout_ns
 * is 0 or this is a callback), TIMED_OUT (the message names the sessions with the room and ranges that did not answer),
 * QUOTA_EXCEEDED, EXCEEDS_CAPACITY, INVALID_ARGUMENT (not whole granules of the range), INVALID_STATE (the session has
 * ended), CANCELLED, DEVICE_LOST. */
GPUSHARE_API int32_t gpushare_range_commit(gpushare_range range, uint64_t offset_bytes, uint64_t bytes,
                                           uint64_t timeout_ns);
/* Gives the memory behind [offset_bytes, offset_bytes + bytes) back, as far as there is any. Stream-ordered: somebody
 * else gets it after the work that the session's stream has now, and after uses on other streams recorded for addresses
 * in the range (gpushare_memory_record_use). Does not wait for the device. Work enqueued later must not use the bytes.
 * Thread-safe. Errors: INVALID_ARGUMENT, INVALID_STATE (the session has ended; its stream captures a graph; this is a host
 * function or progress function, and the session's memory grows, shrinks or moves on another thread). */
GPUSHARE_API int32_t gpushare_range_decommit(gpushare_range range, uint64_t offset_bytes, uint64_t bytes);
/* Tells where the range lies, and its counts. Once its session has ended, only the counts are left. Thread-safe. */
GPUSHARE_API int32_t gpushare_range_get_info(gpushare_range range, gpushare_range_info* out_info);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* GPUSHARE_RANGE_H_ */
