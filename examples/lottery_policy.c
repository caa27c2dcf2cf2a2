/* A policy of your own for `gpushare run`: lottery scheduling in one lane, each job's tickets being its priority plus one
 * (Waldspurger and Weihl, OSDI 1994). A policy answers questions about sessions, so the draw is a race: each job runs towards
 * its next win at random, twice the tickets twice as fast, and who is there first goes before the others. Who wins next is
 * then as likely as its tickets say, whoever won before.
 *
 *   cc -shared -fPIC examples/lottery_policy.c -Iinclude -Ibuild/release/include -lm -o /tmp/lottery.so
 *   build/release/bin/gpushare run --jobs examples/jobs/mixed.csv --policy fifo,/tmp/lottery.so
 *
 * It links no gpushare: the tool calls it through a table. The same table goes into gpushare_runtime_params.policy_ops.
 * SPDX-License-Identifier: Apache-2.0 */
#include <gpushare/gpushare.h>
#include <math.h>
#include <stdlib.h>

/* The time of the job's next win, if it has had `iterations_done` wins: the sum of so many random steps. */
typedef struct runner {
  uint64_t session_id, wins;
  double next;
} runner;

typedef struct lottery {
  uint64_t random;
  double now; /* the time of the last win */
  size_t count, room;
  runner* runners;
} lottery;

/* The time to the next win of somebody who may win at any moment: a random number with the density t * exp(-t * x). */
static double step(lottery* of, const gpushare_candidate* session) {
  const double tickets = session->priority > 0 ? session->priority + 1.0 : 1.0;
  of->random = of->random * 6364136223846793005u + 1442695040888963407u; /* Knuth, MMIX */
  return -log(((double)(of->random >> 11) + 1) / 9007199254740993.0) /
         tickets; /* of a number above 0, below 1 */
}

static double next_win(lottery* of, const gpushare_candidate* session) {
  size_t i;
  runner* it = NULL;
  for (i = 0; i < of->count && it == NULL; ++i)
    if (of->runners[i].session_id == session->session_id) it = &of->runners[i];
  if (it == NULL) {
    if (of->count == of->room) {
      runner* more = realloc(of->runners, 2 * (of->room + 8) * sizeof *more);
      if (more == NULL) return of->now; /* then it is first */
      of->runners = more;
      of->room = 2 * (of->room + 8);
    }
    it = &of->runners[of->count++];
    it->session_id = session->session_id;
    it->wins = session->iterations_done;
    it->next = of->now + step(of, session);
  }
  for (; it->wins < session->iterations_done; ++it->wins) {
    if (it->next > of->now) of->now = it->next;
    it->next = of->now + step(of, session);
  }
  return it->next;
}

static int32_t before(void* user_data, const gpushare_candidate* a, const gpushare_candidate* b) {
  const double a_wins = next_win(user_data, a), b_wins = next_win(user_data, b);
  return a_wins < b_wins;
}

/* One job at a time. */
static double share(void* user_data, const gpushare_candidate* session) {
  (void)user_data;
  (void)session;
  return GPUSHARE_SHARE_WHOLE;
}

static void release(void* user_data) {
  free(((lottery*)user_data)->runners);
  free(user_data);
}

#ifdef __GNUC__
__attribute__((visibility("default")))
#endif
int32_t
gpushare_policy_entry_v1(gpushare_policy_ops* out_ops) {
  lottery* state = calloc(1, sizeof *state);
  if (state == NULL) return GPUSHARE_HOST_OUT_OF_MEMORY;
  state->random = 7; /* the same draws in every run */
  out_ops->name = "lottery";
  out_ops->user_data = state;
  out_ops->before = before;
  out_ops->share = share;
  out_ops->release = release;
  return GPUSHARE_OK;
}
