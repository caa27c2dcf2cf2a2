// Opportunistic sessions beside guaranteed ones, on virtual time: the tables of benchmarks/results/antman.md, each behind a line
// "<!-- NAME -->". scripts/experiments/antman runs it and writes the page. Usage: sharing_experiments PAIRS.json
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "reference/op_sharing.hpp"
#include "reference/two_jobs.hpp"
#include "sim/interference.hpp"

namespace {

using namespace gpushare;  // NOLINT

struct Case {
  std::string device, guaranteed, opportunistic;  // models, without batch sizes
  double guaranteed_rate = 0, own_rate = 0;
};

struct Outcome {
  double slowdown = 0, sum = 0, oracle = 0;
};

struct Settings {
  double confidence;
  uint32_t check_every;
};
constexpr std::array<Settings, 6> kGrid{{{1, 16}, {1.5, 16}, {2, 16}, {1, 32}, {1.5, 32}, {2, 32}}};

std::string model_of(const std::string& config) {
  return config.substr(0, config.find(" ("));
}

double quantile(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, static_cast<size_t>(part * static_cast<double>(values.size())))];
}

Outcome play(const std::vector<sim::OpponentSpec>& opponents, sim::ContentionCurve curve, double jitter,
             const Settings& settings, uint64_t seed) {
  sim::OpSharingSpec spec;
  spec.opponents = opponents;
  spec.curve = curve;
  spec.jitter = jitter;
  spec.seed = seed;
  spec.options.confidence = settings.confidence;
  spec.options.check_every = settings.check_every;
  const sim::OpSharingResult result = run_op_sharing(spec);
  return {result.slowdown, result.sum, result.oracle};
}

void row(const std::string& label, const std::vector<Outcome>& outcomes) {
  std::vector<double> slow, ratio;
  double sum = 0, oracle = 0;
  size_t within = 0;
  for (const Outcome& each : outcomes) {
    slow.push_back(100 * each.slowdown);
    ratio.push_back(each.sum / each.oracle);
    sum += each.sum;
    oracle += each.oracle;
    within += each.slowdown < 0.01 ? 1 : 0;
  }
  std::printf("| %s | %zu | %.1f%% | %.2f / %.2f / %.2f | %.2f | %.2f / %.2f / %.2f |\n", label.c_str(),
              outcomes.size(), 100.0 * static_cast<double>(within) / static_cast<double>(outcomes.size()),
              quantile(slow, 0.5), quantile(slow, 0.99), quantile(slow, 1), sum / oracle,
              quantile(ratio, 0.05), quantile(ratio, 0.5), quantile(ratio, 0.95));
}

void head(const char* name, const char* first) {
  std::printf(
      "<!-- %s -->\n| %s | cases | slowdown under 1%% | slowdown, %%: median / 99th / worst | "
      "throughput over oracle's | its 5th / 50th / 95th |\n|---|---|---|---|---|---|\n",
      name, first);
}

void two_jobs() {
  std::printf(
      "<!-- two jobs -->\n| way | A, min: printed / ours | B, min: printed / ours | note "
      "|\n|---|---|---|---|\n");
  const auto shown = [](double minutes) {
    char text[32];
    std::snprintf(text, sizeof text, "%.1f", minutes);
    return minutes == 0 ? std::string("failed") : std::string(text);
  };
  const auto print = [&](const sim::TwoJobsResult& each, const std::string& label) {
    std::printf("| %s | %s / %s | %s / %s | %s |\n", label.c_str(), shown(each.printed_a_min).c_str(),
                shown(each.a_min).c_str(), shown(each.printed_b_min).c_str(), shown(each.b_min).c_str(),
                each.note.c_str());
  };
  const auto rows = sim::run_two_jobs({});
  for (size_t i = 0; i + 1 < rows.size(); ++i) print(rows[i], rows[i].way);
  print(rows.back(), "AntMan's / ours, target 5%");
  sim::TwoJobsModel slow_a;
  slow_a.a_rate = 17.0 / 17.9;
  print(sim::run_two_jobs(slow_a).back(), "the same, if contention alone slows A");
  sim::TwoJobsModel strict;
  strict.target_slowdown = 0.01;
  print(sim::run_two_jobs(strict).back(), "the same, target 1%");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s PAIRS.json (measured pairs as published with Gavel)\n", argv[0]);
    return 2;
  }
  two_jobs();

  std::vector<Case> cases;
  std::vector<std::array<sim::OpponentSpec, 2>> triples;
  std::vector<std::string> triple_devices;
  std::mt19937_64 random(1);
  for (const char* device : {"k80", "p100"}) {
    const auto table = sim::InterferenceTable::read(argv[1], device);
    if (!table.ok()) {
      std::fprintf(stderr, "%s\n", table.status().message().c_str());
      return 1;
    }
    // The table tells of no names; those of the file are found by asking.
    std::vector<std::string> names(table->size());
    for (const char* model :
         {"ResNet-18", "ResNet-50", "Transformer", "Recommendation", "LM", "A3C", "CycleGAN"}) {
      for (unsigned batch = 0; batch <= 8192; ++batch) {
        const std::string config = batch == 0
                                       ? std::string(model)
                                       : std::string(model) + " (batch size " + std::to_string(batch) + ")";
        if (const size_t at = table->find(config); at != sim::InterferenceTable::kNone) names[at] = config;
      }
    }
    for (size_t i = 0; i < table->size(); ++i)
      for (size_t j = 0; j < table->size(); ++j)
        if (table->pair_rate(i, j) > 0)
          cases.push_back({device, model_of(names[i]), model_of(names[j]), table->pair_rate(i, j),
                           table->pair_rate(j, i)});
    for (int drawn = 0; drawn < 200;) {
      const size_t i = random() % table->size(), j = random() % table->size(), k = random() % table->size();
      if (j == k || table->pair_rate(i, j) <= 0 || table->pair_rate(i, k) <= 0) continue;
      sim::OpponentSpec a, b;
      a.guaranteed_rate = table->pair_rate(i, j);
      a.own_rate = table->pair_rate(j, i);
      b.guaranteed_rate = table->pair_rate(i, k);
      b.own_rate = table->pair_rate(k, i);
      triples.push_back({a, b});
      triple_devices.emplace_back(device);
      ++drawn;
    }
  }
  const auto opponent = [](const Case& each) {
    sim::OpponentSpec out;
    out.guaranteed_rate = each.guaranteed_rate;
    out.own_rate = each.own_rate;
    return std::vector<sim::OpponentSpec>{out};
  };

  // Every setting on every case; then for each case the setting that is best on cases that share neither model with it.
  std::vector<std::vector<Outcome>> all(kGrid.size());
  for (size_t s = 0; s < kGrid.size(); ++s)
    for (size_t c = 0; c < cases.size(); ++c)
      all[s].push_back(play(opponent(cases[c]), sim::ContentionCurve::kTurns, 0.02, kGrid[s], c + 1));
  std::map<std::string, std::vector<Outcome>> judged;
  std::array<size_t, kGrid.size()> chosen{};
  std::map<std::pair<std::string, std::string>, size_t> best_for;
  for (size_t c = 0; c < cases.size(); ++c) {
    const auto key = std::pair(cases[c].guaranteed, cases[c].opportunistic);
    auto known = best_for.find(key);
    if (known == best_for.end()) {
      size_t best = 0;
      double best_value = -1;
      for (size_t s = 0; s < kGrid.size(); ++s) {
        double sum = 0, oracle = 0, within = 0, count = 0;
        for (size_t o = 0; o < cases.size(); ++o) {
          const Case& other = cases[o];
          if (other.guaranteed == key.first || other.guaranteed == key.second ||
              other.opportunistic == key.first || other.opportunistic == key.second)
            continue;
          sum += all[s][o].sum;
          oracle += all[s][o].oracle;
          within += all[s][o].slowdown < 0.01 ? 1 : 0;
          ++count;
        }
        // Within the target in 99.5% of the cases first, then throughput.
        const double value = sum / oracle + 10 * std::min(within / count, 0.995);
        if (value > best_value) {
          best_value = value;
          best = s;
        }
      }
      known = best_for.emplace(key, best).first;
    }
    ++chosen[known->second];
    judged[cases[c].device].push_back(all[known->second][c]);
    judged["both"].push_back(all[known->second][c]);
  }
  head("pairs", "device");
  for (const char* device : {"k80", "p100", "both"}) row(device, judged[device]);
  std::printf("\nSettings chosen (confidence, iterations between checks): ");
  bool first = true;
  for (size_t s = 0; s < kGrid.size(); ++s) {
    if (chosen[s] == 0) continue;
    std::printf("%s%.1f, %u: %zu cases", first ? "" : "; ", kGrid[s].confidence, kGrid[s].check_every,
                chosen[s]);
    first = false;
  }
  std::printf(".\n");

  const Settings defaults{sched::OpControllerOptions{}.confidence, sched::OpControllerOptions{}.check_every};
  head("curves", "curve, jitter");
  for (const auto curve : {sim::ContentionCurve::kTurns, sim::ContentionCurve::kGaps,
                           sim::ContentionCurve::kConvex, sim::ContentionCurve::kConcave})
    for (const double jitter : {0.005, 0.01, 0.02}) {
      std::vector<Outcome> outcomes;
      for (size_t c = 0; c < cases.size(); c += 3)
        outcomes.push_back(play(opponent(cases[c]), curve, jitter, defaults, c + 1));
      char label[64];
      std::snprintf(label, sizeof label, "%s, %.1f%%", name_of(curve), 100 * jitter);
      row(label, outcomes);
    }

  head("triples", "curve");
  for (const auto curve :
       {sim::ContentionCurve::kTurns, sim::ContentionCurve::kGaps, sim::ContentionCurve::kConvex}) {
    std::vector<Outcome> outcomes;
    for (size_t t = 0; t < triples.size(); ++t)
      outcomes.push_back(play({triples[t][0], triples[t][1]}, curve, 0.02, defaults, t + 1));
    row(name_of(curve), outcomes);
  }
  return 0;
}
