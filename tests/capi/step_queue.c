/* Continuous batching through the C ABI: a toy model whose members hold memory that is counted, answers step by step, failures of a
 * step and of a member, cancelled members, members that grow beyond the limit, a limit that is lowered, closes while steps run.
 * SPDX-License-Identifier: Apache-2.0 */
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>

#include "check.h"
#include "gpushare/gpushare.h"

enum { kIds = 64 };
static const uint64_t kForEver = UINT64_MAX, kNobody = UINT64_MAX;

/* The model generates wants[id] tokens for a request. Its own books say which tokens it has processed for whom. */
struct model {
  gpushare_step_queue queue;
  uint64_t wants[kIds], processed[kIds], generated[kIds], bytes[kIds];
  int here[kIds];
  int wrong, released, most_members, left;
  uint64_t most_bytes;
  int32_t close_from_step, close_from_answer;
  /* What goes wrong. */
  uint64_t fail_step_of, fail_member, grow_member; /* by id */
  uint64_t cancel_in_step;
  uint64_t hold_step_of; /* a step with this member waits for `go_on` */
  int go_on, held;
  /* Answers. Written on the queue's thread, read after a drain or close. */
  uint64_t last_tokens[kIds];
  int answers[kIds], ended[kIds], late[kIds];
  int32_t status[kIds];
};

static void answered(void* user_data, const gpushare_step_answer* answer) {
  struct model* model = user_data;
  const uint64_t id = answer->id;
  if (answer->struct_size < sizeof *answer || id >= kIds || model->ended[id] ||
      answer->tokens < model->last_tokens[id])
    ++model->wrong;
  if (!answer->ended && (answer->tokens <= model->last_tokens[id] || answer->status != GPUSHARE_OK))
    ++model->wrong;
  ++model->answers[id];
  model->last_tokens[id] = answer->tokens;
  model->late[id] = (int)answer->late;
  model->close_from_answer = gpushare_step_queue_close(model->queue);
  if (!answer->ended) return;
  model->ended[id] = 1;
  model->status[id] = answer->status;
}

static void gone(struct model* model, uint64_t id) {
  model->here[id] = 0;
  model->bytes[id] = 0;
  model->processed[id] = 0;
}

static int32_t step(void* user_data, gpushare_iteration iteration, const gpushare_step* step) {
  struct model* model = user_data;
  gpushare_device_address address = 0;
  uint64_t i, sum = 0;
  int32_t status = GPUSHARE_OK;
  if (step->struct_size < sizeof *step || (step->count == 0 && step->left_count == 0)) ++model->wrong;
  for (i = 0; i < step->left_count; ++i) {
    const gpushare_step_member* each = &step->left[i];
    if (!model->here[each->id] || each->user_data != user_data) ++model->wrong;
    ++model->left;
    gone(model, each->id);
  }
  if (gpushare_iteration_alloc(iteration, 4096, 0, &address) != GPUSHARE_OK) ++model->wrong;
  model->close_from_step = gpushare_step_queue_close(model->queue);
  for (i = 0; i < step->count; ++i) {
    const gpushare_step_member* each = &step->members[i];
    const uint64_t id = each->id;
    int token = each->prefill_tokens == 0;
    if (each->user_data != user_data || step->done[i] != 0 || step->statuses[i] != GPUSHARE_OK ||
        step->bytes[i] != UINT64_MAX || each->before_tokens != (model->here[id] ? model->processed[id] : 0) ||
        each->tokens != model->generated[id])
      ++model->wrong;
    model->here[id] = 1;
    if (each->prefill_tokens != 0) {
      model->processed[id] += each->prefill_tokens;
      if (model->processed[id] > each->total_tokens) ++model->wrong;
      token = model->processed[id] == each->total_tokens;
    }
    if (id == model->fail_step_of) status = GPUSHARE_IO_ERROR;
    if (id == model->fail_member) {
      step->statuses[i] = GPUSHARE_MALFORMED_INPUT;
      gone(model, id);
      continue;
    }
    if (id == model->cancel_in_step && gpushare_step_queue_cancel(model->queue, id) != GPUSHARE_OK)
      ++model->wrong;
    if (id == model->grow_member) step->bytes[i] = model->bytes[id] = 1000 + 500 * model->generated[id];
    if (id == model->hold_step_of) {
      __atomic_store_n(&model->held, 1, __ATOMIC_RELEASE);
      while (!__atomic_load_n(&model->go_on, __ATOMIC_ACQUIRE)) sched_yield();
    }
    if (!token) continue;
    ++model->generated[id];
    if (model->generated[id] == model->wants[id]) {
      step->done[i] = 1;
      gone(model, id);
    }
  }
  if (status != GPUSHARE_OK)
    for (i = 0; i < step->count; ++i) gone(model, step->members[i].id);
  if ((int)step->count > model->most_members) model->most_members = (int)step->count;
  for (i = 0; i < kIds; ++i) sum += model->bytes[i];
  if (sum > model->most_bytes) model->most_bytes = sum;
  return status;
}

static void released(void* user_data) {
  ++((struct model*)user_data)->released;
}

static struct model* open_model(gpushare_session session, const char* policy, uint64_t memory_bytes,
                                uint64_t max_prefill_tokens) {
  struct model* model = calloc(1, sizeof *model);
  gpushare_step_queue_params params = GPUSHARE_STEP_QUEUE_PARAMS_INIT;
  uint64_t i;
  params.policy = policy;
  params.memory_bytes = memory_bytes;
  params.max_prefill_tokens = max_prefill_tokens;
  for (i = 0; i < kIds; ++i) model->wants[i] = 1 + i % 7;
  model->fail_step_of = model->fail_member = model->grow_member = model->cancel_in_step =
      model->hold_step_of = kNobody;
  CHECK_STATUS(gpushare_step_queue_create(session, &params, step, model, released, &model->queue),
               GPUSHARE_OK);
  return model;
}

static gpushare_step_request request(uint64_t id) {
  gpushare_step_request out = GPUSHARE_STEP_REQUEST_INIT;
  out.id = id;
  out.prompt_tokens = 5 + id % 11;
  out.start_bytes = 100;
  out.step_bytes = 10;
  return out;
}

static void submit(struct model* model, const gpushare_step_request* one) {
  CHECK_STATUS(gpushare_step_queue_submit(model->queue, one, answered, model), GPUSHARE_OK);
}

static gpushare_step_queue_info info_of(struct model* model) {
  gpushare_step_queue_info info = GPUSHARE_STEP_QUEUE_INFO_INIT;
  CHECK_STATUS(gpushare_step_queue_get_info(model->queue, &info), GPUSHARE_OK);
  return info;
}

/* After everything was answered: nobody is left, and the model holds no memory. */
static void close_model(struct model* model) {
  uint64_t i;
  CHECK_STATUS(gpushare_step_queue_close(model->queue), GPUSHARE_OK);
  CHECK(model->wrong == 0 && model->released == 1);
  for (i = 0; i < kIds; ++i) CHECK(!model->here[i] && model->answers[i] >= model->ended[i]);
  free(model);
}

static void drain(struct model* model) {
  CHECK_STATUS(gpushare_step_queue_drain(model->queue, kForEver), GPUSHARE_OK);
}

static void serves(gpushare_session session, const char* policy) {
  struct model* model = open_model(session, policy, 0, 0);
  gpushare_step_queue_info info;
  uint64_t i, tokens = 0, prompts = 0;
  for (i = 0; i < kIds; ++i) {
    gpushare_step_request one = request(i);
    if (i % 2 == 0) one.first_deadline_ns = gpushare_now_ns() + UINT64_C(3600000000000);
    submit(model, &one);
    tokens += model->wants[i];
    prompts += one.prompt_tokens;
  }
  drain(model);
  for (i = 0; i < kIds; ++i) {
    CHECK(model->ended[i] && model->last_tokens[i] == model->wants[i] && !model->late[i]);
    CHECK_STATUS(model->status[i], GPUSHARE_OK);
  }
  info = info_of(model);
  CHECK(info.accepted == kIds && info.in_time == kIds && info.held == 0 && info.members == 0 &&
        info.bytes == 0);
  CHECK(info.tokens == tokens && info.prefill_tokens == prompts && info.lost_tokens == 0 && info.steps > 0 &&
        info.busy_ns > 0);
  CHECK_STATUS(model->close_from_step, GPUSHARE_INVALID_STATE);
  CHECK_STATUS(model->close_from_answer, GPUSHARE_INVALID_STATE);
  close_model(model);
}

/* Chunks: at most three tokens of prompts in a step. */
static void chunks(gpushare_session session) {
  struct model* model = open_model(session, NULL, 0, 3);
  uint64_t i;
  for (i = 0; i < 8; ++i) {
    const gpushare_step_request one = request(i);
    submit(model, &one);
  }
  drain(model);
  for (i = 0; i < 8; ++i) CHECK(model->last_tokens[i] == model->wants[i]);
  CHECK(info_of(model).steps >= (8 * 5 + 28) / 3);
  close_model(model);
}

static void fails(gpushare_session session) {
  struct model* model = open_model(session, "fifo", 0, 0);
  gpushare_step_request one = request(5);
  model->fail_step_of = 5;
  submit(model, &one);
  one = request(6);
  model->fail_member = 6;
  submit(model, &one);
  one = request(7);
  model->wants[7] = 3;
  submit(model, &one);
  drain(model);
  CHECK_STATUS(model->status[5], GPUSHARE_IO_ERROR);
  CHECK(model->status[6] == GPUSHARE_MALFORMED_INPUT || model->status[6] == GPUSHARE_IO_ERROR);
  CHECK(model->status[7] == GPUSHARE_OK || model->status[7] == GPUSHARE_IO_ERROR);
  CHECK(info_of(model).failed >= 2);
  close_model(model);
}

static void cancels(gpushare_session session) {
  struct model* model = open_model(session, NULL, 0, 0);
  gpushare_step_request one = request(1);
  model->wants[1] = model->wants[2] = 1000000000;
  model->cancel_in_step = 1;
  submit(model, &one);
  one = request(2);
  submit(model, &one);
  while (info_of(model).tokens < 3) sched_yield(); /* request 2 is a member */
  CHECK_STATUS(gpushare_step_queue_cancel(model->queue, 2), GPUSHARE_OK);
  drain(model);
  CHECK_STATUS(model->status[1], GPUSHARE_CANCELLED);
  CHECK_STATUS(model->status[2], GPUSHARE_CANCELLED);
  CHECK_STATUS(gpushare_step_queue_cancel(model->queue, 2), GPUSHARE_NOT_FOUND);
  CHECK(model->left == 2 && info_of(model).cancelled == 2);
  close_model(model);
}

/* More members than memory: they wait, or are returned and start again, and all get their tokens. */
static void shares_memory(gpushare_session session, const char* policy) {
  struct model* model = open_model(session, policy, 500, 0);
  uint64_t i;
  for (i = 0; i < 32; ++i) {
    gpushare_step_request one = request(i);
    model->wants[i] = 20;
    submit(model, &one);
  }
  drain(model);
  for (i = 0; i < 32; ++i) CHECK(model->status[i] == GPUSHARE_OK && model->last_tokens[i] == 20);
  CHECK(model->most_members <= 5 && info_of(model).bytes == 0);
  close_model(model);
}

/* A member that grows beyond all memory fails, beside one that goes on. */
static void grows(gpushare_session session) {
  struct model* model = open_model(session, NULL, 2000, 0);
  gpushare_step_request one = request(3);
  model->grow_member = 3;
  model->wants[3] = 1000;
  submit(model, &one);
  one = request(4);
  model->wants[4] = 4;
  submit(model, &one);
  drain(model);
  CHECK_STATUS(model->status[3], GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK_STATUS(model->status[4], GPUSHARE_OK);
  close_model(model);
}

/* The limit is lowered under a member, as an elastic range's give_back does it, and raised again. */
static void gives_back(gpushare_session session) {
  struct model* model = open_model(session, NULL, UINT64_C(1) << 40, 0);
  gpushare_step_request one = request(8);
  model->wants[8] = 1000000000;
  submit(model, &one);
  while (info_of(model).tokens < 2) sched_yield();
  CHECK_STATUS(gpushare_step_queue_set_memory(model->queue, 0), GPUSHARE_OK);
  while (info_of(model).pending == 0) sched_yield(); /* its memory is free */
  CHECK(info_of(model).bytes == 0 && info_of(model).returned == 1 && info_of(model).lost_tokens > 0);
  CHECK_STATUS(gpushare_step_queue_set_memory(model->queue, (UINT64_C(1) << 40) + 1),
               GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_step_queue_set_memory(model->queue, UINT64_C(1) << 40), GPUSHARE_OK);
  while (info_of(model).members == 0) sched_yield();
  CHECK_STATUS(gpushare_step_queue_cancel(model->queue, 8), GPUSHARE_OK);
  drain(model);
  CHECK(model->left == 2);
  close_model(model);
}

/* While a step runs: an expired request is answered, and the queue is closed. */
static void closes(gpushare_session session) {
  struct model* model = open_model(session, NULL, 0, 0);
  gpushare_step_request one = request(9);
  uint64_t within_ns = 1000000;
  int32_t status = GPUSHARE_OK;
  model->hold_step_of = 9;
  model->wants[9] = model->wants[10] = 1000000000;
  submit(model, &one);
  while (!__atomic_load_n(&model->held, __ATOMIC_ACQUIRE)) sched_yield();
  one = request(11);
  do { /* on a busy machine its time may be over before it is submitted */
    within_ns *= 2;
    one.first_deadline_ns = gpushare_now_ns() + within_ns;
    status = gpushare_step_queue_submit(model->queue, &one, answered, model);
  } while (status == GPUSHARE_TIMED_OUT);
  CHECK_STATUS(status, GPUSHARE_OK);
  while (info_of(model).expired == 0) sched_yield();
  one = request(10);
  submit(model, &one);
  CHECK_STATUS(gpushare_step_queue_drain(model->queue, 1), GPUSHARE_TIMED_OUT);
  one = request(12);
  CHECK_STATUS(gpushare_step_queue_submit(model->queue, &one, answered, model), GPUSHARE_INVALID_STATE);
  __atomic_store_n(&model->go_on, 1, __ATOMIC_RELEASE);
  CHECK_STATUS(gpushare_step_queue_close(model->queue), GPUSHARE_OK);
  CHECK(model->wrong == 0 && model->released == 1 && !model->here[9] && !model->here[10]);
  CHECK_STATUS(model->status[9], GPUSHARE_CANCELLED);
  CHECK_STATUS(model->status[10], GPUSHARE_CANCELLED);
  CHECK_STATUS(model->status[11], GPUSHARE_TIMED_OUT);
  free(model);
}

/* A queue whose members live in an elastic range. */
struct lender {
  gpushare_step_queue queue;
  gpushare_range range;
  uint64_t committed, target;
  int joins, asked;
};

static uint64_t lend(void* user_data, uint64_t bytes, uint64_t within_ns) {
  struct lender* lender = user_data;
  (void)within_ns;
  ++lender->asked;
  if (bytes > lender->committed) bytes = lender->committed;
  lender->target = lender->committed - bytes;
  return gpushare_step_queue_set_memory(lender->queue, lender->target) == GPUSHARE_OK ? bytes : 0;
}

static int32_t lending_step(void* user_data, gpushare_iteration iteration, const gpushare_step* step) {
  struct lender* lender = user_data;
  (void)iteration;
  if (step->left_count > 0 && lender->target < lender->committed) {
    const uint64_t gives = lender->committed - lender->target;
    lender->committed = lender->target;
    return gpushare_range_decommit(lender->range, lender->target, gives);
  }
  if (step->count > 0 && step->members[0].before_tokens == 0 && step->members[0].prefill_tokens > 0)
    ++lender->joins;
  return GPUSHARE_OK;
}

static void lends(void) {
  gpushare_runtime runtime = open_runtime("host", "fair", 64 * MIB);
  gpushare_session session = open_session(runtime, "one", 0, 2 * MIB),
                   other = open_session(runtime, "two", 0, 2 * MIB);
  struct lender lender = {NULL, NULL, 48 * MIB, 48 * MIB, 0, 0};
  gpushare_step_queue_params params = GPUSHARE_STEP_QUEUE_PARAMS_INIT;
  gpushare_range_params of_range = GPUSHARE_RANGE_PARAMS_INIT;
  gpushare_step_queue_info info = GPUSHARE_STEP_QUEUE_INFO_INIT;
  gpushare_step_request one = request(1);
  gpushare_range second = NULL;
  uint64_t tokens = 0;
  params.memory_bytes = 48 * MIB;
  CHECK_STATUS(gpushare_step_queue_create(session, &params, lending_step, &lender, NULL, &lender.queue),
               GPUSHARE_OK);
  of_range.reserved_bytes = 64 * MIB;
  CHECK_STATUS(gpushare_range_open(other, &of_range, &second), GPUSHARE_OK);
  of_range.give_back = lend;
  of_range.user_data = &lender;
  of_range.answer_ns = 30000000000u;
  CHECK_STATUS(gpushare_range_open(session, &of_range, &lender.range), GPUSHARE_OK);
  CHECK_STATUS(gpushare_range_commit(lender.range, 0, 48 * MIB, 0), GPUSHARE_OK);
  one.start_bytes = 40 * MIB;
  CHECK_STATUS(gpushare_step_queue_submit(lender.queue, &one, NULL, NULL), GPUSHARE_OK);
  while (info.tokens < 2) CHECK_STATUS(gpushare_step_queue_get_info(lender.queue, &info), GPUSHARE_OK);
  /* The other session gets the memory of the member, which waits until it is there again. */
  CHECK_STATUS(gpushare_range_commit(second, 0, 32 * MIB, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  while (info.pending == 0) CHECK_STATUS(gpushare_step_queue_get_info(lender.queue, &info), GPUSHARE_OK);
  CHECK(info.returned == 1 && info.members == 0);
  tokens = info.tokens;
  CHECK_STATUS(gpushare_range_decommit(second, 0, 32 * MIB), GPUSHARE_OK);
  CHECK_STATUS(gpushare_range_commit(lender.range, 0, 48 * MIB, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  CHECK_STATUS(gpushare_step_queue_set_memory(lender.queue, 48 * MIB), GPUSHARE_OK);
  while (info.tokens == tokens) CHECK_STATUS(gpushare_step_queue_get_info(lender.queue, &info), GPUSHARE_OK);
  CHECK_STATUS(gpushare_step_queue_close(lender.queue), GPUSHARE_OK);
  CHECK(lender.asked >= 1 && lender.joins == 2);
  CHECK_STATUS(gpushare_range_close(lender.range), GPUSHARE_OK);
  CHECK_STATUS(gpushare_range_close(second), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(other), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
}

static void refuses(gpushare_session session) {
  struct model* model = open_model(session, NULL, 1000, 0);
  gpushare_step_queue_params params = GPUSHARE_STEP_QUEUE_PARAMS_INIT;
  gpushare_step_queue queue = NULL;
  gpushare_step_request one = request(1);
  const gpushare_step_request good = one;
  CHECK_STATUS(gpushare_step_queue_create(session, NULL, step, NULL, NULL, &queue),
               GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_step_queue_create(session, &params, NULL, NULL, NULL, &queue),
               GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_step_queue_create(session, &params, step, NULL, NULL, NULL),
               GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_step_queue_create(NULL, &params, step, NULL, NULL, &queue), GPUSHARE_INVALID_HANDLE);
  params.policy = "best";
  CHECK_STATUS(gpushare_step_queue_create(session, &params, step, NULL, NULL, &queue), GPUSHARE_NOT_FOUND);
  params.policy = NULL;
  params.max_members = 5000;
  CHECK_STATUS(gpushare_step_queue_create(session, &params, step, NULL, NULL, &queue),
               GPUSHARE_INVALID_ARGUMENT);
  params.max_members = 0;
  params.read_ns = -1;
  CHECK_STATUS(gpushare_step_queue_create(session, &params, step, NULL, NULL, &queue),
               GPUSHARE_INVALID_ARGUMENT);
#define REFUSED(field, value, status) \
  one = good;                         \
  one.field = (value);                \
  CHECK_STATUS(gpushare_step_queue_submit(model->queue, &one, answered, model), status)
  REFUSED(prompt_tokens, 0, GPUSHARE_INVALID_ARGUMENT);
  REFUSED(token_ns, 0, GPUSHARE_INVALID_ARGUMENT);
  REFUSED(cost, 0, GPUSHARE_INVALID_ARGUMENT);
  REFUSED(start_bytes, UINT64_MAX, GPUSHARE_INVALID_ARGUMENT);
  REFUSED(start_bytes, 991, GPUSHARE_EXCEEDS_CAPACITY);
  REFUSED(first_deadline_ns, 1, GPUSHARE_TIMED_OUT);
  REFUSED(struct_size, 4, GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_step_queue_submit(NULL, &good, answered, model), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_step_queue_submit(model->queue, NULL, answered, model), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_step_queue_cancel(model->queue, 1), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_step_queue_get_info(model->queue, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK(info_of(model).accepted == 0);
  close_model(model);
}

/* The session goes while members generate: they are answered, and requests are refused. */
static void outlives(void) {
  gpushare_runtime runtime = open_runtime("host", "fair", 16 * MIB);
  gpushare_session session = open_session(runtime, "short", MIB, MIB);
  struct model* model = open_model(session, NULL, 0, 0);
  gpushare_step_request one = request(1);
  int32_t status = GPUSHARE_OK;
  model->wants[1] = model->wants[2] = 1000000000;
  submit(model, &one);
  while (info_of(model).tokens == 0) sched_yield();
  CHECK_STATUS(gpushare_session_close(session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_step_queue_drain(model->queue, kForEver), GPUSHARE_OK);
  CHECK(model->ended[1] && model->status[1] != GPUSHARE_OK);
  one = request(2);
  status = gpushare_step_queue_submit(model->queue, &one, answered, model);
  CHECK_STATUS(status, GPUSHARE_INVALID_STATE);
  CHECK_STATUS(gpushare_step_queue_close(model->queue), GPUSHARE_OK);
  CHECK(model->wrong == 0 && model->released == 1);
  free(model);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
}

static int32_t nothing(void* user_data, gpushare_iteration iteration) {
  (void)user_data;
  (void)iteration;
  return GPUSHARE_OK;
}

/* The session has as many iterations queued as it may have: a step waits until there is room, and its members do not fail. */
static void waits_for_room(void) {
  gpushare_runtime runtime = open_runtime("host", "fair", 16 * MIB);
  gpushare_session session = open_session(runtime, "busy", MIB, MIB);
  struct model* model = open_model(session, NULL, 0, 0);
  gpushare_step_request one = request(1);
  gpushare_iteration held = NULL;
  gpushare_step_queue_info info;
  int32_t status = GPUSHARE_OK;
  CHECK_STATUS(gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &held), GPUSHARE_OK);
  while (status == GPUSHARE_OK) status = gpushare_session_submit(session, nothing, NULL, NULL, NULL);
  CHECK_STATUS(status, GPUSHARE_QUEUE_FULL);
  submit(model, &one);
  do info = info_of(model);
  while (info.members + info.failed == 0);
  CHECK_STATUS(gpushare_iteration_end(held), GPUSHARE_OK);
  drain(model);
  CHECK_STATUS(model->status[1], GPUSHARE_OK);
  close_model(model);
  CHECK_STATUS(gpushare_session_close(session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
}

static void waits_for_itself(gpushare_session session) {
  struct model* model = open_model(session, NULL, 0, 0);
  gpushare_step_request one = request(1);
  gpushare_iteration held = NULL;
  CHECK_STATUS(gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &held), GPUSHARE_OK);
  submit(model, &one);
  CHECK_STATUS(gpushare_step_queue_drain(model->queue, kForEver), GPUSHARE_INVALID_STATE);
  CHECK_STATUS(gpushare_step_queue_close(model->queue), GPUSHARE_INVALID_STATE);
  one = request(2);
  submit(model, &one); /* nothing changed */
  CHECK_STATUS(gpushare_iteration_end(held), GPUSHARE_OK);
  drain(model);
  CHECK(model->status[1] == GPUSHARE_OK && model->status[2] == GPUSHARE_OK);
  close_model(model);
}

int main(void) {
  gpushare_runtime runtime = open_runtime("host", "fair", 64 * MIB);
  gpushare_session session = open_session(runtime, "model", MIB, MIB);
  serves(session, NULL);
  serves(session, "fifo");
  chunks(session);
  fails(session);
  cancels(session);
  shares_memory(session, NULL);
  shares_memory(session, "fifo");
  grows(session);
  gives_back(session);
  closes(session);
  waits_for_itself(session);
  lends();
  refuses(session);
  outlives();
  waits_for_room();
  CHECK_STATUS(gpushare_session_close(session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
  return capi_result();
}
