// graphs.cpp: allocation nodes of graphs count from instantiation on.
// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>

#include "shim/charged.hpp"

namespace gpushare::shim {
namespace {

constexpr int32_t kNodeGraph = 4, kNodeAllocation = 10;

// Bytes of the allocation nodes of a graph, and of the graphs in it; a device of theirs.
uint64_t graph_bytes(P graph, int depth, int* out_place) {
  uint64_t count = 0;
  if (graph == nullptr || depth > 16 ||
      real(kEntry_cuGraphGetNodes, graph, static_cast<void**>(nullptr), &count) != kSuccess || count == 0)
    return 0;
  auto** nodes = static_cast<void**>(std::malloc(count * sizeof(void*)));
  if (nodes == nullptr || real(kEntry_cuGraphGetNodes, graph, nodes, &count) != kSuccess) {
    std::free(nodes);
    return 0;
  }
  uint64_t bytes = 0;
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
      if (place < 0) continue;
      *out_place = place;
      bytes += rounded(words[13]);
    } else if (type == kNodeGraph) {
      void* child = nullptr;
      if (real(kEntry_cuGraphChildGraphNodeGetGraph, nodes[i], &child) == kSuccess)
        bytes += graph_bytes(child, depth + 1, out_place);
    }
  }
  std::free(nodes);
  return bytes;
}

template <class Call>
Result instantiated(P out_exec, P graph, Call call) {
  Current at = current();
  const uint64_t bytes = graph_bytes(graph, 0, &at.place);
  return bytes == 0 ? call() : charged<uint64_t>(Kind::graph, at, bytes, out_exec, call);
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
HOOK(cuGraphExecDestroy)(P a) {
  return freed(Kind::graph, reinterpret_cast<uint64_t>(a),
               [&] { return real(kEntry_cuGraphExecDestroy, a); });
}
}
