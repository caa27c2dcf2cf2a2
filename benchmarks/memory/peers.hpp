// peers.hpp: two published allocators in the shape of allocators.hpp, for those who have their sources: OffsetAllocator
// (github.com/sebbbi/OffsetAllocator) and the virtual block of Vulkan Memory Allocator
// (github.com/GPUOpen-LibrariesAndSDKs). Neither is part of this repository. The CMake variable
// GPUSHARE_PEER_ALLOCATORS names a folder with offsetAllocator.hpp, offsetAllocator.cpp and vk_mem_alloc.h; the last
// one also needs the Vulkan headers. Without the variable this header is not included.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vk_mem_alloc.h>

#include <cstdint>
#include <offsetAllocator.hpp>

#include "memory/allocators.hpp"

namespace gpushare::bench {

class OffsetAllocatorPeer {
 public:
  OffsetAllocatorPeer(uint64_t capacity_bytes, uint32_t max_blocks)
      : allocator_(static_cast<uint32_t>(capacity_bytes / kGranule), max_blocks) {}
  OffsetAllocator::Allocation allocate(uint32_t, uint64_t bytes) {
    return allocator_.allocate(static_cast<uint32_t>((bytes + kGranule - 1) / kGranule));
  }
  static bool ok(OffsetAllocator::Allocation block) {
    return block.offset != OffsetAllocator::Allocation::NO_SPACE;
  }
  void free(OffsetAllocator::Allocation block) { allocator_.free(block); }
  void finish() {}

 private:
  OffsetAllocator::Allocator allocator_;
};

// `kFlags`: the strategy, of VmaVirtualAllocationCreateFlagBits; 0 is the default.
template <uint32_t kFlags>
class VmaPeer {
 public:
  VmaPeer(uint64_t capacity_bytes, uint32_t) {
    VmaVirtualBlockCreateInfo info{};
    info.size = capacity_bytes;
    if (vmaCreateVirtualBlock(&info, &block_) != VK_SUCCESS) block_ = VK_NULL_HANDLE;
  }
  ~VmaPeer() {
    vmaClearVirtualBlock(block_);
    vmaDestroyVirtualBlock(block_);
  }
  VmaPeer(const VmaPeer&) = delete;
  VmaPeer& operator=(const VmaPeer&) = delete;
  VmaVirtualAllocation allocate(uint32_t, uint64_t bytes) {
    VmaVirtualAllocationCreateInfo info{};
    info.size = (bytes + kGranule - 1) / kGranule * kGranule;
    info.flags = kFlags;
    VmaVirtualAllocation block = VK_NULL_HANDLE;
    return vmaVirtualAllocate(block_, &info, &block, nullptr) == VK_SUCCESS ? block : VK_NULL_HANDLE;
  }
  static bool ok(VmaVirtualAllocation block) { return block != VK_NULL_HANDLE; }
  void free(VmaVirtualAllocation block) { vmaVirtualFree(block_, block); }
  void finish() {}

 private:
  VmaVirtualBlock block_ = VK_NULL_HANDLE;
};

}  // namespace gpushare::bench
