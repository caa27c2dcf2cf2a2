// Devices are opened and measured on threads of their own, because a driver may hang there: it then holds up no other
// device, and the daemon only until ServiceOptions::open_patience_ns.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "base/log.hpp"
#include "base/units.hpp"
#include "daemon/log_failure.hpp"
#include "daemon/service.hpp"
#include "device/device.hpp"
#include "device/registry.hpp"

namespace gpushare::daemon {

// Processes open the device themselves; the service needs only its size.
base::Result<Service::Found> Service::find(const std::string& spec) {
  GPUSHARE_ASSIGN_OR_RETURN(const std::unique_ptr<device::Device> device, device::Device::open(spec));
  Found found;
  found.info = device->info();
  found.name = spec == "auto" ? device->spec() : spec;
  found.sharable =
      device->can(GPUSHARE_DEVICE_CAP_VIRTUAL_MEMORY) && !device->can(GPUSHARE_DEVICE_CAP_VIRTUAL_TIME);
  found.granularity_bytes = device->can(GPUSHARE_DEVICE_CAP_IPC) ? found.info.mapping_granularity_bytes : 0;
  found.identity = identity_of(found.info.pci_address);
  log_failure(device->close(), "closing the device");
  return found;
}

base::Result<std::vector<std::string>> gpu_specs() {
  using Specs = std::vector<std::string>;
  constexpr std::chrono::seconds kPatience{20};
  static base::Hangs hangs;
  return base::ask_patiently<Specs>(hangs, "the driver of the GPUs", kPatience, []() -> base::Result<Specs> {
    Specs specs;
    std::string reasons;
    for (const device::Listed& each : device::list_devices()) {
      if (each.spec == "host" || each.spec == "sim") continue;
      if (each.status.ok())
        specs.push_back(each.spec);
      else
        reasons += (reasons.empty() ? "" : "; ") + each.spec + ": " + each.status.message();
    }
    if (specs.empty()) return base::Status(GPUSHARE_UNAVAILABLE, reasons.empty() ? "there is none" : reasons);
    return specs;
  });
}

base::Status Service::open_devices() {
  devices_.reserve(options_.devices.size());
  named_ = options_.devices;
  const auto until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(options_.open_patience_ns);
  for (const std::string& spec : options_.devices) {
    Late& late = late_.emplace_back(Late{spec, {}, {}});
    GPUSHARE_ASSIGN_OR_RETURN(
        late.found, base::Asked<Found>::start("the device's driver", [spec] { return find(spec); }));
  }
  // After a failure the others are waited for too: the program may end on it, and drivers do not like that while they open.
  base::Status failed;
  std::string left_out;
  for (Late& late : late_) {
    std::optional<base::Result<Found>> found = late.found->wait_until(until);
    if (!found) continue;
    late.found.reset();
    if (!found->ok() && options_.leave_out_failed) {
      left_out += (left_out.empty() ? "" : "; ") + late.spec + ": " + found->status().message();
      std::erase(named_, late.spec);
      continue;
    }
    if (options_.first_alone) named_ = {late.spec};
    if (failed.ok()) failed = found->ok() ? share(late.spec, **std::move(found)) : found->status();
    if (options_.first_alone) break;
  }
  GPUSHARE_RETURN_IF_ERROR(failed);
  if (options_.first_alone && !devices_.empty()) late_.clear();
  std::erase_if(late_, [](const Late& late) { return late.found == nullptr; });
  if (devices_.empty()) return {GPUSHARE_UNAVAILABLE, late_.empty() ? left_out : late(late_.front().spec)};
  if (!left_out.empty()) base::log(base::kWarning, "daemon: left out: " + left_out);
  for (const Late& each : late_) base::log(base::kWarning, "daemon: " + late(each.spec));
  first_devices_ = devices_.size();
  return {};
}

bool Service::take_late() {
  bool waits = false;
  for (Late& late : late_) {
    if (late.found == nullptr) continue;
    std::optional<base::Result<Found>> found = late.found->wait_until({});
    if (!found) {
      waits = true;
      continue;
    }
    late.found.reset();
    late.failure = found->ok() ? share(late.spec, **std::move(found)) : found->status();
    if (late.failure.ok())
      base::log(base::kInfo, "daemon: device '" + late.spec + "' has opened and is served");
    else
      base::log(base::kError, "daemon: " + this->late(late.spec));
  }
  std::erase_if(late_, [](const Late& late) { return late.found == nullptr && late.failure.ok(); });
  return waits;
}

std::string Service::late(const std::string& name) const {
  for (const Late& late : late_) {
    if (late.spec != name) continue;
    if (late.found == nullptr) return "device '" + name + "' cannot be served: " + late.failure.message();
    return "device '" + name + "' has not opened for " +
           base::format_duration_ns(base::host_now_ns() - started_ns_) +
           ", its driver hangs: it is served once it opens";
  }
  return {};
}

base::Status Service::share(const std::string& spec, Found found) {
  const std::string& name = found.name;
  const gpushare_backend_device_info& info = found.info;
  if (!found.sharable)
    return {GPUSHARE_UNSUPPORTED, "processes cannot share device '" + name +
                                      "', which needs virtual memory and real time; use one such as host"};
  if (name.size() >= sizeof(client::Welcome::device))
    return {GPUSHARE_INVALID_ARGUMENT, base::format("the device has %zu characters; allowed are %zu",
                                                    name.size(), sizeof(client::Welcome::device) - 1)};
  for (const auto& each : devices_)
    if (each->name() == name)
      return {GPUSHARE_INVALID_ARGUMENT,
              "device '" + name +
                  "' is named twice; a device is shared once, or its memory would be promised twice"};
  uint64_t capacity_bytes = options_.capacity_bytes;
  if (capacity_bytes == 0) capacity_bytes = info.free_bytes - info.free_bytes / 64;
  if (capacity_bytes > info.total_bytes)
    return {GPUSHARE_EXCEEDS_CAPACITY, "a capacity of " + base::format_bytes(capacity_bytes) +
                                           " asked; device '" + name + "' has " +
                                           base::format_bytes(info.total_bytes)};
  // Sessions of the daemon before this one keep their memory, so most of the device may be in use.
  if (capacity_bytes > info.free_bytes)
    base::log(base::kWarning, "daemon: of device '" + name + "' " + base::format_bytes(info.free_bytes) +
                                  " are free now, of a capacity of " + base::format_bytes(capacity_bytes) +
                                  ": a session that finds no memory waits");
  GPUSHARE_ASSIGN_OR_RETURN(std::unique_ptr<sched::Policy> policy, options_.make_policy
                                                                       ? options_.make_policy()
                                                                       : sched::make_policy(options_.policy));
  devices_.push_back(std::make_unique<SharedDevice>(name, capacity_bytes, found.granularity_bytes, options_,
                                                    log_limit_, std::move(policy), [this] { wake(); }));
  devices_.back()->set_pci_address(info.pci_address, std::move(found.identity));
  if (spec == named_.front()) first_device_ = devices_.back().get();
  return {};
}

}  // namespace gpushare::daemon
