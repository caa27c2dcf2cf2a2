// measure_transmission [copy_gbps] [rounds]: time to first output of a model that is sent to the host device
// over a capped link while its layers execute, by the optimal groups, per layer, and unpipelined (one shot).
// Execution is a host function that takes a given time without using a core, as a GPU would
// (execution.hpp).
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "execution.hpp"
#include "loader/transmission.hpp"
#include "model_sizes.hpp"

namespace {

using namespace gpushare;
using loader::GroupingCosts;
using loader::LayerCost;

struct Run {
  device::Device& device;
  const device::Stream& link;
  const device::Stream& lane;
  std::shared_ptr<const loader::Image> image;
  device::Address block;
  const std::vector<LayerCost>& layers;

  // Milliseconds from the first copy's request until the last layer has executed.
  base::Result<double> operator()(const std::vector<uint32_t>& ends) const {
    std::vector<bench::Execution> executions;
    executions.reserve(ends.size());
    uint64_t lane_free_ns = 0;
    const uint64_t begin_ns = base::host_now_ns();
    GPUSHARE_ASSIGN_OR_RETURN(const std::unique_ptr<loader::Transmission> transmission,
                              loader::Transmission::start(device, link, image, block, ends));
    const uint64_t sent_ns = base::host_now_ns();
    uint32_t first = 0;
    for (size_t group = 0; group < ends.size(); ++group) {
      const uint32_t end = ends[group];
      double execution_ms = 0;
      for (uint32_t i = first; i < end; ++i) execution_ms += layers[i].execution_ms;
      executions.push_back(
          {&lane_free_ns, static_cast<uint64_t>(execution_ms * 1e6), [&transmission, group, sent_ns] {
             const auto after_ns = transmission->arrived_ns(group);
             return sent_ns + (after_ns.ok() ? *after_ns : 0);
           }});
      GPUSHARE_RETURN_IF_ERROR(transmission->make_usable(first, end, lane));
      GPUSHARE_RETURN_IF_ERROR(lane.launch_host(bench::Execution::run, &executions.back()));
      first = end;
    }
    GPUSHARE_RETURN_IF_ERROR(lane.synchronize());
    return static_cast<double>(base::host_now_ns() - begin_ns) / 1e6;
  }
};

base::Status measure(const std::string& model, double copy_gbps, int rounds, double execute_ratio) {
  GPUSHARE_ASSIGN_OR_RETURN(const std::unique_ptr<device::Device> device,
                            device::Device::open(base::format("host?copy_gbps=%g", copy_gbps)));
  GPUSHARE_ASSIGN_OR_RETURN(const loader::LinkCosts link_costs, loader::calibrate(*device));
  std::vector<uint64_t> bytes = bench::model_layer_bytes(model);
  const bool made = bytes.empty();
  if (made) bytes = bench::made_layer_bytes(300);
  std::vector<loader::Layer> layout;
  for (size_t i = 0; i < bytes.size(); ++i) layout.push_back({std::to_string(i), 0, bytes[i]});
  loader::ChunkPool pool(*device, 16ull << 20);
  GPUSHARE_ASSIGN_OR_RETURN(const std::shared_ptr<loader::Image> image,
                            loader::Image::create(pool, model, std::move(layout)));
  for (const loader::Image::Piece& piece : image->pieces(0, image->bytes()))
    std::memset(piece.host, 1, piece.bytes);

  std::vector<LayerCost> layers = loader::layer_costs(*image, link_costs, {});
  double transmit_ms = link_costs.call_overhead_ms, execution_ms = 0;
  for (LayerCost& layer : layers) {
    layer.execution_ms = layer.transmit_ms * execute_ratio;
    transmit_ms += layer.transmit_ms;
    execution_ms += layer.execution_ms;
  }
  GroupingCosts costs;
  costs.call_overhead_ms = link_costs.call_overhead_ms;
  costs.group_overhead_ms = link_costs.group_overhead_ms;
  GPUSHARE_ASSIGN_OR_RETURN(const loader::Grouping plan, loader::plan_groups(layers, costs));

  GPUSHARE_ASSIGN_OR_RETURN(const device::Address block, device->alloc(image->bytes()));
  GPUSHARE_ASSIGN_OR_RETURN(const device::Stream link, device->create_stream());
  GPUSHARE_ASSIGN_OR_RETURN(const device::Stream lane, device->create_stream());
  const Run run{*device, link, lane, image, block, layers};

  double first_group_ms = link_costs.call_overhead_ms;
  for (uint32_t i = 0; i < plan.ends.front(); ++i) first_group_ms += layers[i].transmit_ms;
  const double target_ms = std::max(transmit_ms, execution_ms) + first_group_ms;
  std::printf(
      "%s%s: %zu layers, %.1f MB; host, link capped at %g GB/s, calibrated %.2f GB/s, %.1f us a call, %.1f "
      "us a "
      "group\n",
      model.c_str(), made ? " (made: the shared data folder is not there)" : "", layers.size(),
      static_cast<double>(image->bytes()) / 1e6, copy_gbps, link_costs.bytes_per_ms / 1e6,
      link_costs.call_overhead_ms * 1e3, link_costs.group_overhead_ms * 1e3);
  std::printf("transmission %.1f ms, execution %.1f ms, first group %.1f ms: target %.1f ms\n", transmit_ms,
              execution_ms, first_group_ms, target_ms);

  const std::pair<const char*, std::vector<uint32_t>> ways[] = {
      {"planned groups", plan.ends},
      {"per layer", loader::per_layer_groups(layers.size(), 0)},
      {"unpipelined", loader::one_shot_groups(layers.size(), 0)}};
  std::vector<double> times[std::size(ways)];
  for (int round = 0; round <= rounds; ++round) {
    for (size_t way = 0; way < std::size(ways); ++way) {
      GPUSHARE_ASSIGN_OR_RETURN(const double ms, run(ways[way].second));
      if (round > 0) times[way].push_back(ms);  // the first touches the memory
    }
  }
  std::printf("%-16s %7s %12s %10s %10s %9s %9s\n", "", "groups", "predicted ms", "median ms", "/target",
              "least ms", "/target");
  for (size_t way = 0; way < std::size(ways); ++way) {
    std::sort(times[way].begin(), times[way].end());
    GPUSHARE_ASSIGN_OR_RETURN(const double predicted,
                              loader::grouping_makespan_ms(layers, costs, ways[way].second));
    const double median = times[way][times[way].size() / 2];
    std::printf("%-16s %7zu %12.2f %10.2f %10.3f %9.2f %9.3f\n", ways[way].first, ways[way].second.size(),
                predicted, median, median / target_ms, times[way].front(), times[way].front() / target_ms);
  }
  std::printf("\n");
  return device->free(block);
}

}  // namespace

int main(int argc, char** argv) {
  const double copy_gbps = argc > 1 ? std::atof(argv[1]) : 1.2;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 7;
  if (copy_gbps <= 0 || rounds < 1) {
    std::fprintf(stderr, "usage: measure_transmission [copy_gbps above 0] [rounds]\n");
    return 2;
  }
  for (const char* model : {"resnet101", "bert_base"}) {
    const base::Status status = measure(model, copy_gbps, rounds, 1.0);
    if (!status.ok()) {
      std::fprintf(stderr, "measure_transmission: %s\n", status.message().c_str());
      return 1;
    }
  }
  return 0;
}
