// The first real GPU. Skipped, as UNAVAILABLE, on a machine without one.
// SPDX-License-Identifier: Apache-2.0
#include "cts.hpp"
#include "cuda_excuses.hpp"

namespace gpushare::cts {

const Backend& backend() {
  static const Backend cuda{"cuda", "cuda", {}, cuda_excuses(), {}};
  return cuda;
}

}  // namespace gpushare::cts
