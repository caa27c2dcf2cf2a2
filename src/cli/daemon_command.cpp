// `gpushare daemon`: shares devices between processes until it is told to stop. `gpushare top`: what it is doing.
// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <type_traits>

#include "base/units.hpp"
#include "cli/command.hpp"
#include "cli/options.hpp"
#include "cli/output.hpp"
#include "cli/policy_choice.hpp"
#include "cli/stop_signals.hpp"
#include "client/remote_authority.hpp"
#include "client/status.hpp"
#include "cluster/json.hpp"
#include "daemon/service.hpp"

namespace gpushare::cli {
namespace {

// An object of the line's fields. Times are seconds here; what there is none of is null.
template <class Line>
cluster::OrderedJson object_of(const Line& line) {
  cluster::OrderedJson out;
  Line::for_each_field(line, [&](const std::string& name, const auto& value) {
    if constexpr (std::is_same_v<std::decay_t<decltype(value)>, uint64_t>) {
      if (name.ends_with("_ns")) {
        out[name.substr(0, name.size() - 2) + "s"] = static_cast<double>(value) / 1e9;
        return;
      }
    }
    out[name] = value;
  });
  return out;
}

template <class Line>
cluster::OrderedJson array_of(const std::vector<Line>& lines) {
  auto out = cluster::OrderedJson::array();
  for (const Line& line : lines) out.push_back(object_of(line));
  return out;
}

cluster::OrderedJson to_json(const client::ServiceStatus& status, const std::string& socket) {
  cluster::OrderedJson out = cluster::object({{"socket", socket}});
  out.update(object_of(status));
  out["devices"] = array_of(status.devices);
  out["processes"] = array_of(status.processes);
  out["sessions"] = array_of(status.sessions);
  for (size_t i = 0; i < status.sessions.size(); ++i) {
    if (status.sessions[i].lane == UINT64_MAX) out["sessions"][i]["lane"] = nullptr;
    if (status.sessions[i].cap == 0) out["sessions"][i]["cap"] = nullptr;
  }
  out["images"] = array_of(status.images);
  return out;
}

std::string to_text(const client::ServiceStatus& status) {
  std::string out;
  for (const client::DeviceStatus& device : status.devices)
    out += base::format(
        "device %s, policy %s, up %s: %s of %s promised to %llu sessions, %llu wait for memory\n"
        "turns %llu, taken back after the lease %llu\n",
        device.device.c_str(), device.policy.c_str(), base::format_duration_ns(status.uptime_ns).c_str(),
        base::format_bytes(device.promised_bytes).c_str(), base::format_bytes(device.capacity_bytes).c_str(),
        static_cast<unsigned long long>(device.resident), static_cast<unsigned long long>(device.waiting),
        static_cast<unsigned long long>(device.turns), static_cast<unsigned long long>(device.cut_off));
  for (const client::DeviceStatus& device : status.devices)
    if (device.max_guaranteed > 0)
      out +=
          base::format("device %s: a coordinator lets %llu guaranteed and %llu opportunistic sessions run\n",
                       device.device.c_str(), static_cast<unsigned long long>(device.max_guaranteed),
                       static_cast<unsigned long long>(device.max_opportunistic));
  for (const client::DeviceStatus& device : status.devices)
    if (device.context_bytes > 0)
      out += base::format("device %s: contexts of processes have %s of what is promised\n",
                          device.device.c_str(), base::format_bytes(device.context_bytes).c_str());
  for (const client::DeviceStatus& device : status.devices)
    if (device.effective_capacity_bytes > device.capacity_bytes)
      out += base::format("device %s: %s are promised, more than the capacity, and fall at boundaries\n",
                          device.device.c_str(), base::format_bytes(device.effective_capacity_bytes).c_str());
  if (!status.processes.empty()) {
    Table table;
    for (const char* title : {"pid", "uid"}) table.add_column(title, Table::Align::kRight);
    for (const char* title : {"program", "state"}) table.add_column(title, Table::Align::kLeft);
    for (const char* title : {"sessions", "context"}) table.add_column(title, Table::Align::kRight);
    for (const client::ProcessStatus& process : status.processes)
      table.add_row({std::to_string(process.pid), std::to_string(process.uid), process.program, process.state,
                     std::to_string(process.sessions),
                     process.context_bytes == 0 ? "-" : base::format_bytes(process.context_bytes)});
    out += '\n' + table.to_string();
  }
  if (!status.sessions.empty()) {
    Table table;
    table.add_column("session", Table::Align::kLeft);
    table.add_column("pid", Table::Align::kRight);
    for (const char* title : {"state", "class"}) table.add_column(title, Table::Align::kLeft);
    for (const char* title :
         {"weight", "cap", "share", "service", "iterations", "persistent", "ephemeral", "limit"})
      table.add_column(title, Table::Align::kRight);
    table.add_column("waits for", Table::Align::kLeft);
    for (const client::SessionStatus& session : status.sessions)
      table.add_row(
          {session.name, std::to_string(session.pid), session.state, session.cls,
           base::format("%g", session.weight),
           session.cap > 0 ? base::format("%g%%", 100 * session.cap) : "-",
           base::format("%.1f%%", 100 * session.share), base::format_duration_ns(session.service_ns),
           std::to_string(session.iterations), base::format_bytes(session.persistent_bytes),
           base::format_bytes(session.ephemeral_bytes),
           session.limit_bytes == 0 ? "-" : base::format_bytes(session.limit_bytes), session.waits_for});
    out += '\n' + table.to_string();
  }
  if (!status.images.empty()) {
    Table table;
    for (const char* title : {"image", "state"}) table.add_column(title, Table::Align::kLeft);
    for (const char* title : {"bytes", "first layers kept", "layers there", "loads", "sessions"})
      table.add_column(title, Table::Align::kRight);
    for (const client::ImageStatus& image : status.images)
      table.add_row({image.path, image.state, base::format_bytes(image.bytes),
                     base::format_bytes(image.kept_bytes),
                     base::format("%llu of %llu", static_cast<unsigned long long>(image.arrived),
                                  static_cast<unsigned long long>(image.layers)),
                     std::to_string(image.loads), std::to_string(image.sessions)});
    out += '\n' + table.to_string();
  }
  return out;
}

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

The socket is for this user alone unless --all-users is given. Stops on SIGTERM and SIGINT; calls that need it then
return UNAVAILABLE, sessions keep their memory, and a daemon started again at the same socket hears of them.

Examples:
  gpushare daemon --socket shared.sock --device host --capacity 512MiB --for 0.2

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
    app.add_option("--device", devices_,
                   "Device to share, as 'gpushare devices' names it; may be given again [auto]")
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
    add(app, "--for", &for_s_, number(0, false, 1e9), "S", "Stop by itself after so many seconds");
  }
  base::Result<ExitCode> run() override {
    if (set_capacity_) return set_capacity();
    GPUSHARE_ASSIGN_OR_RETURN(options_.socket, socket_to_serve());
    if (!devices_.empty()) options_.devices = devices_;
    options_.share_lanes = !private_lanes_ && options_.max_lanes == 1;
    if (policies_.size() > 1) return bad_option("--policy", policies_[1].name, "a daemon has one policy");
    if (!policies_.empty()) options_.make_policy = [policy = policies_[0]] { return policy.make(); };
    if (coordinate_) options_.coordination = coordinator_;
    const std::string socket = options_.socket;
    const StopSignals signals;
    auto started = daemon::Service::start(options_);
    if (started.status().code() == GPUSHARE_EXCEEDS_CAPACITY)
      return bad_option("--capacity", base::format_bytes(options_.capacity_bytes),
                        started.status().message());
    if (!started.ok()) return started.status();
    for (const auto& device : (*started)->devices())
      std::fprintf(stderr, "gpushare daemon: serving %s: device %s, %s, policy %s\n", socket.c_str(),
                   device->name().c_str(), base::format_bytes(device->capacity_bytes()).c_str(),
                   device->policy_name().c_str());
    (void)signals.wait(for_s_);
    return kExitOk;
  }

 private:
  static base::Result<uint64_t> seconds(const char* option, const std::string& text) {
    GPUSHARE_ASSIGN_OR_RETURN(const double value, parse_number(option, text, 0, false, 1e9));
    return static_cast<uint64_t>(value * 1e9) + 1;
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
  double for_s_ = 0;
  std::vector<std::string> devices_;
  bool private_lanes_ = false, coordinate_ = false;
};

class TopCommand final : public Command {
 public:
  const char* name() const override { return "top"; }
  const char* summary() const override { return "Show the processes and sessions that share a device"; }
  const char* help() const override {
    return R"(Asks the daemon for its devices, processes and sessions: who has the turn, who waits and for what, bytes, and shares of
the device's time. A user is shown his own processes and sessions, root all. Updates every second on a terminal, until
interrupted; prints once otherwise, and with --once or --json.

States of a session: turn (has it), idle (keeps it, nothing runs), ready (waits for it), resting (has nothing to run),
queued (waits for memory), paging, paged_out, overdue (its turn was taken back after the lease).

Examples:
  gpushare top --socket shared.sock --once
  gpushare top --socket shared.sock --json -

JSON: socket, pid, uptime_s, devices[] {device, policy, capacity_bytes, effective_capacity_bytes,
promised_bytes, images_bytes, context_bytes, lanes, resident, waiting, turns, cut_off,
max_guaranteed, max_opportunistic},
processes[] {pid, uid, program, device, state, sessions, context_bytes}, sessions[] {pid, session, name, device, state,
waits_for, lane, persistent_bytes, ephemeral_bytes, service_s, iterations, weight, cap, priority, class,
limit_bytes, share, group}, images[] {path, device, state, bytes, kept_bytes, layers, arrived, loads, sessions}.

Exit codes: 0 asked; 2 bad usage; 3 no daemon answers.
)";
  }
  void declare(CLI::App& app) override {
    app.add_option("--socket", socket_, "Path of the daemon's socket [as for 'gpushare daemon']")
        ->type_name("PATH");
    app.add_flag("--once", once_, "Print once");
    json_.declare(app);
  }
  base::Result<ExitCode> run() override {
    const std::string socket = socket_.empty() ? client::default_socket() : socket_;
    GPUSHARE_RETURN_IF_ERROR(check_files({}, {json_.file()}));
    const bool live = !once_ && !json_.wanted() && isatty(STDOUT_FILENO) == 1;
    const StopSignals signals;
    for (;;) {
      GPUSHARE_ASSIGN_OR_RETURN(const client::ServiceStatus status, client::query_service(socket));
      GPUSHARE_RETURN_IF_ERROR(json_.write(to_json(status, socket)));
      if (live) GPUSHARE_RETURN_IF_ERROR(write_stdout_bytes("\033[H\033[J"));
      if (!json_.on_stdout()) GPUSHARE_RETURN_IF_ERROR(write_stdout(to_text(status)));
      if (!live || signals.wait(1)) return kExitOk;
    }
  }

 private:
  std::string socket_;
  bool once_ = false;
  JsonOption json_;
};

}  // namespace

std::unique_ptr<Command> make_daemon_command() {
  return std::make_unique<DaemonCommand>();
}

std::unique_ptr<Command> make_top_command() {
  return std::make_unique<TopCommand>();
}

}  // namespace gpushare::cli
