// The point queues that benchmarks compare the score queue with, against brute force.
// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <vector>

#include "reference/hull_core.hpp"
#include "reference/point_kernels.hpp"
#include "reference/point_queue.hpp"
#include "reference/point_scores.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

using namespace gpushare::reference;
using gpushare::test::Random;
using gpushare::test::uniform;

namespace {

constexpr PointBackend kBackends[] = {PointBackend::kAutomatic, PointBackend::kScan, PointBackend::kKinetic,
                                      PointBackend::kHull};

struct Live {
  PointQueue::Handle handle;
  double alpha, beta;
  uint64_t id;
};

enum class Shape { kDisc, kArc, kGrid, kEqualAlpha, kScores, kLine };

void make_point(Shape shape, Random& random, double now, double* alpha, double* beta) {
  std::uniform_real_distribution<double> unit(0, 1);
  switch (shape) {
    case Shape::kDisc: {
      const double radius = std::sqrt(unit(random)), angle = unit(random) * 6.283185307179586;
      *alpha = radius * std::cos(angle);
      *beta = radius * std::sin(angle);
      return;
    }
    case Shape::kArc: {
      const double angle = unit(random) * 1.5707963267948966;
      *alpha = std::cos(angle);
      *beta = std::sin(angle);
      return;
    }
    case Shape::kGrid:
      *alpha = static_cast<double>(uniform(random, 0, 12)) - 6;
      *beta = static_cast<double>(uniform(random, 0, 12)) - 6;
      return;
    case Shape::kEqualAlpha:
      *alpha = static_cast<double>(uniform(random, 0, 2));
      *beta = unit(random);
      return;
    case Shape::kScores: {
      const double deadline = now + unit(random) * 100;
      *alpha = (unit(random) < 0.5 ? -1 : 1) * unit(random) * std::exp(-0.01 * deadline);
      *beta = *alpha < 0 ? unit(random) * 2 : 0;
      return;
    }
    case Shape::kLine:
      *alpha = unit(random);
      *beta = 1 - *alpha;
      return;
  }
}

// Random inserts, erases, pops and queries; every answer compared with the best of all points.
void against_brute_force(PointBackend backend, Shape shape, size_t operations, size_t target, uint64_t salt) {
  Random random(gpushare::test::seed() + salt);
  const auto queue = make_point_queue(backend);
  std::vector<Live> live;
  std::uniform_real_distribution<double> unit(0, 1);
  double now = 0;
  uint64_t next_id = 1;
  size_t wrong = 0;
  for (size_t i = 0; i < operations; ++i) {
    // Grows to about the target, shrinks to nothing at two thirds of the way, grows again.
    const bool shrinking = i > operations * 3 / 5 && i < operations * 7 / 10;
    const double toward_insert = shrinking ? 0.1 : live.size() < target ? 0.7 : 0.5;
    if (live.empty() || unit(random) < toward_insert) {
      Live point{};
      make_point(shape, random, now, &point.alpha, &point.beta);
      if (!live.empty() && uniform(random, 0, 19) == 0) {  // an exact copy
        const Live& other = live[uniform(random, 0, live.size() - 1)];
        point.alpha = other.alpha;
        point.beta = other.beta;
      }
      point.id = next_id++;
      point.handle = queue->insert(point.alpha, point.beta, point.id);
      live.push_back(point);
    } else {
      const size_t which = uniform(random, 0, live.size() - 1);
      if (!queue->erase(live[which].handle)) ++wrong;
      live[which] = live.back();
      live.pop_back();
    }
    if (queue->size() != live.size()) ++wrong;
    if (i % 8 == 0) {
      now += unit(random) < 0.3 ? 0 : unit(random) * 0.5;  // stands still at times
      if (uniform(random, 0, 4999) == 0) now = std::max(0.0, now - 50 * unit(random));  // and goes back
    }
    const double w = std::exp(0.01 * std::fmod(now, 1000));
    const auto top = queue->best(w);
    if (live.empty()) {
      if (top) ++wrong;
      continue;
    }
    double best = -INFINITY;
    const Live* reported = nullptr;
    for (const Live& point : live) {
      best = std::max(best, point.alpha * w + point.beta);
      if (top && point.id == top->id) reported = &point;
    }
    // Equal up to the rounding of the sum and of the comparisons that led to it.
    if (!top || reported == nullptr || reported->handle != top->handle ||
        top->value < best - 1e-13 * (std::abs(reported->alpha * w) + std::abs(reported->beta) + 1e-12) ||
        top->value != reported->alpha * w + reported->beta)
      ++wrong;
  }
  CHECK(wrong == 0);
}

}  // namespace

TEST_CASE("each back end equals brute force on every shape") {
  INFO("seed " << gpushare::test::seed());
  for (PointBackend backend : kBackends)
    for (Shape shape :
         {Shape::kDisc, Shape::kArc, Shape::kGrid, Shape::kEqualAlpha, Shape::kScores, Shape::kLine}) {
      INFO("back end " << static_cast<int>(backend) << " shape " << static_cast<int>(shape));
      against_brute_force(backend, shape, 160'000, 60, 1);
      against_brute_force(backend, shape, 10'000, 900, 2);
    }
}

TEST_CASE("all kernels of the point queues agree") {
  Random random(gpushare::test::seed());
  std::uniform_real_distribution<double> unit(-1, 1);
  const PointKernels& fast = point_kernels();
  const PointKernels& plain = portable_point_kernels();
  INFO(fast.name);
  for (int round = 0; round < 20'000; ++round) {
    const size_t n = uniform(random, 1, 70);
    std::vector<double> alpha(std::max<size_t>(n, kNodeWidth)), beta(alpha.size());
    for (size_t i = 0; i < alpha.size(); ++i) {
      alpha[i] = round % 3 == 0 ? std::round(4 * unit(random)) : unit(random);
      beta[i] = round % 3 == 0 ? std::round(4 * unit(random)) : unit(random);
      if (uniform(random, 0, 5) == 0) {
        alpha[i] = 0;
        beta[i] = -INFINITY;
      }
    }
    const double w = unit(random) + 1;
    const size_t a = fast.best_of(alpha.data(), beta.data(), n, w),
                 b = plain.best_of(alpha.data(), beta.data(), n, w);
    REQUIRE(a < n);
    REQUIRE(alpha[a] * w + beta[a] == alpha[b] * w + beta[b]);
    double until_fast = 0, until_plain = 0;
    const size_t c = fast.node(alpha.data(), beta.data(), w, &until_fast),
                 d = plain.node(alpha.data(), beta.data(), w, &until_plain);
    REQUIRE(alpha[c] == alpha[d]);
    REQUIRE(beta[c] == beta[d]);
    REQUIRE(until_fast == until_plain);
    REQUIRE(fast.least(alpha.data()) == plain.least(alpha.data()));
    REQUIRE(fast.at_most(alpha.data(), 0.25) == plain.at_most(alpha.data(), 0.25));
  }
}

TEST_CASE("misuse of a queue is refused") {
  for (PointBackend backend : kBackends) {
    const auto queue = make_point_queue(backend);
    CHECK_FALSE(queue->best(1).has_value());
    CHECK(queue->insert(NAN, 0, 1) == PointQueue::kNoHandle);
    CHECK(queue->insert(0, INFINITY, 1) == PointQueue::kNoHandle);
    CHECK_FALSE(queue->erase(0));
    CHECK_FALSE(queue->erase(PointQueue::kNoHandle));
    const auto handle = queue->insert(1, 2, 7);
    CHECK_FALSE(queue->best(-1).has_value());
    CHECK_FALSE(queue->best(NAN).has_value());
    CHECK_FALSE(queue->best(INFINITY).has_value());
    CHECK(queue->best(3)->value == 5);
    CHECK(queue->erase(handle));
    CHECK_FALSE(queue->erase(handle));
    CHECK(queue->size() == 0);
    queue->insert(1, 0, 1);
    queue->insert(0, 5, 2);
    queue->insert(2, 0, 3);
    std::vector<uint64_t> order;
    CHECK(queue->pop(1, 5, order) == 3);
    CHECK(order == std::vector<uint64_t>{2, 3, 1});
    queue->insert(1, 1, 9);
    queue->clear();
    CHECK(queue->size() == 0);
    CHECK_FALSE(queue->best(1).has_value());
  }
}

TEST_CASE("the hull stays shallow under sorted inserts and one-sided removals") {
  HullCore hull;
  constexpr uint32_t kPoints = 20'000;
  for (uint32_t i = 0; i < kPoints; ++i) {
    const double x = static_cast<double>(i) / kPoints;
    hull.put(i, x, 1 - x * x);
  }
  CHECK(hull.depth() <= 28);  // log base 1/0.7 of 1,250 leaves is 20, of which leaves of 2 to 3 add a few
  for (uint32_t i = 0; i < kPoints - 40; ++i) hull.remove(i);
  CHECK(hull.depth() <= 6);
  double value = 0;
  CHECK(hull.best(0, &value) == kPoints - 40);
}

TEST_CASE("requests as points: the score queue's answers, one delay rate, scores not too far apart") {
  using gpushare::sched::slo::CostStep;
  using gpushare::sched::slo::Distribution;
  using gpushare::sched::slo::ScoreQueue;
  Random random(gpushare::test::seed());
  const auto curve = [](double mean_ns, double rate, double cost) {
    return ScoreCurve(Distribution::point(mean_ns), mean_ns, rate, std::vector<CostStep>{{0, cost}});
  };
  for (PointBackend backend : kBackends) {
    INFO("back end " << static_cast<int>(backend));
    PointScores points(backend);
    ScoreQueue queue;
    std::vector<ScoreCurve> curves{curve(2e6, 1e-10, 1), curve(9e6, 1e-10, 3)};
    for (const ScoreCurve& of : curves) {
      REQUIRE(points.add_class(of).ok());
      queue.add_class(of);
    }
    uint64_t now = 1'700'000'000'000'000'000;
    std::vector<std::pair<PointScores::Handle, ScoreQueue::Handle>> live;
    for (int i = 0; i < 20'000; ++i) {
      now += uniform(random, 0, 5'000'000);
      if (i % 5'000 == 4'999) now += 7ull * 24 * 3600 * 1'000'000'000;  // the base moves
      if (i % 100 == 99) now -= 100'000'000;
      if (live.size() < 40) {
        const auto of = static_cast<uint32_t>(uniform(random, 0, 1));
        const uint64_t deadline = now + uniform(random, 0, 200'000'000);
        live.emplace_back(points.insert(of, deadline, i), queue.insert(of, deadline, i));
      } else {
        const size_t which = uniform(random, 0, live.size() - 1);
        REQUIRE(points.erase(live[which].first));
        REQUIRE(queue.erase(live[which].second));
        live.erase(live.begin() + static_cast<ptrdiff_t>(which));
      }
      const auto by_points = points.best(now);
      const auto by_slack = queue.best(now);
      REQUIRE(by_points.has_value());
      // Points carry beta = h / (E b), up to 1e5 times the score, so their sum is that much coarser.
      REQUIRE(by_points->score == Approx(by_slack->score).epsilon(1e-6).margin(1e-17));
    }
    CHECK(points.add_class(curve(2e6, 2e-10, 1)).status().code() == GPUSHARE_UNSUPPORTED);
    CHECK(points.add_class(curve(2e6, 1e-10, 1e12)).status().code() == GPUSHARE_UNSUPPORTED);
    CHECK(points.set_curve(0, curve(2e6, 1e-10, 1e-12)).code() == GPUSHARE_UNSUPPORTED);
  }
}
