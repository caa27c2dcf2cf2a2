// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>

#include "cts.hpp"
#include "support/random.hpp"

namespace gpushare::cts {

CTS_TEST("memory: allocations are aligned and do not overlap") {
  const uint64_t alignment = cts.device->info().allocation_alignment_bytes;
  REQUIRE(alignment > 0);
  std::map<device::Address, uint64_t> blocks;
  for (const uint64_t bytes :
       {1ull, 2ull, 255ull, 256ull, 257ull, 4096ull, 5000ull, 1ull << 20, 3ull << 20}) {
    for (int i = 0; i < 8; ++i) {
      const auto block = cts.device->alloc(bytes);
      REQUIRE_OK(block.status());
      CHECK(*block % alignment == 0);
      CHECK(*block != 0);
      blocks[*block] = bytes;
    }
  }
  device::Address end = 0;
  for (const auto& [address, bytes] : blocks) {
    CHECK(address >= end);
    end = address + bytes;
  }
  for (const auto& [address, bytes] : blocks) CHECK_OK(cts.device->free(address));
}

CTS_TEST("memory: blocks keep their bytes while others come and go") {
  INFO("seed " << test::seed());
  test::Random random(test::seed());
  struct Block {
    device::Address address;
    std::vector<uint8_t> bytes;
  };
  std::vector<Block> blocks;
  const auto stream = cts.stream();
  const auto drop = [&](size_t index) {
    CHECK(cts.download(stream, blocks[index].address, blocks[index].bytes.size()) == blocks[index].bytes);
    REQUIRE_OK(cts.device->free(blocks[index].address));
    blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(index));
  };
  for (uint64_t step = 0; step < 600; ++step) {
    if (blocks.size() > 30 || (!blocks.empty() && test::uniform(random, 0, 2) == 0)) {
      drop(test::uniform(random, 0, blocks.size() - 1));
      continue;
    }
    const uint64_t bytes = test::uniform(random, 1, 20'000);
    blocks.push_back({*cts.device->alloc(bytes), pattern(bytes, step)});
    cts.upload(stream, blocks.back().address, blocks.back().bytes);
  }
  while (!blocks.empty()) drop(0);
}

CTS_TEST("memory: more than there is is refused with the numbers") {
  const uint64_t total = cts.device->info().total_bytes;
  REQUIRE(total > 0);
  const auto block = cts.device->alloc(total + (64ull << 20));
  CHECK(block.status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK_FALSE(block.status().message().empty());
  CHECK(cts.device->alloc(UINT64_MAX).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(cts.device->alloc(1ull << 62).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  // Nothing was lost by the failures.
  const auto small = cts.device->alloc(1 << 20);
  REQUIRE_OK(small.status());
  CHECK_OK(cts.device->free(*small));
}

CTS_TEST("memory: free bytes add up") {
  if (!has_tag(kExactMemory)) return;
  const uint64_t before = cts.device->refresh_info()->free_bytes;
  const uint64_t total = cts.device->info().total_bytes;
  CHECK(before == total);
  const device::Address block = *cts.device->alloc(8 << 20);
  CHECK(cts.device->refresh_info()->free_bytes == before - (8 << 20));
  CHECK_OK(cts.device->free(block));
  CHECK(cts.device->refresh_info()->free_bytes == before);
}

CTS_TEST("memory: all of it can be had and given back") {
  if (!has_tag(kExactMemory)) return;
  const uint64_t chunk = cts.device->info().total_bytes / 16;
  for (int round = 0; round < 2; ++round) {
    std::vector<device::Address> blocks;
    for (int i = 0; i < 16; ++i) {
      const auto block = cts.device->alloc(chunk);
      REQUIRE_OK(block.status());
      blocks.push_back(*block);
    }
    CHECK(cts.device->alloc(1).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
    for (const device::Address block : blocks) CHECK_OK(cts.device->free(block));
  }
}

CTS_TEST("memory: an allocation of nothing is refused") {
  CHECK(is_call_error(cts.device->alloc(0).status()));
  CHECK(is_call_error(cts.device->host_alloc(0).status()));
}

CTS_TEST("memory: only what was allocated can be freed and only once") {
  const device::Address block = *cts.device->alloc(1 << 20);
  CHECK(is_call_error(cts.device->free(block + 4096)));
  CHECK_OK(cts.device->free(block));
  CHECK(is_call_error(cts.device->free(block)));
  CHECK(is_call_error(cts.device->free(0x1234)));
}

CTS_TEST("memory: host memory is the process's own") {
  for (const uint64_t bytes : {1ull, 4096ull, 3ull << 20}) {
    const auto host = cts.device->host_alloc(bytes);
    REQUIRE_OK(host.status());
    auto* data = static_cast<uint8_t*>(*host);
    std::fill(data, data + bytes, 0x42);
    CHECK(data[bytes - 1] == 0x42);
    CHECK_OK(cts.device->host_free(*host));
    CHECK(is_call_error(cts.device->host_free(*host)));
  }
}

CTS_TEST("memory: more host memory than there can be is refused") {
  CHECK(cts.device->host_alloc(1ull << 60).status().code() == GPUSHARE_HOST_OUT_OF_MEMORY);
  CHECK(cts.device->host_alloc(UINT64_MAX).status().code() == GPUSHARE_HOST_OUT_OF_MEMORY);
}

}  // namespace gpushare::cts
