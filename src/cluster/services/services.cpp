// The kind "services": requests with deadlines. Reads the document, asks one of the solvers beside this file, writes the result.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>

#include "cluster/json.hpp"
#include "cluster/kinds.hpp"
#include "cluster/services/igniter.hpp"
#include "cluster/services/kernels.hpp"
#include "cluster/services/model.hpp"
#include "cluster/services/placement.hpp"
#include "cluster/services/portfolio.hpp"
#include "cluster/services/serving.hpp"

namespace gpushare::cluster {
namespace {

using namespace services;

Multiprocessors read_multiprocessors(Fields& fields) {
  constexpr uint64_t kMost = 1'000'000'000;
  fields.about(
      nullptr,
      "The device that profiles are of: how many SMs it has, and the most threads, blocks, registers and "
      "bytes of shared memory of each.");
  Multiprocessors sms;
  sms.count = static_cast<uint32_t>(fields.whole("count", 1, 1'000'000));
  sms.threads = static_cast<uint32_t>(fields.whole("threads", 1, 1'000'000));
  sms.blocks = static_cast<uint32_t>(fields.whole("blocks", 1, 1'000'000));
  sms.registers = fields.whole("registers", 1, kMost);
  sms.shared_bytes = fields.whole("shared_bytes", 0, kMost);
  return sms;
}

// Without begin_us, kernels run one after the other.
std::array<double, kMetrics> read_kernels(Fields& configuration, const Multiprocessors& sms) {
  KernelMeter meter(sms);
  double end_us = 0;
  bool told = false;  // when kernels begin
  configuration.about(
      "kernels",
      "All of one batch. They give ao_percent, wao_percent and wsm_percent where these are not given: the "
      "greatest occupancy, and occupancy and SM utilisation weighted by time.");
  configuration.each("kernels", 1, [&](Fields& fields, size_t index) {
    fields.about(nullptr,
                 "A launch. Without begin_us, which all kernels of a configuration have or none, one runs "
                 "after the other.");
    fields.about("blocks", "In the grid.");
    fields.about("threads", "In a block.");
    fields.about("registers", "For each thread.");
    fields.about("shared_bytes", "Shared memory of a block, static and dynamic.");
    fields.about("blocks_per_sm",
                 "By the driver's occupancy calculator; else the least of what threads, registers, shared "
                 "memory and blocks allow.");
    fields.about("occupancy_percent", "Measured; else that of the blocks that run at once.");
    KernelLaunch kernel;
    kernel.blocks = fields.whole("blocks", 1, uint64_t{1} << 50);
    kernel.threads = static_cast<uint32_t>(fields.whole("threads", 1, 1'000'000));
    kernel.registers = static_cast<uint32_t>(fields.whole_or("registers", 0, 1'000'000, 0));
    kernel.shared_bytes = fields.whole_or("shared_bytes", 0, uint64_t{1} << 50, 0);
    kernel.blocks_per_sm = static_cast<uint32_t>(fields.whole_or("blocks_per_sm", 1, 1'000'000, 0));
    if (fields.has("occupancy_percent"))
      kernel.occupancy = fields.number("occupancy_percent", {0, 100, false}) / 100;
    const double time_us = fields.number("time_us", kPositive);
    const bool begins = fields.has("begin_us");
    if (index == 0) told = begins;
    if (begins != told) fields.refuse_all("give begin_us for all kernels of the configuration or for none");
    const double begin_us = begins ? fields.number("begin_us", kNotNegative) : end_us;
    if (!fields.ok()) return;
    if (blocks_per_sm(sms, kernel) == 0)
      return fields.refuse_all(
          "a block needs more than a multiprocessor has of threads, registers or shared memory");
    end_us = begin_us + time_us;
    meter.add(kernel, begin_us, end_us);
  });
  meter.end_batch();
  return meter.percent();
}

// Metrics that are not given come from the kernels.
Configuration read_configuration(Fields& fields, const std::optional<Multiprocessors>& sms) {
  Configuration configuration;
  configuration.batch = static_cast<uint32_t>(fields.whole("batch", 1, 1'000'000));
  configuration.latency_ms = fields.number("latency_ms", kPositive);
  configuration.throughput_rps = fields.number("throughput_rps", kPositive);
  fields.about(nullptr, "Profiled on the first device of speed 1, or the first device if none has it.");
  fields.about("memory_percent", "Part of the device that the profile is of.");
  fields.exactly_one({"memory_percent", "memory_bytes"});
  if (fields.has("memory_percent"))
    configuration.memory_percent = fields.number("memory_percent", kNotNegative);
  if (fields.has("memory_bytes"))
    configuration.memory_bytes = static_cast<double>(fields.whole("memory_bytes", 0, uint64_t{1} << 50));
  std::array<double, kMetrics> measured = {-1, -1, -1};
  if (fields.has("kernels")) {
    if (!sms)
      fields.refuse_all("kernels: the document has no multiprocessors");
    else
      measured = read_kernels(fields, *sms);
    configuration.of_kernels = true;
  }
  for (size_t m = 0; m < kMetrics; ++m)
    configuration.compute_percent[m] =
        fields.has(kMetricFields[m]) ? fields.number(kMetricFields[m], kNotNegative) : measured[m];
  return configuration;
}

class ServicesProblem final : public Problem {
 public:
  ServicesProblem(Fields& document, const std::vector<Device>& devices) : devices_(devices) {
    std::optional<Multiprocessors> sms;
    if (document.has("multiprocessors"))
      document.with("multiprocessors", [&](Fields& inner) { sms = read_multiprocessors(inner); });
    Fields::Names seen;
    document.each("services", 1, [&](Fields& fields, size_t index) {
      Service service;
      service.name = fields.name(seen, index);
      fields.about("model", "Its name in the measurements; the service's unless given.");
      service.model = fields.text_or("model", service.name.c_str());
      service.rate_rps = fields.number("rate_rps", kPositive);
      service.slo_ms = fields.number("slo_ms", kPositive);
      if (fields.has("configurations"))
        fields.each("configurations", 0, [&](Fields& inner, size_t) {
          service.configurations.push_back(read_configuration(inner, sms));
        });
      services_.push_back(std::move(service));
    });
    tell_profiled_device();
    // Measurements stand in the document itself, laid out as they were published, or in an object of their own.
    document.at_most_one({"measurements", "hardware"});
    document.about("measurements", "For igniter. The fields may also stand in the document itself.");
    if (document.has("measurements"))
      document.with("measurements", [&](Fields& inner) { read_measurements(inner); });
    if (document.all_or_none({"hardware", "batches", "shares", "models"})) read_measurements(document);
    document.about("run", "For run.");
    if (document.has("run")) {
      document.with("run", [&](Fields& inner) {
        inner.about("duration_s", "Requests arrive at random (Poisson) for so long.");
        inner.about("noise", "The relative standard deviation of a batch's time.");
        serving_.duration_s = inner.number_or("duration_s", kPositive, serving_.duration_s);
        serving_.noise = inner.number_or("noise", {0, 10, false}, 0);
      });
    }
  }

  base::Status solve(std::string_view choice, OrderedJson& result) override {
    GPUSHARE_ASSIGN_OR_RETURN(const Placement placement, place(choice, Goal::kCapacity, devices_));
    write(placement, result);
    return {};
  }

  base::Status play(std::string_view choice, const PlayOptions& options, OrderedJson& result,
                    std::vector<PlaySpan>* spans) override {
    const std::vector<double> times = changes();
    ServingResult sum;
    sum.services.resize(services_.size());
    std::vector<double> batches(services_.size(), 0);
    Placement before;
    OrderedJson rows = OrderedJson::array();
    for (size_t i = 0; i + 1 < times.size(); ++i) {
      const double from = times[i], to = times[i + 1];
      GPUSHARE_ASSIGN_OR_RETURN(Placement placement, place_up(choice, from));
      ServingOptions serving = serving_;
      serving.noise = options.noise.value_or(serving_.noise);
      serving.seed = options.seed + i * 1'000'003;
      serving.duration_s = to - from;
      for (const Device& device : devices_)
        serving.fails.push_back(is_up(device, from) && !is_up(device, to));
      std::vector<PlaySpan> own;
      GPUSHARE_ASSIGN_OR_RETURN(ServingResult played, serve(services_, devices_, placement, serving,
                                                            spans == nullptr ? nullptr : &own));
      for (PlaySpan& span : own) {
        span.begin_s += from;
        span.end_s += from;
        spans->push_back(std::move(span));
      }
      add(played, (to - from) / serving_.duration_s, sum, batches);
      if (i == 0) {
        write(placement, result);
        result["planned_rps"] = placement.goodput_rps;
      } else {
        rows.push_back(object({{"at_s", from},
                               {"devices_up", std::count_if(devices_.begin(), devices_.end(),
                                                            [&](const Device& d) { return is_up(d, from); })},
                               {"replicas", placement.replicas.size()},
                               {"new_replicas", new_replicas(before, placement)},
                               {"goodput_rps", played.goodput_rps}}));
      }
      before = std::move(placement);
    }
    result["offered_rps"] = sum.offered_rps;
    result["goodput_rps"] = sum.goodput_rps;
    result["throughput_rps"] = sum.throughput_rps;
    result.erase("served_rps");  // what was planned for each
    if (!rows.empty()) result["changes"] = std::move(rows);
    write_services(sum, batches, result);
    return {};
  }

 private:
  // Where devices have different memories, percentages are of that of the first device of speed 1, which profiles are
  // of; without one, of the first.
  void tell_profiled_device() {
    if (devices_.empty() || std::all_of(devices_.begin(), devices_.end(), [&](const Device& device) {
          return device.memory_bytes == devices_[0].memory_bytes;
        }))
      return;
    const auto profiled = std::find_if(devices_.begin(), devices_.end(),
                                       [](const Device& device) { return device.speed == 1; });
    for (Service& service : services_)
      for (Configuration& configuration : service.configurations)
        configuration.profiled_on(profiled == devices_.end() ? devices_[0] : *profiled);
  }

  // The begin, the times at which devices fail or come back, and the end.
  std::vector<double> changes() const {
    std::vector<double> times{0, serving_.duration_s};
    for (const DeviceChange& change : device_changes(devices_))
      if (change.at_s > 0 && change.at_s < serving_.duration_s) times.push_back(change.at_s);
    std::sort(times.begin(), times.end());
    times.erase(std::unique(times.begin(), times.end()), times.end());
    return times;
  }

  // The scheduler's placement on the devices that are up then.
  base::Result<Placement> place_up(std::string_view choice, double at_s) const {
    std::vector<Device> up;
    std::vector<size_t> index;
    for (size_t d = 0; d < devices_.size(); ++d) {
      if (!is_up(devices_[d], at_s)) continue;
      up.push_back(devices_[d]);
      index.push_back(d);
    }
    if (up.empty()) {
      Placement none;
      for (size_t s = 0; s < services_.size(); ++s) none.unserved.emplace_back(s, "no device is up");
      return none;
    }
    GPUSHARE_ASSIGN_OR_RETURN(Placement placement, place(choice, Goal::kInTime, up));
    if (choice == "gpushare") placement = best_played(services_, up, known_to_ours(std::move(placement), up));
    for (Replica& replica : placement.replicas) replica.device = index[replica.device];
    return placement;
  }

  static size_t new_replicas(const Placement& before, const Placement& after) {
    return static_cast<size_t>(
        std::count_if(after.replicas.begin(), after.replicas.end(), [&](const Replica& replica) {
          return std::none_of(before.replicas.begin(), before.replicas.end(), [&](const Replica& old) {
            return old.service == replica.service && old.device == replica.device &&
                   old.batch == replica.batch;
          });
        }));
  }

  // Adds what was played in a part of the time.
  static void add(ServingResult& played, double part, ServingResult& sum, std::vector<double>& batches) {
    sum.offered_rps += part * played.offered_rps;
    sum.goodput_rps += part * played.goodput_rps;
    sum.throughput_rps += part * played.throughput_rps;
    for (size_t s = 0; s < sum.services.size(); ++s) {
      const ServedService& from = played.services[s];
      ServedService& to = sum.services[s];
      to.requests += from.requests;
      to.in_time += from.in_time;
      to.late += from.late;
      to.dropped += from.dropped;
      to.unplaced += from.unplaced;
      to.latencies_ms.insert(to.latencies_ms.end(), from.latencies_ms.begin(), from.latencies_ms.end());
      if (from.batch_mean > 0) batches[s] += static_cast<double>(from.in_time + from.late) / from.batch_mean;
    }
  }

  void write_services(ServingResult& sum, const std::vector<double>& batches, OrderedJson& result) const {
    OrderedJson rows = OrderedJson::array();
    for (size_t s = 0; s < services_.size(); ++s) {
      ServedService& served = sum.services[s];
      const double answered = static_cast<double>(served.in_time + served.late);
      rows.push_back(object({{"service", services_[s].name},
                             {"requests", served.requests},
                             {"in_time", served.in_time},
                             {"late", served.late},
                             {"dropped", served.dropped},
                             {"unplaced", served.unplaced},
                             {"latency_p50_ms", percentile(served.latencies_ms, 0.5)},
                             {"latency_p99_ms", percentile(served.latencies_ms, 0.99)},
                             {"batch_mean", batches[s] > 0 ? answered / batches[s] : 0.0}}));
    }
    result["services"] = std::move(rows);
  }

  void read_measurements(Fields& fields) {
    for (const char* said : {"about", "known_plan"}) {
      fields.about(said, "Stands in the published file; nothing is read.");
      fields.has(said);
    }
    igniter_ = read_igniter(fields);
    measured_ = true;
  }

  base::Result<Placement> place(std::string_view choice, Goal goal,
                                const std::vector<Device>& devices) const {
    for (size_t m = 0; m < kMetrics; ++m)
      if (choice == std::string("milp-") + (m == 0 ? "ao" : m == 1 ? "wao" : "wsm"))
        return place_exactly(services_, devices, static_cast<Metric>(m));
    if (choice == "gpushare") return place_best(services_, devices, goal);
    if (choice == "usher") return place_by_usher(services_, devices, Metric::kAo);
    if (choice == "usher-wao") return place_by_usher(services_, devices, Metric::kWao);
    if (!measured_)
      return base::Status(
          GPUSHARE_INVALID_ARGUMENT,
          "measurements: the field is missing; this scheduler needs hardware, batches, shares and models");
    return place_by_igniter(igniter_, services_, devices);
  }

  // Ours first, then what each published solver would do.
  std::vector<Placement> known_to_ours(Placement ours, const std::vector<Device>& devices) const {
    std::vector<Placement> all{std::move(ours)};
    for (const char* rule : {"usher", "usher-wao", "milp-ao", "milp-wao", "milp-wsm", "igniter"}) {
      if (std::string_view(rule) == "igniter" && !measured_) continue;
      base::Result<Placement> placement = place(rule, Goal::kInTime, devices);
      if (placement.ok()) all.push_back(std::move(*placement));
    }
    return all;
  }

  // The replica's memory as a percentage of its device; 0 where no configuration says it (igniter's measurements).
  double memory_percent(const Replica& replica) const {
    for (const Configuration& configuration : services_[replica.service].configurations)
      if (configuration.batch == replica.batch)
        return 100 * configuration.memory_fraction(devices_[replica.device]);
    return 0;
  }

  void write(const Placement& placement, OrderedJson& result) const {
    result["goodput_rps"] = placement.goodput_rps;
    result["bound_rps"] = placement.bound_rps;
    result["optimal"] = placement.optimal;
    OrderedJson placements = OrderedJson::array();
    std::vector<double> throughput(services_.size(), 0);
    for (const Replica& replica : placement.replicas) {
      throughput[replica.service] += replica.throughput_rps;
      placements.push_back(object({{"service", services_[replica.service].name},
                                   {"device", devices_[replica.device].id},
                                   {"batch", replica.batch},
                                   {"share_percent", replica.share_percent},
                                   {"memory_percent", memory_percent(replica)},
                                   {"latency_ms", replica.latency_ms}}));
    }
    result["placements"] = std::move(placements);
    OrderedJson::object_t served;  // appended to, not searched: names are told apart already
    for (size_t s = 0; s < services_.size(); ++s)
      served.OrderedJson::object_t::Container::emplace_back(services_[s].name,
                                                            std::min(services_[s].rate_rps, throughput[s]));
    result["served_rps"] = std::move(served);
    OrderedJson unserved = OrderedJson::array();
    for (const auto& [service, reason] : placement.unserved)
      unserved.push_back(object({{"service", services_[service].name}, {"reason", reason}}));
    result["unserved"] = std::move(unserved);
    OrderedJson measured = OrderedJson::array();
    for (const Service& service : services_)
      for (const Configuration& configuration : service.configurations) {
        if (!configuration.of_kernels) continue;
        measured.push_back(object({{"service", service.name}, {"batch", configuration.batch}}));
        for (size_t m = 0; m < kMetrics; ++m)
          measured.back()[kMetricFields[m]] = configuration.compute_percent[m];
      }
    if (!measured.empty()) result["measured"] = std::move(measured);
  }

  const std::vector<Device>& devices_;
  std::vector<Service> services_;
  IgniterProfile igniter_;
  bool measured_ = false;
  ServingOptions serving_;
};

}  // namespace

const Kind& services_kind() {
  static const Kind kind = {
      "services",
      "scheduler",
      {"igniter", "usher", "usher-wao", "milp-ao", "milp-wao", "milp-wsm", "gpushare"},
      {"gpushare"},
      {"igniter", "usher", "usher-wao", "milp-ao", "milp-wao", "milp-wsm", "gpushare"},
      {"gpushare"},
      true,
      [](Fields& document, const std::vector<Device>& devices) -> std::unique_ptr<Problem> {
        return std::make_unique<ServicesProblem>(document, devices);
      },
      true};
  return kind;
}

}  // namespace gpushare::cluster
