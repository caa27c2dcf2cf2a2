// model_file.hpp: what `gpushare plan` reads: the layers of a model and their execution times.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.hpp"

namespace gpushare::cli {

// In execution order.
struct ModelLayer {
  std::string name;
  uint64_t bytes = 0;
};

// CSV with the header `layer,type,megabytes`; a megabyte is 2^20 bytes. Names are unique. Errors:
// MALFORMED_INPUT naming file, line, field and what is allowed.
base::Result<std::vector<ModelLayer>> parse_layer_csv(std::string_view text, const std::string& file);

// A .csv as above, a .safetensors file or a .safetensors.index.json: each tensor is a layer, in the order of
// its bytes. Errors: NOT_FOUND, IO_ERROR, MALFORMED_INPUT; INVALID_ARGUMENT for another kind of file.
base::Result<std::vector<ModelLayer>> read_model_layers(const std::string& path);

// Puts `layers` into the order of `text`: a layer's name a line, blank lines and what follows a '#' at a line's
// beginning left out. Every layer must be named, once. Errors: MALFORMED_INPUT naming file, line and name.
base::Status apply_order(std::string_view text, const std::string& file, std::vector<ModelLayer>* layers);

// Puts `layers` into the order that their names tell (loader/order.hpp).
void sort_by_names(std::vector<ModelLayer>* layers);

// CSV with the header `layer,exec_ms`, each layer of the model once, in any order. Returns milliseconds in
// the model's order. Errors: MALFORMED_INPUT as above.
base::Result<std::vector<double>> parse_execution_times(std::string_view text, const std::string& file,
                                                        const std::vector<ModelLayer>& layers);

}  // namespace gpushare::cli
