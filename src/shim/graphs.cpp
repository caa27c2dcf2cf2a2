// SPDX-License-Identifier: Apache-2.0
#include "shim/graphs.hpp"

#include <cstdlib>
#include <cstring>

#include "shim/charged.hpp"

namespace gpushare::shim {
namespace {

// Charged bytes of a device's graphs: of executable graphs that there are, and of those that have gone.
struct GraphMemory {
  uint32_t lock;
  uint64_t live, left;
};
GraphMemory g_memory[kDevices];

}  // namespace

void leave_graph(int place, uint64_t bytes) {
  if (!is_counted(place)) return;
  const Locked lock(g_memory[place].lock);
  g_memory[place].live -= bytes;
  g_memory[place].left += bytes;
}

bool settle_graphs(int place, bool trim) {
  constexpr uint32_t kReservedNow = 2;  // attribute of a device's graph memory
  if (!is_counted(place) || load(g_memory[place].left) == 0) return false;
  const int ordinal = ordinal_of(place);
  uint64_t reserved = 0, surplus = 0;
  if (trim) real(kEntry_cuDeviceGraphMemTrim, ordinal);
  if (ordinal < 0 || real(kEntry_cuDeviceGetGraphMemAttribute, ordinal, kReservedNow, &reserved) != kSuccess)
    return false;
  {
    GraphMemory& memory = g_memory[place];
    const Locked lock(memory.lock);
    surplus = memory.live + memory.left > reserved ? memory.live + memory.left - reserved : 0;
    if (surplus > memory.left) surplus = memory.left;
    memory.left -= surplus;
  }
  if (surplus != 0) discharge(place, surplus);
  return surplus != 0;
}

void settle_all_graphs() {
  for (int place = 0; place < kDevices; ++place) settle_graphs(place, false);
}

void forget_graphs_in_child() {
  std::memset(static_cast<void*>(g_memory), 0, sizeof g_memory);
}

namespace {

constexpr int32_t kNodeGraph = 4, kNodeAllocation = 10;

// Adds the bytes of the allocation nodes of a graph, and of the graphs in it, by their devices.
void add_nodes(P graph, int depth, uint64_t (&bytes)[kDevices]) {
  uint64_t count = 0;
  if (graph == nullptr || depth > 16 ||
      real(kEntry_cuGraphGetNodes, graph, static_cast<void**>(nullptr), &count) != kSuccess || count == 0)
    return;
  auto** nodes = static_cast<void**>(std::malloc(count * sizeof(void*)));
  if (nodes == nullptr || real(kEntry_cuGraphGetNodes, graph, nodes, &count) != kSuccess) {
    std::free(nodes);
    return;
  }
  for (uint64_t i = 0; i < count; ++i) {
    int32_t type = -1;
    if (real(kEntry_cuGraphNodeGetType, nodes[i], &type) != kSuccess) continue;
    if (type == kNodeAllocation) {
      // 120 bytes: properties of the pool (88), access (16), size, address.
      uint64_t words[16] = {};
      if (real(kEntry_cuGraphMemAllocNodeGetParams, nodes[i], &words[0]) != kSuccess) continue;
      LocatedProperties properties;
      std::memcpy(&properties, words, 16);
      const int place = place_in(properties);
      if (is_counted(place)) bytes[place] += rounded(words[13]);
    } else if (type == kNodeGraph) {
      void* child = nullptr;
      if (real(kEntry_cuGraphChildGraphNodeGetGraph, nodes[i], &child) == kSuccess)
        add_nodes(child, depth + 1, bytes);
    }
  }
  std::free(nodes);
}

// An executable graph is a block of each device that its nodes are of. The first has the graph's handle as its key and
// the places of the others in `other`; handles are addresses, and the keys of the others follow.
uint64_t key_of(uint64_t exec, int place, uint64_t places) {
  return (places & ((uint64_t{1} << place) - 1)) == 0 ? exec : exec + 1 + static_cast<uint64_t>(place);
}

template <class Call>
Result instantiated(P out_exec, P graph, Call call) {
  uint64_t bytes[kDevices] = {}, places = 0;
  add_nodes(graph, 0, bytes);
  const auto each = [&places](const auto& body) {
    for (int place = 0; place < kDevices; ++place)
      if ((places >> place & 1) != 0) body(place);
  };
  const auto undo = [&] { each([&](int place) { discharge(place, bytes[place]); }); };
  for (int place = 0; place < kDevices; ++place) {
    if (bytes[place] == 0) continue;
    if (!admit(place, bytes[place])) {
      undo();
      return kOutOfMemory;
    }
    places |= uint64_t{1} << place;
  }
  const Result result = call();
  if (result != kSuccess || out_exec == nullptr) {
    undo();
    return result;
  }
  uint64_t exec = 0;
  std::memcpy(&exec, out_exec, sizeof exec);
  const uint64_t context = places != 0 ? current().context : 0;
  each([&](int place) {
    Block block = block_of(Kind::graph, key_of(exec, place, places), bytes[place], {context, place});
    block.other = places;
    {
      const Locked lock(g_memory[place].lock);
      g_memory[place].live += bytes[place];
    }
    insert(block);
  });
  return result;
}

Result destroyed(uint64_t exec) {
  Block blocks[kDevices];
  int count = 0;
  if (take(Kind::graph, exec, &blocks[0])) {
    const uint64_t places = blocks[count++].other;
    for (int place = 0; place < kDevices; ++place)
      if (const uint64_t key = key_of(exec, place, places);
          (places >> place & 1) != 0 && key != exec && take(Kind::graph, key, &blocks[count]))
        ++count;
  }
  const Result result = real(kEntry_cuGraphExecDestroy, reinterpret_cast<P>(exec));
  for (int i = 0; i < count; ++i) {
    if (result == kSuccess) {
      leave_graph(blocks[i].device, blocks[i].bytes);
      settle_graphs(blocks[i].device, false);
    } else {
      insert(blocks[i]);
    }
  }
  return result;
}

}  // namespace
}  // namespace gpushare::shim

using namespace gpushare::shim;  // NOLINT(google-build-using-namespace): the functions below have C linkage

#define HOOK(name) Result gpushare_hook_##name
extern "C" {

HOOK(cuGraphInstantiate)(P a, P b, P c, P d, L e) {
  return instantiated(a, b, [&] { return real(kEntry_cuGraphInstantiate, a, b, c, d, e); });
}
HOOK(cuGraphInstantiate_v2)(P a, P b, P c, P d, L e) {
  return instantiated(a, b, [&] { return real(kEntry_cuGraphInstantiate_v2, a, b, c, d, e); });
}
HOOK(cuGraphInstantiateWithFlags)(P a, P b, L c) {
  return instantiated(a, b, [&] { return real(kEntry_cuGraphInstantiateWithFlags, a, b, c); });
}
HOOK(cuGraphInstantiateWithParams)(P a, P b, P c) {
  return instantiated(a, b, [&] { return real(kEntry_cuGraphInstantiateWithParams, a, b, c); });
}
HOOK(cuGraphInstantiateWithParams_ptsz)(P a, P b, P c) {
  return instantiated(a, b, [&] { return real(kEntry_cuGraphInstantiateWithParams_ptsz, a, b, c); });
}
HOOK(cuDeviceGraphMemTrim)(I a) {
  const Result result = real(kEntry_cuDeviceGraphMemTrim, a);
  if (result == kSuccess) settle_graphs(place_of(static_cast<int>(a)), false);
  return result;
}
HOOK(cuGraphExecDestroy)(P a) {
  return destroyed(reinterpret_cast<uint64_t>(a));
}
}
