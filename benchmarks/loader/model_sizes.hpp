// model_sizes.hpp: layer sizes of real models from the shared data folder, or made ones where it is absent.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "base/units.hpp"
#include "sim/csv.hpp"

namespace gpushare::bench {

// Bytes of each layer of models/<name>.csv (layer,type,megabytes); empty if the file is not there.
inline std::vector<uint64_t> model_layer_bytes(const std::string& name) {
  std::vector<uint64_t> out;
  const std::string path = std::string(GPUSHARE_SHARED_DATA) + "/models/" + name + ".csv";
  const auto text = sim::read_text(path);
  if (!text.ok()) return out;
  const auto rows = sim::parse_csv(*text, path);
  if (!rows.ok()) return out;
  for (size_t i = 1; i < rows->size(); ++i) {
    if ((*rows)[i].fields.size() != 3) return {};
    const auto megabytes = base::parse_double((*rows)[i].fields[2]);
    if (!megabytes.ok()) return {};
    out.push_back(static_cast<uint64_t>(*megabytes * 1048576.0));
  }
  return out;
}

// Sizes over four orders of magnitude, as models have them.
inline std::vector<uint64_t> made_layer_bytes(size_t layers) {
  std::mt19937_64 random(20261121);
  std::lognormal_distribution<double> bytes(11.0, 2.0);
  std::vector<uint64_t> out(layers);
  for (uint64_t& size : out) size = static_cast<uint64_t>(bytes(random));
  return out;
}

}  // namespace gpushare::bench
