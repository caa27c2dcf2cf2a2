// SPDX-License-Identifier: Apache-2.0
#include "cuda_allocator.hpp"

#include <cxxabi.h>
#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <typeinfo>

namespace {

constexpr int kMaxDevices = 64;
// PyTorch's own allocator aligns so.
constexpr uint64_t kAlignment = 512;

struct Device {
  std::atomic<gpushare_allocator> allocator{nullptr};
  std::atomic<bool> attached{false};  // by the user, be it null; else opened at the first allocation
};
// Handles, not objects: constant-initialised, never destroyed, good while statics are destroyed.
constinit std::array<Device, kMaxDevices> devices;
constinit std::mutex opening;
constinit std::atomic<gpushare_torch_reclaim> reclaim{nullptr};

class OutOfMemory final : public std::bad_alloc {
 public:
  explicit OutOfMemory(const std::string& message) : message_(std::make_shared<const std::string>(message)) {}
  const char* what() const noexcept override { return message_->c_str(); }

 private:
  std::shared_ptr<const std::string> message_;  // copying an exception must not throw
};

// PyTorch's own exception, which Python sees as torch.OutOfMemoryError. This library is built without PyTorch, so the class is taken from
// the libc10 that the process has loaded: the constructor of its base, its virtual table and its type.
class C10OutOfMemory {
 public:
  C10OutOfMemory() {
    void* const c10 = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
    if (c10 == nullptr) return;
    construct_ = reinterpret_cast<Construct>(dlsym(
        c10, "_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"));
    table_ = static_cast<void**>(dlsym(c10, "_ZTVN3c1016OutOfMemoryErrorE"));
    type_ = static_cast<std::type_info*>(dlsym(c10, "_ZTIN3c1016OutOfMemoryErrorE"));
  }

  // Returns if PyTorch is not there, or has another such class.
  void raise(const std::string& message) const {
    if (construct_ == nullptr || table_ == nullptr || type_ == nullptr) return;
    void* const object = abi::__cxa_allocate_exception(kMostBytes);
    try {
      construct_(object, {"gpushare_torch_alloc", __FILE__, __LINE__}, message);
    } catch (...) {
      abi::__cxa_free_exception(object);
      throw;
    }
    *static_cast<void***>(object) = table_ + 2;  // behind the offset to the top and the type
    abi::__cxa_throw(object, type_, [](void* thrown) {
      using Destructor = void (*)(void*);
      (*static_cast<Destructor**>(thrown))[0](
          thrown);  // the first virtual function of std::exception's heirs
    });
  }

 private:
  struct SourceLocation {
    const char* function;
    const char* file;
    uint32_t line;
  };
  using Construct = void (*)(void*, SourceLocation, std::string);
  static constexpr size_t kMostBytes = 1024;  // c10::Error has about 200

  Construct construct_ = nullptr;
  void** table_ = nullptr;
  std::type_info* type_ = nullptr;
};

std::string mebibytes(size_t bytes) {
  std::array<char, 32> text{};
  const double mib = static_cast<double>(bytes) / (1 << 20);
  (void)std::snprintf(text.data(), text.size(), "%.2f %s", mib < 1024 ? mib : mib / 1024,
                      mib < 1024 ? "MiB" : "GiB");
  return text.data();
}

// The first words are PyTorch's: programs look for them.
[[noreturn]] void fail_for_memory(size_t bytes, int device, const std::string& why) {
  const std::string message = "CUDA out of memory. Tried to allocate " + mebibytes(bytes) + ". GPU " +
                              std::to_string(device) + " is shared by gpushare: " + why;
  static const C10OutOfMemory c10;
  c10.raise(message);
  throw OutOfMemory(message);
}

[[noreturn]] void fail(size_t bytes, int device, int32_t status, const std::string& why) {
  switch (status) {
    case GPUSHARE_DEVICE_OUT_OF_MEMORY:
    case GPUSHARE_QUOTA_EXCEEDED:
    case GPUSHARE_EXCEEDS_CAPACITY:
    case GPUSHARE_HOST_OUT_OF_MEMORY:
      fail_for_memory(bytes, device, why);
    case GPUSHARE_NOT_FOUND:
      throw std::runtime_error("gpushare: no session: a tensor of " + mebibytes(bytes) + " on device " +
                               std::to_string(device) +
                               " belongs to nobody. Make it inside `with gt.session(...)` or after "
                               "`gt.session(...).open()` on this thread, "
                               "or on a stream of a session (" +
                               why + ")");
    default:
      throw std::runtime_error("gpushare: no memory for a tensor of " + mebibytes(bytes) + " on device " +
                               std::to_string(device) + ": " + why);
  }
}

gpushare_device_address address_of(const void* pointer) {
  return static_cast<gpushare_device_address>(reinterpret_cast<uintptr_t>(pointer));
}
void* pointer_to(gpushare_device_address address) {
  return reinterpret_cast<void*>(static_cast<uintptr_t>(address));  // NOLINT(performance-no-int-to-ptr)
}

// Null for a device that PyTorch cannot have, or without an allocator.
gpushare_allocator allocator_of(int device) {
  if (device < 0 || device >= kMaxDevices) return nullptr;
  return devices[static_cast<size_t>(device)].allocator.load(std::memory_order_acquire);
}

// The device's runtime with one session for all, which live until the process ends. Null if that fails; the thread's
// last error says why.
gpushare_allocator open_device(int device) {
  Device& of = devices[static_cast<size_t>(device)];
  const std::lock_guard lock(opening);
  if (gpushare_allocator made = of.allocator.load(); made != nullptr || of.attached.load()) return made;
  std::string name = "cuda:" + std::to_string(device);
  if (const char* named = std::getenv("GPUSHARE_DEVICE"); named != nullptr && device == 0) name = named;
  gpushare_runtime_params opened = GPUSHARE_RUNTIME_PARAMS_INIT;
  gpushare_session_params all = GPUSHARE_SESSION_PARAMS_INIT;
  gpushare_allocator_params params = GPUSHARE_ALLOCATOR_PARAMS_INIT;
  gpushare_runtime runtime = nullptr;
  gpushare_session session = nullptr;
  gpushare_allocator allocator = nullptr;
  opened.device = name.c_str();
  all.name = "torch";
  params.persistent_kind = GPUSHARE_KIND_FRAMEWORK;
  if (gpushare_runtime_open(&opened, &runtime) != GPUSHARE_OK) return nullptr;
  if (gpushare_session_open(runtime, &all, &session) != GPUSHARE_OK ||
      gpushare_allocator_create(runtime, &params, &allocator) != GPUSHARE_OK ||
      gpushare_allocator_set_default_session(allocator, session) != GPUSHARE_OK) {
    if (allocator != nullptr) (void)gpushare_allocator_release(allocator);
    (void)gpushare_runtime_close(runtime);
    return nullptr;
  }
  of.allocator.store(allocator, std::memory_order_release);
  return allocator;
}

// Calls `body` with each allocator until it answers OK.
template <class Body>
void with_any(Body&& body) {
  for (Device& device : devices) {
    const gpushare_allocator allocator = device.allocator.load(std::memory_order_acquire);
    if (allocator != nullptr && body(allocator) == GPUSHARE_OK) return;
  }
}

using Filter = std::function<bool(gpushare_torch_stream)>;

}  // namespace

extern "C" {

gpushare_allocator gpushare_torch_attach(int device, gpushare_allocator allocator) {
  if (device < 0 || device >= kMaxDevices) return nullptr;
  const std::lock_guard lock(opening);
  devices[static_cast<size_t>(device)].attached = true;
  return devices[static_cast<size_t>(device)].allocator.exchange(allocator);
}

gpushare_torch_reclaim gpushare_torch_set_reclaim(gpushare_torch_reclaim asked) {
  return reclaim.exchange(asked);
}

void* gpushare_torch_alloc(size_t bytes, int device, gpushare_torch_stream stream) {
  if (bytes == 0) return nullptr;
  if (device < 0 || device >= kMaxDevices) fail(bytes, device, GPUSHARE_INVALID_ARGUMENT, "no such device");
  gpushare_allocator allocator = allocator_of(device);
  if (allocator == nullptr) {
    if (devices[static_cast<size_t>(device)].attached.load())
      fail(bytes, device, GPUSHARE_NOT_FOUND, "no session of the device was opened, or all were closed");
    allocator = open_device(device);
    if (allocator == nullptr) {
      gpushare_error_info info = GPUSHARE_ERROR_INFO_INIT;
      (void)gpushare_last_error(&info);
      fail(bytes, device, info.status == GPUSHARE_NOT_FOUND ? GPUSHARE_UNAVAILABLE : info.status,
           info.message);
    }
  }
  gpushare_device_address address = 0;
  for (;;) {
    const int32_t status = gpushare_allocator_alloc(allocator, bytes, kAlignment, stream, &address);
    if (status == GPUSHARE_OK) return pointer_to(address);
    const std::string why = gpushare_last_error_message();
    const gpushare_torch_reclaim ask = reclaim.load(std::memory_order_acquire);
    if ((status != GPUSHARE_DEVICE_OUT_OF_MEMORY && status != GPUSHARE_QUOTA_EXCEEDED) || ask == nullptr ||
        ask(device, bytes) == 0)
      fail(bytes, device, status, why);
  }
}

void gpushare_torch_free(void* pointer, size_t, int device, gpushare_torch_stream stream) {
  if (const gpushare_allocator allocator = allocator_of(device); pointer != nullptr && allocator != nullptr)
    (void)gpushare_allocator_free(allocator, address_of(pointer), stream);
}

void gpushare_torch_init(int) {}

void gpushare_torch_reset() {
  with_any([](gpushare_allocator allocator) {
    uint64_t freed_bytes = 0;
    (void)gpushare_allocator_trim(allocator, &freed_bytes);
    return static_cast<int32_t>(GPUSHARE_NOT_FOUND);  // and the others
  });
}

void gpushare_torch_memory_fraction(double fraction, int device) {
  if (const gpushare_allocator allocator = allocator_of(device))
    (void)gpushare_allocator_set_memory_fraction(allocator, fraction);
}

void* gpushare_torch_get_base_address(void* pointer, size_t* bytes) {
  gpushare_device_address base = address_of(pointer);
  with_any([&](gpushare_allocator allocator) {
    uint64_t found = 0;
    const int32_t status = gpushare_allocator_get_base(allocator, address_of(pointer), &base, &found);
    if (status == GPUSHARE_OK && bytes != nullptr) *bytes = found;
    return status;
  });
  return pointer_to(base);
}

void gpushare_torch_record_stream(void* pointer, gpushare_torch_stream stream) {
  if (pointer == nullptr) return;
  with_any([&](gpushare_allocator allocator) {
    return gpushare_allocator_record_use(allocator, address_of(pointer), stream);
  });
}

void gpushare_torch_begin_allocate_to_pool(int device, gpushare_torch_pool_id id,
                                           std::function<bool(gpushare_torch_stream)> filter) {
  gpushare_allocator allocator = allocator_of(device);
  if (allocator == nullptr && device >= 0 && device < kMaxDevices) allocator = open_device(device);
  if (allocator == nullptr) return;  // the first allocation says why
  if (!filter) {
    (void)gpushare_allocator_begin_pool(allocator, id.first, id.second, nullptr, nullptr, nullptr);
    return;
  }
  auto owned = std::make_unique<Filter>(std::move(filter));
  const auto choose = [](void* of, void* native) -> int32_t {
    return (*static_cast<Filter*>(of))(native) ? 1 : 0;
  };
  const auto release = [](void* of) { const std::unique_ptr<Filter> gone(static_cast<Filter*>(of)); };
  Filter* const given = owned.release();
  const int32_t status =
      gpushare_allocator_begin_pool(allocator, id.first, id.second, choose, given, release);
  // A handle that is not live: nothing has taken the filter.
  if (status == GPUSHARE_INVALID_HANDLE) release(given);
}

void gpushare_torch_end_allocate_to_pool(int device, gpushare_torch_pool_id id) {
  if (const gpushare_allocator allocator = allocator_of(device))
    (void)gpushare_allocator_end_pool(allocator, id.first, id.second);
}

void gpushare_torch_release_pool(int device, gpushare_torch_pool_id id) {
  if (const gpushare_allocator allocator = allocator_of(device))
    (void)gpushare_allocator_release_pool(allocator, id.first, id.second);
}

}  // extern "C"
