// SPDX-License-Identifier: Apache-2.0
#include "shim/process.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "shim/driver.hpp"
#include "shim/group.hpp"
#include "shim/words.hpp"

namespace gpushare::shim {
namespace {

constexpr int kAncestors = 64;

struct Inherited {
  uint32_t lock;  // the number of the process that holds it
  bool looked;
  bool paths;  // may be trusted
  char page[64];
  char text[sizeof(GroupPage::environment)];
};
Inherited g_inherited;

// Reads the page of a group behind a descriptor of that process; false: it is something else.
bool read_page(int process, const char* descriptor, Inherited* out) {
  char path[64], link[32] = "";
  std::snprintf(path, sizeof path, "/proc/%d/fd/%.20s", process, descriptor);
  if (readlink(path, link, sizeof link - 1) <= 0 || std::strncmp(link, "/memfd:gpushare-group", 21) != 0)
    return false;
  const int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return false;
  struct stat about {};
  const bool good = is_group_page(file) && syscall(SYS_fstat, file, &about) == 0 &&
                    pread(file, out->text, sizeof out->text, offsetof(GroupPage, environment)) ==
                        static_cast<ssize_t>(sizeof out->text);
  close(file);
  if (!good) return false;
  out->text[sizeof out->text - 1] = 0;
  out->paths = getauxval(AT_SECURE) == 0 && (about.st_uid == geteuid() || about.st_uid == 0);
  std::memcpy(out->page, path, sizeof path);
  return true;
}

bool find_page(int process, Inherited* out) {
  char path[40];
  std::snprintf(path, sizeof path, "/proc/%d/fd", process);
  DIR* folder = opendir(path);
  if (folder == nullptr) return false;
  bool found = false;
  while (const dirent* entry = found ? nullptr : readdir(folder))
    found = read_page(process, entry->d_name, out);
  closedir(folder);
  return found;
}

// The value in a text of NAME=VALUE, each of which ends with a zero; an empty one ends the text.
const char* value_in(const char* text, const char* name) {
  const size_t length = std::strlen(name);
  for (; *text != 0; text += std::strlen(text) + 1)
    if (std::strncmp(text, name, length) == 0 && text[length] == '=') return text + length + 1;
  return nullptr;
}

const char* inherited(const char* name) {
  Inherited& from = g_inherited;
  if (!load(from.looked)) {
    const LockedByProcess lock(from.lock);
    if (!load(from.looked)) {
      ProcessStat stat{};
      int process = getpid();  // it has the descriptor itself, unless somebody closed it on the way
      for (int step = 0; step < kAncestors && !find_page(process, &from); ++step) {
        if (!read_stat(process, &stat) || stat.parent <= 0) break;
        process = stat.parent;
      }
      store(from.looked, true);
    }
  }
  if (from.page[0] == 0) return nullptr;
  if (std::strcmp(name, "GPUSHARE_SHIM_GROUP") == 0) return from.page;
  static const char* const paths[] = {"GPUSHARE_CUDA_DRIVER", "GPUSHARE_SOCKET", "XDG_RUNTIME_DIR"};
  for (const char* path : paths)
    if (!from.paths && std::strcmp(name, path) == 0) return nullptr;
  return value_in(from.text, name);
}

}  // namespace

bool is_group_page(int file) {
  struct stat about {};
  uint32_t mark[2] = {};
  return syscall(SYS_fstat, file, &about) == 0 &&  // glibc's fstat is a symbol of 2.33
         about.st_size == static_cast<off_t>(sizeof(GroupPage)) &&
         (fcntl(file, F_GET_SEALS) & F_SEAL_SHRINK) != 0 &&
         pread(file, &mark, sizeof mark, 0) == static_cast<ssize_t>(sizeof mark) && mark[0] == kPageMagic &&
         mark[1] == kPageVersion;
}

bool start_thread(void* (*body)(void*), void* argument) {
  // By name it would be a symbol of glibc 2.34, where it moved from libpthread to libc. A function of the program's that
  // stands in for it has to know of the thread: ThreadSanitizer's runtime has one, and ends the program at the first
  // malloc of a thread that it has not made.
  auto* create = reinterpret_cast<int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*)>(
      bound_symbol("pthread_create"));
  if (create == nullptr) return false;
  // The program's signals are for its own threads.
  sigset_t all, before;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, &before);
  pthread_t thread;
  pthread_attr_t detached;  // nobody joins it
  pthread_attr_init(&detached);
  pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
  const bool started = create(&thread, &detached, body, argument) == 0;
  sigprocmask(SIG_SETMASK, &before, nullptr);
  return started;
}

bool read_stat(int process, ProcessStat* out) {
  char path[40], text[512];
  std::snprintf(path, sizeof path, "/proc/%d/stat", process);
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  const ssize_t length = read(file, text, sizeof text - 1);
  close(file);
  if (length <= 0) return false;
  text[length] = 0;
  // The name of the program is in parentheses and may hold any character; the start time is the 20th word after them.
  const char* at = std::strrchr(text, ')');
  if (at == nullptr || at[1] == 0) return false;
  out->state = at[2];
  for (int word = 0; word < 20; ++word) {
    at = std::strchr(at + 1, ' ');
    if (at == nullptr) return false;
    if (word == 1) out->parent = static_cast<int>(std::strtol(at + 1, nullptr, 10));
  }
  out->started = std::strtoull(at + 1, nullptr, 10);
  return true;
}

const char* setting(const char* name) {
  const char* value = secure_getenv(name);
  if (value != nullptr || secure_getenv("GPUSHARE_SHIM_GROUP") != nullptr) return value;
  return inherited(name);
}

Way way_in() {
  const char* preload = secure_getenv("LD_PRELOAD");
  if (preload != nullptr && std::strstr(preload, kLibrary) != nullptr) return Way::environment;
  return file_preloads() ? Way::file : Way::proxy;
}

}  // namespace gpushare::shim
