// `gpushare devices`: what this machine has, unusable devices with the reason.
// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <array>
#include <gpushare/gpushare.hpp>

#include "base/units.hpp"
#include "cli/command.hpp"
#include "cli/output.hpp"
#include "cluster/json.hpp"

namespace gpushare::cli {
namespace {

struct Capability {
  uint32_t bit;
  const char* name;
};
constexpr std::array<Capability, 9> kCapabilities{{{GPUSHARE_DEVICE_CAP_HOST_ADDRESSABLE, "host-addressable"},
                                                   {GPUSHARE_DEVICE_CAP_VIRTUAL_MEMORY, "virtual-memory"},
                                                   {GPUSHARE_DEVICE_CAP_PRIORITIES, "priorities"},
                                                   {GPUSHARE_DEVICE_CAP_VIRTUAL_TIME, "virtual-time"},
                                                   {GPUSHARE_DEVICE_CAP_MODELED_WORK, "modeled-work"},
                                                   {GPUSHARE_DEVICE_CAP_FAULTS, "faults"},
                                                   {GPUSHARE_DEVICE_CAP_PARTITIONS, "partitions"},
                                                   {GPUSHARE_DEVICE_CAP_IPC, "ipc"},
                                                   {GPUSHARE_DEVICE_CAP_HOST_PHYSICAL, "host-physical"}}};

std::vector<std::string> capabilities_of(const gpushare_device_info& device) {
  std::vector<std::string> out;
  for (const Capability& capability : kCapabilities)
    if ((device.capabilities & capability.bit) != 0) out.emplace_back(capability.name);
  return out;
}

class DevicesCommand final : public Command {
 public:
  const char* name() const override { return "devices"; }
  const char* summary() const override {
    return "List the devices of this machine, and why some cannot be used";
  }
  const char* help() const override {
    return R"(The first column is what --device and gpushare_runtime_params.device take. A device that cannot be used is listed
with the reason. 'host' and 'sim' are always there: real work on CPU threads, and a simulated device.

Examples:
  gpushare devices
  gpushare devices --json -

JSON: version, devices[] {spec, name, usable, status, reason, compute_units, total_bytes, free_bytes, capabilities[]}.

Exit codes: 0 ok (also when no GPU is there), 1 failed, 2 bad usage.
)";
  }
  void declare(CLI::App& app) override { json_.declare(app); }
  base::Result<ExitCode> run() override {
    GPUSHARE_RETURN_IF_ERROR(check_files({}, {json_.file()}));
    std::vector<gpushare_device_info> devices;
    try {
      devices = gpushare::devices();
    } catch (const Error& error) {
      return base::Status(error.status(), error.what());
    }
    cluster::OrderedJson rows = cluster::OrderedJson::array();
    Table table;
    std::string reasons;  // below the table, where they have room
    table.add_column("device", Table::Align::kLeft);
    table.add_column("name", Table::Align::kLeft);
    table.add_column("units", Table::Align::kRight);
    table.add_column("memory", Table::Align::kRight);
    table.add_column("free", Table::Align::kRight);
    table.add_column("status", Table::Align::kLeft);
    for (const gpushare_device_info& device : devices) {
      const bool usable = device.status == GPUSHARE_OK;
      const std::string status = gpushare_status_name(device.status);
      rows.push_back(cluster::object({{"spec", device.spec},
                                      {"name", device.name},
                                      {"usable", usable},
                                      {"status", status},
                                      {"reason", device.reason},
                                      {"compute_units", device.compute_units},
                                      {"total_bytes", device.total_bytes},
                                      {"free_bytes", device.free_bytes},
                                      {"capabilities", capabilities_of(device)}}));
      std::string remark = status;
      if (usable) {
        remark = "ok";
        for (const std::string& capability : capabilities_of(device))
          remark += (remark == "ok" ? ": " : ", ") + capability;
      } else {
        reasons += std::string(device.spec) + ": " + wrap(device.reason, 100, 2) + '\n';
      }
      table.add_row({device.spec, device.name, usable ? std::to_string(device.compute_units) : "-",
                     usable ? base::format_bytes(device.total_bytes) : "-",
                     usable ? base::format_bytes(device.free_bytes) : "-", remark});
    }
    GPUSHARE_RETURN_IF_ERROR(json_.write(cluster::object({{"devices", rows}})));
    if (!json_.on_stdout())
      GPUSHARE_RETURN_IF_ERROR(write_stdout(table.to_string() + (reasons.empty() ? "" : "\n" + reasons)));
    return kExitOk;
  }

 private:
  JsonOption json_;
};

}  // namespace

std::unique_ptr<Command> make_devices_command() {
  return std::make_unique<DevicesCommand>();
}

}  // namespace gpushare::cli
