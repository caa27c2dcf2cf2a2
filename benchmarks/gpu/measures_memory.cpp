// Measurements 1 and 6.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <gpushare/gpushare.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "measures.hpp"

namespace gpushare::gpu_suite {
void measure_allocation(const Driver& driver, const Settings& settings, Report& report) {
  const std::string group = "1 allocation";
  constexpr int kCalls = 100;
  {
    Runtime runtime = Runtime::open({.device = "cuda:0", .capacity_bytes = 512u << 20});
    Session session = runtime.open_session({.name = "allocation",
                                            .persistent_bytes = 32u << 20,
                                            .ephemeral_bytes = 256u << 20,
                                            .allow_queueing = false});
    for (const uint64_t bytes :
         {uint64_t{1} << 10, uint64_t{64} << 10, uint64_t{1} << 20, uint64_t{16} << 20}) {
      Iteration iteration = session.begin_iteration();
      report.add(group, "alloc + free, " + size_name(bytes), "gpushare, lane", "us",
                 time_host_us(settings.repeats, kCalls, [&] {
                   for (int i = 0; i < kCalls; ++i) {
                     const Address block = iteration.alloc_bytes(bytes);
                     check(gpushare_memory_free(runtime.get(), block));
                   }
                 }));
      iteration.end();
    }
    report.add(group, "eight blocks, given back by the iteration's end", "gpushare, lane", "us",
               time_host_us(settings.repeats, 1, [&] {
                 Iteration iteration = session.begin_iteration();
                 for (int i = 0; i < 8; ++i) (void)iteration.alloc_bytes(1u << 20);
                 iteration.end();
               }));
  }
  const PlainStream stream(driver);
  if (driver.cuMemAllocAsync != nullptr && driver.cuDeviceGetDefaultMemPool != nullptr &&
      driver.cuMemPoolSetAttribute != nullptr) {
    void* pool = nullptr;
    uint64_t keep = UINT64_MAX;
    constexpr int kReleaseThreshold = 4;  // CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    must(driver.cuDeviceGetDefaultMemPool(&pool, 0), "cuDeviceGetDefaultMemPool");
    must(driver.cuMemPoolSetAttribute(pool, kReleaseThreshold, &keep), "cuMemPoolSetAttribute");
  }
  for (const uint64_t bytes :
       {uint64_t{1} << 10, uint64_t{64} << 10, uint64_t{1} << 20, uint64_t{16} << 20}) {
    const std::string what = "alloc + free, " + size_name(bytes);
    report.add(group, what, "cuMemAlloc", "us", time_host_us(settings.repeats, 10, [&] {
                 for (int i = 0; i < 10; ++i) const PlainBlock block(driver, bytes);
               }));
    if (driver.cuMemAllocAsync == nullptr || driver.cuMemFreeAsync == nullptr) {
      report.skip(group, what + " by cuMemAllocAsync", "the driver lacks it");
      continue;
    }
    report.add(group, what, "cuMemAllocAsync, warm", "us", time_host_us(settings.repeats, kCalls, [&] {
                 for (int i = 0; i < kCalls; ++i) {
                   CUdeviceptr block = 0;
                   must(driver.cuMemAllocAsync(&block, bytes, stream.get()), "cuMemAllocAsync");
                   must(driver.cuMemFreeAsync(block, stream.get()), "cuMemFreeAsync");
                 }
                 stream.synchronize();
               }));
  }
  measure_torch_allocation(
      settings, {uint64_t{1} << 10, uint64_t{64} << 10, uint64_t{1} << 20, uint64_t{16} << 20}, report);
}

namespace {

// AntMan shrinks a job from 17.6 to 1.3 GB in 17 ms and lets it grow back in 143 ms: caches, without copies. Here the
// same bytes as free bytes of P that go back to the device, and as live blocks that move to host memory and back.
void measure_scaling(const Settings& settings, Report& report) {
  const std::string group = "6 resize, map and unmap";
  const uint64_t total = Runtime::open({.device = "cuda:0"}).info().capacity_bytes;
  // Whole granules: a quota between two of them leaves room for the next one.
  const uint64_t full = std::min<uint64_t>(17'600'000'000, total / 2) / settings.load_divisor >> 21 << 21;
  const uint64_t small = full * 13 / 176 >> 21 << 21;
  const std::string sizes =
      "session of " + std::to_string(full >> 20) + " MiB to " + std::to_string(small >> 20) + " MiB";
  Runtime runtime = Runtime::open({.device = "cuda:0",
                                   .capacity_bytes = full + full / 8,
                                   .layout = Layout::virtual_memory,
                                   .spill_limit_bytes = 2 * full,
                                   .spill_move_bytes = UINT64_MAX / 2,
                                   .spill_move_ns = UINT64_MAX / 2,
                                   .spill_move_loss = 1e9});
  Session session = runtime.open_session({.name = "scaling",
                                          .persistent_bytes = small / 2,
                                          .ephemeral_bytes = 2u << 20,
                                          .allow_queueing = false,
                                          .allow_spill = true});
  session.begin_iteration().end();
  runtime.set_capacity(
      full + full / 16);  // below the capacity of opening, what is given back goes to the device at once
  const auto ms_since = [](std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  };
  // Iterations until it is so; time in those that moved something.
  const auto boundaries_ms = [&](const auto& done) {
    double ms = 0;
    for (int i = 0; !done(); ++i) {
      if (i == 2000) {
        const gpushare_session_info now = session.info();
        throw std::runtime_error("a session did not move its blocks in 2,000 iterations: " +
                                 std::to_string(now.promised_persistent_bytes) + " bytes of P promised, " +
                                 std::to_string(now.spilled_bytes) + " on the host, " + sizes);
      }
      const uint64_t before = session.info().promised_persistent_bytes;
      const auto start = std::chrono::steady_clock::now();
      session.begin_iteration().end();
      if (session.info().promised_persistent_bytes != before) ms += ms_since(start);
    }
    return ms;
  };
  std::vector<double> free_down, free_up, live_down, live_up;
  const int repeats = std::max(3, settings.repeats / 4);
  for (int i = 0; i <= repeats; ++i) {
    auto start = std::chrono::steady_clock::now();
    const Address block = session.alloc_bytes(Kind::model, full - small);
    const double up = ms_since(start);
    check(gpushare_memory_free(runtime.get(), block));
    start = std::chrono::steady_clock::now();
    session.set_quota(small);
    if (i > 0) free_down.push_back(ms_since(start));
    if (i > 0) free_up.push_back(up);
    session.set_quota(0);
  }
  const Address block = session.alloc_bytes(Kind::model, full - small);
  for (int i = 0; i < repeats; ++i) {
    session.set_quota(small);
    live_down.push_back(boundaries_ms([&] { return session.info().promised_persistent_bytes <= small; }));
    session.set_quota(0);
    live_up.push_back(boundaries_ms([&] { return session.info().spilled_bytes == 0; }));
  }
  check(gpushare_memory_free(runtime.get(), block));
  report.add(group, sizes + ", free bytes given to the device", "gpushare, virtual", "ms", free_down);
  report.add(group, sizes + ", the way back for new bytes", "gpushare, virtual", "ms", free_up);
  report.add(group, sizes + ", live blocks moved to the host", "gpushare, virtual", "ms", live_down);
  report.add(group, sizes + ", live blocks come home", "gpushare, virtual", "ms", live_up);
}

}  // namespace

void measure_virtual_memory(const Driver& driver, const Settings& settings, Report& report) {
  const std::string group = "6 resize, map and unmap";
  if (driver.cuMemMap == nullptr) {
    report.skip(group, "granules", "the driver has no virtual memory");
    return;
  }
  constexpr uint64_t kTotal = 128u << 20;
  CUdeviceptr range = 0;
  must(driver.cuMemAddressReserve(&range, kTotal, 0, 0, 0), "cuMemAddressReserve");
  CUmemAllocationProp properties{};
  properties.type = 1;
  properties.location = {1, 0};
  const CUmemAccessDesc access{{1, 0}, 3};
  for (const uint64_t granule : {uint64_t{2} << 20, uint64_t{8} << 20, uint64_t{32} << 20}) {
    const uint64_t count = kTotal / granule;
    std::vector<CUmemGenericAllocationHandle> handles(count);
    std::vector<double> create;
    std::vector<double> map;
    std::vector<double> unmap;
    const auto per_mib = static_cast<double>(kTotal >> 20);
    for (int i = 0; i <= settings.repeats; ++i) {
      // Each sample is one pass; time_host_us would map twice.
      const auto once = [&](std::vector<double>& out, const auto& body) {
        const auto start = std::chrono::steady_clock::now();
        body();
        const auto end = std::chrono::steady_clock::now();
        if (i > 0) out.push_back(std::chrono::duration<double, std::micro>(end - start).count() / per_mib);
      };
      once(create, [&] {
        for (auto& handle : handles)
          must(driver.cuMemCreate(&handle, granule, &properties, 0), "cuMemCreate");
      });
      once(map, [&] {
        for (uint64_t k = 0; k < count; ++k) {
          must(driver.cuMemMap(range + k * granule, granule, 0, handles[k], 0), "cuMemMap");
          must(driver.cuMemSetAccess(range + k * granule, granule, &access, 1), "cuMemSetAccess");
        }
      });
      once(unmap, [&] {
        for (uint64_t k = 0; k < count; ++k)
          must(driver.cuMemUnmap(range + k * granule, granule), "cuMemUnmap");
      });
      for (const auto handle : handles) must(driver.cuMemRelease(handle), "cuMemRelease");
    }
    const std::string of = ", granules of " + size_name(granule);
    report.add(group, "create" + of, "driver", "us/MiB", create);
    report.add(group, "map and give access" + of, "driver", "us/MiB", map);
    report.add(group, "unmap" + of, "driver", "us/MiB", unmap);
  }
  must(driver.cuMemAddressFree(range, kTotal), "cuMemAddressFree");

  for (const Layout layout : {Layout::contiguous, Layout::virtual_memory}) {
    Runtime runtime = Runtime::open({.device = "cuda:0", .capacity_bytes = 768u << 20, .layout = layout});
    report.add(group, "open and close a session of 64 MiB + 256 MiB",
               layout == Layout::contiguous ? "gpushare, contiguous" : "gpushare, virtual", "us",
               time_host_us(settings.repeats, 1, [&] {
                 Session session = runtime.open_session(
                     {.persistent_bytes = 64u << 20, .ephemeral_bytes = 256u << 20, .allow_queueing = false});
                 Iteration iteration = session.begin_iteration();
                 iteration.end();
                 session.close();
               }));
  }
  measure_scaling(settings, report);
}

}  // namespace gpushare::gpu_suite
