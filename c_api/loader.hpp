// loader.hpp: what loader.cpp, model.cpp and switcher.cpp share.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "c_api/abi.hpp"
#include "loader/loader.hpp"

namespace gpushare::capi {

base::Result<loader::LinkCosts> read_link(const char* name, const gpushare_link_costs* in);

// Group ends and execution times are copied. `params` may be null.
base::Result<loader::LoadOptions> read_load_params(const gpushare_load_params* params, size_t layers);

gpushare_layer_info layer_info(const loader::Image& image, uint32_t layer, double execution_ms);

}  // namespace gpushare::capi
