// SPDX-License-Identifier: Apache-2.0
#include "shim/books.hpp"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>

#include "shim/driver.hpp"
#include "shim/settings.hpp"

namespace gpushare::shim {
namespace {

template <class T>
T load(const T& value) {
  return __atomic_load_n(&value, __ATOMIC_ACQUIRE);
}
template <class T>
void store(T& value, T to) {
  __atomic_store_n(&value, to, __ATOMIC_RELEASE);
}

GroupPage g_private_page;
GroupPage* g_page = nullptr;
Slot* g_slot = nullptr;
// A page that the kernel empties in a child of fork: its first word tells whether this process has been here.
uint32_t* g_mark = nullptr;

// ---- live blocks --------------------------------------------------------------------------------------------------------------------

// Open addressing with linear probing; removal moves later entries back, so that no tombstones gather.
struct Shard {
  uint32_t lock;
  uint64_t live;
  uint64_t capacity;  // a power of two; 0: no memory yet
  Block* blocks;
  char padding[32];
};
constexpr int kShards = 16;
Shard g_shards[kShards];

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

class ShardLock {
 public:
  explicit ShardLock(Shard& shard) : shard_(shard) {
    for (int spins = 0; __atomic_exchange_n(&shard_.lock, 1U, __ATOMIC_ACQUIRE) != 0; ++spins)
      if (spins % 64 == 63) sched_yield();
  }
  ~ShardLock() { __atomic_store_n(&shard_.lock, 0U, __ATOMIC_RELEASE); }
  ShardLock(const ShardLock&) = delete;
  ShardLock& operator=(const ShardLock&) = delete;

 private:
  Shard& shard_;
};

uint64_t find(const Shard& shard, Kind kind, uint64_t key) {
  const uint64_t mask = shard.capacity - 1;
  for (uint64_t at = mix(kind, key) / kShards & mask;; at = (at + 1) & mask) {
    const Block& block = shard.blocks[at];
    if (block.kind == Kind::none) return UINT64_MAX;
    if (block.key == key && block.kind == kind) return at;
  }
}

void put(Shard& shard, const Block& block) {
  const uint64_t mask = shard.capacity - 1;
  uint64_t at = mix(block.kind, block.key) / kShards & mask;
  while (shard.blocks[at].kind != Kind::none) at = (at + 1) & mask;
  shard.blocks[at] = block;
}

// No memory for the table: the block is not remembered, its bytes stay charged until the process ends. True: there is room for one more.
bool make_room(Shard& shard) {
  if (shard.live * 2 < shard.capacity) return true;
  const uint64_t capacity = shard.capacity == 0 ? 128 : shard.capacity * 2;
  void* memory =
      mmap(nullptr, capacity * sizeof(Block), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return shard.live + 1 < shard.capacity;
  const Shard old = shard;
  shard.blocks = static_cast<Block*>(memory);
  shard.capacity = capacity;
  for (uint64_t i = 0; i < old.capacity; ++i)
    if (old.blocks[i].kind != Kind::none) put(shard, old.blocks[i]);
  if (old.blocks != nullptr) munmap(old.blocks, old.capacity * sizeof(Block));
  return true;
}

void erase(Shard& shard, uint64_t at) {
  const uint64_t mask = shard.capacity - 1;
  --shard.live;
  for (uint64_t next = (at + 1) & mask;; next = (next + 1) & mask) {
    const Block& block = shard.blocks[next];
    if (block.kind == Kind::none) break;
    const uint64_t home = mix(block.kind, block.key) / kShards & mask;
    if (((next - home) & mask) < ((next - at) & mask)) continue;  // it may not move before its home
    shard.blocks[at] = block;
    at = next;
  }
  shard.blocks[at].kind = Kind::none;
}

Shard& shard_of(Kind kind, uint64_t key) {
  return g_shards[mix(kind, key) % kShards];
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

// Gives back the slots of processes that have ended.
void reap(GroupPage& page) {
  const uint32_t used = load(page.slots_used);
  for (uint32_t i = 0; i < used && i < kSlots; ++i) {
    Slot& slot = page.slots[i];
    uint64_t identity = load(slot.identity);
    if (identity == 0 || identity == UINT64_MAX || identity_of(static_cast<int>(identity >> 40)) == identity)
      continue;
    // UINT64_MAX: being emptied. A reaper that is killed here leaves an empty slot unused, nothing more.
    if (!__atomic_compare_exchange_n(&slot.identity, &identity, UINT64_MAX, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_RELAXED))
      continue;
    for (int device = 0; device < kDevices; ++device) {
      store(slot.counted[device], uint64_t{0});
      store(slot.overhead[device], uint64_t{0});
    }
    store(slot.identity, uint64_t{0});
  }
}

Slot* take_slot(GroupPage& page) {
  const uint64_t own = identity_of(getpid());
  for (int attempt = 0; attempt < 2; ++attempt) {
    for (uint32_t i = 0; i < kSlots; ++i) {
      uint64_t free = 0;
      if (!__atomic_compare_exchange_n(&page.slots[i].identity, &free, own, false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_RELAXED))
        continue;
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

// The page of `gpushare exec`; null: there is none, or it cannot be used.
GroupPage* map_group(const char* path) {
  const int file = open(path, O_RDWR | O_CLOEXEC);
  void* memory = MAP_FAILED;
  if (file >= 0) {
    // A shorter file would end the process at the first touch.
    if (lseek(file, 0, SEEK_END) == static_cast<off_t>(sizeof(GroupPage)))
      memory = mmap(nullptr, sizeof(GroupPage), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
  }
  if (memory == MAP_FAILED) return nullptr;
  auto* page = static_cast<GroupPage*>(memory);
  if (page->magic == kPageMagic && page->version == kPageVersion) return page;
  munmap(memory, sizeof(GroupPage));
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
      for (Shard& shard : g_shards) {
        if (shard.blocks != nullptr) munmap(shard.blocks, shard.capacity * sizeof(Block));
        shard = Shard{};
      }
      // Places of devices stay as they are known.
      std::memset(g_private_page.slots, 0, sizeof g_private_page.slots);
      g_private_page.slots_used = 0;
    }
    GroupPage* page = nullptr;
    const Settings& settings = load_settings();
    if (settings.group[0] != 0) {
      page = map_group(settings.group);
      if (page == nullptr)
        log_line("%s is not a page of this version of gpushare: %s", settings.group,
                 settings.fails_closed ? "no memory is given" : "this process counts alone");
    }
    if (page == nullptr) {
      page = &g_private_page;
      page->magic = kPageMagic;
      page->version = kPageVersion;
      page->limit_bytes = settings.broken && settings.fails_closed ? 0 : settings.memory_bytes;
      if (settings.group[0] != 0 && settings.fails_closed) page->limit_bytes = 0;
    }
    Slot* slot = take_slot(*page);
    if (slot == nullptr) {
      log_line("more than %d processes hold memory in this group: process %d counts alone", kSlots,
               static_cast<int>(getpid()));
      g_private_page.limit_bytes = page->limit_bytes;
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

uint64_t sum(const GroupPage& page, int device) {
  uint64_t bytes = 0;
  const uint32_t used = load(page.slots_used);
  for (uint32_t i = 0; i < used && i < kSlots; ++i)
    bytes += load(page.slots[i].counted[device]) + load(page.slots[i].overhead[device]);
  return bytes;
}

bool inside(int device) {
  return device >= 0 && device < kDevices;
}

// Adds to a number of this process's slot if the group stays within its limit. Two processes may both be refused where one of them would have
// fitted; never are both let through.
bool add(uint64_t& number, int device, uint64_t bytes) {
  GroupPage& page = group();
  for (int attempt = 0; attempt < 2; ++attempt) {
    uint64_t before = load(number);
    for (;;) {
      const uint64_t limit = load(page.limit_bytes), held = sum(page, device);
      if (bytes > limit || held > limit - bytes) break;
      if (!__atomic_compare_exchange_n(&number, &before, before + bytes, false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_ACQUIRE))
        continue;
      if (load(page.slots_used) == 1 || sum(page, device) <= limit) return true;
      __atomic_sub_fetch(&number, bytes, __ATOMIC_ACQ_REL);
      break;
    }
    if (load(page.slots_used) > 1) reap(page);  // before it is refused: who of the others is still alive
  }
  return false;
}

}  // namespace

GroupPage& group() {
  GroupPage* page = __atomic_load_n(&g_page, __ATOMIC_ACQUIRE);
  if (__builtin_expect(page == nullptr || (g_mark != nullptr && *g_mark == 0), 0)) {
    set_up();
    page = g_page;
  }
  return *page;
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
  if (!inside(device)) return true;
  if (load(page.limit_bytes) == kNoLimit) {
    __atomic_add_fetch(&g_slot->counted[device], bytes, __ATOMIC_RELAXED);
    return true;
  }
  return add(g_slot->counted[device], device, bytes);
}

void discharge(int device, uint64_t bytes) {
  group();
  if (inside(device)) __atomic_sub_fetch(&g_slot->counted[device], bytes, __ATOMIC_ACQ_REL);
}

bool note_overhead(int device, uint64_t bytes) {
  group();
  if (!inside(device)) return true;
  uint64_t& number = g_slot->overhead[device];
  const uint64_t before = load(number);
  if (bytes <= before) {
    store(number, bytes);
    return true;
  }
  return add(number, device, bytes - before);
}

uint64_t held_bytes(int device) {
  GroupPage& page = group();
  if (load(page.slots_used) > 1) {
    // Others may have been killed. Their slots are looked at now and then, for that reads files.
    static uint64_t looked_ns = 0;
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    const uint64_t now_ns =
        static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
    if (now_ns - __atomic_load_n(&looked_ns, __ATOMIC_RELAXED) > 50'000'000) {
      __atomic_store_n(&looked_ns, now_ns, __ATOMIC_RELAXED);
      reap(page);
    }
  }
  return inside(device) ? sum(page, device) : 0;
}
uint64_t counted_here(int device) {
  group();
  return inside(device) ? load(g_slot->counted[device]) : 0;
}
uint64_t limit_bytes() {
  return load(group().limit_bytes);
}

namespace {

// Calls `body` with the block's place, under the lock of its shard. False: the block is not known.
template <class Body>
bool at_block(Kind kind, uint64_t key, Body&& body) {
  group();
  Shard& shard = shard_of(kind, key);
  const ShardLock lock(shard);
  if (shard.live == 0) return false;
  const uint64_t at = find(shard, kind, key);
  if (at == UINT64_MAX) return false;
  body(shard, at);
  return true;
}

}  // namespace

void insert(const Block& block) {
  Shard& shard = shard_of(block.kind, block.key);
  const ShardLock lock(shard);
  if (!make_room(shard)) return;
  put(shard, block);
  ++shard.live;
}

bool take(Kind kind, uint64_t key, Block* out_block) {
  return at_block(kind, key, [&](Shard& shard, uint64_t at) {
    *out_block = shard.blocks[at];
    erase(shard, at);
  });
}

bool look(Kind kind, uint64_t key, Block* out_block) {
  return at_block(kind, key, [&](Shard& shard, uint64_t at) { *out_block = shard.blocks[at]; });
}

int64_t refer(Kind kind, uint64_t key, int change, Block* out_block) {
  int64_t left = -1;
  at_block(kind, key, [&](Shard& shard, uint64_t at) {
    Block& block = shard.blocks[at];
    block.references += static_cast<uint32_t>(change);
    left = block.references;
    *out_block = block;
    if (left == 0) erase(shard, at);
  });
  return left;
}

bool set_bytes(Kind kind, uint64_t key, uint64_t bytes) {
  Shard& shard = shard_of(kind, key);
  const ShardLock lock(shard);
  if (shard.live == 0) return false;
  const uint64_t at = find(shard, kind, key);
  if (at == UINT64_MAX || shard.blocks[at].bytes != 0) return false;
  shard.blocks[at].bytes = bytes;
  return true;
}

void drop_context(uint64_t context) {
  group();
  if (context == 0) return;
  for (Shard& shard : g_shards) {
    const ShardLock lock(shard);
    for (uint64_t at = 0; at < shard.capacity;) {
      const Block& block = shard.blocks[at];
      if (block.kind == Kind::none || block.context != context) {
        ++at;
        continue;
      }
      discharge(block.device, block.bytes);
      erase(shard, at);  // moves another to this place
    }
  }
}

}  // namespace gpushare::shim
