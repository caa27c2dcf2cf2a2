// A runtime's figures as text for Prometheus. Names are those of the daemon's figures (docs/metrics.md), so one dashboard shows both.
// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/figures_text.hpp"
#include "c_api/abi.hpp"
#include "c_api/guard.hpp"
#include "c_api/request_queue.hpp"
#include "c_api/tags.hpp"
#include "executor/runtime.hpp"
#include "gpushare/gpushare.h"

using namespace gpushare;

namespace {

using base::MetricsText;

struct Line {
  MetricsText::Labels labels;
  executor::SessionInfo info;
};

double number(uint64_t value) {
  return static_cast<double>(value);
}
double seconds(uint64_t ns) {
  return static_cast<double>(ns) / 1e9;
}

void write_runtime(MetricsText& out, const executor::RuntimeInfo& info) {
  const MetricsText::Labels labels = {{"device", info.device}, {"policy", info.policy}};
  const auto gauge = [&](const char* name, const char* help, uint64_t value) {
    out.gauge(name, help);
    out.sample(labels, number(value));
  };
  const auto counter = [&](const char* name, const char* help, double value) {
    out.counter(name, help);
    out.sample(labels, value);
  };
  gauge("gpushare_device_capacity_bytes", "Memory that the runtime may promise.", info.capacity_bytes);
  gauge("gpushare_device_effective_capacity_bytes",
        "The limit in force: above the capacity while promises fall to it.", info.effective_capacity_bytes);
  gauge("gpushare_device_promised_bytes", "Memory promised to sessions.", info.promised_bytes);
  gauge("gpushare_device_lanes", "Lanes that are open.", info.lanes);
  gauge("gpushare_device_resident_sessions", "Sessions that are admitted and on the device.",
        info.sessions_resident);
  gauge("gpushare_device_waiting_sessions", "Sessions that wait for memory.",
        uint64_t{info.sessions_queued} + info.sessions_paged_out);
  gauge("gpushare_runtime_persistent_bytes", "Live blocks of sessions.", info.persistent_bytes);
  gauge("gpushare_runtime_ephemeral_bytes", "Live blocks of iterations.", info.ephemeral_bytes);
  gauge("gpushare_runtime_peak_bytes", "Most bytes that were ever live at once.", info.peak_bytes);
  counter("gpushare_device_busy_seconds_total", "Device time of iterations, over all lanes.",
          seconds(info.device_busy_ns));
  counter("gpushare_runtime_iterations_total", "Iterations that the device has finished.",
          number(info.iterations_done));
  counter("gpushare_runtime_switches_total", "Iterations of another session than the lane's last one.",
          number(info.switches));
  counter("gpushare_runtime_paged_out_bytes_total", "Bytes moved to host memory.",
          number(info.paged_out_bytes_total));
  counter("gpushare_runtime_paged_in_bytes_total", "Bytes moved back to the device.",
          number(info.paged_in_bytes_total));
  counter("gpushare_runtime_paging_seconds_total", "Device time of these moves.", seconds(info.paging_ns));
}

void write_sessions(MetricsText& out, const std::vector<Line>& lines) {
  const auto gauge = [&](const char* name, const char* help, uint64_t executor::SessionInfo::*field) {
    out.gauge(name, help);
    for (const Line& line : lines) out.sample(line.labels, number(line.info.*field));
  };
  const auto time = [&](const char* name, const char* help, uint64_t executor::SessionInfo::*field) {
    out.counter(name, help);
    for (const Line& line : lines) out.sample(line.labels, seconds(line.info.*field));
  };
  using Info = executor::SessionInfo;
  gauge("gpushare_session_persistent_bytes", "Memory promised to the session for good (P).",
        &Info::promised_persistent_bytes);
  gauge("gpushare_session_ephemeral_bytes", "Memory promised for the session's iterations (E).",
        &Info::promised_ephemeral_bytes);
  gauge("gpushare_session_live_bytes", "Live persistent blocks on the device.", &Info::persistent_bytes);
  gauge("gpushare_session_spilled_bytes", "Live blocks in host memory.", &Info::spilled_bytes);
  gauge("gpushare_session_queued_iterations", "Submitted iterations that have not begun.",
        &Info::iterations_queued);
  time("gpushare_session_busy_seconds_total", "Device time that the session has used.", &Info::service_ns);
  time("gpushare_session_waited_for_turn_seconds_total", "Time that iterations waited for their turn.",
       &Info::waited_ns);
  time("gpushare_session_waited_for_admission_seconds_total", "Time waited for admission.", &Info::queued_ns);
  out.counter("gpushare_session_iterations_total", "Iterations that the device has finished.");
  for (const Line& line : lines) out.sample(line.labels, number(line.info.iterations_done));
  std::vector<std::pair<MetricsText::Labels, base::IterationCounts>> iterations;
  for (const Line& line : lines) iterations.emplace_back(line.labels, line.info.histogram);
  base::write_iterations(out, iterations);
}

void write_queues(MetricsText& out, const executor::Runtime& runtime, const std::string& device) {
  std::vector<std::pair<MetricsText::Labels, base::RequestCounts>> requests;
  capi::table_of<gpushare_request_queue>().each([&](capi::RequestQueueObject& queue) {
    if (queue.runtime.get() == &runtime)
      requests.push_back({{{"device", device},
                           {"queue", std::to_string(queue.number)},
                           {"policy", std::string(queue.server->policy())}},
                          queue.server->stats().counts()});
  });
  base::write_requests(out, requests);
}

base::Result<std::string> metrics_of(executor::Runtime& runtime) {
  GPUSHARE_ASSIGN_OR_RETURN(const executor::RuntimeInfo info, runtime.info());
  std::vector<Line> lines;
  capi::table_of<gpushare_session>().each([&](executor::Session& session) {
    if (!session.belongs_to(runtime) || session.closed()) return;
    const executor::SessionInfo of = session.info();
    lines.push_back(
        {{{"device", info.device},
          {"name", session.name()},
          {"session", std::to_string(of.session_id)},
          {"class", of.cls == sched::SessionClass::kOpportunistic ? "opportunistic" : "guaranteed"}},
         of});
  });
  MetricsText out;
  write_runtime(out, info);
  write_sessions(out, lines);
  write_queues(out, runtime, info.device);
  return out.text();
}

}  // namespace

extern "C" int32_t gpushare_runtime_write_metrics(gpushare_runtime runtime, char* text, uint64_t capacity,
                                                  uint64_t* out_size) {
  return capi::with(runtime, [&](executor::Runtime& of) -> base::Status {
    if (out_size == nullptr) return capi::null_argument("out_size");
    if (text == nullptr && capacity != 0) return capi::null_argument("text");
    GPUSHARE_ASSIGN_OR_RETURN(const std::string written, metrics_of(of));
    *out_size = written.size() + 1;
    if (capacity < *out_size)
      return {GPUSHARE_INVALID_ARGUMENT,
              base::format("capacity is %llu, the text takes %llu", static_cast<unsigned long long>(capacity),
                           static_cast<unsigned long long>(*out_size))};
    std::memcpy(text, written.c_str(), *out_size);
    return {};
  });
}
