// `gpushare model-daemon`: serves models to worker processes until it is told to stop; --status asks a running one.
// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "base/units.hpp"
#include "cli/command.hpp"
#include "cli/options.hpp"
#include "cli/output.hpp"
#include "cli/stop_signals.hpp"
#include "daemon/server.hpp"
#include "daemon/worker.hpp"

namespace gpushare::cli {
namespace {

nlohmann::ordered_json to_json(const daemon::DaemonStatus& status, const std::string& socket) {
  nlohmann::ordered_json workers = nlohmann::ordered_json::array();
  for (const daemon::WorkerStatus& worker : status.workers)
    workers.push_back({{"worker", worker.worker},
                       {"pid", worker.pid},
                       {"name", worker.name},
                       {"state", worker.state},
                       {"model", worker.model},
                       {"turns", worker.turns},
                       {"turn_s", static_cast<double>(worker.turn_ns) / 1e9},
                       {"scratch_bytes", worker.scratch_bytes},
                       {"iteration_s", static_cast<double>(worker.iteration_ns) / 1e9}});
  nlohmann::ordered_json models = nlohmann::ordered_json::array();
  for (const daemon::ModelStatus& model : status.models)
    models.push_back({{"path", model.path},
                      {"state", model.state},
                      {"bytes", model.bytes},
                      {"layers", model.layers},
                      {"arrived", model.arrived},
                      {"workers", model.workers},
                      {"loads", model.loads}});
  return {{"socket", socket},
          {"device", status.device},
          {"pid", status.pid},
          {"uptime_s", static_cast<double>(status.uptime_ns) / 1e9},
          {"capacity_bytes", status.capacity_bytes},
          {"resident_bytes", status.resident_bytes},
          {"standby_bytes", status.standby_bytes},
          {"device_free_bytes", status.device_free_bytes},
          {"device_total_bytes", status.device_total_bytes},
          {"images_bytes", status.images_bytes},
          {"images_limit_bytes", status.images_limit_bytes},
          {"turns", status.turns},
          {"loads", status.loads},
          {"drops", status.drops},
          {"reclaimed", status.reclaimed},
          {"cut_off", status.cut_off},
          {"refused", status.refused},
          {"workers", std::move(workers)},
          {"models", std::move(models)}};
}

std::string to_text(const daemon::DaemonStatus& status) {
  std::string out = base::format(
      "device %s, up %s: %s of %s in use, images %s of %s\n"
      "turns %llu, loads %llu, drops %llu; reclaimed %llu, cut off %llu, refused %llu\n",
      status.device.c_str(), base::format_duration_ns(status.uptime_ns).c_str(),
      base::format_bytes(status.resident_bytes).c_str(), base::format_bytes(status.capacity_bytes).c_str(),
      base::format_bytes(status.images_bytes).c_str(), base::format_bytes(status.images_limit_bytes).c_str(),
      static_cast<unsigned long long>(status.turns), static_cast<unsigned long long>(status.loads),
      static_cast<unsigned long long>(status.drops), static_cast<unsigned long long>(status.reclaimed),
      static_cast<unsigned long long>(status.cut_off), static_cast<unsigned long long>(status.refused));
  if (!status.workers.empty()) {
    Table table;
    for (const char* title : {"worker", "pid", "state"}) table.add_column(title, Table::Align::kLeft);
    table.add_column("turns", Table::Align::kRight);
    table.add_column("in turns", Table::Align::kRight);
    table.add_column("model", Table::Align::kLeft);
    for (const daemon::WorkerStatus& worker : status.workers)
      table.add_row({worker.name, std::to_string(worker.pid), worker.state, std::to_string(worker.turns),
                     base::format_duration_ns(worker.turn_ns), worker.model});
    out += '\n' + table.to_string();
  }
  if (!status.models.empty()) {
    Table table;
    table.add_column("model", Table::Align::kLeft);
    table.add_column("state", Table::Align::kLeft);
    for (const char* title : {"layers", "bytes", "workers", "loads"})
      table.add_column(title, Table::Align::kRight);
    for (const daemon::ModelStatus& model : status.models)
      table.add_row({model.path, model.state, base::format("%u/%u", model.arrived, model.layers),
                     base::format_bytes(model.bytes), std::to_string(model.workers),
                     std::to_string(model.loads)});
    out += '\n' + table.to_string();
  }
  return out;
}

class ModelDaemonCommand final : public Command {
 public:
  const char* name() const override { return "model-daemon"; }
  const char* summary() const override {
    return "Serve models to worker processes that take turns on one device";
  }
  const char* help() const override {
    return "One daemon owns the device's memory and the images of the models. Worker processes attach "
           "(gpushare_worker_attach),\n"
           "take turns, and find their model's layers in memory that the daemon fills while the first ones "
           "already execute.\n"
           "A worker that dies gives back its turn and its memory. Stops on SIGTERM and SIGINT; workers then "
           "get UNAVAILABLE.\n"
           "\n"
           "The socket is for this user alone. The device must be able to share memory between processes: "
           "'gpushare devices'\n"
           "lists it with ipc.\n"
           "\n"
           "Examples:\n"
           "  gpushare model-daemon --socket models.sock --device host --capacity 512MiB --for 0.2\n"
           "\n"
           "Asking one that runs:\n"
           "    gpushare model-daemon --socket models.sock --status\n"
           "    gpushare model-daemon --socket models.sock --status --json -\n"
           "\n"
           "JSON (with --status now, else when it stops): socket, device, pid, uptime_s, capacity_bytes, "
           "resident_bytes,\n"
           "standby_bytes, device_free_bytes, device_total_bytes, images_bytes, images_limit_bytes, turns, "
           "loads, drops,\n"
           "reclaimed, cut_off, refused, workers[] {worker, pid, name, state, model, turns, turn_s, "
           "scratch_bytes,\n"
           "iteration_s}, models[] {path, state, bytes, layers, arrived, workers, loads}.\n"
           "\n"
           "Exit codes: 0 stopped when told to, or asked; 1 failed; 2 bad usage, another daemon at the "
           "socket, "
           "device without ipc;\n"
           "3 no such device, or no daemon answers.\n";
  }
  void declare(CLI::App& app) override {
    app.add_option("--socket", socket_, "Path of the Unix socket, at most 107 bytes")
        ->type_name("PATH")
        ->required();
    app.add_flag("--status", status_, "Ask the daemon at the socket instead of starting one");
    app.add_option("--device", device_, "Device to own, as 'gpushare devices' names it [auto]")
        ->type_name("NAME");
    app.add_option("--capacity", capacity_, "Device memory for models: 8GiB, ... [all that is free]")
        ->type_name("SIZE");
    app.add_option("--standby", standby_,
                   "Of the capacity, for first layers of models that are off the device: switches to models "
                   "with a large first layer are quick then [none]")
        ->type_name("SIZE");
    app.add_option("--order-by", order_by_,
                   "In which order a file's layers are taken to execute: bytes, as they lie in it, or names, "
                   "as these tell [bytes]")
        ->type_name("KIND");
    app.add_option("--images", images_, "Host memory for images of models [4GiB]")->type_name("SIZE");
    app.add_option("--lease", lease_,
                   "Seconds that a worker may keep its turn while another waits; 0 = for ever [10]")
        ->type_name("S");
    app.add_option("--max-workers", max_workers_, "Most connections at once [256]")->type_name("N");
    app.add_option("--residency", residency_, "Which models stay on the device: weighted or lru [weighted]")
        ->type_name("NAME");
    app.add_option("--for", for_, "Stop by itself after so many seconds")->type_name("S");
    json_.declare(app);
  }
  base::Result<ExitCode> run() override {
    if (status_) {
      GPUSHARE_RETURN_IF_ERROR(check_files({}, {json_.file()}));
      GPUSHARE_ASSIGN_OR_RETURN(const daemon::DaemonStatus status, daemon::query_status(socket_));
      GPUSHARE_RETURN_IF_ERROR(json_.write(to_json(status, socket_)));
      if (!json_.on_stdout()) GPUSHARE_RETURN_IF_ERROR(write_stdout(to_text(status)));
      return kExitOk;
    }
    GPUSHARE_RETURN_IF_ERROR(check_files({}, {{"--socket", socket_}, json_.file()}));
    daemon::ServerOptions options;
    options.socket = socket_;
    options.device = device_;
    if (!capacity_.empty()) {
      GPUSHARE_ASSIGN_OR_RETURN(options.capacity_bytes, parse_size("--capacity", capacity_));
    }
    if (!standby_.empty()) {
      GPUSHARE_ASSIGN_OR_RETURN(options.standby_bytes, parse_size("--standby", standby_));
    }
    if (!capacity_.empty() && options.standby_bytes > options.capacity_bytes)
      return bad_option("--standby", standby_, "it is a part of --capacity, " + capacity_);
    if (order_by_ != "bytes" && order_by_ != "names")
      return bad_option("--order-by", order_by_, "there are bytes and names");
    if (order_by_ == "names") options.read.sort = loader::ReadOptions::Sort::kNames;
    options.read.path = loader::ReadOptions::Path::kAuto;
    GPUSHARE_ASSIGN_OR_RETURN(options.images_bytes, parse_size("--images", images_));
    GPUSHARE_ASSIGN_OR_RETURN(const double lease_s, parse_number("--lease", lease_, 0, true, 1e6));
    options.lease_ns = lease_s == 0 ? daemon::kNoTimeout : static_cast<uint64_t>(lease_s * 1e9) + 1;
    GPUSHARE_ASSIGN_OR_RETURN(const uint64_t workers, parse_count("--max-workers", max_workers_, 100'000, 1));
    options.max_workers = static_cast<uint32_t>(workers);
    if (residency_ != "weighted" && residency_ != "lru")
      return bad_option("--residency", residency_, "there are weighted and lru");
    options.residency =
        residency_ == "lru" ? sched::ResidencyPolicy::kLeastRecentlyUsed : sched::ResidencyPolicy::kWeighted;
    double seconds = 0;
    if (!for_.empty()) {
      GPUSHARE_ASSIGN_OR_RETURN(seconds, parse_number("--for", for_, 0, false, 1e9));
    }
    const StopSignals signals;
    auto started = daemon::Server::start(std::move(options));
    if (started.status().code() == GPUSHARE_EXCEEDS_CAPACITY)
      return capacity_.empty() ? bad_option("--standby", standby_, started.status().message())
                               : bad_option("--capacity", capacity_, started.status().message());
    if (!started.ok()) return started.status();
    const std::unique_ptr<daemon::Server> server = std::move(*started);
    std::fprintf(stderr, "gpushare model-daemon: serving %s: device %s, %s for models\n", socket_.c_str(),
                 server->device().c_str(), base::format_bytes(server->capacity_bytes()).c_str());
    (void)signals.wait(seconds);
    if (json_.wanted()) {
      GPUSHARE_ASSIGN_OR_RETURN(const daemon::DaemonStatus status, daemon::query_status(socket_));
      GPUSHARE_RETURN_IF_ERROR(json_.write(to_json(status, socket_)));
    }
    return kExitOk;
  }

 private:
  std::string socket_, device_ = "auto", capacity_, standby_, images_ = "4GiB", lease_ = "10",
                       max_workers_ = "256", residency_ = "weighted", order_by_ = "bytes", for_;
  bool status_ = false;
  JsonOption json_;
};

}  // namespace

std::unique_ptr<Command> make_model_daemon_command() {
  return std::make_unique<ModelDaemonCommand>();
}

}  // namespace gpushare::cli
