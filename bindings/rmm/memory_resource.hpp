// memory_resource.hpp: a memory resource of CCCL (cuda::mr::resource) over a gpushare allocator, for RMM versions that are built on such resources
// and whatever else takes them. A program takes this header into its build; it was compiled with CCCL 3.5.
//
//   gpushare::MemoryResource resource(allocator);           // gpushare_allocator_create
//   rmm::mr::set_current_device_resource_ref(resource);     // or any other owner or reference of resources
//
// Allocations belong to the session of the stream's lane, else to that of the calling thread (gpushare/allocator.h). Any thread may allocate.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>
#include <gpushare/allocator.h>

#include <cstddef>
#include <cstdint>
#include <cuda/memory_resource>
#include <cuda/stream_ref>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

namespace gpushare {

// There is no memory; the message says who holds it.
class ResourceOutOfMemory final : public std::bad_alloc {
 public:
  explicit ResourceOutOfMemory(const char* message)
      : message_(std::make_shared<const std::string>(message)) {}
  const char* what() const noexcept override { return message_->c_str(); }

 private:
  std::shared_ptr<const std::string> message_;  // copying an exception must not throw
};

class MemoryResource {
 public:
  // The allocator must live until the last block has been freed.
  explicit MemoryResource(gpushare_allocator allocator) noexcept : allocator_(allocator) {}

  // Memory for work of the stream. Throws ResourceOutOfMemory, or std::runtime_error where no session owns the allocation.
  void* allocate(cuda::stream_ref stream, std::size_t bytes,
                 std::size_t alignment = alignof(std::max_align_t)) {
    gpushare_device_address address = 0;
    const int32_t status = gpushare_allocator_alloc(allocator_, bytes, alignment, stream.get(), &address);
    switch (status) {
      case GPUSHARE_OK:
        return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address));
      case GPUSHARE_DEVICE_OUT_OF_MEMORY:
      case GPUSHARE_QUOTA_EXCEEDED:
      case GPUSHARE_EXCEEDS_CAPACITY:
      case GPUSHARE_HOST_OUT_OF_MEMORY:
        throw ResourceOutOfMemory(gpushare_last_error_message());
      default:
        throw std::runtime_error(gpushare_last_error_message());
    }
  }
  // Used again after the stream's work up to now. A block whose session has ended is ignored.
  void deallocate(cuda::stream_ref stream, void* pointer, std::size_t /*bytes*/,
                  std::size_t /*alignment*/ = alignof(std::max_align_t)) noexcept {
    (void)gpushare_allocator_free(allocator_, reinterpret_cast<std::uintptr_t>(pointer), stream.get());
  }

  // Memory for work of any stream. Waits for the work that used it before.
  void* allocate_sync(std::size_t bytes, std::size_t alignment = alignof(std::max_align_t)) {
    const cuda::stream_ref stream{cudaStream_t{}};
    void* const pointer = allocate(stream, bytes, alignment);
    if (cudaStreamSynchronize(stream.get()) == cudaSuccess) return pointer;
    deallocate(stream, pointer, bytes, alignment);
    throw std::runtime_error("gpushare: waiting for the default stream failed");
  }
  // The caller has waited for all work that uses the block.
  void deallocate_sync(void* pointer, std::size_t bytes,
                       std::size_t alignment = alignof(std::max_align_t)) noexcept {
    deallocate(cuda::stream_ref{cudaStream_t{}}, pointer, bytes, alignment);
  }

  friend bool operator==(const MemoryResource& a, const MemoryResource& b) noexcept {
    return a.allocator_ == b.allocator_;
  }
  friend bool operator!=(const MemoryResource& a, const MemoryResource& b) noexcept { return !(a == b); }
  friend void get_property(const MemoryResource&, cuda::mr::device_accessible) noexcept {}

 private:
  gpushare_allocator allocator_;
};

static_assert(cuda::mr::resource_with<MemoryResource, cuda::mr::device_accessible>);

}  // namespace gpushare
