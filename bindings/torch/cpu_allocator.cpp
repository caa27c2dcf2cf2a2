// SPDX-License-Identifier: Apache-2.0
#include "cpu_allocator.hpp"

#include <c10/core/CPUAllocator.h>

#include "job.hpp"

namespace gpushare::torch {
namespace {

c10::Allocator* previous = nullptr;

void free_tensor(void* data) {
  if (data != nullptr && !release(data)) previous->raw_deallocate(data);
}

class CpuAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) const override {
    void* data = nullptr;
    try {
      data = gpushare::torch::allocate(bytes);
    } catch (const Error& error) {
      TORCH_CHECK(false, error.what());
    }
    if (data == nullptr) data = previous->raw_allocate(bytes);
    return {data, data, &free_tensor, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_tensor; }
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
