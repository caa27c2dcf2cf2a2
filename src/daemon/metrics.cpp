// SPDX-License-Identifier: Apache-2.0
#include "daemon/metrics.hpp"

#include <algorithm>
#include <cctype>
#include <fstream>
#include <iterator>
#include <map>

#include "base/figures_text.hpp"
#include "gpushare/version.h"

namespace gpushare::daemon {
namespace {

using base::MetricsText;
using client::DeviceStatus;
using client::SessionStatus;

constexpr size_t kContainerDigits = 64, kShownDigits = 12;

// A family whose samples are one field of each line.
struct DeviceFigure {
  const char* name;
  const char* help;
  bool counts;
  double (*of)(const DeviceStatus&);
};
double figure_s(uint64_t ns) {
  return static_cast<double>(ns) / 1e9;
}
double figure(uint64_t value) {
  return static_cast<double>(value);
}
constexpr DeviceFigure kDeviceFigures[] = {
    {"gpushare_device_capacity_bytes", "Memory that the daemon may promise.", false,
     [](const DeviceStatus& d) { return figure(d.capacity_bytes); }},
    {"gpushare_device_effective_capacity_bytes",
     "The limit in force: above the capacity while promises fall to it.", false,
     [](const DeviceStatus& d) { return figure(d.effective_capacity_bytes); }},
    {"gpushare_device_promised_bytes", "Memory promised to sessions, images and contexts.", false,
     [](const DeviceStatus& d) { return figure(d.promised_bytes); }},
    {"gpushare_device_images_bytes", "Of the promised memory, that of shared images of models.", false,
     [](const DeviceStatus& d) { return figure(d.images_bytes); }},
    {"gpushare_device_context_bytes", "Of the promised memory, that of contexts of processes.", false,
     [](const DeviceStatus& d) { return figure(d.context_bytes); }},
    {"gpushare_device_lanes", "Lanes that are open.", false,
     [](const DeviceStatus& d) { return figure(d.lanes); }},
    {"gpushare_device_resident_sessions", "Sessions that are admitted.", false,
     [](const DeviceStatus& d) { return figure(d.resident); }},
    {"gpushare_device_waiting_sessions", "Sessions that wait for memory.", false,
     [](const DeviceStatus& d) { return figure(d.waiting); }},
    {"gpushare_device_turns_total", "Turns given.", true,
     [](const DeviceStatus& d) { return figure(d.turns); }},
    {"gpushare_device_turns_taken_back_total", "Turns taken back after the lease.", true,
     [](const DeviceStatus& d) { return figure(d.cut_off); }},
    {"gpushare_device_busy_seconds_total",
     "Device time used by sessions, also by those that have left. Its rate is the busy share of one lane.",
     true, [](const DeviceStatus& d) { return figure_s(d.service_ns); }},
    {"gpushare_device_page_outs_total", "Page-outs of sessions and groups, begun.", true,
     [](const DeviceStatus& d) { return figure(d.page_outs); }},
    {"gpushare_device_page_ins_total", "Page-ins of sessions and groups, begun.", true,
     [](const DeviceStatus& d) { return figure(d.page_ins); }},
};

// Which sessions have a sample of the family though its value is 0.
enum class Zero {
  kShown,            // all
  kAbsent,           // none: 0 says that the session has no such thing
  kOfGroupsThatHold  // those whose line has what the group's preloaded programs hold: a graph shows 0 and no gap
};
struct SessionFigure {
  const char* name;
  const char* help;
  bool counts;
  Zero zero;
  double (*of)(const SessionStatus&);
};
bool has_sample(const SessionFigure& figure, const SessionStatus& session) {
  return figure.zero == Zero::kShown || figure.of(session) != 0 ||
         (figure.zero == Zero::kOfGroupsThatHold && !session.held_by.empty());
}
constexpr SessionFigure kSessionFigures[] = {
    {"gpushare_session_persistent_bytes", "Memory promised to the session, or to its group, for good (P).",
     false, Zero::kShown, [](const SessionStatus& s) { return figure(s.persistent_bytes); }},
    {"gpushare_session_ephemeral_bytes",
     "Memory promised for the iterations of the session, or of its group (E).", false, Zero::kShown,
     [](const SessionStatus& s) { return figure(s.ephemeral_bytes); }},
    {"gpushare_session_paged_out_bytes", "P of the session while it is paged out, else 0.", false,
     Zero::kShown,
     [](const SessionStatus& s) { return s.state == "paged_out" ? figure(s.persistent_bytes) : 0; }},
    {"gpushare_session_limit_bytes", "Memory that the coordinator allows the session.", false, Zero::kAbsent,
     [](const SessionStatus& s) { return figure(s.limit_bytes); }},
    {"gpushare_session_weight", "The session's weight as it counts now.", false, Zero::kShown,
     [](const SessionStatus& s) { return s.weight; }},
    {"gpushare_session_cap_ratio", "The most of the device's time that the session's group or process gets.",
     false, Zero::kAbsent, [](const SessionStatus& s) { return s.cap; }},
    {"gpushare_session_busy_seconds_total", "Device time that the session has used.", true, Zero::kShown,
     [](const SessionStatus& s) { return figure_s(s.service_ns); }},
    {"gpushare_session_iterations_total", "Iterations that the session has run.", true, Zero::kShown,
     [](const SessionStatus& s) { return figure(s.iterations); }},
    {"gpushare_group_held_bytes", "Device memory that the preloaded programs of the group hold.", false,
     Zero::kOfGroupsThatHold, [](const SessionStatus& s) { return figure(s.held_bytes); }},
    {"gpushare_group_spilled_bytes", "Blocks of the group's preloaded programs that lie in host memory.",
     false, Zero::kOfGroupsThatHold, [](const SessionStatus& s) { return figure(s.spilled_bytes); }},
    {"gpushare_group_pinned_bytes",
     "Pinned host memory of the group's preloaded programs, spilled blocks included.", false,
     Zero::kOfGroupsThatHold, [](const SessionStatus& s) { return figure(s.pinned_bytes); }},
    {"gpushare_group_owed_bytes",
     "Bytes that the daemon owes the group: lent to others of the group, or used from the host.", false,
     Zero::kOfGroupsThatHold, [](const SessionStatus& s) { return figure(s.owed_bytes); }},
};

void write_daemon(MetricsText& out, const client::ServiceStatus& status) {
  out.gauge("gpushare_build_info", "1, with the daemon's version.");
  out.sample({{"version", GPUSHARE_VERSION_STRING}}, 1);
  out.gauge("gpushare_daemon_uptime_seconds", "Since the daemon began.");
  out.sample({}, figure_s(status.uptime_ns));
  out.counter("gpushare_lost_processes_total", "Processes that ended with sessions open.");
  out.sample({}, figure(status.lost_processes));
  out.counter("gpushare_refusals_total", "Requests that the daemon refused, by the status that it answered.");
  for (const client::RefusalStatus& refusal : status.refusals)
    out.sample({{"cause", refusal.cause}}, figure(refusal.count));
}

void write_devices(MetricsText& out, const client::ServiceStatus& status) {
  for (const DeviceFigure& figure : kDeviceFigures) {
    figure.counts ? out.counter(figure.name, figure.help) : out.gauge(figure.name, figure.help);
    for (const DeviceStatus& device : status.devices)
      out.sample({{"device", device.device}, {"policy", device.policy}}, figure.of(device));
  }
  // Each state has a sample, so that a graph shows 0 and no gap.
  constexpr const char* kStates[] = {"turn",   "idle",   "ready",     "resting",
                                     "queued", "paging", "paged_out", "overdue"};
  std::map<std::pair<std::string, std::string>, uint64_t> counts;
  for (const SessionStatus& session : status.sessions) ++counts[{session.device, session.state}];
  out.gauge("gpushare_device_sessions",
            "Sessions by what they do: ready waits for a turn, queued and paged_out for memory.");
  for (const DeviceStatus& device : status.devices)
    for (const char* state : kStates)
      out.sample({{"device", device.device}, {"state", state}}, figure(counts[{device.device, state}]));
}

// Figures that the processes of the sessions report in their leases.
void write_figures(MetricsText& out, const std::vector<SessionStatus>& sessions,
                   const std::vector<MetricsText::Labels>& labels) {
  std::vector<std::pair<MetricsText::Labels, base::IterationCounts>> iterations;
  std::vector<std::pair<MetricsText::Labels, base::RequestCounts>> requests;
  for (size_t i = 0; i < sessions.size(); ++i) {
    const SessionStatus& session = sessions[i];
    if (session.requests.offered > 0) requests.emplace_back(labels[i], session.requests);
    base::IterationCounts counts;
    if (session.iteration_times.size() != base::kIterationBuckets ||
        session.iteration_slowdowns.size() != base::kSlowdownBuckets)
      continue;  // none, or of a daemon with other buckets
    std::copy(session.iteration_times.begin(), session.iteration_times.end(), counts.times);
    std::copy(session.iteration_slowdowns.begin(), session.iteration_slowdowns.end(), counts.slowdowns);
    counts.time_ns = session.iteration_time_ns;
    counts.slowdown_milli = static_cast<uint64_t>(std::clamp(session.slowdown_sum, 0.0, 1e15) * 1000);
    iterations.emplace_back(labels[i], counts);
  }
  base::write_iterations(out, iterations);
  base::write_requests(out, requests);
}

void write_sessions(MetricsText& out, const client::ServiceStatus& status) {
  using Process = std::pair<uint64_t, std::string>;
  std::map<Process, std::pair<std::string, std::string>> owners;  // user and container
  for (const client::ProcessStatus& process : status.processes)
    owners[{process.pid, process.device}] = {std::to_string(process.uid), container_of(process.pid)};
  std::vector<MetricsText::Labels> labels;
  for (const SessionStatus& session : status.sessions) {
    const auto& [user, container] = owners[{session.pid, session.device}];
    labels.push_back(
        {{"device", session.device},
         {"name", session.name},
         {"pid", std::to_string(session.pid)},
         {"session", std::to_string(session.session)},
         {"group",
          session.group == 0 ? "" : base::format("%016llx", static_cast<unsigned long long>(session.group))},
         {"user", user},
         {"container", container},
         {"class", session.cls}});
  }
  for (const SessionFigure& figure : kSessionFigures) {
    figure.counts ? out.counter(figure.name, figure.help) : out.gauge(figure.name, figure.help);
    for (size_t i = 0; i < status.sessions.size(); ++i)
      if (has_sample(figure, status.sessions[i])) out.sample(labels[i], figure.of(status.sessions[i]));
  }
  write_figures(out, status.sessions, labels);
  out.gauge("gpushare_process_context_bytes", "Device memory of the process's contexts.");
  for (const client::ProcessStatus& process : status.processes)
    out.sample({{"device", process.device},
                {"pid", std::to_string(process.pid)},
                {"program", process.program},
                {"user", std::to_string(process.uid)},
                {"state", process.state}},
               figure(process.context_bytes));
}

}  // namespace

std::string container_in(const std::string& cgroup) {
  size_t digits = 0;
  for (size_t i = cgroup.size(); i-- > 0;) {
    digits = std::isxdigit(static_cast<unsigned char>(cgroup[i])) != 0 ? digits + 1 : 0;
    const bool begins = i == 0 || std::isxdigit(static_cast<unsigned char>(cgroup[i - 1])) == 0;
    if (digits == kContainerDigits && begins) return cgroup.substr(i, kShownDigits);
  }
  return {};
}

std::string container_of(uint64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/cgroup");
  return container_in({std::istreambuf_iterator<char>(file), {}});
}

std::string metrics_text(const client::ServiceStatus& status) {
  MetricsText out;
  write_daemon(out, status);
  write_devices(out, status);
  write_sessions(out, status);
  return out.text();
}

}  // namespace gpushare::daemon
