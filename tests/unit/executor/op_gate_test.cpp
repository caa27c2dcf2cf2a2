// Gates of opportunistic sessions beside guaranteed ones, under each policy that lets sessions of both classes take turns.
// SPDX-License-Identifier: Apache-2.0
#include "support/gated_session.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT

TEST_CASE(
    "gates of opportunistic sessions close while a guaranteed one is learned, and open when it pauses or "
    "leaves") {
  for (const char* policy : {"pack", "fair", "priority"}) {
    CAPTURE(policy);
    auto runtime = open_runtime(options_of({"host?total_bytes=134217728", memory::Layout::kVirtual}, policy));
    gates_close_and_open(*runtime);
    CHECK(runtime->check().empty());
  }
}

TEST_CASE("guaranteed sessions go on beside opportunistic ones that wait at their gates inside iterations") {
  for (const char* policy : {"pack", "fair", "priority"})
    for (const uint32_t lanes : {1U, 3U}) {
      CAPTURE(policy, lanes);
      auto options = options_of({"host?total_bytes=134217728", memory::Layout::kVirtual}, policy);
      options.max_lanes = lanes;
      auto runtime = open_runtime(std::move(options));
      guaranteed_go_on(*runtime);
      CHECK(runtime->check().empty());
    }
}

}  // namespace
