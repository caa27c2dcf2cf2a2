// SPDX-License-Identifier: Apache-2.0
#include "cli/shim_files.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

namespace gpushare::cli {
namespace {

constexpr const char* kLibrary = "libgpushare_preload.so";
constexpr const char* kProxy = "gpushare/libcuda.so.1";

// What lacks beside the tool in `bin`, and what to do about it.
base::Status missing_shim(const std::filesystem::path& bin) {
#if defined(__x86_64__)
  std::error_code error;
  const std::filesystem::path at = (bin / "../lib").lexically_normal();
  const char* file = std::filesystem::exists(at / kLibrary, error) ? kProxy : kLibrary;
  const std::filesystem::path tree = bin.parent_path();
  const std::string how = std::filesystem::exists(tree / "CMakeCache.txt", error)
                              ? "build it: cmake --build '" + tree.string() + "' --target gpushare_installed"
                              : "install gpushare whole (cmake --install, or pip install)";
  return {GPUSHARE_UNAVAILABLE, (at / file).string() + " is missing; " + how};
#else
  return {GPUSHARE_UNAVAILABLE, "there is no preload library for this processor, only for x86-64"};
#endif
}

}  // namespace

base::Result<std::string> readable_by_loader(const std::string& folder) {
  if (folder.find_first_of(" :;$") == std::string::npos) return folder;
  // The kernel's name of a descriptor that this process keeps open.
  const int file = ::open(folder.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) return base::Status(GPUSHARE_IO_ERROR, "'" + folder + "': " + std::strerror(errno));
  return base::format("/proc/%d/fd/%d", static_cast<int>(::getpid()), file);
}

base::Result<ShimFiles> find_shim_files() {
  std::error_code error;
  const std::filesystem::path bin = std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
  for (const char* folder : {"../lib", "../" GPUSHARE_LIBRARY_FOLDER}) {
    const std::filesystem::path at = (bin / folder).lexically_normal();
    if (!std::filesystem::exists(at / kLibrary, error) || !std::filesystem::exists(at / kProxy, error))
      continue;
    GPUSHARE_ASSIGN_OR_RETURN(const std::string name, readable_by_loader(at.string()));
    return ShimFiles{name + "/" + kLibrary, name + "/gpushare"};
  }
  return missing_shim(bin);
}

}  // namespace gpushare::cli
