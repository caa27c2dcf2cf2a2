// serving_beside [seconds of a run, 100] [runs, 5]: a server of requests with deadlines beside another session of its device, on
// virtual time: the scheduler and the batchers as the daemon and the request queues drive them, on one lane. Prints the table of
// benchmarks/results/serving-decisions.md, "Deadlines beside another process". benchmarks/daemon/measure_deadlines.cpp plays the
// same on real threads.
//
// A request takes 5 ms of the device alone and has 40 ms; requests are not batched, which would hide a wait. Weights are equal.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "sched/scheduler.hpp"
#include "sched/slo/batcher.hpp"

namespace {

using namespace gpushare;  // NOLINT(google-build-using-namespace)
using sched::slo::kNever;

constexpr uint64_t kMs = 1'000'000, kWork = 5 * kMs, kSlo = 40 * kMs, kTrain = 10 * kMs;
// From the end of an iteration until its owner has the next one.
constexpr uint64_t kBackNs = 100'000;

struct Server {
  Server(sched::SessionId its_id, double load, double seconds, uint64_t seed) : id(its_id) {
    batcher = std::move(*sched::slo::make_batcher("gpushare"));
    sched::slo::ModelSpec model;
    model.batch_sizes = {1};
    (void)batcher->add_model(model);
    for (int i = 0; i < 64; ++i) batcher->observe(0, 0, kWork);
    std::mt19937_64 random(seed);
    std::exponential_distribution<double> gap(load / static_cast<double>(kWork));
    for (double at_ns = gap(random); at_ns < seconds * 1e9; at_ns += gap(random))
      arrivals.push_back(static_cast<uint64_t>(at_ns));
  }
  void arrive(uint64_t now_ns) {
    for (; next < arrivals.size() && arrivals[next] <= now_ns; ++next) {
      sched::slo::Request request;
      request.id = next;
      request.arrival_ns = arrivals[next];
      request.deadline_ns = arrivals[next] + kSlo;
      (void)batcher->arrive(request, now_ns);
    }
  }
  // True: it has a batch now.
  bool decide(uint64_t now_ns) {
    sched::slo::Decision decision = batcher->next(now_ns, batch ? 1 : 0);
    std::vector<sched::slo::Drop> drops;
    batcher->take_drops(drops);
    wake_ns = decision.wake_ns;
    if (!decision.batch) return false;
    batch = std::move(decision.batch);
    return true;
  }
  void end(uint64_t now_ns) {
    const uint64_t deadline_ns = arrivals[batch->requests.front()] + kSlo;
    in_time += now_ns <= deadline_ns ? 1 : 0;
    batcher->finished_run(batch->id, std::vector<uint64_t>{kWork}, kWork, now_ns);
    batch.reset();
    back_ns = now_ns + kBackNs;
  }

  const sched::SessionId id;
  std::unique_ptr<sched::slo::Batcher> batcher;
  std::vector<uint64_t> arrivals;
  size_t next = 0, in_time = 0;
  std::optional<sched::slo::Batch> batch;
  uint64_t back_ns = 0, wake_ns = kNever;
};

enum class Beside { kNobody, kTraining, kOverloaded };

struct Figures {
  double in_time = 0, part = 0, neighbour = 0;
};

Figures play(double load, Beside beside, bool tells, double seconds, uint64_t seed) {
  sched::SchedulerOptions options;
  options.capacity_bytes = 1000;
  options.max_lanes = 1;
  options.enqueues = false;
  options.keeps_lag_ns = sched::kKeepsLagNs;
  sched::Scheduler scheduler(options, std::move(*sched::make_policy("fair")));
  std::vector<std::unique_ptr<Server>> servers;
  servers.push_back(std::make_unique<Server>(1, load, seconds, seed));
  if (beside == Beside::kOverloaded) servers.push_back(std::make_unique<Server>(2, 3, seconds, seed + 1000));
  for (sched::SessionId id = 1; id <= (beside == Beside::kNobody ? 1u : 2u); ++id) {
    sched::SessionSpec spec;
    spec.id = id;
    spec.name = "session";
    spec.persistent_bytes = spec.ephemeral_bytes = 1;
    (void)scheduler.arrive(spec, 0);
  }
  (void)scheduler.take_actions();
  if (beside == Beside::kTraining) scheduler.ready(2, 0);
  const auto server_of = [&](sched::SessionId id) -> Server* {
    for (const auto& each : servers)
      if (each->id == id) return each.get();
    return nullptr;
  };
  const auto end_ns = static_cast<uint64_t>(seconds * 1e9);
  uint64_t service[3] = {};
  sched::SessionId running = 0;
  uint64_t length_ns = 0, ends_ns = kNever;
  for (uint64_t now_ns = 0; now_ns < end_ns;) {
    if (running != 0 && now_ns >= ends_ns) {
      Server* server = server_of(running);
      if (server != nullptr) {
        const auto next = server->batcher->waiting().worth(server->batcher->largest_batch(), now_ns);
        if (tells) scheduler.set_worth(running, next.cost, next.until_ns);
      }
      scheduler.finished(running, length_ns, now_ns);
      service[running] += length_ns;
      if (server != nullptr)
        server->end(now_ns);
      else
        scheduler.ready(running, now_ns);
      running = 0;
      ends_ns = kNever;
    }
    uint64_t next_ns = ends_ns;
    for (const auto& server : servers) {
      server->arrive(now_ns);
      if (now_ns >= server->back_ns && server->decide(now_ns)) {
        const auto& worth = server->batch->worth;
        if (tells) scheduler.set_worth(server->id, worth.cost, worth.until_ns);
        scheduler.ready(server->id, now_ns);
      }
      if (server->next < server->arrivals.size()) next_ns = std::min(next_ns, server->arrivals[server->next]);
      if (now_ns < server->back_ns)
        next_ns = std::min(next_ns, server->back_ns);
      else if (server->wake_ns > now_ns)
        next_ns = std::min(next_ns, server->wake_ns);
    }
    if (running == 0) {
      if (const auto picked = scheduler.pick(0, now_ns)) {
        running = *picked;
        scheduler.dispatched(running, 0, now_ns);
        length_ns = server_of(running) != nullptr ? kWork : kTrain;
        ends_ns = now_ns + length_ns;
        next_ns = std::min(next_ns, ends_ns);
      } else {
        const uint64_t again_ns = scheduler.look_again_ns();
        if (again_ns > now_ns) next_ns = std::min(next_ns, again_ns);
      }
    }
    now_ns = std::max(now_ns + 1, next_ns);
  }
  const double offered = static_cast<double>(servers.front()->arrivals.size());
  return {static_cast<double>(servers.front()->in_time) / offered,
          static_cast<double>(service[1]) / static_cast<double>(end_ns),
          static_cast<double>(service[2]) / static_cast<double>(end_ns)};
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::max(1.0, std::atof(argv[1])) : 100;
  const int runs = argc > 2 ? std::max(1, std::atoi(argv[2])) : 5;
  std::puts(
      "| load of the server | beside | tells | in time, mean | least | of what it has alone | its part of "
      "the device | the "
      "neighbour's |\n|---|---|---|---|---|---|---|---|");
  for (const double load : {0.3, 0.4, 0.45, 0.5}) {
    double alone = 0;
    for (const Beside beside : {Beside::kNobody, Beside::kTraining, Beside::kOverloaded})
      for (const bool tells : {false, true}) {
        if (beside == Beside::kNobody && tells) continue;
        Figures mean;
        double least = 1;
        for (int run = 0; run < runs; ++run) {
          const Figures one = play(load, beside, tells, seconds, static_cast<uint64_t>(run) + 1);
          mean.in_time += one.in_time / runs;
          mean.part += one.part / runs;
          mean.neighbour += one.neighbour / runs;
          least = std::min(least, one.in_time);
        }
        if (beside == Beside::kNobody) alone = mean.in_time;
        std::printf("| %.2f | %s | %s | %.3f | %.3f | %.3f | %.2f | %.2f |\n", load,
                    beside == Beside::kNobody     ? "nobody"
                    : beside == Beside::kTraining ? "training"
                                                  : "overloaded server",
                    tells ? "yes" : "no", mean.in_time, least, mean.in_time / alone, mean.part,
                    mean.neighbour);
      }
  }
  return 0;
}
