// SPDX-License-Identifier: Apache-2.0
#include "cpu_allocator.hpp"

#include <c10/core/CPUAllocator.h>
#include <torch/version.h>

#include <cstring>

#include "job.hpp"

namespace gpushare::torch {
namespace {

c10::Allocator* previous = nullptr;

void free_tensor(void* data) {
  if (data != nullptr && !release(data)) previous->raw_deallocate(data);
}

// libtorch 1 calls it through a const pointer.
#if TORCH_VERSION_MAJOR < 2
#define GPUSHARE_TORCH_1_CONST const
#else
#define GPUSHARE_TORCH_1_CONST
#endif

class CpuAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) GPUSHARE_TORCH_1_CONST override {
    void* data = nullptr;
    try {
      data = gpushare::torch::allocate(bytes);
    } catch (const Error& error) {
      TORCH_CHECK(false, error.what());
    }
    if (data == nullptr) data = previous->raw_allocate(bytes);
    return {data, data, &free_tensor, c10::Device(c10::DeviceType::CPU)};
  }
#if TORCH_VERSION_MAJOR >= 2
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
#endif
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_tensor;
  }
};

}  // namespace

void install_cpu_allocator() {
  static CpuAllocator* const allocator = [] {
    previous = c10::GetCPUAllocator();
    auto* made = new CpuAllocator;  // libtorch keeps it for good
    c10::SetCPUAllocator(made, /*priority=*/1);
    return made;
  }();
  (void)allocator;
}

}  // namespace gpushare::torch
