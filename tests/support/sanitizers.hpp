// sanitizers.hpp: which of them this build has. They make a test some ten times as slow: under them long ones do less.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace gpushare::test {

#ifdef __has_feature
#define GPUSHARE_TEST_HAS_FEATURE(name) __has_feature(name)
#else
#define GPUSHARE_TEST_HAS_FEATURE(name) 0
#endif
#if defined(__SANITIZE_THREAD__) || GPUSHARE_TEST_HAS_FEATURE(thread_sanitizer)
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif
#if defined(__SANITIZE_ADDRESS__) || GPUSHARE_TEST_HAS_FEATURE(address_sanitizer)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = kThreadSanitizer;
#endif
#undef GPUSHARE_TEST_HAS_FEATURE

// For tests that let call n fail, for every n: ThreadSanitizer, there for the races, tries every third.
inline constexpr uint64_t kFaultStep = kThreadSanitizer ? 3 : 1;

// The rounds of a test whose rounds differ by chance or by a delay: ThreadSanitizer plays a third of them.
constexpr int rounds(int all) {
  return kThreadSanitizer ? (all + 2) / 3 : all;
}

}  // namespace gpushare::test
