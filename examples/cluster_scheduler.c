/* A scheduler of one's own for several devices: the shortest waiting job first, one job a device. Played on virtual
 * time beside the library's fifo. SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpushare/cluster.h"

enum { kMostJobs = 64, kMostDevices = 8 };

/* The scheduler's state. A job waits from its arrival until it is placed. */
typedef struct {
  double work_s[kMostJobs];
  int waits[kMostJobs];
  uint32_t jobs;
  uint32_t runs_on[kMostJobs];
  int busy[kMostDevices];
  uint32_t devices;
} shortest;

static void begin(void* context) {
  memset(context, 0, sizeof(shortest));
}

static void device_changed(void* context, uint32_t device, uint64_t memory_bytes, double speed, int32_t up,
                           double now_s) {
  shortest* self = context;
  (void)memory_bytes, (void)speed, (void)now_s;
  if (device >= kMostDevices) return;
  if (device >= self->devices) self->devices = device + 1;
  self->busy[device] = !up;
}

static void arrived(void* context, uint32_t job, const gpushare_cluster_job_info* info, double now_s) {
  shortest* self = context;
  (void)now_s;
  if (job >= kMostJobs) return;
  if (job >= self->jobs) self->jobs = job + 1;
  self->work_s[job] = info->work_s;
  self->waits[job] = info->gang == 1;
}

static void finished(void* context, uint32_t job, double now_s) {
  shortest* self = context;
  (void)now_s;
  self->busy[self->runs_on[job]] = 0;
}

static double tick(void* context, double now_s, gpushare_cluster_actions* actions) {
  shortest* self = context;
  (void)now_s;
  for (uint32_t device = 0; device < self->devices; ++device) {
    if (self->busy[device]) continue;
    uint32_t best = kMostJobs;
    for (uint32_t job = 0; job < self->jobs; ++job)
      if (self->waits[job] && (best == kMostJobs || self->work_s[job] < self->work_s[best])) best = job;
    if (best == kMostJobs) break;
    gpushare_cluster_actions_place(actions, best, &device, 1, 0);
    self->waits[best] = 0;
    self->busy[device] = 1;
    self->runs_on[best] = device;
  }
  return -1; /* asked again when something happens */
}

int main(void) {
  static shortest state;
  gpushare_cluster_scheduler_ops ops;
  memset(&ops, 0, sizeof(ops));
  ops.struct_size = sizeof(ops);
  ops.abi_version = GPUSHARE_CLUSTER_SCHEDULER_ABI_VERSION;
  ops.name = "shortest";
  ops.context = &state;
  ops.begin = begin;
  ops.device_changed = device_changed;
  ops.arrived = arrived;
  ops.finished = finished;
  ops.tick = tick;

  char document[8192] = "{\"version\": 1, \"kind\": \"training\", \"devices\": 2, \"jobs\": [";
  for (int job = 0; job < 12; ++job)
    snprintf(document + strlen(document), sizeof(document) - strlen(document),
             "%s{\"name\": \"job%d\", \"iterations\": %d, \"iteration_ms\": 100, \"persistent_mb\": 500, "
             "\"ephemeral_mb\": 500}",
             job == 0 ? "" : ", ", job, (job * 7 % 12 + 1) * 100);
  strcat(document, "]}");

  const gpushare_cluster_scheduler_ops* const own[] = {&ops};
  gpushare_cluster_run_options options = GPUSHARE_CLUSTER_RUN_OPTIONS_INIT;
  options.schedulers = own;
  options.scheduler_count = 1;
  char* result = NULL;
  if (gpushare_cluster_run(document, strlen(document), "fifo,shortest", &options, &result) != GPUSHARE_OK) {
    fprintf(stderr, "%s\n", gpushare_cluster_last_error_message());
    return 1;
  }
  for (const char* at = result; (at = strstr(at, "\"scheduler\":\"")) != NULL;) {
    const char* mean = strstr(at, "\"jct_mean_s\":");
    printf("%-10.*s mean completion %.1f s\n", (int)strcspn(at + 13, "\""), at + 13,
           mean == NULL ? 0 : atof(mean + 13));
    at += 13;
  }
  gpushare_cluster_text_free(result);
  return 0;
}
