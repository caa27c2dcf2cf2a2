// tags.hpp: the handle types, one table each.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "c_api/handles.hpp"

namespace gpushare::memory {
class Heap;
}

namespace gpushare::capi {

using HeapHandles = HandleTable<memory::Heap, 6>;

inline base::Status too_many_handles(const char* what) {
  return {GPUSHARE_HOST_OUT_OF_MEMORY, base::format("too many %s are open at once (16,777,216)", what)};
}

}  // namespace gpushare::capi
