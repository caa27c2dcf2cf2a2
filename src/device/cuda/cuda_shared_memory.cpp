// The shared part of cuda_memory.hpp: physical memory that other processes import by a file descriptor.
//
// A descriptor of the driver carries neither size nor access: an importer is believed what it says of the size,
// and holds itself to the access that it asked for. Mapping more than there is fails in the driver.
// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/units.hpp"
#include "device/cuda/cuda_memory.hpp"

namespace gpushare::device::cuda {

base::Status Memory::check_shareable() const {
  GPUSHARE_RETURN_IF_ERROR(check_virtual());
  if (can_share_) return {};
  return {GPUSHARE_UNSUPPORTED, "this driver or device cannot share memory by file descriptor"};
}

base::Result<gpushare_backend_memory*> Memory::create_shared(uint64_t bytes) {
  GPUSHARE_RETURN_IF_ERROR(check_shareable());
  if (bytes == 0) return base::Status(GPUSHARE_INVALID_ARGUMENT, "phys_create_shared of 0 bytes");
  GPUSHARE_RETURN_IF_ERROR(check_granules("phys_create_shared: size", bytes));
  GPUSHARE_ENTER_CONTEXT(context_);
  const Change change;
  GPUSHARE_RETURN_IF_ERROR(take("phys_create_shared", bytes));
  uint64_t room_for_pool = 0;
  {
    base::MutexLock lock(mutex_);
    room_for_pool = limit_bytes_ - used_bytes_;
  }
  (void)trim(room_for_pool);
  CaptureRelaxed relaxed(driver());
  api::CUmemAllocationProp properties = granule_properties();
  properties.requestedHandleTypes = api::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  Granule handle = 0;
  api::CUresult result = driver().cuMemCreate(&handle, bytes, &properties, 0);
  if (result == api::CUDA_ERROR_OUT_OF_MEMORY && trim(0))
    result = driver().cuMemCreate(&handle, bytes, &properties, 0);
  if (result != api::CUDA_SUCCESS) {
    give_back(bytes);
    if (result == api::CUDA_ERROR_OUT_OF_MEMORY) return out_of_memory("phys_create_shared", bytes);
    return context_.status(result, "cuMemCreate");
  }
  auto memory = std::make_unique<Physical>();
  memory->granules = {handle};
  memory->bytes = bytes;
  memory->shared = true;
  return keep(std::move(memory));
}

base::Result<int32_t> Memory::export_physical(gpushare_backend_memory* handle, uint32_t) {
  GPUSHARE_RETURN_IF_ERROR(check_shareable());
  Granule granule = 0;
  {
    base::MutexLock lock(mutex_);
    const auto it = memories_.find(reinterpret_cast<Physical*>(handle));
    if (it == memories_.end() || it->second->released)
      return base::Status(GPUSHARE_INVALID_HANDLE, "not live physical memory of this device");
    if (!it->second->shared || it->second->imported)
      return base::Status(GPUSHARE_INVALID_ARGUMENT,
                          "phys_export: only memory of phys_create_shared of this device can be exported");
    granule = it->second->granules.front();
  }
  GPUSHARE_ENTER_CONTEXT(context_);
  int descriptor = -1;
  CaptureRelaxed relaxed(driver());
  const api::CUresult result = driver().cuMemExportToShareableHandle(
      &descriptor, granule, api::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  if (result != api::CUDA_SUCCESS) {
    base::Status status = context_.status(result, "cuMemExportToShareableHandle");
    if (status.code() == GPUSHARE_DEVICE_LOST) return status;
    return base::Status(GPUSHARE_IO_ERROR, status.message(), result);
  }
  if (fcntl(descriptor, F_SETFD, FD_CLOEXEC) != 0) {
    const int error = errno;
    (void)close(descriptor);
    return base::Status(GPUSHARE_IO_ERROR, std::string("phys_export: ") + std::strerror(error), error);
  }
  return descriptor;
}

base::Result<gpushare_backend_memory*> Memory::import_physical(int32_t descriptor, uint64_t bytes,
                                                               uint32_t access) {
  GPUSHARE_RETURN_IF_ERROR(check_shareable());
  if (bytes == 0) return base::Status(GPUSHARE_INVALID_ARGUMENT, "phys_import of 0 bytes");
  GPUSHARE_RETURN_IF_ERROR(check_granules("phys_import: size", bytes));
  if (fcntl(descriptor, F_GETFD) < 0)
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("phys_import: %d is no open file descriptor", descriptor), errno);
  GPUSHARE_ENTER_CONTEXT(context_);
  CaptureRelaxed relaxed(driver());
  Granule handle = 0;
  // The driver takes the descriptor itself for the pointer.
  void* const shareable = reinterpret_cast<void*>(static_cast<uintptr_t>(descriptor));
  const api::CUresult result = driver().cuMemImportFromShareableHandle(
      &handle, shareable, api::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  if (result != api::CUDA_SUCCESS) {
    base::Status status = context_.status(result, "cuMemImportFromShareableHandle");
    if (status.code() == GPUSHARE_DEVICE_LOST) return status;
    return base::Status(
        GPUSHARE_INVALID_ARGUMENT,
        base::format("phys_import: descriptor %d is not of exported memory of this driver: %s", descriptor,
                     status.message().c_str()),
        result);
  }
  auto memory = std::make_unique<Physical>();
  memory->granules = {handle};
  memory->bytes = bytes;
  memory->shared = true;
  memory->imported = true;
  memory->writable = access == GPUSHARE_ACCESS_READ_WRITE;
  return keep(std::move(memory));
}

api::CUresult Memory::give_access(Address address, uint64_t bytes, bool writable) {
  api::CUmemAccessDesc access{{api::CU_MEM_LOCATION_TYPE_DEVICE, context_.device()},
                              api::CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  if (!writable) {
    access.flags = api::CU_MEM_ACCESS_FLAGS_PROT_READ;
    const api::CUresult result = driver().cuMemSetAccess(address, bytes, &access, 1);
    // Drivers need not know read-only access to memory of the device, and which of two results says so is not
    // documented: copies and fills are then held off by check_access() alone.
    if (result != api::CUDA_ERROR_NOT_SUPPORTED && result != api::CUDA_ERROR_INVALID_VALUE) return result;
    access.flags = api::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  }
  return driver().cuMemSetAccess(address, bytes, &access, 1);
}

}  // namespace gpushare::device::cuda
