// Scheduling policies as reservations: a gang, a soft constraint, affinity, and what the table says when something cannot be.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <gpushare/cluster.hpp>

namespace gs = gpushare;

int main() {
  try {
    gs::ReservationTable table;
    table.add_node("node1", R"({"gpu": 4, "cpu": 32})");
    table.add_node("node2", R"({"gpu": 4, "cpu": 32})");
    table.add_node("node3", R"({"cpu": 64})");

    // Gang: eight workers at once, or none.
    const uint64_t gang =
        table.submit(R"({"owner": "training", "parts": [{"needs": {"gpu": 1}, "count": 8}]})");
    std::printf("gang: %s\n", table.wait(gang).c_str());

    // Soft constraint: a GPU if one is free, else a CPU.
    const uint64_t soft = table.submit(R"({"owner": "evaluation", "alternatives": [
        {"parts": [{"needs": {"gpu": 1}}]}, {"parts": [{"needs": {"cpu": 8}}]}]})");
    std::printf("soft: %s\n", table.wait(soft).c_str());

    // Affinity: a job runs where the cache is. The holder of the cache sets the resource; others ask for it.
    table.set("cache", "near-cache", 1e9, R"({"any_of": [{"needs": {"cpu": 64}}]})");
    const uint64_t near =
        table.submit(R"({"owner": "loader", "parts": [{"needs": {"near-cache": 1, "cpu": 4}}]})");
    std::printf("near: %s\n", table.wait(near).c_str());

    // Anti-affinity on more nodes than have GPUs: said at once instead of a wait without end.
    std::printf(
        "apart: %s\n",
        table.explain(R"({"owner": "serving", "parts": [{"needs": {"gpu": 1}, "count": 3, "apart": true}]})")
            .c_str());
    table.release(gang);
    table.end_owner("cache");
    std::printf("status: %s\n", table.status().c_str());
  } catch (const gs::ClusterError& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
