// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>

namespace gpushare::test {

// By memcmp: sanitizers look at every step of a loop over bytes, and made such loops most of a test's time.
inline bool all_are(const void* data, uint64_t bytes, int value) {
  const auto* at = static_cast<const unsigned char*>(data);
  return bytes == 0 || (*at == static_cast<unsigned char>(value) && std::memcmp(at, at + 1, bytes - 1) == 0);
}

}  // namespace gpushare::test
