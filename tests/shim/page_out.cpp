// A process gives the device to others and takes it back, with blocks of several sizes. The shim's objects are part of the test,
// which moves the blocks in place of the session's thread. The driver is the recording one. GPUSHARE_MEMORY=1G,
// GPUSHARE_PINNED=100M, GPUSHARE_PAGEABLE=1.
// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "shim/driver.hpp"
#include "shim/move.hpp"
#include "shim/table.hpp"
#include "shim/words.hpp"
#include "support/catch.hpp"
#include "through_recorder.hpp"

using namespace gpushare::shim;  // NOLINT(google-build-using-namespace): as in gate.cpp

namespace {

constexpr uint64_t kMiB = 1 << 20;
constexpr int kPlace = 0;

uint64_t allocate(uint64_t mebibytes) {
  uint64_t address = 0;
  REQUIRE(reinterpret_cast<Result (*)(P, L)>(gpushare_shim_entries[kEntry_cuMemAlloc_v2])(
              &address, mebibytes * kMiB) == kSuccess);
  return address;
}
void give_back(uint64_t address) {
  REQUIRE(reinterpret_cast<Result (*)(L)>(gpushare_shim_entries[kEntry_cuMemFree_v2])(address) == kSuccess);
}
// MiB of the blocks that lie there.
uint64_t lie(Lies where) {
  return range_bytes(kPlace, where) / kMiB;
}
uint64_t pinned() {
  group();
  return load(g_slot->pinned) / kMiB;
}
uint64_t on_device() {
  return control<decltype(&recorder_used_bytes)>("recorder_used_bytes")() / kMiB;
}
// The page-out, and the parts that it tells of, in MiB.
Went go_out(std::vector<uint64_t>* out_parts) {
  out_parts->clear();
  return page_out(
      kPlace,
      [](void* who, uint64_t bytes) { static_cast<std::vector<uint64_t>*>(who)->push_back(bytes / kMiB); },
      out_parts);
}

}  // namespace

TEST_CASE(
    "all blocks go out together, in part where the host has no more, and not at all beyond what may be "
    "pinned") {
  void* context = nullptr;
  REQUIRE(real(kEntry_cuInit, I{0}) == kSuccess);
  REQUIRE(real(kEntry_cuDevicePrimaryCtxRetain, &context, I{0}) == kSuccess);
  REQUIRE(real(kEntry_cuCtxSetCurrent, context) == kSuccess);
  const uint64_t before = on_device();
  std::vector<uint64_t> blocks = {allocate(10), allocate(30), allocate(20)}, parts;
  CHECK(lie(Lies::device) == 60);

  CHECK(go_out(&parts) == Went::all);
  CHECK(is_out(kPlace));
  CHECK(lie(Lies::device) == 0);
  CHECK(lie(Lies::away) == 60);
  CHECK(pinned() == 60);
  CHECK(counted_here(kPlace) / kMiB == 60);  // their room on the device stays theirs
  CHECK(on_device() == before);
  CHECK(parts.front() == 0);
  blocks.push_back(allocate(10));
  CHECK(lie(Lies::away) == 70);
  CHECK(pinned() == 70);
  page_in(kPlace, nullptr, nullptr);
  CHECK_FALSE(is_out(kPlace));
  CHECK(lie(Lies::device) == 70);
  CHECK(pinned() == 0);
  CHECK(on_device() == before + 70);

  for (const uint64_t block : blocks) give_back(block);

  // What there is of the host takes two blocks.
  for (uint64_t& block : blocks) block = allocate(10);
  const auto host_limit = control<decltype(&recorder_set_host_limit)>("recorder_set_host_limit");
  host_limit(control<decltype(&recorder_host_bytes)>("recorder_host_bytes")() + 25 * kMiB);
  CHECK(go_out(&parts) == Went::in_part);
  CHECK(lie(Lies::away) == 20);
  CHECK(lie(Lies::device) == 20);
  CHECK(pinned() == 20);
  page_in(kPlace, nullptr, nullptr);
  CHECK(lie(Lies::device) == 40);
  CHECK(pinned() == 0);
  host_limit(UINT64_MAX);

  // More than may be pinned.
  blocks.push_back(allocate(70));
  CHECK(go_out(&parts) == Went::nothing);
  CHECK(parts.empty());
  CHECK_FALSE(is_out(kPlace));
  CHECK(lie(Lies::device) == 110);
  CHECK(pinned() == 0);
  for (const uint64_t block : blocks) give_back(block);
  CHECK(counted_here(kPlace) == 0);
  CHECK(on_device() == before);
}
