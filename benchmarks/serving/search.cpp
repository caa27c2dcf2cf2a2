// Looks for requests that another policy serves better than ours: serving_search [DRAWS [SEED [STEPS [KINDS]]]]. Virtual time,
// deterministic. Each kind of trouble is drawn DRAWS times at random. A draw whose list of 2,000 requests we lose by more than kLost
// is judged again by kSeeds fresh lists, and is a loss if these lose as much on average. From the worst loss of each kind
// STEPS changes are tried, and each that makes the loss larger is kept. KINDS are digits, 0 for the first kind. Writes the table and
// the list of benchmarks/results/serving-search.md to stdout.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "sim/serving/serving.hpp"

namespace gpushare::experiments {
namespace {

using sim::ServingOptions;
using sim::TimedRequest;

constexpr size_t kRequests = 2000;
constexpr uint64_t kSeeds = 3;
constexpr double kLost = 0.005;
// A point of the unit cube is a case; what each number means stands in make_case.
constexpr size_t kNumbers = 24;
using Point = std::array<double, kNumbers>;
using Random = std::mt19937_64;

// kNeither: the batcher is told no labels, no execution times and no batch times.
enum class Kind { kPlain, kUnlabelled, kInferred, kNoise, kStalls, kWrongProfile, kDrift, kBursts, kNeither };
constexpr const char* kKinds[] = {"labelled",
                                  "no labels",
                                  "times inferred",
                                  "noise",
                                  "stalls",
                                  "wrong profile",
                                  "drift of times and mix",
                                  "bursts",
                                  "neither labels nor times"};

constexpr const char* kBaselines[] = {"greedy",    "edf",   "clipper-mean", "nexus",   "nexus-earliest",
                                      "clockwork", "orloj", "orloj-own",    "maxdelay"};

double between(double u, double low, double high) {
  return low * std::pow(high / low, u);
}

struct Case {
  std::vector<TimedRequest> requests;
  ServingOptions options;
  std::string text;
};

Case make_case(const Point& at, Kind kind, uint64_t seed) {
  Random random(seed);
  std::uniform_real_distribution<double> unit(0, 1);
  std::normal_distribution<double> normal(0, 1);
  const auto applications = 1 + static_cast<uint32_t>(at[0] * 4.999);
  std::array<double, 5> mean_ms{}, deviation{}, share{}, slo{};
  double total = 0, mean = 0, most = 0;
  Case out;
  for (uint32_t a = 0; a < applications; ++a) {
    mean_ms[a] = between(at[1 + a], 4, 200);
    deviation[a] = at[6] < 0.3 ? 0.05 : at[6];
    share[a] = between(at[7 + a], 0.02, 1);
    slo[a] = between(at[12 + a % 3], 1.3, 8);
    total += share[a];
    most = std::max(most, mean_ms[a]);
  }
  for (uint32_t a = 0; a < applications; ++a) mean += share[a] / total * mean_ms[a];
  const double c0_x = between(at[15], 0.03, 2), c1 = between(at[16], 0.05, 1);
  const double batch_of_8_ms = (c0_x + c1 * 8 * 1.3) * mean;
  const double load = between(at[17], 0.3, 2), rate_per_ms = load * 8 / batch_of_8_ms;
  const bool common = at[18] < 0.5;
  const double burst = kind == Kind::kBursts ? 4 * at[19] : 0;
  double now_ms = 0, pace = 1;
  for (size_t i = 0; i < kRequests; ++i) {
    if (burst > 0 && i % 20 == 0) {  // a gamma factor of this coefficient of variation
      const double shape = 1 / (burst * burst);
      pace = std::max(0.02, std::gamma_distribution<double>(shape, 1 / shape)(random));
    }
    now_ms += -std::log(1 - unit(random)) / (rate_per_ms * pace);
    const double late = static_cast<double>(i) / kRequests;
    const bool changed = kind == Kind::kDrift && late > 0.5;
    double pick = unit(random) * total;
    uint32_t a = 0;
    while (a + 1 < applications && pick >= share[a]) pick -= share[a++];
    if (changed && at[20] < 0.5) a = applications - 1 - a;  // the mix turns round
    const double scale = std::sqrt(std::log(1 + deviation[a] * deviation[a]));
    const double factor = changed ? between(at[21], 0.3, 3) : 1;
    TimedRequest request;
    request.application = a;
    request.arrival_ns = static_cast<uint64_t>(now_ms * 1e6);
    request.execution_ns = static_cast<uint64_t>(
        std::max(1.0, 1e6 * factor * mean_ms[a] * std::exp(scale * normal(random) - scale * scale / 2)));
    const double longest = (common ? most : mean_ms[a]) * (1 + 2 * deviation[a]);
    request.slo_ns = static_cast<uint64_t>(1e6 * slo[common ? 0 : a] * (c0_x * mean + c1 * longest));
    out.requests.push_back(std::move(request));
  }
  ServingOptions& options = out.options;
  options.c0_ns = c0_x * mean * 1e6;
  options.c1 = c1;
  options.labels = kind != Kind::kUnlabelled && kind != Kind::kNeither;
  options.infer = kind == Kind::kInferred || kind == Kind::kNeither;
  options.told_batch_time = !options.infer;
  if (options.infer) options.warm_samples = 0;
  if (kind == Kind::kNoise) options.noise = between(at[22], 0.03, 0.5);
  if (kind == Kind::kStalls) {
    options.stall_share = 0.1 * at[22];
    options.stall_ns = between(at[23], 1, 20) * options.c0_ns;
  }
  if (kind == Kind::kWrongProfile) options.profile_scale = between(at[22], 0.1, 10);
  options.noise_seed = seed;
  char text[256];
  std::snprintf(text, sizeof text, "load %.2f, c0 %.2f of the mean, c1 %.2f, %s;", load, c0_x, c1,
                common ? "one SLO" : "an SLO each");
  out.text = text;
  for (uint32_t a = 0; a < applications; ++a) {
    std::snprintf(text, sizeof text, " %.0f%% of %.1f ms (SLO x%.1f)", 100 * share[a] / total, mean_ms[a],
                  slo[common ? 0 : a]);
    out.text += text;
  }
  std::snprintf(text, sizeof text, "; deviation %.2f", deviation[0]);
  out.text += text;
  return out;
}

struct Loss {
  double loss = -1;
  double ours = 0;
  double best = 0;
  std::string who, text;
};

// Of `runs` lists of requests.
Loss judge(const Point& at, Kind kind, uint64_t seed, uint64_t runs) {
  Loss out;
  std::array<double, std::size(kBaselines)> theirs{};
  for (uint64_t run = 0; run < runs; ++run) {
    const Case drawn = make_case(at, kind, seed + run);
    out.text = drawn.text;
    const auto rate = [&](const char* policy) {
      const auto result = sim::serve(drawn.requests, policy, drawn.options);
      if (!result.ok()) {
        std::fprintf(stderr, "%s: %s\n", policy, result.status().to_string().c_str());
        std::exit(1);
      }
      return result->finish_rate / static_cast<double>(runs);
    };
    out.ours += rate("gpushare");
    for (size_t i = 0; i < theirs.size(); ++i) theirs[i] += rate(kBaselines[i]);
  }
  const auto best = std::max_element(theirs.begin(), theirs.end());
  out.best = *best;
  out.who = kBaselines[best - theirs.begin()];
  out.loss = out.best - out.ours;
  return out;
}

// The worst point found from `at` by random steps.
Loss climb(Point at, Kind kind, uint64_t seed, uint64_t steps, Random& random) {
  std::uniform_real_distribution<double> unit(0, 1);
  std::normal_distribution<double> normal(0, 1);
  Loss worst;
  for (uint64_t step = 0; step <= steps; ++step) {
    Point moved = at;
    if (step > 0)
      for (double& each : moved)
        if (unit(random) < 0.25) each = std::clamp(each + 0.15 * normal(random), 0.0, 1.0);
    const Loss loss = judge(moved, kind, seed, kSeeds);
    if (loss.loss <= worst.loss) continue;
    worst = loss;
    at = moved;
  }
  return worst;
}

std::string listed(const Loss& loss) {
  char text[96];
  std::snprintf(text, sizeof text, "%.4f (%.3f against %.3f, %s)", loss.loss, loss.ours, loss.best,
                loss.who.c_str());
  return text;
}

// Searches one kind; prints its row, and appends what it lost to `losses`.
void search_kind(size_t k, uint64_t draws, uint64_t seed, uint64_t steps, std::vector<std::string>& losses) {
  Random random(seed * 1000 + k);
  std::uniform_real_distribution<double> unit(0, 1);
  const auto kind = static_cast<Kind>(k);
  double ours = 0, best = 0;
  uint64_t lost = 0;
  Point at{};
  Loss worst;
  for (uint64_t draw = 0; draw < draws; ++draw) {
    Point drawn;
    for (double& each : drawn) each = unit(random);
    const uint64_t lists = seed * 10'000'000 + draw * 10;
    Loss loss = judge(drawn, kind, lists, 1);
    ours += loss.ours / static_cast<double>(draws);
    best += loss.best / static_cast<double>(draws);
    if (loss.loss > kLost) {
      loss = judge(drawn, kind, lists + 1, kSeeds);
      if (loss.loss > kLost) {
        ++lost;
        losses.push_back(std::string(kKinds[k]) + ", " + listed(loss) + ": " + loss.text);
      }
    }
    if (loss.loss <= worst.loss) continue;
    worst = loss;
    at = drawn;
  }
  const Loss climbed = climb(at, kind, seed * 7919, steps, random);
  std::printf("| %s | %llu | %.3f | %.3f | %llu | %.4f | %s | %s |\n", kKinds[k],
              static_cast<unsigned long long>(draws), ours, best, static_cast<unsigned long long>(lost),
              worst.loss, listed(climbed).c_str(), climbed.text.c_str());
  std::fflush(stdout);
}

int search(int argc, char** argv) {
  const auto number = [&](int i, uint64_t unset) {
    return argc > i ? std::strtoull(argv[i], nullptr, 10) : unset;
  };
  const uint64_t draws = number(1, 400), seed = number(2, 1), steps = number(3, 100);
  const std::string kinds = argc > 4 ? argv[4] : "012345678";
  std::vector<std::string> losses;
  std::printf(
      "| kind | draws | ours, mean | best baseline, mean | lost by more than %g | worst draw | worst "
      "found by climbing | its input |\n"
      "|---|---|---|---|---|---|---|---|\n",
      kLost);
  for (size_t k = 0; k < std::size(kKinds); ++k)
    if (kinds.find(static_cast<char>('0' + k)) != std::string::npos)
      search_kind(k, draws, seed, steps, losses);
  std::printf("\n");
  for (const std::string& each : losses) std::printf("- %s\n", each.c_str());
  return 0;
}

}  // namespace
}  // namespace gpushare::experiments

int main(int argc, char** argv) {
  return gpushare::experiments::search(argc, argv);
}
