// cluster_host_run.hpp: training jobs under a cluster scheduler on real devices of this process: a runtime of the
// public API for each host device. Jobs are placed, resized, paused and moved by sessions.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "sim/cluster_simulation.hpp"

namespace gpushare::cli {

struct ClusterHostOptions {
  std::function<bool(double now_s, size_t finished, size_t jobs)> progress;  // now and then; false cancels
  bool want_spans = false;
  bool tell_demands =
      true;  // false: the scheduler is told the demand that is assumed of jobs that state none
};

// Devices are runtimes on the device `host`, with a lane each: one iteration runs on a device at a time, and sessions
// take turns by weight. They share this machine's cores and caches. Memory beyond 256 MiB a device is divided by one
// factor for devices and jobs.
//
// A job is a session on each of its devices. An iteration takes its ephemeral memory, writes every page and does
// arithmetic for its demand's part of the iteration's time (divided by the device's speed), then waits on the host for
// the rest. The parts of a gang end an iteration together. A pause copies the persistent memory to host memory and
// closes the sessions; going on, there or on other devices, copies it back. A job that divides its work does each device's
// part of an iteration there, and its devices hand their persistent memory around through host memory after it. Every page of persistent memory is marked
// and checked. An opportunistic job's sessions have 1/16 of the weight of others.
//
// The scheduler is told a job's slowdown when it has ended five iterations since its neighbours or its batch size last changed.
// Blocks until all jobs have ended. Errors: INVALID_ARGUMENT (more than 64 devices or 4096 jobs), INTERNAL (an action
// that cannot be taken; a job whose memory another job wrote), CANCELLED, and those of the runtime.
base::Result<sim::ClusterResult> run_cluster_on_host(const std::vector<cluster::JobInfo>& jobs,
                                                     const std::vector<cluster::Device>& devices,
                                                     cluster::Scheduler& scheduler,
                                                     const ClusterHostOptions& options,
                                                     std::vector<std::string>& notes);

}  // namespace gpushare::cli
