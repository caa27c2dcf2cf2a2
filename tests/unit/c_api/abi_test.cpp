// The sized structs of the C ABI, each with every struct_size: a field that the size does not cover whole is neither read
// nor written, and no byte behind the size is touched.
// SPDX-License-Identifier: Apache-2.0
#include "c_api/abi.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "support/catch.hpp"

using namespace gpushare;

namespace {

// Memory whose end is the end of what may be touched.
class Edge {
 public:
  Edge() : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
    memory_ = static_cast<unsigned char*>(
        mmap(nullptr, kPages * page_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    REQUIRE(memory_ != MAP_FAILED);
    REQUIRE(mprotect(memory_ + (kPages - 1) * page_, page_, PROT_NONE) == 0);
  }
  ~Edge() { munmap(memory_, kPages * page_); }
  Edge(const Edge&) = delete;
  Edge& operator=(const Edge&) = delete;
  // `bytes`, rounded up to what pointers are aligned by, right before the edge.
  unsigned char* last(size_t bytes) { return memory_ + (kPages - 1) * page_ - (bytes + 7) / 8 * 8; }

 private:
  static constexpr size_t kPages = 3;
  const size_t page_;
  unsigned char* memory_ = nullptr;
};

constexpr unsigned char kSet = 0xa5;

bool all(const unsigned char* from, const unsigned char* to, unsigned char value) {
  return std::all_of(from, to, [value](unsigned char byte) { return byte == value; });
}

template <class T>
void check_sizes(const char* name) {
  Edge edge;
  for (uint32_t size = sizeof(uint32_t); size <= sizeof(T) + 40; ++size) {
    INFO(name << ", struct_size " << size);
    unsigned char* const memory = edge.last(size);
    auto* const theirs = reinterpret_cast<T*>(memory);
    const bool known = size >= capi::first_size<T>();

    // As options: all that is there is set, but for an unknown tail.
    std::memset(memory, kSet, std::min<size_t>(size, sizeof(T)));
    if (size > sizeof(T)) std::memset(memory + sizeof(T), 0, size - sizeof(T));
    std::memcpy(memory, &size, sizeof size);
    T read;
    REQUIRE(capi::read_struct(name, theirs, &read).code() ==
            (known ? GPUSHARE_OK : GPUSHARE_INVALID_ARGUMENT));
    const auto* const bytes = reinterpret_cast<const unsigned char*>(&read);
    if (!known) CHECK(all(bytes, bytes + sizeof(T), 0));
    for (const capi::Field& field : capi::Struct<T>::fields)
      if (known)
        CHECK(
            all(bytes + std::max(field.begin, sizeof size), bytes + field.end, size >= field.end ? kSet : 0));
    if (size > sizeof(T)) {
      memory[size - 1] = 1;
      CHECK(capi::read_struct(name, theirs, &read).code() == GPUSHARE_INVALID_ARGUMENT);
    }

    // As what is filled in: whole fields are written, other bytes stay.
    T ours;
    std::memset(&ours, kSet, sizeof ours);
    std::memset(memory, 0x11, size);
    std::memcpy(memory, &size, sizeof size);
    REQUIRE(capi::write_struct(name, ours, theirs).code() ==
            (known ? GPUSHARE_OK : GPUSHARE_INVALID_ARGUMENT));
    CHECK(theirs->struct_size == size);
    for (const capi::Field& field : capi::Struct<T>::fields) {
      const size_t begin = std::max(field.begin, sizeof size), end = std::min<size_t>(field.end, size);
      if (begin < end) CHECK(all(memory + begin, memory + end, known && size >= field.end ? kSet : 0x11));
    }
  }
  T read;
  CHECK(capi::read_struct<T>(name, nullptr, &read).code() == GPUSHARE_INVALID_ARGUMENT);
  T uninitialised{};
  uninitialised.struct_size = capi::kMaxStructSize + 1;
  CHECK(capi::read_struct(name, &uninitialised, &read).code() == GPUSHARE_INVALID_ARGUMENT);
}

}  // namespace

TEST_CASE("every sized struct is read and written by whole fields alone") {
#define CHECK_SIZES(type) check_sizes<type>(#type)
  CHECK_SIZES(gpushare_error_info);
  CHECK_SIZES(gpushare_device_info);
  CHECK_SIZES(gpushare_candidate);
  CHECK_SIZES(gpushare_policy_ops);
  CHECK_SIZES(gpushare_progress);
  CHECK_SIZES(gpushare_runtime_params);
  CHECK_SIZES(gpushare_runtime_info);
  CHECK_SIZES(gpushare_interference);
  CHECK_SIZES(gpushare_session_params);
  CHECK_SIZES(gpushare_session_info);
  CHECK_SIZES(gpushare_coordination_params);
  CHECK_SIZES(gpushare_block_info);
  CHECK_SIZES(gpushare_heap_params);
  CHECK_SIZES(gpushare_heap_info);
  CHECK_SIZES(gpushare_backend_work);
  CHECK_SIZES(gpushare_batcher_params);
  CHECK_SIZES(gpushare_batcher_model);
  CHECK_SIZES(gpushare_request);
  CHECK_SIZES(gpushare_batch);
  CHECK_SIZES(gpushare_profile);
  CHECK_SIZES(gpushare_request_queue_info);
  CHECK_SIZES(gpushare_histogram_params);
  CHECK_SIZES(gpushare_histogram_info);
  CHECK_SIZES(gpushare_score_class);
  CHECK_SIZES(gpushare_shared_image_params);
  CHECK_SIZES(gpushare_shared_image_info);
  CHECK_SIZES(gpushare_link_costs);
  CHECK_SIZES(gpushare_plan_params);
  CHECK_SIZES(gpushare_loader_params);
  CHECK_SIZES(gpushare_loader_info);
  CHECK_SIZES(gpushare_image_params);
  CHECK_SIZES(gpushare_image_info);
  CHECK_SIZES(gpushare_layer_info);
  CHECK_SIZES(gpushare_load_params);
  CHECK_SIZES(gpushare_model_info);
  CHECK_SIZES(gpushare_switcher_params);
  CHECK_SIZES(gpushare_member_info);
  CHECK_SIZES(gpushare_switcher_info);
  CHECK_SIZES(gpushare_allocator_params);
  CHECK_SIZES(gpushare_gate_info);
  CHECK_SIZES(gpushare_allocator_info);
  CHECK_SIZES(gpushare_range_params);
  CHECK_SIZES(gpushare_range_info);
  CHECK_SIZES(gpushare_step_queue_params);
  CHECK_SIZES(gpushare_step_request);
  CHECK_SIZES(gpushare_step_queue_info);
#undef CHECK_SIZES
}
