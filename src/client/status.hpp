// status.hpp: what the daemon tells about itself: devices, processes and sessions, as text of one line each, so that a
// reader of another version finds the fields that it knows. A user is told of his own sessions, root of all.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "base/status.hpp"

namespace gpushare::client {

// Each kind of line has a table of its fields, for all who read or write them: visit(name, member) for each.
template <class Line, class Visit>
void for_each_field(Line& line, Visit&& visit) {
  std::apply([&](const auto&... field) { (visit(field.first, line.*field.second), ...); }, Line::kFields);
}

struct DeviceStatus {
  std::string device;
  std::string policy;
  uint64_t capacity_bytes = 0;            // the target
  uint64_t effective_capacity_bytes = 0;  // what is promised above it still, else the target
  uint64_t promised_bytes = 0;
  uint64_t images_bytes = 0;   // of them, of images
  uint64_t context_bytes = 0;  // likewise, of contexts of processes, the daemon's too
  uint64_t lanes = 0;
  uint64_t resident = 0;  // sessions, of all users
  uint64_t waiting = 0;
  uint64_t turns = 0;    // given
  uint64_t cut_off = 0;  // turns taken back after the lease
  // Most sessions of each class that the coordinator lets run at once; 0: there is no coordinator.
  uint64_t max_guaranteed = 0, max_opportunistic = 0;
  static constexpr std::tuple kFields{
      std::pair{"device", &DeviceStatus::device},
      std::pair{"policy", &DeviceStatus::policy},
      std::pair{"capacity_bytes", &DeviceStatus::capacity_bytes},
      std::pair{"effective_capacity_bytes", &DeviceStatus::effective_capacity_bytes},
      std::pair{"promised_bytes", &DeviceStatus::promised_bytes},
      std::pair{"images_bytes", &DeviceStatus::images_bytes},
      std::pair{"context_bytes", &DeviceStatus::context_bytes},
      std::pair{"lanes", &DeviceStatus::lanes},
      std::pair{"resident", &DeviceStatus::resident},
      std::pair{"waiting", &DeviceStatus::waiting},
      std::pair{"turns", &DeviceStatus::turns},
      std::pair{"cut_off", &DeviceStatus::cut_off},
      std::pair{"max_guaranteed", &DeviceStatus::max_guaranteed},
      std::pair{"max_opportunistic", &DeviceStatus::max_opportunistic}};
};
struct ProcessStatus {
  uint64_t pid = 0;
  uint64_t uid = 0;
  std::string program;
  std::string device;
  // "connected", or "owing": its connection is closed, and its bytes stay promised until it has ended.
  std::string state;
  uint64_t sessions = 0;
  uint64_t context_bytes = 0;  // of the device, as the process has measured
  static constexpr std::tuple kFields{std::pair{"pid", &ProcessStatus::pid},
                                      std::pair{"uid", &ProcessStatus::uid},
                                      std::pair{"program", &ProcessStatus::program},
                                      std::pair{"device", &ProcessStatus::device},
                                      std::pair{"state", &ProcessStatus::state},
                                      std::pair{"sessions", &ProcessStatus::sessions},
                                      std::pair{"context_bytes", &ProcessStatus::context_bytes}};
};
struct SessionStatus {
  uint64_t pid = 0;
  uint64_t session = 0;  // the process's number of it
  std::string name;
  std::string device;
  // "turn" (has it), "idle" (keeps it, nothing in flight), "ready" (waits for it), "resting" (has nothing to run),
  // "queued" (waits for memory), "paging", "paged_out", "overdue" (its turn was taken back, it has not answered).
  std::string state;
  std::string waits_for;  // why it does not run now; empty if nothing keeps it
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
  uint64_t group = 0;  // sessions with the same number have memory, weight and turns together; 0 = by itself
  static constexpr std::tuple kFields{std::pair{"pid", &SessionStatus::pid},
                                      std::pair{"session", &SessionStatus::session},
                                      std::pair{"name", &SessionStatus::name},
                                      std::pair{"device", &SessionStatus::device},
                                      std::pair{"state", &SessionStatus::state},
                                      std::pair{"waits_for", &SessionStatus::waits_for},
                                      std::pair{"lane", &SessionStatus::lane},
                                      std::pair{"persistent_bytes", &SessionStatus::persistent_bytes},
                                      std::pair{"ephemeral_bytes", &SessionStatus::ephemeral_bytes},
                                      std::pair{"service_ns", &SessionStatus::service_ns},
                                      std::pair{"iterations", &SessionStatus::iterations},
                                      std::pair{"weight", &SessionStatus::weight},
                                      std::pair{"cap", &SessionStatus::cap},
                                      std::pair{"priority", &SessionStatus::priority},
                                      std::pair{"class", &SessionStatus::cls},
                                      std::pair{"limit_bytes", &SessionStatus::limit_bytes},
                                      std::pair{"share", &SessionStatus::share},
                                      std::pair{"group", &SessionStatus::group}};
};
// An image that sessions have open.
struct ImageStatus {
  std::string path;
  std::string device;
  std::string state;        // "off", "loading", "resident", "failed"
  uint64_t bytes = 0;       // of device memory, when it is there
  uint64_t kept_bytes = 0;  // of its first layers, while it is off
  uint64_t layers = 0;
  uint64_t arrived = 0;  // of them, on the device
  uint64_t loads = 0;
  uint64_t sessions = 0;
  static constexpr std::tuple kFields{std::pair{"path", &ImageStatus::path},
                                      std::pair{"device", &ImageStatus::device},
                                      std::pair{"state", &ImageStatus::state},
                                      std::pair{"bytes", &ImageStatus::bytes},
                                      std::pair{"kept_bytes", &ImageStatus::kept_bytes},
                                      std::pair{"layers", &ImageStatus::layers},
                                      std::pair{"arrived", &ImageStatus::arrived},
                                      std::pair{"loads", &ImageStatus::loads},
                                      std::pair{"sessions", &ImageStatus::sessions}};
};
struct ServiceStatus {
  uint64_t pid = 0;
  uint64_t uptime_ns = 0;
  std::vector<DeviceStatus> devices;
  std::vector<ProcessStatus> processes;
  std::vector<SessionStatus> sessions;
  std::vector<ImageStatus> images;
  static constexpr std::tuple kFields{std::pair{"pid", &ServiceStatus::pid},
                                      std::pair{"uptime_ns", &ServiceStatus::uptime_ns}};
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
