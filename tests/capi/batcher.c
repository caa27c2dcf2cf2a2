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
  uint64_t ids[16], execution_ns = 10 * kMs, i;
  uint32_t index = 0;
  CHECK_STATUS(gpushare_batcher_create(&params, &batcher), GPUSHARE_OK);
  CHECK_STATUS(gpushare_batcher_add_model(batcher, &model, &index), GPUSHARE_OK);
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
  CHECK_STATUS(gpushare_batcher_arrive(batcher, &request, 0), GPUSHARE_TIMED_OUT);
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

int main(void) {
  refusals();
  serves();
  costs();
  features();
  return capi_result();
}
