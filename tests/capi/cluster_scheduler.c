/* A scheduler of the caller's own from C: it is told everything, what it decides happens, what it does wrong is said.
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "gpushare/cluster.h"

static int failures;
static gpushare_cluster_actions* late; /* kept beyond its tick */
#define CHECK(condition)                                                  \
  do {                                                                    \
    if (!(condition)) {                                                   \
      ++failures;                                                         \
      fprintf(stderr, "%d: CHECK(%s) failed: %s\n", __LINE__, #condition, \
              gpushare_cluster_last_error_message());                     \
    }                                                                     \
  } while (0)

static const char* const kDocument =
    "{\"version\": 1, \"kind\": \"training\", \"devices\": 1, \"jobs\": ["
    "{\"name\": \"a\", \"iterations\": 10, \"iteration_ms\": 1000, \"persistent_mb\": 1, \"ephemeral_mb\": "
    "1, \"config\": \"m\"},"
    "{\"name\": \"b\", \"class\": \"opportunistic\", \"iterations\": 20, \"iteration_ms\": 1000, "
    "\"persistent_mb\": 1, \"ephemeral_mb\": 1},"
    "{\"name\": \"big\", \"iterations\": 1, \"iteration_ms\": 1000, \"persistent_mb\": 1, \"ephemeral_mb\": "
    "1, \"gang\": 2}]}";

enum mode { kRight, kTwice, kBeyond, kNobody, kForEver, kTooSoon, kTooOften };

typedef struct {
  enum mode mode;
  int begun, devices, arrived, observed, finished, ticks;
  int placed[3];
  double finished_s[3];
} own;

static void begin(void* context) {
  own* self = context;
  const enum mode mode = self->mode;
  memset(self, 0, sizeof(*self));
  self->mode = mode;
  self->begun = 1;
}
static void device_changed(void* context, uint32_t device, uint64_t memory_bytes, double speed, int32_t up,
                           double now_s) {
  own* self = context;
  self->devices += device == 0 && memory_bytes == (uint64_t)16 << 30 && speed == 1 && up == 1 && now_s == 0;
}
static void arrived(void* context, uint32_t job, const gpushare_cluster_job_info* info, double now_s) {
  own* self = context;
  self->arrived += info->struct_size >= sizeof(*info) && now_s == 0 && info->memory_bytes == 2000000 &&
                   info->demand_count == 1 && info->guaranteed == (job != 1) &&
                   strcmp(info->name, job == 0   ? "a"
                                      : job == 1 ? "b"
                                                 : "big") == 0 &&
                   info->gang == (job == 2 ? 2u : 1u) && strcmp(info->config, job == 0 ? "m" : "") == 0;
}
static void observed(void* context, uint32_t job, double attained_s, double remaining_s, double slowdown,
                     double now_s) {
  own* self = context;
  self->observed += job < 3 && attained_s >= 0 && remaining_s >= 0 && slowdown >= 1 && now_s >= 0;
}
static void finished(void* context, uint32_t job, double now_s) {
  own* self = context;
  ++self->finished;
  if (job < 3) self->finished_s[job] = now_s;
}
static double tick(void* context, double now_s, gpushare_cluster_actions* actions) {
  own* self = context;
  const uint32_t devices[2] = {0, 7};
  ++self->ticks;
  switch (self->mode) {
    case kTwice:
      CHECK(gpushare_cluster_actions_place(actions, 0, devices, 1, 0) == GPUSHARE_OK);
      CHECK(gpushare_cluster_actions_place(actions, 0, devices, 1, 0) == GPUSHARE_OK);
      return -1;
    case kBeyond:
      CHECK(gpushare_cluster_actions_place(actions, 2, devices, 2, 0) == GPUSHARE_OK);
      return -1;
    case kNobody:
      return -1;
    case kForEver:
      return now_s;
    case kTooSoon:
    case kTooOften:
      if (!self->placed[0]) {
        CHECK(gpushare_cluster_actions_place(actions, 0, devices, 1, 0) == GPUSHARE_OK);
        self->placed[0] = 1;
      }
      return self->mode == kTooSoon ? now_s + 1e-300 : now_s + 1e-12;
    case kRight:
      break;
  }
  if (!self->placed[0]) { /* a runs for 4 s, pauses until 6 s, then beside b */
    CHECK(gpushare_cluster_actions_place(actions, 0, devices, 1, 0) == GPUSHARE_OK);
    CHECK(gpushare_cluster_actions_reject(actions, 2, "too wide") == GPUSHARE_OK);
    CHECK(gpushare_cluster_actions_place(NULL, 0, devices, 1, 0) == GPUSHARE_INVALID_ARGUMENT);
    CHECK(gpushare_cluster_actions_place(actions, 0, NULL, 1, 0) == GPUSHARE_INVALID_ARGUMENT);
    CHECK(gpushare_cluster_actions_place(actions, 0, devices, UINT32_MAX, 0) == GPUSHARE_INVALID_ARGUMENT);
    late = actions;
    CHECK(gpushare_cluster_actions_pause(NULL, 0) == GPUSHARE_INVALID_ARGUMENT);
    CHECK(gpushare_cluster_actions_resize(NULL, 0, 0) == GPUSHARE_INVALID_ARGUMENT);
    CHECK(gpushare_cluster_actions_reject(NULL, 0, "") == GPUSHARE_INVALID_ARGUMENT);
    self->placed[0] = 1;
    return 4;
  }
  if (self->placed[0] == 1 && now_s >= 4 && now_s < 6) {
    CHECK(gpushare_cluster_actions_pause(actions, 0) == GPUSHARE_OK);
    self->placed[0] = 2;
    return 6;
  }
  if (self->placed[0] == 2 && now_s >= 6) {
    CHECK(gpushare_cluster_actions_place(actions, 0, devices, 1, 0) == GPUSHARE_OK);
    CHECK(gpushare_cluster_actions_place(actions, 1, devices, 1, 1) == GPUSHARE_OK);
    CHECK(gpushare_cluster_actions_resize(actions, 1, 1) == GPUSHARE_OK);
    self->placed[0] = 3;
  }
  return -1;
}

int main(void) {
  own state;
  memset(&state, 0, sizeof(state));
  gpushare_cluster_scheduler_ops ops;
  memset(&ops, 0, sizeof(ops));
  ops.struct_size = sizeof(ops);
  ops.abi_version = GPUSHARE_CLUSTER_SCHEDULER_ABI_VERSION;
  ops.name = "own";
  ops.context = &state;
  ops.begin = begin;
  ops.device_changed = device_changed;
  ops.arrived = arrived;
  ops.observed = observed;
  ops.finished = finished;
  ops.tick = tick;
  const gpushare_cluster_scheduler_ops* list[] = {&ops};
  gpushare_cluster_run_options options = GPUSHARE_CLUSTER_RUN_OPTIONS_INIT;
  options.schedulers = list;
  options.scheduler_count = 1;
  const uint64_t size = strlen(kDocument);
  char* out = NULL;

  CHECK(gpushare_cluster_run(kDocument, size, "own,fifo", &options, &out) == GPUSHARE_OK);
  CHECK(state.begun == 1 && state.devices == 1 && state.arrived == 3 && state.finished == 2 &&
        state.observed > 0);
  CHECK(state.finished_s[0] > 11.9 &&
        state.finished_s[0] < 12.1); /* 10 s of work and 2 s of pause: b does not slow it */
  CHECK(out != NULL && strstr(out, "\"scheduler\":\"own\"") != NULL && strstr(out, "too wide") != NULL);
  gpushare_cluster_text_free(out);

  state.mode = kTwice;
  CHECK(gpushare_cluster_run(kDocument, size, "own", &options, &out) == GPUSHARE_INVALID_ARGUMENT &&
        out == NULL);
  CHECK(strstr(gpushare_cluster_last_error_message(), "job 0 ('a') is wrong: it runs already") != NULL);
  state.mode = kBeyond;
  CHECK(gpushare_cluster_run(kDocument, size, "own", &options, &out) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(strstr(gpushare_cluster_last_error_message(), "a device is none") != NULL);
  state.mode = kNobody; /* no error: the result says that nobody ran */
  CHECK(gpushare_cluster_run(kDocument, size, "own", &options, &out) == GPUSHARE_OK);
  CHECK(strstr(out, "never placed it to its end") != NULL);
  gpushare_cluster_text_free(out);
  state.mode = kForEver; /* ends all the same */
  CHECK(gpushare_cluster_run(kDocument, size, "own", &options, &out) == GPUSHARE_OK);
  gpushare_cluster_text_free(out);
  /* A job runs, another comes in an hour: a scheduler that asks at once, again and again, gets to the end too. */
  for (int mode = kTooSoon; mode <= kTooOften; ++mode) {
    static const char* const later =
        "{\"version\": 1, \"kind\": \"training\", \"devices\": 1, \"jobs\": ["
        "{\"name\": \"a\", \"iterations\": 1000000, \"iteration_ms\": 1000, \"persistent_mb\": 1, "
        "\"ephemeral_mb\": 1},"
        "{\"name\": \"b\", \"arrival_s\": 2000000, \"iterations\": 1, \"iteration_ms\": 1000, "
        "\"persistent_mb\": 1, \"ephemeral_mb\": 1}]}";
    state.mode = (enum mode)mode;
    CHECK(gpushare_cluster_run(later, strlen(later), "own", &options, &out) == GPUSHARE_OK);
    CHECK(state.finished == 1 && state.finished_s[0] > 999999 && state.ticks < 2000000);
    gpushare_cluster_text_free(out);
  }

  /* The table. */
  state.mode = kRight;
  ops.tick = NULL;
  CHECK(gpushare_cluster_run(kDocument, size, "own", &options, &out) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(strstr(gpushare_cluster_last_error_message(), "'own' lacks tick") != NULL);
  ops.tick = tick;
  ops.abi_version = 2;
  CHECK(gpushare_cluster_run(kDocument, size, "own", &options, &out) == GPUSHARE_INVALID_ARGUMENT);
  ops.abi_version = GPUSHARE_CLUSTER_SCHEDULER_ABI_VERSION;
  ops.struct_size = 8;
  CHECK(gpushare_cluster_run(kDocument, size, "own", &options, &out) == GPUSHARE_INVALID_ARGUMENT);
  ops.struct_size = UINT32_MAX;
  CHECK(gpushare_cluster_run(kDocument, size, "own", &options, &out) == GPUSHARE_INVALID_ARGUMENT);
  ops.struct_size = sizeof(ops);
  ops.name = "fifo";
  CHECK(gpushare_cluster_run(kDocument, size, "fifo", &options, &out) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(strstr(gpushare_cluster_last_error_message(), "already") != NULL);
  ops.name = "a,b";
  CHECK(gpushare_cluster_run(kDocument, size, "fifo", &options, &out) == GPUSHARE_INVALID_ARGUMENT);
  ops.name = "own";
  list[0] = NULL;
  CHECK(gpushare_cluster_run(kDocument, size, "own", &options, &out) == GPUSHARE_INVALID_ARGUMENT);
  list[0] = &ops;
  CHECK(gpushare_cluster_run("{\"version\": 1, \"kind\": \"shares\", \"capacity\": 1, \"jobs\": []}", 62,
                             NULL, &options, &out) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(strstr(gpushare_cluster_last_error_message(), "kind training") != NULL);

  /* The options. */
  options.schedulers = NULL;
  CHECK(gpushare_cluster_run(kDocument, size, "fifo", &options, &out) == GPUSHARE_INVALID_ARGUMENT);
  options.scheduler_count = 0;
  CHECK(gpushare_cluster_run(kDocument, size, "fifo", &options, &out) == GPUSHARE_OK);
  gpushare_cluster_text_free(out);
  CHECK(gpushare_cluster_run(kDocument, size, "own", &options, &out) == GPUSHARE_INVALID_ARGUMENT);
  options.noise = 11;
  CHECK(gpushare_cluster_run(kDocument, size, "fifo", &options, &out) == GPUSHARE_INVALID_ARGUMENT);
  options.noise = -1;
  options.struct_size = UINT32_MAX;
  CHECK(gpushare_cluster_run(kDocument, size, "fifo", &options, &out) == GPUSHARE_INVALID_ARGUMENT);
  options.struct_size = 4;
  CHECK(gpushare_cluster_run(kDocument, size, "fifo", &options, &out) == GPUSHARE_INVALID_ARGUMENT);
  struct {
    gpushare_cluster_run_options options;
    uint64_t later;
  } longer = {GPUSHARE_CLUSTER_RUN_OPTIONS_INIT, 0};
  longer.options.struct_size = sizeof(longer);
  CHECK(gpushare_cluster_run(kDocument, size, "fifo", &longer.options, &out) == GPUSHARE_OK);
  gpushare_cluster_text_free(out);
  longer.later = 1;
  CHECK(gpushare_cluster_run(kDocument, size, "fifo", &longer.options, &out) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(gpushare_cluster_run(kDocument, size, NULL, NULL, &out) == GPUSHARE_OK);
  gpushare_cluster_text_free(out);
  CHECK(gpushare_cluster_run(NULL, 0, NULL, NULL, &out) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(gpushare_cluster_run(kDocument, size, NULL, NULL, NULL) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(late != NULL && gpushare_cluster_actions_pause(late, 0) == GPUSHARE_INVALID_ARGUMENT);
  return failures == 0 ? 0 : 1;
}
