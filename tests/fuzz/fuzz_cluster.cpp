// Cluster documents of any bytes, decided by every scheduler of their kind, through the C face.
// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "gpushare/cluster.h"

// The bytes as a request, a place and the resources of a node.
static void reserve(const std::string& text) {
  gpushare_cluster_table* table = nullptr;
  if (gpushare_cluster_table_create(&table) != GPUSHARE_OK) std::abort();
  gpushare_cluster_table_add_node(table, "a", "{\"gpu\": 4, \"cpu\": 8}");
  gpushare_cluster_table_add_node(table, "b", text.c_str());
  gpushare_cluster_table_set(table, "x", "name", 2, text.c_str());
  char* out = nullptr;
  if (gpushare_cluster_table_explain(table, text.c_str(), &out) == GPUSHARE_OK && out == nullptr)
    std::abort();
  gpushare_cluster_text_free(out);
  uint64_t ids[2] = {0, 0};
  for (uint64_t& id : ids) {
    if (gpushare_cluster_reservation_submit(table, text.c_str(), &id) == GPUSHARE_INTERNAL) std::abort();
    out = nullptr;
    if (gpushare_cluster_reservation_wait(table, id, 0, &out) == GPUSHARE_OK && out == nullptr) std::abort();
    gpushare_cluster_text_free(out);
    gpushare_cluster_reservation_renew(table, id);
  }
  gpushare_cluster_reservation_cancel(table, ids[1]);
  gpushare_cluster_table_lose_node(table, "a");
  gpushare_cluster_reservation_release(table, ids[0]);
  gpushare_cluster_table_end_owner(table, "x");
  if (gpushare_cluster_table_status(table, &out) != GPUSHARE_OK) std::abort();
  gpushare_cluster_text_free(out);
  gpushare_cluster_table_release(table);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size > 4096) return 0;
  char* out = nullptr;
  const int32_t status = gpushare_cluster_plan(reinterpret_cast<const char*>(data), size, nullptr, &out);
  if ((status == GPUSHARE_OK) != (out != nullptr)) std::abort();
  if (status != GPUSHARE_OK && std::strlen(gpushare_cluster_last_error_message()) == 0) std::abort();
  if (status == GPUSHARE_INTERNAL) std::abort();
  gpushare_cluster_text_free(out);
  out = nullptr;
  reserve(std::string(reinterpret_cast<const char*>(data), size));
  if (size == 0) {
    if (gpushare_cluster_schema(&out) != GPUSHARE_OK) std::abort();
    gpushare_cluster_text_free(out);
  }
  return 0;
}
