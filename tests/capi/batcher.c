/* Deadline-aware batching through the C ABI. */
/* SPDX-License-Identifier: Apache-2.0 */
#include <stdint.h>

#include "check.h"
#include "gpushare/gpushare.h"

static const uint64_t kMs = 1000000;

static void refusals(void) {
  gpushare_batcher batcher = NULL;
  gpushare_batcher_params params = GPUSHARE_BATCHER_PARAMS_INIT;
  gpushare_batcher_model model = GPUSHARE_BATCHER_MODEL_INIT;
  gpushare_request request = GPUSHARE_REQUEST_INIT;
  gpushare_batch batch = GPUSHARE_BATCH_INIT;
  uint64_t ids[16], count = 0;
  uint32_t index = 7;
  const uint32_t bad_sizes[2] = {4, 2};
  gpushare_profile profile = GPUSHARE_PROFILE_INIT;
  CHECK_STATUS(gpushare_batcher_create(NULL, &batcher), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_batcher_create(&params, NULL), GPUSHARE_INVALID_ARGUMENT);
  params.policy = "nope";
  CHECK_STATUS(gpushare_batcher_create(&params, &batcher), GPUSHARE_NOT_FOUND);
  params.policy = NULL;
  params.max_pending = 2;
  CHECK_STATUS(gpushare_batcher_create(&params, &batcher), GPUSHARE_OK);
  CHECK_STATUS(gpushare_batcher_arrive(batcher, &request, 0), GPUSHARE_INVALID_ARGUMENT); /* no model yet */
  model.c1 = 0;
  CHECK_STATUS(gpushare_batcher_add_model(batcher, &model, &index), GPUSHARE_INVALID_ARGUMENT);
  model.c1 = 0.5;
  model.batch_size_count = 2;
  CHECK_STATUS(gpushare_batcher_add_model(batcher, &model, &index), GPUSHARE_INVALID_ARGUMENT);
  model.batch_sizes = bad_sizes;
  CHECK_STATUS(gpushare_batcher_add_model(batcher, &model, &index), GPUSHARE_INVALID_ARGUMENT);
  model.batch_size_count = 0;
  CHECK_STATUS(gpushare_batcher_add_model(batcher, &model, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_batcher_add_model(batcher, &model, &index), GPUSHARE_OK);
  CHECK(index == 0);
  CHECK_STATUS(gpushare_batcher_next(batcher, 0, 0, &batch, ids, 8), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_batcher_next(batcher, 0, 0, &batch, NULL, 16), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_batcher_next(batcher, 0, 0, NULL, ids, 16), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_batcher_next(batcher, 0, 0, &batch, ids, 16), GPUSHARE_NOT_READY);
  CHECK(batch.wake_ns == UINT64_MAX);
  request.deadline_ns = 100 * kMs;
  CHECK_STATUS(gpushare_batcher_arrive(batcher, &request, 200 * kMs), GPUSHARE_TIMED_OUT);
  CHECK_STATUS(gpushare_batcher_arrive(batcher, &request, 0), GPUSHARE_OK);
  CHECK_STATUS(gpushare_batcher_arrive(batcher, &request, 0), GPUSHARE_ALREADY_EXISTS);
  request.id = 1;
  CHECK_STATUS(gpushare_batcher_arrive(batcher, &request, 0), GPUSHARE_OK);
  request.id = 2;
  CHECK_STATUS(gpushare_batcher_arrive(batcher, &request, 0), GPUSHARE_QUEUE_FULL);
  CHECK_STATUS(gpushare_batcher_take_drops(batcher, NULL, 1, &count), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_batcher_take_drops(batcher, NULL, 0, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_batcher_get_pending(batcher, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_batcher_cancel(batcher, 99, 0), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_batcher_observe_run(batcher, 0, NULL, NULL, 1, 1), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_batcher_observe_run(batcher, 0, &index, NULL, 0, 1), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_batcher_observe_run(batcher, 1, &index, NULL, 1, 1), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_batcher_get_profile(batcher, 0, 99, &profile), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_batcher_get_profile(batcher, 0, 0, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_batcher_release(batcher), GPUSHARE_OK);
  CHECK_STATUS(gpushare_batcher_release(batcher), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_batcher_arrive(batcher, &request, 0), GPUSHARE_INVALID_HANDLE);
}

static void serves(void) {
  gpushare_batcher batcher = NULL;
  gpushare_batcher_params params = GPUSHARE_BATCHER_PARAMS_INIT;
  gpushare_batcher_model model = GPUSHARE_BATCHER_MODEL_INIT;
  gpushare_batch batch = GPUSHARE_BATCH_INIT;
  gpushare_drop drops[4];
  uint64_t ids[16], count = 0, pending = 0, i;
  uint32_t index = 0;
  CHECK_STATUS(gpushare_batcher_create(&params, &batcher), GPUSHARE_OK);
  model.c0_ns = 10 * kMs;
  model.c1 = 0.5;
  CHECK_STATUS(gpushare_batcher_add_model(batcher, &model, &index), GPUSHARE_OK);
  for (i = 0; i < 64; ++i) CHECK_STATUS(gpushare_batcher_observe(batcher, index, 0, 10 * kMs), GPUSHARE_OK);
  for (i = 1; i <= 5; ++i) {
    gpushare_request request = GPUSHARE_REQUEST_INIT;
    request.id = i;
    request.deadline_ns = 200 * kMs;
    CHECK_STATUS(gpushare_batcher_arrive(batcher, &request, 0), GPUSHARE_OK);
  }
  CHECK_STATUS(gpushare_batcher_cancel(batcher, 3, 0), GPUSHARE_OK);
  CHECK_STATUS(gpushare_batcher_next(batcher, 0, 0, &batch, ids, 16), GPUSHARE_OK);
  CHECK(batch.count == 4);
  CHECK(batch.latest_start_ns == UINT64_MAX);
  CHECK(batch.expected_ns > 25 * kMs && batch.expected_ns < 35 * kMs); /* 10 + 0.5 * 4 * 10 */
  for (i = 0; i < batch.count; ++i) CHECK(ids[i] >= 1 && ids[i] <= 5 && ids[i] != 3);
  CHECK_STATUS(gpushare_batcher_started(batcher, batch.id, 0), GPUSHARE_OK);
  CHECK_STATUS(gpushare_batcher_observe_batch(batcher, index, 4, 10 * kMs, 30 * kMs), GPUSHARE_OK);
  CHECK_STATUS(gpushare_batcher_finished(batcher, batch.id, 30 * kMs, 30 * kMs), GPUSHARE_OK);
  CHECK_STATUS(gpushare_batcher_rejected(batcher, batch.id, 30 * kMs), GPUSHARE_OK); /* over: ignored */
  CHECK_STATUS(gpushare_batcher_take_drops(batcher, drops, 4, &count), GPUSHARE_OK);
  CHECK(count == 1 && drops[0].id == 3 && drops[0].reason == GPUSHARE_DROP_CANCELLED);
  CHECK_STATUS(gpushare_batcher_get_pending(batcher, &pending), GPUSHARE_OK);
  CHECK(pending == 0);
  CHECK_STATUS(gpushare_batcher_release(batcher), GPUSHARE_OK);
}

/* Later cost steps: a request that missed its first deadline is kept for the second. */
static void costs(void) {
  gpushare_batcher batcher = NULL;
  gpushare_batcher_params params = GPUSHARE_BATCHER_PARAMS_INIT;
  gpushare_batcher_model model = GPUSHARE_BATCHER_MODEL_INIT;
  gpushare_batch batch = GPUSHARE_BATCH_INIT;
  gpushare_profile profile = GPUSHARE_PROFILE_INIT;
  const gpushare_cost_step step = {500000000, 2.0};
  gpushare_request request = GPUSHARE_REQUEST_INIT;
  gpushare_drop drops[4];
  uint64_t ids[16], count = 0, i;
  uint32_t index = 0;
  const uint32_t applications[2] = {0, 3};
  const uint64_t execution_ns[2] = {9000000, 11000000};
  CHECK_STATUS(gpushare_batcher_create(&params, &batcher), GPUSHARE_OK);
  CHECK_STATUS(gpushare_batcher_add_model(batcher, &model, &index), GPUSHARE_OK);
  for (i = 0; i < 64; ++i) CHECK_STATUS(gpushare_batcher_observe(batcher, index, 0, 10 * kMs), GPUSHARE_OK);
  request.id = 1;
  request.deadline_ns = 20 * kMs;
  CHECK_STATUS(gpushare_batcher_arrive(batcher, &request, 0), GPUSHARE_OK);
  request.id = 2;
  request.later_step_count = 65;
  request.later_steps = &step;
  CHECK_STATUS(gpushare_batcher_arrive(batcher, &request, 0), GPUSHARE_INVALID_ARGUMENT);
  request.later_step_count = 1;
  CHECK_STATUS(gpushare_batcher_arrive(batcher, &request, 0), GPUSHARE_OK);
  CHECK_STATUS(gpushare_batcher_next(batcher, 100 * kMs, 0, &batch, ids, 16), GPUSHARE_OK);
  CHECK(batch.count == 1 && ids[0] == 2);
  CHECK_STATUS(gpushare_batcher_take_drops(batcher, drops, 4, &count), GPUSHARE_OK);
  CHECK(count == 1 && drops[0].id == 1 && drops[0].reason == GPUSHARE_DROP_EXPIRED);
  CHECK_STATUS(gpushare_batcher_observe_run(batcher, index, applications, execution_ns, 2, 25 * kMs),
               GPUSHARE_OK);
  CHECK_STATUS(gpushare_batcher_observe_run(batcher, index, applications, NULL, 1, 10 * kMs), GPUSHARE_OK);
  CHECK_STATUS(gpushare_batcher_get_profile(batcher, index, 0, &profile), GPUSHARE_OK);
  CHECK(profile.samples == 66 && profile.mean_ns > 9.5e6 && profile.mean_ns < 10.5e6);
  CHECK_STATUS(gpushare_batcher_get_profile(batcher, index, 3, &profile), GPUSHARE_OK);
  CHECK(profile.samples == 1 && profile.p50_ns > 10.9e6 && profile.p50_ns < 11.1e6);
  CHECK_STATUS(gpushare_batcher_release(batcher), GPUSHARE_OK);
}

/* Numbers that come with requests: 10 tokens take 10 ms, 100 take 100. */
static void features(void) {
  gpushare_batcher batcher = NULL;
  gpushare_batcher_params params = GPUSHARE_BATCHER_PARAMS_INIT;
  gpushare_batcher_model model = GPUSHARE_BATCHER_MODEL_INIT;
  gpushare_request request = GPUSHARE_REQUEST_INIT;
  gpushare_batch batch = GPUSHARE_BATCH_INIT;
  gpushare_profile profile = GPUSHARE_PROFILE_INIT;
  double tokens = 0;
  const double most[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  uint64_t ids[16], execution_ns = 10 * kMs, i;
  uint32_t index = 0;
  CHECK_STATUS(gpushare_batcher_create(&params, &batcher), GPUSHARE_OK);
  CHECK_STATUS(gpushare_batcher_add_model(batcher, &model, &index), GPUSHARE_OK);
  CHECK_STATUS(gpushare_batcher_add_model(batcher, &model, &index), GPUSHARE_OK);
  request.features = most;
  request.feature_count = 8;
  CHECK_STATUS(gpushare_batcher_observe_request(batcher, &request, 1), GPUSHARE_OK);
  request.features = NULL;
  request.feature_count = 1;
  CHECK_STATUS(gpushare_batcher_arrive(batcher, &request, 0), GPUSHARE_INVALID_ARGUMENT); /* no features */
  CHECK_STATUS(gpushare_batcher_observe_request(batcher, NULL, 1), GPUSHARE_INVALID_ARGUMENT);
  request.features = &tokens;
  request.feature_count = 9;
  CHECK_STATUS(gpushare_batcher_observe_request(batcher, &request, 1), GPUSHARE_INVALID_ARGUMENT);
  request.feature_count = 1;
  request.model = 7;
  CHECK_STATUS(gpushare_batcher_observe_request(batcher, &request, 1), GPUSHARE_INVALID_ARGUMENT);
  request.model = index;
  for (i = 0; i < 256; ++i) {
    tokens = (double)(1 + i * 37 % 100);
    CHECK_STATUS(gpushare_batcher_observe_request(batcher, &request, (uint64_t)tokens * kMs), GPUSHARE_OK);
  }
  request.deadline_ns = 30 * kMs;
  CHECK_STATUS(gpushare_batcher_next(batcher, 0, 0, &batch, ids, 16), GPUSHARE_NOT_READY);
  tokens = 100;
  /* One that is hopeless runs, to see whether it is; further ones are refused. */
  request.id = 1;
  CHECK_STATUS(gpushare_batcher_arrive(batcher, &request, 0), GPUSHARE_OK);
  request.id = 2;
  CHECK_STATUS(gpushare_batcher_arrive(batcher, &request, 0), GPUSHARE_TIMED_OUT);
  CHECK_STATUS(gpushare_batcher_next(batcher, 0, 0, &batch, ids, 16), GPUSHARE_OK);
  CHECK_STATUS(gpushare_batcher_finished(batcher, batch.id, 1, 0), GPUSHARE_OK);
  request.id = 0;
  tokens = 10;
  CHECK_STATUS(gpushare_batcher_arrive(batcher, &request, 0), GPUSHARE_OK);
  CHECK_STATUS(gpushare_batcher_next(batcher, 0, 0, &batch, ids, 16), GPUSHARE_OK);
  CHECK_STATUS(gpushare_batcher_started(batcher, batch.id, 0), GPUSHARE_OK);
  CHECK_STATUS(gpushare_batcher_finished_run(batcher, batch.id, NULL, 1, 10 * kMs, 10 * kMs),
               GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_batcher_finished_run(batcher, batch.id, &execution_ns, 4097, 10 * kMs, 10 * kMs),
               GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_batcher_finished_run(batcher, batch.id, &execution_ns, 1, 10 * kMs, 10 * kMs),
               GPUSHARE_OK);
  CHECK_STATUS(gpushare_batcher_get_profile(batcher, index, 0, &profile), GPUSHARE_OK);
  CHECK(profile.samples == 257);
  CHECK_STATUS(gpushare_batcher_release(batcher), GPUSHARE_OK);
}

/* A batch of k takes 10 ms + 5 ms k. */
static gpushare_batcher make_batcher(gpushare_batcher_params params, const char* policy) {
  gpushare_batcher batcher = NULL;
  gpushare_batcher_model model = GPUSHARE_BATCHER_MODEL_INIT;
  uint32_t index = 7;
  int i;
  params.policy = policy;
  CHECK_STATUS(gpushare_batcher_create(&params, &batcher), GPUSHARE_OK);
  model.c0_ns = 10 * kMs;
  model.c1 = 0.5;
  CHECK_STATUS(gpushare_batcher_add_model(batcher, &model, &index), GPUSHARE_OK);
  for (i = 0; i < 64; ++i) CHECK_STATUS(gpushare_batcher_observe(batcher, index, 0, 10 * kMs), GPUSHARE_OK);
  return batcher;
}

static void arrive(gpushare_batcher batcher, uint64_t first, uint64_t count, uint64_t deadline_ns) {
  gpushare_request request = GPUSHARE_REQUEST_INIT;
  request.deadline_ns = deadline_ns;
  for (request.id = first; request.id < first + count; ++request.id)
    CHECK_STATUS(gpushare_batcher_arrive(batcher, &request, 0), GPUSHARE_OK);
}

static gpushare_batch next(gpushare_batcher batcher, uint64_t now_ns, uint32_t in_flight, int32_t expected) {
  gpushare_batch batch = GPUSHARE_BATCH_INIT;
  uint64_t ids[16];
  CHECK_STATUS(gpushare_batcher_next(batcher, now_ns, in_flight, &batch, ids, 16), expected);
  return batch;
}

/* The effect of each setting of a policy, and its default. */
static void settings(void) {
  const gpushare_batcher_params defaults = GPUSHARE_BATCHER_PARAMS_INIT;
  gpushare_batcher_params params = defaults;
  gpushare_batcher batcher;
  gpushare_batch batch;
  gpushare_profile profile = GPUSHARE_PROFILE_INIT;
  gpushare_drop drop;
  uint64_t count = 0, i;
  /* maxdelay: a batch that is not full waits so long. */
  batcher = make_batcher(defaults, "maxdelay");
  arrive(batcher, 1, 1, 1000 * kMs);
  CHECK(next(batcher, 0, 0, GPUSHARE_NOT_READY).wake_ns == 10 * kMs);
  CHECK_STATUS(gpushare_batcher_release(batcher), GPUSHARE_OK);
  params.max_delay_ns = 7 * kMs;
  batcher = make_batcher(params, "maxdelay");
  arrive(batcher, 1, 1, 1000 * kMs);
  CHECK(next(batcher, 0, 0, GPUSHARE_NOT_READY).wake_ns == 7 * kMs);
  CHECK(next(batcher, 7 * kMs, 0, GPUSHARE_OK).count == 1);
  CHECK_STATUS(gpushare_batcher_release(batcher), GPUSHARE_OK);
  /* gpushare: the same, where it is asked for. */
  params = defaults;
  params.max_defer_ns = 5 * kMs;
  batcher = make_batcher(params, NULL);
  arrive(batcher, 1, 1, 1000 * kMs);
  CHECK(next(batcher, 0, 0, GPUSHARE_NOT_READY).wake_ns == 5 * kMs);
  CHECK(next(batcher, 5 * kMs, 0, GPUSHARE_OK).count == 1);
  CHECK_STATUS(gpushare_batcher_release(batcher), GPUSHARE_OK);
  batcher = make_batcher(defaults, NULL);
  arrive(batcher, 1, 1, 1000 * kMs);
  CHECK(next(batcher, 0, 0, GPUSHARE_OK).count == 1);
  CHECK_STATUS(gpushare_batcher_release(batcher), GPUSHARE_OK);
  /* clockwork: how far ahead an action is sent, and how late it may start. */
  params = defaults;
  params.clockwork_window_ns = 3 * kMs;
  batcher = make_batcher(params, "clockwork");
  arrive(batcher, 1, 1, 1000 * kMs);
  batch = next(batcher, 0, 0, GPUSHARE_OK);
  CHECK(batch.count == 1 && batch.expected_ns > 14 * kMs && batch.expected_ns < 16 * kMs);
  CHECK(batch.not_before_ns == 0 && batch.latest_start_ns == 3 * kMs);
  CHECK_STATUS(gpushare_batcher_started(batcher, batch.id, 0), GPUSHARE_OK);
  arrive(batcher, 2, 1, 1000 * kMs);
  CHECK(next(batcher, 0, 1, GPUSHARE_NOT_READY).wake_ns == batch.expected_ns - 3 * kMs);
  i = batch.expected_ns;
  batch = next(batcher, i - 3 * kMs, 1, GPUSHARE_OK);
  CHECK(batch.not_before_ns == i && batch.latest_start_ns == i + 3 * kMs);
  CHECK_STATUS(gpushare_batcher_rejected(batcher, batch.id, i + 4 * kMs), GPUSHARE_OK);
  CHECK_STATUS(gpushare_batcher_take_drops(batcher, &drop, 1, &count), GPUSHARE_OK);
  CHECK(count == 1 && drop.id == 2 && drop.reason == GPUSHARE_DROP_REJECTED);
  CHECK_STATUS(gpushare_batcher_release(batcher), GPUSHARE_OK);
  /* clockwork: the slack is taken off the deadline. */
  for (i = 0; i < 2; ++i) {
    params = defaults;
    if (i == 1) params.clockwork_slack_ns = 20 * kMs;
    batcher = make_batcher(params, "clockwork");
    arrive(batcher, 1, 1, 30 * kMs);
    /* Hopeless with the slack: it runs all the same, as a probe, which has no latest start. */
    CHECK((next(batcher, 0, 0, GPUSHARE_OK).latest_start_ns == UINT64_MAX) == (i == 1));
    CHECK_STATUS(gpushare_batcher_release(batcher), GPUSHARE_OK);
  }
  /* nexus: half of what is left of the deadline is the batch's budget. */
  for (i = 0; i < 2; ++i) {
    params = defaults;
    if (i == 1) params.nexus_overhead_ns = 40 * kMs;
    batcher = make_batcher(params, "nexus");
    arrive(batcher, 1, 4, 72 * kMs);
    batch = next(batcher, 0, 0, GPUSHARE_OK);
    CHECK(batch.count == (i == 0 ? 4u : 1u));
    CHECK_STATUS(gpushare_batcher_release(batcher), GPUSHARE_OK);
  }
  /* orloj: a batch of n out of more than n requests. */
  for (i = 0; i < 2; ++i) {
    params = defaults;
    if (i == 1) params.flags = GPUSHARE_BATCHER_MORE_THAN_SIZE;
    batcher = make_batcher(params, "orloj");
    arrive(batcher, 1, 4, 1000 * kMs);
    CHECK(next(batcher, 0, 0, GPUSHARE_OK).count == (i == 0 ? 4u : 2u));
    CHECK_STATUS(gpushare_batcher_release(batcher), GPUSHARE_OK);
  }
  /* orloj: a quantile for an estimate. Half of another application's requests take 10 ms, half 100 ms. */
  for (i = 0; i < 2; ++i) {
    int k;
    params = defaults;
    if (i == 1) params.estimate_quantile = 0.95;
    batcher = make_batcher(params, "orloj");
    for (k = 0; k < 64; ++k)
      CHECK_STATUS(gpushare_batcher_observe(batcher, 0, 1, (k % 2 == 0 ? 10 : 100) * kMs), GPUSHARE_OK);
    (void)next(batcher, 0, 0, GPUSHARE_NOT_READY);
    arrive(batcher, 1, 1, 50 * kMs);
    /* Hopeless by the quantile, it runs all the same, as a probe, which is expected to take its least time. */
    CHECK((next(batcher, 0, 0, GPUSHARE_OK).expected_ns < 20 * kMs) == (i == 1));
    CHECK_STATUS(gpushare_batcher_release(batcher), GPUSHARE_OK);
  }
  /* The window of durations, and what is known of the model. */
  params = defaults;
  params.window = 16;
  batcher = make_batcher(params, NULL);
  CHECK_STATUS(gpushare_batcher_get_profile(batcher, 0, 0, &profile), GPUSHARE_OK);
  CHECK(profile.samples == 16 && profile.c0_ns == 10e6 && profile.c1 == 0.5 && profile.drifts == 0);
  CHECK(profile.mean_ns > 9.8e6 && profile.mean_ns < 10.2e6);
  CHECK(profile.p50_ns > 9.8e6 && profile.p50_ns < 10.2e6);
  CHECK(profile.p99_ns > 9.8e6 && profile.p99_ns < 10.2e6);
  CHECK_STATUS(gpushare_batcher_release(batcher), GPUSHARE_OK);
  /* A shift of the times. */
  batcher = make_batcher(defaults, NULL);
  for (i = 0; i < 256; ++i)
    CHECK_STATUS(gpushare_batcher_observe(batcher, 0, 0, (i < 128 ? 10 : 50) * kMs), GPUSHARE_OK);
  CHECK_STATUS(gpushare_batcher_get_profile(batcher, 0, 0, &profile), GPUSHARE_OK);
  CHECK(profile.drifts >= 1 && profile.samples < 256 && profile.p50_ns > 49e6);
  CHECK_STATUS(gpushare_batcher_release(batcher), GPUSHARE_OK);
}

/* Prepared batch sizes are the caller's. */
static void sizes(void) {
  gpushare_batcher batcher = NULL;
  gpushare_batcher_params params = GPUSHARE_BATCHER_PARAMS_INIT;
  gpushare_batcher_model model = GPUSHARE_BATCHER_MODEL_INIT;
  const uint32_t sizes[2] = {1, 3};
  uint32_t index = 7;
  uint64_t ids[4];
  gpushare_batch batch = GPUSHARE_BATCH_INIT;
  params.policy = "fifo";
  CHECK_STATUS(gpushare_batcher_create(&params, &batcher), GPUSHARE_OK);
  model.batch_sizes = sizes;
  model.batch_size_count = 4097;
  CHECK_STATUS(gpushare_batcher_add_model(batcher, &model, &index), GPUSHARE_INVALID_ARGUMENT);
  model.batch_size_count = 2;
  CHECK_STATUS(gpushare_batcher_add_model(batcher, &model, &index), GPUSHARE_OK);
  CHECK_STATUS(gpushare_batcher_add_model(batcher, &model, &index), GPUSHARE_OK);
  CHECK(index == 1);
  arrive(batcher, 10, 4, 1000 * kMs);
  CHECK_STATUS(gpushare_batcher_next(batcher, 0, 0, &batch, ids, 2), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_batcher_next(batcher, 0, 0, &batch, ids, 3), GPUSHARE_OK);
  CHECK(batch.count == 3 && batch.model == 0 && ids[0] == 10 && ids[1] == 11 && ids[2] == 12);
  CHECK_STATUS(gpushare_batcher_finished(batcher, batch.id, kMs, kMs), GPUSHARE_OK);
  CHECK_STATUS(gpushare_batcher_next(batcher, kMs, 0, &batch, ids, 3), GPUSHARE_OK);
  CHECK(batch.count == 1 && ids[0] == 13);
  CHECK_STATUS(gpushare_batcher_release(batcher), GPUSHARE_OK);
}

/* Two drops, taken one at a time. */
static void drops_one_by_one(void) {
  gpushare_batcher batcher = make_batcher((gpushare_batcher_params)GPUSHARE_BATCHER_PARAMS_INIT, NULL);
  gpushare_drop drop;
  uint64_t count = 0;
  arrive(batcher, 1, 2, 1000 * kMs);
  CHECK_STATUS(gpushare_batcher_cancel(batcher, 1, 0), GPUSHARE_OK);
  CHECK_STATUS(gpushare_batcher_cancel(batcher, 2, 0), GPUSHARE_OK);
  CHECK_STATUS(gpushare_batcher_take_drops(batcher, &drop, 1, &count), GPUSHARE_OK);
  CHECK(count == 1 && drop.id == 1);
  CHECK_STATUS(gpushare_batcher_take_drops(batcher, &drop, 1, &count), GPUSHARE_OK);
  CHECK(count == 1 && drop.id == 2);
  CHECK_STATUS(gpushare_batcher_take_drops(batcher, &drop, 1, &count), GPUSHARE_OK);
  CHECK(count == 0);
  CHECK_STATUS(gpushare_batcher_release(batcher), GPUSHARE_OK);
}

/* Three requests in ten take 10 ms, the others 30 ms. With 20 ms left a request is more likely to miss than not, and runs all
 * the same, because the device would otherwise do nothing. */
static void doubtful(void) {
  gpushare_batcher batcher = NULL;
  gpushare_batcher_params params = GPUSHARE_BATCHER_PARAMS_INIT;
  gpushare_batcher_model model = GPUSHARE_BATCHER_MODEL_INIT;
  gpushare_batch batch = GPUSHARE_BATCH_INIT;
  uint64_t ids[16], i;
  uint32_t index = 0;
  params.feasible_quantile = 0.2;
  CHECK_STATUS(gpushare_batcher_create(&params, &batcher), GPUSHARE_OK);
  CHECK_STATUS(gpushare_batcher_add_model(batcher, &model, &index), GPUSHARE_OK);
  for (i = 0; i < 100; ++i)
    CHECK_STATUS(gpushare_batcher_observe(batcher, index, 0, i % 10 < 3 ? 10 * kMs : 30 * kMs), GPUSHARE_OK);
  arrive(batcher, 1, 1, 1000 * kMs);
  CHECK_STATUS(gpushare_batcher_next(batcher, 0, 0, &batch, ids, 16), GPUSHARE_OK);
  CHECK_STATUS(gpushare_batcher_finished(batcher, batch.id, 10 * kMs, 10 * kMs), GPUSHARE_OK);
  arrive(batcher, 2, 1, 30 * kMs);
  CHECK_STATUS(gpushare_batcher_next(batcher, 10 * kMs, 0, &batch, ids, 16), GPUSHARE_OK);
  CHECK_STATUS(gpushare_batcher_release(batcher), GPUSHARE_OK);
}

int main(void) {
  doubtful();
  settings();
  sizes();
  drops_one_by_one();
  refusals();
  serves();
  costs();
  features();
  return capi_result();
}
