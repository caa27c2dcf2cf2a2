// Interference tables of any bytes.
// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "sim/interference.hpp"

using namespace gpushare;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto table =
      sim::InterferenceTable::parse(std::string_view(reinterpret_cast<const char*>(data), size), "fuzz.json");
  if (!table.ok()) return table.status().message().empty() ? std::abort(), 0 : 0;
  for (size_t i = 0; i < table->size(); ++i)
    for (size_t j = 0; j < table->size(); ++j)
      if (!(table->pair_rate(i, j) >= 0 && table->pair_rate(i, j) <= 1)) std::abort();
  return 0;
}
