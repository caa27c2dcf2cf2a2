// SPDX-License-Identifier: Apache-2.0
#include "memory/placement.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <map>
#include <numeric>

#include "base/clock.hpp"
#include "memory/heap.hpp"

namespace gpushare::memory {
namespace {

using Item = PlacementItem;

// The number of comparisons of two buffers beyond which no further order of all buffers is tried. About 10^6 buffers take as
// many for a single order.
constexpr uint64_t kOrdersWork = 2'500'000'000;

// xorshift64*: small, deterministic everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull | 1) {}
  uint64_t next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545F4914F6CDD1Dull;
  }
  uint32_t below(uint32_t bound) { return static_cast<uint32_t>((next() >> 32) * bound >> 32); }
  // Roughly normal (sum of four uniforms), standard deviation 1.
  double normal() {
    double sum = 0;
    for (int k = 0; k < 4; ++k) sum += static_cast<double>(next() >> 11) * 0x1p-53;
    return (sum - 2.0) * 1.7320508;
  }

 private:
  uint64_t state_;
};

// Items sorted by offset, in chunks so that an insertion moves little.
class OffsetList {
 public:
  struct Placed {
    uint32_t offset, end, lower, upper;
  };
  void insert(const Placed& placed) {
    // The last chunk that begins at or below it.
    size_t c =
        static_cast<size_t>(std::upper_bound(first_.begin(), first_.end(), placed.offset) - first_.begin());
    if (c == 0) {
      if (first_.empty()) {
        order_.push_back(0);
        first_.push_back(placed.offset);
        chunks_.emplace_back();
      }
      first_[0] = placed.offset;
    } else {
      --c;
    }
    Chunk* chunk = &chunks_[order_[c]];
    if (chunk->count == kChunk) {
      Chunk upper;
      upper.count = kChunk / 2;
      std::copy(chunk->items + kChunk / 2, chunk->items + kChunk, upper.items);
      chunk->count = kChunk / 2;
      const auto next = static_cast<std::ptrdiff_t>(c + 1);
      order_.insert(order_.begin() + next, static_cast<uint32_t>(chunks_.size()));
      first_.insert(first_.begin() + next, upper.items[0].offset);
      chunks_.push_back(upper);
      if (placed.offset >= upper.items[0].offset) ++c;
      chunk = &chunks_[order_[c]];
    }
    Placed* const end = chunk->items + chunk->count;
    Placed* const at = std::upper_bound(chunk->items, end, placed.offset,
                                        [](uint32_t value, const Placed& p) { return value < p.offset; });
    std::copy_backward(at, end, end + 1);
    *at = placed;
    ++chunk->count;
  }
  // The lowest offset at which `item` fits; adds the number of comparisons to *work.
  uint32_t lowest_fit(const Item& item, uint64_t* work) const {
    uint32_t floor = 0;
    for (const uint32_t c : order_) {
      const Chunk& chunk = chunks_[c];
      *work += chunk.count;
      // The items that live at the same time are as good as random, so the only branch is the fit that ends the search. (No sum of an offset and a
      // size exceeds 2^32.)
      for (const Placed *p = chunk.items, *end = p + chunk.count; p != end; ++p) {
        const bool together = (p->lower < item.upper) & (p->upper > item.lower);
        if (together & (p->offset >= floor + item.size)) return floor;
        floor = std::max(floor, together ? p->end : 0);
      }
    }
    return floor;
  }

 private:
  static constexpr uint32_t kChunk = 64;
  struct Chunk {
    uint32_t count = 0;
    Placed items[kChunk];
  };
  std::vector<Chunk> chunks_;
  std::vector<uint32_t> order_;  // chunk numbers by offset
  std::vector<uint32_t> first_;  // their lowest offsets
};

// Places items one by one, each at the lowest offset that fits. Most items are short-lived, so besides the
// list of all there is one for each part of the time axis, halved again and again: an item is compared only
// with those that touch the smallest part that holds its lifetime.
class Stacker {
 public:
  Stacker(uint32_t times, uint32_t leaves, uint64_t* work)
      : leaves_(leaves), width_(times / leaves + 1), lists_(size_t{2} * leaves), work_(work) {}
  // The most parts, a power of two, for which an item goes into few lists more than the levels: long lifetimes touch
  // many parts.
  static uint32_t leaves_for(uint32_t times, std::span<const Item> items) {
    uint32_t leaves = items.size() < 4096 ? 1 : 16;
    for (uint32_t more = 2 * leaves; leaves > 1 && more <= kMostLeaves && more * kItemsOfLeaf <= items.size();
         more *= 2) {
      uint64_t touched = 0;
      for (const Item& item : items)
        touched += (item.upper - 1) / (times / more + 1) - item.lower / (times / more + 1);
      if (touched > 8 * items.size()) break;
      leaves = more;
    }
    return leaves;
  }
  uint32_t place(const Item& item) {
    uint32_t first = item.lower / width_ + leaves_;
    uint32_t last = (item.upper - 1) / width_ + leaves_;
    uint32_t left = first, right = last;
    while (left != right) {
      left /= 2;
      right /= 2;
    }
    const uint32_t offset = lists_[left].lowest_fit(item, work_);
    for (; first != 0; first /= 2, last /= 2) {
      for (uint32_t part = first; part <= last; ++part)
        lists_[part].insert({offset, offset + item.size, item.lower, item.upper});
      *work_ += kInsertionWork * (last - first + 1);
    }
    return offset;
  }

 private:
  static constexpr uint64_t kInsertionWork = 64;  // in comparisons
  static constexpr uint32_t kMostLeaves = 1 << 14, kItemsOfLeaf = 64;
  uint32_t leaves_;  // a power of two
  uint32_t width_;
  std::vector<OffsetList> lists_;  // a heap-ordered binary tree: 1 the whole, leaves_.. the leaves
  uint64_t* work_;
};

struct Solver {
  explicit Solver(const PlacementOptions& o) : options(o), random(o.seed), ends_ns(0) {}

  const PlacementOptions& options;
  Random random;
  uint64_t ends_ns;              // of what is under way; 0: no limit
  mutable uint32_t asked = 0;    // how often the time was asked for
  mutable bool time_up = false;  // from then on
  uint32_t leaves = 1;           // of each Stacker
  std::vector<Item> items;
  std::vector<uint32_t> contention;  // largest load while the item lives
  unsigned shift = 0;                // bytes to granules
  uint32_t times = 0;                // distinct instants
  uint32_t lower_bound = 0;
  uint32_t target = 0;
  uint64_t work = 0;
  uint64_t order_ends = UINT64_MAX;  // work from which on the order under way is given up

  std::vector<uint32_t> best_offsets;
  uint32_t best = UINT32_MAX;
  const char* method = "";

  bool cancelled() const {
    return options.cancelled != nullptr && options.cancelled->load(std::memory_order_relaxed);
  }
  void limit_time(uint64_t began_ns, uint64_t time_limit_ns) {
    const bool any = options.time_limit_ns != 0;
    ends_ns = any ? began_ns + std::min(time_limit_ns, UINT64_MAX - began_ns) : 0;
    time_up = false;
  }
  bool stopped() const {
    constexpr uint32_t kAsks = 64;  // for one look at the clock
    if (ends_ns != 0 && !time_up && asked++ % kAsks == 0) time_up = base::host_now_ns() >= ends_ns;
    return ((time_up || work > order_ends) && best != UINT32_MAX) || cancelled();
  }
  bool done() const { return best <= target || work >= options.work_limit || stopped(); }

  void load(std::span<const Buffer> buffers, uint64_t total);
  std::vector<uint32_t> order_by(const std::vector<double>& priority,
                                 const std::vector<uint32_t>& members) const;
  uint32_t stack(const std::vector<uint32_t>& order, std::vector<uint32_t>* offsets, Stacker* stacker,
                 uint32_t give_up_above = UINT32_MAX);
  void keep(uint32_t arena, const std::vector<uint32_t>& offsets, const char* how);
  void online();
  void simple_orders(std::vector<double>* best_priority);
  void improve(const std::vector<double>& priority);
  void search_exactly();
  void search(const std::vector<uint32_t>& core, const std::vector<uint32_t>& rest,
              std::vector<double> priority);
};

void Solver::load(std::span<const Buffer> buffers, uint64_t total) {
  std::vector<uint64_t> instants;
  instants.reserve(2 * buffers.size());
  for (const Buffer& b : buffers) {
    instants.push_back(b.lower);
    instants.push_back(b.upper);
  }
  std::sort(instants.begin(), instants.end());
  instants.erase(std::unique(instants.begin(), instants.end()), instants.end());
  times = static_cast<uint32_t>(instants.size());
  const auto rank = [&](uint64_t time) {
    return static_cast<uint32_t>(std::lower_bound(instants.begin(), instants.end(), time) - instants.begin());
  };
  // 32-bit offsets: even the sum of all sizes must fit, so very large arenas are placed in coarser granules.
  shift = static_cast<unsigned>(std::countr_zero(options.granule_bytes));
  while ((total >> shift) + buffers.size() >= (uint64_t{1} << 31)) ++shift;
  std::vector<int64_t> delta(instants.size() + 1, 0);
  for (const Buffer& b : buffers) {
    items.push_back({rank(b.lower), rank(b.upper), static_cast<uint32_t>(((b.size_bytes - 1) >> shift) + 1)});
    delta[items.back().lower] += items.back().size;
    delta[items.back().upper] -= items.back().size;
  }
  std::vector<std::vector<uint32_t>> highest(1);  // sparse table: highest[k][t] = max load over [t, t + 2^k)
  int64_t load_now = 0;
  for (size_t t = 0; t < instants.size(); ++t) {
    load_now += delta[t];
    highest[0].push_back(static_cast<uint32_t>(load_now));
    lower_bound = std::max(lower_bound, highest[0].back());
  }
  for (size_t width = 2; width <= instants.size(); width *= 2) {
    const std::vector<uint32_t>& half = highest.back();
    std::vector<uint32_t> row(instants.size() - width + 1);
    for (size_t t = 0; t < row.size(); ++t) row[t] = std::max(half[t], half[t + width / 2]);
    highest.push_back(std::move(row));
  }
  for (const Item& item : items) {
    // (Lifetimes are not empty.)
    const unsigned k = 31u - static_cast<unsigned>(std::countl_zero((item.upper - item.lower) | 1u));
    contention.push_back(std::max(highest[k][item.lower], highest[k][item.upper - (1u << k)]));
  }
  leaves = Stacker::leaves_for(times, items);
  target = std::max(lower_bound,
                    static_cast<uint32_t>(std::min<uint64_t>(options.stop_at_bytes >> shift, UINT32_MAX)));
}

// Members by falling priority, then in time order, then as given.
std::vector<uint32_t> Solver::order_by(const std::vector<double>& priority,
                                       const std::vector<uint32_t>& members) const {
  std::vector<uint32_t> order = members;
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    if (priority[a] != priority[b]) return priority[a] > priority[b];
    if (items[a].lower != items[b].lower) return items[a].lower < items[b].lower;
    return a < b;
  });
  return order;
}

uint32_t Solver::stack(const std::vector<uint32_t>& order, std::vector<uint32_t>* offsets, Stacker* stacker,
                       uint32_t give_up_above) {
  uint32_t arena = 0;
  for (uint32_t i : order) {
    (*offsets)[i] = stacker->place(items[i]);
    arena = std::max(arena, (*offsets)[i] + items[i].size);
    if (arena > give_up_above || stopped()) return UINT32_MAX;
  }
  return arena;
}

void Solver::keep(uint32_t arena, const std::vector<uint32_t>& offsets, const char* how) {
  if (arena >= best) return;
  best = arena;
  best_offsets = offsets;
  method = how;
}

// Places the buffers as a heap without a limit would in the order of time. At one instant frees come before allocations.
void Solver::online() {
  std::vector<uint32_t> begins(items.size()), ends(items.size());
  std::iota(begins.begin(), begins.end(), 0u);
  std::iota(ends.begin(), ends.end(), 0u);
  std::stable_sort(begins.begin(), begins.end(),
                   [&](uint32_t a, uint32_t b) { return items[a].lower < items[b].lower; });
  std::stable_sort(ends.begin(), ends.end(),
                   [&](uint32_t a, uint32_t b) { return items[a].upper < items[b].upper; });
  HeapOptions heap_options;
  heap_options.granule_bytes = 1;
  heap_options.capacity_bytes = uint64_t{1} << 32;
  heap_options.index_offsets = false;
  heap_options.max_blocks = static_cast<uint32_t>(2 * items.size() + 4);
  auto heap = Heap::create(heap_options);
  if (!heap.ok()) return;
  std::vector<BlockHandle> blocks(items.size());
  std::vector<uint32_t> offsets(items.size());
  uint32_t arena = 0;
  size_t end = 0;
  for (const uint32_t i : begins) {
    for (; items[ends[end]].upper <= items[i].lower; ++end) (void)heap->free(blocks[ends[end]]);
    blocks[i] = heap->allocate(items[i].size);
    if (!blocks[i] || blocks[i].offset_bytes > UINT32_MAX / 2) return;
    offsets[i] = static_cast<uint32_t>(blocks[i].offset_bytes);
    arena = std::max(arena, offsets[i] + items[i].size);
  }
  keep(arena, offsets, "online");
}

void Solver::simple_orders(std::vector<double>* best_priority) {
  std::vector<uint32_t> all(items.size());
  std::iota(all.begin(), all.end(), 0u);
  std::vector<double> priority(items.size());
  std::vector<uint32_t> offsets(items.size());
  const char* const names[] = {"size", "weight", "lifetime"};
  uint32_t best_order = UINT32_MAX;
  uint64_t last_work = 0;  // of one order
  for (int kind = 0; kind < 3 && work + last_work <= kOrdersWork; ++kind) {
    const uint64_t before = work;
    for (size_t i = 0; i < items.size(); ++i) {
      const double life = items[i].upper - items[i].lower;
      const double size = items[i].size;
      priority[i] = kind == 0 ? size : kind == 1 ? size * std::sqrt(life) : life + size * 0x1p-40;
    }
    Stacker stacker(times, leaves, &work);
    order_ends = work + std::min(options.order_work_limit, UINT64_MAX - work);
    const uint32_t arena = stack(order_by(priority, all), &offsets, &stacker);
    order_ends = UINT64_MAX;
    if (arena == UINT32_MAX) return;
    keep(arena, offsets, names[kind]);
    if (arena < best_order) {
      best_order = arena;
      *best_priority = priority;
    }
    if (best <= target) return;
    last_work = work - before;
  }
}

void Solver::improve(const std::vector<double>& priority) {
  std::vector<uint32_t> offsets(items.size());
  for (const double share : {0.9, 0.8, 0.6, 0.4, 0.0}) {
    const auto threshold = static_cast<uint32_t>(share * lower_bound);
    std::vector<uint32_t> core, rest;
    for (uint32_t i = 0; i < items.size(); ++i) (contention[i] >= threshold ? core : rest).push_back(i);
    if (share > 0) {
      if (core.size() < 64 || core.size() * 8 > items.size() * 7) continue;
      rest = order_by(priority, rest);
      Stacker stacker(times, leaves, &work);
      if (stack(order_by(priority, core), &offsets, &stacker, best) == UINT32_MAX ||
          stack(rest, &offsets, &stacker, best) == UINT32_MAX)
        continue;  // the rest finds no room over this core
    }
    search(core, rest, priority);
    if (done()) return;
  }
}

// Returns when done, or when orders that suit the core have left the rest no room kMaxFruitless times.
void Solver::search(const std::vector<uint32_t>& core, const std::vector<uint32_t>& rest,
                    std::vector<double> priority) {
  constexpr int kMaxFruitless = 4;
  // How much what sticks out is boosted, and from which share of the excess over the lower bound on it counts
  // as sticking out: hard pushes on much of it get large instances moving, soft ones on its tip finish small
  // ones.
  constexpr struct { double boost, share; } kWheels[] = {{30, 0.1}, {3, 0.9}, {300, 0.1}, {1.2, 0.9}};
  std::vector<uint32_t> offsets(items.size());
  const std::vector<double> initial = priority;
  std::vector<double> best_priority = priority;
  uint32_t core_best = UINT32_MAX;
  int fruitless = 0;
  const auto go_on = [&] { return !done() && fruitless < kMaxFruitless; };
  // The arena under `priority`: of the core if that is no better than the best, else of everything.
  const auto evaluate = [&] {
    work += core.size() * 16;  // the sort
    Stacker stacker(times, leaves, &work);
    uint32_t arena = stack(order_by(priority, core), &offsets, &stacker);
    if (arena < best) {
      const uint32_t outside = stack(rest, &offsets, &stacker);
      if (outside > arena) ++fruitless;
      arena = std::max(arena, outside);
      keep(arena, offsets, "search");
    }
    if (arena <= core_best) {
      core_best = arena;
      best_priority = priority;
    }
    return arena;
  };
  struct Change {
    uint32_t item;
    double old;
  };
  std::vector<Change> changes;
  const auto count = static_cast<uint32_t>(core.size());
  const int steps = count > 4096 ? 48 : 256;
  evaluate();
  for (int round = 0; go_on(); ++round) {
    priority = best_priority;
    for (int step = 0; step < (round == 0 ? 12 : steps) && go_on(); ++step) {  // random changes
      const uint32_t most = std::min(count, round % 3 == 0 ? 40u : round % 3 == 1 ? 8u : count / 64 + 1);
      changes.clear();
      for (uint32_t k = 0, changed = 1 + random.below(most); k < changed; ++k) {
        const uint32_t item = core[random.below(count)];
        changes.push_back({item, priority[item]});
        priority[item] *= std::exp2(3 * random.normal());
      }
      const uint32_t before = core_best;
      if (evaluate() > before)
        for (auto change = changes.rbegin(); change != changes.rend(); ++change)
          priority[change->item] = change->old;
    }
    const auto& wheel = kWheels[round % 4];
    priority = wheel.boost > 10 ? best_priority : initial;
    evaluate();
    for (int step = 0; step < steps && go_on(); ++step) {  // squeaky wheel
      const uint32_t high = lower_bound + static_cast<uint32_t>(wheel.share * (core_best - lower_bound));
      for (uint32_t i : core)
        if (offsets[i] + items[i].size > high) priority[i] *= wheel.boost;
      evaluate();
    }
    // Boosts pile up: keep priorities in the range of a double.
    const double top = *std::max_element(best_priority.begin(), best_priority.end());
    if (top > 1e100)
      for (double& p : best_priority) p /= top;
  }
}

// At the bound itself first, with half of the effort, then by bisection between there and the best known.
void Solver::search_exactly() {
  if (best <= target || best > UINT32_MAX / 2) return;
  uint64_t spent = 0, limit = options.exact_work_limit;
  if (ends_ns != 0)  // some 10^9 items a second
    limit = std::min(limit, ends_ns - std::min(ends_ns, base::host_now_ns()));
  uint32_t low = target, capacity = target;
  std::vector<uint32_t> offsets;
  while (spent < limit && capacity < best && !stopped()) {
    const uint64_t effort = (limit - spent) / 2 + 1;
    if (place_exactly(items, capacity, effort, &spent, &offsets, [this] { return stopped(); }) ==
        ExactOutcome::kFound) {
      uint32_t arena = 0;
      for (size_t i = 0; i < items.size(); ++i) arena = std::max(arena, offsets[i] + items[i].size);
      keep(arena, offsets, "exact");
    } else {
      low = capacity;
    }
    if (best - low <= lower_bound / 1024) break;
    capacity = low + (best - low) / 2;
  }
}

}  // namespace

base::Result<Placement> solve_placement(std::span<const Buffer> buffers, const PlacementOptions& options,
                                        std::span<const uint64_t> given) {
  if (!std::has_single_bit(options.granule_bytes) || options.granule_bytes > (uint64_t{1} << 30))
    return base::Status(GPUSHARE_INVALID_ARGUMENT, "placement granule must be a power of two from 1 to 2^30");
  if (buffers.size() >= (size_t{1} << 30))
    return base::Status(GPUSHARE_INVALID_ARGUMENT, "placement of 2^30 buffers or more");
  uint64_t total = 0;
  for (size_t i = 0; i < buffers.size(); ++i) {
    const Buffer& b = buffers[i];
    if (b.lower >= b.upper || b.size_bytes == 0 || b.size_bytes >= (uint64_t{1} << 62) - total)
      return base::Status(
          GPUSHARE_INVALID_ARGUMENT,
          base::format("buffer %zu: lifetime must not be empty, size must be above 0, and all sizes must "
                       "add up to less than 2^62",
                       i));
    total += b.size_bytes;
  }
  if (!given.empty()) {
    if (given.size() != buffers.size())
      return base::Status(GPUSHARE_INVALID_ARGUMENT, "given placement has another number of buffers");
    for (uint64_t offset : given)
      if (offset % options.granule_bytes != 0)
        return base::Status(GPUSHARE_INVALID_ARGUMENT,
                            "given placement has an offset that is no multiple of the granule");
    GPUSHARE_RETURN_IF_ERROR(check_placement(buffers, given, UINT64_MAX));
  }
  Placement placement;
  if (buffers.empty()) return placement;

  Solver solver(options);
  const uint64_t began_ns = base::host_now_ns();
  solver.load(buffers, total);
  const bool exact = options.exact_work_limit != 0 && buffers.size() <= kMaxExactItems;
  // The exact search has half of the time.
  solver.limit_time(began_ns, exact ? options.time_limit_ns / 2 : options.time_limit_ns);
  std::vector<double> priority;
  if (given.empty()) solver.online();
  if (solver.best > solver.target && !solver.stopped()) solver.simple_orders(&priority);
  if (!priority.empty() && !solver.done() && solver.work <= kOrdersWork) solver.improve(priority);
  solver.limit_time(began_ns, options.time_limit_ns);
  if (exact && !solver.cancelled()) solver.search_exactly();
  if (solver.cancelled()) return base::Status(GPUSHARE_CANCELLED, "placement: cancelled");
  placement.lower_bound_bytes = peak_bytes(buffers, options.granule_bytes);
  placement.arena_bytes = uint64_t{solver.best} << solver.shift;
  placement.method = solver.method;
  uint64_t given_arena = 0;
  for (size_t i = 0; i < given.size(); ++i)
    given_arena = std::max(given_arena, given[i] + ((buffers[i].size_bytes + options.granule_bytes - 1) &
                                                    ~(options.granule_bytes - 1)));
  if (!given.empty() && given_arena <= placement.arena_bytes) {
    placement.offsets_bytes.assign(given.begin(), given.end());
    placement.arena_bytes = given_arena;
    placement.method = "given";
  } else {
    placement.offsets_bytes.reserve(buffers.size());
    for (uint32_t offset : solver.best_offsets)
      placement.offsets_bytes.push_back(uint64_t{offset} << solver.shift);
  }
  return placement;
}

base::Status check_placement(std::span<const Buffer> buffers, std::span<const uint64_t> offsets_bytes,
                             uint64_t arena_bytes) {
  if (offsets_bytes.size() != buffers.size())
    return {GPUSHARE_INTERNAL, "placement has another number of buffers"};
  // Sweep over time with the live buffers by offset: only neighbours can overlap.
  std::vector<uint32_t> starts(buffers.size()), ends(buffers.size());
  std::iota(starts.begin(), starts.end(), 0u);
  std::iota(ends.begin(), ends.end(), 0u);
  std::sort(starts.begin(), starts.end(),
            [&](uint32_t a, uint32_t b) { return buffers[a].lower < buffers[b].lower; });
  std::sort(ends.begin(), ends.end(),
            [&](uint32_t a, uint32_t b) { return buffers[a].upper < buffers[b].upper; });
  std::map<uint64_t, uint32_t> live;
  size_t end = 0;
  for (uint32_t i : starts) {
    for (; buffers[ends[end]].upper <= buffers[i].lower; ++end) live.erase(offsets_bytes[ends[end]]);
    const uint64_t offset = offsets_bytes[i];
    if (offset > arena_bytes || buffers[i].size_bytes > arena_bytes - offset)
      return {GPUSHARE_INTERNAL, base::format("placement: buffer %u ends above the arena", i)};
    const auto next = live.lower_bound(offset);
    uint32_t other = i;
    if (next != live.end() && next->first - offset < buffers[i].size_bytes) other = next->second;
    if (next != live.begin()) {
      const auto before = std::prev(next);
      if (offset - before->first < buffers[before->second].size_bytes) other = before->second;
    }
    if (other != i)
      return {GPUSHARE_INTERNAL, base::format("placement: buffers %u and %u overlap", other, i)};
    live.emplace(offset, i);
  }
  return {};
}

uint64_t peak_bytes(std::span<const Buffer> buffers, uint64_t granule_bytes) {
  struct Event {
    uint64_t time;
    bool begins;
    uint64_t bytes;
  };
  std::vector<Event> events;
  for (const Buffer& b : buffers) {
    const uint64_t bytes = (b.size_bytes + granule_bytes - 1) & ~(granule_bytes - 1);
    events.push_back({b.lower, true, bytes});
    events.push_back({b.upper, false, bytes});
  }
  std::sort(events.begin(), events.end(), [](const Event& a, const Event& b) {
    return a.time != b.time ? a.time < b.time : a.begins < b.begins;
  });
  uint64_t now = 0, peak = 0;
  for (const Event& event : events) {
    now = event.begins ? now + event.bytes : now - event.bytes;
    peak = std::max(peak, now);
  }
  return peak;
}

}  // namespace gpushare::memory
