// measure_range_driver [rounds, 9] [PEER]: what committing and decommitting granules of an elastic range cost, beside
// the driver calls of an allocator that maps each page by itself, on the stand-in for CUDA's driver. Prints the table of
// docs/design/elastic.md.
//
// The ways, in turns, each by 1 and by 8 threads, for 1 and for 16 granules a call:
//   again    a range commits and decommits granules that nobody else needs
//   in turn  ranges of two sessions, each of which takes the granules from the other
//   pages    for each page: unmap, create, map, access; then unmap, map a page of zeros, access, release. One lock for all
//   peer     PEER, a shared library over the same stand-in: peer_open(pages), peer_map(first, count), peer_unmap(first, count)
// CPU time of all threads for a granule, commit and decommit together.
// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <gpushare/gpushare.hpp>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "device/cuda/driver_api.hpp"

using namespace gpushare::device::cuda::api;  // NOLINT: the driver's names
extern "C" {
CUresult cuInit(unsigned);
CUresult cuDevicePrimaryCtxRetain(CUcontext*, CUdevice);
CUresult cuCtxSetCurrent(CUcontext);
CUresult cuMemAddressReserve(CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long);
CUresult cuMemCreate(CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp*, unsigned long long);
CUresult cuMemRelease(CUmemGenericAllocationHandle);
CUresult cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
CUresult cuMemUnmap(CUdeviceptr, size_t);
CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t);
}

namespace gs = gpushare;
namespace {

constexpr uint64_t kGranule = uint64_t{2} << 20;
constexpr size_t kThreads = 8, kMostRun = 16, kPages = kThreads * kMostRun;

[[noreturn]] void give_up(const std::string& what) {
  std::fprintf(stderr, "measure_range_driver: %s\n", what.c_str());
  std::exit(1);
}
void check(CUresult result) {
  if (result != CUDA_SUCCESS) give_up("a driver call failed: " + std::to_string(result));
}

struct Pages {
  Pages() {
    check(cuInit(0));
    check(cuDevicePrimaryCtxRetain(&context, 0));
    check(cuCtxSetCurrent(context));
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    check(cuMemAddressReserve(&base, kPages * kGranule, 0, 0, 0));
    check(cuMemCreate(&zeros, kGranule, &properties, 0));
    for (size_t page = 0; page < kPages; ++page) map(page, zeros);
  }
  void map(size_t page, CUmemGenericAllocationHandle memory) {
    check(cuMemMap(base + page * kGranule, kGranule, 0, memory, 0));
    check(cuMemSetAccess(base + page * kGranule, kGranule, &access, 1));
  }
  void there_and_back(size_t first, size_t count) {
    const std::lock_guard lock(mutex);
    for (size_t page = first; page < first + count; ++page) {
      check(cuMemUnmap(base + page * kGranule, kGranule));
      check(cuMemCreate(&memories[page], kGranule, &properties, 0));
      map(page, memories[page]);
    }
    for (size_t page = first; page < first + count; ++page) {
      check(cuMemUnmap(base + page * kGranule, kGranule));
      map(page, zeros);
      check(cuMemRelease(memories[page]));
    }
  }
  std::mutex mutex;
  CUcontext context = nullptr;
  CUdeviceptr base = 0;
  CUmemGenericAllocationHandle zeros = 0, memories[kPages] = {};
  CUmemAllocationProp properties{};
  CUmemAccessDesc access{};
};

struct Way {
  const char* name;
  std::function<void(size_t first, size_t count, int turn)> there_and_back;
  std::vector<double> us = {};  // of the rounds
};

double cpu_us() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) / 1e3;
}

double measure(const Way& way, const Pages& pages, size_t threads, size_t run) {
  constexpr int kTurns = 200;
  std::vector<std::thread> workers;
  const double start = cpu_us();
  for (size_t thread = 0; thread < threads; ++thread)
    workers.emplace_back([&, thread] {
      check(cuCtxSetCurrent(pages.context));
      for (int turn = 0; turn < kTurns; ++turn) way.there_and_back(thread * kMostRun, run, turn);
    });
  for (std::thread& worker : workers) worker.join();
  return (cpu_us() - start) / static_cast<double>(threads * run * kTurns);
}

}  // namespace

int main(int argc, char** argv) try {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 9;
  if (rounds < 1) give_up("usage: measure_range_driver [rounds] [PEER]");
  Pages pages;
  gs::RuntimeOptions options;
  options.device = "cuda?total_bytes=4GiB&driver=" GPUSHARE_CUDA_STANDIN;
  options.capacity_bytes = 2 * kPages * kGranule;
  gs::Runtime runtime = gs::Runtime::open(options);
  gs::SessionOptions wanted;
  wanted.ephemeral_bytes = kGranule;
  gs::Session sessions[] = {runtime.open_session(wanted), runtime.open_session(wanted)};
  gs::Range again(sessions[0], {"again", kPages * kGranule, {}, {}, 0});
  // A second runtime has so few granules that each commit takes those of the other range.
  std::vector<gs::Runtime> small;
  std::vector<gs::Session> owners;
  std::vector<gs::Range> in_turn;
  for (size_t thread = 0; thread < kThreads; ++thread) {
    options.capacity_bytes = (2 + kMostRun) * kGranule;
    small.push_back(gs::Runtime::open(options));
    for (int i = 0; i < 2; ++i) owners.push_back(small.back().open_session(wanted));
    for (int i = 0; i < 2; ++i)
      in_turn.push_back(gs::Range(owners[2 * thread + i], {"in turn", kMostRun * kGranule, {}, {}, 0}));
  }
  std::vector<Way> ways = {
      {"again",
       [&](size_t first, size_t count, int) {
         again.commit(first * kGranule, count * kGranule);
         again.decommit(first * kGranule, count * kGranule);
       }},
      {"in turn",
       [&](size_t first, size_t, int turn) {
         gs::Range& range = in_turn[first / kMostRun * 2 + static_cast<size_t>(turn % 2)];
         range.commit(0, kMostRun * kGranule);
         range.decommit(0, kMostRun * kGranule);
       }},
      {"pages", [&](size_t first, size_t count, int) { pages.there_and_back(first, count); }},
  };
  if (argc > 2) {
    void* const peer = dlopen(argv[2], RTLD_NOW);
    if (peer == nullptr) give_up(dlerror());
    auto* const open = reinterpret_cast<void (*)(size_t)>(dlsym(peer, "peer_open"));
    auto* const map = reinterpret_cast<void (*)(size_t, size_t)>(dlsym(peer, "peer_map"));
    auto* const unmap = reinterpret_cast<void (*)(size_t, size_t)>(dlsym(peer, "peer_unmap"));
    if (open == nullptr || map == nullptr || unmap == nullptr) give_up("the peer lacks a function");
    open(kPages);
    ways.push_back({"peer", [map, unmap](size_t first, size_t count, int) {
                      map(first, count);
                      unmap(first, count);
                    }});
  }
  std::printf("CPU time for a granule there and back, us: median of %d rounds (least to most)\n", rounds);
  std::printf("| way | threads | granules a call | us |\n|---|---|---|---|\n");
  for (const size_t threads : {size_t{1}, kThreads})
    for (const size_t run : {size_t{1}, kMostRun}) {
      for (Way& way : ways) way.us.clear();
      for (int round = 0; round < rounds; ++round)
        for (Way& way : ways)
          if (run == kMostRun || way.name != std::string("in turn"))
            way.us.push_back(measure(way, pages, threads, run));
      for (Way& way : ways) {
        if (way.us.empty()) continue;
        std::sort(way.us.begin(), way.us.end());
        std::printf("| %s | %zu | %zu | %.2f (%.2f to %.2f) |\n", way.name, threads, run,
                    way.us[way.us.size() / 2], way.us.front(), way.us.back());
      }
    }
  std::fflush(stdout);
  std::_Exit(0);  // the pages stay; the stand-in would tell of them
} catch (const std::exception& error) {
  std::fprintf(stderr, "measure_range_driver: %s\n", error.what());
  return 1;
}
