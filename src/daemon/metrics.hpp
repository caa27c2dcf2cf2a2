// metrics.hpp: the daemon's status as figures for Prometheus. Names and labels are listed in docs/metrics.md.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "client/status.hpp"

namespace gpushare::daemon {

// The figures of one status, in Prometheus' text format. Reads /proc for the containers of processes.
std::string metrics_text(const client::ServiceStatus& status);

// The first 12 digits of the number of the process's container, from its cgroup; empty outside of containers, and when the process has ended.
std::string container_of(uint64_t pid);
// The same from a given text: `cgroup` is the content of /proc/PID/cgroup.
std::string container_in(const std::string& cgroup);

}  // namespace gpushare::daemon
