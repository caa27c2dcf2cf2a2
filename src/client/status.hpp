// status.hpp: what the daemon tells about itself: devices, processes and sessions, as text with one line each. A reader
// of another version finds the fields that it knows. A user is told of his own sessions; root and the daemon's user are
// told of all.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/figures.hpp"
#include "base/status.hpp"

namespace gpushare::client {

// Each kind of line names its fields for all who read or write them, in for_each_field: visit(name, member) for each.

struct DeviceStatus {
  std::string device;
  std::string policy;
  uint64_t capacity_bytes = 0;            // the target
  uint64_t effective_capacity_bytes = 0;  // the promised bytes, if they are above the target; else the target
  uint64_t promised_bytes = 0;
  uint64_t images_bytes = 0;   // of them, of images
  uint64_t context_bytes = 0;  // likewise, of contexts of processes, the daemon's too
  uint64_t lanes = 0;
  uint64_t resident = 0;  // sessions, of all users
  uint64_t waiting = 0;
  uint64_t turns = 0;                    // given
  uint64_t cut_off = 0;                  // turns that were taken back because they exceeded the lease
  uint64_t service_ns = 0;               // service of all sessions so far, also of those that have left
  uint64_t page_outs = 0, page_ins = 0;  // of sessions and groups, begun
  // Most sessions of each class that the coordinator lets run at once; 0: there is no coordinator.
  uint64_t max_guaranteed = 0, max_opportunistic = 0;
  // Known of a GPU from NVML; empty where NVML does not tell, and on the host. An instance of MIG has a parent and a
  // profile.
  std::string product, uuid, parent_uuid, mig_profile, driver_version;
  uint64_t total_bytes = 0;  // of the device or instance
  template <class Line, class Visit>
  static void for_each_field(Line& line, Visit&& visit) {
    visit("device", line.device);
    visit("policy", line.policy);
    visit("capacity_bytes", line.capacity_bytes);
    visit("effective_capacity_bytes", line.effective_capacity_bytes);
    visit("promised_bytes", line.promised_bytes);
    visit("images_bytes", line.images_bytes);
    visit("context_bytes", line.context_bytes);
    visit("lanes", line.lanes);
    visit("resident", line.resident);
    visit("waiting", line.waiting);
    visit("turns", line.turns);
    visit("cut_off", line.cut_off);
    visit("service_ns", line.service_ns);
    visit("page_outs", line.page_outs);
    visit("page_ins", line.page_ins);
    visit("max_guaranteed", line.max_guaranteed);
    visit("max_opportunistic", line.max_opportunistic);
    visit("product", line.product);
    visit("uuid", line.uuid);
    visit("parent_uuid", line.parent_uuid);
    visit("mig_profile", line.mig_profile);
    visit("driver_version", line.driver_version);
    visit("total_bytes", line.total_bytes);
  }
};
struct ProcessStatus {
  uint64_t pid = 0;
  uint64_t uid = 0;
  std::string program;
  std::string device;
  // "connected", or "owing": its connection is closed, and its bytes stay promised until it has ended.
  std::string state;
  uint64_t sessions = 0;
  uint64_t context_bytes = 0;  // the bytes of its context on the device, as the process has measured
  template <class Line, class Visit>
  static void for_each_field(Line& line, Visit&& visit) {
    visit("pid", line.pid);
    visit("uid", line.uid);
    visit("program", line.program);
    visit("device", line.device);
    visit("state", line.state);
    visit("sessions", line.sessions);
    visit("context_bytes", line.context_bytes);
  }
};
struct SessionStatus {
  uint64_t pid = 0;
  uint64_t session = 0;  // the number that the process gave it
  std::string name;
  std::string device;
  // "turn" (has it), "idle" (keeps it, nothing in flight), "ready" (waits for it), "resting" (has nothing to run),
  // "queued" (waits for memory), "paging", "paged_out", "overdue" (its turn was taken back, it has not answered).
  std::string state;
  std::string waits_for;  // why it does not run now; empty if nothing holds it back
  uint64_t lane = 0;      // of turns; UINT64_MAX = none
  uint64_t persistent_bytes = 0;
  uint64_t ephemeral_bytes = 0;
  uint64_t service_ns = 0;
  uint64_t iterations = 0;
  double weight = 1;
  double cap = 0;  // the most of the device's time that its group or process gets, of 1; 0 = no cap
  int64_t priority = 0;
  std::string cls;           // guaranteed, opportunistic: as it counts now
  uint64_t limit_bytes = 0;  // that the coordinator allows it; 0 = no such limit
  double share = 0;          // of all service on the device so far
  uint64_t group = 0;  // sessions with the same number share memory, weight and turns; 0 = it is in no group
  // The preloaded programs of its group hold these together, on the line of the group's first session; else 0.
  uint64_t held_bytes = 0;     // on the device
  uint64_t spilled_bytes = 0;  // blocks in host memory
  uint64_t pinned_bytes = 0;   // pinned host memory, spilled blocks included
  // The daemon owes the group these, on the same line: of its limit, the bytes lent to other sessions of the group, and those that the
  // programs use from the host since a page-out that ended in part. They come back when bytes are free.
  uint64_t owed_bytes = 0;
  // Iterations by device time and by slowdown, in the buckets of base/figures.hpp, and the sums; empty where the process reports none.
  std::vector<uint64_t> iteration_times, iteration_slowdowns;
  uint64_t iteration_time_ns = 0;
  double slowdown_sum = 0;
  // The counts of the request queue whose first model the session serves; see base/figures.hpp.
  base::RequestCounts requests;
  // What holds these programs to their limit: "shim", or "shim+kernel" where the driver has said that its own limit is set.
  std::string held_by;
  template <class Line, class Visit>
  static void for_each_field(Line& line, Visit&& visit) {
    visit("pid", line.pid);
    visit("session", line.session);
    visit("name", line.name);
    visit("device", line.device);
    visit("state", line.state);
    visit("waits_for", line.waits_for);
    visit("lane", line.lane);
    visit("persistent_bytes", line.persistent_bytes);
    visit("ephemeral_bytes", line.ephemeral_bytes);
    visit("service_ns", line.service_ns);
    visit("iterations", line.iterations);
    visit("weight", line.weight);
    visit("cap", line.cap);
    visit("priority", line.priority);
    visit("class", line.cls);
    visit("limit_bytes", line.limit_bytes);
    visit("share", line.share);
    visit("group", line.group);
    visit("held_bytes", line.held_bytes);
    visit("spilled_bytes", line.spilled_bytes);
    visit("pinned_bytes", line.pinned_bytes);
    visit("owed_bytes", line.owed_bytes);
    visit("iteration_times", line.iteration_times);
    visit("iteration_time_ns", line.iteration_time_ns);
    visit("iteration_slowdowns", line.iteration_slowdowns);
    visit("slowdown_sum", line.slowdown_sum);
    visit("requests_offered", line.requests.offered);
    visit("requests_in_time", line.requests.in_time);
    visit("requests_late", line.requests.late);
    visit("requests_failed", line.requests.failed);
    visit("requests_refused", line.requests.refused);
    visit("requests_dropped", line.requests.dropped);
    visit("requests_cancelled", line.requests.cancelled);
    visit("requests_pending", line.requests.pending);
    visit("predicted_miss_rate", line.requests.predicted_miss_rate);
    visit("price_per_s", line.requests.price_per_s);
    visit("held_by", line.held_by);
  }
};
// An image that sessions have open.
struct ImageStatus {
  std::string path;
  std::string device;
  std::string state;        // "off", "loading", "resident", "failed"
  uint64_t bytes = 0;       // of device memory, when it is there
  uint64_t kept_bytes = 0;  // of its first layers, while it is off
  uint64_t layers = 0;
  uint64_t arrived = 0;  // layers that are on the device
  uint64_t loads = 0;
  uint64_t sessions = 0;
  template <class Line, class Visit>
  static void for_each_field(Line& line, Visit&& visit) {
    visit("path", line.path);
    visit("device", line.device);
    visit("state", line.state);
    visit("bytes", line.bytes);
    visit("kept_bytes", line.kept_bytes);
    visit("layers", line.layers);
    visit("arrived", line.arrived);
    visit("loads", line.loads);
    visit("sessions", line.sessions);
  }
};
// Requests that the daemon has refused with one status, since it began.
struct RefusalStatus {
  std::string cause;  // the status's name
  uint64_t count = 0;
  template <class Line, class Visit>
  static void for_each_field(Line& line, Visit&& visit) {
    visit("cause", line.cause);
    visit("count", line.count);
  }
};
struct ServiceStatus {
  uint64_t pid = 0;
  uint64_t uptime_ns = 0;
  uint64_t lost_processes = 0;  // that ended with sessions open
  std::vector<DeviceStatus> devices;
  std::vector<ProcessStatus> processes;
  std::vector<SessionStatus> sessions;
  std::vector<ImageStatus> images;
  std::vector<RefusalStatus> refusals;
  template <class Line, class Visit>
  static void for_each_field(Line& line, Visit&& visit) {
    visit("pid", line.pid);
    visit("uptime_ns", line.uptime_ns);
    visit("lost_processes", line.lost_processes);
  }
};

std::string encode_status(const ServiceStatus& status);
// Errors: MALFORMED_INPUT, naming the line.
base::Result<ServiceStatus> parse_service_status(std::string_view text);
// Asks the daemon at `socket`. Errors: UNAVAILABLE, MALFORMED_INPUT, TIMED_OUT.
base::Result<ServiceStatus> query_service(const std::string& socket);
// Sets the capacity that the daemon may promise of `device` (empty: its first); 0: the capacity that it began with.
// Only for the daemon's own user and root. Errors: UNAVAILABLE, EXCEEDS_CAPACITY, NOT_FOUND (device), TIMED_OUT.
base::Status set_service_capacity(const std::string& socket, const std::string& device, uint64_t bytes);

}  // namespace gpushare::client
