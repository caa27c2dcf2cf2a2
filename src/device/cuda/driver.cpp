// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/driver.hpp"

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <utility>

#include "base/dynamic_library.hpp"
#include "base/mutex.hpp"

namespace gpushare::device::cuda {
namespace {

struct ResultRow {
  const char* name;
  api::CUresult result;
  int32_t status;
};
constexpr ResultRow kResults[] = {
#define X(value, name, status) {#name, value, GPUSHARE_##status},
#include "device/cuda/result_table.inc"
#undef X
};

const ResultRow* find_row(api::CUresult result) {
  for (const ResultRow& row : kResults) {
    if (row.result == result) return &row;
  }
  return nullptr;
}

// Both published forms of cuGetProcAddress. Only the five-argument one can tell "absent" from "too new"; we
// need neither.
using GetProcAddressV1 = api::CUresult (*)(const char*, void**, int, unsigned long long);
using GetProcAddressV2 = api::CUresult (*)(const char*, void**, int, unsigned long long, int*);

// Asks the driver for the signature of exactly the CUDA version that our table declares; drivers older
// than 11.3, which cannot be asked, export that signature under its suffixed name.
class SymbolFinder {
 public:
  explicit SymbolFinder(const base::DynamicLibrary& library)
      : library_(library),
        v1_(reinterpret_cast<GetProcAddressV1>(library.find("cuGetProcAddress"))),
        v2_(reinterpret_cast<GetProcAddressV2>(library.find("cuGetProcAddress_v2"))) {}

  void* find(const char* name, const char* exported, int version) const {
    void* function = nullptr;
    const unsigned long long flags = api::CU_GET_PROC_ADDRESS_LEGACY_STREAM;
    if (v2_ != nullptr) {
      int found = 0;
      if (v2_(name, &function, version, flags, &found) == api::CUDA_SUCCESS && function != nullptr)
        return function;
      return nullptr;
    }
    if (v1_ != nullptr) return v1_(name, &function, version, flags) == api::CUDA_SUCCESS ? function : nullptr;
    return library_.find(exported);
  }

 private:
  const base::DynamicLibrary& library_;
  const GetProcAddressV1 v1_;
  const GetProcAddressV2 v2_;
};

base::Status unavailable(const std::string& why) {
  return {GPUSHARE_UNAVAILABLE, "no CUDA: " + why};
}

}  // namespace

const char* result_name(api::CUresult result) {
  const ResultRow* row = find_row(result);
  return row != nullptr ? row->name : "CUDA_ERROR_?";
}

int32_t result_status(api::CUresult result) {
  const ResultRow* row = find_row(result);
  return row != nullptr ? row->status : GPUSHARE_UNKNOWN;
}

bool is_sticky(api::CUresult result) {
  return result_status(result) == GPUSHARE_DEVICE_LOST;
}

base::Status to_status(api::CUresult result, const std::string& what) {
  if (result == api::CUDA_SUCCESS) return {};
  return {result_status(result), base::format("%s: %s (%d)", what.c_str(), result_name(result), result),
          result};
}

namespace {

constexpr api::CUresult kStubLibrary = 34;  // CUDA_ERROR_STUB_LIBRARY

// The CUDA toolkit brings a stub of libcuda to link against on machines without a driver. Every function in it
// answers CUDA_ERROR_STUB_LIBRARY. LD_LIBRARY_PATH finds it in containers that list the toolkit's lib64/stubs.
bool is_stub(const base::DynamicLibrary& library) {
  void* const init = library.find("cuInit");
  return init != nullptr && reinterpret_cast<decltype(Driver::cuInit)>(init)(0) == kStubLibrary;
}

base::Status found_stub(const base::DynamicLibrary& library, const std::string& path) {
  Dl_info info{};
  void* const init = library.find("cuInit");
  const bool known = init != nullptr && ::dladdr(init, &info) != 0 && info.dli_fname != nullptr;
  return unavailable(base::format(
      "%s is the CUDA toolkit's stub, which is for linking only, not a driver; take its folder out of "
      "LD_LIBRARY_PATH and install the NVIDIA driver, or use device host or sim",
      known ? info.dli_fname : path.c_str()));
}

}  // namespace

base::Result<Driver*> Driver::open(const std::string& path) {
  base::Result<base::DynamicLibrary> library =
      base::DynamicLibrary::open(path.empty() ? "libcuda.so.1" : path);
  if (!library.ok() && path.empty()) {
    // Containers may carry only the first name, hand-made installations only the second; report the first
    // failure.
    base::Result<base::DynamicLibrary> second = base::DynamicLibrary::open("libcuda.so");
    if (second.ok()) library = std::move(second);
  }
  if (!library.ok()) {
    return unavailable(library.status().message() + "; install the NVIDIA driver, or use device host or sim");
  }

  auto driver = std::make_unique<Driver>();
  driver->path_ = path.empty() ? "libcuda" : path;
  const SymbolFinder finder(*library);
  std::string missing;
  bool virtual_memory = true;
  bool shareable = true;
  bool partitions = true;
  bool capture = true;
  bool required = true;
  // NOLINTBEGIN(bugprone-macro-parentheses): members' names
#define GPUSHARE_CUDA_FIND(need, name, exported, version, parameters)                                  \
  driver->name = reinterpret_cast<decltype(driver->name)>(finder.find(#name, #exported, version));     \
  if (driver->name == nullptr) {                                                                       \
    need = false;                                                                                      \
    if (std::string(#need) == "required") {                                                            \
      missing += base::format(" " #exported " (CUDA %d.%d)", (version) / 1000, (version) % 1000 / 10); \
    }                                                                                                  \
  }
  // NOLINTEND(bugprone-macro-parentheses)
  GPUSHARE_CUDA_SYMBOLS(GPUSHARE_CUDA_FIND)
#undef GPUSHARE_CUDA_FIND
  if (!required && is_stub(*library)) return found_stub(*library, driver->path_);
  if (!required) return unavailable(driver->path_ + " lacks" + missing + "; update the driver");
  driver->has_virtual_memory_ = virtual_memory;
  driver->has_shareable_ = shareable;
  driver->has_partitions_ = partitions;
  driver->has_capture_ = capture;

  if (const api::CUresult result = driver->cuInit(0); result != api::CUDA_SUCCESS) {
    if (result == kStubLibrary) return found_stub(*library, driver->path_);
    return base::Status(
        GPUSHARE_UNAVAILABLE,
        base::format("no CUDA: cuInit of %s: %s (%d)", driver->path_.c_str(), result_name(result), result),
        result);
  }
  if (driver->cuDriverGetVersion(&driver->version_) != api::CUDA_SUCCESS) driver->version_ = 0;
  library->release();
  return driver.release();
}

base::Result<const Driver*> Driver::get(const std::string& path) {
  struct Opened {
    base::Mutex mutex;
    std::map<std::string, const Driver*> drivers GPUSHARE_GUARDED_BY(mutex);
  };
  // Never destroyed, like the drivers in it: devices may close while static destructors run.
  static Opened* opened = new Opened;
  std::string key = path;
  if (key.empty()) {
    if (const char* named = secure_getenv("GPUSHARE_CUDA_DRIVER"); named != nullptr) key = named;
  }
  base::MutexLock lock(opened->mutex);
  if (const auto it = opened->drivers.find(key); it != opened->drivers.end()) return it->second;
  GPUSHARE_ASSIGN_OR_RETURN(const Driver* driver, open(key));
  opened->drivers[key] = driver;
  return driver;
}

}  // namespace gpushare::device::cuda
