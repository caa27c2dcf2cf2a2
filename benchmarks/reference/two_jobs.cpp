// SPDX-License-Identifier: Apache-2.0
#include "reference/two_jobs.hpp"

#include <algorithm>
#include <utility>

#include "reference/op_sharing.hpp"
#include "sched/coordinator.hpp"
#include "sched/policy.hpp"
#include "sim/simulation.hpp"

namespace gpushare::sim {
namespace {

constexpr double kMinuteNs = 60e9;

// Under a policy of the scheduler. Both have all their bytes persistent: a job of the paper holds its memory while it lives.
TwoJobsResult under(const TwoJobsModel& model, const char* policy) {
  const auto job = [](const char* name, double arrival_min, double work_min, double gb) {
    Job out;
    out.name = name;
    out.arrival_ns = static_cast<uint64_t>(arrival_min * kMinuteNs);
    out.iteration_ns = 1e9;
    out.iterations = static_cast<uint64_t>(work_min * 60);
    out.persistent_bytes = static_cast<uint64_t>(gb * 1e9);
    return out;
  };
  SimulationOptions options;
  options.capacity_bytes = static_cast<uint64_t>(model.device_gb * 1e9);
  options.paging = false;
  Simulation simulation(options,
                        {job("A", 0, model.a_work_min, model.a_gb),
                         job("B", model.b_arrival_min, model.b_work_min, model.b_gb)},
                        std::move(*sched::make_policy(policy)));
  const auto result = simulation.run();
  TwoJobsResult out;
  out.way = policy;
  if (!result.ok()) {
    out.note = result.status().message();
    return out;
  }
  out.a_min = static_cast<double>(result->jobs[0].completion_ns()) / kMinuteNs;
  out.b_min = static_cast<double>(result->jobs[1].completion_ns()) / kMinuteNs;
  return out;
}

// A is opportunistic from B's arrival on. The coordinator says who has how many bytes, the controller who runs.
TwoJobsResult ours(const TwoJobsModel& model) {
  TwoJobsResult out;
  out.way = "ours";
  sched::CoordinatorOptions limits;
  limits.capacity_bytes = static_cast<uint64_t>(model.device_gb * 1e9);
  sched::Coordinator coordinator(limits);
  const auto bytes = [](double gb) { return static_cast<uint64_t>(gb * 1e9); };
  const auto arrival = static_cast<uint64_t>(model.b_arrival_min * kMinuteNs);
  coordinator.arrive(
      {1, sched::SessionClass::kOpportunistic, bytes(model.a_gb), bytes(model.a_gb / 4), 1, true}, 0);
  coordinator.arrive({2, sched::SessionClass::kGuaranteed, bytes(model.b_gb), bytes(model.b_gb), 1, false},
                     arrival);
  if (!coordinator.view(1).running || !coordinator.view(2).running) return out;
  out.note =
      "A keeps " + std::to_string(coordinator.view(1).limit_bytes / 1'000'000) + " MB on the device beside B";

  OpSharingSpec spec;
  spec.iteration_ns = model.b_iteration_s * 1e9;
  spec.iterations = static_cast<uint64_t>(model.b_work_min * 60 / model.b_iteration_s);
  spec.jitter = model.jitter;
  spec.options.target_slowdown = model.target_slowdown;
  OpponentSpec a;
  a.guaranteed_rate = model.b_rate;
  a.own_rate = model.a_rate;
  a.work_ns = (model.a_work_min - model.b_arrival_min) * kMinuteNs;
  spec.opponents.push_back(a);
  const OpSharingResult result = run_op_sharing(spec);
  out.b_min = result.end_ns / kMinuteNs;
  // If A outlives B it goes on alone.
  const double done = result.throughput[0] * result.end_ns;
  out.a_min = model.b_arrival_min + (result.ended_ns[0] > 0 ? result.ended_ns[0] / kMinuteNs
                                                            : (result.end_ns + a.work_ns - done) / kMinuteNs);
  return out;
}

// Two jobs whose bytes together exceed the device: B pays for what it does not find there, while A is there.
TwoJobsResult unified_memory(const TwoJobsModel& model) {
  TwoJobsResult out;
  out.way = "unified memory";
  const double missing_gb = std::max(0.0, model.a_gb + model.b_gb - model.device_gb);
  const double extra_s = 2 * missing_gb / model.link_gb_per_s;
  const double rate = model.b_iteration_s / (model.b_iteration_s / model.b_rate + extra_s);
  const double overlap_min = (model.a_work_min - model.b_arrival_min) / model.a_rate;
  out.a_min = model.b_arrival_min + overlap_min;
  out.b_min = overlap_min + model.b_work_min - overlap_min * rate;
  return out;
}

}  // namespace

std::vector<TwoJobsResult> run_two_jobs(const TwoJobsModel& model) {
  std::vector<TwoJobsResult> rows;
  TwoJobsResult preempt;
  preempt.way = "preempt";
  preempt.b_min = model.b_work_min;
  preempt.note = "A is killed when B comes";
  rows.push_back(preempt);
  rows.push_back(under(model, "fifo"));
  TwoJobsResult pack = under(model, "fifo");  // for A, who had the device first
  pack.way = "pack";
  if (model.a_gb + model.b_gb > model.device_gb) {
    pack.b_min = 0;
    pack.note = "B does not get its memory and fails";
  }
  rows.push_back(pack);
  rows.push_back(unified_memory(model));
  rows.push_back(ours(model));
  const double printed[][2] = {{0, 91.1}, {43.0, 108.2}, {43.1, 0}, {43.4, 541.6}, {43.9, 91.8}};
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i].printed_a_min = printed[i][0];
    rows[i].printed_b_min = printed[i][1];
  }
  return rows;
}

}  // namespace gpushare::sim
