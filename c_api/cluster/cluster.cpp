// extern "C" bodies of gpushare/cluster.h.
// SPDX-License-Identifier: Apache-2.0
#include "gpushare/cluster.h"

#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "base/clock.hpp"
#include "base/status.hpp"
#include "cluster/plan.hpp"

using namespace gpushare;

namespace {

thread_local base::Status t_last_error;

int32_t report(const base::Status& status) noexcept {
  if (!status.ok()) t_last_error = status;
  return status.code();
}

int32_t report_out_of_memory() noexcept {
  try {
    // Made before it is needed: at that point nothing can be allocated any more.
    static const base::Status status(GPUSHARE_HOST_OUT_OF_MEMORY, "the process is out of host memory");
    t_last_error = status;
  } catch (...) {
    t_last_error = base::Status();
  }
  return GPUSHARE_HOST_OUT_OF_MEMORY;
}

// Status and exceptions become a code and the thread's last error.
template <class F>
int32_t guard(F&& body) noexcept {
  try {
    return report(body());
  } catch (const std::bad_alloc&) {
    return report_out_of_memory();
  } catch (const std::exception& error) {
    try {
      return report({GPUSHARE_INTERNAL, std::string("unexpected exception: ") + error.what()});
    } catch (...) {
      return report_out_of_memory();
    }
  } catch (...) {
    return report_out_of_memory();
  }
}

base::Status give(const std::string& text, char** out) {
  auto* copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (copy == nullptr) throw std::bad_alloc();
  std::memcpy(copy, text.c_str(), text.size() + 1);
  *out = copy;
  return {};
}

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
    return give(cluster::schema(), out_schema);
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
    GPUSHARE_ASSIGN_OR_RETURN(const cluster::OrderedJson result,
                              cluster::plan(std::string_view(document, document_bytes), options));
    return give(result.dump(-1, ' ', false, cluster::OrderedJson::error_handler_t::replace), out_result);
  });
}

}  // extern "C"
