// roles.hpp: what the processes of measure_shared_device do: the daemon, and the programs that share its device. Each
// is this program with another first argument; it says "ready" on stdout, and most run until their stdin ends.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "base/status.hpp"
#include "executor/runtime.hpp"

namespace gpushare::benchmarks {

inline constexpr uint64_t kMiB = 1 << 20;

[[noreturn]] inline void give_up(const char* what, const base::Status& status) {
  std::fprintf(stderr, "measure_shared_device: %s: %s\n", what, status.to_string().c_str());
  std::exit(1);
}

template <class T>
T take(base::Result<T> result, const char* what) {
  if (!result.ok()) give_up(what, result.status());
  return std::move(*result);
}

inline void must(const base::Status& status, const char* what) {
  if (!status.ok()) give_up(what, status);
}

std::shared_ptr<executor::Runtime> open_runtime(const std::string& device);
std::shared_ptr<executor::Session> open_session(executor::Runtime& runtime, const char* name, uint64_t p,
                                                int32_t priority = 0, double weight = 1);
// Iterations that do nothing.
void loop(executor::Session& session, uint64_t iterations);

// Device work in an iteration of the role `steps`.
inline constexpr std::chrono::microseconds kStep{300};
// Points of one iteration on the host's clock: begin called, begin returned, device work started and stopped, end called.
struct Step {
  uint64_t asked, begun, start, stop, ended, who;
};

// Runs the role that the arguments name, and sets its exit code. False: they name none.
bool run_role(int argc, char** argv, int* out_code);

}  // namespace gpushare::benchmarks
