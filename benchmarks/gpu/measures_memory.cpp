// Measurements 1 and 6.
// SPDX-License-Identifier: Apache-2.0
#include <gpushare/gpushare.hpp>
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
}

}  // namespace gpushare::gpu_suite
