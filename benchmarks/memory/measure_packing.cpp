// measure_packing: how small an arena each allocator needs on random variants of the recorded traces
// (trace_variants.hpp). The smallest arena of a single trace says little: one block more or less moves it by percents.
// Nothing is timed; the same arguments give the same output.
//
//   measure_packing [VARIANTS [SEED]]      default 20 1, some minutes
//
// For each trace and kind of variant, the table has the median of min arena over peak bytes with the 10th and the 90th
// percentile. `heap over the best` compares on the same variant: the heap's arena over the smallest of all other
// allocators, the median, the percentiles, and in how many variants that is at most 1.
// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "memory/allocators.hpp"
#include "memory/trace_io.hpp"
#include "memory/trace_variants.hpp"
#if GPUSHARE_WITH_PEERS
#include "memory/peers.hpp"
#endif

namespace {

using namespace gpushare;
using bench::Buffers;

struct Candidate {
  const char* name;
  double (*min_arena)(const memory::Trace&);
};

const Candidate kCandidates[] = {
    {"heap", bench::min_arena<bench::OurHeap>},
    {"float bins", bench::min_arena<bench::FloatBins>},
    {"tree best fit", bench::min_arena<bench::TreeBestFit>},
#if GPUSHARE_WITH_PEERS
    {"OffsetAllocator", bench::min_arena<bench::OffsetAllocatorPeer>},
    {"VMA", bench::min_arena<bench::VmaPeer<0>>},
    {"VMA min memory",
     bench::min_arena<bench::VmaPeer<VMA_VIRTUAL_ALLOCATION_CREATE_STRATEGY_MIN_MEMORY_BIT>>},
#endif
};
constexpr size_t kCandidateCount = std::size(kCandidates);

struct Recorded {
  const char* name;
  Buffers buffers;
};

// The minimalloc cases have sizes of some kilobytes; times the granule, so that rounding to it is not what is measured.
std::vector<Recorded> read_all() {
  std::vector<Recorded> all;
  for (const char* name : {"pangu_2.6B", "iopddl_S_1", "resnet50", "minimalloc_A", "minimalloc_B",
                           "minimalloc_C", "minimalloc_D", "minimalloc_E", "minimalloc_F"}) {
    auto loaded = memory::read_trace(std::string(GPUSHARE_SHARED_DATA) + "/alloc/" + name + ".csv");
    if (!loaded.ok()) {
      std::fprintf(stderr, "%s is left out: %s\n", name, loaded.status().message().c_str());
      continue;
    }
    Buffers buffers = memory::lifetimes(loaded->trace);
    if (std::string(name).starts_with("minimalloc"))
      for (memory::Buffer& buffer : buffers) buffer.size_bytes *= bench::kGranule;
    all.push_back({name, std::move(buffers)});
  }
  return all;
}

double quantile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(share * static_cast<double>(values.size() - 1) + 0.5)];
}

// Arenas of one row's variants, by candidate.
struct Row {
  std::vector<double> arenas[kCandidateCount];
  std::vector<double> over_best;  // of the heap, over the best of the others

  void measure(const memory::Trace& trace) {
    double best = std::numeric_limits<double>::infinity();
    for (size_t k = 0; k < kCandidateCount; ++k) {
      arenas[k].push_back(kCandidates[k].min_arena(trace));
      if (k > 0) best = std::min(best, arenas[k].back());
    }
    over_best.push_back(arenas[0].back() / best);
  }
  void add(const Row& row) {
    for (size_t k = 0; k < kCandidateCount; ++k)
      arenas[k].insert(arenas[k].end(), row.arenas[k].begin(), row.arenas[k].end());
    over_best.insert(over_best.end(), row.over_best.begin(), row.over_best.end());
  }
  void print(const char* trace, const char* kind) const {
    std::printf("| %s | %s", trace, kind);
    for (const std::vector<double>& values : arenas)
      std::printf(" | %.4f (%.3f-%.3f)", quantile(values, 0.5), quantile(values, 0.1), quantile(values, 0.9));
    const auto not_worse = std::count_if(over_best.begin(), over_best.end(), [](double r) { return r <= 1; });
    std::printf(" | %.4f (%.3f-%.3f), %d of %zu |\n", quantile(over_best, 0.5), quantile(over_best, 0.1),
                quantile(over_best, 0.9), static_cast<int>(not_worse), over_best.size());
    std::fflush(stdout);
  }
};

}  // namespace

int main(int argc, char** argv) {
  const int variants = argc > 1 ? std::atoi(argv[1]) : 20;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  if (variants < 1) {
    std::fprintf(stderr, "measure_packing [VARIANTS [SEED]]; VARIANTS is at least 1\n");
    return 2;
  }
  const std::vector<Recorded> recorded = read_all();
  if (recorded.empty()) return 1;
  std::printf("| trace | variants");
  for (const Candidate& candidate : kCandidates) std::printf(" | %s", candidate.name);
  std::printf(" | heap over the best |\n|---|---|");
  for (size_t k = 0; k <= kCandidateCount; ++k) std::printf("---|");
  std::printf("\n");
  Row all;
  for (size_t t = 0; t < recorded.size(); ++t) {
    const Buffers& buffers = recorded[t].buffers;
    const std::pair<const char*,
                    Buffers (*)(const Recorded&, const std::vector<Recorded>&, bench::Generator&)>
        kinds[] = {
            {"sizes scaled", [](const Recorded& r, const std::vector<Recorded>&,
                                bench::Generator& g) { return bench::with_scaled_sizes(r.buffers, g); }},
            {"some left out", [](const Recorded& r, const std::vector<Recorded>&,
                                 bench::Generator& g) { return bench::with_some_left_out(r.buffers, g); }},
            {"lifetimes shifted",
             [](const Recorded& r, const std::vector<Recorded>&, bench::Generator& g) {
               return bench::with_shifted_lifetimes(r.buffers, g);
             }},
            {"with another trace",
             [](const Recorded& r, const std::vector<Recorded>& others, bench::Generator& g) {
               return bench::interleaved(r.buffers, others[g() % others.size()].buffers, g);
             }},
        };
    Row as_recorded;
    as_recorded.measure(memory::trace_of(buffers));
    as_recorded.print(recorded[t].name, "as recorded");
    for (size_t kind = 0; kind < std::size(kinds); ++kind) {
      Row row;
      for (int v = 0; v < variants; ++v) {
        std::seed_seq seeds{seed, uint64_t{t}, uint64_t{kind}, static_cast<uint64_t>(v)};
        bench::Generator random(seeds);
        row.measure(memory::trace_of(kinds[kind].second(recorded[t], recorded, random)));
      }
      row.print(recorded[t].name, kinds[kind].first);
      all.add(row);
    }
  }
  all.print("all", "all variants");
}
