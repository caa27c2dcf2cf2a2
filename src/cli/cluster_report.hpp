// cluster_report.hpp: a result of `gpushare cluster run` as one HTML page that needs nothing else, in the style of report.hpp.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "cluster/kinds.hpp"

namespace gpushare::cli {

// `spans` are of the last result; empty leaves their picture out.
std::string render_cluster_report(const nlohmann::ordered_json& document,
                                  const std::vector<cluster::PlaySpan>& spans);

}  // namespace gpushare::cli
