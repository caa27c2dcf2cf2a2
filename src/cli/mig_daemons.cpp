// SPDX-License-Identifier: Apache-2.0
#include "cli/mig_daemons.hpp"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <iterator>
#include <map>
#include <thread>

#include "base/log.hpp"
#include "cli/stop_signals.hpp"

namespace gpushare::cli {
namespace {

// Everything is made before the fork: the child only calls execve.
struct Program {
  std::vector<std::string> arguments, environment;
};

Program program_of(const MigDaemon& daemon, const std::vector<std::string>& rest) {
  Program out{{"gpushare", "daemon", "--device", "all", "--socket", daemon.socket},
              {"CUDA_VISIBLE_DEVICES=" + daemon.visible}};
  out.arguments.insert(out.arguments.end(), rest.begin(), rest.end());
  for (char** each = environ; *each != nullptr; ++each)
    if (std::strncmp(*each, "CUDA_VISIBLE_DEVICES=", 21) != 0) out.environment.emplace_back(*each);
  return out;
}

base::Result<pid_t> start(const Program& program) {
  const auto pointers = [](const std::vector<std::string>& of) {
    std::vector<char*> out;
    for (const std::string& each : of) out.push_back(const_cast<char*>(each.c_str()));
    out.push_back(nullptr);
    return out;
  };
  const std::vector<char*> arguments = pointers(program.arguments),
                           environment = pointers(program.environment);
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child < 0) return base::Status(GPUSHARE_IO_ERROR, std::string("fork: ") + std::strerror(errno), errno);
  if (child != 0) return child;
  prctl(PR_SET_PDEATHSIG, SIGTERM);  // also when this process is killed
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  if (getppid() == parent) execve("/proc/self/exe", arguments.data(), environment.data());
  _exit(127);
}

// A daemon that is stopped, or hangs in the driver, does not hear SIGTERM.
void end_all(std::map<pid_t, const MigDaemon*> daemons) {
  for (const int with : {SIGTERM, SIGKILL}) {
    for (const auto& [child, daemon] : daemons) {
      if (with == SIGKILL)
        base::log(base::kWarning, "the daemon at " + daemon->socket + " does not end, and is killed");
      kill(child, with);
    }
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    for (;;) {
      std::erase_if(daemons, [](const auto& each) { return waitpid(each.first, nullptr, WNOHANG) != 0; });
      if (daemons.empty()) return;
      if (std::chrono::steady_clock::now() > until) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
}

}  // namespace

std::vector<MigDaemon> mig_daemons(const std::vector<daemon::GpuIdentity>& gpus, const std::string& socket) {
  std::vector<MigDaemon> out;
  std::string whole;
  for (const daemon::GpuIdentity& gpu : gpus)
    if (gpu.parent_uuid.empty()) whole += (whole.empty() ? "" : ",") + gpu.uuid;
  if (!whole.empty()) out.push_back({whole, socket});
  const std::string suffix = socket.ends_with(".sock") ? ".sock" : "";
  const std::string stem = socket.substr(0, socket.size() - suffix.size());
  for (const daemon::GpuIdentity& gpu : gpus) {
    if (gpu.parent_uuid.empty()) continue;
    const std::string uuid = gpu.uuid.starts_with("MIG-") ? gpu.uuid.substr(4) : gpu.uuid;
    out.push_back({gpu.uuid, out.empty() ? socket : stem + "-mig-" + uuid.substr(0, 8) + suffix});
  }
  return out;
}

base::Status run_mig_daemons(const std::vector<MigDaemon>& daemons, const std::vector<std::string>& rest,
                             double for_s) {
  const StopSignals signals;
  std::map<pid_t, const MigDaemon*> children;
  base::Status outcome;
  for (const MigDaemon& daemon : daemons) {
    const base::Result<pid_t> child = start(program_of(daemon, rest));
    if (!child.ok()) {
      outcome = child.status();
      break;
    }
    children[*child] = &daemon;
  }
  constexpr double kLookS = 0.5;
  for (double left = for_s; outcome.ok(); left -= kLookS) {
    if (signals.wait(for_s > 0 ? std::min(kLookS, left) : kLookS)) break;
    int how = 0;
    const pid_t ended = waitpid(-1, &how, WNOHANG);
    if (const auto found = children.find(ended); ended > 0 && found != children.end()) {
      outcome = base::Status(
          GPUSHARE_IO_ERROR,
          base::format("the daemon at %s (CUDA_VISIBLE_DEVICES=%s) ended with %s %d; the others are stopped",
                       found->second->socket.c_str(), found->second->visible.c_str(),
                       WIFSIGNALED(how) ? "signal" : "exit code",
                       WIFSIGNALED(how) ? WTERMSIG(how) : WEXITSTATUS(how)));
      children.erase(found);
    }
    if (for_s > 0 && left <= kLookS) break;
  }
  end_all(children);
  return outcome;
}

base::Result<client::ServiceStatus> status_of_all(const std::vector<MigDaemon>& daemons) {
  client::ServiceStatus all;
  std::map<std::string, uint64_t> refusals;
  const auto take = [](auto& to, auto& from, const std::map<std::string, std::string>& names) {
    for (auto& each : from)
      if (const auto known = names.find(each.device); known != names.end()) each.device = known->second;
    to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
  };
  for (const MigDaemon& daemon : daemons) {
    GPUSHARE_ASSIGN_OR_RETURN(client::ServiceStatus one, client::query_service(daemon.socket));
    std::map<std::string, std::string> names;
    for (const client::DeviceStatus& device : one.devices)
      names[device.device] = device.uuid.empty() ? device.device : device.uuid;
    all.pid = getpid();
    all.uptime_ns = std::max(all.uptime_ns, one.uptime_ns);
    all.lost_processes += one.lost_processes;
    for (const client::RefusalStatus& refusal : one.refusals) refusals[refusal.cause] += refusal.count;
    take(all.devices, one.devices, names);
    take(all.processes, one.processes, names);
    take(all.sessions, one.sessions, names);
    take(all.images, one.images, names);
  }
  for (const auto& [cause, count] : refusals) all.refusals.push_back({cause, count});
  return all;
}

}  // namespace gpushare::cli
