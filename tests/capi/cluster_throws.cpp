// A scheduler of the caller's own whose functions throw, or end their thread: the run says which one threw what.
// SPDX-License-Identifier: Apache-2.0
#include <pthread.h>

#include <cstdio>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>

#include "gpushare/cluster.h"

namespace {

constexpr std::string_view kDocument =
    R"({"version": 1, "kind": "training", "devices": 1, "jobs": [
       {"name": "a", "iterations": 10, "iteration_ms": 1000, "persistent_mb": 1, "ephemeral_mb": 1}]})";

int failures = 0;

void check(bool held, const std::string& what) {
  if (held) return;
  ++failures;
  std::fprintf(stderr, "failed: %s; last error: %s\n", what.c_str(), gpushare_cluster_last_error_message());
}

enum class Does { kRuns, kException, kNumber, kNoMemory, kExits };

struct Own {
  std::string where;
  Does does;
  bool placed = false;
};

void reach(void* context, std::string_view function) {
  const Own& own = *static_cast<Own*>(context);
  if (own.where != function) return;
  switch (own.does) {
    case Does::kRuns:
      return;
    case Does::kException:
      throw std::runtime_error("scripted");
    case Does::kNumber:
      throw 42;  // NOLINT(hicpp-exception-baseclass): what the test is about
    case Does::kNoMemory:
      throw std::bad_alloc();
    case Does::kExits:
      pthread_exit(nullptr);
  }
}

double tick(void* context, double now_s, gpushare_cluster_actions* actions) {
  reach(context, "tick");
  Own& own = *static_cast<Own*>(context);
  const uint32_t device = 0;
  if (!own.placed) own.placed = gpushare_cluster_actions_place(actions, 0, &device, 1, 0) == GPUSHARE_OK;
  return now_s + 1;  // so that it hears of the job while it runs
}

int32_t run(Own& own) {
  gpushare_cluster_scheduler_ops ops{};
  ops.struct_size = sizeof(ops);
  ops.abi_version = GPUSHARE_CLUSTER_SCHEDULER_ABI_VERSION;
  ops.name = "own";
  ops.context = &own;
  ops.begin = [](void* context) { reach(context, "begin"); };
  ops.device_changed = [](void* context, uint32_t, uint64_t, double, int32_t, double) {
    reach(context, "device_changed");
  };
  ops.arrived = [](void* context, uint32_t, const gpushare_cluster_job_info*, double) {
    reach(context, "arrived");
  };
  ops.observed = [](void* context, uint32_t, double, double, double, double) { reach(context, "observed"); };
  ops.finished = [](void* context, uint32_t, double) { reach(context, "finished"); };
  ops.tick = tick;
  const gpushare_cluster_scheduler_ops* list[] = {&ops};
  gpushare_cluster_run_options options = GPUSHARE_CLUSTER_RUN_OPTIONS_INIT;
  options.schedulers = list;
  options.scheduler_count = 1;
  char* out = nullptr;
  const int32_t code = gpushare_cluster_run(kDocument.data(), kDocument.size(), "own", &options, &out);
  check((code == GPUSHARE_OK) == (out != nullptr), "a result with OK alone");
  gpushare_cluster_text_free(out);
  return code;
}

}  // namespace

int main() {
  for (const char* where : {"begin", "device_changed", "arrived", "observed", "finished", "tick"}) {
    Own own{where, Does::kRuns};
    check(run(own) == GPUSHARE_OK, "a run in which nothing throws");
    for (const Does does : {Does::kException, Does::kNumber, Does::kNoMemory}) {
      own = {where, does};
      check(run(own) == GPUSHARE_CALLBACK_FAILED, std::string("an exception that leaves ") + where);
      const std::string_view said = gpushare_cluster_last_error_message();
      check(said.find("scheduler 'own': " + std::string(where) + " threw") != said.npos, "who threw");
      check(does != Does::kException || said.find("scripted") != said.npos, "the exception's own words");
    }
    bool came_back = false;
    std::thread([&] {
      Own exits{where, Does::kExits};
      (void)run(exits);
      came_back = true;
    }).join();
    check(!came_back, std::string("a thread that ends in ") + where);
  }
  return failures == 0 ? 0 : 1;
}
