/* gpushare: scheduling policies, the built-in ones by name and those of the caller as a table of functions. Part of
 * gpushare.h, which includes it; its contract holds here.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GPUSHARE_POLICY_H_
#define GPUSHARE_POLICY_H_

#include "gpushare/gpushare.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A session as a policy sees it. Times are on the device's clock. */
typedef struct gpushare_candidate {
  uint32_t struct_size;
  uint32_t session_class;
  uint64_t session_id; /* stable for the session's life; ascending in arrival order */
  uint64_t arrival_ns;
  uint64_t ready_since_ns; /* when its next iteration began to wait */
  uint64_t service_ns;     /* device time received so far */
  uint64_t remaining_ns;   /* declared or estimated; UINT64_MAX when unknown */
  uint64_t iteration_ns;   /* mean of the measured iterations; 0 before the first */
  uint64_t iterations_done;
  uint64_t persistent_bytes;
  uint64_t ephemeral_bytes;
  int32_t priority; /* larger runs first */
  uint32_t reserved;
  double weight; /* share under fair; > 0 */
} gpushare_candidate;

/* Answers of gpushare_policy_ops.gives_way. A session alternates if it was opened by `gpushare exec --pageable`; its stay
 * on the device lasts nine times as long as the moves that end it take, and at least a second. */
enum {
  GPUSHARE_GIVES_WAY_NEVER = 0,
  GPUSHARE_GIVES_WAY_AT_ONCE = 1,         /* at its next iteration boundary */
  GPUSHARE_GIVES_WAY_AFTER_STAY = 2,      /* if it alternates, when its stay is over */
  GPUSHARE_GIVES_WAY_AFTER_LONG_STAY = 3, /* if it alternates, after ten such stays */
};

/* Answers of gpushare_policy_ops.may_join. */
enum {
  GPUSHARE_JOIN_NO = 0,     /* not now; sessions behind it may. Counts as yes while nobody is on the device */
  GPUSHARE_JOIN_YES = 1,    /* as soon as there is room */
  GPUSHARE_JOIN_NOBODY = 2, /* neither may those behind it. Counts as yes for the first of an empty device */
};

/* Answers of gpushare_policy_ops.share, besides weights, which are above 0. */
#define GPUSHARE_SHARE_IN_LINE (0.0) /* one after the other in each lane; lanes run beside each other */
#define GPUSHARE_SHARE_WHOLE (-1.0)  /* the whole device while it runs: one lane is open at a time */

/* A policy of the caller's: answers to five questions, the same that the built-in policies answer. At least one function
 * is needed; a null one has the default answer. The scheduler calls the functions with its lock held: they must be quick
 * and must not call gpushare (such calls return INVALID_STATE). A function that throws counts as the answer "no": 0, and
 * UINT64_MAX of `may_run`. All functions get `user_data`. The library copies the table. `release`, if given, is called
 * exactly once: when the runtime is done with the policy, or, if the call that was given the table fails, before that
 * call returns. */
typedef struct gpushare_policy_ops {
  uint32_t struct_size;
  uint32_t reserved; /* 0 */
  const char* name;
  void* user_data;
  /* Who goes first? Nonzero if `a` ranks above `b`, which must be a strict weak order. While a session has work, no
   * session of lower rank begins an iteration. Sessions of equal rank run as `share` says, and wait in arrival order.
   * Null: all are equal. */
  int32_t (*before)(void* user_data, const gpushare_candidate* a, const gpushare_candidate* b);
  /* May this one run now? The time from which its next iteration may begin: `now_ns` or less is yes, UINT64_MAX is "not
   * before something happens". Null: yes. */
  uint64_t (*may_run)(void* user_data, const gpushare_candidate* session, uint64_t now_ns);
  /* Whom does a session page out? GPUSHARE_GIVES_WAY_*: whether `victim`, which is on the device, is moved to host memory
   * so that `other` has room. Whoever gives way to a session must give way to those before it, too. Null: never. */
  int32_t (*gives_way)(void* user_data, const gpushare_candidate* victim, const gpushare_candidate* other);
  /* How is the device shared? The session's weight among those of its rank, whatever their lanes, or GPUSHARE_SHARE_*.
   * Asked when a session arrives, after its iterations, and when its class, priority or weight changes. Null: the
   * session's own weight. */
  double (*share)(void* user_data, const gpushare_candidate* session);
  /* May another join? GPUSHARE_JOIN_*, for a session that waits while `residents` sessions are on the device. `passes` is
   * nonzero if other sessions wait ahead of it. Null: yes. */
  int32_t (*may_join)(void* user_data, const gpushare_candidate* session, uint32_t residents,
                      uint32_t passes);
  void (*release)(void* user_data);
  const char* lane_finder; /* a name of gpushare_runtime_params.lane_finder, read once; null = "salus" */
} gpushare_policy_ops;

/* A policy in a shared library, for programs that take a policy by the path of its library (`gpushare run --policy
 * /path/lottery.so`). The library exports a function of this type under the name GPUSHARE_POLICY_ENTRY_NAME. The function
 * fills *out_ops, in which only struct_size is set, to the size that the caller knows. The string behind `name` must live
 * as long as the library. The function returns a status: GPUSHARE_OK, or why there is no policy. It is called once for each
 * run, and `release` once at the end of each run. */
typedef int32_t (*gpushare_policy_entry)(gpushare_policy_ops* out_ops);
#define GPUSHARE_POLICY_ENTRY_NAME "gpushare_policy_entry_v1"

/* The built-in policies: "fifo", "srtf", "pack", "fair", "priority". */
GPUSHARE_API uint32_t gpushare_policy_count(void);
/* Name of built-in policy `index`; null past the end. Static storage. */
GPUSHARE_API const char* gpushare_policy_name(uint32_t index);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* GPUSHARE_POLICY_H_ */
