// Contexts of processes as the driver's stand-in makes them, over the cuda backend. contexts_test.cpp says the messages by hand.
// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <thread>

#include "support/child_process.hpp"
#include "unit/daemon/lane_jobs.hpp"

using namespace gpushare;
using namespace gpushare::test;
using namespace standin_test;  // the driver's entry points

TEST_CASE("contexts of processes are promised, the daemon's own too, until their process has ended") {
  REQUIRE(standin_configure("context_bytes", 3 * kMiB) == 0);
  setenv("CUDA_STANDIN", "context_bytes=5242880", 1);  // of processes that begin now
  {
    const Shared shared;
    {
      Job job("job", 2 * kMiB, 4 * kMiB);
      CHECK_OK(job.run(1));
      // This process is the daemon's, too: two devices are open, and there is one context.
      CHECK(shared.status().devices[0].context_bytes == 3 * kMiB);
      CHECK(shared.promised() == 9 * kMiB);
      ChildProcess worker(GPUSHARE_SESSION_WORKER, {"worker", "1", "0", "2", "4", "1000", "0"});
      REQUIRE(worker.line() == "ready\n");
      eventually([&] { return shared.promised() == 16 * kMiB; });
      CHECK(shared.status().devices[0].context_bytes == 8 * kMiB);
      CHECK_OK(job.run(2));
      SECTION("that is killed") {
        worker.kill();
      }
      SECTION("that ends") {
        worker.tell_to_stop();
        CHECK(worker.wait() == 0);
      }
      eventually([&] { return shared.promised() == 9 * kMiB; });
      Job again("again", 2 * kMiB,
                4 * kMiB);  // measured anew beside memory that other devices of the process have
      CHECK_OK(again.run(3));
      CHECK(shared.promised() == 11 * kMiB);
    }
    CHECK(shared.status().devices[0].context_bytes == 3 * kMiB);  // of this process, which lives
  }
  unsetenv("CUDA_STANDIN");
  REQUIRE(standin_configure("context_bytes", 0) == 0);
}

TEST_CASE("a process whose context finds no room is told so when it opens its runtime") {
  REQUIRE(standin_configure("context_bytes", 16 * kMiB) == 0);
  {
    const Shared shared;
    const auto runtime = SharedService::open();
    REQUIRE_OK(client::set_service_capacity(shared.options.socket, "", 20 * kMiB));
    setenv("CUDA_STANDIN", "context_bytes=5242880", 1);
    ChildProcess refused(GPUSHARE_SESSION_WORKER, {"refused", "1", "0", "2", "4", "1000", "1"});
    CHECK(refused.wait() == 1);
    unsetenv("CUDA_STANDIN");
    REQUIRE_OK(runtime->close());
  }
  REQUIRE(standin_configure("context_bytes", 0) == 0);
}

TEST_CASE("the context of a closed runtime counts until the driver has none for the process") {
  REQUIRE(standin_configure("context_bytes", 3 * kMiB) == 0);
  {
    const Shared shared([](auto& options) { options.share_lanes = false; });  // so the daemon has no context
    const auto counted = [&] { return shared.status().devices[0].context_bytes; };
    {
      const auto first = SharedService::open(), second = SharedService::open();
      CHECK(counted() == 3 * kMiB);
      REQUIRE_OK(first->close());
      CHECK(counted() == 3 * kMiB);  // the second runtime is in the same context
      REQUIRE_OK(second->close());
    }
    eventually([&] { return counted() == 0 && shared.status().processes.empty(); });
    CUcontext of_library = nullptr;
    {
      Job job("job", 2 * kMiB, 4 * kMiB);
      CHECK_OK(job.run(1));
      REQUIRE(cuDevicePrimaryCtxRetain(&of_library, 0) == CUDA_SUCCESS);
    }
    // Another library keeps it, so nobody may be promised its bytes.
    eventually([&] { return shared.promised() == 3 * kMiB; });
    CHECK(counted() == 3 * kMiB);
    REQUIRE(cuDevicePrimaryCtxRelease_v2(0) == CUDA_SUCCESS);
    {
      const Job job("job", 2 * kMiB, 4 * kMiB);
      CHECK(counted() == 3 * kMiB);
    }
    eventually([&] { return shared.promised() == 0 && shared.status().processes.empty(); });
  }
  REQUIRE(standin_configure("context_bytes", 0) == 0);
}

// In builds that check waits, a session that asked NVML with the runtime's lock held would end the test.
TEST_CASE("a session opens while NVML hangs") {
  REQUIRE(standin_configure("context_bytes", 0) == 0);
  const Shared shared([](auto& options) { options.share_lanes = false; });  // so the daemon asks nothing
  const auto runtime = SharedService::open();
  REQUIRE(standin_configure("nvml_hangs", 1) == 0);
  const auto session = open_session(*runtime, need("job", 2 * kMiB, 4 * kMiB));
  REQUIRE(standin_configure("nvml_hangs", 0) == 0);
  while (!runtime->device().context_bytes().ok()) std::this_thread::yield();
  REQUIRE_OK(session->close());
  REQUIRE_OK(runtime->close());
}

TEST_CASE(
    "the daemon's own context counts as soon as NVML answers that hung when the daemon opened the device") {
  REQUIRE(standin_configure("context_bytes", 3 * kMiB) == 0);
  setenv("CUDA_STANDIN", "context_bytes=5242880", 1);  // of the worker
  REQUIRE(standin_configure("nvml_hangs", 1) == 0);
  {
    const Shared shared;
    ChildProcess worker(GPUSHARE_SESSION_WORKER, {"worker", "1", "0", "2", "4", "1000", "0"});
    REQUIRE(worker.line() == "ready\n");
    const auto counted = [&] { return shared.status().devices[0].context_bytes; };
    eventually([&] { return shared.status().devices[0].lanes == 1 && counted() == 5 * kMiB; });
    REQUIRE(standin_configure("nvml_hangs", 0) == 0);
    eventually([&] { return counted() == 8 * kMiB; });
    worker.kill();
  }
  unsetenv("CUDA_STANDIN");
  REQUIRE(standin_configure("context_bytes", 0) == 0);
}
