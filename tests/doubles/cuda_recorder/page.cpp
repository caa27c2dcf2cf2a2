// SPDX-License-Identifier: Apache-2.0
#include "page.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>

namespace recorder::device {
namespace {

constexpr uint32_t kMagic = 0x72646576;

bool parse_settings(const char* text, Settings* out) {
  struct {
    const char* name;
    uint64_t* value;
  } const names[] = {{"capacity_bytes", &out->capacity_bytes},
                     {"side_by_side", &out->side_by_side},
                     {"slice_ns", &out->slice_ns},
                     {"switch_ns", &out->switch_ns},
                     {"kernel_ns", &out->kernel_ns},
                     {"copy_ns", &out->copy_ns},
                     {"copy_bytes_per_s", &out->copy_bytes_per_s},
                     {"fill_bytes_per_s", &out->fill_bytes_per_s},
                     {"dilation", &out->dilation}};
  for (const char* at = text; at != nullptr && *at != 0;) {
    const size_t length = std::strcspn(at, "=");
    bool known = false;
    for (const auto& [name, value] : names) {
      if (std::strlen(name) != length || std::strncmp(at, name, length) != 0 || at[length] != '=') continue;
      char* end = nullptr;
      *value = std::strtoull(at + length + 1, &end, 10);
      if (end == at + length + 1 || (*end != 0 && *end != ',')) return false;
      at = *end == ',' ? end + 1 : end;
      known = true;
      break;
    }
    if (!known) return false;
  }
  return out->dilation > 0 && out->slice_ns > 0 && out->copy_bytes_per_s > 0 && out->fill_bytes_per_s > 0;
}

}  // namespace

uint64_t host_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

bool lock_byte(int file, int command, int at, struct flock* out_lock) {
  *out_lock = {};
  out_lock->l_type = F_WRLCK;
  out_lock->l_whence = SEEK_SET;
  out_lock->l_start = at;
  out_lock->l_len = 1;
  return fcntl(file, command, out_lock) == 0;
}

Mapped open_page(const std::string& path, const char* settings, bool make) {
  static std::mutex mutex;
  static auto* known = new std::map<std::string, Mapped>;
  const std::lock_guard guard(mutex);
  Mapped& page = (*known)[path];
  if (page.page != nullptr) return page;
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC | (make ? O_CREAT : 0), 0600);
  if (file < 0) return {};
  struct flock lock;
  if (make && !lock_byte(file, F_SETLKW, kProcesses, &lock)) return {};
  const bool fresh = lseek(file, 0, SEEK_END) < static_cast<off_t>(sizeof(Page));
  if (fresh && (!make || ftruncate(file, sizeof(Page)) != 0)) return {};
  void* memory = mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) return {};
  auto* mapped = static_cast<Page*>(memory);
  if (mapped->magic != kMagic) {
    if (!make) return {};
    mapped->settings = {uint64_t{80} << 30, 0, 2'000'000, 0, 10'000, 1'000, 25'000'000'000,
                        1'000'000'000'000,  1};
    if (!parse_settings(settings, &mapped->settings)) {
      std::fprintf(stderr, "recorder: RECORDER_DEVICE_SETTINGS=%s cannot be read\n", settings);
      return {};
    }
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&mapped->mutex, &attributes);
    mapped->states[0].copy_process = -1;
    mapped->states[0].active = -1;
    mapped->epoch_ns = host_ns();
    store(mapped->magic, kMagic);
  }
  if (make) {
    lock.l_type = F_UNLCK;
    fcntl(file, F_SETLK, &lock);
  }
  return page = {mapped, file};
}

}  // namespace recorder::device
