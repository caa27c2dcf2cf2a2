// Delete one, insert one, ask for the best, with n pending: the queues, and std::set (erase, insert, top) as
// the measure of this machine. Ratios to the set travel between machines, nanoseconds do not.
// SPDX-License-Identifier: Apache-2.0
#include <benchmark/benchmark.h>

#include <cmath>
#include <random>
#include <set>
#include <vector>

#include "reference/point_queue.hpp"
#include "reference/point_scores.hpp"
#include "sched/slo/score_queue.hpp"

namespace {

using namespace gpushare::sched::slo;
using gpushare::reference::make_point_queue;
using gpushare::reference::PointBackend;
using gpushare::reference::PointQueue;
using gpushare::reference::PointScores;

enum Shape { kScores, kDisc, kArc };

// Bimodal execution times of 50 to 400 ms in batches of four, as the serving experiments have them.
ScoreCurve curve() {
  std::vector<double> edges, weights;
  for (int i = 0; i <= 32; ++i) edges.push_back(50e6 + i * 11e6);
  for (int i = 0; i < 32; ++i)
    weights.push_back(std::exp(-0.5 * std::pow((i - 8) / 3.0, 2)) +
                      std::exp(-0.5 * std::pow((i - 24) / 3.0, 2)));
  const Distribution batch = *Distribution::from_bins(edges, weights);
  return ScoreCurve(batch, batch.mean_ns(), 1e-10);
}

struct Points {
  std::vector<double> alpha, beta;
};

Points make(Shape shape, size_t n) {
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> unit(0, 1);
  const ScoreCurve scores = curve();
  Points points;
  for (size_t i = 0; i < n; ++i) {
    if (shape == kScores) {
      // As placed at time 0: the piece that holds the slack.
      const double slack = 60e6 + unit(random) * 2e9;
      const ScoreCurve::Piece& piece = scores.pieces()[scores.piece_at(slack)];
      points.alpha.push_back((piece.value - piece.asymptote) *
                             std::exp(-scores.delay_rate() * (slack - piece.start_ns)));
      points.beta.push_back(piece.asymptote);
      continue;
    }
    const double angle = unit(random) * (shape == kArc ? 1.5707963267948966 : 6.283185307179586);
    const double radius = shape == kArc ? 1 : std::sqrt(unit(random));
    points.alpha.push_back(radius * std::cos(angle));
    points.beta.push_back(radius * std::sin(angle));
  }
  return points;
}

void point_queue(benchmark::State& state, PointBackend backend, Shape shape) {
  const size_t n = static_cast<size_t>(state.range(0));
  constexpr size_t kFresh = 1 << 16;
  const Points points = make(shape, n + kFresh);
  const auto queue = make_point_queue(backend);
  std::vector<PointQueue::Handle> handles;
  for (size_t i = 0; i < n; ++i) handles.push_back(queue->insert(points.alpha[i], points.beta[i], i));
  std::mt19937_64 random(2);
  double now = 0;
  queue->best(1);
  size_t next = 0;
  for (auto _ : state) {
    const size_t victim = random() % n;
    queue->erase(handles[victim]);
    const size_t fresh = n + next++ % kFresh;
    handles[victim] = queue->insert(points.alpha[fresh], points.beta[fresh], fresh);
    now += 1e-7;  // a request every millisecond at b = 1e-4/ms
    benchmark::DoNotOptimize(queue->best(1 + now));
  }
}

void set(benchmark::State& state, Shape shape) {
  const size_t n = static_cast<size_t>(state.range(0));
  constexpr size_t kFresh = 1 << 16;
  const Points points = make(shape, n + kFresh);
  std::set<std::pair<double, size_t>> queue;
  std::vector<std::pair<double, size_t>> keys;
  for (size_t i = 0; i < n; ++i) {
    keys.emplace_back(points.alpha[i], i);
    queue.insert(keys.back());
  }
  std::mt19937_64 random(2);
  size_t next = n;
  for (auto _ : state) {
    const size_t victim = random() % n;
    queue.erase(keys[victim]);
    keys[victim] = {points.alpha[n + next % kFresh], next};
    ++next;
    queue.insert(keys[victim]);
    auto best = *queue.rbegin();
    benchmark::DoNotOptimize(best);
  }
}

// The whole score queue, milestones and all: requests of two seconds' slack, a thousand a second for a
// thousand pending and so on.
void whole_queue(benchmark::State& state, auto& queue) {
  const size_t n = static_cast<size_t>(state.range(0));
  (void)queue.add_class(curve());
  constexpr ScoreQueue::ClassId of = 0;
  std::mt19937_64 random(3);
  std::uniform_real_distribution<double> unit(0, 1);
  uint64_t now = 1'000'000'000'000;
  queue.best(now);
  std::vector<ScoreQueue::Handle> handles;
  for (size_t i = 0; i < n; ++i)
    handles.push_back(queue.insert(of, now + static_cast<uint64_t>(unit(random) * 2e9), i));
  for (auto _ : state) {
    const size_t victim = random() % n;
    queue.erase(handles[victim]);
    handles[victim] = queue.insert(of, now + 100'000'000 + (random() & 0x7fffffff), victim);
    now += 2'000'000'000 / n;
    benchmark::DoNotOptimize(queue.best(now));
  }
}
void slack_index(benchmark::State& state) {
  ScoreQueue queue;
  whole_queue(state, queue);
}
void point_scores(benchmark::State& state, PointBackend backend) {
  PointScores queue(backend);
  whole_queue(state, queue);
}

void sizes(benchmark::internal::Benchmark* b) {
  b->Arg(100)->Arg(1000)->Arg(4096)->Arg(10000)->Arg(100000)->Arg(1000000);
}
void scan_sizes(benchmark::internal::Benchmark* b) {
  b->Arg(100)->Arg(1000)->Arg(4096)->Arg(10000);
}

BENCHMARK_CAPTURE(set, scores, kScores)->Apply(sizes);
BENCHMARK_CAPTURE(point_queue, automatic_scores, PointBackend::kAutomatic, kScores)->Apply(sizes);
BENCHMARK_CAPTURE(point_queue, automatic_disc, PointBackend::kAutomatic, kDisc)->Apply(sizes);
BENCHMARK_CAPTURE(point_queue, automatic_arc, PointBackend::kAutomatic, kArc)->Apply(sizes);
BENCHMARK_CAPTURE(point_queue, hull_scores, PointBackend::kHull, kScores)->Apply(sizes);
BENCHMARK_CAPTURE(point_queue, hull_disc, PointBackend::kHull, kDisc)->Apply(sizes);
BENCHMARK_CAPTURE(point_queue, hull_arc, PointBackend::kHull, kArc)->Apply(sizes);
BENCHMARK_CAPTURE(point_queue, scan_scores, PointBackend::kScan, kScores)->Apply(scan_sizes);
BENCHMARK_CAPTURE(point_queue, scan_arc, PointBackend::kScan, kArc)->Apply(scan_sizes);
// Where the automatic queue leaves the scan.
BENCHMARK_CAPTURE(point_queue, kinetic_arc, PointBackend::kKinetic, kArc)->RangeMultiplier(2)->Range(16, 512);
BENCHMARK_CAPTURE(point_queue, scan_small_arc, PointBackend::kScan, kArc)->RangeMultiplier(2)->Range(16, 512);
BENCHMARK(slack_index)->Apply(sizes);
BENCHMARK_CAPTURE(point_scores, automatic, PointBackend::kAutomatic)->Apply(sizes);
BENCHMARK_CAPTURE(point_scores, hull, PointBackend::kHull)->Apply(sizes);

}  // namespace
