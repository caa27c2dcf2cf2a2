// Pickles of any bytes: an error that names the byte, or a value that can be written as JSON.
// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "cli/pickle.hpp"

using namespace gpushare;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto parsed = cli::parse_pickle(text, "fuzz.pickle", {"frames"}, 1'000'000);
  if (!parsed.ok()) {
    if (parsed.status().message().find("byte") == std::string::npos) std::abort();
    return 0;
  }
  if (parsed->dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).empty()) std::abort();
  return 0;
}
