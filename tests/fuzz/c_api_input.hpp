// c_api_input.hpp: programs of C calls from bytes: numbers, and handles (live, stale, of another type, null, random).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gpushare/gpushare.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace gpushare::fuzz {

// Takes bytes off the front; zeros when there are none left.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  bool empty() const { return size_ == 0; }
  uint8_t byte() {
    if (size_ == 0) return 0;
    --size_;
    return *data_++;
  }
  // Mostly sensible sizes, sometimes absurd ones.
  uint64_t size() {
    const uint8_t kind = byte();
    if (kind < 200) return static_cast<uint64_t>(byte()) << (kind % 18);
    if (kind < 220) return 0;
    if (kind < 240) return UINT64_MAX - byte();
    return static_cast<uint64_t>(byte()) << 40;
  }
  // The same for blocks: spilling to a simulated host, any size up to all of memory is had, and slowly.
  uint64_t block_size() {
    const uint64_t bytes = size();
    return bytes >= (1ull << 60) ? bytes : bytes % (1ull << 32);
  }
  double number() {
    static constexpr double kOdd[] = {NAN, INFINITY, -INFINITY, -1, 0, 1e300, 1e-300, 1};
    const uint8_t kind = byte();
    return kind < 8 ? kOdd[kind] : kind / 64.0;
  }
  // The rest as text, NUL-terminated.
  const char* text(char* out, size_t capacity) {
    const size_t length = size_ < capacity - 1 ? size_ : capacity - 1;
    std::memcpy(out, data_, length);
    out[length] = '\0';
    data_ += length;
    size_ -= length;
    return out;
  }

 private:
  const uint8_t* data_;
  size_t size_;
};

// Among handles seen so far, stale ones included.
template <class T>
T choose(const std::vector<T>& handles, Input& input) {
  const uint8_t which = input.byte();
  if (which == 255 || handles.empty()) return nullptr;
  if (which == 254) return reinterpret_cast<T>(static_cast<uintptr_t>(input.size()));
  return handles[which % handles.size()];
}

inline void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "broken: %s; last error: %s\n", what, gpushare_last_error_message());
  std::abort();
}

// The statuses that any call may return.
inline void require_status(int32_t status) {
  if (status == GPUSHARE_OK) return;
  require(std::strcmp(gpushare_status_name(status), "UNRECOGNIZED") != 0 && status != GPUSHARE_INTERNAL,
          "a known status, not INTERNAL");
  gpushare_error_info info = GPUSHARE_ERROR_INFO_INIT;
  require(gpushare_last_error(&info) == GPUSHARE_OK && info.message != nullptr && info.backend != nullptr,
          "the last error can be read");
}

inline const char* const kBatchers[] = {nullptr,        "gpushare", "orloj", "clockwork", "nexus", "clipper",
                                        "clipper-aimd", "maxdelay", "edf",   "fifo",      "none"};

inline gpushare_batcher_params batcher_params(Input& input) {
  gpushare_batcher_params params = GPUSHARE_BATCHER_PARAMS_INIT;
  params.policy = kBatchers[input.byte() % 11];
  params.max_pending = input.byte() % 8;
  params.bins = input.byte() % 64;
  if (input.byte() % 4 == 0) {
    params.flags = input.byte() % 5;
    params.window = input.byte();
    params.opportunity = input.number();
    params.feasible_quantile = input.number();
    params.delay_rate_per_ms = input.number();
    params.max_defer_ns = input.size();
    params.max_delay_ns = input.size();
  }
  return params;
}

// A request of which labels and features may be known.
struct KnownRequest {
  explicit KnownRequest(Input& input) : features{input.number(), input.number()} {
    request.model = input.byte() % 3;
    request.application = input.byte() % 5;
    request.features = features;
    request.feature_count = input.byte() % 3;
  }
  KnownRequest(const KnownRequest&) = delete;  // the request points into it
  KnownRequest& operator=(const KnownRequest&) = delete;
  double features[2];
  gpushare_request request = GPUSHARE_REQUEST_INIT;
};

}  // namespace gpushare::fuzz
