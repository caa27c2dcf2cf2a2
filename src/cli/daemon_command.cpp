// `gpushare daemon`: shares devices between processes until it is told to stop.
// SPDX-License-Identifier: Apache-2.0
#include <poll.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <string>

#include "base/units.hpp"
#include "cli/command.hpp"
#include "cli/mig_daemons.hpp"
#include "cli/options.hpp"
#include "cli/policy_choice.hpp"
#include "cli/stop_signals.hpp"
#include "client/remote_authority.hpp"
#include "client/status.hpp"
#include "daemon/metrics.hpp"
#include "daemon/metrics_server.hpp"
#include "daemon/service.hpp"

namespace gpushare::cli {
namespace {

class DaemonCommand final : public Command {
 public:
  const char* name() const override { return "daemon"; }
  const char* summary() const override {
    return "Share devices between processes: one scheduler for all sessions";
  }
  const char* help() const override {
    return R"(One daemon schedules the sessions of all processes of a machine. A program takes part by opening a runtime on the
device "shared", or unchanged with GPUSHARE_DEVICE=shared in its environment; everything else is as in one process.
Its memory stays its own: the daemon only promises bytes and gives turns. A process that dies gives everything back.
A session that keeps its turn longer than the lease while another waits loses the turn, not its memory.

Where MIG divides a GPU, --device all starts a daemon for each instance, since CUDA shows a process one instance: at
daemon-mig-5c89852c.sock for MIG-5c89852c-..., beside daemon.sock for GPUs that are whole, or for the first instance.

The socket is for this user alone unless --all-users is given. Stops on SIGTERM and SIGINT; calls that need it then
return UNAVAILABLE, sessions keep their memory, and a daemon started again at the same socket hears of them.

Examples:
  gpushare daemon --socket shared.sock --device host --capacity 512MiB --for 0.2
  gpushare daemon --socket shared.sock --device host --capacity 512MiB --metrics 127.0.0.1:0 --for 0.2

JSON: what it is doing is told by gpushare top --json.

Exit codes: 0 stopped when told to; 1 failed; 2 bad usage, another daemon at the socket, a device that processes
cannot share; 3 no such device.
)";
  }
  void declare(CLI::App& app) override {
    app.add_option(
           "--socket", options_.socket,
           "Path of the Unix socket, at most 107 bytes [GPUSHARE_SOCKET, else gpushare/daemon.sock in "
           "XDG_RUNTIME_DIR, for root in /run]")
        ->type_name("PATH");
    app.add_option(
           "--device", devices_,
           "Device to share, as 'gpushare devices' names it; may be given again. all: every GPU and every "
           "instance of MIG. "
           "auto: the first GPU, else the "
           "host device, but with --all-users a GPU or none [auto]")
        ->type_name("NAME");
    add(app, "--capacity", &options_.capacity_bytes, parse_size, "SIZE",
        "Memory to promise of each device: 8GiB, ... [what is free]");
    add(app, "--set-capacity", &set_capacity_, size_or_0, "SIZE",
        "Have the daemon that serves the socket promise so much from now on, and exit; 0: all it "
        "began with");
    add(app, "--images", &options_.images_bytes, parse_size, "SIZE",
        "Host memory for the images of models that sessions have open [4GiB]");
    add(app, "--policy", &policies_, parse_policies, "NAME|FILE.so",
        "fifo, srtf, pack, fair, priority, or a library of your own by its absolute path [fair]");
    add(app, "--lanes", &options_.max_lanes, count(64, 1), "N",
        "Turns at a time: more than 1 where kernels of several processes run side by side (MPS, host) [1]");
    add(app, "--lease", &options_.lease_ns, seconds, "S",
        "Seconds that a session may keep its turn while another waits [10]");
    app.add_flag(
        "--private-lanes", private_lanes_,
        "Each session has ephemeral memory of its own; else the sessions of one user have it together "
        "where --lanes is 1");
    app.add_flag("--coordinate", coordinate_,
                 "Have a coordinator decide which sessions run, in which class and with how many bytes");
    add(app, "--max-guaranteed", &coordinator_.max_guaranteed, count(1'000'000, 1), "N",
        "Most guaranteed sessions that it lets run at once [1]");
    add(app, "--max-opportunistic", &coordinator_.max_opportunistic, count(1'000'000), "N",
        "Most opportunistic ones [4]");
    add(app, "--long-wait", &coordinator_.long_wait_ns, seconds, "S",
        "Seconds after which a guaranteed session that waits may start as opportunistic [600]");
    add(app, "--stay", &options_.least_stay_ns, seconds, "S",
        "Least seconds on the device for programs that take turns in its memory (gpushare exec "
        "--pageable) [1]");
    add(app, "--driver-patience", &options_.step_patience_ns, whole_seconds, "S",
        "Seconds that the daemon may be at work at one device before its driver counts as hanging; then the "
        "daemon ends with code 1, so that one in its place can serve the other devices. For a device to open "
        "it waits as long, but 20 s at most [60]");
    app.add_flag("--kill-overdue", options_.kill_overdue,
                 "Kill a process that kept its turn longer than the lease");
    app.add_flag("--all-users", options_.all_users, "Let other users connect");
    add(app, "--max-processes", &options_.max_processes_per_user, count(100'000, 1), "N",
        "Most connections of one user, for each device [64]");
    add(app, "--max-sessions", &options_.max_sessions_per_user, count(100'000, 1), "N",
        "Most sessions of one user [1024]");
    add(app, "--max-weight", &options_.ranks.max_weight, number(0, false, 1e6), "W",
        "Largest weight of a session or group; one that asks for more has this [100]");
    add(app, "--max-priority", &options_.ranks.max_priority, count(INT32_MAX), "N",
        "Highest priority of a session; one that asks for more has this [1000]");
    app.add_option(
           "--metrics", metrics_,
           "Answer GET /metrics, in Prometheus' format, at this address: 127.0.0.1:9477, [::1]:9477, or "
           "the path of a Unix socket")
        ->type_name("ADDRESS");
    add(app, "--for", &for_s_, number(0, false, 1e9), "S", "Stop by itself after so many seconds");
  }
  base::Result<ExitCode> run() override {
    if (set_capacity_) return set_capacity();
    GPUSHARE_ASSIGN_OR_RETURN(options_.socket, socket_to_serve());
    if (!devices_.empty()) options_.devices = devices_;
    if (const std::vector<MigDaemon> daemons = divided_by_mig(); !daemons.empty()) return serve_mig(daemons);
    GPUSHARE_RETURN_IF_ERROR(find_gpus());
    options_.share_lanes = !private_lanes_ && options_.max_lanes == 1;
    if (policies_.size() > 1) return bad_option("--policy", policies_[1].name, "a daemon has one policy");
    if (!policies_.empty()) options_.make_policy = [policy = policies_[0]] { return policy.make(); };
    if (coordinate_) options_.coordination = coordinator_;
    options_.open_patience_ns = std::min(options_.open_patience_ns, options_.step_patience_ns);
    options_.on_hang = [socket = options_.socket, patience_ns = options_.step_patience_ns](
                           const std::string& device) { end_hanging(socket, device, patience_ns); };
    const std::string socket = options_.socket;
    const StopSignals signals;
    auto started = daemon::Service::start(options_);
    if (started.status().code() == GPUSHARE_EXCEEDS_CAPACITY)
      return bad_option("--capacity", base::format_bytes(options_.capacity_bytes),
                        started.status().message());
    if (started.status().code() == GPUSHARE_UNAVAILABLE && options_.leave_out_failed)
      return no_gpu(started.status());
    if (!started.ok()) return started.status();
    for (const auto& device : (*started)->devices())
      std::fprintf(stderr, "gpushare daemon: serving %s: device %s, %s, policy %s\n", socket.c_str(),
                   device->name().c_str(), base::format_bytes(device->capacity_bytes()).c_str(),
                   device->policy_name().c_str());
    std::unique_ptr<daemon::MetricsServer> metrics;
    if (!metrics_.empty()) {
      GPUSHARE_ASSIGN_OR_RETURN(metrics, serve_metrics([socket] { return client::query_service(socket); }));
      std::fprintf(stderr, "gpushare daemon: metrics at %s\n", metrics->address().c_str());
    }
    (void)signals.wait(for_s_);
    return kExitOk;
  }

 private:
  static base::Result<uint64_t> seconds(const char* option, const std::string& text) {
    GPUSHARE_ASSIGN_OR_RETURN(const double value, parse_number(option, text, 0, false, 1e9));
    return static_cast<uint64_t>(value * 1e9) + 1;
  }
  static base::Result<uint64_t> whole_seconds(const char* option, const std::string& text) {
    GPUSHARE_ASSIGN_OR_RETURN(const uint64_t value, parse_count(option, text, 1'000'000'000, 1));
    return value * 1'000'000'000;
  }
  // The daemons to start where --device is all and a GPU is divided. A process that CUDA_VISIBLE_DEVICES limits is one of them, or has its
  // operator's choice.
  std::vector<MigDaemon> divided_by_mig() const {
    if (devices_ != std::vector<std::string>{"all"} || std::getenv("CUDA_VISIBLE_DEVICES") != nullptr)
      return {};
    const std::vector<daemon::GpuIdentity> gpus = daemon::all_gpus();
    if (std::all_of(gpus.begin(), gpus.end(), [](const auto& gpu) { return gpu.parent_uuid.empty(); }))
      return {};
    return mig_daemons(gpus, options_.socket);
  }
  base::Result<ExitCode> serve_mig(const std::vector<MigDaemon>& daemons) const {
    std::unique_ptr<daemon::MetricsServer> metrics;
    if (!metrics_.empty()) {
      GPUSHARE_ASSIGN_OR_RETURN(metrics, serve_metrics([daemons] { return status_of_all(daemons); }));
      std::fprintf(stderr, "gpushare daemon: metrics at %s\n", metrics->address().c_str());
    }
    GPUSHARE_RETURN_IF_ERROR(run_mig_daemons(
        daemons, without(command_arguments(), {"--device", "--socket", "--metrics", "--for"}), for_s_));
    return kExitOk;
  }
  // Whatever hangs may hold the lock of the log, so the message is written past it, and only if stderr takes it at once.
  [[noreturn]] static void end_hanging(const std::string& socket, const std::string& device,
                                       uint64_t patience_ns) {
    const std::string lasts = " has lasted " + base::format_duration_ns(patience_ns);
    const std::string message =
        "gpushare daemon: " +
        (device.empty() ? "work of the daemon" + lasts
                        : "work at device '" + device + "'" + lasts + ", as when its driver hangs") +
        "; the daemon ends, and one that is started in its place serves the other devices\n";
    pollfd to{STDERR_FILENO, POLLOUT, 0};
    if (poll(&to, 1, 0) > 0) [[maybe_unused]]
      const ssize_t written = write(STDERR_FILENO, message.data(), message.size());
    let_go_of(socket);
    _exit(kExitFailed);
  }
  // A thread that hangs in the kernel keeps the process and all that is open. So sockets are closed and the lock of
  // `socket` is let go of here: programs find the connection closed, and another daemon can start. Other files stay
  // open, and are not asked what they are: their file system, or a driver, may be what hangs.
  static void let_go_of(const std::string& socket) {
    const std::string lock = "/" + std::filesystem::path(socket).filename().string() + ".lock";
    std::vector<std::filesystem::path> files;
    std::error_code error;
    for (std::filesystem::directory_iterator each("/proc/self/fd", error), end; !error && each != end;
         each.increment(error))
      files.push_back(each->path());
    for (const std::filesystem::path& each : files) {
      const int file = std::atoi(each.filename().c_str());
      const std::string name = std::filesystem::read_symlink(each, error).string();
      if (file <= STDERR_FILENO || error) continue;
      if (name.ends_with(lock)) (void)flock(file, LOCK_UN);
      if (!name.starts_with("socket:")) continue;
      (void)shutdown(file, SHUT_RDWR);  // a child may have it too
      close(file);
    }
  }
  // The arguments behind "daemon" on the command line.
  static std::vector<std::string> command_arguments() {
    std::ifstream file("/proc/self/cmdline", std::ios::binary);
    std::vector<std::string> out;
    for (std::string each; std::getline(file, each, '\0');) out.push_back(each);
    const auto command = std::find(out.begin(), out.end(), "daemon");
    out.erase(out.begin(), command == out.end() ? command : command + 1);
    return out;
  }
  // Options as --name value or --name=value.
  static std::vector<std::string> without(const std::vector<std::string>& arguments,
                                          const std::vector<std::string>& options) {
    std::vector<std::string> out;
    for (size_t i = 0; i < arguments.size(); ++i) {
      const std::string name = arguments[i].substr(0, arguments[i].find('='));
      if (std::find(options.begin(), options.end(), name) == options.end())
        out.push_back(arguments[i]);
      else if (name == arguments[i])
        ++i;
    }
    return out;
  }
  // The figures are asked for as gpushare top asks: scraping takes nothing from the daemon but one answer.
  base::Result<std::unique_ptr<daemon::MetricsServer>> serve_metrics(
      std::function<base::Result<client::ServiceStatus>()> ask) const {
    auto server =
        daemon::MetricsServer::start(metrics_, [ask = std::move(ask)]() -> base::Result<std::string> {
          GPUSHARE_ASSIGN_OR_RETURN(const client::ServiceStatus status, ask());
          return daemon::metrics_text(status);
        });
    if (!server.ok()) return bad_option("--metrics", metrics_, server.status().message());
    return server;
  }
  static base::Result<uint64_t> size_or_0(const char* option, const std::string& text) {
    return text == "0" ? base::Result<uint64_t>(uint64_t{0}) : parse_size(option, text);
  }
  // Promises above the new capacity fall at boundaries: gpushare top shows the target and the effective value.
  base::Result<ExitCode> set_capacity() const {
    if (devices_.size() > 1) return bad_option("--device", devices_[1], "one capacity is set at a time");
    const base::Status set =
        client::set_service_capacity(options_.socket.empty() ? client::default_socket() : options_.socket,
                                     devices_.empty() ? "" : devices_[0], *set_capacity_);
    if (set.code() == GPUSHARE_EXCEEDS_CAPACITY)
      return bad_option("--set-capacity", base::format_bytes(*set_capacity_), set.message());
    if (!set.ok()) return set;
    return kExitOk;
  }
  // "all" is every GPU that can be used. For all users of a machine "auto" is a GPU: a driver that is missing there must not
  // have the host device served in its place, silently.
  base::Status find_gpus() {
    const bool all = std::find(devices_.begin(), devices_.end(), "all") != devices_.end();
    const bool is_auto =
        devices_.empty() || std::find(devices_.begin(), devices_.end(), "auto") != devices_.end();
    if (!all && !(is_auto && options_.all_users)) return {};
    if (devices_.size() > 1) return bad_option("--device", all ? "all" : "auto", "name no device beside it");
    base::Result<std::vector<std::string>> gpus = daemon::gpu_specs();
    if (!gpus.ok()) return no_gpu(gpus.status());
    options_.devices = *std::move(gpus);
    options_.leave_out_failed = true;
    options_.first_alone = !all;
    return {};
  }
  static base::Status no_gpu(const base::Status& why) {
    return {why.code(), "no GPU can be used; " + why.message() + "; '--device host' shares the host device"};
  }
  // Where clients look, in a folder that only this user can write.
  base::Result<std::string> socket_to_serve() const {
    if (!options_.socket.empty()) return options_.socket;
    if (const char* named = std::getenv("GPUSHARE_SOCKET"); named != nullptr && *named != '\0')
      return std::string(named);
    const char* run = std::getenv("XDG_RUNTIME_DIR");
    if (geteuid() != 0 && (run == nullptr || *run == '\0'))
      return bad_option("--socket", "", "XDG_RUNTIME_DIR is not set, so name a socket");
    const std::filesystem::path folder = std::filesystem::path(geteuid() == 0 ? "/run" : run) / "gpushare";
    std::error_code error;
    const bool is_new = std::filesystem::create_directory(folder, error);
    // A daemon for this user alone may have made the folder.
    constexpr auto kOthers = static_cast<std::filesystem::perms>(0755);
    if (!error && (is_new || options_.all_users))
      std::filesystem::permissions(folder, options_.all_users ? kOthers : std::filesystem::perms::owner_all,
                                   error);
    if (error)
      return base::Status(GPUSHARE_IO_ERROR, "cannot make " + folder.string() + ": " + error.message());
    return (folder / "daemon.sock").string();
  }

  daemon::ServiceOptions options_;
  sched::CoordinatorOptions coordinator_;
  std::optional<uint64_t> set_capacity_;
  std::vector<PolicyChoice> policies_;
  std::string metrics_;
  double for_s_ = 0;
  std::vector<std::string> devices_;
  bool private_lanes_ = false, coordinate_ = false;
};

}  // namespace

std::unique_ptr<Command> make_daemon_command() {
  return std::make_unique<DaemonCommand>();
}

}  // namespace gpushare::cli
