// SPDX-License-Identifier: Apache-2.0
#include "shim/table.hpp"

#include <cstring>

namespace gpushare::shim {

// A row whose class is none of the four does not compile here: decide what the shim does with it in driver_table.inc.
const EntryInfo kEntryInfo[kEntries] = {
#define GPUSHARE_ENTRY(cls, name, base, version, parameters, arguments) {#name, #base, version, Class::cls},
#define GPUSHARE_NAME(cls, name) {#name, nullptr, 0, Class::cls},
#include "shim/driver_table.inc"
#undef GPUSHARE_ENTRY
#undef GPUSHARE_NAME
};

int find_entry(const char* name) {
  // The entries are sorted by name, and behind them those known by name alone.
  const auto search = [name](int low, int high) {
    while (low < high) {
      const int middle = low + (high - low) / 2;
      const int order = std::strcmp(kEntryInfo[middle].name, name);
      if (order == 0) return middle;
      if (order < 0)
        low = middle + 1;
      else
        high = middle;
    }
    return -1;
  };
  int with_base = 0;
  for (int high = kEntries; with_base < high;) {
    const int middle = with_base + (high - with_base) / 2;
    if (kEntryInfo[middle].base != nullptr)
      with_base = middle + 1;
    else
      high = middle;
  }
  const int found = search(0, with_base);
  return found >= 0 ? found : search(with_base, kEntries);
}

}  // namespace gpushare::shim
