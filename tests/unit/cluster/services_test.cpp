// Services: exact placement against the thesis's optima and against brute force.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <functional>

#include "cluster/services/exact.hpp"
#include "cluster/services/placement.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

using namespace gpushare;
using namespace gpushare::cluster;
using namespace gpushare::cluster::services;

namespace {

// Rows of table A.1 of the thesis on interference-aware serving (V100): batch, latency ms, requests/s, memory %, AO %.
Service of(const std::string& name, double rate, double slo,
           std::initializer_list<std::array<double, 5>> rows) {
  Service service{name, name, rate, slo, {}};
  for (const auto& row : rows) {
    Configuration configuration;
    configuration.batch = static_cast<uint32_t>(row[0]);
    configuration.latency_ms = row[1];
    configuration.throughput_rps = row[2];
    configuration.memory_percent = row[3];
    configuration.compute_percent[0] = row[4];
    service.configurations.push_back(configuration);
  }
  return service;
}
Service alexnet(double rate, double slo) {
  return of(
      "alexnet", rate, slo,
      {{4, 1.4, 2801.75, 1.66, 69.17}, {8, 2.3, 3540.12, 2.08, 85.97}, {16, 3.1, 5196.69, 2.08, 85.93}});
}
Service gpt2(double rate, double slo) {
  return of("gpt2", rate, slo,
            {{4, 36.9, 108.28, 5.8, 91.28},
             {8, 73.2, 109.23, 10.48, 93.05},
             {16, 143.5, 111.49, 19.85, 93.84},
             {32, 273, 117.21, 38.58, 94.27}});
}
Service resnet50(double rate, double slo) {
  return of("resnet50", rate, slo,
            {{4, 6.8, 589.78, 1.16, 87.39}, {8, 9.6, 829.08, 1.77, 90.83}, {64, 57.3, 1117.12, 8.16, 93.95}});
}
Service t5(double rate, double slo) {
  return of("t5", rate, slo,
            {{4, 31.1, 128.74, 3.17, 97.18},
             {8, 58, 137.83, 4.88, 97.49},
             {16, 109.6, 146.02, 8.15, 97.74},
             {32, 213.1, 150.19, 16.08, 97.79}});
}
Service vgg19(double rate, double slo) {
  return of("vgg19", rate, slo, {{4, 9.8, 408.51, 4.19, 92.15}, {16, 26.2, 610.11, 10.58, 93.56}});
}
Service mobilenet(double rate, double slo) {
  return of("mobilenet_v2", rate, slo,
            {{4, 5.7, 698.08, 0.56, 95.79}, {16, 6.6, 2409.23, 2.11, 91.19}, {128, 41.1, 3117.9, 17, 93.8}});
}
Service bert(double rate, double slo) {
  return of("bert", rate, slo,
            {{4, 34.1, 117.34, 3.47, 85.89},
             {16, 128.1, 124.88, 5.25, 91.29},
             {32, 243.9, 131.19, 7.63, 92.9},
             {64, 485.3, 131.88, 12.4, 93.83}});
}

std::vector<Device> equal_devices(size_t count) {
  std::vector<Device> devices(count);
  for (size_t d = 0; d < count; ++d) devices[d].id = std::to_string(d);
  return devices;
}

// Every batch for every service, every set of devices for every service.
double brute_force(const std::vector<ExactService>& services, const std::vector<ExactClass>& classes) {
  std::vector<std::pair<size_t, double>> devices;  // class, speed
  for (size_t c = 0; c < classes.size(); ++c)
    for (size_t d = 0; d < classes[c].devices; ++d) devices.emplace_back(c, classes[c].speed);
  std::vector<double> compute(devices.size(), 0), memory(devices.size(), 0);
  double best = 0;
  const std::function<void(size_t, double)> next = [&](size_t s, double value) {
    best = std::max(best, value);
    if (s == services.size()) return;
    next(s + 1, value);
    for (const ExactOption& option : services[s].options)
      for (uint32_t set = 1; set < (1U << devices.size()); ++set) {
        bool fits = true;
        double throughput = 0;
        for (size_t d = 0; d < devices.size() && fits; ++d)
          if ((set >> d & 1) != 0) {
            fits = compute[d] + option.compute <= 1 + 1e-9 &&
                   memory[d] + option.memory[devices[d].first] <= 1 + 1e-9;
            throughput += option.throughput * devices[d].second;
          }
        if (!fits) continue;
        for (const double sign : {1.0, -1.0}) {
          for (size_t d = 0; d < devices.size(); ++d)
            if ((set >> d & 1) != 0) {
              compute[d] += sign * option.compute;
              memory[d] += sign * option.memory[devices[d].first];
            }
          if (sign > 0) next(s + 1, value + std::min(services[s].rate, throughput));
        }
      }
  };
  next(0, 0);
  return best;
}

}  // namespace

TEST_CASE("exact placement finds the thesis's optima on four devices under AO", "[cluster]") {
  // Thesis on interference-aware serving, chapter 6, table A.1 of V100 profiles: 1092.04, 1331.19 and 1624.88 requests/s.
  const auto devices = equal_devices(4);
  const Placement first = place_exactly({alexnet(400, 200), gpt2(400, 200), resnet50(400, 200), t5(400, 200)},
                                        devices, Metric::kAo);
  CHECK(first.goodput_rps == Approx(1092.04).epsilon(1e-9));
  CHECK(first.optimal);
  const Placement second = place_exactly(
      {resnet50(400, 300), vgg19(400, 300), mobilenet(400, 300), gpt2(400, 300), bert(400, 300)}, devices,
      Metric::kAo);
  CHECK(second.goodput_rps == Approx(1331.19).epsilon(1e-9));
  CHECK(second.optimal);
  const Placement third = place_exactly(
      {alexnet(500, 200), resnet50(500, 200), mobilenet(500, 200), bert(500, 200)}, devices, Metric::kAo);
  CHECK(third.goodput_rps == Approx(1624.88).epsilon(1e-9));
  CHECK(third.optimal);
}

TEST_CASE("exact placement agrees with brute force on small random instances", "[cluster]") {
  const uint64_t seed = test::seed();
  INFO("seed " << seed);
  test::Random random(seed);
  const uint64_t instances = test::number_from("GPUSHARE_CLUSTER_INSTANCES", 2000);
  size_t short_of = 0, over = 0, unproven = 0;
  for (uint64_t i = 0; i < instances; ++i) {
    std::vector<ExactClass> classes(test::uniform(random, 1, 2));
    for (ExactClass& one : classes) {
      one.devices = test::uniform(random, 1, classes.size() == 1 ? 4 : 2);
      one.speed = static_cast<double>(test::uniform(random, 1, 3)) / 2;
    }
    std::vector<ExactService> services(test::uniform(random, 1, 3));
    for (ExactService& service : services) {
      service.rate = static_cast<double>(test::uniform(random, 50, 400));
      service.options.resize(test::uniform(random, 0, 3));
      for (ExactOption& option : service.options) {
        option.throughput = static_cast<double>(test::uniform(random, 20, 300));
        option.compute = static_cast<double>(test::uniform(random, 5, 100)) / 100;
        for (size_t c = 0; c < classes.size(); ++c)
          option.memory.push_back(
              test::uniform(random, 0, 9) == 0 ? 2 : static_cast<double>(test::uniform(random, 1, 60)) / 100);
      }
    }
    const ExactResult found = solve_exact(services, classes, {});
    const double best = brute_force(services, classes);
    if (!found.optimal) ++unproven;
    if (found.value < best - 1e-6) ++short_of;
    if (found.value > best + 1e-6 || found.bound < best - 1e-6) ++over;
  }
  CHECK(short_of == 0);
  CHECK(over == 0);
  CHECK(unproven == 0);
}

TEST_CASE("placements keep every limit, and the bound holds when the search is cut", "[cluster]") {
  test::Random random(test::seed());
  for (int i = 0; i < 50; ++i) {
    std::vector<ExactService> services(8);
    for (ExactService& service : services) {
      service.rate = static_cast<double>(test::uniform(random, 100, 900));
      for (int o = 0; o < 4; ++o) {
        const double compute = static_cast<double>(test::uniform(random, 10, 90)) / 100;
        service.options.push_back(
            {0, compute * static_cast<double>(test::uniform(random, 200, 400)), compute, {0.1}, 0});
      }
    }
    const std::vector<ExactClass> classes = {{6, 1}};
    ExactLimits few;
    few.nodes = 20;
    const ExactResult cut = solve_exact(services, classes, few), whole = solve_exact(services, classes, {});
    CHECK(cut.value <= whole.value + 1e-6);
    CHECK(cut.bound >= whole.value - 1e-6);
    for (const ExactResult* result : {&cut, &whole}) {
      std::vector<double> compute(6, 0);
      std::vector<std::vector<bool>> there(6, std::vector<bool>(services.size(), false));
      for (const ExactReplicas& replica : result->replicas) {
        compute[replica.device] += services[replica.service].options[replica.option].compute;
        CHECK_FALSE(there[replica.device][replica.service]);
        there[replica.device][replica.service] = true;
      }
      CHECK(*std::max_element(compute.begin(), compute.end()) <= 1 + 1e-6);
    }
  }
}
