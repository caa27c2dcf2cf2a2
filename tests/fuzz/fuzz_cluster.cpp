// Cluster documents of any bytes, decided by every scheduler of their kind, through the C face.
// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "gpushare/cluster.h"

// A scheduler whose actions are the bytes.
struct Actor {
  const uint8_t* data;
  size_t size;
  size_t at = 0;
};

static double act(void* context, double now_s, gpushare_cluster_actions* actions) {
  Actor& actor = *static_cast<Actor*>(context);
  for (int i = 0; i < 4 && actor.at + 3 <= actor.size; ++i, actor.at += 3) {
    const uint32_t job = actor.data[actor.at + 1] % 4, devices[2] = {actor.data[actor.at + 2] % 3u, 1};
    switch (actor.data[actor.at] % 4) {
      case 0:
        gpushare_cluster_actions_place(actions, job, devices, 1 + actor.data[actor.at + 2] % 2,
                                       actor.data[actor.at] / 4 % 2);
        break;
      case 1:
        gpushare_cluster_actions_pause(actions, job);
        break;
      case 2:
        gpushare_cluster_actions_resize(actions, job, actor.data[actor.at + 2] % 2);
        break;
      default:
        gpushare_cluster_actions_reject(actions, job, "fuzzed");
    }
  }
  return actor.at + 3 <= actor.size ? now_s + 1 : -1;
}

static void schedule(const uint8_t* data, size_t size) {
  static const char kDocument[] =
      "{\"version\": 1, \"kind\": \"training\", \"devices\": 2, \"jobs\": ["
      "{\"name\": \"a\", \"iterations\": 10, \"iteration_ms\": 1000, \"persistent_mb\": 9000, "
      "\"ephemeral_mb\": 1},"
      "{\"name\": \"b\", \"arrival_s\": 3, \"iterations\": 20, \"iteration_ms\": 1000, \"persistent_mb\": "
      "9000, \"ephemeral_mb\": 1},"
      "{\"name\": \"c\", \"iterations\": 5, \"iteration_ms\": 1000, \"persistent_mb\": 1, \"ephemeral_mb\": "
      "1, \"gang\": 2}]}";
  Actor actor{data, size};
  gpushare_cluster_scheduler_ops ops{};
  ops.struct_size = sizeof(ops);
  ops.abi_version = GPUSHARE_CLUSTER_SCHEDULER_ABI_VERSION;
  ops.name = "actor";
  ops.context = &actor;
  ops.device_changed = [](void*, uint32_t, uint64_t, double, int32_t, double) {};
  ops.arrived = [](void*, uint32_t, const gpushare_cluster_job_info*, double) {};
  ops.finished = [](void*, uint32_t, double) {};
  ops.tick = act;
  const gpushare_cluster_scheduler_ops* list[] = {&ops};
  gpushare_cluster_run_options options = GPUSHARE_CLUSTER_RUN_OPTIONS_INIT;
  options.schedulers = list;
  options.scheduler_count = 1;
  char* out = nullptr;
  const int32_t status = gpushare_cluster_run(kDocument, sizeof(kDocument) - 1, "actor", &options, &out);
  if ((status == GPUSHARE_OK) != (out != nullptr)) std::abort();
  if (status != GPUSHARE_OK && status != GPUSHARE_INVALID_ARGUMENT) std::abort();
  gpushare_cluster_text_free(out);
}

// The bytes as a request, a place and the resources of a node.
static void reserve(const std::string& text) {
  gpushare_cluster_table* table = nullptr;
  if (gpushare_cluster_table_create(&table) != GPUSHARE_OK) std::abort();
  gpushare_cluster_table_add_node(table, "a", "{\"gpu\": 4, \"cpu\": 8}");
  gpushare_cluster_table_add_node(table, "b", text.c_str());
  gpushare_cluster_table_set(table, "x", "name", 2, text.c_str());
  char* out = nullptr;
  if (gpushare_cluster_table_explain(table, text.c_str(), &out) == GPUSHARE_OK && out == nullptr)
    std::abort();
  gpushare_cluster_text_free(out);
  uint64_t ids[2] = {0, 0};
  for (uint64_t& id : ids) {
    if (gpushare_cluster_reservation_submit(table, text.c_str(), &id) == GPUSHARE_INTERNAL) std::abort();
    out = nullptr;
    if (gpushare_cluster_reservation_wait(table, id, 0, &out) == GPUSHARE_OK && out == nullptr) std::abort();
    gpushare_cluster_text_free(out);
    gpushare_cluster_reservation_renew(table, id);
  }
  gpushare_cluster_reservation_cancel(table, ids[1]);
  gpushare_cluster_table_lose_node(table, "a");
  gpushare_cluster_reservation_release(table, ids[0]);
  gpushare_cluster_table_end_owner(table, "x");
  if (gpushare_cluster_table_status(table, &out) != GPUSHARE_OK) std::abort();
  gpushare_cluster_text_free(out);
  gpushare_cluster_table_release(table);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size > 4096) return 0;
  char* out = nullptr;
  const int32_t status = gpushare_cluster_plan(reinterpret_cast<const char*>(data), size, nullptr, &out);
  if ((status == GPUSHARE_OK) != (out != nullptr)) std::abort();
  if (status != GPUSHARE_OK && std::strlen(gpushare_cluster_last_error_message()) == 0) std::abort();
  if (status == GPUSHARE_INTERNAL) std::abort();
  gpushare_cluster_text_free(out);
  out = nullptr;
  gpushare_cluster_run_options options = GPUSHARE_CLUSTER_RUN_OPTIONS_INIT;
  options.rounds = 3;
  const int32_t played =
      gpushare_cluster_run(reinterpret_cast<const char*>(data), size, nullptr, &options, &out);
  if ((played == GPUSHARE_OK) != (out != nullptr)) std::abort();
  if (played == GPUSHARE_INTERNAL) std::abort();
  gpushare_cluster_text_free(out);
  out = nullptr;
  schedule(data, size);
  reserve(std::string(reinterpret_cast<const char*>(data), size));
  if (size == 0) {
    if (gpushare_cluster_schema(&out) != GPUSHARE_OK) std::abort();
    gpushare_cluster_text_free(out);
  }
  return 0;
}
