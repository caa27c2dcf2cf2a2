// extern "C" bodies of gpushare/cluster.h.
// SPDX-License-Identifier: Apache-2.0
#include "gpushare/cluster.h"

#include <cstdlib>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "c_api/cluster/guard.hpp"
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

}  // extern "C"
