// SPDX-License-Identifier: Apache-2.0
#include "device/host/wide_copy.hpp"

#include <cstring>

// The sanitizers do not see such stores.
#if defined(__SSE2__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define GPUSHARE_STREAMING_STORES 1
#include <emmintrin.h>
#endif

namespace gpushare::device::host {

#ifdef GPUSHARE_STREAMING_STORES
namespace {

constexpr uint64_t kPage = 4096, kLine = 64;

void stream_line(char* destination, const char* source) {
  _mm_prefetch(source + 2 * kLine, _MM_HINT_T0);
  __m128i words[4];
  for (int i = 0; i < 4; ++i) words[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source) + i);
  for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(destination) + i, words[i]);
}

}  // namespace

void wide_copy(char* destination, const char* source, uint64_t bytes) {
  const bool apart = destination + bytes <= source || source + bytes <= destination;
  const uint64_t head = (kPage - reinterpret_cast<uintptr_t>(destination) % kPage) % kPage;
  if (!apart || bytes < head + 2 * kPage) {
    std::memmove(destination, source, bytes);
    return;
  }
  std::memcpy(destination, source, head);
  uint64_t done = head;
  for (; bytes - done >= 2 * kPage; done += 2 * kPage)
    for (uint64_t at = done; at < done + kPage; at += kLine) {
      stream_line(destination + at, source + at);
      stream_line(destination + at + kPage, source + at + kPage);
    }
  _mm_sfence();
  std::memcpy(destination + done, source + done, bytes - done);
}
#else
void wide_copy(char* destination, const char* source, uint64_t bytes) {
  std::memmove(destination, source, bytes);
}
#endif

}  // namespace gpushare::device::host
