// The first real GPU. Skipped, as UNAVAILABLE, on a machine without one.
// SPDX-License-Identifier: Apache-2.0
#include "cts.hpp"
#include "cuda_excuses.hpp"

namespace gpushare::cts {

const Backend& backend() {
  static const Backend cuda = [] {
    Backend made{"cuda", "cuda", {kSlowToOpen}, cuda_excuses(), {}};
    made.unsupported.push_back(
        {"errors: copies and fills outside live memory are refused",
         "right beside a block, a GPU may have memory of somebody else, which is no error; "
         "on the stand-in nothing lies there and the test runs"});
    return made;
  }();
  return cuda;
}

}  // namespace gpushare::cts
