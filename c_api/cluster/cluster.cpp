// extern "C" bodies of gpushare/cluster.h.
// SPDX-License-Identifier: Apache-2.0
#include "gpushare/cluster.h"

#include <cstdlib>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "c_api/cluster/guard.hpp"
#include "c_api/cluster/scheduler_adapter.hpp"
#include "cluster/json.hpp"
#include "cluster/plan.hpp"
#include "sim/cluster_training.hpp"

using namespace gpushare;
using namespace gpushare::capi_cluster;

namespace {

std::vector<std::string> split(const char* list) {
  std::vector<std::string> out;
  if (list == nullptr) return out;
  out.emplace_back();
  for (; *list != '\0'; ++list) {
    if (*list == ',')
      out.emplace_back();
    else
      out.back() += *list;
  }
  return out;
}

// `object` begins with its struct_size: at least `least`, and zero in what is beyond this library's own. A size above
// kMaxStructSize is an uninitialised struct, whose tail must not be looked at.
template <class T>
base::Status check_size(const T* object, size_t least, const char* name) {
  if (object->struct_size < least || object->struct_size > kMaxStructSize)
    return {GPUSHARE_INVALID_ARGUMENT, base::format("%s.struct_size: %u is not allowed; %zu to %u are", name,
                                                    object->struct_size, least, kMaxStructSize)};
  const char* bytes = reinterpret_cast<const char*>(object);
  for (size_t i = sizeof(T); i < object->struct_size; ++i)
    if (bytes[i] != 0)
      return {GPUSHARE_INVALID_ARGUMENT,
              base::format("%s: byte %zu is set, and this library knows %zu", name, i, sizeof(T))};
  return {};
}

}  // namespace

extern "C" {

const char* gpushare_cluster_last_error_message(void) {
  return t_last_error.message().c_str();
}

void gpushare_cluster_text_free(char* text) {
  std::free(text);
}

int32_t gpushare_cluster_schema(char** out_schema) {
  return guard([&]() -> base::Status {
    if (out_schema == nullptr) return {GPUSHARE_INVALID_ARGUMENT, "out_schema is null"};
    *out_schema = nullptr;
    return give(cluster::schema(sim::all_cluster_kinds()), out_schema);
  });
}

int32_t gpushare_cluster_plan(const char* document, uint64_t document_bytes, const char* choices,
                              char** out_result) {
  return guard([&]() -> base::Status {
    if (out_result == nullptr) return {GPUSHARE_INVALID_ARGUMENT, "out_result is null"};
    *out_result = nullptr;
    if (document == nullptr) return {GPUSHARE_INVALID_ARGUMENT, "document is null"};
    cluster::PlanOptions options;
    options.choices = split(choices);
    options.now_ns = [] { return base::host_now_ns(); };
    GPUSHARE_ASSIGN_OR_RETURN(
        const cluster::OrderedJson result,
        cluster::plan(std::string_view(document, document_bytes), options, sim::all_cluster_kinds()));
    return give(result.dump(-1, ' ', false, cluster::OrderedJson::error_handler_t::replace), out_result);
  });
}

int32_t gpushare_cluster_run(const char* document, uint64_t document_bytes, const char* choices,
                             const gpushare_cluster_run_options* options, char** out_result) {
  return guard([&]() -> base::Status {
    if (out_result == nullptr) return {GPUSHARE_INVALID_ARGUMENT, "out_result is null"};
    *out_result = nullptr;
    if (document == nullptr) return {GPUSHARE_INVALID_ARGUMENT, "document is null"};
    cluster::PlayOptions play;
    if (options != nullptr) {
      GPUSHARE_RETURN_IF_ERROR(check_size(options, GPUSHARE_CLUSTER_RUN_OPTIONS_V1_SIZE, "options"));
      play.seed = options->seed;
      if (options->noise >= 0) play.noise = options->noise;
      if (!(options->noise <= 10))
        return {GPUSHARE_INVALID_ARGUMENT,
                base::format("options.noise: %g is not allowed; at most 10, or below 0 for the document's",
                             options->noise)};
      if (options->rounds > 0) play.rounds = options->rounds;
      if (options->objective != nullptr) play.objective = options->objective;
      if (options->schedulers == nullptr && options->scheduler_count > 0)
        return {GPUSHARE_INVALID_ARGUMENT, "options.schedulers is null"};
      for (uint64_t i = 0; i < options->scheduler_count; ++i) {
        const gpushare_cluster_scheduler_ops* ops = options->schedulers[i];
        GPUSHARE_RETURN_IF_ERROR(check_scheduler(ops));
        play.own.push_back({ops->name, [ops] { return adapt_scheduler(ops); }});
      }
    }
    cluster::PlanOptions plan;
    plan.choices = split(choices);
    plan.now_ns = play.now_ns = [] { return base::host_now_ns(); };
    GPUSHARE_ASSIGN_OR_RETURN(
        const cluster::OrderedJson result,
        cluster::run(std::string_view(document, document_bytes), plan, play, sim::all_cluster_kinds()));
    return give(result.dump(-1, ' ', false, cluster::OrderedJson::error_handler_t::replace), out_result);
  });
}

}  // extern "C"
