// SPDX-License-Identifier: Apache-2.0
#include "cli/shim_files.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>

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
  // Others may write in /tmp, so what they could have put there is refused.
  const std::string ours = base::format("/tmp/gpushare-%u", static_cast<unsigned>(::geteuid()));
  struct stat found {};
  if ((::mkdir(ours.c_str(), 0755) != 0 && errno != EEXIST) || ::lstat(ours.c_str(), &found) != 0)
    return base::Status(GPUSHARE_IO_ERROR, "'" + ours + "': " + std::strerror(errno));
  if (!S_ISDIR(found.st_mode) || found.st_uid != ::geteuid() || (found.st_mode & 022) != 0)
    return base::Status(GPUSHARE_IO_ERROR,
                        "'" + ours + "' is not a folder that this user alone may write in: remove it");
  const std::string link = ours + base::format("/%016zx", std::hash<std::string>()(folder));
  std::error_code error;
  if (::symlink(folder.c_str(), link.c_str()) != 0 &&
      std::filesystem::read_symlink(link, error).native() != folder)
    return base::Status(GPUSHARE_IO_ERROR, "'" + link + "' does not lead to '" + folder + "': remove it");
  return link;
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
