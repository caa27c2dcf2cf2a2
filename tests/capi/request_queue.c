/* The request queue in front of a runtime, through the C ABI: batches as iterations, every request answered
 * once, refusals, failures, closes. SPDX-License-Identifier: Apache-2.0 */
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#include "check.h"
#include "gpushare/gpushare.h"

static const uint64_t kMs = 1000000;
enum { kRequests = 64 };

/* Data that the tests share with the queue's threads. The test reads it after a drain or close, which order the accesses. */
struct seen {
  gpushare_request_queue queue;
  gpushare_session session;
  int answers[kRequests];
  int32_t status[kRequests];
  uint32_t drop[kRequests];
  uint32_t batch_count[kRequests];
  uint64_t deadline_ns[kRequests], finished_ns[kRequests], expected_ns;
  int batches, wrong, released;
  int32_t batch_status;      /* what the batch function returns */
  int32_t close_from_batch;  /* what closing the queue in a batch gave */
  int32_t close_from_answer; /* and in an answer */
  uint64_t tell_ns;          /* execution time that batches report; 0 = none */
  uint64_t sleep_ns;
};

static void answered(void* user_data, const gpushare_request_outcome* outcome) {
  struct seen* seen = user_data;
  if (outcome->id >= kRequests || outcome->struct_size < sizeof *outcome) {
    ++seen->wrong;
    return;
  }
  ++seen->answers[outcome->id];
  seen->status[outcome->id] = outcome->status;
  seen->drop[outcome->id] = outcome->drop;
  seen->batch_count[outcome->id] = outcome->batch_count;
  seen->deadline_ns[outcome->id] = outcome->deadline_ns;
  seen->finished_ns[outcome->id] = outcome->finished_ns;
  seen->close_from_answer = gpushare_request_queue_close(seen->queue);
}

static void host_work(void* user_data) {
  struct seen* seen = user_data;
  struct timespec span;
  span.tv_sec = 0;
  span.tv_nsec = (long)seen->sleep_ns;
  nanosleep(&span, NULL);
}

static int32_t batch(void* user_data, gpushare_iteration iteration, const gpushare_queued_batch* batch) {
  struct seen* seen = user_data;
  gpushare_device_address address = 0;
  gpushare_stream stream = NULL;
  uint64_t i;
  ++seen->batches;
  seen->expected_ns = batch->expected_ns;
  if (batch->model != 0 || batch->struct_size < sizeof *batch || batch->count == 0 || batch->count > 16)
    ++seen->wrong;
  for (i = 0; i < batch->count; ++i) {
    if (batch->user_data[i] != user_data || batch->ids[i] >= kRequests) ++seen->wrong;
    if (seen->tell_ns != 0) batch->execution_ns[i] = seen->tell_ns;
  }
  /* An iteration like any other: ephemeral memory, the lane's stream. */
  if (gpushare_iteration_alloc(iteration, 4096, 0, &address) != GPUSHARE_OK) ++seen->wrong;
  if (gpushare_iteration_get_stream(iteration, &stream) != GPUSHARE_OK) ++seen->wrong;
  if (seen->sleep_ns != 0 && gpushare_stream_launch_host(stream, host_work, seen) != GPUSHARE_OK)
    ++seen->wrong;
  seen->close_from_batch = gpushare_request_queue_close(seen->queue);
  return seen->batch_status;
}

static void released(void* user_data) {
  ++((struct seen*)user_data)->released;
}

static gpushare_request request(uint64_t id, uint64_t slack_ns) {
  gpushare_request out = GPUSHARE_REQUEST_INIT;
  out.id = id;
  out.deadline_ns = gpushare_now_ns() + slack_ns;
  return out;
}

static gpushare_request_queue open_queue(gpushare_runtime runtime, gpushare_session session,
                                         uint64_t max_pending, struct seen* seen) {
  gpushare_batcher_params params = GPUSHARE_BATCHER_PARAMS_INIT;
  gpushare_batcher_model model = GPUSHARE_BATCHER_MODEL_INIT;
  uint32_t index = 7;
  memset(seen, 0, sizeof *seen);
  params.max_pending = max_pending;
  CHECK_STATUS(gpushare_request_queue_create(runtime, &params, &seen->queue), GPUSHARE_OK);
  seen->session = session;
  CHECK_STATUS(gpushare_request_queue_add_model(seen->queue, session, &model, batch, seen, released, &index),
               GPUSHARE_OK);
  CHECK(index == 0);
  return seen->queue;
}

static void serves(gpushare_runtime runtime, gpushare_session session) {
  struct seen seen;
  gpushare_request_queue queue = open_queue(runtime, session, 0, &seen);
  gpushare_request_queue_info info = GPUSHARE_REQUEST_QUEUE_INFO_INIT;
  gpushare_profile profile = GPUSHARE_PROFILE_INIT;
  const gpushare_cost_step steps[2] = {{1000000, 0.5}, {2000000, 0.25}};
  uint64_t i;
  seen.tell_ns = 3 * kMs;
  CHECK_STATUS(gpushare_request_queue_observe(queue, 0, 5, 3 * kMs), GPUSHARE_OK);
  CHECK_STATUS(gpushare_request_queue_observe_batch(queue, 0, 2, 3 * kMs, 6 * kMs), GPUSHARE_OK);
  for (i = 0; i < kRequests; ++i) {
    gpushare_request one = request(i, 3600000 * kMs);
    one.application = 5;
    one.cost = 1 + (double)(i % 3);
    one.later_steps = steps;
    one.later_step_count = i % 3;
    CHECK_STATUS(gpushare_request_queue_submit(queue, &one, answered, &seen), GPUSHARE_OK);
  }
  CHECK_STATUS(gpushare_request_queue_drain(queue, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  for (i = 0; i < kRequests; ++i) {
    CHECK(seen.answers[i] == 1);
    CHECK_STATUS(seen.status[i], GPUSHARE_OK);
    CHECK(seen.drop[i] == GPUSHARE_DROP_NONE && seen.batch_count[i] >= 1);
  }
  CHECK_STATUS(gpushare_request_queue_get_info(queue, &info), GPUSHARE_OK);
  CHECK(info.accepted == kRequests && info.in_time == kRequests && info.held == 0 && info.pending == 0);
  CHECK(info.batches == (uint64_t)seen.batches && info.batched_requests == kRequests && info.busy_ns > 0);
  CHECK(info.decisions >= info.batches && info.most_held >= 1 && info.most_held <= kRequests);
  CHECK(info.predicted_miss_rate >= 0 && info.predicted_miss_rate < 0.5 && info.price_per_s >= 0);
  CHECK_STATUS(gpushare_request_queue_get_profile(queue, 0, 5, &profile), GPUSHARE_OK);
  CHECK(profile.samples >= 1 && profile.samples <= kRequests + 1); /* the first batch is no sample */
  CHECK(profile.mean_ns > 2.9 * (double)kMs && profile.mean_ns < 3.1 * (double)kMs);
  CHECK_STATUS(gpushare_request_queue_get_profile(queue, 0, 6, &profile), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_request_queue_get_profile(queue, 1, 5, &profile), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(seen.close_from_batch, GPUSHARE_INVALID_STATE);
  CHECK_STATUS(seen.close_from_answer, GPUSHARE_INVALID_STATE);
  CHECK(seen.wrong == 0);
  CHECK(info.refused_full == 0 && info.refused_hopeless == 0 && info.failed == 0 && info.late == 0);
  CHECK(info.expired == 0 && info.hopeless == 0 && info.rejected == 0 && info.cancelled == 0);
  CHECK(info.decision_ns > 0);
  for (i = 0; i < kRequests; ++i) {
    CHECK(seen.finished_ns[i] > 0 && seen.finished_ns[i] < gpushare_now_ns());
    CHECK(seen.deadline_ns[i] > seen.finished_ns[i]);
  }
  {
    static char text[65536];
    uint64_t size = 0;
    CHECK_STATUS(gpushare_runtime_write_metrics(runtime, text, sizeof text, &size), GPUSHARE_OK);
    CHECK(strstr(text,
                 "gpushare_requests_offered_total{device=\"host\",queue=\"1\",policy=\"gpushare\"} 64\n") !=
          NULL);
    CHECK(strstr(text, "policy=\"gpushare\",outcome=\"in_time\"} 64\n") != NULL);
    CHECK(strstr(text, "gpushare_session_slowdown_ratio_count{device=\"host\",name=\"model\"") != NULL);
  }
  {
    gpushare_request late = request(1, 1000 * kMs);
    uint32_t index = 0;
    gpushare_batcher_model model = GPUSHARE_BATCHER_MODEL_INIT;
    CHECK_STATUS(gpushare_request_queue_submit(queue, &late, answered, &seen), GPUSHARE_INVALID_STATE);
    CHECK_STATUS(gpushare_request_queue_add_model(queue, session, &model, batch, &seen, released, &index),
                 GPUSHARE_INVALID_STATE);
  }
  CHECK(seen.released == 0);
  CHECK_STATUS(gpushare_request_queue_close(queue), GPUSHARE_OK);
  CHECK(seen.released == 1);
  CHECK_STATUS(gpushare_request_queue_close(queue), GPUSHARE_INVALID_HANDLE);
}

/* A queue of one learns from the durations of batches what requests take, told by nobody. */
static void learns(gpushare_runtime runtime, gpushare_session session) {
  struct seen seen;
  gpushare_request_queue queue = open_queue(runtime, session, 0, &seen);
  gpushare_profile profile = GPUSHARE_PROFILE_INIT;
  uint64_t i;
  seen.sleep_ns = 2 * kMs;
  for (i = 0; i < 40; ++i) { /* more than two batches: the first one is no sample */
    gpushare_request one = request(i, 3600000 * kMs);
    CHECK_STATUS(gpushare_request_queue_submit(queue, &one, answered, &seen), GPUSHARE_OK);
  }
  CHECK_STATUS(gpushare_request_queue_drain(queue, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  CHECK_STATUS(gpushare_request_queue_get_profile(queue, 0, 0, &profile), GPUSHARE_OK);
  CHECK(profile.samples >= 1);
  CHECK(profile.mean_ns > 0 && profile.p99_ns >= profile.p50_ns);
  CHECK_STATUS(gpushare_request_queue_close(queue), GPUSHARE_OK);
}

/* A queue that knows nothing yet runs a request for longer than it has: answered OK, and late. */
static void late(gpushare_runtime runtime, gpushare_session session) {
  struct seen seen;
  gpushare_request_queue queue = open_queue(runtime, session, 0, &seen);
  gpushare_request_queue_info info = GPUSHARE_REQUEST_QUEUE_INFO_INIT;
  gpushare_request one = request(0, 3600000 * kMs);
  seen.sleep_ns = 40 * kMs;
  one.deadline_ns = gpushare_now_ns() + 20 * kMs;
  CHECK_STATUS(gpushare_request_queue_submit(queue, &one, answered, &seen), GPUSHARE_OK);
  CHECK_STATUS(gpushare_request_queue_drain(queue, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  CHECK_STATUS(gpushare_request_queue_get_info(queue, &info), GPUSHARE_OK);
  CHECK(seen.deadline_ns[0] == one.deadline_ns && info.in_time == 0);
  /* On a busy machine its deadline may have passed before it began. */
  if (seen.status[0] == GPUSHARE_OK)
    CHECK(info.late == 1 && info.expired == 0 && seen.finished_ns[0] > one.deadline_ns);
  else
    CHECK(seen.status[0] == GPUSHARE_TIMED_OUT && info.late == 0 && info.expired + info.hopeless == 1);
  CHECK_STATUS(gpushare_request_queue_close(queue), GPUSHARE_OK);
}

/* Requests whose deadline passes while a batch runs: expired, or given up before. */
static void expires(gpushare_runtime runtime, gpushare_session session) {
  struct seen seen;
  gpushare_request_queue queue = open_queue(runtime, session, 0, &seen);
  gpushare_request_queue_info info = GPUSHARE_REQUEST_QUEUE_INFO_INIT;
  gpushare_request one = request(0, 3600000 * kMs);
  uint64_t i, accepted = 0, expired = 0, cancelled;
  seen.sleep_ns = 100 * kMs;
  CHECK_STATUS(gpushare_request_queue_submit(queue, &one, answered, &seen), GPUSHARE_OK);
  do { /* until it runs */
    const struct timespec span = {0, 1000000};
    nanosleep(&span, NULL);
    CHECK_STATUS(gpushare_request_queue_get_info(queue, &info), GPUSHARE_OK);
  } while (info.pending > 0);
  for (i = 1; i < 4; ++i) {
    one = request(i, 10 * kMs);
    /* On a busy machine the deadline may have passed here already. */
    if (gpushare_request_queue_submit(queue, &one, answered, &seen) == GPUSHARE_OK) ++accepted;
  }
  one = request(4, 3600000 * kMs);
  CHECK_STATUS(gpushare_request_queue_submit(queue, &one, answered, &seen), GPUSHARE_OK);
  cancelled = gpushare_request_queue_cancel(queue, 4) == GPUSHARE_OK;
  CHECK_STATUS(gpushare_request_queue_drain(queue, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  CHECK_STATUS(gpushare_request_queue_get_info(queue, &info), GPUSHARE_OK);
  CHECK(info.accepted == accepted + 2 && info.refused_hopeless == 3 - accepted);
  CHECK(info.in_time == 2 - cancelled && info.cancelled == cancelled);
  CHECK(info.expired + info.hopeless == accepted);
  for (i = 1; i < 4; ++i) {
    CHECK(seen.answers[i] == 0 || seen.status[i] == GPUSHARE_TIMED_OUT);
    expired += seen.answers[i] == 1 && seen.drop[i] == GPUSHARE_DROP_EXPIRED;
  }
  CHECK(info.expired == expired);
  CHECK_STATUS(gpushare_request_queue_close(queue), GPUSHARE_OK);
}

static void fails(gpushare_runtime runtime, gpushare_session session) {
  struct seen seen;
  gpushare_request_queue queue = open_queue(runtime, session, 0, &seen);
  gpushare_request_queue_info info = GPUSHARE_REQUEST_QUEUE_INFO_INIT;
  gpushare_session_info session_info = GPUSHARE_SESSION_INFO_INIT;
  gpushare_request one = request(0, 3600000 * kMs);
  seen.batch_status = GPUSHARE_DEVICE_OUT_OF_MEMORY;
  seen.sleep_ns = 100 * kMs;
  CHECK_STATUS(gpushare_request_queue_submit(queue, &one, answered, &seen), GPUSHARE_OK);
  CHECK_STATUS(gpushare_request_queue_submit(queue, &one, NULL, NULL), GPUSHARE_ALREADY_EXISTS);
  CHECK_STATUS(gpushare_request_queue_drain(queue, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  CHECK_STATUS(seen.status[0], GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK_STATUS(gpushare_request_queue_get_info(queue, &info), GPUSHARE_OK);
  CHECK(info.failed == 1 && info.in_time == 0);
  CHECK_STATUS(gpushare_request_queue_close(queue), GPUSHARE_OK);
  /* The session is none the worse. */
  CHECK_STATUS(gpushare_session_get_info(session, &session_info), GPUSHARE_OK);
  CHECK(session_info.state == GPUSHARE_SESSION_RESIDENT);
}

static void refuses(gpushare_runtime runtime, gpushare_session session) {
  struct seen seen;
  gpushare_request_queue queue = NULL;
  gpushare_batcher_params params = GPUSHARE_BATCHER_PARAMS_INIT;
  gpushare_batcher_model model = GPUSHARE_BATCHER_MODEL_INIT;
  gpushare_request one = request(1, 1000 * kMs);
  gpushare_runtime other = open_runtime("host", "fair", 16 * MIB);
  gpushare_session foreign = open_session(other, "foreign", MIB, MIB);
  const gpushare_cost_step bad_step = {1, 0.0};
  uint32_t index = 7;
  uint64_t i, waited = 0;
  int32_t status = GPUSHARE_OK;
  gpushare_request_queue_info info = GPUSHARE_REQUEST_QUEUE_INFO_INIT;
  CHECK_STATUS(gpushare_request_queue_create(NULL, &params, &queue), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_request_queue_create(runtime, NULL, &queue), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_request_queue_create(runtime, &params, NULL), GPUSHARE_INVALID_ARGUMENT);
  params.policy = "none";
  CHECK_STATUS(gpushare_request_queue_create(runtime, &params, &queue), GPUSHARE_NOT_FOUND);
  params.policy = "orloj";
  params.flags = 64;
  CHECK_STATUS(gpushare_request_queue_create(runtime, &params, &queue), GPUSHARE_INVALID_ARGUMENT);
  params.flags = GPUSHARE_BATCHER_EARLIEST_FIRST | GPUSHARE_BATCHER_MORE_THAN_SIZE;
  params.window = 1u << 21;
  CHECK_STATUS(gpushare_request_queue_create(runtime, &params, &queue), GPUSHARE_INVALID_ARGUMENT);
  params.window = 100;
  params.bins = 5000;
  CHECK_STATUS(gpushare_request_queue_create(runtime, &params, &queue), GPUSHARE_INVALID_ARGUMENT);
  params.bins = 16;
  params.feasible_quantile = 1.5;
  CHECK_STATUS(gpushare_request_queue_create(runtime, &params, &queue), GPUSHARE_INVALID_ARGUMENT);
  params.feasible_quantile = 0.9;
  params.opportunity = -1;
  CHECK_STATUS(gpushare_request_queue_create(runtime, &params, &queue), GPUSHARE_INVALID_ARGUMENT);
  params.opportunity = 0.5;
  CHECK_STATUS(gpushare_request_queue_create(runtime, &params, &queue), GPUSHARE_OK);
  CHECK_STATUS(gpushare_request_queue_submit(queue, &one, NULL, NULL),
               GPUSHARE_INVALID_ARGUMENT); /* no model */
  CHECK_STATUS(gpushare_request_queue_add_model(queue, session, &model, NULL, NULL, NULL, &index),
               GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_request_queue_add_model(queue, session, &model, batch, NULL, NULL, NULL),
               GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_request_queue_add_model(queue, session, NULL, batch, NULL, NULL, &index),
               GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_request_queue_add_model(queue, NULL, &model, batch, NULL, NULL, &index),
               GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_request_queue_add_model(queue, foreign, &model, batch, NULL, NULL, &index),
               GPUSHARE_INVALID_ARGUMENT);
  memset(&seen, 0, sizeof seen);
  model.c1 = -1;
  CHECK_STATUS(gpushare_request_queue_add_model(queue, session, &model, batch, &seen, released, &index),
               GPUSHARE_INVALID_ARGUMENT);
  CHECK(seen.released == 0 && index == 7);
  CHECK_STATUS(gpushare_request_queue_get_info(queue, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_request_queue_get_profile(queue, 0, 0, NULL), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_request_queue_submit(queue, NULL, NULL, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_request_queue_submit(NULL, &one, NULL, NULL), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_request_queue_drain(queue, 0), GPUSHARE_OK);
  CHECK_STATUS(gpushare_request_queue_close(queue), GPUSHARE_OK);

  /* Back-pressure, hopeless deadlines, cancels, and closing with work waiting. */
  queue = open_queue(runtime, session, 4, &seen);
  seen.sleep_ns = 50 * kMs;
  for (i = 0; i < 100; ++i) CHECK_STATUS(gpushare_request_queue_observe(queue, 0, 0, 50 * kMs), GPUSHARE_OK);
  one = request(0, 0); /* over: with any time left the queue may take it to probe its estimate */
  CHECK_STATUS(gpushare_request_queue_submit(queue, &one, answered, &seen), GPUSHARE_TIMED_OUT);
  one.deadline_ns = 1;
  CHECK_STATUS(gpushare_request_queue_submit(queue, &one, answered, &seen), GPUSHARE_TIMED_OUT);
  one = request(0, 3600000 * kMs);
  one.later_steps = &bad_step;
  one.later_step_count = 1;
  CHECK_STATUS(gpushare_request_queue_submit(queue, &one, answered, &seen), GPUSHARE_INVALID_ARGUMENT);
  one.later_steps = NULL;
  CHECK_STATUS(gpushare_request_queue_submit(queue, &one, answered, &seen), GPUSHARE_INVALID_ARGUMENT);
  /* A batch takes 50 ms, so most wait; but the first may take all that there are just before the cancel. */
  do {
    for (; waited < kRequests; ++waited) {
      one = request(waited, 3600000 * kMs);
      if (gpushare_request_queue_submit(queue, &one, answered, &seen) == GPUSHARE_QUEUE_FULL) break;
    }
    CHECK(waited > 0 && waited < kRequests); /* refused long before */
    status = gpushare_request_queue_cancel(queue, waited - 1);
  } while (status == GPUSHARE_NOT_FOUND && waited < kRequests);
  CHECK_STATUS(status, GPUSHARE_OK);
  CHECK_STATUS(gpushare_request_queue_cancel(queue, 999), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_request_queue_get_info(queue, &info), GPUSHARE_OK);
  CHECK(info.refused_hopeless == 2 && info.refused_full >= 1);
  CHECK_STATUS(gpushare_request_queue_drain(queue, 1), GPUSHARE_TIMED_OUT);
  CHECK_STATUS(gpushare_request_queue_close(queue), GPUSHARE_OK);
  for (i = 0; i < waited; ++i) {
    CHECK(seen.answers[i] == 1);
    CHECK(seen.status[i] == GPUSHARE_OK || seen.status[i] == GPUSHARE_CANCELLED);
    CHECK((seen.status[i] == GPUSHARE_CANCELLED) == (seen.drop[i] == GPUSHARE_DROP_CANCELLED));
  }
  CHECK_STATUS(seen.status[waited - 1], GPUSHARE_CANCELLED);
  CHECK(seen.wrong == 0 && seen.released == 1);
  CHECK_STATUS(gpushare_session_close(foreign), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(other), GPUSHARE_OK);
}

/* The session, or the whole runtime, goes while requests wait: they are answered all the same. */
static void outlives(int close_runtime) {
  struct seen seen;
  gpushare_runtime runtime = open_runtime("host", "fair", 16 * MIB);
  gpushare_session session = open_session(runtime, "short", MIB, MIB);
  gpushare_request_queue queue = open_queue(runtime, session, 0, &seen);
  gpushare_request one;
  uint64_t i;
  int32_t status = GPUSHARE_OK;
  seen.sleep_ns = 5 * kMs;
  for (i = 0; i < 32; ++i) {
    one = request(i, 3600000 * kMs);
    CHECK_STATUS(gpushare_request_queue_submit(queue, &one, answered, &seen), GPUSHARE_OK);
  }
  if (close_runtime) {
    CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
  } else {
    CHECK_STATUS(gpushare_session_close(session), GPUSHARE_OK);
  }
  /* Once a batch has found the session gone, requests are refused at the door. */
  for (i = 32; i < kRequests && status == GPUSHARE_OK; ++i) {
    const struct timespec span = {0, 2000000};
    one = request(i, 3600000 * kMs);
    status = gpushare_request_queue_submit(queue, &one, answered, &seen);
    if (status == GPUSHARE_OK) nanosleep(&span, NULL);
  }
  CHECK_STATUS(status, GPUSHARE_INVALID_STATE);
  CHECK_STATUS(gpushare_request_queue_drain(queue, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  for (i = 0; i < 32; ++i) {
    CHECK(seen.answers[i] == 1);
    CHECK(seen.status[i] == GPUSHARE_OK || seen.status[i] == GPUSHARE_CANCELLED ||
          seen.status[i] == GPUSHARE_INVALID_STATE);
  }
  CHECK_STATUS(gpushare_request_queue_close(queue), GPUSHARE_OK);
  if (close_runtime) {
    CHECK_STATUS(gpushare_session_close(session), GPUSHARE_OK);
  } else {
    CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
  }
}

int main(void) {
  gpushare_runtime runtime = open_runtime("host", "fair", 64 * MIB);
  gpushare_session session = open_session(runtime, "model", MIB, MIB);
  serves(runtime, session);
  learns(runtime, session);
  late(runtime, session);
  expires(runtime, session);
  fails(runtime, session);
  refuses(runtime, session);
  outlives(0);
  outlives(1);
  CHECK_STATUS(gpushare_session_close(session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
  return capi_result();
}
