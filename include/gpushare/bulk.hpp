// gpushare: bulk.h in C++. SPDX-License-Identifier: Apache-2.0
#ifndef GPUSHARE_BULK_HPP_
#define GPUSHARE_BULK_HPP_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gpushare/bulk.h"
#include "gpushare/gpushare.hpp"

namespace gpushare {

// Ephemeral blocks of these sizes, all or none. Throws Error.
inline std::vector<Address> alloc_many(const Iteration& iteration, const std::vector<uint64_t>& bytes,
                                       uint64_t alignment_bytes = 0) {
  std::vector<Address> out(bytes.size());
  check(gpushare_iteration_alloc_many(iteration.get(), bytes.size(), bytes.data(), alignment_bytes,
                                      out.data()));
  return out;
}

// Frees the blocks. Throws Error for the first that cannot be freed, when the others have been.
inline void free_many(const Runtime& runtime, const std::vector<Address>& addresses) {
  check(gpushare_memory_free_many(runtime.get(), addresses.size(), addresses.data(), nullptr));
}

}  // namespace gpushare

#endif  // GPUSHARE_BULK_HPP_
