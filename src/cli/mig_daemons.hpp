// mig_daemons.hpp: the daemons of a machine whose GPUs are divided by MIG. CUDA shows a process one instance, so each instance
// has a daemon of its own, and all GPUs that are whole have one together.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "base/status.hpp"
#include "client/status.hpp"
#include "daemon/gpu_identity.hpp"

namespace gpushare::cli {

// One daemon: what it sees of the machine, and where it serves.
struct MigDaemon {
  std::string visible;  // for CUDA_VISIBLE_DEVICES
  std::string socket;
};
// The first at `socket`: that of the whole GPUs, or of the first instance. Further instances at names with the beginning of their
// uuids: daemon-mig-5c89852c.sock beside daemon.sock.
std::vector<MigDaemon> mig_daemons(const std::vector<daemon::GpuIdentity>& gpus, const std::string& socket);

// Starts them, as this program with the arguments `rest`, and waits for a signal to stop, or for `for_s` (0: for ever). One
// that ends because its device fails (exit codes 1 and 3) is started again after 1 s, then 2, up to an hour, and the others
// go on. If none goes on, or one ends in any other way, all are ended; one that has not ended 10 s after SIGTERM is killed.
// OK: told to stop. Errors: IO_ERROR, naming the daemon that ended.
base::Status run_mig_daemons(const std::vector<MigDaemon>& daemons, const std::vector<std::string>& rest,
                             double for_s);

// The status of all that answer, as of one daemon. Devices are named by their uuids, since each daemon has a cuda:0.
// Errors: those of the last daemon, where none answers.
base::Result<client::ServiceStatus> status_of_all(const std::vector<MigDaemon>& daemons);

}  // namespace gpushare::cli
