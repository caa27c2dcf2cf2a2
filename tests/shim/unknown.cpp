// What the shim does not know: versions of functions that came after it, and an NVML that does not list the process.
// GPUSHARE_MEMORY=64M, GPUSHARE_SHIM_FAIL=closed. Run with the shim preloaded over the recording driver.
// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "support/catch.hpp"
#include "through_shim.hpp"

namespace {

constexpr uint64_t kMiB = 1 << 20;

// What the process has written to stderr meanwhile.
class Stderr {
 public:
  Stderr() : file_(memfd_create("stderr", MFD_CLOEXEC)), before_(dup(STDERR_FILENO)) {
    dup2(file_, STDERR_FILENO);
  }
  Stderr(const Stderr&) = delete;
  Stderr& operator=(const Stderr&) = delete;
  ~Stderr() {
    dup2(before_, STDERR_FILENO);
    close(before_);
    close(file_);
  }
  std::string text() const {
    char text[4096] = "";
    return pread(file_, text, sizeof text - 1, 0) > 0 ? text : "";
  }

 private:
  int file_, before_;
};
int times(const std::string& text, const std::string& what) {
  int count = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++count;
  return count;
}

}  // namespace

TEST_CASE(
    "a function that came after the shim is refused where what cannot be held gets nothing, and told once") {
  void* const nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  REQUIRE(nvml != nullptr);
  const Stderr written;
  for (int i = 0; i < 2; ++i) {
    const auto memory = reinterpret_cast<int (*)()>(dlsym(nvml, "nvmlDeviceGetMemoryInfo_v9"));
    REQUIRE(memory != nullptr);
    CHECK(memory() == 3);               // NVML_ERROR_NOT_SUPPORTED
    CHECK(cu("cuMemAlloc_v9") == 801);  // a version of one that the shim knows
    CHECK(cu("cuOfTomorrow") == 801);   // one of which it knows nothing
    void* found = nullptr;
    CHECK(cu("cuGetProcAddress_v2", "cuOfTomorrow", &found, 15000, uint64_t{0}, nullptr) == 500);
    CHECK(found == nullptr);
  }
  const std::string text = written.text();
  INFO(text);
  CHECK(times(text, "is newer than this library") == 1);
  CHECK(times(text, "nvmlDeviceGetMemoryInfo_v9") == 1);
  CHECK(dlsym(nvml, "nvmlDeviceGetMemoryInfo_v8") == nullptr);  // there is none
}

TEST_CASE("a process that NVML does not list is told that its contexts are not counted, once") {
  control<decltype(&recorder_set_nvml)>("recorder_set_nvml")(3);
  control<decltype(&recorder_set_overhead)>("recorder_set_overhead")(40 * kMiB, 0);
  const Stderr written;
  void* context = nullptr;
  uint64_t address = 0, free = 0, total = 0;
  for (int i = 0; i < 2; ++i) {
    REQUIRE(cu("cuDevicePrimaryCtxRetain", &context, 0U) == kSuccess);
    REQUIRE(cu("cuMemGetInfo_v2", &free, &total) == kSuccess);
    CHECK(free == 64 * kMiB);
    CHECK(cu("cuMemAlloc_v2", &address, 65 * kMiB) == kOutOfMemory);
    REQUIRE(cu("cuDevicePrimaryCtxRelease_v2", 0U) == kSuccess);
  }
  const std::string text = written.text();
  INFO(text);
  CHECK(times(text, "NVML does not tell") == 1);
}
