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

/* A policy of the caller's. The scheduler calls its functions with its lock held: they must be quick and must not call
 * gpushare (such calls return INVALID_STATE). A function that throws counts as the answer 0; a `pick` that throws leaves
 * the lane idle. All functions get `user_data`. The library copies the table. `release`, if given, is called exactly once:
 * when the runtime is done with the policy, or, if the call that was given the table fails, before that call returns. */
typedef struct gpushare_policy_ops {
  uint32_t struct_size;
  uint32_t max_lanes;     /* lanes that may be open at once; 0 = no limit */
  uint32_t max_residents; /* sessions admitted at once; 0 = no limit */
  uint32_t head_of_line;  /* nonzero: a session that does not fit blocks those behind it */
  const char* name;
  void* user_data;
  /* Chooses which of `count` > 0 candidates runs next in `lane`. Returns its index, or UINT32_MAX to leave
   * the lane idle until something changes. Mandatory. */
  uint32_t (*pick)(void* user_data, uint32_t lane, const gpushare_candidate* candidates, uint32_t count,
                   uint64_t now_ns);
  /* Nonzero if `a` is to be admitted before `b`. Null: arrival order. */
  int32_t (*before)(void* user_data, const gpushare_candidate* a, const gpushare_candidate* b);
  /* Nonzero if resident `resident` may be paged out to host memory so that `waiting` is admitted. Null:
   * never. */
  int32_t (*outranks)(void* user_data, const gpushare_candidate* waiting, const gpushare_candidate* resident);
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
