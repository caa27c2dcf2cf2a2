// The cuda backend over the strict stand-in for the driver (tests/doubles): the process fails if any test
// misuses CUDA.
// SPDX-License-Identifier: Apache-2.0
#include "cts.hpp"
#include "cuda_excuses.hpp"

namespace gpushare::cts {

const Backend& backend() {
  static const Backend cuda{"cuda_standin",
                            std::string("cuda?driver=") + GPUSHARE_CUDA_STANDIN,
                            {kExactMemory},
                            cuda_excuses(),
                            {}};
  return cuda;
}

}  // namespace gpushare::cts
