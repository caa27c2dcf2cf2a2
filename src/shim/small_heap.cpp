// A chunk is divided into pages of 64 KiB, and a page into blocks of one size. Bits hold the state of a page's blocks
// (free, the program's, resting), so an allocation takes the first set bit of the first page of its size.
// SPDX-License-Identifier: Apache-2.0
#include "shim/small_heap.hpp"

#include <sched.h>
#include <sys/mman.h>

#include <cstring>

#include "shim/gate.hpp"
#include "shim/move.hpp"

namespace gpushare::shim {

uint32_t g_wants_small;
uint32_t g_small_chunks;

namespace {

constexpr uint64_t kChunkBytes = 2 << 20, kPageBytes = 64 << 10, kStep = 512;
constexpr int kPages = kChunkBytes / kPageBytes, kWords = kPageBytes / kStep / 64, kHeaps = 16;
constexpr uint64_t kLeastResting = 1 << 20;
// Every multiple of 512 up to 4 KiB, then four sizes for each doubling, then those that fill a page in thirds and
// halves: above 4 KiB at most a third of a block is unused.
constexpr uint16_t kSizes[] = {1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 25, 32, 42, 64};
constexpr int kClasses = sizeof kSizes / sizeof *kSizes;
struct ClassOf {
  uint8_t of[kLargestSmall / kStep + 1];
  constexpr ClassOf() : of{} {
    for (int steps = 0, cls = 0; steps <= static_cast<int>(kLargestSmall / kStep); ++steps) {
      while (kSizes[cls] < steps) ++cls;
      of[steps] = static_cast<uint8_t>(cls);
    }
  }
};
constexpr ClassOf kClassOf;

struct Bits {
  uint64_t words[kWords];
  bool none() const { return (words[0] | words[1]) == 0; }
  bool has(uint32_t at) const { return (words[at / 64] >> at % 64 & 1) != 0; }
  void add(uint32_t at) { words[at / 64] |= uint64_t{1} << at % 64; }
  void drop(uint32_t at) { words[at / 64] &= ~(uint64_t{1} << at % 64); }
  void add(const Bits& more) {
    for (int i = 0; i < kWords; ++i) words[i] |= more.words[i];
  }
  uint32_t first() const {
    return words[0] != 0 ? static_cast<uint32_t>(__builtin_ctzll(words[0]))
                         : 64 + static_cast<uint32_t>(__builtin_ctzll(words[1]));
  }
  uint64_t count() const {
    return static_cast<uint64_t>(__builtin_popcountll(words[0]) + __builtin_popcountll(words[1]));
  }
};
static_assert(kWords == 2);

struct Chunk;
// A block is in one of the sets: free, the program's, freed (since the last synchronisation began), or waiting for the
// one under way.
struct Page {
  Bits free, live, freed, waiting;
  Page *next, *previous;  // in the list of its size, while it has free blocks
  Page *next_freed, *next_waiting;
  Chunk* chunk;
  uint32_t block_bytes;            // 0: the page has no size yet
  uint16_t less_one[kWords * 64];  // bytes that the program asked for, less 1
};
struct Heap;
struct Chunk {
  uint64_t begin;
  Heap* heap;
  Chunk *next, *previous;  // of its heap
  uint32_t unused;         // bits of pages without a size
  Page pages[kPages];
};
static_assert(kPages == 32);
// The heap of one context.
struct Heap {
  uint64_t context;  // 0: the place is free
  int place;
  bool recycling;       // a thread waits for the context's work; taken under the lock, given back without it
  Chunk *roomy, *full;  // chunks with a page that has no size, and the others
  Page* usable[kClasses];  // pages with free blocks
  Page* freed;             // pages with freed blocks
  uint64_t freed_bytes, bytes;
};

uint32_t g_lock;
Heap g_heaps[kHeaps];

// Chunks by address, in two levels: at most one chunk begins in each stretch of 2 MiB.
constexpr int kLeafBits = 14;
struct Leaf {
  Chunk* chunks[1 << kLeafBits];
};
Leaf* g_leaves[1 << kLeafBits];
constexpr uint64_t kReach = kChunkBytes << (2 * kLeafBits);

Chunk** place_of_chunk(uint64_t address, bool make) {
  if (address >= kReach) return nullptr;
  const uint64_t stretch = address / kChunkBytes;
  Leaf*& leaf = g_leaves[stretch >> kLeafBits];
  if (leaf == nullptr && make) {
    void* memory = mmap(nullptr, sizeof(Leaf), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory != MAP_FAILED) leaf = static_cast<Leaf*>(memory);
  }
  return leaf == nullptr ? nullptr : &leaf->chunks[stretch & ((1 << kLeafBits) - 1)];
}
Chunk* chunk_of(uint64_t address) {
  Chunk** here = place_of_chunk(address, false);
  if (here != nullptr && *here != nullptr && (*here)->begin <= address) return *here;
  Chunk** before = address < kChunkBytes ? nullptr : place_of_chunk(address - kChunkBytes, false);
  return before != nullptr && *before != nullptr && address - (*before)->begin < kChunkBytes ? *before
                                                                                             : nullptr;
}

// The heap of a context; null: it has none, or there is no place for another.
Heap* heap_of(uint64_t context, int place, bool make) {
  Heap* free = nullptr;
  for (Heap& heap : g_heaps) {
    if (heap.context == context) return &heap;
    if (heap.context == 0 && free == nullptr) free = &heap;
  }
  if (!make || free == nullptr) return nullptr;
  free->place = place;
  store(free->context, context);
  return free;
}

// ---- lists, under the lock
// ------------------------------------------------------------------------------------------------------------

template <class Item>
void link(Item*& head, Item* item) {
  item->previous = nullptr;
  item->next = head;
  if (head != nullptr) head->previous = item;
  head = item;
}
template <class Item>
void unlink(Item*& head, Item* item) {
  (item->previous != nullptr ? item->previous->next : head) = item->next;
  if (item->next != nullptr) item->next->previous = item->previous;
}

Page*& list_of(Page* page) {
  return page->chunk->heap->usable[kClassOf.of[page->block_bytes / kStep]];
}

// A page for blocks of that size; null: every chunk is in use.
Page* new_page(Heap& heap, int cls) {
  Chunk* const chunk = heap.roomy;
  if (chunk == nullptr) return nullptr;
  const int number = __builtin_ctz(chunk->unused);
  chunk->unused &= ~(1U << number);
  if (chunk->unused == 0) {
    unlink(heap.roomy, chunk);
    link(heap.full, chunk);
  }
  Page& page = chunk->pages[number];
  std::memset(static_cast<void*>(&page), 0, offsetof(Page, less_one));
  page.chunk = chunk;
  page.block_bytes = static_cast<uint32_t>(kSizes[cls] * kStep);
  for (uint32_t at = 0; at < kPageBytes / page.block_bytes; ++at) page.free.add(at);
  link(heap.usable[cls], &page);
  return &page;
}

// The page that has an address, and the number of the block there.
Page& page_at(Chunk& chunk, uint64_t address, uint32_t* out_block, uint32_t* out_offset) {
  const auto offset = static_cast<uint32_t>(address - chunk.begin);
  Page& page = chunk.pages[offset / kPageBytes];
  const auto within = static_cast<uint32_t>(offset % kPageBytes);
  *out_block = page.block_bytes == 0 ? 0 : within / page.block_bytes;
  *out_offset = page.block_bytes == 0 ? 0 : within % page.block_bytes;
  return page;
}

void rest(Heap& heap, Page& page, const Bits& blocks) {
  if (page.freed.none()) {
    page.next_freed = heap.freed;
    heap.freed = &page;
  }
  page.freed.add(blocks);
  heap.freed_bytes += blocks.count() * page.block_bytes;
}

// ---- chunks -------------------------------------------------------------------------------------------------------------------------

// The chunk leaves the books of the heap; the driver has it still.
void remove(Chunk* chunk) {
  *place_of_chunk(chunk->begin, false) = nullptr;
  unlink(chunk->unused == 0 ? chunk->heap->full : chunk->heap->roomy, chunk);
  chunk->heap->bytes -= kChunkBytes;
  store(g_small_chunks, g_small_chunks - 1);
}
void drop(Chunk* chunk) {
  munmap(chunk, sizeof(Chunk));
}

bool add_chunk(const Current& at) {
  uint64_t address = 0;
  void* memory = mmap(nullptr, sizeof(Chunk), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return false;
  auto* chunk = static_cast<Chunk*>(memory);
  if (allocate_large(at, kChunkBytes, &address, false) != kSuccess) {
    drop(chunk);
    return false;
  }
  {
    const Locked lock(g_lock);
    Heap* heap = heap_of(at.context, at.place, true);
    Chunk** place = heap == nullptr ? nullptr : place_of_chunk(address, true);
    if (place != nullptr && *place == nullptr) {
      chunk->begin = address;
      chunk->heap = heap;
      chunk->unused = UINT32_MAX;
      *place = chunk;
      link(heap->roomy, chunk);
      heap->bytes += kChunkBytes;
      store(g_small_chunks, g_small_chunks + 1);
      return true;
    }
  }
  free_large(address);
  drop(chunk);
  return false;
}

// Makes the blocks that waited usable. Pages without blocks lose their size. Chunks without pages leave the heap, except
// `keep` of them; returns the list of those that left.
Chunk* recycle_pages(Heap& heap, Page* waiting, int keep) {
  for (Page *page = waiting, *next = nullptr; page != nullptr; page = next) {
    next = page->next_waiting;
    if (page->free.none()) link(list_of(page), page);
    page->free.add(page->waiting);
    page->waiting = {};
    if (!page->live.none() || !page->freed.none()) continue;
    unlink(list_of(page), page);
    page->block_bytes = 0;
    Chunk* const chunk = page->chunk;
    if (chunk->unused == 0) {
      unlink(heap.full, chunk);
      link(heap.roomy, chunk);
    }
    chunk->unused |= 1U << (page - chunk->pages);
  }
  Chunk* gone = nullptr;
  for (Chunk *chunk = heap.roomy, *next = nullptr; chunk != nullptr; chunk = next) {
    next = chunk->next;
    if (chunk->unused != UINT32_MAX || keep-- > 0) continue;
    remove(chunk);
    chunk->next = gone;
    gone = chunk;
  }
  return gone;
}

// Waits for the work that may use the heap, so that the blocks that were freed before can be used. Chunks without
// blocks go back to the driver, but for `keep`.
Result recycle(Heap& heap, int keep, bool* out_gained) {
  Page* waiting = nullptr;
  uint64_t context = 0;
  {
    const Locked lock(g_lock);
    if (load(heap.recycling) || heap.context == 0 || is_capturing_any()) return kSuccess;
    store(heap.recycling, true);
    context = heap.context;
    for (Page* page = heap.freed; page != nullptr; page = page->next_freed) {
      page->waiting = page->freed;
      page->freed = {};
      page->next_waiting = waiting;
      waiting = page;
    }
    heap.freed = nullptr;
    heap.freed_bytes = 0;
  }
  Result result = kSuccess;
  if (waiting != nullptr) {
    // The work of other contexts that reach the memory counts too.
    synchronize_others(context, reached_by(heap.place) | uint64_t{1} << seat_of(heap.place));
    const InContext there(context);
    result = there.is() ? real(kEntry_cuCtxSynchronize) : kInvalidValue;
  }
  Chunk* gone = nullptr;
  {
    const Locked lock(g_lock);
    if (result == kSuccess) {
      gone = recycle_pages(heap, waiting, keep);
    } else {
      for (Page *page = waiting, *next = nullptr; page != nullptr; page = next) {
        next = page->next_waiting;
        const Bits blocks = page->waiting;
        page->waiting = {};
        rest(heap, *page, blocks);
      }
    }
  }
  *out_gained = result == kSuccess && (waiting != nullptr || gone != nullptr);
  if (gone != nullptr) {
    const InContext there(context);
    for (Chunk* next = nullptr; gone != nullptr; gone = next) {
      next = gone->next;
      free_large(gone->begin);
      drop(gone);
    }
  }
  store(heap.recycling, false);
  return result;
}

// The same after another thread has finished.
bool recycle_after_others(Heap& heap) {
  bool gained = false;
  while (load(heap.recycling)) sched_yield();
  recycle(heap, 0, &gained);
  return gained;
}

}  // namespace

bool allocate_small(const Current& at, uint64_t bytes, void* out_address) {
  if (at.place < 0 || at.context == 0 || out_address == nullptr) return false;
  const int cls = kClassOf.of[(bytes + kStep - 1) / kStep];
  for (int attempt = 0;; ++attempt) {
    {
      const Locked lock(g_lock);
      Heap* heap = heap_of(at.context, at.place, false);
      Page* page = heap == nullptr ? nullptr : heap->usable[cls];
      if (page == nullptr && heap != nullptr) page = new_page(*heap, cls);
      if (page != nullptr) {
        const uint32_t block = page->free.first();
        page->free.drop(block);
        page->live.add(block);
        page->less_one[block] = static_cast<uint16_t>(bytes - 1);
        if (page->free.none()) unlink(heap->usable[cls], page);
        const uint64_t address = page->chunk->begin +
                                 static_cast<uint64_t>(page - page->chunk->pages) * kPageBytes +
                                 uint64_t{block} * page->block_bytes;
        std::memcpy(out_address, &address, sizeof address);
        return true;
      }
    }
    // A chunk that was refused may have made the heap give blocks back on the way.
    if (attempt == 2) return false;
    if (!add_chunk(at)) attempt = 1;
  }
}

bool free_of_heap(uint64_t address, const Ordered& ordered, Result* out_result) {
  group();
  if (ordered.is) {
    // The heap's context does not wait for a stream of another context.
    uint64_t context = 0;
    void* of_stream = nullptr;
    {
      const Locked lock(g_lock);
      Chunk* const chunk = chunk_of(address);
      if (chunk == nullptr) return false;
      context = chunk->heap->context;
    }
    real(ordered.per_thread ? kEntry_cuStreamGetCtx_ptsz : kEntry_cuStreamGetCtx, ordered.stream, &of_stream);
    if (green_of(reinterpret_cast<uint64_t>(of_stream)).primary != context)
      real(ordered.per_thread ? kEntry_cuStreamSynchronize_ptsz : kEntry_cuStreamSynchronize, ordered.stream);
  }
  Heap* due = nullptr;
  {
    const Locked lock(g_lock);
    Chunk* const chunk = chunk_of(address);
    if (chunk == nullptr) return false;
    uint32_t block = 0, offset = 0;
    Page& page = page_at(*chunk, address, &block, &offset);
    *out_result = kInvalidValue;
    if (page.block_bytes == 0 || offset != 0 || !page.live.has(block)) return true;
    Heap& heap = *chunk->heap;
    page.live.drop(block);
    Bits one{};
    one.add(block);
    rest(heap, page, one);
    const uint64_t most = heap.bytes / 8 > kLeastResting ? heap.bytes / 8 : kLeastResting;
    if (heap.freed_bytes >= most && !load(heap.recycling)) due = &heap;
  }
  bool gained = false;
  *out_result = __builtin_expect(due == nullptr, 1) ? kSuccess : recycle(*due, 1, &gained);
  return true;
}

bool find_small(uint64_t address, uint64_t* out_base, uint64_t* out_bytes) {
  *out_base = *out_bytes = 0;
  if (!has_small()) return false;
  const Locked lock(g_lock);
  Chunk* const chunk = chunk_of(address);
  if (chunk == nullptr) return false;
  uint32_t block = 0, offset = 0;
  const Page& page = page_at(*chunk, address, &block, &offset);
  if (page.block_bytes == 0 || !page.live.has(block) || offset > page.less_one[block]) return true;
  *out_base = address - offset;
  *out_bytes = uint64_t{page.less_one[block]} + 1;
  return true;
}

bool give_back_small(int place) {
  bool any = false;
  if (has_small())
    for (Heap& heap : g_heaps)
      if (load(heap.context) != 0 && heap.place == place) any = recycle_after_others(heap) || any;
  return any;
}

void leave_small(uint64_t context) {
  if (has_small() && context != 0)
    for (Heap& heap : g_heaps)
      if (load(heap.context) == context) recycle_after_others(heap);
}

void forget_small(uint64_t context) {
  for (Heap& heap : g_heaps) {
    if (context == 0 || load(heap.context) != context) continue;
    while (load(heap.recycling)) sched_yield();
    const Locked lock(g_lock);
    while (Chunk* chunk = heap.roomy != nullptr ? heap.roomy : heap.full) {
      remove(chunk);
      drop(chunk);
    }
    heap = Heap{};
  }
}

void forget_small_in_child() {
  store(g_lock, 0);
  for (Heap& heap : g_heaps) {
    store(heap.recycling, false);
    forget_small(heap.context);
  }
}

}  // namespace gpushare::shim
