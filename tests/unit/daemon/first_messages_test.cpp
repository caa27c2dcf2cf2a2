// What a process tells the daemon of itself, and of its iterations while the daemon has gates.
// SPDX-License-Identifier: Apache-2.0
#include "client/remote_authority.hpp"
#include "unit/daemon/raw_daemon.hpp"

using namespace gpushare;
using namespace gpushare::test;

TEST_CASE("a process says that it passes turns on, and which slowdown each of its iterations accepts") {
  RawDaemon daemon;
  client::RemoteOptions options;
  options.socket = client::default_socket();
  auto authority = client::RemoteAuthority::open(options);
  REQUIRE_OK(authority.status());
  CHECK(daemon.hello_flags == client::kPassesTurns);
  sched::SessionSpec spec;
  spec.id = 1;
  spec.persistent_bytes = spec.ephemeral_bytes = kMiB;
  REQUIRE_OK((*authority)->arrive(spec, 0));
  daemon.page->set_watched(true);
  for (const double target : {0.25, 0.5}) {
    (*authority)->work_began(1, true, target);
    (*authority)->work_ended(1, 0);
    // The answer comes behind both messages.
    REQUIRE_OK((*authority)->claim_context(kMiB));
    CHECK(daemon.target == target);
  }
  CHECK(daemon.work_begins == 2);
  CHECK(daemon.work_ends == 2);
  authority->reset();
  CHECK(daemon.sent_well);
}
