// figures_text.hpp: the figures of figures.hpp as families of metrics: under the same names in a process and at the daemon.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>
#include <vector>

#include "base/figures.hpp"
#include "base/metrics_text.hpp"

namespace gpushare::base {

// Histograms of sessions, each with its labels. A session without an iteration has none.
void write_iterations(MetricsText& out,
                      const std::vector<std::pair<MetricsText::Labels, IterationCounts>>& of);
void write_requests(MetricsText& out, const std::vector<std::pair<MetricsText::Labels, RequestCounts>>& of);

}  // namespace gpushare::base
