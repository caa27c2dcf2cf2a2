// The host device's work: its marks find every stray write.
// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "cli/host_work.hpp"
#include "support/catch.hpp"

using namespace gpushare::cli;

namespace {

struct Memory {
  explicit Memory(uint64_t bytes)
      : words(bytes / 8 + 1), block{static_cast<std::byte*>(static_cast<void*>(words.data())), bytes} {}
  std::vector<uint64_t> words;
  WorkBlock block;
};

}  // namespace

TEST_CASE("work: marks hold for their owner alone", "[cli]") {
  Memory a(10 * HostWork::kPageBytes);
  Memory b(3 * HostWork::kPageBytes + 100);
  const std::vector<WorkBlock> blocks{a.block, b.block};
  HostWork::mark(blocks, 1);
  CHECK(HostWork::marked(blocks, 1));
  CHECK_FALSE(HostWork::marked(blocks, 2));
  // One page of the last, short one: found by the look that covers it, and only by that.
  b.block.data[3 * HostWork::kPageBytes] ^= std::byte{1};
  CHECK_FALSE(HostWork::marked(blocks, 1));
  size_t found = 0;
  for (uint64_t first = 0; first < 16; ++first) found += HostWork::marked(blocks, 1, first, 16) ? 0 : 1;
  CHECK(found == 1);
}

TEST_CASE("work: arithmetic leaves the marks alone and changes the rest", "[cli]") {
  const HostWork work(100.0, 10.0);
  Memory a(8 * HostWork::kPageBytes);
  const std::vector<WorkBlock> blocks{a.block};
  CHECK(work.run(blocks, 5, 100'000));
  CHECK(HostWork::marked(blocks, 5));
  // Values settle at 0.5 = 0.5 * 0.5 + 0.25.
  const auto* values = static_cast<const float*>(static_cast<const void*>(a.block.data));
  CHECK(values[100] == 0.5f);
}

TEST_CASE("work: blocks smaller than a page are work enough to end", "[cli]") {
  const HostWork work(100.0, 10.0);
  Memory a(256);
  CHECK(work.run(std::vector<WorkBlock>{a.block}, 5, 1e6));
  CHECK(work.run(std::vector<WorkBlock>{}, 5, 1e6));
  CHECK(work.least_ns(uint64_t{1} << 20) > work.least_ns(uint64_t{1} << 12));
}

TEST_CASE("work: calibration measures something", "[cli]") {
  const HostWork work;
  CHECK(work.round_ns() > 0);
  CHECK(work.page_ns() > 0);
  CHECK(work.round_ns() < 1e7);
}
