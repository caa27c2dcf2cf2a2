// abi.hpp: reading and writing the sized structs of the ABI, by the rules in gpushare.h.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include "base/status.hpp"
#include "gpushare/gate.h"
#include "gpushare/gpushare.h"

namespace gpushare::capi {

// The size of a struct as first published, by its last field then; never today's sizeof.
template <class T>
struct V1Size;
// NOLINTBEGIN(bugprone-macro-parentheses,bugprone-sizeof-expression): a member's name, and members that are pointers
#define GPUSHARE_V1_SIZE(type, last)                                                                  \
  template <>                                                                                         \
  struct V1Size<type> {                                                                               \
    static constexpr size_t value = offsetof(type, last) + sizeof(static_cast<type*>(nullptr)->last); \
    static_assert(value <= sizeof(type));                                                             \
  }
GPUSHARE_V1_SIZE(gpushare_error_info, backend);
GPUSHARE_V1_SIZE(gpushare_device_info, reason);
GPUSHARE_V1_SIZE(gpushare_candidate, weight);
GPUSHARE_V1_SIZE(gpushare_policy_ops, release);
GPUSHARE_V1_SIZE(gpushare_progress, device_ns);
GPUSHARE_V1_SIZE(gpushare_runtime_params, on_progress_user_data);
GPUSHARE_V1_SIZE(gpushare_runtime_info, promised_compute_units);
GPUSHARE_V1_SIZE(gpushare_interference, age_s);
GPUSHARE_V1_SIZE(gpushare_session_params, compute_units);
GPUSHARE_V1_SIZE(gpushare_session_info, reserved);
GPUSHARE_V1_SIZE(gpushare_coordination_params, long_wait_ns);
GPUSHARE_V1_SIZE(gpushare_block_info, reserved);
GPUSHARE_V1_SIZE(gpushare_heap_params, alignment_bytes);
GPUSHARE_V1_SIZE(gpushare_heap_info, high_water_bytes);
GPUSHARE_V1_SIZE(gpushare_backend_work, reserved);
GPUSHARE_V1_SIZE(gpushare_batcher_params, nexus_overhead_ns);
GPUSHARE_V1_SIZE(gpushare_batcher_model, c1);
GPUSHARE_V1_SIZE(gpushare_request, later_step_count);
GPUSHARE_V1_SIZE(gpushare_batch, wake_ns);
GPUSHARE_V1_SIZE(gpushare_profile, p99_ns);
GPUSHARE_V1_SIZE(gpushare_request_queue_info, decision_ns);
GPUSHARE_V1_SIZE(gpushare_histogram_params, window);
GPUSHARE_V1_SIZE(gpushare_histogram_info, max_ns);
GPUSHARE_V1_SIZE(gpushare_score_class, steps);
GPUSHARE_V1_SIZE(gpushare_shared_image_params, timeout_ns);
GPUSHARE_V1_SIZE(gpushare_shared_image_info, reserved);
GPUSHARE_V1_SIZE(gpushare_link_costs, group_overhead_ns);
GPUSHARE_V1_SIZE(gpushare_plan_params, group_cap_bytes);
GPUSHARE_V1_SIZE(gpushare_loader_params, link);
GPUSHARE_V1_SIZE(gpushare_loader_info, misses);
GPUSHARE_V1_SIZE(gpushare_image_params, checksums);
GPUSHARE_V1_SIZE(gpushare_image_info, replans);
GPUSHARE_V1_SIZE(gpushare_layer_info, arrived);
GPUSHARE_V1_SIZE(gpushare_load_params, reserved);
GPUSHARE_V1_SIZE(gpushare_model_info, load_ns);
GPUSHARE_V1_SIZE(gpushare_switcher_params, standby_bytes);
GPUSHARE_V1_SIZE(gpushare_member_info, standby_bytes);
GPUSHARE_V1_SIZE(gpushare_switcher_info, standby_bytes);
GPUSHARE_V1_SIZE(gpushare_allocator_params, persistent_kind);
GPUSHARE_V1_SIZE(gpushare_gate_info, credit);
GPUSHARE_V1_SIZE(gpushare_allocator_info, predicted);
GPUSHARE_V1_SIZE(gpushare_range_params, price_ns_per_byte);
GPUSHARE_V1_SIZE(gpushare_range_info, unanswered_by);
// NOLINTEND(bugprone-macro-parentheses,bugprone-sizeof-expression)
#undef GPUSHARE_V1_SIZE

// A size above this is an uninitialised struct rather than a future one.
inline constexpr uint32_t kMaxStructSize = 4096;

inline base::Status null_argument(const char* name) {
  return {GPUSHARE_INVALID_ARGUMENT, std::string(name) + " is null"};
}

inline base::Status check_struct_size(const char* name, uint32_t size, size_t smallest) {
  if (size >= smallest && size <= kMaxStructSize) return {};
  return {
      GPUSHARE_INVALID_ARGUMENT,
      base::format("%s: struct_size is %u, allowed are %zu to %u; initialise the struct with its _INIT macro",
                   name, size, smallest, kMaxStructSize)};
}

// Copies the fields that the caller's struct has; those it does not know keep their zero. A larger struct
// must end in zeros.
template <class T>
base::Status read_struct(const char* name, const T* in, T* out) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::memset(out, 0, sizeof(T));
  if (in == nullptr) return null_argument(name);
  const uint32_t size = in->struct_size;
  GPUSHARE_RETURN_IF_ERROR(check_struct_size(name, size, V1Size<T>::value));
  std::memcpy(out, in, std::min<size_t>(size, sizeof(T)));
  const auto* bytes = reinterpret_cast<const unsigned char*>(in);
  for (size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] != 0)
      return {
          GPUSHARE_INVALID_ARGUMENT,
          base::format(
              "%s: the field at byte %zu is set but unknown to version %s; clear it or use a newer library",
              name, i, gpushare_version_string())};
  }
  return {};
}

// Writes at most the caller's struct_size bytes and leaves struct_size as the caller set it.
template <class T>
base::Status write_struct(const char* name, const T& value, T* out) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (out == nullptr) return null_argument(name);
  const uint32_t size = out->struct_size;
  GPUSHARE_RETURN_IF_ERROR(check_struct_size(name, size, V1Size<T>::value));
  std::memcpy(out, &value, std::min<size_t>(size, sizeof(T)));
  out->struct_size = size;
  return {};
}

// Copies text into a fixed array, cut at the end if need be, always terminated.
template <size_t N>
void copy_text(char (&out)[N], const std::string& text) {
  const size_t length = std::min(text.size(), N - 1);
  std::memcpy(out, text.data(), length);
  std::memset(out + length, 0, N - length);
}

}  // namespace gpushare::capi
