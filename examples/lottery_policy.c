/* A policy of your own for `gpushare run`: lottery scheduling in one lane, each job's tickets being its priority plus one.
 *
 *   cc -shared -fPIC examples/lottery_policy.c -Iinclude -Ibuild/release/include -o /tmp/lottery.so
 *   build/release/bin/gpushare run --jobs examples/jobs/mixed.csv --policy fifo,/tmp/lottery.so
 *
 * It links no gpushare: the tool calls it through a table. The same table goes into gpushare_runtime_params.policy_ops.
 * SPDX-License-Identifier: Apache-2.0 */
#include <gpushare/gpushare.h>
#include <stdlib.h>

static uint64_t tickets_of(const gpushare_candidate* candidate) {
  return candidate->priority > 0 ? (uint64_t)candidate->priority + 1 : 1;
}

static uint32_t pick(void* user_data, uint32_t lane, const gpushare_candidate* candidates, uint32_t count,
                     uint64_t now_ns) {
  uint64_t* state = user_data;
  uint64_t tickets = 0, winner;
  uint32_t i;
  (void)lane;
  (void)now_ns;
  for (i = 0; i < count; ++i) tickets += tickets_of(&candidates[i]);
  *state = *state * 6364136223846793005u + 1442695040888963407u; /* Knuth, MMIX */
  winner = (*state >> 33) % tickets;
  for (i = 0; winner >= tickets_of(&candidates[i]); ++i) winner -= tickets_of(&candidates[i]);
  return i;
}

#ifdef __GNUC__
__attribute__((visibility("default")))
#endif
int32_t
gpushare_policy_entry_v1(gpushare_policy_ops* out_ops) {
  uint64_t* state = malloc(sizeof *state);
  if (state == NULL) return GPUSHARE_HOST_OUT_OF_MEMORY;
  *state = 7; /* the same draws in every run */
  out_ops->name = "lottery";
  out_ops->user_data = state;
  out_ops->max_lanes = 1;
  out_ops->pick = pick;
  out_ops->release = free;
  return GPUSHARE_OK;
}
