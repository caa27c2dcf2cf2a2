// SPDX-License-Identifier: Apache-2.0
#include "shim/blocks.hpp"

#include <sys/mman.h>

#include <cstring>

#include "shim/books.hpp"
#include "shim/graphs.hpp"
#include "shim/group.hpp"
#include "shim/words.hpp"

namespace gpushare::shim {
namespace {

uint64_t mix(Kind kind, uint64_t key) {
  uint64_t x = key ^ (static_cast<uint64_t>(kind) << 56);
  // The 64-bit finalizer of MurmurHash3 (Appleby, public domain): addresses share their low bits, and weaker mixing
  // made probes three times as long.
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  x ^= x >> 33;
  return x;
}

// A block of memory in 16 bytes instead of 48: programs have 100,000 of these, and what a free takes is the time of one
// cache line.
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

// Open addressing with linear probing; removal moves later entries back, so that no tombstones gather. The newest entry
// waits beside the lock until the next one comes: what a program frees soon never touches the table, which with 100,000
// entries is outside the caches.
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

// Makes room for one more entry. False: there is no memory for the table; the block is then not remembered, and its bytes
// stay charged until the process ends.
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
  const Locked lock(shard.lock);
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
  const Locked lock(shard.lock);
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

int64_t raise_bytes(Kind kind, uint64_t key, uint64_t bytes) {
  int64_t before = -1;
  at_entry(g_blocks, kind, key, [&](Block& block) {
    before = static_cast<int64_t>(block.bytes);
    if (block.bytes < bytes) block.bytes = bytes;
    return false;
  });
  return before;
}

namespace {

template <class Entry, class Belongs>
void drop_from(Shard<Entry> (&shards)[kShards], Belongs belongs) {
  for (Shard<Entry>& shard : shards) {
    const Locked lock(shard.lock);
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
    const Locked lock(shard.lock);
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
    if (block.kind == Kind::graph)
      leave_graph(block.device, block.bytes);
    else
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
  store(g_contexts[number], 0);
}

void forget_blocks_in_child() {
  forget_all(g_blocks);
  forget_all(g_memory);
  std::memset(g_contexts, 0, sizeof g_contexts);
}

}  // namespace gpushare::shim
