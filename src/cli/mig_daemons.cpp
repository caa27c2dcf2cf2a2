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
#include "cli/command.hpp"
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

using Clock = std::chrono::steady_clock;

// The daemon of one instance.
struct Child {
  const MigDaemon* daemon;
  pid_t process = 0;  // 0: it has ended, and is started again
  Clock::time_point start{};
  std::chrono::seconds pause{1};  // before the next start; twice as long each time
};

// A daemon that is stopped, or hangs in the driver, does not hear SIGTERM.
void end_all(std::vector<Child> children) {
  std::erase_if(children, [](const Child& child) { return child.process == 0; });
  for (const int with : {SIGTERM, SIGKILL}) {
    for (const Child& child : children) {
      if (with == SIGKILL)
        base::log(base::kWarning, "the daemon at " + child.daemon->socket + " does not end, and is killed");
      kill(child.process, with);
    }
    const auto until = Clock::now() + std::chrono::seconds(10);
    for (;;) {
      std::erase_if(children,
                    [](const Child& child) { return waitpid(child.process, nullptr, WNOHANG) != 0; });
      if (children.empty()) return;
      if (Clock::now() > until) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
}

// One whose device or driver fails is started again later, and the others go on. Errors: none goes on, or one has ended
// for any other reason.
base::Status take_end(std::vector<Child>& children, pid_t process, int how) {
  const auto child = std::find_if(children.begin(), children.end(),
                                  [process](const Child& each) { return each.process == process; });
  if (child == children.end()) return {};
  child->process = 0;
  const bool device =
      WIFEXITED(how) && (WEXITSTATUS(how) == kExitFailed || WEXITSTATUS(how) == kExitUnavailable);
  const bool others =
      std::any_of(children.begin(), children.end(), [](const Child& each) { return each.process != 0; });
  const std::string what = base::format("the daemon at %s (CUDA_VISIBLE_DEVICES=%s) ended with %s %d",
                                        child->daemon->socket.c_str(), child->daemon->visible.c_str(),
                                        WIFSIGNALED(how) ? "signal" : "exit code",
                                        WIFSIGNALED(how) ? WTERMSIG(how) : WEXITSTATUS(how));
  if (!device || !others) return {GPUSHARE_IO_ERROR, what + (others ? "; the others are stopped" : "")};
  base::log(base::kError, what + base::format("; it is started again in %lld s, and the others go on",
                                              static_cast<long long>(child->pause.count())));
  child->start = Clock::now() + child->pause;
  child->pause = std::min(2 * child->pause, std::chrono::seconds(3600));
  return {};
}

base::Status start_due(std::vector<Child>& children, const std::vector<std::string>& rest) {
  for (Child& child : children) {
    if (child.process != 0 || Clock::now() < child.start) continue;
    GPUSHARE_ASSIGN_OR_RETURN(child.process, start(program_of(*child.daemon, rest)));
  }
  return {};
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
  std::vector<Child> children;
  for (const MigDaemon& daemon : daemons) children.push_back({&daemon});
  base::Status outcome = start_due(children, rest);
  constexpr double kLookS = 0.5;
  for (double left = for_s; outcome.ok(); left -= kLookS) {
    if (signals.wait(for_s > 0 ? std::min(kLookS, left) : kLookS)) break;
    int how = 0;
    const pid_t ended = waitpid(-1, &how, WNOHANG);
    if (ended > 0) outcome = take_end(children, ended, how);
    if (outcome.ok()) outcome = start_due(children, rest);
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
  base::Status failed;
  for (const MigDaemon& daemon : daemons) {
    base::Result<client::ServiceStatus> told = client::query_service(daemon.socket);
    if (!told.ok()) {
      failed = told.status();
      continue;
    }
    client::ServiceStatus& one = *told;
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
  if (all.devices.empty()) return failed;
  for (const auto& [cause, count] : refusals) all.refusals.push_back({cause, count});
  return all;
}

}  // namespace gpushare::cli
