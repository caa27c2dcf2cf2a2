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

// A field, by the bytes that it begins and ends at.
struct Field {
  size_t begin, end, alignment;
};

// The fields of a struct that callers may lack: the last one of its first published version, then every one added since, in
// order. A caller's struct_size may be any number, so it may end inside a field; such a field counts as absent.
template <class T>
struct Struct;

// Every byte behind the first version belongs to a field in the list, or pads one: a field that is forgotten there does
// not compile.
template <class T>
constexpr bool all_fields_are_listed() {
  const auto up = [](size_t bytes, size_t alignment) {
    return (bytes + alignment - 1) / alignment * alignment;
  };
  size_t end = 0;
  for (const Field& field : Struct<T>::fields) {
    if (end != 0 && field.begin != up(end, field.alignment)) return false;
    end = field.end;
  }
  return up(end, alignof(T)) == sizeof(T);
}
// NOLINTBEGIN(bugprone-macro-parentheses,bugprone-sizeof-expression): a member's name, and members that are pointers
#define GPUSHARE_FIELD(name)                                                                       \
  Field {                                                                                          \
    offsetof(Type, name), offsetof(Type, name) + sizeof(Type::name), alignof(decltype(Type::name)) \
  }
#define GPUSHARE_STRUCT(type, ...)                   \
  template <>                                        \
  struct Struct<type> {                              \
    using Type = type;                               \
    static constexpr Field fields[] = {__VA_ARGS__}; \
  };                                                 \
  static_assert(all_fields_are_listed<type>())
GPUSHARE_STRUCT(gpushare_error_info, GPUSHARE_FIELD(backend));
GPUSHARE_STRUCT(gpushare_device_info, GPUSHARE_FIELD(reason));
GPUSHARE_STRUCT(gpushare_candidate, GPUSHARE_FIELD(weight));
GPUSHARE_STRUCT(gpushare_policy_ops, GPUSHARE_FIELD(release), GPUSHARE_FIELD(lane_finder));
GPUSHARE_STRUCT(gpushare_progress, GPUSHARE_FIELD(device_ns));
GPUSHARE_STRUCT(gpushare_runtime_params, GPUSHARE_FIELD(on_progress_user_data),
                GPUSHARE_FIELD(spill_limit_bytes), GPUSHARE_FIELD(spill_move_bytes),
                GPUSHARE_FIELD(spill_move_ns), GPUSHARE_FIELD(spill_move_loss), GPUSHARE_FIELD(lane_finder),
                GPUSHARE_FIELD(interference_file));
GPUSHARE_STRUCT(gpushare_runtime_info, GPUSHARE_FIELD(promised_compute_units),
                GPUSHARE_FIELD(effective_capacity_bytes), GPUSHARE_FIELD(link_bytes_per_s));
GPUSHARE_STRUCT(gpushare_interference, GPUSHARE_FIELD(age_s));
GPUSHARE_STRUCT(gpushare_session_params, GPUSHARE_FIELD(compute_units), GPUSHARE_FIELD(least_bytes));
GPUSHARE_STRUCT(gpushare_session_info, GPUSHARE_FIELD(reserved), GPUSHARE_FIELD(quota_bytes),
                GPUSHARE_FIELD(effective_quota_bytes), GPUSHARE_FIELD(home_bytes),
                GPUSHARE_FIELD(limit_bytes), GPUSHARE_FIELD(session_class), GPUSHARE_FIELD(reserved_2));
GPUSHARE_STRUCT(gpushare_coordination_params, GPUSHARE_FIELD(long_wait_ns));
GPUSHARE_STRUCT(gpushare_block_info, GPUSHARE_FIELD(reserved));
GPUSHARE_STRUCT(gpushare_heap_params, GPUSHARE_FIELD(alignment_bytes));
GPUSHARE_STRUCT(gpushare_heap_info, GPUSHARE_FIELD(high_water_bytes));
GPUSHARE_STRUCT(gpushare_backend_work, GPUSHARE_FIELD(reserved));
GPUSHARE_STRUCT(gpushare_batcher_params, GPUSHARE_FIELD(nexus_overhead_ns));
GPUSHARE_STRUCT(gpushare_batcher_model, GPUSHARE_FIELD(c1));
GPUSHARE_STRUCT(gpushare_request, GPUSHARE_FIELD(later_step_count), GPUSHARE_FIELD(features));
GPUSHARE_STRUCT(gpushare_batch, GPUSHARE_FIELD(wake_ns));
GPUSHARE_STRUCT(gpushare_profile, GPUSHARE_FIELD(p99_ns));
GPUSHARE_STRUCT(gpushare_request_queue_info, GPUSHARE_FIELD(decision_ns), GPUSHARE_FIELD(predicted_miss_rate),
                GPUSHARE_FIELD(price_per_s));
GPUSHARE_STRUCT(gpushare_histogram_params, GPUSHARE_FIELD(window));
GPUSHARE_STRUCT(gpushare_histogram_info, GPUSHARE_FIELD(max_ns));
GPUSHARE_STRUCT(gpushare_score_class, GPUSHARE_FIELD(steps));
GPUSHARE_STRUCT(gpushare_shared_image_params, GPUSHARE_FIELD(timeout_ns));
GPUSHARE_STRUCT(gpushare_shared_image_info, GPUSHARE_FIELD(reserved));
GPUSHARE_STRUCT(gpushare_link_costs, GPUSHARE_FIELD(group_overhead_ns), GPUSHARE_FIELD(device_bytes_per_s));
GPUSHARE_STRUCT(gpushare_plan_params, GPUSHARE_FIELD(group_cap_bytes));
GPUSHARE_STRUCT(gpushare_loader_params, GPUSHARE_FIELD(link), GPUSHARE_FIELD(keep_ns));
GPUSHARE_STRUCT(gpushare_loader_info, GPUSHARE_FIELD(misses), GPUSHARE_FIELD(kept_bytes),
                GPUSHARE_FIELD(keep_ns));
GPUSHARE_STRUCT(gpushare_image_params, GPUSHARE_FIELD(checksums), GPUSHARE_FIELD(order_by),
                GPUSHARE_FIELD(once));
GPUSHARE_STRUCT(gpushare_image_info, GPUSHARE_FIELD(replans));
GPUSHARE_STRUCT(gpushare_layer_info, GPUSHARE_FIELD(arrived));
GPUSHARE_STRUCT(gpushare_load_params, GPUSHARE_FIELD(reserved));
GPUSHARE_STRUCT(gpushare_model_info, GPUSHARE_FIELD(load_ns));
GPUSHARE_STRUCT(gpushare_switcher_params, GPUSHARE_FIELD(standby_bytes));
GPUSHARE_STRUCT(gpushare_member_info, GPUSHARE_FIELD(standby_bytes));
GPUSHARE_STRUCT(gpushare_switcher_info, GPUSHARE_FIELD(standby_bytes));
GPUSHARE_STRUCT(gpushare_allocator_params, GPUSHARE_FIELD(persistent_kind));
GPUSHARE_STRUCT(gpushare_gate_info, GPUSHARE_FIELD(credit));
GPUSHARE_STRUCT(gpushare_allocator_info, GPUSHARE_FIELD(predicted));
GPUSHARE_STRUCT(gpushare_range_params, GPUSHARE_FIELD(price_ns_per_byte));
GPUSHARE_STRUCT(gpushare_range_info, GPUSHARE_FIELD(unanswered_by));
GPUSHARE_STRUCT(gpushare_step_queue_params, GPUSHARE_FIELD(read_ns));
GPUSHARE_STRUCT(gpushare_step_request, GPUSHARE_FIELD(cost));
GPUSHARE_STRUCT(gpushare_step_queue_info, GPUSHARE_FIELD(read_ns));
// NOLINTEND(bugprone-macro-parentheses,bugprone-sizeof-expression)
#undef GPUSHARE_STRUCT
#undef GPUSHARE_FIELD

// The size of a struct as first published; never today's sizeof.
template <class T>
constexpr size_t first_size() {
  return Struct<T>::fields[0].end;
}

// How many bytes of a struct with this struct_size (first_size() or more) hold whole fields that the library knows.
template <class T>
constexpr size_t whole_fields(uint32_t struct_size) {
  if (struct_size >= sizeof(T)) return sizeof(T);
  size_t bytes = 0;
  for (const Field& field : Struct<T>::fields)
    if (field.end <= struct_size) bytes = field.end;
  return bytes;
}

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

// Copies the fields that the caller's struct has whole; those it does not know keep their zero. A larger struct
// must end in zeros.
template <class T>
base::Status read_struct(const char* name, const T* in, T* out) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::memset(out, 0, sizeof(T));
  if (in == nullptr) return null_argument(name);
  const uint32_t size = in->struct_size;
  GPUSHARE_RETURN_IF_ERROR(check_struct_size(name, size, first_size<T>()));
  std::memcpy(out, in, whole_fields<T>(size));
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

// Writes the fields that the caller's struct has whole, and leaves struct_size as the caller set it.
template <class T>
base::Status write_struct(const char* name, const T& value, T* out) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (out == nullptr) return null_argument(name);
  const uint32_t size = out->struct_size;
  GPUSHARE_RETURN_IF_ERROR(check_struct_size(name, size, first_size<T>()));
  std::memcpy(out, &value, whole_fields<T>(size));
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
