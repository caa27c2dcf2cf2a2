// The host runs out of memory in gpushare_session_submit, at each of its allocations in turn: what was refused leaves
// user_data with the caller, what was accepted runs and gives it back once.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <thread>

#include "gpushare/gpushare.h"
#include "support/catch.hpp"
#include "support/failing_new.hpp"
#include "support/sizes.hpp"

using gpushare::test::FailingNew;
using gpushare::test::kMiB;

TEST_CASE("a submission without memory is refused whole or accepted whole") {
  gpushare_runtime runtime = nullptr;
  gpushare_runtime_params params = GPUSHARE_RUNTIME_PARAMS_INIT;
  params.device = "host?total_bytes=67108864";
  REQUIRE(gpushare_runtime_open(&params, &runtime) == GPUSHARE_OK);
  gpushare_session session = nullptr;
  gpushare_session_params need = GPUSHARE_SESSION_PARAMS_INIT;
  need.ephemeral_bytes = kMiB;
  REQUIRE(gpushare_session_open(runtime, &need, &session) == GPUSHARE_OK);
  struct Data {
    std::atomic<int> runs{0}, releases{0};
  };
  int refused = 0, accepted = 0;
  for (uint64_t n = 0; accepted < 3 && n < 50; ++n) {
    INFO(n);
    // Held, so that it is queued and only this call allocates.
    gpushare_iteration iteration = nullptr;
    REQUIRE(gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration) == GPUSHARE_OK);
    Data data;
    gpushare_ticket ticket = nullptr;
    int32_t status = GPUSHARE_OK;
    {
      const FailingNew failing(n, false);
      status = gpushare_session_submit(
          session,
          [](void* user_data, gpushare_iteration) -> int32_t {
            ++static_cast<Data*>(user_data)->runs;
            return GPUSHARE_OK;
          },
          &data, [](void* user_data) { ++static_cast<Data*>(user_data)->releases; }, &ticket);
    }
    REQUIRE(gpushare_iteration_end(iteration) == GPUSHARE_OK);
    if (status == GPUSHARE_OK) {
      ++accepted;
      CHECK(gpushare_ticket_wait(ticket, GPUSHARE_NO_TIMEOUT) == GPUSHARE_OK);
      CHECK(gpushare_ticket_release(ticket) == GPUSHARE_OK);
    } else {
      ++refused;
      CHECK(status == GPUSHARE_HOST_OUT_OF_MEMORY);
      CHECK(ticket == nullptr);
    }
    // The next iteration comes after all that was submitted before it.
    REQUIRE(gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration) == GPUSHARE_OK);
    REQUIRE(gpushare_iteration_end(iteration) == GPUSHARE_OK);
    while (status == GPUSHARE_OK && data.releases == 0) std::this_thread::yield();
    CHECK(data.runs == (status == GPUSHARE_OK ? 1 : 0));
    CHECK(data.releases == (status == GPUSHARE_OK ? 1 : 0));
  }
  CHECK(refused > 0);
  CHECK(accepted > 0);
  CHECK(gpushare_session_close(session) == GPUSHARE_OK);
  CHECK(gpushare_runtime_close(runtime) == GPUSHARE_OK);
}
