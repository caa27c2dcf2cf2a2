// SPDX-License-Identifier: Apache-2.0
#include "cli/program_check.hpp"

#include <elf.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <vector>

#include "shim/process.hpp"

namespace gpushare::cli {
namespace {

base::Status cannot_hold(const std::string& path, const std::string& why) {
  return {GPUSHARE_UNSUPPORTED, "'" + path + "' cannot be held: " + why};
}

base::Status check(const std::string& path, int depth) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0)
    return {GPUSHARE_NOT_FOUND, "'" + path + "': " + std::strerror(errno)};
  const bool other_user = (info.st_mode & S_ISUID) != 0 && info.st_uid != ::geteuid();
  const bool other_group = (info.st_mode & S_ISGID) != 0 && info.st_gid != ::getegid();
  // A library that /etc/ld.so.preload names comes into these too. They find the group's page if they may read it: as this user,
  // or as root.
  const bool preloaded = shim::file_preloads() && (!other_user || info.st_uid == 0);
  if ((other_user || other_group) && !preloaded)
    return cannot_hold(path,
                       std::string("it is ") + (other_user ? "setuid" : "setgid") +
                           ", and the loader preloads nothing into a program that runs as somebody else; "
                           "name libgpushare_preload.so in /etc/ld.so.preload, or start gpushare exec as "
                           "that user inside it");
  if (::geteuid() != 0 && !preloaded && ::getxattr(path.c_str(), "security.capability", nullptr, 0) > 0)
    return cannot_hold(path,
                       "it has file capabilities, and the loader preloads nothing into such a program; name "
                       "libgpushare_preload.so in /etc/ld.so.preload");

  std::ifstream file(path, std::ios::binary);
  Elf64_Ehdr header{};
  file.read(reinterpret_cast<char*>(&header), sizeof header);
  const auto got = static_cast<size_t>(file.gcount());
  const auto* bytes = reinterpret_cast<const char*>(&header);
  if (got >= 2 && bytes[0] == '#' && bytes[1] == '!') {
    // A script: what counts is its interpreter, and behind `env` the program that it looks for.
    std::ifstream script(path);
    std::string line, word, interpreter;
    std::getline(script, line);
    std::istringstream words(line.substr(2));
    words >> interpreter;
    if (depth == 0) return cannot_hold(path, "its interpreters are scripts without end");
    GPUSHARE_RETURN_IF_ERROR(check(interpreter, depth - 1));
    if (interpreter.size() < 4 || interpreter.compare(interpreter.size() - 4, 4, "/env") != 0) return {};
    while (words >> word)
      if (word[0] != '-' && word.find('=') == std::string::npos) break;
    const base::Result<std::string> named = find_program(word);
    return named.ok() ? check(*named, depth - 1) : base::Status{};
  }
  if (got < sizeof header || std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0)
    return {};  // the kernel will say what it is
  if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_machine != EM_X86_64)
    return cannot_hold(path, "it is not a program for 64-bit x86, as the preload library is");
  for (int i = 0; i < header.e_phnum; ++i) {
    Elf64_Phdr segment{};
    file.seekg(static_cast<std::streamoff>(header.e_phoff + static_cast<uint64_t>(i) * header.e_phentsize));
    if (!file.read(reinterpret_cast<char*>(&segment), sizeof segment)) break;
    if (segment.p_type != PT_INTERP) continue;
    std::string loader(std::min<size_t>(segment.p_filesz, 4096), 0);
    file.seekg(static_cast<std::streamoff>(segment.p_offset));
    file.read(loader.data(), static_cast<std::streamsize>(loader.size()));
    if (loader.find("/ld-musl") == std::string::npos) return {};
    return cannot_hold(path, "its C library is musl (" + std::string(loader.c_str()) +
                                 "), and the preload library is for programs of glibc");
  }
  return cannot_hold(path, "it is linked statically, so there is no loader that would preload a library");
}

}  // namespace

base::Result<std::string> find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) return name;
  const char* path = std::getenv("PATH");
  std::istringstream folders(path != nullptr ? path : "/usr/local/bin:/usr/bin:/bin");
  for (std::string folder; std::getline(folders, folder, ':');) {
    std::string file = (folder.empty() ? "." : folder) + "/" + name;
    struct stat info {};
    if (::stat(file.c_str(), &info) == 0 && S_ISREG(info.st_mode) && ::access(file.c_str(), X_OK) == 0)
      return file;
  }
  return base::Status(GPUSHARE_NOT_FOUND, "no program '" + name + "' in PATH");
}

base::Status check_preloadable(const std::string& path) {
  return check(path, 4);
}

}  // namespace gpushare::cli
