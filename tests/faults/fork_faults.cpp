// Processes that fork, in the pattern of a data loader: the parent trains on several threads and forks workers, which open
// nothing or a runtime of their own, and exit. Through the C ABI as a user links it.
// SPDX-License-Identifier: Apache-2.0
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "gpushare/gpushare.h"
#include "support/catch.hpp"
#include "support/sizes.hpp"

using gpushare::test::kMiB;

namespace {

gpushare_runtime open_runtime(const char* device) {
  gpushare_runtime_params params = GPUSHARE_RUNTIME_PARAMS_INIT;
  params.device = device;
  params.capacity_bytes = 64 * kMiB;
  gpushare_runtime runtime = nullptr;
  return gpushare_runtime_open(&params, &runtime) == GPUSHARE_OK ? runtime : nullptr;
}

gpushare_session open_session(gpushare_runtime runtime, const char* name) {
  gpushare_session_params params = GPUSHARE_SESSION_PARAMS_INIT;
  params.name = name;
  params.persistent_bytes = kMiB;
  params.ephemeral_bytes = kMiB;
  gpushare_session session = nullptr;
  return gpushare_session_open(runtime, &params, &session) == GPUSHARE_OK ? session : nullptr;
}

bool iterate(gpushare_session session) {
  gpushare_iteration iteration = nullptr;
  gpushare_device_address block = 0;
  gpushare_stream stream = nullptr;
  if (gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration) != GPUSHARE_OK) return false;
  const bool done = gpushare_iteration_alloc(iteration, kMiB / 2, 0, &block) == GPUSHARE_OK &&
                    gpushare_iteration_get_stream(iteration, &stream) == GPUSHARE_OK &&
                    gpushare_stream_fill(stream, block, 7, kMiB / 2) == GPUSHARE_OK;
  return gpushare_iteration_end(iteration) == GPUSHARE_OK && done;
}

// Runs `body` in a child. Returns what waitpid says of it.
int in_child(const std::function<int()>& body, bool run_exit_functions = false) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(120);  // a child that hangs is told by its signal
    const int code = body();
    if (run_exit_functions) std::exit(code);
    _exit(code);
  }
  REQUIRE(child > 0);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return status;
}

struct Parent {
  gpushare_runtime runtime;
  gpushare_session session;
};

// Every use of the parent's handles is refused, also giving them back. 0, or the number of the step that went wrong.
int use_parents_handles(const Parent& parent) {
  const auto refused = [](int32_t status) {
    return status == GPUSHARE_INVALID_STATE &&
           std::string(gpushare_last_error_message()).find("process that forked") != std::string::npos;
  };
  gpushare_runtime_info info = GPUSHARE_RUNTIME_INFO_INIT;
  gpushare_iteration iteration = nullptr;
  gpushare_session other = nullptr;
  const gpushare_session_params params = GPUSHARE_SESSION_PARAMS_INIT;
  if (!refused(gpushare_runtime_get_info(parent.runtime, &info))) return 1;
  if (!refused(gpushare_session_open(parent.runtime, &params, &other))) return 2;
  if (!refused(gpushare_iteration_begin(parent.session, GPUSHARE_NO_TIMEOUT, &iteration))) return 3;
  if (!refused(gpushare_session_close(parent.session))) return 4;
  if (!refused(gpushare_runtime_close(parent.runtime))) return 5;
  return 0;
}

int use_own_runtime(const char* device) {
  const gpushare_runtime runtime = open_runtime(device);
  if (runtime == nullptr) return 11;
  const gpushare_session session = open_session(runtime, "child");
  if (session == nullptr) return 12;
  for (int i = 0; i < 5; ++i)
    if (!iterate(session)) return 13;
  if (gpushare_session_close(session) != GPUSHARE_OK) return 14;
  return gpushare_runtime_close(runtime) == GPUSHARE_OK ? 0 : 15;
}

}  // namespace

TEST_CASE("workers forked from a parent that trains use a runtime of their own and none of the parent's") {
  const char* device = GENERATE("host", "sim");
  const gpushare_runtime runtime = open_runtime(device);
  REQUIRE(runtime != nullptr);
  // Handles, log lines, sessions and iterations come and go on other threads while this one forks.
  std::atomic<bool> stop{false};
  std::atomic<int> failures{0};
  std::vector<std::thread> trainers;
  REQUIRE(gpushare_log_set([](void*, int32_t, const char*) {}, nullptr, GPUSHARE_LOG_DEBUG) == GPUSHARE_OK);
  for (int i = 0; i < 3; ++i) {
    trainers.emplace_back([&] {
      while (!stop) {
        const gpushare_session session = open_session(runtime, "trains");
        for (int step = 0; session != nullptr && step < 20; ++step) failures += iterate(session) ? 0 : 1;
        failures += session != nullptr && gpushare_session_close(session) == GPUSHARE_OK ? 0 : 1;
        (void)gpushare_log_set([](void*, int32_t, const char*) {}, nullptr, GPUSHARE_LOG_DEBUG);
      }
    });
  }
  const Parent parent{runtime, open_session(runtime, "parent")};
  REQUIRE(parent.session != nullptr);
  for (int i = 0; i < 24; ++i) {
    const int status = in_child([&] {
      if (i % 3 == 0) return 0;  // opens nothing
      if (const int wrong = use_parents_handles(parent); wrong != 0) return wrong;
      if (i % 3 == 1) return use_own_runtime(device);
      // A worker's worker.
      const int own = use_own_runtime(device);
      const int inner = in_child([&] {
        const int wrong = use_parents_handles(parent);
        return wrong != 0 ? wrong : use_own_runtime(device);
      });
      return own != 0 ? own : inner;
    });
    INFO("child " << i);
    CHECK(status == 0);
    REQUIRE(iterate(parent.session));
  }
  stop = true;
  for (std::thread& trainer : trainers) trainer.join();
  CHECK(failures == 0);
  CHECK(gpushare_log_set(nullptr, nullptr, GPUSHARE_LOG_WARNING) == GPUSHARE_OK);
  CHECK(gpushare_session_close(parent.session) == GPUSHARE_OK);
  CHECK(gpushare_runtime_close(runtime) == GPUSHARE_OK);
}

TEST_CASE("a child that was forked inside an iteration exits without touching it") {
  const char* device = GENERATE("host", "sim");
  const gpushare_runtime runtime = open_runtime(device);
  const Parent parent{runtime, open_session(runtime, "parent")};
  gpushare_iteration iteration = nullptr;
  REQUIRE(gpushare_iteration_begin(parent.session, GPUSHARE_NO_TIMEOUT, &iteration) == GPUSHARE_OK);
  const bool run_exit_functions = GENERATE(false, true);
  const int status = in_child(
      [&] {
        if (gpushare_iteration_end(iteration) != GPUSHARE_INVALID_STATE) return 1;
        if (const int wrong = use_parents_handles(parent); wrong != 0) return wrong;
        return use_own_runtime(device);
      },
      run_exit_functions);
  CHECK(status == 0);
  CHECK(gpushare_iteration_end(iteration) == GPUSHARE_OK);
  CHECK(gpushare_session_close(parent.session) == GPUSHARE_OK);
  CHECK(gpushare_runtime_close(runtime) == GPUSHARE_OK);
}

TEST_CASE("a child does not have the parent's device memory: the parent never sees its writes") {
  gpushare_runtime_params params = GPUSHARE_RUNTIME_PARAMS_INIT;
  params.device = "host";
  params.capacity_bytes = 64 * kMiB;
  params.layout = GENERATE(uint32_t{GPUSHARE_LAYOUT_CONTIGUOUS}, uint32_t{GPUSHARE_LAYOUT_VIRTUAL});
  gpushare_runtime runtime = nullptr;
  REQUIRE(gpushare_runtime_open(&params, &runtime) == GPUSHARE_OK);
  const gpushare_session session = open_session(runtime, "parent");
  gpushare_device_address block = 0;
  REQUIRE(gpushare_session_alloc(session, GPUSHARE_KIND_MODEL, kMiB, 0, &block) == GPUSHARE_OK);
  auto* bytes = reinterpret_cast<volatile unsigned char*>(block);
  bytes[0] = 42;
  bytes[kMiB - 1] = 42;
  for (const uint64_t at : {uint64_t{0}, kMiB - 1}) {
    const int status = in_child([&] {
      (void)std::signal(SIGSEGV, SIG_DFL);
      bytes[at] = 13;
      return 0;
    });
    CHECK(status != 0);  // it faults; a sanitizer turns that into an exit code
    CHECK(bytes[at] == 42);
  }
  CHECK(gpushare_session_close(session) == GPUSHARE_OK);
  CHECK(gpushare_runtime_close(runtime) == GPUSHARE_OK);
}
