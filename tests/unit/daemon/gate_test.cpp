// Gates on a shared device: its sessions of both classes in one process take turns through the daemon.
// SPDX-License-Identifier: Apache-2.0
#include "support/gated_session.hpp"
#include "support/shared_service.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT

TEST_CASE("gates close and open on a shared device, under each policy, and hold up no guaranteed session") {
  for (const char* policy : {"pack", "fair", "priority"})
    for (const uint32_t lanes : {1U, 3U}) {
      CAPTURE(policy, lanes);
      SharedService shared([&](daemon::ServiceOptions& options) {
        options.policy = policy;
        options.max_lanes = lanes;
      });
      const auto runtime = SharedService::open();
      gates_close_and_open(*runtime);
      guaranteed_go_on(*runtime);
      CHECK(runtime->check().empty());
    }
}

}  // namespace
