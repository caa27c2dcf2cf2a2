// child.hpp: the suite's program as another process, for memory that is shared between processes.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace gpushare::cts {

// The child's task with the exported memory that it inherits: "read" compares with pattern(bytes, seed), "invert"
// compares and inverts every byte, "read_last_granule" maps only that, "read_and_die" kills itself while mapped.
struct ChildTask {
  std::string what;
  int descriptor;
  uint64_t bytes;
  uint64_t seed;
};

// Runs it to its end. 0 if all went well, 128 + signal if it was killed; the child prints what went wrong.
int run_child(const ChildTask& task);

// In main: the child's work if this process is one (`*out_exit` is its exit status), else false.
bool is_child(int* out_exit);

}  // namespace gpushare::cts
