// graphs.hpp: memory of graphs. Allocation nodes count from the instantiation of their graph on. The end of the executable
// graph frees nothing that is live, and the driver keeps freed memory for other graphs until it is trimmed. So the bytes
// of a graph that has gone stay counted for as long as the driver says that it has them.
//
// Threads: any. The driver is called with no lock held.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace gpushare::shim {

// Notes that an executable graph with so many bytes of allocation nodes has gone. Call settle_graphs() afterwards.
void leave_graph(int place, uint64_t bytes);
// Asks the driver how much graph memory it has on the device, and discharges the bytes of gone graphs that it has no
// more. `trim`: the driver first gives freed memory back to the device. True: something was discharged.
bool settle_graphs(int place, bool trim);
// The same for each device; without a trim.
void settle_all_graphs();
void forget_graphs_in_child();

}  // namespace gpushare::shim
