// SPDX-License-Identifier: Apache-2.0
#include "shim/group.hpp"

#include <fcntl.h>
#include <sys/auxv.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "shim/blocks.hpp"
#include "shim/books.hpp"
#include "shim/device.hpp"
#include "shim/driver.hpp"
#include "shim/graphs.hpp"
#include "shim/nvml.hpp"
#include "shim/process.hpp"
#include "shim/ranges.hpp"
#include "shim/settings.hpp"
#include "shim/small_heap.hpp"
#include "shim/words.hpp"

namespace gpushare::shim {

GroupPage* g_page = nullptr;
// A page that the kernel empties in a child of fork: its first word tells whether this process has been here.
uint32_t* g_mark = nullptr;
Slot* g_slot = nullptr;

namespace {

GroupPage g_private_page;
int g_page_file = -1;  // of the group's page, open for as long as this process holds the lock of its slot

// Number and start time of a process; 0: there is none.
uint64_t identity_of(int process) {
  ProcessStat stat{};
  if (!read_stat(process, &stat) || stat.state == 'Z' || stat.state == 'X')
    return 0;  // ended, not waited for
  return static_cast<uint64_t>(process) << 40 | (stat.started & ((uint64_t{1} << 40) - 1));
}

// The digits of a link in /proc as one number.
uint64_t number_in_link(const char* path) {
  char text[64];
  const ssize_t length = readlink(path, text, sizeof text);
  uint64_t number = 0;
  for (ssize_t i = 0; i < length; ++i)
    if (text[i] >= '0' && text[i] <= '9') number = number * 10 + static_cast<uint64_t>(text[i] - '0');
  return number;
}

// The namespace of process numbers, the same for all processes of a container. With kForeignProc /proc has the numbers of
// another namespace (`unshare --pid` without a /proc of its own), so that it says nothing of processes by these.
constexpr uint64_t kForeignProc = uint64_t{1} << 63;
uint64_t own_space() {
  const uint64_t number = number_in_link("/proc/self/ns/pid");  // pid:[4026531836]
  return number_in_link("/proc/self") == static_cast<uint64_t>(getpid()) ? number : number | kForeignProc;
}

// With another namespace's /proc this process's number may not be there, and 0 would mean a free slot. Other processes
// then go by the lock of the slot alone.
uint64_t own_identity(uint64_t space) {
  const uint64_t identity = (space & kForeignProc) == 0 ? identity_of(getpid()) : 0;
  return identity != 0 ? identity : static_cast<uint64_t>(getpid()) << 40 | 1;
}

struct flock lock_of(uint32_t slot, short type) {
  struct flock lock {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(slot);
  lock.l_len = 1;
  return lock;
}

bool is_alive(const Slot& slot, uint32_t number, uint64_t identity, uint64_t space) {
  if (&slot == g_slot) return true;  // a process does not meet locks of its own
  if (load(slot.space) == space && (space & kForeignProc) == 0)
    return identity_of(static_cast<int>(identity >> 40)) == identity;
  struct flock lock = lock_of(number, F_WRLCK);
  return g_page_file < 0 || fcntl(g_page_file, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

void empty(Slot& slot) {
  for (int device = 0; device < kDevices; ++device) {
    store(slot.counted[device], 0);
    store(slot.overhead[device], 0);
    store(slot.spilled[device], 0);
  }
  store(slot.pinned, 0);
}

}  // namespace

void reap(GroupPage& page) {
  const uint32_t used = load(page.slots_used);
  const uint64_t space = own_space();
  for (uint32_t i = 0; i < used && i < kSlots; ++i) {
    Slot& slot = page.slots[i];
    uint64_t identity = load(slot.identity);
    if (identity == 0 || identity == UINT64_MAX || is_alive(slot, i, identity, space)) continue;
    // UINT64_MAX: being emptied or taken. A process that is killed meanwhile leaves an empty slot unused, nothing more.
    if (!__atomic_compare_exchange_n(&slot.identity, &identity, UINT64_MAX, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_RELAXED))
      continue;
    empty(slot);
    store(slot.identity, 0);
  }
}

namespace {

// The slot that an earlier program of this process had: execve() leaves number and start time as they are, and the
// memory of that program has gone with its contexts. Null: there is none.
Slot* slot_of_earlier_program(GroupPage& page, uint64_t own, uint64_t space) {
  const uint32_t used = load(page.slots_used);
  for (uint32_t i = 0; i < used && i < kSlots; ++i) {
    Slot& slot = page.slots[i];
    uint64_t identity = own;
    if (load(slot.space) != space || !__atomic_compare_exchange_n(&slot.identity, &identity, UINT64_MAX,
                                                                  false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
      continue;
    empty(slot);
    return &slot;
  }
  return nullptr;
}

// `number` names a slot whose identity is UINT64_MAX, so that nobody else takes it meanwhile.
Slot* make_own(GroupPage& page, uint32_t number, uint64_t own, uint64_t space) {
  Slot& slot = page.slots[number];
  store(slot.space, space);
  if (struct flock lock = lock_of(number, F_WRLCK); &page != &g_private_page && g_page_file >= 0)
    fcntl(g_page_file, F_SETLK, &lock);
  store(slot.identity, own);
  for (uint32_t used = load(page.slots_used); used < number + 1;)
    if (__atomic_compare_exchange_n(&page.slots_used, &used, number + 1, false, __ATOMIC_ACQ_REL,
                                    __ATOMIC_ACQUIRE))
      break;
  return &slot;
}

Slot* take_slot(GroupPage& page) {
  const uint64_t space = own_space(), own = own_identity(space);
  if (Slot* earlier = slot_of_earlier_program(page, own, space))
    return make_own(page, static_cast<uint32_t>(earlier - page.slots), own, space);
  for (int attempt = 0; attempt < 2; ++attempt) {
    for (uint32_t i = 0; i < kSlots; ++i) {
      uint64_t free = 0;
      if (!__atomic_compare_exchange_n(&page.slots[i].identity, &free, UINT64_MAX, false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_RELAXED))
        continue;
      return make_own(page, i, own, space);
    }
    reap(page);
  }
  return nullptr;
}

// Opens the page's file. Programs inherit the descriptor whose path `gpushare exec` gives them. That serves those to which
// the path says nothing or is forbidden: in a namespace of processes with a /proc of its own, or of another user.
int open_page(const char* path) {
  const char* const name = std::strncmp(path, "/proc/", 6) == 0 ? std::strstr(path, "/fd/") : nullptr;
  if (const int inherited = name != nullptr ? static_cast<int>(std::strtol(name + 4, nullptr, 10)) : -1;
      inherited >= 0 && is_group_page(inherited))
    return fcntl(inherited, F_DUPFD_CLOEXEC, 0);
  return open(path, O_RDWR | O_CLOEXEC);
}

// The page in that file; null: there is none, or it cannot be used. An empty file becomes a page with `limits`.
GroupPage* map_group(const char* path, const Limits& limits, bool* out_opened) {
  if (g_page_file >= 0) close(g_page_file);  // the parent's of this child of fork
  g_page_file = open_page(path);
  *out_opened = g_page_file >= 0;
  if (!*out_opened) return nullptr;
  flock(g_page_file, LOCK_EX);  // only the first process fills it
  off_t bytes = lseek(g_page_file, 0, SEEK_END);
  if (bytes == 0 && ftruncate(g_page_file, sizeof(GroupPage)) == 0) bytes = sizeof(GroupPage);
  void* memory = MAP_FAILED;
  // A shorter file would end the process at the first touch.
  if (bytes == static_cast<off_t>(sizeof(GroupPage)))
    memory = mmap(nullptr, sizeof(GroupPage), PROT_READ | PROT_WRITE, MAP_SHARED, g_page_file, 0);
  auto* page = memory != MAP_FAILED ? static_cast<GroupPage*>(memory) : nullptr;
  if (page != nullptr && load(page->magic) == 0) {
    page->version = kPageVersion;
    page->limits = limits;
    store(page->magic, kPageMagic);
  }
  flock(g_page_file, LOCK_UN);
  if (page != nullptr && page->magic == kPageMagic && page->version == kPageVersion) return page;
  if (page != nullptr) munmap(memory, sizeof(GroupPage));
  close(g_page_file);
  g_page_file = -1;
  return nullptr;
}

uint32_t g_setup_lock;

void empty_private_page(const Limits& limits) {
  g_private_page.magic = kPageMagic;
  g_private_page.version = kPageVersion;
  g_private_page.limits = limits;
  std::memset(g_private_page.slots, 0, g_private_page.slots_used * sizeof(Slot));
  g_private_page.slots_used = 0;
}

void set_up() {
  const LockedByProcess lock(g_setup_lock);
  const bool child = g_page != nullptr && g_mark != nullptr && load(*g_mark) == 0;
  if (g_page == nullptr || child) {
    if (child) {
      // A context does not survive fork: nothing that the parent holds is this process's.
      forget_blocks_in_child();
      forget_pools_in_child();
      forget_graphs_in_child();
      forget_ranges_in_child();
      forget_small_in_child();
      forget_nvml_in_child();
      forget_primaries_in_child();
      // Places of devices stay as they are known.
    }
    GroupPage* page = nullptr;
    const Settings& settings = load_settings();
    const bool unreadable = settings.fails_closed && settings.broken;
    if (settings.group[0] != 0 && !unreadable) {
      bool opened = false;
      page = map_group(settings.group, settings.limits, &opened);
      if (page == nullptr)
        log_line("the group's page %s %s: %s", settings.group,
                 opened ? "is not one of this version of gpushare" : "is not there or may not be opened",
                 settings.fails_closed ? "no memory is given" : "this process counts alone");
    }
    if (page == nullptr) {
      const bool refused = unreadable || (settings.fails_closed && settings.group[0] != 0);
      empty_private_page(refused ? Limits{0, 0, 0} : settings.limits);
      page = &g_private_page;
    }
    Slot* slot = take_slot(*page);
    if (slot == nullptr) {
      const bool limited = load(page->limits.device_bytes) != kNoLimit;
      log_line("the group has %d processes, and its page has no place for another: process %d %s", kSlots,
               static_cast<int>(getpid()),
               limited ? "gets no memory. End some, or start another group" : "is not counted");
      empty_private_page(limited ? Limits{0, 0, 0} : load_settings().limits);
      page = &g_private_page;
      slot = take_slot(*page);
    }
    if (g_mark == nullptr) {
      void* memory = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      // Before Linux 4.14 a child of fork would keep its parent's books.
      if (memory != MAP_FAILED && madvise(memory, 4096, MADV_WIPEONFORK) == 0)
        g_mark = static_cast<uint32_t*>(memory);
    }
    g_slot = slot;
    store(g_page, page);
    // Last: a thread that sees it finds the page and the slot of this process.
    if (g_mark != nullptr) store(*g_mark, 1);
  }
}

}  // namespace

GroupPage& set_up_group() {
  set_up();
  return *g_page;
}

void report_to_group() {
  // A program with more rights than its starter takes nothing from the environment. It looks for the page among its parents'
  // files, as it does later for its settings.
  const char* const path =
      getauxval(AT_SECURE) != 0 ? setting("GPUSHARE_SHIM_GROUP") : secure_getenv("GPUSHARE_SHIM_GROUP");
  const int file = path != nullptr && *path != 0 ? open_page(path) : -1;
  if (file < 0) return;
  if (lseek(file, 0, SEEK_END) == 0) {
    flock(file, LOCK_EX);  // map_group() makes a page of the empty file later
    if (lseek(file, 0, SEEK_END) == 0 && ftruncate(file, sizeof(GroupPage)) != 0)
      log_line("the group's page %s cannot be made: %s", path, std::strerror(errno));
    flock(file, LOCK_UN);
  }
  void* memory = MAP_FAILED;
  if (lseek(file, 0, SEEK_END) == static_cast<off_t>(sizeof(GroupPage)))
    memory = mmap(nullptr, offsetof(GroupPage, share), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory != MAP_FAILED) {
    auto* const page = static_cast<GroupPage*>(memory);
    if (page->magic == 0 || (page->magic == kPageMagic && page->version == kPageVersion))
      __atomic_add_fetch(&page->reports, 1U, __ATOMIC_ACQ_REL);
    munmap(memory, offsetof(GroupPage, share));
  }
  close(file);
}

bool leave_group() {
  set_up();
  const LockedByProcess lock(g_setup_lock);
  Slot& slot = *g_slot;
  uint64_t held = load(slot.pinned);
  for (int device = 0; device < kDevices; ++device)
    held |= load(slot.counted[device]) | load(slot.overhead[device]) | load(slot.spilled[device]);
  if (held == 0) {
    if (g_page == &g_private_page) {
      g_private_page.limits = {kNoLimit, 0, kNoLimit};
    } else {
      empty_private_page({kNoLimit, 0, kNoLimit});
      g_slot = take_slot(g_private_page);
      store(slot.identity, 0);
      store(g_page, &g_private_page);
      close(g_page_file);  // and with it the lock of the slot
      g_page_file = -1;
    }
  }
  return held == 0;
}

int page_file() {
  return &group() == &g_private_page ? -1 : g_page_file;
}

bool is_of_group(uint32_t process) {
  const GroupPage& page = group();
  const uint32_t used = load(page.slots_used);
  const uint64_t space = own_space();  // numbers of other containers' processes mean nothing here
  for (uint32_t i = 0; i < used && i < kSlots; ++i)
    if (const uint64_t identity = load(page.slots[i].identity); identity != UINT64_MAX &&
                                                                identity >> 40 == process && process != 0 &&
                                                                load(page.slots[i].space) == space)
      return true;
  return false;
}

uint32_t pci_number(const char* pci_address) {
  // Domain, bus and device in base 16; the number of leading zeros differs between libraries.
  uint32_t parts[3] = {};
  int part = 0;
  for (const char* at = pci_address; *at != 0 && *at != '.' && part < 3; ++at) {
    const char c = *at | 0x20;
    if (*at >= '0' && *at <= '9')
      parts[part] = parts[part] << 4 | static_cast<uint32_t>(*at - '0');
    else if (c >= 'a' && c <= 'f')
      parts[part] = parts[part] << 4 | static_cast<uint32_t>(c - 'a' + 10);
    else
      ++part;
  }
  return parts[0] << 16 | parts[1] << 8 | parts[2] << 3;
}

int place_of_device(const char* pci_address) {
  const uint64_t number = device_word(pci_number(pci_address));
  GroupPage& page = group();
  for (int place = 0; place < kDevices; ++place) {
    uint64_t there = load(page.devices[place]);
    if (there == number) return place;
    if (there == 0 && (__atomic_compare_exchange_n(&page.devices[place], &there, number, false,
                                                   __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE) ||
                       there == number))
      return place;
  }
  return -1;
}

namespace {
// The only code of the library that runs before the program asks for something: about ten system calls in a program of a
// group, and a look at the environment in any other.
__attribute__((constructor)) void at_load() {
  const int before = errno;
  report_to_group();
  errno = before;
}
}  // namespace

}  // namespace gpushare::shim
