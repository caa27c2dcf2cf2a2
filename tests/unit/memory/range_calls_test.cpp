// Counts of the calls that elastic ranges make on the stand-in for CUDA's driver when they change hands. The counts of
// docs/design/elastic.md beside those of kvcached come from here.
// SPDX-License-Identifier: Apache-2.0
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
  REQUIRE(standin_configure("host_create_fails", 801) == 0);
  const uint64_t pinned = standin_calls("cuMemHostAlloc");
  for (int i = 0; i < 8; ++i) spill();
  CHECK(standin_calls("cuMemHostAlloc") == pinned + 1);  // one pool for all
  REQUIRE(standin_configure("host_create_fails", 0) == 0);
  for (const Address block : blocks) REQUIRE_OK(f.memory->free(block));
  CHECK(f.memory->check() == "");
  REQUIRE_OK(f.memory->close_heap(heap));
}
