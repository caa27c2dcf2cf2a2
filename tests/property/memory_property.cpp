// Random sequences of everything DeviceMemory can do, against a model that knows what must be true after each
// step. Both layouts, on the host device (whose bytes are written and read in stream order, so that a block
// reused too early is seen) and on the sim device, with and without scripted faults.
//
// Held at each step: promises never above the capacity (1), live blocks disjoint and inside what their owner
// was promised (2), no ephemeral bytes between iterations (3), a session that ends leaves nothing (6); at the
// end everything is back (8). On the virtual layout, what is within the capacity must also be placeable:
// fragmentation is no excuse there.
//
// GPUSHARE_MEMORY_STEPS sets the number of steps of each run, GPUSHARE_TEST_SEED the seed.
//
// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <string>

#include "property/memory_world.hpp"
#include "support/sanitizers.hpp"

using namespace gpushare;
using memory::Layout;
using test::World;

namespace {

constexpr uint64_t kDefaultSteps = test::kSanitized ? 6'000 : 60'000;

uint64_t steps() {
  return test::number_from("GPUSHARE_MEMORY_STEPS", kDefaultSteps);
}

void run(const std::string& spec, Layout layout, bool faults, uint64_t granularity = 0) {
  const uint64_t seed = test::seed() + static_cast<uint64_t>(layout) * 2 + (faults ? 1 : 0);
  INFO("GPUSHARE_TEST_SEED gives " << seed);
  World world(spec, layout, seed, faults, granularity);
  const uint64_t count = steps();
  for (uint64_t i = 0; i < count; ++i) world.step();
  world.finish();
}

const char* const kHost = "host?total_bytes=256MiB";
const char* const kCuda = "cuda?total_bytes=256MiB&driver=" GPUSHARE_CUDA_STANDIN;
const char* const kSim = "sim?total_bytes=256MiB";
constexpr uint64_t kLarge = uint64_t{4} << 20;

}  // namespace

TEST_CASE("host, contiguous") {
  run(kHost, Layout::kContiguous, false);
}
TEST_CASE("host, virtual") {
  run(kHost, Layout::kVirtual, false);
}
TEST_CASE("host, contiguous, faults") {
  run(kHost, Layout::kContiguous, true);
}
TEST_CASE("host, virtual, faults") {
  run(kHost, Layout::kVirtual, true);
}
TEST_CASE("cuda on the stand-in for its driver, contiguous") {
  run(kCuda, Layout::kContiguous, false);
}
TEST_CASE("cuda on the stand-in for its driver, virtual") {
  run(kCuda, Layout::kVirtual, false);
}
TEST_CASE("sim, contiguous") {
  run(kSim, Layout::kContiguous, false);
}
TEST_CASE("sim, virtual") {
  run(kSim, Layout::kVirtual, false);
}
TEST_CASE("sim, contiguous, faults") {
  run(kSim, Layout::kContiguous, true);
}
TEST_CASE("sim, virtual, faults") {
  run(kSim, Layout::kVirtual, true);
}
// Small sessions have smaller granules than lanes and large ones, as on a large device.
TEST_CASE("host, virtual, small sessions") {
  run(kHost, Layout::kVirtual, false, kLarge);
}
TEST_CASE("host, virtual, small sessions, faults") {
  run(kHost, Layout::kVirtual, true, kLarge);
}
TEST_CASE("cuda on the stand-in for its driver, virtual, small sessions") {
  run(kCuda, Layout::kVirtual, false, kLarge);
}
// Not run by default: the device that GPUSHARE_MEMORY_SPEC names, for scripts/gpu-suite.
TEST_CASE("named device, contiguous", "[.]") {
  const char* spec = std::getenv("GPUSHARE_MEMORY_SPEC");
  REQUIRE(spec != nullptr);
  run(spec, Layout::kContiguous, false);
}
TEST_CASE("named device, virtual", "[.]") {
  const char* spec = std::getenv("GPUSHARE_MEMORY_SPEC");
  REQUIRE(spec != nullptr);
  run(spec, Layout::kVirtual, false);
}
