// SPDX-License-Identifier: Apache-2.0
#include "shim/books.hpp"

#include <fcntl.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>

#include "shim/driver.hpp"
#include "shim/ranges.hpp"
#include "shim/settings.hpp"

namespace gpushare::shim {

GroupPage* g_page = nullptr;
// A page that the kernel empties in a child of fork: its first word tells whether this process has been here.
uint32_t* g_mark = nullptr;

namespace {

template <class T>
T load(const T& value) {
  return __atomic_load_n(&value, __ATOMIC_ACQUIRE);
}
template <class T>
void store(T& value, T to) {
  __atomic_store_n(&value, to, __ATOMIC_RELEASE);
}

// Of blocks of pools, by device: bytes now, and at most since it was last known what the pools keep.
struct Pooled {
  uint64_t live, most;
  bool any;
};
Pooled g_pooled[kDevices];

GroupPage g_private_page;
Slot* g_slot = nullptr;
int g_page_file = -1;  // of the group's page, open for as long as this process holds the lock of its slot

// ---- live blocks --------------------------------------------------------------------------------------------------------------------

uint64_t mix(Kind kind, uint64_t key) {
  uint64_t x = key ^ (static_cast<uint64_t>(kind) << 56);
  // The 64-bit finalizer of MurmurHash3 (Appleby, public domain): addresses share their low bits, and weaker mixing made probes three times as long.
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  x ^= x >> 33;
  return x;
}

// A block of memory in 16 bytes instead of 48: programs have 100,000 of these, and what a free takes is the time of one cache line.
struct Compact {
  uint64_t key;  // 0: empty
  uint64_t units : 38, context : 16, device : 8, of_host : 1, pooled : 1;
};
static_assert(sizeof(Compact) == 16);
constexpr uint64_t kUnit = 512;

// Functions of either type of entry.
bool is_empty(const Block& block) {
  return block.kind == Kind::none;
}
bool is_empty(const Compact& block) {
  return block.key == 0;
}
void make_empty(Block* block) {
  block->kind = Kind::none;
}
void make_empty(Compact* block) {
  block->key = 0;
}
Kind kind_of(const Block& block) {
  return block.kind;
}
Kind kind_of(const Compact& block) {
  return block.of_host != 0 ? Kind::host : Kind::memory;
}

// Open addressing with linear probing; removal moves later entries back, so that no tombstones gather. The newest entry waits beside the lock
// until the next one comes: what a program frees soon never touches the table, which with 100,000 entries is outside the caches.
template <class Entry>
struct alignas(64) Shard {
  uint32_t lock;
  uint64_t live;      // entries of the table
  uint64_t capacity;  // a power of two; 0: no memory yet
  Entry* entries;
  Entry newest;
};
constexpr int kShards = 16;
Shard<Block> g_blocks[kShards];
Shard<Compact> g_memory[kShards];

template <class Entry>
class ShardLock {
 public:
  explicit ShardLock(Shard<Entry>& shard) : shard_(shard) {
    for (int spins = 0; __atomic_exchange_n(&shard_.lock, 1U, __ATOMIC_ACQUIRE) != 0; ++spins)
      if (spins % 64 == 63) sched_yield();
  }
  ~ShardLock() { __atomic_store_n(&shard_.lock, 0U, __ATOMIC_RELEASE); }
  ShardLock(const ShardLock&) = delete;
  ShardLock& operator=(const ShardLock&) = delete;

 private:
  Shard<Entry>& shard_;
};

// `hash` is mix() of the entry's kind and key.
template <class Entry>
uint64_t home_of(const Shard<Entry>& shard, uint64_t hash) {
  return hash / kShards & (shard.capacity - 1);
}

template <class Entry>
uint64_t find(const Shard<Entry>& shard, Kind kind, uint64_t key, uint64_t hash) {
  if (shard.live == 0) return UINT64_MAX;
  for (uint64_t at = home_of(shard, hash);; at = (at + 1) & (shard.capacity - 1)) {
    const Entry& entry = shard.entries[at];
    if (is_empty(entry)) return UINT64_MAX;
    if (entry.key == key && kind_of(entry) == kind) return at;
  }
}

template <class Entry>
void put(Shard<Entry>& shard, const Entry& entry, uint64_t hash) {
  uint64_t at = home_of(shard, hash);
  while (!is_empty(shard.entries[at])) at = (at + 1) & (shard.capacity - 1);
  shard.entries[at] = entry;
}

// No memory for the table: the block is not remembered, its bytes stay charged until the process ends. True: there is room for one more.
template <class Entry>
__attribute__((noinline)) bool grow(Shard<Entry>& shard) {
  const uint64_t capacity = shard.capacity == 0 ? 128 : shard.capacity * 2;
  void* memory =
      mmap(nullptr, capacity * sizeof(Entry), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return shard.live + 1 < shard.capacity;
  const Shard<Entry> old = shard;
  shard.entries = static_cast<Entry*>(memory);
  shard.capacity = capacity;
  for (uint64_t i = 0; i < old.capacity; ++i)
    if (!is_empty(old.entries[i]))
      put(shard, old.entries[i], mix(kind_of(old.entries[i]), old.entries[i].key));
  if (old.entries != nullptr) munmap(old.entries, old.capacity * sizeof(Entry));
  return true;
}

template <class Entry>
void erase(Shard<Entry>& shard, uint64_t at) {
  const uint64_t mask = shard.capacity - 1;
  --shard.live;
  for (uint64_t next = (at + 1) & mask;; next = (next + 1) & mask) {
    const Entry& entry = shard.entries[next];
    if (is_empty(entry)) break;
    const uint64_t home = home_of(shard, mix(kind_of(entry), entry.key));
    if (((next - home) & mask) < ((next - at) & mask)) continue;  // it may not move before its home
    shard.entries[at] = entry;
    at = next;
  }
  make_empty(&shard.entries[at]);
}

template <class Entry>
void insert_into(Shard<Entry> (&shards)[kShards], const Entry& entry) {
  Shard<Entry>& shard = shards[mix(kind_of(entry), entry.key) % kShards];
  const ShardLock<Entry> lock(shard);
  const Entry older = shard.newest;
  shard.newest = entry;
  if (is_empty(older)) return;
  if (__builtin_expect(shard.live * 2 >= shard.capacity, 0) && !grow(shard)) return;
  put(shard, older, mix(kind_of(older), older.key));
  ++shard.live;
}

// Calls `body` with the entry, under the lock of its shard, and removes it if that returns true. False: the entry is not known.
template <class Entry, class Body>
bool at_entry(Shard<Entry> (&shards)[kShards], Kind kind, uint64_t key, Body&& body) {
  const uint64_t hash = mix(kind, key);
  Shard<Entry>& shard = shards[hash % kShards];
  const ShardLock<Entry> lock(shard);
  if (shard.newest.key == key && kind_of(shard.newest) == kind && !is_empty(shard.newest)) {
    if (body(shard.newest)) make_empty(&shard.newest);
    return true;
  }
  const uint64_t at = find(shard, kind, key, hash);
  if (at == UINT64_MAX) return false;
  if (body(shard.entries[at])) erase(shard, at);
  return true;
}

template <class Entry>
void forget_all(Shard<Entry> (&shards)[kShards]) {
  for (Shard<Entry>& shard : shards) {
    if (shard.entries != nullptr) munmap(shard.entries, shard.capacity * sizeof(Entry));
    shard = Shard<Entry>{};
  }
}

// Contexts by a small number, for compact blocks; 0: none. A program has few at a time.
constexpr int kContexts = 64;
uint64_t g_contexts[kContexts];

// -1: not known and not added, or more contexts than there is place for; their blocks are not compact.
int number_of_context(uint64_t context, bool add) {
  if (context == 0) return 0;
  for (int i = 1; i < kContexts; ++i)
    if (load(g_contexts[i]) == context) return i;
  for (int i = 1; add && i < kContexts; ++i) {
    uint64_t free = 0;
    if (__atomic_compare_exchange_n(&g_contexts[i], &free, context, false, __ATOMIC_ACQ_REL,
                                    __ATOMIC_ACQUIRE) ||
        free == context)
      return i;
  }
  return -1;
}

// ---- processes ----------------------------------------------------------------------------------------------------------------------

// Number and start time of a process; 0: there is none.
uint64_t identity_of(int process) {
  char path[40], text[512];
  std::snprintf(path, sizeof path, "/proc/%d/stat", process);
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  const ssize_t length = read(file, text, sizeof text - 1);
  close(file);
  if (length <= 0) return 0;
  text[length] = 0;
  // The name of the program is in parentheses and may hold any character; the start time is the 20th word after them.
  const char* at = std::strrchr(text, ')');
  if (at == nullptr || at[1] == 0) return 0;
  if (at[2] == 'Z' || at[2] == 'X') return 0;  // ended, not waited for
  for (int word = 0; word < 20 && at != nullptr; ++word) at = std::strchr(at + 1, ' ');
  if (at == nullptr) return 0;
  uint64_t started = 0;
  for (++at; *at >= '0' && *at <= '9'; ++at) started = started * 10 + static_cast<uint64_t>(*at - '0');
  return static_cast<uint64_t>(process) << 40 | (started & ((uint64_t{1} << 40) - 1));
}

// The namespace of process numbers, the same for all processes of a container.
uint64_t own_space() {
  char text[64];
  const ssize_t length = readlink("/proc/self/ns/pid", text, sizeof text);  // pid:[4026531836]
  uint64_t number = 0;
  for (ssize_t i = 0; i < length; ++i)
    if (text[i] >= '0' && text[i] <= '9') number = number * 10 + static_cast<uint64_t>(text[i] - '0');
  return number;
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
  if (load(slot.space) == space) return identity_of(static_cast<int>(identity >> 40)) == identity;
  struct flock lock = lock_of(number, F_WRLCK);
  return g_page_file < 0 || fcntl(g_page_file, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

// Gives back the slots of processes that have ended.
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
    for (int device = 0; device < kDevices; ++device) {
      store(slot.counted[device], uint64_t{0});
      store(slot.overhead[device], uint64_t{0});
      store(slot.spilled[device], uint64_t{0});
    }
    store(slot.pinned, uint64_t{0});
    store(slot.identity, uint64_t{0});
  }
}

Slot* take_slot(GroupPage& page) {
  const uint64_t own = identity_of(getpid());
  for (int attempt = 0; attempt < 2; ++attempt) {
    for (uint32_t i = 0; i < kSlots; ++i) {
      uint64_t free = 0;
      if (!__atomic_compare_exchange_n(&page.slots[i].identity, &free, UINT64_MAX, false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_RELAXED))
        continue;
      store(page.slots[i].space, own_space());
      if (struct flock lock = lock_of(i, F_WRLCK); &page != &g_private_page && g_page_file >= 0)
        fcntl(g_page_file, F_SETLK, &lock);
      store(page.slots[i].identity, own);
      for (uint32_t used = load(page.slots_used); used < i + 1;)
        if (__atomic_compare_exchange_n(&page.slots_used, &used, i + 1, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_ACQUIRE))
          break;
      return &page.slots[i];
    }
    reap(page);
  }
  return nullptr;
}

// The page in that file; null: there is none, or it cannot be used. An empty file becomes a page with `limits`.
GroupPage* map_group(const char* path, const Limits& limits) {
  if (g_page_file >= 0) close(g_page_file);  // the parent's of this child of fork
  g_page_file = open(path, O_RDWR | O_CLOEXEC);
  if (g_page_file < 0) return nullptr;
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

void set_up() {
  // The lock is the number of the process that holds it: a child of fork does not wait for a thread that it has not got.
  const auto own = static_cast<uint32_t>(getpid());
  for (;;) {
    uint32_t holder = load(g_setup_lock);
    if (holder != own &&
        __atomic_compare_exchange_n(&g_setup_lock, &holder, own, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
      break;
    sched_yield();
  }
  const bool child = g_page != nullptr && g_mark != nullptr && *g_mark == 0;
  if (g_page == nullptr || child) {
    if (child) {
      // A context does not survive fork: nothing that the parent holds is this process's.
      forget_all(g_blocks);
      forget_all(g_memory);
      std::memset(g_contexts, 0, sizeof g_contexts);
      std::memset(g_pooled, 0, sizeof g_pooled);
      forget_ranges_in_child();
      // Places of devices stay as they are known.
      std::memset(g_private_page.slots, 0, sizeof g_private_page.slots);
      g_private_page.slots_used = 0;
    }
    GroupPage* page = nullptr;
    const Settings& settings = load_settings();
    if (settings.group[0] != 0) {
      page = map_group(settings.group, settings.limits);
      if (page == nullptr)
        log_line("%s is not a page of this version of gpushare: %s", settings.group,
                 settings.fails_closed ? "no memory is given" : "this process counts alone");
    }
    if (page == nullptr) {
      page = &g_private_page;
      page->magic = kPageMagic;
      page->version = kPageVersion;
      page->limits = settings.limits;
      if (settings.fails_closed && (settings.broken || settings.group[0] != 0)) page->limits = {0, 0, 0};
    }
    Slot* slot = take_slot(*page);
    if (slot == nullptr) {
      log_line("more than %d processes hold memory in this group: process %d counts alone", kSlots,
               static_cast<int>(getpid()));
      g_private_page.limits = page->limits;
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
    __atomic_store_n(&g_page, page, __ATOMIC_RELEASE);
    if (g_mark != nullptr) *g_mark = 1;
  }
  __atomic_store_n(&g_setup_lock, 0U, __ATOMIC_RELEASE);
}

// A number of the slots summed up over the group.
template <class Number>
uint64_t sum(const GroupPage& page, Number number) {
  const uint32_t used = load(page.slots_used);
  uint64_t bytes = number(page.slots[0]);
  for (uint32_t i = 1; i < used && i < kSlots; ++i) bytes += number(page.slots[i]);
  return bytes;
}
// What a group has of a device, of host memory that stands for it, and of pinned host memory.
struct OnDevice {
  int device;
  uint64_t operator()(const Slot& slot) const {
    return load(slot.counted[device]) + load(slot.overhead[device]);
  }
};
struct Spilled {
  int device;
  uint64_t operator()(const Slot& slot) const { return load(slot.spilled[device]); }
};
struct Pinned {
  uint64_t operator()(const Slot& slot) const { return load(slot.pinned); }
};

// Adds to a number of this process's slot if the group's sum stays within the limit. Two processes may both be refused where one of them would
// have fitted; never are both let through.
template <class Number, class Limit>
bool add(uint64_t& number, const Number& summed, const Limit& limit_of, uint64_t bytes) {
  GroupPage& page = group();
  for (int attempt = 0; attempt < 2; ++attempt) {
    uint64_t before = load(number);
    for (;;) {
      const uint64_t limit = limit_of(page.limits), held = sum(page, summed);
      if (bytes > limit || held > limit - bytes) break;
      if (!__atomic_compare_exchange_n(&number, &before, before + bytes, false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_ACQUIRE))
        continue;
      if (load(page.slots_used) == 1 || sum(page, summed) <= limit) return true;
      __atomic_sub_fetch(&number, bytes, __ATOMIC_ACQ_REL);
      break;
    }
    if (load(page.slots_used) > 1) reap(page);  // before it is refused: who of the others is still alive
  }
  return false;
}

uint64_t device_limit(const Limits& limits) {
  return load(limits.device_bytes);
}
uint64_t spill_limit(const Limits& limits) {
  return load(limits.spill_bytes);
}
uint64_t pinned_limit(const Limits& limits) {
  return load(limits.pinned_bytes);
}

}  // namespace

GroupPage& set_up_group() {
  set_up();
  return *g_page;
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

int place_of_device(const char* pci_address) {
  // Domain, bus and device in base 16; the number of leading zeros differs between libraries.
  uint64_t number = 0, part = 0;
  for (const char* at = pci_address;; ++at) {
    const char c = *at | 0x20;
    if (*at >= '0' && *at <= '9') {
      part = part << 4 | static_cast<uint64_t>(*at - '0');
    } else if (c >= 'a' && c <= 'f') {
      part = part << 4 | static_cast<uint64_t>(c - 'a' + 10);
    } else {
      number = number << 8 | part;
      part = 0;
      if (*at == 0 || *at == '.') break;
    }
  }
  number |= uint64_t{1} << 63;
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

bool charge(int device, uint64_t bytes) {
  GroupPage& page = group();
  if (!is_counted(device)) return device != kUncounted || device_limit(page.limits) == kNoLimit;
  if (device_limit(page.limits) == kNoLimit) {
    __atomic_add_fetch(&g_slot->counted[device], bytes, __ATOMIC_RELAXED);
    return true;
  }
  return add(g_slot->counted[device], OnDevice{device}, device_limit, bytes);
}

void discharge(int device, uint64_t bytes) {
  group();
  if (is_counted(device)) __atomic_sub_fetch(&g_slot->counted[device], bytes, __ATOMIC_ACQ_REL);
}

bool note_overhead(int device, uint64_t bytes) {
  group();
  if (!is_counted(device)) return true;
  uint64_t& number = g_slot->overhead[device];
  const uint64_t before = load(number);
  if (bytes <= before) {
    store(number, bytes);
    return true;
  }
  return add(number, OnDevice{device}, device_limit, bytes - before);
}

bool charge_host(int device, uint64_t bytes) {
  group();
  if (!add(g_slot->pinned, Pinned{}, pinned_limit, bytes)) return false;
  if (!is_counted(device) || add(g_slot->spilled[device], Spilled{device}, spill_limit, bytes)) return true;
  __atomic_sub_fetch(&g_slot->pinned, bytes, __ATOMIC_ACQ_REL);
  return false;
}

void discharge_host(int device, uint64_t bytes) {
  group();
  if (is_counted(device)) __atomic_sub_fetch(&g_slot->spilled[device], bytes, __ATOMIC_ACQ_REL);
  __atomic_sub_fetch(&g_slot->pinned, bytes, __ATOMIC_ACQ_REL);
}

bool has_pools(int device) {
  return is_counted(device) && load(g_pooled[device].any);
}

void add_pooled(int device, uint64_t bytes) {
  if (!is_counted(device)) return;
  Pooled& pooled = g_pooled[device];
  store(pooled.any, true);
  const uint64_t live = __atomic_add_fetch(&pooled.live, bytes, __ATOMIC_ACQ_REL);
  for (uint64_t most = load(pooled.most); most < live;)
    if (__atomic_compare_exchange_n(&pooled.most, &most, live, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
      break;
}

uint64_t kept_by_pools(int device) {
  if (!has_pools(device)) return 0;
  const uint64_t live = load(g_pooled[device].live), most = load(g_pooled[device].most);
  return most > live ? most - live : 0;
}

void note_kept(int device, uint64_t bytes) {
  if (has_pools(device)) store(g_pooled[device].most, load(g_pooled[device].live) + bytes);
}

void discharge(const Block& block) {
  if (block.pooled && is_counted(block.device))
    __atomic_sub_fetch(&g_pooled[block.device].live, block.bytes, __ATOMIC_ACQ_REL);
  if (block.kind == Kind::host)
    discharge_host(block.device, block.bytes);
  else
    discharge(block.device, block.bytes);
}

namespace {

// Others of the group may have been killed. Their slots are looked at now and then, for that reads files.
__attribute__((noinline)) void look_around(GroupPage& page) {
  static uint64_t looked_ns = 0;
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  const uint64_t now_ns =
      static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
  if (now_ns - __atomic_load_n(&looked_ns, __ATOMIC_RELAXED) <= 50'000'000) return;
  __atomic_store_n(&looked_ns, now_ns, __ATOMIC_RELAXED);
  reap(page);
}

uint64_t held(GroupPage& page, int device) {
  if (__builtin_expect(load(page.slots_used) > 1, 0)) look_around(page);
  return is_counted(device) ? sum(page, OnDevice{device}) : 0;
}

}  // namespace

uint64_t held_bytes(int device) {
  return held(group(), device);
}

Told tell(int device, uint64_t total, uint64_t free) {
  GroupPage& page = group();
  const uint64_t limit = device_limit(page.limits), used = held(page, device);
  Told told{std::min(total, limit), limit > used ? std::min(free, limit - used) : 0, used};
  const uint64_t spill = spill_limit(page.limits);
  if (__builtin_expect(spill == 0 || !is_counted(device), 1)) return told;
  // Beyond the device there is what may lie on the host, as far as the group may still pin so much.
  const uint64_t pinned = sum(page, Pinned{}), pinnable = pinned_limit(page.limits);
  const uint64_t spilled = sum(page, Spilled{device});
  told.total += spill;
  told.used += spilled;
  if (spilled < spill && pinned < pinnable) told.free += std::min(spill - spilled, pinnable - pinned);
  return told;
}

uint64_t counted_here(int device) {
  group();
  return is_counted(device) ? load(g_slot->counted[device]) : 0;
}

namespace {

Block expand(const Compact& from) {
  Block block{};
  block.key = from.key;
  block.bytes = from.units * kUnit;
  block.context = g_contexts[from.context];
  block.references = 1;
  block.kind = kind_of(from);
  block.device = static_cast<int8_t>(static_cast<int>(from.device) - 1);
  block.pooled = from.pooled != 0;
  return block;
}

bool shrink(const Block& block, Compact* out) {
  if ((block.kind != Kind::memory && block.kind != Kind::host) || block.key == 0 ||
      block.bytes % kUnit != 0 || block.bytes / kUnit >= uint64_t{1} << 38)
    return false;
  const int context = number_of_context(block.context, true);
  if (context < 0) return false;
  out->key = block.key;
  out->units = block.bytes / kUnit & ((uint64_t{1} << 38) - 1);
  out->context = static_cast<uint64_t>(context) & 0xffff;
  out->device = static_cast<uint8_t>(block.device + 1);
  out->pooled = block.pooled ? 1 : 0;
  out->of_host = block.kind == Kind::host ? 1 : 0;
  return true;
}

}  // namespace

void insert(const Block& block) {
  Compact compact{};
  if (shrink(block, &compact))
    insert_into(g_memory, compact);
  else
    insert_into(g_blocks, block);
}

bool take(Kind kind, uint64_t key, Block* out_block) {
  group();
  if ((kind == Kind::memory || kind == Kind::host) &&
      at_entry(g_memory, kind, key, [&](const Compact& compact) {
        *out_block = expand(compact);
        return true;
      }))
    return true;
  return at_entry(g_blocks, kind, key, [&](const Block& block) {
    *out_block = block;
    return true;
  });
}

bool look(Kind kind, uint64_t key, Block* out_block) {
  group();
  return at_entry(g_blocks, kind, key, [&](const Block& block) {
    *out_block = block;
    return false;
  });
}

int64_t refer(Kind kind, uint64_t key, int change, Block* out_block) {
  group();
  int64_t left = -1;
  at_entry(g_blocks, kind, key, [&](Block& block) {
    block.references += static_cast<uint32_t>(change);
    left = block.references;
    *out_block = block;
    return left == 0;
  });
  return left;
}

bool set_bytes(Kind kind, uint64_t key, uint64_t bytes) {
  bool set = false;
  at_entry(g_blocks, kind, key, [&](Block& block) {
    set = block.bytes == 0;
    if (set) block.bytes = bytes;
    return false;
  });
  return set;
}

namespace {

template <class Entry, class Belongs>
void drop_from(Shard<Entry> (&shards)[kShards], Belongs belongs) {
  for (Shard<Entry>& shard : shards) {
    const ShardLock<Entry> lock(shard);
    if (!is_empty(shard.newest) && belongs(shard.newest)) make_empty(&shard.newest);
    for (uint64_t at = 0; at < shard.capacity;) {
      if (is_empty(shard.entries[at]) || !belongs(shard.entries[at]))
        ++at;
      else
        erase(shard, at);  // moves another to this place
    }
  }
}

}  // namespace

int pools_of(int device, uint64_t* out_pools, int room) {
  int count = 0;
  const auto note = [&](const Block& block) {
    if (block.kind == Kind::pool && block.device == device && count < room) out_pools[count++] = block.key;
  };
  for (Shard<Block>& shard : g_blocks) {
    const ShardLock<Block> lock(shard);
    note(shard.newest);
    for (uint64_t at = 0; at < shard.capacity; ++at) note(shard.entries[at]);
  }
  return count;
}

void drop_context(uint64_t context) {
  group();
  if (context == 0) return;
  drop_from(g_blocks, [context](const Block& block) {
    if (block.context != context) return false;
    discharge(block);
    return true;
  });
  const int number = number_of_context(context, false);
  if (number < 0) return;
  drop_from(g_memory, [number](const Compact& compact) {
    if (compact.context != static_cast<uint64_t>(number)) return false;
    discharge(expand(compact));
    return true;
  });
  __atomic_store_n(&g_contexts[number], uint64_t{0}, __ATOMIC_RELEASE);
}

}  // namespace gpushare::shim
