// The kind "services": requests with deadlines. Reads the document, asks one of the solvers beside this file, writes the result.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cluster/kinds.hpp"
#include "cluster/services/model.hpp"
#include "cluster/services/placement.hpp"

namespace gpushare::cluster {
namespace {

using namespace services;

Configuration read_configuration(Fields& fields) {
  Configuration configuration;
  configuration.batch = static_cast<uint32_t>(fields.whole("batch", 1, 1'000'000));
  configuration.latency_ms = fields.number("latency_ms", kPositive);
  configuration.throughput_rps = fields.number("throughput_rps", kPositive);
  const bool percent = fields.has("memory_percent"), bytes = fields.has("memory_bytes");
  if (percent == bytes) fields.refuse_all("give one of memory_percent and memory_bytes");
  if (percent) configuration.memory_percent = fields.number("memory_percent", kNotNegative);
  if (bytes)
    configuration.memory_bytes = static_cast<double>(fields.whole("memory_bytes", 0, uint64_t{1} << 50));
  for (size_t m = 0; m < kMetrics; ++m)
    configuration.compute_percent[m] = fields.number_or(kMetricFields[m], kNotNegative, -1);
  return configuration;
}

class ServicesProblem final : public Problem {
 public:
  ServicesProblem(Fields& document, const std::vector<Device>& devices) : devices_(devices) {
    Fields::Names seen;
    document.each("services", 1, [&](Fields& fields, size_t index) {
      Service service;
      service.name = fields.name(seen, index);
      service.rate_rps = fields.number("rate_rps", kPositive);
      service.slo_ms = fields.number("slo_ms", kPositive);
      if (fields.has("configurations"))
        fields.each("configurations", 0, [&](Fields& inner, size_t) {
          service.configurations.push_back(read_configuration(inner));
        });
      services_.push_back(std::move(service));
    });
  }

  base::Status solve(std::string_view choice, OrderedJson& result) override {
    GPUSHARE_ASSIGN_OR_RETURN(const Placement placement, place(choice));
    write(placement, result);
    return {};
  }

 private:
  base::Result<Placement> place(std::string_view choice) const {
    for (size_t m = 0; m < kMetrics; ++m)
      if (choice == std::string("milp-") + (m == 0 ? "ao" : m == 1 ? "wao" : "wsm"))
        return place_exactly(services_, devices_, static_cast<Metric>(m));
    return base::Status(GPUSHARE_INTERNAL, "no such scheduler");
  }

  void write(const Placement& placement, OrderedJson& result) const {
    result["goodput_rps"] = placement.goodput_rps;
    result["bound_rps"] = placement.bound_rps;
    result["optimal"] = placement.optimal;
    OrderedJson placements = OrderedJson::array();
    std::vector<double> throughput(services_.size(), 0);
    for (const Replica& replica : placement.replicas) {
      const Service& service = services_[replica.service];
      const Configuration& configuration = service.configurations[replica.configuration];
      const Device& device = devices_[replica.device];
      throughput[replica.service] += configuration.throughput_rps * device.speed;
      placements.push_back({{"service", service.name},
                            {"device", device.id},
                            {"batch", configuration.batch},
                            {"share_percent", replica.share_percent}});
    }
    result["placements"] = std::move(placements);
    OrderedJson served = OrderedJson::object();
    for (size_t s = 0; s < services_.size(); ++s)
      served[services_[s].name] = std::min(services_[s].rate_rps, throughput[s]);
    result["served_rps"] = std::move(served);
  }

  const std::vector<Device>& devices_;
  std::vector<Service> services_;
};

}  // namespace

const Kind& services_kind() {
  static const Kind kind = {
      "services",
      "scheduler",
      {"milp-ao", "milp-wao", "milp-wsm"},
      {"milp-wao"},
      true,
      [](Fields& document, const std::vector<Device>& devices) -> std::unique_ptr<Problem> {
        return std::make_unique<ServicesProblem>(document, devices);
      },
      R"({
        "properties": {
          "services": {"type": "array", "minItems": 1, "maxItems": 1000000, "items": {"$ref": "#/$defs/service"}}
        },
        "required": ["services"],
        "$defs": {
          "service": {
            "type": "object",
            "properties": {
              "name": {"$ref": "#/$defs/name"},
              "rate_rps": {"$ref": "#/$defs/positive"},
              "slo_ms": {"$ref": "#/$defs/positive"},
              "configurations": {"type": "array", "maxItems": 1000000, "items": {"$ref": "#/$defs/service_configuration"}}
            },
            "required": ["name", "rate_rps", "slo_ms"],
            "additionalProperties": false
          },
          "service_configuration": {
            "description": "Profiled on a device of speed 1. One of memory_percent and memory_bytes.",
            "type": "object",
            "properties": {
              "batch": {"type": "integer", "minimum": 1},
              "latency_ms": {"$ref": "#/$defs/positive"},
              "throughput_rps": {"$ref": "#/$defs/positive"},
              "memory_percent": {"$ref": "#/$defs/not_negative"},
              "memory_bytes": {"type": "integer", "minimum": 0},
              "ao_percent": {"$ref": "#/$defs/not_negative"},
              "wao_percent": {"$ref": "#/$defs/not_negative"},
              "wsm_percent": {"$ref": "#/$defs/not_negative"}
            },
            "required": ["batch", "latency_ms", "throughput_rps"],
            "additionalProperties": false
          }
        }
      })"};
  return kind;
}

}  // namespace gpushare::cluster
