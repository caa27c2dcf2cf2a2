/* The fields of the sized structs: every field of the infos has the value that the calls before give it, and every field of the
 * parameters has its documented effect. The test runs on sim, whose time is virtual, so durations are exact.
 * SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "check.h"

static const uint64_t kMs = 1000000;

static gpushare_runtime_info info_of(gpushare_runtime runtime) {
  gpushare_runtime_info info = GPUSHARE_RUNTIME_INFO_INIT;
  CHECK_STATUS(gpushare_runtime_get_info(runtime, &info), GPUSHARE_OK);
  return info;
}

static gpushare_session_info session_info(gpushare_session session) {
  gpushare_session_info info = GPUSHARE_SESSION_INFO_INIT;
  CHECK_STATUS(gpushare_session_get_info(session, &info), GPUSHARE_OK);
  return info;
}

/* An iteration of so long a kernel. */
static void iterate(gpushare_session session, uint64_t duration_ns) {
  gpushare_iteration iteration = NULL;
  gpushare_stream stream = NULL;
  gpushare_backend_work work;
  gpushare_device_address block = 0;
  memset(&work, 0, sizeof work);
  work.struct_size = sizeof work;
  work.duration_ns = duration_ns;
  work.demand = 1;
  CHECK_STATUS(gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_alloc(iteration, MIB, 0, &block), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_get_stream(iteration, &stream), GPUSHARE_OK);
  if (duration_ns > 0) CHECK_STATUS(gpushare_stream_work(stream, &work), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_end(iteration), GPUSHARE_OK);
}

static int32_t nothing(void* user_data, gpushare_iteration iteration) {
  (void)user_data;
  (void)iteration;
  return GPUSHARE_OK;
}

static void devices(void) {
  uint32_t count = 0, index, seen = 0;
  CHECK_STATUS(gpushare_device_count(NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_device_count(&count), GPUSHARE_OK);
  for (index = 0; index < count; ++index) {
    gpushare_device_info info = GPUSHARE_DEVICE_INFO_INIT;
    CHECK_STATUS(gpushare_device_get_info(index, &info), GPUSHARE_OK);
    CHECK((info.status == GPUSHARE_OK) == (info.reason[0] == '\0'));
    CHECK((info.status == GPUSHARE_OK) == (info.name[0] != '\0'));
    if (strcmp(info.spec, "sim") == 0) {
      ++seen;
      CHECK(info.status == GPUSHARE_OK && info.compute_units == 1);
      CHECK((info.capabilities & GPUSHARE_DEVICE_CAP_VIRTUAL_TIME) != 0);
      CHECK(info.total_bytes == (uint64_t)16 << 30 && info.free_bytes == info.total_bytes);
    }
    if (strcmp(info.spec, "host") == 0) {
      ++seen;
      CHECK(info.status == GPUSHARE_OK && info.total_bytes > 0 && info.free_bytes <= info.total_bytes);
      CHECK((info.capabilities & GPUSHARE_DEVICE_CAP_VIRTUAL_TIME) == 0);
    }
    if (strncmp(info.spec, "cuda", 4) == 0) {
      ++seen;
      CHECK(strncmp(info.spec, "cuda:", 5) == 0);
      CHECK((info.status == GPUSHARE_OK) == (info.total_bytes > 0));
    }
  }
  CHECK(seen >= 3);
  CHECK_STATUS(gpushare_device_get_info(count, &(gpushare_device_info)GPUSHARE_DEVICE_INFO_INIT),
               GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_device_get_info(0, NULL), GPUSHARE_INVALID_ARGUMENT);
}

static void errors(void) {
  gpushare_error_info error = GPUSHARE_ERROR_INFO_INIT;
  gpushare_runtime runtime = NULL;
  gpushare_runtime_params params = GPUSHARE_RUNTIME_PARAMS_INIT;
  params.device = "cuda?driver=/no/such/driver.so";
  CHECK_STATUS(gpushare_runtime_open(&params, &runtime), GPUSHARE_UNAVAILABLE);
  CHECK_STATUS(gpushare_last_error(&error), GPUSHARE_OK);
  CHECK(error.status == GPUSHARE_UNAVAILABLE && strcmp(error.backend, "cuda") == 0);
  CHECK(error.message == gpushare_last_error_message() &&
        strstr(error.message, "/no/such/driver.so") != NULL);
  params.device = "sim";
  params.interference_file = "/";
  CHECK_STATUS(gpushare_runtime_open(&params, &runtime), GPUSHARE_IO_ERROR);
  CHECK_STATUS(gpushare_last_error(&error), GPUSHARE_OK);
  CHECK(error.status == GPUSHARE_IO_ERROR && error.native_code != 0 && strcmp(error.backend, "") == 0);
  CHECK_STATUS(gpushare_last_error(NULL), GPUSHARE_INVALID_ARGUMENT);
  error.struct_size = 4;
  CHECK_STATUS(gpushare_last_error(&error), GPUSHARE_INVALID_ARGUMENT);
}

struct progress {
  pthread_mutex_t mutex; /* several threads may call the function at once */
  int calls, wrong;
  uint64_t done, service_ns, device_ns;
};

static void told(void* user_data, const gpushare_progress* progress) {
  struct progress* of = user_data;
  pthread_mutex_lock(&of->mutex);
  ++of->calls;
  if (progress->struct_size != sizeof *progress || strcmp(progress->session_name, "reports") != 0)
    ++of->wrong;
  if (progress->session_id == 0 || progress->lane != 0) ++of->wrong;
  if (progress->iterations_done > of->done) { /* they come in any order */
    of->done = progress->iterations_done;
    of->service_ns = progress->service_ns;
    of->device_ns = progress->device_ns;
  }
  pthread_mutex_unlock(&of->mutex);
}

/* Waits for so many calls: the last one may still be under way when its iteration is over. */
static void until_told(struct progress* of, int calls) {
  int told_calls = 0;
  while (told_calls < calls) {
    usleep(1000);
    pthread_mutex_lock(&of->mutex);
    told_calls = of->calls;
    pthread_mutex_unlock(&of->mutex);
  }
}

/* One session, three iterations of 5 ms and one of 7. */
static void one_session(void) {
  struct progress progress = {PTHREAD_MUTEX_INITIALIZER, 0, 0, 0, 0, 0};
  gpushare_runtime runtime = NULL;
  gpushare_session session = NULL;
  gpushare_runtime_params params = GPUSHARE_RUNTIME_PARAMS_INIT;
  gpushare_session_params need = GPUSHARE_SESSION_PARAMS_INIT;
  gpushare_runtime_info info;
  gpushare_session_info used;
  gpushare_block_info block = GPUSHARE_BLOCK_INFO_INIT;
  gpushare_iteration iteration = NULL;
  gpushare_ticket tickets[2];
  gpushare_device_address weights = 0, scratch = 0;
  int i;
  params.device = "sim";
  params.policy = "fair";
  params.layout = GPUSHARE_LAYOUT_VIRTUAL;
  params.capacity_bytes = 64 * MIB;
  params.on_progress = told;
  params.on_progress_user_data = &progress;
  CHECK_STATUS(gpushare_runtime_open(&params, &runtime), GPUSHARE_OK);
  need.name = "reports";
  need.persistent_bytes = 8 * MIB;
  need.ephemeral_bytes = 16 * MIB;
  need.iterations_total = 10;
  need.quota_bytes = 40 * MIB;
  CHECK_STATUS(gpushare_session_open(runtime, &need, &session), GPUSHARE_OK);
  used = session_info(session);
  CHECK(used.state == GPUSHARE_SESSION_RESIDENT && used.session_id != 0 && used.status == GPUSHARE_OK);
  CHECK(used.promised_persistent_bytes == 8 * MIB && used.promised_ephemeral_bytes == 16 * MIB);
  CHECK(used.quota_bytes == 40 * MIB && used.effective_quota_bytes == 40 * MIB);
  CHECK(used.remaining_ns == UINT64_MAX); /* nothing has run yet */
  CHECK(used.session_class == GPUSHARE_CLASS_GUARANTEED && used.limit_bytes == 0);
  CHECK(used.compute_units == 0 && used.planned_iterations == 0 && used.home_bytes == 0);

  CHECK_STATUS(gpushare_session_alloc(session, GPUSHARE_KIND_MODEL, 4 * MIB, 0, &weights), GPUSHARE_OK);
  for (i = 0; i < 3; ++i) iterate(session, 5 * kMs);
  iterate(session, 7 * kMs);
  CHECK_STATUS(gpushare_runtime_synchronize(runtime, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  until_told(&progress, 4);
  CHECK(progress.calls == 4 && progress.wrong == 0 && progress.done == 4);
  CHECK(progress.service_ns == 22 * kMs && progress.device_ns == 7 * kMs);
  used = session_info(session);
  CHECK(used.iterations_done == 4 && used.service_ns == 22 * kMs && used.iterations_queued == 0);
  CHECK(used.persistent_bytes == 4 * MIB && used.ephemeral_bytes == 0 && used.peak_bytes == 5 * MIB);
  CHECK(used.lane == 0);
  /* 6 of 10 are left, each as long as those that have run. */
  CHECK(used.remaining_ns >= 6 * 5 * kMs && used.remaining_ns <= 6 * 7 * kMs);
  CHECK_STATUS(gpushare_session_set_remaining(session, 123), GPUSHARE_OK);
  CHECK(session_info(session).remaining_ns == 123);

  /* Blocks inside of an iteration: live, then kept. */
  CHECK_STATUS(gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_alloc(iteration, 3 * MIB, 0, &scratch), GPUSHARE_OK);
  CHECK(session_info(session).ephemeral_bytes == 3 * MIB);
  CHECK_STATUS(gpushare_memory_get_info(runtime, scratch, &block), GPUSHARE_OK);
  CHECK(block.kind == GPUSHARE_KIND_EPHEMERAL && block.address == scratch && block.bytes == 3 * MIB);
  CHECK(block.lane == 0 && block.session_id == used.session_id && block.promoted == 0 && block.spilled == 0);
  info = info_of(runtime);
  CHECK(info.persistent_bytes == 4 * MIB && info.ephemeral_bytes == 3 * MIB && info.peak_bytes == 7 * MIB);
  CHECK_STATUS(gpushare_iteration_keep(iteration, scratch), GPUSHARE_OK);
  for (i = 0; i < 2; ++i)
    CHECK_STATUS(gpushare_session_submit(session, nothing, NULL, NULL, &tickets[i]), GPUSHARE_OK);
  CHECK(session_info(session).iterations_queued == 2);
  CHECK_STATUS(gpushare_iteration_end(iteration), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_drain(runtime, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  for (i = 0; i < 2; ++i) CHECK_STATUS(gpushare_ticket_release(tickets[i]), GPUSHARE_OK);
  used = session_info(session);
  CHECK(used.promoted_bytes == 3 * MIB && used.persistent_bytes == 7 * MIB && used.iterations_queued == 0);
  CHECK_STATUS(gpushare_memory_get_info(runtime, scratch, &block), GPUSHARE_OK);
  CHECK(block.promoted == 1);

  info = info_of(runtime);
  CHECK(info.layout == GPUSHARE_LAYOUT_VIRTUAL && info.lanes == 1 && info.sessions_resident == 1);
  CHECK((info.capabilities & GPUSHARE_DEVICE_CAP_MODELED_WORK) != 0);
  CHECK(info.capacity_bytes == 64 * MIB && info.effective_capacity_bytes == 64 * MIB);
  CHECK(info.promised_bytes >= 24 * MIB && info.promised_bytes <= 40 * MIB);
  CHECK(info.iterations_done == 7 && info.device_busy_ns >= 22 * kMs && info.now_ns >= info.device_busy_ns);
  CHECK(info.sessions_queued == 0 && info.sessions_paged_out == 0 && info.paging_ns == 0);
  CHECK(strcmp(info.device, "sim") == 0 && strcmp(info.policy, "fair") == 0);
  CHECK(info.compute_units == 1 && info.partitionable_compute_units == 0 && info.promised_compute_units == 0);
  CHECK(info.link_bytes_per_s == 0);

  /* Lowered below what is promised: the new target, and the limit that still holds. */
  CHECK_STATUS(gpushare_session_set_quota(session, 2 * MIB), GPUSHARE_OK);
  used = session_info(session);
  CHECK(used.quota_bytes == 2 * MIB && used.effective_quota_bytes > 2 * MIB);
  CHECK_STATUS(gpushare_runtime_set_capacity(runtime, 2 * MIB), GPUSHARE_OK);
  info = info_of(runtime);
  CHECK(info.capacity_bytes == 2 * MIB && info.effective_capacity_bytes >= info.promised_bytes);
  CHECK_STATUS(gpushare_runtime_set_capacity(runtime, 0), GPUSHARE_OK);
  CHECK(info_of(runtime).capacity_bytes == 64 * MIB);
  CHECK_STATUS(gpushare_session_close(session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
}

static gpushare_session open_with(gpushare_runtime runtime, gpushare_session_params params,
                                  const char* name) {
  gpushare_session session = NULL;
  params.name = name;
  CHECK_STATUS(gpushare_session_open(runtime, &params, &session), GPUSHARE_OK);
  return session;
}

/* Two sessions that do not fit together: the more urgent one has the other paged out, which comes back afterwards. */
static void paging(void) {
  gpushare_runtime runtime = NULL;
  gpushare_runtime_params params = GPUSHARE_RUNTIME_PARAMS_INIT;
  gpushare_session_params need = GPUSHARE_SESSION_PARAMS_INIT;
  gpushare_session first, second;
  gpushare_runtime_info info;
  gpushare_device_address block = 0;
  params.device = "sim";
  params.policy = "priority";
  params.layout = GPUSHARE_LAYOUT_VIRTUAL;
  params.capacity_bytes = 64 * MIB;
  CHECK_STATUS(gpushare_runtime_open(&params, &runtime), GPUSHARE_OK);
  need.persistent_bytes = 32 * MIB;
  need.ephemeral_bytes = 4 * MIB;
  need.flags = GPUSHARE_SESSION_ALLOW_QUEUEING;
  first = open_with(runtime, need, "first");
  CHECK_STATUS(gpushare_session_alloc(first, GPUSHARE_KIND_MODEL, 24 * MIB, 0, &block), GPUSHARE_OK);
  iterate(first, kMs);
  /* Equally urgent: waits. */
  second = open_with(runtime, need, "second");
  CHECK(session_info(second).state == GPUSHARE_SESSION_QUEUED && info_of(runtime).sessions_queued == 1);
  CHECK(session_info(second).lane == UINT32_MAX);
  iterate(first, 2 * kMs);
  CHECK_STATUS(gpushare_runtime_synchronize(runtime, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  CHECK(session_info(second).queued_ns >= 2 * kMs);
  CHECK_STATUS(gpushare_session_close(second), GPUSHARE_OK);
  need.priority = 1;
  second = open_with(runtime, need, "second");
  CHECK_STATUS(gpushare_session_wait_admitted(second, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  iterate(second, kMs);
  info = info_of(runtime);
  CHECK(session_info(first).state == GPUSHARE_SESSION_PAGED_OUT);
  CHECK(info.sessions_paged_out == 1 && info.paged_out_bytes_total == 24 * MIB &&
        info.paged_in_bytes_total == 0);
  CHECK(info.paging_ns >= 24 * MIB / 12); /* 12 bytes a nanosecond */
  CHECK(info.sessions_resident == 1 && info.switches == 1);
  CHECK_STATUS(gpushare_session_close(second), GPUSHARE_OK);
  iterate(first, kMs);
  info = info_of(runtime);
  CHECK(info.sessions_paged_out == 0 && info.paged_in_bytes_total == 24 * MIB);
  CHECK(info.paging_ns >= 48 * MIB / 12 && info.switches == 2);
  CHECK(session_info(first).state == GPUSHARE_SESSION_RESIDENT);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(first), GPUSHARE_OK);
}

/* Parameters of a session and a runtime that change what they do. */
static void parameters(void) {
  gpushare_runtime runtime = NULL;
  gpushare_runtime_params params = GPUSHARE_RUNTIME_PARAMS_INIT;
  gpushare_session_params need = GPUSHARE_SESSION_PARAMS_INIT;
  gpushare_session first, second;
  static char text[16384];
  uint64_t size = 0;
  int i;
  char path[] = "/tmp/gpushare-fields-XXXXXX";
  const int file = mkstemp(path);
  if (file >= 0) close(file);
  params.device = "sim";
  params.max_lanes = 1;
  params.capacity_bytes = 64 * MIB;
  params.record = GPUSHARE_RECORD_ALLOCATIONS;
  CHECK_STATUS(gpushare_runtime_open(&params, &runtime), GPUSHARE_OK);
  need.persistent_bytes = 2 * MIB;
  need.ephemeral_bytes = 4 * MIB;
  need.plan_iterations = 1;
  first = open_with(runtime, need, "first");
  need.plan_iterations = 0;
  second = open_with(runtime, need, "second");
  for (i = 0; i < 20; ++i) {
    iterate(first, 0);
    iterate(second, 0);
  }
  CHECK(info_of(runtime).lanes == 1); /* more are not allowed */
  CHECK_STATUS(gpushare_runtime_synchronize(runtime, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  CHECK(session_info(first).planned_iterations > 0 && session_info(second).planned_iterations == 0);
  CHECK_STATUS(gpushare_runtime_write_allocation_log(runtime, path), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_write_timeline(runtime, path), GPUSHARE_INVALID_STATE);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(first), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(second), GPUSHARE_OK);

  params.max_lanes = 2;
  params.record = GPUSHARE_RECORD_TIMELINE;
  CHECK_STATUS(gpushare_runtime_open(&params, &runtime), GPUSHARE_OK);
  first = open_with(runtime, need, "first");
  second = open_with(runtime, need, "second");
  iterate(first, 0);
  iterate(second, 0);
  CHECK(info_of(runtime).lanes == 2);
  CHECK_STATUS(gpushare_runtime_write_allocation_log(runtime, path), GPUSHARE_INVALID_STATE);
  CHECK_STATUS(gpushare_runtime_write_timeline(runtime, path), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_write_timeline(runtime, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_runtime_write_snapshot(runtime, path, GPUSHARE_SNAPSHOT_JSON), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_write_snapshot(runtime, path, 2), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_runtime_write_metrics(runtime, NULL, 0, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_runtime_write_metrics(runtime, NULL, 1, &size), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_runtime_write_metrics(runtime, NULL, 0, &size), GPUSHARE_INVALID_ARGUMENT);
  CHECK(size > 1000 && size < sizeof text);
  CHECK_STATUS(gpushare_runtime_write_metrics(runtime, text, size - 1, &size), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_runtime_write_metrics(runtime, text, sizeof text, &size), GPUSHARE_OK);
  CHECK(strlen(text) + 1 == size && strstr(text, "name=\"first\"") != NULL);
  CHECK(strstr(text, "name=\"second\"") != NULL);
  CHECK_STATUS(gpushare_runtime_set_policy(runtime, NULL, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_runtime_set_policy(runtime, "fifo", NULL), GPUSHARE_OK);
  CHECK(strcmp(info_of(runtime).policy, "fifo") == 0);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(first), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(second), GPUSHARE_OK);
  /* Each number just above what is allowed. */
  params.max_lanes = 65;
  CHECK_STATUS(gpushare_runtime_open(&params, &runtime), GPUSHARE_INVALID_ARGUMENT);
  params.max_lanes = 64;
  params.enqueue_depth = 64;
  CHECK_STATUS(gpushare_runtime_open(&params, &runtime), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
  params.spill_move_loss = -0.5;
  CHECK_STATUS(gpushare_runtime_open(&params, &runtime), GPUSHARE_INVALID_ARGUMENT);
  params.spill_move_loss = 0;
  params.record = 4;
  CHECK_STATUS(gpushare_runtime_open(&params, &runtime), GPUSHARE_INVALID_ARGUMENT);
  remove(path);
}

/* A coordinator's numbers: how many run at once in each class, and after what time one starts in the other. */
static void coordination(void) {
  gpushare_runtime runtime = open_runtime("sim", "fair", 64 * MIB);
  gpushare_coordination_params params = GPUSHARE_COORDINATION_PARAMS_INIT;
  gpushare_session_params need = GPUSHARE_SESSION_PARAMS_INIT;
  gpushare_session sure[3], spare[3];
  int i;
  params.reserved = 1;
  CHECK_STATUS(gpushare_runtime_set_coordination(runtime, &params), GPUSHARE_INVALID_ARGUMENT);
  params.reserved = 0;
  params.max_guaranteed = 2;
  params.max_opportunistic = 1;
  CHECK_STATUS(gpushare_runtime_set_coordination(runtime, &params), GPUSHARE_OK);
  need.persistent_bytes = need.ephemeral_bytes = 2 * MIB;
  need.flags = GPUSHARE_SESSION_ALLOW_QUEUEING | GPUSHARE_SESSION_ALLOW_SPILL;
  for (i = 0; i < 3; ++i) sure[i] = open_with(runtime, need, "sure");
  need.session_class = GPUSHARE_CLASS_OPPORTUNISTIC;
  need.persistent_bytes = 60 * MIB; /* more than the others leave */
  need.least_bytes = 4 * MIB;
  for (i = 0; i < 2; ++i) spare[i] = open_with(runtime, need, "spare");
  for (i = 0; i < 2; ++i)
    CHECK_STATUS(gpushare_session_wait_admitted(sure[i], GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_wait_admitted(spare[0], GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_wait_admitted(sure[2], 0), GPUSHARE_TIMED_OUT);
  CHECK_STATUS(gpushare_session_wait_admitted(spare[1], 0), GPUSHARE_TIMED_OUT);
  CHECK(session_info(spare[0]).session_class == GPUSHARE_CLASS_OPPORTUNISTIC);
  CHECK(session_info(spare[0]).limit_bytes >= 4 * MIB && session_info(spare[0]).limit_bytes <= 56 * MIB);
  CHECK_STATUS(gpushare_runtime_set_coordination(runtime, NULL), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_wait_admitted(sure[2], GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  CHECK(session_info(spare[0]).limit_bytes == 0);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
  for (i = 0; i < 3; ++i) CHECK_STATUS(gpushare_session_close(sure[i]), GPUSHARE_OK);
  for (i = 0; i < 2; ++i) CHECK_STATUS(gpushare_session_close(spare[i]), GPUSHARE_OK);
}

/* A guaranteed session that has waited for long_wait_ns starts as an opportunistic one. */
static void long_wait(void) {
  gpushare_runtime runtime = open_runtime("sim", "fair", 64 * MIB);
  gpushare_coordination_params params = GPUSHARE_COORDINATION_PARAMS_INIT;
  gpushare_session_params need = GPUSHARE_SESSION_PARAMS_INIT;
  gpushare_session first, second;
  int i;
  params.long_wait_ns = 5 * kMs;
  CHECK_STATUS(gpushare_runtime_set_coordination(runtime, &params), GPUSHARE_OK);
  need.persistent_bytes = need.ephemeral_bytes = 2 * MIB;
  need.flags = GPUSHARE_SESSION_ALLOW_QUEUEING | GPUSHARE_SESSION_ALLOW_SPILL;
  first = open_with(runtime, need, "first");
  second = open_with(runtime, need, "second"); /* one guaranteed session at a time */
  CHECK_STATUS(gpushare_session_wait_admitted(second, 0), GPUSHARE_TIMED_OUT);
  for (i = 0; session_info(second).state != GPUSHARE_SESSION_RESIDENT; ++i) { /* a thread admits it */
    iterate(first, kMs);
    CHECK_STATUS(gpushare_runtime_synchronize(runtime, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  }
  CHECK(i >= 4);
  CHECK(session_info(second).session_class == GPUSHARE_CLASS_OPPORTUNISTIC);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(first), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(second), GPUSHARE_OK);
}

/* Measured interference: alone, by name. */
static void interference(void) {
  gpushare_runtime runtime = open_runtime("sim", "pack", 64 * MIB);
  gpushare_session session = open_session(runtime, "measured", 2 * MIB, 2 * MIB);
  gpushare_interference entry = GPUSHARE_INTERFERENCE_INIT;
  int i;
  for (i = 0; i < 8; ++i) iterate(session, 3 * kMs);
  CHECK_STATUS(gpushare_runtime_synchronize(runtime, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_get_interference(runtime, 0, &entry), GPUSHARE_OK);
  CHECK(strcmp(entry.name, "measured") == 0 && entry.beside[0] == '\0');
  CHECK(entry.value >= 3e6 && entry.value < 3.3e6);
  CHECK(entry.confidence >= 1 && entry.confidence <= 16 && entry.age_s >= 0 && entry.age_s < 60);
  CHECK_STATUS(gpushare_runtime_get_interference(runtime, 1, &entry), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_session_close(session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
}

static void heaps(void) {
  gpushare_heap heap = NULL;
  gpushare_heap_params params = GPUSHARE_HEAP_PARAMS_INIT;
  gpushare_heap_info info = GPUSHARE_HEAP_INFO_INIT;
  uint64_t at[3] = {0, 0, 0};
  params.capacity_bytes = 64 * 16;
  params.alignment_bytes = 8; /* the least is 16 */
  CHECK_STATUS(gpushare_heap_create(&params, &heap), GPUSHARE_INVALID_ARGUMENT);
  params.alignment_bytes = (uint64_t)1 << 31;
  CHECK_STATUS(gpushare_heap_create(&params, &heap), GPUSHARE_INVALID_ARGUMENT);
  params.alignment_bytes = 24;
  CHECK_STATUS(gpushare_heap_create(&params, &heap), GPUSHARE_INVALID_ARGUMENT);
  params.alignment_bytes = 16;
  params.capacity_bytes = 15;
  CHECK_STATUS(gpushare_heap_create(&params, &heap), GPUSHARE_INVALID_ARGUMENT);
  params.capacity_bytes = ((uint64_t)1 << 50) + 1;
  CHECK_STATUS(gpushare_heap_create(&params, &heap), GPUSHARE_INVALID_ARGUMENT);
  params.capacity_bytes = 64 * 16;
  CHECK_STATUS(gpushare_heap_create(&params, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_heap_create(&params, &heap), GPUSHARE_OK);
  CHECK_STATUS(gpushare_heap_alloc(heap, 160, &at[0]), GPUSHARE_OK);
  CHECK_STATUS(gpushare_heap_alloc(heap, 320, &at[1]), GPUSHARE_OK);
  CHECK_STATUS(gpushare_heap_alloc(heap, 16, &at[2]), GPUSHARE_OK);
  CHECK_STATUS(gpushare_heap_alloc(heap, 0, &at[2]), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_heap_alloc(heap, 1, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_heap_alloc(heap, 1024, &at[2]), GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK_STATUS(gpushare_heap_get_info(heap, &info), GPUSHARE_OK);
  CHECK(info.capacity_bytes == 1024 && info.live_blocks == 3 && info.live_bytes == 496);
  CHECK(info.high_water_bytes == 496 && info.largest_hole_bytes == 528);
  CHECK_STATUS(gpushare_heap_free(heap, at[1]), GPUSHARE_OK);
  CHECK_STATUS(gpushare_heap_free(heap, at[1]), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_heap_get_info(heap, &info), GPUSHARE_OK);
  CHECK(info.live_blocks == 2 && info.live_bytes == 176 && info.high_water_bytes == 496);
  CHECK_STATUS(gpushare_heap_release(heap), GPUSHARE_OK);
  CHECK_STATUS(gpushare_heap_get_info(heap, &info), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_heap_alloc(heap, 16, &at[0]), GPUSHARE_INVALID_HANDLE);
  params.alignment_bytes = 0; /* 256 */
  CHECK_STATUS(gpushare_heap_create(&params, &heap), GPUSHARE_OK);
  CHECK_STATUS(gpushare_heap_alloc(heap, 1, &at[0]), GPUSHARE_OK);
  CHECK_STATUS(gpushare_heap_alloc(heap, 1, &at[1]), GPUSHARE_OK);
  CHECK(at[0] % 256 == 0 && at[1] % 256 == 0);
  CHECK_STATUS(gpushare_heap_release(heap), GPUSHARE_OK);
}

static void explained(void) {
  gpushare_runtime runtime = open_runtime("sim", "fair", 64 * MIB);
  gpushare_session session = open_session(runtime, "keeps", 30 * MIB, 30 * MIB), second = NULL;
  gpushare_session_params need = GPUSHARE_SESSION_PARAMS_INIT;
  char text[512], cut[6];
  need.name = "waits";
  need.persistent_bytes = need.ephemeral_bytes = 20 * MIB;
  need.flags = GPUSHARE_SESSION_ALLOW_QUEUEING;
  CHECK_STATUS(gpushare_session_open(runtime, &need, &second), GPUSHARE_OK);
  memset(text, 'x', sizeof text);
  CHECK_STATUS(gpushare_session_explain_wait(second, text, sizeof text), GPUSHARE_OK);
  CHECK(strstr(text, "keeps") != NULL && strlen(text) < sizeof text);
  memset(cut, 'x', sizeof cut);
  CHECK_STATUS(gpushare_session_explain_wait(second, cut, 5), GPUSHARE_OK);
  CHECK(strlen(cut) == 4 && strncmp(cut, text, 4) == 0 && cut[5] == 'x');
  CHECK_STATUS(gpushare_session_explain_wait(second, cut, 0), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_session_explain_wait(second, NULL, 5), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_session_close(second), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
}

/* A policy of the caller's, and its views of the sessions "one" and "two". */
struct policy {
  int released, asked, wrong;
  uint64_t ids[2];
  gpushare_candidate last;
};

static uint64_t runs_now(void* user_data, const gpushare_candidate* session, uint64_t now_ns) {
  struct policy* of = user_data;
  ++of->asked;
  if (session->struct_size != sizeof *session) ++of->wrong;
  if (session->ready_since_ns > now_ns || session->arrival_ns > session->ready_since_ns) ++of->wrong;
  of->last = *session;
  return now_ns;
}

static int32_t later_first(void* user_data, const gpushare_candidate* a, const gpushare_candidate* b) {
  if (a->session_id == b->session_id) ++((struct policy*)user_data)->wrong;
  return a->session_id > b->session_id;
}

static int32_t to_larger_priority(void* user_data, const gpushare_candidate* victim,
                                  const gpushare_candidate* other) {
  (void)user_data;
  return other->priority > victim->priority ? GPUSHARE_GIVES_WAY_AT_ONCE : GPUSHARE_GIVES_WAY_NEVER;
}

static double whole_device(void* user_data, const gpushare_candidate* session) {
  (void)user_data;
  (void)session;
  return GPUSHARE_SHARE_WHOLE;
}

static int32_t two_at_once(void* user_data, const gpushare_candidate* session, uint32_t residents,
                           uint32_t passes) {
  if (session->struct_size != sizeof *session || passes > 1) ++((struct policy*)user_data)->wrong;
  return residents < 2 ? GPUSHARE_JOIN_YES : GPUSHARE_JOIN_NO;
}

static void policy_released(void* user_data) {
  ++((struct policy*)user_data)->released;
}

static void policies(void) {
  struct policy of;
  gpushare_policy_ops ops;
  gpushare_runtime runtime = NULL;
  gpushare_runtime_params params = GPUSHARE_RUNTIME_PARAMS_INIT;
  gpushare_session_params need = GPUSHARE_SESSION_PARAMS_INIT;
  gpushare_session one, two, three;
  uint32_t index;
  for (index = 0; index < gpushare_policy_count(); ++index) CHECK(gpushare_policy_name(index) != NULL);
  CHECK(index == 5 && gpushare_policy_name(index) == NULL);
  memset(&of, 0, sizeof of);
  memset(&ops, 0, sizeof ops);
  ops.struct_size = sizeof ops;
  ops.name = "later";
  ops.user_data = &of;
  ops.release = policy_released;
  params.device = "sim";
  params.policy = "fifo"; /* the table goes before the name */
  params.policy_ops = &ops;
  params.layout = GPUSHARE_LAYOUT_VIRTUAL;
  params.capacity_bytes = 64 * MIB;
  /* Each call that fails gives the table back, unless it is too small to have a release function. */
  CHECK_STATUS(gpushare_runtime_open(&params, &runtime),
               GPUSHARE_INVALID_ARGUMENT); /* no question answered */
  CHECK(of.released == 1);
  ops.before = later_first;
  ops.may_run = runs_now;
  ops.gives_way = to_larger_priority;
  ops.share = whole_device;
  ops.may_join = two_at_once;
  CHECK_STATUS(gpushare_runtime_open(&params, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK(of.released == 2);
  params.layout = 3;
  CHECK_STATUS(gpushare_runtime_open(&params, &runtime), GPUSHARE_INVALID_ARGUMENT);
  CHECK(of.released == 3);
  params.layout = GPUSHARE_LAYOUT_VIRTUAL;
  ops.lane_finder = "none";
  CHECK_STATUS(gpushare_runtime_open(&params, &runtime), GPUSHARE_NOT_FOUND);
  CHECK(of.released == 4);
  ops.lane_finder = "compact";
  ops.struct_size = (uint32_t)offsetof(gpushare_policy_ops, release);
  CHECK_STATUS(gpushare_runtime_open(&params, &runtime), GPUSHARE_INVALID_ARGUMENT);
  CHECK(of.released == 4);
  ops.struct_size = (uint32_t)sizeof ops;
  CHECK_STATUS(gpushare_runtime_set_policy(NULL, NULL, &ops), GPUSHARE_INVALID_HANDLE);
  CHECK(of.released == 5);
  CHECK_STATUS(gpushare_runtime_open(&params, &runtime), GPUSHARE_OK);
  CHECK(of.released == 5 && strcmp(info_of(runtime).policy, "later") == 0);

  need.persistent_bytes = 2 * MIB;
  need.ephemeral_bytes = 4 * MIB;
  need.priority = 3;
  need.weight = 2.5;
  need.flags = GPUSHARE_SESSION_ALLOW_QUEUEING;
  need.session_class = GPUSHARE_CLASS_OPPORTUNISTIC;
  one = open_with(runtime, need, "one");
  iterate(one, kMs);
  CHECK_STATUS(gpushare_runtime_synchronize(runtime, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  iterate(one, kMs);
  CHECK(of.wrong == 0 && of.asked >= 2);
  CHECK(of.last.session_id == session_info(one).session_id && of.last.priority == 3 && of.last.weight == 2.5);
  CHECK(of.last.session_class == GPUSHARE_CLASS_OPPORTUNISTIC && of.last.iterations_done == 1);
  CHECK(of.last.service_ns == kMs && of.last.iteration_ns == kMs && of.last.remaining_ns == UINT64_MAX);
  CHECK(of.last.persistent_bytes == 2 * MIB && of.last.ephemeral_bytes == 4 * MIB);
  /* Two are admitted at once; of those that wait the later one comes first; the urgent one has another paged out. */
  two = open_with(runtime, need, "two");
  three = open_with(runtime, need, "three");
  iterate(two, 0);
  CHECK(info_of(runtime).lanes == 1);
  CHECK(session_info(three).state == GPUSHARE_SESSION_QUEUED);
  CHECK_STATUS(gpushare_session_set_priority(three, 4), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_wait_admitted(three, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  CHECK(info_of(runtime).sessions_paged_out == 1 && of.wrong == 0);
  /* Another policy: this one is given back. */
  CHECK_STATUS(gpushare_runtime_set_policy(runtime, "fair", NULL), GPUSHARE_OK);
  iterate(three, 0);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
  CHECK(of.released == 6);
  CHECK_STATUS(gpushare_session_close(one), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(two), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(three), GPUSHARE_OK);
}

int main(void) {
  policies();
  devices();
  errors();
  one_session();
  paging();
  parameters();
  coordination();
  long_wait();
  interference();
  heaps();
  explained();
  return capi_result();
}
