// Counts of the calls that elastic ranges make on the stand-in for CUDA's driver when they change hands. The counts of
// docs/design/elastic.md beside those of kvcached come from here.
// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "device_memory_fixture.hpp"
#include "memory/elastic_range.hpp"
#include "standin.h"

using namespace gpushare;
using namespace gpushare::test;

namespace {

struct Calls {
  uint64_t creates = standin_calls("cuMemCreate"), maps = standin_calls("cuMemMap"),
           accesses = standin_calls("cuMemSetAccess"), unmaps = standin_calls("cuMemUnmap"),
           releases = standin_calls("cuMemRelease"), synchronises = standin_calls("cuCtxSynchronize");
  Calls since(const Calls& before) const {
    Calls out;
    out.creates = creates - before.creates;
    out.maps = maps - before.maps;
    out.accesses = accesses - before.accesses;
    out.unmaps = unmaps - before.unmaps;
    out.releases = releases - before.releases;
    out.synchronises = synchronises - before.synchronises;
    return out;
  }
  bool operator==(const Calls&) const = default;
};

Calls calls(uint64_t creates, uint64_t maps, uint64_t accesses, uint64_t unmaps) {
  Calls out;
  out.creates = creates;
  out.maps = maps;
  out.accesses = accesses;
  out.unmaps = unmaps;
  out.releases = out.synchronises = 0;
  return out;
}

}  // namespace

TEST_CASE("a commit gives access to all granules with one call, a decommit asks nothing of the driver") {
  constexpr uint64_t kGranules = 32;
  Fixture f("cuda?total_bytes=256MiB&driver=" GPUSHARE_CUDA_STANDIN, Layout::kVirtual, 64 * kMiB);
  const uint64_t granule = f.memory->granularity_bytes();
  REQUIRE(granule * kGranules == 64 * kMiB);
  auto stream = f.stream();
  PersistentHeap* heaps[] = {f.heap(0, 0), f.heap(1, 0)};
  memory::ElasticRange* ranges[2];
  for (size_t i = 0; i < 2; ++i) ranges[i] = *f.memory->open_range(*heaps[i], "range", 64 * kMiB);

  Calls before;
  REQUIRE_OK(ranges[0]->commit(0, 64 * kMiB));
  CHECK(Calls().since(before) == calls(kGranules, kGranules, 1, 0));  // granules of the device, made once
  before = {};
  REQUIRE_OK(ranges[0]->decommit(0, 64 * kMiB).status());
  CHECK(Calls().since(before) == calls(0, 0, 0, 0));
  REQUIRE_OK(ranges[0]->commit(0, 64 * kMiB));  // nobody needed them meanwhile
  REQUIRE_OK(ranges[0]->decommit(0, 64 * kMiB).status());
  CHECK(Calls().since(before) == calls(0, 0, 0, 0));
  for (int turn = 0; turn < 10; ++turn) {  // each takes them from the other
    before = {};
    REQUIRE_OK(ranges[1 - turn % 2]->commit(0, 64 * kMiB));
    REQUIRE_OK(ranges[1 - turn % 2]->decommit(0, 64 * kMiB).status());
    CHECK(Calls().since(before) == calls(0, kGranules, 1, 1));
  }
  // Holes are two runs.
  before = {};
  REQUIRE_OK(ranges[1]->commit(8 * granule, 8 * granule));
  CHECK(Calls().since(before) == calls(0, 8, 1, 1));
  before = {};
  REQUIRE_OK(ranges[1]->commit(0, 24 * granule));
  CHECK(Calls().since(before) == calls(0, 16, 2, 1));
  for (memory::ElasticRange* range : ranges) f.memory->close_range(range);
  for (PersistentHeap* heap : heaps) REQUIRE_OK(f.memory->close_heap(heap));
}

TEST_CASE("spilled blocks lie in pinned memory once the driver refuses memory of the host") {
  Fixture f("cuda?total_bytes=256MiB&driver=" GPUSHARE_CUDA_STANDIN, Layout::kVirtual, 64 * kMiB);
  REQUIRE(f.memory->has_host_tier());
  auto* heap = f.heap(0, 0);
  std::vector<Address> blocks;
  const auto spill = [&] {
    const auto block = heap->alloc_spilled(Kind::kModel, 2 * kMiB, 0);
    INFO(block.status().to_string());
    REQUIRE(block.ok());
    blocks.push_back(*block);
  };
  spill();
  const uint64_t pinned = standin_calls("cuMemHostAlloc");
  for (const uint64_t result : {801, 2}) {  // not supported any more; the node is full
    REQUIRE(standin_configure("host_create_fails", result) == 0);
    for (int i = 0; i < 4; ++i) spill();
    CHECK(standin_calls("cuMemHostAlloc") == pinned + 1);  // one pool for all
  }
  // Without either the first reason is told.
  standin_fail_call("cuMemHostAlloc", 1, 2);
  const base::Status none = heap->alloc_spilled(Kind::kModel, 64 * kMiB, 0).status();
  CHECK(none.code() == GPUSHARE_HOST_OUT_OF_MEMORY);
  CHECK(none.message().find("phys_create_host") != std::string::npos);
  standin_clear_faults();
  REQUIRE(standin_configure("host_create_fails", 0) == 0);
  for (const Address block : blocks) REQUIRE_OK(f.memory->free(block));
  CHECK(f.memory->check() == "");
  REQUIRE_OK(f.memory->close_heap(heap));
}

// What the calls of the driver since the last question would have taken on an H100.
struct Spent {
  uint64_t from_ns = standin_cost_ns();
  double ms() {
    const uint64_t before_ns = std::exchange(from_ns, standin_cost_ns());
    return static_cast<double>(from_ns - before_ns) / 1e6;
  }
};

TEST_CASE("a large device opens, and 16 GiB of a session go and come, in a few calls of the driver") {
  constexpr uint64_t kGiB = uint64_t{1} << 30;
  const std::pair<const char*, uint64_t> machine[] = {{"costs", 1},
                                                      {"fill", 0},
                                                      {"memory_bytes", 142 * kGiB}},
                                         usual[] = {{"costs", 0}, {"fill", 1}, {"memory_bytes", kGiB}};
  for (const auto& [key, value] : machine) REQUIRE(standin_configure(key, value) == 0);
  {
    Fixture f("cuda?driver=" GPUSHARE_CUDA_STANDIN, Layout::kVirtual, 139 * kGiB);
    Spent spent;
    auto* heap = f.heap(0, 139 * kGiB);
    const double ms = spent.ms();
    INFO(ms);
    CHECK(ms < 300);
    REQUIRE_OK(f.memory->close_heap(heap));
  }
  {
    Fixture f("cuda?driver=" GPUSHARE_CUDA_STANDIN, Layout::kVirtual, 80 * kGiB);
    PersistentHeap *first = f.heap(0, 17 * kGiB), *second = f.heap(1, 63 * kGiB);
    Spent spent;
    REQUIRE_OK(first->resize(1 * kGiB));
    CHECK(spent.ms() < 17);  // its granules stay mapped until somebody needs them
    REQUIRE_OK(second->resize(79 * kGiB));
    double ms = spent.ms();
    INFO(ms);
    CHECK(ms < 143);
    REQUIRE_OK(second->resize(63 * kGiB));
    REQUIRE_OK(first->resize(17 * kGiB));
    ms = spent.ms();
    INFO(ms);
    CHECK(ms < 143);
    for (PersistentHeap* heap : {first, second}) REQUIRE_OK(f.memory->close_heap(heap));
  }
  {
    Fixture f("cuda?driver=" GPUSHARE_CUDA_STANDIN, Layout::kVirtual, 139 * kGiB);
    Spent spent;
    auto* small = f.heap(0, 1 * kMiB);
    CHECK(f.memory->stats().mapped_bytes == 2 * kMiB);
    CHECK(spent.ms() < 0.1);
    auto* large = f.heap(1, 4 * kGiB);  // its first granule alone has small handles
    const double ms = spent.ms();
    INFO(ms);
    CHECK(ms < 10);
    for (PersistentHeap* heap : {small, large}) REQUIRE_OK(f.memory->close_heap(heap));
  }
  for (const auto& [key, value] : usual) REQUIRE(standin_configure(key, value) == 0);
}
