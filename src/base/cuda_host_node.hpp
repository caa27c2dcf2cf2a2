// cuda_host_node.hpp: finds the NUMA node of the host whose physical memory a CUDA driver maps behind device addresses.
// The cuda backend and the preload library both use it, each with its own way to the driver. Needs no C++ runtime.
// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace gpushare::base {

// The node; -1: there is no such memory, so that pinned memory has to do.
//   attribute(number, &value)  whether the driver knows the attribute of the device
//   gives(node)                whether it has really made a piece of memory there, which `gives` has released again
// What the driver says is not enough. Drivers before 12.8 do not know the attribute that tells of such memory, though they may have
// it; a machine without nodes answers -1 for the nearest, and its memory is that of node 0; and a container may not be allowed the
// memory of the nearest node.
template <class Attribute, class Gives>
int find_host_node(Attribute attribute, Gives gives) {
  constexpr int kNearestNode = 134, kHasMemoryOfNodes = 141;
  int has = 0, node = 0;
  if (attribute(kHasMemoryOfNodes, &has) && has == 0) return -1;
  if (!attribute(kNearestNode, &node) || node < 0) node = 0;
  if (gives(node)) return node;
  return node != 0 && gives(0) ? 0 : -1;
}

}  // namespace gpushare::base
