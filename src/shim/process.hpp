// process.hpp: what /proc says of processes, threads of the shim, and the settings of a program whose environment was cleared.
//
// `gpushare exec` gives its settings to programs by the environment. It leaves them in the group's page as well. A program
// that has the shim by /etc/ld.so.preload and not that environment (`env -i`, sudo, a setuid program) finds the page among
// its own descriptors or those of its ancestors: programs inherit the page's descriptor unless one of them closes it, and
// `gpushare exec` becomes the parent of every descendant whose own parent has ended.
//
// Threads: every function may be called from any thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

namespace gpushare::shim {

inline constexpr char kLibrary[] = "libgpushare_preload";

struct ProcessStat {
  char state;
  int parent;
  uint64_t started;
};
// False: there is no such process.
bool read_stat(int process, ProcessStat* out);

// Whether the file is a page that `gpushare exec` made: of this version, and sealed. A file that became shorter would end
// this process at the next touch.
bool is_group_page(int file);

// The environment's value of that name, else that on the page of its group; null: neither has one. A program that runs with
// more rights than its starter, or whose page is another user's, gets no paths from there.
const char* setting(const char* name);

// Starts a thread that takes none of the program's signals. False: it cannot be started.
bool start_thread(void* (*body)(void*), void* argument);

enum class Way { environment, file, proxy };
// How the shim came into this process: by LD_PRELOAD, by /etc/ld.so.preload, or by the proxy of libcuda.so.1.
Way way_in();
// Whether /etc/ld.so.preload names the preload library.
inline bool file_preloads() {
  char text[1024];
  const int file = open("/etc/ld.so.preload", O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  const ssize_t length = read(file, text, sizeof text - 1);
  close(file);
  text[length > 0 ? length : 0] = 0;
  return std::strstr(text, kLibrary) != nullptr;
}

}  // namespace gpushare::shim
