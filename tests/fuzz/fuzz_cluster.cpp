// Cluster documents of any bytes, decided by every scheduler of their kind, through the C face.
// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "gpushare/cluster.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size > 4096) return 0;
  char* out = nullptr;
  const int32_t status = gpushare_cluster_plan(reinterpret_cast<const char*>(data), size, nullptr, &out);
  if ((status == GPUSHARE_OK) != (out != nullptr)) std::abort();
  if (status != GPUSHARE_OK && std::strlen(gpushare_cluster_last_error_message()) == 0) std::abort();
  if (status == GPUSHARE_INTERNAL) std::abort();
  gpushare_cluster_text_free(out);
  if (size == 0) {
    if (gpushare_cluster_schema(&out) != GPUSHARE_OK) std::abort();
    gpushare_cluster_text_free(out);
  }
  return 0;
}
