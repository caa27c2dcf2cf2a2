// SPDX-License-Identifier: Apache-2.0
#include "cli/trace_merge.hpp"

#include <unistd.h>

#include <nlohmann/json.hpp>

#include "cli/output.hpp"
#include "sim/csv.hpp"

namespace gpushare::cli {

RemoveFiles::~RemoveFiles() {
  for (const std::string& path : paths_) (void)::unlink(path.c_str());
}

base::Status merge_traces(const std::vector<std::string>& traces, const std::vector<std::string>& names,
                          const std::string& path) {
  std::string out = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
  bool first = true;
  int64_t groups = 0;  // so far
  for (size_t i = 0; i < traces.size(); ++i) {
    GPUSHARE_ASSIGN_OR_RETURN(const std::string text, sim::read_text(traces[i], UINT64_MAX));
    nlohmann::json trace = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    nlohmann::json* events =
        trace.is_object() && trace.contains("traceEvents") ? &trace["traceEvents"] : &trace;
    if (!events->is_array())
      return {GPUSHARE_MALFORMED_INPUT, base::format("'%s': no list of trace events", traces[i].c_str())};
    int64_t most = groups;
    for (nlohmann::json& event : *events) {
      if (!event.is_object()) continue;
      if (const auto group = event.find("pid"); group != event.end() && group->is_number_integer()) {
        *group = group->get<int64_t>() + groups;
        most = std::max(most, group->get<int64_t>());
      }
      if (event.value("name", "") == "process_name" && event.contains("args") &&
          event["args"].contains("name") && event["args"]["name"].is_string())
        event["args"]["name"] = names[i] + ": " + event["args"]["name"].get<std::string>();
      if (event.value("name", "") == "process_sort_index" && event.contains("args") &&
          event["args"].contains("sort_index") && event["args"]["sort_index"].is_number_integer())
        event["args"]["sort_index"] = event["args"]["sort_index"].get<int64_t>() + groups;
      out += first ? "" : ",\n";
      out += event.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
      first = false;
    }
    groups = most + 1;
  }
  return write_file(path, out + "\n]}\n");
}

}  // namespace gpushare::cli
